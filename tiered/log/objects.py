"""Reads ranges of data objects and checks every byte that it hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.base import ByteRange, ObjectStore
from tiered.errors import DataError
from tiered.format.part import BLOCK_BYTES, Trailer, aligned_range, check_blocks, parse_trailer

if TYPE_CHECKING:
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
    key = prefix + place.key
    low, high = start // BLOCK_BYTES * BLOCK_BYTES, -(-end // BLOCK_BYTES) * BLOCK_BYTES
    high = min(high, place.payload_bytes)
    if 2 * (high - low) >= place.payload_bytes:
        whole = memoryview(store.get(key))
        trailer = _trailer(bytes(whole[place.payload_bytes :]), place, key)
        data, low, high = whole[: place.payload_bytes], 0, place.payload_bytes
    else:
        tail_range = ByteRange(place.payload_bytes, place.object_bytes)
        piece, tail = store.get_ranges(key, [ByteRange(low, high), tail_range])
        trailer = _trailer(tail, place, key)
        data = memoryview(piece)
    if aligned_range(low, high, trailer) != (low, high):
        raise DataError(f"the object has blocks of {trailer.block_bytes} bytes", where=key)
    check_blocks(data, low, trailer, where=key)
    return data[start - low : end - low]


def read_trailer(store: ObjectStore, prefix: str, place: ObjectRange) -> Trailer:
    """What the object says of itself."""
    key = prefix + place.key
    tail = store.get(key, ByteRange(place.payload_bytes, place.object_bytes))
    return _trailer(tail, place, key)


def _trailer(tail: bytes, place: ObjectRange, key: str) -> Trailer:
    trailer = parse_trailer(tail, where=key)
    if (trailer.payload_bytes, trailer.payload_crc) != (place.payload_bytes, place.crc):
        raise DataError(
            "the object is not the one that the journal names (size or checksum differ)",
            where=key,
            do="run `tiered verify --deep` to see the extent of the damage",
        )
    return trailer
