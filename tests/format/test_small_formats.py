"""Properties, hosts, ids, tags, consume-queue items, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import captures
from support.examples import INT32, INT64, PROPERTIES

from tiered.format.broker_checkpoint import (
    CHECKPOINT_BYTES,
    Checkpoint,
    decode_checkpoint,
    encode_checkpoint,
)
from tiered.format.items import (
    BATCH_ITEM,
    BATCH_ITEM_BYTES,
    ITEM,
    ITEM_BYTES,
    decode_items,
    encode_items,
    fillers,
    is_batch,
    is_ext_address,
    is_filler,
    is_message,
)
from tiered.format.properties import (
    inner_count,
    java_hash,
    join_properties,
    parse_properties,
    split_keys,
    tag_hash,
)
from tiered.format.record import format_host, offset_msg_id, pack_host, parse_offset_msg_id


@settings(deadline=None)
@given(PROPERTIES)
def test_properties_round_trip(properties):
    assert parse_properties(join_properties(properties)) == properties
    assert parse_properties(join_properties(properties).removesuffix(b"\x02")) == properties


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", {}),
        (b"\x02\x02", {}),
        (b"a\x01b", {"a": "b"}),
        (b"a\x01\x02b\x01c\x02", {"b": "c"}),
        (b"\x01b\x02c\x01d\x02", {"c": "d"}),
        (b"word\x02a\x01b\x01c\x02", {"a": "b\x01c"}),
        (b"a\x01b\x02a\x01c\x02a\x01\x02", {"a": "c"}),
        (b"a\x01\xff\x02", {"a": "�"}),
    ],
)
def test_odd_properties(raw, expected):
    assert parse_properties(raw) == expected


@pytest.mark.parametrize("properties", [{"": "v"}, {"n": ""}, {"n\x01": "v"}, {"n": "v\x02"}])
def test_properties_that_cannot_be_stored(properties):
    with pytest.raises(ValueError):
        join_properties(properties)


def test_keys_and_counts():
    assert split_keys("a  b ") == ["a", "b"]
    assert split_keys(None) == []
    assert [
        inner_count({"INNER_NUM": text}) for text in ("10", "0", "-1", "x", "99999", "9" * 9)
    ] == [
        10,
        1,
        1,
        1,
        32767,
        1,
    ]
    assert inner_count({}) == 1


@settings(deadline=None)
@given(st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20))
def test_hosts_round_trip(packed):
    assert pack_host(format_host(packed)) == packed


def test_hosts_as_java_prints_them():
    packed = bytes.fromhex("20010db8000000000000000000070001") + (10911).to_bytes(4, "big")
    assert format_host(packed) == "[2001:db8:0:0:0:0:7:1]:10911"
    assert pack_host("[2001:db8::7:1]:10911") == packed


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.1", "10.0.0.1:", "10.0.0.1:x", "10.0.0:1", "[::g]:1", "10.0.0.1:4294967296"],
)
def test_no_hosts(text):
    with pytest.raises(ValueError):
        pack_host(text)
    with pytest.raises(ValueError):
        format_host(b"123456789")


@settings(deadline=None)
@given(st.sampled_from(["1.2.3.4:5", "[1:2:3:4:5:6:7:8]:9"]), INT64)
def test_ids_round_trip(host, offset):
    assert parse_offset_msg_id(offset_msg_id(host, offset)) == (host, offset)


@pytest.mark.parametrize("text", ["", "00", "0A" * 15, "xx" * 16, "0A " * 16])
def test_no_ids(text):
    with pytest.raises(ValueError):
        parse_offset_msg_id(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("TagA", 2598919),
        ("TagB", 2598920),
        ("TopicTest#k1", 2746024),
        ("TopicTest#key", 85128477),
        ("polygenelubricants", -(2**31)),
        ("", 0),
        ("🚀", 31 * 0xD83D + 0xDE80),
    ],
)
def test_java_hashes(text, value):
    assert java_hash(text) == value
    assert tag_hash(text) == value


def test_no_tag_has_no_hash():
    assert tag_hash(None) == tag_hash("") == 0


@settings(deadline=None)
@given(st.lists(st.tuples(INT64, INT32, INT64)))
def test_items_round_trip(rows):
    raw = encode_items(*(np.array([row[n] for row in rows], np.int64) for n in range(3)))
    assert len(raw) == ITEM_BYTES * len(rows)
    assert decode_items(raw + b"x" * 19).tolist() == rows


def test_item_vector_and_fillers():
    raw = bytes.fromhex("0000000000000000 0000007b 000000000027a807")
    assert encode_items([0], [123], [2598919]) == raw
    assert fillers(2) == bytes.fromhex("0000000000000000 7fffffff 0000000000000000") * 2
    items = decode_items(raw + fillers(1) + bytes(20) + encode_items([-1], [9], [0]))
    assert is_message(items).tolist() == [True, False, False, False]
    assert is_filler(items).tolist() == [False, True, False, False]


def test_ext_addresses():
    codes = np.array([-(2**63), -(2**31) - 1, -(2**31), 0, 2**40])
    assert is_ext_address(codes).tolist() == [True, True, False, False, False]


def test_item_sizes():
    assert (ITEM.itemsize, BATCH_ITEM.itemsize) == (ITEM_BYTES, BATCH_ITEM_BYTES)


def test_captured_batch_items():
    for path, data in captures.files("s11-lmq-batchcq", "batchconsumequeue/").items():
        items = decode_items(data, BATCH_ITEM)
        items = items[is_batch(items)]
        assert items["count"].sum() == 210
        bases = np.concatenate(([0], np.cumsum(items["count"])[:-1]))
        assert items["base_offset"].tolist() == bases.tolist(), path


@settings(deadline=None)
@given(st.builds(Checkpoint, INT64, INT64, INT64, INT64, INT64, INT64))
def test_checkpoint_round_trip(checkpoint):
    raw = encode_checkpoint(checkpoint)
    assert len(raw) == CHECKPOINT_BYTES
    assert decode_checkpoint(raw) == checkpoint


def test_a_short_checkpoint_is_read_as_zeros():
    assert decode_checkpoint(b"") == Checkpoint()
    assert decode_checkpoint(bytes(7) + b"\x05\x01") == Checkpoint(5, 1 << 56)


@pytest.mark.parametrize("name", captures.NAMES)
def test_captured_checkpoints(name):
    [raw] = captures.files(name, "checkpoint").values()
    checkpoint = decode_checkpoint(raw)
    assert encode_checkpoint(checkpoint) == raw
    if captures.dump(name, "store")[0]["clean"]:
        messages = captures.dump(name, "message")
        assert checkpoint.physical_timestamp_ms == max(m["store_timestamp_ms"] for m in messages)
