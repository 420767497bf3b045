"""A reader that says how far it will read: that much is asked for at once, nothing behind it, and it gets the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fetching import expected, fetcher_of, read_all, rows, view_of
from support.tiers import QUEUE, TierBuilder
from support.transfers import HeldExecutor

from backends.wrapping import MeteredStore
from fetcher.limits import WindowLimits
from fetcher.runs import INDEX, PartLayout, key_of
from fetcher.window import Stream, plan_fetches
from tiered.errors import StoreUnavailableError
from tiered.log.decode import TierBatch, decode_items
from tiered.log.sections import read_range
from tiered.log.state import Gap
from tiered.model import QueueOffset

if TYPE_CHECKING:
    import random

    from fetcher.fetcher import TieredMessageFetcher
    from fetcher.runs import Key
    from tiered.log.cursor import IncarnationView
    from tiered.log.parts import Part

KIB = 1024


def large(parts: int = 4, each: int = 40, size: int = 50 * KIB) -> TierBuilder:
    builder = TierBuilder()
    for part in range(parts):
        builder.add([bytes([65 + part]) * size for _ in range(each)])
    return builder


def read_to(fetcher: Any, start: int, stop: int, **limits: Any) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    at = QueueOffset(start)
    while at < stop:
        batch = fetcher.read("g", QUEUE, at, until=QueueOffset(stop), **limits)
        if batch is None:
            break
        if isinstance(batch, TierBatch):
            found |= rows(batch)
        at = batch.end if isinstance(batch, Gap) else batch.end_offset
    return found


def received(fetcher: Any) -> int:
    return fetcher.transfers.stats.received_bytes


def test_all_of_it_is_asked_for_at_the_first_read():
    held = HeldExecutor()
    fetcher = fetcher_of(large().store, executor=held, cache_bytes=64 << 20)
    with pytest.raises(StoreUnavailableError):
        fetcher.read("g", QUEUE, QueueOffset(0), until=QueueOffset(160), timeout_s=0)
    assert len(held.calls) == 4, "one for each section"
    held.run_all()
    assert len(read_to(fetcher, 0, 160)) == 160
    assert received(fetcher) <= 1.05 * 160 * 50 * KIB


def test_nothing_behind_is_asked_for():
    for stop in (1, 3, 39, 40, 41, 80, 123):
        fetcher = fetcher_of(large().store, cache_bytes=64 << 20)
        found = read_to(fetcher, 0, stop, count_max=4)
        assert len(found) >= stop
        assert received(fetcher) <= stop * 50 * KIB + 2 * 256 * KIB + 64 * KIB


def test_with_many_readers_all_stay_within_memory():
    store = MeteredStore(large(parts=8).store)
    fetcher = fetcher_of(store, cache_bytes=8 << 20, chunk_bytes=512 * KIB)
    at = dict.fromkeys(range(6), QueueOffset(0))
    while min(at.values()) < 320:
        for group, start in at.items():
            if start < 320:
                batch = fetcher.read(str(group), QUEUE, start, count_max=7, until=QueueOffset(320))
                assert isinstance(batch, TierBatch)
                at[group] = batch.end_offset
                stats = fetcher.stats()
                assert stats.cached_bytes + stats.reserved_bytes <= 8 << 20
    assert fetcher.stats().unread_bytes == 0
    assert received(fetcher) <= 1.25 * 320 * 50 * KIB


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_whatever_is_said_the_records_are_the_same(sizes: list[int], rng: random.Random):
    builder = TierBuilder()
    items = [bytes([n % 251]) * (size * KIB) for n, size in enumerate(sizes)]
    builder.add(items[: len(items) // 2] or [b""])
    builder.gap(3)
    builder.add(items)
    wanted, _ = read_all(fetcher_of(builder.store))
    fetcher = fetcher_of(
        builder.store, block_bytes=64 * KIB, chunk_bytes=128 * KIB, gap_bytes=0,
        cache_bytes=512 * KIB, window=WindowLimits(bytes_min=64 * KIB, bytes_max=256 * KIB),
    )  # fmt: skip
    at = QueueOffset(0)
    found: dict[int, bytes] = {}
    while True:
        until = rng.choice([None, QueueOffset(rng.randrange(100)), QueueOffset(at + 1)])
        batch = fetcher.read("g", QUEUE, at, count_max=rng.randint(1, 9), until=until)
        if batch is None:
            break
        if isinstance(batch, TierBatch):
            found |= rows(batch)
        at = batch.end if isinstance(batch, Gap) else batch.end_offset
    assert found == wanted
    assert fetcher.stats().reserved_bytes == 0


def test_about_is_exact_where_parts_begin_and_between_the_ends_else():
    builder = TierBuilder()
    builder.add([b"x" * 100, b"y" * 900, b"z" * 100])
    builder.gap(5)
    builder.add([b"x"] * 4)
    fetcher = fetcher_of(builder.store)
    view: IncarnationView = view_of(fetcher)
    first, second = view.parts
    about = [view.about(QueueOffset(at)) for at in range(14)]
    assert about[0] == first.log_offset
    assert about == sorted(about)
    assert about[3:9] == [first.log_end] * 5 + [second.log_offset]
    assert about[12:] == [second.log_end] * 2
    assert expected(0, [b"x" * 100])[0] == read_to(fetcher, 0, 1)[0]


def test_the_indexes_of_large_parts_are_asked_for_at_once():
    store, held = large(parts=6, each=90).store, HeldExecutor()
    fetcher = fetcher_of(store, executor=held)
    with pytest.raises(StoreUnavailableError):
        fetcher.read("g", QUEUE, QueueOffset(0), until=QueueOffset(540), timeout_s=0)
    assert len(held.calls) == 4
    fetcher = fetcher_of(store)
    assert len(read_to(fetcher, 0, 540)) == 540
    assert received(fetcher) <= 1.05 * 540 * 50 * KIB


def test_what_is_left_at_the_end_is_asked_for_at_once():
    store = large(parts=8).store
    most = 4 << 20  # twice the largest window
    fetcher = fetcher_of(store, cache_bytes=64 << 20, window=WindowLimits(bytes_max=most // 2))
    at, stop = QueueOffset(0), QueueOffset(320)
    while at < stop:
        batch = fetcher.read("g", QUEUE, at, until=stop, count_max=4)
        assert isinstance(batch, TierBatch)
        at = batch.end_offset
        if (stop - at) * 50 * KIB < most:
            assert received(fetcher) >= 320 * 50 * KIB, f"not all is asked for at {at}"


class Here:
    """What is here, for a plan: these layouts, and nothing on its way."""

    def __init__(self, layouts: dict[int, PartLayout]) -> None:
        self.layouts = layouts

    def layout(self, part: Part) -> PartLayout | None:
        return self.layouts.get(part.queue_offset)

    def is_known(self, key: Key) -> bool:
        return any(key == key_of(one.part, INDEX) for one in self.layouts.values())


def layout_of(fetcher: TieredMessageFetcher, part: Part) -> PartLayout:
    raw = read_range(fetcher.tier.store, fetcher.tier.prefix, part.index)
    items = decode_items(part, part.queue_offset, raw, where="")
    return PartLayout.of(part, items, fetcher.settings.block_bytes)


def test_of_a_part_that_comes_whole_no_index_is_asked_for_by_itself():
    """It was, of the part behind the window: a request more for each part, and the first that had a slot."""
    fetcher = fetcher_of(large(parts=8).store)  # parts of 2 MB
    view = view_of(fetcher)
    for window in range(2 << 20, 9 << 20, 256 * KIB):
        plan = plan_fetches(view, view.parts[0].queue_offset, window, Here({}), fetcher.settings, until=320)  # fmt: skip
        assert all(request.blocks for request in plan.requests)
        assert len(plan.requests) >= window // (2 << 20)


def test_the_index_of_the_next_large_part_is_asked_for_one_window_before_the_reader_needs_it():
    fetcher = fetcher_of(large(parts=3, each=180).store)  # of 9 MB
    view = view_of(fetcher)
    here = Here({0: layout_of(fetcher, view.parts[0])})
    for start, until, window, asks in (
        (0, 540, 4 << 20, 0),  # it is farther away
        (80, 540, 4 << 20, 1),
        (80, 180, 4 << 20, 0),  # nobody wants it
        (80, -1, 4 << 20, 0),  # nobody knows
        (80, 540, 8 << 20, 2),
    ):
        plan = plan_fetches(view, QueueOffset(start), window, here, fetcher.settings, until=until)
        indexes = [request.part.queue_offset for request in plan.requests if not request.blocks]
        assert indexes == [180, 360][:asks], (start, until, window)
        assert plan.asked <= view.parts[1].log_offset


def test_a_crumb_comes_with_what_is_asked_for_next():
    fetcher = fetcher_of(large(parts=1, each=360).store)  # of 18 MB
    view = view_of(fetcher)
    here = Here({0: layout_of(fetcher, view.parts[0])})
    plan = plan_fetches(view, QueueOffset(0), 9 << 20, here, fetcher.settings, until=360)
    assert len(plan.requests) == 2
    assert 7 << 20 <= plan.asked <= 8 << 20
    unsure = plan_fetches(view, QueueOffset(0), 9 << 20, here, fetcher.settings)
    assert len(unsure.requests) == 3
    assert unsure.asked >= 9 << 20


def test_as_much_is_ahead_as_may_be_but_for_two_requests():
    """More was asked for when half of it was gone, which is 20 ms of a reader in a hurry: each time it waited."""
    store, most = large(parts=4, each=400).store, 32 << 20
    fetcher = fetcher_of(store, cache_bytes=256 << 20, window=WindowLimits(bytes_max=most // 2))
    at, least = QueueOffset(0), most
    while at < 800:
        batch = fetcher.read("g", QUEUE, at, until=QueueOffset(1600), count_max=4)
        assert isinstance(batch, TierBatch)
        at = batch.end_offset
        least = min(least, received(fetcher) - at * 50 * KIB)
    assert least >= most - (8 << 20) - (4 << 20)
    assert received(fetcher) <= 1.05 * (800 * 50 * KIB + most) + (2 << 20)


@given(st.data())
def test_as_long_as_a_reader_is_calm_nothing_more_is_wanted(data: st.DataObject):
    """What spares most batches the question answers it as it would be answered."""
    builder = TierBuilder()
    for _ in range(4):
        builder.add([bytes(3000)] * 100)
    view = view_of(fetcher_of(builder.store))
    limits = WindowLimits(bytes_min=16 * KIB, bytes_max=data.draw(st.integers(16, 256)) * KIB)
    stream = Stream("g", QUEUE, limits, sure_max=2 * limits.bytes_max)
    stream.look(view)
    share = data.draw(st.integers(1, 1024)) * KIB
    stream.say(data.draw(st.integers(-1, 410)))
    offsets = sorted(data.draw(st.lists(st.integers(1, 399), min_size=1, max_size=30, unique=True)))
    for offset in offsets:
        stream.here, stream.next_offset = view.about(QueueOffset(offset)), offset
        was_calm, calm_to = stream.here <= stream.calm_to, stream.calm_to
        stream.calm_to = -1
        wanted = stream.ahead_now(share)
        assert not (was_calm and wanted)
        stream.calm_to = max(stream.calm_to, calm_to)
        event = data.draw(st.sampled_from(["nothing", "asked", "lost", "said"]))
        if event == "asked" and wanted:
            stream.asked = min(stream.here + wanted, view.incarnation.log_end)
        elif event == "lost":
            stream.lose(data.draw(st.integers(0, view.incarnation.log_end)))
        elif event == "said":
            stream.say(data.draw(st.integers(-1, 410)))
