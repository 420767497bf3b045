"""What goes to stderr: logs, what commands say, errors, and progress; as text or as JSON.

With JSON whatever else is written there comes as an object, too. Progress is a bar on a terminal once two seconds have
passed, else (as with JSON) a line every ten seconds. A thread of its own asks how far things are; it ends with the block.
Nothing here may delay or fail the work. A line that would say what the last one said is left out.

Of names that others gave (topics, keys, hosts) nothing comes out that a terminal would obey.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

from backends.lazy_dataclass import dataclass
from backends.local_files import read_regular
from tiered.cli.signals import at_end
from tiered.cli.values import format_time, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from tiered.clock import Clock

_OURS = ("tiered", "backends", "fetcher", "timer")
_PREFIXES = ("tiered: ", "error: ", "warning: ")
_END = b"\0\n"
"""Written into the pipe behind the last line; nobody else writes it."""


def write_line(
    form: str, now_ms: int, level: str, text: str, fields: Mapping[str, object] | None = None
) -> None:
    """Write one line for people, or one object.

    Args:
        text: As people read it, ``tiered: `` included.
    """
    if form == "json":
        for prefix in _PREFIXES:
            text = text.removeprefix(prefix)
        text = _json_line(now_ms, level, "tiered", text, fields or {})
    write(f"{printable(text)}\n")


def write(text: str) -> None:
    """Put something on stderr, if it is taken: a full disk or a closed pipe there stops no work."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def guess(arguments: Sequence[str], environment: Mapping[str, str], *options: str) -> str:
    """What is said of an option, for an error that is met before the settings are known; "": nothing.

    Args:
        options: Its spellings, the long one first.
    """
    key = options[0].removeprefix("--")
    file = environment.get("TIERED_CONFIG", "")
    given = environment.get(f"TIERED_{key.upper().replace('-', '_')}", "")
    for number, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        value = value if has_value else "".join(arguments[number + 1 : number + 2])
        if name == "--config":
            file = value
        elif name in options:
            given = value
    return given or _in_file(file, key)


def _in_file(name: str, key: str) -> str:
    import tomllib

    if name:
        with contextlib.suppress(OSError, ValueError):
            return str(tomllib.loads(read_regular(name).decode()).get(key, ""))
    return ""


def _json_line(
    now_ms: int, level: str, logger: str, message: str, more: Mapping[str, object]
) -> str:
    named = {"time": format_time(now_ms), "level": level, "logger": logger, "message": message}
    return json.dumps({**named, **more})


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """As ``2026-07-01T12:00:00.123Z WARNING tiered.attach: what happened``."""
        text = printable(" ".join(record.getMessage().split()))
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return (
            f"{format_time(round(record.created * 1000))} {record.levelname} {record.name}: {text}"
        )


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One object a line."""
        trace = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        level, now_ms = record.levelname.lower(), round(record.created * 1000)
        return _json_line(now_ms, level, record.name, record.getMessage(), trace)


@contextlib.contextmanager
def logging_to_stderr(form: str, level: int, now_ms: Callable[[], int]) -> Iterator[None]:
    """Show logs, of ours from a level on, of others warnings and worse."""
    is_json = form == "json"
    with _lines_of_others(now_ms) if is_json else contextlib.nullcontext():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Json() if is_json else _Text())
        ours = [logging.getLogger(name) for name in _OURS]
        levels = [logger.level for logger in ours]
        root = logging.getLogger()
        root.addHandler(handler)
        for logger in ours:
            logger.setLevel(level)
        try:
            yield
        finally:
            root.removeHandler(handler)
            for logger, before in zip(ours, levels, strict=True):
                logger.setLevel(before)


@contextlib.contextmanager
def _lines_of_others(now_ms: Callable[[], int]) -> Iterator[None]:
    """Make an object of each line on stderr that is none: of libraries, and of child processes as Spark's.

    A pipe takes the place of the descriptor, and a thread copies from it. It ends at a mark, not at the pipe's end, which a
    child may keep open.
    """
    sys.stderr.flush()
    real, (read, written) = os.dup(2), os.pipe()
    os.dup2(written, 2)

    def copy() -> None:
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                if line == _END:
                    return
                _write_all(real, line if _is_object(line) else _wrapped(line, now_ms()))

    thread = threading.Thread(target=copy, name="tiered-stderr", daemon=True)
    thread.start()

    def end() -> None:
        os.dup2(real, 2)
        os.write(written, _END)
        thread.join()

    with at_end(end):
        try:
            yield
        finally:
            sys.stderr.flush()
            end()
            os.close(written)
            os.close(real)


def _write_all(descriptor: int, line: bytes) -> None:
    """Write a line, or leave it out where it is not taken: nobody may wait for a thread that has ended over it."""
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(descriptor, line) :]


def _is_object(line: bytes) -> bool:
    try:
        return line.startswith(b'{"time"') and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _wrapped(line: bytes, now_ms: int) -> bytes:
    text = line.decode("utf-8", "backslashreplace").rstrip()
    return f"{_json_line(now_ms, 'warning', 'stderr', text, {})}\n".encode() if text else b""


BAR_AFTER_S = 2.0
LINE_EVERY_S = 10.0
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far things are."""

    text: str  # for people
    done: float = 0  # units done
    total: float | None = None  # units in all; None when nobody knows


class Progress:
    """Shows progress while a ``with`` block runs."""

    def __init__(
        self,
        what: str,
        ask: Callable[[], Progressed] | str,
        *,
        clock: Clock,
        is_quiet: bool,
        form: str,
    ) -> None:
        """Show the progress of ``what``; ``form`` is that of log lines.

        Args:
            ask: Says how far it is, and is called from another thread; or where it begins, and ``tell`` says how it goes on.
        """
        self._what = what
        self._now = Progressed(ask) if isinstance(ask, str) else Progressed("")
        self._ask = self._told if isinstance(ask, str) else ask
        self._clock = clock
        self._is_quiet = is_quiet
        self._form = form
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def tell(self, text: str, done: float = 0, total: float | None = None) -> None:
        """How far it is now; from any thread."""
        self._now = Progressed(text, done, total)

    def _told(self) -> Progressed:
        return self._now

    def __enter__(self) -> Self:
        if not self._is_quiet:
            is_drawn = sys.stderr.isatty() and self._form == "text"
            body = self._draw if is_drawn else self._write
            self._thread = threading.Thread(target=body, name="tiered-progress", daemon=True)
            self._thread.start()
        return self

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
