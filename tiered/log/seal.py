"""Sealing: fewer, larger objects for segments that are full or old, without needless rewriting.

Everything here is pure. ``plan_seals`` finds what is to be merged, from nothing but the state, so a restart finds what an
earlier reign has left. ``is_joined`` is the rule by which replay accepts a ``seal`` action, ``joined`` the one of ``join``.

Short segments that a bad hour has left (file switches) are joined with their neighbours while they are merged: ``groups``
are rows of segments that would have been one without the switches. A group is merged once it is *closed*, when what lies
behind it can never join it; so no byte is merged for a group that still grows. What was merged (``Segment.merged``) joins
no neighbour any more: nothing is rewritten twice.

Where sealing compresses (``SealPolicy.packs``), large parts are rewritten as well, once: the journal says of each part
whether that was tried (``ObjectRange.packed_bytes``), also of those that it does not make smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tiered.errors import InvalidError
from tiered.format.consume_queue import ITEM_BYTES
from tiered.log.parts import packs, part_json, queue_action

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tiered.journal.entry import Action
    from tiered.log.parts import Part, QueueLife, Segment, TierState
    from tiered.model import MessageQueue

MERGED_BYTES_MAX = 32 * 1024 * 1024
SMALL_BYTES = 4 * 1024 * 1024
PACK_BYTES_MIN = 64 * 1024
"""A smaller part is not worth the requests, unless it is merged anyway."""


@dataclass(frozen=True, slots=True)
class SealPolicy:
    """When merging pays.

    Attributes:
        small_bytes: A part below this (records and index together) is small; 0: nothing is, so nothing is merged.
        merged_bytes_max: A merged part is at most so large; one of its two objects is held in memory while it is made.
            At least twice ``small_bytes``: so whatever ends a run for its size is not small, and is never merged again.
        segment_bytes_max: Neighbours are joined to segments of at most so many bytes of records; 0: never.
        segment_age_ms_max: The age at which a segment is rolled. Neighbours are joined that were begun within half of
            it: so what was rolled for its age stays apart, and expires in time.
        packs: Sealing compresses: parts of ``PACK_BYTES_MIN`` and more are rewritten once for that, whatever their size.
    """

    small_bytes: int = SMALL_BYTES
    merged_bytes_max: int = MERGED_BYTES_MAX
    segment_bytes_max: int = 0
    segment_age_ms_max: int = 24 * 3_600_000
    packs: bool = False

    def __post_init__(self) -> None:
        if self.merged_bytes_max < 2 * self.small_bytes:
            raise InvalidError(
                f"merged_bytes_max ({self.merged_bytes_max}) must be at least twice small_bytes"
                f" ({self.small_bytes})"
            )


@dataclass(frozen=True, slots=True)
class SealPlan:
    """What is to become of one segment, or of several neighbours that become one.

    Attributes:
        queue: Whose.
        incarnation: Which life.
        segments: As the journal has them.
        runs: Their parts, in order; a run of several becomes one part, a run of one stays as it is, unless it ``is_packed``.
        packs: What is rewritten is compressed.
    """

    queue: MessageQueue
    incarnation: int
    segments: tuple[Segment, ...]
    runs: tuple[tuple[Part, ...], ...]
    packs: bool = False

    @property
    def segment(self) -> Segment:
        """The first: its name is what is left."""
        return self.segments[0]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them."""
        return tuple(part for segment in self.segments for part in segment.parts)

    @property
    def key(self) -> tuple[MessageQueue, int, int, int, int]:
        """Names the segments (two may have one base log offset, when the first has nothing but holes)."""
        first, end = self.segment, self.segments[-1].parts[-1].queue_end
        return self.queue, self.incarnation, first.base_offset, first.base_queue_offset, end

    @property
    def merges(self) -> bool:
        """Whether any run has several parts."""
        return any(len(run) > 1 for run in self.runs)

    @property
    def rewrites(self) -> bool:
        """Whether any part is written anew."""
        return any(map(self.is_rewritten, self.runs))

    def is_rewritten(self, run: Sequence[Part]) -> bool:
        """Whether a run is written anew: several, or one that is to be compressed and never was looked at for that."""
        return len(run) > 1 or (self.packs and may_pack(run[0]))

    @property
    def joins(self) -> bool:
        """Whether several segments become one."""
        return len(self.segments) > 1


def may_pack(part: Part) -> bool:
    """Whether compressing was not tried yet, and could gain anything."""
    return part.log.packed_bytes == 0 and part.log.size_bytes >= PACK_BYTES_MIN


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
        Plans for the present life of each queue, oldest segment first: of those that have rolled (groups that are
        closed) where something is to be merged, and with ``with_open`` the open ones, whether anything is to be merged
        or not.
    """
    found: list[SealPlan] = []
    for queue in state.queues if queues is None else queues:
        life = state.life(queue)
        found += _plans(queue, life, policy, with_open) if life else ()
    return found


def _plans(
    queue: MessageQueue, life: QueueLife, policy: SealPolicy, with_open: bool
) -> Iterator[SealPlan]:
    for group in groups(life.segments, policy):
        if group[-1] is life.segments[-1] and not with_open:
            return  # it is open, or may still be joined by what comes
        plan = _plan(queue, life, group, policy)
        if plan.merges:
            yield plan
        else:  # nothing is gained by joining them
            alone = (_plan(queue, life, [segment], policy) for segment in group)
            yield from (plan for plan in alone if plan.rewrites or not plan.segment.sealed)


def _plan(
    queue: MessageQueue, life: QueueLife, group: Sequence[Segment], policy: SealPolicy
) -> SealPlan:
    parts = [part for segment in group for part in segment.parts]
    runs = tuple(tuple(run) for run in plan_merge(parts, policy))
    return SealPlan(queue, life.incarnation, tuple(group), runs, policy.packs)


def groups(segments: Sequence[Segment], policy: SealPolicy) -> list[list[Segment]]:
    """Divide a life's segments into rows of neighbours that fit together in one. All but the last row are closed."""
    found: list[list[Segment]] = []
    size = 0
    for segment in segments:
        fits = policy.segment_bytes_max > 0 and bool(found) and _fits(found[-1], segment, policy)
        if fits and size + segment.size_bytes <= policy.segment_bytes_max:
            found[-1].append(segment)
            size += segment.size_bytes
        else:
            found.append([segment])
            size = segment.size_bytes
    return found


def may_grow(state: TierState, queue: MessageQueue, policy: SealPolicy) -> bool:
    """Whether the open segment of a queue may still be joined with those before it, so that they wait."""
    life = state.life(queue)
    rows = groups(life.segments, policy) if life else []
    return bool(rows) and len(rows[-1]) > 1


def _fits(group: Sequence[Segment], segment: Segment, policy: SealPolicy) -> bool:
    """Whether a segment may join those before it, as far as its size allows."""
    age_ms = segment.created_ms - group[0].created_ms
    if group[-1].merged or segment.merged or 2 * age_ms >= policy.segment_age_ms_max:
        return False
    return _touch(group[-1], segment)


def _touch(one: Segment, two: Segment) -> bool:
    """Whether nothing lies between two segments: no gap, and no lost bytes."""
    last = one.parts[-1]
    return (last.queue_end, last.log_end) == (two.base_queue_offset, two.base_offset)


def joined(
    life: QueueLife, parts: Sequence[Part], *, base: int, start: int, with_open: bool
) -> tuple[Segment, ...] | None:
    """The segments of a life after a ``join`` action; None when the action presumes what does not hold.

    Args:
        life: The one that the action speaks of.
        parts: What the one segment is to consist of.
        base: Log offset at which the first of the old segments begins.
        start: Queue offset at which it begins.
        with_open: The last may be open: only from the reigning writer, who would go on in it.
    """
    found = [(s.base_offset, s.base_queue_offset) == (base, start) for s in life.segments]
    if not parts or True not in found:
        return None
    first = found.index(True)
    old = [s for s in life.segments[first:] if s.base_queue_offset < parts[-1].queue_end]
    touch = all(_touch(one, two) for one, two in pairwise(old))
    may = with_open or all(segment.sealed for segment in old)
    if not (touch and may and is_joined([part for s in old for part in s.parts], parts)):
        return None
    one = replace(old[0], parts=tuple(parts), sealed=True, merged=True)
    return (*life.segments[:first], one, *life.segments[first + len(old) :])


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


def seal_action(
    queue: MessageQueue,
    incarnation: int,
    segment: int,
    parts: Sequence[Part],
    *,
    start: int | None = None,
) -> Action:
    """The action by which these parts take the place of a segment's (with ``start``: of neighbours that become one).

    Args:
        queue: Whose.
        incarnation: Which life.
        segment: Base log offset of the segment, or of the first of the neighbours.
        parts: Of what it is to consist.
        start: Queue offset at which the neighbours begin.
    """
    fields: dict[str, Any] = {"segment": segment, "parts": [part_json(part) for part in parts]}
    if start is not None:
        fields["start"] = start
    do = "pack" if packs(parts) else "seal" if start is None else "join"
    return queue_action(do, queue, incarnation, **fields)


def _size(part: Part) -> int:
    return part.log.size_bytes + part.index.size_bytes
