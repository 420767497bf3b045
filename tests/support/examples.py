"""Hypothesis strategies for records, and the plain way to build one."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv6Address
from typing import Any

from hypothesis import strategies as st

from tiered.format import sysflag
from tiered.format.properties import join_properties
from tiered.format.record import Record, body_crc, encode_record, format_host, record_bytes

HOST_V4 = "10.0.0.1:40000"
HOST_V6 = format_host(IPv6Address("2001:db8::7:1").packed + (10911).to_bytes(4, "big"))

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
WORDS = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1)
PROPERTIES = st.dictionaries(
    st.one_of(st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "INNER_NUM"]), WORDS), WORDS, max_size=4
)


def make(**fields: Any) -> Record:
    """A sound record: what is not given is plain, size and CRC are computed."""
    known = {
        "version": 1,
        "queue_id": 0,
        "flag": 0,
        "queue_offset": 0,
        "physical_offset": 0,
        "sys_flag": 0,
        "born_timestamp_ms": 1_700_000_000_000,
        "born_host": HOST_V4,
        "store_timestamp_ms": 1_700_000_000_001,
        "store_host": "10.0.0.2:10911",
        "reconsume_times": 0,
        "prepared_transaction_offset": 0,
        "body": b"hello",
        "topic": "TopicTest",
        "properties_raw": b"",
    } | fields
    size = record_bytes(
        body=len(known["body"]),
        topic=len(known["topic"].encode("utf-8", "surrogateescape")),
        props=len(known["properties_raw"]),
        sys_flag=known["sys_flag"],
        version=known["version"],
    )
    return Record(**({"size": size, "body_crc": body_crc(known["body"])} | known))


@st.composite
def hosts(draw: st.DrawFn, *, is_v6: bool) -> str:
    """Any host of one kind."""
    return format_host(draw(st.binary(min_size=20 if is_v6 else 8, max_size=20 if is_v6 else 8)))


@st.composite
def records(draw: st.DrawFn, topics: st.SearchStrategy[str] | None = None) -> Record:
    """Any record that the format can bear."""
    version = draw(st.sampled_from([1, 2]))
    sys_flag = draw(INT32)
    topic_bytes = draw(st.binary(max_size=20) | st.binary(max_size=127 if version == 1 else 300))
    topic = topic_bytes.decode("utf-8", "surrogateescape") if topics is None else draw(topics)
    raw = draw(PROPERTIES.map(join_properties) | st.binary(max_size=40))
    return make(
        version=version,
        sys_flag=sys_flag,
        topic=topic,
        properties_raw=raw,
        body=draw(st.binary(max_size=64)),
        queue_id=draw(st.integers(0, 3) | INT32),
        flag=draw(INT32),
        queue_offset=draw(INT64),
        physical_offset=draw(INT64),
        born_timestamp_ms=draw(INT64),
        born_host=draw(hosts(is_v6=bool(sys_flag & sysflag.BORN_HOST_V6))),
        store_timestamp_ms=draw(INT64),
        store_host=draw(hosts(is_v6=bool(sys_flag & sysflag.STORE_HOST_V6))),
        reconsume_times=draw(INT32),
        prepared_transaction_offset=draw(INT64),
    )


def lay_out(rows: list[Record], physical_offset: int = 0) -> bytes:
    """Encode records one after another, each with the physical offset at which it then lies."""
    data = bytearray()
    for row in rows:
        data += encode_record(replace(row, physical_offset=physical_offset + len(data)))
    return bytes(data)
