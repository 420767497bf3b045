"""A local store in memory, made of real record bytes, that tests can grow, expire and hold back at the right moment."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from support.examples import make

from tiered.format.properties import tag_hash
from tiered.format.record import encode_record
from tiered.local.interface import (
    HoleReason,
    Quarantined,
    RecordBatch,
    StoreIdentity,
    StoreReport,
    Waiting,
)
from tiered.model import MessageQueue, PhysicalOffset, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


PLAIN_PROPERTIES = b"TAGS\x01a\x02KEYS\x01k%d\x02"


def make_record(
    queue: MessageQueue,
    offset: int,
    physical: int,
    body: bytes,
    time_ms: int,
    *,
    properties: bytes | None = None,
) -> bytes:
    """A real record; without ``properties`` with the tag ``a`` and a key."""
    record = make(
        queue_id=queue.queue_id,
        queue_offset=offset,
        physical_offset=physical,
        born_timestamp_ms=time_ms,
        store_timestamp_ms=time_ms,
        body=body,
        topic=queue.topic,
        properties_raw=PLAIN_PROPERTIES % offset if properties is None else properties,
    )
    return encode_record(record)


def make_batch(
    queue: MessageQueue,
    base: int,
    raws: Sequence[bytes],
    times: Sequence[int],
    *,
    tags: Sequence[int] | None = None,
    quarantined: Sequence[Quarantined] = (),
) -> RecordBatch:
    """A batch of records that lie one after another; an empty one is a hole, whose tag code is its reason."""
    sizes = np.array([len(raw) for raw in raws], np.int32)
    ends = np.cumsum(sizes, dtype=np.int64)
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(base),
        data=b"".join(raws),
        positions=ends - sizes,
        sizes=sizes,
        tag_codes=np.array([97] * len(raws) if tags is None else tags, np.int64),
        store_timestamps_ms=np.array(times, np.int64),
        physical_offsets=np.arange(len(raws), dtype=np.int64),
        quarantined=quarantined,
    )


@dataclass(slots=True)
class _Queue:
    """What a queue has; ``damaged``: raw bytes of records that are holes for a reader, by queue offset."""

    base: int
    records: list[bytes] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    damaged: dict[int, bytes] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.base + len(self.records)

    def batch(self, queue: MessageQueue, low: int, high: int) -> RecordBatch:
        """The items ``[low, high)``."""
        some = slice(low - self.base, high - self.base)
        aside = [
            Quarantined(
                QueueOffset(at), PhysicalOffset(at), HoleReason.DAMAGED, "damaged", self.damaged[at]
            )
            for at in range(low, high)
            if at in self.damaged
        ]
        return make_batch(
            queue,
            low,
            self.records[some],
            self.times[some],
            tags=self.tags[some],
            quarantined=aside,
        )

    def cut(self, end: int) -> _Queue:
        """Lose the items from ``end`` on; what was lost."""
        at = end - self.base
        lost = _Queue(
            end,
            self.records[at:],
            self.times[at:],
            self.tags[at:],
            {offset: raw for offset, raw in self.damaged.items() if offset >= end},
        )
        del self.records[at:], self.times[at:], self.tags[at:]
        for offset in lost.damaged:
            del self.damaged[offset]
        return lost

    def regain(self, lost: _Queue) -> None:
        """Undo ``cut``."""
        self.records += lost.records
        self.times += lost.times
        self.tags += lost.tags
        self.damaged |= lost.damaged


class SyntheticStore:
    """See ``tiered.local.interface.LocalStore``."""

    def __init__(self, store_id: str = "synthetic") -> None:
        self._lock = threading.RLock()
        self._queues: dict[MessageQueue, _Queue] = {}
        self._log: list[tuple[MessageQueue, int, _Queue]] = []
        self._end = 0
        self._count = 0
        self.identity = StoreIdentity("c", "b", store_id, "rocketmq", is_live=True)

    def append(
        self,
        topic: str,
        queue_id: int,
        body: bytes,
        *,
        first: int = 0,
        later_ms: int = 0,
        tags: str | None = "a",
        properties: bytes | None = None,
        is_damaged: bool = False,
    ) -> int:
        """Store one message.

        Args:
            topic: Where.
            queue_id: Where.
            body: What.
            first: Offset at which a queue begins that is not there yet.
            later_ms: Its store time is by so much another than the store's clock would give it.
            tags: What ``properties`` have as its tags.
            properties: Of the record; None: plain ones, with the tag ``a``.
            is_damaged: No reader can read it: a hole.

        Returns:
            Its queue offset.
        """
        queue = MessageQueue(topic, queue_id)
        with self._lock:
            row = self._queues.setdefault(queue, _Queue(first))
            offset = row.end
            time_ms = 1_700_000_000_000 + self._count + later_ms
            self._count += 1
            raw = make_record(queue, offset, self._end, body, time_ms, properties=properties)
            if is_damaged:
                row.damaged[offset] = raw
            row.records.append(b"" if is_damaged else raw)
            row.times.append(time_ms)
            row.tags.append(HoleReason.DAMAGED if is_damaged else tag_hash(tags))
            self._log.append((queue, offset, row))
            self._end += len(raw)
            return offset

    def expire(self, topic: str, queue_id: int, before: int) -> None:
        """Local retention: forget messages below ``before``."""
        with self._lock:
            row = self._queues[MessageQueue(topic, queue_id)]
            drop = before - row.base
            del row.records[:drop], row.times[:drop], row.tags[:drop]
            row.base = before

    def delete(self, topic: str, queue_id: int) -> None:
        """The topic is deleted; its records stay in the log, and no queue lists them."""
        with self._lock:
            del self._queues[MessageQueue(topic, queue_id)]

    def cut(self, topic: str, queue_id: int, end: int) -> None:
        """A power failure takes the queue's tail from ``end`` on."""
        queue = MessageQueue(topic, queue_id)
        with self._lock:
            self._queues[queue].cut(end)
            self._log = [e for e in self._log if e[0] != queue or e[1] < end]

    def raw(self, queue: MessageQueue) -> dict[int, bytes]:
        """All records there are, by queue offset."""
        row = self._queues[queue]
        return {row.base + index: raw for index, raw in enumerate(row.records)}

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        with self._lock:
            return {
                queue: QueueBounds(QueueOffset(row.base), QueueOffset(row.end))
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
            if start >= row.end:
                return None
            end, size = start, 0
            for raw in row.records[start - row.base :][:count_max]:
                if end > start and size + len(raw) > bytes_max:
                    break
                end += 1
                size += len(raw)
            return row.batch(queue, start, end)

    def lineage(self, queue: MessageQueue, at: QueueOffset | None = None) -> None:
        """As RocketMQ's."""

    def read_compacted(
        self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        return None

    def follow(
        self,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> _Follower:
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
        return self._store._queues[queue].batch(queue, offsets[0], offsets[-1] + 1)

    def close(self) -> None:
        """Nothing is open."""
