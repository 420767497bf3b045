"""What a real broker truncates: a topic deleted and created again, a store that goes on from a backup."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support import command_line, live, oracle, tier_checks
from support.live import Attach
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.java, oracle.needs_java, pytest.mark.timeout(600)]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[oracle.Broker]:
    """One that may be killed."""
    with oracle.Broker(tmp_path, tmp_path / "store") as running:
        running.start()
        yield running


@pytest.fixture(scope="module")
def lasting_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[oracle.Broker]:
    """One for the tests that take a topic of their own, which each has a tier of its own."""
    folder = tmp_path_factory.mktemp("lasting")
    with oracle.Broker(folder, folder / "store") as running:
        running.start()
        yield running


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """Named for the test."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return name.removeprefix("test-")[-100:]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/tier"


def produce(broker: oracle.Broker, topic: str, count: int, seed: int) -> live.Told:
    return broker.produce(topic, count, queues=2, seed=seed, size="100..600")


def attach_once(broker: oracle.Broker, url: str) -> dict[str, Any]:
    document = (
        command_line.here("attach", broker.store, "--to", url, "--once", "--json").good().document
    )
    assert isinstance(document, dict)
    return document


def incarnations(url: str, topic: str) -> list[tuple[int, int]]:
    """How many incarnations that are over each queue of the topic has, and how many ends were truncated."""
    rows = command_line.here("status", url, "-o", "jsonl").good().rows
    mine = [row for row in rows if row["topic"] == topic]
    return [(row["ended_incarnations"], row["truncated"]) for row in mine]


def check(broker: oracle.Broker, url: str, told: live.Told) -> None:
    live.check_acknowledged(url, told)
    tier_checks.check_sound(url, broker.store)


@pytest.mark.slow
@pytest.mark.parametrize("again", [60, pytest.param(200, marks=pytest.mark.slow), 400])
def test_a_topic_is_deleted_and_created_again_while_attach_does_not_run(
    lasting_broker: oracle.Broker, url: str, topic: str, again: int
) -> None:
    produce(lasting_broker, topic, 200, 1)
    attach_once(lasting_broker, url)
    lasting_broker.delete_topic(topic)
    told = produce(lasting_broker, topic, again, 2)
    said = attach_once(lasting_broker, url)
    assert (said["begun_anew"], said["truncated"]) == (2, 0)
    assert incarnations(url, topic) == [(1, 0), (1, 0)]
    check(lasting_broker, url, told)


@pytest.mark.parametrize("again", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_a_topic_is_deleted_and_created_again_while_attach_runs(
    lasting_broker: oracle.Broker, url: str, topic: str, tmp_path: Path, again: int
) -> None:
    log = tmp_path / "attach.log"
    with Attach(lasting_broker.store, url, log) as attach:
        live.wait_level(url, produce(lasting_broker, topic, 200, 1))
        lasting_broker.delete_topic(topic)
        told = produce(lasting_broker, topic, again, 2)
        until(
            lambda: incarnations(url, topic) == [(1, 0), (1, 0)], "two incarnations that are over"
        )
        told += produce(lasting_broker, topic, 100, 3)
        live.wait_level(url, told)
        said = attach.stop()
    assert (said["begun_anew"], said["truncated"]) == (2, 0)
    assert "begins anew" in log.read_text()
    check(lasting_broker, url, told)


@pytest.mark.slow
def test_a_store_goes_on_from_a_backup(
    broker: oracle.Broker, url: str, topic: str, tmp_path: Path
) -> None:
    told = produce(broker, topic, 200, 1)
    broker.kill()
    shutil.copytree(broker.store, tmp_path / "backup")
    broker.start()
    produce(broker, topic, 100, 2)
    broker.kill()
    attach_once(broker, url)
    shutil.rmtree(broker.store)
    shutil.copytree(tmp_path / "backup", broker.store)
    said = attach_once(broker, url)  # a copy that lags: nothing is decided yet
    assert (said["begun_anew"], said["truncated"]) == (0, 0)
    broker.start()
    told += produce(broker, topic, 150, 3)
    said = attach_once(broker, url)
    assert (said["begun_anew"], said["truncated"]) == (0, 2)
    assert incarnations(url, topic) == [(0, 1), (0, 1)]
    check(broker, url, told)


def lose_tail(store: Path, size_bytes: int) -> None:
    """What a power failure does to the log: its last bytes were never written."""
    file = max(file for file in (store / "commitlog").iterdir() if any(file.read_bytes()))
    data = bytearray(file.read_bytes())
    end = len(bytes(data).rstrip(b"\0"))
    assert end > size_bytes
    data[end - size_bytes :] = bytes(len(data) - end + size_bytes)
    file.write_bytes(data)


@pytest.mark.slow
def test_a_power_failure_takes_a_tail_that_was_tiered_while_attach_runs(
    broker: oracle.Broker, url: str, topic: str, tmp_path: Path
) -> None:
    log = tmp_path / "attach.log"
    with Attach(broker.store, url, log) as attach:
        live.wait_level(url, produce(broker, topic, 200, 1))
        broker.kill()
        lose_tail(broker.store, 30_000)
        broker.start()
        told = produce(broker, topic, 300, 2)
        live.wait_level(url, told)
        until(lambda: incarnations(url, topic) == [(0, 1), (0, 1)], "two ends that were truncated")
        live.wait_level(url, told)
        said = attach.stop()
    assert (said["begun_anew"], said["truncated"]) == (0, 2)
    assert "has truncated" in log.read_text()
    tier_checks.check_sound(url, broker.store)
    found = {(m["queue_id"], m["queue_offset"]): m["msg_id"] for m in tier_checks.cat(url, topic)}
    for row in told:
        assert found[row["queue_id"], row["queue_offset"]] == row["msg_id"]
