"""Reads the tier as a stranger would, and holds it against history and the model of the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.history import require
from simulation.reclaimer import reclaim_all

from tiered.errors import TieredStoreError
from tiered.log.reader import QueueReader, TierReader
from tiered.log.state import Gap, part_json
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from simulation.broker import QueueKey
    from simulation.lives import Life
    from simulation.world import World

    from tiered.log.parts import QueueLife, TierState
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
        if world.is_thorough:
            _check_lives(world, reader, queue)
        _check_level(world, queue)
    local = world.broker if world.is_thorough else None
    report = verify_tier(world.memory, world.place.prefix, deep=world.is_thorough, local=local)
    real = [problem for problem in report.problems if not _is_known(world, problem)]
    require(not real, f"verify finds {real}")
    if world.is_thorough and "spoiled" not in world.met and not world.history.strays:
        reclaim_all(world)
        check_now(world)
    refused = report.recorded.refused_parts
    require(refused == world.history.refused, f"replay has refused {refused} parts")


def _is_known(world: World, problem: Problem) -> bool:
    """A checkpoint that we have spoiled."""
    is_checkpoint = problem.kind == "journal" and problem.where.endswith(".checkpoint")
    return is_checkpoint and "spoiled" in world.met


def _check_state(world: World, state: TierState, number: int) -> None:
    history = world.history
    require(number == history.number, f"I5: a stranger is at {number}, history at {history.number}")
    require(state.generation == history.generation, "I6: another reign")
    require(len(state.queues) == len(history.queues), "I5: other queues than history's")
    objects, prefix = world.memory._objects, world.place.prefix
    for key, known in history.queues.items():
        lives = state.queues.get(MessageQueue(*key), ())
        require(len(lives) == len(known), f"I5: {key} has {len(lives)} lives, not {len(known)}")
        for life, mine in zip(lives, known, strict=True):
            _check_life(f"{key} life {life.incarnation}", life, mine)
    for name in history.named():
        require(prefix + name in objects, f"I2: {name} is named and not there")


def _check_life(what: str, life: QueueLife, known: Life) -> None:
    found = [part_json(part)[:15] for part in life.parts()]
    require(found == [row.values[:15] for row in known.rows], f"I5: {what} has other parts")
    ends = (life.incarnation, life.min_offset, life.commit_offset, life.log_end, bool(life.ended))
    mine = (known.incarnation, known.min, known.commit, known.log_end, known.ended)
    require(ends == mine, f"I1: {what} has {ends}, not {mine}")
    gaps = [(gap.start, gap.end) for gap in life.gaps]
    require(gaps == known.gaps, f"I12: {what} has other gaps than history")


def _check_lives(world: World, reader: TierReader, key: QueueKey) -> None:
    """Every life is readable, every offset of it once, in order, as what was taken or in a gap (I1, I3, I12)."""
    queue = MessageQueue(*key)
    for life, known in zip(reader.state.queues[queue], world.history.queues[key], strict=True):
        at, what = known.min, f"{key} life {known.incarnation}"
        wanted = iter([raw for row in known.rows for raw in row.records])
        for found in QueueReader(reader.store, reader.prefix, queue, life).batches(QueueOffset(0)):
            if isinstance(found, Gap):
                require(found.start == at, f"I1: {what} has a gap at {found.start}, not at {at}")
                at = found.end
                continue
            records = found.records
            require(records.base_offset == at, f"I1: {what} goes on at {records.base_offset}")
            for low, size in zip(records.positions.tolist(), records.sizes.tolist(), strict=True):
                raw = bytes(records.data[low : low + size])
                require(raw == next(wanted), f"I3: {what} differs at {at}")
                at += 1
        require(at == known.commit, f"I1: {what} ends at {at}, not {known.commit}")
    last = {life.incarnation: life for life in reader.state.queues[queue]}
    for number, life in last.items():
        require(reader.queue(queue, number).life is life, f"{key} has lost incarnation {number}")


def _check_level(world: World, key: QueueKey) -> None:
    """The present life is what the broker has now: nothing missing, nothing that it took back.

    It may be ahead of a broker that has nothing else, and of one that is empty: a copy that lags looks the same.
    """
    now, life = world.broker.present(key), world.history.present(key)
    assert life is not None
    if now is None or now.min == now.end:
        ends = life.commit + world.broker.gone_unseen(key, life)
        require(not now or ends >= now.end, f"I12: {key} ends at {ends}, and no gap is told")
        return  # deleted, or empty: what was tiered stays
    require(life.start <= now.min or life.start < life.min, f"I1: {key} has lost its beginning")
    for offset in range(max(now.min, life.min), min(now.end, life.commit)):
        if any(low <= offset < high for low, high in life.gaps):
            continue  # nothing to compare there, so that a queue made anew looks like a lagging copy: not told yet
        require(life.record(offset) == now.at(offset), f"I3: {key} is not level at {offset}")
    require(life.commit >= now.end, f"I1: {key} ends at {life.commit}, the broker's at {now.end}")
