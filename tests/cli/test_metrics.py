"""The table of metrics, its text form, and the pages made of tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiered.cli.docs import pages
from tiered.metrics import METRICS, MetricType, Sample, render

DOCS = Path(__file__).parents[2] / "docs"
LINE = re.compile(r'^[a-z_]+(\{([a-z]+="([^"\\\n]|\\.)*",?)+\})? -?[0-9.e+-]+$')


def test_names_follow_the_rules():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"tiered_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricType.COUNTER)
        assert metric.help.endswith(".")


def test_text_form():
    text = render(
        [
            Sample("tiered_lag_messages", 3, {"topic": 'a"b\\c\nd'}),
            Sample("tiered_up", True),
            Sample("tiered_lag_messages", 0.5, {"topic": "\udcff"}),
        ]
    )
    assert text == (
        "# HELP tiered_up 1 while messages are tiered, 0 when this process has given up.\n"
        "# TYPE tiered_up gauge\n"
        "tiered_up 1\n"
        "# HELP tiered_lag_messages Messages committed locally and not yet in the tier.\n"
        "# TYPE tiered_lag_messages gauge\n"
        'tiered_lag_messages{topic="a\\"b\\\\c\\nd"} 3\n'
        'tiered_lag_messages{topic="�"} 0.5\n'
    )
    assert all(LINE.match(line) for line in text.splitlines() if not line.startswith("#"))


def test_an_unknown_metric_or_a_missing_label_is_a_defect():
    with pytest.raises(KeyError):
        render([Sample("tiered_nothing", 1)])
    with pytest.raises(KeyError):
        render([Sample("tiered_lag_bytes", 1)])


@pytest.mark.parametrize("name", pages())
def test_generated_pages_are_fresh(name: str):
    assert (DOCS / name).read_text("utf-8") == pages()[name], "run `make docs`"
