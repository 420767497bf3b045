"""Making a store whole that was not stopped cleanly.

============================ ==========================================================================
question                     answer
============================ ==========================================================================
where to begin               with the log file that holds the checkpoint's logics physical offset: what
                             lies below it was on the disk when the checkpoint was written. Without one,
                             or without consume queues, with the first file
where the log ends           at the first record, from there, that fails: magic, sizes, CRC, its own
                             physical offset, or sectors that were never written. Behind the end
                             everything becomes zero, later files go: no stale record can come back
consume queues, key index    cut back to where we began, then listed again from the log, as a running
                             store does. Entries behind the end become zero
damage below the checkpoint  is no torn tail: it is an error, and nothing is changed
============================ ==========================================================================

**Contract.** The store's lock is held. Everything is repeatable: a crash during recovery is recovered from likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.errors import DataError
from tiered.format.block import properties_bytes, topic_bytes
from tiered.format.checkpoint import Checkpoint, decode_checkpoint
from tiered.format.consume_queue import ITEM_BYTES, is_filler
from tiered.local.configs import read_text
from tiered.local.consumequeues import PlainQueue
from tiered.local.files import FileCache, FileRow
from tiered.local.layout import check_contiguous, list_queues, queue_file_bytes
from tiered.local.pieces import LogPieces, Next, Piece
from tiered.local.recovery import count_sound
from tiered.store.facts import of_block
from tiered.store.rows import cut_row
from tiered.store.startup import CHECKPOINT_FILE, QueueEnd

if TYPE_CHECKING:
    from tiered.format.block import RecordBlock
    from tiered.format.consume_queue import Flags, Items
    from tiered.local.layout import Layout
    from tiered.model import MessageQueue
    from tiered.store.listing import Listing
    from tiered.store.rows import RowWriter

_PIECE_BYTES: Final = 8 << 20
_LOST: Final = bytes(256)
_HEAD_BYTES: Final = 1 << 16
_FAR: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Recovered:
    """What recovery did.

    Attributes:
        begin: Where it began to read the log.
        log_end: Where the log ends.
        store_ms: Store time of the last record read; 0 without one.
        records: How many were read.
    """

    begin: int
    log_end: int
    store_ms: int
    records: int


def read_checkpoint(root: str) -> Checkpoint:
    """The checkpoint of a store; zeros when there is none."""
    return decode_checkpoint(read_text(f"{root}/{CHECKPOINT_FILE}") or b"")


def plan_begin(
    bases: tuple[int, ...], file_bytes: int, checkpoint: Checkpoint, *, has_queues: bool
) -> int:
    """Where recovery begins to read: where a log file begins."""
    covered = checkpoint.logics_physical_offset
    if not has_queues or not bases[0] <= covered <= bases[-1] + file_bytes:
        return bases[0]
    return max(base for base in bases if base <= covered)


def find_log_end(log: FileRow, begin: int, covered: int) -> tuple[int, int]:
    """Walk the log from ``begin``: where it ends, and the store time of its last record.

    Raises:
        DataError: It ends below ``covered``, so what was on the disk is damaged.
    """
    pieces, position, store_ms = LogPieces(log), begin, 0
    while True:
        piece = pieces.read(position, _FAR, _PIECE_BYTES)
        sound = count_whole(piece, covered)
        if sound:
            store_ms = int(piece.block.store_timestamps_ms[sound - 1])
        if sound < len(piece.block):
            position = piece.start + int(piece.block.positions[sound])
            break
        position = piece.end
        if piece.follows is Next.FILE and piece.next_file is not None:
            if not _has_record(log, piece.next_file):
                break  # the blank goes too: what it made room for is not there
            position = piece.next_file
        elif piece.follows is not Next.MORE:
            break
    if position < covered:
        raise DataError(
            f"a record at {position} is damaged, and the log was on the disk up to {covered}",
            where=log.directory,
            do="restore the file, or let a broker recover the store: it gives up what follows",
        )
    return position, store_ms


def count_whole(piece: Piece, covered: int) -> int:
    """How many records, from the first, pass every check.

    No CRC covers topic and properties. Where sectors of them were not written yet they are zero; that is looked for in
    records that the checkpoint does not cover.
    """
    sound, block = count_sound(piece), piece.block
    first = int(np.searchsorted(block.positions[:sound], covered - piece.start))
    view = memoryview(block.buffer)
    for starts, sizes in (
        (block.topic_positions, block.topic_sizes),
        (block.properties_positions, block.properties_sizes),
    ):
        begins = starts[first:sound]
        parts = map(slice, begins.tolist(), (begins + sizes[first:sound]).tolist())
        if b"\0" in b"".join(map(view.__getitem__, parts)):
            lost = (number for number in range(first, sound) if _has_lost(block, number))
            return next(lost, sound)
    return sound


def _has_lost(block: RecordBlock, number: int) -> bool:
    raw = properties_bytes(block, number)
    ends = (raw[:1], raw[-1:])
    return b"\0" in topic_bytes(block, number) or b"\0" in ends or _LOST in raw


def cut_queues(
    rows: RowWriter, layout: Layout, cache: FileCache, limit: int
) -> dict[MessageQueue, QueueEnd]:
    """Cut every consume queue back to the records below ``limit``; where each ends then.

    Raises:
        OSError: Not all of it was done.
    """
    ends: dict[MessageQueue, QueueEnd] = {}
    for queue, is_batch in list_queues(layout.root).items():
        if is_batch:
            continue
        folder = layout.queue_directory(queue, is_batch=False)
        index = PlainQueue(cache, folder, queue_file_bytes(folder, is_batch=False))
        if not index.row.bases:
            continue
        end = queue_end(index, limit)
        cut_row(rows, folder, index.row.file_bytes, end * ITEM_BYTES)
        if end > index.unit_span()[0]:
            ends[queue] = QueueEnd(end, index.row.file_bytes)
    return ends


def queue_end(index: PlainQueue, limit: int) -> int:
    """One past the last entry whose record is below ``limit``; the first unit when there is none."""

    def is_low(items: Items) -> Flags:
        found: Flags = items["physical_offset"] < limit
        return found

    first, last = index.unit_span()
    end = index.split(first, last, is_low)
    while end > first:
        item = index.units(end - 1, end)
        if len(item) and bool((index.is_valid(item) & is_low(item) & ~is_filler(item))[0]):
            return end
        if len(item) and bool(is_filler(item)[0]):
            return first  # nothing but fillers: the queue begins anew
        end -= 1
    return first


def replay(log: FileRow, begin: int, end: int, listing: Listing) -> int:
    """List the records of ``[begin, end)``; how many there are."""
    pieces, position, records = LogPieces(log), begin, 0
    while position < end:
        piece = pieces.read(position, end, _PIECE_BYTES, check_crc=False)
        count = len(piece.block)
        listing.take(of_block(piece.block, np.ones(count, np.bool_)))
        records += count
        position = piece.end
        if piece.follows is Next.FILE and piece.next_file is not None:
            position = piece.next_file
        elif piece.follows is not Next.MORE:
            break
    return records


def open_log(layout: Layout, cache: FileCache) -> FileRow:
    """The log's files.

    Raises:
        DataError: One in the middle is missing.
    """
    log = FileRow(cache, layout.log, layout.log_file_bytes)
    check_contiguous(layout.log, log.bases, layout.log_file_bytes)
    return log


def _has_record(log: FileRow, base: int) -> bool:
    """Whether a file begins with a sound record."""
    return count_sound(LogPieces(log).read(base, _FAR, _HEAD_BYTES)) > 0
