"""A task whose source is damaged, divided: what is sound is archived, and what lies in damaged blocks waits for a repair.

Each sound offset range becomes a task of its own, with its own entry in the log, so the damaged ones in between stay what
they
are: queue offsets of a sealed segment that are not archived. They are named, the next run tries them again, and nothing
takes them for archived (``tiered.archive.archive_proof``). So a repair of the tier brings them in; going on loses nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tiered.archive.plan import holding
from tiered.errors import DataError
from tiered.log.ranges import Ranges, without
from tiered.log.reader import QueueReader
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from tiered.archive.plan import Task
    from tiered.upkeep.engine import WorkContext

DO: Final = (
    "the rest is archived; `tiered verify URL --deep --store STORE --repair` mends what the broker or another object still"
    " has, and the same archive command brings it in then"
)
"""What to do about messages in damaged blocks."""


def find_lost(context: WorkContext, task: Task) -> tuple[tuple[int, int, str], ...]:
    """Queue offsets of a task that cannot be read, each offset range with what is damaged; empty: all can.

    Memory: a section, where it is damaged.
    """
    reader = QueueReader.of_incarnation(
        context.tier, context.prefix, task.queue.message_queue, task.incarnation
    )
    return tuple(reader.find_lost(QueueOffset(task.start), QueueOffset(task.end)))


def divide(
    task: Task, lost: tuple[tuple[int, int, str], ...]
) -> tuple[list[Task], list[tuple[Task, DataError]]]:
    """What of a task is sound, in order; and what is lost, with why. Neighbours of one cause are one."""
    left: Ranges = ((task.start, task.end),)
    waiting: list[tuple[int, int, str]] = []
    for start, end, why in lost:
        left = without(left, start, end)
        goes_on = bool(waiting) and waiting[-1][1:] == (start, why)
        waiting.append((waiting.pop()[0] if goes_on else start, end, why))
    sound = [_part(task, start, end) for start, end in left]
    return sound, [
        (_part(task, start, end), _told(task, start, end, why)) for start, end, why in waiting
    ]


def _part(task: Task, start: int, end: int) -> Task:
    parts = holding(task.parts, start, end)
    return replace(task, start=start, end=end, parts=parts, is_divided=True)


def _told(task: Task, start: int, end: int, why: str) -> DataError:
    return DataError(
        f"messages [{start}, {end}) are damaged in the tier: {why}", where=str(task.queue), do=DO
    )
