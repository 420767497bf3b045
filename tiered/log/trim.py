"""Cutting off what a batch repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiered.local.face import RecordBatch

if TYPE_CHECKING:
    from tiered.model import QueueOffset


def trim(batch: RecordBatch, start: QueueOffset) -> RecordBatch:
    """The batch from queue offset ``start`` on (which lies in it), without the bytes before."""
    skip = start - batch.base_offset
    if skip <= 0:
        return batch
    kept = batch.sizes[skip:] > 0
    first = int(batch.positions[skip:][kept].min()) if kept.any() else size_of(batch)
    return RecordBatch(
        queue=batch.queue,
        base_offset=start,
        data=memoryview(batch.data).cast("B")[first:],
        positions=np.maximum(batch.positions[skip:] - first, 0),
        sizes=batch.sizes[skip:],
        tag_codes=batch.tag_codes[skip:],
        store_timestamps_ms=batch.store_timestamps_ms[skip:],
        physical_offsets=batch.physical_offsets[skip:],
        quarantined=[q for q in batch.quarantined if q.queue_offset >= start],
        properties_sizes=None if batch.properties_sizes is None else batch.properties_sizes[skip:],
    )


def size_of(batch: RecordBatch) -> int:
    """Bytes of its records."""
    return memoryview(batch.data).nbytes
