"""What is merged, and which seals are history."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.dispatch.sealer import SealJob
from tiered.errors import InvalidError
from tiered.journal.entry import Entry
from tiered.log.seal import SealPlan, SealPolicy, is_joined, plan_merge, plan_seals, summary
from tiered.log.state import (
    Gap,
    ObjectRange,
    Part,
    QueueLife,
    Segment,
    TierMachine,
    TierState,
    part_json,
    queue_action,
)
from tiered.log.verify_state import _check_life
from tiered.model import LogOffset, MessageQueue, QueueOffset

QUEUE = MessageQueue("t", 0)
MACHINE = TierMachine()


def make_part(
    log: int,
    queue: int,
    size: int,
    count: int,
    *,
    holes: int = 0,
    name: str = "",
    time_ms: int = 7,
) -> Part:
    key = name or f"{log}-{queue}"
    low, high = (-1, -1) if holes == count else (time_ms, time_ms + count)
    return Part(
        ObjectRange(f"l{key}", 0, size, size, 60, 1),
        ObjectRange(f"i{key}", 0, 20 * count, 20 * count, 60, 2),
        LogOffset(log), QueueOffset(queue), count, holes, low, high,
    )  # fmt: skip


def row_of(sizes: list[int], counts: list[int] | None = None) -> list[Part]:
    """Parts one behind another; a part of size 0 has nothing but holes."""
    counts = counts or [1] * len(sizes)
    logs = [0, *accumulate(sizes)]
    queues = [0, *accumulate(counts)]
    return [
        make_part(log, queue, size, count, holes=0 if size else count, time_ms=log)
        for log, queue, size, count in zip(logs, queues, sizes, counts, strict=False)
    ]


def join(run: list[Part]) -> Part:
    """What the sealer makes of a run."""
    log, log_end, queue, queue_end, holes, low, high = summary(run)
    made = make_part(
        log, queue, log_end - log, queue_end - queue, holes=holes, name=f"m{log}-{queue}"
    )
    return replace(made, store_min_ms=low, store_max_ms=high)


def joined(parts: list[Part], policy: SealPolicy) -> list[Part]:
    return [run[0] if len(run) == 1 else join(run) for run in plan_merge(parts, policy)]


def size_of(part: Part) -> int:
    return part.log.size_bytes + part.index.size_bytes


SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=40)
POLICIES = st.integers(0, 150).flatmap(
    lambda small: st.builds(SealPolicy, st.just(small), st.integers(2 * small, 2 * small + 400))
)


@given(SIZES, POLICIES)
def test_runs_are_small_neighbours_within_the_limit_and_nothing_is_left_out(
    sizes: list[int], policy: SealPolicy
):
    parts = row_of(sizes)
    runs = plan_merge(parts, policy)
    assert [part for run in runs for part in run] == parts
    for run in runs:
        if len(run) > 1:
            assert all(size_of(part) < policy.small_bytes for part in run)
            assert sum(size_of(part) for part in run) <= policy.merged_bytes_max
    for one, two in pairwise(runs):  # a border only where joining is not allowed
        ends = size_of(one[-1]), size_of(two[0])
        total = sum(size_of(part) for part in one) + ends[1]
        assert max(ends) >= policy.small_bytes or total > policy.merged_bytes_max


@given(SIZES, POLICIES)
def test_what_was_merged_is_never_merged_again(sizes: list[int], policy: SealPolicy):
    once = joined(row_of(sizes), policy)
    assert joined(once, policy) == once


def test_a_limit_that_would_merge_twice_is_refused():
    with pytest.raises(InvalidError, match="twice"):
        SealPolicy(100, 199)


def test_nothing_is_merged_when_nothing_is_small():
    parts = row_of([10, 10, 0])
    assert plan_merge(parts, SealPolicy(0, 1000)) == [[part] for part in parts]


# -- what is to be sealed -----------------------------------------------------------------------


def state_of(*segments: list[Part], sealed_last: bool = False) -> TierState:
    rows = [
        Segment(row[0].log_offset, row[0].queue_offset, 0, True, tuple(row)) for row in segments
    ]
    rows[-1] = replace(rows[-1], sealed=sealed_last)
    last = rows[-1].parts[-1]
    life = QueueLife(0, QueueOffset(0), last.queue_end, last.log_end, tuple(rows))
    return TierState(generation=1, queues={QUEUE: (life,)})


POLICY = SealPolicy(1000, 4000)


def test_rolled_segments_with_small_parts_are_planned_and_the_open_one_is_not():
    parts = row_of([100, 100, 100, 2000, 100, 100])
    state = state_of(parts[:2], parts[2:4], parts[4:])
    (plan,) = plan_seals(state, POLICY)
    assert (plan.queue, plan.segment.base_offset, plan.runs) == (QUEUE, 0, (tuple(parts[:2]),))
    assert [p.segment.base_offset for p in plan_seals(state, POLICY, with_open=True)] == [0, 2300]
    assert plan_seals(state, POLICY, queues=[MessageQueue("other", 0)]) == []


def test_an_open_segment_without_small_neighbours_is_still_to_be_ended_and_a_sealed_one_is_not():
    parts = row_of([5000, 5000])
    (plan,) = plan_seals(state_of(parts), POLICY, with_open=True)
    assert not plan.merges
    assert plan_seals(state_of(parts, sealed_last=True), POLICY, with_open=True) == []


def test_two_segments_with_one_base_have_different_plans():
    holes, rest = row_of([0, 0, 10, 10])[:2], row_of([0, 0, 10, 10])[2:]
    state = state_of(holes, rest, row_of([0, 0, 10, 10, 10])[4:])
    one, two = plan_seals(state, POLICY)
    assert (one.segment.base_offset, two.segment.base_offset) == (0, 0)
    assert one.key != two.key


def sealed(state: TierState, parts: list[Part], segment: int, generation: int = 1) -> TierState:
    action = queue_action("seal", QUEUE, 0, segment=segment, parts=[part_json(p) for p in parts])
    return MACHINE.apply(state, Entry(9, generation, "0badcafe", 0, [action]))


@given(
    st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=8), min_size=1, max_size=5),
    POLICIES,
)
def test_replay_takes_every_planned_seal_and_then_there_is_no_more_to_do(
    sizes: list[list[int]], policy: SealPolicy
):
    parts = row_of([size for row in sizes for size in row])
    borders = [0, *accumulate(len(row) for row in sizes)]
    state = state_of(*[parts[low:high] for low, high in pairwise(borders)])
    before = state.life(QUEUE)
    for plan in plan_seals(state, policy, with_open=True):
        made = [run[0] if len(run) == 1 else join([*run]) for run in plan.runs]
        state = sealed(state, made, plan.segment.base_offset)
    assert plan_seals(state, policy, with_open=True) == []
    after = state.life(QUEUE)
    assert before
    assert after
    assert all(segment.sealed for segment in after.segments)
    assert summary(after.parts()) == summary(before.parts())
    assert state.refused_parts == 0


# -- strict replay ------------------------------------------------------------------------------

FOUR = row_of([100, 100, 0, 100], [3, 3, 2, 3])


def test_joined_neighbours_and_nothing_else_take_the_place_of_parts():
    good = [join(FOUR[:2]), join(FOUR[2:])]
    assert is_joined(FOUR, good)
    assert is_joined(FOUR, FOUR)
    assert is_joined(FOUR, [join(FOUR)])


@pytest.mark.parametrize(
    "wrong",
    [
        [join(FOUR[:2])],
        [join(FOUR[1:])],
        [join(FOUR[:2]), join(FOUR[1:])],
        [replace(join(FOUR), holes=0)],
        [replace(join(FOUR), store_max_ms=99)],
        [replace(join(FOUR), store_min_ms=-1)],
        [replace(join(FOUR), index=ObjectRange("i", 0, 200, 200, 60, 2))],
        [make_part(0, 0, 150, 4), make_part(150, 4, 150, 7, holes=2)],
        [*FOUR, make_part(300, 11, 10, 1)],
        [],
    ],
)  # fmt: skip
def test_what_is_not_exactly_the_segment_is_no_seal(wrong: list[Part]):
    assert not is_joined(FOUR, wrong)
    state = state_of(FOUR, [make_part(300, 11, 10, 1)])
    assert sealed(state, wrong, 0).queues == state.queues


def test_a_seal_that_was_overtaken_does_not_bring_back_parts_that_nobody_names():
    """Another has merged all four, and they may be deleted; ours had left the last one as it was."""
    state = sealed(state_of(FOUR, [make_part(300, 11, 10, 1)]), [join(FOUR)], 0, generation=0)
    late = sealed(state, [join(FOUR[:3]), FOUR[3]], 0)
    assert late.queues == state.queues


# -- neighbours that file switches have left ------------------------------------------------------

LIFETIME_MS = 1000
BYTES = st.integers(0, 30) | st.integers(0, 300)


def switched(draw: st.DrawFn, policy: SealPolicy) -> TierState:
    """A life with gaps and file switches anywhere, segments that rolled for their size or age, and jumps of the clock."""
    segments: list[Segment] = []
    gaps: list[Gap] = []
    log, queue, now_ms = 0, 0, 10_000
    for _ in range(draw(st.integers(1, 12))):
        if segments and draw(st.integers(0, 9)) == 0:
            gaps.append(Gap(QueueOffset(queue), QueueOffset(queue + 3), "r"))
            queue += 3
        parts: list[Part] = []
        for size in draw(st.lists(BYTES, min_size=1, max_size=6)):
            parts.append(make_part(log, queue, size, 1, holes=0 if size else 1, time_ms=log))
            log, queue = log + size, queue + 1
            if sum(part.log.size_bytes for part in parts) >= policy.segment_bytes_max:
                break
        first = parts[0]
        made = Segment(first.log_offset, first.queue_offset, now_ms, True, tuple(parts))
        segments.append(made)
        now_ms += draw(st.sampled_from((0, 1, 100, LIFETIME_MS, -50)))
    segments[-1] = replace(segments[-1], sealed=False)
    life = QueueLife(
        0, QueueOffset(0), QueueOffset(queue), LogOffset(log), tuple(segments), tuple(gaps)
    )
    return TierState(generation=1, queues={QUEUE: (life,)})


JOINING = st.integers(0, 150).flatmap(
    lambda small: st.builds(
        SealPolicy,
        st.just(small),
        st.integers(2 * small, 2 * small + 400),
        st.integers(0, 900),
        st.just(LIFETIME_MS),
    )
)
JOINED = st.composite(lambda draw: (policy := draw(JOINING), switched(draw, policy)))()


class History:
    """Applies plans as the seal thread does, counts how often each byte is rewritten, and checks what stays true."""

    def __init__(self, state: TierState) -> None:
        self.state, self.rewritten = state, Counter[int]()

    def life(self) -> QueueLife:
        life = self.state.life(QUEUE)
        assert life
        return life

    def apply(self, plan: SealPlan) -> None:
        before = self.life()
        made = [run[0] if len(run) == 1 else join([*run]) for run in plan.runs]
        for run in plan.runs:
            if len(run) > 1:
                self.rewritten.update(p.queue_offset + n for p in run for n in range(p.count))
        action = SealJob(plan, made).action()
        entry = Entry(9, 1, "0badcafe", 0, [json.loads(json.dumps(action))])
        self.state = MACHINE.apply(self.state, entry)
        life = self.life()
        assert [s.parts for s in life.segments if s.base_queue_offset == made[0].queue_offset] == [
            tuple(made)
        ]
        assert list(_check_life(life)) == []
        rest = replace(before, segments=life.segments)
        assert (rest, summary(life.parts())) == (life, summary(before.parts()))
        dumped = json.loads(json.dumps(MACHINE.dump(self.state)))
        assert MACHINE.dump(MACHINE.load(dumped)) == dumped
        self.state = MACHINE.load(dumped)

    def settle(self, policy: SealPolicy, *, with_open: bool) -> None:
        while plans := plan_seals(self.state, policy, with_open=with_open):
            for plan in plans:
                self.apply(plan)


@given(JOINED)
def test_short_neighbours_become_one_and_nothing_is_rewritten_twice(
    case: tuple[SealPolicy, TierState],
):
    policy, state = case
    history = History(state)
    history.settle(policy, with_open=False)
    history.settle(policy, with_open=True)
    assert max(history.rewritten.values(), default=1) == 1
    for one, two in pairwise(history.life().segments):
        touches = one.parts[-1].queue_end == two.base_queue_offset
        young = 2 * (two.created_ms - one.created_ms) < LIFETIME_MS
        size = one.size_bytes + two.size_bytes
        pays = len(plan_merge([*one.parts, *two.parts], policy)) < len(one.parts + two.parts)
        fits = 0 < policy.segment_bytes_max >= size  # 0: nothing is ever joined
        assert not (touches and young and pays and fits)


@given(JOINED, st.data())
def test_segments_that_come_later_are_joined_without_rewriting_what_was(
    case: tuple[SealPolicy, TierState], data: st.DataObject
):
    """The seal thread looks whenever a queue has rolled, `--seal` whenever it is run."""
    policy, whole = case
    life = whole.life(QUEUE)
    assert life
    history = History(whole)
    known: tuple[Segment, ...] = ()
    for count, segment in enumerate(life.segments, 1):
        is_last = count == len(life.segments)
        known = (*known, replace(segment, sealed=False))
        end, log_end = segment.parts[-1].queue_end, segment.parts[-1].log_end
        gaps = tuple(gap for gap in life.gaps if gap.end <= end)
        now = replace(life, segments=known, gaps=gaps, commit_offset=end, log_end=log_end)
        history.state = replace(whole, queues={QUEUE: (now,)})
        history.settle(policy, with_open=is_last or data.draw(st.booleans()))
        known = history.life().segments
        known = (*known[:-1], replace(known[-1], sealed=True))
    assert max(history.rewritten.values(), default=1) == 1


def test_a_hundred_switches_in_a_row_leave_one_segment():
    parts = row_of([10] * 101)
    state = state_of(*[[part] for part in parts])
    policy = SealPolicy(1000, 4000, 100_000, LIFETIME_MS)
    assert plan_seals(state, policy) == [], "the open one may still belong to them"
    history = History(state)
    history.settle(policy, with_open=True)
    (segment,) = history.life().segments
    assert (len(segment.parts), segment.size_bytes, segment.merged) == (1, 1010, True)


def test_a_join_that_was_overtaken_or_spans_a_gap_changes_nothing():
    parts = row_of([100, 100, 100, 100])
    policy = SealPolicy(1000, 4000, 250, LIFETIME_MS)
    state = state_of(*[[part] for part in parts])
    (plan,) = plan_seals(state, policy)
    action = SealJob(plan, [join([*plan.parts])]).action()
    history = History(state)
    history.apply(plan)
    late = MACHINE.apply(history.state, Entry(9, 1, "0badcafe", 0, [action]))
    assert (late.queues, late.refused_parts) == (history.state.queues, 0)
    changes = ({"start": 1}, {"segment": 100}, {"incarnation": 1}, {"parts": []})
    for change in changes:
        wrong = MACHINE.apply(state, Entry(9, 1, "0badcafe", 0, [{**action, **change}]))
        assert wrong.queues == state.queues
    whole = {**action, "parts": [part_json(join(parts))]}  # with the open segment
    by_another = MACHINE.apply(state, Entry(9, 0, "0badcafe", 0, [whole]))
    assert by_another.queues == state.queues
    assert MACHINE.apply(state, Entry(9, 1, "0badcafe", 0, [whole])).queues != state.queues
    life = state.life(QUEUE)
    assert life
    apart = replace(life.segments[1], base_queue_offset=QueueOffset(2))
    torn = replace(life, segments=(life.segments[0], apart, *life.segments[2:]))
    torn_state = replace(state, queues={QUEUE: (torn,)})
    after = MACHINE.apply(torn_state, Entry(9, 1, "0badcafe", 0, [action]))
    assert after.queues == torn_state.queues
