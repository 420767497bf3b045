"""Restore brings back what was sent back to a mount: what waits, what was given out again, and dead letters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support import oracle
from support.command_line import here
from support.mounts import Client, mounted, records, tier_of
from support.waiting import until

from tiered.mount import protocol
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ("--log-file-size", "262144", "--queue-items", "100")


def back(client: Client, offset: int, level: int) -> None:
    """Send a message of a queue back."""
    one = records(client.pull("orders", 0, offset).text())[0]
    asked = {"group": "g", "offset": one.physical_offset, "originTopic": "orders"}
    answer = client.ask(protocol.CONSUMER_SEND_MSG_BACK, delayLevel=level, **asked)
    assert answer.code == Code.SUCCESS


def make(folder: Path) -> str:
    """A tier whose mount was sent back three messages: one waits for long, one was given out again, one is dead."""
    _, url = tier_of("s01-basic", folder)
    with mounted(url) as served, served.client() as client:
        client.heartbeat("c", "g", "orders")
        for offset, level in enumerate((18, 1, -1)):
            back(client, offset, level)
        assert client.pull("%RETRY%g", 0, 0, sysFlag=6).code == Code.SUCCESS
        place = {"consumerGroup": "g", "topic": "%RETRY%g", "queueId": 0}
        client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=1, **place)
    return url


def test_what_was_sent_back_is_in_the_restored_store(tmp_path: Path) -> None:
    url, store = make(tmp_path), tmp_path / "restored"
    here("restore", url, "--to", store, *SMALL).good()
    config = store / "config"
    delays = json.loads((config / "delayOffset.json").read_text())["offsetTable"]
    assert delays == {"18": 0}
    offsets = json.loads((config / "consumerOffset.json").read_text())["offsetTable"]
    assert offsets["%RETRY%g@g"] == {"0": 1}
    again = f"file://{tmp_path}/again"
    here("attach", store, "--to", again, "--once", "--cluster", "c", "--broker", "b").good()
    for topic, times in (("%RETRY%g", 1), ("%DLQ%g", 1)):
        (row,) = here("cat", again, topic).good().rows
        assert (row["queue_offset"], row["reconsume_times"]) == (0, times)
        (was,) = here("cat", url, topic).good().rows
        assert (row["body_base64"], row["store_timestamp_ms"]) == (
            was["body_base64"],
            was["store_timestamp_ms"],
        )


@pytest.mark.java
@oracle.needs_java
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_broker_on_the_restored_store_delivers_what_waited(tmp_path: Path) -> None:
    """A message waits for its third level; the broker puts it into the retry topic when that is over."""
    _, url = tier_of("s01-basic", tmp_path)
    with mounted(url) as served, served.client() as client:
        client.heartbeat("c", "g", "orders")
        for offset, level in enumerate((3, 1, -1)):
            back(client, offset, level)
        assert client.pull("%RETRY%g", 0, 0, sysFlag=6).code == Code.SUCCESS
    store = tmp_path / "restored"
    here("restore", url, "--to", store, *SMALL).good()
    with oracle.Broker(tmp_path, store) as broker:
        broker.start()

        def end(topic: str) -> int:
            return sum(end for _, end in broker.offsets(topic).values())

        assert end("%DLQ%g") == 1
        until(lambda: end("%RETRY%g") == 2, "what waited is in the retry topic", 60)
