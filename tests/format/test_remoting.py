"""Frames of the remoting protocol: golden bytes, round trips, and bytes that are none."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiered.format.remoting import (
    ANSWER,
    FIELDS_MAX,
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    LANGUAGES,
    ONEWAY,
    Command,
    Form,
    FrameError,
    decode,
    encode,
    frame_size,
)

ASKED = {"topic": "T", "queueId": "0"}
BINARY = bytes.fromhex(
    "00000033 0100002f 001e 03 0191 00000001 00000000 00000000 0000001a"
    "0005 746f706963 00000001 54 0007 71756575654964 00000001 30"
)
JSON = bytes.fromhex("0000008e0000008a") + (
    b'{"code":30,"language":"PYTHON","version":401,"opaque":1,"flag":0,'
    b'"extFields":{"topic":"T","queueId":"0"},"serializeTypeCurrentRPC":"JSON"}'
)

INTS = st.integers(-(1 << 31), (1 << 31) - 1)
SHORTS = st.integers(-(1 << 15) + 1, (1 << 15) - 1)
COMMANDS = st.builds(
    Command,
    code=SHORTS,
    opaque=INTS,
    flag=INTS,
    remark=st.text(max_size=20),
    fields=st.dictionaries(st.text(max_size=9), st.text(max_size=20), max_size=5),
    body=st.binary(min_size=1, max_size=50).map(lambda data: (data,)) | st.just(()),
    language=st.sampled_from(LANGUAGES),
    version=SHORTS,
    form=st.sampled_from(Form),
)


def joined(command: Command) -> bytes:
    return b"".join(encode(command))


def whole(data: bytes) -> Command:
    """Decode a frame with its size."""
    assert frame_size(data[:4]) == len(data) - 4
    return decode(data[4:])


def framed(header: bytes, form: int = 0, body: bytes = b"") -> bytes:
    """What follows the size of a frame."""
    return struct.pack(">I", form << 24 | len(header)) + header + body


@pytest.mark.parametrize(("data", "form"), [(BINARY, Form.ROCKETMQ), (JSON, Form.JSON)])
def test_golden_bytes(data: bytes, form: Form):
    command = Command(30, opaque=1, fields=ASKED, language="PYTHON", version=401, form=form)
    assert joined(command) == data
    assert whole(data) == command


@given(COMMANDS)
def test_what_is_encoded_is_decoded(command: Command):
    found = whole(joined(command))
    assert found.text() == b"".join(command.body)
    assert found == Command(
        command.code,
        command.opaque,
        command.flag,
        command.remark,
        command.fields,
        found.body,
        command.language,
        command.version,
        command.form,
    )


def test_flags_tell_answers_and_what_wants_none():
    assert Command(0, flag=ANSWER).is_answer
    assert not Command(0, flag=ONEWAY).is_answer
    assert Command(0, flag=ONEWAY).is_oneway


def test_the_chunks_of_a_body_are_not_copied():
    record = bytearray(b"record")
    header, *body = encode(Command(0, body=(memoryview(record)[:3], memoryview(record)[3:])))
    assert all(memoryview(chunk).obj is record for chunk in body)
    assert whole(bytes(header) + b"record").text() == b"record"


def test_other_clients_write_values_that_are_no_texts():
    header = {"code": 11, "opaque": 5, "extFields": {"queueId": 3, "suspend": True, "none": None}}
    found = decode(framed(json.dumps(header).encode()))
    assert found.fields == {"queueId": "3", "suspend": "true"}
    assert (found.language, found.version, found.flag) == ("OTHER", 0, 0)


def test_whole_characters_may_be_escaped_and_bytes_of_a_topic_that_are_none():
    fields = b'{"a":"\\ud83d\\ude00\\u00e9","b":"\\udcff"}'
    command = decode(framed(b'{"code":1,"opaque":1,"extFields":%b}' % fields))
    assert command.fields == {"a": "\U0001f600\u00e9", "b": "\udcff"}


def test_a_language_that_nobody_knows_is_another():
    data = bytearray(BINARY[4:])
    data[6] = 99
    assert decode(bytes(data)).language == "OTHER"


BAD = {
    "nothing": b"",
    "half a length": b"\0\0",
    "form 2": framed(b"{}", 2),
    "header longer than the frame": b"\0\0\0\x09{}",
    "header too long": framed(b" " * (HEADER_BYTES_MAX + 1)),
    "no JSON": framed(b"{"),
    "no UTF-8": framed(b'{"code":1,"opaque":1,"remark":"\xff"}'),
    "half a character": framed(b'{"code":1,"opaque":1,"extFields":{"a":"\\ud800"}}'),
    "half a character in a name": framed(b'{"code":1,"opaque":1,"extFields":{"\\uDC00":"b"}}'),
    "half a character in the remark": framed(b'{"code":1,"opaque":1,"remark":"\\udbff"}'),
    "no object": framed(b"[]"),
    "no code": framed(b'{"opaque":1}'),
    "code as text": framed(b'{"code":"1","opaque":1}'),
    "opaque of 33 bits": framed(b'{"code":1,"opaque":4294967296}'),
    "number without end": framed(b'{"code":1,"opaque":' + b"1" * 5_000 + b"}"),
    "deep": framed(b'{"a":' * 100_000),
    "fields that are none": framed(b'{"code":1,"opaque":1,"extFields":[1]}'),
    "a field that is an object": framed(b'{"code":1,"opaque":1,"extFields":{"a":{}}}'),
    "too many fields": framed(
        json.dumps(
            {"code": 1, "opaque": 1, "extFields": dict.fromkeys(map(str, range(1_025)), "")}
        ).encode()
    ),
    "short": framed(b"\0" * 16, 1),
    "remark below zero": framed(struct.pack(">hBhiii", 1, 0, 1, 1, 0, -1), 1),
    "remark beyond the end": framed(struct.pack(">hBhiii", 1, 0, 1, 1, 0, 1 << 30), 1),
    "fields beyond the end": framed(struct.pack(">hBhiiiI", 1, 0, 1, 1, 0, 0, 1 << 31), 1),
    "field cut": framed(struct.pack(">hBhiiiIHB", 1, 0, 1, 1, 0, 0, 3, 1, 65), 1),
    "field that is not UTF-8": framed(
        struct.pack(">hBhiiiIHBI", 1, 0, 1, 1, 0, 0, 7, 1, 0xFF, 0), 1
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_frame_is_refused(what: str):
    with pytest.raises(FrameError):
        decode(BAD[what])


@pytest.mark.parametrize("size", [0, 3, FRAME_BYTES_MAX + 1, (1 << 32) - 1])
def test_a_size_out_of_bounds_is_refused(size: int):
    with pytest.raises(FrameError):
        frame_size(struct.pack(">I", size))


@given(st.binary(max_size=200), st.sampled_from([None, BINARY, JSON]), st.integers(0, 200))
@example(b"\xff" * 8, BINARY, 0)
def test_any_bytes_are_a_command_or_refused(noise: bytes, base: bytes | None, at: int):
    """Random bytes, and frames with random bytes written over them."""
    data = noise if base is None else base[4 : 4 + at] + noise + base[4 + at + len(noise) :]
    try:
        command = decode(data)
    except FrameError:
        return
    assert len(command.fields) <= FIELDS_MAX
    assert decode(joined(command)[4:]).fields == command.fields


def test_what_does_not_fit_is_not_sent():
    with pytest.raises(FrameError):
        encode(Command(0, body=(bytes(FRAME_BYTES_MAX),)))
    with pytest.raises(FrameError):
        encode(Command(200_050, form=Form.ROCKETMQ))
    assert whole(joined(Command(200_050))).code == 200_050
