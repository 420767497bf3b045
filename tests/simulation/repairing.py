"""At the end of some worlds a bit of a named section is wrong, and a person has it repaired from the tier and the broker.

The real ``verify --deep`` has to find it, and the real repair has to bring back what the broker still has; its bundle and
its entry are held against history as everybody's are.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from simulation.history import require
from simulation.scheduler import START_MS

from backends.testing.faulty import FaultyStore
from tiered.clock import ManualClock
from tiered.keys import LEASE
from tiered.log.verify import verify_tier
from tiered.upkeep.repair import Repairer

if TYPE_CHECKING:
    import random

    from simulation.broker import QueueKey
    from simulation.lives import Life, Row
    from simulation.world import World

_AN_HOUR_S = 3600.0


def repair_one(world: World, rng: random.Random) -> None:
    """Damage a part, and have it repaired."""
    prefix, objects = world.place.prefix, world.memory._objects
    parts = [
        (queue, life, row)
        for queue, lives in sorted(world.history.queues.items())
        for life in lives
        for row in life.rows
    ]
    if not parts or world.history.strays:
        return
    queue, life, row = rng.choice(parts)
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
    repairer = Repairer(
        store, store, prefix, world.broker,
        clock=clock, rng=rng, stop=threading.Event(),
    )  # fmt: skip
    report = repairer.run(damaged)
    if world.scheduler.failure is not None:
        raise world.scheduler.failure
    world.count("repaired", report.parts)
    left = [one for one in report.unrepaired if queue[0] in one.where]
    what = f"{queue} [{row.start}, {row.end}) stays damaged, which the broker has: {left}"
    require(not _is_there(world, queue, life, row) or row not in life.rows, what)


def _is_there(world: World, queue: QueueKey, life: Life, row: Row) -> bool:
    """Whether the broker's present queue has this part, all of it."""
    now = world.broker.present(queue)
    is_present = now is not None and now.min <= row.start and not life.ended
    return bool(is_present and now and now.has(row.start, row.records))
