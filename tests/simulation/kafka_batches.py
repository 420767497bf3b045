"""What a batch of Kafka's says of itself by its head, read without the product's code."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

HEAD_BYTES = 61
TRANSACTIONAL, CONTROL = 16, 32
_HEAD = struct.Struct(">qiibIhiqqqhii")
_IDENTITY = struct.Struct(">qiiqhi")


class Head(NamedTuple):
    """Its fields, in their order."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int

    @property
    def end(self) -> int:
        """One past the last offset that it covers."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def is_control(self) -> bool:
        """Of the node's own."""
        return bool(self.attributes & CONTROL)

    @property
    def is_transactional(self) -> bool:
        """Data of a transaction, of which some is left."""
        return bool(self.attributes & TRANSACTIONAL) and not self.is_control and self.count > 0


def is_batch(record: bytes) -> bool:
    """Whether it is one, and no record of RocketMQ, which begins with its size."""
    is_long = len(record) >= HEAD_BYTES
    return is_long and record[16] == 2 and int.from_bytes(record[:4], "big") != len(record)


def head_of(batch: bytes) -> Head:
    """Its head."""
    return Head(*_HEAD.unpack_from(batch))


def covers(record: bytes, offset: int) -> bool:
    """Whether it is a batch that has this offset."""
    if not is_batch(record):
        return False
    head = head_of(record)
    return head.base_offset <= offset < head.end


def mark_of(batch: bytes) -> int:
    """The mark by which it is known again, whatever the cleaner has taken of it."""
    h = head_of(batch)
    identity = (
        *(h.base_offset, h.last_offset_delta, h.leader_epoch),
        *(h.producer_id, h.producer_epoch, h.base_sequence),
    )
    return zlib.crc32(_IDENTITY.pack(*identity)) or 1


def tag_code(batch: bytes) -> int:
    """What the index has to say of it."""
    head = head_of(batch)
    flags = (head.attributes >> 4) & 3
    return 0x4B << 56 | flags << 40 | head.leader_epoch & 0xFFFF_FFFF


def is_abort(batch: bytes) -> bool:
    """Of a control batch: whether it ends a transaction by aborting it. Its key: a size of 4, version, type."""
    return batch[HEAD_BYTES + 5 : HEAD_BYTES + 9] == bytes(4)
