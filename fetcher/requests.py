"""What is wanted of a store, and in which order it goes. Pure: data, and queues of it; one thread at a time.

Words. A future that was asked for, the range of an object it waits for, the request that brings ranges, and its attempts::

    Asked  n..1  Range  n..1  Request  1..2  Attempt

``fetcher.transfers`` gives them meaning. Equal wishes share a range. Ranges wait in two *queues*, in fair order and by
place, so that neighbours go with one request (``plan_merge``).

Fairness. Streams take turns by bytes: start-time fair queueing. Each stream has a *tag*, the bytes it has been given on a
common scale; the one with the smallest tag is next, and its tag grows by what it takes. A stream that comes (or comes back)
begins at the tag of the one last served, so that it neither owes nor saves anything. Between two streams that both always
wait, what they have been given never differs by more than the largest item of the one and the largest of the other, whatever
their sizes and however many streams there are.

A round robin with deficits would give the same in the long run. But its quantum has to be as large as the largest
item, or many rounds pass until a large one may go; and then a stream of small ones sends dozens of them in its turn.
Here there is no quantum. A decision costs O(log n) of the streams that wait, of which a queue has a stated limit.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import field
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from backends.lazy_dataclass import dataclass
from tiered.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Hashable, Sequence

    from backends.base import ByteRange
    from fetcher.limits import TransferLimits


# -- requests

Data = bytes | memoryview
"""What came: bytes of its own, or a view of memory that is lent (``fetcher.runs``)."""


class BusyError(StoreUnavailableError):
    """Too much is waiting already. The same read may be asked for later."""

    reason = "busy"


class Asked(Future[Data]):
    """The bytes of one range, for one asker. It ends exactly once; ``cancel`` works until then."""

    def __init__(
        self, cancel: Callable[[Asked], bool], stream: Hashable, key: str, wanted: ByteRange
    ) -> None:
        """``cancel`` decides whether it can still be cancelled, and if so ends it; ``stream`` takes turns with others."""
        super().__init__()
        self._cancel = cancel
        self.stream, self.key, self.wanted = stream, key, wanted
        self.chunk: Range | None = None  # what it waits for; None once its end is decided

    def cancel(self) -> bool:
        """Take the wish back: never sent, or its answer is dropped. False: it has ended, or is just ending."""
        return self._cancel(self)

    def end_cancelled(self) -> None:
        """Become cancelled; only for who has decided this end."""
        super().cancel()
        self.set_running_or_notify_cancel()


@dataclass(eq=False, slots=True)
class Range:
    """A range that somebody wants, or wanted when it was sent."""

    key: str  # the object
    start: int  # first byte
    end: int  # one past the last
    stream: Hashable  # who pays for it
    is_urgent: bool  # somebody waits for it now
    number: int  # its place in the order of asking
    askers: dict[Asked, None] = field(default_factory=dict)  # who wants it still
    is_alone: bool = False  # not to be merged with neighbours
    request: Request | None = None  # what brings it; None: not sent

    @property
    def size_bytes(self) -> int:
        """Length of the range."""
        return self.end - self.start


@dataclass(eq=False, slots=True)
class Request:
    """One GET, for one or several chunks."""

    key: str  # the object
    start: int  # first byte
    end: int  # one past the last
    chunks: list[Range]  # what it brings, each within the range
    running: int = 0  # attempts under way
    is_done: bool = False  # its chunks have been answered
    error: BaseException | None = None  # of the attempt that failed while the other one ran on

    @property
    def size_bytes(self) -> int:
        """Length of the range."""
        return self.end - self.start

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits."""
        return any(chunk.askers for chunk in self.chunks)

    @property
    def is_urgent(self) -> bool:
        """Whether anybody waits for it now."""
        return any(chunk.is_urgent and chunk.askers for chunk in self.chunks)


@dataclass(eq=False, slots=True)
class Attempt:
    """One call to the store."""

    request: Request  # for what
    is_hedge: bool  # whether it is the second of its request
    started_s: float | None = None
    """When the call began, monotonic seconds; None: a thread has not come to it."""


# -- fairness

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
        """Add an item behind the others of its stream, which pays ``cost`` (at least 1, usually bytes) when it is taken."""
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
        """Remove an item, ``head`` or another; its stream pays for it (and ``extra_cost`` with it)."""
        found = self._streams[stream]
        cost = found.items.pop(item)
        self._count -= 1
        if found is self._turns[0][2]:
            self._tag = max(self._tag, self._turns[0][0])
        found.tag += cost + extra_cost

    def remove(self, stream: Hashable, item: T) -> None:
        """Remove an item that is not wanted any more; nobody pays."""
        del self._streams[stream].items[item]
        self._count -= 1

    def _next_number(self) -> int:
        self._number += (
            1  # streams with equal tags take turns in the order in which they came to that tag
        )
        return self._number


# -- queues

_Place = tuple[int, int, int, "Range"]  # start, end, number, chunk: the first three tell all apart


class Merge(NamedTuple):
    """Neighbours ``[low, high)`` of a list, and the bytes ``[start, end)`` that hold them all."""

    low: int
    high: int
    start: int
    end: int


def plan_merge(
    places: Sequence[tuple[int, int, object, object]], at: int, *, gap_bytes: int, bytes_max: int
) -> Merge:
    """Which neighbours of ``places[at]``, a range that is to be asked for in any case, are asked for with it.

    ``places``: (start, end, ...) of ranges of one object, ordered by start; they may overlap. The row goes behind first and
    then before, until a gap of unwanted bytes or the size ends it (unless the one alone is larger). In all there are never
    more unwanted bytes than wanted ones: at most half of what is read is read in vain.
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


class RangeQueue:
    """Chunks of one class that wait. Not for several threads at once."""

    def __init__(self, *, gap_bytes: int) -> None:
        """Begin empty; see ``plan_merge`` for ``gap_bytes``."""
        self._gap_bytes = gap_bytes
        self._queue: FairQueue[Range] = FairQueue()
        self._places: dict[str, list[_Place]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, chunk: Range) -> None:
        """Let a chunk wait for its stream's turn."""
        self._queue.push(chunk.stream, chunk, chunk.size_bytes)
        if not chunk.is_alone:
            insort(self._places.setdefault(chunk.key, []), _place(chunk))

    def remove(self, chunk: Range) -> None:
        """Forget a chunk that waits."""
        self._queue.remove(chunk.stream, chunk)
        if not chunk.is_alone:
            places = self._places[chunk.key]
            at = bisect_left(places, _place(chunk))
            self._forget(chunk.key, at, at + 1)

    def head(self) -> Range | None:
        """Whose turn it is."""
        return self._queue.head()

    def take(self, chunk: Range, bytes_max: int) -> tuple[list[Range], int, int]:
        """Remove the chunk whose turn it is, and the neighbours that one request of ``bytes_max`` bytes brings too.

        Their range comes with them. Each chunk is paid for by its own stream; what lies between them by the stream whose
        turn it is.
        """
        if chunk.is_alone:
            self._queue.take(chunk.stream, chunk)
            return [chunk], chunk.start, chunk.end
        places = self._places[chunk.key]
        at = bisect_left(places, _place(chunk))
        merge = plan_merge(places, at, gap_bytes=self._gap_bytes, bytes_max=bytes_max)
        chunks = [place[3] for place in places[merge.low : merge.high]]
        self._forget(chunk.key, merge.low, merge.high)
        gaps = merge.end - merge.start - sum(one.size_bytes for one in chunks)
        self._queue.take(chunk.stream, chunk, extra_cost=max(0, gaps))
        for one in chunks:
            if one is not chunk:
                self._queue.take(one.stream, one)
        return chunks, merge.start, merge.end

    def _forget(self, key: str, low: int, high: int) -> None:
        places = self._places[key]
        del places[low:high]
        if not places:
            del self._places[key]


def _place(chunk: Range) -> _Place:
    return chunk.start, chunk.end, chunk.number, chunk


# -- arrivals

DECODERS: Final = max(2, min(os.cpu_count() or 1, 8))
"""So many threads at most make something of what has come. More would not be faster: most of it is done under the
interpreter's lock, for which readers would wait as well."""


class Arrivals(Generic[T]):
    """What has come and waits to be worked on, by few workers: what somebody waits for first, then what was asked for first.

    All at once they would hold each other up, and what a reader waits for as well. Not for several threads at once.
    """

    def __init__(self, workers_max: int) -> None:
        self._free = workers_max
        self._waiting: list[tuple[int, Callable[[], bool], T]] = []

    def come(self, thing: T, number: int, is_urgent: Callable[[], bool]) -> bool:
        """Add a thing; whether the caller is to work: on what ``next`` gives, until that is nothing.

        ``number``: its place in the order of asking.
        """
        self._waiting.append((number, is_urgent, thing))
        is_free = self._free > 0
        self._free -= is_free
        return is_free

    def next(self) -> T | None:
        """The most pressing thing; None: there is none, and the caller is no worker any more."""
        if not self._waiting:
            self.leave()
            return None
        first = min(self._waiting, key=lambda one: (not one[1](), one[0]))
        self._waiting.remove(first)
        return first[2]

    def leave(self) -> None:
        """A worker works no more."""
        self._free += 1


# -- wishes


class Wishes:
    """All wishes that have not ended, and all chunks that wait to be sent.

    A wish ends when it leaves its chunk (``leave``, ``end_all``); the caller has to end its future.
    """

    def __init__(self, limits: TransferLimits, counts: Counter[str]) -> None:
        self._limits = limits
        self._counts = counts
        # Those that may be joined, among them all that somebody waits for.
        self._chunks: dict[tuple[str, int, int], Range] = {}
        self._urgent = RangeQueue(gap_bytes=limits.coalesce_gap_bytes)
        self._ahead = RangeQueue(gap_bytes=limits.coalesce_gap_bytes)
        self._number = 0

    @property
    def pending(self) -> int:
        """Chunks that wait to be sent."""
        return len(self._urgent) + len(self._ahead)

    def add(self, asked: Asked, *, urgent: bool) -> Range:
        """Take up a wish: it joins an equal chunk, or a new one waits.

        BusyError: the queue is full, nothing has changed.
        """
        chunk = self._chunks.get((asked.key, asked.wanted.start, asked.wanted.end))
        if chunk is None:
            chunk = self._new_chunk(asked, is_urgent=urgent)
        else:
            self._counts["joined"] += 1
            if urgent:
                self.hurry(chunk, asked.stream)
        self._counts["asked"] += 1
        chunk.askers[asked] = None
        asked.chunk = chunk
        return chunk

    def hurry(self, chunk: Range, stream: Hashable) -> None:
        """Somebody waits for it now: it goes before read-ahead, at the cost of ``stream``."""
        if chunk.is_urgent:
            return
        if chunk.request is None:
            self._ahead.remove(chunk)
        chunk.is_urgent = True
        chunk.stream = stream
        if chunk.request is None:
            self._urgent.push(chunk)

    def head(self) -> Range | None:
        """Whose turn it is."""
        return self._urgent.head() or self._ahead.head()

    def take(self, chunk: Range, bytes_max: int) -> tuple[list[Range], int, int]:
        return self._queue_of(chunk).take(chunk, bytes_max)

    def put_back(self, chunk: Range) -> None:
        """A chunk that was sent waits again, and goes alone; nobody wants it: it is forgotten."""
        chunk.request = None
        if chunk.askers:
            chunk.is_alone = True
            self._queue_of(chunk).push(chunk)
        else:
            self.forget(chunk)

    def leave(self, asked: Asked) -> None:
        """Take a wish out of its chunk, which decides its end; a chunk that nobody wants is not sent."""
        chunk = asked.chunk
        assert chunk is not None
        del chunk.askers[asked]
        asked.chunk = None
        if chunk.askers:
            return
        if chunk.request is None:
            self._queue_of(chunk).remove(chunk)
        # Also when it was sent: who asks again, since it was late, gets another request and not the one that is late.
        self.forget(chunk)

    def end_all(self, chunk: Range) -> list[Asked]:
        """Take all askers out of a chunk that was answered; it cannot be joined any more."""
        self.forget(chunk)
        askers = list(chunk.askers)
        chunk.askers.clear()
        for asked in askers:
            asked.chunk = None
        return askers

    def forget(self, chunk: Range) -> None:
        """It cannot be joined any more."""
        place = (chunk.key, chunk.start, chunk.end)
        if self._chunks.get(place) is chunk:
            del self._chunks[place]

    def live(self) -> list[Asked]:
        """All that have not ended."""
        return [asked for chunk in self._chunks.values() for asked in chunk.askers]

    def _new_chunk(self, asked: Asked, *, is_urgent: bool) -> Range:
        waiting = len(self._urgent) if is_urgent else self.pending
        if waiting >= self._limits.pending_max:
            self._counts["refused"] += 1
            raise BusyError(
                f"{waiting} reads wait for the object store", where=asked.key, do="read again later"
            )
        self._number += 1
        start, end = asked.wanted.start, asked.wanted.end
        chunk = Range(asked.key, start, end, asked.stream, is_urgent, self._number)
        self._chunks[asked.key, start, end] = chunk
        self._queue_of(chunk).push(chunk)
        return chunk

    def _queue_of(self, chunk: Range) -> RangeQueue:
        return self._urgent if chunk.is_urgent else self._ahead
