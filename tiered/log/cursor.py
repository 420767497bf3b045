"""A cursor over a queue's incarnations: who reads a queue in steps stays on one history of it.

Overview
    Queue offsets alone do not say which messages are meant. The broker may truncate an end of a queue and write others at
    the same offsets, and a topic may be deleted and made again. The journal keeps all of it: the *incarnations* of a queue,
    and of each incarnation the ends that were truncated. A *history* is an incarnation and the number of its ends that had
    been truncated; a ``QueueCursor`` is on one of them, up to where it ended when the cursor was made, whatever anybody
    refreshes meanwhile. Iterators, followers, ``cat``, readers of single queues and of archives' ranges all have one.

Where the history lies
    At first in one incarnation, whose view the cursor keeps: nothing is looked up, and the journal may move on. When an
    object is gone (404), since its part was merged or has expired, the journal is replayed, and the history is looked for in
    what it says now: still one incarnation, or a beginning that goes on with others and the ends that were truncated since
    (``incarnation_at``).

Errors: what has expired is an ``ExpiredError`` that says where to go on; an object that is still named is damage. Never
messages of another history.

Following: ``go_on`` alone leaves a history, for the one that goes on from it, and says at which offset.

Threads: reads in any; ``go_on`` in one. A crash leaves nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from backends.errors import ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, ExpiredError, InvalidError
from tiered.format.record_kind import RecordKind
from tiered.log.decode import TierBatch
from tiered.log.lineage import Isolation, hidden, stable_end
from tiered.model import Boundary, LogOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from tiered.log.parts import Gap, Incarnation, Part, Parts, TierState
    from tiered.model import MessageQueue

T = TypeVar("T")

REPLAYS_MAX = 4
"""How often one read replays the journal because an object is gone: each time another must have gone."""


# -- an incarnation, laid out

_PARTS_HELD = 8
"""Of each view, made of their rows; a queue's readers are at one place or two."""


@dataclass(frozen=True, slots=True)
class IncarnationView:
    """One incarnation at one moment, with its parts laid out for bisection."""

    queue: MessageQueue
    incarnation: Incarnation  # as the journal has it
    parts: Parts  # all of its parts, in order
    starts: npt.NDArray[np.int64]  # int64[n], queue offset of each part
    _looked_at: dict[int, Part] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, queue: MessageQueue, incarnation: Incarnation) -> IncarnationView:
        """Lay an incarnation out."""
        parts = incarnation.parts()
        return cls(queue, incarnation, parts, parts.column("queue_offset"))

    def locate(self, start: QueueOffset, *, where: str) -> Part | Gap | None:
        """The part or gap that holds a queue offset at or above the minimum; None at or behind the end."""
        if start >= self.incarnation.commit_offset:
            return None
        part = self.part_at(start)
        if part is not None:
            return part
        for gap in self.incarnation.gaps:
            if gap.start <= start < gap.end:
                return gap
        raise DataError(
            f"the journal has neither a part nor a gap for {self.queue} at queue offset {start}",
            where=where,
            do="run `tiered verify` to see what is damaged",
        )

    def part_at(self, offset: QueueOffset) -> Part | None:
        """The part that holds a queue offset, if one does."""
        index = self._at(offset)
        part = self.part(index) if index >= 0 else None
        return part if part is not None and offset < part.queue_end else None

    def _at(self, offset: QueueOffset) -> int:
        """Number of the last part that begins at or below a queue offset; -1: none."""
        return (
            bisect_right(self.starts.data, offset) - 1
        )  # not NumPy's: it gives the interpreter's lock away

    def about(self, offset: QueueOffset) -> LogOffset:
        """Where in the log a queue offset lies: exact at the ends of parts, within one as if all records were alike."""
        if not len(self.parts):
            return self.incarnation.log_end
        part = self.part(max(self._at(offset), 0))
        within = min(max(offset - part.queue_offset, 0), part.count)
        return LogOffset(part.log_offset + part.log_bytes * within // part.count)

    def parts_from(self, start: QueueOffset) -> Iterator[Part]:
        """The part that holds a queue offset, if one does, and those behind it."""
        for index in range(max(self._at(start), 0), len(self.parts)):
            part = self.part(index)
            if part.queue_end > start:
                yield part

    def part(self, number: int) -> Part:
        """A part, which its readers look at again and again while they are near it."""
        part = self._looked_at.get(number)
        if part is None:
            part = self.parts[number]
            if len(self._looked_at) >= _PARTS_HELD:
                self._looked_at.clear()
            self._looked_at[number] = part
        return part


# -- histories


class Journal(Protocol):
    """What a cursor asks when an object is gone."""

    @property
    def state(self) -> TierState:
        """As of the last ``refresh``."""
        ...

    @property
    def where(self) -> str:
        """The tier, for messages."""
        ...

    def refresh(self) -> bool:
        """Replay what is new; whether there was anything."""
        ...

    def view(self, queue: MessageQueue, incarnation: Incarnation) -> IncarnationView:
        """An incarnation of a queue, laid out."""
        ...


class History(NamedTuple):
    """One history of a queue."""

    incarnation: int
    tails: int
    """How many of its ends had been truncated. Of such an end itself: how many before it."""


@dataclass(frozen=True, slots=True)
class HistoryPlace:
    """Queue offsets ``[start, end)`` of a history, in the one incarnation that has them."""

    view: IncarnationView
    start: QueueOffset
    end: QueueOffset


def of_incarnation(incarnations: Sequence[Incarnation], number: int) -> list[Incarnation]:
    """Incarnations of one incarnation: ends that were truncated, oldest first, and what counts or counted."""
    return [incarnation for incarnation in incarnations if incarnation.number == number]


def history_of(incarnations: Sequence[Incarnation], place: int) -> History:
    """The history that the incarnation at a place among the incarnations of its queue is, or was the end of."""
    number = incarnations[place].number
    return History(
        number, sum(incarnation.number == number for incarnation in incarnations[:place])
    )


def incarnation_at(
    incarnations: Sequence[Incarnation], tails: int, offset: int
) -> tuple[Incarnation, int, int]:
    """Where a queue offset of a history lies now.

    Args:
        incarnations: Of one incarnation, as they are now.

    Returns:
        The incarnation, and the bounds ``[start, end)`` within which it has all of the history.
    """
    end: int | None = None
    for incarnation in incarnations[tails:]:  # each end was cut from what the one before had left
        start = 0 if incarnation is incarnations[-1] else incarnation.cut_at
        if start <= offset or incarnation is incarnations[-1]:
            return (
                incarnation,
                start,
                incarnation.commit_offset if end is None else min(end, incarnation.commit_offset),
            )
        end = start if end is None else min(end, start)
    raise AssertionError("the last incarnation has all that no other has")


class QueueCursor:
    """See the module's contract.

    Attributes:
        history: Which history it is on.
        start: Where that begins: 0, or where an end was cut off that is read by itself.
        low: The first offset that there was when the journal was looked at.
        end: Where it ended then.
    """

    def __init__(
        self,
        queue: MessageQueue,
        view: IncarnationView,
        *,
        tails: int = 0,
        journal: Journal | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        """Stand on the history of an incarnation.

        Args:
            journal: Is asked when an object is gone. Without it that is an ``ObjectNotFoundError``, for the caller to look
                into.
            isolation: What is seen of transactions; None: all that is stored.
        """
        self.queue = queue
        self._journal = journal
        self._isolation = isolation
        self._stand(view, tails)

    def _stand(self, view: IncarnationView, tails: int) -> None:
        incarnation = view.incarnation
        self.history = History(incarnation.number, tails)
        self.start = QueueOffset(max(incarnation.cut_at, 0))
        self.low, self.end = incarnation.min_offset, self._end_of(incarnation)
        self._place = HistoryPlace(view, self.start, self.end)

    def _end_of(self, incarnation: Incarnation) -> QueueOffset:
        if self._isolation is Isolation.COMMITTED:
            return QueueOffset(max(incarnation.min_offset, stable_end(incarnation)))
        return incarnation.commit_offset

    def see(self, batch: TierBatch) -> TierBatch:
        """A batch of this history as its readers see it: what is not for them is holes."""
        if self._isolation is None or batch.records.kind is RecordKind.ROCKETMQ:
            return batch
        facts = self.incarnation.lineage
        hides = self._isolation is Isolation.COMMITTED and facts is not None
        seen = hidden(batch.records, facts.aborted if facts and hides else None)
        return batch if seen is batch.records else TierBatch(seen, batch.log_offset)

    @property
    def incarnation(self) -> Incarnation:
        """The incarnation that was read last, as last seen."""
        return self._place.view.incarnation

    def at(self, offset: int) -> HistoryPlace:
        """Where a queue offset lies, as last seen; behind the end, where that is."""
        place = self._place
        if place.start <= offset < place.end:
            return place
        offset = self._within(offset)
        if self.start >= self.end or place.start <= offset < place.end:
            return place
        self._place = place = self._find(offset)
        return place

    def again(
        self,
        offset: int,
        work: Callable[[HistoryPlace], T],
        *,
        or_behind: bool = False,
        refresh: Callable[[], object] | None = None,
    ) -> T:
        """Work where a queue offset lies, as last seen; when an object is gone, where it lies now.

        Args:
            refresh: Has the journal replayed; for who has a deadline. Default: in this thread, whatever time that takes.

        Raises:
            ExpiredError: The offset has expired since the cursor was made.
        """
        for tries_left in reversed(range(REPLAYS_MAX)):
            place = self.at(offset)
            self._require(offset, place, or_behind=or_behind)
            try:
                return work(place)
            except ObjectNotFoundError as error:
                if self._journal is None:
                    raise
                if tries_left:
                    (refresh or self._journal.refresh)()
                now = self._find(self._within(offset)) if tries_left else place
                if now.view.incarnation == place.view.incarnation:
                    raise DataError(
                        f"an object that the journal names is gone: {error}",
                        where=self._journal.where,
                        do="run `tiered verify` to see what is damaged",
                    ) from error
                self._require(offset, now, or_behind=or_behind, cause=error)
                self._place = now
        raise AssertionError("the last try ends by itself")

    def by_time(
        self,
        find: Callable[[HistoryPlace], QueueOffset | None],
        boundary: Boundary,
        *,
        refresh: Callable[[], object] | None = None,
    ) -> QueueOffset:
        """A queue offset of the history by store time: what ``Boundary`` says of all that is left of it."""
        offset, last = self.start, None
        while offset < self.end:
            place, found = self.again(
                offset, lambda at: (at, find(at)), or_behind=True, refresh=refresh
            )
            last = last if found is None else found
            if last is not None and boundary is Boundary.LOWER:
                break
            offset = place.end
        if last is not None:
            return last
        return (
            self.end
            if boundary is Boundary.LOWER
            else QueueOffset(max(self.low, self.incarnation.min_offset))
        )

    def go_on(self, offset: int) -> QueueOffset:
        """Go on in what the journal says now, with everything before ``offset`` read: where to read on.

        Of what was truncated what came in its place is next, so that offsets come again. A new incarnation is next when
        all of the old one has been read, but for transactions that nobody will decide any more.

        Raises:
            ExpiredError: What would be next has expired.
        """
        assert self._journal is not None
        every = self._journal.state.queues.get(self.queue, ())
        incarnations = self._mine(every)
        at = min([offset, *(tail.cut_at for tail in incarnations[self.history.tails : -1])])
        while at >= self._end_of(incarnations[-1]):
            later = of_incarnation(every, incarnations[-1].number + 1)
            if not later:
                break
            incarnations, at = later, later[-1].min_offset
        incarnation = incarnations[-1]
        if _behind_gaps(incarnation, at) < incarnation.min_offset:
            what = f"offsets {at} to {incarnation.min_offset} of {self.queue} have expired"
            raise ExpiredError(what, every[-1].min_offset, where=self._journal.where)
        if incarnation is not self.incarnation:
            self._stand(self._journal.view(self.queue, incarnation), len(incarnations) - 1)
        return QueueOffset(max(at, incarnation.min_offset))

    def _within(self, offset: int) -> int:
        return min(max(offset, self.start), self.end - 1)

    def _require(
        self, offset: int, place: HistoryPlace, *, or_behind: bool, cause: Exception | None = None
    ) -> None:
        """See that what is wanted has not expired since the cursor was made."""
        first, low = max(offset, self.low), place.view.incarnation.min_offset
        if or_behind or first >= low:
            return
        assert self._journal is not None
        cut = place.view.incarnation.cut_at
        if cut < 0 or self.start:
            what = f"offsets {first} to {low} of {self.queue} have expired"
            raise ExpiredError(what, low, where=self._journal.where) from cause
        incarnations = self._mine(self._journal.state.queues.get(self.queue, ()))
        cuts = [incarnation.cut_at for incarnation in incarnations[self.history.tails : -1]]
        what = f"offsets {first} to {low} of {self.queue} were truncated by the broker, and have expired"
        next_offset = max(min(cuts), incarnations[-1].min_offset)
        raise ExpiredError(what, next_offset, where=self._journal.where) from cause

    def _find(self, offset: int) -> HistoryPlace:
        """Where an offset of the history lies, as the journal has it."""
        assert self._journal is not None
        incarnations = self._mine(self._journal.state.queues.get(self.queue, ()))
        incarnation, start, end = incarnation_at(incarnations, self.history.tails, offset)
        bounds = max(start, self.start), min(end, self.end)
        return HistoryPlace(self._journal.view(self.queue, incarnation), *map(QueueOffset, bounds))

    def _mine(self, incarnations: Sequence[Incarnation]) -> list[Incarnation]:
        """Incarnations of the incarnation."""
        assert self._journal is not None
        found = of_incarnation(incarnations, self.history.incarnation)
        if len(found) > self.history.tails:
            return found
        raise InvalidError(
            f"the journal does not know what was read of {self.queue} any more: it has been rebuilt",
            where=self._journal.where,
            do="open the tier again",
        )


def _behind_gaps(incarnation: Incarnation, offset: int) -> int:
    """An offset, or where the gaps end that it lies in: nothing ever came there, so that nothing can have expired."""
    for gap in incarnation.gaps:
        if gap.start <= offset < gap.end:
            offset = gap.end
    return offset
