"""When an append is answered: flush and replica acknowledgement complete one future; appends that wait are written together.

**Contract.** Callers hand in their messages (``append``), or a place in the log up to which they have written themselves
(``submit``). The flush thread swaps the list of them for an empty one, writes all messages as one append in the order in
which they came, syncs the log once for all, and releases together those that lie below both the synced end and (where
asked for) the replica's. So a message costs one wake-up, and no thread waits for another's write. Before it begins it
waits for as many callers as there were at the last sync (those it answered, and those that came meanwhile), at most as
long as that sync took, so that all are answered together.

A write that the disk refuses fails the messages of its group, of which nothing is stored; the next may be tried. A sync
that fails fails all that waits, and the store takes nothing more: what a failed sync leaves on the disk is not known.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from backends.local_files import advice_for
from tiered.crashpoints import reached
from tiered.errors import ClosedError, InvalidError, StoreUnavailableError
from tiered.store.encoding import join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.clock import Clock
    from tiered.store.encoding import Prepared, RecordPlaces


_GATHER_S_MAX: Final = 0.01


class Waiter:
    """The messages of one append, and who waits for them; completed as a future is, at a fraction of its price.

    Attributes:
        messages: What is to be stored.
        places: Where it was put, once it was.
    """

    __slots__ = ("_error", "_lock", "messages", "places")

    def __init__(self, messages: Prepared) -> None:
        self.messages = messages
        self.places: RecordPlaces | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def set_result(self, _: None) -> None:
        """It is stored as the policy says."""
        self._lock.release()

    def set_exception(self, error: BaseException) -> None:
        """It is not, or may not be."""
        self._error = error
        self._lock.release()

    def wait(self, timeout_s: float) -> RecordPlaces:
        """Where the messages were put, once they are stored as the policy says.

        Raises:
            TimeoutError: It took too long; they may still be stored.
            OSError: The disk refused it.
            ClosedError: The store was closed.
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        assert self.places is not None
        return self.places


Request = tuple[int, "Future[None] | Waiter"]


class GroupCommits:
    """See the module.

    Attributes:
        replica_end: Below it a replica has everything.
        groups: How many syncs answered requests.
    """

    def __init__(
        self,
        write: Callable[[Prepared], RecordPlaces],
        sync: Callable[[], int],
        clock: Clock,
        *,
        needs_sync: bool,
        needs_replica: bool,
    ) -> None:
        self.replica_end = 0
        self.groups = 0
        self._write = write
        self._sync = sync
        self._clock = clock
        self._needs_sync = needs_sync
        self._needs_replica = needs_replica
        self._lock = threading.Lock()
        self._unwritten: list[Waiter] = []
        self._incoming: list[Request] = []
        self._held: list[Request] = []
        self._failure: BaseException | None = None
        self._synced = 0
        self._callers = 1
        self._last_sync_s = 0.0
        self._is_full = threading.Event()
        self.wake = threading.Event()

    def append(self, messages: Prepared, timeout_s: float) -> RecordPlaces:
        """Have messages (at least one) written and synced with those of others, where syncs are asked for.

        Raises:
            TimeoutError, OSError, ClosedError: As of ``Waiter.wait``.
        """
        waiter = Waiter(messages)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._unwritten.append(waiter)
            count = len(self._unwritten) + len(self._incoming)
        self._call(count)
        return waiter.wait(timeout_s)

    def submit(self, end: int) -> Future[None]:
        """Ask to be told when everything below ``end`` is stored as the policy says."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel what is in the log
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._incoming.append((end, future))
            count = len(self._unwritten) + len(self._incoming)
        if self._needs_sync:
            self._call(count)
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
            waiters, self._unwritten = self._unwritten, []
            requests, self._incoming = self._incoming, []
        if waiters:
            requests += self._write_group(waiters)
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
        reached("store-synced")
        self._last_sync_s = self._clock.monotonic_s() - begin_s
        self._callers = len(requests) + len(self._incoming) + len(self._unwritten)
        self.groups += 1
        self._release(synced)

    def acknowledge_replica(self, end: int) -> None:
        """A replica has everything below ``end``. From any thread; never goes back."""
        with self._lock:
            self.replica_end = max(self.replica_end, end)
        self._release()

    def fail(self, error: BaseException) -> None:
        """Answer everything that waits, and whatever comes, with an error."""
        with self._lock:
            self._failure = self._failure or error
            waiters, self._unwritten = self._unwritten, []
            requests, self._incoming, self._held = self._incoming + self._held, [], []
        for waiter in [*waiters, *(waiter for _, waiter in requests)]:
            waiter.set_exception(error)

    def _call(self, count: int) -> None:
        if count >= self._callers:
            self._is_full.set()
        if count == 1:
            self.wake.set()

    def _gather(self) -> None:
        """Wait until as many wait as did the last time."""
        self._is_full.clear()
        count = len(self._unwritten) + len(self._incoming)
        left_s = min(_GATHER_S_MAX, self._last_sync_s)
        if 0 < count < self._callers and left_s > 0:
            self._clock.wait(self._is_full, left_s)

    def _write_group(self, waiters: list[Waiter]) -> list[Request]:
        """Write all messages as one append; the requests of those for whom that went well."""
        try:
            places = self._write(join([waiter.messages for waiter in waiters]))
        except InvalidError as error:
            if len(waiters) > 1:  # what is wrong with one is none of the others' business
                return [request for waiter in waiters for request in self._write_group([waiter])]
            waiters[0].set_exception(error)
            return []
        except (OSError, ClosedError) as error:
            for waiter in waiters:
                waiter.set_exception(error)
            return []
        found: list[Request] = []
        first = 0
        for waiter in waiters:
            last = first + len(waiter.messages)
            end = places.positions[last - 1] + waiter.messages.sizes[-1]
            waiter.places = places.part(first, last, end)
            found.append((end, waiter))
            first = last
        return found

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
            done = [waiter for end, waiter in self._held if end <= limit]
            self._held = [request for request in self._held if request[0] > limit]
        for waiter in done:
            waiter.set_result(None)


@contextlib.contextmanager
def waiting(root: str, timeout_s: float) -> Iterator[None]:
    """A block that waits, ``timeout_s`` at most.

    Raises:
        StoreUnavailableError: It took too long, or the disk refused it.
    """
    try:
        yield
    except TimeoutError:
        raise StoreUnavailableError(
            f"not on the disk or with the replica after {timeout_s} s",
            where=root,
            do="it may still be stored: look before sending it again",
        ) from None
    except OSError as error:
        raise StoreUnavailableError(
            f"the flush failed: {error.strerror or error}",
            where=root,
            do=advice_for(error, "look at the disk"),
        ) from error
