"""Compensation: queues that the dispatch thread had to pass by are read in bulk from their own consume queue.

Overview: ``fall_behind`` notes a queue; ``begin`` starts a catch-up for each noted one; a catch-up ends when the queue is
level with the local store, when memory is full (it is begun again at the next scan), or at a gap, which is recorded by the
next journal entry as soon as everything before it is settled (invariant I12). A queue that is suspect is decided on first
(``tiered.dispatch.continuity``).

Ordering: at most one catch-up a queue; what it reads and what dispatch offers meanwhile meet under the queue's lock, and
what is repeated is cut off there.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING

from tiered.dispatch.continuity import Look
from tiered.dispatch.group_commit import Fact
from tiered.log.state import queue_action

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.dispatch.continuity import Continuity
    from tiered.dispatch.settings import DispatchContext
    from tiered.local.face import LocalStore, RecordBatch
    from tiered.log.composite import CompositeFlatFile
    from tiered.model import MessageQueue, QueueOffset

_LOG = logging.getLogger("tiered.dispatch")
NOTHING_THERE = "the local store has neither entries nor records of these"
OVERTAKEN = "local retention overtook dispatch"
NEVER_MET = (
    "expired before anything of this queue was tiered: it came while nothing was attached, its topic was not selected,"
    " or local retention overtook dispatch"
)
"""Where a queue begins, nobody can tell these apart: the journal does not know what was selected, and when."""
_COUNT_MAX = 1 << 16
"""Items read at once; bounds the arrays of a queue of tiny messages."""


class Compensation:
    """Which queues are behind, and bringing them level. From any thread."""

    def __init__(
        self,
        local: LocalStore,
        context: DispatchContext,
        *,
        take: Callable[[CompositeFlatFile, RecordBatch | None, int], None],
        file: Callable[[MessageQueue], CompositeFlatFile],
        state_fact: Callable[[Fact], None],
        continuity: Continuity,
    ) -> None:
        """Wire it.

        Args:
            local: Read in bulk.
            context: How much to read at once, and whether memory has room for it.
            take: Appends a batch to a queue's buffer, if the queue was reopened just so often; with None: commits what the
                buffer holds.
            file: Write side of a queue.
            state_fact: Has the next journal entry say something.
            continuity: Says whether a queue goes on where it was.
        """
        settings = context.settings
        self._local = local
        self._take = take
        self._budget = context.budget
        self._file = file
        self._state_fact = state_fact
        self._continuity = continuity
        self._counters = context.counters
        self._batch_bytes = min(settings.bundle_bytes, settings.step_bytes())
        self._stop = context.stop
        self._lock = threading.Lock()
        self._behind: set[MessageQueue] = set()
        self._running: set[MessageQueue] = set()
        self._gaps: set[MessageQueue] = set()

    @property
    def is_idle(self) -> bool:
        """No queue is behind."""
        with self._lock:
            return not (self._behind or self._running or self._gaps)

    def fall_behind(self, queue: MessageQueue) -> None:
        """Note that a queue must be brought level."""
        with self._lock:
            self._behind.add(queue)

    def begin(self, submit: Callable[[Callable[[], None]], object]) -> None:
        """Start a catch-up for each queue that is behind and has none."""
        with self._lock:
            chosen = self._behind - self._running - self._gaps
            self._behind -= chosen
            self._running |= chosen
        for queue in sorted(chosen):
            submit(functools.partial(self._catch_up, queue))

    def _catch_up(self, queue: MessageQueue) -> None:
        level = False
        try:
            level = self._bring_level(self._file(queue))
        finally:
            with self._lock:
                self._running.discard(queue)
                if not level:
                    self._behind.add(queue)

    def _bring_level(self, file: CompositeFlatFile) -> bool:
        """Whether the queue is level with the local store now."""
        if not self._is_continuous(file):
            return False
        has_taken = False
        while not self._stop.is_set() and self._budget.has_room(self._batch_bytes):
            reopened = self._continuity.reopened(file.queue)
            with file.lock:
                start, last = file.append_offset, file.last_taken
            batch = self._local.read(
                file.queue, start, bytes_max=self._batch_bytes, count_max=_COUNT_MAX
            )
            if batch is None or batch.base_offset > start:
                batch = self._compacted(file.queue, start) or batch
            if batch is None:
                is_sound = not has_taken or self._is_as_taken(file.queue, start, last)
                return is_sound and not self._has_emptied(file, start)
            if batch.base_offset > start:
                self._record_gap(file, batch.base_offset)
                return False
            if self._continuity.look(file.queue, start, last) is not Look.SAME:
                self._continuity.suspect(
                    file.queue
                )  # looked at behind the read: what was read may be another's
                return False
            self._take(file, batch, reopened)
            has_taken = True
            self._counters.compensated += 1
        return False

    def _compacted(self, queue: MessageQueue, start: QueueOffset) -> RecordBatch | None:
        """What the commit log has lost, and a compacted topic keeps elsewhere."""
        return self._local.read_compacted(
            queue, start, bytes_max=self._batch_bytes, count_max=_COUNT_MAX
        )

    def _is_as_taken(
        self, queue: MessageQueue, start: QueueOffset, last: tuple[QueueOffset, int] | None
    ) -> bool:
        """Whether the broker still has what was taken last; a queue that is only shorter is left to the patrol.

        It may be gone since it was read, and its offset seen to fall before it was taken.
        """
        is_odd = self._continuity.look(queue, start, last) in {Look.DIFFERENT, Look.UNKNOWN}
        if is_odd:
            self._continuity.suspect(queue)
        return not is_odd

    def _has_emptied(self, file: CompositeFlatFile, start: QueueOffset) -> bool:
        """Whether retention has taken all that was left of a queue; that gap is on its way then."""
        bounds = self._local.queues().get(file.queue)
        if bounds is None or bounds.min <= start:
            return False
        self._record_gap(file, bounds.min)
        return True

    def _is_continuous(self, file: CompositeFlatFile) -> bool:
        """Whether the queue goes on where it was; what was taken of a suspect one is committed first."""
        if not self._continuity.may_take(file, waits=True):
            self._take(file, None, 0)
            return self._continuity.resolve(file)
        return True

    def _record_gap(self, file: CompositeFlatFile, end: QueueOffset) -> None:
        """When all before it is settled, have the next entry say that local retention was faster."""
        self._take(file, None, 0)
        with file.lock:
            start = file.commit_offset
            # What was polled before the expiry may have been taken since the read that found the gap.
            if not file.is_settled or start >= end:
                return
            file.hold()  # what was polled before the expiry must not slip in before the entry
            with self._lock:
                self._gaps.add(file.queue)

        def done() -> None:
            with file.lock:
                file.skip_to(end)
            with self._lock:
                self._gaps.discard(file.queue)
            self._counters.gaps += 1
            self._counters.missing += 0 if is_expired else end - start
            _LOG.warning(
                "%s: [%d, %d) was gone before it was tiered: %s", file.queue, start, end, reason
            )

        bounds = self._local.queues().get(file.queue)
        is_expired = bounds is None or end <= bounds.min
        why = OVERTAKEN if start > 0 else NEVER_MET
        reason = why if is_expired else NOTHING_THERE
        gap = {"start": start, "end": end, "reason": reason}
        self._state_fact(Fact(queue_action("gap", file.queue, file.incarnation, **gap), done))
