"""The fetcher gives what a plain reader gives, whatever is cached, read ahead, evicted or asked for by others."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fetching import batches, expected, fetcher_of, read_all, rows
from support.tiers import PREFIX, QUEUE, TierBuilder
from support.transfers import HeldExecutor

from backends.errors import UnavailableError
from backends.testing.faulty import Fault, FaultyStore, Rule
from backends.wrapping import MeteredStore
from fetcher.limits import WindowLimits
from tiered.clock import ManualClock, SystemClock
from tiered.errors import ClosedError, DataError, ExpiredError, InvalidError, StoreUnavailableError
from tiered.log.decode import TierBatch
from tiered.log.state import Gap
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from fetcher.fetcher import TieredMessageFetcher
    from tiered.log.parts import Part

KIB = 1024
SMALL = {
    "block_bytes": 64 * KIB,
    "chunk_bytes": 128 * KIB,
    "gap_bytes": 0,
    "cache_bytes": 512 * KIB,
    "read_timeout_s": 3.0,
    "window": WindowLimits(bytes_min=64 * KIB, bytes_max=256 * KIB),
}

ITEM = st.one_of(
    st.none(),
    st.binary(max_size=30),
    st.tuples(st.integers(1, 4), st.binary(max_size=9)),
    st.integers(10, 200),
)
"""An item, or the size of a large body in KiB."""
STEPS = st.lists(
    st.one_of(st.lists(ITEM, min_size=1, max_size=8), st.integers(1, 9)), min_size=1, max_size=6
)


def build(steps: list[Any], first: int = 0) -> tuple[TierBuilder, dict[int, bytes], list[Any]]:
    builder, wanted, gaps = TierBuilder(), {}, []
    for number, step in enumerate([[b"first"], *steps]):
        at = builder.file(QUEUE, first).append_offset
        if isinstance(step, int):
            builder.gap(step)
            gaps.append((at, at + step))
        else:
            items = [bytes([x]) * (x * KIB) if isinstance(x, int) else x for x in step]
            builder.add(items, first=first, roll=number % 3 == 2)
            wanted |= expected(at, items)
    return builder, wanted, gaps


@settings(deadline=None, max_examples=60)
@given(STEPS, st.sampled_from([0, 5]), st.integers(1, 300 * KIB), st.integers(1, 9))
def test_i1_i3_every_message_once_in_order_byte_for_byte(
    steps: list[Any], first: int, bytes_max: int, count_max: int
):
    builder, wanted, gaps = build(steps, first)
    fetcher = fetcher_of(builder.store, **SMALL)
    found, met = read_all(fetcher, first, bytes_max=bytes_max, count_max=count_max)
    assert found == wanted
    assert [(gap.start, gap.end) for gap in met] == gaps
    assert fetcher.stats().reserved_bytes == 0
    fetcher.close()


@settings(deadline=None, max_examples=40)
@given(STEPS, st.randoms(use_true_random=False))
def test_groups_that_read_anywhere_get_what_is_there(steps: list[Any], rng: random.Random):
    builder, wanted, _ = build(steps)
    fetcher = fetcher_of(builder.store, **SMALL)
    end = builder.file(QUEUE).commit_offset
    for _ in range(40):
        start = rng.randrange(end + 2)
        bytes_max, count_max = rng.choice([1, 50_000, 1 << 20]), rng.choice([1, 3, 1000])
        found = fetcher.read(
            rng.choice("abc"), QUEUE, QueueOffset(start), bytes_max=bytes_max, count_max=count_max
        )
        if found is None:
            assert start >= end
        elif isinstance(found, Gap):
            assert found.start <= start < found.end
        else:
            assert rows(found) == {n: wanted[n] for n in range(start, found.end_offset)}
            assert 1 <= found.records.count <= count_max
        assert fetcher.stats().reserved_bytes == 0
    fetcher.close()


def test_a_batch_is_bounded_by_bytes_and_by_count_but_takes_one():
    builder = TierBuilder()
    builder.add([b"x" * 1000] * 10)
    fetcher = fetcher_of(builder.store)
    assert [len(rows(b)) for b in batches(fetcher, bytes_max=1)] == [1] * 10
    assert [len(rows(b)) for b in batches(fetcher, bytes_max=2500)] == [2] * 5
    assert [len(rows(b)) for b in batches(fetcher, count_max=4)] == [4, 4, 2]


def test_an_inner_batch_is_not_divided_by_bytes():
    builder = TierBuilder()
    builder.add([b"a", (3, b"x" * 500), b"b"])
    fetcher = fetcher_of(builder.store)
    assert [len(rows(b)) for b in batches(fetcher, bytes_max=10)] == [1, 3, 1]
    assert [len(rows(b)) for b in batches(fetcher, count_max=2)] == [2, 2, 1]


def big(parts: int = 4, each: int = 8, size: int = 100 * KIB) -> TierBuilder:
    builder = TierBuilder()
    for part in range(parts):
        builder.add([bytes([65 + part]) * size for _ in range(each)])
    return builder


def test_groups_share_what_was_read_once():
    store = MeteredStore(big().store)
    fetcher = fetcher_of(store)
    read_all(fetcher, group="one")
    before = store.snapshot().requests
    for group in ("two", "three"):
        read_all(fetcher, group=group)
    assert store.snapshot().requests == before


def test_reading_in_order_asks_for_little_more_than_it_delivers():
    store = MeteredStore(big(parts=8, each=40).store)
    fetcher = fetcher_of(store, cache_bytes=16 << 20)
    read_all(fetcher)
    stats = fetcher.transfers.stats
    assert stats.received_bytes <= 1.05 * fetcher.stats().delivered_bytes


def test_what_is_ahead_is_bounded_by_what_was_read():
    builder = big(parts=1, each=200)
    fetcher = fetcher_of(builder.store, window=WindowLimits(bytes_min=256 * KIB))
    for _ in batches(fetcher, bytes_max=64 * KIB):
        (stream,) = fetcher._readers.streams()
        ahead = stream.asked - stream.here
        assert ahead <= fetcher.stats().delivered_bytes / 2 + 3 * 256 * KIB


@pytest.mark.parametrize("cache_kib", [256, 1024])
def test_i8_the_budget_holds_with_many_groups_in_threads(cache_kib: int):
    builder = big(parts=6, each=10, size=30 * KIB)
    more = {**SMALL, "cache_bytes": cache_kib * KIB}
    with ThreadPoolExecutor(8) as pool:
        fetcher = fetcher_of(builder.store, executor=pool, clock=SystemClock(), **more)
        wanted, _ = read_all(fetcher_of(builder.store))
        high = []
        results = []

        def work(group: str) -> None:
            found: dict[int, bytes] = {}
            for batch in batches(fetcher, group=group, count_max=3):
                assert isinstance(batch, TierBatch)
                found |= rows(batch)
                stats = fetcher.stats()
                high.append(stats.cached_bytes + stats.reserved_bytes)
            results.append(found)

        threads = [threading.Thread(target=work, args=(str(n),)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fetcher.close()
    assert results == [wanted] * 12
    assert max(high) <= cache_kib * KIB


def test_a_record_larger_than_the_cache_passes():
    builder = TierBuilder()
    items = [b"a", b"x" * (900 * KIB), b"b"]
    builder.add(items)
    found, _ = read_all(fetcher_of(builder.store, **SMALL))
    assert found == expected(0, items)


def test_what_expires_unread_halves_the_window():
    clock = ManualClock()
    fetcher = fetcher_of(
        big(parts=1, each=100).store, clock=clock, unread_seconds=5.0,
        window=WindowLimits(bytes_min=128 * KIB, bytes_max=4 << 20),
    )  # fmt: skip
    chunks = batches(fetcher, bytes_max=128 * KIB)
    for _ in range(20):
        next(chunks)
    (stream,) = fetcher._readers.streams()
    window, asked = stream.window, stream.asked
    assert window > 1 << 20
    clock.advance(11.0)
    fetcher.tick()
    assert stream.window <= window // 2
    assert stream.asked < asked
    assert fetcher.stats().unread_bytes > 0
    assert fetcher.stats().cached_bytes == 0
    assert len([*chunks]) == 80


def test_who_asks_for_one_message_gets_no_more_than_a_block_ahead():
    fetcher = fetcher_of(big(parts=1, each=400, size=10 * KIB).store)
    for start in (300, 100, 200):
        fetcher.read("g", QUEUE, QueueOffset(start), count_max=1)
    index_bytes = 400 * 20 + 2000
    assert fetcher.transfers.stats.received_bytes <= 3 * (2 * 256 + 64) * KIB + index_bytes


def test_a_reader_that_goes_elsewhere_begins_small_again():
    fetcher = fetcher_of(big(parts=1, each=100).store, window=WindowLimits(bytes_min=64 * KIB))
    chunks = batches(fetcher, bytes_max=64 * KIB)
    for _ in range(20):
        next(chunks)
    (stream,) = fetcher._readers.streams()
    grown = stream.window
    assert isinstance(fetcher.read("g", QUEUE, QueueOffset(90), bytes_max=1), TierBatch)
    assert stream.window == 64 * KIB < grown
    assert isinstance(fetcher.read("g", QUEUE, QueueOffset(90), bytes_max=1), TierBatch)
    assert stream.window == 64 * KIB


def test_a_reader_at_the_end_and_one_that_has_done_take_no_share_of_the_window():
    fetcher = fetcher_of(big(parts=1, each=100).store)
    read_all(fetcher, group="reads all")
    assert fetcher.stats().streams == 0
    chunks = batches(fetcher, group="stops", bytes_max=128 * KIB)
    for _ in range(9):
        next(chunks)
    assert fetcher.stats().streams == 1
    fetcher.forget("other")
    assert fetcher.stats().streams == 1
    fetcher.forget("stops")
    assert fetcher.stats().streams == 0
    assert len([*chunks]) == 91


def test_a_forgotten_reader_leaves_nothing():
    clock = ManualClock()
    fetcher = fetcher_of(big().store, clock=clock)
    read_all(fetcher)
    clock.advance(1000.0)
    fetcher.tick()
    stats = fetcher.stats()
    assert (stats.streams, stats.cached_bytes, stats.reserved_bytes) == (0, 0, 0)


# -- trouble ------------------------------------------------------------------------------------


def test_a_read_ends_at_its_deadline():
    fetcher = fetcher_of(big().store, executor=HeldExecutor(), clock=SystemClock())
    with pytest.raises(StoreUnavailableError, match="deadline"):
        fetcher.read("g", QUEUE, QueueOffset(0), timeout_s=0.05)
    fetcher.close()


def test_an_outage_is_an_outage_and_passes():
    store = FaultyStore(big().store, random.Random(1))
    fetcher = fetcher_of(store)
    store.add(Rule(Fault.UNAVAILABLE, frozenset({"get"})))
    with pytest.raises(UnavailableError):
        fetcher.read("g", QUEUE, QueueOffset(0))
    assert len(read_all(fetcher)[0]) == 32


def test_a_closed_fetcher_says_so():
    fetcher = fetcher_of(big().store)
    fetcher.close()
    with pytest.raises(ClosedError):
        fetcher.read("g", QUEUE, QueueOffset(0))


def test_a_queue_that_is_not_there_is_an_error():
    with pytest.raises(InvalidError, match="no queue"):
        fetcher_of(big().store).read("g", MessageQueue("other", 0), QueueOffset(0))


def damage(builder: TierBuilder, part: Part, position: int) -> None:
    """Flip a bit of its section."""
    key, position = PREFIX + part.bundle.key, part.section.start + position
    data = bytearray(builder.store.get(key))
    data[position] ^= 1
    builder.store.delete(key)
    builder.store.put_if_absent(key, bytes(data))


def test_a_damaged_block_costs_only_what_lies_in_it():
    builder = TierBuilder()
    items = [bytes([65 + n]) * (64 * KIB) for n in range(8)]
    damage(builder, builder.add(items), 4 * 64 * KIB + 5000)
    fetcher = fetcher_of(builder.store)
    for offset in range(8):
        if offset in {3, 4}:  # records are a little larger than blocks: block 4 holds parts of both
            with pytest.raises(DataError, match=r"bytes \[262144, 327680\) fail"):
                fetcher.read("g", QUEUE, QueueOffset(offset))
        else:
            batch = fetcher.read("g", QUEUE, QueueOffset(offset))
            assert isinstance(batch, TierBatch)
            assert rows(batch)[offset] == expected(offset, [items[offset]])[offset]


def test_a_damaged_block_of_a_small_section_costs_only_what_lies_in_it():
    builder = TierBuilder()
    items = [bytes([65 + n]) * (16 * KIB) for n in range(12)]
    part = builder.add(items)
    assert part.section.size_bytes < 256 * KIB
    damage(builder, part, 64 * KIB + 5000)
    fetcher = fetcher_of(builder.store)
    lost = set()
    for offset in range(12):
        try:
            batch = fetcher.read("g", QUEUE, QueueOffset(offset), bytes_max=1)
        except DataError:
            lost.add(offset)
            continue
        assert isinstance(batch, TierBatch)
        assert rows(batch) == expected(offset, [items[offset]])
    assert lost == {3, 4, 5, 6, 7}, "what lies in the second block of 64 KiB"


@pytest.mark.parametrize("each", [1, 64])
def test_a_damaged_block_table_costs_no_message(each: int):
    builder = TierBuilder()
    items = [bytes([65 + n]) * (each * KIB) for n in range(8)]
    part = builder.add(items)
    damage(builder, part, part.section.size_bytes - 2)
    assert read_all(fetcher_of(builder.store, **SMALL))[0] == expected(0, items)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_i3_one_flipped_bit_gives_an_error_or_the_true_bytes(draw: st.DataObject):
    builder = TierBuilder()
    items = [b"hello", None, (3, b"inner"), b"world" * 20]
    part = builder.add(items)
    damage(builder, part, draw.draw(st.integers(0, part.bundle.size_bytes - 1)))
    try:
        found, _ = read_all(fetcher_of(builder.store))
    except DataError as error:
        is_right = part.bundle.key in error.where
    else:
        is_right = found == expected(0, items)
    assert is_right


def gone(builder: TierBuilder) -> TieredMessageFetcher:
    """A fetcher whose view is older than what becomes of the objects."""
    return fetcher_of(builder.store)


def test_an_object_that_is_gone_is_damage_only_after_a_look_at_the_journal():
    builder = TierBuilder()
    part = builder.add([b"one"])
    builder.store.delete(PREFIX + part.bundle.key)
    with pytest.raises(DataError, match="is gone"):
        gone(builder).read("g", QUEUE, QueueOffset(0))


def test_what_has_expired_meanwhile_is_called_so():
    builder = TierBuilder()
    part = builder.add([b"one"])
    builder.add([b"two"], roll=True)
    fetcher = gone(builder)
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert incarnation
    builder.say(
        {
            "do": "expire", "topic": QUEUE.topic, "queue_id": QUEUE.queue_id, "incarnation": 0,
            "min_from": 0, "min_to": 1, "position": 0,
        }
    )  # fmt: skip
    builder.store.delete(PREFIX + part.bundle.key)
    with pytest.raises(ExpiredError):
        fetcher.read("g", QUEUE, QueueOffset(0))
    batch = fetcher.read("g", QUEUE, QueueOffset(1))
    assert isinstance(batch, TierBatch)
    assert rows(batch) == expected(1, [b"two"])
