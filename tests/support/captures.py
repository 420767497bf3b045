"""The captured stores: their files, copies of them on disk, and what Java read from them."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


FOLDER = Path(__file__).parent.parent / "data" / "stores"
NAMES = tuple(sorted(path.name.removesuffix(".tar.gz") for path in FOLDER.glob("*.tar.gz")))


@cache
def files(name: str, folder: str) -> dict[str, bytes]:
    """The files of one folder of a captured store, by path inside the store."""
    found: dict[str, bytes] = {}
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            if member.isfile() and path.startswith(folder):
                stream = archive.extractfile(member)
                assert stream is not None
                found[path] = stream.read()
    return found


def log_files(name: str) -> dict[int, bytes]:
    """The commit log's files by their base offset."""
    return {int(path.rpartition("/")[2]): data for path, data in files(name, "commitlog/").items()}


def dump(name: str, kind: str) -> list[dict[str, Any]]:
    """The lines of one type of a dump."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [line for line in map(json.loads, lines) if line["type"] == kind]


Message = dict[str, Any]
Unpack = Callable[[str], Path]
InTopic = Callable[[str, str], list[Message]]


def unpack(name: str, folder: Path) -> Path:
    """A fresh copy of a captured store, file times kept."""
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
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


def in_topic(name: str, topic: str) -> list[Message]:
    """What Java found in a topic of a captured store, in queue order."""
    return captured(name).messages[topic]


@cache
def captured(name: str) -> Dump:
    """The dump of a captured store."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
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
