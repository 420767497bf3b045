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
_WORTH: Final = 16
"""What does not shrink by a sixteenth stays as it is: it costs nothing to read then."""
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
        kept: Buffer = frame if len(frame) < len(block) else block
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


def unpack_blocks(data: Buffer, start: int, end: int, trailer: Trailer, *, where: str) -> bytes:
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
    unpacker = _unpacker(trailer)
    pieces: list[Buffer] = []
    for number, stored in _stored(data, start, end, trailer, where):
        plain = _block(unpacker, number, stored, trailer)
        if isinstance(plain, str):
            raise damaged(_named(number, plain, trailer), where)
        pieces.append(plain)
    return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)


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
    for number, stored in _stored(data, 0, trailer.payload_bytes, trailer, where):
        plain = _block(unpacker, number, stored, trailer)
        if isinstance(plain, str):
            yield _named(number, plain, trailer)


def _unpacker(trailer: Trailer) -> zstandard.ZstdDecompressor:
    """One for each call: it is not for several threads at once."""
    assert trailer.table is not None
    known = trailer.table.dictionary
    return zstandard.ZstdDecompressor(dict_data=known) if known else zstandard.ZstdDecompressor()


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


def _block(
    unpacker: zstandard.ZstdDecompressor, number: int, stored: memoryview, trailer: Trailer
) -> Buffer | str:
    """A block as it was, or what is wrong with it. zstd makes room for what a frame says, so that is looked at first."""
    assert trailer.table is not None
    if zlib_ng.crc32(stored) != trailer.table.crcs[number]:
        return "fail their checksum"
    size = min(trailer.block_bytes, trailer.payload_bytes - number * trailer.block_bytes)
    plain: Buffer = stored
    if len(stored) != size:
        try:
            if zstandard.frame_content_size(stored) != size:
                return "are not what their frame says"
            plain = unpacker.decompress(stored, max_output_size=size, allow_extra_data=False)
        except (zstandard.ZstdError, MemoryError) as error:
            return f"cannot be unpacked ({error})"
    if zlib_ng.crc32(plain) != trailer.block_crcs[number]:
        return "fail their checksum when unpacked"
    return plain


def _named(number: int, what: str, trailer: Trailer) -> str:
    low = number * trailer.block_bytes
    return f"bytes [{low}, {min(low + trailer.block_bytes, trailer.payload_bytes)}) {what}"
