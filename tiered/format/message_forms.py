"""Messages as readers get them: bodies unpacked, inner batches split, fields as JSON.

Three steps, each below with what it bounds and what it refuses.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from dataclasses import replace
from json.encoder import encode_basestring as quoted
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.properties import CLIENT_ONLY, KEYS, TAGS, UNIQ_KEY
from tiered.format.record import offset_msg_id
from tiered.format.sysflag import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_MASK,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    INNER_BATCH,
)
from tiered.format.unpacking import Codec, UnpackError, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tiered.format.record import Record


# -- compression -----------------------------------------------------------------------------------
#
# Bodies as producers compress them: zlib, LZ4 frame or zstd, told by the record's ``sysFlag``.

BODY_BYTES_MAX: Final = 64 << 20
"""Largest body that is unpacked by default. A broker takes 4 MiB unless it is told otherwise."""
_CODECS: Final = {
    0: Codec.ZLIB,
    COMPRESSION_ZLIB: Codec.ZLIB,
    COMPRESSION_LZ4: Codec.LZ4,
    COMPRESSION_ZSTD: Codec.ZSTD,
}


def decompress_body(body: bytes, sys_flag: int, *, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The body as a client gets it, of at most ``bytes_max`` bytes; as it is when ``sys_flag`` says so.

    DataError: damaged, cut short, larger, or of an unknown kind.
    """
    if not sys_flag & COMPRESSED:
        return body
    codec = _CODECS.get(sys_flag & COMPRESSION_MASK)
    if codec is None:
        raise DataError(f"a body is compressed in an unknown way (sys_flag {sys_flag:#x})")
    try:
        return unpack(codec, body, bytes_max)
    except UnpackError as error:
        raise DataError(f"a compressed body {error}") from error


# -- inner batches ---------------------------------------------------------------------------------
#
# Inner batches: one record of a batch queue that holds several messages.
#
# The record's body (after decompression) is a row of inner messages:
#
# ====== ===== ==================================================
# offset bytes field
# ====== ===== ==================================================
# 0      4     size of this inner message
# 4      4     magic, 0
# 8      4     body CRC, 0
# 12     4     flag
# 16     4     body size
# 20     body  body
# ..     2     properties size
# ..     props properties, as of a record
# ====== ===== ==================================================
#
# Inner message ``i`` has the record's queue offset plus ``i``. The record's own properties
# (``INNER_NUM``, ``INNER_BASE`` and what the broker adds) belong to none of them.

_HEAD: Final = Struct(">iiiii")
_SHORT: Final = Struct(">h")


@dataclass(frozen=True, slots=True)
class InnerMessage:
    """What an inner message has of its own: flag, body and properties (as stored)."""

    flag: int
    body: bytes
    properties_raw: bytes


def split_batch(record: Record, *, body_bytes_max: int = BODY_BYTES_MAX) -> list[Record]:
    """The messages of a record: its inner messages, or just itself when it is not an inner batch.

    An inner message comes as a record with its own flag, body, properties and queue offset, and with the other fields of
    the record that holds it (size and physical offset too), except that the body is plain, so that the compressed bit is
    off, and that CRC, reconsume times and prepared offset are 0, as Java gives them. ``body_bytes_max`` bounds the body
    once it is unpacked.
    """
    if not record.sys_flag & INNER_BATCH:
        return [record]
    body = decompress_body(record.body, record.sys_flag, bytes_max=body_bytes_max)
    common = replace(
        record,
        sys_flag=record.sys_flag & ~COMPRESSED,
        body_crc=0,
        reconsume_times=0,
        prepared_transaction_offset=0,
    )
    return [
        replace(
            common,
            queue_offset=record.queue_offset + number,
            flag=inner.flag,
            body=inner.body,
            properties_raw=inner.properties_raw,
        )
        for number, inner in enumerate(decode_inner_messages(body))
    ]


def decode_inner_messages(body: bytes) -> Iterator[InnerMessage]:
    """The inner messages of a plain body, in order."""
    position = 0
    while position < len(body):
        if position + _HEAD.size + _SHORT.size > len(body):
            raise DataError(f"an inner batch ends inside the message at byte {position}")
        size, _, _, flag, body_size = _HEAD.unpack_from(body, position)
        body_at = position + _HEAD.size
        properties_at = body_at + body_size + _SHORT.size
        if body_size < 0 or properties_at > len(body):
            raise DataError(f"the inner message at byte {position} has a body of {body_size} bytes")
        (properties_size,) = _SHORT.unpack_from(body, properties_at - _SHORT.size)
        end = properties_at + properties_size
        if properties_size < 0 or end > len(body) or size != end - position:
            raise DataError(f"the inner message at byte {position} has sizes that do not add up")
        yield InnerMessage(flag, body[body_at : body_at + body_size], body[properties_at:end])
        position = end


def encode_inner_messages(messages: Iterable[InnerMessage]) -> bytes:
    """The body of an inner batch; magic and CRC of the messages are 0, as producers write them."""
    parts: list[bytes] = []
    for message in messages:
        size = _HEAD.size + len(message.body) + _SHORT.size + len(message.properties_raw)
        parts += (
            _HEAD.pack(size, 0, 0, message.flag, len(message.body)),
            message.body,
            _SHORT.pack(len(message.properties_raw)),
            message.properties_raw,
        )
    return b"".join(parts)


# -- JSON ------------------------------------------------------------------------------------------
#
# A message as JSON: what ``tiered cat`` prints, and what captured stores are compared by.
#
# ``message_line`` writes the fields at once as text, in less than half the time of making an object and encoding it.


def message_line(
    record: Record,
    *,
    tag_code: int,
    log_offset: int | None,
    raw_body: bool,
    stored_sys_flag: int | None = None,
) -> bytes:
    """One message (inner ones as ``split_batch`` gives them) as one line of UTF-8 JSON without its end.

    Its fields come in the order of the command line's contract. Text that is not UTF-8 has the line in ASCII, with escapes.

    Args:
        log_offset: Where its record begins in the tiered commit log; None when it is not from a tier.
        raw_body: Leave the body as stored (and the compressed bit set).
        stored_sys_flag: Of the record that holds an inner message.

    Raises:
        DataError: The body cannot be unpacked.
    """
    plain = record.body if raw_body else decompress_body(record.body, record.sys_flag)
    body = b2a_base64(plain, newline=False).decode("ascii")
    properties = record.properties
    record_id = offset_msg_id(record.store_host, record.physical_offset)
    tags, keys = properties.get(TAGS), properties.get(KEYS)
    listed = ", ".join(
        f"{quoted(name)}: {quoted(properties[name])}"
        for name in sorted(properties)
        if name not in CLIENT_ONLY
    )
    line = (
        f'{{"topic": {quoted(record.topic)}, "queue_id": {record.queue_id},'
        f' "queue_offset": {record.queue_offset},'
        f' "store_timestamp_ms": {record.store_timestamp_ms},'
        f' "born_timestamp_ms": {record.born_timestamp_ms},'
        f' "born_host": "{record.born_host}", "store_host": "{record.store_host}",'
        f' "tags": {"null" if tags is None else quoted(tags)},'
        f' "keys": {"null" if keys is None else quoted(keys)},'
        f' "properties": {{{listed}}},'
        f' "msg_id": {quoted(properties.get(UNIQ_KEY) or record_id)},'
        f' "sys_flag": {record.sys_flag if raw_body else record.sys_flag & ~COMPRESSED},'
        f' "stored_sys_flag": {record.sys_flag if stored_sys_flag is None else stored_sys_flag},'
        f' "flag": {record.flag}, "body_crc": {record.body_crc},'
        f' "reconsume_times": {record.reconsume_times},'
        f' "prepared_transaction_offset": {record.prepared_transaction_offset},'
        f' "size": {record.size}, "tag_hash": {tag_code},'
        f' "physical_offset": {record.physical_offset},'
        # Java gives the messages of an inner batch no id of their own place: they share one.
        f' "offset_msg_id": {"null" if record.sys_flag & INNER_BATCH else quoted(record_id)},'
        f' "body_base64": "{body}",'
        f' "log_offset": {"null" if log_offset is None else log_offset}}}'
    )
    try:
        return line.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(line)).encode()


def message_json(record: Record, **how: Any) -> dict[str, Any]:  # noqa: ANN401 (those of message_line)
    """What ``message_line`` says, as an object."""
    found: dict[str, Any] = json.loads(message_line(record, **how))
    return found
