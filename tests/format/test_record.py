"""One record: the known vector, round trips, faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import HOST_V4, HOST_V6, make, records

from tiered.format import sysflag
from tiered.format.properties import join_properties
from tiered.format.record import (
    RECORD_BYTES_MIN,
    RecordError,
    RecordFault,
    body_crc,
    decode_record,
    encode_record,
    offset_msg_id,
    parse_offset_msg_id,
)

VECTOR = bytes.fromhex(
    "0000007b daa320a7 3610a686 00000000 00000000 0000000000000000 0000000000000000 00000000"
    "0000018bcfe56800 0a00000100009c40 0000018bcfe56801 0a00000200002a9f 00000000"
    "0000000000000000 00000005 68656c6c6f 09 546f70696354657374 0012"
    "544147530154616741024b455953016b3102"
)


def fault_of(data: bytes, position: int = 0, **options: int) -> RecordFault:
    with pytest.raises(RecordError) as caught:
        decode_record(data, position, **options)
    return caught.value.fault


def test_known_vector():
    record = decode_record(VECTOR)
    assert record == make(properties_raw=join_properties({"TAGS": "TagA", "KEYS": "k1"}))
    assert record.properties == {"TAGS": "TagA", "KEYS": "k1"}
    assert record.body_crc == 0x3610A686
    assert (record.size, record.born_host, record.store_host) == (123, HOST_V4, "10.0.0.2:10911")
    assert encode_record(record) == VECTOR
    assert offset_msg_id(record.store_host, record.physical_offset) == (
        "0A00000200002A9F0000000000000000"
    )


def test_the_shortest_record_has_91_bytes():
    record = make(body=b"", topic="", properties_raw=b"")
    assert len(encode_record(record)) == record.size == RECORD_BYTES_MIN
    assert decode_record(encode_record(record)) == record


@settings(deadline=None)
@given(records(), st.binary(max_size=20), st.binary(max_size=20))
def test_round_trip(record, before, behind):
    data = before + encode_record(record) + behind
    assert decode_record(data, len(before)) == record
    assert decode_record(data, len(before), physical_offset=record.physical_offset) == record


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("born_v6", [False, True])
@pytest.mark.parametrize("store_v6", [False, True])
def test_versions_and_hosts(version, born_v6, store_v6):
    flag = sysflag.BORN_HOST_V6 * born_v6 | sysflag.STORE_HOST_V6 * store_v6
    record = make(
        version=version,
        sys_flag=flag,
        born_host=HOST_V6 if born_v6 else HOST_V4,
        store_host=HOST_V6 if store_v6 else HOST_V4,
    )
    data = encode_record(record)
    assert len(data) == 90 + version + 12 * born_v6 + 12 * store_v6 + 5 + 9
    assert decode_record(data) == record
    assert parse_offset_msg_id(offset_msg_id(record.store_host, 77)) == (record.store_host, 77)


@pytest.mark.parametrize("length", range(len(VECTOR)))
def test_every_cut_is_short(length):
    assert fault_of(VECTOR[:length]) == RecordFault.SHORT


def test_faults():
    data = bytearray(VECTOR)
    data[4] ^= 1
    assert fault_of(bytes(data)) == RecordFault.MAGIC
    assert fault_of((90).to_bytes(4, "big") + VECTOR[4:]) == RecordFault.SIZE
    assert fault_of((-5).to_bytes(4, "big", signed=True) + VECTOR[4:]) == RecordFault.SIZE
    assert fault_of((122).to_bytes(4, "big") + VECTOR[4:]) == RecordFault.LENGTHS
    assert fault_of((124).to_bytes(4, "big") + VECTOR[4:] + b"x") == RecordFault.LENGTHS
    assert fault_of(VECTOR, physical_offset=1) == RecordFault.PHYSICAL_OFFSET
    data = bytearray(VECTOR)
    data[88] ^= 0x20
    assert fault_of(bytes(data)) == RecordFault.CRC
    assert decode_record(bytes(data), check_crc=False).body == b"Hello"


@pytest.mark.parametrize(("at", "size"), [(84, 4), (93, 1), (103, 2)])
@pytest.mark.parametrize("value", [-1, 0, 100])
def test_wrong_lengths(at, size, value):
    data = bytearray(VECTOR)
    data[at : at + size] = value.to_bytes(size, "big", signed=True)
    assert fault_of(bytes(data)) == RecordFault.LENGTHS


def test_an_ipv6_flag_on_a_record_too_short_for_it():
    data = bytearray(encode_record(make(body=b"", topic="", properties_raw=b"")))
    data[39] = 0x30
    assert fault_of(bytes(data)) == RecordFault.LENGTHS


def test_highest_crc_bit_is_not_stored():
    body = next(b for b in (b"%d" % n for n in range(100)) if body_crc(b) < 0x4000_0000)
    record = make(body=body)
    assert decode_record(encode_record(record)).body_crc >> 31 == 0
    wrong = encode_record(replace(record, body_crc=record.body_crc | 0x8000_0000))
    assert fault_of(wrong) == RecordFault.CRC


def test_an_empty_body_is_not_compared():
    record = replace(make(body=b""), body_crc=5)
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize(
    "change",
    [
        {"size": 124},
        {"sys_flag": sysflag.BORN_HOST_V6, "size": 135},
        {"born_host": HOST_V6},
        {"topic": "t" * 128, "size": 123 + 119},
        {"properties_raw": b"p" * 32768, "size": 123 - 18 + 32768},
    ],
)
def test_fields_that_do_not_fit_together(change):
    with pytest.raises(ValueError):
        encode_record(replace(decode_record(VECTOR), **change))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_raise_only_record_errors(data):
    try:
        record = decode_record(data)
    except RecordError as error:
        assert error.fault != RecordFault.OK  # noqa: PT017 (either outcome is right)
        assert error.fault.name in str(error)  # noqa: PT017
    else:
        assert encode_record(record) == data[: record.size]
