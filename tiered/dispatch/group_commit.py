"""Group commits: takes what is due off the queues' buffers and uploads it, one upload a queue at a time.

When: a buffer is big enough, or old enough, or memory is short (then the fullest first, so that parts stay as large as
they can), or everything is to be flushed.

Retries and errors: a failed upload, or one of which nobody knows what became, switches files (``tiered.log.composite``)
and is tried again after a pause with jitter, for ever; a refusal that waiting cannot mend ends the dispatcher.

Bounds: ``uploads_max`` uploads run; each queue has at most one more waiting for a thread. Where the store takes several
objects at once (a folder), a thread takes several small commits that wait.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from backends.errors import AlreadyExistsError, BackendError
from tiered.dispatch.throttle import Throttle
from tiered.errors import FencedError, StoreUnavailableError, TieredStoreError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tiered.clock import Clock
    from tiered.dispatch.budget import MemoryBudget
    from tiered.dispatch.counters import DispatchCounters
    from tiered.dispatch.settings import DispatchSettings
    from tiered.dispatch.uploads import StoredLog, Uploader
    from tiered.log.composite import CompositeFlatFile, GroupCommit

_TOGETHER_BYTES_MAX = 4 * 1024 * 1024
"""Of several objects put at once; a larger one goes alone."""
_BATCHING_THREADS_MAX = 4
_OUTAGE_S = 2.0
"""Without a success for so long: an outage, after which nobody waits out a pause that was meant for it."""
_LOCKED_S = 0.05
"""After which a queue is looked at again whose lock was taken."""

_LOG = logging.getLogger("tiered.dispatch")


class Alarms:
    """When to look at which queue again; one alarm each. Not for several threads at once."""

    def __init__(self) -> None:
        self._at_s: dict[CompositeFlatFile, float] = {}
        self._heap: list[tuple[float, int, CompositeFlatFile]] = []
        self._sequence = itertools.count()

    def set(self, file: CompositeFlatFile, at_s: float) -> None:
        """Set the alarm of a queue, or leave it as it is when it has an earlier one."""
        if at_s < self._at_s.get(file, math.inf):
            self._at_s[file] = at_s
            heapq.heappush(self._heap, (at_s, next(self._sequence), file))

    def take_until(self, now_s: float) -> list[CompositeFlatFile]:
        """The queues whose alarm is due, in order; their alarms are gone then."""
        due: list[CompositeFlatFile] = []
        while self._heap and self._heap[0][0] <= now_s:
            at_s, _, file = heapq.heappop(self._heap)
            if self._at_s.get(file) == at_s:  # else an earlier one has taken its place
                del self._at_s[file]
                due.append(file)
        return due


class GroupCommitter:
    """Uploads the records of group commits. From any thread.

    Attributes:
        flush: Take every buffer, due or not.
        last_success_s: Monotonic time of the last upload that went well.
    """

    def __init__(
        self,
        uploader: Uploader,
        submit: Callable[[StoredLog], None],
        *,
        settings: DispatchSettings,
        budget: MemoryBudget,
        counters: DispatchCounters,
        clock: Clock,
        rng: random.Random,
        stop: threading.Event,
        guard: Callable[[Callable[[], None]], None],
        room: threading.Event,
    ) -> None:
        """Wire it.

        Args:
            uploader: Makes the objects.
            submit: Told of each commit whose records are durable, in the order of its queue.
            settings: Limits and periods.
            budget: Says when memory is short.
            counters: Where to count.
            clock: Time.
            rng: Jitter.
            stop: Takes no new work when set.
            guard: Runs a thread's body and reports its error.
            room: Set when memory has been given back.
        """
        self._uploader = uploader
        self._submit = submit
        self._settings = settings
        self._budget = budget
        self._counters = counters
        self._clock = clock
        self._rng = rng
        self._stop = stop
        self._guard = guard
        self._room = room
        threads = _threads(settings, uploader)
        self._open_max = threads * uploader.objects_per_put
        self._pool = ThreadPoolExecutor(threads, "tiered-upload")
        self._throttle = Throttle(settings.upload_rate_bytes_s, clock, stop)
        self._lock = threading.Lock()
        self._buffering: dict[CompositeFlatFile, None] = {}  # in the order in which they came
        self._alarms = Alarms()
        self._waiting: deque[tuple[CompositeFlatFile, GroupCommit]] = deque()
        self._open = 0
        self.flush = False
        self.last_success_s = clock.monotonic_s()

    def appended(self, file: CompositeFlatFile) -> None:
        """Note that a queue's buffer has grown. With the queue's lock held."""
        if file not in self._buffering:
            with self._lock:
                self._buffering[file] = None
        self.upload_if_due(file)

    def scan(self) -> None:
        """Take what has become due by age, by pressure or by flushing."""
        for file in self._candidates(self._clock.monotonic_s()):
            if file.lock.acquire(blocking=False):
                try:
                    pressed = self._budget.under_pressure and self._open < self._open_max
                    self.upload_if_due(file, flush=self.flush or pressed)
                finally:
                    file.lock.release()
            else:
                with self._lock:
                    self._alarms.set(file, self._clock.monotonic_s() + _LOCKED_S)

    def upload_if_due(self, file: CompositeFlatFile, *, flush: bool = False) -> None:
        """Hand a due group commit to the pool, or note when it will be due. With the queue's lock held."""
        if not file.is_due(self._clock.monotonic_s(), flush=flush) or self._stop.is_set():
            due_s = file.due_at_s()
            if due_s is not None:
                with self._lock:
                    self._alarms.set(file, due_s)
            return
        commit = file.take(self._clock.now_ms())
        with self._lock:
            self._open += 1
            self._waiting.append((file, commit))
            if not file.has_buffered:
                self._buffering.pop(file, None)
        with suppress(RuntimeError):  # the pool was closed meanwhile: the commit is given up
            self._pool.submit(self._guard, self._upload_some)

    def _candidates(self, now_s: float) -> list[CompositeFlatFile]:
        with self._lock:
            due = self._alarms.take_until(now_s)
            if self.flush:
                return list(self._buffering)
            if not self._budget.under_pressure:
                return due
            files = [file for file in self._buffering if file.due_at_s() is not None]
        return due + heapq.nlargest(self._open_max, files, lambda file: file.buffered_bytes)

    def close(self) -> None:
        """Wait for the uploads that run; those that wait are given up."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _upload_some(self) -> None:
        """Upload what waits, as much as is best done at once; perhaps another thread has taken it."""
        some = self._next()
        try:
            self._throttle.take(sum(commit.data_bytes for _, commit in some))
            results = self._uploader.put_logs([commit for _, commit in some])
            for (file, commit), result in zip(some, results, strict=True):
                self._report(file, commit, result)
        finally:
            with self._lock:
                self._open -= len(some)

    def _next(self) -> list[tuple[CompositeFlatFile, GroupCommit]]:
        some: list[tuple[CompositeFlatFile, GroupCommit]] = []
        size = 0
        with self._lock:
            while self._waiting and len(some) < self._uploader.objects_per_put:
                size += self._waiting[0][1].data_bytes
                if some and size > _TOGETHER_BYTES_MAX:
                    break
                some.append(self._waiting.popleft())
        return some

    def _report(
        self, file: CompositeFlatFile, commit: GroupCommit, result: StoredLog | BackendError
    ) -> None:
        if isinstance(result, BackendError):
            self._failed(file, result)
            return
        now_s = self._clock.monotonic_s()
        was_out, self.last_success_s = now_s - self.last_success_s > _OUTAGE_S, now_s
        with file.lock:
            self._submit(result)  # before the next commit of this queue can be taken: order
            file.log_stored()
            self.upload_if_due(file, flush=self.flush)
        self._budget.release(commit.data_bytes)
        self._room.set()
        if was_out:
            self._wake_all(now_s)

    def _wake_all(self, now_s: float) -> None:
        """End the pauses of all queues, since the store is back; not all at once."""
        with self._lock:
            paused = [file for file in self._buffering if file.next_try_s > now_s]
        for file in paused:
            if file.lock.acquire(blocking=False):  # else it keeps its pause
                try:
                    file.next_try_s = min(file.next_try_s, now_s + self._rng.random() / 2)
                    self.upload_if_due(file)
                finally:
                    file.lock.release()

    def _failed(self, file: CompositeFlatFile, error: BackendError) -> None:
        self._counters.uploads_failed += 1
        self._counters.switches += 1
        with file.lock:
            file.log_failed(self._clock.monotonic_s(), self._backoff_s)
            failures = file.failures
            self.appended(file)  # what failed waits again
        if not error.retriable:
            raise refused(error)
        if failures == 1:
            what = "upload of %s failed, going on in a new segment: %s"
            _LOG.log(retry_level(error), what, file.queue, error)

    def _backoff_s(self, failures: int) -> float:
        settings = self._settings
        pause_s = settings.backoff_s_min * 2.0 ** min(failures - 1, 30)
        return min(pause_s, settings.backoff_s_max) * self._rng.uniform(0.5, 1.0)


def _threads(settings: DispatchSettings, uploader: Uploader) -> int:
    """Where one call takes many objects, more threads would only take the processor from each other."""
    batching = uploader.objects_per_put > 1
    return min(settings.uploads_max, _BATCHING_THREADS_MAX) if batching else settings.uploads_max


def retry_level(error: BackendError) -> int:
    """Of the log line about one request that is tried again.

    What only a person can mend meets every queue alike; ``tiered.plugin.patience`` tells of it, once for the whole store.
    """
    return logging.DEBUG if error.needs_a_person else logging.WARNING


def refused(error: BackendError) -> TieredStoreError:
    """The error of a store that says no, and will say so again."""
    if isinstance(error, AlreadyExistsError):  # no two tries share a key
        return FencedError(
            f"another process writes under our own id, so this one was cloned: {error}",
            do="stop one of the two, then attach again",
        )
    return StoreUnavailableError(
        f"the store refuses an upload: {error}", do="mend permissions or bucket, then attach again"
    )
