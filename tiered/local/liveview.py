"""A store that a broker runs on: how far its log is proven, and which queues list it.

**Contract.** ``log_end`` is the frontier: everything below it is committed, and it only moves forward as long as the
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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.format.block import queue_groups
from tiered.format.items import FILLER_SIZE
from tiered.format.record import MAGIC_BLANK, MAGIC_V1, MAGIC_V2, SIZE_AND_MAGIC
from tiered.format.sysflag import is_listable
from tiered.local.classification import Case
from tiered.local.consumequeues import Rebuilt
from tiered.local.interface import HoleReason, Waiting
from tiered.local.matching import Match, match, match_states
from tiered.local.orphan_records import OrphanRecords
from tiered.local.pieces import (
    Ahead,
    Growth,
    LogPieces,
    Next,
    Piece,
    count_sound,
    find_new,
    read_head,
    walk_sound,
)
from tiered.local.queue_reader import Bounds, fetch, held_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.clock import Clock
    from tiered.format.block import RecordBlock
    from tiered.local.catalog import Catalog, QueueState
    from tiered.local.classification import AnomalyCounters
    from tiered.local.consumequeues import Entries, Flags, Longs
    from tiered.local.mapped_file_queue import MappedFileQueue
    from tiered.local.queue_reader import Fetched

_PIECE_BYTES: Final = 8 << 20
_PIECE_BYTES_MIN: Final = 64 << 10
_LOOKED_AT: Final = 16
"""Entries of a queue that are looked at in one go."""
_COUNTED_AT_ONCE: Final = 16_384
_BROKEN_AGAIN_S: Final = 1.0
_DROPPED_AFTER_S: Final = 1.0
_EMPTY_AGAIN_S: Final = 10.0
_TOLD_AFTER_S: Final = 2.0
"""What the broker said last may be a second old, and of its incarnation before this view."""
_FAR: Final = 2**63 - 1
_NONE: Final = np.zeros(0, np.int64)


@dataclass(slots=True)
class Advance:
    """What one step of the frontier took in."""

    block: RecordBlock  # the records; valid until the next step
    taken: list[tuple[QueueState, Match]]
    """Their queues, each with its records; those that are listed count."""
    end: int  # where the frontier stands now
    is_last: bool  # nothing could be seen behind it


class LiveView:
    """See the module.

    Attributes:
        log_end: The frontier.
    """

    is_live = True
    torn_bytes = 0

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
        self.log = log  # the commit log
        self.catalog = catalog  # the queues
        self.damages = 0  # how often the frontier has leapt over damage
        self._anomalies = anomalies
        self._clock = clock
        self._started_ms = started_ms
        self._may_truncate = may_truncate
        self._broker_max_offset = broker_max_offset
        # Decides on records that no entry lists.
        self.orphans = OrphanRecords(log, catalog, anomalies, self.asked, is_growing=True)
        self._pieces = LogPieces(log)
        self._wanted_bytes = _PIECE_BYTES_MIN
        self._passed_by = -1, 0.0
        """Where a record stands that a later one has overtaken, and since when."""
        self._has_met_new = False
        self._proven_old = -1
        self._ahead = Ahead(log, clock)
        self._growth = Growth(log, clock)
        self._made_s = clock.monotonic_s()
        self._looked_again_s = -_EMPTY_AGAIN_S
        self._behind = Waiting()
        """What is listed behind the damage at which the frontier stands."""
        self.log_end = self._walked_from = self._first_position()
        self._open_queues()

    @property
    def log_min(self) -> int:
        """First physical offset of the log."""
        return self.log.bases[0] if self.log.bases else 0

    def _first_position(self) -> int:
        for base in reversed(self.log.bases):
            if read_head(self._pieces, base).is_sound:
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
        bounds = Bounds(self.log_min, limit)
        end, step = state.index.written_end(limit), 1
        end = held_end(self.log, state.queue, state.index, end, bounds)
        first_offset = max(state.end, state.index.span()[0])
        while end > first_offset:
            first = max(first_offset, end - step)
            entries = state.index.entries(first, end)
            found = fetch(self.log, state.queue, entries, bounds, is_batch=state.index.is_batch)
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
        """Move the frontier by one piece.

        Args:
            bytes_max: How much of the log to look at, at most (one record at least).
            is_same: Whether the same broker still runs; asked after everything was read.

        Returns:
            None when there is nothing new, or the broker is another one.
        """
        if not self._has_record_at_end():
            return None
        is_complete = self._pieces.is_complete(self.log_end)
        piece = self._pieces.read(
            self.log_end, _FAR, min(bytes_max, max(self._wanted_bytes, _PIECE_BYTES_MIN))
        )
        count = self._count_proven(piece)
        is_blank = not len(piece.block) and piece.follows is Next.FILE
        if not count and not (is_blank and piece.next_file is not None):
            self._look_behind_damage(_BROKEN_AGAIN_S)
            return None
        taken = self._match(piece, count)
        cut = self._cut(piece, count, taken)
        if not cut and count and self._ahead.is_overtaken(piece, count, self._match):
            taken = self._match(piece, count)  # what is listed by now; the rest never will be
            cut = self._cut(piece, count, taken, is_overtaken=True)
        if cut < count:
            taken = self._match(piece, cut)  # what is listed behind it waits as well
        settled = cut if is_complete else self._pieces.count_unchanged(piece, cut)
        if not is_same():
            return None
        if settled < cut:
            if not settled:
                return self.advance(bytes_max, is_same)  # listed by now, hence complete
            cut, taken = settled, self._match(piece, settled)
        return self._accept(piece, cut, taken)

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

    def _count_proven(self, piece: Piece) -> int:
        """How many records of the piece, from the first, are sound and not from before the start."""
        count = count_sound(piece)
        if self._started_ms is None or not count:
            return count
        starts = piece.start + piece.block.positions[:count]
        is_new = piece.block.store_timestamps_ms[:count] >= self._started_ms
        is_new |= self._has_met_new & (starts < self._settled)
        first_new = 0 if self._has_met_new else int(np.argmax(is_new)) if is_new.any() else count
        stale = np.flatnonzero(~is_new[first_new:])
        sound = count
        if len(stale):
            count = first_new + int(stale[0])
        if self._may_truncate and not self._has_met_new and first_new >= count:
            count = min(count, self._count_told(piece, count))
        if not count and sound:
            self._growth.watch(int(starts[0]))
        return count

    @property
    def _settled(self) -> int:
        """What begins below it is in the broker's log, by its word or since it has been seen to write behind it."""
        told = self._broker_max_offset() if self._broker_max_offset is not None else 0
        return max(told, self._growth.settled)

    def _count_told(self, piece: Piece, count: int) -> int:
        """How many records stored before the start are known to be kept: by later ones, or by the broker."""
        limit, started_ms = self._proven_old, self._started_ms or 0
        if limit < piece.end:
            limit = self._proven_old = max(limit, find_new(self.log, piece.end, started_ms))
        if self._broker_max_offset is not None and limit < piece.end:
            limit = max(limit, self._broker_max_offset())
        starts = piece.start + piece.block.positions[:count]
        told = int(np.searchsorted(starts + piece.block.sizes[:count], limit, side="right"))
        return max(told, int(np.searchsorted(starts, self._growth.settled)))

    def _match(self, piece: Piece, count: int) -> list[tuple[QueueState, Match]]:
        among = np.zeros(len(piece.block), np.bool_)
        among[:count] = True
        return match_states(self.catalog, piece.block, queue_groups(piece.block, among=among))

    def _cut(
        self,
        piece: Piece,
        count: int,
        taken: list[tuple[QueueState, Match]],
        *,
        is_overtaken: bool = False,
    ) -> int:
        """How many records of the piece, from the first, are listed or will never be."""
        waiting = [_orphans(piece.block, found) for _, found in taken]
        if is_overtaken or not any(map(len, waiting)):
            return count
        # Another queue's entry may have been written between the two readings: look at those again that
        # lie before a listed record.
        last = max((found.last_listed()[0] for _, found in taken), default=-1)
        for number, (state, found) in enumerate(taken):
            if len(waiting[number]) and waiting[number][0] < last:
                self.catalog.find(state.queue)  # its directory may have come meanwhile
                taken[number] = state, match(state.index, piece.block, found.indices)
                waiting[number] = _orphans(piece.block, taken[number][1])
        last = max((found.last_listed()[0] for _, found in taken), default=-1)
        everything = np.concatenate(waiting)
        before = everything[everything < last]
        if len(before) and not self._is_dropped(piece, int(before.min()), last):
            return int(before.min())
        behind = everything[everything > last]
        return int(behind.min()) if len(behind) else count

    def _is_dropped(self, piece: Piece, first: int, listed: int) -> bool:
        """Whether a record that is not listed, before one that is, never will be.

        An entry left from before a restart may name the very place of a new record, before the broker comes to it. So the
        listed one must have been stored a second later, or the other have waited so long.
        """
        times = piece.block.store_timestamps_ms
        if int(times[listed] - times[first]) >= _DROPPED_AFTER_S * 1000:
            return True
        place, now_s = piece.start + int(piece.block.positions[first]), self._clock.monotonic_s()
        if self._passed_by[0] != place:
            self._passed_by = place, now_s
        return now_s >= self._passed_by[1] + _DROPPED_AFTER_S

    def _accept(
        self, piece: Piece, cut: int, taken: list[tuple[QueueState, Match]]
    ) -> Advance | None:
        before = self.log_end
        if cut < len(piece.block):
            self.log_end = piece.start + int(piece.block.positions[cut])
        elif piece.follows is Next.FILE and piece.next_file is not None:
            self.log_end = piece.next_file
        else:
            self.log_end = piece.end
        if self.log_end == before:
            return None
        self._wanted_bytes = 2 * (self.log_end - before)
        if self._started_ms is not None and not self._has_met_new:
            self._has_met_new = bool(
                (piece.block.store_timestamps_ms[:cut] >= self._started_ms).any()
            )
        self._behind = Waiting()
        for state, found in taken:
            self.decide(state, piece.block, found, self._walked_from)
            self._extend(state, found)
        is_last = cut < len(piece.block) or piece.follows not in {Next.MORE, Next.FILE}
        return Advance(piece.block, taken, self.log_end, is_last)

    def _extend(self, state: QueueState, found: Match) -> None:
        """Set a queue's end behind its last listed record. A topic that was made anew begins at 0 again."""
        last, end = found.last_listed()
        if last < 0:
            return
        is_other, state.end = not state.min < state.end < end, end
        if is_other:
            state.min = min(state.index.first_not_below(self.log_min, end), end)

    def decide(self, state: QueueState, block: RecordBlock, found: Match, walked_from: int) -> None:
        """Decide on records that their queue does not list though it lists later ones. See ``OrphanRecords.decide``."""
        if found.is_all_listed:
            return
        asked = self.asked(state, block, found)
        cases = self.orphans.decide(state, block, found, asked, walked_from)
        self._anomalies.count("dropped_records", int((cases == Case.DROPPED).sum()))

    def asked(self, state: QueueState, _block: RecordBlock, found: Match) -> Flags:
        """Which records count if they stand where they belong: those whose entry says something else, or was lost."""
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
        if behind < _FAR and self._count_proven(self._pieces.read(self.log_end, behind, 1)):
            return  # it was not damage: the broker has only now come there
        if behind == _FAR:
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
        found = min((self._proven_in(state, state.end, told) for state in states), default=_FAR)
        for state in states if found == _FAR else ():
            end, step = state.index.written_end(_FAR), 2 * _LOOKED_AT
            starts = [end - _LOOKED_AT] if end > state.end + _LOOKED_AT else []
            while state.end + step < end:
                starts.append(state.end + step)
                step *= 2
            for start in starts:
                if (found := self._proven_in(state, start, told)) < _FAR:
                    return found
        return found

    def _proven_in(self, state: QueueState, start: int, told: int) -> int:
        """The first place of a proven record in a few entries; beyond everything without one."""
        entries, found = self._behind_frontier(state, start)
        if found is None:
            return _FAR
        good = np.flatnonzero(found.cases == Case.LISTED)
        is_new = found.block.store_timestamps_ms[found.record_of[good]] >= (self._started_ms or 0)
        is_kept = entries.physical_offsets[good] + entries.sizes[good] <= told
        good = good[is_new | is_kept]
        return int(entries.physical_offsets[good].min()) if len(good) else _FAR

    def _behind_frontier(self, state: QueueState, start: int) -> tuple[Entries, Fetched | None]:
        """A few entries, and the records behind the frontier that they name; None when they name none there."""
        entries = state.index.entries(start, start + _LOOKED_AT)
        if not (entries.is_written & (entries.physical_offsets > self.log_end)).any():
            return entries, None
        bounds = Bounds(self.log_end + 1, _FAR)
        is_batch = state.index.is_batch
        return entries, fetch(self.log, state.queue, entries, bounds, is_batch=is_batch)

    def _count_behind(self) -> Waiting:
        """What consume queues list behind damage at the frontier, if there is a sound record among it.

        A broker's start may have given it up, or it was damaged since: nothing shows which.
        """
        records = size = 0
        for state in self.catalog.states.values():
            _, found = self._behind_frontier(state, state.end)
            if found is None or not (found.cases == Case.LISTED).any():
                continue
            at, end = state.end, state.index.written_end(_FAR)
            while at < end:
                entries = state.index.entries(at, min(end, at + _COUNTED_AT_ONCE))
                is_behind = entries.is_written & (entries.physical_offsets >= self.log_end)
                is_behind &= entries.physical_offsets < self.log.end
                records += int(is_behind.sum())
                size += int(entries.sizes[is_behind].astype(np.int64).sum())
                at += len(entries)
        base = self.log.base_of(self.log_end)
        if not records or base is None:
            return Waiting()
        place = f"{self.log.path(base)}, byte {self.log_end - base}"
        return Waiting(
            records,
            size,
            f"at and behind {place}, where a record is damaged or a broker's start has cut the log:"
            " nothing stored since that start shows which",
        )

    # -- the rest --------------------------------------------------------------------------------

    def waiting(self) -> Waiting:
        """Count what can be read behind the frontier; before damage, what is listed behind that."""
        records = size = 0
        reason = ""
        for piece, count in walk_sound(self.log, self.log_end, check_crc=True):
            if count and not reason:
                reason = self._reason(piece)
            records += count
            size += int(piece.block.sizes[:count].sum())
        return Waiting(records, size, reason) if records else self._waiting_behind()

    def _waiting_behind(self) -> Waiting:
        head = self.log.read(self.log_end, SIZE_AND_MAGIC.size)
        is_broken = len(head) == SIZE_AND_MAGIC.size and any(head[4:])
        if is_broken and SIZE_AND_MAGIC.unpack(head)[1] != MAGIC_BLANK:
            self._look_behind_damage(_BROKEN_AGAIN_S)
        return self._behind

    def _reason(self, piece: Piece) -> str:
        is_old = (
            self._started_ms is not None
            and int(piece.block.store_timestamps_ms[0]) < self._started_ms
        )
        if is_old and self._has_met_new:
            return (
                "stored before the broker's start, behind what was stored after it: given up at that start,"
                " or the clock was set back, which the broker's next message shows"
            )
        if is_old and self._may_truncate:
            return "stored before the broker's start, and replicas may still truncate it"
        return "not listed by the broker's consume queues yet"


def _orphans(block: RecordBlock, found: Match) -> Longs:
    """Indices of the records that should be listed and are not."""
    if found.is_all_listed:
        return _NONE
    return found.indices[~found.is_listed & is_listable(block.sys_flags[found.indices])]
