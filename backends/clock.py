"""The clock that this layer is given. ``tiered.clock`` has the machine's and one for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading


class Clock(Protocol):
    """Time that never goes back, and waiting."""

    def monotonic_s(self) -> float:
        """Seconds; only differences mean anything."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until ``event`` is set or ``timeout_s`` seconds have passed; whether it is set."""
        ...
