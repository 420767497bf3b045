"""A broker's store directory and its tier, opened for reading as one ``TieredMessageStore``, with the threads that takes.

Overview: ``open_message_store`` wires ``fetcher.message_store`` to a store directory (or none) and a tier. A thread ticks
the fetcher; another looks at the journal and at the store every few seconds.

Retries and errors: opening needs the tier, since nobody else knows what it has; later it may come and go. Requests of reads
are retried by the store below within the read's deadline. A look that fails is logged once for each row of failures.

``close`` ends reads that wait, then requests, then threads. A crash leaves nothing: it only reads.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.s3_settings import S3Options
from fetcher.limits import MEMORY_BYTES, FetchSettings
from fetcher.message_store import LocalSide, MessageStoreSettings, TieredMessageStore, TierSide
from fetcher.statuses import Both, KeyAnswer, KeyHit, merge_answers
from fetcher.transfers import run_by
from tiered.api.broker_place import (
    choose_place,
    require_rocketmq,
    require_same_store,
    store_document,
)
from tiered.api.open_tier import OpenTier
from tiered.api.stores import backend_errors, open_for_reading
from tiered.clock import Clock, SystemClock
from tiered.errors import InvalidError, TieredStoreError
from tiered.format.block import distinct
from tiered.format.message_forms import split_batch
from tiered.format.record import decode_record
from tiered.format.sysflag import INNER_BATCH
from tiered.index.lookup import Hit, Wish, has_key
from tiered.local.mapped_file_queue import open_read_only
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.log.broker_tables import read_handover
from tiered.model import Closing, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from backends.base import ObjectStore
    from fetcher.message_store import LocalMessages
    from fetcher.statuses import KeyQuery, Policy
    from tiered.api.broker_place import Place
    from tiered.index.lookup import Lookup
    from tiered.local.consumequeues import Entries
    from tiered.local.interface import RecordBatch
    from tiered.local.views import View
    from tiered.log.broker_tables import Handover
    from tiered.model import MessageQueue, QueueBounds

# -- what is in memory ---------------------------------------------------------------------------
#
# Whether records of a foreign store directory are in memory: asked of the page cache, page by page.
#
# A broker maps its log, so what it (or anybody) has read or written lately is in the page cache, for as long as the system
# wants. A page is in memory if one byte of it can be read with ``RWF_NOWAIT``, that is without waiting for the disk.
# Nothing is mapped or locked (``mincore`` tells the truth only to a file's owner). Not free of traces: for a page that is
# not there the system may begin to read that one page; read-ahead is switched off for the descriptor.
#
# Where the file system cannot tell (tmpfs, some network file systems), records count as in memory: then they are read from
# the local store. For any thread; nothing is kept.

ITEMS_MAX: Final = 1024
"""Of how many records at most the first and the last and some between are looked at."""
SAMPLES: Final = 16
_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)


class Residency:
    """What a reader with a policy wants to know of single queues of a store, beside ``LocalStore``."""

    def __init__(
        self,
        view: Callable[[], View],
        is_cached: Callable[[str, Iterable[int]], bool] | None = None,
    ) -> None:
        """Ask nothing yet; ``view`` gives the one that holds now (``RocketMQStore.current_view``)."""
        self._view = view
        self._is_cached = is_cached or is_cached_in_file

    def bounds(self, queue: MessageQueue) -> QueueBounds | None:
        """Bounds of one queue, as ``LocalStore.queues`` has them, without a look at the others."""
        state = self._view().catalog.states.get(queue)
        if state is None or not (state.end or state.index.row.bases):
            return None
        return state.bounds

    def is_in_memory(self, queue: MessageQueue, start: int, count: int) -> bool:
        """Whether the records of ``count`` messages from ``start`` on are in memory, by some of their pages."""
        view = self._view()
        state = view.catalog.states.get(queue)
        end = 0 if state is None else min(start + min(count, ITEMS_MAX), state.end)
        if state is None or start >= end:
            return True
        by_file: dict[str, list[int]] = {}
        for place in plan_samples(state.index.entries(start, end)):
            base = view.log.base_of(place)
            if base is not None:
                by_file.setdefault(view.log.path(base), []).append(place - base)
        return all(self._is_cached(path, within) for path, within in by_file.items())


def plan_samples(entries: Entries) -> list[int]:
    """Physical offsets to look at: where the first and the last record and some between begin, and the last byte."""
    written = np.flatnonzero(entries.is_written)
    if not len(written):
        return []
    chosen = written[distinct(np.linspace(0, len(written) - 1, SAMPLES).astype(np.int64))]
    last = int(entries.physical_offsets[chosen[-1]]) + int(entries.sizes[chosen[-1]]) - 1
    return [*entries.physical_offsets[chosen].tolist(), last]


def is_cached_in_file(path: str, offsets: Iterable[int]) -> bool:
    """Whether the pages that hold these bytes of a file are in the page cache; True where nobody can tell."""
    if not _NOWAIT:
        return True
    try:
        descriptor = open_read_only(path)
    except (OSError, InvalidError):
        return True  # it is gone, or may not be read: reading will tell
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for offset in offsets:
            os.preadv(descriptor, [bytearray(1)], offset, _NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True  # not supported here
    finally:
        os.close(descriptor)
    return True


# -- the message store ------------------------------------------------------------------------------

_LOG = logging.getLogger("tiered.read")
REFRESH_SECONDS = 5.0
"""How often the journal and the store are looked at, unless told otherwise."""


class OpenMessageStore(Closing, TieredMessageStore):
    """A ``TieredMessageStore`` that owns its sides. Use it in a ``with`` statement, or ``close`` it."""

    opened: OpenTier
    _upkeep: _Upkeep
    _closing: ExitStack
    _beside: Callable[[MessageQueue], QueueBounds | None] | None = None

    def tiered_queues(self) -> Iterable[MessageQueue]:
        """The queues that the tier has, as last seen."""
        return self.opened.state.queues

    def put_beside(
        self, local: LocalMessages, bounds: Callable[[MessageQueue], QueueBounds | None]
    ) -> None:
        """Read these from now on with the tier, in the place of a broker's store. Before anything is read.

        They go on where the tier's queues end. What the tier has of these queues behind that, since a broker still feeds
        it, is another history: it is not shown.
        """
        self.local, self._beside = LocalSide(local, bounds=bounds), bounds
        self._local_keys = LocalKeys(local, self._clock).find

    def is_tiers_alone(self, queue: MessageQueue) -> bool:
        """Whether nothing of a queue was put beside the tier."""
        return self._beside is None or self._beside(queue) is None

    def look(
        self, queue: MessageQueue, policy: Policy | None = None, *, is_held: bool = False
    ) -> Both:
        """As of ``TieredMessageStore``; of what was put beside the tier nothing has to be held against it."""
        own = self._beside(queue) if self._beside is not None else None
        if own is None:
            return super().look(queue, policy, is_held=is_held)
        assert self.tier is not None
        policy = self.settings.policy if policy is None else policy
        return Both.of(policy, own, self.tier.bounds(queue), is_one=False)

    def handover(self) -> Handover | None:
        """What the broker knew when it was decommissioned; None: it was not."""
        opened = self.opened
        return read_handover(opened.store, opened.place.prefix, opened.state.store)

    @property
    def trouble(self) -> str:
        """Why what is new could not be looked for the last time; empty when it could."""
        return self._upkeep.trouble

    def close(self) -> None:
        """Give back threads, files and connections. Harmless when repeated; in a forked process it does nothing."""
        if self.opened.is_forked:
            return
        self._closing.close()


def open_message_store(
    directory: str | os.PathLike[str] | None,
    url: str,
    *,
    policy: Policy | None = None,
    cluster: str | None = None,
    broker: str | None = None,
    options: S3Options | None = None,
    settings: MessageStoreSettings | None = None,
    fetch: FetchSettings | None = None,
    refresh_s: float = REFRESH_SECONDS,
    clock: Clock | None = None,
) -> OpenMessageStore:
    """Open a broker's store directory and its tier as one.

    Args:
        directory: The broker's ``storePathRootDir``, only read; None: there is none on this machine.
        policy: When the tier is read; default: as ``settings`` say, else ``NOT_IN_DISK``. A request may name another.
        cluster: Name of the cluster; needed only when several brokers have their data there.
        refresh_s: How often journal and store are looked at.

    Raises:
        InvalidError: No such tier, or several; no store directory, or that of another broker.
        StoreUnavailableError: The tier cannot be reached or refuses us.
    """
    clock, fetch = clock or SystemClock(), fetch or FetchSettings.of_memory(MEMORY_BYTES)
    settings = settings or MessageStoreSettings()
    if policy is not None:
        settings = replace(settings, policy=policy)
    with ExitStack() as opened:
        local = None
        if directory is not None:
            names = RocketMQOptions(cluster=cluster, broker=broker)
            local = RocketMQStore.open(directory, clock=clock, options=names)
            opened.callback(local.close)
            local.refresh()
        objects = open_for_reading(url, options or S3Options(), clock)
        opened.callback(objects.close)
        place = _choose_place(objects.store, local, cluster, broker)
        tier = OpenTier.over(objects, place, clock, fetch)
        opened.callback(tier.close)
        tier.refresh()
        require_rocketmq(
            tier.state.store.get("kind"),
            "clients and message stores of RocketMQ need a tier of a RocketMQ broker",
            tier.reader.where,
            "read it with `tiered cat`, the Python API, an archive or Spark",
        )
        if local is not None:
            mine = store_document(local.identity, place)
            require_same_store(tier.state.store, mine, tier.reader.where)
        journal = ThreadPoolExecutor(1, "tiered-journal")
        opened.callback(journal.shutdown, cancel_futures=True)
        keys = TierKeys(tier.lookup, clock, tier.reader.where)
        opened.callback(keys.close)
        found = OpenMessageStore(
            _local_side(local),
            TierSide(tier.reader, tier.fetcher, journal, clock),
            clock,
            settings,
            local_keys=LocalKeys(local, clock).find if local is not None else None,
            tier_keys=keys.find,
        )
        upkeep = _Upkeep(tier, local, clock, refresh_s)
        opened.callback(upkeep.close)
        found.opened, found._upkeep = tier, upkeep  # noqa: SLF001 (ours)
        found._closing = opened.pop_all()  # noqa: SLF001 (ours)
        return found


def _choose_place(
    store: ObjectStore, local: RocketMQStore | None, cluster: str | None, broker: str | None
) -> Place:
    """Where the tier of this broker lies."""
    if local is not None:
        cluster, broker = cluster or local.identity.cluster, broker or local.identity.broker
    with backend_errors():
        return choose_place(store, cluster, broker)


def _local_side(local: RocketMQStore | None) -> LocalSide | None:
    if local is None:
        return None
    residency = Residency(local.current_view)
    return LocalSide(local, bounds=residency.bounds, is_in_memory=residency.is_in_memory)


class _Upkeep:
    """Looks at the journal and at the store now and then, in a thread of its own."""

    def __init__(
        self, tier: OpenTier, local: RocketMQStore | None, clock: Clock, seconds: float
    ) -> None:
        self._tier = tier
        self._local = local
        self._clock = clock
        self._stop = tier.stop
        self._seconds = seconds
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, name="tiered-refresh", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._clock.wait(self._stop, self._seconds):
            # Each for itself: where one side is ill, what is new on the other is wanted all the more.
            local = "" if self._local is None else self._look(self._local.refresh)
            self.trouble = self._look(self._tier.refresh) or local

    def _look(self, refresh: Callable[[], object]) -> str:
        """Look at one side; why it could not be done, or nothing."""
        try:
            refresh()
        except TieredStoreError as error:
            # Once for each trouble, not for each look; and what `close` has cut short is none.
            if not self.trouble and not self._stop.is_set():
                _LOG.warning("could not look for what is new, trying again: %s", error)
            return str(error)
        return ""

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


# -- keys ------------------------------------------------------------------------------------------
#
# Lookups by key for ``fetcher.message_store``. The broker's own index files are not read: what the tier has is found by its
# index; what it does not have yet is looked at message by message, newest first, up to a limit.


_LOOKUP_THREADS = 4
LOCAL_SCAN_BYTES_MAX = 64 * 1024 * 1024
"""How much of what is not tiered yet one lookup looks at."""
_LOCAL_STEP_ITEMS = 4096
_LOCAL_STEP_BYTES = 4 * 1024 * 1024


class TierKeys:
    """Looks keys up in one tier, each until its deadline. For any thread."""

    def __init__(self, lookup: Callable[[Wish], Lookup], clock: Clock, where: str) -> None:
        """Ask nothing yet."""
        self._lookup = lookup
        self._clock = clock
        self._where = where
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, "tiered-lookup")

    def find(
        self, wanted: KeyQuery, deadline_s: float, tier_end: Callable[[MessageQueue], int]
    ) -> KeyAnswer:
        """Messages by key in the tier. What is not indexed yet is scanned, up to 256 MiB.

        Raises:
            StoreUnavailableError: Not before the deadline; what was begun ends by itself.
        """
        del tier_end
        wish = Wish(
            topic=wanted.topic,
            key=wanted.key,
            from_ms=wanted.from_ms,
            until_ms=wanted.until_ms,
            count=wanted.count,
        )
        work = partial(self._lookup, wish)
        return _answer(run_by(deadline_s, self._clock, self._threads, work, self._where))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)


class LocalKeys:
    """Looks keys up in what of a broker's store is not in the tier yet. For any thread; nothing is kept."""

    def __init__(
        self, store: LocalMessages, clock: Clock, *, scan_bytes_max: int = LOCAL_SCAN_BYTES_MAX
    ) -> None:
        """Ask nothing yet.

        Args:
            scan_bytes_max: How much one lookup reads, about; behind that the answer is not complete.
        """
        self._store = store
        self._clock = clock
        self._scan_bytes_max = scan_bytes_max

    def find(
        self, wanted: KeyQuery, deadline_s: float, tier_end: Callable[[MessageQueue], int]
    ) -> KeyAnswer:
        """Messages by key of what the tier does not have yet, by looking at it."""
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
    for position in distinct(batch.positions[timed]).tolist():
        stored = decode_record(view, position, check_crc=False)  # checked on reading
        if not stored.sys_flag & INNER_BATCH and key not in stored.properties_raw:
            continue
        for message in split_batch(stored):
            if has_key(message, wanted.key):
                offset = QueueOffset(message.queue_offset)
                yield KeyHit(batch.queue, offset, message.store_timestamp_ms, message)


def _answer(found: Lookup) -> KeyAnswer:
    hits = tuple(_hit(hit) for hit in found.hits if isinstance(hit, Hit))
    return KeyAnswer(hits, found.is_complete, tuple(found.damaged))


def _hit(hit: Hit) -> KeyHit:
    return KeyHit(hit.queue, QueueOffset(hit.queue_offset), hit.store_ms, hit.message)
