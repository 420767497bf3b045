"""The seal thread: while messages are followed, segments that have rolled are merged and sealed.

Overview: the build thread says which queue has rolled (``rolled``); at the start everything that earlier reigns have left
is found from the state. One thread merges one segment (or row of short neighbours) at a time, and hands one ``seal`` or
``join`` action to the build thread, which alone writes the journal. It waits until the entry is durable before it begins
the next. A row waits until what lies behind it can't belong to it; that is looked at when the queue rolls, and now and then.

Ordering: data, index, entry (I2). A segment that has rolled takes no part any more, so nothing that is dispatched can
race with its sealing. When the queue begins anew meanwhile, or another has sealed the segment, replay ignores the action.

Bounds (I8): one segment and one request at a time; memory see ``tiered.dispatch.budget``. Dispatch and uploads never wait
for this thread. Sealing has the same upload rate as group commits, once more.

Retries and errors: what the store could not do is tried again, after the other segments, with pauses that double up to
``backoff_s_max``, for ever; what is stored is kept, so that each failure leaves at most one orphan. A damaged part leaves
its segment as it is for the rest of this reign: said once, and counted. A key that exists means a cloned process: fenced.

After a crash, or ``close`` in the middle: merged objects that no entry names are orphans; the next reign plans again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from backends.errors import AlreadyExistsError, BackendError
from tiered.crashpoints import reached
from tiered.dispatch.group_commit import refused, retry_level
from tiered.dispatch.packing import Packer
from tiered.dispatch.rounds import Fact
from tiered.dispatch.sealer import Sealer, SealJob
from tiered.dispatch.throttle import Throttle
from tiered.errors import TieredStoreError
from tiered.log.seal import SealPlan, may_grow, plan_seals

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Sequence

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.dispatch.counters import DispatchCounters
    from tiered.dispatch.settings import DispatchSettings
    from tiered.dispatch.uploads import Uploader
    from tiered.log.composite import CompositeFlatFile
    from tiered.log.state import Segment, TierState
    from tiered.model import MessageQueue

_LOG = logging.getLogger("tiered.dispatch")

_TRIES = 5
"""Of ``seal_all`` for one merged part, when the store could not do it."""
_TOGETHER = 64
"""Actions that ``seal_all`` hands over at once."""
_LOOK_S = 3.0
"""Between two looks at queues of which a row may still grow; nobody tells when it has become clear that it can't."""


class SealThread:
    """Seals what has rolled, and on request all there is."""

    def __init__(
        self,
        uploader: Uploader,
        store: ObjectStore,
        prefix: str,
        *,
        state: Callable[[], TierState],
        say: Callable[[Fact], None],
        known: Callable[[MessageQueue], CompositeFlatFile | None],
        end: Callable[[MessageQueue], bool],
        settings: DispatchSettings,
        counters: DispatchCounters,
        clock: Clock,
        rng: random.Random,
        stop: threading.Event,
    ) -> None:
        """Wire it; no thread runs yet.

        Args:
            uploader: Makes the objects.
            store: Where the parts are read.
            prefix: The broker's, ending in a slash.
            state: What the journal says now.
            say: Has the next entry say something (``RoundBuilder.state_fact``).
            known: The write side of a queue, if there is one yet.
            end: Ends a queue's last segment; False when something is under way there.
            settings: Policy, pauses and rate.
            counters: Where to count.
            clock: Time.
            rng: Jitter.
            stop: Ends everything here.
        """
        throttle = Throttle(settings.upload_rate_bytes_s, clock, stop)
        packer = Packer(settings.compression) if settings.compression else None
        self._sealer = Sealer(uploader, store, prefix, throttle.take, packer=packer)
        self._policy = settings.seal_policy
        self._state = state
        self._say = say
        self._known = known
        self._end = end
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._rng = rng
        self._stop = stop
        self._wake = threading.Event()
        self._one = threading.Lock()  # held while a segment is sealed
        self._lock = threading.Lock()
        self._rolled: set[MessageQueue] = set()
        self._growing: set[MessageQueue] = set()  # of the thread alone
        self._jobs: deque[SealJob] = deque()
        self._met: set[object] = (
            set()
        )  # keys of what waits, and of what replay refused though nothing had changed
        self._damaged: dict[object, TieredStoreError] = {}  # by key: left as they are in this reign

    def rolled(self, queue: MessageQueue) -> None:
        """Note that a queue has begun a new segment. From any thread; never blocks."""
        with self._lock:
            self._rolled.add(queue)
        self._wake.set()

    def wake(self) -> None:
        """Have the thread look at ``stop``."""
        self._wake.set()

    def run(self) -> None:
        """Body of the thread.

        Raises:
            FencedError: Another process writes under our id.
        """
        self._plan(self._state().queues)
        failures, look_s = 0, self._clock.monotonic_s()
        while not self._stop.is_set():
            with self._lock:
                rolled, self._rolled = self._rolled, set()
            if self._clock.monotonic_s() >= look_s:
                rolled |= self._growing
                look_s = self._clock.monotonic_s() + _LOOK_S
            self._plan(sorted(rolled))
            if not self._jobs:
                self._clock.wait(self._wake, 1.0)
                self._wake.clear()
                continue
            failures = 0 if self._work(failures) else failures + 1
            if failures:
                self._clock.wait(self._stop, self._pause_s(failures))

    def seal_all(self) -> int:
        """Seal every segment of every queue, also the open ones; of queues with something under way only the others.

        Returns:
            How many were sealed; fewer than there were when told to stop.

        Raises:
            BackendError: A part could not be read, or an object not written.
            TieredStoreError: A part is damaged (``DataError``, as a rule); its segment stays as it is, all others are
                sealed.
            FencedError: Another process writes under our id.
        """
        with self._one:
            ended = {queue for queue in self._state().queues if self._end(queue)}
            state = self._state()
            others = [queue for queue in state.queues if queue not in ended]
            plans = plan_seals(state, self._policy, queues=sorted(ended), with_open=True)
            plans += plan_seals(state, self._policy, queues=others)
            sealed, made = 0, list[SealJob]()
            for plan in plans:
                made += self._make_patiently(plan)
                if len(made) == _TOGETHER:
                    sealed += self._publish(made)
                    made = []
            sealed += self._publish(made)
        if damage := next((d for p in plans if (d := self._damaged.get(p.key))), None):
            raise damage
        return sealed

    # -- planning -------------------------------------------------------------------------------

    def _plan(self, queues: Collection[MessageQueue]) -> None:
        state = self._state()
        for plan in plan_seals(state, self._policy, queues=queues):
            if plan.key not in self._met and plan.key not in self._damaged:
                self._met.add(plan.key)
                self._jobs.append(SealJob(plan))
        self._growing.difference_update(queues)
        self._growing.update(queue for queue in queues if may_grow(state, queue, self._policy))

    def _find(self, plan: SealPlan) -> tuple[Segment, ...]:
        """What begins where the plan's first segment does, in the present life of its queue: as many as the plan has."""
        life = self._state().life(plan.queue)
        if life is None or life.incarnation != plan.incarnation:
            return ()
        wanted = plan.segment.base_offset, plan.segment.base_queue_offset
        for at, segment in enumerate(life.segments):
            if (segment.base_offset, segment.base_queue_offset) == wanted:
                return life.segments[at : at + len(plan.segments)]
        return ()

    def _is_current(self, plan: SealPlan) -> bool:
        return [s.parts for s in self._find(plan)] == [s.parts for s in plan.segments]

    # -- working --------------------------------------------------------------------------------

    def _work(self, failures: int) -> bool:
        """Take the next job; False when the store could not do it, and it waits again behind the others."""
        job = self._jobs.popleft()
        try:
            with self._one:
                if self._is_current(job.plan) and self._make(job):
                    self._publish([job])
        except AlreadyExistsError as error:
            raise refused(error) from error
        except BackendError as error:
            self._counters.seals_failed += 1
            if not failures:
                what = "sealing of %s failed, trying again: %s"
                _LOG.log(retry_level(error), what, job.plan.queue, error)
            self._jobs.append(job)
            return False
        if self._stop.is_set() or not self._is_current(job.plan):
            self._met.discard(job.plan.key)
        return True

    def _make(self, job: SealJob) -> bool:
        """Merge; False when told to stop, or when the segment is damaged."""
        key = job.plan.key
        try:
            return key not in self._damaged and self._sealer.advance(job, self._stop.is_set)
        except TieredStoreError as error:
            self._damaged[key] = error
            self._counters.unsealable_segments += 1
            _LOG.warning(
                "%s: the segment at log offset %d is damaged and stays as it is: %s",
                job.plan.queue,
                job.plan.segment.base_offset,
                error,
            )
            return False

    def _make_patiently(self, plan: SealPlan) -> list[SealJob]:
        """Merge now, with a few tries for each part; nothing when told to stop, or when the segment is damaged."""
        job, failures, made = SealJob(plan), 0, 0
        while True:
            try:
                return [job] if self._make(job) else []
            except AlreadyExistsError as error:
                raise refused(error) from error
            except BackendError as error:
                self._counters.seals_failed += 1
                failures, made = (1 if len(job.parts) > made else failures + 1), len(job.parts)
                if not error.retriable or failures == _TRIES:
                    raise
                self._clock.wait(self._stop, self._pause_s(failures))

    def _publish(self, jobs: Sequence[SealJob]) -> int:
        """Have the journal name what was made, and wait for it; how many segments are sealed by that."""
        told = [(job, threading.Event()) for job in jobs]
        for job, done in told:
            self._say(Fact(job.action(), done.set))
        for _, done in told:
            while not (done.is_set() or self._stop.is_set()):
                self._clock.wait(done, 0.25)
        return sum(self._learn(job) for job, done in told if done.is_set())

    def _learn(self, job: SealJob) -> bool:
        """Count a seal that is history, and tell the queue's write side."""
        reached("seal-known")
        segment = next(iter(self._find(job.plan)), None)
        if segment is None or not segment.sealed or segment.parts != tuple(job.parts):
            _LOG.info("%s: a segment has changed while it was sealed", job.plan.queue)
            return False
        file = self._known(job.plan.queue)
        if file:
            with file.lock:
                file.sealed(segment)
        merged, merged_bytes = job.rewritten()
        self._counters.sealed_segments += len(job.plan.segments)
        self._counters.merged_parts += merged
        self._counters.rewritten_bytes += merged_bytes
        packed = [log for log in job.made_logs() if log.is_packed]
        self._counters.packed_bytes += sum(log.payload_bytes for log in packed)
        self._counters.packed_stored_bytes += sum(log.stored_bytes for log in packed)
        return True

    def _pause_s(self, failures: int) -> float:
        settings = self._settings
        pause_s = settings.backoff_s_min * 2.0 ** min(failures - 1, 30)
        return min(pause_s, settings.backoff_s_max) * self._rng.uniform(0.5, 1.0)
