"""How reads end and where readers go on: one table; and no seam between the sides, whatever moves under a reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.both_sides import QUEUE, BothSides

from fetcher.statuses import GetStatus as Is
from fetcher.statuses import Policy
from tiered.log.parts import Gap

if TYPE_CHECKING:
    from fetcher.statuses import GetResult

# Local store [lmin, lend), tier [tmin, commit); None: that side does not know the queue.
Row = tuple[Any, Any, Policy | None, int, Is, int]
TABLE: list[Row] = [
    # local, tier, policy (None: all four), offset, status, next_begin
    (None, None, None, 0, Is.NO_MATCHED_LOGIC_QUEUE, 0),
    (None, None, None, 7, Is.NO_MATCHED_LOGIC_QUEUE, 7),
    ((0, 0), None, None, 0, Is.NO_MESSAGE_IN_QUEUE, 0),
    ((0, 0), None, None, 5, Is.NO_MESSAGE_IN_QUEUE, 5),
    # the tier alone
    (None, (100, 200), Policy.FORCE, 0, Is.OFFSET_TOO_SMALL, 100),
    (None, (100, 200), Policy.FORCE, 99, Is.OFFSET_TOO_SMALL, 100),
    (None, (100, 200), Policy.FORCE, 100, Is.FOUND, 132),
    (None, (100, 200), Policy.FORCE, 180, Is.FOUND, 200),
    (None, (100, 200), Policy.FORCE, 200, Is.OFFSET_OVERFLOW_ONE, 200),
    (None, (100, 200), Policy.FORCE, 300, Is.OFFSET_OVERFLOW_BADLY, 200),
    (None, (100, 200), Policy.NOT_IN_DISK, 100, Is.FOUND, 132),
    (None, (100, 200), Policy.NOT_IN_MEM, 100, Is.FOUND, 132),
    (None, (100, 200), Policy.DISABLE, 100, Is.NO_MATCHED_LOGIC_QUEUE, 100),
    # the local store alone
    ((100, 200), None, None, 99, Is.OFFSET_TOO_SMALL, 100),
    ((100, 200), None, None, 100, Is.FOUND, 132),
    ((100, 200), None, None, 190, Is.FOUND, 200),
    ((100, 200), None, None, 200, Is.OFFSET_OVERFLOW_ONE, 200),
    ((100, 200), None, None, 201, Is.OFFSET_OVERFLOW_BADLY, 200),
    # both, the tier behind
    ((50, 200), (0, 150), Policy.NOT_IN_DISK, 0, Is.FOUND, 32),
    ((50, 200), (0, 150), Policy.FORCE, 149, Is.FOUND, 150),
    ((50, 200), (0, 150), None, 150, Is.FOUND, 182),  # FORCE as well: not tiered yet is no overflow
    ((50, 200), (0, 150), None, 200, Is.OFFSET_OVERFLOW_ONE, 200),
    ((50, 200), (0, 150), None, 201, Is.OFFSET_OVERFLOW_BADLY, 200),
    ((50, 200), (0, 150), Policy.DISABLE, 49, Is.OFFSET_TOO_SMALL, 50),
    # all that is local has expired
    ((200, 200), (0, 200), Policy.NOT_IN_DISK, 199, Is.FOUND, 200),
    ((200, 200), (0, 200), Policy.NOT_IN_DISK, 200, Is.OFFSET_OVERFLOW_ONE, 200),
    ((200, 200), None, None, 10, Is.OFFSET_TOO_SMALL, 200),
    # a range that neither has: moved over at once, and told
    ((150, 200), (0, 100), Policy.NOT_IN_DISK, 100, Is.FOUND, 182),
    ((150, 200), (0, 100), Policy.DISABLE, 100, Is.OFFSET_TOO_SMALL, 150),
    # the broker begins anew, or lost its tail within a part: the tier does not know it yet
    ((0, 20), (0, 100), None, 0, Is.FOUND, 20),
    ((0, 20), (0, 100), None, 20, Is.OFFSET_OVERFLOW_ONE, 20),
    ((0, 20), (0, 100), None, 50, Is.OFFSET_OVERFLOW_BADLY, 20),
]


def sides_of(local: tuple[int, int] | None, tier: tuple[int, int] | None) -> BothSides:
    """Both sides with these bounds."""
    first = tier[0] if tier else 0
    both = BothSides(first=first)
    end = max(bounds[1] for bounds in (local, tier, (0, 0)) if bounds)
    both.append(end - first)
    if not end:
        both.local.append(QUEUE.topic, QUEUE.queue_id, b"")
    if tier:
        both.commit(tier[1])
        both.store.tier.refresh(1e9)
    if local is None:
        both.local.delete(QUEUE.topic, QUEUE.queue_id)
    else:
        both.local.cut(QUEUE.topic, QUEUE.queue_id, local[1])
        both.expire(local[0])
    return both


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_statuses_and_next_offsets(row: Row):
    local, tier, policy, offset, status, next_begin = row
    both = sides_of(local, tier)
    for one in Policy if policy is None else [policy]:
        found = both.get(offset, policy=one)
        assert (found.status, found.next_begin) == (status, next_begin), one
        if status is Is.FOUND:
            got = [o for o, _ in found.messages()]
            assert got == list(range(next_begin - len(got), next_begin))
            skipped = [(gap.start, gap.end) for gap in found.missing]
            assert skipped == ([(offset, got[0])] if got[0] > offset else [])
        else:
            assert not found.count
    known = both.store.bounds(QUEUE.topic, QUEUE.queue_id)
    result = both.get(offset, policy=Policy.NOT_IN_DISK)
    assert (result.min_offset, result.max_offset) == ((known.min, known.end) if known else (-1, -1))


def test_bounds_are_those_of_both_and_an_empty_local_store_hides_nothing():
    assert sides_of((50, 200), (10, 150)).store.min_offset("t", 0) == 10
    assert sides_of((50, 200), (10, 150)).store.max_offset("t", 0) == 200
    assert sides_of((200, 200), (10, 200)).store.min_offset("t", 0) == 10
    assert sides_of(None, (10, 200)).store.min_offset("t", 0) == 10
    assert sides_of((150, 200), None).store.min_offset("t", 0) == 150
    assert BothSides().store.min_offset("t", 0) == -1
    assert BothSides().store.max_offset("t", 0) == -1


def test_what_is_in_the_tier_and_not_proven_locally_is_read_if_both_have_a_message_in_common():
    both = BothSides()
    both.append(40)
    for end in (10, 20, 40):
        both.commit(end)
    both.tier_side.refresh(1e9)
    both.local.cut(QUEUE.topic, QUEUE.queue_id, 25)
    for policy in set(Policy) - {Policy.DISABLE}:
        assert both.get(25, policy=policy).next_begin == 40
        assert both.get(40, policy=policy).status is Is.OFFSET_OVERFLOW_ONE
    assert both.store.max_offset("t", 0) == 40
    both.local.delete(QUEUE.topic, QUEUE.queue_id)
    for _ in range(25):
        both.local.append(QUEUE.topic, QUEUE.queue_id, b"of another incarnation")
    assert both.get(25).status is Is.OFFSET_OVERFLOW_ONE
    for policy in Policy:
        for _, raw in both.get(0, policy=policy).messages():
            assert b"of another incarnation" in bytes(raw)


def test_a_gap_is_moved_over_and_told_and_so_is_the_message_behind_it():
    both = BothSides(Policy.FORCE, has_local=False)
    both.append(10)
    both.commit(10)
    both.gap(20)
    both.append(15)
    both.commit(25)
    both.store.tier.refresh(1e9)
    assert both.get(5).next_begin == 10
    found = both.get(10)
    assert (found.status, found.next_begin) == (Is.FOUND, 25)
    assert found.missing == (Gap(10, 20, "made so"),)
    assert [offset for offset, _ in found.messages()] == list(range(20, 25))


def read_on(both: BothSides, at: int, found: dict[int, bytes], **more: Any) -> GetResult:
    """One read; what it gives is right and goes on where the last one ended."""
    result: GetResult = both.get(at, **more)
    at_next = at
    for offset, raw in result.messages():
        assert offset == at_next, "no gap and no repetition"
        assert bytes(raw) == both.raws[offset]
        found[offset] = bytes(raw)
        at_next += 1
    assert not result.missing
    assert result.next_begin == at_next, result
    return result


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 8)),
        st.tuples(st.just("commit"), st.integers(1, 12)),
        st.tuples(st.just("expire"), st.integers(1, 12)),
        st.tuples(st.just("refresh"), st.just(0)),
        st.tuples(st.just("memory"), st.integers(0, 40)),
        st.tuples(st.just("read"), st.integers(1, 9)),
    ),
    max_size=40,
)
MOVES = st.lists(st.integers(0, 12), max_size=20)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([p for p in Policy if p is not Policy.DISABLE]), STEPS, MOVES)
def test_i1_no_seam_while_retention_and_commit_move(
    policy: Policy, steps: list[tuple[str, int]], moves: list[int]
):
    both = BothSides(policy)
    both.append(1)
    found: dict[int, bytes] = {}
    left = list(moves)

    def expire(count: int) -> None:
        base = both.local.queues()[QUEUE].min
        both.expire(max(base, min(base + count, both.commit_offset)))

    def move_under_the_reader() -> None:
        if left:
            expire(left.pop())

    both.local.before = move_under_the_reader
    at = 0
    for name, number in steps:
        if name == "append":
            both.append(number)
        elif name == "commit":
            both.local.before = lambda: None
            both.commit(min(both.commit_offset + number, both.end), roll=number % 3 == 0)
            both.local.before = move_under_the_reader
        elif name == "expire":
            expire(number)
        elif name == "refresh":
            both.tier_side.refresh(1e9)
        elif name == "memory":
            both.memory_from = number
        else:
            result = read_on(both, at, found, max_count=number)
            assert (result.status is Is.FOUND) == (at < both.end)
            at = result.next_begin
    while at < both.end:
        at = read_on(both, at, found).next_begin
    assert found == both.raws
    assert both.get(at).status is Is.OFFSET_OVERFLOW_ONE
