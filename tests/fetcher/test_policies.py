"""Where each policy reads, and what both sides together have: pure, and against a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.both_sides import QUEUE, BothSides

from fetcher.statuses import Both, Policy, ScanLimits, Side, plan_sides
from tiered.errors import InvalidError
from tiered.model import Boundary, QueueBounds, QueueOffset

LOCAL, TIER = (Side.LOCAL,), (Side.TIER,)
LOCAL_FIRST, TIER_FIRST = (Side.LOCAL, Side.TIER), (Side.TIER, Side.LOCAL)
TABLE = [
    # in local, in tier, in memory: DISABLE, NOT_IN_DISK, NOT_IN_MEM, FORCE
    (False, False, False, ((), (), (), ())),
    (True, False, True, (LOCAL, LOCAL, LOCAL, LOCAL)),
    (True, False, False, (LOCAL, LOCAL, LOCAL, LOCAL)),
    (False, True, False, ((), TIER, TIER, TIER)),
    (True, True, True, (LOCAL, LOCAL_FIRST, LOCAL_FIRST, TIER_FIRST)),
    (True, True, False, (LOCAL, LOCAL_FIRST, TIER_FIRST, TIER_FIRST)),
]


def bounds(low: int, end: int) -> QueueBounds:
    return QueueBounds(QueueOffset(low), QueueOffset(end))


@pytest.mark.parametrize(("local", "tier", "memory", "wanted"), TABLE)
def test_each_policy_reads_where_it_says(
    local: bool, tier: bool, memory: bool, wanted: tuple[tuple[Side, ...], ...]
):
    for policy in Policy:
        both = Both.of(
            policy,
            bounds(10 if local else 50, 100),
            bounds(0, 80 if tier else 20),
            is_one=True,
        )
        assert plan_sides(policy, both, 30, lambda: memory) == wanted[policy]


def test_memory_is_asked_only_when_that_decides():
    def is_in_memory() -> bool:
        raise AssertionError("not asked")

    both = Both(bounds(10, 100), bounds(0, 80))
    for policy in (Policy.DISABLE, Policy.NOT_IN_DISK, Policy.FORCE):
        plan_sides(policy, both, 30, is_in_memory)
    for offset in (5, 90):
        plan_sides(Policy.NOT_IN_MEM, both, offset, is_in_memory)


def test_where_the_histories_part_only_what_is_below_the_brokers_minimum_is_believed():
    both = Both.of(Policy.FORCE, bounds(30, 50), bounds(0, 100), is_one=False)
    assert both.tier == bounds(0, 30)
    assert both.bounds == bounds(0, 50)
    both = Both.of(Policy.FORCE, bounds(0, 50), bounds(10, 100), is_one=False)
    assert not both.has(Side.TIER, 20)
    assert both.bounds == bounds(0, 50)


def test_limits_have_to_be_positive():
    with pytest.raises(InvalidError):
        ScanLimits(count_max=0)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.integers(0, 30),
    st.integers(0, 30),
    st.lists(st.integers(0, 2), min_size=30, max_size=30),
)
def test_offsets_by_time_have_no_seam(
    commits: list[int], expired: int, fresh: int, steps: list[int]
):
    both = BothSides()
    both.append(sum(commits) + fresh)
    row = both.local._queues[QUEUE]
    at = 1000
    for n in range(len(row.times)):
        at += steps[n % len(steps)]
        row.times[n] = at
    rewrite(both)
    times = list(row.times)
    for count in commits:
        both.commit(both.commit_offset + count)
    both.tier_side.refresh(1e9)
    both.expire(min(expired, both.commit_offset))
    end = both.end
    for policy in (Policy.NOT_IN_DISK, Policy.NOT_IN_MEM, Policy.FORCE):
        for time_ms in range(999, at + 2):
            lower = next((o for o, t in enumerate(times) if t >= time_ms), end)
            last = max((o for o, t in enumerate(times) if t <= time_ms), default=0)
            for boundary, wanted in ((Boundary.LOWER, lower), (Boundary.UPPER, last)):
                found = both.store.offset_by_time("t", 0, time_ms, boundary, policy=policy)
                assert found == wanted, (policy, time_ms, boundary)
        assert both.store.earliest_time_ms("t", 0, policy=policy) == times[0]


def rewrite(both: BothSides) -> None:
    """Have the records say the times that the local store says."""
    row = both.local._queues[QUEUE]
    for n, time_ms in enumerate(row.times):
        raw = bytearray(row.records[n])
        raw[56:64] = time_ms.to_bytes(8, "big")
        row.records[n] = both.raws[n] = bytes(raw)


def test_a_queue_that_is_nowhere_has_no_times():
    both = BothSides()
    with pytest.raises(InvalidError, match="neither"):
        both.store.offset_by_time("t", 0, 5)
    assert both.store.earliest_time_ms("t", 0) is None


def test_with_the_tier_disabled_times_are_the_local_store_s():
    both = BothSides()
    both.append(10)
    both.commit(10)
    both.tier_side.refresh(1e9)
    times = list(both.local._queues[QUEUE].times)
    both.expire(4)
    assert both.store.offset_by_time("t", 0, 0, policy=Policy.DISABLE) == 4
    assert both.store.offset_by_time("t", 0, 0) == 0
    assert both.store.earliest_time_ms("t", 0, policy=Policy.DISABLE) == times[4]
    assert both.store.earliest_time_ms("t", 0) == times[0]
