"""Every block of every page is run as it stands, or listed here with the reason why not.

`support.shown` says with what: a broker's store, its tier and an archive, in folders or in buckets of an S3 server.
Tutorials have tests of their own beside this one, the examples of each ``--help`` in ``tests/cli/test_help_examples.py``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from support import shown
from support.servers import use_server
from support.shown import Block, World, steps

if TYPE_CHECKING:
    from support.command_line import CommandLine
    from support.servers import S3Server

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/*/*.md")
ELSEWHERE = {
    ("docs/tutorials/", ""): "tests/docs/test_tutorials.py",
    ("docs/analytics.md", ""): "tests/spark/test_page.py",
    ("docs/reading.md", "python"): "tests/api/test_examples.py",
}
"""Pages, and kinds of blocks of theirs, that another file runs."""
NOT_RUN = {
    r"((env|/opt/tiered)/bin/)?pip install|python3(\.11)? -m venv|env/bin/venv-pack": "asks a package index",
    r"make ": "tests/packaging plans each target",
    r"mqshutdown |systemctl |install -m": "a broker of Java's, or systemd: tests/mount and tests/deploy have them",
    r"useradd |mkdir -p /etc/": "changes this machine",
    r"podman": "containers: tests/deploy builds and runs them",
    r".*--engine spark|PYSPARK_PYTHON=|printf ": "a JVM for each: tests/spark starts such jobs",
    r".*--body-schema ": "schemas of the reader's own: tests/archive has some of each kind",
    r".*iceberg:https:": "a REST catalog: tests/archive publishes in SQLite's",
    r"tiered .*(%DLQ%|SCHEDULE_TOPIC_|--retries )": "what clients left at a mount: tests/mount has clients",
}
"""Commands that are not run, by a pattern, and why."""
NEW = "file://{}/new"
PLACES = {
    r"docs/archive.md.*--body ": {"s3://bucket2/parquet": NEW},
    r"docs/archive.md.*spark\.": {'parquet("parquet")': 'parquet("{}/parquet")'},
    r"docs/embedded-store.md": {"/data/store": "{}/new"},
    r"docs/jmq.md": {"s3://bucket/prefix": NEW},
    r"docs/kafka.md": {"s3://bucket/prefix": NEW, "orders": "plain", "--queue 3": "--queue 2"},
    r"docs/mount.md.*mqshutdown": {"--decommission": "--decommission --accept-pending"},
    r"docs/operating.md.*--brokers": {"east-*,prod/west-1": "*"},
}
"""What pages, or blocks of theirs, find in place of what ``shown.PLACES`` has."""


def places(page: str, text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pattern, there in PLACES.items():
        if re.match(pattern, f"{page} {text}", re.DOTALL):
            found |= there
    return found


def found() -> list[Block]:
    """The blocks that are to be run here."""
    paths = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
    every = [
        block
        for path in paths
        for block in shown.blocks(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
    return [
        block
        for block in every
        if not any(block.page.startswith(page) and kind in block.kind for page, kind in ELSEWHERE)
    ]


BLOCKS = found()


def commands(block: Block) -> list[str]:
    """Those that a block shows behind a prompt, as a script, or as lines of a crontab."""
    if re.search(r"^\$ ", block.text, re.MULTILINE):
        lines = [step.command for step in steps(block.text)]
    elif block.kind in {"", "text", "cron"}:
        joined = block.text.replace("\\\n", " ").splitlines()
        lines = [line for line in joined if re.match(r"tiered \w|([\d*/,-]+ +){5}", line)]
    else:
        return []
    return [one for line in lines for one in line.split(" && ")]


def reason(command: str) -> str:
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command)), "")


WITH_COMMANDS = [
    block for block in BLOCKS if any(not reason(command) for command in commands(block))
]
BY_PAGE: dict[str, list[str]] = defaultdict(list)
for one in BLOCKS:
    if one.kind == "python":
        typed = re.findall(r"^>>> (.*\n)", one.text, re.MULTILINE)
        BY_PAGE[one.page].append("".join(typed) or one.text)
WITH_SPARK = [page for page, texts in BY_PAGE.items() if "spark" in "".join(texts)]


def test_each_block_is_run_or_listed() -> None:
    every = [(block.page, command) for block in BLOCKS for command in commands(block)]
    neither = [
        (page, command)
        for page, command in every
        if not reason(command) and not re.search(r"\btiered ", command)
    ]
    assert neither == []
    assert len(every) > 60
    unused = [p for p in NOT_RUN if not any(re.match(p, command) for _, command in every)]
    assert unused == []
    empty = [b for b in BLOCKS if b.kind == "console" and not commands(b)]
    assert empty == []
    for (page, _), test in ELSEWHERE.items():
        named = page.rstrip("/").rpartition("/")[2]
        assert named.removesuffix(".md") in (ROOT / test).read_text("utf-8")


def test_what_is_new_is_seen() -> None:
    """Behind a prompt in any block; as a script; as a line of a crontab; and what none of these is."""
    text = "1. An item\n\n   ```console\n   $ nohup a \\\n     b\n   said\n   ```\n"
    (block,) = shown.blocks("page.md", text)
    assert [(command, reason(command)) for command in commands(block)] == [("nohup a \\\n  b", "")]
    lines = "tiered ls URL && tiered gc URL\n17 3 * * *  tiered archive URL\n ├── tiered mount\n"
    assert len(commands(Block("page.md", "", lines))) == 3
    assert commands(Block("page.md", "console", "tiered ls URL\n")) == []


def test_each_kind_of_block_is_one_that_is_looked_at() -> None:
    """Documents and settings parse; so do programs."""
    for page, kind, text in BLOCKS:
        match kind:
            case "json" if page == "docs/embedded-store.md":
                assert all(map(json.loads, text.splitlines()))
            case "json":
                assert json.loads(text)
            case "yaml":
                assert yaml.safe_load(text)
            case "toml":
                assert tomllib.loads(text)
            case _:
                assert kind in {"", "text", "console", "cron", "python", "sql"}, page
    for page, texts in BY_PAGE.items():
        compile("\n".join(texts), page, "exec")


GIVEN = """\
import duckdb, fsspec, pandas, polars, pyarrow.dataset, pyarrow.parquet, tiered
from pyspark.sql import SparkSession
spark: SparkSession = SparkSession.builder.getOrCreate()
TIER: str = ""
ARCHIVE: str = ""
"""
"""Names that pages take for given."""
OF_OTHERS = {
    'stubs not installed for "pandas"': "it has none of its own",
    "PandasDataFrameLike": "so a frame of Spark's has no `plot` either",
    'module named "airflow.': "it is none of our dependencies",
    "DuckDBPyRelation | None": "None is of a statement that has no result",
    "Summary | None": "None is of snapshots of the first version of Iceberg",
}
"""What types of other libraries say against our examples, by a part of it, and why these stay as they are."""


def complaints(folder: Path, programs: dict[str, str]) -> list[str]:
    """Of mypy, in strict mode and in one run of all, about programs by name; without what ``OF_OTHERS`` has."""
    files = []
    for name, text in programs.items():
        files.append(folder / f"page_{re.sub('[^a-z]', '_', name.lower())}.py")
        files[-1].write_text(text)
    files += sorted((ROOT / "docs" / "examples").rglob("*.py"))
    options = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", folder / "cache")
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--hide-error-context", "--no-error-summary", *options, *files],
        env={**os.environ, "MYPYPATH": str(ROOT)}, cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert not ran.stderr, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if ": error: " in line]
    return [line for line in lines if not any(part in line for part in OF_OTHERS)]


@pytest.mark.slow
def test_programs_have_the_types_that_they_use(tmp_path: Path) -> None:
    """Those of docs/reading.md too, and the files of docs/examples; a planted mistake in one of them is found."""
    every: dict[str, str] = defaultdict(lambda: GIVEN)
    for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        page = path.relative_to(ROOT).as_posix()
        for _, kind, text in shown.blocks(page, path.read_text("utf-8")):
            if kind == "python":
                typed = re.findall(r"^(?:>>>|\.\.\.) (.*\n)", text, re.MULTILINE)
                every[page] += "".join(typed) or text
    assert {"README.md", "docs/analytics.md", "docs/reading.md", "docs/spark.md"} <= every.keys()
    every["wrong"] = GIVEN + 'tiered.open("s3://bucket/prefix").read("orders", "3")\n'
    found = complaints(tmp_path, every)
    assert len(found) == 1, found
    assert 'page_wrong.py:6: error: Argument 2 to "read" of "Tier"' in found[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pages")
    shown.make(root)
    return root


@pytest.fixture
def world(
    made: Path, ministack: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> World:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    use_server(ministack, monkeypatch)
    return World(tmp_path, made, ministack)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", WITH_COMMANDS, ids=lambda block: f"{block.page}: {commands(block)[0]}"
)
def test_commands_run(block: Block, world: World, tiered: CommandLine) -> None:
    for command in commands(block):
        if not reason(command):
            world.run(tiered, command, places(block.page, block.text))


@pytest.mark.slow
def test_a_wrong_example_is_found(world: World, tiered: CommandLine) -> None:
    for wrong in (
        "tiered cat s3://bucket/prefix no-such-topic",
        "tiered expire /data/tier --ttl 3x",
    ):
        with pytest.raises(AssertionError):
            world.run(tiered, wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", sorted(BY_PAGE.keys() - set(WITH_SPARK)))
def test_programs_run(page: str, world: World) -> None:
    run(page, world, {})


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", WITH_SPARK)
def test_programs_of_spark_run(
    page: str, made: Path, tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In folders: Spark alone reads no bucket."""
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path, made, None)
    places = {"TIER": "s3://bucket/prefix", "ARCHIVE": "s3://bucket2/parquet"}
    names = {name: world.put_in(url) for name, url in places.items()}
    ran = run(page, world, {"spark": session, **names})
    if query := ran.get("query"):
        query.awaitTermination()
        assert session.read.parquet(world.put_in("/data/orders")).count()


def run(page: str, world: World, names: dict[str, Any]) -> dict[str, Any]:
    """The programs of a page one after another, with the libraries that it takes for imported."""
    exec("import duckdb, pandas, polars, pyarrow.parquet", names)
    for text in BY_PAGE[page]:
        exec(compile(world.put_in(text, places(page, text)), page, "exec"), names)
    return names


@pytest.mark.slow
def test_settings_and_questions_are_taken(world: World, tiered: CommandLine) -> None:
    for page, kind, text in BLOCKS:
        if kind == "toml":
            Path("page.toml").write_text(text)
            tiered.good("--config", "page.toml", "config", "show")
        elif kind == "sql":
            tiered.good("sql", world.put_in("file:///tmp/parquet"), text)
        elif page == "docs/embedded-store.md" and kind == "json":
            Path("page.jsonl").write_text(text)
            tiered.good("store", "put", world.put_in("/data/store"), "page.jsonl")
