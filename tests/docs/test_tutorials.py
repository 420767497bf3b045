"""Tutorials do what they say: their commands run in order, in one shell, and print what the page shows.

Figures may differ from those of the page, words may not: digits and white space are compared as one mark each, and ``…``
stands for any number of lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support import oracle
from support.servers import S3Server, use_server
from support.shown import blocks, steps

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs/tutorials"
RUN_S = 240
_MARK = "==command=="


def pattern(shown: list[str]) -> str:
    """What the lines of a page let pass."""
    whole = "\n".join(" ".join(line.split()) for line in shown)
    escaped = re.escape(whole).replace("…", ".*")
    return re.sub(r"(\d|\\?[.,](?=\d))+", r"[\\d.,]+", escaped)


def run(page: Path, moved: dict[str, str], scratch: Path) -> list[tuple[str, str, list[str]]]:
    """Each command, what it printed, and what it should have."""
    shown_there = blocks(page.name, page.read_text("utf-8"))
    wanted = [
        step for block in shown_there if block.kind == "console" for step in steps(block.text)
    ]
    assert wanted
    programs = scratch / "bin"
    programs.mkdir()
    for name, words in {"tiered": "-m tiered", "python": ""}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        program.chmod(0o755)
    script = "\n".join(f"echo '{_MARK}'\n{command}" for command, _ in wanted)
    for name, value in moved.items():
        script = script.replace(name, value)
    script = script.replace("export PATH=", "true PATH=")
    done = subprocess.run(
        ["bash", "-e"], input=script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, timeout=RUN_S, cwd=ROOT,
        env=os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}", "MPLCONFIGDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    printed = done.stdout.split(f"{_MARK}\n")[1:]
    assert len(printed) == len(wanted)
    return [(command, told, shown) for (command, shown), told in zip(wanted, printed, strict=True)]


def holds(page: Path, moved: dict[str, str], scratch: Path) -> None:
    for command, told, shown in run(page, moved, scratch):
        back = told
        for name, value in moved.items():
            back = back.replace(value, name)
        said = "\n".join(" ".join(line.split()) for line in back.strip().splitlines())
        if shown:
            assert re.search(pattern(shown), said, re.DOTALL), f"{command}\n{told}"


def test_from_messages_to_a_chart(tmp_path: Path) -> None:
    holds(TUTORIALS / "chart.md", {"/tmp/demo": str(tmp_path / "demo")}, tmp_path)


@pytest.mark.slow
def test_spark(tmp_path: Path) -> None:
    holds(TUTORIALS / "spark.md", {"/tmp/demo": str(tmp_path / "demo")}, tmp_path)


@pytest.mark.slow
@pytest.mark.java
@pytest.mark.go
@oracle.needs_java
def test_a_real_broker_on_minio_and_its_mount(
    minio: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What containers run on the page runs here without them: the same broker, name server, object store and mqadmin."""
    use_server(minio, monkeypatch)
    scratch = tmp_path / "tutorial"
    with oracle.Broker(tmp_path, scratch / "store") as broker:
        broker.start()
        # It is ours to wait for, so what is left of it is there until then.
        state = f"$(cut -d' ' -f3 /proc/{broker.pid}/stat)"
        ended = f'kill {broker.pid}; while [ "{state}" != Z ]; do sleep 0.2; done'
        moved = {
            "docker exec namesrv sh mqadmin": f"{oracle.ORACLE} admin",
            "docker stop broker": ended,
            "docker run": "true",
            "-c DefaultCluster": "-c cluster-a",
            "127.0.0.1:9876": broker.address,
            "127.0.0.1:10911": "127.0.0.1:0",
            "127.0.0.1:9400": f"127.0.0.1:{next(oracle.free_ports())}",
            "http://127.0.0.1:9000": minio.endpoint_url,
            "AWS_ACCESS_KEY_ID=tiered": f"AWS_ACCESS_KEY_ID={minio.access_key}",
            "AWS_SECRET_ACCESS_KEY=tiered-secret": f"AWS_SECRET_ACCESS_KEY={minio.secret_key}",
            "/tmp/tutorial": str(scratch),
        }
        for page in ("attach", "mount"):
            (tmp_path / page).mkdir()
            holds(TUTORIALS / f"{page}.md", moved, tmp_path / page)


def test_what_is_compared() -> None:
    text = "$ a \\\n  b\none 1,250 two\n…\n$ cat <<'END'\n$ x\nEND\n"
    (block,) = blocks("page.md", f"```console\n{text}```\n")
    (first, shown), (second, nothing) = steps(block.text)
    assert (first, second, nothing) == ("a \\\n  b", "cat <<'END'\n$ x\nEND", [])
    assert re.search(pattern(shown), "one 7 two\nand more", re.DOTALL)
    assert not re.search(pattern(shown), "one 7 three\nand more", re.DOTALL)
    assert not any(earlier == later for earlier, later in pairwise(steps(text)))
