"""A broker's files, written step by step, so that a test can stop between any two of its writes."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING

from tiered.format.properties import tag_hash
from tiered.format.record import MAGIC_BLANK, Record, body_crc, encode_record, record_bytes
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from pathlib import Path

LOG_FILE_BYTES = 8192
QUEUE_FILE_BYTES = 200
START_MS = 1_700_000_000_000
TOPIC = "t"


class FakeBroker:
    """Writes a commit log and consume queues as a broker does.

    ``append`` writes a record into the log; ``dispatch`` lists what is not listed yet. The lock is one of an open file
    description, which other descriptors of this process see and do not drop.
    """

    def __init__(self, store: Path, base: int = 0) -> None:
        self.store = store
        self.position = base
        self.offsets: dict[MessageQueue, int] = {}
        self.undispatched: list[tuple[MessageQueue, int, int, int]] = []
        self.now_ms = START_MS
        self.is_old = False
        """Starts as a broker before 5.0: an ``abort`` file that is there stays as it is."""
        self._lock: int | None = None
        for name in ("commitlog", "consumequeue", "config"):
            (store / name).mkdir(parents=True, exist_ok=True)
        (store / "checkpoint").write_bytes(bytes(4096))

    # -- starting and stopping -------------------------------------------------------------------

    def start(self, at_ms: int | None = None) -> None:
        """Take the lock, then write ``abort``."""
        self.now_ms = at_ms if at_ms is not None else self.now_ms
        self.take_lock()
        abort = self.store / "abort"
        if not self.is_old:
            abort.write_text("1")
        elif not abort.exists():
            abort.touch()
        for file in (self.store / "lock",) if self.is_old else (abort,):
            os.utime(file, ns=(self.now_ms * 1_000_000,) * 2)

    def take_lock(self) -> None:
        """The first half of a start. (Twice is as once.)"""
        if self._lock is not None:
            return
        self._lock = os.open(self.store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        os.pwrite(self._lock, b"lock", 0)
        wanted = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(self._lock, fcntl.F_OFD_SETLK, wanted)

    def crash(self) -> None:
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None

    def stop(self) -> None:
        (self.store / "abort").unlink()
        self.crash()

    # -- writing ---------------------------------------------------------------------------------

    def record(
        self, queue_id: int = 0, body: bytes = b"x" * 100, *, topic: str = TOPIC, **changes: int
    ) -> bytes:
        """The bytes of the next record of a queue, and its place."""
        queue = MessageQueue(topic, queue_id)
        props = b"TAGS\x01a\x02"
        raw_topic = topic.encode()
        size = record_bytes(
            body=len(body), topic=len(raw_topic), props=len(props), sys_flag=0, version=1
        )
        fields = {
            "queue_offset": self.offsets.get(queue, 0),
            "physical_offset": self.place(size),
            "store_timestamp_ms": self.now_ms,
            "body_crc": body_crc(body),
            "sys_flag": 0,
            **changes,
        }
        return encode_record(
            Record(
                size=size,
                version=1,
                queue_id=queue_id,
                flag=0,
                born_timestamp_ms=self.now_ms,
                born_host="10.0.0.1:1",
                store_host="10.0.0.2:2",
                reconsume_times=0,
                prepared_transaction_offset=0,
                body=body,
                topic=topic,
                properties_raw=props,
                **fields,
            )
        )

    def place(self, size: int) -> int:
        """Where a record of this size will lie."""
        left = LOG_FILE_BYTES - self.position % LOG_FILE_BYTES
        return self.position + left if size + 8 > left else self.position

    def append(
        self, queue_id: int = 0, body: bytes = b"x" * 100, *, topic: str = TOPIC, **changes: int
    ) -> bytes:
        """Write a record, not yet listed."""
        raw = self.record(queue_id, body, topic=topic, **changes)
        place = self.place(len(raw))
        if place != self.position:
            left = place - self.position
            self.write_log(self.position, struct.pack(">iI", left, MAGIC_BLANK))
        self.write_log(place, raw)
        queue = MessageQueue(topic, queue_id)
        offset = self.offsets.get(queue, 0)
        self.undispatched.append((queue, offset, place, len(raw)))
        self.offsets[queue] = offset + 1
        self.position = place + len(raw)
        return raw

    def dispatch(self, count: int | None = None) -> None:
        """List the next ``count`` records, or all."""
        for queue, offset, place, size in self.undispatched[:count]:
            self.write_entry(queue, offset, place, size)
        del self.undispatched[:count]

    def put(self, count: int = 1, queue_id: int = 0, **changes: int) -> list[bytes]:
        """Append and list."""
        raws = [self.append(queue_id, **changes) for _ in range(count)]
        self.dispatch()
        return raws

    # -- files -----------------------------------------------------------------------------------

    def log_file(self, position: int) -> Path:
        base = position // LOG_FILE_BYTES * LOG_FILE_BYTES
        return self.store / "commitlog" / f"{base:020d}"

    def write_log(self, position: int, data: bytes) -> None:
        self.allocate(position)
        with self.log_file(position).open("r+b") as out:
            out.seek(position % LOG_FILE_BYTES)
            out.write(data)

    def allocate(self, position: int) -> None:
        """Create the log file that holds ``position``, full of zeros."""
        if not self.log_file(position).exists():
            self.log_file(position).write_bytes(bytes(LOG_FILE_BYTES))

    def lose(self, start: int) -> None:
        """What a power failure does: the log's bytes from ``start`` on were never written."""
        self.write_log(start, bytes(self.position - start))
        self.position = start

    def write_entry(self, queue: MessageQueue, offset: int, place: int, size: int) -> None:
        directory = self.store / "consumequeue" / queue.topic / str(queue.queue_id)
        directory.mkdir(parents=True, exist_ok=True)
        at = offset * 20
        file = directory / f"{at // QUEUE_FILE_BYTES * QUEUE_FILE_BYTES:020d}"
        if not file.exists():
            file.write_bytes(bytes(QUEUE_FILE_BYTES))
        with file.open("r+b") as out:
            out.seek(at % QUEUE_FILE_BYTES)
            out.write(struct.pack(">qiq", place, size, tag_hash("a")))

    def close(self) -> None:
        if self._lock is not None:
            self.crash()
