"""Walking the log of a store that is being recovered: every record is checked, and listed as far as all are whole.

**Contract.** A thread of its own reads and checks a piece while the piece before is listed; what is listed was checked.
Nothing of the log is changed. Doing it again lists what is not listed yet.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.errors import DataError
from tiered.format.block import bytes_at, properties_bytes, topic_bytes
from tiered.local.pieces import LogPieces, Next, Piece
from tiered.local.recovery import count_sound
from tiered.store.facts import of_block

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered.format.block import RecordBlock
    from tiered.local.files import FileRow
    from tiered.store.listing import Listing

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
