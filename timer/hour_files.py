"""TimerFlatFile: the flat file of one clock hour (UTC) of due time, and the table and rounds of those being written.

A file is a queue of ``tiered.log``: topic ``TIMER_TOPIC``, its queue id the hour since 1970, and in its items the due time
stands where a tag code stands elsewhere, so the consume queue is the index by due time. A record is the local record but
for three fields: topic, queue id and queue offset are those of its place here, so that every check of queues holds for it
(the real topic and queue stand in its properties anyway). ``TIMER_TOPIC`` is as long as the names of both timer topics, so
nothing else moves.

Daylight saving has no effect: hours are counted in UTC.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from backends.errors import AlreadyExistsError, BackendError
from backends.lazy_dataclass import dataclass
from tiered.crashpoints import reached
from tiered.errors import DataError, FencedError, InternalError, StoreUnavailableError
from tiered.format.block import bytes_at
from tiered.format.record import QUEUE_ID_AT, QUEUE_OFFSET_AT, decode_record
from tiered.local.catalog import SCHEDULE_TOPIC
from tiered.local.interface import RecordBatch
from tiered.local.queue_reader import cut_records
from tiered.log.actions import action_of
from tiered.log.bundles import bundle_row
from tiered.log.composite import AppendResult, CommitPolicy, CompositeFlatFile
from tiered.log.parts import Incarnation
from tiered.log.timers import (
    HOUR_MS,
    NEVER,
    TIMER_TOPIC,
    HourTaken,
    TimersTaken,
    TimerTake,
    hour_queue,
)
from tiered.model import QueueOffset
from timer.records import Name, TimerRows, may_have_others, read_rows

if TYPE_CHECKING:
    import random
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from tiered.clock import Clock
    from tiered.journal.append import JournalWriter
    from tiered.local.interface import LocalStore
    from tiered.log.bundles import NamedSections
    from tiered.log.composite import GroupCommit
    from tiered.log.parts import Bundle, TierState
    from tiered.log.timers import TimerSource
    from tiered.model import MessageQueue, QueueBounds
    from timer.records import Longs

# -- what is taken -------------------------------------------------------------------------------
#
# What is taken from a local store's timers into the hourly files, and what stays with the broker. Pure, but for reading.
#
# Each queue of the two timer topics is read from its first record on, however far it was taken before: twice, since a
# later record may say of an earlier one that it was rolled or cancelled. (Where none does, which is seen without looking
# at records one by one, all is decided by columns.) A message is taken when it is pending (not delivered by the broker),
# due at or after ``due_from``, not cancelled, and not taken before. Of a rolled message the first record that there is
# stands for all.
#
# Memory: what is kept of a source are the names of rolled messages and of delete marks, and one batch.

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


# -- hour files -------------------------------------------------------------------------------------

_NAME: Final = TIMER_TOPIC.encode()
_NO_INCARNATION: Final = Incarnation(0, QueueOffset(0), QueueOffset(0))


class TimerFlatFile:
    """The write side of one hour.

    Attributes:
        due_min_ms: Smallest due time since the last ``reset``.
        due_max_ms: Greatest.
        marks: Delete marks since then.
    """

    def __init__(self, hour: int, incarnation: Incarnation | None, policy: CommitPolicy) -> None:
        """Go on where the journal says."""
        self.hour = hour  # since 1970
        # Its offsets, buffer and segments. Used with its lock held by the writer, the only thread.
        self.file = CompositeFlatFile(hour_queue(hour), incarnation or _NO_INCARNATION, policy)
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.due_min_ms, self.due_max_ms, self.marks = 2**62, -1, 0

    def append(self, batch: RecordBatch, marks: int, now_s: float) -> None:
        """Take records that were made for this place (``place_records``)."""
        taken = self.file.append(batch, now_s)
        assert taken is AppendResult.APPENDED
        self.due_min_ms = min(self.due_min_ms, int(batch.tag_codes.min()))
        self.due_max_ms = max(self.due_max_ms, int(batch.tag_codes.max()))
        self.marks += marks


class TimerFlatFileTable:
    """The hours that are being written, made on first use from what the journal says."""

    def __init__(self, state: TierState, policy: CommitPolicy) -> None:
        """Go on from a state of the timers' journal."""
        self._state = state
        self._policy = policy
        self._files: dict[int, TimerFlatFile] = {}

    def file(self, hour: int) -> TimerFlatFile:
        """The file of an hour."""
        found = self._files.get(hour)
        if found is None:
            incarnation = self._state.incarnation(hour_queue(hour))
            found = self._files[hour] = TimerFlatFile(hour, incarnation, self._policy)
        return found

    def buffered(self) -> Iterator[TimerFlatFile]:
        """Those that hold something which is not durable, by hour."""
        for hour in sorted(self._files):
            if self._files[hour].file.has_buffered:
                yield self._files[hour]

    def append(self, rows: TimerRows, indices: Longs, now_s: float) -> int:
        """Put records into the files of their hours; the bytes that came."""
        hours = rows.dues[indices] // HOUR_MS
        order = np.argsort(hours, kind="stable")
        indices, hours = indices[order], hours[order]
        edges = [0, *(np.flatnonzero(np.diff(hours)) + 1).tolist(), len(hours)]
        size = 0
        for low, high in pairwise(edges):
            if low < high:
                file, some = self.file(int(hours[low])), indices[low:high]
                batch = place_records(rows, some, file.hour, file.file.append_offset)
                file.append(batch, int(rows.marks[some].sum()), now_s)
                size += memoryview(batch.data).nbytes
        return size


def place_records(
    rows: TimerRows, indices: Longs, hour: int, base_offset: QueueOffset
) -> RecordBatch:
    """Records as they stand in an hour's file.

    Args:
        rows: Of a local batch; it is not changed.
        indices: Of the records, all sound, in order.
        base_offset: Queue offset of the first there.

    Raises:
        DataError: A record is of a topic whose name is of another length.
    """
    block = rows.block
    if (block.topic_sizes[indices] != len(_NAME)).any():
        raise DataError(f"a record of {rows.batch.queue} is of another topic")
    cut, starts = cut_records(block, indices)
    data = bytearray(cut)
    bytes_at(data, ">i4")[starts + QUEUE_ID_AT] = hour
    bytes_at(data, ">i8")[starts + QUEUE_OFFSET_AT] = base_offset + np.arange(len(indices))
    at = starts + (block.topic_positions - block.positions)[indices]
    bytes_at(data, f"S{len(_NAME)}")[at] = _NAME
    return RecordBatch(
        queue=hour_queue(hour),
        base_offset=base_offset,
        data=data,
        positions=starts,
        sizes=block.sizes[indices],
        tag_codes=rows.dues[indices],
        store_timestamps_ms=block.store_timestamps_ms[indices],
        physical_offsets=block.physical_offsets[indices],
    )


# --------------------------------------------------------------------------------------------------
# Makes timers durable: rounds of bundles, each named by one journal entry together with what was taken of the sources.
#
# Overview: ``add`` puts what was chosen into the buffers of the hours' files; when a bundle is full (``is_full``), or at
# the end, ``commit`` uploads all of them, hour by hour, and appends one entry with the parts and the sources' new
# positions. So a round costs by its bytes, and not by the hours that it touches; and one commit offset covers what went
# into the files and what was left to the broker: a source's position never passes a message that is neither.
#
# Ordering: data, then the entry (I2). One round at a time.
#
# Retries and errors: a bundle that failed, or whose outcome is unknown, switches the file of each of its hours
# (``tiered.log.composite``) and goes again under another key after a pause with jitter, until ``stop`` is set. What waiting
# cannot mend ends it: ``StoreUnavailableError``, or ``FencedError`` when another has taken over.
#
# After a crash: objects that no entry names are orphans; the sources are read again from what the journal says.
# --------------------------------------------------------------------------------------------------


BUNDLE_BYTES = 16 * 1024 * 1024
_SEGMENT_BYTES_MAX = 1 << 30
_SEGMENT_AGE_MS_MAX = 2**62
"""An hour's file is not rolled for its age: it goes all at once, when it is handed over."""
_PAUSE_S_MIN = 0.1
_PAUSE_S_MAX = 30.0


class Stored(Protocol):
    """A bundle that is durable."""

    @property
    def bundle(self) -> Bundle:
        """Which."""
        ...

    @property
    def packed(self) -> bytes:
        """Its table."""
        ...

    @property
    def named(self) -> NamedSections:
        """Its sections as parts."""
        ...


class TimerWriter:
    """Collects what was chosen of the sources and makes it durable, bundle by bundle. For one thread."""

    def __init__(
        self,
        journal: JournalWriter[TierState],
        put: Callable[[Sequence[GroupCommit]], Stored],
        *,
        clock: Clock,
        rng: random.Random,
        stop: threading.Event,
        bundle_bytes: int = BUNDLE_BYTES,
    ) -> None:
        """Wire it.

        Args:
            put: Uploads commits as one bundle, in this order; raises ``BackendError``.
            bundle_bytes: A bundle has about so many bytes of records.
        """
        self._journal = journal
        self._put = put
        self._clock = clock
        self._rng = rng
        self._stop = stop
        self._bundle_bytes = bundle_bytes
        policy = CommitPolicy(bundle_bytes, 0.0, _SEGMENT_BYTES_MAX, _SEGMENT_AGE_MS_MAX)
        self._files = TimerFlatFileTable(journal.state, policy)
        self._bytes = 0
        self.bundles = 0
        self.rounds = 0

    @property
    def is_full(self) -> bool:
        """A round is due."""
        return self._bytes >= self._bundle_bytes

    def add(self, chosen: ChosenTimers) -> None:
        """Take what was chosen of a batch into the buffers."""
        if len(chosen.indices):
            now_s = self._clock.monotonic_s()
            self._bytes += self._files.append(chosen.rows, chosen.indices, now_s)

    def commit(self, taken: Sequence[TimersTaken]) -> None:
        """Make all that was added durable, and say what was taken; nothing is written when both are nothing.

        Raises:
            FencedError: Another writer has taken over.
            StoreUnavailableError: The store refuses us, or we were told to stop.
        """
        files = list(self._files.buffered())
        if not files and not taken:
            return
        stored = self._upload(files)
        reached("timers-stored")
        hours = {one.hour: HourTaken(one.due_min_ms, one.due_max_ms, one.marks) for one in files}
        rows = [bundle_row(one.bundle, one.packed) for one in stored]
        parts = [{"do": "part", "bundles": rows}] if rows else []
        refused = self._journal.state.refused_parts
        self._journal.append([*parts, action_of(TimerTake(tuple(taken), hours))])
        if self._journal.state.refused_parts != refused:
            what = f"replay refuses a part of our own journal entry {self._journal.number}"
            raise InternalError(what, do="stop, and report this defect")
        self._committed(files, stored)
        self._journal.write_checkpoint()
        reached("timers-committed")

    def _committed(self, files: Sequence[TimerFlatFile], stored: Sequence[Stored]) -> None:
        of_hour = {one.hour: one for one in files}
        for one in stored:
            for queue, part in zip(one.named.queues, one.named.parts, strict=True):
                of_hour[queue.queue_id].file.committed(part)
        for file in files:
            file.reset()
        self.rounds += 1
        self.bundles += len(stored)
        self._bytes = 0

    def _upload(self, files: Sequence[TimerFlatFile]) -> list[Stored]:
        """Upload all buffers, with as many tries as it takes."""
        stored: list[Stored] = []
        pause_s = _PAUSE_S_MIN
        while waiting := [one for one in files if one.file.has_buffered]:
            error = self._upload_once(waiting, stored)
            if error is not None:
                if self._stop.is_set():
                    raise StoreUnavailableError(
                        f"timers could not be uploaded: {error}", do="run it again to go on"
                    ) from error
                self._clock.wait(self._stop, pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        return stored

    def _upload_once(
        self, files: Sequence[TimerFlatFile], stored: list[Stored]
    ) -> BackendError | None:
        """Upload what waits, bundle by bundle, until one fails; why."""
        some: list[tuple[TimerFlatFile, GroupCommit]] = []
        size = 0
        for number, file in enumerate(files):
            commit = file.file.take(self._clock.now_ms())
            assert commit is not None
            some.append((file, commit))
            size += commit.data_bytes
            if size >= self._bundle_bytes or number == len(files) - 1:
                if error := self._put_some(some, stored):
                    return error
                some, size = [], 0
        return None

    def _put_some(
        self, some: Sequence[tuple[TimerFlatFile, GroupCommit]], stored: list[Stored]
    ) -> BackendError | None:
        try:
            made = self._put([commit for _, commit in some])
        except AlreadyExistsError as error:
            raise FencedError(
                f"another process writes under our own id, so this one was cloned: {error}",
                do="stop one of the two",
            ) from error
        except BackendError as error:
            for file, commit in some:
                file.file.failed(commit, 0.0, lambda _failures: 0.0)
            if not error.retriable:
                raise StoreUnavailableError(
                    f"the store refuses an upload: {error}",
                    do=error.do or "mend permissions or bucket",
                ) from error
            return error
        for file, commit in some:
            file.file.stored(commit)
        stored.append(made)
        return None
