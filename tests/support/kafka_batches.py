"""Kafka's record batches one record at a time: a plain writer of them, and the captured logs."""

from __future__ import annotations

import gzip
import json
import tarfile
import zlib
from base64 import b64encode
from functools import cache
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from tiered.format.kafka_batch import (
    APPEND_TIME,
    CONTROL,
    BatchBlock,
    BatchFault,
    decode_records,
)

if TYPE_CHECKING:
    from tiered.model import MessageQueue

FOLDER = Path(__file__).parent.parent / "data" / "kafka"
NAMES = tuple(sorted(path.name.removesuffix(".tar.gz") for path in FOLDER.glob("*.tar.gz")))
HEAD = Struct(">qiibIhiqqqhii")
Headers = tuple[tuple[str, bytes | None], ...]
Plain = tuple[int, int, bytes | None, bytes | None, Headers]
"""Offset and time less those of the batch, key, value, headers."""


@cache
def logs(name: str) -> dict[tuple[str, str], bytes]:
    """The log files of a captured directory, by partition's folder and name, internal topics left out."""
    found = {}
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".log"):
                _, folder, file = member.name.split("/")
                if not folder.startswith("__"):
                    stream = archive.extractfile(member)
                    assert stream is not None
                    found[folder, file] = stream.read()
    return dict(sorted(found.items()))


def dump(name: str) -> list[dict[str, Any]]:
    """Lines of what Kafka says, such as `k05-epochs` or `k05-epochs.batches`."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def lines_of(queue: MessageQueue, block: BatchBlock) -> list[dict[str, Any]]:
    """The records of the sound data batches of a block, as the dumps have them."""
    chosen = np.flatnonzero(~block.has(CONTROL) & (block.faults == BatchFault.OK)).tolist()
    records = decode_records(block, chosen, bytes_max=1 << 26)
    assert not records.faults
    is_broker_s, epochs = block.has(APPEND_TIME), block.column("leader_epoch")
    columns = (records.batches, records.offsets, records.timestamps_ms)
    return [
        {
            "topic": queue.topic,
            "partition": queue.queue_id,
            "offset": offset,
            "timestamp_ms": time,
            "timestamp_type": "LOG_APPEND_TIME" if is_broker_s[batch] else "CREATE_TIME",
            "key_base64": _as_text(records.key(index)),
            "value_base64": _as_text(records.value(index)),
            "headers": [[name, _as_text(value)] for name, value in records.headers(index)],
            "leader_epoch": int(epochs[batch]),
        }
        for index, (batch, offset, time) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        )
    ]


def _as_text(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()


def zlib_crc(data: bytes) -> bytes:
    """The checksum of magic 0 and 1."""
    return zlib.crc32(data).to_bytes(4, "big")


def varint(value: int) -> bytes:
    """Zig-zag, 7 bits a byte."""
    value, found = (value << 1) ^ (value >> 63), bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def section(records: list[Plain]) -> bytes:
    """The records of a batch, not compressed."""
    found = b""
    for offset, time, key, value, headers in records:
        body = b"\0" + varint(time) + varint(offset) + sized(key) + sized(value)
        body += varint(len(headers))
        body += b"".join(sized(name.encode()) + sized(data) for name, data in headers)
        found += varint(len(body)) + body
    return found


def batch(payload: bytes, count: int, **fields: int) -> bytes:
    """A batch around a section; fields by the names of its header."""
    has = {"base_offset": 0, "leader_epoch": 0, "attributes": 0, "last_offset_delta": count - 1}
    has |= {"base_timestamp": 0, "max_timestamp": 0, "producer_id": -1, "producer_epoch": -1}
    has |= {"base_sequence": -1} | fields
    offset, epoch, *rest = has.values()
    packed = HEAD.pack(offset, len(payload) + 49, epoch, 2, 0, *rest, count) + payload
    return packed[:17] + google_crc32c.value(packed[21:]).to_bytes(4, "big") + packed[21:]


def plain_records(data: bytes, count: int) -> list[Plain]:
    """The records of a section, one at a time. ValueError or IndexError: they do not use up its bytes, or are malformed."""
    at = 0

    def number(bits: int = 35) -> int:
        nonlocal at
        found = 0
        for shift in range(0, bits, 7):
            byte = data[at]
            at += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                found &= 0xFFFF_FFFF_FFFF_FFFF
                return (found >> 1) ^ -(found & 1)
        raise ValueError("a number that goes on")

    def piece() -> bytes | None:
        nonlocal at
        size = number()
        at += max(size, 0)
        if size < -1 or at > len(data):
            raise ValueError("a size that cannot be")
        return None if size < 0 else data[at - size : at]

    found = list[Plain]()
    for _ in range(count):
        size = number()
        end = at + size
        at += 1
        time, offset, key, value = number(70), number(), piece(), piece()
        headers_count = number()
        headers = [(piece(), piece()) for _ in range(headers_count)]
        if headers_count < 0 or at != end or any(name is None for name, _ in headers):
            raise ValueError("a record that its fields do not fill")
        named = tuple(((n or b"").decode("utf-8", "surrogateescape"), v) for n, v in headers)
        found.append((offset, time, key, value, named))
    if at != len(data):
        raise ValueError("bytes behind the records")
    return found
