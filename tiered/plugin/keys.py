"""Lookups by key for ``fetcher.message_store``: in the tier, by its index."""

from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING

from fetcher.keys import KeyAnswer, KeyHit
from tiered.errors import StoreUnavailableError
from tiered.index.reader import IndexReader, Wish
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from fetcher.keys import KeyQuery
    from tiered.clock import Clock
    from tiered.index.reader import Hit, Lookup
    from tiered.log.reader import TierReader

_SPREAD_THREADS = 8
_LOOKUP_THREADS = 4


class TierKeys:
    """Looks keys up in one tier; keeps the filters of its index in memory. For any thread."""

    def __init__(self, reader: TierReader, clock: Clock) -> None:
        """Ask nothing yet.

        Args:
            reader: The tier; whoever makes it refresh, lookups see the outcome.
            clock: For deadlines.
        """
        self._reader = reader
        self._clock = clock
        self._lookups = ThreadPoolExecutor(_LOOKUP_THREADS, "tiered-query")
        self._spread = ThreadPoolExecutor(_SPREAD_THREADS, "tiered-query-messages")
        self._index = IndexReader(reader.store, reader.prefix, spread=self._spread.map)

    def find(self, wanted: KeyQuery, deadline_s: float) -> KeyAnswer:
        """See ``fetcher.keys.KeyLookup``. What is not indexed yet is scanned, up to 256 MiB.

        Raises:
            StoreUnavailableError: Not before the deadline; what was begun ends by itself.
            BackendError: The tier cannot be read.
        """
        wish = Wish(
            topic=wanted.topic,
            key=wanted.key,
            from_ms=wanted.from_ms,
            until_ms=wanted.until_ms,
            count=wanted.count,
        )
        future = self._lookups.submit(self._index.lookup, self._reader.state, wish)
        try:
            return _answer(future.result(max(deadline_s - self._clock.monotonic_s(), 0)))
        except (TimeoutError, CancelledError):
            if future.done() and not future.cancelled():
                raise
            future.cancel()
            raise StoreUnavailableError(
                "the tier did not answer before the deadline",
                where=self._reader.prefix,
                do="try again",
            ) from None

    def close(self) -> None:
        """End the threads."""
        self._lookups.shutdown(cancel_futures=True)
        self._spread.shutdown(cancel_futures=True)


def _answer(found: Lookup) -> KeyAnswer:
    return KeyAnswer(tuple(map(_hit, found.hits)), found.is_complete, tuple(found.damaged))


def _hit(hit: Hit) -> KeyHit:
    return KeyHit(hit.queue, QueueOffset(hit.queue_offset), hit.store_ms, hit.message)
