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
_NONE: Final = np.zeros((2, 0), np.int64)


class LogIndex:
    """Where records begin, as far as consume queues say. For one thread at a time."""

    def __init__(
        self, queues: Callable[[], Iterable[tuple[QueueIndex, int | None]]], small: Longs = _NONE
    ) -> None:
        """Ask later.

        Args:
            queues: Each queue of interest, with a unit before which none is of interest; None: not known. Asked for
                each span of the log.
            small: int64[2, n], the places that other queues list, rising, and the sizes beside them.
        """
        self._queues = queues
        self._small = small
        self._start = self._end = 0  # of the log, that ``_listed`` is about
        self._listed = _NONE  # int64[2, n], as of ``small``
        self._cursors: dict[QueueIndex, tuple[int, int]] = {}
        """The first unit of each queue that names a place at or behind ``_end``, and how many to read at once."""

    def places(self, start: int, end: int, limit: int) -> Longs:
        """Places of records in ``[start, end)``, rising.

        Args:
            limit: What lies below it is listed by now.
        """
        places: Longs = self._between(start, end, limit)[0]
        return places

    def tiled_end(self, start: int, end: int) -> int:
        """Up to where records lie one behind the other from ``start`` on, each listed once; at most ``end``."""
        at = start
        while at < end:
            places, sizes = self._between(at, min(end, at + _SPAN_BYTES), end)
            ends = places + sizes
            leads_on = np.concatenate((places[:1] == at, places[1:] == ends[:-1]))
            count = len(places) if leads_on.all() else int(np.argmin(leads_on))
            if not count:
                break
            at = int(ends[count - 1])
            if count < len(places):
                break
        return at

    def _between(self, start: int, end: int, limit: int) -> Longs:
        if not self._start <= start <= self._end:
            self._start = self._end = start
            self._listed, self._cursors = _NONE, {}
        if end > self._end:
            self._read_ahead(start, min(max(end, start + _SPAN_BYTES), limit))
        low, high = np.searchsorted(self._listed[0], (start, end)).tolist()
        return self._listed[:, low:high]

    def _read_ahead(self, start: int, end: int) -> None:
        low, high = np.searchsorted(self._small[0], (self._end, end)).tolist()
        found = [self._small[:, low:high]]
        queues = list(self._queues())
        for index, first in queues if len(queues) <= _QUEUES_MAX else ():
            with suppress(InvalidError):  # hints only: reading its messages reports it
                found += self._read(index, first, end)
        kept = self._listed[:, np.searchsorted(self._listed[0], start) :]
        more = np.concatenate(found, axis=1)
        self._listed = np.concatenate((kept, more[:, np.argsort(more[0], kind="stable")]), axis=1)
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
            chosen = np.flatnonzero(good[:size] & (places[:size] >= self._end))
            yield np.stack((places[chosen], units["size"][chosen].astype(np.int64)))
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
