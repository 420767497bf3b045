"""The read-ahead window: what holds for every order of events, and how readers of all kinds fare in a simulation."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.window_picture import picture
from support.window_simulation import (
    KIB,
    KINDS,
    MIB,
    Line,
    Policy,
    Reader,
    Simulation,
    crowd,
    fast,
    figures_of,
    simulate,
    stop_at_random,
    to_the_end,
)

from fetcher.limits import FetchSettings, WindowLimits
from fetcher.window import grown, halved, plan_chunks, wants_more
from tiered.errors import InvalidError

NOW = FetchSettings().window
LINE = Line()
LIMITS = st.builds(
    lambda least, more, growth, refill: WindowLimits(least, least + more, growth, refill),
    st.integers(1, MIB),
    st.integers(0, 64 * MIB),
    st.floats(0.01, 4),
    st.floats(0.01, 1),
)
EVENTS = st.lists(st.integers(1, 8 * MIB) | st.just(0), max_size=60)  # a batch, or 0: lost unread
PICTURE = Path(__file__).parents[2] / "docs" / "contributing" / "read-ahead.svg"


@given(LIMITS, EVENTS)
def test_window_keeps_its_bounds(limits: WindowLimits, events: list[int]):
    window, read = limits.bytes_min, 0
    for batch in events:
        before = window
        if batch:
            window = grown(window, batch, limits)
            read += batch
            assert before <= window <= before + limits.growth * batch
        else:
            window = halved(window, limits)
            assert window == max(before // 2, limits.bytes_min)
        assert limits.bytes_min <= window <= limits.bytes_max
        assert window <= limits.bytes_min + limits.growth * read


@given(LIMITS, st.integers(1, 64 * MIB), st.integers(0, 64 * MIB), st.integers(0, 64 * MIB))
def test_more_is_wanted_when_less_is_there(limits: WindowLimits, window: int, one: int, two: int):
    less, more = sorted((one, two))
    assert wants_more(window, less, limits) or not wants_more(window, more, limits)
    assert not wants_more(window, window, limits), "a full window is enough"
    assert wants_more(window, 0, limits)


BLOCKS = st.lists(st.tuples(st.integers(0, 500), st.booleans()), max_size=30)


@given(BLOCKS, st.integers(1, 1500), st.integers(0, 800))
def test_chunks_hold_what_is_not_here(
    blocks: list[tuple[int, bool]], chunk_bytes: int, gap_bytes: int
):
    sizes, is_here = [size for size, _ in blocks], [here for _, here in blocks]
    chunks = plan_chunks(sizes, is_here, chunk_bytes=chunk_bytes, gap_bytes=gap_bytes)
    held = [index for chunk in chunks for index in chunk]
    assert held == sorted(set(held)), "in order and apart"
    assert {index for index, here in enumerate(is_here) if not here} <= set(held)
    for chunk in chunks:
        assert not is_here[chunk[0]]
        assert not is_here[chunk[-1]]
        assert sum(sizes[index] for index in chunk) <= chunk_bytes or len(chunk) == 1
        gap = 0
        for index in chunk:
            gap = gap + sizes[index] if is_here[index] else 0
            assert gap <= gap_bytes
    for one, two in pairwise(chunks):
        gap = sum(sizes[one.stop : two.start])
        both = sum(sizes[one.start : two.start + 1])
        assert gap > gap_bytes or both > chunk_bytes, "two that fit into one are one"


@pytest.mark.parametrize(
    "wrong", [{"bytes_min": 0}, {"bytes_max": 1}, {"growth": 0.0}, {"refill": 0.0}, {"refill": 1.5}]
)
def test_limits_are_checked(wrong: dict[str, float]):
    with pytest.raises(InvalidError):
        WindowLimits(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "share", "over_fetch"),
    [
        ("fast", 0.97, 1.05),
        ("slow", 0.99, 1.3),
        ("stalling", 0.95, 1.2),
        ("bursty", 0.9, 1.15),
        ("seeking", 0.25, 1.5),
    ],
)
def test_each_kind_of_reader_is_served(kind: str, share: float, over_fetch: float):
    figures = figures_of(simulate(kind, NOW, LINE), LINE, 30.0)
    assert figures.share >= share
    assert 1 <= figures.over_fetch <= over_fetch


def test_the_simulation_is_able_to_be_bad():
    """With a window that cannot grow the line is idle most of the time; with a greedy one much is read in vain."""
    small = WindowLimits(bytes_min=256 * KIB, bytes_max=256 * KIB)
    assert figures_of(simulate("fast", small, LINE), LINE, 30.0).share < 0.2
    greedy = WindowLimits(bytes_min=16 * MIB, growth=4.0)
    assert figures_of(simulate("seeking", greedy, LINE), LINE, 30.0).over_fetch > 2


def test_a_stall_halves_the_window_down_and_frees_the_memory():
    reader = simulate("stalling", NOW, LINE)
    while_idle = [row for row in reader.curve if 8.0 < row[0] < 9.9]
    assert while_idle
    assert {row[2] for row in while_idle} == {0}
    assert max(row[1] for row in while_idle) <= MIB
    assert max(row[1] for row in reader.curve if 1 < row[0] < 6) == NOW.bytes_max


def test_reading_to_the_end_fetches_nothing_twice():
    reader = to_the_end(NOW, LINE)
    assert reader.delivered == reader.log_bytes
    assert reader.fetched <= 1.05 * reader.delivered
    best_s = reader.log_bytes / LINE.bytes_per_s + LINE.latency_s
    assert best_s / reader.ended_s >= 0.9


@pytest.mark.parametrize("mean_mib", [1, 4, 8, 16, 64])
def test_stopping_at_random_wastes_little(mean_mib: int):
    assert stop_at_random(NOW, LINE, mean_bytes=mean_mib * MIB, readers=100) <= 1.5


def test_a_window_that_began_at_the_readers_batch_would_waste_more():
    other = Policy(begins_small=False)
    over_fetch = stop_at_random(NOW, LINE, mean_bytes=MIB, policy=other, readers=100)
    assert over_fetch > 1.5


def test_what_was_left_behind_is_dropped():
    """Else a reader that seeks fills the cache with what nobody will read, until that expires."""
    kept = simulate("seeking", NOW, LINE, unread_s=180.0, policy=Policy(drops_left=False))
    dropped = simulate("seeking", NOW, LINE, unread_s=180.0)
    assert max(row[2] for row in kept.curve) > 100 * MIB
    assert max(row[2] for row in dropped.curve) < 16 * MIB
    assert dropped.delivered >= kept.delivered


def test_a_crowd_keeps_within_the_cache():
    simulation = crowd(NOW, LINE, count=24, cache_bytes=64 * MIB)
    assert simulation.held_max <= 64 * MIB
    fast_ones = [reader.delivered for reader in simulation.readers[1:]]
    assert min(fast_ones) >= 0.5 * sum(fast_ones) / len(fast_ones)
    assert simulation.readers[0].delivered >= 0.8 * 20 * 5 * MIB


def test_nothing_waits_for_ever_in_a_cache_of_two_chunks():
    simulation = Simulation(NOW, LINE, cache_bytes=8 * MIB)
    for number in range(8):
        simulation.add(Reader(f"{number}", fast(), 16 * MIB))
    simulation.run(1e6)
    assert [reader.delivered for reader in simulation.readers] == [16 * MIB] * 8


def test_the_picture_is_that_of_the_window():
    made = "cd tests && python -m support.window_picture ../docs/contributing/read-ahead.svg"
    assert PICTURE.read_text("utf-8") == picture(), f"draw it anew: {made}"
    assert set(KINDS) == {"fast", "slow", "stalling", "bursty", "seeking"}
