"""``status --store`` beside a running broker: each field against what the broker says itself, at rest and under load."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from support import command_line, live, oracle
from support.broker_files import START_MS, FakeBroker
from support.live import Attach, Producer
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOPIC = "load"
LOOKS = 3


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[oracle.Broker]:
    with oracle.Broker(tmp_path, tmp_path / "store") as running:
        running.start()
        yield running


def status(url: str, store: Path) -> dict[str, Any]:
    (broker,) = (
        command_line.here("status", url, "--store", store, "--json").good().document["brokers"]
    )
    assert isinstance(broker, dict)
    return broker


def queues(found: dict[str, Any], topic: str = TOPIC) -> dict[int, dict[str, Any]]:
    return {
        row["queue_id"]: row
        for one in found["topics"]
        if one["topic"] == topic
        for row in one["queues"]
    }


def check_level(found: dict[str, Any]) -> None:
    assert (found["lag_messages"], found["lag_bytes"], found["lag_seconds"]) == (0, 0, 0.0)
    assert found["waiting"] == {"records": 0, "size_bytes": 0, "reason": ""}
    for row in queues(found).values():
        assert row["ahead_messages"] == 0
        assert row["local_max_offset"] == row["commit_offset"]


def test_the_running_brokers_newest_file_counts(tmp_path: Path):
    """It is where all that is new is: nothing of it was tiered, and status says how much that is."""
    broker, url = FakeBroker(tmp_path / "store"), f"file://{tmp_path}/tier"
    try:
        broker.start(START_MS)
        broker.put(3, queue_id=0)
        (broker.store / "brokerIdentity").write_text("c#b#0")
        command_line.here("attach", broker.store, "--to", url, "--once").good()
        check_level(status(url, broker.store))
        raws = broker.put(4, queue_id=0) + broker.put(2, queue_id=1)
        unlisted = broker.append(1)
        found = status(url, broker.store)
        rows = queues(found, "t")
        assert {at: row["local_max_offset"] for at, row in rows.items()} == {0: 7, 1: 2}
        assert {at: row["lag_messages"] for at, row in rows.items()} == {0: 4, 1: 2}
        assert {at: row["ahead_messages"] for at, row in rows.items()} == {0: 0, 1: None}
        assert found["lag_bytes"] == sum(map(len, raws))
        assert found["lag_seconds"] == pytest.approx(time.time() - START_MS / 1000, abs=600)
        assert (found["waiting"]["records"], found["waiting"]["size_bytes"]) == (1, len(unlisted))
        assert found["local"]["log_end"] == broker.position - len(unlisted)
        info = command_line.here("store", "info", broker.store, "--json").good().document
        assert info["messages"] == 9
        tail = command_line.here("store", "tail", broker.store, "--count", "1").good()
        assert [row["queue_offset"] for row in tail.rows] == [6, 1]
    finally:
        broker.close()


@pytest.mark.slow
@pytest.mark.java
@oracle.needs_java
@pytest.mark.timeout(600)
def test_every_field_is_the_brokers_own(broker: oracle.Broker, tmp_path: Path):
    """With nothing tiered behind the first messages, under load with a writer beside it, and level again."""
    url, store = f"file://{tmp_path}/tier", broker.store
    broker.produce(TOPIC, 100, queues=4)
    command_line.here("attach", store, "--to", url, "--once").good()
    check_level(status(url, store))
    before = {at: end for at, (_, end) in broker.offsets(TOPIC).items()}
    sent = broker.produce(TOPIC, 200, queues=4, seed=2)
    until(lambda: sum(end for _, end in broker.offsets(TOPIC).values()) == 300, "listed")
    found = status(url, store)
    rows, theirs = queues(found), broker.offsets(TOPIC)
    assert {at: row["local_max_offset"] for at, row in rows.items()} == {
        at: end for at, (_, end) in theirs.items()
    }
    assert {at: row["commit_offset"] for at, row in rows.items()} == before
    assert {at: row["lag_messages"] for at, row in rows.items()} == {
        at: end - before[at] for at, (_, end) in theirs.items()
    }
    assert found["lag_messages"] == len(sent)
    assert found["lag_bytes"] > sum(row["body_len"] for row in sent)
    assert 0 < found["lag_seconds"] < 600
    _check_under_load(broker, url, tmp_path)
    found = status(url, store)
    check_level(found)
    assert {at: row["commit_offset"] for at, row in queues(found).items()} == {
        at: end for at, (_, end) in broker.offsets(TOPIC).items()
    }


def _check_under_load(broker: oracle.Broker, url: str, tmp_path: Path) -> None:
    """What status says of each queue lies between what the broker says before and behind it."""
    options = {"queues": 4, "size": "10..900", "inflight": 64, "seconds": 300, "rate": 100}
    producer = Producer(broker.address, TOPIC, tmp_path / "load.log", **options)
    with Attach(broker.store, url, tmp_path / "attach.log") as attach:
        producer.wait_for(live.SOME)
        for _ in range(LOOKS):
            low = broker.offsets(TOPIC)
            rows = queues(status(url, broker.store))
            high = broker.offsets(TOPIC)
            for at, row in rows.items():
                assert low[at][1] <= row["local_max_offset"] <= high[at][1]
                assert row["ahead_messages"] == 0
                assert row["lag_messages"] == row["local_max_offset"] - row["commit_offset"]
        producer.close()
        total = sum(end for _, end in broker.offsets(TOPIC).values())
        until(
            lambda: sum(live.commits(url).get((TOPIC, at), 0) for at in range(4)) >= total, "level"
        )
        attach.stop()
