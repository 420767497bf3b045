"""Rows of half-open ranges of whole numbers, in order and apart from one another. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def _are_in_order(ranges: tuple[tuple[int, int], ...]) -> None:
    if ranges != joined(ranges) or any(start >= end for start, end in ranges):
        raise ValueError(f"ranges are not in order: {ranges!r:.200}")


Ranges = Annotated[tuple[tuple[int, int], ...], _are_in_order]


def clipped(ranges: Ranges, low: int, high: int) -> Ranges:
    """The part of ranges that lies in ``[low, high)``."""
    found = ((max(start, low), min(end, high)) for start, end in ranges)
    return tuple((start, end) for start, end in found if start < end)


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
    chunks = [(s, min(e, low)) for s, e in ranges] + [(max(s, high), e) for s, e in ranges]
    return tuple(sorted((s, e) for s, e in chunks if s < e))


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
