"""demo and bench: a made store is a real one, and both tell what was done."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.command_line import CommandLine


def test_demo_is_well_and_can_be_repeated(tiered: CommandLine, tmp_path: Path):
    arguments = ("demo", "--dir", tmp_path / "demo", "--messages", "300", "--json")
    for _ in range(2):
        found = tiered.good(*arguments).document
        assert found["is_well"]
        assert found["made"]["messages"] == found["tiered"]["messages"] == 300
        assert found["verified"]["compared_messages"] == 300
        assert (found["timers"]["taken"], found["timers"]["delivered"]) == (51, 50)


def test_what_demo_says_can_be_run(tiered: CommandLine, tmp_path: Path):
    text = tiered.good("demo", "--dir", tmp_path / "demo", "--messages", "100").text
    assert text.startswith("1. Made a store of 100 messages")
    tried = [line.split()[1:] for line in text.splitlines() if line.startswith("  tiered ")]
    assert [words[0] for words in tried] == ["status", "cat", "verify", "timer"]
    for words in tried:
        assert tiered.good(*shlex.split(" ".join(words))).out


@pytest.mark.parametrize("on_path", [True, False])
def test_what_demo_says_runs_as_printed_in_a_shell(on_path: bool, tmp_path: Path):
    """Also where the program is not on PATH, in a directory whose name has a blank."""
    folder, scripts = tmp_path / "my demo", Path(sys.executable).parent
    paths = os.defpath.split(os.pathsep)
    environment = {"PATH": os.pathsep.join([str(scripts), *paths] if on_path else paths)}
    program = "tiered" if on_path else f"{scripts.name}/tiered"

    def shell(line: str) -> str:
        return subprocess.run(
            line, shell=True, cwd=scripts.parent, env=environment, capture_output=True, text=True, check=True
        ).stdout  # fmt: skip

    story = shell(f"{program} demo --dir '{folder}' --messages 20")
    lines = [line.strip() for line in story.partition("Try next:\n")[2].splitlines()]
    assert [line.split()[0] for line in lines[:3]] == [program] * 3
    for line in lines[:5]:
        assert shell(line) or line.startswith("rm ")
    assert not folder.exists()


def test_demo_never_empties_a_directory_of_others(tiered: CommandLine, tmp_path: Path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "precious").write_text("x")
    ran = tiered("demo", "--dir", tmp_path)
    assert ran.code == 2
    assert "no demo made it" in ran.error
    assert (tmp_path / "store" / "precious").exists()
    assert tiered("demo", "--dir", tmp_path / "store" / "precious").code == 2


@pytest.mark.parametrize("what", ["put", "unfinished"])
def test_demo_keeps_what_came_since(what: str, tiered: CommandLine, tmp_path: Path):
    arguments = ("demo", "--dir", tmp_path, "--messages", "20")
    tiered.good(*arguments)
    if what == "put":
        lines = tmp_path / "precious.jsonl"
        lines.write_text('{"topic": "precious", "body": "x"}')
        tiered.good("store", "put", tmp_path / "store", lines)
    else:
        (tmp_path / ".tiered-demo").write_text("")
    before = sorted(tmp_path.rglob("*"))
    ran = tiered(*arguments)
    assert (ran.code, "was used since" in ran.error) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_made_store_rolls_its_files(tiered: CommandLine, tmp_path: Path):
    make = ("bench", "make-store", tmp_path / "s", "--messages", "1000", "--body", "200")
    made = tiered.good(
        *make, "--queues", "2", "--topics", "2", "--file-size", "100000", "--json"
    ).document
    assert made["messages"] == 1000
    assert len(list((tmp_path / "s" / "commitlog").iterdir())) > 3
    url = f"file://{tmp_path}/t"
    measured = tiered.good(
        "bench", "dispatch", "--store", tmp_path / "s", "--to", url, "--json"
    ).document
    assert (measured["messages"], measured["is_complete"]) == (1000, True)
    assert measured["size_bytes"] == made["size_bytes"]
    assert measured["copy_seconds"] > 0
    assert measured["ratio_to_copy"] == pytest.approx(
        measured["seconds"] / measured["copy_seconds"], rel=0.1
    )
    read = tiered.good("bench", "read", url, "--json").document
    assert (read["messages"], read["size_bytes"]) == (1000, made["size_bytes"])
    part = tiered.good("bench", "read", url, "--topic", "bench-1", "--queue", "1", "--json")
    assert part.document["messages"] == 250
    assert tiered("bench", "read", url, "--topic", "none").code == 2
    assert tiered.good("verify", url, "--deep", "--store", tmp_path / "s").code == 0
    again = tiered("bench", "dispatch", "--store", tmp_path / "s", "--to", url)
    assert again.code == 2
    assert "there is a tier already" in again.error
    assert not list(Path(tmp_path).glob("tiered-bench-*"))


def test_bench_alone_does_all_of_it(tiered: CommandLine):
    tiered.environment = {"TIERED_BENCH_MAKE_STORE_MESSAGES": "2000"}
    ran = tiered.good("bench")
    lines = ran.text.splitlines()
    assert [line.split()[0] for line in lines] == ["what", "dispatch", "read"]
    assert re.search(r"2,000 messages", ran.err)


def test_the_store_is_measured(tiered: CommandLine, tmp_path: Path):
    small = ("--messages", "500", "--seconds", "0.2", "--threads", "4", "--rate", "500")
    folder = tmp_path / "made" / "for it"
    rows = tiered.good("bench", "store", folder, *small, "--json").document["results"]
    assert [row["what"] for row in rows] == [
        "append",
        "append, forced to disk",
        "append, 256 at a time",
        "append, 256 at a time, forced to disk",
        "append, one at a time",
        "append, one at a time, forced to disk",
        "append, 4 threads, sync",
        "visible after append, p99",
        "recover, no checkpoint",
        "recover behind a checkpoint",
    ]
    assert all(row["value"] > 0 for row in rows)
    assert [row["records"] for row in rows[-2:]] == [500, 50]
    assert not list(folder.iterdir())


def test_the_store_is_not_measured_in_a_file(tiered: CommandLine, tmp_path: Path):
    (tmp_path / "file").touch()
    ran = tiered("bench", "store", tmp_path / "file")
    assert ran.code == 2
    assert "is a file" in ran.err
