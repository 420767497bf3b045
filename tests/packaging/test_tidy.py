"""How large things may be, and what no folder holds."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LINES_OF_A_MODULE = 1_000
LINES_OF_A_FUNCTION = 70
PACKAGES = ("tiered/", "backends/", "fetcher/", "timer/")

# "path" or "path:function" -> why it is larger all the same. What is no longer needed fails.
ALLOWED: dict[str, str] = {}


def functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines from `def` to the last) of every function, methods and inner ones too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def too_large(texts: dict[str, str]) -> dict[str, int]:
    """ "path" or "path:function" -> lines, of what is over its limit."""
    found = {}
    for path, text in texts.items():
        if not path.endswith(".py"):
            continue
        lines = len(text.splitlines())
        if lines > LINES_OF_A_MODULE and not path.startswith("tests/"):
            found[path] = lines
        for name, length in functions(text):
            if length > LINES_OF_A_FUNCTION:
                found[f"{path}:{name}"] = length
    return found


def test_nothing_is_too_large(tracked: dict[str, str]):
    found = too_large(tracked)
    assert {what: lines for what, lines in found.items() if what not in ALLOWED} == {}
    assert ALLOWED.keys() <= found.keys()


def test_too_large_is_found():
    long_function = "def f():\n" + "    x = 1\n" * 70
    long_module = "x = 1\n" * 1_001
    found = too_large(
        {"a.py": long_function, "tiered/b.py": long_module, "tests/c.py": long_module}
    )
    assert found == {"a.py:f": 71, "tiered/b.py": 1_001}


def test_scripts_and_pages_are_no_packages(tracked: dict[str, str]):
    inits = {name for name in tracked if name.endswith("__init__.py")}
    assert [name for name in inits if not name.startswith(PACKAGES)] == []


def test_packages_have_no_gap(tracked: dict[str, str]):
    """A folder without its __init__.py would be left out by some tools and taken by others."""
    folders = {
        str(Path(name).parent)
        for name in tracked
        if name.endswith(".py") and name.startswith(PACKAGES)
    }
    assert [folder for folder in folders if f"{folder}/__init__.py" not in tracked] == []


def test_each_package_says_that_it_is_typed(tracked: dict[str, str]):
    assert all(f"{package}py.typed" in tracked for package in PACKAGES)


def test_scripts_with_a_shebang_can_be_run(root: Path, tracked: dict[str, str]):
    shebangs = [name for name, text in tracked.items() if text.startswith("#!")]
    assert ".ci/run" in shebangs
    assert [name for name in shebangs if not (root / name).stat().st_mode & 0o111] == []


def test_each_script_of_figures_starts(root: Path):
    """As typed: without what pytest puts on the path."""
    scripts = sorted((root / "tests" / "peer").glob("figures*.py"))
    assert len(scripts) > 8

    def start(script: Path) -> tuple[str, int, str]:
        command = [sys.executable, str(script), "--help"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return script.name, done.returncode, done.stderr

    with ThreadPoolExecutor(2) as pool:
        assert [found for found in pool.map(start, scripts) if found[1]] == []
