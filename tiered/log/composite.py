"""CompositeFlatFile: the write side of one queue, that is what waits in memory, what is on its way, and where it goes.

``QueueFiles`` are those of all queues.

Overview: ``append`` takes batches into a buffer; ``take`` cuts the next group commit off the buffer, for a round's bundle;
the dispatcher uploads it and reports ``stored`` or ``failed``; when an entry names it, ``committed``. Several commits of a
queue may be on their way, in different bundles; they are handed on in order, whatever comes first.
Offsets: ``commit_offset <= append_offset`` (the queue offset of what comes next).

Non-StopWrite (file switch): when an upload fails, or nobody knows what became of it, the segment is ended where that commit
began, and its bytes and those behind it go at once into a new segment with that base, in other bundles. Nobody asks the
store what became of the old ones: no entry names these sections.

Threads: every method but ``lock`` itself wants ``lock`` held. Dispatch only tries the lock; a commit holds it for
moments, never during I/O.

Memory: the buffer's bytes are accounted by the caller through ``buffered_bytes`` of what it appends, until ``stored`` hands
the commit on.

After a crash: nothing here survives, and nothing has to; the journal gives the offsets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.local.interface import MISSING_REASONS, RecordBatch
from tiered.log.divergence import fingerprint_of_item
from tiered.log.flat_file import encode_items
from tiered.log.parts import Incarnation
from tiered.model import LogOffset, MessageQueue, QueueBounds, QueueOffset

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer

    from tiered.local.interface import LocalStore, Quarantined
    from tiered.log.actions import LineageGrown
    from tiered.log.bundles import StoredBundle
    from tiered.log.parts import Part
    from tiered.log.state import TierState


# -- trim ---------------------------------------------------------------------------------------------
#
# Cutting off what a batch repeats.


def trim(batch: RecordBatch, start: QueueOffset) -> RecordBatch:
    """The batch from queue offset ``start`` on (which lies in it), without the bytes before."""
    skip = start - batch.base_offset
    if skip <= 0:
        return batch
    kept = batch.sizes[skip:] > 0
    first = int(batch.positions[skip:][kept].min()) if kept.any() else size_of(batch)
    return RecordBatch(
        queue=batch.queue,
        base_offset=start,
        data=memoryview(batch.data).cast("B")[first:],
        positions=np.maximum(batch.positions[skip:] - first, 0),
        sizes=batch.sizes[skip:],
        tag_codes=batch.tag_codes[skip:],
        store_timestamps_ms=batch.store_timestamps_ms[skip:],
        physical_offsets=batch.physical_offsets[skip:],
        quarantined=[q for q in batch.quarantined if q.queue_offset >= start],
        properties_sizes=None if batch.properties_sizes is None else batch.properties_sizes[skip:],
        topic_id=batch.topic_id,
    )


def size_of(batch: RecordBatch) -> int:
    """Bytes of its records."""
    return memoryview(batch.data).nbytes


# -- composite --------------------------------------------------------------------------------


_FAR_MS = 2**63 - 1
_CLOCK_SET_BACK_MS = 60_000
"""A segment that was begun so long after now was begun by another clock, or before ours was set back: it rolls."""
ITEM_MEMORY_BYTES = 40
"""What one item costs in memory besides its record's bytes (position, size, tag, two times)."""


class AppendResult(Enum):
    """What became of an append."""

    APPENDED = "appended"
    DUPLICATE = "duplicate"
    GAP = "gap"
    """The batch begins behind the append offset, or a gap is being recorded; nothing was taken."""


@dataclass(frozen=True, slots=True)
class CommitPolicy:
    """When to commit and when to roll."""

    part_bytes: int  # a commit takes about so many bytes (one record at least)
    freshness_s: float  # a commit is due when the oldest buffered byte is so old
    segment_bytes_max: int  # a segment is rolled when it has reached so many bytes
    segment_age_ms_max: int  # and when its first part is so old


@dataclass(slots=True, eq=False)
class GroupCommit:
    """One group commit: what will be one section, and one part."""

    file: CompositeFlatFile  # the write side of its queue
    queue: MessageQueue
    incarnation: int  # which incarnation
    segment: LogOffset  # base log offset of the segment it goes to
    log_offset: LogOffset  # of its first byte
    queue_offset: QueueOffset  # of its first item
    batches: Sequence[RecordBatch]  # its records; let go when it is handed on to be named
    data_bytes: int  # bytes of its records
    count: int  # its items
    last: int = 0  # fingerprint of its last record (``tiered.log.divergence``); 0 when the last item is a hole
    stored: StoredBundle | None = None
    """The bundle that its section lies in, as soon as that is durable."""
    oldest_s: float = 0.0  # monotonic time at which the first of its batches came
    number: int = 0  # of the section in the bundle
    damaged: int = 0  # damaged records of it that are in quarantine
    missing: int = 0
    """Holes where the local store should have a record, and has none that can be read."""
    lineage: LineageGrown | None = None  # what its records tell of where they come from

    @property
    def quarantined(self) -> list[Quarantined]:
        """Its damaged records."""
        return [record for batch in self.batches for record in batch.quarantined]

    @property
    def queue_end(self) -> QueueOffset:
        """One past its last item."""
        return QueueOffset(self.queue_offset + self.count)

    def data(self) -> list[Buffer]:
        """The section's records."""
        return [batch.data for batch in self.batches]

    def lies_in(self, stored: StoredBundle, number: int) -> None:
        """Its section is durable."""
        self.stored, self.number = stored, number

    def section(self) -> tuple[StoredBundle, int]:
        """Where its section lies, which is durable: the bundle, and the section's number in it."""
        assert self.stored is not None
        return self.stored, self.number

    def count_missing(self) -> None:
        """Note the holes where the local store should have a record."""
        self.missing = sum(
            int(np.count_nonzero((batch.sizes == 0) & np.isin(batch.tag_codes, MISSING_REASONS)))
            for batch in self.batches
        )


@dataclass(frozen=True, slots=True)
class CommitColumns:
    """What the items of some commits say."""

    items: bytes  # all commits' items, one behind another, as they stand in their sections
    holes: npt.NDArray[np.int64]  # int64[n], items without a message, of each
    low_ms: npt.NDArray[np.int64]  # int64[n], smallest store time of each; -1 when there is none
    high_ms: npt.NDArray[np.int64]  # int64[n], greatest store time; -1 likewise

    @classmethod
    def of(cls, commits: Sequence[GroupCommit]) -> CommitColumns:
        """Of all commits of a bundle at once: what this costs goes by their bytes, not by their number."""
        batches = [batch for commit in commits for batch in commit.batches]
        bases: list[int] = []
        for commit in commits:
            at = int(commit.log_offset)
            for batch in commit.batches:
                bases.append(at)
                at += size_of(batch)
        columns = [batch.sizes for batch in batches]
        sizes = np.concatenate(columns)
        items = encode_items(
            np.concatenate([batch.positions for batch in batches])
            + np.repeat(bases, list(map(len, columns))),
            sizes,
            np.concatenate([batch.tag_codes for batch in batches]),
        )
        times = np.concatenate([batch.store_timestamps_ms for batch in batches])
        ends = np.cumsum([commit.count for commit in commits])
        starts = np.concatenate(([0], ends[:-1]))
        is_hole = sizes == 0
        low, high = (
            np.minimum.reduceat(np.where(is_hole, _FAR_MS, times), starts),
            np.maximum.reduceat(np.where(is_hole, -1, times), starts),
        )
        holes = np.add.reduceat(is_hole.astype(np.int64), starts)
        return cls(items, holes, np.where(low == _FAR_MS, -1, low), high)


@dataclass(slots=True)
class Tail:
    """Where a queue's last segment stands: all that the writer has to know of what is in the tier."""

    base_offset: LogOffset  # log offset of its first byte
    created_ms: int  # when it was begun
    size_bytes: int = 0  # taken so far, durable or not
    is_open: bool = False  # it takes more; else what comes next begins a new one

    @classmethod
    def of(cls, incarnation: Incarnation) -> Tail:
        """As the journal has it."""
        if not incarnation.segments:
            return cls(incarnation.log_end, 0)
        last = incarnation.segments[-1]
        goes_on = (
            not last.sealed and last.parts.queue_end == incarnation.commit_offset
        )  # else: a gap
        return cls(last.base_offset, last.created_ms, last.size_bytes, goes_on)

    def must_roll(self, now_ms: int, policy: CommitPolicy) -> bool:
        """Whether what comes next belongs into a new segment."""
        return not self.is_open or self.is_done(now_ms, policy)

    def is_done(self, now_ms: int, policy: CommitPolicy) -> bool:
        """Whether it is full or old."""
        age_ms = now_ms - self.created_ms
        was_set_back = age_ms < -_CLOCK_SET_BACK_MS  # nobody knows how old it is
        is_full = self.size_bytes >= policy.segment_bytes_max
        return is_full or was_set_back or age_ms >= policy.segment_age_ms_max


class CompositeFlatFile:
    """The write side of one queue."""

    def __init__(self, queue: MessageQueue, incarnation: Incarnation, policy: CommitPolicy) -> None:
        """Begin at what the journal says of the queue's present incarnation."""
        self.queue = queue
        self.lock = threading.Lock()  # held during every other call
        self.incarnation = incarnation.number
        # Monotonic time before which nothing is to be uploaded (back-off after a failure).
        self.next_try_s = 0.0
        self.failures = 0  # failed uploads in a row
        self.switches = 0  # file switches so far
        self.policy = policy  # when to commit and when to roll
        self._tail = Tail.of(incarnation)
        self._commit_offset = incarnation.commit_offset
        self._taken_offset = incarnation.commit_offset
        self._append_offset = incarnation.commit_offset
        self._log_taken = incarnation.log_end
        self._buffer: deque[tuple[RecordBatch, float]] = deque()
        self._buffered = 0
        self._on_their_way: deque[GroupCommit] = deque()
        self._durable: set[GroupCommit] = set()  # of those
        self._is_held = False
        parts = incarnation.segments[-1].parts[-1:] if incarnation.segments else ()
        self._last = (QueueOffset(parts[0].queue_end - 1), parts[0].last) if parts else None

    @property
    def commit_offset(self) -> QueueOffset:
        """One past the last message whose section is durable and named."""
        return self._commit_offset

    @property
    def append_offset(self) -> QueueOffset:
        """Queue offset of the next message to append."""
        return self._append_offset

    @property
    def buffered_bytes(self) -> int:
        """Bytes of records in the buffer (not those of commits under way)."""
        return self._buffered

    @property
    def has_buffered(self) -> bool:
        """Something waits in the buffer, perhaps only holes, which have no bytes."""
        return bool(self._buffer)

    @property
    def oldest_s(self) -> float | None:
        """Monotonic time at which the oldest buffered batch came; None when there is none. Needs no lock."""
        try:
            return self._buffer[0][1]
        except IndexError:
            return None

    @property
    def is_settled(self) -> bool:
        """Nothing is buffered or under way."""
        return self._commit_offset == self._append_offset

    @property
    def last_taken(self) -> tuple[QueueOffset, int] | None:
        """The last item taken (in front of a gap, when that is the last thing known), and its fingerprint.

        The fingerprint is 0 when the item is a hole, or when the journal does not say; None: nothing has been taken.
        """
        if not self._buffer:
            return self._last
        batch = self._buffer[-1][0]
        return QueueOffset(batch.end_offset - 1), fingerprint_of_item(batch, -1)

    @property
    def is_held(self) -> bool:
        """Nothing is taken until an entry is durable."""
        return self._is_held

    def append(self, batch: RecordBatch, now_s: float) -> AppendResult:
        """Take a batch that continues the queue; what it repeats is cut off."""
        if batch.base_offset > self._append_offset or self._is_held:
            return AppendResult.GAP
        if batch.end_offset <= self._append_offset:
            return AppendResult.DUPLICATE
        rest = trim(batch, self._append_offset)
        self._buffer.append((rest, now_s))
        self._buffered += size_of(rest)
        self._append_offset = rest.end_offset
        return AppendResult.APPENDED

    def hold(self) -> None:
        """Take nothing until ``skip_to`` or ``release``: an entry that moves the queue is on its way, nothing in hand."""
        assert self.is_settled
        self._is_held = True

    def release(self) -> None:
        """Go on as before ``hold``."""
        self._is_held = False

    def skip_to(self, queue_offset: QueueOffset) -> None:
        """Go on behind a gap that an entry has recorded; nothing may be buffered or under way."""
        assert self.is_settled
        self._is_held = False
        self._commit_offset = self._taken_offset = self._append_offset = queue_offset
        self._tail.is_open = False

    def take(self, now_ms: int) -> GroupCommit | None:
        """Cut the next group commit off the buffer; None when it is empty."""
        batches: list[RecordBatch] = []
        size, oldest_s = 0, self.oldest_s
        while self._buffer and (not batches or size < self.policy.part_bytes):
            batch, _ = self._buffer.popleft()
            batches.append(batch)
            size += size_of(batch)
        if oldest_s is None:
            return None
        self._buffered -= size
        if self._tail.must_roll(now_ms, self.policy):
            self._tail = Tail(self._log_taken, now_ms, is_open=True)
        commit = GroupCommit(
            self,
            self.queue,
            self.incarnation,
            self._tail.base_offset,
            self._log_taken,
            self._taken_offset,
            batches,
            size,
            batches[-1].end_offset - self._taken_offset,
            fingerprint_of_item(batches[-1], -1),
            oldest_s=oldest_s,
        )
        self._last = QueueOffset(commit.queue_end - 1), commit.last
        self._tail.size_bytes += size
        self._log_taken = LogOffset(self._log_taken + size)
        self._taken_offset = commit.queue_end
        self._on_their_way.append(commit)
        return commit

    def stored(self, commit: GroupCommit) -> list[GroupCommit]:
        """A commit's section is durable.

        Returns:
            The commits that can be named now, in order; none while one before this one is on its way, or when this one was
            given up because one before it failed.
        """
        if commit not in self._on_their_way:
            return []
        self.failures = 0
        if len(self._on_their_way) == 1:
            self._on_their_way.clear()
            return [commit]
        self._durable.add(commit)
        ready: list[GroupCommit] = []
        while self._on_their_way and self._on_their_way[0] in self._durable:
            ready.append(self._on_their_way.popleft())
        self._durable.difference_update(ready)
        return ready

    def failed(
        self, commit: GroupCommit, now_s: float, backoff_s: Callable[[int], float]
    ) -> list[GroupCommit]:
        """A commit's upload failed or its outcome is unknown: switch files. What was taken behind it waits again, too.

        Args:
            backoff_s: Pause before the next try, from the number of failures in a row.

        Returns:
            The commits that are given up, this one and those behind it, durable or not; none when one before it has failed.
        """
        if commit not in self._on_their_way:
            return []
        self.failures += 1
        self.switches += 1
        self.next_try_s = now_s + backoff_s(self.failures)
        given_up: list[GroupCommit] = []
        while commit not in given_up:
            last = self._on_their_way.pop()
            given_up.append(last)
            self._durable.discard(last)
            for batch in reversed(last.batches):
                self._buffer.appendleft(
                    (batch, min(last.oldest_s, now_s - self.policy.freshness_s))
                )
            self._buffered += last.data_bytes
        self._log_taken = commit.log_offset
        self._taken_offset = commit.queue_offset
        self._tail.is_open = False
        return given_up

    def committed(self, commit: GroupCommit | Part) -> None:
        """A journal entry names it: the commit offset moves."""
        assert commit.queue_offset == self._commit_offset
        self._commit_offset = commit.queue_end

    def end_segment(self) -> bool:
        """Have what comes next go into a new segment, since the last one is about to be sealed.

        Returns:
            False when something is buffered or under way, or the queue is held: behind the entry that it is held for another
            write side may take its place, which knows of no seal. Then nothing has changed, and it must not be sealed.
        """
        ends = self.is_settled and not self._is_held
        if ends:
            self._tail.is_open = False
        return ends


# --------------------------------------------------------------------------------------------------
# The write sides of all queues: made on first use from what the journal says, or where a new queue is to begin.
#
# Threads: any. After a crash nothing here survives, and nothing has to.
# --------------------------------------------------------------------------------------------------


Start = Callable[[MessageQueue, QueueBounds], QueueOffset]
"""Where a queue begins that the tier has never met; what retention has taken from there on is a gap."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Queues that the journal has never met."""

    above_0: Mapping[MessageQueue, QueueOffset]  # those that begin above 0, and where
    emptied: Sequence[MessageQueue]
    """Those of which retention has taken all that they had from where they begin."""


class QueueFiles:
    """One ``CompositeFlatFile`` for each queue that dispatch has touched."""

    def __init__(
        self,
        local: LocalStore,
        *,
        state: Callable[[], TierState],
        policy: CommitPolicy,
        start: Start,
        selects: Callable[[MessageQueue], bool],
        made: Callable[[MessageQueue], None],
    ) -> None:
        """Begin with none.

        Args:
            made: Told of each queue whose write side is made of what the tier has, before anybody sees it.
        """
        self._made = made
        self._local = local
        self._state = state
        self._policy = policy
        self.start = start
        self._selects = selects
        self._lock = threading.Lock()
        self._files: dict[MessageQueue, CompositeFlatFile] = {}
        self._bounds: Mapping[MessageQueue, QueueBounds] = {}

    def file(self, queue: MessageQueue) -> CompositeFlatFile:
        """The write side of a queue."""
        file = self._files.get(queue)  # once there is one, there is always one
        if file is not None:
            return file
        with self._lock:
            file = self._files.get(queue)
            if file is None:
                file = CompositeFlatFile(queue, self._incarnation(queue), self._policy)
                if file.last_taken:
                    self._made(queue)
                self._files[queue] = file
            return file

    def renew(self, queue: MessageQueue) -> None:
        """Make a queue's write side anew from what the journal says; the old one must have nothing in hand."""
        incarnation = self._incarnation(queue)
        with self._lock:
            self._files[queue] = CompositeFlatFile(queue, incarnation, self._policy)

    def known(self, queue: MessageQueue) -> CompositeFlatFile | None:
        """The write side of a queue if there is one yet."""
        return self._files.get(queue)

    def commit_offsets(self) -> dict[MessageQueue, QueueOffset]:
        """Of each queue that has a write side."""
        with self._lock:
            return {queue: file.commit_offset for queue, file in self._files.items()}

    def end_segment(self, queue: MessageQueue, say: Callable[[], None]) -> bool:
        """Have a queue go on in a new segment; False when something is under way, and the last must not be sealed.

        ``say`` has the journal say so, before any part of the new one can be named: these may have the same base.
        """
        if not self._selects(queue) and self.known(queue) is None:
            say()
            return True  # nothing is ever appended to it
        file = self.file(queue)
        with file.lock:
            if file.end_segment():
                say()
                return True
        return False

    def starts(
        self, passes: Callable[[MessageQueue], bool] | None = None
    ) -> dict[MessageQueue, QueueOffset]:
        """Where to go on in each local queue; those that are passed by (None: not tiered) are as good as done."""
        self._bounds = self._local.queues()
        passes = passes or (lambda queue: not self._selects(queue))
        return {
            queue: bounds.end if passes(queue) else self.file(queue).append_offset
            for queue, bounds in self._bounds.items()
        }

    def reconfigure(self, policy: CommitPolicy, selects: Callable[[MessageQueue], bool]) -> None:
        """Go on by another policy, and with other queues."""
        with self._lock:
            self._policy, self._selects = policy, selects
            for file in self._files.values():
                file.policy = policy

    def unknown(self) -> Unknown:
        """Those of ``starts`` that the journal has never met, and would not learn of by what they have."""
        state = self._state()
        rows = {
            queue: (self.file(queue).commit_offset, bounds)
            for queue, bounds in self._bounds.items()
            if self._selects(queue) and state.incarnation(queue) is None
        }
        return Unknown(
            {queue: start for queue, (start, _) in rows.items() if start > 0},
            [queue for queue, (start, has) in rows.items() if start < has.min == has.end],
        )

    def _incarnation(self, queue: MessageQueue) -> Incarnation:
        incarnation = self._state().incarnation(queue)
        if incarnation is not None:
            return incarnation
        bounds = self._bounds.get(queue)
        if bounds is None:  # a queue that has come since we looked last
            self._bounds = self._local.queues()
            bounds = self._bounds.get(queue)
        first = self.start(queue, bounds) if bounds else QueueOffset(0)
        return Incarnation(0, first, first)
