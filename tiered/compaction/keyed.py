"""From records to what compaction looks at: rows with the key of each, with NumPy over a whole batch.

The key is the whole value of the ``KEYS`` property, as the broker has it. A name that comes twice: the later value counts,
an empty one never does (``tiered.format.properties``). Of Kafka's records it is the key, also an empty one; a tombstone is a
record whose value is null, not empty.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.compaction.newest import EMPTY, KEYED, ROW
from tiered.errors import DataError, InvalidError
from tiered.format.block import parse_records
from tiered.format.properties import KEYS
from tiered.format.property_columns import PropertyColumns
from tiered.format.sysflag import INNER_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

    from tiered.compaction.newest import Rows
    from tiered.format.block import RecordBlock
    from tiered.format.kafka_batch import KafkaRecords
    from tiered.local.interface import RecordBatch
    from tiered.model import MessageQueue

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
