"""Progress on stderr: a bar on a terminal once two seconds have passed, else (as with JSON) a line every ten seconds.

A thread of its own asks how far things are; it ends with the block. Nothing here may delay or fail the work. A line that
would say what the last one said is left out.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered.cli.logs import write_line
from tiered.cli.signals import at_end

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from tiered.clock import Clock

BAR_AFTER_S = 2.0
LINE_EVERY_S = 10.0
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far things are.

    Attributes:
        text: For people.
        done: Units done.
        total: Units in all; None when nobody knows.
    """

    text: str
    done: float = 0
    total: float | None = None


class Progress:
    """Shows progress while a ``with`` block runs."""

    def __init__(
        self, what: str, ask: Callable[[], Progressed], *, clock: Clock, is_quiet: bool, form: str
    ) -> None:
        """Show the progress of ``what``, asking ``ask`` from another thread; ``form`` is that of log lines."""
        self._what = what
        self._ask = ask
        self._clock = clock
        self._is_quiet = is_quiet
        self._form = form
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if not self._is_quiet:
            is_drawn = sys.stderr.isatty() and self._form == "text"
            body = self._draw if is_drawn else self._write
            self._thread = threading.Thread(target=body, name="tiered-progress", daemon=True)
            self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread:
            self._thread.join()

    def _write(self) -> None:
        said = ""
        while not self._clock.wait(self._done, LINE_EVERY_S):
            now = self._ask()
            if now.text != said:
                text, fields = (
                    f"tiered: {self._what}: {now.text}",
                    {"done": now.done, "total": now.total},
                )
                write_line(self._form, self._clock.now_ms(), "info", text, fields)
            said = now.text

    def _draw(self) -> None:
        if self._clock.wait(self._done, BAR_AFTER_S):
            return
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns: list[Any] = [
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
        ]
        console = Console(stderr=True)
        with (
            at_end(lambda: console.show_cursor(True)),
            Bar(*columns, console=console, transient=True) as bar,
        ):
            task = bar.add_task(self._what, total=None, text="")
            while not self._clock.wait(self._done, _LOOK_S):
                now = self._ask()
                bar.update(task, completed=now.done, total=now.total, text=now.text)
