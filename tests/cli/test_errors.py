"""Exit codes by what ends a command, and one line on stderr for each."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import click
import pytest
from support.command_line import program

import tiered
from backends import errors as backend
from tiered import errors
from tiered.__main__ import run
from tiered.api.stores import backend_errors
from tiered.cli import frame
from tiered.cli.call import Surroundings
from tiered.cli.exits import ending, explain

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


CLICK = [click.UsageError("u"), click.BadParameter("b"), click.NoSuchOption("--n")]


def every_class() -> list[type[Exception]]:
    """All that says what failed, whoever defines it."""
    for module in pkgutil.walk_packages(tiered.__path__, "tiered."):
        if ".spark" not in module.name and "__main__" not in module.name:
            importlib.import_module(module.name)
    found: list[type[Exception]] = [errors.TieredStoreError, backend.BackendError]
    for kind in found:
        found += kind.__subclasses__()
    return found


def test_every_error_has_a_reason_of_the_list_and_the_page_has_the_list():
    seen = set()
    for kind in every_class():
        error = kind.__new__(kind)
        error.args = ("w",)
        seen.add(explain(error).reason)
    seen |= {explain(one).reason for one in (*CLICK, OSError(28, "x"), OSError(5, "x"), KeyError())}
    seen |= set(backend.REASONS)
    page = (Path(__file__).parents[2] / "docs/json.md").read_text()
    listed = re.findall(r"^\| `([a-z_]+)` \| [^|]+ \| .+ \|$", page, re.MULTILINE)
    assert sorted(seen) == sorted(listed), "and nothing is in the list that nobody says"


def test_the_reason_of_a_store_is_that_of_what_it_answered():
    for kind, reason in ((backend.PermissionDeniedError, "permission"), (backend.UnreachableError, "unreachable"),
                         (backend.ObjectNotFoundError, "not_found"), (backend.ShortReadError, "unavailable")):  # fmt: skip
        with pytest.raises(errors.StoreUnavailableError) as caught, backend_errors():
            raise kind("x")
        assert explain(caught.value).reason == explain(kind("x")).reason == reason


def fails(*words: str, env: dict[str, str] | None = None) -> dict[str, object]:
    """The one document of a failing command; stderr has one line."""
    ran = program(*words, env=env)
    assert ran.error
    assert set(ran.document) == {"format", "error"}
    assert ran.document["error"]["exit_code"] == ran.code
    return dict(ran.document["error"])


def test_with_json_an_error_is_one_document(tmp_path: Path):
    nothing = f"file://{tmp_path}/nothing"
    for words in (("--json",), ("-o", "json"), ("--output=json",)):
        assert fails("status", nothing, *words)["reason"] == "invalid"
    assert fails("status", nothing, env={"TIERED_OUTPUT": "json"})["reason"] == "invalid"
    (tmp_path / "t.toml").write_text('output = "json"')
    assert fails("--config", f"{tmp_path}/t.toml", "status", nothing)["reason"] == "invalid"
    assert fails("--json", "statis")["reason"] == "usage"
    assert fails("status", "--json")["reason"] == "usage"
    assert (
        fails("status", nothing, "--config", f"{tmp_path}/no.toml", "-o", "json")["reason"]
        == "invalid"
    )
    assert program("status", nothing).out == b"", "nobody asked for a document"
    assert program("status", nothing, "-o", "jsonl").out == b""


def test_what_is_printed_already_stays_the_one_document(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    around = Surroundings({}, form="json")

    def body() -> int:
        around.stdout.write(b'{"format": 1}\n')
        raise errors.DataError("w")

    assert ending(body, around) == 5
    assert capfd.readouterr().out == '{"format": 1}\n'


def test_every_code_of_the_table_of_kinds_is_a_code_of_the_contract():
    kinds = errors.TieredStoreError.__subclasses__()
    assert {kind.exit_code for kind in kinds} == {2, 3, 4, 5, 70}
