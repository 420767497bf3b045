"""What waits to be sent, of one class: in fair order, and by place for the merging of neighbours."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple

from fetcher.fairness import FairQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fetcher.requests import Piece

_Place = tuple[int, int, int, "Piece"]  # start, end, number, piece: the first three tell all apart


class Merge(NamedTuple):
    """Neighbours ``[low, high)`` of a list, and the bytes ``[start, end)`` that hold them all."""

    low: int
    high: int
    start: int
    end: int


def plan_merge(
    places: Sequence[tuple[int, int, object, object]], at: int, *, gap_bytes: int, bytes_max: int
) -> Merge:
    """Which neighbours of ``places[at]`` are asked for with it.

    Args:
        places: (start, end, ...) of ranges of one object, ordered by start; they may overlap.
        at: The one that is to be asked for in any case.
        gap_bytes: Most unwanted bytes between two neighbours. In all there are never more than wanted ones: at most half
            of what is read is read in vain.
        bytes_max: Most bytes of the whole, unless the one alone is larger.

    Returns:
        The row, behind first and then before, until a gap or the size ends it.
    """
    start, end = places[at][:2]
    low, high = at, at + 1
    balance = end - start  # bytes wanted, less those that are not
    while high < len(places):
        after = places[high]
        gap, farther = max(after[0] - end, 0), max(end, after[1])
        more = farther - end - 2 * gap
        if gap > gap_bytes or balance + more < 0 or farther - start > bytes_max:
            break
        end, balance = farther, balance + more
        high += 1
    while low:
        before = places[low - 1]
        gap, nearer = max(start - before[1], 0), min(start, before[0])
        more, farther = start - nearer - 2 * gap, max(end, before[1])
        if gap > gap_bytes or balance + more < 0 or farther - nearer > bytes_max:
            break
        start, end, balance = nearer, farther, balance + more
        low -= 1
    return Merge(low, high, start, end)


class Lane:
    """Pieces of one class that wait. Not for several threads at once."""

    def __init__(self, *, gap_bytes: int) -> None:
        """Begin empty; see ``plan_merge`` for ``gap_bytes``."""
        self._gap_bytes = gap_bytes
        self._queue: FairQueue[Piece] = FairQueue()
        self._places: dict[str, list[_Place]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, piece: Piece) -> None:
        """Let a piece wait for its stream's turn."""
        self._queue.push(piece.stream, piece, piece.size_bytes)
        if not piece.is_alone:
            insort(self._places.setdefault(piece.key, []), _place(piece))

    def remove(self, piece: Piece) -> None:
        """Forget a piece that waits."""
        self._queue.remove(piece.stream, piece)
        if not piece.is_alone:
            places = self._places[piece.key]
            at = bisect_left(places, _place(piece))
            self._forget(piece.key, at, at + 1)

    def head(self) -> Piece | None:
        """Whose turn it is."""
        return self._queue.head()

    def take(self, piece: Piece, bytes_max: int) -> tuple[list[Piece], int, int]:
        """Remove the piece whose turn it is, and the neighbours that one request of ``bytes_max`` bytes brings too.

        Each piece is paid for by its own stream; what lies between them by the stream whose turn it is.

        Returns:
            The pieces, and the range ``[start, end)``.
        """
        if piece.is_alone:
            self._queue.take(piece.stream, piece)
            return [piece], piece.start, piece.end
        places = self._places[piece.key]
        at = bisect_left(places, _place(piece))
        merge = plan_merge(places, at, gap_bytes=self._gap_bytes, bytes_max=bytes_max)
        pieces = [place[3] for place in places[merge.low : merge.high]]
        self._forget(piece.key, merge.low, merge.high)
        gaps = merge.end - merge.start - sum(one.size_bytes for one in pieces)
        self._queue.take(piece.stream, piece, extra_cost=max(0, gaps))
        for one in pieces:
            if one is not piece:
                self._queue.take(one.stream, one)
        return pieces, merge.start, merge.end

    def _forget(self, key: str, low: int, high: int) -> None:
        places = self._places[key]
        del places[low:high]
        if not places:
            del self._places[key]


def _place(piece: Piece) -> _Place:
    return piece.start, piece.end, piece.number, piece
