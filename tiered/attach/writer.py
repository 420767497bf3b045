"""Attach: the composition of a writer, that is a local store, a lease, an epoch and a dispatcher.

Overview: ``Attachment.open`` checks both ends, takes the lease and then the epoch; ``run`` follows the store until it is
stopped (or, with ``once``, until the present end is durable); ``close`` drains what is in hand and frees the lease.

Ordering: the store is opened and the tier's identity checked before anything is written; the lease before the epoch; the
epoch before the first object.

After a crash: the lease stays until it expires (or is taken at once on the same host); everything else is in the journal.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from backends.s3_settings import S3Options
from backends.wrapping import put_own
from tiered.api.broker_place import (
    require_able,
    require_conditional_writes,
    require_rocketmq,
    require_same_store,
    store_document,
)
from tiered.api.stores import PatientStore, backend_errors, open_for_reading, with_retries
from tiered.attach.broker import named_by, open_named, place_of, require_apart
from tiered.attach.index import IndexThread
from tiered.attach.settings import AttachSettings
from tiered.clock import Clock, SystemClock
from tiered.dispatch.dispatcher import TieredDispatcher
from tiered.dispatch.group_commit import Fact, retry_level
from tiered.errors import (
    ClosedError,
    DataError,
    FencedError,
    InvalidError,
    StoreUnavailableError,
)
from tiered.journal.append import JournalWriter
from tiered.keys import ObjectId, handover_key
from tiered.local.catalog import TIMER_TOPICS
from tiered.log.broker_tables import HANDOVER, is_handed_over, read_handover, recall
from tiered.log.state import TierMachine, TierState
from tiered.model import MessageQueue, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.wrapping import MeteredStore
    from tiered.api.broker_place import Place
    from tiered.attach.timer_import import TimerFollower
    from tiered.journal.lease import LeaseState
    from tiered.local.interface import LocalStore, Waiting
    from tiered.log.broker_tables import Handover

__all__ = ["AttachResult", "AttachSettings", "Attachment"]
_LOG = logging.getLogger("tiered.attach")


@dataclass(frozen=True, slots=True)
class AttachResult:
    """What a run left behind."""

    is_complete: bool  # everything that was committed locally (as far as selected) is in the tier
    waiting: Waiting  # what is in the store but not proven committed
    behind: int  # messages that are committed locally and not in the tier
    quarantined: int  # damaged records put into quarantine in this run
    missing: int
    """Queue offsets taken in this run of which the local store should have a message, and has nothing."""


class Attachment:
    """A local store being tiered by this process."""

    def __init__(
        self,
        *,
        local: LocalStore,
        meter: MeteredStore,
        place: Place,
        settings: AttachSettings,
        clock: Clock,
        rng: random.Random,
        announce: Callable[[LeaseState], None],
        stopping: threading.Event | None = None,
        directory: str = "",
    ) -> None:
        """Wire a writer over an opened store and tier; ``open`` does it for two names."""
        self.local = local
        self._directory = directory
        self.meter = meter
        self.place = place
        self.named_by = named_by(local.identity, settings, place)
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._announce = announce
        self._abandon = threading.Event()
        self._stopping = stopping or threading.Event()
        self.patient = PatientStore(meter, clock)
        self._store = with_retries(self.patient, clock, rng, self._abandon, meter.count_retry)
        self._journal: JournalWriter[TierState] = JournalWriter(
            self.patient,
            place.prefix,
            TierMachine(),
            clock=clock,
            rng=rng,
            stop=self._abandon,
        )
        self._lease = self._journal.lease(self._store, settings.lease_s)
        self._fault: BaseException | None = None
        self._drained: bool | None = None
        self._threads: list[threading.Thread] = []
        self._start_of = Starting(local, settings.start)
        self.dispatcher: TieredDispatcher | None = None
        self.index: IndexThread | None = None
        self.timers: TimerFollower | None = None
        self.sealed = 0
        """Segments that ``run`` sealed because it was asked to."""
        self.was_live = False
        """A broker ran on the store when ``run`` with ``once`` looked what there is."""

    @classmethod
    def open(
        cls,
        directory: str,
        url: str,
        settings: AttachSettings,
        *,
        options: S3Options | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        announce: Callable[[LeaseState], None] = lambda _state: None,
        stopping: threading.Event | None = None,
    ) -> Attachment:
        """Open both ends, check that they belong together, take lease and epoch.

        Args:
            announce: Told of a holder whose lease is waited for.
            stopping: ``stop`` sets it; its holder can end the waiting in here as well.

        Raises:
            ClosedError: ``stopping`` was set while the store was opened, or its names were waited for.
            InvalidError: Not a store, a wrong URL, a tier of another store, a store without put-if-absent.
            StoreUnavailableError: The tier's store cannot be reached or refuses us.
            FencedError: Another writer holds the tier (or ``stopping`` was set while its lease was waited for).
            JournalLostError: The tier's journal is gone, or has lost its end.
        """
        clock = clock or SystemClock()
        rng = rng or random.SystemRandom()
        stopping = stopping or threading.Event()
        with contextlib.ExitStack() as opened:
            objects = open_for_reading(url, options or S3Options(), clock, rng=rng, stop=stopping)
            meter = objects.meter
            opened.callback(meter.close)
            require_apart(directory, meter.url)
            require_able(meter.capabilities, meter.url)  # before anything is asked or waited for
            local = open_named(directory, settings, clock, stopping)
            opened.callback(local.close)
            for asked in settings.rocketmq_only:
                what = f"{asked} needs a store of RocketMQ"
                require_rocketmq(local.identity.kind, what, directory)
            with backend_errors():
                place = place_of(objects.store, local.identity, settings)
            attachment = cls(
                local=local,
                meter=meter,
                place=place,
                settings=settings,
                clock=clock,
                rng=rng,
                announce=announce,
                stopping=stopping,
                directory=directory,
            )
            opened.pop_all()
        try:
            attachment._begin()
        except BaseException:
            attachment.close()
            raise
        return attachment

    def _begin(self) -> None:
        with backend_errors():
            self._journal.catch_up()  # reads first: a store that cannot be reached is told soonest
            self._require_same_store()
            able = require_conditional_writes(self._store, self._rng, self.meter.url)
            # The lease before the epoch: a living writer is waited for, and not fenced out in the middle of its work.
            self._lease.acquire(
                wait=self._settings.wait, announce=self._announce, stop=self._wait_stopping
            )
            # From here on it must not run out, however long what follows takes.
            self._start_thread("lease", self._renew)
            self._take_epoch()
        dispatcher = TieredDispatcher(
            store=self.patient,
            prefix=self.place.prefix,
            journal=self._journal,
            local=self.local,
            settings=self._settings.dispatch,
            start=self._start_of,
            selects=self._queue_selects(),
            escapes_case=not able.distinguishes_case,
            clock=self._clock,
            rng=self._rng,
        )
        self.dispatcher = dispatcher
        if self._settings.index:
            self.index = IndexThread(
                store=self._store,
                prefix=self.place.prefix,
                state=lambda: self._journal.state,
                say=dispatcher.say,
                next_id=dispatcher.uploader.next_id,
                settings=self._settings.index,
                clock=self._clock,
                stop=self._abandon,
            )
            # Before the dispatcher starts: what the first round stores is told here, or would be read again from the tier.
            dispatcher.uploader.on_stored = self.index.stored
            self._start_thread("key-index", self.index.run)
        dispatcher.start()
        if self._settings.timers_near_ms is not None:
            self.timers = self._follow_timers(self._settings.timers_near_ms)

    def _follow_timers(self, near_ms: int) -> TimerFollower:
        """What takes timers, beside the dispatcher; they have a place, a lease and a journal of their own."""
        from tiered.attach.timer_import import (  # noqa: PLC0415 (start-up loads only what is needed)
            ImportSettings,
            TimerFollower,
        )

        settings = self._settings.dispatch
        return TimerFollower(
            self.local,
            self._directory,
            self.meter,
            self.place,
            ImportSettings(near_ms=near_ms, wait=True, dispatch=settings),
            freshness_s=settings.freshness_s,
            clock=self._clock,
            rng=self._rng,
            stop=self._stopping,
        )

    def _require_same_store(self) -> None:
        mine = store_document(self.local.identity, self.place)
        where = f"{self.meter.url}/{self.place.prefix}"
        known = self._journal.state.store
        require_same_store(known, mine, where)
        if is_handed_over(known) and self._settings.after_handover == "refuse":
            raise InvalidError(
                "the broker of this tier was decommissioned: mounts may serve it, and groups may have gone on there",
                where=where,
                do="end the mounts and add --recommission if the broker is back",
            )

    def _take_epoch(self) -> None:
        self._start_of.note()
        self._journal.catch_up()
        self._require_same_store()  # again: another store may have begun this tier a moment ago
        self._start_of.is_first = self._journal.state.epoch == 0
        remembered = self._lease.remembered
        # With what the lease remembers: a journal that was lost since must not look like one that never began.
        self._journal.take_epoch(remembered=remembered)
        mine = store_document(self.local.identity, self.place)
        known = self._journal.state.store
        if not known.get("cluster") or (mine["store_id"] and not known["store_id"]):
            self._journal.append([{"do": "meta", "store": {**known, **mine}}])
        if is_handed_over(known) and self._settings.after_handover == "recommission":
            made = ObjectId(self._journal.epoch, self._journal.writer, 0)
            with backend_errors():
                recall(self._store, self.place.prefix, self.now_ms, made)
            known = self._journal.state.store
            without = {name: value for name, value in known.items() if name != HANDOVER}
            self._journal.append([{"do": "meta", "store": without}])

    # -- running --------------------------------------------------------------------------------

    def run(self, *, once: bool = False, seal: bool = False, merge: bool = False) -> AttachResult:
        """Follow the store until ``stop`` is called, and drain (``once``: until the present end is durable).

        With ``once`` the last act is to merge what earlier runs have left due, so that many small runs keep a tier tidy;
        what this run has written is left to the next, which is not slowed down by it (``merge``: it is merged, too).

        Raises:
            FencedError: Another writer has taken over.
            StoreUnavailableError: ``once``: the store refuses us, or did not answer for ``give_up_s``.
        """
        dispatcher = self._running()
        if once:
            self.local.refresh()
            self.was_live = self.local.identity.is_live
            # What is here now, and no more: a broker that goes on writing would never let this end.
            target = dict(self.local.queues())
            # Asked before this run writes anything, or its own rounds would always make it due.
            was_due = dispatcher.is_merge_due
            dispatcher.follow(
                lambda: self._should_stop() or self._has_given_up(dispatcher), until_idle=True
            )
            self._settle(dispatcher)
            if self.timers:
                with contextlib.suppress(ClosedError):
                    self.timers.take_once()
            if seal:
                self.sealed += self._seal()
            self._finish_index()
            if was_due or merge:
                self._finish_merging(dispatcher)
            return self._result(target)
        self.patient.wait_out_refusals()
        if self.timers:
            self._start_thread("timers", self.timers.run)
        dispatcher.follow(self._should_stop)
        self._raise_fault()
        self._drain_once(dispatcher)  # now, so that the result counts what was in hand as well
        return self._result(dict(self.local.queues()))

    def look_again(self) -> AttachResult:
        """How far the tier is behind what the store has now. After ``run`` with ``once``."""
        self.local.refresh()
        return self._result(dict(self.local.queues()))

    def hand_over(self, metadata: Handover) -> str:
        """Keep what the broker knew, and mark the tier as that of a broker that is gone. After ``run`` with ``once``.

        Where the very same is kept already nothing is written: under another key it would count anew, and take groups that
        have gone on with a mount back to where they were with the broker. Rules of access that are not given again stay.

        Returns:
            Key of the object, below the broker's prefix.

        Raises:
            FencedError: Another writer has taken over.
            StoreUnavailableError: The store refuses us, did not answer for ``give_up_s``, or we were told to stop.
        """
        with backend_errors(), contextlib.suppress(DataError):
            known = read_handover(self._store, self.place.prefix, self._journal.state.store)
            if known is not None:
                metadata = replace(metadata, acl=metadata.acl or known.acl)
                if replace(known, time_ms=metadata.time_ms) == metadata:
                    return known.key
        # The object first, then the entry that names it: without an entry it does not exist (I5).
        dispatcher, data = self._running(), metadata.encode()
        key = handover_key("", metadata.time_ms, dispatcher.uploader.next_id())
        with backend_errors():
            put_own(self._store, self.place.prefix + key, data)
        named = {"key": key, "size_bytes": len(data), "time_ms": metadata.time_ms}
        done = threading.Event()
        store = {**self._journal.state.store, HANDOVER: named}
        dispatcher.watch_anew()
        # The build thread owns the journal, so it is asked to write the entry, and waited for.
        dispatcher.say(Fact({"do": "meta", "store": store}, done.set))
        while not (self._clock.wait(done, 0.25) or self._should_stop()):
            self._raise_given_up(dispatcher)
        self._raise_fault()
        if not done.is_set():
            raise StoreUnavailableError("we were told to stop before the mark was durable")
        return key

    @property
    def now_ms(self) -> int:
        """The time, UTC."""
        return int(self._clock.now_ms())

    def stop(self) -> None:
        """Take no new work. From any thread; not from a signal's handler, which may have interrupted the same lock."""
        self._stopping.set()

    def close(self) -> bool:
        """Upload what is in hand for at most ``drain_s``, end all threads, free the lease; whether all is durable."""
        self._stopping.set()
        drained = True
        try:
            if self.dispatcher:
                drained = self._drain(self.dispatcher)
                if drained:
                    self._journal.write_checkpoint(force=True)
        finally:
            # Order: nothing is tried any more, threads end, and only then the lease is free: a successor finds nobody at
            # work.
            self._abandon.set()
            if self.index:
                self.index.wake()
            for thread in self._threads:
                thread.join()
            self._lease.release()
            self.local.close()
            self.meter.close()
        return drained

    def _drain(self, dispatcher: TieredDispatcher) -> bool:
        fine = self.fault is None
        try:
            return fine and self._drain_once(dispatcher)
        finally:
            self._abandon.set()
            dispatcher.close()

    def _drain_once(self, dispatcher: TieredDispatcher) -> bool:
        """Whether everything in hand became durable; a draining that was cut short is not begun again."""
        if self._drained is None:
            self._drained = False
            began_s = self._clock.monotonic_s()
            self._drained = dispatcher.drain(self._settings.drain_s, limited=False)
            left_s = self._settings.drain_s - (self._clock.monotonic_s() - began_s)
            if self._drained and self.index and left_s > 0:
                self.index.flush(left_s, is_ending=True)
        return self._drained

    @property
    def fault(self) -> BaseException | None:
        """Why this writer ended by itself; None while it runs."""
        return self._fault or (self.dispatcher.fault if self.dispatcher else None)

    @property
    def is_stopping(self) -> bool:
        """It was told to end, or ends by itself."""
        return self._should_stop()

    @property
    def epoch(self) -> int:
        """Number of our epoch."""
        return self._journal.epoch

    def reconfigure(self, settings: AttachSettings) -> None:
        """Go on with what of other settings can change while it runs: topics, rates, ages, compression. From any thread."""
        self._settings = replace(
            self._settings,
            selects=settings.selects,
            dispatch=self._settings.dispatch.while_running(settings.dispatch),
        )
        if self.dispatcher is not None:
            self.dispatcher.reconfigure(self._settings.dispatch, self._queue_selects())
        if self.index is not None and settings.index is not None:
            self.index.reconfigure(settings.index)

    def _queue_selects(self) -> Callable[[MessageQueue], bool]:
        """Which queues are tiered, by the settings of now."""
        selects = self._settings.selects
        return lambda queue: queue.topic not in TIMER_TOPICS and selects(queue.topic)

    @property
    def paused_topics(self) -> frozenset[str]:
        """Topics of which nothing is taken just now."""
        return self._journal.state.paused_topics

    def selects(self, topic: str) -> bool:
        """Whether a topic is tiered. Timers have a place of their own."""
        return topic not in TIMER_TOPICS and self._settings.selects(topic)

    def _running(self) -> TieredDispatcher:
        assert self.dispatcher is not None
        return self.dispatcher

    def _should_stop(self) -> bool:
        return self._stopping.is_set() or self._fault is not None

    def _has_given_up(self, dispatcher: TieredDispatcher) -> bool:
        return dispatcher.seconds_without_success() > self._settings.give_up_s

    def _raise_given_up(self, dispatcher: TieredDispatcher) -> None:
        self._raise_fault()
        if self._has_given_up(dispatcher):
            # The one that uploads met, if any did: the lease may be in other trouble.
            troubles = sorted(self.patient.troubles(), key=lambda one: one.kind != "put")
            why = f": {troubles[0].told}" if troubles else ""
            raise StoreUnavailableError(
                f"nothing could be uploaded for {dispatcher.seconds_without_success():.0f} s{why}",
                where=self.meter.url,
                do=f"{'' if why else 'check the store; '}what is durable stays, attach again to go on",
            )

    def _settle(self, dispatcher: TieredDispatcher) -> None:
        """Flush until all is durable, for ``once``."""
        while not self._should_stop() and not dispatcher.drain(1.0):
            self._raise_given_up(dispatcher)
        self._raise_fault()

    def _finish_merging(self, dispatcher: TieredDispatcher) -> None:
        """For ``once``: merge what is due, as long as the store lets us."""

        def trouble() -> tuple[BackendError, float] | None:
            found = dispatcher.merge_trouble
            lasts = found and (not found[0].retriable or found[1] > self._settings.give_up_s)
            return found if lasts else None

        def must_end() -> bool:
            return self._should_stop() or self._has_given_up(dispatcher) or trouble() is not None

        dispatcher.watch_anew()
        dispatcher.finish_merging(must_end)
        self._raise_given_up(dispatcher)
        if found := trouble():
            raise StoreUnavailableError(
                f"every message is in the tier, but bundles could not be merged for {found[1]:.0f} s: {found[0]}",
                where=self.meter.url,
                do="check the store; the next run merges them",
            ) from found[0]

    def _finish_index(self) -> None:
        """For ``once``: index all that is there, unless told to stop or the tier does not answer any more."""
        while self.index and not self.index.flush(1.0) and not self._should_stop():
            self._raise_fault()
            if self.index.is_failing:
                break  # all messages are durable; the next writer goes on with the index

    def _seal(self) -> int:
        dispatcher = self._running()
        dispatcher.watch_anew()
        with backend_errors():
            sealed = dispatcher.seal_all(lambda: self._has_given_up(dispatcher))
        self._raise_given_up(dispatcher)
        return sealed

    def _result(self, target: dict[MessageQueue, QueueBounds]) -> AttachResult:
        state = self._journal.state
        behind = 0
        for queue, bounds in target.items():
            if self.selects(queue.topic):
                incarnation = state.incarnation(queue)
                start = incarnation.commit_offset if incarnation else self._start_of(queue, bounds)
                behind += max(0, bounds.end - start)
        waiting = self.local.waiting()
        counters = self._running().counters
        complete = behind == 0 and waiting.records == 0
        return AttachResult(complete, waiting, behind, counters.quarantined, counters.missing)

    def _raise_fault(self) -> None:
        fault = self.fault
        if isinstance(fault, BackendError):
            raise StoreUnavailableError(str(fault), do="check the store") from fault
        if fault is not None:
            raise fault

    def _renew(self) -> None:
        failed, level = 0, logging.WARNING
        while not self._clock.wait(self._abandon, self._lease.renewal_seconds):
            try:
                self._lease.renew()
            except FencedError as error:
                self._fault = error
                self._stopping.set()
                self._abandon.set()
                return
            except BackendError as error:
                failed += 1
                if failed == 1:  # how long it lasts, ``patient`` tells for the whole store
                    level = retry_level(error)
                    _LOG.log(level, "the lease could not be renewed, trying again: %s", error)
            else:
                if failed:
                    _LOG.log(level, "the lease is renewed again, after %d failed tries", failed)
                failed = 0

    def _wait_stopping(self, seconds: float) -> bool:
        return self._clock.wait(self._stopping, seconds)

    def _start_thread(self, name: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body, name=f"tiered-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()


class Starting:
    """Where queues begin that the tier has never met.

    Where the tier was attached before, a queue that it does not know has come since, or its topic was not selected: it
    begins at 0, so that what retention has taken of it meanwhile is a gap, as any other (invariant I12). When a broker is
    attached for the first time, what its queues forgot before is not a loss: they begin where they begin now, and
    only one that comes later begins at 0. With ``latest`` or a time the operator has said what is not wanted, and that is
    no loss either.

    Threads: any, once it knows. After a crash nothing has to survive.
    """

    def __init__(self, local: LocalStore, start: str | int) -> None:
        """Know nothing yet.

        Args:
            start: ``earliest``, ``latest``, or a time (UTC ms).
        """
        self._local = local
        self._start = start
        # No epoch was on record when the journal was read behind ``note``: nobody was attached before.
        self.is_first = False
        self._present: dict[MessageQueue, QueueBounds] = {}

    def note(self) -> None:
        """See what is there, before the journal is read and the epoch is taken."""
        if self._start == "latest":
            self._local.refresh()  # one that a broker runs on was opened up to its newest log file only
        self._present = dict(self._local.queues())

    def __call__(self, queue: MessageQueue, bounds: QueueBounds) -> QueueOffset:
        """Where a queue begins; below ``bounds.min`` where what is missing is a gap.

        Args:
            bounds: What the local store has of it now.
        """
        present = self._present.get(queue)
        if present and (bounds.min < present.min or bounds.end < present.end):
            present = None  # it has come again
        if isinstance(self._start, int):
            offset = self._local.offset_by_time(queue, self._start)
            if offset > bounds.min:
                return offset
        elif self._start == "latest" and present:
            return max(bounds.min, present.end)
        return self._first(queue, present) if self.is_first and present else QueueOffset(0)

    def _first(self, queue: MessageQueue, present: QueueBounds) -> QueueOffset:
        """Of a compacted topic what is left begins before what the commit log has still."""
        left = self._local.read_compacted(queue, QueueOffset(0), bytes_max=1, count_max=1)
        return min(present.min, left.base_offset) if left is not None else present.min
