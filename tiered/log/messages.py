"""From records of a tier to what a reader wants of them: messages, bodies, or their bytes.

Which items of a batch are wanted is the caller's to say, by their numbers (``fetcher.filters`` selects them).
Nothing is decoded that is not asked for: ``raw_bytes`` copies slices, ``bodies`` reads only headers of plain records.
Every function gives a whole batch or raises: nothing of a damaged batch gets out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.block import parse_records
from tiered.format.message_forms import decompress_body, message_line, split_batch
from tiered.format.record import Record, RecordError, decode_record
from tiered.format.record_kind import RecordKind
from tiered.format.sysflag import COMPRESSED, INNER_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.format.kafka_batch import KafkaRecords
    from tiered.local.interface import RecordBatch

Numbers: TypeAlias = npt.NDArray[np.int64]
"""Of items of a batch, ascending."""


@dataclass(frozen=True, slots=True)
class Item:
    """One message of a batch."""

    number: int  # of its item in the batch
    record: Record  # the message; an inner message as ``split_batch`` gives it
    stored: Record  # the record that holds it


def items(records: RecordBatch, wanted: Numbers | None = None) -> Iterator[Item]:
    """The messages of a batch in order; holes are left out.

    Args:
        wanted: Numbers of the items, ascending, without holes; None for all that are no holes.
    """
    if wanted is None:
        wanted = np.flatnonzero(records.sizes > 0)
    held: tuple[int, Record, dict[int, Record]] | None = None
    for number, position in zip(wanted.tolist(), records.positions[wanted].tolist(), strict=True):
        if held is None or held[0] != position:
            held = (position, *_decode(records, position))
        _, stored, messages = held
        offset = records.base_offset + number
        if offset not in messages:
            raise DataError(f"the record at queue offset {offset} holds no message of that offset")
        yield Item(number, messages[offset], stored)


def _decode(records: RecordBatch, position: int) -> tuple[Record, dict[int, Record]]:
    try:
        stored = decode_record(records.data, position, check_crc=False)  # checked on reading
    except RecordError as error:
        raise DataError(f"a record is damaged: {error}") from error
    if not stored.sys_flag & INNER_BATCH:
        return stored, {stored.queue_offset: stored}
    return stored, {message.queue_offset: message for message in split_batch(stored)}


def messages_json(
    records: RecordBatch, log_offset: int | None, *, raw_body: bool, wanted: Numbers | None = None
) -> list[dict[str, Any]]:
    """The messages of a batch as JSON objects; see ``tiered.format.message_forms``.

    Args:
        log_offset: Of its first byte in the tiered commit log; None when it is not from a tier.
    """
    if records.kind is not RecordKind.ROCKETMQ:
        return [one.json for one in foreign_messages(records, wanted)]
    return [json.loads(line) for line in _lines(records, log_offset, raw_body, wanted)]


def messages_lines(
    records: RecordBatch, log_offset: int | None, *, raw_body: bool, wanted: Numbers | None = None
) -> list[bytes]:
    """``messages_json`` as lines of JSON without their ends: the fast way to print them."""
    if records.kind is not RecordKind.ROCKETMQ:
        return [json.dumps(one.json).encode() for one in foreign_messages(records, wanted)]
    return _lines(records, log_offset, raw_body, wanted)


@dataclass(frozen=True, slots=True)
class ForeignMessage:
    """A message of another store than RocketMQ's, in the words of that store."""

    number: int  # of its item in the batch
    body: bytes  # Kafka: the value, empty where that is null
    time_ms: int
    key: bytes  # Kafka's record key, JoyQueue's business id; empty: none
    json: dict[str, Any]


def foreign_messages(records: RecordBatch, wanted: Numbers | None = None) -> list[ForeignMessage]:
    """The messages of a batch of another store's; ``wanted`` as of ``items``. Offsets without a message are passed over."""
    is_kafka = records.kind is RecordKind.KAFKA
    return (_kafka_messages if is_kafka else _jmq_messages)(records, wanted)


def kafka_records(records: RecordBatch, wanted: Numbers | None = None) -> KafkaRecords:
    """The records of Kafka's batches; ``wanted`` as of ``items``."""
    from tiered.format.kafka_batch import records_of  # noqa: PLC0415 (most tiers have none of them)

    numbers, firsts = _distinct(records, wanted)
    sizes = records.sizes[firsts].astype(np.int64)
    offsets = numbers + records.base_offset
    return records_of(records.data, records.positions[firsts], sizes, offsets)


def _distinct(records: RecordBatch, wanted: Numbers | None) -> tuple[Numbers, Numbers]:
    """The items that are wanted, and of those that share a record the first."""
    numbers = np.flatnonzero(records.sizes > 0) if wanted is None else wanted
    positions = records.positions[numbers]
    is_first = np.append(True, positions[1:] != positions[:-1])[: len(numbers)]
    return numbers, numbers[is_first]


def _kafka_messages(records: RecordBatch, wanted: Numbers | None) -> list[ForeignMessage]:
    queue, base = records.queue, records.base_offset
    return [
        ForeignMessage(
            one.offset - base,
            one.value or b"",
            one.timestamp_ms,
            one.key or b"",
            one.to_json(queue.topic, queue.queue_id),
        )
        for one in kafka_records(records, wanted).messages()
    ]


def _jmq_messages(records: RecordBatch, wanted: Numbers | None) -> list[ForeignMessage]:
    from tiered.format import jmq_message as jmq  # noqa: PLC0415 (most tiers have none of them)

    numbers, firsts = _distinct(records, wanted)
    asked = set((numbers + records.base_offset).tolist())
    block = jmq.messages_at(records.data, records.positions[firsts])
    found = []
    for number in range(len(block)):
        head = block.headers[number]
        try:
            held = jmq.messages_of(block, number, bytes_max=jmq.UNPACKED_BYTES_MAX)
        except jmq.MessageError as error:
            raise DataError(
                f"the message at index {int(head['index'])} is damaged: {error}"
            ) from error
        found += [
            ForeignMessage(
                one.index - records.base_offset,
                one.body,
                int(head["client_time"]) + int(head["store_delta"]),
                one.business_id.encode("utf-8", "surrogateescape"),
                jmq.message_json(records.queue.topic, head, one),
            )
            for one in held
            if one.index in asked
        ]
    return found


def _lines(
    records: RecordBatch, log_offset: int | None, raw_body: bool, wanted: Numbers | None
) -> list[bytes]:
    codes = records.tag_codes.tolist()
    positions = records.positions.tolist()
    return [
        message_line(
            item.record,
            tag_code=codes[item.number],
            log_offset=None if log_offset is None else log_offset + positions[item.number],
            raw_body=raw_body,
            stored_sys_flag=item.stored.sys_flag,
        )
        for item in items(records, wanted)
    ]


def raw_bytes(records: RecordBatch, numbers: Numbers) -> list[memoryview]:
    """The records of these items, one after another; an inner batch's once. Neighbours come as one slice."""
    view = memoryview(records.data).cast("B")
    slices: list[list[int]] = []
    positions = records.positions[numbers].tolist()
    for position, size in zip(positions, records.sizes[numbers].tolist(), strict=True):
        last = slices[-1] if slices else None
        if last and position < last[1]:
            continue  # the same inner batch
        if last and position == last[1]:
            last[1] += size
        else:
            slices.append([position, position + size])
    return [view[start:end] for start, end in slices]


def bodies(records: RecordBatch, numbers: Numbers, *, raw_body: bool) -> list[memoryview]:
    """The bodies of these items as a client gets them (``raw_body``: as stored); a slice where nothing is packed."""
    if records.kind is not RecordKind.ROCKETMQ:
        return [memoryview(one.body) for one in foreign_messages(records, numbers)]
    view = memoryview(records.data).cast("B")
    block = parse_records(view, records.positions[numbers], records.sizes[numbers])
    if not block.is_sound:
        raise DataError("a record is damaged")
    ends = block.body_positions + block.body_sizes
    found = [
        view[start:end]
        for start, end in zip(block.body_positions.tolist(), ends.tolist(), strict=True)
    ]
    packed = np.flatnonzero(block.sys_flags & (INNER_BATCH | COMPRESSED))
    messages: dict[int, dict[int, Record]] = {}
    for at in packed.tolist():
        flags = int(block.sys_flags[at])
        if flags & INNER_BATCH:
            position = int(block.positions[at])
            if position not in messages:
                messages = {position: _decode(records, position)[1]}
            inner = messages[position].get(records.base_offset + int(numbers[at]))
            if inner is None:
                raise DataError("an inner batch holds fewer messages than its index says")
            found[at] = memoryview(inner.body)
        elif not raw_body:
            found[at] = memoryview(decompress_body(bytes(found[at]), flags))
    return found
