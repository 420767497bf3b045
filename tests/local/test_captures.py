"""Every captured store reads exactly as Java reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import captures, following

from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.local.rocketmq import RocketMQStore

WINDOWS = (5_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 1 << 20)))
LEFT_OUT = {
    "s02-delay-timer": {"SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"},
    "s03-transactions": {"RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"},
    "s04-batch-compress": {"RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"},
    "s10-consumers": {"SCHEDULE_TOPIC_XXXX"},
    "s11-lmq-batchcq": {"%LMQ%d1", "%LMQ%d2", "%LMQ%d3"},
}


@pytest.fixture(scope="module", params=captures.NAMES)
def capture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(name, open store) of each captured store."""
    name = request.param
    store = following.open_store(following.unpack(name, tmp_path_factory.mktemp(name)))
    yield name, store
    store.close()


def test_bounds_and_ends_are_java_s(capture: tuple[str, RocketMQStore]):
    name, store = capture
    found = following.expected(name)
    report = store.report()
    assert following.bounds_of(store) == found.bounds
    assert report.log_min == found.store["min_physical_offset"]
    assert report.log_end == found.store["max_physical_offset"]
    assert {left.name for left in report.left_out} == LEFT_OUT.get(name, set())
    assert not store.identity.is_live
    assert store.waiting().records == 0


@pytest.mark.parametrize("window_bytes", WINDOWS)
def test_following_gives_java_s_messages(capture: tuple[str, RocketMQStore], window_bytes: int):
    name, store = capture
    taken = following.follow_all(store, window_bytes)
    assert taken.messages == following.expected(name).messages
    assert not taken.holes
    assert not taken.gaps


@pytest.mark.parametrize(
    ("bytes_max", "count_max"),
    [
        (10_000, 7),
        *(pytest.param(*some, marks=pytest.mark.slow) for some in ((1, 1_000), (1 << 24, 1 << 20))),
    ],
)
def test_reading_gives_java_s_messages(
    capture: tuple[str, RocketMQStore], bytes_max: int, count_max: int
):
    name, store = capture
    taken = following.read_all(store, bytes_max, count_max)
    assert taken.messages == following.expected(name).messages
    assert not taken.holes


def test_reading_and_following_give_the_same_bytes(capture: tuple[str, RocketMQStore]):
    _, store = capture
    assert following.read_all(store).raw == following.follow_all(store).raw


def test_following_goes_on_where_it_is_told_to(capture: tuple[str, RocketMQStore]):
    name, store = capture
    found = following.expected(name)
    starts = {queue: QueueOffset((low + end) // 2) for queue, (low, end) in found.bounds.items()}
    taken = following.follow_all(store, 10_000, starts)
    for queue, start in starts.items():
        assert taken.messages[queue] == {
            offset: message for offset, message in found.messages[queue].items() if offset >= start
        }


def test_offset_by_time_is_the_first_at_or_after(capture: tuple[str, RocketMQStore]):
    """Where store times step back there are several such places, and it is one of them."""
    name, store = capture
    found = following.expected(name)
    disordered = set()
    for queue, (low, end) in found.bounds.items():
        times = {
            offset: message.store_timestamp_ms for offset, message in found.messages[queue].items()
        }
        wanted = sorted(set(times.values()))
        if list(times.values()) != sorted(times.values()):
            disordered.add(queue)
        for time_ms in [0, *wanted[::23], *(time + 1 for time in wanted[::31]), 1 << 60]:
            at = store.offset_by_time(queue, time_ms)
            assert at == end or times[at] >= time_ms
            assert at == low or times[at - 1] < time_ms
            if queue not in disordered:
                assert at == min((o for o, time in times.items() if time >= time_ms), default=end)
    # There given-up messages came to life again.
    assert bool(disordered) == (name == "s08-crash-continue")


def test_limits_of_a_read_are_kept(capture: tuple[str, RocketMQStore]):
    name, store = capture
    for queue, (low, end) in following.expected(name).bounds.items():
        is_batch = queue.topic == "grouped"
        for start in range(low, end, max(1, (end - low) // 5)):
            one = store.read(queue, QueueOffset(start), bytes_max=1, count_max=1_000)
            assert one is not None
            assert len({int(at) for at in one.positions}) == 1  # one record, whole
            some = store.read(queue, QueueOffset(start), bytes_max=1 << 24, count_max=3)
            assert some is not None
            assert some.base_offset == start
            assert some.count <= (12 if is_batch else 3)


def test_what_is_not_there_is_none(capture: tuple[str, RocketMQStore]):
    name, store = capture
    for queue, (_, end) in following.expected(name).bounds.items():
        assert store.read(queue, QueueOffset(end), bytes_max=1, count_max=1) is None
        assert store.read(queue, QueueOffset(end + 10), bytes_max=1, count_max=1) is None
    unknown = MessageQueue("no-such-topic", 0)
    assert store.read(unknown, QueueOffset(0), bytes_max=1, count_max=1) is None


def test_each_store_has_its_own_mark(tmp_path: Path):
    marks = {}
    for name in captures.NAMES:
        with_mark = following.open_store(following.unpack(name, tmp_path))
        marks[with_mark.identity.store_id] = name
        if name != "s09-big-offsets":  # made without a broker: nothing names it
            assert (with_mark.identity.cluster, with_mark.identity.broker) == (
                "cluster-a",
                "broker-a",
            )
        with_mark.close()
    assert sorted(marks.values()) == sorted(captures.NAMES)


def test_expired_stores_begin_at_their_minimum(tmp_path: Path):
    store = following.open_store(following.unpack("s06-expired", tmp_path))
    gone = MessageQueue("gone", 0)
    assert following.bounds_of(store)[gone] == (134, 134)
    lived = MessageQueue("long-lived", 0)
    batch = store.read(lived, QueueOffset(0), bytes_max=1, count_max=1)
    assert batch is not None
    assert batch.base_offset == 466
    assert store.report().below_min_entries > 0
    store.close()
