"""The request layer: from "this range of this object is wanted" to its bytes.

Overview. ``Transfers`` puts a lock around ``TransferState``, which decides, and does what that says: calls
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
from bisect import bisect_left, insort
from collections import Counter, deque
from concurrent.futures import CancelledError
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from backends.base import ByteRange, get_into, reads_into
from backends.errors import InvalidRangeError, ShortReadError
from backends.lazy_dataclass import dataclass
from backends.wrapping import WrappingStore
from fetcher.requests import Asked, Attempt, BusyError, Data, Range, Request, Wishes
from fetcher.runs import BYTES_MIN
from tiered.errors import ClosedError, StoreUnavailableError
from tiered.model import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from backends.base import ObjectStore
    from fetcher.limits import TransferLimits
    from fetcher.runs import Memory
    from tiered.clock import Clock

# -- decisions -----------------------------------------------------------------------------------
#
# Which requests are sent, when, and what becomes of those who asked: decisions only, no clock, no thread, no store.
#
# Overview. Each wish (``take_up``) is for a *range*; equal wishes share it. Ranges wait in two *queues*, what is waited for
# now before read-ahead, streams in turn within each. When a slot, bytes and tokens are free the next one is sent as a
# *request*, with its neighbours of the same queue. A slow request is attempted a second time. Every method takes the
# moment and leaves what is to be done in ``effects``; ``Transfers`` does it.
#
# Ordering. First come, first served within a stream and a queue. What does not fit (bytes, tokens) holds up all behind
# it, so that a large request is never starved by small ones; a single one larger than the limit passes alone.
#
# Ends. A wish ends exactly once: the thread that takes it out of its range (``Asked.chunk`` becomes None) decides its end. A
# slot is given back only when its call has returned, whatever has become of the askers.
#
# Retries. None, with two exceptions that are no retries of the same thing: the hedge; and when a merged request fails
# because some range reaches behind the object's end, its ranges are sent one by one, since the others may be right.
#
# Hedging. How long a request takes depends on its size, so requests are compared with those of similar size: each *size
# class* spans a factor of four. A class that has too few of its own is judged by the next larger one that has enough,
# which is patient; or by the next smaller one, its median multiplied by how much larger the class is.
#
# Not for several threads at once. Nothing survives the process.

# -- limits

_BURST_S = 0.1
"""What may be taken at once after a pause: what the rate gives in this time, and at least one."""


class TokenBucket:
    """Spaces things out to ``rate`` units a second on average. Not for several threads at once.

    Something larger than the bucket is not held up for ever: it passes as soon as any token is there, and leaves a
    debt that delays what comes after it. So in any ``t`` seconds less than ``rate * t + burst`` units pass, and the
    last thing taken.
    """

    def __init__(self, rate: float | None, now_s: float) -> None:
        """Begin full; ``rate``: units a second, above 0; None: no limit."""
        if rate is not None and not rate > 0:
            raise ValueError(f"a rate must be above 0: {rate}")
        self._rate = rate
        self._burst = max(1.0, (rate or 0) * _BURST_S)
        self._tokens = self._burst
        self._at_s = now_s

    def ready_in_s(self, now_s: float) -> float:
        """Seconds until something may be taken; 0: now."""
        if self._rate is None:
            return 0.0
        self._fill(now_s)
        return 0.0 if self._tokens > 0 else max(-self._tokens / self._rate, 1e-6)

    def take(self, units: float, now_s: float) -> None:
        """Count ``units`` as passed, whether there are as many or not."""
        if self._rate is not None:
            self._fill(now_s)
            self._tokens -= units

    def _fill(self, now_s: float) -> None:
        assert self._rate is not None
        gained = max(0.0, now_s - self._at_s) * self._rate
        self._tokens = min(self._burst, self._tokens + gained)
        self._at_s = max(self._at_s, now_s)


# -- hedging

SAMPLES = 101
"""Requests of a class that its median is taken of."""

SAMPLES_MIN = 8
"""A class with fewer has no median."""

_SMALLEST_BITS = 16

_CLASSES = 8  # up to 64 KiB, 256 KiB, 1 MiB, ... 256 MiB, larger

_BANK = 32.0
"""Hedges that may be saved up. Without it a long calm would pay for doubling every request when the store has trouble."""

_ROUNDING = 1e-6


def size_class(size_bytes: int) -> int:
    """Which class a size belongs to, from 0."""
    bits = (size_bytes - 1).bit_length()
    return min(_CLASSES - 1, max(0, (bits - _SMALLEST_BITS + 1) // 2))


class _Median:
    """Of the last ``SAMPLES`` values."""

    __slots__ = ("_recent", "_sorted")

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        if len(self._recent) == SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)

    def value(self) -> float | None:
        count = len(self._sorted)
        return self._sorted[count // 2] if count >= SAMPLES_MIN else None


class Durations:
    """How long requests have taken, by size. Not for several threads at once."""

    def __init__(self) -> None:
        self._medians = [_Median() for _ in range(_CLASSES)]

    def add(self, size_bytes: int, duration_s: float) -> None:
        """A request for ``size_bytes`` was answered after ``duration_s`` seconds."""
        self._medians[size_class(size_bytes)].add(duration_s)

    def median_s(self, size_bytes: int) -> float | None:
        """What a request of this size usually takes, in seconds; None: too few were seen."""
        wanted = size_class(size_bytes)
        for larger in range(wanted, _CLASSES):
            if (value := self._medians[larger].value()) is not None:
                return value
        for smaller in range(wanted - 1, -1, -1):
            if (value := self._medians[smaller].value()) is not None:
                return value * float(4 ** (wanted - smaller))
        return None


AHEAD_PATIENCE = 4
"""How much longer read-ahead may take than what is waited for, before it is asked for again."""


class HedgeBudget:
    """At most ``share`` hedges for each request that is not one, at every moment since the start."""

    def __init__(self, share: float) -> None:
        """``share`` is at least 0, and 0.05 allows one in twenty."""
        self._share = share
        self._saved = 0.0

    def earn(self) -> None:
        """A request that is not a hedge was sent."""
        self._saved = min(_BANK, self._saved + self._share)

    @property
    def allows_one(self) -> bool:
        """Whether one may be sent."""
        return self._saved >= 1 - _ROUNDING

    def spend(self) -> None:
        """A hedge was sent."""
        self._saved -= 1


# -- what is decided

QUICK_SECONDS = 0.002
"""Calls that are made together take no longer as a rule, one after another."""


@dataclass(slots=True)
class Effects:
    """What is to be done, outside of any lock."""

    starts: list[Attempt] = field(default_factory=list)  # calls to make
    ends: list[Callable[[], object]] = field(default_factory=list)
    """Ends of futures to tell: with bytes, an error, or neither."""
    is_sooner: bool = False  # something is due before the moment that ``tick`` returned last


class TransferState:
    """Ranges that wait, that are on their way, and who asked; each call changes it and says what is to be done."""

    def __init__(self, limits: TransferLimits, now_s: float) -> None:
        """Begin with nothing; ``now_s`` is monotonic, as everywhere here."""
        self._limits = limits
        self._effects = Effects()
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.slots_used = 0
        self.bytes_used = 0
        self.wishes = Wishes(limits, self.counts)
        self.is_closed = False  # nothing is sent any more
        self._running: dict[Request, Attempt] = {}  # neither answered nor hedged, with its attempt
        self._durations = Durations()
        self._budget = HedgeBudget(limits.hedge_budget)
        self._has_overdue = False  # a hedge was due, and had no slot, bytes, tokens or budget
        self._byte_tokens = TokenBucket(limits.bytes_per_s, now_s)
        self._request_tokens = TokenBucket(limits.requests_per_s, now_s)
        self._promised_s: float | None = None
        self._is_active = False  # something was sent since the last look

    def take_effects(self) -> Effects:
        """What is to be done since the last call."""
        effects, self._effects = self._effects, Effects()
        return effects

    def are_quick(self) -> bool:
        """Whether the calls that are to be made now are small, and such usually take less than it takes to begin one."""
        return all(
            (median_s := self._durations.median_s(attempt.request.size_bytes)) is not None
            and median_s * len(self._effects.starts) < QUICK_SECONDS
            for attempt in self._effects.starts
        )

    def take_up(self, asked: Asked, now_s: float, *, urgent: bool) -> None:
        """Take up a wish; it waits for ``send``. BusyError: the queue is full; nothing has changed."""
        chunk = self.wishes.add(asked, urgent=urgent)
        if chunk.request is not None and urgent:
            self._hurry_hedge(chunk, now_s)

    def hurry(self, asked: Asked, now_s: float) -> None:
        """Somebody waits for it now. No harm when it has ended."""
        chunk = asked.chunk
        if chunk is not None and not chunk.is_urgent:
            self.wishes.hurry(chunk, chunk.stream)
            self._hurry_hedge(chunk, now_s)

    def _hurry_hedge(self, chunk: Range, now_s: float) -> None:
        """A request under way may be due for asking again, now that somebody waits for it."""
        request = chunk.request
        attempt = None if request is None else self._running.get(request)
        if request is None or attempt is None or not self._limits.hedge_budget:
            return
        started_s = now_s if attempt.started_s is None else attempt.started_s
        self._promise(max(now_s, started_s + self._slow_s(request)))

    def _slow_s(self, request: Request) -> float:
        """When a request that somebody waits for counts as slow, in seconds."""
        median_s = self._durations.median_s(request.size_bytes) or 0.0
        return max(self._limits.hedge_floor_s, self._limits.hedge_factor * median_s)

    def cancel(self, asked: Asked, now_s: float) -> bool:
        """Take a wish back; whether it had not ended yet."""
        if asked.chunk is None:
            return False
        self._cancel(asked)
        self.send(now_s)  # what was behind it may be smaller, and fit
        return True

    def finish(self, attempt: Attempt, outcome: Data | BaseException, now_s: float) -> None:
        """A call to the store has returned, or raised."""
        request = attempt.request
        self.slots_used -= 1
        self.bytes_used -= request.size_bytes
        request.running -= 1
        if isinstance(outcome, BaseException):
            self.errors[type(outcome).__name__] += 1
            if not request.is_done:
                self._failed(request, outcome)
        else:
            self.counts["bytes"] += len(outcome)
            started_s = now_s if attempt.started_s is None else attempt.started_s
            self._durations.add(request.size_bytes, now_s - started_s)
            if request.is_done:
                self.counts["lost_bytes"] += len(outcome)
            else:
                self.counts["hedge_wins"] += attempt.is_hedge
                self._answer(request, outcome)
        self.send(now_s)

    def tick(self, now_s: float) -> float | None:
        """Do what is due; the moment of the next thing, None when nothing is to come."""
        self.send(now_s)
        moments = [self._hedge(now_s), self._tokens_s(now_s)]
        self._promised_s = min((one for one in moments if one is not None), default=None)
        return self._promised_s

    def linger(self, now_s: float) -> float | None:
        """After a tick: when to look again, given that more may be sent meanwhile.

        What is sent from now on is slow no sooner than ``hedge_floor_s`` from now. To look again then, as long as
        anything is sent, costs less than to be woken for each request.
        """
        if self._is_active and self._limits.hedge_budget:
            again_s = now_s + self._limits.hedge_floor_s
            self._promised_s = min(again_s, self._promised_s or again_s)
        self._is_active = False
        return self._promised_s

    def close(self) -> None:
        """Send nothing any more, and cancel every wish that was not sent."""
        self.is_closed = True
        for asked in self.wishes.live():
            if asked.chunk is not None and asked.chunk.request is None:
                self._cancel(asked)

    def give_up(self) -> None:
        """Cancel all wishes; answers still to come are dropped."""
        for asked in self.wishes.live():
            self._cancel(asked)

    def _cancel(self, asked: Asked) -> None:
        self.counts["cancelled"] += 1
        self.wishes.leave(asked)
        self._effects.ends.append(asked.end_cancelled)

    def send(self, now_s: float) -> None:
        """Send whatever may be sent now."""
        while (chunk := self._next(now_s)) is not None:
            limits = self._limits
            room = limits.bytes_in_flight_max - self.bytes_used
            bytes_max = min(limits.coalesced_bytes_max, room)
            chunks, start, end = self.wishes.take(chunk, bytes_max)
            request = Request(chunk.key, start, end, chunks)
            for one in chunks:
                one.request = request
            self.counts["coalesced"] += len(chunks) - 1
            self.counts["requests"] += 1
            self._is_active = True
            self._budget.earn()
            self._running[request] = self._start(request, now_s, is_hedge=False)
            if limits.hedge_budget:
                self._promise(now_s + self._slow_s(request))
        if self._has_overdue and self._budget.allows_one:
            self._hedge(now_s)

    def _next(self, now_s: float) -> Range | None:
        """Whose turn it is, if it may be sent now."""
        if self.is_closed or self.slots_used >= self._limits.requests_in_flight_max:
            return None
        chunk = self.wishes.head()
        if chunk is None or not self._has_room(chunk.size_bytes):
            return None
        wait_s = self._tokens_in_s(now_s)
        if wait_s:
            self._promise(now_s + wait_s)
            return None
        return chunk

    def _has_room(self, size_bytes: int) -> bool:
        used = self.bytes_used
        return not used or used + size_bytes <= self._limits.bytes_in_flight_max

    def _tokens_in_s(self, now_s: float) -> float:
        """Seconds until the rates allow something; 0: now."""
        return max(self._byte_tokens.ready_in_s(now_s), self._request_tokens.ready_in_s(now_s))

    def _tokens_s(self, now_s: float) -> float | None:
        if self.is_closed or not (self.wishes.pending or self._has_overdue):
            return None
        wait_s = self._tokens_in_s(now_s)
        return now_s + wait_s if wait_s else None

    def _start(self, request: Request, now_s: float, *, is_hedge: bool) -> Attempt:
        self.slots_used += 1
        self.bytes_used += request.size_bytes
        self._request_tokens.take(1, now_s)
        self._byte_tokens.take(request.size_bytes, now_s)
        request.running += 1
        attempt = Attempt(request, is_hedge)
        self._effects.starts.append(attempt)
        return attempt

    def _hedge(self, now_s: float) -> float | None:
        """Ask again for what is slow; when to look again."""
        limits = self._limits
        self._has_overdue = False
        if self.is_closed or not limits.hedge_budget:
            return None
        due: list[Request] = []
        later_s: list[float] = []
        for request in [one for one in self._running if one.is_wanted]:
            at_s = self._hedge_at_s(request, now_s)
            if at_s <= now_s:
                due.append(request)
            else:
                later_s.append(at_s)
        # What is waited for first, and of that what has run longest.
        due.sort(key=lambda one: (not one.is_urgent, self._running[one].started_s))
        for request in due:
            if not self._may_hedge(request, now_s):
                self._has_overdue = True
                break
            self._budget.spend()
            del self._running[request]
            self.counts["hedges"] += 1
            self._start(request, now_s, is_hedge=True)
        return min(later_s, default=None)

    def _hedge_at_s(self, request: Request, now_s: float) -> float:
        """When a request under way has run longer than ``hedge_factor`` times its median, and than ``hedge_floor_s``.

        One that nobody waits for yet gets ``AHEAD_PATIENCE`` times as long: mostly the machine is busy, and bytes asked for
        twice make it busier. One whose median is unknown is looked at again later: by then there may be one.
        """
        started_s = self._running[request].started_s
        if started_s is None or self._durations.median_s(request.size_bytes) is None:
            return now_s + self._limits.hedge_floor_s
        return started_s + self._slow_s(request) * (1 if request.is_urgent else AHEAD_PATIENCE)

    def _may_hedge(self, request: Request, now_s: float) -> bool:
        return (
            self._budget.allows_one
            and self.slots_used < self._limits.requests_in_flight_max
            and self._has_room(request.size_bytes)
            and not self._tokens_in_s(now_s)
        )

    def _promise(self, moment_s: float) -> None:
        if self._promised_s is None or moment_s < self._promised_s:
            self._promised_s = moment_s
            self._effects.is_sooner = True

    def _failed(self, request: Request, error: BaseException) -> None:
        """An attempt failed: the other one may still answer, else this is the end."""
        first = request.error or error
        if request.running:
            request.error = first
            return
        chunks = self._done(request)
        if len(chunks) > 1 and isinstance(first, (InvalidRangeError, ShortReadError)):
            for chunk in chunks:
                self._send_alone(chunk)
            return
        for chunk in chunks:
            for asked in self.wishes.end_all(chunk):
                self._effects.ends.append(partial(asked.set_exception, first))

    def _send_alone(self, chunk: Range) -> None:
        """One of the merged ranges is not there; find out which, for those who still want theirs."""
        self.wishes.put_back(chunk)
        if self.is_closed:
            for asked in list(chunk.askers):
                self._cancel(asked)

    def _answer(self, request: Request, data: Data) -> None:
        wanted_bytes = 0
        for chunk in self._done(request):
            if askers := self.wishes.end_all(chunk):
                # A part of a merged answer keeps the whole of it; who keeps that copies it (``fetcher.runs.compact``).
                low = chunk.start - request.start
                is_all = chunk.size_bytes == len(data)
                part = data if is_all else memoryview(data)[low : low + chunk.size_bytes]
                self._effects.ends += [partial(asked.set_result, part) for asked in askers]
                wanted_bytes += chunk.size_bytes
        self.counts["lost_bytes"] += max(0, len(data) - wanted_bytes)

    def _done(self, request: Request) -> list[Range]:
        request.is_done = True
        self._running.pop(request, None)
        chunks, request.chunks = request.chunks, []
        request.error = None  # its frames hold the request, and what it was to be read into
        return chunks


# -- transfers --------------------------------------------------------------------------------------

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
