"""A thread that calls ``tick`` when it is due: for expiry, hedges and traffic limits."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from tiered.clock import Clock

_LOG = logging.getLogger("tiered.fetcher")
IDLE_SECONDS = 1.0
"""How long it sleeps when nothing is due and nobody wakes it."""


class Ticking(Protocol):
    """What wants to be called."""

    def tick(self) -> float | None:
        """Do what is due; in how many seconds it wants to be called again, if at all."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when ``tick`` ought to be called sooner."""
        ...


class Ticker:
    """Calls ``tick`` from its making until it is closed. It holds no lock.

    A call that fails is logged and made again a second later: without it nothing would expire, and no read be given up.
    """

    def __init__(self, ticking: Ticking, clock: Clock) -> None:
        self._ticking = ticking
        self._clock = clock
        self._is_closed = False
        self._due = threading.Event()
        ticking.listen(self._due.set)
        self._thread = threading.Thread(target=self._run, name="fetcher-ticker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            due_s = self._tick()
            self._clock.wait(self._due, IDLE_SECONDS if due_s is None else min(due_s, IDLE_SECONDS))
            self._due.clear()

    def _tick(self) -> float | None:
        try:
            return self._ticking.tick()
        except Exception:  # noqa: BLE001 (logged; the thread has to go on)
            _LOG.exception("a defect of ours: the upkeep of read-ahead failed, and is tried again")
            return None

    def close(self) -> None:
        """Stop the thread."""
        self._is_closed = True
        self._due.set()
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
