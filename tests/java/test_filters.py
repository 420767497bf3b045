"""The kept answers are what RocketMQ says today, and a real consumer of a real broker gets what they say."""

from __future__ import annotations

import base64
import importlib.util
import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from support.filter_records import letters
from support.filter_trees import CONDITIONS, SOUPS
from support.oracle import ORACLE, Broker, needs_java

from fetcher.filters.sql_tree import render

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = [pytest.mark.java, needs_java]


@pytest.fixture(scope="module")
def scenario() -> ModuleType:
    path = ORACLE.parent / "scenarios" / "filters.py"
    spec = importlib.util.spec_from_file_location("oracle_filters", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kept(scenario: ModuleType) -> list[dict[str, str]]:
    first, *rows = map(json.loads, scenario.ANSWERS.read_text("ascii").splitlines())
    assert first["messages"] == scenario.question()["messages"], "run scenarios/filters.py again"
    return rows


def test_the_kept_answers_are_what_rocketmq_says(scenario: ModuleType, kept: list[dict[str, str]]):
    assert scenario.ask(scenario.question(), "filter") == kept


@pytest.mark.slow
def test_a_real_consumer_gets_what_the_answers_say(
    scenario: ModuleType, kept: list[dict[str, str]], tmp_path: Path
):
    broker = Broker(tmp_path, tmp_path / "store", enablePropertyFilter=True)
    try:
        broker.start()
        done = subprocess.run(
            [ORACLE, "filter-live", "--namesrv", broker.address, "--topic", "filtered"],
            input=json.dumps(scenario.question()).encode(),
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    finally:
        broker.close()
    got = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["text"] for row in got] == [row["text"] for row in kept]
    assert [row for row in map(told, got, kept) if row] == []


def test_random_expressions_are_judged_as_rocketmq_judges_them(scenario: ModuleType):
    """Trees of every kind, and tokens in any order: taken or refused, and each message's letter, failures too."""
    texts: dict[str, None] = {}

    @settings(max_examples=1_500, derandomize=True, database=None)
    @given(CONDITIONS.map(render), SOUPS, SOUPS)
    def collect(tree: str, one: str, other: str) -> None:
        texts.update(dict.fromkeys([tree, one, f"a = 5 {other}"]))

    collect()
    question = scenario.question()
    question["expressions"] = [{"kind": "SQL92", "text": text} for text in texts]
    rows = scenario.ask(question, "filter")
    messages = [base64.b64decode(raw) for raw in question["messages"]]
    differing = [
        (row, got) for row in rows if (got := letters(row, messages)) != row.get("answers")
    ]
    assert differing == []
    assert len([row for row in rows if "answers" in row]) > 800
    assert len([row for row in rows if "error" in row]) > 400


def told(got: dict[str, str], kept: dict[str, str]) -> object:
    """What differs: a consumer knows no null and no failure, only messages.

    An expression that a broker cannot compile takes every message when it comes with a pull request (one that comes
    with a subscription is refused); tags that cannot be split, and an empty expression, are refused before that.
    """
    if "error" in kept:
        is_refused = kept["kind"] == "TAG" or not kept["text"]
        is_same = "error" in got if is_refused else set(got.get("answers", "")) == {"T"}
        return None if is_same else (got, kept)
    expected = "".join("T" if letter == "T" else "F" for letter in kept["answers"])
    return None if got.get("answers") == expected else (got, kept)
