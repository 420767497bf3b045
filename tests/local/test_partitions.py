"""The follower of stores whose queues are read by themselves, over one in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from support.synthetic import make_batch

from tiered.errors import ClosedError
from tiered.local.interface import PartitionFollower
from tiered.model import MessageQueue, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from tiered.local.interface import RecordBatch

QUEUES = [MessageQueue("t", number) for number in range(40)]
RECORD = b"r" * 1000


@dataclass
class Rows:
    """Queues of records of 1,000 bytes; of some a part is not there."""

    ends: dict[MessageQueue, int]
    gaps: dict[MessageQueue, tuple[int, int]] = field(default_factory=dict)
    falls: list[MessageQueue] = field(default_factory=list)
    bounds: dict[MessageQueue, QueueBounds] = field(default_factory=dict)
    reads: int = 0

    def look(self) -> None:
        now = {q: QueueBounds(QueueOffset(0), QueueOffset(end)) for q, end in self.ends.items()}
        if now != self.bounds:
            self.bounds = now

    def queues(self) -> dict[MessageQueue, QueueBounds]:
        return self.bounds

    def fallen_since(self, count: int) -> tuple[int, list[MessageQueue]]:
        return len(self.falls), self.falls[count:]

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        self.reads += 1
        low, high = self.gaps.get(queue, (0, 0))
        start = QueueOffset(high) if low <= start < high else start
        end = low if start < low else self.ends[queue]
        count = min(end - start, max(1, bytes_max // len(RECORD)), count_max)
        return make_batch(queue, start, [RECORD] * count, [0] * count) if count > 0 else None


def test_all_come_once_in_order_and_none_waits_for_the_longest():
    store = Rows({queue: 5000 if not queue.queue_id else 3 for queue in QUEUES})
    follower, ends = PartitionFollower(store, {}), dict.fromkeys(QUEUES, 0)
    polls = 0
    while True:
        batches = follower.poll(100_000)
        size = sum(len(batch.data) for batch in batches)
        assert size <= 101_000
        assert len({batch.queue for batch in batches}) == len(batches)
        for batch in batches:
            assert batch.base_offset == ends[batch.queue]
            ends[batch.queue] = batch.end_offset
        polls += 1
        if polls == len(QUEUES):
            assert all(ends[queue] == 3 for queue in QUEUES[1:])
            assert not follower.is_at_end
        if follower.is_idle:
            break
    assert ends == store.ends
    assert follower.is_at_end
    reads = store.reads
    assert not follower.poll(1)
    assert store.reads == reads  # nothing has changed: nothing is read


def test_where_it_goes_on_is_said_by_its_caller_and_by_the_store():
    one, two = QUEUES[:2]
    store = Rows({one: 10, two: 10}, gaps={one: (4, 8)})
    follower = PartitionFollower(store, {two: QueueOffset(7)})
    found = [
        (b.queue, b.base_offset, b.end_offset) for _ in range(4) for b in follower.poll(1 << 20)
    ]
    assert sorted(found) == [(one, 0, 4), (one, 8, 10), (two, 7, 10)]
    store.falls += [two, QUEUES[5]]
    store.ends[two] = 5
    assert not follower.poll(1)
    assert set(follower.take_fallen()) == {two}
    assert not follower.take_fallen()
    follower.seek(two, QueueOffset(2))
    assert [(b.base_offset, b.end_offset) for b in follower.poll(1 << 20)] == [(2, 5)]


def test_it_ends_when_told_to_and_is_not_idle_then():
    store = Rows(dict.fromkeys(QUEUES, 2))
    follower = PartitionFollower(store, {}, stop=lambda: True)
    assert len(follower.poll(1 << 20)) == 1
    assert not follower.is_idle
    follower.close()
    with pytest.raises(ClosedError):
        follower.poll(1)
