"""Kafka's log directories as a local store: captured nodes show what consumers were given, a played one the rest."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import kafka_batches as plain
from support.kafka_stores import (
    FakeNode,
    Line,
    all_lines,
    check,
    follow,
    follow_all,
    in_order,
    lines_of,
    open_store,
    read_all,
    unpack,
)

from tiered.clock import ManualClock
from tiered.errors import ClosedError, InvalidError
from tiered.format.kafka_batch import check_batches, decode_records, walk_batches
from tiered.local.interface import HoleReason, LeaderEpoch, OpenTransaction
from tiered.local.kafka import HOLES_MAX, is_kafka
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

ONE, TWO = MessageQueue("one", 0), MessageQueue("two.x-y", 3)


@cache
def dumped(name: str) -> list[Line]:
    return in_order(plain.dump(name))


@pytest.fixture(scope="module", params=plain.NAMES)
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(name, directory) of each captured node."""
    return request.param, unpack(request.param, tmp_path_factory.mktemp("kafka"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    made = FakeNode(tmp_path / "logs")
    yield made
    made.crash()


# -- captured nodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("window_bytes", [1, 3000, 1 << 22])
def test_what_is_followed_is_what_consumers_were_given(
    captured: tuple[str, Path], window_bytes: int
):
    name, path = captured
    with contextlib.closing(open_store(path)) as store:
        found = follow_all(store, window_bytes)
        assert all_lines(found) == dumped(name)
        for queue, bounds in store.queues().items():
            taken = found.get(queue)
            assert (bounds.min, bounds.end) == (
                (taken.first, taken.end) if taken else (bounds.end, bounds.end)
            )
            assert taken is None or not taken.gaps
            assert taken is None or set(taken.holes.values()) <= {HoleReason.COMPACTED}


def test_bounds_are_the_node_s(captured: tuple[str, Path]):
    name, path = captured
    with contextlib.closing(open_store(path)) as store:
        said = plain.FOLDER / f"{name}.offsets.jsonl"
        bounds = dict(store.queues())
        for line in map(json.loads, said.read_text().splitlines()):
            found = bounds.pop(MessageQueue(line["topic"], line["partition"]))
            assert (found.min, found.end) == (line["log_start_offset"], line["high_watermark"])
            lineage = store.lineage(MessageQueue(line["topic"], line["partition"]))
            assert lineage is not None
            assert lineage.topic_id == line["topic_id"]
        assert not bounds
        assert {one.name.rpartition("-")[0] for one in store.report().left_out} <= {
            "__cluster_metadata",
            "__transaction_state",
        }


@pytest.mark.parametrize("has_index", [True, False])
def test_reads_from_any_offset_give_the_rest(
    captured: tuple[str, Path], tmp_path: Path, has_index: bool
):
    name, path = captured
    if not has_index:
        path = Path(shutil.copytree(path, tmp_path / "copy"))
        for index in path.glob("*/*index"):
            index.unlink()
    with contextlib.closing(open_store(path)) as store:
        for queue, bounds in store.queues().items():
            wanted = {
                line["offset"]: line
                for line in dumped(name)
                if (line["topic"], line["partition"]) == queue
            }
            for start in range(bounds.min, bounds.end, 13):
                batch = store.read(queue, QueueOffset(start), bytes_max=1, count_max=1)
                assert batch is not None
                assert batch.base_offset == start
                rest = [wanted[at] for at in range(start, batch.end_offset) if at in wanted]
                assert lines_of(batch) == rest
            assert store.read(queue, bounds.end, bytes_max=1, count_max=1) is None
            taken = read_all(store, queue, bytes_max=9000)
            assert taken.lines == list(wanted.values())


def test_times_are_found_as_a_node_does(captured: tuple[str, Path]):
    """Against every record, one after another, control records too."""
    _, path = captured
    rng = random.Random(1)
    with contextlib.closing(open_store(path)) as store:
        for queue, bounds in store.queues().items():
            rows = list(times_of(path, queue, bounds.min, bounds.end))
            times = {time + step for _, time in rows for step in (-1, 0, 1)} | {0, 1 << 60}
            for time in rng.sample(sorted(times), min(60, len(times))):
                first = next((offset for offset, at in rows if at >= time), bounds.end)
                assert store.offset_by_time(queue, time) == first


def times_of(path: Path, queue: MessageQueue, low: int, end: int) -> Iterator[tuple[int, int]]:
    """Offset and time of each record that can be read, in order."""
    for file in sorted((path / f"{queue.topic}-{queue.queue_id}").glob("*.log")):
        data = file.read_bytes()
        block = walk_batches(data, 0, len(data), size_max=1 << 27)
        records = decode_records(block, np.flatnonzero(block.last_offsets < end), bytes_max=1 << 27)
        pairs = zip(records.offsets.tolist(), records.timestamps_ms.tolist(), strict=True)
        yield from ((offset, time) for offset, time in pairs if offset >= low)


def test_epochs_are_those_of_the_records(captured: tuple[str, Path]):
    name, path = captured
    with contextlib.closing(open_store(path)) as store:
        for queue, bounds in store.queues().items():
            lineage = store.lineage(queue)
            assert lineage is not None
            starts = [epoch.start for epoch in lineage.epochs]
            assert all(start < bounds.end for start in starts)
            if name == "k05-epochs":
                assert [epoch.number for epoch in lineage.epochs] == [0, 2, 6, 8, 10]
            for line in dumped(name):
                if (line["topic"], line["partition"]) == queue:
                    at = int(np.searchsorted(starts, line["offset"], side="right")) - 1
                    assert lineage.epochs[at].number == line["leader_epoch"]


def test_what_a_crash_leaves_is_told(tmp_path: Path):
    with contextlib.closing(open_store(unpack("k04-crash-torn", tmp_path))) as store:
        waiting, report = store.waiting(), store.report()
        assert waiting.is_behind_damage  # sound batches behind the flipped bit
        assert waiting.records == 7
        assert "cuts the log" in waiting.reason
        assert report.torn_bytes > waiting.size_bytes
    with contextlib.closing(open_store(unpack("k04-crash", tmp_path))) as store:
        assert not store.waiting().records
        assert not store.report().torn_bytes


# -- which store it is ------------------------------------------------------------------------------


def test_identity_is_the_node_s(tmp_path: Path):
    one = FakeNode(tmp_path / "a", node=1, directory="x")
    two = FakeNode(tmp_path / "b", node=1, directory="y")
    other = FakeNode(tmp_path / "c", node=2, directory="z")
    one.make(ONE)
    two.make(TWO)
    assert is_kafka(str(one.path))
    assert not is_kafka(str(tmp_path))
    with contextlib.closing(open_store(one.path, two.path)) as store:
        identity = store.identity
        assert (identity.kind, identity.cluster, identity.broker) == ("kafka", "c", "kafka-1")
        assert identity.is_live
        assert set(store.queues()) == {ONE, TWO}
    one.stop()
    two.stop()
    with contextlib.closing(open_store(two.path, one.path)) as store:
        assert store.identity.store_id == identity.store_id
        assert not store.identity.is_live
    with contextlib.closing(open_store(other.path)) as store:
        assert store.identity.store_id != identity.store_id
    with pytest.raises(InvalidError, match="two nodes") as said:
        open_store(one.path, other.path)
    assert str(other.path) in str(said.value)
    two.make(ONE)
    with pytest.raises(InvalidError, match="partition one/0 is in two log directories") as said:
        open_store(one.path, two.path)
    assert str(two.folder(ONE)) in str(said.value)
    with pytest.raises(InvalidError, match="not a log directory"):
        open_store(tmp_path)
    other.crash()


def test_the_opening_of_what_a_crash_left_can_be_stopped(tmp_path: Path):
    with pytest.raises(ClosedError):
        open_store(unpack("k04-crash", tmp_path), stop=lambda: True)


def test_after_closing_nothing_is_read(node: FakeNode):
    node.make(ONE)
    store = open_store(node.path)
    follower = store.follow({})
    store.close()
    for use in (follower.poll, lambda _: store.read(ONE, QueueOffset(0), bytes_max=1, count_max=1)):
        with pytest.raises(ClosedError):
            use(1)


# -- a node that runs -------------------------------------------------------------------------------


def test_a_log_is_followed_as_it_grows_and_never_beyond_its_high_watermark(node: FakeNode):
    """In steps of bytes, so that batches are cut anywhere."""
    node.make(ONE)
    node.make(TWO, start=50)
    raws = [node.batch(ONE, 1 + n % 5, skip=3 * (n % 7 == 6)) for n in range(60)]
    data, ends = b"".join(raws), [0]
    for raw in raws:
        ends.append(walk_batches(raw, 0, len(raw), size_max=1 << 20).last_offsets[0] + 1)
    sizes = np.cumsum([0, *map(len, raws)])
    path, rng = node.segments(ONE)[-1], random.Random(2)
    with contextlib.closing(open_store(node.path)) as store:
        follower, found, written, high = store.follow({}), {}, 0, 0
        assert (store.queues()[TWO].min, store.queues()[TWO].end) == (50, 50)
        while written < len(data):
            step = rng.randrange(1, 900)
            with path.open("ab") as file:
                file.write(data[written : written + step])
            written = min(written + step, len(data))
            whole = int(np.searchsorted(sizes, written, side="right")) - 1
            if rng.random() < 0.7:
                high = max(high, ends[rng.randrange(whole + 1)] - rng.randrange(2))
                node.checkpoint({ONE: high, TWO: 0})
            follow(follower, rng.choice([1, 500, 1 << 20]), found)
            committed = max([end for end in ends if end <= high], default=0)
            assert (found[ONE].end if ONE in found else 0) == committed
            assert store.queues()[ONE].end == committed
            behind = written - sizes[ends.index(committed)]
            store.refresh()
            waiting = store.waiting()
            assert (waiting.size_bytes, bool(waiting.reason)) == (behind, behind > 0)
            assert not waiting.is_behind_damage
        node.checkpoint({ONE: ends[-1]})
        follow(follower, found=found)
        assert [line["offset"] for line in found[ONE].lines] == offsets_in(data)
        assert not store.waiting().records
        assert not follower.take_fallen()


def offsets_in(data: bytes) -> list[int]:
    block = walk_batches(data, 0, len(data), size_max=1 << 27)
    check_batches(block, 0)
    return [line["offset"] for line in plain.lines_of(ONE, block)]


def test_new_partitions_and_segments_come_in(node: FakeNode):
    node.make(ONE)
    with contextlib.closing(open_store(node.path)) as store:
        follower, found = store.follow({}), {}
        for _ in range(5):
            node.append(ONE)
            node.roll(ONE)
            node.checkpoint()
            follow(follower, found=found)
        node.make(TWO)
        node.append(TWO)
        node.checkpoint()
        follow(follower, found=found)
        assert (found[ONE].end, found[TWO].end) == (50, 10)
        assert store.queues()[ONE].end == 50
        assert not follower.take_fallen()


def test_a_truncation_is_a_fall_though_the_log_has_grown_again(node: FakeNode):
    node.make(ONE)
    node.make(TWO)
    for _ in range(10):
        node.append(ONE)
        node.append(TWO)
    node.checkpoint()
    with contextlib.closing(open_store(node.path)) as store:
        follower = store.follow({})
        found = follow(follower)
        node.truncate(ONE, 60)
        node.lead(ONE, 5)
        for _ in range(9):
            node.append(ONE)
        node.lead(TWO, 5)  # its log was not cut
        node.append(TWO)
        node.checkpoint()
        later = follow(follower)
        assert set(follower.take_fallen()) == {ONE}
        assert not follower.take_fallen()
        assert (later[ONE].first, later[TWO].first) == (100, 100)
        follower.seek(ONE, QueueOffset(60))
        again = follow(follower)[ONE]
        assert (again.first, again.end) == (60, 150)
        assert {line["leader_epoch"] for line in again.lines} == {5}
        assert {line["leader_epoch"] for line in found[ONE].lines} == {0}
        lineage = store.lineage(ONE)
        assert lineage is not None
        assert lineage.epochs == (LeaderEpoch(0, 0), LeaderEpoch(5, 60))


def test_a_read_sees_a_truncation_that_no_poll_has_seen(node: FakeNode):
    node.make(ONE)
    for _ in range(10):
        node.append(ONE)
    node.checkpoint()
    with contextlib.closing(open_store(node.path)) as store:
        node.truncate(ONE, 60)
        node.lead(ONE, 5)
        for _ in range(4):
            node.append(ONE)
        node.checkpoint({ONE: 70})
        batch = store.read(ONE, QueueOffset(60), bytes_max=1 << 20, count_max=1000)
        assert batch is not None
        assert batch.end_offset == 70
        assert {line["leader_epoch"] for line in lines_of(batch)} == {5}
        assert store.read(ONE, QueueOffset(70), bytes_max=1, count_max=1) is None


def test_an_end_that_falls_is_a_fall(node: FakeNode):
    node.make(ONE)
    for _ in range(10):
        node.append(ONE)
    node.checkpoint()
    with contextlib.closing(open_store(node.path)) as store:
        follower = store.follow({})
        follow(follower)
        node.checkpoint({ONE: 50})  # as after a crash: what was committed stays so
        assert not follower.poll(1)
        assert store.queues()[ONE].end == 100
        node.truncate(ONE, 40)
        node.checkpoint({ONE: 41})
        assert not follower.poll(1)
        assert set(follower.take_fallen()) == {ONE}
        assert store.queues()[ONE].end == 40
        assert store.read(ONE, QueueOffset(40), bytes_max=1, count_max=1) is None


def test_a_topic_made_again_is_a_fall(node: FakeNode):
    node.make(ONE)
    node.append(ONE)
    node.checkpoint()
    clock = ManualClock()
    with contextlib.closing(open_store(node.path, clock=clock)) as store:
        follower = store.follow({})
        follow(follower)
        node.folder(ONE).rename(node.path / f"one-0.{'0a' * 16}-delete")
        node.make(ONE, "other")
        for _ in range(3):
            node.append(ONE)
        node.checkpoint()
        assert [batch.base_offset for batch in follower.poll(1 << 20)] == [10]
        assert set(follower.take_fallen()) == {ONE}
        lineage = store.lineage(ONE)
        assert lineage is not None
        assert lineage.topic_id == "other"
        shutil.rmtree(node.folder(ONE))
        clock.advance(2)
        assert not follower.poll(1)
        assert ONE not in store.queues()
        node.make(ONE, "other")
        node.checkpoint()
        follower.poll(1)
        assert set(follower.take_fallen()) == {ONE}


def test_a_topic_that_is_made_again_before_it_has_its_first_epoch(node: FakeNode):
    """A node makes the folder and its files first; the leader writes the epoch later."""
    node.make(ONE, "old")
    node.append(ONE)
    node.checkpoint()
    with contextlib.closing(open_store(node.path)) as store:
        follower = store.follow({})
        follow(follower)
        node.folder(ONE).rename(node.path / f"one-0.{'0a' * 16}-delete")
        node.make(ONE, "new")
        (node.folder(ONE) / "leader-epoch-checkpoint").write_text("0\n0\n")
        assert not follower.poll(1)
        assert set(follower.take_fallen()) == {ONE}
        lineage = store.lineage(ONE)
        assert lineage is not None
        assert (lineage.topic_id, lineage.epochs) == ("new", ())
        node.lead(ONE, 0)
        node.append(ONE)
        node.checkpoint()
        follower.seek(ONE, QueueOffset(0))
        assert follow(follower)[ONE].end == 10
        assert not follower.take_fallen()


def test_retention_takes_segments_from_under_a_reader(node: FakeNode):
    node.make(ONE)
    for _ in range(6):
        node.append(ONE)
        node.append(ONE)
        node.roll(ONE)
    node.checkpoint()
    clock = ManualClock()
    with contextlib.closing(open_store(node.path, clock=clock, files_open_max=1)) as store:
        follower = store.follow({})
        first = follower.poll(1)
        assert [batch.end_offset for batch in first] == [10]
        segments = node.segments(ONE)
        for path in segments[:2]:  # the first of them is open
            path.rename(path.with_name(path.name + ".deleted"))
        open_still = follower.poll(1)
        assert [batch.base_offset for batch in open_still] == [10]
        rest = follow(follower)[ONE]
        assert (rest.first, rest.end) == (40, 120)
        assert not rest.holes
        clock.advance(2)
        follower.poll(1)
        assert store.queues()[ONE].min == 40
        node.write("log-start-offset-checkpoint", {ONE: 55})
        node.checkpoint()
        clock.advance(2)
        follower.poll(1)
        batch = store.read(ONE, QueueOffset(0), bytes_max=1, count_max=1)
        assert batch is not None
        assert (batch.base_offset, batch.end_offset) == (55, 60)
        assert [line["offset"] for line in lines_of(batch)] == [*range(55, 60)]


def test_what_the_cleaner_makes_anew_is_read_anew(node: FakeNode):
    node.make(ONE)
    raws = [node.append(ONE) for _ in range(40)]
    node.roll(ONE)
    node.append(ONE)
    node.checkpoint()
    with contextlib.closing(open_store(node.path)) as store:
        follower = store.follow({})
        assert follower.poll(len(raws[0]) * 4)[0].end_offset in range(30, 60)
        path = node.segments(ONE)[0]
        new = path.with_name(path.name + ".cleaned")
        new.write_bytes(b"".join(raws[n] for n in range(40) if n % 3 == 0))
        path.rename(path.with_name(path.name + ".deleted"))
        new.rename(path)
        store.refresh()
        rest = follow(follower)[ONE]
        assert rest.end == 410
        given = {line["offset"] // 10 for line in rest.lines}
        assert given == {n for n in range(rest.first // 10, 40) if n % 3 == 0} | {40}
        assert set(rest.holes.values()) == {HoleReason.COMPACTED}
        assert not follower.take_fallen()


def test_a_stopped_node_that_starts_and_crashes(node: FakeNode):
    node.make(ONE)
    node.append(ONE)
    node.checkpoint()
    node.append(ONE)
    clock = ManualClock()
    with contextlib.closing(open_store(node.path, clock=clock)) as store:
        follower = store.follow({})
        assert follow(follower)[ONE].end == 10
        node.crash()
        clock.advance(2)
        assert follow(follower)[ONE].end == 20  # as the next start will have it
        assert not store.identity.is_live
        node.start()
        clock.advance(2)
        assert not follow(follower)
        assert store.queues()[ONE].end == 20
        node.append(ONE)
        node.stop()
        clock.advance(2)
        assert follow(follower)[ONE].end == 30
        assert not follower.take_fallen()


def test_a_partition_moves_from_one_directory_to_another(node: FakeNode, tmp_path: Path):
    other = FakeNode(tmp_path / "other")
    node.make(ONE)
    node.append(ONE)
    node.checkpoint()
    clock = ManualClock()
    with contextlib.closing(open_store(node.path, other.path, clock=clock)) as store:
        follower = store.follow({})
        follow(follower)
        folder = node.folder(ONE)
        shutil.copytree(folder, other.folder(ONE))
        other.checkpoint({ONE: 10})
        clock.advance(2)
        assert not follower.poll(1)  # both have it for a moment
        folder.rename(node.path / f"one-0.{'0b' * 16}-delete")
        (node.path / "replication-offset-checkpoint").unlink()
        other.ends[ONE], other.epoch[ONE] = 10, [(0, 0)]
        other.append(ONE)
        other.checkpoint()
        clock.advance(2)
        assert [batch.base_offset for batch in follower.poll(1)] == [10]
        assert store.queues()[ONE].end == 20
    other.crash()


def test_many_threads_read_while_the_log_grows_and_is_cleaned(node: FakeNode):
    node.make(ONE)
    raws = [node.append(ONE) for _ in range(100)]
    node.roll(ONE)
    node.append(ONE)
    node.checkpoint()
    path = node.segments(ONE)[0]
    with contextlib.closing(open_store(node.path, files_open_max=1)) as store:

        def read(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                start = rng.randrange(1010)
                batch = store.read(ONE, QueueOffset(start), bytes_max=3000, count_max=1000)
                assert batch is not None
                check(batch)
                assert batch.base_offset == start
                assert HoleReason.DAMAGED not in batch.tag_codes[batch.sizes == 0]

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(read, seed) for seed in range(8)]
            for step in range(2, 30):
                new = path.with_name(path.name + ".cleaned")
                new.write_bytes(b"".join(raw for n, raw in enumerate(raws) if n % step))
                new.rename(path.with_name(path.name + ".swap"))
                path.rename(path.with_name(f"{path.name}.{step}.deleted"))
                store.refresh()
                path.with_name(path.name + ".swap").rename(path)
            for job in jobs:
                job.result()


def test_a_poll_of_many_idle_partitions_is_a_glance(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
):
    for number in range(300):
        node.make(MessageQueue("many", number))
    node.checkpoint()
    with contextlib.closing(open_store(node.path)) as store:
        follower = store.follow({})
        follow(follower)
        calls, stat = list[object](), os.stat

        def counted(*args: Any, **options: Any) -> os.stat_result:
            calls.append(args)
            return stat(*args, **options)

        monkeypatch.setattr(os, "stat", counted)
        assert not follower.poll(1 << 20)
        assert len(calls) < 5
        assert follower.is_idle


# -- holes, gaps, zeros -----------------------------------------------------------------------------


def test_offsets_that_the_cleaner_took_are_holes_and_many_of_them_a_gap(node: FakeNode):
    node.make(ONE)
    node.append(ONE)
    node.append(ONE, skip=HOLES_MAX)
    node.append(ONE, skip=HOLES_MAX + 1)
    node.roll(ONE)
    node.roll(ONE)
    node.ends[ONE] += 5  # nothing of a segment is left
    node.roll(ONE)
    node.append(ONE)
    node.checkpoint()
    with contextlib.closing(open_store(node.path)) as store:
        found = follow_all(store)[ONE]
        second = 20 + HOLES_MAX
        assert found.gaps == [(second, second + HOLES_MAX + 1)]
        end = second + HOLES_MAX + 11
        assert sorted(found.holes) == [*range(10, 10 + HOLES_MAX), *range(end, end + 5)]
        assert set(found.holes.values()) == {HoleReason.COMPACTED}
        assert found.end == end + 15
        assert len(found.lines) == 40
        in_gap = store.read(ONE, QueueOffset(second + 7), bytes_max=1, count_max=1)
        assert in_gap is not None
        assert in_gap.base_offset == second + 7 or in_gap.base_offset == second + HOLES_MAX + 1


@pytest.mark.timeout(60)
def test_zeros_behind_a_log_are_its_end_however_many(node: FakeNode):
    node.make(ONE)
    for _ in range(3):
        node.append(ONE)
    os.truncate(node.segments(ONE)[-1], 4 << 30)  # preallocated, and sparse
    node.checkpoint({ONE: 40})
    with contextlib.closing(open_store(node.path)) as store:
        assert follow_all(store)[ONE].end == 30
        assert store.queues()[ONE].end == 30


def test_a_batch_with_a_hole_of_the_file_in_it_is_read(node: FakeNode):
    """As a copy leaves it that makes files sparse."""
    node.make(ONE)
    node.append(ONE)
    payload = plain.section([(0, 0, b"k", bytes(3 << 20), ())])
    raw = plain.batch(payload, 1, base_offset=10)
    with node.segments(ONE)[-1].open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(raw[:4096])
        file.seek(len(raw) - 4097, os.SEEK_CUR)
        file.write(raw[-1:])
    node.ends[ONE] = 11
    node.append(ONE)
    node.checkpoint()
    with contextlib.closing(open_store(node.path)) as store:
        found = follow_all(store, 1)[ONE]
        assert found.end == 21
        assert not found.holes
        assert len(found.lines) == 21


def test_transactions_open_at_the_log_start_come_from_a_snapshot_and_the_log(node: FakeNode):
    node.make(ONE)
    in_transaction = {"attributes": 1 << 4, "producer_epoch": 0}
    node.append(ONE, producer_id=7, **in_transaction)
    node.append(ONE, producer_id=8, **in_transaction)
    node.append(ONE)
    node.append(ONE, producer_id=9, **in_transaction)
    node.checkpoint()
    node.write("log-start-offset-checkpoint", {ONE: 25})
    with contextlib.closing(open_store(node.path)) as store:
        lineage = store.lineage(ONE, QueueOffset(25))
        assert lineage is not None
        assert lineage.open_transactions == (OpenTransaction(7, 0), OpenTransaction(8, 10))
        entry = (5).to_bytes(8, "big") + bytes(30) + (3).to_bytes(8, "big")
        body = (1).to_bytes(4, "big") + entry
        crc = plain.google_crc32c.value(body).to_bytes(4, "big")
        snapshot = node.folder(ONE) / f"{10:020d}.snapshot"
        snapshot.write_bytes(b"\0\1" + crc + body)
        store.refresh()
        lineage = store.lineage(ONE, QueueOffset(25))
        assert lineage is not None
        assert lineage.open_transactions == (OpenTransaction(5, 3), OpenTransaction(8, 10))


# -- damage -----------------------------------------------------------------------------------------


SEEDS = [n if n < 150 else pytest.param(n, marks=pytest.mark.slow) for n in range(3000)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.timeout(60)
def test_damage_costs_what_is_damaged_and_nothing_is_wrong(node: FakeNode, seed: int):
    """Records are as written or missing; what is missing is a hole with its bytes, or waits, or an error says so."""
    rng = random.Random(seed)
    node.make(ONE)
    is_cleaned, has_crashed = seed % 3 == 0, seed % 4 == 0
    for n in range(60):
        node.append(ONE, 1 + n % 6, skip=2 * (n % 5 == 4) if is_cleaned else 0)
        if n % 17 == 16:
            node.roll(ONE)
    node.stop()
    with contextlib.closing(open_store(node.path)) as store:
        wanted = {line["offset"]: line for line in follow_all(store)[ONE].lines}
    if has_crashed:
        (node.path / ".kafka_cleanshutdown").unlink()
        node.write("recovery-point-offset-checkpoint", {ONE: rng.randrange(node.ends[ONE])})
    path = rng.choice(node.segments(ONE))
    before = path.read_bytes()
    data = damaged(rng, bytearray(before))
    path.write_bytes(data)
    with contextlib.closing(open_store(node.path)) as store:
        found = follow_all(store).get(ONE)
        end = store.queues()[ONE].end
        assert (0 if found is None else found.end) == end
        if end < max(wanted) + 1:
            assert store.waiting().is_behind_damage
        if found is None or has_moved_into_a_gap(before, data):
            return
        given = {line["offset"]: line for line in found.lines}
        assert given.items() <= wanted.items()
        lost = {offset for offset in wanted if offset < end} - given.keys()
        if not is_cleaned:
            assert lost == found.holes.keys()
        if (
            bytes(data) != before[: len(data)]
        ):  # a file that is cut between two batches tells nothing
            assert all(found.holes[offset] is HoleReason.DAMAGED for offset in lost)
            assert bool(lost) == bool(found.quarantined)
        assert store.report().damaged_records == len(found.quarantined)
        assert read_all(store, ONE, bytes_max=500).lines == found.lines


def has_moved_into_a_gap(before: bytes, data: bytes | bytearray) -> bool:
    """Whether all is as it may be, but for a base offset, which no checksum covers: nobody can tell, nor can Kafka."""
    blocks = [walk_batches(raw, 0, len(raw), size_max=1 << 27) for raw in (before, bytes(data))]
    for block in blocks:
        check_batches(block, 0)
    old, new = blocks
    if new.faults.any() or len(old) != len(new) or (old.sizes != new.sizes).any():
        return False
    return bool((old.base_offsets != new.base_offsets).any())


def damaged(rng: random.Random, data: bytearray) -> bytearray:
    """One thing that can go wrong with a file."""
    if not data:
        return bytearray(rng.randbytes(100))
    block = walk_batches(bytes(data), 0, len(data), size_max=1 << 27)
    at = int(rng.choice(block.positions.tolist()))
    kind = rng.randrange(8)
    if kind < 3:  # a bit of a header, of what no checksum covers too
        at += rng.randrange([8, 21, 61][kind])
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 3:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 4:
        del data[rng.randrange(len(data)) :]
    elif kind == 5:
        size = rng.randrange(1, 700)
        at = rng.randrange(len(data))
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif kind == 6:
        size = rng.randrange(1, 700)
        at = rng.randrange(len(data))
        data[at : at + size] = rng.randbytes(len(data[at : at + size]))
    else:
        at = rng.randrange(len(data))
        data[at:at] = rng.randbytes(rng.randrange(1, 300))
    return data


def test_batches_of_an_old_format_are_refused_by_name(node: FakeNode):
    node.make(ONE)
    node.append(ONE)
    raw = bytearray(node.batch(ONE))
    raw[16] = 1
    raw[12:16] = plain.zlib_crc(raw[16:])
    with node.segments(ONE)[-1].open("ab") as file:
        file.write(raw)
    node.append(ONE)
    node.stop()
    with contextlib.closing(open_store(node.path)) as store:
        found = follow_all(store)[ONE]
        assert sorted(found.holes) == [*range(10, 20)]
        assert "before Kafka 0.11 (its magic is 1)" in found.quarantined[10]
        assert any("before Kafka 0.11" in note for note in store.report().notes)
        assert store.report().damaged_records == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "folder", "unreadable"])
def test_what_is_no_file_is_refused_or_passed_over(node: FakeNode, kind: str):
    node.make(ONE)
    node.append(ONE)
    node.roll(ONE)
    node.append(ONE)
    node.stop()
    names = [path.relative_to(node.path) for path in node.path.rglob("*") if path.is_file()]
    refused = 0
    for name in [*names, Path("one-0/00000000000000000000.index"), Path("one-0/x.log")]:
        copy = Path(shutil.copytree(node.path, node.path.parent / "copy"))
        path = copy / name
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(path)  # a loop
        said = refusal(copy)
        assert not said or str(path) in said or "not a log directory" in said
        refused += bool(said)
        shutil.rmtree(copy)
    assert refused >= 3


def refusal(path: Path) -> str:
    """What the refusal of a directory says; empty: there is none."""
    try:
        with contextlib.closing(open_store(path)) as store:
            follow_all(store)
    except InvalidError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "name",
    [
        "replication-offset-checkpoint",
        "log-start-offset-checkpoint",
        "one-0/leader-epoch-checkpoint",
    ],
)
def test_a_checkpoint_that_is_not_whole_is_an_error(node: FakeNode, name: str):
    node.make(ONE)
    node.append(ONE)
    node.stop()
    (node.path / name).write_text("0\n2\none 0 10\n")
    with pytest.raises(InvalidError, match=name):
        open_store(node.path)
