"""A broker's store directory and its tier, opened for reading as one ``TieredMessageStore``, with the threads that takes.

Overview: ``open_message_store`` wires ``fetcher.message_store`` to a store directory (or none) and a tier. A thread ticks
the fetcher; another looks at the journal and at the store every few seconds.

Retries and errors: opening needs the tier, since nobody else knows what it has; later it may come and go. Requests of reads
are retried by the store below within the read's deadline. A look that fails is logged once for each row of failures.

``close`` ends reads that wait, then requests, then threads. A crash leaves nothing: it only reads.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from backends.s3_settings import S3Options
from fetcher.message_store import LocalSide, MessageStoreSettings, TieredMessageStore, TierSide
from fetcher.settings import MEMORY_BYTES, FetchSettings
from tiered.api.broker_place import choose_place
from tiered.api.ends import require_same_store, store_document
from tiered.api.keys import LocalKeys, TierKeys
from tiered.api.open_tier import OpenTier
from tiered.api.stores import backend_errors, open_for_reading
from tiered.clock import Clock, SystemClock
from tiered.errors import TieredStoreError
from tiered.local.residency import Residency
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.log.handover import read_handover

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from types import TracebackType

    from backends.base import ObjectStore
    from fetcher.statuses import Policy
    from tiered.api.broker_place import Place
    from tiered.log.handover import Handover
    from tiered.model import MessageQueue

_LOG = logging.getLogger("tiered.read")
REFRESH_SECONDS = 5.0
"""How often the journal and the store are looked at, unless told otherwise."""


class OpenMessageStore(TieredMessageStore):
    """A ``TieredMessageStore`` that owns its sides. Use it in a ``with`` statement, or ``close`` it.

    Attributes:
        opened: The tier.
    """

    opened: OpenTier
    _upkeep: _Upkeep
    _closing: ExitStack

    def tiered_queues(self) -> Iterable[MessageQueue]:
        """The queues that the tier has, as last seen."""
        return self.opened.state.queues

    def handover(self) -> Handover | None:
        """What the broker knew when it was decommissioned; None: it was not.

        Raises:
            DataError: It is damaged.
            BackendError: It cannot be read.
        """
        opened = self.opened
        return read_handover(opened.store, opened.place.prefix, opened.state.store)

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
        objects = open_for_reading(url, options or S3Options(), clock)
        opened.callback(objects.close)
        place = _choose_place(objects.store, local, cluster, broker)
        tier = OpenTier.over(objects, place, clock, fetch)
        opened.callback(tier.close)
        tier.refresh()
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
    """Where the tier of this broker lies.

    Raises:
        InvalidError: There is none, or there are several.
    """
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
        self,
        tier: OpenTier,
        local: RocketMQStore | None,
        clock: Clock,
        seconds: float,
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
            try:
                if self._local is not None:
                    self._local.refresh()
                self._tier.refresh()
            except TieredStoreError as error:
                if not self.trouble and not self._stop.is_set():
                    _LOG.warning("could not look for what is new, trying again: %s", error)
                self.trouble = str(error)
            else:
                self.trouble = ""

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
