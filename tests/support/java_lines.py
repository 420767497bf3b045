"""What Java's own store tells of a directory, beside what our reader tells."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from support.oracle import dump
from support.stored import read_all

from tiered.format.message_forms import decompress_body
from tiered.format.properties import tag_hash
from tiered.format.record import offset_msg_id

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.format.record import Record


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
