"""Rows of half-open ranges of whole numbers, in order and apart from one another. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiered.log.wellformed import check_ints

if TYPE_CHECKING:
    import numpy.typing as npt

Ranges = tuple[tuple[int, int], ...]


def clipped(ranges: Ranges, low: int, high: int) -> Ranges:
    """The part of ranges that lies in ``[low, high)``."""
    found = ((max(start, low), min(end, high)) for start, end in ranges)
    return tuple((start, end) for start, end in found if start < end)


def ranges_of(rows: list[Any]) -> Ranges:
    """What is covered of a life, from JSON.

    Raises:
        ValueError: It is no such thing; ``TypeError`` means the same.
    """
    found = tuple((start, end) for start, end in rows)
    check_ints((value for pair in found for value in pair), "what is covered")
    if found != joined(found) or any(start >= end for start, end in found):
        raise ValueError(f"what is covered is not in order: {found!r:.200}")
    return found


def joined(ranges: Ranges) -> Ranges:
    """The same numbers, neighbours made one."""
    rows: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if rows and start <= rows[-1][1]:
            rows[-1] = (rows[-1][0], max(end, rows[-1][1]))
        else:
            rows.append((start, end))
    return tuple(rows)


def without(ranges: Ranges, low: int, high: int) -> Ranges:
    """Ranges without what lies in ``[low, high)``."""
    pieces = [(s, min(e, low)) for s, e in ranges] + [(max(s, high), e) for s, e in ranges]
    return tuple(sorted((s, e) for s, e in pieces if s < e))


def ranges_at(numbers: npt.NDArray[np.int64]) -> Ranges:
    """Ascending numbers as ranges."""
    if not len(numbers):
        return ()
    cuts = np.flatnonzero(np.diff(numbers) != 1)
    starts = numbers[np.concatenate(([0], cuts + 1))].tolist()
    ends = numbers[np.concatenate((cuts, [len(numbers) - 1]))].tolist()
    return tuple((start, end + 1) for start, end in zip(starts, ends, strict=True))


def count_of(ranges: Ranges) -> int:
    """How many numbers."""
    return sum(end - start for start, end in ranges)


def is_in(numbers: npt.NDArray[np.int64], ranges: Ranges) -> npt.NDArray[np.bool_]:
    """Which numbers lie in ranges."""
    edges = np.array([edge for pair in ranges for edge in pair], np.int64)
    found: npt.NDArray[np.bool_] = np.searchsorted(edges, numbers, side="right") % 2 == 1
    return found
