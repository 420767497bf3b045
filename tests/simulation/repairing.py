"""How some worlds end: a bit of a section is wrong, and a person repairs it; or the journal is lost, and rebuilt.

The real ``verify --deep`` has to find it, and the real repair has to bring back what the broker still has; its bundle and
its entry are held against history as everybody's are.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING

from simulation.contents import is_hole
from simulation.history import require
from simulation.kafka_broker import KafkaBroker
from simulation.kafka_checks import check_rebuilt
from simulation.scheduler import START_MS

from backends.testing.faulty import FaultyStore
from tiered.clock import ManualClock
from tiered.keys import JOURNAL, LEASE, MIRROR
from tiered.log.reader import TierReader
from tiered.log.state import Gap
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue, QueueOffset
from tiered.upkeep.rebuild import apply_rebuild, plan_rebuild
from tiered.upkeep.repair import Repairer
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from simulation.broker import QueueKey
    from simulation.incarnations import ModelIncarnation, Row
    from simulation.world import World

    from tiered.log.reader import QueueReader

_AN_HOUR_S = 3600.0


def repair_one(world: World, rng: random.Random) -> None:
    """Damage a part, and have it repaired."""
    prefix, objects = world.place.prefix, world.memory._objects
    parts = [
        (queue, incarnation, row)
        for queue, incarnations in sorted(world.history.queues.items())
        for incarnation in incarnations
        for row in incarnation.rows
    ]
    if not parts or world.history.strays:
        return
    queue, incarnation, row = rng.choice(parts)
    key, section = prefix + row.key, row.section
    whole, data = objects[key], bytearray(objects[key].data)
    stored = section.stored_bytes + 20 * section.count if not section.gone else section.stored_bytes
    if not stored:
        return
    data[section.start + rng.randrange(stored)] ^= 1 << rng.randrange(8)
    objects[key] = whole._replace(data=bytes(data))
    damaged = verify_tier(world.memory, prefix, deep=True).damaged
    require(key in damaged, f"I4: a wrong bit of {row.key} is not found")
    world.memory.delete(prefix + LEASE)
    clock = ManualClock(round(START_MS + (world.scheduler.now_s + _AN_HOUR_S) * 1000))
    store = FaultyStore(world.ledger, rng)  # (without faults: the ledger wants whole bodies)
    at = Workplace(store, store, world.place, clock, rng)
    repairer = Repairer(at, world.broker, stop=threading.Event())
    report = repairer.run(damaged)
    if world.scheduler.failure is not None:
        raise world.scheduler.failure
    world.count("repaired", report.parts)
    left = [one for one in report.unrepaired if queue[0] in one.where]
    what = f"{queue} [{row.start}, {row.end}) stays damaged, which the broker has: {left}"
    require(not _is_there(world, queue, incarnation, row) or row not in incarnation.rows, what)


def _is_there(world: World, queue: QueueKey, incarnation: ModelIncarnation, row: Row) -> bool:
    """Whether the broker's present queue has this part, all of it, and its mark proves that: a hole at its end has none."""
    now = world.broker.present(queue)
    is_present = now is not None and now.min <= row.start and not incarnation.ended
    is_proven = bool(row.claims.mark) and not is_hole(row.records[-1])
    return bool(is_present and is_proven and now and now.has(row.start, row.records))


def rebuild_all(world: World) -> None:
    """The journal is lost, behind a last gc, and rebuilt; then with all copies of its checkpoints."""
    prefix, store = world.place.prefix, FaultyStore(world.memory, random.Random(1))
    for seed, lost in enumerate(([JOURNAL], [JOURNAL, MIRROR + JOURNAL]), world.scheduler.steps):
        for info in [info for folder in lost for info in store.list(prefix + folder)]:
            store.delete(info.key)
        world.memory.delete(prefix + LEASE)
        _rebuild(world, store, random.Random(seed))


def _rebuild(world: World, store: FaultyStore, rng: random.Random) -> None:
    """Rebuild a lost journal: a queue's present incarnation has all its messages."""
    prefix = world.place.prefix
    with ThreadPoolExecutor(1) as pool:
        plan = plan_rebuild(store, prefix, pool)
    clock = ManualClock(round(START_MS + world.scheduler.now_s * 1000))
    at = Workplace(store, store, world.place, clock, rng)
    apply_rebuild(at, plan, accept_gaps=True)
    world.count("rebuilt")
    reader = TierReader(store, prefix, isolation=None)
    reader.refresh()
    for queue, incarnations in sorted(world.history.queues.items()):
        if incarnations[-1].rows:
            found = reader.incarnations(MessageQueue(*queue))[-1]
            _has_all(queue, found, incarnations[-1])
            if isinstance(world.broker, KafkaBroker):
                check_rebuilt(world, queue, found.incarnation.lineage, incarnations[-1])


def _has_all(queue: QueueKey, reader: QueueReader, incarnation: ModelIncarnation) -> None:
    """Whether a rebuilt incarnation has every message of the one that was."""
    there: dict[int, bytes] = {}
    for found in reader.batches(QueueOffset(incarnation.min)):
        if not isinstance(found, Gap):
            records, data = found.records, memoryview(found.records.data)
            for at, size, number in zip(records.positions, records.sizes, count(), strict=False):
                there[records.base_offset + number] = bytes(data[at : at + size])
    for row in incarnation.rows:
        for offset, raw in enumerate(row.records, row.start):
            what = f"{queue} {offset} is not, in the rebuilt journal, what it was"
            require(is_hole(raw) or there.get(offset) == raw, what)
