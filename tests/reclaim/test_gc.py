"""gc as a whole: exactly the plan, never what is named, also after a crash in the middle and beside writers (I11)."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.aged import GRACE_S, Tier, keys_of, merge_all, old_litter
from support.journals import PREFIX
from support.tiers import QUEUE, TierBuilder

from backends.errors import UnavailableError
from backends.memory import MemoryStore
from backends.testing.faulty import Fault, FaultyStore, Rule, SimulatedCrash
from tiered.clock import ManualClock
from tiered.errors import DataError, InvalidError
from tiered.journal.entry import open_text
from tiered.keys import JOURNAL, LEDGER, entry_key
from tiered.log.history import LEDGER_KEPT_MS, Deletion
from tiered.log.verify import verify_tier
from tiered.upkeep import gc
from tiered.upkeep.expire import apply_steps, plan_expire
from tiered.upkeep.gc import apply_gc, plan_gc


def test_i11_a_plan_changes_nothing_and_applying_does_exactly_the_plan():
    tier, litter = old_litter()
    before = {i.key for i in tier.store.list("")}
    plan = tier.plan()
    assert {i.key for i in tier.store.list("")} == before
    assert keys_of(plan) == set(litter)
    assert not plan.takes_epoch
    tier.litter(1, 0)
    done = tier.apply(plan)
    assert (done["deleted"], done["already_gone"]) == (6, 0)
    assert tier.data() == tier.named()
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    assert tier.plan().steps == ()


def test_the_ledger_says_what_was_to_be_done_and_what_was():
    tier, _ = old_litter()
    plan = tier.plan()
    tier.apply(plan)
    records = [
        open_text(tier.store.get(i.key), where=i.key) for i in tier.store.list(PREFIX + LEDGER)
    ]
    assert [record["step"] for record in records] == ["begin", "end"]
    said = records[0]["plan"]
    assert (said["deletion_count"], said["counts"]["deletions"], said["what"]) == (6, 6, "gc")
    text = json.dumps(plan.document(), sort_keys=True, separators=(",", ":")).encode()
    assert said["sha256"] == hashlib.sha256(text).hexdigest()
    assert records[1]["deleted"] == 6
    assert tier.plan(0).left["others"] == 2  # and the ledger stays


def test_i11_nothing_young_goes_by_the_store_s_clock_whatever_ours_says():
    tier = Tier()
    tier.litter(1)
    tier.restart()
    ours = ManualClock(tier.clock.now_ms() + 10**9)  # we are eleven days ahead
    at = tier.workplace(tier.store, ours)
    plan = plan_gc(at.store, at.place, ours, grace_ms=GRACE_S * 1000, max_deletions=99)
    assert len(plan.steps) == 2
    done = apply_gc(at, plan)
    assert (done["deleted"], done["left_young"]) == (0, 2)
    assert len(tier.data()) == 2


def test_i11_an_old_entry_waits_for_a_checkpoint_that_is_young_by_the_store_s_clock_only():
    tier = Tier()
    for _ in range(3):
        tier.builder.add([b"a"])
    tier.clock.advance(GRACE_S)
    for _ in range(2):
        tier.builder.add([b"b"])
        tier.builder.journal.write_checkpoint(force=True)
    tier.clock.advance(GRACE_S - 1)
    ours = ManualClock(tier.clock.now_ms() + 1500)  # S3 cuts to seconds, and may be behind
    at = tier.workplace(tier.store, ours)
    plan = plan_gc(at.store, at.place, ours, grace_ms=GRACE_S * 1000, max_deletions=99)
    assert plan.kinds == {"entry": 4}
    done = apply_gc(at, plan)
    assert (done["deleted"], done["left_young"]) == (0, 4)
    tier.clock.advance(2)
    assert tier.apply(plan)["deleted"] == 4
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_a_store_that_does_not_tell_times_is_refused():
    store = MemoryStore()
    tier = Tier()
    TierBuilder(store)
    at = tier.workplace(store)
    plan = plan_gc(store, at.place, tier.clock, grace_ms=0, max_deletions=9)
    with pytest.raises(InvalidError, match="does not tell"):
        apply_gc(at, plan)


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
@pytest.mark.parametrize("at", range(1, 7))
def test_i11_a_crash_in_the_middle_and_again(fault: Fault, at: int):
    tier, _ = old_litter()
    plan = tier.plan()
    rule = Rule(fault, operations=frozenset({"delete"}), skip=at - 1, times=1)
    with pytest.raises(SimulatedCrash):
        tier.apply(plan, FaultyStore(tier.store, random.Random(1), rule))
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    done = tier.apply(plan)
    assert done["deleted"] + done["already_gone"] == 6
    assert done["already_gone"] == at - (fault is Fault.CRASH_BEFORE)
    assert tier.data() == tier.named()


def test_a_deletion_that_fails_ends_the_run_and_is_in_the_ledger():
    tier, _ = old_litter()
    plan = tier.plan()
    rule = Rule(Fault.UNAVAILABLE, operations=frozenset({"delete"}), skip=2, times=1)
    with pytest.raises(UnavailableError):
        tier.apply(plan, FaultyStore(tier.store, random.Random(1), rule))
    last = list(tier.store.list(PREFIX + LEDGER))[-1].key
    record = open_text(tier.store.get(last), where=last)
    assert record["deleted"] == 2  # the first batch, but for one
    assert "Unavailable" in record["error"]
    assert tier.apply(plan)["already_gone"] == 2


def test_a_plan_is_refused_when_the_tier_has_moved_on():
    tier, litter = old_litter()
    plan = tier.plan()
    key = PREFIX + litter[0]
    tier.store.delete(key)
    tier.store.put_if_absent(key, b"another")
    with pytest.raises(InvalidError, match="is another object"):
        tier.apply(plan)
    wrong = replace(plan, journal_checksum=1, steps=plan.steps[2:])
    with pytest.raises(InvalidError, match="journal entry"):
        tier.apply(wrong)
    with pytest.raises(InvalidError, match="another store"):
        tier.apply(replace(plan, store={"cluster": "x"}))
    assert len(tier.data() - tier.named()) == 6


def test_a_plan_that_was_made_by_hand_deletes_nothing_that_is_named():
    tier, _ = old_litter()
    plan = tier.plan()
    info = next(i for i in tier.store.list(PREFIX) if i.key.removeprefix(PREFIX) in tier.named())
    one = Deletion(info.key, "bundle", info.size_bytes, info.modified_ms)
    with pytest.raises(InvalidError, match="is named"):
        tier.apply(replace(plan, steps=(one, *plan.steps)))
    assert tier.named() <= tier.data()


def test_i11_nothing_is_deleted_when_a_named_object_is_gone():
    tier, _ = old_litter()
    plan = tier.plan()
    tier.store.delete(PREFIX + min(tier.named()))
    refused = tier.plan()
    assert refused.steps == ()
    assert "is named by the journal and is gone" in refused.refusals[0]
    with pytest.raises(DataError, match="nothing is deleted"):
        tier.apply(plan)
    assert len(tier.data() - tier.named()) == 6


def test_the_journal_is_trimmed_behind_two_checkpoints_and_the_grace():
    tier = Tier()
    for _ in range(4):
        for _ in range(3):
            tier.builder.add([b"a"])
        tier.clock.advance(GRACE_S / 2)
        tier.builder.journal.write_checkpoint(force=True)
    # checkpoints after entries 4, 7, 10, 13; entry 10 is as old as the grace
    plan = tier.plan(limit=10_000)
    assert plan.kinds == {"entry": 9, "checkpoint": 4}  # each with its second copy
    assert tier.plan(GRACE_S + 1).kinds == {"entry": 6, "checkpoint": 2}
    tier.apply(plan)
    left = [i.key[-31:] for i in tier.store.list(PREFIX + JOURNAL)]
    assert len(left) == 4 + 2
    assert tier.restart().add([b"b"]).queue_offset == 12
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    tier.clock.advance(10 * GRACE_S)
    tier.apply(tier.plan())
    assert tier.plan().is_history_covered
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_i11_expired_segments_go_in_two_phases():
    tier = Tier()
    for roll in (False, True, True):
        tier.builder.add([b"a", b"b"], roll=roll)
    tier.clock.advance(60)
    plan = plan_expire(tier.at, lambda _: 0, objects_max=99)
    assert (plan.segments, plan.objects) == (2, 2)
    plan = plan_expire(tier.at, lambda _: 0, objects_max=99)
    done = apply_steps(tier.at, plan)
    assert (done["steps"], done["entries"]) == (1, 1)
    assert len(tier.data()) == 3  # nothing is deleted yet
    tier.builder.add([b"c"])  # the writer met the entry and went on
    assert tier.builder.journal.state.incarnation(QUEUE).min_offset == 4
    tier.clock.advance(GRACE_S / 2)
    assert keys_of(tier.plan()) == set()
    tier.clock.advance(GRACE_S)
    gone = tier.plan()
    assert len(gone.steps) == 2
    tier.apply(gone)
    assert tier.data() == tier.named()
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    again = apply_steps(tier.at, plan)
    assert (again["steps"], again["already_done"]) == (0, 1)


def test_expiry_is_refused_by_a_clock_that_is_wrong_and_after_the_tier_moved_on():
    tier = Tier()
    tier.builder.add([b"a"])
    tier.builder.add([b"b"], roll=True)
    for apart_ms, where in ((10**9, "ahead of"), (-(10**9), "behind")):
        ours = ManualClock(tier.clock.now_ms() + apart_ms)
        at = tier.workplace(tier.store, ours)
        with pytest.raises(InvalidError, match=f"1000000 s {where} the store's"):
            apply_steps(at, plan_expire(at, lambda _: 0, objects_max=99))
    assert tier.builder.journal.state.incarnation(QUEUE).min_offset == 0
    tier.clock.advance(10)
    plan = plan_expire(tier.at, lambda _: 0, objects_max=99)
    plan = replace(plan, steps=(replace(plan.steps[0], segments=7),))
    with pytest.raises(InvalidError, match="moved on"):
        apply_steps(tier.at, plan)


def test_a_tail_that_was_truncated_expires_and_what_it_shares_stays():
    tier = Tier()
    tier.builder.add([b"a"])
    part = tier.builder.add([b"b", b"c"])
    tier.builder.truncate(2)
    tier.restart().add([b"other"])
    incarnations = tier.builder.journal.state.queues[QUEUE]
    assert [
        (incarnation.min_offset, incarnation.commit_offset) for incarnation in incarnations
    ] == [(2, 3), (0, 3)]
    tier.clock.advance(GRACE_S)
    plan = plan_expire(tier.at, lambda _: 0, objects_max=99)
    assert [(step.position, step.min_from, step.min_to) for step in plan.steps] == [(0, 2, 3)]
    assert apply_steps(tier.at, plan)["steps"] == 1
    tier.builder.journal.catch_up()
    tier.clock.advance(GRACE_S + 1)
    tier.apply(tier.plan())
    assert tier.data() == tier.named()
    assert part.bundle.key in tier.named()  # the head that was kept lies in it
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


STEPS = st.lists(
    st.sampled_from(
        ["add", "add", "roll", "gap", "litter", "restart", "expire", "merge", "wait", "gc", "gc"]
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(1, 9), st.sampled_from([0, 5, GRACE_S]))
def test_i11_whatever_happens_gc_deletes_nothing_that_anybody_may_need(
    steps: list[str], limit: int, grace_s: int
):
    tier = Tier()
    held: list[tuple[float, set[str]]] = []
    deleted_any = False
    for number, step in enumerate(steps):
        builder = tier.builder
        if step in {"add", "roll"}:
            builder.add([b"m%d" % number], roll=step == "roll")
        elif step == "gap":
            builder.gap(2)
        elif step == "litter":
            epoch = builder.journal.epoch
            key = f"bundle/0/{number:020d}-{epoch:010d}-0badcafe-{number:010d}"
            tier.store.put_if_absent(PREFIX + key, b"litter")
        elif step == "restart":
            tier.restart()
        elif step == "expire":
            apply_steps(tier.at, plan_expire(tier.at, lambda _: 0, objects_max=4))
            builder.journal.catch_up()
        elif step == "merge":
            merge_all(tier)
        elif step == "wait":
            tier.clock.advance(GRACE_S / 2)
            builder.journal.write_checkpoint(force=True)
        else:
            plan = tier.plan(grace_s, limit)
            assert plan.refusals == ()
            assert len(plan.steps) <= limit
            held.append((tier.clock.monotonic_s(), tier.named()))
            needed = set().union(
                *(names for at, names in held if tier.clock.monotonic_s() - at < grace_s)
            )
            assert not keys_of(plan) & (needed | tier.named())
            deleted_any |= tier.apply(plan)["deleted"] > 0
            if plan.takes_epoch:
                tier.restart()
        held.append((tier.clock.monotonic_s(), tier.named()))
        assert tier.named() <= tier.data()
    tier.restart()
    tier.clock.advance(GRACE_S + 1)
    tier.apply(tier.plan(grace_s))
    assert tier.data() == tier.named()
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_batches_are_of_one_kind_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gc, "BATCH", 2)
    tier, _ = old_litter()
    assert tier.apply(tier.plan())["deleted"] == 6


def test_a_ledger_record_has_the_same_size_however_much_is_deleted():
    sizes = []
    for count in (3, 900):
        tier = Tier()
        tier.builder.add([b"a"])
        tier.litter(1, count)
        tier.restart().add([b"b"])
        tier.clock.advance(GRACE_S + 1)
        assert tier.apply(tier.plan())["deleted"] == 2 * count
        sizes.append(max(info.size_bytes for info in tier.store.list(PREFIX + LEDGER)))
    assert sizes[1] < sizes[0] + 64 < 2000


def test_records_of_the_ledger_expire_and_what_else_lies_there_stays():
    tier, _ = old_litter()
    tier.apply(tier.plan())
    tier.store.put_if_absent(PREFIX + LEDGER + "a-person-s-note", b"")
    tier.clock.advance(LEDGER_KEPT_MS / 1000 - 10)
    assert {one.kind for one in tier.plan().steps} & {"ledger"} == set()
    tier.clock.advance(20)
    plan = tier.plan()
    assert [one.kind for one in plan.steps].count("ledger") == 2
    tier.apply(plan)
    left = [info.key.removeprefix(PREFIX + LEDGER) for info in tier.store.list(PREFIX + LEDGER)]
    assert len(left) == 3  # the note, and the two of this run


def test_a_plan_to_expire_of_which_the_broker_has_truncated_what_follows_is_not_called_done():
    """Then what was truncated stands where the queue stood, with a minimum that is higher."""
    tier = Tier()
    tier.builder.add([b"a"] * 3)
    tier.builder.add([b"b"] * 3, roll=True)
    tier.builder.add([b"c"] * 3, roll=True)
    tier.clock.advance(60)
    plan = plan_expire(tier.at, lambda _: 0, objects_max=1)
    assert [(step.min_from, step.min_to) for step in plan.steps] == [(0, 3)]
    tier.builder.truncate(7)
    with pytest.raises(InvalidError, match="moved on"):
        apply_steps(tier.at, plan)
    again = plan_expire(tier.at, lambda _: 0, objects_max=2)
    again = replace(again, steps=tuple(step for step in again.steps if step.position == 1))
    assert apply_steps(tier.at, again)["steps"] == 1
    tier.builder.journal.catch_up()
    tier.builder.truncate(5)
    assert apply_steps(tier.at, again)["was_applied"]


def test_a_plan_is_carried_out_on_its_own_tier_only():
    """One store may be tiered to several places, and these look the same but for how they began."""
    here, there = Tier(), Tier(writer="0badbeef")
    for tier in (here, there):
        tier.builder.add([b"a"] * 3)
        tier.builder.add([b"b"] * 3, roll=True)
        tier.clock.advance(60)
    plan = plan_expire(here.at, lambda _: 0, objects_max=99)
    with pytest.raises(InvalidError, match="another tier"):
        apply_steps(there.at, plan)
    assert apply_steps(here.at, plan)["steps"] == 1


def spoil(tier: Tier, key: str) -> None:
    data = tier.store.get(PREFIX + key)
    tier.store.delete(PREFIX + key)
    tier.store.put_if_absent(PREFIX + key, data[:-3] + b"00\n")


def checkpoints(tier: Tier) -> list[str]:
    listed = tier.store.list(PREFIX + JOURNAL)
    return [i.key.removeprefix(PREFIX) for i in listed if i.key.endswith(".checkpoint")]


def test_a_damaged_checkpoint_at_which_a_trimmed_journal_begins_holds_gc_up_no_longer_than_the_grace():
    tier = Tier()

    def goes_on() -> None:
        tier.builder.add([b"a"])
        tier.builder.journal.write_checkpoint(force=True)
        tier.clock.advance(GRACE_S + 1)

    for _ in range(4):
        goes_on()
    assert tier.apply(tier.plan())["deleted"] > 0
    first = checkpoints(tier)[0]
    spoil(tier, first)
    tier.litter(1)
    tier.restart()
    for _ in range(3):
        goes_on()
    plan = tier.plan()
    assert plan.refusals == ()
    assert first in keys_of(plan)
    assert plan.kinds["bundle"] == plan.kinds["queue"] == 1
    tier.apply(plan)
    assert tier.data() == tier.named()
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_a_damaged_newest_checkpoint_counts_as_missing():
    """No writer may ever come that would write another: what two whole ones cover goes all the same."""
    tier = Tier()
    for _ in range(4):
        tier.builder.add([b"a"])
        tier.builder.journal.write_checkpoint(force=True)
    tier.litter(1)
    tier.restart()
    tier.clock.advance(GRACE_S + 1)
    last = checkpoints(tier)[-1]
    spoil(tier, last)
    plan = tier.plan()
    assert plan.refusals == ()
    assert plan.kinds == {"bundle": 1, "queue": 1, "checkpoint": 2, "entry": 2}
    tier.apply(plan)
    assert tier.data() == tier.named()
    assert last in checkpoints(tier)
    found = verify_tier(tier.store, PREFIX, deep=True).problems
    assert [one.where for one in found] == [PREFIX + last]


def flip(tier: Tier, number: int, at: int) -> None:
    key = entry_key(PREFIX, number)
    data = bytearray(tier.store.get(key))
    data[at] ^= 1
    tier.store.delete(key)
    tier.store.put_if_absent(key, bytes(data))


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("harm", ["flipped", "cut", "swapped", "deleted"])
def test_a_damaged_entry_that_a_checkpoint_covers_is_no_worse_than_a_missing_one(
    number: int, harm: str
):
    tier = Tier()
    for _ in range(4):
        tier.builder.add([b"a"])
        tier.builder.journal.write_checkpoint(force=True)
    tier.litter(1)
    tier.restart()
    key = entry_key(PREFIX, number)
    if harm == "flipped":
        flip(tier, number, 40)
    else:
        data = tier.store.get(entry_key(PREFIX, number + 1) if harm == "swapped" else key)
        tier.store.delete(key)
        if harm != "deleted":
            tier.store.put_if_absent(key, data if harm == "swapped" else data[:50])
    tier.clock.advance(GRACE_S + 1)
    plan = tier.plan()
    assert (plan.refusals, plan.kinds["bundle"], plan.kinds["queue"]) == ((), 1, 1)
    tier.apply(plan)
    assert tier.data() == tier.named()
    if number < 4:  # below what two checkpoints cover: trimmed, as every error text about it says
        assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    tier.builder.add([b"b"])  # and a writer goes on


def test_a_damaged_entry_that_no_checkpoint_covers_stops_gc():
    tier = Tier()
    tier.builder.add([b"a"])
    tier.builder.journal.write_checkpoint(force=True)
    tier.builder.add([b"a"])
    flip(tier, tier.builder.journal.number, 40)
    with pytest.raises(DataError, match="the checksum is wrong"):
        tier.plan()
