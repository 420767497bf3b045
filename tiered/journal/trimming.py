"""Which entries and checkpoints of a journal are needed no more. Pure.

A journal is trimmed up to a checkpoint: what is older than it goes, the checkpoint and its own entry stay. Two checkpoints
at least are left, with all entries behind the older one, so that one damaged checkpoint costs nothing but time; and enough
history to tell what was named within the grace, which gc needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

CHECKPOINTS_KEPT = 2


def replay_starts(entries: Collection[int], checkpoints: Collection[int]) -> list[int]:
    """Where replay up to the head can begin, earliest first.

    Args:
        entries: Numbers that are there.
        checkpoints: Likewise.

    Returns:
        Numbers of checkpoints behind which no entry is missing; 0 for the beginning of the journal.
    """
    head = max([*entries, *checkpoints], default=0)
    first, there = head + 1, set(entries)
    while first - 1 in there:
        first -= 1
    return [0] * (first == 1) + sorted(n for n in checkpoints if n >= first - 1)


def trim_bound(checkpoints: Collection[int], base: int) -> int:
    """The checkpoint that becomes the oldest; 0 when nothing is to be trimmed.

    Args:
        checkpoints: Numbers of those that are there.
        base: The history behind this entry is still needed.
    """
    kept = sorted(checkpoints)[-CHECKPOINTS_KEPT:]
    if len(kept) < CHECKPOINTS_KEPT:
        return 0
    return max((n for n in checkpoints if n <= min(kept[0], base)), default=0)


def is_trimmed(number: int, bound: int) -> bool:
    """Whether the entry or checkpoint ``number`` goes; nothing does for a bound of 0."""
    return number < bound
