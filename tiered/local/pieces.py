"""Reading the commit log in its own order, a piece at a time, into one buffer that is used again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.format.block import (
    RecordBlock,
    Stop,
    check_records,
    parse_records,
    walk_records,
)
from tiered.format.record import SIZE_AND_MAGIC

if TYPE_CHECKING:
    from tiered.local.files import FileRow

_HEAD: Final = Struct(">i")
RECORD_BYTES_MAX: Final = 128 << 20
"""No record is longer (brokers allow 4 MiB by default); what claims to be is damage."""
_VIEW_BYTES_MIN: Final = 1 << 16
_COMPARED_BYTES: Final = 1 << 18


class Next(Enum):
    """What stands behind the records of a piece."""

    MORE = "more"
    """The piece was cut here; the log goes on."""
    FILE = "file"
    """The rest of the file is blank, or full to the last byte; go on with the next file."""
    NOTHING = "nothing"
    """Zeros: nothing has been written here, or it was lost."""
    BROKEN = "broken"
    """Bytes that are no record."""
    LIMIT = "limit"
    """The limit that was given."""


@dataclass(slots=True)
class Piece:
    """Records read from the log. Valid until the next piece is read into the same buffer.

    Attributes:
        start: Local physical offset of the first byte.
        end: Local physical offset of one past the last record.
        block: The records; their positions are relative to ``start``.
        follows: What stands at ``end``.
        next_file: Where the next file begins, if ``follows`` is ``FILE`` and there is one.
    """

    start: int
    end: int
    block: RecordBlock
    follows: Next
    next_file: int | None


class LogPieces:
    """Reads pieces of one log. For one thread at a time."""

    def __init__(self, log: FileRow) -> None:
        self._log = log
        self._buffer = bytearray()

    def read(
        self,
        position: int,
        limit: int,
        bytes_max: int,
        *,
        check_crc: bool = True,
        check_place: bool = True,
    ) -> Piece:
        """Read the records from ``position`` on, from one file.

        Args:
            position: Local physical offset where a record begins.
            limit: Look at nothing at or beyond this physical offset.
            bytes_max: Bytes to look at; more when the first record is larger.
            check_crc: Compare bodies with their CRC.
            check_place: Compare each record's own physical offset with its place.

        Raises:
            InvalidError: A file may not be read.
        """
        base = self._log.base_of(position)
        if base is None:
            return self._nothing(position)
        stop_at = min(limit, base + self._log.file_bytes)
        piece = self._read(position, stop_at, bytes_max, check_crc, check_place)
        if not len(piece.block) and piece.follows is Next.MORE:
            # The first record is longer than what was looked at; or it claims to be.
            size = _HEAD.unpack(self._log.read(position, 4).ljust(4, b"\0"))[0]
            if bytes_max < size <= stop_at - position:
                piece = self._read(position, stop_at, size, check_crc, check_place)
            if not len(piece.block) and piece.follows is Next.MORE:
                piece.follows = Next.BROKEN
        if piece.follows is Next.FILE:
            piece.next_file = self._log.next_base(base)
        return piece

    def is_complete(self, position: int) -> bool:
        """Whether the file of ``position`` is written to its end: a record stands in the next one."""
        base = self._log.base_of(position)
        following = self._log.next_base(base) if base is not None else None
        head = b"" if following is None else self._log.read(following, SIZE_AND_MAGIC.size)
        return len(head) == SIZE_AND_MAGIC.size and SIZE_AND_MAGIC.unpack(head)[1] != 0

    def count_unchanged(self, piece: Piece, count: int) -> int:
        """How many of the piece's first ``count`` records have the same bytes when they are read again."""
        block = piece.block
        ends = block.positions[:count] + block.sizes[:count]
        end = int(ends[-1]) if count else 0
        before = np.frombuffer(memoryview(block.buffer), np.uint8, end)
        for start in range(0, end, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, end - start)
            now = np.frombuffer(self._log.read(piece.start + start, size), np.uint8)
            same = before[start : start + len(now)] == now
            if len(now) < size or not same.all():
                first = start + (len(now) if same.all() else int(np.argmin(same)))
                return int(np.searchsorted(ends, first, side="right"))
        return count

    def _read(
        self, position: int, stop_at: int, bytes_max: int, check_crc: bool, check_place: bool
    ) -> Piece:
        wanted = max(0, min(bytes_max, stop_at - position))
        view = self._view(wanted)
        count = self._log.read_into(position, view)
        walk = walk_records(view, 0, count, size_max=min(RECORD_BYTES_MAX, self._log.file_bytes))
        block = parse_records(view[:count], walk.positions, walk.sizes)
        expected = walk.positions + position if check_place else None
        check_records(block, expected_physical=expected, check_crc=check_crc)
        end = position + walk.end
        return Piece(
            position, end, block, self._follows(walk.stop, end, stop_at, count < wanted), None
        )

    def _follows(self, stop: Stop, end: int, stop_at: int, is_short: bool) -> Next:
        if end >= stop_at:
            is_full = self._log.file_bytes and not self._log.within(end)
            return Next.FILE if is_full else Next.LIMIT
        if stop is Stop.BLANK:
            return Next.FILE
        if stop is Stop.EMPTY:
            return Next.NOTHING
        if stop is Stop.FAULT:
            return Next.BROKEN
        return Next.NOTHING if is_short else Next.MORE

    def _view(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            # A new one: arrays may still look into the old one.
            self._buffer = bytearray(max(size, _VIEW_BYTES_MIN))
        return memoryview(self._buffer)[:size]

    def _nothing(self, position: int) -> Piece:
        piece = self._read(position, position, 0, check_crc=False, check_place=False)
        piece.follows = Next.NOTHING
        return piece
