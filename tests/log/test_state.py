"""Replay of the tier's entries: strict, pure, and the same by way of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bundles import merge_action
from support.queue_entries import EPOCH, MACHINE, add, gap, incarnation, part, replay
from support.tiers import QUEUE, TierBuilder

from tiered.journal.entry import Entry, json_text
from tiered.journal.replay import UnknownActionError
from tiered.log.parts import Part, Parts, decode_columns, queue_action
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.journal.entry import Action


def test_parts_follow_one_another_in_a_segment():
    state = replay([EPOCH], [add(part(0, 0), 0), add(part(10, 1000), 0)])
    now = incarnation(state)
    assert (now.min_offset, now.commit_offset, now.log_end) == (0, 20, 2000)
    assert [len(segment.parts) for segment in now.segments] == [2]
    assert now.segments[0].created_ms == 1002
    assert (state.epoch, state.writer, state.updated_ms) == (1, "0badcafe", 1002)


def test_a_new_segment_seals_the_one_before():
    now = incarnation(replay([EPOCH], [add(part(0, 0), 0)], [add(part(10, 1000), 1000)]))
    assert [(s.base_offset, s.base_queue_offset, s.sealed) for s in now.segments] == [
        (0, 0, True),
        (1000, 10, False),
    ]


def test_a_queue_may_begin_anywhere():
    now = incarnation(replay([EPOCH], [add(part(500, 0), 0)]))
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
        add(part(10, 1000), 0, incarnation=1),  # of an incarnation that does not exist
        add(
            part(10, 1000), 0, queue=MessageQueue("new", 0)
        ),  # a new queue does not begin at log offset 1000
    ],
)
def test_i1_replay_refuses_a_part_that_does_not_fit_and_counts_it(bad: Action):
    before = replay([EPOCH], [add(part(0, 0), 0)])
    after = MACHINE.apply(before, Entry(3, 1, "0badcafe", 0, [bad]))
    assert after.queues == before.queues
    assert after.refused_parts == 1
    good = MACHINE.apply(after, Entry(4, 1, "0badcafe", 0, [add(part(10, 1000), 0)]))
    assert incarnation(good).commit_offset == 20


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_i6_replay_refuses_what_is_not_of_the_epoch(epoch: int):
    begin = {**EPOCH, "epoch": 2}
    before = replay([begin], [add(part(0, 0), 0)], epochs=[2, 2])
    actions = [
        add(part(10, 1000), 0),
        queue_action("gap", QUEUE, 0, start=10, end=20, reason="r"),
        queue_action("incarnation", QUEUE, 1, start=0, reason="r"),
        queue_action("quarantine", QUEUE, 0, count=3),
        {"do": "meta", "store": {"store_id": "x"}},
        queue_action("seal", QUEUE, 0, segment=0),
        merge([part(0, 0)], key="m") if epoch else queue_action("seal", QUEUE, 0, segment=0),
    ]
    after = MACHINE.apply(before, Entry(3, epoch, "ffffffff", 0, actions))
    assert after.queues == before.queues
    assert (after.store, after.refused_parts) == ({}, 3)


def test_i6_an_older_epoch_takes_nothing_back():
    state = replay([{**EPOCH, "epoch": 5}], [{**EPOCH, "epoch": 4}], epochs=[5, 4])
    assert state.epoch == 5


def test_before_any_epoch_there_is_no_history():
    assert replay([add(part(0, 0), 0)], epochs=[0]).queues == {}
    assert replay([add(part(0, 0), 0)], epochs=[1]).queues == {}


# -- gaps ---------------------------------------------------------------------------------------


def test_i12_a_gap_is_recorded_and_only_a_new_segment_follows_it():
    state = replay([EPOCH], [add(part(0, 0), 0)], [gap(10, 50)])
    assert (incarnation(state).commit_offset, incarnation(state).log_end) == (50, 1000)
    stale = MACHINE.apply(state, Entry(4, 1, "0badcafe", 0, [add(part(50, 1000), 0)]))
    assert stale.refused_parts == 1
    good = MACHINE.apply(state, Entry(4, 1, "0badcafe", 0, [add(part(50, 1000), 1000)]))
    assert [s.base_queue_offset for s in incarnation(good).segments] == [0, 50]
    assert [(g.start, g.end, g.reason) for g in incarnation(good).gaps] == [(10, 50, "why")]


def test_i12_a_gap_before_the_first_part_moves_the_minimum():
    now = incarnation(replay([EPOCH], [gap(0, 7)], [add(part(7, 0), 0)]))
    assert (now.min_offset, now.commit_offset, len(now.gaps)) == (7, 17, 1)


@pytest.mark.parametrize(("start", "end"), [(9, 20), (11, 20), (10, 10), (10, 9)])
def test_i12_a_gap_that_does_not_begin_at_the_commit_offset_is_refused(start: int, end: int):
    state = replay([EPOCH], [add(part(0, 0), 0)], [gap(start, end)])
    assert (incarnation(state).commit_offset, state.refused_parts) == (10, 1)


def test_i9_a_part_of_nothing_but_holes_holds_up_nothing():
    holes = part(0, 0, size=0)
    same = replay([EPOCH], [add(holes, 0)], [add(part(10, 0), 0)])
    assert [len(s.parts) for s in incarnation(same).segments] == [2]
    behind = replay(
        [EPOCH], [add(holes, 0)], [gap(10, 50)], [add(part(50, 0), 0)], [add(part(60, 1000), 0)]
    )
    assert behind.refused_parts == 0
    assert [(s.base_offset, s.base_queue_offset) for s in incarnation(behind).segments] == [
        (0, 0),
        (0, 50),
    ]
    assert incarnation(behind).commit_offset == 70


# -- incarnations --------------------------------------------------------------------------------------


def test_a_new_incarnation_begins_at_its_start_and_the_old_stays():
    again = queue_action("incarnation", QUEUE, 1, start=0, reason="created again")
    state = replay([EPOCH], [add(part(0, 0), 0)], [again], [add(part(0, 0), 0, incarnation=1)])
    incarnations = state.queues[QUEUE]
    assert [(one.number, one.commit_offset, one.ended) for one in incarnations] == [
        (0, 10, "created again"),
        (1, 10, ""),
    ]
    late = MACHINE.apply(state, Entry(5, 1, "0badcafe", 0, [add(part(10, 1000), 0, incarnation=0)]))
    assert late.refused_parts == 1


def test_where_a_queue_begins_can_be_said_before_it_has_anything_and_is_no_matter_afterwards():
    begin = queue_action("incarnation", QUEUE, 0, start=7, reason="begins here")
    state = replay([EPOCH], [begin])
    assert (incarnation(state).min_offset, incarnation(state).commit_offset) == (7, 7)
    assert incarnation(replay([EPOCH], [begin], [add(part(7, 0), 0)])).commit_offset == 17
    late = replay([EPOCH], [add(part(7, 0), 0), begin])
    assert (incarnation(late).commit_offset, late.refused_parts) == (17, 0)


@pytest.mark.parametrize("number", [2, 3])
def test_incarnations_are_numbered_without_a_hole(number: int):
    again = queue_action("incarnation", QUEUE, number, start=0, reason="r")
    state = replay([EPOCH], [add(part(0, 0), 0)], [again])
    assert (len(state.queues[QUEUE]), state.refused_parts) == (1, 1)


# -- rolling and merging ------------------------------------------------------------------------


def merge(
    run: Sequence[Part], *, segment: int = 0, incarnation: int = 0, key: str = "m", **said: Any
) -> Action:
    """Have one part take the place of a run; ``said``: what it is to say instead of the truth."""
    first, last = run[0], run[-1]
    truth: dict[str, Any] = {
        "queue_offset": first.queue_offset,
        "log_offset": first.log_offset,
        "count": last.queue_end - first.queue_offset,
        "size": last.log_end - first.log_offset,
        "holes": sum(one.holes for one in run),
        "last": last.last,
    }
    made = part(**truth | said, key=key, level=1)
    return merge_action((QUEUE, 0, segment, made, Parts.of(run)), incarnation=incarnation)


TWO = ([EPOCH], [add(part(0, 0), 0), add(part(10, 1000), 0)])
BOTH = (part(0, 0), part(10, 1000))
SEAL = queue_action("seal", QUEUE, 0, segment=0)


def test_a_seal_ends_the_segment_and_what_follows_needs_a_new_one():
    state = replay(*TWO, [SEAL], [add(part(20, 2000), 0)], [add(part(20, 2000), 2000)])
    assert (state.refused_parts, incarnation(state).commit_offset) == (1, 30)
    assert [s.sealed for s in incarnation(state).segments] == [True, False]


@pytest.mark.parametrize("segment", [1, 1000])
def test_a_seal_of_another_segment_changes_nothing(segment: int):
    assert incarnation(replay(*TWO, [{**SEAL, "segment": segment}])) == incarnation(replay(*TWO))


def test_a_merge_replaces_a_run_by_one_part_and_the_segment_stays_open():
    now = incarnation(replay(*TWO, [merge(BOTH)], [add(part(20, 2000), 0)]))
    ((one, two),) = [segment.parts for segment in now.segments]
    assert (one.bundle.key, one.count, one.log_bytes, one.bundle.level) == ("m", 20, 2000, 1)
    assert two.queue_offset == 20
    assert (now.commit_offset, now.log_end, now.segments[0].sealed) == (30, 3000, False)


OLD = [part(at, 100 * at) for at in (0, 10, 20, 30)]
FOUR = ([EPOCH], [add(one, 0) for one in OLD])


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 3), (1, 3), (2, 4), (0, 4), (3, 4)])
def test_any_run_of_neighbours_can_be_merged_and_the_others_stay(low: int, high: int):
    state = replay(*FOUR, [merge(OLD[low:high])])
    starts = [p.queue_offset for p in incarnation(state).parts()]
    assert starts == [0, 10, 20, 30][: low + 1] + [0, 10, 20, 30][high:]
    assert (incarnation(state).commit_offset, state.refused_parts) == (40, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        merge(BOTH, segment=1000),
        merge(BOTH, incarnation=1),
        merge(BOTH[:1], count=9),
        merge(BOTH[:1], size=999),
        merge(BOTH, holes=1),
        merge(BOTH, queue_offset=1),
        merge(BOTH, log_offset=1),
        merge([part(0, 0, key="other"), part(10, 1000)]),  # of another bundle
        merge([part(0, 0), replace(part(10, 1000), last=5)]),
        merge([part(0, 0), part(10, 1000, level=1)], queue_offset=10, log_offset=1000),
        merge([part(0, 0), part(10, 1000), part(20, 2000)]),  # more than there is
        merge([part(0, 0, count=5, size=500)]),  # borders that are none
        merge([part(5, 500, count=15, size=1500)]),
    ],
)
def test_a_merge_that_is_not_exactly_a_run_of_old_parts_changes_nothing_and_is_not_counted(
    wrong: Action,
):
    state = replay(*TWO, [wrong])
    assert (incarnation(state), state.refused_parts) == (incarnation(replay(*TWO)), 0)


def test_a_merge_that_was_overtaken_does_not_bring_back_parts_that_nobody_names():
    """Another has merged all four, and the bundles of the old may be deleted."""
    state = replay(*FOUR, [merge(OLD)], [merge(OLD[:3], key="late")], [merge(OLD, key="late")])
    assert [p.bundle.key for p in incarnation(state).parts()] == ["m"]


def test_others_may_merge_only_what_the_writer_has_left():
    before = replay(*TWO)
    theirs = Entry(3, 0, "cccccccc", 0, [merge(BOTH)])
    assert MACHINE.apply(before, theirs).queues == before.queues, "the segment is open"
    rolled = MACHINE.apply(before, Entry(3, 1, "0badcafe", 0, [SEAL]))
    assert len(incarnation(MACHINE.apply(rolled, theirs)).parts()) == 1
    older = MACHINE.apply(rolled, Entry(3, 2, "cccccccc", 0, [merge(BOTH)]))
    assert older.queues == rolled.queues, "of an epoch that is none"


def test_a_run_over_the_border_of_rolled_segments_makes_one_of_them():
    state = replay([EPOCH], *[[add(one, one.log_offset)] for one in OLD])
    assert len(incarnation(state).segments) == 4
    joined = MACHINE.apply(state, Entry(9, 1, "0badcafe", 9, [merge(OLD[:3])]))
    assert [(s.base_offset, len(s.parts), s.sealed) for s in incarnation(joined).segments] == [
        (0, 1, True),
        (3000, 1, False),
    ]
    with_open = MACHINE.apply(state, Entry(9, 1, "0badcafe", 9, [merge(OLD)]))
    assert with_open.queues == state.queues, "an open segment is not sealed by the way"


def test_a_run_over_a_gap_is_none():
    parts = [part(0, 0), part(20, 1000)]
    state = replay([EPOCH], [add(parts[0], 0)], [gap(10, 20)], [add(parts[1], 1000)], [
        {**SEAL, "segment": 1000},
    ])  # fmt: skip
    assert all(segment.sealed for segment in incarnation(state).segments)
    assert MACHINE.apply(state, Entry(9, 1, "0badcafe", 9, [merge(parts)])).queues == state.queues


def test_of_two_segments_with_one_base_the_right_one_is_merged():
    parts = [part(0, 0, size=0), part(10, 0, size=0), part(20, 0), part(30, 1000)]
    steps = [[add(parts[0], 0), add(parts[1], 0), SEAL], [add(parts[2], 0), add(parts[3], 0)]]
    state = replay([EPOCH], *steps)
    assert [(s.base_offset, len(s.parts)) for s in incarnation(state).segments] == [(0, 2), (0, 2)]
    for run, expected in ((parts[:2], [1, 2]), (parts[2:], [2, 1])):
        after = MACHINE.apply(state, Entry(9, 1, "0badcafe", 9, [merge(run)]))
        assert [len(s.parts) for s in incarnation(after).segments] == expected


def test_an_unknown_action_stops_everything():
    with pytest.raises(UnknownActionError, match="from the future"):
        replay([EPOCH], [add(part(0, 0), 0), {"do": "from the future"}])


# -- checkpoints --------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(["message", "holes", "gap", "roll", "incarnation"]), max_size=12),
    st.data(),
)
def test_i5_a_checkpoint_at_any_number_gives_the_same_state(steps: list[str], draw: st.DataObject):
    states, state = [], replay([EPOCH], [{"do": "meta", "store": {"store_id": "s"}}])
    queue_offset, log_offset, segment, incarnation = 0, 0, 0, 0
    after_gap = False
    for number, step in enumerate(steps, 3):
        if step == "incarnation":
            incarnation += 1 if state.incarnation(QUEUE) else 0
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
            action = add(part(queue_offset, log_offset, 4, size), segment, incarnation=incarnation)
            queue_offset, log_offset = queue_offset + 4, log_offset + size
        state = MACHINE.apply(state, Entry(number, 1, "0badcafe", number, [action]))
        states.append(state)
    assert state.refused_parts == 0
    for one in states:
        assert MACHINE.load(json.loads(json.dumps(MACHINE.dump(one)))) == one
        text = b"".join(MACHINE.dump_chunks(one))
        assert text == json_text(MACHINE.dump(one))
        assert (again := MACHINE.load_text(text.decode())) == one
        assert hash(again.incarnation(QUEUE)) == hash(one.incarnation(QUEUE))
        assert MACHINE.dump(again) == MACHINE.dump(one), "of columns"


def test_a_state_of_real_parts_survives_its_checkpoint():
    builder = TierBuilder()
    builder.add([b"a", None, (3, b"b")])
    builder.gap(4)
    builder.add([b"c"])
    state = builder.journal.state
    assert MACHINE.load(json.loads(json.dumps(MACHINE.dump(state)))) == state


def test_a_state_in_chunks_is_the_same_text_whatever_a_stranger_wrote_into_it():
    state = replay([{**EPOCH, "holder": {"queues": []}}], [add(part(0, 0), 0)])
    chunks = [*MACHINE.dump_chunks(state)]
    assert b"".join(chunks) == json_text(MACHINE.dump(state))
    assert len(chunks) > len(MACHINE.dump(state))
    assert MACHINE.load_text(b"".join(chunks).decode()) == state


def test_a_history_is_that_of_its_first_epoch():
    second = {**EPOCH, "epoch": 2}
    state = replay([EPOCH], [second], epochs=[1, 2])
    assert (state.epoch, state.history) == (2, "0badcafe-1001")
    assert MACHINE.load(MACHINE.dump(state)).history == state.history
    other = MACHINE.apply(MACHINE.initial(), Entry(1, 1, "0badcafe", 1002, [EPOCH]))
    assert other.history != state.history


def test_the_form_of_a_checkpoint_is_fixed():
    state = replay(
        [EPOCH], [add(part(0, 0), 0)], [gap(10, 50), {"do": "meta", "store": {"kind": "k"}}]
    )
    dumped = MACHINE.dump(state)
    columns = dumped.pop("parts")
    assert dumped == {
        "epoch": 1,
        "history": "0badcafe-1001",
        "writer": "0badcafe",
        "holder": {"host": "h"},
        "store": {"kind": "k"},
        "refused_parts": 0,
        "updated_ms": 1003,
        "queues": [
            ["topic-ä", 3, [[0, 0, 50, 1000, [[0, 0, 1002, False, 1]], [[10, 50, "why"]]]]],
        ],
        "indexes": [],
        "timers": [],
    }  # fmt: skip
    assert (columns["bundles"], columns["count"]) == ([["b0", 1308]], 1)
    assert list(decode_columns(columns)) == [part(0, 0)]


# -- pauses -------------------------------------------------------------------------------------


def pause(topic: str, *, is_paused: bool = True) -> Action:
    return {"do": "pause", "topic": topic, "is_paused": is_paused}


def test_a_topic_is_paused_by_anybody_once_and_goes_on():
    state = replay([EPOCH], [pause("a"), pause("b")], [pause("a")], epochs=[1, 0, 1])
    assert [(one.topic, one.since_ms) for one in state.paused] == [("a", 1002), ("b", 1002)]
    assert state.paused_topics == {"a", "b"}
    assert MACHINE.load(json.loads(json_text(MACHINE.dump(state)))) == state
    state = MACHINE.apply(state, Entry(4, 0, "ffffffff", 1, [pause("a", is_paused=False)]))
    assert state.paused_topics == {"b"}
    state = MACHINE.apply(state, Entry(5, 7, "ffffffff", 1, [pause("b", is_paused=False)]))
    assert state.paused_topics == {"b"}, "of a writer that is none"


def test_where_nothing_is_paused_a_checkpoint_is_as_versions_before_have_it():
    state = replay([EPOCH], [pause("a")], [pause("a", is_paused=False)])
    assert "paused" not in MACHINE.dump(state)
    assert MACHINE.dump(replay([EPOCH], [pause("a")]))["paused"] == [["a", 1002]]
