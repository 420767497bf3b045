"""gc reads each entry of the journal once, several at a time, and believes nothing that it kept without looking."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.aged import GRACE_S, Tier, old_litter
from support.journals import PREFIX

from backends.errors import UnavailableError
from backends.wrapping import WrappingStore
from tiered.errors import DataError
from tiered.journal.replay import AHEAD, JournalBytes
from tiered.keys import JOURNAL, entry_key
from tiered.log.verify import verify_tier
from tiered.upkeep.gc import apply_gc, plan_gc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ByteRange, ObjectStore
    from tiered.upkeep.gc import GcPlan

THREADS = 4


class Counting(WrappingStore):
    """Counts reads by key, and how many were under way at once; each takes a moment."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.reads: dict[str, int] = {}
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        with self._lock:
            self.reads[key] = self.reads.get(key, 0) + 1
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.0005)
        try:
            return super().get(key, byte_range)
        finally:
            with self._lock:
                self._now -= 1

    def entry_reads(self) -> dict[str, int]:
        return {
            key: count
            for key, count in self.reads.items()
            if JOURNAL in key and not key.endswith(".checkpoint")
        }


def long_tier(entries: int) -> Tier:
    tier, _ = old_litter()
    while tier.builder.journal.number < entries:
        tier.builder.add([b"a"])
        tier.builder.journal.write_checkpoint()
    tier.clock.advance(GRACE_S + 1)
    return tier


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(THREADS) as executor:
        yield executor


def planned(tier: Tier, store: ObjectStore, journal: JournalBytes | None) -> GcPlan:
    return plan_gc(
        store,
        tier.at.place,
        tier.clock,
        grace_ms=GRACE_S * 1000,
        max_deletions=10_000,
        journal=journal,
    )


def test_each_entry_is_read_once_for_plan_and_deletion_and_several_at_a_time(
    pool: ThreadPoolExecutor,
):
    tier = long_tier(300)
    store, journal = Counting(tier.store), JournalBytes(pool)
    plan = planned(tier, store, journal)
    assert plan == planned(tier, tier.store, None)
    assert 1 < store.most <= THREADS + 1  # a checkpoint beside them
    apply_gc(tier.workplace(store), plan, executor=pool, journal=journal)
    reads = store.entry_reads()
    there = {entry_key(PREFIX, number) for number in range(1, 301)}
    assert {key: reads[key] for key in there} == dict.fromkeys(there, 1)
    assert sum(reads.values()) < 300 + 10  # and looks for the one that comes next
    assert tier.data() == tier.named()
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_what_is_kept_has_a_bound(pool: ThreadPoolExecutor):
    tier = long_tier(60)
    size = len(tier.store.get(entry_key(PREFIX, 30)))
    store, journal = Counting(tier.store), JournalBytes(pool, kept_bytes_max=20 * size)
    for _ in range(2):
        planned(tier, store, journal)
    again = [key for key, count in store.entry_reads().items() if count == 2]
    assert 30 < len(again) < 60


def test_an_entry_that_is_gone_or_another_is_not_taken_from_memory(pool: ThreadPoolExecutor):
    tier = long_tier(40)
    journal = JournalBytes(pool)
    planned(tier, tier.store, journal)
    key = entry_key(PREFIX, 39)
    data = tier.store.get(key)
    tier.store.delete(key)
    with pytest.raises(DataError, match="missing"):
        planned(tier, tier.store, journal)
    tier.clock.advance(1)
    tier.store.put_if_absent(key, data[:-2] + b"0\n")
    with pytest.raises(DataError):
        planned(tier, tier.store, journal)


def test_a_store_that_fails_in_the_middle_ends_the_look_and_leaves_nothing_under_way(
    pool: ThreadPoolExecutor,
):
    tier = long_tier(100)

    class Failing(Counting):
        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            if key == entry_key(PREFIX, 50):
                raise UnavailableError("not now")
            return super().get(key, byte_range)

    store = Failing(tier.store)
    with pytest.raises(UnavailableError):
        planned(tier, store, JournalBytes(pool))
    before = dict(store.reads)
    time.sleep(0.02)
    assert store.reads == before
    assert entry_key(PREFIX, 50 + AHEAD + 1) not in before
