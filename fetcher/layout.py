"""Where the records of a part lie, in blocks of equal size. Pure.

A *block* is all records that begin in one step of ``block_bytes`` of the part's commit log. Every group cuts a part in the
same places, so that what one group has read serves another; and no record belongs to two blocks. A record that is larger
than a step leaves the steps that it covers without a record.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiered.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

    from tiered.log.decode import PartItems
    from tiered.log.parts import Part
    from tiered.model import QueueOffset


LAYOUT_BYTES = 2048
"""What a layout takes, however small its part is."""


@dataclass(frozen=True, slots=True)
class PartLayout:
    """A part, its items, and its blocks.

    Attributes:
        part: Which.
        items: All of its items.
        starts: int64[n], bytes from the part's first to where each item's record begins; of a hole, to where the record
            before it begins.
        firsts: [blocks + 1], number of the first item of each block; then the number of items.
        bounds: [blocks + 1], log offset at which each block's first record begins; then the part's end.
        ends: [blocks + 1], log offset behind all records of the blocks before.
    """

    part: Part
    items: PartItems
    starts: npt.NDArray[np.int64]
    firsts: list[int]
    bounds: list[int]
    ends: list[int]

    @classmethod
    def of(cls, part: Part, items: PartItems, block_bytes: int) -> PartLayout:
        """Lay a part out.

        Raises:
            DataError: Its items are not in the order of their records.
        """
        begins, starts = _starts(part, items)
        low, blocks = int(part.log_offset), block_count(part, block_bytes)
        if blocks == 1:
            end = low + int((begins + items.sizes).max(initial=0))
            bounds = [low + int(starts[0]) if len(items) else low, low + part.log_bytes]
            return cls(part, items, starts, [0, len(items)], bounds, [low, end])
        firsts = np.append(np.searchsorted(starts, np.arange(blocks) * block_bytes), len(items))
        bounds_at = low + np.append(starts, part.log_bytes)[firsts]
        ends = low + np.append(0, np.maximum.accumulate(begins + items.sizes))[firsts]
        return cls(part, items, starts, firsts.tolist(), bounds_at.tolist(), ends.tolist())

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.firsts) - 1

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, about."""
        return layout_bytes(len(self.items), self.blocks)

    def block_of(self, offset: QueueOffset) -> int:
        """The block that holds a queue offset of the part."""
        return bisect_right(self.firsts, offset - self.items.start) - 1

    def items_in(self, block: int) -> int:
        """Number of items of a block."""
        return self.firsts[block + 1] - self.firsts[block]

    def items_of(self, blocks: range) -> PartItems:
        """The items of neighbouring blocks."""
        return self.items.part_of(self.firsts[blocks.start], self.firsts[blocks.stop])

    def span(self, blocks: range) -> tuple[int, int]:
        """Log offsets ``[begin, end)`` that hold all records of neighbouring blocks; empty when there are none."""
        begin = self.bounds[blocks.start]
        return begin, max(begin, self.ends[blocks.stop])


def _starts(part: Part, items: PartItems) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where each item's record begins: 0 for a hole, and as ``PartLayout.starts``.

    Raises:
        DataError: They are not in the order of their records.
    """
    begins = items.log_offsets - part.log_offset
    if len(items) and items.sizes.min() > 0:
        starts = begins
        is_in_order = not (begins[1:] < begins[:-1]).any()
    else:
        real = items.sizes > 0
        begins = np.where(real, begins, 0)
        starts = np.maximum.accumulate(begins) if len(begins) else begins
        is_in_order = not (starts[real] != begins[real]).any()
    if is_in_order:
        return begins, starts
    raise DataError(
        "the items of an index are not in the order of their records",
        where=part.bundle.key,
        do="run `tiered verify --deep` to see the extent of the damage",
    )


def layout_bytes(items: int, blocks: int) -> int:
    """Memory of a layout, about: arrays, lists, and what every one takes."""
    return LAYOUT_BYTES + 28 * items + 120 * blocks


def block_count(part: Part, block_bytes: int) -> int:
    """Blocks of a part; its index need not be known."""
    return max(1, -(-part.log_bytes // block_bytes))
