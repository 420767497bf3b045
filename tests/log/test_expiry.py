"""Expiry: whole sealed segments at the beginning, strictly replayed (I1, I11)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.journals import PREFIX
from support.tiers import QUEUE, TIME_MS, TierBuilder

from tiered.journal.entry import Entry
from tiered.log.expiry import ExpiryStep, plan_expiry, plan_removal, segment_end
from tiered.log.parts import Parts
from tiered.log.reader import TierReader
from tiered.log.state import TierMachine, TierState
from tiered.log.verify import verify_tier
from tiered.log.verify_objects import check_state
from tiered.model import MessageQueue, QueueOffset

OTHER = MessageQueue("other", 0)


def three_segments() -> TierBuilder:
    """[0, 2) and [2, 4) sealed, [4, 6) open."""
    tier = TierBuilder()
    tier.add([b"a", b"b"])
    tier.add([b"c", b"d"], roll=True)
    tier.add([b"e", b"f"], roll=True)
    return tier


def applied(state: TierState, action: Any, *, epoch: int = 0) -> TierState:
    return TierMachine().apply(state, Entry(99, epoch, "0000feed", 0, [action]))


def plan(state: TierState, now_ms: int, ttl_ms: int = 0, objects_max: int = 99) -> list[ExpiryStep]:
    return plan_expiry(state, now_ms, lambda _topic: ttl_ms, objects_max=objects_max)[0]


def test_whole_sealed_segments_whose_newest_message_is_too_old():
    state = three_segments().journal.state
    assert plan(state, TIME_MS + 1) == []  # the message at offset 1 is exactly so old
    (step,) = plan(state, TIME_MS + 2)
    assert (step.min_from, step.min_to, step.segments, step.objects) == (0, 2, 1, 1)
    assert (step.messages, step.newest_ms) == (2, TIME_MS + 1)
    (step,) = plan(state, TIME_MS + 10**9)
    assert (step.min_to, step.segments) == (4, 2)  # never the open one
    assert plan(state, TIME_MS + 10**9, ttl_ms=10**9 + 1000) == []


def test_a_time_to_live_of_its_own_for_each_topic():
    tier = three_segments()
    tier.add([b"x"], queue=OTHER)
    tier.add([b"y"], queue=OTHER, roll=True)
    ttls = {"other": 5}
    steps, _ = plan_expiry(tier.journal.state, TIME_MS + 100, ttls.get, objects_max=99)
    assert [step.queue for step in steps] == [OTHER]


def test_the_limit_takes_whole_segments_and_says_that_it_cut():
    state = three_segments().journal.state
    late = TIME_MS + 10**9
    steps, is_cut = plan_expiry(state, late, lambda _: 0, objects_max=1)
    assert [step.segments for step in steps] == [1]
    assert is_cut
    assert plan_expiry(state, late, lambda _: 0, objects_max=2)[1] is False


def test_replay_moves_the_minimum_and_forgets_the_segments():
    tier = three_segments()
    (step,) = plan(tier.journal.state, TIME_MS + 10**9)
    tier.say(step.action())
    incarnation = tier.journal.state.incarnation(QUEUE)
    assert incarnation
    assert (incarnation.min_offset, incarnation.commit_offset) == (4, 6)
    assert [segment.base_queue_offset for segment in incarnation.segments] == [4]
    assert list(check_state(tier.journal.state)) == []
    tier.add([b"g"])  # the writer goes on in its open segment
    tier.add([b"h"], roll=True)
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean
    reader = TierReader(tier.store, PREFIX)
    reader.refresh()
    batches = list(reader.queue(QUEUE).batches(QueueOffset(0)))
    assert batches[0].records.base_offset == 4  # type: ignore[union-attr]


def test_a_gap_goes_with_the_segment_before_it():
    tier = TierBuilder()
    tier.add([b"a"])
    tier.gap(5)
    tier.add([b"b"])
    (step,) = plan(tier.journal.state, TIME_MS + 10**9)
    assert step.min_to == 6
    tier.say(step.action())
    incarnation = tier.journal.state.incarnation(QUEUE)
    assert incarnation
    assert (incarnation.gaps, incarnation.min_offset) == ((), 6)
    assert list(check_state(tier.journal.state)) == []


def test_replay_refuses_what_does_not_fit():
    state = three_segments().journal.state
    (step,) = plan(state, TIME_MS + 2)
    good = dict(step.action())
    assert applied(state, good) != state
    once = applied(state, good)
    assert applied(once, good).queues == once.queues  # it came twice
    for field, wrong in [
        ("min_from", 1), ("min_to", 1), ("min_to", 3), ("min_to", 0), ("min_to", 7), ("position", 1),
        ("position", -1), ("incarnation", 1), ("topic", "nobody"),
    ]:  # fmt: skip
        assert applied(state, {**good, field: wrong}).queues == state.queues, (field, wrong)
    assert applied(state, good, epoch=7).queues == state.queues  # of an epoch that never was


def test_an_open_segment_only_goes_by_the_present_writer():
    tier = three_segments()
    state = tier.journal.state
    ((step,), _) = plan_removal(state, QUEUE.topic, objects_max=99)
    assert (step.min_to, step.segments, step.objects) == (6, 3, 3)
    assert applied(state, step.action()).queues == state.queues
    gone = applied(state, step.action(), epoch=state.epoch)
    incarnation = gone.incarnation(QUEUE)
    assert incarnation
    assert (incarnation.segments, incarnation.min_offset, incarnation.commit_offset) == ((), 6, 6)
    assert incarnation.log_end == state.queues[QUEUE][0].log_end
    assert list(check_state(gone)) == []


def test_a_new_writer_goes_on_where_everything_has_expired():
    tier = three_segments()
    ((step,), _) = plan_removal(tier.journal.state, QUEUE.topic, objects_max=99)
    tier.say(step.action())
    later = TierBuilder(tier.store, writer="0000feed")
    part = later.add([b"g", b"h"])
    assert part.queue_offset == 6
    assert verify_tier(tier.store, PREFIX, deep=True).is_clean


def test_an_incarnation_that_has_ended_expires_whole():
    tier = three_segments()
    fields = {"topic": QUEUE.topic, "queue_id": QUEUE.queue_id}
    tier.say({"do": "incarnation", **fields, "incarnation": 1, "start": 0, "reason": "anew"})
    (step,) = plan(tier.journal.state, TIME_MS + 10**9)
    assert (step.position, step.min_to) == (0, 6)
    left = applied(tier.journal.state, step.action())
    assert left.queues[QUEUE][0].segments == ()
    assert left.queues[QUEUE][1] == tier.journal.state.queues[QUEUE][1]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=8),
    st.integers(-5, 40),
    st.integers(0, 20),
)
def test_what_is_left_is_consistent_and_old_enough(
    rows: list[tuple[int, bool]], age: int, limit: int
):
    tier = TierBuilder()
    for count, roll in rows:
        tier.add([b"m"] * count, roll=roll)
    state = tier.journal.state
    before = state.queues[QUEUE][0]
    now = TIME_MS + age
    steps, is_cut = plan_expiry(state, now, lambda _: 0, objects_max=limit)
    assert sum(step.objects for step in steps) <= limit
    for step in steps:
        state = applied(state, step.action())
    after = state.queues[QUEUE][0]
    assert list(check_state(state)) == []
    gone = before.segments[: len(before.segments) - len(after.segments)]
    for segment in gone:
        newest = segment.parts[-1].store_max_ms
        assert segment.sealed
        assert newest < now or (newest > now and segment.created_ms < now)  # or a time to come
    assert after == replace(before, min_offset=after.min_offset, segments=after.segments)
    assert after.segments == before.segments[len(gone) :]
    assert after.segments[-1] == before.segments[-1]
    again, _ = plan_expiry(state, now, lambda _: 0, objects_max=99)
    assert bool(again) == is_cut  # nothing is left over but for the limit
    if gone:
        assert after.min_offset == segment_end(gone[-1])


def with_store_time(state: TierState, segment: int, time_ms: int) -> TierState:
    """The newest message of a segment was stored at another time."""
    (incarnation,) = state.queues[QUEUE]
    old = incarnation.segments[segment]
    parts = Parts.of([*old.parts[:-1], replace(old.parts[-1], store_max_ms=time_ms)])
    row = [*incarnation.segments]
    row[segment] = replace(old, parts=parts)
    return replace(
        state, queues={**state.queues, QUEUE: (replace(incarnation, segments=tuple(row)),)}
    )


def test_a_store_time_in_the_future_keeps_its_queue_no_longer_than_its_neighbours():
    state = three_segments().journal.state
    (incarnation,) = state.queues[QUEUE]
    came_ms = incarnation.segments[1].created_ms
    assert came_ms >= TIME_MS
    far_ms = TIME_MS + 50 * 365 * 86_400_000
    wrong = with_store_time(state, 0, far_ms)
    assert plan(wrong, came_ms, ttl_ms=0) == []  # it was stored at that time, or before
    (step,) = plan(wrong, came_ms + 10_000)
    assert (step.segments, step.min_to, step.newest_ms) == (2, 4, far_ms)
    assert plan(wrong, came_ms + 10_000, ttl_ms=10_001) == []
    last = with_store_time(state, 1, far_ms)
    (step,) = plan(last, came_ms + 10_000)
    assert (step.segments, step.min_to) == (2, 4)


def test_a_store_time_in_the_future_does_not_make_the_rest_expire_early():
    """All times of the first segment are to come by a clock that was set back: nothing expires by it."""
    state = three_segments().journal.state
    assert plan(state, TIME_MS - 86_400_000, ttl_ms=1000) == []
