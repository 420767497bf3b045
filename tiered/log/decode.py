"""From the checked bytes of a part to its records: items, what they point at, and whether both agree.

Pure: whoever has read the bytes (``tiered.log.reader`` one after another, ``fetcher`` ahead) has them decoded here, so
that no reader hands out a record that does not say of itself what its index says of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiered.errors import DataError
from tiered.local.face import RecordBatch
from tiered.log.agreement import Fields, fields_of, usual_fields
from tiered.log.consume_queue import ITEM
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from typing_extensions import Buffer

    from tiered.log.parts import Part


@dataclass(frozen=True, slots=True)
class TierBatch:
    """Records read from the tier, and where they lie in the tiered commit log.

    Attributes:
        records: The records; ``positions`` count from ``log_offset``.
        log_offset: Of the first byte of ``records.data``.
    """

    records: RecordBatch
    log_offset: LogOffset

    @property
    def base_offset(self) -> QueueOffset:
        """Queue offset of the first item."""
        return self.records.base_offset

    @property
    def end_offset(self) -> QueueOffset:
        """One past the last queue offset."""
        return self.records.end_offset


@dataclass(frozen=True, slots=True)
class PartItems:
    """Items of a part's index, in order, without a gap.

    Attributes:
        start: Queue offset of the first.
        log_offsets: int64[n], where each record begins in the tiered commit log.
        sizes: int32[n], bytes of the record; 0 for a hole.
        tag_codes: int64[n].
    """

    start: QueueOffset
    log_offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int32]
    tag_codes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Number of items."""
        return len(self.sizes)

    def part_of(self, first: int, end: int) -> PartItems:
        """Items ``[first, end)`` of these, without a copy."""
        return PartItems(
            QueueOffset(self.start + first),
            self.log_offsets[first:end],
            self.sizes[first:end],
            self.tag_codes[first:end],
        )

    def copied(self) -> PartItems:
        """The same, apart from the arrays that they are of."""
        return PartItems(
            self.start, self.log_offsets.copy(), self.sizes.copy(), self.tag_codes.copy()
        )

    def span(self, part: Part) -> tuple[int, int]:
        """Log offsets ``[begin, end)`` that hold all their records; empty when all are holes."""
        real = self.sizes > 0
        if not real.any():
            return part.log_offset, part.log_offset
        begins = self.log_offsets[real]
        return int(begins.min()), int((begins + self.sizes[real]).max())


def decode_items(
    part: Part, start: QueueOffset, raw: bytes | memoryview, *, where: str
) -> PartItems:
    """Items of a part's index.

    Args:
        part: Whose.
        start: Queue offset of the first.
        raw: 20 bytes each.
        where: Prefix of the broker, for messages.

    Raises:
        DataError: One points outside the part's records.
    """
    items = np.frombuffer(raw, ITEM)
    offsets = items["log_offset"].astype(np.int64)
    sizes = items["size"].astype(np.int32)
    real = sizes > 0
    outside = (offsets[real] < part.log_offset) | (offsets[real] > part.records_end - sizes[real])
    if (sizes < 0).any() or outside.any():
        raise _damaged(part, "an item points outside the commit log", where)
    return PartItems(start, offsets, sizes, items["tag_code"].astype(np.int64))


def decode_records(
    queue: MessageQueue, part: Part, items: PartItems, data: Buffer, begin: int, *, where: str
) -> TierBatch:
    """Records that items point at, each held against its item.

    Args:
        queue: Whose they have to be.
        part: Of which they are.
        items: The items.
        data: Bytes of the commit log that hold all the records.
        begin: Log offset of the first byte of ``data``.
        where: Prefix of the broker, for messages.

    Raises:
        DataError: An item points at something else than its record.
    """
    if len(items) and items.sizes.min() > 0:
        positions = items.log_offsets - begin
        offsets = np.arange(items.start, items.start + len(items))
        times, physical, fault = fields_of(queue, data, positions, items.sizes, offsets)
    else:
        positions = np.where(items.sizes > 0, items.log_offsets - begin, 0)
        times, physical, fault = _with_holes(queue, items, data, positions)
    if fault:
        raise _damaged(part, fault, where)
    records = RecordBatch(
        queue=queue,
        base_offset=items.start,
        data=data,
        positions=positions,
        sizes=items.sizes,
        tag_codes=items.tag_codes,
        store_timestamps_ms=times,
        physical_offsets=physical,
    )
    return TierBatch(records, LogOffset(begin))


class PlacedPart(NamedTuple):
    """A part, and where its bytes lie in a buffer that holds several, side by side and plain.

    Attributes:
        queue: Whose.
        part: Which.
        records_at: Position of its first record's byte.
        items_at: Position of its first item.
    """

    queue: MessageQueue
    part: Part
    records_at: int
    items_at: int


@dataclass(frozen=True, slots=True)
class PartColumns:
    """What records of several parts say, in columns; each part's are neighbours.

    Attributes:
        firsts: [parts + 1], number of each part's first item; then the number of items.
        sizes: int32[n], bytes of each record.
        columns: int64[5, n]: position in the part's records, end of it, tag code, store time, local physical offset.
    """

    firsts: list[int]
    sizes: npt.NDArray[np.int32]
    columns: npt.NDArray[np.int64]


def decode_parts(placed: Sequence[PlacedPart], data: Buffer) -> PartColumns | None:
    """Records of whole parts, each held against its item, in few large steps for all of them.

    Args:
        placed: Parts in the order in which they lie.
        data: Holds their records and items; checked.

    Returns:
        What they say; None where anything is unusual, be it a hole, an inner batch or damage: then they are decoded one by
        one (``decode_items``, ``decode_records``), which knows of everything and says what is wrong.
    """
    whole = np.frombuffer(memoryview(data), np.uint8)
    counts = np.array([one.part.count for one in placed])
    raw = [whole[one.items_at : one.items_at + one.part.count * ITEM.itemsize] for one in placed]
    items = np.concatenate(raw).view(ITEM)
    lows = np.array([one.records_at for one in placed])
    logs = np.array([one.part.log_offset for one in placed])
    highs = lows + np.array([one.part.log_bytes for one in placed])
    firsts = np.append(0, np.cumsum(counts))
    queue_offsets = np.array([one.part.queue_offset for one in placed]) - firsts[:-1]
    sizes = items["size"].astype(np.int32)
    positions = items["log_offset"].astype(np.int64) + np.repeat(lows - logs, counts)
    low = np.repeat(lows, counts)
    sound = (
        sizes.min() > 0
        and (positions >= low).all()
        and (positions <= np.repeat(highs, counts) - sizes).all()  # not their sum, which may wrap
        and (positions[1:] >= positions[:-1]).all()
    )
    if not sound:
        return None
    ends = positions + sizes
    ids = np.repeat(np.array([one.queue.queue_id for one in placed]), counts)
    offsets = np.repeat(queue_offsets, counts) + np.arange(len(sizes))
    found = usual_fields(_topics_of(placed, counts), ids, data, positions, sizes, offsets)
    if found is None:
        return None
    columns = np.empty((5, len(sizes)), np.int64)
    columns[0] = positions - low
    columns[1] = np.maximum.accumulate(ends) - low
    columns[2] = items["tag_code"]
    columns[3], columns[4] = found.store_timestamps_ms, found.physical_offsets
    return PartColumns(firsts.tolist(), sizes, columns)


def _topics_of(
    placed: Sequence[PlacedPart], counts: npt.NDArray[np.int64]
) -> list[tuple[str, npt.NDArray[np.bool_] | None]]:
    """Each topic, and which items are of it."""
    names = [one.queue.topic for one in placed]
    topics = sorted(set(names))
    if len(topics) == 1:
        return [(topics[0], None)]
    numbers = {topic: number for number, topic in enumerate(topics)}
    of = np.repeat(np.array([numbers[name] for name in names]), counts)
    return [(topic, of == number) for topic, number in numbers.items()]


def _with_holes(
    queue: MessageQueue, items: PartItems, data: Buffer, positions: npt.NDArray[np.int64]
) -> Fields:
    """The fields where some items have no record: -1, and of its neighbour the time."""
    real = np.flatnonzero(items.sizes > 0)
    none = np.full(len(items), -1, np.int64)
    if not len(real):
        return Fields(none, none)
    found = fields_of(queue, data, positions[real], items.sizes[real], items.start + real)
    times, physical = none.copy(), none
    times[real] = found.store_timestamps_ms
    physical[real] = found.physical_offsets
    return Fields(times[_neighbours(real, len(items))], physical, found.fault)


def _damaged(part: Part, what: str, where: str) -> DataError:
    return DataError(
        what,
        where=where + part.index.key,
        do="run `tiered verify --deep` to see the extent of the damage",
    )


def _neighbours(real: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """For each item itself or, for a hole, the item with a record before it (else after it)."""
    before = np.searchsorted(real, np.arange(count), side="right") - 1
    return real[np.maximum(before, 0)]
