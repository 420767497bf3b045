"""What the broker took back: a queue ends at an earlier offset, and what lay behind it is kept as a life that is over.

The common case: a power failure took a tail that had been tiered already, and the broker wrote other messages at the same
queue offsets. ``cut`` divides the present life at ``end``: the life goes on with ``[min, end)``, and ``[end, commit)``
becomes a *tail*, a life of the same incarnation before it, ended, with its parts still named (so nothing deletes them).
No object is written or changed (I4): a part that straddles ``end`` is cut by reference into two ranges of its objects.

All values are immutable, all functions pure. A cut that does not fit the life changes nothing: the writer plans it anew,
since a seal may have merged the part that it names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tiered.format.consume_queue import ITEM_BYTES
from tiered.log.ranges import clipped
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.log.parts import Gap, ObjectRange, Part, QueueLife, Segment


def cut(
    life: QueueLife, *, end: QueueOffset, was: QueueOffset, head: Part | None, reason: str
) -> tuple[QueueLife, QueueLife] | None:
    """Divide a life.

    Args:
        life: The present one.
        end: Where it is to end, above its minimum and below its commit offset.
        was: Its commit offset, as the writer knew it.
        head: What stays of the part that ``end`` lies in; None when it lies between two parts, or in a gap.
        reason: Why.

    Returns:
        The tail ``[end, was)``, ended, and the life ``[min, end)``; None when it does not fit.
    """
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
                if head is None or head.queue_end != end or not is_head(part, head):
                    return None
                is_head_used = True
                before, behind = [*before, head], [rest_of(part, head), *behind]
        if before:
            kept.append(replace(segment, parts=tuple(before)))
        if behind:
            gone.append(replace(segment, parts=tuple(behind), sealed=True))
    if not is_head_used:
        return None
    gaps_kept, gaps_gone = _cut_gaps(life.gaps, end)
    parts = [part for segment in kept for part in segment.parts]
    log_end = parts[-1].log_end if parts else _log_start(life)
    tail = replace(
        life,
        min_offset=end,
        segments=tuple(gone),
        gaps=gaps_gone,
        quarantined=0,
        ended=reason,
        indexed=clipped(life.indexed, end, was),
        cut_at=end,
    )
    rest = replace(
        life,
        commit_offset=end,
        log_end=log_end,
        segments=tuple(kept),
        gaps=gaps_kept,
        indexed=clipped(life.indexed, 0, end),
    )
    return tail, rest


def is_head(part: Part, head: Part) -> bool:
    """Whether ``head`` is exactly the first items of ``part``, without the rest."""
    return (
        0 < head.count < part.count
        and 0 <= head.holes <= part.holes
        and part.holes - head.holes <= part.count - head.count
        and (head.log_offset, head.queue_offset) == (part.log_offset, part.queue_offset)
        and head.index.size_bytes == head.count * ITEM_BYTES
        and _is_begin(part.log, head.log)
        and _is_begin(part.index, head.index)
    )


def head_of(part: Part, count: int, *, log_bytes: int, holes: int, last: int) -> Part:
    """The first ``count`` items of a part. Its time bounds stay those of the whole: they still bound what is left.

    Args:
        part: A part.
        count: Items to keep, above 0 and below all.
        log_bytes: Bytes of the commit log that they need.
        holes: Holes among them.
        last: Mark of the last of them (``tiered.log.marks``), or 0.
    """
    timed = count > holes
    return replace(
        part,
        log=replace(part.log, end=part.log.start + log_bytes),
        index=replace(part.index, end=part.index.start + count * ITEM_BYTES),
        count=count,
        holes=holes,
        store_min_ms=part.store_min_ms if timed else -1,
        store_max_ms=part.store_max_ms if timed else -1,
        last=last,
    )


def rest_of(part: Part, head: Part) -> Part:
    """What is behind the head of a part."""
    count, holes = part.count - head.count, part.holes - head.holes
    timed = count > holes
    return replace(
        part,
        log=replace(part.log, start=head.log.end),
        index=replace(part.index, start=head.index.end),
        log_offset=LogOffset(head.log_end),
        queue_offset=QueueOffset(head.queue_end),
        count=count,
        holes=holes,
        store_min_ms=part.store_min_ms if timed else -1,
        store_max_ms=part.store_max_ms if timed else -1,
    )


def is_tail(lives: Sequence[QueueLife], number: int) -> bool:
    """Whether the life at ``number`` is what a broker took back, and its incarnation went on without it."""
    return number + 1 < len(lives) and lives[number + 1].incarnation == lives[number].incarnation


def _is_begin(whole: ObjectRange, begin: ObjectRange) -> bool:
    return replace(begin, end=whole.end) == whole and whole.start <= begin.end <= whole.end


def _cut_gaps(gaps: Sequence[Gap], end: QueueOffset) -> tuple[tuple[Gap, ...], tuple[Gap, ...]]:
    kept = tuple(replace(gap, end=min(gap.end, end)) for gap in gaps if gap.start < end)
    gone = tuple(replace(gap, start=max(gap.start, end)) for gap in gaps if gap.end > end)
    return kept, gone


def _log_start(life: QueueLife) -> LogOffset:
    return life.segments[0].base_offset if life.segments else life.log_end
