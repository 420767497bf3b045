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
        return self._read(limit, dispatchers)

    def is_cut(self, limit: int) -> bool:
        """Whether ``limit`` lies within the record at ``position``: a replica acknowledges bytes, not records."""
        if self._log.base_of(self.position) is None:
            self._log.rescan()
        size = int.from_bytes(self._log.read(self.position, 4), "big")
        room = self._log.file_bytes - self.position % self._log.file_bytes
        return 0 < limit - self.position < size <= room

    def _read(self, limit: int, dispatchers: Sequence[Dispatch]) -> bool:
        """Take a piece from the log itself; False when no whole record lies below ``limit``."""
        if self._log.base_of(self.position) is None:
            self._log.rescan()
        piece = self._pieces.read(
            self.position, limit, _PIECE_BYTES, check_crc=False, check_place=False
        )
        if len(piece.block):
            self._listing.take(of_block(piece.block), dispatchers)
        elif piece.follows is not Next.FILE and self.is_cut(limit):
            return False
        elif piece.follows in {Next.NOTHING, Next.BROKEN}:
            raise DataError(
                f"no record at {piece.end}, where one was appended", where=self._log.directory
            )
        self.position = piece.end
        if piece.follows is Next.FILE:
            self.position = -(-piece.end // self._log.file_bytes) * self._log.file_bytes
        return True
