"""What the broker truncated: a queue ends at an earlier offset, and what lay behind it is kept as a life that is over.

The common case: a power failure took a tail that had been tiered already, and the broker wrote other messages at the same
queue offsets. ``cut`` divides the present life at ``end``: the life goes on with ``[min, end)``, and ``[end, commit)``
becomes a *tail*, a life of the same incarnation before it, ended, with its parts still named (so nothing deletes them).
No object is written or changed (I4): a part that straddles ``end`` is cut by reference into two ranges of its section.

All values are immutable, all functions pure. A cut that does not fit the life changes nothing: the writer plans it anew,
since a merge may have gathered the part that it names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tiered.log.parts import Parts
from tiered.log.ranges import clipped
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.log.actions import Head, Truncate
    from tiered.log.parts import Gap, Part, QueueLife, Segment


def cut(life: QueueLife, said: Truncate, entry: int) -> tuple[QueueLife, QueueLife] | None:
    """Divide a life.

    Args:
        entry: Number of the journal entry that says so.

    Returns:
        The tail ``[end, was)``, ended, and the life ``[min, end)``; None when it does not fit.
    """
    end, was, head = said.end, said.was, said.head
    if was != life.commit_offset or not life.min_offset < end < was:
        return None
    kept: list[Segment] = []
    gone: list[Segment] = []
    is_head_used = head is None
    for segment in life.segments:
        before = [part for part in segment.parts if part.queue_end <= end]
        behind = [part for part in segment.parts if part.queue_offset >= end]
        for part in segment.parts:
            if part.queue_offset < end < part.queue_end:
                first = None if head is None else head_of(part, end, head)
                if first is None:
                    return None
                is_head_used = True
                before, behind = [*before, first], [rest_of(part, first), *behind]
        if before:
            kept.append(replace(segment, parts=Parts.of(before)))
        if behind:
            gone.append(replace(segment, parts=Parts.of(behind), sealed=True))
    if not is_head_used:
        return None
    gaps_kept, gaps_gone = _cut_gaps(life.gaps, end)
    log_end = kept[-1].parts.log_end if kept else _log_start(life)
    tail = replace(
        life,
        min_offset=end,
        segments=tuple(gone),
        gaps=gaps_gone,
        quarantined=0,
        ended=said.reason,
        indexed=clipped(life.indexed, end, was),
        cut_at=end,
        cut_by=entry,
    )
    rest = replace(
        life,
        commit_offset=end,
        log_end=log_end,
        segments=tuple(kept),
        gaps=gaps_kept,
        indexed=clipped(life.indexed, 0, end),
        passes=tuple(replace(one, end=min(one.end, end)) for one in life.passes),
    )
    return tail, rest


def head_of(part: Part, end: QueueOffset, head: Head) -> Part | None:
    """The items of a part before ``end``; None when the head is not of this part, or cannot be.

    Its time bounds stay those of the whole: they still bound what is left.
    """
    count = end - part.queue_offset
    fits = (
        0 < count < part.count
        and 0 <= head.holes <= min(count, part.holes)
        and part.holes - head.holes <= part.count - count
        and (head.log_offset, head.queue_offset) == (part.log_offset, part.queue_offset)
        and head.of_holes == part.holes
        and 0 <= head.log_bytes <= part.log_bytes
    )
    if not fits:
        return None
    timed = count > head.holes
    return replace(
        part,
        log_bytes=head.log_bytes,
        log_gone=0,
        count=count,
        holes=head.holes,
        store_min_ms=part.store_min_ms if timed else -1,
        store_max_ms=part.store_max_ms if timed else -1,
        last=head.last,
    )


def rest_of(part: Part, head: Part) -> Part:
    """What is behind the head of a part."""
    count, holes = part.count - head.count, part.holes - head.holes
    timed = count > holes
    return replace(
        part,
        log_offset=LogOffset(head.log_end),
        queue_offset=QueueOffset(head.queue_end),
        log_bytes=part.log_bytes - head.log_bytes,
        count=count,
        holes=holes,
        store_min_ms=part.store_min_ms if timed else -1,
        store_max_ms=part.store_max_ms if timed else -1,
        records_at=part.records_at + head.log_bytes,
        items_at=part.items_at + head.count,
    )


def is_tail(lives: Sequence[QueueLife], number: int) -> bool:
    """Whether the life at ``number`` is what a broker truncated, and its incarnation went on without it."""
    return number + 1 < len(lives) and lives[number + 1].incarnation == lives[number].incarnation


def _cut_gaps(gaps: Sequence[Gap], end: QueueOffset) -> tuple[tuple[Gap, ...], tuple[Gap, ...]]:
    kept = tuple(replace(gap, end=min(gap.end, end)) for gap in gaps if gap.start < end)
    gone = tuple(replace(gap, start=max(gap.start, end)) for gap in gaps if gap.end > end)
    return kept, gone


def _log_start(life: QueueLife) -> LogOffset:
    return life.segments[0].base_offset if life.segments else life.log_end
