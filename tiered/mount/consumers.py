"""Who consumes: groups, their members and subscriptions by heartbeats, and the locks of orderly consumers.

Overview: a client heartbeats over the connection by which it can be told of changes. It is forgotten with that connection,
when it says so, or after ``SILENT_S`` without a heartbeat. When the members or the subscriptions of a group change, all its
members are told, and rebalance at once.

Nothing of this is kept: clients tell it again within 30 s. Limits: ``MEMBERS_MAX`` in all groups together, ``LOCKS_MAX``.
For one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tiered.format.remoting import ONEWAY, Command
from tiered.mount import codes, fields
from tiered.mount.codes import Code, RefusalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiered.clock import Clock
    from tiered.mount.server import Connection

SILENT_S: Final = 120.0
LOCK_S: Final = 60.0
MEMBERS_MAX: Final = 100_000
LOCKS_MAX: Final = 1_000_000
SUBSCRIPTIONS_MAX: Final = 10_000
CLUSTERING: Final = "CLUSTERING"
Queue = tuple[str, str, int]
"""Broker's name, topic and queue id, as clients name a queue."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a group wants of a topic.

    Attributes:
        topic: Which.
        expression: Of the filter.
        kind: ``TAG`` or ``SQL92``.
        version: The later of two counts.
        document: As the client said it.
    """

    topic: str
    expression: str
    kind: str
    version: int
    document: dict[str, Any] = field(compare=False)

    @classmethod
    def of(cls, document: dict[str, Any]) -> Subscription:
        """Of ``SubscriptionData``."""
        version = document.get("subVersion")
        return cls(
            fields.checked_name(document.get("topic"), "topic"),
            str(document.get("subString") or "*"),
            str(document.get("expressionType") or "TAG"),
            version if isinstance(version, int) else 0,
            document,
        )


@dataclass(slots=True)
class GroupMember:
    """A client of a group.

    Attributes:
        connection: By which it is told of changes.
        language: Of the client.
        version: Its ordinal.
        seen_s: Its last heartbeat.
    """

    connection: Connection
    language: str
    version: int
    seen_s: float


@dataclass(slots=True)
class Group:
    """A group of consumers.

    Attributes:
        name: Which.
        members: By client id.
        subscriptions: By topic.
        consume_type: As the client that came last says.
        model: ``CLUSTERING`` or ``BROADCASTING``.
        from_where: Where it begins that has no offset.
    """

    name: str
    members: dict[str, GroupMember] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    consume_type: str = "CONSUME_PASSIVELY"
    model: str = CLUSTERING
    from_where: str = "CONSUME_FROM_LAST_OFFSET"


class Consumers:
    """See the module.

    Attributes:
        groups: By name; each has members.
    """

    def __init__(self, clock: Clock, on_group: Callable[[str], None] = lambda _group: None) -> None:
        """Know nobody.

        Args:
            clock: Tells silence.
            on_group: Told the name of each group that has a member again.
        """
        self.groups: dict[str, Group] = {}
        self._clock = clock
        self._on_group = on_group
        self._of_connection: dict[Connection, set[tuple[str, str]]] = {}
        self._count = 0

    # -- clients ----------------------------------------------------------------------------------

    def heartbeat(self, connection: Connection, request: Command) -> None:
        """Take over what a client says of itself.

        Raises:
            RefusalError: It says nothing, or there are too many.
        """
        said = fields.document(request)
        client = fields.checked_name(said.get("clientID"), "clientID")
        for one in fields.objects(said.get("consumerDataSet")):
            self._join(connection, request, client, one)

    def _join(
        self, connection: Connection, request: Command, client: str, said: dict[str, Any]
    ) -> None:
        name = fields.checked_name(said.get("groupName"), "groupName")
        wanted = [Subscription.of(one) for one in fields.objects(said.get("subscriptionDataSet"))]
        group = self.groups.get(name) or Group(name)
        known = group.members.get(client)
        if len(wanted) > SUBSCRIPTIONS_MAX or (known is None and self._count >= MEMBERS_MAX):
            raise RefusalError(Code.SYSTEM_BUSY, "too many consumers or subscriptions")
        member = GroupMember(
            connection, request.language, request.version, self._clock.monotonic_s()
        )
        is_new = known is None or known.connection is not connection
        if known is not None and is_new:
            self._of_connection[known.connection].discard((name, client))
        self._count += known is None
        group.members[client] = member
        self._of_connection.setdefault(connection, set()).add((name, client))
        group.consume_type = str(said.get("consumeType") or group.consume_type)
        group.model = str(said.get("messageModel") or group.model)
        group.from_where = str(said.get("consumeFromWhere") or group.from_where)
        if name not in self.groups:
            self.groups[name] = group
            self._on_group(name)
        if self._subscribe(group, wanted) or is_new:
            self._tell(group)

    @staticmethod
    def _subscribe(group: Group, wanted: Iterable[Subscription]) -> bool:
        """The newest that was said of each topic counts, of topics that were named last; whether anything changed."""
        found = {one.topic: one for one in wanted}
        for topic, known in group.subscriptions.items():
            if topic in found and known.version >= found[topic].version:
                found[topic] = known
        is_changed = found != group.subscriptions
        group.subscriptions = found
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

    @staticmethod
    def _tell(group: Group) -> None:
        """Have all members rebalance. Who shares a connection is told once."""
        if group.model != CLUSTERING:
            return
        changed = Command(
            codes.NOTIFY_CONSUMER_IDS_CHANGED, flag=ONEWAY, fields={"consumerGroup": group.name}
        )
        for connection in {member.connection for member in group.members.values()}:
            connection.tell(changed)

    # -- questions --------------------------------------------------------------------------------

    def clients(self, group: str) -> list[str]:
        """Ids of a group's members.

        Raises:
            RefusalError: There are none.
        """
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

    def expire(self) -> None:
        """Forget what nobody has renewed."""
        now_s = self._clock.monotonic_s()
        self._held = {name: held for name, held in self._held.items() if held[1] > now_s}
