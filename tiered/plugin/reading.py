"""Goes through queues of an opened tier: batch by batch, several queues at once, or along with the writer.

Each iterator is one reader with a read-ahead window of its own; it may be used by one thread at a time. Nothing is retried
here. What a batch holds was checked, and comes as a whole or not at all.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tiered.errors import InvalidError
from tiered.log.parts import Gap
from tiered.model import QueueOffset

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from tiered.log.decode import TierBatch
    from tiered.log.parts import QueueLife, TierState
    from tiered.log.reader import TierReader
    from tiered.model import MessageQueue
    from tiered.plugin.engine import Engine

T = TypeVar("T")
COUNT_MAX = 1 << 20
LEAVE_SECONDS = 1.0
FOLLOW_S_MIN = 0.25
"""First pause of a follower that met nothing new."""


@dataclass(frozen=True, slots=True)
class Span:
    """What to read of one life of a queue.

    Attributes:
        queue: Whose.
        incarnation: Which life.
        start: First queue offset.
        stop: One past the last.
        is_firm: Whoever reads has named the end: it is read ahead up to there.
    """

    queue: MessageQueue
    incarnation: int
    start: QueueOffset
    stop: QueueOffset
    is_firm: bool = False


def plan_span(
    state: TierState,
    queue: MessageQueue,
    start: int,
    stop: int | None,
    incarnation: int | None,
    *,
    where: str,
) -> Span:
    """What a read goes through: bounds are cut to what there is now.

    Raises:
        InvalidError: No such queue or incarnation, or a bound below zero.
    """
    if start < 0 or (stop is not None and stop < 0):
        raise InvalidError(f"a queue offset below zero: {start} to {stop}", where=str(queue))
    life = find_life(state, queue, incarnation, where=where)
    end = life.commit_offset if stop is None else min(stop, life.commit_offset)
    begin = QueueOffset(max(start, life.min_offset))
    return Span(queue, life.incarnation, begin, QueueOffset(end), stop is not None)


def find_life(
    state: TierState, queue: MessageQueue, incarnation: int | None = None, *, where: str
) -> QueueLife:
    """A life of a queue (None: the present one).

    Raises:
        InvalidError: There is none.
    """
    lives = [x for x in state.queues.get(queue, ()) if incarnation in {None, x.incarnation}]
    if lives:
        return lives[-1]
    of_it = "" if incarnation is None else f" of incarnation {incarnation}"
    raise InvalidError(
        f"the tier has no queue {queue}{of_it}",
        where=where,
        do="`tiered ls URL` lists the topics and queues",
    )


def read_span(engine: Engine, span: Span, *, batch_bytes: int) -> Iterator[TierBatch]:
    """Everything in a span, in order; gaps are passed over.

    Raises:
        ExpiredError: Messages of it have expired meanwhile.
        DataError: Bytes are damaged.
        StoreUnavailableError: The store does not answer. The iterator is over; a new one may go on behind the last batch.
    """
    at = span.start
    with engine.group() as group:
        while at < span.stop:
            found = engine.fetch(
                group,
                span.queue,
                at,
                bytes_max=batch_bytes,
                count_max=min(span.stop - at, COUNT_MAX),
                incarnation=span.incarnation,
                until=span.stop if span.is_firm else None,
            )
            if found is None:
                return
            if isinstance(found, Gap):
                at = found.end
            else:
                at = found.end_offset
                yield found


def follow_queue(
    engine: Engine,
    reader: TierReader,
    queue: MessageQueue,
    start: int | None,
    stop: threading.Event,
    *,
    batch_bytes: int,
    pause_s_max: float,
) -> Iterator[TierBatch]:
    """All that is committed from an offset on, waiting for more until ``stop`` is set.

    A queue that was deleted and made again is followed into its new life from its beginning; of what the broker took back
    what came in its place is given, so that queue offsets may come again.

    Raises:
        TieredStoreError: As ``read_span``.
    """
    life = find_life(reader.state, queue, where=reader.store.url)
    at, pause_s = life.commit_offset if start is None else QueueOffset(start), FOLLOW_S_MIN
    incarnation, known = life.incarnation, len(reader.state.queues[queue])
    with engine.group() as group:
        while not stop.is_set():
            lives = reader.state.queues[queue]
            at = plan_going_on(lives, known, at, incarnation)
            incarnation, known = lives[-1].incarnation, len(lives)
            found = engine.fetch(
                group,
                queue,
                at,
                bytes_max=batch_bytes,
                count_max=COUNT_MAX,
                incarnation=incarnation,
            )
            if found is None:
                pause_s = _await_news(engine, stop, pause_s, pause_s_max)
            elif isinstance(found, Gap):
                at = found.end
            else:
                at, pause_s = found.end_offset, FOLLOW_S_MIN
                yield found


def plan_going_on(
    lives: Sequence[QueueLife], known: int, at: QueueOffset, incarnation: int
) -> QueueOffset:
    """Where a follower goes on: at the beginning of a new life, or where the broker took back what it has read.

    Args:
        lives: Of the queue, as they are now; what was taken back is one of them.
        known: How many there were when it last looked.
        at: Where it would go on.
        incarnation: Of the life that it was in.
    """
    now = lives[-1]
    if now.incarnation != incarnation:
        return now.min_offset
    taken_back = [life.min_offset for life in lives[known - 1 : -1]]
    return max(min([at, *taken_back]), now.min_offset)


def _await_news(engine: Engine, stop: threading.Event, pause_s: float, pause_s_max: float) -> float:
    """Look at the journal; when there is nothing new, wait. Returns the next pause."""
    if engine.refresh():
        return FOLLOW_S_MIN
    engine.clock.wait(stop, min(pause_s, pause_s_max))
    return pause_s * 2 if pause_s < pause_s_max else pause_s


def interleave(sources: Iterable[Iterator[T]], *, at_once: int) -> Iterator[T]:
    """Elements of several iterators in turn, each iterator's in order, with the next of each made in a thread.

    Who leaves it waits for what is being made, but not long.

    Args:
        sources: Each is used by one thread at a time; a new one is begun when another has ended.
        at_once: How many go on at once (> 0).

    Raises:
        Exception: What the first iterator to fail raises; the others are given up.
    """
    rest = iter(sources)
    end = object()
    pool, will_end = ThreadPoolExecutor(at_once, "tiered-read"), True
    turns: deque[tuple[Iterator[T], Future[T | object]]] = deque()

    def begin(source: Iterator[T]) -> None:
        turns.append((source, pool.submit(next, source, end)))

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
    except GeneratorExit:
        # Maybe in the collector, which runs in any thread: in one for whose locks ours wait.
        will_end = not wait([future for _, future in turns], LEAVE_SECONDS).not_done
        raise
    finally:
        pool.shutdown(wait=will_end, cancel_futures=True)
