"""A JoyQueue (JMQ 4) store directory behind the interface of local stores, live or dead, read-only; and its follower.

A partition is a queue. A record is a message of the journal, byte for byte; a client's batch is an inner batch, whose items
share one.

**Contract.** What is *confirmed* of a group's journal ends with the last sound message at or below the commit position of
the last ``checkpoint.json`` that could be read: where the broker itself would end after a crash. What stands above waits.
The broker writes that file once a minute and in place; one that is not whole changes nothing.

A partition's index is made from the journal. The broker's index files say with which message a partition begins, and are
asked for where a message stands: what they say counts where a message there says the same. No checksum covers the header
of a message. One that doesn't go on where its partition was, or with which the next doesn't go on, counts only if the index
files vouch for it, or if something was lost just before it; else it is damaged, and its place in its partition is a hole.
What is gone with its file is missing.

A *fall*: a file shrank, or is another, or one is gone that was not the first; the commit position fell; the last confirmed
message is another. Then all is looked at anew, and followers name the group's queues. It is looked for with each poll and
before and after each read, by three calls of the system a group, so that what was read meanwhile is thrown away.

Files may vanish from the left at any moment. They are opened when they are seen first, at most ``OPEN_MAX`` at once, and
a follower reads on in those for a minute; the queues' bounds move at once.

Whether a broker runs is told by its lock on ``lock`` (asked for, never taken), which a crash leaves as a file: it is of
interest to people only, since the checkpoint decides either way.

Methods may be called from any thread. One lock guards what is known of groups; records are read without it. Nothing is
written, created, renamed or locked in the directory (I10). After a crash there is nothing to clean up.
"""

from __future__ import annotations

import os
import threading
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.clock import Clock, SystemClock
from tiered.errors import ClosedError, InvalidError
from tiered.local.classification import AnomalyCounters, hole_counter
from tiered.local.interface import (
    BaseFollower,
    HoleReason,
    LeftOut,
    Lineage,
    RecordBatch,
    StoreIdentity,
    StoreReport,
    Waiting,
)
from tiered.local.jmq_files import (
    find_groups,
    is_jmq,
)
from tiered.local.jmq_journal import (
    FAR,
    INDEX_ROW,
    OPEN_MAX,
    SIZE_ROW,
    STEP_BYTES,
    TIME_ROW,
    JmqFound,
    JmqGroup,
    JmqWalk,
    batch_of,
)
from tiered.local.layout import is_locked
from tiered.local.mapped_file_queue import FileCache
from tiered.model import MessageQueue, PhysicalOffset, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


__all__ = ["JmqFollower", "JmqStore", "is_jmq"]

_INDEXES_OPEN_MAX: Final = 64
_LEFTS_AGAIN_S: Final = 0.5
_GROUPS_AGAIN_S: Final = 5.0
_STEP_BYTES_MIN: Final = 4 << 10
_READS_AGAIN: Final = 8


# -- store -------------------------------------------------------------------------------------------


class JmqStore:
    """A broker's store directory, read while the broker runs or after it has ended."""

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, clock: Clock | None = None) -> JmqStore:
        """Open a store directory: the one that has ``topics``."""
        return cls(os.fspath(directory), clock or SystemClock())

    def __init__(self, directory: str, clock: Clock) -> None:
        if not is_jmq(directory):
            raise InvalidError(
                "not a JoyQueue (JMQ 4) store: no topics/TOPIC/GROUP with a checkpoint.json or an index",
                where=directory,
                do="name the broker's store directory, which has topics/",
            )
        self._directory = directory
        self._clock = clock
        self._lock = threading.RLock()
        self._cache, self._indexes = FileCache(OPEN_MAX), FileCache(_INDEXES_OPEN_MAX)
        self._anomalies = AnomalyCounters()
        self._numbers = count()
        self._groups: dict[str, JmqGroup] = {}
        self._owners: dict[MessageQueue, JmqGroup] = {}
        self._left_out: list[LeftOut] = []
        self._groups_s = self._lefts_s = 0.0
        self._is_closed = False
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    # -- the interface ---------------------------------------------------------------------------

    @property
    def identity(self) -> StoreIdentity:
        """See ``LocalStore``. The files have no name of the cluster or the broker, nor a mark of their own."""
        return StoreIdentity(None, None, "", "jmq", is_locked(self._directory))

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        with self._lock:
            return {queue: group.bounds[queue.queue_id] for queue, group in self._owners.items()}

    def refresh(self) -> None:
        with self._lock:
            self._groups_s = self._lefts_s = -FAR
            self.groups()

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        for _ in range(_READS_AGAIN):
            with self._lock:
                group = self._owner(queue)
                bounds = group.bounds[queue.queue_id] if group else None
                if group is None or bounds is None or start >= bounds.end:
                    return None
                walk = self._walk(group, queue.queue_id, max(start, bounds.min))
                size = bytes_max * len(group.bounds)
            found = list[JmqFound]()
            while not found and walk.position < group.confirmed:
                met, _ = walk.step(group, max(_STEP_BYTES_MIN, min(size, STEP_BYTES)))
                found = [one for one in met if one.partition == queue.queue_id]
            if self.holds(group, walk):
                return self.batch(group, found[0], bytes_max, count_max) if found else None
        return None  # it changes faster than it can be read

    def read_compacted(
        self,
        queue: MessageQueue,
        start: QueueOffset,
        *,
        bytes_max: int,
        count_max: int,
    ) -> None:
        """See ``LocalStore``: no topic is compacted."""

    def follow(
        self,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> JmqFollower:
        return JmqFollower(self, starts, stop)

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> QueueOffset:
        """See ``LocalStore``. Store times need not be in order, so the messages are read one after another."""
        with self._lock:
            group = self._owner(queue)
            if group is None:
                return QueueOffset(0)
            bounds = group.bounds[queue.queue_id]
            walk = self._walk(group, queue.queue_id, bounds.min)
        while walk.position < group.confirmed:
            for found in walk.step(group, STEP_BYTES)[0]:
                if found.partition != queue.queue_id:
                    continue
                late = (found.table[SIZE_ROW] > 0) & (found.table[TIME_ROW] >= timestamp_ms)
                if late.any():
                    return QueueOffset(int(found.table[INDEX_ROW, int(np.argmax(late))]))
        return bounds.end

    def lineage(
        self,
        queue: MessageQueue,
        at: QueueOffset | None = None,  # noqa: ARG002 (transactions are elsewhere until they are committed)
    ) -> Lineage | None:
        """See ``LocalStore``: the terms of messages that were met so far."""
        with self._lock:
            group = self._owners.get(queue)
            return None if group is None else Lineage(epochs=group.epochs(queue.queue_id))

    def waiting(self) -> Waiting:
        with self._lock:
            found = [one for group in self._groups.values() if (one := group.waiting()).size_bytes]
            if not found:
                return Waiting()
            is_behind = any(one.is_behind_damage for one in found)
            first = next(one for one in found if one.is_behind_damage == is_behind)
            others = f", and {len(found) - 1} more groups" if len(found) > 1 else ""
            return Waiting(
                sum(one.records for one in found),
                sum(one.size_bytes for one in found),
                first.reason + others,
                is_behind and not is_locked(self._directory),
            )

    def report(self) -> StoreReport:
        with self._lock:
            groups, counters = list(self._groups.values()), self._anomalies.counts()
            return StoreReport(
                log_min=PhysicalOffset(min((group.row.left for group in groups), default=0)),
                log_end=PhysicalOffset(max((group.confirmed for group in groups), default=0)),
                damaged_records=counters.get(hole_counter(HoleReason.DAMAGED), 0),
                left_out=[*self._left_out, *(left for group in groups for left in group.left_out)],
                notes=self._anomalies.notes(),
                counters=counters,
            )

    def close(self) -> None:
        self._is_closed = True
        self._cache.close()
        self._indexes.close()

    # -- for the follower ------------------------------------------------------------------------

    def groups(self) -> list[JmqGroup]:
        """The groups there are now, each looked at."""
        if self._is_closed:
            raise ClosedError("the local store has been closed", where=self._directory)
        with self._lock:
            now_s = self._clock.monotonic_s()
            is_listed = now_s >= self._groups_s + _GROUPS_AGAIN_S
            if is_listed:
                self._groups_s = now_s
                self._list_groups()
            is_due = now_s >= self._lefts_s + _LEFTS_AGAIN_S
            self._lefts_s = now_s if is_due else self._lefts_s
            for group in self._groups.values():
                group.look(now_s)
                if is_due:
                    group.follow_partitions()
            if is_listed or is_due:
                self._own()
            return list(self._groups.values())

    def holds(self, group: JmqGroup, walk: JmqWalk) -> bool:
        """Whether what a walk has read of a group is of what is there now."""
        with self._lock:
            group.look(self._clock.monotonic_s())
            return group.generation == walk.generation

    def batch(
        self, group: JmqGroup, found: JmqFound, bytes_max: int = FAR, count_max: int = FAR
    ) -> RecordBatch:
        """The batch of what was found, its holes counted."""
        queue = MessageQueue(group.folder.topic, found.partition)
        made = batch_of(queue, found, bytes_max, count_max)
        for number in np.flatnonzero(made.sizes == 0).tolist():
            reason = HoleReason(int(made.tag_codes[number]))
            self._anomalies.hole(queue, made.base_offset + number, reason)
        return made

    # -- inside ----------------------------------------------------------------------------------

    @staticmethod
    def _walk(group: JmqGroup, partition: int, start: int) -> JmqWalk:
        """A walk for one partition; what is met of the others tells whether a message is of them."""
        wanted: dict[int, int | None] = dict.fromkeys(group.bounds)
        return JmqWalk(group, group.place_of(partition, start), wanted | {partition: start})

    def _owner(self, queue: MessageQueue) -> JmqGroup | None:
        """The group of a queue, looked at."""
        if self._is_closed:
            raise ClosedError("the local store has been closed", where=self._directory)
        group = self._owners.get(queue)
        if group is not None:
            group.look(self._clock.monotonic_s())
        return group if group is not None and queue.queue_id in group.bounds else None

    def _list_groups(self) -> None:
        folders, self._left_out = find_groups(self._directory)
        paths = {folder.path for folder in folders}
        for path in self._groups.keys() - paths:
            del self._groups[path]
            self._cache.drop_deleted()
            self._indexes.drop_deleted()
        for folder in folders:
            if folder.path not in self._groups:
                self._groups[folder.path] = JmqGroup(
                    folder, self._cache, self._indexes, self._numbers
                )

    def _own(self) -> None:
        """Say whose each queue is: partitions have numbers of their own within a topic, whatever group they are in."""
        owners = dict[MessageQueue, JmqGroup]()
        for group in self._groups.values():
            for partition in group.bounds:
                queue = MessageQueue(group.folder.topic, partition)
                if (other := owners.setdefault(queue, group)) is not group:
                    raise InvalidError(
                        f"partition {queue} is in two groups, {other.folder} and {group.folder}",
                        where=group.folder.path,
                        do="remove the folder that is not the broker's",
                    )
        self._owners = owners


# -- follower ----------------------------------------------------------------------------------------


class JmqFollower(BaseFollower):
    """Gives what a store gets, group by group in the order of their journals, from where each queue's caller stands."""

    def __init__(
        self,
        store: JmqStore,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(starts, stop)
        self._store = store
        self._walks: dict[str, JmqWalk] = {}
        self._turn = 0
        self._keep_up(store.groups())
        self._fallen.clear()  # the caller has just said where to go on

    def poll(self, window_bytes: int) -> list[RecordBatch]:
        """See ``Follower``. The groups have their turns; each gives what lies in one file at most."""
        self._require_open()
        groups = self._store.groups()
        self._keep_up(groups)
        self._turn += 1
        turn = self._turn % max(1, len(groups))
        batches, left = list[RecordBatch](), window_bytes
        for group in groups[turn:] + groups[:turn]:
            walk = self._walks[group.folder.path]
            found = list[RecordBatch]()
            while walk.position < group.confirmed and not found:
                if (batches and left <= 0) or self._stop():
                    break
                found, size = self._take(group, walk, max(left, 1))
                left -= size
                if self._walks.get(group.folder.path) is not walk:
                    break
            batches += found
        self._is_at_end = all(self._is_level(group) for group in groups)
        self._is_idle = self._is_at_end and not batches
        return batches

    def seek(self, queue: MessageQueue, start: QueueOffset) -> None:
        self._next[queue] = int(start)
        for group in self._store.groups():
            if group.folder.topic == queue.topic and queue.queue_id in group.bounds:
                self._walks[group.folder.path] = self._begin(group)

    def _is_level(self, group: JmqGroup) -> bool:
        walk = self._walks.get(group.folder.path)
        return walk is not None and walk.position >= group.confirmed

    def _take(self, group: JmqGroup, walk: JmqWalk, size: int) -> tuple[list[RecordBatch], int]:
        """The next step in a group's journal, unless that was changed meanwhile."""
        found, looked_at = walk.step(group, size)
        if not self._store.holds(group, walk):
            self._keep_up([group])
            return [], looked_at
        batches = [self._store.batch(group, one) for one in found]
        self._next.update((batch.queue, int(batch.end_offset)) for batch in batches)
        return batches, looked_at

    def _keep_up(self, groups: Sequence[JmqGroup]) -> None:
        """Go on anew in groups that are new, or fell; what was known of their queues is to be held against them."""
        for group in groups:
            walk = self._walks.get(group.folder.path)
            if walk is None or walk.generation != group.generation:
                queues = (MessageQueue(group.folder.topic, number) for number in group.bounds)
                self._fallen.update(queue for queue in queues if queue in self._next)
            elif walk.wanted.keys() == group.bounds.keys():
                continue
            self._walks[group.folder.path] = self._begin(group)

    def _begin(self, group: JmqGroup) -> JmqWalk:
        wanted: dict[int, int | None] = {}
        position = group.confirmed
        for partition, bounds in group.bounds.items():
            start = self._next.get(MessageQueue(group.folder.topic, partition), 0)
            wanted[partition] = start = max(start, bounds.min)
            position = min(position, group.place_of(partition, start))
        return JmqWalk(group, position, wanted)
