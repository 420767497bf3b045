"""Reading many queues whose sections lie side by side: few requests, the same records, and memory within its bounds."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.fetching import expected, fetcher_of, rows
from support.journals import PREFIX
from support.merging import delete_unnamed, gather, named_bundles
from support.tiers import TierBuilder, batch_of
from support.transfers import HeldExecutor
from zlib_ng.zlib_ng import crc32

from backends.wrapping import MeteredStore
from fetcher.cache import Fetch
from fetcher.runs import INDEX, MultiSectionRead, MultiSectionRun, decode_together, key_of
from fetcher.window import Neighbours, Stream, whole_part
from tiered.clock import ManualClock, SystemClock
from tiered.errors import DataError
from tiered.log.decode import PlacedParts, TierBatch, decode_parts
from tiered.log.flat_file import encode_items
from tiered.log.parts import Parts
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
        many.builder.store, cache_bytes=small, chunk_bytes=min(4 * MIB, small // 4), spent_bytes=0
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


def test_what_came_for_many_may_have_to_make_room_and_is_asked_for_again():
    many = Many(80, 2)
    fetcher = fetcher_of(many.builder.store, cache_bytes=2 * MIB, chunk_bytes=512 * KIB)
    many.expect(fetcher, many.queues)
    some = one_by_one(fetcher, many.queues[:5])
    fetcher._stock.resize(300 * KIB)
    fetcher._stock.resize(2 * MIB)
    assert fetcher.stats().unread_bytes > 0, "it had to make room"
    assert some | one_by_one(fetcher, many.queues[5:]) == many.wanted
    assert fetcher.transfers.stats.received_bytes <= 2 * many.bundle_bytes
    assert fetcher.stats().reserved_bytes == 0
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
    streams = [Stream("g", queue, fetcher.settings.window) for queue in many.queues]
    first, second = (
        Fetch(whole_part(part, fetcher.settings), stream, stream is streams[0])
        for part, stream in zip(many.parts[0], streams, strict=True)
    )
    ask_all = fetcher.transfers.ask_all

    def hurrying(wanted: Any, *, urgent: bool) -> Any:
        second.is_urgent = True
        return ask_all(wanted, urgent=urgent)

    fetcher.transfers.ask_all = hurrying  # type: ignore[method-assign]
    fetcher._stock.begin([first, second])
    assert first.future.done()
    assert second.future.done()
    fetcher.close()


def unlike() -> tuple[TierBuilder, dict[MessageQueue, dict[int, bytes]]]:
    """One bundle of two topics: plain queues, one with a hole, one with an inner batch."""
    builder = TierBuilder()
    bodies: list[list[Any]] = [[b"plain %d" % number] * 5 for number in range(10)]
    bodies[3] = [b"one", None, b"three"]
    bodies[6] = [b"one", (3, b"three at once"), b"five"]
    queues = [MessageQueue("ab"[number % 2] * (1 + number % 2), number) for number in range(10)]
    batches = [batch_of(0, some, queue=queue) for queue, some in zip(queues, bodies, strict=True)]
    builder.add_round(*batches)
    wanted = {q: expected(0, some, queue=q) for q, some in zip(queues, bodies, strict=True)}
    return builder, wanted


def read_announced(
    fetcher: TieredMessageFetcher, queues: Iterable[MessageQueue]
) -> dict[MessageQueue, dict[int, bytes]]:
    cursors = [fetcher.tier.cursor(queue) for queue in queues]
    fetcher.expect("g", [(cursor, cursor.low, cursor.end) for cursor in cursors])
    return in_turn(fetcher, [cursor.queue for cursor in cursors])


def test_sections_with_holes_and_inner_batches_come_with_their_neighbours():
    builder, wanted = unlike()
    store = MeteredStore(builder.store)
    fetcher = fetcher_of(store)
    before = store.snapshot().requests
    assert read_announced(fetcher, wanted) == wanted
    assert store.snapshot().requests - before == 1
    fetcher.close()


def test_what_is_read_together_is_what_is_read_alone():
    builder, wanted = unlike()
    together, alone = fetcher_of(builder.store), fetcher_of(builder.store)
    cursors = [together.tier.cursor(queue) for queue in wanted]
    together.expect("g", [(cursor, cursor.low, cursor.end) for cursor in cursors])
    for cursor in cursors:
        found = together.read("g", cursor.queue, QueueOffset(0), cursor=cursor)
        other = alone.read("g", cursor.queue, QueueOffset(0))
        assert isinstance(found, TierBatch)
        assert isinstance(other, TierBatch)
        assert found.log_offset == other.log_offset
        for name in ("positions", "sizes", "tag_codes", "store_timestamps_ms", "physical_offsets"):
            assert np.array_equal(getattr(found.records, name), getattr(other.records, name)), name
    together.close()
    alone.close()


@pytest.mark.parametrize("at", [-1, 2**63 - 101, 2**63 - 1, -(2**63)])
def test_an_item_that_points_anywhere_is_none_to_be_decoded_with_others(at: int):
    one = Many(1, 1, each=1).parts[0][0]
    items = encode_items(np.array([at]), np.array([200], np.int32), np.zeros(1, np.int64))
    data = bytes(one.log_bytes) + items
    queues = [MessageQueue("many", 0)]
    placed = PlacedParts(queues, Parts.of([one]).rows, np.array([0]), np.array([one.log_bytes]))
    assert decode_parts(placed, data) is None


def test_a_bundle_that_was_cut_off_costs_what_is_gone():
    """Its first half is read, once for all that asked together and then each by itself; nobody asks for ever."""
    many = Many(20, 1)
    key = PREFIX + many.parts[0][0].bundle.key
    data = many.builder.store.get(key)
    end = many.parts[0][10].section.start
    many.builder.store.delete(key)
    many.builder.store.put_if_absent(key, data[:end])
    store = MeteredStore(many.builder.store)
    fetcher = fetcher_of(store)
    many.expect(fetcher, many.queues)
    for number, queue in enumerate(many.queues):
        found: dict[int, bytes] = {}
        if number >= 10:
            with pytest.raises(DataError):
                read_on(fetcher, queue, found)
        else:
            assert read_on(fetcher, queue, found)
            assert found == many.wanted[queue]
    assert store.snapshot().requests < 200  # each of the ten is looked at most carefully
    fetcher.close()


def test_all_that_fits_is_on_its_way_before_the_first_read():
    """Who read sixteen queues in turn waited for the beginning of each, one after the other."""
    builder, queues = TierBuilder(), [MessageQueue("many", number) for number in range(16)]
    bodies = [bytes(50 * KIB)] * 40
    for round_ in range(3):
        for queue in queues:
            builder.add_round(batch_of(round_ * 40, bodies, queue=queue))
    held = HeldExecutor()
    fetcher = fetcher_of(builder.store, executor=held)
    cursors = [fetcher.tier.cursor(queue) for queue in queues]
    fetcher.expect("g", [(cursor, cursor.low, cursor.end) for cursor in cursors])
    held.run_all()
    stats = fetcher.transfers.stats
    assert stats.requests == 3 * 16, "whole sections, each with its index"
    for queue in queues:
        assert read_on(fetcher, queue, {}, count=1)
    assert fetcher.stats().waits == 0
    assert fetcher.stats().hits == 16
    fetcher.close()


@pytest.mark.parametrize("each", [20, 40], ids=["of one block", "of two"])
def test_what_comes_along_is_asked_for_as_far_as_it_goes(each: int):
    """Each reader planned anew, for each section that had come with a neighbour's: a sixth of reading 1,000 queues."""
    many = Many(60, 2, each=each, size=8000)
    fetcher = fetcher_of(many.builder.store, cache_bytes=256 * MIB)
    many.expect(fetcher, many.queues)
    cursors = [fetcher.tier.cursor(queue) for queue in many.queues]
    streams = [fetcher._readers.announce(("g", one.queue, one.history)) for one in cursors]
    ends = [one.incarnation.log_end for one in cursors]
    assert [stream.asked for stream in streams] == ends
    assert read_on(fetcher, many.queues[7], {}, count=1)
    assert streams[7].asked == ends[7], "to begin where one said is no leap"
    fetcher.close()


@pytest.mark.parametrize(
    ("unknown", "comes"), [(4, 4), (8, 8), (9, 9), (10, 10), (11, 8), (20, 8)], ids=str
)
def test_no_crumb_is_left_between_two_requests(unknown: int, comes: int):
    """One section of 33 KB lay between two runs: it was asked for when its reader came, who waited for it alone."""
    many = Many(20, 1, each=4, size=8000)
    assert all(part.section.size_bytes < 33 * KIB for part in many.parts[0])
    fetcher = fetcher_of(many.builder.store, cache_bytes=8 * MIB, block_bytes=64 * KIB, chunk_bytes=256 * KIB)  # fmt: skip
    many.expect(fetcher, many.queues)
    cursor = fetcher.tier.cursor(many.queues[0])
    stream = fetcher._readers.announce(("g", cursor.queue, cursor.history))
    assert isinstance(stream.neighbours, Neighbours)
    known = {key_of(part, INDEX) for part in many.parts[0][unknown:]}
    multi_read = stream.neighbours.multi_read(many.parts[0][0], known.__contains__)
    assert multi_read is not None
    assert len(multi_read) == comes
    fetcher.close()


def test_what_another_group_has_had_holds_up_nobody_who_begins_beside_it():
    many = Many(8, 2, each=40, size=8000)
    fetcher = fetcher_of(many.builder.store)
    found: dict[int, bytes] = {}
    assert read_on(fetcher, many.queues[0], found, group="other")
    many.expect(fetcher, many.queues)
    for queue in many.queues:
        assert read_on(fetcher, queue, {}, count=1)
    assert fetcher.stats().waits == 1, "that of the other group"
    fetcher.close()


def test_who_announces_much_and_reads_nothing_holds_no_more_than_half():
    many = Many(60, 4, each=40, size=8000)
    fetcher = fetcher_of(many.builder.store, cache_bytes=16 * MIB)
    many.expect(fetcher, many.queues)
    stats = fetcher.stats()
    assert 2 * MIB <= stats.cached_bytes + stats.reserved_bytes <= 8 * MIB
    assert fetcher.transfers.stats.requests <= 16 * 3
    fetcher.forget("g")
    assert not fetcher._stock.cache._unread_bytes
    assert fetcher.stats().streams == 0
    fetcher.close()


def test_readers_that_begin_one_after_the_other_drop_nothing_of_each_other():
    """The first takes the share of one, the second that of one of two; together that is more than there is room for."""
    builder, queues = TierBuilder(), [MessageQueue("many", number) for number in range(12)]
    bodies = [bytes(50 * KIB)] * 20
    for queue in queues:
        for round_ in range(16):
            builder.add_round(batch_of(round_ * 20, bodies, queue=queue))
    fetcher = fetcher_of(builder.store, cache_bytes=32 * MIB)
    found = in_turn(fetcher, queues, count=4)
    assert all(len(some) == 320 for some in found.values())
    assert fetcher.transfers.stats.received_bytes <= 1.13 * 12 * 320 * 50 * KIB
    assert fetcher.stats().unread_bytes == 0
    fetcher.close()


def test_who_leaves_does_not_take_along_what_came_for_others():
    many = Many(6, 1)
    pending = HeldExecutor()
    fetcher = fetcher_of(many.builder.store, executor=pending)
    cursors = [fetcher.tier.cursor(queue) for queue in many.queues]
    fetcher.expect("g", [(cursor, cursor.low, cursor.end) for cursor in cursors])
    stock = fetcher._stock
    (fetch,) = {id(one): one for one in stock._fetches.values()}.values()
    assert len(fetch.streams) == 6
    fetcher.forget("g", many.queues[0])
    pending.run()
    assert stock.cache.held_bytes > 6 * 10 * 1000
    for queue in many.queues[1:]:
        fetcher.forget("g", queue)
    assert not stock.cache._unread_bytes
    fetcher.close()


def test_who_waits_for_what_another_has_asked_for_gets_his_own():
    many = Many(3, 1)
    held = HeldExecutor()
    fetcher = fetcher_of(many.builder.store, executor=held, clock=SystemClock())
    many.expect(fetcher, many.queues)
    found: dict[MessageQueue, dict[int, bytes]] = {queue: {} for queue in many.queues}
    threads = [
        threading.Thread(target=read_on, args=(fetcher, queue, found[queue]))
        for queue in many.queues
    ]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + 20
    while len(fetcher._readers) < 3 or not held.calls:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    time.sleep(0.1)  # the others come to wait as well
    held.run()
    for thread in threads:
        thread.join(20)
    assert not held.calls
    assert found == many.wanted
    fetcher.close()


def test_i8_what_came_with_a_larger_request_keeps_no_more_in_memory_than_it_is_counted_for():
    """Two strips were asked for with one request: each kept the bytes of both, and was counted for its own."""
    many = Many(120, 1)
    pending = HeldExecutor()
    fetcher = fetcher_of(
        many.builder.store, executor=pending, cache_bytes=MIB, chunk_bytes=256 * KIB
    )
    many.expect(fetcher, many.queues)
    stock, begun = fetcher._stock, []
    for queue in (many.queues[0], many.queues[27]):
        cursor = fetcher.tier.cursor(queue)
        with stock.lock:
            stream = fetcher._readers.make(("g", queue, cursor.history), 0.0)
            view = fetcher.tier.view(queue, cursor.incarnation)
            begun += stock.prepare(stream, view, QueueOffset(0), 16 * KIB)
    stock.begin(begun)
    assert fetcher.transfers.stats.coalesced, "they came together"
    pending.run_all()
    multi_runs = {
        id(x): x for x in stock.cache._entries.values() if isinstance(x.value, MultiSectionRun)
    }
    assert len(multi_runs) == 2
    for entry in multi_runs.values():
        assert isinstance(entry.value, MultiSectionRun)
        assert memoryview(entry.value._data.obj).nbytes <= 1.2 * entry.size_bytes
    fetcher.close()


def test_items_that_are_not_in_the_order_of_their_records_are_refused_together_as_alone():
    """They were taken where a section came with its neighbours: batches were cut of them that held other bytes."""
    many = Many(2, 1, each=3)
    parts = many.parts[0]
    data = bytearray(many.builder.store.get(PREFIX + parts[0].bundle.key))
    low, at = parts[0].section.start, parts[0].section.start + parts[0].section.items_at
    size = parts[0].log_bytes // 3
    first, second = (bytes(data[low + n * size : low + (n + 1) * size]) for n in (0, 1))
    data[low : low + 2 * size] = second + first
    items = [bytes(data[at + n * 20 : at + (n + 1) * 20]) for n in (0, 1)]
    data[at : at + 40] = items[1] + items[0]  # offset 0 stands behind offset 1 now
    rows = Parts.of(parts).rows.copy()
    end = at + parts[0].count * 20
    rows["crc"][0] = crc32(bytes(data[low:end]))
    keys = [key_of(part, INDEX) for part in parts]
    multi_read = MultiSectionRead(parts[0].bundle, 0, many.queues, rows, keys)
    found = decode_together(
        multi_read, memoryview(bytes(data))[multi_read.start : multi_read.end], PREFIX
    )
    assert [list(some) for _, some in found] == [[keys[1]]]


def test_what_was_decoded_by_itself_and_has_to_make_room_is_asked_for_again():
    """Its reader was not told, so nothing of it was read ahead any more."""
    builder, wanted = unlike()
    fetcher = fetcher_of(builder.store)
    cursors = [fetcher.tier.cursor(queue) for queue in wanted]
    fetcher.expect("g", [(cursor, cursor.low, cursor.end) for cursor in cursors])
    read_on(fetcher, cursors[0].queue, {}, count=1)
    stream = fetcher._readers.announce(("g", cursors[5].queue, cursors[5].history))
    stream.asked = int(cursors[5].incarnation.log_end)
    fetcher._stock.resize(1)
    assert stream.asked == 0
    fetcher.close()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_readers_do_all_is_counted_and_each_gets_his_own(seed: int):
    """Readers that leap, leave, come back and share, in memory that is lent and given back, while time passes."""
    rng, clock = random.Random(seed), ManualClock()
    many = Many(24, 4, each=6, size=800)
    fetcher = fetcher_of(
        many.builder.store,
        clock=clock,
        cache_bytes=512 * KIB,
        chunk_bytes=128 * KIB,
        block_bytes=128 * KIB,
        spent_bytes=32 * KIB,
    )
    cache, groups = fetcher._stock.cache, ("a", "b")
    at = {(group, queue): 0 for group in groups for queue in many.queues}
    for group in groups:
        many.expect(fetcher, many.queues, group)
    for _ in range(1500):
        group, queue = rng.choice(groups), rng.choice(many.queues[: rng.choice([3, 24])])
        kind = rng.random()
        if kind < 0.02:
            fetcher.forget(group, None if kind < 0.005 else queue)
            if kind < 0.01:
                many.expect(fetcher, many.queues, group)
        elif kind < 0.04:
            fetcher.lend(rng.choice([0, 128 * KIB, 256 * KIB]))
        elif kind < 0.06:
            clock.advance(rng.choice([0.2, 11.0, 61.0, 181.0]))
            fetcher.tick()
        start = at[group, queue] = rng.randrange(24) if kind > 0.97 else at[group, queue] % 24
        cursor = fetcher.tier.cursor(queue)
        count, most = rng.choice([(2, MIB), (100, 1), (100, MIB)])
        batch = fetcher.read(
            group,
            queue,
            QueueOffset(start),
            count_max=count,
            bytes_max=most,
            cursor=cursor,
            until=cursor.end,
        )
        assert isinstance(batch, TierBatch)
        assert batch.base_offset == start
        found = rows(batch)
        assert found == {offset: many.wanted[queue][offset] for offset in found}
        at[group, queue] = batch.end_offset
        things = {id(thing): thing for thing in cache._entries.values()}.values()
        assert cache.held_bytes == sum(thing.size_bytes for thing in things) <= cache.bytes_max
        assert cache.reserved_bytes == 0
        for multi_run in [
            thing.value for thing in things if isinstance(thing.value, MultiSectionRun)
        ]:
            assert multi_run.unread == len(multi_run.unread_places())
    for group in groups:
        fetcher.forget(group)
    clock.advance(200)
    fetcher.tick()
    assert (cache.held_bytes, cache._unread_bytes, cache._spent_bytes) == (0, 0, 0)
    assert not fetcher._stock._fetches
    fetcher.close()
