"""Queue-ordered reading: batches straight from a consume queue, whatever the state of the log.

Used for compensation and verification, and by the follower for the queue offsets that the log's own order does not
give (damaged records, stale entries). Every queue offset asked for comes back, as a message or as a hole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.format.block import tag_guesses
from tiered.format.record import RecordFault
from tiered.local.batches import TagRule, cut_records, fill_times
from tiered.local.face import HoleReason, Quarantined, RecordBatch
from tiered.local.fetch import Bounds, Fetched, distinct_records, fetch, readable
from tiered.model import MessageQueue, PhysicalOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.local.consumequeues import QueueIndex
    from tiered.local.entries import Entries
    from tiered.local.fetch import Lists
    from tiered.local.files import FileRow
    from tiered.local.sightings import Sightings

    Search = Callable[[Entries, Fetched], bool]
    """(entries of one queue, what became of them) -> whether to read them again."""

BATCH_COUNT_MAX: Final = 0x7FFF
"""Messages of one inner batch at most."""
HOLES_MAX: Final = 4096
"""Queue offsets in a row of which nothing is listed: so many are holes, item by item; more are a gap, which is a range."""
_SILENCE_READ: Final = 1 << 16


def read_batch(
    log: FileRow,
    tags: TagRule,
    queue: MessageQueue,
    index: QueueIndex,
    lists: Lists,
    *,
    search: Search,
    start: int,
    end: int,
    bounds: Bounds,
    bytes_max: int,
    count_max: int,
) -> RecordBatch | None:
    """Read queue offsets from ``start``, at most to ``end``.

    Args:
        log: The commit log.
        tags: What becomes of tag codes; where holes are counted.
        queue: Whose.
        index: Its consume queue.
        lists: Whether another queue lists a record.
        search: Asked when some entries name no record of their own; it says whether that has changed.
        start: First queue offset, inclusive.
        end: Exclusive, above ``start``.
        bounds: Which part of the log counts.
        bytes_max: Stop before exceeding it, but take at least one record.
        count_max: Items at most, but an inner batch is not divided.

    Returns:
        A batch ends before more than ``HOLES_MAX`` queue offsets of which nothing is listed (``first_said``). None when
        ``search`` said so, or bytes that should be there could not be read: look whether the log's minimum has moved,
        and ask again (``bounds.log_min`` must then be the new one).

    Raises:
        InvalidError: A file may not be read.
    """
    slack = BATCH_COUNT_MAX if index.is_batch else 0
    entries = index.entries(start, min(end, start + count_max + slack))
    entries = entries.head(whole_records(entries, count_max))
    entries = entries.head(before_silence(entries))
    entries = entries.head(plan_count(entries, bounds, log, bytes_max))
    found = fetch(log, queue, entries, bounds, is_batch=index.is_batch, lists=lists)
    if not found.is_whole:
        log.rescan()
        if log.bases and log.bases[0] > bounds.log_min:
            return None
    if found.verdicts.any() and search(entries, found):
        return None
    return _compose(queue, entries, found, tags)


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


def plan_count(entries: Entries, bounds: Bounds, log: FileRow, bytes_max: int) -> int:
    """How many entries to take so that their records have at most ``bytes_max`` bytes; at least one record's."""
    wanted = readable(entries, bounds, log)
    firsts, _ = distinct_records(entries, wanted)
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


def _compose(queue: MessageQueue, entries: Entries, found: Fetched, rule: TagRule) -> RecordBatch:
    good = found.verdicts == 0
    numbers = found.record_of[good]
    used = np.unique(numbers)
    data, positions = cut_records(found.block, used)
    sizes = np.zeros(len(entries), np.int32)
    starts = np.zeros(len(entries), np.int64)
    times = np.full(len(entries), -1, np.int64)
    physical = np.where(found.verdicts == HoleReason.MISSING, -1, entries.physical_offsets)
    sizes[good] = entries.sizes[good]
    starts[good] = positions[np.searchsorted(used, numbers)]
    times[good] = found.block.store_timestamps_ms[numbers]
    owns = np.where(good, found.record_of, -1)
    rule.apply(queue, entries, found.block, owns, tag_guesses(found.block))
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(entries.start),
        data=data,
        positions=starts,
        sizes=sizes,
        tag_codes=np.where(good, entries.tag_codes, found.verdicts.astype(np.int64)),
        store_timestamps_ms=fill_times(times, good),
        physical_offsets=physical,
        quarantined=() if good.all() else _holes(queue, entries, found, rule.sightings),
    )


def _holes(
    queue: MessageQueue, entries: Entries, found: Fetched, sightings: Sightings
) -> tuple[Quarantined, ...]:
    """Count the holes; the bytes of those whose record is there and damaged go to quarantine."""
    kept = []
    for at in np.flatnonzero(found.verdicts).tolist():
        reason = HoleReason(int(found.verdicts[at]))
        sightings.hole(queue, entries.start + at, reason)
        if reason is HoleReason.DAMAGED:
            kept.append(_quarantine(entries, found, at))
    return tuple(kept)


def _quarantine(entries: Entries, found: Fetched, at: int) -> Quarantined:
    number = int(found.record_of[at])
    begin = int(found.block.positions[number])
    fault = RecordFault(int(found.block.faults[number]))
    detail = "names another queue or offset" if fault is RecordFault.OK else fault.name.lower()
    raw = bytes(memoryview(found.block.buffer)[begin : begin + int(entries.sizes[at])])
    return Quarantined(
        queue_offset=QueueOffset(entries.start + at),
        physical_offset=PhysicalOffset(int(entries.physical_offsets[at])),
        reason=HoleReason.DAMAGED,
        detail=detail,
        raw=raw,
    )
