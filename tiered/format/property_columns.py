"""Named properties of many records at once: where their values are, and what they are worth.

What ``tiered.format.properties.parse_properties`` says of one record is found here of all, without a loop over records.
Whatever wants tags, keys or another property of a batch asks here. Properties are copied one behind another. Records whose
properties are equally long and have their separators in the same columns (those of one producer, as a rule) have their
values in the same columns too, and only names are compared. Of all others the separators are searched for, and a name is
known by the words that end where a name does. Very few records are looked into one by one.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiered.format.block import bytes_at
from tiered.format.properties import java_hash, java_text, value_span

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered.format.block import RecordBlock

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint32]
Text = npt.NDArray[np.uint8]

_NAME_END: Final = 1
_PAIR_END: Final = 2
_ASCII_MAX: Final = 127
_WORD: Final = 8
_EDGE: Final = 16
"""Bytes before and behind all properties, so that whole words can be read anywhere in them."""
_FEW: Final = 24
"""So few records are looked into one by one."""
_ROWS_MIN: Final = 8
"""So many records of one length, in the mean, are gathered as rows; of fewer each is copied by itself."""
_ALIKE_MIN: Final = 64
"""So many records of one length are asked whether they are alike."""
_APART_MIN: Final = 256
"""So many records that are alike have their keys apart from all others'."""
_CHUNK_ROWS: Final = 512
_DIGITS_MAX: Final = 16


class Values(NamedTuple):
    """Where values lie in ``PropertyColumns.text``."""

    starts: Longs  # int64[n], where each begins
    sizes: Longs  # int64[n], bytes of each; of records that have none 0


class Texts(NamedTuple):
    """Texts in ``PropertyColumns.text``, any number of each record's."""

    owners: Longs  # int64[m], which record each is of
    starts: Longs  # int64[m], where each begins
    sizes: Longs  # int64[m], bytes of each; none is empty


class _Alike(NamedTuple):
    """Records with separators in the same columns."""

    low: int  # where the first of them begins in the text; the others follow
    width: int  # bytes of each, with the 0x02 behind
    members: Longs  # int64[m], which records they are


class PropertyColumns:
    """The properties of some records. Of a name that comes twice the last value that is not empty counts."""

    def __init__(self, buffer: Buffer, starts: Longs, sizes: npt.NDArray[np.int32] | Longs) -> None:
        """Copy them; ``starts``, ``sizes``: of each record's properties in ``buffer``."""
        self._count = len(starts)
        self._known: dict[bytes, Values] = {}
        self._alike: list[_Alike] = []
        # Where records lie in the text that are not in ``_alike``; and all that are not alike, or too few of them.
        self._others: list[tuple[int, int]] = []
        self._mixed: list[Longs] = []
        short = sizes.astype(np.uint16)  # no record has more, and they are sorted by their digits
        order = np.argsort(short, kind="stable")
        ordered = short[order].astype(np.int64)
        classes = np.flatnonzero(np.diff(ordered, prepend=-1)).tolist()
        if len(order) < max(_FEW, len(classes) * _ROWS_MIN):
            self._copy_each(buffer, starts, sizes.astype(np.int64))
        else:
            self._copy_rows(buffer, starts[order], order, ordered, classes)

    def _copy_each(self, buffer: Buffer, starts: Longs, sizes: Longs) -> None:
        view, edge = memoryview(buffer).cast("B"), bytes([_PAIR_END]) * _EDGE
        chunks = map(view.__getitem__, map(slice, starts.tolist(), (starts + sizes).tolist()))
        # uint8: all properties one behind another, a 0x02 before and behind each.
        self.text: Text = np.frombuffer(edge + b"\x02".join(chunks) + edge, np.uint8)
        self._order, self._sizes = np.arange(len(sizes)), sizes
        ends = (sizes + 1).cumsum() + _EDGE
        self._firsts = ends - sizes - 1  # where each record begins in the text, in ``_order``
        self._others, self._mixed = [(_EDGE, len(self.text) - _EDGE + 1)], [self._order]

    def _copy_rows(
        self, buffer: Buffer, starts: Longs, order: Longs, sizes: Longs, classes: list[int]
    ) -> None:
        """Likewise, ordered by their sizes; ``classes``: where those of each size begin."""
        ends = (sizes + 1).cumsum() + _EDGE
        self._order, self._sizes, self._firsts = order, sizes, ends - sizes - 1
        self.text = np.full(int(ends[-1]) + _EDGE, _PAIR_END, np.uint8)
        for first, end in zip(classes, [*classes[1:], len(order)], strict=True):
            low, high = int(self._firsts[first]), int(ends[end - 1])
            if not (size := int(sizes[first])):
                continue
            rows = np.ndarray(end - first, f"V{size}", self.text.data, low, (size + 1,))
            for at in range(0, end - first, _CHUNK_ROWS):  # a large copy costs more by its memory
                some = starts[first + at : min(first + at + _CHUNK_ROWS, end)]
                rows[at : at + _CHUNK_ROWS] = bytes_at(buffer, f"V{size}")[some]
            is_alike = end - first >= _ALIKE_MIN and _are_alike(self.text[low:high], size + 1)
            if not is_alike or end - first < _APART_MIN:
                self._mixed.append(order[first:end])
            if is_alike:
                self._alike.append(_Alike(low, size + 1, order[first:end]))
            elif self._others and self._others[-1][1] == low:
                self._others[-1] = self._others[-1][0], high
            else:
                self._others.append((low, high))

    @classmethod
    def of(cls, block: RecordBlock, rows: Longs | None = None) -> PropertyColumns:
        """Those of the records of a block, or of some."""
        starts, sizes = block.properties_positions, block.properties_sizes
        if rows is not None:
            starts, sizes = starts[rows], sizes[rows]
        return cls(block.buffer, starts, sizes)

    def find(self, name: bytes) -> Values:
        """The values of one property, one for each record."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._find(name)
        return found

    def has(self, name: bytes) -> Flags:
        """Which records have the property."""
        return self.find(name).sizes > 0

    def texts(self, name: bytes, among: Longs | None = None) -> Texts:
        """The values of one property, of the records that have it; of some, in their order."""
        starts, sizes = self.find(name)
        owners = np.flatnonzero(sizes) if among is None else among[sizes[among] > 0]
        return Texts(owners, starts[owners], sizes[owners])

    def lookup_keys(self) -> list[Texts]:
        """By which messages are looked up: unique ids, and behind them what ``KEYS`` are made of, between blanks.

        Those of many records that are alike come by themselves: all of one size and evenly spaced, as a rule.
        """
        groups = [one.members for one in self._alike if len(one.members) >= _APART_MIN]
        if self._mixed:
            groups.append(np.concatenate(self._mixed))
        blanks = np.flatnonzero(self.text == ord(" "))
        unique = [self.texts(b"UNIQ_KEY", group) for group in groups]
        return unique + [split_at(blanks, self.texts(b"KEYS", group)) for group in groups]

    def raw(self, name: bytes) -> list[bytes]:
        """The values as stored; empty of those that have none."""
        text, (starts, sizes) = self._bytes, self.find(name)
        return [
            text[start : start + size]
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]

    def numbers(self, name: bytes, otherwise: int) -> Longs:
        """The values as numbers of at most 16 decimal digits; ``otherwise`` where there is none."""
        starts, sizes = self.find(name)
        is_number = (sizes > 0) & (sizes <= _DIGITS_MAX)
        values = np.zeros(self._count, np.int64)
        for at in range(int(sizes[is_number].max(initial=0))):
            rows = np.flatnonzero(is_number & (sizes > at))
            digits = self.text[starts[rows] + at] - np.uint8(ord("0"))
            is_number[rows] &= digits <= 9  # noqa: PLR2004
            values[rows] = values[rows] * 10 + digits
        values[~is_number] = otherwise
        return values

    def java_hashes(self, starts: Longs, sizes: Longs, leads: Words) -> Longs:
        """Java's hashes of texts with something before each; ``leads``: uint32[n], the hashes of that. Signed."""
        if len(starts) < _FEW:
            is_ascii = sizes == 0
        elif self._is_ascii:
            return hash_texts(self.text, starts, sizes, leads)
        else:
            is_ascii = self._high.searchsorted(starts) == self._high.searchsorted(starts + sizes)
        found = hash_texts(self.text, starts, np.where(is_ascii, sizes, 0), leads)
        for at in np.flatnonzero(~is_ascii).tolist():
            text = java_text(self._bytes[int(starts[at]) : int(starts[at] + sizes[at])])
            units = len(text.encode("utf-16-le")) // 2
            value = (int(leads[at]) * pow(31, units, 1 << 32) + java_hash(text)) & 0xFFFF_FFFF
            found[at] = value - (value >> 31 << 32)
        return found

    def tag_codes(self) -> Longs:
        """The tag code of each record: Java's hash of its ``TAGS``, 0 without one."""
        return self.java_hashes(*self.find(b"TAGS"), np.zeros(self._count, np.uint32))

    @cached_property
    def _bytes(self) -> bytes:
        return self.text.tobytes()

    @cached_property
    def _is_ascii(self) -> bool:
        return bool(self.text.max() <= _ASCII_MAX)

    @cached_property
    def _high(self) -> Longs:
        """Where bytes are that are not ASCII."""
        return np.flatnonzero(self.text > _ASCII_MAX)

    @cached_property
    def _marks(self) -> tuple[Longs, Text, Longs]:
        """The separators of records that are not alike, which each is, and which of them end names."""
        found = [
            low + np.flatnonzero(self.text[low:high] - np.uint8(1) < np.uint8(_PAIR_END))
            for low, high in self._others
        ]
        places = np.concatenate([np.zeros(0, np.int64), *found])
        kinds = self.text[places]
        return places, kinds, np.flatnonzero(kinds == _NAME_END)

    def _find(self, name: bytes) -> Values:
        found = Values(*np.zeros((2, self._count), np.int64))
        if self._count < _FEW:
            ends = self._firsts + self._sizes
            for at, (low, high) in enumerate(
                zip(self._firsts.tolist(), ends.tolist(), strict=True)
            ):
                start, end = value_span(self._bytes, name, low, high)
                found.starts[self._order[at]], found.sizes[self._order[at]] = start, end - start
            return found
        for alike in self._alike:
            self._find_alike(alike, name, found)
        if self._others:
            self._search(name, found)
        return found

    def _find_alike(self, alike: _Alike, name: bytes, found: Values) -> None:
        """Note the values of records that are alike: what is as long as the name in the first may be it in all."""
        low, width, members = alike
        for pair in self.text[low : low + width].tobytes().split(b"\x02"):
            first, _, value = pair.partition(b"\x01")
            if len(first) == len(name) and value:
                end = low + len(name)
                named = np.ones(len(members), np.bool_)
                for back, mask, worth in _words_of(name):
                    words = np.ndarray(len(members), ">u8", self.text.data, end - back, (width,))
                    named &= (words & mask) == worth
                found.starts[members[named]] = end + 1 + width * np.flatnonzero(named)
                found.sizes[members[named]] = len(value)
            low += len(pair) + 1

    def _search(self, name: bytes, found: Values) -> None:
        """Note the values of records that are not alike."""
        places, kinds, name_ends = self._marks
        ends = name_ends[self._named(places[name_ends], name)]
        starts, following = places[ends] + 1, ends + 1
        odd = np.flatnonzero(kinds[following] == _NAME_END)
        if len(odd):  # a value that holds a 0x01 goes on behind it
            pair_ends = np.flatnonzero(kinds == _PAIR_END)
            following[odd] = pair_ends[pair_ends.searchsorted(ends[odd])]
        sizes = places[following] - starts
        if not sizes.all():
            starts, sizes = starts[sizes > 0], sizes[sizes > 0]
        owners = self._order[self._firsts.searchsorted(starts, "right") - 1]
        found.starts[owners], found.sizes[owners] = starts, sizes  # of equal owners the last stays

    def _named(self, ends: Longs, name: bytes) -> Longs:
        """Which of the names that end at some places this is."""
        words = bytes_at(self.text.data, ">u8")
        kept: Longs | None = None
        for back, mask, worth in _words_of(name):
            at = (ends if kept is None else ends[kept]) - back
            same = (words[at] & mask) == worth
            kept = np.flatnonzero(same) if kept is None else kept[same]
        assert kept is not None
        return kept


@lru_cache(maxsize=64)
def _words_of(name: bytes) -> list[tuple[int, np.uint64, np.uint64]]:
    """How a name is known, and the 0x02 before it: how far before its end words begin, which bits count, what they are."""
    wanted = b"\x02" + name
    found = []
    for end in range(len(wanted), 0, -_WORD):
        part = wanted[max(0, end - _WORD) : end]
        mask, worth = (1 << 8 * len(part)) - 1, int.from_bytes(part, "big")
        found.append((len(wanted) - end + _WORD, np.uint64(mask), np.uint64(worth)))
    return found


def _are_alike(text: Text, width: int) -> bool:
    """Whether rows of a width have their separators in the same columns: each those of the first row, and no others."""
    rows = text.reshape(-1, width)
    first = rows[0]
    columns = np.flatnonzero(first <= _PAIR_END)
    if np.count_nonzero(text <= _PAIR_END) != len(columns) * len(rows):
        return False
    return bool((rows[:, columns] == first[columns]).all())


def split_at(blanks: Longs, values: Texts) -> Texts:
    """What values are made of, divided at the blanks of their text (all, ascending); nothing of one that is empty."""
    if not len(blanks):
        return values
    owners, starts, sizes = values
    low = blanks.searchsorted(starts)
    counts = blanks.searchsorted(starts + sizes) - low
    if not counts.any():
        return values
    of = np.repeat(np.arange(len(owners)), counts + 1)
    number = np.arange(len(of)) - np.repeat((counts + 1).cumsum() - counts - 1, counts + 1)
    padded = np.append(blanks, 0)
    begins = np.where(number == 0, starts[of], padded[low[of] + number - 1] + 1)
    is_last, following = number == counts[of], np.minimum(low[of] + number, len(blanks))
    lengths = np.where(is_last, (starts + sizes)[of], padded[following]) - begins
    kept = lengths > 0
    return Texts(owners[of[kept]], begins[kept], lengths[kept])


# -- Java's hashes --------------------------------------------------------------------------------

_ROWS_ALIKE: Final = 16
"""So many texts of one length are worth an array of their own."""
_CHUNK_UNITS: Final = 1 << 18


def hash_texts(text: Text, at: Longs, lengths: Longs, leads: Words) -> Longs:
    """Java's hash of ``lead`` (the hash of what stands before) and each text; signed.

    Texts of a length that many have are the rows of an array; all others are hashed together, whatever their lengths. So the
    cost is that of their characters, and memory a chunk's.
    """
    found = np.zeros(len(at), np.uint32)
    counts = np.bincount(lengths, minlength=1)
    for length in np.flatnonzero(counts >= _ROWS_ALIKE).tolist():
        if length:
            every = np.flatnonzero(lengths == length)
            every_row = bytes_at(text.data, f"V{length}")
            step = max(_ROWS_ALIKE, _CHUNK_UNITS // length)
            for first in range(0, len(every), step):
                those = every[first : first + step]
                rows = every_row[at[those]].view(np.uint8).reshape(-1, length)
                found[those] = rows.astype(np.uint32) @ powers(length)[length - 1 :: -1]
    rest = np.flatnonzero((counts < _ROWS_ALIKE)[lengths] & (lengths > 0))
    totals = lengths[rest].cumsum()
    first = 0
    while first < len(rest):
        before = int(totals[first - 1]) if first else 0
        end = max(first + 1, int(totals.searchsorted(before + _CHUNK_UNITS, "right")))
        those = rest[first:end]
        found[those] = _hash_unlike(text, at[those], lengths[those])
        first = end
    is_long = lengths > 0
    if len(at):
        raised = powers(int(lengths.max()) + 1)[lengths]
        found[is_long] += (leads * raised)[is_long]
    return found.view(np.int32).astype(np.int64)


def _hash_unlike(text: Text, at: Longs, lengths: Longs) -> Words:
    """The hashes of texts of different lengths, none of them empty."""
    ends = lengths.cumsum()
    # From each unit to its text's end.
    behind = np.repeat(ends, lengths) - np.arange(int(ends[-1]))
    units = text[np.repeat(at + lengths, lengths) - behind].astype(np.uint32)
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


def tag_hashes(block: RecordBlock) -> Longs:
    """The tag code of each record of a block: Java's hash of its ``TAGS``, 0 without one."""
    return PropertyColumns.of(block).tag_codes()
