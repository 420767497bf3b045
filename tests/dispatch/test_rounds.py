"""How a round's commits are divided over bundles."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tiered.dispatch.group_commit import plan_bundles
from tiered.dispatch.settings import DispatchSettings
from tiered.model import MessageQueue


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
    taken: list[Any] = [(None, Commit(MessageQueue(t, q), at, b)) for t, q, at, b in rows]
    plans = [[commit for _, commit in plan] for plan in plan_bundles(taken, size)]
    assert sorted(c for plan in plans for c in plan) == sorted(c for _, c in taken)
    for plan in plans:
        assert plan == sorted(plan), "sorted by topic, queue and offset"
        assert len(plan) == 1 or sum(commit.data_bytes for commit in plan) <= size
        assert len(plan) == 1 or all(2 * commit.data_bytes <= size for commit in plan)
    shared = [plan for plan in plans if 2 * plan[0].data_bytes <= size]
    for one, two in pairwise(shared):
        assert one[-1] < two[0]
        assert sum(c.data_bytes for c in one) + two[0].data_bytes > size, "none could be left out"
    total = sum(commit.data_bytes for _, commit in taken)
    assert len(plans) <= 2 * total // size + 1


def test_many_queues_wait_for_larger_rounds_within_half_of_the_buffer():
    settings = DispatchSettings(bundle_bytes=16 << 20, buffer_bytes_max=128 << 20)
    assert settings.round_bytes(1) == settings.round_bytes(1_000) == 24 << 20
    assert 24 << 20 < settings.round_bytes(5_000) < 64 << 20
    assert settings.round_bytes(10_000) == settings.round_bytes(10**6) == 64 << 20
    assert DispatchSettings(buffer_bytes_max=16 << 20).round_bytes(10**6) == 24 << 20
