"""SIGINT and SIGTERM for commands that drain: the first asks to stop, the second cuts the command short."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, Self

from tiered.cli.errors import Terminated

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopper:
    """Takes both signals over while a ``with`` block runs (in the main thread; elsewhere it does nothing).

    Attributes:
        received: The first signal that came; None so far.
        on_stop: What the first signal does; while it is None a signal cuts the command short at once.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.on_stop: Callable[[], None] | None = None
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)

    @property
    def exit_code(self) -> int:
        """Of a command that the signal cut short: 128 and its number."""
        return 0 if self.received is None else 128 + self.received

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_first, self.received = self.received is None, self.received or signal.Signals(number)
        if is_first and self.on_stop is not None:
            self.on_stop()
        elif number == signal.SIGTERM:
            raise Terminated
        else:
            raise KeyboardInterrupt
