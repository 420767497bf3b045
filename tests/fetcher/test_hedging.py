"""When a slow request is asked again."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import ByteRange
from fetcher.limits import TransferLimits
from fetcher.requests import Asked
from fetcher.transfers import (
    SAMPLES,
    SAMPLES_MIN,
    Durations,
    HedgeBudget,
    TransferState,
    size_class,
)

KIB, MIB = 1 << 10, 1 << 20


def test_size_classes():
    sizes = [1, 64 * KIB, 64 * KIB + 1, 256 * KIB, 256 * KIB + 1, MIB, 4 * MIB, 5 * MIB, 1 << 40]
    assert [size_class(size) for size in sizes] == [0, 0, 1, 1, 2, 2, 3, 4, 7]


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=3 * SAMPLES))
def test_median_is_that_of_the_last_ones(durations: list[float]):
    found = Durations()
    for duration in durations:
        found.add(1, duration)
    if len(durations) < SAMPLES_MIN:
        assert found.median_s(1) is None
    else:
        assert found.median_s(1) == statistics.median_high(durations[-SAMPLES:])


def test_sizes_are_judged_by_their_like():
    found = Durations()
    for _ in range(SAMPLES_MIN):
        found.add(10 * KIB, 0.01)
        found.add(3 * MIB, 0.2)
    assert found.median_s(64 * KIB) == 0.01
    assert found.median_s(4 * MIB) == 0.2
    assert found.median_s(512 * KIB) == 0.2, "the next larger one is patient"
    assert found.median_s(16 * MIB) == pytest.approx(0.8), "a larger one may take longer"


def test_a_few_late_ones_do_not_move_the_median():
    found, rng = Durations(), random.Random(3)
    for _ in range(1000):
        found.add(MIB, 1.02 if rng.random() < 0.02 else 0.02)
    assert found.median_s(MIB) == 0.02


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=2000))
def test_budget_is_never_exceeded(share: float, asks: list[bool]):
    budget, requests, hedges = HedgeBudget(share), 0, 0
    for is_request in asks:
        if is_request:
            budget.earn()
            requests += 1
        elif budget.allows_one:
            budget.spend()
            hedges += 1
        assert hedges <= share * requests + 1e-5


def test_a_calm_is_not_saved_up_for_ever():
    budget, hedges = HedgeBudget(0.05), 0
    for _ in range(100_000):
        budget.earn()
    while budget.allows_one:
        budget.spend()
        hedges += 1
    assert hedges == 32


def test_the_slow_ones_are_asked_again():
    limits = TransferLimits(hedge_budget=1.0, hedge_factor=3.0, hedge_floor_s=0.05)
    state = TransferState(limits, 0.0)
    assert state._hedge(10.0) is None
    running = [
        ("a", MIB, False, 9.0),  # 0.5 s as a rule: at 15
        ("b", 5 * MIB, True, 9.99),  # 1 ms as a rule, so the floor: at 10.04
        ("c", 10, False, 8.0),  # 0.1 s as a rule: due at 9.2
        ("d", 10, True, 9.0),  # due at 9.3
    ]
    for key, size, urgent, started_s in running:
        state.take_up(Asked(lambda _: False, "s", key, ByteRange(0, size)), 0.0, urgent=urgent)
        state.send(0.0)
        (attempt,) = state.take_effects().starts
        attempt.started_s = started_s
    assert state._hedge(10.0) == 10.05, "there is nothing to compare with"
    assert not state.take_effects().starts
    for _ in range(SAMPLES_MIN):
        for size, seconds in ((MIB, 0.5), (5 * MIB, 0.001), (10, 0.1)):
            state._durations.add(size, seconds)
    assert state._hedge(10.0) == pytest.approx(10.04)
    again = [attempt.request.key for attempt in state.take_effects().starts]
    assert again == ["d", "c"], "what is waited for goes first"
