"""Messages by key, and what ``mqadmin`` asks of topics and groups."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e import harness
from tests.mount.harness import Client, Mounted, mounted, records
from tiered.mount import codes
from tiered.mount.codes import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiered.format.remoting import Command

    Tier = Callable[[str], tuple[Path, str]]

PLACE = {"consumerGroup": "g", "topic": "orders", "queueId": 1}
FOREVER = {"beginTimestamp": 0, "endTimestamp": (1 << 63) - 1}


@pytest.fixture
def served(captured_tier: Tier) -> Iterator[Mounted]:
    with mounted(captured_tier("s01-basic")[1], keeps_offsets=False) as found:
        yield found


@pytest.fixture
def client(served: Mounted) -> Iterator[Client]:
    with served.client() as found:
        yield found


def document(answer: Command) -> Any:
    assert answer.code == Code.SUCCESS, answer
    return json.loads(answer.text())


def by_queue(answer: Command) -> dict[int, Any]:
    """The table whose keys are objects, by queue id."""
    assert answer.code == Code.SUCCESS, answer
    pairs = re.findall(r"(\{[^{}]*\}):(\{[^{}]*\})", answer.text().decode())
    assert pairs
    keys = [json.loads(key) for key, _ in pairs]
    assert {(key["brokerName"], key["topic"]) for key in keys} == {("broker-a", "orders")}
    return {key["queueId"]: json.loads(row) for key, (_, row) in zip(keys, pairs, strict=True)}


@pytest.mark.parametrize("name", ["s01-basic", "s11-lmq-batchcq"])
def test_messages_by_key_and_by_unique_id(captured_tier: Tier, name: str):
    """Of an inner batch the message that has the key, as one of its own."""
    topic = {"s01-basic": "orders", "s11-lmq-batchcq": "grouped"}[name]
    messages = harness.captured(name).messages[topic]
    with mounted(captured_tier(name)[1], keeps_offsets=False) as served, served.client() as client:
        for key in sorted({one["keys"] for one in messages if one["keys"]})[:3]:
            wanted = [one for one in messages if key in (one["keys"] or "").split()]
            answer = client.ask(codes.QUERY_MESSAGE, topic=topic, key=key, maxNum=64, **FOREVER)
            if not wanted:
                assert answer.code == Code.QUERY_NOT_FOUND
                continue
            found = {(r.queue_id, r.queue_offset) for r in records(answer.text())}
            newest = sorted(wanted, key=lambda one: one["store_timestamp_ms"])[-64:]
            if len(wanted) <= 64:
                assert found == {(one["queue_id"], one["queue_offset"]) for one in wanted}
            assert len(found) == len(newest)
            assert int(answer.fields["indexLastUpdateTimestamp"]) > 0
        one = next(one for one in messages[3:] if "UNIQ_KEY" in one["properties"])
        key = one["properties"]["UNIQ_KEY"]
        answer = client.ask(
            codes.QUERY_MESSAGE,
            topic=topic,
            key=key,
            maxNum=32,
            _UNIQUE_KEY_QUERY="true",
            **FOREVER,
        )
        (record,) = records(answer.text())
        assert (record.queue_id, record.queue_offset) == (one["queue_id"], one["queue_offset"])
        assert record.properties["UNIQ_KEY"] == key


def test_times_bound_what_is_found_both_inclusive(client: Client):
    one = next(m for m in harness.captured("s01-basic").messages["orders"] if m["keys"])
    key, time_ms = one["properties"]["UNIQ_KEY"], one["store_timestamp_ms"]
    for begin, end, code in (
        (0, 0, Code.SUCCESS),
        (1, 9, Code.QUERY_NOT_FOUND),
        (-9, -1, Code.QUERY_NOT_FOUND),
    ):
        answer = client.ask(
            codes.QUERY_MESSAGE,
            topic="orders",
            key=key,
            maxNum=5,
            beginTimestamp=time_ms + begin,
            endTimestamp=time_ms + end,
        )
        assert answer.code == code


def test_statistics_of_a_topic(client: Client):
    found = by_queue(client.ask(codes.GET_TOPIC_STATS_INFO, topic="orders"))
    messages = harness.captured("s01-basic").messages["orders"]
    for queue_id, row in found.items():
        mine = [one for one in messages if one["queue_id"] == queue_id]
        assert row == {
            "minOffset": 0,
            "maxOffset": len(mine),
            "lastUpdateTimestamp": mine[-1]["store_timestamp_ms"],
        }
    assert len(found) == 4
    assert client.ask(codes.GET_TOPIC_STATS_INFO, topic="none").code == Code.TOPIC_NOT_EXIST
    assert document(client.ask(codes.GET_TOPIC_CONFIG, topic="orders"))["perm"] == 4


def test_how_far_a_group_is(client: Client):
    client.ask(codes.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
    messages = harness.captured("s01-basic").messages["orders"]
    mine = [one for one in messages if one["queue_id"] == 1]
    for fields in ({}, {"topic": "orders"}):
        found = by_queue(client.ask(codes.GET_CONSUME_STATS, consumerGroup="g", **fields))
        assert found[1] == {
            "brokerOffset": len(mine),
            "consumerOffset": 17,
            "pullOffset": 17,
            "lastTimestamp": mine[16]["store_timestamp_ms"],
        }
        assert (found[0]["consumerOffset"], found[0]["lastTimestamp"]) == (0, 0)
    assert document(client.ask(codes.QUERY_TOPIC_CONSUME_BY_WHO, topic="orders")) == {
        "groupList": ["g"]
    }
    assert document(client.ask(codes.QUERY_TOPICS_BY_CONSUMER, group="g"))["topicList"] == [
        "orders"
    ]


def test_who_consumes(client: Client):
    offline = client.ask(codes.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g")
    assert offline.code == Code.CONSUMER_NOT_ONLINE
    client.heartbeat("c1", "g", "orders")
    found = document(client.ask(codes.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g"))
    assert [one["clientId"] for one in found["connectionSet"]] == ["c1"]
    assert found["subscriptionTable"]["orders"]["subString"] == "*"
    assert found["messageModel"] == "CLUSTERING"
    table = document(client.ask(codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG))["subscriptionGroupTable"]
    assert table["g"]["consumeEnable"]
    assert document(client.ask(codes.GET_SUBSCRIPTIONGROUP_CONFIG, group="g"))["groupName"] == "g"
    unknown = client.ask(codes.GET_SUBSCRIPTIONGROUP_CONFIG, group="h")
    assert unknown.code == Code.SUBSCRIPTION_GROUP_NOT_EXIST
