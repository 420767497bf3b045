"""Merging while messages are followed: fewer, larger bundles, and not a message changes."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.dispatching import FAST, PREFIX, Flaky, assert_equal, dispatching, filled, run_once

from backends.errors import UnavailableError, UnknownOutcomeError
from backends.memory import MemoryStore
from tiered.dispatch.merging import plan_reads
from tiered.dispatch.settings import MemoryBudget
from tiered.journal.replay import JournalReader
from tiered.log.merge import LAST_LEVEL
from tiered.log.state import TierMachine, TierState

if TYPE_CHECKING:
    from backends.base import ByteRange, ObjectStore

SMALL = replace(FAST, bundle_bytes=1024, window_bytes=1024, fan_in=3, segment_bytes_max=16_000)


def state_of(store: ObjectStore) -> TierState:
    reader = JournalReader(store, PREFIX, TierMachine())
    reader.catch_up()
    return reader.state


def deepest(state: TierState, level: int) -> int:
    """In how many bundles of a level a queue has parts, at most."""
    incarnations = [
        incarnation for incarnations in state.queues.values() for incarnation in incarnations
    ]
    return max(
        len({b for b in incarnation.parts().bundles if b.level == level})
        for incarnation in incarnations
    )


def levels(state: TierState) -> Counter[int]:
    bundles = {
        bundle
        for incarnations in state.queues.values()
        for incarnation in incarnations
        for bundle in incarnation.parts().bundles
    }
    return Counter(bundle.level for bundle in bundles)


def merge_all(store: ObjectStore, settings: object = SMALL) -> None:
    with dispatching(store, filled(each=0), settings=settings) as dispatcher:
        dispatcher.merge_all()


def test_a_level_is_gathered_when_it_has_its_fan_in_and_nothing_is_lost():
    store, local = MemoryStore(), filled(each=120)
    run_once(store, local, settings=SMALL)
    merge_all(store)
    found = levels(state_of(store))
    assert all(deepest(state_of(store), level) < SMALL.fan_in for level in range(LAST_LEVEL))
    assert sum(found.values()) > 0
    assert_equal(store, local)


def test_a_restart_merges_what_an_earlier_writer_left():
    store, local = MemoryStore(), filled(each=60)
    run_once(store, local, settings=replace(SMALL, fan_in=1000))
    assert set(levels(state_of(store))) == {0}
    merge_all(store)
    assert levels(state_of(store))[0] < SMALL.fan_in
    assert_equal(store, local)


def test_a_queue_with_enough_gets_bundles_of_its_own_which_are_compressed_and_left_alone():
    store, local = MemoryStore(), filled(topics=1, queues=2, each=200)
    own = replace(SMALL, own_bytes=8192, merged_bytes_max=32_768)
    run_once(store, local, settings=replace(own, fan_in=1000))
    merge_all(store, own)
    state = state_of(store)
    assert {
        b.key.split("/")[0] for q in state.queues for b in state.queues[q][-1].parts().bundles
    } == {"queue"}
    assert levels(state) == {LAST_LEVEL: sum(levels(state).values())}
    before = sorted(info.key for info in store.list(PREFIX + "queue/"))
    merge_all(store, own)
    assert sorted(info.key for info in store.list(PREFIX + "queue/")) == before
    assert_equal(store, local)


@pytest.mark.parametrize("seed", range(4))
def test_failures_of_reads_and_writes_are_tried_again(seed: int):
    inner, local, rng, lock = MemoryStore(), filled(each=60), random.Random(seed), threading.Lock()
    run_once(inner, local, settings=replace(SMALL, fan_in=1000))

    def decide(key: str) -> Exception | None:
        with lock:
            throw = rng.random() if "journal" not in key else 1.0
        if throw < 0.2:
            return UnavailableError("no")
        return UnknownOutcomeError("perhaps") if throw < 0.4 else None

    merge_all(Flaky(inner, decide))
    assert levels(state_of(inner))[0] < SMALL.fan_in
    assert_equal(inner, local)


def test_a_damaged_bundle_is_left_as_it_is_and_the_others_are_gathered():
    store, local = MemoryStore(), filled(each=60)
    run_once(store, local, settings=replace(SMALL, fan_in=1000))
    incarnation = next(iter(state_of(store).queues.values()))[-1]
    part = incarnation.parts()[0]
    key = PREFIX + part.bundle.key
    data = bytearray(store.get(key))
    data[part.section.start + 3] ^= 1
    store.delete(key)
    store.put_if_absent(key, [bytes(data)])
    with dispatching(store, filled(each=0), settings=SMALL) as dispatcher:
        dispatcher.merge_all()
        assert dispatcher.counters.unmergeable_bundles == 1
    named = {b.key for q in state_of(store).queues.values() for b in q[-1].parts().bundles}
    assert part.bundle.key in named
    assert levels(state_of(store))[0] <= SMALL.fan_in


class Asked:
    """Wraps a store, and notes which objects are read."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.keys.append(key)
        return self._inner.get(key, byte_range)


def test_the_first_merge_of_small_bundles_asks_the_store_for_nothing():
    store, local = Asked(MemoryStore()), filled(each=3)
    settings = replace(
        SMALL, buffer_bytes_max=1 << 20
    )  # what a section takes besides its bytes counts as well
    with dispatching(store, local, settings=settings) as dispatcher:  # type: ignore[arg-type]
        for _ in range(4):
            dispatcher.follow(lambda: False, until_idle=True)
            assert dispatcher.drain(20)
            for topic, queue_id in sorted(local.queues()):
                local.append(topic, queue_id, b"more")
        dispatcher.merge_all()
        assert 0 <= dispatcher.budget.kept_bytes <= settings.buffer_bytes_max // 4
    assert dispatcher.counters.merged_bundles
    assert not [key for key in store.keys if "/bundle/0/" in key or "/queue/" in key]


def test_bundles_are_kept_in_what_memory_is_left_and_give_way():
    budget = MemoryBudget(32_000)
    bundle = [b"a" * 400, b"b" * 408]  # with what its chunks take 1000 bytes
    for number in range(9):
        budget.keep(str(number), bundle, 808)
    assert budget.kept_bytes == 8000  # a quarter
    assert budget.kept("0", 0, 100) is None  # the oldest
    assert budget.kept("8", 390, 410) == b"a" * 10 + b"b" * 10
    budget.keep("large", [bytes(905)], 905)
    assert budget.kept("large", 0, 1) is None
    budget.let_go(["8", "no such"])
    assert budget.kept_bytes == 7000
    budget.add(30_500)
    assert budget.kept_bytes == 1000
    budget.keep("9", bundle, 808)
    assert (budget.kept_bytes, budget.kept("7", 0, 1)) == (1000, None)
    budget.add(2000)
    assert budget.kept_bytes == 0
    budget.keep("10", [b"x"], 1)
    assert budget.kept_bytes == 0


def test_what_is_kept_of_many_small_messages_is_counted_with_the_objects_that_hold_them():
    """Sections of one message took twice the memory that was counted for them."""
    budget = MemoryBudget(1 << 20)
    for number in range(200):
        chunks = [bytes(size) for size in (200, 20, 8) * 20]
        budget.keep(str(number), chunks, 228 * 20)
    held = {id(x): sys.getsizeof(x) for some, _ in budget._kept.values() for x in (some, *some)}
    assert len(budget._kept) > 5
    assert sum(held.values()) <= (1 << 20) // 4


def test_neighbouring_sections_are_read_with_one_request():
    store, local = MemoryStore(), filled(topics=1, queues=20, each=2)
    run_once(store, local, settings=replace(FAST, bundle_bytes=65536))
    parts = [
        part
        for incarnations in state_of(store).queues.values()
        for part in incarnations[-1].parts()
    ]
    assert len(parts) >= 20
    assert len(plan_reads(parts)) == len({part.bundle.key for part in parts})
