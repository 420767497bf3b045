"""CompositeFlatFile: the write side of one queue, that is its commit log, its consume queue and what waits in memory.

Overview: ``append`` takes batches into a buffer; ``take`` cuts the next group commit off the buffer; the dispatcher
uploads it and reports ``log_stored`` or ``log_failed``; when the index is durable too and an entry names both,
``committed``. Offsets: ``commit_offset <= append_offset`` (the queue offset of what comes next).

Non-StopWrite (file switch): when an upload fails, or nobody knows what became of it, the segment is ended at its commit
position and the same bytes, with what came since, go at once into a new segment with that base, under a new key. Nobody
asks the store how long the old object is: no entry names it.

Sealing: whoever seals the last segment says so before (``end_segment``) and after (``sealed``); what comes next then opens
a new one. A seal that fails in between leaves a segment that has rolled early, and nothing else.

Threads: every method but ``lock`` itself wants ``lock`` held. Dispatch only tries the lock; a commit holds it for
moments, never during I/O.

Memory: the buffer's bytes are accounted by the caller through ``buffered_bytes`` of what it appends and takes.

After a crash: nothing here survives, and nothing has to; the journal gives the offsets.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import Buffer

from tiered.local.face import MISSING_REASONS
from tiered.log.commit_log import TieredCommitLog
from tiered.log.consume_queue import ITEM_BYTES, TieredConsumeQueue, encode_items
from tiered.log.flat_file import load_segment
from tiered.log.marks import mark_of_item
from tiered.log.trim import size_of, trim
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.local.face import Quarantined, RecordBatch
    from tiered.log.flat_file import TieredFileSegment, TieredFlatFile
    from tiered.log.state import ObjectRange, Part, QueueLife, Segment

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
    """When to commit and when to roll.

    Attributes:
        part_bytes: A commit is due at so many buffered bytes, and takes about so many (one record at least).
        freshness_s: A commit is due when the oldest buffered byte is so old.
        segment_bytes_max: A segment is rolled when it has reached so many bytes.
        segment_age_ms_max: And when its first part is so old.
    """

    part_bytes: int
    freshness_s: float
    segment_bytes_max: int
    segment_age_ms_max: int


@dataclass(frozen=True, slots=True)
class GroupCommit:
    """One group commit: what will be one part.

    Attributes:
        queue: Whose.
        incarnation: Which life.
        segment: Base log offset of the segment it goes to.
        log_offset: Of its first byte.
        queue_offset: Of its first item.
        batches: Its records.
        data_bytes: Bytes of its records.
        count: Its items.
        last: Mark of its last record (``tiered.log.marks``); 0 when the last item is a hole.
    """

    queue: MessageQueue
    incarnation: int
    segment: LogOffset
    log_offset: LogOffset
    queue_offset: QueueOffset
    batches: tuple[RecordBatch, ...]
    data_bytes: int
    count: int
    last: int = 0

    @property
    def memory_bytes(self) -> int:
        """What it holds in memory."""
        return self.data_bytes + self.count * ITEM_MEMORY_BYTES

    @property
    def quarantined(self) -> list[Quarantined]:
        """Its damaged records."""
        return [record for batch in self.batches for record in batch.quarantined]

    def data(self) -> list[Buffer]:
        """The payload of the commit-log object."""
        return [batch.data for batch in self.batches]

    def items(self) -> bytes:
        """The payload of the consume-queue object."""
        starts = itertools.accumulate((size_of(batch) for batch in self.batches), initial=0)
        positions = [
            batch.positions + start for batch, start in zip(self.batches, starts, strict=False)
        ]
        return encode_items(
            self.log_offset,
            np.concatenate(positions),
            np.concatenate([batch.sizes for batch in self.batches]),
            np.concatenate([batch.tag_codes for batch in self.batches]),
        )

    def times(self) -> tuple[int, int]:
        """Smallest and greatest store time; (-1, -1) when there is none."""
        times = np.concatenate([batch.store_timestamps_ms for batch in self.batches])
        real = times[np.concatenate([batch.sizes for batch in self.batches]) > 0]
        return (int(real.min()), int(real.max())) if len(real) else (-1, -1)

    def holes(self) -> int:
        """Items without a message."""
        return self.count - sum(int(np.count_nonzero(batch.sizes)) for batch in self.batches)

    def missing(self) -> int:
        """Holes where the local store should have a record, and has none that can be read."""
        return sum(
            int(np.count_nonzero((batch.sizes == 0) & np.isin(batch.tag_codes, MISSING_REASONS)))
            for batch in self.batches
        )


class CompositeFlatFile:
    """The pair of one queue, with its append buffer.

    Attributes:
        queue: Whose.
        lock: Held during every other call.
        commit_log: The commit log's positions.
        consume_queue: The consume queue's positions.
        next_try_s: Monotonic time before which nothing is to be uploaded (back-off after a failure).
        failures: Failed uploads in a row.
        switches: File switches so far.
    """

    def __init__(self, queue: MessageQueue, life: QueueLife, policy: CommitPolicy) -> None:
        """Begin at what the journal says of the queue's present life."""
        self.queue = queue
        self.lock = threading.Lock()
        self.incarnation = life.incarnation
        self.commit_log = TieredCommitLog.load(life)
        self.consume_queue = TieredConsumeQueue.load(life)
        self.next_try_s = 0.0
        self.failures = 0
        self.switches = 0
        self._policy = policy
        self._commit_offset = life.commit_offset
        self._taken_offset = life.commit_offset
        self._append_offset = life.commit_offset
        self._log_taken = life.log_end
        self._buffer: deque[tuple[RecordBatch, float]] = deque()
        self._buffered = 0
        self._uploading: GroupCommit | None = None
        self._is_held = False
        parts = life.segments[-1].parts if life.segments else ()
        self._roll_next = bool(parts) and parts[-1].queue_end != life.commit_offset  # behind a gap
        self._last = (QueueOffset(parts[-1].queue_end - 1), parts[-1].last) if parts else None

    @property
    def commit_offset(self) -> QueueOffset:
        """One past the last message whose data and index are durable and named."""
        return self._commit_offset

    @property
    def append_offset(self) -> QueueOffset:
        """Queue offset of the next message to append."""
        return self._append_offset

    @property
    def buffered_bytes(self) -> int:
        """Bytes of records in the buffer (not those of a commit under way)."""
        return self._buffered

    @property
    def has_buffered(self) -> bool:
        """Something waits in the buffer, perhaps only holes, which have no bytes."""
        return bool(self._buffer)

    @property
    def is_settled(self) -> bool:
        """Nothing is buffered or under way."""
        return self._commit_offset == self._append_offset

    @property
    def last_taken(self) -> tuple[QueueOffset, int] | None:
        """The last item taken (in front of a gap, when that is the last thing known), and its mark.

        The mark is 0 when the item is a hole, or when the journal does not say; None: nothing has been taken.
        """
        if not self._buffer:
            return self._last
        batch = self._buffer[-1][0]
        return QueueOffset(batch.end_offset - 1), mark_of_item(batch, -1)

    @property
    def is_held(self) -> bool:
        """Nothing is taken until an entry is durable."""
        return self._is_held

    def append(self, batch: RecordBatch, now_s: float) -> AppendResult:
        """Take a batch that continues the queue; what it repeats is cut off.

        Args:
            batch: Records of this queue.
            now_s: Monotonic time.
        """
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
        self._roll_next = True

    def is_due(self, now_s: float, *, flush: bool) -> bool:
        """Whether a group commit is to be taken now.

        Args:
            now_s: Monotonic time.
            flush: Take whatever there is.
        """
        if not self._buffer or self._uploading is not None or now_s < self.next_try_s:
            return False
        aged = now_s - self._buffer[0][1] >= self._policy.freshness_s
        return flush or aged or self._buffered >= self._policy.part_bytes

    def due_at_s(self) -> float | None:
        """Monotonic time at which the buffer is due by age (or may be tried again); None when it is empty."""
        if not self._buffer or self._uploading is not None:
            return None
        return max(self._buffer[0][1] + self._policy.freshness_s, self.next_try_s)

    def take(self, now_ms: int) -> GroupCommit:
        """Cut the next group commit off the buffer. ``is_due`` must have said so."""
        assert self._uploading is None
        batches: list[RecordBatch] = []
        size = 0
        while self._buffer and (not batches or size < self._policy.part_bytes):
            batch, _ = self._buffer.popleft()
            batches.append(batch)
            size += size_of(batch)
        self._buffered -= size
        if self._must_roll(now_ms):
            self._open_segments(now_ms)
        commit = GroupCommit(
            self.queue,
            self.incarnation,
            LogOffset(self.commit_log.segments[-1].base_offset),
            self._log_taken,
            self._taken_offset,
            tuple(batches),
            size,
            sum(batch.count for batch in batches),
            mark_of_item(batches[-1], -1),
        )
        self._last = QueueOffset(batches[-1].end_offset - 1), commit.last
        self.commit_log.segments[-1].append(size)
        self.consume_queue.segments[-1].append(commit.count * ITEM_BYTES)
        self._log_taken = LogOffset(self._log_taken + size)
        self._taken_offset = QueueOffset(self._taken_offset + commit.count)
        self._uploading = commit
        return commit

    def log_stored(self) -> None:
        """The commit's log object is durable; the next commit may be taken."""
        self._uploading = None
        self.failures = 0

    def log_failed(self, now_s: float, backoff_s: Callable[[int], float]) -> None:
        """The upload failed or its outcome is unknown: switch files.

        Args:
            now_s: Monotonic time.
            backoff_s: Pause before the next try, from the number of failures in a row.
        """
        commit = self._uploading
        assert commit is not None
        self._uploading = None
        self.failures += 1
        self.switches += 1
        self.next_try_s = now_s + backoff_s(self.failures)
        for batch in reversed(commit.batches):
            self._buffer.appendleft((batch, now_s - self._policy.freshness_s))
        self._buffered += commit.data_bytes
        self.commit_log.segments[-1].append(-commit.data_bytes)
        self.consume_queue.segments[-1].append(-commit.count * ITEM_BYTES)
        self._log_taken = commit.log_offset
        self._taken_offset = commit.queue_offset
        self._roll_next = True

    def committed(self, commit: GroupCommit, part: Part) -> None:
        """A journal entry names the part: the commit offset moves."""
        assert part.queue_offset == self._commit_offset
        _segment(self.commit_log, commit.segment).commit(part.log)
        _segment(self.consume_queue, commit.queue_offset * ITEM_BYTES).commit(part.index)
        self._commit_offset = part.queue_end

    def end_segment(self) -> bool:
        """Have what comes next go into a new segment, since the last one is about to be sealed.

        Returns:
            False when something is buffered or under way; then nothing has changed, and it must not be sealed.
        """
        if not self.is_settled:
            return False
        for flat in (self.commit_log, self.consume_queue):
            if flat.segments:
                flat.segments[-1].sealed = True
        self._roll_next = True
        return True

    def sealed(self, segment: Segment) -> None:
        """Learn what a segment that has ended consists of now, or several that have become one; forgets what was merged.

        Args:
            segment: As the journal has it after the ``seal`` or ``join``.
        """
        parts = segment.parts
        self._replace(self.commit_log, segment.base_offset, [part.log for part in parts])
        self._replace(
            self.consume_queue, segment.base_queue_offset * ITEM_BYTES, [p.index for p in parts]
        )

    @staticmethod
    def _replace(flat: TieredFlatFile, base: int, places: list[ObjectRange]) -> None:
        """Swap sealed segments' places. What has not exactly these bytes is another segment with that base."""
        size = sum(place.size_bytes for place in places)
        for first, old in enumerate(flat.segments):
            if old.base_offset != base:
                continue
            last, end = first, old.commit_position
            while end < size and last + 1 < len(flat.segments):
                last += 1
                end += flat.segments[last].commit_position
            row = flat.segments[first : last + 1]
            if end == size and all(one.sealed for one in row):
                made = load_segment(base, old.created_ms, True, places)
                flat.segments[first : last + 1] = [made]
                return

    def _must_roll(self, now_ms: int) -> bool:
        last = self.commit_log.segments[-1] if self.commit_log.segments else None
        if self._roll_next or last is None or last.sealed:
            return True
        full = last.append_position >= self._policy.segment_bytes_max
        age_ms = now_ms - last.created_ms
        was_set_back = age_ms < -_CLOCK_SET_BACK_MS  # nobody knows how old it is
        return full or was_set_back or age_ms >= self._policy.segment_age_ms_max

    def _open_segments(self, now_ms: int) -> None:
        """Open both files at the present positions. An empty last segment (a switch at position 0) is replaced."""
        for flat, base in (
            (self.commit_log, self._log_taken),
            (self.consume_queue, self._taken_offset * ITEM_BYTES),
        ):
            if flat.segments and flat.segments[-1].append_position == 0:
                flat.segments.pop()
            flat.open_segment(now_ms, base)
        self._roll_next = False


def _segment(flat: TieredFlatFile, offset: int) -> TieredFileSegment:
    """The last segment that begins at or before ``offset``."""
    return next(s for s in reversed(flat.segments) if s.base_offset <= offset)
