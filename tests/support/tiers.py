"""Makes small tiers out of real records: holes, inner batches, gaps, several parts and segments, without a dispatcher."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from support.bundles import part_action
from support.examples import make
from support.journals import PREFIX

from backends.memory import MemoryStore
from tiered.api.broker_place import Place
from tiered.clock import ManualClock
from tiered.dispatch.group_commit import Uploader
from tiered.format.record import encode_record
from tiered.format.sysflag import INNER_BATCH
from tiered.journal.append import JournalWriter
from tiered.journal.entry import row_of
from tiered.local.interface import HoleReason, Quarantined, RecordBatch
from tiered.log.actions import Head
from tiered.log.composite import CommitPolicy, CompositeFlatFile
from tiered.log.divergence import measure
from tiered.log.parts import Incarnation, queue_action
from tiered.log.state import TierMachine
from tiered.model import MessageQueue, PhysicalOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore
    from tiered.log.bundles import StoredBundle
    from tiered.log.composite import GroupCommit
    from tiered.log.parts import Part
    from tiered.log.state import TierState

QUEUE = MessageQueue("topic-ä", 3)
POLICY = CommitPolicy(1 << 20, 0.0, 1 << 40, 1 << 50)
TIME_MS = 1_700_000_000_000

Item = bytes | tuple[int, bytes] | None
"""A message's body; a number of inner messages and the body of their batch; or a hole."""


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


@dataclass(frozen=True, slots=True)
class BuiltPlace(Place):
    """A broker whose tier ``TierBuilder`` builds; its prefix is shorter than real ones."""

    @property
    def prefix(self) -> str:
        return PREFIX


PLACE = BuiltPlace("c", "b")


class TierBuilder:
    """Writes a tier, one part at a time, as dispatch does.

    Attributes:
        store: Where.
        prefix: The broker's.
        journal: With our epoch.
        uploader: Makes the bundles.
    """

    def __init__(
        self,
        store: ObjectStore | None = None,
        *,
        writer: str = "0badcafe",
        prefix: str | None = None,
    ) -> None:
        self.prefix = PREFIX if prefix is None else prefix
        self.store: ObjectStore = MemoryStore() if store is None else store
        self._clock = ManualClock()
        self.journal: JournalWriter[TierState] = JournalWriter(
            self.store, self.prefix, TierMachine(), writer=writer, clock=self._clock,
            rng=random.Random(1), stop=threading.Event(),
        )  # fmt: skip
        self.journal.take_epoch({"host": "h"})
        self.uploader = Uploader(
            self.store, self.prefix, epoch=self.journal.epoch, writer=writer,
            clock=self._clock,
        )  # fmt: skip
        self._files: dict[MessageQueue, CompositeFlatFile] = {}

    def file(self, queue: MessageQueue = QUEUE, first: int = 0) -> CompositeFlatFile:
        """The write side of a queue."""
        if queue not in self._files:
            start = QueueOffset(first)
            incarnation = self.journal.state.incarnation(queue) or Incarnation(0, start, start)
            self._files[queue] = CompositeFlatFile(queue, incarnation, POLICY)
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
        base = self.file(queue, first).append_offset
        return self.add_batch(batch_of(base, items, queue=queue), roll=roll)

    def add_batch(self, batch: RecordBatch, *, roll: bool = False) -> Part:
        """Commit a batch as one part in a bundle of its own, where its queue goes on."""
        return self.add_round(batch, roll=roll)[0]

    def add_round(self, *batches: RecordBatch, roll: bool = False) -> list[Part]:
        """Commit batches of several queues, which are sorted, as one bundle; their parts."""
        commits = [self.take(batch, roll=roll) for batch in batches]
        return self.name(self.put(*commits))

    def take(self, batch: RecordBatch, *, roll: bool = False) -> GroupCommit:
        """Cut a commit: this batch. ``roll``: it begins a new segment; everything before it must have been named."""
        file = self.file(batch.queue)
        if roll:
            assert file.end_segment()
        file.append(batch, 0.0)
        commit = file.take(self._clock.now_ms())
        assert commit is not None
        return commit

    def put(self, *commits: GroupCommit, alone: bool = False) -> StoredBundle:
        """Upload commits, which are sorted, as one bundle, which nothing names."""
        stored = self.uploader.put_commits(commits, alone=alone)
        for commit in commits:
            self.uploader.put_quarantine(commit)
            (ready,) = self.file(commit.queue).stored(commit)
            assert ready is commit
        return stored

    def name(self, *stored: StoredBundle) -> list[Part]:
        """Have an entry name all sections of bundles; their parts."""
        self.say(part_action(*stored))
        parts = []
        for named in (one.named for one in stored):
            for queue, part in zip(named.queues, named.parts, strict=True):
                self.file(queue).committed(part)
                parts.append(part)
        return parts

    def truncate(self, end: int, *, queue: MessageQueue = QUEUE, reason: str = "made so") -> None:
        """Have the broker truncate what is behind ``end``, be it between two parts or inside of one."""
        incarnation = self.journal.state.incarnation(queue)
        assert incarnation is not None
        head = None
        for part in incarnation.parts():
            if part.queue_offset < end < part.queue_end:
                size, holes = measure(self.store, self.prefix, part, end - part.queue_offset)
                head = row_of(Head(part.queue_offset, part.log_offset, size, holes, 0, part.holes))
        fields = {"end": end, "was": incarnation.commit_offset, "head": head, "reason": reason}
        self.say(queue_action("truncate", queue, incarnation.number, **fields))
        self.forget(queue)

    def begin_anew(self, queue: MessageQueue = QUEUE, reason: str = "made so") -> None:
        """Have the topic deleted and created again."""
        incarnation = self.journal.state.incarnation(queue)
        number = incarnation.number + 1 if incarnation else 0
        self.say(queue_action("incarnation", queue, number, start=0, reason=reason))
        self.forget(queue)

    def forget(self, *queues: MessageQueue) -> None:
        """Begin again with what the journal says of these queues; of all, when none is named."""
        for queue in queues or tuple(self._files):
            self._files.pop(queue, None)

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
