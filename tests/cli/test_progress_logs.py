"""What goes to stderr while a command runs: progress and logs."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tiered.cli import frame
from tiered.cli.stderr import Progress, Progressed, logging_to_stderr, write_line
from tiered.clock import ManualClock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.command_line import CommandLine

    from tiered.cli.call import Call
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


def shown(texts: list[str], *, is_quiet: bool = False, form: str = "text") -> list[float]:
    clock = Steps(len(texts))
    rest = iter(texts)
    with Progress(
        "working", lambda: Progressed(next(rest)), clock=clock, is_quiet=is_quiet, form=form
    ):
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
    with Progress("working", lambda: asked, clock=clock, is_quiet=False, form="text"):
        assert clock.is_over.wait(10)
    assert clock.waits[:2] == [2.0, 0.2]
    assert "working" in sys.stderr.getvalue()
    assert "half" in sys.stderr.getvalue()


def test_work_shorter_than_two_seconds_shows_no_bar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(
        "working", lambda: Progressed(""), clock=SystemClock(), is_quiet=False, form="text"
    ):
        pass
    assert sys.stderr.getvalue() == ""


def objects(err: str) -> list[dict[str, Any]]:
    """Every line, which must be an object with a time and a level."""
    found = [json.loads(line) for line in err.splitlines()]
    for one in found:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["time"])
        assert one["level"] in {"debug", "info", "warning", "error"}
        assert not one["message"].startswith("tiered: ")
    return found


def test_progress_as_json_also_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert shown(["a", "a"], form="json") == [10.0] * 3
    (one,) = objects(sys.stderr.getvalue())
    assert (one["level"], one["message"], one["done"]) == ("info", "working: a", 0)


JSON = ("--log-format", "json")


def test_every_line_of_a_run_is_json(tiered: CommandLine, batches: Path, tmp_path: Path):
    """The summary, what is left out, notes: with text they are lines for people."""
    to = ("--to", f"file://{tmp_path}/tier", "--once")
    found = objects(tiered.good("attach", batches, *to, *JSON).err)
    assert any(" messages, " in one["message"] for one in found)
    assert any(one["message"].startswith("left out (light queue") for one in found)
    broken = objects(tiered.good("lease", to[1], "--break", *JSON).err)
    assert [one["level"] for one in broken] in ([], ["warning"])


@pytest.mark.parametrize("how", ["option", "joined", "variable", "file", "variable of a file"])
@pytest.mark.parametrize("words", [("attach",), ("ls", "nowhere"), ("frob",), ("ls", "--frob")])
def test_an_error_is_json_wherever_the_format_is_said(
    words: tuple[str, ...], how: str, tiered: CommandLine, tmp_path: Path
):
    config = tmp_path / "c.toml"
    config.write_text('log-format = "json"\n')
    more = {"option": JSON, "joined": ("--log-format=json",), "file": ("--config", str(config))}
    variables = {
        "variable": {"TIERED_LOG_FORMAT": "json"},
        "variable of a file": {"TIERED_CONFIG": str(config)},
    }
    tiered.environment |= variables.get(how, {})
    ran = tiered(*words, *more.get(how, ()))
    (one,) = objects(ran.err)
    assert (ran.code, one["level"], one["exit_code"]) == (2, "error", 2)


def test_the_traceback_of_an_error_is_a_field(tiered: CommandLine):
    (one,) = objects(tiered("ls", "nowhere", "--debug", *JSON).err)
    assert "Traceback" in one["traceback"]


def test_what_others_write_to_stderr_becomes_json(
    tiered: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    """Libraries, child processes, and Python itself."""

    def runs(_call: Call) -> int:
        os.write(2, b"Setting default log level\n\nto WARN \xff\n")
        subprocess.run([sys.executable, "-c", "raise SystemExit('of a child')"], check=False)
        logging.getLogger("tiered.x").warning("of ours")
        os.write(2, b'{"time" is not an object\n')
        return 0

    monkeypatch.setattr(frame, "_run", partial(run_with, runs, frame._run))
    found = objects(tiered.good("config", "show", *JSON).err)
    said = [(one["logger"], one["message"]) for one in found]
    assert sorted(said) == [
        ("stderr", "Setting default log level"),
        ("stderr", "of a child"),
        ("stderr", "to WARN \\xff"),
        ("stderr", '{"time" is not an object'),
        ("tiered.x", "of ours"),
    ]


def run_with(runs: frame.Run, run: Callable[..., int], _: frame.Run, call: Call) -> int:
    return run(runs, call)


def test_logs_as_text_and_as_json(capfd: pytest.CaptureFixture[str]):
    log = logging.getLogger("tiered.attach")
    before = log.getEffectiveLevel()
    with logging_to_stderr("text", logging.INFO, ManualClock().now_ms):
        log.warning("two\nlines of %s", "it")
        log.debug("not shown")
        logging.getLogger("other").info("not shown")
    line = capfd.readouterr().err
    assert line.endswith("Z WARNING tiered.attach: two lines of it\n")
    with logging_to_stderr("json", logging.DEBUG, ManualClock().now_ms):
        log.debug("shown")
        try:
            {}["k"]
        except KeyError:
            log.exception("why")
    first, second = map(json.loads, capfd.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == (
        "debug",
        "tiered.attach",
        "shown",
    )
    assert "KeyError" in second["traceback"]
    log.warning("after")
    assert "after" not in capfd.readouterr().err
    assert log.getEffectiveLevel() == before


def test_names_of_others_tell_a_terminal_nothing(capfd: pytest.CaptureFixture[str]):
    """Topics, keys and hosts are what somebody has put into a bucket or a store."""
    evil = "host \x1b]0;evil\x07\x1b[31m \u202e ä"
    with logging_to_stderr("text", logging.INFO, lambda: 0):
        # (Without half a character: the test runner keeps what is logged, and could not pass it on.)
        logging.getLogger("tiered.attach").warning("%s", evil)
    write_line("text", 0, "error", f"tiered: error: {evil} \udcff")
    logged, written = capfd.readouterr().err.splitlines()
    assert logged.endswith(r"host \x1b]0;evil\x07\x1b[31m \u202e ä")
    assert written.endswith(r"host \x1b]0;evil\x07\x1b[31m \u202e ä \udcff")
