"""The write side of a queue, held against a model: whatever fails, replay accepts every part and loses nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.tiers import QUEUE, batch_of

from tiered.journal.entry import Entry
from tiered.log.composite import (
    AppendResult,
    CommitPolicy,
    CompositeFlatFile,
    GroupCommit,
    trim,
)
from tiered.log.consume_queue import ITEM
from tiered.log.seal import SealPlan, SealPolicy, plan_seals, summary
from tiered.log.state import (
    ObjectRange,
    Part,
    QueueLife,
    TierMachine,
    TierState,
    part_json,
    queue_action,
)
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from tiered.local.face import RecordBatch

POLICY = CommitPolicy(
    part_bytes=400, freshness_s=10.0, segment_bytes_max=1000, segment_age_ms_max=5000
)
MACHINE = TierMachine()


def backoff(failures: int) -> float:
    return float(failures)


def fresh(policy: CommitPolicy = POLICY, first: int = 0) -> CompositeFlatFile:
    return CompositeFlatFile(QUEUE, QueueLife(0, QueueOffset(first), QueueOffset(first)), policy)


def part_of_commit(commit: GroupCommit, name: str = "") -> Part:
    size, items = commit.data_bytes, 20 * commit.count
    return Part(
        ObjectRange(f"l{name}", 0, size, size, 60, 1), ObjectRange(f"i{name}", 0, items, items, 60, 2),
        commit.log_offset, commit.queue_offset, commit.count, commit.holes(), *commit.times(),
    )  # fmt: skip


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
    assert b"".join(bytes(memoryview(piece)) for piece in commit.data()) == b"".join(
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
    file.log_stored()
    file.append(batch_of(1, [b"a", None, (2, b"bb")]), 0.0)
    file.append(batch_of(5, [None, b"c"]), 0.0)
    commit = file.take(0)
    items = np.frombuffer(commit.items(), ITEM)
    data = b"".join(bytes(memoryview(piece)) for piece in commit.data())
    wanted = payload(batch_of(1, [b"a", None, (2, b"bb"), None, b"c"]))
    assert len(items) == commit.count == 6
    for item, raw in zip(items, wanted, strict=True):
        start = int(item["log_offset"]) - commit.log_offset
        assert data[start : start + int(item["size"])] == raw
    assert items["tag_code"].tolist() == [97, 1, 97, 97, 1, 97]
    assert (commit.holes(), len(commit.quarantined)) == (2, 2)
    assert commit.times()[1] - commit.times()[0] == 5


def test_a_commit_of_nothing_but_holes_has_no_times():
    file = fresh()
    file.append(batch_of(0, [None, None]), 0.0)
    assert (file.buffered_bytes, file.has_buffered) == (0, True)
    commit = file.take(0)
    assert not file.has_buffered
    assert (commit.times(), commit.data_bytes, commit.holes(), commit.count) == ((-1, -1), 0, 2, 2)


# -- when to commit -----------------------------------------------------------------------------


def test_a_commit_is_due_by_size_by_age_or_by_flush():
    file = fresh()
    assert not file.is_due(0.0, flush=True)
    assert file.due_at_s() is None
    file.append(batch_of(0, [b"x"]), 5.0)
    assert not file.is_due(14.9, flush=False)
    assert file.is_due(15.0, flush=False)
    assert file.due_at_s() == 15.0
    assert file.is_due(5.0, flush=True)
    file.append(batch_of(1, [b"x" * 400]), 5.0)
    assert file.is_due(5.0, flush=False)


def test_one_upload_at_a_time():
    file = fresh()
    file.append(batch_of(0, [b"x" * 500]), 0.0)
    file.take(0)
    file.append(batch_of(1, [b"x" * 500]), 0.0)
    assert not file.is_due(99.0, flush=True)
    assert file.due_at_s() is None
    file.log_stored()
    assert file.is_due(99.0, flush=False)


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
        reign = {"do": "reign", "generation": 1, "holder": {}}
        state = MACHINE.apply(MACHINE.initial(), Entry(1, 1, "0badcafe", 0, [reign]))
        return cls(fresh(policy), state)

    def say(self, action: Any, now_ms: int = 0) -> None:
        self.state = MACHINE.apply(self.state, Entry(1, 1, "0badcafe", now_ms, [action]))
        assert self.state.refused_parts == 0, "replay accepts every part"

    def commit(self, commit: GroupCommit, now_ms: int = 0) -> None:
        part = part_of_commit(commit, str(commit.queue_offset))
        fields = {"segment": commit.segment, "part": part_json(part)}
        self.say(queue_action("part", QUEUE, 0, **fields), now_ms)
        self.file.committed(commit, part)

    @property
    def life(self) -> QueueLife:
        life = self.state.life(QUEUE)
        assert life
        return life


def test_a_failed_upload_at_the_middle_of_a_segment_switches_files():
    queue = Queue.new()
    file = queue.file
    file.append(batch_of(0, [b"a"]), 0.0)
    first = file.take(0)
    file.log_stored()
    file.append(batch_of(1, [b"b"]), 0.0)
    failed = file.take(0)
    file.log_failed(50.0, backoff)
    assert (file.switches, file.failures, file.next_try_s) == (1, 1, 51.0)
    file.append(batch_of(2, [b"c"]), 50.0)
    assert not file.is_due(50.9, flush=True)
    assert file.is_due(51.0, flush=False), "what failed is due as soon as the pause is over"
    again = file.take(0)
    assert (again.segment, again.log_offset) == (failed.log_offset, failed.log_offset)
    assert again.count == 2, "with what came since"
    assert first.segment == failed.segment == 0
    queue.commit(first)
    file.log_stored()
    queue.commit(again)
    assert [s.base_offset for s in queue.life.segments] == [0, failed.log_offset]
    assert (file.failures, file.is_settled) == (0, True)


def test_a_failed_upload_at_position_0_opens_no_second_segment():
    queue = Queue.new()
    queue.file.append(batch_of(0, [b"a"]), 0.0)
    queue.file.take(0)
    queue.file.log_failed(0.0, backoff)
    again = queue.file.take(0)
    queue.file.log_stored()
    queue.commit(again)
    assert len(queue.life.segments) == len(queue.file.commit_log.segments) == 1


@pytest.mark.parametrize("committed", [0, 1])
def test_a_hundred_switches_leave_one_segment_more(committed: int):
    queue = Queue.new()
    file = queue.file
    for number in range(committed):
        file.append(batch_of(number, [b"a"]), 0.0)
        commit = file.take(0)
        file.log_stored()
        queue.commit(commit)
    for number in range(100):
        file.append(batch_of(committed + number, [b"b"]), 0.0)
        file.take(0)
        file.log_failed(0.0, backoff)
    assert (file.switches, file.failures) == (100, 100)
    while queue.file.append_offset > file.commit_offset:
        before = file.commit_offset
        commit = file.take(0)
        file.log_stored()
        queue.commit(commit)
        assert file.commit_offset > before
    assert queue.life.commit_offset == committed + 100
    bases = [segment.base_queue_offset for segment in queue.life.segments]
    assert bases[: 1 + committed] == [0, 1][: 1 + committed]
    assert len(file.commit_log.segments) == len(file.consume_queue.segments) == len(bases)


def test_segments_roll_by_size_and_by_age():
    queue = Queue.new()
    for number, now_ms in enumerate([0, 0, 4999, 5000, 5001, 10_000]):
        queue.file.append(batch_of(number, [b"x" * 10]), 0.0)
        commit = queue.file.take(now_ms)
        queue.file.log_stored()
        queue.commit(commit, now_ms)
    assert [s.base_queue_offset for s in queue.life.segments] == [0, 3, 5]
    queue.file.append(batch_of(6, [b"x" * 1000]), 0.0)
    queue.file.append(batch_of(7, [b"x"]), 0.0)
    for _ in range(2):
        commit = queue.file.take(10_000)
        queue.file.log_stored()
        queue.commit(commit, 10_000)
    assert [s.base_queue_offset for s in queue.life.segments] == [0, 3, 5, 7]


def test_a_clock_that_was_set_back_postpones_no_roll_by_age():
    queue = Queue.new()
    times = [10_000_000, 10_000_001, 9_990_000, 2_000_000, 2_000_001, 2_005_000]
    for number, now_ms in enumerate(times):
        queue.file.append(batch_of(number, [b"x" * 10]), 0.0)
        commit = queue.file.take(now_ms)
        queue.file.log_stored()
        queue.commit(commit, now_ms)
    assert [s.base_queue_offset for s in queue.life.segments] == [0, 3, 5]


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
    queue.file.append(batch_of(0, [b"a"]), 0.0)
    commit = queue.file.take(0)
    queue.file.log_stored()
    queue.commit(commit)
    queue.say(queue_action("gap", QUEUE, 0, start=1, end=5, reason="r"))
    queue.file = CompositeFlatFile(QUEUE, queue.life, POLICY)
    queue.file.append(batch_of(5, [b"b"]), 0.0)
    commit = queue.file.take(0)
    queue.file.log_stored()
    queue.commit(commit)
    assert [s.base_queue_offset for s in queue.life.segments] == [0, 5]


# -- sealing ------------------------------------------------------------------------------------


SEAL = SealPolicy(small_bytes=350, merged_bytes_max=900)


def joined(run: tuple[Part, ...], name: str) -> Part:
    log, log_end, queue, queue_end, holes, low, high = summary(run)
    size, items = log_end - log, 20 * (queue_end - queue)
    return Part(
        ObjectRange(f"l{name}", 0, size, size, 60, 1), ObjectRange(f"i{name}", 0, items, items, 60, 2),
        run[0].log_offset, run[0].queue_offset, queue_end - queue, holes, low, high,
    )  # fmt: skip


def seal(queue: Queue, plan: SealPlan) -> None:
    """As the seal thread does it."""
    made = [
        run[0] if len(run) == 1 else joined(run, f"m{run[0].queue_offset}") for run in plan.runs
    ]
    parts = [part_json(part) for part in made]
    queue.say(queue_action("seal", QUEUE, 0, segment=plan.segment.base_offset, parts=parts))
    (segment,) = [s for s in queue.life.segments if s.parts == tuple(made)]
    assert segment.sealed
    queue.file.sealed(segment)


def committed(queue: Queue, base: int, body: bytes) -> None:
    queue.file.append(batch_of(base, [body]), 0.0)
    commit = queue.file.take(0)
    queue.file.log_stored()
    queue.commit(commit)


def test_what_comes_behind_a_sealed_segment_goes_into_a_new_one():
    queue = Queue.new()
    for base in range(3):
        committed(queue, base, b"a")
    assert queue.file.end_segment()
    (plan,) = plan_seals(queue.state, SEAL, with_open=True)
    seal(queue, plan)
    assert [len(s.parts) for s in queue.life.segments] == [1]
    assert [len(s.places) for s in queue.file.commit_log.segments] == [1]
    committed(queue, 3, b"b")
    assert [s.base_queue_offset for s in queue.life.segments] == [0, 3]


def test_a_segment_with_something_under_way_does_not_end():
    queue = Queue.new()
    committed(queue, 0, b"a")
    queue.file.append(batch_of(1, [b"b"]), 0.0)
    assert not queue.file.end_segment()
    commit = queue.file.take(0)
    queue.file.log_stored()
    assert not queue.file.end_segment()
    queue.commit(commit)
    assert [len(s.parts) for s in queue.life.segments] == [2], "it goes on as if nobody had asked"
    assert queue.file.end_segment()


def test_a_segment_that_ended_and_was_not_sealed_costs_nothing_but_a_roll():
    queue = Queue.new()
    committed(queue, 0, b"a")
    assert queue.file.end_segment()
    committed(queue, 1, b"b")
    committed(queue, 2, b"b")
    assert [len(s.parts) for s in queue.life.segments] == [1, 2]


def test_sealing_holes_does_not_touch_the_segment_with_the_same_base():
    queue = Queue.new()
    for base in range(2):
        queue.file.append(batch_of(base, [None]), 0.0)
        commit = queue.file.take(0)
        queue.file.log_stored()
        queue.commit(commit)
    assert queue.file.end_segment()
    (plan,) = plan_seals(queue.state, SEAL, with_open=True)
    queue.file.append(batch_of(2, [b"a"]), 0.0)
    commit = queue.file.take(0)
    queue.file.log_stored()
    seal(queue, plan)
    queue.commit(commit)
    assert [s.base_offset for s in queue.life.segments] == [0, 0]
    assert [len(s.parts) for s in queue.life.segments] == [1, 1]
    (segment,) = queue.file.commit_log.segments
    assert segment.places == [queue.life.segments[1].parts[0].log]
    committed(queue, 3, b"b")
    assert [len(s.parts) for s in queue.life.segments] == [1, 2]


def test_a_part_that_overtakes_the_seal_of_holes_with_its_base_stays():
    queue = Queue.new()
    for base in range(2):
        queue.file.append(batch_of(base, [None]), 0.0)
        commit = queue.file.take(0)
        queue.file.log_stored()
        queue.commit(commit)
    assert queue.file.end_segment()
    (plan,) = plan_seals(queue.state, SEAL, with_open=True)
    committed(queue, 2, b"a")
    before = queue.life
    late = queue_action(
        "seal", QUEUE, 0, segment=0, parts=[part_json(joined(plan.segment.parts, "m"))]
    )
    queue.say(late)
    assert queue.life == before


@dataclass
class Waiting:
    commit: GroupCommit


class CompositeMachine(RuleBasedStateMachine):
    """Any order of append, take, stored, failed, committed, gap, sealing and restart."""

    @initialize(first=st.sampled_from([0, 7, 1000]))
    def begin(self, first: int) -> None:
        self.queue = Queue.new(replace(POLICY, part_bytes=300, segment_bytes_max=700))
        self.queue.file = fresh(self.queue.file._policy, first)
        self.appended: dict[int, bytes] = {}
        self.next = first
        self.uploading: GroupCommit | None = None
        self.stored: list[GroupCommit] = []
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
        if self.file.is_due(self.now_s, flush=True):
            assert self.uploading is None
            self.uploading = self.file.take(now_ms)

    @precondition(lambda self: self.uploading)
    @rule()
    def log_stored(self) -> None:
        assert self.uploading
        self.stored.append(self.uploading)
        self.uploading = None
        self.file.log_stored()

    @precondition(lambda self: self.uploading)
    @rule()
    def log_failed(self) -> None:
        self.uploading = None
        self.file.log_failed(self.now_s, backoff)

    @rule(seconds=st.sampled_from([0.5, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.stored)
    @rule(now_ms=st.integers(0, 20_000))
    def commit(self, now_ms: int) -> None:
        commit = self.stored.pop(0)
        data = b"".join(bytes(memoryview(piece)) for piece in commit.data())
        items = np.frombuffer(commit.items(), ITEM)
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

    @rule(with_open=st.booleans())
    def seal(self, with_open: bool) -> None:
        ended = with_open and self.file.end_segment()
        for plan in plan_seals(self.queue.state, SEAL, with_open=ended):
            seal(self.queue, plan)

    @rule()
    def crash_and_restart(self) -> None:
        life = self.queue.state.life(QUEUE)
        start = QueueOffset(life.commit_offset if life else min(self.appended, default=self.next))
        new = life or QueueLife(0, start, start)
        self.queue.file = CompositeFlatFile(QUEUE, new, self.file._policy)
        self.uploading, self.stored = None, []
        self.next = new.commit_offset
        self.appended = {o: raw for o, raw in self.appended.items() if o < self.next}

    @invariant()
    def i1_positions_agree_with_the_model_and_the_journal(self) -> None:
        file = self.file
        assert file.commit_offset <= file.append_offset == self.next
        life = self.queue.state.life(QUEUE)
        if life:
            assert file.commit_offset == life.commit_offset
            assert file.commit_log.commit_offset == life.log_end or not life.segments
        for flat in (file.commit_log, file.consume_queue):
            assert flat.commit_offset <= flat.append_offset
            assert all(segment.sealed for segment in flat.segments[:-1])
        parts = life.parts() if life else []
        places = [place for s in file.consume_queue.segments for place in s.places]
        assert places == [part.index for part in parts]
        places = [place for s in file.commit_log.segments for place in s.places]
        assert [p for p in places if p.size_bytes] == [
            part.log for part in parts if part.log.size_bytes
        ]
        assert self.committed.items() <= self.appended.items()
        assert file.is_settled == (file.commit_offset == self.next)

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        if self.uploading:
            self.log_failed()
        self.now_s += 1e6
        while not self.file.is_settled:
            if not self.stored:
                assert self.file.is_due(self.now_s, flush=True)
                self.stored.append(self.file.take(0))
                self.file.log_stored()
            self.commit(0)
        assert self.committed == self.appended
        assert self.file.buffered_bytes == 0


CompositeMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None
)
test_i1_i3_any_order_of_events_loses_and_doubles_nothing = CompositeMachine.TestCase
