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
            # Who asks may hang up after the first piece, when that is bad enough.
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
