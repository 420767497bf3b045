"""Flat files: where bytes lie, over parts, segments and parts of no bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiered.log.flat_file import Extent, TieredFlatFile, load_segment
from tiered.log.state import ObjectRange


def place(name: str, size: int, start: int = 0) -> ObjectRange:
    return ObjectRange(name, start, start + size, start + size + 5, 60, 0)


SIZES = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=5)


@given(SIZES, st.integers(0, 100), st.data())
def test_extents_of_any_range_are_its_bytes_in_order(
    sizes: list[list[int]], base: int, draw: st.DataObject
):
    flat = TieredFlatFile(base)
    at, expected = base, []
    for segment_number, row in enumerate(sizes):
        places = [place(f"{segment_number}.{n}", size, n) for n, size in enumerate(row)]
        flat.segments.append(load_segment(at, 0, sealed=True, places=places))
        expected += [(p.key, p.start + n) for p in places for n in range(p.size_bytes)]
        at += sum(row)
    assert (flat.append_offset, flat.commit_offset) == (at, at)
    if at > base:
        start = draw.draw(st.integers(base, at - 1))
        end = draw.draw(st.integers(start + 1, at))
        found = flat.extents(start, end)
        assert all(extent.start < extent.end for extent in found)
        bytes_found = [(e.place.key, n) for e in found for n in range(e.start, e.end)]
        assert bytes_found == expected[start - base : end - base]


def test_append_runs_ahead_of_commit():
    flat = TieredFlatFile(100)
    assert (flat.append_offset, flat.commit_offset) == (100, 100)
    segment = flat.open_segment(0)
    segment.append(50)
    assert (flat.append_offset, flat.commit_offset) == (150, 100)
    segment.commit(place("a", 30))
    assert (flat.append_offset, flat.commit_offset) == (150, 130)
    segment.append(-20)  # a switch takes back what failed
    assert flat.append_offset == 130
    later = flat.open_segment(0)
    assert (segment.sealed, later.base_offset) == (True, 130)
    later.append(9)
    assert (flat.append_offset, flat.commit_offset) == (139, 130)
    later.commit(place("b", 9))
    assert flat.extents(125, 132) == [Extent(place("a", 30), 25, 30), Extent(place("b", 9), 0, 2)]
