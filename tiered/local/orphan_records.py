"""Orphan records, which no entry lists: which of them count, and the entries that are made of those in memory.

**Contract.** ``tiered.local.classification`` decides; here are the facts gathered: what lies around a record in the log and
in its queue, what its entry names instead, who else lists it. A view says which records may count at all (``asked``): a
stopped store's those that a broker's start would look at, a running one's those whose entry is damaged. They are met where
the log is walked, or looked for (``search``) where an entry that is read names no record of its own. Under the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.format.block import RecordBlock, topics_equal
from tiered.format.property_columns import tag_hashes
from tiered.format.record import RecordFault
from tiered.format.sysflag import is_listable
from tiered.local.classification import Around, Case, Chain, classify_orphans, place
from tiered.local.matching import Match, match
from tiered.local.pieces import LogPieces, Next, Piece, Resync
from tiered.local.queue_reader import Bounds, fetch, only

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.local.catalog import Catalog, QueueState
    from tiered.local.classification import AnomalyCounters, Cases
    from tiered.local.consumequeues import Entries, Flags, Longs
    from tiered.local.mapped_file_queue import MappedFileQueue
    from tiered.local.queue_reader import Fetched
    from tiered.model import MessageQueue

_PIECE_BYTES: Final = 8 << 20
_NEAR: Final = 8
"""Entries of a queue that are looked at to know what lies before or behind a record; one of them may be damaged."""
_LOST_MAX: Final = 100_000
"""Lost places that are remembered; those behind them count as sound, so that less is believed."""
SEARCH_BYTES_MAX: Final = 1 << 30
"""So much of the log is searched for records of the damaged entries of one batch, at most."""
_SEARCHED_MAX: Final = 100_000
"""Queue offsets that are remembered as searched for; beyond it they are searched for at each sight."""


Asked = Callable[["QueueState", RecordBlock, Match], "Flags"]
"""Which records of a queue count if they stand where they belong, bool[n]; those that are listed do not matter."""


class OrphanRecords:
    """Decides which orphan records count, and keeps the entries that stand for them."""

    def __init__(
        self,
        log: MappedFileQueue,
        catalog: Catalog,
        anomalies: AnomalyCounters,
        asked: Asked,
        *,
        is_growing: bool = False,
    ) -> None:
        """Know nothing yet.

        Args:
            anomalies: Where misplaced records and rebuilt entries are counted.
            asked: Which records may count at all.
            is_growing: A broker runs: what other queues list is looked up anew each time.
        """
        self._log = log
        self._catalog = catalog
        self._anomalies = anomalies
        self._asked = asked
        self._is_growing = is_growing
        self._resync = Resync(log, catalog)
        self._lost: dict[int, int] = {}
        """Where the log cannot be read, from and to, as far as it was walked."""
        self._searched: set[tuple[MessageQueue, int]] = set()

    @property
    def _bounds(self) -> Bounds:
        return Bounds(self._log.bases[0] if self._log.bases else 0, self._log.end)

    # -- deciding --------------------------------------------------------------------------------

    def decide(
        self, state: QueueState, block: RecordBlock, found: Match, asked: Flags, walked_from: int
    ) -> Cases:
        """Decide on records that their queue does not list; those that count are listed from now on.

        Args:
            found: ``is_listed`` is brought up to date.
            asked: bool[n], which of them may count.
            walked_from: The log was walked from here to the records, and what counted on the way was listed.

        Returns:
            The case of each record.
        """
        cases, offsets = self.classify(state, block, found, asked, walked_from)
        counting, misplaced = cases == Case.COUNTS, cases == Case.MISPLACED
        self._anomalies.count("misplaced_records", int(misplaced.sum()))
        if (wanted := counting | misplaced).any():
            self._rebuild(state, block, found, wanted, offsets[wanted])
        if counting.any():
            found.is_listed |= counting
            found.is_all_listed = bool(found.is_listed.all())
            found.entries = None
        return cases

    def classify(
        self, state: QueueState, block: RecordBlock, found: Match, asked: Flags, walked_from: int
    ) -> tuple[Cases, Longs]:
        """The case of each record, and the queue offset at which it belongs (of those that count or are misplaced)."""
        places = block.physical_offsets[found.indices]
        messages = is_listable(block.sys_flags[found.indices])
        asked = asked & ~found.is_listed & messages
        elsewhere, taken = np.zeros(len(asked), np.bool_), np.zeros(len(asked), np.bool_)
        if asked.any():
            if self._is_growing:
                self._resync = Resync(self._log, self._catalog)
            elsewhere[asked] = self._resync.lists(places[asked])
        if (contested := asked & ~elsewhere & (found.listed_at >= 0)).any():
            taken = self._is_taken(state, found, contested)
        offsets = np.full(len(asked), -1, np.int64)
        chain = found.is_listed | (asked & ~elsewhere)
        if (asked & chain).any():
            offsets[chain] = self._places(state, block, found, chain, walked_from)
        taken &= offsets == found.offsets  # else its offset is damaged, and it belongs elsewhere
        taken |= ~found.is_listed & (~asked | (offsets < 0))
        fits = offsets == found.offsets
        cases = classify_orphans(
            is_message=messages, is_other_listed=elsewhere, is_taken=taken, fits=fits
        )
        cases[found.is_listed] = Case.LISTED
        if (lost := (cases == Case.MISPLACED)).any():  # what is listed where it belongs stays
            entries = [state.index.entries(int(at), int(at) + 1) for at in offsets[lost].tolist()]
            cases[np.flatnonzero(lost)[[bool(one.is_written[0]) for one in entries]]] = Case.DROPPED
        return cases, offsets

    # -- what surrounds them ---------------------------------------------------------------------

    def _is_taken(self, state: QueueState, found: Match, contested: Flags) -> Flags:
        """Whether what their entries name instead are records that say so themselves."""
        taken = np.zeros(len(contested), np.bool_)
        bounds = self._bounds
        for at in np.flatnonzero(contested).tolist():
            entry = state.index.entries(int(found.offsets[at]), int(found.offsets[at]) + 1)
            there = fetch(self._log, state.queue, entry, bounds, is_batch=state.index.is_batch)
            taken[at] = there.cases[0] == Case.LISTED
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
        expired = entries.is_written & (entries.physical_offsets < self._bounds.log_min)
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
        bounds = self._bounds
        found = fetch(self._log, state.queue, entries, bounds, is_batch=index.is_batch)
        return entries, found.cases == Case.LISTED

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
        self._anomalies.count("rebuilt_entries", len(offsets))

    # -- searching -------------------------------------------------------------------------------

    def note_lost(self, start: int, end: int) -> None:
        """Part of the log cannot be read: so many records may be missing between their neighbours."""
        if start < end and len(self._lost) < _LOST_MAX:
            self._lost[start] = end

    def walk(self, start: int, end: int) -> Iterator[Piece]:
        """The pieces of a part of the log, over damage to where a consume queue says that a record begins."""
        pieces = LogPieces(self._log)
        while start < end:
            piece = pieces.read(start, end, _PIECE_BYTES, check_crc=False)
            yield piece
            start = piece.end
            if piece.follows is Next.FILE:
                start = piece.next_file if piece.next_file is not None else end
            elif piece.follows in {Next.NOTHING, Next.BROKEN}:
                start = self._resync.behind(start, end)
                self.note_lost(piece.end, start)

    def search(self, state: QueueState, entries: Entries, found: Fetched, end: int) -> bool:
        """Look for the records of entries that name none of their own, between those of their neighbours in the log.

        Each is looked for once. Not those whose entry names a damaged record that lies between its neighbours.

        Args:
            entries: Of queue offsets that follow each other.
            end: Of the log from here on it has been decided what counts, entry or not.

        Returns:
            Whether any was found, which is listed from now on.
        """
        holes = self._not_searched(state.queue, entries, found.cases != Case.LISTED)
        left, is_found = SEARCH_BYTES_MAX, False
        for first, last in _runs(holes):
            start, stop = self._between(state, entries.start + first, entries.start + last, end)
            at = slice(first, last)
            is_there = _has_faults(found)[at] & (found.cases[at] == Case.DAMAGED)
            places = entries.physical_offsets[at]
            is_there &= (places >= start) & (places < stop)
            if is_there.all() or start >= stop:
                continue
            if stop - start > left:
                self._anomalies.note(
                    f"{state.queue}: the entry of {entries.start + first} is damaged, and its record was not"
                    f" searched for: its neighbours in the log are {stop - start:,} bytes apart"
                )
                continue
            left -= stop - start
            for piece in self.walk(start, stop):
                is_found |= self._decide_on(state, piece.block, start)
        return is_found

    def _not_searched(self, queue: MessageQueue, entries: Entries, holes: Flags) -> Flags:
        keys = [(queue, entries.start + at) for at in np.flatnonzero(holes).tolist()]
        fresh = holes.copy()
        fresh[holes] = [key not in self._searched for key in keys]
        if len(self._searched) < _SEARCHED_MAX:
            self._searched.update(keys)
        return fresh

    def _between(self, state: QueueState, start: int, end: int, limit: int) -> tuple[int, int]:
        """Where in the log the records of queue offsets ``[start, end)`` may lie, by those of their neighbours."""
        low, high = self._bounds.log_min, limit
        entries, is_listed = self._borne_out(state, max(0, start - _NEAR), start)
        if is_listed.any():
            last = int(np.flatnonzero(is_listed)[-1])
            low = int(entries.physical_offsets[last] + entries.sizes[last])
        entries, is_listed = self._borne_out(state, end, end + _NEAR)
        if is_listed.any():
            high = int(entries.physical_offsets[int(is_listed.argmax())])
        return low, min(high, limit)

    def _decide_on(self, state: QueueState, block: RecordBlock, walked_from: int) -> bool:
        """Decide on what a piece holds of one queue; whether anything of it is listed from now on."""
        own = topics_equal(block, np.arange(len(block)), state.queue.topic)
        own &= (block.queue_ids == state.queue.queue_id) & (block.faults == RecordFault.OK)
        indices = np.flatnonzero(own)
        if not len(indices):
            return False
        found = match(state.index, block, indices)
        if found.is_all_listed:
            return False
        asked = self._asked(state, block, found)
        cases = self.decide(state, block, found, asked, walked_from)
        return bool(((cases == Case.COUNTS) | (cases == Case.MISPLACED)).any())


def _has_faults(found: Fetched) -> Flags:
    """Whether the record that each entry names fails its checks."""
    faults = np.append(found.block.faults != RecordFault.OK, False)
    return faults[found.record_of]


def _runs(chosen: Flags) -> list[tuple[int, int]]:
    """``[first, last)`` of each run of what is chosen."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
