"""Entries of consume queues as arrays, one per queue offset, and those that were rebuilt from the log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered.format.consume_queue import FILLER_SIZE

Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Entries:
    """What a consume queue says of ``[start, start + n)``; zeros where it says nothing.

    Attributes:
        start: Queue offset of the first.
        physical_offsets: int64[n], local physical offset of each record.
        sizes: int32[n], bytes of each record; 0 for what was never written.
        tag_codes: int64[n].
    """

    start: int
    physical_offsets: Longs
    sizes: Ints
    tag_codes: Longs

    def __len__(self) -> int:
        """Number of queue offsets."""
        return len(self.sizes)

    @property
    def is_written(self) -> Flags:
        """bool[n]: neither unwritten nor a filler nor impossible."""
        written: Flags = (
            (self.sizes > 0) & (self.sizes != FILLER_SIZE) & (self.physical_offsets >= 0)
        )
        return written

    def head(self, count: int) -> Entries:
        """The first ``count`` of them, as views."""
        return Entries(
            self.start,
            self.physical_offsets[:count],
            self.sizes[:count],
            self.tag_codes[:count],
        )


def no_entries(start: int, count: int) -> Entries:
    """Entries that say nothing."""
    return Entries(
        start, np.zeros(count, np.int64), np.zeros(count, np.int32), np.zeros(count, np.int64)
    )


class Rebuilt:
    """Entries made from the log for queue offsets of which the consume queue says nothing of use. The first wins.

    Memory: 28 bytes an entry. Not for several threads at once: its store's lock guards it.
    """

    __slots__ = ("_chunks", "_merged")

    def __init__(self) -> None:
        self._chunks: list[tuple[Longs, Longs, Ints, Longs]] = []
        self._merged = True

    def add(self, offsets: Longs, physical_offsets: Longs, sizes: Ints, tag_codes: Longs) -> None:
        """Claim ``offsets`` (int64[n], in any order) for these records."""
        self._chunks.append((offsets, physical_offsets, sizes, tag_codes))
        self._merged = len(self._chunks) == 1 and bool((np.diff(offsets) > 0).all())

    @property
    def bounds(self) -> tuple[int, int] | None:
        """``[first, last + 1)`` of the claimed offsets; None without any."""
        if not self._chunks:
            return None
        return (
            min(int(chunk[0].min()) for chunk in self._chunks),
            max(int(chunk[0].max()) for chunk in self._chunks) + 1,
        )

    def before(self, place: int) -> tuple[int, int] | None:
        """One past the last claimed queue offset whose record lies before ``place`` in the log, and where it begins."""
        if not self._chunks:
            return None
        offsets, physical, *_ = self._merge()
        found = np.flatnonzero(physical < place)
        return (int(offsets[found[-1]]) + 1, int(physical[found[-1]])) if len(found) else None

    def next_claimed(self, start: int, end: int) -> int:
        """The first claimed queue offset in ``[start, end)``; ``end`` without one."""
        if not self._chunks:
            return end
        offsets = self._merge()[0]
        at = int(np.searchsorted(offsets, start))
        return min(end, int(offsets[at])) if at < len(offsets) else end

    def places(self, start: int, end: int) -> Longs:
        """Physical offsets in ``[start, end)`` that were claimed, in any order."""
        found = [chunk[1] for chunk in self._chunks]
        places = np.concatenate(found) if found else np.zeros(0, np.int64)
        return places[(places >= start) & (places < end)]

    def fill(self, entries: Entries) -> None:
        """Put what is known here in the place of what the consume queue says."""
        if not self._chunks:
            return
        offsets, physical, sizes, tags = self._merge()
        end = entries.start + len(entries)
        first, last = (int(at) for at in np.searchsorted(offsets, (entries.start, end)))
        places = offsets[first:last] - entries.start
        entries.physical_offsets[places] = physical[first:last]
        entries.sizes[places] = sizes[first:last]
        entries.tag_codes[places] = tags[first:last]

    def _merge(self) -> tuple[Longs, Longs, Ints, Longs]:
        if not self._merged:
            columns = [np.concatenate(column) for column in zip(*self._chunks, strict=True)]
            _, firsts = np.unique(columns[0], return_index=True)
            offsets, physical, sizes, tags = (column[firsts] for column in columns)
            self._chunks = [(offsets, physical, sizes, tags)]
            self._merged = True
        return self._chunks[0]
