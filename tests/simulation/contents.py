"""What records and objects say of themselves, read without the product's code.

A record is its bytes; an offset without a message is a *hole*, written as a few bytes that no record can be.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zstandard

if TYPE_CHECKING:
    from collections.abc import Sequence

FOOTER_BYTES = 40
RECORD_BYTES_MIN = 80
_HEAD = struct.Struct(">iiiiiqqiq8sq8siqi")
"""Size, magic, body CRC, queue, flag, queue offset, physical offset, system flag, born, host, stored, host, …, body size."""


GAP = b"gap"
"""How an offset is written down of which it is on record that it never came."""


def hole(reason: int) -> bytes:
    """How an offset without a message is written down."""
    return b"hole %d" % reason


def is_hole(record: bytes) -> bool:
    """Whether it is one."""
    return len(record) < RECORD_BYTES_MIN


@dataclass(frozen=True)
class Claims:
    """What a part says of its records.

    Attributes:
        holes: How many.
        low: Smallest store time; -1 without messages.
        high: Greatest store time; -1 without messages.
        mark: Of the last record; 0 of a hole.
    """

    holes: int
    low: int
    high: int
    mark: int

    def of_some(self, holes: int, count: int, mark: int) -> Claims:
        """Of some of the records: the bounds of time stay those of all, while there is any message."""
        low, high = (self.low, self.high) if count > holes else (-1, -1)
        return Claims(holes, low, high, mark)


def claims_of(records: Sequence[bytes]) -> Claims:
    """What is true of these records."""
    times = [store_ms(record) for record in records if not is_hole(record)]
    low, high = (min(times), max(times)) if times else (-1, -1)
    return Claims(len(records) - len(times), low, high, mark_of(records[-1]))


def joined(claims: Sequence[Claims]) -> Claims:
    """Of neighbours that become one."""
    timed = [one for one in claims if one.high >= 0]
    return Claims(
        sum(one.holes for one in claims),
        min((one.low for one in timed), default=-1),
        max((one.high for one in timed), default=-1),
        claims[-1].mark,
    )


def store_ms(record: bytes) -> int:
    """When the broker stored it."""
    return int(_HEAD.unpack_from(record)[10])


def mark_of(record: bytes) -> int:
    """The mark by which it is known again; 0 of a hole."""
    if is_hole(record):
        return 0
    head = _HEAD.unpack_from(record)
    unique = _properties(record).get(b"UNIQ_KEY", b"")
    identity = struct.pack(">qqIi", head[5], head[10], head[2] & 0xFFFF_FFFF, head[14])
    return zlib.crc32(identity + unique) or 1


def tag_code(record: bytes) -> int:
    """What the index has to say of its tags: Java's hash of the text; of a hole its reason."""
    if is_hole(record):
        return int(record.rpartition(b" ")[2])
    value = 0
    for (unit,) in struct.iter_unpack(
        ">H", _properties(record).get(b"TAGS", b"").decode().encode("utf-16-be")
    ):
        value = (31 * value + unit) % (1 << 32)
    return value - (value >> 31 << 32)


def _properties(record: bytes) -> dict[bytes, bytes]:
    at = _HEAD.size + _HEAD.unpack_from(record)[14]
    at += 1 + record[at] + 2
    pairs = [pair.partition(b"\x01") for pair in record[at:].split(b"\x02") if pair]
    return {name: value for name, _, value in pairs}


def description(data: bytes) -> dict[str, Any]:
    """What an object says of itself."""
    size, _, blocks = struct.unpack_from(">III", data, len(data) - FOOTER_BYTES + 8)
    start = len(data) - FOOTER_BYTES - 4 * blocks - size
    found, _ = json.JSONDecoder().raw_decode(data[start:].decode("latin-1"))
    assert isinstance(found, dict)
    return found


def unpacked(data: bytes) -> bytes:
    """The payload of a compressed object: frames, and blocks that are as long as they were."""
    end = len(data) - FOOTER_BYTES
    size, rest, block_bytes, blocks = struct.unpack_from(">QIII", data, end)
    at = rest + 4 * blocks + FOOTER_BYTES  # behind the trailer's copy
    pieces: list[bytes] = []
    for number in range(blocks):
        stored, _, _ = struct.unpack_from(">III", data, end - 16 - 12 * (blocks - number))
        piece = data[at : at + stored]
        is_plain = stored == min(block_bytes, size - number * block_bytes)
        pieces.append(piece if is_plain else zstandard.ZstdDecompressor().decompress(piece))
        at += stored
    return b"".join(pieces)
