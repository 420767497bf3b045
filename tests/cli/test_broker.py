"""The question to a broker, against a small server that speaks its protocol."""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from tiered.attach.broker import BrokerOffsets, ask_max_offset
from tiered.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.command_line import CommandLine


def frame(header: object, body: bytes) -> bytes:
    head = json.dumps(header).encode()
    return struct.pack(">II", 4 + len(head) + len(body), len(head)) + head + body


ANSWER = frame(
    {"code": 0, "flag": 1, "opaque": 1}, b'{"table":{"commitLogMaxOffset":"8796093339269"}}'
)


@contextmanager
def broker(*answers: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Answers one connection after another, in two pieces each."""
    asked: list[bytes] = []

    def serve() -> None:
        for answer in answers:
            connection, _ = server.accept()
            # Who asks may hang up after the first chunk, when that is bad enough.
            with connection, suppress(ConnectionError):
                asked.append(connection.recv(1 << 16))
                connection.sendall(answer[:5])
                connection.sendall(answer[5:])

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], asked
        thread.join(10)


def test_question_and_answer():
    with broker(ANSWER) as (port, asked):
        assert ask_max_offset("127.0.0.1", port) == 8_796_093_339_269
    size, header_size = struct.unpack_from(">II", asked[0])
    assert size == len(asked[0]) - 4
    header = json.loads(asked[0][8:])
    assert len(asked[0]) == 8 + header_size
    assert (header["code"], header["serializeTypeCurrentRPC"]) == (28, "JSON")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        ANSWER[:-3],
        frame({"code": 1, "remark": "no"}, b""),
        frame({"code": 0}, b'{"table":{}}'),
        frame({"code": 0}, b"no JSON"),
        struct.pack(">II", 1 << 30, 4),
        struct.pack(">II", 8, 1 << 24 | 4) + b"bina",
    ],
)
def test_a_bad_answer_is_told(answer: bytes):
    with broker(answer) as (port, _), pytest.raises((ValueError, OSError)):
        ask_max_offset("127.0.0.1", port)


def test_asked_at_most_once_a_second_and_a_silent_broker_is_no_error(
    caplog: pytest.LogCaptureFixture,
):
    """But what it said before does not count then: a broker that starts may have cut its log."""
    clock = ManualClock()
    with broker(ANSWER, frame({"code": 1}, b"")) as (port, asked):
        offsets = BrokerOffsets("127.0.0.1", port, clock)
        assert offsets.max_offset() == offsets.max_offset() == 8_796_093_339_269
        assert len(asked) == 1
        clock.advance(2)
        assert offsets.max_offset() == 0
        assert len(asked) == 2
        assert "does not answer" in caplog.text
    clock.advance(2)
    assert offsets.max_offset() == 0
    assert len(caplog.records) == 1


# -- its name --------------------------------------------------------------------------------------


def renamed(store: Path, *brokers: str) -> None:
    """Give a store the table of topics of a broker of 4.9: each broker's name is a topic, as after it was renamed."""
    made = {"orders": (4, 6), "prod": (16, 7), "prod_REPLY_TOPIC": (1, 6)}
    made |= dict.fromkeys(brokers, (1, 7))
    table = {
        name: {"topicName": name, "readQueueNums": queues, "writeQueueNums": queues, "perm": perm}
        for name, (queues, perm) in made.items()
    }
    path = store / "config" / "topics.json"
    path.write_text(json.dumps({"dataVersion": {}, "topicConfigTable": table}))
    path.with_name("topics.json.bak").unlink(missing_ok=True)


@pytest.fixture
def store(tiered: CommandLine, tmp_path: Path) -> Path:
    tiered.good("store", "create", tmp_path / "store", "--cluster", "prod")
    lines = tmp_path / "lines"
    lines.write_text(json.dumps({"topic": "orders", "queue_id": 0, "body_base64": "eA=="}) + "\n")
    tiered.good("store", "put", tmp_path / "store", lines)
    return tmp_path / "store"


def test_a_broker_of_4_9_is_found_by_the_topic_of_its_name(
    tiered: CommandLine, store: Path, tmp_path: Path
):
    renamed(store, "broker-7")
    words = ("attach", store, "--to", f"file://{tmp_path}/tier", "--once", "--json")
    for _ in range(2):
        done = tiered.good(*words)
        found = done.document
        assert (found["cluster"], found["broker"], found["named_by"]) == (
            *("prod", "broker-7"),
            "store",
        )
        assert "does not tell" not in done.err


def test_which_of_several_names_is_not_guessed(tiered: CommandLine, store: Path, tmp_path: Path):
    renamed(store, "broker-7", "broker-8")
    words = ("attach", store, "--to", f"file://{tmp_path}/tier", "--once", "--json")
    ran = tiered(*words)
    assert ran.code == 2
    assert "may be broker-7, broker-8" in ran.err
    assert not (tmp_path / "tier").exists() or not any((tmp_path / "tier").rglob("journal"))
    found = tiered.good(*words, "--broker", "broker-8").document
    assert (found["broker"], found["cluster"]) == ("broker-8", "prod")


def test_a_name_that_nobody_tells_is_said_to_be_none(
    tiered: CommandLine, store: Path, tmp_path: Path
):
    renamed(store)
    done = tiered.good("attach", store, "--to", f"file://{tmp_path}/tier", "--once", "--json")
    found = done.document
    assert (found["cluster"], found["broker"]) == ("prod", "broker")
    assert found["named_by"] == "default"
    assert "does not tell its broker's name and cluster: taken for prod/broker" in done.err
