"""The examples of docs/reading.md run, and the page names what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.captures import in_topic, unpack
from support.command_line import attach

from tiered.api.aio import AsyncTier
from tiered.api.arrow import COLUMNS
from tiered.api.message import Message
from tiered.api.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reading.md").read_text("utf-8")
ORDERS = in_topic("s01-basic", "orders")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("s01-basic", tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def url(store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return attach(store, tmp_path_factory.mktemp("tiers") / "basic")


PROGRAMS = [
    path
    for path in sorted((DOCS / "examples").rglob("*.py"))
    if path.parent.name
    != "airflow"  # read by Airflow, and no program; tests/spark runs its commands
]


def run(name: str, *arguments: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(DOCS / "examples" / name), *arguments],
        capture_output=True, text=True, check=False, timeout=60, cwd=DOCS.parent,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    return ran.stdout.splitlines()


def test_every_example_is_named_and_run_here():
    names = {path.name for path in (DOCS / "examples").glob("*.py")}
    assert set(re.findall(r"\(examples/(\w+\.py)\)", PAGE)) == names
    assert names == {f"{name[5:]}.py" for name in globals() if f"{name[5:]}.py" in names}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_an_example_without_arguments_says_what_it_wants(path: Path):
    if path.stem == "plots":
        pytest.importorskip("matplotlib")
    ran = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode in {1, 2}
    assert "Traceback" not in ran.stderr
    assert re.search(rf"{path.name} .*url", ran.stderr, re.IGNORECASE), ran.stderr


def test_read_messages(url: str):
    lines = run("read_messages.py", url, "orders")
    assert lines[0] == "orders/0: queue offsets 0 to 312"
    assert len([line for line in lines if not line.startswith("orders/")]) == len(ORDERS)


def test_read_arrow(url: str):
    sums: dict[str, int] = {}
    for message in ORDERS:
        size = len(message["body_base64"]) * 3 // 4 - message["body_base64"].count("=")
        sums[str(message["tags"])] = sums.get(str(message["tags"]), 0) + size
    lines = run("read_arrow.py", url, "orders")
    assert {line.split()[0]: int(line.split()[1]) for line in lines} == sums


def test_read_dataset(url: str):
    sums: dict[int, int] = {}
    for message in ORDERS:
        size = len(message["body_base64"]) * 3 // 4 - message["body_base64"].count("=")
        sums[message["queue_id"]] = sums.get(message["queue_id"], 0) + size
    lines = run("read_dataset.py", url, "orders")
    assert {int(line.split()[0]): int(line.split()[1]) for line in lines} == sums


def test_read_files(url: str, installed: None):
    *names, ends = run("read_files.py", url, "orders")
    assert names[0] == f"orders/0/{0:020d}-{312:020d}.jsonl"
    assert ends == "0 311"


def test_the_programs_of_the_page_run(url: str, store: Path, installed: None):
    """As they stand there, one after another, but for the places and offsets."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    program = "import duckdb, fsspec, pandas, pyarrow.dataset\n" + "".join(blocks)
    places = {
        "s3://bucket/prefix": url, "file:///data/tier": url, "/data/store": str(store),
        "orders/3/1200-1300": "orders/0/12-13", "1200": "12", "1300": "13",
    }  # fmt: skip
    for shown, there in places.items():
        assert shown in program
        program = program.replace(shown, there)
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].endswith("OFFSET_OVERFLOW_ONE")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs find the entry points of the checkout, which an older installation may lack."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    info = tmp_path / "tieredmq-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tieredmq\nVersion: 9\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    path = f"{tmp_path}{os.pathsep}{DOCS.parent}"
    monkeypatch.setenv("PYTHONPATH", path)


def test_find_messages(url: str):
    wanted = next(message for message in ORDERS if message["keys"])
    lines = run("find_messages.py", url, "orders", wanted["keys"].split()[0])
    tagged = sum(message["tags"] in {"TagA", "TagB"} for message in ORDERS)
    assert f"by tag: {tagged}" in lines
    place = f"by key: {wanted['queue_id']} {wanted['queue_offset']} "
    assert any(line.startswith(place) for line in lines)


def test_follow_queue(url: str):
    lines = run("follow_queue.py", url, "orders", "0", "5")
    first = [message for message in ORDERS if message["queue_id"] == 0][:5]
    assert lines == [f"{message['queue_offset']} {message['msg_id']}" for message in first]


def test_read_async(url: str):
    counts = dict(line.split() for line in run("read_async.py", url, "orders"))
    assert sum(map(int, counts.values())) == len(ORDERS)


def public(kind: type) -> Iterator[str]:
    return (name for name in vars(kind) if not name.startswith("_"))


def test_the_page_names_every_public_thing():
    named = set(re.findall(r"`(\w+)", PAGE))
    inner = {"state"}
    assert {*public(Tier), *public(Message)} - named - inner - {"follow_records"} == set()
    assert set(public(AsyncTier)) <= named
    assert set(COLUMNS) <= named
