"""Repair: what is damaged comes back from what is whole, byte for byte, and nothing else does."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.dispatching import PREFIX, filled, run_once
from support.merging import gather, text
from support.opened import PLACE
from support.tiers import QUEUE, TierBuilder, batch_of

from backends.memory import MemoryStore
from tiered.clock import ManualClock, SystemClock
from tiered.errors import FencedError, InvalidError
from tiered.journal.lease import Holder, Lease
from tiered.log.history import named_bundles, parts_by_bundle
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier
from tiered.model import QueueBounds, QueueOffset
from tiered.upkeep.repair import Repairer, RepairReport
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.synthetic import SyntheticStore
    from support.tiers import Item

    from backends.base import ObjectStore
    from tiered.local.interface import RecordBatch
    from tiered.log.parts import TierState
    from tiered.log.verify_objects import VerifyReport
    from tiered.model import MessageQueue


def copy_of(store: ObjectStore) -> MemoryStore:
    copied = MemoryStore()
    for info in store.list(""):
        copied.put_if_absent(info.key, store.get(info.key))
    return copied


def change(store: ObjectStore, key: str, data: bytes | None) -> None:
    store.delete(key)
    if data is not None:
        store.put_if_absent(key, data)


def flip(store: ObjectStore, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 0x40
    change(store, key, bytes(data))


def deep(store: ObjectStore, local: SyntheticStore | None = None) -> VerifyReport:
    return verify_tier(store, PREFIX, deep=True, local=local)


def repair(store: ObjectStore, local: SyntheticStore | None, seed: int = 3) -> RepairReport:
    at = Workplace(store, store, PLACE, ManualClock(), random.Random(seed))
    repairer = Repairer(at, local, stop=threading.Event())
    return repairer.run(deep(store).damaged)


@pytest.fixture(scope="module")
def local() -> SyntheticStore:
    return filled(topics=1, queues=2, each=40)


@pytest.fixture(scope="module")
def tier(local: SyntheticStore) -> ObjectStore:
    """Rounds of both queues: a bundle with two sections each."""
    builder = TierBuilder()
    for at in range(0, 40, 10):
        some = [
            local.read(queue, at, bytes_max=1 << 20, count_max=10)
            for queue in sorted(local.queues())
        ]
        builder.add_round(*filter(None, some))
    assert deep(builder.store, local).problems == []
    return builder.store


def data_keys(store: ObjectStore) -> list[str]:
    roots = ("bundle/", "topic/", "queue/")
    return [info.key for root in roots for info in store.list(PREFIX + root)]


def state_of(store: ObjectStore) -> TierState:
    reader = TierReader(store, PREFIX)
    reader.refresh()
    return reader.state


def parts_of(store: ObjectStore) -> list[tuple[object, ...]]:
    return [
        (
            queue,
            part.queue_offset,
            part.count,
            part.log_offset,
            part.holes,
            part.last,
            part.section.crc,
        )
        for queue, incarnations in state_of(store).queues.items()
        for part in incarnations[-1].parts()
    ]


def test_a_byte_flipped_in_each_bundle_is_repaired(tier: ObjectStore, local: SyntheticStore):
    store, keys = copy_of(tier), data_keys(tier)
    assert len(keys) >= 4
    rng = random.Random(1)
    for key in keys:
        flip(store, key, rng.randrange(len(store.get(key))))
    report = repair(store, local)
    assert report.unrepaired == []
    assert report.parts >= len(keys)
    after = deep(store, local)
    assert after.problems == []
    assert parts_of(store) == parts_of(tier)


@pytest.mark.parametrize("at", ["record", "item", "table", "footer"])
def test_only_the_damaged_section_is_written_anew(
    tier: ObjectStore, local: SyntheticStore, at: str
):
    """Two queues share the bundle; the other's part stays where it is, but where the bundle's own table is damaged."""
    store = copy_of(tier)
    before = state_of(store)
    _, named = next(one for one in parts_by_bundle(before) if len(one[1]) == 2)
    place, bundle = named[0].part.section, named[0].part.bundle
    where = {"record": place.start, "item": place.start + place.items_at,
             "table": place.start + place.table_at, "footer": bundle.size_bytes - 9}  # fmt: skip
    flip(store, PREFIX + bundle.key, where[at])
    report = repair(store, local if at in {"record", "item"} else None)
    assert (report.unrepaired, report.parts) == ([], 2 if at == "footer" else 1)
    after = named_bundles(state_of(store))
    assert (bundle.key in after) == (at != "footer")
    (new,) = after.keys() - named_bundles(before).keys()
    assert after[new].level == 1
    assert deep(store, local).problems == []
    assert parts_of(store) == parts_of(tier)


def test_a_missing_bundle_is_repaired(tier: ObjectStore, local: SyntheticStore):
    store = copy_of(tier)
    change(store, data_keys(store)[0], None)
    assert repair(store, local).parts > 0
    assert deep(store, local).problems == []


@pytest.mark.parametrize("packs", [False, True])
def test_a_damaged_merged_section_comes_back_from_what_it_was_made_of(packs: bool):
    """The bundles that were gathered are not deleted yet; no local store is needed."""
    builder = TierBuilder()
    for number in range(6):
        builder.add([text(number, 3000), None, (3, text(number, 200))])
    gather(builder, 3 if packs else 1)
    before = builder.journal.state
    (bundle,) = named_bundles(before).values()
    (part,) = before.queues[QUEUE][0].parts()
    assert part.section.is_packed == packs
    flip(builder.store, PREFIX + bundle.key, part.section.start + 500)
    assert repair(builder.store, None).unrepaired == []
    assert deep(builder.store).problems == []
    (after,) = state_of(builder.store).queues[QUEUE][0].parts()
    assert after.section.is_packed == packs
    assert replace(after, bundle=part.bundle, section=part.section) == part


def test_what_the_broker_truncated_is_repaired_from_the_tier_alone():
    builder = TierBuilder()
    builder.add([b"a", b"b"])
    builder.add([b"c", b"d"])
    builder.truncate(3)
    builder.add([b"D"], roll=True)
    gather(builder)
    (bundle,) = named_bundles(builder.journal.state).values()
    tail, incarnation = builder.journal.state.queues[QUEUE]
    flip(builder.store, PREFIX + bundle.key, tail.parts()[0].section.start + 8)
    report = repair(builder.store, None)
    reason = "it is of an incarnation that has ended, and nothing in the tier has it any more"
    assert [one.reason for one in report.unrepaired] == [reason]  # what it was made of is larger
    flip(builder.store, PREFIX + bundle.key, tail.parts()[0].section.start + 8)
    flip(builder.store, PREFIX + bundle.key, bundle.size_bytes - 3)
    assert repair(builder.store, None, seed=4).parts == 2 + len(incarnation.parts()) - 1
    assert deep(builder.store).problems == []


def test_what_the_local_store_no_longer_has_stays_damaged_and_is_said(
    tier: ObjectStore, local: SyntheticStore
):
    store = copy_of(tier)
    for _, named in parts_by_bundle(state_of(store)):
        for one in named:
            flip(store, PREFIX + one.part.bundle.key, one.part.section.start + 3)
    shorter = filled(topics=1, queues=2, each=40)
    shorter.expire("t0", 1, 20)
    report = repair(store, shorter)
    assert report.parts > 0
    assert {one.reason for one in report.unrepaired} == {
        "the local store begins at queue offset 20"
    }
    assert all(one.where.startswith("t0/1 queue offsets [") for one in report.unrepaired)
    left = deep(store)
    assert sum(map(len, left.damaged.values())) == len(report.unrepaired)
    assert all(problem.detail.startswith("t0/1 queue offset") for problem in left.problems)
    assert repair(store, local, seed=4).unrepaired == []
    assert deep(store, local).problems == []


def test_other_messages_repair_nothing(tier: ObjectStore):
    store = copy_of(tier)
    flip(store, data_keys(store)[0], 3)
    number = len(list(store.list(PREFIX)))
    report = repair(store, filled(topics=2, queues=2, each=40))  # other bodies
    assert report.unrepaired[0].reason.startswith("the local store has other bytes there")
    assert len(list(store.list(PREFIX))) == number  # no epoch, no object


def test_a_living_writer_is_not_disturbed(tier: ObjectStore, local: SyntheticStore):
    store = copy_of(tier)
    flip(store, data_keys(store)[0], 3)
    holder = Holder("elsewhere", "b", "s", 1, 1)
    clock = SystemClock()
    lease = Lease(store, PREFIX, writer="33333333", holder=holder, seconds=1e9, clock=clock)
    assert lease.try_acquire() is None
    number = len(list(store.list(PREFIX)))
    with pytest.raises(FencedError):
        repair(store, local)
    assert len(list(store.list(PREFIX))) == number


def test_nothing_damaged_writes_nothing(tier: ObjectStore, local: SyntheticStore):
    store = copy_of(tier)
    number = len(list(store.list(PREFIX)))
    assert repair(store, local) == RepairReport()
    assert len(list(store.list(PREFIX))) == number


def test_a_writer_goes_on_after_a_repair(tier: ObjectStore):
    store, local = copy_of(tier), filled(topics=1, queues=2, each=40)
    for key in data_keys(store):
        flip(store, key, 0)
    repair(store, local)
    for queue in range(2):
        local.append("t0", queue, b"more")
    run_once(store, local, seed=9)
    report = deep(store, local)
    assert report.problems == []
    assert report.comparison
    assert report.comparison.lag_messages == 0


def test_another_store_is_refused(tier: ObjectStore, local: SyntheticStore):
    store = copy_of(tier)
    at = Workplace(store, store, PLACE, ManualClock(), random.Random(1))
    repairer = Repairer(at, local, stop=threading.Event())
    repairer._journal.take_epoch({})
    repairer._journal.append([{"do": "meta", "store": {"store_id": "another"}}])
    with pytest.raises(InvalidError, match="belongs to another store"):
        repair(store, local, seed=4)


class Items:
    """A local store with one queue."""

    identity = SimpleNamespace(store_id=None)

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items

    def queues(self) -> dict[MessageQueue, QueueBounds]:
        return {QUEUE: QueueBounds(QueueOffset(0), QueueOffset(len(self.items)))}

    def read(self, _queue: MessageQueue, at: int, *, bytes_max: int, count_max: int) -> RecordBatch:
        assert bytes_max
        return batch_of(at, self.items[at : at + count_max])


@pytest.mark.parametrize("is_same", [True, False])
def test_other_messages_of_the_same_length_repair_no_packed_part_that_ends_with_a_hole(
    is_same: bool,
):
    """Its last item has no mark, and lengths prove nothing."""

    def content(number: int) -> list[Item]:
        return [text(number, 3000), text(number + 50, 3000), None]

    builder = TierBuilder()
    for number in range(6):
        builder.add(content(number))
    gather(builder, 3)
    (bundle,) = named_bundles(builder.journal.state).values()
    (part,) = builder.journal.state.queues[QUEUE][0].parts()
    assert (part.section.is_packed, part.last) == (True, 0)
    for key in data_keys(builder.store):
        if key != PREFIX + bundle.key:
            builder.store.delete(key)
    flip(builder.store, PREFIX + bundle.key, part.section.start + 500)
    numbers = range(6) if is_same else range(1000, 1006)
    local: Any = Items([item for number in numbers for item in content(number)])
    report = repair(builder.store, local)
    assert (report.parts, len(report.unrepaired)) == ((1, 0) if is_same else (0, 1))
    assert deep(builder.store).is_clean == is_same
