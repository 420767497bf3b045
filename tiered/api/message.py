"""Messages as the Python API gives them: light objects that are decoded when they are looked at."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, InvalidError
from tiered.format.block import bytes_at
from tiered.format.message_forms import decompress_body, message_json
from tiered.format.properties import CLIENT_ONLY, KEYS, TAGS, UNIQ_KEY
from tiered.format.record import SYS_FLAG_AT, Record, RecordError, decode_record, offset_msg_id
from tiered.format.record_kind import RecordKind
from tiered.format.sysflag import COMPRESSED, INNER_BATCH
from tiered.log.messages import foreign_messages, items, kafka_records
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from tiered.format.kafka_batch import HeaderField, KafkaRecord
    from tiered.index.lookup import AnyHit, Lookup
    from tiered.local.interface import RecordBatch
    from tiered.log.decode import TierBatch
    from tiered.log.messages import ForeignMessage

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Message:
    """One message, as a client would get it.

    What ``topic`` to ``log_offset`` say is known at once; the rest is decoded from the stored record when it is first
    asked for. A message keeps the chunk of the tier that it came with in memory, up to some MiB; ``detached`` gives one
    that keeps only itself. Not to be changed; for any thread.
    """

    __slots__ = (
        "_data",
        "_position",
        "_record",
        "_stored",
        "log_offset",
        "queue_id",
        "queue_offset",
        "size",
        "store_timestamp_ms",
        "tag_code",
        "topic",
    )

    def __init__(  # noqa: PLR0917 (made by the million, in one place)
        self,
        queue: MessageQueue,
        queue_offset: int,
        store_timestamp_ms: int,
        size: int,
        tag_code: int,
        log_offset: int,
        data: memoryview,
        position: int,
        record: Record | None = None,
        stored: Record | None = None,
    ) -> None:
        """Point at a record."""
        self.topic = queue.topic
        self.queue_id = queue.queue_id  # likewise
        self.queue_offset = queue_offset  # ordinal in the queue
        self.store_timestamp_ms = store_timestamp_ms  # broker's clock, UTC
        # Bytes of the stored record; of an inner message, of the batch that holds it.
        self.size = size
        self.tag_code = tag_code  # of the consume queue
        self.log_offset = log_offset  # where the record begins in the queue's tiered commit log
        self._data = data
        self._position = position
        self._record = record
        self._stored = stored

    def __repr__(self) -> str:
        return f"<Message {self.topic}/{self.queue_id}@{self.queue_offset}>"

    def _repr_html_(self) -> str:
        from tiered.api.notebook import TEXT_MAX, fields  # noqa: PLC0415 - notebooks alone want it

        body = self.body
        said = [
            ("stored", self.store_time.isoformat()),
            ("tags", self.tags or ""),
            ("keys", self.keys or ""),
            ("body", body[: TEXT_MAX + 1].decode("utf-8", "backslashreplace")),
            ("bytes of it", len(body)),
        ]
        return fields(f"{self.topic}/{self.queue_id}@{self.queue_offset}", said)

    @property
    def record(self) -> Record:
        """All fields as stored."""
        if self._record is None:
            try:
                self._record = decode_record(self._data, self._position, check_crc=False)
            except RecordError as error:
                raise DataError(f"the record of {self} is damaged: {error}") from error
        return self._record

    @property
    def raw(self) -> memoryview:
        """The stored record, without a copy; of an inner message, the record of the whole batch."""
        return self._data[self._position : self._position + self.size]

    @property
    def body(self) -> bytes:
        """The body, unpacked.

        Raises:
            DataError: It cannot be unpacked.
        """
        record = self.record
        if record.sys_flag & COMPRESSED:
            return decompress_body(record.body, record.sys_flag)
        return record.body

    @property
    def properties(self) -> dict[str, str]:
        """By name, in the order stored; parsed anew at each call."""
        return {k: v for k, v in self.record.properties.items() if k not in CLIENT_ONLY}

    @property
    def tags(self) -> str | None:
        """The tag; None without one."""
        return self.record.properties.get(TAGS)

    @property
    def keys(self) -> str | None:
        """The keys, separated by blanks; None without any."""
        return self.record.properties.get(KEYS)

    @property
    def msg_id(self) -> str:
        """The id that the producer's client gave it, else that of its place."""
        record = self.record
        place = offset_msg_id(record.store_host, record.physical_offset)
        return record.properties.get(UNIQ_KEY) or place

    @property
    def store_time(self) -> datetime:
        """Broker's clock.

        Raises:
            OverflowError: The number is not a time of the calendar.
        """
        return _EPOCH + timedelta(milliseconds=self.store_timestamp_ms)

    @property
    def born_timestamp_ms(self) -> int:
        """Producer's clock, UTC."""
        return self.record.born_timestamp_ms

    @property
    def born_host(self) -> str:
        """The producer, ``ip:port``."""
        return self.record.born_host

    @property
    def flag(self) -> int:
        """The producer's flag."""
        return self.record.flag

    @property
    def sys_flag(self) -> int:
        """Bits of ``tiered.format.sysflag``; the one of compression is off, as the body is unpacked."""
        return self.record.sys_flag & ~COMPRESSED

    @property
    def reconsume_times(self) -> int:
        """How often a consumer sent it back."""
        return self.record.reconsume_times

    def to_json(self) -> dict[str, Any]:
        """The message as ``tiered cat`` prints it.

        Raises:
            DataError: The body cannot be unpacked.
        """
        stored = self._stored or self.record
        return message_json(
            self.record,
            tag_code=self.tag_code,
            log_offset=self.log_offset,
            raw_body=False,
            stored_sys_flag=stored.sys_flag,
        )

    def detached(self) -> Message:
        """The same message with a copy of its own bytes."""
        return Message(
            MessageQueue(self.topic, self.queue_id),
            self.queue_offset,
            self.store_timestamp_ms,
            self.size,
            self.tag_code,
            self.log_offset,
            memoryview(bytes(self.raw)),
            0,
            self._record,
            self._stored,
        )


class _ForeignMessage(Message):
    """A message of another store, which is decoded: it has no record of RocketMQ's."""

    __slots__ = ("_said",)
    _said: Any

    def __init__(self, said: object, *place: Any) -> None:  # noqa: ANN401 (those of ``Message``)
        """Keep what it says of itself."""
        super().__init__(*place)
        self._said = said

    @property
    def record(self) -> Record:
        """There is none."""
        do = "use what its class has, to_json(), or raw"
        raise InvalidError(f"{self} is not RocketMQ's, and has no such fields", do=do)

    @property
    def tags(self) -> str | None:
        """None: there are no tags."""
        return None

    def detached(self) -> Self:
        """The same message with a copy of its own stored record."""
        queue, raw = MessageQueue(self.topic, self.queue_id), memoryview(bytes(self.raw))
        heads = self.queue_offset, self.store_timestamp_ms, self.size, self.tag_code
        return type(self)(self._said, queue, *heads, self.log_offset, raw, 0)


class KafkaMessage(_ForeignMessage):
    """A record of Kafka's, in its words and in those that all messages share.

    ``queue_id`` is its partition, ``queue_offset`` its offset, ``store_timestamp_ms`` its timestamp, ``body`` its value.
    ``raw`` is the batch that holds it.
    """

    __slots__ = ()
    _said: KafkaRecord

    @property
    def key(self) -> bytes | None:
        """Of the record; None: null."""
        return self._said.key

    @property
    def value(self) -> bytes | None:
        """Of the record; None: null, which deletes what its key had."""
        return self._said.value

    @property
    def headers(self) -> list[HeaderField]:
        """Names and values in order; a name may come again."""
        return self._said.headers

    @property
    def timestamp_ms(self) -> int:
        """UTC; the producer's or the node's, as ``timestamp_type`` says."""
        return self._said.timestamp_ms

    @property
    def timestamp_type(self) -> str:
        """``CREATE_TIME`` or ``LOG_APPEND_TIME``."""
        return self._said.timestamp_type

    @property
    def leader_epoch(self) -> int:
        """Of the leader that appended it; -1: unknown."""
        return self._said.leader_epoch

    @property
    def body(self) -> bytes:
        """The value; empty where that is null."""
        return self._said.value or b""

    @property
    def properties(self) -> dict[str, str]:
        """Headers as text: of a name that comes again the last; null is left out, and what is no UTF-8 replaced."""
        return self._said.properties

    @property
    def keys(self) -> str | None:
        """The key as text, as ``properties`` are; None: null."""
        return None if self.key is None else self.key.decode("utf-8", "replace")

    def to_json(self) -> dict[str, Any]:
        """The record as ``tiered cat`` prints it."""
        return self._said.to_json(self.topic, self.queue_id)


class JmqMessage(_ForeignMessage):
    """A message of JoyQueue's, in its words and in those that all messages share.

    ``queue_id`` is its partition, ``queue_offset`` its index. ``raw`` is the stored message: of one of a client's batch,
    that batch.
    """

    __slots__ = ()
    _said: ForeignMessage

    @property
    def business_id(self) -> str | None:
        """What it is found by; None: it has none."""
        return self._field("business_id")

    @property
    def app(self) -> str:
        """The application that sent it."""
        return self._field("app") or ""

    @property
    def priority(self) -> int:
        """As its producer gave it."""
        priority: int = self._said.json["priority"]
        return priority

    @property
    def term(self) -> int:
        """Of the leader that wrote it."""
        term: int = self._said.json["term"]
        return term

    @property
    def body(self) -> bytes:
        """The body, unpacked."""
        return self._said.body

    @property
    def properties(self) -> dict[str, str]:
        """Its attributes."""
        return dict(self._said.json["attributes"] or {})

    @property
    def keys(self) -> str | None:
        """The business id; None: it has none."""
        return self.business_id

    def to_json(self) -> dict[str, Any]:
        """The message as ``tiered cat`` prints it."""
        return dict(self._said.json)

    def _field(self, name: str) -> str | None:
        value: str | None = self._said.json[name]
        return value


def messages_of(batch: TierBatch, numbers: npt.NDArray[np.int64] | None = None) -> list[Message]:
    """The messages of a batch in order, holes left out.

    Args:
        numbers: Only these items, ascending.

    Raises:
        DataError: A record or inner batch is damaged; nothing of the batch is given out.
    """
    records = batch.records
    if records.kind is not RecordKind.ROCKETMQ:
        return _foreign(batch, numbers)
    if numbers is None:
        numbers = np.flatnonzero(records.sizes > 0)
    positions = records.positions[numbers]
    if has_inner(records, numbers):
        return _inner(batch, numbers)
    queue, data = records.queue, memoryview(records.data).cast("B")
    return [
        Message(queue, offset, time_ms, size, code, log, data, position)
        for offset, time_ms, size, code, log, position in zip(
            (numbers + records.base_offset).tolist(),
            records.store_timestamps_ms[numbers].tolist(),
            records.sizes[numbers].tolist(),
            records.tag_codes[numbers].tolist(),
            (positions + batch.log_offset).tolist(),
            positions.tolist(),
            strict=True,
        )
    ]


def _foreign(batch: TierBatch, numbers: npt.NDArray[np.int64] | None) -> list[Message]:
    records, data = batch.records, memoryview(batch.records.data).cast("B")
    sizes, codes, positions = records.sizes, records.tag_codes, records.positions

    def place(number: int, time_ms: int) -> tuple[object, ...]:
        offset, at = records.base_offset + number, int(positions[number])
        heads = int(sizes[number]), int(codes[number]), batch.log_offset + at
        return records.queue, offset, time_ms, *heads, data, at

    if records.kind is RecordKind.KAFKA:
        return [
            KafkaMessage(one, *place(one.offset - records.base_offset, one.timestamp_ms))
            for one in kafka_records(records, numbers).messages()
        ]
    every = foreign_messages(records, numbers)
    return [JmqMessage(one, *place(one.number, one.time_ms)) for one in every]


def has_inner(records: RecordBatch, numbers: npt.NDArray[np.int64]) -> bool:
    """Whether one of these items is of an inner batch."""
    if not len(numbers):
        return False
    flags = bytes_at(records.data, ">i4")[records.positions[numbers] + SYS_FLAG_AT]
    return bool((flags & INNER_BATCH).any())


def _inner(batch: TierBatch, numbers: npt.NDArray[np.int64]) -> list[Message]:
    records, data = batch.records, memoryview(batch.records.data).cast("B")
    return [
        Message(
            records.queue,
            QueueOffset(records.base_offset + item.number),
            item.record.store_timestamp_ms,
            int(records.sizes[item.number]),
            int(records.tag_codes[item.number]),
            batch.log_offset + int(records.positions[item.number]),
            data,
            int(records.positions[item.number]),
            item.record,
            item.stored,
        )
        for item in items(records, numbers)
    ]


def message_of_hit(hit: AnyHit) -> Message:
    """A message that was found by key; ``raw`` is made anew of its fields where it is RocketMQ's."""
    from tiered.format.record import encode_record  # noqa: PLC0415 - only queries need it
    from tiered.index.lookup import ForeignHit, Hit  # noqa: PLC0415

    if isinstance(hit, ForeignHit):
        return messages_of(hit.batch)[0]
    assert isinstance(hit, Hit)
    return Message(
        hit.queue,
        hit.queue_offset,
        hit.store_ms,
        hit.stored.size,
        hit.tag_code,
        hit.log_offset,
        memoryview(encode_record(hit.stored)),
        0,
        hit.message,
        hit.stored,
    )


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup by key found; iterates over the messages."""

    messages: list[Message]  # newest first
    unscanned: int
    """Messages that no index covers yet and that were not looked at, for the limit of 256 MiB; 0: all were."""

    @classmethod
    def of(cls, found: Lookup) -> Found:
        """What is to be given out of a lookup.

        Raises:
            DataError: Something that may hold one is damaged.
        """
        if found.damaged:
            raise found.damaged[0]
        return cls([message_of_hit(hit) for hit in found.hits], found.unscanned)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)
