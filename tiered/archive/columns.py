"""From records of a tier to the columns of an archive (docs/formats/archive.md), by the columns of the Python API.

No Python code runs for each message, but where ``tiered.api.arrow`` says so. A record that cannot be unpacked does not
stop the others: its batch is halved until it is alone, and then it is set aside with its reason and its bytes. A body that
does not fit its topic's columns leaves them null in its row; the row says so, and its record is set aside too.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.api.arrow import (
    KAFKA_COLUMNS,
    ArrowMaker,
    kafka_columns,
    kafka_types,
    load_pyarrow,
    spans_array,
)
from tiered.archive.bodies import ERROR, PLAIN, RECORD, BodyLayout, decode_bodies
from tiered.archive.body_formats import body_fields, open_decoder
from tiered.archive.model import KAFKA_SCHEMA
from tiered.errors import DataError
from tiered.format.block import bytes_at, parse_records
from tiered.format.properties import UNIQ_KEY, split_keys
from tiered.format.record import CRC_AT, SYS_FLAG_AT
from tiered.format.record_kind import RecordKind
from tiered.format.sysflag import INNER_BATCH
from tiered.local.interface import HoleReason
from tiered.log.messages import foreign_messages, items, kafka_records, raw_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import numpy.typing as npt
    import pyarrow as pa

    from tiered.archive.bodies import BodyCounts, Decoder
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import Archived, ArchiveQueue
    from tiered.format.kafka_batch import KafkaRecords
    from tiered.local.interface import RecordBatch
    from tiered.log.decode import TierBatch

BODY_REASON = "body: "
"""What reasons begin with in a side file when the message is a row all the same."""
_TAKEN = {
    "topic": "topic",
    "queue_id": "queue_id",
    "queue_offset": "queue_offset",
    "msg_key": "keys",
    "tag": "tags",
    "born_ts": "born_timestamp",
    "store_ts": "store_timestamp",
    "born_host": "born_host",
    "store_host": "store_host",
    "sys_flag": "sys_flag",
    "flag": "flag",
    "reconsume_times": "reconsume_times",
    "prepared_tx_offset": "prepared_transaction_offset",
    "properties": "properties",
    "body": "body",
    "physical_offset": "physical_offset",
}
"""Columns of ours that the Python API has under another name."""
KEYS = ("topic", "queue_id", "queue_offset", "broker", "incarnation")
"""What a row is known by: never null, so the columns are required ones."""
_FIELD_ID = b"PARQUET:field_id"
_RECORD_ID, _ERROR_ID, _KAFKA_ID, _BODY_ID = 25, 26, 27, 1000
"""Ids of fields (Apache Iceberg's): 1 to 24 are those of every file, from 27 on those of Kafka's, and from 1000 on those of
bodies, in their order, so that columns of ours may come in between. An id is never given to another column."""
PAYLOAD = "value"
"""The column in which Kafka's rows have what others have as ``body``: it may be null there, which deletes a key, and it is
the name under which Kafka's people look for it. It is stored once, so ``body`` is null."""
_OF_KAFKA = [name for name in KAFKA_COLUMNS if name != "topic"]
_MS_MIN, _MS_MAX = -1, 253_402_300_799_999
"""None (-1) to the year 9999: of others logs and tools fail. A producer of Kafka's may say any; ``timestamp_ms`` has it."""


def schema(layout: BodyLayout = PLAIN) -> pa.Schema:
    """The columns of files, in order, with their ids: those of every file, and what a layout adds behind them.

    ``KEYS`` are never null.
    """
    arrow = load_pyarrow()
    own = list(_schema())
    inner = count(len(own) + 1)
    found = [_with_id(field, number, inner) for number, field in enumerate(own, 1)]
    if layout.is_kafka:
        kinds, ids = kafka_types(), count(_KAFKA_ID)
        found += [_with_id(arrow.field(name, kinds[name]), next(ids), ids) for name in _OF_KAFKA]
    if layout.has_records:
        found.append(_with_id(arrow.field(RECORD, arrow.binary()), _RECORD_ID, inner))
    if layout.body:
        found.append(_with_id(arrow.field(ERROR, arrow.string()), _ERROR_ID, inner))
        # Columns of bodies are only ever added behind those that the log has fixed before, each with all that is in it:
        # so what comes before a column, and with it its id, is the same in every file and for ever.
        ids = count(_BODY_ID)
        found += [_with_id(field, next(ids), ids) for field in body_fields(layout.body)]
    return arrow.schema(found)


def _with_id(field: pa.Field, number: int, inner: Iterator[int]) -> pa.Field:
    """A field with its id, and the next ones for what is in it."""
    kind = _with_inner_ids(field.type, inner)
    return field.with_type(kind).with_metadata({_FIELD_ID: str(number)})


def _with_inner_ids(kind: Any, ids: Iterator[int]) -> Any:  # noqa: ANN401 (pyarrow has no types)
    arrow = load_pyarrow()
    if arrow.types.is_struct(kind):
        return arrow.struct([_with_id(field, next(ids), ids) for field in kind])
    if arrow.types.is_map(kind):
        key = _with_id(kind.key_field, next(ids), ids)
        return arrow.map_(key, _with_id(kind.item_field, next(ids), ids))
    if arrow.types.is_list(kind):
        return arrow.list_(_with_id(kind.value_field, next(ids), ids))
    return kind


def topic_schema(state: ArchiveState, topic: str) -> pa.Schema:
    """The columns that files of a topic may have: all that any of them has. A file that lacks one has null there."""
    bodies = state.bodies.get(topic, ())
    queues = [queue for queue in state.queues if queue.topic == topic]
    has_records = any(state.queues.columns(queue)[-1].any() for queue in queues)
    is_kafka = any(state.isolation(queue.cluster, queue.broker) for queue in queues)
    return schema(BodyLayout(bodies[-1] if bodies else None, len(bodies), has_records, is_kafka))


def every_schema(state: ArchiveState) -> pa.Schema:
    """The columns that files of any topic may have, but for those of bodies."""
    return schema(BodyLayout(is_kafka=any(one.isolation for one in state.sources.values())))


def layout_of(state: ArchiveState, topic: str, archived: Archived) -> BodyLayout:
    """What the files of an offset range have beside the columns of every file."""
    number = archived.columns
    body = state.bodies[topic][number - 1] if number else None
    return BodyLayout(body, number, archived.has_records, archived.schema == KAFKA_SCHEMA)


def _schema() -> pa.Schema:
    arrow = load_pyarrow()
    text, time = arrow.string(), arrow.timestamp("us", "UTC")
    small, large = arrow.int32(), arrow.int64()
    columns = arrow.schema(
        [
            ("topic", text),
            ("queue_id", small),
            ("queue_offset", large),
            ("uniq_key", text),
            ("msg_key", text),
            ("keys", arrow.list_(text)),
            ("tag", text),
            ("born_ts", time),
            ("store_ts", time),
            ("born_host", text),
            ("store_host", text),
            ("sys_flag", small),
            ("flag", small),
            ("body_crc", large),
            ("reconsume_times", small),
            ("prepared_tx_offset", large),
            ("properties", arrow.map_(text, text)),
            ("body", arrow.binary()),
            ("physical_offset", large),
            ("broker", text),
            ("incarnation", small),
        ]
    )
    fields = (field.with_nullable(field.name not in KEYS) for field in columns)
    return arrow.schema(fields)


def side_schema() -> pa.Schema:
    """The columns of a side file."""
    arrow = load_pyarrow()
    fields = [("topic", arrow.string()), ("queue_id", arrow.int32()), ("broker", arrow.string())]
    fields += [("incarnation", arrow.int32()), ("queue_offset", arrow.int64())]
    return arrow.schema([*fields, ("reason", arrow.string()), ("record", arrow.binary())])


@dataclass(frozen=True, slots=True)
class Aside:
    """What did not become a row."""

    queue_offset: int
    reason: str  # why
    record: bytes | None  # the stored bytes; None of a hole, which has none in the tier's log
    has_row: bool = False  # it is a row all the same: only its body did not fit


class Columns:
    """Makes record batches with the columns of an archive. For any thread."""

    def __init__(
        self, queue: ArchiveQueue, layout: BodyLayout = PLAIN, names: Collection[str] | None = None
    ) -> None:
        """Of a queue's messages, with what a layout adds.

        Args:
            names: Only these columns, and ``queue_offset``; with a layout without bodies. A body that is not among them is
                not unpacked, so no message is put aside because of it.
        """
        self.schema = schema(layout)
        if names is not None:
            chosen = {"queue_offset", *names}
            fields = [field for field in self.schema if field.name in chosen]
            self.schema = load_pyarrow().schema(fields)
        self._known = known = set(self.schema.names)
        sources = known | ({"msg_key"} if "keys" in known else set())
        self._taken = {name: source for name, source in _TAKEN.items() if name in sources}
        self._layout = layout
        self._fields = body_fields(layout.body) if layout.body else []
        self._decoder = open_decoder(layout.body) if layout.body else None
        self._arrow: Any = load_pyarrow()
        texts = [UNIQ_KEY] if "uniq_key" in known else []
        self._maker = ArrowMaker(tuple(self._taken.values()), properties=texts)
        self.queue = queue

    def make(
        self, batch: TierBatch, counts: BodyCounts | None = None
    ) -> tuple[list[pa.RecordBatch], list[Aside]]:
        """The messages of a batch in order, and what is none.

        Args:
            counts: What of bodies is in no column is added to it; None: it is not looked for.

        Returns:
            Batches of rows; holes, records that cannot be unpacked, and those whose bodies do not fit, each once.
        """
        records = batch.records
        aside = [
            Aside(records.base_offset + at, hole_text(int(records.tag_codes[at])), None)
            for at in np.flatnonzero(records.sizes <= 0).tolist()
        ]
        rows: list[pa.RecordBatch] = []
        numbers = np.flatnonzero(records.sizes > 0)
        self._take(batch, numbers, rows, aside, counts)
        return rows, aside

    def _take(
        self,
        batch: TierBatch,
        numbers: npt.NDArray[np.int64],
        rows: list[pa.RecordBatch],
        aside: list[Aside],
        counts: BodyCounts | None,
    ) -> None:
        """Of other stores a record has several messages: one that cannot be unpacked costs itself."""
        if not len(numbers):
            return
        records, is_plain = batch.records, batch.records.kind is RecordKind.ROCKETMQ
        try:
            found, given = (
                (self._rows(batch, numbers), numbers)
                if is_plain
                else self._rows_of(records, numbers)
            )
        except (DataError, self._arrow.ArrowInvalid) as error:
            positions = numbers if is_plain else records.positions[numbers]
            firsts = np.flatnonzero(np.append(True, positions[1:] != positions[:-1]))
            if len(firsts) > 1:
                middle = int(firsts[len(firsts) // 2])
                self._take(batch, numbers[:middle], rows, aside, counts)
                self._take(batch, numbers[middle:], rows, aside, counts)
                return
            raw = b"".join(raw_bytes(records, numbers))
            for offset in (records.base_offset + numbers).tolist():
                aside.append(Aside(offset, str(error), raw))
                raw = b""  # it stands with the first of them
            return
        gone = np.setdiff1d(numbers, given, assume_unique=True) + records.base_offset
        aside += [Aside(offset, _CLEANED, None) for offset in gone.tolist()]
        if len(given):
            if self._decoder is not None:
                aside += self._decode(self._decoder, records, given, found, counts)
            columns = [found[name] for name in self.schema.names]
            rows.append(self._arrow.RecordBatch.from_arrays(columns, schema=self.schema))

    def _decode(
        self,
        decoder: Decoder,
        records: RecordBatch,
        numbers: npt.NDArray[np.int64],
        found: dict[str, Any],
        counts: BodyCounts | None,
    ) -> list[Aside]:
        """Add what bodies say; those that did not fit."""
        is_kafka = records.kind is RecordKind.KAFKA
        bodies = found[PAYLOAD if is_kafka else "body"]
        decoded = decode_bodies(decoder, bodies, self._fields, counts)
        reasons: list[str | None] = [None] * len(numbers)
        aside = []
        for row, (what, details) in decoded.unfit.items():
            if is_kafka and not bodies[row].is_valid:
                continue  # it deletes its key
            reasons[row] = what
            number = numbers[row : row + 1]
            # Of Kafka's the row has all of it; the batch would come again with each of its records.
            raw = b"" if is_kafka else b"".join(raw_bytes(records, number))
            reason = f"{BODY_REASON}{what}: {details}" if details else BODY_REASON + what
            offset = records.base_offset + int(number[0])
            aside.append(Aside(offset, reason, raw, has_row=True))
        found[ERROR] = self._arrow.array(reasons, self._arrow.string())
        found |= dict(zip((one.name for one in self._fields), decoded.columns, strict=True))
        return aside

    def _rows_of(
        self, records: RecordBatch, numbers: npt.NDArray[np.int64]
    ) -> tuple[dict[str, Any], npt.NDArray[np.int64]]:
        """Columns by name of other stores' messages; and which items these are."""
        if records.kind is RecordKind.KAFKA:
            found, times, some = self._rows_of_kafka(kafka_records(records, numbers))
            given = found["queue_offset"].to_numpy() - records.base_offset
        else:
            messages = foreign_messages(records, numbers)
            given = np.array([one.number for one in messages], np.int64)
            times = np.array([one.time_ms for one in messages], np.int64)
            keys = [_text(one.key) or None for one in messages]
            some = self._arrow.array(keys, self._arrow.string())
            found = {
                "body": self._arrow.array([one.body for one in messages], self._arrow.binary())
            }
            found["queue_offset"] = self._arrow.array(given + records.base_offset)
        if self._layout.has_records:
            found[RECORD] = _batches(self._arrow, records, given)
        return self._filled(found, times, some, records), given

    def _rows_of_kafka(
        self, found: KafkaRecords
    ) -> tuple[dict[str, Any], npt.NDArray[np.int64], Any]:
        names = [name for name in _OF_KAFKA if name in self._known]
        wants_keys = not self._known.isdisjoint({"msg_key", "keys"})
        asked = [*names, *(["key"] if wants_keys else ())]
        made = kafka_columns(found, _utf8(self.queue.topic), self.queue.queue_id, asked)
        keys = _texts(self._arrow, made["key"]) if wants_keys else None
        rows = {name: made[name] for name in names}
        rows["queue_offset"] = self._arrow.array(found.offsets)
        return rows, found.columns.timestamps_ms[found.rows], keys

    def _filled(
        self,
        found: dict[str, Any],
        times: npt.NDArray[np.int64],
        keys: Any,  # noqa: ANN401
        records: RecordBatch,
    ) -> dict[str, Any]:
        """The columns that every file has; what a store has not is null."""
        arrow, queue, count = self._arrow, self.queue, len(times)
        number = arrow.scalar(records.queue.queue_id, arrow.int32())
        whole = {
            "topic": arrow.scalar(_utf8(queue.topic)),
            "queue_id": number,
            "broker": arrow.scalar(_utf8(queue.broker)),
            "incarnation": arrow.scalar(queue.incarnation, arrow.int32()),
        }
        for field in self.schema:
            name = field.name
            if name in found:
                continue
            if name in whole:
                found[name] = arrow.repeat(whole[name], count)
            elif name == "store_ts":
                micros = np.clip(times, _MS_MIN, _MS_MAX) * 1000
                found[name] = arrow.array(micros).view(field.type)
            elif name == "msg_key":
                found[name] = keys
            elif name == "keys":
                found[name] = _alone(arrow, keys)
            else:
                found[name] = arrow.nulls(count, field.type)
        return found

    def _rows(self, batch: TierBatch, numbers: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Columns by name, without those of bodies."""
        arrow = self._arrow
        made = self._maker.make(batch, numbers)
        count = made.num_rows
        found = {name: made.column(source) for name, source in self._taken.items()}
        known = set(self.schema.names)
        for name in ("born_ts", "store_ts"):
            if name in known:
                found[name] = found[name].cast(self.schema.field(name).type)
        if "uniq_key" in known:
            found["uniq_key"] = made.column(UNIQ_KEY)
        if "keys" in known:
            found["keys"] = self._keys(found["msg_key"])
        if "body_crc" in known:
            found["body_crc"] = arrow.array(_crcs(batch, numbers))
        if "broker" in known:
            found["broker"] = arrow.repeat(arrow.scalar(_utf8(self.queue.broker)), count)
        if "incarnation" in known:
            incarnation = arrow.scalar(self.queue.incarnation, arrow.int32())
            found["incarnation"] = arrow.repeat(incarnation, count)
        if self._layout.has_records:
            found[RECORD] = _records(arrow, batch, numbers)
        return found

    def _keys(self, texts: Any) -> Any:  # noqa: ANN401 (pyarrow has no types)
        arrow = self._arrow
        divided = arrow.compute.split_pattern(texts, " ")
        if arrow.compute.any(arrow.compute.equal(divided.flatten(), "")).as_py():
            found = [None if text is None else split_keys(text) for text in texts.to_pylist()]
            return arrow.array(found, arrow.list_(arrow.string()))
        return divided


def side_table(queue: ArchiveQueue, aside: list[Aside]) -> pa.Table:
    """A side file's rows."""
    count = len(aside)
    columns = {
        "topic": [_utf8(queue.topic)] * count,
        "queue_id": [queue.queue_id] * count,
        "broker": [_utf8(queue.broker)] * count,
        "incarnation": [queue.incarnation] * count,
        "queue_offset": [one.queue_offset for one in aside],
        "reason": [one.reason for one in aside],
        "record": [one.record for one in aside],
    }
    return load_pyarrow().table(columns, schema=side_schema())


def _crcs(batch: TierBatch, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The CRC that each message says of its body as stored."""
    records = batch.records
    starts = records.positions[numbers]
    if not (bytes_at(records.data, ">i4")[starts + SYS_FLAG_AT] & INNER_BATCH).any():
        crcs: npt.NDArray[np.int64] = bytes_at(records.data, ">u4")[starts + CRC_AT]
        return crcs.astype(np.int64)
    found = (item.record.body_crc for item in items(records, numbers))
    return np.fromiter(found, np.int64, len(numbers))


def _records(arrow: Any, batch: TierBatch, numbers: npt.NDArray[np.int64]) -> Any:  # noqa: ANN401
    """The stored bytes of each; of an inner batch in the row of its first message only."""
    records = batch.records
    starts, sizes = records.positions[numbers], records.sizes[numbers]
    block = parse_records(records.data, starts, sizes)
    first = np.asarray(block.queue_offsets) == records.base_offset + numbers
    whole = first | (block.sys_flags & INNER_BATCH == 0)
    view = memoryview(records.data).cast("B")
    if not (whole.all() and (np.diff(starts) >= sizes[:-1]).all()):
        spans = zip(starts.tolist(), sizes.tolist(), whole.tolist(), strict=True)
        found = [view[at : at + size] if is_whole else None for at, size, is_whole in spans]
        return arrow.array(found, arrow.binary())
    return spans_array(arrow, view, starts, sizes)


def _batches(arrow: Any, records: RecordBatch, numbers: npt.NDArray[np.int64]) -> Any:  # noqa: ANN401
    """The stored bytes of records with several messages each, in the row of the first one only."""
    positions = records.positions[numbers]
    is_first = np.append(True, positions[1:] != positions[:-1])[: len(numbers)]
    sizes = records.sizes[numbers[is_first]]
    every = spans_array(arrow, memoryview(records.data).cast("B"), positions[is_first], sizes)
    return every.take(arrow.array(np.cumsum(is_first) - 1, mask=~is_first))


def _texts(arrow: Any, keys: Any) -> Any:  # noqa: ANN401
    """Keys that are UTF-8, as text; others are null."""
    try:
        return keys.cast(arrow.string())
    except arrow.ArrowInvalid:
        return arrow.array(list(map(_text, keys.to_pylist())), arrow.string())


def _text(key: bytes | None) -> str | None:
    try:
        return None if key is None else key.decode()
    except UnicodeDecodeError:
        return None


def _alone(arrow: Any, keys: Any) -> Any:  # noqa: ANN401
    """Each key as the only one of its row; null where there is none."""
    valid = keys.is_valid().to_numpy(zero_copy_only=False)
    starts = np.append(0, np.cumsum(valid))
    offsets = arrow.array(starts.astype(np.int32), mask=np.append(~valid, False))
    return arrow.ListArray.from_arrays(offsets, keys.drop_null())


def hole_text(code: int) -> str:
    """The reason of a hole as side files have it."""
    known = {reason.value: reason.name.lower() for reason in HoleReason}
    return f"hole: {known.get(code, code)}"


def _utf8(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


_CLEANED = hole_text(HoleReason.COMPACTED)
"""Of an offset that its batch has no record of: Kafka's cleaner has taken it."""
