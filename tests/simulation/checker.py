"""Reads the tier as a stranger would, and holds it against history and the model of the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.history import require
from simulation.reclaimer import reclaim_all

from tiered.errors import TieredStoreError
from tiered.log.reader import TierReader
from tiered.log.state import Gap
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from simulation.world import World

    from tiered.log.parts import TierState
    from tiered.log.verify_report import Problem


def check_now(world: World) -> None:
    """The state that a fresh reader finds is history's (I5, I6), and what it names is there."""
    reader = TierReader(world.memory, world.place.prefix)
    try:
        reader.refresh()
    except TieredStoreError as error:
        require(False, f"I5: a stranger cannot read the journal: {error}")
    _check_state(world, reader.state, reader.journal_number)


def check_end(world: World) -> None:
    """All that there is, byte for byte; then, once more, after everything late has landed."""
    for _ in range(2):
        check_now(world)
        world._land(None)
    if world.scheduler.failure is not None:
        raise world.scheduler.failure
    reader = TierReader(world.memory, world.place.prefix)
    reader.refresh()
    for queue in world.history.queues:
        _check_queue(world, reader, queue)
    report = verify_tier(world.memory, world.place.prefix, deep=True, local=world.broker)
    real = [problem for problem in report.problems if not _is_known(world, problem)]
    require(not real, f"verify finds {real}")
    if "spoiled" not in world.met and not world.history.strays:
        reclaim_all(world)
        check_now(world)
    refused = report.recorded.refused_parts
    require(refused == world.history.refused, f"replay has refused {refused} parts")


def _is_known(world: World, problem: Problem) -> bool:
    """A checkpoint that we have spoiled, or an entry under a number that was used and deleted long ago."""
    if problem.kind != "journal":
        return False
    if problem.where.endswith(".checkpoint") and "spoiled" in world.met:
        return True
    number = int(problem.where.rpartition("/")[2].partition(".")[0])
    return not world.history.strays.isdisjoint({number, number - 1})


def _check_state(world: World, state: TierState, number: int) -> None:
    history = world.history
    require(number == history.number, f"I5: a stranger is at {number}, history at {history.number}")
    require(state.generation == history.generation, "I6: another reign")
    require(len(state.queues) == len(history.queues), "I5: other queues than history's")
    for key, known in history.queues.items():
        life = state.life(MessageQueue(*key))
        require(life is not None, f"I5: {key} is not there")
        assert life is not None
        found = [(p.queue_offset, p.count, p.log.key, p.index.key) for p in life.parts()]
        require(found == known.parts, f"I5: {key} has other parts than history")
        ends = (life.min_offset, life.commit_offset, life.log_end)
        require(ends == (known.min, known.commit, known.log_end), f"I1: {key} has {ends}")
        gaps = [(gap.start, gap.end) for gap in life.gaps]
        require(gaps == known.gaps, f"I12: {key} has other gaps than history")
    for queue, lives in state.queues.items():
        for life in lives:
            for part in life.parts():
                for place in (part.log, part.index):
                    there = world.place.prefix + place.key in world.memory._objects
                    require(there, f"I2: {queue}: {place.key} is named and not there")


def _check_queue(world: World, reader: TierReader, key: tuple[str, int]) -> None:
    """Every offset once, in order, as a message that is the broker's or in a gap (I1, I3, I12); nothing is missing."""
    broker, life = world.broker, world.history.queues[key]
    at = life.min
    for found in reader.queue(MessageQueue(*key)).batches(QueueOffset(0)):
        if isinstance(found, Gap):
            require(found.start == at, f"I1: {key} has a gap at {found.start}, not at {at}")
            at = found.end
            continue
        records = found.records
        require(records.base_offset == at, f"I1: {key} goes on at {records.base_offset}, not {at}")
        for low, size in zip(records.positions.tolist(), records.sizes.tolist(), strict=True):
            raw = bytes(records.data[low : low + size])
            require(raw == broker.record(key, at), f"I3: {key} differs at {at}")
            at += 1
    at += broker.gone_unseen(key, life)
    require(at == broker.end(key), f"I1: {key} ends at {at}, the broker's at {broker.end(key)}")
