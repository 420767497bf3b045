"""A replica beside a living master, which is the test's own; real ones have tests of their own (test_replica_java)."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.brokers import Served
from support.mounts import Compacted, Growing, Mounted, mounted, records
from support.waiting import until

from fetcher.statuses import GetResult, GetStatus, Policy, Side, Taken
from tiered.errors import FencedError, InvalidError, StoreUnavailableError
from tiered.log.parts import Gap
from tiered.model import QueueOffset
from tiered.mount import mount as mounting
from tiered.mount import protocol
from tiered.mount import replica as module
from tiered.mount.acl import ip_of
from tiered.mount.acl_files import read_rules, read_signing_key
from tiered.mount.protocol import Code, RefusalError
from tiered.mount.replica import without_missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiered.format.remoting import Command
    from tiered.mount.acl import AccessRules

UPDATE, QUERY = protocol.UPDATE_CONSUMER_OFFSET, protocol.QUERY_CONSUMER_OFFSET
SENDS_BACK = 36


class Master(Served):
    """A name server and the master that it knows, in one."""

    def __init__(self) -> None:
        self.brokers: dict[str, str] = {}
        self.registrations: list[dict[str, Any]] = []
        self.acts = False
        self.low, self.high = 0, 100
        self.asked: list[tuple[int, dict[str, str]]] = []
        self.rules: AccessRules | None = None
        self._fields: dict[str, str] = {}
        super().__init__(self._reply)
        self.brokers["0"] = self.address

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _reply(self, request: Command) -> tuple[int, str, dict[str, Any] | bytes]:
        said, self._fields = request.fields, {}
        match request.code:
            case protocol.GET_BROKER_CLUSTER_INFO:
                known = {"brokerAddrs": self.brokers, "enableActingMaster": self.acts}
                return 0, "", {"brokerAddrTable": {"broker": known} if self.brokers else {}}
            case protocol.REGISTER_BROKER:
                self.registrations.append(dict(said) | json.loads(request.text()))
                self.brokers[said["brokerId"]] = said["brokerAddr"]
                return 0, "", b""
            case protocol.UNREGISTER_BROKER:
                self.brokers.pop(said["brokerId"], None)
                return 0, "", b""
        self.asked.append((request.code, dict(said)))
        try:
            if self.rules is not None:
                self.rules.judge(request, ip_of("127.0.0.1:1"))
        except RefusalError as error:
            return error.code, error.remark, b""
        match request.code:
            case protocol.GET_MIN_OFFSET:
                self._fields = {"offset": str(self.low)}
            case protocol.GET_MAX_OFFSET:
                self._fields = {"offset": str(self.high)}
            case protocol.QUERY_CONSUMER_OFFSET:
                self._fields = {"offset": "7"}
            case protocol.PULL_MESSAGE:
                ends = {"minOffset": "0", "maxOffset": "9", "nextBeginOffset": "5"}
                self._fields = {"suggestWhichBrokerId": "0", **ends}
                return 0, "FOUND", b"the master's"
            case protocol.GET_BROKER_CONFIG:
                return 0, "", b"a=b\nslaveReadEnable=false\n"
        return 0, "", b""

    def as_answer(self, *words: Any) -> Command:
        return replace(super().as_answer(*words), fields=self._fields)

    def told(self, code: int) -> list[dict[str, str]]:
        return [fields for asked, fields in self.asked if asked == code]


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[Master]:
    monkeypatch.setattr(mounting, "BESIDE_S", 0.1)
    monkeypatch.setattr(module, "GONE_LOOK_S", 0.05)
    found = Master()
    yield found
    found.end()


def bodies(*numbers: int) -> list[str]:
    return [f"m{number}" for number in numbers]


@pytest.fixture
def tier(tmp_path: Path) -> Growing:
    found = Growing(tmp_path)
    found.put("orders", *bodies(*range(50)))
    return found


def beside(master: Master, url: str, **settings: Any) -> Any:
    where = [("127.0.0.1", master.port)]
    settings = {"namesrv": where, "replica_id": 1, "keeps_offsets": False} | settings
    return mounted(url, **settings)


def place(found: Command) -> tuple[int, int, str]:
    """How it went, where to go on, and at whom."""
    fields = found.fields
    return found.code, int(fields["nextBeginOffset"]), fields["suggestWhichBrokerId"]


AWAY = Code.PULL_RETRY_IMMEDIATELY


def test_it_is_known_by_its_id_beside_the_master_and_leaves_alone(master: Master, tier: Growing):
    with beside(master, tier.url, replica_id=3) as mounted_:
        assert master.brokers == {"0": master.address, "3": mounted_.mount.address}
        (first, *_) = master.registrations
        assert len(first["topicConfigSerializeWrapper"]["topicConfigTable"]) == 3
        assert "enableActingMaster" not in first
        with mounted_.client() as client:
            said = client.ask(protocol.GET_BROKER_CONFIG).text().decode().split()
            assert {"brokerId=3", "brokerRole=SLAVE"} <= set(said)
        count = len(master.registrations)
        until(lambda: len(master.registrations) > count + 1)
    assert master.brokers == {"0": master.address}


def test_a_laggard_is_served_until_it_has_caught_up_and_goes_to_the_master(
    master: Master, tier: Growing
):
    with beside(master, tier.url) as mounted_, mounted_.client() as client:
        first = client.pull("orders", 0, 0)
        assert place(first) == (Code.SUCCESS, 32, "1")
        assert [one.body.decode() for one in records(first.text())] == bodies(*range(32))
        assert place(client.pull("orders", 0, 32)) == (Code.SUCCESS, 50, "0")
        held = {"sysFlag": 4 | 2, "suspendTimeoutMillis": 20_000}
        for offset in (50, 73):
            assert place(client.pull("orders", 0, offset, **held)) == (AWAY, offset, "0")
        assert place(client.pull("%RETRY%g", 0, 4, **held)) == (AWAY, 4, "0")
        assert place(client.pull("orders", 7, 0)) == (AWAY, 0, "0")
        tier.put("orders", "m50")
        assert not master.told(protocol.PULL_MESSAGE)
        until(lambda: mounted_.mount.store.max_offset("orders", 0) == 51)
        assert place(client.pull("orders", 0, 50)) == (Code.SUCCESS, 51, "0")
        puller = mounted_.mount.puller
        assert puller is not None
        assert puller.read_bytes.total() > 0


def test_who_does_not_go_to_the_master_has_its_pulls_passed_on(master: Master, tier: Growing):
    with beside(master, tier.url) as mounted_, mounted_.client() as client:
        assert place(client.pull("orders", 0, 50)) == (AWAY, 50, "0")
        found = client.pull("orders", 0, 50)
        assert (found.code, found.text()) == (Code.SUCCESS, b"the master's")
        assert [one["queueOffset"] for one in master.told(protocol.PULL_MESSAGE)] == ["50"]
        assert place(client.pull("orders", 0, 51)) == (AWAY, 51, "0")


def test_offsets_and_what_else_has_one_truth_are_the_masters(master: Master, tier: Growing):
    asked = {"consumerGroup": "g", "topic": "orders", "queueId": 0}
    with beside(master, tier.url) as mounted_, mounted_.client() as client:
        assert client.ask(QUERY, **asked).fields["offset"] == "7"
        client.tell(UPDATE, **asked, commitOffset=9)
        until(lambda: [one["commitOffset"] for one in master.told(UPDATE)] == ["9"])
        assert client.ask(SENDS_BACK, group="g").code == Code.SUCCESS
        assert client.ask(protocol.LOCK_BATCH_MQ, {"clientId": "c"}).code == Code.SUCCESS
        assert {SENDS_BACK, protocol.LOCK_BATCH_MQ} < {code for code, _ in master.asked}
        assert client.ask(310, topic="orders").code == Code.NO_PERMISSION
        master.brokers.pop("0")
        until(lambda: not mounted_.mount.master.address)
        refused = client.ask(QUERY, **asked)
        assert refused.code == Code.SYSTEM_ERROR
        assert "its master does not answer" in refused.remark


RULES = """
users:
- {username: replica, password: secret-of-ours, userType: Normal}
- {username: reader, password: secret-of-it, userType: Normal}
acls:
- {subject: "User:replica", policies: [{policyType: Custom, entries: [
    {resource: "Topic:*", actions: [Get], decision: Allow}]}]}
- {subject: "User:reader", policies: [{policyType: Custom, entries: [
    {resource: "Topic:*", actions: [Sub], decision: Allow}, {resource: "Group:*", actions: [Sub], decision: Allow}]}]}
"""


@pytest.mark.parametrize("secret", ["secret-of-ours", "another-secret", ""])
def test_what_it_asks_a_master_with_access_control_is_signed_with_its_own_key(
    secret: str, master: Master, tier: Growing, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    """Else it is refused, and the replica does not notice that the tier has more than the master."""
    rules, file = tmp_path / "rules.yml", tmp_path / "tools.yml"
    rules.write_text(RULES)
    file.write_text(f"accessKey: replica\nsecretKey: {secret}\n")
    master.rules, master.high = read_rules(rules, "c"), 49
    key = read_signing_key(file) if secret else None
    with (
        beside(master, tier.url, master_key=key) as mounted_,
        mounted_.client(access_key="reader", secret="secret-of-it") as client,
    ):
        wanted = AWAY if secret == "secret-of-ours" else Code.SUCCESS
        assert client.pull("orders", 0, 0).code == wanted
        asked = {"consumerGroup": "g", "topic": "orders", "queueId": 0}
        assert client.ask(QUERY, **asked).fields["offset"] == "7"  # with its client's signature
    said = [one.message for one in caplog.records if "--master-credentials" in one.message]
    assert len(said) == (wanted != AWAY)
    assert not secret or secret not in caplog.text + repr(key)


@pytest.mark.parametrize("text", ["accessKey: a", "accessKey: a\nsecretKey: hidden\nmore: 1", "- hidden", ""])  # fmt: skip
def test_credentials_are_of_the_form_of_tools_yml(text: str, tmp_path: Path):
    file = tmp_path / "tools.yml"
    file.write_text(text)
    with pytest.raises(InvalidError, match=r"conf/tools\.yml") as error:
        read_signing_key(file)
    assert "hidden" not in str(error.value)


def test_a_tier_that_has_more_than_the_master_is_of_another_history(master: Master, tier: Growing):
    master.high = 49
    with beside(master, tier.url) as mounted_, mounted_.client() as client:
        assert place(client.pull("orders", 0, 0)) == (AWAY, 0, "0")


@pytest.fixture
def sick(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Closed: the tier's store answers again."""
    with ExitStack() as stack:

        def nothing(_self: object, _group: str, _t: str, _q: int, at: int, **_: Any) -> GetResult:
            ends = QueueOffset(0), QueueOffset(50)
            error = StoreUnavailableError("dead")
            return GetResult(GetStatus.TRY_AGAIN, QueueOffset(at), *ends, error=error)

        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("fetcher.message_store.TieredMessageStore.get_message", nothing)
        yield stack


@pytest.mark.parametrize("low", [0, 10, 40])
def test_while_the_tier_fails_the_master_serves_what_it_has_and_nothing_else_moves(
    low: int, master: Master, tier: Growing, sick: ExitStack
):
    master.low = low
    with beside(master, tier.url) as mounted_, mounted_.client() as client:
        found = client.pull("orders", 0, 20)
        if low <= 20:
            assert place(found) == (AWAY, 20, "0")
            sick.close()
            assert place(client.pull("orders", 0, 21)) == (AWAY, 21, "0")  # for a while
        else:
            assert (found.code, "dead" in found.remark) == (Code.SYSTEM_ERROR, True)
            sick.close()
            assert place(client.pull("orders", 0, 20))[:2] == (Code.SUCCESS, 50)


def test_what_the_tier_compacted_is_the_masters_as_long_as_it_has_it(
    master: Master, tmp_path: Path
):
    compacted = Compacted.make(tmp_path, [f"k{number % 4}" for number in range(12)])
    left = sorted(compacted.places)
    assert left == [8, 9, 10, 11]
    with beside(master, compacted.url) as mounted_, mounted_.client() as client:
        assert place(client.pull("prices", 0, 0)) == (AWAY, 0, "0")
        assert place(client.pull("prices", 0, 8)) == (Code.SUCCESS, 12, "0")
    master.low = 8
    with beside(master, compacted.url) as mounted_, mounted_.client() as client:
        found = client.pull("prices", 0, 0)
        assert [one.queue_offset for one in records(found.text())] == left


@pytest.mark.parametrize(
    ("low", "begin", "end"), [(0, 3, [0, 1, 2]), (4, 4, [0, 1, 2]), (6, 9, [0, 1, 2, 6, 7, 8])]
)
def test_a_gap_ends_what_is_given_unless_the_master_has_none_of_it(
    low: int, begin: int, end: list[int]
):
    class Records:
        base_offset = 0

    items = np.array([0, 1, 2, 6, 7, 8])
    chunk = Taken(Records(), items, Side.TIER)  # type: ignore[arg-type] # as far as it is looked at
    gaps = (Gap(QueueOffset(3), QueueOffset(6), "expired"),)
    whole = GetResult(
        GetStatus.FOUND, QueueOffset(9), QueueOffset(0), QueueOffset(9), (chunk,), gaps
    )
    found = without_missing(whole, low)
    assert found.next_begin == begin
    assert [item for one in found.chunks for item in one.items.tolist()] == end


def test_without_a_master_what_the_tier_has_is_served_and_the_rest_waits(
    master: Master, tier: Growing
):
    with beside(master, tier.url) as mounted_, ExitStack() as held:
        clients = [held.enter_context(mounted_.client()) for _ in range(3)]
        gone = master.brokers.pop("0")
        until(lambda: not mounted_.mount.master.address)
        assert mounted_.thread.is_alive()
        assert place(clients[0].pull("orders", 0, 32)) == (Code.SUCCESS, 50, "1")
        waits = {"sysFlag": 4 | 2, "suspendTimeoutMillis": 20_000}
        numbers = [clients[1].send_pull("orders", 0, 50, **waits)]
        short = waits | {"suspendTimeoutMillis": 100}
        assert place(clients[2].pull("orders", 0, 60, **short)) == (Code.PULL_NOT_FOUND, 60, "1")
        tier.put("orders", "m50")
        assert place(clients[1].answer(numbers[0])) == (AWAY, 50, "1")
        number = clients[1].send_pull("orders", 0, 60, **waits)
        master.brokers["0"] = gone
        assert place(clients[1].answer(number)) == (AWAY, 60, "0")


def test_where_brokers_act_for_their_master_it_leaves_with_it_and_comes_back(
    master: Master, tier: Growing
):
    master.acts = True
    with beside(master, tier.url) as mounted_:
        assert master.registrations[-1]["enableActingMaster"] == "true"
        address = master.brokers.pop("0")
        until(lambda: not master.brokers)
        until(lambda: "gone" in mounted_.mount.names.servers[0].error)
        assert mounted_.thread.is_alive()
        master.brokers["0"] = address
        until(lambda: master.brokers.get("1") == mounted_.mount.address)


def test_it_wants_a_master_and_its_id_for_itself(master: Master, tier: Growing):
    gone = master.brokers.pop("0")
    with pytest.raises(StoreUnavailableError, match="no living master"), beside(master, tier.url):
        pass
    assert not master.brokers
    master.brokers |= {"0": gone, "1": "10.0.0.1:10911"}
    with pytest.raises(FencedError, match="this id is registered"), beside(master, tier.url):
        pass
    assert master.brokers["1"] == "10.0.0.1:10911"
    with beside(master, tier.url, replica_id=2) as mounted_:
        master.brokers["2"] = "10.0.0.1:10911"
        until(lambda: not mounted_.thread.is_alive())
        (error,) = mounted_.errors
        assert isinstance(error, FencedError)


def test_it_takes_over_only_from_who_is_gone_for_every_name_server(master: Master, tier: Growing):
    taking = {"replica_id": 0, "is_taking_over": True}
    with pytest.raises(FencedError), beside(master, tier.url, **taking):
        pass
    gone = master.brokers.pop("0")
    where = [("127.0.0.1", master.port), ("127.0.0.1", 9)]
    unsure = pytest.raises(StoreUnavailableError, match="whether the broker lives is not known")
    with unsure, beside(master, tier.url, namesrv=where, **taking):
        pass
    assert not master.brokers
    with beside(master, tier.url, **taking) as mounted_, mounted_.client() as client:
        assert master.brokers == {"0": mounted_.mount.address} != {"0": gone}
        assert place(client.pull("orders", 0, 0)) == (Code.SUCCESS, 32, "0")


def test_says_that_the_master_sends_nobody(
    master: Master, tier: Growing, caplog: pytest.LogCaptureFixture
):
    with beside(master, tier.url):
        assert "slaveReadEnable=true" in caplog.text


@pytest.mark.parametrize(
    ("policy", "side"),
    [(Policy.FORCE, "tier"), (Policy.NOT_IN_DISK, "local"), (Policy.NOT_IN_MEM, "local")],
)
def test_policies_decide_where_bytes_come_from(
    policy: Policy, side: str, master: Master, tier: Growing
):
    """What was just written is in memory."""
    with (
        beside(master, tier.url, store_dir=str(tier.store), policy=policy) as mounted_,
        mounted_.client() as client,
    ):
        assert place(client.pull("orders", 0, 0)) == (Code.SUCCESS, 32, "1")
        assert read_from(mounted_) == {side}


def read_from(mounted_: Mounted) -> set[str]:
    name = "tiered_mount_read_bytes_total"
    return {str(one.labels["side"]) for one in mounted_.mount.samples() if one.name == name}
