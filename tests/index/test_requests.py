"""What a lookup costs: requests, and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.journals import PREFIX
from support.keyed import KeyedTier, Mail

from backends.memory import MemoryStore
from backends.wrapping import MeteredStore
from tiered.format.object import INDEX_BLOCK_BYTES
from tiered.index.lookup import IndexReader, Wish
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from tiered.index.lookup import Lookup

QUEUE = MessageQueue("orders", 0)
OBJECTS, MESSAGES = 100, 60
BODY = b"x" * 4000


class Counted:
    """A tier of 100 index objects, and a reader that has their filters."""

    def __init__(self) -> None:
        store = MemoryStore()
        self.tier = KeyedTier(store)
        for number in range(OBJECTS):
            at = range(number * MESSAGES, (number + 1) * MESSAGES)
            mails = [Mail((f"order-{n}", "all"), f"U{n:031X}", BODY, 10_000 + n) for n in at]
            self.tier.post(QUEUE, mails)
            self.tier.index()
        self.meter = MeteredStore(store)
        self.reader = IndexReader(self.meter, PREFIX)
        self.began = 0
        self.bytes = 0

    def ask(self, key: str, **wish: int) -> tuple[Lookup, int]:
        before = self.meter.snapshot()
        asked = Wish(topic="orders", key=key, **wish)  # type: ignore[arg-type]
        found = self.reader.lookup(self.tier.journal.state, asked)
        after = self.meter.snapshot()
        self.bytes = sum(kind.bytes_down for kind in after.kinds.values())
        self.bytes -= sum(kind.bytes_down for kind in before.kinds.values())
        assert found.is_complete
        return found, after.requests - before.requests


@pytest.fixture(scope="module")
def counted() -> Counted:
    made = Counted()
    _, first = made.ask("loads every filter")
    assert OBJECTS <= first <= OBJECTS + 1, "one request each"
    return made


def test_a_hit_costs_three_requests(counted: Counted):
    for number in range(0, OBJECTS * MESSAGES, 97):
        for key in (f"order-{number}", f"U{number:031X}"):
            found, requests = counted.ask(key)
            assert [hit.queue_offset for hit in found.hits] == [number]
            assert requests <= 3 + (found.objects_read - 1)
            assert counted.bytes <= 2 * INDEX_BLOCK_BYTES * found.objects_read + 5 * 65536


def test_a_miss_costs_none_nearly_always(counted: Counted):
    costs = [counted.ask(f"absent-{number}")[1] for number in range(300)]
    assert max(costs) <= 1
    assert sum(costs) <= 30


def test_the_newest_of_many_are_found_without_asking_older_objects(counted: Counted):
    found, _ = counted.ask("all", count=5)
    last = OBJECTS * MESSAGES
    assert [hit.queue_offset for hit in found.hits] == [*range(last - 1, last - 6, -1)]
    assert found.objects_read == 1


def test_time_bounds_choose_the_objects(counted: Counted):
    wish = {"from_ms": 10_000 + 50 * MESSAGES, "until_ms": 10_000 + 51 * MESSAGES}
    found, _ = counted.ask("all", **wish)
    assert (len(found.hits), found.objects_read) == (MESSAGES, 1)
    exact, _ = counted.ask("all", from_ms=10_007, until_ms=10_008)
    assert [hit.store_ms for hit in exact.hits] == [10_007]


def test_filters_stay_within_their_budget(counted: Counted):
    small = IndexReader(counted.meter, PREFIX, filter_bytes_max=3000)
    before = counted.meter.snapshot().requests
    for _ in range(2):
        found = small.lookup(counted.tier.journal.state, Wish(topic="orders", key="order-17"))
        assert len(found.hits) == 1
        assert small.objects.memory_bytes <= 3000
    assert counted.meter.snapshot().requests - before > OBJECTS
