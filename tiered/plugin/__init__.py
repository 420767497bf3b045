"""Composition root: builds the parts and wires them. ``open`` is the door of the API; ``attach`` starts tiering.

    from tiered.plugin import open

    with open("s3://bucket/prefix") as tier:
        for message in tier.read("orders", 3, start=1200):
            print(message.queue_offset, message.body)

docs/reading.md is the guide.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tiered.plugin.aio import AsyncTier, open_async
    from tiered.plugin.message import Message
    from tiered.plugin.tier import Tier, open  # noqa: A004 (the API's door)

__all__ = ["AsyncTier", "Message", "Tier", "open", "open_async"]

_LIES_IN: Final = {
    "AsyncTier": "aio",
    "Message": "message",
    "Tier": "tier",
    "open": "tier",
    "open_async": "aio",
}


def __getattr__(name: str) -> object:
    """Names of the API, imported when they are named: a command that writes needs nothing of what reads."""
    if name in _LIES_IN:
        return getattr(import_module(f"{__name__}.{_LIES_IN[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
