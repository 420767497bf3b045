"""From the checked bytes of a part to its records: items, what they point at, and whether both agree.

Pure: bytes that were read (by ``tiered.log.reader`` one after another, by ``fetcher`` ahead) are decoded here, so
that no reader hands out a record that does not say of itself what its index says of it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.block import (
    RecordBlock,
    bytes_at,
    distinct,
    headers_at,
    parse_records,
    topics_equal,
)
from tiered.format.record import BODY_AT, MAGIC_V1, RECORD_BYTES_MIN
from tiered.format.record_kind import RecordKind, kind_of_items
from tiered.format.sysflag import BORN_HOST_V6, INNER_BATCH, STORE_HOST_V6
from tiered.local.interface import RecordBatch
from tiered.log.flat_file import ITEM
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from typing_extensions import Buffer

    from tiered.log.parts import Part


@dataclass(slots=True, eq=False)
class TierBatch:
    """Records read from the tier, and where they lie in the tiered commit log. Nobody changes one (see ``RecordBatch``)."""

    records: RecordBatch  # the records; ``positions`` count from ``log_offset``
    log_offset: LogOffset  # of the first byte of ``records.data``

    def __repr__(self) -> str:
        records = self.records
        topic, queue_id = records.queue
        size = memoryview(records.data).nbytes
        return (
            f"<TierBatch {topic}/{queue_id}@[{self.base_offset}, {self.end_offset}) {size} bytes>"
        )

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
    """Items of a part's index, in order, without a gap."""

    start: QueueOffset  # queue offset of the first
    log_offsets: npt.NDArray[np.int64]
    """int64[n], where each record begins in the tiered commit log."""
    sizes: npt.NDArray[np.int32]  # int32[n], bytes of the record; 0 for a hole
    tag_codes: npt.NDArray[np.int64]  # int64[n]

    def __len__(self) -> int:
        """Number of items."""
        return len(self.sizes)

    @property
    def kind(self) -> RecordKind:
        """What their records are; RocketMQ's where all are holes."""
        return kind_of_items(self.sizes, self.tag_codes)

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
    """Items of a part's index, 20 bytes each, from queue offset ``start`` on."""
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
    """Records that items point at, each held against its item; ``begin`` is the log offset at which ``data`` begins."""
    if len(items) and items.sizes.min() > 0:
        positions = items.log_offsets - begin
        offsets = np.arange(items.start, items.start + len(items))
        kind = items.kind
        times, physical, fault = fields_of(queue, data, positions, items.sizes, offsets, kind)
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


@dataclass(frozen=True, slots=True)
class PlacedParts:
    """Whole parts, and where their bytes lie, uncompressed, in one buffer; in that order."""

    queues: Sequence[MessageQueue]  # whose each is
    rows: npt.NDArray[np.void]  # ``PART``, one a part
    records_at: npt.NDArray[np.int64]  # int64[parts], position of each one's first record
    items_at: npt.NDArray[np.int64]  # int64[parts], position of each one's first item


@dataclass(frozen=True, slots=True)
class PartColumns:
    """What records of several parts say, in columns; each part's are neighbours."""

    firsts: list[int]  # [parts + 1], number of each part's first item; then the number of items
    sizes: npt.NDArray[np.int32]  # int32[n], bytes of each record
    columns: npt.NDArray[np.int64]
    """int64[5, n]: position in the part's records, end of it, tag code, store time, local physical offset."""


def decode_parts(placed: PlacedParts, data: Buffer) -> PartColumns | None:
    """Records of whole parts, each held against its item, in few large steps for all of them.

    Returns:
        What they say; None where anything is unusual, be it a hole, an inner batch or damage: then they are decoded one by
        one (``decode_items``, ``decode_records``), which knows of everything and says what is wrong.
    """
    whole = np.frombuffer(memoryview(data), np.uint8)
    rows, lows = placed.rows, placed.records_at
    counts = rows["count"].astype(np.int64)
    ends_at = placed.items_at + counts * ITEM.itemsize
    spans = zip(placed.items_at.tolist(), ends_at.tolist(), strict=True)
    items = np.concatenate([whole[low:high] for low, high in spans]).view(ITEM)
    highs = lows + rows["log_bytes"]
    firsts = np.append(0, np.cumsum(counts))
    sizes = items["size"].astype(np.int32)
    positions = items["log_offset"].astype(np.int64) + np.repeat(lows - rows["log_offset"], counts)
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
    ids = np.repeat(np.array([queue.queue_id for queue in placed.queues]), counts)
    offsets = np.repeat(rows["queue_offset"] - firsts[:-1], counts) + np.arange(len(sizes))
    topics = [queue.topic for queue in placed.queues]
    found = usual_fields(topics, counts, ids, data, positions, sizes, offsets)
    if found is None:
        return None
    columns = np.empty((5, len(sizes)), np.int64)
    columns[0] = positions - low
    columns[1] = np.maximum.accumulate(ends) - low
    columns[2] = items["tag_code"]
    columns[3], columns[4] = found.store_timestamps_ms, found.physical_offsets
    return PartColumns(firsts.tolist(), sizes, columns)


def _with_holes(
    queue: MessageQueue, items: PartItems, data: Buffer, positions: npt.NDArray[np.int64]
) -> Fields:
    """The fields where some items have no record: -1, and of its neighbour the time."""
    real = np.flatnonzero(items.sizes > 0)
    none = np.full(len(items), -1, np.int64)
    if not len(real):
        return Fields(none, none)
    offsets = items.start + real
    found = fields_of(queue, data, positions[real], items.sizes[real], offsets, items.kind)
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


# -- agreement
#
# Whether records are what their items say they are: one look at all records of a run, in few large steps. ``fields_of`` has
# a fast way for what nearly all runs are, sound records of one queue with IPv4 hosts; whatever else it meets it leaves to
# ``tiered.format.block``, which knows of everything and says what is wrong.

_PROPERTIES_SIZE_BYTES = 2
_UNUSUAL = BORN_HOST_V6 | STORE_HOST_V6 | INNER_BATCH


class Fields(NamedTuple):
    """What records say."""

    store_timestamps_ms: npt.NDArray[np.int64]  # int64[n], UTC ms
    physical_offsets: npt.NDArray[np.int64]  # int64[n], in the local log
    fault: str = ""  # why these are not the records that were wanted; empty when they are


def fields_of(  # noqa: PLR0917 (columns of one thing)
    queue: MessageQueue,
    data: Buffer,
    positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    kind: RecordKind = RecordKind.ROCKETMQ,
) -> Fields:
    """Hold records against what an index says of them.

    Args:
        positions: int64[n], where each begins in ``data``; n > 0.
        offsets: int64[n], their queue offsets; of an inner batch any that it may hold.
    """
    if kind is not RecordKind.ROCKETMQ:
        return _by_heads(kind, queue, data, positions, sizes, offsets)
    ids, counts = np.int64(queue.queue_id), np.array([len(positions)])
    found = usual_fields([queue.topic], counts, ids, data, positions, sizes, offsets)
    if found is not None:
        return found
    block = parse_records(data, positions, sizes)
    return Fields(block.store_timestamps_ms, block.physical_offsets, _fault(queue, block, offsets))


def _by_heads(  # noqa: PLR0917 (as ``fields_of``)
    kind: RecordKind,
    queue: MessageQueue,
    data: Buffer,
    positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> Fields:
    """Of Kafka's batches and JoyQueue's messages; neighbours may share one, which is looked at once."""
    from tiered.format.heads import heads_of  # noqa: PLC0415 (most tiers have none of them)

    is_first = np.append(True, np.diff(positions) != 0)
    firsts, owners = np.flatnonzero(is_first), np.cumsum(is_first) - 1
    heads = heads_of(kind, data, positions[firsts], sizes[firsts].astype(np.int64))
    mine = heads.is_sound
    if heads.partitions is not None:
        mine = mine & (heads.partitions == queue.queue_id)
    fault = "" if mine.all() else "an item points at something that is not a record of this queue"
    if not fault and not ((heads.lows[owners] <= offsets) & (offsets < heads.highs[owners])).all():
        fault = "an item points at a record of another queue offset"
    return Fields(heads.times_ms[owners], np.full(len(offsets), -1, np.int64), fault)


def usual_fields(  # noqa: PLR0917 (as ``fields_of``)
    topics: Sequence[str],
    counts: npt.NDArray[np.int64],
    queue_ids: npt.NDArray[np.int64] | np.int64,
    data: Buffer,
    positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> Fields | None:
    """The fields of records of many queues, if all are sound, wanted, and without anything unusual; else None.

    Args:
        topics: Of records that are neighbours; one may come again.
        counts: How many are of each.
    """
    ends = positions + sizes
    in_place = sizes.min() >= RECORD_BYTES_MIN and positions.min() >= 0
    if not in_place or ends.max() > memoryview(data).nbytes:
        return None
    heads = headers_at(data, positions)
    bodies = heads["body_size"]
    same = (
        (heads["magic"] == MAGIC_V1).all()
        and (heads["size"] == sizes).all()
        and (heads["queue_id"] == queue_ids).all()
        and (heads["queue_offset"] == offsets).all()
        and not (heads["sys_flag"] & _UNUSUAL).any()
        and bodies.min() >= 0
    )
    if not same:
        return None
    if not _are_of_topics(topics, counts, data, positions + bodies + BODY_AT, ends):
        return None
    times = heads["store_timestamp_ms"].astype(np.int64)
    return Fields(times, heads["physical_offset"].astype(np.int64))


def _are_of_topics(
    topics: Sequence[str],
    counts: npt.NDArray[np.int64],
    data: Buffer,
    at: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> bool:
    """Whether behind every body, at ``at``, comes its topic; names of one length are looked at at once.

    One topic after the other would cost as much as the number of topics times that of the records.
    """
    names = [topic.encode("utf-8", "surrogateescape") for topic in topics]
    if len(set(names)) == 1:
        return _are_tails(names[:1], None, data, at, ends)
    lengths = np.array([len(name) for name in names])
    for length in distinct(lengths).tolist():
        alike = lengths == length
        some = np.repeat(alike, counts)
        its_names = [name for name in names if len(name) == length]
        if not _are_tails(its_names, counts[alike], data, at[some], ends[some]):
            return False
    return True


def _are_tails(
    names: Sequence[bytes],
    counts: npt.NDArray[np.int64] | None,
    data: Buffer,
    at: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> bool:
    """Whether behind every body come its topic and properties that fill the record to its end."""
    length = len(names[0])
    words, kind = _tail_kind(length + 1)
    properties_at = at + kind.itemsize
    if length > np.iinfo(np.int8).max or (properties_at > ends).any():
        return False
    tails = bytes_at(data, f"V{kind.itemsize}")[at].view(kind)
    size, none = bytes([length]), bytes(_PROPERTIES_SIZE_BYTES)
    wanted = np.frombuffer(b"".join(size + name + none for name in names), kind)
    wanted = wanted if counts is None else np.repeat(wanted, counts)
    properties = tails["properties"]
    return bool(
        all((tails[word] == wanted[word]).all() for word in words)
        and properties.min() >= 0
        and (properties_at + properties == ends).all()
    )


@lru_cache(256)
def _tail_kind(size_bytes: int) -> tuple[list[str], np.dtype[np.void]]:
    """A type that has so many bytes as few words, which may overlap, and then the size of the properties."""
    word = next(size for size in (8, 4, 2, 1) if size <= size_bytes)
    begins = [*range(0, size_bytes - word, word), size_bytes - word]
    names = [f"w{begin}" for begin in begins]
    kind = np.dtype(
        {
            "names": [*names, "properties"],
            "formats": [*(f"u{word}" for _ in begins), ">i2"],
            "offsets": [*begins, size_bytes],
            "itemsize": size_bytes + _PROPERTIES_SIZE_BYTES,
        }
    )
    return names, kind


def _fault(queue: MessageQueue, block: RecordBlock, wanted: npt.NDArray[np.int64]) -> str:
    """What is wrong with records that shall be of these queue offsets; empty when nothing is."""
    if block.faults.any() or not _is_of(block, queue):
        return "an item points at something that is not a record of this queue"
    inner = block.sys_flags & INNER_BATCH != 0
    if (np.where(inner, block.queue_offsets > wanted, block.queue_offsets != wanted)).any():
        return "an item points at a record of another queue offset"
    return ""


def _is_of(block: RecordBlock, queue: MessageQueue) -> bool:
    """Whether every record says that it is of this queue: queue id and all bytes of the topic."""
    if (block.queue_ids != queue.queue_id).any():
        return False
    return bool(topics_equal(block, np.arange(len(block)), queue.topic).all())
