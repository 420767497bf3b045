"""Selecting from batches: inner batches by inner message, holes never, damage is an error, nothing else is decoded."""

from __future__ import annotations

import numpy as np
import pytest
from support.filter_records import batch_of_properties

import fetcher.filters.batch as filter_batch
from fetcher.filters import compile_filter
from tiered.errors import DataError
from tiered.format.properties import tag_hash

RED, BLUE = b"TAGS\x01red\x02a\x011\x02", b"TAGS\x01blue\x02a\x012\x02"
KINDS = {"TAG": "red", "SQL92": "TAGS = 'red'"}


@pytest.mark.parametrize("kind", KINDS)
def test_inner_messages_count_one_by_one(kind):
    batch = batch_of_properties([RED, None, (BLUE, RED, b"", RED), BLUE, (RED,), None, RED])
    assert compile_filter(KINDS[kind], kind).select(batch).tolist() == [0, 3, 5, 7, 9]


def test_the_outer_properties_of_an_inner_batch_say_nothing():
    batch = batch_of_properties([(RED, b"b\x011\x02")])
    assert compile_filter("a = 'outer'", "SQL92").select(batch).tolist() == []
    assert compile_filter("a IS NULL", "SQL92").select(batch).tolist() == [1]


def test_equal_tag_codes_are_told_apart_by_text():
    assert tag_hash("Aa") == tag_hash("BB")
    batch = batch_of_properties([b"TAGS\x01Aa\x02", b"TAGS\x01BB\x02", b"TAGS\x01Aa"])
    wanted = compile_filter("Aa", "TAG")
    assert np.isin(batch.tag_codes, wanted.tag_codes).all()
    assert wanted.select(batch).tolist() == [0, 2]


def test_another_tag_code_is_not_even_looked_at(monkeypatch):
    looked = []
    made = filter_batch.PropertyColumns.of
    monkeypatch.setattr(
        filter_batch.PropertyColumns,
        "of",
        lambda block, at: looked.append(len(at)) or made(block, at),
    )
    batch = batch_of_properties([RED, BLUE, BLUE, RED])
    assert compile_filter("red", "TAG").select(batch).tolist() == [0, 3]
    assert looked == [2]


@pytest.mark.parametrize("expression", ["*", ""])
def test_all_tags_take_all_but_holes_and_decode_nothing(expression, monkeypatch):
    monkeypatch.setattr(filter_batch, "parse_records", None)
    batch = batch_of_properties([None, RED, b"", (BLUE, RED), None])
    assert compile_filter(expression, "TAG").select(batch).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(("text", "expected"), [("TRUE", [0, 2]), ("FALSE", []), ("NULL", [])])
def test_an_expression_without_properties(text, expected):
    batch = batch_of_properties([RED, None, BLUE])
    assert compile_filter(text, "SQL92").select(batch).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_and_one_of_holes(kind):
    made = compile_filter(KINDS[kind], kind)
    assert made.select(batch_of_properties([])).tolist() == []
    assert made.select(batch_of_properties([None, None])).tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_an_error(kind):
    batch = batch_of_properties([RED, RED])
    data = bytearray(batch.data)
    data[int(batch.positions[1]) + 4] ^= 0xFF  # the magic
    with pytest.raises(DataError, match="damaged"):
        compile_filter(KINDS[kind], kind).select(type(batch)(**fields(batch) | {"data": data}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_inner_batch_is_an_error(kind):
    batch = batch_of_properties([(RED, RED)])
    for at, what in ((0, "body"), (2, "fewer messages")):
        changed = fields(batch)
        if at:  # an index entry more than there are messages
            for name in ("positions", "sizes", "tag_codes"):
                changed[name] = np.append(changed[name], changed[name][:1])
        else:
            data = bytearray(batch.data)
            start = data.index(inner_size(RED))
            data[start : start + 4] = b"\x7f\xff\xff\xff"
            changed["data"] = data
        with pytest.raises(DataError):
            compile_filter(KINDS[kind], kind).select(type(batch)(**changed))
        assert what


def inner_size(raw: bytes) -> bytes:
    return (22 + len(raw)).to_bytes(4, "big")


def fields(batch):
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}
