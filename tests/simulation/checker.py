"""Reads the tier as a stranger would, and holds it against history and the model of the broker."""

from __future__ import annotations

import random
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from simulation.contents import (
    COMPACTED,
    is_hole,
    is_tombstone,
    key_of,
    keys_of,
)
from simulation.history import ViolationError, raws_of, require
from simulation.kafka_broker import KafkaBroker
from simulation.kafka_checks import check_lineage, require_said
from simulation.reclaimer import TTL_S, reclaim_all
from simulation.repairing import rebuild_all, repair_one
from simulation.scheduler import START_MS

from backends.errors import BackendError
from tiered.errors import TieredStoreError
from tiered.index.lookup import IndexReader, Wish
from tiered.log.expiry import plan_expiry
from tiered.log.reader import QueueReader, TierReader
from tiered.log.state import Gap
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from simulation.broker import Branch, QueueKey
    from simulation.incarnations import ModelIncarnation, Segment
    from simulation.world import World

    from tiered.log import parts as product
    from tiered.log.parts import Incarnation, TierState
    from tiered.log.verify_objects import Problem

_KEYS_ASKED = 12
"""So many keys are looked up at the end, of all that there are."""


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
    reader = TierReader(world.memory, world.place.prefix, isolation=None)
    reader.refresh()
    for queue, had in world.broker.branches.items():
        now = world.broker.present(queue)
        is_met = queue in world.history.queues or not (now and now.end)
        require(is_met, f"I12: nothing is told of {queue}, which has had {len(had[-1].records)}")
    for queue, incarnations in world.history.queues.items():
        for incarnation in incarnations:
            _check_newest(world, queue, incarnation)
        if world.is_thorough:
            _check_incarnations(world, reader, queue)
        check_level(world, queue)
    if isinstance(world.broker, KafkaBroker):
        check_lineage(world, world.broker)
    _check_expiry(world, reader.state)
    require(reader.state.paused_topics == world.history.paused, "who is paused")
    local = world.broker if world.is_thorough else None
    if world.persons:
        _check_keys(world, reader.state)
    report = verify_tier(world.memory, world.place.prefix, deep=world.is_thorough, local=local)
    real = [problem for problem in report.problems if not _is_known(world, problem)]
    require(not real, f"verify finds {real}")
    if world.is_thorough and "spoiled" not in world.met and not world.history.strays:
        reclaim_all(world)
        check_now(world)
    if world.is_repaired:
        repair_one(world, random.Random(world.scheduler.steps))
        check_now(world)
    refused = report.recorded.refused_parts
    require(refused == world.history.refused, f"replay has refused {refused} parts")
    is_sound = "spoiled" not in world.met and not world.history.strays
    if world.is_thorough and is_sound and not world.is_repaired:
        try:
            rebuild_all(world)
        except (TieredStoreError, BackendError) as error:
            raise ViolationError(f"a lost journal can not be rebuilt: {error}") from error


def _check_expiry(world: World, state: TierState) -> None:
    """What would expire now, and soon, is what is too old by the newest message of each segment, no more and no less."""
    ttl_ms, now_ms = round(TTL_S * 1000), round(START_MS + world.scheduler.now_s * 1000)
    for later_ms in (1000, ttl_ms // 2, ttl_ms):
        at_ms = now_ms + later_ms
        steps, _ = plan_expiry(state, at_ms, lambda _topic: ttl_ms, objects_max=10**6)
        planned = {
            ((one.queue.topic, one.queue.queue_id), one.position): one.min_to for one in steps
        }
        for queue, incarnations in world.history.queues.items():
            for number, incarnation in enumerate(incarnations):
                going = [
                    *takewhile(
                        partial(_is_too_old, incarnation, at_ms - ttl_ms), incarnation.segments
                    )
                ]
                if any(
                    one.newest_ms != one.said_ms and not one.times for one in incarnation.segments
                ):
                    continue  # of what was compacted away only the writer knows how old it was
                world.count("ruled by an earlier part", sum(map(_falls, incarnation.segments)))
                kept = incarnation.segments[len(going) :]
                low = kept[0].queue_base if kept else incarnation.commit
                end = max(low, incarnation.min) if going else incarnation.min
                told = planned.get((queue, number), incarnation.min)
                require(
                    told == end, f"I11: {queue} would expire up to {told}, and is old up to {end}"
                )


def _is_too_old(incarnation: Incarnation, before_ms: int, segment: Segment) -> bool:
    return (segment.sealed or incarnation.ended) and segment.said_ms < before_ms


def _falls(segment: Segment) -> bool:
    """Whether an earlier part has the newest message, by more than a time to live."""
    return (
        max(row.claims.high for row in segment.rows) - segment.rows[-1].claims.high > TTL_S * 1000
    )


def _check_keys(world: World, state: TierState) -> None:
    """A lookup finds each message of a present incarnation that has a key and no other, indexed or not."""
    wanted: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for (topic, queue_id), incarnations in world.history.queues.items():
        for row in incarnations[-1].rows:
            for offset, raw in enumerate(row.records, row.start):
                for key in () if is_hole(raw) else keys_of(raw):
                    wanted.setdefault((topic, key), set()).add((queue_id, offset))
    index = IndexReader(world.memory, world.place.prefix)
    for topic, key in random.Random(1).sample(sorted(wanted), min(_KEYS_ASKED, len(wanted))):
        found = index.lookup(state, Wish(topic=topic, key=key, count=10_000))
        hits = [(hit.queue.queue_id, hit.queue_offset) for hit in found.hits]
        true = wanted[topic, key]
        require(
            sorted(hits) == sorted(true), f"a lookup of {key} in {topic} finds {hits}, not {true}"
        )
        require(found.is_complete, f"a lookup of {key} in {topic} is not complete")
        world.count("key found", len(hits))
    world.count("index object read", len(state.indexes))


def _is_known(world: World, problem: Problem) -> bool:
    """A checkpoint that we have spoiled; and where one side has a hole, which nobody can compare (``check_level``)."""
    is_checkpoint = problem.kind in {"journal", "meta"} and problem.where.endswith(".checkpoint")
    is_hole = problem.kind == "difference" and "a hole in the" in problem.detail
    return (is_checkpoint and "spoiled" in world.met) or (is_hole and world.broker.rot > 0)


def _check_state(world: World, state: TierState, number: int) -> None:
    history = world.history
    require(number == history.number, f"I5: a stranger is at {number}, history at {history.number}")
    epoch = (state.epoch, state.writer, state.refused_parts, state.updated_ms)
    known = (history.epoch, history.writer, history.refused, history.updated_ms)
    require(epoch == known, f"I6: another epoch: {epoch}, not {known}")
    require(len(state.queues) == len(history.queues), "I5: other queues than history's")
    objects, prefix = world.memory._objects, world.place.prefix
    for key, some in history.queues.items():
        incarnations = state.queues.get(MessageQueue(*key), ())
        require(
            len(incarnations) == len(some),
            f"I5: {key} has {len(incarnations)} incarnations, not {len(some)}",
        )
        for incarnation, mine in zip(incarnations, some, strict=True):
            _check_incarnation(f"{key} incarnation {incarnation.number}", incarnation, mine)
    for name in history.named():
        require(prefix + name in objects, f"I2: {name} is named and not there")


def _check_incarnation(what: str, incarnation: Incarnation, known: ModelIncarnation) -> None:
    found = [_segment(segment) for segment in incarnation.segments]
    wanted = [(*_names(one), [row.values for row in one.rows]) for one in known.segments]
    require(found == wanted, f"I5: {what} has other parts: {found}, not {wanted}")
    ends = (
        incarnation.number,
        incarnation.min_offset,
        incarnation.commit_offset,
        incarnation.log_end,
        bool(incarnation.ended),
    )
    mine = (known.number, known.min, known.commit, known.log_end, known.ended)
    require(ends == mine, f"I1: {what} has {ends}, not {mine}")
    gaps = [(gap.start, gap.end) for gap in incarnation.gaps]
    require(gaps == known.gaps, f"I12: {what} has other gaps than history")
    require(incarnation.quarantined == known.quarantined, f"I9: {what} has other records put aside")
    passes = [(one.end, one.time_ms) for one in incarnation.passes]
    require(passes == known.passes, f"I5: {what} has passes {passes}, not {known.passes}")
    cut = (incarnation.cut_at, incarnation.cut_by)
    require(cut == known.cut, f"I12: {what} was truncated at {cut}, not {known.cut}")
    require_said(what, incarnation.lineage, known.lineage)


def _segment(one: product.Segment) -> tuple[Any, ...]:
    rows = [
        (*row.tolist(), bundle.key, bundle.size_bytes, bundle.level)
        for row, bundle in zip(one.parts.rows, one.parts.bundles, strict=True)
    ]
    return one.base_offset, one.base_queue_offset, one.created_ms, one.sealed, rows


def _names(one: Segment) -> tuple[Any, ...]:
    return one.base, one.queue_base, one.created_ms, one.sealed


def _check_incarnations(world: World, reader: TierReader, key: QueueKey) -> None:
    """Every incarnation is readable, every offset of it once, in order, as what was taken or in a gap (I1, I3, I12)."""
    queue = MessageQueue(*key)
    for incarnation, known in zip(
        reader.state.queues[queue], world.history.queues[key], strict=True
    ):
        at, what = known.min, f"{key} incarnation {known.number}"
        wanted = iter([raw for row in known.rows for raw in row.records])
        for found in QueueReader.of_incarnation(
            reader.store, reader.prefix, queue, incarnation
        ).batches(QueueOffset(0)):
            if isinstance(found, Gap):
                require(found.start == at, f"I1: {what} has a gap at {found.start}, not at {at}")
                at = found.end
                continue
            records = found.records
            require(records.base_offset == at, f"I1: {what} goes on at {records.base_offset}")
            for raw in raws_of(records):
                require(raw == next(wanted), f"I3: {what} differs at {at}")
                at += 1
        require(at == known.commit, f"I1: {what} ends at {at}, not {known.commit}")
    last = {incarnation.number: incarnation for incarnation in reader.state.queues[queue]}
    for number, incarnation in last.items():
        require(
            reader.queue(queue, number).incarnation is incarnation,
            f"{key} has lost incarnation {number}",
        )


def check_level(world: World, key: QueueKey) -> None:
    """The present incarnation is what the broker has now: nothing missing, nothing that it truncated.

    It may be ahead of a broker that has nothing else, and of one that is empty: a copy that lags looks the same.
    """
    now, incarnation = world.broker.present(key), world.history.present(key)
    assert incarnation is not None
    has_begun = incarnation.start == 0
    if not incarnation.number and not has_begun:
        has_begun = incarnation.start <= world.history.met_first.get(key, -1)
    has_begun |= incarnation.start in world.history.asked.get(key, ())
    require(
        has_begun,
        f"I12: {key} begins at {incarnation.start}, and nothing is told of what was before",
    )
    if now is None or now.min == now.end:
        ends = incarnation.commit + world.broker.gone_unseen(key, incarnation)
        require(not now or ends >= now.end, f"I12: {key} ends at {ends}, and no gap is told")
        return  # deleted, or empty: what was tiered stays
    shared = range(max(now.min, incarnation.min), min(now.end, incarnation.commit))
    told = [offset for offset in shared if _is_told(incarnation.record(offset), now.at(offset))]
    for offset in shared:
        is_there = incarnation.record(offset) or any(
            low <= offset < high for low, high in incarnation.gaps
        )
        require(bool(is_there), f"I1: {key} has nothing at {offset}")
    for offset in told:
        mine, theirs = incarnation.record(offset), now.at(offset)
        require(world.broker.is_same(mine, theirs), f"I3: {key} is not level at {offset}")
    if shared and not told and now.end < incarnation.commit:
        return  # nothing to compare, so that a queue made anew looks like a lagging copy: not told until it grows
    if (
        not shared or shared[0] in told
    ):  # else it may begin with another incarnation's, which nobody can tell
        has_begun = incarnation.start <= now.min or incarnation.start < incarnation.min
        has_begun |= incarnation.start in world.history.asked.get(key, ())
        require(has_begun, f"I1: {key} has lost its beginning")
    _check_end(world, key, incarnation, now)
    require(
        incarnation.commit >= now.end,
        f"I1: {key} ends at {incarnation.commit}, the broker's at {now.end}",
    )


def _check_newest(world: World, key: QueueKey, incarnation: ModelIncarnation) -> None:
    """K5: who reads from the start gets the newest of each key, of all that was ever committed.

    Where a newer one was truncated afterwards nobody has the older any more: docs/compaction.md.
    """
    courses = world.history.courses.get((*key, incarnation.number), [])
    if len(courses) > 1:
        return
    newest: dict[bytes, int] = {}
    for offset, raw in sorted(courses[0].items() if courses else ()):
        if not is_hole(raw) and key_of(raw):
            newest[key_of(raw)] = offset
    for offset in newest.values():
        is_gone = incarnation.record(offset) == COMPACTED and not is_tombstone(courses[0][offset])
        require(not is_gone, f"K5: {key} has lost the newest of a key, at {offset}")


def _is_told(mine: bytes | None, theirs: bytes | None) -> bool:
    """Whether both sides have a message: a gap and a hole cannot be compared."""
    return not (mine is None or theirs is None or is_hole(mine) or is_hole(theirs))


def _check_end(world: World, key: QueueKey, incarnation: ModelIncarnation, now: Branch) -> None:
    """No hole at the tier's end hides a message that the broker has."""
    for offset in range(incarnation.commit - 1, max(incarnation.min, now.min) - 1, -1):
        mine, theirs = incarnation.record(offset), now.at(offset)
        is_met = mine is not None and not is_hole(mine) and world.broker.is_same(mine, theirs)
        if now.end < incarnation.commit or mine is None or is_met:
            return
        if mine == COMPACTED:
            continue
        hides = is_hole(mine) and theirs is not None and not is_hole(theirs)
        require(not hides, f"I1: a hole of {key} at {offset} hides a message")
