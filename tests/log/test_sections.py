"""Ranges of sections: the true bytes, with as few requests as stated; and what one flipped bit costs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bundles import put_bundle
from support.edges import finds, near_edges, planted, ranges_near_edges
from support.journals import PREFIX
from support.merging import noise, text

from backends.errors import ObjectNotFoundError, ShortReadError
from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.errors import DataError
from tiered.format import bundle
from tiered.format.bundle import (
    BLOCK_BYTES,
    PACKED_BLOCK_BYTES,
    SectionBlocks,
    build_packed_section,
    build_section,
)
from tiered.log import sections
from tiered.log.bundles import SectionRow
from tiered.log.parts import Bundle
from tiered.log.sections import (
    plan_ranges,
    read_part,
    read_planned,
    read_range,
    read_ranges,
)
from tiered.model import MessageQueue

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tiered.log.parts import Part

KEY = "bundle/0/made-so"
SIZES = (0, 1, 5000, 70_000, 300_000, 700_000)


class Sections:
    """A bundle of three sections, of which the one in the middle is looked at."""

    def __init__(self, size: int, count: int, *, packed: bool) -> None:
        self.records, self.items = text(1, size), noise(2, 20 * count)
        around = build_section([noise(3, 99)], noise(4, 20))
        made = None
        if packed and size:
            dictionary = text(9, 5000) if size > 5000 else b""
            made = build_packed_section(self.records, self.items, dictionary=dictionary)
        made = made or build_section([self.records], self.items)
        self.memory = MemoryStore()
        rows = [(SectionRow(MessageQueue("t", n), 0, 0, 0, 0, 0, 5, 6), around) for n in range(3)]
        rows[1] = (rows[1][0], made)
        named = put_bundle(self.memory, PREFIX + KEY, rows)
        part = named.parts[1]
        self.part: Part = replace(part, bundle=Bundle(KEY, part.bundle.size_bytes))

    def wanted(self, of_items: bool, start: int, end: int) -> bytes:
        return (self.items if of_items else self.records)[start:end]

    def flip(self, position: int) -> None:
        """A bit of the section, by its position in it."""
        data = bytearray(self.memory.get(PREFIX + KEY))
        data[self.part.section.start + position] ^= 4
        self.memory.delete(PREFIX + KEY)
        self.memory.put_if_absent(PREFIX + KEY, bytes(data))


def any_ranges_are_right(size: int, count: int, packed: bool, draw: st.DataObject) -> None:
    """Whatever is asked of a section; reading it whole would not show where its blocks end."""
    made = Sections(size, count, packed=packed)
    part = made.part
    assert [bytes(one) for one in read_part(made.memory, PREFIX, part)] == [
        made.records,
        made.items,
    ]
    wants, expected = [], []
    for _ in range(draw.draw(st.integers(1, 4))):
        of_items = draw.draw(st.booleans())
        most = len(made.items if of_items else made.records)
        block = part.section.block_bytes if not of_items else BLOCK_BYTES
        low, high = draw.draw(ranges_near_edges(most, block))
        wants.append((part.index if of_items else part.log).part_of(low, high))
        expected.append(made.wanted(of_items, low, high))
    assert [bytes(one) for one in read_ranges(made.memory, PREFIX, wants)] == expected


ANY_SECTION = {
    "size": st.sampled_from(SIZES) | near_edges(0, 10 * PACKED_BLOCK_BYTES, BLOCK_BYTES),
    "count": st.sampled_from((1, 300, 3276, 3277, 16_383, 16_384, 16_385, 20_000)),
    "packed": st.booleans(),
    "draw": st.data(),
}
"""Of 20 bytes each 16,384 items end where five blocks do."""


@settings(deadline=None, max_examples=80)
@given(**ANY_SECTION)
def test_i3_any_ranges_are_the_bytes_that_were_written(
    size: int, count: int, packed: bool, draw: st.DataObject
):
    any_ranges_are_right(size, count, packed, draw)


def _items_end_early(want: Any) -> tuple[int, int]:
    place = want.place
    low = place.items_at + want.start // BLOCK_BYTES * BLOCK_BYTES
    return low, min(
        place.items_at + -(-(want.end - 1) // BLOCK_BYTES) * BLOCK_BYTES, place.table_at
    )


def _packed_records_end_early(blocks: Any, start: int, end: int) -> tuple[int, int]:
    block = blocks.place.block_bytes
    stop = -(-(end - 1) // block)
    return int(blocks.starts[start // block]), int(blocks.starts[stop])


def _plain_records_begin_late(want: Any, known: Any) -> tuple[int, int]:
    place = want.place
    if want.of_items or known is not None:
        return STORED(want, known)
    block = place.block_bytes
    low = (want.start + 1) // block * block
    return low, min(-(-want.end // block) * block, place.records_bytes)


STORED = sections._stored
DEFECTS = {
    "items end a block too early": (sections, "_item_blocks", _items_end_early),
    "packed records end a block too early": (
        SectionBlocks,
        "records_range",
        _packed_records_end_early,
    ),
    "plain records begin a block too late": (sections, "_stored", _plain_records_begin_late),
    "a full block counts twice": (
        bundle,
        "_blocks",
        lambda size, block=BLOCK_BYTES: size // block + 1,
    ),
}
"""Each is wrong for one place in 65,536 only: that of an edge, or one beside it."""


@pytest.mark.parametrize("name", DEFECTS)
def test_a_reader_that_is_wrong_at_an_edge_is_found(name: str):
    with planted(*DEFECTS[name]):
        assert finds(any_ranges_are_right, **ANY_SECTION)


@pytest.mark.parametrize("packed", [False, True])
def test_a_small_section_is_read_with_one_range_of_exactly_its_bytes(packed: bool):
    part = Sections(5000, 10, packed=packed).part
    place = part.section
    assert place.is_packed == packed
    (asked,) = plan_ranges([part.index.part_of(0, 20)], where=PREFIX).ranges
    assert asked.start == place.start
    assert asked.end <= place.start + place.size_bytes


def test_a_range_of_a_large_plain_section_costs_its_blocks_and_the_block_table():
    made = Sections(700_000, 300, packed=False)
    place = made.part.section
    plan = plan_ranges([made.part.log.part_of(200_000, 200_100)], where=PREFIX)
    assert [(r.start - place.start, r.end - place.start) for r in plan.ranges] == [
        (196_608, 262_144),
        (place.table_at, place.size_bytes),
    ]
    found, known = read_planned(plan.wants, made.memory.get_ranges, where=PREFIX)
    assert bytes(found[0]) == made.records[200_000:200_100]
    again = plan_ranges(plan.wants, where=PREFIX, known=known)
    assert len(again.ranges) == 1, "what is known is not read again"


def test_a_range_of_a_large_packed_section_needs_its_block_table_first_and_only_once():
    made = Sections(3_000_000, 300, packed=True)
    assert made.part.section.is_packed
    want = [made.part.log.part_of(1_000_000, 1_000_100)]
    first = plan_ranges(want, where=PREFIX)
    assert (first.is_first, first.is_whole, len(first.ranges)) == (True, False, 1)
    found, known = read_planned(want, made.memory.get_ranges, where=PREFIX)
    assert bytes(found[0]) == made.records[1_000_000:1_000_100]
    assert known is not None
    other = [made.part.log.part_of(2_000_000, 2_000_100)]
    assert not plan_ranges(other, where=PREFIX, known=known).is_first


def test_what_is_known_of_another_section_is_not_believed():
    one, two = Sections(700_000, 300, packed=False), Sections(700_000, 301, packed=False)
    want = one.part.log.part_of(0, 100)
    _, known = read_planned([want], one.memory.get_ranges, where=PREFIX)
    assert known is not None
    other = two.part.log.part_of(0, 100)
    assert plan_ranges([other], where=PREFIX, known=known).known is None


# -- damage -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.sampled_from((5000, 300_000, 700_000)), st.booleans(), st.randoms(use_true_random=False))
def test_i3_one_flipped_bit_gives_an_error_or_the_true_bytes(
    size: int, packed: bool, rng: random.Random
):
    made = Sections(size, 300, packed=packed)
    made.flip(rng.randrange(made.part.section.size_bytes))
    for of_items, whole in ((False, made.part.log), (True, made.part.index)):
        low = rng.randrange(whole.size_bytes)
        high = min(whole.size_bytes, low + rng.randrange(1, 100_000))
        with suppress(DataError):
            found = read_range(made.memory, PREFIX, whole.part_of(low, high))
            assert bytes(found) == made.wanted(of_items, low, high)


@pytest.mark.parametrize("packed", [False, True])
def test_a_flipped_bit_costs_the_block_that_it_lies_in(packed: bool):
    made = Sections(3_000_000, 300, packed=packed)
    made.flip(100)
    log = made.part.log
    with pytest.raises(DataError):
        read_range(made.memory, PREFIX, log.part_of(0, 10))
    for start in (200_000, 1_000_000, 2_999_000):
        found = read_range(made.memory, PREFIX, log.part_of(start, start + 10))
        assert bytes(found) == made.records[start : start + 10]
    assert bytes(read_range(made.memory, PREFIX, made.part.index)) == made.items


@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_block_table_costs_no_message(packed: bool):
    made = Sections(1_000_000, 300, packed=packed)
    made.flip(made.part.section.size_bytes - 3)
    for start in (0, 500_000, 999_990):
        found = read_range(made.memory, PREFIX, made.part.log.part_of(start, start + 10))
        assert bytes(found) == made.records[start : start + 10]


class Once(WrappingStore):
    """The first answer is not what lies there."""

    def __init__(self, inner: MemoryStore, how: str) -> None:
        super().__init__(inner)
        self.how = how

    def get_ranges(self, key: str, byte_ranges: Sequence[Any]) -> list[bytes]:
        how, self.how = self.how, ""
        found = self._inner.get_ranges(key, byte_ranges)
        if how == "short":
            raise ShortReadError(key, "the answer broke off")
        if how == "flip":
            data = bytearray(found[0])
            data[0] ^= 1
            return [bytes(data), *found[1:]]
        return found


def test_a_byte_that_was_wrong_on_its_way_is_read_again():
    made = Sections(700_000, 300, packed=False)
    store = Once(made.memory, "flip")
    found = read_range(store, PREFIX, made.part.log.part_of(0, 10))
    assert bytes(found) == made.records[:10]


def test_an_answer_that_broke_off_is_an_outage_and_a_bundle_that_is_too_short_is_damage():
    made = Sections(700_000, 300, packed=False)
    with pytest.raises(ShortReadError):
        read_range(Once(made.memory, "short"), PREFIX, made.part.log)
    data = made.memory.get(PREFIX + KEY)
    made.memory.delete(PREFIX + KEY)
    with pytest.raises(ObjectNotFoundError):
        read_range(made.memory, PREFIX, made.part.log)
    made.memory.put_if_absent(PREFIX + KEY, data[:1000])
    with pytest.raises(DataError, match="has 1000 bytes where the journal says"):
        read_range(made.memory, PREFIX, made.part.log)


def test_what_a_journal_cannot_mean_is_damage_before_anything_is_read():
    made = Sections(5000, 10, packed=False)
    log, store = made.part.log, Once(made.memory, "")
    bad = (
        replace(log, end=5001),
        replace(log, start=-1, end=5),
        replace(log, place=replace(log.place, size_bytes=log.place.size_bytes + 1)),
        replace(log, place=replace(log.place, start=10**9)),
        replace(log, place=replace(log.place, count=2**31)),
    )
    for want in bad:
        with pytest.raises(DataError):
            read_range(store, PREFIX, want)
