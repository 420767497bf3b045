"""TimerFlatFile: the flat file of one clock hour (UTC) of due time, and the table and rounds of those being written.

A file is a queue of ``tiered.log``: topic ``TIMER_TOPIC``, its queue id the hour since 1970, and in its items the due time
stands where a tag code stands elsewhere, so the consume queue is the index by due time. A record is the local record but
for three fields: topic, queue id and queue offset are those of its place here, so that every check of queues holds for it
(the real topic and queue stand in its properties anyway). ``TIMER_TOPIC`` is as long as the names of both timer topics, so
nothing else moves.

Daylight saving has no effect: hours are counted in UTC.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from backends.errors import AlreadyExistsError, BackendError
from tiered.crashpoints import reached
from tiered.errors import DataError, FencedError, InternalError, StoreUnavailableError
from tiered.format.block import bytes_at
from tiered.format.record import QUEUE_ID_AT, QUEUE_OFFSET_AT
from tiered.local.interface import RecordBatch
from tiered.local.queue_reader import cut_records
from tiered.log.actions import action_of
from tiered.log.bundles import bundle_row
from tiered.log.composite import AppendResult, CommitPolicy, CompositeFlatFile
from tiered.log.parts import Incarnation
from tiered.log.timers import HOUR_MS, TIMER_TOPIC, HourTaken, TimersTaken, TimerTake, hour_queue
from tiered.model import QueueOffset

if TYPE_CHECKING:
    import random
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from tiered.clock import Clock
    from tiered.journal.append import JournalWriter
    from tiered.log.bundles import NamedSections
    from tiered.log.composite import GroupCommit
    from tiered.log.parts import Bundle, TierState
    from timer.enqueue import ChosenTimers
    from timer.records import Longs, TimerRows


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
