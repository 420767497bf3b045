"""What consume queues and the key index want to know of a chunk of the log: from its bytes, or from what was handed over.

Both ways give the same, which tests hold equal: a running store is told by its own writer (``StoredHandover``),
recovery, and a store that has fallen behind, read the log.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.format.block import group_by_queue
from tiered.format.properties import java_hash, tag_hash
from tiered.format.property_columns import (
    PropertyColumns,
    Texts,
    Words,
    hash_texts,
    split_at,
)
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiered.format.block import RecordBlock
    from tiered.store.encoding import EncodedKind, Prepared, RecordPlaces
    from tiered.store.new_message import IdRun


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
