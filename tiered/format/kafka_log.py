"""What lies beside Kafka's batches: checkpoints and properties as text, indexes and producer snapshots in binary.

Text checkpoints: line 1 the version, 0; line 2 the number of entries; then an entry a line, its fields apart by blanks.
Kafka puts a whole new file in the place of the old one, so that a reader sees either.

Binary files, big-endian, an entry each:

============ ===== ===========================================================================================
file         bytes fields
============ ===== ===========================================================================================
.index       8     last offset of a batch less the file's 4, where that batch begins 4
.timeindex   12    largest time so far 8, last offset of the first batch that has it less the file's 4
.txnindex    34    version 2 (0), producer id 8, first offset 8, offset of the marker 8, last stable offset 8
.snapshot    46    producer id 8, epoch 2, last sequence 4, last offset 8, offset delta 4, time 8, coordinator's
                   epoch 4, first offset of the open transaction 8 (-1: none); before them version 2 (1),
                   CRC-32C 4 of what follows it, number of entries 4
============ ===== ===========================================================================================

Indexes of the active segment go on in zeros. They are hints: sparse, without a checksum, and Kafka makes them anew when
they are gone.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

import google_crc32c
import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.format.kafka_batch import (
    CONTROL,
    TRANSACTIONAL,
    BatchFault,
    ControlType,
    control_markers,
)
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiered.format.kafka_batch import BatchBlock, Flags

INDEX_ENTRY: Final = np.dtype([("offset", ">i4"), ("position", ">i4")])
TIME_ENTRY: Final = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])
ABORTED_ENTRY: Final = np.dtype(
    [
        ("version", ">i2"),
        ("producer_id", ">i8"),
        ("first_offset", ">i8"),
        ("last_offset", ">i8"),
        ("last_stable_offset", ">i8"),
    ]
)
PRODUCER_ENTRY: Final = np.dtype(
    [
        ("producer_id", ">i8"),
        ("producer_epoch", ">i2"),
        ("last_sequence", ">i4"),
        ("last_offset", ">i8"),
        ("offset_delta", ">i4"),
        ("timestamp", ">i8"),
        ("coordinator_epoch", ">i4"),
        ("transaction_offset", ">i8"),
    ]
)
_SNAPSHOT_HEAD: Final = Struct(">hIi")
_SNAPSHOT_VERSION: Final = 1
_CRC_END: Final = 6


class KafkaFileError(ValueError):
    """A file that is not what Kafka writes, or not all of it."""


def parse_properties(text: str) -> dict[str, str]:
    """``meta.properties`` or ``partition.metadata``: a name and a value a line, apart by ``=`` or ``:``."""
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, value = line.replace(":", "=", 1).partition("=")
            found[name.strip()] = value.strip()
    return found


def parse_entries(text: str, fields: int) -> list[list[str]]:
    """The entries of a text checkpoint, of so many fields each; none when it is empty."""
    lines = text.splitlines()
    if not lines:
        return []
    try:
        version, count = int(lines[0]), int(lines[1])
    except (ValueError, IndexError) as error:
        raise KafkaFileError("a checkpoint without a version and a count") from error
    entries = [line.split() for line in lines[2:]]
    if version or count != len(entries) or any(len(entry) != fields for entry in entries):
        raise KafkaFileError(f"a checkpoint of version {version} with {count} entries is not whole")
    return entries


def parse_offsets(text: str) -> dict[MessageQueue, int]:
    """``replication-offset-checkpoint`` and its like: an offset for each partition."""
    try:
        return {
            MessageQueue(topic, int(partition)): int(offset)
            for topic, partition, offset in parse_entries(text, 3)
        }
    except ValueError as error:
        raise KafkaFileError(f"a checkpoint of offsets: {error}") from error


@dataclass(frozen=True, slots=True)
class LeaderEpochs:
    """Which leader appended what: both rise, from the first epoch that the log still has."""

    epochs: tuple[int, ...]
    starts: tuple[int, ...]  # offset at which each begins

    def end_of(self, epoch: int, log_end: int) -> int:
        """One past the last offset of an epoch and those before it."""
        place = bisect_right(self.epochs, epoch)
        return self.starts[place] if place < len(self.starts) else log_end

    def of(self, offset: int) -> int:
        """The epoch in which an offset was appended; -1 below the first."""
        place = bisect_right(self.starts, offset) - 1
        return self.epochs[place] if place >= 0 else -1


def parse_epochs(text: str) -> LeaderEpochs:
    """``leader-epoch-checkpoint``."""
    try:
        rows = [(int(epoch), int(start)) for epoch, start in parse_entries(text, 2)]
    except ValueError as error:
        raise KafkaFileError(f"a checkpoint of leader epochs: {error}") from error
    if any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(rows)):
        raise KafkaFileError("leader epochs that do not rise")
    return LeaderEpochs(tuple(epoch for epoch, _ in rows), tuple(start for _, start in rows))


def parse_snapshot(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """The entries of a ``.snapshot``, as ``PRODUCER_ENTRY``."""
    if len(data) < _SNAPSHOT_HEAD.size:
        raise KafkaFileError("a producer snapshot is cut short")
    version, crc, count = _SNAPSHOT_HEAD.unpack_from(data)
    if version != _SNAPSHOT_VERSION or google_crc32c.value(data[_CRC_END:]) != crc:
        raise KafkaFileError("a producer snapshot fails its checksum, or is of another version")
    if len(data) != _SNAPSHOT_HEAD.size + count * PRODUCER_ENTRY.itemsize:
        raise KafkaFileError(f"a producer snapshot of {count} entries has {len(data)} bytes")
    return np.frombuffer(data, PRODUCER_ENTRY, offset=_SNAPSHOT_HEAD.size)


def open_transactions(data: bytes) -> Mapping[int, int]:
    """First offset of each transaction that was open when a ``.snapshot`` was taken, by producer id."""
    entries = parse_snapshot(data)
    entries = entries[entries["transaction_offset"] >= 0]
    producers, firsts = entries["producer_id"].tolist(), entries["transaction_offset"].tolist()
    return dict(zip(producers, firsts, strict=True))


# -- transactions --------------------------------------------------------------------------------
#
# Transactions in a Kafka log: which are open, what was aborted, and how far a ``read_committed`` consumer reads. Pure.
#
# A producer has one transaction at a time in a partition: it begins with the first transactional batch, and ends with the
# control batch (marker) that bears the producer's id. The epoch tells nothing here: markers of transaction version 2
# carry the epoch behind that of their data. Of what the cleaner has removed nothing is left to protect: a marker without
# a transaction, and a batch without records, say nothing.
#
# The state is small and carries over: from block to block, from a ``.snapshot`` of the node, from a tier. What is handed in
# lies below the high watermark; then the last stable offset is the node's own.


class AbortedTransaction(NamedTuple):
    """A transaction that was aborted, as ``.txnindex`` has it."""

    producer_id: int
    first_offset: int
    last_offset: int  # of the marker
    last_stable_offset: int  # once the marker counts


def follow_transactions(
    opened: Mapping[int, int], block: BatchBlock
) -> tuple[dict[int, int], list[AbortedTransaction]]:
    """What is open behind the sound batches of a block, if ``opened`` was before it; and what was aborted in it.

    ``opened``: the first offset of each, by producer id.
    """
    now, aborted = dict(opened), list[AbortedTransaction]()
    markers = {marker.batch: marker for marker in control_markers(block)}
    sound = block.faults == BatchFault.OK
    is_control = block.has(CONTROL)
    is_data = block.has(TRANSACTIONAL) & ~is_control & (block.headers["count"] > 0)
    where = np.flatnonzero(sound & (is_data | is_control))
    producers = block.column("producer_id")[where].tolist()
    offsets = block.base_offsets[where].tolist()
    for number, producer, offset in zip(where.tolist(), producers, offsets, strict=True):
        if not is_control[number]:
            now.setdefault(producer, offset)
        elif number in markers and markers[number].kind in tuple(ControlType):
            first = now.pop(producer, None)
            if first is not None and markers[number].kind == ControlType.ABORT:
                stable = last_stable_offset(now, offset + 1)
                aborted.append(AbortedTransaction(producer, first, offset, stable))
    return now, aborted


def last_stable_offset(opened: Mapping[int, int], high_watermark: int) -> int:
    """Up to where all transactions are decided, which is how far a ``read_committed`` consumer reads."""
    return min(high_watermark, *opened.values()) if opened else high_watermark


def is_aborted(block: BatchBlock, aborted: Sequence[AbortedTransaction]) -> Flags:
    """Which batches are data of these transactions."""
    found = np.zeros(len(block), np.bool_)
    if not aborted:
        return found
    where = np.flatnonzero(block.has(TRANSACTIONAL) & ~block.has(CONTROL))
    producers, offsets = block.column("producer_id")[where], block.base_offsets[where]
    ranges = np.array(sorted(aborted), np.int64)
    for producer in np.unique(producers).tolist():
        mine = ranges[ranges[:, 0] == producer]
        if len(mine):
            of_it = producers == producer
            place = np.searchsorted(mine[:, 1], offsets[of_it], side="right") - 1
            found[where[of_it]] = (place >= 0) & (offsets[of_it] < mine[place, 2])
    return found


def is_given(
    block: BatchBlock, aborted: Sequence[AbortedTransaction], last_stable: int | None
) -> Flags:
    """Which sound batches a consumer is given: data; with ``last_stable`` (``read_committed``) below it, not aborted."""
    given: Flags = ~block.has(CONTROL) & (block.faults == BatchFault.OK)
    if last_stable is not None:
        given &= ~is_aborted(block, aborted) & (block.base_offsets < last_stable)
    return given
