"""The state that pages show: kept in memory, and caught up by one thread while somebody looks.

Overview: the watch has a reader for each broker below a URL. A *look* asks each what is new: a listing of its journal and
its lease. What comes of it is a ``FleetView``, which never changes; pages are made of the latest one and wait for no store.
Looks are made every ``refresh_s`` while pages are asked for, and none once nobody has asked for ``IDLE_S``: a page that is
left open costs nothing, since pages do not reload by themselves.

Errors: a broker that cannot be read (``unread``) hides no other one. Where the store itself does not answer, the last view
stays, with ``trouble``.

Threads: any may call ``view``; looks are made by one thread and its pool. A crash leaves nothing: it only reads.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from tiered.api.broker_place import Place, find_places, no_tier
from tiered.api.stores import what_to_do
from tiered.archive.job import plan_document, plan_job
from tiered.archive.model import ArchiveQueue, whole_files
from tiered.archive.tables import follow_log, read_archive
from tiered.archive.task import JobContext
from tiered.errors import (
    DataError,
    InternalError,
    InvalidError,
    OtherVersionError,
    StoreUnavailableError,
    TieredStoreError,
)
from tiered.log.reader import TierReader
from tiered.upkeep.status import (
    BrokerFacts,
    UnreadBroker,
    broker_document,
    read_broker,
    read_retry_logs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from backends.base import ObjectStore
    from tiered.api.stores import OpenStore
    from tiered.archive.machine import ArchiveState
    from tiered.clock import Clock
    from tiered.journal.replay import JournalReader
    from tiered.local.interface import LocalStore
    from tiered.model import MessageQueue
    from tiered.upkeep.status import Document

_LOG = logging.getLogger("tiered.web")
IDLE_S = 60.0
FIRST_S = 8.0
"""How long a page waits for the first view, or for a new one when nobody has looked for a while."""
PLACES_S = 60.0
"""Brokers come seldom; to find them takes two requests each."""
RATE_S = 60.0
"""A writer's rate is read of up to 64 entries, a request each. Retry logs take a listing, and more if there are any."""
AT_ONCE = 8
"""Brokers asked at once."""
SAMPLES_MAX = 720
"""Of a topic's lag; at every 5 s an hour."""
TOPICS_MAX = 2000
"""Topics whose lag is kept; beyond, that of the broker alone."""


@dataclass(frozen=True, slots=True)
class LagSample:
    """What waited at one look."""

    time_ms: int
    messages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BrokerView:
    """One broker, as it was seen last."""

    facts: BrokerFacts
    document: Document  # as in ``tiered status --json``
    reader: TierReader  # reads its messages
    lags: Mapping[str, Sequence[LagSample]] = field(default_factory=dict)
    """Oldest first, by topic, and of all topics by ""; empty without a local store."""

    @property
    def place(self) -> Place:
        """Which broker."""
        return self.facts.place


@dataclass(frozen=True, slots=True)
class FleetView:
    """All brokers, as they were seen last."""

    looked_ms: int  # when the store answered last, UTC
    looked_s: float  # the same, monotonic
    brokers: tuple[BrokerView, ...]
    unread: tuple[UnreadBroker, ...]  # of which nothing can be told, and why
    trouble: TieredStoreError | None = None  # why the store has not answered since

    def broker(self, cluster: str, name: str) -> BrokerView | UnreadBroker:
        """One of them.

        Raises:
            InvalidError: There is none of these names.
        """
        wanted = cluster, name
        every: tuple[BrokerView | UnreadBroker, ...] = (*self.brokers, *self.unread)
        for one in every:
            if (one.place.cluster, one.place.broker) == wanted:
                return one
        raise InvalidError(
            f"there is no broker {name} of cluster {cluster}", do="choose one of the first page"
        )


@dataclass(slots=True)
class _WatchedBroker:
    """What is kept of a broker between looks. One thread at a time."""

    reader: TierReader
    view: BrokerView | None = None
    mark: tuple[object, ...] = ()  # by which it shows whether the document would be another
    rate_s: float | None = None  # when its rate and its mounts' retry logs were read last
    lags: dict[str, deque[LagSample]] = field(default_factory=dict)


class TierWatch:
    """Keeps what pages show; see the module."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        *,
        cluster: str | None = None,
        broker: str | None = None,
        local: LocalStore | None = None,
        refresh_s: float = 5.0,
    ) -> None:
        """Look at nothing yet.

        Args:
            store: With retries that end within seconds.
            cluster: Only brokers of this one; likewise ``broker``.
            local: The local store of one of the brokers, for its lag.
        """
        self.store = store
        self.clock = clock
        self.refresh_s = refresh_s
        self._names = cluster, broker
        self._local = local
        self._known: dict[Place, _WatchedBroker] = {}
        self._places: tuple[float, list[Place]] | None = None
        self._view: FleetView | None = None
        self._trouble: TieredStoreError | None = None
        self._asked_s = float("-inf")
        self._wake = threading.Event()
        self._looked = threading.Condition()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(AT_ONCE, "tiered-web-look")
        self._thread = threading.Thread(target=self._run, name="tiered-web-watch", daemon=True)
        self._thread.start()

    def view(self) -> FleetView:
        """The latest view; waits ``FIRST_S`` at most, for a first one or when none was made for a while.

        Raises:
            TieredStoreError: There is none yet, and why.
        """
        self._asked_s = self.clock.monotonic_s()
        self._wake.set()
        with self._looked:
            self._looked.wait_for(self._is_fresh, FIRST_S)
        if self._view is not None:
            return self._view
        raise self._trouble or StoreUnavailableError(
            f"the store has not told in {FIRST_S:.0f} s what is in the tier",
            where=self.store.url,
            do="load this page again: reading goes on",
        )

    def _is_fresh(self) -> bool:
        if self._stop.is_set() or self._trouble is not None:
            return True
        view, oldest_s = self._view, self.clock.monotonic_s() - max(3 * self.refresh_s, 10.0)
        return view is not None and view.looked_s >= oldest_s

    def close(self) -> None:
        """End looks. Waits for one that is under way no longer than a request may take."""
        self._stop.set()
        self._wake.set()
        with self._looked:
            self._looked.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join(FIRST_S)

    # The thread

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            if self._stop.is_set():
                return
            if self.clock.monotonic_s() - self._asked_s > IDLE_S:
                self._wake.clear()
                continue
            self.look()
            self.clock.wait(self._stop, self.refresh_s)

    def look(self) -> None:
        """Catch up with all brokers. From one thread."""
        view, trouble = self._view, None  # what is seen, and why it is old
        try:
            view = self._made()
        except TieredStoreError as error:
            trouble = error
        except (BackendError, OSError) as error:
            do = what_to_do(error) if isinstance(error, BackendError) else ""
            trouble = StoreUnavailableError(str(error), where=self.store.url, do=do)
        except Exception as error:  # noqa: BLE001 (a defect must not end all looks)
            if self._stop.is_set():  # which cancels what is under way
                return
            _LOG.exception("a look at %s failed", self.store.url)
            what = f"a defect of ours: {type(error).__name__}: {error}"
            trouble = InternalError(what, do="see the log, and report it")
        with self._looked:
            self._trouble = trouble
            self._view = view and replace(view, trouble=trouble)
            self._looked.notify_all()

    def _made(self) -> FleetView:
        now_ms, now_s = self.clock.now_ms(), self.clock.monotonic_s()
        places = self._found(now_s)
        self._known = {
            place: self._known.get(place) or _WatchedBroker(TierReader(self.store, place.prefix))
            for place in places
        }
        whose = self._local_place(places)
        look = partial(self._look_at, now_ms=now_ms, now_s=now_s, local_place=whose)
        seen = self._pool.map(look, places)
        found = list(seen)
        return FleetView(
            now_ms,
            now_s,
            tuple(one for one in found if isinstance(one, BrokerView)),
            tuple(one for one in found if isinstance(one, UnreadBroker)),
        )

    def _found(self, now_s: float) -> list[Place]:
        if self._places is None or now_s - self._places[0] >= PLACES_S:
            cluster, broker = self._names
            places = [
                place
                for place in find_places(self.store)
                if cluster in {None, place.cluster} and broker in {None, place.broker}
            ]
            if not places:
                raise no_tier(self.store)
            self._places = now_s, places
        return self._places[1]

    def _local_place(self, places: list[Place]) -> Place | None:
        """Whose local store we have: of the names that it bears, the only one there, or what remembers it."""
        if self._local is None:
            return None
        identity = self._local.identity
        mine = Place(identity.cluster or "", identity.broker or "")
        if mine in places or len(places) == 1:
            return mine if mine in places else places[0]
        stores = {place: known.reader.state.store for place, known in self._known.items()}
        remembered = (
            place for place, store in stores.items() if store.get("store_id") == identity.store_id
        )
        return next(remembered, None) if identity.store_id else None

    def _look_at(
        self, place: Place, *, now_ms: int, now_s: float, local_place: Place | None
    ) -> BrokerView | UnreadBroker:
        known = self._known[place]
        with_rate = known.rate_s is None or now_s - known.rate_s >= RATE_S
        try:
            facts = read_broker(
                known.reader,
                place,
                now_ms,
                local=self._local if place == local_place else None,
                with_rate=with_rate,
            )
            if with_rate:
                facts = replace(facts, retry_logs=read_retry_logs(self.store, place))
        except (DataError, OtherVersionError) as error:
            del self._known[place]  # the next look reads from its checkpoint on
            return UnreadBroker(place, error)
        except BackendError as error:
            if error.retriable or not error.needs_a_person:
                raise
            return UnreadBroker(place, StoreUnavailableError(str(error), do=what_to_do(error)))
        if with_rate:
            known.rate_s = now_s
        elif known.view is not None:
            before = known.view.facts
            facts = replace(facts, rate=before.rate, retry_logs=before.retry_logs)
        if facts.lease is None and known.view is not None and known.view.facts.lease is not None:
            self._places = None  # a lease does not disappear alone: a writer that is still there shows at the next look
        known.view = self._viewed(known, facts, now_ms)
        return known.view

    def _viewed(self, known: _WatchedBroker, facts: BrokerFacts, now_ms: int) -> BrokerView:
        """The document is made anew only where it says something else, since a large one takes its time."""
        lease = facts.lease
        is_held = lease is not None and not lease.released and lease.expires_ms > now_ms
        mark = facts.journal_number, lease, is_held, facts.rate, known.rate_s
        if facts.local is None and known.view is not None and mark == known.mark:
            return replace(known.view, facts=facts)
        known.mark = mark
        document = broker_document(facts, now_ms)
        for name, totals in _lagging(document):
            kept = known.lags.setdefault(name, deque(maxlen=SAMPLES_MAX))
            kept.append(LagSample(now_ms, totals["lag_messages"], totals["lag_seconds"] or 0.0))
        lags = {name: tuple(kept) for name, kept in known.lags.items()}
        return BrokerView(facts, document, known.reader, lags)


def _lagging(document: Document) -> Iterator[tuple[str, dict[str, Any]]]:
    """Totals that have a lag: the broker's, and its topics'."""
    topics = document["topics"]
    rows = [("", document), *((topic["topic"], topic) for topic in topics[:TOPICS_MAX])]
    return ((name, totals) for name, totals in rows if totals["lag_messages"] is not None)


# --------------------------------------------------------------------------------------------------
# What is archived of a broker, as the archive's log says: its state is kept, and caught up on demand.
#
# Threads: any; one at a time catches up. Nothing is written.
# --------------------------------------------------------------------------------------------------


FRESH_S = 5.0
"""Between two looks at the log: a listing each."""


@dataclass(frozen=True, slots=True)
class ArchiveSummary:
    """What a page shows of an archive and a broker."""

    plan: Document  # as ``tiered archive --dry-run --json``
    topics: list[dict[str, Any]]  # what is archived of each
    jobs: list[dict[str, Any]]  # the last runs, newest first
    updated_ms: int  # of the last entry of the log


class ArchiveWatch:
    """Keeps the state of an archive's log."""

    def __init__(self, opened: OpenStore, clock: Clock) -> None:
        self.url = opened.store.url
        self._opened = opened
        self._clock = clock
        self._lock = threading.Lock()
        self._log: JournalReader[ArchiveState] | None = None
        self._looked_s = float("-inf")
        self._summaries: dict[Place, tuple[ArchiveState, int, ArchiveSummary]] = {}

    def state(self) -> ArchiveState:
        """What the log says, ``FRESH_S`` old at most."""
        with self._lock:
            if self._log is None:
                self._log = follow_log(self._opened.store)
            if self._clock.monotonic_s() - self._looked_s >= FRESH_S:
                read_archive(self._opened.store, self._log)
                self._looked_s = self._clock.monotonic_s()
            return self._log.state

    def ranges(self, place: Place, queue: MessageQueue, incarnation: int) -> list[tuple[int, int]]:
        """Queue offsets of an incarnation that are archived, in order."""
        wanted = ArchiveQueue(place.cluster, place.broker, *queue, incarnation)
        starts, ends = self.state().queues.columns(wanted)[:2]
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def summary(self, view: BrokerView) -> ArchiveSummary:
        """What is archived of a broker, and what a run would do; kept until one of the two logs goes on."""
        state, number = self.state(), view.facts.journal_number
        known = self._summaries.get(view.place)
        if known is None or known[0] is not state or known[1] != number:
            known = self._summaries[view.place] = state, number, self._summary(state, view)
        return known[2]

    def _summary(self, state: ArchiveState, view: BrokerView) -> ArchiveSummary:
        opened = self._opened
        rng = random.SystemRandom()
        at = JobContext(view.reader.store, view.place, opened.store, opened.meter, self._clock, rng)
        return ArchiveSummary(
            plan_document(at, plan_job(at, state, view.reader)),
            self._topics(state, view.place),
            [asdict(job) for job in reversed(state.jobs)],
            state.updated_ms,
        )

    def _topics(self, state: ArchiveState, place: Place) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for queue, one in state.queues.each(lambda queue: _is_of(queue, place)):
            row = found.setdefault(
                queue.topic,
                {"topic": queue.topic, "offset_ranges": 0, "rows": 0, "holes": 0, "bad": 0},
            )
            row["offset_ranges"] += 1
            row["rows"] += one.rows
            row["holes"] += one.holes
            row["bad"] += one.bad
        return [found[topic] for topic in sorted(found)]

    def files(self, place: Place, topic: str) -> list[dict[str, Any]]:
        """The files of a topic, as the log names them, in order of queue and offset."""
        named = self.state().queues.each(
            lambda queue: _is_of(queue, place) and queue.topic == topic
        )
        return [asdict(file) for file in whole_files([f for _, one in named for f in one.files])]


def _is_of(queue: ArchiveQueue, place: Place) -> bool:
    return (queue.cluster, queue.broker) == (place.cluster, place.broker)
