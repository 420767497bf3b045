"""Alert rules, the board and the runbooks: each metric exists, each rule fires in its incident, each alert has an entry."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiered.cli.frame import program
from tiered.metrics import (
    FLEET_METRICS,
    METRICS,
    MOUNT_METRICS,
    PROCESS_METRICS,
    TIMER_METRICS,
    MetricType,
)

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docs/deploy/prometheus/tiered-rules.yml"
BOARD = ROOT / "docs/deploy/grafana/tiered.json"
RUNBOOKS = ROOT / "docs/runbooks.md"
INCIDENTS: dict[str, Any] = json.loads((Path(__file__).parent / "incidents.json").read_text())
"""By alert: the series of its incident, and the labels with which it then fires."""
TABLE = {
    one.name: one
    for one in (*METRICS, *MOUNT_METRICS, *FLEET_METRICS, *TIMER_METRICS, *PROCESS_METRICS)
}
AT = "25m"
NAME = re.compile(r"\b(?:tiered|process)_\w+")
LABEL = re.compile(r"[{,]\s*(\w+)\s*[=!]")


def rules() -> list[dict[str, Any]]:
    return list(yaml.safe_load(RULES.read_text())["groups"][0]["rules"])


def expressions() -> list[str]:
    panels = json.loads(BOARD.read_text())["panels"]
    return [rule["expr"] for rule in rules()] + [
        target["expr"] for panel in panels for target in panel["targets"]
    ]


def metric_of(name: str) -> str:
    """Of a series: that of a histogram has three."""
    found = re.sub(r"_(bucket|sum|count)$", "", name)
    is_part = found in TABLE and TABLE[found].kind is MetricType.HISTOGRAM
    return found if is_part else name


@pytest.mark.parametrize("expression", expressions())
def test_each_metric_and_label_exists(expression: str):
    names = [metric_of(name) for name in NAME.findall(expression)]
    assert set(names) <= set(TABLE)
    known = {label for name in names for label in TABLE[name].labels}
    assert set(LABEL.findall(expression)) <= known | {"job", "instance", "le"}
    for values in re.findall(r'reason=~?"([^"]+)"', expression):
        assert all(f"`{one}`" in TABLE[names[0]].help for one in values.split("|"))


def test_each_alert_has_a_runbook_and_an_incident():
    names = [rule["alert"] for rule in rules()]
    assert names == re.findall(r"^## (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert set(names) == set(INCIDENTS)
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"
    for entry in RUNBOOKS.read_text().split("\n## ")[1:]:
        for part in ("What you see", "What is safe", "What to do"):
            assert f"- **{part}**: " in entry


def test_commands_in_runbooks_exist():
    paths = dict(program().walk())
    quoted = re.findall(r"`tiered ([^`]+)`", RUNBOOKS.read_text())
    assert len(quoted) > 20
    for text in quoted:
        words = text.split()
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in paths), None)
        assert name, text
        options = {option for one in paths[name].params for option in one.opts}
        assert {word for word in words if word.startswith("--")} <= options, text


def run_promtool(promtool: Path, folder: Path, tests: list[dict[str, Any]]) -> None:
    """Without annotations, which are for people."""
    document = yaml.safe_load(RULES.read_text())
    for rule in document["groups"][0]["rules"]:
        del rule["annotations"]
    (folder / "rules.yml").write_text(json.dumps(document))
    (folder / "tests.yml").write_text(
        json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests})
    )
    ran = subprocess.run(
        [promtool, "test", "rules", "tests.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def expecting(alert: str, incident: dict[str, Any], at: str, *, fires: bool) -> dict[str, Any]:
    found = [{"exp_labels": incident["labels"]}] if fires else []
    return {
        "interval": "1m",
        "input_series": incident["series"],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": found}],
    }


def test_rules_are_sound(promtool: Path):
    ran = subprocess.run(
        [promtool, "check", "rules", RULES], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, f"{len(rules())} rules found" in ran.stdout) == (0, True), ran.stdout


def test_each_rule_fires_in_its_incident(promtool: Path, tmp_path: Path):
    waits = {"TieredIndexFails": "70m", "TieredLagOfRate": "80m"}
    tests = [
        expecting(alert, incident, waits.get(alert, AT), fires=True)
        for alert, incident in INCIDENTS.items()
    ]
    run_promtool(promtool, tmp_path, tests)


def test_a_rate_that_holds_a_topic_back_is_named_and_nothing_else_fires(
    promtool: Path, tmp_path: Path
):
    """Another topic's lag still does, and the danger that the broker deletes what is behind."""
    held = INCIDENTS["TieredLagOfRate"]
    other = {
        **held,
        "series": [
            *held["series"],
            {**held["series"][0], "series": held["series"][0]["series"].replace('"t"', '"u"')},
        ],
        "labels": {**held["labels"], "topic": "u"},
    }
    day = {
        "series": [{**held["series"][0], "values": "90000x90"}, held["series"][1]],
        "labels": {**held["labels"], "severity": "critical"},
    }
    tests = [
        expecting("TieredLag", held, "80m", fires=False),
        expecting("TieredLagOfRate", held, "30m", fires=False),
        expecting("TieredLag", other, "80m", fires=True),
        expecting("TieredRetentionNear", day, "80m", fires=True),
    ]
    run_promtool(promtool, tmp_path, tests)


def test_no_rule_fires_when_all_is_well(promtool: Path, tmp_path: Path):
    """Counters that stand still at what they came to, lag of about the freshness, everything up."""
    is_one = ("_up", "up", "keeps_offsets", "name_servers")
    calm = {}
    for alert, incident in INCIDENTS.items():
        series = []
        for one in incident["series"]:
            name = one["series"].partition("{")[0]
            value = (
                1
                if name.endswith(is_one)
                else 5
                if name.endswith("_total") and "unmergeable" not in name
                else 2
                if "lag" in name
                else 0
            )
            series.append({"series": one["series"], "values": f"{value}x90"})
        calm[alert] = {**incident, "series": series}
    tests = [expecting(alert, incident, "60m", fires=False) for alert, incident in calm.items()]
    run_promtool(promtool, tmp_path, tests)
