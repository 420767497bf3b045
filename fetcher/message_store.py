"""TieredMessageStore: a broker's store and its tier as one, by read policy.

Overview
    Each read looks where its queue offset is now (``fetcher.policies``), reads there, and tells how it ended in
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
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from backends.errors import BackendError
from fetcher import keys
from fetcher.getting import Get
from fetcher.policies import Both, Policy, is_shorter
from fetcher.scanning import Scan, ScanLimits
from fetcher.times import TimeLookup
from tiered.errors import ClosedError, StoreUnavailableError, TieredStoreError
from tiered.model import Boundary, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable

    from fetcher.filters.face import Filter
    from fetcher.keys import KeyAnswer, KeyLookup, KeyQuery
    from fetcher.sides import LocalSide, TierSide
    from fetcher.statuses import GetResult
    from tiered.clock import Clock
    from tiered.model import QueueBounds


@dataclass(frozen=True, slots=True)
class MessageStoreSettings:
    """How a ``TieredMessageStore`` reads.

    Attributes:
        policy: For requests that name none.
        timeout_s: Deadline of a request that names none.
        tier_share: Part of the time that the tier gets where the local side has it, too.
        tier_pause_s: For so long after the tier failed the local side is asked first.
        scan: Limits of one read; those on what is taken are defaults.
    """

    policy: Policy = Policy.NOT_IN_DISK
    timeout_s: float = 10.0
    tier_share: float = 0.5
    tier_pause_s: float = 5.0
    scan: ScanLimits = field(default_factory=ScanLimits)


class TieredMessageStore:
    """See the module's contract.

    Attributes:
        local: The broker's store, if there is one here.
        tier: The tier, if there is one.
        settings: Limits.
    """

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
        """Read nothing yet.

        Args:
            local: The broker's store; None: there is none here.
            tier: None: there is none.
            clock: For deadlines.
            settings: Limits.
            local_keys: Finds messages by key in the broker's store.
            tier_keys: Finds messages by key in the tier.
        """
        self.local = local
        self.tier = tier
        self._clock = clock
        self.settings = settings or MessageStoreSettings()
        self._local_keys = local_keys
        self._tier_keys = tier_keys
        self._tier_sick_until_s = 0.0

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
        """Read messages from a queue offset on.

        It returns as soon as there is one, or when nothing matched in what one read may look at.

        Args:
            group: Who reads: its read-ahead is its own.
            topic: Of the queue.
            queue_id: Likewise.
            offset: First queue offset wanted.
            max_count: Messages at most (> 0).
            max_bytes: Bytes of their records at most, but for the first.
            filter: Which messages; None: all.
            timeout_s: Give up after so long; the outcome is then ``TRY_AGAIN``.
            policy: For this request.

        Raises:
            InvalidError: A limit is not positive.
            ClosedError: A side has been closed.
        """
        scan_settings = self.settings.scan
        limits = ScanLimits(
            scan_settings.count_max if max_count is None else max_count,
            scan_settings.bytes_max if max_bytes is None else max_bytes,
            scan_settings.scan_items_max,
            scan_settings.scan_bytes_max,
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
        """The message that ``offset_by_time`` names.

        Raises:
            InvalidError: Neither side has the queue.
            StoreUnavailableError: It cannot be found now; try again.
            DataError: What has to be read to find it is damaged.
        """
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
        """A queue offset by store time: what ``Boundary`` says. See ``fetcher.times``.

        Raises:
            InvalidError: Neither side has the queue.
            StoreUnavailableError: The tier has to be asked, and did not answer; try again.
            DataError: What has to be read is damaged.
        """
        policy = self.settings.policy if policy is None else policy
        queue, deadline_s = MessageQueue(topic, queue_id), self.deadline_s(timeout_s)
        lookup = TimeLookup(queue, policy, time_ms, boundary, deadline_s)
        try:
            is_held = (
                policy is Policy.FORCE
            )  # only then the tier is searched above the local minimum
            return lookup.find(
                lambda: self.look(queue, policy, is_held=is_held), self.local, self.tier
            )
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
        policy = self.settings.policy if policy is None else policy
        deadline_s = self.deadline_s(timeout_s)
        sides = _Sides(self, policy)
        answers = []
        if self.local is not None:
            answers.append(_ask(self._local_keys, wanted, deadline_s, sides.tier_end))
        if self.tier is not None and policy is not Policy.DISABLE:
            answers.append(sides.check(_ask(self._tier_keys, wanted, deadline_s, sides.tier_end)))
        return keys.merge(answers, wanted.count)

    # -- for one read -----------------------------------------------------------------------------

    def deadline_s(self, timeout_s: float | None) -> float:
        """Until when a request of this timeout may take."""
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        return self._clock.monotonic_s() + timeout_s

    def look(
        self, queue: MessageQueue, policy: Policy | None = None, *, is_held: bool = False
    ) -> Both:
        """Where a queue's messages are; a local store that seems behind the tier is looked at anew.

        Args:
            queue: Which.
            policy: For which request.
            is_held: Hold the tier's last message against the broker's also where the broker has as much. It costs a
                small local read, so this is for who is about to use what the tier has above the local minimum.
        """
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
        """Whether the last message that the journal knows by its mark and the local store has is one and the same.

        Where there is none to compare, a broker that has less than the tier has to prove it, and no other.
        """
        assert self.local is not None
        assert self.tier is not None
        has_less = is_shorter(local, tier)
        known = self.tier.last_mark(queue, local.min, min(local.end, tier.end))
        if known is None:
            return not has_less
        try:
            found = self.local.mark(queue, known[0])
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


class _Sides:
    """What one lookup by key knows of the sides of queues."""

    def __init__(self, store: TieredMessageStore, policy: Policy) -> None:
        self._store = store
        self._policy = policy
        self._known: dict[MessageQueue, Both] = {}

    def tier_end(self, queue: MessageQueue) -> int:
        """Below this queue offset the tier is asked."""
        tier = self._both(queue).tier
        return 0 if tier is None else tier.end

    def check(self, answer: KeyAnswer) -> KeyAnswer:
        """Without what the tier has of a history that has ended."""
        hits = [hit for hit in answer.hits if hit.queue_offset < self.tier_end(hit.queue)]
        return replace(answer, hits=tuple(hits))

    def _both(self, queue: MessageQueue) -> Both:
        if queue not in self._known:
            self._known[queue] = self._store.look(queue, self._policy, is_held=True)
        return self._known[queue]


def _ask(
    lookup: KeyLookup | None,
    wanted: KeyQuery,
    deadline_s: float,
    tier_end: Callable[[MessageQueue], int],
) -> KeyAnswer:
    if lookup is None:
        return keys.KeyAnswer(is_complete=False)
    try:
        return lookup(wanted, deadline_s, tier_end)
    except (TieredStoreError, BackendError) as error:
        return keys.KeyAnswer(is_complete=False, errors=(error,))
