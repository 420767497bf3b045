"""Packed objects: fixed bytes, every range as it was, no flipped bit unseen, and nothing that a hostile bucket can do."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing import noise, text

from tiered.errors import DataError, InvalidError
from tiered.format import packed
from tiered.format.dictionary import DICTIONARY_BYTES, pays, train
from tiered.format.packed import build_packed, faults_of, stored_range, unpack_blocks
from tiered.format.object import aligned_range, build_object, parse_trailer
from tiered.format.object import make_trailer

if TYPE_CHECKING:
    from tiered.format.object import SealedObject, Trailer

SAID = {"topic": "t", "count": 3}


def bytes_of(made: SealedObject | None) -> bytes:
    assert made is not None
    data = b"".join(map(bytes, made.buffers))
    assert len(data) == made.size_bytes
    return data


def read(data: bytes, start: int, end: int) -> bytes:
    """A range, as a reader reads it."""
    trailer = parse_trailer(data, where="k")
    low, high = aligned_range(start, end, trailer)
    first, last = stored_range(low, high, trailer)
    return unpack_blocks(data[first:last], low, high, trailer, where="k")[start - low : end - low]


def blocks_of(data: bytes | bytearray, trailer: Trailer) -> bytes | bytearray:
    return data[trailer.trailer_bytes : trailer.stored_bytes]


def test_format_version_2_has_these_bytes():
    payload = b"a" * 300 + noise(1, 40)
    made = build_packed(payload, {"b": 1}, block_bytes=300, level=1)
    data = bytes_of(made)
    frame = zstandard.ZstdCompressor(level=1).compress(b"a" * 300)
    said = b'{"b":1}'
    trailer_bytes = len(said) + 2 * 12 + 16 + 40
    table = struct.pack(">III", len(frame), zlib.crc32(frame), zlib.crc32(b"a" * 300))
    table += struct.pack(">III", 40, zlib.crc32(noise(1, 40)), zlib.crc32(noise(1, 40)))
    sizes = struct.pack(">QII", trailer_bytes + len(frame) + 40, 0, len(said))
    signed = said + table + sizes
    signed += struct.pack(">QIIIIHH", 340, len(signed) - 8, 300, 2, zlib.crc32(payload), 2, 0)
    end = signed + struct.pack(">I", zlib.crc32(signed)) + b"TIEREDOB"
    assert data == end + frame + noise(1, 40) + end
    trailer = parse_trailer(data, where="k")
    assert (trailer.payload_bytes, trailer.payload_crc) == (340, zlib.crc32(payload))
    assert trailer.description == {"b": 1}


def test_version_1_finds_the_checksum_right_and_says_that_it_is_too_old():
    """As programs before compression read a trailer."""
    data = bytes_of(build_packed(text(1, 5000), SAID, block_bytes=512, dictionary=b"x" * 50))
    size, text_size, block, count, _, version, _, crc, magic = struct.unpack(
        ">QIIIIHHI8s", data[-40:]
    )
    start = len(data) - 40 - 4 * count - text_size
    assert start >= 0
    assert count == -(-size // block)
    assert zlib.crc32(data[start : len(data) - 12]) == crc
    assert (version, magic) == (2, b"TIEREDOB")


PAYLOADS = st.builds(
    lambda pieces: b"".join(text(n, size) if n % 3 else noise(n, size) for n, size in pieces),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 700)), min_size=1, max_size=6),
)


@settings(deadline=None, max_examples=80)
@given(PAYLOADS, st.integers(1, 900), st.integers(1, 4), st.booleans(), st.data())
def test_i3_every_range_is_as_it_was(
    payload: bytes, block_bytes: int, level: int, has_dictionary: bool, data: Any
):
    dictionary = text(7, 300) if has_dictionary else b""
    made = build_packed(payload, SAID, block_bytes=block_bytes, level=level, dictionary=dictionary)
    if made is None:
        return
    whole = bytes_of(made)
    trailer = parse_trailer(whole, where="k")
    assert (made.payload_bytes, made.payload_crc) == (len(payload), zlib.crc32(payload))
    assert made.size_bytes < build_object([payload], SAID).size_bytes
    assert trailer.stored_bytes == made.packed_bytes == len(whole) - trailer.trailer_bytes
    assert trailer.description == SAID
    assert read(whole, 0, len(payload)) == payload
    start = data.draw(st.integers(0, len(payload) - 1))
    end = data.draw(st.integers(start + 1, len(payload)))
    assert read(whole, start, end) == payload[start:end]
    assert list(faults_of(blocks_of(whole, trailer), trailer, where="k")) == []
    assert whole.startswith(whole[trailer.stored_bytes :]), "the trailer is there twice"


def test_what_does_not_shrink_is_left_as_it_is():
    assert build_packed(noise(1, 5000), SAID) is None
    assert build_packed(b"", SAID) is None
    mixed = noise(1, 4096) + b"x" * 4096
    data = bytes_of(build_packed(mixed, SAID, block_bytes=1024))
    assert noise(1, 4096) in data, "blocks that do not shrink are stored as they are"
    assert read(data, 0, 8192) == mixed


def test_a_flipped_bit_anywhere_is_found():
    payload = text(1, 1800) + noise(2, 200) + text(3, 200)
    dictionary = text(4, 60)
    data = bytes_of(build_packed(payload, SAID, block_bytes=500, dictionary=dictionary))
    size = parse_trailer(data, where="k").trailer_bytes
    for at in range(
        size * 8, len(data) * 8, 3
    ):  # before are the bytes of the copy, which are compared
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        try:
            trailer = parse_trailer(bytes(flipped), where="k")
        except (DataError, InvalidError):
            continue
        assert list(faults_of(blocks_of(flipped, trailer), trailer, where="k")), at
        with pytest.raises(DataError):
            read(bytes(flipped), 0, len(payload))


def test_a_damaged_block_costs_itself_only():
    payload = text(1, 4096)
    data = bytearray(bytes_of(build_packed(payload, SAID, block_bytes=1024)))
    trailer = parse_trailer(bytes(data), where="k")
    assert trailer.table
    data[trailer.table.starts[1] + 3] ^= 1
    assert read(bytes(data), 0, 1024) == payload[:1024]
    assert read(bytes(data), 2048, 4096) == payload[2048:]
    with pytest.raises(DataError, match=r"bytes \[1024, 2048\)"):
        read(bytes(data), 1000, 1100)


# -- hostile --------------------------------------------------------------------------------------


def forged(
    blocks: list[bytes],
    *,
    payload_bytes: int,
    block_bytes: int = 1024,
    rows: list[tuple[int, int, int]] | None = None,
    count: int | None = None,
    stored_bytes: int | None = None,
    dictionary: bytes = b"",
    dictionary_bytes: int | None = None,
) -> bytes:
    """An object with right checksums that says what it likes."""
    stored = b"".join(blocks)
    rows = [(len(b), zlib.crc32(b), 0) for b in blocks] if rows is None else rows
    signed = dictionary + b"{}" + b"".join(struct.pack(">III", *row) for row in rows)
    trailer_bytes = len(signed) + 16 + 40
    signed += struct.pack(
        ">QII",
        trailer_bytes + len(stored) if stored_bytes is None else stored_bytes,
        len(dictionary) if dictionary_bytes is None else dictionary_bytes,
        2,
    )
    count = len(rows) if count is None else count
    end = make_trailer(signed, (payload_bytes, len(signed) - 4 * count, block_bytes, count, 0), 2)
    return end + stored + end


SMALL = b"y" * 10
BOMB = zstandard.ZstdCompressor().compress(bytes(50_000_000))
SIZELESS = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50_000_000))


@pytest.mark.parametrize(
    "data",
    [
        forged([SMALL], payload_bytes=2**31, block_bytes=2**31),
        forged([SMALL], payload_bytes=2000),
        forged([SMALL], payload_bytes=5),
        forged([SMALL], payload_bytes=10),
        forged([b"", SMALL], payload_bytes=1100),
        forged([SMALL], payload_bytes=1024, stored_bytes=11),
        forged([SMALL], payload_bytes=1024, stored_bytes=2**62),
        forged([SMALL], payload_bytes=1024, dictionary_bytes=2**31),
        forged([SMALL], payload_bytes=1024, dictionary=b"\x37\xa4\x30\xec" + b"x" * 20),
        forged([SMALL] * 1100, payload_bytes=1100 * 2**20, block_bytes=2**20),
    ],
)
def test_a_trailer_that_contradicts_itself_is_damage(data: bytes):
    with pytest.raises(DataError):
        parse_trailer(data, where="k")


@pytest.mark.parametrize("frame", [BOMB, SIZELESS, BOMB[:-3], b"z" * 999])
def test_a_frame_is_unpacked_only_if_it_says_that_it_is_the_block(
    frame: bytes, monkeypatch: pytest.MonkeyPatch
):
    made: list[int] = []
    real = zstandard.ZstdDecompressor

    class Counting:
        def __init__(self, **options: Any) -> None:
            self._inner = real(**options)

        def stream_reader(self, data: bytes) -> Any:
            made.append(len(data))
            return self._inner.stream_reader(data)

    block = max(len(frame) + 1, 4096)
    data = forged([frame], payload_bytes=block, block_bytes=block)
    trailer = parse_trailer(data, where="k")
    monkeypatch.setattr(packed.zstandard, "ZstdDecompressor", Counting)
    with pytest.raises(DataError, match=r"bytes \[0, \d+\)"):
        unpack_blocks(blocks_of(data, trailer), 0, block, trailer, where="k")
    assert made == []


def test_a_frame_that_lies_about_its_size_makes_no_more_than_a_block():
    lies = bytearray(zstandard.ZstdCompressor().compress(bytes(100_000)))
    size_at = 5  # magic 4, descriptor 1, and then 4 bytes of size in a frame of one segment
    assert lies[4] >> 6 == 2
    lies[size_at : size_at + 4] = (1024).to_bytes(4, "little")
    data = forged([bytes(lies)], payload_bytes=1024)
    trailer = parse_trailer(data, where="k")
    with pytest.raises(DataError):
        unpack_blocks(blocks_of(data, trailer), 0, 1024, trailer, where="k")


@given(st.binary(max_size=300), st.binary(max_size=120))
@settings(max_examples=200)
def test_garbage_with_a_right_checksum_is_damage_or_a_trailer(head: bytes, signed: bytes):
    count = len(signed) // 12
    data = head + make_trailer(
        signed, (len(head) * 2, max(len(signed) - 4 * count, 0), 16, count, 0), 2
    )
    try:
        trailer: Trailer = parse_trailer(data, where="k")
    except (DataError, InvalidError):
        return
    assert trailer.table


# -- dictionaries ----------------------------------------------------------------------------------


def test_a_dictionary_is_the_same_for_the_same_bytes_and_pays_for_itself():
    payload = b"".join(text(n, 1000) + noise(n, 100) for n in range(3000))
    dictionary = train(payload)
    assert train(payload) == dictionary
    assert 0 < len(dictionary) <= DICTIONARY_BYTES
    plain = bytes_of(build_packed(payload, SAID))
    helped = bytes_of(build_packed(payload, SAID, dictionary=dictionary))
    assert pays(dictionary, payload) == (len(helped) < len(plain))
    assert read(helped, 1_000_000, 1_200_000) == payload[1_000_000:1_200_000]


def test_no_dictionary_where_nothing_is_to_be_gained():
    assert train(text(1, 1000)) == b""
    assert not pays(b"", text(1, 1000))
    other = noise(1, 1 << 20)
    assert not pays(train(other), other)
    assert not pays(text(1, DICTIONARY_BYTES), text(2, 100_000)), "it is larger than what it saves"
