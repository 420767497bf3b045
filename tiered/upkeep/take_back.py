"""take-back: a person ends a queue at an earlier offset, since what the tier has behind it is wrong. Plan, then apply.

``attach`` ends a queue by itself where the local store has *other* messages. Where the tier has more than the store, and
nothing that contradicts it, the store may be a copy that lags, so ``attach`` waits, for ever if need be. Only a person
knows that what the tier has there never was: holes up to an offset that a damaged record named, for instance.

Overview: ``plan_take_back`` reads the journal, and of the part that the offset lies in the index; ``apply_take_back``
appends the same action as ``attach`` would (``tiered.log.takeback``), under a reign of its own. No object is touched: what
is taken back stays readable as a life that is over, until it expires.

After a crash: the entry is there or not. Applying again finds it done, by the life that it ended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered.crashpoints import reached
from tiered.errors import InvalidError
from tiered.log.consume_queue import ITEM, ITEM_BYTES
from tiered.log.parting import Change, mark_in_tier, measure, plan_end
from tiered.log.reader import QueueReader, TierReader
from tiered.log.sections import read_range
from tiered.log.takeback import Head, cut
from tiered.model import MessageQueue, QueueOffset
from tiered.upkeep.workplace import FORMAT, Ledger, Plan, digest, moved_on, reign_and, was_applied

if TYPE_CHECKING:
    from tiered.journal.entry import Action
    from tiered.journal.writer import JournalWriter
    from tiered.log.parts import QueueLife, TierState
    from tiered.upkeep.workplace import Workplace


def plan_take_back(at: Workplace, queue: MessageQueue, end: int) -> Plan:
    """What taking back a queue's end gives up. Changes nothing.

    Args:
        at: The tier.
        queue: Which.
        end: Where it is to end.

    Raises:
        InvalidError: The tier has no such queue, or it cannot end there.
        DataError: The journal is damaged.
        BackendError: The store could not be read.
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
        "what": "take-back",
        "url": at.store.url,
        "cluster": at.place.cluster,
        "broker": at.place.broker,
        "store": dict(reader.state.store),
        "journal_number": reader.journal_number,
        "generation": reader.state.generation,
        "made_ms": at.clock.now_ms(),
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "to": end,
        "steps": steps,
    }


def apply_take_back(at: Workplace, plan: Plan) -> dict[str, Any]:
    """Carry out a plan that has a step.

    Returns:
        ``steps`` that were carried out now, ``already_done``, ``generation``, ``run``; and ``was_applied``: it had been
        done before.

    Raises:
        InvalidError: The tier has moved on.
        FencedError: A writer is at work.
        BackendError: The store does not answer. Applying again goes on.
    """
    ledger = Ledger(at.store, at.prefix, at.clock, run=at.new_id(), what=plan["what"])
    ledger.begin({"plan": digest(plan)})
    run = _TakeBackRun(plan)
    journal = reign_and(at, run.append)
    journal.write_checkpoint()
    ledger.end(run.done)
    before = was_applied(1, run.done["steps"], run.done["already_done"])
    return {
        **run.done,
        "was_applied": before,
        "generation": journal.generation,
        "run": ledger.run,
    }


class _TakeBackRun:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._action: Action = plan["steps"][0]["action"]
        self._was = plan["steps"][0]["was"]
        self._queue = MessageQueue(plan["topic"], plan["queue_id"])
        self.done = {"steps": 0, "already_done": 0}

    def append(self, journal: JournalWriter[TierState]) -> None:
        """Append what is not done yet."""
        if dict(journal.state.store) != self._plan["store"]:
            raise moved_on("it belongs to another store")
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
    """Where the inner batch begins that ``end`` lies in, as far as this part has it; None when it lies in none."""
    part = next((p for p in life.parts() if p.queue_offset < end < p.queue_end), None)
    if part is None:
        return None
    middle = (end - part.queue_offset) * ITEM_BYTES
    raw = read_range(at.store, at.prefix, part.index.part_of(0, middle + ITEM_BYTES))
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
        tier_mark=lambda offset: mark_in_tier(reader, offset),
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
    )
    return divided[0] if divided else None
