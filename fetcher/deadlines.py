"""The moments until which askers wait."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

_SMALL = 64


class Deadlines(Generic[T]):
    """Things with a moment, the earliest first. Not for several threads at once.

    What has ended otherwise is dropped at once, and only its moment stays in the heap for a while: an answer that was
    handed out long before its deadline must not be held in memory until then.
    """

    def __init__(self) -> None:
        self._live: dict[int, T] = {}
        self._heap: list[tuple[float, int]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, moment_s: float, thing: T) -> int:
        """Note when ``thing`` has its end; its number, for ``drop``."""
        self._number += 1
        self._live[self._number] = thing
        heappush(self._heap, (moment_s, self._number))
        return self._number

    def drop(self, number: int) -> None:
        """It needs its deadline no more (harmless when it is gone)."""
        self._live.pop(number, None)
        if len(self._heap) > _SMALL + 2 * len(self._live):
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapify(self._heap)

    def next_s(self) -> float | None:
        """The earliest moment; None: there is none."""
        while self._heap and self._heap[0][1] not in self._live:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[T]:
        """All whose moment has come, earliest first; they are gone from here."""
        found = []
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            found.append(self._live.pop(heappop(self._heap)[1]))
        return found
