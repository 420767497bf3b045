"""The board: its legends and units; and each panel's query, asked of a Prometheus that scraped real processes."""

from __future__ import annotations

import json
import math
import re
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import oracle
from support.command_line import spawn
from support.gate import Gate
from support.monitoring import Monitor, run_prometheus
from support.servers import free_port, use_server
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import S3Server

BOARD = json.loads((Path(__file__).parents[2] / "docs/deploy/grafana/tiered.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
UNITS = {
    "seconds": {"s"},
    "bytes": {"bytes", "Bps", "percentunit"},
    "dollars": {"currencyUSD"},
    "requests": {"reqps"},
    "errors": {"reqps"},
    "messages": {"short", "cps"},
    "records": {"short"},
    "truncated": {"short"},
    "gaps": {"short"},
    "max": {"percentunit"},
}
"""By the last word of a metric's name, without what Prometheus appends."""
IN_TROUBLE = {"Trouble with the store", "Failed requests"}
"""Panels that are empty while all is well."""


def unit(panel: dict[str, Any], target: dict[str, Any]) -> str:
    config = panel["fieldConfig"]
    for override in config["overrides"]:
        if override["matcher"] == {"id": "byFrameRefID", "options": target["refId"]}:
            (own,) = (one["value"] for one in override["properties"] if one["id"] == "unit")
            return str(own)
    return str(config["defaults"]["unit"])


def legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), target["legendFormat"])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_units_are_those_of_the_metrics_and_legends_name_what_differs(panel: dict[str, Any]):
    targets = panel["targets"]
    assert len({target["legendFormat"] for target in targets}) == len(targets)
    for target in targets:
        names = re.findall(r"\b(?:tiered|process)_\w+", target["expr"])
        for name in names:
            word = re.sub(r"_(total|bucket)$", "", name).rpartition("_")[2]
            assert unit(panel, target) in UNITS[word]
        by = {
            one.strip()
            for found in re.findall(r"by \(([^)]*)\)", target["expr"])
            for one in found.split(",")
        }
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert by - {"le"} <= shown, "two lines would bear one name"
        assert "rate(" not in target["expr"] or unit(panel, target) not in {"bytes", "short"}


@contextmanager
def running(folder: Path, port: int, *words: str | Path) -> Iterator[None]:
    """A command with metrics at a port, until the block ends."""
    with (folder / f"{words[0]}.log").open("wb") as out:
        process = spawn(*words, "--metrics-listen", f"127.0.0.1:{port}", stdout=out)
    assert process.stderr is not None
    try:
        yield
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def shown(monitor: Monitor, panel: dict[str, Any]) -> bool:
    """Whether each query of a panel finds something; no two lines of it bear the same name."""
    legends: list[str] = []
    for target in panel["targets"]:
        found = [
            labels
            for labels, value in monitor.series(target["expr"].replace("$job", ".*"))
            if not math.isnan(value)
        ]
        legends += [legend(target, labels) for labels in found]
        if not found:
            return False
    assert len(set(legends)) == len(legends), f"{panel['title']}: {legends}"
    return all(legends)


@pytest.mark.slow
@pytest.mark.java
@pytest.mark.go
@oracle.needs_java
def test_each_panel_shows_something_of_real_processes(
    minio: S3Server, prometheus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also what is only there in trouble: the object store goes away for a while."""
    with ExitStack() as stack:
        gate = stack.enter_context(Gate(minio.endpoint_url))
        use_server(minio, monkeypatch)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", gate.url)
        broker = stack.enter_context(oracle.Broker(tmp_path, tmp_path / "store"))
        broker.start()
        broker.produce("Orders", 200, keys=1)
        broker.produce("Later", 10, delay_sec=7_200)
        url = f"s3://{minio.bucket()}/tier"
        timers = ("--timers", "--near", "10m")
        ports, served = [free_port() for _ in range(3)], f"127.0.0.1:{free_port()}"
        monitor = stack.enter_context(run_prometheus(prometheus, tmp_path, ports))
        for port, words in zip(
            ports,
            (
                ("attach", broker.store, "--to", url, "--freshness", "1s", *timers),
                ("mount", url, "--listen", served, "--no-state"),
                ("timer", "run", url, "--to", tmp_path / "target"),
            ),
            strict=True,
        ):
            stack.enter_context(running(tmp_path, port, *words))
            until(
                lambda: monitor.series("sum(tiered_committed_messages_total) >= 200"),
                "messages in the tier",
            )
        until(lambda: monitor.series("tiered_mount_up == 1"), "a mount that serves")
        pull = ("pull", "--namesrv", served, "--topic", "Orders", "--count")
        oracle.run(*pull)
        pulls = 'tiered_mount_request_seconds_count{request="PULL_MESSAGE"} > 0'
        until(lambda: monitor.series(pulls), "pulls")
        oracle.run(*pull)  # a rate is of what came after the first look
        broker.produce("Orders", 100)
        waiting = {panel["title"]: panel for panel in PANELS}

        def look() -> set[str]:
            for title, panel in list(waiting.items()):
                if shown(monitor, panel):
                    del waiting[title]
            return set(waiting)

        until(lambda: look() <= IN_TROUBLE, "all panels that need no trouble")
        gate.shut()
        broker.produce("Orders", 100)
        until(lambda: not look(), "the panels of trouble")
        gate.reopen()
