"""What the broker truncated: a queue ends at an earlier offset; what lay behind it is kept, as an ended incarnation.

The common case: a power failure took a tail that had been tiered already, and the broker wrote other messages at the same
queue offsets. ``cut`` divides the present incarnation at ``end``: the incarnation goes on with ``[min, end)``, and ``[end,
commit)`` becomes a *tail*, an incarnation of the same number before it, ended, with its parts still named (so nothing
deletes them). No object is written or changed (I4): a part that straddles ``end`` is cut by reference into two ranges of its
section.

All values are immutable, all functions pure. A cut that does not fit the incarnation changes nothing: the writer plans it
anew, since a merge may have gathered the part that it names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tiered.log.lineage import moved
from tiered.log.parts import Parts
from tiered.log.ranges import clipped
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.log.actions import Head, Truncate
    from tiered.log.parts import Gap, Incarnation, Part, Segment


def cut(
    incarnation: Incarnation, said: Truncate, entry: int
) -> tuple[Incarnation, Incarnation] | None:
    """Divide an incarnation.

    Returns:
        The tail ``[end, was)``, ended, and the incarnation ``[min, end)``; None when it does not fit.
    """
    end, was, head = said.end, said.was, said.head
    if was != incarnation.commit_offset or not incarnation.min_offset < end < was:
        return None
    kept: list[Segment] = []
    gone: list[Segment] = []
    is_head_used = head is None
    for segment in incarnation.segments:
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
    gaps_kept, gaps_gone = _cut_gaps(incarnation.gaps, end)
    begins = incarnation.segments[0].base_offset if incarnation.segments else incarnation.log_end
    log_end = kept[-1].parts.log_end if kept else begins
    tail = replace(
        incarnation,
        min_offset=end,
        segments=tuple(gone),
        gaps=gaps_gone,
        quarantined=0,
        ended=said.reason,
        indexed=clipped(incarnation.indexed, end, was),
        cut_at=end,
        cut_by=entry,
    )
    rest = replace(
        incarnation,
        commit_offset=end,
        log_end=log_end,
        segments=tuple(kept),
        gaps=gaps_kept,
        indexed=clipped(incarnation.indexed, 0, end),
        passes=tuple(replace(one, end=min(one.end, end)) for one in incarnation.passes),
        lineage=moved(incarnation.lineage, end),
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


def state_word(incarnations: Sequence[Incarnation], number: int) -> str:
    """What has become of an incarnation of a queue: ``truncated``, ``ended`` or ``present``."""
    if is_tail(incarnations, number):
        return "truncated"
    return "ended" if incarnations[number].ended else "present"


def is_tail(incarnations: Sequence[Incarnation], number: int) -> bool:
    """Whether the incarnation at ``number`` is what a broker truncated, and its incarnation went on without it."""
    return (
        number + 1 < len(incarnations)
        and incarnations[number + 1].number == incarnations[number].number
    )


def _cut_gaps(gaps: Sequence[Gap], end: QueueOffset) -> tuple[tuple[Gap, ...], tuple[Gap, ...]]:
    kept = tuple(replace(gap, end=min(gap.end, end)) for gap in gaps if gap.start < end)
    gone = tuple(replace(gap, start=max(gap.start, end)) for gap in gaps if gap.end > end)
    return kept, gone
