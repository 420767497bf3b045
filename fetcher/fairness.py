"""Streams take turns by bytes: start-time fair queueing.

Each stream has a *tag*, the bytes it has been given on a common scale; the one with the smallest tag is next, and its
tag grows by what it takes. A stream that comes (or comes back) begins at the tag of the one last served, so that it
neither owes nor saves anything. Between two streams that both always wait, what they have been given never differs by
more than the largest item of the one and the largest of the other, whatever their sizes and however many streams
there are.

A round robin with deficits would give the same in the long run. But its quantum has to be as large as the largest
item, or many rounds pass until a large one may go; and then a stream of small ones sends dozens of them in its turn.
Here there is no quantum. A decision costs O(log n) of the streams that wait, of which a queue has a stated limit.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

T = TypeVar("T")


class _Stream(Generic[T]):
    __slots__ = ("items", "name", "tag")

    def __init__(self, name: Hashable, tag: int) -> None:
        self.name = name
        self.tag = tag
        self.items: OrderedDict[T, int] = OrderedDict()


class FairQueue(Generic[T]):
    """Items of many streams, first in first out within a stream. Not for several threads at once.

    Items are told apart by equality, and none is in the queue twice.
    """

    def __init__(self) -> None:
        self._streams: dict[Hashable, _Stream[T]] = {}
        # (tag, number, stream): one for each stream in the dictionary. The tag may be older than the stream's.
        self._turns: list[tuple[int, int, _Stream[T]]] = []
        self._number = 0
        self._tag = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def streams(self) -> int:
        """Streams that are remembered: those that wait, and some that have lately been served."""
        return len(self._streams)

    def push(self, stream: Hashable, item: T, cost: int) -> None:
        """Add an item behind the others of its stream.

        Args:
            stream: Whose it is.
            item: What waits.
            cost: What ``stream`` pays when it is taken, usually bytes; at least 1.
        """
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = _Stream(stream, self._tag)
            heappush(self._turns, (found.tag, self._next_number(), found))
        found.items[item] = cost
        self._count += 1

    def head(self) -> T | None:
        """Whose turn it is, left in the queue; None: nothing waits."""
        while self._turns:
            tag, _, stream = self._turns[0]
            if not stream.items:
                heappop(self._turns)
                del self._streams[stream.name]
            elif stream.tag > tag:
                heapreplace(self._turns, (stream.tag, self._next_number(), stream))
            else:
                return next(iter(stream.items))
        return None

    def take(self, stream: Hashable, item: T, *, extra_cost: int = 0) -> None:
        """Remove an item, ``head`` or another; its stream pays for it (and ``extra_cost`` with it).

        Raises:
            KeyError: It is not here.
        """
        found = self._streams[stream]
        cost = found.items.pop(item)
        self._count -= 1
        if found is self._turns[0][2]:
            self._tag = max(self._tag, self._turns[0][0])
        found.tag += cost + extra_cost

    def remove(self, stream: Hashable, item: T) -> None:
        """Remove an item that is not wanted any more; nobody pays.

        Raises:
            KeyError: It is not here.
        """
        del self._streams[stream].items[item]
        self._count -= 1

    def _next_number(self) -> int:
        self._number += (
            1  # streams with equal tags take turns in the order in which they came to that tag
        )
        return self._number
