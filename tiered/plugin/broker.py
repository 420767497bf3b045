"""Asks a running broker for the end of its log, over its own protocol.

Request: ``GET_BROKER_RUNTIME_INFO``; the answer's body is JSON with ``commitLogMaxOffset``. A frame:

====== ========== ====================================================
offset bytes      field
====== ========== ====================================================
0      4          bytes behind this field
4      1          form of the header: 0 JSON
5      3          bytes of the header
8      header     JSON object: code, language, version, opaque, flag
..     rest       body
====== ========== ====================================================

A broker that does not answer is asked again after a second at the earliest and is no error: what only it could confirm
keeps waiting. Nothing is kept open between questions. For one thread at a time (the local store's lock sees to it).
"""

from __future__ import annotations

import json
import logging
import socket
from struct import Struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered.clock import Clock

_LOG = logging.getLogger("tiered.broker")
_LENGTHS = Struct(">II")
GET_BROKER_RUNTIME_INFO = 28
VERSION = 479
"""Ordinal of the protocol's version 5.3.3."""
ASK_AGAIN_S = 1.0
TIMEOUT_S = 2.0
_FRAME_BYTES_MAX = 16 * 1024 * 1024


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
        """Physical offset behind the last record of the broker's log, as last heard; 0 before it ever answered."""
        now_s = self._clock.monotonic_s()
        if now_s - self._asked_s < ASK_AGAIN_S:
            return self._known
        self._asked_s = now_s
        try:
            self._known = ask_max_offset(self._host, self._port)
            self._has_warned = False
        except (OSError, ValueError) as error:
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
        connection.sendall(_request(GET_BROKER_RUNTIME_INFO))
        header, body = _answer(connection)
    if header.get("code") != 0:
        raise ValueError(f"it refused with code {header.get('code')}: {header.get('remark')}")
    table = json.loads(body).get("table", {})
    if "commitLogMaxOffset" not in table:
        raise ValueError("its answer has no commitLogMaxOffset")
    return int(table["commitLogMaxOffset"])


def _request(code: int) -> bytes:
    header = json.dumps(
        {
            "code": code,
            "language": "PYTHON",
            "version": VERSION,
            "opaque": 1,
            "flag": 0,
            "extFields": {},
            "serializeTypeCurrentRPC": "JSON",
        }
    ).encode()
    return _LENGTHS.pack(4 + len(header), len(header)) + header  # form 0 is the highest byte


def _answer(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    size, header_size = _LENGTHS.unpack(_receive(connection, _LENGTHS.size))
    if not 4 + header_size <= size <= _FRAME_BYTES_MAX or header_size >> 24:
        raise ValueError(f"its answer is no JSON frame ({size}, {header_size:#x})")
    rest = _receive(connection, size - 4)
    header = json.loads(rest[:header_size])
    return dict(header), rest[header_size:]


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
