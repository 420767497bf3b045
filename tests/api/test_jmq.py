"""JoyQueue's messages in the Python API: what JoyQueue's own readers returned, as messages, columns, and by key."""

from __future__ import annotations

from base64 import b64decode
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from support.jmq_stores import dump, open_store, pristine, shown
from support.kafka_tiers import add_batches, base64
from support.opened import Made

from tiered.api.arrow import JMQ_COLUMNS, jmq_schema
from tiered.api.message import JmqMessage
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.api.tier import Tier
    from tiered.model import MessageQueue

NAME = "j01-basic"


@pytest.fixture(scope="module")
def tier() -> Iterator[Tier]:
    made, store = Made(), open_store(pristine(NAME))
    for queue, bounds in store.queues().items():
        at = bounds.min
        while (batch := store.read(queue, at, bytes_max=10_000, count_max=500)) is not None:
            add_batches(made.builder, [batch])
            at = batch.end_offset
    store.close()
    with made.open() as opened:
        yield opened


def wanted(tier: Tier, queue: MessageQueue) -> list[dict[str, Any]]:
    bounds, lines = tier.bounds(*queue), shown(dump(NAME)[queue])
    mine = [line for at, line in sorted(lines.items()) if bounds.min <= at < bounds.end]
    return [{name: line[name] for name in line if name != "journal_position"} for line in mine]


def test_messages_are_what_joyqueue_s_readers_returned(tier: Tier):
    count = 0
    for queue in tier.queues():
        lines, found = wanted(tier, queue), list(tier.read(*queue))
        assert [message.to_json() for message in found] == lines
        for message, line in zip(found, lines, strict=True):
            assert isinstance(message, JmqMessage)
            assert message.body == b64decode(line["body_base64"])
            assert message.keys == message.business_id == line["business_id"]
            assert message.properties == (line["attributes"] or {})
            assert (message.app, message.priority) == (line["app"], line["priority"])
            assert (message.term, message.store_timestamp_ms) == (
                line["term"],
                line["store_time_ms"],
            )
            assert message.detached().to_json() == line
        count += len(found)
    assert count > 1000
    with pytest.raises(InvalidError, match="is not RocketMQ"):
        _ = message.born_host


def test_columns_are_what_messages_say(tier: Tier):
    for queue in tier.queues():
        rows = []
        for batch in tier.read_arrow(*queue, batch_bytes=20_000):
            batch.validate(full=True)
            assert batch.schema == jmq_schema()
            rows += batch.to_pylist()
        for row in rows:
            row["attributes"] = dict(row["attributes"]) if row["attributes"] else None
            row["extension_base64"] = base64(row.pop("extension"))
            row["body_base64"] = base64(row.pop("body"))
        assert rows == wanted(tier, queue)
    low = tier.bounds(*queue).min
    (some,) = tier.read_arrow(*queue, low, low + 1, columns=["business_id", "index"])
    assert some.schema.names == ["business_id", "index"]
    assert set(jmq_schema().names) == set(JMQ_COLUMNS)


def test_business_ids_are_keys(tier: Tier):
    keyed = defaultdict(list)
    for queue in tier.queues():
        for line in wanted(tier, queue):
            if line["business_id"]:
                keyed[queue.topic, line["business_id"]].append(line)
    for (topic, key), lines in list(keyed.items())[:: max(1, len(keyed) // 20)]:
        found = [message.to_json() for message in tier.query(topic, key, count=10_000)]
        order = [(line["store_time_ms"], line["index"], line["partition"]) for line in found]
        assert order == sorted(order, reverse=True)
        assert sorted(found, key=str) == sorted(lines, key=str)


def test_an_expression_is_asked_of_attributes(tier: Tier):
    for queue in tier.queues():
        lines = wanted(tier, queue)
        right = [line for line in lines if (line["attributes"] or {}).get("TAGS") == "tag2"]
        assert [m.to_json() for m in tier.read(*queue, sql="TAGS = 'tag2'")] == right
    with pytest.raises(InvalidError, match="have no tags"):
        list(tier.read(*tier.queues()[0], tags="tag2"))
