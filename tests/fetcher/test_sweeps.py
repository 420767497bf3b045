"""Reading many queues whose sections lie side by side: few requests, the same records, and memory within its bounds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from support.fetching import expected, fetcher_of, rows
from support.journals import PREFIX
from support.merging import delete_unnamed, gather, named_bundles
from support.tiers import TierBuilder, batch_of

from backends.wrapping import MeteredStore
from fetcher.cache import Job, Load
from tiered.errors import DataError
from tiered.log.decode import TierBatch
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fetcher.fetcher import TieredMessageFetcher
    from tiered.log.parts import Part

KIB = 1024
MIB = 1024 * KIB


class Many:
    """A tier of many queues, each round of which is one bundle."""

    def __init__(self, queues: int, rounds: int, *, each: int = 10, size: int = 1000) -> None:
        self.builder = TierBuilder()
        self.queues = [MessageQueue("many", number) for number in range(queues)]
        self.wanted: dict[MessageQueue, dict[int, bytes]] = {queue: {} for queue in self.queues}
        self.parts: list[list[Part]] = []
        for number in range(rounds):
            bodies = [bytes([65 + number]) * size] * each
            batches = [batch_of(number * each, bodies, queue=queue) for queue in self.queues]
            self.parts.append(self.builder.add_round(*batches))
            for queue in self.queues:
                self.wanted[queue] |= expected(number * each, bodies, queue=queue)
        self.bundle_bytes = sum(some[0].bundle.size_bytes for some in self.parts)

    def expect(
        self, fetcher: TieredMessageFetcher, queues: Sequence[MessageQueue], group: str = "g"
    ) -> None:
        cursors = [fetcher.tier.cursor(queue) for queue in queues]
        fetcher.expect(group, [(cursor, cursor.low, cursor.end) for cursor in cursors])


def read_on(
    fetcher: TieredMessageFetcher,
    queue: MessageQueue,
    found: dict[int, bytes],
    *,
    group: str = "g",
    count: int = 10,
    high: list[int] | None = None,
) -> bool:
    """One batch; whether there was one. ``high`` gets what memory was taken then."""
    cursor = fetcher.tier.cursor(queue)
    at = QueueOffset(max(found, default=-1) + 1)
    batch = fetcher.read(group, queue, at, count_max=count, cursor=cursor, until=cursor.end)
    if high is not None:
        stats = fetcher.stats()
        high.append(stats.cached_bytes + stats.reserved_bytes)
    if batch is None:
        return False
    assert isinstance(batch, TierBatch)
    assert batch.base_offset == at
    found |= rows(batch)
    return True


def in_turn(
    fetcher: TieredMessageFetcher, queues: Iterable[MessageQueue], **more: Any
) -> dict[MessageQueue, dict[int, bytes]]:
    """A batch of each queue, then the next of each, and so on."""
    found: dict[MessageQueue, dict[int, bytes]] = {queue: {} for queue in queues}
    left = list(found)
    while left:
        left = [queue for queue in left if read_on(fetcher, queue, found[queue], **more)]
    return found


def one_by_one(
    fetcher: TieredMessageFetcher, queues: Iterable[MessageQueue], **more: Any
) -> dict[MessageQueue, dict[int, bytes]]:
    """Each queue to its end, one after the other."""
    found: dict[MessageQueue, dict[int, bytes]] = {}
    for queue in queues:
        found |= in_turn(fetcher, [queue], **more)
    return found


@pytest.fixture(scope="module")
def thousand() -> Many:
    return Many(1000, 3)


@pytest.mark.parametrize("read", [in_turn, one_by_one])
def test_1000_queues_take_a_request_for_each_mebibyte(thousand: Many, read: Any):
    store = MeteredStore(thousand.builder.store)
    fetcher = fetcher_of(store)
    thousand.expect(fetcher, thousand.queues)
    before = store.snapshot()
    assert read(fetcher, thousand.queues) == thousand.wanted
    after = store.snapshot()
    requests, size = after.requests - before.requests, after.bytes_down - before.bytes_down
    assert requests <= thousand.bundle_bytes / MIB + 6
    assert size <= 1.02 * thousand.bundle_bytes
    assert fetcher.stats().unread_bytes == 0
    fetcher.close()


def test_one_reader_of_one_queue_asks_for_its_section_alone(thousand: Many):
    store = MeteredStore(thousand.builder.store)
    fetcher = fetcher_of(store)
    before = store.snapshot()
    queue = thousand.queues[500]
    assert one_by_one(fetcher, [queue]) == {queue: thousand.wanted[queue]}
    after = store.snapshot()
    sections = [some[500].section for some in thousand.parts]
    assert after.requests - before.requests == 3
    assert after.bytes_down - before.bytes_down == sum(one.table_at for one in sections)
    fetcher.close()


@pytest.mark.parametrize("step", [2, 3, 7])
def test_no_more_is_read_in_vain_than_is_wanted(thousand: Many, step: int):
    store = MeteredStore(thousand.builder.store)
    fetcher = fetcher_of(store)
    queues = thousand.queues[::step]
    thousand.expect(fetcher, queues)
    before = store.snapshot()
    found = in_turn(fetcher, queues)
    assert found == {queue: thousand.wanted[queue] for queue in queues}
    size = store.snapshot().bytes_down - before.bytes_down
    assert size <= 2 * thousand.bundle_bytes / step + 64 * KIB
    fetcher.close()


@pytest.mark.parametrize(("read", "cache_mib"), [(in_turn, 4), (one_by_one, 1), (one_by_one, 16)])
def test_i8_memory_is_bounded_and_little_is_read_twice(read: Any, cache_mib: int):
    many = Many(40, 10, size=1500)
    small = cache_mib * MIB
    fetcher = fetcher_of(
        many.builder.store, cache_bytes=small, piece_bytes=min(4 * MIB, small // 4), spent_bytes=0
    )
    many.expect(fetcher, many.queues)
    high: list[int] = []
    assert read(fetcher, many.queues, high=high) == many.wanted
    assert max(high) <= small
    stats = fetcher.transfers.stats
    assert stats.received_bytes <= 1.1 * many.bundle_bytes
    assert fetcher.stats().unread_bytes == 0
    fetcher.close()


def test_a_damaged_section_costs_no_other_queue():
    many = Many(20, 1)
    part = many.parts[0][7]
    key = PREFIX + part.bundle.key
    data = bytearray(many.builder.store.get(key))
    data[part.section.start + 500] ^= 1
    many.builder.store.delete(key)
    many.builder.store.put_if_absent(key, bytes(data))
    fetcher = fetcher_of(many.builder.store)
    many.expect(fetcher, many.queues)
    for number, queue in enumerate(many.queues):
        found: dict[int, bytes] = {}
        if number == 7:
            with pytest.raises(DataError, match="checksum"):
                read_on(fetcher, queue, found)
        else:
            while read_on(fetcher, queue, found):
                pass
            assert found == many.wanted[queue]
    fetcher.close()


def test_what_was_not_announced_or_goes_elsewhere_is_read_as_ever():
    many = Many(30, 4)
    fetcher = fetcher_of(many.builder.store)
    many.expect(fetcher, many.queues[:10])
    rng = random.Random(5)
    for _ in range(200):
        queue, at = rng.choice(many.queues), rng.randrange(40)
        cursor = fetcher.tier.cursor(queue)
        batch = fetcher.read("g", queue, QueueOffset(at), count_max=3, cursor=cursor)
        assert isinstance(batch, TierBatch)
        assert all(many.wanted[queue][n] == row for n, row in rows(batch).items())
    fetcher.close()


def test_who_is_forgotten_leaves_nothing_unread():
    many = Many(30, 2)
    fetcher = fetcher_of(many.builder.store)
    many.expect(fetcher, many.queues)
    read_on(fetcher, many.queues[0], {})
    assert fetcher.stats().cached_bytes > 20 * 10 * KIB
    fetcher.forget("g")
    assert fetcher.stats().streams == 0
    assert not fetcher._readers.of_group("g")
    assert not fetcher._stock.cache._unread_bytes
    fetcher.close()


def test_after_a_merge_a_sweep_goes_on():
    many = Many(12, 3)
    fetcher = fetcher_of(many.builder.store)
    many.expect(fetcher, many.queues)
    cursors = {queue: fetcher.tier.cursor(queue) for queue in many.queues}
    before = named_bundles(many.builder)
    gather(many.builder)
    delete_unnamed(many.builder, before)
    for queue, cursor in cursors.items():
        found: dict[int, bytes] = {}
        while len(found) < 30:
            at = QueueOffset(len(found))
            batch = fetcher.read("g", queue, at, cursor=cursor, until=cursor.end)
            assert isinstance(batch, TierBatch)
            found |= rows(batch)
        assert found == many.wanted[queue]
    fetcher.close()


def test_what_somebody_begins_to_wait_for_while_it_is_asked_for_is_not_forgotten():
    """It was once: nobody asked for it, its room stayed reserved, and who waited for it did so until the deadline."""
    many = Many(2, 1)
    fetcher = fetcher_of(many.builder.store)
    first, second = Load[list[memoryview]]("a", True, 0), Load[list[memoryview]]("b", False, 0)
    ask_all = fetcher.transfers.ask_all

    def hurrying(wanted: Any, *, urgent: bool) -> Any:
        second.is_urgent = True
        return ask_all(wanted, urgent=urgent)

    fetcher.transfers.ask_all = hurrying  # type: ignore[method-assign]
    jobs = [
        Job(load, (part.index,), list, lambda _: None)
        for load, part in zip((first, second), many.parts[0], strict=True)
    ]
    fetcher._stock._loader.begin(jobs)
    assert first.future.done()
    assert second.future.done()
    fetcher.close()
