"""Making a store whole that was not stopped cleanly.

============================ ==========================================================================
question                     answer
============================ ==========================================================================
where to begin               at the checkpoint's logics physical offset: what lies below it was on the disk,
                             log, consume queues and index, when the checkpoint was written, and is not
                             looked at. With the log file that holds it where that may not be the
                             beginning of a record, or the index is not covered (a broker syncs whole
                             files of it). Without a checkpoint, or without consume queues, with the
                             first file
where the log ends           at the first record, from there, that fails: magic, sizes, CRC, its own
                             physical offset, or sectors that were never written. Behind the end
                             everything becomes zero, later files go: no stale record can come back
consume queues, key index    cut back to where we began, then listed again from the log, as a running
                             store does. Entries behind the end become zero
a log file is missing        above the checkpoint: the log ends there, as after any crash, and the files
                             behind it go. Below it is an error
damage below the checkpoint  is no torn tail: where it is met it is an error, and nothing is changed
============================ ==========================================================================

**Contract.** The store's lock is held. Everything is repeatable: a crash during recovery is recovered from likewise.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.errors import DataError
from tiered.format.block import bytes_at, properties_bytes, topic_bytes
from tiered.format.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint, listed_offset
from tiered.format.consume_queue import ITEM_BYTES, is_filler
from tiered.local.consumequeues import PlainQueue
from tiered.local.files import NAME_DIGITS, FileCache, FileRow, list_bases
from tiered.local.layout import check_contiguous, list_queues, queue_file_bytes, read_text
from tiered.local.pieces import LogPieces, Next, Piece, count_sound
from tiered.store.disk import cut_row, replace_file, sync_folder
from tiered.store.facts import of_block
from tiered.store.queues import CHECKPOINT_FILE, QueueEnd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

    from tiered.format.block import RecordBlock
    from tiered.format.consume_queue import Flags, Items
    from tiered.local.layout import Layout
    from tiered.model import MessageQueue
    from tiered.store.disk import RowWriter
    from tiered.store.listing import Listing


# -- walking the log -------------------------------------------------------------------------------
#
# Walking the log of a store that is being recovered: every record is checked, and listed as far as all are
# whole.
#
# **Contract.** A thread of its own reads and checks a piece while the piece before is listed; what is listed
# was checked. Nothing of the log is changed. Doing it again lists what is not listed yet.

PIECE_BYTES: Final = 8 << 20
_LOST: Final = bytes(256)
_HEAD_BYTES: Final = 1 << 16
_FAR: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Replayed:
    """What was found.

    Attributes:
        end: Where the log ends: behind the last record before which all are whole.
        store_ms: Store time of that record; 0 without one.
        records: How many there are.
    """

    end: int
    store_ms: int
    records: int


def replay(log: FileRow, begin: int, covered: int, listing: Listing | None) -> Replayed:
    """Walk the log from ``begin`` to its end.

    Args:
        log: The commit log.
        begin: Where a record begins.
        covered: What lies below it was on the disk when the checkpoint was written.
        listing: Takes the records; None: they are only checked.

    Raises:
        OSError: The disk refused a write.
        InvalidError: A file may not be read.
    """
    position, store_ms, records = begin, 0, 0
    readers = LogPieces(log), LogPieces(log)
    with ThreadPoolExecutor(1, "store-replay") as ahead:
        future = ahead.submit(_check, readers[0], begin, covered)
        while True:
            piece, sound = future.result()
            following = _follow(log, piece, sound)
            if following is not None:
                readers = readers[::-1]  # the other's records are listed meanwhile
                future = ahead.submit(_check, readers[0], following, covered)
            if sound:
                block = piece.block
                if listing is not None:
                    listing.take(of_block(block, np.arange(len(block)) < sound))
                store_ms, records = int(block.store_timestamps_ms[sound - 1]), records + sound
                position = piece.start + int(block.positions[sound - 1] + block.sizes[sound - 1])
            if following is None:
                return Replayed(position, store_ms, records)
            position = following


def check_covered(log: FileRow, begin: int, covered: int) -> None:
    """Check what the checkpoint covers, from ``begin`` on.

    Raises:
        DataError: There is damage.
        InvalidError: A file may not be read.
    """
    pieces, position = LogPieces(log), begin
    while position < covered:
        piece, sound = _check(pieces, position, covered)
        following = _follow(log, piece, sound)
        if following is None:
            at = piece.end
            if sound < len(piece.block):
                at = piece.start + int(piece.block.positions[sound])
            if at < covered:
                raise DataError(
                    f"a record at {at} is damaged, and the log was on the disk up to {covered}",
                    where=log.directory,
                    do="restore the file, or let a broker recover the store: it gives up what follows",
                )
            return
        position = following


def is_boundary(log: FileRow, position: int) -> bool:
    """Whether a sound record begins there, or the blank at the end of a file."""
    piece = LogPieces(log).read(position, _FAR, _HEAD_BYTES)
    return count_sound(piece) > 0 or (not len(piece.block) and piece.follows is Next.FILE)


def _check(pieces: LogPieces, position: int, covered: int) -> tuple[Piece, int]:
    piece = pieces.read(position, _FAR, PIECE_BYTES)
    return piece, count_whole(piece, covered)


def _follow(log: FileRow, piece: Piece, sound: int) -> int | None:
    """Where the log goes on behind a piece; None: nowhere."""
    if sound < len(piece.block):
        return None
    if piece.follows is Next.MORE:
        return piece.end
    if piece.follows is Next.FILE and piece.next_file is not None:
        # The blank goes too when nothing is behind it: what it made room for is not there.
        head = LogPieces(log).read(piece.next_file, _FAR, _HEAD_BYTES)
        return piece.next_file if count_sound(head) > 0 else None
    return None


def count_whole(piece: Piece, covered: int) -> int:
    """How many records, from the first, pass every check.

    No CRC covers topic and properties. Where sectors of them were not written yet they are zero; that is looked for in
    records that the checkpoint does not cover.
    """
    sound, block = count_sound(piece), piece.block
    first = int(np.searchsorted(block.positions[:sound], covered - piece.start))
    for starts, sizes in (
        (block.topic_positions, block.topic_sizes),
        (block.properties_positions, block.properties_sizes),
    ):
        if has_zero(block.buffer, starts[first:sound], sizes[first:sound]):
            lost = (number for number in range(first, sound) if _has_lost(block, number))
            return next(lost, sound)
    return sound


def has_zero(buffer: Buffer, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]) -> bool:
    """Whether a byte is 0 in any of the spans; those of one length are looked at together."""
    for size in np.flatnonzero(np.bincount(sizes)).tolist():
        if size:
            spans = bytes_at(buffer, f"V{size}")[starts[sizes == size]]
            if not spans.view(np.uint8).all():
                return True
    return False


def _has_lost(block: RecordBlock, number: int) -> bool:
    raw = properties_bytes(block, number)
    ends = (raw[:1], raw[-1:])
    return b"\0" in topic_bytes(block, number) or b"\0" in ends or _LOST in raw


# -- making it whole -------------------------------------------------------------------------------

_PIECE_BYTES: Final = 8 << 20


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
    """The checkpoint of a store, with our own offset where it has one; zeros when there is none."""
    data = read_text(f"{root}/{CHECKPOINT_FILE}") or b""
    found, own = decode_checkpoint(data), listed_offset(data)
    return found if own is None else replace(found, logics_physical_offset=own)


def refuse_missing_files(log: FileRow, covered: int) -> None:
    """Refuse a log whose files end before what was on the disk when the checkpoint was written.

    Raises:
        DataError: They do.
    """
    if covered > log.end:
        raise DataError(
            f"the commit log's files end at {log.end}, and it was on the disk up to {covered}",
            where=log.directory,
            do="restore the missing files; to go on without them, delete the file checkpoint",
        )


def cut_at_hole(layout: Layout, covered: int) -> None:
    """End a log at a file that is missing above what the checkpoint covers: its name had not come to the disk.

    Files come into a directory in any order when the machine fails, and what the checkpoint does not cover was promised
    to nobody.
    A file that is missing below stays an error, and so does any where there is no checkpoint.

    Raises:
        OSError: The files behind could not be removed.
    """
    bases = list_bases(layout.log)
    behind = [
        number
        for number, (before, after) in enumerate(pairwise(bases), 1)
        if after - before != layout.log_file_bytes
    ]
    if not behind or not 0 < covered <= bases[behind[0] - 1] + layout.log_file_bytes:
        return
    for base in reversed(
        bases[behind[0] :]
    ):  # from the end: a crash in between leaves the same hole
        Path(f"{layout.log}/{base:0{NAME_DIGITS}d}").unlink()
    sync_folder(layout.log)


def plan_begin(
    bases: tuple[int, ...], file_bytes: int, checkpoint: Checkpoint, *, has_queues: bool
) -> int:
    """Where recovery begins to read: where a log file begins."""
    covered = checkpoint.logics_physical_offset
    if not has_queues or not bases[0] <= covered <= bases[-1] + file_bytes:
        return bases[0]
    return max(base for base in bases if base <= covered)


def find_start(
    layout: Layout, cache: FileCache, begin: int, checkpoint: Checkpoint, *, is_trusted: bool
) -> int:
    """Where to begin to list: what the checkpoint covers where that can be trusted, else ``begin``.

    It can when it covers the index too, and a record is known to begin (or the log to end) at its place. When it cannot,
    it is taken back to ``begin``, so that who crashes from now on begins there again.

    Args:
        layout: Of the store.
        cache: To read with.
        begin: What ``plan_begin`` says.
        checkpoint: Of the store.
        is_trusted: Nothing is known to be wrong with what it covers.

    Raises:
        DataError: There is damage in what it covers, where that has to be looked at.
        OSError: The checkpoint could not be written.
    """
    log = open_log(layout, cache)
    covered = checkpoint.logics_physical_offset
    if begin >= covered:
        return begin
    has_index = checkpoint.index_timestamp_ms >= checkpoint.logics_timestamp_ms > 0
    is_usable = is_trusted and has_index and covered <= log.end
    if is_usable and (is_boundary(log, covered) or listed_end(layout, cache, covered) == covered):
        return covered
    check_covered(log, begin, min(covered, log.end))
    earlier = replace(checkpoint, logics_physical_offset=begin)
    replace_file(Path(layout.root, CHECKPOINT_FILE), encode_checkpoint(earlier))
    return begin


def listed_end(layout: Layout, cache: FileCache, limit: int) -> int:
    """Where the last record ends that a consume queue lists and that begins below ``limit``; 0 without one."""
    found = 0
    for _, _, index in _plain_queues(layout, cache):
        end = queue_end(index, limit)
        for item in index.units(max(0, end - 1), end):
            if item["physical_offset"] < limit:
                found = max(found, int(item["physical_offset"]) + int(item["size"]))
    return found


def _plain_queues(
    layout: Layout, cache: FileCache
) -> Iterator[tuple[MessageQueue, str, PlainQueue]]:
    """Every consume queue but batch queues that has a file: which, its folder, its entries."""
    for queue, is_batch in list_queues(layout.root).items():
        if is_batch:
            continue
        folder = layout.queue_directory(queue, is_batch=False)
        index = PlainQueue(cache, folder, queue_file_bytes(folder, is_batch=False))
        if index.row.bases:
            yield queue, folder, index


def cut_queues(
    rows: RowWriter, layout: Layout, cache: FileCache, limit: int
) -> dict[MessageQueue, QueueEnd]:
    """Cut every consume queue back to the records below ``limit``; where each ends then.

    Raises:
        OSError: Not all of it was done.
    """
    ends: dict[MessageQueue, QueueEnd] = {}
    for queue, folder, index in _plain_queues(layout, cache):
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


def open_log(layout: Layout, cache: FileCache) -> FileRow:
    """The log's files.

    Raises:
        DataError: One in the middle is missing.
    """
    log = FileRow(cache, layout.log, layout.log_file_bytes)
    check_contiguous(layout.log, log.bases, layout.log_file_bytes)
    return log
