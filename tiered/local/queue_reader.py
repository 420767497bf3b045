"""Queue-ordered reading: batches straight from a consume queue, whatever the state of the log.

Used for compensation and verification, and by the follower for the queue offsets that the log's own order does not
give (damaged records, stale entries). Every queue offset asked for comes back, as a message or as a hole.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.format.block import (
    RecordBlock,
    check_records,
    distinct,
    inner_counts,
    parse_records,
    topic_bytes,
    topics_equal,
)
from tiered.format.property_columns import tag_hashes
from tiered.format.record import RECORD_BYTES_MIN, RecordFault
from tiered.format.sysflag import INNER_BATCH
from tiered.local.catalog import SCHEDULE_TOPIC
from tiered.local.chunks import RECORD_BYTES_MAX, LogChunks
from tiered.local.classification import are_wrong_tags, classify_entries
from tiered.local.consumequeues import Entries
from tiered.local.interface import HoleReason, Quarantined, RecordBatch
from tiered.model import MessageQueue, PhysicalOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from tiered.local.consumequeues import Flags, Ints, Longs, QueueIndex
    from tiered.local.mapped_file_queue import MappedFileQueue

    Lists = Callable[[MessageQueue, int, int], bool]
    """(queue, queue offset, local physical offset) -> whether the queue lists that record."""
    from tiered.local.classification import AnomalyCounters
    from tiered.local.matching import Match

    Search = Callable[[Entries, "Fetched"], bool]
    """(entries of one queue, what became of them) -> whether to read them again."""
    Span = tuple[int, int]


# -- fetch -------------------------------------------------------------------------------------------
#
# Fetching the records that consume-queue entries name, in few reads, and judging each of them.
#
# A plan first (which bytes to read in one go), then the reads, then one vectorised check of all records. For any thread;
# nothing is kept between calls.

GAP_BYTES_MAX: Final = 64 << 10
GAP_BYTES_MIN: Final = 512
GAP_PER_BYTE: Final = 2
"""Bytes between two wanted records are read rather than skipped by a second read when they are at most
``GAP_BYTES_MIN``, or at most ``GAP_PER_BYTE`` times the record before and ``GAP_BYTES_MAX``: a batch never costs more
than about seven times its bytes."""
_LOOKED_AT: Final = 32
_LOOKED_AT_MAX: Final = 4096
_LOOKED_AT_BYTES: Final = 1 << 20
"""What is looked at in one go where a message is looked for by its time."""


class UnreadError(Exception):
    """The device fails to read a record: what its queue has from there on waits."""

    def __init__(self, queue_offset: int, place: int) -> None:
        super().__init__(queue_offset, place)
        self.queue_offset = queue_offset
        self.place = place


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records and what became of each entry."""

    block: RecordBlock  # the records that could be asked for, in entry order, each once
    record_of: Longs
    """int64[n], index in ``block`` of each entry's record; -1 where there was nothing to ask for."""
    cases: npt.NDArray[np.int8]
    """int8[n], 0 for a sound record of this queue and offset, else a ``HoleReason``."""
    is_whole: bool
    """Every byte that was asked for could be read. If not, a file may have expired meanwhile."""
    unread: Flags  # bool[n], whose records the device fails to read: nobody knows yet what they are


def plan_reads(
    physical_offsets: Longs, sizes: Ints, within: Longs
) -> list[tuple[int, int, int, int]]:
    """Join neighbouring records into reads ``(first record, one past the last, from byte, to byte)``, in record order.

    ``within``: how far into its file each lies. A read never spans files.
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


@dataclass(frozen=True, slots=True)
class HeldQueue:
    """A queue whose entries are held against the records that they name, in a part of the log. For any thread."""

    log: MappedFileQueue
    queue: MessageQueue
    index: QueueIndex
    log_min: int  # first local physical offset that may be read
    log_end: int  # one past the last
    lists: Lists = lambda _queue, _offset, _place: True
    """Whether another queue lists a record. If what a record says of itself is listed nowhere, the record is damaged, and
    not the entry that names it."""

    def readable(self, entries: Entries) -> Flags:
        """bool[n]: whether each entry names bytes that lie in the log and in one file."""
        physical, sizes = entries.physical_offsets, entries.sizes.astype(np.int64)
        good = entries.is_written & (physical >= self.log_min) & (physical < self.log_end)
        in_file = self.log.file_bytes - self.log.within(physical)
        room = np.minimum(self.log_end - physical, in_file)
        return good & (sizes <= np.minimum(room, RECORD_BYTES_MAX))

    def plan_count(self, entries: Entries, bytes_max: int) -> int:
        """How many entries to take so that their records have at most ``bytes_max`` bytes; at least one record's."""
        firsts, _ = distinct_records(entries, self.readable(entries))
        costs = np.zeros(len(entries), np.int64)
        costs[firsts] = entries.sizes[firsts]
        total = np.cumsum(costs)
        over = np.flatnonzero(total > bytes_max)
        if not len(over):
            return len(entries)
        count = int(over[0])
        if count and total[count - 1]:
            return count
        return int(firsts[1]) if len(firsts) > 1 else len(entries)

    def fetch(self, entries: Entries) -> Fetched:
        """Read and judge the records that entries, which follow each other, name.

        An entry whose size alone is wrong gets the size that its record has, in ``entries`` too; but only if a record of
        that size passes its checks there, since the record's size may as well be what is damaged.
        """
        found = self._fetch(entries)
        if found.cases.any() and self._mend_sizes(entries, found.cases):
            found = self._fetch(entries)
        return found

    def held_end(self, end: int) -> int:
        """Where the queue ends that says ``end``, its last batch held against its record.

        No checksum covers how many queue offsets a batch takes, in the consume queue or in the record; nor where it begins,
        when the batch before does not lead there. Where the two differ the lesser end is taken: what is beyond may never
        have been.
        """
        unit, is_bound = self.index.closing_unit(end)
        if not len(unit):
            return end
        base = int(unit["base_offset"][0])
        places, sizes = unit["physical_offset"].astype(np.int64), unit["size"].astype(np.int32)
        block = self.fetch(Entries(base, places, sizes, np.zeros(1, np.int64))).block
        is_sound = len(block) and block.faults[0] == RecordFault.OK
        if not is_sound or not _is_of_queue(block, self.queue)[0]:
            return end
        first = int(block.queue_offsets[0])
        if first != base and is_bound:
            return end
        return min(end, first + int(inner_counts(block)[0]))

    def first_at_or_after(self, span: Span, time_ms: int) -> int:
        """First queue offset of ``span`` whose store time is at or after ``time_ms``, by bisection; its end without one.

        Holes have no time: they go with the message behind them.
        """
        low, high = min(span), span[1]
        while low < high:
            middle = (low + high) // 2
            at, found_ms = self.first_message((middle, high))
            if at is None or found_ms >= time_ms:
                high = middle
            else:
                low = at + 1
        return low

    def first_message(self, span: Span) -> tuple[int | None, int]:
        """The first queue offset of ``span`` that has a message, and its store time; None without one."""
        start, end = span
        count = 1
        while start < end:
            entries = self.index.entries(start, min(end, start + count))
            entries = entries.head(self.plan_count(entries, _LOOKED_AT_BYTES))
            found = self.fetch(entries)
            good = np.flatnonzero(found.cases == 0)
            if len(good):
                at = int(good[0])
                return start + at, int(found.block.store_timestamps_ms[found.record_of[at]])
            start, count = start + len(entries), min(max(_LOOKED_AT, 2 * count), _LOOKED_AT_MAX)
        return None, 0

    def _mend_sizes(self, entries: Entries, cases: npt.NDArray[np.int8]) -> bool:
        """Give entries that name the place of a sound record, of any queue, its size; whether any had another."""
        changed = False
        places = entries.physical_offsets
        wrong = (cases != 0) & (cases != HoleReason.FOREIGN)
        wrong &= (places >= self.log_min) & (places < self.log_end)
        wrong &= (places > 0) | (entries.sizes != 0)  # zeros name no record
        chunks = LogChunks(self.log)
        for at in np.flatnonzero(wrong).tolist():
            there = chunks.read(int(places[at]), self.log_end, RECORD_BYTES_MIN).block
            if (
                len(there)
                and there.faults[0] == RecordFault.OK
                and there.sizes[0] != entries.sizes[at]
            ):
                entries.sizes[at] = there.sizes[0]
                changed = True
        return changed

    def _fetch(self, entries: Entries) -> Fetched:
        wanted = self.readable(entries)
        firsts, record_of = distinct_records(entries, wanted)
        physical, sizes = entries.physical_offsets[firsts], entries.sizes[firsts]
        buffer, positions, is_whole = _read(self.log, physical, sizes)
        block = parse_records(buffer, positions, sizes)
        check_records(block, expected_physical=physical)
        unread = np.zeros(len(entries), np.bool_)
        if self.log.has_lost:
            is_lost = np.array([*self.log.lost(physical, sizes), False])
            block.faults[is_lost[:-1]] = RecordFault.CRC
            unread = is_lost[record_of]
        at = np.flatnonzero(wanted)
        numbers = record_of[at]
        offsets = entries.start + at - block.queue_offsets[numbers]
        counts = inner_counts(block)[numbers] if self.index.is_batch else 1
        agrees = np.zeros(len(entries), np.bool_)
        agrees[at] = _is_of_queue(block, self.queue)[numbers] & (offsets >= 0) & (offsets < counts)
        sound, traces = np.zeros(len(entries), np.bool_), np.zeros(len(entries), np.bool_)
        sound[at] = block.faults[numbers] == RecordFault.OK
        if not sound[at].all():
            traces[at] = _has_traces(block, physical)[numbers]
        others = np.zeros(len(entries), np.bool_)
        for odd in np.flatnonzero(sound & ~agrees).tolist():
            number = int(record_of[odd])  # what it says of itself
            topic = topic_bytes(block, number).decode("utf-8", "surrogateescape")
            owner = MessageQueue(topic, int(block.queue_ids[number]))
            offset = int(block.queue_offsets[number])
            others[odd] = not _is_one_unit(
                entries, odd, owner == self.queue, offset
            ) and self.lists(owner, offset, int(entries.physical_offsets[odd]))
        cases = classify_entries(
            is_written=entries.is_written,
            is_within=wanted,
            is_sound=sound,
            is_trace=traces,
            agrees=agrees,
            is_other_listed=others,
        )
        return Fetched(block, record_of, cases, is_whole, unread)


def _is_one_unit(entries: Entries, at: int, is_own: bool, offset: int) -> bool:
    """Whether an entry, and the one that its record names, are of one unit of a batch queue: its count is damaged."""
    first = offset - entries.start
    if not is_own or not 0 <= first < at:
        return False
    return bool((entries.physical_offsets[first:at] == entries.physical_offsets[at]).all())


def _read(log: MappedFileQueue, physical: Longs, sizes: Ints) -> tuple[bytearray, Longs, bool]:
    """All records in one new buffer, where each begins in it, and whether every read was full."""
    reads = plan_reads(physical, sizes, log.within(physical)) if len(physical) else []
    buffer = bytearray(sum(end - start for *_, start, end in reads))
    positions, done = np.zeros(len(physical), np.int64), 0
    for first, last, start, end in reads:
        positions[first:last] = physical[first:last] + (done - start)
        done += end - start
    is_whole = log.read_chunks([(start, end) for *_, start, end in reads], memoryview(buffer))
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


# -- batches -----------------------------------------------------------------------------------------
#
# Cutting records out of a buffer into a batch that owns its bytes, with the tag codes that are theirs.


def cut_records(block: RecordBlock, indices: Longs) -> tuple[Buffer, Longs]:
    """The bytes of the records at ``indices``, one after another, and where each begins in them. One copy."""
    positions, sizes = block.positions[indices], block.sizes[indices].astype(np.int64)
    starts = sizes.cumsum() - sizes
    if not len(indices):
        return b"", starts
    return next(_copies(block, positions, positions + sizes, [0])), starts


@dataclass(frozen=True, slots=True)
class TagRule:
    """Lets records rule over the tag codes of the entries that name them."""

    anomalies: AnomalyCounters  # where wrong ones are counted
    has_ext: bool  # codes may be addresses, see ``are_wrong_tags``
    is_live: bool  # the last entry may be half written

    def apply_all(self, found: Sequence[tuple[MessageQueue, Match]], tags: Longs) -> None:
        """Set the tag codes of entries whose records are all listed; one comparison for all queues."""
        if not found:
            return
        own = [match.owns() for _, match in found]
        codes = np.concatenate([match.all_entries.tag_codes for _, match in found])
        unlike = np.flatnonzero(codes != tags[np.concatenate(own)])
        ends = np.cumsum([len(some) for some in own])
        for number in distinct(np.searchsorted(ends, unlike, side="right")).tolist():
            queue, match = found[number]
            self.apply(queue, match.all_entries, own[number], tags)

    def apply(self, queue: MessageQueue, entries: Entries, owns: Longs, tags: Longs) -> None:
        """Set the tag codes of entries to those (``tags``) of their own sound records; ``owns``: -1 where there is none."""
        if not len(tags) or queue.topic == SCHEDULE_TOPIC:
            return  # (there the tag code is the time of delivery)
        unlike = np.flatnonzero((entries.tag_codes != tags[owns]) & (owns >= 0))
        if not len(unlike):
            return
        codes = entries.tag_codes[unlike]
        hashes = tags[owns[unlike]]
        is_last = self.is_live and unlike[-1] == len(entries) - 1
        wrong = are_wrong_tags(codes, hashes, has_ext=self.has_ext, is_live=is_last)
        for at in unlike[wrong].tolist():
            self.anomalies.wrong_tag_code(queue, entries.start + at)
        entries.tag_codes[unlike] = hashes


def only(block: RecordBlock, indices: Longs) -> RecordBlock:
    """A block of some records of another one."""
    columns = {name: getattr(block, name)[indices] for name in block.__slots__ if name != "buffer"}
    return RecordBlock(buffer=block.buffer, **columns)


def sound_batches(
    block: RecordBlock, found: Sequence[tuple[MessageQueue, Match]]
) -> list[RecordBatch]:
    """Batches without holes, one a queue, of records that are all listed, in order and without a gap.

    Each owns its bytes: it lives as long as its queue needs it, and keeps nothing else in memory.
    """
    if not found:
        return []
    indices = np.concatenate([match.indices for _, match in found])
    sizes, times = block.sizes[indices], block.store_timestamps_ms[indices]
    positions, physical = block.positions[indices], block.physical_offsets[indices]
    properties = block.properties_sizes[indices]
    is_plain = not (block.sys_flags[indices] & INNER_BATCH).any()
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    highs = np.cumsum([len(match.indices) for _, match in found]).tolist()
    data = _copies(block, positions, positions + sizes, [0, *highs[:-1]])
    batches, low = [], 0
    for (queue, match), high, copied in zip(found, highs, data, strict=True):
        # Copies: a view of what all queues share would keep the whole chunk's columns as long as one batch incarnations.
        mine, entries = slice(low, high), match.all_entries
        columns = [starts[mine] - starts[low], sizes[mine], times[mine], physical[mine]]
        if match.counts is None:
            columns = [column.copy() for column in columns]
        else:  # each message of an inner batch has its record
            columns = [np.repeat(column, match.counts) for column in columns]
        batches.append(
            RecordBatch(
                queue=queue,
                base_offset=QueueOffset(entries.start),
                data=copied,
                positions=columns[0],
                sizes=columns[1],
                tag_codes=entries.tag_codes.copy(),
                store_timestamps_ms=columns[2],
                physical_offsets=columns[3],
                properties_sizes=properties[mine].copy()
                if is_plain and match.counts is None
                else None,
            )
        )
        low = high
    return batches


def _copies(
    block: RecordBlock, positions: Longs, ends: Longs, firsts: list[int]
) -> Iterator[bytes]:
    """The bytes of each queue's records. What lies side by side is copied in one piece."""
    is_apart = np.ones(len(positions), np.bool_)
    is_apart[1:] = positions[1:] != ends[:-1]
    is_apart[firsts] = True
    runs = np.flatnonzero(is_apart)
    lasts = np.append(runs[1:], len(positions)) - 1
    chunks = map(slice, positions[runs].tolist(), ends[lasts].tolist())
    views = map(memoryview(block.buffer).__getitem__, chunks)
    for low, high in pairwise([*np.searchsorted(runs, firsts).tolist(), len(runs)]):
        yield b"".join(islice(views, high - low))  # few at a time: else the collector looks at each


def fill_times(times: Longs, known: Flags) -> Longs:
    """Give each unknown time that of the known one before it, or of the first behind it, or -1."""
    if known.all():
        return times
    if not known.any():
        return np.full(len(times), -1, np.int64)
    at = np.where(known, np.arange(len(times)), -1)
    last_known = np.maximum.accumulate(at)
    last_known[last_known < 0] = int(np.argmax(known))
    filled: Longs = times[last_known]
    return filled


# -- reader ------------------------------------------------------------------------------------------


BATCH_COUNT_MAX: Final = 0x7FFF
"""Messages of one inner batch at most."""
HOLES_MAX: Final = 4096
"""Queue offsets in a row of which nothing is listed: so many are holes, item by item; more are a gap, which is a range."""
_SILENCE_READ: Final = 1 << 16


def read_batch(
    held: HeldQueue,
    tags: TagRule,
    span: Span,
    *,
    search: Search,
    bytes_max: int,
    count_max: int,
) -> RecordBatch | None:
    """Read queue offsets of ``span``; at least one record, else within ``bytes_max``.

    ``count_max`` items, but an inner batch is not divided. ``search`` is asked when some entries name no record of their
    own; it says whether that has changed.

    A batch ends before more than ``HOLES_MAX`` queue offsets of which nothing is listed (``first_said``). None when
    ``search`` said so, or bytes that should be there could not be read: look whether the log's minimum has moved, and ask
    again (``log_min`` must then be the new one). UnreadError: the device fails to read the first record.
    """
    log, index, (start, end) = held.log, held.index, span
    slack = BATCH_COUNT_MAX if index.is_batch else 0
    entries = index.entries(start, min(end, start + count_max + slack))
    entries = entries.head(whole_records(entries, count_max))
    entries = entries.head(before_silence(entries))
    entries = entries.head(held.plan_count(entries, bytes_max))
    found = held.fetch(entries)
    if not found.is_whole:
        log.rescan()
        if log.bases and log.bases[0] > held.log_min:
            return None
    if found.unread.any():
        count = int(np.argmax(found.unread))
        if not count:
            raise UnreadError(entries.start, int(entries.physical_offsets[0]))
        entries = entries.head(count)
        found = held.fetch(entries)
    if found.cases.any() and search(entries, found):
        return None
    return _compose(held.queue, entries, found, tags)


def first_said(index: QueueIndex, start: int, end: int) -> int:
    """Where to begin: at ``start``, or behind a long run of queue offsets of which nothing is listed, at most at ``end``."""
    at, count = start, 1
    while at < end:
        stop = min(end, at + count)
        written = index.entries(at, stop).is_written
        if written.any():
            at += int(np.argmax(written))
            break
        at, count = index.next_written_file(stop, end), _SILENCE_READ
    return at if at - start > HOLES_MAX else start


def before_silence(entries: Entries) -> int:
    """How many entries stand before the first long run of those that say nothing; all of them when they begin with it."""
    written = np.flatnonzero(np.concatenate(([True], entries.is_written, [True])))
    long = np.flatnonzero(np.diff(written) - 1 > HOLES_MAX)
    return int(written[long[0]]) or len(entries) if len(long) else len(entries)


def whole_records(entries: Entries, count_max: int) -> int:
    """How many entries to take: ``count_max``, and the rest of the record that the last of them names."""
    if len(entries) <= count_max:
        return len(entries)
    physical = entries.physical_offsets
    is_other = (physical[count_max:] != physical[count_max - 1]) | (entries.sizes[count_max:] <= 0)
    return count_max + int(np.argmax(is_other)) if is_other.any() else len(entries)


def _compose(queue: MessageQueue, entries: Entries, found: Fetched, rule: TagRule) -> RecordBatch:
    good = found.cases == 0
    numbers = found.record_of[good]
    used = distinct(numbers)
    data, positions = cut_records(found.block, used)
    sizes = np.zeros(len(entries), np.int32)
    starts = np.zeros(len(entries), np.int64)
    times = np.full(len(entries), -1, np.int64)
    physical = np.where(found.cases == HoleReason.MISSING, -1, entries.physical_offsets)
    sizes[good] = entries.sizes[good]
    starts[good] = positions[np.searchsorted(used, numbers)]
    times[good] = found.block.store_timestamps_ms[numbers]
    owns = np.where(good, found.record_of, -1)
    rule.apply(queue, entries, owns, tag_hashes(found.block))
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(entries.start),
        data=data,
        positions=starts,
        sizes=sizes,
        tag_codes=np.where(good, entries.tag_codes, found.cases.astype(np.int64)),
        store_timestamps_ms=fill_times(times, good),
        physical_offsets=physical,
        quarantined=() if good.all() else _holes(queue, entries, found, rule.anomalies),
    )


def _holes(
    queue: MessageQueue, entries: Entries, found: Fetched, anomalies: AnomalyCounters
) -> tuple[Quarantined, ...]:
    """Count the holes; the bytes of those whose record is there and damaged go to quarantine."""
    kept = []
    for at in np.flatnonzero(found.cases).tolist():
        reason, offset = HoleReason(int(found.cases[at])), QueueOffset(entries.start + at)
        anomalies.hole(queue, offset, reason)
        if reason is not HoleReason.DAMAGED:
            continue
        number = int(found.record_of[at])
        begin = int(found.block.positions[number])
        raw = bytes(memoryview(found.block.buffer)[begin : begin + int(entries.sizes[at])])
        fault = RecordFault(int(found.block.faults[number]))
        detail = "names another queue or offset" if fault is RecordFault.OK else fault.name.lower()
        place = PhysicalOffset(int(entries.physical_offsets[at]))
        kept.append(Quarantined(offset, place, reason, detail, raw))
    return tuple(kept)
