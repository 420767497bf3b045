"""What groups have told a mount goes back to the broker whose disk is there again, and the next mount goes on behind it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support import oracle
from support.command_line import here
from support.mounts import Client, mounted, records, tier_of

from tiered.local.rocketmq import RocketMQStore
from tiered.mount import protocol
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import Ran

NAMES = ("--cluster", "cluster-a", "--broker", "broker-a")


def back(client: Client, offset: int, level: int) -> None:
    """Send a message of a queue back."""
    one = records(client.pull("orders", 0, offset).text())[0]
    asked = {"group": "g", "offset": one.physical_offset, "originTopic": "orders"}
    answer = client.ask(protocol.CONSUMER_SEND_MSG_BACK, delayLevel=level, **asked)
    assert answer.code == Code.SUCCESS, answer.remark


def serve(url: str) -> None:
    """A mount that is told offsets, and sent back one that waits, two that came again, and one that is dead."""
    with mounted(url) as served, served.client() as client:
        client.heartbeat("c", "g", "orders")
        for offset, level in ((0, 18), (1, 1), (2, 1), (3, -1)):
            back(client, offset, level)
        first = records(client.pull("%RETRY%g", 0, 0, sysFlag=6).text())[0].queue_offset
        client.pull("%RETRY%g", 0, first + 1, sysFlag=6)
        said = {"consumerGroup": "g", "queueId": 0}
        for topic, offset in (("orders", 17), ("%RETRY%g", first + 1)):
            client.ask(protocol.UPDATE_CONSUMER_OFFSET, topic=topic, commitOffset=offset, **said)


def bodies(url: str, topic: str) -> list[str]:
    return [one["body_base64"] for one in here("cat", url, topic).good().rows]


@pytest.fixture
def broker(tmp_path: Path) -> tuple[Path, str]:
    """A broker's store, stopped, and its tier, which a mount has served."""
    store, url = tier_of("s01-basic", tmp_path)
    serve(url)
    return store, url


def handed(url: str, store: Path) -> Ran:
    return here("hand-back", url, "--store", store, "--json")


def test_offsets_and_messages_are_the_brokers_and_the_next_mount_goes_on(
    broker: tuple[Path, str],
) -> None:
    store, url = broker
    retried, dead = bodies(url, "%RETRY%g"), bodies(url, "%DLQ%g")
    assert (len(retried), len(dead)) == (2, 1)
    told = handed(url, store).good().document
    assert [told[name] for name in ("waiting", "retries", "dead")] == [1, 1, 1]
    table = json.loads((store / "config/consumerOffset.json").read_text())["offsetTable"]
    assert table["orders@g"]["0"] == 17
    assert table["%RETRY%g@g"]["0"] == 0
    here("attach", store, "--to", url, "--once").good()
    assert bodies(url, "%RETRY%g") == retried[1:]
    assert bodies(url, "%DLQ%g") == dead
    with mounted(url) as served, served.client() as client:
        client.heartbeat("c", "g", "orders")
        back(client, 5, -1)
        back(client, 6, 1)
        answer = client.pull("%RETRY%g", 0, 1, sysFlag=6)
        assert [one.queue_offset for one in records(answer.text())] == [1]
    assert len(bodies(url, "%RETRY%g")) == len(bodies(url, "%DLQ%g")) == 2


@pytest.mark.slow
def test_what_was_not_handed_back_goes_on_with_the_next_mount(
    broker: tuple[Path, str], tmp_path: Path
) -> None:
    """The broker was back, and has put retries of its own into the queue since: nothing of either is hidden."""
    store, url = broker
    _, other = tier_of("s01-basic", tmp_path / "other")
    serve(other)
    handed(other, store).good()  # as if consumers had sent the same back to the broker
    here("attach", store, "--to", url, "--once").good()
    retried = bodies(url, "%RETRY%g")
    with mounted(url) as served, served.client() as client:
        client.heartbeat("c", "g", "orders")
        found = records(client.pull("%RETRY%g", 0, 0, sysFlag=6).text())
        more = records(client.pull("%RETRY%g", 0, 1, sysFlag=6).text())
    assert [one.queue_offset for one in (*found, *more)] == [0, 1]
    assert len(retried) == 3  # one of the broker's, two of the log, of which one was consumed


def test_a_store_that_is_written_to_is_left_alone(broker: tuple[Path, str]) -> None:
    store, url = broker
    before = (store / "config/consumerOffset.json").read_bytes()
    with mounted(url):
        assert handed(url, store).code == 4
    other = here("hand-back", url, "--store", store, "--mount", "nobody")
    assert other.code == 2
    assert "no mount 'nobody' has kept anything" in other.error
    assert (store / "config/consumerOffset.json").read_bytes() == before
    assert not RocketMQStore.open(str(store)).identity.is_live


@pytest.mark.java
@oracle.needs_java
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_broker_that_is_back_goes_on_where_the_mount_ended(tmp_path: Path) -> None:
    """Decommissioned, mounted, handed back to, started: groups are where they were with the mount, retries are delivered."""
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    with oracle.Broker(tmp_path, store) as broker:
        broker.start()
        broker.produce("orders", 40, queues=1, seed=1)
        broker.stop()
        here("attach", store, "--to", url, *NAMES, "--decommission").good()
        serve(url)
        told = handed(url, store).good().document
        assert [told[name] for name in ("waiting", "retries", "dead")] == [1, 1, 1]
        assert here("attach", store, "--to", url, "--once").code == 2  # it is decommissioned still
        here("attach", store, "--to", url, "--once", "--recommission").good()
        broker.start()
        assert broker.offsets("%RETRY%g") == broker.offsets("%DLQ%g") == {0: (0, 1)}
        progress = oracle.admin("consumerProgress", "-g", "g", "-n", broker.address)
        (row,) = (line.split() for line in progress.splitlines() if line.startswith("orders"))
        assert row[3:5] == ["40", "17"]
        broker.produce("orders", 1, queues=1, seed=2)
        broker.stop()
        here("attach", store, "--to", url, "--once").good()
        assert len(bodies(url, "orders")) == 41
        assert len(bodies(url, "%DLQ%g")) == 1
