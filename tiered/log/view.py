"""A life of a queue as a reader sees it: which part, or which gap, holds a queue offset."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.errors import DataError
from tiered.model import LogOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.log.parts import Gap, Part, QueueLife
    from tiered.model import MessageQueue, QueueOffset


@dataclass(frozen=True, slots=True)
class LifeView:
    """One life at one moment, with its parts laid out for bisection.

    Attributes:
        queue: Whose.
        life: As the journal has it.
        parts: All of its parts, in order.
        starts: Queue offset of each part.
    """

    queue: MessageQueue
    life: QueueLife
    parts: list[Part]
    starts: list[QueueOffset]

    @classmethod
    def of(cls, queue: MessageQueue, life: QueueLife) -> LifeView:
        """Lay a life out."""
        parts = life.parts()
        return cls(queue, life, parts, [part.queue_offset for part in parts])

    def locate(self, start: QueueOffset, *, where: str) -> Part | Gap | None:
        """The part or gap that holds a queue offset at or above the minimum; None at or behind the end.

        Raises:
            DataError: The journal has neither.
        """
        if start >= self.life.commit_offset:
            return None
        index = bisect_right(self.starts, start) - 1
        part = self.parts[index] if index >= 0 else None
        if part is not None and start < part.queue_end:
            return part
        for gap in self.life.gaps:
            if gap.start <= start < gap.end:
                return gap
        raise DataError(
            f"the journal has neither a part nor a gap for {self.queue} at queue offset {start}",
            where=where,
            do="run `tiered verify` to see what is damaged",
        )

    def about(self, offset: QueueOffset) -> LogOffset:
        """Where in the log a queue offset lies: exact at the ends of parts, within one as if all records were alike."""
        if not self.parts:
            return self.life.log_end
        part = self.parts[max(bisect_right(self.starts, offset) - 1, 0)]
        within = min(max(offset - part.queue_offset, 0), part.count)
        return LogOffset(part.log_offset + part.log.size_bytes * within // part.count)

    def parts_from(self, start: QueueOffset) -> Iterator[Part]:
        """The part that holds a queue offset, if one does, and those behind it."""
        for index in range(max(bisect_right(self.starts, start) - 1, 0), len(self.parts)):
            if self.parts[index].queue_end > start:
                yield self.parts[index]
