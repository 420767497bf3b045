"""Whether store times of what is archived are those of a segment, so far as logs tell. Pure.

Two tiers whose brokers have the same names have the same queues and offsets, and an archive cannot tell them apart by these;
by the times of their messages it can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.archive.model import Archived
    from tiered.log.parts import Segment


def has_times(stretches: Sequence[Archived], segment: Segment, start: int, end: int) -> bool:
    """Whether they are.

    Args:
        stretches: What is archived of these offsets, whole stretches.
        segment: Of the tier.
        start: First of the segment's offsets that count.
        end: One past the last.
    """
    mine = segment.parts.store_times
    theirs = [(f.store_min_ms, f.store_max_ms) for one in stretches for f in one.files]
    if mine is None or not theirs:
        return not theirs
    low, high = mine
    found = min(low for low, _ in theirs), max(high for _, high in theirs)
    if any(one.start < start or one.end > end for one in stretches):
        return found[0] <= low and high <= found[1]
    is_within = low <= found[0] and found[1] <= high
    is_plain = not any(one.bad for one in stretches)  # of bad records the archive knows no times
    touches = found[0] == low or found[1] == high  # a part that was cut keeps its old end's time
    return is_within and (touches or not is_plain)
