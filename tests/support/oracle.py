"""Real brokers, name servers and clients for tests, each started and ended by its own test.

Mark what uses it ``pytest.mark.java``, and take ``needs_java``, which skips without a JDK and Maven (and fails when
``TIERED_REQUIRE=1``).
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from support.command_line import environment

if TYPE_CHECKING:
    from collections.abc import Iterator

ORACLE = Path(__file__).resolve().parents[1] / "oracle" / "oracle"
CLUSTER, BROKER = "cluster-a", "broker-a"
READY_SECONDS_MAX = 120
STOP_SECONDS_MAX = 60
SMALL = {"mappedFileSizeCommitLog": 262_144, "mappedFileSizeConsumeQueue": 2_000}
"""File sizes of the captured stores, in bytes."""

needs_java = pytest.mark.skipif(
    os.environ.get("TIERED_REQUIRE") != "1" and not (shutil.which("javac") and shutil.which("mvn")),
    reason="no JDK with Maven",
)


def free_ports() -> Iterator[int]:
    """Ports P below the ephemeral range with P-2, P and P+1 free: a broker takes all three.

    It takes them seconds after this has looked, so what one process is given no other must be, and nobody the same one soon
    again: each process has a block of its own, locked as long as it lives, and goes round in it.
    """
    while True:
        port = _block() + next(_NEXT) % (_BLOCK_PORTS // 3) * 3 + 2
        try:
            with ExitStack() as held:
                for beside in (port - 2, port, port + 1):
                    probe = held.enter_context(socket.socket())
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", beside))
        except OSError:
            continue
        yield port


_FIRST_PORT, _BLOCK_PORTS, _BLOCKS = 20_000, 240, 50
_NEXT = itertools.count()


@cache
def _block() -> int:
    """The first port of a block that no other living process has."""
    for number in range(_BLOCKS):
        path = Path(tempfile.gettempdir()) / f"tiered-tests-ports-{number}.lock"
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        return (
            _FIRST_PORT + number * _BLOCK_PORTS
        )  # (the descriptor stays open, and with it the lock)
    raise AssertionError("all blocks of ports are taken")


class Server:
    """One server of an oracle in the foreground of a child process."""

    def __init__(
        self,
        log: Path,
        *arguments: str,
        program: Path = ORACLE,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._log = log
        self._ready = threading.Event()
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [program, *arguments], stdout=subprocess.PIPE, stderr=out, env=environment
            )
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Its process: the script becomes it."""
        return self._process.pid

    def wait_ready(self) -> None:
        if not self._ready.wait(READY_SECONDS_MAX):
            self.end(signal.SIGKILL)
            raise AssertionError(f"not ready: {self._log.read_text()[-2000:]}")

    def end(self, how: signal.Signals) -> None:
        self._process.send_signal(how)
        try:
            self._process.wait(STOP_SECONDS_MAX)
        finally:
            self._process.kill()
            self._process.wait()
            self._listener.join()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"READY"):
                self._ready.set()


def run(*arguments: str, timeout_s: float = 240) -> list[dict[str, Any]]:
    """The JSON lines that a client command or a dump prints."""
    done = subprocess.run(
        [ORACLE, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


class Broker:
    """A name server and a broker on one store directory; the broker can be killed and started again."""

    def __init__(
        self, folder: Path, store: Path, *names: str, version: str = "5.5", **settings: object
    ) -> None:
        """``names``: further words for the name server; ``version``: of both, 4.9 or 5.5."""
        self.store = store
        self._of = ("client-4.9",) if version == "4.9" else ()
        self._names = names
        self._folder = folder
        self._settings = {**SMALL, **settings}
        ports = free_ports()
        self.address = f"127.0.0.1:{next(ports)}"
        self._port = next(ports)
        self._broker: Server | None = None
        self._start_names()

    def _start_names(self) -> None:
        words = (*self._of, "namesrv", "--port", self.address.split(":")[1], *self._names)
        self._name_server = Server(self._folder / "namesrv.log", *words)
        self._name_server.wait_ready()

    def restart_names(self) -> None:
        """Kill the name server and start it again: it knows nobody."""
        self._name_server.end(signal.SIGKILL)
        self._start_names()

    def start(self) -> None:
        """Start the broker and wait until it is ready."""
        options = [
            text for name, value in self._settings.items() for text in ("--set", f"{name}={value}")
        ]
        self._broker = Server(
            self._folder / "broker.log",
            *self._of,
            "broker",
            *("--store", str(self.store), "--namesrv", self.address, "--port", str(self._port)),
            *("--name", BROKER, "--cluster", CLUSTER),
            *options,
        )
        self._broker.wait_ready()

    @property
    def at(self) -> str:
        """The broker's address; ``address`` is the name server's."""
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The broker's process."""
        assert self._broker is not None
        return self._broker.pid

    def kill(self) -> None:
        """A crash."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """A clean stop: 10 to 17 seconds."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._broker is not None:
            self._broker.end(how)
            self._broker = None

    def close(self) -> None:
        """Kill what still runs."""
        self.kill()
        self._name_server.end(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def produce(self, topic: str, count: int, **options: object) -> list[dict[str, Any]]:
        """Send messages; one line for each acknowledged one. Options as of ``oracle produce``."""
        words = [
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        return run(
            "produce", "--namesrv", self.address, "--topic", topic, "--count", str(count), *words
        )

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        """What the broker says of a topic's queues: ``[min, max)`` of each."""
        lines = run("offsets", "--namesrv", self.address, "--topic", topic)
        return {row["queue_id"]: (row["min_offset"], row["max_offset"]) for row in lines}

    def delete_topic(self, topic: str) -> None:
        """Delete a topic, as an administrator does; returns when its queues are gone."""
        words = ("admin", "deleteTopic", "-n", self.address, "-c", CLUSTER, "-t", topic)
        done = subprocess.run(
            [ORACLE, *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert "success" in done.stdout, done.stdout + done.stderr
        folder = self.store / "consumequeue" / topic
        pause = threading.Event()
        for _ in range(600):
            if not folder.exists() or not any(folder.rglob("0*")):
                return
            pause.wait(0.1)
        raise AssertionError(f"{folder} is still there")


def dump(store: Path, *, may_break_off: bool = False) -> Iterator[str]:
    """The lines of ``oracle dump``; with ``may_break_off`` those before a record that Java cannot print."""
    done = subprocess.run(
        [ORACLE, "dump", str(store), "--cluster", CLUSTER, "--broker", BROKER],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 or (may_break_off and lines), done.stderr[-2000:]
    return iter(lines)


NOT_IN_TIME, TRIES = "RemotingTimeoutException", 12
"""Clients give a name server 1.5 s or so, which a busy machine may not meet, several times in a row."""


def admin(*words: str, version: str = "5.5") -> str:
    """What ``mqadmin`` prints; it ends well whatever it met, so the text tells."""
    command = "admin" if version == "5.5" else f"admin-{version}"
    for _ in range(TRIES):
        done = subprocess.run(
            [ORACLE, command, *words],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        text = done.stdout + done.stderr
        if NOT_IN_TIME not in text:
            break
    return text


class Consumer:
    """A client of 4.9 or 5.5 in a process of its own (``oracle client``)."""

    def __init__(self, version: str, out: Path, command: str, *words: str, java: str = "") -> None:
        self._out = out
        client = "client-4.9" if version == "4.9" else "client"
        with out.open("wb") as file, out.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [ORACLE, client, command, *words],
                stdout=file,
                stderr=log,
                env={**environment(), "ORACLE_JAVA_OPTS": java},
            )

    @property
    def messages(self) -> list[dict[str, Any]]:
        *lines, _ = self._out.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> list[dict[str, Any]]:
        """Wait for its end; what it got."""
        assert self.process.wait(240) == 0, self._out.with_suffix(".log").read_text()[-2000:]
        return self.messages

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
