"""Any damage of entries and records, by seeds, in stopped and running stores; and planted defects that this finds."""

from __future__ import annotations

import random
import shutil
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from support import following
from support.broker_files import LOG_FILE_BYTES, START_MS, TOPIC, FakeBroker
from support.following import flip_entry

from tiered.clock import ManualClock
from tiered.format.properties import tag_hash
from tiered.local import views
from tiered.local.classification import AnomalyCounters, Case
from tiered.local.interface import Waiting
from tiered.local.orphan_records import OrphanRecords
from tiered.local.queue_reader import TagRule
from tiered.local.views import LiveView
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = 60
Key = tuple[MessageQueue, int]


class World:
    """A store, what is in it, and what was done to it."""

    def __init__(self, seed: int, store: Path) -> None:
        self.dice = random.Random(seed)
        self.broker = FakeBroker(store)
        self.clock = ManualClock()
        self.is_live = seed % 3 != 0
        self.queues = self.dice.choice([1, 2, 3])
        self.raws: dict[Key, bytes] = {}
        self.places: dict[Key, int] = {}
        self.lost: set[Key] = set()
        self.wrong_tags: set[Key] = set()
        self.wrong_places: set[Key] = set()

    def put(self, count: int) -> None:
        for _ in range(count):
            size = self.dice.choice([100, 100, 100, 30, 300])
            self.append(self.dice.randrange(self.queues), b"x" * size)
            self.broker.now_ms += 10
        self.broker.dispatch()

    def append(self, queue_id: int, body: bytes) -> None:
        queue = MessageQueue(TOPIC, queue_id)
        key = queue, self.broker.offsets.get(queue, 0)
        self.raws[key] = self.broker.append(queue_id, body)
        self.places[key] = self.broker.position - len(self.raws[key])

    def hit_entry(self) -> None:
        """A bit of an entry, or all of one that others stand behind."""
        key = queue, offset = self.dice.choice(sorted(self.raws))
        bit = self.dice.choice([self.dice.randrange(64), self.dice.randrange(64, 160), -1])
        if bit >= 0:
            flip_entry(self.broker.store, queue, offset, bit)
        elif (queue, offset + 1) in self.raws:
            self.broker.write_entry(queue, offset, 0, 0)
        (self.wrong_tags if 0 <= bit < 64 else self.wrong_places).add(key)

    def hit_records(self, first: int, count: int) -> None:
        """Some records, in log order, no bit of which is seen but by their checks."""
        newest = (self.broker.position - 1) // LOG_FILE_BYTES * LOG_FILE_BYTES
        for key in sorted(self.places, key=lambda one: self.places[one])[first : first + count]:
            if self.is_live or self.places[key] < newest:  # else a start would cut the log there
                self.broker.write_log(self.places[key] + 95, b"!!!!")
                self.lost.add(key)

    def live(self) -> None:
        """Records before the damage, and one behind it; sometimes nothing shows that the log goes on behind the damage."""
        self.broker.start(START_MS)
        self.put(self.dice.choice([10, 30, 90]))
        if self.dice.random() < 0.5:
            self.broker.crash()
            self.broker.start(self.broker.now_ms + 60_000)
        for _ in range(self.dice.randrange(4)):
            self.hit_entry()
        for _ in range(self.dice.randrange(2)):
            self.hit_records(self.dice.randrange(len(self.raws)), self.dice.choice([1, 2, 30]))
        self.broker.now_ms += 5000
        for number in range(40 * self.queues):  # each goes on behind what was hit
            self.append(number % self.queues, b"x" * 100)
        self.broker.dispatch()
        self.broker.now_ms += 5000
        self.put(1)
        if not self.is_live:
            self.broker.stop()

    def check(self) -> None:
        """All that is sound is there, as it was, with its tag code; the rest is holes."""
        store = following.open_store(self.broker.store, self.clock)
        taken, follower = following.Taken(), store.follow({})
        for _ in range(4):
            following.drain(follower, taken, 3_000)
            self.clock.advance(10)
            store.refresh()
        for found in (taken, following.read_all(store)):
            given = {
                (queue, at): raw for queue, one in found.raw.items() for at, raw in one.items()
            }
            assert given == {key: raw for key, raw in self.raws.items() if key not in self.lost}
            holes = {(queue, at) for queue, one in found.holes.items() for at in one}
            assert holes == self.lost
            codes = {one.tag_code for some in found.messages.values() for one in some.values()}
            assert codes == {tag_hash("a")}
        hidden = self.lost | self.wrong_places
        assert store.report().wrong_tag_codes >= len(self.wrong_tags - hidden)
        assert store.waiting().records == 0
        store.close()


def run_seed(seed: int) -> None:
    folder = Path(mkdtemp(prefix="tiered-planted-"))
    world = World(seed, folder / "store")
    try:
        world.live()
        world.check()
    finally:
        world.broker.close()
        shutil.rmtree(folder)


def run_cut_log() -> None:
    """A broker that has cut its log says for a moment what it said before; nothing of the cut may come by that."""
    folder = Path(mkdtemp(prefix="tiered-planted-"))
    broker, clock = FakeBroker(folder / "store"), ManualClock()
    try:
        broker.start(START_MS)
        broker.put(10)
        end, told = broker.position, []
        broker.put(5)
        before = broker.position
        broker.crash()
        broker.write_log(end + 95, b"!!!!")
        broker.start(START_MS + 60_000)
        store = following.open_store(
            broker.store, clock, broker_max_offset=lambda: told[0] if told else before
        )
        following.drain(store.follow({}), taken := following.Taken())
        assert taken.count() == 10
        told.append(end)
        clock.advance(10)
        store.refresh()
        assert following.follow_all(store).count() == 10
        store.close()
    finally:
        broker.close()
        shutil.rmtree(folder)


def run_unproven() -> None:
    """Damage before what is listed, and nothing newer: it is told."""
    folder = Path(mkdtemp(prefix="tiered-planted-"))
    broker, clock = FakeBroker(folder / "store"), ManualClock()
    try:
        broker.start(START_MS)
        broker.put(20)
        broker.write_log(broker.position - 199 * 5 + 95, b"!!!!")
        broker.crash()
        broker.start(START_MS + 60_000)
        store = following.open_store(broker.store, clock)
        store.refresh()
        assert store.waiting().records == 5
        store.close()
    finally:
        broker.close()
        shutil.rmtree(folder)


def run_offset_range() -> None:
    """More records in a row are damaged than the next few entries of their queue name."""
    folder = Path(mkdtemp(prefix="tiered-planted-"))
    broker, clock = FakeBroker(folder / "store"), ManualClock()
    try:
        broker.start(START_MS)
        broker.put(4)
        first = broker.position
        broker.put(18)
        for number in range(18):
            broker.write_log(first + 199 * number + 95, b"!!!!")
        broker.put(18)  # in the same file
        store = following.open_store(broker.store, clock)
        following.drain(store.follow({}), taken := following.Taken())
        assert len(taken.raw[MessageQueue(TOPIC, 0)]) == 22
        store.close()
    finally:
        broker.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_any_damage_of_entries_and_records_costs_what_is_damaged(first: int):
    for seed in range(first, first + 10):
        run_seed(seed)


@pytest.mark.parametrize("run", [run_cut_log, run_unproven, run_offset_range])
def test_what_stands_behind_damage(run: Callable[[], None]):
    run()


# -- planted defects ------------------------------------------------------------------------------


def _next_few_only(self: LiveView, told: int) -> int:
    states = list(self.catalog.states.values())
    return min((self._proven_in(state, state.end, told) for state in states), default=views.FAR)


def _nothing_fits(_self: OrphanRecords, _state: Any, orphans: Any, *_around: Any) -> Any:
    return np.full(len(orphans), Case.DROPPED), np.full(len(orphans), -1)


DEFECTS: dict[str, Callable[[], Any]] = {
    "tag codes as entries have them": lambda: mock.patch.object(TagRule, "apply"),
    "wrong tag codes are not counted": lambda: mock.patch.object(AnomalyCounters, "wrong_tag_code"),
    "records of damaged entries are not searched for": lambda: mock.patch.object(
        OrphanRecords, "search", return_value=False
    ),
    "they are searched for and do not count": lambda: mock.patch.object(
        OrphanRecords, "classify", _nothing_fits
    ),
    "nothing of what is searched is read again": lambda: mock.patch.object(
        OrphanRecords, "_look", return_value=False
    ),
    "only the next few entries prove anything": lambda: mock.patch.object(
        LiveView, "_first_proven", _next_few_only
    ),
    "what is behind damage is not told": lambda: mock.patch.object(
        LiveView, "_count_behind", return_value=Waiting()
    ),
    "what the broker said before its start counts": lambda: mock.patch.object(
        views, "_TOLD_AFTER_S", 0.0
    ),
}


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_a_planted_defect_is_found(name: str):
    with ExitStack() as patches:
        patches.enter_context(DEFECTS[name]())
        assert is_found()


def is_found() -> bool:
    runs: list[Callable[[], None]] = [run_cut_log, run_unproven, run_offset_range]
    runs += [lambda seed=seed: run_seed(seed) for seed in range(SEEDS)]  # type: ignore[misc]
    for run in runs:
        try:
            run()
        except AssertionError:
            return True
    return False
