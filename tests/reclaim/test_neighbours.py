"""Two of everything: brokers of a tier, and topics, whose names differ by case or begin alike.

By seed a person writes, deletes a topic, expires one, takes a queue's end back, collects, erases, breaks a lease, or
rebuilds a lost journal, for one broker and mostly for one topic. After each deed every object of every other broker is byte
for byte what it was, and every other topic of the broker has the same messages, bounds and gaps. (What mounts and their
groups keep is held apart by ``tests/mount/test_offsets_world.py``.)
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from support.edges import planted
from support.tiers import TierBuilder, batch_of

from backends.local import LocalFolderStore
from backends.memory import MemoryStore
from tiered.api.broker_place import Place
from tiered.clock import ManualClock, SystemClock
from tiered.errors import InvalidError
from tiered.keys import JOURNAL
from tiered.log import expiry
from tiered.log.reader import TierReader
from tiered.log.state import Gap
from tiered.model import MessageQueue, QueueOffset
from tiered.upkeep import expire as upkeep_expire
from tiered.upkeep.expire import (
    apply_steps,
    apply_truncate,
    plan_delete_topic,
    plan_expire,
    plan_truncate,
)
from tiered.upkeep.gc import apply_erasure, apply_gc, plan_gc
from tiered.upkeep.rebuild import apply_rebuild, plan_rebuild
from tiered.upkeep.workplace import Workplace, break_lease

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from backends.base import ObjectStore

PLACES = tuple(Place(*names) for names in (("c", "b"), ("c", "B"), ("c", "b2"), ("c2", "b")))
TOPICS = ("orders", "ORDERS", "orders2", "order")
SEEDS, STEPS = 5, 50
Objects = dict[str, bytes]
Content = dict[str, list[Any]]


class World:
    """One run, on a store of any kind."""

    def __init__(self, seed: int, store: ObjectStore) -> None:
        self.rng, self.store = random.Random(seed), store
        self.clock = ManualClock(SystemClock().now_ms())  # (a folder dates its files itself)
        self.met: Counter[str] = Counter()
        for place in PLACES:
            for topic in TOPICS:
                self.write(place, topic)

    def run(self) -> None:
        deeds = (
            *(self.write, self.write, self.write, self.delete, self.expire, self.truncate),
            *(self.collect, self.erase, self.break_lease, self.rebuild),
        )
        for _ in range(STEPS):
            self.do(self.rng.choice(deeds), self.rng.choice(PLACES), self.rng.choice(TOPICS))

    def do(self, deed: Any, place: Place, topic: str) -> None:
        """One deed, and what it may not touch."""
        self.clock.advance(1)  # so that all there is is old
        objects, content = self.objects(without=place), self.content(place)
        with contextlib.suppress(InvalidError):  # no such topic
            deed(place, topic)
            self.met[deed.__name__] += 1
        what = f"{deed.__name__} of {topic} of {place}"
        assert objects == self.objects(without=place), f"{what} touches another broker's objects"
        now = self.content(place)
        is_all = deed == self.rebuild  # what only the journal knew of any topic is lost with it
        for other in () if is_all else content.keys() - {topic}:
            assert now.get(other) == content[other], f"{what} touches {other}"

    # -- what there is --------------------------------------------------------------------------

    def objects(self, *, without: Place) -> Objects:
        keys = [info.key for info in self.store.list("")]
        return {key: self.store.get(key) for key in keys if not key.startswith(without.prefix)}

    def content(self, place: Place) -> Content:
        """Of each topic all incarnations of its queues: bounds, gaps, and every record."""
        reader = TierReader(self.store, place.prefix)
        reader.refresh()
        found: Content = {}
        for queue, incarnations in sorted(reader.state.queues.items()):
            for one, incarnation in zip(reader.incarnations(queue), incarnations, strict=True):
                some = [*one.batches(QueueOffset(incarnation.min_offset))]
                data = [bytes(part.records.data) for part in some if not isinstance(part, Gap)]
                gaps = [(part.start, part.end) for part in some if isinstance(part, Gap)]
                bounds = incarnation.number, incarnation.min_offset, incarnation.commit_offset
                found.setdefault(queue.topic, []).append((queue, bounds, gaps, b"".join(data)))
        return found

    # -- what is done ---------------------------------------------------------------------------

    def at(self, place: Place) -> Workplace:
        rng = random.Random(self.rng.getrandbits(64))
        return Workplace(self.store, self.store, place, self.clock, rng)

    def write(self, place: Place, topic: str) -> None:
        """A writer that dies at once: a few bundles, with other topics' messages in one of them."""
        break_lease(self.store, place.prefix, self.clock, breaker=self.at(place).new_id())
        builder = TierBuilder(
            self.store, writer=f"{self.rng.getrandbits(32):08x}", prefix=place.prefix
        )
        for _ in range(self.rng.randrange(1, 4)):
            queue = MessageQueue(topic, self.rng.randrange(2))
            bodies = [self.rng.randbytes(9) for _ in range(self.rng.randrange(1, 4))]
            base = builder.file(queue).append_offset
            builder.add_batch(batch_of(base, bodies, queue=queue), roll=self.rng.random() < 0.6)

    def delete(self, place: Place, topic: str) -> None:
        at = self.at(place)
        apply_steps(at, plan_delete_topic(at, topic, objects_max=99))

    def expire(self, place: Place, topic: str) -> None:
        at = self.at(place)
        apply_steps(at, plan_expire(at, {topic: 0}.get, objects_max=99))

    def truncate(self, place: Place, topic: str) -> None:
        at, queue = self.at(place), MessageQueue(topic, self.rng.randrange(2))
        plan = plan_truncate(at, queue, self.rng.randrange(1, 6))
        self.met["truncated"] += len(plan.steps)
        if plan.steps:
            apply_truncate(at, plan)

    def collect(self, place: Place, _topic: str) -> None:
        self.met["deleted"] += apply_gc(self.at(place), self.to_collect(place))["deleted"]

    def erase(self, place: Place, _topic: str) -> None:
        plan = self.to_collect(place, erases=True)
        self.met["erased"] += len(plan.erasures)
        apply_erasure(self.at(place), plan)
        apply_gc(self.at(place), plan)

    def to_collect(self, place: Place, *, erases: bool = False) -> Any:
        return plan_gc(
            self.store, place, self.clock, grace_ms=0, max_deletions=10_000, erases=erases
        )

    def break_lease(self, place: Place, _topic: str) -> None:
        break_lease(self.store, place.prefix, self.clock, breaker=self.at(place).new_id())

    def rebuild(self, place: Place, topic: str) -> None:
        """The journal is lost; what had been given up, and is still there, may be back."""
        self.collect(place, topic)  # so nothing is
        with ThreadPoolExecutor(2) as pool:
            for info in list(self.store.list(place.prefix + JOURNAL)):
                self.store.delete(info.key)
            plan = plan_rebuild(self.store, place.prefix, pool)
        apply_rebuild(self.at(place), plan, accept_gaps=True)


def memory() -> MemoryStore:
    return MemoryStore(now_ms=SystemClock().now_ms)


@contextlib.contextmanager
def opened(kind: str, folder: Path) -> Iterator[ObjectStore]:
    with contextlib.closing(
        LocalFolderStore(str(folder)) if kind == "folder" else memory()
    ) as store:
        yield store


@pytest.fixture(autouse=True)
def _without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here loses its power."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _: None)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_what_is_done_to_one_leaves_the_other_byte_for_byte(kind: str, tmp_path: Path):
    met: Counter[str] = Counter()
    for seed in range(1 if kind == "folder" else SEEDS):
        with opened(kind, tmp_path / str(seed)) as store:
            world = World(seed, store)
            world.run()
        met += world.met
    assert min(met[what] for what in ("delete", "expire", "truncated", "deleted", "rebuild")) > 0, (
        met
    )


def by_beginning(state: Any, topic: str, *, objects_max: int) -> Any:
    """A topic's name is taken for the beginning of names."""
    planner = expiry._Planner(objects_max)
    for queue in sorted(state.queues):
        for number, incarnation in enumerate(
            state.queues[queue] if queue.topic.startswith(topic) else ()
        ):
            planner.add(queue, number, incarnation, incarnation.segments)
    return planner.steps, planner.is_cut


def by_letters(state: Any, topic: str, *, objects_max: int) -> Any:
    """Names that differ by case are taken for one."""
    planner = expiry._Planner(objects_max)
    for queue in sorted(state.queues):
        alike = queue.topic.lower() == topic.lower()
        for number, incarnation in enumerate(state.queues[queue] if alike else ()):
            planner.add(queue, number, incarnation, incarnation.segments)
    return planner.steps, planner.is_cut


def collects_beside(at: Workplace, plan: Any, *more: Any) -> Any:
    """Takes what lies behind the names of brokers that begin so for its own, which nobody names."""
    mine = at.place.prefix
    for info in list(at.store.list(mine.rstrip("/"))):
        if not info.key.startswith(mine) and JOURNAL not in info.key:
            at.store.delete(info.key)
    return APPLY(at, plan, *more)


APPLY = apply_gc
HERE = sys.modules[__name__]
DEFECTS: dict[str, tuple[object, str, Any]] = {
    "a topic deleted by the beginning of its name": (upkeep_expire, "plan_removal", by_beginning),
    "a topic deleted by its letters": (upkeep_expire, "plan_removal", by_letters),
    "a neighbour's bundles collected": (HERE, "apply_gc", collects_beside),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str):
    with planted(*DEFECTS[name]), pytest.raises(AssertionError, match="touches"):
        run_all()


def run_all() -> None:
    for seed in range(SEEDS):
        World(seed, memory()).run()
