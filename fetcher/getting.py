"""One ``get_message``: looks, reads, and looks again when what it saw has moved meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from backends.errors import BackendError
from fetcher.policies import Both, Policy, Side, plan_sides
from fetcher.statuses import GetResult, GetStatus, judge_offset
from tiered.errors import (
    ClosedError,
    DataError,
    ExpiredError,
    StoreUnavailableError,
    TieredStoreError,
)
from tiered.log.parts import Gap
from tiered.model import QueueBounds, QueueOffset

if TYPE_CHECKING:
    from fetcher.scanning import Scan
    from fetcher.sides import LocalSide, TierSide
    from tiered.local.face import RecordBatch
    from tiered.model import MessageQueue

NOWHERE: Final = "neither in the tier nor in the local store"
DAMAGED: Final = "damaged"
_TRIES_MAX: Final = 64
"""How often one read begins anew since retention moved under it."""
_NO_BOUNDS: Final = QueueBounds(QueueOffset(-1), QueueOffset(-1))


class Means(Protocol):
    """What a read works with."""

    local: LocalSide | None
    tier: TierSide | None

    def look(self, queue: MessageQueue, policy: Policy, *, is_held: bool) -> Both:
        """Where a queue's messages are, and if they are held against each other, what of the tier is not void."""
        ...

    def tier_deadline_s(self, deadline_s: float, *, has_local: bool) -> float:
        """Until when the tier may take, of a request with this deadline."""
        ...

    def is_tier_sick(self) -> bool:
        """Whether the tier failed a moment ago."""
        ...

    def note_tier_failed(self) -> None:
        """The tier failed now."""
        ...


@dataclass(slots=True)
class Get:
    """One read.

    Attributes:
        means: What it works with.
        group: Who reads.
        queue: What.
        policy: From where.
        scan: What is wanted, and what was found so far.
        deadline_s: Monotonic.
    """

    means: Means
    group: str
    queue: MessageQueue
    policy: Policy
    scan: Scan
    deadline_s: float
    _bounds: QueueBounds = _NO_BOUNDS
    _start: QueueOffset = QueueOffset(-1)  # noqa: RUF009 (a NewType: the number itself)
    _is_held: bool = False

    def run(self) -> GetResult:
        """Do it."""
        self._start = self.scan.at
        for _ in range(_TRIES_MAX):
            try:
                result = self._step()
            except ClosedError:
                raise
            except ExpiredError:
                return self._moved()
            except DataError as error:
                return self._damaged(error)
            except (TieredStoreError, BackendError) as error:
                return self._failed(error)
            if result is not None:
                return result
            if self.scan.is_over:
                break
        if self.scan.at == self._start:
            return self._end(GetStatus.TRY_AGAIN)
        return self._end(GetStatus.NO_MATCHED_MESSAGE)

    def _step(self) -> GetResult | None:
        """Read once, or look anew; the result if that is all."""
        both = self._look()
        sides = self._plan(both)
        if not sides and self.scan.at == self._start:
            both = self._look_anew(both)
            if self._plan(both):
                return None
        if sides:
            self._read(self._ordered(sides), both)
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

    def _ordered(self, sides: tuple[Side, ...]) -> tuple[Side, ...]:
        return (Side.LOCAL, Side.TIER) if len(sides) > 1 and self.means.is_tier_sick() else sides

    def _read(self, sides: tuple[Side, ...], both: Both) -> None:
        """Read from the first side that can; nothing, if both first have to be held against each other.

        Args:
            sides: In order.
            both: What they have.

        Raises:
            TieredStoreError: None can (likewise ``BackendError``): damage only if no side might have it later.
        """
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
                else:
                    self._read_tier(tier_end, has_local=side is not sides[-1])
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

    def _read_tier(self, end: int, *, has_local: bool) -> None:
        tier, scan = self.means.tier, self.scan
        assert tier is not None
        deadline_s = self.means.tier_deadline_s(self.deadline_s, has_local=has_local)
        bytes_max, count_max = scan.next_read()
        count_max = min(count_max, end - scan.at)
        try:
            found = tier.read(self.group, self.queue, scan.at, bytes_max, count_max, deadline_s)
        except (StoreUnavailableError, BackendError):
            self.means.note_tier_failed()
            raise
        if isinstance(found, Gap):
            scan.skip(min(found.end, end), found.reason)
        elif found is not None and found.base_offset == scan.at:
            scan.take(found.records, Side.TIER)

    # -- how it ends ------------------------------------------------------------------------------

    def _end(self, status: GetStatus, error: Exception | None = None) -> GetResult:
        scan = self.scan
        return GetResult(
            GetStatus.FOUND if scan.pieces else status,
            scan.at,
            self._bounds.min,
            self._bounds.end,
            tuple(scan.pieces),
            tuple(scan.missing),
            scan.size_bytes,
            None if scan.pieces else error,
        )

    def _moved(self) -> GetResult:
        """It expired while it was read."""
        self._bounds = self._look().bounds or _NO_BOUNDS
        self.scan.at = max(self.scan.at, self._bounds.min)
        return self._end(GetStatus.MESSAGE_WAS_REMOVING)

    def _damaged(self, error: DataError) -> GetResult:
        """It will not come back: step over it, and say so."""
        self.scan.skip(self.scan.at + 1, DAMAGED)
        return self._end(GetStatus.OFFSET_FOUND_NULL, error)

    def _failed(self, error: Exception) -> GetResult:
        """Not now. What was looked at already need not be looked at again."""
        has_moved = self.scan.at != self._start
        return self._end(GetStatus.NO_MATCHED_MESSAGE if has_moved else GetStatus.TRY_AGAIN, error)


def _before_hole(batch: RecordBatch, end: int) -> RecordBatch:
    """What lies before the first hole below a queue offset.

    Raises:
        DataError: It begins with that hole.
    """
    holes = np.flatnonzero(batch.sizes[: max(end - batch.base_offset, 0)] <= 0)
    if not len(holes):
        return batch
    count = int(holes[0])
    if not count:
        raise DataError(
            f"the local store has no sound message at {batch.queue}, queue offset {batch.base_offset}"
        )
    return replace(
        batch,
        positions=batch.positions[:count],
        sizes=batch.sizes[:count],
        tag_codes=batch.tag_codes[:count],
        store_timestamps_ms=batch.store_timestamps_ms[:count],
        physical_offsets=batch.physical_offsets[:count],
        quarantined=(),
    )
