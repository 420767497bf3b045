"""What a writer costs that runs for long: requests and dollars by a meter, memory; on a virtual clock, threads and all."""

from __future__ import annotations

import gc
import random
import tracemalloc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from simulation import scheduler as simulated
from simulation.scheduler import Owner, Scheduler, SimClock
from support.synthetic import SyntheticStore

from backends.memory import MemoryStore
from backends.wrapping import MeteredStore, Prices
from tiered.api.broker_place import Place
from tiered.attach.writer import Attachment, AttachSettings
from tiered.dispatch.settings import DispatchSettings
from tiered.upkeep.gc import apply_gc, plan_gc
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.wrapping import MeterSnapshot

MONTH_S = 30 * 86_400
KEPT = 64
"""Messages of a queue that the broker keeps."""


class Broker(SyntheticStore):
    """One whose follower can be told that the head of the log, which it has passed, is gone."""

    def follow(self, *args: Any, **more: Any) -> Any:
        self._follower = super().follow(*args, **more)
        return self._follower

    def forget(self, kept: int) -> None:
        dropped = len(self._log) - kept
        assert self._follower._at >= dropped
        self._follower._at -= dropped
        del self._log[:dropped]


class Load:
    """A broker that stores at a constant rate, one writer that tiers it, and gc now and then; nothing takes time.

    Attributes:
        meter: Of the writer's requests.
        gc_meter: Of those of gc.
    """

    def __init__(self, queues: int, settings: AttachSettings, *, body: bytes = b"x" * 1024) -> None:
        self.scheduler = Scheduler(random.Random(1))
        self.clock = SimClock(self.scheduler)
        self.store = MemoryStore(now_ms=self.clock.now_ms)
        self.meter, self.gc_meter = MeteredStore(self.store), MeteredStore(self.store)
        self.local = Broker()
        self.queues = queues
        self._body = body
        self._actions: list[tuple[float, float, Callable[[], None]]] = []
        self.attachment = Attachment(
            local=self.local, meter=self.meter, place=Place("c", "b"), settings=settings, clock=self.clock,
            rng=random.Random(2), announce=lambda _state: None,
        )  # fmt: skip

    def every(self, period_s: float, action: Callable[[], None], *, first_s: float = 0.0) -> None:
        self._actions.append((first_s, period_s, action))

    def send(self) -> None:
        """A message to each queue."""
        for queue in range(self.queues):
            offset = self.local.append("t", queue, self._body)
            if offset >= 2 * KEPT and offset % KEPT == 0:
                self.local.expire("t", queue, offset - KEPT)
        if len(self.local._log) > 4 * KEPT * self.queues:
            self.local.forget(2 * KEPT * self.queues)

    def collect(self) -> None:
        at = Workplace(self.gc_meter, self.gc_meter, Place("c", "b"), self.clock, random.Random(3))  # type: ignore[arg-type]
        plan = plan_gc(at.store, at.place, at.clock, grace_ms=60_000, max_deletions=1_000_000)
        assert not plan.refusals
        apply_gc(at, plan)

    def run(self, seconds: float) -> None:
        """So long by the virtual clock; then the writer stops."""
        owner, scheduler = Owner("writer"), self.scheduler
        scheduler.owners.append(owner)
        scheduler.next_operation_s = 0.0
        due = [[first_s, period_s, action] for first_s, period_s, action in self._actions]

        def operate() -> None:
            for row in due:
                if scheduler.now_s >= row[0]:
                    row[0] += row[1]
                    row[2]()
            scheduler.next_operation_s = min(row[0] for row in due)
            if scheduler.now_s >= seconds:
                self.attachment.stop()
                scheduler.next_operation_s = float("inf")

        def live() -> None:
            try:
                self.attachment._begin()
                self.attachment.run()
            except BaseException as error:
                scheduler.fail(error)
                raise
            finally:
                self.attachment.close()

        scheduler.operate = operate
        scheduler.spawn(owner, "main", live)
        scheduler.run()
        fault = self.attachment.fault
        if fault is not None:
            raise fault


@pytest.fixture(autouse=True)
def free_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No queue's lock is taken by chance, and a long run is no hang."""
    monkeypatch.setattr(simulated, "_BUSY", 0.0)
    monkeypatch.setattr(simulated, "_HANG_S", 3600.0)


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
def test_ten_thousand_idle_queues_cost_no_request_and_five_kib_each() -> None:
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
    assert second.requests == first.requests
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
