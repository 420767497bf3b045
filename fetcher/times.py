"""A queue offset by store time over both sides of a message store, without a seam.

The local side answers what it surely can: when its first message is earlier than the time that is asked for, the answer
is not below it. Else the tier is searched, below the local minimum only; so each message is looked for on one side. Store
times that are out of order just around the local minimum are taken as the local side has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.errors import BackendError
from fetcher.policies import Both, Policy
from tiered.errors import DataError, InvalidError, StoreUnavailableError
from tiered.model import Boundary

if TYPE_CHECKING:
    from collections.abc import Callable

    from fetcher.sides import LocalSide, TierSide
    from tiered.model import MessageQueue, QueueOffset


@dataclass(frozen=True, slots=True)
class TimeLookup:
    """One lookup.

    Attributes:
        queue: Of which queue.
        policy: Where to look.
        time_ms: UTC.
        boundary: What if it is not exact.
        deadline_s: Monotonic.
    """

    queue: MessageQueue
    policy: Policy
    time_ms: int
    boundary: Boundary
    deadline_s: float

    def find(
        self, look: Callable[[], Both], local: LocalSide | None, tier: TierSide | None
    ) -> QueueOffset:
        """Search.

        Args:
            look: Tells the queue's bounds.
            local: The local side, if there is one.
            tier: The tier, if there is one.

        Returns:
            The queue offset; see ``Boundary``.

        Raises:
            InvalidError: Neither side has the queue.
            StoreUnavailableError: The tier has to be asked, and did not answer.
            DataError: What has to be read is damaged.
        """
        seen: tuple[QueueOffset, int] | None = None
        while True:
            first = None if local is None else local.first_message(self.queue)
            both = look()
            if tier is not None and self._is_behind(both, first) and first != seen:
                tier.refresh(self.deadline_s)  # the journal must be newer than what has expired
                seen, both = first, look()
            if both.bounds is None:
                raise InvalidError(
                    f"neither the broker's store nor the tier has the queue {self.queue}"
                )
            if local is None or first is None:
                return self._in_tier(both, tier, both.bounds.end)
            found = self._find(both, local, tier, *first)
            if local.first_message(self.queue) == first:
                return found  # else retention has moved: the message may be in the tier only

    def _is_behind(self, both: Both, first: tuple[QueueOffset, int] | None) -> bool:
        """Whether the answer may be in what the tier is not known to have."""
        if self.policy is Policy.DISABLE or (first is not None and self._is_local(first[1])):
            return False
        low = both.tier.end if both.tier is not None else 0
        return both.bounds is None or (first is not None and low < first[0])

    def _find(
        self,
        both: Both,
        local: LocalSide,
        tier: TierSide | None,
        first: QueueOffset,
        first_ms: int,
    ) -> QueueOffset:
        """Search, with the first local message at a queue offset and a time."""
        if self.policy is Policy.FORCE and both.tier is not None:
            try:
                return self._forced(both, local, tier)
            except (StoreUnavailableError, DataError, BackendError):
                if not self._is_local(first_ms):
                    raise
        if self._is_local(first_ms):
            return self._in_local(local)[0]
        return self._in_tier(both, tier, first)

    def _is_local(self, first_ms: int) -> bool:
        """Whether the answer cannot be below the first local message."""
        is_lower = self.boundary is Boundary.LOWER
        return first_ms < self.time_ms if is_lower else first_ms <= self.time_ms

    def _in_local(self, local: LocalSide) -> tuple[QueueOffset, bool]:
        return local.offset_by_time(self.queue, self.time_ms, self.boundary)

    def _in_tier(self, both: Both, tier: TierSide | None, high: QueueOffset) -> QueueOffset:
        """Below ``high``; that if there is nothing."""
        if tier is None or both.tier is None or both.tier.min >= min(both.tier.end, high):
            return high
        limit = min(both.tier.end, high)
        found = tier.offset_by_time(self.queue, self.time_ms, self.boundary, limit, self.deadline_s)
        return high if found >= limit else found

    def _forced(self, both: Both, local: LocalSide, tier: TierSide | None) -> QueueOffset:
        """All that the tier has; what is fresher from the local side."""
        assert both.tier is not None
        end = both.tier.end
        found = self._in_tier(both, tier, end)
        is_lower = self.boundary is Boundary.LOWER
        if (is_lower and found < end) or both.local is None or both.local.end <= end:
            return found
        fresh, is_there = self._in_local(local)
        return max(found, fresh) if is_lower or is_there else found
