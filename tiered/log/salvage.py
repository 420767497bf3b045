"""What is left of a damaged section: damage costs the messages of its block, and not those beside it.

``salvage`` reads a part of which something is damaged, with one request for its section, and gives everything of it that is
proven, together with the queue offsets that are lost. Proven are blocks by the section's block table, and that by the
journal's checksum; so where a block and the table are damaged, and where the section is cut short or gone, all of the part
is lost. Readers that meet damage in the middle of a queue go on by that (``QueueReader.past_damage``): they neither stop nor
ask message by message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ShortReadError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.bundle import RecordsUnpacker, SectionBlocks, dense_items
from tiered.log.decode import PartItems, decode_records
from tiered.log.flat_file import ITEM, ITEM_BYTES
from tiered.log.ranges import ranges_at
from tiered.log.sections import WHOLE_BYTES_MAX, split_section

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from backends.base import ObjectStore
    from tiered.format.bundle import SectionPlace
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Part
    from tiered.log.ranges import Ranges
    from tiered.model import MessageQueue, QueueOffset

_DO: Final = "run `tiered verify --deep` to see the extent of the damage"


@dataclass(frozen=True, slots=True)
class Salvaged:
    """A part, or the end of one, without what is damaged."""

    batch: TierBatch | None
    """All of it, lost messages as holes without a reason; None: nothing is left."""
    end: QueueOffset  # one past the last queue offset
    lost: Ranges  # queue offsets that cannot be read
    lost_tags: npt.NDArray[np.int64] | None
    """Tag codes of those whose items are sound, and their records not; None: items are damaged as well."""
    error: DataError  # what is damaged, and where

    @property
    def named(self) -> list[tuple[int, int, str]]:
        """Each range ``[start, end)`` that is lost, with what is damaged, for people."""
        where = f" ({self.error.where})" if self.error.where else ""
        return [(*ends, self.error.what + where) for ends in self.lost]


@dataclass(frozen=True, slots=True)
class Blow:
    """A damaged block of a section, and what it takes away."""

    start: int  # position in the section of its first byte
    end: int  # one past the last
    records: tuple[int, int] = (0, 0)  # bytes of records, as they were before they were packed
    items: tuple[int, int] = (0, 0)  # numbers of items

    @classmethod
    def of(cls, place: SectionPlace, blocks: SectionBlocks, low: int, high: int) -> Blow:
        """Of the block at positions ``[low, high)`` of a section."""
        if low >= place.items_at and place.gone:
            return cls(low, high, items=(0, place.count))
        if low >= place.items_at:
            first, end = low - place.items_at, high - place.items_at
            return cls(low, high, items=(first // ITEM_BYTES, -(-end // ITEM_BYTES)))
        if low >= place.stored_bytes:  # the dictionary: nothing can be unpacked
            return cls(low, high, records=(0, place.records_bytes))
        at = int(np.searchsorted(blocks.starts, low)) * place.block_bytes
        return cls(low, high, records=(at, min(at + place.block_bytes, place.records_bytes)))


@dataclass(frozen=True, slots=True)
class OpenSectionBytes:
    """A section as far as it is sound."""

    records: memoryview  # as they were before they were packed; what could not be unpacked is zero
    items: memoryview  # as they lie
    blows: tuple[Blow, ...] = ()  # its damaged blocks, in order
    is_packed: bool = False
    """Damaged records could not be unpacked; else they are there as they lie."""

    @property
    def zeroed(self) -> list[tuple[int, int]]:
        """Bytes of records that could not be unpacked."""
        return [blow.records for blow in self.blows if self.is_packed and blow.records[1]]

    @property
    def items_lost(self) -> list[tuple[int, int]]:
        """Numbers of items whose block is damaged."""
        return [blow.items for blow in self.blows if blow.items[1]]


def open_damaged(view: memoryview, place: SectionPlace, *, where: str) -> OpenSectionBytes:
    """Open a section that fails its checksum; a ``DataError`` when its block table fails, too, so that nothing is proven."""
    blocks = SectionBlocks.parse(view[place.table_at :], place, where=where)
    faults = list(blocks.faults(view[: place.table_at]))
    blows = tuple(Blow.of(place, blocks, low, high) for low, high in faults)
    items = _items_left(view[place.items_at : place.table_at], place, where)
    if not place.is_packed:
        return OpenSectionBytes(view[: place.records_bytes], items, blows)
    lost = {blow.records for blow in blows}
    room = np.zeros(place.records_bytes, np.uint8)
    if (0, place.records_bytes) not in lost:
        unpacker = RecordsUnpacker(blocks, view[place.stored_bytes : place.items_at], where=where)
        for low in range(0, place.records_bytes, place.block_bytes):
            high = min(low + place.block_bytes, place.records_bytes)
            if (low, high) not in lost:
                first, end = blocks.records_range(low, high)
                room[low:high] = unpacker.unpack(view[first:end], low, high)
    return OpenSectionBytes(room.data, items, blows, is_packed=True)


def _items_left(stored: memoryview, place: SectionPlace, where: str) -> memoryview:
    """All items; of sparse ones of which a block is damaged none is believed."""
    try:
        return dense_items(stored, place, where=where)
    except DataError:
        return memoryview(bytes(place.items_bytes))


def lost_items(part: Part, items: memoryview, blows: Sequence[Blow]) -> npt.NDArray[np.bool_]:
    """Which items of a part damaged blocks of its section take away, the item itself or its record."""
    first, end = part.items_at, part.items_at + part.count
    rows = np.frombuffer(items[first * ITEM_BYTES : end * ITEM_BYTES], ITEM)
    at = rows["log_offset"].astype(np.int64) - part.log_offset + part.records_at
    size = rows["size"].astype(np.int64)
    lost = np.zeros(part.count, np.bool_)
    for blow in blows:
        lost[max(0, blow.items[0] - first) : max(0, blow.items[1] - first)] = True
        low, high = blow.records
        lost |= (size > 0) & (at < high) & (at + size > low)
    return lost


def salvage(
    store: ObjectStore,
    prefix: str,
    queue: MessageQueue,
    part: Part,
    *,
    start: QueueOffset,
    end: QueueOffset,
) -> Salvaged:
    """What is sound of ``[start, end)`` of a part.

    Raises:
        ObjectNotFoundError: Its bundle is gone: for the caller to look into, who knows whether it was replaced.
    """
    try:
        opened = _opened(store, prefix, part)
        span = slice(start - part.queue_offset, end - part.queue_offset)
        batch, lost = _decoded(queue, part, opened, span, prefix)
    except DataError as error:
        return all_lost(start, end, error)
    tags = None if opened.items_lost else _items(part, opened)["tag_code"][span][lost]
    numbers = ranges_at(start + np.flatnonzero(lost))
    return Salvaged(batch, end, numbers, tags, _said(part, opened, prefix))


def all_lost(start: QueueOffset, end: QueueOffset, error: DataError) -> Salvaged:
    """Nothing is left."""
    return Salvaged(None, end, ((start, end),), None, error)


def _opened(store: ObjectStore, prefix: str, part: Part) -> OpenSectionBytes:
    place, key = part.section, prefix + part.bundle.key
    place.check(where=key)
    if place.size_bytes > WHOLE_BYTES_MAX:
        raise DataError("a damaged section is too large to be read whole", where=key, do=_DO)
    wanted = ByteRange(place.start, place.start + place.size_bytes)
    try:
        view = memoryview(store.get_ranges(key, [wanted])[0]).cast("B")
    except (InvalidRangeError, ShortReadError) as error:
        found = store.head(key).size_bytes
        if found >= wanted.end:
            raise  # the answer broke off on its way
        what = f"the bundle has {found} bytes where the journal says {part.bundle.size_bytes}"
        raise DataError(what, where=key, do=_DO) from error
    try:
        return OpenSectionBytes(*split_section(view, place, where=key))
    except DataError:
        return open_damaged(view, place, where=key)


def _decoded(
    queue: MessageQueue, part: Part, opened: OpenSectionBytes, span: slice, prefix: str
) -> tuple[TierBatch, npt.NDArray[np.bool_]]:
    """Items of a part, lost ones as holes; and which these are."""
    lost, rows = lost_items(part, opened.items, opened.blows), _items(part, opened)
    offsets, sizes = rows["log_offset"].astype(np.int64), rows["size"].astype(np.int32)
    outside = (offsets < part.log_offset) | (offsets > part.records_end - sizes) | (sizes < 0)
    lost |= outside & (sizes != 0)
    items = PartItems(
        part.queue_offset,
        np.where(lost, part.log_offset, offsets),
        np.where(lost, 0, sizes),
        np.where(lost, 0, rows["tag_code"].astype(np.int64)),
    ).part_of(span.start, span.stop)
    records = opened.records[part.records_at : part.records_at + part.log_bytes]
    batch = decode_records(queue, part, items, records, part.log_offset, where=prefix)
    return batch, lost[span]


def _items(part: Part, opened: OpenSectionBytes) -> npt.NDArray[np.void]:
    begin = part.items_at * ITEM_BYTES
    return np.frombuffer(opened.items[begin : begin + part.count * ITEM_BYTES], ITEM)


def _said(part: Part, opened: OpenSectionBytes, prefix: str) -> DataError:
    """What is damaged, for people: the object, and which bytes of it."""
    at = part.section.start
    bad = [f"[{at + blow.start}, {at + blow.end})" for blow in opened.blows[:3]]
    more = f" and {len(opened.blows) - 3} blocks more" if len(opened.blows) > 3 else ""  # noqa: PLR2004
    what = f"bytes {', '.join(bad)}{more} fail their checksum"
    return DataError(what, where=prefix + part.bundle.key, do=_DO)
