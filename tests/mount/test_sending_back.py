"""Consumers send messages back to a mount, over the wire: given out again, dead letters, and what is refused."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.command_line import here
from support.mounts import Client, Mounted, mounted, records, tier_of
from support.servers import S3Server, use_server
from support.waiting import until

from fetcher.statuses import GetStatus
from tiered.api.local_and_tier import open_message_store
from tiered.errors import DataError
from tiered.format.record import Record, decode_record
from tiered.model import MessageQueue, QueueBounds, QueueOffset
from tiered.mount import protocol
from tiered.mount.protocol import Code
from tiered.mount.retries import batch_of, placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiered.local.interface import RecordBatch

POISON = Record(
    0, 1, 0, 0, 0, 0, 0, 0, 1, "10.0.0.1:5", 1, "10.0.0.2:6", 1, 0, b"poison", "orders", b"",
)  # fmt: skip


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Mounted]:
    """A tier of a captured store that is being served."""
    _, url = tier_of("s01-basic", tmp_path)
    with mounted(url) as found:
        yield found


def given(client: Client, topic: str, offset: int = 0) -> Record:
    """The message at an offset of the first queue, waited for."""
    answer = client.pull(topic, 0, offset, sysFlag=6)
    assert answer.code == Code.SUCCESS, answer.remark
    found = records(answer.text())[0]
    assert found.queue_offset == offset
    return found


def back(client: Client, record: Record, **fields: object) -> int:
    asked = {
        "group": "g",
        "offset": record.physical_offset,
        "delayLevel": 1,
        "originTopic": "orders",
    }
    return client.ask(protocol.CONSUMER_SEND_MSG_BACK, **(asked | fields)).code


def test_a_message_that_is_sent_back_comes_again_from_the_retry_topic_until_it_is_a_dead_letter(
    served: Mounted,
) -> None:
    with served.client() as client:
        assert not client.heartbeat("c", "g", "orders").code
        first = given(client, "orders", 7)
        assert back(client, first, maxReconsumeTimes=1) == Code.SUCCESS
        again = given(client, "%RETRY%g")  # held until its second is over
        assert (again.body, again.reconsume_times) == (first.body, 1)
        assert again.store_timestamp_ms >= first.store_timestamp_ms
        assert again.properties["RETRY_TOPIC"] == "orders"
        assert again.store_host == served.mount.address
        assert back(client, again, maxReconsumeTimes=1, delayLevel=0) == Code.SUCCESS
        dead = given(client, "%DLQ%g")
        assert (dead.body, dead.reconsume_times) == (first.body, 2)
        viewed = client.ask(protocol.VIEW_MESSAGE_BY_ID, offset=dead.physical_offset)
        assert decode_record(viewed.text()).topic == "%DLQ%g"
        unique = first.properties["UNIQ_KEY"]
        asked = {"topic": "%DLQ%g", "key": unique, "maxNum": 9, "_UNIQUE_KEY_QUERY": "true"}
        assert decode_record(client.ask(protocol.QUERY_MESSAGE, **asked).text()).topic == "%DLQ%g"


def test_what_is_kept_is_served_by_the_next_mount(served: Mounted) -> None:
    """And read, found and checked by commands."""
    url = served.mount.store.opened.store.url
    with served.client() as client:
        client.heartbeat("c", "g", "orders")
        assert back(client, given(client, "orders"), delayLevel=-1) == Code.SUCCESS
        assert back(client, given(client, "orders", 1), delayLevel=1) == Code.SUCCESS
    served.stop()
    served.mount.close()
    with mounted(url) as other, other.client() as client:
        assert given(client, "%DLQ%g").queue_offset == 0
        client.heartbeat("c", "g", "orders")
        assert given(client, "%RETRY%g").reconsume_times == 1
        route = json.loads(client.ask(protocol.GET_ROUTEINFO_BY_TOPIC, topic="%RETRY%g").text())
        assert [queue["perm"] for queue in route["queueDatas"]] == [6]
        unique = given(client, "orders").properties["UNIQ_KEY"]
    (found,) = here("query", url, "%DLQ%g", "--key", unique).good().rows
    (shown,) = here("cat", url, "%DLQ%g").good().rows
    assert found["queue_offset"] == shown["queue_offset"] == 0
    report = here("verify", url, "--retries", "broker-a", "--deep", "--json").good().document
    assert report["checked_messages"] == 2
    here("verify", url, "--deep").good()
    other = here("verify", url, "--retries", "nobody")
    assert (other.code, "to a mount 'nobody', but to broker-a" in other.error) == (2, True)


def test_a_damaged_log_is_told_and_what_is_advised_mends_it(
    served: Mounted, tmp_path: Path
) -> None:
    url = served.mount.store.opened.store.url
    with served.client() as client:
        client.heartbeat("c", "g", "orders")
        assert back(client, given(client, "orders"), delayLevel=9) == Code.SUCCESS
    served.stop()
    served.mount.close()
    (bundle,) = (path for path in tmp_path.rglob("meta/mount/*/retry/bundle/0/*"))
    data = bundle.read_bytes()
    bundle.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    assert here("verify", url, "--retries", "broker-a", "--deep").code == 1
    with pytest.raises(DataError, match="what was sent back to the mount is damaged"), mounted(url):
        pass
    shutil.rmtree(bundle.parent.parent.parent)
    with mounted(url) as other, other.client() as client:
        client.heartbeat("c", "g", "orders")
        assert back(client, given(client, "orders"), delayLevel=-1) == Code.SUCCESS


def test_an_orderly_consumer_sends_to_the_retry_topic_and_it_is_a_dead_letter_at_once(
    served: Mounted,
) -> None:
    said = {
        "b": "%RETRY%g",
        "e": 0,
        "f": 0,
        "g": 5,
        "h": 0,
        "j": 17,
        "l": 16,
        "i": "DELAY\x013\x02TAGS\x01x\x02",
    }
    with served.client() as client:
        client.heartbeat("c", "g", "orders")
        answer = client.ask(protocol.SEND_MESSAGE_V2, b"too often", **said)
        assert (answer.code, answer.fields["queueOffset"]) == (Code.SUCCESS, "0")
        assert given(client, "%DLQ%g").body == b"too often"
        answer = client.ask(
            protocol.SEND_MESSAGE_V2, b"again", **(said | {"j": 1, "i": "DELAY\x011\x02"})
        )
        assert answer.code == Code.SUCCESS
        assert given(client, "%RETRY%g").body == b"again"
        assert (
            client.ask(protocol.SEND_MESSAGE_V2, b"x", **(said | {"b": "orders"})).code
            == Code.NO_PERMISSION
        )


def test_with_no_state_nothing_is_taken(tmp_path: Path) -> None:
    _, url = tier_of("s01-basic", tmp_path)
    with mounted(url, keeps_offsets=False) as served, served.client() as client:
        client.heartbeat("c", "g", "orders")
        assert back(client, given(client, "orders")) == Code.NO_PERMISSION


def test_a_message_that_is_not_there_is_not_taken(served: Mounted) -> None:
    with served.client() as client:
        asked = {"group": "g", "offset": 3, "delayLevel": 1, "originTopic": "orders"}
        assert client.ask(protocol.CONSUMER_SEND_MSG_BACK, **asked).code == Code.SYSTEM_ERROR
        asked["offset"] = (1 << 62) + 3
        assert client.ask(protocol.CONSUMER_SEND_MSG_BACK, **asked).code == Code.SYSTEM_ERROR
    until(lambda: not served.errors, "it goes on")


@pytest.mark.parametrize("offset", [0, 17, 18, 33, 34, 120, 311])
def test_a_message_is_found_near_where_its_group_is_or_anywhere(
    served: Mounted, offset: int
) -> None:
    with served.client() as client:
        client.heartbeat("c", "g", "orders")
        place = {"consumerGroup": "g", "topic": "orders", "queueId": 0}
        client.ask(protocol.UPDATE_CONSUMER_OFFSET, commitOffset=17, **place)
        wanted = given(client, "orders", offset)
        assert back(client, wanted, delayLevel=-1) == Code.SUCCESS
        assert given(client, "%DLQ%g").body == wanted.body


@pytest.mark.go
def test_what_many_clients_send_back_at_once_shares_rounds(
    basic: Path, minio: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real server of objects: each is answered in time, and a round takes what came while the last was under way."""
    use_server(minio, monkeypatch)
    url = f"s3://{minio.bucket()}/prefix"
    here("attach", basic, "--to", url, "--once").good()
    with mounted(url) as served:

        def send(number: int) -> list[float]:
            taken = []
            with served.client() as client:
                answer = client.pull("orders", 0, 10 * number)
                for one in records(answer.text())[:10]:
                    began_s = time.monotonic()
                    assert back(client, one, delayLevel=-1) == Code.SUCCESS
                    taken.append(time.monotonic() - began_s)
            return taken

        with ThreadPoolExecutor(20) as pool:
            took = [one for some in pool.map(send, range(20)) for one in some]
        assert max(took) < 2.5
        assert served.mount.retries is not None
        assert served.mount.retries.writer.state.epoch == 1
    assert len(took) == 200
    assert len(here("cat", url, "%DLQ%g").good().rows) == 200
    report = here("verify", url, "--retries", "broker-a", "--deep", "--json").good().document
    assert report["checked_messages"] == 200
    assert report["checked_objects"] < 100


class Beside:
    """Some messages of a queue that begin in the middle of what the tier has of it, read from the tier at other offsets."""

    def __init__(self, low: int, end: int) -> None:
        self.known = QueueBounds(QueueOffset(low), QueueOffset(end))
        self.reads = 0

    def bounds(self, queue: MessageQueue) -> QueueBounds | None:
        return self.known if queue == MessageQueue("orders", 0) else None

    def queues(self) -> dict[MessageQueue, QueueBounds]:
        return {MessageQueue("orders", 0): self.known}

    def refresh(self) -> None:
        pass

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        assert (queue, bytes_max > 0, count_max > 0) == (MessageQueue("orders", 0), True, True)
        self.reads += 1
        rows = [
            placed(replace(POISON, topic="orders", queue_id=0), offset, 5)
            for offset in range(start, self.known.end)
        ]
        return batch_of(queue, rows)

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> QueueOffset:
        raise AssertionError((queue, timestamp_ms))


def test_what_a_broker_still_puts_behind_where_the_log_begins_is_not_shown(
    captured_tier: Callable[[str], tuple[Path, str]],
) -> None:
    _, url = captured_tier("s01-basic")
    beside = Beside(100, 103)
    with open_message_store(None, url) as store:
        store.put_beside(beside, beside.bounds)
        assert store.bounds("orders", 0) == QueueBounds(QueueOffset(0), QueueOffset(103))
        assert not beside.reads
        found = store.get_message("g", "orders", 0, 98, max_count=9)
        assert found.next_begin == 100
        found = store.get_message("g", "orders", 0, 100, max_count=9)
        bodies = [bytes(raw) for chunk in found.chunks for _, raw in chunk.messages()]
        assert (found.next_begin, len(bodies)) == (103, 3)
        assert all(b"poison" in body for body in bodies)
        assert store.get_message("g", "orders", 0, 110).status is GetStatus.OFFSET_OVERFLOW_BADLY
        assert store.max_offset("orders", 1) > 103
