"""What was met in a store that is explained and recorded: counted once, however often it is read again."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tiered.local.face import HoleReason
    from tiered.model import MessageQueue

_REMEMBERED_MAX: Final = 100_000
"""Holes and the like that are remembered one by one; beyond it they are counted at each sight."""
WRONG_TAG_CODES: Final = "wrong_tag_codes"


class Sightings:
    """Counts holes, dropped records and whatever else is named. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: set[tuple[str, MessageQueue, int]] = set()
        self._counts: Counter[str] = Counter()
        self._notes: dict[str, None] = {}

    def hole(self, queue: MessageQueue, queue_offset: int, reason: HoleReason) -> None:
        """A queue offset without a message was met."""
        self._once("hole", queue, queue_offset, hole_counter(reason))

    def wrong_tag_code(self, queue: MessageQueue, queue_offset: int) -> None:
        """An entry was met that gives its record another tag code than the record's own."""
        self._once("tag", queue, queue_offset, WRONG_TAG_CODES)

    def _once(self, kind: str, queue: MessageQueue, queue_offset: int, counter: str) -> None:
        with self._lock:
            key = (kind, queue, queue_offset)
            if key in self._met:
                return
            if len(self._met) < _REMEMBERED_MAX:
                self._met.add(key)
            self._counts[counter] += 1

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
