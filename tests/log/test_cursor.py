"""Which incarnation has an offset of a history: right for every history, whatever was cut and expired since."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.opened import ORDERS, Made
from support.queue_entries import (
    EPOCH,
    MACHINE,
    add,
    head,
    incarnation,
    part,
    replay,
    then,
    truncate,
)
from support.tiers import QUEUE, TIME_MS

from tiered.log.cursor import History, history_of, incarnation_at
from tiered.log.expiry import segment_end
from tiered.log.parts import queue_action
from tiered.log.verify_objects import check_state
from tiered.model import Boundary

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), st.integers(1, 59)),
        st.tuples(st.just("expire"), st.integers(0, 9)),
        st.tuples(st.just("grow"), st.integers(1, 9)),
    ),
    max_size=10,
)


def names(one: object) -> dict[int, str]:
    """Of each offset of an incarnation the object that has it."""
    parts = one.parts()  # type: ignore[attr-defined]
    return {at: p.bundle.key for p in parts for at in range(p.queue_offset, p.queue_end)}


@given(STEPS)
def test_i1_every_history_is_found_in_the_incarnations_that_have_it_now(
    steps: list[tuple[str, int]],
):
    state = replay([EPOCH], [add(part(0, 0), 0), add(part(10, 1000), 1000)])
    met: list[tuple[History, int, dict[int, str]]] = []
    for number, (what, value) in enumerate(steps):
        now, incarnations = incarnation(state), state.queues[QUEUE]
        met.append((history_of(incarnations, len(incarnations) - 1), now.min_offset, names(now)))
        if what == "grow":
            fresh = part(now.commit_offset, now.log_end, count=value, size=100 * value)
            fresh = replace(fresh, bundle=replace(fresh.bundle, key=f"b-{number}"))
            state = then(state, add(fresh, now.log_end))
        elif what == "cut":
            over = next((p for p in now.parts() if p.queue_offset < value < p.queue_end), None)
            cut = head(over, value - over.queue_offset) if over else None
            state = then(state, truncate(value, now.commit_offset, cut))
        else:
            which = value % len(incarnations)
            one = incarnations[which]
            if one.segments:
                bounds = {"min_from": one.min_offset, "min_to": segment_end(one.segments[0])}
                state = then(state, queue_action("expire", QUEUE, 0, position=which, **bounds))
        state = MACHINE.load(MACHINE.dump(state))
    assert not [p for p in check_state(state) if "is not a key" not in p.detail]
    incarnations = state.queues[QUEUE]
    for history, low, expected in met:
        for offset, name in expected.items():
            found, start, end = incarnation_at(incarnations, history.tails, offset)
            assert start <= offset < end
            has = names(found).get(offset)
            assert has == name if offset >= found.min_offset else has is None
            assert offset >= low


def test_an_end_that_was_truncated_is_a_history_by_itself():
    state = replay([EPOCH], [add(part(0, 0), 0), add(part(10, 1000), 1000)])
    state = then(state, truncate(10, 20), add(part(10, 1000, count=5, size=500), 1000))
    state = then(state, truncate(5, 15, head(part(0, 0), 5)))
    incarnations = state.queues[QUEUE]
    assert [history_of(incarnations, number) for number in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert [one.cut_at for one in incarnations] == [10, 5, -1]
    assert [incarnation_at(incarnations, 0, at)[0] for at in (3, 7, 12)] == [
        incarnations[2],
        incarnations[1],
        incarnations[0],
    ]
    assert incarnation_at(incarnations, 0, 7)[1:] == (5, 10), "behind that it is another history's"


@pytest.mark.parametrize("cut_at", [-1, 11, 25])
def test_verify_sees_where_an_end_was_cut_off(cut_at: int):
    state = replay([EPOCH], [add(part(0, 0), 0), add(part(10, 1000), 1000)])
    state = then(state, truncate(10, 20))
    tail, now = state.queues[QUEUE]
    wrong = replace(state, queues={QUEUE: (replace(tail, cut_at=cut_at), now)})
    assert any("cut off" in problem.detail for problem in check_state(wrong))
    assert not any("cut off" in problem.detail for problem in check_state(state))


def test_offsets_by_time_are_those_of_the_history_of_the_cursor():
    """Also when it lies in what is left, merged with what came later, and in what was truncated."""
    made = Made()
    for number in range(6):
        made.add(b"old %d" % number)
    with made.open() as tier:
        reader = tier._opened.reader.queue(ORDERS)
        made.truncate(3)
        made.builder.add([b"new"], queue=ORDERS)
        made.merge()
        for offset in range(6):
            for boundary in Boundary:
                assert reader.offset_by_time(TIME_MS + offset, boundary) == offset
        assert reader.offset_by_time(TIME_MS + 99) == 6
        assert reader.offset_by_time(TIME_MS + 99, Boundary.UPPER) == 5
        assert reader.offset_by_time(TIME_MS - 1, Boundary.UPPER) == 0
