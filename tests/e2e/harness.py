"""The program as a user runs it, captured stores on disk, and what Java read from them."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.__main__ import run
from tiered.cli.call import Surroundings
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

STORES = Path(__file__).parent.parent / "data" / "stores"
NAMES = tuple(sorted(path.name.removesuffix(".tar.gz") for path in STORES.glob("*.tar.gz")))
END_SECONDS_MAX = 120.0
Message = dict[str, Any]
SMALL = ("--bundle-size", "16KiB", "--buffer-size", "64KiB", "--segment-size", "64KiB")
"""Options of ``attach`` that make many parts and segments of a little data."""


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    arguments: tuple[str, ...]
    code: int
    out: bytes
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> str:
        """The one error line, without its beginning."""
        found = [line for line in self.err.splitlines() if line.startswith("tiered: error: ")]
        assert len(found) == 1, self
        assert "Traceback" not in self.err
        return found[0].removeprefix("tiered: error: ")

    def good(self) -> Ran:
        assert self.code == 0, self
        return self


def here(*arguments: str | Path) -> Ran:
    """Run a command line in this process; settings of this machine's user do not count."""
    words = tuple(map(str, arguments))
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words, Surroundings({"TIERED_ATTACH_NICE": "0"}))
        out.flush()
    buffer = out.detach()
    assert isinstance(buffer, io.BytesIO)
    return Ran(words, code, buffer.getvalue(), err.getvalue())


def command(arguments: Iterable[str | Path]) -> tuple[str, ...]:
    return (sys.executable, "-m", "tiered", *map(str, arguments))


def environment() -> dict[str, str]:
    """Of a child: this process's, without settings of ours."""
    return {name: text for name, text in os.environ.items() if not name.startswith("TIERED_")}


def program(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Ran:
    """Run a command line as a process of its own, to its end."""
    done = subprocess.run(
        command(arguments),
        capture_output=True,
        env=environment() | dict(env or {}),
        timeout=END_SECONDS_MAX,
        check=False,
    )
    words = tuple(map(str, arguments))
    return Ran(words, done.returncode, done.stdout, done.stderr.decode())


def until(what: Callable[[], bool], why: str, seconds_max: float = 180.0) -> float:
    """Wait until something holds; the seconds it took."""
    began_s = time.monotonic()
    while not what():
        assert time.monotonic() < began_s + seconds_max, f"{why}: not after {seconds_max} s"
        time.sleep(0.05)
    return time.monotonic() - began_s


# -- captured stores ------------------------------------------------------------------------------


def unpack(name: str, folder: Path) -> Path:
    """A fresh copy of a captured store, file times kept."""
    with tarfile.open(STORES / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@dataclass(frozen=True)
class Dump:
    """What Java found, system topics left out.

    Attributes:
        store: The line ``store``.
        bounds: [min, max) of each queue.
        messages: By topic, in order of queue and queue offset, with the fields of ``cat`` but ``log_offset``.
    """

    store: Message
    bounds: Mapping[MessageQueue, tuple[int, int]]
    messages: Mapping[str, list[Message]]

    @property
    def count(self) -> int:
        return sum(map(len, self.messages.values()))


@cache
def captured(name: str) -> Dump:
    """The dump of a captured store."""
    with gzip.open(STORES / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return read_dump(lines)


def read_dump(lines: Iterable[str]) -> Dump:
    """Take in the lines of ``oracle dump``; of a record listed by several queues only its own queue's."""
    store: Message = {}
    bounds: dict[MessageQueue, tuple[int, int]] = {}
    messages: list[Message] = []
    for line in map(json.loads, lines):
        if line["type"] == "store":
            store = line
        elif line["type"] == "queue" and not _is_own(line):
            queue = MessageQueue(line["topic"], line["queue_id"])
            bounds[queue] = (line["min_offset"], line["max_offset"])
        elif line["type"] == "message" and not _is_own(line):
            listed = (line["listed_topic"], line["listed_queue_id"])
            if listed == (line["topic"], line["queue_id"]):
                messages.append(line)
    messages.sort(key=_place)
    topics = groupby(map(_as_cat, messages), key=lambda message: str(message["topic"]))
    return Dump(store, bounds, {topic: list(found) for topic, found in topics})


def _is_own(line: Message) -> bool:
    """Whether it is a broker's, for itself: one of its topics has what producers sent."""
    return line["system"] and line["topic"] != "TRANS_CHECK_MAX_TIME_TOPIC"


def _place(message: Message) -> tuple[str, int, int]:
    return message["topic"], message["queue_id"], message["queue_offset"]


def _as_cat(line: Message) -> Message:
    left_out = {"type", "system", "record_base64"}
    return {
        name: value
        for name, value in line.items()
        if name not in left_out and not name.startswith("listed_")
    }


class LocalLog:
    """The bytes of a commit log."""

    def __init__(self, store: Path) -> None:
        files = {int(path.name): path.read_bytes() for path in (store / "commitlog").iterdir()}
        self._files = dict(sorted(files.items()))
        self._file_bytes = max(map(len, files.values()), default=0)

    def record(self, message: Message) -> bytes:
        """The record that holds a message."""
        base = message["physical_offset"] // self._file_bytes * self._file_bytes
        at = message["physical_offset"] - base
        return self._files[base][at : at + message["size"]]

    def records(self, messages: Iterable[Message]) -> bytes:
        """The records of messages in order; one that holds several once."""
        found = {message["physical_offset"]: self.record(message) for message in messages}
        return b"".join(found.values())


# -- tiers ----------------------------------------------------------------------------------------


def cat(url: str, topic: str, *options: str) -> list[Message]:
    """The messages of a topic, without ``log_offset``, which only a tier knows; that is checked here."""
    found: list[Message] = here("cat", url, topic, *options).good().rows
    check_log_offsets(found)
    return [{k: v for k, v in message.items() if k != "log_offset"} for message in found]


def check_log_offsets(messages: list[Message]) -> None:
    """In a queue one record stands behind the other; messages of an inner batch share one."""
    ends: dict[int, tuple[int, int]] = {}
    for message in messages:
        start = message["log_offset"]
        if message["queue_id"] in ends:
            last_start, last_end = ends[message["queue_id"]]
            assert start >= last_end or start == last_start
        ends[message["queue_id"]] = start, start + message["size"]


def bounds(url: str, *options: str | Path) -> dict[MessageQueue, tuple[int, int]]:
    """[min, commit) of each queue, as ``status`` tells."""
    return {
        MessageQueue(row["topic"], row["queue_id"]): (row["min_offset"], row["commit_offset"])
        for row in here("status", url, "-o", "jsonl", *options).good().rows
    }


def check_equal(url: str, dump: Dump) -> None:
    """Everything that Java found is in the tier field by field, and nothing else."""
    assert bounds(url) == dump.bounds
    for topic in {queue.topic for queue in dump.bounds}:
        assert cat(url, topic) == dump.messages.get(topic, [])


def check_sound(url: str, store: Path | None = None) -> None:
    """``verify`` finds every byte in order, and nothing that the store has otherwise."""
    beside = ("--store", store) if store else ()
    here("verify", url, "--deep", *beside).good()
