"""The consume queues of a store that is written: their kinds, and where each goes on, as the log does.

What a clean stop leaves is taken as it stands: the consume queues list every record of the log. Where they do not,
the store needs recovery (``tiered.store.recovery``); here it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.errors import DataError
from tiered.format.block import inner_counts, properties_bytes
from tiered.format.checkpoint import decode_checkpoint
from tiered.format.consume_queue import BATCH_ITEM, FILLER_SIZE, ITEM_BYTES
from tiered.format.properties import parse_properties
from tiered.local.catalog import SCHEDULE_TOPIC
from tiered.local.consumequeues import BatchQueue
from tiered.local.files import FileCache, FileRow
from tiered.local.layout import Layout, check_contiguous, list_queues, queue_file_bytes, read_text
from tiered.local.pieces import LogPieces, Next, count_sound
from tiered.store.messages import delivery_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tiered.format.block import RecordBlock
    from tiered.model import MessageQueue
    from tiered.store.facts import Facts


# -- kinds of queues -------------------------------------------------------------------------------
#
# Kinds of consume queues: plain ones, batch queues, and those of the schedule topic, whose tag codes are times.
#
# Everything here is pure but ``BatchQueue`` reads. Only for topics of a special kind are the records' own
# properties looked into, one by one.

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


# -- where a store goes on -------------------------------------------------------------------------

CHECKPOINT_FILE: Final = "checkpoint"
_ITEM: Final = Struct(">qiq")
_PIECE_BYTES: Final = 4 << 20
_FAR: Final = 1 << 62
_FILES_LOOKED_AT: Final = 2


@dataclass(slots=True)
class QueueEnd:
    """Where a queue goes on.

    Attributes:
        next_offset: Queue offset of its next message.
        file_bytes: Size of its files.
        is_new: It has no item yet, and so no file.
        unit: Number of the next unit of a batch queue; None of a plain one.
    """

    next_offset: int
    file_bytes: int
    is_new: bool = False
    unit: int | None = None


@dataclass(frozen=True, slots=True)
class StoreEnd:
    """Where a store goes on.

    Attributes:
        log_end: Physical offset of the next record.
        store_ms: Store time of the last record, UTC; 0 without one.
        queues: The queues that have consume queues.
    """

    log_end: int
    store_ms: int
    queues: Mapping[MessageQueue, QueueEnd]


def read_end(layout: Layout) -> StoreEnd:
    """Look for the ends of a store that was stopped cleanly.

    Raises:
        DataError: The log is damaged at its end, or the consume queues do not fit it.
        InvalidError: A file may not be read.
    """
    cache = FileCache()
    try:
        log = FileRow(cache, layout.log, layout.log_file_bytes)
        check_contiguous(layout.log, log.bases, layout.log_file_bytes)
        log_end, records_end, store_ms = _log_end(log)
        queues, listed_end = _queue_ends(layout, cache)
    finally:
        cache.close()
    if listed_end != records_end:
        raise DataError(
            f"the log's last record ends at {records_end}, what the consume queues list at {listed_end}",
            where=layout.root,
            do="let a broker recover the store, and stop it cleanly",
        )
    checkpoint = decode_checkpoint(read_text(f"{layout.root}/{CHECKPOINT_FILE}") or b"")
    return StoreEnd(log_end, max(store_ms, checkpoint.physical_timestamp_ms), queues)


def _log_end(log: FileRow) -> tuple[int, int, int]:
    """Where the log goes on, where its last record ends, and that one's store time."""
    if not log.bases:
        return 0, 0, 0
    position = records_end = log.bases[-_FILES_LOOKED_AT:][0]
    store_ms = 0
    pieces = LogPieces(log)
    while True:
        piece = pieces.read(position, _FAR, _PIECE_BYTES, check_crc=False)
        position = piece.end
        if count_sound(piece) < len(piece.block):
            piece.follows = Next.BROKEN
        elif len(piece.block):
            records_end, store_ms = piece.end, int(piece.block.store_timestamps_ms[-1])
        if piece.follows is Next.FILE and piece.next_file is not None:
            position = piece.next_file
        elif piece.follows is Next.FILE:
            return log.end, records_end, store_ms
        elif piece.follows is Next.NOTHING:
            return position, records_end, store_ms
        elif piece.follows is not Next.MORE:
            raise DataError(
                f"there is a damaged record, or none, before {position}, where the log should end",
                where=log.directory,
                do="let a broker recover the store, and stop it cleanly",
            )


def _queue_ends(layout: Layout, cache: FileCache) -> tuple[dict[MessageQueue, QueueEnd], int]:
    """The queues' ends, and one past the last record that any of them lists."""
    found: dict[MessageQueue, QueueEnd] = {}
    listed_end = 0
    for queue, is_batch in list_queues(layout.root).items():
        if is_batch:
            found[queue], listed = read_batch_end(layout, cache, queue)
            listed_end = max(listed_end, listed)
            continue
        folder = layout.queue_directory(queue, is_batch=False)
        row = FileRow(cache, folder, queue_file_bytes(folder, is_batch=False))
        count = _count_items(row)
        found[queue] = QueueEnd(count, row.file_bytes, is_new=not row.bases)
        if count > 0:
            physical, size, _ = _ITEM.unpack(row.read((count - 1) * ITEM_BYTES, ITEM_BYTES))
            listed_end = max(listed_end, physical + size if size != FILLER_SIZE else 0)
    return found, listed_end


def read_batch_end(
    layout: Layout, cache: FileCache, queue: MessageQueue, limit: int | None = None
) -> tuple[QueueEnd, int]:
    """Where a batch queue goes on, and one past the last record that it lists; below ``limit`` where it is given."""
    folder = layout.queue_directory(queue, is_batch=True)
    index = BatchQueue(cache, folder, queue_file_bytes(folder, is_batch=True))
    end = batch_end(index, limit)
    is_new = not index.row.bases
    return QueueEnd(end.next_offset, index.row.file_bytes, is_new, end.unit), end.listed_end


def _count_items(row: FileRow) -> int:
    """One past the queue offset of the last written item."""
    for base in reversed(row.bases):
        low, high = base // ITEM_BYTES, (base + row.file_bytes) // ITEM_BYTES
        first = low
        while low < high:
            middle = (low + high) // 2
            item = row.read(middle * ITEM_BYTES, ITEM_BYTES)
            is_written = len(item) == ITEM_BYTES and _ITEM.unpack(item)[1] != 0
            low, high = (middle + 1, high) if is_written else (low, middle)
        if low > first or base == row.bases[0]:
            return low
    return 0
