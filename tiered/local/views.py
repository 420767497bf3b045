"""What holds of a store now, stopped or running: where its log ends, and what its queues list within that end.

**A stopped store** (``DeadView``): one look at it, which stays true as long as nobody starts on it. The log ends where a
broker's start would end it (``tiered.local.chunks``). Within that end everything
counts: consume queues as they stand, cut as a start cuts them, and, where they say nothing, entries rebuilt from the
log in memory. What is walked at opening: the part that a start walks; the whole log when something suggests that
consume queues are missing, or when it is small (``whole_log_bytes_max``) and their entries do not tile it, one record
behind the other. A follower that meets an orphan record later has it decided on here as well, so that nothing is
passed over in silence.

A file of a consume queue that lists another queue's records, all of them such as no entry of their own names, has
another's place (a copy went wrong, say): it counts as missing, and is named.

A record whose queue offset is taken by another entry, or that a start would not list, is dropped and counted: a broker
started on the store would not serve it (``tiered.local.orphan_records``).

Behind that end there may be more than a torn tail: where one record in the middle of the log is damaged, a start gives
up all that stand behind it. They are not handed out, since the broker will give their queue offsets to other messages;
but they wait, are counted, and the place is named, so that a person can put the file right before the broker starts.
The same holds of what the log has not at all, a file being gone or zeros, though a clean stop's checkpoint speaks of it.

**A store that a broker runs on** (``LiveView``): ``log_end`` is the frontier:
everything below it is committed, and it only moves forward as long as the
same broker runs (the ``abort`` file stands as it stood). It begins in the newest log file whose first record is sound:
a broker's start deletes every file behind the end that it decides on, so only the file that holds that end has a stale
tail. From there the log is walked in its own order, with a broker's checks:

- the walk stops at the first record that fails;
- once a record stored after the broker's start was met, it stops at the first one stored before that start: that is
  what a start gave up, or the clock was set back. The broker shows which: once it is seen to write behind such records
  they are in its log (``Growth``), and so they are by its word (``broker_max_offset``);
- where replicas may truncate the log (``epochFileCheckpoint`` is there), records stored before the start count only
  when one stored after it stands behind them, or the broker says so (``broker_max_offset``);
- it stops at the first record that its consume queue does not list yet. Queues are written in log order, so a record
  that is not listed although a later one is, is one that the broker dropped, or its entry is damaged: after a second it
  is passed over and counted, or listed in memory (``tiered.local.orphan_records``);
- a record may have been read half written and be listed by now; no checksum covers its properties. So the file that is
  being written is read again behind the consume queues, and the walk stops at the first record that has changed.

The frontier stands before damage until something shows that the broker has written behind it: a listed record that was
stored after the start, or the broker's word; and then only if no sound record has come to where it stands. Until then
what is listed behind it is counted, and the place told: "not yet", and never a hole. Anything read is used only if the
``abort`` file still stands when the reading is over. All methods under the store's lock.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.format.block import distinct, parse_records, queue_groups, topic_bytes
from tiered.format.items import FILLER_SIZE, is_message
from tiered.format.record import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, SIZE_AND_MAGIC, RecordFault
from tiered.local.chunks import (
    CHUNK_BYTES,
    FAR,
    Chunk,
    Growth,
    LogChunks,
    LogIndex,
    Next,
    count_sound,
    find_log_end,
    find_new,
    following,
    plan_start,
    read_head,
    read_heads,
    walk_sound,
)
from tiered.local.classification import Case
from tiered.local.consumequeues import QueueTail, Rebuilt
from tiered.local.interface import HoleReason, Waiting
from tiered.local.matching import Match, SmallQueues, match, match_states, orphan_indices
from tiered.local.orphan_records import OrphanRecords
from tiered.local.queue_reader import HeldQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiered.clock import Clock
    from tiered.format.block import RecordBlock
    from tiered.format.broker_checkpoint import Checkpoint
    from tiered.local.catalog import Catalog, QueueState
    from tiered.local.classification import AnomalyCounters
    from tiered.local.consumequeues import Entries, Flags
    from tiered.local.mapped_file_queue import MappedFileQueue
    from tiered.local.orphan_records import Orphans
    from tiered.local.queue_reader import Fetched
    from tiered.model import MessageQueue

_LOG: Final = logging.getLogger("tiered.local")


class View:
    """What holds of a store, whether or not a broker runs on it."""

    is_live = False
    torn_bytes = 0  # bytes behind the log's end that are not zero

    def __init__(self, log: MappedFileQueue, catalog: Catalog, anomalies: AnomalyCounters) -> None:
        self.log = log  # the commit log
        self.catalog = catalog  # the queues
        self.log_end = 0  # what lies below it is committed
        self.undecided_end = FAR  # of the log from here on it has been decided what counts
        self.orphans = OrphanRecords(log, catalog, anomalies, is_growing=self.is_live)
        self._anomalies = anomalies
        self._chunks = LogChunks(log)

    @property
    def log_min(self) -> int:
        """First physical offset of the log; its end when there are no files."""
        return self.log.bases[0] if self.log.bases else self.log_end

    def decide(self, state: QueueState, block: RecordBlock, found: Match) -> Match:
        """Decide on records that their queue does not list, and that stand in the committed log; what it lists then."""
        raise NotImplementedError

    def waiting(self) -> Waiting:
        """What is in the store but not proven committed."""
        raise NotImplementedError

    def held(
        self, state: QueueState, log_min: int | None = None, log_end: int | None = None
    ) -> HeldQueue:
        """A queue, to be held against a part of the log; by default what is committed."""
        low = self.log_min if log_min is None else log_min
        high = self.log_end if log_end is None else log_end
        return HeldQueue(self.log, state.queue, state.index, low, high)

    def _end_place(self) -> str:
        base = self.log.base_of(self.log_end)
        base = self.log.bases[-1] if base is None else base
        return f"{self.log.path(base)}, byte {self.log_end - base}"


# -- a stopped store ---------------------------------------------------------------------------------


_FILE_ENTRIES: Final = 64
"""Entries of a file that are looked at to know whose it is."""
_STRANGE_MIN: Final = 3
"""Records that are damaged alike in their queue or offset, and sound else, are so many at most."""
_FIRSTS: Final = 256
"""First records of files that are looked at in one go."""
_LEFT_READ: Final = 4_000
"""Entries of one queue behind the log's end that are looked at in one go."""


class DeadView(View):
    """What is committed in a stopped store, by one look at it."""

    def __init__(
        self,
        log: MappedFileQueue,
        catalog: Catalog,
        anomalies: AnomalyCounters,
        *,
        is_clean: bool,
        checkpoint: Checkpoint,
        whole_log_bytes_max: int,
    ) -> None:
        super().__init__(log, catalog, anomalies)
        self._is_clean = is_clean
        self._checkpoint = checkpoint
        before = anomalies.counts()
        self._open(whole_log_bytes_max)
        if self._ignore_files_of_others():
            anomalies.forget(before)
            self._open(whole_log_bytes_max)

    def waiting(self) -> Waiting:
        """Records behind damage, which a broker's start would give up."""
        return self._waiting

    def decide(self, state: QueueState, block: RecordBlock, found: Match) -> Match:
        """See ``View``. Where their neighbours are too far apart, the whole log is looked at, once."""
        places = block.physical_offsets[orphan_indices(block, found)]
        places = places[places < self.undecided_end]
        if not len(places) or not self._is_known(state.queue):
            return found
        first, last = int(places.min()), int(places.max())
        if self.orphans.look_around(state, first, last, self.undecided_end) is None:
            self._scan(self.log_min, self.undecided_end)
            self.orphans.decide(self.log_min)
            self.undecided_end = self.log_min
        return match(state.index, block, found.indices)

    def log_index(self) -> LogIndex:
        """Where records begin; for one walk of the log."""
        large = [
            (state.index, None)
            for queue, state in self.catalog.states.items()
            if not self.listing.is_here(queue)
        ]
        large += [(index, None) for index in self.catalog.others]
        return LogIndex(lambda: large, self._small)

    # -- opening ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.log_end = self.torn_bytes = 0
        self.listing = SmallQueues()  # entries of the small queues
        self._small = self.listing.listed()  # where the records are that those name
        self._tails: dict[MessageQueue, QueueTail] = {}
        self._listed: dict[MessageQueue, int] = {}
        """One past the last queue offset of which a record was seen that counts."""
        self.orphans = OrphanRecords(self.log, self.catalog, self._anomalies)
        self.undecided_end = FAR
        self._last_stored_ms = 0  # store time of the last record within the log's end
        self._suspects: dict[MessageQueue, QueueState] = {}
        """Queues some of whose records are not listed, another being listed in their place."""
        self._waiting = Waiting()
        for state in self.catalog.states.values():
            state.min = state.end = 0
            state.index.rebuilt = Rebuilt()

    def _open(self, whole_log_bytes_max: int) -> None:
        self._begin()
        self.catalog.load()
        if not self.log.bases:
            return
        self.listing = SmallQueues(self.catalog.states.values())
        self._small = self.listing.listed()
        known = self.listing.ends(0, 0)
        for queue, state in self.catalog.states.items():
            self._tails[queue] = known[queue][0] if queue in known else state.index.tail()
        start = plan_start(
            read_heads(self.log, self._chunks),
            is_clean=self._is_clean,
            checkpoint=self._checkpoint,
            listed_end=self._listed_end(),
        )
        chunks = LogChunks(self.log, self.log_index())
        end = find_log_end(self.log, chunks, start, self._visit_replayed)
        self.log_end, self.torn_bytes = end.end, end.torn_bytes
        if start > self.log.bases[0] and self._needs_whole_scan(start, whole_log_bytes_max):
            self._scan(self.log.bases[0], start)
            start = self.log.bases[0]
        self.orphans.decide(start)
        self.undecided_end = start
        self._set_all_bounds()
        self.catalog.log_min = self.log_min
        if self.torn_bytes or not self._is_clean or self._is_cut_short():
            self._waiting = self._find_given_up()

    def _suspect(self, state: QueueState, found: Match) -> None:
        if bool((~found.is_listed & (found.listed_at >= 0)).any()):
            self._suspects[state.queue] = state

    def _ignore_files_of_others(self) -> bool:
        """Look at the files of suspected queues; whether any is not to be believed."""
        strange = [
            (state, base)
            for state in self._suspects.values()
            for base in state.index.row.bases
            if self._is_of_others(state, base)
        ]
        for state, base in strange:
            path = state.index.row.path(base)
            self._anomalies.note(f"{path} lists other queues' records: it was taken for missing")
            state.index.row.ignore(base)
        return bool(strange)

    def _is_of_others(self, state: QueueState, base: int) -> bool:
        """Whether a file of a consume queue lists none of the queue's records, and some that nobody else lists."""
        index = state.index
        first = index.first_of_file(base)
        entries = index.entries(first, first + _FILE_ENTRIES)
        found = replace(self.held(state), lists=self.catalog.lists).fetch(entries)
        is_sound = np.append(found.block.faults == RecordFault.OK, False)[found.record_of]
        is_own, strange = found.cases == Case.LISTED, found.cases == Case.DAMAGED
        unnamed = len(distinct(found.record_of[strange & is_sound]))
        return unnamed >= _STRANGE_MIN and not is_own.any()

    def _is_cut_short(self) -> bool:
        """Whether the log ends before what was on the disk at a clean stop.

        Consume queues alone do not tell: they may go on listing what an earlier start has given up.
        """
        return self._is_clean and self._checkpoint.physical_timestamp_ms > self._last_stored_ms

    def _has_more(self) -> bool:
        """Whether behind the log's end there is more than one record that is torn, as of a copy that lags behind."""
        head = self.log.read(self.log_end, SIZE_AND_MAGIC.size)
        if len(head) < SIZE_AND_MAGIC.size:
            return False
        size, magic = SIZE_AND_MAGIC.unpack(head)
        own = size if magic in {MAGIC_V1, MAGIC_V2} else SIZE_AND_MAGIC.size
        return self.torn_bytes > own

    def _find_given_up(self) -> Waiting:
        """Count what consume queues list behind the log's end and a start would give up.

        Sound records, and the damaged one at the end: alone, it is the torn tail of a crash, but not after a clean stop. One
        that was stored before the last one within the end is left from an earlier start, which has given it up. And what
        the log has not, where it is known that it had more.
        """
        records = size = lost = gone = 0
        for state in self.catalog.states.values():
            for entries, found in self._entries_behind_end(state):
                good = np.flatnonzero(found.cases == Case.LISTED)
                numbers = distinct(found.record_of[good])
                is_new = found.block.store_timestamps_ms[numbers] >= self._last_stored_ms
                records += int(is_new.sum())
                size += int(found.block.sizes[numbers[is_new]].sum())
                behind = entries.is_written & (entries.physical_offsets >= self.log_end)
                behind &= found.cases != Case.LISTED
                gone += len(distinct(entries.physical_offsets[behind]))
                behind &= entries.physical_offsets == self.log_end
                behind &= found.cases == Case.DAMAGED
                lost += int(behind.any())
        if self._is_cut_short():
            lost = max(gone, int(self._has_more()))  # consume queues may be lost as well
        if not records and not (lost and self._is_clean):
            if gone and not self._is_clean:
                self._anomalies.note(
                    f"consume queues list {gone} records behind the log's end, which a crash took or a start gave up"
                )
            return Waiting()
        found_there = f"at and behind {self._end_place()}, where a record is damaged or gone"
        _LOG.warning("%d records are not tiered: %s", records + lost, found_there)
        does = "a broker's start would give them up; put the file right before that"
        return Waiting(records + lost, size, f"{found_there}: {does}", is_behind_damage=True)

    def _entries_behind_end(self, state: QueueState) -> Iterator[tuple[Entries, Fetched]]:
        """What a queue lists behind its end, and the records behind the log's end that it names."""
        held = self.held(state, self.log_end, self.log.end)
        at, end = state.end, self._tails.get(state.queue, QueueTail(0, -1)).end
        while at < end:
            entries = state.index.entries(at, min(end, at + _LEFT_READ))
            if not entries.is_written.any():
                return  # a damaged last unit may name any end
            entries = entries.head(held.plan_count(entries, CHUNK_BYTES))
            yield entries, held.fetch(entries)
            at += len(entries)

    def _listed_end(self) -> int:
        ends = [tail.max_physical for tail in self._tails.values()]
        ends += [index.tail().max_physical for index in self.catalog.others]
        return max(ends, default=-1)

    def _visit_replayed(self, chunk: Chunk, count: int) -> None:
        sound = np.zeros(len(chunk.block), np.bool_)
        sound[:count] = True
        if count:
            self._last_stored_ms = int(chunk.block.store_timestamps_ms[count - 1])
        self._take(chunk.block, sound, replayed=not self._is_clean)

    def _take(self, block: RecordBlock, sound: Flags, *, replayed: bool) -> None:
        groups = self.listing.take(block, queue_groups(block, among=sound))
        for state, found in match_states(self.catalog, block, groups):
            if not found.is_all_listed:
                self._suspect(state, found)
                orphans = self._orphans(state, block, found, replayed=replayed)
                self.orphans.note(state, orphans)
            end = found.last_listed()[1]
            self._listed[state.queue] = max(end, self._listed.get(state.queue, 0))

    def _scan(self, position: int, limit: int) -> None:
        """Walk the log below recovery's start for records that no consume queue lists."""
        for chunk in self.orphans.walk(position, limit, self.log_index()):
            self._take(chunk.block, chunk.block.faults == RecordFault.OK, replayed=False)

    def _needs_whole_scan(self, start: int, whole_log_bytes_max: int) -> bool:
        """Whether the log is small and not tiled by what is listed, or what begins a file is not listed where it should."""
        if self.log_end - self.log.bases[0] <= whole_log_bytes_max:
            return not (self._is_tiled(start) and self._begin_with_own())
        for base in self.log.bases:
            if base >= start:
                break
            chunk = self._chunks.read(base, base + self.log.file_bytes, 1 << 12, check_crc=False)
            if self._has_orphans(chunk.block):
                self._anomalies.note(
                    "consume queues lack entries: the whole log was scanned for them"
                )
                return True
        return False

    def _is_tiled(self, end: int) -> bool:
        """Whether consume queues list every record below ``end``, where a file begins: each once, nothing between."""
        index = self.log_index()
        for base in self.log.bases:
            if base >= end:
                break
            stop = base + self.log.file_bytes
            at = index.tiled_end(base, stop)
            head = self.log.read(at, min(SIZE_AND_MAGIC.size, stop - at))
            if len(head) == SIZE_AND_MAGIC.size and SIZE_AND_MAGIC.unpack(head)[1] != MAGIC_BLANK:
                return False
            if at < stop and not head:
                return False
        return True

    def _begin_with_own(self) -> bool:
        """Whether each file of a consume queue begins with a record of its own queue, so that none has another's place."""
        firsts: list[tuple[MessageQueue, int, int, int]] = []
        for queue, state in self.catalog.states.items():
            index = state.index
            if index.is_batch:
                return False
            for base in index.row.bases:
                at = base // index.unit_bytes
                unit = index.units(at, at + 1)
                if len(unit) and 0 <= unit["physical_offset"][0] < self.log_min:
                    at = index.first_not_below(self.log_min, at + index.row.file_bytes)
                    if at >= (base + index.row.file_bytes) // index.unit_bytes:
                        continue  # it names nothing that is left
                    unit = index.units(at, at + 1)
                if not len(unit) or not is_message(unit)[0]:
                    return False
                firsts.append((queue, at, int(unit["physical_offset"][0]), int(unit["size"][0])))
        firsts.sort(key=itemgetter(2))
        return all(self._are_own(firsts[n : n + _FIRSTS]) for n in range(0, len(firsts), _FIRSTS))

    def _are_own(self, named: Sequence[tuple[MessageQueue, int, int, int]]) -> bool:
        """Whether at some places stand records of so many bytes that are of these queues, at these queue offsets."""
        if any(size > CHUNK_BYTES for *_, size in named):
            return False
        data = [self.log.read(place, size) for *_, place, size in named]
        sizes = np.array([size for *_, size in named], np.int32)
        block = parse_records(b"".join(data), np.cumsum(sizes, dtype=np.int64) - sizes, sizes)
        found = zip(block.queue_ids.tolist(), block.queue_offsets.tolist(), strict=True)
        return block.is_sound and all(
            (queue.queue_id, at) == ids
            and queue.topic.encode("utf-8", "surrogateescape") == topic_bytes(block, number)
            for number, ((queue, at, *_), ids) in enumerate(zip(named, found, strict=True))
        )

    def _has_orphans(self, block: RecordBlock) -> bool:
        for state, found in match_states(self.catalog, block, queue_groups(block)):
            if not found.is_all_listed:
                self._suspect(state, found)
                rows = self._orphans(state, block, found, replayed=False)
                orphans = rows[~rows["is_listed"]]
                around = self.orphans.around(state, int(orphans["place"][0]))
                cases, _ = self.orphans.classify(state, orphans, *around, self.log.end)
                if (cases == Case.COUNTS).any():
                    return True
        return False

    def _set_all_bounds(self) -> None:
        known, seen = self.listing.ends(self.log_min, self.log_end), self.listing.seen()
        for queue, state in self.catalog.states.items():
            tail, is_inside = known.get(queue, (QueueTail(0, -1), False))
            self._listed[queue] = max(seen.get(queue, 0), self._listed.get(queue, 0))
            if is_inside and self._listed[queue] <= tail.end and not state.index.rebuilt.bounds:
                state.min, state.end = state.index.span()[0], tail.end
            else:
                self._set_bounds(state)

    def _set_bounds(self, state: QueueState) -> None:
        index = state.index
        held = self.held(state, log_end=self.log.end)
        end = held.held_end(index.cut_end(self.log_end))
        end = max(end, self._listed.get(state.queue, 0))
        rebuilt = index.rebuilt.bounds
        if rebuilt is not None:
            end = max(end, rebuilt[1])
        first = index.span()[0]
        low = index.first_not_below(self.log_min, end) if index.row.bases else end
        if rebuilt is not None:
            low = min(low, rebuilt[0])
        state.min, state.end = min(low, end), end
        self._anomalies.count(
            "below_min_entries", max(0, state.min - first) if index.row.bases else 0
        )

    # -- orphan records --------------------------------------------------------------------------

    def _orphans(
        self, state: QueueState, block: RecordBlock, found: Match, *, replayed: bool
    ) -> Orphans:
        """What is known of records some of which their queue does not list.

        A start passes by those of a deleted topic. After a crash (``replayed``) it lists again what lies above all that the
        queue lists, and passes by what it takes for listed already; below the end of the queue an entry that says nothing
        is a lost page, which it fills too.
        """
        orphans = self.orphans.facts(block, found)
        if replayed:
            tail = self._tails.get(state.queue, QueueTail(0, -1))
            end = max(tail.end, self._listed.get(state.queue, 0))
            is_below = orphans["place"] + orphans["size"] <= tail.max_physical
            orphans["is_passed_by"] = is_below & (orphans["offset"] >= end)
        else:
            orphans["is_passed_by"] = not self._is_known(state.queue)
        return orphans

    def _is_known(self, queue: MessageQueue) -> bool:
        """Whether records of a queue without entries count: not those of a topic that was deleted."""
        names = self.catalog.topics.names
        if names is None or queue.topic in names:
            return True
        self.catalog.leave_out(queue.topic, "deleted topic: records are left in the log")
        return False


# -- a store that a broker runs on -------------------------------------------------------------------


_CHUNK_BYTES_MIN: Final = 64 << 10
_LOOKED_AT: Final = 16
"""Entries of a queue that are looked at in one go."""
_COUNTED_AT_ONCE: Final = 16_384
_AGAIN_S: Final = 1.0
_BROKEN_AGAIN_S: Final = 1.0
_DROPPED_AFTER_S: Final = 1.0
_EMPTY_AGAIN_S: Final = 10.0
_TOLD_AFTER_S: Final = 2.0
"""What the broker said last may be a second old, and of its incarnation before this view."""


@dataclass(slots=True)
class Advance:
    """What one step of the frontier took in."""

    block: RecordBlock  # the records; valid until the next step
    taken: list[tuple[QueueState, Match]]
    """Their queues, each with its records; those that are listed count."""
    end: int  # where the frontier stands now
    is_last: bool  # nothing could be seen behind it


class LiveView(View):
    """What is proven of a running broker's store; ``log_end`` is the frontier."""

    is_live = True

    def __init__(
        self,
        log: MappedFileQueue,
        catalog: Catalog,
        anomalies: AnomalyCounters,
        clock: Clock,
        *,
        started_ms: int | None,
        may_truncate: bool,
        broker_max_offset: Callable[[], int] | None,
    ) -> None:
        super().__init__(log, catalog, anomalies)
        self.damages = 0  # how often the frontier has leapt over damage
        self._clock = clock
        self._started_ms = started_ms
        self._may_truncate = may_truncate
        self._broker_max_offset = broker_max_offset
        self._wanted_bytes = _CHUNK_BYTES_MIN
        self._passed_by = -1, 0.0
        """Where a record stands that a later one has overtaken, and since when."""
        self._has_met_new = False
        self._proven_old = -1
        self._listed_ahead = -1, -_AGAIN_S
        """Where a record stands that is listed, behind some that are not (-1: none); and when it was looked for."""
        self._growth = Growth(log, clock)
        self._made_s = clock.monotonic_s()
        self._looked_again_s = -_EMPTY_AGAIN_S
        self._behind = Waiting()
        """What is listed behind the damage at which the frontier stands."""
        self.log_end = self._first_position()
        self._open_queues()

    def _first_position(self) -> int:
        for base in reversed(self.log.bases):
            if read_head(self._chunks, base).is_sound:
                return base
        return self.log_min

    def _open_queues(self) -> None:
        self.catalog.load()
        for state in self.catalog.states.values():
            self._raise_end(state, self.log_end)
            state.min = min(state.index.first_not_below(self.log_min, state.end), state.end)
        self.catalog.log_min = self.log_min

    def _raise_end(self, state: QueueState, limit: int) -> None:
        """Set a queue's end behind its last entry that names its own record, damaged or not, below ``limit``.

        Entries behind it are left from before a restart, and wait.
        """
        held = self.held(state, log_end=limit)
        end, step = held.held_end(state.index.written_end(limit)), 1
        first_offset = max(state.end, state.index.span()[0])
        while end > first_offset:
            first = max(first_offset, end - step)
            entries = state.index.entries(first, end)
            found = held.fetch(entries)
            there = np.flatnonzero((found.cases == 0) | (found.cases == HoleReason.DAMAGED))
            if len(there):
                state.end = first + int(there[-1]) + 1
                return
            if (entries.physical_offsets < self.log_min).all():
                break  # expired: there is nothing to hold the entries against
            end, step = first, min(step * 8, 512)
        if not state.end:
            state.end = end

    # -- the frontier ----------------------------------------------------------------------------

    def advance(self, bytes_max: int, is_same: Callable[[], bool]) -> Advance | None:
        """Move the frontier by one chunk; None when there is nothing new, or the broker is another one.

        ``is_same``: whether the same broker still runs; asked after everything was read.
        """
        if not self._has_record_at_end():
            return None
        is_complete = self._chunks.is_complete(self.log_end)
        chunk = self._chunks.read(
            self.log_end, FAR, min(bytes_max, max(self._wanted_bytes, _CHUNK_BYTES_MIN))
        )
        count = self._count_proven(chunk)
        is_blank = not len(chunk.block) and chunk.follows is Next.FILE
        if not count and not (is_blank and chunk.next_file is not None):
            self._look_behind_damage(_BROKEN_AGAIN_S)
            return None
        taken = self._match(chunk, count)
        cut = self._cut(chunk, count, taken)
        if not cut and count and self._is_overtaken(chunk, count):
            taken = self._match(chunk, count)  # what is listed by now; the rest never will be
            cut = self._cut(chunk, count, taken, is_overtaken=True)
        if cut < count:
            taken = self._match(chunk, cut)  # what is listed behind it waits as well
        settled = cut if is_complete else self._chunks.count_unchanged(chunk, cut)
        if not is_same():
            return None
        if settled < cut:
            if not settled:
                return self.advance(bytes_max, is_same)  # listed by now, hence complete
            cut, taken = settled, self._match(chunk, settled)
        return self._accept(chunk, cut, taken)

    def _has_record_at_end(self) -> bool:
        """One read when idle. A blank leads to the next file as soon as there is one."""
        while True:
            head = self.log.read(self.log_end, SIZE_AND_MAGIC.size)
            magic = SIZE_AND_MAGIC.unpack(head)[1] if len(head) == SIZE_AND_MAGIC.size else None
            if magic in {MAGIC_V1, MAGIC_V2}:
                return True
            if magic == MAGIC_BLANK or self.log.base_of(self.log_end) is None:
                following = self._next_file()
                if following is None or following == self.log_end:
                    return False
                self.log_end = following
                continue
            self._look_behind_damage(_BROKEN_AGAIN_S if magic else _EMPTY_AGAIN_S)
            return False

    def _next_file(self) -> int | None:
        """Where the next file begins, if it exists; a frontier in an expired file goes to the first one."""
        self.log.rescan()
        if self.log.base_of(self.log_end) is None and self.log.bases:
            return (
                max(self.log_end, self.log.bases[0]) if self.log_end <= self.log.bases[-1] else None
            )
        base = self.log.base_of(self.log_end)
        return self.log.next_base(base) if base is not None else None

    def _count_proven(self, chunk: Chunk) -> int:
        """How many records of the chunk, from the first, are sound and not from before the start."""
        count = count_sound(chunk)
        if self._started_ms is None or not count:
            return count
        starts = chunk.start + chunk.block.positions[:count]
        is_new = chunk.block.store_timestamps_ms[:count] >= self._started_ms
        is_new |= self._has_met_new & (starts < self._settled)
        first_new = 0 if self._has_met_new else int(np.argmax(is_new)) if is_new.any() else count
        stale = np.flatnonzero(~is_new[first_new:])
        sound = count
        if len(stale):
            count = first_new + int(stale[0])
        if self._may_truncate and not self._has_met_new and first_new >= count:
            count = min(count, self._count_told(chunk, count))
        if not count and sound:
            self._growth.watch(int(starts[0]))
        return count

    @property
    def _settled(self) -> int:
        """What begins below it is in the broker's log, by its word or since it has been seen to write behind it."""
        told = self._broker_max_offset() if self._broker_max_offset is not None else 0
        return max(told, self._growth.settled)

    def _count_told(self, chunk: Chunk, count: int) -> int:
        """How many records stored before the start are known to be kept: by later ones, or by the broker."""
        limit, started_ms = self._proven_old, self._started_ms or 0
        if limit < chunk.end:
            limit = self._proven_old = max(limit, find_new(self.log, chunk.end, started_ms))
        if self._broker_max_offset is not None and limit < chunk.end:
            limit = max(limit, self._broker_max_offset())
        starts = chunk.start + chunk.block.positions[:count]
        told = int(np.searchsorted(starts + chunk.block.sizes[:count], limit, side="right"))
        return max(told, int(np.searchsorted(starts, self._growth.settled)))

    def _match(self, chunk: Chunk, count: int) -> list[tuple[QueueState, Match]]:
        among = np.zeros(len(chunk.block), np.bool_)
        among[:count] = True
        return match_states(self.catalog, chunk.block, queue_groups(chunk.block, among=among))

    def _cut(
        self,
        chunk: Chunk,
        count: int,
        taken: list[tuple[QueueState, Match]],
        *,
        is_overtaken: bool = False,
    ) -> int:
        """How many records of the chunk, from the first, are listed or will never be."""
        waiting = [orphan_indices(chunk.block, found) for _, found in taken]
        if is_overtaken or not any(map(len, waiting)):
            return count
        # Another queue's entry may have been written between the two readings: look at those again that
        # lie before a listed record.
        last = max((found.last_listed()[0] for _, found in taken), default=-1)
        for number, (state, found) in enumerate(taken):
            if len(waiting[number]) and waiting[number][0] < last:
                self.catalog.find(state.queue)  # its directory may have come meanwhile
                taken[number] = state, match(state.index, chunk.block, found.indices)
                waiting[number] = orphan_indices(chunk.block, taken[number][1])
        last = max((found.last_listed()[0] for _, found in taken), default=-1)
        everything = np.concatenate(waiting)
        before = everything[everything < last]
        if len(before) and not self._is_dropped(chunk, int(before.min()), last):
            return int(before.min())
        behind = everything[everything > last]
        return int(behind.min()) if len(behind) else count

    def _is_overtaken(self, chunk: Chunk, count: int) -> bool:
        """Whether the first records of a chunk, none of which is listed, never will be: their topic was deleted.

        Consume queues are written in log order. So what is not listed although a later record is never will be, and must
        not keep the frontier for ever. Only a record that was stored later counts: behind the log's end may stand older
        ones, left from before a restart, with consume-queue entries of their own. Looked for at most every second.
        """
        place, looked_s = self._listed_ahead
        now_s = self._clock.monotonic_s()
        if chunk.end > place and now_s >= looked_s + _AGAIN_S:
            stored_ms = int(chunk.block.store_timestamps_ms[:count].max())
            place = self._find_listed(following(chunk), stored_ms)
            self._listed_ahead = place, now_s if place < 0 else -_AGAIN_S
        return chunk.end <= place

    def _find_listed(self, position: int | None, stored_ms: int) -> int:
        """Where a record stands, from a position on, that is listed and was not stored before; -1: nowhere yet."""
        for later, count in walk_sound(self.log, position) if position is not None else ():
            matches = self._match(later, count)
            last = max((found.last_listed()[0] for _, found in matches), default=-1)
            if last >= 0 and int(later.block.store_timestamps_ms[last]) >= stored_ms:
                return later.start + int(later.block.positions[last])
        return -1

    def _is_dropped(self, chunk: Chunk, first: int, listed: int) -> bool:
        """Whether a record that is not listed, before one that is, never will be.

        An entry left from before a restart may name the very place of a new record, before the broker comes to it. So the
        listed one must have been stored a second later, or the other have waited so long.
        """
        times = chunk.block.store_timestamps_ms
        if int(times[listed] - times[first]) >= _DROPPED_AFTER_S * 1000:
            return True
        place, now_s = chunk.start + int(chunk.block.positions[first]), self._clock.monotonic_s()
        if self._passed_by[0] != place:
            self._passed_by = place, now_s
        return now_s >= self._passed_by[1] + _DROPPED_AFTER_S

    def _accept(
        self, chunk: Chunk, cut: int, taken: list[tuple[QueueState, Match]]
    ) -> Advance | None:
        before = self.log_end
        if cut < len(chunk.block):
            self.log_end = chunk.start + int(chunk.block.positions[cut])
        elif chunk.follows is Next.FILE and chunk.next_file is not None:
            self.log_end = chunk.next_file
        else:
            self.log_end = chunk.end
        if self.log_end == before:
            return None
        self._wanted_bytes = 2 * (self.log_end - before)
        if self._started_ms is not None and not self._has_met_new:
            self._has_met_new = bool(
                (chunk.block.store_timestamps_ms[:cut] >= self._started_ms).any()
            )
        self._behind = Waiting()
        taken = [(state, self.decide(state, chunk.block, found)) for state, found in taken]
        for state, found in taken:
            self._extend(state, found)
        is_last = cut < len(chunk.block) or chunk.follows not in {Next.MORE, Next.FILE}
        return Advance(chunk.block, taken, self.log_end, is_last)

    def _extend(self, state: QueueState, found: Match) -> None:
        """Set a queue's end behind its last listed record. A topic that was made anew begins at 0 again."""
        last, end = found.last_listed()
        if last < 0:
            return
        is_other, state.end = not state.min < state.end < end, end
        if is_other:
            state.min = min(state.index.first_not_below(self.log_min, end), end)

    def decide(self, state: QueueState, block: RecordBlock, found: Match) -> Match:
        """See ``View``. Later records are listed."""
        orphans = orphan_indices(block, found)
        if not len(orphans):
            return found
        asked = np.isin(found.indices, orphans) & self._are_entries_lost(state, found)
        places = block.physical_offsets[found.indices[asked]]
        if len(places):
            first, last = int(places.min()), int(places.max())
            self.orphans.look_around(state, first, last, self.log_end)
            found = match(state.index, block, found.indices)
        dropped = len(orphans) - len(places)
        self._anomalies.count("dropped_records", dropped)
        return found

    def _are_entries_lost(self, state: QueueState, found: Match) -> Flags:
        """Whose entry says something else, or was lost: those count if they stand where they belong."""
        asked: Flags = (found.listed_at >= 0) | (found.offsets < state.end)
        ahead = np.flatnonzero(~asked & (found.offsets < state.end + _LOOKED_AT))
        if len(ahead):  # zeros: it is not written yet; what no broker writes: it is damaged
            entries = state.index.entries(state.end, state.end + _LOOKED_AT)
            is_said = (entries.sizes != 0) | (entries.physical_offsets != 0)
            is_said &= ~entries.is_written & (entries.sizes != FILLER_SIZE)
            asked[ahead] = is_said[found.offsets[ahead] - state.end]
        return asked

    def look_for_changed_queues(self) -> None:
        """Notice deleted topics. One system call for each queue."""
        for state in list(self.catalog.states.values()):
            if state.index.row.bases and state.index.row.rescan():
                self.reopen(state)

    def reopen(self, state: QueueState) -> None:
        """Look again at a queue whose files are others now; without any it is not a queue any more."""
        state.end = state.min = 0
        state.index.rebuilt = Rebuilt()
        if not state.index.row.bases:
            self.catalog.states.pop(state.queue, None)
            return
        self._raise_end(state, self.log_end)
        state.min = min(state.index.first_not_below(self.log_min, state.end), state.end)

    # -- damage ----------------------------------------------------------------------------------

    def _look_behind_damage(self, again_s: float) -> None:
        """Leap over what stands at the frontier if something behind it is proven; else count what is listed there."""
        now_s = self._clock.monotonic_s()
        if self._started_ms is None or now_s < self._looked_again_s + again_s:
            return
        self._looked_again_s = now_s
        if again_s == _BROKEN_AGAIN_S:
            self.catalog.load()  # a queue that has only messages behind the damage
        told = 0
        if self._broker_max_offset is not None and now_s >= self._made_s + _TOLD_AFTER_S:
            told = self._broker_max_offset()
        behind = self._first_proven(told)
        if behind < FAR and self._count_proven(self._chunks.read(self.log_end, behind, 1)):
            return  # it was not damage: the broker has only now come there
        if behind == FAR:
            is_cut = (
                0 < told <= self.log_end
            )  # the broker's log ends here: what stands behind is given up
            self._behind = Waiting() if is_cut else self._count_behind()
            return
        self._behind = Waiting()
        self.damages += 1
        self._anomalies.count("damaged_places")
        self.log_end = behind
        self.catalog.load()  # a queue that has come since, and of which nothing lies behind the leap
        for state in list(self.catalog.states.values()):
            self._raise_end(state, behind)

    def _first_proven(self, told: int) -> int:
        """Where behind the frontier a record begins that the broker has written in this incarnation, or still counts.

        At first the next few entries of each queue. Where they say nothing (many records are damaged, or from before
        the start) some further on, twice as far each time, and the last: the first that is proven will do.
        """
        states = list(self.catalog.states.values())
        found = min((self._proven_in(state, state.end, told) for state in states), default=FAR)
        for state in states if found == FAR else ():
            end, step = state.index.written_end(FAR), 2 * _LOOKED_AT
            starts = [end - _LOOKED_AT] if end > state.end + _LOOKED_AT else []
            while state.end + step < end:
                starts.append(state.end + step)
                step *= 2
            for start in starts:
                if (found := self._proven_in(state, start, told)) < FAR:
                    return found
        return found

    def _proven_in(self, state: QueueState, start: int, told: int) -> int:
        """The first place of a proven record in a few entries; beyond everything without one."""
        entries, found = self._behind_frontier(state, start)
        if found is None:
            return FAR
        good = np.flatnonzero(found.cases == Case.LISTED)
        is_new = found.block.store_timestamps_ms[found.record_of[good]] >= (self._started_ms or 0)
        is_kept = entries.physical_offsets[good] + entries.sizes[good] <= told
        good = good[is_new | is_kept]
        return int(entries.physical_offsets[good].min()) if len(good) else FAR

    def _behind_frontier(self, state: QueueState, start: int) -> tuple[Entries, Fetched | None]:
        """A few entries, and the records behind the frontier that they name; None when they name none there."""
        entries = state.index.entries(start, start + _LOOKED_AT)
        if not (entries.is_written & (entries.physical_offsets > self.log_end)).any():
            return entries, None
        return entries, self.held(state, self.log_end + 1, FAR).fetch(entries)

    def _count_behind(self) -> Waiting:
        """What consume queues list behind damage at the frontier, if there is a sound record among it.

        A broker's start may have given it up, or it was damaged since: nothing shows which.
        """
        records = size = 0
        for state in self.catalog.states.values():
            _, found = self._behind_frontier(state, state.end)
            if found is None or not (found.cases == Case.LISTED).any():
                continue
            at, end = state.end, state.index.written_end(FAR)
            while at < end:
                entries = state.index.entries(at, min(end, at + _COUNTED_AT_ONCE))
                is_behind = entries.is_written & (entries.physical_offsets >= self.log_end)
                is_behind &= entries.physical_offsets < self.log.end
                records += int(is_behind.sum())
                size += int(entries.sizes[is_behind].astype(np.int64).sum())
                at += len(entries)
        if not records or self.log.base_of(self.log_end) is None:
            return Waiting()
        return Waiting(
            records,
            size,
            f"at and behind {self._end_place()}, where a record is damaged or a broker's start has cut the log:"
            " nothing stored since that start shows which",
        )

    # -- the rest --------------------------------------------------------------------------------

    def waiting(self) -> Waiting:
        """Count what can be read behind the frontier; before damage, what is listed behind that."""
        records = size = 0
        reason = ""
        for chunk, count in walk_sound(self.log, self.log_end, check_crc=True):
            if count and not reason:
                reason = self._reason(chunk)
            records += count
            size += int(chunk.block.sizes[:count].sum())
        return Waiting(records, size, reason) if records else self._waiting_behind()

    def _waiting_behind(self) -> Waiting:
        head = self.log.read(self.log_end, SIZE_AND_MAGIC.size)
        is_broken = len(head) == SIZE_AND_MAGIC.size and any(head[4:])
        if is_broken and SIZE_AND_MAGIC.unpack(head)[1] != MAGIC_BLANK:
            self._look_behind_damage(_BROKEN_AGAIN_S)
        return self._behind

    def _reason(self, chunk: Chunk) -> str:
        is_old = (
            self._started_ms is not None
            and int(chunk.block.store_timestamps_ms[0]) < self._started_ms
        )
        if is_old and self._has_met_new:
            return (
                "stored before the broker's start, behind what was stored after it: given up at that start,"
                " or the clock was set back, which the broker's next message shows"
            )
        if is_old and self._may_truncate:
            return "stored before the broker's start, and replicas may still truncate it"
        return "not listed by the broker's consume queues yet"
