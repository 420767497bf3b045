"""``truncate``: strict, pure; nothing lost, nothing doubled, whatever the place of the cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bundles import merge_action
from support.queue_entries import (
    EPOCH,
    MACHINE,
    add,
    gap,
    head,
    incarnation,
    part,
    replay,
    then,
    truncate,
)
from support.tiers import QUEUE

from tiered.log.actions import Head
from tiered.log.divergence import first_difference
from tiered.log.parts import Parts
from tiered.log.state import head_of, is_tail, rest_of
from tiered.log.verify_objects import check_state
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from tiered.journal.entry import Action
    from tiered.log.state import TierState


def contradictions(state: TierState) -> list[str]:
    """But for the names of objects, which are short here."""
    return [p.detail for p in check_state(state) if "is not a key" not in p.detail]


@pytest.fixture
def three() -> TierState:
    """Parts [0, 10) and [10, 20) in one segment, [20, 30) in the next."""
    return replay([EPOCH], [add(part(0, 0), 0), add(part(10, 1000), 0), add(part(20, 2000), 2000)])


def test_between_two_parts(three: TierState):
    tail, now = then(three, truncate(10, 30)).queues[QUEUE]
    assert (now.min_offset, now.commit_offset, now.log_end, now.ended) == (0, 10, 1000, "")
    assert [p.queue_offset for p in now.parts()] == [0]
    assert (tail.min_offset, tail.commit_offset, tail.ended) == (10, 30, "why")
    assert [p.queue_offset for p in tail.parts()] == [10, 20]
    assert (now.number, tail.number) == (0, 0)


def test_inside_a_part_both_keep_their_range_of_the_same_objects(three: TierState):
    whole = incarnation(three).parts()[1]
    tail, now = then(three, truncate(13, 30, head(whole, 3))).queues[QUEUE]
    kept, gone = now.parts()[-1], tail.parts()[0]
    assert (kept.bundle, kept.section) == (gone.bundle, gone.section)
    assert (kept.log.start, kept.log.end, gone.log.start, gone.log.end) == (0, 300, 300, 1000)
    assert (kept.index.end, gone.index.start) == (60, 60)
    assert (kept.count, gone.count, gone.queue_offset, gone.log_offset) == (3, 7, 13, 1300)
    assert (now.commit_offset, now.log_end, kept.last) == (13, 1300, 9)


def test_the_queue_goes_on_where_it_was_cut(three: TierState):
    state = then(three, truncate(20, 30), add(part(20, 2000), 2000))
    assert state.refused_parts == 0
    assert incarnation(state).commit_offset == 30
    assert contradictions(state) == []


@pytest.mark.parametrize(
    "bad",
    [
        truncate(10, 29),  # the writer knew another end
        truncate(30, 30),
        truncate(31, 30),
        truncate(0, 30),  # nothing would be left: that is a new incarnation
        truncate(13, 30),  # inside a part, and nobody says where
        truncate(13, 30, head(part(0, 0), 3)),  # of another part
        truncate(13, 30, replace(head(part(10, 1000), 3), log_bytes=1001)),
        truncate(13, 30, replace(head(part(10, 1000), 3), holes=4)),
        truncate(10, 30, head(part(10, 1000), 3)),  # a part that the end does not lie in
    ],
)
def test_what_does_not_fit_changes_nothing_and_is_not_counted(three: TierState, bad: Action):
    after = then(three, bad)
    assert (after.queues, after.refused_parts) == (three.queues, 0)


@pytest.mark.parametrize("epoch", [0, 2])
def test_i6_only_the_present_writer_truncates(three: TierState, epoch: int):
    after = then(three, truncate(10, 30), epoch=epoch)
    assert (after.queues, after.refused_parts) == (three.queues, 1)


def test_a_merge_that_was_planned_before_changes_nothing(three: TierState):
    """Neither of what is left, nor, under its old number, of the tail; least of all in the new history."""
    cut = then(three, truncate(15, 30, head(part(10, 1000), 5)))
    again = then(cut, add(part(15, 1500, key="new"), 0), add(part(25, 2500, key="new"), 0))
    old = [part(0, 0), part(10, 1000), part(20, 2000)]
    for run in ([old[0], old[1]], [old[1]], old[2:]):
        made = part(run[0].queue_offset, run[0].log_offset, 10 * len(run), 1000 * len(run), key="m")
        segment = 2000 if run == old[2:] else 0
        for number in (0, 1):
            late = merge_action((QUEUE, 0, segment, made, Parts.of(run)), incarnation=number)
            assert then(again, late).queues == again.queues


def test_what_was_truncated_is_merged_as_such_and_stays_apart(three: TierState):
    cut = then(three, truncate(15, 30, head(part(10, 1000), 5)))
    tail, now = cut.queues[QUEUE]
    rolled = [segment.parts for segment in tail.segments]
    assert [len(parts) for parts in rolled] == [1, 1]
    made = part(15, 1500, 15, 1500, key="m")
    run = Parts.joined(rolled)
    action = merge_action((QUEUE, 0, 0, made, run), incarnation=0, truncated=True)
    after = then(cut, action)
    assert [p.bundle.key for p in after.queues[QUEUE][0].parts()] == ["m"]
    assert after.queues[QUEUE][1] == now
    assert contradictions(after) == []
    assert then(cut, merge_action((QUEUE, 0, 0, made, run), incarnation=0)).queues == cut.queues


def test_in_a_gap():
    state = replay([EPOCH], [add(part(0, 0), 0)], [gap(10, 50)], [add(part(50, 1000), 1000)])
    tail, now = then(state, truncate(30, 60)).queues[QUEUE]
    assert [(g.start, g.end) for g in now.gaps] == [(10, 30)]
    assert [(g.start, g.end) for g in tail.gaps] == [(30, 50)]
    assert contradictions(then(state, truncate(30, 60))) == []


@given(st.lists(st.integers(1, 39), max_size=6), st.integers(1, 5))
def test_i1_after_any_cuts_state_is_sound_and_nothing_is_lost(ends: list[int], parts: int):
    """Each time the queue is filled again to its old length; all that was ever there is in one incarnation."""
    count = 40 // parts
    state = replay([EPOCH])
    total = 0
    for number, end in enumerate([0, *ends]):
        now = state.incarnation(QUEUE)
        if now and 0 < end < now.commit_offset:
            over = next((p for p in now.parts() if p.queue_offset < end < p.queue_end), None)
            cut = head(over, end - over.queue_offset) if over else None
            state = then(state, truncate(end, now.commit_offset, cut))
        at, log = (
            (incarnation(state).commit_offset, incarnation(state).log_end)
            if state.queues
            else (0, 0)
        )
        fresh = part(at, log, count=count, size=100 * count)
        fresh = replace(fresh, bundle=replace(fresh.bundle, key=f"b{number}"))
        state = then(state, add(fresh, log))
        total += count
    incarnations = state.queues[QUEUE]
    assert sum(p.count for one in incarnations for p in one.parts()) == total
    assert [is_tail(incarnations, number) for number in range(len(incarnations))] == [True] * (
        len(incarnations) - 1
    ) + [False]
    assert contradictions(state) == []
    assert MACHINE.load(MACHINE.dump(state)).queues == state.queues


def test_the_head_of_a_part_that_was_compacted_since_is_refused():
    """It has the same place, and other bytes. (Seed 301137 of the simulation.)"""
    whole = part(0, 0)
    assert head_of(whole, QueueOffset(4), head(whole, 4)) is not None
    assert head_of(replace(whole, holes=1), QueueOffset(4), head(whole, 4)) is None


def test_head_and_rest_are_the_whole():
    whole = replace(part(0, 0), holes=3)
    first = head_of(whole, QueueOffset(4), Head(0, 0, 400, 1, 7, whole.holes))
    assert first
    rest = rest_of(whole, first)
    assert (first.count + rest.count, first.holes + rest.holes) == (10, 3)
    assert (first.log.end, first.index.end) == (rest.log.start, rest.index.start)
    assert first.log_end == rest.log_offset


@given(
    st.integers(0, 50),
    st.integers(1, 60),
    st.integers(0, 70),
    st.sets(st.integers(0, 120)),
    st.sets(st.integers(0, 120)),
)
def test_the_first_difference_is_found_over_whatever_cannot_be_compared(
    low: int, length: int, common: int, holes: set[int], ends: set[int]
):
    high, differs = low + length, low + common

    def same(offset: int) -> bool | None:
        assert low <= offset < high
        return None if offset in holes else offset < differs

    real = [offset for offset in range(low, high) if offset not in holes]
    expected = next((offset for offset in real if offset >= differs), high)
    found, is_common = first_difference(low, high, sorted(ends), same)
    assert found == expected
    if expected < high:
        assert is_common == any(offset < differs for offset in real)


@pytest.mark.parametrize(("is_same", "expected"), [(False, (0, False)), (True, (200, True))])
def test_what_lies_before_a_long_gap_tells_where_nothing_in_it_can(
    is_same: bool, expected: tuple[int, bool]
):
    """A queue made anew, as long as the gap behind the tier's first messages goes: seed 225724 of the simulation."""
    assert (
        first_difference(0, 200, [2, 210], lambda offset: is_same if offset < 3 else None)
        == expected
    )
