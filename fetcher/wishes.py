"""Who wants what: wishes, the pieces they share, and the order in which pieces wait. Not for several threads at once."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

from fetcher.lanes import Lane
from fetcher.requests import Asked, BusyError, Piece

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Hashable

    from backends.base import ByteRange
    from fetcher.limits import TransferLimits


T = TypeVar("T")

_SMALL = 64


class Deadlines(Generic[T]):
    """Things with a moment, the earliest first. Not for several threads at once.

    What has ended otherwise is dropped at once, and only its moment stays in the heap for a while: an answer that was
    handed out long before its deadline must not be held in memory until then.
    """

    def __init__(self) -> None:
        self._live: dict[int, T] = {}
        self._heap: list[tuple[float, int]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, moment_s: float, thing: T) -> int:
        """Note when ``thing`` has its end; its number, for ``drop``."""
        self._number += 1
        self._live[self._number] = thing
        heappush(self._heap, (moment_s, self._number))
        return self._number

    def drop(self, number: int) -> None:
        """It needs its deadline no more (harmless when it is gone)."""
        self._live.pop(number, None)
        if len(self._heap) > _SMALL + 2 * len(self._live):
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapify(self._heap)

    def next_s(self) -> float | None:
        """The earliest moment; None: there is none."""
        while self._heap and self._heap[0][1] not in self._live:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[T]:
        """All whose moment has come, earliest first; they are gone from here."""
        found = []
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            found.append(self._live.pop(heappop(self._heap)[1]))
        return found


class Wishes:
    """All wishes that have not ended, and all pieces that wait to be sent.

    A wish ends when it leaves its piece (``leave``, ``end_all``); whoever called that has to end its future.
    """

    def __init__(self, limits: TransferLimits, counts: Counter[str]) -> None:
        """Begin with none; counted in ``counts``."""
        self._limits = limits
        self._counts = counts
        self._live: dict[Asked, None] = {}
        self._pieces: dict[tuple[str, int, int], Piece] = {}  # those that may be joined
        self._urgent = Lane(gap_bytes=limits.coalesce_gap_bytes)
        self._ahead = Lane(gap_bytes=limits.coalesce_gap_bytes)
        self._deadlines: Deadlines[Asked] = Deadlines()
        self._number = 0

    @property
    def pending(self) -> int:
        """Pieces that wait to be sent."""
        return len(self._urgent) + len(self._ahead)

    def add(
        self,
        asked: Asked,
        stream: Hashable,
        key: str,
        byte_range: ByteRange,
        *,
        urgent: bool,
        deadline_s: float | None,
    ) -> Piece:
        """Take up a wish: it joins an equal piece, or a new one begins to wait.

        Raises:
            BusyError: The queue is full; nothing has changed.
        """
        piece = self._pieces.get((key, byte_range.start, byte_range.end))
        if piece is None:
            piece = self._new_piece(stream, key, byte_range, is_urgent=urgent)
        else:
            self._counts["joined"] += 1
            if urgent:
                self.hurry(piece, stream)
        self._counts["asked"] += 1
        self._live[asked] = None
        piece.askers[asked] = None
        asked.piece = piece
        if deadline_s is not None:
            asked.deadline = self._deadlines.add(deadline_s, asked)
        return piece

    def hurry(self, piece: Piece, stream: Hashable) -> None:
        """Somebody waits for it now: it goes before read-ahead, at the cost of ``stream``."""
        if piece.is_urgent:
            return
        if piece.request is None:
            self._ahead.remove(piece)
        piece.is_urgent = True
        piece.stream = stream
        if piece.request is None:
            self._urgent.push(piece)

    def head(self) -> Piece | None:
        """Whose turn it is."""
        return self._urgent.head() or self._ahead.head()

    def take(self, piece: Piece, bytes_max: int) -> tuple[list[Piece], int, int]:
        """See ``Lane.take``."""
        return self._lane(piece).take(piece, bytes_max)

    def put_back(self, piece: Piece) -> None:
        """A piece that was sent waits again, and goes alone; nobody wants it: it is forgotten."""
        piece.request = None
        if piece.askers:
            piece.is_alone = True
            self._lane(piece).push(piece)
        else:
            self.forget(piece)

    def leave(self, asked: Asked) -> Piece:
        """Take a wish out of its piece, which decides its end; a piece that nobody wants is not sent."""
        piece = asked.piece
        assert piece is not None
        del piece.askers[asked]
        self._ended(asked)
        if not piece.askers and piece.request is None:
            self._lane(piece).remove(piece)
            self.forget(piece)
        return piece

    def end_all(self, piece: Piece) -> list[Asked]:
        """Take all askers out of a piece that was answered; it cannot be joined any more."""
        self.forget(piece)
        askers = list(piece.askers)
        piece.askers.clear()
        for asked in askers:
            self._ended(asked)
        return askers

    def forget(self, piece: Piece) -> None:
        """It cannot be joined any more."""
        place = (piece.key, piece.start, piece.end)
        if self._pieces.get(place) is piece:
            del self._pieces[place]

    def live(self) -> list[Asked]:
        """All that have not ended."""
        return list(self._live)

    def overdue(self, now_s: float) -> list[Asked]:
        """Those whose deadline has passed; each is told once."""
        return self._deadlines.due(now_s)

    def next_deadline_s(self) -> float | None:
        """The earliest."""
        return self._deadlines.next_s()

    def _new_piece(
        self, stream: Hashable, key: str, byte_range: ByteRange, *, is_urgent: bool
    ) -> Piece:
        waiting = len(self._urgent) if is_urgent else self.pending
        if waiting >= self._limits.pending_max:
            self._counts["refused"] += 1
            raise BusyError(
                f"{waiting} reads wait for the object store", where=key, do="read again later"
            )
        self._number += 1
        start, end = byte_range.start, byte_range.end
        piece = Piece(key, start, end, stream, is_urgent, self._number)
        self._pieces[key, start, end] = piece
        self._lane(piece).push(piece)
        return piece

    def _lane(self, piece: Piece) -> Lane:
        return self._urgent if piece.is_urgent else self._ahead

    def _ended(self, asked: Asked) -> None:
        asked.piece = None
        del self._live[asked]
        self._deadlines.drop(asked.deadline)
