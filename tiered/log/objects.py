"""Reads ranges of data objects and checks every byte that it hands out.

Retries and errors: nothing is retried here. Whatever contradicts the journal (other size, other checksum, a block that
fails) is a ``DataError``, and nothing of the range is returned. A damaged block costs only the ranges that touch it; a
damaged trailer alone costs no message: the journal knows the checksum of the payload, which is then read whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zlib_ng import zlib_ng

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ShortReadError
from tiered.errors import DataError
from tiered.format.part import (
    BLOCK_BYTES,
    FOOTER_BYTES,
    Trailer,
    aligned_range,
    check_blocks,
    parse_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore
    from tiered.log.state import ObjectRange

TRAILER_BYTES_MAX = 8 * 1024 * 1024
"""A larger trailer would be that of an object of 100 GiB."""
WHOLE_BYTES_MAX = 1024 * 1024 * 1024
"""No object that is larger is read whole, whatever the journal says; ours have some hundred MiB at most."""


@dataclass(frozen=True, slots=True)
class RangePlan:
    """Which bytes of an object are read so that a range of its payload can be had and checked.

    Attributes:
        place: The object.
        start: First byte of the payload wanted.
        end: One past the last.
        low: Where the blocks around them begin.
        high: Where they end.
        ranges: What is read: the blocks, with the trailer where it follows at once; else the trailer by itself, unless
            it is known.
    """

    place: ObjectRange
    start: int
    end: int
    low: int
    high: int
    ranges: tuple[ByteRange, ...]

    def check(
        self, pieces: Sequence[bytes | memoryview], known: Trailer | None, *, where: str
    ) -> tuple[memoryview, Trailer]:
        """The bytes wanted, from what was read.

        Args:
            pieces: The bytes of ``ranges``.
            known: The object's trailer, if ``ranges`` leave it out.
            where: Key of the object, for messages.

        Raises:
            DataError: They are damaged, or cannot be checked without the rest (``read_range`` reads it).
        """
        data = memoryview(pieces[0])
        behind = [*pieces[1:], data[self.high - self.low :]]
        tail = bytes(behind[0])
        trailer = check_trailer(tail, self.place, where=where) if tail else known
        if trailer is None or trailer.block_bytes != BLOCK_BYTES:
            raise _another(where)
        blocks = data[: self.high - self.low]
        check_blocks(blocks, self.low, trailer, where=where)
        return blocks[self.start - self.low : self.end - self.low], trailer


def plan_range(
    place: ObjectRange, start: int, end: int, *, where: str, has_trailer: bool = False
) -> RangePlan:
    """Plan to read bytes ``[start, end)`` of an object's payload.

    Args:
        place: The object, as the journal names it.
        start: First byte.
        end: One past the last.
        where: Prefix of the broker, for messages.
        has_trailer: The caller knows the object's trailer.

    Raises:
        DataError: The journal contradicts itself.
    """
    if not (
        0 <= place.start <= start < end <= place.end <= place.payload_bytes
        and FOOTER_BYTES <= place.trailer_bytes <= TRAILER_BYTES_MAX
    ):
        raise DataError(
            f"the journal names bytes [{start}, {end}) of an object that has not so many",
            where=where + place.key,
            do="run `tiered verify` to see what is damaged",
        )
    low = start // BLOCK_BYTES * BLOCK_BYTES
    high = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, place.payload_bytes)
    trailer = ByteRange(place.payload_bytes, place.object_bytes)
    if has_trailer:
        ranges: tuple[ByteRange, ...] = (ByteRange(low, high),)
    elif high == place.payload_bytes:
        ranges = (ByteRange(low, place.object_bytes),)
    else:
        ranges = (ByteRange(low, high), trailer)
    return RangePlan(place, start, end, low, high, ranges)


def read_range(
    store: ObjectStore, prefix: str, place: ObjectRange, start: int, end: int
) -> memoryview:
    """Read bytes ``[start, end)`` of an object's payload, checked block by block.

    One request: the whole object when most of it is wanted, else the blocks around the range and the trailer.

    Raises:
        DataError: The object is damaged there; nothing of it is returned.
        BackendError: It could not be read (``ObjectNotFoundError``: it is gone).
    """
    plan = plan_range(place, start, end, where=prefix)
    key = prefix + place.key
    if 2 * (plan.high - plan.low) >= place.payload_bytes:
        return _from_whole(store, key, place, start, end)
    try:
        return plan.check(store.get_ranges(key, plan.ranges), None, where=key)[0]
    except (InvalidRangeError, ShortReadError, DataError):
        return _from_whole(store, key, place, start, end)


def _from_whole(
    store: ObjectStore, key: str, place: ObjectRange, start: int, end: int
) -> memoryview:
    """Read the whole object; check the blocks wanted, or all by the journal's checksum if the trailer is damaged."""
    whole = memoryview(_whole(store, key, place))
    payload, tail = whole[: place.payload_bytes], whole[place.payload_bytes :]
    try:
        trailer = check_trailer(bytes(tail), place, where=key)
    except DataError:
        if len(payload) == place.payload_bytes and zlib_ng.crc32(payload) == place.crc:
            return payload[start:end]
        if store.head(key).size_bytes != place.object_bytes:
            raise _another(key) from None
        raise
    low, high = aligned_range(start, end, trailer)
    check_blocks(payload[low:high], low, trailer, where=key)
    return payload[start:end]


def _whole(store: ObjectStore, key: str, place: ObjectRange) -> bytes:
    """All bytes of an object that the journal knows of; fewer when it is shorter, never more."""
    if place.object_bytes > WHOLE_BYTES_MAX:
        raise DataError(
            f"an object of {place.object_bytes} bytes would have to be read whole",
            where=key,
            do="run `tiered verify` to see what is damaged",
        )
    try:
        return store.get(key, ByteRange(0, place.object_bytes))
    except (InvalidRangeError, ShortReadError):
        size = store.head(key).size_bytes
    return store.get(key, ByteRange(0, min(size, place.object_bytes))) if size > 0 else b""


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
        raise _another(where)
    return trailer


def _another(where: str) -> DataError:
    return DataError(
        "the object is not the one that the journal names (size or checksum differ)",
        where=where,
        do="run `tiered verify --deep` to see the extent of the damage",
    )
