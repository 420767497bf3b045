"""A rebuilt journal says what the lost one said, as far as objects can tell; and never what no one wrote."""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journals import PREFIX
from support.merging import gather, make, merger_of, runs_of
from support.rebuilding import (
    apply,
    assert_whole,
    damage,
    lose_journal,
    plan_of,
    rebuild,
    state_of,
)
from support.tiers import QUEUE, TierBuilder, batch_of

from backends.errors import AlreadyExistsError
from backends.memory import MemoryStore
from tiered.clock import ManualClock
from tiered.errors import DataError, FencedError, InvalidError, MovedOnError, OtherVersionError
from tiered.format.bundle import FOOTER_BYTES
from tiered.journal.entry import Entry, encode_entry
from tiered.journal.lease import Holder, Lease
from tiered.journal.replay import JournalReader
from tiered.keys import entry_key, mount_prefix
from tiered.log.bundles import Refused, Tabled, read_bundle_table
from tiered.log.history import named_bundles
from tiered.log.merge import MergeOutput, MergeRun
from tiered.log.parts import Parts
from tiered.log.rebuilt_state import REBUILT_STRIDE
from tiered.log.state import TierMachine, queue_action
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.log.parts import Incarnation, TierState

OTHER = MessageQueue("other", 0)


def told(state: TierState) -> dict[MessageQueue, tuple[Incarnation, ...]]:
    """What objects can tell."""
    return {
        queue: tuple(
            replace(
                incarnation,
                gaps=tuple(replace(gap, reason="") for gap in incarnation.gaps),
                ended="over" if incarnation.ended else "",
                quarantined=0,  # the builder's journal does not count
                cut_by=0,
                segments=tuple(replace(segment, created_ms=0) for segment in incarnation.segments),
            )
            for incarnation in incarnations
        )
        for queue, incarnations in state.queues.items()
    }


# -- the same again -----------------------------------------------------------------------------


def small_tier() -> TierBuilder:
    builder = TierBuilder()
    builder.add([b"a", (3, b"inner"), b"c" * 200])
    builder.add([b"d", None, b"e"], roll=True)
    builder.add([b"x"], queue=OTHER, first=7)
    builder.gap(4)
    builder.add([b"after"])
    builder.add([b"last", None], queue=OTHER)
    return builder


def test_a_lost_journal_comes_back():
    builder = small_tier()
    lose_journal(builder.store)
    before = builder.journal.state
    plan = rebuild(builder.store)
    assert plan.damage.startswith("there is no journal")
    assert (plan.rebuilt.losses, plan.rebuilt.orphans, plan.refused) == ([], [], [])
    after = state_of(builder.store)
    assert told(after) == told(before)
    assert after.epoch == before.epoch + 1
    assert [incarnations[0].quarantined for incarnations in after.queues.values()] == [1, 1]
    assert_whole(builder.store)


def test_a_journal_that_can_be_read_is_left_alone():
    builder = small_tier()
    plan = plan_of(builder.store)
    assert plan.damage == ""
    lose_journal(builder.store)
    rebuild(builder.store)
    assert plan_of(builder.store).damage == ""


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["part", "part", "part", "roll", "hole", "gap", "incarnation", "epoch", "merge"]
        ),
        st.integers(0, 2),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=14,
)


def play(steps: list[Step], checkpoints: frozenset[int] = frozenset()) -> TierBuilder:
    """A tier without orphans, whose queues end with messages; with checkpoints before some of the steps."""
    builder = TierBuilder()
    touched: dict[MessageQueue, bool] = {}
    for number, (what, which, size) in enumerate(steps):
        queue = MessageQueue("topic", which)
        if number in checkpoints:
            builder.journal.write_checkpoint(force=True)
        if what == "epoch":
            builder = TierBuilder(builder.store, writer=f"{number:08x}")
            continue
        if what == "merge":
            old = set(named_bundles(builder.journal.state))
            if old:
                gather(builder, 1 + which)
            for key in old if size % 2 else ():
                builder.store.delete(PREFIX + key)
            continue
        if what in {"gap", "incarnation"}:
            if not touched.get(queue):
                continue  # neither a gap at the beginning nor an empty incarnation leaves an object
            if what == "gap":
                builder.gap(size, queue=queue)
            else:
                incarnation = builder.journal.state.incarnation(queue)
                assert incarnation
                following = incarnation.number + 1
                builder.say(queue_action("incarnation", queue, following, start=size, reason="new"))
                builder._files.pop(queue, None)
            touched[queue] = False
            continue
        items = [None if what == "hole" and n % 2 else b"%d-%d" % (number, n) for n in range(size)]
        builder.add(items, queue=queue, first=3 * which, roll=what == "roll")
        touched[queue] = True
    for queue, is_whole in touched.items():
        if not is_whole:
            builder.add([b"end"], queue=queue)
    return builder


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_without_orphans_the_rebuilt_state_is_the_lost_one(steps: list[Step]):
    builder = play(steps)
    before = builder.journal.state
    lose_journal(builder.store)
    plan = plan_of(builder.store)
    if not before.queues:
        assert plan.damage == ""
        return
    apply(plan, builder.store)
    assert told(state_of(builder.store)) == told(before)
    assert_whole(builder.store)


@settings(deadline=None, max_examples=60)
@given(STEPS, st.data())
def test_with_a_damaged_entry_too(steps: list[Step], draw: st.DataObject):
    builder = play(steps)
    before, store = builder.journal.state, builder.store
    number = draw.draw(st.integers(1, builder.journal.number))
    damage(store, number)
    plan = plan_of(store)
    assert plan.damage
    apply(plan, store)
    assert told(state_of(store)) == told(before)


@settings(deadline=None, max_examples=60)
@given(STEPS, st.frozensets(st.integers(0, 13), min_size=1, max_size=3))
def test_with_copies_of_checkpoints_however_old_too(steps: list[Step], copied: frozenset[int]):
    builder = play(steps, copied)
    before, store = builder.journal.state, builder.store
    if not before.queues:
        return
    lose_journal(store, with_copies=False)
    rebuild(store)
    assert told(state_of(store)) == told(before)
    assert_whole(store)


# -- what the readable beginning tells ----------------------------------------------------------


def test_reasons_and_times_of_the_readable_beginning_are_kept():
    builder = small_tier()
    builder.add([b"more"])
    store, number = builder.store, builder.journal.number
    store.delete(entry_key(PREFIX, number))
    store.put_if_absent(entry_key(PREFIX, number), b"{}")
    before = builder.journal.state
    rebuild(store)
    after = state_of(store)
    assert after.queues[QUEUE][0].gaps == before.queues[QUEUE][0].gaps
    assert after.store == before.store
    assert [s.created_ms for s in after.queues[QUEUE][0].segments] == [
        s.created_ms for s in before.queues[QUEUE][0].segments
    ]


# -- orphans ------------------------------------------------------------------------------------


def unnamed_part(builder: TierBuilder, items: list[bytes | None]) -> str:
    """A bundle that no entry names; its key."""
    stored = builder.put(builder.take(batch_of(builder.file().append_offset, items)))
    builder.forget()
    return stored.bundle.key


def test_what_a_later_writer_wrote_rules_over_what_an_older_one_left():
    builder = TierBuilder()
    builder.add([b"a", b"b"])
    unnamed_part(builder, [b"c", b"d", b"e"])
    later = TierBuilder(builder.store, writer="11111111")
    later.add([b"c", b"d"])
    later.add([b"e", b"f"])
    before = later.journal.state
    lose_journal(builder.store)
    plan = rebuild(builder.store)
    assert len(plan.rebuilt.orphans) == 1
    assert told(state_of(builder.store)) == told(before)
    assert_whole(builder.store)


def test_a_second_try_of_the_same_part_rules():
    builder = TierBuilder()
    unnamed_part(builder, [b"a", b"b"])
    builder.add([b"a", b"b"])
    before = builder.journal.state
    lose_journal(builder.store)
    rebuild(builder.store)
    assert told(state_of(builder.store)) == told(before)


def test_of_a_round_that_was_never_named_nothing_wins_over_what_was_written_in_its_place():
    """Two queues shared the bundle; only one of them was written again."""
    builder = TierBuilder()
    builder.add([b"a"])
    builder.add([b"x"], queue=OTHER)
    rounds = batch_of(1, [b"b", b"c"]), batch_of(1, [b"y"], queue=OTHER)
    orphan = builder.put(*sorted(map(builder.take, rounds), key=lambda one: one.queue))
    builder.forget()
    later = TierBuilder(builder.store, writer="11111111")
    later.add([b"b"])
    later.add([b"y", b"z"], queue=OTHER)
    before = later.journal.state
    lose_journal(builder.store)
    plan = rebuild(builder.store)
    assert plan.rebuilt.orphans == [orphan.bundle.key]
    assert told(state_of(builder.store)) == told(before)


# -- merges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("level", [1, 3])
def test_merged_sections_stand_for_what_they_were_made_of(deleted: bool, level: int):
    builder = small_tier()
    old = set(named_bundles(builder.journal.state))
    gather(builder, level)
    builder.add([b"behind"])
    before = builder.journal.state
    for key in old if deleted else ():
        builder.store.delete(PREFIX + key)
    lose_journal(builder.store)
    plan = rebuild(builder.store)
    assert set(plan.rebuilt.orphans) == (set() if deleted else old)
    assert told(state_of(builder.store)) == told(before)
    assert_whole(builder.store)


def test_a_merge_that_made_one_segment_of_two():
    """What is behind the run in the second segment stays as it was, and says still that it is of that."""
    builder = TierBuilder()
    builder.add([b"a" * 50])
    builder.add([b"b" * 50], roll=True)
    builder.add([b"c" * 50])
    builder.add([b"d" * 50], roll=True)
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert incarnation
    run = MergeRun(
        QUEUE,
        0,
        0,
        0,
        Parts.joined((incarnation.segments[0].parts, incarnation.segments[1].parts[:1])),
    )
    make(builder, MergeOutput(1, (run,)))
    before = builder.journal.state
    assert [len(segment.parts) for segment in before.queues[QUEUE][0].segments] == [2, 1]
    lose_journal(builder.store)
    rebuild(builder.store)
    assert told(state_of(builder.store)) == told(before)
    assert_whole(builder.store)


@pytest.mark.parametrize("has_old", [True, False])
def test_a_merge_that_came_too_late_for_what_was_truncated_is_no_history(has_old: bool):
    """It was gathered before the broker truncated the tail, and uploaded behind what was written in its place."""
    builder = TierBuilder()
    for bodies in ([b"a", b"b"], [b"c", b"d"]):
        builder.add(bodies)
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert incarnation
    output = MergeOutput(1, (MergeRun(QUEUE, 0, 0, 0, incarnation.parts()),))
    builder.truncate(2)
    builder.add([b"C"], roll=True)
    if not has_old:  # the tail has been merged since: only so it is known what was truncated
        tails = [run for run in runs_of(builder.journal.state) if run.truncated]
        make(builder, MergeOutput(1, tuple(tails)))
        builder.store.delete(PREFIX + incarnation.parts()[1].bundle.key)
        output_store = TierBuilder(MemoryStore())
        for bodies in ([b"a", b"b"], [b"c", b"d"]):
            output_store.add(bodies)
        for info in output_store.store.list(PREFIX + "bundle/"):
            with suppress(AlreadyExistsError):
                builder.store.put_if_absent(info.key, output_store.store.get(info.key))
    made = merger_of(builder).make(output, lambda: False)
    assert made
    if not has_old:
        builder.store.delete(PREFIX + incarnation.parts()[1].bundle.key)
    before = builder.journal.state
    lose_journal(builder.store)
    plan = rebuild(builder.store)
    after = state_of(builder.store)
    assert made.stored.bundle.key in plan.rebuilt.orphans
    assert told(after)[QUEUE][-1] == told(before)[QUEUE][-1]
    assert_whole(builder.store)


def test_what_a_merge_found_truncated_stays_readable():
    builder = TierBuilder()
    builder.add([b"a", b"b"])
    builder.add([b"c", b"d"])
    builder.truncate(3)
    builder.add([b"D", b"E"], roll=True)
    gather(builder)
    before = builder.journal.state
    lose_journal(builder.store)
    rebuild(builder.store)
    (tail, incarnation), (old, wanted) = told(state_of(builder.store))[QUEUE], told(before)[QUEUE]
    assert incarnation == wanted
    assert replace(tail, segments=old.segments) == old
    assert tail.parts() == old.parts()
    assert_whole(builder.store)


# -- tables that are damaged --------------------------------------------------------------------


def flip(store: ObjectStore, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 0x10
    store.delete(key)
    store.put_if_absent(key, bytes(data))


@pytest.mark.parametrize("packs", [False, True])
def test_a_damaged_footer_costs_nothing_and_is_said(packs: bool):
    builder = small_tier()
    if packs:
        old = named_bundles(builder.journal.state)
        gather(builder)
        for key in old:
            builder.store.delete(PREFIX + key)
    before = builder.journal.state
    bundles = named_bundles(before)
    for number, bundle in enumerate(bundles.values()):
        flip(builder.store, PREFIX + bundle.key, bundle.size_bytes - 1 - number % FOOTER_BYTES)
    lose_journal(builder.store)
    plan = rebuild(builder.store)
    assert plan.refused == []
    said = [note for note in plan.rebuilt.notes if "proves itself" in note]
    assert {note.partition(":")[0] for note in said} == set(bundles)
    assert told(state_of(builder.store)) == told(before)


def test_every_flipped_bit_of_a_tail_gives_the_same_or_is_refused():
    """Nothing is made up."""
    builder = TierBuilder()
    builder.add_round(batch_of(0, [b"x", b"y"], queue=OTHER), batch_of(0, [b"a"]))
    lose_journal(builder.store)
    (info,) = list(builder.store.list(PREFIX + "bundle/"))
    wanted = read_bundle_table(builder.store, PREFIX, info)
    assert isinstance(wanted, Tabled)
    size = max(p.section.start + p.section.size_bytes for p in wanted.named.parts)
    refused = 0
    for at in range(size, info.size_bytes):
        flip(builder.store, info.key, at)
        found = read_bundle_table(builder.store, PREFIX, info)
        flip(builder.store, info.key, at)
        if isinstance(found, Refused):
            refused += 1
            continue
        assert found.salvaged
        assert replace(found, salvaged="") == wanted
    assert refused >= info.size_bytes - size - FOOTER_BYTES - 5


def test_a_damaged_table_is_no_loss_where_the_journal_still_names_the_bundle():
    builder = small_tier()
    builder.journal.write_checkpoint(force=True)
    builder.add([b"behind"])
    before = builder.journal.state
    bundle = before.queues[QUEUE][0].parts()[0].bundle
    data = builder.store.get(PREFIX + bundle.key)
    table = bytes(data).rindex(b"\x28\xb5\x2f\xfd")
    flip(builder.store, PREFIX + bundle.key, table)
    damage(builder.store, builder.journal.number)
    plan = rebuild(builder.store)
    assert [one.key for one in plan.refused] == [bundle.key]
    assert told(state_of(builder.store)) == told(before)


def test_sections_of_a_damaged_bundle_whose_table_is_sound_are_kept_and_verify_says_what_is_lost():
    builder = small_tier()
    before = builder.journal.state
    part = before.queues[QUEUE][0].parts()[0]
    flip(builder.store, PREFIX + part.bundle.key, part.section.start + 100)
    lose_journal(builder.store)
    rebuild(builder.store)
    assert told(state_of(builder.store)) == told(before)
    assert {p.kind for p in verify_tier(builder.store, PREFIX, deep=True).problems} >= {"block"}


# -- losses -------------------------------------------------------------------------------------


def test_missing_objects_are_a_gap_only_if_the_person_says_so():
    builder = TierBuilder()
    for body in (b"a", b"b", b"c"):
        builder.add([body] * 3)
    middle = builder.journal.state.queues[QUEUE][0].parts()[1]
    builder.store.delete(PREFIX + middle.bundle.key)
    lose_journal(builder.store)
    plan = plan_of(builder.store)
    (loss,) = plan.rebuilt.losses
    assert (loss.queue, loss.start, loss.end) == (QUEUE, 3, 6)
    assert loss.log_bytes == middle.log.size_bytes
    with pytest.raises(InvalidError, match="accept-gaps"):
        apply(plan, builder.store)
    apply(plan, builder.store, accept_gaps=True)
    incarnation = state_of(builder.store).queues[QUEUE][0]
    assert [(gap.start, gap.end) for gap in incarnation.gaps] == [(3, 6)]
    assert_whole(builder.store)


def test_a_lost_beginning_is_said():
    builder = TierBuilder()
    first = builder.add([b"a", b"b"])
    builder.add([b"c"])
    builder.store.delete(PREFIX + first.bundle.key)
    lose_journal(builder.store)
    plan = rebuild(builder.store)
    assert "expired or are lost" in plan.rebuilt.notes[0]
    assert state_of(builder.store).queues[QUEUE][0].min_offset == 2
    assert_whole(builder.store)


# -- fencing ------------------------------------------------------------------------------------


def test_a_writer_of_the_old_history_is_fenced():
    builder = small_tier()
    lose_journal(builder.store)
    rebuild(builder.store)
    after = state_of(builder.store)
    with pytest.raises(FencedError):
        builder.say(queue_action("gap", QUEUE, 0, start=12, end=13, reason="zombie"))
    assert state_of(builder.store) == after


def test_a_writer_goes_on_after_a_rebuild():
    builder = small_tier()
    lose_journal(builder.store)
    rebuild(builder.store)
    later = TierBuilder(builder.store, writer="22222222")
    assert later.journal.number == REBUILT_STRIDE + 1
    later.add([b"more"])
    later.journal.write_checkpoint(force=True)
    assert state_of(builder.store).queues[QUEUE][0].commit_offset == 14
    assert_whole(builder.store)


def test_it_can_be_done_again():
    builder = small_tier()
    for _ in range(3):
        lose_journal(builder.store)
        before = rebuild(builder.store)
    assert before.rebuilt.state.epoch == 4  # none is given twice: the lease remembers
    store = builder.store
    assert before.number == 3 * REBUILT_STRIDE
    key = PREFIX + f"journal/{before.number:020d}.checkpoint"
    store.delete(key)
    store.put_if_absent(key, b"damaged")
    assert rebuild(store).number == 4 * REBUILT_STRIDE
    assert_whole(store)


def test_a_held_lease_and_a_tier_that_moved_on_are_refused():
    builder = small_tier()
    lose_journal(builder.store)
    plan = plan_of(builder.store)
    holder = Holder("elsewhere", "b", "s", 1, 1)
    lease = Lease(
        builder.store, PREFIX, writer="33333333", holder=holder, seconds=10, clock=ManualClock()
    )
    assert lease.try_acquire() is None
    with pytest.raises(FencedError, match="lease"):
        apply(plan, builder.store)
    lease.release()
    builder.store.put_if_absent(PREFIX + "queue/strange", b"")
    with pytest.raises(InvalidError, match="moved on"):
        apply(plan, builder.store)
    assert list(builder.store.list(PREFIX + "journal/")) == []


def test_a_mount_at_work_does_not_keep_a_rebuild_from_its_end():
    """It writes where groups are, into a journal of its own, as long as it is open."""
    builder = small_tier()
    before = builder.journal.state
    lose_journal(builder.store)
    plan = plan_of(builder.store)
    builder.store.put_if_absent(entry_key(mount_prefix(PREFIX, "b"), 7), b"entry")
    apply(plan, builder.store)
    assert told(state_of(builder.store)) == told(before)


def test_of_two_rebuilds_one_wins():
    builder = small_tier()
    lose_journal(builder.store)
    one, two = plan_of(builder.store), plan_of(builder.store)
    apply(one, builder.store)
    before = list(builder.store.list(PREFIX + "journal/"))
    apply(two, builder.store, seed=6)  # the same plan: it was applied before
    assert list(builder.store.list(PREFIX + "journal/")) == before
    TierBuilder(builder.store, writer="11111111").add([b"more"], queue=MessageQueue("t", 1))
    lose_journal(builder.store)
    with pytest.raises(MovedOnError, match="has other objects"):
        apply(two, builder.store, seed=7)


# -- garbage ------------------------------------------------------------------------------------


def test_garbage_is_named_and_harms_nothing():
    builder = small_tier()
    before = builder.journal.state
    key = before.queues[QUEUE][0].parts()[0].bundle.key
    data = builder.store.get(PREFIX + key)
    bad = key.replace("-0badcafe-", "-deadbeef-")
    builder.store.put_if_absent(PREFIX + bad, b"TBDL" * 10)
    foreign = key.replace("bundle/0/", "bundle/4/"), key.replace("bundle/", "topic/elsewhere/")
    far = f"queue/topic/{3:010d}/{9_999_999_999:010d}/{0:020d}" + key[-31:]
    for one in (*foreign, far):
        builder.store.put_if_absent(PREFIX + one, data)
    lose_journal(builder.store)
    with pytest.raises(InvalidError, match="--accept-unread"):
        rebuild(builder.store)
    plan = rebuild(builder.store, accept_unread=True)
    assert {one.key for one in plan.refused} == {bad, far, *foreign}
    assert told(state_of(builder.store)) == told(before)


def test_a_number_without_a_successor_is_said():
    builder = small_tier()
    builder.store.put_if_absent(PREFIX + "journal/" + "9" * 20, b"x")
    with pytest.raises(DataError, match="delete that object"):
        plan_of(builder.store)


def test_readers_jump_to_the_rebuilt_state():
    builder = small_tier()
    reader = JournalReader(builder.store, PREFIX, TierMachine())
    reader.catch_up()
    damage(builder.store, builder.journal.number)
    rebuild(builder.store)
    reader.catch_up()
    assert reader.number == REBUILT_STRIDE
    assert reader.state == state_of(builder.store)
    assert QueueOffset(13) == reader.state.queues[QUEUE][0].commit_offset


# -- what brokers truncated ---------------------------------------------------------------------


@pytest.mark.parametrize("end", [3, 4])
@pytest.mark.parametrize("more", [0, 1, 2, 5])
@pytest.mark.parametrize("all_lost", [False, True])
def test_a_tail_that_was_truncated_stays_so(end: int, more: int, all_lost: bool):
    builder = TierBuilder()
    builder.add([b"a", b"b", b"c"])
    builder.add([b"d", b"e", b"f"])
    builder = TierBuilder(builder.store, writer="11111111")
    builder.truncate(end, reason="power failure")
    builder.journal.write_checkpoint(force=True)
    for number in range(more):
        builder.add([b"other%d" % number], roll=number == 0)
    store, before = builder.store, builder.journal.state
    if all_lost:
        if not more:
            return  # nothing tells
        lose_journal(store)
    else:
        builder.add([b"last"], roll=not more)
        before = builder.journal.state
        damage(store, builder.journal.number)
    rebuild(store)
    after = state_of(store)
    present, wanted = after.queues[QUEUE][-1], before.queues[QUEUE][-1]
    assert present.parts() == wanted.parts()
    assert (present.commit_offset, present.log_end) == (wanted.commit_offset, wanted.log_end)
    if not all_lost:
        assert [incarnation.ended for incarnation in after.queues[QUEUE]] == ["power failure", ""]
    assert_whole(store)


@pytest.mark.parametrize("end", [3, 4, 5])
@pytest.mark.parametrize("left_out", [1, 2, 3, 6])
def test_what_was_kept_of_a_section_is_found_before_a_gap(end: int, left_out: int):
    """What came behind the gap begins, by its log offset, in the midst of that section, wherever its queue offsets end."""
    builder = TierBuilder()
    builder.add([b"a", b"b", b"c", None, b"e", b"f"])
    builder = TierBuilder(builder.store, writer="11111111")
    builder.truncate(end, reason="power failure")
    builder.gap(left_out)
    builder.add([b"other"])
    before = builder.journal.state.queues[QUEUE][-1]
    lose_journal(builder.store)
    rebuild(builder.store)
    after = state_of(builder.store).queues[QUEUE][-1]
    kept, behind = after.parts()
    assert behind == before.parts()[1]
    assert kept.log_bytes == before.parts()[0].log_bytes
    assert kept.queue_end in (
        {5} if end == 5 else {3, 4}
    )  # nobody tells whether the item without a message stayed
    assert_whole(builder.store)


# -- what is spoken of and not found -------------------------------------------------------------


def test_a_bundle_of_which_only_an_entry_behind_the_damage_tells_is_not_forgotten():
    """Nothing of it is left but its name: without a word the queue would end before it."""
    builder = small_tier()
    builder.add([b"before"])
    damaged = builder.journal.number
    builder.add([b"behind"])
    last = builder.journal.state.queues[QUEUE][0].parts()[-1].bundle
    damage(builder.store, damaged)
    builder.store.delete(PREFIX + last.key)
    plan = plan_of(builder.store)
    (told,) = plan.unread
    assert told.key == last.key
    before = {info.key: builder.store.get(info.key) for info in builder.store.list("")}
    with pytest.raises(InvalidError, match="--accept-unread"):
        apply(plan, builder.store)
    assert before == {info.key: builder.store.get(info.key) for info in builder.store.list("")}
    apply(plan, builder.store, accept_unread=True)
    incarnation = state_of(builder.store).queues[QUEUE][0]
    assert incarnation.commit_offset == builder.journal.state.queues[QUEUE][0].commit_offset - 1


@pytest.mark.parametrize(
    "actions", [[{"do": "from the future"}], [{"do": "part"}], [{"do": "part", "bundles": [[]]}]]
)
def test_an_entry_of_another_version_behind_the_damage_stops_a_rebuild(actions: list[Any]):
    builder = small_tier()
    damage(builder.store, builder.journal.number)
    number = builder.journal.number + 1
    later = encode_entry(Entry(number, 1, "0badcafe", 0, actions, 7))
    builder.store.put_if_absent(entry_key(PREFIX, number), later)
    with pytest.raises(OtherVersionError, match=f"entry {number}"):
        plan_of(builder.store)


def test_a_bundle_of_another_version_stops_a_rebuild():
    builder = small_tier()
    builder.add([b"x"])
    bundle = builder.journal.state.queues[QUEUE][0].parts()[-1].bundle
    data = bytearray(builder.store.get(PREFIX + bundle.key))
    data[-FOOTER_BYTES + 21] = 9  # the low byte of its format number
    data[-8:-4] = zlib.crc32(data[-FOOTER_BYTES:-8]).to_bytes(4, "big")
    builder.store.delete(PREFIX + bundle.key)
    builder.store.put_if_absent(PREFIX + bundle.key, bytes(data))
    lose_journal(builder.store)
    with pytest.raises(OtherVersionError, match="format version 9"):
        plan_of(builder.store)
