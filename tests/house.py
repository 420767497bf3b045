#!/usr/bin/env python3
"""Counts the house: lines of code, docstrings and comments by package, modules, names used twice, comments beside locks.

    .venv/bin/python tests/house.py [--names] [--entered]

Counted over the product (tiered, backends, fetcher, timer), from the text alone. ``--names`` lists what the counts are
made of; ``--entered`` runs an append, a read and an archive run on a folder and counts the project's
files that each enters, warm. It is a table to look at, not a gate.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("tiered", "backends", "fetcher", "timer")
LONGEST_FUNCTION: Final = 70


@dataclass(frozen=True)
class Module:
    """One module, read: its dotted name, its text and what it defines and imports."""

    name: str
    path: Path
    lines: int
    comments: int
    code: int
    docs: int
    used_once: tuple[str, ...]
    classes: tuple[str, ...]
    long_functions: tuple[str, ...]
    pointing: tuple[str, ...]
    imports: frozenset[str]
    locked: bool


def modules() -> list[Module]:
    """Every module of the product, ``__init__`` of an empty package aside."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found.append(read(path))
    names = {module.name for module in found}
    return [
        Module(
            **{
                **vars(module),
                "imports": frozenset(resolved(module.imports, names) - {module.name}),
            }
        )
        for module in found
    ]


def read(path: Path) -> Module:
    """One module's counts."""
    text = path.read_text()
    tree = ast.parse(text)
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    lines = text.splitlines()
    comments, code, docs = counted(path)
    return Module(
        name,
        path,
        len(lines),
        comments,
        code,
        docs,
        tuple(used_once(tree)),
        tuple(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)),
        tuple(long_functions(tree)),
        tuple(pointing(tree)),
        frozenset(imported(tree)),
        any(
            word in text for word in ("Lock()", "Condition(", "threading.", "recover", "Semaphore")
        ),
    )


def counted(path: Path) -> tuple[int, int, int]:
    """Comments that are words (no ``noqa``, no ``type:``), lines with code on them, lines of docstrings."""
    comments = docs = 0
    code: set[int] = set()
    previous = tokenize.NEWLINE
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                comments += not token.string.startswith(("# noqa", "# type:", "# pragma", "#!"))
            elif token.type == tokenize.STRING and previous in (
                tokenize.NEWLINE,
                tokenize.INDENT,
                tokenize.NL,
                tokenize.ENCODING,
            ):
                docs += token.end[0] - token.start[0] + 1
            elif token.type not in (
                tokenize.NL,
                tokenize.NEWLINE,
                tokenize.INDENT,
                tokenize.DEDENT,
                tokenize.ENDMARKER,
                tokenize.ENCODING,
            ):
                code.update(range(token.start[0], token.end[0] + 1))
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                previous = token.type
    return comments, len(code), docs


def used_once(tree: ast.Module) -> Iterator[str]:
    """A module's private functions that are named in one place only, and their length."""
    uses = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_") and uses[node.name] == 1:
            yield f"{node.name} ({(node.end_lineno or node.lineno) - node.lineno + 1})"


def long_functions(tree: ast.AST) -> Iterator[str]:
    """Functions longer than anybody keeps in the head."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{node.name} ({length})"


def pointing(tree: ast.AST) -> Iterator[str]:
    """What has a docstring that says where to look, and nothing else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            said = " ".join((ast.get_docstring(node) or "").split())
            if said.startswith(("See ``", "See the ")) and ". " not in said:
                yield node.name


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are imported, of modules or of what lies in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def resolved(imports: frozenset[str], names: set[str]) -> set[str]:
    """The project's modules among them. A package counts only where nothing in it was named."""
    ours = {name for name in imports if name in names}
    return {name for name in ours if not any(other.startswith(name + ".") for other in ours)}


def importers(house: list[Module]) -> dict[str, set[str]]:
    """Who imports whom, turned round."""
    by: dict[str, set[str]] = defaultdict(set)
    for module in house:
        for name in module.imports:
            by[name].add(module.name)
    return by


def with_one_neighbour(house: list[Module]) -> list[str]:
    """Modules that one module alone imports, of the same folder."""
    by = importers(house)
    return [
        f"{module.name} <- {next(iter(by[module.name]))}"
        for module in house
        if len(by[module.name]) == 1 and folder(next(iter(by[module.name]))) == folder(module.name)
    ]


def folder(name: str) -> str:
    return name.rpartition(".")[0]


def twice(names: Iterator[tuple[str, str]]) -> list[str]:
    """Names with more than one home, each with its homes."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name, home in names:
        homes[name].append(home)
    return [
        f"{name}: {', '.join(places)}" for name, places in sorted(homes.items()) if len(places) > 1
    ]


def circles(house: list[Module]) -> list[str]:
    """Modules that import each other, directly or by others (imports in functions and for types count, too)."""
    graph = {module.name: module.imports for module in house}
    reached = {name: reach(graph, name) for name in graph}
    return sorted(name for name in graph if name in reached[name])


def reach(graph: dict[str, frozenset[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(graph.get(name, ()))
    return seen


def table(house: list[Module]) -> list[tuple[str, str, str, list[str]]]:
    """Rows: what, how much, what was wished, and what the figure is made of."""
    lines = sorted(module.lines for module in house)
    with_locks = [module for module in house if module.locked]
    classes = twice((name, module.name) for module in house for name in module.classes)
    names = twice(
        (module.path.stem, module.name) for module in house if module.path.stem != "__init__"
    )
    four = [row for row in names if row.count(",") >= 3]
    single = with_one_neighbour(house)
    long = [f"{module.name}: {name}" for module in house for name in module.long_functions]
    once = [f"{module.name}: {name}" for module in house for name in module.used_once]
    comments = sum(module.comments for module in with_locks) / max(
        1, sum(module.code for module in with_locks)
    )
    places = Counter(folder(module.name) for module in house)
    return [
        (
            "modules",
            f"{len(house):,}",
            "235",
            [f"{count:4} {place}" for place, count in places.most_common()],
        ),
        ("lines of code", f"{sum(module.code for module in house):,}", "50,000", []),
        ("lines of docstrings", f"{sum(module.docs for module in house):,}", "11,000", []),
        ("lines in all", f"{sum(lines):,}", "75,000", []),
        ("private functions that are used once", f"{len(once)}", "450", once),
        ("modules imported by exactly one neighbour", f"{len(single)}", "25", single),
        ("class names used twice", f"{len(classes)}", "5", classes),
        ("module names used twice (four times)", f"{len(names)} ({len(four)})", "12 (0)", names),
        (
            "comments per code line where there are locks, threads, recovery",
            f"{comments:.3f}",
            "0.04",
            [],
        ),
        (
            "module lines, median, p90, max",
            f"{statistics.median(lines):.0f}, {lines[int(len(lines) * 0.9)]}, {lines[-1]}",
            "200, 500, 900",
            [],
        ),
        ("functions over 70 lines", f"{len(long)}", "0", long),
        (
            'docstrings that only say "See …"',
            f"{sum(len(module.pointing) for module in house)}",
            "0",
            [f"{module.name}: {name}" for module in house for name in module.pointing],
        ),
        ("modules in import circles", f"{len(circles(house))}", "0", circles(house)),
    ]


def by_package(house: list[Module]) -> Iterator[str]:
    """A table: lines of each package, of which kind."""
    yield f"| {'package':<18} | modules |    code | docstrings | comments |     all |"
    yield f"|{'-' * 20}|{'-' * 9}|{'-' * 9}|{'-' * 12}|{'-' * 10}|{'-' * 9}|"
    packages: dict[str, list[Module]] = defaultdict(list)
    for module in house:
        packages[".".join(module.path.relative_to(ROOT).parts[:-1][:2])].append(module)
    for name, some in [*sorted(packages.items()), ("in all", house)]:
        code, docs, comments, lines = (
            sum(getattr(module, what) for module in some)
            for what in ("code", "docs", "comments", "lines")
        )
        yield (
            f"| {name:<18} | {len(some):>7} | {code:>7,} | {docs:>10,} | {comments:>8,} | {lines:>7,} |"
        )


def entered(arguments: list[str], text: str = "") -> list[str]:
    """The project's files that one command enters in this process, in any thread, what is run at import left out."""
    seen: set[str] = set()

    def hook(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        run(arguments, text)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = tuple(f"{ROOT / package}/" for package in PACKAGES)
    return sorted(str(Path(name).relative_to(ROOT)) for name in seen if name.startswith(ours))


def run(arguments: list[str], text: str = "") -> None:
    """One command of ``tiered``, in this process and quiet."""
    from tiered.__main__ import run as tiered

    with redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
        code = tiered(arguments)
    if code:
        raise SystemExit(f"{arguments} ended with {code}")


def entered_rows(work: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """Files entered by commands as typed, on a folder. Each is run once before it is counted, so that it is warm."""
    line = '{"topic": "orders", "body": "x"}\n'
    demo, store = work / "demo", work / "store"
    run(["demo", "--dir", str(demo), "--messages", "100", "--quiet"])
    tier = (demo / "tier").as_uri()
    scenes: tuple[tuple[str, str, list[str], str], ...] = (
        ("an append (store put)", "30", ["store", "put", str(store)], line),
        ("a read (cat)", "20", ["cat", tier, "demo-orders"], ""),
        (
            "an archive run",
            "25",
            ["archive", tier, "--to", f"{work.as_uri()}/archive-{{time}}"],
            "",
        ),
    )
    run(["store", "create", str(store), "--quiet"])
    for what, goal, command, text in scenes:
        first, second = (
            [*(word.replace("{time}", time) for word in command), "--quiet"] for time in "12"
        )
        run(first, text)
        files = entered(second, text)
        yield f"project files entered by {what}", f"{len(files)}", goal, files


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", action="store_true", help="list what the counts are made of")
    parser.add_argument(
        "--entered",
        action="store_true",
        help="count the files that an append, a read and an archive task enter",
    )
    options = parser.parse_args()
    print(f"| {'what':<64} | {'now':>12} | {'reach':>13} |\n|{'-' * 66}|{'-' * 14}|{'-' * 15}|")
    house = modules()
    with tempfile.TemporaryDirectory() as work:
        counted_by_running = entered_rows(Path(work)) if options.entered else ()
        for what, now, goal, made_of in chain(table(house), counted_by_running):
            print(f"| {what:<64} | {now:>12} | {goal:>13} |")
            if options.names:
                print("\n".join(f"    {row}" for row in made_of))
    print("", *by_package(house), sep="\n")


if __name__ == "__main__":
    main()
