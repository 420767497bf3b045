"""Fingerprints: 32 bits by which a record is known again, wherever its bytes lie.

A fingerprint is made of queue offset, store time, body CRC, body size and unique key; not of the physical offset, which a
restored store changes. Two different messages at one queue offset share a fingerprint once in four thousand million times.
0 stands for none: not known, or a hole. Where it matters that it is a hole, it is ``HOLE``; that is in no entry. Those of
other stores' records are made of their heads (``tiered.format.heads``).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from zlib_ng import zlib_ng

from tiered.format.properties import UNIQ_KEY, value_of
from tiered.format.record import (
    BODY_AT,
    BODY_SIZE_AT,
    HEADER,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    STORE_TIME_AT,
    extra_of,
)
from tiered.format.record_kind import RecordKind, kind_of
from tiered.format.sysflag import BORN_HOST_V6, v6_extra_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered.local.interface import RecordBatch

HOLE = -1
"""In the place of a fingerprint: there is an item, and no message."""

_LONG = struct.Struct(">q")
_INT = struct.Struct(">i")
_IDENTITY = struct.Struct(">qqIi")


def fingerprint_of(record: Buffer, tag_code: int) -> int:
    """The fingerprint of a sound record, whose item has this tag code; 0 when these bytes are not a record of RocketMQ."""
    kind = kind_of(tag_code)
    if kind is not RecordKind.ROCKETMQ:
        from tiered.format.heads import fingerprint_of_head  # noqa: PLC0415 (most tiers have none of them)

        return fingerprint_of_head(kind, record)
    view = memoryview(record).cast("B")
    if view.nbytes < RECORD_BYTES_MIN:
        return 0
    _, magic, crc, _, _, queue_offset, _, sys_flag, _ = HEADER.unpack_from(view)
    store_at = STORE_TIME_AT + extra_of(sys_flag, BORN_HOST_V6)
    extra = v6_extra_bytes(sys_flag)
    body_size = _INT.unpack_from(view, BODY_SIZE_AT + extra)[0]
    store_ms = _LONG.unpack_from(view, store_at)[0]
    rest = bytes(
        view[BODY_AT + extra + body_size :]
    )  # topic and properties, each behind its length
    length_bytes = 2 if magic == MAGIC_V2 else 1
    topic_bytes = int.from_bytes(rest[:length_bytes], "big")
    unique = value_of(rest[length_bytes + topic_bytes + 2 :], UNIQ_KEY.encode())
    identity = _IDENTITY.pack(queue_offset, store_ms, crc, body_size)
    return zlib_ng.crc32(identity + unique) or 1


def fingerprint_of_item(batch: RecordBatch, number: int) -> int:
    """The fingerprint of a batch's item; 0 for a hole."""
    size = int(batch.sizes[number])
    if size <= 0:
        return 0
    start = int(batch.positions[number])
    record = memoryview(batch.data).cast("B")[start : start + size]
    return fingerprint_of(record, int(batch.tag_codes[number]))
