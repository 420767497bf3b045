"""Live brokers as the target: what is handed over is sent to them ahead of time, and they deliver it by their own wheel.

Overview: ``give`` sends each message to a broker that has its topic, with the property ``TIMER_DELIVER_MS``; when one
refuses the next is tried, and all of them again, after a pause, when all do. ``has`` asks brokers by unique id.

Which of a batch is there: as long as this process lives it knows what was acknowledged, and which broker may have
what was not. Of a batch that an earlier process began, each message is asked of every broker that may have got it; nothing
is sent to a broker before the journal names it (``mark``). A broker finds a message by unique id in the wheel's topic or,
delivered, in its own; with the same due time it is the same message. One without a unique id gets one that is made of its
place, so that it is found, too.

A broker that may have something and does not answer is waited for, ``WAITED_S``; then the message is given to another one,
and comes twice if the first comes back with it. So it does where a broker keeps no index (``messageIndexEnable=false``).

The broker from which the timers were taken may be among those that they go to, when it lives on. It has its own copies, so
it is asked for each message first, and what it has is not sent.

Never early: a broker's wheel counts seconds (``timerPrecisionMs``), and looks at a second when it is over. What it notes as
due (``TIMER_OUT_MS``) is the second before the message's own time, and its own time is what is sent on (``deliver_at``). It
delivers by its own clock. A broker without a wheel (4.x, or ``timerWheelEnable=false``) gets each message when it is due by
ours.

A topic that no broker has, while there are brokers, is waited for, ``WAITED_S`` as well; then its messages are refused for
good, as is what a broker calls illegal. A name that no broker takes is refused without asking. For one thread; ``close`` it.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter, defaultdict
from enum import Enum, IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from backends.lazy_dataclass import dataclass
from tiered.addresses import Address, address
from tiered.errors import InvalidError, StoreUnavailableError
from tiered.format import properties as names
from tiered.format import sysflag
from tiered.format.fastjson import JsonError, loads
from tiered.format.record import Record, RecordError, decode_record
from tiered.format.remoting import Command, FrameError, RemotingClient
from tiered.local.catalog import SCHEDULE_TOPIC, WHEEL_TOPIC, check_topic
from tiered.log.timers import HOUR_MS
from timer.handover import require_ours
from timer.records import PRECISION_MS_MAX, SECOND_MS, number_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiered.clock import Clock
    from timer.dequeue import DueMessage

# -- a producer ----------------------------------------------------------------------------------
#
# A producer over the broker's protocol: routes from name servers, connections to brokers, sends and questions by unique id.
#
# Overview: ``brokers_of`` says where a topic can be written, as name servers tell it (asked again after ``ROUTE_S``, the
# next one when one does not answer); ``ask_all`` puts many requests to one broker, over a connection made when it is
# wanted.
#
# Every request has a deadline (``TIMEOUT_S`` without a byte of an answer). Nothing is sent twice here: what became of a
# request without an answer nobody knows. For one thread; ``close`` it.

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


# -- the target -------------------------------------------------------------------------------------

_LOG = logging.getLogger("tiered.timer")
GROUP: Final = "tiered_timer_run"
WAITED_S: Final = 120.0
"""As long as a name server waits for a broker of which it hears nothing."""
SETTLE_S: Final = 2.0
"""From a sign of life of a broker until it is asked what became of a send: it may be at it, and lists it a moment later."""
NEAR_MS_MAX: Final = 40 * HOUR_MS
"""What is due in two days or later a broker stores anew every other day, and what is due in three it refuses."""
_TRIES: Final = 4
_PAUSE_S: Final = 0.25
_QUERY_MAX: Final = 32
_CHUNK: Final = 256
_KEPT_BITS: Final = sysflag.COMPRESSED | sysflag.COMPRESSION_MASK | sysflag.MULTI_TAGS
_DROPPED: Final = frozenset({
    *(names.TIMER_OUT_MS, names.TIMER_ENQUEUE_MS, names.TIMER_DEQUEUE_MS, names.TIMER_ROLL_TIMES),
    *(names.TIMER_DELAY_SEC, names.TIMER_DELAY_MS, names.DELAY, names.CLUSTER),
    *(names.REAL_TOPIC, names.REAL_QUEUE_ID, names.TRANSACTION_MARK),
    *("__CRC32#", "MSG_REGION", "TRACE_ON"),
})  # fmt: skip
"""What the first broker has put in, or would keep the next one from treating it as a timer."""

Place = tuple[int, int]


class TimerIdentity(NamedTuple):
    """By which a message is known at a broker: the same is the same message."""

    topic: str
    key: str
    deliver_ms: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message as it is sent."""

    place: Place  # due time and offset in its hour's file
    identity: TimerIdentity  # see there
    queue_id: int  # of its real queue
    record: Record  # as it lies in the file
    properties: str  # as they are sent

    def command(self, broker: WritableBroker) -> Command:
        """The request that stores it; the broker chooses the queue where the real one is not there."""
        record = self.record
        fields = {
            "a": GROUP,
            "b": self.identity.topic,
            "c": TEMPLATE,
            "d": QUEUES_MADE,
            "e": self.queue_id if self.queue_id < broker.queues else -1,
            "f": record.sys_flag & _KEPT_BITS,
            "g": record.born_timestamp_ms,
            "h": record.flag,
            "i": self.properties,
            "j": record.reconsume_times,
            "k": "false",
            "m": "false",
            "n": broker.name,
        }
        texts = {name: str(value) for name, value in fields.items()}
        return Command(Ask.SEND_MESSAGE_V2, fields=texts, body=(record.body,), language="PYTHON")

    def is_same(self, found: Record) -> bool:
        """Whether what a broker has is this message."""
        said = found.properties
        if said.get(names.UNIQ_KEY) != self.identity.key:
            return False
        if found.reconsume_times != self.identity.attempts:
            return False
        dues = {said.get(names.TIMER_DELIVER_MS), said.get(names.TIMER_OUT_MS)} - {None}
        return not dues or bool(dues & {str(self.identity.deliver_ms), str(self.place[0])})


def outgoing(message: DueMessage, seed: str) -> Outgoing:
    """How a message is sent. Pure.

    Args:
        seed: Of unique ids for messages that have none: names the file's tier.
    """
    record = decode_record(message.record, 0)
    said = record.properties
    kept = {name: value for name, value in said.items() if name not in _DROPPED}
    hour_place = f"{seed}{record.queue_id}/{message.offset}".encode()
    made = blake2b(hour_place, digest_size=16).hexdigest().upper()
    key = kept.setdefault(names.UNIQ_KEY, made)
    deliver_ms = deliver_at(message.due_ms, said, record.store_timestamp_ms)
    kept[names.TIMER_DELIVER_MS] = str(deliver_ms)
    return Outgoing(
        (message.due_ms, message.offset),
        TimerIdentity(said.get(names.REAL_TOPIC, ""), key, deliver_ms, record.reconsume_times),
        number_of(said.get(names.REAL_QUEUE_ID, "").encode(), -1),
        record,
        # Not held against what new messages may have: a value with a 0x01 was taken by the first broker, and is by the next.
        "".join(f"{name}{names.NAME_END}{value}{names.PAIR_END}" for name, value in kept.items()),
    )


def deliver_at(due_ms: int, said: Mapping[str, str], stored_ms: int) -> int:
    """The time that a message asked for: a broker's wheel notes the second before it, a delay level the time itself."""
    if names.TIMER_OUT_MS not in said:
        return due_ms
    after_s, after_ms = said.get(names.TIMER_DELAY_SEC, ""), said.get(names.TIMER_DELAY_MS, "")
    asked_ms, low_ms = number_of(said.get(names.TIMER_DELIVER_MS, "").encode(), -1), due_ms
    if after_s or after_ms:  # goes before a time
        after = (
            number_of(after_s.encode(), -1) * SECOND_MS
            if after_s
            else number_of(after_ms.encode(), -1)
        )
        asked_ms, low_ms = stored_ms + after, due_ms + 2 * SECOND_MS
    is_known = low_ms < asked_ms <= due_ms + PRECISION_MS_MAX
    return asked_ms if is_known else due_ms + SECOND_MS


class Outcome(Enum):
    """What an answer to a send means."""

    TAKEN = "taken"
    REFUSED = "refused for good"
    ABSENT = "the topic, or its group, is not there"
    AGAIN = "not now, or not there"
    UNKNOWN = "nobody knows"
    NO_WHEEL = "the broker has no timers"
    TOO_FAR = "it is due later than the broker keeps timers"


_TAKEN_CODES: Final = frozenset({0, 10, 11, 12})
"""Stored; of 10 to 12 a flush to disk or to a replica was waited for in vain."""
_ILLEGAL_CODES: Final = frozenset({13, 29})
_ABSENT_CODES: Final = frozenset({17, 26})


def outcome_of(answer: Command | None) -> Outcome:
    """What an answer to a send means; None: there was none."""
    if answer is None or (answer.code == 1 and answer.remark.startswith("UNKNOWN")):
        return Outcome.UNKNOWN
    if answer.code in _TAKEN_CODES:
        return Outcome.TAKEN
    if answer.code in _ILLEGAL_CODES:
        return Outcome.REFUSED if limit_ms_of(answer.remark) is None else Outcome.TOO_FAR
    if answer.code in _ABSENT_CODES:
        return Outcome.ABSENT
    if answer.code == 1 and "timerWheelEnable" in answer.remark:
        return Outcome.NO_WHEEL
    return Outcome.AGAIN


def limit_ms_of(remark: str) -> int | None:
    """How far ahead a broker takes timers (``timerMaxDelaySec``), as it says when it refuses one for that."""
    found = _LIMIT.search(remark)
    return int(found[1]) if found else None


_LIMIT: Final = re.compile(r"^timer message illegal.* max delay ([0-9]{1,15})ms")


class BrokerTarget:
    """See the module.

    Attributes:
        waiting: Of a wheel, as this has none.
        refused: Likewise; what ``give`` refuses is not counted here.
        missing: Likewise.
        late_ms_max: Likewise.
    """

    def __init__(
        self,
        producer: Producer,
        *,
        source: str,
        seed: str,
        clock: Clock,
        stop: threading.Event,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """Find the brokers.

        Args:
            is_ours: Whether no other run can have begun; asked before each ``_CHUNK`` of sends, so that a run that was
                paused in the middle of a batch sends no more than that when it wakes.
        """
        self._producer, self._source, self._seed = producer, source, seed
        self._clock, self._stop, self._is_ours = clock, stop, is_ours
        self._names = set(producer.brokers())  # those that the journal names, or is about to
        self._forget()
        self._absent: dict[str, float] = {}  # topics, and since when they are missed
        # How far ahead brokers take timers, where they have said so.
        self._limits_ms: dict[str, int] = {}
        self._missing_since_s: float | None = None
        self.kept = 0  # messages that the broker from which they were taken has still
        self.waiting = self.refused = self.missing = self.late_ms_max = 0

    def _forget(self) -> None:
        self._told: set[Place] = set()  # in what is known of these we need not ask
        self._taken: dict[Place, str] = {}  # by which broker
        self._refused: set[Place] = set()
        self._doubt: dict[Place, str] = {}  # who may have it

    # -- the face of a target -----------------------------------------------------------------------

    def mark(self) -> Mapping[str, Any]:
        """See ``timer.handover.Target``. From then on what it names may be sent to."""
        with contextlib.suppress(StoreUnavailableError):
            self._names.update(self._producer.brokers())
        return {"kind": "brokers", "parties": sorted(self._names)}

    @property
    def next_ms(self) -> int | None:
        """Nothing is delivered from here."""
        return None

    def tick(self) -> int:
        """Likewise."""
        return 0

    def close(self) -> None:
        """End the connections."""
        self._producer.close()

    def has(self, messages: Sequence[DueMessage], mark: Mapping[str, Any]) -> list[bool]:
        timers = [outgoing(message, self._seed) for message in messages]
        asked: dict[str, list[Outgoing]] = defaultdict(list)
        for timer in timers:
            for name in self._suspects(timer, mark):
                asked[name].append(timer)
        if asked:
            self._ask_all(asked)
        self._told.update(timer.place for timer in timers)
        self._doubt.clear()
        return [timer.place in self._taken for timer in timers]

    def give(self, messages: Sequence[DueMessage]) -> list[int]:
        """See ``timer.handover.Target``. Acknowledged by a broker when this returns."""
        timers = [outgoing(message, self._seed) for message in messages]
        places = {timer.place for timer in timers}
        if not places & self._told:
            self._forget()  # of the batch before
        self._told |= places
        self._refuse_odd(timers)
        self._leave_own(timers)
        left, why = timers, ""
        for attempt in range(_TRIES):
            left = [one for one in timers if not self._is_settled(one)]
            if not left:
                return sorted(offset for _, offset in places & self._refused)
            if self._doubt or (attempt and self._clock.wait(self._stop, _PAUSE_S * attempt)):
                break
            if attempt:
                self._producer.forget_routes()
            why = self._send(left, attempt) or why
        self._producer.forget_routes()
        raise StoreUnavailableError(
            f"{len(left)} of {len(timers)} messages were not taken by a broker: {why}",
            do="it is tried again; check the brokers",
        )

    def _is_settled(self, timer: Outgoing) -> bool:
        return timer.place in self._taken or timer.place in self._refused

    def _refuse_odd(self, timers: Sequence[Outgoing]) -> None:
        """What no broker takes is not sent: its answer (1) is that of one that is at fault, and would be waited out."""
        for timer in timers:
            if not self._is_settled(timer):
                try:
                    _check_topic(timer.identity.topic)
                except InvalidError as error:
                    self._refuse(timer, error.what)

    # -- sending ------------------------------------------------------------------------------------

    def _send(self, timers: Sequence[Outgoing], attempt: int) -> str:
        """Send each to one broker; why what was not taken was not."""
        why, groups = "", defaultdict[WritableBroker, list[Outgoing]](list)
        missed: dict[str, list[Outgoing]] = defaultdict(list)
        for timer in timers:
            found = self._producer.brokers_of(timer.identity.topic)
            brokers = [one for one in found if one.name in self._names]
            if found and not brokers:
                why = f"broker {found[0].name} has just come"  # noted before the next try
            elif brokers:
                at = (crc32(timer.identity.key.encode()) + attempt) % len(brokers)
                groups[brokers[at]].append(timer)
            else:
                missed[timer.identity.topic].append(timer)
        for broker, some in groups.items():
            why = self._send_to(broker, some, missed) or why
        for topic, some in missed.items():
            why = self._miss(topic, some)
        return why

    def _send_to(
        self, broker: WritableBroker, timers: Sequence[Outgoing], missed: dict[str, list[Outgoing]]
    ) -> str:
        why = self._producer.greet(broker.address)
        if why:
            return f"broker {broker.name}: {why}"
        limit_ms = self._limits_ms.get(broker.name)
        if not self._producer.has_wheel(broker.address):
            limit_ms, why = 0, f"broker {broker.name} has no timers, and gets each message when it is due"  # fmt: skip
        elif limit_ms is not None:
            why = f"broker {broker.name} takes no timers further ahead than {limit_ms} ms, and gets each message then"
        if limit_ms is not None:
            until_ms = self._clock.now_ms() + limit_ms
            timers = [one for one in timers if one.identity.deliver_ms <= until_ms]
        for at in range(0, len(timers), _CHUNK):
            some = timers[at : at + _CHUNK]
            require_ours(self._is_ours)
            answers, error = self._producer.ask_all(
                broker.address, [one.command(broker) for one in some]
            )
            for timer, answer in zip(some, answers, strict=True):
                if answer is not None and answer.code:
                    why = f"broker {broker.name}: code {answer.code}: {answer.remark}"
                if self._note(timer, broker, answer) is Outcome.ABSENT:
                    missed[timer.identity.topic].append(timer)
            if error:
                return f"broker {broker.name}: {error}"
        return why

    def _note(self, timer: Outgoing, broker: WritableBroker, answer: Command | None) -> Outcome:
        outcome = outcome_of(answer)
        if outcome is Outcome.TAKEN:
            self._taken[timer.place] = broker.name
            self._absent.pop(timer.identity.topic, None)
        elif outcome is Outcome.UNKNOWN:
            self._doubt[timer.place] = broker.name
        elif outcome is Outcome.REFUSED:
            assert answer is not None
            self._refuse(timer, f"broker {broker.name}: code {answer.code}: {answer.remark}")
        elif outcome is Outcome.NO_WHEEL:
            self._producer.note_no_wheel(broker.address)
        elif outcome is Outcome.TOO_FAR:
            assert answer is not None
            self._limits_ms[broker.name] = limit_ms_of(answer.remark) or 0
        return outcome

    def _miss(self, topic: str, timers: Sequence[Outgoing]) -> str:
        """The topic can be written nowhere. Perhaps its broker is starting, so it is waited for."""
        if not self._producer.brokers():
            return "no name server knows a broker"
        why, now_s = f"no broker has topic {topic}", self._clock.monotonic_s()
        if now_s - self._absent.setdefault(topic, now_s) >= WAITED_S:
            for timer in timers:
                self._refuse(timer, why)
        return why

    def _refuse(self, timer: Outgoing, why: str) -> None:
        self._refused.add(timer.place)
        _LOG.error("a timer is refused (%s of topic %s): %s", timer.identity.key, timer.identity.topic, why)  # fmt: skip

    # -- asking -------------------------------------------------------------------------------------

    def _suspects(self, timer: Outgoing, mark: Mapping[str, Any]) -> set[str]:
        """Names of the brokers that may have it."""
        place = timer.place
        if place in self._taken:
            return set()
        if place in self._told:
            return {self._doubt[place]} if place in self._doubt else set()
        return set(mark.get("parties") or ())

    def _ask_all(self, asked: Mapping[str, Sequence[Outgoing]]) -> None:
        """Note what brokers have of what they may have."""
        known = self._producer.brokers()
        silent: list[str] = []
        for name, timers in self._settled(asked, known, silent):
            if why := self._ask(name, known[name], timers):
                silent.append(f"broker {name}: {why}")
        now_s = self._clock.monotonic_s()
        if not silent:
            self._missing_since_s = None
            return
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        since_s = self._missing_since_s
        what = f"messages that may be there cannot be asked for: {'; '.join(silent)}"
        if now_s - since_s < WAITED_S or not known:
            raise StoreUnavailableError(what, do="start the broker; it is waited for two minutes")
        self._missing_since_s = None
        _LOG.warning("%s; they are given to other brokers, and may come twice", what)

    def _settled(
        self,
        asked: Mapping[str, Sequence[Outgoing]],
        known: Mapping[str, Address],
        silent: list[str],
    ) -> list[tuple[str, Sequence[Outgoing]]]:
        """Which brokers can be asked, after a moment for what they may be at; why the others cannot comes to ``silent``.

        One that had stopped for a while (a pause of its collector, a frozen machine) answers a question as soon as it goes
        on, and stores what was sent before only then. So the moment begins when it has answered something.
        """
        awake = []
        for name, timers in sorted(asked.items()):
            why = self._producer.hail(known[name]) if name in known else "no name server knows it"
            if why:
                silent.append(f"broker {name}: {why}")
            else:
                awake.append((name, timers))
        if awake:
            self._clock.wait(self._stop, SETTLE_S)
        return awake

    def _ask(self, name: str, address: Address, timers: Sequence[Outgoing]) -> str:
        """Note what one broker has; why it could not be asked."""
        topics = (WHEEL_TOPIC, SCHEDULE_TOPIC) if name == self._source else (WHEEL_TOPIC,)
        counts: Counter[TimerIdentity] = Counter()
        for topic in (*topics, ""):
            found, why = self._query(address, timers, topic)
            if why:
                return why
            counts |= found  # (what was delivered lies in the wheel's topic still)
        counts -= Counter(one.identity for one in timers if self._taken.get(one.place) == name)
        for timer in timers:
            if timer.place not in self._taken and counts[timer.identity] > 0:
                counts[timer.identity] -= 1
                self._taken[timer.place] = name
        return ""

    def _query(
        self, address: Address, timers: Sequence[Outgoing], topic: str
    ) -> tuple[Counter[TimerIdentity], str]:
        """How often a broker has each message in a topic; without one: in its own."""
        unique = list({one.identity: one for one in timers}.values())
        commands = [_question(topic or one.identity.topic, one.identity.key) for one in unique]
        answers, why = self._producer.ask_all(address, commands)
        found: Counter[TimerIdentity] = Counter()
        for one, answer in zip(unique, answers, strict=True):
            if answer is None or answer.code not in {0, _NOT_FOUND}:
                why = why or (f"code {answer.code}: {answer.remark}" if answer else "no answer")
            elif not answer.code:
                found[one.identity] = sum(map(one.is_same, _records(answer.text())))
        return found, why

    def _leave_own(self, timers: Sequence[Outgoing]) -> None:
        """Find out what the broker from which they were taken has still."""
        address = self._producer.brokers().get(self._source) if self._source else None
        if address is None:
            return
        before = len(self._taken)
        some = [one for one in timers if not self._is_settled(one)]
        why = self._ask(self._source, address, some)
        if why:
            raise StoreUnavailableError(
                f"broker {self._source}, from which these timers were taken, cannot be asked for them: {why}",
                do="it is tried again; check the broker",
            )
        self.kept += len(self._taken) - before


_check_topic: Final = lru_cache(maxsize=4096)(check_topic)
_NOT_FOUND: Final = 22


def _question(topic: str, key: str) -> Command:
    fields = {
        "topic": topic,
        "key": key,
        "maxNum": str(_QUERY_MAX),
        "beginTimestamp": "0",
        "endTimestamp": str(2**63 - 1),
        "_UNIQUE_KEY_QUERY": "true",
    }
    return Command(Ask.QUERY_MESSAGE, fields=fields, language="PYTHON")


def _records(body: bytes) -> Iterator[Record]:
    """The records of an answer, one behind the other, up to one that is damaged."""
    at = 0
    while at < len(body):
        try:
            record = decode_record(body, at)
        except RecordError:
            return
        yield record
        at += record.size
