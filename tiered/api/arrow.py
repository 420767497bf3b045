"""Batches of records as Arrow record batches, made column by column with NumPy and Arrow's own kernels.

No Python code runs for each message, but where messages have to be unpacked: compressed bodies, inner batches, hosts with
IPv6 addresses, properties that are no UTF-8 or name one property twice. The columns are those of ``tiered cat``, typed.
"""

from __future__ import annotations

import importlib
from base64 import b64decode
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.api.message import messages_of
from tiered.errors import DataError, InvalidError
from tiered.format.block import RecordBlock, bytes_at, parse_records
from tiered.format.kafka_batch import CREATE_TIME, LOG_APPEND_TIME
from tiered.format.properties import CLIENT_ONLY, KEYS, TAGS, UNIQ_KEY
from tiered.format.record import format_host
from tiered.format.record_kind import RecordKind
from tiered.format.sysflag import BORN_HOST_V6, COMPRESSED, INNER_BATCH, STORE_HOST_V6
from tiered.log.messages import bodies, foreign_messages, kafka_records

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from tiered.api.message import Message
    from tiered.format.kafka_batch import KafkaRecords
    from tiered.log.decode import TierBatch
    from tiered.log.messages import ForeignMessage

COLUMNS: Final = (
    "topic",
    "queue_id",
    "queue_offset",
    "store_timestamp",
    "born_timestamp",
    "born_host",
    "store_host",
    "tags",
    "keys",
    "properties",
    "msg_id",
    "sys_flag",
    "flag",
    "reconsume_times",
    "prepared_transaction_offset",
    "size",
    "tag_hash",
    "physical_offset",
    "log_offset",
    "body",
)
"""Every column, in the order of ``tiered cat``."""


@cache
def load_pyarrow() -> Any:  # noqa: ANN401 (it has no types)
    """The module."""
    try:
        importlib.import_module("pyarrow.compute")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise InvalidError(
            "archives and Arrow batches need pyarrow, which is not installed",
            do="pip install 'tieredmq[sql]', or `make setup` in a checkout",
        ) from error


def load_library(name: str, needs: str, extra: str) -> Any:  # noqa: ANN401 (a foreign module)
    """A module of a library that an extra of this package brings; ``needs``: what needs which.

    Raises:
        InvalidError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidError(
            f"{needs}, which is not installed", do=f"pip install 'tieredmq[{extra}]'"
        ) from error


def schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """The schema of some columns, in their order (default: all)."""
    arrow = load_pyarrow()
    time = arrow.timestamp("ms", "UTC")
    types = dict.fromkeys(COLUMNS, arrow.int64())
    types |= dict.fromkeys(["store_timestamp", "born_timestamp"], time)
    texts = ["topic", "born_host", "store_host", "tags", "keys", "msg_id"]
    types |= dict.fromkeys(texts, arrow.string())
    numbers = ["queue_id", "sys_flag", "flag", "reconsume_times", "size"]
    types |= dict.fromkeys(numbers, arrow.int32())
    types["properties"] = arrow.map_(arrow.string(), arrow.string())
    types["body"] = arrow.binary()
    return schema_of(types, columns, nullable={"tags", "keys"})


def schema_of(
    types: Mapping[str, pa.DataType], columns: Sequence[str] | None, *, nullable: set[str]
) -> pa.Schema:
    """The schema of some columns of ``types``, in their order; None: of all in the order of these.

    Raises:
        InvalidError: One is not among them, or named twice.
    """
    arrow = load_pyarrow()
    names = list(types if columns is None else columns)
    unknown = [name for name in names if name not in types]
    if unknown or len(set(names)) < len(names):
        what = f"no column {unknown[0]!r}" if unknown else "a column is named twice"
        raise InvalidError(what, do=f"choose from {', '.join(types)}")
    return arrow.schema([arrow.field(n, types[n], nullable=n in nullable) for n in names])


class ArrowMaker:
    """Makes record batches of some columns. For any thread."""

    def __init__(
        self, columns: Sequence[str] | None = None, *, properties: Sequence[str] = ()
    ) -> None:
        """Choose the columns; see ``schema``.

        Args:
            properties: Properties that become columns of their names behind them; null where a message has none.
        """
        self._arrow = load_pyarrow()
        self._columns = schema(columns)
        self._properties = tuple(properties)
        more = [self._arrow.field(name, self._arrow.string()) for name in properties]
        self.schema = self._arrow.schema([*self._columns, *more])

    def make(
        self, batch: TierBatch, numbers: npt.NDArray[np.int64] | None = None
    ) -> pa.RecordBatch:
        """The messages of a batch, holes left out.

        Args:
            numbers: Only these items, ascending.

        Raises:
            DataError: A record, inner batch or packed body is damaged; nothing of the batch is given out.
        """
        records = batch.records
        if numbers is None:
            numbers = np.flatnonzero(records.sizes > 0)
        block = parse_records(records.data, records.positions[numbers], records.sizes[numbers])
        if not block.is_sound:
            raise DataError("a record is damaged", where=str(records.queue))
        made = ArrowColumns(self._arrow, batch, numbers, block)
        arrays = (made.plain if made.is_plain else made.general)(self._columns, self._properties)
        return self._arrow.RecordBatch.from_arrays(arrays, schema=self.schema)


@dataclass
class ArrowColumns:
    """Columns of some items of one batch."""

    arrow: Any  # pyarrow
    batch: TierBatch
    numbers: npt.NDArray[np.int64]  # the items, ascending
    block: RecordBlock

    @property
    def is_plain(self) -> bool:
        """Every item is a record of its own, with hosts of the usual size, in order."""
        odd = self.block.sys_flags & (INNER_BATCH | BORN_HOST_V6 | STORE_HOST_V6)
        return not odd.any() and bool((np.diff(self.block.positions) > 0).all())

    def plain(self, wanted: pa.Schema, properties: Sequence[str]) -> list[Any]:
        """Columns and then properties, without a loop over messages."""
        columns = [self._plain_column(field) for field in wanted]
        return columns + [self._property(name) for name in properties]

    def general(self, wanted: pa.Schema, properties: Sequence[str]) -> list[Any]:
        """The same message by message, for every kind of batch."""
        arrow, found = self.arrow, messages_of(self.batch, self.numbers)
        columns = [
            arrow.array([_GENERAL[field.name](message) for message in found], field.type)
            for field in wanted
        ]
        values = ([message.properties.get(name) for message in found] for name in properties)
        return columns + [arrow.array(texts, arrow.string()) for texts in values]

    def _plain_column(self, field: Any) -> Any:  # noqa: ANN401
        name, block, arrow = field.name, self.block, self.arrow
        if name in _FIXED:
            kind, at = _FIXED[name]
            return self._numbers(bytes_at(block.buffer, kind)[block.positions + at], field.type)
        if name in {"tags", "keys", "properties"}:
            return self._from_properties(field)
        match name:
            case "topic":
                topic = _utf8(self.batch.records.queue.topic)
                return arrow.repeat(arrow.scalar(topic, arrow.string()), len(block))
            case "queue_offset":
                numbers = self.numbers + self.batch.records.base_offset
            case "log_offset":
                numbers = block.positions + self.batch.log_offset
            case "tag_hash":
                numbers = self.batch.records.tag_codes[self.numbers]
            case "sys_flag":
                numbers = block.sys_flags & ~np.int32(COMPRESSED)
            case "born_host":
                return self._hosts(48)
            case "store_host":
                return self._hosts(64)
            case "msg_id":
                return self._ids()
            case _:
                return self._bodies()
        return self._numbers(numbers, field.type)

    def _numbers(self, values: npt.NDArray[Any], kind: Any) -> Any:  # noqa: ANN401
        width = np.int32 if kind == self.arrow.int32() else np.int64
        array = self.arrow.array(values.astype(width, copy=False))
        return array.view(kind) if kind != array.type else array

    def _spans(self, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]) -> Any:  # noqa: ANN401
        return spans_array(self.arrow, self.block.buffer, starts, sizes)

    def _bodies(self) -> Any:  # noqa: ANN401
        if (self.block.sys_flags & COMPRESSED).any():
            found = bodies(self.batch.records, self.numbers, raw_body=False)
            return self.arrow.array(found, self.arrow.binary())
        return self._spans(self.block.body_positions, self.block.body_sizes)

    def _hosts(self, at: int) -> Any:  # noqa: ANN401
        packed = bytes_at(self.block.buffer, ">u8")[self.block.positions + at]
        found = self.arrow.array(packed.astype(np.uint64)).dictionary_encode()
        texts = [format_host(host.to_bytes(8, "big")) for host in found.dictionary.to_pylist()]
        return self.arrow.array(texts, self.arrow.string()).take(found.indices)

    def _ids(self) -> Any:  # noqa: ANN401
        """The id that the client gave, else that of the place: hex of store host and physical offset."""
        arrow, positions = self.arrow, self.block.positions
        words = bytes_at(self.block.buffer, ">u8")
        packed = np.stack([words[positions + 64], words[positions + 28]], axis=1)
        text = packed.astype(">u8").tobytes().hex().upper().encode()
        offsets = np.arange(len(positions) + 1, dtype=np.int32) * 32
        buffers = [None, arrow.py_buffer(offsets), arrow.py_buffer(text)]
        places = arrow.Array.from_buffers(arrow.string(), len(positions), buffers)
        return arrow.compute.coalesce(self._property(UNIQ_KEY), places)

    # Properties

    def _from_properties(self, field: Any) -> Any:  # noqa: ANN401
        if field.name == "properties":
            if self._pairs is not None:
                return self._pairs.map(self.arrow)
            found = [list(message.properties.items()) for message in self._messages]
            return self.arrow.array(found, field.type)
        return self._property(TAGS if field.name == "tags" else KEYS)

    def _property(self, name: str) -> Any:  # noqa: ANN401
        if self._pairs is not None:
            return self._pairs.find(self.arrow, name)
        found = [message.record.properties.get(name) for message in self._messages]
        return self.arrow.array(found, self.arrow.string())

    @cached_property
    def _messages(self) -> list[Message]:
        return messages_of(self.batch, self.numbers)

    @cached_property
    def _pairs(self) -> Pairs | None:
        raw = self._spans(self.block.properties_positions, self.block.properties_sizes)
        return Pairs.parse(self.arrow, raw)


def spans_array(
    arrow: Any,  # noqa: ANN401 (pyarrow has no types)
    buffer: Any,  # noqa: ANN401 (a buffer)
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32] | npt.NDArray[np.int64],
) -> Any:  # noqa: ANN401
    """Bytes of a buffer at these places, which ascend and do not overlap, as a binary array; a size of -1 is null."""
    # One array of them and of what lies between, of which Arrow takes every other element.
    if not len(starts):
        return arrow.array([], arrow.binary())
    nulls = sizes < 0
    offsets = np.stack([starts, starts + np.maximum(sizes, 0)], axis=1).ravel()
    narrow = offsets[-1] < 2**31
    kind = arrow.binary() if narrow else arrow.large_binary()
    offsets = offsets.astype(np.int32 if narrow else np.int64)
    buffers = [None, arrow.py_buffer(offsets), arrow.py_buffer(buffer)]
    both = arrow.Array.from_buffers(kind, len(offsets) - 1, buffers)
    chosen = arrow.array(np.arange(0, len(offsets), 2), mask=nulls if nulls.any() else None)
    return both.take(chosen).cast(arrow.binary())


def _utf8(text: str) -> str:
    """A topic as text that Arrow takes; bytes that are no UTF-8 become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


_FIXED: Final[Mapping[str, tuple[str, int]]] = {
    "queue_id": (">i4", 12),
    "flag": (">i4", 16),
    "physical_offset": (">i8", 28),
    "born_timestamp": (">i8", 40),
    "store_timestamp": (">i8", 56),
    "reconsume_times": (">i4", 72),
    "prepared_transaction_offset": (">i8", 76),
    "size": (">i4", 0),
}
"""Columns that are a field of the record: type and place (``tiered.format.record``), both hosts being IPv4."""

_GENERAL: Final[Mapping[str, Callable[[Message], object]]] = {
    "topic": lambda m: _utf8(m.topic),
    "queue_id": lambda m: m.queue_id,
    "queue_offset": lambda m: m.queue_offset,
    "store_timestamp": lambda m: m.store_timestamp_ms,
    "born_timestamp": lambda m: m.born_timestamp_ms,
    "born_host": lambda m: m.born_host,
    "store_host": lambda m: m.record.store_host,
    "tags": lambda m: m.tags,
    "keys": lambda m: m.keys,
    "properties": lambda m: list(m.properties.items()),
    "msg_id": lambda m: m.msg_id,
    "sys_flag": lambda m: m.sys_flag,
    "flag": lambda m: m.flag,
    "reconsume_times": lambda m: m.reconsume_times,
    "prepared_transaction_offset": lambda m: m.record.prepared_transaction_offset,
    "size": lambda m: m.size,
    "tag_hash": lambda m: m.tag_code,
    "physical_offset": lambda m: m.record.physical_offset,
    "log_offset": lambda m: m.log_offset,
    "body": lambda m: m.body,
}


# -- properties ------------------------------------------------------------------------------------


_NAME_END, _PAIR_END = 1, 2
_COUNTED_MAX = 1 << 22
"""Of so many combinations of message and name each is counted; of more they are sorted, which takes longer."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The properties of many messages, one after another."""

    count: int  # messages
    parents: npt.NDArray[np.int64]  # int64[n], whose each property is; ascending
    names: Any
    values: Any
    known: list[str]  # names that occur, each once
    codes: npt.NDArray[np.int32]  # int32[n], which of them each name is

    @classmethod
    def parse(cls, arrow: Any, raw: Any) -> Pairs | None:  # noqa: ANN401 (pyarrow has no types)
        """As ``tiered.format.properties.parse_properties`` does; None where that has to be asked itself.

        Args:
            raw: Binary array, without nulls: the properties of each message as stored.
        """
        try:
            text = raw.cast(arrow.string())
        except arrow.ArrowInvalid:
            return None  # it is not UTF-8
        found = _regular(arrow, raw) or _any(arrow, text)
        parents, names, values = found
        named = names.dictionary_encode()
        codes = named.indices.to_numpy()
        return cls(len(raw), parents, names, values, named.dictionary.to_pylist(), codes).checked()

    def checked(self) -> Pairs | None:
        """These without what clients add; None when a message names a property twice."""
        width = max(len(self.known), 1)
        keys = self.parents * width + self.codes
        if self.count * width <= _COUNTED_MAX:
            twice = bool(len(keys)) and np.bincount(keys).max() > 1
        else:
            twice = len(np.unique(keys)) < len(keys)
        if twice:
            return None
        dropped = [code for code, name in enumerate(self.known) if name in CLIENT_ONLY]
        if not dropped:
            return self
        kept = np.flatnonzero(~np.isin(self.codes, dropped))
        arrays = self.names.take(kept), self.values.take(kept)
        return Pairs(self.count, self.parents[kept], *arrays, self.known, self.codes[kept])

    def map(self, arrow: Any) -> Any:  # noqa: ANN401
        """Name to value, in the order stored."""
        counts = np.bincount(self.parents, minlength=self.count)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return arrow.MapArray.from_arrays(arrow.array(offsets), self.names, self.values)

    def find(self, arrow: Any, name: str) -> Any:  # noqa: ANN401
        """One property of each message; null where there is none."""
        if name not in self.known:
            return arrow.nulls(self.count, arrow.string())
        at = np.flatnonzero(self.codes == self.known.index(name))
        if len(at) == self.count:
            return self.values.take(arrow.array(at))
        where = np.full(self.count, -1)
        where[self.parents[at]] = at
        return self.values.take(arrow.array(where, mask=where < 0))


def _regular(arrow: Any, raw: Any) -> tuple[npt.NDArray[np.int64], Any, Any] | None:  # noqa: ANN401
    """Parents, names and values by the places of their ends; None unless every pair is whole and ended."""
    _, starts_buffer, data_buffer = raw.buffers()
    if not len(raw) or data_buffer is None:
        return None
    bounds = np.frombuffer(starts_buffer, np.int32)[raw.offset : raw.offset + len(raw) + 1]
    first, end = int(bounds[0]), int(bounds[-1])
    data = np.frombuffer(data_buffer, np.uint8)[:end]
    marks = np.flatnonzero((data == _NAME_END) | (data == _PAIR_END))
    marks = marks[np.searchsorted(marks, first) :]
    name_ends, ends = marks[0::2], marks[1::2]
    if not len(ends) or len(name_ends) != len(ends):
        return None
    starts = np.concatenate([[first], ends[:-1] + 1])
    last_bytes = data[bounds[1:][np.diff(bounds) > 0] - 1]
    is_regular = (
        (data[name_ends] == _NAME_END).all()
        and (data[ends] == _PAIR_END).all()
        and (last_bytes == _PAIR_END).all()
        and (name_ends > starts).all()
        and (ends > name_ends + 1).all()
    )
    if not is_regular:
        return None
    parents = np.repeat(np.arange(len(raw)), np.diff(np.searchsorted(starts, bounds)))
    # One array of names, ends of names, values and ends of pairs, of which Arrow takes what is wanted.
    offsets = np.stack([starts, name_ends, name_ends + 1, ends], axis=1).astype(np.int32).ravel()
    buffers = [None, arrow.py_buffer(offsets), data_buffer]
    every = arrow.Array.from_buffers(arrow.string(), len(offsets) - 1, buffers)
    names = every.take(arrow.array(np.arange(0, len(offsets), 4)))
    return parents, names, every.take(arrow.array(np.arange(2, len(offsets), 4)))


def _any(arrow: Any, text: Any) -> tuple[npt.NDArray[np.int64], Any, Any]:  # noqa: ANN401
    """The same of whatever lies there: pairs that are none are passed over."""
    compute = arrow.compute
    listed = compute.split_pattern(text, "\x02")
    parents = compute.list_parent_indices(listed).to_numpy()
    pairs = listed.flatten()
    marks = compute.find_substring(pairs, "\x01").to_numpy()
    good = (marks > 0) & (compute.binary_length(pairs).to_numpy() > marks + 1)
    halves = compute.split_pattern(pairs.filter(arrow.array(good)), "\x01", max_splits=1).flatten()
    names = halves.take(arrow.array(np.arange(0, len(halves), 2)))
    values = halves.take(arrow.array(np.arange(1, len(halves), 2)))
    return parents[good], names, values


# -- other stores --------------------------------------------------------------------------------
#
# Messages of other stores as Arrow arrays, each in its store's words; Kafka's: nothing runs for each record.
#
# =============== ===================================== ===========================================
# column          type                                  notes
# =============== ===================================== ===========================================
# topic           string
# partition       int32
# offset          int64
# timestamp_ms    int64                                 UTC; -1: none
# timestamp_type  string                                ``CREATE_TIME`` or ``LOG_APPEND_TIME``
# key             binary                                null as Kafka has it
# value           binary                                likewise; null: a tombstone
# headers         list<struct<name: string,             in order; a name may come again; what is no
#                 value: binary>>                       UTF-8 in it becomes U+FFFD
# leader_epoch    int32                                 -1: unknown
# =============== ===================================== ===========================================

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
            return pairs and [(_as_utf8(key), _as_utf8(value)) for key, value in pairs]
        case _:
            value = said[name]
            return _as_utf8(value) if isinstance(value, str) else value


def _as_utf8(text: str) -> str:
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
