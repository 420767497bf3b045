"""The write side of a queue, held against a model: whatever fails, replay accepts every part and loses nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.bundles import made_part, named_action
from support.tiers import QUEUE, batch_of

from tiered.journal.entry import Entry
from tiered.log.composite import (
    AppendResult,
    CommitColumns,
    CommitPolicy,
    CompositeFlatFile,
    GroupCommit,
    Tail,
    trim,
)
from tiered.log.flat_file import ITEM
from tiered.log.parts import Incarnation, Part, queue_action
from tiered.log.state import TierMachine, TierState
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from tiered.local.interface import RecordBatch

POLICY = CommitPolicy(
    part_bytes=400, freshness_s=10.0, segment_bytes_max=1000, segment_age_ms_max=5000
)
MACHINE = TierMachine()


def backoff(failures: int) -> float:
    return float(failures)


def fresh(policy: CommitPolicy = POLICY, first: int = 0) -> CompositeFlatFile:
    return CompositeFlatFile(QUEUE, Incarnation(0, QueueOffset(first), QueueOffset(first)), policy)


def part_of_commit(commit: GroupCommit) -> Part:
    of = CommitColumns.of([commit])
    return made_part(
        commit.queue_offset,
        commit.log_offset,
        commit.count,
        commit.data_bytes,
        holes=int(of.holes[0]),
        times=(int(of.low_ms[0]), int(of.high_ms[0])),
        last=commit.last,
    )


def payload(batch: RecordBatch) -> list[bytes]:
    data = bytes(memoryview(batch.data))
    return [
        data[p : p + s] for p, s in zip(batch.positions.tolist(), batch.sizes.tolist(), strict=True)
    ]


# -- append and trim ----------------------------------------------------------------------------


def test_appending_continues_repeats_or_leaves_a_gap():
    file = fresh()
    assert file.append(batch_of(0, [b"a", b"b"]), 1.0) is AppendResult.APPENDED
    assert file.append(batch_of(0, [b"a", b"b"]), 1.0) is AppendResult.DUPLICATE
    assert file.append(batch_of(3, [b"d"]), 1.0) is AppendResult.GAP
    assert file.append(batch_of(1, [b"b", b"c"]), 1.0) is AppendResult.APPENDED
    assert (file.append_offset, file.commit_offset) == (3, 0)
    commit = file.take(0)
    assert b"".join(bytes(memoryview(chunk)) for chunk in commit.data()) == b"".join(
        payload(batch_of(0, [b"a", b"b", b"c"]))
    )


ITEMS = st.lists(
    st.one_of(st.none(), st.binary(max_size=4), st.tuples(st.integers(1, 4), st.binary(max_size=3))),
    min_size=1, max_size=8,
)  # fmt: skip


@given(ITEMS, st.data())
def test_i3_trimming_keeps_every_record_behind_the_cut_byte_for_byte(
    items: list[Any], draw: st.DataObject
):
    batch = batch_of(100, items)
    cut = draw.draw(st.integers(0, batch.count - 1))
    rest = trim(batch, QueueOffset(100 + cut))
    assert (rest.base_offset, rest.end_offset) == (100 + cut, batch.end_offset)
    assert payload(rest) == payload(batch)[cut:]
    assert (rest.positions >= 0).all()
    for name in ("tag_codes", "store_timestamps_ms", "physical_offsets"):
        assert np.array_equal(getattr(rest, name), getattr(batch, name)[cut:])
    assert [q.queue_offset for q in rest.quarantined] == [
        q.queue_offset for q in batch.quarantined if q.queue_offset >= 100 + cut
    ]


def test_i2_items_point_at_their_records_and_holes_say_why():
    file = fresh()
    file.append(batch_of(0, [b"first"]), 0.0)
    file.take(0)
    file.append(batch_of(1, [b"a", None, (2, b"bb")]), 0.0)
    file.append(batch_of(5, [None, b"c"]), 0.0)
    commit = file.take(0)
    of = CommitColumns.of([commit])
    items = np.frombuffer(of.items, ITEM)
    data = b"".join(bytes(memoryview(chunk)) for chunk in commit.data())
    wanted = payload(batch_of(1, [b"a", None, (2, b"bb"), None, b"c"]))
    assert len(items) == commit.count == 6
    for item, raw in zip(items, wanted, strict=True):
        start = int(item["log_offset"]) - commit.log_offset
        assert data[start : start + int(item["size"])] == raw
    assert items["tag_code"].tolist() == [97, 1, 97, 97, 1, 97]
    assert (of.holes[0], len(commit.quarantined)) == (2, 2)
    assert int(of.high_ms[0]) - int(of.low_ms[0]) == 5


def test_a_commit_of_nothing_but_holes_has_no_times():
    file = fresh()
    file.append(batch_of(0, [None, None]), 0.0)
    assert (file.buffered_bytes, file.has_buffered) == (0, True)
    commit = file.take(0)
    assert not file.has_buffered
    of = CommitColumns.of([commit])
    assert (*of.low_ms, *of.high_ms, *of.holes) == (-1, -1, 2)
    assert (commit.data_bytes, commit.count) == (0, 2)


# -- what is taken --------------------------------------------------------------------------------


def test_the_oldest_is_known_until_it_is_taken():
    file = fresh()
    assert (file.oldest_s, file.take(0)) == (None, None)
    file.append(batch_of(0, [b"x"]), 5.0)
    file.append(batch_of(1, [b"y"]), 6.0)
    assert file.oldest_s == 5.0
    file.take(0)
    assert file.oldest_s is None


def test_several_commits_are_on_their_way_and_handed_on_in_order():
    file = fresh()
    commits = []
    for base in range(4):
        file.append(batch_of(base, [b"x" * 500]), 0.0)
        commits.append(taken(file))
    assert [commit.queue_offset for commit in commits] == [0, 1, 2, 3]
    assert file.stored(commits[2]) == []
    assert file.stored(commits[1]) == []
    assert file.stored(commits[0]) == commits[:3]
    assert file.stored(commits[0]) == [], "what was handed on is not on its way"
    assert [is_on_its_way(file, commit) for commit in commits] == [False, False, False, True]
    assert file.stored(commits[3]) == commits[3:]
    assert (file.commit_offset, file.append_offset) == (0, 4), "an entry has to name them"


def is_on_its_way(file: CompositeFlatFile, commit: GroupCommit) -> bool:
    return commit in file._on_their_way


def taken(file: CompositeFlatFile, now_ms: int = 0) -> GroupCommit:
    commit = file.take(now_ms)
    assert commit is not None
    return commit


def test_i9_a_commit_takes_one_batch_however_large():
    file = fresh()
    file.append(batch_of(0, [b"x" * 5000]), 0.0)
    file.append(batch_of(1, [b"y"]), 0.0)
    commit = file.take(0)
    assert commit.count == 1
    assert file.buffered_bytes == len(payload(batch_of(1, [b"y"]))[0])


# -- Non-StopWrite ------------------------------------------------------------------------------


@dataclass
class Queue:
    """A composite and the journal state that it writes."""

    file: CompositeFlatFile
    state: TierState

    @classmethod
    def new(cls, policy: CommitPolicy = POLICY) -> Queue:
        epoch = {"do": "epoch", "epoch": 1, "holder": {}}
        state = MACHINE.apply(MACHINE.initial(), Entry(1, 1, "0badcafe", 0, [epoch]))
        return cls(fresh(policy), state)

    def say(self, action: Any, now_ms: int = 0) -> None:
        self.state = MACHINE.apply(self.state, Entry(1, 1, "0badcafe", now_ms, [action]))
        assert self.state.refused_parts == 0, "replay accepts every part"

    def commit(self, commit: GroupCommit, now_ms: int = 0) -> None:
        part = part_of_commit(commit)
        self.say(named_action((QUEUE, 0, commit.segment, part)), now_ms)
        self.file.committed(part)

    def tier(self, batch: RecordBatch, now_ms: int = 0) -> None:
        """All the way."""
        self.file.append(batch, 0.0)
        commit = taken(self.file, now_ms)
        assert self.file.stored(commit) == [commit]
        self.commit(commit, now_ms)

    @property
    def incarnation(self) -> Incarnation:
        incarnation = self.state.incarnation(QUEUE)
        assert incarnation
        return incarnation


def test_a_failed_upload_at_the_middle_of_a_segment_switches_files():
    queue = Queue.new()
    file = queue.file
    file.append(batch_of(0, [b"a"]), 0.0)
    first = taken(file)
    file.append(batch_of(1, [b"b"]), 0.0)
    failed = taken(file)
    assert file.failed(failed, 50.0, backoff) == [failed]
    assert (file.switches, file.failures, file.next_try_s) == (1, 1, 51.0)
    file.append(batch_of(2, [b"c"]), 50.0)
    assert file.oldest_s == 0.0, (
        "what failed is as old as it was, and due as soon as the pause is over"
    )
    again = taken(file)
    assert (again.segment, again.log_offset) == (failed.log_offset, failed.log_offset)
    assert again.count == 2, "with what came since"
    assert first.segment == failed.segment == 0
    assert file.stored(again) == []
    assert file.stored(first) == [first, again]
    queue.commit(first)
    queue.commit(again)
    assert [s.base_offset for s in queue.incarnation.segments] == [0, failed.log_offset]
    assert (file.failures, file.is_settled) == (0, True)


def test_a_failure_gives_up_what_is_behind_it_durable_or_not():
    queue = Queue.new()
    file = queue.file
    commits = []
    for base in range(4):
        file.append(batch_of(base, [b"%d" % base]), 0.0)
        commits.append(taken(file))
    assert file.stored(commits[2]) == []
    assert file.failed(commits[1], 0.0, backoff) == [commits[3], commits[2], commits[1]]
    assert file.failed(commits[3], 0.0, backoff) == [], "it had been given up"
    assert file.stored(commits[2]) == []
    assert [is_on_its_way(file, commit) for commit in commits] == [True, False, False, False]
    assert (file.switches, file.buffered_bytes) == (1, sum(c.data_bytes for c in commits[1:]))
    again = taken(file)
    assert (again.queue_offset, again.count, again.log_offset) == (1, 3, commits[1].log_offset)
    assert b"".join(bytes(memoryview(chunk)) for chunk in again.data()) == b"".join(
        payload(batch_of(1, [b"1", b"2", b"3"]))
    )
    assert file.stored(commits[0]) == commits[:1]
    assert file.stored(again) == [again]
    for commit in (commits[0], again):
        queue.commit(commit)
    assert (file.commit_offset, file.is_settled) == (4, True)


def test_a_failed_upload_at_position_0_opens_no_second_segment():
    queue = Queue.new()
    queue.file.append(batch_of(0, [b"a"]), 0.0)
    queue.file.failed(taken(queue.file), 0.0, backoff)
    again = taken(queue.file)
    queue.file.stored(again)
    queue.commit(again)
    assert len(queue.incarnation.segments) == 1


@pytest.mark.parametrize("committed", [0, 1])
def test_a_hundred_switches_leave_one_segment_more(committed: int):
    queue = Queue.new()
    file = queue.file
    for number in range(committed):
        queue.tier(batch_of(number, [b"a"]))
    for number in range(100):
        file.append(batch_of(committed + number, [b"b"]), 0.0)
        assert file.failed(taken(file), 0.0, backoff)
    assert (file.switches, file.failures) == (100, 100)
    while file.append_offset > file.commit_offset:
        commit = taken(file)
        assert file.stored(commit) == [commit]
        queue.commit(commit)
    assert queue.incarnation.commit_offset == committed + 100
    bases = [segment.base_queue_offset for segment in queue.incarnation.segments]
    assert bases[: 1 + committed] == [0, 1][: 1 + committed]


def test_a_failure_of_a_commit_that_began_behind_a_switch_begins_at_the_same_place():
    """The earlier one fails after the later one, which had been cut again meanwhile."""
    queue = Queue.new()
    file = queue.file
    commits = []
    for base in range(2):
        file.append(batch_of(base, [b"x"]), 0.0)
        commits.append(taken(file))
    first, second = commits
    file.failed(second, 0.0, backoff)
    again = taken(file)
    assert file.failed(first, 0.0, backoff) == [again, first]
    both = taken(file)
    assert (both.queue_offset, both.log_offset, both.segment, both.count) == (0, 0, 0, 2)
    assert file.stored(both) == [both]
    queue.commit(both)


def test_segments_roll_by_size_and_by_age():
    queue = Queue.new()
    for number, now_ms in enumerate([0, 0, 4999, 5000, 5001, 10_000]):
        queue.tier(batch_of(number, [b"x" * 10]), now_ms)
    assert [s.base_queue_offset for s in queue.incarnation.segments] == [0, 3, 5]
    queue.file.append(batch_of(6, [b"x" * 1000]), 0.0)
    queue.file.append(batch_of(7, [b"x"]), 0.0)
    for _ in range(2):
        commit = taken(queue.file, 10_000)
        queue.file.stored(commit)
        queue.commit(commit, 10_000)
    assert [s.base_queue_offset for s in queue.incarnation.segments] == [0, 3, 5, 7]


def test_a_clock_that_was_set_back_postpones_no_roll_by_age():
    queue = Queue.new()
    times = [10_000_000, 10_000_001, 9_990_000, 2_000_000, 2_000_001, 2_005_000]
    for number, now_ms in enumerate(times):
        queue.tier(batch_of(number, [b"x" * 10]), now_ms)
    assert [s.base_queue_offset for s in queue.incarnation.segments] == [0, 3, 5]


def test_nothing_is_taken_while_the_entry_of_a_gap_is_on_its_way():
    file = fresh()
    file.hold()
    assert file.append(batch_of(0, [b"late"]), 0.0) is AppendResult.GAP
    file.skip_to(QueueOffset(5))
    assert file.append(batch_of(0, [b"late"]), 0.0) is AppendResult.DUPLICATE
    assert file.append(batch_of(5, [b"a"]), 0.0) is AppendResult.APPENDED
    with pytest.raises(AssertionError):
        file.hold()


def test_behind_a_gap_a_restarted_writer_opens_a_new_segment():
    queue = Queue.new()
    queue.tier(batch_of(0, [b"a"]))
    queue.say(queue_action("gap", QUEUE, 0, start=1, end=5, reason="r"))
    assert not Tail.of(queue.incarnation).is_open
    queue.file = CompositeFlatFile(QUEUE, queue.incarnation, POLICY)
    queue.tier(batch_of(5, [b"b"]))
    assert [s.base_queue_offset for s in queue.incarnation.segments] == [0, 5]


def test_a_restarted_writer_goes_on_in_the_open_segment():
    queue = Queue.new()
    queue.tier(batch_of(0, [b"a"]), 1000)
    queue.file = CompositeFlatFile(QUEUE, queue.incarnation, POLICY)
    assert Tail.of(queue.incarnation) == Tail(0, 1000, queue.incarnation.log_end, is_open=True)  # type: ignore[arg-type]
    queue.tier(batch_of(1, [b"b"]), 2000)
    assert [len(s.parts) for s in queue.incarnation.segments] == [2]


# -- sealing --------------------------------------------------------------------------------------

SEAL = queue_action("seal", QUEUE, 0, segment=0)


def test_what_comes_behind_a_sealed_segment_goes_into_a_new_one():
    queue = Queue.new()
    for base in range(3):
        queue.tier(batch_of(base, [b"a"]))
    assert queue.file.end_segment()
    queue.say(SEAL)
    queue.tier(batch_of(3, [b"b"]))
    assert [(s.base_queue_offset, s.sealed) for s in queue.incarnation.segments] == [
        (0, True),
        (3, False),
    ]


def test_a_segment_with_something_under_way_does_not_end():
    queue = Queue.new()
    queue.tier(batch_of(0, [b"a"]))
    queue.file.append(batch_of(1, [b"b"]), 0.0)
    assert not queue.file.end_segment()
    commit = taken(queue.file)
    assert not queue.file.end_segment()
    assert queue.file.stored(commit)
    assert not queue.file.end_segment()
    queue.commit(commit)
    assert [len(s.parts) for s in queue.incarnation.segments] == [2], (
        "it goes on as if nobody had asked"
    )
    assert queue.file.end_segment()


def test_a_segment_does_not_end_while_an_entry_about_its_queue_is_on_its_way():
    """After a truncation the queue has another write side, which would go on in what is sealed. (Seed 326945.)"""
    queue = Queue.new()
    queue.tier(batch_of(0, [b"a"]))
    queue.file.hold()
    assert not queue.file.end_segment()
    queue.file.release()
    assert queue.file.end_segment()


def test_a_segment_that_ended_and_was_not_sealed_costs_nothing_but_a_roll():
    queue = Queue.new()
    queue.tier(batch_of(0, [b"a"]))
    assert queue.file.end_segment()
    queue.tier(batch_of(1, [b"b"]))
    queue.tier(batch_of(2, [b"b"]))
    assert [len(s.parts) for s in queue.incarnation.segments] == [1, 2]


def test_sealing_holes_does_not_touch_the_segment_with_the_same_base():
    queue = Queue.new()
    for base in range(2):
        queue.tier(batch_of(base, [None]))
    assert queue.file.end_segment()
    queue.say(SEAL)
    for base in (2, 3):
        queue.tier(batch_of(base, [b"a"]))
    assert [s.base_offset for s in queue.incarnation.segments] == [0, 0]
    assert [len(s.parts) for s in queue.incarnation.segments] == [2, 2]


# -- all of it, in any order ----------------------------------------------------------------------


class CompositeMachine(RuleBasedStateMachine):
    """Any order of append, take, stored, failed, committed, gap, sealing and restart."""

    @initialize(first=st.sampled_from([0, 7, 1000]))
    def begin(self, first: int) -> None:
        self.queue = Queue.new(replace(POLICY, part_bytes=300, segment_bytes_max=700))
        self.queue.file = fresh(self.queue.file.policy, first)
        self.appended: dict[int, bytes] = {}
        self.next = first
        self.uploading: list[GroupCommit] = []
        self.ready: list[GroupCommit] = []
        self.committed: dict[int, bytes] = {}
        self.now_s = 0.0

    @property
    def file(self) -> CompositeFlatFile:
        return self.queue.file

    @rule(items=ITEMS, back=st.integers(0, 3), ahead=st.sampled_from([0, 0, 0, 2]))
    def append(self, items: list[Any], back: int, ahead: int) -> None:
        base = self.next - back if not ahead else self.next + ahead
        if base < 0:
            return
        batch = batch_of(base, items)
        result = self.file.append(batch, self.now_s)
        if ahead:
            assert result is AppendResult.GAP
        elif batch.end_offset <= self.next:
            assert result is AppendResult.DUPLICATE
        else:
            assert result is AppendResult.APPENDED
            for number, raw in enumerate(payload(batch)):
                if base + number >= self.next:
                    self.appended[base + number] = raw
            self.next = batch.end_offset

    @rule(now_ms=st.integers(0, 20_000))
    def take(self, now_ms: int) -> None:
        commit = self.file.take(now_ms)
        if commit is not None:
            self.uploading.append(commit)

    @precondition(lambda self: self.uploading)
    @rule(data=st.data())
    def stored(self, data: st.DataObject) -> None:
        """Of several bundles any may be first; what was given up meanwhile lands as well."""
        commit = self.uploading.pop(data.draw(st.integers(0, len(self.uploading) - 1)))
        self.ready += self.file.stored(commit)

    @precondition(lambda self: self.uploading)
    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        commit = self.uploading.pop(data.draw(st.integers(0, len(self.uploading) - 1)))
        was_on_its_way = is_on_its_way(self.file, commit)
        given_up = self.file.failed(commit, self.now_s, backoff)
        assert bool(given_up) == was_on_its_way
        assert given_up[-1:] == ([commit] if was_on_its_way else [])

    @precondition(lambda self: self.ready)
    @rule(now_ms=st.integers(0, 20_000))
    def commit(self, now_ms: int) -> None:
        commit = self.ready.pop(0)
        data = b"".join(bytes(memoryview(chunk)) for chunk in commit.data())
        of = CommitColumns.of([commit])
        items = np.frombuffer(of.items, ITEM)
        for number, item in enumerate(items):
            start = int(item["log_offset"]) - commit.log_offset
            raw = data[start : start + int(item["size"])] if item["size"] else b""
            self.committed[commit.queue_offset + number] = raw
        self.queue.commit(commit, now_ms)

    @precondition(lambda self: self.file.is_settled)
    @rule(count=st.integers(1, 5), crash=st.booleans())
    def gap(self, count: int, crash: bool) -> None:
        end = QueueOffset(self.next + count)
        self.queue.say(queue_action("gap", QUEUE, 0, start=self.next, end=end, reason="r"))
        self.file.skip_to(end)
        self.next = end
        if crash:
            self.crash_and_restart()

    @rule()
    def seal(self) -> None:
        incarnation = self.queue.state.incarnation(QUEUE)
        if incarnation and incarnation.segments and self.file.end_segment():
            base = incarnation.segments[-1].base_offset
            self.queue.say(queue_action("seal", QUEUE, 0, segment=base))

    @rule()
    def crash_and_restart(self) -> None:
        incarnation = self.queue.state.incarnation(QUEUE)
        start = QueueOffset(
            incarnation.commit_offset if incarnation else min(self.appended, default=self.next)
        )
        new = incarnation or Incarnation(0, start, start)
        self.queue.file = CompositeFlatFile(QUEUE, new, self.file.policy)
        self.uploading, self.ready = [], []
        self.next = new.commit_offset
        self.appended = {o: raw for o, raw in self.appended.items() if o < self.next}

    @invariant()
    def i1_positions_agree_with_the_model_and_the_journal(self) -> None:
        file = self.file
        assert file.commit_offset <= file.append_offset == self.next
        incarnation = self.queue.state.incarnation(QUEUE)
        if incarnation:
            assert file.commit_offset == incarnation.commit_offset
        assert self.committed.items() <= self.appended.items()
        assert file.is_settled == (file.commit_offset == self.next)

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        for commit in self.uploading:
            self.file.failed(commit, self.now_s, backoff)
        while not self.file.is_settled:
            if not self.ready:
                self.ready += self.file.stored(taken(self.file))
            self.commit(0)
        assert self.committed == self.appended
        assert self.file.buffered_bytes == 0


CompositeMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None
)
test_i1_i3_any_order_of_events_loses_and_doubles_nothing = CompositeMachine.TestCase
