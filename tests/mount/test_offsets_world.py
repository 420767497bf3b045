"""A small world of what mounts keep: two mounts of a tier, groups, topics whose names differ by case or begin alike.

By seed: consumers commit, go back and are reset, mounts save, are killed, stopped and taken over, the store fails and loses
answers; and the machine of a tier on a folder loses its power. A model of each mount's offsets says what the next one may
find: no less than what was saved, nothing that was not committed, and nothing of another's.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from support.power import Power, PowerFailure

from backends.errors import BackendError
from backends.local import LocalFolderStore
from backends.memory import MemoryStore
from backends.testing.faulty import READS, WRITES, Fault, FaultyStore, Rule, SimulatedCrash
from tiered.clock import ManualClock
from tiered.errors import DataError, FencedError, StoreUnavailableError
from tiered.mount.offsets import ConsumerOffsets, OffsetsKeeper

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from backends.base import ObjectStore

GROUPS, TOPICS, QUEUES = ("g", "G", "g2"), ("orders", "ORDERS", "orders2"), range(3)
SEEDS, STEPS = 40, 60
Queue = tuple[str, str, int]


class Served:
    """A mount as far as it keeps offsets."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        seed = world.rng.getrandbits(32)
        self.keeper = OffsetsKeeper(
            world.store, world.store, f"b/meta/mount/{name}/", world.clock, random.Random(seed),
            lease_s=10.0,
        )  # fmt: skip
        self.offsets = ConsumerOffsets()
        self.resets: dict[Queue, int] = {}
        """What consumers are still to be told."""

    def begin(self) -> bool:
        """Take over from whoever was here; whether that went well."""
        self.world.clock.advance(11)  # whoever was here has not renewed
        try:
            known = self.keeper.begin(wait=False, announce=lambda _: None, stop=self.waited)
        except (BackendError, FencedError):
            return False
        self.world.found(self.name, known)
        self.offsets = ConsumerOffsets(known)
        return True

    def waited(self, seconds: float) -> bool:
        self.world.clock.advance(seconds)
        return False

    def save(self) -> bool:
        """As a mount does, now and then; False: it is over."""
        rows = self.offsets.take_changes()
        if not rows:
            return True
        world = self.world
        world.trying(self.name, rows)
        try:
            self.keeper.save(rows)
        except FencedError:
            return False
        except StoreUnavailableError:
            self.offsets.put_back(rows)
            return False
        world.saved(self.name, rows)
        return True


class Kept:
    """The model of one mount's name: of each queue of a group what must be found, and what may be."""

    def __init__(self) -> None:
        self.must: dict[Queue, int] = {}
        self.may: dict[Queue, set[int]] = {}


class World:
    """One run."""

    def __init__(self, seed: int, store: ObjectStore, clock: ManualClock | None = None) -> None:
        self.rng = random.Random(seed)
        self.clock = clock or ManualClock(1_700_000_000_000)
        self.store: Any = store
        self.kept = {name: Kept() for name in ("one", "two")}
        self.serving: dict[str, Served] = {}
        self.old: list[Served] = []
        self.met: Counter[str] = Counter()

    # -- the model ------------------------------------------------------------------------------

    def trying(self, name: str, rows: list[list[Any]]) -> None:
        for group, topic, ids, offsets in rows:
            for queue_id, offset in zip(ids, offsets, strict=True):
                self.kept[name].may.setdefault((group, topic, queue_id), set()).add(offset)

    def saved(self, name: str, rows: list[list[Any]]) -> None:
        for group, topic, ids, offsets in rows:
            for queue_id, offset in zip(ids, offsets, strict=True):
                self.kept[name].must[group, topic, queue_id] = offset
                self.kept[name].may[group, topic, queue_id] = set()
        self.met["saved"] += 1

    def found(self, name: str, known: Mapping[tuple[str, str], Mapping[int, int]]) -> None:
        """What the next mount of a name finds is what was saved, or what was being saved when the last ended."""
        kept = self.kept[name]
        there = {(*of, queue_id): at for of, row in known.items() for queue_id, at in row.items()}
        for queue in {*kept.must, *kept.may, *there}:
            may = {kept.must.get(queue), *kept.may.get(queue, ())}
            assert there.get(queue) in may, (name, queue, there.get(queue), may)
        kept.must, kept.may = there, {}
        self.met["found"] += bool(there)

    # -- what happens ---------------------------------------------------------------------------

    def step(self) -> None:
        name = self.rng.choice(sorted(self.kept))
        mount = self.serving.get(name)
        if mount is None:
            made = Served(self, name)
            if made.begin():
                self.serving[name] = made
            return
        what = self.rng.choices(
            (self.commit, self.reset, self.tell, self.save, self.kill, self.stop, self.take_over),
            (12, 3, 2, 6, 1, 1, 1),
        )[0]
        self.met[what.__name__] += 1
        what(mount)

    def queue(self) -> Queue:
        return self.rng.choice(GROUPS), self.rng.choice(TOPICS), self.rng.choice(QUEUES)

    def commit(self, mount: Served) -> None:
        group, topic, queue_id = self.queue()
        known = mount.offsets.get(group, topic, queue_id) or 0
        step = self.rng.choice((1, 7, 1_000, -known))  # now and then it reads from the beginning
        mount.offsets.commit(group, topic, queue_id, known + step)
        if (group, topic, queue_id) in mount.resets:  # who says that has not been told yet
            assert mount.offsets.get(group, topic, queue_id) == known

    def reset(self, mount: Served) -> None:
        """A person puts one group elsewhere, beside commits of it and of others."""
        group, topic, queue_id = queue = self.queue()
        before = {one: mount.offsets.get(*one) for one in self.others(queue)}
        to = mount.resets[queue] = self.rng.randrange(50)
        mount.offsets.reset(group, topic, queue_id, to)
        assert mount.offsets.get(*queue) == to
        assert before == {one: mount.offsets.get(*one) for one in before}

    def tell(self, mount: Served) -> None:
        """A consumer asks: it is told of its own reset, once."""
        queue = self.queue()
        assert mount.offsets.take_reset(*queue) == mount.resets.pop(queue, None)

    def others(self, queue: Queue) -> list[Queue]:
        every = ((g, t, q) for g in GROUPS for t in TOPICS for q in QUEUES)
        return [one for one in every if one != queue]

    def save(self, mount: Served) -> None:
        if not mount.save():
            self.serving.pop(mount.name, None)

    def kill(self, mount: Served) -> None:
        """What was committed since the last save is lost."""
        if self.rng.random() < 0.5:  # in the midst of a save
            self.interrupted(mount)
        self.serving.pop(mount.name, None)

    def interrupted(self, mount: Served) -> None:
        if (rows := mount.offsets.take_changes()) and isinstance(self.store, FaultyStore):
            self.trying(mount.name, rows)
            when = self.rng.choice((Fault.CRASH_BEFORE, Fault.CRASH_AFTER))
            self.store.add(Rule(when, WRITES, times=1))
            with contextlib.suppress(SimulatedCrash):
                mount.keeper.save(rows)
            self.store.heal()
            self.trouble()

    def trouble(self) -> None:
        """What the store does to us."""

    def stop(self, mount: Served) -> None:
        """A clean end loses nothing."""
        if mount.save():
            with contextlib.suppress(BackendError):
                mount.keeper.end()
        self.serving.pop(mount.name, None)

    def take_over(self, mount: Served) -> None:
        """Another takes the name while the old one lives: what that says from then on is nobody's."""
        made = Served(self, mount.name)
        if not made.begin():
            return
        self.serving[mount.name] = made
        mount.offsets.adopt({("g", "orders"): {9: self.rng.getrandbits(40)}})
        kept = self.kept[mount.name]
        before = dict(kept.must), {queue: set(may) for queue, may in kept.may.items()}
        assert not mount.save()
        kept.must, kept.may = before
        self.met["fenced"] += 1

    def run(self, steps: int) -> None:
        self.trouble()
        for _ in range(steps):
            self.step()


class Troubled(World):
    """The store fails by chance."""

    def trouble(self) -> None:
        rng = random.Random(self.rng.getrandbits(32))
        for fault in (Fault.UNAVAILABLE, Fault.LOST_REQUEST, Fault.LOST_ANSWER):
            operations = WRITES | READS if fault is Fault.UNAVAILABLE else WRITES
            often = rng.choice((0.0, 0.05, 0.15))
            self.store.add(Rule(fault, operations, times=None, probability=often))


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_what_a_mount_finds_is_what_was_saved_for_it(first: int):
    met: Counter[str] = Counter()
    for seed in range(first, first + 10):
        world = Troubled(seed, FaultyStore(MemoryStore(), random.Random(seed)))
        world.run(STEPS)
        met += world.met
    assert min(met[what] for what in ("saved", "found", "reset", "fenced", "kill")) > 3, met


@pytest.mark.parametrize("seed", range(20))
def test_a_folder_whose_machine_loses_its_power_has_what_was_saved(seed: int, tmp_path: Path):
    """Behind that it may have what was being saved, and never anything else."""
    rng, power = random.Random(seed), Power(tmp_path / "tier")
    power.root.mkdir()
    left = iter(range(rng.randrange(5, 120)))

    def tick() -> None:
        if next(left, None) is None:
            raise PowerFailure

    with power.watched():
        with contextlib.closing(LocalFolderStore(str(power.root))) as store:
            world = World(seed, store)
            power.before_sync = tick
            with contextlib.suppress(PowerFailure):
                world.run(200)
            power.before_sync = lambda: None
            power.survivor(tmp_path / "left", rng)
        with contextlib.closing(LocalFolderStore(str(tmp_path / "left"))) as store:
            world.store = store
            for name in world.kept:
                assert Served(world, name).begin()


def is_found(defect: tuple[object, str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        patch.setattr(*defect)
        try:
            for seed in range(SEEDS):
                Troubled(seed, FaultyStore(MemoryStore(), random.Random(seed))).run(STEPS)
        except AssertionError:
            return True
    return False


def alike(self: ConsumerOffsets, group: str, topic: str, queue_id: int, offset: int) -> None:
    COMMIT(self, group, topic.lower(), queue_id, offset)


def unsaved(_keeper: OffsetsKeeper, _rows: object) -> None:
    """Says that it is saved before it is."""


def told_all(self: ConsumerOffsets, _group: str, _topic: str, _queue_id: int) -> int | None:
    return self._resets.popitem()[1] if self._resets else None


COMMIT = ConsumerOffsets.commit
DEFECTS: dict[str, tuple[object, str, Any]] = {
    "topics of one name but for case share offsets": (ConsumerOffsets, "commit", alike),
    "said to be saved before it is": (OffsetsKeeper, "save", unsaved),
    "a reset is told to whoever asks": (ConsumerOffsets, "take_reset", told_all),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    assert is_found(DEFECTS[name], monkeypatch)


def test_a_folder_that_syncs_no_names_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An entry's name has to be on the disk before it counts as saved."""
    monkeypatch.setattr(LocalFolderStore, "_force", lambda *_: None)

    def is_lost(seed: int) -> bool:
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            test_a_folder_whose_machine_loses_its_power_has_what_was_saved(seed, folder)
        except (AssertionError, DataError):
            return True
        return False

    assert any(is_lost(seed) for seed in range(20))
