"""Charts: what is drawn stands where it belongs, nothing rare is lost, and there is never more than fits."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.errors import InvalidError
from tiered.web.browse import BODY_SHOWN, shown_body
from tiered.web.pages import (
    NARROW,
    WIDTH,
    Cut,
    MapSpan,
    PageQuery,
    histogram,
    line,
    segment_bars,
    thinned,
)

SPANS = st.lists(
    st.tuples(st.integers(1, 10**6), st.sampled_from(["sealed", "open", "gap"])), max_size=3000
)


@given(SPANS)
def test_a_map_covers_what_there_is_and_fits(rows: list[tuple[int, str]]):
    at, spans = 0, []
    for size, kind in rows:
        spans.append(MapSpan(at, at + size, kind))
        at += size
    bars = segment_bars(spans, 0, at)
    assert len(bars) <= WIDTH + 1
    for bar in bars:
        x, width = float(bar.x), float(bar.width)
        assert x >= 0
        assert x + width <= WIDTH + 0.2
        assert width >= NARROW - 0.1
    if len(spans) <= WIDTH:
        assert {bar.kind for bar in bars} == {kind for _, kind in rows}
    if "gap" in {kind for _, kind in rows}:
        assert "gap" in {bar.kind for bar in bars}


def test_one_gap_among_a_million_offsets_is_seen():
    spans = [MapSpan(0, 500_000, "sealed"), MapSpan(500_000, 500_001, "gap")]
    bars = segment_bars([*spans, MapSpan(500_001, 1_000_000, "sealed")], 0, 1_000_000)
    assert [(bar.kind, bar.width) for bar in bars][1] == ("gap", "2")
    assert bars[1].title == "gap: [500,000, 500,001)"


def test_neighbours_too_narrow_to_be_told_apart_are_one():
    spans = [MapSpan(at, at + 1, "sealed") for at in range(100_000)]
    bars = segment_bars(spans, 0, 100_000)
    assert len(bars) <= WIDTH
    assert bars[0].title.endswith("times sealed: [0, 199)")


@given(st.lists(st.integers(0, 10**9), max_size=400))
def test_bars_are_as_high_as_they_are_many(counts: list[int]):
    bars = histogram([(str(n), count) for n, count in enumerate(counts)], height=100)
    assert len(bars) == len(counts)
    for bar, count in zip(bars, counts, strict=True):
        assert abs(float(bar.y) + float(bar.height) - 100) < 0.2
        assert (float(bar.height) > 0) == (count > 0)
        assert bar.title.endswith(f": {count:,}")


@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(0, 1e9)), max_size=1000))
def test_a_curve_keeps_its_highest_point(points: list[tuple[int, float]]):
    points.sort()
    few = thinned(points, 50)
    assert len(few) <= 50
    assert max((v for _, v in few), default=0) == max((v for _, v in points), default=0)
    places = [tuple(map(float, one.split(","))) for one in line(few).split()]
    assert all(0 <= x <= WIDTH and 0 <= y <= 120 for x, y in places)


@given(st.integers(0, 1000), st.integers(0, 50))
def test_a_page_of_a_table_is_a_part_of_it(total: int, page: int):
    cut = Cut.of(range(total), page, 7)
    assert 0 <= cut.page < cut.pages
    pages = [row for at in range(cut.pages) for row in Cut.of(range(total), at, 7).rows]
    assert pages == list(range(total))


@given(st.text(max_size=40))
def test_a_number_is_one_or_is_refused(text: str):
    plain = text.strip().replace(",", "")
    if plain and not re.fullmatch("[0-9]{1,18}", plain):
        with pytest.raises(InvalidError, match="not a number"):
            PageQuery({"n": text}).number("n")
    else:
        assert PageQuery({"n": text}).number("n") == (int(plain) if plain else None)


@given(st.binary(max_size=200))
def test_any_body_is_shown(body: bytes):
    shown = shown_body(body)
    assert shown.size_bytes == len(body)
    assert shown.form in {"JSON", "text", "bytes"}


def test_a_long_body_is_cut_at_a_character():
    shown = shown_body("ä".encode() * BODY_SHOWN)
    assert (shown.form, shown.is_cut) == ("text", True)
    assert set("".join(shown.lines)) == {"ä"}
    assert shown_body(b'{"a": [1, 2]}').lines == ("{", '  "a": [', "    1,", "    2", "  ]", "}")
    assert shown_body(b"[" * 5000).form == "text"
    assert shown_body(b"\xff" * 9000).is_cut
