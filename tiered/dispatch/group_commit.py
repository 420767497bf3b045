"""Group commits: takes what is due off the queues' buffers and uploads it, one upload a queue at a time.

When: a buffer is big enough, or old enough, or memory is short (then the fullest first, so that parts stay as large as
they can), or everything is to be flushed.

Retries and errors: a failed upload, or one of which nobody knows what became, switches files (``tiered.log.composite``)
and is tried again after a pause with jitter, for ever; a refusal that waiting cannot mend ends the dispatcher.

Bounds: ``uploads_max`` uploads run; each queue has at most one more waiting for a thread.
"""

from __future__ import annotations

import logging
import threading
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

_LOG = logging.getLogger("tiered.dispatch")


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
        self._pool = ThreadPoolExecutor(settings.uploads_max, "tiered-upload")
        self._throttle = Throttle(settings.upload_rate_bytes_s, clock, stop)
        self._lock = threading.Lock()
        self._active: set[CompositeFlatFile] = set()
        self._open = 0
        self.flush = False
        self.last_success_s = clock.monotonic_s()

    def appended(self, file: CompositeFlatFile) -> None:
        """Note that a queue's buffer has grown. With the queue's lock held."""
        with self._lock:
            self._active.add(file)
        self.upload_if_due(file)

    def scan(self) -> None:
        """Take what has become due by age, by pressure or by flushing."""
        with self._lock:
            files = list(self._active)
        if self._budget.under_pressure:
            files.sort(key=lambda file: -file.buffered_bytes)
        for file in files:
            if file.lock.acquire(blocking=False):
                try:
                    self._scan_one(file)
                finally:
                    file.lock.release()

    def upload_if_due(self, file: CompositeFlatFile, *, flush: bool = False) -> None:
        """Hand a due group commit to the pool. With the queue's lock held."""
        if file.is_due(self._clock.monotonic_s(), flush=flush) and not self._stop.is_set():
            commit = file.take(self._clock.now_ms())
            with self._lock:
                self._open += 1
            with suppress(RuntimeError):  # the pool was closed meanwhile: the commit is given up
                self._pool.submit(self._guard, lambda: self._upload(file, commit))

    def close(self) -> None:
        """Wait for the uploads that run; those that wait are given up."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _scan_one(self, file: CompositeFlatFile) -> None:
        pressed = self._budget.under_pressure and self._open < self._settings.uploads_max
        self.upload_if_due(file, flush=self.flush or pressed)
        if not file.has_buffered:
            with self._lock:
                self._active.discard(file)

    def _upload(self, file: CompositeFlatFile, commit: GroupCommit) -> None:
        try:
            self._throttle.take(commit.data_bytes)
            self._put(file, commit)
        finally:
            with self._lock:
                self._open -= 1

    def _put(self, file: CompositeFlatFile, commit: GroupCommit) -> None:
        try:
            stored = self._uploader.put_log(commit)
        except BackendError as error:
            self._failed(file, error)
            return
        self.last_success_s = self._clock.monotonic_s()
        with file.lock:
            self._submit(stored)  # before the next commit of this queue can be taken: order
            file.log_stored()
            self.upload_if_due(file, flush=self.flush)
        self._budget.release(commit.data_bytes)
        self._room.set()

    def _failed(self, file: CompositeFlatFile, error: BackendError) -> None:
        self._counters.uploads_failed += 1
        self._counters.switches += 1
        with file.lock:
            file.log_failed(self._clock.monotonic_s(), self._backoff_s)
            failures = file.failures
        with self._lock:
            self._active.add(file)
        if not error.retriable:
            raise refused(error)
        if failures == 1:
            _LOG.warning("upload of %s failed, going on in a new segment: %s", file.queue, error)

    def _backoff_s(self, failures: int) -> float:
        settings = self._settings
        pause_s = settings.backoff_s_min * 2.0 ** min(failures - 1, 30)
        return min(pause_s, settings.backoff_s_max) * self._rng.uniform(0.5, 1.0)


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
