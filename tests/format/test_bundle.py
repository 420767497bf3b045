"""Sections and bundles: what is built reads back; a flipped bit is found and costs its block; sizes that lie are refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from zlib_ng import zlib_ng

from tiered.errors import DataError, InvalidError, OtherVersionError
from tiered.format import bundle
from tiered.format.bundle import (
    BLOCK_BYTES,
    FOOTER_BYTES,
    PACKED_BLOCK_BYTES,
    SECTION_ROW,
    SPARSE_COUNT_MAX,
    SPARSE_ITEM,
    RecordsUnpacker,
    Section,
    SectionBlocks,
    SectionPlace,
    SectionTable,
    build_packed_section,
    build_section,
    build_sections,
    build_tail,
    check_section,
    dense_items,
    find_table,
    pack_table,
    read_table,
    tail_bytes,
    unpack_table,
)
from tiered.log.parts import PART
from tiered.log.sections import split_section

WHERE = "bundle/0/1"
SIZES = (0, 1, 100, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * PACKED_BLOCK_BYTES + 17)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def text(size: int, seed: int = 0) -> bytes:
    words = [b"order", b"paid", b"sent", b"4711", b"broker"]
    rng = random.Random(seed)
    return b" ".join(rng.choice(words) for _ in range(size // 4 + 1))[:size]


def bytes_of(section: Section) -> bytes:
    return b"".join(map(bytes, section.buffers))


def blocks_of(data: bytes, place: SectionPlace) -> SectionBlocks:
    return SectionBlocks.parse(data[place.table_at : place.size_bytes], place, where=WHERE)


def flip(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def packed(records: bytes, items: bytes, dictionary: bytes = b"") -> Section:
    found = build_packed_section(records, items, dictionary=dictionary)
    assert found is not None
    return found


def records_by_ranges(data: bytes, place: SectionPlace, start: int, end: int) -> bytes:
    """Bytes ``[start, end)`` of the records, as a reader of ranges gets them: the table, the dictionary, whole blocks."""
    blocks = blocks_of(data, place)
    low, high = blocks.records_range(start, end)
    stored = data[low:high]
    blocks.check(stored, low, where=WHERE)
    first = start // place.block_bytes * place.block_bytes
    stop = min(-(-end // place.block_bytes) * place.block_bytes, place.records_bytes)
    if place.is_packed:
        dictionary = data[place.stored_bytes : place.items_at]
        blocks.check(dictionary, place.stored_bytes, where=WHERE)
        stored = bytes(RecordsUnpacker(blocks, dictionary, where=WHERE).unpack(stored, first, stop))
    return stored[start - first : end - first]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 50, 3277, 9000])
def test_a_plain_section_reads_back_whole_and_by_ranges(size: int, count: int):
    records, items = noise(size), noise(20 * count, 1)
    section = build_section([records[:7], records[7:]], items)
    data, place = bytes_of(section), section.place
    assert data[:size] == records
    assert data[place.items_at : place.table_at] == items
    assert len(data) == place.size_bytes
    place.check(where=WHERE)
    check_section(data, place, where=WHERE)
    blocks_of(data, place)
    if size:
        assert records_by_ranges(data, place, size // 2, size) == records[size // 2 :]


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([0, 1, 700, 65_535, 65_536, 65_537, 140_000]), max_size=3),
            st.sampled_from([1, 2, 3_276, 3_277, 9_000]),
        ),
        max_size=5,
    )
)
@settings(max_examples=60)
def test_sections_of_a_bundle_are_those_that_are_made_one_by_one(
    sections: list[tuple[list[int], int]],
):
    records = [[noise(size, number) for number, size in enumerate(sizes)] for sizes, _ in sections]
    counts = [count for _, count in sections]
    items = [noise(20 * count, count) for count in counts]
    buffers, rows = build_sections(records, b"".join(items), counts)
    start, wanted = 0, b""
    for number, (some, listed) in enumerate(zip(records, items, strict=True)):
        one = build_section(some, listed)
        place = SectionTable(["t"], rows).place(number)
        assert place == replace(one.place, start=start)
        start += place.size_bytes
        wanted += bytes_of(one)
    assert b"".join(bytes(memoryview(buffer)) for buffer in buffers) == wanted


@pytest.mark.parametrize("dictionary", [b"", text(2000, 9)])
@pytest.mark.parametrize("size", [5_000, PACKED_BLOCK_BYTES, 3 * PACKED_BLOCK_BYTES + 17])
def test_a_packed_section_reads_back_by_ranges(size: int, dictionary: bytes):
    records, items = text(size), noise(20 * 4000, 1)
    section = packed(records, items, dictionary)
    data, place = bytes_of(section), section.place
    place.check(where=WHERE)
    check_section(data, place, where=WHERE)
    assert place.stored_bytes < size
    assert place.dictionary_bytes == len(dictionary)
    assert data[place.items_at : place.table_at] == items
    for start, end in ((0, size), (size - 1, size), (size // 2, size // 2 + 100)):
        assert records_by_ranges(data, place, start, end) == records[start:end]


def test_a_block_that_does_not_shrink_is_stored_as_it_is():
    records = text(2 * PACKED_BLOCK_BYTES) + noise(PACKED_BLOCK_BYTES)
    section = packed(records, noise(20))
    blocks = blocks_of(bytes_of(section), section.place)
    assert int(blocks.starts[3] - blocks.starts[2]) == PACKED_BLOCK_BYTES
    assert records_by_ranges(bytes_of(section), section.place, 0, len(records)) == records


def test_what_does_not_shrink_is_not_packed():
    assert build_packed_section(noise(50_000), noise(20)) is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_flipped_bit_of_a_section_is_found(data: st.DataObject):
    """Whole by the journal's checksum; by ranges, in the block that it lies in or in the table."""
    size = data.draw(st.sampled_from([100, BLOCK_BYTES + 5, 2 * PACKED_BLOCK_BYTES + 5]))
    is_packed = data.draw(st.booleans())
    section = (
        packed(text(size), noise(100)) if is_packed else build_section([text(size)], noise(100))
    )
    good, place = bytes_of(section), section.place
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    bad = flip(good, bit)
    if bit // 8 < place.table_at:
        with pytest.raises(DataError):
            check_section(bad, place, where=WHERE)
        blocks = blocks_of(bad, place)
        number = int(np.searchsorted(blocks.starts, bit // 8, side="right")) - 1
        for other in range(len(blocks.crcs)):
            low, high = int(blocks.starts[other]), int(blocks.starts[other + 1])
            if other == number:
                with pytest.raises(DataError, match="fail their checksum"):
                    blocks.check(bad[low:high], low, where=WHERE)
            else:  # it costs nothing else
                blocks.check(bad[low:high], low, where=WHERE)
    else:
        check_section(bad, place, where=WHERE)
        with pytest.raises(DataError, match="block table"):
            blocks_of(bad, place)


def test_sizes_that_contradict_each_other_are_refused():
    place = build_section([noise(1000)], noise(40)).place
    wrong = (
        SectionPlace(0, 1001, 1001, 2, place.size_bytes, place.crc),
        SectionPlace(0, 1000, 1000, 3, place.size_bytes, place.crc),
        SectionPlace(0, 1000, 1001, 2, place.size_bytes, place.crc),
        SectionPlace(0, 1000, 996, 2, place.size_bytes, place.crc),
        SectionPlace(0, 1000, 1000, 2, place.size_bytes + 1, place.crc),
    )
    for one in wrong:
        with pytest.raises(DataError, match="contradict"):
            one.check(where=WHERE)


def table_of(count: int, seed: int = 0) -> SectionTable:
    """Of sections of random sizes that lie one after another."""
    rng = np.random.default_rng(seed)
    rows = np.zeros(count, SECTION_ROW)
    for name in SECTION_ROW.names:
        low, high = (-1, 2**40) if SECTION_ROW[name].kind == "i" else (0, 2**31)
        rows[name] = rng.integers(low, high, count)
    rows["topic"] = np.sort(rng.integers(0, 3, count))
    rows["holes"] = rows["count"] // 2
    rows["gone"] = rows["log_gone"] = 0 if seed % 2 else rows["holes"] // 2
    rows["start"] = np.cumsum(rows["size_bytes"], dtype=np.uint64) - rows["size_bytes"]
    return SectionTable(["Orders", "%RETRY%g", "ünï"], rows)


def build_bundle(table: SectionTable) -> bytes:
    """Table and footer."""
    return build_tail(table, pack_table(table))


def whole(table: SectionTable) -> int:
    return int(table.rows["size_bytes"].astype(np.uint64).sum())


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_the_table_of_a_bundle_reads_back(count: int):
    table = table_of(count)
    tail = build_bundle(table)
    size = whole(table) + len(tail)
    assert tail_bytes(tail[-FOOTER_BYTES:], where=WHERE) == len(tail)
    found = read_table(tail, size, where=WHERE)
    assert (found.topics, found.rows.tolist()) == (table.topics, table.rows.tolist())
    with pytest.raises(DataError, match="longer or shorter"):
        read_table(tail, size + 1, where=WHERE)


def test_any_flipped_bit_of_a_table_or_footer_is_found():
    table = table_of(3)
    tail = build_bundle(table)
    for bit in range(8 * len(tail)):
        with pytest.raises((DataError, InvalidError)):
            read_table(flip(tail, bit), whole(table) + len(tail), where=WHERE)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**40))
def test_anything_in_place_of_a_bundle_is_damage(data: bytes, size: int):
    with pytest.raises(DataError):
        read_table(data, size, where=WHERE)


def resealed(footer: bytearray) -> bytes:
    signed = bytes(footer[: FOOTER_BYTES - 8])
    return signed + zlib_ng.crc32(signed).to_bytes(4, "big") + bundle.MAGIC


def test_a_newer_version_is_said_to_be_newer():
    tail = build_bundle(table_of(3))
    footer = bytearray(tail[-FOOTER_BYTES:])
    footer[21] = 3
    with pytest.raises(InvalidError, match="format version 3"):
        tail_bytes(resealed(footer), where=WHERE)


@pytest.mark.parametrize("column", ["topic", "start", "holes", "size_bytes"])
def test_rows_that_contradict_each_other_are_refused(column: str):
    table = table_of(3)
    size = whole(table)
    table.rows[column][1] = 2**32 - 1
    tail = build_bundle(table)
    # The checksum of the table holds; but an object of another size than its sections have was cut, or something was added.
    with pytest.raises(DataError if column == "size_bytes" else OtherVersionError):
        read_table(tail, size + len(tail), where=WHERE)


def test_a_table_that_claims_to_be_huge_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
):
    table = table_of(1000)
    tail = build_bundle(table)
    monkeypatch.setattr(bundle, "TABLE_BYTES_MAX", 1000)
    with pytest.raises(OtherVersionError, match="claims to have"):
        read_table(tail, whole(table) + len(tail), where=WHERE)


def test_a_small_table_does_not_claim_to_be_a_large_one():
    """Seven KiB that an entry names, or that end a bundle, do not become 200 MiB."""
    packed = zstandard.compress(bytes(200 << 20))
    assert len(packed) < 32 << 10
    with pytest.raises(DataError, match="claims to have"):
        unpack_table(packed, where=WHERE)


# -- without what is damaged ----------------------------------------------------------------------


@pytest.mark.parametrize("dictionary", [b"", text(2000, 9)])
@pytest.mark.parametrize("size", [5_000, PACKED_BLOCK_BYTES, 3 * PACKED_BLOCK_BYTES + 17])
def test_the_blocks_are_found_without_the_block_table(size: int, dictionary: bytes):
    records = (
        text(size) + text(2 * PACKED_BLOCK_BYTES) + noise(PACKED_BLOCK_BYTES)
    )  # frames, and as it is
    for section in (packed(records, noise(4000), dictionary), build_section([records], noise(40))):
        data, place = bytes_of(section), section.place
        found = SectionBlocks.walked(data[: place.table_at], place, where=WHERE)
        wanted = blocks_of(data, place)
        assert found.starts.tolist() == wanted.starts.tolist()
        assert found.crcs.tolist() == wanted.crcs.tolist()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 3 * PACKED_BLOCK_BYTES))
def test_walking_anything_is_damage_or_blocks_of_that_size(data: bytes, size: int):
    """A right checksum proves no good will: nothing is unpacked, and nothing allocated by what frames claim."""
    magic = b"\x28\xb5\x2f\xfd\x20"
    for stored in (data, magic + data):
        if len(stored) >= size:
            continue
        blocks = -(-size // PACKED_BLOCK_BYTES) + 1
        whole = len(stored) + 20 + 8 * blocks
        place = SectionPlace(0, size, len(stored), 1, whole, 0)
        try:
            found = SectionBlocks.walked(stored + bytes(20), place, where=WHERE)
        except DataError:
            continue
        assert int(found.starts[-1]) == place.table_at
        assert len(found.crcs) == blocks


def test_frames_end_where_their_headers_say():
    """Frames of many inner blocks, of one repeated byte, and with a checksum: the walk goes by RFC 8878, not by ours."""
    for content in (bytes(PACKED_BLOCK_BYTES), text(PACKED_BLOCK_BYTES), text(70_000)):
        for has_checksum in (False, True):
            packer = zstandard.ZstdCompressor(level=1, write_checksum=has_checksum)
            frame = packer.compress(content)
            assert bundle._frame_bytes(memoryview(frame + b"behind"), len(content)) == len(frame)
            assert bundle._frame_bytes(memoryview(frame[:-1]), len(content)) == 0
            assert bundle._frame_bytes(memoryview(frame), len(content) + 1) == 0


def test_a_table_is_found_when_the_footer_is_damaged():
    sections = [build_section([noise(50, n)], noise(20)) for n in range(3)]
    table = table_of(3)
    table.rows["size_bytes"] = [section.place.size_bytes for section in sections]
    table.rows["start"] = bundle._starts(table.rows["size_bytes"])
    data = b"".join(map(bytes_of, sections)) + build_bundle(table)
    for at in range(1, FOOTER_BYTES + 1):
        bad = flip(data, 8 * (len(data) - at))
        with pytest.raises((DataError, InvalidError)):
            read_table(bad, len(bad), where=WHERE)
        whole_size = len(bad)
        ends = (bad, whole_size), (bad[whole(table) :], whole_size), (bad[:-at], whole_size - at)
        for some, size in ends:
            found = find_table(some, size, 0, where=WHERE)
            assert found.rows.tolist() == table.rows.tolist()


def test_a_table_that_is_damaged_itself_is_not_found():
    table = table_of(3)
    tail = build_bundle(table)
    for bit in range(8 * (len(tail) - FOOTER_BYTES)):
        bad = flip(tail, bit)
        try:
            found = find_table(bad, whole(table) + len(tail), 0, where=WHERE)
        except DataError:
            continue
        assert found.rows.tolist() == table.rows.tolist()  # a bit that means nothing to zstd


# -- golden bytes ---------------------------------------------------------------------------------

GOLDEN_SECTION = (
    "7265636f72647321"  # records
    "000102030405060708090a0b0c0d0e0f10111213"  # one item
    "0148862e3bddffa4"  # CRC-32 of each of the two blocks
)
GOLDEN_PACKED = (
    "28b52ffd20c84d00001061620100c3288705"  # 200 bytes of records, "abab...", as one zstd frame
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2021222324252627"  # two items
    "00000012626a7857"  # the frame's size, and its CRC-32
    "00000028" "0da62e3c"  # the items' block
)  # fmt: skip
GOLDEN_TAIL = (
    "28b52ffd24c5950300c4040000000200064f72646572730005c3bc6ec3af000100000003000000040001f40003e80007004602"
    "010000018bcfe56800ff01deadbeef2400000008000000c8124a156e22a4d4fc02490001100037b358c98767a00a9c00b99939e0"
    "32827c57650646038303c781d9cc10c04006c0048ba008d9"  # the table, a zstd frame
    "000000000000006e"  # sections_bytes
    "0000007f" "00000002" "c0bf2a81"  # table_bytes, sections, table_crc
    "0001" "0001" "d29d7922" "5442444c"  # version, level, footer_crc, magic
)  # fmt: skip
GOLDEN_ROWS = [
    (0, 3, 0, 0, 0, 7, 1, 0, 1_700_000_000_000, 1_700_000_000_001, 0xDEADBEEF, 0, 8, 8, 36, 359539364, 0, 0, 0),
    (1, 4, 1, 500, 1000, 70, 2, 1, -1, -1, 0, 36, 200, 18, 74, 3573285449, 1, 0, 0),
]  # fmt: skip


def test_golden_bytes_of_a_plain_section():
    """The format, byte for byte: what has been written once is read for ever."""
    section = build_section([b"records!"], bytes(range(20)))
    assert bytes_of(section).hex() == GOLDEN_SECTION
    assert section.place == SectionPlace(0, 8, 8, 1, 36, 359539364)
    assert section.place.crc == zlib_ng.crc32(bytes_of(section)[:28])


def test_golden_bytes_of_a_packed_section():
    """Only read: another version of zstd may compress to other bytes."""
    data, place = bytes.fromhex(GOLDEN_PACKED), SectionPlace(0, 200, 18, 2, 74, 3573285449)
    assert len(data) == place.size_bytes
    place.check(where=WHERE)
    check_section(data, place, where=WHERE)
    assert records_by_ranges(data, place, 0, 200) == b"ab" * 100
    assert data[place.items_at : place.table_at] == bytes(range(40))


def test_golden_bytes_of_a_table_and_footer():
    tail = bytes.fromhex(GOLDEN_TAIL)
    assert tail_bytes(tail[-FOOTER_BYTES:], where=WHERE) == len(tail)
    table = read_table(tail, 36 + 74 + len(tail), where=WHERE)
    assert (table.topics, table.rows.tolist(), table.level) == (["Orders", "ünï"], GOLDEN_ROWS, 1)
    made = build_tail(table, tail[:-FOOTER_BYTES])
    assert made == tail


def test_the_page_of_the_format_has_the_programs_columns():
    page = (Path(__file__).parents[2] / "docs/formats/bundles.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| (u?int\d+) \|", page, re.MULTILINE)
    assert found == [(name, SECTION_ROW[name].name) for name in SECTION_ROW.names]


def test_the_page_of_the_journal_has_the_programs_columns():
    page = (Path(__file__).parents[2] / "docs/formats/journal.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+) \| (u?int\d+) \|", page, re.MULTILINE)
    found = [(name, kind) for names, kind in rows for name in re.findall(r"\w+", names)]
    assert found == [*((name, PART[name].name) for name in PART.names), ("bundle", "uint32")]


# -- sparse sections ------------------------------------------------------------------------------

GONE = (b"\x00" * 19) + b"\x05"


def items_of(stays: list[bool]) -> bytes:
    """Items of which some were compacted away."""
    return b"".join(
        (number + 1).to_bytes(8, "big") + b"\x00\x00\x00\x07" + bytes(7) + b"\x61" if kept else GONE
        for number, kept in enumerate(stays)
    )


@given(stays=st.lists(st.booleans(), min_size=1, max_size=300), packs=st.booleans())
def test_items_that_are_gone_are_not_stored_and_read_as_holes(stays: list[bool], packs: bool):
    items, records = items_of(stays), text(3000)
    build = build_packed_section if packs else build_section
    section = build(records if packs else [records], items, may_be_sparse=True)
    assert section is not None
    place = section.place
    place.check(where=WHERE)
    stored = sum(stays[:-1]) + 1
    assert place.gone == (len(stays) - stored if 24 * stored < 20 * len(stays) else 0)
    data = bytes_of(section)
    assert len(data) == place.size_bytes
    assert split_section(data, place, where=WHERE) == (records, items)
    assert len(data[place.items_at : place.table_at]) == place.stored_items_bytes
    blocks_of(data, place).check(data, 0, where=WHERE)


def test_golden_bytes_of_sparse_items():
    section = build_section([b""], items_of([False, True, False, False]), may_be_sparse=True)
    assert bytes_of(section)[:48].hex() == (
        "00000001" "0000000000000002" "00000007" "0000000000000061"
        "00000003" "0000000000000000" "00000000" "0000000000000005"
    )  # fmt: skip
    assert (section.place.gone, section.place.count) == (2, 4)


@pytest.mark.parametrize(
    "numbers",
    [(1, 2), (3, 1), (1, 1), (1, 9)],
    ids=["not the last", "descending", "twice", "outside"],
)
def test_sparse_items_that_contradict_themselves_are_refused(numbers: tuple[int, int]):
    stored = np.zeros(2, SPARSE_ITEM)
    stored["number"] = numbers
    place = SectionPlace(0, 0, 0, 4, 52, 0, 2)
    with pytest.raises(DataError, match="sparse items"):
        dense_items(stored.tobytes(), place, where=WHERE)


def test_few_bytes_do_not_claim_to_be_many_items():
    count = SPARSE_COUNT_MAX + 1
    with pytest.raises(DataError, match="contradict"):
        SectionPlace(0, 0, 0, count, 28, 0, count - 1).check(where=WHERE)


def test_a_table_without_a_sparse_section_is_that_of_version_1():
    plain, sparse = table_of(3, seed=1), table_of(3)
    sizes = [int.from_bytes(build_bundle(table)[-12:-10], "big") for table in (plain, sparse)]
    assert sizes == [1, 2]
    for table in (plain, sparse):
        tail = build_bundle(table)
        found = read_table(tail, whole(table) + len(tail), where=WHERE)
        assert found.rows.tolist() == table.rows.tolist()
