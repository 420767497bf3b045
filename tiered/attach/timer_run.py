"""Timer run: hands a broker's timers over from the tier to a target, hour by hour, until it is stopped.

Overview: the lease of hand-overs (``timer/meta/run/lease``) is waited for, a run is begun in the timers' journal, and then
``timer.handover`` and the target's wheel are asked in turn. A step of the hand-over is made in a thread of its own, and the
wheel is looked at meanwhile: a tier that does not answer holds up nothing that the target has. The lease of those who take
timers is another: both work side by side. Ours is renewed by a thread, too, since a target may take long to open, and to
answer.

Refusals: once a run has begun, what only a person can mend (an expired key, a wrong clock) is waited out as an outage is,
unless it is to end by itself.

After a crash: the lease expires; the next run goes on at the last entry (``timer.handover``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from tiered.api.broker_place import choose_timers, take_lease
from tiered.api.stores import PatientStore, backend_errors, open_metered, with_retries
from tiered.errors import ClosedError, FencedError, StoreUnavailableError
from tiered.journal.append import JournalWriter
from tiered.journal.lease import Holder, Lease
from tiered.log.ranges import count_of
from tiered.log.state import TierMachine, TierState
from tiered.log.timers import HOUR_MS, hour_queue
from tiered.metrics import Sample
from timer.dequeue import TimerReader
from timer.handover import HandOver, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from backends.s3_settings import S3Options
    from backends.wrapping import MeteredStore
    from tiered.api.broker_place import Place
    from tiered.clock import Clock
    from tiered.journal.lease import LeaseState
    from timer.handover import HandCounters

_LOG = logging.getLogger("tiered.timer")
RUN = "meta/run/"
LEASE_S = 10.0
_AGAIN_S = 0.5
"""Before a batch is tried again."""
_SILENT_S = 10.0
_STUCK_S = 600.0
"""A step that takes longer is told: tier or target do not answer."""
_ENDING_S = 5.0
"""A step that is under way when we are told to stop may take so long, so that its entry is written; then nothing is tried
again."""
_TICK_S = 0.2
"""Between two looks at the wheel while a step is made, at most."""
_LOOK_S = 1.0
_LOOK_S_MAX = 10.0
"""Between two looks at the journal: what was taken meanwhile may be due soon. A hundredth of the near window between these
two: each look is a request."""


class Delivering(Target, Protocol):
    """A target that may deliver by itself: ``tick`` is called while another thread gives."""

    @property
    def waiting(self) -> int:
        """Messages that it has, and has not delivered yet."""
        ...

    @property
    def refused(self) -> int:
        """Messages that it took, and could not deliver when they were due."""
        ...

    @property
    def missing(self) -> int:
        """Messages that it took, and does not find any more now that they are due."""
        ...

    @property
    def late_ms_max(self) -> int:
        """The latest that a message was, of those that were known in time."""
        ...

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
    """How to hand over."""

    near_ms: int = 3_600_000  # so long before an hour its file is handed over
    cluster: str | None = None  # of the broker whose timers are meant; None: the only one
    broker: str | None = None  # likewise
    rate: int = 0  # messages handed over in a second, at most; 0: no limit
    once: bool = False
    """End when nothing is to be handed over now, and nothing of what was is still to be delivered within the near
    window."""
    wait: bool = True  # wait for another run's lease


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run did."""

    place: Place  # of the broker
    run: int  # its number
    counters: HandCounters  # what was handed over
    refused: int  # messages that the target refused, when it was given them or when they were due
    missing: int  # messages that their hour's file, or the target when they were due, has lost
    delivered: int  # what the target's own wheel delivered
    waiting: int  # what is still in it
    next_ms: int | None  # when the next hour is to be handed over; None: nothing is left


class KeptLease:
    """Our lease, renewed by a thread: a target that is slow to open or to answer must not cost it."""

    def __init__(self, lease: Lease, clock: Clock) -> None:
        """It has just been taken."""
        self._lease, self._clock = lease, clock
        self._lost: FencedError | None = None

    def is_ours(self) -> bool:
        """It is valid still: it was renewed within its time. From any thread."""
        return self._lost is None and self._clock.monotonic_s() - self._lease.written_s < LEASE_S

    def require(self) -> None:
        """End when it is another's."""
        if self._lost is not None:
            raise self._lost

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Renew it meanwhile."""
        ended = threading.Event()
        renewing = threading.Thread(target=self._keep, args=(ended,), name="tiered-lease")
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join()

    def _keep(self, ended: threading.Event) -> None:
        while not self._clock.wait(ended, self._lease.renewal_seconds):
            try:
                self._lease.renew()
            except FencedError as error:
                self._lost = error
                return
            except BackendError:
                continue  # tried again, and given up by ``is_ours``


class TimerDelivery:
    """See the module.

    Attributes:
        target: Where messages go.
        run: The hand-over.
        place: Of the broker.
    """

    def __init__(
        self,
        target: Delivering,
        run: HandOver,
        lease: KeptLease,
        place: Place,
        settings: RunSettings,
        *,
        clock: Clock,
        stop: threading.Event,
        abandon: threading.Event,
    ) -> None:
        self.target, self.run, self.place = target, run, place
        self._lease, self._settings, self._clock, self._stop = lease, settings, clock, stop
        self._abandon = abandon
        self._looked_s = clock.monotonic_s()
        self._look_s = min(_LOOK_S_MAX, max(_LOOK_S, settings.near_ms / 100_000))
        self._free_s = clock.monotonic_s()  # by the rate, the next batch goes then
        self._turned_s = clock.monotonic_s()
        self.trouble = ""  # why nothing can be handed over at present; empty when it can
        self.delivered = 0  # messages that the target's own wheel delivered

    @property
    def refused(self) -> int:
        """Messages that the target refused for good, those that its own wheel could not deliver among them."""
        return self.run.counters.refused + self.target.refused

    @property
    def missing(self) -> int:
        """Messages that their hour's file has lost, and those that the target's own wheel does not find any more."""
        return self.run.counters.missing + self.target.missing

    def pending(self) -> tuple[int, int, int | None]:
        """Items and hours that are not handed over, and when the first of these hours begins. From any thread."""
        state = self.run.journal.state
        left = {}
        for hour, facts in state.timers.hours.items():
            incarnation = state.incarnation(hour_queue(hour))
            count = facts.left(incarnation.commit_offset) if incarnation else 0
            if count > 0:
                left[hour] = count
        return sum(left.values()), len(left), min(left) * HOUR_MS if left else None

    @property
    def held(self) -> int:
        """Messages that are held back for damage. From any thread."""
        hours = self.run.journal.state.timers.hours
        return sum(count_of(facts.held) for facts in hours.values() if facts.held)

    def fault(self) -> str:
        """What is wrong, in one clause; empty when nothing is."""
        return self.trouble

    def unready(self) -> str:
        """Why it does not do its work any more; a tier or target that does not answer is no reason."""
        return "it ends" if self._stop.is_set() else ""

    def stuck(self) -> str:
        """Why only a new start can help, in one clause. Tier and target are asked in a thread of their own."""
        still_s = self._clock.monotonic_s() - self._turned_s
        return (
            f"due messages were last looked for {still_s:.0f} s ago" if still_s > _STUCK_S else ""
        )

    def samples(self) -> list[Sample]:
        """What is measured (``TIMER_METRICS``), but for requests. From any thread."""
        count, hours, first_ms = self.pending()
        now_ms, counters, target = self._clock.now_ms(), self.run.counters, self.target
        totals = {
            "handed_messages": counters.handed,
            "found_messages": counters.found,
            "refused_messages": self.refused,
            "missing_messages": self.missing,
            "dropped_messages": counters.dropped,
            "retries": counters.retries,
            "delivered_messages": self.delivered,
        }
        return [
            Sample("tiered_timer_up", not self.trouble),
            Sample("tiered_timer_pending_messages", count),
            Sample("tiered_timer_pending_hours", hours),
            *(
                ()
                if first_ms is None
                else [Sample("tiered_timer_next_due_seconds", (first_ms - now_ms) / 1000)]
            ),
            Sample("tiered_timer_held_messages", self.held),
            Sample("tiered_timer_waiting_messages", target.waiting),
            Sample("tiered_timer_lateness_seconds", target.late_ms_max / 1000),
            *(Sample(f"tiered_timer_{name}_total", value) for name, value in totals.items()),
        ]

    def work(self) -> None:
        """Hand over and deliver until told to stop (or, with ``once``, until nothing is to be done).

        Raises:
            FencedError: Another run has begun.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="tiered-handing") as pool:
            try:
                self._work(pool)
            finally:
                self._abandon.set()

    def _work(self, pool: ThreadPoolExecutor) -> None:
        while not self._stop.is_set():
            self._lease.require()
            self._turned_s = self._clock.monotonic_s()
            is_held = self._clock.monotonic_s() < self._free_s
            moved = 0 if is_held else self._beside_wheel(pool, self._step)
            self.delivered += self.target.tick()
            if moved:
                self._pace(moved)
            elif self._settings.once and not is_held and self._is_done():
                return
            else:
                self._clock.wait(self._stop, self._pause_s())
                self._beside_wheel(pool, self._look)

    def _beside_wheel(self, pool: ThreadPoolExecutor, step: Callable[[], int]) -> int:
        """Make a step, and have the target deliver what is due meanwhile. What follows finds the step ended."""
        future, began_s, ending_s = pool.submit(step), self._clock.monotonic_s(), math.inf
        while not wait([future], timeout=self._tick_s()).done:
            self.delivered += self.target.tick()
            now_s = self._turned_s = self._clock.monotonic_s()
            if self._stop.is_set():
                ending_s = min(ending_s, now_s + _ENDING_S)
            if now_s >= ending_s:
                self._abandon.set()
            if now_s - began_s >= _SILENT_S and not self.trouble:
                self._tell("tier or target do not answer")
        return future.result()

    def _tick_s(self) -> float:
        next_ms = self.target.next_ms
        left_s = _TICK_S if next_ms is None else (next_ms - self._clock.now_ms()) / 1000
        return min(_TICK_S, max(0.01, left_s))

    def _tell(self, trouble: str) -> None:
        _LOG.log(logging.DEBUG if self.trouble else logging.WARNING, "%s", trouble)
        self.trouble = trouble

    def _pace(self, moved: int) -> None:
        """Have the next batch wait by the rate; nothing else does."""
        if self._settings.rate:
            begin_s = max(self._free_s, self._clock.monotonic_s())
            self._free_s = begin_s + moved / self._settings.rate

    def _step(self) -> int:
        """Hand a batch over. When the tier or the target does not answer: nothing, and it is tried again."""
        try:
            if self.trouble:
                self.run.refresh()  # another run may have begun meanwhile
            moved = self.run.step()
        except ClosedError as error:  # what could not be written to the journal ends its writer
            raise StoreUnavailableError(
                self.trouble or str(error), do="nothing is lost; mend that, and run it again"
            ) from error
        except (BackendError, StoreUnavailableError) as error:
            if isinstance(error, BackendError) and not error.retriable:
                raise
            if self._stop.is_set():
                return 0
            if self._settings.once:
                raise
            self._tell(str(error) or type(error).__name__)
            return 0
        if self.trouble:
            _LOG.info("handing over goes on")
        self.trouble = ""
        return moved

    def _is_done(self) -> bool:
        next_ms, limit_ms = self.target.next_ms, self._clock.now_ms() + self._settings.near_ms
        return next_ms is None or next_ms > limit_ms

    def _pause_s(self) -> float:
        if self.trouble:
            return _AGAIN_S
        held_s = self._free_s - self._clock.monotonic_s()
        moments = (None if held_s > 0 else self.run.next_ms, self.target.next_ms)
        waits = [(moment - self._clock.now_ms()) / 1000 for moment in moments if moment is not None]
        if held_s > 0:
            waits.append(held_s)
        return min(_LOOK_S, max(0.01, min(waits, default=_LOOK_S)))

    def _look(self) -> int:
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= self._look_s:
            self._looked_s = now_s
            with contextlib.suppress(BackendError):  # looked at again later
                self.run.refresh()
        return 0


def hand_over(
    url: str,
    open_target: Callable[[Place, TierState, Callable[[], bool]], Delivering],
    settings: RunSettings,
    *,
    options: S3Options,
    clock: Clock,
    rng: random.Random | None = None,
    stop: threading.Event | None = None,
    announce: Callable[[LeaseState], None] = lambda _state: None,
    beside: Callable[[TimerDelivery, MeteredStore], AbstractContextManager[None]] = (
        lambda _work, _meter: contextlib.nullcontext()
    ),
) -> RunResult:
    """Hand timers over; see the module.

    Args:
        open_target: Opens the target, once the lease is ours; given the place, what the journal says (as of the store from
            which the timers were taken), and whom to ask whether the lease is ours still.
        beside: Goes on beside the work, which it may look at from other threads.

    Raises:
        ClosedError: ``stop`` was set while another run's lease was waited for.
        InvalidError: There are no timers, or a wrong URL or target.
        FencedError: Another run has begun, or holds the lease.
        StoreUnavailableError: The tier's store, or the target, cannot be reached or refuses us at the start, or with
            ``once``.
    """
    rng, stop, abandon = rng or random.SystemRandom(), stop or threading.Event(), threading.Event()
    with contextlib.ExitStack() as opened, backend_errors():
        meter = opened.enter_context(contextlib.closing(open_metered(url, options)))
        patient = PatientStore(meter, clock)
        store = with_retries(patient, clock, rng, abandon, meter.count_retry)
        place = choose_timers(store, settings.cluster, settings.broker)
        journal: JournalWriter[TierState] = JournalWriter(
            patient, place.prefix, TierMachine(), clock=clock, rng=rng, stop=abandon
        )
        lease = journal.lease(store, LEASE_S, below=RUN)
        take_lease(lease, clock, stop, wait=settings.wait, announce=announce)
        opened.callback(lease.release)
        ours = KeptLease(lease, clock)
        opened.enter_context(ours.kept())
        journal.catch_up()
        target = open_target(place, journal.state, ours.is_ours)
        opened.callback(target.close)
        reader = TimerReader(store, place.prefix)
        run = HandOver(reader, journal, target, settings.near_ms, clock, ours.is_ours)
        opened.callback(run.close)
        work = TimerDelivery(
            target, run, ours, place, settings, clock=clock, stop=stop, abandon=abandon
        )
        ours.require()
        run.begin(asdict(Holder.present()))
        if not settings.once:
            # Who runs for months ends for no expired key, the less since what the target has is delivered by us.
            patient.wait_out_refusals()
        with beside(work, meter):
            work.work()
        ended = work.refused, work.missing, work.delivered, target.waiting
        return RunResult(place, run.run, run.counters, *ended, run.next_ms)
