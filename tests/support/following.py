"""Small copies of captured stores for our readers, what Java found in them, and everything that our readers find."""

from __future__ import annotations

import gzip
import json
import shutil
import tarfile
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from support.captures import FOLDER

from tiered.clock import Clock, ManualClock
from tiered.local.interface import Follower, HoleReason, RecordBatch
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LEFT_ON_DISK = ("commitlog", "consumequeue", "batchconsumequeue", "config", "rocksdbstore/IDENTITY")
SMALL = ("checkpoint", "abort", "abort.bak", "lock")


@dataclass(frozen=True)
class Message:
    """What is compared of a message."""

    physical_offset: int
    size: int
    tag_code: int
    store_timestamp_ms: int


@dataclass
class Expected:
    """A dump, system topics left out.

    Attributes:
        store: The line ``store``.
        bounds: [min, max) of each queue.
        messages: By queue and queue offset; a foreign entry is not one.
        foreign: Queue offsets whose entry names another queue's record.
    """

    store: dict[str, Any] = field(default_factory=dict)
    bounds: dict[MessageQueue, tuple[int, int]] = field(default_factory=dict)
    messages: dict[MessageQueue, dict[int, Message]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    foreign: dict[MessageQueue, set[int]] = field(default_factory=lambda: defaultdict(set))


def read_dump(lines: Iterator[str]) -> Expected:
    """Take in the lines of ``oracle dump``."""
    found = Expected()
    for line in map(json.loads, lines):
        if line["type"] == "store":
            found.store = line
        elif line.get("system") and line.get("topic") != "TRANS_CHECK_MAX_TIME_TOPIC":
            continue
        elif line["type"] == "queue":
            queue = MessageQueue(line["topic"], line["queue_id"])
            found.bounds[queue] = (line["min_offset"], line["max_offset"])
        elif line["type"] == "message":
            queue = MessageQueue(line["listed_topic"], line["listed_queue_id"])
            inner = line["queue_offset"] - line["listed_offset"]
            if (line["topic"], line["queue_id"]) != (queue.topic, queue.queue_id) or inner < 0:
                found.foreign[queue].add(line["listed_offset"])
                continue
            found.messages[queue][line["queue_offset"]] = Message(
                line["physical_offset"], line["size"], line["tag_hash"], line["store_timestamp_ms"]
            )
    return found


@cache
def expected(name: str) -> Expected:
    """The dump of a captured store."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return read_dump(lines)


def unpack(name: str, folder: Path) -> Path:
    """A fresh copy of a captured store, without what is large and of no use here."""
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        members = [
            member
            for member in archive
            if (path := member.name.partition("/")[2]).startswith(LEFT_ON_DISK) or path in SMALL
        ]
        archive.extractall(folder, members, filter="data")
    return folder / name


def copy(store: Path, folder: Path) -> Path:
    """A copy of a store that keeps the file times."""
    target = folder / store.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(store, target)
    return target


def open_store(directory: Path, clock: Clock | None = None, **options: object) -> RocketMQStore:
    return RocketMQStore.open(
        directory,
        clock=clock or ManualClock(),
        options=RocketMQOptions(**options),  # type: ignore[arg-type]
    )


@dataclass
class Taken:
    """Everything that was handed out, checked for order as it came.

    Attributes:
        messages: By queue and queue offset.
        raw: The record of each, byte for byte.
        holes: The reasons of the others.
        gaps: Where a batch began later than the last one of its queue had ended.
        quarantined: Raw bytes of damaged records by queue and offset.
    """

    messages: dict[MessageQueue, dict[int, Message]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    raw: dict[MessageQueue, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    holes: dict[MessageQueue, dict[int, HoleReason]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    gaps: list[tuple[MessageQueue, int, int]] = field(default_factory=list)
    quarantined: dict[tuple[MessageQueue, int], bytes] = field(default_factory=dict)
    _next: dict[MessageQueue, int] = field(default_factory=dict)

    def add(self, batch: RecordBatch) -> None:
        base = int(batch.base_offset)
        before = self._next.get(batch.queue, base)
        assert base >= before, f"{batch.queue}: {base} after {before}"
        if base > before:
            self.gaps.append((batch.queue, before, base))
        assert batch.count > 0
        self._next[batch.queue] = int(batch.end_offset)
        data = memoryview(batch.data)
        for at in range(batch.count):
            self._add_item(batch, at, data)
        for damaged in batch.quarantined:
            self.quarantined[batch.queue, int(damaged.queue_offset)] = damaged.raw

    def _add_item(self, batch: RecordBatch, at: int, data: memoryview) -> None:
        offset, size = int(batch.base_offset) + at, int(batch.sizes[at])
        if not size:
            self.holes[batch.queue][offset] = HoleReason(int(batch.tag_codes[at]))
            return
        begin = int(batch.positions[at])
        raw = bytes(data[begin : begin + size])
        assert len(raw) == size == int.from_bytes(raw[:4], "big")
        assert int.from_bytes(raw[28:36], "big") == batch.physical_offsets[at]
        assert int.from_bytes(raw[12:16], "big") == batch.queue.queue_id
        self.raw[batch.queue][offset] = raw
        self.messages[batch.queue][offset] = Message(
            int(batch.physical_offsets[at]),
            size,
            int(batch.tag_codes[at]),
            int(batch.store_timestamps_ms[at]),
        )

    def count(self) -> int:
        return sum(map(len, self.messages.values())) + sum(map(len, self.holes.values()))

    def offsets(self, queue: MessageQueue) -> list[int]:
        return sorted({**self.messages.get(queue, {}), **self.holes.get(queue, {})})


def follow_all(
    store: RocketMQStore,
    window_bytes: int = 1 << 20,
    starts: Mapping[MessageQueue, QueueOffset] | None = None,
    polls_max: int = 100_000,
) -> Taken:
    """Everything that a follower gives until it is idle."""
    taken = Taken()
    follower = store.follow(starts or {})
    drain(follower, taken, window_bytes, polls_max)
    follower.close()
    return taken


def drain(
    follower: Follower, taken: Taken, window_bytes: int = 1 << 20, polls_max: int = 100_000
) -> None:
    """Poll until idle."""
    for _ in range(polls_max):
        batches = follower.poll(window_bytes)
        for batch in batches:
            taken.add(batch)
        if not batches and follower.is_idle:
            return
    raise AssertionError(f"not idle after {polls_max} polls")


def read_all(store: RocketMQStore, bytes_max: int = 1 << 20, count_max: int = 1 << 20) -> Taken:
    """Everything that queue-ordered reading gives."""
    taken = Taken()
    for queue, bounds in store.queues().items():
        offset = bounds.min
        while (
            batch := store.read(queue, offset, bytes_max=bytes_max, count_max=count_max)
        ) is not None:
            taken.add(batch)
            assert batch.end_offset > offset
            offset = batch.end_offset
    return taken


def bounds_of(store: RocketMQStore) -> dict[MessageQueue, tuple[int, int]]:
    return {queue: (int(found.min), int(found.end)) for queue, found in store.queues().items()}


def check_complete(store: RocketMQStore, taken: Taken) -> None:
    """Every queue offset within its bounds was given once, as a message or as a hole."""
    for queue, (low, end) in bounds_of(store).items():
        assert taken.offsets(queue) == list(range(low, end)), queue


def flip_entry(store: Path, queue: MessageQueue, offset: int, bit: int) -> None:
    """Flip one bit of an entry, counted from its end: 0 to 63 its tag code, to 95 its size, to 159 its place."""
    at = offset * 20
    folder = store / "consumequeue" / queue.topic / str(queue.queue_id)
    file = max(path for path in folder.iterdir() if int(path.name) <= at)
    data = bytearray(file.read_bytes())
    data[at - int(file.name) + 19 - bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
