"""What a review of reading packed objects has found, and every way to read every range."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packing import noise, text
from zlib_ng import zlib_ng

from backends.errors import ShortReadError
from backends.memory import MemoryStore
from tiered.errors import DataError
from tiered.format import packed
from tiered.format.packed import build_packed
from tiered.format.object import parse_trailer
from tiered.format.object import make_trailer
from tiered.log import objects
from tiered.log.objects import plan_range, read_planned, read_range, read_trailer
from tiered.log.parts import ObjectRange

if TYPE_CHECKING:
    from tiered.format.object import SealedObject

MIB = 1 << 20
KEY = "k"


def put(store: MemoryStore, made: SealedObject | None, key: str = KEY) -> ObjectRange:
    """Store an object; its place, as a journal names it."""
    assert made is not None
    store.put_if_absent(key, made.buffers)
    size = made.payload_bytes
    return ObjectRange(key, 0, size, size, made.trailer_bytes, made.payload_crc, made.packed_bytes)


@pytest.mark.parametrize("whole_bytes", [0, 256 * 1024])
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4000), st.integers(1, 600), st.booleans(), st.data())
def test_every_way_gives_every_range(
    whole_bytes: int, size: int, block_bytes: int, mixed: bool, data: st.DataObject
):
    payload = (noise(1, size // 3) + text(2, size - size // 3)) if mixed else b"ab" * size
    made = build_packed(payload, {"a": 1}, block_bytes=block_bytes)
    if made is None:
        return
    store = MemoryStore()
    place = put(store, made)
    start = data.draw(st.integers(0, len(payload) - 1))
    end = data.draw(st.integers(start + 1, len(payload)))
    known = read_trailer(store, "", place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "WHOLE_AT_ONCE_BYTES", whole_bytes)
        for one in (None, known):
            found = read_planned(place, start, end, store.get_ranges, where="", known=one)
            assert bytes(found[0]) == payload[start:end]
        assert bytes(read_range(store, "", place, start, end)) == payload[start:end]


def bomb(payload_bytes: int, block_bytes: int) -> SealedObject:
    """Zeros: a thousandth of them is stored."""
    assert payload_bytes % block_bytes == 0
    count = payload_bytes // block_bytes
    block = bytes(block_bytes)
    frame = zstandard.ZstdCompressor().compress(block)
    row = packed._ENTRY.pack(len(frame), zlib_ng.crc32(frame), zlib_ng.crc32(block))
    trailer_bytes = 2 + 12 * count + 16 + 40
    stored_bytes = trailer_bytes + len(frame) * count
    signed = b"{}" + row * count + packed._SIZES.pack(stored_bytes, 0, 2)
    fields = (payload_bytes, len(signed) - 4 * count, block_bytes, count, 7)
    trailer = make_trailer(signed, fields, 2)
    assert len(trailer) == trailer_bytes
    return packed.SealedObject(
        [trailer, *[frame] * count, trailer], payload_bytes, 7, trailer_bytes, stored_bytes
    )


def test_one_record_of_a_small_object_that_says_it_is_huge_takes_a_block_or_two():
    store = MemoryStore()
    place = put(store, bomb(256 * MIB, MIB))
    assert place.object_bytes < 64 * 1024
    tracemalloc.start()
    try:
        data, _ = read_planned(place, MIB - 5, MIB + 5, store.get_ranges, where="")
        held_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bytes(data) == bytes(10)
    assert held_bytes < 8 * MIB
    assert memoryview(data.obj).nbytes <= 2 * MIB


def test_the_trailer_of_another_object_of_that_name_is_not_believed():
    """A hostile journal may name one object twice, with other sizes."""
    store = MemoryStore()
    place = put(store, build_packed(text(1, 4000), {}, block_bytes=500))
    known = read_trailer(store, "", place)
    other = replace(place, end=9000, payload_bytes=9000)
    with pytest.raises(DataError):
        read_planned(other, 8000, 9000, store.get_ranges, where="", known=known)
    plain = replace(other, packed_bytes=0)
    with pytest.raises(ShortReadError):
        read_planned(plain, 8000, 9000, store.get_ranges, where="", known=known)
    assert plan_range(place, 0, 1, where="", known=known).known is known


def test_plain_trailer_for_a_packed_place_and_the_other_way_round():
    store = MemoryStore()
    place = put(store, build_packed(text(1, 4000), {}, block_bytes=500))
    for wrong in (
        replace(place, packed_bytes=0),
        replace(place, packed_bytes=place.packed_bytes - 1),
        replace(place, packed_bytes=1),
        replace(place, trailer_bytes=place.trailer_bytes + 1),
        replace(place, trailer_bytes=40),
        replace(place, payload_bytes=place.payload_bytes + 1, end=place.end + 1),
    ):
        with pytest.raises(DataError):
            read_range(store, "", wrong, 0, 100)
    data = bytes(store.get(KEY))
    assert parse_trailer(data, where=KEY).payload_bytes == place.payload_bytes
