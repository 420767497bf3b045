"""A mount of captured stores, asked over a socket: all that a client reads, and what it is told where there is nothing."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from support import captures, command_line
from support.mounts import Client, Mounted, mounted, records
from support.oracle import free_ports

from tiered.errors import InvalidError
from tiered.format.remoting import Command, Form
from tiered.model import MessageQueue
from tiered.mount import protocol
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Tier = Callable[[str], tuple[Path, str]]

NAMES = ("s01-basic", "s04-batch-compress", "s06-expired", "s09-big-offsets", "s11-lmq-batchcq")


@pytest.fixture(scope="module")
def served(captured_tier: Tier) -> Iterator[Mounted]:
    with mounted(captured_tier("s01-basic")[1], keeps_offsets=False) as found:
        yield found


@pytest.fixture
def client(served: Mounted) -> Iterator[Client]:
    with served.client() as found:
        yield found


def by_queue(name: str) -> dict[MessageQueue, list[dict[str, Any]]]:
    """What Java found."""
    found: dict[MessageQueue, list[dict[str, Any]]] = defaultdict(list)
    for messages in captures.captured(name).messages.values():
        for message in messages:
            found[MessageQueue(message["topic"], message["queue_id"])].append(message)
    return found


def pull_all(client: Client, queue: MessageQueue, start: int, **fields: object) -> bytes:
    """All records of a queue, as the answers bring them."""
    found, at = b"", start
    while True:
        answer = client.pull(queue.topic, queue.queue_id, at, **fields)
        if answer.code == Code.PULL_NOT_FOUND:
            assert int(answer.fields["nextBeginOffset"]) == at == int(answer.fields["maxOffset"])
            return found
        assert answer.code in {Code.SUCCESS, Code.PULL_RETRY_IMMEDIATELY}, answer
        assert (answer.code == Code.SUCCESS) == bool(answer.body)
        assert int(answer.fields["nextBeginOffset"]) > at
        at = int(answer.fields["nextBeginOffset"])
        found += answer.text()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", list(Form))
def test_every_record_comes_as_it_is_stored(captured_tier: Tier, name: str, form: Form):
    store, url = captured_tier(name)
    log = captures.LocalLog(store)
    with mounted(url, keeps_offsets=False) as served, served.client(form) as client:
        for queue, messages in by_queue(name).items():
            first, last = messages[0]["queue_offset"], messages[-1]["queue_offset"]
            place = {"topic": queue.topic, "queueId": queue.queue_id}
            assert client.ask(protocol.GET_MIN_OFFSET, **place).fields == {"offset": str(first)}
            assert client.ask(protocol.GET_MAX_OFFSET, **place).fields == {"offset": str(last + 1)}
            assert pull_all(client, queue, first) == log.records(messages)


def test_inner_batches_come_whole_and_once(captured_tier: Tier):
    """Whatever count is asked for: a client unpacks a record that it is given, all of it."""
    store, url = captured_tier("s11-lmq-batchcq")
    log = captures.LocalLog(store)
    queues = {
        queue: rows
        for queue, rows in by_queue("s11-lmq-batchcq").items()
        if queue.topic == "grouped"
    }
    assert queues
    with mounted(url, keeps_offsets=False) as served, served.client() as client:
        for queue, messages in queues.items():
            for count in (1, 7, 10, 13):
                found = pull_all(client, queue, messages[0]["queue_offset"], maxMsgNums=count)
                assert found == log.records(messages)


def test_a_lite_pull_is_a_pull(client: Client):
    asked = {
        "consumerGroup": "g",
        "topic": "orders",
        "queueId": 0,
        "queueOffset": 0,
        "maxMsgNums": 9,
    }
    fields = {**asked, "sysFlag": 4 | 16, "subscription": "*", "subVersion": 0, "commitOffset": 0}
    answer = client.ask(protocol.LITE_PULL_MESSAGE, **fields)
    assert answer.text() == client.pull("orders", 0, 0, maxMsgNums=9).text()
    assert len(records(answer.text())) == 9


def test_a_count_and_a_size_are_kept_to(client: Client):
    assert len(records(client.pull("orders", 0, 5, maxMsgNums=3).text())) == 3
    answer = client.pull("orders", 0, 5, maxMsgBytes=1)
    assert [record.queue_offset for record in records(answer.text())] == [5]
    assert answer.fields["nextBeginOffset"] == "6"
    assert answer.fields["suggestWhichBrokerId"] == "0"
    assert answer.remark == "FOUND"


@pytest.mark.parametrize(
    ("kind", "expression"),
    [("TAG", "created||paid"), ("SQL92", "TAGS = 'created' OR TAGS = 'paid'")],
)
def test_filters(client: Client, kind: str, expression: str):
    queue = MessageQueue("orders", 0)
    wanted = [
        message["queue_offset"]
        for message in by_queue("s01-basic")[queue]
        if message["tags"] in {"created", "paid"}
    ]
    assert wanted
    found = pull_all(client, queue, 0, subscription=expression, expressionType=kind)
    assert [record.queue_offset for record in records(found)] == wanted


@pytest.mark.parametrize(("kind", "expression"), [("SQL92", "a >"), ("TAG", "||"), ("CEL", "a")])
def test_a_filter_that_is_none_is_refused(client: Client, kind: str, expression: str):
    answer = client.pull("orders", 0, 0, subscription=expression, expressionType=kind)
    assert answer.code == Code.SUBSCRIPTION_PARSE_FAILED
    said = {"clientId": "c", "group": "g"}
    said["subscriptionData"] = {"topic": "orders", "subString": expression, "expressionType": kind}  # type: ignore[assignment]
    assert client.ask(protocol.CHECK_CLIENT_CONFIG, said).code == Code.SUBSCRIPTION_PARSE_FAILED


def test_the_subscription_of_the_heartbeat_counts_where_none_comes_along(client: Client):
    without = {"sysFlag": 0, "subVersion": 1}
    assert client.pull("orders", 0, 0, **without).code == Code.SUBSCRIPTION_NOT_EXIST
    client.heartbeat("c", "g", "orders", subString="paid")
    found = records(client.pull("orders", 0, 0, **without).text())
    assert {record.properties["TAGS"] for record in found} == {"paid"}
    assert client.pull("orders", 0, 0, sysFlag=0, subVersion=2).code == Code.SUBSCRIPTION_NOT_LATEST
    assert client.pull("events", 0, 0, **without).code == Code.SUBSCRIPTION_NOT_EXIST


@pytest.mark.parametrize(
    ("place", "offset", "code", "next_begin"),
    [
        (("orders", 0), 10_000, Code.PULL_OFFSET_MOVED, "max"),
        (("orders", 0), -1, Code.PULL_OFFSET_MOVED, "0"),
        (("broker-a", 0), 0, Code.PULL_NOT_FOUND, "0"),
        (("broker-a", 0), 5, Code.PULL_OFFSET_MOVED, "0"),
        (("orders", 99), 0, Code.INVALID_PARAMETER, None),
        (("orders", -1), 0, Code.INVALID_PARAMETER, None),
        (("nothing", 0), 0, Code.TOPIC_NOT_EXIST, None),
    ],
)
def test_offsets_that_are_none(
    client: Client, place: tuple[str, int], offset: int, code: Code, next_begin: str | None
):
    answer = client.pull(*place, offset)
    assert answer.code == code
    if next_begin == "max":
        next_begin = answer.fields["maxOffset"]
    assert answer.fields.get("nextBeginOffset") == next_begin


def test_a_queue_below_its_minimum_is_moved_to_it(captured_tier: Tier):
    url = captured_tier("s06-expired")[1]
    with mounted(url, keeps_offsets=False) as served, served.client() as client:
        answer = client.pull("long-lived", 0, 0)
    assert answer.code == Code.PULL_OFFSET_MOVED
    assert answer.fields["nextBeginOffset"] == answer.fields["minOffset"] in {"465", "466"}


def test_offsets_by_time(client: Client):
    messages = by_queue("s01-basic")[MessageQueue("orders", 0)]
    times = [message["store_timestamp_ms"] for message in messages]
    place = {"topic": "orders", "queueId": 0}
    for time_ms in (times[0] - 1, times[100], times[-1] + 1):
        later = [m["queue_offset"] for m in messages if m["store_timestamp_ms"] >= time_ms]
        found = client.ask(protocol.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=time_ms, **place)
        assert found.fields["offset"] == str(later[0] if later else len(messages))
        early = [m["queue_offset"] for m in messages if m["store_timestamp_ms"] <= time_ms]
        found = client.ask(
            protocol.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=time_ms, boundaryType="upper", **place
        )
        assert found.fields["offset"] == str(early[-1] if early else 0)
    first = client.ask(protocol.GET_EARLIEST_MSG_STORETIME, **place)
    assert first.fields == {"timestamp": str(times[0])}


def test_a_queue_without_messages_is_empty(client: Client):
    place = {"topic": "broker-a", "queueId": 0}
    for code in (protocol.GET_MIN_OFFSET, protocol.GET_MAX_OFFSET):
        assert client.ask(code, **place).fields == {"offset": "0"}
    assert client.ask(protocol.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=5, **place).fields == {
        "offset": "0"
    }
    assert client.ask(protocol.GET_EARLIEST_MSG_STORETIME, **place).fields == {"timestamp": "-1"}


# -- what is no reading ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", [r.code for r in protocol.REQUESTS if r.answer is protocol.Treatment.REFUSED]
)
@pytest.mark.parametrize("form", list(Form))
def test_what_writes_is_refused_so_that_producers_go_elsewhere(
    served: Mounted, code: int, form: Form
):
    with served.client(form) as client:
        answer = client.ask(code, b"x" * 1000, a="g", b="orders")
    assert (answer.code, answer.form) == (Code.NO_PERMISSION, form)
    assert "read-only" in answer.remark


@pytest.mark.parametrize("code", [370, 999, -5, 204])
def test_what_is_not_known_is_told(client: Client, code: int):
    assert client.ask(code).code == Code.REQUEST_CODE_NOT_SUPPORTED


def test_the_table_says_what_is_served(served: Mounted):
    assert served.mount.server is not None
    told = {
        request.code for request in protocol.REQUESTS if request.answer is protocol.Treatment.SERVED
    }
    handled = set(served.mount.server.handlers)
    assert told <= handled
    # Of others only some are refused, and the table says which are not.
    assert all(protocol.BY_CODE[code].note for code in handled - told)
    assert len(protocol.BY_CODE) == len(protocol.REQUESTS)


@pytest.mark.parametrize(
    "fields",
    [{}, {"topic": "orders"}, {"topic": "orders", "queueId": "x"}, {"topic": "", "queueId": 0},
     {"topic": "t" * 300, "queueId": 0}, {"topic": "orders", "queueId": 1 << 64},
     {"topic": "orders", "queueId": "9" * 10_000}],
)  # fmt: skip
def test_requests_that_lack_something_are_answered(client: Client, fields: dict[str, object]):
    answer = client.ask(protocol.GET_MAX_OFFSET, **fields)
    assert answer.code in {Code.SYSTEM_ERROR, Code.INVALID_PARAMETER}
    assert answer.remark


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"clientID":5}', b'{"clientID":""}', b'{"clientID":%b}' % (b"5" * 5000)],
    ids=range(6),
)
def test_bodies_that_are_none_are_answered(client: Client, body: bytes):
    for code in (protocol.HEART_BEAT, protocol.LOCK_BATCH_MQ):
        answer = client.ask(code, body)
        assert answer.code in {Code.SYSTEM_ERROR, Code.INVALID_PARAMETER}
        assert "a defect of the mount" not in answer.remark


def document(answer: Command) -> Any:
    assert answer.code == Code.SUCCESS
    return json.loads(answer.text())


def test_names_as_a_name_server_tells_them(client: Client, served: Mounted):
    route = document(client.ask(protocol.GET_ROUTEINFO_BY_TOPIC, topic="orders"))
    assert route["queueDatas"] == [
        {"brokerName": "broker-a", "readQueueNums": 4, "writeQueueNums": 4, "perm": 4, "topicSysFlag": 0}
    ]  # fmt: skip
    assert route["brokerDatas"][0]["brokerAddrs"] == {"0": served.mount.address}
    assert client.ask(protocol.GET_ROUTEINFO_BY_TOPIC, topic="nothing").code == Code.TOPIC_NOT_EXIST
    cluster = document(client.ask(protocol.GET_BROKER_CLUSTER_INFO))
    assert cluster["clusterAddrTable"] == {"cluster-a": ["broker-a"]}
    named = {"cluster-a", "broker-a"}
    everything = document(client.ask(protocol.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))["topicList"]
    assert {"orders", "events", "sparse"} <= set(everything)
    assert document(client.ask(protocol.GET_TOPICS_BY_CLUSTER, cluster="cluster-a")) == {
        "topicList": everything,
        "brokerAddr": None,
    }
    others = client.ask(protocol.GET_TOPICS_BY_CLUSTER, cluster="other")
    assert document(others)["topicList"] == []
    system = document(client.ask(protocol.GET_SYSTEM_TOPIC_LIST_FROM_NS))
    assert (set(system["topicList"]), system["brokerAddr"]) == (named, served.mount.address)
    assert document(client.ask(protocol.GET_SYSTEM_TOPIC_LIST_FROM_BROKER))["topicList"] == []


def test_what_the_broker_says_of_itself(client: Client, served: Mounted):
    configs = document(client.ask(protocol.GET_ALL_TOPIC_CONFIG))["topicConfigTable"]
    assert {"orders", "events", "broker-a", "cluster-a"} <= set(configs)
    assert {config["perm"] for config in configs.values()} == {4}
    assert configs["sparse"]["readQueueNums"] == 5
    config = client.ask(protocol.GET_BROKER_CONFIG).text().decode().splitlines()
    assert "brokerName=broker-a" in config
    table = document(client.ask(protocol.GET_BROKER_RUNTIME_INFO))["table"]
    assert table["brokerActive"] == "true"
    for spelling in ("getTransferredTps", "getTransferedTps"):  # since 5.0, and before
        assert len(table[spelling].split()) == 3
    assert all(isinstance(value, str) for value in table.values())


def test_the_port_two_below_is_served_as_well_unless_that_is_not_wanted(captured_tier: Tier):
    """The VIP channel, at which clients of 4.x ask for offsets and the like."""
    port, url = next(free_ports()), captured_tier("s01-basic")[1]
    listen = ("127.0.0.1", port)
    with mounted(url, keeps_offsets=False, listen=listen) as served:
        assert served.mount.address == f"127.0.0.1:{port}"
        for at in (port, port - 2):
            with Client(f"127.0.0.1:{at}") as client:
                answer = client.ask(protocol.GET_MIN_OFFSET, topic="orders", queueId=0)
                assert answer.fields == {"offset": "0"}
        other = (
            "127.0.0.1",
            port + 2,
        )  # whose own second port would be ours: told, and nobody's clients are mixed up
        with (
            pytest.raises(InvalidError, match="cannot listen at"),
            mounted(url, keeps_offsets=False, listen=other),
        ):
            pass
    with (
        mounted(url, keeps_offsets=False, listen=listen, has_vip=False),
        pytest.raises(ConnectionRefusedError),
    ):
        Client(f"127.0.0.1:{port - 2}")


def test_a_thousand_queues_are_served_after_twenty_requests(tmp_path: Path):
    """Whatever the number of queues. The first mount of a name makes twelve more, once, to see what the store can do."""
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    sizes = ("--messages", "2000", "--body", "64", "--queues", "1000")
    command_line.here("bench", "make-store", store, *sizes).good()
    command_line.here("attach", store, "--to", url, "--once", "--no-index").good()
    for requests_max in (32, 20):
        with mounted(url, refresh_s=60.0) as served, served.client() as client:
            requests = served.mount.store.opened.meter.snapshot().requests
            assert client.pull("bench-0", 999, 0).code == Code.SUCCESS
            assert requests <= requests_max
