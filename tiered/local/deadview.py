"""A stopped store: one look at it, which stays true as long as nobody starts on it.

**Contract.** The log ends where a broker's start would end it (``tiered.local.recovery``). Within that end everything
counts: consume queues as they stand, cut as a start cuts them, and, where they say nothing, entries rebuilt from the
log in memory. What is walked at opening: the part that a start walks; the whole log when it is small
(``whole_log_bytes_max``) or something suggests that consume queues are missing. A follower that meets an unlisted
record later has it claimed here as well, so that nothing is passed over in silence.

A record whose queue offset is taken by another entry, or that a start would not list, is dropped and counted: a broker
started on the store would not serve it. ``tiered.local.verdicts`` decides; here are the facts gathered.

Behind that end there may be more than a torn tail: where one record in the middle of the log is damaged, a start gives
up all that stand behind it. They are not handed out, since the broker will give their queue offsets to other messages;
but they wait, are counted, and the place is named, so that a person can put the file right before the broker starts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.block import RecordBlock, group_by_queue, tag_hashes
from tiered.format.record import RecordFault
from tiered.format.sysflag import (
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    TRANSACTION_NONE,
)
from tiered.local.batches import only
from tiered.local.consumequeues import Tail
from tiered.local.face import Waiting
from tiered.local.fetch import Bounds, fetch, held_end
from tiered.local.matching import Match, match
from tiered.local.pieces import LogPieces, Next, Piece
from tiered.local.reader import plan_count
from tiered.local.recovery import find_log_end, plan_start, read_heads
from tiered.local.resync import Resync
from tiered.local.verdicts import Around, Chain, Pair, Verdict, judge, place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.format.checkpoint import Checkpoint
    from tiered.local.catalog import Catalog, QueueState
    from tiered.local.entries import Entries, Flags, Longs
    from tiered.local.fetch import Fetched
    from tiered.local.files import FileRow
    from tiered.local.sightings import Sightings
    from tiered.model import MessageQueue

_LOG = logging.getLogger("tiered.local")
_PIECE_BYTES: Final = 8 << 20
_LEFT_READ: Final = 4_000
"""Entries of one queue behind the log's end that are looked at in one go."""
_NEAR: Final = 8
"""Entries of a queue that are looked at to know what lies before or behind a record; one of them may be damaged."""
_LOST_MAX: Final = 100_000
"""Lost places that are remembered; those behind them count as sound, so that less is believed."""


class DeadView:
    """See the module.

    Attributes:
        log: The commit log.
        catalog: The queues.
        log_end: Where the log ends.
        torn_bytes: Bytes behind it that are not zero.
    """

    is_live = False

    def __init__(
        self,
        log: FileRow,
        catalog: Catalog,
        sightings: Sightings,
        *,
        is_clean: bool,
        checkpoint: Checkpoint,
        whole_log_bytes_max: int,
    ) -> None:
        self.log = log
        self.catalog = catalog
        self.log_end = 0
        self.torn_bytes = 0
        self._sightings = sightings
        self._is_clean = is_clean
        self._pieces = LogPieces(log)
        self._tails: dict[MessageQueue, Tail] = {}
        self._listed: dict[MessageQueue, int] = {}
        """One past the last queue offset of which a record was seen that counts."""
        self._lost: dict[int, int] = {}
        """Where the log cannot be read, from and to, as far as it was walked."""
        self._walked_from = 0
        """Where the walk under way began."""
        self._resync = Resync(log, catalog)
        self._decided_from = 2**63 - 1
        """Of the log from here on it has been decided what counts."""
        self._last_stored_ms = 0
        """Store time of the last record within the log's end."""
        self._waiting = Waiting()
        self._open(checkpoint, whole_log_bytes_max)

    @property
    def log_min(self) -> int:
        """First physical offset of the log; its end when there are no files."""
        return self.log.bases[0] if self.log.bases else self.log_end

    def waiting(self) -> Waiting:
        """Records behind damage, which a broker's start would give up."""
        return self._waiting

    def claim(
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
            state: Their queue.
            block: Holds the records.
            found: ``is_listed`` is brought up to date.
            walked_from: The log was walked from here to the records, and what was not listed on the way was claimed.
            replayed: A broker's start after a crash would list them again, by its own rules.
        """
        if found.is_all_listed:
            return
        verdicts, offsets = self._judge(state, block, found, walked_from, replayed=replayed)
        decided = block.physical_offsets[found.indices] >= self._decided_from
        dropped = (verdicts == Verdict.DROPPED) & (replayed | ~decided)
        self._sightings.count("dropped_records", int(dropped.sum()))
        claims, misplaced = verdicts == Verdict.CLAIMS, verdicts == Verdict.MISPLACED
        self._sightings.count("misplaced_records", int(misplaced.sum()))
        if (wanted := claims | misplaced).any():
            self._rebuild(state, block, found, wanted, offsets[wanted])
        if claims.any():
            found.is_listed |= claims
            found.is_all_listed = bool(found.is_listed.all())
            found.entries = None

    def note_lost(self, start: int, end: int) -> None:
        """Part of the log cannot be read: so many records may be missing between their neighbours."""
        if start < end and len(self._lost) < _LOST_MAX:
            self._lost[start] = end

    # -- opening ---------------------------------------------------------------------------------

    def _open(self, checkpoint: Checkpoint, whole_log_bytes_max: int) -> None:
        self.catalog.load()
        if not self.log.bases:
            return
        for queue, state in self.catalog.states.items():
            self._tails[queue] = state.index.tail()
        start = plan_start(
            read_heads(self.log, self._pieces),
            is_clean=self._is_clean,
            checkpoint=checkpoint,
            listed_end=self._listed_end(),
        )
        self._walked_from = start
        end = find_log_end(self.log, self._pieces, start, self._visit_replayed)
        self.log_end, self.torn_bytes = end.end, end.torn_bytes
        if start > self.log.bases[0] and self._needs_whole_scan(start, whole_log_bytes_max):
            self._walked_from = self.log.bases[0]
            self._scan(self.log.bases[0], start)
            start = self.log.bases[0]
        self._decided_from = start
        for state in self.catalog.states.values():
            self._set_bounds(state)
        self.catalog.log_min = self.log_min
        if self.torn_bytes:
            self._waiting = self._find_given_up()

    def _find_given_up(self) -> Waiting:
        """Count what consume queues list behind the log's end and a start would give up.

        Sound records, and the damaged one at the end: alone, it is the torn tail of a crash, but not after a clean stop. One
        that was stored before the last one within the end is left from an earlier start, which has given it up.
        """
        records = size = damaged = 0
        for state in self.catalog.states.values():
            for entries, found in self._entries_behind_end(state):
                good = np.flatnonzero(found.verdicts == Verdict.LISTED)
                numbers = np.unique(found.record_of[good])
                is_new = found.block.store_timestamps_ms[numbers] >= self._last_stored_ms
                records += int(is_new.sum())
                size += int(found.block.sizes[numbers[is_new]].sum())
                at_end = entries.physical_offsets == self.log_end
                damaged |= int((at_end & (found.verdicts == Verdict.DAMAGED)).any())
        if not records and not (damaged and self._is_clean):
            return Waiting()
        base = self.log.base_of(self.log_end)
        assert base is not None
        place = f"{self.log.path(base)}, byte {self.log_end - base}"
        found_there = f"at and behind {place}, where a record is damaged"
        _LOG.warning("%d listed messages are not tiered: %s", records + damaged, found_there)
        does = "a broker's start would give them up; put the file right before that"
        return Waiting(records + damaged, size, f"{found_there}: {does}", is_behind_damage=True)

    def _entries_behind_end(self, state: QueueState) -> Iterator[tuple[Entries, Fetched]]:
        """What a queue lists behind its end, and the records behind the log's end that it names."""
        bounds = Bounds(self.log_end, self.log.end)
        at, end = state.end, self._tails.get(state.queue, Tail(0, -1)).end
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
        for queue, indices in group_by_queue(block, among=sound):
            state = self.catalog.find(queue)
            if state is None:
                continue
            found = match(state.index, block, indices)
            self.claim(state, block, found, self._walked_from, replayed=replayed)
            self._extend(queue, found)

    def _extend(self, queue: MessageQueue, found: Match) -> None:
        """Listed records push the end that a start would see."""
        _, end = found.last_listed()
        tail = self._tails.get(queue, Tail(0, -1))
        if end > tail.end:
            self._tails[queue] = Tail(end, tail.max_physical)
        self._listed[queue] = max(end, self._listed.get(queue, 0))

    def _scan(self, position: int, limit: int) -> None:
        """Walk the log below recovery's start for records that no consume queue lists."""
        while position < limit:
            piece = self._pieces.read(position, limit, _PIECE_BYTES, check_crc=False)
            self._take(piece.block, piece.block.faults == RecordFault.OK, replayed=False)
            position = piece.end
            if piece.follows is Next.FILE:
                position = piece.next_file if piece.next_file is not None else limit
            elif piece.follows in {Next.NOTHING, Next.BROKEN}:
                position = self._resync.behind(position, limit)
                self.note_lost(piece.end, position)

    def _needs_whole_scan(self, start: int, whole_log_bytes_max: int) -> bool:
        """Whether the log is small, or a record that begins a file is not listed where it should be."""
        if self.log_end - self.log.bases[0] <= whole_log_bytes_max:
            return True
        for base in self.log.bases:
            if base >= start:
                break
            piece = self._pieces.read(base, base + self.log.file_bytes, 1 << 12, check_crc=False)
            if self._has_unlisted(piece.block):
                self._sightings.note(
                    "consume queues lack entries: the whole log was scanned for them"
                )
                return True
        return False

    def _has_unlisted(self, block: RecordBlock) -> bool:
        for queue, indices in group_by_queue(block):
            state = self.catalog.find(queue)
            if state is None:
                continue
            found = match(state.index, block, indices)
            if not found.is_all_listed:
                verdicts, _ = self._judge(state, block, found, self.log.end, replayed=False)
                if (verdicts == Verdict.CLAIMS).any():
                    return True
        return False

    def _set_bounds(self, state: QueueState) -> None:
        index = state.index
        bounds = Bounds(self.log_min, self.log.end)
        end = held_end(self.log, state.queue, index, index.cut_end(self.log_end), bounds)
        end = max(end, self._listed.get(state.queue, 0))
        claimed = index.rebuilt.bounds
        if claimed is not None:
            end = max(end, claimed[1])
        first = index.span()[0]
        low = index.first_not_below(self.log_min, end) if index.row.bases else end
        if claimed is not None:
            low = min(low, claimed[0])
        state.min, state.end = min(low, end), end
        self._sightings.count(
            "below_min_entries", max(0, state.min - first) if index.row.bases else 0
        )

    # -- claims ----------------------------------------------------------------------------------

    def _judge(
        self,
        state: QueueState,
        block: RecordBlock,
        found: Match,
        walked_from: int,
        *,
        replayed: bool,
    ) -> tuple[npt.NDArray[np.int8], Longs]:
        """The verdict on each record, and the queue offset at which it belongs (of claims and misplaced ones)."""
        places = block.physical_offsets[found.indices]
        messages = is_message(block, found.indices)
        asked = ~found.is_listed & messages
        if not replayed:
            asked &= places < self._decided_from
        elsewhere = np.zeros(len(asked), np.bool_)
        if asked.any():
            elsewhere[asked] = self._resync.lists(places[asked])
        counts = self._may_count(state, block, found, replayed)
        taken = np.zeros(len(asked), np.bool_)
        asked &= counts
        if (contested := asked & ~elsewhere & (found.listed_at >= 0)).any():
            taken = self._is_taken(state, found, contested)
        offsets = np.full(len(asked), -1, np.int64)
        chain = found.is_listed | (asked & ~elsewhere)
        if (asked & chain).any():
            offsets[chain] = self._places(state, block, found, chain, walked_from)
        taken &= offsets == found.offsets  # else its offset is damaged, and it belongs elsewhere
        taken |= ~found.is_listed & (~asked | (offsets < 0))
        verdicts = judge(
            Pair(
                is_named=found.is_listed,
                agrees=found.is_listed,
                is_message=messages,
                is_other_listed=elsewhere,
                is_taken=taken,
                fits=offsets == found.offsets,
            )
        )
        if (lost := (verdicts == Verdict.MISPLACED)).any():  # what is listed where it belongs stays
            entries = [state.index.entries(int(at), int(at) + 1) for at in offsets[lost].tolist()]
            verdicts[np.flatnonzero(lost)[[bool(one.is_written[0]) for one in entries]]] = (
                Verdict.DROPPED
            )
        return verdicts, offsets

    def _may_count(
        self, state: QueueState, block: RecordBlock, found: Match, replayed: bool
    ) -> Flags:
        """Whether a start would look at them: not those of a deleted topic, nor what it takes for listed already.

        A start lists again what lies above all that the queue lists. Below the end of the queue an entry that says nothing
        is a lost page, which it fills too.
        """
        if not replayed:
            return np.full(len(found.indices), self._is_known(state.queue), np.bool_)
        tail = self._tails.get(state.queue, Tail(0, -1))
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

    def _is_taken(self, state: QueueState, found: Match, contested: Flags) -> Flags:
        """Whether what their entries name instead are records that say so themselves."""
        taken = np.zeros(len(contested), np.bool_)
        bounds = Bounds(self.log_min, self.log.end)
        for at in np.flatnonzero(contested).tolist():
            entry = state.index.entries(int(found.offsets[at]), int(found.offsets[at]) + 1)
            there = fetch(self.log, state.queue, entry, bounds, is_batch=state.index.is_batch)
            taken[at] = there.verdicts[0] == Verdict.LISTED
        return taken

    def _places(
        self,
        state: QueueState,
        block: RecordBlock,
        found: Match,
        chain: Flags,
        walked_from: int,
    ) -> Longs:
        """Where the records of a chain belong, by their neighbours in the log."""
        places = block.physical_offsets[found.indices[chain]]
        counts = np.ones(len(places), np.int64) if found.counts is None else found.counts[chain]
        for at in np.flatnonzero(block.faults != RecordFault.OK).tolist():
            start = int(places[0] - block.positions[found.indices[chain][0]] + block.positions[at])
            self.note_lost(start, start + int(block.sizes[at]))
        first, last = int(places[0]), int(places[-1])
        low, high = self._listed_before(state, first), self._listed_behind(state, last)
        nearest = max((low, state.index.rebuilt.before(first)), key=lambda one: one or (-1, -1))
        around = Around(nearest and nearest[0], low and low[0], high)
        lost = self._lost_between(np.concatenate(([nearest[1] if nearest else first], places)))
        if nearest and nearest[1] < walked_from:
            lost[0] = first - nearest[1]  # what lies between was not looked at, or is gone
        return place(Chain(found.offsets[chain], counts, found.is_listed[chain], lost), around)

    def _listed_before(self, state: QueueState, at: int) -> tuple[int, int] | None:
        """One past the last queue offset that is listed before a place in the log, and where its record begins.

        By entries that their records bear out; of expired ones nothing can be read, and they are believed.
        """
        end = state.index.written_end(at)
        entries, is_listed = self._borne_out(state, max(0, end - _NEAR), end)
        expired = entries.is_written & (entries.physical_offsets < self.log_min)
        good = np.flatnonzero((is_listed | expired) & (entries.physical_offsets < at))
        if not len(good):
            return None
        return entries.start + int(good[-1]) + 1, int(entries.physical_offsets[good[-1]])

    def _listed_behind(self, state: QueueState, at: int) -> int | None:
        """The first queue offset that is listed behind a place in the log, by an entry that its record bears out."""
        end = state.index.written_end(at + 1)
        entries, is_listed = self._borne_out(state, end, end + _NEAR)
        good = np.flatnonzero(is_listed & (entries.physical_offsets > at))
        return entries.start + int(good[0]) if len(good) else None

    def _borne_out(self, state: QueueState, start: int, end: int) -> tuple[Entries, Flags]:
        """Some entries, and which of them name a record of their own."""
        index = state.index
        entries = index.entries(start, end)
        bounds = Bounds(self.log_min, self.log.end)
        found = fetch(self.log, state.queue, entries, bounds, is_batch=index.is_batch)
        return entries, found.verdicts == Verdict.LISTED

    def _lost_between(self, places: Longs) -> Longs:
        """Bytes that are known to be lost between each place and the next."""
        if not self._lost:
            return np.zeros(len(places) - 1, np.int64)
        starts = np.array(sorted(self._lost), np.int64)
        sizes = np.array([self._lost[start] for start in starts.tolist()], np.int64) - starts
        total = np.concatenate(([0], np.cumsum(sizes)))
        return np.diff(total[np.searchsorted(starts, places)])

    def _rebuild(
        self, state: QueueState, block: RecordBlock, found: Match, wanted: Flags, offsets: Longs
    ) -> None:
        indices = found.indices[wanted]
        physical = block.physical_offsets[indices]
        sizes, tags = block.sizes[indices], tag_hashes(only(block, indices))
        if found.counts is not None:
            counts = found.counts[wanted]
            within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            offsets = np.repeat(offsets, counts) + within
            physical, tags = np.repeat(physical, counts), np.repeat(tags, counts)
            sizes = np.repeat(sizes, counts)
        state.index.rebuilt.add(offsets, physical, sizes, tags)
        state.end = max(state.end, int(offsets.max()) + 1)
        self._sightings.count("rebuilt_entries", len(offsets))


def is_message(block: RecordBlock, indices: Longs) -> Flags:
    """Which records get an entry at all: those of a prepared or rolled-back transaction do not."""
    state = block.sys_flags[indices] & TRANSACTION_MASK
    found: Flags = (state == TRANSACTION_NONE) | (state == TRANSACTION_COMMIT)
    return found
