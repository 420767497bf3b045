"""Replay of the tier's entries: strict, pure, and the same by way of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiers import QUEUE, TierBuilder

from tiered.errors import InvalidError
from tiered.journal.entry import Entry, json_text
from tiered.log.state import (
    ObjectRange,
    Part,
    TierMachine,
    TierState,
    part_json,
    part_of,
    queue_action,
)
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.journal.entry import Action

MACHINE = TierMachine()
REIGN = {"do": "reign", "generation": 1, "holder": {"host": "h"}}


def part(queue_offset: int, log_offset: int, count: int = 10, size: int = 1000) -> Part:
    log = ObjectRange(f"l{queue_offset}", 0, size, size, 60, 7)
    index = ObjectRange(f"i{queue_offset}", 0, 20 * count, 20 * count, 60, 8)
    return Part(log, index, LogOffset(log_offset), QueueOffset(queue_offset), count, 0, 5, 6)


def add(piece: Part, segment: int, *, queue: MessageQueue = QUEUE, life: int = 0) -> Action:
    return queue_action("part", queue, life, segment=segment, part=part_json(piece))


def replay(*entries: Sequence[Action], generations: Sequence[int] = ()) -> TierState:
    state = MACHINE.initial()
    for number, actions in enumerate(entries, 1):
        generation = generations[number - 1] if generations else 1
        state = MACHINE.apply(state, Entry(number, generation, "0badcafe", 1000 + number, actions))
    return state


def life(state: TierState) -> Any:
    found = state.life(QUEUE)
    assert found
    return found


def test_parts_follow_one_another_in_a_segment():
    state = replay([REIGN], [add(part(0, 0), 0), add(part(10, 1000), 0)])
    now = life(state)
    assert (now.min_offset, now.commit_offset, now.log_end) == (0, 20, 2000)
    assert [len(segment.parts) for segment in now.segments] == [2]
    assert now.segments[0].created_ms == 1002
    assert (state.generation, state.writer, state.updated_ms) == (1, "0badcafe", 1002)


def test_a_new_segment_seals_the_one_before():
    now = life(replay([REIGN], [add(part(0, 0), 0)], [add(part(10, 1000), 1000)]))
    assert [(s.base_offset, s.base_queue_offset, s.sealed) for s in now.segments] == [
        (0, 0, True),
        (1000, 10, False),
    ]


def test_a_queue_may_begin_anywhere():
    now = life(replay([REIGN], [add(part(500, 0), 0)]))
    assert (now.min_offset, now.commit_offset) == (500, 510)


@pytest.mark.parametrize(
    "bad",
    [
        add(part(9, 1000), 0),  # repeats a message
        add(part(11, 1000), 0),  # leaves a message out
        add(part(10, 999), 0),  # overlaps in the log
        add(part(10, 1001), 0),  # leaves a hole in the log
        add(part(10, 1000), 500),  # names a segment that is none
        add(part(10, 1000), 1001),
        add(part(10, 1000), 0, life=1),  # of a life that does not exist
        add(part(10, 1000, count=0), 0),
        add(replace(part(10, 1000), count=11), 0),  # items and count differ
        add(
            part(10, 1000), 0, queue=MessageQueue("new", 0)
        ),  # a new queue does not begin at log offset 1000
    ],
)
def test_i1_replay_refuses_a_part_that_does_not_fit_and_counts_it(bad: Action):
    before = replay([REIGN], [add(part(0, 0), 0)])
    after = MACHINE.apply(before, Entry(3, 1, "0badcafe", 0, [bad]))
    assert after.queues == before.queues
    assert after.refused_parts == 1
    good = MACHINE.apply(after, Entry(4, 1, "0badcafe", 0, [add(part(10, 1000), 0)]))
    assert life(good).commit_offset == 20


@pytest.mark.parametrize("generation", [0, 1, 3])
def test_i6_replay_refuses_what_is_not_of_the_reign(generation: int):
    reign = {**REIGN, "generation": 2}
    before = replay([reign], [add(part(0, 0), 0)], generations=[2, 2])
    actions = [
        add(part(10, 1000), 0),
        queue_action("gap", QUEUE, 0, start=10, end=20, reason="r"),
        queue_action("incarnation", QUEUE, 1, start=0, reason="r"),
        queue_action("quarantine", QUEUE, 0, count=3),
        {"do": "meta", "store": {"store_id": "x"}},
        queue_action("seal", QUEUE, 0, segment=0, parts=[part_json(part(0, 0))]),
    ]
    after = MACHINE.apply(before, Entry(3, generation, "ffffffff", 0, actions))
    assert after.queues == before.queues
    assert (after.store, after.refused_parts) == ({}, 3)


def test_i6_an_older_reign_takes_nothing_back():
    state = replay([{**REIGN, "generation": 5}], [{**REIGN, "generation": 4}], generations=[5, 4])
    assert state.generation == 5


def test_before_any_reign_there_is_no_history():
    assert replay([add(part(0, 0), 0)], generations=[0]).queues == {}
    assert replay([add(part(0, 0), 0)], generations=[1]).queues == {}


# -- gaps ---------------------------------------------------------------------------------------


def gap(start: int, end: int) -> Action:
    return queue_action("gap", QUEUE, 0, start=start, end=end, reason="why")


def test_i12_a_gap_is_recorded_and_only_a_new_segment_follows_it():
    state = replay([REIGN], [add(part(0, 0), 0)], [gap(10, 50)])
    assert (life(state).commit_offset, life(state).log_end) == (50, 1000)
    stale = MACHINE.apply(state, Entry(4, 1, "0badcafe", 0, [add(part(50, 1000), 0)]))
    assert stale.refused_parts == 1
    good = MACHINE.apply(state, Entry(4, 1, "0badcafe", 0, [add(part(50, 1000), 1000)]))
    assert [s.base_queue_offset for s in life(good).segments] == [0, 50]
    assert [(g.start, g.end, g.reason) for g in life(good).gaps] == [(10, 50, "why")]


def test_i12_a_gap_before_the_first_part_moves_the_minimum():
    now = life(replay([REIGN], [gap(0, 7)], [add(part(7, 0), 0)]))
    assert (now.min_offset, now.commit_offset, len(now.gaps)) == (7, 17, 1)


@pytest.mark.parametrize(("start", "end"), [(9, 20), (11, 20), (10, 10), (10, 9)])
def test_i12_a_gap_that_does_not_begin_at_the_commit_offset_is_refused(start: int, end: int):
    state = replay([REIGN], [add(part(0, 0), 0)], [gap(start, end)])
    assert (life(state).commit_offset, state.refused_parts) == (10, 1)


def test_i9_a_part_of_nothing_but_holes_holds_up_nothing():
    holes = part(0, 0, size=0)
    same = replay([REIGN], [add(holes, 0)], [add(part(10, 0), 0)])
    assert [len(s.parts) for s in life(same).segments] == [2]
    behind = replay(
        [REIGN], [add(holes, 0)], [gap(10, 50)], [add(part(50, 0), 0)], [add(part(60, 1000), 0)]
    )
    assert behind.refused_parts == 0
    assert [(s.base_offset, s.base_queue_offset) for s in life(behind).segments] == [
        (0, 0),
        (0, 50),
    ]
    assert life(behind).commit_offset == 70


# -- lives --------------------------------------------------------------------------------------


def test_a_new_incarnation_begins_at_its_start_and_the_old_stays():
    again = queue_action("incarnation", QUEUE, 1, start=0, reason="created again")
    state = replay([REIGN], [add(part(0, 0), 0)], [again], [add(part(0, 0), 0, life=1)])
    lives = state.queues[QUEUE]
    assert [(one.incarnation, one.commit_offset, one.ended) for one in lives] == [
        (0, 10, "created again"),
        (1, 10, ""),
    ]
    late = MACHINE.apply(state, Entry(5, 1, "0badcafe", 0, [add(part(10, 1000), 0, life=0)]))
    assert late.refused_parts == 1


def test_where_a_queue_begins_can_be_said_before_it_has_anything_and_is_no_matter_afterwards():
    begin = queue_action("incarnation", QUEUE, 0, start=7, reason="begins here")
    state = replay([REIGN], [begin])
    assert (life(state).min_offset, life(state).commit_offset) == (7, 7)
    assert life(replay([REIGN], [begin], [add(part(7, 0), 0)])).commit_offset == 17
    late = replay([REIGN], [add(part(7, 0), 0), begin])
    assert (life(late).commit_offset, late.refused_parts) == (17, 0)


@pytest.mark.parametrize("number", [2, 3])
def test_incarnations_are_numbered_without_a_hole(number: int):
    again = queue_action("incarnation", QUEUE, number, start=0, reason="r")
    state = replay([REIGN], [add(part(0, 0), 0)], [again])
    assert (len(state.queues[QUEUE]), state.refused_parts) == (1, 1)


# -- sealing ------------------------------------------------------------------------------------


def merged(queue_offset: int = 0, log_offset: int = 0, count: int = 20, size: int = 2000) -> Part:
    return part(queue_offset, log_offset, count, size)


def seal(*parts: Part, segment: int = 0) -> Action:
    return queue_action("seal", QUEUE, 0, segment=segment, parts=[part_json(one) for one in parts])


TWO = ([REIGN], [add(part(0, 0), 0), add(part(10, 1000), 0)])


def test_a_seal_replaces_parts_by_fewer_and_ends_the_segment():
    now = life(replay(*TWO, [seal(merged())]))
    assert (now.segments[0].parts, now.segments[0].sealed) == ((merged(),), True)
    assert (now.commit_offset, now.log_end) == (20, 2000)


@pytest.mark.parametrize(
    "wrong",
    [
        [merged(count=19)], [merged(size=1999)], [merged(1)], [merged(0, 1)], [],
        [part(0, 0), part(10, 1001, size=999)], [part(0, 0), part(11, 1000, count=9)],
    ],
)  # fmt: skip
def test_a_seal_that_is_not_exactly_the_segment_changes_nothing(wrong: list[Part]):
    assert life(replay(*TWO, [seal(*wrong)])) == life(replay(*TWO))


def test_others_may_seal_only_what_the_writer_has_left():
    before = replay(*TWO)
    other = MACHINE.apply(before, Entry(3, 0, "cccccccc", 0, [seal(merged())]))
    assert other.queues == before.queues
    rolled = MACHINE.apply(before, Entry(3, 1, "0badcafe", 0, [add(part(20, 2000), 2000)]))
    sealed = MACHINE.apply(rolled, Entry(4, 0, "cccccccc", 0, [seal(merged())]))
    assert life(sealed).segments[0].parts == (merged(),)


def test_a_part_behind_a_seal_needs_a_new_segment():
    state = replay(*TWO, [seal(merged())], [add(part(20, 2000), 0)], [add(part(20, 2000), 2000)])
    assert (state.refused_parts, life(state).commit_offset) == (1, 30)


def test_an_unknown_action_stops_everything():
    with pytest.raises(InvalidError, match="entry 2"):
        replay([REIGN], [add(part(0, 0), 0), {"do": "from the future"}])


# -- checkpoints --------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(["message", "holes", "gap", "roll", "life"]), max_size=12), st.data()
)
def test_i5_a_checkpoint_at_any_number_gives_the_same_state(steps: list[str], draw: st.DataObject):
    states, state = [], replay([REIGN], [{"do": "meta", "store": {"store_id": "s"}}])
    queue_offset, log_offset, segment, incarnation = 0, 0, 0, 0
    after_gap = False
    for number, step in enumerate(steps, 3):
        if step == "life":
            incarnation += 1 if state.life(QUEUE) else 0
            action = queue_action("incarnation", QUEUE, incarnation, start=3, reason="r")
            queue_offset, log_offset, segment, after_gap = 3, 0, 0, False
        elif step == "gap":
            action = queue_action(
                "gap", QUEUE, incarnation, start=queue_offset, end=queue_offset + 5, reason="r"
            )
            queue_offset, after_gap = queue_offset + 5, True
        else:
            size = 0 if step == "holes" else 100
            if step == "roll" or after_gap:
                segment, after_gap = log_offset, False
            action = add(part(queue_offset, log_offset, 4, size), segment, life=incarnation)
            queue_offset, log_offset = queue_offset + 4, log_offset + size
        state = MACHINE.apply(state, Entry(number, 1, "0badcafe", number, [action]))
        states.append(state)
    assert state.refused_parts == 0
    for one in states:
        assert MACHINE.load(json.loads(json.dumps(MACHINE.dump(one)))) == one
        assert b"".join(MACHINE.dump_pieces(one)) == json_text(MACHINE.dump(one))
    parts = [piece for lives in state.queues.values() for one in lives for piece in one.parts()]
    assert all(part_of(json.loads(json.dumps(part_json(piece)))) == piece for piece in parts)


def test_a_state_of_real_parts_survives_its_checkpoint():
    builder = TierBuilder()
    builder.add([b"a", None, (3, b"b")])
    builder.gap(4)
    builder.add([b"c"])
    state = builder.journal.state
    assert MACHINE.load(json.loads(json.dumps(MACHINE.dump(state)))) == state


def test_a_state_in_pieces_is_the_same_text_whatever_a_stranger_wrote_into_it():
    state = replay([{**REIGN, "holder": {"queues": []}}], [add(part(0, 0), 0)])
    pieces = [*MACHINE.dump_pieces(state)]
    assert b"".join(pieces) == json_text(MACHINE.dump(state))
    assert len(pieces) > len(MACHINE.dump(state))


def test_a_history_is_that_of_its_first_reign():
    second = {**REIGN, "generation": 2}
    state = replay([REIGN], [second], generations=[1, 2])
    assert (state.generation, state.history) == (2, "0badcafe-1001")
    assert MACHINE.load(MACHINE.dump(state)).history == state.history
    other = MACHINE.apply(MACHINE.initial(), Entry(1, 1, "0badcafe", 1002, [REIGN]))
    assert other.history != state.history


def test_the_form_of_a_checkpoint_is_fixed():
    state = replay(
        [REIGN], [add(part(0, 0), 0)], [gap(10, 50), {"do": "meta", "store": {"kind": "k"}}]
    )
    assert MACHINE.dump(state) == {
        "generation": 1,
        "history": "0badcafe-1001",
        "writer": "0badcafe",
        "holder": {"host": "h"},
        "store": {"kind": "k"},
        "refused_parts": 0,
        "updated_ms": 1003,
        "queues": [
            ["topic-ä", 3, [
                [0, 0, 50, 1000,
                 [[0, 0, 1002, False,
                   [["l0", 0, 1000, 1000, 60, 7, "i0", 0, 200, 200, 60, 8, 0, 0, 10, 0, 5, 6]]]],
                 [[10, 50, "why"]], 0, ""],
            ]],
        ],
    }  # fmt: skip
