"""What the simulation has found, each in its smallest form."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from support.dispatching import dispatching, run_once
from support.synthetic import SyntheticStore

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.clock import ManualClock
from tiered.journal.writer import JournalWriter
from tiered.keys import JOURNAL
from tiered.log.history import TierHistory
from tiered.log.state import TierMachine
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ObjectInfo

PREFIX = "00000000_c/b/"


class BeforeListing(WrappingStore):
    """Calls something before a listing."""

    def __init__(self, inner: MemoryStore, before: Callable[[], None]) -> None:
        super().__init__(inner)
        self.before = before

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self.before()
        return super().list(prefix, start_after=start_after)


def test_an_entry_that_comes_between_two_looks_of_gc_is_not_taken_for_a_missing_one():
    clock = ManualClock()
    memory = MemoryStore(now_ms=clock.now_ms)
    writer = JournalWriter(
        memory, PREFIX, TierMachine(), writer="0badcafe", clock=clock, rng=random.Random(1),
        stop=threading.Event(),
    )  # fmt: skip
    writer.take_reign({})
    left = 2

    def append() -> None:
        nonlocal left
        if left:
            left -= 1
            writer.append([{"do": "meta", "store": {"n": left}}])

    journal = [*memory.list(PREFIX + JOURNAL)]
    history = TierHistory(BeforeListing(memory, append), PREFIX, journal, clock.now_ms())
    assert history.number == writer.number == 3


class AlwaysHeld:
    """A queue's lock that somebody else holds whenever one looks; who waits gets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def locked(self) -> bool:
        return True

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_the_last_patrol_waits_for_a_queue_whose_lock_is_held():
    """A run with ``--once`` passed a queue over that the broker had made shorter, and called it complete."""
    store, local, queue = MemoryStore(), SyntheticStore(), MessageQueue("t", 0)
    for number in range(60):
        local.append("t", 0, b"old %d" % number)
    run_once(store, local)
    local.cut("t", 0, 31)
    for number in range(10):
        local.append("t", 0, b"new %d" % number)
    with dispatching(store, local, seed=2) as dispatcher:
        dispatcher.file(queue).lock = AlwaysHeld()  # type: ignore[assignment]
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    assert dispatcher.counters.taken_back == 1
