"""Retention: queues give up whole sealed segments at their beginning. Plan, then apply.

Overview: ``plan_expire`` and ``plan_delete_topic`` decide by the journal's state alone; ``apply_steps`` appends ``expire``
actions. No object is touched: a later gc deletes what no entry names any more, after its grace, so that readers that are
at work get to their end.

Beside a running writer: ``expire`` takes no reign and appends to the journal as a guest; the writer meets the entry and
goes on. ``delete-topic`` also takes open segments, which only a reigning writer may: it takes a reign, and so refuses
while a writer is alive.

After a crash: each entry is there or not; the same plan goes on where it ended, since steps that are done are known by
the queue's minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tiered.crashpoints import reached
from tiered.errors import InvalidError
from tiered.log.expiry import ExpiryStep, expired, newest_ms, plan_expiry, plan_removal
from tiered.log.reader import TierReader
from tiered.model import MessageQueue
from tiered.upkeep.workplace import (
    FORMAT,
    Ledger,
    Plan,
    digest,
    journal_writer,
    moved_on,
    reign_and,
    was_applied,
)

if TYPE_CHECKING:
    from tiered.journal.writer import JournalWriter
    from tiered.log.parts import QueueLife, Segment, TierState
    from tiered.upkeep.workplace import Workplace

Ttl = Callable[[str], int | None]
STEPS_MAX = 500
"""Steps in one journal entry."""
CLOCKS_APART_MS = 300_000
"""When ours and the store's clock differ by more, one of them is wrong, and nothing expires."""


class Proof(Protocol):
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


def plan_expire(
    at: Workplace, ttl_ms: Ttl, *, objects_max: int, proof: Proof | None = None
) -> Plan:
    """What expires now. Changes nothing.

    Args:
        at: The tier.
        ttl_ms: Time to live of a topic; None: for ever.
        objects_max: Give up at most so many objects.
        proof: Give up only what it holds.

    Raises:
        DataError: The journal is damaged.
        BackendError: The store could not be read.
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
        DataError: The journal is damaged.
        BackendError: The store could not be read.
    """
    reader = _reader(at)
    if all(queue.topic != topic for queue in reader.state.queues):
        raise InvalidError(
            f"the tier has no topic {topic}", where=at.store.url, do="`tiered ls URL` lists them"
        )
    steps, is_cut = plan_removal(reader.state, topic, objects_max=objects_max)
    now_ms = at.clock.now_ms()
    return _plan(at, reader, "delete-topic", steps, is_cut, now_ms=now_ms, ttls={}, topic=topic)


def apply_steps(at: Workplace, plan: Plan, proof: Proof | None = None) -> dict[str, Any]:
    """Carry out a plan of either kind.

    Args:
        at: The tier.
        plan: What to do.
        proof: With a plan that names an archive: that archive's, of now. Nothing is given up that it does not hold.

    Returns:
        ``steps`` that were carried out now, ``already_done``, ``entries`` written, ``generation``, ``run``; and
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
    if plan["what"] == "delete-topic":
        journal = reign_and(at, run.append)
    else:
        _require_clock(at, plan, store_now_ms)
        journal = journal_writer(at)
        run.append(journal)
    journal.write_checkpoint()
    ledger.end(run.done)
    before = was_applied(len(steps), run.done["steps"], run.done["already_done"])
    return {
        **run.done,
        "was_applied": before,
        "generation": journal.generation,
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
    def __init__(self, plan: Plan, steps: list[ExpiryStep], proof: Proof | None) -> None:
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
        if dict(state.store) != self._plan["store"]:
            raise moved_on("it belongs to another store")
        due = [step for step in self._steps if not _is_done(state, step)]
        self.done["already_done"] = len(self._steps) - len(due)
        for start in range(0, len(due), STEPS_MAX):
            some = due[start : start + STEPS_MAX]
            journal.append([step.action() for step in some], check=partial(self._hold, some))
            reached("steps-appended")
            self.done["entries"] += 1
            self.done["steps"] += len(some)

    def _hold(self, steps: list[ExpiryStep], state: TierState) -> None:
        """Everything that the steps presume."""
        with_open = self._plan["what"] == "delete-topic"
        for step in steps:
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
    life = _life(state, step)
    return life is not None and life.min_offset >= step.min_to


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
        "store": dict(reader.state.store),
        "journal_number": reader.journal_number,
        "generation": reader.state.generation,
        "made_ms": made_ms,
        **fields,
        "is_cut": is_cut,
        "segments": sum(step.segments for step in steps),
        "objects": sum(step.objects for step in steps),
        "messages": sum(step.messages for step in steps),
        "size_bytes": sum(step.size_bytes for step in steps),
        "steps": [step_row(step) for step in steps],
    }
