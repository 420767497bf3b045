"""Retention and deletion on a store of bad luck: unknown outcomes, lost answers, others at work at the same time."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import pytest
from support.aged import GRACE_S, Tier, keys_of, old_litter
from support.journals import PREFIX
from support.tiers import QUEUE, TierBuilder

from backends.errors import BackendError, UnsupportedError
from backends.testing.faulty import WRITES, Fault, FaultyStore, Rule, SimulatedCrash
from backends.wrapping import RetryingStore, WrappingStore
from tiered.clock import ManualClock
from tiered.errors import InvalidError, StoreUnavailableError, TieredStoreError
from tiered.log.verify import verify_tier
from tiered.upkeep.expire import apply_steps, plan_delete_topic, plan_expire
from tiered.upkeep.gc import apply_gc
from tiered.upkeep.rebuild import apply_rebuild_index, plan_rebuild_index
from tiered.upkeep.workplace import Workplace


def expiring() -> tuple[Tier, Any]:
    tier = Tier()
    for roll in (False, True, True):
        tier.builder.add([b"a"], roll=roll)
    tier.clock.advance(60)
    return tier, plan_expire(tier.at, lambda _: 0, objects_max=99)


def minimum(tier: Tier) -> int:
    tier.builder.journal.catch_up()
    incarnation = tier.builder.journal.state.incarnation(QUEUE)
    assert incarnation
    return incarnation.min_offset


@pytest.mark.parametrize("fault", [Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.LATE])
def test_i7_an_expiry_whose_outcome_is_unknown_is_done_once(fault: Fault):
    tier, plan = expiring()
    bad = FaultyStore(tier.store, random.Random(1), Rule(fault, key_part="journal/", times=2))
    done = apply_steps(
        Workplace(tier.store, bad, tier.at.place, tier.clock, random.Random(1)), plan
    )
    assert (done["steps"], done["entries"]) == (1, 1)
    bad.land_late()
    assert minimum(tier) == 2
    tier.builder.add([b"b"])
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


class Busy(WrappingStore):
    """The writer commits just before each of the first writes of another."""

    def __init__(self, tier: Tier, times: int) -> None:
        super().__init__(tier.store)
        self._tier = tier
        self._times = times

    def put_if_absent(self, key: str, data: object) -> None:
        if "journal/" in key and self._times:
            self._times -= 1
            self._tier.builder.add([b"between"])
        super().put_if_absent(key, data)  # type: ignore[arg-type]


def test_an_expiry_meets_the_writer_s_entries_and_both_go_on():
    tier, plan = expiring()
    busy = Busy(tier, 3)
    done = apply_steps(
        Workplace(tier.store, busy, tier.at.place, tier.clock, random.Random(1)), plan
    )
    assert done["steps"] == 1
    assert minimum(tier) == 2
    assert tier.builder.journal.state.refused_parts == 0
    tier.builder.add([b"c"])
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_two_expiries_at_once_are_one():
    tier, plan = expiring()

    class Twice(WrappingStore):
        has_come = False

        def put_if_absent(self, key: str, data: object) -> None:
            if "journal/" in key and not self.has_come:
                self.has_come = True
                apply_steps(tier.at, plan)
            super().put_if_absent(key, data)  # type: ignore[arg-type]

    other = Workplace(tier.store, Twice(tier.store), tier.at.place, tier.clock, random.Random(9))
    with pytest.raises(InvalidError, match="moved on"):
        apply_steps(other, plan)
    assert minimum(tier) == 2


def test_two_gcs_at_once_delete_what_one_would():
    tier, _ = old_litter()
    plan = tier.plan()

    class Twice(WrappingStore):
        has_come = False

        def delete(self, key: str) -> None:
            if not self.has_come:
                self.has_come = True
                tier.apply(plan)
            super().delete(key)

    done = apply_gc(tier.workplace(Twice(tier.store)), plan)
    assert done["deleted"] == 6
    assert tier.data() == tier.named()
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_a_store_that_does_not_write_conditionally_is_refused():
    tier, plan = expiring()
    bad = FaultyStore(tier.store, random.Random(1))

    def unsupported(key: str, data: object) -> None:
        raise UnsupportedError(f"no conditions: {key} {data!r}")

    bad.put_if_absent = unsupported  # type: ignore[method-assign]
    with pytest.raises(InvalidError, match="only if it is absent"):
        apply_steps(tier.workplace(bad), plan)


def test_an_upload_that_lands_after_gc_is_found_by_the_next():
    tier, litter = old_litter()
    tier.apply(tier.plan())
    tier.store.put_if_absent(PREFIX + litter[0], b"late")
    assert tier.plan().steps == ()
    tier.clock.advance(GRACE_S + 1)
    assert keys_of(tier.plan()) == {litter[0]}


@pytest.mark.parametrize("seed", range(25))
def test_i7_i11_bad_luck_at_every_request_and_again_until_it_is_done(seed: int):
    rng = random.Random(seed)
    tier, litter = old_litter()
    tier.builder.add([b"c"], roll=True)
    tier.clock.advance(GRACE_S + 1)
    faults = [Fault.UNAVAILABLE, Fault.LOST_ANSWER, Fault.LOST_REQUEST, Fault.LATE]
    crashes = [Fault.CRASH_BEFORE, Fault.CRASH_AFTER]
    bad = FaultyStore(
        tier.store,
        rng,
        *(Rule(fault, operations=WRITES, probability=0.1, times=None) for fault in faults),
        *(Rule(fault, operations=WRITES, probability=0.05, times=2) for fault in crashes),
    )
    clock = ManualClock(tier.clock.now_ms())
    retrying = RetryingStore(bad, clock=clock, rng=rng, stop=threading.Event())
    at = Workplace(retrying, bad, tier.at.place, tier.clock, rng)
    for step in ("expire", "gc", "topic", "gc"):
        for _ in range(40):
            try:
                if step == "expire":
                    apply_steps(at, plan_expire(at, lambda _: 0, objects_max=99))
                elif step == "topic":
                    apply_steps(at, plan_delete_topic(at, QUEUE.topic, objects_max=99))
                else:
                    plan = tier.plan()
                    if plan.steps:
                        apply_gc(at, plan)
                break
            except (SimulatedCrash, BackendError, TieredStoreError):
                bad.land_late()
                tier.clock.advance(61)
        tier.clock.advance(GRACE_S + 1)
    bad.heal()
    bad.land_late()
    tier.clock.advance(GRACE_S + 1)
    last = TierBuilder(tier.store, writer="0000beef")
    tier.builder = last
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    tier.apply(tier.plan())
    assert tier.data() == tier.named() == set()
    assert not set(litter) & tier.data()
    assert last.add([b"d"]).queue_offset == 3
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


@pytest.mark.parametrize("what", ["expire", "delete-topic", "gc", "rebuild --index"])
def test_a_guest_ends_when_the_store_refuses_its_entries_for_too_long(what: str):
    tier, plan = expiring()
    if what == "delete-topic":
        plan = plan_delete_topic(tier.at, QUEUE.topic, objects_max=99)
    elif what == "gc":
        tier.litter(1)
        tier.clock.advance(GRACE_S + 1)
        plan = tier.plan()
        assert plan.takes_epoch
    elif what == "rebuild --index":
        plan = plan_rebuild_index(tier.at)
    rule = Rule(Fault.UNAVAILABLE, frozenset({"put"}), key_part="journal/", times=10**6)
    bad = FaultyStore(tier.store, random.Random(1), rule)
    at = Workplace(tier.store, bad, tier.at.place, tier.clock, random.Random(1), give_up_s=20)
    begin_s = tier.clock.monotonic_s()
    apply = {"gc": apply_gc, "rebuild --index": partial(apply_rebuild_index, items_max=9)}
    with pytest.raises(StoreUnavailableError):
        apply.get(what, apply_steps)(at, plan)  # type: ignore[operator]
    assert tier.clock.monotonic_s() - begin_s <= 20
