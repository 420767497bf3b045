"""Where queues begin that the tier has never met.

Where the tier was attached before, a queue that it does not know has come since, or its topic was not selected: it begins
at 0, so that what retention has taken of it meanwhile is a gap, as any other (invariant I12). When a broker is attached for
the first time, what its queues have forgotten until then is no loss: they begin where they begin now, and only one that
comes later begins at 0. With ``latest`` or a time the operator has said what is not wanted, and that is no loss either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.model import MessageQueue, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from tiered.local.face import LocalStore


class Starting:
    """See the module. Threads: any, once it knows. After a crash nothing has to survive.

    Attributes:
        is_first: No reign was on record when the journal was read behind ``note``: nobody was attached before.
    """

    def __init__(self, local: LocalStore, start: str | int) -> None:
        """Know nothing yet.

        Args:
            local: Where queues are.
            start: ``earliest``, ``latest``, or a time (UTC ms).
        """
        self._local = local
        self._start = start
        self.is_first = False
        self._present: dict[MessageQueue, QueueBounds] = {}

    def note(self) -> None:
        """See what is there, before the journal is read and the reign is taken."""
        if self._start == "latest":
            self._local.refresh()  # one that a broker runs on was opened up to its newest log file only
        self._present = dict(self._local.queues())

    def __call__(self, queue: MessageQueue, bounds: QueueBounds) -> QueueOffset:
        """Where a queue begins; below ``bounds.min`` where what is missing is a gap.

        Args:
            queue: One that the tier has never met.
            bounds: What the local store has of it now.
        """
        present = self._present.get(queue)
        if present and (bounds.min < present.min or bounds.end < present.end):
            present = None  # it has come again
        if isinstance(self._start, int):
            offset = self._local.offset_by_time(queue, self._start)
            if offset > bounds.min:
                return offset
        elif self._start == "latest" and present:
            return max(bounds.min, present.end)
        return present.min if self.is_first and present else QueueOffset(0)
