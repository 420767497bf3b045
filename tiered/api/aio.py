"""The Python API for asyncio: the same methods, as async iterators and coroutines.

Overview: an ``AsyncTier`` wraps a ``Tier``. What may wait for the store runs in threads of its own, batch by batch, so the
loop is held up only by handing messages over. Followers that wait for more wait in the loop, without a thread, however many
they are; one listing of the journal serves all that wait at that moment.

Cancelling: the awaiting task is released at once. A read that a thread is amid of runs on until its answer, its deadline or
``close``; of an iterator it is kept, and the next ``anext`` has what it gives (``AsyncReading``).

Ordering, retries and errors are those of ``Tier``.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from tiered.api.reading import FOLLOW_S_MIN, QueueFollower, longer, require_positive
from tiered.api.tier import MESSAGE_BATCH_BYTES, Choice, opened_by
from tiered.api.tier import open as open_tier
from tiered.errors import ClosedError
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from types import TracebackType

    import pyarrow as pa

    from tiered.api.message import Found, Message
    from tiered.api.tier import Tier
    from tiered.log.decode import TierBatch
    from tiered.model import QueueBounds, QueueOffset

T = TypeVar("T")
THREADS = 32
"""Reads and listings that may be under way at once; others wait for their turn."""

_Work = Callable[[], list[T] | None]
"""Gives what comes next; None: nothing, for good or for now."""
_Pause = Callable[[bool], Awaitable[None]]


class AsyncTier:
    """One broker's tier for asyncio; see ``Tier`` for arguments and errors. For one event loop."""

    def __init__(self, tier: Tier) -> None:
        """Take a tier over; it is closed with this one."""
        self._opened = opened_by(tier)
        self.tier = tier
        self._pool = ThreadPoolExecutor(THREADS, "tiered-aio")
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left: deque[Callable[[], None]] = deque()
        self._looking: asyncio.Task[bool] | None = None
        self._looks = 0
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return repr(self.tier).replace("<Tier", "<AsyncTier", 1)

    def _repr_html_(self) -> str:
        return self.tier._repr_html_()

    def topics(self) -> list[str]:
        """Names of the topics that have a queue in the tier. Asks no store."""
        return self.tier.topics()

    def queues(self, topic: str | None = None) -> list[MessageQueue]:
        """The queues of a topic, or all, as of opening or the last ``refresh``. Asks no store."""
        return self.tier.queues(topic)

    def bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """Queue offsets ``[min, end)`` of a queue, as last seen. Asks no store."""
        return self.tier.bounds(topic, queue_id)

    async def refresh(self) -> bool:
        """Look at the journal; whether there was anything new. Followers that wait are woken then."""
        return self._tell(is_new=await self._call(self.tier.refresh))

    async def offset_for_time(
        self, topic: str, queue_id: int, time: int | datetime, *, upper: bool = False
    ) -> QueueOffset:
        """A queue offset by store time (``Tier.offset_for_time``), found in a thread."""
        work = partial(self.tier.offset_for_time, topic, queue_id, time, upper=upper)
        return await self._call(work)

    async def query(self, topic: str, key: str, **more: Any) -> Found:  # noqa: ANN401 (those of Tier.query)
        """Messages by key, or by their unique id, newest first (``Tier.query``), found in a thread."""
        return await self._call(partial(self.tier.query, topic, key, **more))

    def read(
        self,
        topic: str,
        queue_id: int,
        start: int = 0,
        stop: int | None = None,
        *,
        tags: str | None = None,
        sql: str | None = None,
        incarnation: int | None = None,
    ) -> AsyncReading[Message]:
        """The messages of a queue in ``[start, stop)``, in order; ``tags`` or ``sql`` choose among them (``Tier.read``)."""

        def begin() -> Iterator[list[Message]]:
            batches = self.tier.read_records(
                topic,
                queue_id,
                start,
                stop,
                incarnation=incarnation,
                batch_bytes=MESSAGE_BATCH_BYTES,
            )
            return Choice.of(tags, sql).lists(batches)

        return self._reading(_lists(begin))

    def read_arrow(
        self,
        topic: str,
        queue_id: int,
        start: int = 0,
        stop: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        **more: Any,  # noqa: ANN401 (those of Tier.read_arrow)
    ) -> AsyncReading[pa.RecordBatch]:
        """The same as Arrow record batches; ``more`` are the further arguments of ``Tier.read_arrow``."""
        read = partial(self.tier.read_arrow, topic, queue_id, start, stop, columns=columns, **more)
        return self._reading(_each(read))

    def read_records(
        self, topic: str, queue_id: int, start: int = 0, stop: int | None = None
    ) -> AsyncReading[TierBatch]:
        """The same as batches of raw records (``Tier.read_records``)."""
        read = partial(self.tier.read_records, topic, queue_id, start, stop)
        return self._reading(_each(read))

    def read_topic(
        self,
        topic: str,
        *,
        tags: str | None = None,
        sql: str | None = None,
        queues_at_once: int = 16,
    ) -> AsyncReading[Message]:
        """All messages of a topic, several queues at once, each in order (``Tier.read_topic``)."""
        limits = {"queues_at_once": queues_at_once, "batch_bytes": MESSAGE_BATCH_BYTES}

        def begin() -> Iterator[list[Message]]:
            return Choice.of(tags, sql).lists(self.tier.read_topic_records(topic, **limits))

        return self._reading(_lists(begin))

    def read_topic_arrow(self, topic: str, **more: Any) -> AsyncReading[pa.RecordBatch]:  # noqa: ANN401 (those of Tier.read_topic_arrow)
        """The same as Arrow record batches; ``more`` are the further arguments of ``Tier.read_topic_arrow``."""
        return self._reading(_each(partial(self.tier.read_topic_arrow, topic, **more)))

    def follow(
        self,
        topic: str,
        queue_id: int,
        start: int | None = None,
        *,
        tags: str | None = None,
        sql: str | None = None,
        pause_s_max: float = 5.0,
    ) -> AsyncReading[Message]:
        """The messages of a queue from ``start`` on, and those that come (``Tier.follow``), without end.

        Cancel the task that reads it, and drop it, or ``aclose`` it, to end it.
        """

        def begin(stack: ExitStack) -> _Work[Message]:
            require_positive("pause_s_max", pause_s_max)
            choice = Choice.of(tags, sql)
            cursor = self._opened.reader.cursor(MessageQueue(topic, queue_id))
            group = stack.enter_context(self._opened.group())
            limits = {"batch_bytes": MESSAGE_BATCH_BYTES}
            follower = QueueFollower(self._opened, cursor, start, group=group, **limits)

            def step() -> list[Message] | None:
                found = follower.step()
                return None if found is None else next(choice.lists([found]))

            return step

        return self._reading(begin, self._pauses(pause_s_max))

    def _reading(
        self, begin: Callable[[ExitStack], _Work[T]], pause: _Pause | None = None
    ) -> AsyncReading[T]:
        return AsyncReading(self._submit, self._outcome, self._aside, begin, pause)

    def _aside(self, work: Callable[[], None]) -> None:
        """Have something done in a thread for which nobody waits.

        Called in the collector as well, and so in whatever thread holds whatever lock: it takes none, and leaves the pool,
        which does, to the loop.
        """
        self._left.append(work)
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed: `close` does it
                self._loop.call_soon_threadsafe(self._do_left)

    def _do_left(self) -> None:
        while self._left:
            work = self._left.popleft()
            try:
                self._pool.submit(work)
            except (
                RuntimeError
            ):  # no thread is to be had any more: the tier is closed, and nothing is waited for
                work()

    def _pauses(self, pause_s_max: float) -> _Pause:
        """How a follower waits, in the loop."""
        seen, known, pause_s = self._looks, self._news, FOLLOW_S_MIN

        async def pause(is_found: bool) -> None:
            """Wait for news if there was nothing; look at the journal first, unless another has since."""
            nonlocal seen, known, pause_s
            # News since the last pause may have come when the step that found nothing was nearly over.
            is_found = is_found or self._news is not known
            if is_found or (self._looks == seen and await self._look()):
                known, pause_s = self._news, FOLLOW_S_MIN
                return
            seen, news = self._looks, self._news
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), min(pause_s, pause_s_max))
            known, pause_s = self._news, longer(pause_s, pause_s_max)

        return pause

    async def _look(self) -> bool:
        """Look at the journal, or wait for the look that is under way; whether there was anything."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._call(self.tier.refresh))
            self._looking.add_done_callback(self._looked)
        # Shielded: it is looked for all that wait, and one that is cancelled must not end it for the others.
        return await asyncio.shield(self._looking)

    def _looked(self, task: asyncio.Task[bool]) -> None:
        self._looking = None
        if not task.cancelled() and task.exception() is None:
            self._looks += 1
            self._tell(is_new=task.result())

    def _tell(self, *, is_new: bool) -> bool:
        """Wake the followers that wait, if there is anything new."""
        if is_new:
            # A new one each time: who begins to wait now waits for what comes next, and not for this.
            self._news.set()
            self._news = asyncio.Event()
        return is_new

    async def _call(self, work: Callable[..., T], *arguments: object) -> T:
        return await self._outcome(self._submit(work, *arguments))

    def _submit(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Have something done in a thread."""
        self._opened.require_same_process()
        if self._closing.is_set():
            raise self._closed()
        self._loop = asyncio.get_running_loop()
        return self._loop.run_in_executor(self._pool, work, *arguments)

    async def _outcome(self, future: Awaitable[T]) -> T:
        """What ``_submit`` gave."""
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            # Cancelled by the pool that was shut down, not by the task that awaits: that is told as what it is.
            if self._closing.is_set() and task is not None and not task.cancelling():
                raise self._closed() from None
            raise

    def _closed(self) -> ClosedError:
        return ClosedError("the tier has been closed", where=self._opened.store.url)

    async def close(self) -> None:
        """End threads and give back connections; see ``Tier``. Followers that wait end with ``ClosedError``."""
        # In this order: followers that wake up now see that it is closed.
        self._closing.set()
        self._news.set()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._opened.is_forked:
            return
        # The tier first: it ends the reads that the pool's threads wait in.
        self.tier.close()
        self._pool.shutdown(cancel_futures=True)
        self._do_left()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncReading(Generic[T]):
    """An async iterator over what a thread finds, step by step.

    An ``anext`` may be cancelled, or given up after some time: the step that it asked for is kept, and the next ``anext``
    has what it finds. So nothing is lost, and nothing comes twice. One that has raised anything else is over, and so is one
    that was closed; a step that is under way then runs out in its thread, and is dropped.
    """

    def __init__(
        self,
        submit: Callable[[_Work[T]], asyncio.Future[list[T] | None]],
        outcome: Callable[[Awaitable[list[T] | None]], Awaitable[list[T] | None]],
        aside: Callable[[Callable[[], None]], None],
        begin: Callable[[ExitStack], _Work[T]],
        pause: _Pause | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            submit: Has a step done in a thread.
            outcome: Waits for it.
            aside: Has something done in a thread for which nobody waits.
            begin: Called by the first ``anext``: gives the step. What it enters is left at the end.
            pause: Told after each step whether it found something, waits if it did not; without it that is the end.
        """
        self._submit = submit
        self._outcome = outcome
        self._begin = begin
        self._pause = pause
        self._aside = aside
        # In a list that only threads empty: what lets go of an iterator amid of it may wait for the reads that it has begun.
        self._work: list[_Work[T]] = []
        self._step: asyncio.Future[list[T] | None] | None = None
        self._ready: deque[T] = deque()
        self._is_over = self._is_asked = False
        stack = self._stack = ExitStack()
        weakref.finalize(
            self, _let_go, aside, self._work, stack
        ).atexit = False  # a reader may just be dropped

    def __aiter__(self) -> Self:
        """Itself."""
        return self

    async def __anext__(self) -> T:
        """What comes next.

        Raises:
            RuntimeError: Another ``anext`` is under way.
        """
        if self._is_asked:
            raise RuntimeError("another anext of this iterator is under way")
        self._is_asked = True
        try:
            while not (self._ready or self._is_over):
                await self._fill()
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._end()
            raise
        finally:
            self._is_asked = False
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Be over."""
        self._end()

    async def _fill(self) -> None:
        """Have a step done, or take the one that is under way already."""
        if self._step is None:
            if not self._work:
                self._work.append(self._begin(self._stack))
            self._step = self._submit(self._work[0])
        found = await self._outcome(asyncio.shield(self._step))
        if self._is_over:  # closed meanwhile
            return
        self._step = None  # not before: a cancelled task leaves it to the next
        if found is not None:
            self._ready.extend(found)
        elif self._pause is None:
            self._work.clear()  # it has come to its end
            self._end()
        if self._pause is not None:
            await self._pause(found is not None)

    def _end(self) -> None:
        self._is_over = True
        self._ready.clear()
        step, self._step = self._step, None
        if step is None or step.done():
            _let_go(self._aside, self._work, self._stack)
        else:
            step.add_done_callback(self._left)

    def _left(self, step: asyncio.Future[list[T] | None]) -> None:
        """The step that was under way at the end is done."""
        if not step.cancelled():
            step.exception()  # nobody else asks for it
        _let_go(self._aside, self._work, self._stack)


def _let_go(
    aside: Callable[[Callable[[], None]], None], work: list[_Work[T]], stack: ExitStack
) -> None:
    """End a reading, in a thread if it has not come to its end; in the collector as well, and so without a lock of ours."""
    if work:
        aside(work.clear)
    stack.close()


def _lists(begin: Callable[[], Iterator[list[T]]]) -> Callable[[ExitStack], _Work[T]]:
    """Steps through an iterator of lists."""
    return lambda _: partial(next, begin(), None)


def _each(begin: Callable[[], Iterator[T]]) -> Callable[[ExitStack], _Work[T]]:
    """Steps through an iterator, one at a time."""
    return _lists(lambda: ([element] for element in begin()))


async def open_async(url: str, **more: Any) -> AsyncTier:  # noqa: ANN401 (those of open)
    """Open a tier for reading with asyncio; arguments and errors are those of ``tiered.open``."""
    return AsyncTier(await asyncio.to_thread(partial(open_tier, url, **more)))
