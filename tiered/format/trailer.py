"""The end of every data object: what all versions of its format have in common (layout: ``tiered.format.part``)."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer
from zlib_ng import zlib_ng

from tiered.errors import DataError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    import zstandard

PLAIN_VERSION = 1
PACKED_VERSION = 2
MAGIC = b"TIEREDOB"
_HEAD = struct.Struct(">QIIIIHH")
_FOOTER = struct.Struct(">QIIIIHHI8s")
FOOTER_BYTES = _FOOTER.size
assert FOOTER_BYTES == 40  # noqa: PLR2004 (the table in ``tiered.format.part``)
assert _HEAD.size == 28  # noqa: PLR2004 (likewise: what the checksum covers)

Head = tuple[int, int, int, int, int]
"""Of a footer: payload size, size of what stands before the checksums of blocks, block size and count, payload CRC."""


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Where the blocks of a packed object are stored.

    Attributes:
        starts: Position of each block in the object; then where the last one ends, which is where the trailer begins.
        crcs: CRC-32 of each block's stored bytes.
        dictionary: For the frames; None when there is none.
        dictionary_bytes: Its size.
    """

    starts: array[int]
    crcs: array[int]
    dictionary: zstandard.ZstdCompressionDict | None
    dictionary_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Of all blocks together, and the copy of the trailer before them."""
        return self.starts[-1]


@dataclass(frozen=True, slots=True)
class Trailer:
    """What stands behind an object's payload.

    Attributes:
        payload_bytes: Size of the payload.
        trailer_bytes: Size of the trailer itself.
        block_bytes: Size of the blocks that have a checksum.
        block_crcs: CRC-32 of each block.
        payload_crc: CRC-32 of the payload.
        description: What the object says of itself.
        table: Where the blocks are stored, if they are compressed; else they are the object's first bytes.
    """

    payload_bytes: int
    trailer_bytes: int
    block_bytes: int
    block_crcs: tuple[int, ...]
    payload_crc: int
    description: Mapping[str, Any]
    table: BlockTable | None = None

    @property
    def stored_bytes(self) -> int:
        """Size of what stands before the trailer."""
        return self.table.stored_bytes if self.table else self.payload_bytes

    @property
    def memory_bytes(self) -> int:
        """What it takes in memory without its description, about."""
        if self.table is None:
            return 256 + 40 * len(self.block_crcs)
        return 512 + 52 * len(self.block_crcs) + 3 * self.table.dictionary_bytes


@dataclass(frozen=True, slots=True)
class SealedObject:
    """An object ready to be uploaded.

    Attributes:
        buffers: What is stored of the payload, then the trailer.
        payload_bytes: Size of the payload.
        payload_crc: CRC-32 of the payload.
        trailer_bytes: Size of the trailer.
        packed_bytes: Size of the stored payload, if it is compressed; else 0.
    """

    buffers: Sequence[Buffer]
    payload_bytes: int
    payload_crc: int
    trailer_bytes: int
    packed_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Size of the whole object."""
        return (self.packed_bytes or self.payload_bytes) + self.trailer_bytes


def make_trailer(signed: bytes, head: Head, version: int) -> bytes:
    """A trailer: what the checksum covers, and the footer."""
    covered = signed + _HEAD.pack(*head, version, 0)
    return covered + zlib_ng.crc32(covered).to_bytes(4, "big") + MAGIC


def trailer_size(tail: bytes) -> int:
    """How large the trailer is that ends in ``tail``, by its unproven footer; 0 when there is none."""
    footer = tail[-FOOTER_BYTES:]
    if len(footer) < FOOTER_BYTES or not footer.endswith(MAGIC):
        return 0
    _, text_bytes, _, count, *_ = _FOOTER.unpack(footer)
    return FOOTER_BYTES + 4 * int(count) + int(text_bytes)


def split_trailer(tail: bytes, *, where: str) -> tuple[int, Head, bytes]:
    """Take a trailer apart, of whatever version.

    Args:
        tail: The end of the object, holding at least the whole trailer.
        where: Key of the object, for messages.

    Returns:
        Its version, its head, and what stands before the footer.

    Raises:
        DataError: The trailer is damaged, or the object is none of ours.
    """
    size = trailer_size(tail)
    if not size:
        raise damaged("the object does not end in a footer", where)
    *head, version, _, crc, _ = _FOOTER.unpack(tail[-FOOTER_BYTES:])
    payload_bytes, text_bytes, block_bytes, count, payload_crc = head
    if size > len(tail) or block_bytes == 0 or count != -(-payload_bytes // block_bytes):
        raise damaged("the footer's sizes contradict each other", where)
    covered = tail[-size : len(tail) - FOOTER_BYTES + _HEAD.size]
    if zlib_ng.crc32(covered) != crc:
        raise damaged("the trailer's checksum is wrong", where)
    found = (payload_bytes, text_bytes, block_bytes, count, payload_crc)
    return version, found, covered[: -_HEAD.size]


def read_description(text: bytes, where: str) -> Mapping[str, Any]:
    """A right checksum proves no good will: whoever may write into a bucket can compute it.

    Raises:
        DataError: It is no JSON object.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise damaged("the description is no JSON object", where)
    return found


def damaged(what: str, where: str) -> DataError:
    """An error to be raised."""
    return DataError(
        what, where=where, do="run `tiered verify --deep` to see the extent of the damage"
    )
