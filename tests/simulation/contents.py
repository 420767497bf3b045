"""What records and objects say of themselves, read without the product's code.

A record is its bytes; an offset without a message is a *hole*, written as a few bytes that no record can be. Of Kafka the
record at an offset is the whole batch that covers it (``simulation.kafka_batches``).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zstandard
from simulation import kafka_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORD_BYTES_MIN = 61
_HEAD = struct.Struct(">iiiiiqqiq8sq8siqi")
"""Size, magic, body CRC, queue, flag, queue offset, physical offset, system flag, born, host, stored, host, …, body size."""


COMPACTED = b"hole 5"
"""How an offset is written down of which compaction took the message away."""
GAP = b"gap"
"""How an offset is written down of which it is on record that it never came."""


def hole(reason: int) -> bytes:
    """How an offset without a message is written down."""
    return b"hole %d" % reason


def is_hole(record: bytes) -> bool:
    """Whether it is one."""
    return len(record) < RECORD_BYTES_MIN


@dataclass(frozen=True)
class Claims:
    """What a part says of its records.

    Attributes:
        holes: How many.
        low: Smallest store time; -1 without messages.
        high: Greatest store time; -1 without messages.
        mark: Of the last record; 0 of a hole.
    """

    holes: int
    low: int
    high: int
    mark: int

    def of_some(self, holes: int, count: int, mark: int) -> Claims:
        """Of some of the records: the bounds of time stay those of all, while there is any message."""
        low, high = (self.low, self.high) if count > holes else (-1, -1)
        return Claims(holes, low, high, mark)


def claims_of(records: Sequence[bytes]) -> Claims:
    """What is true of these records."""
    times = [store_ms(record) for record in records if not is_hole(record)]
    low, high = (min(times), max(times)) if times else (-1, -1)
    return Claims(len(records) - len(times), low, high, mark_of(records[-1]))


def joined(claims: Sequence[Claims]) -> Claims:
    """Of neighbours that become one."""
    timed = [one for one in claims if one.high >= 0]
    return Claims(
        sum(one.holes for one in claims),
        min((one.low for one in timed), default=-1),
        max((one.high for one in timed), default=-1),
        claims[-1].mark,
    )


def bytes_of(records: Sequence[bytes]) -> int:
    """Bytes of the records at neighbouring offsets, each of which counts once."""
    found, last = 0, b""
    for record in records:
        is_same = record is last or (record == last and kafka_batches.is_batch(record))
        found += 0 if is_hole(record) or is_same else len(record)
        last = record
    return found


def store_ms(record: bytes) -> int:
    """When the broker stored it."""
    if kafka_batches.is_batch(record):
        return kafka_batches.head_of(record).max_timestamp
    return int(_HEAD.unpack_from(record)[10])


def mark_of(record: bytes) -> int:
    """The mark by which it is known again; 0 of a hole."""
    if is_hole(record):
        return 0
    if kafka_batches.is_batch(record):
        return kafka_batches.mark_of(record)
    head = _HEAD.unpack_from(record)
    unique = _properties(record).get(b"UNIQ_KEY", b"")
    identity = struct.pack(">qqIi", head[5], head[10], head[2] & 0xFFFF_FFFF, head[14])
    return zlib.crc32(identity + unique) or 1


def tag_code(record: bytes) -> int:
    """What the index has to say of its tags: Java's hash of the text; of a hole its reason."""
    if is_hole(record):
        return int(record.rpartition(b" ")[2])
    if kafka_batches.is_batch(record):
        return kafka_batches.tag_code(record)
    value = 0
    for (unit,) in struct.iter_unpack(
        ">H", _properties(record).get(b"TAGS", b"").decode().encode("utf-16-be")
    ):
        value = (31 * value + unit) % (1 << 32)
    return value - (value >> 31 << 32)


def key_of(record: bytes) -> bytes:
    """By which compaction knows what it speaks of; empty: it has none."""
    if kafka_batches.is_batch(record):
        return b""
    return _properties(record).get(b"KEYS", b"")


def keys_of(record: bytes) -> set[str]:
    """By which a lookup finds it."""
    found = _properties(record)
    some = [*found.get(b"KEYS", b"").split(), found.get(b"UNIQ_KEY", b"")]
    return {one.decode() for one in some if one}


def is_tombstone(record: bytes) -> bool:
    """It has no body: its key has no value any more."""
    return not _HEAD.unpack_from(record)[14]


def _properties(record: bytes) -> dict[bytes, bytes]:
    at = _HEAD.size + _HEAD.unpack_from(record)[14]
    at += 1 + record[at] + 2
    pairs = [pair.partition(b"\x01") for pair in record[at:].split(b"\x02") if pair]
    return {name: value for name, _, value in pairs}


# -- bundles --------------------------------------------------------------------------------------

_COLUMNS = (
    *(("topic", "I"), ("queue_id", "I"), ("incarnation", "I"), ("segment", "Q")),
    *(("log_offset", "Q"), ("queue_offset", "Q"), ("count", "I"), ("holes", "I")),
    *(("low", "q"), ("high", "q"), ("mark", "I"), ("start", "Q"), ("records_bytes", "I")),
    *(("stored_bytes", "I"), ("size_bytes", "I"), ("crc", "I"), ("truncated", "B")),
)
"""Of a bundle's table (``docs/formats``)."""
_SPARSE_COLUMNS = (("gone", "I"), ("log_gone", "Q"))
"""Beside them, where compaction was: the highest bit of the number of topics says so."""
_SPARSE = 1 << 31
_FOOTER = struct.Struct(">QIIIHHI4s")
_BLOCK_BYTES = 65_536
_PACKED_BLOCK_BYTES = 131_072


@dataclass(frozen=True)
class Section:
    """A row of a bundle's table."""

    topic: str
    queue_id: int
    incarnation: int
    segment: int
    log_offset: int
    queue_offset: int
    count: int
    holes: int
    low: int
    high: int
    mark: int
    start: int
    records_bytes: int
    stored_bytes: int
    size_bytes: int
    crc: int
    truncated: int
    gone: int = 0
    log_gone: int = 0

    @property
    def queue(self) -> tuple[str, int]:
        """Whose."""
        return self.topic, self.queue_id

    @property
    def claims(self) -> Claims:
        """What it says of its records."""
        return Claims(self.holes, self.low, self.high, self.mark)


def table(packed: bytes) -> list[Section]:
    """The sections that a table names."""
    data = zstandard.ZstdDecompressor().decompress(packed)
    (topics,), at, names = struct.unpack_from(">I", data), 4, []
    kinds = _COLUMNS + (_SPARSE_COLUMNS if topics & _SPARSE else ())
    for _ in range(topics & ~_SPARSE):
        (size,) = struct.unpack_from(">H", data, at)
        names.append(data[at + 2 : at + 2 + size].decode())
        at += 2 + size
    rows = (len(data) - at) // struct.calcsize(">" + "".join(kind for _, kind in kinds))
    columns = []
    for _, kind in kinds:
        form = f">{rows}{kind}"
        columns.append(struct.unpack_from(form, data, at))
        at += struct.calcsize(form)
    assert at == len(data)
    return [Section(names[row[0]], *row[1:]) for row in zip(*columns, strict=True)]


def table_bytes(sections: Sequence[Section]) -> bytes:
    """Undo ``table``, for an entry that nobody of ours makes."""
    names = sorted({one.topic for one in sections})
    is_sparse = any(one.gone or one.log_gone for one in sections)
    chunks = [struct.pack(">I", len(names) | (_SPARSE if is_sparse else 0))]
    chunks += [struct.pack(">H", len(name.encode())) + name.encode() for name in names]
    for name, kind in _COLUMNS + (_SPARSE_COLUMNS if is_sparse else ()):
        values = [
            names.index(one.topic) if name == "topic" else getattr(one, name) for one in sections
        ]
        chunks.append(struct.pack(f">{len(values)}{kind}", *values))
    return zstandard.ZstdCompressor().compress(b"".join(chunks))


def bundle(data: bytes) -> tuple[list[Section], int]:
    """The sections of a bundle, which lie one after another, and its level."""
    size, table_size, count, crc, version, level, own, magic = _FOOTER.unpack(data[-_FOOTER.size :])
    footer = data[-_FOOTER.size : -8]
    packed = data[size : size + table_size]
    assert (magic, own) == (b"TBDL", zlib.crc32(footer))
    assert size + table_size + _FOOTER.size == len(data)
    assert crc == zlib.crc32(packed)
    sections, at = table(packed), 0
    assert len(sections) == count
    assert version == (2 if any(one.gone or one.log_gone for one in sections) else 1)
    for one in sections:
        assert one.start == at
        at += one.size_bytes
    assert at == size
    return sections, level


def payload(data: bytes, one: Section) -> tuple[bytes, bytes]:
    """Records and items of a section, from the whole bundle; every checksum has to be right."""
    records, items = _payload(data, one)
    return records, _all_items(items, one) if one.gone else items


def _all_items(stored: bytes, one: Section) -> bytes:
    """The items of a sparse section, with those that are not stored."""
    items = [struct.pack(">qiq", 0, 0, 5)] * one.count
    numbered = [*struct.iter_unpack(">I20s", stored)]
    numbers = [number for number, _ in numbered]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == one.count - 1
    for number, item in numbered:
        items[number] = item
    return b"".join(items)


def _payload(data: bytes, one: Section) -> tuple[bytes, bytes]:
    view = data[one.start : one.start + one.size_bytes]
    items_bytes = 24 * (one.count - one.gone) if one.gone else 20 * one.count
    if one.stored_bytes == one.records_bytes:
        end = one.records_bytes + items_bytes
        assert zlib.crc32(view[:end]) == one.crc
        blocks = _cut(view[: one.records_bytes], _BLOCK_BYTES) + _cut(
            view[one.records_bytes : end], _BLOCK_BYTES
        )
        assert view[end:] == b"".join(zlib.crc32(block).to_bytes(4, "big") for block in blocks)
        return view[: one.records_bytes], view[one.records_bytes : end]
    count = -(-one.records_bytes // _PACKED_BLOCK_BYTES)
    left = (
        one.size_bytes
        - one.stored_bytes
        - items_bytes
        - 8 * (count + -(-items_bytes // _BLOCK_BYTES))
    )
    dictionary_bytes = left - 8 if left else 0
    items_at = one.stored_bytes + dictionary_bytes
    end = items_at + items_bytes
    assert zlib.crc32(view[:end]) == one.crc
    dictionary = zstandard.ZstdCompressionDict(view[one.stored_bytes : items_at])
    chunks, at = [], 0
    for number, (size, crc) in enumerate(struct.iter_unpack(">II", view[end:])):
        assert zlib.crc32(view[at : at + size]) == crc
        if number < count:
            whole = min(_PACKED_BLOCK_BYTES, one.records_bytes - number * _PACKED_BLOCK_BYTES)
            frame = zstandard.ZstdDecompressor(dict_data=dictionary if dictionary_bytes else None)
            chunks.append(
                view[at : at + size] if size == whole else frame.decompress(view[at : at + size])
            )
        at += size
    assert at == end
    return b"".join(chunks), view[items_at:end]


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]
