"""Where in a log file records begin, by all consume queues: the next one behind damage, and whether any is listed."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from tiered.local.catalog import Catalog
    from tiered.local.consumequeues import QueueIndex
    from tiered.local.entries import Flags, Longs
    from tiered.local.files import FileRow

_READ_MAX: Final = 4_000
"""Entries of one queue read at once."""


class Resync:
    """Remembers, for the file with the damage, where its records begin. For one thread."""

    def __init__(self, log: FileRow, catalog: Catalog) -> None:
        self._log = log
        self._catalog = catalog
        self._base: int | None = None
        self._known: list[int] = []

    def behind(self, position: int, limit: int) -> int:
        """The first place behind ``position`` where a record is said to begin.

        Args:
            position: Where there is damage.
            limit: Returned when there is nothing below it.

        Returns:
            Above ``position``, at most ``limit``.
        """
        base = self._log.base_of(position)
        if base is None:
            following = self._log.next_base(position)
            return min(limit, following) if following is not None else limit
        self._look_at(base)
        at = bisect_right(self._known, position)
        if at < len(self._known):
            return min(limit, self._known[at])
        following = self._log.next_base(base)
        return min(limit, following) if following is not None else limit

    def lists(self, places: Longs) -> Flags:
        """Whether each place (all of one file, at least one) is listed by any queue at any offset."""
        base = self._log.base_of(int(places[0]))
        if base is None:
            return np.zeros(len(places), np.bool_)
        self._look_at(base)
        return np.isin(places, np.array(self._known, np.int64))

    def _look_at(self, base: int) -> None:
        if base != self._base:
            self._base, self._known = base, self._places(base, base + self._log.file_bytes)

    def _places(self, start: int, end: int) -> list[int]:
        """Physical offsets in ``[start, end)`` that any consume queue lists."""
        tiered = [state.index for state in list(self._catalog.states.values())]
        found = [self._places_of(index, start, end) for index in (*tiered, *self._catalog.others)]
        return np.unique(np.concatenate(found)).tolist() if found else []

    def _places_of(self, index: QueueIndex, start: int, end: int) -> Longs:
        """Those of one queue. Bisection finds where to begin; entries that break the order only cost a place."""
        _, last = index.span()
        first = index.first_not_below(start, last)
        pieces = [index.rebuilt.places(start, end)]
        while first < last:
            entries = index.entries(first, min(last, first + _READ_MAX))
            written = entries.is_written
            inside = (
                written & (entries.physical_offsets >= start) & (entries.physical_offsets < end)
            )
            pieces.append(entries.physical_offsets[inside])
            if not inside.any():
                break
            first += len(entries)
        return np.concatenate(pieces)
