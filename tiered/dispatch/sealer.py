"""Seals segments on request: merges runs of small parts into larger objects, then marks the segment sealed.

Ordering: the merged data object, then the merged index object, then the ``seal`` entry that names both. What was merged is
named by no entry any more, and is collected as an orphan after the grace.

Called only while nothing is dispatched (``attach --seal`` after the last commit), so the journal has one user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered import keys
from tiered.log.objects import read_range
from tiered.log.seal import SealPolicy, plan_merge
from tiered.log.state import (
    ObjectRange,
    Part,
    QueueLife,
    Segment,
    TierState,
    part_json,
    queue_action,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore
    from tiered.dispatch.uploads import Uploader
    from tiered.journal.entry import Action
    from tiered.journal.writer import JournalWriter
    from tiered.model import MessageQueue


class Sealer:
    """Merges and seals. One thread."""

    def __init__(
        self,
        uploader: Uploader,
        store: ObjectStore,
        prefix: str,
        policy: SealPolicy | None = None,
    ) -> None:
        self._uploader = uploader
        self._store = store
        self._prefix = prefix
        self._policy = policy or SealPolicy()

    def seal_all(self, journal: JournalWriter[TierState]) -> int:
        """Seal every open segment of every queue; how many there were.

        Raises:
            BackendError: A part could not be read, or an object not written.
            DataError: A part is damaged; its segment stays open.
            FencedError: Another writer has taken over.
        """
        actions: list[Action] = []
        for queue, lives in journal.state.queues.items():
            life = lives[-1]
            if life.segments and not life.segments[-1].sealed:
                actions.append(self._seal(queue, life, life.segments[-1]))
        if actions:
            journal.append(actions)
        return len(actions)

    def _seal(self, queue: MessageQueue, life: QueueLife, segment: Segment) -> Action:
        runs = plan_merge(segment.parts, self._policy)
        parts = [
            run[0] if len(run) == 1 else self._merge(queue, life, segment, run) for run in runs
        ]
        return queue_action(
            "seal",
            queue,
            life.incarnation,
            segment=segment.base_offset,
            parts=[part_json(part) for part in parts],
        )

    def _merge(
        self, queue: MessageQueue, life: QueueLife, segment: Segment, run: Sequence[Part]
    ) -> Part:
        first = run[0]
        timed = [part for part in run if part.store_max_ms >= 0]
        low = min((part.store_min_ms for part in timed), default=-1)
        high = max((part.store_max_ms for part in timed), default=-1)
        count = sum(part.count for part in run)
        description = {
            "topic": queue.topic,
            "queue_id": queue.queue_id,
            "incarnation": life.incarnation,
            "segment": segment.base_offset,
            "log_offset": first.log_offset,
            "queue_offset": first.queue_offset,
            "count": count,
            "store_min_ms": low,
            "store_max_ms": high,
            "merged": len(run),
        }
        made = self._uploader.next_id()
        key = keys.commit_log_key("", queue, life.incarnation, first.log_offset, made)
        log = self._copy(key, [part.log for part in run], {**description, "kind": "commitlog"})
        holes = sum(part.holes for part in run)
        more = {"kind": "consumequeue", "log_key": log.key, "log_crc": log.crc, "holes": holes}
        made = self._uploader.next_id()
        key = keys.consume_queue_key("", queue, life.incarnation, first.queue_offset, made)
        index = self._copy(key, [part.index for part in run], {**description, **more})
        return Part(log, index, first.log_offset, first.queue_offset, count, holes, low, high)

    def _copy(self, key: str, places: Sequence[ObjectRange], description: Action) -> ObjectRange:
        buffers = [
            read_range(self._store, self._prefix, place, place.start, place.end)
            for place in places
            if place.size_bytes  # a part of holes only has no records
        ]
        return self._uploader.put_merged(key, buffers, description)
