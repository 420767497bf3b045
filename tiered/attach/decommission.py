"""Decommissioning: what only the broker would still have done, what it knew, and the mark that it is gone.

Overview: ``look`` tells what of a broker is near and not done, that is, due to come back to incarnation in the broker and
nowhere else, and reads its tables. ``decommission`` does so at the end of an attachment, and when nothing stands in the way
keeps the tables in the tier and marks it (``tiered.log.broker_tables``). From then on no writer goes on with it unless it is
told to.

Ordering: messages first, then the tables, then the mark. What fails before the mark leaves a tier that goes on as before;
doing it again is harmless.

Everything is told by the store's files alone: progress files in ``config/``, consume queues of system topics, the timer
wheel. Of a running broker the counts are those of its last flush, seconds old. Reading only, nothing is kept open.

============================ ========================================================================================
what                         counted
============================ ========================================================================================
delayed messages             of each delay level, what its queue has behind ``delayOffset.json``
timed messages               what slots of the wheel that are still to come count, and what has not reached the wheel
half messages                those behind the broker's own progress that no operation message decides
popped messages              records of the revive topics behind the broker's own progress
static topics                all of their messages, which are never tiered
retries                      messages of ``%RETRY%`` topics that their group has not committed; these are in the tier,
                             and are no obstacle: consumers take them from a mount
============================ ========================================================================================
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.format.record import RecordError, decode_record
from tiered.local.catalog import TIMER_TOPICS
from tiered.local.consumequeues import PlainQueue
from tiered.local.layout import (
    DELAY_OFFSETS_FILE,
    GROUPS_FILE,
    OFFSETS_FILE,
    TOPICS_FILE,
    inspect,
    list_topic_queues,
    list_topics,
    parse_offsets,
    queue_file_bytes,
    read_table,
    read_timer_progress,
    read_topics,
)
from tiered.local.mapped_file_queue import FileCache, MappedFileQueue
from tiered.log.broker_tables import Handover

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tiered.attach.writer import Attachment
    from tiered.local.layout import Layout
    from tiered.log.broker_tables import Offsets
    from tiered.model import MessageQueue

SCHEDULE: Final = "SCHEDULE_TOPIC_XXXX"
TIMER: Final = "rmq_sys_wheel_timer"
HALF: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
DECIDED: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANSACTIONS: Final = "CID_RMQ_SYS_TRANS"
REVIVE: Final = "rmq_sys_REVIVE_LOG_"
REVIVER: Final = "CID_RMQ_SYS_REVIVE_GROUP"
RETRY: Final = "%RETRY%"
SLOT: Final = np.dtype(
    [("time_s", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("magic", ">i4")]
)
"""Of the timer wheel. Times are in units of its precision, a second unless the broker was told otherwise."""
_SLOTS: Final = 2 * 604_800
"""Of each broker's wheel."""
_ALL: Final = 1 << 62
_ITEMS: Final = 4096


RUNS: Final = "a broker runs on the store"
"""What nobody can accept."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Something that only the broker would have done."""

    what: str  # in words
    count: int  # of messages, about; of a queue that could not be read, 0
    do: str  # what to do about it


@dataclass(frozen=True, slots=True)
class Decommissioned:
    """How a decommissioning ended."""

    near: Near  # what the store told
    obstacles: tuple[Pending, ...]  # what stands in its way, pending or other
    key: str  # of the object that holds what the broker knew; empty: it was not decommissioned


def decommission(
    attachment: Attachment,
    directory: str,
    *,
    accepts_pending: bool,
    acl: Mapping[str, Any] | None = None,
) -> Decommissioned:
    """Hand a broker's place over to its tier. After ``Attachment.run`` with ``once``, before it is closed.

    Args:
        accepts_pending: What is near and not done is given up (it stays in the store's files), and is no obstacle.
        acl: The broker's rules of access, without secrets; None: those that were kept before, if any.
    """
    found = tuple(
        _obstacles(attachment)
    )  # first: what a broker writes when it stops is looked at after that
    near = look(directory, attachment.now_ms)
    if attachment.timers is not None and attachment.timers.has_all:
        others = tuple(one for one in near.pending if one.do != _TIMERS_DO)
        notes = (
            *near.metadata.notes,
            "pending timers are in the tier: `tiered timer run` delivers them",
        )
        near = replace(near, pending=others, metadata=replace(near.metadata, notes=notes))
    obstacles = found if accepts_pending else found + near.pending
    if obstacles:
        return Decommissioned(near, obstacles, "")
    pending = tuple({"what": one.what, "count": one.count} for one in near.pending)
    key = attachment.hand_over(replace(near.metadata, pending=pending, acl=acl))
    return Decommissioned(near, (), key)


def _obstacles(attachment: Attachment) -> Iterator[Pending]:
    """What is not in the tier, or may still come."""
    result = attachment.look_again()
    if attachment.local.identity.is_live:
        yield Pending(RUNS, 0, "stop it, then decommission again")
    elif attachment.was_live:
        yield Pending("the broker stopped while its store was read", 0, "decommission again")
    if not result.is_complete:
        count = result.behind + result.waiting.records
        yield Pending("messages are not in the tier", count, "attach again")
    left = sum(
        bounds.end - bounds.min
        for queue, bounds in attachment.local.queues().items()
        if not attachment.selects(queue.topic) and queue.topic not in TIMER_TOPICS
    )
    if left:
        yield Pending(
            "messages of topics that --topics or --exclude leaves out",
            left,
            "leave these options out",
        )


@dataclass(frozen=True, slots=True)
class Near:
    """What a store directory tells."""

    metadata: Handover  # what the broker knows, without what is pending
    pending: tuple[Pending, ...]
    """What is not done, each with a count above 0 (or a table that cannot be read)."""
    retries: int  # messages in retry topics that their group has not committed


def look(directory: str, now_ms: int) -> Near:
    """Look what a broker's store still has to do."""
    layout, cache = inspect(directory), FileCache()
    try:
        return _Looking(layout, cache).look(now_ms)
    finally:
        cache.close()


class _Looking:
    """One look at one store."""

    def __init__(self, layout: Layout, cache: FileCache) -> None:
        self._layout = layout
        self._cache = cache
        self._notes: list[str] = []
        self._absent: list[str] = []
        self._unread: list[Pending] = []

    def look(self, now_ms: int) -> Near:
        topics = self._table(TOPICS_FILE, "topicConfigTable")
        groups = self._table(GROUPS_FILE, "subscriptionGroupTable")
        delays = self._delays()
        offsets = self._offsets()
        delayed = self._delayed(delays)
        self._judge_absent(topics, offsets, delayed)
        pending = (
            *self._unread,
            Pending("delayed messages", delayed, _TIMERS_DO),
            Pending("timed messages", self._timed(), _TIMERS_DO),
            Pending("half messages", self._undecided(offsets), _HALF_DO),
            Pending("popped messages", self._popped(offsets), _POPPED_DO),
            Pending("messages of static topics", self._static(), _STATIC_DO),
        )
        metadata = Handover(
            now_ms, topics, groups, offsets, delays, notes=tuple(dict.fromkeys(self._notes))
        )
        found = tuple(one for one in pending if one.count or one.do in {_TABLE_DO, _ROCKSDB_DO})
        return Near(metadata, found, self._retries(offsets))

    # -- tables -----------------------------------------------------------------------------------

    def _read(self, name: str) -> dict[str, Any]:
        found = read_table(self._layout.root, name, self._notes)
        if found is None:
            path = Path(self._layout.root, name)
            if path.exists() or path.with_name(path.name + ".bak").exists():
                self._unread.append(Pending(f"{name} cannot be read", 0, _TABLE_DO))
            else:
                self._absent.append(name)
        return found or {}

    def _judge_absent(self, topics: Mapping[str, Any], offsets: Offsets, delayed: int) -> None:
        """Of each table that is not there say whether the broker has never had to write it, or it is missing.

        Brokers before 5 write the table of groups with their first group, and with it come a retry topic and offsets; that
        of delay levels is needed only where there are delayed messages.
        """
        is_rocksdb = any(Path(self._layout.root, "config").rglob("CURRENT"))
        has_groups = any(topic.startswith(RETRY) for topic in topics) or any(
            not group.startswith(_OWN_GROUPS) for group, _ in offsets
        )
        is_needed = {DELAY_OFFSETS_FILE: delayed > 0, TOPICS_FILE: True}
        for name in self._absent:
            if is_rocksdb or is_needed.get(name, has_groups):
                do = _ROCKSDB_DO if is_rocksdb else _TABLE_DO
                self._unread.append(Pending(f"{name} is not there", 0, do))
            else:
                self._notes.append(f"{name} is not there: the broker has never had to write it")

    def _table(self, name: str, member: str) -> dict[str, Any]:
        found = self._read(name).get(member)
        return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}

    def _offsets(self) -> Offsets:
        document = self._read(OFFSETS_FILE)
        try:
            return parse_offsets(document) if document else {}
        except ValueError as error:
            self._unread.append(Pending(f"{OFFSETS_FILE}: {error}", 0, _TABLE_DO))
            return {}

    def _delays(self) -> dict[int, int]:
        table = self._table(DELAY_OFFSETS_FILE, "offsetTable")
        try:
            return {int(level): int(offset) for level, offset in table.items()}
        except (TypeError, ValueError) as error:
            self._unread.append(Pending(f"{DELAY_OFFSETS_FILE}: {error}", 0, _TABLE_DO))
            return {}

    # -- queues -----------------------------------------------------------------------------------

    def _queues(self, topic: str) -> Iterator[tuple[MessageQueue, PlainQueue]]:
        for queue in list_topic_queues(self._layout.root, topic, is_batch=False):
            yield queue, self._queue(queue)

    def _queue(self, queue: MessageQueue) -> PlainQueue:
        folder = self._layout.queue_directory(queue, is_batch=False)
        size = queue_file_bytes(folder, is_batch=False)
        return PlainQueue(self._cache, folder, size)

    @staticmethod
    def _left(index: PlainQueue, offset: int) -> int:
        """How many items stand at or behind a queue offset."""
        end = index.written_end(_ALL)
        return max(0, end - max(offset, index.span()[0]))

    def _delayed(self, offsets: Mapping[int, int]) -> int:
        return sum(
            self._left(index, offsets.get(queue.queue_id + 1, 0))
            for queue, index in self._queues(SCHEDULE)
        )

    def _popped(self, offsets: Offsets) -> int:
        return sum(
            self._left(index, offsets.get((REVIVER, topic), {}).get(queue.queue_id, 0))
            for topic, _ in list_topics(self._layout.root)
            if topic.startswith(REVIVE)
            for queue, index in self._queues(topic)
        )

    def _retries(self, offsets: Offsets) -> int:
        return sum(
            self._left(
                index, offsets.get((topic.removeprefix(RETRY), topic), {}).get(queue.queue_id, 0)
            )
            for topic, _ in list_topics(self._layout.root)
            if topic.startswith(RETRY)
            for queue, index in self._queues(topic)
        )

    def _static(self) -> int:
        """Messages of static topics, which are never tiered."""
        topics = read_topics(self._layout.root).static
        return sum(self._left(index, 0) for topic in topics for _, index in self._queues(topic))

    # -- timers -----------------------------------------------------------------------------------

    def _timed(self) -> int:
        wheel = read_timer_progress(self._layout.root).wheel
        begin, waiting = wheel.queue_offset, self._on_wheel(wheel.read_ms)
        if waiting is None and begin:
            self._notes.append(
                "timerwheel is cut or gone: all timed messages are taken for pending"
            )
            begin = 0
        listed = sum(self._left(index, begin) for _, index in self._queues(TIMER))
        return listed + (waiting or 0)

    def _on_wheel(self, read_ms: int) -> int | None:
        """Messages of slots that have not been delivered; None: the wheel does not say. It is 37 MiB, mostly a hole."""
        wheel = Path(self._layout.root, "timerwheel")
        if not wheel.is_file() or wheel.stat().st_size != _SLOTS * SLOT.itemsize:
            return None
        slots = np.memmap(wheel, SLOT, "r", shape=(_SLOTS,))
        times_s = np.asarray(slots["time_s"], np.int64)
        waiting = np.flatnonzero(times_s > read_ms // 1000)
        return int(np.maximum(slots["count"][waiting].astype(np.int64), 0).sum())

    # -- transactions -----------------------------------------------------------------------------

    def _undecided(self, offsets: Offsets) -> int:
        """Half messages behind the broker's progress without an operation message that decides them."""
        halves: set[int] = set()
        for queue, index in self._queues(HALF):
            begin = offsets.get((TRANSACTIONS, HALF), {}).get(queue.queue_id, 0)
            halves.update(range(max(begin, index.span()[0]), index.written_end(_ALL)))
        if halves:
            halves -= self._decided(offsets)
        return len(halves)

    def _decided(self, offsets: Offsets) -> set[int]:
        found: set[int] = set()
        for queue, index in self._queues(DECIDED):
            begin = offsets.get((TRANSACTIONS, DECIDED), {}).get(queue.queue_id, 0)
            for body in self._bodies(index, begin):
                found.update(int(one) for one in body.split(b",") if one.isdigit())
        return found

    def _bodies(self, index: PlainQueue, begin: int) -> Iterator[bytes]:
        log = MappedFileQueue(self._cache, self._layout.log, self._layout.log_file_bytes)
        end = index.written_end(_ALL)
        for start in range(max(begin, index.span()[0]), end, _ITEMS):
            entries = index.entries(start, min(start + _ITEMS, end))
            places = zip(entries.physical_offsets.tolist(), entries.sizes.tolist(), strict=True)
            for position, size in places:
                try:
                    yield bytes(decode_record(log.read(position, size), 0).body)
                except RecordError:
                    self._notes.append(f"an operation message at {position} cannot be read")


_OWN_GROUPS: Final = "CID_RMQ_SYS_"
_TABLE_DO: Final = "put it back into the broker's config directory, or its .bak in its place"
_ROCKSDB_DO: Final = "this broker keeps its tables in RocksDB: have it export them first"
_TIMERS_DO: Final = (
    "let the broker run until it has delivered them, or import them (--timers --near 0s): then `tiered timer run`"
    " delivers them"
)
_HALF_DO: Final = "let the broker run until it has asked their producers"
_STATIC_DO: Final = (
    "have the broker serve them until they are consumed: static topics are not tiered"
)
_POPPED_DO: Final = "let the broker run until they are acknowledged or delivered again"
