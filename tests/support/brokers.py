"""Brokers and a name server that speak the protocol as far as a producer needs, and can refuse, break off, or forget."""

from __future__ import annotations

import json
import socketserver
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from tiered.format.record import Record, body_crc, encode_record
from tiered.format.remoting import ANSWER, SIZE_BYTES, Command, decode, encode, frame_size
from tiered.local.catalog import WHEEL_TOPIC
from timer.broker_target import Ask

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = tuple[int, str, dict[str, Any] | bytes]


class Served:
    """A server on a port of its own; what ``answer`` says is sent, and None ends the connection."""

    version = 479

    def __init__(self, answer: Callable[[Command], Answer | None]) -> None:
        served = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    while size := self.rfile.read(SIZE_BYTES):
                        request = decode(self.rfile.read(frame_size(size)))
                        with served.lock:
                            found = answer(request)
                        if found is None:
                            return
                        self.wfile.write(b"".join(encode(served.as_answer(request, *found))))

        self.lock = threading.Lock()
        self.is_up = True
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def as_answer(self, request: Command, code: int, remark: str, body: dict[str, Any] | bytes) -> Command:  # fmt: skip
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Command(
            code, request.opaque, ANSWER, remark, body=(data,), version=self.version, form=request.form
        )  # fmt: skip

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@dataclass
class FakeBroker:
    """One broker.

    Attributes:
        name: Of it.
        got: Records of the messages that it stored, in order.
        codes: How the next sends are answered, instead of being stored: code and remark.
        swallows: Of so many sends the message is stored, and the connection ended without an answer.
        loses: Likewise, but it is not stored.
        freezes: Of so many sends nothing is answered, and the message is stored when something else has been answered.
    """

    name: str
    got: list[Record] = field(default_factory=list)
    codes: list[tuple[int, str]] = field(default_factory=list)
    swallows: int = 0
    loses: int = 0
    freezes: int = 0
    queries: int = 0

    def __post_init__(self) -> None:
        self.server = Served(self._answer)
        self._frozen: list[Record] = []

    def _answer(self, request: Command) -> Answer | None:
        if request.code != Ask.SEND_MESSAGE_V2:
            answer = self._question(request)
            self.got += self._frozen
            self._frozen.clear()
            return answer
        if self.codes:
            return (*self.codes.pop(0), b"")
        if self.freezes:
            self.freezes -= 1
            self._frozen.append(stored(request))
            return None
        if self.loses:
            self.loses -= 1
            return None
        self.got.append(stored(request))
        if self.swallows:
            self.swallows -= 1
            return None
        return 0, "", b""

    def _question(self, request: Command) -> Answer:
        if request.code == Ask.GET_BROKER_RUNTIME_INFO:
            return 0, "", {"table": {}}
        assert request.code == Ask.QUERY_MESSAGE
        return self._query(request.fields["topic"], request.fields["key"])

    def _query(self, topic: str, key: str) -> Answer:
        self.queries += 1
        found = [
            one for one in self.got if one.topic == topic and one.properties["UNIQ_KEY"] == key
        ]
        body = b"".join(map(encode_record, found))
        return (0, "", body) if body else (22, "not found", b"")


def stored(request: Command) -> Record:
    """What a broker makes of a send: it stores timers under the wheel's topic."""
    said = request.fields
    properties, body = said["i"].encode(), request.text()
    record = Record(
        size=0,
        version=1,
        body_crc=body_crc(body),
        queue_id=int(said["e"]),
        flag=int(said["h"]),
        queue_offset=0,
        physical_offset=0,
        sys_flag=int(said["f"]),
        born_timestamp_ms=int(said["g"]),
        born_host="10.0.0.1:4000",
        store_timestamp_ms=1,
        store_host="10.0.0.2:10911",
        reconsume_times=int(said["j"]),
        prepared_transaction_offset=0,
        body=body,
        topic=WHEEL_TOPIC,
        properties_raw=properties + f"REAL_TOPIC\x01{said['b']}\x02".encode(),
    )
    size = 88 + len(body) + 1 + len(record.topic) + 2 + len(record.properties_raw)
    return replace(record, size=size)


class FakeCluster:
    """A name server and brokers.

    Attributes:
        brokers: By name.
        topics: Names of the brokers that have each; others are nowhere.
        hidden: Names of brokers that the name server does not know at the moment.
        clients: Closed before the servers are.
    """

    def __init__(self, *names: str, topics: dict[str, list[str]] | None = None) -> None:
        self.brokers = {name: FakeBroker(name) for name in names}
        self.topics = topics or {"orders": list(names)}
        self.hidden: set[str] = set()
        self.clients = ExitStack()
        self.server = Served(self._answer)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.server.port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clients.close()
        for one in (self.server, *(broker.server for broker in self.brokers.values())):
            one.end()

    def _answer(self, request: Command) -> Answer:
        if request.code == Ask.GET_BROKER_CLUSTER_INFO:
            known = [name for name in self.brokers if name not in self.hidden]
            return 0, "", {"brokerAddrTable": {name: self._row(name) for name in known}}
        assert request.code == Ask.GET_ROUTEINFO_BY_TOPIC
        found = [n for n in self.topics.get(request.fields["topic"], ()) if n not in self.hidden]
        if not found:
            return 17, "no route", b""
        queues = [{"brokerName": n, "perm": 6, "writeQueueNums": 4} for n in found]
        return 0, "", {"queueDatas": queues, "brokerDatas": [self._row(n) for n in found]}

    def _row(self, name: str) -> dict[str, Any]:
        address = f"127.0.0.1:{self.brokers[name].server.port}"
        return {"brokerName": name, "cluster": "c", "brokerAddrs": {"0": address}}
