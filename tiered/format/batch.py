"""Inner batches: one record of a batch queue that holds several messages.

The record's body (after decompression) is a row of inner messages:

====== ===== ==================================================
offset bytes field
====== ===== ==================================================
0      4     size of this inner message
4      4     magic, 0
8      4     body CRC, 0
12     4     flag
16     4     body size
20     body  body
..     2     properties size
..     props properties, as of a record
====== ===== ==================================================

Inner message ``i`` has the record's queue offset plus ``i``. The record's own properties
(``INNER_NUM``, ``INNER_BASE`` and what the broker adds) belong to none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from struct import Struct
from typing import TYPE_CHECKING, Final

from tiered.errors import DataError
from tiered.format.compression import BODY_BYTES_MAX, decompress_body
from tiered.format.sysflag import COMPRESSED, INNER_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tiered.format.record import Record

_HEAD: Final = Struct(">iiiii")
_SHORT: Final = Struct(">h")


@dataclass(frozen=True, slots=True)
class InnerMessage:
    """What an inner message has of its own: flag, body and properties (as stored)."""

    flag: int
    body: bytes
    properties_raw: bytes


def split_batch(record: Record, *, body_bytes_max: int = BODY_BYTES_MAX) -> list[Record]:
    """The messages of a record: its inner messages, or just itself when it is no inner batch.

    An inner message comes as a record with its own flag, body, properties and queue offset, and
    with the other fields of the record that holds it (size and physical offset too), except that
    the body is plain, so that the compressed bit is off, and that CRC, reconsume times and prepared
    offset are 0, as Java gives them.

    Args:
        record: Any.
        body_bytes_max: Bound on the body once it is unpacked.

    Raises:
        DataError: The body is no row of inner messages, or cannot be unpacked.
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
    """The inner messages of a plain body, in order.

    Raises:
        DataError: The sizes do not fill the body exactly.
    """
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
