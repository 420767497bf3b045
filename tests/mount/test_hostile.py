"""Whatever a client sends, the mount goes on: random requests of every kind, and many clients at once."""

from __future__ import annotations

import json
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
from support.command_line import program
from support.mounts import Client, Mounted, MountProcess, mounted, parked, resident_bytes

from tiered.format.remoting import Form
from tiered.mount import protocol
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOPIC = "bench-0"
"""Of ``bench make-store``."""
WAKEUPS_MAX = 500
"""In two seconds; 13 where nothing polls, and each held request that is looked at costs one or more."""
FILES = 4096
"""Descriptors that a thousand connections need, generously."""
SERVED = [
    request.code for request in protocol.REQUESTS if request.answer is protocol.Treatment.SERVED
]
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


@pytest.fixture(scope="module")
def by_json(served: Mounted) -> Iterator[Client]:
    with served.client(Form.JSON) as found:
        yield found


@pytest.mark.parametrize("code", SERVED)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS, body=BODIES)
def test_any_request_is_answered(
    client: Client, by_json: Client, code: int, fields: dict[str, Any], body: bytes
):
    """With a code of the protocol, soon, and never as a defect of ours. Nothing is held: that has a test of its own."""
    known = {name: value for name, value in fields.items() if name != "suspendTimeoutMillis"}
    asking = client if code < 1 << 15 else by_json  # the other form has no room for it
    answer = asking.ask(code, body, **known)
    assert answer.code in set(Code)
    assert "a defect of the mount" not in answer.remark, answer


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4))
def test_any_bytes_end_their_connection_at_most(served: Mounted, chunks: list[bytes]):
    host, _, port = served.mount.address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        for chunk in chunks:
            try:
                connection.sendall(struct.pack(">I", len(chunk)) + chunk)
            except ConnectionError:
                break
    with served.client(Form.JSON) as other:
        assert other.ask(protocol.GET_MAX_OFFSET, topic="orders", queueId=0).code == Code.SUCCESS


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_a_thousand_connections_and_five_thousand_held_requests_are_cheap(
    captured_tier: Callable[[str], tuple[Path, str]], tmp_path: Path
):
    """At most 100 MiB; while nothing comes no thread wakes for them; and another client is served all the while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard), hard))
    options = ("--listen", "127.0.0.1:0", "--no-state")
    _, url = captured_tier("s01-basic")
    with (
        MountProcess(url, tmp_path / "log", *options) as mount,
        parked(mount, "orders", clients=1000, each=5, queues=4) as (more_bytes, woken),
        Client(mount.address) as probe,
    ):
        print(f"held: {more_bytes / 2**20:.1f} MiB more, {woken} wakeups in two seconds")
        for _ in range(50):
            assert probe.pull("orders", 0, 0).code == Code.SUCCESS
        assert more_bytes < 100 << 20
        assert woken < WAKEUPS_MAX


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_held_requests_with_large_headers_take_no_room_for_them(
    captured_tier: Callable[[str], tuple[Path, str]], tmp_path: Path
):
    """Of 20,000 that may be held, each may have 64 KiB that no budget counts."""
    options = ("--listen", "127.0.0.1:0", "--no-state")
    _, url = captured_tier("s10-consumers")
    with (
        MountProcess(url, tmp_path / "log", *options) as mount,
        Client(mount.address) as client,
    ):
        end = client.ask(protocol.GET_MAX_OFFSET, topic="work", queueId=0).fields["offset"]
        before_bytes = resident_bytes(mount.process.pid)
        for _ in range(800):
            more = {"sysFlag": 4 | 2, "suspendTimeoutMillis": 30_000, "padding": "x" * 60_000}
            client.send_pull("work", 0, int(end), **more)
        client.send(protocol.GET_MIN_OFFSET, topic="work", queueId=0)  # behind the held ones
        assert client.receive().code == Code.SUCCESS
        assert resident_bytes(mount.process.pid) - before_bytes < 20 << 20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_slow_readers_and_half_open_frames_among_a_thousand_connections_are_bounded(
    tmp_path: Path,
):
    """100 ask for 16 MiB each and read nothing, 700 begin large frames and stop, 200 are held: memory is kept to its
    budget, and others are served meanwhile. Of each, the system takes 4 MiB before anything waits in the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard), hard))
    options = ("--listen", "127.0.0.1:0", "--no-state", "--in-flight-size", "64MiB")
    options += ("--memory", "64MiB")
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    sizes = ("--messages", "1000", "--queues", "1", "--body", "64KiB")
    program("bench", "make-store", store, *sizes).good()
    program("attach", store, "--to", url, "--once").good()
    with MountProcess(url, tmp_path / "log", *options) as mount, ExitStack() as held:
        probe = held.enter_context(Client(mount.address))
        end = int(probe.ask(protocol.GET_MAX_OFFSET, topic=TOPIC, queueId=0).fields["offset"])
        probe.pull(TOPIC, 0, 0)
        pid = mount.process.pid
        before_bytes = resident_bytes(pid)
        clients = [held.enter_context(Client(mount.address)) for _ in range(1000)]
        for one in clients[:100]:
            one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            for number in range(64):
                one.send_pull(TOPIC, 0, number * 15, maxMsgNums=1024)
        for one in clients[100:800]:
            one.socket.sendall(struct.pack(">II", 8 << 20, 100) + bytes(1000))
        for one in clients[800:]:
            one.send_pull(TOPIC, 0, end, sysFlag=4 | 2, suspendTimeoutMillis=60_000)
        most_bytes = 0
        for _ in range(50):
            answer = probe.ask(protocol.GET_MAX_OFFSET, topic=TOPIC, queueId=0)
            assert answer.fields == {"offset": str(end)}
            most_bytes = max(most_bytes, resident_bytes(pid) - before_bytes)
            time.sleep(0.1)
        print(f"at most {most_bytes / 2**20:.1f} MiB more")
        # An answer of 256 KiB for each of the hundred, since a client that takes nothing is not read from; 1.2 GiB without.
        assert most_bytes > 16 << 20, "nobody was kept waiting"
        assert most_bytes < 96 << 20
        for one in clients[:800]:
            one.close()
        fresh = held.enter_context(Client(mount.address))
        assert fresh.pull(TOPIC, 0, 0).code == Code.SUCCESS  # there is room again
