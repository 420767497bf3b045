"""TieredMessageStore: a broker's store and its tier as one, by read policy.

Overview
    Each read looks where its queue offset is now (``fetcher.statuses``), reads there, and tells how it ended in
    RocketMQ's words (``fetcher.statuses``). A reader goes on at ``next_begin``; it may change sides with every read.

No seams
    Bounds are looked at with every read, and what comes back is held against the offset that was asked for. So what local
    retention takes away between the look and the read is read from the tier. Before it is said that an offset is in
    neither side, both are looked at anew: the journal may have moved on.

When the tier is slow or gone
    What the local side has is served within the deadline: where the policy prefers the tier, the tier gets a part of the
    time, and for a while after it failed the local side is asked first. What only the tier has is ``TRY_AGAIN``, and
    nothing has moved.

Retries: none; the store below the fetcher has them. It keeps nothing but when the tier failed last; for any thread. The
sides, their threads and their closing are the caller's.

Deadlines: what goes over the wire ends with a ``StoreUnavailableError`` when its time is over; reads of the local disk
are not interrupted.

Times
    The local side answers what it surely can: when its first message is earlier than the time that is asked for, the answer
    is not below it. Else the tier is searched, below the local minimum only; so each message is looked for on one side.
    Store times that are out of order just around the local minimum are taken as the local side has them.
"""

from __future__ import annotations

import os
from dataclasses import field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from backends.base import FORKED, OPEN_ANEW
from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from fetcher.statuses import (
    Both,
    GetResult,
    GetStatus,
    KeyAnswer,
    Policy,
    Scan,
    ScanLimits,
    Side,
    beginning_of,
    is_shorter,
    judge_offset,
    merge_answers,
    plan_sides,
)
from fetcher.transfers import AskingStore, run_by
from tiered.errors import (
    ClosedError,
    DataError,
    ExpiredError,
    InvalidError,
    StoreUnavailableError,
    TieredStoreError,
)
from tiered.log.divergence import fingerprint_of_item
from tiered.log.parts import Gap
from tiered.log.reader import StoreRanges, find_by_time
from tiered.model import Boundary, MessageQueue, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from fetcher.fetcher import TieredMessageFetcher
    from fetcher.filters.batch import Filter
    from fetcher.statuses import KeyLookup, KeyQuery
    from tiered.clock import Clock
    from tiered.local.interface import RecordBatch
    from tiered.log.cursor import HistoryPlace, IncarnationView
    from tiered.log.decode import TierBatch
    from tiered.log.reader import TierReader


# -- message_store


@dataclass(frozen=True, slots=True)
class MessageStoreSettings:
    """How a ``TieredMessageStore`` reads."""

    policy: Policy = Policy.NOT_IN_DISK  # for requests that name none
    timeout_s: float = 10.0  # deadline of a request that names none
    tier_share: float = 0.5  # part of the time that the tier gets where the local side has it, too
    tier_pause_s: float = 5.0  # for so long after the tier failed the local side is asked first
    scan: ScanLimits = field(default_factory=ScanLimits)
    """Limits of one read; those on what is taken are defaults."""


class TieredMessageStore:
    """A broker's store and its tier, read as one; for any thread."""

    def __init__(
        self,
        local: LocalSide | None,
        tier: TierSide | None,
        clock: Clock,
        settings: MessageStoreSettings | None = None,
        *,
        local_keys: KeyLookup | None = None,
        tier_keys: KeyLookup | None = None,
    ) -> None:
        """Read nothing yet; a side that is None is not there."""
        self.local = local  # the broker's store, if there is one here
        self.tier = tier  # the tier, if there is one
        self._clock = clock
        self.settings = settings or MessageStoreSettings()  # limits
        self._local_keys = local_keys
        self._tier_keys = tier_keys
        self._tier_sick_until_s = 0.0
        self._pid = os.getpid()

    # -- messages ---------------------------------------------------------------------------------

    def get_message(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        max_count: int | None = None,
        max_bytes: int | None = None,
        filter: Filter | None = None,  # noqa: A002 (as every message queue calls it)
        timeout_s: float | None = None,
        policy: Policy | None = None,
    ) -> GetResult:
        """Read messages from a queue offset on, as soon as there is one; ``TRY_AGAIN`` after ``timeout_s``.

        It returns, too, when nothing matched in what one read may look at. ``max_count`` messages (> 0), ``max_bytes`` of
        their records but for the first. ``group``: its read-ahead is its own.
        """
        self._require_same_process()
        limits = self.settings.scan
        limits = replace(
            limits,
            count_max=limits.count_max if max_count is None else max_count,
            bytes_max=limits.bytes_max if max_bytes is None else max_bytes,
        )
        scan = Scan(QueueOffset(offset), limits, filter)
        policy = self.settings.policy if policy is None else policy
        queue = MessageQueue(topic, queue_id)
        return Get(self, group, queue, policy, scan, self.deadline_s(timeout_s)).run()

    def message_at(
        self, topic: str, queue_id: int, offset: int, *, timeout_s: float | None = None
    ) -> GetResult:
        """One message by its queue offset: ``get_message`` with a count of 1, as a group of its own."""
        return self.get_message("", topic, queue_id, offset, max_count=1, timeout_s=timeout_s)

    def message_by_time(
        self,
        topic: str,
        queue_id: int,
        time_ms: int,
        boundary: Boundary = Boundary.LOWER,
        *,
        timeout_s: float | None = None,
    ) -> GetResult:
        """The message that ``offset_by_time`` names."""
        found = self.offset_by_time(topic, queue_id, time_ms, boundary, timeout_s=timeout_s)
        return self.message_at(topic, queue_id, found, timeout_s=timeout_s)

    # -- bounds and times -------------------------------------------------------------------------

    def bounds(
        self, topic: str, queue_id: int, *, policy: Policy | None = None
    ) -> QueueBounds | None:
        """Queue offsets ``[min, end)`` over both sides, as last seen; None: neither has the queue."""
        return self.look(MessageQueue(topic, queue_id), policy).bounds

    def min_offset(self, topic: str, queue_id: int) -> int:
        """First queue offset on either side; -1 without a queue."""
        found = self.bounds(topic, queue_id)
        return -1 if found is None else found.min

    def max_offset(self, topic: str, queue_id: int) -> int:
        """One past the last message of the queue; -1 without a queue."""
        found = self.bounds(topic, queue_id)
        return -1 if found is None else found.end

    def offset_by_time(
        self,
        topic: str,
        queue_id: int,
        time_ms: int,
        boundary: Boundary = Boundary.LOWER,
        *,
        timeout_s: float | None = None,
        policy: Policy | None = None,
    ) -> QueueOffset:
        """A queue offset by store time: what ``Boundary`` says.

        InvalidError: neither side has the queue. StoreUnavailableError: the tier has to be asked, and did not answer; try
        again.
        """
        policy = self.settings.policy if policy is None else policy
        queue, deadline_s = MessageQueue(topic, queue_id), self.deadline_s(timeout_s)
        try:
            return TimeLookup(self, queue, policy, time_ms, boundary, deadline_s).find()
        except BackendError as error:
            raise StoreUnavailableError(f"the tier cannot be read: {error}", do="try again") from error  # fmt: skip

    def earliest_time_ms(
        self, topic: str, queue_id: int, *, policy: Policy | None = None
    ) -> int | None:
        """Store time of the first message; None: there is none. No request.

        In the tier it is that of the part in which the minimum lies, which may be a little earlier.
        """
        queue = MessageQueue(topic, queue_id)
        both = self.look(queue, policy)
        local, tier = both.local, both.tier
        local = local if local is not None and local.min < local.end else None
        if self.tier is not None and tier is not None:
            high = tier.end if local is None else min(local.min, tier.end)
            found = self.tier.first_time_ms(queue, high) if tier.min < high else None
            if found is not None:
                return found
        first = self.local.first_message(queue) if self.local is not None and local else None
        return None if first is None else first[1]

    # -- keys -------------------------------------------------------------------------------------

    def query(
        self, wanted: KeyQuery, *, timeout_s: float | None = None, policy: Policy | None = None
    ) -> KeyAnswer:
        """Messages by key over both sides, newest first, none twice.

        A side that fails or has no lookup costs completeness, which the answer says; not what the other one found.
        """
        self._require_same_process()
        policy = self.settings.policy if policy is None else policy
        deadline_s = self.deadline_s(timeout_s)

        @cache
        def tier_end(queue: MessageQueue) -> int:
            tier = self.look(queue, policy, is_held=True).tier
            return 0 if tier is None else tier.end

        answers = []
        if self.local is not None:
            answers.append(_ask(self._local_keys, wanted, deadline_s, tier_end))
        if self.tier is not None and policy is not Policy.DISABLE:
            found = _ask(self._tier_keys, wanted, deadline_s, tier_end)
            # Without what the tier has of a history that has ended.
            hits = [hit for hit in found.hits if hit.queue_offset < tier_end(hit.queue)]
            answers.append(replace(found, hits=tuple(hits)))
        return merge_answers(answers, wanted.count)

    # -- for one read -----------------------------------------------------------------------------

    def _require_same_process(self) -> None:
        """Refuse to work in a process that was forked off the one that made this: the threads of the tier are not there."""
        if os.getpid() != self._pid:
            raise InvalidError(FORKED, where="message store", do=OPEN_ANEW)

    def deadline_s(self, timeout_s: float | None) -> float:
        """Until when a request of this timeout may take."""
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        return self._clock.monotonic_s() + timeout_s

    def look(
        self, queue: MessageQueue, policy: Policy | None = None, *, is_held: bool = False
    ) -> Both:
        """Where a queue's messages are; a local store that seems behind the tier is looked at anew.

        ``is_held``: hold the tier's last message against the broker's also where the broker has as much. It costs a small
        local read, so this is for who is about to use what the tier has above the local minimum.
        """
        self._require_same_process()
        policy = self.settings.policy if policy is None else policy
        tier = self.tier.bounds(queue) if self.tier is not None else None
        local = self.local.bounds(queue) if self.local is not None else None
        if self.local is None or policy is Policy.DISABLE:
            return Both.of(policy, local, tier, is_one=True)
        if is_shorter(local, tier):
            self.local.refresh()
            local, is_held = self.local.bounds(queue), True
        is_one = not is_held or local is None or tier is None or self._is_one(queue, local, tier)
        return Both.of(policy, local, tier, is_one=is_one)

    def _is_one(self, queue: MessageQueue, local: QueueBounds, tier: QueueBounds) -> bool:
        """Whether the last message that the journal knows by its fingerprint and the local store has is one and the same.

        Where there is none to compare, a broker that has less than the tier has to prove it, and no other.
        """
        assert self.local is not None
        assert self.tier is not None
        has_less = is_shorter(local, tier)
        known = self.tier.last_fingerprint(queue, local.min, min(local.end, tier.end))
        if known is None:
            return not has_less
        try:
            found = self.local.fingerprint(queue, known[0])
        except ClosedError:
            raise
        except TieredStoreError:
            if has_less:
                raise
            return True
        return found == known[1] or (not found and not has_less)

    def tier_deadline_s(self, deadline_s: float, *, has_local: bool) -> float:
        """Until when the tier may take, of a request with this deadline."""
        left_s = deadline_s - self._clock.monotonic_s()
        return deadline_s - (left_s * (1 - self.settings.tier_share) if has_local else 0.0)

    def is_tier_sick(self) -> bool:
        """Whether the tier failed a moment ago."""
        return self._clock.monotonic_s() < self._tier_sick_until_s

    def note_tier_failed(self) -> None:
        """The tier failed now: for a while the local side is asked first."""
        self._tier_sick_until_s = self._clock.monotonic_s() + self.settings.tier_pause_s


def _ask(
    lookup: KeyLookup | None,
    wanted: KeyQuery,
    deadline_s: float,
    tier_end: Callable[[MessageQueue], int],
) -> KeyAnswer:
    if lookup is None:
        return KeyAnswer(is_complete=False)
    try:
        return lookup(wanted, deadline_s, tier_end)
    except (TieredStoreError, BackendError) as error:
        return KeyAnswer(is_complete=False, errors=(error,))


# -- sides

_NEAR_ITEMS = 256
"""How many items before a time are looked at for a message, at once."""

_NEAR_BYTES = 1 << 20


class LocalMessages(Protocol):
    """What is asked of a local store (``tiered.local.interface.LocalStore``, method by method)."""

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        """Every queue with its bounds."""
        ...

    def refresh(self) -> None:
        """Look again."""
        ...

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        """Records of a queue from ``start``; None: there are none."""
        ...

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> QueueOffset:
        """First queue offset whose store time is at or after ``timestamp_ms``; else the end."""
        ...


class LocalSide:
    """The broker's own store, or what takes its place."""

    def __init__(
        self,
        store: LocalMessages,
        *,
        bounds: Callable[[MessageQueue], QueueBounds | None] | None = None,
        is_in_memory: Callable[[MessageQueue, int, int], bool] | None = None,
    ) -> None:
        """Ask nothing yet; who owns the store closes it. ``bounds``: of one queue, without listing all.

        ``is_in_memory``: whether reading so many messages from a queue offset on needs no disk; without it everything is
        taken to be in memory, and ``NOT_IN_MEM`` is ``NOT_IN_DISK``.
        """
        self._store = store
        self._bounds = bounds
        self._is_in_memory = is_in_memory

    def bounds(self, queue: MessageQueue) -> QueueBounds | None:
        """As last seen; None: no such queue."""
        return self._bounds(queue) if self._bounds else self._store.queues().get(queue)

    def refresh(self) -> None:
        """Look at the store anew."""
        self._store.refresh()

    def is_in_memory(self, queue: MessageQueue, start: int, count: int) -> bool:
        """Whether reading ``count`` messages from ``start`` on needs no disk, as far as can be told."""
        try:
            return self._is_in_memory is None or self._is_in_memory(queue, start, count)
        except InvalidError:  # its disk fails
            return False

    def read(
        self, queue: MessageQueue, start: QueueOffset, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        return self._store.read(queue, start, bytes_max=bytes_max, count_max=count_max)

    def fingerprint(self, queue: MessageQueue, offset: QueueOffset) -> int:
        """Fingerprint of a message; 0: it is not there."""
        batch = self.read(queue, offset, 1, 1)
        if batch is None or batch.base_offset != offset:
            return 0
        return fingerprint_of_item(batch, 0)

    def first_message(self, queue: MessageQueue) -> tuple[QueueOffset, int] | None:
        """Queue offset and store time of the first message; None: there is none."""
        bounds = self.bounds(queue)
        at = bounds.min if bounds is not None else 0
        while bounds is not None and at < bounds.end:
            batch = self.read(queue, QueueOffset(at), 1, _NEAR_ITEMS if at > bounds.min else 1)
            if batch is None:
                return None
            real = np.flatnonzero(batch.sizes > 0)
            if len(real):
                first = int(real[0])
                return QueueOffset(batch.base_offset + first), int(batch.store_timestamps_ms[first])
            at = batch.end_offset
        return None

    def offset_by_time(
        self, queue: MessageQueue, time_ms: int, boundary: Boundary
    ) -> tuple[QueueOffset, bool]:
        """A queue offset by store time, and whether there is a message that it means.

        Times are taken to be in order, as a broker's own search takes them.
        """
        if boundary is Boundary.LOWER:
            found, bounds = self._store.offset_by_time(queue, time_ms), self.bounds(queue)
            return found, bounds is not None and found < bounds.end
        after, bounds = self._store.offset_by_time(queue, time_ms + 1), self.bounds(queue)
        low, at, count = 0 if bounds is None else bounds.min, after, 1
        while at > low:  # there are holes before it
            start = max(at - count, low)
            last = self._last_message(queue, start, at)
            if last is not None:
                return last, True
            at, count = QueueOffset(start), min(2 * count, _NEAR_ITEMS)
        return QueueOffset(low), False

    def _last_message(self, queue: MessageQueue, start: int, end: int) -> QueueOffset | None:
        last = None
        while start < end:
            batch = self.read(queue, QueueOffset(start), _NEAR_BYTES, end - start)
            if batch is None:
                break
            real = np.flatnonzero(batch.sizes > 0) + batch.base_offset
            real = real[real < end]
            last = QueueOffset(int(real[-1])) if len(real) else last
            start = batch.end_offset
        return last


class TierSide:
    """The tier."""

    def __init__(
        self,
        reader: TierReader,
        fetcher: TieredMessageFetcher,
        executor: Executor,
        clock: Clock,
    ) -> None:
        """Ask nothing yet; ``reader`` is the fetcher's.

        ``executor`` looks at the journal; one thread is enough, and it must not be the fetcher's.
        """
        self._reader = reader
        self._store, self._prefix = reader.store, reader.prefix
        self._fetcher = fetcher
        self._executor = executor
        self._clock = clock

    def view(self, queue: MessageQueue) -> IncarnationView | None:
        """The present incarnation of a queue, as last seen."""
        return self._reader.present(queue)

    def bounds(self, queue: MessageQueue) -> QueueBounds | None:
        """As last seen; None: no such queue."""
        incarnation = self._reader.state.incarnation(queue)
        return (
            None
            if incarnation is None
            else QueueBounds(incarnation.min_offset, incarnation.commit_offset)
        )

    def last_fingerprint(
        self, queue: MessageQueue, low: int, end: int
    ) -> tuple[QueueOffset, int] | None:
        """The last message of ``[low, end)`` of which the journal has a fingerprint, and the fingerprint."""
        view = self.view(queue)
        for part in reversed(view.parts if view is not None else []):
            at = QueueOffset(part.queue_end - 1)
            if low <= at < end and part.last:
                return at, part.last
        return None

    def refresh(self, deadline_s: float) -> None:
        """See what is new in the journal; StoreUnavailableError: not before the deadline."""
        run_by(deadline_s, self._clock, self._executor, self._fetcher.refresh, self._prefix)

    def read(  # noqa: PLR0917 (one caller)
        self,
        group: str,
        queue: MessageQueue,
        start: QueueOffset,
        bytes_max: int,
        count_max: int,
        deadline_s: float,
    ) -> TierBatch | Gap | None:
        timeout_s = max(deadline_s - self._clock.monotonic_s(), 1e-3)
        return self._fetcher.read(
            group,
            queue,
            start,
            bytes_max=bytes_max,
            count_max=count_max,
            timeout_s=timeout_s,
            refresh=partial(self.refresh, deadline_s),
        )

    def offset_by_time(
        self,
        queue: MessageQueue,
        time_ms: int,
        boundary: Boundary,
        high: int,
        deadline_s: float,
    ) -> QueueOffset:
        """A queue offset by store time among messages below ``high``; that if all there are earlier."""

        def find(place: HistoryPlace) -> QueueOffset | None:
            name = ("offset by time", queue)
            asking = AskingStore(
                self._fetcher.transfers, self._store, name, self._clock, deadline_s
            )
            ranges = StoreRanges(asking, self._prefix)
            low, end = place.start, min(place.end, high)
            view, where = place.view, self._prefix
            return find_by_time(view, ranges, time_ms, boundary, low=low, high=end, where=where)

        refresh = partial(self.refresh, deadline_s)
        found = self._reader.cursor(queue).by_time(find, boundary, refresh=refresh)
        return QueueOffset(min(found, high))

    def first_time_ms(self, queue: MessageQueue, high: int) -> int | None:
        """Smallest store time of the first part that has messages below ``high``; None: there are none. No request."""
        view = self.view(queue)
        if view is None:
            return None
        for part in view.parts_from(view.incarnation.min_offset):
            if part.store_min_ms >= 0 and part.queue_offset < high:
                return part.store_min_ms
        return None


# -- getting

NOWHERE: Final = "neither in the tier nor in the local store"

DAMAGED: Final = "damaged"

_TRIES_MAX: Final = 64
"""Steps of one read: past what has expired under it, and through what holds nothing that is wanted."""

_NO_BOUNDS: Final = QueueBounds(QueueOffset(-1), QueueOffset(-1))


@dataclass(slots=True)
class Get:
    """One read."""

    means: TieredMessageStore  # what it works with
    group: str  # who reads
    queue: MessageQueue  # what
    policy: Policy  # from where
    scan: Scan  # what is wanted, and what was found so far
    deadline_s: float  # monotonic
    _bounds: QueueBounds = _NO_BOUNDS
    _start: QueueOffset = QueueOffset(-1)
    _is_held: bool = False

    def run(self) -> GetResult:
        """Do it."""
        self._start = self.scan.at
        for _ in range(_TRIES_MAX):
            try:
                result = self._step()
            except ClosedError:
                raise
            except ExpiredError:  # while it was read
                self._bounds = self._look().bounds or _NO_BOUNDS
                self.scan.at = max(self.scan.at, self._bounds.min)
                return self._end(GetStatus.MESSAGE_WAS_REMOVING)
            except DataError as error:  # it will not come back: step over it, and say so
                self.scan.skip(self.scan.at + 1, DAMAGED)
                return self._end(GetStatus.OFFSET_FOUND_NULL, error)
            except (TieredStoreError, BackendError) as error:
                return self._end(self._nothing_found(), error)
            if result is not None:
                return result
            if self.scan.is_over:
                break
        return self._end(self._nothing_found())

    def _nothing_found(self) -> GetStatus:
        """Not now. What was looked at already need not be looked at again."""
        has_moved = self.scan.at != self._start
        return GetStatus.NO_MATCHED_MESSAGE if has_moved else GetStatus.TRY_AGAIN

    def _step(self) -> GetResult | None:
        """Read once, or look anew; the result if that is all."""
        both = self._look()
        sides = self._plan(both)
        if not sides and self.scan.at == self._start:
            both = self._look_anew(both)
            if self._plan(both):
                return None
        if sides:
            if len(sides) > 1 and self.means.is_tier_sick():
                sides = (Side.LOCAL, Side.TIER)
            self._read(sides, both)
            return None
        at, judged = self.scan.at, judge_offset(self.scan.at, both.bounds)
        if judged is None and at == self._start:
            self.scan.skip(both.next_known(at), NOWHERE)
            return None
        if judged is None or at != self._start:
            return self._end(GetStatus.NO_MATCHED_MESSAGE)
        status, self.scan.at = judged
        return self._end(status)

    def _look(self) -> Both:
        return self.means.look(self.queue, self.policy, is_held=self._is_held)

    def _plan(self, both: Both) -> tuple[Side, ...]:
        """Where to read on; empty: nowhere."""
        self._bounds = both.bounds or _NO_BOUNDS
        return plan_sides(self.policy, both, self.scan.at, self._is_in_memory)

    def _look_anew(self, both: Both) -> Both:
        """See whether the offset has come meanwhile, before it is said that it is not there.

        First the local store, then the journal: what was gone locally at the one moment, and is not in the tier at the
        other, is nowhere.
        """
        means, at = self.means, self.scan.at
        if means.local is not None:
            means.local.refresh()
            both = self._look()
        bounds, tier = both.bounds, both.tier
        is_ahead = bounds is not None and at >= bounds.end  # the journal is looked at now and then
        has_expired = tier is not None and at < tier.min
        if means.tier is None or self.policy is Policy.DISABLE or is_ahead or has_expired:
            return both
        try:
            means.tier.refresh(self.deadline_s)
        except (StoreUnavailableError, BackendError):
            means.note_tier_failed()
            raise
        now = self._look()
        if both.local is None or now.local is None:
            return Both(None, now.tier)
        return Both(QueueBounds(both.local.min, now.local.end), now.tier)

    def _is_in_memory(self) -> bool:
        local = self.means.local
        return local is not None and local.is_in_memory(
            self.queue, self.scan.at, self.scan.next_read()[1]
        )

    def _read(self, sides: tuple[Side, ...], both: Both) -> None:
        """Read from the first side that can; nothing, if both first have to be held against each other."""
        failure: Exception | None = None
        tier_end = both.tier.end if both.tier is not None and Side.TIER in sides else 0
        if both.local is not None and self.scan.at < both.local.min and not self._is_held:
            tier_end = min(tier_end, both.local.min)  # above it they have to be held first
        for side in sides:
            if side is Side.TIER and len(sides) > 1 and not self._is_held:
                self._is_held = True
                return
            try:
                if side is Side.LOCAL:
                    self._read_local(tier_end)
                elif not self._read_tier(tier_end, sides):
                    continue
            except ClosedError:
                raise
            except (TieredStoreError, BackendError) as error:
                if failure is None or isinstance(failure, DataError):
                    failure = error
            else:
                return
        assert failure is not None
        raise failure

    def _read_local(self, tier_end: int) -> None:
        local, scan = self.means.local, self.scan
        assert local is not None
        batch = local.read(self.queue, scan.at, *scan.next_read())
        if batch is not None and batch.base_offset == scan.at:
            # Below the tier's end the tier may have what is damaged here.
            scan.take(_before_hole(batch, tier_end), Side.LOCAL)
        # else it has expired since, and is looked for again

    def _read_tier(self, end: int, sides: tuple[Side, ...]) -> bool:
        """Read what the tier has; False: a gap, where the local side has the offset."""
        tier, scan = self.means.tier, self.scan
        assert tier is not None
        has_local = sides[-1] is not Side.TIER
        deadline_s = self.means.tier_deadline_s(self.deadline_s, has_local=has_local)
        bytes_max, count_max = scan.next_read()
        count_max = min(count_max, end - scan.at)
        try:
            found = tier.read(self.group, self.queue, scan.at, bytes_max, count_max, deadline_s)
        except (StoreUnavailableError, BackendError):
            self.means.note_tier_failed()
            raise
        if isinstance(found, Gap):
            if Side.LOCAL in sides:
                return False  # what never came into the tier, or is lost there, may well be here
            scan.skip(min(found.end, end), found.reason)
        elif found is not None and found.base_offset == scan.at:
            scan.take(found.records, Side.TIER)
        return True

    # -- how it ends ------------------------------------------------------------------------------

    def _end(self, status: GetStatus, error: Exception | None = None) -> GetResult:
        scan = self.scan
        return GetResult(
            GetStatus.FOUND if scan.chunks else status,
            scan.at,
            self._bounds.min,
            self._bounds.end,
            tuple(scan.chunks),
            tuple(scan.missing),
            scan.size_bytes,
            None if scan.chunks else error,
        )


def _before_hole(batch: RecordBatch, end: int) -> RecordBatch:
    """What lies before the first hole below a queue offset."""
    holes = np.flatnonzero(batch.sizes[: max(end - batch.base_offset, 0)] <= 0)
    if not len(holes):
        return batch
    count = int(holes[0])
    if not count:
        raise DataError(
            f"the local store has no sound message at {batch.queue}, queue offset {batch.base_offset}"
        )
    return beginning_of(batch, count)


# -- times


@dataclass(frozen=True, slots=True)
class TimeLookup:
    """One lookup of a queue offset by store time; see ``Boundary``."""

    store: TieredMessageStore  # what it works with
    queue: MessageQueue
    policy: Policy  # where to look
    time_ms: int  # UTC
    boundary: Boundary  # what if it is not exact
    deadline_s: float  # monotonic

    def find(self) -> QueueOffset:
        """Search; errors as of ``TieredMessageStore.offset_by_time``."""
        seen: tuple[QueueOffset, int] | None = None
        local, tier = self.store.local, self.store.tier
        while True:
            first = None if local is None else local.first_message(self.queue)
            both = self._look()
            if tier is not None and self._is_behind(both, first) and first != seen:
                tier.refresh(self.deadline_s)  # the journal must be newer than what has expired
                seen, both = first, self._look()
            if both.bounds is None:
                raise InvalidError(
                    f"neither the broker's store nor the tier has the queue {self.queue}"
                )
            if local is None or first is None:
                return self._in_tier(both, both.bounds.end)
            found = self._find(both, local, *first)
            if local.first_message(self.queue) == first:
                return found  # else retention has moved: the message may be in the tier only

    def _look(self) -> Both:
        # Only with this policy the tier is searched above the local minimum.
        return self.store.look(self.queue, self.policy, is_held=self.policy is Policy.FORCE)

    def _is_behind(self, both: Both, first: tuple[QueueOffset, int] | None) -> bool:
        """Whether the answer may be in what the tier is not known to have."""
        if self.policy is Policy.DISABLE or (first is not None and self._is_local(first[1])):
            return False
        low = both.tier.end if both.tier is not None else 0
        return both.bounds is None or (first is not None and low < first[0])

    def _find(self, both: Both, local: LocalSide, first: QueueOffset, first_ms: int) -> QueueOffset:
        """Search, with the first local message at a queue offset and a time."""
        if self.policy is Policy.FORCE and both.tier is not None:
            try:
                return self._forced(both, local)
            except (StoreUnavailableError, DataError, BackendError):
                if not self._is_local(first_ms):
                    raise
        if self._is_local(first_ms):
            return self._in_local(local)[0]
        return self._in_tier(both, first)

    def _is_local(self, first_ms: int) -> bool:
        """Whether the answer cannot be below the first local message."""
        is_lower = self.boundary is Boundary.LOWER
        return first_ms < self.time_ms if is_lower else first_ms <= self.time_ms

    def _in_local(self, local: LocalSide) -> tuple[QueueOffset, bool]:
        return local.offset_by_time(self.queue, self.time_ms, self.boundary)

    def _in_tier(self, both: Both, high: QueueOffset) -> QueueOffset:
        """Below ``high``; that if there is nothing."""
        tier = self.store.tier
        if tier is None or both.tier is None or both.tier.min >= min(both.tier.end, high):
            return high
        limit = min(both.tier.end, high)
        found = tier.offset_by_time(self.queue, self.time_ms, self.boundary, limit, self.deadline_s)
        return high if found >= limit else found

    def _forced(self, both: Both, local: LocalSide) -> QueueOffset:
        """All that the tier has; what is fresher from the local side."""
        assert both.tier is not None
        end = both.tier.end
        found = self._in_tier(both, end)
        is_lower = self.boundary is Boundary.LOWER
        if (is_lower and found < end) or both.local is None or both.local.end <= end:
            return found
        fresh, is_there = self._in_local(local)
        return max(found, fresh) if is_lower or is_there else found
