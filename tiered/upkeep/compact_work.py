"""The work of key compaction, as engines do it (``tiered.upkeep.engine``): keys of a range read, and a bundle made.

This process and a task of Spark come to the same rows, and make the same bytes under the same key; a
work that is done twice adopts what is there.

Memory: of keys a part and the rows of a quarter million messages, or of ``NARROW_ROWS`` keys; of a bundle the two parts that
were read last, and what stays of them (64 MiB).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.errors import AlreadyExistsError
from backends.lazy_dataclass import dataclass
from tiered.clock import ManualClock
from tiered.compaction.newest import (
    EMPTY,
    GOES,
    HOLDS,
    KEYED,
    NO_LIMIT,
    Newest,
    keyed_kafka,
    keyed_records,
)
from tiered.crashpoints import reached
from tiered.dispatch.group_commit import Uploader
from tiered.dispatch.merging import Packer
from tiered.errors import DataError, InvalidError
from tiered.format.bundle import build_section
from tiered.format.kafka_batch import UNPACKED_BYTES_MAX, block_at, with_records
from tiered.format.record_kind import Mark, RecordKind, has_mark
from tiered.local.interface import HoleReason
from tiered.log.bundles import SectionRow, bundle_row
from tiered.log.decode import decode_items, decode_records
from tiered.log.flat_file import ITEM
from tiered.log.lineage import hidden
from tiered.log.merge import LAST_LEVEL, MergeOutput
from tiered.log.messages import kafka_records
from tiered.log.sections import read_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from backends.base import ObjectStore
    from tiered.compaction.newest import Flags, Rows
    from tiered.dispatch.settings import Compression
    from tiered.format.bundle import Section
    from tiered.local.interface import RecordBatch
    from tiered.log.merge import MergeRun
    from tiered.log.parts import AbortedRange, Part, Parts
    from tiered.model import MessageQueue
    from tiered.upkeep.engine import WorkContext


# -- keys ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartRange:
    """Neighbouring parts of a queue."""

    queue: MessageQueue
    number: int  # of the queue among those that are looked at together
    begin: int  # number of the first part
    parts: Parts
    tombstones_to: int  # the queue offset below which tombstones may go
    last: int  # queue offset of the queue's newest message, which stays whatever it is; -1: it is not looked at
    aborted: tuple[AbortedRange, ...] = ()  # in it: records of these go


@dataclass(frozen=True, slots=True)
class KeysWork:
    """OffsetRanges whose keys are read by one."""

    offset_ranges: tuple[PartRange, ...]
    keeps_keyless: bool
    seen_ms: int  # tombstones stored before may go
    is_across: bool  # by store time among all queues; else each queue by itself, by offset
    digests: tuple[int, int]  # of the keys whose turn it is, the smallest and the greatest


@dataclass(frozen=True, slots=True)
class PartRead:
    """What is known of a part when it was read."""

    queue: int  # by number
    part: int  # likewise
    stays: npt.NDArray[np.uint8]  # as bits: holes, and messages that stay whatever else there is
    left_bytes: int  # of these
    keyless: int  # messages without a key
    tombstones: int


def read_keys(context: WorkContext, work: KeysWork) -> tuple[Rows, list[PartRead]]:
    """Of each key the newest row among these parts; and what there is to say of each part."""
    newest = Newest(NO_LIMIT, *work.digests, is_across=work.is_across)
    found = []
    for offset_range in work.offset_ranges:
        for at, part in enumerate(offset_range.parts, offset_range.begin):
            batch = part_records(context.tier, context.prefix, offset_range.queue, part)
            stays, left_bytes, every = _looked_at(batch, offset_range.aborted)
            keyless = tombstones = 0
            for rows in every:
                has_key, is_last = rows["flags"] & KEYED > 0, rows["offset"] == offset_range.last
                kept = rows[is_last | ~has_key if work.keeps_keyless else is_last]
                stays[kept["offset"] - int(part.queue_offset)] = True
                left_bytes += int(kept["size"].sum())
                keyless += int(np.count_nonzero(~has_key))
                tombstones += int(np.count_nonzero(rows["flags"] & EMPTY))
                newest.put(_judged_by_itself(rows[has_key], offset_range, work))
            found.append(
                PartRead(
                    offset_range.number, at, np.packbits(stays), left_bytes, keyless, tombstones
                )
            )
    return newest.rows(), found


def _looked_at(
    batch: RecordBatch, aborted: tuple[AbortedRange, ...]
) -> tuple[Flags, int, Iterator[Rows]]:
    """Which items stay whatever else there is, bytes of their records, and rows of the messages."""
    is_hole = batch.sizes <= 0
    if batch.kind is RecordKind.ROCKETMQ:
        return is_hole, 0, keyed_records(batch)
    if batch.kind is not RecordKind.KAFKA:
        what = f"{batch.queue} is JoyQueue's, whose messages take no other's place"
        raise InvalidError(what, do="compact topics of RocketMQ's or Kafka's")
    seen = hidden(batch, aborted)
    found = kafka_records(seen)
    at = found.offsets - batch.base_offset
    is_control = ~is_hole & has_mark(batch.tag_codes, Mark.CONTROL)
    is_bare = seen.sizes > 0  # of which Kafka's own cleaner took the record
    is_bare[at] = False
    stays = is_hole | is_control | is_bare
    rows = keyed_kafka(found, batch.sizes[at].astype(np.int64))
    return stays, int(batch.sizes[is_control].sum()), iter([rows])


def _judged_by_itself(rows: Rows, offset_range: PartRange, work: KeysWork) -> Rows:
    """Rows of messages with a key, as they are held against others."""
    goes = rows["flags"] & EMPTY > 0
    goes &= (rows["offset"] < offset_range.tombstones_to) & (rows["time_ms"] < work.seen_ms)
    rows["flags"] = GOES * goes + HOLDS * holds(rows, offset_range.last)
    rows["queue"] = offset_range.number
    return rows


def holds(rows: Rows, last: int) -> Flags:
    """bool[n], whether it is its queue's newest message, at ``last``, and has a value of a key.

    It stays, though another queue may have a newer tombstone of that key. Without that tombstone it would be the newest of
    the key: what was deleted would be back.
    """
    held: Flags = (rows["offset"] == last) & (rows["flags"] & EMPTY == 0)
    return held


# -- bundles ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MaintenanceWriter:
    """Who uploads a bundle, beside the present writer."""

    epoch: int  # of the writer
    writer: str  # id
    sequence: int  # number of the object (``tiered.keys.maintenance_sequences``)
    now_ms: int  # UTC; keys begin with it
    escapes_case: bool  # the store takes names for one that differ only in case


@dataclass(frozen=True, slots=True)
class BundleWork:
    """A bundle that is to be made: of each run of neighbouring parts one section."""

    guest: MaintenanceWriter
    compression: Compression | None  # None: nothing is compressed
    runs: tuple[MergeRun, ...]
    stays: tuple[list[npt.NDArray[np.uint8]], ...]  # of each run's parts, as bits


@dataclass(frozen=True, slots=True)
class MadeBundle:
    """A bundle that was uploaded, and is to be named."""

    row: list[Any]  # for the action
    size_bytes: int  # of the object


def make_bundle(context: WorkContext, work: BundleWork) -> MadeBundle:
    """Make and upload a bundle."""
    packer = Packer(work.compression) if work.compression else None
    sections = [
        section_of(run, _lefts(context, run, stays), packer)
        for run, stays in zip(work.runs, work.stays, strict=True)
    ]
    queues = {run.queue for run in work.runs}
    own = work.runs[0].queue if len(queues) == 1 else None
    guest = work.guest
    uploader = Uploader(
        context.tier,
        context.prefix,
        epoch=guest.epoch,
        writer=guest.writer,
        clock=ManualClock(guest.now_ms),
        escapes_case=guest.escapes_case,
        sequences=iter([guest.sequence]),
    )
    output = MergeOutput(LAST_LEVEL, work.runs, work.runs[0].queue.topic, own)
    try:
        stored = uploader.put_merged(output, sections)
    except AlreadyExistsError as error:
        raise DataError(
            "another try of this work has made other bytes",
            where=str(error),
            do="run all workers with the same versions of this program and its libraries",
        ) from error
    reached("compacted-stored")
    return MadeBundle(bundle_row(stored.bundle, stored.packed), stored.bundle.size_bytes)


def _lefts(
    context: WorkContext, run: MergeRun, stays: Iterable[npt.NDArray[np.uint8]]
) -> Iterator[PartLeft]:
    """Parts of a queue, each read when it is asked for, and what stays of them."""
    for part, bits in zip(run.parts, stays, strict=True):
        batch = part_records(context.tier, context.prefix, run.queue, part)
        yield PartLeft(part, batch, np.unpackbits(bits, count=part.count).view(np.bool_))


RUN_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of records that stay and of items, as they are read, of one section."""
RUN_COUNT_MAX: Final = 1 << 18
"""Queue offsets of one section, unless one part has more: a reader is given all items of a section, 5 MiB so."""


@dataclass(frozen=True, slots=True)
class PartLeft:
    """A part, its bytes, and what stays of it."""

    part: Part
    batch: RecordBatch  # all of its items and their records
    stays: Flags  # bool[count], which messages stay; of a hole anything


@dataclass(frozen=True, slots=True)
class CompactedRun:
    """What neighbouring parts become."""

    records: Sequence[bytes]  # bytes of those that stay, in order
    items: bytes  # all items, 20 bytes each
    holes: int  # items without a message
    store_min_ms: int  # smallest store time; -1: nothing stays
    store_max_ms: int  # greatest store time; -1 likewise
    last: int  # mark of the last item's record; 0: it does not stay
    log_gone: int  # bytes of the log that have no record now


def compacted_run(lefts: Iterable[PartLeft]) -> CompactedRun:
    """Compact neighbouring parts into one; of each only what stays, perhaps little of much, is kept meanwhile."""
    records: list[bytes] = []
    items: list[npt.NDArray[np.void]] = []
    times: list[npt.NDArray[np.int64]] = []
    at, last = -1, None
    for left in lefts:
        last = left.part
        at = int(last.log_offset) if at < 0 else at
        batch, stays = left.batch, left.stays
        if batch.kind is RecordKind.KAFKA:
            batch, stays = _without_gone(batch, stays)
        mine, where = _items(batch, stays, at)
        items.append(mine)
        if len(where):
            records.append(b"".join(_slices(batch, where)))
        times.append(batch.store_timestamps_ms[where])
        at += int(batch.sizes[where].sum(dtype=np.int64))
    assert last is not None
    data = b"".join(mine.tobytes() for mine in items)
    every, stamps = np.frombuffer(data, ITEM), np.concatenate(times)
    return CompactedRun(
        records,
        data,
        int(np.count_nonzero(every["size"] == 0)),
        int(stamps.min()) if len(stamps) else -1,
        int(stamps.max()) if len(stamps) else -1,
        last.last if every["size"][-1] else 0,
        int(last.log_end) - at,
    )


def _items(
    batch: RecordBatch, stays: Flags, at: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """The items of a part whose records lie from log offset ``at`` on; and of each record that stays its first item."""
    real = batch.sizes > 0
    where = np.flatnonzero(real & stays)
    items = np.zeros(len(real), ITEM)
    items["tag_code"] = np.where(real, int(HoleReason.COMPACTED), batch.tag_codes)
    items["tag_code"][where] = batch.tag_codes[where]
    items["size"][where] = batch.sizes[where]
    is_first = np.append(True, np.diff(batch.positions[where]) != 0)[: len(where)]
    sizes = np.where(is_first, batch.sizes[where], 0).astype(np.int64)
    begins = at + np.cumsum(sizes) - sizes
    items["log_offset"][where] = begins[is_first][np.cumsum(is_first) - 1]
    return items, where[is_first]


def _without_gone(batch: RecordBatch, stays: Flags) -> tuple[RecordBatch, Flags]:
    """Kafka's batches without the records that go, and what stays; one that has none left goes whole."""
    real = np.flatnonzero(batch.sizes > 0)
    is_first = np.append(True, np.diff(batch.positions[real]) != 0)
    firsts, owners = real[is_first], np.cumsum(is_first) - 1
    borders = np.append(np.flatnonzero(is_first), len(real))
    changed = np.flatnonzero(np.bincount(owners, ~stays[real]))
    if not len(changed):
        return batch, stays
    sizes = batch.sizes[firsts].astype(np.int64)
    block = block_at(batch.data, batch.positions[firsts], sizes)
    view = memoryview(batch.data).cast("B")
    bounds = zip(block.positions.tolist(), (block.positions + sizes).tolist(), strict=True)
    pieces: list[bytes | memoryview] = [view[begin:end] for begin, end in bounds]
    for number in changed.tolist():
        mine = real[borders[number] : borders[number + 1]]
        offsets = batch.base_offset + mine[stays[mine]]
        pieces[number] = with_records(block, number, offsets, bytes_max=UNPACKED_BYTES_MAX)
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    is_gone = sizes == 0
    data = b"".join(pieces)
    made = block_at(data, (np.cumsum(sizes) - sizes)[~is_gone], sizes[~is_gone])
    of_batches = np.full((3, len(firsts)), -1)
    of_batches[:, ~is_gone] = made.positions, made.sizes, made.column("max_timestamp")
    positions, sizes, times = np.zeros((3, batch.count), np.int64)
    positions[real], sizes[real], times[real] = of_batches[:, owners]
    stays = stays.copy()
    stays[real] &= ~is_gone[owners]
    sizes[real] = np.where(is_gone[owners], 1, sizes[real])  # no holes yet
    return replace(
        batch,
        data=data,
        positions=positions,
        sizes=sizes.astype(np.int32),
        store_timestamps_ms=times,
    ), stays


def _slices(batch: RecordBatch, where: npt.NDArray[np.int64]) -> Iterator[memoryview]:
    """The bytes of records, those that lie side by side together."""
    if not len(where):
        return iter(())
    starts = batch.positions[where]
    ends = starts + batch.sizes[where]
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    lows = starts[np.concatenate(([0], breaks))]
    highs = ends[np.concatenate((breaks - 1, [len(ends) - 1]))]
    view = memoryview(batch.data).cast("B")
    pairs = zip(lows.tolist(), highs.tolist(), strict=True)
    return map(view.__getitem__, starmap(slice, pairs))


def plan_runs(
    parts: Parts, changed: Sequence[bool], left_bytes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Which neighbours of one segment become one section: numbers ``[begin, end)`` of parts.

    Args:
        parts: Of one segment, in order.
        changed: Of which some message goes; no others are touched.
        left_bytes: Bytes of the records that stay of each.
    """
    counts = parts.column("count").tolist()
    begin, size, count = 0, 0, 0
    for at in range(len(parts)):
        more = left_bytes[at] + 20 * counts[at]
        is_full = size + more > RUN_BYTES_MAX or count + counts[at] > RUN_COUNT_MAX
        if at > begin and (not changed[at] or is_full):
            yield begin, at
            begin, size, count = at, 0, 0
        if changed[at]:
            size, count = size + more, count + counts[at]
        else:
            begin, size, count = at + 1, 0, 0
    if begin < len(parts):
        yield begin, len(parts)


def section_of(
    run: MergeRun, lefts: Iterable[PartLeft], packer: Packer | None
) -> tuple[SectionRow, Section]:
    """The sparse section that takes the place of neighbouring parts; the same bytes of the same parts, in any process.

    Args:
        lefts: What stays of each, in order.
        packer: Compresses; None: nothing does.
    """
    made, parts = compacted_run(lefts), run.parts
    row = SectionRow(
        run.queue,
        run.incarnation,
        run.segment,
        int(parts[0].log_offset),
        int(parts[0].queue_offset),
        made.holes,
        made.store_min_ms,
        made.store_max_ms,
        made.last,
        log_gone=made.log_gone,
    )
    section = None
    if packer is not None and made.records:
        data = b"".join(made.records)
        section = packer.pack(run.queue.topic, data, made.items, may_be_sparse=True)
    return row, section or build_section(made.records, made.items, may_be_sparse=True)


def part_records(store: ObjectStore, prefix: str, queue: MessageQueue, part: Part) -> RecordBatch:
    """All of a part, each record held against its item."""
    log, index = read_part(store, prefix, part)
    items = decode_items(part, part.queue_offset, index, where=prefix)
    begin = int(part.log_offset)
    return decode_records(queue, part, items, log, begin, where=prefix).records
