"""Data objects: what one commit wrote, and how it describes and checks itself.

Layout (big-endian)::

    offset          size   field
    0               P      payload: raw records, or 20-byte consume-queue items
    P               D      description: JSON, UTF-8 (what the object is: queue, offsets, counts, times)
    P+D             4·B    CRC-32 of each block of `block_bytes` of the payload, the last one short
    P+D+4B          40     footer:
                      0  8   uint64  payload_size
                      8  4   uint32  description_size
                     12  4   uint32  block_bytes
                     16  4   uint32  block_count  (= ceil(payload_size / block_bytes))
                     20  4   uint32  payload_crc  CRC-32 of the whole payload
                     24  2   uint16  format_version (1)
                     26  2   uint16  zero
                     28  4   uint32  trailer_crc  CRC-32 of description, block CRCs and footer bytes 0..28
                     32  8   bytes   magic ``TIEREDOB``

Size, checksum and magic of the footer stay where they are in every version, so that a damaged version number is told from
a newer one.

The payload begins at position 0, so that a position in a segment needs no translation. A reader of a range reads whole
blocks and checks each: one flipped bit anywhere in the object is found, and costs the block (64 KiB) that it lies in; in
the trailer it costs nothing but the proof, since the journal names the same payload CRC.

This is version 1. In version 2 (``tiered.format.packed``) the payload is stored in compressed blocks.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer
from zlib_ng import zlib_ng

from tiered.errors import InvalidError
from tiered.format.packed import parse_packed
from tiered.format.trailer import (
    FOOTER_BYTES,
    MAGIC,
    PACKED_VERSION,
    PLAIN_VERSION,
    SealedObject,
    Trailer,
    damaged,
    make_trailer,
    read_description,
    split_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "BLOCK_BYTES",
    "FOOTER_BYTES",
    "MAGIC",
    "SealedObject",
    "Trailer",
    "aligned_range",
    "build_object",
    "check_blocks",
    "parse_trailer",
]

BLOCK_BYTES = 64 * 1024


def build_object(
    buffers: Sequence[Buffer], description: Mapping[str, Any], *, block_bytes: int = BLOCK_BYTES
) -> SealedObject:
    """Add the trailer to a payload, without copying it.

    Args:
        buffers: The payload's bytes, to be joined in order.
        description: JSON-able; what a rebuild from a listing needs to know.
        block_bytes: Size of the checksummed blocks.
    """
    payload_bytes, payload_crc, crcs = _checksums(buffers, block_bytes)
    text = json.dumps(description, separators=(",", ":"), sort_keys=True).encode()
    signed = text + struct.pack(f">{len(crcs)}I", *crcs)
    head = (payload_bytes, len(text), block_bytes, len(crcs), payload_crc)
    trailer = make_trailer(signed, head, PLAIN_VERSION)
    return SealedObject([*buffers, trailer], payload_bytes, payload_crc, len(trailer))


def _checksums(buffers: Sequence[Buffer], block_bytes: int) -> tuple[int, int, list[int]]:
    """Size and CRC of the payload, and the CRC of each block, over buffers that need not end at block ends."""
    crcs: list[int] = []
    total, crc, filled, payload_crc = 0, 0, 0, 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        payload_crc = zlib_ng.crc32(view, payload_crc)
        start = 0
        while start < len(view):
            piece = view[start : start + block_bytes - filled]
            crc = zlib_ng.crc32(piece, crc)
            filled += len(piece)
            start += len(piece)
            if filled == block_bytes:
                crcs.append(crc)
                crc = filled = 0
        total += len(view)
    if filled:
        crcs.append(crc)
    return total, payload_crc, crcs


def parse_trailer(tail: bytes, *, where: str) -> Trailer:
    """Read the trailer from the last bytes of an object.

    Args:
        tail: The end of the object, holding at least the whole trailer.
        where: Key of the object, for messages.

    Raises:
        DataError: The trailer is damaged, or the object is none of ours.
        InvalidError: It is of a newer format version.
    """
    version, head, signed = split_trailer(tail, where=where)
    trailer_bytes = len(signed) + FOOTER_BYTES
    if version == PACKED_VERSION:
        return parse_packed(signed, head, trailer_bytes, where=where)
    if version > PACKED_VERSION:
        raise InvalidError(
            f"the object has format version {version}, this program knows up to {PACKED_VERSION}",
            where=where,
            do="use a newer version of tiered",
        )
    payload_bytes, text_bytes, block_bytes, count, payload_crc = head
    crcs = struct.unpack_from(f">{count}I", signed, text_bytes)
    description = read_description(signed[:text_bytes], where)
    return Trailer(payload_bytes, trailer_bytes, block_bytes, crcs, payload_crc, description)


def aligned_range(start: int, end: int, trailer: Trailer) -> tuple[int, int]:
    """Smallest range of whole blocks that holds ``[start, end)`` of the payload."""
    block = trailer.block_bytes
    return start // block * block, min(-(-end // block) * block, trailer.payload_bytes)


def check_blocks(data: Buffer, start: int, trailer: Trailer, *, where: str) -> None:
    """Check whole blocks read from position ``start``.

    Raises:
        DataError: A block's checksum is wrong; the message says which bytes.
    """
    view = memoryview(data).cast("B")
    block = trailer.block_bytes
    first = start // block
    for index, position in enumerate(range(0, len(view), block)):
        if zlib_ng.crc32(view[position : position + block]) != trailer.block_crcs[first + index]:
            low = start + position
            raise damaged(
                f"bytes [{low}, {min(low + block, trailer.payload_bytes)}) fail their checksum",
                where,
            )
