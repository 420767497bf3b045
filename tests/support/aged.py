"""A tier whose store has a clock that the test moves, with writers, gc, leases and old readers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from support.journals import PREFIX
from support.merging import merge, named_bundles
from support.tiers import PLACE, QUEUE, TierBuilder

from backends.memory import MemoryStore
from tiered import keys
from tiered.clock import ManualClock
from tiered.journal.lease import Holder, Lease
from tiered.log.merge import MergePolicy
from tiered.log.reader import QueueReader, TierReader
from tiered.model import QueueOffset
from tiered.upkeep.gc import apply_gc, plan_gc
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.upkeep.gc import GcPlan

GRACE_S = 100


class Tier:
    """A store with a clock of its own, writers, and gc."""

    def __init__(self, *, writer: str = "0badcafe") -> None:
        self.clock, self.workplaces = ManualClock(), 0
        self.store = MemoryStore(now_ms=self.clock.now_ms)
        self.at = self.workplace(self.store)
        self.builder = TierBuilder(self.store, writer=writer)
        self.writers = 0

    def workplace(self, store: ObjectStore, clock: ManualClock | None = None) -> Workplace:
        self.workplaces += (
            1  # each draws ids of its own: two with the same would be one that was cloned
        )
        rng = random.Random(self.workplaces)
        return Workplace(store, store, PLACE, clock or self.clock, rng)

    def restart(self) -> TierBuilder:
        self.writers += 1
        self.builder = TierBuilder(self.store, writer=f"{self.writers:08x}")
        return self.builder

    def litter(self, epoch: int, count: int = 1) -> list[str]:
        """Objects of tries that came to nothing."""
        keys = [
            f"{folder}/{at:020d}-{epoch:010d}-0badcafe-{number:010d}"
            for at in range(count)
            for number, folder in enumerate(("queue/t/0000000000/0000000000", "bundle/0"), 2 * at)
        ]
        for key in keys:
            self.store.put_if_absent(PREFIX + key, b"litter")
        return keys

    def plan(self, grace_s: float = GRACE_S, limit: int = 10_000) -> GcPlan:
        grace_ms = round(grace_s * 1000)
        return plan_gc(
            self.store, self.at.place, self.clock, grace_ms=grace_ms, max_deletions=limit
        )

    def apply(self, plan: GcPlan, store: ObjectStore | None = None) -> dict[str, Any]:
        return apply_gc(self.workplace(store or self.store), plan)

    def data(self) -> set[str]:
        return {
            i.key[len(PREFIX) :]
            for root in (keys.BUNDLE, keys.TOPIC, keys.QUEUE)
            for i in self.store.list(PREFIX + root)
        }

    def named(self) -> set[str]:
        return named_bundles(self.builder)


def keys_of(plan: GcPlan) -> set[str]:
    return {one.key.removeprefix(PREFIX) for one in plan.steps}


def old_litter() -> tuple[Tier, list[str]]:
    """A tier of two epochs, with old litter of the first."""
    tier = Tier()
    tier.builder.add([b"a"])
    litter = tier.litter(1, 3)
    tier.restart().add([b"b"])
    tier.clock.advance(GRACE_S + 1)
    return tier, litter


def merge_all(tier: Tier) -> None:
    """Gather all that is due, of two bundles on."""
    merge(tier.builder, MergePolicy(fan_in=2))


def leased(tier: Tier, *, seconds: float = 1000, host: str | None = None) -> Lease:
    """A writer has taken the lease."""
    present = Holder.present()
    holder = replace(present, host=host or present.host)
    lease = Lease(
        tier.store, PREFIX, writer="0badcafe", holder=holder, seconds=seconds, clock=tier.clock
    )
    assert lease.try_acquire() is None
    return lease


def old_reader(tier: Tier) -> QueueReader:
    reader = TierReader(tier.store, PREFIX)
    reader.refresh()
    return reader.queue(QUEUE)


def offsets(reader: QueueReader, start: int) -> list[int]:
    return [
        n
        for batch in reader.batches(QueueOffset(start))
        for n in range(batch.records.base_offset, batch.records.end_offset)  # type: ignore[union-attr]
    ]
