"""Makes small tiers out of real records: holes, inner batches, gaps, several parts and segments, without a dispatcher."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from support.examples import make
from support.journals import PREFIX

from backends.errors import BackendError
from backends.memory import MemoryStore
from tiered.clock import ManualClock
from tiered.dispatch.uploads import Uploader
from tiered.format.record import encode_record
from tiered.format.sysflag import INNER_BATCH
from tiered.journal.writer import JournalWriter
from tiered.local.face import HoleReason, Quarantined, RecordBatch
from tiered.log.composite import CommitPolicy, CompositeFlatFile
from tiered.log.state import Part, QueueLife, TierMachine, part_json, queue_action
from tiered.model import MessageQueue, PhysicalOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore
    from tiered.dispatch.uploads import StoredLog
    from tiered.log.composite import GroupCommit
    from tiered.log.state import TierState

QUEUE = MessageQueue("topic-ä", 3)
POLICY = CommitPolicy(1 << 20, 0.0, 1 << 40, 1 << 50)
TIME_MS = 1_700_000_000_000

Item = bytes | tuple[int, bytes] | None
"""A message's body; a number of inner messages and the body of their batch; or a hole."""


def put_log(uploader: Uploader, commit: GroupCommit) -> StoredLog:
    """Upload the records of one commit; its error is raised."""
    (stored,) = uploader.put_logs([commit])
    if isinstance(stored, BackendError):
        raise stored
    return stored


def put_index(uploader: Uploader, stored: StoredLog) -> Part:
    """Upload the items of one commit; its error is raised."""
    (part,) = uploader.put_indexes([stored])
    if isinstance(part, BackendError):
        raise part
    return part


def record_of(
    queue: MessageQueue, offset: int, body: bytes, *, inner: int = 0, time_ms: int = TIME_MS
) -> bytes:
    """A real record, of an inner batch of ``inner`` messages if that is above 0."""
    properties = b"TAGS\x01a\x02" + (b"INNER_NUM\x01%d\x02" % inner if inner else b"")
    record = make(
        queue_id=queue.queue_id,
        queue_offset=offset,
        physical_offset=1000 + offset,
        sys_flag=INNER_BATCH if inner else 0,
        born_timestamp_ms=time_ms,
        store_timestamp_ms=time_ms,
        body=body,
        topic=queue.topic,
        properties_raw=properties,
    )
    return encode_record(record)


def batch_of(base: int, items: Sequence[Item], *, queue: MessageQueue = QUEUE) -> RecordBatch:
    """A batch; the store time of the message with queue offset ``n`` is ``TIME_MS + n``."""
    rows: list[tuple[int, int, int, int, int]] = []
    raws: list[bytes] = []
    quarantined: list[Quarantined] = []
    size, offset = 0, base
    for item in items:
        if item is None:
            rows.append((size, 0, HoleReason.DAMAGED, -1, -1))
            at = PhysicalOffset(1000 + offset)
            quarantined.append(
                Quarantined(
                    QueueOffset(offset), at, HoleReason.DAMAGED, "made so", b"bad %d" % offset
                )
            )
            offset += 1
            continue
        inner, body = item if isinstance(item, tuple) else (0, item)
        raw = record_of(queue, offset, body, inner=inner, time_ms=TIME_MS + offset)
        rows += [(size, len(raw), 97, TIME_MS + offset, 1000 + offset)] * max(1, inner)
        raws.append(raw)
        size += len(raw)
        offset += max(1, inner)
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(base),
        data=b"".join(raws),
        positions=columns[0],
        sizes=columns[1].astype(np.int32),
        tag_codes=columns[2],
        store_timestamps_ms=columns[3],
        physical_offsets=columns[4],
        quarantined=quarantined,
    )


class TierBuilder:
    """Writes a tier, one part at a time, as dispatch does.

    Attributes:
        store: Where.
        journal: With our reign.
        uploader: Makes the objects.
    """

    def __init__(
        self,
        store: ObjectStore | None = None,
        *,
        writer: str = "0badcafe",
        prefix: str | None = None,
    ) -> None:
        prefix = PREFIX if prefix is None else prefix
        self.store: ObjectStore = MemoryStore() if store is None else store
        self._clock = ManualClock()
        self.journal: JournalWriter[TierState] = JournalWriter(
            self.store, prefix, TierMachine(), writer=writer, clock=self._clock,
            rng=random.Random(1), stop=threading.Event(),
        )  # fmt: skip
        self.journal.take_reign({"host": "h"})
        self.uploader = Uploader(
            self.store, prefix, generation=self.journal.generation, writer=writer
        )
        self._files: dict[MessageQueue, CompositeFlatFile] = {}

    def file(self, queue: MessageQueue = QUEUE, first: int = 0) -> CompositeFlatFile:
        """The write side of a queue."""
        if queue not in self._files:
            start = QueueOffset(first)
            life = self.journal.state.life(queue) or QueueLife(0, start, start)
            self._files[queue] = CompositeFlatFile(queue, life, POLICY)
        return self._files[queue]

    def add(
        self,
        items: Sequence[Item],
        *,
        queue: MessageQueue = QUEUE,
        first: int = 0,
        roll: bool = False,
    ) -> Part:
        """Commit items as one part, where the queue goes on (``first``: where a new queue begins)."""
        file = self.file(queue, first)
        file._roll_next = file._roll_next or roll
        return self.add_batch(batch_of(file.append_offset, items, queue=queue))

    def add_batch(self, batch: RecordBatch) -> Part:
        """Commit a batch as one part, where its queue goes on."""
        queue, file = batch.queue, self.file(batch.queue)
        file.append(batch, 0.0)
        commit = file.take(self._clock.now_ms())
        stored = put_log(self.uploader, commit)
        file.log_stored()
        part = put_index(self.uploader, stored)
        self.uploader.put_quarantine(stored)
        fields = {"segment": commit.segment, "part": part_json(part)}
        self.say(queue_action("part", queue, commit.incarnation, **fields))
        file.committed(commit, part)
        return part

    def gap(self, count: int, *, queue: MessageQueue = QUEUE) -> None:
        """Leave a gap."""
        file = self.file(queue)
        start = file.commit_offset
        fields = {"start": start, "end": start + count, "reason": "made so"}
        self.say(queue_action("gap", queue, file.incarnation, **fields))
        file.skip_to(QueueOffset(start + count))

    def say(self, action: Any) -> None:
        """Append an entry; nothing of it may be refused."""
        before = self.journal.state.refused_parts
        self.journal.append([action])
        assert self.journal.state.refused_parts == before
