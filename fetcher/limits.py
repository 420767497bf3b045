"""The limits of the request layer, how a rate is kept, and what has been counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Mapping

_KIB = 1 << 10
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """How much may be under way, how fast, and how it is merged and asked again.

    Attributes:
        requests_in_flight_max: Calls to the store at once (slots). The executor should have as many threads.
        bytes_in_flight_max: Bytes they ask for together. A single larger request passes alone.
        bytes_per_s: Most bytes asked for in a second, on average; None: no limit.
        requests_per_s: Most calls begun in a second, on average; None: no limit.
        coalesce_gap_bytes: Waiting neighbours of one object become one request when at most this many unwanted bytes
            lie between them.
        coalesced_bytes_max: Most bytes of a request that was merged.
        hedge_factor: A request is asked again after this many times the running median of its like,
        hedge_floor_s: but not before this many seconds.
        hedge_budget: Most hedges for each request; 0: no hedging.
        pending_max: Pieces that may wait. Read-ahead is refused when so many wait in all; what is urgent, when so
            many urgent ones wait.
    """

    requests_in_flight_max: int = 16
    bytes_in_flight_max: int = 64 * _MIB
    bytes_per_s: float | None = None
    requests_per_s: float | None = None
    coalesce_gap_bytes: int = 64 * _KIB
    coalesced_bytes_max: int = 8 * _MIB
    hedge_factor: float = 3.0
    hedge_floor_s: float = 0.05
    hedge_budget: float = 0.05
    pending_max: int = 4096

    def __post_init__(self) -> None:
        least = min(self.requests_in_flight_max, self.bytes_in_flight_max, self.pending_max)
        if least < 1 or self.coalesce_gap_bytes < 0 or self.coalesced_bytes_max < 1:
            raise InvalidError(f"a limit is too small: {self}")
        if not (0 <= self.hedge_budget <= 1 and self.hedge_factor >= 1 and self.hedge_floor_s > 0):
            raise InvalidError(f"hedging is set out of range: {self}")


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What was counted since the start, and what is under way; consistent among each other.

    Attributes:
        asked: Wishes taken up.
        joined: Those that found the same range waiting or under way.
        refused: Those that met a full queue.
        cancelled: Those taken back before their end.
        expired: Those whose deadline passed.
        requests: Calls to the store, hedges not among them.
        coalesced: Ranges that came with another's request, so requests saved.
        hedges: Second calls for slow requests.
        hedge_wins: Those that answered first.
        received_bytes: Bytes of all answers.
        lost_bytes: Those that nobody got: losers of hedges, gaps between merged ranges, cancelled wishes.
        errors: Failed calls, by class of the error.
        pending: Ranges that wait to be sent.
        running: Calls under way.
        running_bytes: What they ask for.
    """

    asked: int
    joined: int
    refused: int
    cancelled: int
    expired: int
    requests: int
    coalesced: int
    hedges: int
    hedge_wins: int
    received_bytes: int
    lost_bytes: int
    errors: Mapping[str, int]
    pending: int
    running: int
    running_bytes: int


_BURST_S = 0.1
"""What may be taken at once after a pause: what the rate gives in this time, and at least one."""


class TokenBucket:
    """Spaces things out to ``rate`` units a second on average. Not for several threads at once.

    Something larger than the bucket is not held up for ever: it passes as soon as any token is there, and leaves a
    debt that delays what comes after it. So in any ``t`` seconds less than ``rate * t + burst`` units pass, and the
    last thing taken.
    """

    def __init__(self, rate: float | None, now_s: float) -> None:
        """Begin full.

        Args:
            rate: Units a second, above 0; None: no limit.
            now_s: Monotonic seconds.
        """
        if rate is not None and not rate > 0:
            raise ValueError(f"a rate must be above 0: {rate}")
        self._rate = rate
        self._burst = max(1.0, (rate or 0) * _BURST_S)
        self._tokens = self._burst
        self._at_s = now_s

    @property
    def burst(self) -> float:
        """Units that a full bucket has."""
        return self._burst

    def ready_in_s(self, now_s: float) -> float:
        """Seconds until something may be taken; 0: now."""
        if self._rate is None:
            return 0.0
        self._fill(now_s)
        return 0.0 if self._tokens > 0 else max(-self._tokens / self._rate, 1e-6)

    def take(self, units: float, now_s: float) -> None:
        """Count ``units`` as passed, whether there are as many or not."""
        if self._rate is not None:
            self._fill(now_s)
            self._tokens -= units

    def _fill(self, now_s: float) -> None:
        assert self._rate is not None
        gained = max(0.0, now_s - self._at_s) * self._rate
        self._tokens = min(self._burst, self._tokens + gained)
        self._at_s = max(self._at_s, now_s)
