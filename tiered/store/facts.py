"""What consume queues and the key index want to know of a piece of the log: from its bytes, or from what was handed over.

Both ways give the same, which tests hold equal: a running store is told by its own writer (``StoredHandover``),
recovery, and a store that has fallen behind, read the log.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt

from tiered.format.block import RecordBlock, bytes_at, group_by_queue, tag_hashes
from tiered.format.properties import java_hash, tag_hash
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

    from tiered.store.encoding import Prepared, RecordKind, RecordPlaces
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
    # topics, queue_ids: Of each.
    topics: Sequence[str]
    queue_ids: Sequence[int]
    queue_offsets: Sequence[int]  # of each
    positions: Sequence[int]  # physical offset of each
    sizes: Sequence[int]  # bytes of each record
    kinds: Sequence[RecordKind]  # of each: its sysFlag
    properties: Sequence[bytes]  # as stored
    # tags, keys: As given, of each.
    tags: Sequence[str | None]
    keys: Sequence[str | None]
    ids: Sequence[IdRun] | None
    """Of plain messages, whose properties need not be looked into (see ``Prepared``); else None."""

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
        """What was appended from ``position`` on, as far as it lies below ``limit``; about ``count_max`` messages.

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


# -- keys, one record at a time --------------------------------------------------------------------
#
# Which keys a record is found by, and their hashes, many at a time.
#
# A key is hashed as ``topic#key`` by Java's ``String.hashCode``, made non-negative. The hash of a joined text
# follows from those of its parts, so keys of one length in ASCII are hashed as the rows of one array.

Longs = npt.NDArray[np.int64]
_UNIQUE: Final = b"UNIQ_KEY\x01"
_KEYS: Final = b"KEYS\x01"
_INT: Final = 0xFFFF_FFFF


def key_hash(topic: str, key: str) -> int:
    """The hash of one key, as an index file stores it."""
    return _magnitude(java_hash(f"{topic}#{key}"))


def keys_of(raw: bytes) -> list[bytes]:
    """The keys of a record by its stored properties: the unique one first, then those of ``KEYS``."""
    unique = _value(raw, _UNIQUE)
    keys = _value(raw, _KEYS)
    found = [unique] if unique else []
    if keys:
        found += [key for key in keys.split(b" ") if key]
    return found


def hashes_of(block: RecordBlock, indices: Longs, topic: str) -> tuple[Longs, Longs]:
    """The keys' hashes of the records at ``indices``, all of one topic.

    Returns:
        The hashes, and for each which of the block's records it belongs to; in the records' order.
    """
    view = memoryview(block.buffer)
    starts = block.properties_positions[indices]
    ends = starts + block.properties_sizes[indices]
    keys: list[bytes] = []
    counts: list[int] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        found = keys_of(bytes(view[start:end]))
        keys += found
        counts.append(len(found))
    return _hash_all(keys, topic), np.repeat(indices, counts)


def _value(raw: bytes, name: bytes) -> bytes:
    """The value of a property; the last that is not empty, as a parser of all of them has it."""
    end = len(raw)
    while (at := raw.rfind(name, 0, end)) >= 0:
        if at == 0 or raw[at - 1] == 2:  # noqa: PLR2004 (the end of a pair)
            start = at + len(name)
            stop = raw.find(b"\x02", start)
            value = raw[start:] if stop < 0 else raw[start:stop]
            if value:
                return value
        end = at + len(name) - 1
    return b""


def _hash_all(keys: Sequence[bytes], topic: str) -> Longs:
    texts = [key.decode("utf-8", "replace") for key in keys]
    units = np.frombuffer("".join(texts).encode("utf-16-le"), np.dtype("<u2"))
    lengths = np.fromiter(
        (len(text.encode("utf-16-le")) // 2 for text in texts), np.int64, len(texts)
    )
    leads = np.full(len(texts), java_hash(f"{topic}#") & _INT, np.uint32)
    found = np.abs(hash_texts(units, lengths.cumsum() - lengths, lengths, leads))
    found[found > _INT_MAX] = 0
    return found


def _magnitude(value: int) -> int:
    return 0 if value == -(1 << 31) else abs(value)


# -- tags and keys, pair by pair -------------------------------------------------------------------
#
# Tags and keys of many records at once, found in their stored properties without a loop over the records.
#
# The properties of all records are joined into one array; pairs are found by their separators, names by
# comparison, and the hashes of values of one length by one product. Text that is not ASCII goes the plain way
# (``hashes_of``), which a property test holds equal (``describe``).

Words = npt.NDArray[np.uint32]
Text = npt.NDArray[np.uint8]
Units = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
Group = tuple["MessageQueue", Longs]
_NAME_END: Final = 1
_PAIR_END: Final = 2
BLANK: Final = 32
_ROWS_ALIKE: Final = 16
"""So many texts of one length are worth an array of their own."""
_PIECE_UNITS: Final = 1 << 18


def find(block: RecordBlock, leads: Words) -> tuple[Longs, Longs, Longs] | None:
    """Tags and keys of all records of a block.

    Args:
        block: Only its buffer and where the properties are is looked at.
        leads: uint32[n], the hash of what stands before each record's keys.

    Returns:
        int64[n] tag codes; the keys' hashes, signed, and whose they are, of a record the unique key first. None when
        there is text that is not ASCII.
    """
    view = memoryview(block.buffer)
    starts = block.properties_positions
    ends = starts + block.properties_sizes
    joined = b"".join(map(view.__getitem__, map(slice, starts.tolist(), ends.tolist())))
    if not joined.isascii():
        return None
    pairs = PropertyPairs(np.frombuffer(joined, np.uint8), block.properties_sizes.astype(np.int64))
    owners, at, lengths = pairs.values(b"TAGS")
    tag_codes = np.zeros(len(block), np.int64)
    tag_codes[owners] = hash_texts(pairs.data, at, lengths, np.zeros(len(at), np.uint32))
    unique = pairs.values(b"UNIQ_KEY")
    tokens = split_at_blanks(pairs.data, *pairs.values(b"KEYS"))
    owners, at, lengths = (np.concatenate(both) for both in zip(unique, tokens, strict=True))
    return tag_codes, hash_texts(pairs.data, at, lengths, leads[owners]), owners


class PropertyPairs:
    """Name and value of every pair in the joined properties."""

    def __init__(self, data: Text, sizes: Longs) -> None:
        """Find them; ``sizes``: int64[n], of each record's properties."""
        self.data = data
        ends = sizes.cumsum()
        separators = np.flatnonzero(data == _PAIR_END)
        starts = np.sort(np.concatenate((ends - sizes, separators + 1)))
        is_new = np.diff(starts, prepend=-1) > 0
        starts = starts[is_new & (starts < len(data))]
        owners = np.searchsorted(ends, starts, side="right")
        stops = np.minimum(_first(separators, starts, len(data)), ends[owners])
        middles = _first(np.flatnonzero(data == _NAME_END), starts, len(data))
        good = middles + 1 < stops
        self._owners, self._starts = owners[good], starts[good]
        self._middles, self._stops = middles[good], stops[good]

    def spans(self) -> tuple[Longs, Longs]:
        """Where the value of every pair begins and ends."""
        return self._middles + 1, self._stops

    def values(self, name: bytes) -> tuple[Longs, Longs, Longs]:
        """Which records have a property, where its value begins, and its length. The last of several counts."""
        found = np.flatnonzero(self._middles - self._starts == len(name))
        text = self.data[self._starts[found][:, None] + np.arange(len(name))]
        found = found[(text == np.frombuffer(name, np.uint8)).all(axis=1)]
        owners = self._owners[found]
        if len(owners) > 1:
            is_last = np.append(owners[1:] != owners[:-1], True)
            found, owners = found[is_last], owners[is_last]
        at = self._middles[found] + 1
        return owners, at, self._stops[found] - at


def _first(places: Longs, starts: Longs, missing: int) -> Longs:
    """The first place at or behind each start."""
    return np.append(places, missing)[np.searchsorted(places, starts)]


def split_at_blanks(
    data: Text, owners: Longs, at: Longs, lengths: Longs
) -> tuple[Longs, Longs, Longs]:
    """Values divided at blanks; empty ones dropped."""
    stops = at + lengths
    blanks = np.flatnonzero(data == BLANK)
    of = np.searchsorted(at, blanks, side="right") - 1
    inside = (of >= 0) & (blanks < stops[of]) if len(at) else np.zeros(len(blanks), np.bool_)
    blanks, of = blanks[inside], of[inside]
    starts = np.sort(np.concatenate((at, blanks + 1)))
    ends = np.sort(np.concatenate((stops, blanks)))
    whose = owners[np.searchsorted(at, starts, side="right") - 1] if len(at) else owners
    kept = ends > starts
    return whose[kept], starts[kept], (ends - starts)[kept]


def hash_texts(data: Units, at: Longs, lengths: Longs, leads: Words) -> Longs:
    """Java's hash of ``lead`` (the hash of what stands before) and each text; signed.

    Texts of a length that many have are the rows of an array; all others are hashed together, whatever their lengths. So the
    cost is that of their characters, and memory a piece's.
    """
    found = np.zeros(len(at), np.uint32)
    counts = np.bincount(lengths, minlength=1)
    for length in np.flatnonzero(counts >= _ROWS_ALIKE).tolist():
        if length:
            every = np.flatnonzero(lengths == length)
            step = max(_ROWS_ALIKE, _PIECE_UNITS // length)
            for first in range(0, len(every), step):
                those = every[first : first + step]
                rows = data[at[those][:, None] + np.arange(length)].astype(np.uint32)
                found[those] = rows @ powers(length)[length - 1 :: -1]
    rest = np.flatnonzero((counts < _ROWS_ALIKE)[lengths] & (lengths > 0))
    totals = lengths[rest].cumsum()
    first = 0
    while first < len(rest):
        before = int(totals[first - 1]) if first else 0
        end = max(first + 1, int(totals.searchsorted(before + _PIECE_UNITS, "right")))
        those = rest[first:end]
        found[those] = _hash_unlike(data, at[those], lengths[those])
        first = end
    is_long = lengths > 0
    if len(at):
        raised = powers(int(lengths.max()) + 1)[lengths]
        found[is_long] += (leads * raised)[is_long]
    return found.view(np.int32).astype(np.int64)


def _hash_unlike(data: Units, at: Longs, lengths: Longs) -> Words:
    """The hashes of texts of different lengths, none of them empty."""
    ends = lengths.cumsum()
    behind = np.repeat(ends, lengths) - np.arange(
        int(ends[-1])
    )  # units from here to the text's end
    units = data[np.repeat(at + lengths, lengths) - behind].astype(np.uint32)
    units *= powers(int(lengths.max()))[behind - 1]
    found: Words = np.add.reduceat(units, ends - lengths)
    return found


def powers(count: int) -> Words:
    """The first ``count`` powers of 31, or more, mod 2^32."""
    return _powers(max(6, (count - 1).bit_length()))


@lru_cache(maxsize=32)
def _powers(bits: int) -> Words:
    found = np.full(1 << bits, 31, np.uint32)
    found[0] = 1
    return found.cumprod(dtype=np.uint32)


# -- tags and keys of records that look alike ------------------------------------------------------

ROWS_MIN: Final = 24
"""Fewer records of one length are not worth it."""
PATTERNS_MAX: Final = 4
Span = tuple[int, int]
_VALUE_MIN: Final = 3
"""Lower ones are separators, or no text."""
_ASCII_MAX: Final = 127


class Shapes:
    """Looks through the records of one block.

    Producers write the same properties again and again: same names in the same order, values of the same length.
    Records whose properties are equally long become the rows of an array; the first of them is a pattern. Those that
    have its names and separators (and the blanks between its keys) in the same columns have their values there too.
    What is left after a few patterns, and what is not ASCII, is for ``find``.

    Attributes:
        hashes, owners: Of the keys that were found, signed, and whose they are; of one record in its order.
    """

    def __init__(self, buffer: Buffer, positions: Longs, sizes: Longs, leads: Words) -> None:
        """Look through properties.

        Args:
            positions: int64[n], where each begins.
            sizes: int64[n], how long each is.
            leads: uint32[n], the hash of what stands before each record's keys.
        """
        # int64[n], of each record that was understood; 0 for others.
        self.tag_codes = np.zeros(len(sizes), np.int64)
        self._leads = leads
        self._hashes: list[Longs] = [np.zeros(0, np.int64)]
        self._owners: list[Longs] = [np.zeros(0, np.int64)]
        rest: list[Longs] = [np.zeros(0, np.int64)]
        order = np.argsort(sizes, kind="stable")
        ordered = sizes[order]
        firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
        for first, end in zip(firsts, np.append(firsts[1:], len(order)), strict=True):
            members, size = order[first:end], int(ordered[first])
            if len(members) >= ROWS_MIN and size:
                rows = bytes_at(buffer, f"V{size}")[positions[members]]
                members = self._look(members, rows.view(np.uint8).reshape(-1, size))
            rest.append(members)
        self.hashes, self.owners = np.concatenate(self._hashes), np.concatenate(self._owners)
        self.rest = np.sort(np.concatenate(rest))  # the records that were not understood

    def _look(self, members: Longs, rows: Text) -> Longs:
        """Take the records that look alike; the others."""
        for _ in range(PATTERNS_MAX):
            if len(rows) < ROWS_MIN:
                break
            pattern = _Pattern(rows[0])
            alike = pattern.match(rows)
            found, own = members[alike], rows[alike]
            leads = self._leads[found]
            for span in pattern.tag:
                self.tag_codes[found] = _hash(own, span, np.zeros(len(own), np.uint32))
            for span in pattern.keys:
                self._hashes.append(_hash(own, span, leads))
                self._owners.append(found)
            members, rows = members[~alike], rows[~alike]
        return members


class _Pattern:
    """One record's properties, and where their values are."""

    def __init__(self, row: Text) -> None:
        pairs = PropertyPairs(row, np.array([len(row)]))
        # A byte fits a column from ``low`` to ``low + above``: its own in names and separators, ASCII in values.
        self._low, self._above = row.copy(), np.zeros_like(row)
        for first, end in zip(*(found.tolist() for found in pairs.spans()), strict=True):
            self._low[first:end], self._above[first:end] = _VALUE_MIN, _ASCII_MAX - _VALUE_MIN
        self.tag = _spans(pairs.values(b"TAGS"))  # columns of the tag; or none
        # Columns of the unique key, then of the others.
        self.keys = _spans(pairs.values(b"UNIQ_KEY"))
        self._blanks: list[tuple[Span, npt.NDArray[np.bool_]]] = []
        for first, end in _spans(pairs.values(b"KEYS")):
            self._blanks.append(((first, end), row[first:end] == BLANK))
            edges = np.flatnonzero(row[first:end] == BLANK) + first
            starts, ends = [first, *(edges + 1).tolist()], [*edges.tolist(), end]
            self.keys += [span for span in zip(starts, ends, strict=True) if span[0] < span[1]]

    def match(self, rows: Text) -> npt.NDArray[np.bool_]:
        """Which rows have their values where the pattern has them."""
        alike: npt.NDArray[np.bool_] = np.all(rows - self._low <= self._above, axis=1)
        for (first, end), blanks in self._blanks:
            alike &= np.all((rows[:, first:end] == BLANK) == blanks, axis=1)
        return alike


def _spans(found: tuple[Longs, Longs, Longs]) -> list[Span]:
    _, at, lengths = found
    return [
        (start, start + size) for start, size in zip(at.tolist(), lengths.tolist(), strict=True)
    ]


def _hash(rows: Text, span: Span, leads: Words) -> Longs:
    """Java's hash of ``lead`` and the text in the columns of a span; signed."""
    first, end = span
    table, size = powers(end - first + 1), end - first
    found = rows[:, first:end].astype(np.uint32) @ table[:size][::-1]
    found += leads * table[size]
    return found.view(np.int32).astype(np.int64)


# -- tags and keys, whichever way is fastest -------------------------------------------------------
#
# Tags and keys of the records of a block: what looks alike first, then pair by pair, then in plain code.
#
# Three ways, each for what the one before leaves (``Shapes``, ``find``, ``hashes_of``); a property
# test holds them equal.

_INT_MAX: Final = 0x7FFF_FFFF


@dataclass(frozen=True, slots=True)
class Described:
    """What consume queues and the index want to know of a piece of the log."""

    tag_codes: Longs  # int64[n], of each record
    hashes: Longs  # int64[m], of the keys, in log order; of a record the unique key first
    owners: Longs  # int64[m], which record each key is of


def describe(block: RecordBlock, groups: Sequence[Group]) -> Described:
    """Tag codes and keys of the records in ``groups``, each of one queue; 0 and none for others."""
    leads = leads_of(groups, len(block))
    is_meant = np.zeros(len(block), np.bool_)
    for _, indices in groups:
        is_meant[indices] = True
    shapes = Shapes(
        block.buffer, block.properties_positions, block.properties_sizes.astype(np.int64), leads
    )
    tag_codes, hashes, owners = shapes.tag_codes, shapes.hashes, shapes.owners
    rest = shapes.rest
    if len(rest):
        part = properties_block(
            block.buffer, block.properties_positions[rest], block.properties_sizes[rest]
        )
        codes, others, whose = find(part, leads[rest]) or _plainly(part, rest, groups)
        tag_codes[rest] = codes
        hashes, owners = np.concatenate((hashes, others)), np.concatenate((owners, rest[whose]))
    tag_codes[~is_meant] = 0
    kept = is_meant[owners]
    return in_order(tag_codes, hashes[kept], owners[kept])


def leads_of(groups: Sequence[Group], count: int) -> npt.NDArray[np.uint32]:
    """uint32[n], the hash of what stands before each record's keys."""
    leads = np.zeros(count, np.uint32)
    for queue, indices in groups:
        leads[indices] = java_hash(f"{queue.topic}#") & _INT
    return leads


def in_order(tag_codes: Longs, hashes: Longs, owners: Longs) -> Described:
    """Put keys into log order, and make their signed hashes those that an index has."""
    order = np.argsort(owners, kind="stable")
    hashes = np.abs(hashes[order])
    hashes[hashes > _INT_MAX] = 0
    return Described(tag_codes, hashes, owners[order])


def properties_block(buffer: Buffer, positions: Longs, sizes: npt.NDArray[np.int32]) -> RecordBlock:
    """A block that has nothing of its records but their properties."""
    count = len(positions)
    longs, ints = np.zeros(count, np.int64), np.zeros(count, np.int32)
    return RecordBlock(
        buffer=buffer,
        positions=longs,
        sizes=ints,
        faults=np.zeros(count, np.uint8),
        body_crcs=np.zeros(count, np.uint32),
        queue_ids=ints,
        queue_offsets=longs,
        physical_offsets=longs,
        sys_flags=ints,
        store_timestamps_ms=longs,
        body_positions=longs,
        body_sizes=ints,
        topic_positions=longs,
        topic_sizes=ints,
        properties_positions=positions,
        properties_sizes=sizes,
    )


def _plainly(part: RecordBlock, rest: Longs, groups: Sequence[Group]) -> tuple[Longs, Longs, Longs]:
    none = np.zeros(0, np.int64)
    found = []
    for queue, indices in groups:
        inside = np.searchsorted(rest, indices)
        inside[inside == len(rest)] = 0
        found.append(hashes_of(part, inside[rest[inside] == indices], queue.topic))
    hashes = np.concatenate([none, *(hashes for hashes, _ in found)])
    return tag_hashes(part), hashes, np.concatenate([none, *(owners for _, owners in found)])


# -- facts -----------------------------------------------------------------------------------------


_SYS_FLAG: Final = attrgetter("sys_flag")


@dataclass(frozen=True, slots=True)
class Facts:
    """A piece of the log."""

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
        """Number of records."""
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
        describe(block, groups),
        block,
    )


def of_handed(handed: Sequence[Handed]) -> Facts:
    """Of appends, one behind another."""
    counts = [len(one.sizes) for one in handed]
    count = sum(counts)
    if all(one.ids is not None for one in handed):
        groups = _group_plain(handed, counts)
        flags = np.repeat(np.array([one.kinds[0].sys_flag for one in handed], np.int32), counts)
        described = _describe_plain(handed, counts)
    else:
        groups = _group(handed, count)
        flags = np.fromiter(
            map(_SYS_FLAG, chain.from_iterable(one.kinds for one in handed)), np.int32, count
        )
        described = describe(_properties_only(handed, count), groups)
    return Facts(
        groups,
        _column((one.positions for one in handed), count),
        _column((one.queue_offsets for one in handed), count),
        np.repeat(np.array([one.store_ms for one in handed], np.int64), counts),
        _column((one.sizes for one in handed), count).astype(np.int32),
        flags,
        described,
    )


_TIME_DIGITS: Final = 8
"""Of a unique id, behind its maker."""


def _group_plain(handed: Sequence[Handed], counts: Sequence[int]) -> list[Group]:
    """The records of each queue; of appends that have one topic each."""
    topics = {topic: at for at, topic in enumerate(dict.fromkeys(one.topics[0] for one in handed))}
    ids = np.fromiter(chain.from_iterable(one.queue_ids for one in handed), np.int64, sum(counts))
    if len(topics) == 1:  # short ones are sorted by their digits
        order = np.argsort(ids.astype(np.uint16), kind="stable")
    else:
        ids += np.repeat(
            np.array([topics[one.topics[0]] << 16 for one in handed], np.int64), counts
        )
        order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    names = list(topics)
    queues = [MessageQueue(names[one >> 16], one & 0xFFFF) for one in ordered[firsts].tolist()]
    return list(zip(queues, np.split(order, firsts[1:]), strict=True))


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
        before = np.array([_lead_of_keys(one.topics[0]) for one in handed], np.uint32)
        given = cast("list[str]", list(chain.from_iterable(one.keys for one in keyed)))
        of_key, found = _hash_given(given, whose, np.repeat(before, counts))
        hashes, owners = np.concatenate((hashes, found)), np.concatenate((owners, of_key))
    return in_order(tag_codes, hashes, owners)


def _hash_given(keys: Sequence[str], owners: Longs, leads: Words) -> tuple[Longs, Longs]:
    """Whose each key is, and its signed hash; ``leads``: uint32[n], the hash of what stands before a record's keys."""
    sizes = np.fromiter(map(len, keys), np.int64, len(keys))
    text = "".join(keys)
    data, at = np.frombuffer(text.encode(), np.uint8), sizes.cumsum() - sizes
    if " " in text:
        owners, at, sizes = split_at_blanks(data, owners, at, sizes)
    return owners, hash_texts(data, at, sizes, leads[owners])


@lru_cache(maxsize=4096)
def _lead_of_keys(topic: str) -> int:
    return java_hash(f"{topic}#") & _INT


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
    """The hash of every counter's four digits."""
    digits, counters = np.frombuffer(b"0123456789ABCDEF", np.uint8), np.arange(1 << 16)
    found = np.zeros(1 << 16, np.uint32)
    for shift in (12, 8, 4, 0):
        found = found * np.uint32(31) + digits[counters >> shift & 15]
    return found


def _column(parts: Iterable[Sequence[int]], count: int) -> Longs:
    return np.fromiter(chain.from_iterable(parts), np.int64, count)


def _group(handed: Sequence[Handed], count: int) -> list[Group]:
    queues = [queue for one in handed for queue in zip(one.topics, one.queue_ids, strict=True)]
    numbers = {queue: number for number, queue in enumerate(dict.fromkeys(queues))}
    # short ones are sorted by their digits
    kind = np.uint16 if len(numbers) <= 1 << 16 else np.int64
    codes = np.fromiter(map(numbers.__getitem__, queues), kind, count)
    order = np.argsort(codes, kind="stable")
    ends = np.bincount(codes).cumsum()
    members = np.split(order, ends[:-1])
    return [(MessageQueue(*queue), found) for queue, found in zip(numbers, members, strict=True)]


def _properties_only(handed: Sequence[Handed], count: int) -> RecordBlock:
    raws = list(chain.from_iterable(one.properties for one in handed))
    sizes = np.fromiter(map(len, raws), np.int64, count)
    return properties_block(b"".join(raws), sizes.cumsum() - sizes, sizes.astype(np.int32))
