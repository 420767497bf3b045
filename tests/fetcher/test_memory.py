"""Memory that is lent, comes back when nobody refers to it, and not before."""

from __future__ import annotations

import gc
import random
import resource
import threading

import numpy as np
import pytest

from fetcher import runs as module
from fetcher.runs import STEP_BYTES, Memory

MIB = 1 << 20


def test_what_is_let_go_is_lent_again_the_lowest_first():
    memory = Memory(16 * MIB, 4 * MIB)
    first, second = memory.lend(MIB - 5), memory.lend(2 * MIB)
    assert (len(first), memoryview(first.obj).nbytes) == (MIB - 5, MIB)
    first[:3], second[:3] = b"abc", b"xyz"
    assert (memory.lent_bytes, memory.held_bytes) == (3 * MIB, 3 * MIB)
    del first
    assert memory.lent_bytes == 2 * MIB
    low, high = memory.lend(STEP_BYTES), memory.lend(MIB)
    assert (bytes(low[:3]), bytes(high[:3])) == (b"abc", bytes(3))
    assert memory.held_bytes == 4 * MIB
    del low, second
    again = memory.lend(3 * MIB)  # both of them, joined
    assert bytes(again[:3]) == b"abc"
    assert memory.held_bytes == 4 * MIB


def test_any_view_keeps_it():
    memory = Memory(16 * MIB, 4 * MIB)
    array = np.frombuffer(memory.lend(MIB)[10:1000].toreadonly(), np.uint8)[5:9].reshape(2, 2)
    gc.collect()
    other = memory.lend(MIB)
    other[:] = b"x" * MIB
    assert not array.any()
    assert memory.lent_bytes == 2 * MIB
    del array
    assert memory.lent_bytes == MIB


def test_what_lies_free_at_the_end_is_bounded_and_all_that_is_free_can_be_given_back():
    memory = Memory(64 * MIB, 2 * MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    lent = [memory.lend(4 * MIB) for _ in range(8)]
    for view in lent:
        view[:] = b"x" * len(view)
    del view, lent[1:]
    assert memory.held_bytes == 32 * MIB
    kept = memory.lend(MIB)
    assert bytes(kept[:1]) == b"x"  # two MiB were kept, the lowest
    assert bytes(memory.lend(2 * MIB)[-1:]) == bytes(1)
    assert memory.held_bytes == (4 + 3) * MIB
    del kept
    lent.clear()
    memory.clear()
    assert (memory.lent_bytes, memory.held_bytes) == (0, 0)
    assert bytes(memory.lend(4 * MIB)) == bytes(4 * MIB)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt > before


@pytest.mark.parametrize("is_refused", [False, True])
def test_when_it_has_no_more_others_have(is_refused, monkeypatch: pytest.MonkeyPatch):
    def refuse(_: int) -> None:
        raise OSError("no")

    if is_refused:
        monkeypatch.setattr(module, "_addresses", refuse)
    memory = Memory(3 * MIB, MIB)
    lent = [memory.lend(MIB) for _ in range(5)]
    for number, view in enumerate(lent):
        view[:] = bytes([number]) * MIB
    assert [bytes(view) for view in lent] == [bytes([number]) * MIB for number in range(5)]
    assert memory.held_bytes == (0 if is_refused else 3 * MIB)


def test_it_may_die_before_what_it_has_lent():
    memory = Memory(2 * MIB, MIB)
    lent = memory.lend(MIB)
    del memory
    gc.collect()
    lent[:] = b"x" * MIB
    del lent


def test_nobody_sees_what_others_write():
    memory, wrong = Memory(32 * MIB, MIB), []

    def work(number: int) -> None:
        rng, held = random.Random(number), []
        for turn in range(150):
            size = rng.randrange(STEP_BYTES, 4 * STEP_BYTES)
            view, mark = memory.lend(size), (number * 151 + turn) % 251
            view[:] = bytes([mark]) * size
            held.append((view[rng.randrange(size) :], mark))
            del view
            if len(held) > 6:
                kept, mark = held.pop(rng.randrange(len(held)))
                wrong.extend([1] if any(byte != mark for byte in kept[:: 1 << 12]) else [])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.lent_bytes == 0
    assert 0 < memory.held_bytes <= 6 * 8 * 4 * STEP_BYTES
    memory.clear()
    assert memory.held_bytes == 0
    assert memory._free == [(0, 32 * MIB // STEP_BYTES)]
