"""Many records at once: where they are, what they say, whether they are sound, whose they are.

Three steps, each of which can be had by itself (``split_records`` does all three):

1. ``walk_records`` follows the chain of sizes;
2. ``parse_records`` gathers the fields of all records into arrays;
3. ``check_records`` compares places and CRCs.

Then ``group_by_queue`` tells whose they are. ``tests/support/scalar.py`` says the same one record
at a time, in plain code; a property test holds the two equal.
"""

from __future__ import annotations

from enum import Enum
from itertools import accumulate, starmap
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.format import properties, sysflag
from tiered.format.record import (
    BODY_AT,
    BODY_SIZE_AT,
    CRC_AT,
    CRC_MASK,
    MAGIC_AT,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PHYSICAL_OFFSET_AT,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    RECORD_BYTES_MIN,
    SIZE_AND_MAGIC,
    STORE_TIME_AT,
    SYS_FLAG_AT,
    RecordFault,
)
from tiered.format.sysflag import BORN_HOST_V6, STORE_HOST_V6, V6_EXTRA_BYTES
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Buffer


# -- fields ----------------------------------------------------------------------------------------
#
# The fields of many records, as arrays, and whether the records are sound.
#
# No function here reads a byte outside ``[position, position + size)`` of the records that it is
# given. The gathers rest on one device: an array of one field type with a stride of 1 byte, whose
# element ``i`` is the field that begins at byte ``i``. It is a view; nothing is copied but the wanted
# elements.

HEADER_DTYPE = np.dtype(
    {
        # The fields of a record up to its body, hosts IPv4; tiered.format.record has the table.
        "names": [
            "size",
            "magic",
            "body_crc",
            "queue_id",
            "queue_offset",
            "physical_offset",
            "sys_flag",
            "store_timestamp_ms",
            "body_size",
        ],
        "formats": [">i4", ">u4", ">u4", ">i4", ">i8", ">i8", ">i4", ">i8", ">i4"],
        "offsets": [
            0,
            MAGIC_AT,
            CRC_AT,
            QUEUE_ID_AT,
            QUEUE_OFFSET_AT,
            PHYSICAL_OFFSET_AT,
            SYS_FLAG_AT,
            STORE_TIME_AT,
            BODY_SIZE_AT,
        ],
        "itemsize": BODY_AT,
    }
)


@dataclass(slots=True)
class RecordBlock:
    """Fields of many records: one element a record in each array, in the order asked for.

    Positions are byte addresses in ``buffer``. For a record with the fault SHORT, MAGIC, SIZE or
    LENGTHS only ``positions``, ``sizes`` and ``faults`` mean anything: the rest of it is 0.
    """

    buffer: Buffer  # what was parsed; kept alive, not copied
    positions: npt.NDArray[np.int64]  # int64[n]
    sizes: npt.NDArray[np.int32]  # int32[n], whole record
    faults: npt.NDArray[np.uint8]  # uint8[n], of ``RecordFault``; ``check_records`` adds to it
    body_crcs: npt.NDArray[np.uint32]  # uint32[n], as stored
    queue_ids: npt.NDArray[np.int32]  # int32[n]
    queue_offsets: npt.NDArray[np.int64]  # int64[n]
    physical_offsets: npt.NDArray[np.int64]  # int64[n], as stored in the record
    sys_flags: npt.NDArray[np.int32]  # int32[n]
    store_timestamps_ms: npt.NDArray[np.int64]  # int64[n], UTC
    # body_positions, body_sizes: int64[n], int32[n].
    body_positions: npt.NDArray[np.int64]
    body_sizes: npt.NDArray[np.int32]
    # topic_positions, topic_sizes: int64[n], int32[n].
    topic_positions: npt.NDArray[np.int64]
    topic_sizes: npt.NDArray[np.int32]
    # properties_positions, properties_sizes: int64[n], int32[n].
    properties_positions: npt.NDArray[np.int64]
    properties_sizes: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def is_sound(self) -> bool:
        """No record has a fault."""
        return not self.faults.any()


def bytes_at(buffer: Buffer, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A view whose element ``i`` is the field of type ``dtype`` that begins at byte ``i``."""
    kind = np.dtype(dtype)
    view = memoryview(buffer)
    count = max(0, view.nbytes - kind.itemsize + 1)
    return np.ndarray((count,), kind, view if count else bytes(kind.itemsize), strides=(1,))


def headers_at(buffer: Buffer, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """The fixed fields (``HEADER_DTYPE``) of the records at ``positions``, which lie wholly in the buffer.

    Copied as bytes without a meaning and only then given one: element by element NumPy copies a
    structure with gaps eight times as slowly.
    """
    found: npt.NDArray[np.void] = bytes_at(buffer, f"V{BODY_AT}")[positions].view(HEADER_DTYPE)
    return found


def parse_records(
    buffer: Buffer, positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]
) -> RecordBlock:
    """Gather the fields of the records at ``positions``, which may come in any order and overlap.

    Faults are set for magics, lengths, and sizes other than those that the caller believes; ``check_records`` looks at the
    rest.
    """
    positions = np.asarray(positions, np.int64)
    sizes = np.asarray(sizes, np.int32)
    faults = _place_faults(memoryview(buffer).nbytes, positions, sizes)
    readable = faults == RecordFault.OK
    if readable.all():
        headers = headers_at(buffer, positions)
    else:
        headers = np.zeros(len(positions), HEADER_DTYPE)
        headers[readable] = headers_at(buffer, positions[readable])
    is_v2 = headers["magic"] == MAGIC_V2
    _add_fault(faults, ~(is_v2 | (headers["magic"] == MAGIC_V1)), RecordFault.MAGIC)
    _add_fault(faults, headers["size"] != sizes, RecordFault.SIZE)
    block = _new_block(buffer, positions, sizes, faults, headers)
    _shift_for_v6(block)
    _find_parts(block, is_v2)
    _clear_faulty(block)
    return block


def _place_faults(
    buffer_bytes: int, positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint8]:
    """Faults of records that are too small to be, or not wholly in the buffer."""
    faults = np.zeros(len(positions), np.uint8)
    _add_fault(faults, sizes < RECORD_BYTES_MIN, RecordFault.SIZE)
    outside = (positions < 0) | (positions > buffer_bytes - sizes.astype(np.int64))
    _add_fault(faults, outside, RecordFault.SHORT)
    return faults


def _add_fault(
    faults: npt.NDArray[np.uint8], where: npt.NDArray[np.bool_], fault: RecordFault
) -> None:
    if where.any():
        faults[where & (faults == RecordFault.OK)] = fault


def _new_block(
    buffer: Buffer,
    positions: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    faults: npt.NDArray[np.uint8],
    headers: npt.NDArray[np.void],
) -> RecordBlock:
    """A block with the fixed fields, as if all hosts were IPv4."""
    return RecordBlock(
        buffer=buffer,
        positions=positions,
        sizes=sizes,
        faults=faults,
        body_crcs=headers["body_crc"].astype(np.uint32),
        queue_ids=headers["queue_id"].astype(np.int32),
        queue_offsets=headers["queue_offset"].astype(np.int64),
        physical_offsets=headers["physical_offset"].astype(np.int64),
        sys_flags=headers["sys_flag"].astype(np.int32),
        store_timestamps_ms=headers["store_timestamp_ms"].astype(np.int64),
        body_positions=positions + BODY_AT,
        body_sizes=headers["body_size"].astype(np.int32),
        topic_positions=np.zeros(len(positions), np.int64),
        topic_sizes=np.zeros(len(positions), np.int32),
        properties_positions=np.zeros(len(positions), np.int64),
        properties_sizes=np.zeros(len(positions), np.int32),
    )


def _shift_for_v6(block: RecordBlock) -> None:
    """Read store time and body size again where IPv6 hosts push them back."""
    where = np.flatnonzero(
        (block.sys_flags & (BORN_HOST_V6 | STORE_HOST_V6) != 0) & (block.faults == RecordFault.OK)
    )
    if not len(where):
        return
    flags, positions = block.sys_flags[where], block.positions[where]
    born = V6_EXTRA_BYTES * (flags & BORN_HOST_V6 != 0).astype(np.int64)
    both = born + V6_EXTRA_BYTES * (flags & STORE_HOST_V6 != 0)
    fits = block.sizes[where] >= RECORD_BYTES_MIN + both
    block.faults[where[~fits]] = RecordFault.LENGTHS
    where, positions, born, both = where[fits], positions[fits], born[fits], both[fits]
    block.store_timestamps_ms[where] = bytes_at(block.buffer, ">i8")[
        positions + STORE_TIME_AT + born
    ]
    block.body_sizes[where] = bytes_at(block.buffer, ">i4")[positions + BODY_SIZE_AT + both]
    block.body_positions[where] += both


def _find_parts(block: RecordBlock, is_v2: npt.NDArray[np.bool_]) -> None:
    """Find topic and properties; fault LENGTHS where the parts do not fill the record exactly."""
    ends = block.positions + block.sizes
    length_bytes = 1 + is_v2.astype(np.int64)
    topic_at = block.body_positions + block.body_sizes + length_bytes
    bad = (block.body_sizes < 0) | (topic_at + 2 > ends)
    _add_fault(block.faults, bad, RecordFault.LENGTHS)
    topic_sizes = _gather(block, ">i1", topic_at - 1)
    if is_v2.any():
        topic_sizes = np.where(is_v2, _gather(block, ">i2", topic_at - 2), topic_sizes)
    properties_at = topic_at + topic_sizes + 2
    bad = (topic_sizes < 0) | (properties_at > ends)
    _add_fault(block.faults, bad, RecordFault.LENGTHS)
    properties_sizes = _gather(block, ">i2", properties_at - 2)
    bad = (properties_sizes < 0) | (properties_at + properties_sizes != ends)
    _add_fault(block.faults, bad, RecordFault.LENGTHS)
    block.topic_positions, block.topic_sizes = topic_at, topic_sizes
    block.properties_positions, block.properties_sizes = properties_at, properties_sizes


def _gather(block: RecordBlock, kind: str, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """The integers of type ``kind`` at ``at``; 0 where the record has a fault already."""
    view = bytes_at(block.buffer, kind)
    sound = block.faults == RecordFault.OK
    if sound.all():
        return view[at].astype(np.int32)
    found = np.zeros(len(at), np.int32)
    found[sound] = view[at[sound]]
    return found


def _clear_faulty(block: RecordBlock) -> None:
    where = block.faults != RecordFault.OK
    if where.any():
        for name in block.__slots__:
            if name not in {"buffer", "positions", "sizes", "faults"}:
                getattr(block, name)[where] = 0


def check_records(
    block: RecordBlock,
    *,
    expected_physical: npt.NDArray[np.int64] | None,
    check_crc: bool = True,
) -> None:
    """Add faults for records at the wrong place and for bodies that do not match their CRC.

    The CRC is computed by one C call a body, through ``map`` (0.2 us for 1 KiB). RocketMQ keeps 31 bits of it, the highest
    stored bit being 0. An empty body is not compared, as in the broker's recovery. ``expected_physical``: the local
    physical offset of each record; None: not compared. Records that have a fault already are left as they are.
    """
    if expected_physical is not None:
        elsewhere = block.physical_offsets != expected_physical
        _add_fault(block.faults, elsewhere, RecordFault.PHYSICAL_OFFSET)
    if not check_crc:
        return
    where = np.flatnonzero((block.faults == RecordFault.OK) & (block.body_sizes > 0))
    starts = block.body_positions[where]
    ends = starts + block.body_sizes[where]
    # starmap over slice and map over view[...] keep the loop over bodies in C.
    slices = starmap(slice, zip(starts.tolist(), ends.tolist(), strict=True))
    bodies = map(memoryview(block.buffer).__getitem__, slices)
    computed = np.fromiter(map(zlib_ng.crc32, bodies), np.uint32, len(where))
    wrong = computed & np.uint32(CRC_MASK) != block.body_crcs[where]
    block.faults[where[wrong]] = RecordFault.CRC


# -- where records begin ---------------------------------------------------------------------------
#
# Where records begin: the chain of sizes in a chunk of the commit log.


_NO_POSITIONS: Final = np.zeros(0, np.int64)


class Stop(Enum):
    """Why a walk ended."""

    SHORT = "short"
    """The buffer ended inside a record (or just behind one): more bytes are needed."""
    BLANK = "blank"
    """The rest of the file is blank: go on with the next file."""
    EMPTY = "empty"
    """Zero size and magic: nothing has been written here."""
    FAULT = "fault"
    """A magic that is none, or a size that cannot be."""


@dataclass(frozen=True, slots=True)
class Walk:
    """A chain of records."""

    positions: npt.NDArray[np.int64]  # int64[n], where each record begins in the buffer
    sizes: npt.NDArray[np.int32]  # int32[n], bytes of each record
    end: int  # where the walk stopped: one past the last record
    stop: Stop  # why


def walk_records(
    buffer: Buffer,
    start: int,
    end: int,
    *,
    size_max: int,
    hints: npt.NDArray[np.int64] | None = None,
) -> Walk:
    """Follow records from ``start`` by their sizes; magics and sizes are looked at, nothing else.

    Those come that lie wholly in ``[start, end)`` and have ``size_max`` bytes at most, and why the walk ended.

    Where a record begins is known only once the one before has been read: a tight loop of one ``struct`` call per
    record, about 0.2 us each. Hints spare that: their chain is held against the sizes and magics as columns, and the
    loop goes on where it breaks. The answer is the same, whatever they say.

    Args:
        hints: int64[m], rising, where records may begin.
    """
    known = _chain(buffer, start, end, size_max, hints) if hints is not None else _NO_POSITIONS
    positions: list[int] = []
    append, unpack = positions.append, SIZE_AND_MAGIC.unpack_from
    position, last, stop = start, end - SIZE_AND_MAGIC.size, Stop.SHORT
    if len(known):
        position = int(known[-1]) + unpack(buffer, int(known[-1]))[0]
    while position <= last:
        size, magic = unpack(buffer, position)
        if (magic != MAGIC_V1 and magic != MAGIC_V2) or not RECORD_BYTES_MIN <= size <= size_max:  # noqa: PLR1714 (a set costs time here)
            stop = _stop_at(size, magic)
            break
        if position + size > end:
            break
        append(position)
        position += size
    found = np.concatenate((known, np.array(positions, np.int64)))
    sizes = np.diff(found, append=position).astype(np.int32)
    return Walk(found, sizes, position, stop)


def _chain(
    buffer: Buffer, start: int, end: int, size_max: int, hints: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """As many of the hints, from the first, as are the chain of records that begins at ``start``."""
    hints = hints[: np.searchsorted(hints, end - SIZE_AND_MAGIC.size, side="right")]
    if not len(hints) or hints[0] != start:
        return _NO_POSITIONS
    sizes = bytes_at(buffer, ">i4")[hints].astype(np.int64)
    magics = bytes_at(buffer, ">u4")[hints + MAGIC_AT]
    ends = hints + sizes
    is_record = (magics == MAGIC_V1) | (magics == MAGIC_V2)
    is_record &= (sizes >= RECORD_BYTES_MIN) & (sizes <= size_max) & (ends <= end)
    is_record[1:] &= hints[1:] == ends[:-1]
    return hints if is_record.all() else hints[: int(np.argmin(is_record))]


def _stop_at(size: int, magic: int) -> Stop:
    """Why a walk ends at a header that is not a record's."""
    if magic == MAGIC_BLANK:
        return Stop.BLANK
    return Stop.EMPTY if size == 0 and magic == 0 else Stop.FAULT


# -- groups ----------------------------------------------------------------------------------------
#
# Whose records are they: group a block by queue, compare topics.
#
# Topic bytes are compared 8 at a time. Word ``k`` of a topic is the 8 bytes that end ``8 k`` bytes
# before the topic's end; of the first word the bytes that stand before the topic are masked. Counting
# from the end keeps every read inside the record, since more than 8 bytes stand before a topic. Words
# are gathered once, and only those of the topics' own bytes; of the words of a long topic, one after another,
# all records get a column, in which the queues are compared.

_WORD: Final = 8
_MULTIPLIER: Final = 0x9E37_79B9_7F4A_7C15
"""Odd, so that multiplying by it mod 2^64 loses nothing."""
_MASKS: Final = np.array([2**64 - 1] + [2 ** (8 * n) - 1 for n in range(1, 8)], np.uint64)
"""Which bits of a big-endian word belong to the topic, by topic size mod 8, for its first word."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Groups:
    """Records of a block, divided by queue."""

    queues: list[MessageQueue]  # in the order in which they first occur
    indices: Indices
    """int64[m], the records of the first queue in block order, then those of the second, …"""
    starts: list[int]  # where the records of each queue begin in ``indices``; last ``m``

    def __len__(self) -> int:
        return len(self.queues)

    def members(self, number: int) -> Indices:
        """The records of one queue: their indices in the block, in block order."""
        return self.indices[self.starts[number] : self.starts[number + 1]]

    def some(self, numbers: Sequence[int]) -> Groups:
        """These queues, with their records."""
        if len(numbers) == len(self):
            return self
        members = [self.members(number) for number in numbers]
        starts = [0, *accumulate(map(len, members))]
        indices = np.concatenate(members) if members else self.indices[:0]
        return Groups([self.queues[number] for number in numbers], indices, starts)


def group_by_queue(
    block: RecordBlock, *, among: npt.NDArray[np.bool_] | None = None
) -> list[tuple[MessageQueue, Indices]]:
    """As ``queue_groups``: each queue, and the indices of its records in block order."""
    groups = queue_groups(block, among=among)
    return [(queue, groups.members(number)) for number, queue in enumerate(groups.queues)]


def queue_groups(block: RecordBlock, *, among: npt.NDArray[np.bool_] | None = None) -> Groups:
    """Divide a block's records by topic and queue id; ``among``: bool[n], by default those without a fault.

    Records are grouped by a 64-bit hash of topic and queue id, then every record's topic is compared with that of its
    group's first; a group that fails (two queues with one hash) is divided by plain comparison. Others than those without a
    fault must have a topic: a record whose fault is CRC or PHYSICAL_OFFSET has.
    """
    chosen = np.flatnonzero(block.faults == RecordFault.OK if among is None else among)
    if not len(chosen):
        return Groups([], chosen, [0])
    words = list(_topic_words(block, chosen))
    hashes = _hashes(block, chosen, words)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    firsts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    counts = np.diff(firsts, append=len(order))
    members = chosen[order]
    same = np.ones(len(order), np.bool_)
    for column in _queue_columns(block, chosen, words):
        mine = column[order]
        same &= mine == np.repeat(mine[firsts], counts)
    if not same.all():
        return _divided(block, chosen)
    rank = np.argsort(members[firsts])
    counts = counts[rank]
    ends = np.cumsum(counts)
    places = np.arange(len(members)) + np.repeat(firsts[rank] - (ends - counts), counts)
    return Groups(_queues(block, members[firsts[rank]]), members[places], [0, *ends.tolist()])


def distinct(values: Indices) -> Indices:
    """Each value once, in order.

    As ``np.unique``, which loads ``numpy.ma`` when it is first asked (a tenth of a second), and hashes, which is slower.
    """
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


_Words = tuple["Indices | None", npt.NDArray[np.uint64]]


def _hashes(
    block: RecordBlock, indices: Indices, words: Iterable[_Words]
) -> npt.NDArray[np.uint64]:
    """A number for each topic and queue id: equal for equal queues, else most likely not."""
    numbers = block.queue_ids[indices].astype(np.uint64) + (
        block.topic_sizes[indices].astype(np.uint64) << np.uint64(32)
    )
    numbers *= np.uint64(_MULTIPLIER)
    weight = _MULTIPLIER
    for where, some in words:
        weight = weight * _MULTIPLIER % 2**64
        mixed = (some ^ (some >> np.uint64(29))) * np.uint64(weight)
        if where is None:
            numbers += mixed
        else:
            numbers[where] += mixed
    numbers ^= numbers >> np.uint64(32)
    return numbers


def _queue_columns(
    block: RecordBlock, indices: Indices, words: Iterable[_Words]
) -> Iterator[npt.NDArray[Any]]:
    """What two records of one queue have in common: queue id, and the topic's size and words."""
    yield block.queue_ids[indices]
    yield block.topic_sizes[indices]
    for where, some in words:
        if where is None:
            yield some
        else:
            column = np.zeros(len(indices), np.uint64)
            column[where] = some
            yield column


def _topic_words(block: RecordBlock, indices: Indices) -> Iterator[_Words]:
    """Word 0, 1, … of the topics, with the places in ``indices`` that have one (None: all)."""
    sizes = block.topic_sizes[indices].astype(np.int64)
    if not len(sizes) or not sizes.max():
        return
    view = bytes_at(block.buffer, ">u8")
    ends = block.topic_positions[indices] + sizes
    for begun in range(0, int(sizes.max()), _WORD):
        where = None if sizes.min() > begun else np.flatnonzero(sizes > begun)
        left = (sizes if where is None else sizes[where]) - begun
        at = (ends if where is None else ends[where]) - begun - _WORD
        words = view[at].astype(np.uint64)
        words &= _MASKS[np.where(left < _WORD, left, 0)]
        yield where, words


def _queues(block: RecordBlock, indices: Indices) -> list[MessageQueue]:
    view, known = memoryview(block.buffer), dict[bytes, str]()
    starts = block.topic_positions[indices]
    ends = (starts + block.topic_sizes[indices]).tolist()
    found = []
    for start, end, queue_id in zip(
        starts.tolist(), ends, block.queue_ids[indices].tolist(), strict=True
    ):
        raw = bytes(view[start:end])
        topic = known.get(raw)
        if topic is None:
            topic = known[raw] = raw.decode("utf-8", "surrogateescape")
        found.append(MessageQueue(topic, queue_id))
    return found


def topic_bytes(block: RecordBlock, index: int) -> bytes:
    """The topic of one record, as stored."""
    start = int(block.topic_positions[index])
    return bytes(memoryview(block.buffer)[start : start + int(block.topic_sizes[index])])


def properties_bytes(block: RecordBlock, index: int) -> bytes:
    """The properties of one record, as stored."""
    start = int(block.properties_positions[index])
    return bytes(memoryview(block.buffer)[start : start + int(block.properties_sizes[index])])


def _divided(block: RecordBlock, indices: Indices) -> Groups:
    found: dict[MessageQueue, list[int]] = {}
    for queue, index in zip(_queues(block, indices), indices.tolist(), strict=True):
        found.setdefault(queue, []).append(index)
    starts = [0, *np.cumsum([len(members) for members in found.values()]).tolist()]
    members = [index for some in found.values() for index in some]
    return Groups(list(found), np.array(members, np.int64), starts)


def topics_equal(block: RecordBlock, indices: Indices, topic: str) -> npt.NDArray[np.bool_]:
    """Whether each of the records at ``indices`` is of ``topic`` (as in ``MessageQueue``); False where a fault hides it."""
    wanted = topic.encode("utf-8", "surrogateescape")
    has_topic = (block.faults[indices] == RecordFault.OK) | (
        block.faults[indices] >= RecordFault.PHYSICAL_OFFSET
    )
    same: npt.NDArray[np.bool_] = has_topic & (block.topic_sizes[indices] == len(wanted))
    kept = np.flatnonzero(same)
    for number, (_, words) in enumerate(_topic_words(block, indices[kept])):
        end = len(wanted) - _WORD * number
        word = int.from_bytes(wanted[max(0, end - _WORD) : end], "big")
        same[kept] &= words == np.uint64(word)
    return same


def inner_counts(block: RecordBlock) -> npt.NDArray[np.int32]:
    """How many queue offsets each record takes: ``INNER_NUM`` of an inner batch, else 1.

    Only records whose flag says that they are inner batches are looked into, one by one. A number
    that is missing, malformed or below 1 counts as 1.
    """
    counts = np.ones(len(block), np.int32)
    for index in np.flatnonzero(block.sys_flags & sysflag.INNER_BATCH).tolist():
        found = properties.parse_properties(properties_bytes(block, index))
        counts[index] = properties.inner_count(found)
    return counts


# -- all at once -----------------------------------------------------------------------------------


def split_records(
    buffer: Buffer,
    start: int,
    end: int,
    *,
    physical_offset: int | None,
    size_max: int,
    check_crc: bool = True,
    hints: npt.NDArray[np.int64] | None = None,
) -> tuple[RecordBlock, Walk]:
    """Walk, parse and check what lies in ``[start, end)`` of a chunk of the local log.

    ``physical_offset``: of the byte at ``start``; None: records' own places are not compared. ``hints``: as of
    ``walk_records``. The records, faults included, and the walk; a record with a fault does not end the walk as long as
    its size leads on.
    """
    walk = walk_records(buffer, start, end, size_max=size_max, hints=hints)
    block = parse_records(buffer, walk.positions, walk.sizes)
    expected = None if physical_offset is None else walk.positions + (physical_offset - start)
    check_records(block, expected_physical=expected, check_crc=check_crc)
    return block, walk
