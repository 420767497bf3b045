"""Compaction of small tiers with keys: passes over them, and what a consumer then has."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
from support.journals import PREFIX
from support.keyed import KeyedTier, Mail
from support.tiers import PLACE

from tiered.clock import ManualClock
from tiered.compaction.passes import PassSettings
from tiered.format.record import decode_record
from tiered.log.reader import TierReader
from tiered.log.state import TierMachine, queue_action
from tiered.log.verify_objects import check_state
from tiered.model import MessageQueue, QueueOffset
from tiered.upkeep.compact import Compactor, CompactSettings
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.log.reader import QueueReader


QUEUE = MessageQueue("t", 0)


OTHER = MessageQueue("t", 1)


ALWAYS = PassSettings(dirty_ratio=0)


_SEEDS = itertools.count()


def workplace(tier: KeyedTier, clock: ManualClock | None = None) -> Workplace:
    return Workplace(
        tier.store, tier.store, PLACE, clock or ManualClock(), random.Random(next(_SEEDS))
    )


def compact(tier: KeyedTier, **options: Any) -> dict[str, Any]:
    clock = options.pop("clock", None)
    settings_ = CompactSettings(**{"passes": ALWAYS, "compression": None, **options})
    compactor = Compactor(workplace(tier, clock), settings_)
    plan = compactor.plan(["t"])
    done = compactor.apply(plan) if plan.steps else None
    tier.journal.catch_up()
    return {**plan.document(), "applied": done}


def read(reader: QueueReader, start: int = 0) -> list[tuple[int, bytes]]:
    """Queue offset and bytes of each message."""
    found = []
    for batch in reader.batches(QueueOffset(start)):
        rows = batch.records
        for number in np.flatnonzero(rows.sizes > 0).tolist():
            at = int(rows.positions[number])
            record = bytes(memoryview(rows.data)[at : at + int(rows.sizes[number])])
            found.append((rows.base_offset + number, record))
    return found


def messages(
    tier: KeyedTier, queue: MessageQueue = QUEUE, *, prefix: str = PREFIX
) -> list[tuple[int, bytes]]:
    reader = TierReader(tier.store, prefix)
    reader.refresh()
    return read(reader.queue(queue))


def mail(key: str, body: bytes = b"value") -> Mail:
    return Mail((key,), body=body)


def seal(tier: KeyedTier, queue: MessageQueue = QUEUE) -> None:
    incarnation = tier.journal.state.incarnation(queue)
    assert incarnation
    base = incarnation.segments[-1].base_offset
    tier.say(queue_action("seal", queue, incarnation.number, segment=base))


def check(tier: KeyedTier) -> None:
    assert [problem.detail for problem in check_state(tier.journal.state)] == []
    machine = TierMachine()
    assert machine.load(machine.dump(tier.journal.state)).queues == tier.journal.state.queues


Row = tuple[int, int, int, str, bytes]
"""Of a message: store time, queue offset, queue, key, body; as they are ordered among queues."""


THREE = [MessageQueue("t", number) for number in range(3)]


def rows_of(tier: KeyedTier) -> list[Row]:
    """All messages of the topic that a consumer is given."""
    found = []
    for queue in THREE:
        for at, raw in messages(tier, queue) if queue in tier.journal.state.queues else ():
            record = decode_record(raw, 0)
            row = record.store_timestamp_ms, at, queue.queue_id
            found.append((*row, record.properties.get("KEYS", ""), record.body))
    return found


def final_state(rows: list[Row]) -> dict[str, bytes]:
    """What a consumer of all queues has of each key in the end: its newest value, or nothing where that is a tombstone."""
    newest_ = {row[3]: row[4] for row in sorted(rows) if row[3]}
    return {key: body for key, body in newest_.items() if body}


def old_value(tier: KeyedTier, where: str) -> None:
    """Deletes k in one queue, with an old value of it in another: in what is open still, or as its newest message."""
    tier.post(QUEUE, [Mail(("k",), body=b"", time_ms=2000), Mail(("x",), time_ms=2001)])
    seal(tier)
    mails = [Mail(("y",), time_ms=999), Mail(("k",), body=b"old", time_ms=1000)]
    tier.post(OTHER, mails)
    if where == "last":
        seal(tier, OTHER)


def two_passes(tier: KeyedTier, compact_: Callable[..., Any] = compact) -> None:
    """Whose tombstones' time is over with the second."""
    clock = ManualClock()
    for turn in range(2):
        compact_(tier, across_queues=True, clock=clock)
        clock.advance(2 * 86_400)
        if not turn:
            tier.post(QUEUE, [Mail(("z",), time_ms=9000)], roll=True)
            seal(tier)
