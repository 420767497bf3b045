"""Data objects whose payload is stored in compressed blocks, so that ranges of it can be read.

Format version 2 of a data object (``tiered.format.part`` is version 1). Layout (big-endian)::

    offset          size   field
    0               T      a copy of the trailer, all of what is from S on
    T               S-T    stored blocks, one after another, without a space between them
    S               K      dictionary (RFC 8878), for the frames of this object; may be empty
    S+K             D      description, as in version 1
    S+K+D           12·B   block table, for each block of `block_bytes` of the payload, the last one short:
                      0  4   uint32  stored_size: as large as the block itself: stored as it is; smaller: one zstd frame
                      4  4   uint32  stored_crc  CRC-32 of the stored bytes
                      8  4   uint32  block_crc   CRC-32 of the block as it was
    …               16     sizes:
                      0  8   uint64  stored_bytes (S)
                      8  4   uint32  dictionary_size (K)
                     12  4   uint32  description_size (D)
    …               40     footer: as in version 1, but for
                      8  4   uint32  K + D + 8·B + 16, so that a program that knows only version 1 finds the checksum right
                     24  2   uint16  format_version (2)

``payload_size``, ``payload_crc`` and ``block_count`` speak of the payload as it was: a reader thinks in those positions, and
the table says where a block is stored. A frame bears its content size and no window beyond it, and is decoded by itself.

Without the table nothing of the object could be read, so it is there twice, at both ends: what damages one of them costs
nothing (``tiered.log.objects`` reads the copy).

Bounds (I8): a bucket may hold anything, with right checksums. A block has at most ``BLOCK_BYTES_MAX``, a frame is decoded
only if it says that it holds exactly its block, and the table is as long as the bytes that were read of it; so a reader
never holds more than the range that it asked for. Whatever contradicts itself is a ``DataError``.
"""

from __future__ import annotations

import json
import struct
from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zstandard
from typing_extensions import Buffer
from zlib_ng import zlib_ng

from tiered.format.trailer import (
    FOOTER_BYTES,
    PACKED_VERSION,
    BlockTable,
    Head,
    SealedObject,
    Trailer,
    damaged,
    make_trailer,
    read_description,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


BLOCK_BYTES: Final = 128 * 1024
"""A reader of one record unpacks so much. With a dictionary larger blocks gain nothing, and smaller ones take longer to
unpack (docs/performance.md)."""
BLOCK_BYTES_MAX: Final = 1024 * 1024
PAYLOAD_BYTES_MAX: Final = 1024 * 1024 * 1024
"""A few MiB of stored bytes could claim to be terabytes; ours have 32 MiB, or one large part."""
DICTIONARY_BYTES_MAX: Final = 1024 * 1024
LEVEL: Final = 3
LEVEL_MAX: Final = 19
"""Beyond it zstd takes memory that nobody has reckoned with."""
_WORTH: Final = 8
"""What does not shrink by an eighth, a block or an object, stays as it is: it costs nothing to read then."""
_WINDOW_BYTES_MAX: Final = 2 * BLOCK_BYTES_MAX
_ENTRY: Final = struct.Struct(">III")
_SIZES: Final = struct.Struct(">QII")


def build_packed(
    payload: Buffer,
    description: Mapping[str, Any],
    *,
    level: int = LEVEL,
    dictionary: bytes = b"",
    block_bytes: int = BLOCK_BYTES,
) -> SealedObject | None:
    """Make a packed object.

    Args:
        payload: As it is.
        description: As for ``build_object``.
        level: Of zstd.
        dictionary: From ``tiered.format.dictionary``, or nothing.
        block_bytes: Bytes of the payload in a block, any number.

    Returns:
        None when it is not worth it: store the payload as it is.
    """
    view = memoryview(payload).cast("B")
    if len(view) > PAYLOAD_BYTES_MAX:
        return None
    packer = _packer(level, dictionary)
    stored: list[Buffer] = []
    rows: list[tuple[int, int, int]] = []
    for block in _blocks(view, block_bytes):
        frame = packer.compress(block)
        is_worth = len(frame) * _WORTH <= len(block) * (_WORTH - 1)
        kept: Buffer = frame if is_worth else block
        stored.append(kept)
        rows.append((len(memoryview(kept)), zlib_ng.crc32(kept), zlib_ng.crc32(block)))
    text = json.dumps(description, separators=(",", ":"), sort_keys=True).encode()
    head = dictionary + text + b"".join(_ENTRY.pack(*row) for row in rows)
    trailer_bytes = len(head) + _SIZES.size + FOOTER_BYTES
    stored_bytes = trailer_bytes + sum(row[0] for row in rows)
    plain_bytes = len(view) + len(text) + 4 * len(rows) + FOOTER_BYTES  # as version 1 would have it
    if (stored_bytes + trailer_bytes) * _WORTH > plain_bytes * (_WORTH - 1):
        return None
    signed = head + _SIZES.pack(stored_bytes, len(dictionary), len(text))
    crc = zlib_ng.crc32(view)
    fields = (len(view), len(signed) - 4 * len(rows), block_bytes, len(rows), crc)
    trailer = make_trailer(signed, fields, PACKED_VERSION)
    return SealedObject([trailer, *stored, trailer], len(view), crc, len(trailer), stored_bytes)


def _packer(level: int, dictionary: bytes) -> zstandard.ZstdCompressor:
    if not dictionary:
        return zstandard.ZstdCompressor(level=level)
    known = zstandard.ZstdCompressionDict(dictionary)
    known.precompute_compress(level=level)
    return zstandard.ZstdCompressor(level=level, dict_data=known, write_dict_id=False)


def _blocks(view: memoryview, block_bytes: int) -> Iterator[memoryview]:
    for start in range(0, len(view), block_bytes):
        yield view[start : start + block_bytes]


def parse_packed(signed: bytes, head: Head, trailer_bytes: int, *, where: str) -> Trailer:
    """Read the trailer of a packed object; called by ``parse_trailer``, which has checked its checksum.

    Args:
        signed: Everything before the footer.
        head: Fields of the footer: payload size, size of the rest, block size and count, CRC of the payload.
        trailer_bytes: Size of the whole trailer.
        where: Key of the object, for messages.

    Raises:
        DataError: It contradicts itself.
    """
    payload_bytes, _, block_bytes, count, payload_crc = head
    sane = block_bytes <= BLOCK_BYTES_MAX and payload_bytes <= PAYLOAD_BYTES_MAX
    if len(signed) < _SIZES.size or not sane:
        raise damaged("the trailer of a packed object is none", where)
    stored_bytes, dictionary_bytes, text_bytes = _SIZES.unpack(signed[-_SIZES.size :])
    table_at = dictionary_bytes + text_bytes
    if (
        table_at + _ENTRY.size * count + _SIZES.size != len(signed)
        or dictionary_bytes > DICTIONARY_BYTES_MAX
    ):
        raise damaged("the sizes in the trailer contradict each other", where)
    rows = list(_ENTRY.iter_unpack(signed[table_at : -_SIZES.size]))
    starts = tuple(accumulate((row[0] for row in rows), initial=trailer_bytes))
    last = payload_bytes - block_bytes * (count - 1)
    fits = all(0 < row[0] <= block_bytes for row in rows) and (not rows or rows[-1][0] <= last)
    if not fits or starts[-1] != stored_bytes or stored_bytes >= payload_bytes:
        raise damaged("the block table contradicts the sizes in the trailer", where)
    return Trailer(
        payload_bytes,
        trailer_bytes,
        block_bytes,
        tuple(row[2] for row in rows),
        payload_crc,
        read_description(signed[dictionary_bytes:table_at], where),
        BlockTable(
            array("Q", starts),
            array("I", (row[1] for row in rows)),
            _dictionary(signed[:dictionary_bytes], where),
            dictionary_bytes,
        ),
    )


def _dictionary(data: bytes, where: str) -> zstandard.ZstdCompressionDict | None:
    if not data:
        return None
    try:
        found = zstandard.ZstdCompressionDict(data)
        zstandard.ZstdDecompressor(dict_data=found)  # takes it in: what is none fails here
    except (zstandard.ZstdError, MemoryError) as error:
        raise damaged(f"the dictionary is none: {error}", where) from error
    return found


def stored_range(start: int, end: int, trailer: Trailer) -> tuple[int, int]:
    """Where the blocks are stored that hold ``[start, end)`` of the payload; both at borders of blocks, or the end."""
    assert trailer.table is not None
    starts, block = trailer.table.starts, trailer.block_bytes
    return starts[start // block], starts[-(-end // block)]


def unpack_blocks(
    data: Buffer, start: int, end: int, trailer: Trailer, *, where: str
) -> memoryview:
    """The payload of whole blocks, checked before and after decoding.

    Args:
        data: The bytes of ``stored_range``.
        start: Where the first of the blocks begins in the payload.
        end: Where the last one ends.
        trailer: Of the object.
        where: Key of the object, for messages.

    Raises:
        DataError: A block is damaged, or no frame of exactly its size; the message says which bytes of the payload are
            lost.
    """
    room = _room(end - start)
    unpacker = _unpacker(trailer)
    for number, stored in _stored(data, start, end, trailer, where):
        low = number * trailer.block_bytes - start
        fault = _unpack(unpacker, number, stored, trailer, room[low : low + trailer.block_bytes])
        if fault:
            raise damaged(_named(number, fault, trailer), where)
    return room


def _room(size: int) -> memoryview:
    """New memory that nobody has filled with zeros."""
    return np.empty(size, np.uint8).data


def faults_of(data: Buffer, trailer: Trailer, *, where: str) -> Iterator[str]:
    """What is wrong with the blocks of a whole object, for people.

    Args:
        data: Its stored blocks.
        trailer: Of the object.
        where: Key of the object, for messages.
    """
    assert trailer.table is not None
    if len(memoryview(data)) != trailer.table.stored_bytes - trailer.trailer_bytes:
        yield "the stored blocks are not as many bytes as the trailer says"
        return
    unpacker = _unpacker(trailer)
    room = _room(min(trailer.block_bytes, trailer.payload_bytes))
    for number, stored in _stored(data, 0, trailer.payload_bytes, trailer, where):
        size = min(trailer.block_bytes, trailer.payload_bytes - number * trailer.block_bytes)
        fault = _unpack(unpacker, number, stored, trailer, room[:size])
        if fault:
            yield _named(number, fault, trailer)


def _unpacker(trailer: Trailer) -> zstandard.ZstdDecompressor:
    """One for each call: it is not for several threads at once."""
    assert trailer.table is not None
    known = trailer.table.dictionary
    if known is None:
        return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    return zstandard.ZstdDecompressor(dict_data=known, max_window_size=_WINDOW_BYTES_MAX)


def _stored(
    data: Buffer, start: int, end: int, trailer: Trailer, where: str
) -> Iterator[tuple[int, memoryview]]:
    """Number and stored bytes of each block."""
    assert trailer.table is not None
    view, starts, block = memoryview(data).cast("B"), trailer.table.starts, trailer.block_bytes
    first, stop = start // block, -(-end // block)
    if len(view) != starts[stop] - starts[first]:
        raise damaged("the stored blocks are cut short", where)
    for number in range(first, stop):
        low = starts[number] - starts[first]
        yield number, view[low : low + starts[number + 1] - starts[number]]


def _unpack(
    unpacker: zstandard.ZstdDecompressor,
    number: int,
    stored: memoryview,
    trailer: Trailer,
    room: memoryview,
) -> str:
    """Fill ``room`` with a block as it was; what is wrong with it, or nothing.

    A frame is decoded straight to its place, and only if it says that it fits exactly: so zstd needs no memory of its own.
    """
    assert trailer.table is not None
    if zlib_ng.crc32(stored) != trailer.table.crcs[number]:
        return "fail their checksum"
    if len(stored) == len(room):
        room[:] = stored
    else:
        try:
            if zstandard.frame_content_size(stored) != len(room):
                return "are not what their frame says"
            with unpacker.stream_reader(stored) as reader:
                if reader.readinto(room) != len(room):
                    return "cannot be unpacked (the frame is cut short)"
        except (zstandard.ZstdError, MemoryError) as error:
            return f"cannot be unpacked ({error})"
    if zlib_ng.crc32(room) != trailer.block_crcs[number]:
        return "fail their checksum when unpacked"
    return ""


def _named(number: int, what: str, trailer: Trailer) -> str:
    low = number * trailer.block_bytes
    return f"bytes [{low}, {min(low + trailer.block_bytes, trailer.payload_bytes)}) {what}"
