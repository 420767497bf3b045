"""Tags and keys of many records at once, found in their stored properties without a loop over the records.

The properties of all records are joined into one array; pairs are found by their separators, names by comparison, and
the hashes of values of one length by one product. Text that is not ASCII goes the plain way (``tiered.store.keyhash``),
which a property test holds equal (``tiered.store.describe``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tiered.format.block import RecordBlock
    from tiered.model import MessageQueue

Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Text = npt.NDArray[np.uint8]
Group = tuple["MessageQueue", Longs]
_NAME_END: Final = 1
_PAIR_END: Final = 2
BLANK: Final = 32
_INT: Final = 0xFFFF_FFFF


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
    pairs = Pairs(np.frombuffer(joined, np.uint8), block.properties_sizes.astype(np.int64))
    owners, at, lengths = pairs.values(b"TAGS")
    tag_codes = np.zeros(len(block), np.int64)
    tag_codes[owners] = hash_texts(pairs.data, at, lengths, np.zeros(len(at), np.uint32))
    unique = pairs.values(b"UNIQ_KEY")
    tokens = split_at_blanks(pairs.data, *pairs.values(b"KEYS"))
    owners, at, lengths = (np.concatenate(both) for both in zip(unique, tokens, strict=True))
    return tag_codes, hash_texts(pairs.data, at, lengths, leads[owners]), owners


class Pairs:
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


def hash_texts(data: Text, at: Longs, lengths: Longs, leads: Words) -> Longs:
    """Java's hash of ``lead`` (the hash of what stands before) and each text; signed."""
    found = np.zeros(len(at), np.uint32)
    for length in np.flatnonzero(np.bincount(lengths)).tolist():
        those = np.flatnonzero(lengths == length)
        powers = np.array([pow(31, length - 1 - n, 1 << 32) for n in range(length)], np.uint32)
        rows = data[at[those][:, None] + np.arange(length)].astype(np.uint32)
        found[those] = rows @ powers + leads[those] * np.uint32(pow(31, length, 1 << 32))
    return found.view(np.int32).astype(np.int64)
