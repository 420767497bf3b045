"""The topics that a mount has, as brokers and name servers tell of topics: all with permission read-only.

They are the tier's, those that a decommissioned broker had (with their queue counts and attributes, also where a queue has
never had a message), the names of broker and cluster (each broker has both as topics, and a name server does not take a
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
_KEPT: Final = {
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": 0,
    "order": False,
    "attributes": {},
}
"""What is told of a topic as the broker had it, and what without one."""
HELP: Final = "https://rocketmq.apache.org/docs/bestPractice/06FAQ"


class Topics:
    """See the module.

    Attributes:
        queues: Number of queues of each topic, by name.
        version: Goes up with each change.
        changed_ms: When it last did.
    """

    def __init__(
        self,
        cluster: str,
        broker: str,
        clock: Clock,
        known: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Begin with the names, and with what the broker had.

        Args:
            cluster: Its name.
            broker: Its name.
            clock: Time.
            known: ``TopicConfig`` of the topics of a broker that was decommissioned, without its own.
        """
        self._configs = dict(known or {})
        self._own = {broker: 1, cluster: 1}
        self._known = {name: queue_count(config) for name, config in self._configs.items()}
        self._tiered: Mapping[str, int] = {}
        self._retries: dict[str, int] = {}
        self._clock = clock
        self.queues: Mapping[str, int] = {**self._known, **self._own}
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
        merged = {**self._own, **self._retries, **self._known}
        for name, count in self._tiered.items():
            merged[name] = max(count, merged.get(name, 0))
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

    def config(self, name: str) -> dict[str, Any]:
        """``TopicConfig`` of a topic that can only be read.

        Raises:
            RefusalError: There is no such topic.
        """
        count = self.require(name)
        known = self._configs.get(name, {})
        kept = {field: known.get(field, value) for field, value in _KEPT.items()}
        counts = {"readQueueNums": count, "writeQueueNums": count}
        return {"topicName": name, **counts, "perm": READ, **kept}

    def wrapper(self) -> dict[str, Any]:
        """``TopicConfigSerializeWrapper``."""
        table = {name: self.config(name) for name in self.queues}
        return {"dataVersion": self.data_version(), "topicConfigTable": table}

    def registration(self) -> bytes:
        """The body of a broker's registration."""
        wrapper = {**self.wrapper(), "topicQueueMappingInfoMap": {}}
        return as_json({"topicConfigSerializeWrapper": wrapper, "filterServerList": []})


def queue_count(config: Mapping[str, Any]) -> int:
    """Queues of a topic by its ``TopicConfig``; at least one."""
    return max(int(config.get("readQueueNums", 1)), 1)


def as_json(document: object) -> bytes:
    """JSON as it goes over the wire."""
    return json.dumps(document, separators=(",", ":")).encode()
