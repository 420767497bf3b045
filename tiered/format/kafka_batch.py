"""Kafka's record batches, as segments of its logs have them: the headers of many as columns, and the records in them.

Big-endian. A log is a row of batches; this is one of magic 2, the only one that brokers of version 4 write:

====== ===== ================= ================================================================
offset bytes field             notes
====== ===== ================= ================================================================
0      8     base_offset       of the first record as produced; the cleaner keeps it
8      4     length            of what follows this field: the batch has 12 bytes more
12     4     leader_epoch      of the partition's leader that appended it
16     1     magic             in this place in every version
17     4     crc               CRC-32C of byte 21 to the end: not of what stands before
21     2     attributes        below
23     4     last_offset_delta last offset of the batch less the first; the cleaner keeps it
27     8     base_timestamp    what records' times are relative to; with bit 6 the delete horizon
35     8     max_timestamp     largest of its records; with bit 3 the time of each
43     8     producer_id       -1: none
51     2     producer_epoch
53     4     base_sequence
57     4     count             records; 0 in a batch that the cleaner has emptied
61     ..    records           compressed as one, where bits 0 to 2 say so
====== ===== ================= ================================================================

Attributes: bits 0 to 2 codec (0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd), 3 times are the broker's, 4 transactional,
5 control, 6 delete horizon. A record, whose integers are zig-zag varints unless the table says otherwise:

===== ===================================================================
bytes field
===== ===================================================================
..    size of what follows
1     attributes, unused
..    time less base_timestamp
..    offset less base_offset
..    size of the key, then the key; -1: null
..    size of the value, then the value; -1: null
..    number of headers; of each: size and name, size and value (-1: null)
===== ===================================================================

Four steps: ``walk_batches`` follows the chain of lengths, ``check_batches`` compares checksums and the order of offsets
(``sound_batches`` does both, and goes on behind damage), ``decode_records`` unpacks, ``control_markers`` tells what control
batches say. The first two touch headers only: nothing is done per record. ``tests/support/kafka_batches.py`` says the same
one record at a time; a property test holds the two equal.
"""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_left
from enum import Enum, IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.block import bytes_at
from tiered.format.unpacking import Codec, UnpackError, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Buffer

HEADER: Final = np.dtype(
    [
        ("base_offset", ">i8"),
        ("length", ">i4"),
        ("leader_epoch", ">i4"),
        ("magic", "i1"),
        ("crc", ">u4"),
        ("attributes", ">i2"),
        ("last_offset_delta", ">i4"),
        ("base_timestamp", ">i8"),
        ("max_timestamp", ">i8"),
        ("producer_id", ">i8"),
        ("producer_epoch", ">i2"),
        ("base_sequence", ">i4"),
        ("count", ">i4"),
    ]
)
HEADER_BYTES: Final = 61
MAGIC: Final = 2
LENGTH_FROM: Final = 12  # where what ``length`` counts begins
_MAGIC_AT: Final = 16
CRC_FROM: Final = 21
_LEGACY_CRC_AT: Final = 12
_LEGACY_BYTES_MIN: Final = 26
"""Of magic 0: its offset and size, and the shortest message behind them."""
_OFFSET_AND_LENGTH: Final = Struct(">qi")
BATCH_BYTES_MAX: Final = 128 << 20
"""A length beyond it is not believed; nodes take a MiB unless they are told otherwise."""
_BATCH_OFFSETS_MAX: Final = 1 << 22
_LOOKED_AT: Final = 1 << 20
_FAR: Final = 1 << 62

UNPACKED_BYTES_MAX: Final = 256 << 20
"""Of a batch's records. A node takes batches of 1 MiB unless told otherwise, and a consumer holds one in memory."""

CODEC_MASK: Final = 7
APPEND_TIME: Final = 1 << 3
TRANSACTIONAL: Final = 1 << 4
CONTROL: Final = 1 << 5
DELETE_HORIZON: Final = 1 << 6
CODECS: Final = {1: Codec.GZIP, 2: Codec.SNAPPY, 3: Codec.LZ4, 4: Codec.ZSTD}

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class BatchFault(IntEnum):
    """What is wrong with a batch: the first check that fails."""

    OK = 0
    LEGACY = 1
    """Of magic 0 or 1, and sound: Kafka before 0.11 wrote it."""
    MAGIC = 2
    """Of another magic, or too short for its own."""
    CRC = 3
    """Byte 21 to the end do not match the checksum."""
    OFFSET = 4
    """Its offsets are not between those of its neighbours: they are not under the checksum."""


class BatchStop(Enum):
    """Why a walk ended."""

    SHORT = "short"
    """The bytes end inside a batch, or just behind one."""
    EMPTY = "empty"
    """Zeros: nothing has been written here."""
    FAULT = "fault"
    """A length that cannot be."""


@dataclass(slots=True, eq=False)
class BatchBlock:
    """Batches in a row: one element a batch in each array.

    Of one with the fault MAGIC or LEGACY only ``positions`` and ``sizes`` mean anything.
    """

    buffer: Buffer  # what was walked; kept alive, not copied
    positions: Longs  # where each begins in the buffer
    sizes: Longs  # bytes of each, header included
    headers: npt.NDArray[np.void]  # of ``HEADER``
    faults: npt.NDArray[np.uint8]  # of ``BatchFault``; ``check_batches`` adds to it
    end: int  # where the walk stopped: one past the last batch
    stop: BatchStop  # why

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> Longs:
        """A field of the header, as numbers of this machine."""
        return self.headers[name].astype(np.int64)

    @property
    def base_offsets(self) -> Longs:
        """The first offset of each."""
        return self.column("base_offset")

    @property
    def last_offsets(self) -> Longs:
        """The last offset of each: the next one begins behind it."""
        return self.column("base_offset") + self.column("last_offset_delta")

    def has(self, bits: int) -> Flags:
        """Which have any of these bits in their attributes."""
        found: Flags = self.headers["attributes"].astype(np.int64) & bits != 0
        return found

    def some(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | slice) -> BatchBlock:
        """These batches of the block, over the same bytes."""
        return BatchBlock(
            self.buffer,
            self.positions[chosen],
            self.sizes[chosen],
            self.headers[chosen],
            self.faults[chosen],
            self.end,
            self.stop,
        )


def walk_batches(buffer: Buffer, start: int, end: int, *, size_max: int) -> BatchBlock:
    """Follow batches from ``start`` by their lengths: those of at most ``size_max`` bytes, wholly in ``[start, end)``."""
    positions: list[int] = []
    append, unpack_from = positions.append, _OFFSET_AND_LENGTH.unpack_from
    position, last, stop = start, end - _MAGIC_AT - 1, BatchStop.SHORT
    while position <= last:
        offset, length = unpack_from(buffer, position)
        size = length + LENGTH_FROM
        if not _LEGACY_BYTES_MIN <= size <= size_max:
            stop = BatchStop.FAULT if offset or length else BatchStop.EMPTY
            break
        if position + size > end:
            break
        append(position)
        position += size
    found = np.array(positions, np.int64)
    return block_at(buffer, found, np.diff(found, append=position), position, stop)


def block_at(
    buffer: Buffer, positions: Longs, sizes: Longs, end: int = 0, stop: BatchStop = BatchStop.SHORT
) -> BatchBlock:
    """Headers of batches that lie wholly in the buffer, and faults of those that are not of magic 2."""
    fits = sizes >= HEADER_BYTES
    headers = np.zeros(len(positions), HEADER)
    headers[fits] = bytes_at(buffer, f"V{HEADER_BYTES}")[positions[fits]].view(HEADER)
    faults = np.where(fits & (headers["magic"] == MAGIC), BatchFault.OK, BatchFault.MAGIC)
    block = BatchBlock(buffer, positions, sizes, headers, faults.astype(np.uint8), end, stop)
    for number in np.flatnonzero(block.faults).tolist():
        if _is_legacy(memoryview(buffer)[positions[number] :][: sizes[number]]):
            block.faults[number] = BatchFault.LEGACY
    return block


def _is_legacy(raw: memoryview) -> bool:
    """Whether a batch is of magic 0 or 1, by its own checksum: a flipped bit does not make it one."""
    stored = int.from_bytes(raw[_LEGACY_CRC_AT:_MAGIC_AT], "big")
    return raw[_MAGIC_AT] < MAGIC and zlib_ng.crc32(raw[_MAGIC_AT:]) == stored


def check_batches(block: BatchBlock, offset_min: int, offset_end: int | None = None) -> None:
    """Add faults for batches that fail their checksum, and for those whose offsets cannot be where they are.

    All offsets are in ``[offset_min, offset_end)`` and rise from batch to batch. Where they do not, as few batches as
    can be are at fault, and where it may be one or another, both. A batch that has a fault already is left as it is.
    """
    check_checksums(block)
    check_offsets(block, offset_min, offset_end)


def check_checksums(block: BatchBlock) -> None:
    """Add faults for batches that fail their checksum."""
    view = memoryview(block.buffer)
    where = np.flatnonzero(block.faults == BatchFault.OK)
    starts = block.positions[where]
    slices = map(slice, (starts + CRC_FROM).tolist(), (starts + block.sizes[where]).tolist())
    copies = map(bytes, map(view.__getitem__, slices))  # the library takes nothing else
    computed = np.fromiter(map(google_crc32c.value, copies), np.uint32, len(where))
    block.faults[where[computed != block.headers["crc"][where]]] = BatchFault.CRC


def check_offsets(block: BatchBlock, offset_min: int, offset_end: int | None = None) -> None:
    """Add faults for batches whose offsets cannot be where they are."""
    where = np.flatnonzero(block.faults == BatchFault.OK)
    firsts, lasts = block.base_offsets[where], block.last_offsets[where]
    wrong = (firsts < offset_min) | (lasts < firsts) | (lasts - firsts >= _BATCH_OFFSETS_MAX)
    if offset_end is not None:
        wrong |= lasts >= offset_end
    block.faults[where[wrong]] = BatchFault.OFFSET
    where, firsts, lasts = where[~wrong], firsts[~wrong], lasts[~wrong]
    if (lasts[:-1] >= firsts[1:]).any():
        block.faults[where[_out_of_order(firsts, lasts, offset_min)]] = BatchFault.OFFSET


def _out_of_order(firsts: Longs, lasts: Longs, offset_min: int) -> Flags:
    """All batches but those that are in each of the longest rows whose offsets rise.

    Of several that could have one place in such a row the one counts that joins a neighbour without a gap.
    """
    ranks = _ranks(firsts, lasts)
    longest = ranks + _ranks(-lasts[::-1], -firsts[::-1])[::-1] == ranks.max()
    joins = firsts == np.append(offset_min, lasts[:-1] + 1)
    joins = longest & (joins | _next(joins))
    sure = longest & (np.bincount(ranks[longest])[ranks] == 1)
    kept = sure | (joins & (np.bincount(ranks[joins], minlength=len(ranks))[ranks] == 1))
    at = np.flatnonzero(kept)
    wrong: Flags = ~(sure if (lasts[at[:-1]] >= firsts[at[1:]]).any() else kept)
    return wrong


def _next(flags: Flags, last: bool = False) -> Flags:
    """For each element what the one behind it is."""
    return np.append(flags[1:], last)


def _ranks(firsts: Longs, lasts: Longs) -> Longs:
    """How many batches stand before each in the longest row that ends with it: patience sorting."""
    ends, found = list[int](), list[int]()
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        place = bisect_left(ends, first)
        found.append(place)
        if place == len(ends):
            ends.append(last)
        elif last < ends[place]:
            ends[place] = last
    return np.array(found, np.int64)


def find_batch(
    buffer: Buffer, start: int, end: int, *, size_max: int, offset_min: int, offset_end: int
) -> int | None:
    """Where the first sound batch begins at or behind ``start``: how a reader goes on behind damage.

    It lies wholly below ``end``, and its offsets in ``[offset_min, offset_end)``.
    """
    magics, firsts, lengths = (bytes_at(buffer, kind) for kind in ("i1", ">i8", ">i4"))
    stop = end - HEADER_BYTES + 1
    for low in range(start, stop, _LOOKED_AT):
        places = np.arange(low, min(low + _LOOKED_AT, stop))
        places = places[magics[places + _MAGIC_AT] == MAGIC]
        bases = firsts[places].astype(np.int64)
        places = places[(bases >= offset_min) & (bases < offset_end)]
        sizes = lengths[places + 8].astype(np.int64) + LENGTH_FROM
        fits = (sizes >= HEADER_BYTES) & (sizes <= size_max) & (places + sizes <= end)
        for place, size in zip(places[fits].tolist(), sizes[fits].tolist(), strict=True):
            one = block_at(buffer, np.array([place]), np.array([size]), place + size)
            check_batches(one, offset_min, offset_end)
            if not one.faults.any():
                return int(place)
    return None


class SoundBatches(NamedTuple):
    """What is known of a part of a log."""

    block: BatchBlock
    """The sound batches of it, offsets rising. Bytes before, between and behind them are of none."""
    end: int  # up to which byte that is decided
    is_all: (
        bool  # what lies behind ``end`` is not of the offsets that were asked for, or nothing does
    )


def sound_batches(
    buffer: Buffer, offset_min: int, offset_end: int, *, is_whole: bool
) -> SoundBatches:
    """The batches of a buffer that are sound and within ``[offset_min, offset_end)``, those behind damage too.

    Args:
        is_whole: Nothing follows the buffer. Else a last batch whose offsets no neighbour confirms is left undecided.
    """
    size, found = memoryview(buffer).nbytes, list[BatchBlock]()
    size_max, at = size if is_whole else BATCH_BYTES_MAX, 0
    while True:
        block = walk_batches(buffer, at, size, size_max=size_max)
        check_checksums(block)
        wrong = (block.faults == BatchFault.CRC) | (block.faults == BatchFault.MAGIC)
        lost = np.flatnonzero(wrong & _next(wrong, last=True))  # its size leads nowhere, either
        count = int(lost[0]) if len(lost) else len(block)
        found.append(block.some(np.flatnonzero(block.faults[:count] == BatchFault.OK)))
        if count == len(block) and block.stop is BatchStop.SHORT and not is_whole:
            break
        at = int(block.positions[count]) if count < len(block) else block.end
        behind = {"size_max": size_max, "offset_min": offset_min, "offset_end": _FAR}
        place = find_batch(buffer, at + 1, size, **behind)
        if place is None:
            break
        at = place
    return _decided(_joined(found), offset_min, offset_end, is_whole=is_whole)


def _joined(blocks: list[BatchBlock]) -> BatchBlock:
    """Blocks of one buffer as one."""
    last = blocks[-1]
    if len(blocks) == 1:
        return last
    columns = {
        name: np.concatenate([getattr(block, name) for block in blocks])
        for name in ("positions", "sizes", "headers", "faults")
    }
    return BatchBlock(last.buffer, **columns, end=last.end, stop=last.stop)


def _decided(
    block: BatchBlock, offset_min: int, offset_end: int, *, is_whole: bool
) -> SoundBatches:
    """Take the batches that are in order, up to the first beyond ``offset_end``."""
    check_offsets(block, offset_min)
    block = block.some(block.faults == BatchFault.OK)
    ends = np.append(offset_min, block.last_offsets + 1)
    is_open = len(block) > 0 and int(block.base_offsets[-1]) != ends[-2]
    if is_open and (not is_whole or ends[-1] > offset_end):
        block, ends = block.some(slice(0, -1)), ends[:-1]
    beyond = np.flatnonzero(ends[1:] > offset_end)
    if len(beyond):
        first = int(beyond[0])
        return SoundBatches(block.some(slice(0, first)), int(block.positions[first]), is_all=True)
    if is_whole:
        return SoundBatches(block, memoryview(block.buffer).nbytes, is_all=True)
    end = int(block.positions[-1] + block.sizes[-1]) if len(block) else 0
    return SoundBatches(block, end, is_all=False)


# -- records ---------------------------------------------------------------------------------------
#
# All sections of records are unpacked into one row of bytes. Where a record begins is known only once the one before has
# been read: that is the one loop over records. Each field is then read of all of them at once.

TIME_MS_MAX: Final = (1 << 62) - 1
_TOGETHER_MIN: Final = 24
"""Sections of which a record each is looked at together; of fewer one by one costs less."""
_PADDING: Final = bytes(16)
"""Behind the last record, so that a varint that goes on for ever is read, and refused."""
_VARINT_BITS: Final = 35
_VARLONG_BITS: Final = 70
_MORE: Final = 0x80
_HEADER_FIELD_BYTES_MIN: Final = 2


class HeaderField(NamedTuple):
    """A header of a record; bytes of its name that are no UTF-8 are kept by surrogate escapes."""

    name: str
    value: bytes | None


@dataclass(slots=True, eq=False)
class RecordColumns:
    """Records of some batches: one element a record in each array. Starts are in ``data``; a size of -1 is null."""

    data: bytes  # the sections, unpacked
    batches: Longs  # which batch of the block
    offsets: Longs
    timestamps_ms: Longs
    key_starts: Longs
    key_sizes: Longs
    value_starts: Longs
    value_sizes: Longs
    header_starts: Longs
    """int64[n + 1], where the headers of each record begin in the four arrays below."""
    name_starts: Longs
    name_sizes: Longs
    header_value_starts: Longs
    header_value_sizes: Longs
    faults: dict[int, str]
    """Batches, by number in the block, whose records cannot be had, and why; none of theirs is in the columns."""

    def __len__(self) -> int:
        return len(self.offsets)

    def key(self, index: int) -> bytes | None:
        """The key of one record."""
        return self._bytes(self.key_starts[index], self.key_sizes[index])

    def value(self, index: int) -> bytes | None:
        """The value of one record."""
        return self._bytes(self.value_starts[index], self.value_sizes[index])

    def headers(self, index: int) -> list[HeaderField]:
        """The headers of one record, in order; a name may be there more than once."""
        found = []
        for at in range(self.header_starts[index], self.header_starts[index + 1]):
            name = self._bytes(self.name_starts[at], self.name_sizes[at]) or b""
            value = self._bytes(self.header_value_starts[at], self.header_value_sizes[at])
            found.append(HeaderField(name.decode("utf-8", "surrogateescape"), value))
        return found

    def _bytes(self, start: int, size: int) -> bytes | None:
        return None if size < 0 else self.data[start : start + size]


def decode_records(block: BatchBlock, chosen: Iterable[int], *, bytes_max: int) -> RecordColumns:
    """The records of these batches of a block, in the order in which the batches are given.

    Of a batch that cannot be unpacked to at most ``bytes_max`` bytes, or whose records do not use these up exactly, there
    is a fault, and none of its records: it costs itself alone.
    """
    faults: dict[int, str] = {}
    sections: dict[int, Buffer] = {}
    for number in map(int, chosen):
        try:
            sections[number] = _section(block, number, bytes_max)
        except UnpackError as error:
            faults[number] = f"what is compressed in it {error}"
    while True:
        columns = _columns(block, sections)
        if not columns.faults:
            columns.faults = faults
            return columns
        faults |= columns.faults
        for number in columns.faults:
            del sections[number]


def _section(block: BatchBlock, number: int, bytes_max: int) -> Buffer:
    """The records of a batch, unpacked."""
    start = int(block.positions[number])
    packed = memoryview(block.buffer)[start + HEADER_BYTES : start + int(block.sizes[number])]
    kind = int(block.headers["attributes"][number]) & CODEC_MASK
    if not kind:
        return packed
    if kind not in CODECS:
        raise UnpackError(f"has the unknown codec {kind}")
    return unpack(CODECS[kind], packed, bytes_max)


def _columns(block: BatchBlock, sections: Mapping[int, Buffer]) -> RecordColumns:
    """The records of all sections that are sound, or else the faults of those that are not."""
    data = b"".join([*sections.values(), _PADDING])
    numbers = np.array(list(sections), np.int64)
    sizes = [memoryview(section).nbytes for section in sections.values()]
    section_ends = np.cumsum(np.array(sizes, np.int64))
    counts = block.column("count")[numbers]
    starts, ends_at, bad = _bounds(data, section_ends - sizes, section_ends, counts)
    faults = dict.fromkeys(numbers[bad].tolist(), "its records do not use up its bytes")
    batches = np.repeat(numbers[~bad], counts[~bad])
    cursor = _Cursor(np.frombuffer(data, np.uint8), starts + 1, ends_at)
    times = cursor.varint(_VARLONG_BITS) + block.column("base_timestamp")[batches]
    deltas = cursor.varint()
    keys, values = cursor.sized(), cursor.sized()
    header_starts, names, header_values = cursor.headers()
    cursor.bad |= (deltas < 0) | (deltas > block.column("last_offset_delta")[batches])
    cursor.bad[1:] |= (batches[1:] == batches[:-1]) & (deltas[1:] <= deltas[:-1])
    cursor.bad |= cursor.at != ends_at
    faults |= dict.fromkeys(batches[cursor.bad].tolist(), "a record of it is malformed")
    is_broker_s = block.has(APPEND_TIME)[batches]
    return RecordColumns(
        data,
        batches,
        block.base_offsets[batches] + deltas,
        np.where(is_broker_s, block.column("max_timestamp")[batches], times),
        *keys,
        *values,
        header_starts,
        *names,
        *header_values,
        faults,
    )


def _bounds(data: bytes, at: Longs, ends: Longs, counts: Longs) -> tuple[Longs, Longs, Flags]:
    """Where the records of sections begin behind their sizes, and where they end; and which sections these do not fill.

    A record says where the next one is, so that of all sections the first are looked at, then the second, and so on; of
    the last few sections, which have more records than others, one by one.

    Args:
        at: Where the sections begin; is changed.
        counts: Of their records.
    """
    bad: Flags = (counts < 0) | (
        counts > ends - at
    )  # more than bytes: memory is not taken for these
    counts = np.where(bad, 0, counts)
    firsts, view = np.append(0, np.cumsum(counts)), np.frombuffer(data, np.uint8)
    begins, behind = np.zeros((2, int(firsts[-1])), np.int64)
    live, done = np.flatnonzero(counts), 0
    while len(live) >= _TOGETHER_MIN:
        cursor = _Cursor(view, at[live], ends[live])
        sizes = cursor.varint()
        at[live] = cursor.at + sizes
        bad[live] = cursor.bad | (sizes < 0) | (at[live] > ends[live])
        begins[firsts[live] + done], behind[firsts[live] + done] = cursor.at, at[live]
        done += 1
        live = live[(counts[live] > done) & ~bad[live]]
    for number in live.tolist():
        rows = slice(int(firsts[number]) + done, int(firsts[number + 1]))
        pairs, at[number] = _chain(data, int(at[number]), int(ends[number]), rows.stop - rows.start)
        bad[number] = len(pairs) < rows.stop - rows.start
        if not bad[number]:
            begins[rows], behind[rows] = np.array(pairs, np.int64).T
    bad |= at != ends
    kept = np.repeat(~bad, counts)
    return begins[kept], behind[kept], bad


def _chain(data: bytes, at: int, end: int, count: int) -> tuple[list[tuple[int, int]], int]:
    """Where ``count`` records begin behind their sizes and end, up to one that is malformed; and where that was."""
    found = list[tuple[int, int]]()
    for _ in range(count):
        size, shift = data[at], 7
        at += 1
        more = size >= _MORE
        if more:
            size &= _MORE - 1
            while more and shift < _VARINT_BITS:
                byte = data[at]
                at += 1
                size |= (byte & _MORE - 1) << shift
                shift += 7
                more = byte >= _MORE
        start, at = at, at + (size >> 1)
        if at > end or size & 1 or more:  # a size of six bytes is none
            break
        found.append((start, at))
    return found, at


class _Cursor:
    """Reads a field of many records at once, and goes on to the next one: where it is in each, and which are malformed."""

    def __init__(self, view: npt.NDArray[np.uint8], at: Longs, ends: Longs) -> None:
        self._view, self._ends, self.at = view, ends, at
        self.bad: Flags = at > ends
        self._keep_within()

    def _keep_within(self) -> None:
        self.bad |= self.at > self._ends
        np.minimum(self.at, self._ends, out=self.at)

    def varint(self, bits: int = _VARINT_BITS) -> Longs:
        """A zig-zag number of at most so many bits, 7 of them a byte."""
        byte = self._view[self.at]
        found = (byte & (_MORE - 1)).astype(np.uint64)
        self.at += 1
        where = np.flatnonzero(byte >= _MORE)
        for shift in range(7, bits, 7):
            if not len(where):
                break
            byte = self._view[self.at[where]]
            found[where] |= (byte & (_MORE - 1)).astype(np.uint64) << np.uint64(shift)
            self.at[where] += 1
            where = where[byte >= _MORE]
        self.bad[where] = True
        self._keep_within()
        one = np.uint64(1)
        return (found >> one).astype(np.int64) ^ -(found & one).astype(np.int64)

    def sized(self) -> tuple[Longs, Longs]:
        """Where bytes with their size before them begin, and their size; -1: null."""
        sizes = self.varint()
        starts = self.at.copy()
        self.bad |= sizes < -1
        self.at += np.maximum(sizes, 0)
        self._keep_within()
        return starts, sizes

    def headers(self) -> tuple[Longs, tuple[Longs, Longs], tuple[Longs, Longs]]:
        """Where each record's headers begin among all of them, the names, and the values: as many looks as one has."""
        counts = self.varint()
        room = (self._ends - self.at) // _HEADER_FIELD_BYTES_MIN
        self.bad |= (counts < 0) | (counts > room)
        counts = np.where(self.bad, 0, counts)
        rows, found = np.flatnonzero(counts), [np.zeros((5, 0), np.int64)]
        while len(rows):
            some = _Cursor(self._view, self.at[rows], self._ends[rows])
            (starts, sizes), value = some.sized(), some.sized()
            found.append(np.stack((rows, starts, sizes, *value)))
            self.at[rows], self.bad[rows] = some.at, self.bad[rows] | some.bad | (sizes < 0)
            rows = rows[counts[rows] >= len(found)]
        table = np.concatenate(found, axis=1)
        table = table[:, np.argsort(table[0], kind="stable")]
        return np.append(0, np.cumsum(counts)), (table[1], table[2]), (table[3], table[4])


def with_records(block: BatchBlock, number: int, offsets: Longs, *, bytes_max: int) -> bytes:
    """A batch with only its records of these offsets, as Kafka's cleaner writes it: what says whose it is stays.

    Nothing where it has none of them; the same where all are wanted, or it would not get smaller.

    Raises:
        DataError: It is damaged, or has more than ``bytes_max`` bytes of records.
    """
    start, size = int(block.positions[number]), int(block.sizes[number])
    raw = bytes(memoryview(block.buffer)[start : start + size])
    records = decode_records(block, [number], bytes_max=bytes_max)
    for fault in records.faults.values():
        raise DataError(f"the batch at offset {block.base_offsets[number]} is damaged: {fault}")
    wanted = np.isin(records.offsets, offsets)
    if not wanted.any():
        return b""
    if wanted.all():
        return raw
    section_bytes = len(records.data) - len(_PADDING)
    found, _ = _chain(records.data, 0, section_bytes, len(records))
    ends = [0, *(end for _, end in found)]
    kept = [records.data[ends[at] : ends[at + 1]] for at in np.flatnonzero(wanted).tolist()]
    kind = int(block.headers["attributes"][number]) & CODEC_MASK
    payload = pack(CODECS[kind], b"".join(kept)) if kind else b"".join(kept)
    if len(payload) + HEADER_BYTES >= size:
        return raw
    head = block.headers[number : number + 1].copy()
    head["length"] = HEADER_BYTES - LENGTH_FROM + len(payload)
    head["count"], head["max_timestamp"] = len(kept), records.timestamps_ms[wanted].max()
    head["crc"] = google_crc32c.value(head.tobytes()[CRC_FROM:] + payload)
    return head.tobytes() + payload


def times_ms(headers: npt.NDArray[np.void]) -> Longs:
    """The largest time of each batch as tiers have it: of what a producer says they take -1 (none) to ``TIME_MS_MAX``."""
    found: Longs = np.clip(headers["max_timestamp"].astype(np.int64), -1, TIME_MS_MAX)
    return found


# -- control batches -------------------------------------------------------------------------------


class ControlType(IntEnum):
    """What a control batch says. Others concern Kafka's own metadata, and nothing here."""

    ABORT = 0
    COMMIT = 1


class Marker(NamedTuple):
    """The one record of a control batch: key 2 bytes version, 2 bytes type; value 2 bytes version, 4 bytes epoch."""

    batch: int  # number in the block
    offset: int
    kind: int  # of ``ControlType``, or another
    coordinator_epoch: int  # -1 where the type has none


_MARKER_KEY: Final = Struct(">hh")
_MARKER_VALUE: Final = Struct(">hi")
_MARKER_BYTES_MAX: Final = 64 << 10


def control_markers(block: BatchBlock) -> list[Marker]:
    """What the sound control batches of a block say. The cleaner empties one whose transaction it has removed."""
    chosen = np.flatnonzero(block.has(CONTROL) & (block.faults == BatchFault.OK))
    if not len(chosen):
        return []
    records = decode_records(block, chosen.tolist(), bytes_max=_MARKER_BYTES_MAX)
    found = []
    for index, (batch, offset) in enumerate(
        zip(records.batches.tolist(), records.offsets.tolist(), strict=True)
    ):
        key, value = records.key(index) or b"", records.value(index) or b""
        if len(key) >= _MARKER_KEY.size:
            kind, epoch = _MARKER_KEY.unpack_from(key)[1], -1
            if kind in tuple(ControlType) and len(value) >= _MARKER_VALUE.size:
                epoch = _MARKER_VALUE.unpack_from(value)[1]
            found.append(Marker(batch, offset, kind, epoch))
    return found


# -- messages ------------------------------------------------------------------------------------

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
