"""Tags and keys of records whose properties look alike, as columns of one array.

Producers write the same properties again and again: same names in the same order, values of the same length. Records
whose properties are equally long become the rows of an array; the first of them is a pattern. Those that have its names
and separators (and the blanks between its keys) in the same columns have their values there too. What is left after a
few patterns, and what is not ASCII, is for ``tiered.store.spans``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.block import bytes_at
from tiered.store.spans import BLANK, Pairs

if TYPE_CHECKING:
    from typing_extensions import Buffer

Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Text = npt.NDArray[np.uint8]
ROWS_MIN: Final = 24
"""Fewer records of one length are not worth it."""
PATTERNS_MAX: Final = 4
Span = tuple[int, int]
_VALUE_MIN: Final = 3
"""Lower ones are separators, or no text."""
_ASCII_MAX: Final = 127


class Shapes:
    """Looks through the records of one block.

    Attributes:
        tag_codes: int64[n], of each record that was understood; 0 for others.
        hashes, owners: Of the keys that were found, signed, and whose they are; of one record in its order.
        rest: The records that were not understood.
    """

    def __init__(self, buffer: Buffer, positions: Longs, sizes: Longs, leads: Words) -> None:
        """Look through properties.

        Args:
            buffer: Holds them.
            positions: int64[n], where each begins.
            sizes: int64[n], how long each is.
            leads: uint32[n], the hash of what stands before each record's keys.
        """
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
        self.rest = np.sort(np.concatenate(rest))

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
    """One record's properties, and where their values are.

    Attributes:
        tag: Columns of the tag; or none.
        keys: Columns of the unique key, then of the others.
    """

    def __init__(self, row: Text) -> None:
        pairs = Pairs(row, np.array([len(row)]))
        # A byte fits a column from ``low`` to ``low + above``: its own in names and separators, ASCII in values.
        self._low, self._above = row.copy(), np.zeros_like(row)
        for first, end in zip(*(found.tolist() for found in pairs.spans()), strict=True):
            self._low[first:end], self._above[first:end] = _VALUE_MIN, _ASCII_MAX - _VALUE_MIN
        self.tag = _spans(pairs.values(b"TAGS"))
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
    powers = np.array([pow(31, end - 1 - at, 1 << 32) for at in range(first, end)], np.uint32)
    found = rows[:, first:end].astype(np.uint32) @ powers
    found += leads * np.uint32(pow(31, end - first, 1 << 32))
    return found.view(np.int32).astype(np.int64)
