"""The blocks of docs/analytics.md that draw a chart by pandas, DuckDB, Spark and Iceberg; and the DAG's commands."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import types
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from backends.registry import open_store
from backends.s3_settings import S3Options
from tests.e2e.harness import environment, here
from tiered.archive.duck import ask

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "analytics.md").read_text("utf-8")
SECTION = PAGE.partition("## The same by pandas")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"```(python|console)\n(.*?)```", SECTION, re.DOTALL)
DAG = DOCS / "examples" / "airflow" / "tiered_archive.py"


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_each_block_draws_the_same_chart(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark is a session that there is already, as `getOrCreate` finds it."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    demo = tmp_path / "demo"
    here("demo", "--dir", demo).good()
    here("archive", f"file://{demo}/tier", "--to", f"file://{demo}/parquet").good()
    counts: list[list[int]] = []
    for kind, block in BLOCKS:
        text = block.replace("/tmp/demo", str(demo))
        if kind == "console":
            words = shlex.split(text.removeprefix("$ tiered "))
            here(*words).good()
            continue
        names: dict[str, Any] = {}
        exec(compile(text, "docs/analytics.md", "exec"), names)
        found = names["by_minute"]
        counts.append([int(n) for n in (found.iloc[:, 1] if found.ndim > 1 else found)])
    with closing(open_store(f"file://{demo}/parquet", S3Options())) as store:
        question = "SELECT count(*) AS n FROM \"demo-orders\" GROUP BY date_trunc('minute', store_ts) ORDER BY ALL"
        wanted = [row["n"] for row in ask(store, question).rows.to_pylist()]
    assert len(counts) == 4
    assert all(sorted(found) == wanted for found in counts)
    charts = {path.stem for path in demo.glob("*.png")}
    assert charts >= {"pandas", "duckdb", "spark", "iceberg"}
    assert session.range(1).count() == 1


def tasks_of(dag: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Names and commands of a DAG's tasks, which come one after another; Airflow itself is none of our dependencies."""
    found: list[tuple[str, str]] = []

    class Operator:
        def __init__(self, *, task_id: str, bash_command: str) -> None:
            found.append((task_id, bash_command))

        def __rshift__(self, other: Operator) -> Operator:
            return other

    given = {"airflow.sdk": ("DAG", lambda *_names, **_more: nullcontext()),
             "airflow.providers.standard.operators.bash": ("BashOperator", Operator)}  # fmt: skip
    for path, (name, what) in given.items():
        words = path.split(".")
        for count in range(1, len(words) + 1):
            monkeypatch.setitem(
                sys.modules, ".".join(words[:count]), types.ModuleType(words[count - 1])
            )
        setattr(sys.modules[path], name, what)
    runpy.run_path(str(dag))
    return found


def test_the_tasks_of_the_dag_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("demo", "--dir", tmp_path / "demo").good()
    tasks = tasks_of(DAG, monkeypatch)
    assert [name for name, _ in tasks] == ["archive", "merge", "clean"]
    program = tmp_path / "bin" / "tiered"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tiered "$@"\n')
    program.chmod(0o755)
    places = {
        "TIER_URL": f"file://{tmp_path}/demo/tier",
        "ARCHIVE_URL": f"file://{tmp_path}/parquet",
        "CATALOG": f"sqlite:///{tmp_path}/catalog.db#lake",
    }
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    more = {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), **places}
    for given in (places, {**places, "CATALOG": ""}):
        for _, said in tasks:
            done = subprocess.run(
                ["bash", "-c", said],
                env={**environment(), **more, **given},
                check=False, capture_output=True, text=True, timeout=240,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
    assert (tmp_path / "catalog.db").exists()
    shown = here("sql", places["ARCHIVE_URL"], "SHOW TABLES", "--json").good().document["rows"]
    assert {"name": "demo-orders"} in shown
