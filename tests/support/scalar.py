"""The specification of ``tiered.format.block``: the same results, one record at a time.

Slow and simple. Tests hold the two equal on good, damaged and random bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.format import properties
from tiered.format.block import Stop
from tiered.format.properties import TAGS, parse_properties, tag_hash
from tiered.format.record import (
    BLANK_BYTES_MIN,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    RecordFault,
    body_crc,
)
from tiered.format.sysflag import BORN_HOST_V6, INNER_BATCH, STORE_HOST_V6
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(slots=True)
class ScalarRecord:
    """One row of a ``RecordBlock``; place, size and fault alone when it could not be parsed."""

    position: int
    size: int
    fault: RecordFault
    body_crc: int = 0
    queue_id: int = 0
    queue_offset: int = 0
    physical_offset: int = 0
    sys_flag: int = 0
    store_timestamp_ms: int = 0
    body_position: int = 0
    body_size: int = 0
    topic_position: int = 0
    topic_size: int = 0
    properties_position: int = 0
    properties_size: int = 0


def integer(buffer: Buffer, position: int, size: int, *, signed: bool = True) -> int:
    """The big-endian integer of ``size`` bytes at ``position``."""
    return int.from_bytes(memoryview(buffer)[position : position + size], "big", signed=signed)


def walk(
    buffer: Buffer, start: int, end: int, *, size_max: int
) -> tuple[list[int], list[int], int, Stop]:
    """Positions, sizes, end and stop, as of ``walk_records``."""
    positions: list[int] = []
    sizes: list[int] = []
    position = start
    while end - position >= BLANK_BYTES_MIN:
        size = integer(buffer, position, 4)
        magic = integer(buffer, position + 4, 4, signed=False)
        if magic == MAGIC_BLANK:
            return positions, sizes, position, Stop.BLANK
        if size == 0 and magic == 0:
            return positions, sizes, position, Stop.EMPTY
        if magic not in {MAGIC_V1, MAGIC_V2} or size < RECORD_BYTES_MIN or size > size_max:
            return positions, sizes, position, Stop.FAULT
        if size > end - position:
            break
        positions.append(position)
        sizes.append(size)
        position += size
    return positions, sizes, position, Stop.SHORT


def parse(buffer: Buffer, position: int, size: int) -> ScalarRecord:
    """One row of ``parse_records``."""
    if size < RECORD_BYTES_MIN:
        return ScalarRecord(position, size, RecordFault.SIZE)
    if position < 0 or position + size > memoryview(buffer).nbytes:
        return ScalarRecord(position, size, RecordFault.SHORT)
    magic = integer(buffer, position + 4, 4, signed=False)
    if magic not in {MAGIC_V1, MAGIC_V2}:
        return ScalarRecord(position, size, RecordFault.MAGIC)
    if integer(buffer, position, 4) != size:
        return ScalarRecord(position, size, RecordFault.SIZE)
    record = ScalarRecord(
        position,
        size,
        RecordFault.OK,
        body_crc=integer(buffer, position + 8, 4, signed=False),
        queue_id=integer(buffer, position + 12, 4),
        queue_offset=integer(buffer, position + 20, 8),
        physical_offset=integer(buffer, position + 28, 8),
        sys_flag=integer(buffer, position + 36, 4),
    )
    if _find_parts(buffer, record, topic_size_bytes=1 if magic == MAGIC_V1 else 2):
        return record
    return ScalarRecord(position, size, RecordFault.LENGTHS)


def _find_parts(buffer: Buffer, record: ScalarRecord, *, topic_size_bytes: int) -> bool:
    """Fill in what stands behind the hosts; whether the parts fill the record exactly."""
    end = record.position + record.size
    store_time = record.position + (68 if record.sys_flag & BORN_HOST_V6 else 56)
    tail = store_time + 8 + (20 if record.sys_flag & STORE_HOST_V6 else 8)
    record.body_position = tail + 16
    if record.body_position + topic_size_bytes + 2 > end:
        return False
    record.store_timestamp_ms = integer(buffer, store_time, 8)
    record.body_size = integer(buffer, tail + 12, 4)
    record.topic_position = record.body_position + record.body_size + topic_size_bytes
    if record.body_size < 0 or record.topic_position + 2 > end:
        return False
    record.topic_size = integer(buffer, record.topic_position - topic_size_bytes, topic_size_bytes)
    record.properties_position = record.topic_position + record.topic_size + 2
    if record.topic_size < 0 or record.properties_position > end:
        return False
    record.properties_size = integer(buffer, record.properties_position - 2, 2)
    return (
        record.properties_size >= 0 and record.properties_position + record.properties_size == end
    )


def check(buffer: Buffer, record: ScalarRecord, *, expected_physical: int | None) -> None:
    """One row of ``check_records``."""
    if record.fault != RecordFault.OK:
        return
    if expected_physical is not None and record.physical_offset != expected_physical:
        record.fault = RecordFault.PHYSICAL_OFFSET
        return
    body = _slice(buffer, record.body_position, record.body_size)
    if body and body_crc(body) != record.body_crc:
        record.fault = RecordFault.CRC


def _slice(buffer: Buffer, position: int, size: int) -> bytes:
    return bytes(memoryview(buffer)[position : position + size])


def queue_of(buffer: Buffer, record: ScalarRecord) -> MessageQueue:
    """Whose the record is."""
    topic = _slice(buffer, record.topic_position, record.topic_size)
    return MessageQueue(topic.decode("utf-8", "surrogateescape"), record.queue_id)


def group(buffer: Buffer, records: list[ScalarRecord]) -> dict[MessageQueue, list[int]]:
    """As ``group_by_queue`` with its default: indices of the records without a fault, by queue."""
    found: dict[MessageQueue, list[int]] = {}
    for index, record in enumerate(records):
        if record.fault == RecordFault.OK:
            found.setdefault(queue_of(buffer, record), []).append(index)
    return found


def tag_code(buffer: Buffer, record: ScalarRecord) -> int:
    """One element of ``tag_hashes``."""
    raw = _slice(buffer, record.properties_position, record.properties_size)
    return tag_hash(parse_properties(raw).get(TAGS))


def inner_count(buffer: Buffer, record: ScalarRecord) -> int:
    """One element of ``inner_counts``."""
    if not record.sys_flag & INNER_BATCH:
        return 1
    raw = _slice(buffer, record.properties_position, record.properties_size)
    return properties.inner_count(parse_properties(raw))
