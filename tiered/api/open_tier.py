"""An opened tier: all that reading one takes, made when it is wanted and closed together.

Overview: one ``OpenTier`` owns the store with its meter and retries, the broker's place in it, the journal's reader, the
fetcher with its threads, the lookups by key with theirs, and the memory that these two share. The Python API (``Tier``),
message stores, the mount, and every command that reads messages stand on one. Listing starts no threads: the first ``fetch``
makes the fetcher, the first ``lookup`` the other.

Memory: the budget of the settings is the fetcher's; lookups borrow up to half of it for the filters of the key index.

Reading: ``fetch`` is the one way to messages in order, for a cursor, a start and limits. It has two implementations: the
fetcher, which reads ahead and shares what it has read; and, for who reads a folder of this machine once and in order, the
plain reader (``tiered.log.reader``), which starts no thread. What is given out is the same.

Ordering: ``close`` ends reads that wait (``ClosedError``), then requests, then threads, then connections. Batches handed out
stay valid.

Processes: a tier belongs to the process that opened it. In one that is forked off that, every read is refused at once
(``InvalidError``) and ``close`` does nothing; a tier that is opened there works.

Retries: as the store below retries, until ``close``. A crash leaves nothing: it only reads.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Self

from backends.base import FORKED, OPEN_ANEW
from backends.errors import BackendError
from fetcher.limits import MEMORY_BYTES, FetchSettings
from tiered.api.broker_place import retry_places
from tiered.api.stores import OpenStore, backend_errors
from tiered.clock import Clock, SystemClock
from tiered.errors import ClosedError, DataError, InvalidError
from tiered.log.decode import TierBatch
from tiered.log.lineage import Isolation
from tiered.log.reader import QueueReader, TierReader
from tiered.model import Closing, MessageQueue, QueueBounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from backends.base import ObjectStore
    from backends.wrapping import MeteredStore
    from fetcher.fetcher import TieredMessageFetcher
    from fetcher.transfers import Ticker
    from tiered.api.broker_place import Place
    from tiered.index.lookup import IndexReader, Lookup, Wish
    from tiered.log.cursor import QueueCursor
    from tiered.log.parts import Gap
    from tiered.log.state import TierState
    from tiered.model import QueueOffset

_FOLDER = "file:"
LOOKUP_THREADS = 8
"""Messages that one lookup by key reads at once."""


class OpenTier(Closing):
    """One broker's tier, opened. For any thread."""

    def __init__(
        self,
        store: ObjectStore,
        meter: MeteredStore,
        place: Place,
        *,
        clock: Clock | None = None,
        settings: FetchSettings | None = None,
        stop: threading.Event | None = None,
        is_sequential: bool = False,
        isolation: Isolation = Isolation.COMMITTED,
    ) -> None:
        """Start nothing yet.

        Args:
            is_sequential: Queues will be read once, one after the other, in large batches.
        """
        self.store = store  # where it lies, with retries
        self.meter = meter  # counts the requests
        self.place = place  # which broker
        self.clock = clock or SystemClock()  # for deadlines and waiting
        self.stop = stop or threading.Event()  # set by ``close``; ends the store's retries
        self.reader = TierReader(store, place.prefix, isolation)  # journal and queues
        # Reads go to the store, with nothing read ahead: it answers as fast as that could be looked up.
        self.is_direct = is_sequential and store.url.startswith(_FOLDER)
        self._settings = settings
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._made: tuple[TieredMessageFetcher, ThreadPoolExecutor, Ticker] | None = None
        self._index: tuple[IndexReader, ThreadPoolExecutor] | None = None
        self._is_closed = False
        self._lent_bytes = 0
        self._groups = count(1)

    @classmethod
    def over(
        cls,
        opened: OpenStore,
        place: Place,
        clock: Clock,
        settings: FetchSettings | None = None,
        *,
        is_sequential: bool = False,
        isolation: Isolation = Isolation.COMMITTED,
    ) -> Self:
        """A broker's tier on an opened store, which becomes the tier's own."""
        return cls(
            opened.store,
            opened.meter,
            place,
            clock=clock,
            settings=settings,
            stop=opened.stop,
            is_sequential=is_sequential,
            isolation=isolation,
        )

    # What the journal says

    @property
    def state(self) -> TierState:
        """What the journal says, as of opening or the last ``refresh``."""
        return self.reader.state

    def topics(self) -> list[str]:
        """Names of all topics, in order."""
        return sorted({queue.topic for queue in self.state.queues})

    def queues(self, topic: str | None = None) -> list[MessageQueue]:
        """The queues of a topic, or of all, in order."""
        return sorted(q for q in self.state.queues if topic in {None, q.topic})

    def bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """Queue offsets ``[min, end)`` that can be read, as of opening or the last ``refresh``."""
        cursor = self.reader.cursor(MessageQueue(topic, queue_id))
        return QueueBounds(cursor.low, cursor.end)

    def refresh(self) -> bool:
        """See what was committed since; whether there was anything."""
        self.require_same_process()
        with backend_errors():
            return self.reader.refresh()

    # Messages, in order

    @property
    def fetcher(self) -> TieredMessageFetcher:
        """The fetcher, made if there is none yet."""
        self.require_same_process()
        # Made under the lock: of two, one would be lost with its threads running.
        with self._lock:
            self._require_open()
            if self._made is None:
                self._made = self._make_fetcher()
            return self._made[0]

    @property
    def settings(self) -> FetchSettings:
        """Limits of reading."""
        if self._settings is None:
            self._settings = FetchSettings.of_memory(MEMORY_BYTES)
        return self._settings

    @property
    def is_forked(self) -> bool:
        """Whether this process is a copy of the tier's: it has neither its threads nor its connections."""
        return os.getpid() != self._pid

    def require_same_process(self) -> None:
        """Refuse to work in a process that was forked off the one that opened the tier; asked before any lock is taken."""
        if self.is_forked:
            raise InvalidError(FORKED, where=self.store.url, do=OPEN_ANEW)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the tier has been closed", where=self.store.url)

    def _make_fetcher(self) -> tuple[TieredMessageFetcher, ThreadPoolExecutor, Ticker]:
        from fetcher.fetcher import TieredMessageFetcher  # noqa: PLC0415 - who only lists does without
        from fetcher.transfers import Ticker  # noqa: PLC0415 - likewise

        settings = self.settings
        executor = ThreadPoolExecutor(settings.transfers.requests_in_flight_max, "tiered-fetch")
        fetcher = TieredMessageFetcher(self.reader, executor, self.clock, settings)
        fetcher.lend(self._lent_bytes)
        return fetcher, executor, Ticker(fetcher, self.clock)

    def fetch(
        self,
        group: str,
        cursor: QueueCursor,
        start: QueueOffset,
        *,
        bytes_max: int,
        count_max: int,
        until: QueueOffset | None = None,
    ) -> TierBatch | Gap | None:
        """The next batch from ``start`` on, the gap that it lies in, or None at the end (``TieredMessageFetcher.read``).

        Raises:
            TieredStoreError: As the fetcher; what the store says comes as a ``StoreUnavailableError``.
        """
        if self.is_direct:
            return self._fetch_directly(cursor, start, bytes_max=bytes_max, count_max=count_max)
        self.require_same_process()
        # Without the lock: once made it stays until ``close``, and a read that meets a closed fetcher is told so by that.
        made = self._made
        fetcher = self.fetcher if made is None else made[0]
        try:
            found = fetcher.read(
                group,
                cursor.queue,
                start,
                bytes_max=bytes_max,
                count_max=count_max,
                cursor=cursor,
                until=until,
            )
        except BackendError:
            with backend_errors():
                raise
        return cursor.see(found) if isinstance(found, TierBatch) else found

    def _fetch_directly(
        self, cursor: QueueCursor, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> TierBatch | Gap | None:
        self.require_same_process()
        reader = QueueReader(self.store, self.place.prefix, cursor)
        self._require_open()
        with backend_errors():
            try:
                return reader.read(start, bytes_max=bytes_max, count_max=count_max)
            except DataError:
                return reader.read_warily(start, bytes_max=bytes_max, count_max=count_max)

    def is_here(self, cursor: QueueCursor, start: QueueOffset) -> bool:
        """Whether a read there need not wait, as far as can be told."""
        made = self._made
        return made is not None and made[0].is_here(cursor, start)

    def expect(
        self, group: str, wanted: Iterable[tuple[QueueCursor, QueueOffset, QueueOffset]]
    ) -> None:
        """A group says what it will read, so that what lies side by side comes with one request, and the first of it now."""
        if not self.is_direct:
            self.fetcher.expect(group, wanted)

    def forget(self, group: str, queue: MessageQueue) -> None:
        """A reader has done with a queue."""
        made = self._made
        if made is not None:
            made[0].forget(group, queue)

    @contextmanager
    def group(self) -> Iterator[str]:
        """A group of its own for one reader, so that its read-ahead is its own.

        To leave it takes no lock: an iterator that is left alone may end in the collector, and that in any thread.
        """
        name = f"reader-{next(self._groups)}"
        try:
            yield name
        finally:
            made = self._made
            if made is not None:
                made[0].forget_soon(name)

    # Messages, by key

    def lookup(self, wish: Wish) -> Lookup:
        """Look a key up in what was seen of the journal; damage is named in what is returned."""
        self.require_same_process()
        with self._lock:
            self._require_open()
            if self._index is None:
                self._index = self._make_index()
            reader = self._index[0]
        # Without the lock: it waits for the store, and `close` must not wait for that.
        try:
            return reader.lookup(self.state, wish)
        except (RuntimeError, CancelledError):  # `close` has ended the threads meanwhile
            self._require_open()
            raise

    def _make_index(self) -> tuple[IndexReader, ThreadPoolExecutor]:
        from tiered.index.lookup import IndexReader  # noqa: PLC0415 - only lookups need it

        pool = ThreadPoolExecutor(LOOKUP_THREADS, "tiered-query")
        reader = IndexReader(
            self.store,
            self.place.prefix,
            journal=self.reader,
            filter_bytes_max=self.lendable_bytes,
            tell=self.lend,
            spread=pool.map,
        )
        return reader, pool

    @property
    def lendable_bytes(self) -> int:
        """What ``lend`` may be told at most."""
        return self.settings.cache_bytes // 2

    def lend(self, size_bytes: int) -> None:
        """So much of the memory is used by lookups from now on; reading has the rest."""
        with self._lock:
            # Kept as well: a fetcher that is made later begins with it.
            self._lent_bytes, made = size_bytes, self._made
        if made is not None:
            made[0].lend(size_bytes)

    # The end

    def close(self) -> None:
        """End reads, threads and connections. Harmless when repeated.

        Waits for requests under way, at most 10 seconds before it gives them up. In a forked process it does nothing: what
        there is to end belongs to the one that opened the tier.
        """
        if self.is_forked:
            return
        # First, so that nobody who holds a thread goes on trying; the lock only keeps one from being made meanwhile.
        self.stop.set()
        with self._lock:
            self._is_closed = True
            made, self._made = self._made, None
            index, self._index = self._index, None
        if made is not None:
            fetcher, executor, ticker = made
            # The ticker asks the fetcher, and the fetcher its threads: who asks ends first.
            ticker.close()
            fetcher.close()
            executor.shutdown(cancel_futures=True)
        if index is not None:
            index[1].shutdown(cancel_futures=True)
        self.store.close()

    def retry_logs(self) -> list[OpenTier]:
        """What mounts of the broker's tier were sent back, each as a tier of its own on the same store; close them."""
        with backend_errors():
            found = [
                OpenTier(
                    self.store,
                    self.meter,
                    place,
                    clock=self.clock,
                    settings=self._settings,
                    stop=self.stop,
                    is_sequential=True,
                )
                for place in retry_places(self.store, self.place)
            ]
        for one in found:
            one.reader.refresh()
        return found
