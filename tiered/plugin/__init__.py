"""Composition root: builds the parts and wires them. ``open`` is the door of the API; ``attach`` starts tiering.

    from tiered.plugin import open

    with open("s3://bucket/prefix") as tier:
        for message in tier.read("orders", 3, start=1200):
            print(message.queue_offset, message.body)

docs/reading.md is the guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.plugin.tier import Tier, open  # noqa: A004 (the API's door)

if TYPE_CHECKING:
    from tiered.plugin.aio import AsyncTier, open_async
    from tiered.plugin.message import Message

__all__ = ["AsyncTier", "Message", "Tier", "open", "open_async"]


def __getattr__(name: str) -> object:
    """What not every command needs, imported when it is named."""
    if name in {"AsyncTier", "open_async"}:
        from tiered.plugin import aio  # noqa: PLC0415

        return getattr(aio, name)
    if name == "Message":
        from tiered.plugin.message import Message  # noqa: PLC0415

        return Message
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
