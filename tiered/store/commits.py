"""When an append is answered: flush and replica acknowledgement complete one future.

**Contract.** Callers hand in a place in the log and get a future. The flush thread swaps the list of requests for an
empty one, syncs the log once for all of them, and releases together those that lie below both the synced end and (where
asked for) the replica's. Before it syncs it waits for as many requests as there were callers at the last one (those it
answered, and those that came meanwhile), at most as long as that sync took, so that all are answered together.
A sync that fails
fails all waiting futures, and the store takes nothing more: what a failed sync leaves on the disk is not known.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.clock import Clock

_GATHER_S_MAX: Final = 0.01
_GATHER_STEP_S: Final = 0.0002

Request = tuple[int, "Future[None]"]


class GroupCommits:
    """See the module.

    Attributes:
        replica_end: Below it a replica has everything.
        groups: How many syncs answered requests.
    """

    def __init__(
        self, sync: Callable[[], int], clock: Clock, *, needs_sync: bool, needs_replica: bool
    ) -> None:
        self.replica_end = 0
        self.groups = 0
        self._sync = sync
        self._clock = clock
        self._needs_sync = needs_sync
        self._needs_replica = needs_replica
        self._lock = threading.Lock()
        self._incoming: list[Request] = []
        self._held: list[Request] = []
        self._synced = 0
        self._callers = 1
        self._last_sync_s = 0.0
        self.wake = threading.Event()

    def submit(self, end: int) -> Future[None]:
        """Ask to be told when everything below ``end`` is stored as the policy says."""
        future: Future[None] = Future()
        with self._lock:
            self._incoming.append((end, future))
        if self._needs_sync:
            self.wake.set()
        else:
            self._release()
        return future

    def run_once(self) -> None:
        """Answer what is waiting, if a sync is what it waits for. From one thread.

        Raises:
            OSError: The sync failed; every waiting future has the error.
        """
        if not self._needs_sync:
            return
        self._gather()
        with self._lock:
            requests, self._incoming = self._incoming, []
        if not requests:
            return
        with self._lock:
            self._held += requests
        begin_s = self._clock.monotonic_s()
        try:
            synced = self._sync()
        except BaseException as error:
            self.fail(error)
            raise
        self._last_sync_s = self._clock.monotonic_s() - begin_s
        self._callers = len(requests) + len(self._incoming)
        self.groups += 1
        self._release(synced)

    def acknowledge_replica(self, end: int) -> None:
        """A replica has everything below ``end``. From any thread; never goes back."""
        with self._lock:
            self.replica_end = max(self.replica_end, end)
        self._release()

    def fail(self, error: BaseException) -> None:
        """Answer everything that waits with an error."""
        with self._lock:
            requests, self._incoming, self._held = self._incoming + self._held, [], []
        for _, future in requests:
            future.set_exception(error)

    def _gather(self) -> None:
        wanted = self._callers
        left_s = min(_GATHER_S_MAX, self._last_sync_s)
        pause = threading.Event()
        while 0 < len(self._incoming) < wanted and left_s > 0:
            self._clock.wait(pause, _GATHER_STEP_S)
            left_s -= _GATHER_STEP_S

    def _release(self, synced: int | None = None) -> None:
        with self._lock:
            if synced is not None:
                self._synced = max(self._synced, synced)
            if not self._needs_sync:
                self._held += self._incoming
                self._incoming = []
            limit = min(
                self._synced if self._needs_sync else 1 << 62,
                self.replica_end if self._needs_replica else 1 << 62,
            )
            done = [future for end, future in self._held if end <= limit]
            self._held = [request for request in self._held if request[0] > limit]
        for future in done:
            future.set_result(None)
