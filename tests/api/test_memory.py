"""One budget of memory for a tier, and every size of it works: with little, reads are slower, never stuck."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.keyed import KeyedTier, Mail
from support.opened import Made, opened_over
from support.tiers import PREFIX

from fetcher.limits import MEMORY_BYTES_MIN, FetchSettings
from tiered.errors import InvalidError
from tiered.index.lookup import IndexReader, Wish
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from tiered.api.tier import Tier

KIB, MIB = 1 << 10, 1 << 20
SIZES = [
    MIB,
    MIB + 1,
    1_500_000,
    2 * MIB,
    3_333_333,
    5 * MIB,
    8 * MIB - 1,
    8 * MIB,
    32 * MIB,
    256 * MIB,
]


@pytest.fixture(scope="module")
def various() -> Made:
    """Four queues: parts that are larger than the smallest budget, one record that is, many small ones, a large index."""
    made = Made()
    for number in range(3):
        queue = MessageQueue("orders", number)
        made.add(*(bytes([n % 251]) * (20 * KIB) for n in range(90)), queue=queue)
        made.add(b"r" * (1200 * KIB), queue=queue)
        made.add(*(b"small %d" % n for n in range(500)), queue=queue)
    made.add(*(b"%d" % n for n in range(20_000)), queue=MessageQueue("orders", 3))
    return made


def read_all(tier: Tier) -> dict[int, int]:
    """How many messages of each queue there are, each in its place."""
    found: dict[int, int] = dict.fromkeys(range(4), 0)
    for message in tier.read_topic("orders"):
        assert message.queue_offset == found[message.queue_id]
        found[message.queue_id] += 1
    return found


@pytest.mark.parametrize("memory_bytes", SIZES)
def test_i8_every_size_reads_everything_within_its_budget(various: Made, memory_bytes: int):
    with various.open(memory_bytes=memory_bytes) as tier:
        worst, ended = [0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.001):
                stats = tier._opened.fetcher.stats()
                worst.append(stats.cached_bytes + stats.reserved_bytes)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            assert read_all(tier) == {0: 591, 1: 591, 2: 591, 3: 20_000}
        finally:
            ended.set()
            watching.join()
        # One record or one index of a part may be larger; then nothing else is there.
        assert max(worst) <= max(memory_bytes, 3 * MIB)


def test_i9_with_the_least_memory_many_readers_at_once_all_get_on(various: Made):
    with various.open(memory_bytes=MEMORY_BYTES_MIN) as tier, ThreadPoolExecutor(8) as pool:

        def count(number: int) -> int:
            return sum(1 for _ in tier.read("orders", number % 3, 60 + number))

        counts = list(pool.map(count, range(8), timeout=200))
    assert counts == [591 - 60 - number for number in range(8)]


@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES_MIN - 1, 1, 0, -1])
def test_less_than_the_least_is_refused_with_what_to_do(memory_bytes: int):
    with pytest.raises(InvalidError, match=r"give at least 1048576 bytes \(1 MiB\)"):
        FetchSettings.of_memory(memory_bytes)


def keyed() -> KeyedTier:
    """Three index objects, each of a thousand keys."""
    tier = KeyedTier()
    for number in range(3):
        mails = [Mail(keys=(f"key-{number}-{n}",)) for n in range(1000)]
        tier.post(MessageQueue("orders", 0), mails)
        tier.index()
    assert len(tier.journal.state.indexes) == 3
    return tier


def test_filters_of_the_key_index_are_of_the_same_budget():
    with opened_over(keyed().store, FetchSettings.of_memory(MEMORY_BYTES_MIN)) as tier:
        share, whole = tier.lendable_bytes, tier.fetcher.stats().bytes_max
        assert 2 * share <= whole < MEMORY_BYTES_MIN
        assert len(tier.lookup(Wish(topic="orders", key="key-1-500")).hits) == 1
        assert tier._index is not None
        filters = tier._index[0].objects.memory_bytes
        assert filters > 3 * 1000
        assert tier.fetcher.stats().bytes_max == whole - filters


def test_filters_that_are_held_before_anything_is_read_count_too():
    with opened_over(keyed().store, FetchSettings.of_memory(MEMORY_BYTES_MIN)) as tier:
        tier.lend(1000)
        whole = FetchSettings.of_memory(MEMORY_BYTES_MIN).cache_bytes
        assert tier.fetcher.stats().bytes_max == whole - 1000


def test_a_lookup_with_hardly_any_memory_finds_the_same():
    tier = keyed()
    tier.post(MessageQueue("orders", 1), [Mail(keys=("late",)) for _ in range(300)])
    told: list[int] = []
    lookups = IndexReader(tier.store, PREFIX, filter_bytes_max=5000, tell=told.append)
    for key, count in (("key-0-1", 1), ("key-2-999", 1), ("late", 64), ("nothing", 0)):
        found = lookups.lookup(tier.journal.state, Wish(topic="orders", key=key))
        assert (len(found.hits), found.unscanned) == (count, 0)
    assert max(told) <= 5000


def test_what_is_lent_is_taken_from_what_is_cached(various: Made):
    with various.open(memory_bytes=4 * MIB) as tier:
        assert sum(1 for _ in tier.read("orders", 0)) == 591
        fetcher = tier._opened.fetcher
        before = fetcher.stats()
        tier._opened.lend(tier._opened.lendable_bytes)
        after = fetcher.stats()
        assert (
            after.cached_bytes <= after.bytes_max == before.bytes_max - tier._opened.lendable_bytes
        )
        assert sum(1 for _ in tier.read("orders", 1)) == 591
        tier._opened.lend(0)
        assert fetcher.stats().bytes_max == before.bytes_max
