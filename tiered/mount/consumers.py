"""Who consumes: groups and their members by heartbeats, locks of orderly consumers, and what is passed on to clients.

Overview: a client heartbeats over the connection by which it can be told of changes. It is forgotten with that connection,
when it says so, or after ``SILENT_S`` without a heartbeat. When the members or the subscriptions of a group change, all its
members are told, and rebalance at once.

Nothing of this is kept: clients tell it again within 30 s. Limits: ``MEMBERS_MAX`` and ``SAID_MAX`` in all groups together,
``LOCKS_MAX``.
For one thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from tiered.format.fastjson import JsonError, loads
from tiered.format.remoting import ONEWAY, Command
from tiered.mount import protocol
from tiered.mount.protocol import Code, RefusalError, as_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from tiered.clock import Clock
    from tiered.mount.server import Connection, Exchange, Handler

SILENT_S: Final = 120.0
LOCK_S: Final = 60.0
MEMBERS_MAX: Final = 100_000
LOCKS_MAX: Final = 1_000_000
SUBSCRIPTIONS_MAX: Final = 10_000
SAID_MAX: Final = 64 << 20
"""Characters of all subscriptions, as clients said them; a heartbeat may be as long as a frame."""
_WORD_CHARS: Final = 64
CLUSTERING: Final = "CLUSTERING"
Queue = tuple[str, str, int]
"""Broker's name, topic and queue id, as clients name a queue."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a group wants of a topic."""

    topic: str
    expression: str  # of the filter
    kind: str  # ``TAG`` or ``SQL92``
    version: int  # the later of two counts
    document: dict[str, Any] = field(compare=False)  # as the client said it

    @classmethod
    def of(cls, document: dict[str, Any]) -> Subscription:
        """Of ``SubscriptionData``."""
        version = document.get("subVersion")
        return cls(
            protocol.checked_name(document.get("topic"), "topic"),
            str(document.get("subString") or "*"),
            str(document.get("expressionType") or "TAG"),
            version if isinstance(version, int) else 0,
            document,
        )


@dataclass(slots=True)
class GroupMember:
    """A client of a group."""

    connection: Connection  # by which it is told of changes
    language: str  # of the client
    version: int  # its ordinal
    seen_s: float  # its last heartbeat


@dataclass(slots=True)
class Group:
    """A group of consumers."""

    name: str
    members: dict[str, GroupMember] = field(default_factory=dict)  # by client id
    subscriptions: dict[str, Subscription] = field(default_factory=dict)  # by topic
    consume_type: str = "CONSUME_PASSIVELY"  # as the client that came last says
    model: str = CLUSTERING  # ``CLUSTERING`` or ``BROADCASTING``
    from_where: str = "CONSUME_FROM_LAST_OFFSET"  # where it begins that has no offset
    said: int = 0  # characters of its subscriptions


class Consumers:
    """Groups of consumers by their heartbeats."""

    def __init__(self, clock: Clock, on_group: Callable[[str], None] = lambda _group: None) -> None:
        """Know nobody."""
        self.groups: dict[str, Group] = {}  # by name; each has members
        self._clock = clock
        self._on_group = on_group
        self._of_connection: dict[Connection, set[tuple[str, str]]] = {}
        self._count = self._said = 0

    # -- clients ----------------------------------------------------------------------------------

    def heartbeat(self, connection: Connection, request: Command) -> None:
        """Take over what a client says of itself.

        Raises:
            RefusalError: It says nothing, or there are too many.
        """
        said = protocol.document(request)
        client = protocol.checked_name(said.get("clientID"), "clientID")
        for one in protocol.objects(said.get("consumerDataSet")):
            self._join(connection, request, client, one)

    def _join(
        self, connection: Connection, request: Command, client: str, said: dict[str, Any]
    ) -> None:
        name = protocol.checked_name(said.get("groupName"), "groupName")
        wanted = [Subscription.of(one) for one in protocol.objects(said.get("subscriptionDataSet"))]
        group = self.groups.get(name) or Group(name)
        known = group.members.get(client)
        if len(wanted) > SUBSCRIPTIONS_MAX or (known is None and self._count >= MEMBERS_MAX):
            raise RefusalError(Code.SYSTEM_BUSY, "too many consumers or subscriptions")
        is_changed = self._subscribe(group, wanted)
        member = GroupMember(
            connection, request.language, request.version, self._clock.monotonic_s()
        )
        is_new = known is None or known.connection is not connection
        if known is not None and is_new:
            self._of_connection[known.connection].discard((name, client))
        self._count += known is None
        group.members[client] = member
        self._of_connection.setdefault(connection, set()).add((name, client))
        group.consume_type = str(said.get("consumeType") or group.consume_type)[:_WORD_CHARS]
        group.model = str(said.get("messageModel") or group.model)[:_WORD_CHARS]
        group.from_where = str(said.get("consumeFromWhere") or group.from_where)[:_WORD_CHARS]
        if name not in self.groups:
            self.groups[name] = group
            self._on_group(name)
        if is_changed or is_new:
            self._tell(group)

    def _subscribe(self, group: Group, wanted: Iterable[Subscription]) -> bool:
        """The newest that was said of each topic counts, of topics that were named last; whether anything changed."""
        found = {one.topic: one for one in wanted}
        for topic, known in group.subscriptions.items():
            if topic in found and known.version >= found[topic].version:
                found[topic] = known
        is_changed = found != group.subscriptions
        if is_changed:
            said = sum(len(as_json(one.document)) for one in found.values())
            if self._said - group.said + said > SAID_MAX:
                raise RefusalError(Code.SYSTEM_BUSY, "the subscriptions of all groups are too long")
            self._said += said - group.said
            group.subscriptions, group.said = found, said
        return is_changed

    def leave(self, client: str, group: str) -> None:
        """A client says that it goes."""
        found = self.groups.get(group)
        member = found.members.get(client) if found is not None else None
        if member is not None:
            self._of_connection[member.connection].discard((group, client))
            self._remove(group, client)

    def gone(self, connection: Connection) -> None:
        """A connection has ended, and with it all that heartbeat over it."""
        for group, client in self._of_connection.pop(connection, ()):
            self._remove(group, client)

    def expire(self) -> None:
        """Forget who was silent for too long."""
        latest_s = self._clock.monotonic_s() - SILENT_S
        silent = [
            (group.name, client)
            for group in self.groups.values()
            for client, member in group.members.items()
            if member.seen_s < latest_s
        ]
        for name, client in silent:
            self.leave(client, name)

    def _remove(self, name: str, client: str) -> None:
        group = self.groups[name]
        del group.members[client]
        self._count -= 1
        if group.members:
            self._tell(group)
        else:
            del self.groups[name]
            self._said -= group.said

    @staticmethod
    def _tell(group: Group) -> None:
        """Have all members rebalance. Who shares a connection is told once."""
        if group.model != CLUSTERING:
            return
        changed = Command(
            protocol.NOTIFY_CONSUMER_IDS_CHANGED, flag=ONEWAY, fields={"consumerGroup": group.name}
        )
        for connection in {member.connection for member in group.members.values()}:
            connection.tell(changed)

    # -- questions --------------------------------------------------------------------------------

    def clients(self, group: str) -> list[str]:
        """Ids of a group's members."""
        found = self.groups.get(group)
        if found is None:
            raise RefusalError(Code.SYSTEM_ERROR, f"no consumer for this group, {group}")
        return list(found.members)

    def subscription(self, group: str, topic: str, version: int) -> Subscription:
        """What a group wants of a topic.

        Raises:
            RefusalError: It has said nothing of it, or something older.
        """
        found = self.groups.get(group)
        wanted = found.subscriptions.get(topic) if found is not None else None
        if wanted is None:
            raise RefusalError(
                Code.SUBSCRIPTION_NOT_EXIST,
                f"the consumer's group info not exist, group {group}, topic {topic}",
            )
        if wanted.version < version:
            raise RefusalError(
                Code.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest"
            )
        return wanted


def share_of(
    client: str, clients: Iterable[str], queues: Iterable[Queue], strategy: str
) -> list[Queue]:
    """Which queues are one client's, as each client of a group would find by itself.

    Args:
        strategy: ``AVG`` (neighbours) or ``AVG_BY_CIRCLE`` (in turn).
    """
    ids = sorted(clients)
    everything = sorted(queues, key=lambda queue: (queue[1], queue[0], queue[2]))
    if strategy not in {"AVG", "AVG_BY_CIRCLE"}:
        raise RefusalError(Code.SYSTEM_ERROR, f"no strategy {strategy!r} to share queues by")
    if client not in ids:
        return []
    at, count = ids.index(client), len(ids)
    if strategy == "AVG_BY_CIRCLE":
        return everything[at::count]
    size, more = divmod(len(everything), count)
    start = at * size + min(at, more)
    return everything[start : start + size + (at < more)]


class Locks:
    """Which client of a group consumes a queue in order."""

    def __init__(self, clock: Clock) -> None:
        """Nothing is locked."""
        self._clock = clock
        self._held: dict[tuple[str, Queue], tuple[str, float]] = {}

    def lock(self, group: str, client: str, queues: Iterable[Queue]) -> list[Queue]:
        """Lock queues, or renew that; those that are the client's now."""
        return [queue for queue in queues if self._lock(group, client, queue)]

    def _lock(self, group: str, client: str, queue: Queue) -> bool:
        now_s, name = self._clock.monotonic_s(), (group, queue)
        holder, until_s = self._held.get(name, ("", 0.0))
        if holder != client and until_s > now_s:
            return False
        if name not in self._held and len(self._held) >= LOCKS_MAX:
            return False
        self._held[name] = client, now_s + LOCK_S
        return True

    def unlock(self, group: str, client: str, queues: Iterable[Queue]) -> None:
        """Free what the client holds of queues."""
        for queue in queues:
            if self._held.get((group, queue), ("", 0.0))[0] == client:
                del self._held[group, queue]

    def has_any(self, group: str) -> bool:
        """Whether a client of a group holds a queue: it consumes in order."""
        now_s = self._clock.monotonic_s()
        return any(name[0] == group and held[1] > now_s for name, held in self._held.items())

    def expire(self) -> None:
        """Forget what nobody has renewed."""
        now_s = self._clock.monotonic_s()
        self._held = {name: held for name, held in self._held.items() if held[1] > now_s}


# -- relays ----------------------------------------------------------------------------------------
#
# What a broker passes on to consumers on line, over the connections by which they heartbeat. Each question has a deadline; a
# client that is gone, or does not answer, is told to who asked.


ANSWER_S: Final = 10.0
STATUS_S: Final = 5.0
"""For all clients of a group together."""
PLACE_DIGITS: Final = 16
"""At the end of an offset id: the physical offset, in hex."""


@dataclass(frozen=True, slots=True)
class Relays:
    """Answers of one mount that its clients know."""

    consumers: Consumers  # who consumes
    broker: str  # name of the broker, which clients are told
    record_at: Callable[[int, str | None], Awaitable[bytes]]
    """Finds the record at a place of the broker's log; a topic narrows it down."""

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return {
            protocol.GET_CONSUMER_RUNNING_INFO: self.running_info,
            protocol.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
            protocol.GET_CONSUMER_STATUS: self.status,
        }

    async def running_info(self, asked: Exchange) -> Command:
        """GET_CONSUMER_RUNNING_INFO."""
        return await self._pass_on(asked.request, b"")

    async def consume_directly(self, asked: Exchange) -> Command:
        """CONSUME_MESSAGE_DIRECTLY: have a client consume one message now."""
        request = asked.request
        self._member(request)
        found = protocol.text(request, "msgId")
        try:
            place = int(found[-PLACE_DIGITS:], 16)
        except ValueError:
            raise RefusalError(Code.SYSTEM_ERROR, f"{found[:80]!r} is not an offset id") from None
        return await self._pass_on(
            request, await self.record_at(place, request.fields.get("topic"))
        )

    async def _pass_on(self, request: Command, body: bytes) -> Command:
        """The same question to the client that it names; its answer."""
        member = self._member(request)
        said = {**request.fields, "brokerName": self.broker}
        question = Command(request.code, fields=said, body=(body,) if body else ())
        answer = await _ask(member, question, ANSWER_S)
        return replace(answer, flag=0)

    def _member(self, request: Command) -> GroupMember:
        """The client that a request names."""
        group, client = protocol.name(request, "consumerGroup"), protocol.name(request, "clientId")
        found = self.consumers.groups.get(group)
        member = found.members.get(client) if found is not None else None
        if member is None:
            raise RefusalError(Code.SYSTEM_ERROR, f"The Consumer <{group}> <{client}> not online")
        return member

    async def status(self, asked: Exchange) -> Command:
        """INVOKE_BROKER_TO_GET_CONSUMER_STATUS: where each client of a group is in a topic, as it says itself."""
        request = asked.request
        group, topic = protocol.name(request, "group"), protocol.name(request, "topic")
        wanted = request.fields.get("clientAddr")  # a client's id, whatever it is called
        online = self.consumers.groups.get(group)
        members = {
            client: member
            for client, member in (online.members if online is not None else {}).items()
            if not wanted or client == wanted
        }
        if not members:
            raise RefusalError(
                Code.SYSTEM_ERROR, f"No Any Consumer online in the consumer group: [{group}]"
            )
        question = Command(
            protocol.CONSUMER_STATUS_OF_CLIENT, fields={"group": group, "topic": topic}
        )
        told = await asyncio.gather(
            *(_ask(member, question, STATUS_S) for member in members.values()),
            return_exceptions=True,
        )
        rows = [
            b"%b:%b" % (as_json(client), table)
            for client, answer in zip(members, told, strict=True)
            if isinstance(answer, Command) and (table := _table(answer)) is not None
        ]
        return Command(Code.SUCCESS, body=(b'{"consumerTable":{%b}}' % b",".join(rows),))


async def _ask(member: GroupMember, question: Command, timeout_s: float) -> Command:
    """A client's answer."""
    try:
        return await member.connection.ask(question, timeout_s)
    except TimeoutError:
        raise RefusalError(
            Code.CONSUME_MSG_TIMEOUT, "the consumer did not answer in time"
        ) from None
    except ConnectionError as error:
        raise RefusalError(Code.SYSTEM_ERROR, f"the consumer cannot be asked: {error}") from error


def _table(answer: Command) -> bytes | None:
    """Offsets by queue, as a client told them; None: it did not. Its keys are objects, and stay that."""
    try:
        table: Any = loads(answer.text())["messageQueueTable"] if not answer.code else None
    except (JsonError, LookupError, TypeError):
        return None
    if not isinstance(table, dict):
        return None
    return b"{%b}" % b",".join(b"%b:%b" % (key.encode(), as_json(to)) for key, to in table.items())
