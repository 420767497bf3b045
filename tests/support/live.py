"""A real broker under load with ``tiered attach`` beside it, and what the producers were told held against the tier."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from support import captures, command_line, oracle, tier_checks
from support.waiting import until

FRESHNESS_S = 0.5
LEVEL_SECONDS_MAX = 180.0
STOP_SECONDS_MAX = 180.0
SOME = 50
"""Acknowledged messages after which a load is surely under way."""
Told = list[dict[str, Any]]


class Producer:
    """``oracle produce`` in a child process: sends until it is told to end, or the broker goes away."""

    def __init__(self, address: str, topic: str, log: Path, **options: object) -> None:
        self._acked, self._log = log.with_suffix(".jsonl"), log
        words = [
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        with self._acked.open("wb") as out, log.open("wb") as complaints:
            self._process = subprocess.Popen(
                [oracle.ORACLE, "produce", "--namesrv", address, "--topic", topic, *words],
                stdout=out,
                stderr=complaints,
                start_new_session=True,
            )

    def acked(self) -> Told:
        """What it was told so far; a line that is being written does not count."""
        lines = self._acked.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]

    def wait_for(self, count: int) -> None:
        """Until so many messages were acknowledged."""
        until(lambda: len(self.acked()) >= count, f"{count} acknowledged messages")

    def ended(self, *codes: int) -> Told:
        """Wait for its end; what it was told."""
        try:
            code = self._process.wait(120)
        finally:
            self.close()
        assert code in codes, self._log.read_text()[-2000:]
        return self.acked()

    def close(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass
class Attach:
    """``tiered attach`` as a process that follows.

    Attributes:
        store: Directory; Kafka: or several.
        url: Of the tier.
        log: Where its stderr goes; several may share one.
    """

    store: Path | str
    url: str
    log: Path
    options: tuple[str, ...] = ("--freshness", str(FRESHNESS_S))
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> Self:
        with self.log.open("ab") as complaints:
            self._process = subprocess.Popen(
                command_line.command(
                    ("attach", self.store, "--to", self.url, "--json", *self.options)
                ),
                stdout=subprocess.PIPE,
                stderr=complaints,
                env=command_line.environment(),
            )
        return self

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> dict[str, Any]:
        """SIGTERM; it drains and ends well. What it says."""
        assert self.is_running, self.log.read_text()[-2000:]
        code, out = self._end(signal.SIGTERM)
        assert code == 0, self.log.read_text()[-2000:]
        document = json.loads(out)
        assert isinstance(document, dict)
        return document

    def kill(self) -> None:
        """A crash."""
        assert self.is_running, self.log.read_text()[-2000:]
        self._end(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP, and wait until each of its threads has stopped."""
        self.send(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        assert self.is_running, self.log.read_text()[-2000:]
        until(lambda: all(map(_has_stopped, tasks.iterdir())), "a stop")

    def ended(self, within_s: float = STOP_SECONDS_MAX) -> int:
        """Wait for its own end; the exit code."""
        assert self._process is not None
        self._process.communicate(timeout=within_s)
        return self._process.returncode

    def _end(self, how: signal.Signals) -> tuple[int, bytes]:
        assert self._process is not None
        self._process.send_signal(how)
        out, _ = self._process.communicate(timeout=STOP_SECONDS_MAX)
        return self._process.returncode, out

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def _has_stopped(task: Path) -> bool:
    """Whether a thread rests because of SIGSTOP (one that has just ended rests too)."""
    try:
        text = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] == "T"


def commits(url: str) -> dict[tuple[str, int], int]:
    """Commit offsets of a tier; none while there is no tier yet."""
    ran = command_line.here("status", url, "-o", "jsonl")
    if ran.code == 2:
        return {}
    return {(r["topic"], r["queue_id"]): r["commit_offset"] or 0 for r in ran.good().rows}


def wait_level(url: str, told: Told) -> float:
    """Until everything that was acknowledged is in the tier; the seconds it took."""
    ends: dict[tuple[str, int], int] = {}
    for row in told:
        queue = row["topic"], row["queue_id"]
        ends[queue] = max(ends.get(queue, 0), row["queue_offset"] + 1)

    def is_level() -> bool:
        found = commits(url)
        return all(found.get(queue, 0) >= end for queue, end in ends.items())

    return until(is_level, "all acknowledged messages in the tier", LEVEL_SECONDS_MAX)


def check_acknowledged(url: str, told: Told) -> None:
    """Every acknowledged message is in the tier once, in its place, in order, and as it was sent."""
    assert told
    for topic in {row["topic"] for row in told}:
        found = tier_checks.cat(url, topic)
        places = [(message["queue_id"], message["queue_offset"]) for message in found]
        for queue_id in {queue_id for queue_id, _ in places}:
            offsets = [offset for number, offset in places if number == queue_id]
            assert offsets == list(range(len(offsets)))
        ids = [message["msg_id"] for message in found]
        assert len(set(ids)) == len(ids)
        by_place = dict(zip(places, map(_as_told, found), strict=True))
        for row in told:
            if row["topic"] == topic:
                expected = {name: row[name] for name in _COMPARED}
                assert by_place[row["queue_id"], row["queue_offset"]] == expected


_COMPARED = ("msg_id", "offset_msg_id", "tags", "keys", "body_sha256")


def _as_told(message: dict[str, Any]) -> dict[str, Any]:
    body = b64decode(message["body_base64"])
    found = {name: message.get(name) for name in _COMPARED}
    return {**found, "body_sha256": hashlib.sha256(body).hexdigest()}


def check_against_java(url: str, store: Path) -> None:
    """The tier holds what Java finds in the store of the broker that was killed, field by field."""
    dump = captures.read_dump(oracle.dump(store))
    tier_checks.check_equal(url, dump)
    tier_checks.check_sound(url, store)
