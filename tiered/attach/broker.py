"""Asks a running broker for the end of its log, over its own protocol.

Request: ``GET_BROKER_RUNTIME_INFO``; the answer's body is JSON with ``commitLogMaxOffset``. Frames are those of
``tiered.format.remoting``.

A broker that does not answer is asked again after a second at the earliest and is no error: what only it could confirm
keeps waiting. Nothing is kept open between questions. For one thread at a time (the local store's lock sees to it).
"""

from __future__ import annotations

import json
import logging
import socket
from typing import TYPE_CHECKING

from tiered.format.remoting import SIZE_BYTES, Command, decode, encode, frame_size

if TYPE_CHECKING:
    from tiered.clock import Clock

_LOG = logging.getLogger("tiered.broker")
GET_BROKER_RUNTIME_INFO = 28
ASK_AGAIN_S = 1.0
TIMEOUT_S = 2.0


class BrokerOffsets:
    """Knows the end of a broker's log, at most a second old."""

    def __init__(self, host: str, port: int, clock: Clock) -> None:
        """Ask nothing yet."""
        self._host = host
        self._port = port
        self._clock = clock
        self._asked_s = float("-inf")
        self._known = 0
        self._has_warned = False

    def max_offset(self) -> int:
        """Physical offset behind the last record of the broker's log; 0 when it does not answer.

        What it said before does not count then: it may be starting, and have cut its log.
        """
        now_s = self._clock.monotonic_s()
        if now_s - self._asked_s < ASK_AGAIN_S:
            return self._known
        self._asked_s = now_s
        try:
            self._known = ask_max_offset(self._host, self._port)
            self._has_warned = False
        except (OSError, ValueError) as error:
            self._known = 0
            if not self._has_warned:
                _LOG.warning("broker %s:%d does not answer: %s", self._host, self._port, error)
            self._has_warned = True
        return self._known


def ask_max_offset(host: str, port: int, timeout_s: float = TIMEOUT_S) -> int:
    """One question, on a connection of its own.

    Raises:
        OSError: The broker cannot be reached, or did not answer in time.
        ValueError: Its answer is none.
    """
    with socket.create_connection((host, port), timeout_s) as connection:
        request = Command(GET_BROKER_RUNTIME_INFO, opaque=1, language="PYTHON")
        connection.sendall(b"".join(encode(request)))
        answer = decode(_receive(connection, frame_size(_receive(connection, SIZE_BYTES))))
    if answer.code:
        raise ValueError(f"it refused with code {answer.code}: {answer.remark}")
    table = json.loads(answer.text()).get("table", {})
    if "commitLogMaxOffset" not in table:
        raise ValueError("its answer has no commitLogMaxOffset")
    return int(table["commitLogMaxOffset"])


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    pieces: list[bytes] = []
    left = size_bytes
    while left:
        piece = connection.recv(min(left, 1 << 16))
        if not piece:
            raise ConnectionError(f"it ended the connection {left} bytes before the end")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
