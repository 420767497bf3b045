"""The fetcher of an opened tier, with its threads: made by the first read, closed with the tier.

Overview: one ``Engine`` for each ``Tier``. Listing and looking up start no threads; the first ``fetch`` makes a fetcher, an
executor for its requests and the thread that ticks it. What was read is cached for all iterators of the tier.

Ordering: ``close`` ends reads that wait (``ClosedError``), then requests, then threads. Batches handed out stay valid.

Retries: as the store below retries. A crash leaves nothing: it only reads.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from backends.errors import BackendError
from fetcher.fetcher import TieredMessageFetcher
from fetcher.ticker import Ticker
from tiered.api.stores import backend_errors
from tiered.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fetcher.settings import FetchSettings
    from tiered.clock import Clock
    from tiered.log.cursor import QueueCursor
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Gap
    from tiered.log.reader import TierReader
    from tiered.model import MessageQueue, QueueOffset


class Engine:
    """See the module's contract. For any thread."""

    def __init__(self, reader: TierReader, clock: Clock, settings: FetchSettings) -> None:
        """Start nothing yet.

        Args:
            reader: The tier.
            clock: For deadlines and waiting.
            settings: Limits of the fetcher.
        """
        self.clock = clock
        self._reader = reader
        self._settings = settings
        self._lock = threading.Lock()
        self._made: tuple[TieredMessageFetcher, ThreadPoolExecutor, Ticker] | None = None
        self._is_closed = False
        self._lent_bytes = 0
        self._groups = count(1)

    @property
    def fetcher(self) -> TieredMessageFetcher:
        """The fetcher, made if there is none yet.

        Raises:
            ClosedError: After ``close``.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the tier has been closed", where=self._reader.store.url)
            if self._made is None:
                self._made = self._make()
            return self._made[0]

    def _make(self) -> tuple[TieredMessageFetcher, ThreadPoolExecutor, Ticker]:
        threads = self._settings.transfers.requests_in_flight_max
        executor = ThreadPoolExecutor(threads, "tiered-fetch")
        fetcher = TieredMessageFetcher(self._reader, executor, self.clock, self._settings)
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
        """See ``TieredMessageFetcher.read``; what the store says comes as an error of ours."""
        made = self._made
        fetcher = self.fetcher if made is None else made[0]
        try:
            return fetcher.read(
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

    def expect(
        self, group: str, wanted: Iterable[tuple[QueueCursor, QueueOffset, QueueOffset]]
    ) -> None:
        """See ``TieredMessageFetcher.expect``."""
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

    def refresh(self) -> bool:
        """See what was committed since; whether there was anything."""
        with backend_errors():
            return self._reader.refresh()

    @property
    def lendable_bytes(self) -> int:
        """What ``lend`` may be told at most."""
        return self._settings.cache_bytes // 2

    def lend(self, size_bytes: int) -> None:
        """So much of the memory is used by lookups from now on; reading has the rest."""
        with self._lock:
            self._lent_bytes, made = size_bytes, self._made
        if made is not None:
            made[0].lend(size_bytes)

    def close(self) -> None:
        """End reads and threads; waits for requests under way, at most 10 seconds before it gives them up."""
        with self._lock:
            self._is_closed = True
            made, self._made = self._made, None
        if made is not None:
            fetcher, executor, ticker = made
            ticker.close()
            fetcher.close()
            executor.shutdown(cancel_futures=True)
