"""The log directories of one Kafka node behind the interface of local stores, running or stopped, read-only.

**Contract.** A queue is a partition. Its records are batches, byte for byte: an item for each offset that a batch covers,
whatever the cleaner has left in it; the offsets between two batches are holes (``COMPACTED``), more than ``HOLES_MAX`` in a
row a gap. Where bytes that are no sound batch lie between two sound ones, the offsets between are ``DAMAGED``.
The physical offset of an item is the byte of its segment's file at which its batch begins.

Up to where offsets are committed, the files of each directory say:

=============================================== ==================================================================
the node runs on it (``.lock`` is locked)       the high watermark that it wrote last, at most 5 s ago
it was stopped (``.kafka_cleanshutdown``)       the high watermark
neither: it has crashed                         where its next start will cut the log (``kafka_files.recovered_end``)
=============================================== ==================================================================

Never beyond the last sound batch that ends there, and never lower than before unless the log itself was cut. What is known
of a partition is a *view*, made anew when its folder or its high watermark changes, and before anything that cannot be read
is called damage. A file that was renamed or taken away under a read is looked for again; one that the cleaner has made
anew is another file.

Methods may be called from any thread. One lock guards the views; records are read without it. Nothing is written, renamed
or locked in the directories (I10). After a crash there is nothing to clean up.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.clock import Clock, SystemClock
from tiered.errors import ClosedError, InvalidError
from tiered.format.kafka_batch import (
    BATCH_BYTES_MAX,
    CONTROL,
    HEADER,
    MAGIC,
    TRANSACTIONAL,
    BatchBlock,
    BatchFault,
    check_checksums,
    decode_records,
    sound_batches,
    times_ms,
    walk_batches,
)
from tiered.format.kafka_log import INDEX_ENTRY, TIME_ENTRY, LeaderEpochs, follow_transactions
from tiered.format.record_kind import Mark, RecordKind, tag_codes
from tiered.local.classification import AnomalyCounters, hole_counter
from tiered.local.interface import (
    HoleReason,
    LeaderEpoch,
    Lineage,
    OpenTransaction,
    PartitionFollower,
    Quarantined,
    RecordBatch,
    StoreIdentity,
    StoreReport,
    Waiting,
)
from tiered.local.kafka_files import (
    LogDirectory,
    LogSegment,
    entry_before,
    is_log_directory,
    log_start,
    read_epochs,
    read_log_directory,
    read_topic_id,
    recovered_end,
    segments_of,
    transactions_before,
)
from tiered.local.layout import is_locked
from tiered.local.mapped_file_queue import FileCache, directory_stamp, stat_if_there
from tiered.local.queue_reader import fill_times
from tiered.model import MessageQueue, PhysicalOffset, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import TypeVar

    import numpy.typing as npt
    from typing_extensions import Buffer

    from tiered.format.kafka_batch import Flags, Longs

    _Found = TypeVar("_Found")
    _Mark = tuple[object, ...]

HOLES_MAX: Final = 65_536
"""Offsets in a row without a batch: so many are holes, item by item; more are a gap, which is a range."""
_FILES_OPEN_MAX: Final = 64
_LOOK_AGAIN_S: Final = 1.0
_TRIES: Final = 5
_FAR: Final = 1 << 62
_WINDOW_BYTES: Final = 64 << 10
_WINDOW_BYTES_MAX: Final = 8 << 20
_BOUND_BYTES: Final = 64 << 10
_RAW_BYTES_MAX: Final = 4 << 20
"""What is kept of a row of damaged bytes."""
_RECORDS_BYTES_MAX: Final = 1 << 30
_MARKS_MAX: Final = 4096
_LOOK_BYTES: Final = 1 << 20
_EMPTY_BYTES: Final = 17
_NO_EPOCH: Final = -1
_LEGACY: Final = "batches of before Kafka 0.11"
_FAULTS: Final = {
    BatchFault.OK: "a batch whose offsets are not between those of its neighbours",
    BatchFault.MAGIC: "a batch of an unknown magic",
    BatchFault.CRC: "a batch that fails its checksum",
}


def is_kafka(path: str) -> bool:
    """Whether a directory is a log directory of a Kafka node."""
    return is_log_directory(path)


class _StaleError(Exception):
    """A file is not any more what it was when its folder was looked at."""


class _State(Enum):
    """What a directory's node does."""

    LIVE = "live"
    STOPPED = "stopped"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class _Directory:
    """A look at a log directory."""

    log: LogDirectory
    state: _State
    stamp: tuple[object, object]  # changes when a file of it does


def _stamp(path: str) -> tuple[object, object]:
    return directory_stamp(path), directory_stamp(f"{path}/replication-offset-checkpoint")


def _look_at(path: str) -> _Directory:
    """The lock before and after: what is read between may be of a node that stops, or starts, just now."""
    stamp, was_live = _stamp(path), is_locked(path, ".lock")
    log = read_log_directory(path)
    if was_live or is_locked(path, ".lock"):
        return _Directory(log, _State.LIVE, stamp)
    return _Directory(log, _State.STOPPED if log.was_stopped_cleanly else _State.CRASHED, stamp)


def _refuse_others(logs: Sequence[LogDirectory]) -> None:
    """Raise InvalidError unless all are of one node."""
    first = logs[0]
    for log in logs:
        if log.cluster is None:
            raise InvalidError(
                "not a log directory of Kafka: no cluster.id in its meta.properties",
                where=log.path,
                do="name a directory of log.dirs",
            )
        if (log.cluster, log.node) != (first.cluster, first.node):
            raise InvalidError(
                f"log directories of two nodes: node {first.node} of cluster {first.cluster}, and"
                f" node {log.node} of cluster {log.cluster}",
                where=f"{first.path} and {log.path}",
                do="attach each node by itself",
            )


def _refuse_twice(logs: Sequence[LogDirectory]) -> None:
    """Raise InvalidError where two directories have the same partition."""
    owners = dict[MessageQueue, str]()
    for queue, folder in (item for log in logs for item in log.folders.items()):
        if queue in owners:
            raise InvalidError(
                f"partition {queue} is in two log directories",
                where=f"{owners[queue]} and {folder}",
                do="leave out the directory that the node does not use, or wait until the node has moved it",
            )
        owners[queue] = folder


@dataclass(frozen=True, slots=True)
class _PartitionView:
    """What is known of a partition."""

    queue: MessageQueue
    folder: str
    seen: tuple[object, ...]  # of what the rest was made
    topic_id: str | None
    epochs: LeaderEpochs
    segments: tuple[LogSegment, ...]  # at least one
    bases: tuple[int, ...]  # where they begin
    state: _State
    high: int  # the high watermark; 0: none was written
    generation: int  # how often it has fallen
    min: int = 0
    end: int = 0
    place: tuple[int, int] = (0, 0)
    """Where ``end`` lies: the number of the segment, and the byte in it."""

    def number_of(self, offset: int) -> int:
        """The segment that holds an offset; -1 below the first."""
        return bisect_right(self.bases, offset) - 1

    def end_of(self, number: int) -> int:
        """One past the last offset that is wanted of a segment."""
        return min([self.end, *self.bases[number + 1 : number + 2]])

    def is_as(self, old: _PartitionView) -> bool:
        """Whether nothing differs of what bounds are made of."""
        if self.state is _State.CRASHED and self.segments != old.segments:
            return False
        return replace(self, min=old.min, end=old.end, place=old.place).says_as(old)

    def says_as(self, old: _PartitionView) -> bool:
        """Whether nothing differs but what the last segment has got."""
        mine, other = self.segments[-1], old.segments[-1]
        return (
            replace(self, segments=()) == replace(old, segments=())
            and self.segments[:-1] == old.segments[:-1]
            and (mine.path, mine.inode) == (other.path, other.inode)
            and mine.size_bytes >= other.size_bytes
        )

    def mark(self, number: int, offset: int) -> _Mark:
        """By what a place in a segment is remembered: numbers of files that are gone are given again."""
        segment = self.segments[number]
        sealed = () if number + 1 == len(self.segments) else segment[2:]
        return self.queue, self.generation, segment.inode, sealed, offset

    def goes_on_from(self, old: _PartitionView) -> bool:
        """Whether it is the same log: what it had below the old end stands as it was."""
        low = max(old.min, self.bases[0])
        return (
            self.topic_id == old.topic_id
            and _inode(self.seen) == _inode(old.seen)
            and list(_epochs(self.epochs, low, old.end)) == list(_epochs(old.epochs, low, old.end))
        )

    def epochs_at(self, offsets: Longs) -> Longs:
        """The leader epoch of each offset; -1: not known."""
        known = np.array([-1, *self.epochs.epochs], np.int64)
        found: Longs = known[np.searchsorted(self.epochs.starts, offsets, side="right")]
        return found


def _inode(seen: tuple[object, ...]) -> object:
    stamp = seen[0]
    return stamp[0] if isinstance(stamp, tuple) else None


def _epochs(epochs: LeaderEpochs, low: int, end: int) -> Iterator[LeaderEpoch]:
    """The epochs of ``[low, end)``."""
    ends = (*epochs.starts, _FAR)[1:]
    for number, start, stop in zip(epochs.epochs, epochs.starts, ends, strict=True):
        if start < end and stop > max(start, low):
            yield LeaderEpoch(number, max(start, low))


class _Window(NamedTuple):
    """A part of a segment."""

    block: BatchBlock  # its sound batches that are of the offsets wanted
    at: int  # byte of the file at which the buffer begins
    offset: int  # at which the first batch begins, or later
    end: int  # byte of the buffer up to which this is decided
    is_all: bool  # nothing more of the segment is wanted
    is_behind_damage: bool  # bytes before it belong to no sound batch

    @property
    def byte_ends(self) -> Longs:
        """int64[n + 1], where in the buffer what is before each batch ends, and the last one."""
        return np.append(0, self.block.positions + self.block.sizes)

    @property
    def offset_ends(self) -> Longs:
        """int64[n + 1], one past the last offset before each batch, and of the last one."""
        return np.append(self.offset, self.block.last_offsets + 1)


class KafkaStore:
    """The partitions of a node's log directories."""

    @classmethod
    def open(
        cls,
        *directories: str | os.PathLike[str],
        clock: Clock | None = None,
        stop: Callable[[], bool] = lambda: False,
        files_open_max: int = _FILES_OPEN_MAX,
    ) -> KafkaStore:
        """Open directories of a node's ``log.dirs``.

        Args:
            stop: Asked before each read of the opening, which may read much of what a crash has left: it then ends with
                ``ClosedError``.
        """
        paths = [os.fspath(directory) for directory in directories]
        return cls(paths, clock or SystemClock(), stop, files_open_max)

    def __init__(
        self, paths: Sequence[str], clock: Clock, stop: Callable[[], bool], files_open_max: int
    ) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._cache = FileCache(files_open_max)
        self._anomalies = AnomalyCounters()
        self._views: dict[MessageQueue, _PartitionView] = {}
        self._bounds: Mapping[MessageQueue, QueueBounds] = {}
        self._gone: set[MessageQueue] = set()
        self._falls: dict[MessageQueue, int] = {}
        self._marks: OrderedDict[_Mark, int] = OrderedDict()
        self._is_closed = False
        self._cache.stop, go_on = stop, self._cache.stop
        try:
            self._directories = [_look_at(path) for path in paths]
            logs = [found.log for found in self._directories]
            _refuse_others(logs)
            _refuse_twice(logs)
            self._take_all()
        except BaseException:
            self._cache.close()
            raise
        self._cache.stop = go_on

    # -- the interface ---------------------------------------------------------------------------

    @property
    def identity(self) -> StoreIdentity:
        with self._lock:
            logs = [found.log for found in self._directories]
            return StoreIdentity(
                cluster=logs[0].cluster,
                broker=f"kafka-{logs[0].node}",
                # Not of the directories: a node may be given more of them, or lose one.
                store_id=f"kafka:{logs[0].cluster}/{logs[0].node}",
                kind="kafka",
                is_live=any(found.state is _State.LIVE for found in self._directories),
            )

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        return self._bounds

    def refresh(self) -> None:
        with self._lock:
            self._directories = [_look_at(found.log.path) for found in self._directories]
            self._take_all(lists=True)

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        def read(view: _PartitionView) -> _Read | None:
            if start >= view.end:
                return None
            found = self._read_in(view, max(start, view.min), (bytes_max, count_max))
            if found.is_odd and self._look_again(queue) is not view:
                raise _StaleError
            return found

        found = self._steadily(queue, read)
        if found is None or found.batch is None:
            return None
        for note in found.notes:
            self._anomalies.note(note)
        for one in found.batch.quarantined:
            self._anomalies.hole(queue, one.queue_offset, HoleReason.DAMAGED)
        return found.batch

    def read_compacted(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> None:
        """See ``LocalStore``: the cleaner leaves what is left where it was."""

    def follow(
        self,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> PartitionFollower:
        return PartitionFollower(self, starts, stop)

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> QueueOffset:
        """See ``LocalStore``. As a node has it: the first record whose own time is at or after it."""
        found = self._steadily(queue, lambda view: self._offset_by_time(view, timestamp_ms))
        return QueueOffset(found or 0)

    def lineage(self, queue: MessageQueue, at: QueueOffset | None = None) -> Lineage | None:
        return self._steadily(queue, lambda view: self._lineage(view, at))

    def waiting(self) -> Waiting:
        with self._lock:
            found = [one for view in self._views.values() if (one := self._waiting(view))]
        damaged = [one for one in found if one.is_behind_damage]
        reason = next((one.reason for one in damaged or found), "")
        return Waiting(
            sum(one.records for one in found),
            sum(one.size_bytes for one in found),
            reason,
            bool(damaged),
        )

    def report(self) -> StoreReport:
        with self._lock:
            views, counters = list(self._views.values()), self._anomalies.counts()
            left_out = [one for found in self._directories for one in found.log.left_out]
        torn = [self._behind(view) for view in views if view.state is _State.CRASHED]
        return StoreReport(
            log_min=PhysicalOffset(0),
            log_end=PhysicalOffset(sum(one.size_bytes for view in views for one in view.segments)),
            torn_bytes=sum(torn),
            damaged_records=counters.get(hole_counter(HoleReason.DAMAGED), 0),
            left_out=left_out,
            notes=self._anomalies.notes(),
            counters=counters,
        )

    def close(self) -> None:
        self._is_closed = True
        self._cache.close()

    # -- for the follower ------------------------------------------------------------------------

    def look(self) -> None:
        """See ``PartitionStore``: the checkpoints with each call, folders and locks once a second."""
        if self._is_closed:
            raise ClosedError("the local store has been closed")
        with self._lock:
            is_due = self._clock.monotonic_s() >= self._looked_s + _LOOK_AGAIN_S
            for number, found in enumerate(self._directories):
                path = found.log.path
                is_other = found.stamp != _stamp(path)
                if is_due and not is_other:
                    is_other = is_locked(path, ".lock") is not (found.state is _State.LIVE)
                if is_other:
                    self._directories[number], is_due = _look_at(path), True
            if is_due:
                self._take_all()

    def fallen_since(self, count: int) -> tuple[int, Collection[MessageQueue]]:
        """See ``PartitionStore``."""
        with self._lock:
            fallen = [queue for queue, number in self._falls.items() if number > count]
            return max(self._falls.values(), default=0), fallen

    # -- views -----------------------------------------------------------------------------------

    def _view(self, queue: MessageQueue) -> _PartitionView | None:
        if self._is_closed:
            raise ClosedError("the local store has been closed")
        with self._lock:
            return self._views.get(queue)

    def _steadily(
        self, queue: MessageQueue, work: Callable[[_PartitionView], _Found]
    ) -> _Found | None:
        """What is found in a partition whose files stay as they are meanwhile; None: there is no such partition."""
        for _ in range(_TRIES):
            view = self._view(queue)
            if view is None:
                return None
            try:
                return work(view)
            except _StaleError:
                self._look_again(queue)
        raise InvalidError(
            f"the files of partition {queue} change faster than they can be read",
            do="look what changes them",
        )

    def _take_all(self, *, lists: bool = False) -> None:
        """Make the views anew whose partitions have changed. The lock is held.

        Args:
            lists: List the folders, even where they do not look changed.
        """
        self._looked_s = self._clock.monotonic_s()
        _refuse_others([found.log for found in self._directories])
        self._cache.drop_deleted()
        before = dict(self._views)
        for number in range(len(self._directories)):
            self._take(number, lists=lists)
        folders = {folder for one in self._directories for folder in one.log.folders.values()}
        for queue, view in before.items():
            if view.folder not in folders and self._views.get(queue) is view:
                self._forget(queue)
        if before != self._views or not self._bounds:
            self._publish()

    def _take(self, number: int, *, lists: bool, only: MessageQueue | None = None) -> None:
        """Take in what a directory has; once more where its node has started meanwhile, so that nothing was proven."""
        while True:
            found = self._directories[number]
            for queue in found.log.folders if only is None else {only} & found.log.folders.keys():
                self._update(queue, found, lists=lists, anew=only is not None)
            path = found.log.path
            if found.state is not _State.CRASHED or not is_locked(path, ".lock"):
                return
            self._directories[number] = _look_at(path)

    def _publish(self) -> None:
        self._bounds = {
            queue: QueueBounds(QueueOffset(view.min), QueueOffset(view.end))
            for queue, view in self._views.items()
        }

    def _forget(self, queue: MessageQueue) -> None:
        del self._views[queue]
        self._gone.add(queue)

    def _look_again(self, queue: MessageQueue) -> _PartitionView | None:
        """The view of a partition as its files are now; the same one, if nothing has changed."""
        with self._lock:
            old = self._views.get(queue)
            for number, found in enumerate(self._directories):
                if queue in found.log.folders:
                    self._directories[number] = _look_at(found.log.path)
                    self._take(number, lists=True, only=queue)
            now = self._views.get(queue)
            if now is not None and now is old and stat_if_there(now.folder) is None:
                self._forget(queue)
                now = None
            if now is not old:
                self._publish()
            return now

    def _update(
        self, queue: MessageQueue, found: _Directory, *, lists: bool, anew: bool = False
    ) -> None:
        """Make the view of a partition, if it has changed. The lock is held.

        Args:
            anew: Look for its end, even where nothing looks changed.
        """
        old, folder = self._views.get(queue), found.log.folders[queue]
        if old is not None and old.folder != folder and stat_if_there(old.folder) is not None:
            return  # being moved from one directory to the other
        for _ in range(_TRIES):
            if (seen := _seen(found, queue)) is None:
                return
            if old is not None and old.seen == seen and not lists:
                return
            new = _look_into(queue, found, seen, 0 if old is None else old.generation)
            if new is None:
                if old is not None:
                    self._forget(queue)
                return
            if old is not None and not anew and new.is_as(old):
                return
            try:
                new = self._with_bounds(new, old, found)
            except _StaleError:
                continue
            if old is None or not new.says_as(old):
                self._views[queue] = new
            return

    def _with_bounds(
        self, view: _PartitionView, old: _PartitionView | None, found: _Directory
    ) -> _PartitionView:
        """The view with its bounds; note whether it has fallen."""
        queue, log, kept = view.queue, found.log, 0
        is_new = (old is not None and not view.goes_on_from(old)) or queue in self._gone
        if old is not None and not is_new:
            kept = old.end
        view = replace(view, generation=view.generation + is_new)
        least = log_start(list(view.segments), log.log_starts.get(queue))
        if view.state is _State.CRASHED:
            point = log.recovery_points.get(queue, 0)
            end, base, at = recovered_end(view.segments, point, self._part)
            number = view.bases.index(base)
        elif max(view.high, kept) > 0:
            end, number, at = self._bound(view, max(view.high, kept), kept)
        else:
            end, number, at = least, max(view.number_of(least), 0), 0
        if is_new or end < kept:
            self._gone.discard(queue)
            self._falls[queue] = max(self._falls.values(), default=0) + 1
            view = replace(view, generation=view.generation + 1)
        self._mark(view, number, end, at)
        return replace(view, min=least, end=max(least, end), place=(number, at))

    def _bound(self, view: _PartitionView, limit: int, near: int = 0) -> tuple[int, int, int]:
        """Where the last sound batch ends that ends at ``limit`` or before: an offset, a segment, a byte.

        ``near``: an offset at which another one ends.
        """
        number = view.number_of(limit)
        if number < 0:
            return view.bases[0], 0, 0
        base, end, at = view.bases[number], view.bases[number], 0
        for place in dict.fromkeys((self._seek(view, number, limit, near), (0, base))):
            for window in self._windows(view, number, place, _LOOK_BYTES, limit):
                if len(window.block):
                    end = int(window.offset_ends[-1])
                    at = window.at + int(window.byte_ends[-1])
            if end > base:
                break
        return end, number, at

    # -- reading ---------------------------------------------------------------------------------

    def _part(self, segment: LogSegment, at: int, size: int) -> memoryview:
        """Bytes of a segment, fewer at its end."""
        view = np.empty(size, np.uint8).data
        count = self._cache.read_same(segment.path, segment.inode, at, view)
        if count is None:
            raise _StaleError
        return view[:count]

    def _windows(
        self, view: _PartitionView, number: int, place: tuple[int, int], size: int, end: int
    ) -> Iterator[_Window]:
        """The sound batches of a segment with offsets below ``end``, window by window.

        Args:
            place: A byte at which a batch begins, and an offset that it has, or one before its first.
        """
        segment, wanted, is_behind_damage = view.segments[number], size, False
        at, offset = place
        while True:
            asked = min(size, max(0, segment.size_bytes - at) + _WINDOW_BYTES)  # it may have grown
            data = self._part(segment, at, asked)
            is_whole = len(data) < asked
            if is_whole and at + len(data) < segment.size_bytes:
                raise _StaleError
            found = sound_batches(data, offset, end, is_whole=is_whole)
            window = _Window(found.block, at, offset, found.end, found.is_all, is_behind_damage)
            yield window
            if window.is_all:
                return
            if len(found.block):
                at, offset, size = at + found.end, int(window.offset_ends[-1]), wanted
                is_behind_damage = False
                continue
            behind = at + len(data)
            is_begun = any(data[:_EMPTY_BYTES])  # a batch may be longer, and have holes in it
            data_at = behind if is_begun else self._cache.next_data(segment.path, behind)
            if data_at is None:  # zeros go on to the end
                yield window._replace(is_all=True, end=len(data))
                return
            if data_at > behind:
                at, is_behind_damage = data_at, True
            elif size < BATCH_BYTES_MAX:
                size = min(size * 4, BATCH_BYTES_MAX)
            else:
                at, is_behind_damage = at + size // 2, True

    def _seek(
        self, view: _PartitionView, number: int, offset: int, near: int | None = None
    ) -> tuple[int, int]:
        """A byte of a segment at which a batch begins, near before an offset; and an offset that no batch before it has.

        ``near``: a lower offset that may be remembered.
        """
        segment = view.segments[number]
        if offset <= segment.base_offset:
            return 0, segment.base_offset
        found = 0, segment.base_offset
        for known in (offset, near or 0):
            with self._lock:
                at = self._marks.get(view.mark(number, known))
            if at is not None and known <= offset:
                if known == offset:
                    return at, known
                found = at, known
        relative = offset - segment.base_offset
        entry = entry_before(f"{segment.path[:-4]}.index", INDEX_ENTRY, "offset", relative)
        if entry is not None and found[0] < entry["position"] < segment.size_bytes:
            head = self._part(segment, entry["position"], HEADER.itemsize)
            if len(head) == HEADER.itemsize:
                says = np.frombuffer(head, HEADER)[0]
                first, last = int(says["base_offset"]), entry["offset"] + segment.base_offset
                is_so = first + int(says["last_offset_delta"]) == last and says["magic"] == MAGIC
                if is_so and segment.base_offset <= first <= last:
                    return entry["position"], first
        return found

    def _mark(self, view: _PartitionView, number: int, offset: int, at: int) -> None:
        """Remember that what is below an offset ends at a byte of a segment."""
        with self._lock:
            self._marks[view.mark(number, offset)] = at
            if len(self._marks) > _MARKS_MAX:
                self._marks.popitem(last=False)

    def _read_in(self, view: _PartitionView, start: int, limits: tuple[int, int]) -> _Read:
        """The next batch of a partition's view."""
        for number in range(max(view.number_of(start), 0), len(view.segments)):
            start = max(start, view.bases[number])
            if start >= view.end:
                break
            place = self._seek(view, number, start)
            size = min(max(limits[0], _WINDOW_BYTES), _WINDOW_BYTES_MAX)
            for window in self._windows(view, number, place, size, view.end_of(number)):
                if window.is_all or (window.block.last_offsets >= start).any():
                    read = self._read_window(view, number, window, start, limits)
                    if read is not None:
                        return read
        return _Read(None, is_odd=True)

    def _read_window(
        self,
        view: _PartitionView,
        number: int,
        window: _Window,
        start: int,
        limits: tuple[int, int],
    ) -> _Read | None:
        """What a window has from ``start`` on; None: nothing, or a gap up to the next segment."""
        units = _Units(view, number, window, start)
        count = units.count(*limits)
        if not count:
            return None
        batch, notes = units.batch(count)
        at = int(window.byte_ends[units.low + min(count, units.batches)])
        if count <= units.batches:
            self._mark(view, number, batch.end_offset, window.at + at)
        return _Read(batch, is_odd=bool(batch.quarantined) or bool(notes), notes=notes)

    # -- times, transactions, what waits ---------------------------------------------------------

    def _offset_by_time(self, view: _PartitionView, time_ms: int) -> int:
        for number in range(max(view.number_of(view.min), 0), len(view.segments)):
            end = view.end_of(number)
            place = self._place_by_time(view, number, time_ms) if view.bases[number] < end else None
            if place is None:
                continue
            for window in self._windows(view, number, place, _LOOK_BYTES, end):
                block = window.block
                reaches = block.column("max_timestamp") >= time_ms
                for batch in np.flatnonzero(reaches & (block.last_offsets >= view.min)).tolist():
                    records = decode_records(block, [batch], bytes_max=_RECORDS_BYTES_MAX)
                    is_late = (records.timestamps_ms >= time_ms) & (records.offsets >= view.min)
                    if is_late.any():
                        return int(records.offsets[np.argmax(is_late)])
        return view.end

    def _place_by_time(
        self, view: _PartitionView, number: int, time_ms: int
    ) -> tuple[int, int] | None:
        """From where on a segment may have records of a time or later; None: it has none."""
        path = f"{view.segments[number].path[:-4]}.timeindex"
        if number + 1 < len(view.segments):  # sealed: its last entry has the largest time
            last = entry_before(path, TIME_ENTRY, "timestamp", _FAR)
            if last and last["timestamp"] < time_ms and self._place_of(view, number, last):
                return None
        entry = entry_before(path, TIME_ENTRY, "timestamp", time_ms)
        found = self._place_of(view, number, entry) if entry else None
        return found or (0, view.bases[number])

    def _place_of(
        self, view: _PartitionView, number: int, entry: Mapping[str, int]
    ) -> tuple[int, int] | None:
        """Where the batch lies that an entry of a time index is about; None: what it says is not so."""
        offset = view.bases[number] + entry["offset"]
        place, end = self._seek(view, number, offset), view.end_of(number)
        for window in self._windows(view, number, place, _BOUND_BYTES, end):
            at = int(np.searchsorted(window.block.last_offsets, offset))
            if at < len(window.block):
                is_so = window.block.headers["max_timestamp"][at] == entry["timestamp"]
                first = int(window.block.base_offsets[at])
                return (window.at + int(window.block.positions[at]), first) if is_so else None
        return None

    def _lineage(self, view: _PartitionView, at: int | None) -> Lineage:
        epochs = tuple(_epochs(view.epochs, 0, view.end))
        opened = self._open_at(view, min(at, view.end)) if at else {}
        transactions = tuple(OpenTransaction(*one) for one in sorted(opened.items()))
        return Lineage(view.topic_id, epochs, transactions)

    def _open_at(self, view: _PartitionView, at: int) -> Mapping[int, int]:
        """The first offset of each transaction that is open at an offset, by producer: from a snapshot, and a walk."""
        start, opened = transactions_before(view.folder, at) or (view.bases[0], {})
        last = max(view.number_of(at), 0)
        for number in range(max(view.number_of(start), 0), last + 1):
            place = self._seek(view, number, max(start, view.bases[number]))
            for window in self._windows(view, number, place, _LOOK_BYTES, at):
                block = window.block.some(window.block.last_offsets >= start)
                opened, _ = follow_transactions(opened, block)
        return opened

    def _behind(self, view: _PartitionView) -> int:
        """Bytes behind the end, unless they are zeros."""
        number, at = view.place
        found = [stat_if_there(segment.path) for segment in view.segments[number:]]
        size = sum(one.st_size for one in found if one is not None) - at
        try:
            head = bytes(self._part(view.segments[number], at, _EMPTY_BYTES))
        except _StaleError:
            return 0  # as good as any: it is looked at again
        return size if any(head) or len(found) > 1 else 0

    def _waiting(self, view: _PartitionView) -> Waiting | None:
        """What of a partition waits; None: nothing."""
        number, at = view.place
        size, name = self._behind(view), f"{view.queue} from {view.end} on"
        if view.high > view.end and not size:
            lost = f"{name} is gone: the high watermark is {view.high}"
            return Waiting(view.high - view.end, 0, lost, is_behind_damage=True)
        if not size:
            return None
        try:
            records = max(0, self._bound(view, _FAR)[0] - view.end)
            window = next(self._windows(view, number, (at, view.end), _BOUND_BYTES, _FAR))
        except _StaleError:
            return None
        block, where = window.block, f"{view.segments[number].path}, byte {at}"
        is_next = len(block) > 0 and int(block.base_offsets[0]) == view.end
        if view.state is _State.CRASHED:
            said = (
                f"{name} lies behind a damaged batch ({where}), where the node's start cuts the log"
            )
            records = max(records, view.high - view.end)
            return Waiting(records, size, said, is_behind_damage=True) if records > 0 else None
        if is_next or view.high <= view.end:
            return Waiting(max(records, 1), size, f"{name} is above the high watermark")
        said = f"{name} is below the high watermark {view.high}, and no sound batch ({where})"
        return Waiting(max(records, 1), size, said, view.state is _State.STOPPED)


def _seen(found: _Directory, queue: MessageQueue) -> tuple[object, ...] | None:
    """What decides on the view of a partition; None: its folder is gone."""
    stamp, log = directory_stamp(found.log.folders[queue]), found.log
    if stamp is None:
        return None
    marks = (log.high_watermarks, log.log_starts, log.recovery_points)
    is_crashed = found.state is _State.CRASHED
    return stamp, found.state, *(one.get(queue) for one in marks[: 2 + is_crashed])


def _look_into(
    queue: MessageQueue, found: _Directory, seen: tuple[object, ...], generation: int
) -> _PartitionView | None:
    """A partition's view without its bounds; None: it has no segments yet."""
    folder = found.log.folders[queue]
    segments = tuple(segments_of(folder))
    if not segments:
        return None
    return _PartitionView(
        queue,
        folder,
        seen,
        read_topic_id(folder),
        read_epochs(folder),
        segments,
        tuple(segment.base_offset for segment in segments),
        found.state,
        max(0, found.log.high_watermarks.get(queue, 0)),
        generation,
    )


class _Read(NamedTuple):
    """What was read of a partition."""

    batch: RecordBatch | None
    is_odd: bool  # it is not as it should be: look again whether the files have changed
    notes: tuple[str, ...] = ()


class _Units:
    """What a window has from an offset on, unit by unit: holes, and the batch behind them. The last one has holes alone."""

    def __init__(self, view: _PartitionView, number: int, window: _Window, start: int) -> None:
        block, end = window.block, int(window.offset_ends[-1])
        if window.is_all and number + 1 < len(view.segments):
            end = max(end, view.end_of(number))  # of the last segment is never more than it has
        self._view, self._window, self._start = view, window, start
        self._path = view.segments[number].path
        self.low = low = int(np.searchsorted(block.last_offsets, start))
        self.batches = len(block) - low
        self._byte_ends, self._before = window.byte_ends[low:], window.offset_ends[low:]
        self._begins = np.append(block.positions, window.end)[low:]
        self._firsts = np.append(block.base_offsets, end)[low:]
        self._holes = np.maximum(self._firsts, start) - np.maximum(self._before, start)
        own = block.last_offsets + 1 - np.maximum(block.base_offsets, start)
        self._own = np.append(own, 0)[low:]
        self._is_damaged: Flags = self._begins > self._byte_ends
        self._is_damaged[0] |= window.is_behind_damage and not low

    def count(self, bytes_max: int, count_max: int) -> int:
        """How many units to take, the first batch at least; 0: there is no item, or nothing but a gap."""
        fits = int(
            np.searchsorted(np.cumsum(self._window.block.sizes[self.low :]), bytes_max, "right")
        )
        begun = int(np.searchsorted(np.cumsum(self._holes + self._own), count_max)) + 1
        count = min(max(fits, 1), begun, self.batches)
        if count == self.batches < begun and self._holes[-1]:
            count += 1
        is_gap = self._holes > HOLES_MAX
        if self.batches and is_gap[0]:  # it begins behind it
            self._holes[0], is_gap[0] = 0, False
        return count if not is_gap.any() else min(count, int(np.argmax(is_gap)))

    def batch(self, count: int) -> tuple[RecordBatch, tuple[str, ...]]:
        """The batch of so many units, and what there is to say of it."""
        block = self._window.block.some(slice(self.low, self.low + min(count, self.batches)))
        holes, own = self._holes[:count], self._own[:count]
        counts = np.stack((holes, own), 1).ravel()

        def spread(of_holes: Longs | int, of_batches: npt.NDArray[np.integer]) -> Longs:
            pairs = np.zeros((count, 2), np.int64)
            pairs[:, 0], pairs[: len(block), 1] = of_holes, of_batches
            return np.repeat(pairs.ravel(), counts)

        epochs = self._view.epochs_at(block.base_offsets)
        said = block.column("leader_epoch")
        epochs = np.where((epochs >= 0) & (said != _NO_EPOCH), epochs, said)
        flags = block.has(TRANSACTIONAL) * np.int64(Mark.TRANSACTIONAL)
        flags += block.has(CONTROL) * np.int64(Mark.CONTROL)
        sizes = spread(0, block.sizes)
        reasons = np.where(self._is_damaged[:count], HoleReason.DAMAGED, HoleReason.COMPACTED)
        first = int(self._firsts[0]) if count and not holes[0] else 0
        made = RecordBatch(
            queue=self._view.queue,
            base_offset=QueueOffset(max(self._start, first)),
            data=_packed(block),
            positions=spread(0, np.cumsum(block.sizes) - block.sizes),
            sizes=sizes.astype(np.int32),
            tag_codes=spread(reasons, tag_codes(RecordKind.KAFKA, epochs, flags)),
            store_timestamps_ms=fill_times(spread(-1, times_ms(block.headers)), sizes > 0),
            physical_offsets=spread(-1, block.positions + self._window.at),
            quarantined=self._quarantined(count),
            topic_id=self._view.topic_id or "",
        )
        return made, self._notes(made, is_wrong_epoch=bool((epochs != said).any()))

    def _quarantined(self, count: int) -> tuple[Quarantined, ...]:
        """The damaged bytes before these units, where their offsets begin in this batch."""
        wanted = self._is_damaged & (self._holes > 0)
        wanted &= np.maximum(self._before, self._view.min) >= self._start
        data = memoryview(self._window.block.buffer)
        kept = []
        for unit in np.flatnonzero(wanted[:count]).tolist():
            start, end = int(self._byte_ends[unit]), int(self._begins[unit])
            detail = f"{_fault_of(data[start:end])}: {end - start} bytes of {self._path}"
            kept.append(
                Quarantined(
                    QueueOffset(max(int(self._before[unit]), self._start)),
                    PhysicalOffset(self._window.at + start),
                    HoleReason.DAMAGED,
                    detail,
                    bytes(data[start : min(end, start + _RAW_BYTES_MAX)]),
                )
            )
        return tuple(kept)

    def _notes(self, made: RecordBatch, *, is_wrong_epoch: bool) -> tuple[str, ...]:
        """What a person should know, once for each partition."""
        queue, found = self._view.queue, []
        if is_wrong_epoch:
            found.append(f"{queue}: leader epochs of batches are not as in leader-epoch-checkpoint")
        if self._is_damaged[0] and made.base_offset - self._start > HOLES_MAX:
            found.append(f"{queue}: more than {HOLES_MAX} offsets in a row are damaged: a gap")
        if any(_LEGACY in one.detail for one in made.quarantined):
            found.append(f"{queue}: has {_LEGACY}, which are not taken")
        return tuple(found)


def _packed(block: BatchBlock) -> Buffer:
    """The bytes of batches, one behind another; without a copy, if little else is in the buffer."""
    if not len(block):
        return b""
    view = memoryview(block.buffer)
    start, end = int(block.positions[0]), int(block.positions[-1] + block.sizes[-1])
    size = int(block.sizes.sum())
    if size == end - start:
        return view[start:end] if size * 2 >= view.nbytes else bytes(view[start:end])
    ends = block.positions + block.sizes
    return b"".join(map(view.__getitem__, map(slice, block.positions.tolist(), ends.tolist())))


def _fault_of(raw: memoryview) -> str:
    """What is wrong with bytes between sound batches, in words."""
    block = walk_batches(raw, 0, len(raw), size_max=BATCH_BYTES_MAX)
    check_checksums(block)
    if len(block) and block.faults[0] == BatchFault.LEGACY:
        return f"{_LEGACY} (its magic is {raw[16]})"
    return _FAULTS[BatchFault(block.faults[0])] if len(block) else "no header of a batch"
