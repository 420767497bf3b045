"""Log directories of Kafka nodes: captured ones on disk, one that a test writes, and everything that our reader gives."""

from __future__ import annotations

import fcntl
import os
import struct
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from support import kafka_batches as plain

from tiered.clock import Clock, ManualClock
from tiered.format.kafka_batch import CONTROL, TRANSACTIONAL, check_batches, walk_batches
from tiered.format.record_kind import Mark, RecordKind, epochs_of, has_mark
from tiered.local.interface import HoleReason, RecordBatch
from tiered.local.kafka import KafkaStore
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tiered.local.interface import Follower

Line = dict[str, Any]


def unpack(name: str, folder: Path) -> Path:
    """A fresh copy of a captured directory, file times kept."""
    with tarfile.open(plain.FOLDER / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def open_store(*directories: Path, clock: Clock | None = None, **options: Any) -> KafkaStore:
    return KafkaStore.open(*directories, clock=clock or ManualClock(), **options)


def check(batch: RecordBatch) -> None:
    """A batch says of its items what its records do."""
    real = batch.sizes > 0
    assert set(batch.tag_codes[~real].tolist()) <= {HoleReason.DAMAGED, HoleReason.COMPACTED}
    assert (batch.physical_offsets[~real] == -1).all()
    data = memoryview(batch.data)
    if not real.any():
        assert not data.nbytes
        return
    assert batch.kind is RecordKind.KAFKA
    block = walk_batches(data, 0, data.nbytes, size_max=1 << 27)
    check_batches(block, 0)
    assert not block.faults.any()
    assert block.end == data.nbytes
    at = np.searchsorted(block.positions, batch.positions[real])
    assert (block.positions[at] == batch.positions[real]).all()
    assert (block.sizes[at] == batch.sizes[real]).all()
    assert set(at.tolist()) == set(range(len(block)))
    offsets = batch.base_offset + np.flatnonzero(real)
    assert (offsets >= block.base_offsets[at]).all()
    assert (offsets <= block.last_offsets[at]).all()
    covered = block.last_offsets + 1 - np.maximum(block.base_offsets, batch.base_offset)
    assert covered.sum() == real.sum()
    codes = batch.tag_codes[real]
    assert (has_mark(codes, Mark.TRANSACTIONAL) == block.has(TRANSACTIONAL)[at]).all()
    assert (has_mark(codes, Mark.CONTROL) == block.has(CONTROL)[at]).all()
    assert (batch.store_timestamps_ms[real] == block.column("max_timestamp")[at]).all()


def lines_of(batch: RecordBatch) -> list[Line]:
    """The records of a batch's items, as the dumps have them; their epochs as the items say."""
    data = memoryview(batch.data)
    block = walk_batches(data, 0, data.nbytes, size_max=1 << 27)
    epochs = epochs_of(batch.tag_codes).tolist()
    return [
        line | {"leader_epoch": epochs[line["offset"] - batch.base_offset]}
        for line in plain.lines_of(batch.queue, block)
        if batch.base_offset <= line["offset"] < batch.end_offset
    ]


@dataclass
class Taken:
    """What came of a queue, in order."""

    lines: list[Line] = field(default_factory=list)
    first: int | None = None
    end: int | None = None
    gaps: list[tuple[int, int]] = field(default_factory=list)
    holes: dict[int, HoleReason] = field(default_factory=dict)
    quarantined: dict[int, str] = field(default_factory=dict)
    batches: int = 0

    def add(self, batch: RecordBatch) -> None:
        check(batch)
        assert batch.count
        if self.end is not None and batch.base_offset != self.end:
            assert batch.base_offset > self.end
            self.gaps.append((self.end, batch.base_offset))
        self.first = batch.base_offset if self.first is None else self.first
        for at in np.flatnonzero(batch.sizes == 0).tolist():
            self.holes[batch.base_offset + at] = HoleReason(int(batch.tag_codes[at]))
        self.quarantined |= {one.queue_offset: one.detail for one in batch.quarantined}
        self.lines += lines_of(batch)
        self.end = batch.end_offset
        self.batches += 1


def follow(
    follower: Follower, window_bytes: int = 1 << 20, found: dict[MessageQueue, Taken] | None = None
) -> dict[MessageQueue, Taken]:
    """All that a follower gives until it is idle."""
    found = {} if found is None else found
    while True:
        for batch in follower.poll(window_bytes):
            found.setdefault(batch.queue, Taken()).add(batch)
        if follower.is_idle:
            return found


def follow_all(store: KafkaStore, window_bytes: int = 1 << 20) -> dict[MessageQueue, Taken]:
    return follow(store.follow({}), window_bytes)


def read_all(store: KafkaStore, queue: MessageQueue, start: int = 0, bytes_max: int = 1) -> Taken:
    """All that reads give of a queue, one after another."""
    found = Taken()
    while True:
        batch = store.read(queue, QueueOffset(start), bytes_max=bytes_max, count_max=1 << 16)
        if batch is None:
            return found
        found.add(batch)
        start = batch.end_offset


def all_lines(found: Mapping[MessageQueue, Taken]) -> list[Line]:
    return in_order(line for taken in found.values() for line in taken.lines)


def in_order(lines: Iterable[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: (line["topic"], line["partition"], line["offset"]))


# -- a node that a test plays -----------------------------------------------------------------------


class FakeNode:
    """Writes a log directory as a node does; it runs from the beginning."""

    def __init__(self, path: Path, node: int = 1, cluster: str = "c", directory: str = "d") -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        meta = f"#\nversion=1\ncluster.id={cluster}\nnode.id={node}\ndirectory.id={directory}\n"
        (path / "meta.properties").write_text(meta)
        self.ends: dict[MessageQueue, int] = {}
        self.epoch: dict[MessageQueue, list[tuple[int, int]]] = {}
        self.starts: dict[MessageQueue, int] = {}
        self._lock: int | None = None
        self.start()

    def start(self) -> None:
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        wanted = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(self._lock, fcntl.F_OFD_SETLK, wanted)
        (self.path / ".kafka_cleanshutdown").unlink(missing_ok=True)

    def crash(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def stop(self) -> None:
        self.checkpoint()
        (self.path / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":7}')
        self.crash()

    def folder(self, queue: MessageQueue) -> Path:
        return self.path / f"{queue.topic}-{queue.queue_id}"

    def segments(self, queue: MessageQueue) -> list[Path]:
        return sorted(self.folder(queue).glob("*.log"))

    def make(self, queue: MessageQueue, topic_id: str = "id", start: int = 0) -> MessageQueue:
        folder = self.folder(queue)
        folder.mkdir()
        (folder / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}\n")
        (folder / f"{start:020d}.log").touch()
        self.ends[queue] = start
        self.epoch[queue] = []
        self.lead(queue, 0)
        return queue

    def lead(self, queue: MessageQueue, epoch: int) -> None:
        """A new leader: its records begin at the end."""
        rows = [row for row in self.epoch[queue] if row[1] < self.ends[queue]]
        self.epoch[queue] = [*rows, (epoch, self.ends[queue])]
        text = "".join(f"{number} {start}\n" for number, start in self.epoch[queue])
        replace(self.folder(queue) / "leader-epoch-checkpoint", f"0\n{len(rows) + 1}\n{text}")

    def batch(self, queue: MessageQueue, count: int = 10, skip: int = 0, **fields: int) -> bytes:
        """The next batch; ``skip``: offsets before it that the cleaner has taken."""
        base = self.ends[queue] + skip
        time = fields.pop("time_ms", base)
        records = [
            (n, n, b"k%d" % (base + n), b"v" * (base % 7), (("h", None),)) for n in range(count)
        ]
        has = {"base_offset": base, "leader_epoch": self.epoch[queue][-1][0]}
        has |= {"base_timestamp": time, "max_timestamp": time + count - 1} | fields
        self.ends[queue] = base + count
        return plain.batch(plain.section(records), count, **has)  # type: ignore[arg-type]

    def append(self, queue: MessageQueue, count: int = 10, skip: int = 0, **fields: int) -> bytes:
        raw = self.batch(queue, count, skip, **fields)
        with self.segments(queue)[-1].open("ab") as file:
            file.write(raw)
        return raw

    def roll(self, queue: MessageQueue) -> None:
        (self.folder(queue) / f"{self.ends[queue]:020d}.log").touch()

    def checkpoint(self, marks: Mapping[MessageQueue, int] | None = None) -> None:
        """High watermarks: the ends, or others."""
        self.write("replication-offset-checkpoint", {**self.ends, **(marks or {})})

    def write(self, name: str, offsets: Mapping[MessageQueue, int]) -> None:
        rows = [f"{queue.topic} {queue.queue_id} {offset}" for queue, offset in offsets.items()]
        replace(self.path / name, "\n".join(("0", str(len(rows)), *rows, "")))

    def truncate(self, queue: MessageQueue, offset: int) -> None:
        """Cut the last segment before the batch that begins at an offset."""
        path = self.segments(queue)[-1]
        data = path.read_bytes()
        block = walk_batches(data, 0, len(data), size_max=1 << 27)
        at = int(block.positions[np.searchsorted(block.base_offsets, offset)])
        os.truncate(path, at)
        self.ends[queue] = offset


def replace(path: Path, text: str) -> None:
    """As Kafka writes its checkpoints: a whole new file in the place of the old one."""
    new = path.with_name(path.name + ".tmp")
    new.write_text(text)
    new.rename(path)
