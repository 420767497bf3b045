"""Threads that take turns on a virtual clock, in an order that a seed decides.

The dispatcher's own threads run, each as an *actor*: a real thread that holds the baton from one request (or wait) to the
next. Whoever parks chooses who goes on, and hands the baton over. So exactly one runs at a time, no time passes but
by waiting, and a seed replays a run to the last request.

What must not happen: an actor that blocks on anything but ``park`` (a lock that another holds while parked, a queue, the
real clock) stops everything. ``SimLock`` takes the place of the locks that are held during a request.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from backends.testing.faulty import SimulatedCrash
from tiered.model import TimestampMs

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

_Thread = threading.Thread
_TICK_S = 0.03
"""No wait is shorter: a timer on a busy machine."""
_HANG_S = 120.0
_BUSY = 0.1
"""How often a queue's lock is taken when it is tried."""
START_MS = 1_700_000_000_000


class Owner:
    """What actors belong to: a process that can be killed or stopped for a while."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused = False


class Actor:
    """One thread of an owner."""

    def __init__(self, owner: Owner, name: str, body: Callable[[], None], hand: Hand) -> None:
        self.owner = owner
        self.name = name
        self.body = body
        self.hand = hand
        self.at_s = 0.0
        self.event: threading.Event | None = None
        self.done = threading.Event()
        self.error: BaseException | None = None


class Hand:
    """An operating-system thread that lends itself to one actor after another; kept from run to run."""

    idle: ClassVar[list[Hand]] = []

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.job: Callable[[], None] | None = None
        _Thread(target=self._loop, daemon=True, name="simulated").start()

    def _loop(self) -> None:
        while True:
            self.gate.acquire()
            assert self.job is not None
            self.job()


class Scheduler:
    """The baton and the clock.

    Attributes:
        now_s: Virtual time.
        current: Who has the baton; None: nobody yet, or the driver.
        steps: How often it changed hands.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._parked: list[Actor] = []
        self._main = threading.Lock()
        self._main.acquire()
        self.now_s = 0.0
        self.steps = 0
        self.current: Actor | None = None
        self.failure: BaseException | None = None
        self.next_operation_s = 0.0
        self.operate: Callable[[], None] = lambda: None
        self.owners: list[Owner] = []

    # -- by the driver --------------------------------------------------------------------------

    def run(self) -> None:
        """Until every actor has ended and ``next_operation_s`` is infinite; raises what went wrong."""
        with self._patched():
            self._hand_on()
            assert self._main.acquire(timeout=_HANG_S), f"hangs: {self._hang()}"
        if self.failure is not None:
            raise self.failure

    def _hang(self) -> str:
        return f"{self.current and self.current.name}, parked {[a.name for a in self._parked]}"

    @contextmanager
    def _patched(self) -> Iterator[None]:
        scheduler = self

        def make_thread(**settings: Any) -> SimThread:
            return SimThread(scheduler, **settings)

        def make_pool(size: int, name: str = "") -> SimPool:
            return SimPool(scheduler, size, name)

        locks = SimpleNamespace(Lock=lambda: QueueLock(scheduler._rng))
        with (
            mock.patch.object(threading, "Thread", make_thread),
            mock.patch("tiered.log.composite.threading", locks),
            mock.patch("tiered.dispatch.dispatcher.ThreadPoolExecutor", make_pool),
            mock.patch("tiered.dispatch.group_commit.ThreadPoolExecutor", make_pool),
        ):
            yield

    # -- by actors ------------------------------------------------------------------------------

    def spawn(self, owner: Owner, name: str, body: Callable[[], None]) -> Actor:
        """A new actor, which goes on when it is chosen."""
        owner.dead = owner.dead or self.failure is not None
        hand = Hand.idle.pop() if Hand.idle else Hand()
        actor = Actor(owner, name, body, hand)
        actor.at_s = self.now_s
        hand.job = lambda: self._live(actor)
        self._parked.append(actor)
        return actor

    def park(self, seconds: float, event: threading.Event | None = None) -> None:
        """Give the baton away for so long, or until ``event`` is set.

        Raises:
            SimulatedCrash: The process was killed meanwhile.
        """
        me = self.current
        assert me is not None
        if me.owner.dead:
            raise SimulatedCrash(me.name)
        me.at_s = self.now_s + seconds
        me.event = event
        self._parked.append(me)
        if self._hand_on() is not me:
            me.hand.gate.acquire()
        if me.owner.dead:
            raise SimulatedCrash(me.name)

    def pause(self, seconds: float) -> None:
        """``park``, but for the driver, whose time is not ours."""
        if self.current is not None:
            self.park(seconds)

    def _live(self, actor: Actor) -> None:
        try:
            if not actor.owner.dead:
                actor.body()
        except BaseException as error:  # noqa: BLE001 (looked at by whoever made the actor)
            actor.error = error
        actor.done.set()
        Hand.idle.append(actor.hand)
        self._hand_on(ended=True)

    def _hand_on(self, *, ended: bool = False) -> Actor | None:
        """Choose who goes on and give it the baton; the caller itself, if that is chosen."""
        me = None if ended else self.current
        chosen = self._choose()
        self.current = chosen
        self.steps += 1
        if chosen is None:
            self._main.release()
        elif chosen is not me:
            chosen.hand.gate.release()
        return chosen

    def _choose(self) -> Actor | None:
        while True:
            if self.now_s >= self.next_operation_s and self.failure is None:
                self._operate()
            ready = [actor for actor in self._parked if self._is_ready(actor)]
            if ready:
                chosen = ready[0] if len(ready) == 1 else self._rng.choice(ready)
                self._parked.remove(chosen)
                return chosen
            if not self._parked and (self.next_operation_s == float("inf") or self.failure):
                return None
            times = [actor.at_s for actor in self._parked if not actor.owner.paused]
            self.now_s = max(self.now_s, min([*times, self.next_operation_s]))

    def _is_ready(self, actor: Actor) -> bool:
        if actor.owner.dead:
            return True
        if actor.owner.paused:
            return False
        return actor.at_s <= self.now_s or (actor.event is not None and actor.event.is_set())

    def _operate(self) -> None:
        try:
            self.operate()
        except BaseException as error:  # noqa: BLE001 (the run ends by it)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the run: every process dies, and the driver gets the error."""
        if self.failure is None:
            self.failure = error
        for owner in self.owners:
            owner.dead = True


class SimThread:
    """Takes the place of ``threading.Thread``."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        target: Callable[..., None],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._body = lambda: target(*args)
        self._name = name
        self._actor: Actor | None = None

    def start(self) -> None:
        current = self._scheduler.current
        assert current is not None
        self._actor = self._scheduler.spawn(current.owner, self._name, self._body)

    def join(self) -> None:
        assert self._actor is not None
        while not self._actor.done.is_set():
            self._scheduler.park(1.0, self._actor.done)


class SimFuture:
    """What a pool promises."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def result(self) -> Any:
        while not self.done.is_set():
            self._scheduler.park(1.0, self.done)
        if self.error is not None:
            raise self.error
        return self.value


class SimPool:
    """Takes the place of ``ThreadPoolExecutor``."""

    def __init__(self, scheduler: Scheduler, size: int, name: str) -> None:
        self._scheduler = scheduler
        self._size = size
        self._name = name
        self._waiting: deque[tuple[SimFuture, Callable[[], Any]]] = deque()
        self._running = 0
        self._is_closed = False
        self._idle = threading.Event()

    def submit(self, call: Callable[..., Any], *args: Any) -> SimFuture:
        if self._is_closed:
            raise RuntimeError("the pool is closed")
        future = SimFuture(self._scheduler)
        self._waiting.append((future, lambda: call(*args)))
        if self._running < self._size:
            self._running += 1
            current = self._scheduler.current
            assert current is not None
            self._scheduler.spawn(current.owner, self._name, self._work)
        return future

    def _work(self) -> None:
        try:
            while self._waiting:
                future, call = self._waiting.popleft()
                try:
                    future.value = call()
                except BaseException as error:  # noqa: BLE001 (raised again by ``result``)
                    future.error = error
                future.done.set()
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        self._is_closed = True
        if cancel_futures:
            self._waiting.clear()
        while wait and self._running:
            self._idle.clear()
            self._scheduler.park(1.0, self._idle)


class QueueLock:
    """Takes the place of a queue's lock: now and then it is taken when it is only tried (as by a thread that commits)."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._is_held = False

    def acquire(self, *, blocking: bool = True) -> bool:
        assert not self._is_held, "a queue's lock is held during a request"
        if not blocking and self._rng.random() < _BUSY:
            return False
        self._is_held = True
        return True

    def locked(self) -> bool:
        return self._is_held or self._rng.random() < _BUSY

    def release(self) -> None:
        self._is_held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimLock:
    """A lock, reentrant, that may be held while parked."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._holder: Actor | None = None
        self._depth = 0
        self._free = threading.Event()

    def __enter__(self) -> None:
        me = self._scheduler.current
        while self._depth and self._holder is not me:
            self._free.clear()
            self._scheduler.park(1.0, self._free)
        self._holder = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._free.set()


class SimClock:
    """A process's view of the virtual clock; its wall clock may be wrong."""

    def __init__(self, scheduler: Scheduler, skew_ms: int = 0) -> None:
        self._scheduler = scheduler
        self.skew_ms = skew_ms

    def now_ms(self) -> TimestampMs:
        return TimestampMs(START_MS + round(self._scheduler.now_s * 1000) + self.skew_ms)

    def monotonic_s(self) -> float:
        return self._scheduler.now_s

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self._scheduler.park(max(timeout_s, _TICK_S), event)
        return event.is_set()
