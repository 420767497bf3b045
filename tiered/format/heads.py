"""What stored records of Kafka and JoyQueue say of themselves, by their heads alone: one look at many records.

Readers of a tier hold it against what an index says of the same records; RocketMQ's are looked at by
``tiered.format.block``, which finds each of their fields.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

import google_crc32c
import numpy as np
from zlib_ng import zlib_ng

from tiered.errors import DataError
from tiered.format import jmq_message, kafka_batch
from tiered.format.block import bytes_at
from tiered.format.record_kind import RecordKind

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer

    from tiered.format.kafka_batch import Flags, Longs

_KEPT: Final = (
    "base_offset",
    "last_offset_delta",
    "leader_epoch",
    "producer_id",
    "producer_epoch",
    "base_sequence",
)
"""What the cleaner keeps of a batch's head."""
_IDENTITY: Final = Struct(">qiiqhi")


class Heads(NamedTuple):
    """One element a record in each array."""

    is_sound: Flags  # it is a record of its kind, as large as was said
    lows: Longs  # the first queue offset that it covers
    highs: Longs  # one past the last
    times_ms: Longs  # Kafka: the largest of its records
    partitions: (
        Longs | None
    )  # JoyQueue: which partition it says that it is of; None: it does not say


def heads_of(kind: RecordKind, data: Buffer, positions: Longs, sizes: Longs) -> Heads:
    """The heads of records at these places: int64[n] each; bytes that are no record are not sound."""
    is_kafka = kind is RecordKind.KAFKA
    head = kafka_batch.HEADER if is_kafka else jmq_message.HEADER
    fits = (positions >= 0) & (sizes >= head.itemsize)
    fits &= positions + sizes <= memoryview(data).nbytes
    heads = np.zeros(len(positions), head)
    heads[fits] = bytes_at(data, f"V{head.itemsize}")[positions[fits]].view(head)
    return _of_kafka(heads, fits, sizes) if is_kafka else _of_jmq(heads, fits, sizes)


def _of_kafka(heads: npt.NDArray[np.void], fits: Flags, sizes: Longs) -> Heads:
    lows = heads["base_offset"].astype(np.int64)
    deltas = heads["last_offset_delta"].astype(np.int64)
    lengths = heads["length"].astype(np.int64) + kafka_batch.LENGTH_FROM
    sound = fits & (heads["magic"] == kafka_batch.MAGIC) & (lengths == sizes) & (deltas >= 0)
    return Heads(sound, lows, lows + deltas + 1, kafka_batch.times_ms(heads), None)


def _of_jmq(heads: npt.NDArray[np.void], fits: Flags, sizes: Longs) -> Heads:
    lows = heads["index"].astype(np.int64)
    is_batch = heads["flags"].astype(np.int64) & jmq_message.BATCH != 0
    counts = np.where(is_batch, heads["flag"], 1).astype(np.int64)
    sound = fits & (heads["magic"] == jmq_message.MAGIC) & (heads["size"] == sizes) & (counts > 0)
    times = heads["client_time"].astype(np.int64) + heads["store_delta"]
    return Heads(sound, lows, lows + counts, times, heads["partition"].astype(np.int64))


def are_whole(kind: RecordKind, data: Buffer, positions: Longs, sizes: Longs) -> Flags:
    """Which records, whose heads are sound, match their own checksum."""
    view = memoryview(data).cast("B")
    if kind is RecordKind.KAFKA:
        starts, ends = positions + kafka_batch.CRC_FROM, positions + sizes
        stored = bytes_at(data, ">u4")[positions + kafka_batch.CRC_FROM - 4].astype(np.int64)
        copies = map(bytes, _slices(view, starts, ends))  # the library takes nothing else
        computed = np.fromiter(map(google_crc32c.value, copies), np.int64, len(positions))
    else:
        head = bytes_at(data, f"V{jmq_message.HEADER.itemsize}")[positions].view(jmq_message.HEADER)
        starts = positions + jmq_message.BODY_AT
        ends = np.clip(starts + head["body_size"], starts, positions + sizes)
        stored = head["crc"].astype(np.int64)
        pieces = _slices(view, starts, ends)
        computed = np.fromiter(map(zlib_ng.crc32, pieces), np.int64, len(positions))
    found: Flags = stored == computed
    return found


def _slices(view: memoryview, starts: Longs, ends: Longs) -> map[memoryview]:
    return map(view.__getitem__, map(slice, starts.tolist(), ends.tolist()))


def fingerprint_of_head(kind: RecordKind, record: Buffer) -> int:
    """The fingerprint of a sound record; never 0.

    Of a batch of Kafka's what the cleaner keeps of it, whatever records it takes: its offsets, its leader's epoch and its
    producer. Of a message of JoyQueue its whole head, with the checksum of its body.
    """
    if kind is RecordKind.KAFKA:
        head = np.frombuffer(memoryview(record), kafka_batch.HEADER, 1)[0]
        identity = _IDENTITY.pack(*(int(head[name]) for name in _KEPT))
    else:
        identity = bytes(memoryview(record).cast("B")[: jmq_message.HEADER.itemsize])
    return zlib_ng.crc32(identity) or 1


def is_same_batch(kind: RecordKind, one: Buffer, other: Buffer) -> bool:
    """Whether both are one batch of Kafka's, whole, of which the cleaner may have taken records in between."""
    sizes = [memoryview(record).nbytes for record in (one, other)]
    if kind is not RecordKind.KAFKA or min(sizes) < kafka_batch.HEADER_BYTES:
        return False
    at = np.zeros(1, np.int64)
    for record, size in zip((one, other), sizes, strict=True):
        is_sound = heads_of(kind, record, at, np.array([size])).is_sound.all()
        if not (is_sound and are_whole(kind, record, at, np.array([size])).all()):
            return False
    return fingerprint_of_head(kind, one) == fingerprint_of_head(kind, other)


def first_since(  # noqa: PLR0917 (where it lies, and what is wanted)
    kind: RecordKind, data: Buffer, position: int, size: int, time_ms: int, low: int
) -> int | None:
    """The first queue offset at or above ``low`` in one record whose time is at or after ``time_ms``; None: none is."""
    at, sizes = np.array([position]), np.array([size])
    if kind is not RecordKind.KAFKA:
        heads = heads_of(kind, data, at, sizes)
        return max(low, int(heads.lows[0])) if heads.times_ms[0] >= time_ms else None
    block = kafka_batch.block_at(data, at, sizes)
    records = kafka_batch.decode_records(block, [0], bytes_max=kafka_batch.UNPACKED_BYTES_MAX)
    if records.faults:
        raise DataError(f"a batch is damaged: {records.faults[0]}")
    late = np.flatnonzero((records.timestamps_ms >= time_ms) & (records.offsets >= low))
    return int(records.offsets[late[0]]) if len(late) else None
