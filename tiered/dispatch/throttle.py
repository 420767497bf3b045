"""A limit on bytes per second, so that tiering never takes more of a disk or a line than it is given."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiered.clock import Clock


class Throttle:
    """Spaces out transfers. From any thread."""

    def __init__(self, bytes_per_s: int, clock: Clock, stop: threading.Event) -> None:
        """Allow ``bytes_per_s`` (0: no limit); ``stop`` ends a wait early."""
        self._rate = bytes_per_s
        self._clock = clock
        self._stop = stop
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def take(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` more may be transferred. A large transfer delays those after it, not itself."""
        if not self._rate or not size_bytes:
            return
        with self._lock:
            now_s = self._clock.monotonic_s()
            begin_s = max(now_s, self._free_at_s)
            self._free_at_s = begin_s + size_bytes / self._rate
        if begin_s > now_s:
            self._clock.wait(self._stop, begin_s - now_s)
