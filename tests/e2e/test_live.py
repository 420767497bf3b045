"""``tiered attach`` beside a real broker under load: stops, crashes and restarts of either.

``TIERED_E2E_REPEAT=10`` runs each that often.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support import command_line, live, oracle
from support.live import Attach, Producer
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REPEAT = int(os.environ.get("TIERED_E2E_REPEAT", "1"))
pytestmark = [
    pytest.mark.java,
    oracle.needs_java,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("turn", range(REPEAT)),
]
LOAD = {"queues": 4, "size": "10..900", "tags": "a,b,c,", "keys": 20, "inflight": 64, "rate": 1000}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[oracle.Broker]:
    with oracle.Broker(tmp_path, tmp_path / "store") as running:
        running.start()
        yield running


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/tier"


def load(broker: oracle.Broker, tmp_path: Path, turn: int, name: str, **more: object) -> Producer:
    """Start a load of its own topic, named for the part of the test."""
    options = LOAD | {"seed": turn} | more
    return Producer(broker.address, "load", tmp_path / f"{name}.log", **options)


def test_everything_acknowledged_arrives(
    broker: oracle.Broker, url: str, tmp_path: Path, turn: int
) -> None:
    with Attach(broker.store, url, tmp_path / "attach.log") as attach:
        producer = load(broker, tmp_path, turn, "one", seconds=5)
        told = producer.ended(0)
        assert len(told) > 100  # on a busy machine five seconds are not many
        live.wait_level(url, told)
        said = attach.stop()
    assert said["messages"] >= len(told)
    assert (said["is_drained"], said["quarantined"], said["gaps"]) == (True, 0, 0)
    live.check_acknowledged(url, told)
    assert len(broker.produce("after", 10, queues=1)) == 10  # it was not harmed
    broker.kill()
    command_line.here("attach", broker.store, "--to", url, "--once").good()
    live.check_against_java(url, broker.store)


@pytest.mark.slow
def test_the_broker_crashes_and_starts_again(
    broker: oracle.Broker, url: str, tmp_path: Path, turn: int
) -> None:
    with Attach(broker.store, url, tmp_path / "attach.log") as attach:
        first = load(broker, tmp_path, turn, "one", seconds=120)
        first.wait_for(live.SOME * (10 + turn))
        broker.kill()
        told = first.ended(3)
        broker.start()
        told += load(broker, tmp_path, turn + 100, "two", count=2000).ended(0)
        live.wait_level(url, told)
        said = attach.stop()
    assert (said["is_drained"], said["quarantined"], said["gaps"]) == (True, 0, 0)
    live.check_acknowledged(url, told)
    broker.kill()
    command_line.here("attach", broker.store, "--to", url, "--once").good()
    live.check_against_java(url, broker.store)


@pytest.mark.slow
def test_attach_crashes_and_starts_again(
    broker: oracle.Broker, url: str, tmp_path: Path, turn: int
) -> None:
    log = tmp_path / "attach.log"
    producer = load(broker, tmp_path, turn, "one", seconds=8)
    for crash in range(3):
        with Attach(broker.store, url, log) as attach:
            producer.wait_for(live.SOME * (crash + 1) * (5 + turn))
            until(lambda: bool(live.commits(url)), "the first messages in the tier")
            attach.kill()
    with Attach(broker.store, url, log) as attach:
        told = producer.ended(0)
        live.wait_level(url, told)
        said = attach.stop()
    assert said["epoch"] >= 2
    assert "waiting for the lease" not in log.read_text()  # it was taken at once
    live.check_acknowledged(url, told)
    broker.kill()
    command_line.here("attach", broker.store, "--to", url, "--once").good()
    live.check_against_java(url, broker.store)


@pytest.mark.slow
def test_only_one_may_write(broker: oracle.Broker, url: str, tmp_path: Path, turn: int) -> None:
    with Attach(broker.store, url, tmp_path / "attach.log") as attach:
        producer = load(broker, tmp_path, turn, "one", seconds=3)
        producer.wait_for(live.SOME)
        until(lambda: bool(live.commits(url)), "the first messages in the tier")
        refused = command_line.program("attach", broker.store, "--to", url, "--no-wait")
        assert refused.code == 4
        assert "holds the lease" in refused.error
        told = producer.ended(0)
        live.wait_level(url, told)
        attach.stop()
    live.check_acknowledged(url, told)
    assert (
        command_line.program("attach", broker.store, "--to", url, "--once", "--no-wait").code == 0
    )
