"""Any header, body and bytes to each kind of request: an answer with a code, soon, and no defect of the mount's."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mounts import Client, Mounted, MountProcess, mounted, resident_bytes

from tiered.format.remoting import Command, Form, encode
from tiered.mount import protocol
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIELDS = (
    *("topic", "queueId", "queueOffset", "consumerGroup", "group", "clientID", "maxMsgNums"),
    *("sysFlag", "commitOffset", "subscription", "subVersion", "expressionType", "maxMsgBytes"),
    *("timestamp", "boundaryType", "key", "maxNum", "beginTimestamp", "endTimestamp", "offset"),
    *("producerGroup", "setZeroIfNotFound", "_UNIQUE_KEY_QUERY"),
)
NUMBERS = st.sampled_from(
    [-(1 << 63), -(1 << 31), -2, -1, 0, 1, 3, 31, 4096, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 90]
)
TEXTS = st.one_of(
    st.sampled_from(["orders", "%RETRY%g", "g", "*", "a||b", "TAG", "SQL92", "x IN (", "", "true"]),
    NUMBERS.map(str),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace").decode()),
)
HEADERS = st.dictionaries(st.sampled_from(FIELDS), TEXTS, max_size=len(FIELDS))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
MEMBERS = (
    *("clientID", "consumerDataSet", "groupName", "subscriptionDataSet", "subscriptionData"),
    *("consumerGroup", "clientId", "mqSet", "topic", "queueId", "subString", "expressionType"),
)
BODIES = st.one_of(
    st.binary(max_size=64),
    st.dictionaries(st.sampled_from(MEMBERS), VALUES, max_size=6).map(
        lambda document: json.dumps(document).encode()
    ),
    st.just(b"[" * 5000),
)
ASKED = sorted({*protocol.BY_CODE, 0, 99, 32_767, 200_051})


@pytest.fixture(scope="module")
def served(captured_tier: Callable[[str], tuple[Path, str]]) -> Iterator[Mounted]:
    with mounted(captured_tier("s10-consumers")[1], keeps_offsets=False) as found:
        yield found


def try_one(served: Mounted, code: int, fields: dict[str, str], body: bytes) -> None:
    held: dict[str, Any] = {"suspendTimeoutMillis": 5}
    with served.client(Form.JSON) as client:
        answer = client.ask(code, body, **fields, **held)
        assert answer.code in set(Code)
        assert "a defect of the mount" not in answer.remark, (code, fields, body, answer.remark)
        assert client.ask(protocol.GET_MAX_OFFSET, topic="work", queueId=0).fields["offset"] == "33"


@settings(deadline=None, max_examples=400, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(ASKED), HEADERS, BODIES)
def test_anything_is_answered(served: Mounted, code: int, fields: dict[str, str], body: bytes):
    try_one(served, code, fields, body)


@pytest.mark.slow
@settings(deadline=None, max_examples=3_000, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(ASKED), HEADERS, BODIES)
def test_anything_is_answered_for_long(
    served: Mounted, code: int, fields: dict[str, str], body: bytes
):
    try_one(served, code, fields, body)


# -- bytes ----------------------------------------------------------------------------------------

SECONDS = float(os.environ.get("TIERED_FUZZ_SECONDS", "15"))
VALUES_OF_FIELDS = (
    *("orders", "work", "%RETRY%g", "broker-a", "g", "c1", "*", "a||b", "TAG", "SQL92", "a IS NULL"),
    *("x IN (", "", "true", "AVG", "UPPER", "0", "1", "4", "7", "31", "-1", "4096", "9" * 18, "9" * 40),
)  # fmt: skip
NAMES_OF_FIELDS = (*FIELDS, "clientId", "index", "count", "msgId", "producerGroup", "isForce")


def random_request(rng: random.Random) -> bytes:
    """A request of any kind with any fields, mostly whole; now and then some bytes of it are others, or missing."""
    names = rng.sample(NAMES_OF_FIELDS, rng.randrange(len(NAMES_OF_FIELDS)))
    said = {name: rng.choice(VALUES_OF_FIELDS) for name in names}
    if rng.random() < 0.9:
        said["suspendTimeoutMillis"] = "5"
    body = b""
    if rng.random() < 0.6:
        values = [*VALUES_OF_FIELDS, 5, None, [], {}, [{"topic": "orders", "queueId": 1}]]
        members: dict[str, Any] = {
            rng.choice(MEMBERS): rng.choice(values) for _ in range(rng.randrange(6))
        }
        if rng.random() < 0.5:
            one = {"groupName": "g", "messageModel": "CLUSTERING", **members}
            members = {"clientID": "c1", "consumerDataSet": [one], **members}
        body = json.dumps(members).encode()
    form = rng.choice([Form.JSON, Form.ROCKETMQ])
    code = rng.choice([*ASKED, *(code for code in ASKED if code < 1 << 15)])
    if form is Form.ROCKETMQ and code >= 1 << 15:
        form = Form.JSON
    asked = Command(
        code,
        rng.randrange(1 << 31),
        rng.choice([0, 0, 0, 1, 2, 3]),
        fields=said,
        body=(body,),
        form=form,
    )
    frame = bytearray(b"".join(encode(asked)))
    if rng.random() < 0.4:
        for _ in range(rng.choice([1, 1, 2, 8])):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
    if rng.random() < 0.1:
        del frame[rng.randrange(len(frame)) :]
    return bytes(frame)


@pytest.mark.slow
@pytest.mark.timeout(int(SECONDS) + 120)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_whatever_bytes_come_the_mount_goes_on(
    captured_tier: Callable[[str], tuple[Path, str]], tmp_path: Path
):
    """No crash, no hang, no defect, and memory that ends; for ``TIERED_FUZZ_SECONDS``, from a seed that is printed."""
    seed = random.SystemRandom().getrandbits(32)
    rng, sent, probes = random.Random(seed), 0, 0
    _, url = captured_tier("s10-consumers")
    options = ("--listen", "127.0.0.1:0", "--no-state", "--memory", "64MiB")
    with MountProcess(url, tmp_path / "log", *options) as mount, ExitStack() as held:
        probe = held.enter_context(Client(mount.address))
        host, _, port = mount.address.rpartition(":")
        probe.socket.settimeout(10)
        before_bytes, until_s = resident_bytes(mount.process.pid), time.monotonic() + SECONDS
        while time.monotonic() < until_s:
            with socket.create_connection((host, int(port)), 10) as connection:
                connection.settimeout(0.002)
                with suppress(ConnectionError, TimeoutError):
                    for _ in range(rng.randrange(1, 60)):
                        connection.sendall(random_request(rng))
                        sent += 1
                        with suppress(TimeoutError):
                            if not connection.recv(1 << 16):
                                break
            answer = probe.ask(protocol.GET_MAX_OFFSET, topic="work", queueId=0)
            assert answer.fields == {"offset": "33"}, seed
            probes += 1
            assert mount.process.poll() is None, seed
            assert "failed" not in mount.text, (seed, mount.text[-3000:])
        more_bytes = resident_bytes(mount.process.pid) - before_bytes
        print(f"{sent} requests, seed {seed}: {more_bytes / 2**20:.1f} MiB more")
        assert more_bytes < 200 << 20, seed
