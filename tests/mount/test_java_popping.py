"""Clients that pop, at a mount: remoting consumers of 5.5 whose group is told to, and gRPC consumers behind a real proxy."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from support import captures, command_line, oracle
from support.mounts import Client, MountProcess, tier_of
from support.waiting import until

from backends.local import LocalFolderStore
from tiered.format.remoting import Form
from tiered.mount import protocol
from tiered.mount.offsets import kept_state
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.java, pytest.mark.slow, oracle.needs_java, pytest.mark.timeout(900)]
Row = dict[str, Any]
SLOWLY = ("--ack-seconds", "1")
"""Who pops waits with many messages in hand until acknowledgements are durable, so that it can be met in the middle."""


class PoppingClient:
    """A client in a process of its own, and what it printed."""

    def __init__(self, out: Path, *words: str) -> None:
        self._out = out
        with out.open("wb") as file, out.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [oracle.ORACLE, *words], stdout=file, stderr=log, env=command_line.environment()
            )

    @property
    def rows(self) -> list[Row]:
        *lines, _ = self._out.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> list[Row]:
        try:
            code = self.process.wait(240)
        finally:
            self.process.kill()
        assert code == 0, self._out.with_suffix(".log").read_text()[-2000:]
        return self.rows


@pytest.fixture(scope="module")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = str(next(oracle.free_ports()))
    log = tmp_path_factory.mktemp("names") / "namesrv.log"
    server = oracle.Server(log, "namesrv", "--port", port)
    server.wait_ready()
    yield f"127.0.0.1:{port}"
    server.end(signal.SIGKILL)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return tier_of("s01-basic", tmp_path)[1]


def bodies(rows: list[Row]) -> dict[str, str]:
    return {row["msg_id"]: row["body_base64"] for row in rows if row.get("consumed", True)}


WHOLE = bodies(captures.captured("s01-basic").messages["orders"])


def settled(folder: Path) -> set[tuple[int, int]]:
    """Queue and offset of all that the mount's journal says that the group acknowledged."""
    tier = folder / "tier-s01-basic"
    (place,) = tier.glob("*/broker-a/meta/mount/broker-a")
    state = kept_state(LocalFolderStore(tier), f"{place.relative_to(tier)}/")
    assert state is not None
    found = {(q, at) for q, end in state.offsets["g", "orders"].items() for at in range(end)}
    for (_, _, queue_id), row in state.acks.items():
        for low, high in zip(row.ranges[::2], row.ranges[1::2], strict=True):
            found |= {(queue_id, at) for at in range(low, high)}
    return found


def test_a_consumer_whose_group_pops_gets_all_though_the_mount_is_killed(
    name_server: str, url: str, tmp_path: Path
):
    """What was acknowledged before does not come again; what it refuses comes after a while, and says so."""
    listen = ("--listen", f"127.0.0.1:{next(oracle.free_ports())}", "--namesrv", name_server)
    words = ("--namesrv", name_server, "--topic", "orders", "--group", "g", "--broker-rebalance")
    with MountProcess(url, tmp_path / "log", *listen, *SLOWLY) as mount:
        with Client(mount.address, Form.JSON) as client:
            said = {"topic": "orders", "consumerGroup": "g", "mode": "POP", "popShareQueueNum": 0}
            assert client.ask(protocol.SET_MESSAGE_REQUEST_MODE, said).code == Code.SUCCESS
        consumer = PoppingClient(
            tmp_path / "out", "client", "push", *words, "--seconds", "60", "--max", "5000",
            "--refuse", "250",
        )  # fmt: skip
        until(lambda: len(consumer.rows) > 300, "in the middle", 120)
        mount.end(signal.SIGKILL)
        before = len(consumer.rows)
        gone = settled(tmp_path)
        assert 0 < len(gone) < len(WHOLE)
    with MountProcess(url, tmp_path / "log2", *listen):
        rows = consumer.end()
    assert bodies(rows) == WHOLE
    again = [row for row in rows[before:] if (row["queue_id"], row["queue_offset"]) in gone]
    # It may have had some in hand when the mount was killed, and none of them twice.
    assert not {row["msg_id"] for row in rows[:before] if row["consumed"]} & {
        r["msg_id"] for r in again
    }
    refused = {row["msg_id"] for row in rows if not row["consumed"]}
    assert refused
    assert all(
        any(row["msg_id"] == one and row["reconsume_times"] for row in rows) for one in refused
    )
    assert len(settled(tmp_path)) == len(WHOLE)


@pytest.fixture
def proxies(tmp_path: Path) -> Iterator[Any]:
    """Begins a proxy of a name server's cluster; its address."""
    servers: list[oracle.Server] = []

    def begin(names: str) -> str:
        ports = oracle.free_ports()
        port, other = next(ports), next(ports)
        words = ("--cluster", oracle.CLUSTER, "--namesrv", names, "--port", str(port))
        server = oracle.Server(
            tmp_path / "proxy.log", "proxy", *words, "--remoting-port", str(other)
        )
        servers.append(server)
        server.wait_ready()
        return f"127.0.0.1:{port}"

    yield begin
    for server in servers:
        server.end(signal.SIGKILL)


def of_group(proxy: str, *more: str) -> tuple[str, ...]:
    return ("--proxy", proxy, "--topic", "orders", "--group", "g", *more)


@pytest.mark.parametrize("kind", ["simple", "grpc-push"])
def test_consumers_of_grpc_behind_a_proxy_whose_cluster_has_a_mount_alone(
    kind: str, name_server: str, url: str, tmp_path: Path, proxies: Any
):
    """Each message is consumed once, those that it refuses when they come again."""
    listen = ("--listen", "127.0.0.1:0", "--namesrv", name_server)
    with MountProcess(url, tmp_path / "log", *listen):
        words = of_group(proxies(name_server), "--seconds", "120")
        more = ("--max", "1200", "--refuse", "100")
        rows = PoppingClient(tmp_path / "out", kind, *words, *more).end()
    assert bodies(rows) == WHOLE
    taken = [row["msg_id"] for row in rows if row["consumed"]]
    assert len(taken) == len(set(taken))
    assert len(rows) - len(taken) == 12
    assert {row["attempt"] for row in rows if row["msg_id"] in _refused(rows)} == {1, 2}
    assert len(settled(tmp_path)) == len(WHOLE)


def _refused(rows: list[Row]) -> set[str]:
    return {row["msg_id"] for row in rows if not row["consumed"]}


def test_what_was_acknowledged_over_grpc_does_not_come_again_from_the_next_mount(
    name_server: str, url: str, tmp_path: Path, proxies: Any
):
    listen = ("--listen", f"127.0.0.1:{next(oracle.free_ports())}", "--namesrv", name_server)
    with MountProcess(url, tmp_path / "log", *listen, *SLOWLY) as mount:
        words = of_group(proxies(name_server), "--hidden", "300")
        first = PoppingClient(tmp_path / "out", "simple", *words, "--max", "5000")
        until(lambda: len(first.rows) > 100, "in the middle", 120)
        mount.end(signal.SIGKILL)
        first.process.kill()
        first.process.wait()
        before = {row["msg_id"] for row in first.rows if row["consumed"]}
    assert before
    with MountProcess(url, tmp_path / "log2", *listen):
        left = str(len(WHOLE) - len(settled(tmp_path)))
        second = PoppingClient(
            tmp_path / "out2", "simple", *words, "--max", left, "--seconds", "120"
        )
        after = bodies(second.end())
    assert not before & set(after)
    assert set(after) | before | {
        one["msg_id"]
        for one in captures.captured("s01-basic").messages["orders"]
        if (one["queue_id"], one["queue_offset"]) in settled(tmp_path)
    } == set(WHOLE)


def test_beside_a_live_broker_who_pops_gets_the_mounts_messages_only_where_that_was_said(
    url: str, tmp_path: Path, proxies: Any
):
    """The topic is the live broker's: a mount that does not share it costs consumers of gRPC no receive."""
    with oracle.Broker(tmp_path, tmp_path / "live") as broker:
        broker.start()
        live = {row["msg_id"] for row in broker.produce("orders", 200, queues=4)}
        # Each receive asks the next queue; one of a broker that has nothing more waits there for --await.
        asked = ("--proxy", proxies(broker.address), "--topic", "orders", "--await", "1")
        often = (*asked, "--hidden", "60", "--seconds", "200")
        serving = ("--listen", "127.0.0.1:0", "--namesrv", broker.address, "--name", "gone")
        with MountProcess(url, tmp_path / "alone", *serving):
            words = (*often, "--group", "one", "--max", "200")
            first = PoppingClient(tmp_path / "one", "simple", *words).end()
        with MountProcess(url, tmp_path / "shared", *serving, "--share-topics"):
            words = (*often, "--group", "two", "--max", "1400")
            both = PoppingClient(tmp_path / "two", "simple", *words).end()
    assert {row["msg_id"] for row in first} == live
    assert {row["msg_id"] for row in both} == live | set(WHOLE)
