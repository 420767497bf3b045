"""Queues that are about to be printed are begun together; what is printed stays the same."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from support.opened import Made

from backends.wrapping import WrappingStore
from tiered.api.open_tier import OpenTier
from tiered.api.tier import opened_by
from tiered.cli.cat import AT_ONCE, queues_ahead
from tiered.clock import SystemClock
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from backends.base import ByteRange

QUEUES = [MessageQueue("orders", number) for number in range(12)]


class Meeting(WrappingStore):
    """Reads wait for one another: until so many are under way."""

    def __init__(self, inner: Any, count: int) -> None:
        super().__init__(inner)
        self.barrier = threading.Barrier(count)
        self.is_on, self.met = False, False

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if self.is_on and not self.met:
            try:
                self.barrier.wait(20)
                self.met = True
            except threading.BrokenBarrierError:
                pass
        return super().get(key, byte_range)


def opened(count: int) -> tuple[OpenTier, Meeting]:
    made = Made()
    for queue in QUEUES:
        made.add(b"%d" % queue.queue_id, queue=queue)
    tier = opened_by(made.open())
    store = Meeting(tier.store, count)
    slow = OpenTier(store, tier.meter, tier.place, clock=SystemClock())
    slow.refresh()
    store.is_on = True
    return slow, store


def test_queues_are_begun_together_and_come_in_order():
    tier, store = opened(AT_ONCE)
    with tier:
        readers = [tier.reader.queue(queue) for queue in QUEUES]
        found = []
        for reader in queues_ahead(tier, "g", readers, lambda _: QueueOffset(0)):
            batch = tier.fetch("g", reader.cursor, QueueOffset(0), bytes_max=1 << 20, count_max=10)
            found.append((reader.queue, batch.records.count))
        assert found == [(queue, 1) for queue in QUEUES]
        assert store.met


def test_one_queue_with_anything_is_not_begun():
    tier, store = opened(2)
    with tier:
        readers = [tier.reader.queue(queue) for queue in QUEUES]
        begins = {reader.queue: reader.incarnation.commit_offset for reader in readers[1:]}
        iterator = queues_ahead(tier, "g", readers, lambda r: begins.get(r.queue, QueueOffset(0)))
        assert [reader.queue for reader in iterator] == QUEUES
        assert store.barrier.n_waiting == 0


def test_giving_up_amid_leaves_nothing_behind():
    tier, store = opened(1)
    with tier:
        readers = [tier.reader.queue(queue) for queue in QUEUES]
        iterator = queues_ahead(tier, "g", readers, lambda _: QueueOffset(0))
        assert next(iterator).queue == QUEUES[0]
        iterator.close()
    names = [thread.name for thread in threading.enumerate() if "tiered-fetch" in thread.name]
    assert not names
    assert store.inner
