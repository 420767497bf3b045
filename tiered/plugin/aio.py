"""The Python API for asyncio: the same methods, as async iterators and coroutines.

Overview: an ``AsyncTier`` wraps a ``Tier``. What may wait for the store runs in threads of its own, batch by batch, so the
loop is held up only by handing messages over. Followers that wait for more wait in the loop, without a thread, however many
they are; one listing of the journal serves all that wait at that moment.

Cancelling: whoever awaits is let go at once. A read that a thread is amid of runs on until its answer, its deadline or
``close``, and is dropped.

Ordering, retries and errors are those of ``Tier``.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tiered.errors import ClosedError
from tiered.model import MessageQueue
from tiered.plugin.choice import Choice
from tiered.plugin.opened import MESSAGE_BATCH_BYTES
from tiered.plugin.reading import FOLLOW_S_MIN, Follower, longer, require_positive
from tiered.plugin.tier import open as open_tier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from datetime import datetime
    from types import TracebackType

    import pyarrow as pa

    from tiered.log.decode import TierBatch
    from tiered.model import QueueBounds, QueueOffset
    from tiered.plugin.lookup import Found
    from tiered.plugin.message import Message
    from tiered.plugin.opened import Tier

T = TypeVar("T")
THREADS = 32
"""Reads and listings that may be under way at once; others wait for their turn."""


class AsyncTier:
    """One broker's tier for asyncio; see ``Tier`` for arguments and errors. For one event loop.

    Attributes:
        tier: The tier itself.
    """

    def __init__(self, tier: Tier) -> None:
        """Take a tier over; it is closed with this one."""
        self.tier = tier
        self._pool = ThreadPoolExecutor(THREADS, "tiered-aio")
        self._closing = threading.Event()
        self._looking: asyncio.Task[bool] | None = None
        self._looks = 0
        self._news = asyncio.Event()

    def topics(self) -> list[str]:
        """See ``Tier``; asks no store."""
        return self.tier.topics()

    def queues(self, topic: str | None = None) -> list[MessageQueue]:
        """See ``Tier``; asks no store."""
        return self.tier.queues(topic)

    def bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """See ``Tier``; asks no store."""
        return self.tier.bounds(topic, queue_id)

    async def refresh(self) -> bool:
        """See ``Tier``."""
        return self._tell(is_new=await self._call(self.tier.refresh))

    async def offset_for_time(
        self, topic: str, queue_id: int, time: int | datetime, *, upper: bool = False
    ) -> QueueOffset:
        """See ``Tier``."""
        work = partial(self.tier.offset_for_time, topic, queue_id, time, upper=upper)
        return await self._call(work)

    async def query(self, topic: str, key: str, **more: Any) -> Found:  # noqa: ANN401 (those of Tier.query)
        """See ``Tier``."""
        return await self._call(partial(self.tier.query, topic, key, **more))

    async def read(
        self,
        topic: str,
        queue_id: int,
        start: int = 0,
        stop: int | None = None,
        *,
        tags: str | None = None,
        sql: str | None = None,
        incarnation: int | None = None,
    ) -> AsyncIterator[Message]:
        """See ``Tier``."""
        batches = self.tier.read_records(
            topic, queue_id, start, stop, incarnation=incarnation, batch_bytes=MESSAGE_BATCH_BYTES
        )
        async for found in self._each(Choice.of(tags, sql).lists(batches)):
            for message in found:
                yield message

    async def read_arrow(
        self,
        topic: str,
        queue_id: int,
        start: int = 0,
        stop: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        **more: Any,  # noqa: ANN401 (those of Tier.read_arrow)
    ) -> AsyncIterator[pa.RecordBatch]:
        """See ``Tier``."""
        batches = self.tier.read_arrow(topic, queue_id, start, stop, columns=columns, **more)
        async for batch in self._each(batches):
            yield batch

    async def read_records(
        self, topic: str, queue_id: int, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[TierBatch]:
        """See ``Tier``."""
        async for batch in self._each(self.tier.read_records(topic, queue_id, start, stop)):
            yield batch

    async def read_topic(
        self,
        topic: str,
        *,
        tags: str | None = None,
        sql: str | None = None,
        queues_at_once: int = 16,
    ) -> AsyncIterator[Message]:
        """See ``Tier``."""
        batches = self.tier.read_topic_records(
            topic, queues_at_once=queues_at_once, batch_bytes=MESSAGE_BATCH_BYTES
        )
        async for found in self._each(Choice.of(tags, sql).lists(batches)):
            for message in found:
                yield message

    async def read_topic_arrow(self, topic: str, **more: Any) -> AsyncIterator[pa.RecordBatch]:  # noqa: ANN401 (those of Tier.read_topic_arrow)
        """See ``Tier``."""
        async for batch in self._each(self.tier.read_topic_arrow(topic, **more)):
            yield batch

    async def follow(
        self,
        topic: str,
        queue_id: int,
        start: int | None = None,
        *,
        tags: str | None = None,
        sql: str | None = None,
        pause_s_max: float = 5.0,
    ) -> AsyncIterator[Message]:
        """See ``Tier``; cancel the task, or ``aclose`` the iterator, to end it."""
        require_positive("pause_s_max", pause_s_max)
        choice, pause_s = Choice.of(tags, sql), FOLLOW_S_MIN
        cursor = self.tier.reader.cursor(MessageQueue(topic, queue_id))
        limits = {"batch_bytes": MESSAGE_BATCH_BYTES}
        with self.tier.engine.group() as group:
            follower = Follower(self.tier.engine, cursor, start, group=group, **limits)

            def step() -> list[Message] | None:
                found = follower.step()
                return None if found is None else next(choice.lists([found]))

            seen = self._looks
            while True:
                found = await self._call(step)
                if found is not None:
                    pause_s = FOLLOW_S_MIN
                    for message in found:
                        yield message
                elif self._looks == seen and await self._look():
                    pause_s = FOLLOW_S_MIN
                else:
                    seen, news = self._looks, self._news
                    with suppress(TimeoutError):
                        await asyncio.wait_for(news.wait(), min(pause_s, pause_s_max))
                    pause_s = longer(pause_s, pause_s_max)

    async def _look(self) -> bool:
        """Look at the journal, or wait for the look that is under way; whether there was anything."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._call(self.tier.refresh))
            self._looking.add_done_callback(self._looked)
        return await asyncio.shield(self._looking)

    def _looked(self, task: asyncio.Task[bool]) -> None:
        self._looking = None
        if not task.cancelled() and task.exception() is None:
            self._looks += 1
            self._tell(is_new=task.result())

    def _tell(self, *, is_new: bool) -> bool:
        """Wake the followers that wait, if there is anything new."""
        if is_new:
            self._news.set()
            self._news = asyncio.Event()
        return is_new

    async def _each(self, iterator: Iterator[T]) -> AsyncIterator[T]:
        """Elements of an iterator, each made in a thread."""
        end = object()
        while (element := await self._call(next, iterator, end)) is not end:
            yield element

    async def _call(self, work: Callable[..., T], *arguments: object) -> T:
        if self._closing.is_set():
            raise self._closed()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closing.is_set() and task is not None and not task.cancelling():
                raise self._closed() from None  # it had no thread yet
            raise

    def _closed(self) -> ClosedError:
        return ClosedError("the tier has been closed", where=self.tier.store.url)

    async def close(self) -> None:
        """End threads and give back connections; see ``Tier``. Followers that wait end with ``ClosedError``."""
        self._closing.set()
        self._news.set()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.tier.close()
        self._pool.shutdown(cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def open_async(url: str, **more: Any) -> AsyncTier:  # noqa: ANN401 (those of open)
    """Open a tier for reading with asyncio; arguments and errors are those of ``tiered.plugin.open``."""
    return AsyncTier(await asyncio.to_thread(partial(open_tier, url, **more)))
