"""Stores of JoyQueue: the captured ones, a plain writer of others, and everything that our readers find in either."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
import tarfile
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from tiered.clock import Clock, ManualClock
from tiered.format import jmq_message
from tiered.format.record_kind import RecordKind, epochs_of, kind_of
from tiered.local.interface import HoleReason
from tiered.local.jmq import JmqStore
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from tiered.local.interface import Follower, RecordBatch

FOLDER = Path(__file__).parent.parent / "data" / "jmq"
NAMES = ("j01-basic", "j02-crash", "j02-crash-torn")
HEAD = struct.Struct(">ihqihhb16sqiqh")
NOT_SHOWN = ("group", "journal_position", "committed")
"""Fields of a dump that are of its store, and not of a message."""


# -- the captured ones -------------------------------------------------------------------------------


@cache
def pristine(name: str) -> Path:
    """A captured store on disk, which nobody changes."""
    folder = Path(mkdtemp(prefix="tiered-jmq-"))
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def copy(name: str, folder: Path) -> Path:
    """A copy of a captured store that a test may change."""
    target = folder / name
    shutil.copytree(pristine(name), target)
    return target


def drop_pristine() -> None:
    """Remove what ``pristine`` has made."""
    for name in NAMES:
        shutil.rmtree(pristine(name).parent, ignore_errors=True)
    pristine.cache_clear()


@cache
def dump(name: str) -> dict[MessageQueue, dict[int, dict[str, Any]]]:
    """What the broker's own store says is committed, by queue and index."""
    found: dict[MessageQueue, dict[int, dict[str, Any]]] = defaultdict(dict)
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if line["committed"]:
                found[MessageQueue(line["topic"], line["partition"])][line["index"]] = line
    return dict(found)


def positions(name: str) -> list[dict[str, Any]]:
    """What the broker's own store says of each group."""
    text = (FOLDER / f"{name}.positions.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


# -- what our readers find ---------------------------------------------------------------------------


@dataclass
class Taken:
    """What came, held against itself: each queue without a step back, batches whose arrays are of one length."""

    lines: dict[MessageQueue, dict[int, dict[str, Any]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    raws: dict[MessageQueue, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    holes: dict[MessageQueue, dict[int, HoleReason]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    quarantined: dict[tuple[MessageQueue, int], bytes] = field(default_factory=dict)
    ends: dict[MessageQueue, int] = field(default_factory=dict)
    parse: bool = True

    def add(self, batch: RecordBatch) -> None:
        assert batch.count
        assert batch.base_offset >= self.ends.get(batch.queue, 0)
        for array in (batch.positions, batch.tag_codes, batch.store_timestamps_ms):
            assert len(array) == len(batch.physical_offsets) == batch.count == len(array)
        self.ends[batch.queue] = batch.end_offset
        for number in range(batch.count):
            index = batch.base_offset + number
            if batch.sizes[number]:
                self._add_record(batch, number, index)
            else:
                self.holes[batch.queue][index] = HoleReason(int(batch.tag_codes[number]))
        for one in batch.quarantined:
            assert batch.base_offset <= one.queue_offset < batch.end_offset
            self.quarantined[batch.queue, one.queue_offset] = one.raw

    def _add_record(self, batch: RecordBatch, number: int, index: int) -> None:
        start, size = int(batch.positions[number]), int(batch.sizes[number])
        raw = bytes(memoryview(batch.data)[start : start + size])
        assert len(raw) == size
        self.raws[batch.queue][index] = raw
        if not self.parse:
            return
        block = jmq_message.walk_messages(raw, 0, size, size_max=size)
        head = block.headers[0]
        [message] = [
            message
            for message in jmq_message.messages_of(block, 0, bytes_max=1 << 24)
            if message.index == index
        ]
        line = jmq_message.message_json(batch.queue.topic, head, message)
        line["journal_position"] = int(batch.physical_offsets[number])
        assert kind_of(int(batch.tag_codes[number])) is RecordKind.JMQ
        assert epochs_of(batch.tag_codes)[number] == line["term"]
        assert batch.store_timestamps_ms[number] == line["store_time_ms"]
        self.lines[batch.queue][index] = line


def follow(follower: Follower, window_bytes: int, taken: Taken) -> Taken:
    """Poll until the follower is idle."""
    while True:
        batches = follower.poll(window_bytes)
        for batch in batches:
            taken.add(batch)
        assert not (follower.is_idle and batches)
        if follower.is_idle:
            assert follower.is_at_end
            return taken


def follow_all(store: JmqStore, window_bytes: int, *, parse: bool = True) -> Taken:
    """Everything that following gives."""
    return follow(store.follow({}), window_bytes, Taken(parse=parse))


def read_all(store: JmqStore, bytes_max: int, count_max: int, *, parse: bool = True) -> Taken:
    """Everything that reading queue by queue gives."""
    taken = Taken(parse=parse)
    for queue, bounds in store.queues().items():
        offset = bounds.min
        while (
            batch := store.read(queue, offset, bytes_max=bytes_max, count_max=count_max)
        ) is not None:
            assert batch.end_offset > offset
            taken.add(batch)
            offset = batch.end_offset
    return taken


def bounds_of(store: JmqStore) -> dict[MessageQueue, tuple[int, int]]:
    return {queue: (int(found.min), int(found.end)) for queue, found in store.queues().items()}


def shown(lines: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Lines of a dump without what is not of the message, but its place."""
    return {
        index: {k: v for k, v in line.items() if k not in NOT_SHOWN or k == "journal_position"}
        for index, line in lines.items()
    }


# -- a plain writer ----------------------------------------------------------------------------------


def inner_message(body: bytes, key: bytes = b"k") -> bytes:
    """One message of a client's batch."""
    rest = sized(4, body) + sized(1, key) + sized(2, b"")
    return struct.pack(">ibh", 7 + len(rest), 1, 2) + rest


def sized(width: int, data: bytes) -> bytes:
    return len(data).to_bytes(width, "big") + data


def encode(
    partition: int,
    index: int,
    body: bytes,
    *,
    term: int = 1,
    count: int = 1,  # more than one: the body is a batch
    flags: int = 0x18C,  # version 1, IPv4, of JoyQueue
    flag: int = 5,
    time_ms: int = 1_700_000_000_000,
    extension: bytes = b"",
    key: bytes = b"key",
    attributes: bytes = b"a=b",
) -> bytes:
    """A message as the journal has it."""
    if count > 1:
        flags, flag = flags | jmq_message.BATCH, count
    rest = sized(4, body) + sized(1, key) + sized(2, attributes) + sized(4, extension)
    rest += sized(1, b"app")
    head = HEAD.pack(
        HEAD.size + len(rest), partition, index, term, jmq_message.MAGIC, flags, 3,
        b"\x01\x02\x0a\x00\x00\x01", time_ms, 7, zlib.crc32(body), flag,
    )  # fmt: skip
    return head + rest


class Writer:
    """A group that grows as its broker would have it: journal, indexes, checkpoint.

    Attributes:
        right: Position at which the next message goes.
        nexts: The next index of each partition.
    """

    def __init__(
        self, store: Path, topic: str = "t", group: int = 0, file_bytes: int = 2000
    ) -> None:
        self.folder = store / "topics" / topic / str(group)
        self.folder.mkdir(parents=True)
        self.right = 0
        self.nexts: dict[int, int] = {}
        self._file_bytes = file_bytes
        self._index_bytes = 10 * 12

    def append(
        self, partition: int, body: bytes, *, count: int = 1, term: int = 1, **fields: bytes
    ) -> int:
        """Store a message, or a batch of ``count`` such; where it stands."""
        index = self.nexts.get(partition, 0)
        if count > 1:
            body = b"".join(inner_message(body + b"%d" % n) for n in range(count))
        raw = encode(partition, index, body, term=term, count=count, **fields)
        place = self.right
        self._add(self.folder, place, raw, self._file_bytes)
        entry = struct.pack(">qi", place, len(raw))
        self._add(
            self.folder / "index" / str(partition), 12 * index, entry * count, self._index_bytes
        )
        self.nexts[partition] = index + count
        self.right += len(raw)
        return place

    @staticmethod
    def _add(folder: Path, position: int, data: bytes, file_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        bases = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
        base = max(bases, default=position)
        if not bases or position + len(data) - base > file_bytes:
            base = position
        with (folder / str(base)).open("ab") as file:
            if not file.tell():
                file.write(bytes(jmq_message.FILE_HEADER_BYTES))
            file.write(data)

    def commit(self, position: int | None = None) -> None:
        """Write the checkpoint: committed up to here."""
        nexts = ",".join(f"{number}:{end}" for number, end in self.nexts.items())
        text = (
            f'{{\n\t"indexPosition":{self.right},\n\t"partitions":{{{nexts}\n\t}},\n'
            f'\t"replicationPosition":{self.right if position is None else position},\n'
            '\t"version":1\n}'
        )
        (self.folder / "checkpoint.json").write_text(text)

    def roll_back(self, position: int, nexts: dict[int, int]) -> None:
        """Give up what stands from a position on: the files are cut, those behind it removed."""
        self._cut(self.folder, position)
        for partition, number in nexts.items():
            self._cut(self.folder / "index" / str(partition), 12 * number)
        self.right, self.nexts = position, dict(nexts)

    @staticmethod
    def _cut(folder: Path, position: int) -> None:
        for path in folder.iterdir():
            if path.name.isdigit() and int(path.name) >= position:
                path.unlink()
            elif path.name.isdigit():
                size = position - int(path.name) + jmq_message.FILE_HEADER_BYTES
                if path.stat().st_size > size:
                    with path.open("r+b") as file:
                        file.truncate(size)

    def trim(self, files: int) -> None:
        """Remove so many files of each index from the left, and then those of the journal that none names any more."""
        lefts = []
        for index in (self.folder / "index").iterdir():
            numbers = sorted(int(path.name) for path in index.iterdir())
            for number in numbers[:files]:
                (index / str(number)).unlink()
            data = (index / str(numbers[files])).read_bytes()
            lefts.append(struct.unpack_from(">q", data, jmq_message.FILE_HEADER_BYTES)[0])
        bases = sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())
        for base, behind in pairwise(bases):
            if behind <= min(lefts):
                (self.folder / str(base)).unlink()


def open_store(directory: Path, clock: Clock | None = None) -> JmqStore:
    """A store on a clock that stands still, unless another one is given; ``close_stores`` closes it."""
    _OPENED.append(JmqStore.open(directory, clock=clock or ManualClock()))
    return _OPENED[-1]


_OPENED: list[JmqStore] = []


def close_stores() -> None:
    """Close what ``open_store`` has opened."""
    while _OPENED:
        _OPENED.pop().close()


def start_of(index: int) -> QueueOffset:
    return QueueOffset(index)
