"""Clients and name servers of RocketMQ 4.9 and 5.5 at a mount: consumers of each kind, several, and beside brokers."""

from __future__ import annotations

import json
import signal
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from support import captures, command_line, oracle
from support.mounts import Client, MountProcess, tier_of
from support.oracle import Consumer, admin
from support.waiting import until

from tiered.format.fastjson import loads
from tiered.mount import protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.java, oracle.needs_java, pytest.mark.timeout(900)]
Message = dict[str, Any]
OF_THE_DUMP = {"stored_sys_flag", "size", "physical_offset", "tag_hash"}
OF_THE_CLIENT = {"broker_name", "consumed"}
VIP = "-Dcom.rocketmq.sendMessageWithVIPChannel=true"


@pytest.fixture(scope="module", params=["4.9", pytest.param("5.5", marks=pytest.mark.slow)])
def name_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Of either generation."""
    port = str(next(oracle.free_ports()))
    log = tmp_path_factory.mktemp("names") / "namesrv.log"
    words = ("client-4.9", "namesrv") if request.param == "4.9" else ("namesrv",)
    server = oracle.Server(log, *words, "--port", port)
    server.wait_ready()
    yield f"127.0.0.1:{port}"
    server.end(signal.SIGKILL)


def expected(name: str, topic: str) -> list[Message]:
    """What Java's own store gave of a topic."""
    return [
        {key: value for key, value in one.items() if key not in OF_THE_DUMP}
        for one in captures.captured(name).messages[topic]
    ]


def place(message: Message) -> tuple[int, int]:
    return message["queue_id"], message["queue_offset"]


def plain(found: list[Message]) -> list[Message]:
    """As the dump has it; this client leaves out what is null."""
    return sorted(
        (
            {key: value for key, value in {"tags": None, "keys": None, **one}.items() if key not in OF_THE_CLIENT}
            for one in found
        ),
        key=place,
    )  # fmt: skip


def consume(version: str, folder: Path, command: str, *words: str, java: str = "") -> list[Message]:
    with Consumer(version, folder / "consumed", command, *words, java=java) as consumer:
        return consumer.end()


def at(name_server: str) -> tuple[str, ...]:
    return "--listen", "127.0.0.1:0", "--namesrv", name_server, "--refresh", "1"


ALL = ("--group", "g", "--max", "1200", "--seconds", "200")  # ends with the last message


def test_a_client_of_4_9_gets_each_message(name_server: str, tmp_path: Path):
    """Of name servers of both generations; over the VIP channel what it asks there."""
    _, url = tier_of("s01-basic", tmp_path)
    port = next(oracle.free_ports())
    listen = ("--listen", f"127.0.0.1:{port}", "--namesrv", name_server, "--refresh", "1")
    words = ("--namesrv", name_server, "--topic", "orders", *ALL)
    with MountProcess(url, tmp_path / "log", *listen):
        found = consume("4.9", tmp_path, "push", *words, java=VIP)
    assert plain(found) == expected("s01-basic", "orders")


KINDS = {
    "clustering": ("push",),
    "orderly": ("push", "--orderly"),
    "broadcasting": ("push", "--model", "broadcasting"),
    "lite-pull": ("lite-pull",),
    "lite-pull, assigned": ("lite-pull", "--assign"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", ["4.9", "5.5"])
def test_each_kind_of_consumer_gets_each_message(
    version: str, kind: str, name_server: str, tmp_path: Path
):
    _, url = tier_of("s01-basic", tmp_path)
    command, *more = KINDS[kind]
    words = ("--namesrv", name_server, "--topic", "orders", *ALL, *more)
    with MountProcess(url, tmp_path / "log", *at(name_server)):
        found = consume(version, tmp_path, command, *words)
    assert plain(found) == expected("s01-basic", "orders")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["s06-expired", "s09-big-offsets"])  # (s04 has LZ4: not for 4.9)
def test_a_client_of_4_9_gets_what_java_read_from_the_store(
    name: str, name_server: str, tmp_path: Path
):
    _, url = tier_of(name, tmp_path)
    with MountProcess(url, tmp_path / "log", *at(name_server)):
        for topic in captures.captured(name).messages:
            if len(topic) > 127:  # of records of version 2, which clients before 5.1 cannot read
                continue
            wanted = expected(name, topic)
            words = ("--namesrv", name_server, "--topic", topic, "--assign", "--seconds", "200")
            found = consume("4.9", tmp_path, "lite-pull", *words, "--max", str(len(wanted)))
            assert plain(found) == wanted, topic


@pytest.mark.slow
def test_a_consumer_that_leaves_rebalancing_to_brokers_is_told_to_pull(
    name_server: str, tmp_path: Path
):
    """So would pop what it consumes: brokers of 5.x tell it how."""
    _, url = tier_of("s01-basic", tmp_path)
    words = ("--namesrv", name_server, "--topic", "orders", *ALL, "--broker-rebalance")
    with MountProcess(url, tmp_path / "log", *at(name_server)):
        found = consume("5.5", tmp_path, "push", *words)
    assert plain(found) == expected("s01-basic", "orders")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.9", "5.5"])
def test_a_message_by_its_offset_id_where_the_mount_has_the_brokers_address(
    version: str, name_server: str, tmp_path: Path
):
    """Clients dial the address in the id. Those of 4.9 do not say of which topic it is."""
    _, url = tier_of("s01-basic", tmp_path)
    port = next(oracle.free_ports())
    wanted = expected("s01-basic", "orders")[7::400]
    ids = [f"7F000001{port:08X}{one['offset_msg_id'][-16:]}" for one in wanted]
    listen = ("--listen", f"127.0.0.1:{port}", "--namesrv", name_server)
    words = ("--namesrv", name_server, "--topic", "orders", "--msgid", *ids)
    with MountProcess(url, tmp_path / "log", *listen):
        found = consume(version, tmp_path, "view", *words, java=VIP)
    names = ("queue_id", "queue_offset", "body_base64", "offset_msg_id")
    assert [[one[name] for name in names] for one in found] == [
        [one[name] for name in names] for one in wanted
    ]


def held_queues(client: Client, group: str) -> dict[str, set[int]]:
    """Which queues of orders each consumer of a group has, as it says itself; the mount passes the question on."""
    told = client.ask(protocol.GET_CONSUMER_LIST_BY_GROUP, consumerGroup=group)
    found: dict[str, set[int]] = {}
    for name in json.loads(told.text())["consumerIdList"] if not told.code else ():
        asked = {"consumerGroup": group, "clientId": name, "jstackEnable": "false"}
        answer = client.ask(protocol.GET_CONSUMER_RUNNING_INFO, **asked)
        if not answer.code:
            queues = map(json.loads, loads(answer.text())["mqTable"])
            found[name] = {one["queueId"] for one in queues if one["topic"] == "orders"}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.9", "5.5"])
def test_two_consumers_of_a_group_share_the_queues_and_one_takes_them_all_when_the_other_dies(
    version: str, name_server: str, tmp_path: Path
):
    _, url = tier_of("s01-basic", tmp_path)
    words = (
        "push",
        "--namesrv",
        name_server,
        "--topic",
        "orders",
        "--group",
        "g",
        "--seconds",
        "300",
    )
    with MountProcess(url, tmp_path / "log", *at(name_server)) as mount, ExitStack() as held:
        client = held.enter_context(Client(mount.address))

        def shares() -> list[int]:
            found = held_queues(client, "g")
            assert sum(map(len, found.values())) <= 4 or len(found) > 1
            return sorted(map(len, found.values()))

        one = held.enter_context(Consumer(version, tmp_path / "one", *words))
        until(lambda: shares() == [4], "one has all", 60)
        other = held.enter_context(Consumer(version, tmp_path / "other", *words))
        until(lambda: shares() == [2, 2], "each has half", 60)
        assert set.union(*held_queues(client, "g").values()) == {0, 1, 2, 3}
        one.process.kill()
        until(lambda: shares() == [4], "the other has all", 60)
        whole = {place(message) for message in expected("s01-basic", "orders")}
        # To hold a queue is not yet to have read it.
        until(
            lambda: {place(message) for message in [*one.messages, *other.messages]} == whole,
            "between them they have read everything",
            60,
        )


@pytest.mark.slow
def test_refused_messages_come_again_from_the_client_itself_where_nothing_is_kept(
    name_server: str, tmp_path: Path
):
    """There is nobody to take them back: it tries again after 5 s. None is lost."""
    _, url = tier_of("s01-basic", tmp_path)
    words = ("--namesrv", name_server, "--topic", "orders", *ALL, "--refuse", "50")
    with MountProcess(url, tmp_path / "log", *at(name_server), "--no-state"):
        found = consume("5.5", tmp_path, "push", *words)
    refused = {place(one) for one in found if not one["consumed"]}
    taken = Counter(place(one) for one in found if one["consumed"])
    assert refused == {place(one) for one in found if one["queue_offset"] % 50 == 0}
    assert set(taken) == {place(one) for one in expected("s01-basic", "orders")}


def unique(message: Message) -> str:
    """The id that its producer gave it."""
    return str(message["properties"]["UNIQ_KEY"])


def cat(url: str, topic: str) -> list[Message]:
    """Messages of a topic, as the command prints them."""
    found = command_line.here("cat", url, topic)
    return found.rows if not found.code else []


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.9", "5.5"])
def test_what_is_refused_again_and_again_comes_from_the_retry_topic_and_is_a_dead_letter_at_last(
    version: str, name_server: str, tmp_path: Path
):
    """A mount is killed while messages wait, and another goes on: none is lost, and nothing goes round for ever."""
    _, url = tier_of("s01-basic", tmp_path)
    words = ("--namesrv", name_server, "--topic", "orders", "--group", "g", "--seconds", "300")
    every = {unique(one) for one in expected("s01-basic", "orders")}
    poison = {
        unique(one) for one in expected("s01-basic", "orders") if one["queue_offset"] % 100 == 0
    }
    fail = ("--fail", "100", "--max-reconsume", "1")
    port = next(oracle.free_ports())
    listen = ("--listen", f"127.0.0.1:{port}", "--namesrv", name_server, "--refresh", "1")
    with ExitStack() as held:
        first = held.enter_context(MountProcess(url, tmp_path / "log", *listen))
        consumer = held.enter_context(Consumer(version, tmp_path / "out", "push", *words, *fail))

        def times(count: int) -> list[Message]:
            return [one for one in consumer.messages if one["reconsume_times"] == count]

        until(lambda: cat(url, "SCHEDULE_TOPIC_XXXX"), "some wait for their time", 120)
        kept = cat(url, "SCHEDULE_TOPIC_XXXX")
        first.process.kill()
        second = held.enter_context(MountProcess(url, tmp_path / "log2", *listen))
        until(lambda: {one["msg_id"] for one in times(1)} == poison, "all have come again", 120)
        until(lambda: {unique(one) for one in cat(url, "%DLQ%g")} == poison, "all are dead", 120)
        until(lambda: {one["msg_id"] for one in times(0)} == every, "each came", 120)
        assert second.process.poll() is None
    assert {one["reconsume_times"] for one in cat(url, "%DLQ%g")} == {2}
    first_ms = min(one["store_timestamp_ms"] for one in kept)
    # Others were tried again by the client itself, since the mount was gone when it sent them back.
    again_ms = {one["store_timestamp_ms"] for one in times(1)} - {
        one["store_timestamp_ms"] for one in times(0)
    }
    assert min(again_ms) >= first_ms + 10_000  # level 3
    assert {one["msg_id"] for one in times(0) if one["consumed"]} == every - poison


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.9", "5.5"])
def test_what_an_orderly_consumer_cannot_do_with_is_a_dead_letter_and_its_queue_goes_on(
    version: str, name_server: str, tmp_path: Path
):
    """Orderly consumers try again by themselves, and send to the retry topic when they have done so often enough."""
    _, url = tier_of("s01-basic", tmp_path)
    words = ("--namesrv", name_server, "--topic", "orders", "--group", "g", "--seconds", "300")
    fail = ("--orderly", "--fail", "100", "--max-reconsume", "1")
    wanted = expected("s01-basic", "orders")
    poison = {unique(one) for one in wanted if one["queue_offset"] % 100 == 0}
    with (
        MountProcess(url, tmp_path / "log", *at(name_server)),
        Consumer(version, tmp_path / "out", "push", *words, *fail) as consumer,
    ):

        def taken() -> set[str]:
            return {one["msg_id"] for one in consumer.messages if one["consumed"]}

        until(lambda: taken() == {unique(one) for one in wanted} - poison, "all else is taken", 200)
        until(lambda: {unique(one) for one in cat(url, "%DLQ%g")} == poison, "all are dead", 60)


@pytest.mark.slow
def test_beside_another_broker_producers_go_there_and_refused_messages_come_again_from_the_mount(
    tmp_path: Path,
):
    _, url = tier_of("s01-basic", tmp_path)
    with oracle.Broker(tmp_path, tmp_path / "other") as broker:
        broker.start()
        broker.produce("orders", 4, queues=4, seed=1)
        options = (*at(broker.address), "--name", "gone")
        words = ("--namesrv", broker.address, "--topic", "orders", "--group", "g")
        with MountProcess(url, tmp_path / "log0", *options):
            route = ("topicRoute", "-t", "orders", "-n", broker.address)
            assert "gone" not in admin(*route)  # the topic is left to the broker that lives
        with MountProcess(url, tmp_path / "log", *options, "--share-topics"):
            assert "gone" in admin(*route)
            sent = broker.produce("orders", 40, queues=4, seed=2)
            assert len(sent) == 40  # each was acknowledged, and the mount acknowledges none
            assert sum(end for _, end in broker.offsets("orders").values()) >= 44
            more = ("--max", "1244", "--seconds", "120", "--refuse", "50")
            found = consume("5.5", tmp_path, "push", *words, *more)
    of_mount = [one for one in found if one["broker_name"] == "gone"]
    assert {place(one) for one in of_mount} == {
        place(one) for one in expected("s01-basic", "orders")
    }
    refused = {one["msg_id"] for one in of_mount if not one["consumed"]}
    again = {one["msg_id"] for one in found if one["reconsume_times"] == 1 and one["consumed"]}
    multiples = [one for one in of_mount if one["queue_offset"] % 50 == 0]
    assert refused == {one["msg_id"] for one in multiples}
    assert refused == {one["msg_id"] for one in of_mount if one["queue_offset"] % 50 == 0}
    assert refused <= again
    came_again = [one for one in found if one["reconsume_times"]]
    assert {one["broker_name"] for one in came_again if one["msg_id"] in refused} == {"gone"}
    assert {one["broker_name"] for one in came_again if one["msg_id"] not in refused} <= {
        oracle.BROKER
    }
    assert len({one["msg_id"] for one in found if one["consumed"]}) == 1244


ADMIN = (
    "clusterList", "topicList", "topicList -c", "topicRoute -t orders", "topicStatus -t orders",
    "topicClusterList -t orders", "consumerProgress", "consumerProgress -g g", "consumerConnection -g g",
    "consumerStatus -g g", "brokerConsumeStats -b {address}", "statsAll -t orders", "brokerStatus -b {address}",
    "getBrokerConfig -b {address}", "getConsumerConfig -g g", "producer -b {address}", "allocateMQ -t orders -i a,b",
    "queryMsgByKey -t orders -k {key}", "queryMsgByUniqueKey -t orders -i {unique} -s 0 -e 9999999999999",
    "queryMsgById -t orders -i {id}", "queryMsgByOffset -t orders -b broker-a -i 0 -o 7",
    "queryCq -t orders -q 0 -i 5 -c 3 -b {address}", "printMsg -t orders -d false", "exportConfigs -c cluster-a -f {folder}",
    "setConsumeMode -b {address} -t orders -g g -m PULL -q 1", "resetOffsetByTime -g g -t orders -s 0",
)  # fmt: skip
REFUSED = (
    "updateTopic -b {address} -t x", "deleteTopic -c cluster-a -t orders", "updateSubGroup -b {address} -g x",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.9", "5.5"])
def test_what_mqadmin_asks_a_mount_as_a_name_server_is_answered(version: str, tmp_path: Path):
    _, url = tier_of("s01-basic", tmp_path)
    address = f"127.0.0.1:{next(oracle.free_ports())}"
    folder = tmp_path / "exported"
    commands = (
        *("clusterList", "topicList", "topicList -c", f"exportMetadata -c cluster-a -f {folder}"),
        f"exportMetrics -c cluster-a -f {folder}",
        f"exportConfigs -c cluster-a -f {folder}",
    )
    with MountProcess(url, tmp_path / "log", "--listen", address):
        for command in commands:
            text = admin(*command.split(), "-n", address, version=version)
            assert "Exception" not in text, text
            wanted = {"clusterList": address, "topicList": "orders"}
            assert wanted.get(command.split()[0], "success") in text, text
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["topicConfigTable"]["orders"]["readQueueNums"] == 4
    assert {path.name for path in folder.iterdir()} == {
        *("metadata.json", "metrics.json", "configs.json"),
    }


@pytest.mark.slow
def test_what_mqadmin_asks_is_answered_and_what_would_change_the_broker_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Beside a consumer on line, whom some of it is about; at last it is put back to the beginning, and gets all again."""
    _, url = tier_of("s01-basic", tmp_path)
    monkeypatch.chdir(tmp_path)  # consumerStatus writes files where it is called
    port, names = next(oracle.free_ports()), f"127.0.0.1:{next(oracle.free_ports())}"
    messages = expected("s01-basic", "orders")
    one = messages[7]
    said = {
        "address": f"127.0.0.1:{port}",
        "key": next(m["keys"] for m in messages if m["keys"]).split()[0],
        "unique": one["msg_id"],
        "id": f"7F000001{port:08X}{one['offset_msg_id'][-16:]}",
        "folder": str(tmp_path),
    }
    server = oracle.Server(tmp_path / "names", "namesrv", "--port", names.split(":")[1])
    server.wait_ready()
    listen = ("--listen", said["address"], "--namesrv", names)
    words = ("push", "--namesrv", names, "--topic", "orders", "--group", "g", "--seconds", "400")
    try:
        with (
            MountProcess(url, tmp_path / "log", *listen),
            Consumer("5.5", tmp_path / "consumed", *words) as consumer,
        ):
            until(lambda: len(consumer.messages) >= 1200, "all is consumed", 60)
            for command in ADMIN:
                text = admin(*command.format(**said).split(), "-n", names)
                assert "Exception" not in text, text
                assert text.strip() or command.startswith("producer "), (
                    command
                )  # of which there are none
            for command in REFUSED:
                text = admin(*command.format(**said).split(), "-n", names)
                assert "read-only" in text, text
            until(lambda: len(consumer.messages) >= 2400, "all is consumed again", 60)
    finally:
        server.end(signal.SIGKILL)
