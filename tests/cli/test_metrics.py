"""The table of metrics, its text form, and the pages made of tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.generated import pages

from tiered.errors import InvalidError
from tiered.metrics import (
    FLEET_METRICS,
    METRICS,
    MOUNT_METRICS,
    PROCESS_METRICS,
    TIMER_METRICS,
    Exposition,
    MetricType,
    Sample,
    render,
)

if TYPE_CHECKING:
    from tiered.metrics import Metric

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("table", [METRICS, MOUNT_METRICS, TIMER_METRICS, FLEET_METRICS])
def test_names_follow_the_rules(table: tuple[Metric, ...]):
    names = [metric.name for metric in (*table, *PROCESS_METRICS)]
    assert len(set(names)) == len(names)
    for metric in table:
        assert re.fullmatch(r"tiered_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricType.COUNTER)
        assert bool(metric.buckets) == (metric.kind is MetricType.HISTOGRAM)
        assert sorted(metric.buckets) == list(metric.buckets)
        assert metric.help.endswith(".")


def test_text_form():
    text = render(
        [
            Sample("tiered_lag_messages", 3, {"topic": 'a"b\\c\nd'}),
            Sample("tiered_up", True),
            Sample("tiered_rounds_total", 7),
            Sample("tiered_lag_messages", 0.5, {"topic": "\udcff"}),
        ]
    )
    assert text == (
        "# HELP tiered_up 1 while messages are tiered, 0 once this process has given up.\n"
        "# TYPE tiered_up gauge\n"
        "tiered_up 1.0\n"
        "# HELP tiered_lag_messages Messages committed locally but not yet in the tier.\n"
        "# TYPE tiered_lag_messages gauge\n"
        'tiered_lag_messages{topic="a\\"b\\\\c\\nd"} 3.0\n'
        'tiered_lag_messages{topic="�"} 0.5\n'
        "# HELP tiered_rounds_total Journal entries that committed parts.\n"
        "# TYPE tiered_rounds_total counter\n"
        "tiered_rounds_total 7.0\n"
    )


def test_what_a_process_serves():
    """Samples, durations, and what the library knows of the process; all of it stands in the table."""
    shown = Exposition(METRICS, lambda: [Sample("tiered_up", 1)])
    shown.observe("tiered_commit_seconds", 2.5)
    with shown.timing("tiered_request_seconds", kind="put"):
        pass
    found = {family.name: family for family in text_string_to_metric_families(shown.text())}
    known = {metric.name.removesuffix("_total") for metric in (*METRICS, *PROCESS_METRICS)}
    assert set(found) <= known
    assert {metric.name.removesuffix("_total") for metric in PROCESS_METRICS} <= set(found)
    said = {
        (one.name, one.labels.get("le")): one.value
        for one in found["tiered_commit_seconds"].samples
    }
    assert said["tiered_commit_seconds_sum", None] == 2.5
    assert (
        said["tiered_commit_seconds_bucket", "2.0"],
        said["tiered_commit_seconds_bucket", "3.0"],
    ) == (0, 1)
    assert found["tiered_request_seconds"].samples[0].labels["kind"] == "put"


def test_promtool_takes_what_is_served(promtool: Path):
    shown = Exposition(METRICS, lambda: [Sample("tiered_up", 1), Sample("tiered_rounds_total", 3)])
    shown.observe("tiered_commit_seconds", 2.5)
    shown.observe("tiered_request_seconds", 0.1, kind="put")
    ran = subprocess.run(
        [promtool, "check", "metrics"],
        input=shown.text().encode(),
        capture_output=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def test_metrics_need_their_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InvalidError, match="prometheus-client") as caught:
        Exposition(METRICS, tuple)
    assert "tieredmq[metrics]" in caught.value.do


def test_an_unknown_metric_or_a_missing_label_is_a_defect():
    with pytest.raises(KeyError):
        render([Sample("tiered_nothing", 1)])
    with pytest.raises(KeyError):
        render([Sample("tiered_lag_bytes", 1)])


@pytest.mark.parametrize("name", pages())
def test_generated_pages_are_fresh(name: str):
    assert (DOCS / name).read_text("utf-8") == pages()[name], "run `make docs`"
