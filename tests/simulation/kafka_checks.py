"""Holds what a tier says of leaders and transactions, and what its readers see, against walks over the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.contents import GAP, hole
from simulation.kafka_batches import head_of, is_batch
from simulation.kafka_broker import open_at
from simulation.kafka_lineage import Said, Walk, walk

from tiered.local.interface import HoleReason
from tiered.log.lineage import Isolation
from tiered.log.reader import TierReader
from tiered.log.state import Gap
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from simulation.broker import Branch, QueueKey
    from simulation.incarnations import ModelIncarnation
    from simulation.kafka_broker import KafkaBroker
    from simulation.world import World

    from tiered.log.parts import LineageFacts

HIDDEN = hole(HoleReason.HIDDEN)


def said_of(facts: LineageFacts | None) -> Said | None:
    """What the product knows."""
    if facts is None:
        return None
    return Said(
        facts.topic_id,
        tuple((one.number, one.start) for one in facts.epochs),
        tuple((one.producer, one.first) for one in facts.opened),
        tuple((one.producer, one.first, one.last) for one in facts.aborted),
        facts.is_sure,
    )


def require_said(what: str, facts: LineageFacts | None, known: Said | None) -> None:
    """The state is what entries have said."""
    from simulation.history import require

    require(said_of(facts) == known, f"I5: {what} has {said_of(facts)}, not {known}")


def check_lineage(world: World, broker: KafkaBroker) -> None:
    """Each queue's present incarnation says what a walk over its records finds, and its readers see the same."""
    readers = {
        isolation: TierReader(world.memory, world.place.prefix, isolation)
        for isolation in Isolation
    }
    for reader in readers.values():
        reader.refresh()
    for key, incarnations in world.history.queues.items():
        incarnation = incarnations[-1]
        if incarnation.lineage is None:
            continue
        true = _of_its_branch(world, broker, key, incarnation)
        for isolation, reader in readers.items():
            _check_seen(world, key, incarnation, true, isolation, reader)


def _of_its_branch(
    world: World, broker: KafkaBroker, key: QueueKey, incarnation: ModelIncarnation
) -> Walk:
    """What a walk finds, with what the node says where the tier has not all; it has to be what was said."""
    from simulation.history import require

    said, course = (
        incarnation.lineage,
        sorted(world.history.courses[(*key, incarnation.number)][-1].items()),
    )
    assert said is not None
    said = said.expired(incarnation.min)  # what has come since may tell of more that is over
    found = []
    for branch in reversed(broker.branches[key]):
        if not _is_of(broker, branch, incarnation):
            continue
        true = _walked(course, branch, said)
        mine = Said(
            said.topic_id,
            tuple(true.epochs),
            tuple(sorted(true.opened.items())),
            tuple(true.aborted),
        )
        mine = mine.expired(incarnation.min)
        if (mine.epochs, mine.aborted) == (said.epochs, said.aborted) and (
            mine.opened == said.opened or not said.is_sure
        ):
            world.count("lineage checked")
            world.count("open at the end", len(mine.opened))
            world.count("aborted at the end", len(mine.aborted))
            return true
        found.append(mine)
    require(
        not found, f"lineage of {key} {incarnation.number} is {said}, and a walk finds {found[:1]}"
    )
    world.count("lineage of no branch")
    return Walk(dict(said.opened), [*said.epochs], [*said.aborted])


def _walked(course: list[tuple[int, bytes]], branch: Branch, said: Said) -> Walk:
    return walk(course, lambda offset: open_at(branch, offset))


def _is_of(broker: KafkaBroker, branch: Branch, incarnation: ModelIncarnation) -> bool:
    """Whether all that an incarnation has is, or was, of a course of events."""
    return (
        all(
            broker.is_same(raw, branch.at(offset))
            or branch.at(offset) is None
            or not is_batch(branch.at(offset) or b"")
            for row in incarnation.rows
            for offset, raw in enumerate(row.records, row.start)
            if is_batch(raw)
        )
        and branch.end >= incarnation.commit
    )


def _check_seen(
    world: World,
    key: QueueKey,
    incarnation: ModelIncarnation,
    true: Walk,
    isolation: Isolation,
    reader: TierReader,
) -> None:
    """What a reader sees is what a consumer of the node would: by offset."""
    from simulation.history import require

    end = incarnation.commit
    hides = isolation is Isolation.COMMITTED
    assert incarnation.lineage is not None
    if hides:
        firsts = [first for _, first in incarnation.lineage.opened]
        end = max(incarnation.min, min([end, *firsts]))
    seen: dict[int, bytes] = {}
    what = f"{key} {incarnation.number} under {isolation.value}"
    queue = reader.queue(MessageQueue(*key))
    for found in queue.batches(QueueOffset(incarnation.min)):
        if isinstance(found, Gap):
            seen |= dict.fromkeys(
                range(max(found.start, incarnation.min), min(found.end, end)), GAP
            )
        else:
            first = int(found.records.base_offset)
            seen |= dict(enumerate(_as_seen(found), first))
    require(
        sorted(seen) == [*range(incarnation.min, end)],
        f"{what} shows {sorted(seen)}, not up to {end}",
    )
    for offset, raw in seen.items():
        mine = incarnation.record(offset) or GAP
        if is_batch(mine) and _is_hidden(mine, offset, true, hides=hides):
            world.count("hidden")
            mine = HIDDEN
        require(raw == mine, f"{what} shows {raw[:70]!r} at {offset}, not {mine[:70]!r}")


def _as_seen(found: object) -> list[bytes]:
    from simulation.checker import raws_of

    return [*raws_of(found.records)]  # type: ignore[attr-defined]


def _is_hidden(raw: bytes, offset: int, true: Walk, *, hides: bool) -> bool:
    head = head_of(raw)
    if head.is_control:
        return True
    ends = [(who, low, high) for who, low, high in true.aborted if who == head.producer_id]
    is_data = bool(head.attributes & 16)
    return hides and is_data and any(low <= offset < high for _, low, high in ends)
