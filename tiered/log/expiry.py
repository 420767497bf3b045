"""Expiry: whole sealed segments at a queue's beginning are given up, and its minimum moves. Pure.

``plan_expiry`` and ``plan_removal`` decide; ``expired`` is the rule by which replay accepts an ``expire`` action. Nothing
here deletes: what no entry names any more is deleted by a later gc, after its grace, so that readers that hold an older
state get to the end of what they read.

The incarnation itself stays, however little is left of it: its commit offset and log end say where the queue goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.log.actions import Expire, action_of
from tiered.log.lineage import expired_to
from tiered.log.parts import Parts, Segment
from tiered.log.timers import hour_queue
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tiered.journal.entry import Action
    from tiered.log.parts import Incarnation, TierState


MayGo = Callable[[MessageQueue, int, Segment], bool]


@dataclass(frozen=True, slots=True)
class ExpiryStep:
    """What one incarnation of a queue gives up."""

    queue: MessageQueue
    incarnation: int  # which incarnation
    position: int
    """Its place among the queue's incarnations, since those that were truncated have the same number."""
    min_from: int  # its minimum as the plan met it
    min_to: QueueOffset  # the minimum from then on
    segments: int  # how many
    objects: int  # how many bundles they lie in
    messages: int  # without holes
    size_bytes: int  # what they take in these
    newest_ms: int  # newest store time among them; -1 when there is none

    @property
    def said(self) -> Expire:
        """What the journal is to say."""
        return Expire(self.queue, self.incarnation, self.position, self.min_from, self.min_to)

    def action(self) -> Action:
        """For the journal."""
        return action_of(self.said)


def expired(incarnation: Incarnation, said: Expire, *, with_open: bool) -> Incarnation | None:
    """The incarnation after an ``expire`` action; None when the action presumes what does not hold.

    Args:
        with_open: It may take a segment that is not sealed: only from the present writer, who would go on in it.
    """
    low = said.min_to
    if (
        incarnation.min_offset != said.min_from
        or not incarnation.min_offset < low <= incarnation.commit_offset
    ):
        return None
    gone = [segment for segment in incarnation.segments if segment_end(segment) <= low]
    kept = incarnation.segments[len(gone) :]
    may_go = with_open or bool(incarnation.ended) or all(segment.sealed for segment in gone)
    begins = kept[0].base_queue_offset if kept else incarnation.commit_offset
    if not may_go or begins != low:
        return None
    gaps = tuple(gap for gap in incarnation.gaps if gap.end > low)
    lineage = expired_to(incarnation.lineage, low)
    return replace(incarnation, min_offset=low, segments=kept, gaps=gaps, lineage=lineage)


def segment_end(segment: Segment) -> int:
    """One past the segment's last queue offset."""
    return segment.parts.queue_end


def newest_ms(segment: Segment) -> int:
    """Newest store time in a segment; -1 when it has nothing but holes."""
    times: list[int] = segment.parts.column("store_max_ms").tolist()
    return max(times)


def plan_expiry(
    state: TierState,
    now_ms: int,
    ttl_ms: Callable[[str], int | None],
    *,
    objects_max: int,
    may_go: MayGo = lambda _queue, _incarnation, _segment: True,
) -> tuple[list[ExpiryStep], bool]:
    """What is to expire now: of each incarnation the sealed segments at its beginning whose newest message is too old.

    A store time in the future is not believed (``_stored_ms``).

    Args:
        objects_max: Give up what lies in so many bundles at most; whole segments.
        may_go: Asked of each segment in turn, with its queue and the number of its incarnation; the first that may not go,
        and
            all behind it, stay.

    Returns:
        The steps, in order of queues and incarnations; and whether ``objects_max`` has cut anything off.
    """
    planner = _Planner(objects_max)
    for queue in sorted(state.queues):
        ttl = ttl_ms(queue.topic)
        if ttl is None:
            continue
        for number, incarnation in enumerate(state.queues[queue]):
            going = _too_old(incarnation, now_ms, now_ms - ttl)
            planner.add(
                queue, number, incarnation, takewhile(partial(may_go, queue, number), going)
            )
    return planner.steps, planner.is_cut


def plan_removal(
    state: TierState, topic: str, *, objects_max: int
) -> tuple[list[ExpiryStep], bool]:
    """What removes a topic: everything of every incarnation of its queues, open segments too. See ``plan_expiry``."""
    planner = _Planner(objects_max)
    for queue in sorted(q for q in state.queues if q.topic == topic):
        for number, incarnation in enumerate(state.queues[queue]):
            planner.add(queue, number, incarnation, incarnation.segments)
    return planner.steps, planner.is_cut


def plan_handed(
    state: TierState, hours: Iterable[int], *, objects_max: int
) -> tuple[list[ExpiryStep], bool]:
    """What gives up the files of hours of timers, whole, open segments too. See ``plan_expiry``."""
    planner = _Planner(objects_max)
    for queue in map(hour_queue, hours):
        incarnations = state.queues[queue]
        planner.add(queue, len(incarnations) - 1, incarnations[-1], incarnations[-1].segments)
    return planner.steps, planner.is_cut


def _too_old(incarnation: Incarnation, now_ms: int, before_ms: int) -> Iterator[Segment]:
    for segment, behind in zip_longest(incarnation.segments, incarnation.segments[1:]):
        stored_ms = _stored_ms(segment, behind, now_ms)
        if not (segment.sealed or incarnation.ended) or stored_ms >= before_ms:
            return
        yield segment


def _stored_ms(segment: Segment, behind: Segment | None, now_ms: int) -> int:
    """When the newest message of a segment was stored, as far as that can be believed.

    A store time in the future is one message's mistake (a broker's clock was wrong), and must not keep its queue for ever:
    then it was stored by the time when the segment behind it began; and not before anything else that is told of this one.
    """
    newest = newest_ms(segment)
    if newest < 0:
        return segment.created_ms  # of holes only: by when it came
    if newest <= now_ms:
        return newest
    rows = segment.parts.rows
    times: list[int] = [*rows["store_min_ms"].tolist(), *rows["store_max_ms"].tolist()]
    told = [time for time in times if time <= now_ms]
    return max([segment.created_ms, *told, *([behind.created_ms] if behind else [])])


class _Planner:
    def __init__(self, objects_max: int) -> None:
        self.steps: list[ExpiryStep] = []
        self.is_cut = False
        self._left = objects_max

    def add(
        self, queue: MessageQueue, number: int, incarnation: Incarnation, going: Iterable[Segment]
    ) -> None:
        """Plan to give up the first segments of an incarnation, as far as the limit goes."""
        taken: list[Segment] = []
        keys: set[str] = set()
        for segment in going:
            named = {bundle.key for bundle in segment.parts.bundles}
            if len(keys | named) > self._left:
                self.is_cut = True
                break
            keys |= named
            taken.append(segment)
        behind = incarnation.segments[len(taken) :]
        low = behind[0].base_queue_offset if behind else incarnation.commit_offset
        if not taken or low <= incarnation.min_offset:
            return
        self._left -= len(keys)
        parts = Parts.joined(segment.parts for segment in taken)
        self.steps.append(
            ExpiryStep(
                queue=queue,
                incarnation=incarnation.number,
                position=number,
                min_from=incarnation.min_offset,
                min_to=low,
                segments=len(taken),
                objects=len(keys),
                messages=sum(part.count - part.holes for part in parts),
                size_bytes=sum(part.stored_bytes for part in parts),
                newest_ms=max((part.store_max_ms for part in parts), default=-1),
            )
        )
