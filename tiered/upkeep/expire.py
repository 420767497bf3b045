"""Queues give up messages: whole sealed segments at their beginning, all of a topic, or what is wrong at their end.

Overview: ``plan_expire`` and ``plan_delete_topic`` decide by the journal's state alone; ``apply_steps`` appends ``expire``
actions. ``plan_truncate`` also reads the index of the part in which the offset lies; ``apply_truncate`` appends the
action that ``attach`` would (``tiered.log.truncation``). No object is touched: a later gc deletes what no entry names, after
its grace, so that readers that are at work get to their end; what is truncated stays readable as a life that is over, until
it expires.

Beside a running writer: ``expire`` takes no epoch and appends to the journal as a guest; the writer meets the entry and
goes on. ``delete-topic``, ``truncate`` and files of timers also change open segments, which only the tier's writer may:
they take an epoch, and so refuse while a writer is alive.

After a crash: each entry is there or not; the same plan goes on where it ended, since steps that are done are known by
the queue's minimum, and a queue that was truncated by the life that ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backends.errors import ObjectNotFoundError
from tiered.crashpoints import reached
from tiered.errors import DataError, InvalidError
from tiered.log.divergence import Change, fingerprint_in_tier, measure, plan_end
from tiered.log.expiry import ExpiryStep, expired, newest_ms, plan_expiry, plan_handed, plan_removal
from tiered.log.flat_file import ITEM, ITEM_BYTES
from tiered.log.reader import QueueReader, TierReader
from tiered.log.sections import read_range
from tiered.log.timers import HOUR_MS, hour_queue
from tiered.log.truncation import Head, cut
from tiered.model import MessageQueue, QueueOffset
from tiered.upkeep.workplace import (
    FORMAT,
    Ledger,
    Plan,
    digest,
    in_new_epoch,
    journal_writer,
    moved_on,
    require_same_tier,
    tier_fields,
    was_applied,
)
from timer.dequeue import refused_in

if TYPE_CHECKING:
    from tiered.journal.append import JournalWriter
    from tiered.journal.entry import Action
    from tiered.log.parts import QueueLife, Segment, TierState
    from tiered.upkeep.workplace import Workplace

Ttl = Callable[[str], int | None]
TIMERS = "expire --timers"
"""What a plan of ``plan_expire_timers`` calls itself."""
_WITH_OPEN = ("delete-topic", TIMERS)
STEPS_MAX = 500
"""Steps in one journal entry."""
CLOCKS_APART_MS = 300_000
"""When ours and the store's clock differ by more, one of them is wrong, and nothing expires."""


class ArchiveProof(Protocol):
    """Says of each segment whether it lies elsewhere as well, so that the tier may give it up."""

    @property
    def url(self) -> str:
        """Where."""
        ...

    def holds(self, state: TierState, queue: MessageQueue, number: int, segment: Segment) -> bool:
        """Whether it does: a segment of the ``number``-th life of a queue, in this state of the tier."""
        ...

    def document(self) -> dict[str, Any]:
        """For the plan: ``archive``, ``unproved``, ``refusals``."""
        ...


def topics_of(at: Workplace) -> set[str]:
    """The topics that the tier has."""
    return {queue.topic for queue in _reader(at).state.queues}


def plan_expire(
    at: Workplace, ttl_ms: Ttl, *, objects_max: int, proof: ArchiveProof | None = None
) -> Plan:
    """What expires now. Changes nothing.

    Args:
        ttl_ms: Time to live of a topic; None: for ever.
        objects_max: Give up at most so many objects.
        proof: Give up only what it holds.
    """
    reader = _reader(at)
    now_ms = at.clock.now_ms()
    may_go = partial(proof.holds, reader.state) if proof else (lambda *_segment: True)
    steps, is_cut = plan_expiry(
        reader.state, now_ms, ttl_ms, objects_max=objects_max, may_go=may_go
    )
    topics = sorted({queue.topic for queue in reader.state.queues})
    ttls = {topic: ttl for topic in topics if (ttl := ttl_ms(topic)) is not None}
    known = {"ttls": ttls, "topic": None, **(proof.document() if proof else {})}
    return _plan(at, reader, "expire", steps, is_cut, now_ms=now_ms, **known)


def plan_delete_topic(at: Workplace, topic: str, *, objects_max: int) -> Plan:
    """What removing a topic gives up. Changes nothing.

    Raises:
        InvalidError: The tier has no such topic.
    """
    reader = _reader(at)
    if all(queue.topic != topic for queue in reader.state.queues):
        raise InvalidError(
            f"the tier has no topic {topic}", where=at.store.url, do="`tiered ls URL` lists them"
        )
    steps, is_cut = plan_removal(reader.state, topic, objects_max=objects_max)
    now_ms = at.clock.now_ms()
    return _plan(at, reader, "delete-topic", steps, is_cut, now_ms=now_ms, ttls={}, topic=topic)


def plan_expire_timers(
    at: Workplace, *, grace_ms: int, objects_max: int, with_refused: bool = False
) -> Plan:
    """Which files of timers go now: all of them is handed over, and their hour has been over for so long. Changes nothing.

    Args:
        objects_max: Give up at most so many objects.
        with_refused: Files, too, that hold messages which the target refused: nobody else has these.
    """
    reader, now_ms = _reader(at), at.clock.now_ms()
    old = [
        hour
        for hour in sorted(reader.state.timers.hours)
        if _is_handed(reader.state, hour) and (hour + 1) * HOUR_MS + grace_ms <= now_ms
    ]
    hours = [hour for hour in old if with_refused or not _is_needed(reader.state, hour)]
    steps, is_cut = plan_handed(reader.state, hours, objects_max=objects_max)
    known: dict[str, Any] = {
        "ttls": {},
        "topic": None,
        "grace_ms": grace_ms,
        "with_refused": with_refused,
        "kept_for_refused": len(old) - len(hours),
    }
    return _plan(at, reader, TIMERS, steps, is_cut, now_ms=now_ms, **known)


def _is_handed(state: TierState, hour: int) -> bool:
    """Whether all of an hour's file is handed over."""
    facts, life = state.timers.hours.get(hour), state.life(hour_queue(hour))
    return bool(facts and life and facts.done == facts.end == life.commit_offset)


def _is_needed(state: TierState, hour: int) -> bool:
    """Whether an hour's file has messages that nobody else has: refused ones, and those that are held back for damage."""
    return bool(refused_in(state, hour) or state.timers.hours[hour].held)


def apply_steps(at: Workplace, plan: Plan, proof: ArchiveProof | None = None) -> dict[str, Any]:
    """Carry out a plan of either kind.

    Args:
        proof: With a plan that names an archive: that archive's, of now. Nothing is given up that it does not hold.

    Returns:
        ``steps`` that were carried out now, ``already_done``, ``entries`` written, ``epoch``, ``run``; and
        ``was_applied``: all of it had been done before.

    Raises:
        InvalidError: The tier has moved on in a way that matters, or a clock is wrong.
        FencedError: A writer is at work, and the plan takes open segments.
        BackendError: The store does not answer. Applying again goes on.
    """
    steps = [step_of(row) for row in plan["steps"]]
    ledger = Ledger(at.store, at.prefix, at.clock, run=at.new_id(), what=plan["what"])
    store_now_ms = ledger.begin({"plan": digest(plan)})
    run = _ExpireRun(plan, steps, proof)
    if plan["what"] != "delete-topic":
        _require_clock(at, plan, store_now_ms)
    if plan["what"] in _WITH_OPEN:
        journal = in_new_epoch(at, run.append)
    else:
        journal = journal_writer(at)
        run.append(journal)
    journal.write_checkpoint()
    ledger.end(run.done)
    before = was_applied(len(steps), run.done["steps"], run.done["already_done"])
    return {
        **run.done,
        "was_applied": before,
        "epoch": journal.epoch,
        "run": ledger.run,
    }


def step_of(row: dict[str, Any]) -> ExpiryStep:
    """A step as it stands in a plan."""
    fields = dict(row)
    queue = MessageQueue(fields.pop("topic"), fields.pop("queue_id"))
    return ExpiryStep(queue=queue, **fields)


def step_row(step: ExpiryStep) -> dict[str, Any]:
    """Undo ``step_of``."""
    fields = asdict(step)
    del fields["queue"]
    return {"topic": step.queue.topic, "queue_id": step.queue.queue_id, **fields}


class _ExpireRun:
    def __init__(self, plan: Plan, steps: list[ExpiryStep], proof: ArchiveProof | None) -> None:
        if plan.get("archive") != (proof.url if proof else None):
            raise InvalidError(
                "this plan was made with another archive, or without one", do="plan again"
            )
        self._plan = plan
        self._proof = proof
        self._steps = steps
        self.done = {"steps": 0, "already_done": 0, "entries": 0}

    def append(self, journal: JournalWriter[TierState]) -> None:
        """Append what is not done yet, so many steps an entry."""
        state = journal.state
        require_same_tier(self._plan, state)
        due = [step for step in self._steps if not _is_done(state, step)]
        self.done["already_done"] = len(self._steps) - len(due)
        for start in range(0, len(due), STEPS_MAX):
            some = due[start : start + STEPS_MAX]
            journal.append([step.action() for step in some], check=partial(self._hold, some))
            reached("steps-appended")
            self.done["entries"] += 1
            self.done["steps"] += len(some)

    def _may_go(self, state: TierState, hour: int) -> bool:
        is_free = self._plan["with_refused"] or not _is_needed(state, hour)
        return is_free and _is_handed(state, hour)

    def _hold(self, steps: list[ExpiryStep], state: TierState) -> None:
        """Everything that the steps presume."""
        with_open = self._plan["what"] in _WITH_OPEN
        for step in steps:
            if self._plan["what"] == TIMERS and not self._may_go(state, step.queue.queue_id):
                raise moved_on(f"{step.queue} has timers that are not handed over, or were refused")
            life = _life(state, step)
            left = expired(life, step.action(), with_open=with_open) if life else None
            if life is None or left is None:
                raise moved_on(f"{step.queue} does not begin or end where it did")
            gone = life.segments[: len(life.segments) - len(left.segments)]
            newest = max((newest_ms(segment) for segment in gone), default=-1)
            if (len(gone), newest) != (step.segments, step.newest_ms):
                raise moved_on(f"{step.queue} has other segments than it had")
            proof = self._proof
            if proof and not all(proof.holds(state, step.queue, step.life, one) for one in gone):
                raise moved_on(f"the archive does not hold what {step.queue} would give up")


def _life(state: TierState, step: ExpiryStep) -> QueueLife | None:
    lives = state.queues.get(step.queue, ())
    there = step.life < len(lives) and lives[step.life].incarnation == step.incarnation
    return lives[step.life] if there else None


def _is_done(state: TierState, step: ExpiryStep) -> bool:
    """Whether the life has given it up. What was truncated of it since stands in its place, and it stands behind that."""
    behind = state.queues.get(step.queue, ())[step.life :]
    life = next((one for one in behind if one.cut_at <= step.min_from), None)
    return bool(life and life.incarnation == step.incarnation and life.min_offset >= step.min_to)


def _require_clock(at: Workplace, plan: Plan, store_now_ms: int) -> None:
    """Nothing expires by a clock that is wrong: ours is held against the store's, at planning and now.

    By one that is behind all store times lie in the future, which is not believed; so that is refused as well. (How long ago
    a plan was made is another matter.)
    """
    now_ms = at.clock.now_ms()
    ahead_ms = max(now_ms, plan["made_ms"]) - store_now_ms
    behind_ms = store_now_ms - now_ms
    if max(ahead_ms, behind_ms) > CLOCKS_APART_MS:
        is_ahead = ahead_ms > CLOCKS_APART_MS
        apart, where = (ahead_ms, "ahead of") if is_ahead else (behind_ms, "behind")
        raise InvalidError(
            f"our clock is {apart / 1000:.0f} s {where} the store's, so nothing can be called old",
            where=at.store.url,
            do="set the clock",
        )


def _reader(at: Workplace) -> TierReader:
    reader = TierReader(at.store, at.prefix)
    reader.refresh()
    return reader


def _plan(
    at: Workplace,
    reader: TierReader,
    what: str,
    steps: list[ExpiryStep],
    is_cut: bool,
    **fields: Any,  # noqa: ANN401 (JSON values)
) -> Plan:
    made_ms = fields.pop("now_ms")
    return {
        "format": FORMAT,
        "what": what,
        "url": at.store.url,
        "cluster": at.place.cluster,
        "broker": at.place.broker,
        **tier_fields(reader.state),
        "journal_number": reader.journal_number,
        "epoch": reader.state.epoch,
        "made_ms": made_ms,
        **fields,
        "is_cut": is_cut,
        "segments": sum(step.segments for step in steps),
        "objects": sum(step.objects for step in steps),
        "messages": sum(step.messages for step in steps),
        "size_bytes": sum(step.size_bytes for step in steps),
        "steps": [step_row(step) for step in steps],
    }


# -- truncation -------------------------------------------------------------------------------------
#
# ``attach`` ends a queue by itself where the local store has *other* messages. Where the tier has more than the store, and
# nothing that contradicts it, the store may be a copy that lags, so ``attach`` waits, for ever if need be. Only a person
# knows that what the tier has there never was: holes up to an offset that a damaged record named, for instance.


def plan_truncate(at: Workplace, queue: MessageQueue, end: int) -> Plan:
    """What truncating a queue's end gives up. Changes nothing.

    Raises:
        InvalidError: The tier has no such queue, or it cannot end there.
    """
    reader = TierReader(at.store, at.prefix)
    reader.refresh()
    life = reader.state.life(queue)
    _require_sense(at, queue, life, end)
    assert life is not None
    place = len(reader.state.queues[queue]) - 1
    steps = [] if end == life.commit_offset else [_step(at, queue, life, QueueOffset(end), place)]
    return {
        "format": FORMAT,
        "what": "truncate",
        "url": at.store.url,
        "cluster": at.place.cluster,
        "broker": at.place.broker,
        **tier_fields(reader.state),
        "journal_number": reader.journal_number,
        "epoch": reader.state.epoch,
        "made_ms": at.clock.now_ms(),
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "to": end,
        "steps": steps,
    }


def apply_truncate(at: Workplace, plan: Plan) -> dict[str, Any]:
    """Carry out a plan that has a step.

    Returns:
        ``steps`` that were carried out now, ``already_done``, ``epoch``, ``run``; and ``was_applied``: it had been
        done before.

    Raises:
        InvalidError: The tier has moved on.
        FencedError: A writer is at work.
        BackendError: The store does not answer. Applying again goes on.
    """
    ledger = Ledger(at.store, at.prefix, at.clock, run=at.new_id(), what=plan["what"])
    ledger.begin({"plan": digest(plan)})
    run = _TruncationRun(plan)
    journal = in_new_epoch(at, run.append)
    journal.write_checkpoint()
    ledger.end(run.done)
    before = was_applied(1, run.done["steps"], run.done["already_done"])
    return {
        **run.done,
        "was_applied": before,
        "epoch": journal.epoch,
        "run": ledger.run,
    }


class _TruncationRun:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._action: Action = plan["steps"][0]["action"]
        self._was = plan["steps"][0]["was"]
        self._queue = MessageQueue(plan["topic"], plan["queue_id"])
        self.done = {"steps": 0, "already_done": 0}

    def append(self, journal: JournalWriter[TierState]) -> None:
        """Append what is not done yet."""
        require_same_tier(self._plan, journal.state)
        if self._is_done(journal.state):
            self.done["already_done"] = 1
            return
        journal.append([self._action], check=self._hold)
        reached("steps-appended")
        self.done["steps"] = 1

    def _is_done(self, state: TierState) -> bool:
        """Whether this plan has ended the life that it was made of; what goes on has the next place."""
        place = self._plan["steps"][0]["life"]
        lives = state.queues.get(self._queue, ())[place:-1]
        return [(life.ended, life.commit_offset) for life in lives[:1]] == [
            (self._action["reason"], self._was)
        ]

    def _hold(self, state: TierState) -> None:
        """Everything that the action presumes; expiry may come between."""
        life = state.life(self._queue)
        if life is None or _ended(life, self._action, self._was) is None:
            raise moved_on(f"{self._queue} does not begin or end where it did")


def _require_sense(at: Workplace, queue: MessageQueue, life: QueueLife | None, end: int) -> None:
    if life is None:
        raise InvalidError(
            f"the tier has no queue {queue}", where=at.store.url, do="`tiered ls URL` lists them"
        )
    if not life.min_offset <= end <= life.commit_offset:
        raise InvalidError(
            f"{queue} has queue offsets [{life.min_offset}, {life.commit_offset}), and cannot end at {end}",
            where=at.store.url,
            do="give an offset in between",
        )
    start = _batch_start(at, life, end)
    if start is not None:
        raise InvalidError(
            f"{queue} has a batch of messages from {start} on, which offset {end} would divide",
            where=at.store.url,
            do=f"give --to {start}, or an offset behind the batch",
        )


def _batch_start(at: Workplace, life: QueueLife, end: int) -> int | None:
    """Where the inner batch begins that ``end`` lies in, as far as this part has it; None when it lies in none.

    None, too, when the part cannot be read: nobody can divide it then, and ``plan_end`` has all of it go.
    """
    part = next((p for p in life.parts() if p.queue_offset < end < p.queue_end), None)
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
    at: Workplace, queue: MessageQueue, life: QueueLife, end: QueueOffset, place: int
) -> dict[str, Any]:
    reader = QueueReader.of_life(at.store, at.prefix, queue, life)
    change: Change = plan_end(
        queue,
        life,
        end,
        tier_fingerprint=lambda offset: fingerprint_in_tier(reader, offset),
        read_items=lambda part, count: measure(at.store, at.prefix, part, count),
    )
    gone = _ended(life, change.action, life.commit_offset)
    assert gone is not None
    parts = gone.parts()
    return {
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "incarnation": life.incarnation,
        "life": place,
        "to": change.start,
        "was": change.end,
        "messages": parts.messages,
        "holes": parts.holes,
        "missing": sum(gap.end - gap.start for gap in gone.gaps),
        "begins_anew": change.is_anew,
        "action": change.action,
    }


def _ended(life: QueueLife, action: Action, was: int) -> QueueLife | None:
    """The life that is over by the action; None when the action does not fit (any more)."""
    if action["do"] == "incarnation":
        fits = (life.incarnation + 1, life.min_offset, life.commit_offset)
        is_so = fits == (action["incarnation"], action["start"], was)
        return replace(life, ended=action["reason"]) if is_so else None
    if life.incarnation != action["incarnation"]:
        return None
    divided = cut(
        life,
        end=QueueOffset(action["end"]),
        was=QueueOffset(action["was"]),
        head=Head.of(action["head"]) if action["head"] else None,
        reason=action["reason"],
        entry=0,  # there is none yet
    )
    return divided[0] if divided else None
