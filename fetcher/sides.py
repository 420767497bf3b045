"""The two sides of a message store, as ``fetcher.message_store`` asks them.

Deadlines: what goes over the wire ends with a ``StoreUnavailableError`` when its time is over; reads of the local disk
are not interrupted. For any thread.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import numpy as np

from fetcher.asking import AskingStore
from tiered.errors import InvalidError, StoreUnavailableError
from tiered.log.by_time import StoreRanges, find_by_time
from tiered.log.marks import mark_of_item
from tiered.model import Boundary, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from fetcher.fetcher import TieredMessageFetcher
    from tiered.clock import Clock
    from tiered.local.face import LocalStore, RecordBatch
    from tiered.log.cursor import Place
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Gap
    from tiered.log.reader import TierReader
    from tiered.log.view import LifeView
    from tiered.model import MessageQueue

_NEAR_ITEMS = 256
"""How many items before a time are looked at for a message, at once."""
_NEAR_BYTES = 1 << 20


class LocalSide:
    """The broker's own store."""

    def __init__(
        self,
        store: LocalStore,
        *,
        bounds: Callable[[MessageQueue], QueueBounds | None] | None = None,
        is_in_memory: Callable[[MessageQueue, int, int], bool] | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            store: Whose owner closes it.
            bounds: Of one queue, if the store can tell that without listing all.
            is_in_memory: Whether reading so many messages from a queue offset on needs no disk; without it everything is
                taken to be in memory, and ``NOT_IN_MEM`` is ``NOT_IN_DISK``.
        """
        self._store = store
        self._bounds = bounds
        self._is_in_memory = is_in_memory

    def bounds(self, queue: MessageQueue) -> QueueBounds | None:
        """As last seen; None: no such queue."""
        return self._bounds(queue) if self._bounds else self._store.queues().get(queue)

    def refresh(self) -> None:
        """Look at the store anew."""
        self._store.refresh()

    def is_in_memory(self, queue: MessageQueue, start: int, count: int) -> bool:
        """Whether reading ``count`` messages from ``start`` on needs no disk, as far as can be told."""
        try:
            return self._is_in_memory is None or self._is_in_memory(queue, start, count)
        except InvalidError:  # its disk fails
            return False

    def read(
        self, queue: MessageQueue, start: QueueOffset, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        """See ``LocalStore.read``."""
        return self._store.read(queue, start, bytes_max=bytes_max, count_max=count_max)

    def mark(self, queue: MessageQueue, offset: QueueOffset) -> int:
        """Mark of a message; 0: it is not there."""
        batch = self.read(queue, offset, 1, 1)
        if batch is None or batch.base_offset != offset:
            return 0
        return mark_of_item(batch, 0)

    def first_message(self, queue: MessageQueue) -> tuple[QueueOffset, int] | None:
        """Queue offset and store time of the first message; None: there is none."""
        bounds = self.bounds(queue)
        at = bounds.min if bounds is not None else 0
        while bounds is not None and at < bounds.end:
            batch = self.read(queue, QueueOffset(at), 1, _NEAR_ITEMS if at > bounds.min else 1)
            if batch is None:
                return None
            real = np.flatnonzero(batch.sizes > 0)
            if len(real):
                first = int(real[0])
                return QueueOffset(batch.base_offset + first), int(batch.store_timestamps_ms[first])
            at = batch.end_offset
        return None

    def offset_by_time(
        self, queue: MessageQueue, time_ms: int, boundary: Boundary
    ) -> tuple[QueueOffset, bool]:
        """A queue offset by store time, and whether there is a message that it means.

        Times are taken to be in order, as a broker's own search takes them.
        """
        if boundary is Boundary.LOWER:
            found, bounds = self._store.offset_by_time(queue, time_ms), self.bounds(queue)
            return found, bounds is not None and found < bounds.end
        after, bounds = self._store.offset_by_time(queue, time_ms + 1), self.bounds(queue)
        low, at, count = 0 if bounds is None else bounds.min, after, 1
        while at > low:  # there are holes before it
            start = max(at - count, low)
            last = self._last_message(queue, start, at)
            if last is not None:
                return last, True
            at, count = QueueOffset(start), min(2 * count, _NEAR_ITEMS)
        return QueueOffset(low), False

    def _last_message(self, queue: MessageQueue, start: int, end: int) -> QueueOffset | None:
        """The last message in queue offsets ``[start, end)``."""
        last = None
        while start < end:
            batch = self.read(queue, QueueOffset(start), _NEAR_BYTES, end - start)
            if batch is None:
                break
            real = np.flatnonzero(batch.sizes > 0) + batch.base_offset
            real = real[real < end]
            last = QueueOffset(int(real[-1])) if len(real) else last
            start = batch.end_offset
        return last


class TierSide:
    """The tier."""

    def __init__(
        self,
        reader: TierReader,
        fetcher: TieredMessageFetcher,
        executor: Executor,
        clock: Clock,
    ) -> None:
        """Ask nothing yet.

        Args:
            reader: The one that the fetcher has.
            fetcher: Reads messages.
            executor: Looks at the journal; one thread is enough, and it must not be the fetcher's.
            clock: For deadlines.
        """
        self._reader = reader
        self._store, self._prefix = reader.store, reader.prefix
        self._fetcher = fetcher
        self._executor = executor
        self._clock = clock

    def view(self, queue: MessageQueue) -> LifeView | None:
        """The present life of a queue, as last seen."""
        return self._reader.present(queue)

    def bounds(self, queue: MessageQueue) -> QueueBounds | None:
        """As last seen; None: no such queue."""
        life = self._reader.state.life(queue)
        return None if life is None else QueueBounds(life.min_offset, life.commit_offset)

    def last_mark(self, queue: MessageQueue, low: int, end: int) -> tuple[QueueOffset, int] | None:
        """The last message of ``[low, end)`` of which the journal has a mark, and the mark."""
        view = self.view(queue)
        for part in reversed(view.parts if view is not None else []):
            at = QueueOffset(part.queue_end - 1)
            if low <= at < end and part.last:
                return at, part.last
        return None

    def refresh(self, deadline_s: float) -> None:
        """See what is new in the journal.

        Raises:
            StoreUnavailableError: Not before the deadline.
            BackendError: It cannot be read.
        """
        self._await(self._executor.submit(self._fetcher.refresh), deadline_s)

    def read(  # noqa: PLR0917 (one caller)
        self,
        group: str,
        queue: MessageQueue,
        start: QueueOffset,
        bytes_max: int,
        count_max: int,
        deadline_s: float,
    ) -> TierBatch | Gap | None:
        """See ``TieredMessageFetcher.read``."""
        timeout_s = max(deadline_s - self._clock.monotonic_s(), 1e-3)
        return self._fetcher.read(
            group, queue, start, bytes_max=bytes_max, count_max=count_max, timeout_s=timeout_s
        )

    def offset_by_time(
        self,
        queue: MessageQueue,
        time_ms: int,
        boundary: Boundary,
        high: int,
        deadline_s: float,
    ) -> QueueOffset:
        """A queue offset by store time among messages below ``high``; that if all there are earlier.

        Raises:
            StoreUnavailableError: Not before the deadline.
            DataError: What has to be read is damaged.
            BackendError: It cannot be read.
        """

        def find(place: Place) -> QueueOffset | None:
            name = ("offset by time", queue)
            asking = AskingStore(
                self._fetcher.transfers, self._store, name, self._clock, deadline_s
            )
            ranges = StoreRanges(asking, self._prefix)
            low, end = place.start, min(place.end, high)
            view, where = place.view, self._prefix
            return find_by_time(view, ranges, time_ms, boundary, low=low, high=end, where=where)

        found = self._reader.cursor(queue).by_time(find, boundary)
        return QueueOffset(min(found, high))

    def first_time_ms(self, queue: MessageQueue, high: int) -> int | None:
        """Smallest store time of the first part that has messages below ``high``; None: there are none. No request."""
        view = self.view(queue)
        if view is None:
            return None
        for part in view.parts_from(view.life.min_offset):
            if part.store_min_ms >= 0 and part.queue_offset < high:
                return part.store_min_ms
        return None

    def _await(self, future: Future[bool], deadline_s: float) -> None:
        try:
            future.result(max(deadline_s - self._clock.monotonic_s(), 0))
        except (TimeoutError, CancelledError):
            if future.done() and not future.cancelled():
                future.result()  # it came at that very moment
                return
            future.cancel()
            raise StoreUnavailableError(
                "the tier did not answer before the deadline", where=self._prefix, do="try again"
            ) from None
