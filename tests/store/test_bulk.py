"""Stores made in bulk: every message where it should be, what it should be, and the same again."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from support.embedded import SMALL
from support.stored import read_all

from tiered.clock import ManualClock
from tiered.errors import InvalidError
from tiered.local.rocketmq import RocketMQStore
from tiered.model import MessageQueue
from tiered.store.bulk import EVENTS, MadeStore, make_store
from tiered.store.embedded import MessageStore
from tiered.store.new_message import NewMessage

if TYPE_CHECKING:
    from pathlib import Path

NOW_MS = 1_700_000_000_000


def make(folder: Path, **options: object) -> MadeStore:
    chosen = {
        "messages": 1000,
        "body_bytes": 400,
        "queues": 4,
        "topics": 1,
        "seed": 1,
        "clock": ManualClock(NOW_MS),
        "commitlog_file_bytes": 100_000,
        "consumequeue_file_items": 100,
        **options,
    }
    return make_store(folder, **chosen)


@pytest.mark.parametrize(("topics", "queues"), [(1, 4), (3, 2), (12, 1)])
def test_all_of_it_reads_back(tmp_path: Path, topics: int, queues: int):
    made = make(tmp_path / "s", topics=topics, queues=queues)
    found = read_all(tmp_path / "s")
    assert set(found) == {
        MessageQueue(f"bench-{topic}", queue) for topic in range(topics) for queue in range(queues)
    }
    records = sorted(
        (record for queue in found.values() for record in queue.values()),
        key=lambda record: record.physical_offset,
    )
    assert len(records) == made.messages == 1000
    assert sum(record.size for record in records) == made.record_bytes
    assert records[-1].physical_offset + records[-1].size == made.log_bytes
    unique, tags = set(), Counter()
    for number, record in enumerate(records):
        queue = number % (topics * queues)
        assert record.topic == f"bench-{queue % topics}"
        assert record.queue_id == queue // topics
        assert record.queue_offset == number // (topics * queues)
        assert record.store_timestamp_ms == NOW_MS - 999 // 10 + number // 10
        properties = record.properties
        assert properties["KEYS"] == f"order-{number:012d}"
        assert set(properties) == {"KEYS", "TAGS", "UNIQ_KEY", "CLUSTER", "origin"}
        assert re.fullmatch(r"[0-9A-F]{32}", properties["UNIQ_KEY"])
        unique.add(properties["UNIQ_KEY"])
        tags[properties["TAGS"]] += 1
        body = json.loads(record.body)
        assert list(body) == ["id", "time", "event", "user", "amount", "token", "text"]
        assert (int(body["id"]), body["event"]) == (number, properties["TAGS"])
        assert body["time"] == record.born_timestamp_ms
        assert re.fullmatch(r"[a-z ]+", body["text"])
    assert len(unique) == 1000
    assert set(tags) == set(EVENTS)
    assert min(tags.values()) > 60


def test_it_is_clean_and_can_be_gone_on_with(tmp_path: Path):
    told: list[int] = []
    made = make(tmp_path / "s", progress=told.append)
    assert not (tmp_path / "s" / "abort").exists()
    assert told == sorted(told)
    assert told[-1] == 1000
    store = RocketMQStore.open(tmp_path / "s")
    assert (store.identity.cluster, store.identity.broker) == ("bench-cluster", "bench-broker")
    assert store.report().log_end == made.log_bytes
    store.close()
    with MessageStore.open(
        tmp_path / "s", cluster="c", broker="b", clock=ManualClock(NOW_MS), options=SMALL
    ) as writer:
        assert writer.append(NewMessage("bench-0", 2, b"")).queue_offset == 250


@pytest.mark.parametrize("body_bytes", [0, 1, 7, 150, 210, 220, 221, 222, 230])
def test_short_bodies(tmp_path: Path, body_bytes: int):
    make(tmp_path / "s", messages=20, body_bytes=body_bytes)
    for queue in read_all(tmp_path / "s").values():
        for record in queue.values():
            assert len(record.body) == body_bytes
            assert b'{"id":"0000'.startswith(record.body[:11])


def test_the_seed_decides(tmp_path: Path):
    logs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(tmp_path / name, seed=seed)
        logs.append((tmp_path / name / "commitlog" / f"{100_000:020d}").read_bytes())
    assert logs[0] == logs[1] != logs[2]


def test_bodies_compress_as_benchmarks_expect(tmp_path: Path):
    make(tmp_path / "s", messages=2000, body_bytes=1024, commitlog_file_bytes=1 << 24)
    records = [record for queue in read_all(tmp_path / "s").values() for record in queue.values()]
    bodies = b"".join(record.body for record in records)
    assert 2.5 < len(bodies) / len(zlib.compress(bodies, 6)) < 3.1


@pytest.mark.parametrize(
    "options",
    [
        {"messages": 0},
        {"queues": 0},
        {"topics": -1},
        {"body_bytes": -1},
        {"body_bytes": 100_000},
        {"commitlog_file_bytes": 0},
    ],
)
def test_what_is_refused(tmp_path: Path, options: dict[str, int]):
    with pytest.raises(InvalidError):
        make(tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


def test_nothing_is_made_where_something_is(tmp_path: Path):
    make(tmp_path / "s")
    with pytest.raises(InvalidError, match="something already"):
        make(tmp_path / "s")
