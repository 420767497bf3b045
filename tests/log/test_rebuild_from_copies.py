"""A lost journal goes on from the newest copy of a checkpoint, and an old copy brings back nothing that was given up."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.journals import PREFIX
from support.rebuilding import assert_whole, lose_journal, plan_of, rebuild, state_of
from support.tiers import QUEUE, TierBuilder

from backends.base import ObjectInfo
from backends.memory import MemoryStore
from backends.testing.faulty import Fault, FaultyStore, Rule
from tiered.errors import OtherVersionError
from tiered.journal.entry import seal_text
from tiered.journal.lease import Holder, JournalEnd, LeaseState, encode_lease
from tiered.keys import LEASE, MIRROR, checkpoint_key, parse_journal_key
from tiered.log.history import KnownObjects, plan_orphans
from tiered.log.state import queue_action
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backends.base import ObjectStore
    from tiered.log.state import Incarnation

EMPTY = MessageQueue("empty", 3)


def copies(store: ObjectStore) -> list[int]:
    found = (parse_journal_key(PREFIX + MIRROR, info.key) for info in store.list(PREFIX + "meta/"))
    return [one[0] for one in found if one]


def full_of_facts() -> TierBuilder:
    """What no object tells: a queue that was emptied, reasons, a gap at the end, why an incarnation is over."""
    builder = TierBuilder()
    builder.add([b"a"] * 3)
    builder.gap(2)
    builder.begin_anew()
    builder.add([b"b"] * 3)
    builder.add([b"c"] * 3, roll=True)
    builder.say(queue_action("incarnation", EMPTY, 0, start=7, reason="emptied"))
    builder.gap(4)
    return builder


def queues_of(store: ObjectStore) -> Mapping[MessageQueue, tuple[Incarnation, ...]]:
    return state_of(store).queues


def test_what_only_a_copy_knows_is_known_again():
    builder = full_of_facts()
    assert builder.journal.write_checkpoint(force=True)
    before = builder.journal.state
    lose_journal(builder.store, with_copies=False)
    plan = rebuild(builder.store)
    assert (plan.rebuilt.losses, plan.refused) == ([], [])
    assert any("meta/journal/" in note for note in plan.rebuilt.notes)
    assert queues_of(builder.store) == before.queues
    assert EMPTY in before.queues
    assert state_of(builder.store).history == before.history
    assert_whole(builder.store)


def test_where_neither_is_left_the_plan_says_that_all_is_guessed():
    builder = full_of_facts()
    builder.journal.write_checkpoint(force=True)
    lose_journal(builder.store)
    plan = rebuild(builder.store)
    assert any("guessed" in note for note in plan.rebuilt.notes)
    assert EMPTY not in queues_of(builder.store)


@given(st.integers(0, 5), st.booleans())
def test_what_is_newer_than_the_copy_is_told_by_the_objects(newer: int, truncates: bool):
    builder = full_of_facts()
    builder.journal.write_checkpoint(force=True)
    for number in range(newer):
        builder.add([b"%d" % number] * 2, roll=number == 3)
    if truncates and newer:
        builder.truncate(builder.file().commit_offset - 1)
        builder.add([b"other"] * 3)
    (now,) = queues_of(builder.store)[QUEUE][-1:]
    lose_journal(builder.store, with_copies=False)
    rebuild(builder.store)
    (after,) = queues_of(builder.store)[QUEUE][-1:]
    assert list(after.parts()) == list(now.parts())
    assert (after.commit_offset, after.gaps) == (now.commit_offset, now.gaps)
    assert_whole(builder.store)


def test_whole_entries_behind_the_copy_are_replayed():
    builder = full_of_facts()
    builder.journal.write_checkpoint(force=True)
    number = builder.journal.number
    builder.say(queue_action("gap", EMPTY, 0, start=7, end=9, reason="later"))
    for info in list(builder.store.list(PREFIX + "journal/")):
        found = parse_journal_key(PREFIX, info.key)
        if found and found[0] <= number:
            builder.store.delete(info.key)
    rebuild(builder.store)
    assert queues_of(builder.store) == builder.journal.state.queues


def test_a_damaged_copy_is_passed_over_and_verify_names_it():
    builder = full_of_facts()
    builder.journal.write_checkpoint(force=True)
    first = builder.journal.number
    builder.add([b"d"])
    builder.journal.write_checkpoint(force=True)
    key = checkpoint_key(PREFIX + MIRROR, builder.journal.number)
    builder.store.delete(key)
    builder.store.put_if_absent(key, b"damaged")
    assert [one.where for one in verify_tier(builder.store, PREFIX, deep=True).problems] == [key]
    lose_journal(builder.store, with_copies=False)
    plan = rebuild(builder.store)
    assert any(f"journal entry {first} " in note for note in plan.rebuilt.notes)
    after = queues_of(builder.store)
    assert EMPTY in after
    assert after[QUEUE][-1].commit_offset == builder.journal.state.queues[QUEUE][-1].commit_offset


def test_a_copy_of_another_version_stops_a_rebuild():
    builder = full_of_facts()
    lose_journal(builder.store)
    builder.store.put_if_absent(checkpoint_key(PREFIX + MIRROR, 3), seal_text({"format": 99}))
    with pytest.raises(OtherVersionError):
        plan_of(builder.store)


def test_a_copy_of_another_history_is_not_believed():
    """A tier was deleted and begun anew, and its copies were forgotten."""
    builder = full_of_facts()
    builder.journal.write_checkpoint(force=True)
    lose_journal(builder.store, with_copies=False)
    holder = Holder("h", "b", "s", 1, 1)
    lease = LeaseState(holder, "11111111", 0, released=True, end=JournalEnd(1, 2, "of-another"))
    builder.store.put_if_absent(PREFIX + LEASE, encode_lease(lease))
    plan = plan_of(builder.store)
    assert any("guessed" in note for note in plan.rebuilt.notes)
    assert EMPTY not in plan.rebuilt.state.queues


def expire(builder: TierBuilder) -> None:
    place = {"position": 1, "min_from": 0, "min_to": 3}
    builder.say(queue_action("expire", QUEUE, 1, **place))


def begin_of(store: ObjectStore) -> int:
    return queues_of(store)[QUEUE][-1].min_offset


def test_what_had_expired_before_the_copy_was_made_does_not_come_back():
    builder = full_of_facts()
    expire(builder)
    builder.journal.write_checkpoint(force=True)
    lose_journal(builder.store, with_copies=False)
    rebuild(builder.store)
    assert begin_of(builder.store) == 3


def test_what_was_truncated_before_the_copy_was_made_does_not_come_back():
    builder = full_of_facts()
    builder.truncate(4)
    builder.journal.write_checkpoint(force=True)
    before = builder.journal.state.queues
    lose_journal(builder.store, with_copies=False)
    rebuild(builder.store)
    assert queues_of(builder.store) == before


def test_what_expired_after_the_copy_and_was_deleted_is_asked_about():
    """The copy names it, and nothing tells that it had expired: it must neither be readable nor be forgotten in silence."""
    builder = full_of_facts()
    builder.journal.write_checkpoint(force=True)
    (first, *_) = builder.journal.state.queues[QUEUE][-1].parts()
    expire(builder)
    builder.store.delete(PREFIX + first.bundle.key)
    lose_journal(builder.store, with_copies=False)
    assert [(loss.start, loss.end) for loss in plan_of(builder.store).rebuilt.losses] == [(0, 3)]
    rebuild(builder.store, accept_gaps=True)
    assert begin_of(builder.store) == 3


def test_a_copy_that_fails_keeps_nobody_from_writing():
    rule = Rule(Fault.UNAVAILABLE, frozenset({"put"}), MIRROR + "journal", times=None)
    builder = TierBuilder(FaultyStore(MemoryStore(), random.Random(1), rule))
    builder.add([b"a"])
    assert builder.journal.write_checkpoint(force=True)
    assert builder.journal.unmirrored == 1
    builder.add([b"b"])
    assert copies(builder.store) == []
    assert_whole(builder.store)


def test_gc_trims_copies_as_the_journal_but_for_the_newest_two():
    builder = TierBuilder()
    for _ in range(4):
        builder.add([b"a"])
        builder.journal.write_checkpoint(force=True)
    numbers = copies(builder.store)
    assert len(numbers) == 4
    state = builder.journal.state

    def deleted(bound: int) -> list[int]:
        known = KnownObjects(
            prefix=PREFIX, state=state, base=state, protected=set(), once_named=set(),
            bound=bound, epoch=state.epoch, old_ms=10, now_ms=10,
        )  # fmt: skip
        listed = [ObjectInfo(info.key, info.size_bytes, 1) for info in builder.store.list(PREFIX)]
        plan = plan_orphans(listed, [], known, limit=99)
        assert plan.left.unknown == 0
        found = (parse_journal_key(PREFIX + MIRROR, one.key) for one in plan.deletions)
        return [one[0] for one in found if one]

    assert deleted(0) == []
    assert deleted(numbers[1]) == numbers[:1]
    assert deleted(numbers[3] + 1) == numbers[:2]
