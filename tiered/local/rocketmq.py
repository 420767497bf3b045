"""A RocketMQ store directory behind the fixed face, live or dead, read-only.

**Contract.** ``open`` looks at the directory and refuses by name what it cannot read faithfully. What holds of a
stopped store is decided by ``tiered.local.deadview``, of a running one by ``tiered.local.liveview``; each is one *view*.
When the broker stops or starts (lock, ``abort`` file), or a stopped store's log is changed under us, the view is thrown
away and made anew: looked at with every poll and ``refresh``, the ``abort`` file each time, the rest at most every half
second, and before anything that cannot be read is called a hole. So what a log has lost is never a hole: a queue ends
before it, as it does for the broker that finds it lost. While a broker starts nothing new is proven (``Liveness``).

Methods may be called from any thread. One lock guards the views; reads of records take it only to look up bounds.
Nothing is written, created, renamed or locked in the directory (I10). After a crash there is nothing to clean up.

Who may attach: a user who can read the directory, on the host (and mount) where the broker writes, since the page
cache is what makes fresh bytes visible. A slave's directory may be read as well: it is a copy of its master's.
"""

from __future__ import annotations

import os
import pathlib
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from tiered.clock import Clock, SystemClock
from tiered.errors import ClosedError
from tiered.format import properties
from tiered.format.broker_checkpoint import decode_checkpoint
from tiered.format.record import Record, RecordError, decode_record
from tiered.local.catalog import Catalog, QueueState
from tiered.local.deadview import DeadView
from tiered.local.face import (
    HoleReason,
    RecordBatch,
    StoreIdentity,
    StoreReport,
    Waiting,
)
from tiered.local.follower import RocketMQFollower
from tiered.local.layout import (
    Liveness,
    Topics,
    abort_mark,
    check_contiguous,
    inspect,
    log_file_bytes,
    look,
    read_text,
    read_topics,
)
from tiered.local.liveview import Advance, LiveView
from tiered.local.pieces import LogPieces
from tiered.local.queue_reader import (
    Bounds,
    TagRule,
    UnreadError,
    first_at_or_after,
    first_said,
    read_batch,
)
from tiered.local.rows import FileCache, FileRow, LostPages, list_bases
from tiered.local.verdicts import WRONG_TAG_CODES, Sightings, hole_counter
from tiered.model import MessageQueue, PhysicalOffset, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tiered.format.block import RecordBlock
    from tiered.local.compaction_log import CompactionLogs
    from tiered.local.consumequeues import Entries
    from tiered.local.follower import View
    from tiered.local.matching import Match
    from tiered.local.queue_reader import Fetched


# -- identity -----------------------------------------------------------------------------------------
#
# Which store a directory is: names and a mark of its own.
#
# The mark (``store_id``) is, in this order:
#
# 1. ``identity:<cluster>#<broker>#<id>`` from ``brokerIdentity``, which controller brokers write. It tells the replicas
#    of a broker apart.
# 2. ``rocksdb:<uuid>`` from ``rocksdbstore/IDENTITY``, which every broker since 5.4 makes once, whether or not it uses
#    RocksDB. It survives restarts and goes with a copy of the directory. A directory that was wiped and begun anew has
#    another one; so has a slave.
# 3. ``host:<address of the first record's broker>/<cluster>/<broker>`` for older stores. It does not tell a wiped
#    directory from the one before, and changes when the broker moves to another address.
# 4. Empty when there is nothing to go by: a store without messages of an older broker.
#
# A store that is upgraded to 5.4 or later changes from 3 to 2.

_BROKER_IDENTITY = "brokerIdentity"
_ROCKSDB_IDENTITY = "rocksdbstore/IDENTITY"
_LOOKED_AT_BYTES = 1 << 18
_LOOKED_AT_RECORDS = 64
_IDENTITY_PARTS = 3


@dataclass(frozen=True, slots=True)
class Names:
    """What a directory says of itself."""

    cluster: str | None  # or None
    broker: str | None  # or None
    store_id: str  # see the module
    brokers: tuple[str, ...] = ()  # those that it may be, where it does not say which


def read_names(root: str, log: FileRow, pieces: LogPieces, topics: Topics) -> Names:
    """Find names and mark of the store at ``root``."""
    identity = _broker_identity(root)
    if identity is not None:
        return Names(identity[0], identity[1], "identity:" + "#".join(identity))
    records = _first_records(log, pieces)
    cluster = next(
        (name for record in records if (name := record.properties.get(properties.CLUSTER))),
        topics.cluster,
    )
    store_id = _store_id(root, records, cluster, topics.broker)
    return Names(cluster, topics.broker, store_id, topics.brokers)


def _store_id(root: str, records: list[Record], cluster: str | None, broker: str | None) -> str:
    raw = read_text(f"{root}/{_ROCKSDB_IDENTITY}", 256)
    uuid = (raw or b"").decode("ascii", "replace").strip()
    if uuid:
        return f"rocksdb:{uuid}"
    if not records:
        return ""
    return f"host:{records[0].store_host}/{cluster or ''}/{broker or ''}"


def _broker_identity(root: str) -> tuple[str, str, str] | None:
    raw = read_text(f"{root}/{_BROKER_IDENTITY}", 4096)
    parts = (raw or b"").decode("utf-8", "replace").strip().split("#")
    if len(parts) < _IDENTITY_PARTS or not all(parts[:_IDENTITY_PARTS]):
        return None
    return parts[0], parts[1], parts[2]


def _first_records(log: FileRow, pieces: LogPieces) -> list[Record]:
    """Sound records from the beginning of the first and the last file."""
    found: list[Record] = []
    for base in dict.fromkeys((*log.bases[:1], *log.bases[-2:])):
        piece = pieces.read(base, base + _LOOKED_AT_BYTES, _LOOKED_AT_BYTES, check_crc=False)
        for position in piece.block.positions[:_LOOKED_AT_RECORDS].tolist():
            try:
                found.append(decode_record(piece.block.buffer, position))
            except RecordError:
                continue
    return found


# -- rocketmq --------------------------------------------------------------------------------


_LOCK_AGAIN_S: Final = 0.5
_STARTING_S: Final = 60.0
"""A broker that holds the lock so long has started, whatever the times of its files say."""
_QUEUES_AGAIN_S: Final = 5.0
_EPOCH_FILE: Final = "epochFileCheckpoint"
_CHECKPOINT_FILE: Final = "checkpoint"
_READ_BYTES: Final = 8 << 20
_READ_COUNT: Final = 65_536
_REFRESH_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class RocketMQOptions:
    """How to read a store."""

    cluster: str | None = None  # cluster name; None: as the store says
    broker: str | None = None  # broker name; None: as the store says
    files_open_max: int | None = None
    """File descriptors held between reads; None: see ``tiered.local.rows.default_open_max``."""
    whole_log_bytes_max: int = 1 << 30
    """A stopped store with a log up to this size is scanned whole when it is opened, to find records that no consume
    queue lists; a larger one only when something suggests it."""
    broker_max_offset: Callable[[], int] | None = None
    """The end of the running broker's log (physical offset), as it last told; None: it is not asked. Called under
    the store's lock, so it must answer at once, from what it knows, and not raise."""
    stop: Callable[[], bool] = lambda: False
    """Asked before each read of the opening, which may scan a large log: it then ends with ``ClosedError``. A store
    that is open is read whatever it says, since what is in hand has to be drained."""
    timers: bool = False
    """Show the topics in which the broker keeps its timers (``TIMER_TOPICS``), and no others."""
    with_timers: bool = False  # show them beside the others


class RocketMQStore:
    """A broker's store directory, read while the broker runs or after it has ended."""

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        options: RocketMQOptions | None = None,
    ) -> RocketMQStore:
        """Open a store directory.

        Args:
            directory: The broker's ``storePathRootDir``.
            clock: Default: the machine's.
            options: Default: ``RocketMQOptions()``.

        Raises:
            ClosedError: ``options.stop`` said so.
            InvalidError: It is not a store, may not be read, or is of a kind that is not supported.
        """
        return cls(os.fspath(directory), clock or SystemClock(), options or RocketMQOptions())

    def __init__(self, directory: str, clock: Clock, options: RocketMQOptions) -> None:
        self._layout = inspect(directory)
        self._clock = clock
        self._options = options
        self._lock = threading.RLock()
        self._cache = FileCache(options.files_open_max)
        self._cache.lost = LostPages(f"{self._layout.log}/", self._clock.monotonic_s)
        self._unread: dict[MessageQueue, UnreadError] = {}
        self._cache.stop, go_on = options.stop, self._cache.stop
        self._sightings = Sightings()
        self._is_closed = False
        self._seen = Liveness(is_locked=False, abort=None)
        self._names = Names(None, None, "")
        self._log_mark: tuple[tuple[int, int], ...] = ()
        self._looked_s = self._expiry_s = self._queues_s = self._starting_s = 0.0
        try:
            self._view = self._make_view()
        except BaseException:
            self._cache.close()
            raise
        self._cache.stop = go_on

    # -- the face --------------------------------------------------------------------------------

    @property
    def identity(self) -> StoreIdentity:
        with self._lock:
            return StoreIdentity(
                cluster=self._names.cluster,
                broker=self._names.broker,
                store_id=self._names.store_id,
                kind="rocketmq",
                is_live=self._view.is_live,
                brokers=self._names.brokers,
            )

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        with self._lock:
            return self._view.catalog.bounds()

    def refresh(self) -> None:
        with self._lock:
            self._looked_s = self._expiry_s = -_LOCK_AGAIN_S
            view = self.current_view()
            self._look_for_expiry(view)
            if isinstance(view, LiveView):
                # Not until nothing is new: under load that may never be.
                while (found := self._advance(view, _REFRESH_BYTES)) and not found.is_last:
                    pass

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        while True:
            view = self.current_view()
            state = view.catalog.states.get(queue)
            if state is None or start >= state.end:
                return None
            batch = self._read(
                view, state, int(start), state.end, bytes_max=bytes_max, count_max=count_max
            )
            if batch is not None or self._holds(view):
                return batch

    def read_compacted(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        view = self.current_view()
        state = view.catalog.states.get(queue)
        if state is None or queue.topic not in view.catalog.topics.compacted or start >= state.min:
            return None
        log = self._compactions.log(queue, state.min)
        at, end = max(int(start), log.first), min(log.end, state.min)
        if at >= end:
            return None
        return log.read(at, end, bytes_max=bytes_max, count_max=count_max)

    @cached_property
    def _compactions(self) -> CompactionLogs:
        from tiered.local.compaction_log import CompactionLogs  # noqa: PLC0415 (few stores have any)

        return CompactionLogs(self._layout.root, self._clock)

    def follow(
        self,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> RocketMQFollower:
        return RocketMQFollower(self, starts, stop)

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> QueueOffset:
        """See ``LocalStore``. Store times are taken to be in order, as a broker's own search takes them."""
        view = self.current_view()
        state = view.catalog.states.get(queue)
        if state is None:
            return QueueOffset(0)
        bounds = Bounds(view.log_min, view.log_end)
        span = state.min, state.end
        return QueueOffset(
            first_at_or_after(view.log, queue, state.index, bounds, span=span, time_ms=timestamp_ms)
        )

    def waiting(self) -> Waiting:
        """See ``LocalStore``. Of a stopped store only what stands behind damage waits: the rest has been decided."""
        with self._lock:
            waiting, lost = self.current_view().waiting(), self._cache.lost
            place = lost.first if lost is not None else None
            if place is None:
                return waiting
            said = f"{place[0]}, byte {place[1]}, cannot be read (Input/output error): what is there waits"
            there = self._view.catalog.states
            queues = sorted(one for one in self._unread.items() if one[0] in there)
            if queues:
                said += f"; {queues[0][0]} from {queues[0][1].queue_offset} on"
                said += f", and {len(queues) - 1} more queues" if len(queues) > 1 else ""
            reason = f"{said}; {waiting.reason}" if waiting.reason else said
            return Waiting(
                waiting.records + len(queues), waiting.size_bytes, reason, waiting.is_behind_damage
            )

    def report(self) -> StoreReport:
        with self._lock:
            view, counters = self._view, self._sightings.counts()
            return StoreReport(
                log_min=PhysicalOffset(view.log_min),
                log_end=PhysicalOffset(view.log_end),
                torn_bytes=view.torn_bytes,
                foreign_entries=counters.get(hole_counter(HoleReason.FOREIGN), 0),
                below_min_entries=counters.get("below_min_entries", 0),
                damaged_records=counters.get(hole_counter(HoleReason.DAMAGED), 0),
                wrong_tag_codes=counters.get(WRONG_TAG_CODES, 0),
                rebuilt_queues=[
                    queue
                    for queue, state in sorted(view.catalog.states.items())
                    if state.index.rebuilt.bounds is not None
                ],
                left_out=view.catalog.left_out(),
                notes=(*view.catalog.notes, *self._sightings.notes()),
                counters=counters,
            )

    def close(self) -> None:
        self._is_closed = True
        self._cache.close()

    # -- for the follower ------------------------------------------------------------------------

    def current_view(self) -> View:
        """The view that holds now; made anew when the broker has stopped or started."""
        if self._is_closed:
            raise ClosedError("the local store has been closed", where=self._layout.root)
        with self._lock:
            if not self._is_same() or self._has_changed() or self._has_first_file_come():
                self._view = self._make_view()
            return self._view

    def _holds(self, view: View) -> bool:
        """Whether a view still is what the directory says."""
        with self._lock:
            self._looked_s = -_LOCK_AGAIN_S
            return self.current_view() is view

    def is_unread(self, queue: MessageQueue) -> bool:
        """Whether a queue waits for a record that the device fails to read."""
        return queue in self._unread

    def tag_rule(self, view: View) -> TagRule:
        """What becomes of the tag codes of a view's entries."""
        return TagRule(self._sightings, self._layout.has_ext, view.is_live)

    def find(self, view: View, queue: MessageQueue) -> QueueState | None:
        """The state of a queue that may be new."""
        with self._lock:
            return view.catalog.find(queue)

    def claim(
        self, view: View, state: QueueState, block: RecordBlock, found: Match, walked_from: int
    ) -> None:
        """Decide on records that are not listed, in the committed part of the log, which was walked from a place on."""
        with self._lock:
            view.claim(state, block, found, walked_from)

    def advance(
        self,
        view: LiveView,
        position: int,
        bytes_max: int,
        take: Callable[[Advance], list[RecordBatch]],
    ) -> list[RecordBatch] | None:
        """Move a running store's frontier, if it stands at ``position``, and let ``take`` make batches of it.

        Returns:
            None when nothing is new, or the frontier stands elsewhere.
        """
        with self._lock:
            if view is not self._view or view.log_end != position:
                return None
            self._look_for_expiry(view)
            found = self._advance(view, bytes_max)
            return None if found is None else take(found)

    def read_until(self, view: View, state: QueueState, start: int, end: int) -> RecordBatch | None:
        """Some of ``[start, end)`` through the consume queue; None when all of it is gone, or the view holds no more."""
        return self._read(view, state, start, end, bytes_max=_READ_BYTES, count_max=_READ_COUNT)

    # -- inside ----------------------------------------------------------------------------------

    def _read(
        self, view: View, state: QueueState, start: int, end: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        while True:
            self.follow_expiry(view)
            low = max(start, state.min)
            if low >= end or (low := first_said(state.index, low, end)) >= end:
                return None
            try:
                batch = read_batch(
                    view.log,
                    self.tag_rule(view),
                    state.queue,
                    state.index,
                    view.catalog.lists,
                    search=lambda entries, found: self._search(view, state, entries, found),
                    start=low,
                    end=end,
                    bounds=Bounds(view.log_min, view.log_end),
                    bytes_max=bytes_max,
                    count_max=count_max,
                )
            except UnreadError as error:
                self._unread[state.queue] = error
                return None
            self._unread.pop(state.queue, None)
            if batch is not None or view is not self._view:
                return batch
            end = min(end, state.end)

    def _search(self, view: View, state: QueueState, entries: Entries, found: Fetched) -> bool:
        """Whether to read entries again that name no record: their queue is another now, or the log has their records.

        Or the view holds no more: the log has lost them, which the broker that starts on it will find, too.
        """
        if not self._holds(view) or self._has_queue_changed(view, state):
            return True
        with self._lock:
            return view.claims.search(view, state, entries, found)

    def _has_queue_changed(self, view: View, state: QueueState) -> bool:
        """Whether the files of a running broker's queue are others than before: its topic was deleted, perhaps made anew."""
        if not isinstance(view, LiveView):
            return False
        with self._lock:
            if not state.index.row.rescan():
                return False
            view.reopen(state)
            return True

    def follow_expiry(self, view: View) -> None:
        """Bring the queues' minima up to date if the log's minimum is known to have moved."""
        if view.catalog.log_min != view.log_min:
            with self._lock:
                view.catalog.follow_expiry(view.log_min)

    def _look_for_expiry(self, view: View) -> None:
        """Look for deleted files, at most every half second, and for deleted queues, more rarely."""
        now_s = self._clock.monotonic_s()
        if now_s < self._expiry_s + _LOCK_AGAIN_S:
            return
        self._expiry_s = now_s
        if view.log.rescan():
            self._cache.drop_deleted()  # of queues that nobody looks at: their files would stay on the disk
        self.follow_expiry(view)
        if isinstance(view, LiveView) and now_s >= self._queues_s + _QUEUES_AGAIN_S:
            self._queues_s = now_s
            view.look_for_changed_queues()

    def _is_same(self) -> bool:
        """Whether the broker that this view is of has neither stopped cleanly nor been started anew. One call."""
        return abort_mark(self._layout.root) == self._seen.abort

    def _has_changed(self) -> bool:
        """Whether a broker has stopped or started, or the log that one has left was changed; at most every half second."""
        now_s = self._clock.monotonic_s()
        if now_s < self._looked_s + _LOCK_AGAIN_S:
            return False
        self._looked_s = now_s
        if look(self._layout.root) != self._seen:
            return True
        return not self._view.is_live and self._view.log.mark() != self._log_mark

    def _advance(self, view: LiveView, bytes_max: int) -> Advance | None:
        """Move a running broker's frontier; not while it starts, since what it gives up is known only then."""
        is_starting = self._seen.is_starting
        if is_starting and self._clock.monotonic_s() < self._starting_s + _STARTING_S:
            return None
        return view.advance(bytes_max, self._is_same)

    def _has_first_file_come(self) -> bool:
        """Only now the size of log files is known."""
        log = self._view.log
        if log.bases:
            return False
        if log.file_bytes:
            return log.rescan()
        return log_file_bytes(log.directory, list_bases(log.directory)) > 0

    def _make_view(self) -> View:
        """Look at the whole store; again, when a broker stops or starts meanwhile."""
        while True:
            self._seen = look(self._layout.root)
            self._cache.drop_all()
            view = self._look()
            self._looked_s = self._expiry_s = self._starting_s = self._clock.monotonic_s()
            if look(self._layout.root) == self._seen:
                return view

    def _look(self) -> View:
        root = self._layout.root
        layout = self._layout = inspect(root)
        size = log_file_bytes(layout.log, list_bases(layout.log))
        log = FileRow(self._cache, layout.log, size)
        self._log_mark = log.mark()
        check_contiguous(layout.log, log.bases, size)
        topics = read_topics(root)
        names = read_names(root, log, LogPieces(log), topics)
        self._names = replace(
            names,
            cluster=self._options.cluster or names.cluster,
            broker=self._options.broker or names.broker,
        )
        catalog = Catalog(
            layout,
            self._cache,
            topics,
            cluster=self._names.cluster,
            broker=self._names.broker,
            timers=self._options.timers,
            with_timers=self._options.with_timers,
        )
        return self._make(log, catalog)

    def _make(self, log: FileRow, catalog: Catalog) -> View:
        root, seen = self._layout.root, self._seen
        if seen.is_locked:
            return LiveView(
                log,
                catalog,
                self._sightings,
                self._clock,
                started_ms=None if seen.abort is None else seen.abort.started_ms,
                may_truncate=pathlib.Path(f"{root}/{_EPOCH_FILE}").exists(),
                broker_max_offset=self._options.broker_max_offset,
            )
        return DeadView(
            log,
            catalog,
            self._sightings,
            is_clean=seen.abort is None,
            checkpoint=decode_checkpoint(read_text(f"{root}/{_CHECKPOINT_FILE}") or b""),
            whole_log_bytes_max=self._options.whole_log_bytes_max,
        )
