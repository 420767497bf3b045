"""Histories of timers by seed: takers, runs that sleep or are killed, outages, cancels, retention, lost journals, clocks."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from support.timers import PLACE, PREFIX, SOURCE, Box, Killed, Timers, wheel_record

from backends.errors import BackendError
from backends.memory import MemoryStore
from backends.testing.faulty import READS, WRITES, Fault, FaultyStore, Rule, SimulatedCrash
from tiered.clock import ManualClock
from tiered.errors import FencedError, InvalidError, StoreUnavailableError
from tiered.log.timers import HOUR_MS
from tiered.upkeep import cancel_timer, expire, gc, rebuild
from tiered.upkeep.workplace import Workplace
from timer import dequeue, handover

if TYPE_CHECKING:
    from collections.abc import Callable

    from timer.handover import HandOver

SEEDS = 40
DEFECT_SEEDS = 150
FAULTS = (
    Rule(Fault.UNAVAILABLE, READS | WRITES, probability=0.2, times=3),
    Rule(Fault.LOST_ANSWER, WRITES, probability=0.3, times=2),
    Rule(Fault.LOST_REQUEST, WRITES, probability=0.3, times=2),
    Rule(Fault.CRASH_BEFORE, WRITES, probability=0.1),
    Rule(Fault.CRASH_AFTER, WRITES, probability=0.1),
)
ENDS = (Killed, SimulatedCrash, BackendError, StoreUnavailableError)


class History:
    """One history; ``live`` runs it, ``check`` says what is wrong with it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        clock = ManualClock(1_700_000_000_000 // HOUR_MS * HOUR_MS + rng.randrange(HOUR_MS))
        self.bare = MemoryStore(now_ms=clock.now_ms)
        self.store = FaultyStore(self.bare, rng)
        self.timers = Timers(self.store, clock)
        self.box = Box()
        self.run: HandOver | None = None
        self.paused: list[HandOver] = []
        self.dues: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.wrong: list[str] = []

    def at(self) -> Workplace:
        place, rng = PLACE, random.Random(self.rng.random())
        return Workplace(self.bare, self.bare, place, self.timers.clock, rng, give_up_s=5.0)

    def live(self) -> None:
        acts = [self.take, self.take, self.hand, self.hand, self.hand, self.pause, self.cancel]
        acts += [self.later, self.later, self.give_up, self.lose_journal]
        for _ in range(25):
            self.store.add(*(r for r in map(_copy, FAULTS) if self.rng.random() < 0.15))
            self.rng.choice(acts)()
            self.store.heal()
        self.timers.clock.advance(24 * 3600)
        self.box.dies = None
        self.box.fails.clear()
        self.begin()
        for _ in range(1_000):
            if not self.run or not self.run.step():
                break

    def check(self) -> list[str]:
        came = Counter(self.timers.messages(self.box))
        for key, due in self.dues.items():
            wanted = 0 if key in self.cancelled else 1
            if came[key] != wanted:
                self.wrong.append(f"{key[-4:]} (due {due}) came {came[key]} times, not {wanted}")
        return self.wrong

    def take(self) -> None:
        timers, base = self.timers, self.timers._next
        spread = [
            self.rng.randrange(-2 * HOUR_MS, 5 * HOUR_MS) for _ in range(self.rng.randint(1, 9))
        ]
        dues = [timers.now_ms + one for one in spread]
        records = [wheel_record(base + n, due) for n, due in enumerate(dues)]
        for n, due in enumerate(dues):
            self.dues[f"{base + n:032X}"] = due
        while timers._next == base:
            with contextlib.suppress(*ENDS, FencedError):
                timers.put_records(records)
            self.store.heal()
            journal = timers.journal()
            journal.catch_up()
            source = journal.state.timers.sources.get(SOURCE)
            if source and source.position == base + len(dues):
                timers._next = source.position

    def begin(self) -> None:
        self.let_go()
        self.run = run = self.timers.run(self.box, batch=self.rng.randint(1, 5))
        run.is_ours = lambda: run is self.run

    def let_go(self) -> None:
        if self.run:
            self.run.close()
        self.run = None

    def hand(self) -> None:
        self.box.dies = self.rng.choice([None, None, ("before", 0), ("within", 0), ("after", 1)])
        self.box.fails = self.rng.choice([[], [], [0], [2]])
        try:
            if self.run is None:
                self.begin()
            assert self.run is not None
            self.run.refresh()
            for _ in range(self.rng.randint(1, 6)):
                with contextlib.suppress(BackendError, StoreUnavailableError):
                    self.run.step()
        except ENDS:
            self.let_go()
        self.early()

    def early(self) -> None:
        limit = self.timers.now_ms + HOUR_MS
        late = [one for one in self.box.got if one.due_ms // HOUR_MS * HOUR_MS > limit + 1_200_000]
        if late:
            self.wrong.append(f"{len(late)} were given before the near window")

    def pause(self) -> None:
        """A run sleeps, another begins; now and then a sleeper wakes."""
        if self.run and self.rng.random() < 0.7:
            self.paused.append(self.run)
            self.run = None
        elif self.paused:
            sleeper = self.paused.pop(self.rng.randrange(len(self.paused)))
            given = len(self.box.got)
            with contextlib.suppress(*ENDS, FencedError):
                sleeper.step()
            if len(self.box.got) != given:
                self.wrong.append("a run that was over gave something")

    def cancel(self) -> None:
        key = self.rng.choice([*self.dues, "none"])
        with contextlib.suppress(InvalidError):
            if cancel_timer.cancel(self.at(), key):
                self.cancelled.add(key)

    def later(self) -> None:
        self.timers.clock.advance(self.rng.randrange(2 * 3600))
        self.timers.clock.jump(self.rng.choice([0, 0, -600, 600]))

    def give_up(self) -> None:
        at, grace = self.at(), self.rng.choice([0, HOUR_MS])
        plan = expire.plan_expire_timers(at, grace_ms=grace, objects_max=100)
        if plan.steps:
            expire.apply_steps(at, plan)
        found = gc.plan_gc(at.store, at.place, at.clock, grace_ms=grace, max_deletions=1_000)
        if found.steps and self.rng.random() < 0.5:
            gc.apply_gc(at, found)

    def lose_journal(self) -> None:
        if self.rng.random() < 0.6:
            return
        self.let_go()
        for info in list(self.bare.list(PREFIX + "journal/")):
            self.bare.delete(info.key)
        with ThreadPoolExecutor(1) as pool:
            plan = rebuild.plan_rebuild(self.bare, PREFIX, pool)
        if plan.damage:
            rebuild.apply_rebuild(self.at(), plan, accept_gaps=True)


def _copy(rule: Rule) -> Rule:
    return Rule(rule.fault, rule.operations, times=rule.times, probability=rule.probability)


def lived(seed: int) -> list[str]:
    history = History(seed)
    with history.timers:
        history.live()
        return history.check()


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_everything_comes_once_whatever_happens(first: int):
    for seed in range(first, first + 10):
        assert lived(seed) == [], seed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_by_many_seeds():
    for seed in range(1_000, 1_300):
        assert lived(seed) == [], seed


def nothing(*_: object, **_more: object) -> None:
    return None


OPEN = handover.HandOver._open
DEFECTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "the target is not asked": (
        handover.HandOver, "_not_there", lambda _self, _sweep, messages: messages,
    ),
    "nothing is known after a rebuild": (handover.FactsCopy, "keep", nothing),
    "a cancel is not known after a rebuild": (cancel_timer, "FactsCopy", lambda *_: Mock()),
    "retention looks at the time alone": (
        expire, "_is_handed", lambda state, hour: hour in state.timers.hours,
    ),
    "cancels are not looked at": (
        dequeue.np, "isin", lambda some, _others: dequeue.np.zeros(len(some), dequeue.np.bool_),
    ),
    "a sweep that was left behind is taken for a new one": (
        handover.HandOver, "_open", lambda self, hour, items, _: OPEN(self, hour, items, None),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*DEFECTS[name])
    assert any(is_bad(seed) for seed in range(DEFECT_SEEDS))


def is_bad(seed: int) -> bool:
    try:
        return bool(lived(seed))
    except Exception:  # noqa: BLE001 (whatever breaks)
        return True
