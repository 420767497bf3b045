"""The consume queues as an index of the log: where its records begin, read ahead for many queues at once.

Entries of all queues, merged by the places that they name, tile a sound log. They are hints: ``walk_records`` checks them
against the sizes and magics in the log, so stale or missing entries cost a walk record by record, and nothing else. A queue
that cannot be read has no hints; reading its messages reports the error.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.errors import InvalidError
from tiered.format.items import is_filler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiered.format.items import Items
    from tiered.local.consumequeues import Flags, Longs, QueueIndex

_SPAN_BYTES: Final = 64 << 20
"""Of the log that is looked ahead at once: a read of each queue is paid once for so much."""
_QUEUES_MAX: Final = 1024
"""Queues that are read ahead; with more, their reads cost more than walking the log."""
_UNITS_MIN: Final = 256
_NONE: Final = np.zeros(0, np.int64)


class LogIndex:
    """Where records begin, as far as consume queues say. For one thread at a time."""

    def __init__(
        self, queues: Callable[[], Iterable[tuple[QueueIndex, int | None]]], small: Longs = _NONE
    ) -> None:
        """Ask later.

        Args:
            queues: Each queue of interest, with a unit before which none is of interest; None: not known. Asked for
                each span of the log.
            small: int64[n], rising: the places that other queues list.
        """
        self._queues = queues
        self._small = small
        self._start = self._end = 0  # of the log, that ``_places`` is about
        self._places = _NONE
        self._cursors: dict[QueueIndex, tuple[int, int]] = {}
        """The first unit of each queue that names a place at or behind ``_end``, and how many to read at once."""

    def places(self, start: int, end: int, limit: int) -> Longs:
        """Places of records in ``[start, end)``, rising.

        Args:
            limit: What lies below it is listed by now.
        """
        if not self._start <= start <= self._end:
            self._start = self._end = start
            self._places, self._cursors = _NONE, {}
        if end > self._end:
            self._read_ahead(start, min(max(end, start + _SPAN_BYTES), limit))
        low, high = np.searchsorted(self._places, (start, end)).tolist()
        return self._places[low:high]

    def _read_ahead(self, start: int, end: int) -> None:
        low, high = np.searchsorted(self._small, (self._end, end)).tolist()
        found = [self._small[low:high]]
        queues = list(self._queues())
        for index, first in queues if len(queues) <= _QUEUES_MAX else ():
            with suppress(InvalidError):  # hints only: reading its messages reports it
                found += self._read(index, first, end)
        kept = self._places[np.searchsorted(self._places, start) :]
        self._places = np.concatenate((kept, np.sort(np.concatenate(found))))
        self._start, self._end = start, end

    def _read(self, index: QueueIndex, first: int | None, end: int) -> Iterable[Longs]:
        """What a queue lists from where it was read to, up to ``end`` of the log."""
        unit, count = self._cursors.get(index, (first, _UNITS_MIN))
        if unit is None:
            unit = self._first_unit(index)
        begun = unit
        while True:
            units = index.units(unit, unit + count)
            places = units["physical_offset"].astype(np.int64)
            good = _are_good(index, units)
            is_behind = good & (places >= end)
            # What is not written yet is read again the next time.
            written = np.flatnonzero(good)
            size = int(written[-1]) + 1 if len(written) else 0
            if is_behind.any():
                size = int(np.argmax(is_behind))
            unit += size
            yield places[:size][good[:size] & (places[:size] >= self._end)]
            if size < count:
                break
            count *= 2
        self._cursors[index] = unit, max(_UNITS_MIN, (unit - begun) * 5 // 4)

    def _first_unit(self, index: QueueIndex) -> int:
        """Before it a queue lists nothing at or behind ``_end``: most walks begin where the log does, as queues do."""
        start = self._end
        low, high = index.unit_span()
        first = index.units(low, min(high, low + 1))
        if len(first) and _are_good(index, first).all() and first["physical_offset"][0] >= start:
            return low
        return index.split(low, high, lambda units: units["physical_offset"] < start)


def _are_good(index: QueueIndex, units: Items) -> Flags:
    good = index.is_valid(units)
    return good if index.is_batch else good & ~is_filler(units)
