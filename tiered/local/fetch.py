"""Fetching the records that consume-queue entries name, in few reads, and judging each of them.

A plan first (which bytes to read in one go), then the reads, then one vectorised check of all records. For any thread;
nothing is kept between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.block import (
    RecordBlock,
    check_records,
    inner_counts,
    parse_records,
    topic_bytes,
    topics_equal,
)
from tiered.format.record import (
    HEADER,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    RecordFault,
)
from tiered.local.entries import Entries
from tiered.local.face import HoleReason
from tiered.local.pieces import RECORD_BYTES_MAX
from tiered.local.verdicts import Pair, judge
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.local.consumequeues import QueueIndex
    from tiered.local.entries import Flags, Ints, Longs
    from tiered.local.files import FileRow

    Lists = Callable[[MessageQueue, int, int], bool]
    """(queue, queue offset, local physical offset) -> whether the queue lists that record."""

GAP_BYTES_MAX: Final = 64 << 10
GAP_BYTES_MIN: Final = 512
GAP_PER_BYTE: Final = 2
"""Bytes between two wanted records are read rather than skipped by a second read when they are at most
``GAP_BYTES_MIN``, or at most ``GAP_PER_BYTE`` times the record before and ``GAP_BYTES_MAX``: a batch never costs more
than about seven times its bytes."""
_NO_HOLE: Final = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which part of the log may be read.

    Attributes:
        log_min: First local physical offset.
        log_end: One past the last.
    """

    log_min: int
    log_end: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records and what became of each entry.

    Attributes:
        block: The records that could be asked for, in entry order, each once.
        record_of: int64[n], index in ``block`` of each entry's record; -1 where there was nothing to ask for.
        verdicts: int8[n], 0 for a sound record of this queue and offset, else a ``HoleReason``.
        is_whole: Every byte that was asked for could be read. If not, a file may have expired meanwhile.
    """

    block: RecordBlock
    record_of: Longs
    verdicts: npt.NDArray[np.int8]
    is_whole: bool


def plan_reads(
    physical_offsets: Longs, sizes: Ints, within: Longs
) -> list[tuple[int, int, int, int]]:
    """Join neighbouring records into reads.

    Args:
        physical_offsets: int64[n], where each record lies, n > 0.
        sizes: int32[n].
        within: int64[n], how far into its file each lies. A read never spans files.

    Returns:
        ``(first record, one past the last record, from byte, to byte)`` of each read, in record order.
    """
    ends = physical_offsets + sizes
    gaps = physical_offsets[1:] - ends[:-1]
    bases = physical_offsets - within
    same_file = bases[1:] == bases[:-1]
    bridged = np.clip(sizes[:-1].astype(np.int64) * GAP_PER_BYTE, GAP_BYTES_MIN, GAP_BYTES_MAX)
    breaks = np.flatnonzero((gaps < 0) | (gaps > bridged) | ~same_file) + 1
    firsts = [0, *breaks.tolist()]
    lasts = [*breaks.tolist(), len(ends)]
    return [
        (first, last, int(physical_offsets[first]), int(ends[last - 1]))
        for first, last in zip(firsts, lasts, strict=True)
    ]


def readable(entries: Entries, bounds: Bounds, log: FileRow) -> Flags:
    """bool[n]: whether each entry names bytes that lie in the log and in one file."""
    physical, sizes = entries.physical_offsets, entries.sizes.astype(np.int64)
    good = entries.is_written & (physical >= bounds.log_min) & (physical < bounds.log_end)
    room = np.minimum(bounds.log_end - physical, log.file_bytes - log.within(physical))
    return good & (sizes <= np.minimum(room, RECORD_BYTES_MAX))


def distinct_records(entries: Entries, wanted: Flags) -> tuple[Longs, Longs]:
    """The first entry of each record, and for each entry the number of its record (-1 if not wanted).

    Entries of an inner batch follow each other and name the same place.
    """
    chosen = np.flatnonzero(wanted)
    record_of = np.full(len(entries), -1, np.int64)
    if not len(chosen):
        return chosen, record_of
    physical = entries.physical_offsets[chosen]
    is_first = np.concatenate(([True], physical[1:] != physical[:-1]))
    record_of[chosen] = np.cumsum(is_first) - 1
    return chosen[is_first], record_of


def fetch(
    log: FileRow,
    queue: MessageQueue,
    entries: Entries,
    bounds: Bounds,
    *,
    is_batch: bool,
    lists: Lists = lambda _queue, _offset, _place: True,
) -> Fetched:
    """Read and judge the records that ``entries`` of ``queue`` name.

    An entry whose size alone is wrong gets the size that its record has, in ``entries`` too; but only if a record of that
    size passes its checks there, since the record's size may as well be what is damaged.

    Args:
        log: The commit log.
        queue: Whose entries.
        entries: Of queue offsets that follow each other.
        bounds: Which part of the log counts.
        is_batch: The queue is a batch queue.
        lists: Whether another queue lists a record. If what a record says of itself is listed nowhere, the record is
            damaged, not the entry.

    Raises:
        InvalidError: A file may not be read.
    """
    found = _fetch(log, queue, entries, bounds, is_batch=is_batch, lists=lists)
    if not found.verdicts.any():
        return found
    sizes = entries.sizes.copy()
    if not _mend_sizes(log, entries, found.verdicts, bounds):
        return found
    again = _fetch(log, queue, entries, bounds, is_batch=is_batch, lists=lists)
    is_sound = np.append(again.block.faults == RecordFault.OK, False)[again.record_of]
    wrong = (entries.sizes != sizes) & ~is_sound
    if not wrong.any():
        return again
    entries.sizes[wrong] = sizes[wrong]
    return _fetch(log, queue, entries, bounds, is_batch=is_batch, lists=lists)


def held_end(log: FileRow, queue: MessageQueue, index: QueueIndex, end: int, bounds: Bounds) -> int:
    """Where a queue ends that says ``end``, its last batch held against its record.

    No checksum covers how many queue offsets a batch takes, in the consume queue or in the record; nor where it begins, when
    the batch before does not lead there. Where the two differ the lesser end is taken: what is beyond may never have been.
    """
    unit, is_bound = index.closing_unit(end)
    if not len(unit):
        return end
    base = int(unit["base_offset"][0])
    places, sizes = unit["physical_offset"].astype(np.int64), unit["size"].astype(np.int32)
    entry = Entries(base, places, sizes, np.zeros(1, np.int64))
    block = fetch(log, queue, entry, bounds, is_batch=True).block
    if not len(block) or block.faults[0] != RecordFault.OK or not _is_of_queue(block, queue)[0]:
        return end
    first = int(block.queue_offsets[0])
    if first != base and is_bound:
        return end
    return min(end, first + int(inner_counts(block)[0]))


def _mend_sizes(
    log: FileRow, entries: Entries, verdicts: npt.NDArray[np.int8], bounds: Bounds
) -> bool:
    """Give entries that name the place of a record, whosever it is, the size that it says; whether any had another."""
    inside = (entries.physical_offsets >= bounds.log_min) & (
        entries.physical_offsets < bounds.log_end
    )
    inside &= (entries.physical_offsets > 0) | (entries.sizes != 0)  # zeros name no record
    changed = False
    for at in np.flatnonzero((verdicts != 0) & inside & (verdicts != HoleReason.FOREIGN)).tolist():
        place = int(entries.physical_offsets[at])
        head = log.read(place, HEADER.size)
        if len(head) < HEADER.size:
            continue
        size, magic, _, _, _, _, physical, *_ = HEADER.unpack(head)
        if (
            magic in {MAGIC_V1, MAGIC_V2}
            and physical == place
            and RECORD_BYTES_MIN <= size != entries.sizes[at]
        ):
            entries.sizes[at] = size
            changed = True
    return changed


def _fetch(
    log: FileRow,
    queue: MessageQueue,
    entries: Entries,
    bounds: Bounds,
    *,
    is_batch: bool,
    lists: Lists,
) -> Fetched:
    wanted = readable(entries, bounds, log)
    firsts, record_of = distinct_records(entries, wanted)
    physical, sizes = entries.physical_offsets[firsts], entries.sizes[firsts]
    buffer, positions, is_whole = _read(log, physical, sizes)
    block = parse_records(buffer, positions, sizes)
    check_records(block, expected_physical=physical)
    at = np.flatnonzero(wanted)
    numbers = record_of[at]
    offsets = entries.start + at - block.queue_offsets[numbers]
    counts = inner_counts(block)[numbers] if is_batch else 1
    agrees = np.zeros(len(entries), np.bool_)
    agrees[at] = _is_of_queue(block, queue)[numbers] & (offsets >= 0) & (offsets < counts)
    sound, traces = np.zeros(len(entries), np.bool_), np.zeros(len(entries), np.bool_)
    sound[at] = block.faults[numbers] == RecordFault.OK
    if not sound[at].all():
        traces[at] = _has_traces(block, physical)[numbers]
    others = np.zeros(len(entries), np.bool_)
    for odd in np.flatnonzero(sound & ~agrees).tolist():
        owner, offset = _named(block, int(record_of[odd]))
        others[odd] = not _is_one_unit(entries, odd, owner == queue, offset) and lists(
            owner, offset, int(entries.physical_offsets[odd])
        )
    verdicts = judge(
        Pair(
            is_written=entries.is_written,
            is_within=wanted,
            is_sound=sound,
            is_trace=traces,
            agrees=agrees,
            is_other_listed=others,
        )
    )
    return Fetched(block, record_of, verdicts, is_whole)


def _named(block: RecordBlock, number: int) -> tuple[MessageQueue, int]:
    """The queue and queue offset that a record says are its own."""
    topic = topic_bytes(block, number).decode("utf-8", "surrogateescape")
    return MessageQueue(topic, int(block.queue_ids[number])), int(block.queue_offsets[number])


def _is_one_unit(entries: Entries, at: int, is_own: bool, offset: int) -> bool:
    """Whether an entry, and the one that its record names, are of one unit of a batch queue: its count is damaged."""
    first = offset - entries.start
    if not is_own or not 0 <= first < at:
        return False
    return bool((entries.physical_offsets[first:at] == entries.physical_offsets[at]).all())


def _read(log: FileRow, physical: Longs, sizes: Ints) -> tuple[bytearray, Longs, bool]:
    """All records in one new buffer, where each begins in it, and whether every read was full."""
    reads = plan_reads(physical, sizes, log.within(physical)) if len(physical) else []
    buffer = bytearray(sum(end - start for *_, start, end in reads))
    positions, done = np.zeros(len(physical), np.int64), 0
    for first, last, start, end in reads:
        positions[first:last] = physical[first:last] + (done - start)
        done += end - start
    is_whole = log.read_pieces([(start, end) for *_, start, end in reads], memoryview(buffer))
    return buffer, positions, is_whole


def _is_of_queue(block: RecordBlock, queue: MessageQueue) -> Flags:
    everything = np.arange(len(block))
    same: Flags = topics_equal(block, everything, queue.topic)
    same &= block.queue_ids == queue.queue_id
    return same


def _has_traces(block: RecordBlock, physical: Longs) -> Flags:
    """Whether something says that a record of this size or place once stood there.

    If not, the entry points at nothing: zeros, or the middle of another record.
    """
    known = block.faults >= RecordFault.LENGTHS
    view = memoryview(block.buffer)
    for number in np.flatnonzero(~known).tolist():
        start, size = int(block.positions[number]), int(block.sizes[number])
        says_size = int.from_bytes(view[start : start + 4], "big") == size
        says_place = int.from_bytes(view[start + 28 : start + 36], "big") == physical[number]
        known[number] = says_size or (says_place and physical[number] > 0)
    return known
