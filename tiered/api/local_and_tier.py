"""A broker's store directory and its tier, opened for reading as one ``TieredMessageStore``, with the threads that takes.

Overview: ``open_message_store`` wires ``fetcher.message_store`` to a store directory (or none) and a tier. A thread ticks
the fetcher; another looks at the journal and at the store every few seconds.

Retries and errors: opening needs the tier, since nobody else knows what it has; later it may come and go. Requests of reads
are retried by the store below within the read's deadline. A look that fails is logged once for each row of failures.

``close`` ends reads that wait, then requests, then threads. A crash leaves nothing: it only reads.
"""

from __future__ import annotations

import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from backends.errors import BackendError
from backends.s3_settings import S3Options
from fetcher.fetcher import TieredMessageFetcher
from fetcher.message_store import MessageStoreSettings, TieredMessageStore
from fetcher.settings import MEMORY_BYTES, FetchSettings
from fetcher.sides import LocalSide, TierSide
from fetcher.ticker import Ticker
from tiered.api.broker_place import choose_place
from tiered.api.ends import require_same_store, store_document
from tiered.api.keys import LocalKeys, TierKeys
from tiered.api.stores import backend_errors, open_metered, with_retries
from tiered.clock import Clock, SystemClock
from tiered.errors import TieredStoreError
from tiered.local.residency import Residency
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.log.reader import TierReader

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from types import TracebackType

    from backends.base import ObjectStore
    from backends.wrapping import MeteredStore
    from fetcher.policies import Policy
    from tiered.api.broker_place import Place
    from tiered.model import MessageQueue

_LOG = logging.getLogger("tiered.read")
REFRESH_SECONDS = 5.0
"""How often the journal and the store are looked at, unless told otherwise."""


class OpenMessageStore(TieredMessageStore):
    """A ``TieredMessageStore`` that owns its sides. Use it in a ``with`` statement, or ``close`` it.

    Attributes:
        place: Which broker.
        meter: The tier's store; counts the requests.
        objects: The same with retries.
    """

    place: Place
    meter: MeteredStore
    objects: ObjectStore
    _reader: TierReader
    _upkeep: _Upkeep
    _closing: ExitStack

    def tiered_queues(self) -> Iterable[MessageQueue]:
        """The queues that the tier has, as last seen."""
        return self._reader.state.queues

    @property
    def trouble(self) -> str:
        """Why what is new could not be looked for the last time; empty when it could."""
        return self._upkeep.trouble

    def close(self) -> None:
        """Give back threads, files and connections. Harmless when repeated."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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
        url: Of the tier.
        policy: When the tier is read; default: as ``settings`` say, else ``NOT_IN_DISK``. A request may name another.
        cluster: Name of the cluster; needed only when several brokers have their data there.
        broker: Name of the broker; likewise. Default: as the store directory says.
        options: Endpoint, region and the like; default: from the environment.
        settings: Limits of requests.
        fetch: Limits of reading the tier.
        refresh_s: How often journal and store are looked at.
        clock: For tests.

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
        stop = threading.Event()
        meter = open_metered(url, options or S3Options())
        opened.callback(meter.close)
        store = with_retries(meter, clock, random.Random(), stop)  # noqa: S311 (jitter)
        with backend_errors():
            reader, place = _open_reader(store, local, cluster, broker)
        tier, fetcher = _start(opened, reader, fetch, clock)
        share_bytes = fetch.cache_bytes // 2
        keys = TierKeys(reader, clock, memory_bytes=share_bytes, tell=fetcher.lend)
        opened.callback(keys.close)
        found = OpenMessageStore(
            _local_side(local),
            tier,
            clock,
            settings,
            local_keys=LocalKeys(local, clock).find if local is not None else None,
            tier_keys=keys.find,
        )
        upkeep = _Upkeep(fetcher, local, clock, stop, refresh_s)
        opened.callback(upkeep.close)
        found.place, found.meter, found.objects = place, meter, store
        found._reader, found._upkeep = reader, upkeep  # noqa: SLF001 (ours)
        found._closing = opened.pop_all()  # noqa: SLF001 (ours)
        return found


def _open_reader(
    store: ObjectStore, local: RocketMQStore | None, cluster: str | None, broker: str | None
) -> tuple[TierReader, Place]:
    """The tier of this broker, replayed; and whose it is.

    Raises:
        InvalidError: There is none, or it is of another store.
    """
    if local is not None:
        cluster, broker = cluster or local.identity.cluster, broker or local.identity.broker
    place = choose_place(store, cluster, broker)
    reader = TierReader(store, place.prefix)
    reader.refresh()
    if local is not None:
        mine = store_document(local.identity, place)
        require_same_store(reader.state.store, mine, f"{store.url}/{place.prefix}")
    return reader, place


def _start(
    opened: ExitStack, reader: TierReader, settings: FetchSettings, clock: Clock
) -> tuple[TierSide, TieredMessageFetcher]:
    """A fetcher with its threads."""
    threads = settings.transfers.requests_in_flight_max
    executor = ThreadPoolExecutor(threads, "tiered-fetch")
    opened.callback(executor.shutdown, cancel_futures=True)
    journal = ThreadPoolExecutor(1, "tiered-journal")
    opened.callback(journal.shutdown, cancel_futures=True)
    fetcher = TieredMessageFetcher(reader, executor, clock, settings)
    opened.callback(fetcher.close)
    ticker = Ticker(fetcher, clock)
    opened.callback(ticker.close)
    return TierSide(reader, fetcher, journal, clock), fetcher


def _local_side(local: RocketMQStore | None) -> LocalSide | None:
    if local is None:
        return None
    residency = Residency(local.current_view)
    return LocalSide(local, bounds=residency.bounds, is_in_memory=residency.is_in_memory)


class _Upkeep:
    """Looks at the journal and at the store now and then, in a thread of its own."""

    def __init__(
        self,
        fetcher: TieredMessageFetcher,
        local: RocketMQStore | None,
        clock: Clock,
        stop: threading.Event,
        seconds: float,
    ) -> None:
        self._fetcher = fetcher
        self._local = local
        self._clock = clock
        self._stop = stop
        self._seconds = seconds
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, name="tiered-refresh", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._clock.wait(self._stop, self._seconds):
            try:
                if self._local is not None:
                    self._local.refresh()
                self._fetcher.refresh()
            except (TieredStoreError, BackendError) as error:
                if not self.trouble and not self._stop.is_set():
                    _LOG.warning("could not look for what is new, trying again: %s", error)
                self.trouble = str(error)
            else:
                self.trouble = ""

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
