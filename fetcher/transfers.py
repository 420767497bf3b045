"""The request layer: from "this range of this object is wanted" to its bytes.

Overview. ``Transfers`` puts a lock around ``fetcher.transfer_state``, which decides, and does what that says: calls
``store.get`` in the executor's threads, and ends futures. There is no thread of its own: who asks sends, who finishes
sends the next, and a ``Ticker`` calls ``tick``. An ``AskingStore`` is a store whose reads are such requests.

Limits. See ``TransferLimits``; calls under way, their bytes, the rates and the queue are bounded. A slot stays taken
until its call has really returned, also when every asker has gone: the store's own deadline bounds that.

Ordering. What is urgent goes before read-ahead, and streams take turns by bytes within each. Futures end in any order,
in the executor's threads, outside of the lock; their callbacks may ask again. A callback that works long keeps a thread
of the executor from its next call.

Errors and retries. A future ends with bytes, with the store's error (``BackendError``, as it is), or cancelled. Deadlines
are those of who waits (``result_by``), and who does not wait any more cancels. Nothing is retried here;
``backends.wrapping`` below does that, and the caller may ask again. Merging is never seen by an asker: a range that is not
there fails alone.

A crash leaves nothing: this only reads.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Protocol, TypeVar

from backends.base import ByteRange, get_into, reads_into
from backends.errors import ShortReadError
from backends.lazy_dataclass import dataclass
from backends.wrapping import WrappingStore
from fetcher.buffers import BYTES_MIN
from fetcher.requests import Asked, BusyError
from fetcher.transfer_state import TransferState
from tiered.errors import ClosedError, StoreUnavailableError
from tiered.model import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from backends.base import ObjectStore
    from fetcher.buffers import Memory
    from fetcher.limits import TransferLimits
    from fetcher.requests import Attempt, Data, Request
    from fetcher.transfer_state import Effects
    from tiered.clock import Clock


T = TypeVar("T")

# -- limits


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What was counted since the start, and what is under way; consistent among each other."""

    asked: int  # wishes taken up
    joined: int  # those that found the same range waiting or under way
    refused: int  # those that met a full queue
    cancelled: int  # those truncated before their end
    requests: int  # calls to the store, hedges not among them
    coalesced: int  # ranges that came with another's request, so requests saved
    hedges: int  # second calls for slow requests
    hedge_wins: int  # those that answered first
    received_bytes: int  # bytes of all answers
    lost_bytes: int
    """Those that nobody got: losers of hedges, gaps between merged ranges, cancelled wishes."""
    errors: Mapping[str, int]  # failed calls, by class of the error
    pending: int  # ranges that wait to be sent
    running: int  # calls under way
    running_bytes: int  # what they ask for


# -- transfers


class Transfers:
    """Reads ranges of objects within limits. From any thread."""

    def __init__(
        self,
        store: ObjectStore,
        executor: Executor,
        clock: Clock,
        limits: TransferLimits,
        *,
        wake: Callable[[], None] | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Use what stays the caller's: nothing of it is closed here.

        ``store`` has a deadline of its own for each call. ``executor`` makes the calls; a thread for each slot is best; it
        is shut down after ``close`` only. ``wake`` is called, outside of locks, when ``tick`` ought to be called sooner
        than it said; without it, call ``tick`` at least every ``hedge_floor_s``. Large ranges are read into ``memory``,
        where the store can.
        """
        self._store = store
        self._executor = executor
        self._clock = clock
        self.wake = wake
        # A store that cannot read into it gives bytes of its own: to copy these would cost more than it spares.
        self._memory = memory if reads_into(store) else None
        self._lock = threading.Lock()
        self._state = TransferState(limits, clock.monotonic_s())
        self._idle = threading.Event()

    def ask_all(
        self, wanted: Sequence[tuple[Hashable, str, ByteRange]], *, urgent: bool
    ) -> list[Future[Data]]:
        """Want ranges: for each a future with exactly these bytes, in order. ``cancel`` works until it ends.

        Equal wishes share a request, and so do neighbours of one object; what is small and quick, a thread. Of each it is
        said who takes turns with the others (such as a (group, queue)). ``urgent``: somebody waits for them now; else they
        are read ahead. BusyError: too much is waiting; none of them is asked for.
        """
        asked = [Asked(self._cancel, *one) for one in wanted]
        refusal: BusyError | None = None
        now_s = self._clock.monotonic_s()
        with self._lock:
            if self._state.is_closed:
                raise ClosedError("reads of the tier have been closed")
            # All of them wait before the first is sent, so that neighbours find each other.
            try:
                for one in asked:
                    self._state.take_up(one, now_s, urgent=urgent)
            except BusyError as error:
                refusal = error
                # None rather than some: the caller could not tell which of them will come.
                for one in asked:
                    self._state.cancel(one, now_s)
            self._state.send(now_s)
            together = self._state.are_quick()
            effects = self._state.take_effects()
        self._do(effects, together=together)
        if refusal is not None:
            raise refusal
        return list(asked)

    def hurry(self, future: Future[Data]) -> None:
        """What was read ahead is waited for now, and goes before other read-ahead."""
        assert isinstance(future, Asked)
        self._change(lambda state, now_s: state.hurry(future, now_s))

    def cancel(self, future: Future[Data]) -> None:
        """Take a wish back: never sent, or its answer is dropped. Others who want the same range still get it."""
        future.cancel()

    def tick(self) -> float | None:
        """Do what is due: hedges, what waited for tokens. Never blocks.

        Seconds until it wants to be called again; None: there is nothing to come.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._state.tick(now_s)
            next_s = self._state.linger(now_s)
            effects = self._state.take_effects()
        effects.is_sooner = False  # the caller gets the moment from us
        self._do(effects)
        return None if next_s is None else max(0.0, next_s - now_s)

    @property
    def stats(self) -> TransferStats:
        """The counts so far."""
        with self._lock:
            state = self._state
            counts = state.counts
            return TransferStats(
                asked=counts["asked"],
                joined=counts["joined"],
                refused=counts["refused"],
                cancelled=counts["cancelled"],
                requests=counts["requests"],
                coalesced=counts["coalesced"],
                hedges=counts["hedges"],
                hedge_wins=counts["hedge_wins"],
                received_bytes=counts["bytes"],
                lost_bytes=counts["lost_bytes"],
                errors=dict(state.errors),
                pending=state.wishes.pending,
                running=state.slots_used,
                running_bytes=state.bytes_used,
            )

    def close(self, limit_s: float = 10.0) -> None:
        """Refuse new wishes, cancel those not sent, and wait for the others.

        What has not ended after ``limit_s`` is cancelled, and its call runs out alone.
        """
        self._change(lambda state, _: state.close())
        # For slots, not for futures: a hedge that lost has nobody who waits for it, and still a thread that uses the store.
        if self.stats.running:
            self._clock.wait(self._idle, limit_s)
        self._change(lambda state, _: state.give_up())

    def _cancel(self, asked: Asked) -> bool:
        return self._change(lambda state, now_s: state.cancel(asked, now_s))

    def _change(self, change: Callable[[TransferState, float], T]) -> T:
        """Have something decided, with the lock, and do what that says, without it."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            decided = change(self._state, now_s)
            effects = self._state.take_effects()
        self._do(effects)
        return decided

    def _do(self, effects: Effects, *, together: bool = False) -> None:
        """Make calls, each in a thread or all in one, and end futures; the lock is not held."""
        # A list, not a call of itself: each call that an executor refuses may be what lets the next one be sent.
        todo = [effects]
        while todo:
            one = todo.pop()
            for attempts in [one.starts] if together and one.starts else zip(one.starts):
                try:
                    self._executor.submit(self._run, attempts)
                except RuntimeError as error:  # it was shut down
                    todo.extend([self._finished(attempt, error) for attempt in attempts])
            if one.is_sooner and self.wake is not None:
                self.wake()
            for end in one.ends:
                end()

    def _run(self, attempts: Sequence[Attempt]) -> None:
        now_s = self._clock.monotonic_s()
        for attempt in attempts:
            # Of the later ones, too: they are hedged when an earlier one is stuck.
            attempt.started_s = now_s
        for attempt in attempts:
            self._do(self._finished(attempt, self._read(attempt.request)))

    def _read(self, request: Request) -> Data | BaseException:
        """The bytes, or what was raised (returned, so that no frame on its traceback holds it)."""
        try:
            data = self._get(request)
        except BaseException as error:  # noqa: BLE001 (a future has to end, whatever it was)
            return error
        if len(data) != request.size_bytes:
            return ShortReadError(
                f"{len(data)} bytes instead of {request.size_bytes} from {request.start} of {request.key!r}"
            )
        return data

    def _get(self, request: Request) -> Data:
        byte_range = ByteRange(request.start, request.end)
        if self._memory is None or request.size_bytes < BYTES_MIN:
            return self._store.get(request.key, byte_range)
        target = self._memory.lend(request.size_bytes)
        get_into(self._store, request.key, byte_range, target)
        return target

    def _finished(self, attempt: Attempt, outcome: Data | BaseException) -> Effects:
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._state.finish(attempt, outcome, now_s)
            if self._state.is_closed and not self._state.slots_used:
                self._idle.set()
            return self._state.take_effects()


# -- asking


class AskingStore(WrappingStore):
    """Reads ranges by asking for them, until one moment; everything else is the store's own. For one read of one reader."""

    def __init__(
        self,
        transfers: Transfers,
        store: ObjectStore,
        stream: Hashable,
        clock: Clock,
        deadline_s: float,
    ) -> None:
        super().__init__(store)
        self._transfers = transfers
        self._stream = stream
        self._clock = clock
        self._deadline_s = deadline_s

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """StoreUnavailableError: not before the deadline."""
        if byte_range is None:
            return super().get(key)
        return bytes(self.ask(key, [byte_range])[0])

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[bytes]:
        """As ``get``."""
        return [bytes(data) for data in self.ask(key, byte_ranges)]

    def ask(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[Data]:
        """As ``get_ranges``, without a copy. ClosedError: the transfers are closed, or were closed meanwhile."""
        wanted = [(self._stream, key, one) for one in byte_ranges]
        asked = self._transfers.ask_all(wanted, urgent=True)
        try:
            return [
                result_by(self._deadline_s, self._clock, asked[number], key)
                for number in range(len(asked))  # a name for each would hold it as the error does
            ]
        except CancelledError:  # while we wait only ``Transfers.close`` does that
            raise ClosedError("reads of the tier have been closed", where=key) from None
        finally:
            while (
                asked
            ):  # they hold the error, whose frames would hold them and all that our callers have
                asked.pop().cancel()


def result_by(deadline_s: float, clock: Clock, future: Future[T], where: str) -> T:
    """What a future ends with, waited for until a moment; StoreUnavailableError: not before it."""
    try:
        return future.result(max(deadline_s - clock.monotonic_s(), 0))
    except TimeoutError:
        if future.done():
            return future.result()  # it came at that very moment
        raise too_late(where) from None
    finally:
        del future  # it holds the error, whose frames would hold it and all that our callers have


def run_by(
    deadline_s: float, clock: Clock, executor: Executor, work: Callable[[], T], where: str
) -> T:
    """What ``work`` gives in a thread: a call to the store has a longer deadline of its own, and cannot be broken off.

    StoreUnavailableError: not before the deadline; what was begun ends by itself. ClosedError: the executor has been shut
    down.
    """
    try:
        future = executor.submit(work)
    except RuntimeError as error:
        raise ClosedError("the tier has been closed", where=where) from error
    try:
        return result_by(deadline_s, clock, future, where)
    except CancelledError:
        raise too_late(where) from None
    finally:
        future.cancel()


def too_late(where: str) -> StoreUnavailableError:
    """What is said when a deadline has passed."""
    return StoreUnavailableError(
        "the tier did not answer before the deadline",
        where=where,
        do="try again, or look at the store with `tiered doctor`",
    )


# -- ticker

_LOG = logging.getLogger("tiered.fetcher")

IDLE_SECONDS = 1.0
"""How long it sleeps when nothing is due and nobody wakes it."""


class Ticking(Protocol):
    """What wants to be called."""

    def tick(self) -> float | None:
        """Do what is due; in how many seconds it wants to be called again, if at all."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when ``tick`` ought to be called sooner."""
        ...


class Ticker(Closing):
    """Calls ``tick`` from its making until it is closed. It holds no lock.

    A call that fails is logged and made again a second later: without it nothing would expire, and no read be given up.
    """

    def __init__(self, ticking: Ticking, clock: Clock) -> None:
        self._ticking = ticking
        self._clock = clock
        self._is_closed = False
        self._due = threading.Event()
        ticking.listen(self._due.set)
        self._thread = threading.Thread(target=self._run, name="fetcher-ticker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            due_s = self._tick()
            self._clock.wait(self._due, IDLE_SECONDS if due_s is None else min(due_s, IDLE_SECONDS))
            self._due.clear()

    def _tick(self) -> float | None:
        try:
            return self._ticking.tick()
        except Exception:  # noqa: BLE001 (logged; the thread has to go on)
            _LOG.exception("a defect of ours: the upkeep of read-ahead failed, and is tried again")
            return None

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed = True
        self._due.set()
        self._thread.join()
