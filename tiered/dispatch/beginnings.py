"""Beginnings: queues of which the tier has no record that could be held against the local store.

A queue has begun, and nothing of it was taken yet; or all of it has expired in the tier. Such a queue is another one if it
ends before it would go on, or, where nothing was ever taken, if it would begin earlier than where it was to begin. Where
all has expired and the local queue has grown past that place, nobody can tell.

Threads: any; after a crash nothing here survives, and nothing has to.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from tiered.log.parting import Change, plan_beginning, was_taken
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.dispatch.files import Start
    from tiered.local.face import LocalStore
    from tiered.log.parts import QueueLife, TierState
    from tiered.model import QueueBounds


class Look(Enum):
    """What a look at the local store says of the last record taken."""

    SAME = "same"
    """It is there, or has expired, or cannot be compared there: go on."""
    SHORTER = "shorter"
    """The local queue ends before it."""
    UNKNOWN = "unknown"
    """The journal does not say what was taken last: the tier has to be read."""
    DIFFERENT = "different"
    """Another record is in its place."""


class Beginnings:
    """See the module."""

    def __init__(self, local: LocalStore, state: Callable[[], TierState], start: Start) -> None:
        """Wire it; see ``Continuity``."""
        self._local = local
        self._state = state
        self._start = start
        self._right: dict[MessageQueue, QueueOffset] = {}

    def look(self, queue: MessageQueue, start: QueueOffset) -> Look:
        """Whether a queue may begin (or go on) at ``start``. One small local read, or two."""
        if start == 0:
            return Look.SAME
        before = self._local.read(queue, QueueOffset(start - 1), bytes_max=1, count_max=1)
        if before is None:
            first = self._local.read(queue, QueueOffset(0), bytes_max=1, count_max=1)
            return (
                Look.SAME if first is None and not self._has_emptied(queue, start) else Look.SHORTER
            )
        life = self._state().life(queue)
        is_right = (life is not None and was_taken(life)) or self.is_right(queue, start)
        return Look.SAME if is_right or before.base_offset >= start else Look.DIFFERENT

    def is_right(self, queue: MessageQueue, start: QueueOffset) -> bool:
        """Whether it was decided that a queue may go on there, whatever lies before."""
        return self._right.get(queue) == start

    def _has_emptied(self, queue: MessageQueue, start: QueueOffset) -> bool:
        """Whether messages came behind ``start`` and are all gone again: a gap, which compensation records."""
        bounds = self._local.queues().get(queue)
        return bounds is not None and bounds.min > start

    def decide(
        self, queue: MessageQueue, life: QueueLife | None, bounds: QueueBounds, goes_on: QueueOffset
    ) -> Change | None:
        """Decide on a queue that did not look the same.

        Args:
            queue: Which.
            life: Its present life in the tier, in which nothing is (left); None: the journal has not met it.
            bounds: What the local store has; not empty.
            goes_on: Where it would go on.

        Returns:
            What the journal has to say; None when it may well go on there.
        """
        change = plan_beginning(queue, life, bounds, goes_on, self._start(queue, bounds))
        if change is None:
            self._right[queue] = goes_on
        return change
