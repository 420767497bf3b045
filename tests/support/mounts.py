"""A mount in this process, and a client of its own that speaks the protocol over a socket."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from support.captures import unpack
from support.command_line import command, environment, here
from support.waiting import until

from tiered.format.record import decode_record
from tiered.format.remoting import (
    ONEWAY,
    SIZE_BYTES,
    Command,
    Form,
    decode,
    encode,
    frame_size,
)
from tiered.mount import protocol
from tiered.mount.acl import ACCESS_KEY, SIGNATURE, sign
from tiered.mount.mount import Mount, MountSettings
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator, Sequence

    from tiered.format.record import Record

__all__ = [
    "Client",
    "Compacted",
    "MountProcess",
    "Mounted",
    "mounted",
    "records",
    "tier_of",
]
ANSWER_S = 30.0


@dataclass
class Client:
    """A connection. What a server says of itself, such as that consumers changed, is put into ``told``."""

    address: str
    form: Form = Form.ROCKETMQ
    told: list[Command] = field(default_factory=list)
    access_key: str = ""  # empty: requests are not signed
    secret: str = ""

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), ANSWER_S)
        self._opaque = count(1)

    def send(self, code: int, body: object = None, *, flag: int = 0, **fields: object) -> int:
        """Send a request; its number."""
        request = self.request(code, body, flag=flag, **fields)
        self.socket.sendall(b"".join(encode(request)))
        return request.opaque

    def request(
        self, code: int, body: object = None, *, flag: int = 0, **fields: object
    ) -> Command:
        """A request, signed if we have an access key."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""
        said = {name: str(value) for name, value in fields.items()}
        if self.access_key:
            said[ACCESS_KEY] = self.access_key
            said[SIGNATURE] = sign(said, [data], self.secret)
        return Command(
            code,
            next(self._opaque),
            flag,
            fields=said,
            body=(data,) if data else (),
            form=self.form,
        )

    def tell(self, code: int, body: object = None, **fields: object) -> None:
        """Send a request that wants no answer."""
        self.send(code, body, flag=ONEWAY, **fields)

    def ask(self, code: int, body: object = None, **fields: object) -> Command:
        """A request and its answer."""
        return self.answer(self.send(code, body, **fields))

    def answer(self, opaque: int) -> Command:
        """The answer to a request that was sent."""
        while True:
            found = self.receive()
            if found.is_answer:
                assert found.opaque == opaque
                return found
            self.told.append(found)

    def receive(self) -> Command:
        """What comes next."""
        return decode(self._read(frame_size(self._read(SIZE_BYTES))))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.socket.recv(size - len(data))
            if not chunk:
                raise ConnectionError(f"ended after {len(data)} of {size} bytes")
            data += chunk
        return data

    def is_ended(self) -> bool:
        """Whether the server ends the connection."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def pull(self, topic: str, queue_id: int, offset: int, **fields: object) -> Command:
        """Pull as a pull consumer does that brings its subscription along."""
        return self.answer(self.send_pull(topic, queue_id, offset, **fields))

    def send_pull(self, topic: str, queue_id: int, offset: int, **fields: object) -> int:
        """The same, without waiting for the answer."""
        asked = {
            "consumerGroup": "g",
            "topic": topic,
            "queueId": queue_id,
            "queueOffset": offset,
            "maxMsgNums": 32,
            "sysFlag": 4,
            "commitOffset": 0,
            "suspendTimeoutMillis": 20_000,
            "subscription": "*",
            "subVersion": 0,
        }
        return self.send(protocol.PULL_MESSAGE, **(asked | fields))

    def heartbeat(self, client_id: str, group: str, *topics: str, **more: Any) -> Command:
        """Say that there is a consumer."""
        subscriptions = [
            {"topic": topic, "subString": "*", "subVersion": 1, "expressionType": "TAG"} | more
            for topic in topics
        ]
        consumer = {
            "groupName": group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet": subscriptions,
        }
        return self.ask(protocol.HEART_BEAT, {"clientID": client_id, "consumerDataSet": [consumer]})

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Mounted:
    """A mount that serves, in a thread."""

    mount: Mount
    thread: threading.Thread
    errors: list[BaseException]

    def client(
        self, form: Form = Form.ROCKETMQ, *, access_key: str = "", secret: str = ""
    ) -> Client:
        return Client(self.mount.address, form, access_key=access_key, secret=secret)

    def stop(self) -> None:
        """Drain."""
        self.mount.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def mounted(url: str, **settings: Any) -> Iterator[Mounted]:
    """Mount a tier in this process, until the end of the block."""
    defaults = {"listen": ("127.0.0.1", 0), "refresh_s": 0.2, "readers": 4}
    mount = Mount.open(url, MountSettings(**(defaults | settings)))
    ready, errors = threading.Event(), []

    def run() -> None:
        try:
            mount.run(lambda _mount: ready.set())
        except BaseException as error:  # noqa: BLE001 - told to the test
            errors.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="mount")
    thread.start()
    try:
        assert ready.wait(60)
        if errors:
            raise errors[0]
        yield Mounted(mount, thread, errors)
    finally:
        mount.stop()
        thread.join(60)
        mount.close()
        assert not thread.is_alive()


def tier_of(name: str, folder: Path, *options: str) -> tuple[Path, str]:
    """A captured store and a tier of it."""
    store, url = unpack(name, folder), f"file://{folder}/tier-{name}"
    here("attach", store, "--to", url, "--once", *options).good()
    return store, url


@dataclass(frozen=True)
class Compacted:
    """A tier whose topic ``prices`` was compacted.

    Attributes:
        url: Of the tier.
        places: Physical offset of each message that is left, by queue offset.
    """

    url: str
    places: dict[int, int]

    @classmethod
    def make(cls, folder: Path, keys: Sequence[str]) -> Self:
        """Of messages with these keys, of each of which the newest is left."""
        rows = [
            {"topic": "prices", "queue_id": 0, "keys": key, "body_base64": "eA=="} for key in keys
        ]
        store, lines, url = folder / "store", folder / "lines", f"file://{folder}/tier"
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        here("store", "create", store).good()
        here("store", "put", store, lines).good()
        here("attach", store, "--to", url, "--once", "--seal").good()
        here("compact", url, "--topic", "prices", "--dirty-ratio", "0", "--apply", "-").good()
        left = here("cat", url, "prices").good().rows
        return cls(url, {row["queue_offset"]: row["physical_offset"] for row in left})


def records(body: bytes) -> list[Record]:
    """The records of a pull's answer, one behind the other."""
    found, at = [], 0
    while at < len(body):
        found.append(decode_record(body, at))
        at += found[-1].size
    return found


class MountProcess:
    """``tiered mount`` as a process of its own, from the line that says that it serves."""

    def __init__(self, url: str, log: Path, *options: str | Path) -> None:
        self._log = log
        with log.open("ab") as complaints:
            self.process = subprocess.Popen(
                command(("mount", url, "--json", *options)),
                stdout=subprocess.PIPE,
                stderr=complaints,
                env=environment(),
            )
        try:
            until(self._is_serving, f"serving ({log})")
        except BaseException:
            self.close()
            raise

    def _is_serving(self) -> bool:
        assert self.process.poll() is None, self.text
        return "tiered: serving " in self.text

    @property
    def text(self) -> str:
        """What it said to people."""
        return self._log.read_text("utf-8")

    @property
    def address(self) -> str:
        found = re.findall(r"^tiered: serving .* at (\S+): ", self.text, re.MULTILINE)
        return str(found[-1])

    def end(self, how: signal.Signals) -> tuple[int, Any]:
        """Exit code, and what it printed."""
        self.process.send_signal(how)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, json.loads(out) if out else None

    def close(self) -> None:
        """Kill what still runs."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- what it takes --------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """Processor time of a process."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def wakeups(pid: int) -> int:
    """How often the threads of a process have waited for something: what a loop that polls cannot hide."""
    texts = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/status")]
    lines = [line for text in texts for line in text.splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


@contextlib.contextmanager
def parked(
    mount: MountProcess, topic: str, *, clients: int, each: int, queues: int
) -> Iterator[tuple[int, int]]:
    """Hold pulls at the end of queues; memory that took, and wakeups in two seconds while nothing comes."""
    pid = mount.process.pid
    with contextlib.ExitStack() as held:
        probe = held.enter_context(Client(mount.address))
        ends = {
            queue: int(
                probe.ask(protocol.GET_MAX_OFFSET, topic=topic, queueId=queue).fields["offset"]
            )
            for queue in range(queues)
        }
        probe.pull(topic, 0, 0)
        before_bytes = resident_bytes(pid)
        connections = [held.enter_context(Client(mount.address)) for _ in range(clients)]
        for number, one in enumerate(connections):
            for more in range(each):
                queue = (number * each + more) % queues
                one.send_pull(topic, queue, ends[queue], sysFlag=4 | 2, suspendTimeoutMillis=30_000)
        for one in connections:  # behind the held ones: they have all been taken
            one.send(protocol.GET_MIN_OFFSET, topic=topic, queueId=0)
        for one in connections:
            assert one.receive().code == Code.SUCCESS
        before = wakeups(pid)
        time.sleep(2.0)
        yield resident_bytes(pid) - before_bytes, wakeups(pid) - before


class Growing:
    """A store of our own and its tier."""

    def __init__(self, folder: Path) -> None:
        self.store, self._lines = folder / "store", folder / "lines"
        self.url = f"file://{folder}/tier"
        here("store", "create", self.store).good()

    def put(self, topic: str, *bodies: str) -> None:
        """Append messages, and tier them."""
        rows = [
            {"topic": topic, "queue_id": 0, "body_base64": base64.b64encode(body.encode()).decode()}
            for body in bodies
        ]
        self._lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        here("store", "put", self.store, self._lines).good()
        here("attach", self.store, "--to", self.url, "--once").good()


def page(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
