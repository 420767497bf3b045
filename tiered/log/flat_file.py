"""TieredFlatFile: a row of TieredFileSegments seen as one unbounded append-only byte stream.

A segment's bytes lie in *parts*, immutable objects (or ranges of them); a part's place is a value. The write side counts
bytes only: what is appended waits in the queue's buffer (``tiered.log.composite``), and ``append_offset`` runs ahead of
``commit_offset`` by what is not yet durable and named by a journal entry.

Threads: not synchronised; the owner's lock covers it. After a crash everything is derived from the journal again.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.log.state import ObjectRange


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes ``[start, end)`` of an object's payload that follow one another in a flat file."""

    place: ObjectRange
    start: int
    end: int


@dataclass(slots=True)
class TieredFileSegment:
    """One file of a flat file: ``new``, then ``sealed``.

    Attributes:
        base_offset: Byte address of its first byte in the flat file.
        created_ms: When it was opened, by the writer's clock.
        sealed: No byte will be added.
        commit_position: Bytes that are durable and named by a journal entry.
        append_position: Bytes accepted; ``commit_position <= append_position``.
        places: Where its committed bytes lie, in order.
        starts: Position at which each place begins.
    """

    base_offset: int
    created_ms: int
    sealed: bool = False
    commit_position: int = 0
    append_position: int = 0
    places: list[ObjectRange] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def append(self, size_bytes: int) -> None:
        """Accept bytes."""
        assert not self.sealed
        self.append_position += size_bytes

    def commit(self, place: ObjectRange) -> None:
        """Note where the next bytes became durable."""
        self.starts.append(self.commit_position)
        self.places.append(place)
        self.commit_position += place.size_bytes
        assert self.commit_position <= self.append_position

    def extents(self, start: int, end: int) -> list[Extent]:
        """Where positions ``[start, end)`` lie; all of them must be committed."""
        assert 0 <= start < end <= self.commit_position
        found: list[Extent] = []
        index = bisect_right(self.starts, start) - 1
        while start < end:
            place, first = self.places[index], self.starts[index]
            stop = min(end, first + place.size_bytes)
            if stop > start:  # else a part that holds nothing but holes: no bytes
                found.append(Extent(place, place.start + start - first, place.start + stop - first))
            start, index = stop, index + 1
        return found


class TieredFlatFile:
    """An append-only stream of bytes over segments, of which only the last is not sealed."""

    def __init__(self, start_offset: int) -> None:
        """Begin an empty stream at ``start_offset``."""
        self._start = start_offset
        self.segments: list[TieredFileSegment] = []

    @property
    def commit_offset(self) -> int:
        """One past the last byte that is durable and named."""
        return next(
            (
                s.base_offset + s.commit_position
                for s in reversed(self.segments)
                if s.commit_position
            ),
            self.segments[0].base_offset if self.segments else self._start,
        )

    @property
    def append_offset(self) -> int:
        """One past the last byte accepted."""
        last = self.segments[-1] if self.segments else None
        return last.base_offset + last.append_position if last else self._start

    def open_segment(self, created_ms: int, base_offset: int | None = None) -> TieredFileSegment:
        """Seal the last segment and begin a new one at the append offset (or, after a gap, further on)."""
        base = self.append_offset if base_offset is None else base_offset
        if self.segments:
            self.segments[-1].sealed = True
        segment = TieredFileSegment(base, created_ms)
        self.segments.append(segment)
        return segment

    def extents(self, start: int, end: int) -> list[Extent]:
        """Where bytes ``[start, end)`` lie, across segment borders."""
        found: list[Extent] = []
        bases = [segment.base_offset for segment in self.segments]
        index = bisect_right(bases, start) - 1
        while start < end:
            segment = self.segments[index]
            stop = min(end, segment.base_offset + segment.commit_position)
            if stop > start:
                base = segment.base_offset
                found += segment.extents(start - base, stop - base)
            start, index = stop, index + 1
        return found


def load_segment(
    base_offset: int, created_ms: int, sealed: bool, places: Sequence[ObjectRange]
) -> TieredFileSegment:
    """A segment whose bytes are all committed."""
    size = sum(place.size_bytes for place in places)
    segment = TieredFileSegment(base_offset, created_ms, sealed, append_position=size)
    for place in places:
        segment.commit(place)
    return segment
