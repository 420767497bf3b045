"""What every reader of a queue is past is soon dropped; what somebody will still come to is kept."""

from __future__ import annotations

from support.fetching import batches, fetcher_of, read_all
from support.tiers import QUEUE, TierBuilder

from backends.wrapping import MeteredStore
from fetcher.limits import WindowLimits
from fetcher.runs import ByteCache, Cached, LruList
from tiered.model import QueueOffset

KIB = 1024
SECONDS = dict.fromkeys(LruList, 10.0)


def of_some_mib() -> TierBuilder:
    builder = TierBuilder()
    for part in range(4):
        builder.add([bytes([65 + part]) * (100 * KIB) for _ in range(10)])
    return builder


def settings(**more: object) -> dict[str, object]:
    window = WindowLimits(bytes_min=256 * KIB, bytes_max=512 * KIB)
    return {"chunk_bytes": 512 * KIB, "spent_bytes": 1024 * KIB, "window": window, **more}


def test_one_reader_leaves_no_more_behind_than_is_allowed():
    fetcher = fetcher_of(of_some_mib().store, **settings())
    high = 0
    for _ in batches(fetcher, count_max=1):
        high = max(high, fetcher.stats().cached_bytes)
    assert high <= (1024 + 512 + 512 + 512) * KIB
    assert fetcher.stats().cached_bytes <= 1100 * KIB


def test_what_another_reader_will_come_to_is_kept():
    store = MeteredStore(of_some_mib().store)
    fetcher = fetcher_of(store, **settings())
    slow = batches(fetcher, group="slow", count_max=1)
    next(slow)
    read_all(fetcher, group="fast")
    asked = store.snapshot().requests
    rest = [*slow]
    assert len(rest) == 39
    assert store.snapshot().requests == asked
    assert fetcher.stats().cached_bytes <= 1100 * KIB


def test_what_was_left_behind_last_is_there_for_who_asks_again():
    store = MeteredStore(of_some_mib().store)
    fetcher = fetcher_of(store, **settings())
    read_all(fetcher)
    asked = store.snapshot().requests
    assert fetcher.read("late", QUEUE, QueueOffset(38)) is not None
    assert store.snapshot().requests == asked


def entry(name: str, size_bytes: int = 10) -> Cached[str]:
    return Cached(name, [name], size_bytes)


def test_spent_things_go_first_and_the_oldest_of_them_when_they_are_many():
    cache: ByteCache[str] = ByteCache(100, SECONDS, spent_bytes_max=25)
    things = {name: entry(name) for name in "abcde"}
    for now_s, thing in enumerate(things.values()):
        cache.put(thing, now_s)
    cache.retire(things["a"])  # nobody has had it: it stays where it is
    for name in "dcb":
        cache.use(things[name], 5.0)
        cache.retire(things[name])
    assert [name for name in things if cache.get(name)] == ["a", "b", "c", "e"]
    cache.use(things["c"], 6.0)  # somebody has come to it after all
    assert cache.reserve(70) == (True, [])
    assert [name for name in things if cache.get(name)] == ["a", "c", "e"]
    assert cache.held_bytes == 30
    assert cache.expire(16.5) == [things["a"], things["e"]]
    assert cache.held_bytes == 0
    cache.put(entry("x", 30), 0.0)
    cache.use(cache.get("x"), 0.0)
    cache.retire(cache.get("x"))
    assert cache.get("x") is None
    assert cache.held_bytes == 0
