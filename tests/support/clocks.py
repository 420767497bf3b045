"""Clocks of the machine whose time of day a test sets."""

from __future__ import annotations

from tiered.clock import SystemClock
from tiered.model import TimestampMs


class Shifted(SystemClock):
    """The machine's clock, set elsewhere."""

    shift_ms = 0

    def now_ms(self) -> TimestampMs:
        return TimestampMs(super().now_ms() + self.shift_ms)


class Stopped(SystemClock):
    """The machine's clock, but for the time of day, which stands still until a test moves it."""

    def __init__(self) -> None:
        self.time_ms = super().now_ms()

    def now_ms(self) -> TimestampMs:
        return TimestampMs(self.time_ms)
