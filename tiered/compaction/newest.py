"""The newest row of each key, out of any number of rows in any order, in rounds when not all keys fit into memory.

A *row* says of a record all that compaction, of a tier, an embedded store or an archive's table, decides by.

A *round* keeps the newest row of each key whose digest is in a range. It begins with all digests that no round before had;
when there are more keys than fit, the range ends earlier, and what lies behind is for the next round, which looks at all
records again. So memory is bounded, whatever comes, and no key is counted twice.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.errors import DataError, InvalidError
from tiered.format.block import parse_records
from tiered.format.properties import KEYS
from tiered.format.property_columns import PropertyColumns
from tiered.format.sysflag import INNER_BATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from tiered.format.block import RecordBlock
    from tiered.format.kafka_batch import KafkaRecords
    from tiered.local.interface import RecordBatch
    from tiered.model import MessageQueue

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


# --------------------------------------------------------------------------------------------------
# From records to what compaction looks at: rows with the key of each, with NumPy over a whole batch.
#
# The key is the whole value of the ``KEYS`` property, as the broker has it. A name that comes twice: the later value
# counts, an empty one never does (``tiered.format.properties``). Of Kafka's records it is the key, also an empty one;
# a tombstone is a record whose value is null, not empty.
# --------------------------------------------------------------------------------------------------


_CHUNK_RECORDS: Final = 8192
DIGEST_BYTES: Final = 16

Indices = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
"""uint64[n, 2], each digest's 16 bytes as two little-endian words."""


def digest_many(buffer: Buffer, starts: Indices, sizes: Indices) -> Digests:
    """The digests by which keys are told apart, of many texts that lie in one buffer.

    Of BLAKE2, since nobody can make two keys of the same digest: one of them would take the other's newest message away.
    """
    view, digest = memoryview(buffer).cast("B"), hashlib.blake2b
    places = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    found = [digest(view[begin:end], digest_size=DIGEST_BYTES).digest() for begin, end in places]
    return np.frombuffer(b"".join(found), "<u8").reshape(-1, 2)


def keyed_records(batch: RecordBatch) -> Iterator[Rows]:
    """The records of a batch, some thousand at a time; holes are none.

    Raises:
        InvalidError: One holds an inner batch: its messages cannot go one by one.
    """
    real = np.flatnonzero(batch.sizes > 0)
    for begin in range(0, len(real), _CHUNK_RECORDS):
        where = real[begin : begin + _CHUNK_RECORDS]
        block = parse_records(batch.data, batch.positions[where], batch.sizes[where])
        yield keyed_block(block, where + int(batch.base_offset), batch.queue)


def keyed_block(block: RecordBlock, offsets: Indices, queue: MessageQueue) -> Rows:
    """Rows of some thousand records of a queue, at any queue offsets.

    Raises:
        InvalidError: One holds an inner batch: its messages cannot go one by one.
    """
    if not block.is_sound:
        raise DataError("a record is damaged", where=str(queue))
    if (block.sys_flags & INNER_BATCH).any():
        raise InvalidError(
            f"{queue} has records that hold inner batches; these cannot be compacted",
            do="send messages with keys one by one",
        )
    found = np.zeros(len(block), ROW)
    found["offset"], found["size"] = offsets, block.sizes
    found["time_ms"] = block.store_timestamps_ms
    found["flags"] = EMPTY * (block.body_sizes == 0)
    columns = PropertyColumns.of(block)
    owners, starts, sizes = columns.texts(KEYS.encode())
    digests = digest_many(columns.text.data, starts, sizes)
    found["high"][owners], found["low"][owners] = digests[:, 0], digests[:, 1]
    found["flags"][owners] |= KEYED
    return found


def keyed_kafka(records: KafkaRecords, sizes: Indices) -> Rows:
    """Rows of records of Kafka's; of the bytes of the batches that hold them, ``sizes``, each has its share."""
    columns, rows = records.columns, records.rows
    found = np.zeros(len(rows), ROW)
    found["offset"], found["time_ms"] = columns.offsets[rows], columns.timestamps_ms[rows]
    found["size"] = sizes // np.bincount(columns.batches)[columns.batches[rows]]
    found["flags"] = EMPTY * (columns.value_sizes[rows] < 0)
    owners = np.flatnonzero(columns.key_sizes[rows] >= 0)
    mine = rows[owners]
    digests = digest_many(columns.data, columns.key_starts[mine], columns.key_sizes[mine])
    found["high"][owners], found["low"][owners] = digests[:, 0], digests[:, 1]
    found["flags"][owners] |= KEYED
    return found
