"""The remoting protocol as a mount speaks it: what it is asked, how it answers each, and how requests and answers are read.

``REQUESTS`` is the one table: the server dispatches by it, and part of docs/mount.md is made of it. A code not in it
is answered with ``REQUEST_CODE_NOT_SUPPORTED``, on which clients fall back or give up.
"""

from __future__ import annotations

import json
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from tiered.format.fastjson import JsonError, loads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.format.remoting import Command


class Code(IntEnum):
    """How a request ended, by RocketMQ's names."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    MESSAGE_ILLEGAL = 13
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    INVALID_PARAMETER = 29
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    POLLING_FULL = 209
    POLLING_TIMEOUT = 210


class Treatment(Enum):
    """What becomes of a kind of request."""

    SERVED = "Served"
    """As a broker would."""
    REFUSED = "Refused with `NO_PERMISSION`"
    """It would write. Producers go on with the next broker at once."""
    UNSUPPORTED = "Refused with `REQUEST_CODE_NOT_SUPPORTED`"
    """Clients do without."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A kind of request."""

    code: int  # its number
    name: str  # as RocketMQ calls it
    answer: Treatment  # what becomes of it
    note: str = ""  # what there is to know of the answer; may be empty


SEND_MESSAGE: Final = 10
PULL_MESSAGE: Final = 11
QUERY_MESSAGE: Final = 12
QUERY_CONSUMER_OFFSET: Final = 14
UPDATE_CONSUMER_OFFSET: Final = 15
UPDATE_AND_CREATE_TOPIC: Final = 17
GET_ALL_TOPIC_CONFIG: Final = 21
GET_BROKER_CONFIG: Final = 26
GET_BROKER_RUNTIME_INFO: Final = 28
SEARCH_OFFSET_BY_TIMESTAMP: Final = 29
GET_MAX_OFFSET: Final = 30
GET_MIN_OFFSET: Final = 31
GET_EARLIEST_MSG_STORETIME: Final = 32
VIEW_MESSAGE_BY_ID: Final = 33
HEART_BEAT: Final = 34
UNREGISTER_CLIENT: Final = 35
CONSUMER_SEND_MSG_BACK: Final = 36
GET_CONSUMER_LIST_BY_GROUP: Final = 38
NOTIFY_CONSUMER_IDS_CHANGED: Final = 40
LOCK_BATCH_MQ: Final = 41
UNLOCK_BATCH_MQ: Final = 42
CHECK_CLIENT_CONFIG: Final = 46
REGISTER_BROKER: Final = 103
UNREGISTER_BROKER: Final = 104
GET_ROUTEINFO_BY_TOPIC: Final = 105
GET_BROKER_CLUSTER_INFO: Final = 106
GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Final = 201
GET_TOPIC_STATS_INFO: Final = 202
GET_CONSUMER_CONNECTION_LIST: Final = 203
GET_ALL_TOPIC_LIST_FROM_NAMESERVER: Final = 206
GET_CONSUME_STATS: Final = 208
RESET_CONSUMER_OFFSET: Final = 222
GET_CONSUMER_STATUS: Final = 223
CONSUMER_STATUS_OF_CLIENT: Final = 221
GET_TOPICS_BY_CLUSTER: Final = 224
QUERY_TOPIC_CONSUME_BY_WHO: Final = 300
GET_SYSTEM_TOPIC_LIST_FROM_NS: Final = 304
GET_SYSTEM_TOPIC_LIST_FROM_BROKER: Final = 305
GET_CONSUMER_RUNNING_INFO: Final = 307
CONSUME_MESSAGE_DIRECTLY: Final = 309
SEND_MESSAGE_V2: Final = 310
GET_BROKER_CONSUME_STATS: Final = 317
QUERY_CONSUME_QUEUE: Final = 321
GET_ALL_PRODUCER_INFO: Final = 328
QUERY_TOPICS_BY_CONSUMER: Final = 343
GET_TOPIC_CONFIG: Final = 351
GET_SUBSCRIPTIONGROUP_CONFIG: Final = 352
LITE_PULL_MESSAGE: Final = 361
QUERY_ASSIGNMENT: Final = 400
SET_MESSAGE_REQUEST_MODE: Final = 401
POP_MESSAGE: Final = 200_050
ACK_MESSAGE: Final = 200_051
CHANGE_MESSAGE_INVISIBLETIME: Final = 200_053
NOTIFICATION: Final = 200_054
POLLING_INFO: Final = 200_055
BATCH_ACK_MESSAGE: Final = 200_151

_S, _R, _U = Treatment.SERVED, Treatment.REFUSED, Treatment.UNSUPPORTED
_TIMES = "Times not read within 8 s are 0; the remark counts them."
_HELD = "Long polling; beyond `--held-requests` `SYSTEM_BUSY`, for pops `POLLING_FULL`."
_ACK = "Answered once durable; `SYSTEM_BUSY` after 2.5 s."
_OWN = "Of the mount's own topics, groups and broker."
_ASKED = "Passed on to the client."
_PROXY = "Accepted for the proxies' heartbeat topic."
_SEND = "Accepted for `%RETRY%<group>` (kept in the retry log) and the proxies' heartbeat topic (discarded)."

REQUESTS: Final[tuple[Answered, ...]] = (
    Answered(SEND_MESSAGE, "SEND_MESSAGE", _R, _SEND),
    Answered(PULL_MESSAGE, "PULL_MESSAGE", _S, _HELD),
    Answered(QUERY_MESSAGE, "QUERY_MESSAGE", _S, "Unindexed messages are searched, up to a limit."),
    Answered(QUERY_CONSUMER_OFFSET, "QUERY_CONSUMER_OFFSET", _S),
    Answered(UPDATE_CONSUMER_OFFSET, "UPDATE_CONSUMER_OFFSET", _S),
    Answered(UPDATE_AND_CREATE_TOPIC, "UPDATE_AND_CREATE_TOPIC", _R, _PROXY),
    Answered(GET_ALL_TOPIC_CONFIG, "GET_ALL_TOPIC_CONFIG", _S, _OWN),
    Answered(25, "UPDATE_BROKER_CONFIG", _R),
    Answered(GET_BROKER_CONFIG, "GET_BROKER_CONFIG", _S, _OWN),
    Answered(GET_BROKER_RUNTIME_INFO, "GET_BROKER_RUNTIME_INFO", _S, _OWN),
    Answered(SEARCH_OFFSET_BY_TIMESTAMP, "SEARCH_OFFSET_BY_TIMESTAMP", _S),
    Answered(GET_MAX_OFFSET, "GET_MAX_OFFSET", _S),
    Answered(GET_MIN_OFFSET, "GET_MIN_OFFSET", _S),
    Answered(GET_EARLIEST_MSG_STORETIME, "GET_EARLIEST_MSG_STORETIME", _S),
    Answered(VIEW_MESSAGE_BY_ID, "VIEW_MESSAGE_BY_ID", _S),
    Answered(HEART_BEAT, "HEART_BEAT", _S),
    Answered(UNREGISTER_CLIENT, "UNREGISTER_CLIENT", _S),
    Answered(CONSUMER_SEND_MSG_BACK, "CONSUMER_SEND_MSG_BACK", _S, _ACK),
    Answered(37, "END_TRANSACTION", _R),
    Answered(GET_CONSUMER_LIST_BY_GROUP, "GET_CONSUMER_LIST_BY_GROUP", _S),
    Answered(LOCK_BATCH_MQ, "LOCK_BATCH_MQ", _S),
    Answered(UNLOCK_BATCH_MQ, "UNLOCK_BATCH_MQ", _S),
    Answered(CHECK_CLIENT_CONFIG, "CHECK_CLIENT_CONFIG", _S),
    Answered(GET_ROUTEINFO_BY_TOPIC, "GET_ROUTEINFO_BY_TOPIC", _S, _OWN),
    Answered(GET_BROKER_CLUSTER_INFO, "GET_BROKER_CLUSTER_INFO", _S, _OWN),
    Answered(200, "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", _R),
    Answered(GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "GET_ALL_SUBSCRIPTIONGROUP_CONFIG", _S, _OWN),
    Answered(GET_TOPIC_STATS_INFO, "GET_TOPIC_STATS_INFO", _S, _TIMES),
    Answered(GET_CONSUMER_CONNECTION_LIST, "GET_CONSUMER_CONNECTION_LIST", _S),
    Answered(204, "GET_PRODUCER_CONNECTION_LIST", _U),
    Answered(GET_ALL_TOPIC_LIST_FROM_NAMESERVER, "GET_ALL_TOPIC_LIST_FROM_NAMESERVER", _S, _OWN),
    Answered(207, "DELETE_SUBSCRIPTIONGROUP", _R),
    Answered(GET_CONSUME_STATS, "GET_CONSUME_STATS", _S, _TIMES),
    Answered(215, "DELETE_TOPIC_IN_BROKER", _R),
    Answered(RESET_CONSUMER_OFFSET, "INVOKE_BROKER_TO_RESET_OFFSET", _S),
    Answered(GET_CONSUMER_STATUS, "INVOKE_BROKER_TO_GET_CONSUMER_STATUS", _S, _ASKED),
    Answered(GET_TOPICS_BY_CLUSTER, "GET_TOPICS_BY_CLUSTER", _S, _OWN),
    Answered(QUERY_TOPIC_CONSUME_BY_WHO, "QUERY_TOPIC_CONSUME_BY_WHO", _S),
    Answered(GET_SYSTEM_TOPIC_LIST_FROM_NS, "GET_SYSTEM_TOPIC_LIST_FROM_NS", _S, _OWN),
    Answered(GET_SYSTEM_TOPIC_LIST_FROM_BROKER, "GET_SYSTEM_TOPIC_LIST_FROM_BROKER", _S, _OWN),
    Answered(GET_CONSUMER_RUNNING_INFO, "GET_CONSUMER_RUNNING_INFO", _S, _ASKED),
    Answered(CONSUME_MESSAGE_DIRECTLY, "CONSUME_MESSAGE_DIRECTLY", _S, _ASKED),
    Answered(SEND_MESSAGE_V2, "SEND_MESSAGE_V2", _R, _SEND),
    Answered(GET_BROKER_CONSUME_STATS, "GET_BROKER_CONSUME_STATS", _S, _TIMES),
    Answered(320, "SEND_BATCH_MESSAGE", _R),
    Answered(QUERY_CONSUME_QUEUE, "QUERY_CONSUME_QUEUE", _S, "A few entries, with offsets in the old broker's log."),
    Answered(GET_ALL_PRODUCER_INFO, "GET_ALL_PRODUCER_INFO", _S, _OWN),
    Answered(QUERY_TOPICS_BY_CONSUMER, "QUERY_TOPICS_BY_CONSUMER", _S),
    Answered(GET_TOPIC_CONFIG, "GET_TOPIC_CONFIG", _S),
    Answered(GET_SUBSCRIPTIONGROUP_CONFIG, "GET_SUBSCRIPTIONGROUP_CONFIG", _S),
    Answered(LITE_PULL_MESSAGE, "LITE_PULL_MESSAGE", _S, _HELD),
    Answered(370, "RECALL_MESSAGE", _U),
    Answered(QUERY_ASSIGNMENT, "QUERY_ASSIGNMENT", _S),
    Answered(SET_MESSAGE_REQUEST_MODE, "SET_MESSAGE_REQUEST_MODE", _S),
    Answered(POP_MESSAGE, "POP_MESSAGE", _S, _HELD),
    Answered(ACK_MESSAGE, "ACK_MESSAGE", _S, _ACK),
    Answered(200_052, "PEEK_MESSAGE", _U),
    Answered(CHANGE_MESSAGE_INVISIBLETIME, "CHANGE_MESSAGE_INVISIBLETIME", _S),
    Answered(NOTIFICATION, "NOTIFICATION", _S, _HELD),
    Answered(POLLING_INFO, "POLLING_INFO", _S),
    Answered(BATCH_ACK_MESSAGE, "BATCH_ACK_MESSAGE", _S, _ACK),
)  # fmt: skip

BY_CODE: Final[Mapping[int, Answered]] = {request.code: request for request in REQUESTS}


READ_ONLY: Final = "this broker is mounted read-only from its tier"
REMARK_CHARS_MAX: Final = 1000
"""Of a refusal: it may repeat what a client said, and that may fill a frame."""


class RefusalError(Exception):
    """A request that is answered with a code other than ``SUCCESS``."""

    def __init__(self, code: Code, remark: str, fields: Mapping[str, str] | None = None) -> None:
        """Say why."""
        remark = remark[:REMARK_CHARS_MAX]
        super().__init__(remark)
        self.code = code
        self.remark = remark  # why, for people
        self.fields = fields or {}  # more for the client


# -- what a request says ----------------------------------------------------------------------------
#
# Its named values as numbers, and its body as JSON; or a refusal, as a broker refuses.


LONG_MAX: Final = (1 << 63) - 1
_DIGITS_MAX = len(str(-LONG_MAX))
NAME_CHARS_MAX: Final = 255
"""Of a topic, a group or a client's id."""


def text(request: Command, name: str, otherwise: str | None = None) -> str:
    """A value."""
    found = request.fields.get(name, otherwise)
    if found is None:
        raise RefusalError(Code.SYSTEM_ERROR, f"the request has no {name}")
    return found


def name(request: Command, field: str) -> str:
    """A name that must be there."""
    return checked_name(text(request, field), field)


def checked_name(found: object, what: str) -> str:
    """The name itself."""
    if not isinstance(found, str) or not 0 < len(found) <= NAME_CHARS_MAX:
        raise RefusalError(Code.INVALID_PARAMETER, f"{what} has 1 to {NAME_CHARS_MAX} characters")
    return found


def whole(request: Command, name: str, otherwise: int | None = None) -> int:
    """A whole number of 64 bits."""
    found = request.fields.get(name)
    if found is None:
        if otherwise is not None:
            return otherwise
        found = text(request, name)
    try:
        number = int(found) if len(found) <= _DIGITS_MAX else LONG_MAX + 1
    except ValueError:
        number = LONG_MAX + 1
    if not -LONG_MAX <= number <= LONG_MAX:
        raise RefusalError(Code.SYSTEM_ERROR, f"{name} is not a number of 64 bits: {found[:30]!r}")
    return number


def flag(request: Command, name: str, *, otherwise: bool) -> bool:
    """Yes or no."""
    return text(request, name, str(otherwise)).lower() == "true"


def document(request: Command) -> dict[str, Any]:
    """The body, a JSON object."""
    try:
        found = loads(request.text())
    except JsonError as error:
        raise RefusalError(Code.SYSTEM_ERROR, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RefusalError(Code.SYSTEM_ERROR, "the body is not a JSON object")
    return found


def objects(value: object) -> list[dict[str, Any]]:
    """The objects of a list; what is none is left out."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def as_json(document: object) -> bytes:
    """JSON as it goes over the wire."""
    return json.dumps(document, separators=(",", ":")).encode()
