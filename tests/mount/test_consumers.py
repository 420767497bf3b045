"""Groups by heartbeats, who is told of changes, locks of orderly consumers; through a mount, and on a clock of the tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mounts import Client, Mounted, mounted

from tiered.clock import ManualClock
from tiered.format.remoting import Command
from tiered.mount import consumers as module
from tiered.mount import protocol
from tiered.mount.consumers import LOCK_S, SILENT_S, Consumers, Locks, share_of
from tiered.mount.protocol import REMARK_CHARS_MAX, Code, RefusalError
from tiered.mount.pulling import make_filter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiered.mount.server import Connection


class Wire:
    """Stands for a connection; keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, command: Command) -> None:
        assert command.code == protocol.NOTIFY_CONSUMER_IDS_CHANGED
        assert command.is_oneway
        self.told.append(command.fields["consumerGroup"])


def beat(
    consumers: Consumers, wire: Wire, client: str, group: str = "g", version: int = 1, **more: Any
) -> None:
    subscriptions = [{"topic": "t", "subString": "*", "subVersion": version}]
    said = {"groupName": group, "messageModel": "CLUSTERING", "subscriptionDataSet": subscriptions}
    body = json.dumps({"clientID": client, "consumerDataSet": [said | more]}).encode()
    consumers.heartbeat(cast("Connection", wire), Command(protocol.HEART_BEAT, body=(body,)))


def gone(consumers: Consumers, wire: Wire) -> None:
    consumers.gone(cast("Connection", wire))


def test_what_clients_say_of_themselves_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """A heartbeat may be as long as a frame, and each may name groups that nobody has named before."""
    monkeypatch.setattr(module, "SAID_MAX", 1000)
    consumers, wire = Consumers(ManualClock()), Wire()
    wanted = [{"topic": "t", "subString": "x" * 400, "subVersion": 1}]
    beat(consumers, wire, "c", "g1", subscriptionDataSet=wanted, consumeType="y" * 1000)
    beat(consumers, wire, "c", "g1", subscriptionDataSet=wanted)  # the same again
    beat(consumers, wire, "c", "g2", subscriptionDataSet=wanted)
    assert len(consumers.groups["g1"].consume_type) == 64
    with pytest.raises(RefusalError, match="too long") as refused:
        beat(consumers, wire, "c", "g3", subscriptionDataSet=wanted)
    assert (refused.value.code, list(consumers.groups)) == (Code.SYSTEM_BUSY, ["g1", "g2"])
    consumers.leave("c", "g1")
    beat(consumers, wire, "c", "g3", subscriptionDataSet=wanted)
    gone(consumers, wire)
    assert not consumers.groups
    beat(consumers, wire, "c", "g4", subscriptionDataSet=[{**wanted[0], "subString": "x" * 900}])


def test_all_members_are_told_when_one_comes_or_goes():
    groups: list[str] = []
    consumers, one, other = Consumers(ManualClock(), groups.append), Wire(), Wire()
    beat(consumers, one, "c1")
    beat(consumers, other, "c2")
    beat(consumers, other, "c2")
    assert (one.told, other.told, groups) == (["g", "g"], ["g"], ["g"])
    assert consumers.clients("g") == ["c1", "c2"]
    consumers.leave("c1", "g")
    assert (one.told, other.told) == (["g", "g"], ["g", "g"])
    gone(consumers, one)
    gone(consumers, other)
    assert not consumers.groups
    with pytest.raises(RefusalError):
        consumers.clients("g")
    beat(consumers, one, "c1")
    assert groups == ["g", "g"]


def test_broadcasting_consumers_are_not_told():
    consumers, one, other = Consumers(ManualClock()), Wire(), Wire()
    beat(consumers, one, "c1", messageModel="BROADCASTING")
    beat(consumers, other, "c2", messageModel="BROADCASTING")
    assert not one.told + other.told


def test_a_client_of_several_groups_goes_from_all_with_its_connection():
    consumers, wire = Consumers(ManualClock()), Wire()
    beat(consumers, wire, "c", "g1")
    beat(consumers, wire, "c", "g2")
    gone(consumers, wire)
    assert not consumers.groups


def test_who_comes_again_over_another_connection_is_there_once():
    consumers, old, new = Consumers(ManualClock()), Wire(), Wire()
    beat(consumers, old, "c")
    beat(consumers, new, "c")
    gone(consumers, old)
    assert consumers.clients("g") == ["c"]
    gone(consumers, new)
    assert not consumers.groups


def test_who_is_silent_for_two_minutes_is_forgotten():
    clock = ManualClock()
    consumers, wire, other = Consumers(clock), Wire(), Wire()
    beat(consumers, wire, "c1")
    clock.advance(SILENT_S - 1)
    beat(consumers, other, "c2")
    clock.advance(2)
    consumers.expire()
    assert consumers.clients("g") == ["c2"]
    assert other.told == ["g", "g"]


def test_the_newest_subscription_counts_and_is_told():
    consumers, one, other = Consumers(ManualClock()), Wire(), Wire()
    beat(consumers, one, "c1", version=5)
    beat(consumers, other, "c2", version=3)
    assert consumers.subscription("g", "t", 5).version == 5
    before = len(one.told)
    beat(consumers, other, "c2", version=7)
    assert len(one.told) == before + 1
    with pytest.raises(RefusalError) as refused:
        consumers.subscription("g", "t", 8)
    assert refused.value.code == Code.SUBSCRIPTION_NOT_LATEST


def test_a_lock_is_one_clients_until_it_is_freed_or_forgotten():
    clock = ManualClock()
    locks, queues = Locks(clock), [("b", "t", 0), ("b", "t", 1)]
    assert locks.lock("g", "c1", queues[:1]) == queues[:1]
    assert locks.lock("g", "c2", queues) == queues[1:]
    assert locks.lock("other", "c2", queues) == queues
    clock.advance(LOCK_S - 1)
    assert locks.lock("g", "c1", queues[:1]) == queues[:1]
    clock.advance(2)
    assert locks.lock("g", "c1", queues) == queues
    locks.unlock("g", "c2", queues)
    assert locks.lock("g", "c2", queues) == []
    locks.unlock("g", "c1", queues)
    assert locks.lock("g", "c2", queues) == queues
    clock.advance(LOCK_S + 1)
    locks.expire()
    assert locks.lock("g", "c3", queues) == queues


@given(
    st.sets(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=6),
    st.sets(st.tuples(st.sampled_from(["b", "c"]), st.just("t"), st.integers(0, 20)), max_size=20),
    st.sampled_from(["AVG", "AVG_BY_CIRCLE"]),
)
def test_each_queue_is_one_clients_and_shares_differ_by_one_at_most(
    clients: set[str], queues: set[tuple[str, str, int]], strategy: str
):
    shares = [share_of(client, clients, queues, strategy) for client in sorted(clients)]
    assert sorted(queue for share in shares for queue in share) == sorted(queues)
    sizes = list(map(len, shares))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert share_of("nobody", clients, queues, strategy) == []


def test_shares_are_those_that_java_clients_find():
    """By its ``AllocateMessageQueueAveragely`` and ``…ByCircle``."""
    queues = [("b", "t", number) for number in range(5)]
    clients = ["y", "x", "z"]
    by_average = [[q[2] for q in share_of(c, clients, queues, "AVG")] for c in "xyz"]
    by_circle = [[q[2] for q in share_of(c, clients, queues, "AVG_BY_CIRCLE")] for c in "xyz"]
    assert by_average == [[0, 1], [2, 3], [4]]
    assert by_circle == [[0, 3], [1, 4], [2]]
    with pytest.raises(RefusalError):
        share_of("x", clients, queues, "MACHINE_ROOM")


# -- through a mount ------------------------------------------------------------------------------


@pytest.fixture
def served(captured_tier: Callable[[str], tuple[Path, str]]) -> Iterator[Mounted]:
    with mounted(captured_tier("s01-basic")[1], keeps_offsets=False) as found:
        yield found


def ids(client: Client, group: str) -> list[str]:
    found = client.ask(protocol.GET_CONSUMER_LIST_BY_GROUP, consumerGroup=group)
    return list(json.loads(found.text())["consumerIdList"]) if found.code == Code.SUCCESS else []


def test_two_clients_see_each_other_come_and_go(served: Mounted):
    with served.client() as one:
        one.heartbeat("c1", "g", "orders", "%RETRY%g")
        with served.client() as other:
            other.heartbeat("c2", "g", "orders", "%RETRY%g")
            assert ids(one, "g") == ids(other, "g") == ["c1", "c2"]
        while ids(one, "g") != ["c1"]:
            pass
        assert {told.fields["consumerGroup"] for told in one.told} == {"g"}
        assert one.ask(protocol.UNREGISTER_CLIENT, clientID="c1", consumerGroup="g").code == 0
        assert ids(one, "g") == []


def test_a_group_has_its_retry_topic(served: Mounted):
    with served.client() as client:
        client.heartbeat("c1", "new", "orders")
        route = client.ask(protocol.GET_ROUTEINFO_BY_TOPIC, topic="%RETRY%new")
        assert json.loads(route.text())["queueDatas"][0]["readQueueNums"] == 1
        assert client.pull("%RETRY%new", 0, 0).code == Code.PULL_NOT_FOUND


def test_queues_are_shared_out_to_who_leaves_that_to_brokers(served: Mounted):
    said = {"topic": "orders", "consumerGroup": "g", "strategyName": "AVG"}
    with served.client() as client:
        client.heartbeat("c1", "g", "orders")
        client.heartbeat("c2", "g", "orders")
        for name, model, numbers in (
            ("c1", "CLUSTERING", [0, 1]),
            ("c2", "CLUSTERING", [2, 3]),
            ("c2", "BROADCASTING", [0, 1, 2, 3]),
        ):
            asked = {**said, "clientId": name, "messageModel": model}
            told = json.loads(client.ask(protocol.QUERY_ASSIGNMENT, asked).text())
            rows = told["messageQueueAssignments"]
            assert [row["messageQueue"]["queueId"] for row in rows] == numbers
            assert {row["mode"] for row in rows} == {"PULL"}
        unknown = {**said, "topic": "none", "clientId": "c1"}
        assert client.ask(protocol.QUERY_ASSIGNMENT, unknown).code == Code.TOPIC_NOT_EXIST


def test_locks_over_the_wire(served: Mounted):
    queue = {"brokerName": "broker-a", "queueId": 0, "topic": "orders"}
    said = {"consumerGroup": "g", "mqSet": [queue]}
    with served.client() as client:
        for name, expected in (("c1", [queue]), ("c2", [])):
            found = client.ask(protocol.LOCK_BATCH_MQ, {**said, "clientId": name})
            assert json.loads(found.text()) == {"lockOKMQSet": expected}
        assert client.ask(protocol.UNLOCK_BATCH_MQ, {**said, "clientId": "c1"}).code == Code.SUCCESS
        found = client.ask(protocol.LOCK_BATCH_MQ, {**said, "clientId": "c2"})
        assert json.loads(found.text()) == {"lockOKMQSet": [queue]}


def test_what_a_lock_names_is_bounded(served: Mounted):
    """It is kept for a minute."""
    queue = {"brokerName": "b" * 100_000, "topic": "orders", "queueId": 0}
    with served.client() as client:
        said = {"consumerGroup": "g", "clientId": "c1", "mqSet": [queue]}
        assert client.ask(protocol.LOCK_BATCH_MQ, said).code == Code.INVALID_PARAMETER


def test_what_a_client_says_comes_back_in_a_refusal_bounded():
    with pytest.raises(RefusalError) as told:
        share_of("c", ["c"], [], "x" * (9 << 20))
    assert len(told.value.remark) <= REMARK_CHARS_MAX
    with pytest.raises(RefusalError) as told:
        make_filter("a", "x" * (9 << 20))
    assert len(told.value.remark) <= REMARK_CHARS_MAX
