"""What a writer costs that runs for long: requests and dollars by a meter, memory; on a virtual clock, threads and all."""

from __future__ import annotations

import gc
import tracemalloc
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest
from support.loaded import Load, free_locks

from backends.wrapping import Prices
from tiered.attach.writer import AttachSettings
from tiered.dispatch.group_commit import LOOK_S
from tiered.dispatch.settings import DispatchSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.wrapping import MeterSnapshot

MONTH_S = 30 * 86_400

locks = pytest.fixture(autouse=True)(free_locks)


class Cost(NamedTuple):
    """Dollars of a month: what rounds and merging need, the lease, and a gc each day."""

    work: float
    lease: float
    collecting: float


def dollars(queues: int, freshness_s: float, seconds: float) -> Cost:
    """What a month costs at a message a second and queue, of 1 KiB, with everything else as it is by default."""
    load = Load(queues, AttachSettings(dispatch=DispatchSettings(freshness_s=freshness_s)))
    seen: list[MeterSnapshot] = []
    begin_s = 2 * freshness_s
    load.every(1.0, load.send)
    load.every(seconds, lambda: seen.append(load.meter.snapshot()), first_s=begin_s)
    load.every(1e9, load.collect, first_s=begin_s + seconds - 1)
    load.run(begin_s + seconds)
    assert load.attachment.dispatcher is not None
    assert load.attachment.dispatcher.counters.merged_bytes > 0
    before, after = (snapshot.kinds["compare_and_set"].requests for snapshot in seen[:2])
    months = MONTH_S / seconds
    lease = (after - before) * Prices().write_per_1000 / 1000 * months
    return Cost(
        (seen[1].dollars - seen[0].dollars) * months - lease,
        lease,
        load.gc_meter.snapshot().dollars * 30,
    )


def test_a_month_of_slow_queues_at_two_seconds_costs_thirty_dollars_at_most() -> None:
    """Rounds that do not fill a bundle: how many queues share them makes no difference."""
    assert 20 < sum(dollars(50, 2.0, 130.0)) <= 30


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("freshness_s", "limit"), [(2.0, 30.0), (30.0, 4.0)])
def test_a_month_of_a_thousand_queues(freshness_s: float, limit: float) -> None:
    """The lease aside, which costs the same whatever is written."""
    cost = dollars(1000, freshness_s, max(130.0, 10 * freshness_s))
    print(f"freshness {freshness_s:g} s, dollars a month: {cost}")
    assert cost.work + cost.collecting <= limit


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()


def memory() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_idle_queues_cost_a_look_at_the_journal_and_five_kib_each() -> None:
    count = 10_000
    with traced():
        load = Load(count, AttachSettings(lease_s=1000.0, dispatch=DispatchSettings()), body=b"x")
        load.send()
        before, seen = memory(), []
        for at_s in (20.0, 200.0):
            load.every(1e9, lambda: seen.append((load.meter.snapshot(), memory())), first_s=at_s)
        load.every(1e9, lambda: None, first_s=201.0)
        load.run(201.0)
    (first, _), (second, held) = seen
    print(
        f"{(held - before) / count / 1024:.2f} KiB a queue; {first.requests} requests, then {second.requests}"
    )
    looks = second.kinds["get"].requests - first.kinds["get"].requests
    assert second.requests - first.requests == looks <= 180.0 / LOOK_S
    assert held - before <= count * 5 * 1024


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_does_not_grow_in_a_day_of_rounds() -> None:
    """What the store in memory holds is left out."""
    settings = AttachSettings(
        lease_s=600.0, dispatch=DispatchSettings(freshness_s=30.0, poll_s=7.5)
    )
    with traced():
        load, seen = Load(4, settings, body=b"x" * 64), []

        def look() -> None:
            load.collect()
            stored = sum(info.size_bytes for info in load.store.list(""))
            seen.append(memory() - stored)

        load.every(30.0, load.send)
        load.every(4 * 3600.0, look, first_s=4 * 3600.0)
        load.run(24 * 3600.0 + 1)
    print([f"{held / 2**20:.2f} MiB" for held in seen])
    assert load.attachment.dispatcher is not None
    assert load.attachment.dispatcher.counters.rounds > 2000
    assert max(seen[2:]) <= seen[1] + (1 << 20)
