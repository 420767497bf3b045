"""What a rebuilt journal makes of objects that are gone: nothing that the readable one knows is silently forgotten (I12).

And nothing that was given up (expired, truncated, on record as a gap) is called lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journals import PREFIX
from support.merging import gather
from support.rebuilding import (
    apply,
    assert_whole,
    damage,
    plan_of,
    rebuild,
    state_of,
)
from support.tiers import QUEUE, TierBuilder

from tiered.errors import InvalidError
from tiered.keys import maker_of
from tiered.log.history import named_bundles
from tiered.log.rebuilt_state import (
    EXPIRED_GAP,
    LOST_GAP,
    BuiltIncarnation,
    KnownIncarnation,
    RebuildCandidate,
    build_incarnation,
)
from tiered.log.state import queue_action
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.log.parts import Incarnation, Part
    from tiered.upkeep.rebuild import RebuildPlan

OTHER = MessageQueue("other", 0)
LOST, SAID = LOST_GAP, "made so"


def three(*, roll: bool = False) -> TierBuilder:
    """Three parts of three messages each."""
    builder = TierBuilder()
    for body in (b"a", b"bb", b"ccc"):
        builder.add([body] * 3, roll=roll and body != b"a")
    return builder


def incarnation_of(builder: TierBuilder) -> Incarnation:
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert incarnation
    return incarnation


def lose(builder: TierBuilder, *parts: Part) -> None:
    """Have the bundles of parts be gone."""
    for part in parts:
        builder.store.delete(PREFIX + part.bundle.key)


def lose_end(builder: TierBuilder) -> None:
    """Have the last entry be damaged: of another queue, so that of this one all is known."""
    builder.add([b"x"], queue=OTHER)
    damage(builder.store, builder.journal.number)


def expire(builder: TierBuilder, start: int, end: int, *, incarnation: int = 0) -> None:
    place = {"position": incarnation, "min_from": start, "min_to": end}
    builder.say(queue_action("expire", QUEUE, 0, **place))


def spans(plan: RebuildPlan) -> list[tuple[int, int]]:
    assert {(loss.queue, loss.incarnation) for loss in plan.rebuilt.losses} <= {(QUEUE, 0)}
    return [(loss.start, loss.end) for loss in plan.rebuilt.losses]


def gaps(incarnation: Incarnation) -> list[tuple[int, int, str]]:
    return [(gap.start, gap.end, gap.reason) for gap in incarnation.gaps]


# -- one incarnation -----------------------------------------------------------------------------------


def built(
    known: Incarnation | None, left: Sequence[Part], low: int = 0, there_end: int | None = None
) -> BuiltIncarnation:
    """The incarnation that is made when only some parts are left of what the journal knows."""
    makers = ((part, maker_of(part.bundle.key)) for part in left)
    chain = [
        RebuildCandidate((*made.age, True), part, part.log_offset, False, False, -1)
        for part, made in makers
        if made
    ]
    told = KnownIncarnation.of(known, chain, low)
    if told and there_end is not None:
        told = replace(told, there_end=there_end)
    return build_incarnation(chain, QUEUE, 0, told)


@pytest.mark.parametrize(
    ("left", "lost", "low"),
    [
        ((), (0, 9), 9),
        ((0, 1), (6, 9), 0),
        ((0,), (3, 9), 0),
        ((1, 2), (0, 3), 3),
        ((0, 2), (3, 6), 0),
    ],
)
def test_what_is_lost_of_an_incarnation_is_a_gap_and_the_incarnation_goes_on_where_it_did(
    left: tuple[int, ...], lost: tuple[int, int], low: int
):
    known = incarnation_of(three())
    parts = list(known.parts())
    made = built(known, [parts[at] for at in left])
    (loss,) = made.losses
    assert (loss.start, loss.end) == lost
    assert loss.log_bytes == sum(p.log_bytes for at, p in enumerate(parts) if at not in left)
    assert made.incarnation
    assert gaps(made.incarnation) == [(*lost, LOST)]
    end = (made.incarnation.min_offset, made.incarnation.commit_offset, made.incarnation.log_end)
    assert end == (low, known.commit_offset, known.log_end)
    assert list(made.incarnation.parts()) == [parts[at] for at in left]
    assert made.notes == []


def test_both_ends_may_be_lost():
    known = incarnation_of(three())
    made = built(known, [known.parts()[1]])
    assert [(loss.start, loss.end) for loss in made.losses] == [(0, 3), (6, 9)]


def test_without_a_journal_nobody_knows_of_the_ends():
    parts = list(incarnation_of(three()).parts())
    made = built(None, parts[1:2])
    assert (made.losses, made.incarnation is not None) == ([], True)
    assert "have expired or are lost" in made.notes[0]
    assert built(None, []).incarnation is None


def test_gaps_on_record_are_no_losses_and_keep_their_reasons():
    builder = TierBuilder()
    builder.gap(2)
    builder.add([b"a"] * 2)
    builder.gap(3)
    second = builder.add([b"bb"] * 2)
    builder.gap(1)
    known = incarnation_of(builder)
    recorded = [(0, 2, SAID), (4, 7, SAID), (9, 10, SAID)]
    for left in ([], [second], list(known.parts())):
        made = built(known, left)
        assert made.incarnation
        lost = [(loss.start, loss.end) for loss in made.losses]
        assert lost == [(2, 4), (7, 9)][: 2 - len(left)]
        assert gaps(made.incarnation) == sorted([*recorded, *((*one, LOST) for one in lost)])
        assert made.incarnation.commit_offset == 10
        sizes = [part.log_bytes for part in known.parts()][: 2 - len(left)]
        assert [loss.log_bytes for loss in made.losses] == sizes


@pytest.mark.parametrize("low", [3, 6, 9])
def test_what_has_expired_is_not_lost(low: int):
    known = incarnation_of(three())
    parts = [part for part in known.parts() if part.queue_offset >= low]
    made = built(known, parts, low)
    assert made.losses == []
    assert made.incarnation
    assert (made.incarnation.min_offset, made.incarnation.commit_offset) == (low, 9)
    assert (made.incarnation.gaps, made.incarnation.log_end) == ((), known.log_end)


def test_objects_of_what_has_expired_may_be_there_and_others_of_it_not():
    known = incarnation_of(three())
    made = built(known, list(known.parts())[::2], 5)
    assert made.incarnation
    assert gaps(made.incarnation) == [(3, 5, EXPIRED_GAP), (5, 6, LOST)]
    assert [(loss.start, loss.end) for loss in made.losses] == [(5, 6)]
    made = built(known, list(known.parts())[::2], 6)
    assert made.incarnation
    assert (gaps(made.incarnation), made.losses) == ([(3, 6, EXPIRED_GAP)], [])


def test_behind_what_has_expired_there_may_be_a_loss():
    known = incarnation_of(three())
    made = built(known, [known.parts()[2]], 3)
    assert [(loss.start, loss.end) for loss in made.losses] == [(3, 6)]
    assert made.incarnation
    assert (gaps(made.incarnation), made.incarnation.min_offset) == ([(3, 6, LOST)], 6)


def test_an_incarnation_that_had_nothing_left_is_as_it_was():
    builder = three()
    expire(builder, 0, 9)
    known = incarnation_of(builder)
    made = built(known, [])
    assert (made.incarnation, made.losses, made.notes) == (known, [], [])


def test_an_end_that_is_there_and_was_not_chosen_was_truncated():
    known = incarnation_of(three())
    made = built(known, list(known.parts())[:1], there_end=9)
    assert made.losses == []
    assert made.incarnation
    assert (made.incarnation.commit_offset, made.incarnation.gaps) == (3, ())
    assert "the next writer goes on before them" in made.notes[0]


@pytest.mark.parametrize(
    ("rank", "lost"),
    [((2, 1, 0, False), []), ((1, 9, 0, False), []), ((1, 1, 0, False), [(4, 9)])],
    ids=["a later epoch", "the same, later", "a first try in vain"],
)
def test_an_end_was_truncated_where_something_newer_begins_before_it(
    rank: tuple[int, int, int, bool], lost: list[tuple[int, int]]
):
    known = incarnation_of(three())
    first, second = known.parts()[0], known.parts()[1]
    short = replace(second, count=1, log_bytes=second.log_bytes // 3)
    chain = [
        RebuildCandidate((1, 1, 0, True), first, 0, False, False, -1),
        RebuildCandidate(rank, short, short.log_offset, False, False, -1),
    ]
    made = build_incarnation(chain, QUEUE, 0, KnownIncarnation.of(known, chain[:1], 0))
    assert [(loss.start, loss.end) for loss in made.losses] == lost
    assert made.incarnation
    assert made.incarnation.commit_offset == (9 if lost else 4)


# -- a journal whose end is damaged ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "lost"), [((), (0, 9)), ((0, 1), (6, 9)), ((1, 2), (0, 3)), ((0, 2), (3, 6))]
)
def test_a_loss_that_the_journal_knows_must_be_accepted(
    left: tuple[int, ...], lost: tuple[int, int]
):
    builder = three()
    before, parts = incarnation_of(builder), list(incarnation_of(builder).parts())
    lose_end(builder)
    lose(builder, *(part for at, part in enumerate(parts) if at not in left))
    plan = plan_of(builder.store)
    assert spans(plan) == [lost]
    words = rf"{QUEUE} incarnation 0 queue offsets \[{lost[0]}, {lost[1]}\).*accept-gaps"
    with pytest.raises(InvalidError, match=words.replace("-", ".")):
        apply(plan, builder.store)
    apply(plan, builder.store, accept_gaps=True)
    after = state_of(builder.store).queues[QUEUE][0]
    assert gaps(after) == [(*lost, LOST)]
    assert (after.commit_offset, after.log_end) == (before.commit_offset, before.log_end)
    assert_whole(builder.store)
    writer = TierBuilder(builder.store, writer="11111111")
    assert writer.add([b"more"]).queue_offset == 9
    assert_whole(builder.store)
    # What was accepted is on record, and not asked for again.
    writer.add([b"x"], queue=OTHER)
    damage(builder.store, writer.journal.number)
    assert spans(rebuild(builder.store, seed=6)) == []
    assert gaps(state_of(builder.store).queues[QUEUE][0]) == [(*lost, LOST)]
    assert_whole(builder.store)


def test_objects_that_are_restored_before_are_no_loss():
    builder = three()
    before = incarnation_of(builder)
    lose_end(builder)
    key = PREFIX + before.parts()[2].bundle.key
    data = bytes(builder.store.get(key))
    lose(builder, before.parts()[2])
    assert spans(plan_of(builder.store)) == [(6, 9)]
    builder.store.put_if_absent(key, data)
    assert spans(rebuild(builder.store)) == []
    assert state_of(builder.store).queues[QUEUE][0].parts() == before.parts()


def test_what_was_written_behind_the_readable_journal_leads_over_a_lost_end():
    builder = three()
    lost = incarnation_of(builder).parts()[2]
    builder.add([b"behind"])
    damage(builder.store, builder.journal.number)
    lose(builder, lost)
    assert spans(rebuild(builder.store, accept_gaps=True)) == [(6, 9)]
    incarnation = state_of(builder.store).queues[QUEUE][0]
    assert (incarnation.commit_offset, gaps(incarnation)) == (10, [(6, 9, LOST)])
    assert_whole(builder.store)


def test_merged_sections_stand_for_what_is_gone():
    builder = three()
    builder.journal.write_checkpoint(force=True)
    old = list(incarnation_of(builder).parts())
    gather(builder)
    damage(builder.store, builder.journal.number)
    lose(builder, *old)
    assert spans(rebuild(builder.store)) == []
    assert_whole(builder.store)


@pytest.mark.parametrize("ends", [(3,), (3, 6), (9,), (3, 9)])
@pytest.mark.parametrize("is_behind", [False, True])
def test_what_expired_or_was_deleted_with_its_topic_is_no_loss(
    ends: tuple[int, ...], is_behind: bool
):
    """Be it that the readable journal tells it, or a whole entry behind the damage."""
    builder = three(roll=True)
    parts = list(incarnation_of(builder).parts())
    if is_behind:
        lose_end(builder)
    for start, end in zip((0, *ends), ends, strict=False):
        expire(builder, start, end)
    if not is_behind:
        lose_end(builder)
    lose(builder, *(part for part in parts if part.queue_end <= ends[-1]))
    assert spans(rebuild(builder.store)) == []
    incarnation = state_of(builder.store).queues[QUEUE][0]
    assert (incarnation.min_offset, incarnation.commit_offset, incarnation.gaps) == (
        ends[-1],
        9,
        (),
    )
    assert_whole(builder.store)


def test_whether_it_expired_by_the_damaged_entry_nobody_can_tell():
    builder = three(roll=True)
    parts = list(incarnation_of(builder).parts())
    expire(builder, 0, 3)
    damage(builder.store, builder.journal.number)
    lose(builder, parts[0])
    assert spans(plan_of(builder.store)) == [(0, 3)]


def test_an_expiry_behind_the_damage_is_believed_only_of_the_incarnation_that_is_known():
    """What is at its place may be a tail that was truncated meanwhile; and what is garbage is passed over."""
    builder = three(roll=True)
    parts = list(incarnation_of(builder).parts())
    lose_end(builder)
    for incarnation, start, end in ((1, 0, 9), (0, 3, 9), (0, 6, 3), (-1, 0, 9)):
        place = {"position": incarnation, "min_from": start, "min_to": end}
        builder.say(queue_action("expire", QUEUE, 0, **place))
    lose(builder, *parts)
    assert spans(plan_of(builder.store)) == [(0, 9)]


@pytest.mark.parametrize(
    ("is_behind", "is_later", "is_gone"),
    [
        (False, True, False),
        (False, True, True),
        (False, False, False),
        (False, False, True),
        (True, True, False),
        (True, True, True),
        (True, False, True),
    ],
)
@pytest.mark.parametrize("end", [3, 4])
def test_what_was_truncated_is_no_loss(end: int, is_behind: bool, is_later: bool, is_gone: bool):
    """By a later epoch or the same; that the readable journal knows, or behind it; whether its objects are gone or not."""
    builder = three()
    parts = list(incarnation_of(builder).parts())
    later = TierBuilder(builder.store, writer="11111111") if is_later and not is_behind else builder
    if is_behind:
        builder.add([b"x"], queue=OTHER)
        number = builder.journal.number
        later = TierBuilder(builder.store, writer="11111111") if is_later else builder
        damage(builder.store, number)
    later.truncate(end)
    later.add([b"other"], roll=True)
    before = incarnation_of(later)
    if not is_behind:
        lose_end(later)
    lose(builder, *parts[2:] if is_gone else ())
    assert spans(rebuild(builder.store)) == []
    after = state_of(builder.store).queues[QUEUE][-1]
    assert after.parts() == before.parts()
    assert (after.commit_offset, after.log_end, after.gaps) == (end + 1, before.log_end, ())
    assert_whole(builder.store)


def test_of_an_incarnation_that_is_over_what_expired_is_no_loss_and_what_is_gone_is():
    builder = three(roll=True)
    parts = list(incarnation_of(builder).parts())
    expire(builder, 0, 6)
    builder.begin_anew()
    builder.add([b"new"])
    lose_end(builder)
    lose(builder, *parts[:2])
    assert spans(plan_of(builder.store)) == []
    lose(builder, parts[2])
    assert spans(rebuild(builder.store, accept_gaps=True)) == [(6, 9)]
    old, new = state_of(builder.store).queues[QUEUE]
    assert (gaps(old), bool(old.ended)) == ([(6, 9, LOST)], True)
    assert (new.number, new.commit_offset) == (1, 1)
    assert_whole(builder.store)


def test_a_queue_that_never_had_a_message_stays():
    builder = three()
    builder.say(queue_action("incarnation", OTHER, 0, start=5, reason="begins here"))
    builder.add([b"more"])
    damage(builder.store, builder.journal.number)
    assert spans(rebuild(builder.store)) == []
    (incarnation,) = state_of(builder.store).queues[OTHER]
    assert (incarnation.min_offset, incarnation.commit_offset) == (5, 5)


# -- whatever is lost -----------------------------------------------------------------------------


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["part", "part", "part", "roll", "hole", "gap", "merge", "epoch"]),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=9,
)


def play(builder: TierBuilder, steps: list[tuple[str, int]]) -> TierBuilder:
    for number, (what, size) in enumerate(steps):
        if what == "epoch":
            builder = TierBuilder(builder.store, writer=f"{number:08x}")
        elif what == "merge":
            if named_bundles(builder.journal.state):
                gather(builder, size)
        elif what == "gap":
            builder.gap(size)
        else:
            body = None if what == "hole" else b"%d" % number
            builder.add([b"first", *[body] * size], roll=what == "roll")
    return builder


@settings(deadline=None, max_examples=60)
@given(STEPS, STEPS, st.data())
def test_every_offset_that_the_readable_journal_knows_is_a_message_or_a_gap(
    known: list[tuple[str, int]], behind: list[tuple[str, int]], draw: st.DataObject
):
    """I12: whatever objects are gone, and whatever was written behind the damage."""
    builder = play(TierBuilder(), known)
    before = builder.journal.state.incarnation(QUEUE)
    builder.add([b"x"], queue=OTHER)
    damaged = builder.journal.number
    builder = play(builder, behind)
    damage(builder.store, damaged)
    keys = sorted(info.key for info in builder.store.list(PREFIX + "bundle/"))
    gone = draw.draw(st.sets(st.sampled_from(keys)))
    for key in gone:
        builder.store.delete(key)
    plan = plan_of(builder.store)
    if plan.rebuilt.losses:
        with pytest.raises(InvalidError, match="accept-gaps"):
            apply(plan, builder.store)
    apply(plan, builder.store, accept_gaps=True, accept_unread=True)
    assert_whole(builder.store)
    if before is None:
        return
    (after,) = state_of(builder.store).queues[QUEUE]
    recorded = {offset for gap in before.gaps for offset in range(gap.start, gap.end)}
    there = {
        offset for part in after.parts() for offset in range(part.queue_offset, part.queue_end)
    }
    lost = {offset for gap in plan.rebuilt.losses for offset in range(gap.start, gap.end)}
    held = {offset for gap in after.gaps for offset in range(gap.start, gap.end)}
    assert set(range(before.min_offset, before.commit_offset)) <= there | held
    assert set(range(before.min_offset, before.commit_offset)) - there - recorded <= lost
    assert lost.isdisjoint(there | recorded)
    assert gone or not lost
