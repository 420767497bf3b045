"""Reads ranges of data objects and checks every byte that it hands out.

Retries and errors: nothing is retried here. Whatever contradicts the journal (other size, other checksum, a block that
fails) is a ``DataError``, and nothing of the range is returned. A damaged block costs only the ranges that touch it; a
damaged trailer alone costs no message: the journal knows the checksum of the payload, which is then read whole; and a
packed object (``tiered.format.packed``) has it twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zlib_ng import zlib_ng

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ShortReadError
from tiered.errors import DataError
from tiered.format.packed import stored_range, unpack_blocks
from tiered.format.part import (
    BLOCK_BYTES,
    FOOTER_BYTES,
    Trailer,
    aligned_range,
    check_blocks,
    parse_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import ObjectStore
    from tiered.log.state import ObjectRange

TRAILER_BYTES_MAX = 8 * 1024 * 1024
"""A larger trailer would be that of an object of 100 GiB."""
WHOLE_BYTES_MAX = 1024 * 1024 * 1024
"""No object that is larger is read whole, whatever the journal says; ours have some hundred MiB at most."""
WHOLE_AT_ONCE_BYTES = 256 * 1024
"""A packed object of this size is read whole rather than with two requests, one after the other."""


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
        known: The object's trailer, if ``ranges`` leave it out.
        is_first: The trailer alone is read, since only it says where the blocks are: ``check`` is not for this one, but
            for a plan made with that trailer.
    """

    place: ObjectRange
    start: int
    end: int
    low: int
    high: int
    ranges: tuple[ByteRange, ...]
    known: Trailer | None = None
    is_first: bool = False

    def check(
        self, pieces: Sequence[bytes | memoryview], *, where: str
    ) -> tuple[memoryview, Trailer]:
        """The bytes wanted, from what was read.

        Args:
            pieces: The bytes of ``ranges``.
            where: Key of the object, for messages.

        Raises:
            DataError: They are damaged, or cannot be checked without the rest (``read_range`` reads it).
        """
        assert not self.is_first
        data = memoryview(pieces[0])
        blocks_bytes = self.high - self.low
        if self.known is not None:
            blocks_bytes = len(data)
        elif self.place.is_packed:
            blocks_bytes = self.place.stored_bytes - self.place.trailer_bytes
        behind = [*pieces[1:], data[blocks_bytes:]]
        tail = bytes(behind[0])
        trailer = check_trailer(tail, self.place, where=where) if tail else self.known
        if trailer is None:
            raise _another(where)
        stored, low, high = data[:blocks_bytes], self.low, self.high
        if trailer.table is not None and self.known is None:  # all are here: unpack the few wanted
            low, high = aligned_range(self.start, self.end, trailer)
            first, last = (at - trailer.trailer_bytes for at in stored_range(low, high, trailer))
            stored = stored[first:last]
        blocks = _plain(stored, low, high, trailer, where)
        return blocks[self.start - low : self.end - low], trailer


def _plain(data: memoryview, low: int, high: int, trailer: Trailer, where: str) -> memoryview:
    """Whole blocks of a payload, checked, from what is stored of them."""
    if trailer.table is not None:
        return unpack_blocks(data, low, high, trailer, where=where)
    if trailer.block_bytes != BLOCK_BYTES:
        raise _another(where)
    check_blocks(data, low, trailer, where=where)
    return data


def plan_range(
    place: ObjectRange, start: int, end: int, *, where: str, known: Trailer | None = None
) -> RangePlan:
    """Plan to read bytes ``[start, end)`` of an object's payload.

    Args:
        place: The object, as the journal names it.
        start: First byte.
        end: One past the last.
        where: Prefix of the broker, for messages.
        known: The object's trailer, if the caller has it.

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
    if known is not None and not _is_of(known, place):
        known = None  # the journal names two objects by one key
    if place.is_packed:
        return _plan_packed(place, start, end, known)
    low = start // BLOCK_BYTES * BLOCK_BYTES
    high = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, place.payload_bytes)
    trailer = ByteRange(place.payload_bytes, place.object_bytes)
    if known is not None:
        ranges: tuple[ByteRange, ...] = (ByteRange(low, high),)
    elif high == place.payload_bytes:
        ranges = (ByteRange(low, place.object_bytes),)
    else:
        ranges = (ByteRange(low, high), trailer)
    return RangePlan(place, start, end, low, high, ranges, known)


def _plan_packed(place: ObjectRange, start: int, end: int, known: Trailer | None) -> RangePlan:
    """Where the blocks are the trailer says; without it, it is read first, or all is read at once."""
    if known is not None and known.table is not None:
        low, high = aligned_range(start, end, known)
        stored = ByteRange(*stored_range(low, high, known))
        return RangePlan(place, start, end, low, high, (stored,), known)
    is_most = 2 * (end - start) >= place.payload_bytes or place.object_bytes <= WHOLE_AT_ONCE_BYTES
    if is_most and place.payload_bytes <= WHOLE_BYTES_MAX:
        whole = ByteRange(place.trailer_bytes, place.object_bytes)  # without the trailer's copy
        return RangePlan(place, start, end, 0, place.payload_bytes, (whole,))
    trailer = ByteRange(place.stored_bytes, place.object_bytes)
    return RangePlan(place, start, end, start, end, (trailer,), is_first=True)


def plan_trailer(place: ObjectRange, *, where: str) -> RangePlan | None:
    """Plan to read the trailer of a packed object ahead; None when pieces of the object are read without it.

    Raises:
        DataError: The journal contradicts itself.
    """
    if place.object_bytes <= WHOLE_AT_ONCE_BYTES or place.start >= place.end:
        return None
    plan = plan_range(place, place.start, place.start + 1, where=where)
    return plan if plan.is_first else None


def read_planned(
    place: ObjectRange,
    start: int,
    end: int,
    get: Callable[[str, Sequence[ByteRange]], Sequence[bytes | memoryview]],
    *,
    where: str,
    known: Trailer | None = None,
) -> tuple[memoryview, Trailer]:
    """Read and check as planned: with one step of requests, or two if the trailer has to come first.

    Args:
        place: The object, as the journal names it.
        start: First byte.
        end: One past the last.
        get: Reads ranges of an object.
        where: Prefix of the broker.
        known: The object's trailer, if the caller has it.

    Returns:
        The bytes, and the object's trailer.

    Raises:
        DataError: As of ``plan_range`` and ``RangePlan.check``.
        BackendError: It could not be read.
    """
    plan = plan_range(place, start, end, where=where, known=known)
    key = where + place.key
    if plan.is_first:
        known = check_trailer(get(key, plan.ranges)[0], place, where=key)
        plan = plan_range(place, start, end, where=where, known=known)
    return plan.check(get(key, plan.ranges), where=key)


def read_range(
    store: ObjectStore, prefix: str, place: ObjectRange, start: int, end: int
) -> memoryview:
    """Read bytes ``[start, end)`` of an object's payload, checked block by block.

    One request: the whole object when most of it is wanted, else the blocks around the range and the trailer. Of a packed
    object the trailer comes first, in a request of its own. What fails its check is read once more: with a sound trailer
    only that range, else the whole object.

    Raises:
        DataError: The object is damaged there; nothing of it is returned.
        BackendError: It could not be read (``ObjectNotFoundError``: it is gone).
    """
    plan = plan_range(place, start, end, where=prefix)
    key = prefix + place.key
    if 2 * (plan.high - plan.low) >= place.payload_bytes:
        return _from_whole(store, key, place, start, end)
    try:
        return read_planned(place, start, end, store.get_ranges, where=prefix)[0]
    except (InvalidRangeError, ShortReadError):
        return _from_whole(store, key, place, start, end)
    except DataError:
        known = _sound_trailer(store, key, place)
    if known is None:
        return _from_whole(store, key, place, start, end)
    # A block is damaged, or was on its way: the rest of the object would say nothing more of it.
    return read_planned(place, start, end, store.get_ranges, where=prefix, known=known)[0]


def _sound_trailer(store: ObjectStore, key: str, place: ObjectRange) -> Trailer | None:
    """The trailer, read by itself; None when it is damaged, or not where the journal says."""
    try:
        tail = store.get(key, ByteRange(place.stored_bytes, place.object_bytes))
        return check_trailer(tail, place, where=key)
    except (InvalidRangeError, ShortReadError, DataError):
        return None


def _from_whole(
    store: ObjectStore, key: str, place: ObjectRange, start: int, end: int
) -> memoryview:
    """Read the whole object; check the blocks wanted, or all by the journal's checksum if the trailer is damaged.

    Without its trailer nobody can tell where the blocks of a packed object are, so it begins with a copy.
    """
    whole = memoryview(_whole(store, key, place))
    stored, tail = whole[: place.stored_bytes], whole[place.stored_bytes :]
    try:
        trailer = check_trailer(bytes(tail), place, where=key)
    except DataError:
        if place.is_packed:
            trailer = check_trailer(bytes(whole[: place.trailer_bytes]), place, where=key)
        elif len(stored) == place.payload_bytes and zlib_ng.crc32(stored) == place.crc:
            return stored[start:end]
        elif store.head(key).size_bytes != place.object_bytes:
            raise _another(key) from None
        else:
            raise
    low, high = aligned_range(start, end, trailer)
    if trailer.table is not None:
        first, last = stored_range(low, high, trailer)
        blocks = unpack_blocks(stored[first:last], low, high, trailer, where=key)
        return blocks[start - low : end - low]
    check_blocks(stored[low:high], low, trailer, where=key)
    return stored[start:end]


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
    tail = store.get(key, ByteRange(place.stored_bytes, place.object_bytes))
    return check_trailer(tail, place, where=key)


def check_trailer(tail: bytes | memoryview, place: ObjectRange, *, where: str) -> Trailer:
    """Parse what lies behind an object's payload and hold it against the journal.

    Raises:
        DataError: The trailer is damaged, or the object is not the one that the journal names.
    """
    trailer = parse_trailer(bytes(tail), where=where)
    if len(tail) != place.trailer_bytes or not _is_of(trailer, place):
        raise _another(where)
    return trailer


def _is_of(trailer: Trailer, place: ObjectRange) -> bool:
    """Whether it is the trailer of the object that the journal names."""
    found = (trailer.payload_bytes, trailer.stored_bytes, trailer.trailer_bytes)
    wanted = (place.payload_bytes, place.stored_bytes, place.trailer_bytes)
    is_packed = trailer.table is not None
    return (*found, trailer.payload_crc, is_packed) == (*wanted, place.crc, place.is_packed)


def _another(where: str) -> DataError:
    return DataError(
        "the object is not the one that the journal names (size or checksum differ)",
        where=where,
        do="run `tiered verify --deep` to see the extent of the damage",
    )
