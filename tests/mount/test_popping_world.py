"""A small world of groups that pop, by seed: pops, acknowledgements, changes, lost answers, and crashes at every append.

Its oracle knows nothing of how a mount does it. It recomputes from what was given and answered alone: who holds a message
and until when, so that nobody else is given it; and which acknowledgements were answered, so that these never come again.
At the end all that is left is given and acknowledged: nothing is lost.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from backends.memory import MemoryStore
from backends.testing.faulty import WRITES, Fault, FaultyStore, Rule, SimulatedCrash
from tiered.clock import ManualClock
from tiered.errors import StoreUnavailableError
from tiered.mount.inflight import AckLog, QueuePops
from tiered.mount.offsets import Acknowledged, ConsumerOffsets, OffsetsKeeper, ack_row

if TYPE_CHECKING:
    from collections.abc import Iterable

SEEDS, STEPS, END = 40, 80, 24
GROUPS = ("g", "h")
NAMES = [(group, "t", queue_id) for group in GROUPS for queue_id in range(2)]
Name = tuple[str, str, int]


class Served:
    """A mount as far as it pops: the states, their log and the keeper, put together as ``Popper`` and ``Mount`` do."""

    def __init__(self, world: World) -> None:
        self.world = world
        seed = world.rng.getrandbits(32)
        self.keeper = OffsetsKeeper(
            world.store, world.store, "b/meta/mount/m/", world.clock, random.Random(seed),
            lease_s=10.0,
        )  # fmt: skip
        world.clock.advance(11)
        known = self.keeper.begin(wait=False, announce=lambda _: None, stop=self.waited)
        self.offsets = ConsumerOffsets(known)
        self.log = AckLog()
        acks = self.keeper.kept.acks
        self.states = {
            name: QueuePops(self.offsets.get(*name) or 0, acks.get(name)) for name in NAMES
        }
        self.waiting: list[tuple[Name, int]] = []
        """Acknowledgements that are to be answered when they are durable."""

    def waited(self, seconds: float) -> bool:
        self.world.clock.advance(seconds)
        return False

    def pop(self, name: Name, count: int, hidden_ms: int) -> None:
        state, now_ms = self.state(name), self.world.now_ms
        places = [at for low, high in state.again(now_ms, count) for at in range(low, high)]
        start, end = state.fresh()
        fresh = range(start, min(end, END, start + count - len(places)))
        places += [at for at in fresh if at not in state.given]
        state.next = max(state.next, fresh.stop) if fresh else state.next
        before = state.give(places, now_ms + hidden_ms, now_ms)
        if any(before):
            self.log.note(name)
        self.world.given(name, places, now_ms + hidden_ms)

    def state(self, name: Name) -> QueuePops:
        state, floor = self.states[name], self.offsets.get(*name) or 0
        if state.floor != floor:
            state.follow(floor)
            self.log.note(name)
        return state

    def acknowledge(self, name: Name, offset: int) -> None:
        state = self.state(name)
        if state.settle(offset, offset + 1):
            self.offsets.commit(*name, state.floor)
            self.log.note(name)
        if self.log.is_pending(name):
            self.waiting.append((name, offset))
        else:
            self.world.answered(name, offset)

    def hide(self, name: Name, offset: int, popped_ms: int, hidden_ms: int) -> None:
        now_ms = self.world.now_ms
        if self.state(name).hide(offset, popped_ms, now_ms + hidden_ms, now_ms):
            self.world.hidden(name, offset, popped_ms, now_ms + hidden_ms)

    def save(self) -> None:
        rows = self.offsets.take_changes()
        changed, _ = self.log.take()
        waiting, self.waiting = self.waiting, []
        acks = [ack_row(name, self.states[name].kept()) for name in sorted(changed)]
        try:
            if rows or acks:
                self.keeper.save(rows, acks)
        except StoreUnavailableError:
            self.offsets.put_back(rows)
            self.log.done(is_written=False)
            self.waiting = waiting + self.waiting
            raise
        self.log.done(is_written=True)
        for name, offset in waiting:
            self.world.answered(name, offset)


class World:
    """What everybody outside knows."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.bare = MemoryStore()
        self.store = FaultyStore(self.bare, self.rng)
        self.held: dict[tuple[Name, int], tuple[int, int]] = {}
        """Until when somebody has a message for himself, and the time by which he names it."""
        self.acknowledged: set[tuple[Name, int]] = set()
        self.pulled: set[tuple[Name, int]] = set()
        """Below what a consumer said that pulls: they may come again, and need not."""
        self.counts: Counter[str] = Counter()
        self.mount = Served(self)

    @property
    def now_ms(self) -> int:
        return int(self.clock.now_ms())

    def given(self, name: Name, places: Iterable[int], until_ms: int) -> None:
        for place in places:
            key = name, place
            assert key not in self.acknowledged, f"{key} was acknowledged, and comes again"
            assert self.held.get(key, (0, 0))[0] < self.now_ms, f"{key} is another's"
            self.held[key] = until_ms, self.now_ms
            self.counts["given"] += 1

    def hidden(self, name: Name, place: int, popped_ms: int, until_ms: int) -> None:
        held_ms, known_ms = self.held[name, place]
        assert popped_ms == known_ms or held_ms < self.now_ms, f"{name} {place} is another's"
        self.held[name, place] = until_ms, self.now_ms

    def answered(self, name: Name, place: int) -> None:
        self.acknowledged.add((name, place))

    # -- what happens -----------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        self.clock.advance(rng.choice((0.001, 0.01, 0.4, 2.0)))
        what = rng.choices(
            (self.pop, self.acknowledge, self.hide, self.save, self.pull, self.crash),
            (6, 9, 3, 4, 0.3, 1),
        )
        what[0]()

    def pop(self) -> None:
        hidden_ms = self.rng.choice((0, 300, 3000, 60_000))
        self.mount.pop(self.rng.choice(NAMES), self.rng.randint(1, 5), hidden_ms)

    def acknowledge(self) -> None:
        """Also what is acknowledged already, or another's by now."""
        if self.held:
            name, place = self.rng.choice(sorted(self.held))
            self.mount.acknowledge(name, place)

    def hide(self) -> None:
        if self.held:
            name, place = self.rng.choice(sorted(self.held))
            late = self.rng.choice((0, 0, 1))
            self.mount.hide(
                name, place, self.held[name, place][1] - late, self.rng.choice((0, 2000))
            )
            self.counts["late"] += late

    def save(self) -> None:
        self.mount.save()

    def pull(self) -> None:
        """A consumer of the group pulls, and says where it is."""
        name = self.rng.choice(NAMES)
        offset = min(self.mount.states[name].floor + self.rng.randint(1, 3), END)
        self.mount.offsets.commit(*name, offset)
        self.pulled |= {(name, place) for place in range(offset)}
        self.counts["pulled"] += 1

    def crash(self) -> None:
        """At a write, before it or behind it, or between any; what was held is nobody's any more."""
        kind = self.rng.choice((None, Fault.CRASH_BEFORE, Fault.CRASH_AFTER))
        if kind is not None:
            self.store.add(Rule(kind, WRITES, skip=self.rng.randint(0, 1)))
            try:
                self.mount.save()
            except SimulatedCrash:
                self.counts["in a write"] += 1
            self.store.heal()
        self.held = {key: (0, popped_ms) for key, (_, popped_ms) in self.held.items()}
        self.mount = Served(self)
        self.counts["crashes"] += 1

    def settle(self) -> None:
        """Everything that is left comes, and can be acknowledged."""
        for _ in range(200):
            self.clock.advance(61)
            for name in NAMES:
                self.mount.pop(name, 5, 300)
            for name, place in sorted(self.held):
                if (name, place) not in self.acknowledged:
                    self.mount.acknowledge(name, place)
            self.mount.save()
        whole = {(name, place) for name in NAMES for place in range(END)}
        assert whole == self.acknowledged | self.pulled
        assert [self.mount.offsets.get(*name) for name in NAMES] == [END] * len(NAMES)
        assert not self.mount.keeper.kept.acks


def run(seed: int) -> Counter[str]:
    async def inside() -> Counter[str]:  # a log is of a loop
        world = World(seed)
        for _ in range(STEPS):
            world.step()
        world.settle()
        return world.counts

    return asyncio.run(inside())


def test_nothing_is_given_twice_at_a_time_nor_after_it_was_acknowledged_and_nothing_is_lost():
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        counts += run(seed)
    assert all(
        counts[what] >= SEEDS // 4 for what in ("given", "late", "crashes", "pulled", "in a write")
    )


def forgotten(self: AckLog, name: Name) -> None:
    """A change while nothing else waits to be written."""
    if self._changed:
        self._changed.add(name)


def never_pending(_self: AckLog, _name: Name) -> bool:
    return False


def late_is_believed(
    self: QueuePops, offset: int, _popped_ms: int, until_ms: int, now_ms: int
) -> bool:
    one = self.given.get(offset)
    return HIDE(self, offset, one.popped_ms if one else 0, until_ms, now_ms)


def visible_at_once(
    self: QueuePops, places: Iterable[int], _until_ms: int, now_ms: int
) -> list[int]:
    return GIVE(self, places, now_ms, now_ms)


def fresh_again(self: QueuePops) -> tuple[int, int]:
    self.next = self.floor
    return self.floor, END


def floor_alone(_self: QueuePops) -> Any:
    return Acknowledged()


HIDE, GIVE = QueuePops.hide, QueuePops.give
DEFECTS: dict[str, tuple[type, str, Any]] = {
    "an acknowledgement is answered before it is durable": (AckLog, "is_pending", never_pending),
    "an acknowledgement is forgotten": (AckLog, "note", forgotten),
    "what lies above the floor is forgotten": (QueuePops, "kept", floor_alone),
    "an invisible message is given twice": (QueuePops, "give", visible_at_once),
    "who had a message before hides it from who has it": (QueuePops, "hide", late_is_believed),
    "what was given is taken for new": (QueuePops, "fresh", fresh_again),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_that_are_planted_are_found(monkeypatch: pytest.MonkeyPatch, defect: str):
    owner, name, made = DEFECTS[defect]
    monkeypatch.setattr(owner, name, made)
    found = 0
    for seed in range(SEEDS):
        try:
            run(seed)
        except AssertionError:
            found += 1
    assert found
