"""A stopped store: one look at it, which stays true as long as nobody starts on it.

**Contract.** The log ends where a broker's start would end it (``tiered.local.pieces``). Within that end everything
counts: consume queues as they stand, cut as a start cuts them, and, where they say nothing, entries rebuilt from the
log in memory. What is walked at opening: the part that a start walks; the whole log when it is small
(``whole_log_bytes_max``) or something suggests that consume queues are missing. A follower that meets an orphan
record later has it decided on here as well, so that nothing is passed over in silence.

A file of a consume queue that lists another queue's records, all of them such as no entry of their own names, has
another's place (a copy went wrong, say): it counts as missing, and is named.

A record whose queue offset is taken by another entry, or that a start would not list, is dropped and counted: a broker
started on the store would not serve it (``tiered.local.orphan_records``).

Behind that end there may be more than a torn tail: where one record in the middle of the log is damaged, a start gives
up all that stand behind it. They are not handed out, since the broker will give their queue offsets to other messages;
but they wait, are counted, and the place is named, so that a person can put the file right before the broker starts.
The same holds of what the log has not at all, a file being gone or zeros, though a clean stop's checkpoint speaks of it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.format.block import distinct, queue_groups
from tiered.format.record import MAGIC_V1, MAGIC_V2, SIZE_AND_MAGIC, RecordFault
from tiered.local.classification import Case
from tiered.local.consumequeues import QueueTail, Rebuilt
from tiered.local.interface import Waiting
from tiered.local.matching import SmallQueues, match_states
from tiered.local.orphan_records import OrphanRecords
from tiered.local.pieces import LogPieces, Piece, find_log_end, plan_start, read_heads
from tiered.local.queue_reader import Bounds, fetch, held_end, plan_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.format.block import RecordBlock
    from tiered.format.broker_checkpoint import Checkpoint
    from tiered.local.catalog import Catalog, QueueState
    from tiered.local.classification import AnomalyCounters
    from tiered.local.consumequeues import Entries, Flags
    from tiered.local.mapped_file_queue import MappedFileQueue
    from tiered.local.matching import Match
    from tiered.local.queue_reader import Fetched
    from tiered.model import MessageQueue

_LOG = logging.getLogger("tiered.local")
_PIECE_BYTES: Final = 8 << 20
_FAR: Final = 2**63 - 1
_LOOKED_AT: Final = 64
"""Entries of a file that are looked at to know whose it is."""
_STRANGE_MIN: Final = 3
"""Records that are damaged alike in their queue or offset, and sound else, are so many at most."""
_LEFT_READ: Final = 4_000
"""Entries of one queue behind the log's end that are looked at in one go."""


class DeadView:
    """What is committed in a stopped store, by one look at it."""

    is_live = False

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
        self.log = log  # the commit log
        self.catalog = catalog  # the queues
        self._anomalies = anomalies
        self._is_clean = is_clean
        self._checkpoint = checkpoint
        self._pieces = LogPieces(log)
        before = anomalies.counts()
        self._open(whole_log_bytes_max)
        if self._ignore_files_of_others():
            anomalies.forget(before)
            self._open(whole_log_bytes_max)

    @property
    def log_min(self) -> int:
        """First physical offset of the log; its end when there are no files."""
        return self.log.bases[0] if self.log.bases else self.log_end

    def waiting(self) -> Waiting:
        """Records behind damage, which a broker's start would give up."""
        return self._waiting

    def decide(
        self,
        state: QueueState,
        block: RecordBlock,
        found: Match,
        walked_from: int,
        *,
        replayed: bool = False,
    ) -> None:
        """Decide on records that their queue does not list; those that count are listed from now on.

        Args:
            found: ``is_listed`` is brought up to date.
            walked_from: The log was walked from here to the records, and what counted on the way was listed.
            replayed: A broker's start after a crash would list them again, by its own rules.
        """
        if found.is_all_listed:
            return
        self._suspect(state, found)
        asked = self.asked(state, block, found, replayed=replayed)
        cases = self.orphans.decide(state, block, found, asked, walked_from)
        decided = block.physical_offsets[found.indices] >= self.undecided_end
        dropped = (cases == Case.DROPPED) & (replayed | ~decided)
        self._anomalies.count("dropped_records", int(dropped.sum()))

    # -- opening ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Know nothing yet."""
        self.log_end = 0  # where the log ends
        self.torn_bytes = 0  # bytes behind it that are not zero
        self.listing = SmallQueues()  # entries of the small queues
        self._tails: dict[MessageQueue, QueueTail] = {}
        self._listed: dict[MessageQueue, int] = {}
        """One past the last queue offset of which a record was seen that counts."""
        self._walked_from = 0  # where the walk under way began
        self.orphans = OrphanRecords(self.log, self.catalog, self._anomalies, self.asked)
        self.undecided_end = _FAR  # of the log from here on it has been decided what counts
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
        known = self.listing.ends(0, 0)
        for queue, state in self.catalog.states.items():
            self._tails[queue] = known[queue][0] if queue in known else state.index.tail()
        start = plan_start(
            read_heads(self.log, self._pieces),
            is_clean=self._is_clean,
            checkpoint=self._checkpoint,
            listed_end=self._listed_end(),
        )
        self._walked_from = start
        end = find_log_end(self.log, self._pieces, start, self._visit_replayed)
        self.log_end, self.torn_bytes = end.end, end.torn_bytes
        if start > self.log.bases[0] and self._needs_whole_scan(start, whole_log_bytes_max):
            self._walked_from = self.log.bases[0]
            self._scan(self.log.bases[0], start)
            start = self.log.bases[0]
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
        entries = index.entries(first, first + _LOOKED_AT)
        bounds = Bounds(self.log_min, self.log_end)
        found = fetch(
            self.log,
            state.queue,
            entries,
            bounds,
            is_batch=index.is_batch,
            lists=self.catalog.lists,
        )
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
        base = self.log.base_of(self.log_end)
        base = self.log.bases[-1] if base is None else base
        place = f"{self.log.path(base)}, byte {self.log_end - base}"
        found_there = f"at and behind {place}, where a record is damaged or gone"
        _LOG.warning("%d records are not tiered: %s", records + lost, found_there)
        does = "a broker's start would give them up; put the file right before that"
        return Waiting(records + lost, size, f"{found_there}: {does}", is_behind_damage=True)

    def _entries_behind_end(self, state: QueueState) -> Iterator[tuple[Entries, Fetched]]:
        """What a queue lists behind its end, and the records behind the log's end that it names."""
        bounds = Bounds(self.log_end, self.log.end)
        at, end = state.end, self._tails.get(state.queue, QueueTail(0, -1)).end
        while at < end:
            entries = state.index.entries(at, min(end, at + _LEFT_READ))
            if not entries.is_written.any():
                return  # a damaged last unit may name any end
            count = plan_count(entries, bounds, self.log, _PIECE_BYTES)
            entries = entries.head(count)
            yield (
                entries,
                fetch(self.log, state.queue, entries, bounds, is_batch=state.index.is_batch),
            )
            at += len(entries)

    def _listed_end(self) -> int:
        ends = [tail.max_physical for tail in self._tails.values()]
        ends += [index.tail().max_physical for index in self.catalog.others]
        return max(ends, default=-1)

    def _visit_replayed(self, piece: Piece, count: int) -> None:
        sound = np.zeros(len(piece.block), np.bool_)
        sound[:count] = True
        if count:
            self._last_stored_ms = int(piece.block.store_timestamps_ms[count - 1])
        self._take(piece.block, sound, replayed=not self._is_clean)

    def _take(self, block: RecordBlock, sound: Flags, *, replayed: bool) -> None:
        groups = self.listing.take(block, queue_groups(block, among=sound))
        for state, found in match_states(self.catalog, block, groups):
            self.decide(state, block, found, self._walked_from, replayed=replayed)
            self._extend(state.queue, found)

    def _extend(self, queue: MessageQueue, found: Match) -> None:
        """Listed records push the end that a start would see."""
        _, end = found.last_listed()
        tail = self._tails.get(queue, QueueTail(0, -1))
        if end > tail.end:
            self._tails[queue] = QueueTail(end, tail.max_physical)
        self._listed[queue] = max(end, self._listed.get(queue, 0))

    def _scan(self, position: int, limit: int) -> None:
        """Walk the log below recovery's start for records that no consume queue lists."""
        for piece in self.orphans.walk(position, limit):
            self._take(piece.block, piece.block.faults == RecordFault.OK, replayed=False)

    def _needs_whole_scan(self, start: int, whole_log_bytes_max: int) -> bool:
        """Whether the log is small, or a record that begins a file is not listed where it should be."""
        if self.log_end - self.log.bases[0] <= whole_log_bytes_max:
            return True
        for base in self.log.bases:
            if base >= start:
                break
            piece = self._pieces.read(base, base + self.log.file_bytes, 1 << 12, check_crc=False)
            if self._has_orphans(piece.block):
                self._anomalies.note(
                    "consume queues lack entries: the whole log was scanned for them"
                )
                return True
        return False

    def _has_orphans(self, block: RecordBlock) -> bool:
        for state, found in match_states(self.catalog, block, queue_groups(block)):
            if not found.is_all_listed:
                self._suspect(state, found)
                asked = self.asked(state, block, found)
                cases, _ = self.orphans.classify(state, block, found, asked, self.log.end)
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
        bounds = Bounds(self.log_min, self.log.end)
        end = held_end(self.log, state.queue, index, index.cut_end(self.log_end), bounds)
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

    def asked(
        self, state: QueueState, block: RecordBlock, found: Match, *, replayed: bool = False
    ) -> Flags:
        """Which records count if they stand where they belong.

        Those of which that has not been decided yet, and that a start would look at: not those of a deleted topic, nor what
        it takes for listed already. A start lists again what lies above all that the queue lists. Below the end of the queue
        an entry that says nothing is a lost page, which it fills too.
        """
        if not replayed:
            fresh: Flags = block.physical_offsets[found.indices] < self.undecided_end
            return fresh & self._is_known(state.queue)
        tail = self._tails.get(state.queue, QueueTail(0, -1))
        ends = block.physical_offsets[found.indices] + block.sizes[found.indices]
        above: Flags = ends > tail.max_physical
        return above | (found.offsets < tail.end)

    def _is_known(self, queue: MessageQueue) -> bool:
        """Whether records of a queue without entries count: not those of a topic that was deleted."""
        names = self.catalog.topics.names
        if names is None or queue.topic in names:
            return True
        self.catalog.leave_out(queue.topic, "deleted topic: records are left in the log")
        return False
