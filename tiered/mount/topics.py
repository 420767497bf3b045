"""The topics that a mount has, as brokers and name servers tell of topics: all with permission read-only.

They are the tier's, the names of broker and cluster (each broker has both as topics, and a name server does not take a
broker with one topic alone), and the retry topics of groups that have consumers here, so that clients and ``mqadmin`` find
the group's broker by their route. ``version`` goes up with every change; name servers look at nothing else. For one thread.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tiered.mount.codes import Code, RefusalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tiered.clock import Clock
    from tiered.model import MessageQueue

READ: Final = 4
RETRY: Final = "%RETRY%"
RETRY_TOPICS_MAX: Final = 10_000
HELP: Final = "https://rocketmq.apache.org/docs/bestPractice/06FAQ"


class Topics:
    """See the module.

    Attributes:
        queues: Number of queues of each topic, by name.
        version: Goes up with each change.
        changed_ms: When it last did.
    """

    def __init__(self, cluster: str, broker: str, clock: Clock) -> None:
        """Begin with the names alone."""
        self._own = {broker: 1, cluster: 1}
        self._tiered: Mapping[str, int] = {}
        self._retries: dict[str, int] = {}
        self._clock = clock
        self.queues: Mapping[str, int] = dict(self._own)
        self.version = 1
        self.changed_ms = int(clock.now_ms())

    def update(self, queues: Iterable[MessageQueue]) -> bool:
        """Take over what the tier has now; whether anything changed."""
        found: dict[str, int] = {}
        for queue in queues:
            found[queue.topic] = max(found.get(queue.topic, 0), queue.queue_id + 1)
        self._tiered = found
        return self._merge()

    def add_retry(self, group: str) -> bool:
        """A group has a consumer here; whether that is new."""
        name = RETRY + group
        if name in self.queues or len(self._retries) >= RETRY_TOPICS_MAX:
            return False
        self._retries[name] = 1
        return self._merge()

    def _merge(self) -> bool:
        merged = {**self._own, **self._retries, **self._tiered}
        if merged == self.queues:
            return False
        self.queues = merged
        self.version += 1
        self.changed_ms = int(self._clock.now_ms())
        return True

    def require(self, topic: str, queue_id: int | None = None) -> int:
        """Number of a topic's queues.

        Raises:
            RefusalError: There is no such topic, or no such queue.
        """
        count = self.queues.get(topic)
        if count is None:
            raise RefusalError(
                Code.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please! {HELP}"
            )
        if queue_id is not None and not 0 <= queue_id < count:
            raise RefusalError(
                Code.INVALID_PARAMETER,
                f"queueId[{queue_id}] is illegal, topic:[{topic}] topicConfig.readQueueNums:[{count}]",
            )
        return count

    def data_version(self) -> dict[str, int]:
        """``DataVersion``."""
        return {"stateVersion": 0, "timestamp": self.changed_ms, "counter": self.version}

    def wrapper(self) -> dict[str, Any]:
        """``TopicConfigSerializeWrapper``."""
        table = {name: config(name, count) for name, count in self.queues.items()}
        return {"dataVersion": self.data_version(), "topicConfigTable": table}

    def registration(self) -> bytes:
        """The body of a broker's registration."""
        wrapper = {**self.wrapper(), "topicQueueMappingInfoMap": {}}
        return as_json({"topicConfigSerializeWrapper": wrapper, "filterServerList": []})


def config(name: str, count: int) -> dict[str, Any]:
    """``TopicConfig`` of a topic that can only be read."""
    return {
        "topicName": name,
        "readQueueNums": count,
        "writeQueueNums": count,
        "perm": READ,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
        "attributes": {},
    }


def as_json(document: object) -> bytes:
    """JSON as it goes over the wire."""
    return json.dumps(document, separators=(",", ":")).encode()
