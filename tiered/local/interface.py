"""The interface of every kind of local store: queues, ``[min, confirmed)`` and batches of raw records.

A local store is opened read-only (invariant I10): nothing here can write to it. All methods may be called from any
thread; one ``Follower`` belongs to one thread.

What a batch holds has been checked record by record (magic, sizes, physical offset, lengths, body CRC, and that topic,
queue id and queue offset are those of the queue that lists it). A record that fails is a hole: an item of size 0 with
the reason in its tag code, and its raw bytes in ``quarantined``. Nothing above the confirmed bound is ever handed out.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol

from backends.lazy_dataclass import dataclass
from tiered.errors import ClosedError
from tiered.format.record_kind import RecordKind, kind_of_items
from tiered.model import MessageQueue, PhysicalOffset, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Buffer


class HoleReason(IntEnum):
    """Why a queue offset has no message; stored as the tag code of an item of size 0. Never renumbered."""

    DAMAGED = 1
    """The record is there and fails its checks; its raw bytes are in quarantine."""
    DANGLING = 2
    """The local consume queue points where no record can be read."""
    FOREIGN = 3
    """The local consume queue points at a record of another queue or queue offset; refused, as a client would."""
    MISSING = 4
    """The local consume queue has no entry for this offset, and no record says that it is its own."""
    COMPACTED = 5
    """A newer message of its key has taken its place (``tiered.compaction``)."""
    HIDDEN = 6
    """It is there, and nothing for this reader (``tiered.log.lineage``). It stands in no store."""


MISSING_REASONS: Final = (HoleReason.DANGLING, HoleReason.MISSING)
"""Of holes where a message was or should be, and of which the store has nothing: a person should know."""


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Which store this is."""

    cluster: str | None  # cluster name, or None when the store does not tell
    broker: str | None  # broker name, or None when the store does not tell
    store_id: str
    """Mark of this store directory that survives restarts and copies of it, and that another broker's directory does
    not share, as far as can be told."""
    kind: str  # ``rocketmq``, ``kafka`` or ``jmq``
    is_live: bool  # a broker runs on it now
    brokers: tuple[str, ...] = ()
    """Names that the broker may have, where the store does not tell which."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that failed its checks, with what is left of it."""

    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    reason: HoleReason
    detail: str
    raw: bytes


@dataclass(slots=True, eq=False)
class RecordBatch:
    """Records of one queue in order, without a gap: item ``i`` is queue offset ``base_offset + i``.

    Nobody changes one. It is not frozen since that makes it four times as dear to make, and readers make one for each few
    messages: it was a fifth of what reading cost the reader's own thread.
    """

    queue: MessageQueue
    base_offset: QueueOffset  # queue offset of the first item
    data: Buffer  # the raw records one after another, byte for byte as in the local log
    positions: npt.NDArray[np.int64]
    """int64[n], where each item's record begins in ``data``; items of an inner batch share one."""
    sizes: npt.NDArray[np.int32]  # int32[n], size of the record in bytes; 0 for a hole
    tag_codes: npt.NDArray[np.int64]
    """int64[n], the consume queue's tag code; for a hole its ``HoleReason``."""
    store_timestamps_ms: npt.NDArray[np.int64]
    """int64[n], UTC ms; for a hole that of its neighbour before it (or after it), else -1."""
    physical_offsets: npt.NDArray[np.int64]
    """int64[n], local physical offset; -1 where there is none."""
    quarantined: Sequence[Quarantined] = ()  # the damaged records of the batch
    properties_sizes: npt.NDArray[np.int32] | None = None
    """int32[n], bytes of each record's properties, with which it ends; None: not known, or some items are holes or
    of inner batches. It saves parsing the records again for their properties."""
    topic_id: str = ""
    """Of the topic that they were read of, where the store has such (``Lineage``); it may be another by now."""

    @property
    def count(self) -> int:
        """Number of items, holes included."""
        return len(self.sizes)

    @property
    def end_offset(self) -> QueueOffset:
        """One past the last queue offset."""
        return QueueOffset(self.base_offset + len(self.sizes))

    @property
    def kind(self) -> RecordKind:
        """What its records are; RocketMQ's where all items are holes."""
        return kind_of_items(self.sizes, self.tag_codes)


@dataclass(frozen=True, slots=True)
class LeaderEpoch:
    """A leader's time: from which queue offset on its records stand in a queue."""

    number: int  # Kafka's leader epoch, JoyQueue's term
    start: int  # first queue offset


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction whose end has not been met."""

    producer: int  # producer id
    first: int  # queue offset of its first record


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a queue's records come from, as far as its store tells apart from the records themselves."""

    topic_id: str | None = None
    """Of the topic: another one under the same name is another topic, whatever it holds."""
    epochs: tuple[LeaderEpoch, ...] = ()  # of its leaders, ascending in both
    open_transactions: tuple[OpenTransaction, ...] = ()
    """Those that were begun below the place that was asked for, and have no end there."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A queue or topic that is not tiered, and why (system topic, light queue, unsupported layout)."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is in the store but not proven committed, and why. It is not lost: it is looked at again."""

    records: int = 0  # number of records (or consume-queue entries, where the log cannot be walked)
    size_bytes: int = 0  # their bytes, as far as known
    reason: str = ""  # in one clause; empty when nothing waits
    is_behind_damage: bool = False
    """The store is stopped and damaged: the broker's next start would give them up. A person should know."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What was met in the store that is explained and recorded, and is not a failure."""

    log_min: PhysicalOffset  # first physical offset of the log
    log_end: PhysicalOffset  # where the readable log ends (recovery's end, or what is proven live)
    torn_bytes: int = 0  # bytes behind ``log_end`` that are neither zero nor readable
    foreign_entries: int = 0
    """Consume-queue entries refused because they point at another queue's record."""
    below_min_entries: int = 0  # consume-queue entries below the log's minimum
    damaged_records: int = 0  # records that failed their checks below ``log_end``, seen so far
    wrong_tag_codes: int = 0
    """Consume-queue entries whose tag code was not that of their record, which ruled, seen so far."""
    rebuilt_queues: Sequence[MessageQueue] = ()
    """Queues whose consume queue was missing or damaged and was rebuilt in memory from the log."""
    left_out: Sequence[LeftOut] = ()  # topics and queues that are not tiered
    notes: Sequence[str] = ()  # other things worth a line, such as a config read from its ``.bak``
    counters: Mapping[str, int] = field(default_factory=dict)


class Follower(Protocol):
    """Walks the store in log order, window by window, and groups what is new by queue. For one thread."""

    def poll(self, window_bytes: int) -> list[RecordBatch]:
        """The next window of committed records: of each queue that has any one batch, more when a gap divides them.

        Of the log about ``window_bytes`` are looked at, and one record is taken at least. Each batch continues where the
        last one of its queue ended, except after a gap. Empty when nothing new is committed. Never blocks on anything but
        the local disk.
        """
        ...

    @property
    def is_idle(self) -> bool:
        """The last poll reached the committed end, and found nothing more."""
        ...

    @property
    def is_at_end(self) -> bool:
        """The last poll took all that could be seen: another one at once would hardly find more."""
        ...

    def take_fallen(self) -> Collection[MessageQueue]:
        """Queues that may not go on where they were, since the last call.

        That is: a record of theirs with a lower queue offset stands behind one with a higher one, as when a topic was
        deleted and created again (however far its offsets have risen since), or the store was looked at anew. The
        caller holds what it has taken against the store, and says where to go on (``seek``) if that is elsewhere.
        """
        ...

    def seek(self, queue: MessageQueue, start: QueueOffset) -> None:
        """Go on with ``start`` in one queue, before or behind where it stands."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class BaseFollower:
    """What all followers keep: where the caller stands, and how the last poll ended."""

    def __init__(
        self, starts: Mapping[MessageQueue, QueueOffset], stop: Callable[[], bool]
    ) -> None:
        """As of ``LocalStore.follow``."""
        self._next: dict[MessageQueue, int] = {queue: int(start) for queue, start in starts.items()}
        self._stop = stop
        self._fallen: set[MessageQueue] = set()
        self._is_idle = self._is_at_end = self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """See ``Follower``."""
        return self._is_idle

    @property
    def is_at_end(self) -> bool:
        """See ``Follower``."""
        return self._is_at_end

    def take_fallen(self) -> Collection[MessageQueue]:
        """See ``Follower``."""
        fallen, self._fallen = self._fallen, set()
        return fallen

    def close(self) -> None:
        """See ``Follower``. The store's files stay open."""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the follower has been closed")


class LocalStore(Protocol):
    """A message store on this machine, read-only."""

    @property
    def identity(self) -> StoreIdentity:
        """Which store this is."""
        ...

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        """Every queue that is tiered, with its bounds as of the last ``refresh`` (or poll of a follower)."""
        ...

    def refresh(self) -> None:
        """Look again: new queues, confirmed end, expired files. A follower's poll implies it. Cheap when idle."""
        ...

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        """Records of one queue from ``start``, straight from its consume queue.

        Below the minimum, the batch begins at the minimum (the caller sees the gap in ``base_offset``). It stops before
        exceeding ``bytes_max``, but has at least one record however large it is (I9), and ``count_max`` items (> 0); an
        inner batch is never divided, so it may be exceeded by one batch.

        None when ``start`` is at or above the confirmed end, or the queue is unknown. It begins later than ``start``, too,
        where thousands of queue offsets in a row have neither an entry nor a record: a range, not items.
        """
        ...

    def read_compacted(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        """What is left of a compacted topic's messages below the queue's minimum, from ``start`` or later on.

        Messages, and holes for those that newer ones of their key have replaced; their physical offsets are not the commit
        log's. ``bytes_max`` as of ``read``. None where nothing is kept below the minimum.
        """
        ...

    def follow(
        self,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> Follower:
        """Follow the log from where the given queues go on; others begin at their minimum.

        ``stop`` is asked within a poll that takes more than one batch of a queue: it then ends with what it has.
        """
        ...

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> QueueOffset:
        """First queue offset whose store time is at or after ``timestamp_ms``; the confirmed end when there is none."""
        ...

    def lineage(self, queue: MessageQueue, at: QueueOffset | None = None) -> Lineage | None:
        """Where a queue's records come from, as of the last ``refresh``; None: the store does not tell, or no such queue.

        Args:
            at: Which transactions are open is said of this queue offset, and only then.
        """
        ...

    def waiting(self) -> Waiting:
        """What is in the store but not proven committed."""
        ...

    def report(self) -> StoreReport:
        """What was met so far that is explained and recorded."""
        ...

    def close(self) -> None:
        """Close all files; batches already handed out stay valid."""
        ...


# -- a store that has a log for each queue -------------------------------------------------------
#
# Following a store that has a log for each queue: round the queues that have something new, a share of each.
#
# **Contract.** Each queue's items come in order, from where the caller said; what the store skips is a gap. A queue that may
# have become another one (``fallen_since``) is told of with the same poll that gives what it has now. For one thread.

_SHARE_BYTES_MIN: Final = 1 << 20
"""Of each queue at least: a read costs something."""
_COUNT_MAX: Final = 1 << 18
_ITEM_BYTES: Final = 32
"""What an item costs without its record: holes are not for nothing."""


class PartitionStore(Protocol):
    """What a follower needs of a store. For any thread."""

    def look(self) -> None:
        """See what has changed, where that is told by a glance: it comes with every poll."""
        ...

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        """The bounds of each queue. The same object until one of them changes."""
        ...

    def fallen_since(self, count: int) -> tuple[int, Collection[MessageQueue]]:
        """How many falls there were so far, and which queues fell since there were ``count``."""
        ...

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        """See ``LocalStore``."""
        ...


class PartitionFollower(BaseFollower):
    """Gives what each queue gets, from where its caller stands."""

    def __init__(
        self,
        store: PartitionStore,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(starts, stop)
        self._store = store
        self._bounds: Mapping[MessageQueue, QueueBounds] = {}
        self._busy: dict[MessageQueue, None] = {}  # those with something new, in turn
        self._falls, _ = store.fallen_since(0)  # the caller has just said where to go on

    @property
    def is_at_end(self) -> bool:
        return not self._busy

    def seek(self, queue: MessageQueue, start: QueueOffset) -> None:
        self._next[queue] = start
        self._busy.pop(queue, None)
        self._note(queue)

    def poll(self, window_bytes: int) -> list[RecordBatch]:
        self._require_open()
        self._look()
        share = max(window_bytes // max(len(self._busy), 1), min(window_bytes, _SHARE_BYTES_MIN))
        batches: list[RecordBatch] = []
        for queue in list(self._busy):
            if window_bytes <= 0 or (batches and self._stop()):
                break
            batch = self._take(queue, min(share, window_bytes))
            if batch is not None:
                batches.append(batch)
                window_bytes -= memoryview(batch.data).nbytes + batch.count * _ITEM_BYTES
        self._is_idle = not batches and not self._busy
        return batches

    def _look(self) -> None:
        self._store.look()
        self._falls, fallen = self._store.fallen_since(self._falls)
        self._fallen.update(queue for queue in fallen if queue in self._next)
        bounds = self._store.queues()
        if bounds is not self._bounds:
            self._bounds = bounds
            turns, self._busy = self._busy, {}
            for queue in (*turns, *bounds):
                self._note(queue)

    def _note(self, queue: MessageQueue) -> None:
        """Give a queue its turn, if it has something new."""
        bounds = self._bounds.get(queue)
        if bounds is not None and max(self._next.get(queue, 0), bounds.min) < bounds.end:
            self._busy[queue] = None

    def _take(self, queue: MessageQueue, bytes_max: int) -> RecordBatch | None:
        """What comes next of a queue, whose turn that was."""
        start = QueueOffset(self._next.get(queue, self._bounds[queue].min))
        batch = self._store.read(queue, start, bytes_max=bytes_max, count_max=_COUNT_MAX)
        del self._busy[queue]
        if batch is not None:
            self._next[queue] = batch.end_offset
            self._note(queue)
        return batch
