"""The table of topics, ``config/topics.json``: without a line in it no client finds a topic.

**Contract.** A changed table is on the disk when ``ensure`` or ``save`` returns; the content before lies in ``.bak``. A
crash leaves the old table or the new one. What the table says of other topics is kept as it was. For one thread at a
time.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tiered.crashpoints import reached
from tiered.errors import DataError, InvalidError
from tiered.format.fastjson import loads
from tiered.local.catalog import check_topic
from tiered.local.layout import TOPICS_FILE, read_text
from tiered.store.disk import make_folder, replace_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from tiered.clock import Clock
    from tiered.store.encoding import QueueKey

PERM_READ_WRITE: Final = 6
_PERM_INHERIT: Final = 7
_PERM_SYNC_MEMBER: Final = 1
BATCH_TYPE: Final = "BatchCQ"
COMPACTED: Final = "COMPACTION"
_TABLE: Final = "topicConfigTable"
_VERSION: Final = "dataVersion"
_COUNTS: Final = ("readQueueNums", "writeQueueNums")


class TopicTable:
    """The topics of one store."""

    def __init__(self, root: str, document: dict[str, Any]) -> None:
        self._path = Path(root, TOPICS_FILE)
        self._document = document
        self._is_saved = True
        self._table: dict[str, dict[str, Any]] = document[_TABLE]

    @classmethod
    def make(cls, root: str, *, cluster: str, broker: str) -> TopicTable:
        """A new table with the topics that name cluster and broker, as a broker's has. Not yet saved."""
        table = cls(
            root,
            {_VERSION: {"counter": 0, "stateVersion": 0, "timestamp": 0}, _TABLE: {}},
        )
        for name, queues, perm in (
            (cluster, 16, _PERM_INHERIT),
            (broker, 1, _PERM_INHERIT),
            (f"rmq_sys_REVIVE_LOG_{cluster}", 8, PERM_READ_WRITE),
            (f"rmq_sys_SYNC_BROKER_MEMBER_{broker}", 1, _PERM_SYNC_MEMBER),
        ):
            table.put(name, queues, perm)
        return table

    @classmethod
    def load(cls, root: str) -> TopicTable:
        """The table of a store that exists."""
        raw = read_text(f"{root}/{TOPICS_FILE}")
        try:
            document = loads(raw or b"")
        except ValueError:
            document = None
        if not isinstance(document, dict) or not isinstance(document.get(_TABLE), dict):
            raise DataError(
                "the table of topics cannot be read",
                where=f"{root}/{TOPICS_FILE}",
                do="put its .bak in its place",
            )
        document.setdefault(_VERSION, {})
        return cls(root, document)

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def put(self, name: str, queues: int, perm: int = PERM_READ_WRITE) -> None:
        """Add a topic, or give one that is there more queues. Not yet saved."""
        config = self._table.setdefault(
            name,
            {
                "attributes": {},
                "order": False,
                "perm": perm,
                "readQueueNums": 0,
                "topicFilterType": "SINGLE_TAG",
                "topicName": name,
                "topicSysFlag": 0,
                "writeQueueNums": 0,
            },
        )
        for count in _COUNTS:
            config[count] = max(int(config.get(count, 0)), queues)

    def adopt(self, name: str, config: Mapping[str, Any]) -> None:
        """Take over a topic as a broker had it. Not yet saved."""
        self._table[name] = dict(config)

    def set_batch(self, name: str) -> None:
        """Make a topic's consume queues of the batch kind. Not yet saved."""
        self._table[name]["attributes"] = {**self._attributes(name), "queue.type": BATCH_TYPE}

    def ensure(
        self, name: str, queue_id: int, *, queues: int, now_ms: int, queue_type: str | None = None
    ) -> None:
        """Make a topic that is missing, with at least ``queues`` queues, and with a type where one is given."""
        config = self._table.get(name)
        if config is None:
            self.put(name, max(queues, queue_id + 1))
            if queue_type is not None:
                self._table[name]["attributes"] = {"queue.type": queue_type}
        elif self._is_saved and all(config.get(count, 0) > queue_id for count in _COUNTS):
            return
        else:
            self.put(name, queue_id + 1)
        self.save(now_ms)

    def is_batch(self, name: str) -> bool:
        """Whether the topic's consume queues are of the batch kind."""
        return self._attributes(name).get("queue.type") == BATCH_TYPE

    def is_compacted(self, name: str) -> bool:
        """Whether of each key of the topic only the newest message is to be kept."""
        return self._attributes(name).get("cleanup.policy") == COMPACTED

    def compacted(self) -> set[str]:
        """All topics of this kind."""
        return {name for name in list(self._table) if self.is_compacted(name)}

    def set_compacted(self, name: str) -> None:
        """Make a topic such. Not yet saved."""
        self._table[name]["attributes"] = {**self._attributes(name), "cleanup.policy": COMPACTED}

    def _attributes(self, name: str) -> dict[str, Any]:
        found = self._table.get(name, {}).get("attributes")
        return found if isinstance(found, dict) else {}

    def save(self, now_ms: int) -> None:
        """Write the table."""
        # Until it is: what asks for a topic that is in memory only saves again.
        self._is_saved = False
        data = self.encoded(now_ms)
        make_folder(self._path.parent)
        replace_config(self._path, data)
        self._is_saved = True

    def encoded(self, now_ms: int) -> bytes:
        """The table as its file has it, one version on."""
        version = self._document[_VERSION]
        version["counter"] = int(version.get("counter", 0)) + 1
        version["timestamp"] = now_ms
        text = json.dumps(self._document, indent="\t", separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8", "surrogateescape")


class KnownTopics:
    """The topics of a store that is being written: made when a message names them, or by hand.

    **Contract.** For any thread. A topic stands in the table on the disk before its first message is in the log; a
    crash between the two leaves a topic without messages.
    """

    def __init__(self, table: TopicTable, clock: Clock, queues: int) -> None:
        """``queues``: of a topic that a message makes."""
        self._table = table
        self._clock = clock
        self._queues = queues
        self._known: set[QueueKey] = set()
        # Topics of which only the newest message of each key is kept.
        self.compacted = table.compacted()
        self._lock = threading.Lock()

    def has(self, queues: AbstractSet[QueueKey]) -> bool:
        """Whether all are known to exist: then nothing has to be seen to."""
        return queues <= self._known

    def ensure(self, queues: Iterable[QueueKey]) -> None:
        """See to it that queues exist, in this order."""
        for topic, queue_id in dict.fromkeys(queues):
            if (topic, queue_id) in self._known:
                continue
            with self._lock:
                now_ms = self._clock.now_ms()
                self._table.ensure(topic, queue_id, queues=self._queues, now_ms=now_ms)
                reached("store-topic-made")
                self._known.add((topic, queue_id))

    def create(
        self, topic: str, queues: int, *, is_batch: bool, is_compacted: bool = False
    ) -> None:
        """Make a topic, or give one more queues; those of the other kind are refused, as are compacted batch queues."""
        check_topic(topic)
        if queues <= 0:
            raise InvalidError(f"topic {topic}: {queues} queues")
        if is_batch and is_compacted:
            raise InvalidError(f"topic {topic}: messages of inner batches cannot be compacted")
        with self._lock:
            if topic in self._table and is_batch != self._table.is_batch(topic):
                raise InvalidError(f"topic {topic} is there, with consume queues of the other kind")
            kind = BATCH_TYPE if is_batch else None
            now_ms = self._clock.now_ms()
            self._table.ensure(topic, queues - 1, queues=queues, now_ms=now_ms, queue_type=kind)
            if is_compacted and not self._table.is_compacted(topic):
                self._table.set_compacted(topic)
                self._table.save(now_ms)
                self.compacted = self._table.compacted()

    def is_batch(self, topic: str) -> bool:
        """Whether a topic has batch consume queues."""
        return self._table.is_batch(topic)
