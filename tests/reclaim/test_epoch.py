"""Beside a living writer, after a dead one, and with an epoch of its own: what gc and delete-topic may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.aged import GRACE_S, Tier, keys_of, leased, merge_all
from support.journals import PREFIX
from support.merging import gather, merger_of, runs_of
from support.tiers import QUEUE, batch_of

from tiered.clock import ManualClock
from tiered.errors import FencedError, InvalidError
from tiered.journal.lease import WATCH_S, Lease
from tiered.log.merge import MergeOutput
from tiered.log.verify import verify_tier
from tiered.upkeep import gc
from tiered.upkeep.expire import apply_steps, plan_delete_topic
from tiered.upkeep.gc import apply_gc, plan_gc
from tiered.upkeep.workplace import in_new_epoch

if TYPE_CHECKING:
    import threading

    from tiered.upkeep.workplace import Workplace


def test_no_writer_alive_so_gc_takes_a_epoch_for_what_the_last_one_left():
    tier = Tier()
    tier.builder.add([b"a"])
    litter = tier.litter(1)
    tier.clock.advance(GRACE_S + 1)
    plan = tier.plan()
    assert plan.takes_epoch
    assert keys_of(plan) == set(litter)
    done = tier.apply(plan)
    assert (done["deleted"], done["epoch"]) == (2, 2)
    with pytest.raises(FencedError):  # the writer of before is fenced, whatever it thinks
        tier.builder.add([b"b"])
    assert tier.restart().add([b"b"]).queue_offset == 1
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_the_present_epoch_s_litter_stays_while_its_writer_incarnations():
    tier = Tier()
    tier.builder.add([b"a"])
    tier.litter(1)
    tier.clock.advance(GRACE_S + 1)
    free = tier.plan()
    leased(tier)
    held = tier.plan()
    assert (held.steps, held.left["present_epoch"]) == ((), 2)
    assert held.is_writer_alive
    with pytest.raises(InvalidError, match="a writer has begun"):  # between plan and apply
        tier.apply(free)
    assert len(tier.data() - tier.named()) == 2
    tier.builder.add([b"b"])  # and it was not fenced


def test_merged_parts_go_beside_the_writer_that_merged_them():
    tier = Tier()
    for _ in range(3):
        tier.builder.add([b"a"])
    tier.builder.add([b"b"], roll=True)
    small = tier.named()
    merge_all(tier)
    assert not small & tier.named()
    tier.clock.advance(GRACE_S / 2)
    assert keys_of(tier.plan()) == set()
    leased(tier)
    tier.clock.advance(GRACE_S)
    plan = tier.plan()
    assert keys_of(plan) == small
    assert not plan.takes_epoch
    assert tier.apply(plan)["deleted"] == 4
    tier.builder.add([b"c"])
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_what_was_merged_twice_goes_beside_the_writer_that_merged_it():
    """The bundles between have been named, if no checkpoint remembers it; one of a merge that came too late never was."""
    tier = Tier()
    builder = tier.builder
    builder.add([b"a"])
    builder.add([b"b"])
    (run,) = runs_of(builder.journal.state)
    late = merger_of(builder).make(MergeOutput(1, (run,)), lambda: False)
    assert late is not None
    for level in (1, 2, 3):
        gather(builder, level)
    builder.say(late.action())
    (last,) = tier.named()
    doomed = tier.data() - {last, late.stored.bundle.key}
    leased(tier)
    tier.clock.advance(GRACE_S + 1)
    plan = tier.plan()
    assert keys_of(plan) == doomed
    assert not plan.takes_epoch
    assert (tier.apply(plan)["deleted"], plan.left["present_epoch"]) == (4, 1)


def test_a_topic_s_removal_needs_that_nobody_writes():
    tier = Tier()
    tier.builder.add([b"a"])
    plan = plan_delete_topic(tier.at, QUEUE.topic, objects_max=99)
    lease = leased(tier)
    with pytest.raises(FencedError, match="a writer is at work"):
        apply_steps(tier.at, plan)
    lease.release()
    assert apply_steps(tier.at, plan)["steps"] == 1
    state = tier.restart().journal.state
    assert state.incarnation(QUEUE).segments == ()
    assert tier.builder.add([b"b"]).queue_offset == 1
    tier.clock.advance(GRACE_S + 1)
    tier.apply(tier.plan())
    assert tier.data() == tier.named()
    with pytest.raises(InvalidError, match="no topic"):
        plan_delete_topic(tier.at, "nobody", objects_max=9)


class Renewing(ManualClock):
    """Time on our side; another host's writer, whose clock is behind, renews whenever we wait."""

    lease: Lease
    theirs: ManualClock

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.theirs.advance(timeout_s)
        self.lease.renew()
        return super().wait(event, timeout_s)


def test_a_clock_that_is_ahead_does_not_fence_a_living_writer():
    tier = Tier()
    tier.builder.add([b"a"])
    tier.litter(1)
    tier.clock.advance(GRACE_S + 1)
    ours = Renewing(tier.clock.now_ms() + 30_000)
    ours.theirs = tier.clock
    ours.lease = leased(tier, seconds=10, host="elsewhere")
    at = tier.workplace(tier.store, ours)
    plan = plan_gc(at.store, at.place, ours, grace_ms=1000, max_deletions=9)
    assert plan.takes_epoch  # by our clock nobody is alive
    with pytest.raises(FencedError, match="renews its lease"):
        apply_gc(at, plan)
    tier.builder.add([b"b"])
    assert len(tier.data() - tier.named()) == 2


def test_a_lease_that_has_really_expired_is_taken_after_a_while():
    tier = Tier()
    tier.builder.add([b"a"])
    tier.litter(1)
    leased(tier, seconds=10, host="elsewhere")
    tier.clock.advance(GRACE_S + 1)
    begin_s = tier.clock.monotonic_s()
    assert tier.apply(tier.plan())["deleted"] == 2
    assert tier.clock.monotonic_s() - begin_s >= WATCH_S


def test_i11_what_a_writer_names_in_the_last_moment_stays_whatever_batch_it_is_in(
    monkeypatch: pytest.MonkeyPatch,
):
    """A writer that had lost its lease named its object while gc took an epoch. The first batch of deletions met that
    entry, and held only itself against it. (Simulation, seed 99143.)"""
    tier = Tier()
    tier.builder.add([b"a"])
    tier.litter(1)  # some of it is the first batch
    stored = tier.builder.put(tier.builder.take(batch_of(1, [b"late"])))
    tier.clock.advance(GRACE_S + 1)
    plan = tier.plan()
    late = stored.bundle.key
    assert plan.takes_epoch
    assert late in keys_of(plan)

    def named_before(at: Workplace) -> Any:
        tier.builder.name(stored)
        return in_new_epoch(at)

    monkeypatch.setattr(gc, "in_new_epoch", named_before)
    with pytest.raises(InvalidError, match="has just been named"):
        tier.apply(plan)
    assert late in tier.data()
    assert verify_tier(tier.store, PREFIX, deep=True).problems == []
