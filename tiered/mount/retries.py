"""The retry log of a mount: messages that consumers have sent back, until they are given out again, and dead letters.

Overview
    The log is a small tier of its own, ``retry/`` below the mount's place, which whatever works on tiers reads. A message
    that was sent back is appended to the queue of ``SCHEDULE_TOPIC_XXXX`` for its delay, as a broker does it; when that is
    over to ``%RETRY%<group>``, and after the last try to ``%DLQ%<group>``. These two go on where the old broker's tier
    ends. ``RetryWriter`` makes rounds durable; ``RetryLog`` gathers them, keeps what is pending in memory, and is the local
    side of the mount's message store for what was delivered.

Ordering
    A round is a bundle, then an entry. The entry that names what was delivered also gives up what that was in the delay
    queues: a delivery has happened whole or not at all, so none is lost and none happens twice. All records of a round have
    one store time, so those of one delay queue are due together; they are a segment there, which can go alone.
    Between rounds the bundles of some are merged into one, segment by segment: what rounds leave is few objects.

Retries and errors
    Who sends back is answered when its entry is durable, else with ``SYSTEM_BUSY`` after ``RetryLimits.answer_s``: clients
    try again. A bundle that failed is made anew, in new segments, of those who still wait. An entry is tried until the store
    takes it; who was answered in between may find its message twice. ``FencedError``: another mount has taken over.

After a crash: what is pending is read again from the log. Bundles that no entry names are orphans.

Threads: ``RetryWriter`` of one; ``RetryLog`` of the mount's loop, but for what its message store reads, which any may.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from tiered.dispatch.group_commit import Uploader
from tiered.dispatch.merging import Merger
from tiered.errors import DataError, FencedError, InternalError, StoreUnavailableError
from tiered.format import properties as names
from tiered.format import sysflag
from tiered.format.properties import join_properties, tag_hash
from tiered.format.record import (
    Record,
    body_crc,
    decode_record,
    encode_record,
    is_v6,
    offset_msg_id,
    record_bytes,
)
from tiered.journal.append import JournalWriter
from tiered.journal.replay import trim_journal
from tiered.keys import BUNDLE
from tiered.local.catalog import DEAD_PREFIX, RETRY_PREFIX, SCHEDULE_TOPIC, TOPIC_BYTES_MAX
from tiered.local.interface import RecordBatch
from tiered.log.actions import BeginAnew, Expire, action_of
from tiered.log.bundles import bundle_row
from tiered.log.composite import CommitPolicy, CompositeFlatFile
from tiered.log.decode import TierBatch
from tiered.log.expiry import plan_expiry
from tiered.log.history import named_objects
from tiered.log.merge import LAST_LEVEL, MergePolicy, plan_merge
from tiered.log.parts import Incarnation
from tiered.log.reader import TierReader
from tiered.log.state import TierMachine
from tiered.log.timers import HOUR_MS
from tiered.model import MessageQueue, QueueBounds, QueueOffset
from tiered.mount.protocol import Code, RefusalError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.clock import Clock
    from tiered.journal.entry import Action
    from tiered.log.merge import MergeOutput
    from tiered.log.state import TierState

_LOG = logging.getLogger("tiered.mount")
DELAYS_S: Final = (
    *(1, 5, 10, 30, 60, 120, 180, 240, 300),
    *(360, 420, 480, 540, 600, 1200, 1800, 3600, 7200),
)
"""Of a broker's delay levels, which count from 1."""
FIRST_LEVEL: Final = 3
"""Of a message that was never sent back and whose consumer names none; each time one more."""
MAX_TIMES: Final = 16
PLACES_FROM: Final = 1 << 62
"""Physical offsets from it on are of records of a retry log: no broker's log is as long."""
_OFFSET_BITS: Final = 40
_QUEUE_MASK: Final = (1 << 21) - 1
_SEGMENT_BYTES: Final = 64 << 20
_SEGMENT_MS: Final = 3_600_000
_PART_BYTES: Final = 1 << 40
_OBJECTS_MAX: Final = 100_000
_SWEPT_AT_ONCE: Final = 50
"""Objects that are looked at, and perhaps deleted, between two rounds: who sends back waits meanwhile."""
_GRACE_MS: Final = 24 * HOUR_MS
"""Nothing younger is deleted: its entry may be under way."""
_PAUSE_S: Final = 0.1
_PAUSE_S_MAX: Final = 2.0
_IDLE_S: Final = 0.5
"""Dues are looked at so often at least: a clock may be set."""
Sent = tuple[MessageQueue, Record]
"""A record, and the queue of the log that it goes to; the place that it has in itself is not that yet."""


# -- records -----------------------------------------------------------------------------------------


def sent_back(record: Record, group: str, *, level: int, max_times: int) -> Sent:
    """A record as a broker stores it when a consumer of a group has sent it back.

    Args:
        level: Of the delay; 0: by how often it was sent back; below 0: it is to be a dead letter now.
        max_times: So often it is given out again; then it is a dead letter.
    """
    said = _kept(record.properties)
    said.setdefault(names.RETRY_TOPIC, record.topic)
    said[names.WAIT] = "false"
    if not said.get(names.ORIGIN_MESSAGE_ID):
        said[names.ORIGIN_MESSAGE_ID] = offset_msg_id(record.store_host, record.physical_offset)
    is_dead = record.reconsume_times >= max_times or level < 0
    made = replace(
        record,
        topic=(DEAD_PREFIX if is_dead else RETRY_PREFIX) + group,
        queue_id=0,
        reconsume_times=record.reconsume_times + 1,
        prepared_transaction_offset=0,
    )
    return delayed(made, said, 0 if is_dead else level or FIRST_LEVEL + record.reconsume_times)


def delayed(record: Record, said: Mapping[str, str], level: int) -> Sent:
    """A record with these properties on its way to its topic, by the queue of its delay level; 0: at once."""
    level = min(level, len(DELAYS_S))
    said = {**said, names.DELAY: str(level)}
    if level <= 0:
        return MessageQueue(record.topic, record.queue_id), _with(record, said)
    said |= {names.REAL_TOPIC: record.topic, names.REAL_QUEUE_ID: str(record.queue_id)}
    queue = MessageQueue(SCHEDULE_TOPIC, level - 1)
    return queue, _with(replace(record, topic=queue.topic, queue_id=queue.queue_id), said)


def delivered(record: Record) -> Sent:
    """A record of a delay queue on its way to its topic, since its time has come."""
    said = record.properties
    queue = MessageQueue(said[names.REAL_TOPIC], int(said[names.REAL_QUEUE_ID]))
    del said[names.DELAY]
    return queue, _with(replace(record, topic=queue.topic, queue_id=queue.queue_id), said)


def _kept(said: dict[str, str]) -> dict[str, str]:
    """Without the CRC of all properties, which some brokers add: of others it would be wrong."""
    said.pop(names.PROPERTIES_CRC, None)
    return said


def _with(record: Record, said: Mapping[str, str]) -> Record:
    return replace(record, properties_raw=join_properties(said))


def place_of(queue: MessageQueue, offset: int) -> int:
    """The physical offset of a record of the log: it names the queue, but for a few bits, and the queue offset in it."""
    name = f"{queue.topic}/{queue.queue_id}".encode("utf-8", "surrogateescape")
    return PLACES_FROM | (zlib_ng.crc32(name) & _QUEUE_MASK) << _OFFSET_BITS | offset


def placed(record: Record, offset: int, now_ms: int) -> Record:
    """The record at its place in the log."""
    topic = record.topic.encode("utf-8", "surrogateescape")
    version = 1 if len(topic) <= TOPIC_BYTES_MAX else 2
    size = record_bytes(
        body=len(record.body),
        topic=len(topic),
        props=len(record.properties_raw),
        sys_flag=record.sys_flag,
        version=version,
    )
    queue = MessageQueue(record.topic, record.queue_id)
    return replace(
        record,
        size=size,
        version=version,
        body_crc=body_crc(record.body),
        queue_offset=offset,
        physical_offset=place_of(queue, offset),
        store_timestamp_ms=now_ms,
    )


def due_ms(queue: MessageQueue, stored_ms: int) -> int:
    """When a record of a delay queue is to be delivered."""
    return stored_ms + DELAYS_S[queue.queue_id] * 1000


def batch_of(queue: MessageQueue, records: Sequence[Record]) -> RecordBatch:
    """Records of one queue at their places, in order and without a gap."""
    data = [encode_record(record) for record in records]
    sizes = np.fromiter(map(len, data), np.int64, len(data))
    times = np.array([record.store_timestamp_ms for record in records], np.int64)
    codes = [
        due_ms(queue, record.store_timestamp_ms)
        if queue.topic == SCHEDULE_TOPIC
        else tag_hash(record.properties.get(names.TAGS))
        for record in records
    ]
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(records[0].queue_offset),
        data=b"".join(data),
        positions=np.cumsum(sizes) - sizes,
        sizes=sizes.astype(np.int32),
        tag_codes=np.array(codes, np.int64),
        store_timestamps_ms=times,
        physical_offsets=np.array([record.physical_offset for record in records], np.int64),
    )


# -- making rounds durable ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DueTogether:
    """Records of a delay queue that were stored in one round: they are due together, and are a segment."""

    queue: MessageQueue
    due_ms: int  # UTC
    end: QueueOffset  # queue offset behind them
    records: Sequence[Record]

    @property
    def size_bytes(self) -> int:
        """Of the records."""
        return sum(record.size for record in self.records)


class RetryWriter:
    """The writing end of a retry log. ``begin``, then ``commit``, round by round."""

    merging = MergePolicy(segment_bytes_max=0, compresses=False)
    """Segments stay what they are: what is due together is one."""

    def __init__(
        self,
        bare: ObjectStore,
        store: ObjectStore,
        prefix: str,
        clock: Clock,
        rng: random.Random,
        *,
        place: Place,
        old_end: Callable[[MessageQueue], int],
    ) -> None:
        """Read nothing yet.

        Args:
            bare: The tier's store, which does not retry by itself.
            prefix: Of the log, ending in a slash.
            place: Of the broker.
            old_end: Where a queue ends in the old broker's tier.
        """
        # Told of each try to write an entry that failed, and will be tried again; from any thread.
        self.on_failure: Callable[[BackendError], None] = lambda _error: None
        self.stop = threading.Event()  # ends tries that are under way
        self._bare, self._store, self._prefix, self._clock = bare, store, prefix, clock
        self._place, self._old_end = place, old_end
        self._journal: JournalWriter[TierState] = JournalWriter(
            bare,
            prefix,
            TierMachine(),
            clock=clock,
            rng=rng,
            stop=self.stop,
            on_failure=self._tell,
        )
        self.reader = _OwnReader(store, prefix, self._journal)
        self._uploader: Uploader | None = None
        self._failed: set[MessageQueue] = set()
        self._last_ms = 0
        self._unmerged = (
            self.merging.fan_in
        )  # bundles since bundles were merged; or as many, after a start
        self._damaged: set[str] = set()  # bundles that cannot be merged
        self._swept_to = ""  # key of the last bundle that was looked at; empty: none yet
        self._unnamed: set[str] = set()  # bundles that nothing named when they were looked at

    def _tell(self, error: BackendError) -> None:
        self.on_failure(error)

    @property
    def state(self) -> TierState:
        """What is durable. From any thread."""
        return self._journal.state

    def begin(self, consumed: Callable[[MessageQueue], int] = lambda _queue: 0) -> bool:
        """See what there is; whether there is anything. A log that is empty is begun with its first round.

        Args:
            consumed: Up to where a queue's group was with the last mount.

        Raises:
            FencedError: Another takes it at this moment.
            DataError: The log's journal is damaged.
        """
        self._journal.catch_up()
        if self._journal.number:
            self._take_epoch()
            self._begin_anew(consumed)
        return bool(self._journal.number)

    def _begin_anew(self, consumed: Callable[[MessageQueue], int]) -> None:
        """Have queues go on behind what the broker, which was back, has put there since; with what is not consumed yet."""
        anew: dict[MessageQueue, QueueOffset] = {}
        left: list[Sent] = []
        for queue, incarnations in self.state.queues.items():
            now, end = incarnations[-1], self._old_end(queue)
            was_given_up = now.min_offset == now.commit_offset != end
            if queue.topic != SCHEDULE_TOPIC and (end > now.min_offset or was_given_up):
                anew[queue] = QueueOffset(end)
                start = max(consumed(queue), now.min_offset)
                if start < now.commit_offset:
                    records = self.reader.records(queue, start, now.commit_offset)
                    left += [(queue, record) for record in records]
        if anew:
            self.commit(left, anew=anew)

    def _begin_empty(self) -> Uploader:
        made = self._take_epoch()
        if self.state.queues:
            raise FencedError(
                "another mount has begun the retry log since this one looked",
                where=f"{self._bare.url}/{self._prefix}",
                do="end the other one, and start this one again",
            )
        return made

    def _take_epoch(self) -> Uploader:
        journal = self._journal
        journal.take_epoch()
        if not journal.state.store:
            named = {"cluster": self._place.cluster, "broker": self._place.broker}
            store = {**named, "store_id": "", "kind": "rocketmq"}
            journal.append([{"do": "meta", "store": store}])
        self._uploader = made = Uploader(
            self._bare,
            self._prefix,
            epoch=journal.epoch,
            writer=journal.writer,
            clock=self._clock,
        )
        return made

    def commit(
        self,
        sent: Sequence[Sent],
        done: Sequence[DueTogether] = (),
        *,
        anew: Mapping[MessageQueue, QueueOffset] = MappingProxyType({}),
    ) -> list[Record]:
        """Make records durable, and give up what was delivered by that, in one entry; the records at their places.

        Args:
            anew: Queues that begin anew with these records, and where.

        Raises:
            BackendError: The bundle is not stored, or nobody knows: nothing has happened.
            FencedError: Another mount has taken over.
            StoreUnavailableError: ``stop`` is set, and the entry is not written, or nobody knows.
        """
        uploader = self._uploader or self._begin_empty()
        now_ms = self._last_ms = max(self._clock.now_ms(), self._last_ms)
        gathered: dict[MessageQueue, list[Record]] = {}
        for queue, record in sent:
            gathered.setdefault(queue, []).append(record)
        made: list[Record] = []
        commits = []
        for queue in sorted(gathered):
            file = self._file(queue, anew.get(queue))
            first = int(file.append_offset)
            rows = [placed(one, first + at, now_ms) for at, one in enumerate(gathered[queue])]
            file.append(batch_of(queue, rows), 0.0)
            commit = file.take(now_ms)
            assert commit is not None
            commits.append(commit)
            made += rows
        actions: list[Action] = []
        if commits:
            # Its place may hold bytes under another key from here on: the next try begins another segment there.
            self._failed.update(gathered)
            stored = uploader.put_commits(commits, alone=False)
            self._failed.difference_update(gathered)
            self._unmerged += 1
            actions.append({"do": "part", "bundles": [bundle_row(stored.bundle, stored.packed)]})
        self._append([*self._said_anew(anew), *actions, *self._given_up(done)])
        return made

    def give_up(self) -> None:
        """Give up all that is in the log: somebody else has it now."""
        actions = []
        for queue, incarnations in self.state.queues.items():
            now = incarnations[-1]
            if now.min_offset < now.commit_offset:
                place = now.number, len(incarnations) - 1, now.min_offset
                actions.append(action_of(Expire(queue, *place, now.commit_offset)))
        if actions:
            self._append(actions)

    def merge(self) -> None:
        """Merge bundles of rounds, if there are enough: else each would be an object for as long as it is kept.

        Raises:
            BackendError: The store did not answer; the next time is soon enough.
        """
        if self._uploader is None or self._unmerged < self.merging.fan_in:
            return
        self._unmerged = 0
        for _ in range(LAST_LEVEL):  # what one plan makes may fill the next level
            plan = plan_merge(self.state, self.merging, leave=self._damaged)
            if plan is None:
                break
            for output in plan.outputs:
                self._merge(output)

    def _merge(self, output: MergeOutput) -> None:
        assert self._uploader is not None
        merger = Merger(self._uploader, self._store, self._prefix, lambda _size: None, packer=None)
        try:
            made = merger.make(output, self.stop.is_set)
        except DataError as error:
            _LOG.error("bundles of the retry log are not merged: %s", error)
            self._damaged |= {bundle.key for run in output.runs for bundle in run.parts.bundles}
        else:
            if made is not None:
                self._append([made.action()])

    def tidy(self, kept_ms: int) -> bool:
        """Give up whole segments that are older than that, and delete what no reader can have in hand any more.

        Returns:
            Whether there are objects that were not looked at yet: the next call goes on with them.

        Raises:
            BackendError: The store did not answer; the next time is soon enough.
        """
        if self._uploader is None:
            return False
        if not self._swept_to:
            self._expire(kept_ms)
        # Bundles first: an entry that is gone names nothing, and what it named must not look like another's.
        named, now_ms = named_objects(self.state), self._clock.now_ms()
        found = self._store.list(self._prefix + BUNDLE, start_after=self._swept_to)
        some = list(islice(found, _SWEPT_AT_ONCE))
        for info in some:
            is_old = 0 <= info.modified_ms < now_ms - _GRACE_MS
            if not is_old or info.key.removeprefix(self._prefix) in named:
                continue
            if info.key not in self._unnamed:  # who began to read before may be at it still
                self._unnamed.add(info.key)
                continue
            self._store.delete(info.key)
            self._unnamed.discard(info.key)
        self._swept_to = some[-1].key if len(some) == _SWEPT_AT_ONCE else ""
        if not self._swept_to and self._journal.write_checkpoint(force=True):
            trim_journal(self._store, self._prefix, self._journal.number)
        return bool(self._swept_to)

    def _expire(self, kept_ms: int) -> None:
        steps, _ = plan_expiry(
            self.state,
            self._clock.now_ms(),
            lambda topic: None if topic == SCHEDULE_TOPIC else kept_ms,
            objects_max=_OBJECTS_MAX,
        )
        if steps:
            self._append([step.action() for step in steps])

    def _said_anew(self, anew: Mapping[MessageQueue, QueueOffset]) -> Iterator[Action]:
        for queue, start in anew.items():
            number = self.state.queues[queue][-1].number + 1
            yield action_of(BeginAnew(queue, number, start, "the broker was back"))

    def _file(self, queue: MessageQueue, anew: QueueOffset | None) -> CompositeFlatFile:
        """The write side of a queue, as the journal has it: made anew for each round, so that none can be wrong."""
        end = QueueOffset(max(self._old_end(queue), 0)) if anew is None else anew
        known = self.state.incarnation(queue)
        incarnation = known or Incarnation(0, end, end)
        if known is not None and anew is not None:
            incarnation = Incarnation(known.number + 1, end, end)
        is_delay = queue.topic == SCHEDULE_TOPIC
        policy = CommitPolicy(_PART_BYTES, 0.0, 1 if is_delay else _SEGMENT_BYTES, _SEGMENT_MS)
        file = CompositeFlatFile(queue, incarnation, policy)
        if queue in self._failed:
            file.end_segment()
        return file

    def _given_up(self, done: Sequence[DueTogether]) -> Iterator[Action]:
        ends = {one.queue: one.end for one in done}
        for queue, end in ends.items():
            incarnations = self.state.queues[queue]
            place, present = len(incarnations) - 1, incarnations[-1]
            said = Expire(queue, present.number, place, present.min_offset, end)
            yield action_of(said)

    def _append(self, actions: Sequence[Action]) -> None:
        before = self.state.refused_parts
        self._journal.append(actions)
        if self.state.refused_parts != before:
            raise InternalError(
                f"replay refuses a part of our own entry {self._journal.number} of the retry log",
                do="stop the mount, and report this defect",
            )
        self._journal.write_checkpoint()

    def pending(self) -> Iterator[DueTogether]:
        """What lies in the delay queues, in the order of each."""
        for queue, incarnations in self.state.queues.items():
            if queue.topic == SCHEDULE_TOPIC:
                for segment in incarnations[-1].segments:
                    start, end = segment.base_queue_offset, QueueOffset(segment.parts.queue_end)
                    records = list(self.reader.records(queue, start, end))
                    when = due_ms(queue, records[0].store_timestamp_ms)
                    yield DueTogether(queue, when, end, records)


class _OwnReader(TierReader):
    """Reads what a journal's writer knows."""

    def __init__(self, store: ObjectStore, prefix: str, journal: JournalWriter[TierState]) -> None:
        super().__init__(store, prefix)
        self._own = journal

    @property
    def state(self) -> TierState:
        return self._own.state

    def refresh(self) -> bool:
        return False

    def records(self, queue: MessageQueue, start: int, end: int) -> Iterator[Record]:
        """Records of a queue, ``[start, end)``."""
        for found in self.queue(queue).batches(QueueOffset(start), QueueOffset(end)):
            if isinstance(found, TierBatch):
                data = memoryview(found.records.data)
                for at in found.records.positions.tolist():
                    yield decode_record(data, at)


# -- the log -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Limits of a retry log."""

    pending_max: int = 100_000  # messages that wait for their time, or to be durable
    pending_bytes_max: int = 64 << 20  # of these
    round_bytes: int = 4 << 20  # of a round, about
    answer_s: float = 2.5  # who sends back is answered by then; clients wait 3 to 5 s
    kept_ms: int = 7 * 24 * HOUR_MS
    """What groups may have been given again is given up when it is so old; brokers keep it for three days."""
    tidy_s: float = 3600.0  # how often that is looked at


@dataclass(slots=True, eq=False)
class _Waiting:
    """Somebody waits for a record to be durable."""

    sent: Sent
    size_bytes: int
    done: asyncio.Future[Record]


class RetryLog:
    """What was sent back to a mount. See the module's contract."""

    def __init__(
        self,
        writer: RetryWriter,
        clock: Clock,
        limits: RetryLimits | None = None,
        *,
        on_moved: Callable[[MessageQueue], None] = lambda _queue: None,
    ) -> None:
        """Hold nothing yet.

        Args:
            on_moved: Told of queues that consumers read and that have got something.
        """
        self.limits = limits or RetryLimits()
        self.writer = writer
        writer.on_failure = self.note
        self.on_moved = on_moved
        self.host = ""  # ``ip:port`` of the mount, where it is one of numbers
        self.trouble = ""  # why nothing is kept at the moment, in one clause; empty: it is
        self.delivered = self.accepted = 0
        """Messages put into topics of consumers at their time; and such as were sent back, since the start."""
        self._clock = clock
        self._due: dict[MessageQueue, deque[DueTogether]] = {}
        self._waiting: deque[_Waiting] = deque()
        self._count = self._bytes = 0
        self._wake: asyncio.Event | None = None
        self._is_stopping = False
        self._tidied_s = clock.monotonic_s()

    def begin(self, consumed: Callable[[MessageQueue], int] = lambda _queue: 0) -> None:
        """Take the log over, and read what is pending. ``consumed``: as of ``RetryWriter.begin``."""
        if self.writer.begin(consumed):
            for one in self.writer.pending():
                self._hold(one)

    @property
    def pending(self) -> int:
        """Messages that wait for their time, or to be durable."""
        return self._count

    def _hold(self, one: DueTogether) -> None:
        self._due.setdefault(one.queue, deque()).append(one)
        self._count += len(one.records)
        self._bytes += one.size_bytes

    # -- sending back -----------------------------------------------------------------------------

    async def send_back(self, group: str, record: Record, *, level: int, max_times: int) -> Record:
        """Keep a record that a consumer of a group could not do with; it is durable when this returns.

        Args:
            level: Of the delay, from 1 on; 0: by how often it was sent back; below 0: it is a dead letter now.
            max_times: After so many tries it is a dead letter.

        Returns:
            The record as it lies in the log: of ``%DLQ%group``, or in a delay queue on its way to ``%RETRY%group``.

        Raises:
            RefusalError: There is no room (``SYSTEM_BUSY``), or it was not durable in time.
        """
        if record.sys_flag & (sysflag.INNER_BATCH | sysflag.NEED_UNWRAP):
            raise RefusalError(Code.SYSTEM_ERROR, "a message of an inner batch is not sent back")
        try:
            sent = sent_back(record, group, level=level, max_times=max_times)
        except ValueError as error:
            raise RefusalError(Code.SYSTEM_ERROR, f"it cannot be stored again: {error}") from None
        return await self.put(sent)

    async def put(self, sent: Sent) -> Record:
        """Make a record durable in a queue of the log. Errors as of ``send_back``."""
        size = len(sent[1].body) + len(sent[1].properties_raw)
        limits = self.limits
        if self._count >= limits.pending_max or self._bytes + size > limits.pending_bytes_max:
            raise RefusalError(Code.SYSTEM_BUSY, "too many messages wait to be given out again")
        if self._is_stopping:
            raise RefusalError(Code.SYSTEM_BUSY, "the mount is being stopped")
        sent = sent[0], stored_by(sent[1], self.host)
        try:
            encode_record(placed(sent[1], 0, 0))  # now: in a round it would fail for all others
        except ValueError as error:
            raise RefusalError(Code.SYSTEM_ERROR, f"it cannot be stored: {error}") from None
        waiting = _Waiting(sent, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._count += 1
        self._bytes += size
        self._awake()
        try:
            async with asyncio.timeout(limits.answer_s):
                return await waiting.done
        except TimeoutError:
            why = self.trouble or "the store is slow"
            raise RefusalError(Code.SYSTEM_BUSY, f"not durable in time: {why}") from None
        finally:
            self._count -= 1
            self._bytes -= size

    def _awake(self) -> None:
        if self._wake is not None:
            self._wake.set()

    # -- rounds -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Make durable what comes, and deliver what is due, until ``stop``.

        Raises:
            FencedError: Another mount has taken over.
        """
        self._wake = asyncio.Event()
        pause_s = _PAUSE_S
        with ThreadPoolExecutor(1, "tiered-mount-retry") as thread:
            while not self._is_stopping or self._waiting:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._idle_s()):
                        await self._wake.wait()
                self._wake.clear()
                try:
                    await self._round(thread)
                    await self._tidy(thread)
                except (BackendError, StoreUnavailableError) as error:
                    self.note(error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _PAUSE_S_MAX)
                    self._wake.set()
                else:
                    pause_s = _PAUSE_S

    async def _tidy(self, thread: ThreadPoolExecutor) -> None:
        """Now and then, between rounds, and a little at a time."""
        if self._is_stopping:
            return
        in_thread = partial(asyncio.get_running_loop().run_in_executor, thread)
        now_s, has_more = self._clock.monotonic_s(), False
        is_due = now_s - self._tidied_s >= self.limits.tidy_s
        try:
            await in_thread(self.writer.merge)
            has_more = is_due and await in_thread(self.writer.tidy, self.limits.kept_ms)
        except BackendError as error:
            _LOG.info("old messages of the retry log stay for now: %s", error)
        if is_due and not has_more:
            self._tidied_s = now_s

    def stop(self) -> None:
        """Take no more, and end when nobody waits."""
        self._is_stopping = True
        self._awake()

    def _idle_s(self) -> float:
        now_ms = self._clock.now_ms()
        dues = [row[0].due_ms - now_ms for row in self._due.values() if row]
        return min(max(min(dues, default=_IDLE_S * 1000), 0) / 1000, _IDLE_S)

    async def _round(self, thread: ThreadPoolExecutor) -> None:
        waiting, due = self._take(), self._take_due()
        if not waiting and not due:
            return
        sent = [one.sent for one in waiting]
        sent += [delivered(record) for one in due for record in one.records]
        work = partial(self.writer.commit, sent, due)
        try:
            made = await asyncio.get_running_loop().run_in_executor(thread, work)
        except BaseException:
            self._waiting.extendleft(reversed(waiting))  # those who still wait
            raise
        self.trouble = ""
        self._done(waiting, due, made)

    def _take(self) -> list[_Waiting]:
        """Of those who still wait so many as a round holds."""
        taken: list[_Waiting] = []
        size = 0
        while self._waiting and size < self.limits.round_bytes:
            one = self._waiting.popleft()
            if not one.done.done():
                taken.append(one)
                size += one.size_bytes
        return taken

    def _take_due(self) -> list[DueTogether]:
        """What is due, as much as a round holds; it stays where it is until that is durable."""
        if self._is_stopping:
            return []
        now_ms, size = self._clock.now_ms(), 0
        taken: list[DueTogether] = []
        for row in self._due.values():
            for one in row:
                if one.due_ms > now_ms or size >= self.limits.round_bytes:
                    break
                taken.append(one)
                size += one.size_bytes
        return taken

    def _done(
        self, waiting: Iterable[_Waiting], due: Iterable[DueTogether], made: Sequence[Record]
    ) -> None:
        """A round is durable."""
        for one in due:
            self._due[one.queue].popleft()
            self._count -= len(one.records)
            self._bytes -= one.size_bytes
            self.delivered += len(one.records)
        gathered: dict[MessageQueue, list[Record]] = {}
        for record in made:
            gathered.setdefault(MessageQueue(record.topic, record.queue_id), []).append(record)
        taken = {queue: iter(rows) for queue, rows in gathered.items()}
        for wait in waiting:
            self.accepted += 1
            record = next(taken[wait.sent[0]])
            if not wait.done.done():
                wait.done.set_result(record)
        for queue, rows in gathered.items():
            if queue.topic == SCHEDULE_TOPIC:
                when, end = due_ms(queue, rows[0].store_timestamp_ms), rows[-1].queue_offset + 1
                self._hold(DueTogether(queue, when, QueueOffset(end), rows))
            else:
                self.on_moved(queue)

    def note(self, error: Exception) -> None:
        """Nothing can be kept at the moment, and is tried again. From any thread; told once of each row of failures."""
        if not self.trouble:
            _LOG.warning("messages that are sent back are not kept, trying again: %s", error)
        self.trouble = str(error)

    # -- reading: the local side of the mount's message store ----------------------------------------

    def queues(self) -> dict[MessageQueue, QueueBounds]:
        """The queues that consumers read, as they are durable."""
        found = {queue: self.bounds(queue) for queue in self.writer.state.queues}
        return {queue: bounds for queue, bounds in found.items() if bounds is not None}

    def bounds(self, queue: MessageQueue) -> QueueBounds | None:
        """Of one of them."""
        now = self.writer.state.incarnation(queue)
        if now is None or queue.topic == SCHEDULE_TOPIC:
            return None
        return QueueBounds(now.min_offset, now.commit_offset)

    def refresh(self) -> None:
        """What is durable is known."""

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        """As of ``LocalStore.read``; from the tier's store."""
        reader = self.writer.reader
        if reader.present(queue) is None:
            return None
        found = reader.queue(queue).read(start, bytes_max=bytes_max, count_max=count_max)
        return found.records if isinstance(found, TierBatch) else None

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> QueueOffset:
        """First queue offset whose store time is not earlier; the end when there is none."""
        if self.writer.reader.present(queue) is None:
            return QueueOffset(0)
        return self.writer.reader.queue(queue).offset_by_time(timestamp_ms)

    def record_at(self, place: int) -> Record | None:
        """The record at a place of the log (``place_of``); None: there is none."""
        offset = place & ((1 << _OFFSET_BITS) - 1)
        for queue, bounds in self.queues().items():
            if place_of(queue, offset) == place and bounds.min <= offset < bounds.end:
                return next(self.writer.reader.records(queue, offset, offset + 1), None)
        return None


def stored_by(record: Record, address: str) -> Record:
    """A record as stored by the broker at this address; as it is, where that is not one of numbers."""
    try:
        offset_msg_id(address, 0)
    except ValueError:
        return record
    v6 = sysflag.STORE_HOST_V6 if is_v6(address) else 0
    flags = record.sys_flag & ~sysflag.STORE_HOST_V6 | v6
    return replace(record, store_host=address, sys_flag=flags)


def consumed_of(known: Mapping[tuple[str, str], Mapping[int, int]], queue: MessageQueue) -> int:
    """Up to where the group of a retry topic was, by offsets of groups; of dead letters nothing counts as consumed."""
    group = queue.topic.removeprefix(RETRY_PREFIX)
    return known.get((group, queue.topic), {}).get(queue.queue_id, 0)
