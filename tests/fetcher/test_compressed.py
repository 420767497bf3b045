"""Reading ahead in compressed segments: the same messages, few requests, and bounds that hold."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fetching import batches, expected, fetcher_of, read_all, rows
from support.journals import PREFIX
from support.packing import noise, pack, parts_of, text
from support.tiers import QUEUE, TIME_MS, TierBuilder
from support.transfers import HeldExecutor

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from fetcher.window import WindowLimits
from fetcher.wire_ranges import WireRanges
from tiered.clock import ManualClock, SystemClock
from tiered.dispatch.packing import Compression
from tiered.errors import DataError, StoreUnavailableError
from tiered.log.by_time import find_by_time
from tiered.log.decode import TierBatch
from tiered.log.reader import TierReader
from tiered.log.seal import SealPolicy
from tiered.log.view import LifeView
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from backends.base import ByteRange, ObjectStore
    from tiered.log.parts import Part

KIB = 1024
SMALL: dict[str, Any] = {
    "block_bytes": 64 * KIB,
    "piece_bytes": 128 * KIB,
    "gap_bytes": 0,
    "cache_bytes": 512 * KIB,
    "read_timeout_s": 3.0,
    "window": WindowLimits(bytes_min=64 * KIB, bytes_max=256 * KIB),
}
MERGING = SealPolicy(1 << 20, 8 << 20, packs=True)


class Noting(WrappingStore):
    """Remembers what was asked for."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.asked: list[tuple[str, int, int]] = []

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        data = super().get(key, byte_range)
        start = byte_range.start if byte_range else 0
        if "/journal/" not in key:
            self.asked.append((key.removeprefix(PREFIX), start, start + len(data)))
        return data


class Large(NamedTuple):
    """A tier with one packed part that is not read whole at once: half of it can not be compressed."""

    store: MemoryStore
    wanted: dict[int, bytes]
    part: Part

    @property
    def trailer(self) -> tuple[int, int]:
        return self.part.log.stored_bytes, self.part.log.object_bytes


@cache
def made() -> Large:
    builder = TierBuilder()
    items = [noise(n, 5 * KIB) + text(n, 5 * KIB) for n in range(120)]
    builder.add(items)
    pack(builder, compression=Compression(block_bytes=64 * KIB))
    (part,) = parts_of(builder)
    assert part.log.is_packed
    assert part.log.object_bytes > 256 * KIB
    assert isinstance(builder.store, MemoryStore)
    return Large(builder.store, expected(0, items), part)


@pytest.fixture
def large() -> Large:
    store = MemoryStore()
    for info in made().store.list(""):
        store.put_if_absent(info.key, made().store.get(info.key))
    return made()._replace(store=store)


ITEM = st.one_of(
    st.none(),
    st.binary(max_size=30),
    st.tuples(st.integers(1, 4), st.binary(max_size=9)),
    st.builds(text, st.integers(0, 9), st.integers(1000, 90 * KIB)),
    st.builds(noise, st.integers(0, 9), st.integers(1000, 90 * KIB)),
)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(ITEM, min_size=1, max_size=8), min_size=1, max_size=4),
    st.sampled_from([2 * KIB, 64 * KIB]),
    st.integers(1, 200 * KIB),
    st.integers(1, 9),
)
def test_i1_i3_every_message_once_in_order_byte_for_byte(
    parts: list[list[Any]], block_bytes: int, bytes_max: int, count_max: int
):
    builder, wanted = TierBuilder(), dict[int, bytes]()
    for items in parts:
        wanted |= expected(builder.file(QUEUE).append_offset, items)
        builder.add(items)
    pack(builder, MERGING, compression=Compression(block_bytes=block_bytes))
    fetcher = fetcher_of(builder.store, **SMALL)
    found, _ = read_all(fetcher, bytes_max=bytes_max, count_max=count_max)
    assert found == wanted
    assert fetcher.stats().reserved_bytes == 0
    fetcher.close()


def test_the_trailer_comes_once_with_the_index_and_no_byte_comes_twice(large: Large):
    part, store = large.part, Noting(large.store)
    fetcher = fetcher_of(store, **SMALL)
    assert read_all(fetcher, count_max=5)[0] == large.wanted
    mine = [(start, end) for key, start, end in store.asked if key == part.log.key]
    assert mine.count(large.trailer) == 1
    assert store.asked.index((part.log.key, *large.trailer)) <= 1, "beside the index"
    # A piece of messages begins and ends within a packed block, which then belongs to two pieces.
    pieces = len(mine) - 1
    assert pieces <= part.log.payload_bytes // (64 * KIB) + 2
    assert sum(end - start for start, end in mine) <= part.log.object_bytes + pieces * 64 * KIB
    fetcher.close()


def test_a_part_that_fits_into_the_window_takes_one_request_for_its_records(large: Large):
    part, store = large.part, Noting(large.store)
    more = {"piece_bytes": 8 << 20, "window": WindowLimits(bytes_min=8 << 20)}
    assert read_all(fetcher_of(store, **more))[0] == large.wanted
    mine = [(start, end) for key, start, end in store.asked if key == part.log.key]
    assert mine == [(part.log.trailer_bytes, part.log.object_bytes)]


def test_a_trailer_that_was_forgotten_is_asked_for_again(large: Large):
    part, store = large.part, Noting(large.store)
    assert read_all(fetcher_of(store, **SMALL, trailer_bytes=0), count_max=7)[0] == large.wanted
    assert store.asked.count((part.log.key, *large.trailer)) > 3


def test_i8_trailers_take_a_bounded_room():
    builder = TierBuilder()
    items = [noise(n, 5 * KIB) + text(n, 5 * KIB) for n in range(60)]
    wanted: dict[int, bytes] = {}
    for _ in range(5):
        wanted |= expected(builder.file(QUEUE).append_offset, items)
        builder.add(items, roll=True)
    pack(builder)
    fetcher = fetcher_of(builder.store, **SMALL, trailer_bytes=3000)
    assert read_all(fetcher)[0] == wanted
    loader = fetcher._stock._loader
    assert 0 < len(loader._trailers) < 5
    assert loader._memory_bytes == sum(one.memory_bytes for one in loader._trailers.values())
    assert loader._memory_bytes <= 3000


def test_by_time_as_a_plain_segment(large: Large):
    store, clock = Noting(large.store), ManualClock()
    fetcher = fetcher_of(store, **SMALL)
    reader = TierReader(store, PREFIX)
    reader.refresh()
    life = reader.queue(QUEUE).life
    for offset in (0, 60, 119):
        store.asked.clear()
        ranges = WireRanges(fetcher.transfers, store, PREFIX, "s", clock, clock.monotonic_s() + 9)
        assert find_by_time(LifeView.of(QUEUE, life), ranges, TIME_MS + offset) == offset
        assert store.asked.count((large.part.log.key, *large.trailer)) == (offset > 0)


def test_many_groups_in_threads_get_what_is_there(large: Large):
    with ThreadPoolExecutor(8) as pool:
        fetcher = fetcher_of(large.store, executor=pool, clock=SystemClock(), **SMALL)
        results: list[dict[int, bytes]] = []

        def work(group: str) -> None:
            found: dict[int, bytes] = {}
            for batch in batches(fetcher, group=group, count_max=3):
                assert isinstance(batch, TierBatch)
                found |= rows(batch)
            results.append(found)

        threads = [threading.Thread(target=work, args=(str(n),)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fetcher.close()
    assert results == [large.wanted] * 6


# -- trouble --------------------------------------------------------------------------------------


def test_a_read_that_waits_for_a_trailer_ends_at_its_deadline(large: Large):
    executor = HeldExecutor()
    fetcher = fetcher_of(large.store, executor=executor, clock=SystemClock(), **SMALL)
    with pytest.raises(StoreUnavailableError, match="deadline"):
        fetcher.read("g", QUEUE, QueueOffset(0), timeout_s=0.05)
    executor.run_all()
    fetcher.close()
    assert fetcher.stats().reserved_bytes == 0


def change(large: Large, data: bytes) -> None:
    key = PREFIX + large.part.log.key
    large.store.delete(key)
    large.store.put_if_absent(key, data)


def damage(large: Large, position: int) -> None:
    data = bytearray(large.store.get(PREFIX + large.part.log.key))
    data[position] ^= 1
    change(large, bytes(data))


def test_a_damaged_block_costs_only_what_lies_in_it(large: Large):
    damage(large, 70 * KIB)
    fetcher = fetcher_of(large.store, **SMALL)
    lost = set()
    for offset in large.wanted:
        try:
            batch = fetcher.read("g", QUEUE, QueueOffset(offset), count_max=1)
        except DataError:
            lost.add(offset)
            continue
        assert isinstance(batch, TierBatch)
        assert rows(batch)[offset] == large.wanted[offset]
    assert 6 <= len(lost) <= 9, "64 KiB of records of 10 KiB"
    fetcher.close()


@pytest.mark.parametrize("from_end", [5, 20, 60, 150])
def test_a_damaged_trailer_costs_no_message(large: Large, from_end: int):
    damage(large, large.part.log.object_bytes - from_end)
    fetcher = fetcher_of(large.store, **SMALL)
    assert read_all(fetcher)[0] == large.wanted
    fetcher.close()


def test_without_both_trailers_the_object_is_lost(large: Large):
    damage(large, 10)
    damage(large, large.part.log.object_bytes - 10)
    fetcher = fetcher_of(large.store, **SMALL)
    with pytest.raises(DataError):
        fetcher.read("g", QUEUE, QueueOffset(0))
    fetcher.close()


def test_of_a_truncated_object_the_rest_is_damage(large: Large):
    data = large.store.get(PREFIX + large.part.log.key)
    change(large, data[: len(data) // 2])
    fetcher = fetcher_of(large.store, **SMALL)
    batch = fetcher.read("g", QUEUE, QueueOffset(0), count_max=1)
    assert isinstance(batch, TierBatch)
    assert rows(batch)[0] == large.wanted[0]
    with pytest.raises(DataError, match="cut short"):
        fetcher.read("g", QUEUE, QueueOffset(len(large.wanted) - 1))
    fetcher.close()
