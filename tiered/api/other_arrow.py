"""Messages of other stores as Arrow arrays, each in its store's words; Kafka's: nothing runs for each record.

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

from base64 import b64decode
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiered.api.arrow import ArrowMaker, load_pyarrow, schema_of, spans_array
from tiered.format.kafka_message import CREATE_TIME, LOG_APPEND_TIME
from tiered.format.record_kind import RecordKind
from tiered.log.messages import foreign_messages, kafka_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from tiered.format.kafka_message import KafkaRecords
    from tiered.log.decode import TierBatch
    from tiered.log.messages import ForeignMessage

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


# -- JoyQueue ------------------------------------------------------------------------------------

JMQ_COLUMNS: Final = (
    "topic",
    "partition",
    "index",
    "term",
    "batch",
    "batch_count",
    "compression",
    "source",
    "ordered",
    "priority",
    "flag",
    "client_time_ms",
    "store_time_ms",
    "client_ip_hex",
    "app",
    "business_id",
    "attributes",
    "extension",
    "stored_length",
    "body",
)
"""Every column of JoyQueue's messages, in the order of ``tiered cat``."""


def jmq_types() -> dict[str, pa.DataType]:
    """The type of each column."""
    arrow = load_pyarrow()
    types = dict.fromkeys(JMQ_COLUMNS, arrow.int32())
    types |= dict.fromkeys(["index", "client_time_ms", "store_time_ms"], arrow.int64())
    texts = ["topic", "compression", "client_ip_hex", "app", "business_id"]
    types |= dict.fromkeys(texts, arrow.string())
    types |= dict.fromkeys(["batch", "ordered"], arrow.bool_())
    types |= dict.fromkeys(["extension", "body"], arrow.binary())
    types["attributes"] = arrow.map_(arrow.string(), arrow.string())
    return types


def jmq_schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """The schema of some columns, in their order (default: all).

    Raises:
        InvalidError: There is no such column, or one is named twice.
    """
    return schema_of(jmq_types(), columns, nullable={"business_id", "attributes", "extension"})


def jmq_columns(
    messages: Sequence[ForeignMessage], names: Sequence[str] = JMQ_COLUMNS
) -> dict[str, pa.Array]:
    """Columns of these messages, by their names."""
    arrow, types = load_pyarrow(), jmq_types()
    return {
        name: arrow.array([_value(name, one) for one in messages], types[name]) for name in names
    }


def _value(name: str, message: ForeignMessage) -> object:
    said = message.json
    match name:
        case "body":
            return message.body
        case "extension":
            packed = said["extension_base64"]
            return None if packed is None else b64decode(packed)
        case "attributes":
            pairs = said[name] and said[name].items()
            return pairs and [(_utf8(key), _utf8(value)) for key, value in pairs]
        case _:
            value = said[name]
            return _utf8(value) if isinstance(value, str) else value


def _utf8(text: str) -> str:
    """Text that Arrow takes; bytes that are no UTF-8 become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# -- any store -----------------------------------------------------------------------------------------


class AnyArrowMaker:
    """Makes record batches of messages of any store, in the words of that store. For one thread."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        """Choose the columns.

        Raises:
            InvalidError: No store has such columns.
        """
        self._columns = columns
        named = set(columns or ())
        is_known = any(named <= set(known) for known in (KAFKA_COLUMNS, JMQ_COLUMNS))
        if not is_known or len(named) < len(columns or ()):
            self._usual  # noqa: B018 (it raises, or they are RocketMQ's)

    @cached_property
    def _usual(self) -> ArrowMaker:
        return ArrowMaker(self._columns)

    def make(self, batch: TierBatch, numbers: npt.NDArray[np.int64] | None) -> pa.RecordBatch:
        """As ``ArrowMaker.make``.

        Raises:
            InvalidError: Messages of this queue have no such column.
        """
        records, queue = batch.records, batch.records.queue
        if records.kind is RecordKind.ROCKETMQ:
            return self._usual.make(batch, numbers)
        if records.kind is RecordKind.KAFKA:
            wanted, found = kafka_schema(self._columns), kafka_records(records, numbers)
            made = kafka_columns(found, queue.topic, queue.queue_id, wanted.names)
        else:
            wanted = jmq_schema(self._columns)
            made = jmq_columns(foreign_messages(records, numbers), wanted.names)
        return load_pyarrow().RecordBatch.from_arrays(list(made.values()), schema=wanted)
