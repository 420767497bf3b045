"""Records of Kafka's batches as readers get them: in Kafka's words, from columns of many."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.kafka_batch import (
    APPEND_TIME,
    UNPACKED_BYTES_MAX,
    HeaderField,
    RecordColumns,
    block_at,
    decode_records,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiered.format.kafka_batch import Flags, Longs

CREATE_TIME: Final = "CREATE_TIME"
LOG_APPEND_TIME: Final = "LOG_APPEND_TIME"


@dataclass(slots=True, eq=False)
class KafkaRecords:
    """Records that were asked for, in order: one element a record in each array."""

    columns: RecordColumns  # of all records of their batches
    rows: Longs  # which of these
    leader_epochs: Longs  # -1: unknown
    is_append_time: Flags  # the time is the node's, else the producer's

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def offsets(self) -> Longs:
        """Their offsets."""
        return self.columns.offsets[self.rows]

    def messages(self) -> list[KafkaRecord]:
        """One by one."""
        columns, rows = self.columns, self.rows.tolist()
        heads = zip(
            rows,
            columns.offsets[self.rows].tolist(),
            columns.timestamps_ms[self.rows].tolist(),
            self.is_append_time.tolist(),
            self.leader_epochs.tolist(),
            strict=True,
        )
        return [
            KafkaRecord(
                offset,
                timestamp_ms,
                LOG_APPEND_TIME if is_append_time else CREATE_TIME,
                columns.key(row),
                columns.value(row),
                columns.headers(row),
                epoch,
            )
            for row, offset, timestamp_ms, is_append_time, epoch in heads
        ]


@dataclass(frozen=True, slots=True)
class KafkaRecord:
    """One record, as a consumer of Kafka's is given it."""

    offset: int
    timestamp_ms: int
    timestamp_type: str  # ``CREATE_TIME`` or ``LOG_APPEND_TIME``
    key: bytes | None
    value: bytes | None
    headers: list[HeaderField]
    leader_epoch: int  # -1: unknown

    @property
    def properties(self) -> dict[str, str]:
        """Headers as text: of a name that comes again the last; null is left out, and what is no UTF-8 replaced."""
        return {
            name: value.decode("utf-8", "replace")
            for name, value in self.headers
            if value is not None
        }

    def to_json(self, topic: str, partition: int) -> dict[str, Any]:
        """In Kafka's words; bytes in base64, null as null."""
        return {
            "topic": topic,
            "partition": partition,
            "offset": self.offset,
            "timestamp_ms": self.timestamp_ms,
            "timestamp_type": self.timestamp_type,
            "key_base64": _base64(self.key),
            "value_base64": _base64(self.value),
            "headers": [[name, _base64(value)] for name, value in self.headers],
            "leader_epoch": self.leader_epoch,
        }


def _base64(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode("ascii")


def records_of(
    data: Buffer,
    positions: Longs,
    sizes: Longs,
    wanted: Longs,
    *,
    unpacked_max: int = UNPACKED_BYTES_MAX,
) -> KafkaRecords:
    """The records with these offsets in batches at these places; offsets that the cleaner took are passed over.

    Args:
        wanted: int64[n], ascending.

    Raises:
        DataError: A batch is damaged, or holds more than ``unpacked_max`` bytes.
    """
    block = block_at(data, positions, sizes)
    columns = decode_records(block, range(len(block)), bytes_max=unpacked_max)
    for number, fault in columns.faults.items():
        raise DataError(f"the batch at offset {block.base_offsets[number]} is damaged: {fault}")
    place = np.minimum(np.searchsorted(wanted, columns.offsets), max(len(wanted) - 1, 0))
    is_wanted = (
        wanted[place] == columns.offsets if len(wanted) else np.zeros(len(columns), np.bool_)
    )
    rows = np.flatnonzero(is_wanted)
    batches = columns.batches[rows]
    epochs = block.column("leader_epoch")[batches]
    return KafkaRecords(columns, rows, epochs, block.has(APPEND_TIME)[batches])
