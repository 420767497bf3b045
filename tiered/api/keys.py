"""Lookups by key for ``fetcher.message_store``: in the tier by its index, in the broker's store by looking at what is fresh.

The broker's own index files are not read. What the tier has is found there; what it does not have yet is looked at message
by message, newest first, up to a limit.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from fetcher.statuses import KeyAnswer, KeyHit, merge_answers
from tiered.errors import StoreUnavailableError
from tiered.format.message import split_batch
from tiered.format.record import decode_record
from tiered.format.sysflag import INNER_BATCH
from tiered.index.lookup import Wish, has_key
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fetcher.statuses import KeyQuery
    from tiered.clock import Clock
    from tiered.index.lookup import Hit, Lookup
    from tiered.local.face import LocalStore, RecordBatch
    from tiered.model import MessageQueue

_LOOKUP_THREADS = 4
LOCAL_SCAN_BYTES_MAX = 64 * 1024 * 1024
"""How much of what is not tiered yet one lookup looks at."""
_LOCAL_STEP_ITEMS = 4096
_LOCAL_STEP_BYTES = 4 * 1024 * 1024


class TierKeys:
    """Looks keys up in one tier, each until its deadline. For any thread."""

    def __init__(self, lookup: Callable[[Wish], Lookup], clock: Clock, where: str) -> None:
        """Ask nothing yet.

        Args:
            lookup: Looks in the tier (``OpenTier.lookup``).
            clock: For deadlines.
            where: The tier, for messages.
        """
        self._lookup = lookup
        self._clock = clock
        self._where = where
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, "tiered-lookup")

    def find(
        self,
        wanted: KeyQuery,
        deadline_s: float,
        tier_end: Callable[[MessageQueue], int],
    ) -> KeyAnswer:
        """See ``fetcher.statuses.KeyLookup``. What is not indexed yet is scanned, up to 256 MiB.

        Raises:
            StoreUnavailableError: Not before the deadline; what was begun ends by itself.
            BackendError: The tier cannot be read.
        """
        del tier_end
        wish = Wish(
            topic=wanted.topic,
            key=wanted.key,
            from_ms=wanted.from_ms,
            until_ms=wanted.until_ms,
            count=wanted.count,
        )
        future = self._threads.submit(self._lookup, wish)
        try:
            return _answer(future.result(max(deadline_s - self._clock.monotonic_s(), 0)))
        except (TimeoutError, CancelledError):
            if future.done() and not future.cancelled():
                raise
            future.cancel()
            raise StoreUnavailableError(
                "the tier did not answer before the deadline",
                where=self._where,
                do="try again",
            ) from None

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)


class LocalKeys:
    """Looks keys up in what of a broker's store is not in the tier yet. For any thread; nothing is kept."""

    def __init__(
        self, store: LocalStore, clock: Clock, *, scan_bytes_max: int = LOCAL_SCAN_BYTES_MAX
    ) -> None:
        """Ask nothing yet.

        Args:
            store: The broker's.
            clock: For deadlines.
            scan_bytes_max: How much one lookup reads, about; behind that the answer is not complete.
        """
        self._store = store
        self._clock = clock
        self._scan_bytes_max = scan_bytes_max

    def find(
        self,
        wanted: KeyQuery,
        deadline_s: float,
        tier_end: Callable[[MessageQueue], int],
    ) -> KeyAnswer:
        """See ``fetcher.statuses.KeyLookup``."""
        hits: list[KeyHit] = []
        left = self._scan_bytes_max
        is_complete = True
        for queue, bounds in self._store.queues().items():
            if queue.topic != wanted.topic:
                continue
            low, at = max(bounds.min, tier_end(queue)), int(bounds.end)
            while at > low:
                if left <= 0 or self._clock.monotonic_s() >= deadline_s:
                    is_complete = False
                    break
                start = max(at - _LOCAL_STEP_ITEMS, low)
                found, size_bytes = self._look_at(queue, start, at, wanted)
                hits += found
                left -= size_bytes
                at = start
        return merge_answers([KeyAnswer(tuple(hits), is_complete)], wanted.count)

    def _look_at(
        self, queue: MessageQueue, start: int, end: int, wanted: KeyQuery
    ) -> tuple[list[KeyHit], int]:
        """Messages of ``[start, end)`` that have the key, and how many bytes were looked at."""
        hits: list[KeyHit] = []
        size_bytes = 0
        while start < end:
            batch = self._store.read(
                queue, QueueOffset(start), bytes_max=_LOCAL_STEP_BYTES, count_max=end - start
            )
            if batch is None:
                break
            size_bytes += memoryview(batch.data).nbytes
            hits += [hit for hit in _hits_in(batch, wanted) if start <= hit.queue_offset < end]
            start = batch.end_offset
        return hits, size_bytes


def _hits_in(batch: RecordBatch, wanted: KeyQuery) -> Iterator[KeyHit]:
    times = batch.store_timestamps_ms
    timed = (batch.sizes > 0) & (times >= wanted.from_ms) & (times < wanted.until_ms)
    view, key = memoryview(batch.data).cast("B"), wanted.key.encode("utf-8", "surrogatepass")
    for position in np.unique(batch.positions[timed]).tolist():
        stored = decode_record(view, position, check_crc=False)  # checked on reading
        if not stored.sys_flag & INNER_BATCH and key not in stored.properties_raw:
            continue
        for message in split_batch(stored):
            if has_key(message, wanted.key):
                offset = QueueOffset(message.queue_offset)
                yield KeyHit(batch.queue, offset, message.store_timestamp_ms, message)


def _answer(found: Lookup) -> KeyAnswer:
    return KeyAnswer(tuple(map(_hit, found.hits)), found.is_complete, tuple(found.damaged))


def _hit(hit: Hit) -> KeyHit:
    return KeyHit(hit.queue, QueueOffset(hit.queue_offset), hit.store_ms, hit.message)
