"""Rebuilds journals of the tiers that a ``TierBuilder`` has written."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from support.journals import PREFIX
from support.tiers import PLACE

from tiered.clock import ManualClock
from tiered.keys import MIRROR, entry_key
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier
from tiered.upkeep.rebuild import RebuildPlan, apply_rebuild, plan_rebuild
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.log.state import TierState


POOL = ThreadPoolExecutor(4)


def lose_journal(store: ObjectStore, *, with_copies: bool = True) -> None:
    for folder in ("journal/", *[MIRROR + "journal/"] * with_copies):
        for info in list(store.list(PREFIX + folder)):
            store.delete(info.key)


def plan_of(store: ObjectStore) -> RebuildPlan:
    return plan_rebuild(store, PREFIX, POOL)


def rebuild(
    store: ObjectStore, *, accept_gaps: bool = False, accept_unread: bool = False, seed: int = 5
) -> RebuildPlan:
    plan = plan_of(store)
    apply(plan, store, accept_gaps=accept_gaps, accept_unread=accept_unread, seed=seed)
    return plan


def apply(
    plan: RebuildPlan,
    store: ObjectStore,
    *,
    accept_gaps: bool = False,
    accept_unread: bool = False,
    seed: int = 5,
) -> None:
    at = Workplace(store, store, PLACE, ManualClock(), random.Random(seed))
    apply_rebuild(at, plan, accept_gaps=accept_gaps, accept_unread=accept_unread)


def state_of(store: ObjectStore) -> TierState:
    reader = TierReader(store, PREFIX)
    reader.refresh()
    return reader.state


def damage(store: ObjectStore, number: int) -> None:
    """Have an entry of the journal be unreadable."""
    key = entry_key(PREFIX, number)
    store.delete(key)
    store.put_if_absent(key, b"damaged")


def assert_whole(store: ObjectStore) -> None:
    report = verify_tier(store, PREFIX, deep=True)
    assert report.problems == []
