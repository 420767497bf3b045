"""TieredFlatFile: a row of TieredFileSegments seen as one unbounded stream of bytes, as the journal has it.

A segment's bytes lie in the sections of bundles, so a place of a stream is a range of a section. The commit log of a queue
(``tiered.log.commit_log``) and its consume queue (``tiered.log.consume_queue``) are two such streams over the same parts.

Values: made of a life of a queue, and never changed; what is written since makes another. The writer needs none of it but
where the stream ends (``Tail``). From any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tiered.log.sections import read_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore
    from tiered.log.parts import Parts, SectionRange


@dataclass(frozen=True, slots=True)
class TieredFileSegment:
    """One file of a flat file: ``new``, then ``sealed``, then deleted.

    Attributes:
        base_offset: Byte address of its first byte in the flat file.
        created_ms: When its first part was committed.
        sealed: No byte will be added.
        parts: What it consists of.
        starts: int64[n + 1], address of each part, and of the end.
        of_items: Its bytes are those of the items.
    """

    base_offset: int
    created_ms: int
    sealed: bool
    parts: Parts
    starts: npt.NDArray[np.int64]
    of_items: bool

    @classmethod
    def of(
        cls,
        base_offset: int,
        created_ms: int,
        sealed: bool,
        parts: Parts,
        sizes: npt.NDArray[np.int64],
        *,
        of_items: bool,
    ) -> TieredFileSegment:
        """A segment of parts of these sizes."""
        starts = np.concatenate(([0], np.cumsum(sizes))) + base_offset
        return cls(base_offset, created_ms, sealed, parts, starts, of_items)

    @property
    def commit_position(self) -> int:
        """Bytes that are durable and named by a journal entry."""
        return int(self.starts[-1]) - self.base_offset

    def ranges(self, start: int, end: int) -> list[SectionRange]:
        """Where addresses ``[start, end)`` lie; all of them must be committed."""
        assert self.base_offset <= start < end <= self.starts[-1]
        found: list[SectionRange] = []
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < end:
            first, stop = int(self.starts[number]), min(end, int(self.starts[number + 1]))
            part = self.parts[number]
            whole = part.index if self.of_items else part.log
            low, high = start - first, min(stop - first, whole.size_bytes)
            if (
                low < high
            ):  # else a part that holds nothing but holes, or where compaction was: no bytes
                found.append(whole.part_of(low, high))
            start, number = stop, number + 1
        return found


class TieredFlatFile:
    """A stream of bytes over segments, of which only the last is not sealed."""

    def __init__(self, start_offset: int, segments: Sequence[TieredFileSegment]) -> None:
        """A stream over these segments, in order; ``start_offset`` where there are none."""
        self._start = start_offset
        self.segments = tuple(segments)

    @property
    def commit_offset(self) -> int:
        """One past the last byte that is durable and named."""
        return int(self.segments[-1].starts[-1]) if self.segments else self._start

    def ranges(self, start: int, end: int) -> list[SectionRange]:
        """Where bytes ``[start, end)`` lie, across segment borders."""
        found: list[SectionRange] = []
        for segment in self.segments:
            low, high = max(start, segment.base_offset), min(end, int(segment.starts[-1]))
            if low < high:
                found += segment.ranges(low, high)
        return found

    def read_bytes(self, store: ObjectStore, prefix: str, start: int, end: int) -> memoryview:
        """Read committed bytes ``[start, end)``, checked.

        Raises:
            DataError: A bundle is damaged.
            BackendError: A bundle could not be read.
        """
        pieces = [read_range(store, prefix, one) for one in self.ranges(start, end)]
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
