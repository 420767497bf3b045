"""Registration, against a small name server of the test's; the real one has its own tests."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from zlib_ng import zlib_ng

from tiered.clock import ManualClock, SystemClock
from tiered.errors import FencedError, StoreUnavailableError
from tiered.format.remoting import Command
from tiered.model import MessageQueue
from tiered.mount import protocol
from tiered.mount.name_servers import Identity, MountedTopics, NameServerError, NameServers
from tiered.mount.protocol import RefusalError
from tiered.mount.server import Exchange, RemotingServer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

ME = Identity("c", "b", "127.0.0.1:10911")


class Names:
    """A name server: brokers by name, each with the connection that it is registered over."""

    def __init__(self) -> None:
        self.brokers: dict[str, dict[str, Any]] = {}
        self.registrations: list[dict[str, Any]] = []
        self.refuses = False
        self.port = 0
        self.server = RemotingServer(
            {
                protocol.REGISTER_BROKER: self.register,
                protocol.UNREGISTER_BROKER: self.unregister,
                protocol.GET_BROKER_CLUSTER_INFO: self.cluster,
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
        text = json.dumps({"brokerAddrTable": table}).replace('"0":', "0:")  # as fastjson writes it
        return Command(0, body=(text.encode(),))

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


async def until(what: Callable[[], object]) -> None:
    while not what():  # noqa: ASYNC110 (many things are waited for)
        await asyncio.sleep(0.01)


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


def test_registers_again_at_the_interval_and_when_topics_change():
    async def work() -> None:
        name_server, known = Names(), topics("t")
        names = NameServers([("127.0.0.1", await name_server.listen())], ME, known, interval_s=0.1)
        await names.begin()
        running = asyncio.create_task(names.run())
        await until(lambda: len(name_server.registrations) >= 3)
        versions = {row["dataVersion"]["counter"] for row in name_server.registrations}
        assert len(versions) == 1
        known.add_retry("g")
        names.change()
        await until(lambda: "%RETRY%g" in name_server.registrations[-1]["topicConfigTable"])
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
        await until(lambda: names.servers[0].error)
        again = Names()
        again.port = name_server.port
        await again.listen()
        await until(lambda: "b" in again.brokers)
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
