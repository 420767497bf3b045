"""The program as a user runs it: in this process, or as a process of its own; and how it ended."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered.__main__ import run
from tiered.cli.call import Surroundings
from tiered.clock import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import pytest

Start = Callable[..., "subprocess.Popen[bytes]"]
END_SECONDS_MAX = 120.0
SMALL = ("--bundle-size", "16KiB", "--buffer-size", "64KiB", "--segment-size", "64KiB")
"""Options of ``attach`` that make many parts and segments of a little data."""


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    arguments: tuple[str, ...]
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> str:
        """The one error line, without its beginning."""
        found = [line for line in self.err.splitlines() if line.startswith("tiered: error: ")]
        assert len(found) == 1, self
        assert "Traceback" not in self.err
        return found[0].removeprefix("tiered: error: ")

    def good(self) -> Ran:
        assert self.code == 0, self
        return self


class CommandLine:
    """Runs command lines in this process, with an environment and a clock of the test's own."""

    def __init__(self, capture: pytest.CaptureFixture[bytes]) -> None:
        self._capture = capture
        self.environment = {"TIERED_ATTACH_NICE": "0"}  # it would be that of all tests
        self.clock: Clock = SystemClock()

    def __call__(self, *arguments: str | Path) -> Ran:
        words = tuple(map(str, arguments))
        self._capture.readouterr()
        code = run(words, Surroundings(self.environment, self.clock))
        out, err = self._capture.readouterr()
        return Ran(words, code, out, err.decode())

    def good(self, *arguments: str | Path) -> Ran:
        """Run what must succeed."""
        return self(*arguments).good()


def here(*arguments: str | Path) -> Ran:
    """Run a command line in this process; settings of this machine's user do not count."""
    words = tuple(map(str, arguments))
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words, Surroundings({"TIERED_ATTACH_NICE": "0"}))
        out.flush()
    buffer = out.detach()
    assert isinstance(buffer, io.BytesIO)
    return Ran(words, code, buffer.getvalue(), err.getvalue())


def command(arguments: Iterable[str | Path]) -> tuple[str, ...]:
    return (sys.executable, "-m", "tiered", *map(str, arguments))


def environment() -> dict[str, str]:
    """Of a child: this process's, without settings of ours."""
    return {name: text for name, text in os.environ.items() if not name.startswith("TIERED_")}


def program(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Ran:
    """Run a command line as a process of its own, to its end."""
    done = subprocess.run(
        command(arguments),
        capture_output=True,
        env=environment() | dict(env or {}),
        timeout=END_SECONDS_MAX,
        check=False,
    )
    words = tuple(map(str, arguments))
    return Ran(words, done.returncode, done.stdout, done.stderr.decode())


def spawn(*arguments: str | Path, **options: object) -> subprocess.Popen[bytes]:
    """Begin a command line as a process of its own."""
    return subprocess.Popen(
        command(arguments),
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        env={**environment(), **options.pop("environment", {})},
        **options,
    )


def attach(store: Path, folder: Path, *options: str) -> str:
    """Tier all that a store holds into a folder; the tier's URL."""
    url = f"file://{folder}"
    here("attach", store, "--to", url, "--once", *options).good()
    return url
