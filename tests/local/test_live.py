"""Reading beside a real broker: while it writes, when it crashes, and when it starts again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from support import following, oracle
from support.oracle import Broker

from tiered.clock import SystemClock
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiered.local.interface import Follower
    from tiered.local.rocketmq import RocketMQStore

pytestmark = [pytest.mark.java, oracle.needs_java]
SECONDS_MAX = 120


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path, tmp_path / "store") as running:
        running.start()
        yield running


def open_live(broker: Broker) -> RocketMQStore:
    return following.open_store(broker.store, SystemClock())


def follow_until(follower: Follower, taken: following.Taken, count: int) -> None:
    """Poll until ``count`` messages have come."""
    end_s = time.monotonic() + SECONDS_MAX
    while taken.count() < count:
        for batch in follower.poll(1 << 20):
            taken.add(batch)
        assert time.monotonic() < end_s, f"{taken.count()} of {count}"
        time.sleep(0.01)


def places(acknowledged: list[dict[str, Any]]) -> set[tuple[str, int, int]]:
    return {(row["topic"], row["queue_id"], row["queue_offset"]) for row in acknowledged}


def taken_places(taken: following.Taken) -> set[tuple[str, int, int]]:
    return {
        (queue.topic, queue.queue_id, offset)
        for queue, found in taken.messages.items()
        for offset in found
    }


@pytest.mark.slow
def test_attached_before_the_first_message(broker: Broker):
    """Everything that is acknowledged arrives once and in order, files rolling meanwhile."""
    store = open_live(broker)
    assert store.identity.is_live
    taken, follower = following.Taken(), store.follow({})
    assert follower.poll(1 << 20) == []
    told = []
    for seed in range(3):
        told += broker.produce("load", 700, queues=3, seed=seed, size="10..900", inflight=32)
        follow_until(follower, taken, len(told))
    following.drain(follower, taken)
    assert taken_places(taken) == places(told)
    assert not taken.holes
    assert not taken.gaps
    assert store.waiting().records == 0
    following.check_complete(store, taken)
    late = open_live(broker)  # attached afterwards: the same
    assert following.follow_all(late).raw == taken.raw
    assert following.read_all(late).raw == taken.raw
    late.close()
    broker.kill()
    assert following.read_dump(oracle.dump(broker.store)).messages == taken.messages
    store.close()


@pytest.mark.slow
def test_goes_on_over_a_crash_and_a_clean_stop(broker: Broker):
    store = open_live(broker)
    taken, follower = following.Taken(), store.follow({})
    told = broker.produce("load", 300, queues=2, seed=1, inflight=32)
    follow_until(follower, taken, 300)
    broker.kill()
    store.refresh()
    assert not store.identity.is_live
    following.drain(follower, taken)
    broker.start()
    store.refresh()
    assert store.identity.is_live
    told += broker.produce("load", 300, seed=2, inflight=32)
    follow_until(follower, taken, 600)
    broker.stop()
    store.refresh()
    assert not store.identity.is_live
    following.drain(follower, taken)
    assert taken_places(taken) == places(told)
    assert not taken.gaps
    assert following.read_dump(oracle.dump(broker.store)).messages == taken.messages
    store.close()


@pytest.mark.slow
def test_given_up_messages_are_not_taken_while_the_broker_runs(broker: Broker):
    """Surprise 2 of the captured stores: a stale tail that comes to incarnation again at the next crash."""
    broker.produce("load", 1150, queues=2, seed=81, size=100, body="binary", tags="a")
    broker.kill()
    damage_back(broker.store, 40_000)
    before = following.read_dump(oracle.dump(broker.store))
    broker.start()
    attached_early = open_live(broker)
    early, follower = following.Taken(), attached_early.follow({})
    following.drain(follower, early)
    assert early.messages == before.messages  # what the start left, and nothing behind it
    told = broker.produce("load", 60, seed=82, size=100, body="binary", tags="b")
    follow_until(follower, early, sum(map(len, before.messages.values())) + 60)
    following.drain(follower, early)
    assert places(told) <= taken_places(early)
    attached_late = open_live(broker)
    late = following.follow_all(attached_late)
    assert late.raw == early.raw
    assert attached_late.waiting().records > 0
    assert "given up" in attached_late.waiting().reason
    assert following.read_all(attached_late).raw == late.raw
    broker.kill()
    attached_early.refresh()
    following.drain(follower, early)  # the next start takes the given-up ones in again
    after = following.read_dump(oracle.dump(broker.store))
    assert early.messages == after.messages
    assert not early.gaps
    attached_early.close()
    attached_late.close()


@pytest.mark.slow
def test_expiry_under_a_follower(broker: Broker):
    """Deleted files move the minimum; nothing crashes, and what is left is exact."""
    broker.produce("load", 3000, queues=2, seed=5, size=400, inflight=64)
    store = open_live(broker)
    follower, taken = store.follow({}), following.Taken()
    for batch in follower.poll(1000):
        taken.add(batch)
    oldest = sorted((broker.store / "commitlog").iterdir())[:2]
    for file in oldest:
        file.unlink()
    time.sleep(0.6)
    store.refresh()
    following.drain(follower, taken)
    assert taken.gaps
    bounds = following.bounds_of(store)
    for queue, (low, end) in bounds.items():
        assert low > 0
        assert [o for o in taken.offsets(queue) if o >= low] == list(range(low, end))
    assert not taken.holes
    assert following.read_all(store).count() == sum(end - low for low, end in bounds.values())
    store.close()


def damage_back(store: Path, distance: int) -> None:
    """Flip a byte in the body of a record about ``distance`` bytes before the end of the log."""
    records = []
    for file in sorted((store / "commitlog").iterdir()):
        data, at = file.read_bytes(), 0
        while data[at + 4 : at + 7] == bytes.fromhex("daa320"):
            records.append((file, at))
            at += int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == bytes(4):
            break
    file, at = next(
        (file, at)
        for file, at in reversed(records)
        if (records[-1][0] != file) * file.stat().st_size + records[-1][1] - at >= distance
    )
    data = bytearray(file.read_bytes())
    data[at + 98] ^= 0xFF
    with file.open("r+b") as out:
        out.write(data)


def test_queue_names_are_kept(broker: Broker):
    broker.produce("only-one-queue", 3, queues=1, seed=1)
    store = open_live(broker)
    store.refresh()
    assert MessageQueue("only-one-queue", 0) in store.queues()
    assert store.identity.broker == oracle.BROKER
    assert store.identity.cluster == oracle.CLUSTER
    store.close()
