"""Properties as arrays say what the parser of one message's properties says."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiered.api.arrow as pairs
from tiered.api.arrow import Pairs
from tiered.format.properties import CLIENT_ONLY, parse_properties

NAME = st.sampled_from(["TAGS", "KEYS", "a", "ü", "MIN_OFFSET"]) | st.text("xy", max_size=3)
PAIR = st.builds(
    lambda name, value: f"{name}\x01{value}\x02".encode(), NAME, st.text("v \x01", max_size=3)
)
RAW = st.lists(PAIR, max_size=4).map(b"".join) | st.text("a\x01\x02", max_size=8).map(str.encode)


def told(raw: list[bytes]) -> list[dict[str, str]] | None:
    found = Pairs.parse(pa, pa.array([b"before", *raw], pa.binary()).slice(1))
    if found is None:
        return None
    maps = [dict(row) for row in found.map(pa).to_pylist()]
    for name in ("TAGS", "ü", "missing"):
        assert found.find(pa, name).to_pylist() == [row.get(name) for row in maps]
    return maps


def parsed(raw: list[bytes]) -> list[dict[str, str]]:
    every = map(parse_properties, raw)
    return [{n: v for n, v in one.items() if n not in CLIENT_ONLY} for one in every]


@given(st.lists(RAW, min_size=1, max_size=6))
def test_all_ways_agree(raw: list[bytes]) -> None:
    found = told(raw)
    if found is None:  # a name that comes twice: who asks takes the parser
        names = [[p.split(b"\x01")[0] for p in one.split(b"\x02")] for one in raw]
        assert any(len(set(row)) < len(row) for row in names)
    else:
        assert found == parsed(raw)
        assert [list(row) for row in found] == [list(row) for row in parsed(raw)]


@pytest.mark.parametrize("limit", [1 << 22, 0])
def test_names_that_come_twice_and_bytes_that_are_no_text(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "_COUNTED_MAX", limit)
    twice, once = b"a\x01x\x02a\x01y\x02", b"a\x01x\x02b\x01y\x02"
    assert told([once, twice]) is None
    assert told([once, once]) == parsed([once, once])
    assert told([b"a\x01\xff\x02"]) is None
    assert told([b"", b""]) == [{}, {}]
