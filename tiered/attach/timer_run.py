"""Timer run: hands a broker's timers over from the tier to a target, hour by hour, until it is stopped.

Overview: the lease of hand-overs (``timer/meta/run/lease``) is waited for, a run is begun in the timers' journal, and then
``timer.handover`` and the target's wheel are asked in turn. The lease of those who take timers is another: both work side by
side.

After a crash: the lease expires; the next run goes on at the last entry (``timer.handover``).
"""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from backends.errors import BackendError
from tiered.api.stores import backend_errors, open_metered, with_retries
from tiered.attach.timer_place import choose_timers
from tiered.dispatch.settings import Throttle
from tiered.errors import StoreUnavailableError
from tiered.journal.lease import Holder, Lease
from tiered.journal.writer import JournalWriter
from tiered.log.state import TierMachine, TierState
from timer.dequeue import TimerReader
from timer.handover import HandOver, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from backends.s3_settings import S3Options
    from tiered.api.broker_place import Place
    from tiered.clock import Clock
    from tiered.journal.lease import LeaseState
    from timer.handover import HandCounters

RUN = "meta/run/"
LEASE_S = 10.0
_LOOK_S = 1.0
"""Between two looks at the journal: what was taken meanwhile may be due soon."""


class Delivering(Target, Protocol):
    """A target that may deliver by itself."""

    @property
    def next_ms(self) -> int | None:
        """When it has something to deliver; None: nothing."""
        ...

    def tick(self) -> int:
        """Deliver what is due; how many."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How to hand over.

    Attributes:
        near_ms: So long before an hour its file is handed over.
        cluster: Of the broker whose timers are meant; None: the only one.
        broker: Likewise.
        rate: Messages handed over in a second, at most; 0: no limit.
        once: End when nothing is to be handed over now, and nothing of what was is still to be delivered within the near
            window.
        wait: Wait for another run's lease.
    """

    near_ms: int = 3_600_000
    cluster: str | None = None
    broker: str | None = None
    rate: int = 0
    once: bool = False
    wait: bool = True


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run did.

    Attributes:
        place: Of the broker.
        run: Its number.
        counters: What was handed over.
        delivered: What the target's own wheel delivered.
        waiting: What is still in it.
        next_ms: When the next hour is to be handed over; None: nothing is left.
    """

    place: Place
    run: int
    counters: HandCounters
    delivered: int
    waiting: int
    next_ms: int | None


class TimerDelivery:
    """See the module."""

    def __init__(
        self,
        target: Delivering,
        run: HandOver,
        lease: Lease,
        place: Place,
        settings: RunSettings,
        *,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        """Used by ``hand_over``."""
        self.target, self.run, self.place = target, run, place
        self._lease, self._settings, self._clock, self._stop = lease, settings, clock, stop
        self._renewed_s = clock.monotonic_s()
        self._looked_s = clock.monotonic_s()
        self._throttle = Throttle(settings.rate, clock, stop)
        self.delivered = 0

    def is_ours(self) -> bool:
        """Our lease is valid still: it was renewed within its time."""
        return self._clock.monotonic_s() - self._renewed_s < LEASE_S

    def work(self) -> None:
        """Hand over and deliver until told to stop (or, with ``once``, until nothing is to be done).

        Raises:
            FencedError: Another run has begun.
            StoreUnavailableError: The tier or the target refuses us for good.
        """
        while not self._stop.is_set():
            self._renew()
            moved = self._step()
            self.delivered += self.target.tick()
            if moved:
                self._throttle.take(moved)
            elif self._settings.once and self._is_done():
                return
            else:
                self._clock.wait(self._stop, self._pause_s())
                self._look()

    def _step(self) -> int:
        try:
            return self.run.step()
        except (BackendError, StoreUnavailableError) as error:
            if isinstance(error, BackendError) and not error.retriable:
                raise
            if self._settings.once:
                raise
            return 0  # asked about, and given, again

    def _is_done(self) -> bool:
        next_ms, limit_ms = self.target.next_ms, self._clock.now_ms() + self._settings.near_ms
        return next_ms is None or next_ms > limit_ms

    def _pause_s(self) -> float:
        moments = [m for m in (self.run.next_ms, self.target.next_ms) if m is not None]
        if not moments:
            return _LOOK_S
        return min(_LOOK_S, max(0.01, (min(moments) - self._clock.now_ms()) / 1000))

    def _look(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            with contextlib.suppress(BackendError):  # looked at again in a second
                self.run.refresh()

    def _renew(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._renewed_s >= self._lease.renewal_seconds:
            with contextlib.suppress(BackendError):  # tried again, and given up by ``is_ours``
                self._lease.renew()
                self._renewed_s = now_s


def hand_over(
    url: str,
    open_target: Callable[[Place, Mapping[str, Any]], Delivering],
    settings: RunSettings,
    *,
    options: S3Options,
    clock: Clock,
    rng: random.Random | None = None,
    stop: threading.Event | None = None,
    announce: Callable[[LeaseState], None] = lambda _state: None,
) -> RunResult:
    """Hand timers over; see the module.

    Args:
        url: Of the tier.
        open_target: Opens the target, once the lease is ours; given the place, and what the journal says of the store from
            which the timers were taken.
        settings: How.
        options: For S3.
        clock: Time.
        rng: For ids and jitter; by default from the system.
        stop: Ends it.
        announce: Told of a run whose lease is waited for.

    Raises:
        InvalidError: There are no timers, or a wrong URL or target.
        FencedError: Another run has begun, or holds the lease.
        StoreUnavailableError: The tier's store, or the target, cannot be reached or refuses us.
        DataError: A file is damaged.
    """
    rng, stop, abandon = rng or random.SystemRandom(), stop or threading.Event(), threading.Event()
    with contextlib.ExitStack() as opened, backend_errors():
        meter = open_metered(url, options)
        opened.callback(meter.close)
        store = with_retries(meter, clock, rng, abandon)
        place = choose_timers(store, settings.cluster, settings.broker)
        writer = f"{rng.getrandbits(32):08x}"
        journal: JournalWriter[TierState] = JournalWriter(
            meter, place.prefix, TierMachine(), writer=writer, clock=clock, rng=rng, stop=abandon
        )
        lease = Lease(
            store,
            place.prefix + RUN,
            writer=writer,
            holder=Holder.present(),
            seconds=LEASE_S,
            clock=clock,
            known=lambda: journal.end,
        )
        lease.acquire(wait=settings.wait, announce=announce, stop=lambda s: clock.wait(stop, s))
        opened.callback(lease.release)
        journal.catch_up()
        target = open_target(place, journal.state.store)
        opened.callback(target.close)
        reader = TimerReader(store, place.prefix)
        run = HandOver(reader, journal, target, settings.near_ms, clock)
        opened.callback(run.close)
        work = TimerDelivery(target, run, lease, place, settings, clock=clock, stop=stop)
        run.is_ours = work.is_ours
        run.begin(asdict(Holder.present()))
        work.work()
        waiting = len(getattr(target, "wheel", ()))
        return RunResult(place, run.run, run.counters, work.delivered, waiting, run.next_ms)
