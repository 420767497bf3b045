"""Undoes each mend in a copy of the product and sees its test fail: a regression test that passes without its mend is blind.

A file ``NAME.diff`` here is a pair of a mend and its test: the first line says what users met before, the lines that begin
with ``tests/`` name the tests that were written for it (each must fail), and behind them stands how to undo it, as
``git diff -R`` prints it. It is added with the mend. ``make test`` sees that each can still be applied (whoever rewrites the
place writes down anew how to undo the mend); ``make test-all`` undoes them. What breaks a guarantee in the simulation's
world stands in ``tests/simulation/mutants.py`` instead, where seeds have to find it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
COPIED = ("backends", "fetcher", "tiered", "timer", "tests", "docs", "pyproject.toml")
"""The rest of a checkout is linked."""
FAILED = 1
"""pytest: tests ran and some failed. Any other code means that it could not even begin."""


@dataclass(frozen=True)
class Mend:
    name: str
    harm: str
    tests: tuple[str, ...]
    undo: str


def read(file: Path) -> Mend:
    head, _, undo = file.read_text("utf-8").partition("\ndiff ")
    harm, *tests = head.splitlines()
    return Mend(file.stem, harm, tuple(tests), "diff " + undo)


MENDS = [read(file) for file in sorted(HERE.glob("*.diff"))]
each_mend = pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.name)


def apply(mend: Mend, folder: Path, *options: str) -> None:
    words = ("git", "apply", "--recount", *options, "-")
    # Where the folder lies in a checkout, git would take the names for names from its root, which they are not in a copy.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    ran = subprocess.run(
        words, input=mend.undo, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{mend.name} can not be undone any more: {ran.stderr}"


def functions(tests: tuple[str, ...]) -> set[tuple[str, str]]:
    return {(test.partition("::")[0], re.split(r"::|\[", test)[1]) for test in tests}


@each_mend
def test_each_mend_can_be_undone(mend: Mend):
    apply(mend, ROOT, "--check")
    assert mend.harm
    assert mend.tests
    for file, name in functions(mend.tests):
        assert f"def {name}(" in (ROOT / file).read_text("utf-8"), mend.name


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout like this one, whose files may be changed."""
    to = tmp_path_factory.mktemp("undone")
    for entry in ROOT.iterdir():
        if entry.name not in COPIED:
            (to / entry.name).symlink_to(entry)
        elif entry.is_dir():
            shutil.copytree(entry, to / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(entry, to / entry.name)
    (to / ".git").unlink()  # a link: what is done in the copy is nothing to this one
    return to


@pytest.mark.slow
@each_mend
def test_without_its_mend_its_tests_fail(mend: Mend, checkout: Path):
    apply(mend, checkout)
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "200")
    env = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            [*words, *mend.tests],
            cwd=checkout,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        apply(mend, checkout, "--reverse")
    told = ran.stdout[-3000:] + ran.stderr[-1000:]
    assert ran.returncode == FAILED, told
    failed = re.findall(r"^FAILED (\S+)", ran.stdout, re.MULTILINE)
    assert functions(mend.tests) <= functions(tuple(failed)), f"passes all the same: {told}"
