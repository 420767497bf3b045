"""Long polling over a tier that grows, gathering of records, and the answer to each way in which a read ends."""

from __future__ import annotations

import gc
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.mounts import Compacted, Growing, mounted, records

from fetcher.runs import Run
from fetcher.statuses import GetResult, GetStatus, Side, Taken
from tiered.errors import StoreUnavailableError
from tiered.format.record import RECORD_BYTES_MIN, SYS_FLAG_AT
from tiered.format.sysflag import INNER_BATCH, NEED_UNWRAP
from tiered.local.interface import RecordBatch
from tiered.log.decode import TierBatch
from tiered.log.parts import Incarnation
from tiered.model import LogOffset, MessageQueue, QueueOffset
from tiered.mount import protocol, pulling
from tiered.mount.protocol import Code, RefusalError
from tiered.mount.pulling import (
    Handout,
    Pull,
    Puller,
    PullLimits,
    answer,
    are_neighbours,
    gather,
    make_filter,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


RECORD = bytes(100)
Is = GetStatus


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    found = Growing(tmp_path)
    found.put("t", "a", "b")
    return found


HOLD = {"sysFlag": 4 | 2}


def test_a_reader_at_the_end_is_held_until_there_is_more(growing: Growing):
    with mounted(growing.url, keeps_offsets=False) as served, served.client() as client:
        held = client.send_pull("t", 0, 2, **HOLD)
        while not served.mount.puller.held:  # type: ignore[union-attr]
            pass
        with served.client() as other:
            assert other.pull("t", 0, 0).code == Code.SUCCESS
        growing.put("t", "c")
        found = client.answer(held)
        assert found.code == Code.SUCCESS
        assert [record.body for record in records(found.text())] == [b"c"]
        assert found.fields["nextBeginOffset"] == "3"


def test_a_reader_of_a_queue_without_messages_is_held_and_costs_no_request(growing: Growing):
    """As each push consumer is of its group's retry topic: it would come again at once, for ever."""
    with mounted(growing.url, keeps_offsets=False, refresh_s=3600.0) as served:
        before = served.mount.store.opened.meter.snapshot().requests
        with served.client() as client:
            client.heartbeat("c", "g", "t")
            found = client.pull("%RETRY%g", 0, 0, suspendTimeoutMillis=400, **HOLD)
            assert (found.code, found.fields["nextBeginOffset"]) == (Code.PULL_NOT_FOUND, "0")
            assert client.pull("t", 0, 2, suspendTimeoutMillis=400, **HOLD).code == found.code
            assert client.pull("%RETRY%g", 0, 5, **HOLD).code == Code.PULL_OFFSET_MOVED
        assert served.mount.puller.found[Is.NO_MATCHED_LOGIC_QUEUE] == 2  # type: ignore[union-attr]
        assert served.mount.store.opened.meter.snapshot().requests == before


def test_a_topic_that_comes_later_is_served(growing: Growing):
    with mounted(growing.url, keeps_offsets=False) as served, served.client() as client:
        assert client.pull("late", 0, 0).code == Code.TOPIC_NOT_EXIST
        growing.put("late", "x")
        until_s = time.monotonic() + 120
        while client.pull("late", 0, 0).code != Code.SUCCESS:
            assert time.monotonic() < until_s
            time.sleep(0.05)


def test_a_held_request_is_answered_when_its_time_is_over(growing: Growing):
    with mounted(growing.url, keeps_offsets=False) as served, served.client() as client:
        found = client.pull("t", 0, 2, suspendTimeoutMillis=300, **HOLD)
        assert (found.code, found.fields["nextBeginOffset"]) == (Code.PULL_NOT_FOUND, "2")
        assert not served.mount.puller.held  # type: ignore[union-attr]


def test_no_more_are_held_than_may_be(growing: Growing):
    """They are refused: a client to which nothing is found asks again at once."""
    limits = PullLimits(held_max=1)
    with mounted(growing.url, keeps_offsets=False, pulls=limits) as served:
        with served.client() as one, served.client() as other:
            one.send_pull("t", 0, 2, **HOLD)
            while not served.mount.puller.held:  # type: ignore[union-attr]
                pass
            assert other.pull("t", 0, 2, **HOLD).code == Code.SYSTEM_BUSY
        while served.mount.puller.held:  # type: ignore[union-attr]
            pass  # it goes with its connection
        assert not served.mount.puller._held  # type: ignore[union-attr]


def test_a_held_request_with_a_large_filter_of_its_own_counts_as_many(growing: Growing):
    """A compiled one may have a MiB, and nothing else counts it."""
    tags = "||".join(f"tag-{number:06}" for number in range(500))
    with mounted(growing.url, keeps_offsets=False, pulls=PullLimits(held_max=200)) as served:
        puller = served.mount.puller
        assert puller is not None
        with served.client() as one, served.client() as other:
            one.send_pull("t", 0, 2, subscription=tags, **HOLD)
            while not puller.held:
                pass
            assert other.pull("t", 0, 2, **HOLD).code == Code.SYSTEM_BUSY
            assert puller.held == 1
        while puller.held:
            pass
        with served.client() as client:
            found = client.pull("t", 0, 2, suspendTimeoutMillis=300, **HOLD)
            assert found.code == Code.PULL_NOT_FOUND
            assert puller._held_room == 200


def test_at_the_end_of_the_mount_held_requests_are_answered(growing: Growing):
    with mounted(growing.url, keeps_offsets=False) as served, served.client() as client:
        held = client.send_pull("t", 0, 2, **HOLD)
        while not served.mount.puller.held:  # type: ignore[union-attr]
            pass
        served.mount.stop()
        assert client.answer(held).code == Code.PULL_NOT_FOUND
        assert client.is_ended()
        served.stop()
        assert served.mount.is_drained


# -- pure -----------------------------------------------------------------------------------------


def batch(positions: list[int], sizes: list[int], data: bytes, first_place: int = 0) -> RecordBatch:
    count = len(positions)
    return RecordBatch(
        MessageQueue("t", 0),
        QueueOffset(10),
        data,
        np.array(positions, np.int64),
        np.array(sizes, np.int32),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.array([first_place + position for position in positions], np.int64),
    )


def test_neighbours_go_in_one_chunk_and_records_once():
    data = bytes(range(60))
    records = batch([0, 10, 10, 20, 40], [10, 10, 10, 10, 20], data)
    everything = Taken(records, np.arange(5), Side.TIER)
    assert [bytes(part) for part in gather((everything,))] == [data[:30], data[40:]]
    some = Taken(records, np.array([0, 3, 4]), Side.TIER)
    assert [bytes(part) for part in gather((some,))] == [data[:10], data[20:30], data[40:]]


@pytest.mark.parametrize("name", ["s01-basic", "s06-expired", "s09-big-offsets", "s11-lmq-batchcq"])
@pytest.mark.parametrize("count", [1, 7, 32])
def test_who_goes_on_in_order_is_answered_as_the_message_store_says(
    name: str, count: int, captured_tier: Callable[[str], tuple[Path, str]]
):
    """He is served without asking the store; another group asks it for the same, and both are told the same."""
    with mounted(captured_tier(name)[1], keeps_offsets=False) as served, served.client() as client:
        store, pulls, asked = served.mount.store, 0, []
        get = Puller._get
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Puller, "_get", lambda *wanted: asked.append(wanted) or get(*wanted))
            for queue in store.tiered_queues():
                offset, end = store.min_offset(*queue), store.max_offset(*queue)
                while offset < end:
                    told = client.pull(*queue, offset, maxMsgNums=count)
                    pulls += 1
                    found = store.get_message("other", *queue, offset, max_count=count)
                    expected = answer(found, offset)
                    assert (told.code, told.remark) == (expected.code, expected.remark)
                    assert dict(told.fields) == expected.fields
                    assert told.text() == b"".join(expected.body)
                    offset = int(told.fields["nextBeginOffset"])
        assert pulls > len(asked)  # else the test would hold the store against itself


@pytest.mark.parametrize(("seconds", "at_least", "at_most"), [(60.0, 1, 6), (0.0, 25, 33)])
def test_a_reader_in_order_is_given_what_several_pulls_take(
    captured_tier: Callable[[str], tuple[Path, str]],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    at_least: int,
    at_most: int,
):
    """And a slow one asks each time, since the fetcher forgets what nobody reads."""
    monkeypatch.setattr(pulling, "HANDOUT_S", seconds)
    with mounted(captured_tier("s10-consumers")[1], keeps_offsets=False) as served:
        fetcher, asked = served.mount.store.opened.fetcher, []
        at_hand = fetcher.at_hand
        monkeypatch.setattr(fetcher, "at_hand", lambda *a, **k: asked.append(a) or at_hand(*a, **k))
        with served.client() as client:
            for offset in range(33):
                told = client.pull("work", 0, offset, maxMsgNums=1)
                assert (told.code, told.fields["nextBeginOffset"]) == (0, str(offset + 1))
        assert at_least <= len(asked) <= at_most


@pytest.mark.parametrize("count", [1, 32])
@pytest.mark.parametrize("tags", ["*", "none"])
def test_what_was_compacted_costs_no_round_trips_and_is_not_lost(
    compacted: Compacted, count: int, tags: str
):
    wanted = sorted(compacted.places) if tags == "*" else []
    with mounted(compacted.url, keeps_offsets=False) as served, served.client() as client:
        puller = served.mount.puller
        assert puller is not None
        for first in (0, 1):
            offset, pulls, found = first, 0, []
            while offset < 3020:
                told = client.pull("prices", 0, offset, maxMsgNums=count, subscription=tags)
                found += [record.queue_offset for record in records(told.text())]
                offset, pulls = int(told.fields["nextBeginOffset"]), pulls + 1
            assert found == [at for at in wanted if at >= first]
            assert pulls <= max(len(found), 2)
        assert puller.skipped == 0


def test_what_is_left_between_compacted_messages_comes_in_full_answers(tmp_path: Path):
    keys = [f"key{number}" if number % 20 == 0 else "hot" for number in range(2001)]
    tier = Compacted.make(tmp_path, keys)
    assert len(tier.places) == 102
    with mounted(tier.url, keeps_offsets=False) as served, served.client() as client:
        offset, counts, found = 0, [], []
        while offset < 2001:
            told = client.pull("prices", 0, offset)
            counts.append(len(records(told.text())))
            found += [record.queue_offset for record in records(told.text())]
            offset = int(told.fields["nextBeginOffset"])
        assert found == sorted(tier.places)
        assert counts[1:4] == [32, 32, 32]  # the first is what came of one read of the tier


def test_a_reader_amid_records_is_told_of_a_queue_that_grows(growing: Growing):
    growing.put("t", *"cdefgh")
    with mounted(growing.url, keeps_offsets=False) as served, served.client() as client:
        for offset in range(4):
            told = client.pull("t", 0, offset, maxMsgNums=1)
            assert (told.fields["minOffset"], told.fields["maxOffset"]) == ("0", "8")
        assert served.mount.puller._handouts  # type: ignore[union-attr]
        growing.put("t", "i")
        while client.ask(protocol.GET_MAX_OFFSET, topic="t", queueId=0).fields["offset"] != "9":
            time.sleep(0.05)
        for offset in range(4, 9):
            told = client.pull("t", 0, offset, maxMsgNums=1)
            assert (told.code, told.fields["maxOffset"]) == (Code.SUCCESS, "9")


def run_of(sizes: list[int], data: bytes | None = None) -> Run:
    ends = list(accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    return Run.of(TierBatch(batch(starts, sizes, data or bytes(ends[-1])), LogOffset(0)))


def pull(offset: int, count: int, size_bytes: int) -> Pull:
    return Pull("g", MessageQueue("t", 0), offset, count, size_bytes, 0.0, None)


@settings(deadline=None)
@given(
    st.lists(st.integers(RECORD_BYTES_MIN, 1000), min_size=1, max_size=80),
    st.integers(0, 79),
    st.integers(1, 20),
    st.integers(1, 4000),
)
@example(
    [91, 91, 638], 1, 2, 91
)  # the second one fills the pull to the byte, and the handout ends behind it
def test_a_handout_is_cut_as_its_run_is(sizes: list[int], at: int, count: int, size_bytes: int):
    run = run_of(sizes)
    start = run.base + at % len(sizes)
    some = run.cut(QueueOffset(start), bytes_max=8 * size_bytes, count_max=8 * count)
    handout = Handout.of(run, some, Incarnation(0, QueueOffset(0), QueueOffset(99)), until_s=1.0)
    assert handout.is_simple
    first = handout.cut(pull(start, count, size_bytes), 0.0)
    assert first is not None  # whatever was asked for at once is enough for one
    for offset in range(start, run.end):
        found = handout.cut(pull(offset, count, size_bytes), 0.0)
        expected = run.cut(QueueOffset(offset), bytes_max=size_bytes, count_max=count)
        if found is not None:
            assert found == (expected.records.data, expected.end_offset)
        else:  # no answer is shorter since a handout ends where its run does not
            assert expected.end_offset > handout.end or not handout.has(offset)
    assert handout.cut(pull(start, 1, 1), 1.5) is None
    assert handout.cut(pull(start - 1, 1, 1), 0.0) is None
    del some, run, expected, found, first
    gc.collect(0)
    assert handout.cut(pull(start, 1, 1), 0.0) is None  # it keeps nothing in memory


def test_holes_inner_batches_and_what_lies_apart_are_no_neighbours():
    sizes = [RECORD_BYTES_MIN] * 3
    assert are_neighbours(run_of(sizes).batch.records)
    for flag in (INNER_BATCH, NEED_UNWRAP):
        data = bytearray(sum(sizes))
        data[2 * sizes[0] + SYS_FLAG_AT + 3] = flag
        assert not are_neighbours(run_of(sizes, bytes(data)).batch.records)
    assert not are_neighbours(batch([0, 100, 100], [100, 0, 100], bytes(200)))
    assert not are_neighbours(batch([0, 101], [100, 100], bytes(201)))
    assert not are_neighbours(batch([0, 0, 100], [100, 100, 100], bytes(200)))


def test_a_record_whose_items_came_in_two_chunks_goes_once():
    one = Taken(batch([0, 10], [10, 10], bytes(range(20))), np.arange(2), Side.TIER)
    other = Taken(
        batch([0, 0, 10], [10, 10, 10], bytes(range(10, 30)), 10), np.arange(3), Side.TIER
    )
    assert b"".join(gather((one, other))) == bytes(range(30))


@pytest.mark.parametrize(
    ("status", "asked", "code", "next_begin"),
    [
        (Is.NO_MATCHED_MESSAGE, 5, Code.PULL_RETRY_IMMEDIATELY, 7),
        (Is.MESSAGE_WAS_REMOVING, 5, Code.PULL_RETRY_IMMEDIATELY, 7),
        (Is.OFFSET_OVERFLOW_ONE, 7, Code.PULL_NOT_FOUND, 7),
        (Is.OFFSET_OVERFLOW_BADLY, 9, Code.PULL_OFFSET_MOVED, 7),
        (Is.OFFSET_TOO_SMALL, 1, Code.PULL_OFFSET_MOVED, 7),
        (Is.NO_MATCHED_LOGIC_QUEUE, 0, Code.PULL_NOT_FOUND, 0),
        (Is.NO_MATCHED_LOGIC_QUEUE, 3, Code.PULL_OFFSET_MOVED, 0),
        (Is.NO_MESSAGE_IN_QUEUE, 3, Code.PULL_OFFSET_MOVED, 0),
    ],
)
def test_each_status_has_a_brokers_code(status: GetStatus, asked: int, code: Code, next_begin: int):
    found = answer(GetResult(status, QueueOffset(7), QueueOffset(-1), QueueOffset(9)), asked)
    assert (found.code, found.remark) == (code, status.name)
    assert found.fields["nextBeginOffset"] == str(next_begin)
    assert (found.fields["minOffset"], found.fields["maxOffset"]) == ("0", "9")


@pytest.mark.parametrize(("status", "next_begin"), [(Is.TRY_AGAIN, 7), (Is.OFFSET_FOUND_NULL, 8)])
def test_what_cannot_be_read_is_told_and_skips_nothing(status: GetStatus, next_begin: int):
    error = StoreUnavailableError("the store is away")
    found = GetResult(status, QueueOffset(next_begin), QueueOffset(0), QueueOffset(9), error=error)
    with pytest.raises(RefusalError, match="offset 7 cannot be read: the store is away") as refused:
        answer(found, 7)
    assert refused.value.code == Code.SYSTEM_ERROR


def test_filters_of_long_expressions_are_not_kept():
    before = pulling._compiled.cache_info().currsize
    for number in range(3):
        found = make_filter("||".join(f"tag-{number}-{n}" for n in range(1000)), "TAG")
        assert found is not None
    assert pulling._compiled.cache_info().currsize == before
    assert make_filter("tag-7", "TAG") is make_filter("tag-7", "TAG")


def test_every_status_is_answered():
    for status in set(GetStatus) - {Is.TRY_AGAIN, Is.OFFSET_FOUND_NULL}:
        answer(GetResult(status, QueueOffset(0), QueueOffset(0), QueueOffset(0)), 0)


def test_pulls_that_wait_for_a_thread_are_answered_by_their_deadline(
    captured_tier: Callable[[str], tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
):
    """The tier takes all the time that each read has: what waited meanwhile for the only reader waits no more."""
    _, url = captured_tier("s01-basic")
    limits = PullLimits(read_s=1.0)
    with mounted(url, keeps_offsets=False, readers=1, pulls=limits) as served:
        real, given = served.mount.store.get_message, list[float]()

        def slow(*asked: Any, timeout_s: float, **more: Any) -> Any:
            given.append(timeout_s)
            time.sleep(timeout_s)
            return real(*asked, timeout_s=0.0, **more)

        monkeypatch.setattr(served.mount.store, "get_message", slow)
        with served.client() as client:
            for queue_id in range(4):
                for group in ("g", "h"):
                    client.send_pull("orders", queue_id, 0, consumerGroup=group)
            for _ in range(8):
                client.receive()
    assert 0.0 < max(given) < limits.read_s, given
