"""What is merged: planned from the state alone, within its bounds, and taken by replay to the last part."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.bundles import made_part, merge_action, named_action

from tiered.errors import InvalidError
from tiered.journal.entry import Entry
from tiered.log.merge import LAST_LEVEL, MergeOutput, MergePlan, MergePolicy, MergeRun, plan_merge
from tiered.log.parts import Parts, queue_action
from tiered.log.state import TierMachine, TierState
from tiered.log.verify_objects import check_state
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.log.parts import Part

MACHINE = TierMachine()
A0, A1, B0 = MessageQueue("a", 0), MessageQueue("a", 1), MessageQueue("b", 0)
QUEUES = (A0, A1, B0)
BASE_BYTES = 28
"""Of the items of one message, and its block table."""


class Tier:
    """A state that grows by rounds, and is merged as the merge thread does it; no bundle is anywhere.

    Attributes:
        state: As the journal has it.
        rewritten: How often the bytes at each queue offset were rewritten by a level that was full.
    """

    def __init__(self, policy: MergePolicy) -> None:
        self.policy = policy
        self.state = TierState()
        self.rewritten: dict[MessageQueue, Counter[int]] = defaultdict(Counter)
        self.number = 0
        self.now_ms = 0
        self.say({"do": "epoch", "epoch": 1, "holder": {}})

    def say(self, *actions: Any) -> None:
        self.number += 1
        entry = Entry(self.number, 1, "0badcafe", self.now_ms, list(actions))
        self.state = MACHINE.apply(self.state, entry)
        assert self.state.refused_parts == 0

    def parts(self, queue: MessageQueue) -> Parts:
        incarnation = self.state.incarnation(queue)
        return incarnation.parts() if incarnation else Parts.of([])

    def round(self, sizes: dict[MessageQueue, int], *, roll: bool = False) -> None:
        """One bundle, with one message of each of these sizes."""
        self.number += 1
        key, start = f"bundle/0/{self.number:020d}-0000000001-0badcafe-0000000000", 0
        named = []
        for queue in sorted(sizes):
            incarnation = self.state.incarnation(queue)
            at, log = (incarnation.commit_offset, incarnation.log_end) if incarnation else (0, 0)
            last = incarnation.segments[-1] if incarnation and incarnation.segments else None
            goes_on = last and not last.sealed and last.parts.queue_end == at and not roll
            part = made_part(
                at, log, 1, sizes[queue], key=key, start=start, times=(at, at), last=at + 1
            )
            start += part.section.size_bytes
            named.append((queue, 0, last.base_offset if last and goes_on else log, part))
        bundle = replace(named[-1][3].bundle, size_bytes=start + 100)
        self.say(named_action(*[(*one[:3], replace(one[3], bundle=bundle)) for one in named]))

    def gap(self, queue: MessageQueue) -> None:
        incarnation = self.state.incarnation(queue)
        if incarnation:
            at = incarnation.commit_offset
            self.say(queue_action("gap", queue, 0, start=at, end=at + 5, reason="r"))

    def merge_once(self) -> MergePlan | None:
        plan = plan_merge(self.state, self.policy)
        if plan is not None:
            is_full = any(
                bundle.level < output.level for bundle in plan.bundles for output in plan.outputs
            )
            for output in plan.outputs:
                self._make(output, is_full=is_full)
            left = {bundle.key for bundle in self.bundles()}
            assert left.isdisjoint(bundle.key for bundle in plan.bundles), (
                "nothing of these is named"
            )
        return plan

    def _make(self, output: MergeOutput, *, is_full: bool) -> None:
        self.number += 1
        unique = f"{self.number:020d}-0000000001-0badcafe-0000000000"
        key, start = f"bundle/{output.level}/{unique}", 0
        if output.queue is not None:
            key = f"queue/{output.topic}/{output.queue.queue_id:010d}/{0:010d}/{unique}"
        elif output.topic:
            key = f"topic/{output.topic}/{output.level}/{unique}"
        made: list[tuple[MergeRun, Part]] = []
        assert list(output.runs) == sorted(
            output.runs, key=lambda r: (r.queue, r.position, r.parts[0].queue_offset)
        )
        for run in output.runs:
            first, last = run.parts[0], run.parts[-1]
            for one, two in pairwise(run.parts):
                assert one.queue_end == two.queue_offset
            count, size = last.queue_end - first.queue_offset, last.log_end - first.log_offset
            part = made_part(
                first.queue_offset, first.log_offset, count, size, key=key, start=start,
                level=output.level, times=(first.store_min_ms, last.store_max_ms), last=last.last,
            )  # fmt: skip
            start += part.section.size_bytes
            made.append((run, part))
            if is_full:
                self.rewritten[run.queue].update(range(first.queue_offset, last.queue_end))
        bundle = replace(made[-1][1].bundle, size_bytes=start + 100)
        before = {queue: self._is_sealed(queue) for queue in self.state.queues}
        self.say(
            merge_action(
                *[
                    (
                        run.queue,
                        run.incarnation,
                        run.segment,
                        replace(part, bundle=bundle),
                        run.parts,
                    )
                    for run, part in made
                ]
            )
        )
        for run, part in made:
            assert replace(part, bundle=bundle) in list(self.parts(run.queue)), "replay takes it"
            assert self._is_sealed(run.queue) == before[run.queue]

    def _is_sealed(self, queue: MessageQueue) -> bool:
        incarnation = self.state.incarnation(queue)
        return bool(incarnation and incarnation.segments and incarnation.segments[-1].sealed)

    def merge(self) -> list[MergePlan]:
        """Until nothing is due."""
        plans = []
        while (plan := self.merge_once()) is not None:
            plans.append(plan)
            assert len(plans) < 200, "it goes on for ever"
        return plans

    def bundles(self) -> dict[Any, int]:
        """Each bundle that is named, and how many bytes of it."""
        named: Counter[Any] = Counter()
        for queue in self.state.queues:
            for part in self.parts(queue):
                named[part.bundle] += part.stored_bytes
        return dict(named)

    def check(self, ends: dict[MessageQueue, tuple[int, int]]) -> None:
        """What holds whatever was merged."""
        for queue, (commit, log_end) in ends.items():
            incarnation = self.state.incarnation(queue)
            assert incarnation
            assert (incarnation.commit_offset, incarnation.log_end) == (commit, log_end)
        assert [p.detail for p in check_state(self.state)] == []
        assert MACHINE.load(MACHINE.dump(self.state)).queues == self.state.queues

    def ends(self) -> dict[MessageQueue, tuple[int, int]]:
        return {
            queue: (incarnation.commit_offset, incarnation.log_end)
            for queue in self.state.queues
            if (incarnation := self.state.incarnation(queue))
        }


POLICIES = st.builds(
    MergePolicy,
    fan_in=st.integers(2, 4),
    bundle_bytes_max=st.sampled_from((300, 2_000, 1 << 20)),
    own_bytes=st.sampled_from((250, 3_000, 1 << 20)),
    segment_bytes_max=st.sampled_from((0, 1_000, 1 << 30)),
    segment_age_ms_max=st.sampled_from((10, 1 << 40)),
    compresses=st.booleans(),
)
STEPS = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from(QUEUES), st.integers(1, 300), min_size=1),
        st.sampled_from(["merge", "gap", "roll", "later"]),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@example(
    MergePolicy(
        3, 2000, own_bytes=250, segment_bytes_max=1000, segment_age_ms_max=10, compresses=False
    ),
    [
        *({A0: 211, A1: 300}, "roll", {A0: 211, A1: 300}, {A0: 1}, {A0: 1}),
        *({A0: 1, A1: 182, B0: 300}, "gap", {A0: 1}),
    ],
)  # a run crosses a border of segments, and another behind it lies in the second of these
@given(POLICIES, STEPS)
def test_whatever_comes_merging_settles_loses_nothing_and_rewrites_a_byte_once_a_level(
    policy: MergePolicy, steps: list[Any]
):
    tier = Tier(policy)
    roll = False
    for step in steps:
        if isinstance(step, dict):
            tier.round(step, roll=roll)
            roll = False
        elif step == "merge":
            before = tier.ends()
            tier.merge()
            tier.check(before)
        elif step == "gap":
            tier.gap(A0)
        elif step == "later":
            tier.now_ms += 7
        else:
            roll = True
    before = tier.ends()
    tier.merge()
    tier.check(before)
    assert plan_merge(tier.state, policy) is None
    for counts in tier.rewritten.values():
        assert max(counts.values(), default=0) <= LAST_LEVEL
    for level in range(LAST_LEVEL):
        for queue in tier.state.queues:
            held = {p.bundle for p in tier.parts(queue) if p.bundle.level == level}
            assert len(held) < policy.fan_in or not policy.compresses


@pytest.mark.parametrize("queues", [1, 3])
def test_parts_of_a_queue_stay_below_fan_in_times_levels(queues: int):
    policy = MergePolicy(fan_in=4, bundle_bytes_max=1 << 20, own_bytes=1 << 20)
    tier = Tier(policy)
    for _ in range(4**LAST_LEVEL * 3):
        tier.round(dict.fromkeys(QUEUES[:queues], 100))
        tier.merge()
        for queue in QUEUES[:queues]:
            old = sum(part.bundle.level == LAST_LEVEL for part in tier.parts(queue))
            assert len(tier.parts(queue)) - old < policy.fan_in * LAST_LEVEL
    assert len(tier.parts(A0)) == 3, "all of it has been gathered to the last level"
    assert max(tier.rewritten[A0].values()) == LAST_LEVEL
    assert max(map(len, (tier.parts(queue) for queue in QUEUES[:queues]))) <= 3


def test_nothing_is_due_below_the_fan_in():
    tier = Tier(MergePolicy(fan_in=3))
    for _ in range(2):
        tier.round({A0: 10, B0: 10})
        assert plan_merge(tier.state, tier.policy) is None
    tier.round({A1: 10})
    (plan,) = tier.merge()
    (output,) = plan.outputs
    assert (output.level, output.topic, output.queue) == (1, "", None)
    assert [(run.queue, len(run.parts)) for run in output.runs] == [(A0, 2), (A1, 1), (B0, 2)]


def test_who_has_enough_gets_bundles_of_its_own_and_is_done_with():
    policy = MergePolicy(fan_in=2, own_bytes=400, bundle_bytes_max=1 << 20)
    tier = Tier(policy)
    for _ in range(2):
        tier.round({A0: 300, A1: 190, B0: 10})
    (plan,) = tier.merge()
    by = {(o.queue, o.topic): (o.level, [r.queue for r in o.runs]) for o in plan.outputs}
    assert by == {
        (A0, "a"): (LAST_LEVEL, [A0]),
        (A1, "a"): (LAST_LEVEL, [A1]),
        (None, ""): (1, [B0]),
    }
    many = Tier(replace(policy, own_bytes=600))
    for _ in range(2):
        many.round({A0: 150, A1: 150, B0: 10})
    plan = plan_merge(many.state, many.policy)
    assert plan is not None
    by = {(o.queue, o.topic): (o.level, [r.queue for r in o.runs]) for o in plan.outputs}
    assert by == {(None, "a"): (1, [A0, A1]), (None, ""): (1, [B0])}


def test_large_bundles_of_different_queues_are_not_written_again_for_nothing():
    """One merge makes many: they would be as many after the next, and no queue would have fewer parts."""
    policy = MergePolicy(fan_in=2, bundle_bytes_max=1000, own_bytes=1 << 20)
    queues = [MessageQueue("t", number) for number in range(8)]
    tier = Tier(policy)
    for number in range(2):
        tier.round(dict.fromkeys(queues, 400))
        assert len(tier.merge()) == number
    assert [bundle.level for bundle in tier.bundles()] == [1] * 8
    assert [len(tier.parts(queue)) for queue in queues] == [1] * 8


def test_no_bundle_is_larger_than_its_limit_unless_one_part_is():
    policy = MergePolicy(fan_in=8, bundle_bytes_max=1000, own_bytes=1 << 20)
    tier = Tier(policy)
    for _ in range(8):
        tier.round({A0: 300, A1: 10, B0: 1500})
    for plan in tier.merge():
        for output in plan.outputs:
            assert output.size_bytes <= 1000 or [len(r.parts) for r in output.runs] == [1]
    assert plan_merge(tier.state, policy) is None


def test_damaged_bundles_are_left_and_the_others_are_gathered():
    tier = Tier(MergePolicy(fan_in=2))
    for _ in range(3):
        tier.round({A0: 10})
    bad = tier.parts(A0)[1].bundle
    plan = plan_merge(tier.state, tier.policy, leave={bad.key})
    assert plan is not None
    assert bad not in plan.bundles
    assert [len(run.parts) for output in plan.outputs for run in output.runs] == [1, 1]


def test_a_fan_in_of_one_is_refused():
    with pytest.raises(InvalidError, match="at least 2"):
        MergePolicy(fan_in=1)


# -- bundles of which little is named ---------------------------------------------------------------


def expire(tier: Tier, queue: MessageQueue) -> None:
    """All rolled segments of a queue."""
    incarnation = tier.state.incarnation(queue)
    assert incarnation
    low, high = incarnation.min_offset, incarnation.segments[-1].base_queue_offset
    fields = {"position": 0, "min_from": low, "min_to": high}
    tier.say(queue_action("expire", queue, 0, **fields))


def with_expired(rounds: int = 4, size: int = 200_000) -> Tier:
    """A tier of two topics in bundles of the last level, of which one has expired."""
    tier = Tier(MergePolicy(fan_in=2, bundle_bytes_max=1 << 24, own_bytes=1 << 30))
    for _ in range(2 * rounds):
        tier.round({A0: size, B0: size // 3})
    tier.merge()
    tier.round({A0: 10, B0: 10}, roll=True)
    return tier


def test_a_bundle_of_which_less_than_half_is_named_is_merged_again_once():
    tier = with_expired()
    assert plan_merge(tier.state, tier.policy) is None
    expire(tier, A0)
    before, ends = tier.bundles(), tier.ends()
    plans = tier.merge()
    assert plans
    assert {bundle for plan in plans for bundle in plan.bundles} <= set(before)
    stored = sum(bundle.size_bytes for bundle in tier.bundles())
    assert stored <= 1.5 * sum(tier.bundles().values())
    tier.check(ends)


def test_what_is_still_named_by_half_or_is_small_is_left():
    tier = with_expired()
    expire(tier, B0)
    assert plan_merge(tier.state, tier.policy) is None
    small = with_expired(size=300)
    expire(small, A0)
    assert plan_merge(small.state, small.policy) is None, "tables and footers are most of it"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.sampled_from(["a", "b", "both", "expire a", "expire b"]), max_size=30),
)
def test_bytes_stored_stay_within_their_bound_whatever_expires(fan_in: int, steps: list[str]):
    tier = Tier(MergePolicy(fan_in=fan_in, bundle_bytes_max=1 << 22, own_bytes=1 << 30))
    tier.round({A0: 10, B0: 10})
    for step in steps:
        if step.startswith("expire"):
            expire(tier, A0 if step.endswith("a") else B0)
        else:
            names = {"a": [A0], "b": [B0], "both": [A0, B0]}[step]
            tier.round(dict.fromkeys(names, 300_000), roll=True)
        tier.merge()
        named = tier.bundles()
        stored, used = sum(bundle.size_bytes for bundle in named), sum(named.values())
        spare = len(named) * 65_536 + (1 << 22)
        assert stored <= 2 * used + spare


# -- what segments may become one -------------------------------------------------------------------


def test_a_hundred_switches_in_a_row_leave_one_segment():
    tier = Tier(MergePolicy(fan_in=8, bundle_bytes_max=1 << 20, own_bytes=1 << 20))
    for _ in range(101):
        tier.round({A0: 10}, roll=True)
        tier.merge()
    incarnation = tier.state.incarnation(A0)
    assert incarnation
    assert len(incarnation.segments) <= 8 * LAST_LEVEL
    assert (
        sum(len(segment.parts) for segment in incarnation.segments[:-1])
        == len(incarnation.segments) - 1
    )


def segments_after(policy: MergePolicy, *, later_ms: int = 0) -> list[int]:
    tier = Tier(replace(policy, fan_in=4))
    for _ in range(4):
        tier.round({A0: 100}, roll=True)
        tier.now_ms += later_ms
    tier.round({A0: 100}, roll=True)
    tier.merge()
    incarnation = tier.state.incarnation(A0)
    assert incarnation
    return [segment.base_queue_offset for segment in incarnation.segments]


def test_segments_that_were_rolled_for_their_age_or_size_stay_apart():
    policy = MergePolicy()
    assert segments_after(policy) == [0, 4]
    assert segments_after(replace(policy, segment_bytes_max=250)) == [0, 2, 4]
    assert segments_after(replace(policy, segment_bytes_max=0)) == [0, 1, 2, 3, 4]
    assert segments_after(replace(policy, segment_age_ms_max=100), later_ms=100) == [0, 1, 2, 3, 4]
    assert segments_after(replace(policy, segment_age_ms_max=100), later_ms=25) == [0, 3, 4]


def test_over_a_gap_nothing_is_united():
    tier = Tier(MergePolicy(fan_in=3))
    tier.round({A0: 10}, roll=True)
    tier.gap(A0)
    tier.round({A0: 10}, roll=True)
    tier.round({A0: 10}, roll=True)
    (plan,) = tier.merge()
    assert [len(run.parts) for output in plan.outputs for run in output.runs] == [1, 1, 1]


def runs_of(plan: MergePlan) -> Sequence[MergeRun]:
    return [run for output in plan.outputs for run in output.runs]


def test_every_incarnation_is_gathered_and_none_with_another():
    tier = Tier(MergePolicy(fan_in=4))
    for _ in range(3):
        tier.round({A0: 100})
    incarnation = tier.state.incarnation(A0)
    assert incarnation
    fields = {"end": 2, "was": 3, "head": None, "reason": "r"}
    tier.say(queue_action("truncate", A0, 0, **fields))
    tier.round({A0: 100})
    plan = plan_merge(tier.state, tier.policy)
    assert plan is not None
    assert [
        (run.position, run.truncated, [p.queue_offset for p in run.parts]) for run in runs_of(plan)
    ] == [
        (0, True, [2]),
        (1, False, [0, 1, 2]),
    ]
