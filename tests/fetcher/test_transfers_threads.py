"""The request layer with real threads: late requests, cost, and many askers at once."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from support.transfers import AskedStore, HeldExecutor, ask
from support.work import calls

from backends.base import ByteRange
from backends.errors import UnavailableError
from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from fetcher.limits import TransferLimits
from fetcher.requests import BusyError
from fetcher.transfers import AskingStore, Transfers
from tiered.clock import SystemClock
from tiered.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = bytes(range(256)) * 256
READS = 2000


class SlowStore(WrappingStore):
    """Each read takes 5 ms; those whose number is in ``late`` a second, and those of ``failing`` fail."""

    def __init__(self, late: frozenset[int] = frozenset(), failing: float = 0.0) -> None:
        inner = MemoryStore()
        inner.put_if_absent("k", BODY)
        super().__init__(inner)
        self._late, self._failing = late, failing
        self._rng = random.Random(5)
        self._lock = threading.Lock()
        self.calls = self.running = self.running_max = 0

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        with self._lock:
            self.calls += 1
            number = self.calls
            self.running += 1
            self.running_max = max(self.running_max, self.running)
            fails = self._rng.random() < self._failing
        try:
            time.sleep(1.0 if number in self._late else 0.005)
            if fails:
                raise UnavailableError("not now")
            return super().get(key, byte_range)
        finally:
            with self._lock:
                self.running -= 1


@contextmanager
def ticking(store: Any, **limits: Any) -> Iterator[Transfers]:
    """A ``Transfers`` with threads and a clock thread that is woken."""
    made = TransferLimits(**limits)
    wake, stop = threading.Event(), threading.Event()
    with ThreadPoolExecutor(made.requests_in_flight_max + 1) as pool:
        transfers = Transfers(store, pool, SystemClock(), made, wake=wake.set)

        def tick() -> None:
            while not stop.is_set():
                wake.clear()
                wake.wait(transfers.tick())

        clock = pool.submit(tick)
        try:
            yield transfers
        finally:
            transfers.close()
            stop.set()
            wake.set()
            clock.result(10)


def test_without_hedging_they_are_late():
    """What ``test_transfers_hedged`` shows with hedges, without."""
    store = SlowStore(frozenset([3]))
    with ticking(store, hedge_budget=0.0) as transfers:
        for number in range(5):
            ask(transfers, "s", "k", ByteRange(number, number + 1), urgent=True).result(60)
    assert store.calls == 5, (
        "nothing was asked for twice, so whoever wanted the third waited for it"
    )


def test_many_threads_at_once():
    """Askers that join, cancel, hurry and run into errors and limits: each future ends once, with its own bytes."""
    store = SlowStore(failing=0.1)
    ends: dict[int, int] = {}
    lock = threading.Lock()

    def ended(future: Future[bytes]) -> None:
        with lock:
            ends[id(future)] = ends.get(id(future), 0) + 1

    def ask_some(seed: int) -> list[Future[bytes]]:
        rng, asked = random.Random(seed), []
        for _ in range(150):
            at = rng.randrange(0, 40) * 100
            wanted, urgent = ByteRange(at, at + 100), rng.random() < 0.5
            try:
                future = ask(transfers, seed, "k", wanted, urgent=urgent)
            except BusyError:
                continue
            future.at = at  # type: ignore[attr-defined]
            future.add_done_callback(ended)
            asked.append(future)
            if rng.random() < 0.2:
                rng.choice(asked).cancel()
            if rng.random() < 0.2:
                transfers.hurry(rng.choice(asked))
        return asked

    with ticking(store, requests_in_flight_max=4, pending_max=30) as transfers:
        with ThreadPoolExecutor(6) as askers:
            asked = [one for found in askers.map(ask_some, range(6)) for one in found]
        assert not wait(asked, 30).not_done
    assert store.running_max <= 4
    assert len(ends) == len(asked) > 100
    assert set(ends.values()) == {1}
    for future in asked:
        with suppress(CancelledError, UnavailableError):
            assert future.result(0) == BODY[future.at : future.at + 100]  # type: ignore[attr-defined]
    stats = transfers.stats
    assert (stats.pending, stats.running, stats.running_bytes) == (0, 0, 0)
    assert stats.joined > 0


@pytest.mark.parametrize("is_sent", [True, False])
def test_who_waits_while_it_is_closed_is_told_so(is_sent: bool):
    store, clock, held = AskedStore(), SystemClock(), HeldExecutor()
    transfers = Transfers(store, held, clock, TransferLimits(requests_in_flight_max=1))
    if not is_sent:
        ask(transfers, "other", "a", ByteRange(0, 5), urgent=True)
    asking = AskingStore(transfers, store, "s", clock, clock.monotonic_s() + 60)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asking.get, "b", ByteRange(0, 10))
        until_s = time.monotonic() + 20
        while transfers.stats.asked < 2 - is_sent and time.monotonic() < until_s:
            time.sleep(0.01)
        transfers.close(0.1)
        with pytest.raises(ClosedError):
            future.result(20)


def test_asking_costs_few_calls_and_wakes_nobody():
    """Calls in the asking thread, beside those of a bare task for the same threads; and how often the clock is woken."""

    class NoStore(WrappingStore):
        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            return b"x"

    woken: list[None] = []
    with ThreadPoolExecutor(8) as pool:
        limits = TransferLimits(hedge_floor_s=5.0)
        transfers = Transfers(
            NoStore(MemoryStore()), pool, SystemClock(), limits, wake=lambda: woken.append(None)
        )

        def ask_many() -> None:
            asked.extend(
                ask(transfers, "s", "k", ByteRange(2 * at, 2 * at + 1), urgent=True)
                for at in range(READS)
            )

        asked: list[Future[Any]] = []
        spent = calls(ask_many)
        assert not wait(asked, 60).not_done
        bare = calls(lambda: [pool.submit(pow, at, 2) for at in range(READS)])
        transfers.close()
    print(
        f"{spent / READS:.0f} calls a read, {bare / READS:.0f} a bare task, woken {len(woken)} times"
    )
    assert spent < 6 * bare
    assert len(woken) < READS / 4
