"""Sealing: fewer, larger objects for a segment that is full or old, without needless rewriting.

Everything here is pure. ``plan_seals`` finds the segments where merging pays, from nothing but the state: what was merged
once plans to nothing, so there is no mark to keep and a restart finds what an earlier reign has left. ``is_joined`` is the
rule by which replay accepts a ``seal`` action.

Short segments that a bad hour has left (file switches) are not merged with their neighbours: a part lies in one segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.errors import InvalidError
from tiered.format.consume_queue import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tiered.log.parts import Part, QueueLife, Segment, TierState
    from tiered.model import MessageQueue

MERGED_BYTES_MAX = 32 * 1024 * 1024
SMALL_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SealPolicy:
    """When merging pays.

    Attributes:
        small_bytes: A part below this (records and index together) is small; 0: nothing is, so nothing is merged.
        merged_bytes_max: A merged part is at most so large; one of its two objects is held in memory while it is made.
            At least twice ``small_bytes``: so whatever ends a run for its size is not small, and is never merged again.
    """

    small_bytes: int = SMALL_BYTES
    merged_bytes_max: int = MERGED_BYTES_MAX

    def __post_init__(self) -> None:
        if self.merged_bytes_max < 2 * self.small_bytes:
            raise InvalidError(
                f"merged_bytes_max ({self.merged_bytes_max}) must be at least twice small_bytes"
                f" ({self.small_bytes})"
            )


@dataclass(frozen=True, slots=True)
class SealPlan:
    """What is to become of one segment.

    Attributes:
        queue: Whose.
        incarnation: Which life.
        segment: As the journal has it.
        runs: Its parts, in order; a run of several becomes one part, a run of one stays as it is.
    """

    queue: MessageQueue
    incarnation: int
    segment: Segment
    runs: tuple[tuple[Part, ...], ...]

    @property
    def key(self) -> tuple[MessageQueue, int, int, int]:
        """Names the segment (two may have one base log offset, when the first has nothing but holes)."""
        segment = self.segment
        return self.queue, self.incarnation, segment.base_offset, segment.base_queue_offset

    @property
    def merges(self) -> bool:
        """Whether any run has several parts."""
        return len(self.runs) < len(self.segment.parts)


def plan_merge(parts: Sequence[Part], policy: SealPolicy) -> list[list[Part]]:
    """Divide a segment's parts into runs; a run of several parts becomes one part.

    Returns:
        The runs in order; their concatenation is ``parts``. A run of one part stays as it is. Planning again, after
        each run has become one part, gives runs of one.
    """
    runs: list[list[Part]] = []
    size = 0
    for part in parts:
        part_bytes = _size(part)
        joins = bool(runs) and max(_size(runs[-1][-1]), part_bytes) < policy.small_bytes
        if joins and size + part_bytes <= policy.merged_bytes_max:
            runs[-1].append(part)
            size += part_bytes
        else:
            runs.append([part])
            size = part_bytes
    return runs


def plan_seals(
    state: TierState,
    policy: SealPolicy,
    *,
    queues: Iterable[MessageQueue] | None = None,
    with_open: bool = False,
) -> list[SealPlan]:
    """The segments that are to be sealed now.

    Args:
        state: What the journal says.
        policy: When merging pays.
        queues: Look at these only; None: at all.
        with_open: Also end and seal the last segment of each queue.

    Returns:
        Plans for the present life of each queue, oldest segment first: those that have rolled and where something is
        to be merged, and with ``with_open`` the open ones, whether anything is to be merged or not.
    """
    found: list[SealPlan] = []
    for queue in state.queues if queues is None else queues:
        life = state.life(queue)
        found += _plans(queue, life, policy, with_open) if life else ()
    return found


def _plans(
    queue: MessageQueue, life: QueueLife, policy: SealPolicy, with_open: bool
) -> Iterator[SealPlan]:
    for index, segment in enumerate(life.segments):
        is_last = index == len(life.segments) - 1
        if is_last and not with_open:
            return
        runs = tuple(tuple(run) for run in plan_merge(segment.parts, policy))
        plan = SealPlan(queue, life.incarnation, segment, runs)
        if plan.merges or not segment.sealed:
            yield plan


def is_joined(old: Sequence[Part], new: Sequence[Part]) -> bool:
    """Whether ``new`` is nothing but ``old`` with neighbours joined.

    Each new part must be exactly a run of old ones: their bytes, items, holes and times. So a plan that was overtaken
    (by another merge of the same segment) can not bring back a part that nobody names any more and that may be deleted.
    """
    at = 0
    for part in new:
        begin = at
        while at < len(old) and old[at].queue_end <= part.queue_end:
            at += 1
        whole = part.index.size_bytes == part.count * ITEM_BYTES
        if begin == at or not whole or summary(old[begin:at]) != summary([part]):
            return False
    return at == len(old)


def summary(run: Sequence[Part]) -> tuple[int, ...]:
    """What a part that replaces ``run`` has to say: its ends in log and queue offsets, holes, and store times (2)."""
    timed = [part for part in run if part.store_max_ms >= 0]
    return (
        run[0].log_offset,
        run[-1].log_end,
        run[0].queue_offset,
        run[-1].queue_end,
        sum(part.holes for part in run),
        min((part.store_min_ms for part in timed), default=-1),
        max((part.store_max_ms for part in timed), default=-1),
    )


def _size(part: Part) -> int:
    return part.log.size_bytes + part.index.size_bytes
