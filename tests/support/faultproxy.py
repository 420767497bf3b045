"""A proxy that makes an S3 server fail at the right moment: plain HTTP, one thread per connection.

``proxy.add("lost", method="PUT")`` breaks the next PUT; ``proxy.requests`` tells what came. ``StormProxy`` breaks a share of
all requests, chosen by a seed.

====== ==========================================================================================
kind   what happens
====== ==========================================================================================
status answered here with ``status`` and ``code``; the server sees nothing
said   answered here with ``status`` and ``body``; the server sees nothing
reset  the connection is reset once the request is read; the server sees nothing
half   the connection is reset in the middle of the request's body; the server sees nothing
lost   the server carries it out; its answer is dropped and the connection reset
late   the server carries it out; its answer waits ``seconds``
held   it waits ``seconds``, then the server carries it out, also when nobody waits for the answer any more
cut    half of the answer's body comes, then the connection ends
torn   half of the answer's body comes, then the connection is reset
slow   half of the answer's body comes, the rest after ``seconds``
twice  the server carries it out, and then once more: the second answer comes
====== ==========================================================================================
"""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

_HOP = {"connection", "transfer-encoding", "content-length", "server", "date"}


@dataclass
class Rule:
    """One way to fail, for the next ``times`` requests that match."""

    kind: str
    method: str
    path: str = ""
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    body: bytes = b""
    seconds: float = 0.0


class FaultProxy:
    """Serves on ``url`` while the ``with`` block runs."""

    def __init__(self, upstream_url: str) -> None:
        self.upstream = urlsplit(upstream_url)
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.rules: list[Rule] = []
        self.stopping = threading.Event()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, kind: str, method: str = "PUT", **arguments: object) -> None:
        """Add a rule; the first that matches and is not used up counts."""
        self.rules.append(Rule(kind, method, **arguments))  # type: ignore[arg-type]

    def take(self, method: str, path: str) -> Rule | None:
        """The rule for a request, which is used up by one."""
        for rule in self.rules:
            if rule.times > 0 and rule.method == method and rule.path in path:
                rule.times -= 1
                return rule
        return None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class StormProxy(FaultProxy):
    """Breaks a share of all requests, in every way, until it is told to stop."""

    KINDS: Mapping[str, tuple[str, ...]] = {
        "PUT": ("status", "reset", "half", "lost", "late"),
        "GET": ("status", "reset", "cut", "late"),
        "DELETE": ("status", "lost"),
        "HEAD": ("status", "reset"),
    }

    def __init__(self, upstream_url: str, *, seed: int, share: float) -> None:
        """A storm. A seed gives the same faults; which request meets which depends on their order."""
        super().__init__(upstream_url)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._share = share
        self.broken: Counter[str] = Counter()

    def take(self, method: str, path: str) -> Rule | None:
        with self._lock:
            if self._share <= self._rng.random():
                return super().take(method, path)
            kind = self._rng.choice(self.KINDS.get(method, ("status",)))
            self.broken[kind] += 1
            return Rule(kind, method, seconds=self._rng.uniform(0.0, 0.3))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy

    def handle_any(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        self.owner.requests.append(f"{self.command} {self.path}")
        self.owner.headers.append({name.lower(): value for name, value in self.headers.items()})
        rule = self.owner.take(self.command, self.path)
        kind = rule.kind if rule else ""
        body = self.rfile.read(size // 2 if kind == "half" else size)
        if kind in {"reset", "half"}:
            self._reset()
        elif rule and kind == "status":
            text = f"<Error><Code>{rule.code}</Code></Error>".encode()
            self._send(rule.status, {}, text, len(text))
        elif rule and kind == "said":
            self._send(rule.status, {}, rule.body, len(rule.body))
        else:
            if rule and kind == "held":
                self.owner.stopping.wait(rule.seconds)
            answer = self._answer(body)
            self._pass_on(self._answer(body) if kind == "twice" else answer, rule)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # noqa: N815 (so the base class calls them)

    def _answer(self, body: bytes) -> tuple[int, dict[str, str], bytes, int]:
        """Status, headers, body and length of what the server says."""
        upstream = self.owner.upstream
        assert upstream.hostname is not None
        connection = http.client.HTTPConnection(upstream.hostname, upstream.port, timeout=60)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
        return answer.status, headers, data, int(answer.getheader("Content-Length") or len(data))

    def _pass_on(self, answer: tuple[int, dict[str, str], bytes, int], rule: Rule | None) -> None:
        status, headers, data, size = answer
        if rule and rule.kind == "lost":
            self._reset()
            return
        if rule and rule.kind == "late":
            self.owner.stopping.wait(rule.seconds)
        if rule and rule.kind == "cut":
            data, self.close_connection = data[: len(data) // 2], True
        if rule and rule.kind in {"torn", "slow"}:
            self._send(status, headers, data[: len(data) // 2], size)
            self.wfile.flush()
            if rule.kind == "torn":
                self._reset()
                return
            self.owner.stopping.wait(rule.seconds)
            self.wfile.write(data[len(data) // 2 :])
            return
        self._send(status, headers, data, size)

    def _send(self, status: int, headers: dict[str, str], data: bytes, size: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != http.client.NO_CONTENT:
            self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _reset(self) -> None:
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True  # the client has given up

    def log_message(self, *args: object) -> None:
        pass
