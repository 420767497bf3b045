"""How a round's commits are divided over bundles."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from support.dispatching import FAST, dispatching, filled

from backends.memory import MemoryStore
from tiered.dispatch.group_commit import InFlight, plan_bundles
from tiered.dispatch.settings import DispatchSettings
from tiered.local.interface import RecordBatch
from tiered.log.composite import CompositeFlatFile, trim
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    import pytest


class Commit(NamedTuple):
    """As much of one as the plan looks at."""

    queue: MessageQueue
    queue_offset: int
    data_bytes: int


COMMITS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 99), st.integers(0, 300)),
    max_size=60,
    unique_by=lambda row: row[:3],
)


@given(COMMITS, st.sampled_from((50, 100, 1000)))
def test_every_commit_once_in_order_in_few_bundles_of_about_one_size(rows: list[Any], size: int):
    taken: list[Any] = [Commit(MessageQueue(t, q), at, b) for t, q, at, b in rows]
    plans = plan_bundles(taken, size)
    assert sorted(c for plan in plans for c in plan) == sorted(taken)
    for plan in plans:
        assert plan == sorted(plan), "sorted by topic, queue and offset"
        assert len(plan) == 1 or sum(commit.data_bytes for commit in plan) <= size
        assert len(plan) == 1 or all(2 * commit.data_bytes <= size for commit in plan)
    shared = [plan for plan in plans if 2 * plan[0].data_bytes <= size]
    for one, two in pairwise(shared):
        assert one[-1] < two[0]
        assert sum(c.data_bytes for c in one) + two[0].data_bytes > size, "none could be left out"
    total = sum(commit.data_bytes for commit in taken)
    assert len(plans) <= 2 * total // size + 1


@given(st.floats(0.3, 2000.0))
def test_what_is_on_its_way_at_once_stays_far_from_its_deadline_whatever_the_speed(mib_s: float):
    """Bundles of 16 MiB that share one way; each is done after the time that all of them take."""
    flights, took, most = InFlight(8), [], 0
    for _ in range(200):
        took.append(flights.limit * 16 / mib_s)
        flights.ended(took[-1], is_stored=True)
        most = max(most, flights.limit)
    assert max(took[1:]) <= max(16 / mib_s, 15 + 16 / mib_s), (
        "but for the first, before anything is known"
    )
    assert most == 8 or 16 * (most + 1) / mib_s > 5, "a fast way is used"
    assert mib_s < 26 or most == 8


def test_a_store_that_says_no_at_once_says_nothing_about_the_way():
    flights = InFlight(8)
    for _ in range(9):
        flights.ended(0.1, is_stored=True)
    flights.ended(0.2, is_stored=False)
    assert flights.limit == 8
    flights.ended(94.0, is_stored=False)
    assert flights.limit == 4
    for _ in range(9):
        flights.ended(94.0, is_stored=False)
    assert flights.limit == 1


def test_many_queues_wait_for_larger_rounds_within_half_of_the_buffer():
    settings = DispatchSettings(bundle_bytes=16 << 20, buffer_bytes_max=128 << 20)
    assert settings.round_bytes(1) == settings.round_bytes(1_000) == 24 << 20
    assert 24 << 20 < settings.round_bytes(5_000) < 64 << 20
    assert settings.round_bytes(10_000) == settings.round_bytes(10**6) == 64 << 20
    assert DispatchSettings(buffer_bytes_max=16 << 20).round_bytes(10**6) == 24 << 20


def test_many_queues_have_larger_windows_within_half_of_the_buffer():
    settings = DispatchSettings(buffer_bytes_max=128 << 20)
    assert settings.step_bytes() == settings.step_bytes(1_000) == settings.window_bytes
    assert settings.window_bytes < settings.step_bytes(5_000) < 64 << 20
    assert settings.step_bytes(10_000) == settings.step_bytes(10**6) == 64 << 20
    assert DispatchSettings(buffer_bytes_max=32 << 20).step_bytes() == 8 << 20


def test_a_round_does_not_tear_a_window():
    """Else what it has of the queues behind would be small sections in a round of their own."""
    local = filled(topics=1, queues=50, each=4)
    asked: list[MessageQueue] = []

    def scans_in_the_midst_of_the_second(queue: MessageQueue) -> bool:
        asked.append(queue)
        if len(asked) == 90:
            dispatcher._commits.flush = True
            dispatcher._commits.scan()
            dispatcher._commits.flush = False
        return True

    slow = replace(FAST, freshness_s=3600.0, buffer_bytes_max=1 << 22)
    with dispatching(
        MemoryStore(), local, slow, selects=scans_in_the_midst_of_the_second
    ) as dispatcher:
        follower = local.follow({queue: QueueOffset(0) for queue in local.queues()})
        batches = follower.poll(1 << 20)
        assert [batch.count for batch in batches] == [4] * 50
        for low, high in ((0, 2), (2, 4)):
            assert all(dispatcher.dispatch_all([part_of(batch, low, high) for batch in batches]))
        assert dispatcher.drain(20)
        assert (dispatcher.counters.messages, dispatcher.counters.parts) == (200, 50)


def part_of(batch: RecordBatch, low: int, high: int) -> RecordBatch:
    end = int(batch.positions[high]) if high < batch.count else len(batch.data)
    return trim(
        RecordBatch(
            batch.queue, batch.base_offset, memoryview(batch.data)[:end], batch.positions[:high],
            batch.sizes[:high], batch.tag_codes[:high], batch.store_timestamps_ms[:high],
            batch.physical_offsets[:high],
        ), QueueOffset(batch.base_offset + low),
    )  # fmt: skip


def test_looking_whether_a_round_is_due_does_not_cost_by_the_queues_that_wait(
    monkeypatch: pytest.MonkeyPatch,
):
    looked: list[int] = []
    oldest = CompositeFlatFile.oldest_s.fget
    assert oldest is not None
    monkeypatch.setattr(
        CompositeFlatFile, "oldest_s", property(lambda file: looked.append(1) or oldest(file))
    )
    local = filled(topics=1, queues=200, each=1)
    slow = replace(FAST, freshness_s=3600.0, window_bytes=1 << 20, buffer_bytes_max=1 << 26)
    with dispatching(MemoryStore(), local, slow) as dispatcher:
        follower = local.follow({queue: QueueOffset(0) for queue in local.queues()})
        assert all(dispatcher.dispatch_all(follower.poll(1 << 20)))
        for _ in range(50):
            assert dispatcher._commits.due_in_s() > 3000
        assert len(looked) <= 2 * 200
        assert dispatcher.drain(20)


def test_a_round_is_taken_while_the_follower_waits_for_memory():
    """However long a message may wait: half of the buffer is a window, and no pressure by itself."""
    local = filled(topics=1, queues=60, each=16)
    slow = replace(FAST, freshness_s=3600.0, bundle_bytes=1 << 16, buffer_bytes_max=1 << 17)
    with dispatching(MemoryStore(), local, slow) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20)
        assert dispatcher.counters.messages == 960
