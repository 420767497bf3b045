"""What is answered to each request but a pull: offsets, sessions, names, and what ``mqadmin`` asks. One method a request.

Of one loop. What may ask the tier runs in the pool's threads; all else is answered at once from memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tiered import __version__
from tiered.format.remoting import VERSION, Command
from tiered.model import Boundary
from tiered.mount import codes, fields, naming
from tiered.mount.codes import Code, RefusalError
from tiered.mount.pulling import make_filter
from tiered.mount.topics import READ, as_json

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from concurrent.futures import Executor

    from fetcher.message_store import TieredMessageStore
    from tiered.clock import Clock
    from tiered.mount.consumers import Consumers, Locks, Queue
    from tiered.mount.naming import Identity
    from tiered.mount.offsets import ConsumerOffsets
    from tiered.mount.pulling import Puller
    from tiered.mount.server import Exchange, Handler
    from tiered.mount.topics import Topics

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
    topics: Topics
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
