"""Reads ranges of data objects and checks every byte that it hands out.

Retries and errors: nothing is retried here. Whatever contradicts the journal (other size, other checksum, a block that
fails) is a ``DataError``, and nothing of the range is returned. A damaged block costs only the ranges that touch it; a
damaged trailer alone costs no message: the journal knows the checksum of the payload, which is then read whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zlib_ng import zlib_ng

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ShortReadError
from tiered.errors import DataError
from tiered.format.part import BLOCK_BYTES, Trailer, aligned_range, check_blocks, parse_trailer

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.log.state import ObjectRange


def read_range(
    store: ObjectStore, prefix: str, place: ObjectRange, start: int, end: int
) -> memoryview:
    """Read bytes ``[start, end)`` of an object's payload, checked block by block.

    One request: the whole object when most of it is wanted, else the blocks around the range and the trailer.

    Raises:
        DataError: The object is damaged there; nothing of it is returned.
        BackendError: It could not be read (``ObjectNotFoundError``: it is gone).
    """
    assert place.start <= start < end <= place.end
    low, high = start // BLOCK_BYTES * BLOCK_BYTES, -(-end // BLOCK_BYTES) * BLOCK_BYTES
    high = min(high, place.payload_bytes)
    key = prefix + place.key
    if 2 * (high - low) >= place.payload_bytes:
        return _from_whole(store, key, place, start, end)
    wanted = [ByteRange(low, high), ByteRange(place.payload_bytes, place.object_bytes)]
    try:
        piece, tail = store.get_ranges(key, wanted)
        trailer = check_trailer(tail, place, where=key)
    except (InvalidRangeError, ShortReadError, DataError):
        return _from_whole(store, key, place, start, end)
    if trailer.block_bytes != BLOCK_BYTES:
        return _from_whole(store, key, place, start, end)
    check_blocks(piece, low, trailer, where=key)
    return memoryview(piece)[start - low : end - low]


def _from_whole(
    store: ObjectStore, key: str, place: ObjectRange, start: int, end: int
) -> memoryview:
    """Read the whole object; check the blocks wanted, or all by the journal's checksum if the trailer is damaged."""
    whole = memoryview(store.get(key))
    payload, tail = whole[: place.payload_bytes], whole[place.payload_bytes :]
    try:
        trailer = check_trailer(bytes(tail), place, where=key)
    except DataError:
        if len(payload) == place.payload_bytes and zlib_ng.crc32(payload) == place.crc:
            return payload[start:end]
        raise
    low, high = aligned_range(start, end, trailer)
    check_blocks(payload[low:high], low, trailer, where=key)
    return payload[start:end]


def read_trailer(store: ObjectStore, prefix: str, place: ObjectRange) -> Trailer:
    """What the object says of itself.

    Raises:
        DataError: The trailer is damaged, or the object is not the one that the journal names.
        BackendError: It could not be read.
    """
    key = prefix + place.key
    tail = store.get(key, ByteRange(place.payload_bytes, place.object_bytes))
    return check_trailer(tail, place, where=key)


def check_trailer(tail: bytes, place: ObjectRange, *, where: str) -> Trailer:
    """Parse what lies behind an object's payload and hold it against the journal.

    Raises:
        DataError: The trailer is damaged, or the object is not the one that the journal names.
    """
    trailer = parse_trailer(tail, where=where)
    found = (trailer.payload_bytes, trailer.trailer_bytes, trailer.payload_crc)
    if found != (place.payload_bytes, len(tail), place.crc) or len(tail) != place.trailer_bytes:
        raise DataError(
            "the object is not the one that the journal names (size or checksum differ)",
            where=where,
            do="run `tiered verify --deep` to see the extent of the damage",
        )
    return trailer
