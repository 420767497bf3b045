"""What consumers send: messages back that they could not do with, to be given out again or kept as dead letters.

Clients send a message back by its place in the log. One that fails at that, and an orderly one that has done with its tries,
sends the message anew to ``%RETRY%<group>`` instead; no other topic takes anything. The answers are a broker's: after the
last try it is a dead letter, and so is what an orderly consumer, one that holds locks, sends.

Of one loop; the tier is read in the pool's threads.
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from tiered.format import properties as names
from tiered.format.record import Record, decode_record, is_v6, offset_msg_id
from tiered.format.remoting import Command
from tiered.format.sysflag import BORN_HOST_V6, INNER_BATCH, NEED_UNWRAP, STORE_HOST_V6
from tiered.local.catalog import DEAD_PREFIX, RETRY_PREFIX
from tiered.mount import protocol
from tiered.mount.protocol import READ_ONLY, Code, RefusalError
from tiered.mount.retries import MAX_TIMES, PLACES_FROM, delayed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from tiered.mount.pulling import Served
    from tiered.mount.retries import RetryLog
    from tiered.mount.server import Exchange, Handler

_V2: Final = {
    "topic": "b",
    "queueId": "e",
    "sysFlag": "f",
    "bornTimestamp": "g",
    "flag": "h",
    "properties": "i",
    "reconsumeTimes": "j",
    "maxReconsumeTimes": "l",
}
"""Fields of SEND_MESSAGE, and how SEND_MESSAGE_V2 calls them."""
_HERE: Final = "0.0.0.0:0"


@dataclass(frozen=True, slots=True)
class SendingBack:
    """Answers of one mount."""

    log: RetryLog | None  # None: nothing is kept, and all is refused
    served: Served
    record_at: Callable[[int, str | None, str], Awaitable[bytes]]
    """Finds the record at a place of the old broker's log; a topic narrows it down, and the group who was given it."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``SubscriptionGroupConfig`` of the groups of a broker that was decommissioned."""

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return {
            protocol.CONSUMER_SEND_MSG_BACK: self.send_back,
            protocol.SEND_MESSAGE: partial(self.send, called={name: name for name in _V2}),
            protocol.SEND_MESSAGE_V2: partial(self.send, called=_V2),
        }

    def _log(self) -> RetryLog:
        if self.log is None:
            raise RefusalError(Code.NO_PERMISSION, READ_ONLY)
        return self.log

    async def send_back(self, asked: Exchange) -> Command:
        """CONSUMER_SEND_MSG_BACK."""
        log, request = self._log(), asked.request
        group, place = protocol.name(request, "group"), protocol.whole(request, "offset")
        level = protocol.whole(request, "delayLevel", 0)
        times = protocol.whole(request, "maxReconsumeTimes", self._max_times(group))
        config = self.configs.get(group, {})
        if int(config.get("retryQueueNums", 1)) <= 0:
            return Command(Code.SUCCESS)  # as the group was set up: what it refuses is not kept
        record = await self._find(log, group, place, request.fields.get("originTopic"))
        await log.send_back(group, record, level=level, max_times=times)
        return Command(Code.SUCCESS)

    def _max_times(self, group: str) -> int:
        return int(self.configs.get(group, {}).get("retryMaxTimes", MAX_TIMES))

    async def _find(self, log: RetryLog, group: str, place: int, topic: str | None) -> Record:
        """The message at a place of the old broker's log, or of ours. Of one that was retried the first topic is named."""
        if place >= PLACES_FROM:
            found = await self.served.run(partial(log.record_at, place))
            if found is None:
                raise RefusalError(Code.SYSTEM_ERROR, f"look message by offset failed, {place}")
            return found
        retry = RETRY_PREFIX + group
        try:
            raw = await self.record_at(place, topic, group)
        except RefusalError:
            if topic not in self.served.topics.queues or retry not in self.served.topics.queues:
                raise
            raw = await self.record_at(place, retry, group)
        return decode_record(raw)

    async def send(self, asked: Exchange, *, called: Mapping[str, str]) -> Command:
        """SEND_MESSAGE and SEND_MESSAGE_V2, to a group's retry topic; whatever else is sent is refused."""
        log, request = self._log(), asked.request
        topic = protocol.name(request, called["topic"])
        group = topic.removeprefix(RETRY_PREFIX)
        if group == topic or topic not in self.served.topics.queues:
            raise RefusalError(Code.NO_PERMISSION, READ_ONLY)
        record = self._made(asked, called)
        times = protocol.whole(request, called["maxReconsumeTimes"], self._max_times(group))
        said = record.properties
        level = _number(said.get(names.DELAY))
        if record.reconsume_times > times or self.served.locks.has_any(group):
            record, level = replace(record, topic=DEAD_PREFIX + group), 0
        made = await log.put(delayed(record, said, level))
        told = {
            "msgId": offset_msg_id(made.store_host, made.physical_offset),
            "queueId": str(made.queue_id),
            "queueOffset": str(made.queue_offset),
        }
        return Command(Code.SUCCESS, fields=told)

    def _made(self, asked: Exchange, called: Mapping[str, str]) -> Record:
        """The record that a client's message becomes, but for its place."""
        request = asked.request
        number = {
            name: protocol.whole(request, called[name], 0)
            for name in ("sysFlag", "bornTimestamp", "flag", "reconsumeTimes")
        }
        body = request.text()
        born, said = _host(asked.connection.peer), request.fields.get(called["properties"], "")
        flags = number["sysFlag"] & ~(BORN_HOST_V6 | STORE_HOST_V6 | INNER_BATCH | NEED_UNWRAP)
        return Record(
            size=0,
            version=1,
            body_crc=0,
            queue_id=0,
            flag=number["flag"],
            queue_offset=0,
            physical_offset=0,
            sys_flag=flags | (BORN_HOST_V6 if is_v6(born) else 0),
            born_timestamp_ms=number["bornTimestamp"],
            born_host=born,
            store_timestamp_ms=self.served.clock.now_ms(),
            store_host=_HERE,
            reconsume_times=number["reconsumeTimes"],
            prepared_transaction_offset=0,
            body=body,
            topic=protocol.name(request, called["topic"]),
            properties_raw=said.encode("utf-8", "surrogatepass"),
        )


def _number(text: str | None) -> int:
    """A delay level; what is none is 0."""
    return int(text) if text and text.isascii() and text.isdigit() else 0


def _host(peer: str) -> str:
    """A client's address as records have it."""
    try:
        offset_msg_id(peer, 0)
    except ValueError:
        return _HERE
    return peer
