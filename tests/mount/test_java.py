"""Real Java clients and a real name server, a mount in the broker's place: every message of a capture, field by field."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from support import captures, command_line, oracle
from support.mounts import MountProcess, tier_of
from support.oracle import NOT_IN_TIME, TRIES, admin
from support.waiting import until

from tiered.format.fastjson import loads
from tiered.local.layout import parse_offsets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.java, oracle.needs_java, pytest.mark.timeout(900)]
NAMES = (
    "s01-basic", "s04-batch-compress", "s06-expired", "s09-big-offsets", "s10-consumers",
    "s11-lmq-batchcq",
)  # fmt: skip
OF_THE_DUMP = {"stored_sys_flag", "size", "physical_offset", "tag_hash"}
"""Fields that a client does not give."""
Message = dict[str, Any]


@pytest.fixture(scope="module")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = f"127.0.0.1:{next(oracle.free_ports())}"
    log = tmp_path_factory.mktemp("names") / "namesrv.log"
    server = oracle.Server(log, "namesrv", "--port", address.split(":")[1])
    server.wait_ready()
    yield address
    server.end(signal.SIGKILL)


def at(name_server: str) -> tuple[str, ...]:
    return "--listen", "127.0.0.1:0", "--namesrv", name_server, "--refresh", "1"


def expected(name: str, topic: str) -> list[Message]:
    """What Java's own store gave of a topic."""
    messages = captures.captured(name).messages.get(topic, [])
    return [{k: v for k, v in one.items() if k not in OF_THE_DUMP} for one in messages]


def place(message: Message) -> tuple[int, int]:
    return message["queue_id"], message["queue_offset"]


def consume(command: str, name_server: str, topic: str, *options: str) -> list[Message]:
    for tries_left in reversed(range(TRIES)):
        try:
            found = oracle.run(command, "--namesrv", name_server, "--topic", topic, *options)
            break
        except AssertionError as error:
            if not tries_left or NOT_IN_TIME not in str(error):
                raise
    return [{k: v for k, v in one.items() if k != "consumed"} for one in found]


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_a_pull_consumer_gets_what_java_read_from_the_store(
    name: str, name_server: str, tmp_path: Path
):
    _, url = tier_of(name, tmp_path)
    with MountProcess(url, tmp_path / "log", *at(name_server)) as mount:
        for topic in captures.captured(name).messages:
            found = consume("pull", name_server, topic)
            assert sorted(found, key=place) == expected(name, topic), topic
        assert mount.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    "how",
    [(), ("--orderly",), ("--model", "broadcasting")],
    ids=["clustering", "orderly", "broadcasting"],
)
def test_a_push_consumer_gets_each_message(how: tuple[str, ...], name_server: str, tmp_path: Path):
    _, url = tier_of("s01-basic", tmp_path)
    wanted = expected("s01-basic", "orders")
    options = ("--group", "g", "--max", str(len(wanted)), "--seconds", "200", *how)
    with MountProcess(url, tmp_path / "log", *at(name_server)):
        found = consume("push", name_server, "orders", *options)
    assert sorted(found, key=place) == wanted
    if "--orderly" in how:
        offsets: Counter[int] = Counter()
        for message in found:
            assert message["queue_offset"] == offsets[message["queue_id"]]
            offsets[message["queue_id"]] += 1


def test_filters_and_times(name_server: str, tmp_path: Path):
    _, url = tier_of("s01-basic", tmp_path)
    everything = expected("s01-basic", "orders")
    time_ms = everything[50]["store_timestamp_ms"]
    with MountProcess(url, tmp_path / "log", *at(name_server)):
        paid = consume("pull", name_server, "orders", "--tag", "paid||none")
        by_sql = consume("pull", name_server, "orders", "--sql", "TAGS = 'paid'")
        late = consume("pull", name_server, "orders", "--from-time", str(time_ms))
    assert paid == by_sql == [one for one in everything if one["tags"] == "paid"]
    assert late == [one for one in everything if one["store_timestamp_ms"] >= time_ms]


@pytest.mark.slow
def test_a_group_goes_on_where_it_was_after_a_restart_of_the_mount(
    name_server: str, tmp_path: Path
):
    """A clean end loses and repeats nothing: the first consumer commits all that it took when it ends."""
    _, url = tier_of("s01-basic", tmp_path)
    wanted = expected("s01-basic", "orders")
    found: list[Message] = []
    for number in range(2):
        with MountProcess(url, tmp_path / f"log{number}", *at(name_server)) as mount:
            options = ("--group", "g", "--threads", "1", "--seconds", "8", "--max", "500000")
            found += consume("push", name_server, "orders", *options)
            assert mount.end(signal.SIGTERM)[0] == 0
    assert sorted(found, key=place) == wanted


@pytest.mark.slow
def test_beside_the_live_broker_it_is_refused_and_takes_its_place_when_that_is_gone(tmp_path: Path):
    """Consumers of the broker and of the mount in its place see the same messages and offsets."""
    with oracle.Broker(tmp_path, tmp_path / "store") as broker:
        broker.start()
        broker.produce("t", 200, queues=2, seed=7)
        half = consume(
            "push", broker.address, "t", "--group", "g", "--seconds", "200", "--max", "200"
        )
        broker.produce("t", 100, queues=2, seed=8)
        real = consume("pull", broker.address, "t")
        url = f"file://{tmp_path}/tier"
        refused = command_line.program("mount", url, *at(broker.address), "--no-state")
        assert refused.code == 2  # there is no tier yet
        command_line.here("attach", broker.store, "--to", url, "--once").good()
        refused = command_line.program("mount", url, *at(broker.address))
        assert refused.code == 4
        assert "a broker of this name is registered: broker-a" in refused.error
        running = command_line.here("attach", broker.store, "--to", url, "--decommission")
        assert running.code == 1
        assert "not done: a broker runs on the store" in running.err
        broker.stop()
        command_line.here("attach", broker.store, "--to", url, "--decommission").good()
        with MountProcess(url, tmp_path / "log", *at(broker.address)):
            assert consume("pull", broker.address, "t") == real
            rest = consume(
                "push", broker.address, "t", "--group", "g", "--seconds", "200", "--max", "100"
            )
    assert sorted(half + rest, key=place) == sorted(real, key=place)


def committed(store: Path) -> int:
    """Messages of topic t that the broker knows to be consumed by group g."""
    path = store / "config" / "consumerOffset.json"
    table = parse_offsets(loads(path.read_bytes())) if path.exists() else {}
    return sum(table.get(("g", "t"), {}).values())


@pytest.mark.slow
def test_consumers_that_run_go_on_at_the_mount_and_lose_nothing(tmp_path: Path):
    """They are held up while messages come and the broker goes, so that what they had not taken is left to the mount."""
    with oracle.Broker(tmp_path, tmp_path / "store") as broker:
        broker.start()
        broker.produce("t", 200, queues=4, seed=7)
        words = ("push", "--namesrv", broker.address, "--topic", "t", "--group", "g")
        out = tmp_path / "consumed"
        with out.open("wb") as file:
            consumer = subprocess.Popen(
                [oracle.ORACLE, *words, "--seconds", "240", "--max", "500"], stdout=file
            )
        try:
            until(lambda: out.read_bytes().count(b"\n") >= 200, "200 messages", 60)
            until(lambda: committed(broker.store) == 200, "200 committed", 60)
            consumer.send_signal(signal.SIGSTOP)
            broker.produce("t", 300, queues=4, seed=8)
            real = consume("pull", broker.address, "t")
            broker.stop()
            url = f"file://{tmp_path}/tier"
            told = command_line.here(
                "attach", broker.store, "--to", url, "--decommission", "--json"
            ).good()
            assert told.document["decommission"]["consumer_offsets"] >= 4
            with MountProcess(url, tmp_path / "log", *at(broker.address)) as mount:
                consumer.send_signal(signal.SIGCONT)
                assert consumer.wait(180) == 0
                assert mount.end(signal.SIGTERM)[0] == 0
        finally:
            consumer.kill()
            consumer.wait()
    found = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert {place(one) for one in found} == {place(one) for one in real}
    assert (
        len(found) == len(real) == 500
    )  # it stopped at a quiet moment: nothing comes again either


@pytest.mark.slow
def test_producers_are_sent_away_at_once(name_server: str, tmp_path: Path):
    _, url = tier_of("s01-basic", tmp_path)
    words = ("produce", "--namesrv", name_server, "--topic", "orders", "--count", "1")
    with MountProcess(url, tmp_path / "log", *at(name_server)):
        done = subprocess.run(
            [oracle.ORACLE, *words], capture_output=True, text=True, timeout=240, check=False
        )
    assert done.returncode != 0
    assert not done.stdout


@pytest.mark.slow
def test_messages_by_key_and_what_mqadmin_shows(name_server: str, tmp_path: Path):
    _, url = tier_of("s01-basic", tmp_path)
    messages = expected("s01-basic", "orders")
    key = next(one["keys"] for one in messages if one["keys"]).split()[0]
    of_key = [one for one in messages if key in (one["keys"] or "").split()]
    one = messages[7]
    n = ("-n", name_server)
    with MountProcess(url, tmp_path / "log", *at(name_server)) as mount:
        found = consume("query", name_server, "orders", "--key", key)
        assert sorted(found, key=place) == of_key
        assert consume("view", name_server, "orders", "--msgid", one["msg_id"]) == [one]
        consume("push", name_server, "orders", "--group", "g", "--max", "1200", "--seconds", "200")
        commands = (
            "clusterList",
            "topicList",
            "topicStatus -t orders",
            "consumerProgress -g g",
            "statsAll -t orders",
            f"brokerStatus -b {mount.address}",
            f"getBrokerConfig -b {mount.address}",
            "queryMsgByOffset -t orders -b broker-a -i 0 -o 7",
        )
        with ThreadPoolExecutor(2) as several:
            texts = several.map(lambda words: admin(*words.split(), *n), commands)
            said = dict(zip(commands, texts, strict=True))
    for words, text in said.items():
        assert "Exception" not in text, (words, text)
    told = {words.split()[0]: text.split() for words, text in said.items()}
    assert {"broker-a", mount.address} <= set(told["clusterList"])
    assert {"orders", "events", "%RETRY%g"} <= set(told["topicList"])
    offsets = Counter(str(message["queue_id"]) for message in messages)
    rows = [line.split() for line in said["topicStatus -t orders"].splitlines()]
    assert {row[1]: int(row[3]) for row in rows if row[:1] == ["broker-a"]} == offsets
    assert "Consume Diff Total: 0\n" in said["consumerProgress -g g"]
    assert "g" in told["statsAll"]
    assert "read-only" in told["brokerStatus"]
    assert "brokerName" in told["getBrokerConfig"]
    assert "7" in told["queryMsgByOffset"]
