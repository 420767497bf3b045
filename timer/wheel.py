"""A hashed timing wheel: what is due when, in slots of one second. Pure; for one thread.

Each entry is three numbers (due time, source, offset), so a million take some tens of MB; messages are read when they fire.
Within a slot the order is made when it fires: due time, then source, then offset. A slot that lies in the past fires at
once, so what comes late is not lost.
"""

from __future__ import annotations

import heapq
from array import array
from typing import Final, NamedTuple

SLOT_MS: Final = 1000


class Fired(NamedTuple):
    """An entry that is due."""

    due_ms: int
    source: int
    offset: int


class TimingWheel:
    """See the module."""

    def __init__(self) -> None:
        self._slots: dict[int, array[int]] = {}
        self._order: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        """Entries that have not fired."""
        return self._count

    def add(self, due_ms: int, source: int, offset: int) -> None:
        """Take an entry."""
        slot = due_ms // SLOT_MS
        entries = self._slots.get(slot)
        if entries is None:
            entries = self._slots[slot] = array("q")
            heapq.heappush(self._order, slot)
        entries.extend((due_ms, source, offset))
        self._count += 1

    @property
    def next_ms(self) -> int | None:
        """When the first slot that has anything begins; None: none has."""
        return self._order[0] * SLOT_MS if self._order else None

    @property
    def first_due_ms(self) -> int | None:
        """The smallest due time; None: nothing is there."""
        return min(self._slots[self._order[0]][::3]) if self._order else None

    def fire(self, now_ms: int) -> list[Fired]:
        """Take out what is due by now, in order; of the present slot what is due later stays."""
        found: list[Fired] = []
        while self._order and self._order[0] * SLOT_MS <= now_ms:
            slot = heapq.heappop(self._order)
            entries = self._slots.pop(slot)
            self._count -= len(entries) // 3
            all_of_it = sorted(map(Fired._make, zip(*[iter(entries)] * 3, strict=True)))
            due = [one for one in all_of_it if one.due_ms <= now_ms]
            found += due
            if len(due) < len(all_of_it):
                for late in all_of_it[len(due) :]:
                    self.add(*late)
                break
        return found
