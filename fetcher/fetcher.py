"""TieredMessageFetcher: reads a tier ahead of its readers.

Overview
    A reader is a group in a queue (a *stream*). What it is given are slices of *runs*: records that came with one
    request, were checked and decoded once, and are shared by all groups. While a reader goes through a queue in order, a
    window of bytes is kept ahead of it, cut into requests that are under way at once, across the borders of parts and
    segments (``fetcher.window``, ``fetcher.claims``). A read that finds nothing here asks for it urgently, and waits.

Ordering
    ``read`` gives what follows its ``start``, whatever was read before; it is the caller's business to go on at the end
    of the batch. Two reads of one stream at once are allowed, and make its window useless.

Retries
    What fails is not asked for again by itself: the store below retries, and a slow request is hedged
    (``fetcher.hedging``). What was read ahead in vain is forgotten, and asked for again when it is wanted. An object that
    is gone makes the journal be replayed (``fetcher.views``).

Limits
    Everything cached, on its way or reserved stays within ``cache_bytes``; a read waits for room, read-ahead does
    without. Each read has a deadline. Batches that a caller holds are the caller's.

After a crash nothing is left: it holds no state of its own.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Executor
from typing import TYPE_CHECKING, cast

from backends.errors import BackendError, ObjectNotFoundError
from fetcher.careful import CarefulReader
from fetcher.loading import Loader
from fetcher.runs import Run
from fetcher.settings import FetchSettings
from fetcher.stats import FetchStats
from fetcher.stock import NOTHING, Begun, Stock, Thing, Waiting
from fetcher.streams import Stream
from fetcher.transfers import Transfers
from fetcher.views import Views
from tiered.errors import ClosedError, DataError, StoreUnavailableError
from tiered.log.parts import Gap
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from tiered.clock import Clock
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Part
    from tiered.log.reader import TierReader
    from tiered.log.view import LifeView
    from tiered.model import MessageQueue

STREAM_IDLE_SECONDS = 60.0
"""A stream that was not read for so long is forgotten; it begins again with the smallest window."""


def _sleep_on() -> None:
    """Nobody listens."""


class TieredMessageFetcher:
    """See the module's contract. For any thread."""

    def __init__(
        self,
        reader: TierReader,
        executor: Executor,
        clock: Clock,
        settings: FetchSettings | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            reader: The tier. Whoever makes it refresh, readers see the outcome.
            executor: For requests; with as many threads as may be under way at once.
            clock: For deadlines and times to live.
            settings: Limits.
        """
        self.settings = settings or FetchSettings()
        self.views = Views(reader)
        self._wake: Callable[[], None] = _sleep_on
        self.transfers = Transfers(
            reader.store, executor, clock, self.settings.transfers, wake=self._wake_up
        )
        loader = Loader(reader.store, reader.prefix, self.transfers)
        self._stock = Stock(loader, clock, self.settings, self._ahead)
        self._prefix = reader.prefix
        self._careful = CarefulReader(reader.store, reader.prefix)
        self._clock = clock
        self._streams: dict[tuple[str, MessageQueue, int | None], Stream] = {}
        self._is_closed = False
        self._delivered_bytes = self._delivered_items = 0
        self._hits = self._waits = 0

    # Reading

    def read(
        self,
        group: str,
        queue: MessageQueue,
        start: QueueOffset,
        *,
        bytes_max: int = 1 << 20,
        count_max: int = 1 << 20,
        timeout_s: float | None = None,
        incarnation: int | None = None,
    ) -> TierBatch | Gap | None:
        """The next records of a queue from ``start`` on, at least one however large it is.

        Args:
            group: Who reads; its window is its own, what is cached is everybody's.
            queue: What.
            start: First queue offset wanted; below the minimum, reading begins at the minimum.
            bytes_max: Bytes of records at most, but for the first. A batch ends where a request ended, so it may be smaller.
            count_max: Items at most (> 0).
            timeout_s: Give up after so long; default: the settings'.
            incarnation: Of an older life; default: the present one.

        Returns:
            A batch; the gap that ``start`` lies in; or None at the end.

        Raises:
            InvalidError: The tier has no such queue.
            ExpiredError: They have expired since the journal was seen.
            DataError: The bytes are damaged; nothing of them is returned.
            StoreUnavailableError: They did not come in time. The same read may be tried again.
            BackendError: They could not be read.
        """
        deadline_s = self._clock.monotonic_s() + (
            self.settings.read_timeout_s if timeout_s is None else timeout_s
        )

        def work(view: LifeView) -> TierBatch | Gap | None:
            begin = QueueOffset(max(start, view.life.min_offset))
            return self._read(group, view, begin, bytes_max, count_max, deadline_s, incarnation)

        return self.views.again(queue, incarnation, start, work)

    def _read(  # noqa: PLR0917 (one caller, in this order)
        self,
        group: str,
        view: LifeView,
        start: QueueOffset,
        bytes_max: int,
        count_max: int,
        deadline_s: float,
        incarnation: int | None,
    ) -> TierBatch | Gap | None:
        with self._stock.lock:
            stream = self._stream(group, view, incarnation)
            leaps = stream.arrive(start)
            run = stream.at_hand(start)
            self._hits += run is not None
        if leaps:
            self._stock.forsake(stream)
        if run is None:
            found = view.locate(start, where=self._prefix)
            if found is None:
                self._drop([(group, view.queue, incarnation)])
                return None
            if isinstance(found, Gap):
                with self._stock.lock:
                    stream.pass_over(start, found.end)
                return found
            wanted = min(bytes_max, count_max * (found.log.size_bytes // found.count + 1))
            try:
                run = self._fetch_warily(stream, view, found, start, wanted, deadline_s)
            except DataError:
                batch = self._careful(view, start, bytes_max, count_max)
                self._deliver(stream, batch)
                return batch
        batch = run.cut(start, bytes_max=bytes_max, count_max=count_max)
        self._deliver(stream, batch)
        return batch

    def _fetch_warily(  # noqa: PLR0917 (one caller, in this order)
        self,
        stream: Stream,
        view: LifeView,
        part: Part,
        start: QueueOffset,
        bytes_max: int,
        deadline_s: float,
    ) -> Run:
        """The run that holds ``start``; where something of the part is damaged, with no more than its block."""
        if start not in stream.wary:
            share = self.settings.cache_bytes // (2 * max(len(self._streams), 1))
            least = min(bytes_max, self.settings.piece_bytes, share)
            try:
                window = max(self._window(stream), least)
                return self._fetch(stream, view, part, start, window, deadline_s)
            except DataError:
                with self._stock.lock:
                    stream.wary = range(part.queue_offset, part.queue_end)
        return self._fetch(stream, view, part, start, 1, deadline_s)

    def _deliver(self, stream: Stream, batch: TierBatch) -> None:
        now_s = self._clock.monotonic_s()
        with self._stock.lock:
            stream.deliver(batch, now_s)
            if (entry := stream.entry) is not None:
                self._stock.cache.use(entry, now_s)
            self._delivered_bytes += memoryview(batch.records.data).nbytes
            self._delivered_items += batch.records.count
            begun = self._ahead(stream)
        self._stock.begin(begun)

    def _fetch(  # noqa: PLR0917 (one caller, in this order)
        self,
        stream: Stream,
        view: LifeView,
        part: Part,
        start: QueueOffset,
        window: int,
        deadline_s: float,
    ) -> Run:
        """The run that holds ``start``, asked for if it is not here, with so many bytes behind it."""
        waiting = Waiting()
        try:
            while True:
                run = self._try(waiting, stream, view, part, start, window, deadline_s)
                if run is not None:
                    return run
        finally:
            if waiting.has_queued:
                with self._stock.lock:
                    self._stock.step_out(waiting)

    def _try(  # noqa: PLR0917 (one caller)
        self,
        waiting: Waiting,
        stream: Stream,
        view: LifeView,
        part: Part,
        start: QueueOffset,
        window: int,
        deadline_s: float,
    ) -> Run | None:
        """Take what is here; else wait for what has to come, for room, or for what brings us nearer (None)."""
        stock, begun = self._stock, NOTHING
        with stock.lock:
            if self._is_closed:
                raise ClosedError("the fetcher has been closed")
            entry = stock.find(part, start)
            if entry is not None:
                self._waits += waiting.has_waited
                self._hits += not waiting.has_waited
                return stream.serve(cast("Run", entry.value), entry)
            waiting.has_waited = True
            load = stock.on_its_way(part, start)
            is_ahead = load is not None and not load.is_urgent
            if load is None:
                begun = stock.claim_urgently(waiting, stream, view, start, window)
                if not begun:
                    self._await_room(deadline_s)
                    return None
                load = begun[0][1]
            if waiting.has_queued:
                stock.step_out(waiting)
        stock.begin(begun)
        stock.hurry(load)
        try:
            thing = self._await(load.future, deadline_s)
        except (BackendError, StoreUnavailableError) as error:
            if isinstance(error, ObjectNotFoundError) or not (is_ahead and waiting.may_fail):
                raise
            waiting.may_fail = False  # it was read ahead: who wants it asks for it again, once
            return None
        if not isinstance(thing, Run) or not thing.base <= start < thing.end:
            return None
        with stock.lock:
            self._waits += 1
            return stream.serve(thing, stock.find(part, start))

    def _await(self, future: Future[Thing], deadline_s: float) -> Thing | None:
        try:
            return future.result(max(deadline_s - self._clock.monotonic_s(), 0))
        except CancelledError:
            return None  # somebody forsook it: it is asked for again
        except TimeoutError:
            if not future.done():
                raise self._late() from None
            return None if future.cancelled() else future.result()  # it came at that very moment

    def _await_room(self, deadline_s: float) -> None:
        left_s = deadline_s - self._clock.monotonic_s()
        if left_s <= 0 or not self._stock.room.wait(left_s):
            raise self._late()

    def _late(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            "the tier did not answer before the read's deadline",
            where=self._prefix,
            do="try again, or look at the store with `tiered doctor`",
        )

    # Reading ahead

    def _stream(self, group: str, view: LifeView, incarnation: int | None) -> Stream:
        key = group, view.queue, incarnation
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = Stream(group, view.queue, self.settings.window)
            stream.used_s = self._clock.monotonic_s()
        stream.look(view)
        return stream

    def _window(self, stream: Stream) -> int:
        """How far to read ahead: the stream's own window, but no more than its share of half the cache."""
        share = self.settings.cache_bytes // (2 * max(len(self._streams), 1))
        return max(min(stream.window, share), 1)

    def _ahead(self, stream: Stream) -> Begun:
        """What to read ahead for a stream now; with the lock held."""
        view, window = stream.view, self._window(stream)
        if view is None or self._is_closed or stream.next_offset < 0:
            return []
        if stream.next_offset in stream.wary or stream.paused_s > self._clock.monotonic_s():
            return []
        if stream.asked >= view.life.log_end or not stream.wants_more(window):
            return []
        return self._stock.claim(stream, view, QueueOffset(stream.next_offset), window)

    def forget(self, group: str) -> None:
        """A reader has done: what was read ahead for it makes room, and the others may read further ahead.

        Readers that have come to the end of their queue, or have not read for a minute, are forgotten by themselves.
        """
        with self._stock.lock:
            keys = [key for key in self._streams if key[0] == group]
        self._drop(keys)

    def _drop(self, keys: list[tuple[str, MessageQueue, int | None]]) -> None:
        with self._stock.lock:
            streams = [stream for key in keys if (stream := self._streams.pop(key, None))]
        for stream in streams:
            self._stock.forsake(stream)

    # Upkeep

    def refresh(self) -> bool:
        """See what was committed since; whether there was anything."""
        return self.views.refresh()

    def listen(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when ``tick`` ought to be called sooner than it said."""
        self._wake = wake

    def _wake_up(self) -> None:
        self._wake()

    def tick(self) -> float | None:
        """Do what is due: expiry, hedges, deadlines, traffic limits. Called by a ``Ticker``; never blocks.

        Returns:
            In how many seconds it wants to be called again; None: not before the next read.
        """
        now_s = self._clock.monotonic_s()
        with self._stock.lock:
            self._stock.expire(now_s)
            for key, stream in list(self._streams.items()):
                if stream.used_s + STREAM_IDLE_SECONDS < now_s:
                    del self._streams[key]
            is_idle = not self._streams and not self._stock.cache.held_bytes
        due_s = self.transfers.tick()
        return due_s if is_idle else min(1.0 if due_s is None else due_s, 1.0)

    def stats(self) -> FetchStats:
        """A snapshot."""
        with self._stock.lock:
            return FetchStats(
                delivered_bytes=self._delivered_bytes,
                delivered_items=self._delivered_items,
                hits=self._hits,
                waits=self._waits,
                unread_bytes=self._stock.unread_bytes,
                cached_bytes=self._stock.cache.held_bytes,
                reserved_bytes=self._stock.cache.reserved_bytes,
                streams=len(self._streams),
            )

    def close(self) -> None:
        """Refuse new reads, and forget everything. Batches that were handed out stay valid."""
        with self._stock.lock:
            self._is_closed = True
            self._stock.room.notify_all()
        self.transfers.close()
        with self._stock.lock:
            self._stock.cache.clear()
            self._streams.clear()
