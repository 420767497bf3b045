"""A life of a queue as a reader sees it: which part, or which gap, holds a queue offset."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiered.errors import DataError
from tiered.model import LogOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from tiered.log.parts import Gap, Part, Parts, QueueLife
    from tiered.model import MessageQueue, QueueOffset


_PARTS_HELD = 8
"""Of each view, made of their rows; a queue's readers are at one place or two."""


@dataclass(frozen=True, slots=True)
class LifeView:
    """One life at one moment, with its parts laid out for bisection.

    Attributes:
        queue: Whose.
        life: As the journal has it.
        parts: All of its parts, in order.
        starts: int64[n], queue offset of each part.
    """

    queue: MessageQueue
    life: QueueLife
    parts: Parts
    starts: npt.NDArray[np.int64]
    _looked_at: dict[int, Part] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, queue: MessageQueue, life: QueueLife) -> LifeView:
        """Lay a life out."""
        parts = life.parts()
        return cls(queue, life, parts, parts.column("queue_offset"))

    def locate(self, start: QueueOffset, *, where: str) -> Part | Gap | None:
        """The part or gap that holds a queue offset at or above the minimum; None at or behind the end.

        Raises:
            DataError: The journal has neither.
        """
        if start >= self.life.commit_offset:
            return None
        index = self._at(start)
        part = self.part(index) if index >= 0 else None
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

    def _at(self, offset: QueueOffset) -> int:
        """Number of the last part that begins at or below a queue offset; -1: none."""
        return (
            bisect_right(self.starts.data, offset) - 1
        )  # not NumPy's: it gives the interpreter's lock away

    def about(self, offset: QueueOffset) -> LogOffset:
        """Where in the log a queue offset lies: exact at the ends of parts, within one as if all records were alike."""
        if not len(self.parts):
            return self.life.log_end
        part = self.part(max(self._at(offset), 0))
        within = min(max(offset - part.queue_offset, 0), part.count)
        return LogOffset(part.log_offset + part.log_bytes * within // part.count)

    def parts_from(self, start: QueueOffset) -> Iterator[Part]:
        """The part that holds a queue offset, if one does, and those behind it."""
        for index in range(max(self._at(start), 0), len(self.parts)):
            part = self.part(index)
            if part.queue_end > start:
                yield part

    def part(self, number: int) -> Part:
        """A part, which its readers look at again and again while they are near it."""
        part = self._looked_at.get(number)
        if part is None:
            part = self.parts[number]
            if len(self._looked_at) >= _PARTS_HELD:
                self._looked_at.clear()
            self._looked_at[number] = part
        return part
