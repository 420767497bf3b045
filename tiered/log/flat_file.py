"""TieredFlatFile: a row of TieredFileSegments seen as one unbounded stream of bytes, as the journal has it.

A segment's bytes lie in the sections of bundles, so a place of a stream is a range of a section. The commit log of a queue
(``TieredCommitLog``) and its consume queue (``TieredConsumeQueue``) are two such streams over the same parts.

Values: made of an incarnation of a queue, and never changed; what is written since makes another. The writer needs none of
it but where the stream ends (``Tail``). From any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.log.sections import read_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore
    from tiered.log.parts import Parts, SectionRange
    from tiered.log.state import Incarnation
    from tiered.model import LogOffset, QueueOffset


@dataclass(frozen=True, slots=True)
class TieredFileSegment:
    """One file of a flat file: ``new``, then ``sealed``, then deleted."""

    base_offset: int  # byte address of its first byte in the flat file
    created_ms: int  # when its first part was committed
    sealed: bool  # no byte will be added
    parts: Parts  # what it consists of
    starts: npt.NDArray[np.int64]  # int64[n + 1], address of each part, and of the end
    of_items: bool  # its bytes are those of the items

    @classmethod
    def of(
        cls,
        base_offset: int,
        created_ms: int,
        sealed: bool,
        parts: Parts,
        sizes: npt.NDArray[np.int64],
        *,
        of_items: bool,
    ) -> TieredFileSegment:
        """A segment of parts of these sizes."""
        starts = np.concatenate(([0], np.cumsum(sizes))) + base_offset
        return cls(base_offset, created_ms, sealed, parts, starts, of_items)

    def ranges(self, start: int, end: int) -> list[SectionRange]:
        """Where addresses ``[start, end)`` lie; all of them must be committed."""
        assert self.base_offset <= start < end <= self.starts[-1]
        found: list[SectionRange] = []
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < end:
            first, stop = int(self.starts[number]), min(end, int(self.starts[number + 1]))
            part = self.parts[number]
            whole = part.index if self.of_items else part.log
            low, high = start - first, min(stop - first, whole.size_bytes)
            if (
                low < high
            ):  # else a part that holds nothing but holes, or where compaction was: no bytes
                found.append(whole.part_of(low, high))
            start, number = stop, number + 1
        return found


class TieredFlatFile:
    """A stream of bytes over segments, of which only the last is not sealed."""

    def __init__(self, start_offset: int, segments: Sequence[TieredFileSegment]) -> None:
        """A stream over these segments, in order; ``start_offset`` where there are none."""
        self._start = start_offset
        self.segments = tuple(segments)

    @property
    def commit_offset(self) -> int:
        """One past the last byte that is durable and named."""
        return int(self.segments[-1].starts[-1]) if self.segments else self._start

    def ranges(self, start: int, end: int) -> list[SectionRange]:
        """Where bytes ``[start, end)`` lie, across segment borders."""
        found: list[SectionRange] = []
        for segment in self.segments:
            low, high = max(start, segment.base_offset), min(end, int(segment.starts[-1]))
            if low < high:
                found += segment.ranges(low, high)
        return found

    def read_bytes(self, store: ObjectStore, prefix: str, start: int, end: int) -> memoryview:
        """Read committed bytes ``[start, end)``, checked."""
        chunks = [read_range(store, prefix, one) for one in self.ranges(start, end)]
        return chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))


# -- consume queue ------------------------------------------------------------------------------------
#
# TieredConsumeQueue: the index of one queue, 20 bytes an item, strictly contiguous in queue offsets.
#
# Item (big-endian), one per queue offset::
#
#     offset  size  type    field
#          0     8  int64   log_offset of the record
#          8     4  int32   size of the record; 0: a hole
#         12     8  int64   tag code; of a hole its reason (``tiered.local.interface.HoleReason``)
#
# Items of an inner batch name the same record. Byte address in the flat file = 20 · queue offset, so a queue that begins at
# offset 1,000 has its first byte at 20,000. After a gap a new segment begins at the offset behind it.
#
# Source:
#     RocketMQ ``MessageFormatUtil.CONSUME_QUEUE_UNIT_SIZE``; the local store's item has the same form with a physical
#     offset in the first field.

ITEM = np.dtype([("log_offset", ">i8"), ("size", ">i4"), ("tag_code", ">i8")])
ITEM_BYTES: Final = 20
assert ITEM.itemsize == ITEM_BYTES


def encode_items(
    log_offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    tag_codes: npt.NDArray[np.int64],
) -> bytes:
    """Items of records."""
    items = np.empty(len(sizes), ITEM)
    items["log_offset"] = log_offsets
    items["size"] = sizes
    items["tag_code"] = tag_codes
    return items.tobytes()


def moved_items(items: memoryview, by: int) -> memoryview | bytes:
    """Items of records that lie elsewhere in the log than they did, by so many bytes."""
    if not by:
        return items
    moved = np.frombuffer(items, ITEM).copy()
    moved["log_offset"][moved["size"] > 0] += by
    return moved.tobytes()


class TieredConsumeQueue(TieredFlatFile):
    """The consume queue of one incarnation of a queue."""

    @classmethod
    def load(cls, incarnation: Incarnation) -> TieredConsumeQueue:
        """As the journal has it."""
        segments = [
            TieredFileSegment.of(
                s.base_queue_offset * ITEM_BYTES,
                s.created_ms,
                s.sealed,
                s.parts,
                s.parts.column("count") * ITEM_BYTES,
                of_items=True,
            )
            for s in incarnation.segments
        ]
        return cls(incarnation.commit_offset * ITEM_BYTES, segments)

    def read(
        self, store: ObjectStore, prefix: str, start: QueueOffset, end: QueueOffset
    ) -> npt.NDArray[np.void]:
        """Items ``[start, end)``, none of which may lie in a gap. Checked bytes; errors as of ``read_bytes``."""
        return np.frombuffer(
            self.read_bytes(store, prefix, start * ITEM_BYTES, end * ITEM_BYTES), ITEM
        )


# -- commit log ---------------------------------------------------------------------------------------
#
# TieredCommitLog: the bytes of one queue's messages, in order, byte for byte as in the local log (invariant I3).


class TieredCommitLog(TieredFlatFile):
    """The commit log of one incarnation of a queue."""

    @classmethod
    def load(cls, incarnation: Incarnation) -> TieredCommitLog:
        """As the journal has it."""
        segments = [
            TieredFileSegment.of(
                s.base_offset,
                s.created_ms,
                s.sealed,
                s.parts,
                s.parts.column("log_bytes") + s.parts.column("log_gone"),
                of_items=False,
            )
            for s in incarnation.segments
        ]
        return cls(incarnation.log_end, segments)

    def read(self, store: ObjectStore, prefix: str, start: LogOffset, end: LogOffset) -> memoryview:
        """Read committed bytes ``[start, end)``; see ``read_bytes``."""
        return self.read_bytes(store, prefix, start, end)
