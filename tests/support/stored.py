"""What a store holds, as our reader tells it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tiered.clock import ManualClock
from tiered.format.properties import tag_hash
from tiered.format.record import Record, decode_record
from tiered.local.rocketmq import RocketMQStore
from tiered.store.new_message import NewMessage

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.model import MessageQueue
    from tiered.store.new_message import Appended

RETRY = "%RETRY%" + "g" * 248
NAMES = {"cluster": "cluster-a", "broker": "broker-a"}
KINDS = (
    NewMessage("plain", 0, b"body"),
    NewMessage("plain", 3, b"", tags="täg-✓", keys="k1 k2"),
    NewMessage("plain", 0, b"\0\x01\x02" * 100, properties={"näme": "välue 🚀", "x": "y"}),
    NewMessage(RETRY, 0, b"again", reconsume_times=3),
    NewMessage("%DLQ%g", 0, b"dead", flag=-7, born_timestamp_ms=12),
    NewMessage("p|q", 1, b"six", born_host="[2001:db8:0:0:0:0:0:1]:40000"),
    NewMessage("plain", 0, b"squeezed", sys_flag=0x301),
    NewMessage("plain", 0, b"known", properties={"UNIQ_KEY": "MINE", "CLUSTER": "other"}),
)
"""A message of each kind."""


def read_all(directory: Path, count_max: int = 1000) -> dict[MessageQueue, dict[int, Record]]:
    """Every record by queue and queue offset. Holes, damage and stray entries fail."""
    store = RocketMQStore.open(directory, clock=ManualClock())
    try:
        found = {}
        for queue, bounds in store.queues().items():
            found[queue] = records = {}
            start = bounds.min
            while start < bounds.end:
                batch = store.read(queue, start, bytes_max=1 << 22, count_max=count_max)
                assert batch is not None
                assert batch.base_offset == start
                for at in range(batch.count):
                    assert batch.sizes[at] > 0
                    physical = int(batch.physical_offsets[at])
                    records[start + at] = record = decode_record(
                        batch.data, int(batch.positions[at]), physical_offset=physical
                    )
                    assert batch.tag_codes[at] == tag_hash(record.properties.get("TAGS"))
                start = batch.end_offset
        report = store.report()
        assert (report.torn_bytes, report.damaged_records, report.foreign_entries) == (0, 0, 0)
        assert not report.rebuilt_queues
        assert not report.notes
        return found
    finally:
        store.close()


def check_same(message: NewMessage, put: Appended, record: Record) -> None:
    """A record is what was put, where it was put."""
    assert (record.topic, record.queue_id, record.body) == (
        message.topic,
        message.queue_id,
        message.body,
    )
    assert (record.queue_offset, record.physical_offset, record.size) == (
        put.queue_offset,
        put.physical_offset,
        put.size_bytes,
    )
    found = record.properties
    assert found.pop("CLUSTER") == "cluster-a"
    assert found.pop("UNIQ_KEY") == put.msg_id
    expected = dict(message.properties)
    expected.pop("UNIQ_KEY", None)
    if message.tags is not None:
        expected["TAGS"] = message.tags
    if message.keys is not None:
        expected["KEYS"] = message.keys
    assert found == expected
    assert record.flag == message.flag
    assert record.reconsume_times == message.reconsume_times
    assert record.sys_flag & ~0x30 == message.sys_flag
    born_ms = message.born_timestamp_ms
    assert record.born_timestamp_ms == (record.store_timestamp_ms if born_ms is None else born_ms)
    assert record.born_host == (message.born_host or record.store_host)


def without_cluster(message: NewMessage) -> NewMessage:
    """What ``check_same`` expects of a message that names a cluster: the store names its own."""
    properties = {name: value for name, value in message.properties.items() if name != "CLUSTER"}
    return replace(message, properties=properties)
