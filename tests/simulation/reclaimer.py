"""One ``gc``, ``expire`` or ``compact`` in the simulation: the real plans, carried out at once, later, or by another."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

from simulation.history import TOMBSTONES_MS, ViolationError, require
from simulation.process import SimStore
from simulation.scheduler import START_MS, Owner, SimClock

from backends.errors import BackendError
from backends.testing.faulty import SimulatedCrash
from backends.wrapping import MeteredStore
from tiered.api.stores import with_retries
from tiered.clock import ManualClock
from tiered.compaction.passes import PassSettings, RetentionPolicy
from tiered.dispatch.settings import Compression
from tiered.errors import (
    ClosedError,
    DataError,
    FencedError,
    InvalidError,
    StoreUnavailableError,
)
from tiered.log.reader import TierReader
from tiered.upkeep.compact import Compactor, CompactPlan, CompactSettings
from tiered.upkeep.expire import apply_steps, plan_delete_topic, plan_expire
from tiered.upkeep.gc import apply_gc, plan_gc
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Collection

    from simulation.world import World

    from tiered.model import MessageQueue

GRACE_S = 5.0
TTL_S = 8.0


class Reclaimer(Owner):
    """A process that makes a plan, waits perhaps, and carries it out; or carries out an old one.

    Attributes:
        ended: It has.
        has_rivals: Another was at work meanwhile, so that something may have been strange.
    """

    def __init__(self, world: World, number: int, what: str = "") -> None:
        """``what``: ``expire``, ``delete-topic``, ``gc`` or ``compact``; else it chooses between expiry and gc."""
        super().__init__(f"r{number}")
        self._what = what
        self.world = world
        self.ended = False
        self.has_rivals = False
        self._rng = random.Random(world.rng.getrandbits(64))
        clock = SimClock(world.scheduler, world.rng.choice(world.skews_ms))
        meter = MeteredStore(SimStore(self))
        stop: Any = world.never
        store = with_retries(meter, clock, self._rng, stop)
        self._at = Workplace(store, meter, world.place, clock, self._rng)
        self._settings = CompactSettings(
            RetentionPolicy("careful", keeps_keyless=True, tombstone_retention_ms=TOMBSTONES_MS),
            PassSettings(dirty_ratio=0.0),
            memory_bytes=1 << 12,
            compression=Compression() if world.packs else None,
        )

    def live(self) -> None:
        """Body of its thread."""
        try:
            self._live()
        except (SimulatedCrash, InvalidError, FencedError, ClosedError):
            pass
        except (StoreUnavailableError, BackendError):
            pass
        except DataError as error:
            world = self.world
            gone = re.search(r"(\S+) is named by the journal and is gone", str(error))
            if gone and gone[1] in world.memory._objects and not world.history.strays:
                self._broken(f"calls gone what is there: {gone[1]}", error)
            if not (world.history.strays or self.has_rivals or world.flips or world.faulty.stale):
                self._broken(f"refuses to go on: {error}", error)
        except BaseException as error:  # noqa: BLE001 (a defect)
            self._broken(f"died of {error!r}", error)
        finally:
            self.ended = True

    def _broken(self, what: str, cause: BaseException) -> None:
        violation = ViolationError(f"{self.name} {what}")
        violation.__cause__ = cause
        self.world.scheduler.fail(violation)

    def _live(self) -> None:
        at, rng, plans = self._at, self._rng, self.world.plans
        if plans and rng.random() < 0.3 and not self._what:
            plan = rng.choice(plans)
        else:
            plan = self._plan()
            plans.append(plan)
            if rng.random() < 0.3:
                self.world.scheduler.park(rng.random() * 10)
        if isinstance(plan, CompactPlan):
            if plan.steps:
                Compactor(at, self._settings).apply(plan)
        elif plan.what == "gc":
            done = apply_gc(at, plan)
            self.world.count("deleted", int(done["deleted"]))
        else:
            done = apply_steps(at, plan)
            self.world.count("expired", int(done["steps"]))
            self.world.count("topic removed", plan.what == "delete-topic")

    def _plan(self) -> Any:
        at = self._at
        if self._what == "compact":
            topics = {queue.topic for queue in self._tiered()}
            return Compactor(at, self._settings).plan(sorted(topics))
        if self._what == "delete-topic":
            topic = self._rng.choice(sorted({topic for topic, _ in self.world.broker.branches}))
            self.world.removed.add(topic)
            return plan_delete_topic(at, topic, objects_max=100)
        if self._what == "expire" or (not self._what and self._rng.random() < 0.25):
            return plan_expire(at, lambda _topic: round(TTL_S * 1000), objects_max=20)
        return plan_gc(
            at.store, at.place, at.clock, grace_ms=round(GRACE_S * 1000), max_deletions=50
        )

    def _tiered(self) -> Collection[MessageQueue]:
        reader = TierReader(self._at.store, self._at.prefix)
        reader.refresh()
        return reader.state.queues


def reclaim_all(world: World) -> None:
    """A last gc, when everybody is gone and everything is old: nothing hinders it, and nothing needed goes."""
    world.scheduler.now_s += 3600
    clock = ManualClock(round(START_MS + world.scheduler.now_s * 1000))
    world.memory._now_ms = clock.now_ms  # the ledger is dated by the store
    at = Workplace(world.ledger, world.ledger, world.place, clock, random.Random(1))
    for _ in range(2):
        plan = plan_gc(
            at.store, at.place, at.clock, grace_ms=round(GRACE_S * 1000), max_deletions=100_000
        )
        require(not plan.refusals, f"I11: the last gc refuses: {plan.refusals}")
        apply_gc(at, plan)
    if world.scheduler.failure is not None:
        raise world.scheduler.failure
