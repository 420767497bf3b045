"""Timers in the simulation: those who take them and those who hand them over, killed, asleep and beside each other.

The real ``TimerFollower``'s work and the real hand-over run as actors over the same bad store as writers do: each request
takes time, may fail, may land late, and whoever sends it may be killed or put to sleep just then. What came into the
broker's wheel comes out once, whatever happens, and nothing of it before the near window.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from simulation.process import DISPATCH, SimStore
from simulation.runner import one_processor
from simulation.scheduler import Owner, Scheduler, SimClock, SimLock
from support.synthetic import SyntheticStore
from support.timers import SOURCE, Box, wheel_batch, wheel_record

from backends.errors import BackendError
from backends.memory import MemoryStore
from backends.testing.faulty import READS, WRITES, Fault, FaultyStore, Rule, SimulatedCrash
from tiered.api.broker_place import Place, take_lease, timers_of
from tiered.api.stores import with_retries
from tiered.attach.timer_import import ImportSettings, _Taking
from tiered.attach.timer_run import LEASE_S, RUN, KeptLease
from tiered.errors import ClosedError, FencedError, StoreUnavailableError
from tiered.format.record import decode_record
from tiered.journal.append import JournalWriter
from tiered.journal.lease import Holder, Lease
from tiered.keys import JOURNAL
from tiered.log.state import TierMachine, TierState
from tiered.log.timers import HOUR_MS
from tiered.model import QueueBounds, QueueOffset
from timer.dequeue import TimerReader
from timer.handover import HandOver
from timer.hour_files import Given

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tiered.local.interface import RecordBatch
    from tiered.model import MessageQueue
    from timer.dequeue import DueMessage

SEEDS, MANY = 30, 600
END_S = 60.0
"""Virtual seconds of bad luck."""
STUCK_S = 3_000.0
NEAR_MS = 2 * HOUR_MS
_ENDS = (BackendError, StoreUnavailableError, FencedError, ClosedError)


class Wheel(SyntheticStore):
    """A broker's wheel that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[bytes] = []

    def queues(self) -> dict[MessageQueue, QueueBounds]:
        return {SOURCE: QueueBounds(QueueOffset(0), QueueOffset(len(self.records)))}

    def read(self, _queue: object, at: int, *, count_max: int, **_: object) -> RecordBatch:  # type: ignore[override]
        return wheel_batch(at, self.records[at : at + min(count_max, 5)])


class Target(Box):
    """Time passes before a batch is taken and behind it, so that a kill may fall there; and an answer may be lost."""

    def __init__(self, world: TimedWorld) -> None:
        super().__init__()
        self._world = world

    def give(self, messages: Sequence[DueMessage]) -> list[int]:
        rng = self._world.rng
        if not self._world.is_healed and rng.random() < 0.2:
            self.fails = [rng.randrange(len(messages) + 1)]
        limit_ms = self._world.clock.now_ms() + NEAR_MS
        self._world.early += sum(one.due_ms // HOUR_MS * HOUR_MS > limit_ms for one in messages)
        refused = super().give(messages)
        self._world.scheduler.park(rng.random())
        return refused


class Timekeeper(Owner):
    """A process that takes timers, or hands them over."""

    def __init__(self, world: TimedWorld, name: str) -> None:
        super().__init__(name)
        self.world, self.ended = world, False
        self.rng = random.Random(world.rng.getrandbits(64))
        self.clock = SimClock(world.scheduler)
        self.stop = threading.Event()
        self.bare: Any = SimStore(self)  # type: ignore[arg-type]
        self.store: Any = with_retries(self.bare, self.clock, self.rng, self.stop, lambda: None)

    def live(self) -> None:
        """Body of its thread; an operator starts another when it ends."""
        try:
            self.work()
        except (SimulatedCrash, *_ENDS):
            pass
        except BaseException as error:  # noqa: BLE001 (a defect)
            self.world.scheduler.fail(error)
        finally:
            self.ended = True

    def work(self) -> None:
        raise NotImplementedError


class Taker(Timekeeper):
    """Looks again and again, as ``attach --timers`` does."""

    def work(self) -> None:
        world = self.world
        settings = ImportSettings(near_ms=world.near_ms, wait=True, dispatch=world.dispatch)
        taking = _Taking(
            world.wheel, world.directory, self.bare, self.store, world.place, settings, self.clock,
            self.rng, self.stop,
        )  # fmt: skip
        taking._journal._lock = SimLock(world.scheduler)  # type: ignore[assignment]
        while True:
            is_last, seen = world.is_healed, len(world.wheel.records)  # a run takes what it finds
            total = taking.run(is_incremental=True).total
            world.met["taken"] += total.taken
            world.taken_to = max(world.taken_to, seen if is_last else 0)
            world.scheduler.park(self.rng.expovariate(0.5))
            taking.renew()


class Giver(Timekeeper):
    """``timer run``, without its wheel."""

    def work(self) -> None:
        world, clock = self.world, self.clock
        writer = f"{self.rng.getrandbits(32):08x}"
        journal: JournalWriter[TierState] = JournalWriter(
            self.bare, world.place.prefix, TierMachine(), writer=writer, clock=clock, rng=self.rng,
            stop=self.stop,
        )  # fmt: skip
        journal._lock = SimLock(world.scheduler)  # type: ignore[assignment]
        lease = Lease(
            self.store, world.place.prefix + RUN, writer=writer, holder=Holder(self.name, "", "", 1, 0),
            seconds=LEASE_S, clock=clock, known=lambda: journal.end,
        )  # fmt: skip
        take_lease(lease, clock, self.stop, wait=True)
        ours = KeptLease(lease, clock)
        with ours.kept():
            journal.catch_up()
            run = HandOver(
                TimerReader(self.store, world.place.prefix), journal, world.target, NEAR_MS, clock,
                ours.is_ours, batch=self.rng.randint(1, 6),
            )  # fmt: skip
            with contextlib.closing(run):
                run.begin({"host": self.name, "pid": 1})
                while True:
                    ours.require()
                    with contextlib.suppress(BackendError, StoreUnavailableError):
                        run.refresh()
                        while run.step():
                            world.met["batch"] += 1
                    world.scheduler.park(self.rng.expovariate(1.0))


class TimedWorld:
    """One run. What ``SimStore`` asks of a world is here as well."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.directory = str(directory / "no store")
        self.scheduler = Scheduler(rng)
        self.clock = SimClock(self.scheduler)
        self.ledger = MemoryStore(now_ms=self.clock.now_ms)
        self.faulty = FaultyStore(self.ledger, random.Random(seed + 1))
        self.place = timers_of(Place("c", "b"))
        self.wheel, self.target = Wheel(), Target(self)
        self.near_ms = rng.choice((0, 0, HOUR_MS))
        self.dispatch = replace(DISPATCH, bundle_bytes=rng.choice((700, 1500, 4000)))
        self.is_calm, self.is_healed = False, False
        self.has_collected_probes, self.slowness = False, rng.choice((0.0, 0.02, 0.1))
        self.page_keys = rng.choice((3, 1000))
        self.dues: list[int] = []
        self.keepers: list[Timekeeper] = []
        self.late: list[Callable[[], object]] = []
        self.met: Counter[str] = Counter()
        self.early = self.taken_to = 0
        self._drama = rng.choice((0.0, 0.05, 0.15))
        self.scheduler.operate = self._operate
        for fault in (Fault.UNAVAILABLE, Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.LATE):
            often = rng.choice((0.0, 0.03, 0.1))
            operations = WRITES | READS if fault is Fault.UNAVAILABLE else WRITES
            self.faulty.add(Rule(fault, operations, times=None, probability=often))

    def run(self) -> None:
        self._grow()
        self._begin(Taker)
        self._begin(Giver)
        with (
            mock.patch("tiered.journal.append.CHECKPOINT_ENTRIES", 3),
            mock.patch("tiered.attach.timer_import._made_ahead", iter),  # its thread is no actor
            mock.patch("tiered.attach.timer_import._Taking._delivered", return_value=Given()),
        ):
            self.scheduler.run()

    def check(self) -> list[str]:
        """What is wrong. What was near when it was looked at has stayed with the broker, so it need not come."""
        came = Counter(decode_record(m.record, 0).properties["UNIQ_KEY"] for m in self.target.got)
        now_ms = self.clock.now_ms()
        wrong = [f"{self.early} came before the near window"] if self.early else []
        for number, due in enumerate(self.dues):
            key, begins_ms = f"{number:032X}", due // HOUR_MS * HOUR_MS
            is_due = begins_ms <= now_ms - 60_000 + NEAR_MS
            if came[key] > 1 or (is_due and not self.near_ms and not came[key]):
                wrong.append(f"{key[-3:]}, due in {due - now_ms} ms, came {came[key]} times")
        return wrong

    # -- what a connection asks -----------------------------------------------------------------

    def count(self, what: str) -> None:
        self.met[what] += 1

    def leave_behind(self, _sender: Owner, write: Callable[[], object]) -> None:
        self.late.append(write)

    def spoil_merge(self, _key: str, _body: bytes) -> float:
        return 1.0

    def dramatise(self, keeper: Owner, key: str) -> None:
        """An entry is sent: the best moment to stop or to kill who sends it."""
        if self.is_healed or JOURNAL not in key or self.rng.random() >= self._drama:
            return
        if self.rng.random() < 0.6:
            keeper.paused = True
            self.count("pause")
        else:
            keeper.dead = True
            self.count("kill")

    # -- operations -----------------------------------------------------------------------------

    def _operate(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        if self.is_healed:
            self._finish()
            return
        if scheduler.now_s >= END_S:
            self._heal()
            return
        rng.choice((self._grow, self._kill, self._pause, self._wake, self._wake, self._land))()
        for kind in (Taker, Giver):
            alive = [one for one in self._alive() if isinstance(one, kind)]
            if not alive or (len(alive) < 3 and rng.random() < 0.1):
                self._begin(kind)
        scheduler.next_operation_s = scheduler.now_s + rng.expovariate(0.7)

    def _alive(self) -> list[Timekeeper]:
        return [one for one in self.keepers if not (one.dead or one.ended)]

    def _begin(self, kind: type[Timekeeper]) -> None:
        keeper = kind(self, f"{kind.__name__}{len(self.keepers)}")
        self.keepers.append(keeper)
        self.scheduler.owners.append(keeper)
        self.scheduler.spawn(keeper, keeper.name, keeper.live)
        self.count("start")

    def _grow(self) -> None:
        now_ms, base = self.clock.now_ms(), len(self.wheel.records)
        for number in range(self.rng.randint(1, 9)):
            due = now_ms + self.rng.randrange(-HOUR_MS, 3 * HOUR_MS)
            self.dues.append(due)
            self.wheel.records.append(wheel_record(base + number, due))

    def _kill(self) -> None:
        if (alive := self._alive()) and self.rng.random() < 0.5:
            self.rng.choice(alive).dead = True
            self.count("kill")

    def _pause(self) -> None:
        if alive := self._alive():
            self.rng.choice(alive).paused = True
            self.count("pause")

    def _wake(self) -> None:
        for keeper in self.keepers:
            keeper.paused = keeper.paused and self.rng.random() < 0.7

    def _land(self) -> None:
        self.faulty.land_late(1)
        if self.late:
            with contextlib.suppress(BackendError):
                self.late.pop(self.rng.randrange(len(self.late)))()

    def _heal(self) -> None:
        """All luck is good from now on: sleepers wake, and one more of each kind brings everything to its end."""
        self.is_healed = True
        self.faulty.heal()
        for keeper in self._alive():
            keeper.paused = False
        self._begin(Taker)
        self._begin(Giver)
        self.scheduler.next_operation_s = self.scheduler.now_s + 5.0

    def _finish(self) -> None:
        """End everybody as soon as all came; who is not ready in time is stuck, and ``check`` says what is missing."""
        scheduler = self.scheduler
        for kind in (Taker, Giver):
            if not any(isinstance(one, kind) for one in self._alive()):
                self._begin(kind)
        is_stuck = scheduler.now_s > END_S + STUCK_S
        if is_stuck or (self.taken_to == len(self.wheel.records) and self._is_level()):
            for keeper in self.keepers:
                keeper.dead = True
            scheduler.next_operation_s = float("inf")
        else:
            scheduler.next_operation_s = scheduler.now_s + 20.0

    def _is_level(self) -> bool:
        """Nothing that is near is left in the files."""
        reader = TimerReader(self.ledger, self.place.prefix)
        reader.refresh()
        near = [row for row in reader.listing() if row.hour_ms - NEAR_MS <= self.clock.now_ms()]
        return not near


def lived(seed: int, folder: Path) -> TimedWorld:
    world = TimedWorld(seed, folder)
    logging.disable(logging.CRITICAL)
    try:
        world.run()
    finally:
        logging.disable(logging.NOTSET)
    assert world.check() == [], f"seed {seed}"
    return world


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_each_timer_comes_once(first: int, tmp_path: Path):
    met: Counter[str] = Counter()
    for seed in range(first, first + 10):
        met += lived(seed, tmp_path).met
    assert min(met[what] for what in ("taken", "batch", "kill", "pause")) > 10, met


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_timer_comes_once_by_many_seeds(tmp_path: Path):
    one_processor()
    for seed in range(1_000, 1_000 + MANY):
        lived(seed, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "the target is not asked",
        pytest.param("a sleeper gives all the same", marks=pytest.mark.slow),
    ],
)
def test_a_planted_defect_is_found(name: str, tmp_path: Path):
    defects: dict[str, tuple[object, str, Callable[..., object]]] = {
        "the target is not asked": (HandOver, "_not_there", lambda _self, _sweep, some: some),
        "a sleeper gives all the same": (KeptLease, "is_ours", lambda _self: True),
    }
    with mock.patch.object(*defects[name]):
        assert any(is_bad(seed, tmp_path) for seed in range(200))


def is_bad(seed: int, folder: Path) -> bool:
    try:
        lived(seed, folder)
    except AssertionError:
        return True
    return False
