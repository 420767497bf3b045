"""Tags and keys of many records at once, found in their stored properties without a loop over the records.

The properties of all records are joined into one array; pairs are found by their separators, names by comparison, and
the hashes of values of one length by one product. Text that is not ASCII goes the plain way (``tiered.store.keyhash``),
which a property test holds equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.block import tag_hashes
from tiered.format.tags import java_hash
from tiered.store.keyhash import hashes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.format.parse import RecordBlock
    from tiered.model import MessageQueue

Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Text = npt.NDArray[np.uint8]
Group = tuple["MessageQueue", Longs]
_NAME_END: Final = 1
_PAIR_END: Final = 2
_BLANK: Final = 32
_INT: Final = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Described:
    """What consume queues and the index want to know of a piece of the log.

    Attributes:
        tag_codes: int64[n], of each record.
        hashes: int64[m], of the keys, in log order; of a record the unique key first.
        owners: int64[m], which record each key is of.
    """

    tag_codes: Longs
    hashes: Longs
    owners: Longs


def describe(block: RecordBlock, groups: Sequence[Group]) -> Described:
    """Tag codes and keys of the records in ``groups``, each of one queue; 0 and none for others."""
    view = memoryview(block.buffer)
    starts = block.properties_positions
    ends = starts + block.properties_sizes
    joined = b"".join(map(view.__getitem__, map(slice, starts.tolist(), ends.tolist())))
    if not joined.isascii():
        return _describe_plainly(block, groups)
    leads = np.zeros(len(block), np.uint32)
    is_meant = np.zeros(len(block), np.bool_)
    for queue, indices in groups:
        leads[indices] = java_hash(f"{queue.topic}#") & _INT
        is_meant[indices] = True
    pairs = _Pairs(np.frombuffer(joined, np.uint8), block.properties_sizes.astype(np.int64))
    owners, at, lengths = pairs.values(b"TAGS")
    tag_codes = np.zeros(len(block), np.int64)
    tag_codes[owners] = hash_texts(pairs.data, at, lengths, np.zeros(len(at), np.uint32))
    unique = pairs.values(b"UNIQ_KEY")
    tokens = split_at_blanks(pairs.data, *pairs.values(b"KEYS"))
    owners, at, lengths = (np.concatenate(both) for both in zip(unique, tokens, strict=True))
    order = np.argsort(owners, kind="stable")
    order = order[is_meant[owners[order]]]
    owners, at, lengths = owners[order], at[order], lengths[order]
    hashes = np.abs(hash_texts(pairs.data, at, lengths, leads[owners]))
    hashes[hashes > _INT >> 1] = 0
    return Described(tag_codes, hashes, owners)


class _Pairs:
    """Name and value of every pair in the joined properties."""

    def __init__(self, data: Text, sizes: Longs) -> None:
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
    blanks = np.flatnonzero(data == _BLANK)
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


def _describe_plainly(block: RecordBlock, groups: Sequence[Group]) -> Described:
    found = [hashes_of(block, indices, queue.topic) for queue, indices in groups]
    none = np.zeros(0, np.int64)
    hashes = np.concatenate([none, *(hashes for hashes, _ in found)])
    owners = np.concatenate([none, *(owners for _, owners in found)])
    order = np.argsort(owners, kind="stable")
    return Described(tag_hashes(block), hashes[order], owners[order])
