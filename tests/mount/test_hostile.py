"""Whatever a client sends, the mount goes on: random requests of every kind, and many clients at once."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.mount.harness import Client, Mounted, MountProcess, mounted
from tiered.format.remoting import Form
from tiered.mount import codes
from tiered.mount.codes import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILES = 4096
"""Descriptors that a thousand connections need, generously."""
SERVED = [request.code for request in codes.REQUESTS if request.answer is codes.Treatment.SERVED]
NAMES = (
    *("consumerGroup", "topic", "queueId", "queueOffset", "maxMsgNums", "sysFlag", "commitOffset"),
    *("suspendTimeoutMillis", "subscription", "subVersion", "expressionType", "maxMsgBytes", "key"),
    *("timestamp", "boundaryType", "clientID", "maxNum", "beginTimestamp", "endTimestamp", "group"),
)
NUMBERS = st.sampled_from([0, 1, 3, 4, -1, 1 << 31, -(1 << 63), (1 << 63) - 1, 1 << 64]).map(str)
WORDS = st.sampled_from(["orders", "broker-a", "g", "*", "a||b", "SQL92", "TAG", ""])
VALUES = st.one_of(WORDS, NUMBERS, st.text(max_size=20))
FIELDS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=len(NAMES))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["g", "c", "orders"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["clientID", "clientId", "consumerGroup", "consumerDataSet", "groupName", "mqSet", "topic", "queueId",
             "brokerName", "subscriptionDataSet", "subVersion", "subString", "subscriptionData", "expressionType"]
        ),
        inner,
        max_size=6,
    ),
    max_leaves=12,
)  # fmt: skip
BODIES = st.one_of(st.binary(max_size=30), JSON.map(lambda value: json.dumps(value).encode()))


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
    captured_tier: Callable[[str], tuple[Path, str]],
) -> Iterator[Mounted]:
    with mounted(captured_tier("s01-basic")[1], keeps_offsets=False) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Mounted) -> Iterator[Client]:
    with served.client() as found:
        yield found


@pytest.mark.parametrize("code", SERVED)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS, body=BODIES)
def test_any_request_is_answered(client: Client, code: int, fields: dict[str, Any], body: bytes):
    """With a code of the protocol, soon, and never as a defect of ours. Nothing is held: that has a test of its own."""
    known = {name: value for name, value in fields.items() if name != "suspendTimeoutMillis"}
    answer = client.ask(code, body, **known)
    assert answer.code in set(Code)
    assert "a defect of the mount" not in answer.remark, answer


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4))
def test_any_bytes_end_their_connection_at_most(served: Mounted, pieces: list[bytes]):
    host, _, port = served.mount.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        for piece in pieces:
            try:
                connection.sendall(struct.pack(">I", len(piece)) + piece)
            except ConnectionError:
                break
    with served.client(Form.JSON) as other:
        assert other.ask(codes.GET_MAX_OFFSET, topic="orders", queueId=0).code == Code.SUCCESS


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_a_thousand_connections_and_five_thousand_held_requests_are_cheap(
    captured_tier: Callable[[str], tuple[Path, str]], tmp_path: Path
):
    """At most 100 MiB and little of a processor; and another client is served all the while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard), hard))
    options = ("--listen", "127.0.0.1:0", "--no-state")
    _, url = captured_tier("s01-basic")
    with MountProcess(url, tmp_path / "log", *options) as mount, ExitStack() as held:
        probe = held.enter_context(Client(mount.address))
        end = int(probe.ask(codes.GET_MAX_OFFSET, topic="orders", queueId=0).fields["offset"])
        probe.pull("orders", 0, 0)
        before_bytes, pid = resident_bytes(mount.process.pid), mount.process.pid
        clients = [held.enter_context(Client(mount.address)) for _ in range(1000)]
        for one in clients:
            for _ in range(5):
                one.send_pull("orders", 0, end, sysFlag=4 | 2, suspendTimeoutMillis=30_000)
        for one in clients:  # behind the held ones: they have all been taken
            one.send(codes.GET_MIN_OFFSET, topic="orders", queueId=0)
        for one in clients:
            assert one.receive().fields == {"offset": "0"}
        began_s, used_s = time.monotonic(), cpu_s(pid)
        for _ in range(50):
            assert probe.pull("orders", 0, 0).code == Code.SUCCESS
            time.sleep(0.1)
        share = (cpu_s(pid) - used_s) / (time.monotonic() - began_s)
        more_bytes = resident_bytes(pid) - before_bytes
        print(f"held: {more_bytes / 2**20:.1f} MiB more, {share:.1%} of a processor")
        assert more_bytes < 100 << 20
        assert share < 0.5
