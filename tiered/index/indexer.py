"""Makes the key index: finds what is not covered yet, reads it and gives it to a builder, a bounded step at a time.

What to do next is read from the journal's state in each step, never remembered: so a crash, another writer, a topic that
began anew or a tail that was truncated needs no care here. When what was collected does not fit the state any more it is
thrown away, and begun again.

Keys come from a ``KeyFeed``, if a writer has filled it, else from the records in the tier; which one makes no difference to
the result. The broker's own store is not asked: its consume queues scatter a queue over the whole log, and reading it one
record at a time costs four times what reading the tier does. An incarnation that cannot be read, because it is damaged, is
left alone until this indexer ends; it is counted.

Threads: one.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from typing import IO, TYPE_CHECKING, Final

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import BackendError, ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from backends.wrapping import put_own
from tiered import keys
from tiered.errors import DataError
from tiered.format.object import (
    INDEX_BLOCK_BYTES,
    ITEM,
    ITEM_BYTES,
    Items,
    Ties,
    bucket_bits,
    build_filter,
    build_object,
    order_keys,
    places_of,
)
from tiered.index.extract import extract_all, extract_keys, topic_seed
from tiered.journal.entry import INT_MAX, row_of
from tiered.log.parts import NO_PARTS, Cover, IndexObject, ObjectRange
from tiered.log.state import Gap, last_cut, uncovered
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt
    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.index.extract import Hashes, Keys
    from tiered.local.interface import RecordBatch
    from tiered.log.reader import QueueReader
    from tiered.log.state import Incarnation, Part, TierState
    from tiered.model import MessageQueue


# --------------------------------------------------------------------------------------------------
# Collects items until there are enough, and then rewrites them once: sorted, with a filter, as one immutable object.
#
# How to use it::
#
#     builder.add(queue, incarnation, batch, log_offset)     any number of times, queue by queue in order
#     made = builder.finish()                                the object is stored; a journal entry has to name it
#     builder.reset()                                        begin anew, whatever became of it
#
# Ordering: of each incarnation what is added goes on exactly where it ended; so what an object covers is one row of offsets
# an incarnation.
#
# Memory: ``finish`` holds the object (32 bytes an item, and 2.25 for the filter) and 20 bytes an item to sort by. Before
# that there is the work file, on disk.
#
# After an error nothing is half done: the caller resets, and adds again from what the journal says is covered. An object
# that no entry names is an orphan.
#
# Threads: one.
# --------------------------------------------------------------------------------------------------


# -- work --------------------------------------------------------------------------------------------
#
# The local work file: items in the order in which they came, until there are enough of them for an index object. They are
# ordered by the upper halves of their hashes, which stay in memory; so what is written is read once, to its place.
#
# It is a cache and nothing else: an anonymous temporary file, gone with the process. Whatever is lost with it is found
# again from the journal (``indexed_to``) and the records. What is read back has to have the checksum of what was written:
# bytes that the disk has changed are a ``DataError``, upon which everything is thrown away and built again.
#
# Threads: one.

_ROW: Final = np.dtype(f"V{ITEM_BYTES}")
"""An item as bytes without a meaning, which NumPy puts into their place twice as fast as words."""


class WorkFile:
    """Items on disk; in memory four bytes of each, what is being added, and 16 bytes for each such addition."""

    def __init__(self, directory: str | None = None) -> None:
        """Open a new file.

        Args:
            directory: Where; None: where the system has its temporary files.
        """
        self._directory = directory or tempfile.gettempdir()
        # Unbuffered: what a full disk has refused must not be tried again by `close`, which would fail then.
        self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115 (closed in close)
            dir=directory, prefix="tiered-index-", buffering=0
        )
        self._blocks: list[tuple[int, int]] = []
        self._uppers: list[npt.NDArray[np.uint32]] = []
        self.count = 0

    def append(self, hashes: Hashes, items: Items) -> None:
        """Add items and their hashes.

        Raises:
            OSError: The disk does not take them; the file is of no use any more.
        """
        if len(hashes):
            view = data = items.view(np.uint8).data
            try:
                while view:
                    view = view[self._file.write(view) :]
            except OSError as error:  # the system names no file in it
                raise OSError(error.errno, error.strerror, self._directory) from error
            self._blocks.append((len(items), zlib_ng.crc32(data)))
            self._uppers.append((hashes >> np.uint64(32)).astype(np.uint32))
            self.count += len(items)

    def order_keys(self) -> Hashes:
        """Those of all items, in the order in which they came."""
        return order_keys(np.concatenate([np.zeros(0, np.uint32), *self._uppers]))

    def blocks(self) -> Iterator[tuple[int, Items]]:
        """Everything as it was added, each with the number of its first item."""
        self._file.seek(0)
        start = 0
        for count, crc in self._blocks:
            data = b"".join(self._chunks(count * ITEM_BYTES))
            if len(data) != count * ITEM_BYTES or zlib_ng.crc32(data) != crc:
                raise DataError("the local work file of the key index has changed")
            yield start, np.frombuffer(data, ITEM)
            start += count
        self._file.seek(0, 2)

    def _chunks(self, size: int) -> Iterator[bytes]:
        """The next bytes, however the system cuts them; fewer at the end."""
        while size and (chunk := self._file.read(size)):
            size -= len(chunk)
            yield chunk

    def close(self) -> None:
        """Give the space back."""
        self._file.close()


# -- builder -----------------------------------------------------------------------------------------


COVER_MAX: Final = 2**32 - 1
"""Queue offsets of one incarnation that one object can cover: items count them with 32 bits."""
IncarnationKey = tuple["MessageQueue", int]


@dataclass(slots=True)
class _Covered:
    number: int
    start: int
    end: int
    cut_by: int


class IndexBuilder:
    """Makes index objects, one after another."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        next_id: Callable[[], keys.ObjectId],
        *,
        directory: str | None = None,
        pace: Callable[[int], None] = lambda _bytes: None,
    ) -> None:
        """Wire it; the work file is made when something is added.

        Args:
            next_id: Id of an object that is about to be begun.
            directory: For the work file; None: the system's for temporary files.
            pace: Called with the bytes of an upload before it begins; may wait.
        """
        self._pace = pace
        self._store = store
        self._prefix = prefix
        self._next_id = next_id
        self._directory = directory
        self._work: WorkFile | None = None
        self._covered: dict[IncarnationKey, _Covered] = {}

    @property
    def count(self) -> int:
        """Items collected."""
        return self._work.count if self._work else 0

    @property
    def is_empty(self) -> bool:
        """Nothing is covered yet."""
        return not self._covered

    def covered(self, queue: MessageQueue, incarnation: int) -> Cover | None:
        """What was added of an incarnation; None: nothing."""
        found = self._covered.get((queue, incarnation))
        return Cover(queue, incarnation, found.start, found.end, found.cut_by) if found else None

    def incarnations(self) -> list[IncarnationKey]:
        """Of which something was added."""
        return list(self._covered)

    def room(self, queue: MessageQueue, incarnation: int) -> int:
        """How many more queue offsets of an incarnation can be covered."""
        found = self._covered.get((queue, incarnation))
        return COVER_MAX - (found.end - found.start) if found else COVER_MAX

    def add_batch(
        self,
        queue: MessageQueue,
        incarnation: int,
        batch: RecordBatch,
        log_offset: int,
        *,
        cut_by: int = 0,
    ) -> None:
        """Add the keys of records; see ``add``.

        Args:
            log_offset: Of the first byte of ``batch.data`` in the tiered commit log.
            cut_by: See ``Cover``.
        """
        found = extract_keys(batch, topic_seed(queue.topic), log_offset)
        bounds = batch.base_offset, batch.end_offset
        self.add(queue, incarnation, *bounds, found, cut_by=cut_by)

    def add(
        self,
        queue: MessageQueue,
        incarnation: int,
        start: int,
        end: int,
        found: Iterable[Keys],
        *,
        cut_by: int = 0,
    ) -> None:
        """Add the keys of the messages in ``[start, end)``, which begins where what was added of this incarnation ended.

        After any error the builder has to be reset: nobody knows how much of it counts.

        Args:
            end: One past the last.
            found: Their keys; positions are log offsets.
            cut_by: See ``Cover``.
        """
        covered = self._cover(queue, incarnation, start, cut_by)
        work = self._work = self._work or WorkFile(self._directory)
        for some in found:
            work.append(some.hashes, _placed(some, covered))
        covered.end = end

    def add_nothing(
        self, queue: MessageQueue, incarnation: int, start: int, end: int, *, cut_by: int = 0
    ) -> None:
        """Cover queue offsets that have no message (a gap)."""
        self._cover(queue, incarnation, start, cut_by).end = end

    def finish(self) -> IndexObject:
        """Sort, and store the object.

        Raises:
            BackendError: The object is not stored, or nobody knows.
        """
        assert not self.is_empty
        work = self._work = self._work or WorkFile(self._directory)
        made_of = _sorted(work)
        items = made_of.items
        covers = tuple(
            cover for incarnation in self._covered if (cover := self.covered(*incarnation))
        )
        bounds = made_of.store_min_ms, made_of.store_max_ms
        low, high = (min(max(-1, bound), INT_MAX - 1) for bound in bounds)
        description = {
            "kind": "index",
            "count": len(items),
            "bucket_bits": bucket_bits(len(items)),
            "store_min_ms": low,
            "store_max_ms": high,
            "covers": [row_of(cover) for cover in covers],
        }
        data: list[Buffer] = [made_of.filter]
        if len(items):
            data.insert(0, items.view(np.uint8).data)
        made = build_object(data, description, block_bytes=INDEX_BLOCK_BYTES)
        self._pace(made.size_bytes)
        key = keys.index_key("", max(0, low), self._next_id())
        put_own(self._store, self._prefix + key, made.buffers)
        size = made.payload_bytes
        place = ObjectRange(key, size, made.trailer_bytes, made.payload_crc)
        return IndexObject(place, len(items), len(items) * ITEM_BYTES, low, high, covers)

    def reset(self) -> None:
        """Forget everything, and give the disk's space back."""
        work, self._work = self._work, None
        self._covered = {}
        if work:
            work.close()

    def _cover(self, queue: MessageQueue, incarnation: int, start: int, cut_by: int) -> _Covered:
        found = self._covered.get((queue, incarnation))
        if found is None:
            found = _Covered(len(self._covered), start, start, cut_by)
            self._covered[queue, incarnation] = found
        assert (found.end, found.cut_by) == (start, cut_by), "what is added goes on where it ended"
        return found


def _placed(found: Keys, covered: _Covered) -> Items:
    items = found.items.view(_ROW).copy().view(ITEM)
    items["queue"] = covered.number
    items["queue_offset"] += np.uint32(found.start - covered.start)
    return items


@dataclass(frozen=True, slots=True)
class _Sorted:
    items: Items
    filter: bytes
    store_min_ms: int
    store_max_ms: int


def _sorted(work: WorkFile) -> _Sorted:
    count = work.count
    keys = work.order_keys()
    keys.sort()
    filter_ = build_filter(keys, bucket_bits(count))
    ties, places = Ties.of(keys), places_of(keys)
    del keys
    rows = np.empty(count, _ROW)
    lows, highs = [], []
    for start, items in work.blocks():
        lows.append(int(items["store_ms"].min()))
        highs.append(int(items["store_ms"].max()))
        mine = places[start : start + len(items)].astype(np.int64)  # else each is cast by itself
        rows[mine] = items.view(_ROW)
    ordered = rows.view(ITEM)
    ties.order(ordered)
    return _Sorted(ordered, filter_, min(lows, default=-1), max(highs, default=-1))


# -- feed --------------------------------------------------------------------------------------------
#
# Keys taken while records are in memory anyway, on their way into the tier, so that nobody has to read them again.
#
# ``offer`` is called by upload threads when records are durable, and only keeps them: upload threads hand on one after
# another, and the journal's entry waits for them. ``extract`` finds the keys, in the indexer's thread; ``take`` gives them
# when the journal names their part. It is a cache: what is not there (from before the start, or for want of room) is read
# from the tier.
#
# Bounds (I8): ``bytes_max`` of memory, records and keys together. When it is full new records are refused, since the indexer
# wants the oldest first; but keys that have waited for ``STALE_S`` go: nobody wants them any more (an entry that did not
# come, parts that were merged).
#
# Threads: any.

_LOG = logging.getLogger("tiered.index")
FEED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Default limit: 1.6 million keys."""
STALE_S: Final = 600.0
_ENTRY_BYTES: Final = 500


@dataclass(frozen=True, slots=True)
class _HeldKeys:
    keys: tuple[Keys, ...]
    memory_bytes: int
    since_s: float


@dataclass(frozen=True, slots=True)
class StoredSection:
    """A section that was just stored, while its records are in memory."""

    bundle: str  # key of its bundle
    start: int  # its position there
    log_offset: int  # of its first record
    batches: Sequence[RecordBatch]


class KeyFeed:
    """Holds the keys of parts, by bundle and position of their section."""

    def __init__(self, clock: Clock, bytes_max: int = FEED_BYTES_MAX) -> None:
        self._clock = clock
        self._bytes_max = bytes_max
        self._bytes = 0
        self._lock = threading.Lock()
        self._offered: deque[Sequence[StoredSection]] = deque()
        self._offered_bytes = 0
        self._held: OrderedDict[tuple[str, int], _HeldKeys] = OrderedDict()
        self.refused = 0  # parts for whose records there was no room

    @property
    def memory_bytes(self) -> int:
        """What is held."""
        return self._bytes

    def offer(self, sections: Sequence[StoredSection]) -> bool:
        """Keep the records of sections until their keys are extracted; whether that had better be soon. From any thread."""
        size = _record_bytes(sections)
        with self._lock:
            self._drop_stale()
            if self._bytes + size > self._bytes_max:
                self.refused += len(sections)
                return True
            self._offered.append(sections)
            self._offered_bytes += size
            self._bytes += size
            return self._offered_bytes > self._bytes_max // 8

    def extract(self) -> None:
        """Find the keys of what was offered, and let its records go. Never raises for damage: the tier's copy is read."""
        while True:
            with self._lock:
                if not self._offered:
                    return
                sections = self._offered.popleft()
            held = _extracted(sections, self._clock.monotonic_s())
            size = _record_bytes(sections)
            with self._lock:
                self._offered_bytes -= size
                self._bytes -= size
                for section, keys_ in zip(sections, held, strict=False):
                    self._held[section.bundle, section.start] = keys_
                    self._bytes += keys_.memory_bytes

    def take(self, part: Part) -> tuple[Keys, ...] | None:
        """The keys of a part, positions being log offsets; None: not held. They are not held any more."""
        self.extract()
        with self._lock:
            held = self._held.pop((part.bundle.key, part.section.start), None)
            if held is None:
                return None
            self._bytes -= held.memory_bytes
        return held.keys

    def _drop_stale(self) -> None:
        now_s = self._clock.monotonic_s()
        while self._held:
            key, oldest = next(iter(self._held.items()))
            if now_s - oldest.since_s < STALE_S:
                return
            del self._held[key]
            self._bytes -= oldest.memory_bytes


def _record_bytes(sections: Sequence[StoredSection]) -> int:
    return sum(memoryview(batch.data).nbytes for one in sections for batch in one.batches)


def _extracted(sections: Sequence[StoredSection], now_s: float) -> list[_HeldKeys]:
    """The keys of each section; of none, if a record is damaged."""
    batches: list[RecordBatch] = []
    log_offsets: list[int] = []
    for section in sections:
        at = section.log_offset
        for batch in section.batches:
            batches.append(batch)
            log_offsets.append(at)
            at += memoryview(batch.data).nbytes
    try:
        of_batches = iter(extract_all(batches, log_offsets))
    except DataError as error:
        _LOG.warning("keys of %s are taken later: %s", sections[0].bundle, error)
        return []
    held = []
    for section in sections:
        found = [
            keys for _, some in zip(section.batches, of_batches, strict=False) for keys in some
        ]
        size = sum(keys.memory_bytes for keys in found) + _ENTRY_BYTES
        held.append(_HeldKeys(tuple(found), size, now_s))
    return held


# -- indexer -----------------------------------------------------------------------------------------


READ_BYTES: Final = 8 * 1024 * 1024
_COUNT_MAX: Final = 1 << 20
_ITEMS_MAX: Final = 1 << 62


class Indexer:
    """Gives a builder what no index covers yet."""

    def __init__(
        self, builder: IndexBuilder, store: ObjectStore, prefix: str, feed: KeyFeed | None = None
    ) -> None:
        """Wire it.

        Args:
            feed: Where to look first.
        """
        self.builder = builder  # collects it
        # Incarnations that cannot be read, and why.
        self.damaged: dict[tuple[MessageQueue, int], DataError] = {}
        self._store = store
        self._prefix = prefix
        self._feed = feed
        # The incarnation that is being read, kept from step to step, since a long one has many parts.
        self._reading: tuple[Incarnation, QueueReader] | None = None
        self._gone: dict[tuple[MessageQueue, int], Incarnation] = {}

    def step(
        self, state: TierState, *, bytes_max: int = READ_BYTES, items_max: int = _ITEMS_MAX
    ) -> int:
        """Take the next records, of any queues.

        Args:
            items_max: And when so many items are collected.

        Returns:
            How many bytes were read, or of keys that the feed had; 0 when all is covered or collected.

        Raises:
            BackendError: The tier did not answer; call again.
            OSError: The work file can't be written: what was collected is gone, call again.
        """
        if not self._fits(state):
            self.builder.reset()
        taken = 0
        for queue, incarnation, start, end in self._wanted(state):
            at, cut_by = start, last_cut(state.queues[queue], incarnation.number)
            while at < end and taken < bytes_max and self.builder.count < items_max:
                before = at
                at, size = self._take(queue, incarnation, cut_by, (at, end))
                taken += size
                if at == before:
                    break
            if taken >= bytes_max or self.builder.count >= items_max:
                break
        return taken

    def waits(self, state: TierState) -> int:
        """How many messages (and holes) are neither covered nor collected."""
        return sum(end - start for _, _, start, end in self._wanted(state))

    def _fits(self, state: TierState) -> bool:
        """Whether what was collected can still be named."""
        for queue, number in self.builder.incarnations():
            mine, incarnation = self.builder.covered(queue, number), _last(state, queue, number)
            holes = uncovered(incarnation) if incarnation else []
            if not mine or not holes or holes[0][0] != mine.start or mine.end > holes[0][1]:
                return False
            if mine.cut_by != last_cut(state.queues[queue], number):
                return False  # as long as before, and other messages
        return True

    def _wanted(self, state: TierState) -> Iterator[tuple[MessageQueue, Incarnation, int, int]]:
        for queue, incarnations in state.queues.items():
            for number in sorted({incarnation.number for incarnation in incarnations}):
                incarnation = _last(state, queue, number)
                holes = uncovered(incarnation) if incarnation else []
                if not incarnation or not holes or self._is_left(queue, incarnation):
                    continue
                collected = self.builder.covered(queue, number)
                start, end = holes[0]
                if collected:
                    end = min(end, collected.end + self.builder.room(queue, number))
                    start = collected.end
                if start < end:
                    yield queue, incarnation, start, end

    def _is_left(self, queue: MessageQueue, incarnation: Incarnation) -> bool:
        key = queue, incarnation.number
        return key in self.damaged or self._gone.get(key) is incarnation

    def _take(
        self, queue: MessageQueue, incarnation: Incarnation, cut_by: int, wanted: tuple[int, int]
    ) -> tuple[int, int]:
        """Take one chunk; where it ends, and how many bytes it had. The same place: it cannot be read now."""
        at, end = wanted
        part = _part_at(incarnation, at)
        try:
            if self._feed and part and part.queue_end <= end:
                found = self._feed.take(part)
                if found is not None:
                    ends = at, part.queue_end
                    self.builder.add(queue, incarnation.number, *ends, found, cut_by=cut_by)
                    return part.queue_end, sum(keys.memory_bytes for keys in found) or 1
            return self._read(queue, incarnation, cut_by, wanted)
        except BackendError:
            raise  # nothing was added
        except BaseException:
            self.builder.reset()  # nobody knows how far it got
            raise

    def _read(
        self, queue: MessageQueue, incarnation: Incarnation, cut_by: int, wanted: tuple[int, int]
    ) -> tuple[int, int]:
        from tiered.log.reader import QueueReader  # noqa: PLC0415 (start-up loads only what is needed)

        if self._reading is None or self._reading[0] is not incarnation:
            reader = QueueReader.of_incarnation(self._store, self._prefix, queue, incarnation)
            self._reading = incarnation, reader
        (at, end), number, found = wanted, incarnation.number, None
        try:
            count = min(end - at, _COUNT_MAX)
            found = self._reading[1].read(QueueOffset(at), bytes_max=READ_BYTES, count_max=count)
        # Merged or expired, and the journal is about to say so.
        except ObjectNotFoundError as error:
            _LOG.info("%s: not there at queue offset %d: %s", queue, at, error)
            self._gone[queue, number] = incarnation
        except DataError as error:
            self.damaged[queue, number] = error
            _LOG.warning("%s: keys from queue offset %d on are not indexed: %s", queue, at, error)
        if found is None:
            return at, 0
        if isinstance(found, Gap):
            self.builder.add_nothing(queue, number, at, min(found.end, end), cut_by=cut_by)
            return min(found.end, end), 0
        self.builder.add_batch(queue, number, found.records, found.log_offset, cut_by=cut_by)
        return found.records.end_offset, memoryview(found.records.data).nbytes or 1


def _part_at(incarnation: Incarnation, offset: int) -> Part | None:
    """The part that begins there; found without looking at every part of a long incarnation."""
    number = bisect_right(incarnation.segments, offset, key=lambda o: o.base_queue_offset) - 1
    parts = incarnation.segments[number].parts if number >= 0 else NO_PARTS
    at = int(np.searchsorted(parts.rows["queue_offset"], offset))
    found = parts[at] if at < len(parts) else None
    return found if found is not None and found.queue_offset == offset else None


def _last(state: TierState, queue: MessageQueue, number: int) -> Incarnation | None:
    """The last incarnation of this number: those before it were truncated."""
    incarnations = state.queues.get(queue, ())
    return next((one for one in reversed(incarnations) if one.number == number), None)
