"""Lookup by key: index objects by time and filter, the messages not indexed yet by scanning, newest first, exact.

Overview: what may hold the key is made a list of *units*, newest first: index objects whose times and queues fit and whose
filter has the key (one small read of the object each), and parts of queues that no index covers yet. Unit by unit messages
are fetched and checked, until there are as many as were asked for and nothing newer can come.

Complete: what no index covers is read from the tier itself, up to ``scan_bytes_max``; a lookup that had to stop there says
so (``Lookup.unscanned``). Damage costs what is damaged: the rest is found, and ``Lookup.damaged`` names it.

Exact: items are hints. Each message is held against topic, queue, queue offset, key and time itself; what has expired or
was truncated since does not come, nor what the tier's isolation hides; none comes twice. Incarnations of a queue that are
over are asked only on request.

An object that is gone (404): the journal is replayed, and all is asked again.

Threads: a reader may be used from any thread at once.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ObjectNotFoundError, ShortReadError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, InvalidError, OtherVersionError
from tiered.format.message_forms import message_line, split_batch
from tiered.format.object import (
    BUCKET_BITS_MAX,
    INDEX_BLOCK_BYTES,
    ITEM,
    ITEM_BYTES,
    Items,
    KeyFilter,
    Trailer,
    bucket_bits,
    filter_bytes,
    parse_trailer,
)
from tiered.format.properties import KEYS, TAGS, UNIQ_KEY, split_keys, tag_hash
from tiered.format.record import RECORD_BYTES_MIN, Record, RecordError, decode_record
from tiered.format.record_kind import RecordKind
from tiered.index.extract import extract_keys, key_hash, topic_seed
from tiered.log.decode import TierBatch
from tiered.log.messages import foreign_messages, messages_lines
from tiered.log.reader import READ_BYTES, QueueReader, TierReader
from tiered.log.sections import read_range
from tiered.log.state import Gap, TierState, uncovered
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.log.state import Part
    from tiered.model import MessageQueue

    Views = dict[tuple[MessageQueue, int], "IndexedIncarnation"]
    from collections.abc import Iterator

    from tiered.log.lineage import Isolation
    from tiered.log.parts import IndexObject, ObjectRange
    from tiered.log.salvage import Salvaged
    from tiered.model import MessageQueue


# -- asked -------------------------------------------------------------------------------------------
#
# What is looked for, and what was found.

COUNT: Final = 64
"""How many messages a lookup gives by default, as a broker does."""
SCAN_BYTES_MAX: Final = 256 * 1024 * 1024
"""How much of what is not indexed yet one lookup reads, by default."""
TIME_MAX: Final = 2**63 - 1


@dataclass(slots=True)
class Lookup:
    """What was found."""

    hits: list[AnyHit] = field(default_factory=list)
    """Newest first; of equal store times the greater queue offset first."""
    unscanned: int = 0
    """Messages that are not indexed yet and were not looked at, for the limit; 0: nothing is missing."""
    damaged: list[DataError] = field(default_factory=list)
    """What could not be read; messages there may be missing."""
    lost: int = 0  # how many messages these are; of a damaged index object nobody knows
    objects_read: int = 0  # index objects of which items were read

    @property
    def is_complete(self) -> bool:
        """Nothing that was asked for can be missing."""
        return not self.unscanned and not self.damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is looked for."""

    topic: str  # of the messages
    key: str  # one of a message's keys, or its unique id
    from_ms: int = -TIME_MAX  # stored at this time or later
    until_ms: int = TIME_MAX  # stored before this time
    count: int = COUNT  # so many, the newest (> 0, else ``InvalidError``)
    every_incarnation: bool = False
    """Also in incarnations of queues that are over (deleted topics, what brokers truncated)."""
    scan_bytes_max: int = SCAN_BYTES_MAX  # limit of what is read because no index covers it yet

    def __post_init__(self) -> None:
        if self.count <= 0:
            raise InvalidError(f"a lookup for {self.count} messages", do="ask for 1 or more")

    def wants(self, low_ms: int, high_ms: int) -> bool:
        """Whether messages stored in ``[low_ms, high_ms]`` may be wanted."""
        return high_ms >= self.from_ms and low_ms < self.until_ms


# -- candidates --------------------------------------------------------------------------------------
#
# From an item of an index to the message: one read by its log offset, checked on the record itself.


@dataclass(frozen=True, slots=True)
class AnyHit:
    """A message that has the key."""

    queue: MessageQueue  # where it is
    incarnation: int  # in which incarnation of the queue
    position: int  # its place among those of the queue
    queue_offset: int  # in that incarnation
    store_ms: int  # store time, UTC

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Greater is newer; a total order."""
        return self.store_ms, self.queue_offset, self.queue.queue_id, self.position


@dataclass(frozen=True, slots=True)
class Hit(AnyHit):
    """A message of RocketMQ's."""

    message: Record  # the message; an inner message as ``split_batch`` gives it
    stored: Record  # the record that holds it
    log_offset: int  # of that record in the tiered commit log

    @property
    def tag_code(self) -> int:
        """Of its item in the consume queue."""
        return tag_hash(self.stored.properties.get(TAGS))


@dataclass(frozen=True, slots=True)
class ForeignHit(AnyHit):
    """A message of another store."""

    batch: TierBatch  # its item alone, and the stored record that holds it


def hit_line(hit: AnyHit, *, raw_body: bool) -> bytes:
    """As a line of JSON without its end; see ``tiered.log.decode``."""
    if isinstance(hit, ForeignHit):
        return messages_lines(hit.batch.records, None, raw_body=raw_body)[0]
    assert isinstance(hit, Hit)
    return message_line(
        hit.message,
        tag_code=hit.tag_code,
        log_offset=hit.log_offset,
        raw_body=raw_body,
        stored_sys_flag=hit.stored.sys_flag,
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """What an item says: a place where a message may have the key."""

    queue: MessageQueue
    position: int
    queue_offset: int
    log_offset: int
    size: int
    store_ms: int


class IndexedIncarnation:
    """One incarnation of a queue, for reading single messages. Threads: any."""

    def __init__(self, store: ObjectStore, prefix: str, number: int, reader: QueueReader) -> None:
        self.queue = reader.queue
        self.number = number
        self.incarnation = reader.incarnation
        self.reader = reader
        self.parts: Sequence[Part] = self.incarnation.parts()
        self._starts = [part.queue_offset for part in self.parts]
        self._store = store
        self._prefix = prefix
        # Another store's: its messages may be older than what the journal says of the records that hold them.
        self.is_foreign = self.incarnation.lineage is not None

    def part_of(self, offset: int) -> Part | None:
        """The part that has a queue offset; None: none has."""
        at = bisect_right(self._starts, offset) - 1
        part = self.parts[at] if at >= 0 else None
        return part if part and offset < part.queue_end else None

    def fetch(self, candidate: Candidate, key: str) -> AnyHit | None:
        """The message, if it is there and has the key.

        The item may be older than the truth: the queue may have been truncated, and other messages may stand there
        now. So the record has to be of this queue and queue offset, or it is looked up in the consume queue.

        Raises:
            BackendError: It could not be read (``ObjectNotFoundError``: the journal is to be replayed).
        """
        offset = candidate.queue_offset
        part = self.part_of(offset)
        if part is None:
            return None  # expired, or truncated, or never there
        stored = None if self.is_foreign else self._at_log_offset(part, candidate)
        if stored is not None:
            return self.hit(*stored, offset, key)
        found = self.reader.read(QueueOffset(offset), count_max=1)
        if found is None or isinstance(found, Gap) or not found.records.sizes[0]:
            return None
        return next(self.hits_in(found, np.zeros(1, np.int64), key), None)

    def hits_in(
        self, batch: TierBatch, numbers: npt.NDArray[np.int64], key: str
    ) -> Iterator[AnyHit]:
        """Those of these items' messages that have the key; the items ascend, and none is a hole."""
        records = batch.records
        if records.kind is not RecordKind.ROCKETMQ:
            yield from self._foreign(batch, numbers, key)
            return
        for number, position in zip(
            numbers.tolist(), records.positions[numbers].tolist(), strict=True
        ):
            try:
                stored = decode_record(records.data, position, check_crc=False)
            except RecordError as error:
                raise DataError(f"a record is damaged: {error}", where=str(self.queue)) from error
            hit = self.hit(stored, batch.log_offset + position, records.base_offset + number, key)
            if hit:
                yield hit

    def _foreign(
        self, batch: TierBatch, numbers: npt.NDArray[np.int64], key: str
    ) -> Iterator[ForeignHit]:
        raw: tuple[int, bytes] = -1, b""  # where it begins; those that share one keep it once
        records, wanted = batch.records, key.encode("utf-8", "surrogateescape")
        for one in foreign_messages(records, numbers):
            if one.key == wanted:
                alone = slice(one.number, one.number + 1)
                at, size = int(records.positions[one.number]), int(records.sizes[one.number])
                if raw[0] != at:
                    raw = at, bytes(memoryview(records.data).cast("B")[at : at + size])
                mine = replace(
                    records,
                    base_offset=QueueOffset(records.base_offset + one.number),
                    data=raw[1],
                    positions=np.zeros(1, np.int64),
                    sizes=records.sizes[alone],
                    tag_codes=records.tag_codes[alone],
                    store_timestamps_ms=records.store_timestamps_ms[alone],
                    physical_offsets=records.physical_offsets[alone],
                )
                place = self.incarnation.number, self.number, int(mine.base_offset)
                log_offset = LogOffset(batch.log_offset + at)
                yield ForeignHit(self.queue, *place, one.time_ms, TierBatch(mine, log_offset))

    def hit(self, stored: Record, log_offset: int, offset: int, key: str) -> Hit | None:
        """The message of a record at a queue offset, if it has the key."""
        message = next((m for m in split_batch(stored) if m.queue_offset == offset), None)
        if message is None or not has_key(message, key):
            return None
        return Hit(
            self.queue,
            self.incarnation.number,
            self.number,
            offset,
            message.store_timestamp_ms,
            message,
            stored,
            log_offset,
        )

    def _at_log_offset(self, part: Part, candidate: Candidate) -> tuple[Record, int] | None:
        start = candidate.log_offset
        if candidate.size <= 0 or not part.log_offset <= start <= part.records_end - candidate.size:
            return None
        low = start - part.log_offset
        wanted = part.log.part_of(low, low + candidate.size)
        data = read_range(self._store, self._prefix, wanted)
        try:
            stored = decode_record(data, 0, check_crc=False)  # each block was checked
        except RecordError:
            return None
        mine = (stored.topic, stored.queue_id) == (self.queue.topic, self.queue.queue_id)
        is_there = mine and _holds(stored, candidate.queue_offset)
        return (stored, start) if is_there else None


class IncarnationViews:
    """Incarnations of queues by topic, made once for a state: a long incarnation has many parts. Threads: any."""

    def __init__(self, store: ObjectStore, prefix: str, isolation: Isolation | None) -> None:
        self._store = store
        self._prefix = prefix
        self._isolation = isolation
        self._held: tuple[TierState | None, dict[str, Views]] = (None, {})

    def of(self, state: TierState, topic: str) -> Views:
        """Every incarnation of every queue of a topic, by queue and number."""
        held = self._held
        if held[0] is not state:
            held = self._held = (state, {})
        found = held[1].get(topic)
        if found is None:
            found = held[1][topic] = {
                (queue, number): IndexedIncarnation(
                    self._store,
                    self._prefix,
                    number,
                    QueueReader.of_incarnation(
                        self._store, self._prefix, queue, incarnation, self._isolation
                    ),
                )
                for queue, incarnations in state.queues.items()
                if queue.topic == topic
                for number, incarnation in enumerate(incarnations)
            }
        return found


def has_key(message: Record, key: str) -> bool:
    """Whether a message has a key, or is the one with this unique id."""
    found = message.properties
    return found.get(UNIQ_KEY) == key or key in split_keys(found.get(KEYS))


def _holds(stored: Record, offset: int) -> bool:
    try:
        return any(message.queue_offset == offset for message in split_batch(stored))
    except DataError:
        return False


# -- search ------------------------------------------------------------------------------------------
#
# One lookup on one state of a tier: units, newest first, until nothing newer can come.


RUN_ITEMS: Final = 2048
"""Items read at once of a key that has more (64 KiB)."""
Spread = Callable[
    [Callable[[Candidate], "AnyHit | None"], Sequence[Candidate]], Iterable["AnyHit | None"]
]
"""``map``, or that of an executor."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a lookup works with."""

    views: IncarnationViews  # incarnations of queues, for reading messages
    objects: IndexObjects  # the index objects, and the filters in memory
    spread: Spread  # fetches messages
    read_bytes: int  # how much of what is not indexed is read at once, about


_Unit = tuple[int, Callable[[], None]]
"""The newest time that may come of what may hold the key, and the look at it."""


class Search:
    """One lookup on one state."""

    def __init__(self, means: Means, state: TierState, wish: Wish, *, gone_is_damage: bool) -> None:
        """Ask nothing yet.

        Args:
            gone_is_damage: An object that is gone is damage; else an ``ObjectNotFoundError``.
        """
        self._objects = means.objects
        self._spread = means.spread
        self._read_bytes = means.read_bytes
        self._state = state
        self._wish = wish
        self._gone_is_damage = gone_is_damage
        self._hash = key_hash(wish.topic, wish.key)
        self._hits: dict[tuple[MessageQueue, int, int], AnyHit] = {}
        self._found = Lookup()
        self._scan_left = wish.scan_bytes_max
        self._views = {
            (queue, number): view
            for (queue, number), view in means.views.of(state, wish.topic).items()
            if wish.every_incarnation or number == len(state.queues[queue]) - 1
        }

    def run(self) -> Lookup:
        """Do it."""
        units = sorted([*self._indexes(), *self._tails()], key=lambda unit: -unit[0])
        for newest_ms, look in units:
            if newest_ms < self._oldest_wanted():
                break
            look()
        hits = sorted(self._hits.values(), key=lambda hit: hit.order, reverse=True)
        self._found.hits = hits[: self._wish.count]
        return self._found

    def _oldest_wanted(self) -> int:
        """Nothing that is older than this can be among the newest any more."""
        times = sorted((hit.store_ms for hit in self._hits.values()), reverse=True)
        count = self._wish.count
        return times[count - 1] if len(times) >= count else -TIME_MAX

    # -- index objects --------------------------------------------------------------------------

    def _indexes(self) -> Iterator[_Unit]:
        for index in self._state.indexes:
            if index.count and self._wish.wants(index.store_min_ms, index.store_max_ms):
                incarnations = self._incarnations_of(index)
                if incarnations:
                    yield index.store_max_ms, partial(self._ask, index, incarnations)

    def _incarnations_of(self, index: IndexObject) -> dict[int, list[IndexedIncarnation]]:
        """The wanted incarnations that an object covers, by their number in it."""
        found: dict[int, list[IndexedIncarnation]] = {}
        for number, cover in enumerate(index.covers):
            if cover.queue.topic == self._wish.topic:
                views = [
                    view
                    for (queue, _), view in self._views.items()
                    if queue == cover.queue and view.incarnation.number == cover.incarnation
                ]
                if views:
                    found[number] = views
        return found

    def _ask(self, index: IndexObject, incarnations: dict[int, list[IndexedIncarnation]]) -> None:
        with self._noting():
            loaded = self._objects.load(index)
            start, end = loaded.filter.find(self._hash)
            self._found.objects_read += start < end
            is_ordered = loaded.filter.bits == BUCKET_BITS_MAX
            while start < end:
                stop = min(end, start + RUN_ITEMS)
                items = self._objects.items(index, loaded, start, stop)
                if self._take(index, items, incarnations) and is_ordered:
                    break
                start = stop

    def _take(
        self, index: IndexObject, items: Items, incarnations: dict[int, list[IndexedIncarnation]]
    ) -> bool:
        """Fetch what items point at; True: there are enough, and the rest of these is older."""
        wish = self._wish
        times = items["store_ms"].astype(np.int64)
        mine = items["hash_low"] == np.uint32(self._hash & 0xFFFF_FFFF)
        mine &= np.isin(items["queue"], list(incarnations))
        wanted = np.flatnonzero(mine & (times >= wish.from_ms) & (times < wish.until_ms))
        for begin in range(0, len(wanted), wish.count):
            if times[wanted[begin:]].max() < self._oldest_wanted():
                return True
            numbers = wanted[begin : begin + wish.count].tolist()
            some = [
                place for at in numbers for place in self._places(index, items[at], incarnations)
            ]
            for hit in self._spread(self._fetch, some):
                if hit:
                    self._keep(hit)
        return False

    @contextlib.contextmanager
    def _noting(self, count: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Note what is damaged, and how many messages cannot be looked at for that; and go on."""
        try:
            yield
        except DataError as error:
            self._found.damaged.append(error)
            self._found.lost += count()
        except ObjectNotFoundError as error:
            if not self._gone_is_damage:
                raise
            do = "`tiered verify` shows what is missing; an index: `tiered rebuild --index`"
            damage = DataError(f"an object that the journal names is gone: {error}", do=do)
            self._found.damaged.append(damage)
            self._found.lost += count()

    def _places(
        self, index: IndexObject, item: np.void, incarnations: dict[int, list[IndexedIncarnation]]
    ) -> Iterator[Candidate]:
        number = int(item["queue"])
        offset = index.covers[number].start + int(item["queue_offset"])
        for view in incarnations[number]:
            if (view.queue, view.number, offset) not in self._hits:
                yield Candidate(
                    view.queue,
                    view.number,
                    offset,
                    int(item["log_offset"]),
                    int(item["size"]),
                    int(item["store_ms"]),
                )

    def _fetch(self, candidate: Candidate) -> AnyHit | None:
        found: list[AnyHit | None] = []
        with self._noting(lambda: 1):
            view = self._views[candidate.queue, candidate.position]
            found.append(view.fetch(candidate, self._wish.key))
        return found[0] if found else None

    def _keep(self, hit: AnyHit) -> None:
        if self._wish.from_ms <= hit.store_ms < self._wish.until_ms:
            self._hits[hit.queue, hit.position, hit.queue_offset] = hit

    # -- what is not indexed yet ------------------------------------------------------------------

    def _tails(self) -> Iterator[_Unit]:
        for view in self._views.values():
            for start, end in uncovered(view.incarnation):
                for part in view.parts:
                    low = max(start, part.queue_offset)
                    high = min(end, part.queue_end, view.reader.cursor.end)
                    oldest_ms = -TIME_MAX if view.is_foreign else part.store_min_ms
                    timed = part.store_max_ms >= 0 or view.is_foreign
                    if low < high and timed and self._wish.wants(oldest_ms, part.store_max_ms):
                        yield part.store_max_ms, partial(self._scan, view, low, high)

    def _scan(self, view: IndexedIncarnation, start: int, end: int) -> None:
        """Look at every message in ``[start, end)``, as far as the limit goes."""
        at, stop, reader, size_bytes = start, QueueOffset(end), view.reader, self._read_bytes
        count = size_bytes // RECORD_BYTES_MIN + 1
        read = partial(reader.batches, end=stop, bytes_max=size_bytes, count_max=count)
        sound = reader.past_damage(QueueOffset(start), stop, self._count_lost, read=read)
        with self._noting(lambda: end - at):
            while self._scan_left > 0:
                batch = next(sound, None)
                if batch is None:
                    return
                self._look_at(view, batch)
                at = batch.end_offset
            self._found.unscanned += end - at

    def _count_lost(self, found: Salvaged) -> None:
        if found.lost:
            self._found.lost += sum(high - low for low, high in found.lost)
            self._found.damaged.append(found.error)

    def _look_at(self, view: IndexedIncarnation, batch: TierBatch) -> None:
        data = batch.records.data
        self._scan_left -= memoryview(data).nbytes
        for keys in extract_keys(batch.records, topic_seed(self._wish.topic)):
            mine = np.unique(keys.items["queue_offset"][keys.hashes == np.uint64(self._hash)])
            numbers = mine.astype(np.int64)
            # Those of another store's are decoded together: many may share a stored record.
            for some in [numbers] if view.is_foreign else numbers.reshape(-1, 1):
                with self._noting(partial(len, some)):
                    for hit in view.hits_in(batch, some, self._wish.key):
                        self._keep(hit)


# -- objects -----------------------------------------------------------------------------------------
#
# Reads index objects: the filter once, with one request, and then runs of items, one request each. Every byte is checked.
#
# Filters are kept in memory under a budget, the least recently used go first: 2.25 bytes an item, and 4 for each 4 KiB of
# the
# object (its blocks' checksums, so that a run needs no second request). Threads: any; two that want the same filter at the
# same time may both load it.

FILTER_BYTES_MAX: Final = 256 * 1024 * 1024
"""Default budget: the filters of 100 objects of a million items."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is kept of an index object."""

    filter: KeyFilter  # directory and fingerprints
    crcs: npt.NDArray[np.uint32]  # uint32[n], CRC-32 of each block of the payload

    @property
    def memory_bytes(self) -> int:
        """What it holds."""
        return self.filter.memory_bytes + self.crcs.nbytes


class IndexObjects:
    """Index objects of one broker's tier."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        filter_bytes_max: int = FILTER_BYTES_MAX,
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Hold nothing yet.

        Args:
            filter_bytes_max: Budget of all filters; one that is larger by itself is loaded each time.
            tell: Told how many bytes are held, whenever that changes; with a lock held.
        """
        self._tell = tell
        self._store = store
        self._prefix = prefix
        self._bytes_max = filter_bytes_max
        self._bytes = 0
        self._held: OrderedDict[str, Loaded] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Of the filters held."""
        return self._bytes

    def load(self, index: IndexObject) -> Loaded:
        """The filter of an object: from memory, or with one request."""
        key = index.place.key
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held
        loaded = self._load(index)
        with self._lock:
            if key not in self._held and loaded.memory_bytes <= self._bytes_max:
                self._held[key] = loaded
                self._bytes += loaded.memory_bytes
                while self._bytes > self._bytes_max:
                    self._bytes -= self._held.popitem(last=False)[1].memory_bytes
                self._tell(self._bytes)
        return loaded

    def items(self, index: IndexObject, loaded: Loaded, start: int, end: int) -> Items:
        """Items ``[start, end)``, with one request."""
        low, high = start * ITEM_BYTES, end * ITEM_BYTES
        first = low // INDEX_BLOCK_BYTES * INDEX_BLOCK_BYTES
        last = min(-(-high // INDEX_BLOCK_BYTES) * INDEX_BLOCK_BYTES, index.place.payload_bytes)
        data = self._get(index, first, last)
        self._check(index, data, first, loaded.crcs)
        return np.frombuffer(data, ITEM, end - start, low - first)

    def _load(self, index: IndexObject) -> Loaded:
        place, where = index.place, self._prefix + index.place.key
        bits = bucket_bits(index.count)
        size = filter_bytes(index.count, bits)
        if index.filter_at != index.count * ITEM_BYTES or place.payload_bytes - index.filter_at != size:  # fmt: skip
            raise _damaged("the journal's sizes of this index object contradict each other", where)
        first = index.filter_at // INDEX_BLOCK_BYTES * INDEX_BLOCK_BYTES
        data = self._get(index, first, place.object_bytes)
        trailer = check_trailer(data[place.payload_bytes - first :], place, where=where)
        if trailer.block_bytes != INDEX_BLOCK_BYTES:
            raise OtherVersionError(
                f"an index object has blocks of {trailer.block_bytes} bytes", where=where
            )
        crcs = np.array(trailer.block_crcs, np.uint32)
        payload = memoryview(data)[: place.payload_bytes - first]
        self._check(index, payload, first, crcs)
        found = KeyFilter.parse(payload[index.filter_at - first :], index.count, bits, where=where)
        return Loaded(found, crcs)

    def _get(self, index: IndexObject, start: int, end: int) -> bytes:
        key = self._prefix + index.place.key
        try:
            return self._store.get(key, ByteRange(start, end))
        except (InvalidRangeError, ShortReadError) as error:
            raise _damaged(f"the object is shorter than the journal says: {error}", key) from error

    def _check(
        self,
        index: IndexObject,
        data: bytes | memoryview,
        start: int,
        crcs: npt.NDArray[np.uint32],
    ) -> None:
        view = memoryview(data)
        for at in range(0, len(view), INDEX_BLOCK_BYTES):
            block = view[at : at + INDEX_BLOCK_BYTES]
            if zlib_ng.crc32(block) != int(crcs[(start + at) // INDEX_BLOCK_BYTES]):
                where = self._prefix + index.place.key
                what = f"bytes [{start + at}, {start + at + len(block)}) fail their checksum"
                raise _damaged(what, where)


def check_trailer(tail: bytes, place: ObjectRange, *, where: str) -> Trailer:
    """Parse what lies behind an object's payload and hold it against the journal."""
    trailer = parse_trailer(tail, where=where)
    found = trailer.payload_bytes, trailer.trailer_bytes, trailer.payload_crc
    named = place.payload_bytes, place.trailer_bytes, place.crc
    if len(tail) != place.trailer_bytes or found != named:
        raise _damaged("the object is not the one that the journal names", where)
    return trailer


def _damaged(what: str, where: str) -> DataError:
    return DataError(what, where=where, do="`tiered rebuild URL --index` makes it again")


# -- reader ------------------------------------------------------------------------------------------


__all__ = [
    "COUNT",
    "SCAN_BYTES_MAX",
    "AnyHit",
    "ForeignHit",
    "Hit",
    "IndexReader",
    "Lookup",
    "Wish",
]
_REPLAYS_MAX: Final = 4


class IndexReader:
    """Looks keys up in one broker's tier."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        journal: TierReader | None = None,
        filter_bytes_max: int = FILTER_BYTES_MAX,
        tell: Callable[[int], None] = lambda _: None,
        spread: Spread = map,
    ) -> None:
        """Read nothing yet.

        Args:
            journal: Is refreshed when an object is gone; default: one of its own.
            filter_bytes_max: Budget of the filters that are kept in memory, and, while a lookup runs, of the messages that
                it looks at since no index covers them (or one that is larger).
            tell: See ``IndexObjects``.
            spread: Fetches messages (``map`` of an executor: several at once).
        """
        # Its index objects, and the filters in memory.
        self.objects = IndexObjects(store, prefix, filter_bytes_max=filter_bytes_max, tell=tell)
        read_bytes = min(READ_BYTES, filter_bytes_max // 2)
        self._journal = journal or TierReader(store, prefix)
        views = IncarnationViews(store, prefix, self._journal.isolation)
        self._means = Means(views, self.objects, spread, read_bytes)

    def lookup(self, state: TierState, wish: Wish) -> Lookup:
        """Find messages."""
        for _ in range(_REPLAYS_MAX):
            try:
                return Search(self._means, state, wish, gone_is_damage=False).run()
            except ObjectNotFoundError:  # merged or expired meanwhile, as a rule
                self._journal.refresh()
                if self._journal.state == state:
                    break
                state = self._journal.state
        return Search(self._means, state, wish, gone_is_damage=True).run()
