"""Messages by key, and what ``mqadmin`` asks of topics and groups."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support import captures
from support.mounts import Client, Compacted, Mounted, mounted, records

from fetcher.statuses import GetResult, GetStatus, ScanLimits
from tiered.clock import ManualClock
from tiered.format.remoting import ANSWER, Command, encode
from tiered.model import QueueOffset
from tiered.mount import answers, consumers, protocol
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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
    messages = captures.captured(name).messages[topic]
    with mounted(captured_tier(name)[1], keeps_offsets=False) as served, served.client() as client:
        for key in sorted({one["keys"] for one in messages if one["keys"]})[:3]:
            wanted = [one for one in messages if key in (one["keys"] or "").split()]
            answer = client.ask(protocol.QUERY_MESSAGE, topic=topic, key=key, maxNum=64, **FOREVER)
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
            protocol.QUERY_MESSAGE,
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
    one = next(m for m in captures.captured("s01-basic").messages["orders"] if m["keys"])
    key, time_ms = one["properties"]["UNIQ_KEY"], one["store_timestamp_ms"]
    for begin, end, code in (
        (0, 0, Code.SUCCESS),
        (1, 9, Code.QUERY_NOT_FOUND),
        (-9, -1, Code.QUERY_NOT_FOUND),
    ):
        answer = client.ask(
            protocol.QUERY_MESSAGE,
            topic="orders",
            key=key,
            maxNum=5,
            beginTimestamp=time_ms + begin,
            endTimestamp=time_ms + end,
        )
        assert answer.code == code


def test_by_its_unique_id_a_message_is_found_though_clients_ask_for_the_last_days_only(
    client: Client,
):
    """Java's ``viewMessage`` sets the beginning three days back, whatever the age of what is asked for."""
    one = captures.captured("s01-basic").messages["orders"][7]
    days_ms = 3 * 24 * 3600 * 1000
    for is_by_id, code in (("true", Code.SUCCESS), ("false", Code.QUERY_NOT_FOUND)):
        answer = client.ask(
            protocol.QUERY_MESSAGE,
            topic="orders",
            key=one["properties"]["UNIQ_KEY"],
            maxNum=32,
            beginTimestamp=one["store_timestamp_ms"] + days_ms,
            endTimestamp=2**63 - 1,
            _UNIQUE_KEY_QUERY=is_by_id,
        )
        assert answer.code == code


def test_times_of_many_queues_have_one_deadline_and_what_is_missing_is_said(
    served: Mounted, client: Client, monkeypatch: pytest.MonkeyPatch
):
    """Offsets come from memory and are right; the times of a tier that does not answer are 0 then, and that is said."""
    monkeypatch.setattr(answers, "QUERY_S", 0.0)
    told = client.ask(protocol.GET_TOPIC_STATS_INFO, topic="orders")
    queues = {one["queue_id"] for one in captures.captured("s01-basic").messages["orders"]}
    found = by_queue(told)
    assert {queue_id for queue_id, row in found.items() if row["maxOffset"]} == queues
    assert {row["lastUpdateTimestamp"] for row in found.values()} == {0}
    assert told.remark.startswith(f"times of {len(queues)} messages could not be read")
    client.ask(protocol.UPDATE_CONSUMER_OFFSET, **PLACE, commitOffset=5)
    for code in (protocol.GET_CONSUME_STATS, protocol.GET_BROKER_CONSUME_STATS):
        told = client.ask(code, consumerGroup="g", isOrder="false")
        assert told.code == Code.SUCCESS
        assert told.remark.startswith("times of 1 messages could not be read")
        assert b'"consumerOffset":5' in told.text()


def test_statistics_of_a_topic(client: Client):
    found = by_queue(client.ask(protocol.GET_TOPIC_STATS_INFO, topic="orders"))
    messages = captures.captured("s01-basic").messages["orders"]
    for queue_id, row in found.items():
        mine = [one for one in messages if one["queue_id"] == queue_id]
        assert row == {
            "minOffset": 0,
            "maxOffset": len(mine),
            "lastUpdateTimestamp": mine[-1]["store_timestamp_ms"],
        }
    assert len(found) == 4
    assert client.ask(protocol.GET_TOPIC_STATS_INFO, topic="none").code == Code.TOPIC_NOT_EXIST
    assert document(client.ask(protocol.GET_TOPIC_CONFIG, topic="orders"))["perm"] == 4


def test_how_far_a_group_is(client: Client):
    client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
    messages = captures.captured("s01-basic").messages["orders"]
    mine = [one for one in messages if one["queue_id"] == 1]
    for fields in ({}, {"topic": "orders"}):
        found = by_queue(client.ask(protocol.GET_CONSUME_STATS, consumerGroup="g", **fields))
        assert found[1] == {
            "brokerOffset": len(mine),
            "consumerOffset": 17,
            "pullOffset": 17,
            "lastTimestamp": mine[16]["store_timestamp_ms"],
        }
        assert (found[0]["consumerOffset"], found[0]["lastTimestamp"]) == (0, 0)
    assert document(client.ask(protocol.QUERY_TOPIC_CONSUME_BY_WHO, topic="orders")) == {
        "groupList": ["g"]
    }
    assert document(client.ask(protocol.QUERY_TOPICS_BY_CONSUMER, group="g"))["topicList"] == [
        "orders"
    ]


def test_a_group_that_is_behind_in_its_retry_topic_is_told_to_be(
    captured_tier: Callable[[str], tuple[Path, str]],
):
    """As a broker tells it: who looks whether all has been consumed would miss what is to be tried again."""
    _, url = captured_tier("s10-consumers")
    retries = "%RETRY%failing"
    known = {("failing", retries): {0: 70}, ("failing", "work"): {0: 33}}
    with (
        mounted(url, keeps_offsets=False, known_offsets=known) as served,
        served.client() as client,
    ):
        group = {"consumerGroup": "failing"}
        for code in (protocol.GET_CONSUME_STATS, protocol.GET_BROKER_CONSUME_STATS):
            told = client.ask(code, isOrder="false", **group).text()
            (row,) = re.findall(rb'"topic":"%RETRY%failing"}:({[^}]*})', told)
            assert json.loads(row)["brokerOffset"] - json.loads(row)["consumerOffset"] == 2
        topics = document(client.ask(protocol.QUERY_TOPICS_BY_CONSUMER, group="failing"))
        assert topics["topicList"] == [retries, "work"]


def test_who_consumes(client: Client):
    offline = client.ask(protocol.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g")
    assert offline.code == Code.CONSUMER_NOT_ONLINE
    client.heartbeat("c1", "g", "orders")
    found = document(client.ask(protocol.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g"))
    assert [one["clientId"] for one in found["connectionSet"]] == ["c1"]
    assert found["subscriptionTable"]["orders"]["subString"] == "*"
    assert found["messageModel"] == "CLUSTERING"
    table = document(client.ask(protocol.GET_ALL_SUBSCRIPTIONGROUP_CONFIG))[
        "subscriptionGroupTable"
    ]
    assert table["g"]["consumeEnable"]
    assert (
        document(client.ask(protocol.GET_SUBSCRIPTIONGROUP_CONFIG, group="g"))["groupName"] == "g"
    )
    unknown = client.ask(protocol.GET_SUBSCRIPTIONGROUP_CONFIG, group="h")
    # As at a broker that makes the groups which it is asked for: a proxy of 5.x asks before its clients consume.
    assert document(unknown)["consumeEnable"]


# -- by place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["s01-basic", "s11-lmq-batchcq", "s09-big-offsets"])
def test_messages_by_their_place_in_the_brokers_log(captured_tier: Tier, name: str):
    """As offset ids name them; with the topic, as clients of 5.x say it, and without."""
    captured = captures.captured(name).messages
    with mounted(captured_tier(name)[1], keeps_offsets=False) as served, served.client() as client:
        for topic, messages in captured.items():
            for one in messages[:: max(1, len(messages) // 4)]:
                place = one["physical_offset"]
                for said in ({"topic": topic}, {}):
                    answer = client.ask(protocol.VIEW_MESSAGE_BY_ID, offset=place, **said)
                    (record,) = records(answer.text())
                    assert (record.physical_offset, record.queue_id) == (place, one["queue_id"])
                    assert record.topic == topic
        beside = client.ask(protocol.VIEW_MESSAGE_BY_ID, offset=messages[0]["physical_offset"] + 1)
        assert beside.code == Code.SYSTEM_ERROR
        assert "can not find message by the offset" in beside.remark


@pytest.fixture(params=[ScanLimits(), ScanLimits(scan_items_max=50, scan_holes_max=100)])
def sparse(compacted: Compacted, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A topic that was compacted, also where one read passes over few of its holes."""
    with mounted(compacted.url, keeps_offsets=False) as found:
        store = found.mount.store
        store.settings = replace(store.settings, scan=request.param)
        yield found


def test_messages_behind_a_compacted_range_are_found_by_their_place(
    compacted: Compacted, sparse: Mounted
):
    """No number of holes may be taken for the end of a queue."""
    with sparse.client() as client:
        for queue_offset, place in compacted.places.items():
            answer = client.ask(protocol.VIEW_MESSAGE_BY_ID, offset=place, topic="prices")
            assert [record.queue_offset for record in records(answer.text())] == [queue_offset]
        beside = client.ask(protocol.VIEW_MESSAGE_BY_ID, offset=compacted.places[3000] + 1)
        assert "can not find message by the offset" in beside.remark


def test_within_a_compacted_range_the_next_message_is_told(compacted: Compacted, sparse: Mounted):
    with sparse.client() as client:
        asked = {"topic": "prices", "queueId": 0, "index": 100, "count": 1}
        (row,) = document(client.ask(protocol.QUERY_CONSUME_QUEUE, **asked))["queueData"]
        assert row["physicOffset"] == compacted.places[3000]
        place = {"consumerGroup": "g", "topic": "prices", "queueId": 0}
        client.ask(protocol.UPDATE_CONSUMER_OFFSET, **place, commitOffset=1500)
        told = client.ask(protocol.GET_CONSUME_STATS, consumerGroup="g", topic="prices")
        (time_ms,) = re.findall(rb'"lastTimestamp":(\d+)', told.text())
        assert int(time_ms) > 0
        assert not told.remark


@pytest.mark.parametrize(
    ("end", "seconds", "status", "next_begin"),
    [
        (None, 10.0, GetStatus.NO_MATCHED_MESSAGE, 35),
        (15, 10.0, GetStatus.NO_MATCHED_MESSAGE, 20),
        (None, 1.0, GetStatus.TRY_AGAIN, 30),
    ],
)
def test_holes_are_gone_through_to_the_end_and_never_told_for_it_when_the_time_is_over(
    end: int | None, seconds: float, status: GetStatus, next_begin: int
):
    clock = ManualClock()

    def read(start: int, *, timeout_s: float) -> GetResult:
        assert timeout_s <= seconds
        clock.advance(0.5)
        behind = QueueOffset(min(start + 10, 35))
        return GetResult(GetStatus.NO_MATCHED_MESSAGE, behind, QueueOffset(0), QueueOffset(35))

    found = answers.first_message(read, 0, end, clock, clock.monotonic_s() + seconds)
    assert (found.status, found.next_begin) == (status, next_begin)
    assert (found.error is None) == (status is not GetStatus.TRY_AGAIN)


def test_items_of_a_queue(client: Client):
    mine = [m for m in captures.captured("s01-basic").messages["orders"] if m["queue_id"] == 1]
    asked = {"topic": "orders", "queueId": 1, "index": 5, "count": 3}
    found = document(client.ask(protocol.QUERY_CONSUME_QUEUE, **asked))
    assert found["queueData"] == [
        {
            "physicOffset": one["physical_offset"],
            "physicSize": one["size"],
            "tagsCode": one["tag_hash"],
        }
        for one in mine[5:8]
    ]
    assert (found["minQueueIndex"], found["maxQueueIndex"]) == (0, len(mine))
    behind = document(client.ask(protocol.QUERY_CONSUME_QUEUE, **{**asked, "index": len(mine)}))
    assert behind["queueData"] == []
    refused = client.ask(protocol.QUERY_CONSUME_QUEUE, **{**asked, "queueId": 99})
    assert refused.code == Code.INVALID_PARAMETER


# -- groups that are put elsewhere ----------------------------------------------------------------

RESET = {"group": "g", "topic": "orders"}


def test_a_group_is_put_to_a_time_and_who_consumes_is_told_with_its_next_pull(client: Client):
    mine = [m for m in captures.captured("s01-basic").messages["orders"] if m["queue_id"] == 1]
    unknown = client.ask(protocol.RESET_CONSUMER_OFFSET, timestamp=0, **RESET)
    assert unknown.code == Code.SUBSCRIPTION_GROUP_NOT_EXIST
    client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
    time_ms = mine[9]["store_timestamp_ms"]
    found = by_queue_of_numbers(
        client.ask(protocol.RESET_CONSUMER_OFFSET, timestamp=time_ms, **RESET)
    )
    first = next(n for n, one in enumerate(mine) if one["store_timestamp_ms"] >= time_ms)
    assert found[1] == first
    assert len(found) == 4
    assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields == {"offset": str(first)}
    # what a consumer says that does not know it yet does not count
    client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=40, **PLACE)
    # nor would it if the mount ended now, or its consumer
    assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields == {"offset": str(first)}
    told = client.pull("orders", 1, 40, sysFlag=4 | 1, commitOffset=41)
    assert (told.code, told.remark) == (Code.PULL_OFFSET_MOVED, "OFFSET_RESET")
    assert told.fields["nextBeginOffset"] == str(first)
    assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields == {"offset": str(first)}
    assert client.pull("orders", 1, first).code == Code.SUCCESS
    assert client.pull("orders", 1, 40, consumerGroup="other").code == Code.SUCCESS
    client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=first + 1, **PLACE)
    assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **PLACE).fields == {"offset": str(first + 1)}


def test_a_group_is_put_to_the_end_or_in_one_queue_to_an_offset(client: Client):
    client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **PLACE)
    end = int(client.ask(protocol.GET_MAX_OFFSET, topic="orders", queueId=1).fields["offset"])
    at_end = by_queue_of_numbers(client.ask(protocol.RESET_CONSUMER_OFFSET, timestamp=-1, **RESET))
    assert at_end[1] == end
    one = by_queue_of_numbers(
        client.ask(protocol.RESET_CONSUMER_OFFSET, timestamp=0, queueId=1, offset=3, **RESET)
    )
    assert one == {1: 3}
    beyond = client.ask(
        protocol.RESET_CONSUMER_OFFSET, timestamp=0, queueId=1, offset=end + 1, **RESET
    )
    assert beyond.code == Code.SYSTEM_ERROR


def by_queue_of_numbers(answer: Command) -> dict[int, int]:
    assert answer.code == Code.SUCCESS, answer
    pairs = re.findall(r"(\{[^{}]*\}):(-?\d+)", answer.text().decode())
    return {json.loads(key)["queueId"]: int(value) for key, value in pairs}


# -- what a client is asked -----------------------------------------------------------------------


def answering(
    client: Client, code: int, body: bytes, seen: list[Command], *, answer_code: int = 0
) -> threading.Thread:
    """A consumer's thread that answers the next question of a kind."""

    def run() -> None:
        while (asked := client.receive()).code != code or asked.is_answer:
            pass
        seen.append(asked)
        answer = Command(answer_code, asked.opaque, ANSWER, body=(body,))
        client.socket.sendall(b"".join(encode(answer)))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_questions_to_a_consumer_are_passed_on_to_it(client: Client, served: Mounted):
    asked = {"consumerGroup": "g", "clientId": "c1"}
    offline = client.ask(protocol.GET_CONSUMER_RUNNING_INFO, **asked)
    assert "not online" in offline.remark
    seen: list[Command] = []
    with served.client() as consumer:
        consumer.socket.settimeout(10)
        consumer.heartbeat("c1", "g", "orders")
        thread = answering(consumer, protocol.GET_CONSUMER_RUNNING_INFO, b'{"properties":{}}', seen)
        told = client.ask(protocol.GET_CONSUMER_RUNNING_INFO, jstackEnable="true", **asked)
        assert told.text() == b'{"properties":{}}'
        thread.join()
        assert seen[0].fields == {**asked, "jstackEnable": "true", "brokerName": "broker-a"}

        one = captures.captured("s01-basic").messages["orders"][7]
        thread = answering(consumer, protocol.CONSUME_MESSAGE_DIRECTLY, b"{}", seen)
        said = {**asked, "msgId": one["offset_msg_id"], "topic": "orders"}
        assert client.ask(protocol.CONSUME_MESSAGE_DIRECTLY, **said).text() == b"{}"
        thread.join()
        (record,) = records(seen[1].text())
        assert record.queue_offset == one["queue_offset"]

        table = b'{"messageQueueTable":{{"brokerName":"broker-a","queueId":1,"topic":"orders"}:5}}'
        thread = answering(consumer, protocol.CONSUMER_STATUS_OF_CLIENT, table, seen)
        told = client.ask(protocol.GET_CONSUMER_STATUS, group="g", topic="orders")
        thread.join()
        assert told.text() == (
            b'{"consumerTable":{"c1":{{"brokerName":"broker-a","queueId":1,"topic":"orders"}:5}}}'
        )


def test_answers_of_consumers_with_codes_of_their_own_are_counted_together(
    client: Client, served: Mounted
):
    """Any number there is may come from a client: it must neither end the metrics nor make a series of its own."""
    with served.client() as consumer:
        consumer.socket.settimeout(10)
        consumer.heartbeat("c1", "g", "orders")
        code = protocol.GET_CONSUMER_RUNNING_INFO
        for answer_code in (999, -7):
            thread = answering(consumer, code, b"", [], answer_code=answer_code)
            assert client.ask(code, consumerGroup="g", clientId="c1").code == answer_code
            thread.join()
    # An answer is counted once it is sent, and that is before the next one is.
    client.ask(protocol.GET_TOPIC_STATS_INFO, topic="orders")
    found = {
        sample.labels["code"]: sample.value
        for sample in served.mount.samples()
        if sample.name == "tiered_mount_answers_total"
    }
    assert found["other"] == 2
    assert set(found) <= {"other", *Code.__members__}


def test_a_consumer_that_goes_or_says_nothing_is_told_to_who_asked(
    client: Client, served: Mounted, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(consumers, "ANSWER_S", 0.1)
    asked = {"consumerGroup": "g", "clientId": "c1"}
    with served.client() as consumer:
        consumer.heartbeat("c1", "g", "orders")
        silent = client.ask(protocol.GET_CONSUMER_RUNNING_INFO, **asked)
        assert silent.code == Code.CONSUME_MSG_TIMEOUT
        monkeypatch.setattr(consumers, "ANSWER_S", 60.0)
        opaque = client.send(protocol.GET_CONSUMER_RUNNING_INFO, **asked)
        for _ in range(2):  # the first is that nobody answered
            while consumer.receive().code != protocol.GET_CONSUMER_RUNNING_INFO:
                pass
    assert "cannot be asked" in client.answer(opaque).remark
