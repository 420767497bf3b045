"""The reput thread's work: following the log up to the confirmed end, a piece at a time.

**Contract.** Nothing at or above ``confirmed()`` is ever listed or dispatched. ``position`` moves once a piece has been
taken whole; taking it again after an error does no harm. For one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered.errors import DataError
from tiered.local.pieces import LogPieces, Next

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.local.files import FileRow
    from tiered.store.listing import Dispatch, Listing

_PIECE_BYTES: Final = 1 << 20


class Reput:
    """See the module.

    Attributes:
        position: Physical offset of the next record to list.
        dispatchers: Called in order with what was listed.
    """

    def __init__(
        self, log: FileRow, listing: Listing, position: int, confirmed: Callable[[], int]
    ) -> None:
        self.position = position
        self.dispatchers: list[Dispatch] = []
        self._log = log
        self._listing = listing
        self._confirmed = confirmed
        self._pieces = LogPieces(log)

    def step(self) -> bool:
        """Take one piece; False when there is none.

        Raises:
            OSError: The disk refused a write.
            DataError: The log has changed under us.
        """
        limit = self._confirmed()
        if self.position >= limit:
            return False
        if self._log.base_of(self.position) is None:
            self._log.rescan()
        piece = self._pieces.read(
            self.position, limit, _PIECE_BYTES, check_crc=False, check_place=False
        )
        if len(piece.block):
            self._listing.take(piece.block, None, tuple(self.dispatchers))
        elif piece.follows in {Next.NOTHING, Next.BROKEN}:
            raise DataError(
                f"no record at {piece.end}, where one was appended", where=self._log.directory
            )
        self.position = piece.end
        if piece.follows is Next.FILE:
            self.position = -(-piece.end // self._log.file_bytes) * self._log.file_bytes
        return True
