"""The blocks of docs/analytics.md from nothing to a chart, in their order; and the DAG, by itself and in Airflow."""

from __future__ import annotations

import json
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
from support.command_line import environment, here
from support.environments import python_of

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive.duck import ask

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "analytics.md").read_text("utf-8")
SECTION = PAGE.partition("## From nothing to a chart")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", SECTION, re.DOTALL)
DAG = DOCS / "examples" / "airflow" / "tiered_archive.py"


def run_line(line: str) -> None:
    """A line of a shell, behind its prompt."""
    prompt, program, *words = shlex.split(line)
    assert prompt == "$"
    if program == "tiered":
        here(*words).good()
    else:
        assert program == "python"
        subprocess.run([sys.executable, *words], check=True, cwd=DOCS.parent, timeout=240)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.filterwarnings("ignore")
def test_each_block_draws_the_same_chart(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark is a session that there is already, as `getOrCreate` finds it."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    demo = tmp_path / "demo"
    counts: list[list[int]] = []
    names: dict[str, Any] = {}
    for kind, block in BLOCKS:
        text = block.replace("/tmp/demo", str(demo))
        if kind != "python":
            for line in text.splitlines():
                run_line(line)
            continue
        exec(compile(text, "docs/analytics.md", "exec"), names)
        found = names.pop("by_minute")
        counts.append([int(n) for n in (found.iloc[:, 1] if found.ndim > 1 else found)])
    with closing(open_store(f"file://{demo}/parquet", S3Options())) as store:
        question = "SELECT count(*) AS n FROM \"demo-orders\" GROUP BY date_trunc('minute', store_ts) ORDER BY ALL"
        wanted = [row["n"] for row in ask(store, question).rows.to_pylist()]
    assert len(counts) == 7
    assert all(sorted(found) == wanted for found in counts)
    charts = {path.stem for path in demo.glob("*.png")}
    assert charts == {"pandas", "duckdb", "spark", "iceberg"}
    assert list((demo / "charts").glob("*.png"))
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


def given_to_tasks(folder: Path) -> dict[str, str]:
    """The environment in which a DAG's tasks run, with a tier to archive."""
    here("demo", "--dir", folder / "demo").good()
    program = folder / "bin" / "tiered"
    program.parent.mkdir()
    paths = shlex.quote(os.pathsep.join(sys.path))
    program.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} -m tiered "$@"\n')
    program.chmod(0o755)
    return {
        **environment(),
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "TIER_URL": f"file://{folder}/demo/tier",
        "ARCHIVE_URL": f"file://{folder}/parquet",
        "CATALOG": f"sqlite:///{folder}/catalog.db#lake",
    }


def require_archived(given: dict[str, str], folder: Path) -> None:
    assert (folder / "catalog.db").exists()
    shown = here("sql", given["ARCHIVE_URL"], "SHOW TABLES", "--json").good().document["rows"]
    assert {"name": "demo-orders"} in shown


@pytest.mark.slow
def test_the_tasks_of_the_dag_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = given_to_tasks(tmp_path)
    tasks = tasks_of(DAG, monkeypatch)
    assert [name for name, _ in tasks] == ["archive", "merge", "clean"]
    for catalog in (given["CATALOG"], ""):
        for _, said in tasks:
            done = subprocess.run(
                ["bash", "-c", said],
                env={**given, "CATALOG": catalog},
                check=False, capture_output=True, text=True, timeout=240,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
    require_archived(given, tmp_path)


@pytest.mark.slow  # Airflow is fetched when it is not there yet: 300 MB
@pytest.mark.timeout(1800)
def test_airflow_itself_runs_the_dag(tmp_path: Path) -> None:
    """By `airflow dags test`, which needs no scheduler."""
    given = given_to_tasks(tmp_path)
    airflow = python_of("airflow").with_name("airflow")
    given |= {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAG.parent),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            [airflow, *words], env=given, cwd=tmp_path,
            check=False, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-4000:]
        return done.stdout

    def rows(topic: str, what: str, *more: str) -> list[dict[str, str]]:
        """Its warnings come on the same stream."""
        lines = run(topic, what, "tiered_archive", *more, "--output", "json").splitlines()
        found: list[dict[str, str]] = json.loads(next(line for line in lines if line[:2] == "[{"))
        return found

    run("db", "migrate")
    run("dags", "test", "tiered_archive")
    (ran,) = rows("dags", "list-runs")
    assert ran["state"] == "success"
    tasks = rows("tasks", "states-for-dag-run", ran["run_id"])
    found = {task["task_id"]: task["state"] for task in tasks}
    assert found == dict.fromkeys(("archive", "merge", "clean"), "success")
    require_archived(given, tmp_path)
