"""What is taken from a local store's timers into the hourly files, and what stays with the broker. Pure, but for reading.

Each queue of the two timer topics is read from its first record on, however far it was taken before: twice, since a later
record may say of an earlier one that it was rolled or taken back. A message is taken when it is pending (not delivered by
the broker), due at or after ``due_from``, not taken back, and not taken before. Of a rolled message the first record that
there is stands for all.

Memory: what is kept of a source are the names of rolled messages and of delete marks, and one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from timer.records import TimerRows, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.local.face import LocalStore
    from tiered.log.timers import TimerSource
    from tiered.model import MessageQueue, QueueBounds, QueueOffset
    from timer.records import Flags, Longs

READ_BYTES: Final = 8 << 20
READ_COUNT: Final = 1 << 16

Name = tuple[int, bytes]


@dataclass(slots=True)
class Counts:
    """What became of the records of one source, or of all.

    Attributes:
        delivered: The broker has delivered them.
        near: Pending, due before the near window ends: they stay with the broker. (But for a delete mark of a message that
            may have been far once, and so may have been taken.)
        rolled: Another record of the same message stands for them.
        cancelled: Taken back, with their delete marks.
        known: Taken before.
        taken: Taken now, delete marks of messages that were taken before not among them.
        marks: Such delete marks, taken now.
        odd: Records whose due time cannot be understood, and damaged ones.
    """

    delivered: int = 0
    near: int = 0
    rolled: int = 0
    cancelled: int = 0
    known: int = 0
    taken: int = 0
    marks: int = 0
    odd: int = 0

    def add(self, other: Counts) -> None:
        """Count together."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """How far the broker is with one queue of timers.

    Attributes:
        read_ms: What is due below it has been delivered, if its queue offset is below ``listed``.
        listed: Queue offsets below it are in the wheel.
        delivered: Everything below this queue offset has been delivered (delay levels).
    """

    read_ms: int = 0
    listed: int = 0
    delivered: int = 0


@dataclass(slots=True)
class _Names:
    """What the first reading finds."""

    lowest: dict[Name, int] = field(default_factory=dict)  # of rolled messages, their lowest number
    marks: dict[Name, list[int]] = field(
        default_factory=dict
    )  # offsets of delete marks, by what they name
    hits: set[int] = field(default_factory=set)  # those whose message comes with this reading
    wanted: set[int] = field(default_factory=set)  # those whose message was taken before


@dataclass(frozen=True, slots=True)
class ChosenTimers:
    """What is taken of one batch.

    Attributes:
        rows: Of the batch.
        indices: Of the items that are taken, in order.
        high: One past the last queue offset of the batch.
        counts: What became of its records.
    """

    rows: TimerRows
    indices: Longs
    high: int
    counts: Counts


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Decides what is taken of one source.

    Attributes:
        queue: The source.
        bounds: What there is of it.
        progress: How far the broker is.
        known: What was taken of it before.
        due_from: What is due before it stays with the broker; 0: nothing that is pending does.
    """

    queue: MessageQueue
    bounds: QueueBounds
    progress: ImportProgress
    known: TimerSource
    due_from: int

    def choose(self, local: LocalStore) -> Iterator[ChosenTimers]:
        """Read the source, and say batch by batch what is taken; all of ``bounds`` is looked at.

        Raises:
            TieredStoreError: The store cannot be read.
        """
        names = self._names(local)
        for rows in self._batches(local):
            yield self._chosen(rows, names)

    def _batches(self, local: LocalStore) -> Iterator[TimerRows]:
        at: QueueOffset = self.bounds.min
        while at < self.bounds.end:
            count = min(READ_COUNT, self.bounds.end - at)
            batch = local.read(self.queue, at, bytes_max=READ_BYTES, count_max=count)
            if batch is None:
                return
            yield read_rows(batch)
            at = batch.end_offset

    def _names(self, local: LocalStore) -> _Names:
        found = _Names()
        for rows in self._batches(local):
            base = rows.batch.base_offset
            for at in np.flatnonzero((rows.rolls > 0) & ~rows.marks).tolist():
                name = int(rows.dues[at]), rows.keys[at]
                found.lowest.setdefault(name, int(rows.rolls[at]))
            for at in np.flatnonzero(rows.marks).tolist():
                name = int(rows.dues[at]), rows.keys[at]
                found.marks.setdefault(name, []).append(base + at)
        if found.lowest or found.marks:
            self._match(local, found)
        return found

    def _match(self, local: LocalStore, found: _Names) -> None:
        """Lower the numbers of messages whose first record is there; and see which delete marks have theirs."""
        for rows in self._batches(local):
            base = rows.batch.base_offset
            for at in np.flatnonzero((rows.dues >= 0) & ~rows.marks).tolist():
                name = int(rows.dues[at]), rows.keys[at]
                if name in found.lowest:
                    found.lowest[name] = min(found.lowest[name], int(rows.rolls[at]))
                if found.marks:
                    is_known = self._is_known(base + at, name[0], int(rows.rolls[at]))
                    which = found.wanted if is_known else found.hits
                    for either in rows.names(at):
                        which.update(found.marks.get(either, ()))

    def _chosen(self, rows: TimerRows, names: _Names) -> ChosenTimers:
        counts, base, taken = Counts(), int(rows.batch.base_offset), []
        delivered = self._delivered(rows)
        for at, due in enumerate(rows.dues.tolist()):
            fate = self._fate(rows, at, due, base + at, names, is_delivered=bool(delivered[at]))
            setattr(counts, fate, getattr(counts, fate) + 1)
            if fate in {"taken", "marks"}:
                taken.append(at)
        return ChosenTimers(rows, np.array(taken, np.int64), base + len(rows), counts)

    def _delivered(self, rows: TimerRows) -> Flags:
        offsets = rows.batch.base_offset + np.arange(len(rows))
        progress = self.progress
        fired = (rows.dues < progress.read_ms) & (offsets < progress.listed)
        found: Flags = fired | (offsets < progress.delivered)
        return found

    def _fate(
        self, rows: TimerRows, at: int, due: int, offset: int, names: _Names, *, is_delivered: bool
    ) -> str:
        """The name of what it is counted as."""
        if due < 0:
            return "odd"
        if is_delivered:
            return "delivered"
        name = due, rows.keys[at]
        is_mark, roll = bool(rows.marks[at]), int(rows.rolls[at])
        if not is_mark and roll > names.lowest.get(name, roll):
            return "rolled"
        if self._is_known(offset, due, 0 if is_mark else roll):
            return "known"
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
