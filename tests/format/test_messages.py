"""Messages as clients get them: compression, inner batches, and every captured message field by field."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support import captures
from support.examples import INT32, PROPERTIES, make, records
from zlib_ng import zlib_ng

from tiered.cli.output import json_bytes
from tiered.errors import DataError
from tiered.format import sysflag
from tiered.format.message_forms import (
    InnerMessage,
    decode_inner_messages,
    decompress_body,
    encode_inner_messages,
    message_json,
    message_line,
    split_batch,
)
from tiered.format.properties import CLIENT_ONLY, join_properties
from tiered.format.record import Record, decode_record, encode_record, offset_msg_id

GOLDEN = Path(__file__).parent.parent / "data" / "format" / "records.json"
KINDS = (sysflag.COMPRESSION_ZLIB, sysflag.COMPRESSION_LZ4, sysflag.COMPRESSION_ZSTD)
INNER = st.builds(InnerMessage, INT32, st.binary(max_size=40), PROPERTIES.map(join_properties))
ONLY_IN_DUMPS = ("type", "system", "listed_topic", "listed_queue_id", "listed_offset")


def compress_body(body: bytes, compression: int) -> tuple[bytes, int]:
    """Compress a body as a producer does; the body to store, and the bits that its ``sysFlag`` gets."""
    if compression == sysflag.COMPRESSION_ZLIB:
        packed = zlib_ng.compress(body, 5)
    elif compression == sysflag.COMPRESSION_LZ4:
        packed = lz4.frame.compress(body)
    elif compression == sysflag.COMPRESSION_ZSTD:
        packed = zstandard.ZstdCompressor(level=3).compress(body)
    else:
        raise ValueError(f"no compression has the number {compression:#x}")
    return packed, sysflag.COMPRESSED | compression


def without_dump_fields(line: dict) -> dict:
    return {name: value for name, value in line.items() if name not in ONLY_IN_DUMPS}


@settings(deadline=None)
@given(st.binary(max_size=5000), st.sampled_from(KINDS))
def test_bodies_round_trip(body, kind):
    packed, flag = compress_body(body, kind)
    assert decompress_body(packed, flag) == body
    assert decompress_body(packed, flag, bytes_max=len(body)) == body
    assert decompress_body(packed, 0) == packed
    if body:
        with pytest.raises(DataError, match="more than is allowed"):
            decompress_body(packed, flag, bytes_max=len(body) - 1)


def test_old_producers_name_no_compression():
    assert decompress_body(zlib_ng.compress(b"abc"), sysflag.COMPRESSED) == b"abc"


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300), st.sampled_from(KINDS), st.data())
def test_damaged_bodies_are_data_errors(body, kind, data):
    packed, flag = compress_body(body, kind)
    with pytest.raises(DataError):
        decompress_body(packed[: data.draw(st.integers(0, len(packed) - 1))], flag)
    with suppress(DataError):
        decompress_body(data.draw(st.binary(max_size=60)), flag)


@pytest.mark.parametrize("kind", [0x400, 0x700])
def test_unknown_compression(kind):
    with pytest.raises(DataError, match="unknown way"):
        decompress_body(b"abc", sysflag.COMPRESSED | kind)
    with pytest.raises(ValueError):
        compress_body(b"abc", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_is_stopped(kind):
    packed, flag = compress_body(bytes(200_000_000), kind)
    with pytest.raises(DataError, match="more than is allowed"):
        decompress_body(packed, flag, bytes_max=1 << 20)


@pytest.mark.parametrize(
    ("kind", "pack"),
    [
        (sysflag.COMPRESSION_LZ4, lz4.frame.compress),
        (sysflag.COMPRESSION_ZSTD, zstandard.ZstdCompressor().compress),
    ],
)
def test_frames_in_a_row_are_one_body(kind, pack):
    flag = sysflag.COMPRESSED | kind
    packed = pack(b"abc" * 999) + pack(b"def")
    assert decompress_body(packed + b"junk", flag) == b"abc" * 999 + b"def"
    with pytest.raises(DataError):
        decompress_body(packed[:-2], flag)


@settings(deadline=None)
@given(st.lists(INNER, max_size=6), st.sampled_from((0, *KINDS)))
def test_inner_batches(messages, kind):
    body = encode_inner_messages(messages)
    assert list(decode_inner_messages(body)) == messages
    flag = sysflag.INNER_BATCH | sysflag.NEED_UNWRAP
    if kind:
        body, bits = compress_body(body, kind)
        flag |= bits
    record = make(body=body, sys_flag=flag, queue_offset=70, reconsume_times=2)
    split = split_batch(record)
    assert [(one.flag, one.body, one.properties_raw) for one in split] == [
        (one.flag, one.body, one.properties_raw) for one in messages
    ]
    assert [one.queue_offset for one in split] == list(range(70, 70 + len(messages)))
    for one in split:
        assert one.sys_flag == flag & ~sysflag.COMPRESSED
        assert (one.body_crc, one.reconsume_times, one.size) == (0, 0, record.size)
    rows = messages_json(record, tag_code=0, log_offset=5, raw_body=False)
    assert [row["stored_sys_flag"] for row in rows] == [flag] * len(messages)


def test_a_plain_record_is_its_own_message():
    record = make()
    assert split_batch(record) == [record]


@settings(deadline=None)
@given(st.lists(INNER, min_size=1, max_size=3), st.data())
def test_cut_inner_batches_are_data_errors(messages, data):
    body = encode_inner_messages(messages)
    ends = {len(encode_inner_messages(messages[:n])) for n in range(len(messages) + 1)}
    cut = data.draw(st.integers(0, len(body)).filter(lambda length: length not in ends))
    with pytest.raises(DataError):
        split_batch(make(body=body[:cut], sys_flag=sysflag.INNER_BATCH))


@settings(deadline=None)
@given(st.binary(max_size=120))
def test_random_inner_batches(body):
    try:
        messages = list(decode_inner_messages(body))
    except DataError:
        return
    assert len(encode_inner_messages(messages)) == len(body)


@pytest.mark.parametrize("at", [16, 20 + 3])
def test_negative_inner_sizes(at):
    body = bytearray(encode_inner_messages([InnerMessage(0, b"abc", b"p")]))
    body[at] = 0xFF
    with pytest.raises(DataError):
        list(decode_inner_messages(bytes(body)))


def test_raw_bodies_keep_their_bit():
    packed, flag = compress_body(b"abc" * 100, sysflag.COMPRESSION_ZSTD)
    record = make(body=packed, sys_flag=flag)
    raw = message_json(record, tag_code=0, log_offset=None, raw_body=True)
    assert b64decode(raw["body_base64"]) == packed
    assert raw["sys_flag"] == raw["stored_sys_flag"] == flag
    plain = message_json(record, tag_code=0, log_offset=None, raw_body=False)
    assert b64decode(plain["body_base64"]) == b"abc" * 100
    assert (plain["sys_flag"], plain["stored_sys_flag"]) == (sysflag.COMPRESSION_ZSTD, flag)


def test_fields_and_ids():
    raw = join_properties({"TAGS": "t", "KEYS": "a b", "MIN_OFFSET": "0", "x": "y"})
    row = message_json(make(properties_raw=raw), tag_code=116, log_offset=9, raw_body=False)
    assert ", ".join(row) == (
        "topic, queue_id, queue_offset, store_timestamp_ms, born_timestamp_ms, born_host, store_host,"
        " tags, keys, properties, msg_id, sys_flag, stored_sys_flag, flag, body_crc, reconsume_times,"
        " prepared_transaction_offset, size, tag_hash, physical_offset, offset_msg_id, body_base64,"
        " log_offset"
    )
    assert row["properties"] == {"KEYS": "a b", "TAGS": "t", "x": "y"}
    assert row["msg_id"] == row["offset_msg_id"] == "0A00000200002A9F0000000000000000"
    assert (row["tags"], row["keys"], row["tag_hash"], row["log_offset"]) == ("t", "a b", 116, 9)


def fields_of(
    record: Record,
    *,
    tag_code: int,
    log_offset: int | None,
    raw_body: bool,
    stored_sys_flag: int | None = None,
) -> dict[str, Any]:
    """The fields of a message, value by value: what its line has to say."""
    plain = record.body if raw_body else decompress_body(record.body, record.sys_flag)
    properties = record.properties
    record_id = offset_msg_id(record.store_host, record.physical_offset)
    return {
        "topic": record.topic,
        "queue_id": record.queue_id,
        "queue_offset": record.queue_offset,
        "store_timestamp_ms": record.store_timestamp_ms,
        "born_timestamp_ms": record.born_timestamp_ms,
        "born_host": record.born_host,
        "store_host": record.store_host,
        "tags": properties.get("TAGS"),
        "keys": properties.get("KEYS"),
        "properties": {
            name: value for name, value in sorted(properties.items()) if name not in CLIENT_ONLY
        },
        "msg_id": properties.get("UNIQ_KEY") or record_id,
        "sys_flag": record.sys_flag if raw_body else record.sys_flag & ~sysflag.COMPRESSED,
        "stored_sys_flag": record.sys_flag if stored_sys_flag is None else stored_sys_flag,
        "flag": record.flag,
        "body_crc": record.body_crc,
        "reconsume_times": record.reconsume_times,
        "prepared_transaction_offset": record.prepared_transaction_offset,
        "size": record.size,
        "tag_hash": tag_code,
        "physical_offset": record.physical_offset,
        # Java gives the messages of an inner batch no id of their own place: they share one.
        "offset_msg_id": None if record.sys_flag & sysflag.INNER_BATCH else record_id,
        "body_base64": b64encode(plain).decode("ascii"),
        "log_offset": log_offset,
    }


def messages_json(record: Record, **how: Any) -> list[dict]:
    """Of all messages of a record."""
    return [
        message_json(one, stored_sys_flag=record.sys_flag, **how) for one in split_batch(record)
    ]


def assert_line_is_object(record, **how: Any):
    line = message_line(record, **how)
    assert line == json_bytes(fields_of(record, **how))
    assert json.loads(line) == message_json(record, **how)
    assert b"\n" not in line


@settings(deadline=None)
@given(
    records(),
    st.integers(-(2**63), 2**63 - 1),
    st.none() | st.integers(0, 2**63),
    st.booleans(),
    st.none() | INT32,
)
def test_the_line_of_a_message_is_its_object_encoded(
    record, tag_code, log_offset, raw_body, stored_sys_flag
):
    assert_line_is_object(
        replace(record, sys_flag=record.sys_flag & ~sysflag.COMPRESSED),
        tag_code=tag_code,
        log_offset=log_offset,
        raw_body=raw_body,
        stored_sys_flag=stored_sys_flag,
    )


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"TAGS": 'a"b\\', "KEYS": "\x00\x1f\x7f\u2028\N{GRINNING FACE}", "UNIQ_KEY": '"'},
        {"MIN_OFFSET": "1", "z": "1", "ä": "2", "A": "3", "MAX_OFFSET": "4"},
    ],
)
@pytest.mark.parametrize("topic", ["plain", "Größe", 'a"b\\\n', "\udcff"])
@pytest.mark.parametrize("kind", [0, *KINDS])
def test_lines_escape_what_objects_escape(properties, topic, kind):
    body, flag = compress_body(b"body" * 99, kind) if kind else (b"body", 0)
    record = make(topic=topic, properties_raw=join_properties(properties), body=body, sys_flag=flag)
    for raw_body in (False, True):
        assert_line_is_object(record, tag_code=1, log_offset=2, raw_body=raw_body)


def golden() -> list[dict]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", golden(), ids=lambda case: case["kind"])
def test_golden_records(case):
    """One record of each kind from real stores, with what Java says of it."""
    raw = b64decode(case["record_base64"])
    record = decode_record(raw, physical_offset=case["messages"][0]["physical_offset"])
    assert encode_record(record) == raw
    rows = messages_json(
        record, tag_code=case["messages"][0]["tag_hash"], log_offset=None, raw_body=False
    )
    for row, expected in zip(rows, case["messages"], strict=True):
        assert row == without_dump_fields(expected) | {"log_offset": None}


@pytest.mark.parametrize("name", captures.NAMES)
def test_every_captured_message(name):
    """What Java dumped of each message is what we make of the raw record, field by field."""
    logs = captures.log_files(name)
    file_bytes = len(next(iter(logs.values())))
    seen: dict[int, tuple[int, list[dict]]] = {}
    messages = captures.dump(name, "message")
    for expected in messages:
        place = expected["physical_offset"]
        if place not in seen:
            base = place - place % file_bytes
            record = decode_record(logs[base], place - base, physical_offset=place)
            rows = messages_json(
                record, tag_code=expected["tag_hash"], log_offset=None, raw_body=False
            )
            seen[place] = record.queue_offset, rows
        first, rows = seen[place]
        row = rows[expected["queue_offset"] - first]
        assert row == without_dump_fields(expected) | {"log_offset": None}
    assert len(messages) >= 390


def test_compacted_messages():
    """The compaction log holds the same records, renumbered."""
    name = "s07-compaction"
    logs = captures.files(name, "compaction/compactionLog/")
    expected = captures.dump(name, "compacted")
    found = 0
    for line in expected:
        for data in logs.values():
            at = data.find(line["properties"]["UNIQ_KEY"].encode())
            if at < 0:
                continue
            body = b64decode(line["body_base64"])
            start = data.rindex(bytes.fromhex("daa320a7"), 0, at) - 4
            record = decode_record(data, start)
            assert (record.body, record.queue_offset) == (body, line["queue_offset"])
            row = message_json(record, tag_code=0, log_offset=None, raw_body=False)
            differing = {key for key in row if key in line and row[key] != line[key]}
            assert differing <= {"physical_offset", "offset_msg_id", "tag_hash"}
            found += 1
            break
    assert found == len(expected) == 89


def test_a_body_that_cannot_be_unpacked_is_an_error_and_can_be_had_raw():
    record = make(body=b"no zlib", sys_flag=sysflag.COMPRESSED)
    with pytest.raises(DataError):
        message_json(record, tag_code=0, log_offset=None, raw_body=False)
    with pytest.raises(DataError):
        message_line(record, tag_code=0, log_offset=None, raw_body=False)
    raw = message_json(replace(record), tag_code=0, log_offset=None, raw_body=True)
    assert raw["body_base64"] == b64encode(b"no zlib").decode()
