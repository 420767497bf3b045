"""Timer import: a local store's pending timers into the hourly files of a tier, once and only once; and on and on.

Overview: the store is opened (read-only, live or dead) with its timer topics; lease and epoch of the timers' place are
taken; each source is read from its beginning and what is to be taken is made durable round by round
(``timer.hour_files``, ``timer.hour_files``). What was taken is in the journal, so a run that was cut short, or is repeated,
goes on where it ended, and a smaller ``near`` takes only what is new by that.

``TimerFollower`` does the same beside a running dispatcher, on its store: of each source it reads what has come since the
last look. A message that was near when it was looked at stays with the broker. Whatever goes wrong there is tried again
after a pause, and never ends the dispatcher.

After a crash: objects that no entry names are orphans; the lease expires.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from typing import TYPE_CHECKING, Final, TypeVar

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from backends.s3_settings import S3Options
from tiered.api.broker_place import (
    require_conditional_writes,
    require_fitting,
    require_same_store,
    store_document,
    take_lease,
    timers_of,
)
from tiered.api.stores import backend_errors, open_metered, with_retries
from tiered.attach.broker import place_of, require_apart
from tiered.attach.settings import AttachSettings
from tiered.dispatch.group_commit import Uploader
from tiered.dispatch.merging import MergeThread
from tiered.dispatch.settings import DispatchContext, DispatchSettings, MemoryBudget
from tiered.errors import ClosedError, TieredStoreError
from tiered.journal.append import JournalWriter
from tiered.local.catalog import TIMER_TOPICS
from tiered.local.interface import Waiting
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.log.state import TierMachine, TierState
from tiered.log.timers import HOUR_MS, FactsCopy, TimerSource, TimersTaken
from tiered.model import QueueBounds, QueueOffset
from timer.hour_files import Counts, Enqueue, Given, TimerWriter
from timer.progress import delivered_since, delivered_so_far, noted, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.clock import Clock
    from tiered.dispatch.group_commit import Fact
    from tiered.local.interface import LocalStore
    from tiered.model import MessageQueue

_LOG = logging.getLogger("tiered.timer")
LEASE_S = 30.0
_LOOKS: Final = 240
"""Looks within the near window: so often a follower looks for new timers, since each look that finds some is a round."""
_PAUSE_S: Final = 10.0
_AHEAD: Final = 2
"""Batches that are read while a round is uploaded: of 8 MiB each, so one round."""
T = TypeVar("T")


@dataclass(slots=True)
class TimerImport:
    """What an import did."""

    place: Place  # of the broker
    due_from_ms: int  # what was due before it stayed
    counts: dict[MessageQueue, Counts] = field(default_factory=dict)
    """What became of the records that were looked at, by source."""
    bundles: int = 0  # objects made
    entries: int = 0  # rounds that were named
    waiting: Waiting = field(default_factory=Waiting)
    """What of the store cannot be read yet, or at all; timers may be among it."""

    @property
    def total(self) -> Counts:
        """Of all sources."""
        found = Counts()
        for one in self.counts.values():
            found.add(one)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSettings:
    """How to import."""

    near_ms: int
    """What is due within so long stays with the broker; 0: nothing that is pending does."""
    cluster: str | None = None  # name that is given; None: as the store says
    broker: str | None = None  # likewise
    wait: bool = False  # wait for another holder of the lease, instead of giving up
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    """Sizes of bundles, and how they are merged."""


def import_timers(
    directory: str,
    url: str,
    settings: ImportSettings,
    *,
    options: S3Options | None = None,
    clock: Clock,
    rng: random.Random | None = None,
    stop: threading.Event | None = None,
) -> TimerImport:
    """Take what is pending in a store and due late enough; see the module.

    Raises:
        ClosedError: ``stop`` was set; what was taken is durable, and another run goes on.
        InvalidError: Not a store, a wrong URL, timers of another store, a store without put-if-absent.
        FencedError: Another writes these timers.
        StoreUnavailableError: The tier's store cannot be reached or refuses us.
    """
    rng, stop = rng or random.SystemRandom(), stop or threading.Event()
    with contextlib.ExitStack() as opened, backend_errors():
        meter = open_metered(url, options or S3Options())
        opened.callback(meter.close)
        require_apart(directory, meter.url)
        asked = RocketMQOptions(settings.cluster, settings.broker, timers=True)
        local = RocketMQStore.open(directory, clock=clock, options=asked)
        opened.callback(local.close)
        store = with_retries(meter, clock, rng, stop)
        names = AttachSettings(cluster=settings.cluster, broker=settings.broker)
        place = timers_of(place_of(store, local.identity, names))
        require_fitting(store.url, place)
        work = _Taking(local, directory, meter, store, place, settings, clock, rng, stop)
        opened.callback(work.close)
        local.refresh()
        made = work.run()
        made.waiting = local.waiting()
        return made


class TimerFollower:
    """Takes the timers of a store that a dispatcher follows. ``run`` is for a thread of its own; nothing else is."""

    def __init__(
        self,
        local: LocalStore,
        directory: str,
        bare: ObjectStore,
        place: Place,
        settings: ImportSettings,
        *,
        freshness_s: float,
        clock: Clock,
        rng: random.Random,
        stop: threading.Event,
    ) -> None:
        """Touch nothing yet.

        Args:
            local: Shows timer topics; its follower keeps it fresh.
        """
        self._local, self._directory, self._bare = local, directory, bare
        self._place, self._settings = timers_of(place), settings
        self._clock, self._rng, self._stop = clock, rng, stop
        self._pause_s = max(freshness_s, settings.near_ms / 1000 / _LOOKS)
        self.total = Counts()  # what became of the records that were looked at since the start
        self.error = ""  # why nothing is taken at the moment; empty: nothing is wrong
        # Everything that was pending is in the tier, as of a look that left nothing with the broker.
        self.has_all = False
        # Of each source, one past the last record that is in the tier or known to stay with the broker.
        self.positions: Mapping[MessageQueue, QueueOffset] = {}

    def run(self) -> None:
        """Take what is there and what comes, until told to stop."""
        while not self._stop.is_set():
            try:
                with backend_errors():
                    self._follow()
            except ClosedError:
                return
            except (TieredStoreError, BackendError, OSError) as error:
                if not self._stop.is_set():
                    self.error = str(error)
                    _LOG.warning("timers are not taken at the moment: %s", error)
            self._clock.wait(self._stop, _PAUSE_S)

    def take_once(self) -> None:
        """Take what is there, and end; with no near window also what earlier looks have left with the broker."""
        with backend_errors(), contextlib.closing(self._taking()) as work:
            self.total.add(work.run(is_incremental=self._settings.near_ms > 0).total)
            self.positions = work.positions
            self.has_all = not self._settings.near_ms and not self.total.odd

    def _follow(self) -> None:
        with contextlib.closing(self._taking()) as work:
            while not self._stop.is_set():
                self.total.add(work.run(is_incremental=True).total)
                self.positions, self.error = work.positions, ""
                due_s = self._clock.monotonic_s() + self._pause_s
                while (left_s := due_s - self._clock.monotonic_s()) > 0 and not self._stop.is_set():
                    self._clock.wait(self._stop, min(left_s, LEASE_S / 6))
                    work.renew()

    def _taking(self) -> _Taking:
        store = with_retries(self._bare, self._clock, self._rng, self._stop)
        return _Taking(
            self._local, self._directory, self._bare, store, self._place, self._settings,
            self._clock, self._rng, self._stop,
        )  # fmt: skip


def _made_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, made in a thread up to ``_AHEAD`` before they are asked for.

    So a round that is being uploaded holds up the reading of the local store only when the next one is there.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="tiered-timers-read") as pool:
        ahead = deque(pool.submit(next, items, None) for _ in range(_AHEAD))
        while (item := ahead.popleft().result()) is not None:
            ahead.append(pool.submit(next, items, None))
            yield item


class _Taking:
    """Takes timers; ``run`` may be called again. From its first call on it holds lease and epoch."""

    def __init__(  # noqa: PLR0917 (the ends, as they were opened)
        self,
        local: LocalStore,
        directory: str,
        bare: ObjectStore,
        store: ObjectStore,
        place: Place,
        settings: ImportSettings,
        clock: Clock,
        rng: random.Random,
        stop: threading.Event,
    ) -> None:
        self._local, self._directory = local, directory
        self._bare, self._store, self._place = bare, store, place
        self._settings, self._clock, self._rng, self._stop = settings, clock, rng, stop
        self._journal: JournalWriter[TierState] = JournalWriter(
            bare, place.prefix, TierMachine(), clock=clock, rng=rng, stop=stop
        )
        self._lease = self._journal.lease(store, LEASE_S)
        self._copy = FactsCopy(store, place.prefix)
        self._renewed_s = clock.monotonic_s()
        self._taken: list[TimersTaken] = []
        self._writer: TimerWriter | None = None
        self._shrunk: set[MessageQueue] = set()

    def run(self, *, is_incremental: bool = False) -> TimerImport:
        """Take what is to be taken now."""
        is_first = self._writer is None
        if self._writer is None:
            self._journal.catch_up()
            self._require_same_store()
            self._begin()
            self._writer = self._make_writer()
        due_from, writer = self._due_from(is_incremental), self._writer
        bundles, rounds = writer.bundles, writer.rounds
        result = TimerImport(self._place, due_from)
        progress = delivered_so_far(self._directory)
        given = Given() if due_from or not is_first else self._delivered()
        for queue, bounds in sorted(self._local.queues().items()):
            if queue.topic in TIMER_TOPICS:
                some = self._fresh(queue, bounds) if is_incremental else bounds
                fresh = TimerSource(some.min, some.end)
                known = self._journal.state.timers.sources.get(queue, fresh)
                source = Enqueue(queue, some, progress(queue), known, due_from, given)
                result.counts[queue] = self._take(writer, source, is_new=known is fresh)
        self._commit(writer)
        result.bundles, result.entries = writer.bundles - bundles, writer.rounds - rounds
        if not is_incremental:
            self._journal.write_checkpoint(force=True)
        if result.entries or not is_incremental:
            self._copy.keep(self._journal.state.timers, self._journal.number)
        return result

    def _delivered(self) -> Given:
        """What was delivered and is not noted so. It was due, so only who takes all that is pending has to know."""
        with opened(self._directory, self._clock) as local:
            return delivered_since(local, noted(self._directory, local))

    def _due_from(self, is_incremental: bool) -> int:
        """What is due before it stays. Of one who looks often it moves in steps, since the journal keeps each."""
        near_ms = self._settings.near_ms
        if not near_ms:
            return 0
        due_from = self._clock.now_ms() + near_ms
        return (
            due_from - due_from % min(HOUR_MS, max(1, near_ms // 4)) if is_incremental else due_from
        )

    def _fresh(self, queue: MessageQueue, bounds: QueueBounds) -> QueueBounds:
        """What of a source was not looked at yet."""
        known = self._journal.state.timers.sources.get(queue)
        if known is None:
            return bounds
        if bounds.end < known.position and queue not in self._shrunk:
            self._shrunk.add(queue)
            _LOG.warning(
                "%s ends at %d, and was taken up to %d: the broker has lost its end; what it puts there now stays with it",
                *(queue, bounds.end, known.position),
            )
        low = max(int(bounds.min), min(known.position, int(bounds.end)))
        return QueueBounds(QueueOffset(low), bounds.end)

    @property
    def positions(self) -> dict[MessageQueue, QueueOffset]:
        sources = self._journal.state.timers.sources
        return {queue: QueueOffset(one.position) for queue, one in sources.items()}

    def close(self) -> None:
        with contextlib.suppress(BackendError, TieredStoreError):
            self._lease.release()

    def renew(self) -> None:
        """Keep the lease, if it is time."""
        if self._clock.monotonic_s() - self._renewed_s > self._lease.renewal_seconds:
            self._lease.renew()
            self._renewed_s = self._clock.monotonic_s()

    def _require_same_store(self) -> None:
        mine = store_document(self._local.identity, self._place)
        where = f"{self._store.url}/{self._place.prefix}"
        require_same_store(self._journal.state.store, mine, where)

    def _begin(self) -> None:
        require_conditional_writes(self._store, self._rng, self._store.url)
        take_lease(self._lease, self._clock, self._stop, wait=self._settings.wait)
        self._journal.catch_up()
        self._require_same_store()
        self._journal.take_epoch(remembered=self._lease.remembered)
        mine, known = store_document(self._local.identity, self._place), self._journal.state.store
        if not known.get("cluster") or (mine["store_id"] and not known["store_id"]):
            self._journal.append([{"do": "meta", "store": mine}])

    def _make_writer(self) -> TimerWriter:
        settings, journal = self._settings.dispatch, self._journal
        uploader = Uploader(
            self._bare,
            self._place.prefix,
            epoch=journal.epoch,
            writer=journal.writer,
            clock=self._clock,
        )
        context = DispatchContext(
            settings, MemoryBudget(settings.buffer_bytes_max), self._clock, self._rng, self._stop
        )
        self._merging = MergeThread(
            uploader,
            self._store,
            self._place.prefix,
            context,
            state=lambda: journal.state,
            say=self._say,
        )
        return TimerWriter(
            journal,
            lambda commits: uploader.put_commits(commits, alone=False),
            clock=self._clock,
            rng=self._rng,
            stop=self._stop,
            bundle_bytes=settings.bundle_bytes,
        )

    def _say(self, fact: Fact) -> None:
        self._journal.append([fact.action])
        fact.done()

    def _take(self, writer: TimerWriter, source: Enqueue, *, is_new: bool) -> Counts:
        """Take what is to be taken of one source; a round is committed when it is full."""
        known, due_from = source.known, source.due_from
        counts, low = Counts(), int(max(source.bounds.min, known.start))
        place, high = (source.queue, known.start, known.first_end), low
        for chosen in _made_ahead(source.choose(self._local)):
            writer.add(chosen)
            counts.add(chosen.counts)
            high = chosen.high
            if writer.is_full:
                self._taken.append(TimersTaken(*place, low, high, due_from))
                self._commit(writer)
                low = high
        if is_new or known.with_taken(low, high, due_from) != known:
            self._taken.append(TimersTaken(*place, low, high, due_from))
        return counts

    def _commit(self, writer: TimerWriter) -> None:
        writer.commit(self._taken)
        self._taken.clear()
        self._between_rounds()

    def _between_rounds(self) -> None:
        self.renew()
        while self._merging.merge_once():
            pass
        if self._stop.is_set():
            raise ClosedError(
                "told to stop before all timers were taken", do="run it again to go on"
            )
