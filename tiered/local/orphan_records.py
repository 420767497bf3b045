"""Orphan records, which no entry lists: which of them count, and the entries that are made of those in memory.

**Contract.** Records are decided over whole ranges: those of one queue that stand in the log between two entries' records,
entries that their records bear out. ``tiered.local.classification`` says what becomes of each; here the facts are gathered.
They are *noted* where a stopped store's log is walked, and decided when all of it was seen; or *looked for* around one place
(``look_around``), or around entries that are read and name no record of their own (``search``). Under the store's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiered.format.block import RecordBlock, distinct, topics_equal
from tiered.format.property_columns import tag_hashes
from tiered.format.record import RecordFault
from tiered.format.sysflag import is_listable
from tiered.local.chunks import CHUNK_BYTES, FAR, Chunk, LogChunks, Next
from tiered.local.classification import Case, classify_orphans, place
from tiered.local.consumequeues import listed_places
from tiered.local.matching import Match, match
from tiered.local.queue_reader import HeldQueue, only

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.local.catalog import Catalog, QueueState
    from tiered.local.chunks import LogIndex
    from tiered.local.classification import AnomalyCounters, Cases
    from tiered.local.consumequeues import Entries, Flags, Longs
    from tiered.local.mapped_file_queue import MappedFileQueue
    from tiered.local.queue_reader import Fetched
    from tiered.model import MessageQueue

_NEAR: Final = 8
_NEAR_MAX: Final = 1 << 15
"""Entries of a queue that are looked at in one go to know what lies before or behind a record."""
_COUNTERS: Final = {Case.DROPPED: "dropped_records", Case.MISPLACED: "misplaced_records"}
_LOST_MAX: Final = 100_000
"""Lost places that are remembered; those behind them count as sound, so that less is believed."""
SEARCH_BYTES_MAX: Final = 1 << 30
"""So much of the log is searched for the records that belong between two others, at most."""
_LOOKED_MAX: Final = 100_000
"""Ranges that are remembered as looked at; beyond it they are looked at again at each sight."""

ORPHAN: Final = np.dtype(
    [
        ("place", np.int64),  # in the log
        ("size", np.int32),
        ("offset", np.int64),  # the (first) queue offset that it says
        ("count", np.int64),  # queue offsets that it takes
        ("tag_code", np.int64),
        ("is_message", np.bool_),  # it gets an entry at all
        ("is_other_listed", np.bool_),  # an entry names it, of another offset or queue
        ("is_passed_by", np.bool_),  # a start would not look at it
        ("is_listed", np.bool_),  # it is none: the entry of its offset names it
    ]
)
Orphans = npt.NDArray[np.void]


class Neighbour(NamedTuple):
    """A record beside others that an entry lists, and that bears it out."""

    offset: int  # of one before them, one past its last queue offset; of one behind them, its first
    place: int  # where it begins in the log


class OrphanRecords:
    """Decides which orphan records count, and keeps the entries that stand for them."""

    def __init__(
        self,
        log: MappedFileQueue,
        catalog: Catalog,
        anomalies: AnomalyCounters,
        *,
        is_growing: bool = False,
    ) -> None:
        """Know nothing yet; misplaced records and rebuilt entries are counted in ``anomalies``.

        ``is_growing``: a broker runs, and what its queues list is looked up anew each time.
        """
        self._log = log
        self._catalog = catalog
        self._anomalies = anomalies
        self._is_growing = is_growing
        self._listed: tuple[int, Longs] = -1, np.zeros(0, np.int64)
        """A file of the log, and the places in it that any queue lists at any offset."""
        self._lost: dict[int, int] = {}
        """Where the log cannot be read, from and to, as far as it was walked."""
        self._noted: dict[MessageQueue, tuple[QueueState, list[Orphans]]] = {}
        self._looked: set[tuple[MessageQueue, int, int]] = set()

    @property
    def _log_min(self) -> int:
        return self._log.bases[0] if self._log.bases else 0

    # -- walking ---------------------------------------------------------------------------------

    def walk(self, start: int, end: int, index: LogIndex | None = None) -> Iterator[Chunk]:
        """The chunks of a part of the log, over damage to where a consume queue says that a record begins."""
        chunks = LogChunks(self._log, index)
        while start < end:
            chunk = chunks.read(start, end, CHUNK_BYTES, check_crc=False)
            yield chunk
            block = chunk.block
            for at in np.flatnonzero(block.faults != RecordFault.OK).tolist():
                self._note_lost(chunk.start + int(block.positions[at]), int(block.sizes[at]))
            start = self.behind(chunk, end)
            if chunk.follows is not Next.FILE:
                self._note_lost(chunk.end, start - chunk.end)

    def behind(self, chunk: Chunk, end: int) -> int:
        """Where the log goes on behind a chunk, at most at ``end``: over damage, where a record is said to begin."""
        if chunk.follows is Next.FILE:
            return end if chunk.next_file is None else min(chunk.next_file, end)
        if chunk.follows not in {Next.NOTHING, Next.BROKEN} or chunk.end >= end:
            return chunk.end
        listed = self._listed_places(chunk.end)
        at = int(np.searchsorted(listed, chunk.end, side="right"))
        if at < len(listed):
            return min(end, int(listed[at]))
        following = self._log.next_base(chunk.end)
        return end if following is None else min(end, following)

    def _note_lost(self, start: int, size: int) -> None:
        """Part of the log cannot be read: so many records may be missing between their neighbours."""
        if size > 0 and len(self._lost) < _LOST_MAX:
            self._lost[start] = start + size

    def _listed_places(self, at: int) -> Longs:
        base = self._log.base_of(at)
        if base is None:
            return np.zeros(0, np.int64)
        if base != self._listed[0] or self._is_growing:
            end = base + self._log.file_bytes
            tiered = [state.index for state in list(self._catalog.states.values())]
            found = [listed_places(one, base, end) for one in (*tiered, *self._catalog.others)]
            self._listed = base, distinct(np.concatenate([np.zeros(0, np.int64), *found]))
        return self._listed[1]

    def facts(self, block: RecordBlock, found: Match) -> Orphans:
        """What is known of some records (at least one) of a queue, in one file of the log: orphans, and listed ones."""
        rows = np.zeros(len(found.indices), ORPHAN)
        rows["place"] = block.physical_offsets[found.indices]
        rows["size"] = block.sizes[found.indices]
        rows["offset"], rows["count"] = found.offsets, 1 if found.counts is None else found.counts
        rows["tag_code"] = tag_hashes(only(block, found.indices))
        rows["is_message"] = is_listable(block.sys_flags[found.indices])
        listed = self._listed_places(int(rows["place"][0]))
        rows["is_other_listed"], rows["is_listed"] = np.isin(rows["place"], listed), found.is_listed
        return rows

    # -- deciding --------------------------------------------------------------------------------

    def note(self, state: QueueState, orphans: Orphans) -> None:
        """Remember records of a queue until ``decide`` is called."""
        self._noted.setdefault(state.queue, (state, []))[1].append(orphans)

    def decide(self, walked_from: int) -> bool:
        """Decide on all that were noted by a walk from ``walked_from`` on; whether any is listed from now on."""
        is_any = False
        for state, noted in self._noted.values():
            rows = np.sort(np.concatenate(noted), order="place")
            listed, orphans = rows[rows["is_listed"]], rows[~rows["is_listed"]]
            while len(orphans):
                low, high = self.around(state, int(orphans["place"][0]), listed)
                count = len(orphans)
                if high is not None:
                    count = int(np.searchsorted(orphans["place"], high.place))
                cases, offsets = self.classify(state, orphans[:count], low, high, walked_from)
                is_any |= self._list(state, orphans[:count], cases, offsets)
                orphans = orphans[count:]
        self._noted.clear()
        return is_any

    def _list(self, state: QueueState, orphans: Orphans, cases: Cases, offsets: Longs) -> bool:
        """Let the queue list those that count; whether there are any."""
        for case, counter in _COUNTERS.items():
            self._anomalies.count(counter, int((cases == case).sum()))
        wanted = np.isin(cases, (Case.COUNTS, Case.MISPLACED))
        if not wanted.any():
            return False
        counts = orphans["count"][wanted]
        each = np.repeat(orphans[wanted], counts)
        within = np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = np.repeat(offsets[wanted], counts) + within
        state.index.rebuilt.add(offsets, each["place"], each["size"], each["tag_code"])
        state.end = max(state.end, int(offsets.max()) + 1)
        self._anomalies.count("rebuilt_entries", len(offsets))
        return True

    def classify(
        self,
        state: QueueState,
        orphans: Orphans,
        low: Neighbour | None,
        high: Neighbour | None,
        walked_from: int,
    ) -> tuple[Cases, Longs]:
        """The case of each record between two others, and the queue offset at which it belongs (-1: none is left)."""
        offsets = np.full(len(orphans), -1, np.int64)
        chain = orphans["is_message"] & ~orphans["is_other_listed"] & ~orphans["is_passed_by"]
        if chain.any():
            some = orphans[chain]
            first = int(some["place"][0])
            lost = self._lost_between(np.append(low.place if low else first, some["place"]))
            if low and low.place < walked_from:
                lost[0] = first - low.place  # what lies between was not looked at, or is gone
            offsets[chain] = place(
                some["offset"],
                some["count"],
                lost,
                low and low.offset,
                high and high.offset,
            )
        fits = offsets == orphans["offset"]
        taken = offsets < 0
        for at in np.flatnonzero(~taken & ~fits).tolist():  # what is listed there stays
            entry = state.index.entries(int(offsets[at]), int(offsets[at]) + 1)
            taken[at] = bool(entry.is_written[0])
        cases = classify_orphans(
            is_message=orphans["is_message"],
            is_other_listed=orphans["is_other_listed"],
            is_taken=taken,
            fits=fits,
        )
        return cases, offsets

    def _lost_between(self, places: Longs) -> Longs:
        starts = np.array(sorted(self._lost), np.int64)
        sizes = np.array([self._lost[start] for start in starts.tolist()], np.int64) - starts
        total = np.concatenate(([0], np.cumsum(sizes)))
        return np.diff(total[np.searchsorted(starts, places)])

    # -- what surrounds them ---------------------------------------------------------------------

    def around(
        self, state: QueueState, at: int, known: Orphans | None = None
    ) -> tuple[Neighbour | None, Neighbour | None]:
        """What is listed before a place in the log, or rebuilt; and what is listed behind it.

        ``known``: listed records that the walk has met, in log order: damage of the consume queue does not hide them.
        """
        index = state.index
        befores = [self._listed_before(state, index.written_end(at), at)]
        behinds = [self._listed_behind(state, index.written_end(at + 1), at)]
        if (rebuilt := index.rebuilt.before(at)) is not None:
            befores.append(Neighbour(*rebuilt))
        if known is not None and len(known):
            number = int(np.searchsorted(known["place"], at))
            ends = known["offset"] + known["count"]
            if number:
                befores.append(Neighbour(int(ends[number - 1]), int(known["place"][number - 1])))
            if number < len(known):
                first = known[number]
                behinds.append(Neighbour(int(first["offset"]), int(first["place"])))
        low = max(filter(None, befores), key=lambda one: one.place, default=None)
        return low, min(filter(None, behinds), key=lambda one: one.place, default=None)

    def _listed_before(self, state: QueueState, end: int, place: int = FAR) -> Neighbour | None:
        """The last entry before queue offset ``end`` and that place, borne out by its record.

        Of expired ones nothing can be read, and they are believed. More entries are looked at each time, since many may be
        lost in a row.
        """
        first, count = state.index.span()[0], _NEAR
        while end > first:
            entries, is_listed = self._borne_out(state, max(first, end - count), end)
            is_listed &= entries.physical_offsets < place
            if not is_listed.any():
                is_listed = entries.is_written & (entries.physical_offsets < self._log_min)
            good = np.flatnonzero(is_listed)
            if len(good):
                at = int(good[-1])
                return Neighbour(entries.start + at + 1, int(entries.physical_offsets[at]))
            end, count = entries.start, min(8 * count, _NEAR_MAX)
        return None

    def _listed_behind(self, state: QueueState, start: int, place: int = -1) -> Neighbour | None:
        """The first entry from queue offset ``start`` on, and behind that place, borne out by its record."""
        end, count = state.index.written_end(FAR), _NEAR
        while start < end:
            entries, is_listed = self._borne_out(state, start, min(end, start + count))
            good = np.flatnonzero(is_listed & (entries.physical_offsets > place))
            if len(good):
                at = int(good[0])
                return Neighbour(entries.start + at, int(entries.physical_offsets[at]))
            start, count = start + len(entries), min(8 * count, _NEAR_MAX)
        return None

    def _borne_out(self, state: QueueState, start: int, end: int) -> tuple[Entries, Flags]:
        """Some entries, and which of them name a record of their own."""
        entries = state.index.entries(start, end)
        held = HeldQueue(self._log, state.queue, state.index, self._log_min, self._log.end)
        return entries, held.fetch(entries).cases == Case.LISTED

    # -- looking for them ------------------------------------------------------------------------

    def look_around(self, state: QueueState, first: int, last: int, end: int) -> bool | None:
        """Decide on what lies between the neighbours of records at these places, and below ``end``.

        Whether anything is listed now that was not; None when the neighbours are too far apart.
        """
        low, _ = self.around(state, first)
        _, high = self.around(state, last)
        return self._look(state, low, high, end)

    def search(self, state: QueueState, entries: Entries, found: Fetched, end: int) -> bool:
        """Look for the records of entries that name none of their own, between those of their neighbours in the log.

        The entries follow each other; from ``end`` of the log on it has been decided what counts, entry or not. Whether any
        was found, which is listed from now on.
        """
        is_found = False
        is_hole = np.concatenate(([False], found.cases != Case.LISTED, [False]))
        edges = entries.start + np.flatnonzero(np.diff(is_hole))
        for first, last in edges.reshape(-1, 2).tolist():
            low, high = self._listed_before(state, first), self._listed_behind(state, last)
            is_any = self._look(state, low, high, end)
            is_found |= bool(is_any)
            if is_any is None:
                self._anomalies.note(
                    f"{state.queue}: the entry of {first} is damaged, and its record was not searched for:"
                    f" its neighbours in the log are more than {SEARCH_BYTES_MAX:,} bytes apart"
                )
        return is_found

    def _look(
        self,
        state: QueueState,
        low: Neighbour | None,
        high: Neighbour | None,
        end: int,
    ) -> bool | None:
        """Walk the log between two neighbours, once, and decide on what stands there of their queue."""
        start = max(low.place if low else 0, self._log_min)
        stop = end if high is None else min(high.place, end)
        key = state.queue, start, stop
        if start >= stop or key in self._looked:
            return False
        if stop - start > SEARCH_BYTES_MAX:
            return None
        if len(self._looked) < _LOOKED_MAX:
            self._looked.add(key)
        for chunk in self.walk(start, stop):
            block = chunk.block
            own = topics_equal(block, np.arange(len(block)), state.queue.topic)
            own &= (block.queue_ids == state.queue.queue_id) & (block.faults == RecordFault.OK)
            own &= block.physical_offsets > (low.place if low else -1)
            if own.any():
                found = match(state.index, block, np.flatnonzero(own))
                self.note(state, self.facts(block, found))
        return self.decide(start)
