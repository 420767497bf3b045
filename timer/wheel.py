"""A hashed timing wheel: what is due when, in slots of one second. Pure; for one thread.

Each entry is three numbers (due time, source, offset), so a million take some tens of MB; messages are read when they fire.
Entries come and go as columns. Within a slot the order is made when it fires: due time, then source, then offset. A slot
that lies in the past fires at once, so what comes late is not lost.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from timer.records import Longs

SLOT_MS: Final = 1000
_WIDTH: Final = 3


@dataclass(frozen=True, slots=True)
class Fired:
    """Entries that are due, in order.

    Attributes:
        dues: int64[n], due times.
        sources: int64[n].
        offsets: int64[n].
    """

    dues: Longs
    sources: Longs
    offsets: Longs

    def __len__(self) -> int:
        """How many."""
        return len(self.dues)

    def part(self, low: int, high: int) -> Fired:
        """Those of ``[low, high)``."""
        return Fired(self.dues[low:high], self.sources[low:high], self.offsets[low:high])


class TimingWheel:
    """Entries by when they are due, in slots of a second; there is a slot only where something is due."""

    def __init__(self) -> None:
        self._slots: dict[int, array[int]] = {}
        self._order: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        """Entries that have not fired."""
        return self._count

    def add(self, dues: Longs, source: int, offsets: Longs) -> None:
        """Take entries of one source; ``dues`` in any order, though ascending costs least."""
        rows = np.column_stack((dues, np.full(len(dues), source), offsets))
        self._add(rows)

    def _add(self, rows: Longs) -> None:
        slots = rows[:, 0] // SLOT_MS
        if len(slots) > 1 and (slots[1:] < slots[:-1]).any():
            order = np.argsort(slots, kind="stable")
            rows, slots = rows[order], slots[order]
        edges = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
        for low, high in pairwise(edges):
            if low < high:
                self._slot(int(slots[low])).frombytes(rows[low:high].astype(np.int64).tobytes())
        self._count += len(rows)

    def _slot(self, slot: int) -> array[int]:
        entries = self._slots.get(slot)
        if entries is None:
            entries = self._slots[slot] = array("q")
            heapq.heappush(self._order, slot)
        return entries

    @property
    def next_ms(self) -> int | None:
        """When the first slot that has anything begins; None: none has."""
        return self._order[0] * SLOT_MS if self._order else None

    @property
    def first_due_ms(self) -> int | None:
        """The smallest due time; None: nothing is there."""
        return min(self._slots[self._order[0]][::_WIDTH]) if self._order else None

    def fire(self, now_ms: int) -> Fired:
        """Take out what is due by now, in order; of the present slot what is due later stays."""
        found = [np.empty((0, _WIDTH), np.int64)]
        while self._order and self._order[0] * SLOT_MS <= now_ms:
            slot = heapq.heappop(self._order)
            rows = np.frombuffer(self._slots.pop(slot), np.int64).reshape(-1, _WIDTH)
            self._count -= len(rows)
            rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
            due = int(np.searchsorted(rows[:, 0], now_ms, side="right"))
            found.append(rows[:due])
            if due < len(rows):
                self._add(rows[due:])
                break
        return Fired(*np.ascontiguousarray(np.concatenate(found).T))
