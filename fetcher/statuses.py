"""How a read ends, and where the reader goes on: RocketMQ's statuses, and one of our own.

Pure. docs/reading.md has the table. What RocketMQ's tiered store gets wrong is not done here: a read that failed is never
told as "no message matched", and what is skipped over is always named.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from fetcher.policies import Side
    from tiered.local.face import RecordBatch
    from tiered.log.parts import Gap
    from tiered.model import QueueBounds


class GetStatus(Enum):
    """RocketMQ's ``GetMessageStatus`` by name, and ``TRY_AGAIN``."""

    FOUND = "FOUND"
    """There are messages."""
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    """What was looked at had no wanted message; there is more."""
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    """It expired while it was read."""
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    """It should be there, and its bytes are damaged."""
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    """Above the end."""
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    """At the end: the next message will be this one."""
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    """Below the minimum."""
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    """There is no such queue."""
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    """The queue never had a message."""
    TRY_AGAIN = "TRY_AGAIN"
    """It is there and cannot be read now; nothing has moved. Not RocketMQ's."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Messages that were found next to each other.

    Attributes:
        records: A batch.
        items: int64[n], numbers of its items that are wanted, ascending.
        side: Where it was read.
    """

    records: RecordBatch
    items: npt.NDArray[np.int64]
    side: Side

    def messages(self) -> Iterator[tuple[QueueOffset, memoryview]]:
        """Queue offset and raw record of each; messages of an inner batch share one."""
        records, view = self.records, memoryview(self.records.data).cast("B")
        for item in self.items.tolist():
            begin = int(records.positions[item])
            raw = view[begin : begin + int(records.sizes[item])]
            yield QueueOffset(records.base_offset + item), raw


@dataclass(frozen=True, slots=True, eq=False)
class GetResult:
    """Outcome of one read.

    Attributes:
        status: How it ended.
        next_begin: Where to read on.
        min_offset: Of the queue, over both sides; -1 without a queue.
        max_offset: One past its last message, likewise.
        pieces: What was found.
        missing: Queue offsets below ``next_begin`` that were skipped since they hold no message, and why.
        size_bytes: Of the records found, each counted once.
        error: Why it could not be read, for ``TRY_AGAIN`` and ``OFFSET_FOUND_NULL``.
    """

    status: GetStatus
    next_begin: QueueOffset
    min_offset: QueueOffset
    max_offset: QueueOffset
    pieces: tuple[Piece, ...] = ()
    missing: tuple[Gap, ...] = ()
    size_bytes: int = 0
    error: Exception | None = None

    @property
    def count(self) -> int:
        """Number of messages."""
        return sum(len(piece.items) for piece in self.pieces)

    def messages(self) -> Iterator[tuple[QueueOffset, memoryview]]:
        """Queue offset and raw record of each message."""
        for piece in self.pieces:
            yield from piece.messages()


def judge_offset(
    start: QueueOffset, bounds: QueueBounds | None
) -> tuple[GetStatus, QueueOffset] | None:
    """What is to be said of an offset before anything is read.

    Args:
        start: Where a reader wants to read.
        bounds: Of the queue; None: there is none.

    Returns:
        Status and where to go on; None: it is inside.
    """
    if bounds is None:
        return GetStatus.NO_MATCHED_LOGIC_QUEUE, start
    if bounds.end <= 0:
        return GetStatus.NO_MESSAGE_IN_QUEUE, start
    if start < bounds.min:
        return GetStatus.OFFSET_TOO_SMALL, bounds.min
    if start == bounds.end:
        return GetStatus.OFFSET_OVERFLOW_ONE, bounds.end
    if start > bounds.end:
        return GetStatus.OFFSET_OVERFLOW_BADLY, bounds.end
    return None
