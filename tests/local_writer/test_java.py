"""Java's own store reads what we wrote: field by field what our reader finds, and as a clean stop left it."""

from __future__ import annotations

import base64
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from local_writer.reading import KINDS, NAMES, read_all
from support.oracle import SMALL, Broker, dump, needs_java

from tiered.clock import SystemClock
from tiered.format.compression import decompress_body
from tiered.format.ids import offset_msg_id
from tiered.format.tags import tag_hash
from tiered.local.writer.bulk import make_store
from tiered.local.writer.messages import Message, StoreSettings
from tiered.local.writer.store import EmbeddedStore
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.format.record import Record

pytestmark = [pytest.mark.java, needs_java]


def as_java_tells(record: Record) -> dict[str, Any]:
    """A line of the dump."""
    properties = record.properties
    offset_id = offset_msg_id(record.store_host, record.physical_offset)
    return {
        "type": "message",
        "topic": record.topic,
        "queue_id": record.queue_id,
        "queue_offset": record.queue_offset,
        "store_timestamp_ms": record.store_timestamp_ms,
        "born_timestamp_ms": record.born_timestamp_ms,
        "born_host": record.born_host,
        "store_host": record.store_host,
        "tags": properties.get("TAGS"),
        "keys": properties.get("KEYS"),
        "properties": properties,
        "msg_id": properties["UNIQ_KEY"],
        "offset_msg_id": offset_id,
        "flag": record.flag,
        "sys_flag": record.sys_flag & ~1,
        "body_crc": record.body_crc,
        "reconsume_times": record.reconsume_times,
        "prepared_transaction_offset": record.prepared_transaction_offset,
        "body_base64": base64.b64encode(decompress_body(record.body, record.sys_flag)).decode(),
        "system": False,
        "stored_sys_flag": record.sys_flag,
        "size": record.size,
        "physical_offset": record.physical_offset,
        "listed_topic": record.topic,
        "listed_queue_id": record.queue_id,
        "listed_offset": record.queue_offset,
        "tag_hash": tag_hash(properties.get("TAGS")),
    }


def check_as_java_reads(root: Path, count: int) -> None:
    ours = {
        (record.topic, record.queue_id, record.queue_offset): as_java_tells(record)
        for queue in read_all(root).values()
        for record in queue.values()
    }
    theirs = {}
    for line in map(json.loads, dump(root)):
        if line["type"] == "store":
            assert line["clean"] is True
        elif line["type"] == "message":
            theirs[line["topic"], line["queue_id"], line["queue_offset"]] = line
        else:
            assert line["type"] == "queue"
    assert len(theirs) == count
    assert theirs == ours


def test_java_reads_what_was_appended(tmp_path: Path):
    rng = random.Random(1)
    settings = StoreSettings(65_536, 50)
    messages = [message for message in KINDS if not message.sys_flag]
    with EmbeddedStore.create(
        tmp_path / "s", **NAMES, clock=SystemClock(), settings=settings
    ) as store:
        for _ in range(40):
            store.append_batch(messages)
            store.append(Message("sizes", rng.randrange(3), rng.randbytes(rng.randrange(20_000))))
    with EmbeddedStore.open(tmp_path / "s", **NAMES, clock=SystemClock()) as store:
        store.begin_queue(MessageQueue("far", 0), QueueOffset(120))
        store.append_batch([Message("far", 0, b"x", tags="täg")] * 70)
        store.append(Message("plain", 0, b"after a stop"))
    check_as_java_reads(tmp_path / "s", 40 * (len(messages) + 1) + 71)


def test_java_reads_what_was_made_in_bulk(tmp_path: Path):
    make_store(
        tmp_path / "s",
        messages=3000,
        body_bytes=500,
        queues=3,
        topics=11,
        seed=7,
        clock=SystemClock(),
        commitlog_file_bytes=1 << 18,
        consumequeue_file_items=50,
    )
    check_as_java_reads(tmp_path / "s", 3000)


def test_a_broker_and_we_take_turns(tmp_path: Path):
    """A real broker starts on our store, adds to it and stops; we go on with that."""
    settings = StoreSettings(
        SMALL["mappedFileSizeCommitLog"], SMALL["mappedFileSizeConsumeQueue"] // 20
    )
    root = tmp_path / "s"
    ours = [Message("turns", at % 4, b"x" * 1000, tags="ours", keys=f"k{at}") for at in range(700)]
    with EmbeddedStore.create(root, **NAMES, clock=SystemClock(), settings=settings) as store:
        store.append_batch(ours)
    before = read_all(root)
    with Broker(tmp_path, root) as broker:
        broker.start()
        acknowledged = broker.produce("turns", 100, queues=4)
        broker.stop()
    assert sorted(line["queue_offset"] for line in acknowledged) == sorted([*range(175, 200)] * 4)
    with EmbeddedStore.open(root, **NAMES, clock=SystemClock()) as store:
        put = store.append_batch(ours)
    assert put[0].queue_offset == 200
    found = read_all(root)
    for queue, records in before.items():
        assert {offset: found[queue][offset] for offset in records} == records
    check_as_java_reads(root, 1500)
