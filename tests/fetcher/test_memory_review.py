"""What a review of lent memory and of the fetcher's locks has found: each of these failed once."""

from __future__ import annotations

import gc
import mmap
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from support.fetching import expected, fetcher_of, read_all, rows
from support.opened import opened_over
from support.tiers import QUEUE, TierBuilder
from support.transfers import ask

from backends.base import ByteRange
from backends.errors import UnavailableError
from backends.memory import MemoryStore
from fetcher import runs as module
from fetcher.limits import FetchSettings, TransferLimits, WindowLimits
from fetcher.runs import STEP_BYTES, Memory, PartLayout, run_bytes
from fetcher.transfers import AskingStore, Ticker, Transfers
from fetcher.window import plan_fetches
from tiered.api.reading import interleave, plan_span, read_span
from tiered.clock import ManualClock, SystemClock
from tiered.errors import StoreUnavailableError
from tiered.log.decode import PartItems, TierBatch
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fetcher.fetcher import TieredMessageFetcher

KIB = 1 << 10
MIB = 1 << 20


class Phoenix:
    """In a cycle with itself; when the collector comes it gives what it holds to somebody else."""

    def __init__(self, view: memoryview, heirs: list[memoryview]) -> None:
        self.view, self.heirs, self.me = view, heirs, self

    def __del__(self) -> None:
        self.heirs.append(self.view)


def test_what_a_finalizer_saves_is_not_lent_to_another():
    memory, heirs = Memory(8 * MIB, MIB), list[memoryview]()
    view = memory.lend(MIB)
    view[:] = b"a" * MIB
    Phoenix(view, heirs)
    del view
    gc.collect()
    other = memory.lend(MIB)
    other[:] = b"b" * MIB
    (saved,) = heirs
    assert bytes(saved[:1]) == b"a", "it came back while a finalizer still had it"
    assert memory.lent_bytes == 2 * MIB
    heirs.clear()
    del saved
    gc.collect()
    assert memory.lent_bytes == MIB


def views_of(array: np.ndarray[Any, Any]) -> list[object]:
    return [
        array[5:9][1:],
        array.reshape(2, -1)[1],
        array.view(">i8")[3:4],
        memoryview(array)[3:].toreadonly().cast("b"),
        np.lib.stride_tricks.as_strided(array, (3, 3), (1, 1)),
        pa.py_buffer(memoryview(array)[7:]).slice(4),
        pa.Array.from_buffers(pa.uint8(), 9, [None, pa.py_buffer(array)])[2:],
    ]


def test_every_kind_of_view_keeps_it():
    memory = Memory(16 * MIB, MIB)
    views: list[object] = views_of(np.asarray(memory.lend(MIB).obj))
    while views:
        gc.collect()
        assert memory.lent_bytes == MIB, f"{len(views)} views are left"
        views.pop()
    assert memory.lent_bytes == 0


def test_what_is_shared_by_readers_cannot_be_written():
    builder = TierBuilder()
    builder.add([bytes([65 + n]) * 3000 for n in range(40)])
    fetcher = fetcher_of(builder.store)
    found = fetcher.read("a", QUEUE, QueueOffset(0))
    assert isinstance(found, TierBatch)
    before = rows(found)
    assert memoryview(found.records.data).readonly
    assert not np.frombuffer(found.records.data, np.uint8).flags.writeable
    again = fetcher.read("b", QUEUE, QueueOffset(0))
    assert isinstance(again, TierBatch)
    assert rows(again) == before
    fetcher.close()


def test_pages_may_be_larger_and_may_be_locked(monkeypatch: pytest.MonkeyPatch):
    assert STEP_BYTES % mmap.PAGESIZE == 0

    class Locked:
        """As the kernel answers where the process has locked its memory."""

        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    memory = Memory(8 * MIB, 0)
    view = memory.lend(MIB)
    view[:1] = b"x"
    del view
    monkeypatch.setattr(memory, "_arena", Locked())
    memory.clear()
    monkeypatch.undo()
    assert len(memory.lend(MIB)) == MIB
    assert module.STEP_BYTES == STEP_BYTES


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Whether it ends in time; else its thread is left alone."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@pytest.mark.parametrize("which", ["stock", "transfers", "tier"])
def test_an_iterator_that_the_collector_finds_ends_whoever_holds_a_lock(which: str):
    """The collector runs in any thread that makes an object, also in one that holds a lock of ours."""
    builder = TierBuilder()
    builder.add([b"x" * 1000 for _ in range(60)])
    tier = opened_over(builder.store, FetchSettings())
    fetcher = tier.fetcher
    locks = {
        "stock": fetcher._stock.lock,
        "transfers": fetcher.transfers._lock,
        "tier": tier._lock,
    }

    def leave_one() -> None:
        cycle: list[Any] = [
            read_span(tier, plan_span(tier.reader.cursor(QUEUE), 0, 60), batch_bytes=4000)
        ]
        next(cycle[0])
        cycle.append(cycle)

    def collect() -> None:
        with locks[which]:
            gc.collect()

    gc.disable()
    try:
        leave_one()
        assert fetcher.stats().streams == 1
        assert within(5, collect)
    finally:
        gc.enable()
    assert read_all(fetcher, bytes_max=9000)[0]
    assert fetcher.stats().streams == 0
    tier.close()


def test_several_iterators_that_the_collector_finds_do_not_wait_for_ever():
    lock = threading.Lock()

    def source() -> Iterator[int]:
        yield 1
        with lock:
            yield 2

    def leave() -> None:
        both = interleave([source()], at_once=1)
        assert next(both) == 1
        with lock:
            del both  # its thread waits for the lock

    assert within(10, leave)


def test_room_is_claimed_for_what_is_read_though_hostile_records_overlap():
    builder = TierBuilder()
    part = builder.add([b"x" * 900 for _ in range(400)])
    count, size = 300, part.log_bytes
    sizes = np.full(count, 100, np.int32)
    sizes[0] = size  # all others lie in its body
    offsets = part.log_offset + np.arange(count, dtype=np.int64) * 1000
    items = PartItems(part.queue_offset, offsets, sizes, np.zeros(count, np.int64))
    layout = PartLayout.of(replace(part, count=count), items, 64 * KIB)
    known = SimpleNamespace(layout=lambda _: layout, is_known=lambda _: False)
    limits = FetchSettings(block_bytes=64 * KIB, chunk_bytes=64 * KIB)
    view = SimpleNamespace(
        parts_from=lambda _: [part], incarnation=SimpleNamespace(log_end=part.log_end)
    )
    plan = plan_fetches(view, QueueOffset(0), size, known, limits)  # type: ignore[arg-type]
    assert len(plan.requests) > 2
    for request in plan.requests:
        begin, end = layout.span(request.blocks)
        assert request.size_bytes >= run_bytes(end - begin, len(layout.items_of(request.blocks)))


class Pinned:
    """Something that a caller has."""


def test_an_error_does_not_keep_what_its_catcher_had():
    """The collector may come late, and batches are large."""
    builder = TierBuilder(Filling(bad_share=1.0))
    builder.add([b"x" * 100 * KIB])
    executor = ThreadPoolExecutor(1)
    fetcher = fetcher_of(builder.store, executor=executor)
    alive: list[weakref.ref[Pinned]] = []

    def read() -> None:
        mine = Pinned()
        alive.append(weakref.ref(mine))
        with pytest.raises(UnavailableError):
            fetcher.read("g", QUEUE, QueueOffset(0))

    def ask() -> None:
        mine = Pinned()
        alive.append(weakref.ref(mine))
        asking = AskingStore(fetcher.transfers, builder.store, "s", ManualClock(), 10.0)
        key = next(info.key for info in builder.store.list("") if "/bundle/" in info.key)
        with pytest.raises(UnavailableError):
            asking.get(key, ByteRange(0, 100 * KIB))

    gc.disable()
    try:
        read()
        ask()
        executor.shutdown()
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()
    fetcher.close()
    assert fetcher._memory.lent_bytes == 0


class Filling(MemoryStore):
    """Fills its caller's memory: in two steps, slowly, sometimes in vain; ``gate`` holds up the first call for "stuck"."""

    def __init__(self, gate: threading.Event | None = None, bad_share: float = 0.03) -> None:
        super().__init__()
        self.bad_share = bad_share
        self.rng = random.Random(1)
        self.gate = gate
        self.calls = 0

    def get_into(self, key: str, byte_range: ByteRange, target: memoryview) -> None:
        self.calls += key == "stuck"
        if self.gate is not None and key == "stuck" and self.calls == 1:
            assert self.gate.wait(10)
            target[:] = b"late" * (len(target) // 4)
            return
        half = len(target) // 2
        data = self.get(key, byte_range)
        target[:] = b"?" * len(target)
        if self.gate is None:
            time.sleep(self.rng.choice([0, 0, 0.001, 0.004]))
            if self.rng.random() < self.bad_share:
                raise UnavailableError("not now")
        target[:half] = data[:half]
        target[half:] = data[half:]


@pytest.mark.parametrize("is_hedged", [False, True])
def test_who_writes_too_late_writes_into_memory_of_its_own(is_hedged: bool):
    gate, clock, memory = threading.Event(), ManualClock(), Memory(16 * MIB, 0)
    store = Filling(gate=gate)
    for key in ("k", "stuck"):
        store.put_if_absent(key, b"good" * (MIB // 4))
    executor = ThreadPoolExecutor(4)
    limits = TransferLimits(hedge_budget=1.0 if is_hedged else 0.0)
    transfers = Transfers(store, executor, clock, limits, memory=memory)
    whole = ByteRange(0, MIB)
    for _ in range(20):
        ask(transfers, "a", "k", whole, urgent=True).result(10)
    late = ask(transfers, "a", "stuck", whole, urgent=True)
    while not store.calls:
        time.sleep(0.001)
    clock.advance(2)
    transfers.tick()
    if is_hedged:
        found = [late.result(10)]
    else:
        late.cancel()
        found = []
    found += [
        ask(transfers, n, "k", ByteRange(0, MIB - 4 * n), urgent=True).result(10)
        for n in range(1, 4)
    ]
    assert memory.lent_bytes == (len(found) + 1) * MIB, "the late one still has its own"
    gate.set()
    transfers.close()
    executor.shutdown()
    assert all(bytes(one) == b"good" * (len(one) // 4) for one in found)
    assert memory.lent_bytes == len(found) * MIB
    del late, found
    assert memory.lent_bytes == 0


def test_nobody_ever_sees_other_bytes_nor_more_memory_than_there_may_be():
    builder, wanted = TierBuilder(Filling()), dict[int, bytes]()
    rng = random.Random(5)
    for _ in range(6):
        items = [rng.randbytes(rng.choice([300, 9000, 60_000])) for _ in range(40)]
        wanted |= expected(builder.file(QUEUE).append_offset, items)
        builder.add(items)
    limits = TransferLimits(requests_in_flight_max=6, hedge_budget=0.5, hedge_floor_s=0.002)
    with ThreadPoolExecutor(6) as executor:
        fetcher = fetcher_of(
            builder.store,
            executor=executor,
            clock=SystemClock(),
            block_bytes=64 * KIB,
            chunk_bytes=256 * KIB,
            cache_bytes=MIB,
            transfers=limits,
            window=WindowLimits(64 * KIB, 512 * KIB),
        )
        wrong: list[object] = []
        with Ticker(fetcher, SystemClock()):
            threads = [
                threading.Thread(target=_read_about, args=(fetcher, number, wanted, wrong))
                for number in range(5)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        assert not wrong
        assert not any(thread.is_alive() for thread in threads)
        fetcher.close()
    assert fetcher.stats().reserved_bytes == 0
    fetcher._memory.clear()
    assert (fetcher._memory.lent_bytes, fetcher._memory.held_bytes) == (0, 0)


def _read_about(
    fetcher: TieredMessageFetcher, seed: int, wanted: dict[int, bytes], wrong: list[object]
) -> None:
    """Go through the queue in leaps and bounds; what was given stays as it was."""
    rng, held = random.Random(seed), list[TierBatch]()
    at, group = 0, f"g{seed % 3}"
    for _ in range(120):
        if rng.random() < 0.1:
            at = rng.randrange(len(wanted))
        try:
            found = fetcher.read(
                group,
                QUEUE,
                QueueOffset(at),
                bytes_max=rng.choice([1, 100 * KIB]),
                timeout_s=rng.choice([0.002, 5]),
            )
        except (StoreUnavailableError, UnavailableError):
            continue
        stats = fetcher.stats()
        if stats.cached_bytes + stats.reserved_bytes > MIB:
            wrong.append(stats)
        if not isinstance(found, TierBatch):
            at = 0
            continue
        at = found.end_offset
        held.append(found)
        if len(held) > 8:
            one = rows(held.pop(rng.randrange(len(held))))
            wrong += [n for n, data in one.items() if data != wanted[n]]
    wrong += [n for batch in held for n, data in rows(batch).items() if data != wanted[n]]
