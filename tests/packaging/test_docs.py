"""Every dependency is argued for, the Makefile's commands can be planned, and what pages name is there."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
from support.generated import LAYERS

from tiered.cli.frame import Program, program

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9-]*")
TARGETS = [
    "setup",
    "demo",
    "test",
    "test-all",
    "lint",
    "lock",
    "bench",
    "minio",
    "docs",
    "docs-site",
    "clean",
]


def declared(root: Path) -> set[str]:
    pyproject = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    project = pyproject["project"]
    extras = project["optional-dependencies"].values()
    listed = [project["dependencies"], pyproject["build-system"]["requires"], *extras]
    matches = [NAME.match(requirement) for group in listed for requirement in group]
    return {match.group() for match in matches if match}


def argued_for(root: Path) -> set[str]:
    page = (root / "docs" / "dependencies.md").read_text("utf-8")
    return set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))


def test_every_dependency_has_its_row_and_no_row_is_left_over(root: Path):
    assert argued_for(root) == declared(root)


@pytest.mark.skipif(not shutil.which("make"), reason="no make on this machine")
@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target(target: str, root: Path):
    run = subprocess.run(
        ["make", "--dry-run", target], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_ci_runs_the_tests_and_leaves_nothing_out(root: Path):
    script = (root / ".ci" / "run").read_text("utf-8")
    assert "make test" in script
    assert "TIERED_REQUIRE=1" in script
    assert "CI=true" in script


def test_every_folder_of_the_product_is_on_the_page_that_says_where_things_are(
    tracked: dict[str, str],
):
    product = ("tiered/", "backends/", "fetcher/", "timer/")
    folders = {
        name.rpartition("/")[0]
        for name in tracked
        if name.startswith(product) and name.endswith(".py")
    }
    assert folders == set(LAYERS)


def test_files_that_pages_name_are_there(root: Path, tracked: dict[str, str]):
    """A path from the root in backticks, a module by its name alone, or the target of a link to a page."""
    missing = []
    modules = {name.rpartition("/")[2] for name in tracked}
    for name, text in tracked.items():
        if not name.endswith(".md"):
            continue
        bare = re.findall(r"`([\w-]+\.py)`", text)
        missing += [(name, module) for module in bare if module not in modules]
        paths = re.findall(
            r"`((?:tiered|fetcher|backends|timer|tests|docs|localstack|requirements)/[\w./-]+\.\w+)`",
            text,
        )
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        missing += [(name, path) for path in paths if not (root / path).exists()]
        missing += [(name, link) for link in links if not ((root / name).parent / link).exists()]
    assert missing == []


def test_names_that_the_architecture_gives_are_in_the_files_beside_them(root: Path):
    """Whoever looks for a function finds it there: a row of "Asked most often" is no older than the code."""
    text = (root / "docs/ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \| ([^|]+) \|$", text, re.MULTILINE)
    named = [
        (file, name)
        for files, by in rows
        for file in [re.findall(r"`([\w/]+\.py)`", files)]
        for name in re.findall(r"`(\w+)`", by)
    ]
    missing = [
        (files, name)
        for files, name in named
        if not any(re.search(rf"\b{name}\b", (root / file).read_text()) for file in files)
    ]
    assert len(named) > 10
    assert missing == []


def in_pages(tracked: dict[str, str], pattern: str) -> list[tuple[str, tuple[str, ...]]]:
    pages = [(name, text) for name, text in tracked.items() if name.endswith(".md")]
    return [
        (name, found.groups())
        for name, text in pages
        for found in re.finditer(pattern, text, re.MULTILINE)
    ]


def test_commands_and_options_that_pages_show_are_there(tracked: dict[str, str]):
    """Every ``tiered ...`` in backticks, and in blocks behind a prompt: its command, and each option that it has."""
    commands = {"": program(), **dict(program().walk())}
    options = {
        path: {
            name
            for parameter in command.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        for path, command in commands.items()
    }
    shown = in_pages(tracked, r"(?:`|\$ (?:\S*/)?)tiered ((?:[^`\n\\]|\\\n)+)")
    wrong = []
    for page, (text,) in shown:
        words, path = re.split(r"\s+", re.split(" [#|]", text)[0]), ""
        while (
            words
            and isinstance(commands[path], Program)
            and f"{path} {words[0]}".strip() in commands
        ):
            path = f"{path} {words.pop(0)}".strip()
        given = {
            word.split("=")[0].strip("[]();,.") for word in words if word.startswith(("--", "[--"))
        }
        unknown = given - options[path] - {"--help", "--version", "--"}
        if unknown or (isinstance(commands[path], Program) and re.match("[a-z]", " ".join(words))):
            wrong.append((page, text))
    assert len(shown) > 100
    assert wrong == []


def test_commands_in_blocks_are_taken_as_they_stand(tracked: dict[str, str]):
    """Behind a prompt: every argument is there, and every value is one that its option takes."""
    commands = {"": program(), **dict(program().walk())}
    shown = in_pages(tracked, r"^\s*\$ (?:\S*/)?tiered ((?:[^\n\\]|\\\n)+)")
    refused = []
    for page, (text,) in shown:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
        ends = (
            at for at, word in enumerate(words) if word in {"|", "||", ">", "2>", "&&", ";", "&"}
        )
        words, path = words[: next(ends, len(words))], ""
        if any(word in {"…", "..."} for word in words):
            continue
        while words and f"{path} {words[0]}".strip() in commands:
            path = f"{path} {words.pop(0)}".strip()
        try:
            commands[path].make_context(path, words)
        except click.UsageError as error:
            refused.append((page, text, error.format_message()))
        except click.exceptions.Exit:
            pass  # (its help, or its version)
    assert len(shown) > 60
    assert refused == []


def test_links_into_pages_meet_a_heading(root: Path, tracked: dict[str, str]):
    def anchors(text: str) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

    links = in_pages(tracked, r"\]\(([^)#:]*)#([^)]+)\)")
    missing = []
    for page, (to, anchor) in links:
        target = (root / page).parent / to if to else root / page
        if target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8")):
            missing.append((page, f"{to}#{anchor}"))
    assert len(links) > 20
    assert missing == []
