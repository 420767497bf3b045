"""Data objects: fixed bytes, and no flipped bit that goes unseen."""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from tiered.errors import DataError, OtherVersionError
from tiered.format.object import (
    FOOTER_BYTES,
    build_object,
    parse_trailer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHUNKS = st.lists(st.binary(max_size=40), max_size=8)
BLOCKS = st.integers(1, 50)
SAID = {"topic": "t", "count": 3}


def whole(
    chunks: Sequence[Buffer], block_bytes: int = 16, said: Mapping[str, object] = SAID
) -> tuple[bytes, int]:
    made = build_object(chunks, said, block_bytes=block_bytes)
    data = b"".join(made.buffers)
    assert len(data) == made.size_bytes
    return data, made.payload_bytes


def crcs_of(payload: bytes, block_bytes: int) -> tuple[int, ...]:
    starts = range(0, len(payload), block_bytes)
    return tuple(zlib.crc32(payload[at : at + block_bytes]) for at in starts)


def test_format_version_1_has_these_bytes():
    data, _ = whole([b"hello ", b"world"], 8, {"b": 1, "a": "\udcff"})
    text = b'{"a":"\\udcff","b":1}'
    head = (
        (11).to_bytes(8, "big") + len(text).to_bytes(4, "big") + (8).to_bytes(4, "big")
        + (2).to_bytes(4, "big") + zlib.crc32(b"hello world").to_bytes(4, "big") + b"\0\1\0\0"
    )  # fmt: skip
    crcs = zlib.crc32(b"hello wo").to_bytes(4, "big") + zlib.crc32(b"rld").to_bytes(4, "big")
    signed = text + crcs + head
    assert data == b"hello world" + signed + zlib.crc32(signed).to_bytes(4, "big") + b"TIEREDOB"
    assert data.hex() == (
        "68656c6c6f20776f726c647b2261223a225c7564636666222c2262223a317d7a2d60052ba3e4c600"
        "0000000000000b0000001400000008000000020d4a118500010000bc104a095449455245444f42"
    )


@given(CHUNKS, BLOCKS)
def test_an_object_describes_and_proves_itself(chunks: Sequence[Buffer], block_bytes: int):
    data, size = whole(chunks, block_bytes)
    trailer = parse_trailer(data, where="k")
    payload = b"".join(chunks)
    assert data[:size] == payload
    assert (trailer.payload_bytes, trailer.block_bytes) == (len(payload), block_bytes)
    assert trailer.payload_crc == zlib.crc32(payload)
    assert trailer.trailer_bytes == len(data) - size
    assert dict(trailer.description) == SAID
    assert trailer.block_crcs == crcs_of(payload, block_bytes)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=10), BLOCKS)
def test_where_buffers_end_changes_nothing(payload: bytes, cuts: list[int], block_bytes: int):
    edges = sorted({0, len(payload), *(cut for cut in cuts if cut < len(payload))})
    chunks = [memoryview(payload)[a:b] for a, b in itertools.pairwise(edges)]
    assert whole(chunks, block_bytes) == whole([payload], block_bytes)


@given(CHUNKS, BLOCKS, st.data())
def test_one_flipped_bit_anywhere_is_found(
    chunks: Sequence[Buffer], block_bytes: int, draw: st.DataObject
):
    data, size = whole(chunks, block_bytes)
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    bad = bytearray(data)
    bad[bit // 8] ^= 1 << bit % 8
    if bit >= 8 * size:
        with pytest.raises(DataError):
            parse_trailer(bytes(bad[size:]), where="k")
        return
    trailer = parse_trailer(bytes(bad[size:]), where="k")
    found = crcs_of(bytes(bad[:size]), block_bytes)
    unlike = [at for at, crc in enumerate(trailer.block_crcs) if crc != found[at]]
    assert unlike == [bit // 8 // block_bytes]
    assert trailer.payload_crc != zlib.crc32(bad[:size])


def test_every_bit_of_a_trailer_matters():
    data, size = whole([b"x" * 40])
    for bit in range(8 * size, 8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataError):
            parse_trailer(bytes(bad), where="k")


def test_a_newer_version_is_told_from_a_damaged_one():
    data, _ = whole([b"x"])
    newer = bytearray(data)
    newer[-15] = 3
    with pytest.raises(DataError):
        parse_trailer(bytes(newer), where="k")
    start = parse_trailer(data, where="k").payload_bytes
    newer[-12:-8] = zlib.crc32(newer[start:-12]).to_bytes(4, "big")
    with pytest.raises(OtherVersionError, match="format version 3"):
        parse_trailer(bytes(newer), where="k")


@pytest.mark.parametrize("cut", [0, 1, FOOTER_BYTES - 1, FOOTER_BYTES, FOOTER_BYTES + 3])
def test_a_cut_trailer_is_damage(cut: int):
    data, _ = whole([b"x" * 99])
    with pytest.raises(DataError):
        parse_trailer(data[len(data) - cut :], where="k")
    with pytest.raises(DataError):
        parse_trailer(data[:-1], where="k")
