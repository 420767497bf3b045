"""Holds what a tier says of leaders and transactions, and what its readers see, against walks over the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.contents import GAP, hole
from simulation.history import raws_of, require
from simulation.kafka_batches import TRANSACTIONAL, head_of, is_batch
from simulation.kafka_broker import open_at
from simulation.kafka_lineage import Said, Walk, walk

from tiered.local.interface import HoleReason
from tiered.log.lineage import Isolation
from tiered.log.reader import QueueReader, TierReader
from tiered.log.state import Gap
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.broker import Branch, QueueKey
    from simulation.incarnations import ModelIncarnation
    from simulation.kafka_broker import KafkaBroker
    from simulation.kafka_lineage import Aborted
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
    require(said_of(facts) == known, f"I5: {what} has {said_of(facts)}, not {known}")


def check_lineage(world: World, broker: KafkaBroker) -> None:
    """Each queue's present incarnation says what a walk over its records finds, and its readers see the same."""
    for isolation in Isolation:
        reader = TierReader(world.memory, world.place.prefix, isolation)
        reader.refresh()
        for key, incarnations in world.history.queues.items():
            incarnation = incarnations[-1]
            if incarnation.lineage is not None:
                aborted = _checked(world, broker, key, incarnation).aborted
                hides = isolation is Isolation.COMMITTED
                view = _View(key, incarnation, aborted if hides else None)
                world.count("hidden", view.check(reader.queue(MessageQueue(*key))))


def _checked(
    world: World, broker: KafkaBroker, key: QueueKey, incarnation: ModelIncarnation
) -> Said:
    """What a walk finds, with what the node says where the tier has not all; it has to be what was said."""
    assert incarnation.lineage is not None
    said = incarnation.lineage.expired(
        incarnation.min
    )  # what came since may tell of more that is over
    found: list[Said] = []
    courses = world.history.courses[*key, incarnation.number]
    for branch in reversed(broker.branches[key]):
        if _is_of(broker, branch, incarnation):
            true = _as_said(walk(sorted(courses[-1].items()), _Opening(branch)), said)
            true = true.expired(incarnation.min)
            opened = true.opened if said.is_sure else said.opened
            if (true.epochs, opened, true.aborted) == (said.epochs, said.opened, said.aborted):
                world.count("lineage checked")
                world.count("open at the end", len(said.opened))
                world.count("aborted at the end", len(said.aborted))
                return true
            found.append(true)
    require(not found, f"lineage of {key} {incarnation.number} is {said}; a walk finds {found[:1]}")
    world.count("lineage of no branch")
    return said


@dataclass
class _Opening:
    """What is open at an offset of a course of events."""

    branch: Branch

    def __call__(self, offset: int) -> dict[int, int]:
        return open_at(self.branch, offset)


def _as_said(true: Walk, said: Said) -> Said:
    opened = tuple(sorted(true.opened.items()))
    return Said(said.topic_id, tuple(true.epochs), opened, tuple(true.aborted), said.is_sure)


def _is_of(broker: KafkaBroker, branch: Branch, incarnation: ModelIncarnation) -> bool:
    """Whether all that an incarnation has is, or was, of a course of events."""
    return branch.end >= incarnation.commit and all(
        broker.is_same(raw, branch.at(offset)) or not is_batch(branch.at(offset) or b"")
        for row in incarnation.rows
        for offset, raw in enumerate(row.records, row.start)
        if is_batch(raw)
    )


@dataclass
class _View:
    """What a consumer of the node would see.

    Attributes:
        key: Of which queue.
        incarnation: Which.
        aborted: What was aborted in it; None: that is seen, too, and what is open.
    """

    key: QueueKey
    incarnation: ModelIncarnation
    aborted: Sequence[Aborted] | None

    @property
    def end(self) -> int:
        """The last stable offset, where that counts."""
        now = self.incarnation
        if self.aborted is None or now.lineage is None:
            return now.commit
        return max(now.min, min([now.commit, *(first for _, first in now.lineage.opened)]))

    def check(self, reader: QueueReader) -> int:
        """Hold what a reader gets against it, offset by offset; how many offsets are hidden."""
        low, end, seen = self.incarnation.min, self.end, dict[int, bytes]()
        what = f"{self.key} {self.incarnation.number}{' committed' * (self.aborted is not None)}"
        for found in reader.batches(QueueOffset(low)):
            if isinstance(found, Gap):
                gap = range(max(found.start, low), min(found.end, end))
                seen |= dict.fromkeys(gap, GAP)
            else:
                seen |= dict(enumerate(raws_of(found.records), found.records.base_offset))
        ends = min(seen, default=low), max(seen, default=low - 1) + 1, len(seen)
        require(ends == (low, end, end - low), f"{what} shows {ends}, not [{low}, {end})")
        for offset, raw in seen.items():
            is_hidden, mine = self.hides(offset), self.incarnation.record(offset) or GAP
            mine = HIDDEN if is_hidden else mine
            require(raw == mine, f"{what} shows {raw[:70]!r} at {offset}, not {mine[:70]!r}")
        return sum(map(self.hides, seen))

    def hides(self, offset: int) -> bool:
        """Whether what is at an offset is nothing for readers."""
        raw = self.incarnation.record(offset) or GAP
        if not is_batch(raw):
            return False
        head = head_of(raw)
        is_data = bool(head.attributes & TRANSACTIONAL)
        return head.is_control or any(
            is_data and who == head.producer_id and first <= offset < last
            for who, first, last in self.aborted or ()
        )


def _leader(said: Said, offset: int) -> int | None:
    return next((number for number, start in reversed(said.epochs) if start <= offset), None)


def check_rebuilt(
    world: World, key: QueueKey, facts: LineageFacts | None, incarnation: ModelIncarnation
) -> None:
    """A rebuilt journal says of the records that are left what the lost one said, but for the topic's id.

    Of a transaction some of whose records never came, or are gone, only the local store can tell when it began.
    """
    lost, found, low = incarnation.lineage, said_of(facts), incarnation.min
    if lost is None:
        return
    what = f"{key} {incarnation.number}: a rebuilt journal says {found}, the lost one {lost}"
    require(found is not None, what)
    assert found is not None
    found = found.moved(incarnation.commit)  # it may have found what was never named
    views = [_View(key, incarnation, one.aborted) for one in (lost, found)]
    for offset in range(low, incarnation.commit):
        leaders = [_leader(one, offset) for one in (lost, found)]
        is_there = is_batch(incarnation.record(offset) or GAP)
        require(not is_there or leaders[0] == leaders[1], f"leader at {offset} of {what}")
        was, now = (view.hides(offset) for view in views)
        require(was == now or (now and bool(incarnation.gaps)), f"{offset} of {what}")
    opened = [{pair for pair in one.opened if pair[1] >= low} for one in (lost, found)]
    is_whole = lost.is_sure and not incarnation.gaps
    require(not is_whole or opened[0] <= opened[1], f"what is open of {what}")
    world.count("lineage rebuilt")
