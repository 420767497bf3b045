"""Entries: fixed bytes, and no flipped bit that goes unseen."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.errors import DataError, OtherVersionError
from tiered.journal.entry import (
    Entry,
    checksum,
    decode_entry,
    encode_entry,
    json_members,
    json_text,
    open_text,
    seal_text,
)

ENTRY = Entry(
    17, 3, "0badcafe", 1_700_000_000_000, [{"do": "say", "topic": "\udcff", "value": 1}], 305419896
)
LINE = (
    b'{"actions":[{"do":"say","topic":"\\udcff","value":1}],"epoch":3,"format":1,"number":17,'
    b'"previous":305419896,"time_ms":1700000000000,"writer":"0badcafe"}'
)


def test_format_version_1_has_these_bytes():
    data = encode_entry(ENTRY)
    assert data == LINE + b"\n%08x\n" % zlib.crc32(LINE)
    assert data.endswith(b"\n19e3b909\n")
    assert checksum(data) == zlib.crc32(LINE)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def members(text: str) -> dict[str, Any]:
    return {
        name: list(one) if isinstance(one, Iterator) else one
        for name, one in json_members(text, "b")
    }


@given(st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1), st.data())
def test_members_of_an_object_come_one_by_one(value: dict[str, Any], draw: st.DataObject):
    text = json_text(value).decode()
    assert (members(text), [*members(text)]) == (value, sorted(value))
    cut = text[: draw.draw(st.integers(0, len(text) - 1))]
    for bad in (cut, text + "x", text + text, "[" + text[1:], " " + text):
        with pytest.raises(ValueError, match=r"there is no|Expecting|Unterminated|Invalid"):
            members(bad)


ENTRIES = st.builds(
    Entry,
    st.integers(1, 10**12),
    st.integers(0, 10**9),
    st.text("0123456789abcdef", min_size=8, max_size=8),
    st.integers(0, 2**42),
    st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=3),
    st.integers(0, 2**32 - 1),
)


@given(ENTRIES)
def test_what_is_encoded_is_decoded(entry: Entry):
    assert decode_entry(encode_entry(entry), where="k") == entry


@given(ENTRIES, st.data())
def test_one_flipped_bit_anywhere_is_found(entry: Entry, draw: st.DataObject):
    data = bytearray(encode_entry(entry))
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DataError):
        decode_entry(bytes(data), where="k")


def test_a_cut_entry_is_damage_wherever_it_is_cut():
    data = encode_entry(ENTRY)
    for size in range(len(data)):
        with pytest.raises(DataError):
            decode_entry(data[:size], where="k")
    with pytest.raises(DataError):
        decode_entry(data + b"x", where="k")


@pytest.mark.parametrize("number", [2, 0, "1", None, [], True, 1.0])
def test_another_format_is_not_damage(number: Any):
    data = seal_text({**json.loads(LINE), "format": number})
    with pytest.raises(OtherVersionError, match="format"):
        decode_entry(data, where="k")


def test_a_format_that_the_caller_knows_is_read():
    data = seal_text({**json.loads(LINE), "format": 2})
    assert open_text(data, where="k", versions=(1, 2))["number"] == 17


@pytest.mark.parametrize("missing", ["number", "epoch", "writer", "time_ms", "actions", "previous"])
def test_a_whole_document_of_another_form_is_another_version_s(missing: str):
    document = json.loads(LINE)
    before = document.pop(missing)
    with pytest.raises(OtherVersionError, match=missing):
        decode_entry(seal_text(document), where="k")
    for wrong in ([before], {}, None, 1.5):
        with pytest.raises(OtherVersionError, match="another form"):
            decode_entry(seal_text({**document, missing: wrong}), where="k")


@pytest.mark.parametrize("line", [b"[]", b"3", b"{", b"", b"\xff"])
def test_whole_text_that_is_no_document_is_another_version_s(line: bytes):
    with pytest.raises(OtherVersionError):
        open_text(line + b"\n%08x\n" % zlib.crc32(line), where="k")


@pytest.mark.parametrize(
    ("where", "option"), [("c/b/journal/07", ""), ("c/b/timer/journal/07", " --timers")]
)
def test_damage_of_a_journal_advises_the_command_that_looks_at_it(where: str, option: str):
    with pytest.raises(DataError) as caught:
        open_text(b"{}\n00000000\n", where=where)
    assert caught.value.do == f"run `tiered verify{option}` to see what is damaged"
