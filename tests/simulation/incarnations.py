"""One incarnation of a queue, as the simulation's own history has it: parts, segments, gaps; and how it is divided."""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from simulation.contents import is_hole, mark_of, store_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.contents import Claims, Section
    from simulation.kafka_lineage import Said


@dataclass
class Row:
    """One part: where it lies, what its entry says of it, and its records.

    Attributes:
        bundle: Key, size and level of the bundle.
        section: The section.
        log_offset: Of its first record.
        start: Queue offset of its first item.
        log_bytes: Bytes of its records.
        claims: What it says of them.
        records: Of its items, holes included.
        records_at: Where its records begin in the section's.
        items_at: Which of the section's items is its first.
        log_gone: Bytes of the log that compaction took away behind its records.
    """

    bundle: tuple[str, int, int]
    section: Section
    log_offset: int
    start: int
    log_bytes: int
    claims: Claims
    records: list[bytes]
    records_at: int = 0
    items_at: int = 0
    log_gone: int = 0

    @classmethod
    def of(cls, bundle: tuple[str, int, int], section: Section, records: list[bytes]) -> Row:
        """A whole section."""
        place = section.log_offset, section.queue_offset, section.records_bytes
        return cls(bundle, section, *place, section.claims, records, log_gone=section.log_gone)

    @property
    def key(self) -> str:
        """Of its bundle."""
        return self.bundle[0]

    @property
    def end(self) -> int:
        """One past its last queue offset."""
        return self.start + len(self.records)

    @property
    def log_end(self) -> int:
        """One past its last byte in the log."""
        return self.log_offset + self.log_bytes + self.log_gone

    @property
    def values(self) -> tuple[Any, ...]:
        """All that the journal says of it: of the section, of the part, and of its bundle."""
        s = self.section
        return (
            *(s.start, s.records_bytes, s.stored_bytes, s.count, s.size_bytes, s.crc),
            *(self.log_offset, self.start, self.log_bytes, len(self.records)),
            *(*astuple(self.claims), self.records_at, self.items_at),
            *(s.gone, self.log_gone),
            *self.bundle,
        )

    def divided(self, end: int, head: list[int]) -> tuple[Row, Row] | None:
        """The part as two ranges of its section; None when ``head`` is not a beginning of it."""
        start, log_offset, log_bytes, holes, mark, of_holes = head
        count = end - self.start
        whole = self.claims.holes
        fits = 0 < count < len(self.records) and 0 <= holes <= min(count, whole)
        fits = fits and of_holes == whole
        fits = fits and whole - holes <= len(self.records) - count
        if not fits or (start, log_offset) != (self.start, self.log_offset):
            return None
        if not 0 <= log_bytes <= self.log_bytes:
            return None
        left = self.records[count:]
        first = replace(
            self,
            log_bytes=log_bytes,
            claims=self.claims.of_some(holes, count, mark),
            records=self.records[:count],
            log_gone=0,
        )
        rest = replace(
            self,
            log_offset=first.log_end,
            start=first.end,
            log_bytes=self.log_bytes - log_bytes,
            claims=self.claims.of_some(whole - holes, len(left), self.claims.mark),
            records=left,
            records_at=self.records_at + log_bytes,
            items_at=self.items_at + count,
        )
        return first, rest

    def beginning(self, count: int) -> Claims:
        """What its first records are to be said to be."""
        head = self.records[:count]
        return self.claims.of_some(sum(map(is_hole, head)), count, mark_of(head[-1]))


_ROW, _SPARSE = struct.Struct("<qIIIIIqqIIIqqIII"), struct.Struct("<Iq")
_PLAIN_VALUES, _VALUES = 16, 18


def fingerprint(rows: Sequence[Row]) -> int:
    """By which a merge says what it presumes."""
    keys = "\n".join(row.key for row in rows)
    plain = b"".join(_ROW.pack(*row.values[:_PLAIN_VALUES]) for row in rows)
    sparse = b"".join(_SPARSE.pack(*row.values[_PLAIN_VALUES:_VALUES]) for row in rows)
    found = zlib.crc32(plain, zlib.crc32(keys.encode()))
    return zlib.crc32(sparse, found) if any(sparse) else found


@dataclass
class Segment:
    """A row of parts.

    Attributes:
        base: Log offset of its beginning.
        queue_base: Queue offset of its beginning.
        rows: Its parts.
        created_ms: Time of the entry that named its first part.
        sealed: It takes none any more.
        had_ms: The newest store time in it before a merge, which may have been a compaction.
    """

    base: int
    queue_base: int
    rows: list[Row]
    created_ms: int
    sealed: bool = False
    had_ms: int | None = None

    @property
    def times(self) -> list[int]:
        """Store times of its messages."""
        return [store_ms(raw) for row in self.rows for raw in row.records if not is_hole(raw)]

    @property
    def newest_ms(self) -> int:
        """The newest store time in it; without messages, when it began, or that of what was compacted away.

        Who gives it up may have decided before the compaction, or after it.
        """
        without = self.created_ms if self.had_ms is None else min(self.created_ms, self.had_ms)
        return max(self.times, default=without)

    @property
    def said_ms(self) -> int:
        """The same by what its parts say, of which one that was cut may have had a newer message; checked as they land."""
        newest = max(row.claims.high for row in self.rows)
        return newest if newest >= 0 else self.created_ms


@dataclass
class ModelIncarnation:
    """One incarnation of a queue.

    Attributes:
        number: Its number.
        start: Where it began.
        min: First offset now.
        commit: One past the last.
        log_end: End of its tiered log.
        segments: In order.
        gaps: ``[start, end)``.
        ended: It is over.
        quarantined: Damaged records that were put aside.
        passes: Of compaction: how far each went, and when.
        cut: Of what was truncated: from which offset on, and by which entry.
        lineage: What entries have said of where its records come from; None: nothing.
    """

    number: int
    start: int
    min: int
    commit: int
    log_end: int = 0
    segments: list[Segment] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False
    quarantined: int = 0
    passes: list[tuple[int, int]] = field(default_factory=list)
    cut: tuple[int, int] = (-1, 0)
    lineage: Said | None = None

    @property
    def rows(self) -> list[Row]:
        """All parts."""
        return [row for segment in self.segments for row in segment.rows]

    def record(self, offset: int) -> bytes | None:
        """The record at an offset, if there is one."""
        for row in self.rows:
            if row.start <= offset < row.end:
                return row.records[offset - row.start]
        return None

    def has_old_before_gap(self, old_ms: float) -> bool:
        """Whether its first segment can expire, and leaves a gap behind that is not its neighbour."""
        if len(self.segments) < 2 or not self.segments[0].sealed:
            return False
        is_before = any(high > self.segments[1].queue_base for _, high in self.gaps)
        return is_before and self.segments[0].newest_ms < old_ms

    def place(self, row: Row, base: int, now_ms: int) -> bool:
        """Take the next part; False when it names a segment where it cannot lie."""
        last = self.segments[-1] if self.segments else None
        if last and not last.sealed and last.base == base and last.rows[-1].end == row.start:
            last.rows.append(row)
        elif base == row.log_offset:
            if last:
                last.sealed = True
            self.segments.append(Segment(base, row.start, [row], now_ms))
        else:
            return False
        self.commit, self.log_end = row.end, row.log_end
        return True

    def divide(
        self, end: int, head: list[int] | None
    ) -> tuple[ModelIncarnation, ModelIncarnation] | None:
        """The tail ``[end, commit)``, ended, and the incarnation without it; None when ``head`` does not fit."""
        kept: list[Segment] = []
        gone: list[Segment] = []
        is_used = head is None
        for segment in self.segments:
            before = [row for row in segment.rows if row.end <= end]
            behind = [row for row in segment.rows if row.start >= end]
            for row in segment.rows:
                if row.start < end < row.end:
                    two = row.divided(end, head) if head else None
                    if two is None:
                        return None
                    is_used, before, behind = True, [*before, two[0]], [two[1], *behind]
            if before:
                kept.append(replace(segment, rows=before))
            if behind:
                gone.append(replace(segment, rows=behind, sealed=True))
        if not is_used:
            return None
        began = self.segments[0].base if self.segments else self.log_end
        log_end = kept[-1].rows[-1].log_end if kept else began
        gaps = [(low, min(high, end)) for low, high in self.gaps if low < end]
        lost = [(max(low, end), high) for low, high in self.gaps if high > end]
        tail = replace(
            self, start=end, min=end, segments=gone, gaps=lost, ended=True, quarantined=0
        )
        passes = [(min(to, end), time_ms) for to, time_ms in self.passes]
        rest = replace(self, commit=end, log_end=log_end, segments=kept, gaps=gaps, passes=passes)
        rest.lineage = self.lineage and self.lineage.moved(end)
        return tail, rest

    def expire(self, low: int, *, with_open: bool) -> list[Segment]:
        """Give up the segments below ``low``, if that is where one begins; which these were."""
        gone = [segment for segment in self.segments if segment.rows[-1].end <= low]
        kept = self.segments[len(gone) :]
        may = with_open or self.ended or all(segment.sealed for segment in gone)
        begins = kept[0].queue_base if kept else self.commit
        if may and begins == low and self.min < low <= self.commit:
            self.min, self.segments = low, kept
            self.lineage = self.lineage and self.lineage.expired(low)
            self.gaps = [gap for gap in self.gaps if gap[1] > low]
            return gone
        return []

    def run_for(
        self, row: Row, base: int, was: int, *, with_open: bool, compacts: bool = False
    ) -> list[Row] | None:
        """The neighbours that a merged part takes the place of; None when what it presumes does not hold."""
        found = [
            at
            for at, one in enumerate(self.segments)
            if one.base == base and one.rows[-1].end > row.start
        ]
        group = self._spanned(found[0], row) if found else []
        may = with_open or self.ended or all(one.sealed for one in group)
        run = [one for segment in group for one in segment.rows if row.start <= one.start < row.end]
        if not run or not may or fingerprint(run) != was:
            return None
        ends = (row.start, row.log_offset, row.end, row.log_end)
        if ends != (run[0].start, run[0].log_offset, run[-1].end, run[-1].log_end):
            return None
        had = sum(one.log_gone for one in run), sum(one.claims.holes for one in run)
        has = row.log_gone, row.claims.holes
        return run if has == had or (compacts and had <= has) else None

    def merge(self, row: Row, run: list[Row]) -> None:
        """Put a part in the place of a run; the segments that it spans become one."""
        group = [one for one in self.segments if any(mine in one.rows for mine in run)]
        rows = [mine for one in group for mine in one.rows]
        low = rows.index(run[0])
        rows[low : low + len(run)] = [row]
        at = self.segments.index(group[0])
        times = [time for one in group for time in one.times]
        had_ms = max(times, default=group[0].had_ms)
        united = replace(group[0], rows=rows, sealed=group[-1].sealed, had_ms=had_ms)
        self.segments[at : at + len(group)] = [united]

    def _spanned(self, first: int, row: Row) -> list[Segment]:
        """The segments that a part spans, if they could be one."""
        group = [self.segments[first]]
        for segment in self.segments[first + 1 :]:
            before = group[-1]
            if before.rows[-1].end >= row.end:
                break
            if not before.sealed or not segment.sealed or before.rows[-1].end != segment.queue_base:
                return []
            group.append(segment)
        return group
