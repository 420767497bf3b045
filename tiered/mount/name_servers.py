"""Names: a mount tells name servers of itself as a broker does, with permission read-only.

Overview: one connection for each name server, held, since a name server forgets a broker with its connection. Over it the
mount registers under its broker's name, again every ``interval_s`` and whenever its topics change, and unregisters when it
stops. Before each registration it asks who has the name: another address under it is a broker that lives (a name
server forgets a dead one), and the mount does not take its place: it raises ``FencedError``, at the start and at any time
later.

Retries: a name server that does not answer is asked again at the next interval, over a new connection; of several each is
by itself. At the start one at least has to take the registration. Each question has a deadline of ``ASK_S``.

After a crash name servers forget the mount at once with its connections. Of one loop.

Topics that a live broker of the cluster has as well are left to it, so that its consumers are not mixed with ours. Before
each registration the routes of its topics are asked for, over a connection that is ended then, if the cluster has other
brokers at all. A broker counts that takes messages of the topic: other mounts do not. What it has is left to it for
``LEFT_S`` after it was last seen, so that its restart changes nothing. Retry topics are always told: who pops leaves them to
brokers. With ``is_sharing`` nothing is left out.

Topics are the tier's, those that a decommissioned broker had (with their queue counts and attributes, also where a queue has
never had a message), the names of broker and cluster (each broker has both as topics, and a name server does not take a
broker with one topic alone), what a proxy made for itself (below), and the retry topics of groups
that have consumers here, so that clients and ``mqadmin`` find the group's broker by their route. ``version`` goes up with
every change; name servers look at nothing else. For one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol

from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.addresses import Address
from tiered.errors import FencedError, StoreUnavailableError
from tiered.format.fastjson import JsonError, loads
from tiered.format.record import CRC_MASK
from tiered.format.remoting import SIZE_BYTES, Command, FrameError, decode, encode, frame_size
from tiered.mount import protocol
from tiered.mount.protocol import READ_ONLY, Code, RefusalError, as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tiered.clock import Clock
    from tiered.model import MessageQueue
    from tiered.mount.consumers import Queue
    from tiered.mount.server import Exchange, Handled, Handler

READ: Final = 4
WRITE: Final = 2
LEFT_S: Final = 600.0
"""How long a topic is left to a live broker that is not seen with it any more; a restart takes less."""
LEFT_OUT_NAMED_MAX: Final = 10
RETRY: Final = "%RETRY%"
RETRY_TOPICS_MAX: Final = 10_000
_KEPT: Final = {
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": 0,
    "order": False,
    "attributes": {},
}
"""What is told of a topic as the broker had it, and what without one."""
HELP: Final = "https://rocketmq.apache.org/docs/bestPractice/06FAQ"


class MountedTopics:
    """The topics of a mount, as clients are told of them."""

    def __init__(
        self,
        cluster: str,
        broker: str,
        clock: Clock,
        known: Mapping[str, Mapping[str, Any]] | None = None,
        selects: Callable[[str], bool] = lambda _topic: True,
        *,
        takes_retries: bool = False,
    ) -> None:
        """Begin with the names, and with what the broker had.

        Args:
            known: ``TopicConfig`` of the topics of a broker that was decommissioned, without its own.
            selects: Which of the tier's topics name servers are told of.
            takes_retries: Consumers may send to retry topics.
        """
        self._selects = selects
        self._retry_perm = READ | WRITE if takes_retries else READ
        # Topics that name servers are not told of, though they are selected: others have them.
        self.left_out: frozenset[str] = frozenset()
        self._configs = dict(known or {})
        self._own = {broker: 1, cluster: 1}
        self._known = {name: queue_count(config) for name, config in self._configs.items()}
        self._tiered: Mapping[str, int] = {}
        self._retries: dict[str, int] = {}
        self._system: dict[str, int] = {}
        self._clock = clock
        # Number of queues of each topic, by name.
        self.queues: Mapping[str, int] = {**self._known, **self._own}
        self.version = 1  # goes up with each change
        self.changed_ms = int(clock.now_ms())  # when it last did

    def update(self, queues: Iterable[MessageQueue]) -> bool:
        """Take over what the tier has now; whether anything changed."""
        found: dict[str, int] = {}
        for queue in queues:
            found[queue.topic] = max(found.get(queue.topic, 0), queue.queue_id + 1)
        self._tiered = found
        return self._merge()

    def add_retry(self, group: str) -> bool:
        """A group has a consumer here; whether that is new."""
        name = RETRY + group
        if name in self.queues or len(self._retries) >= RETRY_TOPICS_MAX:
            return False
        self._retries[name] = 1
        return self._merge()

    def add_system(self, topic: str) -> bool:
        """A proxy makes a topic for itself, which can be written to; whether that is new."""
        self._system[topic] = 1
        return self._merge()

    def selected(self) -> list[str]:
        """The topics that name servers may be told of, but for those that every mount has."""
        return [
            name
            for name in self.queues
            if name not in self._own and not name.startswith(RETRY) and self._selects(name)
        ]

    def leave_out(self, topics: frozenset[str]) -> bool:
        """Do not tell name servers of these; whether that is new."""
        if topics == self.left_out:
            return False
        self.left_out = topics
        self._count_change()
        return True

    def _count_change(self) -> None:
        self.version += 1
        self.changed_ms = int(self._clock.now_ms())

    def _merge(self) -> bool:
        merged = {**self._own, **self._system, **self._retries, **self._known}
        for name, queues in self._tiered.items():
            merged[name] = max(queues, merged.get(name, 0))
        if merged == self.queues:
            return False
        self.queues = merged
        self._count_change()
        return True

    def require(self, topic: str, queue_id: int | None = None) -> int:
        """Number of a topic's queues."""
        count = self.queues.get(topic)
        if count is None:
            raise RefusalError(
                Code.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please! {HELP}"
            )
        if queue_id is not None and not 0 <= queue_id < count:
            raise RefusalError(
                Code.INVALID_PARAMETER,
                f"queueId[{queue_id}] is illegal, topic:[{topic}] topicConfig.readQueueNums:[{count}]",
            )
        return count

    def data_version(self) -> dict[str, int]:
        """``DataVersion``."""
        return {"stateVersion": 0, "timestamp": self.changed_ms, "counter": self.version}

    def config(self, name: str) -> dict[str, Any]:
        """``TopicConfig`` of a topic that can only be read, but for retry topics, and what a proxy made."""
        count = self.require(name)
        known = self._configs.get(name, {})
        kept = {field: known.get(field, value) for field, value in _KEPT.items()}
        counts = {"readQueueNums": count, "writeQueueNums": count}
        return {"topicName": name, **counts, "perm": self.permission(name), **kept}

    def permission(self, topic: str) -> int:
        """What clients may do with a topic."""
        if topic in self._system:
            return READ | WRITE
        return self._retry_perm if topic.startswith(RETRY) else READ

    def wrapper(self) -> dict[str, Any]:
        """``TopicConfigSerializeWrapper``."""
        table = {name: self.config(name) for name in self.queues}
        return {"dataVersion": self.data_version(), "topicConfigTable": table}

    def registration(self) -> bytes:
        """The body of a broker's registration."""
        hidden = {
            name
            for name in self.queues
            if name in self.left_out
            or not (
                name in self._own
                or name in self._system
                or name.startswith(RETRY)
                or self._selects(name)
            )
        }
        table = {name: self.config(name) for name in self.queues if name not in hidden}
        wrapper = {
            "dataVersion": self.data_version(),
            "topicConfigTable": table,
            "topicQueueMappingInfoMap": {},
        }
        return as_json({"topicConfigSerializeWrapper": wrapper, "filterServerList": []})


def queue_count(config: Mapping[str, Any]) -> int:
    """Queues of a topic by its ``TopicConfig``; at least one."""
    return max(int(config.get("readQueueNums", 1)), 1)


_LOG = logging.getLogger("tiered.mount")
ASK_S: Final = 3.0
BESIDE_S: Final = 5.0
"""How often a replica registers again, and sees whether its master is still there."""
KNOWN_S: Final = 5.0
"""How long a topic's queues are used before they are asked for again."""
ROUTES_MAX: Final = 1024
MASTER: Final = "0"
"""Id of a broker that clients prefer, and the only one that tells of topics."""


def told_of_shared(topics: frozenset[str]) -> str:
    """What to say of topics that are left to others."""
    named = ", ".join(sorted(topics)[:LEFT_OUT_NAMED_MAX])
    more = len(topics) - LEFT_OUT_NAMED_MAX
    return (
        f"live brokers of the cluster have these topics as well, so name servers are not told that they are here:"
        f" {named}{f', and {more} more' if more > 0 else ''} (--share-topics tells them all the same)"
    )


class NameServerError(Exception):
    """A name server did not answer, or refused."""

    def __init__(self, what: str, code: int | None = None) -> None:
        """Say why."""
        super().__init__(what)
        self.code = code  # with which it refused; None: it did not answer


class UnknownTopicError(NameServerError):
    """A name server has no route of a topic."""


@dataclass(frozen=True, slots=True)
class Identity:
    """As what a mount is known."""

    cluster: str  # name of the cluster
    broker: str  # name of the broker
    address: str  # ``host:port`` at which clients reach it
    broker_id: str = MASTER  # another: a replica beside the living master

    @property
    def kind(self) -> str:
        """What we are, for people."""
        return "mount" if self.broker_id == MASTER else "replica"

    def fields(self) -> dict[str, str]:
        """As requests to a name server name a broker."""
        return {
            "brokerName": self.broker,
            "brokerAddr": self.address,
            "clusterName": self.cluster,
            "brokerId": self.broker_id,
        }


class Beside(Protocol):
    """The living master of a replica, as far as name servers matter."""

    @property
    def address(self) -> str:
        """Of the master; empty: no name server knows one."""

    @property
    def has_to_leave(self) -> bool:
        """Whether name servers must not know the replica now."""

    def note(self, name_server: str, known: Mapping[str, Any]) -> None:
        """Take over what a name server knows of the name; FencedError: another has the replica's place."""

    def fields(self) -> dict[str, str]:
        """What the registration says beside who it is."""

    def registration(self, data_version: Mapping[str, int]) -> bytes:
        """The body of the registration."""


class NameServer:
    """One name server, and the connection to it."""

    def __init__(self, host: str, port: int) -> None:
        """Not connected yet."""
        self.address = str(Address(host, port))
        self.error = "not asked yet"
        """Why the last registration failed; empty: it did not."""
        self._host, self._port = host, port
        self._opaque = count(1)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, code: int, fields: dict[str, str], body: bytes = b"") -> Command:
        """One question.

        Raises:
            NameServerError: It did not answer in time, or refused.
        """
        request = Command(code, next(self._opaque), fields=fields, body=(body,) if body else ())
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._ask(request)
        except (OSError, TimeoutError, FrameError, asyncio.IncompleteReadError) as error:
            self.close()
            why = str(error) or type(error).__name__
            raise NameServerError(f"name server {self.address} does not answer: {why}") from error
        except asyncio.CancelledError:
            self.close()  # an answer may come that nobody waits for
            raise
        if answer.code:
            kind = UnknownTopicError if answer.code == Code.TOPIC_NOT_EXIST else NameServerError
            raise kind(
                f"name server {self.address} refused with code {answer.code}: {answer.remark}",
                answer.code,
            )
        return answer

    async def _ask(self, request: Command) -> Command:
        if self._streams is not None and has_ended(self._streams[0]):
            self.close()  # it was started again, and is asked over a new one at once
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(b"".join(encode(request)))
        await writer.drain()
        while True:
            size = frame_size(await reader.readexactly(SIZE_BYTES))
            answer = decode(await reader.readexactly(size))
            if answer.is_answer and answer.opaque == request.opaque:
                return answer

    def close(self) -> None:
        """End the connection; the name server forgets what was registered over it."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


def has_ended(reader: asyncio.StreamReader) -> bool:
    """Whether the other side has ended a connection, over which nothing was said since."""
    return reader.at_eof() or reader.exception() is not None


class NameServers:
    """Keeps name servers told of a mount."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        identity: Identity,
        topics: MountedTopics,
        *,
        interval_s: float = 30.0,
        is_sharing: bool = False,
        is_taking_over: bool = False,
        live: Beside | None = None,
    ) -> None:
        """Tell nobody yet.

        Args:
            is_sharing: Also with topics that a live broker has.
            is_taking_over: Each name server has to say that there is no such broker.
            live: The master beside which we are a replica; None: we are in its place.
        """
        self._is_taking_over, self._live = is_taking_over, live
        # Topics that a live broker of the cluster has as well.
        self.shared: frozenset[str] = frozenset()
        self._is_sharing = is_sharing
        self._addresses = tuple(addresses)
        self._seen_s: dict[str, float] = {}
        self.servers = [NameServer(host, port) for host, port in addresses]  # all of them
        self._identity = identity
        self._topics = topics
        self._interval_s = interval_s
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._routes: dict[str, tuple[float, list[Queue]]] = {}
        self._routeless: tuple[float, str] = (0.0, "")
        self._is_leaving = False

    async def begin(self) -> None:
        """Register for the first time.

        Raises:
            FencedError: A broker of this name lives.
        """
        if self._is_taking_over or self._live is not None:
            await self._find_master()
        await self.survey()
        await self.register()
        if self.servers and all(server.error for server in self.servers):
            raise StoreUnavailableError(
                self.servers[0].error, where="--namesrv", do="check the addresses"
            )

    async def _find_master(self) -> None:
        """Be sure that there is one, or that there is none."""
        asking = (self._require_free(server) for server in self.servers)
        for error in await asyncio.gather(*asking, return_exceptions=True):
            if error is not None and not isinstance(error, NameServerError):
                raise error
            if error is not None and self._is_taking_over:
                raise StoreUnavailableError(
                    f"whether the broker lives is not known: {error}",
                    where="--take-over",
                    do="have all name servers answer, or name those that do",
                )
        if self._live is not None and not self._live.address:
            raise StoreUnavailableError(
                f"no living master is known: {self._identity.cluster}/{self._identity.broker}",
                where="--namesrv",
                do="start the broker; or, if it is gone for good, add --take-over to serve in its place",
            )

    async def run(self) -> None:
        """Register again and again, until cancelled.

        Raises:
            FencedError: A broker of this name has come.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
            self._changed.clear()
            await self.survey()
            await self.register()

    def change(self) -> None:
        """The topics are others now: have name servers know soon."""
        self._changed.set()

    async def survey(self) -> None:
        """Find out which topics live brokers of the cluster have as well, and leave these to them."""
        if self._live is not None:
            return
        now_s = asyncio.get_running_loop().time()
        found = await asyncio.gather(*(self._others_topics(*one) for one in self._addresses))
        self._seen_s |= dict.fromkeys((topic for topics in found for topic in topics), now_s)
        self._seen_s = {
            topic: seen_s for topic, seen_s in self._seen_s.items() if now_s < seen_s + LEFT_S
        }
        self.shared = frozenset(self._seen_s).intersection(self._topics.selected())
        if not self._is_sharing and self._topics.leave_out(self.shared) and self.shared:
            _LOG.warning("%s", told_of_shared(self.shared))

    async def _others_topics(self, host: str, port: int) -> list[str]:
        """Our topics that another broker of the cluster takes messages of, by one name server; as far as it answers."""
        server, found = NameServer(host, port), list[str]()
        try:
            info = loads((await server.ask(protocol.GET_BROKER_CLUSTER_INFO, {})).text())
            brokers = set((info.get("clusterAddrTable") or {}).get(self._identity.cluster) or ())
            others = brokers - {self._identity.broker}
            for topic in self._topics.selected() if others else ():
                with contextlib.suppress(UnknownTopicError):
                    answer = await server.ask(protocol.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
                    if _is_taken(loads(answer.text()), others):
                        found.append(topic)
        except (NameServerError, JsonError, LookupError, AttributeError, TypeError, ValueError):
            pass  # registering meets the same, and tells it
        finally:
            server.close()
        return found

    async def register(self) -> None:
        """Register with each name server now.

        Raises:
            FencedError: A broker of this name lives. We are registered nowhere any more.
        """
        async with self._turn:
            told = await asyncio.gather(*map(self._register, self.servers), return_exceptions=True)
        fenced = [error for error in told if isinstance(error, FencedError)]
        others = [error for error in told if isinstance(error, BaseException)]
        if fenced:
            await self.unregister()
        for error in (*fenced, *others):
            raise error

    async def _register(self, server: NameServer) -> None:
        try:
            await self._require_free(server)
            await self._leave_if_alone(server)
            body = self._topics.registration()
            if self._live is not None:
                body = self._live.registration(self._topics.data_version())
            fields = {
                **self._identity.fields(),
                **(self._live.fields() if self._live is not None else {}),
                "haServerAddr": self._identity.address,
                "compressed": "false",
                "bodyCrc32": str(zlib_ng.crc32(body) & CRC_MASK),
            }
            await server.ask(protocol.REGISTER_BROKER, fields, body)
        except FencedError as error:
            server.error = str(error)  # so that we do not unregister there: older ones go by name
            raise
        except NameServerError as error:
            if not server.error or server.error == "not asked yet":
                _LOG.warning("%s", error)
            server.error = str(error)
        else:
            if server.error:
                _LOG.info("registered with name server %s", server.address)
            server.error = ""

    async def _leave_if_alone(self, server: NameServer) -> None:
        """Where a replica would be taken for the master that has gone, it is not registered."""
        if self._live is not None and self._live.has_to_leave:
            await server.ask(protocol.UNREGISTER_BROKER, self._identity.fields())
            raise NameServerError("the master is gone; registered again when it is back")

    async def _require_free(self, server: NameServer) -> None:
        """Find out that nobody else has our name."""
        answer = await server.ask(protocol.GET_BROKER_CLUSTER_INFO, {})
        try:
            table = loads(answer.text()).get("brokerAddrTable") or {}
            known = table.get(self._identity.broker) or {}
            if self._live is not None:
                self._live.note(server.address, known)
                return
            others = sorted(
                set((known.get("brokerAddrs") or {}).values()) - {self._identity.address}
            )
        except (JsonError, AttributeError, TypeError) as error:
            raise NameServerError(f"name server {server.address} answered nonsense") from error
        if others:
            raise FencedError(
                f"a broker of this name is registered: {self._identity.broker} at {others[0]}",
                where=f"name server {server.address}",
                do="stop it and its replicas, or serve under another --name",
            )

    async def queues(self, topic: str) -> list[Queue]:
        """All queues of a topic, those of other brokers, too; what is known is used for ``KNOWN_S``.

        Raises:
            RefusalError: No name server can be asked, or there is no such topic.
        """
        if not self.servers:
            return self._own(topic)
        if (known := self._known(topic)) is not None:
            return known
        async with (
            self._turn
        ):  # registering waits for it as well, so that nobody may wait long in here
            if (known := self._known(topic)) is not None:
                return known  # who waited for the same has asked
            until_s, why = self._routeless
            if self._is_leaving or asyncio.get_running_loop().time() < until_s:
                raise RefusalError(
                    Code.SYSTEM_ERROR, f"the route of {topic} is not to be had: {why}"
                )
            found = await self._route(topic)
        if len(self._routes) >= ROUTES_MAX:
            self._routes.clear()
        self._routes[topic] = asyncio.get_running_loop().time() + KNOWN_S, found
        return found

    def _known(self, topic: str) -> list[Queue] | None:
        until_s, known = self._routes.get(topic, (0.0, []))
        return known if asyncio.get_running_loop().time() < until_s else None

    async def _route(self, topic: str) -> list[Queue]:
        """As the first name server says that answers; those that took no registration come last."""
        errors: list[Exception] = []
        for server in sorted(self.servers, key=lambda one: bool(one.error)):
            try:
                answer = await server.ask(protocol.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
                return list(_queues_of(loads(answer.text()), topic))
            except UnknownTopicError:  # not told yet, as of a group that has just come
                return self._own(topic)
            except NameServerError as failed:
                errors.append(failed)
            except (JsonError, LookupError, AttributeError, TypeError, ValueError) as failed:
                errors.append(failed)
        if all(isinstance(error, NameServerError) and error.code is None for error in errors):
            self._routeless = asyncio.get_running_loop().time() + KNOWN_S, str(errors[-1])
        raise RefusalError(
            Code.SYSTEM_ERROR, f"the route of {topic} is not to be had: {errors[-1]}"
        )

    def _own(self, topic: str) -> list[Queue]:
        numbers = range(self._topics.require(topic))
        return [(self._identity.broker, topic, number) for number in numbers]

    async def unregister(self) -> None:
        """Have all name servers forget us; those that do not answer forget us with the connection."""
        self._is_leaving = True

        async def leave(server: NameServer) -> None:
            with contextlib.suppress(NameServerError, FencedError):
                if not server.error:
                    # Who took over from us has the name now, and older name servers unregister by name.
                    await self._require_free(server)
                    await server.ask(protocol.UNREGISTER_BROKER, self._identity.fields())
            server.close()
            server.error = "unregistered"

        async with self._turn:
            await asyncio.gather(*map(leave, self.servers))


def _is_taken(said: Mapping[str, Any], others: set[str]) -> bool:
    """Whether one of these brokers takes messages of a topic, by its ``TopicRouteData``."""
    return any(
        one["brokerName"] in others and int(one["perm"]) & WRITE for one in said["queueDatas"]
    )


def _queues_of(said: Mapping[str, Any], topic: str) -> Iterator[Queue]:
    """Queues that can be read, of a topic's ``TopicRouteData``."""
    for one in said["queueDatas"]:
        if int(one["perm"]) & READ:
            for number in range(int(one["readQueueNums"])):
                yield str(one["brokerName"]), topic, number


def route(identity: Identity, topics: MountedTopics, topic: str) -> dict[str, Any]:
    """``TopicRouteData``: what a name server says of a topic that only we have."""
    count_of_queues = topics.require(topic)
    queues = {
        "brokerName": identity.broker,
        "readQueueNums": count_of_queues,
        "writeQueueNums": count_of_queues,
        "perm": topics.permission(topic),
        "topicSysFlag": 0,
    }
    return {"queueDatas": [queues], "brokerDatas": [_broker(identity)], "filterServerTable": {}}


def cluster(identity: Identity) -> dict[str, Any]:
    """``ClusterInfo`` of a cluster that has only us."""
    return {
        "brokerAddrTable": {identity.broker: _broker(identity)},
        "clusterAddrTable": {identity.cluster: [identity.broker]},
    }


def _broker(identity: Identity) -> dict[str, Any]:
    return {
        "cluster": identity.cluster,
        "brokerName": identity.broker,
        "brokerAddrs": {identity.broker_id: identity.address},
    }


# -- proxies -------------------------------------------------------------------------------------
#
# Topics that a proxy of RocketMQ 5.x makes for itself on the brokers of its cluster, or it does not start.
#
# In cluster mode it keeps other proxies told of its clients by messages of such a topic. Where a mount is the only
# broker, the topic is made on it: announced as one that can be written to, though what is sent there is let go. So
# proxies do not know of one another's clients, which consumers and ``mqadmin`` behind them notice in lists of consumers
# alone. As soon as a live broker of the cluster takes messages of the topic, it is left to that one. Nothing of it is
# kept: a proxy makes it again at its start.

SYSTEM_TOPICS: Final = frozenset({"DefaultHeartBeatSyncerTopic"})


class SystemTopics:
    """Answers who makes such a topic, and who sends to it."""

    def __init__(
        self, topics: MountedTopics, names: NameServers, otherwise: Mapping[int, Handler]
    ) -> None:
        """None is there yet.

        Args:
            otherwise: What answers requests of other topics, by code; else they are refused.
        """
        self._topics, self._names, self._otherwise = topics, names, otherwise

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return {
            protocol.UPDATE_AND_CREATE_TOPIC: self.create,
            protocol.SEND_MESSAGE: lambda asked: self.send(asked, "topic", "queueId"),
            protocol.SEND_MESSAGE_V2: lambda asked: self.send(asked, "b", "e"),
        }

    def create(self, asked: Exchange) -> Handled:
        """UPDATE_AND_CREATE_TOPIC."""
        topic = asked.request.fields.get("topic")
        return self._create(topic) if topic in SYSTEM_TOPICS else self._refuse(asked)

    async def _create(self, topic: str) -> Command:
        """Announce it, if nobody else has it; name servers know it when it is answered."""
        try:
            others = {broker for broker, _, _ in await self._names.queues(topic)}
        except RefusalError as error:
            if error.code != Code.TOPIC_NOT_EXIST:
                raise
            others = set()
        if others and topic not in self._topics.queues:
            raise RefusalError(Code.NO_PERMISSION, f"{READ_ONLY}, and others have the topic")
        if self._topics.add_system(topic):
            await self._names.register()
        return Command(Code.SUCCESS)

    def send(self, asked: Exchange, topic: str, queue_id: str) -> Handled:
        """SEND_MESSAGE and SEND_MESSAGE_V2, whose fields have names of one letter: let go."""
        fields = asked.request.fields
        if fields.get(topic) not in SYSTEM_TOPICS:
            return self._refuse(asked)
        told = {"msgId": "", "queueId": fields.get(queue_id, "0"), "queueOffset": "0"}
        return Command(Code.SUCCESS, fields=told)

    def _refuse(self, asked: Exchange) -> Handled:
        answer = self._otherwise.get(asked.request.code)
        if answer is None:
            raise RefusalError(Code.NO_PERMISSION, READ_ONLY)
        return answer(asked)
