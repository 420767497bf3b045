"""The words of the tier as types: offsets, positions and ordinals never mix (docs/ARCHITECTURE.md, "Words")."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, NewType, Self

from backends.lazy_dataclass import dataclass

QueueOffset = NewType("QueueOffset", int)
"""Ordinal of a message in its queue."""
PhysicalOffset = NewType("PhysicalOffset", int)
"""Byte address in the broker's local commit log."""
LogOffset = NewType("LogOffset", int)
"""Byte address in one queue's tiered commit log; ``log_offset = base_offset + position``."""
Position = NewType("Position", int)
"""Byte address inside one segment."""
TimestampMs = NewType("TimestampMs", int)
"""Milliseconds since 1970-01-01 UTC."""


class Closing:
    """What a ``with`` closes."""

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Give back what it holds."""
        raise NotImplementedError


class MessageQueue(NamedTuple):
    """One ordered stream of messages. A tuple: it is looked up more often than anything else here."""

    topic: str  # name as stored; bytes that are no UTF-8 are kept by surrogate escapes
    queue_id: int  # number of the queue in its topic, from 0

    def __str__(self) -> str:
        return f"{self.topic}/{self.queue_id}"


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Queue offsets ``[min, end)`` that can be read."""

    min: QueueOffset  # first message that can be read
    end: QueueOffset  # one past the last committed message; equal to ``min`` when there is none


class Boundary(Enum):
    """Which message a store time means, as a RocketMQ broker has it."""

    LOWER = "lower"
    """The first stored at or after it; the end when there is none."""
    UPPER = "upper"
    """The last stored at or before it; the first there is when there is none."""
