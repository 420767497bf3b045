"""The topics of a store that is being written: made when a message names them, or by hand.

**Contract.** For any thread. A topic stands in the table on the disk before its first message is in the log; a crash
between the two leaves a topic without messages.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from tiered.crashpoints import reached
from tiered.errors import InvalidError
from tiered.store.checks import check_topic

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from tiered.clock import Clock
    from tiered.store.columns import QueueKey
    from tiered.store.topictable import TopicTable

BATCH_TYPE: Final = "BatchCQ"


class KnownTopics:
    """See the module."""

    def __init__(self, table: TopicTable, clock: Clock, queues: int) -> None:
        """``queues``: of a topic that a message makes."""
        self._table = table
        self._clock = clock
        self._queues = queues
        self._known: set[QueueKey] = set()
        self._lock = threading.Lock()

    def ensure(self, queues: AbstractSet[QueueKey], in_order: Iterable[QueueKey]) -> None:
        """See to it that queues exist: those of ``in_order``, each of which is in ``queues``.

        Raises:
            OSError: The table could not be saved.
        """
        if queues <= self._known:
            return
        for topic, queue_id in dict.fromkeys(in_order):
            with self._lock:
                now_ms = self._clock.now_ms()
                self._table.ensure(topic, queue_id, queues=self._queues, now_ms=now_ms)
                reached("store-topic-made")
                self._known.add((topic, queue_id))

    def create(self, topic: str, queues: int, *, is_batch: bool) -> None:
        """Make a topic, or give one more queues.

        Raises:
            InvalidError: The name is none, ``queues`` is not positive, or the topic has queues of the other kind.
            OSError: The table could not be saved.
        """
        check_topic(topic)
        if queues <= 0:
            raise InvalidError(f"topic {topic}: {queues} queues")
        with self._lock:
            if topic in self._table and is_batch != self._table.is_batch(topic):
                raise InvalidError(f"topic {topic} is there, with consume queues of the other kind")
            kind = BATCH_TYPE if is_batch else None
            now_ms = self._clock.now_ms()
            self._table.ensure(topic, queues - 1, queues=queues, now_ms=now_ms, queue_type=kind)

    def is_batch(self, topic: str) -> bool:
        """Whether a topic has batch consume queues."""
        return self._table.is_batch(topic)
