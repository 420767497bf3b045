"""Asks the bloom filters of a Parquet file whether a row group can hold a text. Pure.

Parquet's filter is the split-block one: blocks of eight 32-bit words, one bit of each word for a value, chosen by the 64-bit
xxHash (seed 0) of its bytes. A header in Thrift's compact form stands before the bits.
"""

from __future__ import annotations

import struct
from typing import Any

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_PRIME_1 = 0x9E37_79B1_85EB_CA87
_PRIME_2 = 0xC2B2_AE3D_27D4_EB4F
_PRIME_3 = 0x1656_67B1_9E37_79F9
_PRIME_4 = 0x85EB_CA77_C2B2_AE63
_PRIME_5 = 0x27D4_EB2F_1656_67C5
_SALTS = (
    *(0x47B6_137B, 0x4497_4D91, 0x8824_AD5B, 0xA2B7_289D),
    *(0x7054_95C7, 0x2DF1_424B, 0x9EFC_4947, 0x5C6B_FB31),
)
_STRIPE = 32
_LONG, _INT = 8, 4
BLOCK = 32
"""Bytes of a block."""
_HEADER_BEGIN = b"\x15"
_HEADER_END = b"\x1c\x1c\x00\x00" * 3 + b"\x00"
"""The size is field 1; then three unions, each with its first member, an empty struct: split blocks, xxHash, not packed."""
_SIZE_BYTES_MAX = 6


def xxh64(data: bytes) -> int:
    """The 64-bit xxHash of bytes, seed 0."""
    size, at = len(data), 0
    if size >= _STRIPE:
        lanes = [(_PRIME_1 + _PRIME_2) & _MASK, _PRIME_2, 0, -_PRIME_1 & _MASK]
        while at <= size - _STRIPE:
            words = struct.unpack_from("<4Q", data, at)
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += _STRIPE
        turns = zip(lanes, (1, 7, 12, 18), strict=True)
        found = sum(_turned(lane, bits) for lane, bits in turns) & _MASK
        for lane in lanes:
            found = ((found ^ _round(0, lane)) * _PRIME_1 + _PRIME_4) & _MASK
    else:
        found = _PRIME_5
    return _mixed(_rest(data, at, (found + size) & _MASK))


def _rest(data: bytes, at: int, found: int) -> int:
    """What is behind the last whole stripe."""
    size = len(data)
    while at <= size - _LONG:
        (word,) = struct.unpack_from("<Q", data, at)
        found = (_turned(found ^ _round(0, word), 27) * _PRIME_1 + _PRIME_4) & _MASK
        at += _LONG
    if at <= size - _INT:
        (word,) = struct.unpack_from("<I", data, at)
        found = (_turned(found ^ (word * _PRIME_1 & _MASK), 23) * _PRIME_2 + _PRIME_3) & _MASK
        at += _INT
    for byte in data[at:]:
        found = _turned(found ^ (byte * _PRIME_5 & _MASK), 11) * _PRIME_1 & _MASK
    return found


def _mixed(found: int) -> int:
    found = (found ^ found >> 33) * _PRIME_2 & _MASK
    found = (found ^ found >> 29) * _PRIME_3 & _MASK
    return found ^ found >> 32


def _round(lane: int, word: int) -> int:
    return _turned((lane + word * _PRIME_2) & _MASK, 31) * _PRIME_1 & _MASK


def _turned(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def can_hold(raw: bytes | memoryview, text: str) -> bool:
    """Whether a row group may hold a text in the column that a filter is of.

    Args:
        raw: The filter as it lies in the file, header and bits.
        text: What is looked for.

    Returns:
        False only when it does not. A filter of another kind says nothing.
    """
    bits = _bits(bytes(raw))
    if not bits:
        return True
    found = text_hash(text)
    at = block_number(found, len(bits) // BLOCK) * BLOCK
    return block_holds(bits[at : at + BLOCK], found)


def text_hash(text: str) -> int:
    """What decides about a text."""
    return xxh64(text.encode("utf-8", "replace"))


def block_number(found: int, blocks: int) -> int:
    """Which block of a filter of ``blocks`` speaks of a hash."""
    return ((found >> 32) * blocks) >> 32


def block_holds(block: bytes | memoryview, found: int) -> bool:
    """Whether that block has all bits of a hash."""
    low = found & 0xFFFF_FFFF
    chosen = (1 << ((low * salt & 0xFFFF_FFFF) >> 27) for salt in _SALTS)
    return all(word & bit for word, bit in zip(struct.unpack("<8I", block), chosen, strict=True))


def _bits(raw: bytes) -> bytes:
    """What is behind a header that we know and that says how much this is; else nothing."""
    start, end, tail = raw.partition(_HEADER_END)
    if not end or start[:1] != _HEADER_BEGIN or not 1 < len(start) <= _SIZE_BYTES_MAX:
        return b""
    size = sum((byte & 0x7F) << 7 * at for at, byte in enumerate(start[1:])) >> 1
    return tail if size == len(tail) and size % BLOCK == 0 else b""


# -- where the filters lie -------------------------------------------------------------------------
#
# Where the bloom filters of keys lie in a Parquet file, so that single blocks of them can be read. Pure.

COLUMNS = ("uniq_key", "keys.list.element")
"""Those whose filters are asked; ``msg_key`` is the text that ``keys`` are divided from."""
_HEADER_MAX = 64


def filters_of(group: Any) -> list[tuple[int, int] | None]:  # noqa: ANN401 (pyarrow has no types)
    """Where the bits of a row group's filters of ``COLUMNS`` lie, first byte and bytes; None: it has none to be asked."""
    chunks = (group.column(number) for number in range(group.num_columns))
    found = {chunk.path_in_schema: chunk for chunk in chunks}
    return [_bits_of(found.get(name)) for name in COLUMNS]


def _bits_of(chunk: Any) -> tuple[int, int] | None:  # noqa: ANN401
    """The filters of our writer have a power of two of bytes, and a short header before them."""
    start = chunk and chunk.bloom_filter_offset
    length = chunk and chunk.bloom_filter_length
    if not start or not length:
        return None
    bits = 1 << (int(length).bit_length() - 1)
    header = length - bits
    return (start + header, bits) if bits >= BLOCK and 0 < header <= _HEADER_MAX else None
