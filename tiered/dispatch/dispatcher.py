"""TieredDispatcher: three groups of threads that copy committed messages of a local store into the tier.

Overview:
    1. *dispatch thread*: follows the local store in log order. For each queue it only tries the queue's lock; on success
       the records are in the buffer, on failure it goes on at once and the queue is left to compensation.
    2. *compensate threads*: a scanner takes a round of all buffers when one is due (``tiered.dispatch.group_commit``), whose
       bundles the upload pool puts; queues that fell behind are read in bulk from their own consume queue, and so are all
       queues of a topic that has a rate.
    3. *build thread*: has the journal name what is durable (``tiered.dispatch.group_commit``).
    Beside them the *merge thread* gathers bundles (``tiered.dispatch.merging``); none of the three waits for it.

How to use it: ``start``; then ``dispatch`` from outside (plug-in way) or ``follow`` (attach way); ``drain``; ``close``.

Ordering: per queue strictly by queue offset; data and index in one step, then the entry (I2).

Bounds (I8): ``tiered.dispatch.settings`` states the memory. When it is full, following pauses; the broker never notices,
since nothing here is on its path. ``uploads_max`` bundles are on their way at once.

Retries and errors: a failed upload switches files and backs off with jitter, for ever (``tiered.log.composite``). Only
``FencedError``, a refusal by the store (permissions, no such bucket) and defects end the dispatcher: ``fault`` says why.

After a crash: everything is derived from the journal; nothing local has to survive.
"""

from __future__ import annotations

import functools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from tiered.dispatch.continuity import Continuity, Look
from tiered.dispatch.group_commit import (
    Fact,
    GroupCommitter,
    LineageTracker,
    RoundBuilder,
    Uploader,
)
from tiered.dispatch.merging import MergeThread
from tiered.dispatch.settings import DispatchContext, MemoryBudget, TopicRates
from tiered.errors import TieredStoreError
from tiered.log.composite import (
    ITEM_MEMORY_BYTES,
    AppendResult,
    CompositeFlatFile,
    QueueFiles,
    Start,
    Tail,
    size_of,
)
from tiered.log.state import queue_action

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.dispatch.settings import DispatchSettings, Throttle
    from tiered.journal.append import JournalWriter
    from tiered.local.interface import Follower, LocalStore, RecordBatch
    from tiered.log.composite import GroupCommit, Unknown
    from tiered.log.state import TierState
    from tiered.model import MessageQueue, QueueOffset

    """A queue that has taken a batch: bytes of its records, and what it takes in memory."""
    Grown = tuple[CompositeFlatFile, int, int]

# -- following ---------------------------------------------------------------------------------------
#
# Following a local store: window by window, until told to stop or until its end is reached.
#
# Overview: a ``Follower`` gives batches in log order, which are offered to dispatch. Before each offer the queues whose
# offsets fell are opened (``tiered.dispatch.continuity``), so that nothing of another incarnation is taken for the next of
# this one;
# when the end is reached, what is open is looked at.
#
# Threads: the dispatch thread only. After a crash nothing has to survive.

_LOG = logging.getLogger("tiered.dispatch")


class Following:
    """One run along a local store."""

    def __init__(
        self,
        local: LocalStore,
        starts: Mapping[MessageQueue, QueueOffset],
        *,
        files: QueueFiles,
        continuity: Continuity,
        compensation: Compensation,
        dispatch: Callable[[Sequence[RecordBatch]], list[bool]],
        throttle: Throttle,
        stop: Callable[[], bool],
    ) -> None:
        self._follower: Follower = local.follow(starts, stop)
        self._files = files
        self._continuity = continuity
        self._compensation = compensation
        self._dispatch = dispatch
        self._throttle = throttle
        self._left: set[MessageQueue] = set()  # of which the last batch was not taken
        self._batches = 0  # of the last window: about as many as the queues that are busy
        continuity.reopen(queue for queue in starts if files.known(queue))

    def step_bytes(self, settings: DispatchSettings) -> int:
        """Of the local log, to be looked at next."""
        return settings.step_bytes(self._batches)

    def step(self, window_bytes: int, *, until_idle: bool) -> bool:
        """Take the next window.

        Args:
            until_idle: The caller ends when there is nothing more.

        Returns:
            Whether that may be (``until_idle``: is) all for now.
        """
        for queue, start in self._continuity.take_moved().items():
            file = self._files.known(queue)
            self._follower.seek(queue, max(start, file.append_offset) if file else start)
        batches = self._follower.poll(window_bytes)
        fallen = self._follower.take_fallen()
        if fallen:
            self._continuity.reopen(fallen)
        for queue in self._left.intersection(fallen):
            # What it was behind is gone, and the follower, which has passed that place, gives nothing of what came instead.
            self._compensation.fall_behind(queue)
        for batch, was_taken in zip(batches, self._dispatch(batches), strict=True):
            (self._left.discard if was_taken else self._left.add)(batch.queue)
        self._batches = len(batches)
        self._throttle.take(sum(memoryview(batch.data).nbytes for batch in batches))
        is_done = not batches and self._follower.is_idle
        is_at_end = self._follower.is_at_end or is_done
        is_final = until_idle and is_done
        for queue in self._continuity.patrol(is_at_end=is_at_end, is_final=is_final):
            self._compensation.fall_behind(queue)
        return is_done if until_idle else self._follower.is_at_end

    def close(self) -> None:
        """Close the follower."""
        self._follower.close()


@dataclass(frozen=True, slots=True)
class PassedBy:
    """Which queues nothing is taken of for now."""

    selects: Callable[[MessageQueue], bool]  # those that are tiered
    paused: frozenset[str]  # topics that the journal says are paused
    pauses: Callable[[str], bool]  # others that are

    def by(self, queue: MessageQueue) -> bool:
        """Whether a queue is passed by."""
        is_paused = queue.topic in self.paused or self.pauses(queue.topic)
        return is_paused or not self.selects(queue)


def say_paused(topics: Iterable[str]) -> None:
    """Warn: nothing is lost as long as the broker has it."""
    for topic in sorted(topics):
        what = "%s is paused: nothing more of it is tiered, and what the broker expires meanwhile will be a gap"
        _LOG.warning(f"{what}; `tiered resume` goes on", topic)


def register(
    unknown: Unknown, say: Callable[[Fact], None], fall_behind: Callable[[MessageQueue], None]
) -> None:
    """Have the journal know queues that begin above 0, and those that are empty already.

    So their bounds are seen in the tier, and a restart goes on where they began, whatever came in between.

    Args:
        fall_behind: Leaves a queue to compensation, which records what is gone of it: no record of it will be met.
    """
    for queue, offset in unknown.above_0.items():
        begin = {"start": offset, "reason": "begins here"}
        say(Fact(queue_action("incarnation", queue, 0, **begin), lambda: None))
    if unknown.above_0:
        what = "new queues that begin above 0 (what came before is not in the local store, or not wanted): %d"
        _LOG.info(what, len(unknown.above_0))
    for queue in unknown.emptied:
        fall_behind(queue)


# -- dispatcher --------------------------------------------------------------------------------------


_STALL_S_MIN = 5.0
"""One slow upload is no trouble, however short the freshness."""
_STALL_AGAIN_S = 60.0
_SEAL_LOOK_S = 60.0
"""Between two looks for segments that are old though nothing comes behind them."""
STUCK_S = 600.0
"""Standing still for so long without a known reason is a defect, which a new start may heal."""


class TieredDispatcher:
    """Copies one local store into one tier."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        prefix: str,
        journal: JournalWriter[TierState],
        local: LocalStore,
        settings: DispatchSettings,
        start: Start,
        selects: Callable[[MessageQueue], bool],
        clock: Clock,
        rng: random.Random,
        escapes_case: bool = False,
    ) -> None:
        """Wire the parts; no thread runs yet.

        Args:
            start: Where a queue begins that the tier has never met.
        """
        self._context = DispatchContext(
            settings, MemoryBudget(settings.buffer_bytes_max), clock, rng
        )
        self.counters = self._context.counters  # what was done so far
        self.budget = self._context.budget  # memory held
        # Why the dispatcher ended by itself; None while it runs.
        self.fault: BaseException | None = None
        self._journal = journal
        self._local = local
        self._settings = settings
        self._passed = PassedBy(selects, journal.state.paused_topics, settings.pauses)
        self._rates = TopicRates(settings.rate_of, clock, self._context.stop)
        self._clock = clock
        self._files = QueueFiles(
            local,
            state=lambda: journal.state,
            policy=settings.commit_policy,
            start=start,
            selects=selects,
            made=lambda queue: self.continuity.reopen([queue]),
        )
        self._stop, self._wake = self._context.stop, self._context.wake
        # Makes the objects.
        self.uploader = self._make_uploader(store, prefix, escapes_case=escapes_case)
        self._catch_up_pool = ThreadPoolExecutor(settings.uploads_max, "tiered-catch-up")
        self._rounds = RoundBuilder(journal, clock, committed=self._committed)
        # Has the next journal entry say something else than parts (a ``Fact``). From any thread.
        self.say = self._rounds.state_fact
        self._commits = self._make_commits()
        # Holds what was taken against the local store.
        self.continuity = self._make_continuity(store, prefix)
        self._compensation = self._make_compensation()
        self._merging = self._make_merging(store, prefix)
        self._read_throttle = self._context.throttle(settings.read_rate_bytes_s)
        self._last_commit_s = clock.monotonic_s()
        self._reconfiguring = threading.Lock()
        self._stall_said_s: float | None = None
        self._sealing: list[threading.Event] = []
        self._seal_again_s = self._last_commit_s
        self._followed_s: float | None = None
        self.on_commit: Callable[[float], None] = lambda _seconds: None
        """Told after each round how long ago its oldest message was read."""
        self._threads: list[threading.Thread] = []

    def _make_uploader(self, store: ObjectStore, prefix: str, *, escapes_case: bool) -> Uploader:
        return Uploader(
            store,
            prefix,
            epoch=self._journal.epoch,
            writer=self._journal.writer,
            clock=self._clock,
            escapes_case=escapes_case,
            budget=self.budget,
        )

    def _make_commits(self) -> GroupCommitter:
        tells = self._local.identity.kind != "rocketmq"
        tracker = LineageTracker(self._local, lambda: self._journal.state) if tells else None
        submit = self._rounds.submit
        return GroupCommitter(
            self.uploader, submit, self._context, guard=self._guard, lineage=tracker
        )

    def _make_continuity(self, store: ObjectStore, prefix: str) -> Continuity:
        return Continuity(
            self._local,
            store,
            prefix,
            self._files,
            self._context,
            state=lambda: self._journal.state,
            say=self._rounds.state_fact,
        )

    def _make_compensation(self) -> Compensation:
        return Compensation(
            self._local,
            self._context,
            take=self._take_compensated,
            file=self.file,
            state_fact=self._rounds.state_fact,
            continuity=self.continuity,
            passes=self._is_passed,
            rates=self._rates,
        )

    def _make_merging(self, store: ObjectStore, prefix: str) -> MergeThread:
        return MergeThread(
            self.uploader,
            store,
            prefix,
            self._context,
            state=lambda: self._journal.state,
            say=self._rounds.state_fact,
        )

    # -- the plug-in way ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the compensate, build and merge threads."""
        bodies = {
            "compensate": self._compensate,
            "build": lambda: self._rounds.run(self._stop),
            "merge": self._merging.run,
        }
        for name, body in bodies.items():
            thread = threading.Thread(target=self._guard, args=(body,), name=f"tiered-{name}")
            self._threads.append(thread)
            thread.start()

    def dispatch(self, batch: RecordBatch) -> bool:
        """Offer committed records of one queue; never blocks. From one thread.

        Returns:
            False when the queue is busy or behind: compensation will take them from the local store.
        """
        return self.dispatch_all([batch])[0]

    def dispatch_all(self, batches: Sequence[RecordBatch]) -> list[bool]:
        """As ``dispatch``, of a whole window: what it costs beside its queues is paid once."""
        offered = sum(size_of(batch) + batch.count * ITEM_MEMORY_BYTES for batch in batches)
        self.budget.add(offered)  # before a round can give it back
        grown: list[Grown] = []
        with self._commits.growing() as appended:
            try:
                return [self._offer(batch, grown) for batch in batches]
            finally:
                self.budget.release(offered - sum(more for _, _, more in grown))
                appended += [(file, size) for file, size, _ in grown]

    def _offer(self, batch: RecordBatch, grown: list[Grown]) -> bool:
        if self._passed.by(batch.queue):
            return True
        if self._rates.rate_of(batch.queue.topic) or not self.continuity.may_take(
            file := self.file(batch.queue)
        ):
            return self._leave(batch.queue)
        if not file.lock.acquire(blocking=False):
            self.counters.lock_misses += 1
            return self._leave(batch.queue)
        try:
            if batch.base_offset >= file.append_offset:
                return self._append(file, batch, grown)
            known = file.append_offset, file.last_taken
        finally:
            file.lock.release()
        return self._offer_again(file, batch, known, grown)

    def _offer_again(
        self,
        file: CompositeFlatFile,
        batch: RecordBatch,
        known: tuple[QueueOffset, tuple[QueueOffset, int] | None],
        grown: list[Grown],
    ) -> bool:
        """As ``_offer``, of a batch that begins where others were taken before.

        It may take a look at the local store, and nobody holds a queue's lock while a disk is read.
        """
        is_odd = self.continuity.contradicts(batch, *known)
        if is_odd or not file.lock.acquire(blocking=False):
            self.counters.lock_misses += not is_odd
            return self._leave(batch.queue)
        try:
            if (file.append_offset, file.last_taken) != known:
                return self._leave(batch.queue)  # another thread was faster
            return self._append(file, batch, grown)
        finally:
            file.lock.release()

    # -- the attach way -------------------------------------------------------------------------

    def follow(self, stop: Callable[[], bool], *, until_idle: bool = False) -> None:
        """Body of the dispatch thread: follow the local store until ``stop`` says so.

        Args:
            until_idle: Return when the committed end is reached.
        """
        starts = self._files.starts(lambda queue: self._passed.by(queue) or self._limits(queue))
        fall_behind = self._compensation.fall_behind
        register(self._files.unknown(), self._rounds.state_fact, fall_behind)
        for queue in filter(self._limits, starts):
            fall_behind(queue)  # the log is not followed from where it is, which may be far behind
        following = Following(
            self._local,
            starts,
            files=self._files,
            continuity=self.continuity,
            compensation=self._compensation,
            dispatch=self.dispatch_all,
            throttle=self._read_throttle,
            stop=stop,
        )
        self._merging.stands_back = True
        say_paused(self._passed.paused)
        try:
            while not stop() and self.fault is None:
                self._followed_s = self._clock.monotonic_s()
                step_bytes = following.step_bytes(self._settings)
                if not self.budget.has_room(step_bytes):
                    self._wait_for_room()
                elif following.step(step_bytes, until_idle=until_idle):
                    if until_idle:
                        return
                    if self._merging.stands_back:
                        self._merging.go_on()
                    self._clock.wait(self._stop, self._settings.pause_s)
        finally:
            self._followed_s = None
            following.close()

    def file(self, queue: MessageQueue) -> CompositeFlatFile:
        """The write side of a queue; made on first use from what the journal says."""
        return self._files.file(queue)

    def lag(self) -> Mapping[MessageQueue, QueueOffset]:
        """Commit offset of each queue that this dispatcher has touched."""
        return self._files.commit_offsets()

    def rate_of(self, topic: str) -> int:
        """Bytes of a topic that are copied in a second, at most; 0: no limit. From any thread."""
        return self._rates.rate_of(topic)

    @property
    def is_settled(self) -> bool:
        """Everything that was taken is durable and named, and no queue is behind."""
        return self._is_settled(limited=True)

    def _is_settled(self, *, limited: bool) -> bool:
        """The same; without ``limited`` queues that wait by the rate of their topic do not count."""
        is_level = self.budget.used_bytes == 0 and self._compensation.is_idle(limited=limited)
        return is_level and self._rounds.is_idle

    def drain(self, timeout_s: float, *, limited: bool = True) -> bool:
        """Flush all buffers, and wait until all is durable; False when that took longer, or we ended by ourselves.

        Args:
            limited: What the rates of topics hold back as well; else nothing more of these is taken, for good.
        """
        if not limited:
            self._rates.end()
        self._wake.set()
        deadline_s = self._clock.monotonic_s() + timeout_s
        idle = threading.Event()
        while not self._is_settled(limited=limited) and self.fault is None:
            # What comes slice by slice is not torn into rounds as small.
            self._commits.flush = not limited or self._compensation.is_idle(limited=True)
            if self._clock.monotonic_s() >= deadline_s:
                return False
            self._clock.wait(idle, 0.005)
        return self.fault is None

    def seconds_without_success(self) -> float:
        """How long nothing could be uploaded although there was something to upload; else 0."""
        now_s = self._clock.monotonic_s()
        return min(self.seconds_without_commit(), now_s - self._commits.last_success_s)

    def seconds_without_commit(self) -> float:
        """How long nothing became durable and named although there was something; else 0."""
        now_s = self._clock.monotonic_s()
        if self._is_settled(limited=False):
            self._last_commit_s = now_s
        return now_s - self._last_commit_s

    def watch_anew(self) -> None:
        """Count what is pending from now on; before waiting for it, where nobody has looked for a while."""
        self._last_commit_s = self._clock.monotonic_s()

    @property
    def is_stalled(self) -> bool:
        """Nothing could be committed for longer than three times the freshness (and ``_STALL_S_MIN``)."""
        return self.seconds_without_commit() > max(_STALL_S_MIN, 3 * self._settings.freshness_s)

    @property
    def stuck(self) -> str:
        """What stands still without a reason that is known here, in one clause; empty: nothing does. From any thread."""
        followed_s, settings = self._followed_s, self._settings
        now_s = self._clock.monotonic_s()
        if followed_s and now_s - followed_s > STUCK_S and not settings.read_rate_bytes_s:
            return f"the local store was last looked at {now_s - followed_s:.0f} s ago"
        if self.seconds_without_commit() > STUCK_S and not settings.upload_rate_bytes_s:
            return f"nothing could be committed for {self.seconds_without_commit():.0f} s"
        return ""

    def seal_all(self, stop: Callable[[], bool]) -> int:
        """Seal the open segment of every queue that is settled, while started; how many are being sealed.

        Args:
            stop: Ends the waiting for the entry that says so.
        """
        told = self._seal(lambda _tail: True)
        for done in told:
            while not (done.is_set() or self._stop.is_set() or stop()):
                self._clock.wait(done, 0.25)
        if self.fault is not None:
            raise self.fault
        return len(told)

    def _seal(self, chooses: Callable[[Tail], bool]) -> list[threading.Event]:
        """Begin to seal open segments of queues that are settled; what is set when each is sealed."""
        told: list[threading.Event] = []
        for queue, incarnations in self._journal.state.queues.items():
            last = incarnations[-1].segments[-1] if incarnations[-1].segments else None
            if last and not last.sealed and chooses(Tail.of(incarnations[-1])):
                done = threading.Event()
                place = incarnations[-1].number
                action = queue_action("seal", queue, place, segment=last.base_offset)
                if self._files.end_segment(queue, partial(self.say, Fact(action, done.set))):
                    told.append(done)
        self.counters.sealed_segments += len(told)
        return told

    def seal_done(self) -> None:
        """Begin to seal segments that are full or old though nothing comes behind them; from one thread, not too often."""
        now_s = self._clock.monotonic_s()
        if now_s < self._seal_again_s or not all(done.is_set() for done in self._sealing):
            return  # what is told already waits for the store
        self._seal_again_s = now_s + min(_SEAL_LOOK_S, self._settings.segment_age_s_max / 4)
        policy, now_ms = self._settings.commit_policy, self._clock.now_ms()
        self._sealing = self._seal(lambda tail: tail.is_done(now_ms, policy))

    @property
    def is_merge_due(self) -> bool:
        """Whether bundles are to be gathered."""
        return self._merging.is_due()

    def finish_merging(self, stop: Callable[[], bool]) -> None:
        """Have the merge thread gather whatever is due, and wait for it until ``stop`` says so."""
        self._merging.go_on()
        idle = threading.Event()
        while self._merging.is_busy and not stop() and self.fault is None:
            self._clock.wait(idle, 0.02)

    @property
    def merge_trouble(self) -> tuple[BackendError, float] | None:
        """What keeps bundles from being gathered, and for how many seconds; None: nothing."""
        return self._merging.trouble()

    def merge_all(self) -> None:
        """Gather whatever is due now. While started; the merge thread may work at the same."""
        while self._merging.merge_once():
            pass

    def close(self) -> None:
        """End all threads; what is neither durable nor named is given up (it is still in the local store)."""
        self._stop.set()
        for wake in (self._wake.set, self._rounds.wake, self._merging.wake):
            wake()
        self._commits.close()
        for thread in self._threads:
            thread.join()
        self._catch_up_pool.shutdown(wait=True)

    def _leave(self, queue: MessageQueue) -> bool:
        """Leave a queue to compensation."""
        self._compensation.fall_behind(queue)
        self._wake.set()
        return False

    def _append(self, file: CompositeFlatFile, batch: RecordBatch, grown: list[Grown]) -> bool:
        """Whether there was no gap. With the queue's lock held."""
        before = file.append_offset, file.buffered_bytes
        result = file.append(batch, self._clock.monotonic_s())
        if result is AppendResult.GAP:
            return self._leave(file.queue)
        if result is AppendResult.APPENDED:
            size = file.buffered_bytes - before[1]
            items = file.append_offset - before[0]
            grown.append((file, size, size + items * ITEM_MEMORY_BYTES))
        return True

    def _take_compensated(
        self, file: CompositeFlatFile, batch: RecordBatch | None, reopened: int
    ) -> None:
        """Of a compensate thread: append what was read; None: commit what is there, a gap follows.

        Nothing is appended where others have come since the look, or where the queue was reopened since the batch was read:
        the batch may be of what the broker has lost, and the dispatch thread has what came in its place.
        """
        with file.lock:
            if batch is None:
                self._commits.take_now(file)
            elif (file.append_offset, self.continuity.reopened(file.queue)) == (
                batch.base_offset,
                reopened,
            ):
                grown: list[Grown] = []
                self._append(file, batch, grown)
                self.budget.add(sum(more for _, _, more in grown))  # before a round can take it
                self._commits.appended([(file, size) for _, size, _ in grown])
        if batch is not None:
            self._read_throttle.take(memoryview(batch.data).nbytes)

    def _committed(self, some: Sequence[GroupCommit]) -> None:
        """An entry names these."""
        counters = self.counters
        items = 0
        for commit in some:
            stored, number = commit.section()
            assert stored.table.rows["queue_offset"][number] == commit.queue_offset
            with commit.file.lock:
                commit.file.committed(commit)
            items += commit.count
            counters.record_bytes += commit.data_bytes
            counters.quarantined += commit.damaged
            counters.missing += commit.missing
        bundles = len({id(commit.stored) for commit in some})
        counters.messages += items
        counters.parts += len(some)
        counters.bundles += bundles
        counters.rounds = self._rounds.rounds
        counters.unmirrored = self._journal.unmirrored
        self.budget.release(items * ITEM_MEMORY_BYTES)
        if some:
            now_s = self._last_commit_s = self._clock.monotonic_s()
            self.on_commit(now_s - min(commit.oldest_s for commit in some))
            self._merging.rounds_made(bundles)

    def _wait_for_room(self) -> None:
        self._commits.is_awaited = True
        self._wake.set()
        self._clock.wait(self._context.room, 0.1)
        self._context.room.clear()
        self._commits.is_awaited = False

    def _compensate(self) -> None:
        """Body of the scanner."""
        while not self._stop.is_set():
            self._say_stall()
            self._commits.scan()
            with self._reconfiguring:
                self._obey_pauses()
            self.seal_done()
            self._compensation.begin(lambda body: self._catch_up_pool.submit(self._guard, body))
            self._clock.wait(self._wake, min(0.25, max(0.01, self._commits.due_in_s())))
            self._wake.clear()

    def _is_passed(self, queue: MessageQueue) -> bool:
        return self._passed.by(queue)

    def _limits(self, queue: MessageQueue) -> bool:
        return self._rates.rate_of(queue.topic) > 0

    def _obey_pauses(self) -> None:
        """Do as the journal says now."""
        paused, before = self._journal.state.paused_topics, self._passed.paused
        if paused != before:
            self._pass_by(replace(self._passed, paused=paused))
            say_paused(paused - before)
            for topic in sorted(before - paused):
                _LOG.info("%s is resumed", topic)

    def _pass_by(self, passed: PassedBy) -> None:
        """Pass other queues by; what was passed by of one that goes on is read in bulk. Of one thread at a time."""
        before, self._passed = (
            self._passed,
            passed,
        )  # before the local store is read: what is offered from now on is taken
        for queue in self._local.queues():
            if before.by(queue) and not passed.by(queue):
                self._compensation.fall_behind(queue)

    def reconfigure(
        self, settings: DispatchSettings, selects: Callable[[MessageQueue], bool]
    ) -> None:
        """Go on with other settings (``DispatchSettings.while_running``), and with other queues. From any thread."""
        with self._reconfiguring:
            self._settings = settings = self._settings.while_running(settings)
            self._files.reconfigure(settings.commit_policy, selects)
            self._commits.reconfigure(settings)
            self._merging.reconfigure(settings)
            self._read_throttle.set_rate(settings.read_rate_bytes_s)
            self._rates.reconfigure(settings.rate_of)
            self._seal_again_s = 0.0
            self._pass_by(replace(self._passed, selects=selects, pauses=settings.pauses))
        self._wake.set()

    def _say_stall(self) -> None:
        """Tell the log when nothing can be committed, once a minute, and when that is over."""
        now_s, said_s = self._clock.monotonic_s(), self._stall_said_s
        if self.is_stalled:
            if said_s is None or now_s - said_s >= _STALL_AGAIN_S:
                self._stall_said_s = now_s
                seconds, waiting = self.seconds_without_commit(), self.budget.used_bytes
                _LOG.warning(
                    "nothing could be committed for %.0f s; %d bytes wait in memory, the rest in the"
                    " local store; see to the tier's store",
                    seconds,
                    waiting,
                )
        elif said_s is not None:
            self._stall_said_s = None
            _LOG.warning("messages are committed again")

    def _guard(self, body: Callable[[], None]) -> None:
        """Run a thread's body; its error ends the dispatcher instead of vanishing."""
        try:
            body()
        except BaseException as error:  # noqa: BLE001 (reported through `fault`)
            if self.fault is None:
                self.fault = error
            if not isinstance(error, (TieredStoreError, BackendError)):
                _LOG.exception("a thread of the dispatcher ended by a defect")
            self._stop.set()
            self._wake.set()
            self._context.room.set()


# --------------------------------------------------------------------------------------------------
# Compensation: queues that the dispatch thread had to pass by are read in bulk from their own consume queue.
#
# Overview: ``fall_behind`` notes a queue; ``begin`` starts a catch-up for each noted one; a catch-up ends when the queue is
# level with the local store, when memory is full or the rate of its topic is used up (it is begun again at a later scan), or
# at a gap, which is recorded by the next journal entry as soon as everything before it is settled (invariant I12). A queue
# that is suspect is decided on first (``tiered.dispatch.continuity``).
#
# Ordering: the queue that was read longest ago is next, so that the queues of a topic share its rate. At most one catch-up a
# queue; what it reads and what dispatch offers meanwhile meet under the queue's lock, and what is repeated is cut off there.
# --------------------------------------------------------------------------------------------------


NOTHING_THERE = "the local store has neither entries nor records of these"
OVERTAKEN = "local retention overtook dispatch"
NEVER_MET = (
    "expired before anything of this queue was tiered: it came while nothing was attached, its topic was not selected,"
    " or local retention overtook dispatch"
)
"""Where a queue begins, nobody can tell these apart: the journal does not know what was selected, and when."""
_COUNT_MAX = 1 << 16
"""Items read at once; bounds the arrays of a queue of tiny messages."""


class Compensation:
    """Which queues are behind, and bringing them level. From any thread."""

    def __init__(
        self,
        local: LocalStore,
        context: DispatchContext,
        *,
        take: Callable[[CompositeFlatFile, RecordBatch | None, int], None],
        file: Callable[[MessageQueue], CompositeFlatFile],
        state_fact: Callable[[Fact], None],
        continuity: Continuity,
        passes: Callable[[MessageQueue], bool],
        rates: TopicRates,
    ) -> None:
        """Wire it.

        Args:
            passes: Whether nothing of a queue is taken just now: it is not behind then.
            take: Appends a batch to a queue's buffer, if the queue was reopened just so often; with None: commits what the
                buffer holds.
        """
        settings = context.settings
        self._local = local
        self._take = take
        self._budget = context.budget
        self._file = file
        self._state_fact = state_fact
        self._continuity = continuity
        self._passes = passes
        self._rates = rates
        self._counters = context.counters
        self._batch_bytes = min(settings.bundle_bytes, settings.step_bytes())
        self._stop = context.stop
        self._lock = threading.Lock()
        self._behind: set[MessageQueue] = set()
        self._turns: dict[MessageQueue, int] = {}  # when each was read last, in batches of all
        self._running: set[MessageQueue] = set()
        self._gaps: set[MessageQueue] = set()

    def is_idle(self, *, limited: bool) -> bool:
        """Whether no queue is behind; without ``limited`` those that wait by the rate of their topic do not count."""
        with self._lock:
            is_behind = any(limited or not self._rates.rate_of(one.topic) for one in self._behind)
            return not (is_behind or self._running or self._gaps)

    def fall_behind(self, queue: MessageQueue) -> None:
        """Note that a queue must be brought level."""
        with self._lock:
            self._behind.add(queue)

    def begin(self, submit: Callable[[Callable[[], None]], object]) -> None:
        """Start a catch-up for each queue that is behind and has none, and of whose topic something may be copied now."""
        with self._lock:
            self._behind = {queue for queue in self._behind if not self._passes(queue)}
            chosen = {
                queue
                for queue in self._behind - self._running - self._gaps
                if self._rates.allowed_bytes(queue.topic, 1)
            }
            self._behind -= chosen
            self._running |= chosen
        for queue in sorted(chosen, key=lambda one: (self._turns.get(one, 0), one)):
            submit(functools.partial(self._catch_up, queue))

    def _catch_up(self, queue: MessageQueue) -> None:
        level = False
        try:
            level = self._bring_level(self._file(queue))
        finally:
            with self._lock:
                self._running.discard(queue)
                if not level:
                    self._behind.add(queue)

    def _bring_level(self, file: CompositeFlatFile) -> bool:
        """Whether the queue is level with the local store now."""
        if not self._is_continuous(file):
            return False
        has_taken = False
        while not self._stop.is_set() and self._budget.has_room(self._batch_bytes):
            if self._passes(file.queue):
                return True
            topic = file.queue.topic
            bytes_max = self._rates.allowed_bytes(topic, self._batch_bytes)
            if not bytes_max:
                return False
            reopened = self._continuity.reopened(file.queue)
            with file.lock:
                start, last = file.append_offset, file.last_taken
            batch = self._read(file.queue, start, bytes_max)
            if batch is None:
                is_sound = not has_taken or self._is_as_taken(file.queue, start, last)
                return is_sound and not self._has_emptied(file, start)
            if batch.base_offset > start:
                self._record_gap(file, batch.base_offset)
                return False
            if self._continuity.look(file.queue, start, last) is not Look.SAME:
                self._continuity.suspect(
                    file.queue
                )  # looked at behind the read: what was read may be another's
                return False
            self._take(file, batch, reopened)
            self._rates.count(topic, memoryview(batch.data).nbytes)
            has_taken = True
            self._counters.compensated += 1
            self._turns[file.queue] = self._counters.compensated
        return False

    def _read(self, queue: MessageQueue, start: QueueOffset, bytes_max: int) -> RecordBatch | None:
        """The next of a queue; also what the commit log has lost, and a compacted topic keeps elsewhere."""
        batch = self._local.read(queue, start, bytes_max=bytes_max, count_max=_COUNT_MAX)
        if batch is not None and batch.base_offset <= start:
            return batch
        kept = self._local.read_compacted(queue, start, bytes_max=bytes_max, count_max=_COUNT_MAX)
        return kept or batch

    def _is_as_taken(
        self, queue: MessageQueue, start: QueueOffset, last: tuple[QueueOffset, int] | None
    ) -> bool:
        """Whether the broker still has what was taken last; a queue that is only shorter is left to the patrol.

        It may be gone since it was read, and its offset seen to fall before it was taken.
        """
        is_odd = self._continuity.look(queue, start, last) in {Look.DIFFERENT, Look.UNKNOWN}
        if is_odd:
            self._continuity.suspect(queue)
        return not is_odd

    def _has_emptied(self, file: CompositeFlatFile, start: QueueOffset) -> bool:
        """Whether retention has taken all that was left of a queue; that gap is on its way then."""
        bounds = self._local.queues().get(file.queue)
        if bounds is None or bounds.min <= start:
            return False
        self._record_gap(file, bounds.min)
        return True

    def _is_continuous(self, file: CompositeFlatFile) -> bool:
        """Whether the queue goes on where it was; what was taken of a suspect one is committed first."""
        if not self._continuity.may_take(file, waits=True):
            self._take(file, None, 0)
            return self._continuity.resolve(file)
        return True

    def _record_gap(self, file: CompositeFlatFile, end: QueueOffset) -> None:
        """When all before it is settled, have the next entry say that local retention was faster."""
        self._take(file, None, 0)
        with file.lock:
            start = file.commit_offset
            # What was polled before the expiry may have been taken since the read that found the gap.
            if not file.is_settled or start >= end:
                return
            file.hold()  # what was polled before the expiry must not slip in before the entry
            with self._lock:
                self._gaps.add(file.queue)

        def done() -> None:
            with file.lock:
                file.skip_to(end)
            with self._lock:
                self._gaps.discard(file.queue)
            self._counters.gaps += 1
            self._counters.missing += 0 if is_expired else end - start
            _LOG.warning(
                "%s: [%d, %d) was gone before it was tiered: %s", file.queue, start, end, reason
            )

        bounds = self._local.queues().get(file.queue)
        is_expired = bounds is None or end <= bounds.min
        why = OVERTAKEN if start > 0 else NEVER_MET
        reason = why if is_expired else NOTHING_THERE
        gap = {"start": start, "end": end, "reason": reason}
        self._state_fact(Fact(queue_action("gap", file.queue, file.incarnation, **gap), done))
