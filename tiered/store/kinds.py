"""Kinds of consume queues: plain ones, batch queues, and those of the schedule topic, whose tag codes are times.

Everything here is pure but ``BatchQueue`` reads. Only for topics of a special kind are the records' own properties
looked into, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tiered.format.block import inner_counts, properties_bytes
from tiered.format.consume_queue import BATCH_ITEM
from tiered.format.properties import parse_properties
from tiered.local.topics import SCHEDULE_TOPIC
from tiered.store.delays import delivery_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.format.block import RecordBlock
    from tiered.local.consumequeues import BatchQueue
    from tiered.store.facts import Facts

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueueKinds:
    """What kind of consume queues a topic has.

    Attributes:
        is_batch: Whether a topic's are batch queues.
        delays_ms: Of the delay levels, the first of level 1.
        file_bytes: Length of a new plain queue's files.
        batch_file_bytes: Length of a new batch queue's files.
    """

    is_batch: Callable[[str], bool]
    delays_ms: tuple[int, ...]
    file_bytes: int
    batch_file_bytes: int

    def needs_records(self, topic: str) -> bool:
        """Whether a topic's lists say more of a record than was handed over with it."""
        return topic == SCHEDULE_TOPIC or self.is_batch(topic)

    def counts(self, topic: str, facts: Facts, indices: Longs) -> Longs:
        """int64[n]: queue offsets that each record takes."""
        if facts.block is None or not self.is_batch(topic):
            return np.ones(len(indices), np.int64)
        return inner_counts(facts.block)[indices].astype(np.int64)

    def tag_codes(self, topic: str, facts: Facts, indices: Longs) -> Longs:
        """int64[n]: what the list says of each record's tags; of delayed ones when they are to be delivered (UTC ms)."""
        codes: Longs = facts.described.tag_codes[indices]
        if facts.block is None or topic != SCHEDULE_TOPIC:
            return codes
        return self._delivery_codes(facts.block, indices, codes)

    def _delivery_codes(self, block: RecordBlock, indices: Longs, codes: Longs) -> Longs:
        found = codes.copy()
        for at, number in enumerate(indices.tolist()):
            properties = parse_properties(properties_bytes(block, number))
            stored_ms = int(block.store_timestamps_ms[number])
            due_ms = delivery_ms(properties, stored_ms, self.delays_ms)
            found[at] = codes[at] if due_ms is None else due_ms
        return found


def encode_units(facts: Facts, indices: Longs, counts: Longs, tag_codes: Longs) -> bytes:
    """The units of a batch queue for records."""
    units = np.zeros(len(indices), BATCH_ITEM)
    units["physical_offset"] = facts.physical_offsets[indices]
    units["size"] = facts.sizes[indices]
    units["tag_code"] = tag_codes
    units["store_timestamp_ms"] = facts.store_timestamps_ms[indices]
    units["base_offset"] = facts.queue_offsets[indices]
    units["count"] = counts
    units["compacted_offset"] = -1
    return units.tobytes()


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """Where a batch queue goes on.

    Attributes:
        unit: Number of the next unit.
        next_offset: Queue offset of the next message.
        listed_end: Behind the last record that it lists; 0 without one.
    """

    unit: int
    next_offset: int
    listed_end: int


def batch_end(index: BatchQueue, limit: int | None = None) -> BatchEnd:
    """Where a batch queue ends, or would if it listed only records below the physical offset ``limit``."""
    first, last = index.unit_span()
    end = (
        index.scan_end()
        if limit is None
        else index.split(first, last, lambda units: units["physical_offset"] < limit)
    )
    while end > first:
        unit = index.last_unit(end)
        if unit is not None and (limit is None or int(unit["physical_offset"][0]) < limit):
            physical, size = int(unit["physical_offset"][0]), int(unit["size"][0])
            next_offset = int(unit["base_offset"][0]) + int(unit["count"][0])
            return BatchEnd(end, next_offset, physical + size)
        end -= 1
    return BatchEnd(first, 0, 0)
