"""What is taken from a local store's timers into the hourly files, and what stays with the broker. Pure, but for reading.

Each queue of the two timer topics is read from its first record on, however far it was taken before: twice, since a later
record may say of an earlier one that it was rolled or cancelled. (Where none does, which is seen without looking at records
one by one, all is decided by columns.) A message is taken when it is pending (not delivered by
the broker), due at or after ``due_from``, not cancelled, and not taken before. Of a rolled message the first record that
there is stands for all.

Memory: what is kept of a source are the names of rolled messages and of delete marks, and one batch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.format.record import decode_record
from tiered.local.catalog import SCHEDULE_TOPIC
from tiered.log.timers import NEVER
from timer.records import Name, TimerRows, may_have_others, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.local.interface import LocalStore, RecordBatch
    from tiered.log.timers import TimerSource
    from tiered.model import MessageQueue, QueueBounds, QueueOffset
    from timer.records import Longs

READ_BYTES: Final = 8 << 20
READ_COUNT: Final = 1 << 16


@dataclass(slots=True)
class Counts:
    """What became of the records of one source, or of all."""

    delivered: int = 0  # the broker has delivered them
    near: int = 0
    """Pending, due before the near window ends: they stay with the broker. (But for a delete mark of a message that
    may have been far once, and so may have been taken.)"""
    rolled: int = 0  # another record of the same message stands for them
    cancelled: int = 0  # cancelled, with their delete marks
    known: int = 0  # taken before
    taken: int = 0  # taken now, delete marks of messages that were taken before not among them
    marks: int = 0  # such delete marks, taken now
    odd: int = 0  # records whose due time cannot be understood, and damaged ones

    def add(self, other: Counts) -> None:
        """Count together."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_FATES: Final = Counts.__slots__
_DELIVERED, _NEAR, _KNOWN, _TAKEN, _MARKS, _ODD = (
    _FATES.index(name) for name in ("delivered", "near", "known", "taken", "marks", "odd")
)


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """How far the broker is with one queue of timers."""

    read_ms: int = 0
    """What is due below it has been delivered, if its queue offset is below ``listed``."""
    listed: int = 0  # queue offsets below it are in the wheel
    delivered: int = 0  # everything below this queue offset has been delivered (delay levels)


@dataclass(slots=True)
class Given:
    """What was delivered though the progress does not say so yet; each stands for one record, so it is taken out."""

    timers: Counter[Name] = field(default_factory=Counter)
    """Of the wheel, how many of each due time and unique id."""
    delayed: Counter[Name] = field(default_factory=Counter)
    """Of delay levels, how many of each number of attempts, and real topic, ``+`` and unique id."""
    until_ms: int = -1  # nothing that is due later

    @property
    def last_due_ms(self) -> int:
        """When the last of those of the wheel was due; -1: there are none."""
        return max((due for due, _ in self.timers), default=-1)

    def copy(self) -> Given:
        """Another one, of the same."""
        return Given(self.timers.copy(), self.delayed.copy(), self.until_ms)

    def take(self, rows: TimerRows, at: int) -> bool:
        """Whether a message is among them."""
        name = rows.name(at)
        if self.timers[name] > 0:
            self.timers[name] -= 1
            return True
        if rows.batch.queue.topic != SCHEDULE_TOPIC:
            return False
        attempts = decode_record(rows.batch.data, int(rows.batch.positions[at])).reconsume_times
        (_, _), (_, key) = rows.names(at)
        if self.delayed[attempts, key] <= 0:
            return False
        self.delayed[attempts, key] -= 1
        return True


@dataclass(slots=True)
class _Names:
    """What the first reading finds."""

    lowest: dict[Name, int] = field(default_factory=dict)  # of rolled messages, their lowest number
    marks: dict[Name, list[int]] = field(default_factory=dict)  # offsets, by what they cancel
    hits: set[int] = field(default_factory=set)  # marks whose message comes with this reading
    wanted: set[int] = field(default_factory=set)  # marks whose message was taken before

    @property
    def dues(self) -> Longs:
        """int64[n], when anything of this is due."""
        return np.array(list({due for due, _ in (*self.lowest, *self.marks)}), np.int64)


@dataclass(frozen=True, slots=True)
class ChosenTimers:
    """What is taken of one batch."""

    rows: TimerRows  # of the batch
    indices: Longs  # of the items that are taken, in order
    high: int  # one past the last queue offset of the batch
    counts: Counts  # what became of its records

    @property
    def columns(self) -> tuple[Longs, Longs]:
        """Due times and queue offsets of what is taken."""
        return self.rows.dues[self.indices], self.rows.batch.base_offset + self.indices


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Decides what is taken of one source."""

    queue: MessageQueue  # the source
    bounds: QueueBounds  # what there is of it
    progress: ImportProgress  # how far the broker is
    known: TimerSource  # what was taken of it before
    due_from: int  # what is due before it stays with the broker; 0: nothing that is pending does
    given: Given = field(default_factory=Given)  # what was delivered besides

    def choose(self, local: LocalStore) -> Iterator[ChosenTimers]:
        """Read the source, and say batch by batch what is taken; all of ``bounds`` is looked at."""
        names = self._names(local)
        for batch in self._batches(local):
            yield self._chosen(read_rows(batch), names)

    def columns(self, local: LocalStore) -> list[tuple[Longs, Longs]]:
        """Due times and queue offsets of what ``choose`` takes; read once only where no record has a say in another."""
        found: list[tuple[Longs, Longs]] = []
        given = self.given.copy()
        for batch in self._batches(local):
            if may_have_others(batch):
                return [chosen.columns for chosen in replace(self, given=given).choose(local)]
            found.append(self._chosen(read_rows(batch), _Names()).columns)
        return found

    def _batches(self, local: LocalStore) -> Iterator[RecordBatch]:
        at: QueueOffset = self.bounds.min
        while at < self.bounds.end:
            count = min(READ_COUNT, self.bounds.end - at)
            batch = local.read(self.queue, at, bytes_max=READ_BYTES, count_max=count)
            if batch is None:
                return
            yield batch
            at = batch.end_offset

    def _names(self, local: LocalStore) -> _Names:
        found = _Names()
        for batch in self._batches(local):
            if not may_have_others(batch):
                continue
            rows, base = read_rows(batch), batch.base_offset
            for at in np.flatnonzero((rows.rolls > 0) & ~rows.marks).tolist():
                found.lowest.setdefault(rows.name(at), int(rows.rolls[at]))
            for at in np.flatnonzero(rows.marks).tolist():
                found.marks.setdefault(rows.name(at), []).append(base + at)
        if found.lowest or found.marks:
            self._match(local, found)
        return found

    def _match(self, local: LocalStore, found: _Names) -> None:
        """Lower the numbers of messages whose first record is there; and see which delete marks have theirs."""
        dues = found.dues
        for batch in self._batches(local):
            rows, base = read_rows(batch), batch.base_offset
            for at in np.flatnonzero(np.isin(rows.dues, dues) & ~rows.marks).tolist():
                name, roll = rows.name(at), int(rows.rolls[at])
                if name in found.lowest:
                    found.lowest[name] = min(found.lowest[name], roll)
                if found.marks:
                    is_known = self._is_known(base + at, name[0], roll)
                    which = found.wanted if is_known else found.hits
                    for either in rows.names(at):
                        which.update(found.marks.get(either, ()))

    def _chosen(self, rows: TimerRows, names: _Names) -> ChosenTimers:
        fates = self._fates(rows)
        base = int(rows.batch.base_offset)
        special = (rows.rolls > 0) | rows.marks | np.isin(rows.dues, names.dues)
        special |= rows.dues <= self.given.until_ms
        for at in np.flatnonzero(special & (fates != _ODD) & (fates != _DELIVERED)).tolist():
            fates[at] = _FATES.index(self._fate(rows, at, base + at, names))
        counts = Counts(*np.bincount(fates, minlength=len(_FATES)).tolist())
        taken = np.flatnonzero((fates == _TAKEN) | (fates == _MARKS))
        return ChosenTimers(rows, taken, base + len(rows), counts)

    def _fates(self, rows: TimerRows) -> Longs:
        """What becomes of each, where no other record has a say in it: the first case that it is."""
        offsets = rows.batch.base_offset + np.arange(len(rows))
        progress, ends = self.progress, [end for end, _ in self.known.ranges]
        due_froms = np.array([*(due for _, due in self.known.ranges), NEVER], np.int64)
        known = due_froms[np.searchsorted(ends, offsets, side="right")]
        fired = (rows.dues < progress.read_ms) & (offsets < progress.listed)
        cases = {
            _ODD: rows.dues < 0,
            _DELIVERED: fired | (offsets < progress.delivered),
            _KNOWN: rows.dues >= known,
            _NEAR: rows.dues < self.due_from,
        }
        fates = np.full(len(rows), _TAKEN, np.int64)
        for fate, which in reversed(cases.items()):
            fates[which] = fate
        return fates

    def _fate(self, rows: TimerRows, at: int, offset: int, names: _Names) -> str:
        """The name of what one that is pending is counted as."""
        name = due, _ = rows.name(at)
        is_mark, roll = bool(rows.marks[at]), int(rows.rolls[at])
        if not is_mark and roll > names.lowest.get(name, roll):
            return "rolled"
        if self._is_known(offset, due, 0 if is_mark else roll):
            return "known"
        if not is_mark and due <= self.given.until_ms and self.given.take(rows, at):
            return "delivered"
        if is_mark and offset in names.hits and offset not in names.wanted:
            return "cancelled"
        if not is_mark and names.marks and any(n in names.marks for n in rows.names(at)):
            return "cancelled"
        if due < self.due_from and not (is_mark and self._was_far(offset, due)):
            return "near"
        return "marks" if is_mark else "taken"

    def _is_known(self, offset: int, due: int, roll: int) -> bool:
        return self._was_taken(offset, due) or bool(roll and self._was_seen(offset, due))

    def _was_far(self, offset: int, due: int) -> bool:
        """Whether what is due then was far when something in front of the offset was looked at, so that it may be taken."""
        low = self.known.start
        for end, due_from in self.known.ranges:
            if low < offset and due >= due_from:
                return True
            low = end
        return False

    def _was_taken(self, offset: int, due: int) -> bool:
        return due >= self.known.due_from(offset)

    def _was_seen(self, offset: int, due: int) -> bool:
        """Whether the first record of a rolled message, which is gone from the local store, had been taken."""
        if offset < self.known.first_end or self.bounds.min <= self.known.start:
            return False
        low = self.known.start
        for end, due_from in self.known.ranges:
            if low >= self.bounds.min:
                break
            if due < due_from:
                return False
            low = end
        return low >= self.bounds.min
