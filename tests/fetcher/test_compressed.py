"""Reading ahead in compressed sections: the same messages, few requests, and bounds that hold."""

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
from support.merging import gather, merge, noise, parts_of, text
from support.tiers import QUEUE, TIME_MS, TierBuilder
from support.transfers import HeldExecutor

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from fetcher.limits import WindowLimits
from fetcher.transfers import AskingStore
from tiered.clock import ManualClock, SystemClock
from tiered.errors import DataError, StoreUnavailableError
from tiered.log.cursor import IncarnationView
from tiered.log.decode import TierBatch
from tiered.log.merge import MergePolicy
from tiered.log.reader import StoreRanges, TierReader, find_by_time
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from backends.base import ByteRange, ObjectStore
    from tiered.log.parts import Part

KIB = 1024
SMALL: dict[str, Any] = {
    "block_bytes": 64 * KIB,
    "chunk_bytes": 128 * KIB,
    "gap_bytes": 0,
    "cache_bytes": 512 * KIB,
    "read_timeout_s": 3.0,
    "window": WindowLimits(bytes_min=64 * KIB, bytes_max=256 * KIB),
}
MERGING = MergePolicy(fan_in=2, own_bytes=1 << 20)


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
    def behind(self) -> tuple[int, int]:
        """Dictionary, items and block table, in the bundle."""
        place = self.part.section
        return place.start + place.stored_bytes, place.start + place.size_bytes


@cache
def made() -> Large:
    builder = TierBuilder()
    items = [noise(n, 5 * KIB) + text(n, 5 * KIB) for n in range(120)]
    builder.add(items)
    gather(builder)
    (part,) = parts_of(builder)
    assert part.section.is_packed
    assert part.section.size_bytes > 256 * KIB
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
    st.booleans(),
    st.integers(1, 200 * KIB),
    st.integers(1, 9),
)
def test_i1_i3_every_message_once_in_order_byte_for_byte(
    parts: list[list[Any]], in_one: bool, bytes_max: int, count_max: int
):
    builder, wanted = TierBuilder(), dict[int, bytes]()
    for items in parts:
        wanted |= expected(builder.file(QUEUE).append_offset, items)
        builder.add(items)
    if in_one:
        gather(builder)
    else:
        merge(builder, MERGING)
    fetcher = fetcher_of(builder.store, **SMALL)
    found, _ = read_all(fetcher, bytes_max=bytes_max, count_max=count_max)
    assert found == wanted
    assert fetcher.stats().reserved_bytes == 0
    fetcher.close()


def test_the_block_table_comes_once_with_the_index_and_no_byte_comes_twice(large: Large):
    part, store = large.part, Noting(large.store)
    fetcher = fetcher_of(store, **SMALL)
    assert read_all(fetcher, count_max=5)[0] == large.wanted
    mine = [(start, end) for key, start, end in store.asked if key == part.bundle.key]
    assert mine[0] == large.behind, "index and block table with one request"
    assert mine.count(large.behind) == 1
    # A chunk of messages begins and ends within a packed block, which then belongs to two pieces.
    chunks = len(mine) - 1
    assert chunks <= part.log_bytes // (64 * KIB) + 2
    assert sum(end - start for start, end in mine) <= part.section.size_bytes + chunks * 128 * KIB
    fetcher.close()


def test_a_part_that_fits_into_the_window_takes_one_request(large: Large):
    part, store = large.part, Noting(large.store)
    more = {"chunk_bytes": 8 << 20, "window": WindowLimits(bytes_min=8 << 20)}
    assert read_all(fetcher_of(store, **more))[0] == large.wanted
    mine = [(start, end) for key, start, end in store.asked if key == part.bundle.key]
    assert mine == [(part.section.start, part.section.start + part.section.size_bytes)]


def test_a_block_table_that_was_forgotten_is_asked_for_again(large: Large):
    part, store = large.part, Noting(large.store)
    assert read_all(fetcher_of(store, **SMALL, table_bytes=0), count_max=7)[0] == large.wanted
    assert store.asked.count((part.bundle.key, *large.behind)) > 3


def test_i8_block_tables_take_a_bounded_room():
    builder = TierBuilder()
    items = [noise(n, 5 * KIB) + text(n, 5 * KIB) for n in range(60)]
    wanted: dict[int, bytes] = {}
    for _ in range(5):
        wanted |= expected(builder.file(QUEUE).append_offset, items)
        builder.add(items, roll=True)
    gather(builder)
    fetcher = fetcher_of(builder.store, **SMALL, table_bytes=1500)
    assert read_all(fetcher)[0] == wanted
    tables = fetcher._stock._loader._tables
    held = [entry.value.memory_bytes for entry in tables._entries.values()]
    assert 0 < len(held) < 5
    assert tables.held_bytes == sum(held) <= 1500


def test_by_time_as_a_plain_section(large: Large):
    store, clock = Noting(large.store), ManualClock()
    fetcher = fetcher_of(store, **SMALL)
    reader = TierReader(store, PREFIX)
    reader.refresh()
    incarnation = reader.queue(QUEUE).incarnation
    for offset in (0, 60, 119):
        store.asked.clear()
        asking = AskingStore(fetcher.transfers, store, "s", clock, clock.monotonic_s() + 9)
        ranges = StoreRanges(asking, PREFIX)
        assert (
            find_by_time(IncarnationView.of(QUEUE, incarnation), ranges, TIME_MS + offset) == offset
        )
        assert store.asked.count((large.part.bundle.key, *large.behind)) == (offset > 0)


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


def test_a_read_that_waits_for_a_block_table_ends_at_its_deadline(large: Large):
    executor = HeldExecutor()
    fetcher = fetcher_of(large.store, executor=executor, clock=SystemClock(), **SMALL)
    with pytest.raises(StoreUnavailableError, match="deadline"):
        fetcher.read("g", QUEUE, QueueOffset(0), timeout_s=0.05)
    executor.run_all()
    fetcher.close()
    assert fetcher.stats().reserved_bytes == 0


def change(large: Large, data: bytes) -> None:
    key = PREFIX + large.part.bundle.key
    large.store.delete(key)
    large.store.put_if_absent(key, data)


def damage(large: Large, position: int) -> None:
    data = bytearray(large.store.get(PREFIX + large.part.bundle.key))
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
    assert 12 <= len(lost) <= 15, "128 KiB of records of 10 KiB"
    fetcher.close()


@pytest.mark.parametrize("from_end", [1, 20, 60])
def test_a_damaged_block_table_costs_no_message(large: Large, from_end: int):
    damage(large, large.behind[1] - from_end)
    fetcher = fetcher_of(large.store, **SMALL)
    assert read_all(fetcher)[0] == large.wanted
    fetcher.close()


def test_of_a_truncated_bundle_the_sections_before_are_sound():
    builder = TierBuilder()
    items = [noise(n, 5 * KIB) + text(n, 5 * KIB) for n in range(60)]
    builder.add(items)
    builder.add(items, roll=True)
    gather(builder)
    first, second = parts_of(builder)
    key = PREFIX + first.bundle.key
    data = builder.store.get(key)
    builder.store.delete(key)
    builder.store.put_if_absent(key, data[: second.section.start + second.section.size_bytes // 2])
    fetcher = fetcher_of(builder.store, **SMALL)
    found = {}
    for batch in batches(fetcher, count_max=1):
        assert isinstance(batch, TierBatch)
        found |= rows(batch)
        if batch.end_offset == second.queue_offset:
            break
    assert found == expected(0, items)
    with pytest.raises(DataError, match="the bundle has"):
        fetcher.read("g", QUEUE, second.queue_offset)
    fetcher.close()
