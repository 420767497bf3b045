"""Kafka's records as Arrow arrays, in Kafka's words: nothing runs for each record.

=============== ===================================== ===========================================
column          type                                  notes
=============== ===================================== ===========================================
topic           string
partition       int32
offset          int64
timestamp_ms    int64                                 UTC; -1: none
timestamp_type  string                                ``CREATE_TIME`` or ``LOG_APPEND_TIME``
key             binary                                null as Kafka has it
value           binary                                likewise; null: a tombstone
headers         list<struct<name: string,             in order; a name may come again; what is no
                value: binary>>                       UTF-8 in it becomes U+FFFD
leader_epoch    int32                                 -1: unknown
=============== ===================================== ===========================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiered.api.arrow import load_pyarrow, schema_of, spans_array
from tiered.format.kafka_message import CREATE_TIME, LOG_APPEND_TIME

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from tiered.format.kafka_message import KafkaRecords

KAFKA_COLUMNS: Final = (
    "topic",
    "partition",
    "offset",
    "timestamp_ms",
    "timestamp_type",
    "key",
    "value",
    "headers",
    "leader_epoch",
)
"""Every column of Kafka's records, in the order of ``tiered cat``."""


def kafka_types() -> dict[str, pa.DataType]:
    """The type of each column."""
    arrow = load_pyarrow()
    header = arrow.struct([("name", arrow.string()), ("value", arrow.binary())])
    types = dict.fromkeys(KAFKA_COLUMNS, arrow.int64())
    types |= dict.fromkeys(["topic", "timestamp_type"], arrow.string())
    types |= dict.fromkeys(["partition", "leader_epoch"], arrow.int32())
    types |= dict.fromkeys(["key", "value"], arrow.binary())
    types["headers"] = arrow.list_(header)
    return types


def kafka_schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """The schema of some columns, in their order (default: all).

    Raises:
        InvalidError: There is no such column, or one is named twice.
    """
    return schema_of(kafka_types(), columns, nullable={"key", "value"})


def kafka_columns(
    records: KafkaRecords, topic: str, partition: int, names: Sequence[str] = KAFKA_COLUMNS
) -> dict[str, pa.Array]:
    """Columns of these records, by their names; what is not asked for costs nothing."""
    return {name: _column(name, records, topic, partition) for name in names}


def _column(name: str, records: KafkaRecords, topic: str, partition: int) -> pa.Array:
    arrow, columns, rows = load_pyarrow(), records.columns, records.rows
    match name:
        case "topic":
            return arrow.repeat(arrow.scalar(topic, arrow.string()), len(rows))
        case "partition":
            return arrow.repeat(arrow.scalar(partition, arrow.int32()), len(rows))
        case "offset":
            return arrow.array(records.offsets)
        case "timestamp_ms":
            return arrow.array(columns.timestamps_ms[rows])
        case "timestamp_type":
            kinds = arrow.array([CREATE_TIME, LOG_APPEND_TIME], arrow.string())
            return kinds.take(arrow.array(records.is_append_time.astype(np.int8)))
        case "key":
            starts, sizes = columns.key_starts[rows], columns.key_sizes[rows]
            return spans_array(arrow, columns.data, starts, sizes)
        case "value":
            starts, sizes = columns.value_starts[rows], columns.value_sizes[rows]
            return spans_array(arrow, columns.data, starts, sizes)
        case "headers":
            return _headers(arrow, records)
        case _:
            return arrow.array(records.leader_epochs.astype(np.int32))


def _headers(arrow: Any, records: KafkaRecords) -> Any:  # noqa: ANN401 (pyarrow has no types)
    columns, rows = records.columns, records.rows
    data = columns.data
    names = spans_array(arrow, data, columns.name_starts, columns.name_sizes)
    values = spans_array(arrow, data, columns.header_value_starts, columns.header_value_sizes)
    try:
        names = names.cast(arrow.string())
    except arrow.ArrowInvalid:
        texts = [name.decode("utf-8", "replace") for name in names.to_pylist()]
        names = arrow.array(texts, arrow.string())
    pairs = arrow.StructArray.from_arrays([names, values], ["name", "value"])
    lists = arrow.ListArray.from_arrays(columns.header_starts.astype(np.int32), pairs)
    return lists if len(rows) == len(lists) else lists.take(arrow.array(rows))
