"""Queues give up messages: whole sealed segments at their beginning, all of a topic, or what is wrong at their end.

Overview: ``plan_expire`` and ``plan_delete_topic`` decide by the journal's state alone; ``apply_steps`` appends ``expire``
actions. ``plan_truncate`` also reads the index of the part in which the offset lies; ``apply_truncate`` appends the
action that ``attach`` would (``tiered.log.state``). No object is touched: a later gc deletes what no entry names, after
its grace, so that readers that are at work get to their end; what is truncated stays readable as an incarnation that is
over, until it expires.

Beside a running writer: ``expire`` takes no epoch and appends to the journal as a guest; the writer meets the entry and
goes on. ``delete-topic``, ``truncate`` and files of timers also change open segments, which only the tier's writer may:
they take an epoch, and so refuse while a writer is alive.

After a crash: each entry is there or not; the same plan goes on where it ended, since steps that are done are known by
the queue's minimum, and a queue that was truncated by the incarnation that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backends.errors import ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, InvalidError, no_topic
from tiered.log.actions import BeginAnew, read_action
from tiered.log.divergence import Change, fingerprint_in_tier, measure, plan_end
from tiered.log.expiry import ExpiryStep, expired, newest_ms, plan_expiry, plan_handed, plan_removal
from tiered.log.flat_file import ITEM, ITEM_BYTES
from tiered.log.parts import queue_action
from tiered.log.reader import QueueReader, TierReader
from tiered.log.sections import read_range
from tiered.log.state import cut
from tiered.log.timers import HOUR_MS, hour_queue
from tiered.model import MessageQueue, QueueOffset
from tiered.upkeep.workplace import (
    STEPS_MAX,
    TierPlan,
    carry_out,
    in_new_epoch,
    moved_on,
    plan_head,
)
from timer.dequeue import refused_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.journal.append import JournalWriter
    from tiered.journal.entry import Action
    from tiered.log.parts import Incarnation, Segment, TierState
    from tiered.upkeep.workplace import Workplace


@dataclass(frozen=True, kw_only=True)
class ExpirePlan(TierPlan[ExpiryStep]):
    """What queues give up at their beginning: of ``expire``, of its timers, or of ``delete-topic``."""

    steps: tuple[ExpiryStep, ...]
    topic: str | None = None  # of ``delete-topic``
    ttls: Mapping[str, Any] = field(default_factory=dict)  # by topic, ms
    grace_ms: int | None = None  # of timers: since the end of their hour
    with_refused: bool = False  # of timers: also what the target refused
    kept_for_refused: int = 0  # hours that stay for that
    archive: str | None = None  # that has to hold what is given up
    unproved: tuple[Any, ...] = ()  # rows of what stays, since it does not
    refusals: tuple[Any, ...] = ()  # what is wrong with the archive
    is_cut: bool  # there is more than may go in one run
    segments: int  # of all steps
    objects: int
    messages: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TruncateStep:
    """How a queue ends earlier."""

    queue: MessageQueue
    incarnation: int
    position: int  # its place among the queue's incarnations
    to: int  # where it ends from now on
    was: int  # where it ended
    messages: int  # that it gives up
    holes: int
    missing: int  # offsets of gaps
    begins_anew: bool  # nothing of the incarnation is left
    action: Mapping[str, Any]  # for the journal


@dataclass(frozen=True, kw_only=True)
class TruncatePlan(TierPlan[TruncateStep]):
    """How a queue ends earlier; no step if it ends there already."""

    steps: tuple[TruncateStep, ...]
    topic: str
    queue_id: int
    to: int  # as it was asked for


Ttl = Callable[[str], int | None]
TIMERS = "expire --timers"
"""What a plan of ``plan_expire_timers`` calls itself."""
_WITH_OPEN = ("delete-topic", TIMERS)
CLOCKS_APART_MS = 300_000
"""When ours and the store's clock differ by more, one of them is wrong, and nothing expires."""


class ExpiryProof(Protocol):
    """Says of each segment whether it lies elsewhere as well, so that the tier may give it up."""

    @property
    def url(self) -> str:
        """Where."""
        ...

    def holds(self, state: TierState, queue: MessageQueue, number: int, segment: Segment) -> bool:
        """Whether it does: a segment of the ``number``-th incarnation of a queue, in this state of the tier."""
        ...

    def document(self) -> dict[str, Any]:
        """For the plan: ``archive``, ``unproved``, ``refusals``."""
        ...


def topics_of(at: Workplace) -> set[str]:
    """The topics that the tier has."""
    return {queue.topic for queue in at.reader().state.queues}


def plan_expire(
    at: Workplace, ttl_ms: Ttl, *, objects_max: int, proof: ExpiryProof | None = None
) -> ExpirePlan:
    """What expires now. Changes nothing."""
    reader = at.reader()
    now_ms = at.clock.now_ms()
    may_go = partial(proof.holds, reader.state) if proof else (lambda *_segment: True)
    steps, is_cut = plan_expiry(
        reader.state, now_ms, ttl_ms, objects_max=objects_max, may_go=may_go
    )
    topics = sorted({queue.topic for queue in reader.state.queues})
    ttls = {topic: ttl for topic in topics if (ttl := ttl_ms(topic)) is not None}
    proved = proof.document() if proof else {}
    return _plan(at, reader, "expire", (steps, is_cut), now_ms, ttls=ttls, **proved)


def plan_delete_topic(at: Workplace, topic: str, *, objects_max: int) -> ExpirePlan:
    """What removing a topic gives up. Changes nothing."""
    reader = at.reader()
    known = {queue.topic for queue in reader.state.queues}
    if topic not in known:
        raise no_topic(topic, known, where=at.store.url)
    steps, is_cut = plan_removal(reader.state, topic, objects_max=objects_max)
    return _plan(at, reader, "delete-topic", (steps, is_cut), at.clock.now_ms(), topic=topic)


def plan_expire_timers(
    at: Workplace, *, grace_ms: int, objects_max: int, with_refused: bool = False
) -> ExpirePlan:
    """Which files of timers go now: all of them is handed over, and their hour has been over for so long. Changes nothing.

    Args:
        with_refused: Files, too, that hold messages which the target refused: nobody else has these.
    """
    reader, now_ms = at.reader(), at.clock.now_ms()
    old = [
        hour
        for hour in sorted(reader.state.timers.hours)
        if _is_handed(reader.state, hour) and (hour + 1) * HOUR_MS + grace_ms <= now_ms
    ]
    hours = [hour for hour in old if with_refused or not _is_needed(reader.state, hour)]
    steps, is_cut = plan_handed(reader.state, hours, objects_max=objects_max)
    return _plan(
        at,
        reader,
        TIMERS,
        (steps, is_cut),
        now_ms,
        grace_ms=grace_ms,
        with_refused=with_refused,
        kept_for_refused=len(old) - len(hours),
    )


def _is_handed(state: TierState, hour: int) -> bool:
    """Whether all of an hour's file is handed over."""
    facts, incarnation = state.timers.hours.get(hour), state.incarnation(hour_queue(hour))
    return bool(facts and incarnation and facts.done == facts.end == incarnation.commit_offset)


def _is_needed(state: TierState, hour: int) -> bool:
    """Whether an hour's file has messages that nobody else has: refused ones, and those that are held back for damage."""
    return bool(refused_in(state, hour) or state.timers.hours[hour].held)


def apply_steps(
    at: Workplace, plan: ExpirePlan, proof: ExpiryProof | None = None
) -> dict[str, Any]:
    """Carry out a plan of either kind (``carry_out``).

    Args:
        proof: With a plan that names an archive: that archive's, of now. Nothing is given up that it does not hold.

    Raises:
        InvalidError: The tier has moved on in a way that matters, or a clock is wrong.
    """
    if plan.archive != (proof.url if proof else None):
        raise InvalidError(
            "this plan was made with another archive, or without one", do="plan again"
        )

    def begun(store_now_ms: int) -> None:
        if plan.what != "delete-topic":
            _require_clock(at, plan, store_now_ms)

    return carry_out(
        at,
        plan,
        said=ExpiryStep.action,
        is_done=_is_done,
        hold=partial(_hold, plan, proof),
        in_epoch=plan.what in _WITH_OPEN,
        begun=begun,
    )


def _hold(plan: ExpirePlan, proof: ExpiryProof | None, state: TierState, step: ExpiryStep) -> None:
    """Everything that a step presumes."""
    hour = step.queue.queue_id
    may_go = plan.what != TIMERS or (
        _is_handed(state, hour) and (plan.with_refused or not _is_needed(state, hour))
    )
    if not may_go:
        raise moved_on(f"{step.queue} has timers that are not handed over, or were refused")
    incarnation = _incarnation(state, step)
    left = (
        expired(incarnation, step.said, with_open=plan.what in _WITH_OPEN) if incarnation else None
    )
    if incarnation is None or left is None:
        raise moved_on(f"{step.queue} does not begin or end where it did")
    gone = incarnation.segments[: len(incarnation.segments) - len(left.segments)]
    newest = max((newest_ms(segment) for segment in gone), default=-1)
    if (len(gone), newest) != (step.segments, step.newest_ms):
        raise moved_on(f"{step.queue} has other segments than it had")
    if proof and not all(proof.holds(state, step.queue, step.position, one) for one in gone):
        raise moved_on(f"the archive does not hold what {step.queue} would give up")


def _incarnation(state: TierState, step: ExpiryStep) -> Incarnation | None:
    incarnations = state.queues.get(step.queue, ())
    there = (
        step.position < len(incarnations) and incarnations[step.position].number == step.incarnation
    )
    return incarnations[step.position] if there else None


def _is_done(state: TierState, step: ExpiryStep) -> bool:
    """Whether the incarnation has given it up. What was truncated of it since stands in its place, it behind that."""
    behind = state.queues.get(step.queue, ())[step.position :]
    incarnation = next((one for one in behind if one.cut_at <= step.min_from), None)
    return bool(
        incarnation
        and incarnation.number == step.incarnation
        and incarnation.min_offset >= step.min_to
    )


def _require_clock(at: Workplace, plan: ExpirePlan, store_now_ms: int) -> None:
    """Nothing expires by a clock that is wrong: ours is held against the store's, at planning and now.

    By one that is behind all store times lie in the future, which is not believed; so that is refused as well. (How long ago
    a plan was made is another matter.)
    """
    now_ms = at.clock.now_ms()
    ahead_ms = max(now_ms, plan.made_ms) - store_now_ms
    behind_ms = store_now_ms - now_ms
    if max(ahead_ms, behind_ms) > CLOCKS_APART_MS:
        is_ahead = ahead_ms > CLOCKS_APART_MS
        apart, where = (ahead_ms, "ahead of") if is_ahead else (behind_ms, "behind")
        raise InvalidError(
            f"our clock is {apart / 1000:.0f} s {where} the store's, so nothing can be called old",
            where=at.store.url,
            do="set the clock",
        )


def _plan(
    at: Workplace,
    reader: TierReader,
    what: str,
    planned: tuple[list[ExpiryStep], bool],
    made_ms: int,
    **fields: Any,  # noqa: ANN401 (of the plan)
) -> ExpirePlan:
    steps, is_cut = planned
    return ExpirePlan(
        what=what,
        **plan_head(at.store, at.place, reader.state, reader.journal_number),
        made_ms=made_ms,
        steps=tuple(steps),
        is_cut=is_cut,
        segments=sum(step.segments for step in steps),
        objects=sum(step.objects for step in steps),
        messages=sum(step.messages for step in steps),
        size_bytes=sum(step.size_bytes for step in steps),
        **fields,
    )


# -- truncation -------------------------------------------------------------------------------------
#
# ``attach`` ends a queue by itself where the local store has *other* messages. Where the tier has more than the store, and
# nothing that contradicts it, the store may be a copy that lags, so ``attach`` waits, for ever if need be. Only a person
# knows that what the tier has there never was: holes up to an offset that a damaged record named, for instance.


def plan_truncate(at: Workplace, queue: MessageQueue, end: int) -> TruncatePlan:
    """What truncating a queue's end gives up. Changes nothing."""
    reader = at.reader()
    incarnation = reader.state.incarnation(queue)
    _require_sense(at, queue, incarnation, end)
    assert incarnation is not None
    place = len(reader.state.queues[queue]) - 1
    steps = (
        []
        if end == incarnation.commit_offset
        else [_step(at, queue, incarnation, QueueOffset(end), place)]
    )
    return TruncatePlan(
        what="truncate",
        **plan_head(at.store, at.place, reader.state, reader.journal_number),
        made_ms=at.clock.now_ms(),
        steps=tuple(steps),
        topic=queue.topic,
        queue_id=queue.queue_id,
        to=end,
    )


def apply_truncate(at: Workplace, plan: TruncatePlan) -> dict[str, Any]:
    """Carry out a plan that has a step (``carry_out``)."""

    def is_done(state: TierState, step: TruncateStep) -> bool:
        """Whether this plan has ended the incarnation that it was made of; what goes on has the next place."""
        incarnations = state.queues.get(step.queue, ())[step.position : -1]
        ended = [(incarnation.ended, incarnation.commit_offset) for incarnation in incarnations[:1]]
        return ended == [(step.action["reason"], step.was)]

    def hold(state: TierState, step: TruncateStep) -> None:
        """Everything that the action presumes; expiry may come between."""
        incarnation = state.incarnation(step.queue)
        if incarnation is None or _ended(incarnation, step.action, step.was) is None:
            raise moved_on(f"{step.queue} does not begin or end where it did")

    return carry_out(
        at, plan, said=lambda step: step.action, is_done=is_done, hold=hold, in_epoch=True
    )


def _require_sense(
    at: Workplace, queue: MessageQueue, incarnation: Incarnation | None, end: int
) -> None:
    if incarnation is None:
        raise InvalidError(
            f"the tier has no queue {queue}", where=at.store.url, do="`tiered ls URL` lists them"
        )
    if not incarnation.min_offset <= end <= incarnation.commit_offset:
        raise InvalidError(
            f"{queue} has queue offsets [{incarnation.min_offset}, {incarnation.commit_offset}), and cannot end at {end}",
            where=at.store.url,
            do="give an offset in between",
        )
    start = _batch_start(at, incarnation, end)
    if start is not None:
        raise InvalidError(
            f"{queue} has a batch of messages from {start} on, which offset {end} would divide",
            where=at.store.url,
            do=f"give --to {start}, or an offset behind the batch",
        )


def _batch_start(at: Workplace, incarnation: Incarnation, end: int) -> int | None:
    """Where the inner batch begins that ``end`` lies in, as far as this part has it; None when it lies in none.

    None, too, when the part cannot be read: nobody can divide it then, and ``plan_end`` has all of it go.
    """
    part = next((p for p in incarnation.parts() if p.queue_offset < end < p.queue_end), None)
    if part is None:
        return None
    middle = (end - part.queue_offset) * ITEM_BYTES
    try:
        raw = read_range(at.store, at.prefix, part.index.part_of(0, middle + ITEM_BYTES))
    except (DataError, ObjectNotFoundError):
        return None
    items = np.frombuffer(raw, ITEM)
    same = (items["log_offset"] == items["log_offset"][-1]) & (items["size"] > 0)
    first = part.queue_offset + int(np.argmax(same)) if same.any() else end
    return first if items["size"][-1] > 0 and first < end else None


def _step(
    at: Workplace, queue: MessageQueue, incarnation: Incarnation, end: QueueOffset, place: int
) -> TruncateStep:
    reader = QueueReader.of_incarnation(at.store, at.prefix, queue, incarnation)
    change: Change = plan_end(
        queue,
        incarnation,
        end,
        tier_fingerprint=lambda offset: fingerprint_in_tier(reader, offset),
        read_items=lambda part, count: measure(at.store, at.prefix, part, count),
    )
    gone = _ended(incarnation, change.action, incarnation.commit_offset)
    assert gone is not None
    parts = gone.parts()
    return TruncateStep(
        queue=queue,
        incarnation=incarnation.number,
        position=place,
        to=change.start,
        was=change.end,
        messages=parts.messages,
        holes=parts.holes,
        missing=sum(gap.end - gap.start for gap in gone.gaps),
        begins_anew=change.is_anew,
        action=change.action,
    )


def _ended(incarnation: Incarnation, action: Action, was: int) -> Incarnation | None:
    """The incarnation that is over by the action; None when the action does not fit (any more)."""
    said = read_action(action)
    if isinstance(said, BeginAnew):
        fits = (incarnation.number + 1, incarnation.min_offset, incarnation.commit_offset)
        is_so = fits == (said.incarnation, said.start, was)
        return replace(incarnation, ended=said.reason) if is_so else None
    if incarnation.number != said.incarnation:
        return None
    divided = cut(incarnation, said, 0)  # there is no entry yet
    return divided[0] if divided else None


# --------------------------------------------------------------------------------------------------
# Seals what is open, so that it can be archived; only while no writer is at work.
#
# Overview: takes lease and epoch for a moment, and says of each open segment that it is sealed, as it is. Nothing is
# read, merged or uploaded: segments whose parts are many and small stay so, until a writer merges them. The next
# writer begins new ones.
#
# Ordering, retries: one entry for ``STEPS_MAX`` segments. An open segment whose writer is at work is that writer's to
# seal.
#
# After a crash: each entry is there or not. The lease expires.
# --------------------------------------------------------------------------------------------------


def seal_open(at: Workplace, takes: Callable[[str], bool]) -> int:
    """Seal the open segments of the wanted topics.

    Returns:
        How many.

    Raises:
        FencedError: A writer is at work.
        BackendError: The store does not answer; calling again is harmless.
    """
    count = 0

    def work(journal: JournalWriter[TierState]) -> None:
        nonlocal count
        actions = list(_seals(journal.state, takes))
        for start in range(0, len(actions), STEPS_MAX):
            some = actions[start : start + STEPS_MAX]
            journal.append(some)
            count += len(some)
        journal.write_checkpoint()

    in_new_epoch(at, work)
    return count


def _seals(state: TierState, takes: Callable[[str], bool]) -> Iterator[Action]:
    for queue in sorted(queue for queue in state.queues if takes(queue.topic)):
        incarnation = state.incarnation(queue)
        if incarnation is None or incarnation.ended or not incarnation.segments:
            continue
        segment = incarnation.segments[-1]
        if segment.sealed or not segment.parts:
            continue
        yield queue_action("seal", queue, incarnation.number, segment=segment.base_offset)
