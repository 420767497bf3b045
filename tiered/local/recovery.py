"""Where the log of a stopped store ends: what a broker of version 5.5.0 would decide at its next start.

=========================== ==========================================================================
question                    answer
=========================== ==========================================================================
which file to begin with    going back from the last file, the first that qualifies; at most ten files
                            are looked at, and the tenth is taken as it is
a file qualifies            its first record is sound and has a store time, and
- after a clean stop        it lies not beyond the end of what any consume queue lists
- after a crash             it lies not beyond the checkpoint's logics physical offset, or, when that
                            is 0, was not stored after the checkpoint's logics time
where the log ends          at the first record, from there, that fails: magic, size, lengths or CRC
                            (its own physical offset is not compared); a blank leads to the next file
=========================== ==========================================================================

The plan is pure; ``find_log_end`` reads. Damage before the file that recovery begins with is not seen by a broker's
start, and not by this module: readers meet it as holes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tiered.format.record import RecordFault
from tiered.local.pieces import LogPieces, Next, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiered.format.checkpoint import Checkpoint
    from tiered.local.files import FileRow

FILES_LOOKED_AT_MAX: Final = 10
"""``commitLogRecoverMaxNum`` by default."""
_PIECE_BYTES: Final = 8 << 20
_HEAD_BYTES: Final = 1 << 16
_ZEROS: Final = bytes(_PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class FileHead:
    """The first record of a log file, as recovery looks at it.

    Attributes:
        base: Where the file begins.
        is_sound: There is a record and it passes recovery's checks.
        physical_offset: What the record says.
        store_timestamp_ms: Its store time.
    """

    base: int
    is_sound: bool
    physical_offset: int = 0
    store_timestamp_ms: int = 0


@dataclass(frozen=True, slots=True)
class LogEnd:
    """What recovery decides.

    Attributes:
        start: Where the file begins with which recovery begins.
        end: One past the last record.
        torn_bytes: Bytes behind the end, in its file and the next ones, up to the last that is not zero.
    """

    start: int
    end: int
    torn_bytes: int


def plan_start(
    heads: Sequence[FileHead], *, is_clean: bool, checkpoint: Checkpoint, listed_end: int
) -> int:
    """Which file recovery begins with.

    Args:
        heads: Of the last files, newest first, as many as there are up to ``FILES_LOOKED_AT_MAX``; at least one.
        is_clean: There is no ``abort`` file.
        checkpoint: As stored.
        listed_end: End of the last record that any consume queue lists; -1 when there is none.

    Returns:
        Where that file begins.
    """
    for head in heads:
        if (
            head.is_sound
            and head.store_timestamp_ms
            and _qualifies(head, is_clean, checkpoint, listed_end)
        ):
            return head.base
    return heads[-1].base


def _qualifies(head: FileHead, is_clean: bool, checkpoint: Checkpoint, listed_end: int) -> bool:
    if is_clean:
        return head.physical_offset <= listed_end
    if checkpoint.logics_physical_offset > 0:
        return head.physical_offset <= checkpoint.logics_physical_offset
    return head.store_timestamp_ms <= checkpoint.logics_timestamp_ms


def read_heads(log: FileRow, pieces: LogPieces) -> list[FileHead]:
    """The first records of the last files, newest first."""
    return [read_head(pieces, base) for base in log.bases[: -FILES_LOOKED_AT_MAX - 1 : -1]]


def read_head(pieces: LogPieces, base: int) -> FileHead:
    """The first record of one file."""
    piece = pieces.read(base, base + _HEAD_BYTES, _HEAD_BYTES, check_crc=False, check_place=False)
    if not len(piece.block):
        piece = pieces.read(base, 2**63 - 1, _HEAD_BYTES, check_crc=False, check_place=False)
    if not len(piece.block):
        return FileHead(base, is_sound=False)
    size = int(piece.block.sizes[0])
    block = pieces.read(base, base + size, size, check_place=False).block
    if not len(block) or block.faults[0] != RecordFault.OK:
        return FileHead(base, is_sound=False)
    return FileHead(base, True, int(block.physical_offsets[0]), int(block.store_timestamps_ms[0]))


def find_log_end(
    log: FileRow, pieces: LogPieces, start: int, visit: Callable[[Piece, int], None]
) -> LogEnd:
    """Walk from ``start`` to where recovery stops.

    Args:
        log: The commit log.
        pieces: Reads it.
        start: Where a file begins.
        visit: Given each piece and how many of its records, from the first, count.
    """
    position = start
    while True:
        piece = pieces.read(position, 2**63 - 1, _PIECE_BYTES, check_place=False)
        sound = count_sound(piece)
        visit(piece, sound)
        if sound < len(piece.block):
            position = piece.start + int(piece.block.positions[sound])
            break
        position = piece.end
        if piece.follows is Next.FILE and piece.next_file is not None and _leads_on(log, position):
            position = piece.next_file
        elif piece.follows is not Next.MORE:
            break
    return LogEnd(start, position, _torn_bytes(log, position))


def count_sound(piece: Piece) -> int:
    """How many records, from the first, have no fault."""
    faulty = piece.block.faults != RecordFault.OK
    return int(faulty.argmax()) if faulty.any() else len(piece.block)


def _leads_on(log: FileRow, position: int) -> bool:
    """Whether recovery goes on to the next file: only from a blank that does not claim more than the file has."""
    within = log.within(position)
    if not within:
        return False  # a file without a blank: recovery stops at its last byte
    head = log.read(position, 4)
    return int.from_bytes(head, "big", signed=True) <= log.file_bytes - within


def _torn_bytes(log: FileRow, end: int) -> int:
    """How far behind the end there are bytes that are not zero."""
    last = end
    base = log.base_of(end)
    while base is not None:
        at = max(base, end)
        while data := log.read(at, _PIECE_BYTES):
            if data != _ZEROS[: len(data)]:  # a comparison runs at memory speed, stripping does not
                last = at + len(data.rstrip(b"\0"))
            at += len(data)
            if at >= base + log.file_bytes:
                break
        base = log.next_base(base)
    return last - end
