"""What is answered to each request but a pull. One method a request.

``Answers`` has offsets, sessions, names and the broker itself; ``Queries`` has messages by key, and what ``mqadmin`` and the
dashboard ask of topics and groups. Times of messages cost a read for each queue that has any. Where the protocol wants a
queue as a key of a map, it stands there as an object, as Java's clients write and read it.

Of one loop. What may ask the tier runs in the pool's threads; all else is answered at once from memory.
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from backends.lazy_dataclass import dataclass
from fetcher.statuses import TIME_MAX, GetStatus, KeyQuery
from tiered import __version__
from tiered.errors import StoreUnavailableError
from tiered.format.record import body_crc, encode_record, record_bytes
from tiered.format.remoting import VERSION, Command
from tiered.model import Boundary, MessageQueue
from tiered.mount import name_servers, protocol
from tiered.mount.name_servers import READ
from tiered.mount.protocol import Code, RefusalError, as_json
from tiered.mount.pulling import make_filter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from fetcher.message_store import TieredMessageStore
    from fetcher.statuses import GetResult
    from tiered.clock import Clock
    from tiered.format.record import Record
    from tiered.mount.consumers import Queue
    from tiered.mount.name_servers import Identity
    from tiered.mount.pulling import Puller, Served
    from tiered.mount.server import Exchange, Handler

_NOTHING: Final = (
    *("sendThreadPoolQueueSize", "pullThreadPoolQueueSize", "queryThreadPoolQueueSize"),
    *("ackThreadPoolQueueSize", "ackThreadPoolQueueHeadWaitTimeMills"),
    *("sendThreadPoolQueueHeadWaitTimeMills",),
    *("pullThreadPoolQueueHeadWaitTimeMills", "queryThreadPoolQueueHeadWaitTimeMills"),
    *("pageCacheLockTimeMills", "commitLogDiskRatio", "timerReadBehind", "timerOffsetBehind"),
    *("timerCongestNum", "timerEnqueueTps", "timerDequeueTps", "msgPutTotalYesterdayMorning"),
    *("msgPutTotalTodayMorning", "msgPutTotalTodayNow", "msgGetTotalYesterdayMorning"),
    *("msgGetTotalTodayMorning", "msgGetTotalTodayNow", "dispatchBehindBytes"),
)
"""Numbers of a broker's that mean nothing here, and without which ``mqadmin`` fails."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one mount."""

    served: Served
    identity: Identity  # as what we are known
    puller: Puller
    began_ms: int  # when the mount began

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return {
            protocol.PULL_MESSAGE: self.puller.pull,
            protocol.LITE_PULL_MESSAGE: self.puller.pull,
            protocol.QUERY_CONSUMER_OFFSET: self.query_offset,
            protocol.UPDATE_CONSUMER_OFFSET: self.update_offset,
            protocol.SEARCH_OFFSET_BY_TIMESTAMP: self.search_offset,
            protocol.GET_MAX_OFFSET: self.max_offset,
            protocol.GET_MIN_OFFSET: self.min_offset,
            protocol.GET_EARLIEST_MSG_STORETIME: self.earliest_time,
            protocol.HEART_BEAT: self.heartbeat,
            protocol.UNREGISTER_CLIENT: self.unregister_client,
            protocol.CHECK_CLIENT_CONFIG: self.check_client,
            protocol.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            protocol.LOCK_BATCH_MQ: self.lock,
            protocol.UNLOCK_BATCH_MQ: self.unlock,
            protocol.GET_ALL_TOPIC_CONFIG: self.topic_configs,
            protocol.GET_BROKER_CONFIG: self.broker_config,
            protocol.GET_BROKER_RUNTIME_INFO: self.runtime_info,
            protocol.GET_ROUTEINFO_BY_TOPIC: self.route,
            protocol.GET_BROKER_CLUSTER_INFO: self.cluster,
            protocol.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self.topic_list,
            protocol.GET_TOPICS_BY_CLUSTER: self.topics_of_cluster,
            protocol.GET_SYSTEM_TOPIC_LIST_FROM_NS: self.system_topics,
            protocol.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: lambda _asked: _topic_list(()),
        }

    # -- offsets ----------------------------------------------------------------------------------

    def query_offset(self, asked: Exchange) -> Command:
        """QUERY_CONSUMER_OFFSET; a group that has none begins where it is configured to."""
        group = protocol.name(asked.request, "consumerGroup")
        topic, queue_id = self._queue(asked.request)
        found = self.served.offsets.get(group, topic, queue_id)
        if found is None:
            raise RefusalError(
                Code.QUERY_NOT_FOUND,
                "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first",
            )
        return _offset(found)

    def update_offset(self, asked: Exchange) -> Command:
        """UPDATE_CONSUMER_OFFSET."""
        group = protocol.name(asked.request, "consumerGroup")
        topic, queue_id = self._queue(asked.request)
        self.served.topics.require(topic, queue_id)
        offset = protocol.whole(asked.request, "commitOffset")
        self.served.offsets.commit(group, topic, queue_id, offset)
        return Command(Code.SUCCESS)

    def max_offset(self, asked: Exchange) -> Command:
        """GET_MAX_OFFSET; 0 of a queue that has no messages, as a broker has it."""
        return _offset(max(self.served.store.max_offset(*self._queue(asked.request)), 0))

    def min_offset(self, asked: Exchange) -> Command:
        """GET_MIN_OFFSET; likewise."""
        return _offset(max(self.served.store.min_offset(*self._queue(asked.request)), 0))

    async def earliest_time(self, asked: Exchange) -> Command:
        """GET_EARLIEST_MSG_STORETIME; -1 without messages."""
        look = partial(self.served.store.earliest_time_ms, *self._queue(asked.request))
        found = await self.served.run(look)  # of what was sent back it is read
        return Command(Code.SUCCESS, fields={"timestamp": str(-1 if found is None else found)})

    def search_offset(self, asked: Exchange) -> Command | Coroutine[None, None, Command]:
        """SEARCH_OFFSET_BY_TIMESTAMP."""
        topic, queue_id = self._queue(asked.request)
        time_ms = protocol.whole(asked.request, "timestamp")
        is_upper = protocol.text(asked.request, "boundaryType", "LOWER").upper() == "UPPER"
        boundary = Boundary.UPPER if is_upper else Boundary.LOWER
        if self.served.store.bounds(topic, queue_id) is None:
            return _offset(0)
        return self._search(
            partial(self.served.store.offset_by_time, topic, queue_id, time_ms, boundary)
        )

    async def _search(self, search: partial[Any]) -> Command:
        return _offset(await self.served.run(search))

    @staticmethod
    def _queue(request: Command) -> tuple[str, int]:
        return protocol.name(request, "topic"), protocol.whole(request, "queueId")

    # -- sessions ---------------------------------------------------------------------------------

    def heartbeat(self, asked: Exchange) -> Command:
        """HEART_BEAT."""
        self.served.consumers.heartbeat(asked.connection, asked.request)
        return Command(Code.SUCCESS)

    def unregister_client(self, asked: Exchange) -> Command:
        """UNREGISTER_CLIENT."""
        group = asked.request.fields.get("consumerGroup")
        if group:
            self.served.consumers.leave(protocol.name(asked.request, "clientID"), group)
        return Command(Code.SUCCESS)

    @staticmethod
    def check_client(asked: Exchange) -> Command:
        """CHECK_CLIENT_CONFIG: whether its filter can be compiled."""
        said = protocol.document(asked.request).get("subscriptionData")
        if isinstance(said, dict):
            make_filter(str(said.get("subString") or "*"), str(said.get("expressionType") or "TAG"))
        return Command(Code.SUCCESS)

    def consumer_list(self, asked: Exchange) -> Command:
        """GET_CONSUMER_LIST_BY_GROUP."""
        found = self.served.consumers.clients(protocol.name(asked.request, "consumerGroup"))
        return _document({"consumerIdList": found})

    def lock(self, asked: Exchange) -> Command:
        """LOCK_BATCH_MQ."""
        group, client, queues = _locking(asked.request)
        locked = self.served.locks.lock(group, client, queues)
        return _document({"lockOKMQSet": [_named(queue) for queue in locked]})

    def unlock(self, asked: Exchange) -> Command:
        """UNLOCK_BATCH_MQ."""
        self.served.locks.unlock(*_locking(asked.request))
        return Command(Code.SUCCESS)

    # -- names ------------------------------------------------------------------------------------

    def topic_configs(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_ALL_TOPIC_CONFIG."""
        wrapper = {
            **self.served.topics.wrapper(),
            "mappingDataVersion": self.served.topics.data_version(),
            "topicQueueMappingDetailMap": {},
        }
        return _document(wrapper, {"totalTopicNum": str(len(self.served.topics.queues))})

    def route(self, asked: Exchange) -> Command:
        """GET_ROUTEINFO_BY_TOPIC, as a name server answers it."""
        topic = protocol.name(asked.request, "topic")
        return _document(name_servers.route(self.identity, self.served.topics, topic))

    def cluster(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_BROKER_CLUSTER_INFO, as a name server answers it."""
        return _document(name_servers.cluster(self.identity))

    def topic_list(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_ALL_TOPIC_LIST_FROM_NAMESERVER, as a name server answers it."""
        return _topic_list(self.served.topics.queues)

    def topics_of_cluster(self, asked: Exchange) -> Command:
        """GET_TOPICS_BY_CLUSTER, likewise."""
        is_own = protocol.name(asked.request, "cluster") == self.identity.cluster
        return _topic_list(self.served.topics.queues if is_own else ())

    def system_topics(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_SYSTEM_TOPIC_LIST_FROM_NS, likewise: a name server counts the names of clusters and brokers among them."""
        named = (self.identity.cluster, self.identity.broker)
        return _topic_list(named, self.identity.address)

    # -- the broker itself ------------------------------------------------------------------------

    def broker_config(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_BROKER_CONFIG."""
        said = {
            "brokerName": self.identity.broker,
            "brokerClusterName": self.identity.cluster,
            "brokerId": self.identity.broker_id,
            "brokerPermission": READ,
            "listenPort": self.identity.address.rpartition(":")[2],
            "brokerIP1": self.identity.address.rpartition(":")[0].strip("[]"),
            "enablePropertyFilter": "true",
            "longPollingEnable": "true",
            "autoCreateTopicEnable": "false",
            "autoCreateSubscriptionGroup": "true",
            **_OF_ANY_BROKER,
        }
        if self.identity.broker_id != name_servers.MASTER:
            said |= {"brokerRole": "SLAVE", "slaveReadEnable": "true"}
        body = "".join(f"{name}={value}\n" for name, value in said.items()).encode()
        version = as_json(self.served.topics.data_version()).decode()
        return Command(Code.SUCCESS, fields={"version": version}, body=(body,))

    def runtime_info(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_BROKER_RUNTIME_INFO."""
        table = dict.fromkeys(_NOTHING, "0")
        table |= {
            "brokerVersionDesc": f"tiered {__version__}, read-only {self.identity.kind}",
            "brokerVersion": str(VERSION),
            "brokerActive": "true",
            "bootTimestamp": str(self.began_ms),
            "runtime": f"{(self.served.clock.now_ms() - self.began_ms) // 1000} seconds",
            "earliestMessageTimeStamp": "-1",
            "putTps": "0.0 0.0 0.0",
            "getTransferredTps": "0.0 0.0 0.0",
            "getTransferedTps": "0.0 0.0 0.0",  # as brokers and tools before 5.0 write it
            "getFoundTps": "0.0 0.0 0.0",
            "getMissTps": "0.0 0.0 0.0",
            "getTotalTps": "0.0 0.0 0.0",
        }
        return _document({"table": table})


_OF_ANY_BROKER: Final = {
    "brokerRole": "ASYNC_MASTER",
    "flushDiskType": "ASYNC_FLUSH",
    "fileReservedTime": "0",
    "filterServerNums": "0",
    "maxMessageSize": str(4 << 20),
    "messageDelayLevel": "",
    "msgTraceTopicName": "RMQ_SYS_TRACE_TOPIC",
    "slaveReadEnable": "false",
    "traceOn": "false",
    "traceTopicEnable": "false",
    "useTLS": "false",
}
"""Settings that mean nothing here, and without which ``exportConfigs`` of tools before 5.0 ends with an exception."""


def _offset(offset: int) -> Command:
    return Command(Code.SUCCESS, fields={"offset": str(int(offset))})


def _document(body: object, said: Mapping[str, str] | None = None) -> Command:
    return _body(as_json(body), said)


def _topic_list(topics: Iterable[str], broker_address: str | None = None) -> Command:
    return _document({"topicList": sorted(topics), "brokerAddr": broker_address})


def _named(queue: Queue) -> dict[str, Any]:
    broker, topic, queue_id = queue
    return {"brokerName": broker, "queueId": queue_id, "topic": topic}


def _locking(request: Command) -> tuple[str, str, list[Queue]]:
    """Group, client and queues of a request about locks."""
    said = protocol.document(request)
    queues: list[Queue] = []
    for one in protocol.objects(said.get("mqSet")):
        broker, queue_id = one.get("brokerName") or "", one.get("queueId")
        if broker:
            broker = protocol.checked_name(broker, "brokerName")
        if not isinstance(queue_id, int):
            raise RefusalError(Code.INVALID_PARAMETER, "a queue without a queueId")
        queues.append((broker, protocol.checked_name(one.get("topic"), "topic"), queue_id))
    group = protocol.checked_name(said.get("consumerGroup"), "consumerGroup")
    return group, protocol.checked_name(said.get("clientId"), "clientId"), queues


FOUND_MAX: Final = 64
FOUND_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of one answer; it holds one message, however large it is."""
QUERY_S: Final = 8.0
"""Deadline of a request that reads the tier, however many queues it asks for; clients wait for 10 s."""
_EXPIRED: Final = frozenset({GetStatus.MESSAGE_WAS_REMOVING, GetStatus.OFFSET_TOO_SMALL})
VIEWED_QUEUES_MAX: Final = 1024
NEAR: Final = 16
"""How far behind where a group is its message is looked for at first."""
ITEMS_MAX: Final = 1024
"""Of a queue, in one answer."""
_GROUP: Final = {
    "consumeEnable": True,
    "consumeFromMinEnable": True,
    "consumeBroadcastEnable": True,
    "consumeMessageOrderly": False,
    "retryQueueNums": 0,
    "retryMaxTimes": 16,
    "brokerId": 0,
    "whichBrokerWhenConsumeSlowly": 1,
    "notifyConsumerIdsChangedEnable": True,
    "groupSysFlag": 0,
    "consumeTimeoutMinute": 15,
}


@dataclass(frozen=True, slots=True)
class Queries:
    """Answers of one mount."""

    served: Served
    identity: Identity  # as what we are known
    group_configs_known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``SubscriptionGroupConfig`` of the groups of a broker that was decommissioned."""

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return {
            protocol.QUERY_MESSAGE: self.query_message,
            protocol.VIEW_MESSAGE_BY_ID: self.view_message,
            protocol.QUERY_CONSUME_QUEUE: self.consume_queue,
            protocol.RESET_CONSUMER_OFFSET: self.reset_offsets,
            protocol.GET_TOPIC_STATS_INFO: self.topic_stats,
            protocol.GET_CONSUME_STATS: self.consume_stats,
            protocol.GET_BROKER_CONSUME_STATS: self.all_consume_stats,
            protocol.GET_ALL_PRODUCER_INFO: lambda _asked: _body(b'{"data":{}}'),
            protocol.GET_CONSUMER_CONNECTION_LIST: self.consumer_connections,
            protocol.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            protocol.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            protocol.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.group_configs,
            protocol.GET_TOPIC_CONFIG: self.topic_config,
            protocol.GET_SUBSCRIPTIONGROUP_CONFIG: self.group_config,
        }

    # -- messages ---------------------------------------------------------------------------------

    async def query_message(self, asked: Exchange) -> Command:
        """QUERY_MESSAGE: by one of a message's keys, or by its unique id.

        Of an id the beginning is not kept to: clients ask for what is three days old at most, or for a time that they work
        out from the id, which is a month's day without its month. What a mount has is older, and the id names one message.
        """
        request = asked.request
        is_by_id = protocol.flag(request, "_UNIQUE_KEY_QUERY", otherwise=False)
        until_ms = protocol.whole(request, "endTimestamp", TIME_MAX)
        wanted = KeyQuery(
            topic=protocol.name(request, "topic"),
            key=protocol.text(request, "key"),
            from_ms=0 if is_by_id else protocol.whole(request, "beginTimestamp", 0),
            until_ms=min(until_ms, TIME_MAX - 1) + 1,
            count=min(max(protocol.whole(request, "maxNum", FOUND_MAX), 1), FOUND_MAX),
        )
        await asked.make_room(FOUND_BYTES_MAX)
        found = await self.served.run(lambda: self.served.store.query(wanted, timeout_s=QUERY_S))
        body = _fitting(encoded(hit.message) for hit in found.hits)
        asked.resize(sum(map(len, body)))
        if not body:
            why = f": {found.errors[0]}" if found.errors else ""
            if not found.is_complete:
                raise RefusalError(Code.SYSTEM_ERROR, f"not everything could be searched{why}")
            raise RefusalError(
                Code.QUERY_NOT_FOUND, "can not find message, maybe time range not correct"
            )
        newest_ms = str(max(hit.store_ms for hit in found.hits))
        told = {"indexLastUpdateTimestamp": newest_ms, "indexLastUpdatePhyoffset": "0"}
        remark = "" if found.is_complete else "not everything could be searched"
        return Command(Code.SUCCESS, remark=remark, fields=told, body=body)

    async def view_message(self, asked: Exchange) -> Command:
        """VIEW_MESSAGE_BY_ID."""
        request = asked.request
        place = protocol.whole(request, "offset")
        await asked.make_room(FOUND_BYTES_MAX)
        record = await self.record_at(place, request.fields.get("topic"))
        asked.resize(len(record))
        return _body(record)

    async def record_at(self, place: int, topic: str | None, group: str = "") -> bytes:
        """The record that stood at a place of the broker's log, which is the second half of an offset id.

        Messages of a queue stand there in the queue's order, so each queue is bisected, one after the other: some twenty
        reads each, of which most fall into what was read before.

        Args:
            topic: Whose, where the client says so (those of 5.x do); else all are searched.
            group: Who was given it: it is looked for near where the group is, which was just read.

        Raises:
            RefusalError: There is none, or there are too many queues to search.
        """
        names = [topic] if topic else list(self.served.topics.queues)
        queues = [
            MessageQueue(name, number)
            for name in names
            for number in range(self.served.topics.queues.get(name, 0))
            if self.served.store.bounds(name, number) is not None
        ]
        if len(queues) > VIEWED_QUEUES_MAX:
            raise RefusalError(
                Code.SYSTEM_ERROR,
                f"more than {VIEWED_QUEUES_MAX} queues to search: name the topic, or ask by unique id",
            )
        until_s = self.served.clock.monotonic_s() + QUERY_S
        for queue in queues:
            near = self.served.offsets.get(group, *queue) if group else None
            found = await self.served.run(partial(self._bisect, queue, place, until_s, near))
            if found is not None:
                return bytes(found)
        raise RefusalError(Code.SYSTEM_ERROR, f"can not find message by the offset, {place}")

    def _bisect(
        self, queue: MessageQueue, place: int, until_s: float, near: int | None = None
    ) -> memoryview | None:
        """The record of a queue at a place of the log; holes are passed over. ``near``: it is likely there or behind."""
        low, high = self.served.ends(*queue)
        read = partial(self.served.store.message_at, *queue)
        at, step = (-1, 0) if near is None else (near, NEAR)
        while low < high:
            # From where it is likely in growing steps, as long as it lies behind these; then by halves.
            middle, at = at if low <= at < high else (low + high) // 2, -1
            found = first_message(read, middle, high, self.served.clock, until_s)
            if found.status in {GetStatus.TRY_AGAIN, GetStatus.OFFSET_FOUND_NULL}:
                raise RefusalError(
                    Code.SYSTEM_ERROR, f"{queue} could not be searched: {found.error}"
                )
            if found.status in _EXPIRED:
                low = max(int(found.next_begin), middle + 1)
                continue
            rows = [(n, raw) for chunk in found.chunks for n, raw in chunk.messages()]
            if not rows or rows[0][0] >= high:
                high = middle  # nothing but holes from here on
                continue
            offset, raw = rows[0]
            there = int(found.chunks[0].records.physical_offsets[found.chunks[0].items[0]])
            if there == place:
                return raw
            if there < place:
                low = int(offset) + 1
                at, step = (low + step, 2 * step) if step else (-1, 0)
            else:
                high, step = middle, 0
        return None

    async def consume_queue(self, asked: Exchange) -> Command:
        """QUERY_CONSUME_QUEUE: some items of a queue, with their places in the broker's log."""
        request = asked.request
        topic, queue_id = protocol.name(request, "topic"), protocol.whole(request, "queueId")
        start, count = protocol.whole(request, "index", 0), protocol.whole(request, "count", 0)
        self.served.topics.require(topic, queue_id)
        low, end = self.served.ends(topic, queue_id)
        count = min(max(count, 0), ITEMS_MAX)
        rows: list[dict[str, Any]] = []
        if count and low <= start < end:
            await asked.make_room(FOUND_BYTES_MAX)
            rows = await self.served.run(
                partial(self._items, MessageQueue(topic, queue_id), start, count)
            )
        group = request.fields.get("consumerGroup")
        told: dict[str, Any] = {"queueData": rows, "maxQueueIndex": end, "minQueueIndex": low}
        if group:
            online = self.served.consumers.groups.get(group)
            wanted = online.subscriptions.get(topic) if online is not None else None
            told["subscriptionData"] = wanted.document if wanted is not None else None
            told["filterData"] = "" if wanted is not None else f"{group}@{topic} is not online!"
        return _document(told)

    def _items(self, queue: MessageQueue, start: int, count: int) -> list[dict[str, Any]]:
        get = self.served.store.get_message
        read = partial(get, "", *queue, max_count=count, max_bytes=FOUND_BYTES_MAX)
        until_s = self.served.clock.monotonic_s() + QUERY_S
        found = first_message(read, start, None, self.served.clock, until_s)
        if found.status is GetStatus.TRY_AGAIN:
            raise RefusalError(Code.SYSTEM_ERROR, f"{queue} cannot be read: {found.error}")
        return [
            {
                "physicOffset": int(chunk.records.physical_offsets[item]),
                "physicSize": int(chunk.records.sizes[item]),
                "tagsCode": int(chunk.records.tag_codes[item]),
            }
            for chunk in found.chunks
            for item in chunk.items.tolist()
        ]

    # -- topics -----------------------------------------------------------------------------------

    async def topic_stats(self, asked: Exchange) -> Command:
        """GET_TOPIC_STATS_INFO."""
        topic = protocol.name(asked.request, "topic")
        queues = [
            MessageQueue(topic, number) for number in range(self.served.topics.require(topic))
        ]
        times = Times(self.served.store, self.served.clock)
        found = await self.served.run(lambda: [times.before(queue, None) for queue in queues])
        rows = [
            (
                queue,
                {
                    "minOffset": max(self.served.store.min_offset(topic, queue.queue_id), 0),
                    "maxOffset": max(self.served.store.max_offset(topic, queue.queue_id), 0),
                    "lastUpdateTimestamp": time_ms,
                },
            )
            for queue, time_ms in zip(queues, found, strict=True)
        ]
        body = b'{"offsetTable":%b,"topicPutTps":0.0}' % self._by_queue(rows)
        return _body(body, remark=times.remark)

    def topic_config(self, asked: Exchange) -> Command:
        """GET_TOPIC_CONFIG."""
        topic = protocol.name(asked.request, "topic")
        return _document(self.served.topics.config(topic))

    def groups_of_topic(self, asked: Exchange) -> Command:
        """QUERY_TOPIC_CONSUME_BY_WHO."""
        topic = protocol.name(asked.request, "topic")
        online = [
            name
            for name, group in self.served.consumers.groups.items()
            if topic in group.subscriptions
        ]
        return _document({"groupList": sorted({*online, *self.served.offsets.groups(topic)})})

    # -- groups -----------------------------------------------------------------------------------

    async def consume_stats(self, asked: Exchange) -> Command:
        """GET_CONSUME_STATS: how far a group is, queue by queue."""
        group = protocol.name(asked.request, "consumerGroup")
        topic = asked.request.fields.get("topic")
        times = Times(self.served.store, self.served.clock)
        rows = await self._progress(group, [topic] if topic else self._topics_of(group), times)
        body = b'{"consumeTps":0.0,"offsetTable":%b}' % self._by_queue(rows)
        return _body(body, remark=times.remark)

    async def all_consume_stats(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_BROKER_CONSUME_STATS: the same of all groups and topics."""
        told: list[bytes] = []
        times = Times(self.served.store, self.served.clock)
        behind = 0
        for group in self._groups():
            stats: list[bytes] = []
            for topic in self._topics_of(group):
                rows = await self._progress(group, [topic], times)
                behind += sum(row["brokerOffset"] - row["consumerOffset"] for _, row in rows)
                stats.append(b'{"consumeTps":0.0,"offsetTable":%b}' % self._by_queue(rows))
            told.append(b"{%b:[%b]}" % (as_json(group), b",".join(stats)))
        return _body(
            b'{"brokerAddr":%b,"consumeStatsList":[%b],"totalDiff":%d,"totalInflightDiff":0}'
            % (as_json(self.identity.address), b",".join(told), behind),
            remark=times.remark,
        )

    async def _progress(
        self, group: str, names: Iterable[str], times: Times
    ) -> list[tuple[MessageQueue, dict[str, int]]]:
        """Of each queue of the topics how far a group is."""
        queues = [
            MessageQueue(name, number)
            for name in names
            for number in range(self.served.topics.queues.get(name, 0))
        ]
        at = {
            queue: self.served.offsets.get(group, queue.topic, queue.queue_id) or 0
            for queue in queues
        }
        found = await self.served.run(lambda: [times.before(queue, at[queue]) for queue in queues])
        return [
            (
                queue,
                {
                    "brokerOffset": max(
                        self.served.store.max_offset(queue.topic, queue.queue_id), 0
                    ),
                    "consumerOffset": at[queue],
                    "pullOffset": at[queue],
                    "lastTimestamp": time_ms,
                },
            )
            for queue, time_ms in zip(queues, found, strict=True)
        ]

    def consumer_connections(self, asked: Exchange) -> Command:
        """GET_CONSUMER_CONNECTION_LIST."""
        name = protocol.name(asked.request, "consumerGroup")
        group = self.served.consumers.groups.get(name)
        if group is None:
            raise RefusalError(Code.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        members = [
            {
                "clientId": client,
                "clientAddr": member.connection.peer,
                "language": member.language,
                "version": member.version,
            }
            for client, member in group.members.items()
        ]
        told = {
            "connectionSet": members,
            "subscriptionTable": {t: one.document for t, one in group.subscriptions.items()},
            "consumeType": group.consume_type,
            "messageModel": group.model,
            "consumeFromWhere": group.from_where,
        }
        return _document(told)

    def topics_of_group(self, asked: Exchange) -> Command:
        """QUERY_TOPICS_BY_CONSUMER."""
        names = self._topics_of(protocol.name(asked.request, "group"))
        return _document({"topicList": sorted(names), "brokerAddr": self.identity.address})

    def group_configs(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""
        table = {name: self._group_config(name) for name in self._groups()}
        told = {
            "dataVersion": self.served.topics.data_version(),
            "forbiddenTable": {},
            "subscriptionGroupTable": table,
        }
        return _document(told, {"totalGroupNum": str(len(table))})

    def group_config(self, asked: Exchange) -> Command:
        """GET_SUBSCRIPTIONGROUP_CONFIG. Any group may consume, as at a broker that makes those which it is asked for."""
        name = protocol.name(asked.request, "group")
        return _document(self._group_config(name))

    async def reset_offsets(self, asked: Exchange) -> Command:
        """INVOKE_BROKER_TO_RESET_OFFSET: a group goes on elsewhere, by time or at an offset of one queue."""
        request = asked.request
        group, topic = protocol.name(request, "group"), protocol.name(request, "topic")
        queue_id = protocol.whole(request, "queueId", -1)
        count = self.served.topics.require(topic, queue_id if queue_id >= 0 else None)
        if group not in self._groups():
            raise RefusalError(Code.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} does not exist")
        numbers = range(count) if queue_id < 0 else [queue_id]
        queues = [MessageQueue(topic, number) for number in numbers]
        offset = protocol.whole(request, "offset", -1)
        if queue_id >= 0 and offset >= 0:
            low, end = self.served.ends(topic, queue_id)
            if not low <= offset <= end:
                raise RefusalError(
                    Code.SYSTEM_ERROR,
                    f"Target offset {offset} not in consume queue range [{low}-{end}]",
                )
            found = [offset]
        else:
            time_ms = protocol.whole(request, "timestamp", -1)
            until_s = self.served.clock.monotonic_s() + QUERY_S
            find = partial(self._at_time, time_ms=time_ms, until_s=until_s)
            found = await self.served.run(lambda: [find(queue) for queue in queues])
        for queue, to in zip(queues, found, strict=True):
            self.served.offsets.reset(group, *queue, to)
        rows = self._by_queue(zip(queues, found, strict=True))
        return _body(b'{"offsetTable":%b}' % rows)

    def _at_time(self, queue: MessageQueue, time_ms: int, until_s: float) -> int:
        """Where a queue begins from a time on; below 0: its end."""
        bounds = self.served.store.bounds(*queue)
        if bounds is None:
            return 0
        if time_ms < 0:
            return int(bounds.end)
        left_s = max(until_s - self.served.clock.monotonic_s(), 0.0)
        return int(self.served.store.offset_by_time(*queue, time_ms, timeout_s=left_s))

    # -- together ---------------------------------------------------------------------------------

    def _groups(self) -> list[str]:
        known = (
            self.served.consumers.groups,
            self.served.offsets.all_groups(),
            self.group_configs_known,
        )
        return sorted(set().union(*known))

    def _group_config(self, name: str) -> dict[str, Any]:
        return {"groupName": name, **_GROUP, **self.group_configs_known.get(name, {})}

    def _topics_of(self, group: str) -> list[str]:
        online = self.served.consumers.groups.get(group)
        subscribed = online.subscriptions if online is not None else {}
        return sorted({*subscribed, *self.served.offsets.topics(group)})

    def _by_queue(self, rows: Iterable[tuple[MessageQueue, object]]) -> bytes:
        """A map whose keys are queues."""
        broker = self.identity.broker
        pairs = (
            b"%b:%b" % (as_json(_named((broker, *queue))), as_json(row)) for queue, row in rows
        )
        return b"{%b}" % b",".join(pairs)


class Times:
    """Store times that one request tells of many queues, read until its deadline, each place once. For one thread at a time.

    Offsets come from memory and are always right; a time that could not be read in time is 0, as of a queue without
    messages, and ``remark`` says of how many.
    """

    def __init__(self, store: TieredMessageStore, clock: Clock) -> None:
        """The deadline begins to run."""
        self._store = store
        self._clock = clock
        self._until_s = clock.monotonic_s() + QUERY_S
        self._known: dict[tuple[MessageQueue, int], int] = {}
        self._missing = 0

    @property
    def remark(self) -> str:
        """What is missing, for people; empty: nothing."""
        if not self._missing:
            return ""
        return (
            f"times of {self._missing} messages could not be read within {QUERY_S:.0f} s, and are 0"
        )

    def before(self, queue: MessageQueue, offset: int | None) -> int:
        """Store time of the message before a queue offset (None: of the last one); 0: there is none, or it is not known."""
        bounds = self._store.bounds(*queue)
        if bounds is None:
            return 0
        at = int(bounds.end if offset is None else min(offset, bounds.end)) - 1
        if at < bounds.min:
            return 0
        if (queue, at) not in self._known:
            self._known[queue, at] = self._read(queue, at)
        return self._known[queue, at]

    def _read(self, queue: MessageQueue, at: int) -> int:
        if self._clock.monotonic_s() < self._until_s:
            read = partial(self._store.message_at, *queue)
            found = first_message(read, at, None, self._clock, self._until_s)
            for chunk in found.chunks:
                return int(chunk.records.store_timestamps_ms[chunk.items[0]])
            if found.status is not GetStatus.TRY_AGAIN:
                return 0  # nothing but holes from there on, or expired meanwhile
        self._missing += 1
        return 0


def first_message(
    read: Callable[..., GetResult], start: int, end: int | None, clock: Clock, until_s: float
) -> GetResult:
    """Read on to the first message through what holds none, of which one read passes over only so much.

    Args:
        end: Nobody wants what lies behind; None: the queue's end.

    Returns:
        How the last read ended. ``NO_MATCHED_MESSAGE``: there is none. ``TRY_AGAIN``: also where the time is over before
        that is known.
    """
    at = start
    while True:
        left_s = max(until_s - clock.monotonic_s(), 0.0)
        found = read(at, timeout_s=left_s)
        is_over = found.next_begin >= (found.max_offset if end is None else end)
        if found.status is not GetStatus.NO_MATCHED_MESSAGE or is_over:
            return found
        if not left_s:
            why = StoreUnavailableError(f"not searched in time behind queue offset {at}")
            return replace(found, status=GetStatus.TRY_AGAIN, error=found.error or why)
        at = int(found.next_begin)


def encoded(record: Record) -> bytes:
    """A record as it is stored; an inner message as a record of its own, with a size and a CRC of its own."""
    size = record_bytes(
        body=len(record.body),
        topic=len(record.topic.encode("utf-8", "surrogateescape")),
        props=len(record.properties_raw),
        sys_flag=record.sys_flag,
        version=record.version,
    )
    if size != record.size:
        record = replace(record, size=size, body_crc=body_crc(record.body))
    return encode_record(record)


def _fitting(records: Iterable[bytes]) -> list[bytes]:
    """The first ones, as many as an answer may hold."""
    found: list[bytes] = []
    size = 0
    for record in records:
        size += len(record)
        if found and size > FOUND_BYTES_MAX:
            break
        found.append(record)
    return found


def _body(data: bytes, said: Mapping[str, str] | None = None, *, remark: str = "") -> Command:
    return Command(Code.SUCCESS, remark=remark, fields=said or {}, body=(data,))
