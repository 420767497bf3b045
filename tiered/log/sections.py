"""Reads sections of bundles, whole or in ranges, and checks every byte that it hands out.

One section is read with one request wherever it is small or nearly all of it is wanted: exactly its bytes, proven by the
checksum that the journal has of it. Of a large one the blocks are read that hold what is wanted, with the section's block
table beside them, which proves them, and is proven by that checksum itself; where the section is packed the table
comes first, since only it says where the blocks are.

Retries and errors: nothing is retried here but what fails its check, once (``read_ranges``). Whatever contradicts the
journal is a ``DataError``, and nothing of the range is returned. A damaged block costs only the ranges that touch it, and a
damaged block table none: what fails one way is read the other way, whole in place of ranges or ranges in place of all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ShortReadError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.bundle import (
    BLOCK_BYTES,
    RecordsUnpacker,
    SectionBlocks,
    check_section,
    dense_items,
)
from tiered.log.ranges import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import ObjectStore
    from tiered.format.bundle import SectionPlace
    from tiered.log.parts import Part, SectionRange

WHOLE_BYTES_MAX: Final = 1024 * 1024 * 1024
"""No section that is larger is read whole, whatever the journal says; ours have 64 MiB at most, or one commit."""
WHOLE_AT_ONCE_BYTES: Final = 256 * 1024
"""A section of this size is read whole rather than in ranges that have to be looked for; and so is a larger one when no more
of it than this would be read in vain, to save the request for its block table."""


class BlockTableError(DataError):
    """A section's block table is damaged: ranges of it cannot be checked by themselves."""


@dataclass(frozen=True, slots=True)
class OpenSection:
    """What ranges of a section are checked and unpacked by: its block table, proven, and its dictionary."""

    blocks: SectionBlocks  # the block table
    dictionary: bytes = b""  # of a packed section; may be empty

    @property
    def memory_bytes(self) -> int:
        """What it takes, about."""
        blocks = self.blocks
        return 512 + blocks.starts.nbytes + blocks.crcs.nbytes + len(self.dictionary)


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """Which bytes of a bundle are read so that ranges of one section can be had and checked."""

    wants: tuple[SectionRange, ...]  # the ranges, all of one section, none empty
    ranges: tuple[ByteRange, ...]  # what is read, positions in the bundle
    is_whole: bool = False  # the section is read whole
    is_first: bool = False
    """Only the block table and the dictionary are read: ``open`` takes them, and a plan is made anew with that."""
    known: OpenSection | None = None  # of the section, if the caller had it

    @property
    def key(self) -> str:
        """Of the bundle, below the prefix of the broker."""
        return self.wants[0].key

    @property
    def place(self) -> SectionPlace:
        """The section."""
        return self.wants[0].place

    def open(self, chunks: Sequence[bytes | memoryview], *, where: str) -> OpenSection:
        """The block table and dictionary, from what was read for a first plan."""
        assert self.is_first
        return _opened(memoryview(chunks[0]), self.ranges[0].start, self.place, where)

    def check(
        self, chunks: Sequence[bytes | memoryview], *, where: str
    ) -> tuple[list[memoryview], OpenSection | None]:
        """The ranges wanted, from what was read.

        Returns:
            The bytes of each range, and what further ranges of the section can be read by, where that is known now.
        """
        assert not self.is_first
        if self.is_whole:
            records, items = split_section(chunks[0], self.place, where=where)
            return [
                (items if want.of_items else records)[want.start : want.end] for want in self.wants
            ], self.known
        held = _Held(self.ranges, chunks)
        known = self.known
        if known is None:
            at = self.place.start + (
                self.place.stored_bytes if self.place.is_packed else self.place.table_at
            )
            behind = held.bytes_of(at, self.place.start + self.place.size_bytes)
            known = _opened(behind, at, self.place, where)
        return [_checked(want, known, held, where) for want in self.wants], known


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of a bundle that were read in several ranges."""

    ranges: tuple[ByteRange, ...]
    chunks: Sequence[bytes | memoryview]

    def bytes_of(self, start: int, end: int) -> memoryview:
        for chunk, held in zip(self.chunks, self.ranges, strict=True):
            if held.start <= start and end <= held.end:
                return memoryview(chunk)[start - held.start : end - held.start]
        raise AssertionError("a plan reads what it checks")


def plan_ranges(
    wants: Sequence[SectionRange],
    *,
    where: str,
    known: OpenSection | None = None,
    is_whole: bool | None = None,
) -> SectionPlan:
    """Plan to read ranges of one section.

    Args:
        is_whole: Whether it is read whole; None: what costs less.
    """
    place = wants[0].place
    check_place(wants[0], where=where)
    for want in wants:
        most = place.items_bytes if want.of_items else place.records_bytes
        if not 0 <= want.start < want.end <= most:
            raise _damaged(
                f"the journal names bytes [{want.start}, {want.end}) of a section that has not so many",
                where + want.key,
            )
    if known is not None and known.blocks.place != place:
        known = None
    if _is_cheaper_whole(wants, known) if is_whole is None else is_whole:
        return _plan_whole(wants, where)
    if known is None and place.is_packed:
        behind = ByteRange(place.start + place.stored_bytes, place.start + place.size_bytes)
        has_records = any(not want.of_items for want in wants)
        return SectionPlan(tuple(wants), (behind,), is_first=has_records)
    low = [_stored(want, known) for want in wants]
    if known is None:
        low.append((place.table_at, place.size_bytes))
    start = place.start
    ranges = tuple(ByteRange(start + first, start + end) for first, end in joined(tuple(low)))
    return SectionPlan(tuple(wants), ranges, known=known)


def _is_cheaper_whole(wants: Sequence[SectionRange], known: OpenSection | None) -> bool:
    place = wants[0].place
    whole_bytes = place.records_bytes + place.items_bytes
    in_vain = whole_bytes - sum(want.size_bytes for want in wants)
    if place.size_bytes <= WHOLE_AT_ONCE_BYTES or not in_vain:
        return True
    if known is not None:
        return False
    return in_vain <= (whole_bytes // 2 if place.is_packed else WHOLE_AT_ONCE_BYTES)


def _plan_whole(wants: Sequence[SectionRange], where: str) -> SectionPlan:
    place = wants[0].place
    if place.size_bytes > WHOLE_BYTES_MAX:
        raise _damaged(
            f"a section of {place.size_bytes} bytes would have to be read whole",
            where + wants[0].key,
        )
    end = place.size_bytes if place.is_packed else place.table_at
    whole = ByteRange(place.start, place.start + end)
    return SectionPlan(tuple(wants), (whole,), is_whole=True)


def _stored(want: SectionRange, known: OpenSection | None) -> tuple[int, int]:
    """Positions in the section of the blocks that hold a range."""
    place = want.place
    if want.of_items:
        return _item_blocks(want)
    if known is not None:
        return known.blocks.records_range(want.start, want.end)
    block = place.block_bytes
    return want.start // block * block, min(-(-want.end // block) * block, place.records_bytes)


def _item_blocks(want: SectionRange) -> tuple[int, int]:
    place = want.place
    if place.gone:  # which of them lie in a range only they themselves say
        return place.items_at, place.table_at
    low = place.items_at + want.start // BLOCK_BYTES * BLOCK_BYTES
    return low, min(place.items_at + -(-want.end // BLOCK_BYTES) * BLOCK_BYTES, place.table_at)


def _checked(want: SectionRange, known: OpenSection, held: _Held, where: str) -> memoryview:
    place = want.place
    low, high = _stored(want, known)
    stored = held.bytes_of(place.start + low, place.start + high)
    known.blocks.check(stored, low, where=where)
    if place.gone and want.of_items:
        return dense_items(stored, place, where=where)[want.start : want.end]
    if want.of_items:
        at = want.start - (low - place.items_at)
        return stored[at : at + want.size_bytes]
    if not place.is_packed:
        return stored[want.start - low : want.end - low]
    block = place.block_bytes
    first = want.start // block * block
    last = min(-(-want.end // block) * block, place.records_bytes)
    plain = RecordsUnpacker(known.blocks, known.dictionary, where=where).unpack(stored, first, last)
    return plain[want.start - first : want.end - first]


def _opened(data: memoryview, at: int, place: SectionPlace, where: str) -> OpenSection:
    """From a packed section's bytes from its dictionary on; ``at`` is where they begin in the bundle."""
    base = at - place.start
    try:
        blocks = SectionBlocks.parse(data[place.table_at - base :], place, where=where)
    except DataError as error:
        raise BlockTableError(error.what, where=error.where, do=error.do) from error
    if not place.dictionary_bytes:
        return OpenSection(blocks)
    dictionary = data[place.stored_bytes - base : place.items_at - base]
    blocks.check(dictionary, place.stored_bytes, where=where)
    return OpenSection(blocks, bytes(dictionary))


def split_section(
    data: bytes | memoryview, place: SectionPlace, *, where: str
) -> tuple[memoryview, memoryview]:
    """Records and items of a section that was read whole, proven by the journal's checksum.

    Args:
        data: Its bytes: up to the block table, at least (of a packed one it saves finding the blocks).
    """
    view = memoryview(data)
    place.check(where=where)
    check_section(view, place, where=where)
    items = dense_items(view[place.items_at : place.table_at], place, where=where)
    if not place.is_packed:
        return view[: place.records_bytes], items
    try:
        blocks = SectionBlocks.parse(view[place.table_at : place.size_bytes], place, where=where)
    except DataError:  # all else is proven: the table alone is damaged, or was not read
        blocks = SectionBlocks.walked(view, place, where=where)
    dictionary = view[place.stored_bytes : place.items_at]
    unpacker = RecordsUnpacker(blocks, dictionary, where=where)
    return unpacker.unpack(view[: place.stored_bytes], 0, place.records_bytes), items


def check_place(want: SectionRange, *, where: str) -> None:
    """Hold what the journal says of a section against itself."""
    want.place.check(where=where + want.key)
    if want.place.start + want.place.size_bytes > want.bundle.size_bytes:
        raise _damaged("the journal names a section behind the end of its bundle", where + want.key)


def read_planned(
    wants: Sequence[SectionRange],
    get: Callable[[str, Sequence[ByteRange]], Sequence[bytes | memoryview]],
    *,
    where: str,
    known: OpenSection | None = None,
    is_whole: bool | None = None,
) -> tuple[list[memoryview], OpenSection | None]:
    """Read and check as planned: with one request, or two where a block table has to come first."""
    plan = plan_ranges(wants, where=where, known=known, is_whole=is_whole)
    key = where + wants[0].key
    if plan.is_first:
        known = plan.open(get(key, plan.ranges), where=key)
        plan = plan_ranges(wants, where=where, known=known, is_whole=is_whole)
    return plan.check(get(key, plan.ranges), where=key)


def read_ranges(store: ObjectStore, prefix: str, wants: Sequence[SectionRange]) -> list[memoryview]:
    """Read ranges of one section, checked; empty ones cost nothing.

    What fails its check is read once more, and then the other way: ranges in place of all, or whole where only the block
    table is damaged.

    Raises:
        DataError: The bundle is damaged there; nothing of it is returned.
    """
    some = [want for want in wants if want.size_bytes]
    found = iter(_read(store, prefix, some) if some else ())
    return [next(found) if want.size_bytes else memoryview(b"") for want in wants]


def _read(store: ObjectStore, prefix: str, wants: Sequence[SectionRange]) -> list[memoryview]:
    def read(*, is_whole: bool | None = None) -> list[memoryview]:
        return read_planned(wants, store.get_ranges, where=prefix, is_whole=is_whole)[0]

    try:
        return read()
    except (InvalidRangeError, ShortReadError) as error:
        key, size = prefix + wants[0].key, wants[0].bundle.size_bytes
        found = store.head(key).size_bytes
        if found >= size:
            raise  # the answer broke off on its way
        what = f"the bundle has {found} bytes where the journal says {size}"
        raise _damaged(what, key) from error
    except DataError:
        pass
    try:  # a byte was wrong on its way, or is wrong where it lies
        return read()
    except DataError as error:
        is_whole = plan_ranges(wants, where=prefix).is_whole
        if not is_whole and not isinstance(error, BlockTableError):
            raise
        try:
            return read(is_whole=not is_whole)
        except (DataError, InvalidRangeError, ShortReadError):
            raise error from None


def read_range(store: ObjectStore, prefix: str, want: SectionRange) -> memoryview:
    """Read one range; see ``read_ranges``."""
    return read_ranges(store, prefix, (want,))[0]


def read_section(
    store: ObjectStore, prefix: str, want: SectionRange
) -> tuple[memoryview, memoryview]:
    """All records and items of the section that a range is of; see ``read_ranges``."""
    place = want.place
    records = replace(want, start=0, end=place.records_bytes, of_items=False)
    items = replace(want, start=0, end=place.items_bytes, of_items=True)
    found = read_ranges(store, prefix, (records, items))
    return found[0], found[1]


def read_part(store: ObjectStore, prefix: str, part: Part) -> tuple[memoryview, memoryview]:
    """All records and items of a part; see ``read_ranges``."""
    records, items = read_ranges(store, prefix, (part.log, part.index))
    return records, items


def _damaged(what: str, where: str) -> DataError:
    return DataError(
        what, where=where, do="run `tiered verify --deep` to see the extent of the damage"
    )
