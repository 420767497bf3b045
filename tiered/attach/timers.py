"""Timer import: a local store's pending timers into the hourly files of a tier, once and only once.

Overview: the store is opened (read-only, live or dead) with its timer topics; lease and reign of the timers' place are
taken; each source is read from its beginning and what is to be taken is made durable round by round
(``timer.enqueue``, ``timer.writer``). What was taken is in the journal, so a run that was cut short, or is repeated, goes
on where it ended, and a smaller ``near`` takes only what is new by that.

After a crash: objects that no entry names are orphans; the lease expires.
"""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from backends.s3_settings import S3Options
from tiered.api.broker_place import require_fitting
from tiered.api.ends import require_conditional_writes, require_same_store, store_document
from tiered.api.stores import backend_errors, open_metered, with_retries
from tiered.attach.naming import place_of, require_apart
from tiered.attach.settings import AttachSettings
from tiered.attach.timer_place import timers_of
from tiered.dispatch.group_commit import Uploader
from tiered.dispatch.merging import MergeThread
from tiered.dispatch.settings import DispatchCounters, DispatchSettings
from tiered.errors import ClosedError
from tiered.journal.lease import Holder, Lease
from tiered.journal.writer import JournalWriter
from tiered.local.catalog import SCHEDULE_TOPIC
from tiered.local.layout import read_timer_progress
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.log.state import TierMachine, TierState
from tiered.log.timers import TimerSource, TimersTaken
from timer.enqueue import Counts, Enqueue, ImportProgress
from timer.writer import TimerWriter

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.clock import Clock
    from tiered.dispatch.rounds import Fact
    from tiered.local.layout import TimerProgress
    from tiered.model import MessageQueue, QueueBounds

LEASE_S = 30.0


@dataclass(slots=True)
class TimerImport:
    """What an import did.

    Attributes:
        place: Of the broker.
        counts: What became of the records that were looked at, by source.
        bundles: Objects made.
        entries: Rounds that were named.
        due_from_ms: What was due before it stayed.
    """

    place: Place
    due_from_ms: int
    counts: dict[MessageQueue, Counts] = field(default_factory=dict)
    bundles: int = 0
    entries: int = 0

    @property
    def total(self) -> Counts:
        """Of all sources."""
        found = Counts()
        for one in self.counts.values():
            found.add(one)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSettings:
    """How to import.

    Attributes:
        near_ms: What is due within so long stays with the broker; 0: nothing that is pending does.
        cluster: Name that is given; None: as the store says.
        broker: Likewise.
        wait: Wait for another holder of the lease, instead of giving up.
        dispatch: Sizes of bundles, and how they are merged.
    """

    near_ms: int
    cluster: str | None = None
    broker: str | None = None
    wait: bool = False
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)


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

    Args:
        directory: The broker's store directory.
        url: Of the tier.
        settings: What to take.
        options: For S3.
        clock: Time.
        rng: For ids and jitter; by default from the system.
        stop: Ends it between two rounds.

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
        work = _Import(local, directory, meter, store, place, settings, clock, rng, stop)
        opened.callback(work.close)
        return work.run()


class _Import:
    def __init__(  # noqa: PLR0917 (the ends, as they were opened)
        self,
        local: RocketMQStore,
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
        writer = f"{rng.getrandbits(32):08x}"
        self._journal: JournalWriter[TierState] = JournalWriter(
            bare, place.prefix, TierMachine(), writer=writer, clock=clock, rng=rng, stop=stop
        )
        self._lease = Lease(
            store,
            place.prefix,
            writer=writer,
            holder=Holder.present(),
            seconds=LEASE_S,
            clock=clock,
            known=lambda: self._journal.end,
        )
        self._renewed_s = clock.monotonic_s()
        self._taken: list[TimersTaken] = []

    def run(self) -> TimerImport:
        self._journal.catch_up()
        self._require_same_store()
        self._local.refresh()
        due_from = self._clock.now_ms() + self._settings.near_ms if self._settings.near_ms else 0
        result = TimerImport(self._place, due_from)
        progress = read_timer_progress(self._directory)
        self._begin()
        writer = self._writer()
        for queue, bounds in sorted(self._local.queues().items()):
            result.counts[queue] = self._take(writer, queue, bounds, progress, due_from)
        self._commit(writer)
        result.bundles, result.entries = writer.bundles, writer.rounds
        self._journal.write_checkpoint(force=True)
        return result

    def close(self) -> None:
        self._lease.release()

    def _require_same_store(self) -> None:
        mine = store_document(self._local.identity, self._place)
        where = f"{self._store.url}/{self._place.prefix}"
        require_same_store(self._journal.state.store, mine, where)

    def _begin(self) -> None:
        require_conditional_writes(self._store, self._rng, self._store.url)
        self._lease.acquire(
            wait=self._settings.wait,
            announce=lambda _state: None,
            stop=lambda seconds: self._clock.wait(self._stop, seconds),
        )
        self._journal.catch_up()
        self._require_same_store()
        self._journal.take_reign(asdict(Holder.present()), remembered=self._lease.remembered)
        mine, known = store_document(self._local.identity, self._place), self._journal.state.store
        if not known or (mine["store_id"] and not known["store_id"]):
            self._journal.append([{"do": "meta", "store": mine}])

    def _writer(self) -> TimerWriter:
        settings, journal = self._settings.dispatch, self._journal
        uploader = Uploader(
            self._bare,
            self._place.prefix,
            generation=journal.generation,
            writer=journal.writer,
            clock=self._clock,
        )
        self._merging = MergeThread(
            uploader,
            self._store,
            self._place.prefix,
            state=lambda: journal.state,
            say=self._say,
            is_pressed=lambda: False,
            settings=settings,
            counters=DispatchCounters(),
            clock=self._clock,
            rng=self._rng,
            stop=self._stop,
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

    def _take(
        self,
        writer: TimerWriter,
        queue: MessageQueue,
        bounds: QueueBounds,
        progress: TimerProgress,
        due_from: int,
    ) -> Counts:
        """Take what is to be taken of one source; a round is committed when it is full."""
        fresh = TimerSource(bounds.min, bounds.end)
        known = self._journal.state.timers.sources.get(queue, fresh)
        source = Enqueue(queue, bounds, _progress(queue, progress), known, due_from)
        counts, low = Counts(), int(max(bounds.min, known.start))
        place, high = (queue, known.start, known.first_end), low
        for chosen in source.choose(self._local):
            writer.add(chosen)
            counts.add(chosen.counts)
            high = chosen.high
            if writer.is_full:
                self._taken.append(TimersTaken(*place, low, high, due_from))
                self._commit(writer)
                low = high
        if known is fresh or known.with_taken(low, high, due_from) != known:
            self._taken.append(TimersTaken(*place, low, high, due_from))
        return counts

    def _commit(self, writer: TimerWriter) -> None:
        writer.commit(self._taken)
        self._taken.clear()
        self._between_rounds()

    def _between_rounds(self) -> None:
        if self._clock.monotonic_s() - self._renewed_s > self._lease.renewal_seconds:
            self._lease.renew()
            self._renewed_s = self._clock.monotonic_s()
        while self._merging.merge_once():
            pass
        if self._stop.is_set():
            raise ClosedError(
                "told to stop before all timers were taken", do="run it again to go on"
            )


def _progress(queue: MessageQueue, found: TimerProgress) -> ImportProgress:
    if queue.topic == SCHEDULE_TOPIC:
        return ImportProgress(delivered=found.delayed.get(queue.queue_id + 1, 0))
    return ImportProgress(found.wheel.read_ms, found.wheel.queue_offset)
