"""One life of a queue, as the simulation's own history has it: parts, segments, gaps; and how a life is divided."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from simulation.contents import Claims, is_hole, mark_of, store_ms

if TYPE_CHECKING:
    from collections.abc import Sequence


class Row:
    """One part: what its entry says of it, and its records.

    Attributes:
        values: All fields, those that were left out as well.
        records: Of its items, holes included.
        claims: What it says of them.
        packed: Bytes of the commit-log object's payload as it is stored; 0: nobody has tried to compress it.
    """

    def __init__(self, values: list[Any], records: list[bytes]) -> None:
        self.values = [*values, 0, 0][:20]
        self.records = records
        self.claims = Claims(*self.values[15:19])
        self.packed: int = self.values[19]
        self.keys = (values[0], values[6])
        self.log_offset: int = values[12]
        self.start: int = values[13]
        self.end: int = values[13] + values[14]
        self.log_end: int = values[12] + values[2] - values[1]

    def divided(self, head: list[Any]) -> tuple[Row, Row] | None:
        """The part as two ranges of its objects; None when ``head`` is not a beginning of it."""
        mine, count = self.values, head[14]
        head = [*head, 0, 0][:20]
        # All that is said of both objects but the ends, and both offsets.
        same = (0, 1, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 19)
        fits = 0 < count < mine[14] and [head[n] for n in same] == [mine[n] for n in same]
        if not fits or head[8] - head[7] != 20 * count or not head[1] <= head[2] <= mine[2]:
            return None
        rest = [*mine]
        rest[1], rest[7] = head[2], head[8]
        rest[12], rest[13] = head[12] + head[2] - head[1], head[13] + count
        rest[14] = mine[14] - count
        left = self.records[count:]
        holes = sum(map(is_hole, left))
        rest[15:19] = astuple(self.claims.of_some(holes, len(left), self.claims.mark))
        return Row(head, self.records[:count]), Row(rest, left)

    def beginning(self, count: int) -> Claims:
        """What its first records are to be said to be."""
        head = self.records[:count]
        return self.claims.of_some(sum(map(is_hole, head)), count, mark_of(head[-1]))


@dataclass
class Segment:
    """A row of parts.

    Attributes:
        base: Log offset of its beginning.
        queue_base: Queue offset of its beginning.
        rows: Its parts.
        created_ms: Time of the entry that named its first part.
        sealed: It takes none any more.
        merged: Parts of it were rewritten.
    """

    base: int
    queue_base: int
    rows: list[Row]
    created_ms: int
    sealed: bool = False
    merged: bool = False

    @property
    def newest_ms(self) -> int:
        """The newest store time in it; without messages, when it began."""
        times = [store_ms(raw) for row in self.rows for raw in row.records if not is_hole(raw)]
        return max(times, default=self.created_ms)


@dataclass
class Life:
    """One life of a queue.

    Attributes:
        incarnation: Its number.
        start: Where it began.
        min: First offset now.
        commit: One past the last.
        log_end: End of its tiered log.
        segments: In order.
        gaps: ``[start, end)``.
        ended: It is over.
        quarantined: Damaged records that were put aside.
    """

    incarnation: int
    start: int
    min: int
    commit: int
    log_end: int = 0
    segments: list[Segment] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False
    quarantined: int = 0

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

    def divide(self, end: int, head: list[Any] | None) -> tuple[Life, Life] | None:
        """The tail ``[end, commit)``, ended, and the life without it; None when ``head`` does not fit."""
        kept: list[Segment] = []
        gone: list[Segment] = []
        is_used = head is None
        for segment in self.segments:
            before = [row for row in segment.rows if row.end <= end]
            behind = [row for row in segment.rows if row.start >= end]
            for row in segment.rows:
                if row.start < end < row.end:
                    two = row.divided(head) if head else None
                    if two is None or two[0].end != end:
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
        return tail, replace(self, commit=end, log_end=log_end, segments=kept, gaps=gaps)

    def expire(self, low: int, *, with_open: bool) -> list[Segment]:
        """Give up the segments below ``low``, if that is where one begins; which these were."""
        gone = [segment for segment in self.segments if segment.rows[-1].end <= low]
        kept = self.segments[len(gone) :]
        may = with_open or self.ended or all(segment.sealed for segment in gone)
        begins = kept[0].queue_base if kept else self.commit
        if may and begins == low and self.min < low <= self.commit:
            self.min, self.segments = low, kept
            self.gaps = [gap for gap in self.gaps if gap[1] > low]
            return gone
        return []


def runs(old: Sequence[Row], new: Sequence[Row]) -> list[list[Row]] | None:
    """Which of ``old`` each of ``new`` stands for; None when it is not ``old`` with neighbours joined, as far as
    offsets and sizes tell."""
    left, found = [*old], []
    for row in new:
        run = [one for one in left if one.start < row.end]
        left = left[len(run) :]
        ends = (row.start, row.log_offset, row.end, row.log_end)
        if not run or ends != (run[0].start, run[0].log_offset, run[-1].end, run[-1].log_end):
            return None
        found.append(run)
    return None if left else found
