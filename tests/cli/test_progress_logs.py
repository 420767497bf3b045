"""What goes to stderr while a command runs: progress and logs."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from typing import TYPE_CHECKING

from tiered.cli.call import Call
from tiered.cli.logs import logging_to_stderr
from tiered.cli.progress import Progress, Progressed
from tiered.cli.settings import all_settings
from tiered.clock import ManualClock, SystemClock
from tiered.config import resolve

if TYPE_CHECKING:
    import pytest

    from tiered.model import TimestampMs


class Steps:
    """A clock whose waits are counted and end when the test says so."""

    def __init__(self, steps: int) -> None:
        self.waits: list[float] = []
        self._left = steps
        self.is_over = threading.Event()

    def now_ms(self) -> TimestampMs:
        return ManualClock().now_ms()

    def monotonic_s(self) -> float:
        return sum(self.waits)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        self._left -= 1
        if self._left < 0:
            self.is_over.set()
            event.wait()
        return event.is_set()


def shown(texts: list[str], *, is_quiet: bool = False) -> list[float]:
    clock = Steps(len(texts))
    rest = iter(texts)
    with Progress("working", lambda: Progressed(next(rest)), clock=clock, is_quiet=is_quiet):
        if not is_quiet:
            assert clock.is_over.wait(10)
    return clock.waits


def test_a_line_every_ten_seconds_unless_nothing_has_changed(capsys: pytest.CaptureFixture[str]):
    assert shown(["a", "a", "b"]) == [10.0] * 4
    assert capsys.readouterr().err == "tiered: working: a\ntiered: working: b\n"


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]):
    assert shown(["a"], is_quiet=True) == []
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_after_two_seconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", Terminal())
    clock = Steps(4)
    asked = Progressed("half", 50, 100)
    with Progress("working", lambda: asked, clock=clock, is_quiet=False):
        assert clock.is_over.wait(10)
    assert clock.waits[:2] == [2.0, 0.2]
    assert "working" in sys.stderr.getvalue()
    assert "half" in sys.stderr.getvalue()


def test_work_shorter_than_two_seconds_shows_no_bar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress("working", lambda: Progressed(""), clock=SystemClock(), is_quiet=False):
        pass
    assert sys.stderr.getvalue() == ""


def call(**given: object) -> Call:
    settings = all_settings()
    chosen = resolve(settings, file={}, file_name="", environment={}, given=given)
    return Call("tiered attach", "attach", {}, chosen, ManualClock())


def test_logs_as_text_and_as_json(capsys: pytest.CaptureFixture[str]):
    log = logging.getLogger("tiered.attach")
    before = log.getEffectiveLevel()
    with logging_to_stderr(call()):
        log.warning("two\nlines of %s", "it")
        log.debug("not shown")
        logging.getLogger("other").info("not shown")
    line = capsys.readouterr().err
    assert line.endswith("Z WARNING tiered.attach: two lines of it\n")
    with logging_to_stderr(call(**{"log-format": "json", "debug": True})):
        log.debug("shown")
        try:
            {}["k"]
        except KeyError:
            log.exception("why")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == (
        "debug",
        "tiered.attach",
        "shown",
    )
    assert "KeyError" in second["traceback"]
    log.warning("after")
    assert "after" not in capsys.readouterr().err
    assert log.getEffectiveLevel() == before
