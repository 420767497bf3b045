"""What the simulation has found, each in its smallest form."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.clock import ManualClock
from tiered.journal.writer import JournalWriter
from tiered.keys import JOURNAL
from tiered.log.history import TierHistory
from tiered.log.state import TierMachine

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
