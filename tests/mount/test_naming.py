"""Registration, against a small name server of the test's; the real one has its own tests."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
from support.mounts import MountProcess, tier_of
from support.waiting import until_async
from zlib_ng import zlib_ng

from tiered.clock import ManualClock, SystemClock
from tiered.errors import FencedError, StoreUnavailableError
from tiered.format.remoting import Command
from tiered.model import MessageQueue
from tiered.mount import name_servers as module
from tiered.mount import protocol
from tiered.mount.name_servers import Identity, MountedTopics, NameServerError, NameServers
from tiered.mount.protocol import RefusalError
from tiered.mount.server import Exchange, RemotingServer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

ME = Identity("c", "b", "127.0.0.1:10911")


class Names:
    """A name server: brokers by name, each with the connection that it is registered over."""

    def __init__(self) -> None:
        self.brokers: dict[str, dict[str, Any]] = {}
        self.registrations: list[dict[str, Any]] = []
        self.refuses = False
        self.others: dict[str, tuple[str, int, set[str]]] = {}
        """Brokers beside: cluster, permission of their topics, and these."""
        self.asked: list[str] = []
        self.port = 0
        self.server = RemotingServer(
            {
                protocol.REGISTER_BROKER: self.register,
                protocol.UNREGISTER_BROKER: self.unregister,
                protocol.GET_BROKER_CLUSTER_INFO: self.cluster,
                protocol.GET_ROUTEINFO_BY_TOPIC: self.route,
            },
            SystemClock(),
            on_gone=self.gone,
        )

    async def listen(self) -> int:
        self.port = await self.server.listen("127.0.0.1", self.port)
        return self.port

    def register(self, asked: Exchange) -> Command:
        if self.refuses:
            return Command(1, remark="no")
        fields, body = asked.request.fields, asked.request.text()
        assert int(fields["bodyCrc32"]) == zlib_ng.crc32(body) & 0x7FFFFFFF
        assert fields["haServerAddr"]
        assert (fields["brokerId"], fields["compressed"]) == ("0", "false")
        self.brokers[fields["brokerName"]] = {"at": fields["brokerAddr"], "over": asked.connection}
        self.registrations.append(json.loads(body)["topicConfigSerializeWrapper"])
        return Command(0)

    def unregister(self, asked: Exchange) -> Command:
        self.brokers.pop(asked.request.fields["brokerName"], None)
        return Command(0)

    def cluster(self, _asked: Exchange) -> Command:
        table = {
            name: {"cluster": "c", "brokerName": name, "brokerAddrs": {0: known["at"]}}
            for name, known in self.brokers.items()
        }
        members: dict[str, list[str]] = {"c": list(self.brokers)}
        for name, (cluster, _, _) in self.others.items():
            members.setdefault(cluster, []).append(name)
        info = {"brokerAddrTable": table, "clusterAddrTable": members}
        text = json.dumps(info).replace('"0":', "0:")  # as fastjson writes it
        return Command(0, body=(text.encode(),))

    def route(self, asked: Exchange) -> Command:
        topic = asked.request.fields["topic"]
        self.asked.append(topic)
        queues = [
            {"brokerName": name, "perm": perm, "readQueueNums": 4, "writeQueueNums": 4}
            for name, (_, perm, topics) in self.others.items()
            if topic in topics
        ]
        if not queues:
            return Command(17, remark="No topic route info")
        return Command(0, body=(json.dumps({"queueDatas": queues}).encode(),))

    def told(self) -> set[str]:
        """What was registered last, without what every mount has."""
        return set(self.registrations[-1]["topicConfigTable"]) - {"b", "c"}

    def gone(self, connection: object) -> None:
        self.brokers = {
            n: known for n, known in self.brokers.items() if known["over"] is not connection
        }


def run(work: Callable[[], Coroutine[None, None, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


def topics(*names: str) -> MountedTopics:
    found = MountedTopics("c", "b", ManualClock())
    found.update(MessageQueue(name, 1) for name in names)
    return found


def test_registers_with_all_read_only_and_leaves_with_its_end():
    async def work() -> None:
        one, other = Names(), Names()
        addresses = [("127.0.0.1", await name_server.listen()) for name_server in (one, other)]
        names = NameServers(addresses, ME, topics("t"))
        await names.begin()
        for name_server in (one, other):
            assert name_server.brokers["b"]["at"] == ME.address
            table = name_server.registrations[0]["topicConfigTable"]
            assert {name: row["readQueueNums"] for name, row in table.items()} == {
                "b": 1,
                "c": 1,
                "t": 2,
            }
            assert {row["perm"] for row in table.values()} == {4}
        await names.unregister()
        assert not one.brokers
        assert not other.brokers
        for name_server in (one, other):
            await name_server.server.close(1)

    run(work)


def test_a_mount_says_once_where_it_is_registered_and_once_where_not(tmp_path: Path):
    url, log = tier_of("s01-basic", tmp_path)[1], tmp_path / "log"

    async def work() -> None:
        there, away = Names(), Names()
        at = f"127.0.0.1:{await there.listen()}"
        deaf = f"127.0.0.1:{await away.listen()}"
        away.refuses = True

        def serve() -> None:
            names = ("--namesrv", f"{at},{deaf}")
            with MountProcess(url, log, "--listen", "127.0.0.1:0", *names) as mount:
                mount.end(signal.SIGTERM)

        await asyncio.to_thread(serve)
        told = log.read_text("utf-8")
        assert (told.count(at), told.count(deaf)) == (1, 1), told
        assert f"registered with name server {at}" in told
        assert f"name server {deaf} refused" in told
        for names in (there, away):
            await names.server.close(1)

    run(work)


def test_registers_again_at_the_interval_and_when_topics_change():
    async def work() -> None:
        name_server, known = Names(), topics("t")
        names = NameServers([("127.0.0.1", await name_server.listen())], ME, known, interval_s=0.1)
        await names.begin()
        running = asyncio.create_task(names.run())
        await until_async(lambda: len(name_server.registrations) >= 3)
        versions = {row["dataVersion"]["counter"] for row in name_server.registrations}
        assert len(versions) == 1
        known.add_retry("g")
        names.change()
        await until_async(lambda: "%RETRY%g" in name_server.registrations[-1]["topicConfigTable"])
        assert name_server.registrations[-1]["dataVersion"]["counter"] > max(versions)
        running.cancel()
        await names.unregister()
        await name_server.server.close(1)

    run(work)


def test_a_name_server_that_comes_back_is_registered_with_again(caplog: pytest.LogCaptureFixture):
    async def work() -> None:
        name_server = Names()
        names = NameServers(
            [("127.0.0.1", await name_server.listen())], ME, topics(), interval_s=0.1
        )
        await names.begin()
        running = asyncio.create_task(names.run())
        await name_server.server.close(0)
        await until_async(lambda: names.servers[0].error)
        again = Names()
        again.port = name_server.port
        await again.listen()
        await until_async(lambda: "b" in again.brokers)
        running.cancel()
        await names.unregister()
        await again.server.close(1)

    run(work)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_a_name_server_that_was_restarted_takes_the_very_next_registration():
    """Of which there is one in 30 s; for as long nobody finds the mount there."""

    async def work() -> None:
        name_server, again = Names(), Names()
        names = NameServers([("127.0.0.1", await name_server.listen())], ME, topics())
        await names.begin()
        await name_server.server.close(0)
        again.port = name_server.port
        await again.listen()
        await names.register()
        assert not names.servers[0].error
        assert "b" in again.brokers
        await names.unregister()
        await again.server.close(1)

    run(work)


@pytest.mark.parametrize(
    ("cluster", "perm", "left"),
    [("c", 6, {"own", "%RETRY%g"}), ("c", 4, None), ("other", 6, None)],
)
def test_topics_that_a_live_broker_of_the_cluster_has_are_left_to_it(
    cluster: str, perm: int, left: set[str] | None, caplog: pytest.LogCaptureFixture
):
    """Other mounts, which take no messages, and brokers of other clusters change nothing."""

    async def work() -> None:
        name_server = Names()
        name_server.others["b2"] = cluster, perm, {"both", "%RETRY%g"}
        have = topics("own", "both", "%RETRY%g")
        names = NameServers([("127.0.0.1", await name_server.listen())], ME, have)
        await names.begin()
        assert name_server.told() == (left or {"own", "both", "%RETRY%g"})
        assert names.shared == ({"both"} if left else set())
        assert set(have.queues) >= {"own", "both"}  # pulls of it are served all the same
        await names.unregister()
        await name_server.server.close(5)

    run(work)
    assert ("--share-topics" in caplog.text) == bool(left)
    assert ("name servers are not told that they are here: both (" in caplog.text) == bool(left)


def test_what_is_shared_is_looked_for_again_and_a_restart_of_the_other_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    async def work() -> None:
        name_server = Names()
        have = topics("own", "both")
        address = ("127.0.0.1", await name_server.listen())
        names = NameServers([address], ME, have, interval_s=0.01)
        await names.begin()
        assert name_server.told() == {"own", "both"}
        assert not name_server.asked  # there is no other broker
        registering = asyncio.ensure_future(names.run())
        name_server.others["b2"] = "c", 6, {"both"}
        await until_async(lambda: name_server.told() == {"own"})
        version = name_server.registrations[-1]["dataVersion"]["counter"]
        del name_server.others["b2"]
        count = len(name_server.registrations)
        await until_async(lambda: len(name_server.registrations) > count + 3)
        assert name_server.told() == {"own"}
        assert name_server.registrations[-1]["dataVersion"]["counter"] == version
        monkeypatch.setattr(module, "LEFT_S", 0.0)  # it is gone for long
        await until_async(lambda: name_server.told() == {"own", "both"})
        assert name_server.registrations[-1]["dataVersion"]["counter"] > version
        registering.cancel()
        await names.unregister()
        await name_server.server.close(5)

    run(work)


def test_what_is_shared_is_told_on_demand_and_what_is_not_selected_never():
    async def work() -> None:
        name_server = Names()
        name_server.others["b2"] = "c", 6, {"both"}
        port = await name_server.listen()
        have = MountedTopics("c", "b", ManualClock(), selects=lambda topic: topic != "not")
        have.update(MessageQueue(name, 1) for name in ("own", "both", "not"))
        names = NameServers([("127.0.0.1", port)], ME, have, is_sharing=True)
        await names.begin()
        assert name_server.told() == {"own", "both"}
        assert names.shared == {"both"}
        assert "not" in have.queues
        await names.unregister()
        await name_server.server.close(5)

    run(work)


def test_beside_a_live_broker_of_the_same_name_it_is_refused_before_anything_is_said():
    async def work() -> None:
        name_server = Names()
        name_server.brokers["b"] = {"at": "10.0.0.1:10911", "over": None}
        names = NameServers([("127.0.0.1", await name_server.listen())], ME, topics())
        with pytest.raises(FencedError, match=r"b at 10\.0\.0\.1:10911"):
            await names.begin()
        assert not name_server.registrations
        assert name_server.brokers["b"]["at"] == "10.0.0.1:10911"
        await name_server.server.close(1)

    run(work)


def test_a_broker_of_the_same_name_that_comes_later_has_its_place():
    async def work() -> None:
        name_server, other = Names(), Names()
        addresses = [("127.0.0.1", await one.listen()) for one in (name_server, other)]
        names = NameServers(addresses, ME, topics(), interval_s=0.1)
        await names.begin()
        running = asyncio.create_task(names.run())
        name_server.brokers["b"] = {"at": "10.0.0.1:10911", "over": None}
        with pytest.raises(FencedError):
            await running
        assert not other.brokers
        assert name_server.brokers["b"]["at"] == "10.0.0.1:10911"
        for one in (name_server, other):
            await one.server.close(1)

    run(work)


def test_who_was_taken_over_does_not_unregister_who_took_over():
    """A mount that was suspended hears of it from its lease; older name servers unregister by name."""

    async def work() -> None:
        taken, kept = Names(), Names()
        addresses = [("127.0.0.1", await one.listen()) for one in (taken, kept)]
        names = NameServers(addresses, ME, topics())
        await names.begin()
        taken.brokers["b"] = {"at": "10.0.0.1:10911", "over": None}
        await names.unregister()
        assert taken.brokers["b"]["at"] == "10.0.0.1:10911"
        assert not kept.brokers
        for one in (taken, kept):
            await one.server.close(1)

    run(work)


def test_one_of_several_name_servers_is_enough_at_the_start_and_none_is_not():
    async def work() -> None:
        refusing, good = Names(), Names()
        refusing.refuses = True
        addresses = [("127.0.0.1", await one.listen()) for one in (refusing, good)]
        names = NameServers(addresses, ME, topics())
        await names.begin()
        assert "refused with code 1: no" in names.servers[0].error
        assert not names.servers[1].error
        await names.unregister()
        for one in (refusing, good):
            await one.server.close(1)
        gone = NameServers(addresses, ME, topics())
        with pytest.raises(StoreUnavailableError, match="does not answer"):
            await gone.begin()
        await gone.unregister()
        await NameServers([], ME, topics()).begin()

    run(work)


class Asked:
    """A name server that answers, or takes its time and does not."""

    def __init__(self, error: str, answer: Command | None) -> None:
        self.error, self.answer, self.count = error, answer, 0

    async def ask(self, *_question: object) -> Command:
        self.count += 1
        await asyncio.sleep(0)
        if self.answer is None:
            raise NameServerError("it does not answer")
        return self.answer

    def close(self) -> None:
        pass


def names_of(*servers: Asked) -> NameServers:
    found = NameServers([], ME, MountedTopics("c", "b", ManualClock()))
    found.servers = list(servers)  # type: ignore[arg-type] # as far as it is used
    return found


ROUTE = Command(0, body=(b'{"queueDatas":[{"brokerName":"x","perm":4,"readQueueNums":2}]}',))


def test_a_dead_name_server_is_not_waited_for_where_another_tells_the_route():
    """Registering waits its turn behind these questions: name servers would forget the mount."""

    async def ask() -> None:
        dead, good = Asked("no answer", None), Asked("", ROUTE)
        names = names_of(dead, good)
        told = await asyncio.gather(*(names.queues(topic) for topic in ("t", "u") * 50))
        assert {tuple(queues) for queues in told} == {
            (("x", topic, 0), ("x", topic, 1)) for topic in ("t", "u")
        }
        assert (dead.count, good.count) == (0, 2)

    asyncio.run(ask())


def test_while_no_name_server_answers_they_are_not_asked_for_every_client():
    async def ask() -> None:
        servers = Asked("", None), Asked("", None)
        names = names_of(*servers)
        asking = (names.queues(f"t{number}") for number in range(100))
        told = await asyncio.gather(*asking, return_exceptions=True)
        assert all(
            isinstance(one, RefusalError) and "does not answer" in one.remark for one in told
        )
        assert [server.count for server in servers] == [1, 1]

    asyncio.run(ask())


def test_who_leaves_asks_for_no_route_any_more():
    async def ask() -> None:
        server = Asked("", ROUTE)
        names = names_of(server)
        await names.unregister()
        with pytest.raises(RefusalError):
            await names.queues("t")
        assert server.count == 2  # to unregister, and before that who is registered

    asyncio.run(ask())
