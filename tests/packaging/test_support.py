"""Tests stand alone: what two of them need is in ``tests/support``, which has an index, and is imported in one way."""

import ast
import functools
import re
from pathlib import PurePath

INDEX = "tests/support/README.md"
ROOTS = frozenset({"support", "simulation"})
"""Folders of tests whose modules others may import; the second is a program of its own, with tests."""
IN_A_CHILD = re.compile(r"(?:from|import) [\w.]*\b(?:test_\w+|conftest)\b")
"""The same in the text of a program that a test runs."""
CHILD = "from a." + "test_two import x"  # in chunks, so that this file is not found itself
LINE = re.compile(r"^- `(\w+)`: (.+)$", re.MULTILINE)


@functools.cache
def looked_at(text: str) -> tuple[list[str], list[str]]:
    """Modules that a file imports, wherever it does; and imports of files of tests in programs that it holds as text."""
    modules: list[str] = []
    inside: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            inside += IN_A_CHILD.findall(node.value)
    return modules, inside


def imported(text: str) -> list[str]:
    return looked_at(text)[0]


def of_tests(texts: dict[str, str]) -> dict[str, str]:
    return {
        name: text
        for name, text in texts.items()
        if name.startswith("tests/") and name.endswith(".py")
    }


def leaning(texts: dict[str, str]) -> list[str]:
    """ "file: module" of each import from a file of tests, or from a conftest."""
    files = {PurePath(name).stem for name in texts if PurePath(name).name.startswith("test_")}
    files.add("conftest")
    found = []
    for name, text in of_tests(texts).items():
        found += [f"{name}: {module}" for module in imported(text) if files & {*module.split(".")}]
        found += [f"{name}: {text}" for text in looked_at(text)[1]]
    return found


def elsewhere(texts: dict[str, str]) -> list[str]:
    """ "file: module" of each import from a folder of tests other than ``ROOTS``, or by the name of ``tests``."""
    folders = {PurePath(name).parts[1] for name in of_tests(texts)} - ROOTS
    products = {"backends", "fetcher", "timer", "packaging"}  # packages, and folders of their tests
    return [
        f"{name}: {module}"
        for name, text in of_tests(texts).items()
        for module in imported(text)
        if module.split(".")[0] in (folders - products) | {"tests"}
    ]


def test_no_test_imports_from_a_test_file(tracked: dict[str, str]):
    assert leaning(tracked) == [], "move what several need to tests/support"


def test_helpers_are_imported_in_one_way(tracked: dict[str, str]):
    assert elsewhere(tracked) == [], "write `from support.NAME import ...`"


def test_other_ways_are_found():
    texts = {
        "tests/a/test_one.py": f"{CHILD}\nrun('{CHILD}')",
        "tests/a/test_two.py": "import " + "conftest\nfrom tests.support import z",
        "tests/support/b.py": "def f():\n    import a.c",
    }
    assert leaning(texts) == [
        "tests/a/test_one.py: a.test_two",
        "tests/a/test_one.py: a.test_two.x",
        "tests/a/test_one.py: " + CHILD.removesuffix(" import x"),
        "tests/a/test_two.py: conftest",
    ]
    assert [line.split(": ")[1] for line in elsewhere(texts)] == [
        "a.test_two", "a.test_two.x", "tests.support", "tests.support.z", "a.c"
    ]  # fmt: skip


def test_the_index_has_a_line_for_each_helper(tracked: dict[str, str]):
    wanted = {
        PurePath(name).stem: str(ast.get_docstring(ast.parse(text))).splitlines()[0]
        for name, text in of_tests(tracked).items()
        if PurePath(name).parent == PurePath("tests/support")
    }
    lines = LINE.findall(tracked[INDEX])
    assert dict(lines) == {name: line.replace("``", "`") for name, line in wanted.items()}
    assert len(lines) == len(wanted)
