"""The newest row of each key, out of any number of rows in any order, in rounds when not all keys fit into memory.

A *row* says of a record all that compaction, of a tier, an embedded store or an archive's table, decides by.

A *round* keeps the newest row of each key whose digest is in a range. It begins with all digests that no round before had;
when there are more keys than fit, the range ends earlier, and what lies behind is for the next round, which looks at all
records again. So memory is bounded, whatever comes, and no key is counted twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROW: Final = np.dtype(
    [
        *(("high", "<u8"), ("low", "<u8")),  # of the key's digest; of a record without a key 0
        ("time_ms", "<i8"),  # when it was stored, UTC
        *(
            ("offset", "<i8"),
            ("queue", "<i4"),
        ),  # in its queue; number of the queue, as the caller counts
        ("size", "<i4"),  # bytes of the record
        ("flags", "<u4"),
    ]
)
KEYED, EMPTY, GOES, HOLDS = 1, 2, 4, 8
"""Flags: it has a key; it has no body; it is a tombstone whose time is over; it keeps its key's tombstone."""
KEY_BYTES: Final = 160
"""Of memory a key: its row, a quarter more of such as came since, and what sorting them takes."""
NO_LIMIT: Final = 2**62
_MORE_MAX: Final = 1 << 20
"""Rows that wait to be sorted in, at most: 44 MiB."""
_LAST_DIGEST: Final = 2**64 - 1

Rows = npt.NDArray[np.void]
Flags = npt.NDArray[np.bool_]


def keys_that_fit(memory_bytes: int) -> int:
    """How many keys a round takes.

    Raises:
        InvalidError: Not one.
    """
    if memory_bytes < KEY_BYTES:
        raise InvalidError(
            f"a map of {memory_bytes} bytes has no room for a key",
            do=f"give it more memory: {KEY_BYTES} bytes a key",
        )
    return memory_bytes // KEY_BYTES


def newest_of(rows: Rows, *, is_across: bool) -> Rows:
    """Of each key the newest row, in the order of digests; it holds its tombstone if any row of the key does.

    Args:
        is_across: A key is the same in all queues, and the newest is told by store time, then queue offset, then queue. Else
            each queue has keys of its own, and offsets alone tell: clocks may be set back, and copies have other times.
    """
    key = ("high", "low") if is_across else ("high", "low", "queue")
    names = (*key, "time_ms", "offset", "queue") if is_across else (*key, "offset")
    order = np.lexsort([rows[name] for name in reversed(names)])
    begins = np.ones(len(rows), np.bool_)
    if len(rows):
        columns = (rows[name][order] for name in key)
        begins[1:] = np.logical_or.reduce([one[1:] != one[:-1] for one in columns])
    first = np.flatnonzero(begins)
    found = rows[order[np.append(first[1:], len(rows)) - 1]] if len(rows) else rows
    if len(rows):
        found["flags"] |= np.bitwise_or.reduceat(rows["flags"][order], first) & HOLDS
    return found


class Newest:
    """The newest row of each key of one round. For one thread."""

    def __init__(
        self,
        keys_max: int,
        first: int = 0,
        last: int = _LAST_DIGEST,
        *,
        is_across: bool = False,
    ) -> None:
        """Nothing is known yet.

        Args:
            keys_max: That fit (> 0); keys of one digest's half are never divided, however many.
            first: The smallest digest of the round, by its first half.
            last: The greatest.
            is_across: See ``newest_of``.
        """
        self.keys_max, self.first, self.last = keys_max, first, last
        self._is_across = is_across
        self._known = np.empty(0, ROW)
        self._more: list[Rows] = []
        self._more_max = max(1, min(keys_max // 4, _MORE_MAX))

    def put(self, rows: Rows) -> None:
        """Take in rows, of which the round's are kept."""
        high = rows["high"]
        self._more.append(rows[(high >= np.uint64(self.first)) & (high <= np.uint64(self.last))])
        if sum(map(len, self._more)) >= self._more_max:
            self.rows()

    def rows(self) -> Rows:
        """Those that are the newest so far, in the order of their digests."""
        if self._more:
            every = np.concatenate([self._known, *self._more])
            self._more, self._known = [], every[:0]  # their memory is needed
            self._known = newest_of(every, is_across=self._is_across)
        if len(self._known) > self.keys_max:
            high = self._known["high"]
            self.last = max(int(high[self.keys_max]) - 1, int(high[0]))
            self._known = self._known[: np.searchsorted(high, np.uint64(self.last), "right")].copy()
        return self._known


def in_rounds(
    keys_max: int, look: Callable[[Newest], None], *, is_across: bool = False
) -> Iterator[Newest]:
    """Round after round, until every key had its turn.

    Args:
        look: Puts all rows there are into what it is given.
    """
    first = 0
    while first <= _LAST_DIGEST:
        newest = Newest(keys_max, first, is_across=is_across)
        look(newest)
        newest.rows()
        yield newest
        first = newest.last + 1


def is_among(ascending: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> Flags:
    """bool[n], which values are in a sorted column."""
    if not len(ascending):
        return np.zeros(len(values), np.bool_)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: Flags = ascending[at] == values
    return found


def in_several(samples: Sequence[npt.NDArray[np.uint64]], count: int) -> tuple[int, int]:
    """Of some keys of several queues, how many are in more than one of them, and how many were looked at.

    Args:
        samples: Of each queue the smallest first halves of digests; those of two queues meet in keys that both have.
        count: How many each has at most. Queues with fewer keys are looked at whole.
    """
    # Beyond the greatest of a sample that is full nobody knows what its queue has.
    limits = [sample[-1] for sample in samples if len(sample) == count]
    words = np.concatenate([np.empty(0, np.uint64), *samples])
    if limits:
        words = words[words <= min(limits)]
    found, often = np.unique(words, return_counts=True)
    return int(np.count_nonzero(often > 1)), len(found)
