"""Continuity: what was taken last is held against the local store, so that nothing the broker truncated is silent.

Overview: a queue is *open* until its last record taken was met again in the local store at its queue offset (queue offset,
store time, unique key, body CRC: ``tiered.log.divergence``). It is looked at: when dispatch starts; when the follower
says that its offsets fell or that the store was looked at anew; behind each bulk read of compensation; and now and then
(``patrol``). Such a look costs one local read and no request to the tier, since the journal has the fingerprints. A queue
that does not fit is *suspect*: nothing of it is taken until a compensate thread has decided (``resolve``):

- the local store has the same messages, but fewer: a lagging copy. Nothing is done; it is looked at again when it grows.
- it has other messages from some offset on: ``truncate`` ends the queue there (power loss, truncation, a backup).
- nothing is in common: ``incarnation`` begins the queue anew (its topic was deleted and created again).

Queues of which there is no record to compare: "beginnings", below.

Ordering: the entry is written when all that was taken of the queue is durable and named; then the queue goes on from the
journal's state, and the follower is told where (``take_moved``).

Retries and errors: what could not be read of the tier is tried again at the next scan, for ever; a record of the tier that
is damaged or gone decides nothing, and holds up nothing.

Threads: ``dispatch`` owns ``open`` and the patrol, compensate threads resolve; the sets are under one lock. After a crash
nothing here survives: every queue is open again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from tiered.dispatch.group_commit import Fact, retry_level
from tiered.log.divergence import (
    HOLE,
    Change,
    begin_anew,
    fingerprint_in_tier,
    fingerprint_of_item,
    fingerprints_to_witness,
    measure,
    plan_beginning,
    plan_change,
    was_taken,
)
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from backends.base import ObjectStore
    from tiered.dispatch.settings import DispatchContext, DispatchCounters
    from tiered.local.interface import LocalStore, RecordBatch
    from tiered.log.composite import CompositeFlatFile, QueueFiles, Start
    from tiered.log.parts import Incarnation, TierState
    from tiered.model import QueueBounds


# -- changes -----------------------------------------------------------------------------------------
#
# Tells operators what was said of a queue that the broker has changed.

_LOG = logging.getLogger("tiered.dispatch")


def tell(queue: MessageQueue, change: Change, counters: DispatchCounters) -> None:
    """Count and log a change that an entry has made history."""
    if change.is_anew and change.action["incarnation"] == 0:
        _LOG.info("%s begins at %d", queue, change.start)
    elif change.is_anew:
        counters.begun_anew += 1
        _LOG.warning(
            "%s begins anew at %d: nothing of its history up to %d is in the local store. It stays readable as"
            " an older incarnation",
            queue,
            change.start,
            change.end,
        )
    else:
        counters.truncated += 1
        _LOG.warning(
            "%s: the broker has truncated [%d, %d), which was in the tier. It is kept; the queue goes on at %d",
            queue,
            change.start,
            change.end,
            change.start,
        )


# -- beginnings --------------------------------------------------------------------------------------
#
# Beginnings: queues of which the tier has no record that could be held against the local store.
#
# A queue has begun, and nothing of it was taken yet; or all of it has expired in the tier. Such a queue is another one if
# it
# ends before it would go on, or, where nothing was ever taken, if it would begin earlier than where it was to begin. Where
# all has expired and the local queue has grown past that place, nobody can tell.
#
# Threads: any; after a crash nothing here survives, and nothing has to.


class Look(Enum):
    """What a look at the local store says of the last record taken."""

    SAME = "same"
    """It is there, or has expired, or cannot be compared there: go on."""
    SHORTER = "shorter"
    """The local queue ends before it."""
    UNKNOWN = "unknown"
    """The journal does not say what was taken last: the tier has to be read."""
    DIFFERENT = "different"
    """Another record is in its place."""


class Beginnings:
    """Says of a queue without a record to compare whether it may begin, or go on, where it was to."""

    def __init__(self, local: LocalStore, state: Callable[[], TierState], start: Start) -> None:
        self._local = local
        self._state = state
        self._start = start
        self._right: dict[MessageQueue, QueueOffset] = {}

    def look(self, queue: MessageQueue, start: QueueOffset) -> Look:
        """Whether a queue may begin (or go on) at ``start``. One small local read, or two."""
        if start == 0:
            return Look.SAME
        before = self._local.read(queue, QueueOffset(start - 1), bytes_max=1, count_max=1)
        if before is None:
            if self._local.read_compacted(queue, start, bytes_max=1, count_max=1) is not None:
                return Look.SAME
            first = self._local.read(queue, QueueOffset(0), bytes_max=1, count_max=1)
            return (
                Look.SAME if first is None and not self._has_emptied(queue, start) else Look.SHORTER
            )
        incarnation = self._state().incarnation(queue)
        is_right = (incarnation is not None and was_taken(incarnation)) or self.is_right(
            queue, start
        )
        return Look.SAME if is_right or before.base_offset >= start else Look.DIFFERENT

    def is_right(self, queue: MessageQueue, start: QueueOffset) -> bool:
        """Whether it was decided that a queue may go on there, whatever lies before."""
        return self._right.get(queue) == start

    def _has_emptied(self, queue: MessageQueue, start: QueueOffset) -> bool:
        """Whether messages came behind ``start`` and are all gone again: a gap, which compensation records."""
        bounds = self._local.queues().get(queue)
        return bounds is not None and bounds.min > start

    def decide(
        self,
        queue: MessageQueue,
        incarnation: Incarnation | None,
        bounds: QueueBounds,
        goes_on: QueueOffset,
    ) -> Change | None:
        """Decide on a queue that did not look the same.

        Args:
            incarnation: Its present incarnation in the tier, in which nothing is (left); None: the journal has not met it.

        Returns:
            What the journal has to say; None when it may well go on there.
        """
        change = plan_beginning(queue, incarnation, bounds, goes_on, self._start(queue, bounds))
        if change is None:
            self._right[queue] = goes_on
        return change


# -- continuity --------------------------------------------------------------------------------------


_AT_ONCE = 256
"""Open queues looked at in one step."""
_PATROL_S = 0.25
_PATROL_QUEUES = 16
"""Every ``_PATROL_S`` so many queues at most: about one percent of a processor."""
_AGAIN_S = 2.0
"""A queue is patrolled at most so often; and so often one is resolved of which the journal has no fingerprint."""
_COMPLAIN_S = 60.0
_RIPE_S = 30.0
"""A queue that is shorter than the tier is resolved at the latest after this time, if the follower lags so long."""


@dataclass(frozen=True, slots=True)
class _Vouched:
    """A last record that cannot be compared by the journal's fingerprint alone, and was decided on."""

    offset: QueueOffset
    fingerprints: tuple[int, ...]
    """What the local store had there, and before it, downwards to the nearest message that both sides have."""


@dataclass(frozen=True, slots=True)
class _Short:
    """A local queue that is shorter than the tier, and has nothing else."""

    end: QueueOffset  # of the local queue
    fingerprint: int | None
    """Of its last record; None: it has none, since it was deleted or retention has emptied it."""


class Continuity:
    """Holds each queue's last record taken against the local store, and has the journal say what the broker truncated."""

    def __init__(
        self,
        local: LocalStore,
        store: ObjectStore,
        prefix: str,
        files: QueueFiles,
        context: DispatchContext,
        *,
        state: Callable[[], TierState],
        say: Callable[[Fact], None],
    ) -> None:
        """Wire it.

        Args:
            store: Where tier records are read, when fingerprints do not decide.
            files: The write sides, which are made anew when a queue has moved; and where new queues begin.
        """
        self._local = local
        self._store = store
        self._prefix = prefix
        self._files = files
        self._state = state
        self._beginnings = Beginnings(local, state, files.start)
        self._say = say
        self._counters = context.counters
        self._clock = context.clock
        self._lock = threading.Lock()
        self._open: dict[MessageQueue, float] = {}
        self._reopened: dict[MessageQueue, int] = {}  # how often: what was decided before is of old
        self._suspect: set[MessageQueue] = set()
        self._said: set[MessageQueue] = set()
        self._moved: dict[MessageQueue, QueueOffset] = {}
        self._vouched: dict[MessageQueue, _Vouched] = {}
        self._lagging: dict[MessageQueue, _Short] = {}
        self._complained_s: dict[MessageQueue, float] = {}
        self._ring: deque[MessageQueue] = deque()
        self._ring_s = self._patrol_s = self._read_s = self._clock.monotonic_s()

    # -- of the dispatch thread -----------------------------------------------------------------

    def reopen(self, queues: Iterable[MessageQueue]) -> None:
        """Have these queues looked at before anything more of them is taken."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            for queue in queues:
                self._open.setdefault(queue, now_s)
                self._reopened[queue] = self._reopened.get(queue, 0) + 1

    def reopened(self, queue: MessageQueue) -> int:
        """How often a queue was reopened; what was read before the last time may be of what the broker has lost."""
        return self._reopened.get(queue, 0)

    def may_take(self, file: CompositeFlatFile, *, waits: bool = False) -> bool:
        """Whether the queue goes on where it was; False: compensation has to decide. Cheap when it is not open.

        Args:
            waits: Wait for its lock; else a queue whose lock is taken is left to compensation.
        """
        queue = file.queue
        if queue not in self._open and queue not in self._suspect:
            return True
        if not waits and file.lock.locked():
            self._counters.lock_misses += 1
            return False
        return self._is_fine(file, is_ripe=True, reads=True) and queue not in self._open

    def patrol(self, *, is_at_end: bool, is_final: bool = False) -> list[MessageQueue]:
        """Look at some queues.

        Args:
            is_at_end: The follower has come to the end, so a queue that is shorter is not just not followed yet.
            is_final: Look at all that are open, and leave none undecided.

        Returns:
            Those that compensation has to see to: they are suspect now, or what comes next is in a compaction log only.
        """
        now_s = self._clock.monotonic_s()
        if now_s < self._patrol_s and not is_final:
            return []
        self._patrol_s = now_s + _PATROL_S
        with self._lock:
            queues = [*self._open.items()]
        found = []
        for queue, since_s in queues if is_final else queues[:_AT_ONCE]:
            is_ripe = is_final or is_at_end or now_s >= since_s + _RIPE_S
            reads = is_final or self._may_read(now_s)
            is_fine = self._is_fine_queue(queue, is_ripe=is_ripe, reads=reads, is_final=is_final)
            if not is_fine or self._is_compacted_behind(queue):
                found.append(queue)
        ring = self._next_in_ring(now_s)
        return found + [
            queue
            for queue in ring
            if not self._is_fine_queue(queue) or self._is_compacted_behind(queue)
        ]

    def _is_compacted_behind(self, queue: MessageQueue) -> bool:
        """Whether what comes next has expired, and a compaction log has more: the follower will not meet it."""
        file = self._files.known(queue)
        if file is None:
            return False
        left = self._local.read_compacted(queue, file.append_offset, bytes_max=1, count_max=1)
        return left is not None

    def take_moved(self) -> dict[MessageQueue, QueueOffset]:
        """Queues that go on elsewhere since the last call, and where."""
        if not self._moved:
            return {}
        with self._lock:
            moved, self._moved = self._moved, {}
        return moved

    def _may_read(self, now_s: float) -> bool:
        """Whether a queue may be resolved now only because the journal has no fingerprint of it: one now and then."""
        return now_s >= self._read_s

    def _next_in_ring(self, now_s: float) -> list[MessageQueue]:
        if not self._ring and now_s >= self._ring_s + _AGAIN_S:
            self._ring_s = now_s
            self._ring.extend(self._state().queues)
            self._forget_emptied()
        return [self._ring.popleft() for _ in range(min(_PATROL_QUEUES, len(self._ring)))]

    def _forget_emptied(self) -> None:
        """Queues that have grown since they were empty, and are empty again, are looked at anew: a gap to be told."""
        emptied = [
            (queue, one.end)
            for queue, one in list(self._lagging.items())
            if one.fingerprint is None
        ]
        bounds = self._local.queues() if emptied else {}
        for queue, end in emptied:
            if queue in bounds and bounds[queue].end != end:
                self._lagging.pop(queue, None)

    def _is_fine_queue(
        self,
        queue: MessageQueue,
        *,
        is_ripe: bool = True,
        reads: bool = False,
        is_final: bool = False,
    ) -> bool:
        file = self._files.known(queue)
        if file is None:
            with self._lock:
                self._open.pop(queue, None)
            return True
        if file.lock.locked():
            return not is_final  # the next patrol will see; compensation, when there is none
        return self._is_fine(file, is_ripe=is_ripe, reads=reads)

    def _is_fine(self, file: CompositeFlatFile, *, is_ripe: bool, reads: bool) -> bool:
        """Look; a queue that is fine is not open any more, another is suspect, or is left open."""
        queue = file.queue
        if queue in self._suspect:
            return False
        reopened = self.reopened(queue)
        with file.lock:
            start, last = file.append_offset, file.last_taken
        look = self.look(queue, start, last)
        with file.lock:
            is_late = (file.append_offset, file.last_taken) != (start, last)
        is_fine = look is Look.SAME
        waits = (look is Look.UNKNOWN and not reads) or (
            look is Look.SHORTER and (self._is_lag_known(queue) or not is_ripe)
        )
        with self._lock:
            if queue in self._suspect:  # another thread has found it so, of what was taken since
                return False
            is_late = is_late or self.reopened(queue) != reopened
            since_s = self._open.pop(queue, self._clock.monotonic_s())
            if waits or (is_fine and is_late):  # what was looked at is not what counts now
                self._open[queue] = since_s  # behind the others
            if is_fine:
                self._lagging.pop(queue, None)
            if not is_fine and not waits:
                self._suspect.add(queue)
                if look is Look.UNKNOWN:
                    self._read_s = self._clock.monotonic_s() + _AGAIN_S
        return is_fine or waits

    def _is_lag_known(self, queue: MessageQueue) -> bool:
        """Whether it was found before that the local queue is a lagging copy, and nothing has changed there since."""
        known = self._lagging.get(queue)
        if known is None:
            return False
        if known.fingerprint is None:
            return self._local_fingerprint(queue, 0) is None
        is_longer = self._local_fingerprint(queue, known.end) is not None
        return not is_longer and self._local_fingerprint(queue, known.end - 1) == known.fingerprint

    # -- of any thread --------------------------------------------------------------------------

    def look(
        self, queue: MessageQueue, start: QueueOffset, last: tuple[QueueOffset, int] | None
    ) -> Look:
        """Hold the last record taken against the local store. One small local read, two where nothing was taken."""
        if self._is_other_topic(queue):
            return Look.DIFFERENT
        if last is None:
            return self._beginnings.look(queue, start)
        offset, fingerprint = last
        found = self._local_fingerprint(queue, offset)
        if found is None:
            found = self._compacted_fingerprint(queue, offset)
        if found is None:
            return Look.SHORTER
        if fingerprint > 0 and found > 0:
            return Look.SAME if found == fingerprint else Look.DIFFERENT
        return Look.SAME if found == 0 or self._is_vouched(queue, offset, found) else Look.UNKNOWN

    def _is_other_topic(self, queue: MessageQueue) -> bool:
        """Whether the store says that the queue is of another topic than the one that the tier has under this name."""
        incarnation = self._state().incarnation(queue)
        known = incarnation.lineage if incarnation else None
        if known is None or not known.topic_id:
            return False
        local = self._local.lineage(queue)
        return local is not None and local.topic_id not in {None, known.topic_id}

    def _is_vouched(self, queue: MessageQueue, offset: QueueOffset, found: int) -> bool:
        """Whether a record that cannot be compared was decided on, and nothing has changed there since."""
        vouched = self._vouched.get(queue)
        if vouched is None or (vouched.offset, vouched.fingerprints[0]) != (offset, found):
            return False
        return self._is_as_seen(queue, vouched)

    def _is_as_seen(self, queue: MessageQueue, vouched: _Vouched) -> bool:
        """Whether the local store still has what was seen, or retention has taken it."""
        for at, fingerprint in enumerate(vouched.fingerprints):
            found = self._local_fingerprint(queue, vouched.offset - at)
            if found not in {fingerprint, 0} and not (found is None and not fingerprint):
                return False
        return True

    def contradicts(
        self,
        batch: RecordBatch,
        start: QueueOffset,
        last: tuple[QueueOffset, int] | None,
    ) -> bool:
        """Whether a batch has another record where the last one was taken: then the queue is suspect.

        Compensation may have taken what the follower, which was behind it, never met, and what the broker then truncated:
        no offset falls for the follower. Nor does one where nothing was taken, and the batch begins before the place where
        the queue was to begin. A few small local reads where records cannot be compared.
        """
        if last is None:
            is_odd = not self._beginnings.is_right(batch.queue, start)
        else:
            is_odd = self._is_another(batch.queue, last, batch)
        if is_odd:
            self.suspect(batch.queue)
        return is_odd

    def _is_another(
        self, queue: MessageQueue, last: tuple[QueueOffset, int], batch: RecordBatch
    ) -> bool:
        """Whether a batch has another record in the place of the last one taken, or one that only the tier can tell."""
        (offset, fingerprint), number = last, last[0] - batch.base_offset
        if not 0 <= number < batch.count:
            return False
        found = fingerprint_of_item(batch, number) if batch.sizes[number] else HOLE
        if fingerprint > 0 and found > 0:
            return found != fingerprint
        return not self._is_vouched(queue, offset, found)

    def suspect(self, queue: MessageQueue) -> None:
        """Take nothing more of a queue until it is decided."""
        with self._lock:
            self._suspect.add(queue)

    @property
    def lagging(self) -> int:
        """Queues of which the tier has more than the local store, and nothing else: a lagging copy."""
        return sum(one.fingerprint is not None for one in list(self._lagging.values()))

    def _local_fingerprint(self, queue: MessageQueue, offset: int) -> int | None:
        """Fingerprint of a local record; 0 when it has expired, ``HOLE``, or None when the queue ends before it."""
        batch = self._local.read(queue, QueueOffset(offset), bytes_max=1, count_max=1)
        if batch is None:
            return None
        if batch.base_offset != offset:
            return 0
        return fingerprint_of_item(batch, 0) if batch.sizes[0] else HOLE

    def _compacted_fingerprint(self, queue: MessageQueue, offset: int) -> int | None:
        """Fingerprint of a record that only the compaction log has, since all of the queue has expired.

        0 when newer ones have taken its place: the log goes on behind it. None when it ends before it.
        """
        left = self._local.read_compacted(queue, QueueOffset(offset), bytes_max=1, count_max=1)
        if left is None:
            return None
        is_there = left.base_offset == offset and left.sizes[0] > 0
        return fingerprint_of_item(left, 0) if is_there else 0

    # -- of a compensate thread -----------------------------------------------------------------

    def resolve(self, file: CompositeFlatFile) -> bool:
        """Decide on a suspect queue.

        Returns:
            Whether the queue may be taken on from where it stands; else ask again later: something of it is not
            durable yet, an entry is on its way, or the tier could not be read.
        """
        queue = file.queue
        with self._lock:
            if queue not in self._suspect:
                return True
            if queue in self._said:
                return False
            reopened = self.reopened(queue)
        if not _is_still(file):
            return False
        try:
            change, is_sure = self._decide(file)
        except BackendError as error:
            self._complain(queue, error)
            return False
        if change is None:
            with self._lock:  # one that lags stays open: before more of it is taken it has to fit
                if not is_sure or self.reopened(queue) != reopened:
                    return False  # the broker has changed it meanwhile, perhaps behind what was looked at
                self._suspect.discard(queue)
                self._open.pop(queue, None)
                if queue in self._lagging:
                    self._open[queue] = self._clock.monotonic_s()
            return True
        if not _is_still(file, hold=True):
            return False
        with self._lock:
            self._said.add(queue)
        self._say(Fact(change.action, lambda: self._done(file, change)))
        return False

    def _complain(self, queue: MessageQueue, error: BackendError) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._complained_s.get(queue, now_s):
            self._complained_s[queue] = now_s + _COMPLAIN_S
            what = "%s cannot be held against the tier, trying again: %s"
            _LOG.log(retry_level(error), what, queue, error)

    def _decide(self, file: CompositeFlatFile) -> tuple[Change | None, bool]:
        """What the journal has to say; and whether the local store was still, as far as nobody would see it later."""
        queue, incarnation = file.queue, self._state().incarnation(file.queue)
        self._lagging.pop(queue, None)
        bounds = self._local.queues().get(queue)
        if bounds is None or bounds.end == bounds.min:
            self._lagging[queue] = _Short(bounds.end if bounds else QueueOffset(0), None)
            return None, True
        if incarnation is not None and self._is_other_topic(queue):
            return begin_anew(queue, incarnation, bounds), True
        if incarnation is None or not incarnation.segments:
            return self._decide_by_memory(file, incarnation, bounds), True
        from tiered.log.reader import QueueReader  # noqa: PLC0415 (start-up loads only what is needed)

        reader = QueueReader.of_incarnation(self._store, self._prefix, queue, incarnation)

        def local_fingerprint(offset: int) -> int:
            return self._local_fingerprint(queue, offset) or 0

        def tier_fingerprint(offset: int) -> int:
            return fingerprint_in_tier(reader, offset)

        # Both before the histories are held against each other: what comes to the store meanwhile is known to nobody.
        is_shorter = bounds.end < incarnation.commit_offset
        short = _Short(bounds.end, local_fingerprint(bounds.end - 1)) if is_shorter else None
        last, vouched = file.last_taken, None
        if last and (not last[1] or local_fingerprint(last[0]) == HOLE):
            low = min(last[0], max(incarnation.min_offset, bounds.min))
            vouched = _Vouched(
                last[0], fingerprints_to_witness(low, last[0], local_fingerprint, tier_fingerprint)
            )
        change = plan_change(
            queue,
            incarnation,
            bounds,
            local_fingerprint=local_fingerprint,
            tier_fingerprint=tier_fingerprint,
            read_items=lambda part, count: measure(self._store, self._prefix, part, count),
        )
        if change is None and vouched:
            if not self._is_as_seen(queue, vouched):
                return None, False
            self._vouched[queue] = vouched
        if change is None and short:
            self._lagging[queue] = short
        return change, True

    def _decide_by_memory(
        self, file: CompositeFlatFile, incarnation: Incarnation | None, bounds: QueueBounds
    ) -> Change | None:
        """The tier has nothing (left) that could be compared; what was taken last may be known all the same."""
        queue, last = file.queue, file.last_taken
        if incarnation and last:
            look, found = self.look(queue, file.append_offset, last), None
            if look is Look.UNKNOWN:
                found = self._local_fingerprint(queue, last[0])
            # A hole that ends the tier must not hide a message: what comes with it may be new, too.
            if look is Look.DIFFERENT or (found is not None and found > 0):
                return begin_anew(queue, incarnation, bounds)
            if found == HOLE:
                self._vouched[queue] = _Vouched(last[0], (found,))
        return self._beginnings.decide(queue, incarnation, bounds, file.append_offset)

    def _done(self, file: CompositeFlatFile, change: Change) -> None:
        """The entry is durable."""
        queue, incarnation = file.queue, self._state().incarnation(file.queue)
        is_history = incarnation is not None and incarnation.commit_offset == change.start
        if is_history:
            self._files.renew(queue)
        else:  # a seal has merged the part meanwhile: plan again
            with file.lock:
                file.release()
        with self._lock:
            self._said.discard(queue)
            if is_history:
                self._suspect.discard(queue)
                self._open.pop(queue, None)
                self._vouched.pop(queue, None)
                self._moved[queue] = change.start
        if is_history:
            tell(queue, change, self._counters)


def _is_still(file: CompositeFlatFile, *, hold: bool = False) -> bool:
    """Whether nothing of a queue is in hand and no entry about it on its way; it is held then, if wanted."""
    with file.lock:
        still = file.is_settled and not file.is_held
        if still and hold:
            file.hold()
    return still
