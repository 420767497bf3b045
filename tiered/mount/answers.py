"""What is answered to each request but a pull. One method a request.

``Answers`` has offsets, sessions, names and the broker itself; ``Queries`` has messages by key, and what ``mqadmin`` and the
dashboard ask of topics and groups. Times of messages cost a read for each queue that has any. Where the protocol wants a
queue as a key of a map, it stands there as an object, as Java's clients write and read it.

Of one loop. What may ask the tier runs in the pool's threads; all else is answered at once from memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fetcher.statuses import TIME_MAX, KeyQuery
from tiered import __version__
from tiered.format.record import body_crc, encode_record, record_bytes
from tiered.format.remoting import VERSION, Command
from tiered.model import Boundary, MessageQueue
from tiered.mount import codes, fields, naming
from tiered.mount.codes import Code, RefusalError
from tiered.mount.naming import READ, RETRY, as_json
from tiered.mount.pulling import make_filter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from concurrent.futures import Executor

    from fetcher.message_store import TieredMessageStore
    from tiered.clock import Clock
    from tiered.format.record import Record
    from tiered.mount.consumers import Consumers, Locks, Queue
    from tiered.mount.naming import Identity, MountedTopics
    from tiered.mount.offsets import ConsumerOffsets
    from tiered.mount.pulling import Puller
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
    """Answers of one mount.

    Attributes:
        store: The tier.
        identity: As what we are known.
        topics: What there is.
        consumers: Who consumes.
        locks: Of orderly consumers.
        offsets: Where groups are.
        puller: Pulls.
        executor: For what may ask the tier.
        clock: Time.
        began_ms: When the mount began.
    """

    store: TieredMessageStore
    identity: Identity
    topics: MountedTopics
    consumers: Consumers
    locks: Locks
    offsets: ConsumerOffsets
    puller: Puller
    executor: Executor
    clock: Clock
    began_ms: int

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return {
            codes.PULL_MESSAGE: self.puller.pull,
            codes.LITE_PULL_MESSAGE: self.puller.pull,
            codes.QUERY_CONSUMER_OFFSET: self.query_offset,
            codes.UPDATE_CONSUMER_OFFSET: self.update_offset,
            codes.SEARCH_OFFSET_BY_TIMESTAMP: self.search_offset,
            codes.GET_MAX_OFFSET: self.max_offset,
            codes.GET_MIN_OFFSET: self.min_offset,
            codes.GET_EARLIEST_MSG_STORETIME: self.earliest_time,
            codes.HEART_BEAT: self.heartbeat,
            codes.UNREGISTER_CLIENT: self.unregister_client,
            codes.CHECK_CLIENT_CONFIG: self.check_client,
            codes.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            codes.LOCK_BATCH_MQ: self.lock,
            codes.UNLOCK_BATCH_MQ: self.unlock,
            codes.GET_ALL_TOPIC_CONFIG: self.topic_configs,
            codes.GET_BROKER_CONFIG: self.broker_config,
            codes.GET_BROKER_RUNTIME_INFO: self.runtime_info,
            codes.GET_ROUTEINFO_BY_TOPIC: self.route,
            codes.GET_BROKER_CLUSTER_INFO: self.cluster,
        }

    # -- offsets ----------------------------------------------------------------------------------

    def query_offset(self, asked: Exchange) -> Command:
        """QUERY_CONSUMER_OFFSET; a group that has none begins where it is configured to."""
        group = fields.name(asked.request, "consumerGroup")
        topic, queue_id = self._queue(asked.request)
        found = self.offsets.get(group, topic, queue_id)
        if found is None:
            raise RefusalError(
                Code.QUERY_NOT_FOUND,
                "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first",
            )
        return _offset(found)

    def update_offset(self, asked: Exchange) -> Command:
        """UPDATE_CONSUMER_OFFSET."""
        group = fields.name(asked.request, "consumerGroup")
        topic, queue_id = self._queue(asked.request)
        self.topics.require(topic, queue_id)
        offset = fields.whole(asked.request, "commitOffset")
        self.offsets.commit(group, topic, queue_id, offset)
        return Command(Code.SUCCESS)

    def max_offset(self, asked: Exchange) -> Command:
        """GET_MAX_OFFSET; 0 of a queue that has no messages, as a broker has it."""
        return _offset(max(self.store.max_offset(*self._queue(asked.request)), 0))

    def min_offset(self, asked: Exchange) -> Command:
        """GET_MIN_OFFSET; likewise."""
        return _offset(max(self.store.min_offset(*self._queue(asked.request)), 0))

    def earliest_time(self, asked: Exchange) -> Command:
        """GET_EARLIEST_MSG_STORETIME; -1 without messages."""
        found = self.store.earliest_time_ms(*self._queue(asked.request))
        return Command(Code.SUCCESS, fields={"timestamp": str(-1 if found is None else found)})

    def search_offset(self, asked: Exchange) -> Command | Coroutine[None, None, Command]:
        """SEARCH_OFFSET_BY_TIMESTAMP."""
        topic, queue_id = self._queue(asked.request)
        time_ms = fields.whole(asked.request, "timestamp")
        is_upper = fields.text(asked.request, "boundaryType", "LOWER").upper() == "UPPER"
        boundary = Boundary.UPPER if is_upper else Boundary.LOWER
        if self.store.bounds(topic, queue_id) is None:
            return _offset(0)
        return self._search(partial(self.store.offset_by_time, topic, queue_id, time_ms, boundary))

    async def _search(self, search: partial[Any]) -> Command:
        return _offset(await asyncio.get_running_loop().run_in_executor(self.executor, search))

    @staticmethod
    def _queue(request: Command) -> tuple[str, int]:
        return fields.name(request, "topic"), fields.whole(request, "queueId")

    # -- sessions ---------------------------------------------------------------------------------

    def heartbeat(self, asked: Exchange) -> Command:
        """HEART_BEAT."""
        self.consumers.heartbeat(asked.connection, asked.request)
        return Command(Code.SUCCESS)

    def unregister_client(self, asked: Exchange) -> Command:
        """UNREGISTER_CLIENT."""
        group = asked.request.fields.get("consumerGroup")
        if group:
            self.consumers.leave(fields.name(asked.request, "clientID"), group)
        return Command(Code.SUCCESS)

    @staticmethod
    def check_client(asked: Exchange) -> Command:
        """CHECK_CLIENT_CONFIG: whether its filter can be compiled."""
        said = fields.document(asked.request).get("subscriptionData")
        if isinstance(said, dict):
            make_filter(str(said.get("subString") or "*"), str(said.get("expressionType") or "TAG"))
        return Command(Code.SUCCESS)

    def consumer_list(self, asked: Exchange) -> Command:
        """GET_CONSUMER_LIST_BY_GROUP."""
        found = self.consumers.clients(fields.name(asked.request, "consumerGroup"))
        return _document({"consumerIdList": found})

    def lock(self, asked: Exchange) -> Command:
        """LOCK_BATCH_MQ."""
        group, client, queues = _locking(asked.request)
        locked = self.locks.lock(group, client, queues)
        told = [
            {"brokerName": broker, "queueId": queue_id, "topic": topic}
            for broker, topic, queue_id in locked
        ]
        return _document({"lockOKMQSet": told})

    def unlock(self, asked: Exchange) -> Command:
        """UNLOCK_BATCH_MQ."""
        self.locks.unlock(*_locking(asked.request))
        return Command(Code.SUCCESS)

    # -- names ------------------------------------------------------------------------------------

    def topic_configs(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_ALL_TOPIC_CONFIG."""
        wrapper = {
            **self.topics.wrapper(),
            "mappingDataVersion": self.topics.data_version(),
            "topicQueueMappingDetailMap": {},
        }
        return _document(wrapper, {"totalTopicNum": str(len(self.topics.queues))})

    def route(self, asked: Exchange) -> Command:
        """GET_ROUTEINFO_BY_TOPIC, as a name server answers it."""
        topic = fields.name(asked.request, "topic")
        return _document(naming.route(self.identity, self.topics, topic))

    def cluster(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_BROKER_CLUSTER_INFO, as a name server answers it."""
        return _document(naming.cluster(self.identity))

    # -- the broker itself ------------------------------------------------------------------------

    def broker_config(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_BROKER_CONFIG."""
        said = {
            "brokerName": self.identity.broker,
            "brokerClusterName": self.identity.cluster,
            "brokerId": naming.MASTER,
            "brokerPermission": READ,
            "listenPort": self.identity.address.rpartition(":")[2],
            "brokerIP1": self.identity.address.rpartition(":")[0].strip("[]"),
            "enablePropertyFilter": "true",
            "longPollingEnable": "true",
            "autoCreateTopicEnable": "false",
            "autoCreateSubscriptionGroup": "true",
        }
        body = "".join(f"{name}={value}\n" for name, value in said.items()).encode()
        version = as_json(self.topics.data_version()).decode()
        return Command(Code.SUCCESS, fields={"version": version}, body=(body,))

    def runtime_info(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_BROKER_RUNTIME_INFO."""
        table = dict.fromkeys(_NOTHING, "0")
        table |= {
            "brokerVersionDesc": f"tiered {__version__}, read-only mount",
            "brokerVersion": str(VERSION),
            "brokerActive": "true",
            "bootTimestamp": str(self.began_ms),
            "runtime": f"{(self.clock.now_ms() - self.began_ms) // 1000} seconds",
            "earliestMessageTimeStamp": "-1",
            "putTps": "0.0 0.0 0.0",
            "getTransferredTps": "0.0 0.0 0.0",
            "getFoundTps": "0.0 0.0 0.0",
            "getMissTps": "0.0 0.0 0.0",
            "getTotalTps": "0.0 0.0 0.0",
        }
        return _document({"table": table})


def _offset(offset: int) -> Command:
    return Command(Code.SUCCESS, fields={"offset": str(int(offset))})


def _document(body: object, said: Mapping[str, str] | None = None) -> Command:
    return Command(Code.SUCCESS, fields=said or {}, body=(as_json(body),))


def _locking(request: Command) -> tuple[str, str, list[Queue]]:
    """Group, client and queues of a request about locks."""
    said = fields.document(request)
    queues: list[Queue] = []
    for one in fields.objects(said.get("mqSet")):
        broker, queue_id = str(one.get("brokerName") or ""), one.get("queueId")
        if not isinstance(queue_id, int):
            raise RefusalError(Code.INVALID_PARAMETER, "a queue without a queueId")
        queues.append((broker, fields.checked_name(one.get("topic"), "topic"), queue_id))
    group = fields.checked_name(said.get("consumerGroup"), "consumerGroup")
    return group, fields.checked_name(said.get("clientId"), "clientId"), queues


FOUND_MAX: Final = 64
FOUND_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of one answer; it holds one message, however large it is."""
QUERY_S: Final = 8.0
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
    """Answers of one mount.

    Attributes:
        store: The tier.
        identity: As what we are known.
        topics: What there is.
        consumers: Who consumes.
        offsets: Where groups are.
        executor: For what reads the tier.
        group_configs_known: ``SubscriptionGroupConfig`` of the groups of a broker that was decommissioned.
    """

    store: TieredMessageStore
    identity: Identity
    topics: MountedTopics
    consumers: Consumers
    offsets: ConsumerOffsets
    executor: Executor
    group_configs_known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def handlers(self) -> Mapping[int, Handler]:
        """By code."""
        return {
            codes.QUERY_MESSAGE: self.query_message,
            codes.GET_TOPIC_STATS_INFO: self.topic_stats,
            codes.GET_CONSUME_STATS: self.consume_stats,
            codes.GET_CONSUMER_CONNECTION_LIST: self.consumer_connections,
            codes.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            codes.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.group_configs,
            codes.GET_TOPIC_CONFIG: self.topic_config,
            codes.GET_SUBSCRIPTIONGROUP_CONFIG: self.group_config,
        }

    # -- messages ---------------------------------------------------------------------------------

    async def query_message(self, asked: Exchange) -> Command:
        """QUERY_MESSAGE: by one of a message's keys, or by its unique id."""
        request = asked.request
        until_ms = fields.whole(request, "endTimestamp", TIME_MAX)
        wanted = KeyQuery(
            topic=fields.name(request, "topic"),
            key=fields.text(request, "key"),
            from_ms=fields.whole(request, "beginTimestamp", 0),
            until_ms=min(until_ms, TIME_MAX - 1) + 1,
            count=min(max(fields.whole(request, "maxNum", FOUND_MAX), 1), FOUND_MAX),
        )
        await asked.make_room(FOUND_BYTES_MAX)
        found = await self._run(lambda: self.store.query(wanted, timeout_s=QUERY_S))
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

    # -- topics -----------------------------------------------------------------------------------

    async def topic_stats(self, asked: Exchange) -> Command:
        """GET_TOPIC_STATS_INFO."""
        topic = fields.name(asked.request, "topic")
        queues = [MessageQueue(topic, number) for number in range(self.topics.require(topic))]
        times = await self._run(lambda: [self._time_before(queue, None) for queue in queues])
        rows = [
            (
                queue,
                {
                    "minOffset": max(self.store.min_offset(topic, queue.queue_id), 0),
                    "maxOffset": max(self.store.max_offset(topic, queue.queue_id), 0),
                    "lastUpdateTimestamp": time_ms,
                },
            )
            for queue, time_ms in zip(queues, times, strict=True)
        ]
        return _body(b'{"offsetTable":%b,"topicPutTps":0.0}' % self._by_queue(rows))

    def topic_config(self, asked: Exchange) -> Command:
        """GET_TOPIC_CONFIG."""
        topic = fields.name(asked.request, "topic")
        return _body(as_json(self.topics.config(topic)))

    def groups_of_topic(self, asked: Exchange) -> Command:
        """QUERY_TOPIC_CONSUME_BY_WHO."""
        topic = fields.name(asked.request, "topic")
        online = [
            name for name, group in self.consumers.groups.items() if topic in group.subscriptions
        ]
        return _body(as_json({"groupList": sorted({*online, *self.offsets.groups(topic)})}))

    # -- groups -----------------------------------------------------------------------------------

    async def consume_stats(self, asked: Exchange) -> Command:
        """GET_CONSUME_STATS: how far a group is, queue by queue."""
        group = fields.name(asked.request, "consumerGroup")
        topic = asked.request.fields.get("topic")
        names = [topic] if topic else self._topics_of(group)
        queues = [
            MessageQueue(name, number)
            for name in names
            for number in range(self.topics.queues.get(name, 0))
        ]
        at = {queue: self.offsets.get(group, queue.topic, queue.queue_id) or 0 for queue in queues}
        times = await self._run(lambda: [self._time_before(queue, at[queue]) for queue in queues])
        rows = [
            (
                queue,
                {
                    "brokerOffset": max(self.store.max_offset(queue.topic, queue.queue_id), 0),
                    "consumerOffset": at[queue],
                    "pullOffset": at[queue],
                    "lastTimestamp": time_ms,
                },
            )
            for queue, time_ms in zip(queues, times, strict=True)
        ]
        return _body(b'{"consumeTps":0.0,"offsetTable":%b}' % self._by_queue(rows))

    def consumer_connections(self, asked: Exchange) -> Command:
        """GET_CONSUMER_CONNECTION_LIST."""
        name = fields.name(asked.request, "consumerGroup")
        group = self.consumers.groups.get(name)
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
        return _body(as_json(told))

    def topics_of_group(self, asked: Exchange) -> Command:
        """QUERY_TOPICS_BY_CONSUMER."""
        names = self._topics_of(fields.name(asked.request, "group"))
        return _body(as_json({"topicList": sorted(names), "brokerAddr": self.identity.address}))

    def group_configs(self, asked: Exchange) -> Command:  # noqa: ARG002 (a handler's)
        """GET_ALL_SUBSCRIPTIONGROUP_CONFIG."""
        table = {name: self._group_config(name) for name in self._groups()}
        told = {
            "dataVersion": self.topics.data_version(),
            "forbiddenTable": {},
            "subscriptionGroupTable": table,
        }
        return _body(as_json(told), {"totalGroupNum": str(len(table))})

    def group_config(self, asked: Exchange) -> Command:
        """GET_SUBSCRIPTIONGROUP_CONFIG."""
        name = fields.name(asked.request, "group")
        if name not in self._groups():
            raise RefusalError(Code.SUBSCRIPTION_GROUP_NOT_EXIST, f"no consumer group {name} here")
        return _body(as_json(self._group_config(name)))

    # -- together ---------------------------------------------------------------------------------

    def _groups(self) -> list[str]:
        known = (self.consumers.groups, self.offsets.all_groups(), self.group_configs_known)
        return sorted(set().union(*known))

    def _group_config(self, name: str) -> dict[str, Any]:
        return {"groupName": name, **_GROUP, **self.group_configs_known.get(name, {})}

    def _topics_of(self, group: str) -> list[str]:
        online = self.consumers.groups.get(group)
        subscribed = online.subscriptions if online is not None else {}
        return sorted({*subscribed, *self.offsets.topics(group)} - {RETRY + group})

    def _time_before(self, queue: MessageQueue, offset: int | None) -> int:
        """Store time of the message before a queue offset (None: of the last one); 0: there is none."""
        bounds = self.store.bounds(queue.topic, queue.queue_id)
        if bounds is None:
            return 0
        at = int(bounds.end if offset is None else min(offset, bounds.end)) - 1
        if at < bounds.min:
            return 0
        for piece in self.store.message_at(queue.topic, queue.queue_id, at).pieces:
            return int(piece.records.store_timestamps_ms[piece.items[0]])
        return 0

    def _by_queue(self, rows: Iterable[tuple[MessageQueue, Mapping[str, int]]]) -> bytes:
        """A map whose keys are queues."""
        pairs = (
            b"%b:%b"
            % (
                as_json(
                    {
                        "brokerName": self.identity.broker,
                        "queueId": queue.queue_id,
                        "topic": queue.topic,
                    }
                ),
                as_json(row),
            )
            for queue, row in rows
        )
        return b"{%b}" % b",".join(pairs)

    async def _run(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401 (whatever it gives)
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)


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


def _body(data: bytes, said: Mapping[str, str] | None = None) -> Command:
    return Command(Code.SUCCESS, fields=said or {}, body=(data,))
