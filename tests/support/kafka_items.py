"""Batches of Kafka's as a local store hands them out: an item for each offset, over real bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from support.kafka_batches import HEAD, batch, section

from tiered.format.record_kind import Mark, RecordKind, tag_codes
from tiered.local.interface import HoleReason, RecordBatch
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

TRANSACTIONAL, CONTROL = 16, 32
PARTITION = MessageQueue("t", 0)


def data(base: int, count: int = 1, producer: int = -1, *, epoch: int = 0, **fields: int) -> bytes:
    """A batch of ``count`` records."""
    payload = section([(n, 0, None, b"v%d" % n, ()) for n in range(count)])
    has = {"base_offset": base, "leader_epoch": epoch, "producer_id": producer} | fields
    return batch(payload, count, **has)


def transactional(base: int, count: int, producer: int, *, epoch: int = 0) -> bytes:
    """A batch of a transaction."""
    return data(base, count, producer, epoch=epoch, attributes=TRANSACTIONAL)


def marker(base: int, producer: int, *, aborts: bool, epoch: int = 0) -> bytes:
    """The end of a transaction."""
    payload = section([(0, 0, bytes((0, 0, 0, 0 if aborts else 1)), bytes(6), ())])
    fields = {"base_offset": base, "leader_epoch": epoch, "producer_id": producer}
    return batch(payload, 1, **fields, attributes=CONTROL | TRANSACTIONAL)


def items_of(batches: Sequence[bytes], queue: MessageQueue = PARTITION) -> RecordBatch:
    """Batches in the order of their offsets, as one; what no batch covers was cleaned away."""
    heads = [HEAD.unpack_from(one) for one in batches]
    low, end = heads[0][0], heads[-1][0] + heads[-1][6] + 1
    positions, sizes = np.zeros(end - low, np.int64), np.zeros(end - low, np.int32)
    codes, times = np.full(end - low, int(HoleReason.COMPACTED)), np.full(end - low, -1)
    at = 0
    for one, head in zip(batches, heads, strict=True):
        span = slice(head[0] - low, head[0] + head[6] + 1 - low)
        flags = Mark.TRANSACTIONAL * bool(head[5] & 16) | Mark.CONTROL * bool(head[5] & 32)
        positions[span], sizes[span], times[span] = at, len(one), head[8]
        codes[span] = tag_codes(RecordKind.KAFKA, np.array([head[2]]), flags)
        at += len(one)
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(low),
        data=b"".join(batches),
        positions=positions,
        sizes=sizes,
        tag_codes=codes,
        store_timestamps_ms=times,
        physical_offsets=positions,
    )
