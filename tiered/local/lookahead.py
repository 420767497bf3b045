"""Looking ahead in a running broker's log, beyond the frontier, for a record that proves something of those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.local.pieces import LogPieces, Next, Piece
from tiered.local.recovery import count_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiered.clock import Clock
    from tiered.local.catalog import QueueState
    from tiered.local.files import FileRow
    from tiered.local.matching import Match

    Matching = Callable[[Piece, int], Sequence[tuple[QueueState, Match]]]

_PIECE_BYTES: Final = 8 << 20
_FAR: Final = 2**63 - 1
_AGAIN_S: Final = 1.0


def find_new(log: FileRow, position: int, started_ms: int) -> int:
    """Where the first record stored at or after ``started_ms`` begins, from ``position`` on; -1 when there is none yet."""
    for piece, count in _walk(log, position):
        new = np.flatnonzero(piece.block.store_timestamps_ms[:count] >= started_ms)
        if len(new):
            return piece.start + int(piece.block.positions[new[0]])
    return -1


class Ahead:
    """Whether the frontier stands before records that will never be listed: their topic was deleted.

    Consume queues are written in log order. So what is not listed although a later record is never will be, and must not
    keep the frontier for ever. Only a record that was stored later counts: behind the log's end may stand older ones,
    left from before a restart, with consume-queue entries of their own. Under the store's lock.
    """

    def __init__(self, log: FileRow, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._listed_at = -1
        self._looked_s = -_AGAIN_S

    def is_overtaken(self, piece: Piece, count: int, match: Matching) -> bool:
        """Look; at most every second while there is nothing.

        Args:
            piece: Of whose first records none is listed.
            count: So many are sound.
            match: Holds the first records of a piece against their consume queues.
        """
        now_s = self._clock.monotonic_s()
        if piece.end > self._listed_at and now_s >= self._looked_s + _AGAIN_S:
            stored_ms = int(piece.block.store_timestamps_ms[:count].max())
            self._listed_at = self._find_listed(piece, stored_ms, match)
            if self._listed_at < 0:
                self._looked_s = now_s
        return piece.end <= self._listed_at

    def _find_listed(self, piece: Piece, stored_ms: int, match: Matching) -> int:
        """Where a record behind the piece begins that is listed; -1 when there is none yet."""
        following = _behind(piece)
        for later, count in _walk(self._log, following) if following is not None else ():
            last = max((found.last_listed()[0] for _, found in match(later, count)), default=-1)
            if last >= 0 and int(later.block.store_timestamps_ms[last]) >= stored_ms:
                return later.start + int(later.block.positions[last])
        return -1


def _walk(log: FileRow, position: int) -> Iterator[tuple[Piece, int]]:
    """Pieces from ``position`` on, each with its number of sound records, up to the first that is not sound."""
    pieces = LogPieces(log)
    following: int | None = position
    while following is not None:
        piece = pieces.read(following, _FAR, _PIECE_BYTES, check_crc=False)
        count = count_sound(piece)
        yield piece, count
        following = _behind(piece) if count == len(piece.block) else None


def _behind(piece: Piece) -> int | None:
    """Where the log goes on behind a piece; None at its end."""
    if piece.follows is Next.MORE:
        return piece.end
    return piece.next_file if piece.follows is Next.FILE else None
