"""A RocketMQ store directory behind the interface of local stores, live or dead, read-only; and its follower.

**Contract.** ``open`` looks at the directory and refuses by name what it cannot read faithfully. What holds of a
stopped store and of a running one is decided by ``tiered.local.views``; each is one *view*.
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
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.clock import Clock, SystemClock
from tiered.errors import ClosedError
from tiered.format import properties
from tiered.format.block import queue_groups
from tiered.format.broker_checkpoint import decode_checkpoint
from tiered.format.property_columns import tag_hashes
from tiered.format.record import Record, RecordError, decode_record
from tiered.local.catalog import Catalog, QueueState
from tiered.local.chunks import FAR, Chunk, LogChunks, LogIndex, Next
from tiered.local.classification import WRONG_TAG_CODES, AnomalyCounters, hole_counter
from tiered.local.interface import (
    BaseFollower,
    HoleReason,
    RecordBatch,
    StoreIdentity,
    StoreReport,
    Waiting,
)
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
from tiered.local.mapped_file_queue import FileCache, LostPages, MappedFileQueue, list_bases
from tiered.local.matching import Match, match, match_groups
from tiered.local.queue_reader import (
    TagRule,
    UnreadError,
    first_said,
    read_batch,
    sound_batches,
)
from tiered.local.views import Advance, DeadView, LiveView, View
from tiered.model import MessageQueue, PhysicalOffset, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tiered.format.block import RecordBlock
    from tiered.local.compaction_log import CompactionLogs
    from tiered.local.consumequeues import Entries, Longs
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


def read_identity(
    root: str, log: MappedFileQueue, chunks: LogChunks, topics: Topics, *, is_live: bool
) -> StoreIdentity:
    """Find names and mark of the store at ``root``."""
    raw = read_text(f"{root}/{_BROKER_IDENTITY}", 4096)
    parts = (raw or b"").decode("utf-8", "replace").strip().split("#")[:_IDENTITY_PARTS]
    if len(parts) == _IDENTITY_PARTS and all(parts):
        mark = "identity:" + "#".join(parts)
        return StoreIdentity(parts[0], parts[1], mark, kind="rocketmq", is_live=is_live)
    records = _first_records(log, chunks)
    named = (record.properties.get(properties.CLUSTER) for record in records)
    cluster = next(filter(None, named), topics.cluster)
    broker, mark = topics.broker, ""
    uuid = (read_text(f"{root}/{_ROCKSDB_IDENTITY}", 256) or b"").decode("ascii", "replace").strip()
    if uuid:
        mark = f"rocksdb:{uuid}"
    elif records:
        mark = f"host:{records[0].store_host}/{cluster or ''}/{broker or ''}"
    return StoreIdentity(cluster, broker, mark, "rocketmq", is_live, topics.brokers)


def _first_records(log: MappedFileQueue, chunks: LogChunks) -> list[Record]:
    """Sound records from the beginning of the first and the last file."""
    found: list[Record] = []
    for base in dict.fromkeys((*log.bases[:1], *log.bases[-2:])):
        chunk = chunks.read(base, base + _LOOKED_AT_BYTES, _LOOKED_AT_BYTES, check_crc=False)
        for position in chunk.block.positions[:_LOOKED_AT_RECORDS].tolist():
            try:
                found.append(decode_record(chunk.block.buffer, position))
            except RecordError:
                continue
    return found


# -- store -------------------------------------------------------------------------------------------


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
    """File descriptors held between reads; None: see ``tiered.local.mapped_file_queue.default_open_max``."""
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
        """Open a store directory, a broker's ``storePathRootDir``. ClosedError: ``options.stop`` said so."""
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
        self._anomalies = AnomalyCounters()
        self._is_closed = False
        self._seen = Liveness(is_locked=False, abort=None)
        self._identity: StoreIdentity
        self._log_mark: tuple[tuple[int, int], ...] = ()
        self._looked_s = self._expiry_s = self._queues_s = self._starting_s = 0.0
        try:
            self._view = self._make_view()
        except BaseException:
            self._cache.close()
            raise
        self._cache.stop = go_on

    # -- the interface ---------------------------------------------------------------------------

    @property
    def identity(self) -> StoreIdentity:
        with self._lock:
            return self._identity

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
            batch = self.read_in(
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
        span = state.min, state.end
        return QueueOffset(view.held(state).first_at_or_after(span, timestamp_ms))

    def lineage(self, queue: MessageQueue, at: QueueOffset | None = None) -> None:
        """See ``LocalStore``: RocketMQ's files do not tell."""

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
            view, counters = self._view, self._anomalies.counts()
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
                notes=(*view.catalog.notes, *self._anomalies.notes()),
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
        return TagRule(self._anomalies, self._layout.has_ext, view.is_live)

    def find(self, view: View, queue: MessageQueue) -> QueueState | None:
        """The state of a queue that may be new."""
        with self._lock:
            return view.catalog.find(queue)

    def decide(self, view: View, state: QueueState, block: RecordBlock, found: Match) -> Match:
        """Decide on records that are not listed, in the committed part of the log; what is listed then."""
        with self._lock:
            return view.decide(state, block, found)

    def behind(self, view: View, chunk: Chunk) -> int:
        """Where the committed part of the log goes on behind a chunk."""
        with self._lock:
            return view.orphans.behind(chunk, view.log_end)

    def advance(
        self,
        view: LiveView,
        position: int,
        bytes_max: int,
        take: Callable[[Advance], list[RecordBatch]],
    ) -> list[RecordBatch] | None:
        """Move a running store's frontier, if it stands at ``position``, and let ``take`` make batches of it.

        None when nothing is new, or the frontier stands elsewhere.
        """
        with self._lock:
            if view is not self._view or view.log_end != position:
                return None
            self._look_for_expiry(view)
            found = self._advance(view, bytes_max)
            return None if found is None else take(found)

    def read_in(
        self, view: View, state: QueueState, start: int, end: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        """Some of ``[start, end)`` through the consume queue; None when all of it is gone, or the view holds no more."""
        while True:
            self.follow_expiry(view)
            low = max(start, state.min)
            if low >= end or (low := first_said(state.index, low, end)) >= end:
                return None
            try:
                batch = read_batch(
                    replace(view.held(state), lists=view.catalog.lists),
                    self.tag_rule(view),
                    (low, end),
                    search=lambda entries, found: self._search(view, state, entries, found),
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
            end = min(view.log_end, view.undecided_end)
            return view.orphans.search(state, entries, found, end)

    def _has_queue_changed(self, view: View, state: QueueState) -> bool:
        """Whether the files of a running broker's queue are others than before: its topic was deleted, perhaps made anew."""
        if not isinstance(view, LiveView):
            return False
        with self._lock:
            if not state.index.row.rescan():
                return False
            view.reopen(state)
            return True

    # -- inside ----------------------------------------------------------------------------------

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
        log = MappedFileQueue(self._cache, layout.log, size)
        self._log_mark = log.mark()
        check_contiguous(layout.log, log.bases, size)
        topics = read_topics(root)
        found = read_identity(root, log, LogChunks(log), topics, is_live=self._seen.is_locked)
        self._identity = replace(
            found,
            cluster=self._options.cluster or found.cluster,
            broker=self._options.broker or found.broker,
        )
        catalog = Catalog(
            layout,
            self._cache,
            topics,
            cluster=self._identity.cluster,
            broker=self._identity.broker,
            timers=self._options.timers,
            with_timers=self._options.with_timers,
        )
        seen = self._seen
        if seen.is_locked:
            return LiveView(
                log,
                catalog,
                self._anomalies,
                self._clock,
                started_ms=None if seen.abort is None else seen.abort.started_ms,
                may_truncate=pathlib.Path(f"{root}/{_EPOCH_FILE}").exists(),
                broker_max_offset=self._options.broker_max_offset,
            )
        return DeadView(
            log,
            catalog,
            self._anomalies,
            is_clean=seen.abort is None,
            checkpoint=decode_checkpoint(read_text(f"{root}/{_CHECKPOINT_FILE}") or b""),
            whole_log_bytes_max=self._options.whole_log_bytes_max,
        )


# -- follower ----------------------------------------------------------------------------------------
#
# Following a store in log order: one read of the log, one check, one read of each consume queue per window.
#
# **Contract.** Each queue's messages come in order, each queue offset once, as a message or a hole, from where the caller
# said; a queue's batch begins later than the last one ended only when local retention has overtaken us. What the log's
# own order does not give (a damaged record, a stale or foreign entry) is taken through the consume queue
# (``tiered.local.queue_reader``): before the next message of that queue, or, when none follows, once the end of the log is
# reached. When the broker stops or starts, the store is looked at anew and the follower goes on from its queue offsets.
# For one thread. Nothing has to survive a crash: begin again with the queue offsets that are durable.


_START_LOOKAHEAD: Final = 64
_ITEM_BYTES: Final = 32
"""What an item costs without its record: holes are not for nothing."""


class RocketMQFollower(BaseFollower):
    """Gives what a store gets, in the order of its log, from where each queue's caller stands."""

    def __init__(
        self,
        store: RocketMQStore,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(starts, stop)
        self._store = store
        self._last: dict[MessageQueue, int] = {}  # local physical offset of the record before it
        self._must_sweep = True
        self._position: int = FAR
        self._go_on_in(store.current_view())
        self._fallen.clear()  # the caller has just said where to go on

    @property
    def position(self) -> int:
        """Local physical offset up to which the log has been followed."""
        return self._position

    def poll(self, window_bytes: int) -> list[RecordBatch]:
        self._require_open()
        view = self._store.current_view()
        if view is not self._view:
            self._go_on_in(view)
        self._is_at_end = False
        if self._position < view.log_end:
            self._is_idle = False
            batches = self._follow(view, window_bytes)
            self._is_at_end = self._position >= view.log_end and not view.is_live
            return batches
        if isinstance(view, LiveView):
            found = self._store.advance(view, self._position, window_bytes, self._take_advance)
            if found is not None:
                self._is_idle = False
                return found
            if self._position < view.log_end:
                return []  # somebody else has moved the frontier
        return self._sweep(view, window_bytes)

    def seek(self, queue: MessageQueue, start: QueueOffset) -> None:
        """See ``Follower``. What lies before the place in the log is taken through the consume queue."""
        self._next[queue] = int(start)
        state = self._view.catalog.states.get(queue)
        if state is not None:
            self._last[queue] = self._place_before(state)
        self._must_sweep = True

    # -- where to begin --------------------------------------------------------------------------

    def _note_places(self) -> None:
        """Where in the log the record lies that was taken last of each queue, as far as the store has it."""
        self._last = {
            queue: self._place_before(state)
            for queue, state in list(self._view.catalog.states.items())
            if queue in self._next
        }

    def _place_before(self, state: QueueState) -> int:
        offset = self._next[state.queue] - 1
        if offset < 0:
            return -1
        entries = state.index.entries(offset, offset + 1)
        return int(entries.physical_offsets[0]) if entries.is_written[0] else -1

    def _note_fall(self, state: QueueState, block: RecordBlock, indices: Longs, start: int) -> None:
        """Note a queue of which a record that was taken already comes again, behind the last one in the log."""
        fell = block.queue_offsets[indices] < start
        fell &= block.physical_offsets[indices] > self._last.get(state.queue, -1)
        if fell.any() and state.queue in self._next:
            self._fallen.add(state.queue)

    def _first_position(self) -> int:
        """The lowest place in the log where a queue goes on."""
        view = self._view
        places = [
            place
            for state in list(view.catalog.states.values())
            if (place := self._place(state)) is not None
        ]
        return min(places, default=view.log_end)

    def _place(self, state: QueueState) -> int | None:
        """Where the record lies with which a queue goes on; None when it has none yet."""
        start = self._next_of(state)
        if start >= state.end:
            return None
        entries = state.index.entries(start, min(state.end, start + _START_LOOKAHEAD))
        usable = entries.is_written & (entries.physical_offsets >= self._view.log_min)
        usable &= entries.physical_offsets < self._view.log_end
        if not usable.any():
            return self._view.log_min
        return int(entries.physical_offsets[usable].min())

    def _next_of(self, state: QueueState) -> int:
        """The next queue offset wanted; local retention may have pushed it on."""
        return max(self._next.get(state.queue, 0), state.min)

    def _go_on_in(self, view: View) -> None:
        self._view = view
        self._tags = self._store.tag_rule(view)
        self._note_places()
        self._fallen.update(self._next)
        self._chunks = LogChunks(view.log, self._log_index(view))
        self._position = min(self._position, self._first_position())
        self._must_sweep = True

    def _log_index(self, view: View) -> LogIndex:
        """Where records begin in the committed part of the log."""
        if isinstance(view, DeadView):
            return view.log_index()
        return LogIndex(
            lambda: [
                *(
                    (state.index, None if state.index.is_batch else self._next_of(state))
                    for state in list(view.catalog.states.values())
                    if self._next_of(state) < state.end
                ),
                *((index, None) for index in view.catalog.others),
            ]
        )

    # -- the committed part of the log -----------------------------------------------------------

    def _follow(self, view: View, window_bytes: int) -> list[RecordBatch]:
        self._position = max(self._position, view.log_min)
        chunk = self._chunks.read(self._position, view.log_end, window_bytes)
        batches = self._take(view, chunk.block)
        if len(chunk.block) and not chunk.block.is_sound:
            self._must_sweep = True
        self._move(view, chunk)
        return batches

    def _move(self, view: View, chunk: Chunk) -> None:
        """Set the position behind a chunk; over damage to where a consume queue says that a record begins."""
        if chunk.follows in {Next.NOTHING, Next.BROKEN} and chunk.end < view.log_end:
            view.log.rescan()
            if chunk.end < view.log_min:
                self._position = view.log_min  # expired while we were reading
                self._store.follow_expiry(view)
                return
            self._must_sweep = True
        self._position = self._store.behind(view, chunk)

    def _take(self, view: View, block: RecordBlock) -> list[RecordBatch]:
        """The batches of the records in a chunk."""
        groups = queue_groups(block)
        states = [self._state(view, queue) for queue in groups.queues]
        firsts = block.queue_offsets[groups.indices[groups.starts[:-1]]].tolist()
        found = match_groups(
            [
                None if state is None or first < self._next_of(state) else state.index
                for state, first in zip(states, firsts, strict=True)
            ],
            block,
            groups,
            view.listing if isinstance(view, DeadView) else None,
        )
        taken: list[tuple[QueueState, Match]] = []
        for number, (state, match_) in enumerate(zip(states, found, strict=True)):
            if state is None:
                continue
            mine = match_ or self._match_rest(state, block, groups.members(number))
            if mine is None:
                continue
            if not mine.is_all_listed:
                mine = self._store.decide(view, state, block, mine)
            _, end = mine.last_listed()
            if end > state.end and not view.is_live:
                state.end = end  # a damaged entry had hidden what lies behind it
            taken.append((state, mine))
        return self._emit(block, taken)

    def _state(self, view: View, queue: MessageQueue) -> QueueState | None:
        state = view.catalog.states.get(queue)
        if state is None or not state.index.row.bases:
            state = self._store.find(view, queue)
        return state

    def _match_rest(self, state: QueueState, block: RecordBlock, indices: Longs) -> Match | None:
        """Of records of which the first was taken already: what is new of them."""
        start = self._next_of(state)
        self._note_fall(state, block, indices, start)
        rest = indices[block.queue_offsets[indices] >= start]
        return match(state.index, block, rest) if len(rest) else None

    def _take_advance(self, found: Advance) -> list[RecordBatch]:
        self._position = found.end
        self._is_at_end = found.is_last
        return self._emit(found.block, found.taken)

    def _emit(
        self, block: RecordBlock, taken: Sequence[tuple[QueueState, Match]]
    ) -> list[RecordBatch]:
        """Batches of the listed records that were not taken yet, the gaps between them filled."""
        even: list[tuple[QueueState, Match]] = []
        odd: list[tuple[QueueState, Match]] = []
        for state, found in taken:
            goes_on = found.entries is not None and found.is_all_listed
            goes_on = goes_on and int(found.offsets[0]) == self._next_of(state)
            (even if goes_on else odd).append((state, found))
        batches = self._batches(block, even)
        for (
            state,
            found,
        ) in odd:  # through the consume queue, which has holes and what was listed late, too
            self._note_fall(state, block, found.indices[found.is_listed], self._next_of(state))
            batches += self._fill(state, found.last_listed()[1])
            # What cannot be read comes with all that is behind it when it can be.
            self._must_sweep |= self._store.is_unread(state.queue)
        return batches

    def _batches(
        self, block: RecordBlock, taken: Sequence[tuple[QueueState, Match]]
    ) -> list[RecordBatch]:
        """One batch a queue, of records that are all listed, and with which the queues go on."""
        found = [(state.queue, match_) for state, match_ in taken]
        if not found:
            return []
        self._tags.apply_all(found, tag_hashes(block))
        batches = sound_batches(block, found)
        indices = np.concatenate([match_.indices for _, match_ in found])  # one look for all lasts
        ends = np.cumsum([len(match_.indices) for _, match_ in found]) - 1
        lasts = block.physical_offsets[indices[ends]].tolist()
        for batch, last in zip(batches, lasts, strict=True):
            self._next[batch.queue] = batch.end_offset
            self._last[batch.queue] = last
        return batches

    # -- what the log's order does not give ------------------------------------------------------

    def _fill(self, state: QueueState, end: int) -> Iterator[RecordBatch]:
        """Take a queue's offsets up to ``end`` through its consume queue."""
        while (start := self._next_of(state)) < end and not self._stop():
            batch = self._store.read_in(
                self._view, state, start, end, bytes_max=_READ_BYTES, count_max=_READ_COUNT
            )
            if batch is None:
                return
            self._next[state.queue] = batch.end_offset
            last = int(batch.physical_offsets.max())
            self._last[state.queue] = max(last, self._last.get(state.queue, -1))
            yield batch

    def _sweep(self, view: View, window_bytes: int) -> list[RecordBatch]:
        """At the end of the log: what is left of queues that no later message has brought on."""
        batches: list[RecordBatch] = []
        size = 0
        if self._must_sweep:
            for state in list(view.catalog.states.values()):
                for batch in self._fill(state, state.end):
                    batches.append(batch)
                    size += memoryview(batch.data).nbytes + batch.count * _ITEM_BYTES
                    if size >= window_bytes:
                        self._is_idle = False
                        return batches
            self._must_sweep = self._stop() or self._store.current_view() is not view
        self._is_idle = self._is_at_end = not batches and not self._must_sweep
        if any(map(self._store.is_unread, view.catalog.states)):
            self._must_sweep = True  # idle as it is: the device may read it later
        return batches
