"""The retry log: records as brokers make them, rounds that are whole or not at all, and what is pending after any crash."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from backends.memory import MemoryStore
from backends.testing.faulty import WRITES, Fault, FaultyStore, Rule
from tiered.api.broker_place import Place, RetryPlace, retry_places
from tiered.clock import ManualClock
from tiered.format.properties import join_properties
from tiered.format.record import Record, body_crc, record_bytes
from tiered.log.merge import FAN_IN, bundles_used
from tiered.model import MessageQueue, QueueBounds, QueueOffset
from tiered.mount.offsets import mounts_with_offsets
from tiered.mount.protocol import Code, RefusalError
from tiered.mount.retries import (
    _SWEPT_AT_ONCE,
    DELAYS_S,
    RetryLimits,
    RetryLog,
    RetryWriter,
    delivered,
    sent_back,
)

if TYPE_CHECKING:
    from backends.base import ObjectStore

PREFIX = "b/meta/mount/b/retry/"
NOW_MS = 1_700_000_000_000


def record(body: bytes = b"poison", *, times: int = 0, **said: str) -> Record:
    """As a consumer was given it."""
    raw = join_properties({"UNIQ_KEY": "0A0A", "TAGS": "t", **said})
    size = record_bytes(body=len(body), topic=6, props=len(raw), sys_flag=0, version=1)
    return Record(
        size, 1, body_crc(body), 3, 7, 41, 12345, 0, NOW_MS - 9, "10.0.0.1:5", NOW_MS, "10.0.0.2:6",
        times, 0, body, "orders", raw,
    )  # fmt: skip


def log_of(store: ObjectStore, clock: ManualClock, **limits: float) -> RetryLog:
    """A log that was begun."""
    writer = RetryWriter(
        store,
        store,
        PREFIX,
        clock,
        random.Random(7),
        place=Place("c", "b"),
        old_end=lambda queue: 5 if "g" in queue.topic else 0,
    )
    log = RetryLog(writer, clock, RetryLimits(**limits))  # type: ignore[arg-type]
    log.begin()
    return log


def test_a_record_goes_to_the_queue_of_its_level() -> None:
    queue, made = sent_back(record(times=2), "g", level=0, max_times=16)
    assert queue == MessageQueue("SCHEDULE_TOPIC_XXXX", 4)
    assert made.reconsume_times == 3
    assert made.properties == {
        "UNIQ_KEY": "0A0A", "TAGS": "t", "RETRY_TOPIC": "orders", "WAIT": "false", "DELAY": "5",
        "ORIGIN_MESSAGE_ID": "0A000002000000060000000000003039",
        "REAL_TOPIC": "%RETRY%g", "REAL_QID": "0",
    }  # fmt: skip
    queue, made = delivered(made)
    assert queue == MessageQueue("%RETRY%g", 0)
    assert "DELAY" not in made.properties


@pytest.mark.parametrize(("times", "level"), [(16, 0), (0, -1), (17, 3)])
def test_after_the_last_try_it_is_a_dead_letter(times: int, level: int) -> None:
    queue, made = sent_back(record(times=times, RETRY_TOPIC="t0"), "g", level=level, max_times=16)
    assert queue == MessageQueue("%DLQ%g", 0)
    assert (made.reconsume_times, made.properties["RETRY_TOPIC"]) == (times + 1, "t0")


def test_no_level_is_beyond_the_last() -> None:
    queue, _ = sent_back(record(times=30), "g", level=0, max_times=99)
    assert queue.queue_id == len(DELAYS_S) - 1


def served(log: RetryLog, *sent: tuple[int, int]) -> list[Record]:
    """Send messages back, each with a level and how often it was sent back, while the log works."""

    async def work() -> list[Record]:
        running = asyncio.ensure_future(log.run())
        await asyncio.sleep(0)
        some = [
            log.send_back("g", record(times=times), level=level, max_times=16)
            for level, times in sent
        ]
        found = await asyncio.gather(*some)
        log.stop()
        await running
        return found

    return asyncio.run(work())


def deliver(log: RetryLog) -> None:
    """Let it deliver what is due."""

    async def work() -> None:
        moved = asyncio.Event()
        log.on_moved = lambda _queue: moved.set()
        running = asyncio.ensure_future(log.run())
        async with asyncio.timeout(60):
            await moved.wait()
        log.stop()
        await running

    asyncio.run(work())


def test_delivered_at_its_time_behind_the_old_brokers_and_found_again_after_a_restart() -> None:
    store, clock = MemoryStore(), ManualClock(NOW_MS)
    log = log_of(store, clock)
    found = served(log, (1, 0), (0, 0), (-1, 0))
    assert [(one.topic, one.queue_id, one.queue_offset) for one in found] == [
        ("SCHEDULE_TOPIC_XXXX", 0, 0), ("SCHEDULE_TOPIC_XXXX", 2, 0), ("%DLQ%g", 0, 5),
    ]  # fmt: skip
    assert log.pending == 2
    again = log_of(store, clock)  # as after a crash
    assert again.pending == 2
    clock.advance(1)
    deliver(again)
    assert again.pending == 1
    queue = MessageQueue("%RETRY%g", 0)
    assert again.queues()[queue] == QueueBounds(QueueOffset(5), QueueOffset(6))
    batch = again.read(queue, again.queues()[queue].min, bytes_max=1 << 20, count_max=10)
    assert batch is not None
    there = again.record_at(int(batch.physical_offsets[0]))
    assert there is not None
    assert there.topic == "%RETRY%g"
    last = log_of(store, clock)
    assert (last.pending, last.queues()) == (1, again.queues())


def test_the_log_is_found_below_its_mount_with_and_without_second_copies_of_checkpoints() -> None:
    store, place = MemoryStore(), Place("c", "b")
    prefix = RetryPlace("c", "b", "name/10.0.0.1:9").prefix
    writer = RetryWriter(
        store,
        store,
        prefix,
        ManualClock(NOW_MS),
        random.Random(7),
        place=place,
        old_end=lambda _queue: 0,
    )
    writer.begin()
    assert not retry_places(store, place)
    writer.commit([sent_back(record(), "g", level=1, max_times=16)])
    for _ in range(2):
        assert retry_places(store, place) == [RetryPlace("c", "b", "name/10.0.0.1:9")]
        assert not mounts_with_offsets(store, place.prefix)
        writer._journal.write_checkpoint(force=True)


def test_what_is_old_is_given_up_and_deleted_when_nobody_can_read_it() -> None:
    clock = ManualClock(NOW_MS)
    store = MemoryStore(now_ms=clock.now_ms)
    log = log_of(store, clock)
    served(log, (-1, 0))
    for more in ((), ((18, 0),)):  # a segment ends when the next is begun, an hour later
        clock.advance(3601)
        log = log_of(store, clock)
        served(log, (-1, 0), *more)
    bundles = len(list(store.list(PREFIX + "bundle/")))
    log.writer.tidy(kept_ms=3_600_000)
    assert log.queues()[MessageQueue("%DLQ%g", 0)] == QueueBounds(QueueOffset(7), QueueOffset(8))
    assert len(list(store.list(PREFIX + "bundle/"))) == bundles  # somebody may read them
    clock.advance(25 * 3600)
    log.writer.tidy(kept_ms=3_600_000)
    assert len(list(store.list(PREFIX + "bundle/"))) == bundles  # who began before is at it still
    log.writer.tidy(kept_ms=3_600_000)
    assert 0 < len(list(store.list(PREFIX + "bundle/"))) < bundles
    again = log_of(store, clock)
    assert (again.pending, again.queues()) == (1, log.queues())
    deliver(again)  # what waited is there still, in a bundle that it shared


def test_rounds_are_merged_and_what_waits_is_due_at_its_own_time() -> None:
    clock = ManualClock(NOW_MS)
    store = MemoryStore(now_ms=clock.now_ms)
    log = log_of(store, clock)
    for _ in range(200):
        clock.advance(1)
        sent = [sent_back(record(), "g", level=level, max_times=16) for level in (18, -1)]
        log.writer.commit(sent)
        log.writer.merge()
    assert len(bundles_used(log.writer.state)) < 2 * FAN_IN
    log = log_of(store, clock)
    dues = [NOW_MS + 1000 * (second + 7200) for second in range(1, 201)]
    assert [one.due_ms for one in log.writer.pending()] == dues
    assert len(list(log.writer.reader.records(MessageQueue("%DLQ%g", 0), 5, 205))) == 200
    while log.writer.tidy(kept_ms=3_600_000):
        pass
    there = len(list(store.list(PREFIX + "bundle/")))
    clock.advance(25 * 3600)
    slices = sum(1 for _ in iter(lambda: log.writer.tidy(kept_ms=3_600_000), False))
    assert slices == there // _SWEPT_AT_ONCE
    while log.writer.tidy(kept_ms=3_600_000):
        pass
    left = {info.key.removeprefix(PREFIX) for info in store.list(PREFIX + "bundle/")}
    assert left == {use.bundle.key for use in bundles_used(log.writer.state)}


def test_a_damaged_bundle_is_left_out_of_merging_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, clock = MemoryStore(), ManualClock(NOW_MS)
    log = log_of(store, clock)
    for number in range(3 * FAN_IN):
        log.writer.commit([sent_back(record(), "g", level=-1, max_times=16)])
        if number == 1:
            store.delete(next(iter(store.list(PREFIX + "bundle/"))).key)
        log.writer.merge()
    assert [one.message[:44] for one in caplog.records] == [
        "bundles of the retry log are not merged: a b"
    ]
    assert len(bundles_used(log.writer.state)) < 3 * FAN_IN


def test_that_the_store_refuses_is_said_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(MemoryStore(), random.Random(1))
    log = log_of(store, ManualClock(NOW_MS))
    store.add(Rule(Fault.DENIED, WRITES, "journal/", times=3))
    served(log, (1, 0))
    assert [one.message[:50] for one in caplog.records] == [
        "messages that are sent back are not kept, trying a"
    ]
    assert (log.trouble, log.pending) == ("", 1)


def test_too_many_are_refused() -> None:
    log = log_of(MemoryStore(), ManualClock(NOW_MS), pending_max=1)
    with pytest.raises(RefusalError) as refused:
        served(log, (1, 0), (1, 0))
    assert refused.value.code is Code.SYSTEM_BUSY
