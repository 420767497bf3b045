"""Properties of many records at once are those of each one by itself, whatever lies there."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tiered.format.properties import (
    java_hash,
    java_text,
    parse_properties,
    split_keys,
    tag_hash,
    value_of,
)
from tiered.format.property_columns import PropertyColumns

NAMES = st.sampled_from([b"KEYS", b"UNIQ_KEY", b"TAGS", b"MYTAGS", b"WAIT", b"TAGSX", b"T"])
LONG = b"A_NAME_OF_24_BYTES______"
VALUES = st.sampled_from(
    [
        b"",
        b"a",
        b"TagA",
        b"TAGS",
        b" two  keys",
        b"12",
        "\u4e2d".encode(),
        b"x\x01y",
        b"\xed\xa9\xa9",
        b"\0",
    ]
)
PAIRS = st.builds(
    lambda name, value: name + b"\x01" + value + b"\x02", NAMES | st.just(LONG), VALUES
)
SCRAPS = st.sampled_from([b"TAGS", b"KEYS", b"\x01", b"\x02", b"x", b"\xff", b"\0"])
RAW = st.lists(PAIRS | SCRAPS, max_size=6).map(b"".join) | st.binary(max_size=30)
ASKED = (b"TAGS", b"KEYS", b"UNIQ_KEY", b"T", LONG)


def columns_of(raws: list[bytes], between: bytes = b"\x02TAGS\x01no\x02") -> PropertyColumns:
    """Of properties that lie in one buffer, with something between that is not theirs."""
    sizes = np.array([len(raw) for raw in raws], np.int32)
    starts = (sizes.astype(np.int64) + len(between)).cumsum() - sizes
    return PropertyColumns(between.join([b"", *raws]), starts, sizes)


def plain(raw: bytes, name: bytes) -> bytes:
    """By the definition: split, and the last that is not empty counts."""
    pairs = [pair.partition(b"\x01") for pair in raw.split(b"\x02")]
    return next((value for key, _, value in reversed(pairs) if key == name and value), b"")


def check(raws: list[bytes]) -> None:
    columns = columns_of(raws)
    for name in ASKED:
        wanted = [plain(raw, name) for raw in raws]
        assert columns.raw(name) == wanted
        assert columns.has(name).tolist() == [bool(value) for value in wanted]
        digits = [int(value) if value.isdigit() and len(value) <= 16 else -7 for value in wanted]
        assert columns.numbers(name, -7).tolist() == digits
    tags = [tag_hash(java_text(plain(raw, b"TAGS"))) for raw in raws]
    assert columns.tag_codes().tolist() == tags
    found: list[list[bytes]] = [[] for _ in raws]
    for texts in columns.lookup_keys():
        for at, start, size in zip(*(one.tolist() for one in texts), strict=True):
            found[at].append(columns.text[start : start + size].tobytes())
    for raw, keys in zip(raws, found, strict=True):
        words = [plain(raw, b"UNIQ_KEY"), *plain(raw, b"KEYS").split(b" ")]
        assert keys == [word for word in words if word]


@given(RAW, NAMES | st.just(LONG))
@example(b"TAGS\x01a\x02TAGS\x01", b"TAGS")
@example(b"KEYS\x01TAGS\x01a", b"TAGS")
def test_one_value_is_the_parsers(raw: bytes, name: bytes):
    assert value_of(raw, name) == plain(raw, name)
    assert java_text(value_of(raw, name)) == parse_properties(raw).get(name.decode(), "")


@settings(deadline=None)
@given(st.lists(RAW, max_size=8), st.integers(0, 2**32), st.integers(0, 300))
def test_values_of_many_are_those_of_each(raws: list[bytes], seed: int, more: int):
    """Few, or many of few lengths, in any order: alike and unlike."""
    check(raws + (random.Random(seed).choices(raws, k=more) if raws else []))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([b"TAGS", b"KEYS", b"XXXX"]), min_size=1, max_size=4), st.data())
def test_records_of_one_shape_may_have_other_names(names: list[bytes], data: st.DataObject):
    """Separators in the same columns, names and values of their own."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    rows = [
        b"".join(b"%s\x01%04d\x02" % (rng.choice(names), rng.randrange(10_000)) for _ in names)
        for _ in range(200)
    ]
    columns = columns_of(rows)
    assert columns._alike
    assert not columns._others
    check(rows)


def test_records_that_are_all_unlike():
    check(
        [
            b"KEYS\x01%d\x02TAGS\x01%d\x02WAIT\x01%d\x02" % (10**n, n, 10 ** (n % 7))
            for n in range(300)
        ]
    )
    check([b"TAGS\x01zz\x02" + b"x" * n for n in range(300)])


@pytest.mark.parametrize("count", [1, 40])
def test_hashes_begin_with_what_stands_before(count: int):
    texts = ["a", "\u00e4b", "x" * 200, "\U0001f600"][:4] * count
    columns = columns_of([f"KEYS\x01{text}".encode() for text in texts])
    lead = np.full(len(texts), java_hash("t#") & 0xFFFF_FFFF, np.uint32)
    found = columns.java_hashes(*columns.find(b"KEYS"), lead)
    assert found.tolist() == [java_hash(f"t#{text}") for text in texts]
    assert split_keys(" a  b ") == ["a", "b"]
