"""Codes of the remoting protocol: what a mount is asked, how it answers each, and how answers are told.

``REQUESTS`` is the one table: the server dispatches by it, and docs/mount-codes.md is made of it. A code that is not in it
is answered with ``REQUEST_CODE_NOT_SUPPORTED``, on which clients fall back or give up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


class Code(IntEnum):
    """How a request ended, by RocketMQ's names."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
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


class Treatment(Enum):
    """What becomes of a kind of request."""

    SERVED = "served"
    """As a broker would."""
    REFUSED = "refused: NO_PERMISSION"
    """It would write. Producers go on with the next broker at once."""
    UNSUPPORTED = "refused: REQUEST_CODE_NOT_SUPPORTED"
    """Clients do without."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A kind of request.

    Attributes:
        code: Its number.
        name: As RocketMQ calls it.
        answer: What becomes of it.
        note: What there is to know of the answer; may be empty.
    """

    code: int
    name: str
    answer: Treatment
    note: str = ""


PULL_MESSAGE: Final = 11
QUERY_MESSAGE: Final = 12
QUERY_CONSUMER_OFFSET: Final = 14
UPDATE_CONSUMER_OFFSET: Final = 15
GET_ALL_TOPIC_CONFIG: Final = 21
GET_BROKER_CONFIG: Final = 26
GET_BROKER_RUNTIME_INFO: Final = 28
SEARCH_OFFSET_BY_TIMESTAMP: Final = 29
GET_MAX_OFFSET: Final = 30
GET_MIN_OFFSET: Final = 31
GET_EARLIEST_MSG_STORETIME: Final = 32
HEART_BEAT: Final = 34
UNREGISTER_CLIENT: Final = 35
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
GET_CONSUME_STATS: Final = 208
QUERY_TOPIC_CONSUME_BY_WHO: Final = 300
QUERY_TOPICS_BY_CONSUMER: Final = 343
GET_TOPIC_CONFIG: Final = 351
GET_SUBSCRIPTIONGROUP_CONFIG: Final = 352
LITE_PULL_MESSAGE: Final = 361

_S, _R, _U = Treatment.SERVED, Treatment.REFUSED, Treatment.UNSUPPORTED
_BACK = "The client sends the message to `%RETRY%<group>` of another broker, or tries again by itself after 5 s."

REQUESTS: Final[tuple[Answered, ...]] = (
    Answered(10, "SEND_MESSAGE", _R),
    Answered(PULL_MESSAGE, "PULL_MESSAGE", _S, "Long polls are held, a bounded number of them."),
    Answered(QUERY_MESSAGE, "QUERY_MESSAGE", _S, "By key or unique id; what is not indexed yet is searched, up to a bound."),
    Answered(QUERY_CONSUMER_OFFSET, "QUERY_CONSUMER_OFFSET", _S),
    Answered(UPDATE_CONSUMER_OFFSET, "UPDATE_CONSUMER_OFFSET", _S, "Kept in the mount's own place."),
    Answered(17, "UPDATE_AND_CREATE_TOPIC", _R),
    Answered(GET_ALL_TOPIC_CONFIG, "GET_ALL_TOPIC_CONFIG", _S, "All with permission read-only."),
    Answered(25, "UPDATE_BROKER_CONFIG", _R),
    Answered(GET_BROKER_CONFIG, "GET_BROKER_CONFIG", _S, "What of it means something here."),
    Answered(GET_BROKER_RUNTIME_INFO, "GET_BROKER_RUNTIME_INFO", _S, "What means something here; other numbers are 0."),
    Answered(SEARCH_OFFSET_BY_TIMESTAMP, "SEARCH_OFFSET_BY_TIMESTAMP", _S),
    Answered(GET_MAX_OFFSET, "GET_MAX_OFFSET", _S),
    Answered(GET_MIN_OFFSET, "GET_MIN_OFFSET", _S),
    Answered(GET_EARLIEST_MSG_STORETIME, "GET_EARLIEST_MSG_STORETIME", _S),
    Answered(33, "VIEW_MESSAGE_BY_ID", _U, "Not yet. Clients dial the address inside the id, which is the old broker's."),
    Answered(HEART_BEAT, "HEART_BEAT", _S),
    Answered(UNREGISTER_CLIENT, "UNREGISTER_CLIENT", _S),
    Answered(36, "CONSUMER_SEND_MSG_BACK", _R, _BACK),
    Answered(37, "END_TRANSACTION", _R),
    Answered(GET_CONSUMER_LIST_BY_GROUP, "GET_CONSUMER_LIST_BY_GROUP", _S),
    Answered(LOCK_BATCH_MQ, "LOCK_BATCH_MQ", _S, "For orderly consumers; a lock lasts 60 s."),
    Answered(UNLOCK_BATCH_MQ, "UNLOCK_BATCH_MQ", _S),
    Answered(CHECK_CLIENT_CONFIG, "CHECK_CLIENT_CONFIG", _S, "Whether a filter can be compiled."),
    Answered(GET_ROUTEINFO_BY_TOPIC, "GET_ROUTEINFO_BY_TOPIC", _S, "A mount is a name server of its own topics."),
    Answered(GET_BROKER_CLUSTER_INFO, "GET_BROKER_CLUSTER_INFO", _S, "Likewise."),
    Answered(200, "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", _R),
    Answered(GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "GET_ALL_SUBSCRIPTIONGROUP_CONFIG", _S, "Of groups that are known here."),
    Answered(GET_TOPIC_STATS_INFO, "GET_TOPIC_STATS_INFO", _S),
    Answered(GET_CONSUMER_CONNECTION_LIST, "GET_CONSUMER_CONNECTION_LIST", _S),
    Answered(204, "GET_PRODUCER_CONNECTION_LIST", _U, "There are no producers."),
    Answered(207, "DELETE_SUBSCRIPTIONGROUP", _R),
    Answered(GET_CONSUME_STATS, "GET_CONSUME_STATS", _S),
    Answered(215, "DELETE_TOPIC_IN_BROKER", _R),
    Answered(222, "INVOKE_BROKER_TO_RESET_OFFSET", _R, "Set offsets with UPDATE_CONSUMER_OFFSET."),
    Answered(QUERY_TOPIC_CONSUME_BY_WHO, "QUERY_TOPIC_CONSUME_BY_WHO", _S),
    Answered(310, "SEND_MESSAGE_V2", _R),
    Answered(320, "SEND_BATCH_MESSAGE", _R),
    Answered(QUERY_TOPICS_BY_CONSUMER, "QUERY_TOPICS_BY_CONSUMER", _S),
    Answered(GET_TOPIC_CONFIG, "GET_TOPIC_CONFIG", _S),
    Answered(GET_SUBSCRIPTIONGROUP_CONFIG, "GET_SUBSCRIPTIONGROUP_CONFIG", _S),
    Answered(LITE_PULL_MESSAGE, "LITE_PULL_MESSAGE", _S, "As PULL_MESSAGE."),
    Answered(400, "QUERY_ASSIGNMENT", _U, "Clients that rebalance by themselves, as is the default, never ask."),
    Answered(200_050, "POP_MESSAGE", _U, "Popping writes; pull instead."),
)  # fmt: skip

BY_CODE: Final[Mapping[int, Answered]] = {request.code: request for request in REQUESTS}


class RefusalError(Exception):
    """A request that is answered with a code other than ``SUCCESS``.

    Attributes:
        code: Which.
        remark: Why, for people.
        fields: More for the client.
    """

    def __init__(self, code: Code, remark: str, fields: Mapping[str, str] | None = None) -> None:
        """Say why."""
        super().__init__(remark)
        self.code = code
        self.remark = remark
        self.fields = fields or {}
