"""What a review of lent memory and of the fetcher's locks has found: each of these failed once."""

from __future__ import annotations

import gc
import mmap
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from support.fetching import fetcher_of, read_all, rows
from support.journals import PREFIX
from support.tiers import QUEUE, TierBuilder

from fetcher import memory as module
from fetcher.claims import plan_claims
from fetcher.layout import PartLayout
from fetcher.memory import STEP_BYTES, Memory
from fetcher.runs import run_bytes
from fetcher.settings import FetchSettings
from tiered.clock import SystemClock
from tiered.log.decode import PartItems, TierBatch
from tiered.log.reader import TierReader
from tiered.model import QueueOffset
from tiered.plugin.engine import Engine
from tiered.plugin.reading import Span, read_span

if TYPE_CHECKING:
    from collections.abc import Callable

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


@pytest.mark.parametrize("which", ["stock", "transfers", "engine"])
def test_an_iterator_that_the_collector_finds_ends_whoever_holds_a_lock(which: str):
    """The collector runs in any thread that makes an object, also in one that holds a lock of ours."""
    builder = TierBuilder()
    builder.add([b"x" * 1000 for _ in range(60)])
    reader = TierReader(builder.store, PREFIX)
    reader.refresh()
    engine = Engine(reader, SystemClock(), FetchSettings())
    fetcher = engine.fetcher
    locks = {
        "stock": fetcher._stock.lock,
        "transfers": fetcher.transfers._lock,
        "engine": engine._lock,
    }

    def leave_one() -> None:
        cycle: list[Any] = [
            read_span(engine, Span(QUEUE, 0, QueueOffset(0), QueueOffset(60)), batch_bytes=4000)
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
    engine.close()


def test_room_is_claimed_for_what_is_read_though_hostile_records_overlap():
    builder = TierBuilder()
    part = builder.add([b"x" * 900 for _ in range(400)])
    count, size = 300, part.log.size_bytes
    sizes = np.full(count, 100, np.int32)
    sizes[0] = size  # all others lie in its body
    offsets = part.log_offset + np.arange(count, dtype=np.int64) * 1000
    items = PartItems(part.queue_offset, offsets, sizes, np.zeros(count, np.int64))
    layout = PartLayout.of(replace(part, count=count), items, 64 * KIB)
    known = SimpleNamespace(layout=lambda _: layout, is_known=lambda _: False)
    limits = FetchSettings(block_bytes=64 * KIB, piece_bytes=64 * KIB)
    view = SimpleNamespace(parts_from=lambda _: [part], life=SimpleNamespace(log_end=part.log_end))
    plan = plan_claims(view, QueueOffset(0), size, known, limits)  # type: ignore[arg-type]
    assert len(plan.claims) > 2
    for claim in plan.claims:
        begin, end = layout.span(claim.blocks)
        assert claim.size_bytes >= run_bytes(end - begin, len(layout.items_of(claim.blocks)))
