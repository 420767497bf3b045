"""A limit on a rate, as a token bucket. It decides; who waits is another matter."""

from __future__ import annotations

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
