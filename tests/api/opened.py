"""Tiers for tests of the Python API: in memory, built part by part."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
from support.tiers import TierBuilder

from backends.registry import open_store
from tiered.dispatch.sealer import Sealer, SealJob
from tiered.local.face import RecordBatch
from tiered.log.decode import TierBatch
from tiered.log.seal import SealPolicy, plan_seals
from tiered.log.state import queue_action
from tiered.model import LogOffset, MessageQueue, QueueOffset
from tiered.plugin.place import Place
from tiered.plugin.tier import open as open_tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.format.record import Record
    from tiered.plugin.tier import Tier

_NAMES = itertools.count()
ORDERS = MessageQueue("orders", 0)


class Made:
    """A tier that can be opened and goes on growing.

    Attributes:
        url: Where.
        builder: Adds to it.
    """

    def __init__(self) -> None:
        self.url = f"memory://api-{next(_NAMES)}"
        with patch("support.tiers.PREFIX", Place("c", "b").prefix):
            self.builder = TierBuilder(open_store(self.url))

    def open(self, **more: Any) -> Tier:
        return open_tier(self.url, **more)

    def add(self, *bodies: bytes, queue: MessageQueue = ORDERS) -> None:
        """One part of these messages."""
        self.builder.add(bodies, queue=queue)

    def begin_again(self, queue: MessageQueue = ORDERS) -> None:
        """As when a topic was deleted and made again."""
        life = self.builder.journal.state.life(queue)
        number = life.incarnation + 1 if life else 0
        self.builder.say(queue_action("incarnation", queue, number, start=0, reason="made so"))
        self.builder._files.pop(queue, None)

    def take_back(self, end: int, queue: MessageQueue = ORDERS) -> None:
        """As when a broker comes back with less: what is behind ``end``, where a part ends, is taken back."""
        life = self.builder.journal.state.life(queue)
        assert life
        why = {"end": end, "was": life.commit_offset, "part": None, "reason": "made so"}
        self.builder.say(queue_action("take_back", queue, life.incarnation, **why))
        self.builder._files.pop(queue, None)

    def expire(self, start: int, end: int, queue: MessageQueue = ORDERS, *, life: int = 0) -> None:
        """Messages ``[start, end)`` of a life expire, and their objects are deleted."""
        before = self._named()
        number = self.builder.journal.state.queues[queue][life].incarnation
        bounds = {"life": life, "min_from": start, "min_to": end}
        self.builder.say(queue_action("expire", queue, number, **bounds))
        self._delete(before - self._named())

    def merge(self) -> None:
        """All that lies side by side is merged and sealed, and the objects from before are deleted."""
        before, prefix = self._named(), Place("c", "b").prefix
        sealer = Sealer(self.builder.uploader, self.builder.store, prefix)
        policy = SealPolicy(small_bytes=1 << 20, merged_bytes_max=4 << 20)
        for plan in plan_seals(self.builder.journal.state, policy, with_open=True):
            job = SealJob(plan)
            assert sealer.advance(job)
            self.builder.say(job.action())
        self.builder._files.clear()
        self._delete(before - self._named())

    def _named(self) -> set[str]:
        lives = (life for lives in self.builder.journal.state.queues.values() for life in lives)
        parts = [part for life in lives for part in life.parts()]
        return {key for part in parts for key in (part.log.key, part.index.key)}

    def _delete(self, keys: set[str]) -> None:
        for key in keys:
            self.builder.store.delete(Place("c", "b").prefix + key)


def batch_of_records(records: Sequence[Record], base: int = 0, codes: int = 7) -> TierBatch:
    """A batch whose item ``n`` is record ``n``, as if read from a tier at log offset 1000."""
    from tiered.format.record import encode_record

    raws = [encode_record(record) for record in records]
    sizes = np.array([len(raw) for raw in raws], np.int64)
    positions = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if raws else sizes
    return TierBatch(
        RecordBatch(
            queue=MessageQueue(records[0].topic if records else "t", 0),
            base_offset=QueueOffset(base),
            data=memoryview(b"".join(raws)),
            positions=positions.astype(np.int64),
            sizes=sizes.astype(np.int32),
            tag_codes=np.full(len(raws), codes, np.int64),
            store_timestamps_ms=np.array([r.store_timestamp_ms for r in records], np.int64),
            physical_offsets=np.array([r.physical_offset for r in records], np.int64),
        ),
        LogOffset(1000),
    )
