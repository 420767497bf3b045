"""The only reader of the clock. Everything else takes a ``Clock``, so that tests control time."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from tiered.model import TimestampMs


class Clock(Protocol):
    """Wall clock, monotonic clock and waiting."""

    def now_ms(self) -> TimestampMs:
        """Wall-clock time, UTC milliseconds. May jump."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back. Only differences mean anything."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until ``event`` is set or ``timeout_s`` seconds have passed; whether it is set."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> TimestampMs:
        return TimestampMs(time.time_ns() // 1_000_000)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)


class ManualClock:
    """A clock that stands still until a test moves it. Waiting moves it by the timeout and returns at once."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._now_ms = now_ms
        self._monotonic_s = 0.0

    def advance(self, seconds: float) -> None:
        """Move both clocks on by ``seconds``."""
        with self._lock:
            self._now_ms += round(seconds * 1000)
            self._monotonic_s += seconds

    def jump(self, seconds: float) -> None:
        """Move only the wall clock, as a correction by NTP or by hand does."""
        with self._lock:
            self._now_ms += round(seconds * 1000)

    def now_ms(self) -> TimestampMs:
        with self._lock:
            return TimestampMs(self._now_ms)

    def monotonic_s(self) -> float:
        with self._lock:
            return self._monotonic_s

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self.advance(timeout_s)
        return event.is_set()
