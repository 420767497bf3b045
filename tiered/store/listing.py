"""What follows the log: consume queues, the key index, then the registered dispatchers, in this order.

**Contract.** Chunks of the log are taken in log order by one thread, the reput thread or recovery. A record whose queue
offset is listed already is passed over (duplicates are ignored by offset). Consume queues are written behind the log,
so what they list is there. Dispatchers get what was listed, as batches of one queue; one that refuses a batch looks
after itself (``TieredDispatcher`` compensates).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.crashpoints import reached
from tiered.errors import DataError
from tiered.format.block import group_by_queue, inner_counts, properties_bytes
from tiered.format.items import BATCH_ITEM, BATCH_ITEM_BYTES, ITEM_BYTES, encode_items, fillers
from tiered.format.properties import java_hash, parse_properties, tag_hash
from tiered.format.property_columns import PropertyColumns, Texts, Words, hash_texts, split_at
from tiered.format.sysflag import is_listable
from tiered.local.catalog import SCHEDULE_TOPIC
from tiered.local.chunks import LogChunks, Next
from tiered.local.consumequeues import BatchQueue, PlainQueue
from tiered.local.interface import RecordBatch
from tiered.local.layout import BATCH_DIRECTORY, QUEUE_DIRECTORY
from tiered.local.queue_reader import cut_records
from tiered.model import MessageQueue, QueueOffset
from tiered.store.new_message import delivery_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tiered.format.block import RecordBlock
    from tiered.local.mapped_file_queue import FileCache, MappedFileQueue
    from tiered.store.disk import RowWriter
    from tiered.store.encoding import EncodedKind, Prepared, RecordPlaces
    from tiered.store.keyindex import KeyIndex
    from tiered.store.new_message import IdRun

# -- facts ---------------------------------------------------------------------------------------
#
# What consume queues and the key index want to know of a chunk of the log: from its bytes, or from what was handed over.
#
# Both ways give the same, which tests hold equal: a running store is told by its own writer (``StoredHandover``),
# recovery, and a store that has fallen behind, read the log.

# -- from the writer -------------------------------------------------------------------------------

BYTES_MAX: Final = 32 << 20
_BYTES_EACH: Final = 256
"""About what a message takes besides its properties."""


@dataclass(slots=True, eq=False)  # made for every append: frozen ones take twice as long
class Handed:
    """The messages of one append."""

    begin: int  # where the log ended before it
    end: int  # behind the last record
    store_ms: int  # store time of all of them, UTC
    topics: Sequence[str]  # of each
    queue_ids: Sequence[int]  # of each
    queue_offsets: Sequence[int]  # of each
    positions: Sequence[int]  # physical offset of each
    sizes: Sequence[int]  # bytes of each record
    kinds: Sequence[EncodedKind]  # of each: its sysFlag
    properties: Sequence[bytes]  # as stored
    tags: Sequence[str | None]  # as given, of each
    keys: Sequence[str | None]  # as given, of each
    ids: Sequence[IdRun] | None
    """Of plain messages, whose properties need not be looked into (see ``Prepared``); else None."""

    @property
    def distinct_topics(self) -> Sequence[str]:
        """Each at least once."""
        return self.topics if self.ids is None else self.topics[:1]

    @property
    def size_bytes(self) -> int:
        """Of memory, about."""
        return _BYTES_EACH * len(self.sizes) + sum(map(len, self.properties))


class StoredHandover:
    """What was appended, handed to the thread that lists it, so that it need not read the log again.

    **Contract.** The writer gives what it has written, in log order, without bodies; one thread takes it, in the same
    order. No more than about ``BYTES_MAX`` are held: then the oldest go, and who takes reads those from the log
    instead. Nothing is lost with it in a crash: the log has it all.
    """

    def __init__(self) -> None:
        self._waiting: deque[Handed] = deque()
        self._given = self._taken = self._dropped = 0
        self._next: Handed | None = None
        self._is_off = False

    def give(self, begin: int, messages: Prepared, places: RecordPlaces) -> None:
        """Hand over what was written. From one thread at a time."""
        if self._is_off:
            return
        handed = Handed(
            begin,
            places.end,
            places.store_ms,
            messages.fields.topics,
            messages.fields.queue_ids,
            places.queue_offsets,
            places.positions,
            messages.sizes,
            messages.kinds,
            messages.properties,
            messages.fields.tags,
            messages.fields.keys,
            messages.ids,
        )
        self._waiting.append(handed)
        self._given += handed.size_bytes
        while self._given - self._taken - self._dropped > BYTES_MAX and (oldest := self._pop()):
            self._dropped += oldest.size_bytes

    def take(self, position: int, limit: int, count_max: int) -> list[Handed]:
        """What was appended from ``position`` on below ``limit``, about ``count_max`` messages.

        Empty when the log has to be read from ``position`` on, up to what ``peek`` tells.
        """
        found: list[Handed] = []
        count = 0
        while count < count_max and (handed := self.peek()) is not None:
            if handed.begin >= position:
                if handed.begin > position or handed.end > limit:
                    break
                found.append(handed)
                position, count = handed.end, count + len(handed.sizes)
            self._next = None  # it is taken, or was read from the log already
        return found

    def stop(self) -> None:
        """Hold nothing from now on: who takes wants the records themselves. From the thread that takes."""
        self._is_off, self._next = True, None
        self._waiting.clear()

    def peek(self) -> Handed | None:
        """The next one, for the thread that takes."""
        if self._next is None:
            self._next = self._pop()
            if self._next is not None:
                self._taken += self._next.size_bytes
        return self._next

    def _pop(self) -> Handed | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None


# -- tags and keys ---------------------------------------------------------------------------------

Longs = npt.NDArray[np.int64]
Group = tuple["MessageQueue", Longs]
_INT: Final = 0xFFFF_FFFF
_INT_MAX: Final = 0x7FFF_FFFF


def key_hash(topic: str, key: str) -> int:
    """The hash of one key, as an index file stores it: Java's of ``topic#key``, made positive."""
    value = java_hash(f"{topic}#{key}")
    return 0 if value == -(1 << 31) else abs(value)


@dataclass(frozen=True, slots=True)
class Described:
    """What consume queues and the index want to know of a chunk of the log."""

    tag_codes: Longs  # int64[n], of each record
    hashes: Longs  # int64[m], of the keys, in log order; of a record the unique key first
    owners: Longs  # int64[m], which record each key is of


def describe(columns: PropertyColumns, groups: Sequence[Group], count: int) -> Described:
    """Tag codes and keys of the records in ``groups``, each of one queue; 0 and none for others of ``count``."""
    leads, is_meant = np.zeros(count, np.uint32), np.zeros(count, np.bool_)
    for queue, indices in groups:
        leads[indices] = _lead(queue.topic)
        is_meant[indices] = True
    found = zip(*columns.lookup_keys(), strict=True)
    owners, starts, sizes = (np.concatenate(some) for some in found)
    kept = is_meant[owners]
    owners = owners[kept]
    hashes = columns.java_hashes(starts[kept], sizes[kept], leads[owners])
    return _in_order(np.where(is_meant, columns.tag_codes(), 0), hashes, owners)


def _in_order(tag_codes: Longs, hashes: Longs, owners: Longs) -> Described:
    """Put keys into log order, and make their signed hashes those that an index has."""
    order = np.argsort(owners, kind="stable")
    hashes = np.abs(hashes[order])
    hashes[hashes > _INT_MAX] = 0
    return Described(tag_codes, hashes, owners[order])


@lru_cache(maxsize=4096)
def _lead(topic: str) -> int:
    """The hash of what stands before each key of a topic."""
    return java_hash(f"{topic}#") & _INT


# -- facts -----------------------------------------------------------------------------------------


_SYS_FLAG: Final = attrgetter("sys_flag")


@dataclass(frozen=True, slots=True)
class Facts:
    """A chunk of the log."""

    groups: Sequence[Group]  # for each queue the indices of its records, in log order
    # physical_offsets, queue_offsets, store_timestamps_ms: int64[n].
    physical_offsets: Longs
    queue_offsets: Longs
    store_timestamps_ms: Longs
    # sizes, sys_flags: int32[n].
    sizes: npt.NDArray[np.int32]
    sys_flags: npt.NDArray[np.int32]
    described: Described  # tags and keys
    block: RecordBlock | None = None  # the records themselves; None when they were handed over

    def __len__(self) -> int:
        return len(self.sizes)


def of_block(block: RecordBlock, among: npt.NDArray[np.bool_] | None = None) -> Facts:
    """Of parsed records; ``among``: bool[n], which count (None: all without a fault)."""
    groups = group_by_queue(block, among=among)
    return Facts(
        groups,
        block.physical_offsets,
        block.queue_offsets,
        block.store_timestamps_ms,
        block.sizes,
        block.sys_flags,
        describe(PropertyColumns.of(block), groups, len(block)),
        block,
    )


def of_handed(handed: Sequence[Handed]) -> Facts:
    """Of appends, one behind another."""
    counts = [len(one.sizes) for one in handed]
    count = sum(counts)
    groups = _group(handed, count)
    if all(one.ids is not None for one in handed):
        flags = np.repeat(np.array([one.kinds[0].sys_flag for one in handed], np.int32), counts)
        described = _describe_plain(handed, counts)
    else:
        kinds = chain.from_iterable(one.kinds for one in handed)
        flags = np.fromiter(map(_SYS_FLAG, kinds), np.int32, count)
        raws = list(chain.from_iterable(one.properties for one in handed))
        lengths = np.fromiter(map(len, raws), np.int64, count)
        columns = PropertyColumns(b"".join(raws), lengths.cumsum() - lengths, lengths)
        described = describe(columns, groups, count)
    return Facts(
        groups,
        _column((one.positions for one in handed), count),
        _column((one.queue_offsets for one in handed), count),
        np.repeat(np.array([one.store_ms for one in handed], np.int64), counts),
        _column((one.sizes for one in handed), count).astype(np.int32),
        flags,
        described,
    )


def _column(parts: Iterable[Sequence[int]], count: int) -> Longs:
    return np.fromiter(chain.from_iterable(parts), np.int64, count)


def _group(handed: Sequence[Handed], count: int) -> list[Group]:
    """The records of each queue, known by the number of its topic and the 16 bits of its id."""
    topics = dict.fromkeys(chain.from_iterable(one.distinct_topics for one in handed))
    names, codes = list(topics), _column((one.queue_ids for one in handed), count)
    if len(names) == 1:  # short ones are sorted by their digits
        order = np.argsort(codes.astype(np.uint16), kind="stable")
    else:
        numbers = {name: number << 16 for number, name in enumerate(names)}
        every = chain.from_iterable(one.topics for one in handed)
        codes += np.fromiter(map(numbers.__getitem__, every), np.int64, count)
        order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    queues = [MessageQueue(names[one >> 16], one & 0xFFFF) for one in ordered[firsts].tolist()]
    return list(zip(queues, np.split(order, firsts[1:]), strict=True))


_TIME_DIGITS: Final = 8
"""Of a unique id, behind its maker."""


def _describe_plain(handed: Sequence[Handed], counts: Sequence[int]) -> Described:
    """Tags and keys as they were given: nothing is looked for, and unique ids are hashed by their counters."""
    count = sum(counts)
    tags = list(chain.from_iterable(one.tags for one in handed))
    codes = {tag: tag_hash(tag) for tag in set(tags)}
    tag_codes = np.fromiter(map(codes.__getitem__, tags), np.int64, count)
    runs = [(one.topics[0], *run) for one in handed for run in one.ids or ()]
    leads = [_lead_of_ids(topic, prefix) for topic, prefix, _, _ in runs]
    firsts, lengths = np.array([run[2:] for run in runs], np.int64).T
    counters = np.repeat(firsts - (lengths.cumsum() - lengths), lengths) + np.arange(count)
    unique = np.repeat(np.array(leads, np.uint32), lengths) + _counter_hashes()[counters]
    hashes, owners = unique.view(np.int32).astype(np.int64), np.arange(count)
    keyed = [one for one in handed if one.keys[0] is not None]
    if keyed:
        whose = owners
        if len(keyed) < len(handed):
            whose = np.flatnonzero(np.repeat([one.keys[0] is not None for one in handed], counts))
        before = np.array([_lead(one.topics[0]) for one in handed], np.uint32)
        given = cast("list[str]", list(chain.from_iterable(one.keys for one in keyed)))
        of_key, found = _hash_given(given, whose, np.repeat(before, counts))
        hashes, owners = np.concatenate((hashes, found)), np.concatenate((owners, of_key))
    return _in_order(tag_codes, hashes, owners)


def _hash_given(keys: Sequence[str], owners: Longs, leads: Words) -> tuple[Longs, Longs]:
    """Whose each key is, and its signed hash; ``leads``: uint32[n], the hash of what stands before a record's keys."""
    sizes = np.fromiter(map(len, keys), np.int64, len(keys))
    text = "".join(keys)
    data, at = np.frombuffer(text.encode(), np.uint8), sizes.cumsum() - sizes
    if " " in text:
        owners, at, sizes = split_at(np.flatnonzero(data == ord(" ")), Texts(owners, at, sizes))
    return owners, hash_texts(data, at, sizes, leads[owners])


@lru_cache(maxsize=4096)
def _lead_of_ids(topic: str, prefix: str) -> int:
    """What topic and prefix are worth in the hash of a unique id, behind which four digits stand."""
    maker, time = (
        prefix[:-_TIME_DIGITS],
        prefix[-_TIME_DIGITS:],
    )  # a new time comes each millisecond
    return (_lead_of_maker(topic, maker) + java_hash(time)) * pow(31, 4) & _INT


@lru_cache(maxsize=4096)
def _lead_of_maker(topic: str, maker: str) -> int:
    return java_hash(f"{topic}#{maker}") * pow(31, _TIME_DIGITS)


@lru_cache(maxsize=1)
def _counter_hashes() -> Words:
    digits, counters = np.frombuffer(b"0123456789ABCDEF", np.uint8), np.arange(1 << 16)
    found = np.zeros(1 << 16, np.uint32)
    for shift in (12, 8, 4, 0):
        found = found * np.uint32(31) + digits[counters >> shift & 15]
    return found


# -- listing ----------------------------------------------------------------------------------------

Dispatch = Callable[[RecordBatch], bool]
"""Offered the records of one queue; never blocks for long. False: it will fetch them itself."""


class Listing:
    """The followers of one store's log."""

    def __init__(
        self,
        root: str,
        queues: Mapping[MessageQueue, QueueEnd],
        rows: RowWriter,
        index: KeyIndex,
        kinds: QueueKinds,
    ) -> None:
        self.queues = dict(queues)  # where each queue's list ends
        self.duplicates = 0  # records passed over because their queue offset was listed
        self.last_ms = 0  # store time of the last record taken; 0 without one
        self._untold: list[RecordBatch] = []
        self._root = root
        self._rows = rows
        self._index = index
        self._kinds = kinds

    def needs_records(self, facts: Facts) -> bool:
        """Whether what was handed over does not suffice: the log must be read."""
        return any(self._kinds.needs_records(queue.topic) for queue, _ in facts.groups)

    def take(self, facts: Facts, dispatchers: Sequence[Dispatch] = ()) -> None:
        """List the records of a chunk of the log, then call the dispatchers, in order.

        For dispatchers the facts must have their block. After an OSError taking the same chunk again does the rest.
        Dispatchers then hear what they have not heard; all of them hear it all again where one of them failed.
        """
        batches = self._untold
        for queue, indices in facts.groups if dispatchers else self._list_plainly(facts):
            batch = self._list(queue, facts, indices, is_offered=bool(dispatchers))
            if batch is not None:
                batches.append(batch)
        reached("store-listed")
        owners = facts.described.owners
        if len(owners):
            self._index.put(
                facts.described.hashes,
                facts.physical_offsets[owners],
                facts.store_timestamps_ms[owners],
            )
        reached("store-indexed")
        if len(facts):
            self.last_ms = max(self.last_ms, int(facts.store_timestamps_ms.max()))
        for dispatch in dispatchers:
            for batch in batches:
                dispatch(batch)
        batches.clear()

    def _list_plainly(self, facts: Facts) -> list[Group]:
        """Write the items of queues that simply go on, which hardly one does not; the groups of the others.

        What is asked of each record is asked of all at once, so that a queue costs little more than its write.
        """
        groups = facts.groups
        if not groups:
            return []
        order = np.concatenate([indices for _, indices in groups])
        lengths = np.array([len(indices) for _, indices in groups])
        ends = lengths.cumsum()
        firsts = ends - lengths
        offsets = facts.queue_offsets[order]
        is_odd = ~is_listable(facts.sys_flags[order])
        breaks = np.diff(offsets, prepend=offsets[0]) != 1
        breaks[firsts] = False
        is_odd |= breaks
        odd = set(ends.searchsorted(np.flatnonzero(is_odd), "right").tolist())
        tags = facts.described.tag_codes[order]
        items = encode_items(facts.physical_offsets[order], facts.sizes[order], tags)
        left: list[Group] = []
        places = zip(firsts.tolist(), ends.tolist(), offsets[firsts].tolist(), strict=True)
        for number, (first, last, offset) in enumerate(places):
            queue = groups[number][0]
            if number in odd or not self._goes_on(queue, offset):
                left.append(groups[number])
                continue
            data = items[first * ITEM_BYTES : last * ITEM_BYTES]
            end = self.queues[queue]
            folder = end.folder(self._root, queue)
            self._rows.write(folder, end.file_bytes, offset * ITEM_BYTES, data)
            end.next_offset = offset + last - first
        return left

    def _goes_on(self, queue: MessageQueue, offset: int) -> bool:
        """Whether a plain queue's list ends just where ``offset`` is next."""
        end = self.queues.get(queue)
        return (
            end is not None
            and not end.is_new
            and end.unit is None
            and end.next_offset == offset
            and not self._kinds.needs_records(queue.topic)
        )

    def _list(
        self,
        queue: MessageQueue,
        facts: Facts,
        indices: Longs,
        *,
        is_offered: bool,
    ) -> RecordBatch | None:
        """Write a queue's items; the batch of them where it is wanted."""
        indices = indices[is_listable(facts.sys_flags[indices])]
        if not len(indices):
            return None
        offsets = facts.queue_offsets[indices]
        counts = self._kinds.counts(queue.topic, facts, indices)
        end = self.queues.get(queue)
        if end is None:
            end = self.queues[queue] = self._begin(queue, int(offsets[0]))
        fresh = _rising(offsets, counts, end.next_offset)
        self.duplicates += int(len(offsets) - fresh.sum())
        indices, offsets, counts = indices[fresh], offsets[fresh], counts[fresh]
        if not len(indices):
            return None
        tags = self._kinds.tag_codes(queue.topic, facts, indices)
        if end.unit is None:
            items = encode_items(facts.physical_offsets[indices], facts.sizes[indices], tags)
            self._write(queue, end, offsets, items)
        else:
            self._write_units(queue, end, encode_units(facts, indices, counts, tags))
        end.next_offset = int(offsets[-1] + counts[-1])
        if (
            not is_offered
            or facts.block is None
            or end.next_offset - int(offsets[0]) != int(counts.sum())
        ):
            return None
        return _batch(queue, facts.block, indices, counts, tags)

    def begin(self, queue: MessageQueue, offset: int) -> None:
        """Let a plain queue begin at an offset, on the disk; not one that is there."""
        known = self.queues.get(queue)
        if not offset or (known is not None and known.next_offset):
            return
        end = QueueEnd(offset, self._kinds.file_bytes)
        folder = end.folder(self._root, queue)
        # One item at least, which tells where the queue ends when the store is opened.
        lead = offset * ITEM_BYTES % end.file_bytes or end.file_bytes
        items = fillers(lead // ITEM_BYTES)
        self._rows.write(folder, end.file_bytes, offset * ITEM_BYTES - lead, items)
        self.queues[queue] = end

    def _begin(self, queue: MessageQueue, offset: int) -> QueueEnd:
        if self._kinds.is_batch(queue.topic):
            return QueueEnd(offset, self._kinds.batch_file_bytes, is_new=True, unit=0)
        return QueueEnd(offset, self._kinds.file_bytes, is_new=True)

    def _write_units(self, queue: MessageQueue, end: QueueEnd, data: bytes) -> None:
        """Units lie one behind another, whatever queue offsets they name."""
        folder = end.folder(self._root, queue)
        first = end.unit or 0
        self._rows.write(folder, end.file_bytes, first * BATCH_ITEM_BYTES, data)
        end.unit, end.is_new = first + len(data) // BATCH_ITEM_BYTES, False

    def _write(self, queue: MessageQueue, end: QueueEnd, offsets: Longs, data: bytes) -> None:
        folder = end.folder(self._root, queue)
        breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
        for first, last in zip(
            [0, *breaks.tolist()], [*breaks.tolist(), len(offsets)], strict=True
        ):
            start = int(offsets[first]) * ITEM_BYTES
            items = data[first * ITEM_BYTES : last * ITEM_BYTES]
            if end.is_new:
                lead = start % end.file_bytes
                start, items = start - lead, fillers(lead // ITEM_BYTES) + items
            self._rows.write(folder, end.file_bytes, start, items)
            end.is_new = False


def _rising(offsets: Longs, counts: Longs, start: int) -> npt.NDArray[np.bool_]:
    """Which are at or above ``start`` and behind all before them."""
    before = np.maximum.accumulate(np.concatenate(([start], (offsets + counts)[:-1])))
    found: npt.NDArray[np.bool_] = offsets >= before
    return found


def _batch(
    queue: MessageQueue, block: RecordBlock, indices: Longs, counts: Longs, tags: Longs
) -> RecordBatch:
    data, positions = cut_records(block, indices)
    start = int(block.queue_offsets[indices[0]])
    if int(counts.max()) > 1:  # the messages of an inner batch share its record
        indices, positions, tags = (np.repeat(each, counts) for each in (indices, positions, tags))
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(start),
        data=data,
        positions=positions,
        sizes=block.sizes[indices],
        tag_codes=tags,
        store_timestamps_ms=block.store_timestamps_ms[indices],
        physical_offsets=block.physical_offsets[indices],
    )


_CHUNK_BYTES: Final = 1 << 20
_MESSAGES_MAX: Final = 1 << 13


class Reput:
    """The reput thread's work: following the log up to the confirmed end, a chunk at a time.

    **Contract.** Nothing at or above ``confirmed()`` is ever listed or dispatched. ``position`` moves once a chunk has
    been taken whole; taking it again after an error does no harm. For one thread.
    """

    def __init__(
        self,
        log: MappedFileQueue,
        listing: Listing,
        handover: StoredHandover,
        position: int,
        confirmed: Callable[[], int],
    ) -> None:
        self.position = position  # physical offset of the next record to list
        self.dispatchers: list[Dispatch] = []  # called in order with what was listed
        self._log = log
        self._listing = listing
        self._handover = handover
        self._confirmed = confirmed
        self._chunks = LogChunks(log)

    def step(self) -> bool:
        """Take one chunk; False when there is none."""
        limit = self._confirmed()
        if self.position >= limit:
            return False
        dispatchers = tuple(self.dispatchers)
        if dispatchers:  # they want the records themselves
            self._handover.stop()
        else:
            handed = self._handover.take(self.position, limit, _MESSAGES_MAX)
            facts = of_handed(handed) if handed else None
            if facts is not None and not self._listing.needs_records(facts):
                self._listing.take(facts)
                self.position = handed[-1].end
                return True
            if handed:
                limit = handed[-1].end
            following = self._handover.peek()
            if following is not None and following.begin > self.position:
                limit = min(limit, following.begin)
        return self._read(limit, dispatchers)

    def is_cut(self, limit: int) -> bool:
        """Whether ``limit`` lies within the record at ``position``: a replica acknowledges bytes, not records."""
        position = self.position  # who closes the store asks while the reput thread goes on
        if self._log.base_of(position) is None:
            self._log.rescan()
        size = int.from_bytes(self._log.read(position, 4), "big")
        room = self._log.file_bytes - position % self._log.file_bytes
        return 0 < limit - position < size <= room

    def _read(self, limit: int, dispatchers: Sequence[Dispatch]) -> bool:
        """Take a chunk from the log itself; False when no whole record lies below ``limit``."""
        if self._log.base_of(self.position) is None:
            self._log.rescan()
        chunk = self._chunks.read(
            self.position, limit, _CHUNK_BYTES, check_crc=False, check_place=False
        )
        if len(chunk.block):
            self._listing.take(of_block(chunk.block), dispatchers)
        elif chunk.follows is not Next.FILE and self.is_cut(limit):
            return False
        elif chunk.follows in {Next.NOTHING, Next.BROKEN}:
            raise DataError(
                f"no record at {chunk.end}, where one was appended", where=self._log.directory
            )
        self.position = chunk.end
        if chunk.follows is Next.FILE:
            self.position = -(-chunk.end // self._log.file_bytes) * self._log.file_bytes
        return True


# -- kinds of queues, and where they go on ---------------------------------------------------------
#
# Pure but for reads of ``BatchQueue``. Only for topics of a special kind are the records' own properties looked into, one by
# one.


@dataclass(frozen=True, slots=True)
class QueueKinds:
    """What kind of consume queues a topic has."""

    is_batch: Callable[[str], bool]  # whether a topic's are batch queues
    delays_ms: tuple[int, ...]  # of the delay levels, the first of level 1
    file_bytes: int  # length of a new plain queue's files
    batch_file_bytes: int  # length of a new batch queue's files

    def needs_records(self, topic: str) -> bool:
        """Whether a topic's lists say more of a record than was handed over with it."""
        return topic == SCHEDULE_TOPIC or self.is_batch(topic)

    def counts(self, topic: str, facts: Facts, indices: Longs) -> Longs:
        """int64[n]: queue offsets that each record takes."""
        if facts.block is None or not self.is_batch(topic):
            return np.ones(len(indices), np.int64)
        return inner_counts(facts.block)[indices].astype(np.int64)

    def tag_codes(self, topic: str, facts: Facts, indices: Longs) -> Longs:
        """int64[n]: what the list says of each record's tags; of delayed ones when they are to be delivered (UTC ms)."""
        codes: Longs = facts.described.tag_codes[indices]
        if facts.block is None or topic != SCHEDULE_TOPIC:
            return codes
        return self._delivery_codes(facts.block, indices, codes)

    def _delivery_codes(self, block: RecordBlock, indices: Longs, codes: Longs) -> Longs:
        found = codes.copy()
        for at, number in enumerate(indices.tolist()):
            properties = parse_properties(properties_bytes(block, number))
            stored_ms = int(block.store_timestamps_ms[number])
            due_ms = delivery_ms(properties, stored_ms, self.delays_ms)
            found[at] = codes[at] if due_ms is None else due_ms
        return found


def encode_units(facts: Facts, indices: Longs, counts: Longs, tag_codes: Longs) -> bytes:
    """The units of a batch queue for records."""
    units = np.zeros(len(indices), BATCH_ITEM)
    units["physical_offset"] = facts.physical_offsets[indices]
    units["size"] = facts.sizes[indices]
    units["tag_code"] = tag_codes
    units["store_timestamp_ms"] = facts.store_timestamps_ms[indices]
    units["base_offset"] = facts.queue_offsets[indices]
    units["count"] = counts
    units["compacted_offset"] = -1
    return units.tobytes()


@dataclass(slots=True)
class QueueEnd:
    """Where a queue goes on."""

    next_offset: int  # queue offset of its next message
    file_bytes: int  # size of its files
    is_new: bool = False  # it has no item yet, and so no file
    unit: int | None = None  # number of the next unit of a batch queue; None of a plain one

    def folder(self, root: str, queue: MessageQueue) -> str:
        """Where its files are in a store."""
        kind = QUEUE_DIRECTORY if self.unit is None else BATCH_DIRECTORY
        return f"{root}/{kind}/{queue.topic}/{queue.queue_id}"

    def opened(self, cache: FileCache, root: str, queue: MessageQueue) -> PlainQueue | BatchQueue:
        """Its files, to be read."""
        made = PlainQueue if self.unit is None else BatchQueue
        return made(cache, self.folder(root, queue), self.file_bytes)
