"""Popping over a socket: what is given, hidden, given again and acknowledged; in order, by filters, and after a crash."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from support import captures
from support.mounts import Client, Growing, Mounted, mounted, records

from tiered.format.record import decode_record
from tiered.format.remoting import Form
from tiered.mount import protocol
from tiered.mount.popping import PopLimits, popped_by
from tiered.mount.protocol import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiered.format.record import Record
    from tiered.format.remoting import Command

    Tier = Callable[[str], tuple[Path, str]]


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    found = Growing(tmp_path)
    found.put("t", *"abcdef")
    return found


@pytest.fixture
def served(growing: Growing) -> Iterator[Mounted]:
    with mounted(growing.url, ack_s=0.01) as found:
        yield found


@pytest.fixture
def client(served: Mounted) -> Iterator[Client]:
    with served.client(Form.JSON) as found:
        yield found


def pop(client: Client, **more: object) -> Command:
    return client.ask(protocol.POP_MESSAGE, **asked(**more))


def asked(**more: object) -> dict[str, object]:
    said = {
        "consumerGroup": "g",
        "topic": "t",
        "queueId": -1,
        "maxMsgNums": 32,
        "invisibleTime": 60_000,
        "pollTime": 0,
        "bornTime": 0,
        "initMode": 0,
    }
    return said | more


def bodies(answer: Command) -> list[str]:
    return [record.body.decode() for record in records(answer.text())]


def handle(answer: Command, record: Record, kind: int = 0) -> dict[str, object]:
    """As a client makes it, of what the answer says of a record's queue."""
    rows = (row.split(" ") for row in answer.fields["startOffsetInfo"].split(";"))
    starts = {(row[0], row[1]): row[2] for row in rows}
    told = answer.fields
    words = [
        starts[str(kind), str(record.queue_id)],
        told["popTime"],
        told["invisibleTime"],
        told["reviveQid"],
        kind,
        "broker-a",
        record.queue_id,
        record.queue_offset,
    ]
    return {
        "consumerGroup": "g",
        "topic": record.topic,
        "queueId": record.queue_id,
        "offset": record.queue_offset,
        "extraInfo": " ".join(map(str, words)),
    }


def acknowledge(client: Client, answer: Command, *wanted: str) -> None:
    for record in records(answer.text()):
        if not wanted or record.body.decode() in wanted:
            told = client.ask(protocol.ACK_MESSAGE, **handle(answer, record))
            assert told.code == Code.SUCCESS, told.remark


def test_what_is_popped_is_hidden_until_its_time_and_comes_again(client: Client):
    first = pop(client, maxMsgNums=2, invisibleTime=400)
    assert bodies(first) == ["a", "b"]
    assert first.fields["msgOffsetInfo"] == "0 0 0,1"
    assert (first.fields["startOffsetInfo"], first.fields["restNum"]) == ("0 0 0", "4")
    assert bodies(pop(client, maxMsgNums=2)) == ["c", "d"]
    acknowledge(client, first, "a")
    time.sleep(0.5)
    again = pop(client)
    assert bodies(again) == ["b", "e", "f"]
    assert [record.reconsume_times for record in records(again.text())] == [1, 0, 0]
    nothing = pop(client)
    assert nothing.code == Code.POLLING_TIMEOUT
    assert nothing.fields.items() >= {"restNum": "0", "reviveQid": "0"}.items()


def test_what_was_acknowledged_is_gone_after_a_crash_and_all_else_comes_again(
    growing: Growing, monkeypatch: pytest.MonkeyPatch
):
    with mounted(growing.url, snapshot_s=1000.0) as served, served.client(Form.JSON) as client:
        first = pop(client, maxMsgNums=5)
        acknowledge(client, first, "a", "c", "d")
        keeper = served.mount.keeper
        assert keeper is not None
        assert keeper.kept.acks["g", "t", 0].ranges == (2, 4)
        assert served.mount.offsets.get("g", "t", 0) == 1
        # What a crash leaves: nothing is saved at the end.
        monkeypatch.setattr(keeper, "save", lambda *_: None)
    with mounted(growing.url) as served, served.client(Form.JSON) as client:
        again = pop(client)
        assert bodies(again) == ["b", "e", "f"]
        acknowledge(client, again)
        assert pop(client).code == Code.POLLING_TIMEOUT
        assert served.mount.offsets.get("g", "t", 0) == 6
        assert served.mount.keeper is not None
        assert not served.mount.keeper.kept.acks


def test_many_are_acknowledged_at_once(client: Client, served: Mounted):
    answer = pop(client)
    bits = base64.b64encode(bytes([0b101101])).decode()
    said = {"c": "g", "t": "t", "r": "0", "so": 0, "q": 0, "rq": 0, "b": bits}
    said |= {"pt": int(answer.fields["popTime"]), "it": 60_000}
    told = client.ask(protocol.BATCH_ACK_MESSAGE, {"brokerName": "b", "acks": [said]})
    assert told.code == Code.SUCCESS
    assert served.mount.offsets.get("g", "t", 0) == 1
    assert served.mount.keeper is not None
    assert served.mount.keeper.kept.acks["g", "t", 0].ranges == (2, 4, 5, 6)
    assert client.ask(protocol.BATCH_ACK_MESSAGE, {"acks": []}).code == Code.NO_MESSAGE


def test_who_has_a_message_may_hide_it_for_longer_or_give_it_back(client: Client):
    first = pop(client, maxMsgNums=1)
    (record,) = records(first.text())
    told = client.ask(
        protocol.CHANGE_MESSAGE_INVISIBLETIME, **handle(first, record), invisibleTime=0
    )
    assert (told.code, told.fields["invisibleTime"]) == (Code.SUCCESS, "0")
    time.sleep(0.01)
    again = pop(client, maxMsgNums=1)
    assert bodies(again) == ["a"]
    # Who had it first is too late: it is another's.
    late = client.ask(
        protocol.CHANGE_MESSAGE_INVISIBLETIME, **handle(first, record), invisibleTime=0
    )
    assert late.code == Code.NO_MESSAGE
    assert bodies(pop(client, maxMsgNums=1)) == ["b"]
    # But what it has consumed is consumed.
    acknowledge(client, first)
    assert bodies(pop(client)) == ["c", "d", "e", "f"]


def test_in_order_a_queue_gives_nothing_while_something_of_it_is_hidden(client: Client):
    first = pop(client, maxMsgNums=3, order="true", attemptId="1")
    assert (bodies(first), first.fields["reviveQid"]) == (["a", "b", "c"], "999")
    assert pop(client, order="true", attemptId="2").code == Code.POLLING_TIMEOUT
    time.sleep(0.01)
    assert bodies(pop(client, maxMsgNums=3, order="true", attemptId="1")) == ["a", "b", "c"]
    acknowledge(client, first, "a", "c")
    assert pop(client, order="true").code == Code.POLLING_TIMEOUT
    (_, left, _) = records(first.text())
    told = client.ask(protocol.CHANGE_MESSAGE_INVISIBLETIME, **handle(first, left), invisibleTime=0)
    assert told.code == Code.NO_MESSAGE  # it was given anew under a later time
    held = client.send(protocol.POP_MESSAGE, **asked(order="true", pollTime=20_000))
    with_another(client, first)
    assert bodies(client.answer(held)) == ["d", "e", "f"]


def with_another(client: Client, first: Command) -> None:
    with Client(client.address, Form.JSON) as other:
        acknowledge(other, first, "b")


def test_a_pop_is_held_until_there_is_a_message_or_one_is_visible_again(
    growing: Growing, served: Mounted, client: Client
):
    taken = pop(client, invisibleTime=2000)
    assert len(bodies(taken)) == 6
    held = client.send(protocol.POP_MESSAGE, **asked(pollTime=20_000))
    with served.client(Form.JSON) as other:
        while other.ask(protocol.POLLING_INFO, **asked()).fields["pollingNum"] != "1":
            pass
        acknowledge(other, taken, "a", "b", "c", "e", "f")
    assert bodies(client.answer(held)) == ["d"]
    told = client.send(protocol.NOTIFICATION, **asked(pollTime=20_000))
    growing.put("t", "g")
    assert client.answer(told).fields == {"hasMsg": "true", "pollingFull": "false"}
    assert bodies(pop(client)) == ["g"]
    told = client.send(protocol.POP_MESSAGE, **asked(pollTime=300))
    assert client.answer(told).code == Code.POLLING_TIMEOUT


def test_pulling_and_popping_go_on_from_one_another(client: Client, served: Mounted):
    place = {"consumerGroup": "g", "topic": "t", "queueId": 0}
    client.ask(protocol.UPDATE_CONSUMER_OFFSET, **place, commitOffset=4)
    answer = pop(client)
    assert bodies(answer) == ["e", "f"]
    acknowledge(client, answer)
    assert client.ask(protocol.QUERY_CONSUMER_OFFSET, **place).fields == {"offset": "6"}
    reset = {"group": "g", "topic": "t", "queueId": 0, "offset": 1, "timestamp": -1}
    assert client.ask(protocol.RESET_CONSUMER_OFFSET, **reset).code == Code.SUCCESS
    assert bodies(pop(client)) == ["b", "c", "d", "e", "f"]


def test_what_cannot_be_is_refused(client: Client):
    answer = pop(client, maxMsgNums=1)
    (record,) = records(answer.text())
    good = handle(answer, record)
    ask = client.ask
    assert ask(protocol.ACK_MESSAGE, **{**good, "offset": 99}).code == Code.NO_MESSAGE
    assert ask(protocol.ACK_MESSAGE, **{**good, "extraInfo": "x"}).code == Code.MESSAGE_ILLEGAL
    assert ask(protocol.ACK_MESSAGE, **{**good, "topic": "no"}).code == Code.TOPIC_NOT_EXIST
    assert pop(client, topic="no").code == Code.TOPIC_NOT_EXIST
    assert pop(client, queueId=7).code == Code.INVALID_PARAMETER
    assert pop(client, exp="a = ", expType="SQL92").code == Code.SUBSCRIPTION_PARSE_FAILED
    said = {"c": "g", "t": "t", "r": "0", "so": 0, "q": 0}
    many = base64.b64encode(b"\xff" * PopLimits().in_flight_max).decode()
    for bits in ("!", many, 7):
        told = ask(protocol.BATCH_ACK_MESSAGE, {"acks": [{**said, "b": bits}]})
        assert told.code == Code.MESSAGE_ILLEGAL


def test_all_messages_of_a_real_broker_are_popped_once_as_they_are_stored(captured_tier: Tier):
    """Also those of inner batches, alone; by tags those that have it."""
    for name in ("s01-basic", "s11-lmq-batchcq"):
        store, url = captured_tier(name)
        log = captures.LocalLog(store)
        with mounted(url, keeps_offsets=False) as served, served.client(Form.JSON) as client:
            for topic, messages in captures.captured(name).messages.items():
                wanted = {(one["queue_id"], one["queue_offset"]): one for one in messages}
                found = popped(client, topic)
                assert {place: len(rows) for place, rows in found.items()} == dict.fromkeys(
                    wanted, 1
                )
                for place, (record,) in found.items():
                    one = wanted[place]
                    assert base64.b64encode(record.body).decode() == one["body_base64"]
                assert log
                tags = [one["tags"] for one in messages if one["tags"]]
                if tags:
                    some = popped(client, topic, consumerGroup="tags", exp=tags[0])
                    assert set(some) == {p for p, one in wanted.items() if one["tags"] == tags[0]}


def popped(client: Client, topic: str, **more: object) -> dict[tuple[int, int], list[Record]]:
    found = defaultdict(list)
    while (answer := pop(client, topic=topic, **more)).code == Code.SUCCESS:
        for record in records(answer.text()):
            found[record.queue_id, record.queue_offset].append(record)
    assert answer.code == Code.POLLING_TIMEOUT
    return found


def test_a_group_is_told_to_pop_and_that_is_kept(growing: Growing):
    said: dict[str, Any] = {
        "topic": "t",
        "consumerGroup": "g",
        "mode": "POP",
        "popShareQueueNum": 0,
    }
    with mounted(growing.url) as served, served.client(Form.JSON) as client:
        assert client.ask(protocol.SET_MESSAGE_REQUEST_MODE, said).code == Code.SUCCESS
        bad = {**said, "mode": "PUSH"}
        assert client.ask(protocol.SET_MESSAGE_REQUEST_MODE, bad).code == Code.INVALID_PARAMETER
    with mounted(growing.url) as served, served.client(Form.JSON) as client:
        client.heartbeat("c1", "g", "t")
        wanted = {"topic": "t", "consumerGroup": "g", "clientId": "c1", "strategyName": "AVG"}
        told = json.loads(client.ask(protocol.QUERY_ASSIGNMENT, wanted).text())
        (row,) = told["messageQueueAssignments"]
        assert (row["mode"], row["messageQueue"]["queueId"]) == ("POP", -1)


def test_clients_that_share_pop_from_their_own_queues_and_those_of_who_follows():
    queues = [("b", "t", number) for number in range(4)]
    clients = ["c1", "c2", "c3", "c4"]
    assert popped_by("c1", clients, queues, "AVG", 0) == [("b", "t", -1)]
    assert popped_by("c1", clients, queues, "AVG", 3) == [("b", "t", -1)]
    assert popped_by("c4", clients, queues, "AVG", 1) == [("b", "t", 3), ("b", "t", 0)]
    assert popped_by("c5", clients, queues, "AVG", 1) == []
    assert popped_by("c3", clients, queues[:2], "AVG", 1) == [("b", "t", 0)]


def test_a_record_that_comes_again_differs_in_nothing_but_how_often(captured_tier: Tier):
    _, url = captured_tier("s01-basic")
    topic = next(iter(captures.captured("s01-basic").messages))
    with mounted(url, keeps_offsets=False) as served, served.client(Form.JSON) as client:
        said = {"topic": topic, "queueId": 0, "maxMsgNums": 1, "invisibleTime": 0}
        first = pop(client, **said).text()
        time.sleep(0.01)
        again = pop(client, **said).text()
        assert decode_record(first).reconsume_times + 1 == decode_record(again).reconsume_times
        assert sum(a != b for a, b in zip(first, again, strict=True)) == 1


class Read:
    """A pop's read of a tier, which a test holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, served: Mounted) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        read = served.mount.store.get_message

        def held(*place: Any, **limits: Any) -> Any:
            found = read(*place, **limits)
            self.began.set()
            assert self.may_end.wait(60)
            return found

        monkeypatch.setattr(served.mount.store, "get_message", held)


@pytest.mark.parametrize("what", ["hidden", "acknowledged", "reset"])
def test_what_happens_to_a_message_while_a_pop_reads_it_counts(
    served: Mounted, client: Client, monkeypatch: pytest.MonkeyPatch, what: str
):
    first = pop(client, maxMsgNums=2, invisibleTime=1)
    (one, _) = records(first.text())
    time.sleep(0.02)
    read = Read(monkeypatch, served)
    held = client.send(protocol.POP_MESSAGE, **asked(maxMsgNums=2))
    assert read.began.wait(60)
    with served.client(Form.JSON) as other:
        if what == "hidden":
            said = handle(first, one) | {"invisibleTime": 60_000}
            assert other.ask(protocol.CHANGE_MESSAGE_INVISIBLETIME, **said).code == Code.SUCCESS
        elif what == "acknowledged":
            acknowledge(other, first, "a")
        else:
            reset = {"group": "g", "topic": "t", "queueId": 0, "timestamp": -1}
            other.ask(protocol.RESET_CONSUMER_OFFSET, **reset, offset=6)
            other.ask(protocol.RESET_CONSUMER_OFFSET, **reset, offset=0)
    read.may_end.set()
    assert bodies(client.answer(held)) == (["a", "b"] if what == "reset" else ["b", "c"])
    rest = ["d", "e", "f"]
    assert bodies(pop(client)) == (["a", "b", "c", *rest] if what == "reset" else rest)
