"""Every question of docs/analytics.md gets the answer that Python counts, and its commands run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.command_line import environment, here
from support.questions import ANSWERS, PAGE, QUESTIONS, WORDS, for_spark, rows_of

from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.archive.duck import ask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.shop import Shop

    from backends.base import ObjectStore

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def archive(shop: Shop) -> Iterator[ObjectStore]:
    store = open_store(shop.archive, S3Options())
    yield store
    store.close()


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answer_is_what_python_counts(name: str, shop: Shop, archive: ObjectStore) -> None:
    answer = rows_of(ask(archive, QUESTIONS[name]).rows)
    assert answer == ANSWERS[name](shop)
    assert answer


def test_every_question_has_its_answer() -> None:
    assert QUESTIONS.keys() == ANSWERS.keys()
    assert PAGE.count("```sql") == len(QUESTIONS)
    assert for_spark('"a" epoch_ms(x)') == "`a` unix_millis(x)"
    assert len(WORDS) == 4


def commands(text: str) -> list[list[str]]:
    """From nothing to a chart, as a page says."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    first = next(number for number, line in enumerate(lines) if "tiered demo" in line)
    last = next(number for number, line in enumerate(lines) if "plots.py" in line)
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines[first : last + 1]]


@pytest.mark.slow
def test_from_nothing_to_a_chart(tmp_path: Path) -> None:
    programs = {"tiered": [sys.executable, "-m", "tiered"], "python": [sys.executable]}
    for words in commands(PAGE):
        moved = [word.replace("/tmp/demo", str(tmp_path / "demo")) for word in words]
        done = subprocess.run(
            [*programs[moved[0]], *moved[1:]],
            capture_output=True, text=True, check=False, timeout=240, cwd=ROOT,
            env=environment() | {"MPLCONFIGDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    charts = sorted((tmp_path / "demo" / "charts").glob("*.png"))
    assert [chart.stem for chart in charts] == ["bytes", "latency", "rate", "sizes"]
    url = f"file://{tmp_path}/demo/parquet"
    for words in commands_of_sql():
        moved = [word.replace("/tmp/demo", str(tmp_path / "demo")) for word in words[2:]]
        assert here("sql", url, *moved[1:]).good().out or "--to" in moved
    assert (tmp_path / "demo" / "queue-1.parquet").exists()


def commands_of_sql() -> list[list[str]]:
    lines = re.findall(r"^\$ (tiered sql .*)$", PAGE, re.MULTILINE)
    assert len(lines) == 4
    return [shlex.split(line) for line in lines]
