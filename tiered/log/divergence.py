"""Where a queue's local history parts from the tier's: one pure search over two functions that tell marks.

Equality of a prefix is monotone: when two histories differ at one offset, they differ at all later ones. So the last common
message is found by bisection, first over the last messages of the parts (whose marks the journal has), then within one
part. Offsets that cannot be compared (a hole on either side, a gap) are passed over downwards and decide nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

UNCOMPARED_MAX = 64
"""So many offsets in a row are tried that cannot be compared."""


def first_difference(
    low: int, high: int, ends: Sequence[int], same: Callable[[int], bool | None]
) -> tuple[int, bool]:
    """Find where two histories part.

    Args:
        low: First offset that both have.
        high: One past the last that both have; above ``low``.
        ends: Offsets that are cheap to compare, ascending; those outside ``[low, high)`` are ignored.
        same: Whether both have the same message at an offset; None when that cannot be told.

    Returns:
        The first offset from which they differ (``high``: nowhere, as far as can be told), and whether any common
        message was found before it.
    """
    known, found, differs = low - 1, False, high
    cheap = ends[bisect_left(ends, low) : bisect_right(ends, high - 1)]
    if not cheap or cheap[-1] != high - 1:
        cheap = [*cheap, high - 1]
    for row in (cheap, range(low, high)):
        begin, end = 0, len(row)
        while begin < end:
            middle = (begin + end) // 2
            at = row[middle]
            if at <= known:
                begin = middle + 1
            elif at >= differs:
                end = middle
            else:
                offset, answer = _nearest(at, known, same)
                if answer is False:
                    differs = offset
                else:
                    known, found = at, found or answer is True
    return differs, found


def _nearest(at: int, above: int, same: Callable[[int], bool | None]) -> tuple[int, bool | None]:
    """The answer for the nearest offset at or below ``at`` that has one; None when there is none above ``above``."""
    for offset in range(at, max(above, at - UNCOMPARED_MAX), -1):
        answer = same(offset)
        if answer is not None:
            return offset, answer
    return at, None
