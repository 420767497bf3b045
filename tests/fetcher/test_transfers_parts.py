"""The parts that the request layer decides with: rates, merging, deadlines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.limits import TransferLimits
from fetcher.requests import Arrivals, Range, RangeQueue, plan_merge
from fetcher.transfers import TokenBucket
from tiered.errors import InvalidError

STEPS = st.lists(st.tuples(st.floats(0, 2), st.floats(0.1, 500)), max_size=60)


@given(st.floats(0.5, 1000), STEPS)
def test_rate_is_never_exceeded(rate: float, steps: list[tuple[float, float]]):
    """Between any two moments: what the rate gives, one bucket, and the last one taken."""
    now, bucket = 0.0, TokenBucket(rate, 0.0)
    taken: list[tuple[float, float]] = []
    for pause, units in steps:
        now += pause
        if bucket.ready_in_s(now) == 0:
            bucket.take(units, now)
            taken.append((now, units))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            passed = sum(units for _, units in taken[first:last])
            seconds = taken[last][0] - taken[first][0]
            assert passed <= rate * seconds + bucket._burst + 1e-6


@given(st.floats(0.5, 1e9), st.lists(st.floats(1, 1e8), max_size=30))
def test_waiting_as_long_as_it_says_is_enough(rate: float, sizes: list[float]):
    now, bucket = 5.0, TokenBucket(rate, 5.0)
    for units in sizes:
        now += bucket.ready_in_s(now)
        now += bucket.ready_in_s(now)  # roundings
        assert bucket.ready_in_s(now) <= 1e-5
        bucket.take(units, now)


def test_no_rate_no_limit():
    bucket = TokenBucket(None, 0.0)
    bucket.take(1e18, 0.0)
    assert bucket.ready_in_s(0.0) == 0
    with pytest.raises(ValueError, match="above 0"):
        TokenBucket(0, 0.0)


def test_clock_that_stands_still_gives_nothing():
    bucket = TokenBucket(10, 0.0)
    bucket.take(6, 0.0)
    assert bucket.ready_in_s(0.0) == pytest.approx(0.5)
    assert bucket.ready_in_s(0.25) == pytest.approx(0.25)


def places(*ranges: tuple[int, int]) -> list[tuple[int, int, int, str]]:
    return [(start, end, number, "") for number, (start, end) in enumerate(ranges)]


def test_neighbours_are_merged_within_the_gap():
    row = places((0, 10), (15, 20), (20, 30), (41, 50))
    assert plan_merge(row, 1, gap_bytes=5, bytes_max=100) == (0, 3, 0, 30)
    assert plan_merge(row, 1, gap_bytes=4, bytes_max=100) == (1, 3, 15, 30)
    assert plan_merge(row, 3, gap_bytes=10, bytes_max=100) == (3, 4, 41, 50)
    assert plan_merge(row, 0, gap_bytes=11, bytes_max=100) == (0, 4, 0, 50)


def test_a_merge_reads_no_more_in_vain_than_is_wanted():
    row = places((0, 10), (20, 22), (30, 32), (40, 60))
    assert plan_merge(row, 0, gap_bytes=100, bytes_max=100) == (0, 2, 0, 22)
    assert plan_merge(row, 3, gap_bytes=100, bytes_max=100) == (0, 4, 0, 60)


def test_a_merge_has_a_size():
    row = places((0, 10), (10, 20), (20, 30), (30, 40))
    assert plan_merge(row, 1, gap_bytes=0, bytes_max=20) == (1, 3, 10, 30)
    assert plan_merge(row, 1, gap_bytes=0, bytes_max=5) == (1, 2, 10, 20), "alone it may be larger"


def test_overlaps_are_merged():
    row = places((0, 100), (10, 20), (50, 150))
    assert plan_merge(row, 0, gap_bytes=0, bytes_max=200) == (0, 3, 0, 150)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=20),
    st.data(),
)
def test_a_merge_holds_what_it_says(rows: list[tuple[int, int]], data: st.DataObject):
    row = places(*sorted((start, start + size) for start, size in rows))
    at = data.draw(st.integers(0, len(row) - 1))
    gap, bytes_max = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 200))
    low, high, start, end = plan_merge(row, at, gap_bytes=gap, bytes_max=bytes_max)
    assert low <= at < high
    merged = row[low:high]
    assert start == min(one[0] for one in merged)
    assert end == max(one[1] for one in merged)
    assert end - start <= bytes_max or (low, high) == (at, at + 1)
    holes = end - start - len({byte for one in merged for byte in range(one[0], one[1])})
    assert holes <= gap * (len(merged) - 1)
    assert 2 * holes <= end - start, "no more is read in vain than is wanted"


def test_lane_pays_by_stream():
    """A stream whose chunk came with another's request waits longer for its next one."""
    queue = RangeQueue(gap_bytes=0)
    chunks = [
        Range("k", 0, 10, "a", False, 1),
        Range("k", 10, 40, "b", False, 2),
        Range("x", 0, 10, "b", False, 3),
        Range("y", 0, 10, "a", False, 4),
        Range("z", 0, 10, "a", False, 5),
    ]
    for chunk in chunks:
        queue.push(chunk)
    assert queue.head() is chunks[0]
    assert queue.take(chunks[0], 100) == (chunks[:2], 0, 40)
    order = []
    while (chunk := queue.head()) is not None:
        queue.take(chunk, 100)
        order.append(chunk)
    assert order == [chunks[3], chunks[4], chunks[2]]
    assert not queue._places


def test_lane_forgets():
    queue = RangeQueue(gap_bytes=0)
    chunks = [Range("k", number, number + 1, "a", False, number) for number in range(3)]
    for chunk in chunks:
        queue.push(chunk)
    queue.remove(chunks[1])
    assert queue.take(chunks[0], 100) == (chunks[:1], 0, 1), "a hole, and the gap is 0"
    assert len(queue) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests_in_flight_max": 0},
        {"pending_max": 0},
        {"hedge_factor": 0.5},
        {"hedge_budget": 2.0},
        {"coalesce_gap_bytes": -1},
    ],
)
def test_limits_are_checked(wrong: dict[str, float]):
    with pytest.raises(InvalidError):
        TransferLimits(**wrong)  # type: ignore[arg-type]


def test_what_somebody_waits_for_is_worked_on_first_then_what_was_asked_for_first():
    urgent = {4}
    arrivals: Arrivals[int] = Arrivals(2)
    numbers = [5, 3, 4, 1, 9]
    works = [arrivals.come(number, number, lambda n=number: n in urgent) for number in numbers]  # type: ignore[misc]
    assert works == [True, True, False, False, False], "so many workers, and no more"
    assert [arrivals.next(), arrivals.next()] == [4, 1]
    urgent.add(9)  # somebody has begun to wait meanwhile
    assert [arrivals.next(), arrivals.next(), arrivals.next()] == [9, 3, 5]
    assert arrivals.next() is None
    assert arrivals.come(7, 7, lambda: False), "one has ended"
    assert not arrivals.come(8, 8, lambda: False), "the other has not"
    assert [arrivals.next(), arrivals.next(), arrivals.next(), arrivals.next()] == [
        7,
        8,
        None,
        None,
    ]
    assert [arrivals.come(n, n, lambda: False) for n in range(3)] == [True, True, False]
