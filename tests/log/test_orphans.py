"""What gc may delete (I11): never what is named or was within the grace, what is young, or of the present epoch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.journals import PREFIX
from support.tiers import QUEUE, TierBuilder, batch_of

from backends.base import ObjectInfo
from backends.memory import MemoryStore
from tiered.clock import ManualClock
from tiered.errors import DataError
from tiered.journal.replay import (
    CheckpointText,
    decode_checkpoint,
    encode_checkpoint,
    replay_starts,
    trim_bound,
)
from tiered.keys import (
    JOURNAL,
    ObjectId,
    bundle_key,
    checkpoint_key,
    index_key,
    quarantine_key,
    queue_bundle_key,
    topic_bundle_key,
)
from tiered.log.expiry import plan_expiry
from tiered.log.history import KnownObjects, OrphanPlan, TierHistory, named_objects, plan_orphans
from tiered.log.state import TierMachine
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from tiered.log.state import TierState

OLD_MS = 1_000


def known(state: TierState, **fields: object) -> KnownObjects:
    rest: dict[str, object] = {
        "prefix": PREFIX, "state": state, "base": state, "once_named": set(), "bound": 0,
        "protected": set(named_objects(state)),
        "epoch": state.epoch, "old_ms": OLD_MS, "now_ms": 2 * OLD_MS,
    }  # fmt: skip
    return KnownObjects(**{**rest, **fields})  # type: ignore[arg-type]


def listing(store: MemoryStore, *more: ObjectInfo) -> list[ObjectInfo]:
    found = [ObjectInfo(i.key, i.size_bytes, OLD_MS) for i in store.list("")]
    return sorted([*found, *more], key=lambda info: info.key)


def orphan(epoch: int, *, at: int = 0, modified_ms: int = OLD_MS, kind: str = "bundle"):
    made = ObjectId(epoch, "0badcafe", 4711)
    key = {
        "bundle": bundle_key(PREFIX, 0, at, made),
        "topic": topic_bundle_key(PREFIX, "topic-ä", 2, at, made),
        "queue": queue_bundle_key(PREFIX, QUEUE, 0, QueueOffset(at), made),
        "index": index_key(PREFIX, at, made),
    }[kind]
    return ObjectInfo(key, 10, modified_ms)


def second_epoch() -> TierBuilder:
    """Two parts of epoch 1, one of epoch 2."""
    first = TierBuilder()
    first.add([b"a"])
    first.add([b"b"])
    tier = TierBuilder(first.store, writer="0000feed")
    tier.add([b"c"])
    return tier


def plan(tier: TierBuilder, *more: ObjectInfo, limit: int = 99, **fields: object) -> OrphanPlan:
    return plan_orphans(
        listing(tier.store, *more),
        [],
        known(tier.journal.state, **fields),
        limit=limit,  # type: ignore[arg-type]
    )


def test_i11_what_is_named_stays():
    found = plan(second_epoch())
    assert (found.deletions, found.refusals, found.missing) == ([], [], set())


def test_old_orphans_of_an_earlier_epoch_go_the_key_index_before_data():
    kinds = ["index", "bundle", "topic", "queue"]
    orphans = [orphan(1, kind=kind) for kind in kinds]
    found = plan(second_epoch(), *orphans)
    wanted = [(one.key, kind) for one, kind in zip(orphans, kinds, strict=True)]
    assert [(one.key, one.kind) for one in found.deletions] == wanted


def test_i11_a_bundle_goes_when_no_part_of_it_is_named_and_not_before():
    """Two queues share it; one of them has expired."""
    tier = TierBuilder()
    other = MessageQueue("other", 0)
    both = batch_of(0, [b"x"], queue=other), batch_of(0, [b"a"])
    shared = tier.add_round(*both)[0].bundle.key
    tier.add([b"b"], roll=True)
    tier.add([b"y"], queue=other, roll=True)
    before = tier.journal.state
    steps, _ = plan_expiry(before, 1 << 60, lambda _: 0, objects_max=99)
    assert len(steps) == 2
    tier.say(steps[0].action())
    once = {"once_named": set(named_objects(before))}
    assert plan(tier, **once).deletions == []
    tier.say(steps[1].action())
    assert [one.key for one in plan(tier, **once).deletions] == [PREFIX + shared]


@pytest.mark.parametrize(
    ("info", "fields", "count"),
    [
        (orphan(2), {}, "present_epoch"),
        (orphan(1, modified_ms=OLD_MS + 1), {}, "within_grace"),
        (orphan(1, modified_ms=-1), {}, "unknown_age"),
        (orphan(1), {"base": None}, "uncovered"),
    ],
)
def test_what_stays_and_why(info: ObjectInfo, fields: dict[str, object], count: str):
    found = plan(second_epoch(), info, **fields)
    assert found.deletions == []
    assert getattr(found.left, count) == 1
    assert found.refusals == []


def test_i11_what_was_named_within_the_grace_stays():
    info = orphan(1)
    tier = second_epoch()
    protected = known(tier.journal.state).protected | {info.key.removeprefix(PREFIX)}
    found = plan(tier, info, protected=protected)
    assert (found.deletions, found.left.within_grace) == ([], 1)


def test_the_present_epoch_s_own_goes_when_it_was_named_once():
    info = orphan(2)
    found = plan(second_epoch(), info, once_named={info.key.removeprefix(PREFIX)})
    assert [one.key for one in found.deletions] == [info.key]


def test_the_limit():
    found = plan(second_epoch(), *(orphan(1, at=at) for at in range(100, 105)), limit=3)
    assert (len(found.deletions), found.left.over_limit) == (3, 2)


def test_i11_nothing_goes_when_anything_is_strange():
    tier = second_epoch()
    victim = orphan(1)
    assert plan(tier, victim).deletions
    future = plan(tier, victim, orphan(3))
    assert future.deletions == []
    assert "epoch 3" in future.refusals[0]
    infos = listing(tier.store, victim)
    named = next(
        i
        for i, info in enumerate(infos)
        if info.key.endswith("0000000000") and "bundle" in info.key
    )
    infos[named] = ObjectInfo(infos[named].key, 1, OLD_MS)
    wrong_size = plan_orphans(infos, [], known(tier.journal.state), limit=9)
    assert wrong_size.deletions == []
    assert "the journal says" in wrong_size.refusals[0]
    turned = plan_orphans(reversed(infos), [], known(tier.journal.state), limit=9)
    assert turned.deletions == []
    assert any("behind" in refusal for refusal in turned.refusals)


def test_a_missing_object_is_told():
    tier = second_epoch()
    key = next(iter(named_objects(tier.journal.state)))
    tier.store.delete(PREFIX + key)
    assert plan(tier).missing == {key}


def test_unknown_keys_are_named_and_stay_and_so_do_the_lease_and_other_features():
    tier = second_epoch()
    names = ["foreign/file", "lease", "ledger/1", "timer/1", "journal/hello", "queue/x"]
    found = plan(tier, *(ObjectInfo(PREFIX + name, 1, 0) for name in names))
    assert found.deletions == []
    assert found.left.unknown_keys == [
        PREFIX + n for n in ("foreign/file", "journal/hello", "queue/x")
    ]
    assert (found.left.unknown, found.left.others) == (3, 2)


def test_probe_objects_go_by_age_alone():
    tier = second_epoch()
    keys = ["probe-0123456789abcdef-put", "probe-0123456789abcdef-set", "probe-mine"]
    probes = [ObjectInfo(key, 5, OLD_MS) for key in keys]
    young = ObjectInfo("probe-1123456789abcdef-put", 5, OLD_MS + 1)
    found = plan_orphans(listing(tier.store), [*probes, young], known(tier.journal.state), limit=9)
    assert [one.key for one in found.deletions] == keys[:2]


def test_quarantined_records_go_when_their_offset_has_expired():
    tier = TierBuilder()
    tier.add([None, b"a"])
    tier.add([None, b"b"], roll=True)
    assert len(list(tier.store.list(PREFIX + "quarantine/"))) == 2
    ((step,), _) = plan_expiry(tier.journal.state, 1 << 60, lambda _: 0, objects_max=99)
    before = tier.journal.state
    tier.say(step.action())
    new = TierBuilder(tier.store, writer="0000feed")
    assert [d.kind for d in plan(new).deletions if d.kind == "quarantine"] == ["quarantine"]
    assert not [d for d in plan(new, base=before).deletions if d.kind == "quarantine"]
    later = ObjectInfo(
        quarantine_key(PREFIX, QUEUE, 0, QueueOffset(50), ObjectId(1, "0badcafe", 9)), 4, 0
    )
    assert later.key not in [d.key for d in plan(new, later).deletions]


# -- history ------------------------------------------------------------------------------------


@dataclass
class Aged:
    """A tier whose store has a clock that the test moves."""

    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.store = MemoryStore(now_ms=self.clock.now_ms)
        self.tier = TierBuilder(self.store)

    def history(self, grace_s: float) -> TierHistory:
        journal = list(self.store.list(PREFIX + JOURNAL))
        old_ms = self.clock.now_ms() - round(grace_s * 1000)
        return TierHistory(self.store, PREFIX, journal, old_ms)


def test_the_history_protects_what_was_named_within_the_grace():
    aged = Aged()
    for roll in (False, True, True):
        aged.tier.add([b"a"], roll=roll)
        aged.clock.advance(10)
    named = set(named_objects(aged.tier.journal.state))
    ((step,), _) = plan_expiry(aged.tier.journal.state, 1 << 60, lambda _: 0, objects_max=99)
    aged.tier.say(step.action())
    left = set(named_objects(aged.tier.journal.state))
    assert len(left) < len(named)
    aged.clock.advance(10)
    assert aged.history(11).protected() == named  # unnamed 10 seconds ago
    after = aged.history(9)
    assert after.protected() == left
    assert after.once_named == named


def test_a_trimmed_history_says_that_it_does_not_reach_back():
    aged = Aged()
    aged.tier.add([b"a"])
    aged.clock.advance(10)
    aged.tier.journal.write_checkpoint(force=True)
    number = aged.tier.journal.number
    aged.tier.add([b"b"])
    for info in list(aged.store.list(PREFIX + JOURNAL)):
        if "checkpoint" not in info.key and int(info.key[-20:]) <= number:
            aged.store.delete(info.key)
    aged.clock.advance(10)
    assert aged.history(5).covers
    assert not aged.history(15).covers
    assert aged.history(15).state == aged.tier.journal.state


def test_a_checkpoint_that_lies_is_told_and_a_damaged_one_counts_as_missing():
    aged = Aged()
    for _ in range(3):
        aged.tier.add([b"a"])
        aged.tier.journal.write_checkpoint(force=True)
    assert (aged.history(0).problems, aged.history(0).bound > 0) == ([], True)
    first, before, last = [
        i.key for i in aged.store.list(PREFIX + JOURNAL) if "checkpoint" in i.key
    ]
    text = decode_checkpoint(aged.store.get(before), where=before)
    data = aged.store.get(last)
    aged.store.delete(last)
    lie = encode_checkpoint(replace(text, number=aged.tier.journal.number))
    aged.store.put_if_absent(last, lie)
    assert "not what replay gives" in aged.history(0).problems[0]
    aged.store.delete(last)
    aged.store.put_if_absent(last, data[:-3] + b"00\n")
    of_first = decode_checkpoint(aged.store.get(first), where=first).number
    assert (aged.history(0).problems, aged.history(0).bound) == (
        [],
        of_first,
    )  # two sound ones stay


def test_a_journal_that_was_rebuilt_begins_at_its_checkpoint():
    aged = Aged()
    for _ in range(3):
        aged.tier.add([b"a"])
        aged.tier.journal.write_checkpoint(force=True)
    rebuilt = checkpoint_key(PREFIX, 10**12)
    reader = aged.tier.journal._reader
    text = CheckpointText(10**12, 4711, TierMachine().dump(reader.state))
    aged.clock.advance(10)
    aged.store.put_if_absent(rebuilt, encode_checkpoint(text))
    found = aged.history(5)
    assert (found.number, found.covers, found.bound) == (10**12, False, 0)
    aged.clock.advance(10)
    assert aged.history(5).covers
    assert (
        aged.history(5).bound == 0
    )  # of the old journal nothing goes before two checkpoints of the new one
    later = TierBuilder(aged.store, writer="0000feed")
    for _ in range(2):
        later.add([b"b"])
        later.journal.write_checkpoint(force=True)
    aged.clock.advance(10)
    assert aged.history(5).bound == 10**12 + 2
    assert aged.history(5).problems == []


def test_a_journal_with_a_hole_is_damage():
    aged = Aged()
    for _ in range(4):
        aged.tier.add([b"a"])
    aged.store.delete(f"{PREFIX}{JOURNAL}{3:020d}")
    with pytest.raises(DataError):
        aged.history(0)


def test_follow_tells_what_is_named_since():
    aged = Aged()
    aged.tier.add([b"a"])
    history = aged.history(0)
    assert history.follow() == set()
    part = aged.tier.add([b"b"])
    assert history.follow() == {part.bundle.key}
    assert part.bundle.key in history.protected()


# -- trimming -----------------------------------------------------------------------------------


def test_where_replay_can_begin():
    assert replay_starts([1, 2, 3], [2]) == [0, 2]
    assert replay_starts([3, 4], [2, 4]) == [2, 4]
    assert replay_starts([1, 4], [2, 3]) == [3]
    assert replay_starts([], [5]) == [5]
    assert replay_starts([2], []) == []
    assert replay_starts([], []) == [0]


@given(st.sets(st.integers(1, 40), max_size=12), st.integers(0, 40), st.integers(1, 40))
def test_two_checkpoints_stay_and_all_that_is_behind_them(
    checkpoints: set[int], base: int, more: int
):
    head = max(checkpoints, default=0) + more
    bound = trim_bound(checkpoints, base)
    assert bound <= base
    entries = [n for n in range(1, head + 1) if n >= bound]
    left = {n for n in checkpoints if n >= bound}
    assert replay_starts(entries, left)
    if bound:
        assert bound in checkpoints
        assert len(left) >= 2
        assert replay_starts(entries, left)[0] in {0, bound}  # entry 1 may be left
