"""The write sides of all queues: made on first use from what the journal says, or where a new queue is to begin.

Threads: any. After a crash nothing here survives, and nothing has to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.log.composite import CommitPolicy, CompositeFlatFile
from tiered.log.state import QueueLife, TierState
from tiered.model import MessageQueue, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from tiered.local.face import LocalStore

Start = Callable[[MessageQueue, QueueBounds], QueueOffset]
"""Where a queue begins that the tier has never met; what retention has taken from there on is a gap."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Queues that the journal has never met.

    Attributes:
        above_0: Those that begin above 0, and where.
        emptied: Those of which retention has taken all that they had from where they begin.
    """

    above_0: Mapping[MessageQueue, QueueOffset]
    emptied: Sequence[MessageQueue]


class QueueFiles:
    """One ``CompositeFlatFile`` for each queue that dispatch has touched."""

    def __init__(
        self,
        local: LocalStore,
        *,
        state: Callable[[], TierState],
        policy: CommitPolicy,
        start: Start,
        selects: Callable[[MessageQueue], bool],
        made: Callable[[MessageQueue], None],
    ) -> None:
        """Begin with none.

        Args:
            local: Knows where the local queues begin and end.
            state: What the journal says now.
            policy: When to commit and to roll.
            start: Where a queue begins that the tier has never met.
            selects: Which queues are tiered.
            made: Told of each queue whose write side is made of what the tier has, before anybody sees it.
        """
        self._made = made
        self._local = local
        self._state = state
        self._policy = policy
        self.start = start
        self._selects = selects
        self._lock = threading.Lock()
        self._files: dict[MessageQueue, CompositeFlatFile] = {}
        self._bounds: Mapping[MessageQueue, QueueBounds] = {}

    def file(self, queue: MessageQueue) -> CompositeFlatFile:
        """The write side of a queue."""
        file = self._files.get(queue)  # once there is one, there is always one
        if file is not None:
            return file
        with self._lock:
            file = self._files.get(queue)
            if file is None:
                file = CompositeFlatFile(queue, self._life(queue), self._policy)
                if file.last_taken:
                    self._made(queue)
                self._files[queue] = file
            return file

    def renew(self, queue: MessageQueue) -> None:
        """Make a queue's write side anew from what the journal says; the old one must have nothing in hand."""
        life = self._life(queue)
        with self._lock:
            self._files[queue] = CompositeFlatFile(queue, life, self._policy)

    def known(self, queue: MessageQueue) -> CompositeFlatFile | None:
        """The write side of a queue if there is one yet."""
        return self._files.get(queue)

    def commit_offsets(self) -> dict[MessageQueue, QueueOffset]:
        """Of each queue that has a write side."""
        with self._lock:
            return {queue: file.commit_offset for queue, file in self._files.items()}

    def end_segment(self, queue: MessageQueue, say: Callable[[], None]) -> bool:
        """Have a queue go on in a new segment; False when something is under way, and the last must not be sealed.

        ``say`` has the journal say so, before any part of the new one can be named: these may have the same base.
        """
        if not self._selects(queue):
            say()
            return True  # nothing is ever appended to it
        file = self.file(queue)
        with file.lock:
            if file.end_segment():
                say()
                return True
        return False

    def starts(self) -> dict[MessageQueue, QueueOffset]:
        """Where to go on in each local queue; those that are not tiered are as good as done."""
        self._bounds = self._local.queues()
        return {
            queue: self.file(queue).append_offset if self._selects(queue) else bounds.end
            for queue, bounds in self._bounds.items()
        }

    def unknown(self) -> Unknown:
        """Those of ``starts`` that the journal has never met, and would not learn of by what they have."""
        state = self._state()
        rows = {
            queue: (self.file(queue).commit_offset, bounds)
            for queue, bounds in self._bounds.items()
            if self._selects(queue) and state.life(queue) is None
        }
        return Unknown(
            {queue: start for queue, (start, _) in rows.items() if start > 0},
            [queue for queue, (start, has) in rows.items() if start < has.min == has.end],
        )

    def _life(self, queue: MessageQueue) -> QueueLife:
        life = self._state().life(queue)
        if life is not None:
            return life
        bounds = self._bounds.get(queue)
        if bounds is None:  # a queue that has come since we looked last
            self._bounds = self._local.queues()
            bounds = self._bounds.get(queue)
        first = self.start(queue, bounds) if bounds else QueueOffset(0)
        return QueueLife(0, first, first)
