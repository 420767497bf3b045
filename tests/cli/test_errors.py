"""Exit codes by what ends a command, and one line on stderr for each."""

from __future__ import annotations

import click
import pytest

from backends import errors as backend
from tiered import errors
from tiered.__main__ import run
from tiered.cli import frame
from tiered.cli.call import Surroundings
from tiered.cli.exits import ending

CODES = [
    (errors.InvalidError("w", where="x", do="d"), 2, "w (x); d"),
    (errors.StoreUnavailableError("w"), 3, "w"),
    (errors.FencedError("w"), 4, "w"),
    (errors.DataError("w"), 5, "w"),
    (errors.ClosedError("w"), 70, "w"),
    (errors.InternalError("w"), 70, "w"),
    (backend.UnavailableError("u"), 3, "u; check that the store can be reached"),
    (backend.PermissionDeniedError("u"), 3, "u; check credentials and permissions"),
    (backend.ConfigurationError("c"), 2, "c"),
    (click.UsageError("Missing argument 'URL'."), 2, "missing argument 'URL'; see `tiered --help`"),
    (backend.StoreFullError("u"), 3, "u; make room\n"),
    (
        OSError(28, "No space left on device", "/x"),
        1,
        "No space left on device (/x); make room and",
    ),
    (OSError(122, "Disk quota exceeded", "/x"), 1, "Disk quota exceeded (/x); make room and"),
    (OSError(5, "Input/output error", "/x"), 1, "Input/output error (/x); mend it and try again"),
    (KeyError("k"), 70, "a defect of ours: KeyError: 'k' (tests/cli/test_errors.py:"),
    (AssertionError("two\nlines"), 70, "a defect of ours: AssertionError: two lines ("),
]


@pytest.mark.parametrize(("error", "code", "line"), CODES, ids=lambda value: repr(value)[:30])
def test_code_and_line(error: Exception, code: int, line: str, capfd: pytest.CaptureFixture[str]):
    def body() -> int:
        raise error

    assert ending(body, Surroundings({})) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"tiered: error: {line}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (click.Abort(), 130), (BrokenPipeError(), 0)],
)
def test_silent_ends(error: BaseException, code: int, capfd: pytest.CaptureFixture[str]):
    def body() -> int:
        raise error

    assert ending(body, Surroundings({})) == code
    assert capfd.readouterr() == ("", "")


def test_debug_shows_the_traceback_and_the_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def fails(*_: object) -> int:
        raise KeyError("k")

    monkeypatch.setattr(frame, "make_call", fails)
    assert run(["config", "show"], Surroundings({})) == 70
    assert "Traceback" not in capfd.readouterr().err
    assert run(["--debug", "config", "show"], Surroundings({})) == 70
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("tiered: error: a defect of ours")


def test_every_code_of_the_table_of_kinds_is_a_code_of_the_contract():
    kinds = errors.TieredStoreError.__subclasses__()
    assert {kind.exit_code for kind in kinds} == {2, 3, 4, 5, 70}
