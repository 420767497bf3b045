"""Records that were read at once, and what a reader gets of them: slices, without a copy."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fetcher.memory import BYTES_MIN, STEP_BYTES
from tiered.local.face import RecordBatch
from tiered.log.decode import TierBatch
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from fetcher.memory import Memory

RUN_BYTES = 3 * 1024
"""What a run takes, however few records it has."""
SLACK = 8
"""Up to an eighth of their size may be kept around records, rather than copying them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks of a part, read with one request and decoded once.

    Attributes:
        base: Queue offset of the first item.
        end: One past the last.
        batch: The records.
        data: Their bytes.
        starts: Position of each item's record; of a hole the end of the records before it. Never falls.
        ends: One past the last byte of all records up to this item.
        has_holes: Whether an item has no record.
    """

    base: QueueOffset
    end: QueueOffset
    batch: TierBatch
    data: memoryview
    starts: memoryview[int]
    ends: memoryview[int]
    has_holes: bool

    @classmethod
    def of(cls, batch: TierBatch) -> Run:
        """Prepare a batch for being cut."""
        records = batch.records
        real = records.sizes > 0
        ends = np.maximum.accumulate(np.where(real, records.positions + records.sizes, 0))
        starts = np.where(real, records.positions, ends)
        data = memoryview(records.data).cast("B").toreadonly()  # all readers share it
        return cls(
            base=batch.base_offset,
            end=batch.end_offset,
            batch=batch,
            data=data,
            starts=starts.data,
            ends=ends.data,
            has_holes=not bool(real.all()),
        )

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, about: what holds the records, and 52 bytes an item."""
        return run_bytes(memoryview(self.data.obj).nbytes, len(self.starts))

    def cut(self, start: QueueOffset, *, bytes_max: int, count_max: int) -> TierBatch:
        """Items from ``start`` on, at least one however large it is.

        Args:
            start: In ``[base, end)``.
            bytes_max: Bytes of records at most, but for the first; an inner batch is not divided by it.
            count_max: Items at most (> 0).
        """
        first = start - self.base
        low = self.starts[first]
        end = min(first + count_max, len(self.ends))
        if self.ends[end - 1] > low + bytes_max:
            # Not NumPy's search: it gives the interpreter's lock away, and others may keep it for milliseconds.
            end = bisect_right(self.ends, low + bytes_max, first, end)
            if end <= first:
                end = min(bisect_right(self.starts, low), first + count_max)
        high = max(self.ends[end - 1], low)
        records = self.batch.records
        positions = records.positions[first:end] - low
        sizes = records.sizes[first:end]
        if self.has_holes:
            positions = np.where(sizes > 0, positions, 0)
        cut = RecordBatch(
            queue=records.queue,
            base_offset=start,
            data=self.data[low:high],
            positions=positions,
            sizes=sizes,
            tag_codes=records.tag_codes[first:end],
            store_timestamps_ms=records.store_timestamps_ms[first:end],
            physical_offsets=records.physical_offsets[first:end],
        )
        return TierBatch(cut, LogOffset(self.batch.log_offset + low))


def run_bytes(data_bytes: int, items: int) -> int:
    """Memory of a run of so many bytes of records and items, about."""
    return RUN_BYTES + data_bytes + 52 * items


def room_of(data_bytes: int, items: int) -> int:
    """Room for such a run with what came around its records, as far as ``compact`` leaves that."""
    return run_bytes(data_bytes + max(data_bytes // SLACK, STEP_BYTES), items)


def compact(data: memoryview, memory: Memory) -> memoryview:
    """The same bytes, without much around them that would stay in memory as long as they do."""
    around = memoryview(data.obj).nbytes - data.nbytes
    if around <= data.nbytes // SLACK:
        return data
    if data.nbytes < BYTES_MIN:
        return memoryview(bytes(data))
    copy = memory.lend(data.nbytes)
    # Not `copy[:] = data`: this keeps the interpreter's lock.
    np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(data, np.uint8))
    return copy
