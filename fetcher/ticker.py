"""A thread that calls ``tick`` when it is due: for expiry, hedges and traffic limits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType

    from tiered.clock import Clock

TICK_SECONDS_MIN = 0.01
TICK_SECONDS_MAX = 0.05
"""While anything is under way: a hedge is at most so late."""
IDLE_SECONDS = 1.0


class Ticking(Protocol):
    """What wants to be called."""

    def tick(self) -> float | None:
        """Do what is due; in how many seconds it wants to be called again, if at all."""
        ...


class Ticker:
    """Calls ``tick`` from its making until it is closed. It holds no lock, and lets nothing escape."""

    def __init__(self, ticking: Ticking, clock: Clock) -> None:
        self._ticking = ticking
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fetcher-ticker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            due_s = self._ticking.tick()
            due_s = IDLE_SECONDS if due_s is None else min(due_s, IDLE_SECONDS)
            self._clock.wait(self._stop, max(min(due_s, TICK_SECONDS_MAX), TICK_SECONDS_MIN))

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
