"""Rows of half-open ranges of whole numbers, in order and apart from one another. Pure."""

from __future__ import annotations

from typing import Any

from tiered.log.wellformed import check_ints

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
