"""What was met in a store that is explained and recorded: counted once, however often it is read again."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tiered.local.face import HoleReason
    from tiered.model import MessageQueue

_REMEMBERED_MAX: Final = 100_000
"""Holes that are remembered one by one; beyond it they are counted at each sight."""


class Sightings:
    """Counts holes, dropped records and whatever else is named. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holes: set[tuple[MessageQueue, int]] = set()
        self._counts: Counter[str] = Counter()
        self._notes: dict[str, None] = {}

    def hole(self, queue: MessageQueue, queue_offset: int, reason: HoleReason) -> None:
        """A queue offset without a message was met."""
        with self._lock:
            key = (queue, queue_offset)
            if key in self._holes:
                return
            if len(self._holes) < _REMEMBERED_MAX:
                self._holes.add(key)
            self._counts[hole_counter(reason)] += 1

    def count(self, name: str, number: int = 1) -> None:
        """Something was met ``number`` times."""
        if number:
            with self._lock:
                self._counts[name] += number

    def note(self, text: str) -> None:
        """A line for the report; the same line twice is one."""
        with self._lock:
            self._notes.setdefault(text)

    def counts(self) -> dict[str, int]:
        """A copy of the counts."""
        with self._lock:
            return dict(self._counts)

    def notes(self) -> tuple[str, ...]:
        """The lines, in the order in which they came."""
        with self._lock:
            return tuple(self._notes)


def hole_counter(reason: HoleReason) -> str:
    """Name of the counter of holes of this kind."""
    return f"holes_{reason.name.lower()}"
