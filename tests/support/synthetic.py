"""A local store in memory, made of real record bytes, that tests can grow, expire and hold back at the right moment."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from support.examples import make

from tiered.format.record import encode_record
from tiered.local.face import RecordBatch, StoreIdentity, StoreReport, Waiting
from tiered.model import MessageQueue, PhysicalOffset, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def make_record(
    queue: MessageQueue, offset: int, physical: int, body: bytes, time_ms: int
) -> bytes:
    """A real record."""
    record = make(
        queue_id=queue.queue_id,
        queue_offset=offset,
        physical_offset=physical,
        born_timestamp_ms=time_ms,
        store_timestamp_ms=time_ms,
        body=body,
        topic=queue.topic,
        properties_raw=b"TAGS\x01a\x02KEYS\x01k%d\x02" % offset,
    )
    return encode_record(record)


def make_batch(
    queue: MessageQueue, base: int, raws: Sequence[bytes], times: Sequence[int]
) -> RecordBatch:
    """A batch of records that lie one after another."""
    sizes = np.array([len(raw) for raw in raws], np.int32)
    ends = np.cumsum(sizes, dtype=np.int64)
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(base),
        data=b"".join(raws),
        positions=ends - sizes,
        sizes=sizes,
        tag_codes=np.full(len(raws), 97, np.int64),
        store_timestamps_ms=np.array(times, np.int64),
        physical_offsets=np.arange(len(raws), dtype=np.int64),
    )


@dataclass(slots=True)
class _Queue:
    base: int
    records: list[bytes]
    times: list[int]


class SyntheticStore:
    """See ``tiered.local.face.LocalStore``."""

    def __init__(self, store_id: str = "synthetic") -> None:
        self._lock = threading.RLock()
        self._queues: dict[MessageQueue, _Queue] = {}
        self._log: list[tuple[MessageQueue, int, _Queue]] = []
        self._end = 0
        self._count = 0
        self.identity = StoreIdentity("c", "b", store_id, "rocketmq", is_live=True)

    def append(self, topic: str, queue_id: int, body: bytes, *, first: int = 0) -> int:
        """Store one message; its queue offset."""
        queue = MessageQueue(topic, queue_id)
        with self._lock:
            row = self._queues.setdefault(queue, _Queue(first, [], []))
            offset = row.base + len(row.records)
            time_ms = 1_700_000_000_000 + self._count
            self._count += 1
            raw = make_record(queue, offset, self._end, body, time_ms)
            row.records.append(raw)
            row.times.append(time_ms)
            self._log.append((queue, offset, row))
            self._end += len(raw)
            return offset

    def expire(self, topic: str, queue_id: int, before: int) -> None:
        """Local retention: forget messages below ``before``."""
        with self._lock:
            row = self._queues[MessageQueue(topic, queue_id)]
            drop = before - row.base
            del row.records[:drop], row.times[:drop]
            row.base = before

    def delete(self, topic: str, queue_id: int) -> None:
        """The topic is deleted; its records stay in the log, and no queue lists them."""
        with self._lock:
            del self._queues[MessageQueue(topic, queue_id)]

    def cut(self, topic: str, queue_id: int, end: int) -> None:
        """A power failure takes the queue's tail from ``end`` on."""
        queue = MessageQueue(topic, queue_id)
        with self._lock:
            row = self._queues[queue]
            del row.records[end - row.base :], row.times[end - row.base :]
            self._log = [e for e in self._log if e[0] != queue or e[1] < end]

    def raw(self, queue: MessageQueue) -> dict[int, bytes]:
        """All records there are, by queue offset."""
        row = self._queues[queue]
        return {row.base + index: raw for index, raw in enumerate(row.records)}

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        with self._lock:
            return {
                queue: QueueBounds(QueueOffset(row.base), QueueOffset(row.base + len(row.records)))
                for queue, row in self._queues.items()
            }

    def refresh(self) -> None:
        """Nothing to look at."""

    def read(
        self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        with self._lock:
            row = self._queues.get(queue)
            if row is None:
                return None
            start = max(start, row.base)
            if start >= row.base + len(row.records):
                return None
            index, size = start - row.base, 0
            raws: list[bytes] = []
            for raw in row.records[index : index + count_max]:
                if raws and size + len(raw) > bytes_max:
                    break
                raws.append(raw)
                size += len(raw)
            return make_batch(queue, start, raws, row.times[index : index + len(raws)])

    def follow(self, starts: Mapping[MessageQueue, QueueOffset]) -> _Follower:
        return _Follower(self, dict(starts))

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> QueueOffset:
        row = self._queues[queue]
        return QueueOffset(row.base + sum(time_ms < timestamp_ms for time_ms in row.times))

    def waiting(self) -> Waiting:
        return Waiting()

    def report(self) -> StoreReport:
        return StoreReport(PhysicalOffset(0), PhysicalOffset(self._end))

    def close(self) -> None:
        """Nothing is open."""


class _Follower:
    """Walks the log in its order, as the real one does: a record that is listed, and whose queue offset was passed
    already, says that its queue's offsets fell."""

    def __init__(self, store: SyntheticStore, starts: dict[MessageQueue, QueueOffset]) -> None:
        self._store = store
        self._next: dict[MessageQueue, int] = dict(starts)
        self._at = 0
        self._fallen: set[MessageQueue] = set()
        self._last: dict[MessageQueue, int] = {}
        self.is_idle = False
        with store._lock:
            for at, (queue, offset, row) in enumerate(store._log):
                if row is store._queues.get(queue) and offset == self._next.get(queue, 0) - 1:
                    self._last[queue] = at

    @property
    def is_at_end(self) -> bool:
        return self.is_idle

    def poll(self, window_bytes: int) -> list[RecordBatch]:
        store = self._store
        found: dict[MessageQueue, list[int]] = {}
        with store._lock:
            size = 0
            while self._at < len(store._log) and size < window_bytes:
                queue, offset, row = store._log[self._at]
                self._at += 1
                if row is not store._queues.get(queue) or offset < row.base:
                    continue
                size += len(row.records[offset - row.base])
                if offset >= self._next.get(queue, 0):
                    found.setdefault(queue, []).append(offset)
                    self._next[queue], self._last[queue] = offset + 1, self._at - 1
                elif self._at - 1 > self._last.get(queue, -1):
                    self._fallen.add(queue)
            self.is_idle = self._at == len(store._log)
            return [self._batch(queue, offsets) for queue, offsets in found.items()]

    def take_fallen(self) -> set[MessageQueue]:
        fallen, self._fallen = self._fallen, set()
        return fallen

    def seek(self, queue: MessageQueue, start: QueueOffset) -> None:
        self._next[queue] = start
        self._last.pop(queue, None)
        self._at = 0

    def _batch(self, queue: MessageQueue, offsets: list[int]) -> RecordBatch:
        row = self._store._queues[queue]
        low, high = offsets[0] - row.base, offsets[-1] - row.base + 1
        return make_batch(queue, offsets[0], row.records[low:high], row.times[low:high])

    def close(self) -> None:
        """Nothing is open."""
