"""How much one run of an archive job takes on. Pure.

Whole segments only: one that touches the wanted time is taken whole. With a limit the oldest messages come first, in each
queue and among queues, since they are the first to expire.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tiered.archive.plan import Plan, Task


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run is held to.

    Attributes:
        from_ms: Leave out segments whose newest message was stored before this (UTC); None: no bound.
        until_ms: Leave out segments whose oldest message was stored at this time or later; None: no bound.
        bytes_max: Take segments of so many bytes of commit log, at most, but one at least; None: all.
        runtime_ms: Begin no segment when so much time is over; None: no bound.
    """

    from_ms: int | None = None
    until_ms: int | None = None
    bytes_max: int | None = None
    runtime_ms: int | None = None

    def after(self, done_bytes: int) -> Limits:
        """What is left when so many bytes are archived."""
        if self.bytes_max is None:
            return self
        return replace(self, bytes_max=max(self.bytes_max - done_bytes, 0))


NO_LIMITS = Limits()


def limited(plan: Plan, limits: Limits, *, is_first: bool = True) -> Plan:
    """The part of a plan that a run takes on, and how much it leaves.

    Args:
        plan: Of all there is.
        limits: Of the run.
        is_first: Nothing is archived yet in this run, so that one segment is taken however large it is.
    """
    wanted = [task for task in plan.tasks if _touches(task, limits)]
    outside = len(plan.tasks) - len(wanted)
    if limits.bytes_max is None and limits.runtime_ms is None:
        return replace(plan, tasks=tuple(wanted), outside=outside)
    wanted.sort(key=lambda task: (_newest_ms(task), task.lane, task.start))
    taken = tuple(_within(wanted, limits.bytes_max, is_first))
    rest = wanted[len(taken) :]
    return replace(
        plan,
        tasks=taken,
        outside=outside,
        postponed=len(rest),
        postponed_bytes=sum(task.size_bytes for task in rest),
    )


def _touches(task: Task, limits: Limits) -> bool:
    """Whether a segment holds messages of the wanted time; one of holes alone always does."""
    times = task.parts.store_times
    if times is None:
        return True
    low, high = times
    begins = limits.from_ms is None or high >= limits.from_ms
    return begins and (limits.until_ms is None or low < limits.until_ms)


def _newest_ms(task: Task) -> int:
    return int(task.parts.rows["store_max_ms"].max())


def _within(tasks: Iterable[Task], bytes_max: int | None, is_first: bool) -> Iterator[Task]:
    taken = 0
    for number, task in enumerate(tasks):
        taken += task.size_bytes
        if bytes_max is not None and taken > bytes_max and (number or not is_first):
            return
        yield task
