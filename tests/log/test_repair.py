"""Repair: what is damaged comes back from what is whole, byte for byte, and nothing else does."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest
from support.dispatching import PREFIX, filled, run_once

from backends.memory import MemoryStore
from tiered.clock import ManualClock, SystemClock
from tiered.errors import FencedError, InvalidError
from tiered.journal.lease import Holder, Lease
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier
from tiered.plugin.repair import Repairer, RepairReport

if TYPE_CHECKING:
    from support.synthetic import SyntheticStore

    from backends.base import ObjectStore
    from tiered.log.verify_report import VerifyReport


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
    repairer = Repairer(
        store, store, PREFIX, local,
        clock=ManualClock(), rng=random.Random(seed), stop=threading.Event(),
    )  # fmt: skip
    return repairer.run(deep(store).damaged)


@pytest.fixture(scope="module")
def local() -> SyntheticStore:
    return filled(topics=1, queues=2, each=40)


@pytest.fixture(scope="module")
def tier(local: SyntheticStore) -> ObjectStore:
    store = MemoryStore()
    run_once(store, local)
    assert deep(store, local).problems == []
    return store


def data_keys(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list(PREFIX + "queue/")]


def parts_of(store: ObjectStore) -> list[tuple[object, ...]]:
    reader = TierReader(store, PREFIX)
    reader.refresh()
    return [
        (queue, part.queue_offset, part.count, part.log_offset, part.log.crc, part.index.crc)
        for queue, lives in reader.state.queues.items()
        for part in lives[-1].parts()
    ]


def test_a_byte_flipped_in_each_object_is_repaired(tier: ObjectStore, local: SyntheticStore):
    store, keys = copy_of(tier), data_keys(tier)
    assert len(keys) >= 8
    rng = random.Random(1)
    for key in keys:
        flip(store, key, rng.randrange(len(store.get(key))))
    report = repair(store, local)
    assert report.unrepaired == []
    assert report.parts == len(keys) // 2
    after = deep(store, local)
    assert after.problems == []
    assert after.recorded.orphans == len(keys)
    assert parts_of(store) == parts_of(tier)


@pytest.mark.parametrize("kind", ["commitlog", "consumequeue"])
def test_one_missing_object_is_repaired(tier: ObjectStore, local: SyntheticStore, kind: str):
    store = copy_of(tier)
    key = next(key for key in data_keys(store) if kind in key)
    change(store, key, None)
    assert repair(store, local).parts == 1
    assert deep(store, local).problems == []


def test_a_damaged_trailer_needs_no_local_store(tier: ObjectStore):
    store = copy_of(tier)
    key = data_keys(store)[0]
    flip(store, key, len(store.get(key)) - 20)
    assert repair(store, None).parts == 1
    assert deep(store).problems == []


def test_what_the_local_store_no_longer_has_stays_damaged_and_is_said(
    tier: ObjectStore, local: SyntheticStore
):
    store = copy_of(tier)
    for key in data_keys(store):
        if "commitlog" in key:
            flip(store, key, 3)
    shorter = filled(topics=1, queues=2, each=40)
    shorter.expire("t0", 1, 20)
    report = repair(store, shorter)
    assert report.parts > 0
    assert {one.reason for one in report.unrepaired} == {
        "the local store begins at queue offset 20"
    }
    assert all(one.where.startswith("t0/1 queue offsets [") for one in report.unrepaired)
    left = set(deep(store).damaged)
    assert len(left) == len(report.unrepaired)
    assert {key.split("/queue/")[1].split("/")[1] for key in left} == {"0000000001"}
    assert repair(store, local, seed=4).unrepaired == []
    assert deep(store, local).problems == []


def test_other_messages_repair_nothing(tier: ObjectStore):
    store = copy_of(tier)
    key = next(key for key in data_keys(store) if "commitlog" in key)
    flip(store, key, 3)
    number = len(list(store.list(PREFIX)))
    report = repair(store, filled(topics=2, queues=2, each=40))  # other bodies
    assert report.unrepaired[0].reason == "the local store has other bytes there"
    assert len(list(store.list(PREFIX))) == number  # no reign, no object


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
    repairer = Repairer(
        store, store, PREFIX, local,
        clock=ManualClock(), rng=random.Random(1), stop=threading.Event(),
    )  # fmt: skip
    repairer._journal.take_reign({})
    repairer._journal.append([{"do": "meta", "store": {"store_id": "another"}}])
    with pytest.raises(InvalidError, match="belongs to another store"):
        repair(store, local, seed=4)
