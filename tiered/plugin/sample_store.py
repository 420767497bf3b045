"""Makes a store directory of made-up messages, byte for byte in the broker's format, fast.

It is written as a broker leaves it after a clean stop: commit log, consume queues, ``config/topics.json`` and checkpoint,
with files of full size (sparse). A record is a template of its queue and body into which offsets,
times and keys are put, so that a message costs about two microseconds.

The directory must not exist or be empty. A crash leaves a directory that has no checkpoint; remove it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, BinaryIO, Final

from tiered.errors import InvalidError
from tiered.format.checkpoint import Checkpoint, encode_checkpoint
from tiered.format.properties import CLUSTER, KEYS, TAGS, UNIQ_KEY, WAIT, join_properties
from tiered.format.record import (
    MAGIC_BLANK,
    STORE_TIME_AT,
    Record,
    body_crc,
    encode_record,
    record_bytes,
)
from tiered.format.tags import tag_hash

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LOG_FILE_BYTES: Final = 64 << 20
"""Less than a broker's 1 GiB, of which opening a stopped store looks at every byte, zeros too."""
QUEUE_FILE_BYTES: Final = 6_000_000
CLUSTER_NAME: Final = "sample-cluster"
BROKER_NAME: Final = "sample-broker"
MESSAGES_PER_MS: Final = 10
_BODIES: Final = 64
_TAGS: Final = ("created", "paid", "sent", "returned")
_BLANK: Final = Struct(">iI")
_BLANK_BYTES: Final = 8
_ITEM: Final = Struct(">qiq")
_OFFSETS: Final = Struct(">qq")
_LONG: Final = Struct(">q")
_OFFSETS_AT: Final = 20
_BORN_TIME_AT: Final = 40
_FLUSH_BYTES: Final = 8 << 20
_RECORD_BYTES_MORE: Final = 1024
_KEY: Final = "key-%012d"
_UNIQUE: Final = "%032X"


@dataclass(frozen=True, slots=True)
class Made:
    """What was made.

    Attributes:
        messages: How many.
        size_bytes: Of their records.
        topics: How many topics.
        queues: Queues of each.
    """

    messages: int
    size_bytes: int
    topics: int
    queues: int


def make_store(
    directory: Path,
    *,
    topics: Sequence[str],
    queues: int,
    messages: int,
    body_bytes: int,
    seed: int,
    now_ms: int,
    words: Sequence[str] = (),
    log_file_bytes: int = LOG_FILE_BYTES,
) -> Made:
    """Make a store whose last message is stored at ``now_ms``.

    Args:
        directory: Where; must be empty or missing.
        topics: Names; messages go round them and their queues.
        queues: Queues of each topic.
        messages: In all.
        body_bytes: Of each body.
        seed: Of the bodies.
        now_ms: UTC.
        words: Bodies are made of these; without any, of bytes that do not compress.
        log_file_bytes: Size of each file of the log, as a broker's ``mappedFileSizeCommitLog``.

    Raises:
        InvalidError: The directory has something in it, or a file of the log could not hold a record.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidError(
            "there is something already", where=str(directory), do="name an empty directory"
        )
    if log_file_bytes < body_bytes + _RECORD_BYTES_MORE:
        raise InvalidError(
            f"a file of {log_file_bytes} bytes cannot hold a record with {body_bytes} bytes of body"
        )
    rng = random.Random(seed)  # noqa: S311 (content, no secret)
    bodies = [_body(rng, body_bytes, words) for _ in range(_BODIES)]
    log = _Log(directory / "commitlog", log_file_bytes)
    rows = [_Queue(topic, number, bodies) for number in range(queues) for topic in topics]
    begin_ms = now_ms - messages // MESSAGES_PER_MS
    for number in range(messages):
        row = rows[number % len(rows)]
        time_ms = begin_ms + number // MESSAGES_PER_MS
        row.items += log.append(
            row.template(number + number // len(rows)), row.count, number, time_ms
        )
        row.count += 1
    log.close()
    for row in rows:
        row.write(directory / "consumequeue" / row.topic / str(row.queue_id))
    _write_rest(directory, topics, queues, Checkpoint(now_ms, now_ms, now_ms, 0, 0, log.end))
    return Made(messages, log.size_bytes, len(topics), queues)


class _Log:
    """The commit log under construction."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._folder.mkdir(parents=True)
        self._buffer = bytearray()
        self._base = 0
        self._file: BinaryIO = self._open()
        self.end = 0
        self.size_bytes = 0

    def append(self, template: _Template, offset: int, number: int, time_ms: int) -> bytes:
        """Put the record at the end; its consume-queue item."""
        size = len(template.record)
        if self.end + size + _BLANK_BYTES > self._base + self._file_bytes:
            self._roll()
        at = len(self._buffer)
        self._buffer += template.record
        _OFFSETS.pack_into(self._buffer, at + _OFFSETS_AT, offset, self.end)
        _LONG.pack_into(self._buffer, at + _BORN_TIME_AT, time_ms)
        _LONG.pack_into(self._buffer, at + STORE_TIME_AT, time_ms)
        self._put(at + template.key_at, _KEY % number)
        self._put(at + template.unique_at, _UNIQUE % number)
        item = _ITEM.pack(self.end, size, template.tag_code)
        self.end += size
        self.size_bytes += size
        if len(self._buffer) >= _FLUSH_BYTES:
            self._flush()
        return item

    def close(self) -> None:
        """Write the rest; the file gets a broker's size."""
        self._flush()
        self._file.truncate(self._file_bytes)
        self._file.close()

    def _put(self, at: int, text: str) -> None:
        self._buffer[at : at + len(text)] = text.encode("ascii")

    def _open(self) -> BinaryIO:
        return (self._folder / f"{self._base:020d}").open("xb")

    def _flush(self) -> None:
        self._file.write(self._buffer)
        self._buffer.clear()

    def _roll(self) -> None:
        rest = self._base + self._file_bytes - self.end
        self._buffer += _BLANK.pack(rest, MAGIC_BLANK)
        self.close()
        self._base = self.end = self._base + self._file_bytes
        self._file = self._open()


@dataclass(frozen=True, slots=True)
class _Template:
    """A record whose offsets, times and keys are still to be put in.

    Attributes:
        record: Its bytes.
        key_at: Where its key stands.
        unique_at: Where its unique key stands.
        tag_code: Of its tag.
    """

    record: bytes
    key_at: int
    unique_at: int
    tag_code: int


class _Queue:
    """One queue under construction."""

    def __init__(self, topic: str, queue_id: int, bodies: Sequence[bytes]) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.items = bytearray()
        self.count = 0
        self._templates = [
            _make_template(topic, queue_id, body, _TAGS[index % len(_TAGS)])
            for index, body in enumerate(bodies)
        ]

    def template(self, number: int) -> _Template:
        """One of the templates; multiplied, so that neighbours differ."""
        return self._templates[number * 7 % len(self._templates)]

    def write(self, folder: Path) -> None:
        """Write the consume queue."""
        folder.mkdir(parents=True)
        for start in range(0, max(len(self.items), 1), QUEUE_FILE_BYTES):
            with (folder / f"{start:020d}").open("xb") as file:
                file.write(self.items[start : start + QUEUE_FILE_BYTES])
                file.truncate(QUEUE_FILE_BYTES)


def _make_template(topic: str, queue_id: int, body: bytes, tag: str) -> _Template:
    key, unique = _KEY % 0, _UNIQUE % 0
    properties = join_properties(
        {CLUSTER: CLUSTER_NAME, KEYS: key, TAGS: tag, UNIQ_KEY: unique, WAIT: "true"}
    )
    record = encode_record(
        Record(
            size=record_bytes(
                body=len(body), topic=len(topic), props=len(properties), sys_flag=0, version=1
            ),
            version=1,
            body_crc=body_crc(body),
            queue_id=queue_id,
            flag=0,
            queue_offset=0,
            physical_offset=0,
            sys_flag=0,
            born_timestamp_ms=0,
            born_host="127.0.0.1:40000",
            store_timestamp_ms=0,
            store_host="127.0.0.1:10911",
            reconsume_times=0,
            prepared_transaction_offset=0,
            body=body,
            topic=topic,
            properties_raw=properties,
        )
    )
    unique_at = record.rindex(unique.encode())
    return _Template(record, record.rindex(key.encode()), unique_at, tag_hash(tag))


def _body(rng: random.Random, body_bytes: int, words: Sequence[str]) -> bytes:
    if not words:
        return rng.randbytes(body_bytes)
    text = " ".join(rng.choice(words) for _ in range(body_bytes))
    return text.encode("ascii")[:body_bytes]


def _write_rest(directory: Path, topics: Sequence[str], queues: int, reached: Checkpoint) -> None:
    names = [*topics, f"rmq_sys_SYNC_BROKER_MEMBER_{BROKER_NAME}"]
    table = {
        name: {
            "topicName": name,
            "readQueueNums": queues,
            "writeQueueNums": queues,
            "perm": 6,
            "order": False,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
        }
        for name in names
    }
    document = {"dataVersion": {"counter": len(names)}, "topicConfigTable": table}
    (directory / "config").mkdir()
    (directory / "config" / "topics.json").write_text(json.dumps(document, indent="\t"), "utf-8")
    (directory / "checkpoint").write_bytes(encode_checkpoint(reached))
