"""A store made slow on purpose, for measuring: latency, bandwidth and stalls are added to each read of another store."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.base import get_into
from backends.wrapping import WrappingStore
from tiered.errors import InvalidError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from backends.base import ByteRange, ObjectStore
    from tiered.clock import Clock


@dataclass(frozen=True, slots=True)
class Slowness:
    """What is added to each request that reads.

    Attributes:
        latency_ms: Before it is made.
        mib_per_s: Bandwidth of each request by itself: so many MiB come in a second; None: no limit.
        stall_percent: Of the requests, chosen at random, so many
        stall_ms: are held up by so much more.
    """

    latency_ms: float = 0.0
    mib_per_s: float | None = None
    stall_percent: float = 0.0
    stall_ms: float = 1000.0

    def __post_init__(self) -> None:
        slow = self.latency_ms >= 0 and self.stall_ms >= 0 and 0 <= self.stall_percent <= 100  # noqa: PLR2004
        if not slow or (self.mib_per_s is not None and self.mib_per_s <= 0):
            raise InvalidError("a latency, bandwidth or stall out of range")


class SlowStore(WrappingStore):
    """Waits as told, and counts. For any thread.

    Attributes:
        is_on: Whether it waits.
        requests: Reads of objects.
        size_bytes: What they gave.
    """

    def __init__(
        self, inner: ObjectStore, slowness: Slowness, clock: Clock, rng: random.Random
    ) -> None:
        """Wrap a store; ``rng`` chooses the stalls."""
        super().__init__(inner)
        self.is_on = False
        self.requests = 0
        self.size_bytes = 0
        self._slowness = slowness
        self._clock = clock
        self._rng = rng
        self._lock = threading.Lock()
        self._never = threading.Event()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """See ``ObjectStore``."""
        self._before()
        data = super().get(key, byte_range)
        self._behind(len(data))
        return data

    def get_into(self, key: str, byte_range: ByteRange, target: memoryview) -> None:
        """See ``IntoStore``."""
        self._before()
        get_into(self._inner, key, byte_range, target)
        self._behind(len(target))

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[bytes]:
        """See ``ObjectStore``."""
        self._before()
        found = super().get_ranges(key, byte_ranges)
        self._behind(sum(map(len, found)))
        return found

    def close(self) -> None:
        """Nothing: the store below is the caller's."""

    def _before(self) -> None:
        slow = self._slowness
        with self._lock:
            self.requests += 1
            stalls = slow.stall_percent > 0 and self._rng.random() * 100 < slow.stall_percent
        self._wait((slow.latency_ms + stalls * slow.stall_ms) / 1000)

    def _behind(self, size_bytes: int) -> None:
        with self._lock:
            self.size_bytes += size_bytes
        if self._slowness.mib_per_s is not None:
            self._wait(size_bytes / (self._slowness.mib_per_s * (1 << 20)))

    def _wait(self, seconds: float) -> None:
        if self.is_on and seconds > 0:
            self._clock.wait(self._never, seconds)
