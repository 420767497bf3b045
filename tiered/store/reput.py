"""The reput thread's work: following the log up to the confirmed end, a piece at a time.

**Contract.** Nothing at or above ``confirmed()`` is ever listed or dispatched. ``position`` moves once a piece has been
taken whole; taking it again after an error does no harm. For one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered.errors import DataError
from tiered.local.pieces import LogPieces, Next
from tiered.store.facts import of_block, of_handed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiered.local.files import FileRow
    from tiered.store.handover import Handover
    from tiered.store.listing import Dispatch, Listing

_PIECE_BYTES: Final = 1 << 20
_MESSAGES_MAX: Final = 1 << 13


class Reput:
    """See the module.

    Attributes:
        position: Physical offset of the next record to list.
        dispatchers: Called in order with what was listed.
    """

    def __init__(
        self,
        log: FileRow,
        listing: Listing,
        handover: Handover,
        position: int,
        confirmed: Callable[[], int],
    ) -> None:
        self.position = position
        self.dispatchers: list[Dispatch] = []
        self._log = log
        self._listing = listing
        self._handover = handover
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
        dispatchers = tuple(self.dispatchers)
        if dispatchers:  # they want the records themselves
            self._handover.stop()
        else:
            handed = self._handover.take(self.position, limit, _MESSAGES_MAX)
            facts = of_handed(handed) if handed else None
            if facts is not None and not self._listing.needs_records(facts):
                self._listing.take(facts)
                self.position = handed[-1].end
                return True
            if handed:
                limit = handed[-1].end
            following = self._handover.peek()
            if following is not None and following.begin > self.position:
                limit = min(limit, following.begin)
        self._read(limit, dispatchers)
        return True

    def _read(self, limit: int, dispatchers: Sequence[Dispatch]) -> None:
        """Take a piece from the log itself."""
        if self._log.base_of(self.position) is None:
            self._log.rescan()
        piece = self._pieces.read(
            self.position, limit, _PIECE_BYTES, check_crc=False, check_place=False
        )
        if len(piece.block):
            self._listing.take(of_block(piece.block), dispatchers)
        elif piece.follows in {Next.NOTHING, Next.BROKEN}:
            raise DataError(
                f"no record at {piece.end}, where one was appended", where=self._log.directory
            )
        self.position = piece.end
        if piece.follows is Next.FILE:
            self.position = -(-piece.end // self._log.file_bytes) * self._log.file_bytes
