"""Queue offsets by store time: exact up to a stated disorder, and with few small reads."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journals import PREFIX
from support.timed import Timed, put_queue

from backends.memory import MemoryStore
from backends.wrapping import MeteredStore
from tiered.errors import DataError
from tiered.format.object import BLOCK_BYTES
from tiered.log.reader import UNIT_BYTES, StoreRanges, find_by_time
from tiered.log.sections import WHOLE_AT_ONCE_BYTES
from tiered.model import Boundary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.log.cursor import IncarnationView

MIB = 1024 * 1024
REQUESTS_MAX = 12
SMALL_BYTES = UNIT_BYTES + 2 * BLOCK_BYTES


def find(
    store: MemoryStore, view: IncarnationView, time_ms: int, boundary: Boundary = Boundary.LOWER
) -> int:
    found = find_by_time(view, StoreRanges(store, PREFIX), time_ms, boundary)
    if found is not None:
        return found
    return (
        view.incarnation.commit_offset
        if boundary is Boundary.LOWER
        else view.incarnation.min_offset
    )


def wanted(
    view: IncarnationView, messages: Sequence[Timed], time_ms: int, boundary: Boundary
) -> int:
    """The same by looking at every message."""
    incarnation, base = view.incarnation, view.starts[0]
    times = {base + n: one[0] for n, one in enumerate(messages) if one is not None}
    times = {offset: time for offset, time in times.items() if offset >= incarnation.min_offset}
    if boundary is Boundary.LOWER:
        return min(
            (o for o, time in times.items() if time >= time_ms), default=incarnation.commit_offset
        )
    after = min(
        (o for o, time in times.items() if time > time_ms), default=incarnation.commit_offset
    )
    return max((o for o in times if o < after), default=incarnation.min_offset)


@pytest.mark.parametrize(
    ("time_ms", "lower", "upper"), [(35, 10, 10), (45, 11, 10), (50, 11, 13), (60, 14, 15), (75, 17, 16)]
)  # fmt: skip
@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (4,), (5,), (1, 2, 3, 4, 5, 6)])
def test_boundaries_are_those_of_a_broker(
    time_ms: int, lower: int, upper: int, cuts: tuple[int, ...]
):
    times: list[Timed] = [(t, 10) for t in (40, 50, 50, 50, 60, 60, 70)]
    borders = [0, *cuts, len(times)]
    store = MemoryStore()
    parts = [times[a:b] for a, b in pairwise(borders)]
    view = put_queue(store, parts, first=10)
    assert find(store, view, time_ms) == lower
    assert find(store, view, time_ms, Boundary.UPPER) == upper


def disordered(
    draw: st.DataObject, sizes: Sequence[int], steps: Sequence[int], sway: int
) -> list[int]:
    """Times that rise, but for messages at most a unit apart, of which any may come before the other."""
    rng = random.Random(draw.draw(st.integers(0, 2**32)))
    times, at = [], 1000
    for step in steps:
        at += step
        times.append(at)
    begins = [sum(sizes[:n]) for n in range(len(sizes))]
    for n in range(len(times)):
        near = [m for m in range(n + 1, len(times)) if begins[m] - begins[n] <= sway]
        if near and rng.random() < 0.5:
            m = rng.choice(near)
            times[n], times[m] = times[m], times[n]
            worst = any(
                times[i] > times[j] and begins[j] - begins[i] > sway
                for i in range(len(times))
                for j in range(i + 1, len(times))
            )
            if worst:
                times[n], times[m] = times[m], times[n]
    return times


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_it_is_exact_with_equal_and_slightly_disordered_times_and_holes(draw: st.DataObject):
    count = draw.draw(st.integers(1, 24))
    body = st.sampled_from([10, 3000, 20_000, 70_000, 150_000])
    bodies = draw.draw(st.lists(body, min_size=count, max_size=count))
    steps = draw.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    sizes = [size + 200 for size in bodies]
    times = disordered(draw, sizes, steps, UNIT_BYTES - 200)
    messages: list[Timed] = list(zip(times, bodies, strict=True))
    for hole in draw.draw(st.sets(st.integers(0, count - 1), max_size=3)):
        messages[hole] = None
    cuts = sorted(draw.draw(st.sets(st.integers(1, count), max_size=3)) | {count})
    parts = [messages[a:b] for a, b in zip([0, *cuts], cuts, strict=False) if a < b]
    store = MemoryStore()
    view = put_queue(store, parts, minimum=draw.draw(st.integers(0, count - 1)))
    for time_ms in range(999, max(times) + 2):
        assert find(store, view, time_ms) == wanted(view, messages, time_ms, Boundary.LOWER)
        upper = find(store, view, time_ms, Boundary.UPPER)
        assert upper == wanted(view, messages, time_ms, Boundary.UPPER)


def test_in_great_disorder_a_message_that_is_late_enough_is_found():
    messages: list[Timed] = [(1000 + n, 60_000) for n in range(20)]
    messages += [(500 + n, 60_000) for n in range(40)]  # the clock was put back
    store = MemoryStore()
    view = put_queue(store, [messages])
    for time_ms in range(500, 1020):
        found = messages[find(store, view, time_ms)]
        assert found is not None
        assert found[0] >= time_ms


def test_a_range_of_offsets_bounds_the_search():
    messages: list[Timed] = [(1000 + n, 60_000) for n in range(20)]
    store = MemoryStore()
    view = put_queue(store, [messages[:12], messages[12:]])
    ranges = StoreRanges(store, PREFIX)
    assert find_by_time(view, ranges, 1015, high=9) is None
    assert find_by_time(view, ranges, 900, Boundary.UPPER, low=3) is None
    assert find_by_time(view, ranges, 1003, high=9) == 3
    assert find_by_time(view, ranges, 1003, low=7) == 7
    assert find_by_time(view, ranges, 1003, Boundary.UPPER, low=7) is None
    assert find_by_time(view, ranges, 1015, Boundary.UPPER, high=9) == 8


def test_a_queue_without_messages_gives_its_ends():
    store = MemoryStore()
    view = put_queue(store, [[None, None]], first=4)
    assert find(store, view, 0) == 6
    assert find(store, view, 5, Boundary.UPPER) == 4


def test_damage_is_told_and_not_searched_over():
    store = MemoryStore()
    view = put_queue(store, [[(1000 + n, 60_000) for n in range(40)]])
    key = PREFIX + view.parts[0].log.key
    raw = bytearray(store.get(key))
    for position in range(0, len(raw), 1000):
        raw[position] ^= 1
    store.delete(key)
    store.put_if_absent(key, bytes(raw))
    with pytest.raises(DataError):
        find(store, view, 1020)


# -- requests -------------------------------------------------------------------------------------


def thousand_segments(
    body: int, size_bytes: int
) -> tuple[MemoryStore, IncarnationView, list[Timed]]:
    """1,000 segments, one of which is a merged part of this size; its times rise every third message."""
    store = MemoryStore()
    count = size_bytes // (body + 150)
    big: list[Timed] = [(2_000_000 + n // 3, body) for n in range(count)]
    small = [[(1_000_000 + 10 * n, 10), (1_000_000 + 10 * n + 5, 10)] for n in range(499)]
    later = [[(9_000_000 + 10 * n, 10), (9_000_000 + 10 * n + 5, 10)] for n in range(500)]
    view = put_queue(store, [*small, big, *later])
    return store, view, big


@pytest.mark.parametrize("body", [600, 20_000, 1_500_000])
@pytest.mark.parametrize("size_bytes", [4 * MIB, 32 * MIB])
def test_1000_segments_cost_at_most_12_small_requests(body: int, size_bytes: int):
    store, view, big = thousand_segments(body, size_bytes)
    rng = random.Random(4)
    last = len(big) - 1
    for n in {0, 1, min(3, last), last - 1, last, *(rng.randrange(len(big)) for _ in range(12))}:
        one = big[n]
        assert one is not None
        for boundary in Boundary:
            meter = MeteredStore(store)
            found = find_by_time(view, StoreRanges(meter, PREFIX), one[0], boundary)
            first = 998 + n // 3 * 3
            assert found == (first if boundary is Boundary.LOWER else min(first + 2, 998 + last))
            said = meter.snapshot()
            assert set(said.kinds) <= {"get"}
            assert said.requests <= REQUESTS_MAX, (n, boundary)
            index_bytes = 20 * len(big)
            assert said.bytes_down <= index_bytes + said.requests * SMALL_BYTES


def test_between_parts_nothing_is_read_at_all():
    store, view, _ = thousand_segments(600, MIB)
    meter = MeteredStore(store)
    ranges = StoreRanges(meter, PREFIX)
    assert find_by_time(view, ranges, 0) == 0
    assert find_by_time(view, ranges, 1_500_000) == 998
    assert find_by_time(view, ranges, 1_000_000 + 10 * 77) == 154
    assert find_by_time(view, ranges, 99_000_000) is None
    assert not meter.snapshot().requests


def test_a_small_section_takes_one_request():
    store = MemoryStore()
    view = put_queue(store, [[(1000 + n, 3000) for n in range(70)]])
    part = view.parts[0]
    assert UNIT_BYTES < part.log_bytes < part.section.size_bytes <= WHOLE_AT_ONCE_BYTES
    for time_ms in (1001, 1035, 1069):
        meter = MeteredStore(store)
        assert find_by_time(view, StoreRanges(meter, PREFIX), time_ms) == time_ms - 1000
        said = meter.snapshot()
        assert (said.requests, said.bytes_down) == (1, part.section.table_at)
