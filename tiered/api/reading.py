"""Goes through queues of an opened tier: batch by batch, several queues at once, or along with the writer.

Each iterator is one reader with a read-ahead window of its own; it may be used by one thread at a time. Nothing is retried
here. What a batch holds was checked, and comes as a whole or not at all.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from backends.lazy_dataclass import dataclass
from tiered.api.stores import backend_errors
from tiered.errors import InvalidError
from tiered.log.parts import Gap
from tiered.log.reader import QueueReader
from tiered.model import QueueOffset

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Sequence

    from tiered.api.open_tier import OpenTier
    from tiered.log.cursor import QueueCursor
    from tiered.log.decode import TierBatch
    from tiered.model import MessageQueue

T = TypeVar("T")
COUNT_MAX = 1 << 20
LEAVE_SECONDS = 1.0
FOLLOW_S_MIN = 0.25
"""First pause of a follower that met nothing new."""


@dataclass(frozen=True, slots=True)
class Span:
    """What to read of one history of a queue."""

    cursor: QueueCursor  # on the history
    start: QueueOffset  # first queue offset
    stop: QueueOffset  # one past the last
    is_firm: bool = False  # the reader has named the end: it is read ahead up to there


def require_positive(name: str, value: float) -> None:
    """Refuse a limit that lets nothing through."""
    if not value > 0:
        raise InvalidError(f"{name} is {value}", do="make it more than 0")


def require_offset(offset: int | None, cursor: QueueCursor) -> None:
    """Refuse an offset that no queue has."""
    if offset is not None and offset < 0:
        raise InvalidError(f"a queue offset below zero: {offset}", where=str(cursor.queue))


def plan_span(cursor: QueueCursor, start: int, stop: int | None) -> Span:
    """What a read goes through: bounds are cut to what there is when the cursor is made."""
    require_offset(start, cursor)
    require_offset(stop, cursor)
    end = cursor.end if stop is None else min(stop, cursor.end)
    return Span(cursor, QueueOffset(max(start, cursor.low)), QueueOffset(end), stop is not None)


def read_span(tier: OpenTier, span: Span, *, batch_bytes: int) -> Iterator[TierBatch]:
    """Everything in a span, in order; gaps are passed over.

    Raises:
        ExpiredError: Messages of it have expired meanwhile.
        StoreUnavailableError: The store does not answer. The iterator is over; a new one may go on behind the last batch.
    """
    with tier.group() as group:
        yield from read_for(tier, span, group, batch_bytes)


def read_for(tier: OpenTier, span: Span, group: str, batch_bytes: int) -> SpanReader:
    """As ``read_span``, for a group of readers that read ahead together (``OpenTier.group``, ``OpenTier.expect``)."""
    return SpanReader(tier, span, group, batch_bytes)


class SpanReader:
    """Goes through a span, batch by batch; at its end its reader is forgotten. For one thread at a time."""

    def __init__(self, tier: OpenTier, span: Span, group: str, batch_bytes: int) -> None:
        """Read nothing yet; see ``read_span``."""
        self._tier, self._span = tier, span
        self._group, self._batch_bytes = group, batch_bytes
        self._at = span.start

    @property
    def is_ready(self) -> bool:
        """Whether the next batch comes without waiting for the store, as far as can be told."""
        return self._at >= self._span.stop or self._tier.is_here(self._span.cursor, self._at)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TierBatch:
        span = self._span
        while self._at < span.stop:
            found = self._tier.fetch(
                self._group,
                span.cursor,
                self._at,
                bytes_max=self._batch_bytes,
                count_max=min(span.stop - self._at, COUNT_MAX),
                until=span.stop if span.is_firm else None,
            )
            if found is None:
                self._at = span.stop
            elif isinstance(found, Gap):
                self._at = found.end
            else:
                self._at = found.end_offset
                return found
        self._tier.forget(self._group, span.cursor.queue)
        raise StopIteration


def read_spans(
    tier: OpenTier, spans: Sequence[Span], *, batch_bytes: int, at_once: int
) -> Iterator[TierBatch]:
    """Everything in several spans, each in order, some at once; what lies side by side is asked for together.

    Args:
        spans: Of queues that are all different.
        at_once: How many are read at once (> 0).
    """
    with tier.group() as group:
        tier.expect(group, [(span.cursor, span.start, span.stop) for span in spans])
        # Made one by one as turns come free, so that a thousand queues do not begin at once.
        readers = (read_for(tier, span, group, batch_bytes) for span in spans)
        yield from interleave(readers, at_once=at_once)


class QueueFollower:
    """One follower of a queue: what comes next, without waiting for what is not there yet. For one thread at a time.

    A history is read to where it ended when it was looked at last; then the cursor goes on. A queue that was deleted and
    made again is followed into its new incarnation when all of the old one has been given; of what the broker truncated what
    came in its place is given, so that queue offsets may come again.
    """

    def __init__(
        self,
        tier: OpenTier,
        cursor: QueueCursor,
        start: int | None,
        *,
        group: str,
        batch_bytes: int,
    ) -> None:
        """Read nothing yet.

        Args:
            cursor: On the history to begin with; it becomes the follower's.
            start: First queue offset; None: the end.
        """
        require_offset(start, cursor)
        require_positive("batch_bytes", batch_bytes)
        self._tier, self._cursor = tier, cursor
        self._group, self._batch_bytes = group, batch_bytes
        self._at = cursor.end if start is None else QueueOffset(max(start, cursor.low))

    def step(self) -> TierBatch | None:
        """The next batch; None: there is no more in what was seen of the journal."""
        cursor = self._cursor
        while True:
            found = self._tier.fetch(
                self._group, cursor, self._at, bytes_max=self._batch_bytes, count_max=COUNT_MAX
            )
            if found is None:
                seen = cursor.history, cursor.end
                # A history that has ended goes on in the next one; one that has only come to its end stays.
                self._at = cursor.go_on(self._at)
                if seen == (cursor.history, cursor.end):
                    return None
            elif isinstance(found, Gap):
                self._at = found.end
            else:
                self._at = found.end_offset
                return found


def follow_queue(
    tier: OpenTier,
    cursor: QueueCursor,
    start: int | None,
    stop: threading.Event,
    *,
    batch_bytes: int,
    pause_s_max: float,
) -> Iterator[TierBatch]:
    """All that is committed from an offset on (``QueueFollower``), waiting for more until ``stop`` is set."""
    pause_s = FOLLOW_S_MIN
    with tier.group() as group:
        follower = QueueFollower(tier, cursor, start, group=group, batch_bytes=batch_bytes)
        while not stop.is_set():
            found = follower.step()
            if found is None:
                pause_s = _await_news(tier, stop, pause_s, pause_s_max)
            else:
                pause_s = FOLLOW_S_MIN
                yield found


def _await_news(tier: OpenTier, stop: threading.Event, pause_s: float, pause_s_max: float) -> float:
    """Look at the journal; when there is nothing new, wait. Returns the next pause."""
    if tier.refresh():
        return FOLLOW_S_MIN
    tier.clock.wait(stop, min(pause_s, pause_s_max))
    return longer(pause_s, pause_s_max)


def longer(pause_s: float, pause_s_max: float) -> float:
    """A follower's next pause, when nothing came."""
    return pause_s * 2 if pause_s < pause_s_max else pause_s


def interleave(sources: Iterable[Iterator[T]], *, at_once: int) -> Iterator[T]:
    """Elements of several iterators in turn, each iterator's in order, with the next of each made in a thread.

    What an iterator has at hand (``is_ready``, if it can tell) is made at once, which costs less than to wake a thread.

    Who leaves it waits for what is being made, but not long.

    Args:
        sources: Each is used by one thread at a time; a new one is begun when another has ended.

    Raises:
        Exception: What the first iterator to fail raises; the others are given up.
    """
    rest = iter(sources)
    end = object()
    pool, will_end = ThreadPoolExecutor(at_once, "tiered-read"), True
    turns: deque[tuple[Iterator[T], Future[T | object]]] = deque()

    def begin(source: Iterator[T]) -> None:
        future: Future[T | object] = Future()
        try:
            # Not where the store has to be waited for: the other iterators' elements would wait for this one's.
            if getattr(source, "is_ready", False):
                future.set_result(next(source, end))
            else:
                future = pool.submit(next, source, end)
        except Exception as error:  # noqa: BLE001 (raised when its turn comes)
            future.set_exception(error)
        turns.append((source, future))

    try:
        for source in rest:
            begin(source)
            if len(turns) == at_once:
                break
        while turns:
            source, future = turns.popleft()
            element = future.result()
            following = next(rest, None) if element is end else source
            if following is not None:
                begin(following)
            if element is not end:
                yield element  # type: ignore[misc]
    except BaseException:
        # Maybe in the collector, which runs in any thread: in one for whose locks ours wait. And neither an error nor
        # Ctrl-C is to be told only when the other reads have ended, which may be at their deadline.
        will_end = not wait([future for _, future in turns], LEAVE_SECONDS).not_done
        raise
    finally:
        pool.shutdown(wait=will_end, cancel_futures=True)


# -- damaged queues ------------------------------------------------------------------------------
#
# Goes through a queue of which something is damaged: what is sound comes out, and what is lost is named, all of it.
#
# For callers that were told to go on past damage, and for those that want to know its extent before they give up. Damage
# costs the messages of its block (``tiered.log.salvage``). Memory: a batch, and the section in which the damage lies.

_SHOWN: Final = 64
"""OffsetRanges that an error names; it is one line."""


class Lost(NamedTuple):
    """Queue offsets ``[start, end)`` that cannot be read, and what is damaged."""

    queue: MessageQueue
    start: int
    end: int
    what: str


def read_sound(
    tier: OpenTier, span: Span, group: str, batch_bytes: int, lost: list[Lost]
) -> Iterator[TierBatch]:
    """As ``read_for``, but that damage ends nothing: lost messages are holes of a batch, or in none, and are named.

    Args:
        batch_bytes: Of a batch, at most; where something is damaged a section at once.
        lost: What cannot be read is appended to it before what lies behind comes out.

    Raises:
        TieredStoreError: As ``read_for``; a ``DataError`` only where the journal contradicts itself.
    """
    reader = QueueReader(tier.store, tier.place.prefix, span.cursor)
    with backend_errors():
        yield from reader.past_damage(
            span.start,
            span.stop,
            lambda found: lost.extend(Lost(reader.queue, *one) for one in found.named),
            read=lambda at: read_for(tier, replace(span, start=at), group, batch_bytes),
        )


def find_lost(tier: OpenTier, spans: Sequence[Span], batch_bytes: int) -> list[Lost]:
    """All that cannot be read of some spans, by reading them."""
    lost: list[Lost] = []
    with tier.group() as group:
        for span in spans:
            for _ in read_sound(tier, span, group, batch_bytes, lost):
                pass
    return lost


def told(lost: Iterable[Lost]) -> str:
    """How many messages are lost, and where; for people."""
    every = sorted(lost)
    count = sum(one.end - one.start for one in every)
    places = [f"{one.queue} [{one.start}, {one.end})" for one in every[:_SHOWN]]
    more = f" and {len(every) - _SHOWN} ranges more" if len(every) > _SHOWN else ""
    return f"{count:,} messages in damaged blocks: {', '.join(places)}{more}"
