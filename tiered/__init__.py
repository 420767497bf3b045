"""Tiered storage for RocketMQ-format message stores.

    import tiered

    with tiered.open("s3://bucket/prefix") as tier:
        for message in tier.read("orders", 3, start=1200):
            print(message.queue_offset, message.body)

docs/reading.md is the guide. Importing this package loads neither NumPy nor an S3 client nor Spark: what the names below
need is loaded when one of them is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from tiered.version import __version__ as __version__

if TYPE_CHECKING:
    from tiered.api.aio import AsyncTier, open_async
    from tiered.api.message import Message
    from tiered.api.tier import Tier, open  # noqa: A004 (the API's door)

__all__ = ["AsyncTier", "Message", "Tier", "open", "open_async"]

__distribution__ = "tieredmq"

_LIES_IN: Final = {
    "AsyncTier": "tiered.api.aio",
    "Message": "tiered.api.message",
    "Tier": "tiered.api.tier",
    "open": "tiered.api.tier",
    "open_async": "tiered.api.aio",
}


def __dir__() -> list[str]:
    """The names of the API, loaded or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> object:
    """A name of the API, imported when it is named: a command that writes needs nothing of what reads."""
    if name in _LIES_IN:
        return getattr(import_module(_LIES_IN[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
