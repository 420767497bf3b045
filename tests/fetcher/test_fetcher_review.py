"""What a review of the fetcher has found: each of these failed once."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from support.fetching import batches, expected, fetcher_of, read_all, rows, view_of
from support.journals import PREFIX
from support.merging import delete_unnamed, gather, named_bundles
from support.tiers import QUEUE, TierBuilder
from support.transfers import HeldExecutor

from backends.errors import UnavailableError
from backends.wrapping import MeteredStore, WrappingStore
from fetcher.limits import WindowLimits
from fetcher.runs import Run
from fetcher.window import PARTS_MAX
from tiered.clock import ManualClock, SystemClock
from tiered.errors import DataError, StoreUnavailableError
from tiered.log.decode import TierBatch
from tiered.log.parts import queue_action
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from backends.base import ByteRange

KIB = 1024


def test_what_was_truncated_is_not_given_out_of_the_cache():
    builder = TierBuilder()
    items = [bytes([65 + n]) * 100 for n in range(10)]
    builder.add(items)
    fetcher = fetcher_of(builder.store)
    assert read_all(fetcher)[0] == expected(0, items)
    builder.truncate(4)
    fetcher.refresh()
    assert read_all(fetcher)[0] == expected(0, items[:4])
    assert read_all(fetcher, group="other")[0] == expected(0, items[:4])


def test_holes_that_were_cut_in_two_are_told_apart():
    builder = TierBuilder()
    builder.add([None, None, None, b"x"])
    fetcher = fetcher_of(builder.store)
    read_all(fetcher)
    builder.truncate(2)
    fetcher.refresh()
    assert read_all(fetcher)[0] == {0: b"", 1: b""}


def test_what_is_dropped_leaves_memory_at_once():
    builder = TierBuilder()
    for part in range(12):
        builder.add([bytes([65 + part]) * (100 * KIB)] * 5)
    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(2) as pool:
            fetcher = fetcher_of(
                builder.store, executor=pool, cache_bytes=2 << 20, chunk_bytes=1 << 20
            )
            for start in range(60):  # each by another reader, who then stays away
                fetcher.read(f"group {start}", QUEUE, QueueOffset(start), count_max=1)
            pool.shutdown()
            alive = [thing for thing in gc.get_objects() if isinstance(thing, Run)]
            assert sum(run.size_bytes for run in alive) <= 2 << 20
    finally:
        gc.enable()


def test_the_budget_counts_what_small_things_take():
    builder = TierBuilder()
    for _ in range(200):
        builder.add([b"x"])
    fetcher = fetcher_of(builder.store)
    read_all(fetcher)
    assert fetcher.stats().cached_bytes > 200 * 3 * KIB


def test_a_slice_keeps_no_whole_object_or_index_in_memory():
    builder = TierBuilder()
    builder.add([bytes(70 * KIB)] * 20)
    fetcher = fetcher_of(
        builder.store, block_bytes=64 * KIB, chunk_bytes=64 * KIB, cache_bytes=1 << 20
    )
    for batch in batches(fetcher, bytes_max=1):
        assert isinstance(batch, TierBatch)
        data = memoryview(batch.records.data)
        assert memoryview(data.obj).nbytes <= 1.07 * data.nbytes
        base = batch.records.sizes.base
        assert base is None or len(base) < 5


def batch_at(fetcher: Any, start: int, **more: Any) -> TierBatch:
    batch = fetcher.read("g", QUEUE, QueueOffset(start), **more)
    assert isinstance(batch, TierBatch)
    return batch


def test_a_start_below_the_minimum_has_not_expired_again_when_objects_were_merged():
    builder = TierBuilder()
    builder.add([b"zero"])
    builder.add([b"one"], roll=True)
    builder.add([b"two"])
    builder.add([b"three"], roll=True)
    fields = {"min_from": 0, "min_to": 1, "position": 0}
    builder.say(queue_action("expire", QUEUE, 0, **fields))
    fetcher = fetcher_of(builder.store)
    before = named_bundles(builder)
    gather(builder)
    delete_unnamed(builder, before)
    assert rows(batch_at(fetcher, 0))[1] == expected(1, [b"one"])[1]


def test_a_gap_is_no_leap():
    builder = TierBuilder()
    builder.add([bytes(50 * KIB)] * 10)
    builder.gap(5)
    builder.add([bytes(50 * KIB)] * 10)
    fetcher = fetcher_of(builder.store, window=WindowLimits(bytes_min=64 * KIB))
    for _ in batches(fetcher, bytes_max=50 * KIB):
        (stream,) = fetcher._readers.streams()
    assert stream.window > 400 * KIB
    assert fetcher.stats().unread_bytes == 0
    assert fetcher.transfers.stats.received_bytes <= 1.2 * fetcher.stats().delivered_bytes


def test_going_on_in_the_middle_of_the_last_batch_is_no_leap():
    builder = TierBuilder()
    builder.add([bytes(10 * KIB)] * 100)
    fetcher = fetcher_of(builder.store, window=WindowLimits(bytes_min=64 * KIB))
    start = 0
    while start < 90:
        start = min(start + 5, batch_at(fetcher, start, count_max=10).end_offset)
    (stream,) = fetcher._readers.streams()
    assert stream.window > 400 * KIB
    assert fetcher.stats().unread_bytes == 0


def test_a_deadline_of_zero_is_now():
    builder = TierBuilder()
    builder.add([b"x"])
    held = HeldExecutor()
    fetcher = fetcher_of(builder.store, executor=held, clock=SystemClock())
    for timeout_s in (0, -1.0, 1e-9):
        with pytest.raises(StoreUnavailableError, match="deadline"):
            batch_at(fetcher, 0, timeout_s=timeout_s)
    held.run_all()
    assert rows(batch_at(fetcher, 0, timeout_s=0)) == expected(0, [b"x"])


def test_tiny_parts_are_planned_and_asked_for_in_small_numbers():
    builder = TierBuilder()
    for _ in range(400):
        builder.add([b"x"])
    store = MeteredStore(builder.store)
    fetcher = fetcher_of(store)
    before = store.snapshot().requests
    batch_at(fetcher, 0)
    assert store.snapshot().requests - before <= 2 * 1024 * KIB / (8 * KIB) + 2
    assert view_of(fetcher).incarnation.commit_offset == 400 > PARTS_MAX
    assert len(read_all(fetcher)[0]) == 400


class Failing(WrappingStore):
    """Reads fail while ``fails``; counts them, and those that reach position ``items_at`` of an object."""

    fails = False
    failed = indexes = 0
    items_at = 1 << 60

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.indexes += byte_range is not None and byte_range.end > self.items_at
        if self.fails:
            self.failed += 1
            raise UnavailableError("down")
        return super().get(key, byte_range)


def test_read_ahead_that_fails_is_not_asked_again_with_each_batch():
    builder = TierBuilder()
    builder.add([bytes(1000)] * 2000)
    store = Failing(builder.store)
    fetcher = fetcher_of(store, window=WindowLimits(bytes_min=1024 * KIB))
    start = batch_at(fetcher, 0, count_max=1).end_offset
    store.fails = True
    while start < 900:
        start = batch_at(fetcher, start, count_max=1).end_offset
    assert store.failed <= 4


def test_who_joins_read_ahead_that_fails_asks_by_itself():
    builder = TierBuilder()
    builder.add([bytes(100 * KIB)] * 20)
    store, held = Failing(builder.store), HeldExecutor()
    fetcher = fetcher_of(store, executor=held, clock=SystemClock(), chunk_bytes=256 * KIB)
    found: list[TierBatch] = []

    def read(start: int) -> None:
        found.append(batch_at(fetcher, start, count_max=1, bytes_max=1))

    def run(start: int, fails: bool) -> None:
        thread = threading.Thread(target=read, args=(start,))
        thread.start()
        while thread.is_alive():
            thread.join(0.01)
            store.fails = fails and not store.failed
            if held.calls and (not fails or thread.is_alive()):
                held.run()
        store.fails = False

    run(0, fails=False)
    start = 0
    while not held.calls:  # until it reads ahead
        start += 1
        read(start)
    part = view_of(fetcher).parts[0]
    while fetcher._stock.find(part, QueueOffset(start)) is not None:
        read(start)
        start += 1
    run(start, fails=True)
    assert store.failed == 1
    assert found[-1].base_offset == start


def test_a_large_record_gets_its_turn_among_small_ones():
    builder = TierBuilder()
    builder.add([bytes(200_000)] * 30)
    builder.add([bytes(1_000_000)])
    with ThreadPoolExecutor(4) as pool:
        fetcher = fetcher_of(
            Slow(builder.store), executor=pool, clock=SystemClock(), block_bytes=64 * KIB,
            chunk_bytes=256 * KIB, cache_bytes=900_000, read_timeout_s=8.0,
        )  # fmt: skip
        stop = threading.Event()

        def small(number: int) -> None:
            at = number * 7
            while not stop.is_set():
                fetcher.read(f"g{number}", QUEUE, QueueOffset(at % 30), count_max=1)
                at += 11

        threads = [threading.Thread(target=small, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        try:
            assert rows(batch_at(fetcher, 30, timeout_s=60.0))[30]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            fetcher.close()


class Slow(WrappingStore):
    """Reads take a few milliseconds."""

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        threading.Event().wait(0.005)
        return super().get(key, byte_range)


def test_a_batch_that_begins_with_holes_has_no_bytes_of_the_record_before():
    builder = TierBuilder()
    items = [b"x" * 5000, None, None, b"y"]
    builder.add(items)
    fetcher = fetcher_of(builder.store)
    batch = batch_at(fetcher, 1, bytes_max=1)
    assert rows(batch) == {n: expected(0, items)[n] for n in range(1, batch.end_offset)}
    assert memoryview(batch.records.data).nbytes < 1000


def test_near_damage_little_is_read_again_and_again():
    builder = TierBuilder()
    items = [bytes([65 + n % 20]) * (8 * KIB) for n in range(512)]
    part = builder.add(items)
    data = bytearray(builder.store.get(PREFIX + part.bundle.key))
    data[2 << 20] ^= 1
    builder.store.delete(PREFIX + part.bundle.key)
    builder.store.put_if_absent(PREFIX + part.bundle.key, bytes(data))
    fetcher = fetcher_of(builder.store)
    got = 0
    at = 0
    while at < 512:
        try:
            batch = batch_at(fetcher, at, bytes_max=64 * KIB)
        except DataError:
            at += 1
            continue
        got += len(rows(batch))
        assert memoryview(batch.records.data).nbytes <= 64 * KIB
        at = batch.end_offset
    assert 512 - got <= 10
    assert fetcher.transfers.stats.received_bytes < 5 * len(data)  # all of it, careful reads too


def test_a_queue_that_did_not_change_keeps_its_view():
    builder = TierBuilder()
    builder.add([b"x"])
    fetcher = fetcher_of(builder.store)
    view = view_of(fetcher)
    builder.add([b"y"], queue=MessageQueue("another", 1))
    assert fetcher.refresh()
    assert view_of(fetcher) is view
    builder.add([b"z"])
    assert fetcher.refresh()
    assert view_of(fetcher) is not view


def test_an_index_in_use_is_not_dropped_first():
    builder, clock = TierBuilder(), ManualClock()
    part = builder.add([bytes(20 * KIB)] * 200)
    store = Failing(builder.store)
    store.items_at = part.section.items_at
    fetcher = fetcher_of(
        store, clock=clock, block_bytes=64 * KIB, chunk_bytes=128 * KIB, cache_bytes=600 * KIB
    )
    for start in range(200):
        clock.advance(0.5)
        batch_at(fetcher, start, count_max=1)
    assert store.indexes == 1


def test_near_damage_a_read_keeps_to_its_deadline():
    builder = TierBuilder()
    part = builder.add([bytes([65 + n % 20]) * (8 * KIB) for n in range(64)])
    data = bytearray(builder.store.get(PREFIX + part.bundle.key))
    data[300 * KIB] ^= 1
    builder.store.delete(PREFIX + part.bundle.key)
    builder.store.put_if_absent(PREFIX + part.bundle.key, bytes(data))

    class Hanging(WrappingStore):
        hangs = threading.Event()
        goes_on = threading.Event()
        waited_in_vain = False

        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            if self.hangs.is_set() and not self.goes_on.wait(60):
                self.waited_in_vain = True
            return super().get(key, byte_range)

    store = Hanging(builder.store)
    with ThreadPoolExecutor(4) as pool:
        fetcher = fetcher_of(store, executor=pool, clock=SystemClock())
        with pytest.raises(DataError):
            batch_at(fetcher, 37, bytes_max=1)
        store.hangs.set()
        with pytest.raises(StoreUnavailableError, match="deadline"):
            batch_at(fetcher, 37, bytes_max=1, timeout_s=0.2)
        assert not store.waited_in_vain, "it ended before the store answered"
        store.goes_on.set()
        fetcher.close()


def test_who_goes_on_is_not_held_up_by_what_comes_for_other_queues():
    builder = TierBuilder()
    builder.add([b"x" * 100] * 10)
    fetcher = fetcher_of(builder.store)
    fetcher.read("g", QUEUE, QueueOffset(0), count_max=3)
    limits = {"bytes_max": 1 << 20, "count_max": 3}
    builder.add([b"y"], queue=MessageQueue("other", 0))
    assert fetcher.refresh()
    assert fetcher.at_hand("g", QUEUE, QueueOffset(3), **limits) is not None
    builder.add([b"z"])
    assert fetcher.refresh()
    assert fetcher.at_hand("g", QUEUE, QueueOffset(6), **limits) is None, "its own is looked at"
    assert fetcher.read("g", QUEUE, QueueOffset(6), count_max=9) is not None
    fetcher.close()
