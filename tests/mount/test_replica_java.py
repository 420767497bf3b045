"""A replica beside a real living broker, with real consumers."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from support import oracle
from support.command_line import here
from support.mounts import MountProcess, page
from support.oracle import admin, needs_java

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.java, needs_java]
LAGS = {"slaveReadEnable": "true", "accessMessageInMemoryMaxRatio": 0}
"""A master in whose memory nothing is: whoever is behind at all is sent to the replica."""


def options(broker: oracle.Broker) -> tuple[str, ...]:
    metrics = f"127.0.0.1:{next(oracle.free_ports())}"
    return (
        *("--listen", "127.0.0.1:0", "--namesrv", broker.address, "--refresh", "1"),
        *("--replica-of-live", "--metrics-listen", metrics),
    )


def metric(words: tuple[str, ...], name: str) -> float:
    """What a replica measured, over all labels."""
    text = page(words[-1], "/metrics")[1]
    found = re.findall(rf"^tiered_mount_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def places(found: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    return Counter((one["queue_id"], one["queue_offset"]) for one in found)


def test_a_laggard_reads_from_the_tier_and_the_rest_from_the_master(tmp_path: Path):
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    with oracle.Broker(tmp_path, store, **LAGS) as broker:
        broker.start()
        broker.produce("orders", 2000, queues=4, inflight=32)
        here("attach", store, "--to", url, "--once").good()
        broker.produce("orders", 400, queues=4, inflight=32)  # not in the tier
        words = options(broker)
        with MountProcess(url, tmp_path / "log", *words) as mount:
            asked = ("--namesrv", broker.address, "--topic", "orders", "--group", "g")
            found = oracle.run("client", "push", *asked, "--max", "2400", "--seconds", "60")
            assert set(places(found).values()) == {1}
            assert len(found) == 2400
            assert mount.address in admin("clusterList", "-n", broker.address)
            print(page(words[-1], "/metrics")[1])
            assert metric(words, "read_bytes_total") > 2000 * 100
            assert metric(words, "replica_handed_back_total") >= 4
