"""A producer over the broker's protocol: routes from name servers, connections to brokers, sends and questions by unique id.

Overview: ``brokers_of`` says where a topic can be written, as name servers tell it (asked again after ``ROUTE_S``, the next
one when one does not answer); ``ask_all`` puts many requests to one broker, over a connection made when it is wanted.

Every request has a deadline (``TIMEOUT_S`` without a byte of an answer). Nothing is sent twice here: what became of a
request without an answer nobody knows. For one thread; ``close`` it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tiered.addresses import Address, address
from tiered.errors import StoreUnavailableError
from tiered.format.fastjson import JsonError, loads
from tiered.format.remoting import Command, FrameError, RemotingClient

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiered.clock import Clock

NO_TOPIC: Final = 17
TEMPLATE: Final = "TBW102"
"""Of topics that a broker makes when they are first sent to, where it may."""
TIMEOUT_S: Final = 10.0
CONNECT_S: Final = 3.0
ROUTE_S: Final = 30.0
_WRITE: Final = 2
QUEUES_MADE: Final = 4
"""Of a topic that is made by being sent to."""
_FIRST_WITH_TIMERS: Final = 413
"""Ordinal of version 5.0.0."""


class Ask(IntEnum):
    """Requests, by RocketMQ's names."""

    QUERY_MESSAGE = 12
    GET_BROKER_RUNTIME_INFO = 28
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    SEND_MESSAGE_V2 = 310


class WritableBroker(NamedTuple):
    """A master that takes messages of a topic."""

    name: str
    address: Address  # where it is
    queues: int  # number of the topic's queues there that may be written


class Producer:
    """Sends messages to a cluster as a client would, and asks whether one is there."""

    def __init__(self, name_servers: Sequence[Address], clock: Clock) -> None:
        """Ask nothing yet."""
        self.name_servers = tuple(name_servers)
        self._clock = clock
        self._routes: dict[str, tuple[float, Sequence[WritableBroker]]] = {}
        self._connections: dict[Address, RemotingClient] = {}
        self._wheels: dict[Address, bool] = {}

    def brokers(self) -> Mapping[str, Address]:
        """The masters that name servers know, by name."""
        answer = self._ask_name_server(Command(Ask.GET_BROKER_CLUSTER_INFO, language="PYTHON"))
        table = _table(answer, "brokerAddrTable")
        return {name: master for name, row in table.items() if (master := _master(row))}

    def brokers_of(self, topic: str) -> Sequence[WritableBroker]:
        """Where a topic can be written, by name of the broker; nothing: it is not there, and is not made by sending."""
        known = self._routes.get(topic)
        now_s = self._clock.monotonic_s()
        if known is None or now_s - known[0] > ROUTE_S:
            found = self._route(topic)
            if not found:
                made = self._route(TEMPLATE)
                found = [one._replace(queues=min(one.queues, QUEUES_MADE)) for one in made]
            known = self._routes[topic] = now_s, found
        return known[1]

    def forget_routes(self) -> None:
        """Ask anew the next time: something is not as it was."""
        self._routes.clear()

    def _route(self, topic: str) -> list[WritableBroker]:
        fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
        answer = self._ask_name_server(
            Command(Ask.GET_ROUTEINFO_BY_TOPIC, fields=fields, language="PYTHON"), fine=(NO_TOPIC,)
        )
        if answer.code:
            return []
        masters = {
            str(row.get("brokerName")): _master(row) for row in _table(answer, "brokerDatas")
        }
        found = []
        for row in _table(answer, "queueDatas"):
            name, perm, count = row.get("brokerName"), row.get("perm"), row.get("writeQueueNums")
            master = masters.get(str(name))
            if (
                master
                and isinstance(perm, int)
                and perm & _WRITE
                and isinstance(count, int)
                and count
            ):
                found.append(WritableBroker(str(name), master, count))
        return sorted(found)

    def _ask_name_server(self, request: Command, fine: Sequence[int] = ()) -> Command:
        errors = []
        for server in self.name_servers:
            answers, error = self.ask_all(server, [request])
            answer = answers[0]
            if answer is not None and answer.code in {0, *fine}:
                return answer
            why = f"code {answer.code}: {answer.remark}" if answer else error
            errors.append(f"{Address(*server)}: {why}")
        raise StoreUnavailableError(
            f"no name server answers: {'; '.join(errors)}",
            do="check the addresses behind namesrv://",
        )

    def ask_all(
        self, address: Address, requests: Sequence[Command]
    ) -> tuple[list[Command | None], str]:
        """Put requests to one server.

        Returns:
            The answers in order, None where none came, and why not; empty: all did.
        """
        try:
            connection = self._connection(address)
        except (OSError, FrameError) as error:
            return [None] * len(requests), str(error) or type(error).__name__
        answers, why = connection.ask_all(requests)
        if why:
            self._drop(address)
        return answers, why

    def greet(self, address: Address) -> str:
        """Connect to a broker, and learn its version; why that was not possible (nothing else was asked), else nothing."""
        try:
            is_new = address not in self._connections
            connection = self._connection(address)
            if is_new or address not in self._wheels:
                answer = connection.ask(Command(Ask.GET_BROKER_RUNTIME_INFO, language="PYTHON"))
                self._wheels[address] = answer.version >= _FIRST_WITH_TIMERS
        except (OSError, FrameError) as error:
            self._drop(address)
            return str(error) or type(error).__name__
        return ""

    def hail(self, address: Address) -> str:
        """Have a broker answer something; why it did not."""
        return self.ask_all(address, [Command(Ask.GET_BROKER_RUNTIME_INFO, language="PYTHON")])[1]

    def has_wheel(self, address: Address) -> bool:
        """Whether a broker that was greeted keeps timers; an older one would deliver them at once."""
        return self._wheels.get(address, False)

    def note_no_wheel(self, address: Address) -> None:
        """It has said that it keeps none."""
        self._wheels[address] = False

    def _connection(self, address: Address) -> RemotingClient:
        known = self._connections.get(address)
        if known is not None and not known.is_ended:
            return known
        self._drop(address)
        made = RemotingClient(*address, TIMEOUT_S, connect_s=CONNECT_S)
        self._connections[address] = made
        return made

    def _drop(self, address: Address) -> None:
        known = self._connections.pop(address, None)
        self._wheels.pop(address, None)
        if known is not None:
            known.close()

    def close(self) -> None:
        """End all connections."""
        for connected in list(self._connections):
            self._drop(connected)


def _table(answer: Command, name: str) -> Any:  # noqa: ANN401 (JSON is of any type)
    """A part of an answer's document."""
    try:
        return loads(answer.text()).get(name) or {}
    except (JsonError, AttributeError) as error:
        raise StoreUnavailableError(f"a name server answered nonsense: {error}") from error


def _master(row: Mapping[str, Any]) -> Address | None:
    """Where the master of a broker is."""
    try:
        return address(str((row.get("brokerAddrs") or {}).get("0", "")))
    except ValueError:
        return None
