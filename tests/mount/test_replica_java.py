"""A replica beside a real living broker, with real consumers."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from support import oracle
from support.command_line import here, program
from support.gate import Gate
from support.mounts import Client, MountProcess, page
from support.oracle import Consumer, admin, needs_java
from support.servers import run_minio
from support.waiting import until

from tiered.mount import protocol

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.java, needs_java, pytest.mark.timeout(600)]
LAGS = {"slaveReadEnable": "true", "accessMessageInMemoryMaxRatio": 0}
"""A master in whose memory nothing is: whoever is behind at all is sent to the replica."""


def options(broker: oracle.Broker) -> tuple[str, ...]:
    metrics = f"127.0.0.1:{next(oracle.free_ports())}"
    return (
        *("--listen", "127.0.0.1:0", "--namesrv", broker.address, "--refresh", "1"),
        *("--replica-of-live", "--metrics-listen", metrics),
    )


def metric(words: tuple[str, ...], name: str) -> float:
    """What a replica measured, over all labels."""
    text = page(words[-1], "/metrics")[1]
    found = re.findall(rf"^tiered_mount_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def places(found: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    return Counter((one["queue_id"], one["queue_offset"]) for one in found)


def committed(broker: oracle.Broker) -> int:
    """The group's offsets at the master, summed."""
    asked = {"consumerGroup": "g", "topic": "orders"}
    with Client(broker.at) as client:
        code = protocol.QUERY_CONSUMER_OFFSET
        said = [client.ask(code, queueId=queue_id, **asked) for queue_id in range(4)]
    return sum(int(one.fields.get("offset", 0)) for one in said)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.9", "5.5"])
def test_a_laggard_reads_from_the_tier_and_the_rest_from_the_master(version: str, tmp_path: Path):
    """Name server, broker and consumer of one generation."""
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    with oracle.Broker(tmp_path, store, version=version, **LAGS) as broker:
        broker.start()
        broker.produce("orders", 2000, queues=4, inflight=32)
        here("attach", store, "--to", url, "--once").good()
        broker.produce("orders", 400, queues=4, inflight=32)  # not in the tier
        words = options(broker)
        with MountProcess(url, tmp_path / "log", *words):
            asked = ("--namesrv", broker.address, "--topic", "orders", "--group", "g")
            ends = ("--max", "2400", "--seconds", "120")
            with Consumer(version, tmp_path / "out", "push", *asked, *ends) as consumer:
                found = consumer.end()
            assert set(places(found).values()) == {1}
            assert len(found) == 2400
            assert metric(words, "read_bytes_total") > 2000 * 100
            assert metric(words, "replica_handed_back_total") >= 4
            until(lambda: committed(broker) == 2400, "its offsets are the master's", 60)


ADMIN = (
    "clusterList", "topicList -c", "topicRoute -t orders", "topicStatus -t orders", "consumerProgress",
    "consumerProgress -g g", "consumerStatus -g g", "consumerConnection -g g", "getConsumerConfig -g g",
    "statsAll -t orders", "brokerStatus -b {replica}", "getBrokerConfig -b {replica}",
    "brokerConsumeStats -b {replica}", "producer -b {replica}",
)  # fmt: skip
"""What a dashboard asks, too, of name servers, the master, and each broker by its address."""


@pytest.mark.slow
def test_what_administrators_ask_is_answered_beside_a_replica_and_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    monkeypatch.chdir(tmp_path)  # consumerStatus writes files where it is called
    with ExitStack() as held:
        broker = held.enter_context(oracle.Broker(tmp_path, store, **LAGS))
        broker.start()
        broker.produce("orders", 400, queues=4)
        here("attach", store, "--to", url, "--once").good()
        mount = held.enter_context(MountProcess(url, tmp_path / "log", *options(broker)))
        asked = ("--namesrv", broker.address, "--topic", "orders", "--group", "g")
        consumer = Consumer("5.5", tmp_path / "out", "push", *asked, "--seconds", "500")
        held.enter_context(consumer)
        until(lambda: len(consumer.messages) == 400 == committed(broker), "all is consumed", 60)
        said = {}
        for command in ADMIN:
            words = command.format(replica=mount.address).split()
            said[command] = text = admin(*words, "-n", broker.address)
            assert "Exception" not in text, text
            assert text.strip() or command.startswith("producer "), command  # there are none
    rows = [line.split() for line in said["clusterList"].splitlines()]
    assert ["0", broker.at] in [row[2:4] for row in rows]
    assert ["1", mount.address] in [row[2:4] for row in rows]
    assert "read-only replica" in said["brokerStatus -b {replica}"]
    assert "Consume Diff Total: 0\n" in said["consumerProgress -g g"]


@pytest.mark.slow
@pytest.mark.go
@pytest.mark.parametrize("version", ["4.9", "5.5"])
@pytest.mark.parametrize("trouble", ["none", "replica", "tier", "names"])
def test_consumers_go_on_at_the_master_whatever_happens_here(
    trouble: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """While they read, the replica dies, its tier's store does, or the name server is started anew."""
    store, count = tmp_path / "store", 30_000
    with ExitStack() as held:
        minio = held.enter_context(run_minio(tmp_path))
        for name, value in minio.environment.items():
            monkeypatch.setenv(name, value)
        gate = held.enter_context(Gate(minio.endpoint_url))
        url = f"s3://{minio.bucket()}/tier"
        broker = held.enter_context(oracle.Broker(tmp_path, store, **LAGS))
        broker.start()
        broker.produce("orders", count - 1000, queues=4, inflight=64)
        program("attach", store, "--to", url, "--once").good()
        broker.produce("orders", 1000, queues=4, inflight=64)
        words = options(broker)
        door = ("--endpoint-url", gate.url)
        mount = held.enter_context(MountProcess(url, tmp_path / "log", *door, *words))
        asked = ("--namesrv", broker.address, "--topic", "orders", "--group", "g")
        ends = ("--max", str(count), "--seconds", "120")
        consumer = held.enter_context(Consumer(version, tmp_path / "out", "push", *asked, *ends))
        until(lambda: len(consumer.messages) > 2000, "it reads", 60)
        match trouble:
            case "replica":
                mount.process.kill()
            case "tier":
                gate.shut()
            case "names":
                broker.restart_names()
        found = consumer.end()
        assert len(places(found)) == count
        if trouble == "none":
            body_bytes = sum(len(one["body_base64"]) * 3 // 4 for one in found)
            assert metric(words, "read_bytes_total") > 0.95 * body_bytes


@pytest.mark.slow
def test_what_the_broker_has_expired_is_given_to_who_asks_the_replica(tmp_path: Path):
    """Who asks the master first is put to its minimum, by the master; see docs/cold-reads.md."""
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    with oracle.Broker(tmp_path, store, **LAGS) as broker:
        broker.start()
        broker.produce("orders", 4000, queues=4, inflight=32)
        here("attach", store, "--to", url, "--once").good()
        broker.stop()
        for path in sorted((store / "commitlog").iterdir())[:2]:
            path.unlink()
        broker.start()
        lows = lambda: [low for low, _ in broker.offsets("orders").values()]  # noqa: E731
        until(lambda: min(lows()) > 0, "it is gone", 150)
        broker.produce("orders", 400, queues=4, inflight=32)
        with MountProcess(url, tmp_path / "log", *options(broker)):
            asked = ("--namesrv", broker.address, "--topic", "orders", "--group", "g")
            ends = ("--max", "4400", "--seconds", "60")
            found = oracle.run("client", "lite-pull", *asked, *ends, "--broker-id", "1")
            assert set(places(found).values()) == {1}
            assert len(found) == 4400


@pytest.mark.slow
def test_a_master_for_which_replicas_act_is_back_at_once(tmp_path: Path):
    """It waits for each broker of its name that is registered; the replica is not, once it has seen that it is gone."""
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    acts = ("--set", "supportActingMaster=true")
    settings = {**LAGS, "enableSlaveActingMaster": "true"}
    with oracle.Broker(tmp_path, store, *acts, **settings) as broker:
        broker.start()
        broker.produce("orders", 100, queues=4)
        here("attach", store, "--to", url, "--once").good()
        with MountProcess(url, tmp_path / "log", *options(broker)) as mount:
            names = ("clusterList", "-n", broker.address)
            assert mount.address in admin(*names)
            broker.kill()
            until(lambda: mount.address not in admin(*names), "it has left", 60)
            broker.start()
            assert len(broker.produce("orders", 100, queues=4)) == 100
            until(lambda: mount.address in admin(*names), "it is back", 60)


@pytest.mark.slow
def test_beside_a_broker_in_controller_mode_it_serves_and_is_not_elected(tmp_path: Path):
    """A controller counts its brokers from 1, so the replica takes an id that it never gives."""
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    controller = f"127.0.0.1:{next(oracle.free_ports())}"
    said = {
        "enableControllerInNamesrv": "true",
        "controllerDLegerGroup": "controllers",
        "controllerDLegerPeers": f"n0-{controller}",
        "controllerDLegerSelfId": "n0",
        "controllerStorePath": tmp_path / "controller",
    }
    names = [word for name, value in said.items() for word in ("--set", f"{name}={value}")]
    settings = {**LAGS, "enableControllerMode": "true", "controllerAddr": controller}
    with oracle.Broker(tmp_path, store, *names, **settings) as broker:
        broker.start()
        broker.produce("orders", 2000, queues=4, inflight=32)
        here("attach", store, "--to", url, "--once").good()
        group = ("updateSubGroup", "-c", oracle.CLUSTER, "-g", "g", "-w", "1000")
        assert "success" in admin(*group, "-n", broker.address)
        words = options(broker)
        with MountProcess(url, tmp_path / "log", *words, "--broker-id", "1000") as mount:
            asked = ("--namesrv", broker.address, "--topic", "orders", "--group", "g")
            ends = ("--max", "2000", "--seconds", "120")
            found = oracle.run("client", "push", *asked, *ends)
            assert set(places(found).values()) == {1}
            assert len(found) == 2000
            assert metric(words, "read_bytes_total") > 2000 * 100

            def known() -> list[list[str]]:
                lines = admin("clusterList", "-n", broker.address).splitlines()
                return [row[2:4] for row in map(str.split, lines) if row[:1] == [oracle.CLUSTER]]

            own = ["1000", mount.address]
            assert known() == [["0", broker.at], own]
            elected = admin("getSyncStateSet", "-a", controller, "-b", oracle.BROKER)
            assert broker.at in elected
            assert mount.address not in elected
            broker.kill()
            until(lambda: known() == [own], "the master is gone", 60)
            broker.start()  # the name was known all along, so it may not be registered yet
            until(lambda: known() == [["0", broker.at], own], "the master is back", 60)
            assert len(broker.produce("orders", 100, queues=4)) == 100
