"""A real node of Kafka on a directory, its producers and consumers; it can be killed and started again.

Mark what uses it ``pytest.mark.java``, and take ``support.oracle.needs_java``. Versions other than 4.1.1 are built when
they are first used.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from support import oracle

if TYPE_CHECKING:
    from collections.abc import Iterable

ORACLE = Path(__file__).resolve().parents[1] / "oracle_kafka" / "oracle"
SEGMENT_BYTES = 16_384
SESSIONS = {"broker_session_timeout_ms": 3000, "broker_heartbeat_interval_ms": 500}
"""After a crash a node waits for the end of its last session."""
CALL_SECONDS_MAX = 240
Rows = list[dict[str, Any]]


class Node:
    """One node over one log directory. Its options are settings of a broker, with ``_`` for the dots.

    What its commands take are options of the oracle (``tests/oracle_kafka/README.md``); those that are given several
    times are a dict or a tuple.
    """

    def __init__(self, directory: Path, version: str = "4.1.1", **config: object) -> None:
        self.directory = directory
        self._log = directory.with_suffix(".log")
        self._environment = {**os.environ, "KAFKA_VERSION": version}
        self._config = {
            name.replace("_", "."): value for name, value in (SESSIONS | config).items()
        }
        self._port = next(oracle.free_ports())
        self._server: oracle.Server | None = None
        self._producers: list[Producer] = []
        small = "internal.segment.bytes" if version.startswith("4") else "segment.bytes"
        self.small_segments = {small: SEGMENT_BYTES, "retention.ms": -1}

    def start(self) -> None:
        """Start it and wait until it is ready."""
        words = ("serve", "--dir", str(self.directory), *self._words(config=self._config))
        self._server = oracle.Server(
            self._log, *words, program=ORACLE, environment=self._environment
        )
        self._server.wait_ready()

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def kill(self) -> None:
        """A crash. Its producers live, and go on when it is there again."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """A clean stop."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._server is not None:
            self._server.end(how)
            self._server = None

    def close(self) -> None:
        """Kill it and its producers, as far as they still run."""
        for producer in self._producers:
            producer.close()
        self.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, command: str, **options: object) -> Rows:
        """A command to its end; what it prints."""
        done = subprocess.run(
            [ORACLE, command, *self._words(**options)],
            capture_output=True,
            timeout=CALL_SECONDS_MAX,
            check=False,
            env=self._environment,
        )
        assert done.returncode == 0, done.stderr[-2000:].decode()
        return [json.loads(line) for line in done.stdout.split(b"\n")[:-1]]

    def create(self, topic: str, partitions: int = 1, **config: object) -> None:
        """A topic of small segments that keeps what it gets."""
        named = {name.replace("_", "."): value for name, value in config.items()}
        self.call("create", topic=topic, partitions=partitions, config=self.small_segments | named)

    def produce(self, topic: str, **options: object) -> None:
        """Send records, and wait until all are acknowledged."""
        self.call("produce", topic=topic, **options)

    def producing(self, topic: str, **options: object) -> Producer:
        """Begin to send records."""
        log = self._log.with_name(f"producer-{len(self._producers)}.log")
        words = ("produce", *self._words(topic=topic, **options))
        producer = Producer(words, log, self._environment)
        self._producers.append(producer)
        return producer

    def clean(self, *topics: str) -> None:
        """Let the cleaner work on compacted topics from now on; returns when it has been through them once."""
        self.call("clean", dir=self.directory, topic=topics)

    def consume(self, *topics: str, isolation: str = "read_uncommitted") -> Rows:
        """What a consumer gets, from the log start to the end that it may see."""
        return self.call("consume", topic=topics, isolation=isolation)

    def offsets(self) -> dict[tuple[str, int], dict[str, Any]]:
        """What the node says of each partition: log start, high watermark, last stable offset."""
        return {(row["topic"], row["partition"]): row for row in self.call("offsets")}

    def _words(self, **options: object) -> list[str]:
        words = ["--port", str(self._port)]
        for name, value in options.items():
            for one in _each(value):
                words += [f"--{name.replace('_', '-')}", one]
        return words


class Producer:
    """``oracle produce`` in a child process, which outlives a crash of its node."""

    def __init__(self, words: Iterable[str], log: Path, environment: dict[str, str]) -> None:
        self._log, self._acks = log, log.with_suffix(".jsonl")
        with log.open("wb") as complaints:
            self._process = subprocess.Popen(
                [ORACLE, *words, "--acks-file", str(self._acks)],
                stderr=complaints,
                env=environment,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def acked(self) -> Rows:
        """What it was told so far; a line that is being written does not count."""
        lines = self._acks.read_bytes().split(b"\n")[:-1] if self._acks.exists() else []
        return [json.loads(line) for line in lines]

    def ended(self, *, may_fail: bool = False) -> Rows:
        """Wait for its end, a good one unless it may be told that it is too late; what it was told."""
        try:
            code = self._process.wait(CALL_SECONDS_MAX)
        finally:
            self.close()
        assert code == 0 or may_fail, self._log.read_text()[-2000:]
        return self.acked()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _each(value: object) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}={one}" for name, one in value.items()]
    if isinstance(value, tuple):
        return [str(one) for one in value]
    return [str(value)]
