"""What is kept of a tier: layouts of its parts, runs of their records, and the cache of them, within a budget. Pure.

A *block* is all records that begin in one step of ``block_bytes`` of the part's commit log. Every group cuts a part in the
same places, so that what one group has read serves another; and no record belongs to two blocks. A record that is larger
than a step leaves the steps that it covers without a record.

A *multi-section read* is of small sections of many queues that lie near each other in a bundle, with one request; what came
is a *multi-section run*, and the run of each section is made when it is read.

A *run* is neighbouring blocks, read and decoded at once; what readers get of it are slices, without a copy.

Lists
    What is cached is in one of four LRU lists: ``UNREAD`` (read ahead, no reader had it yet), ``READ``, ``SPENT`` (every
    reader of its queue is past it) and ``INDEX``. Room is made by dropping the oldest of ``SPENT``, then what was used
    longest ago of ``READ`` and ``INDEX``, then the oldest of ``UNREAD``. Each list has its time to live: ``UNREAD`` since
    it was put there, the others since it was last used. ``SPENT`` has a limit of its own in bytes: a reader that comes
    later may still profit from it, but memory that was never touched costs more than a second read of the same bytes.

    A multi-section run is one thing. It is ``UNREAD`` until each of its sections has been read, and ``SPENT`` when every
    reader of each is past it; it goes as a whole.

    What is on its way counts as well: room is reserved before a request is sent (``reserve``), and becomes the cached
    thing's own when it is put, or is given back (``release``). The cache keeps no clock: callers say what time it is.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import field
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np
from zlib_ng.zlib_ng import crc32, crc32_combine

from backends.base import ByteRange
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.items import ITEM_BYTES
from tiered.format.object import damaged
from tiered.local.interface import RecordBatch
from tiered.log.decode import PlacedParts, TierBatch, decode_items, decode_parts, decode_records
from tiered.log.parts import Parts
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from tiered.log.decode import PartColumns, PartItems
    from tiered.log.parts import Bundle, Part
    from tiered.model import MessageQueue

# -- buffers -------------------------------------------------------------------------------------
#
# Memory for what comes over the wire, used again and again.
#
# ``Memory.lend`` gives a buffer. It comes back by itself when nothing refers to it any more, no view of it, slice of such or
# array on it; so that bytes which a caller keeps never change under him.
#
# Buffers are cut from one range of addresses, the lowest that are free first, so that what is lent is mostly memory that
# was in use before. What lies free goes back to the system when it is more than a limit, the highest first, and all of it
# when ``clear`` is called. When the range is full (somebody keeps very much) buffers come from ``malloc``.
#
# Why: the kernel clears each page that a process touches for the first time, which costs more than reading into it; and
# ``malloc`` returns blocks of this size to the kernel when they are freed.
#
# For any thread. Buffers come back in whatever thread lets go of the last reference, at any moment, even in the midst of
# ``lend``: so they are only noted then, without a lock, and put in order by the next call.

STEP_BYTES = max(4 * 1024, mmap.PAGESIZE)
"""Sizes of buffers are multiples of this: a page."""

BYTES_MIN = 64 * 1024
"""Smaller ones are better had from ``malloc``."""

_LOOKED_AT_MAX = 128
"""Free extents that are tried, lowest first, before the upper end is cut from."""

Extent = tuple[int, int]
"""Begin and end, in steps."""

_Lent = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""A buffer while somebody has it: views of it refer to it, and it can be referred to weakly.

Not a class of ours: of such, unlike of plain arrays, the collector says that it is dead as soon as it is found in a cycle,
before finalizers run, which may still read it or give it to somebody.
"""


class Memory:
    """Memory that ranges are read into, lent and truncated."""

    def __init__(self, size_bytes: int, free_bytes_max: int) -> None:
        """Have nothing yet but addresses; ``free_bytes_max`` are kept though nobody uses them."""
        self._steps = max(size_bytes // STEP_BYTES, 1)
        self._free_max = free_bytes_max // STEP_BYTES
        self._arena: mmap.mmap | None = None
        self._free: list[Extent] = [(0, self._steps)]  # apart from each other, in order
        self._has_memory = np.zeros(self._steps, np.bool_)  # since it was in use
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[weakref.ref[_Lent], Extent]] = {}
        self._returned: deque[Extent] = deque()

    @property
    def lent_bytes(self) -> int:
        """What somebody has, about."""
        return sum(end - begin for _, (begin, end) in [*self._lent.values()]) * STEP_BYTES

    @property
    def held_bytes(self) -> int:
        """What of the range may have memory behind it."""
        return int(np.count_nonzero(self._has_memory)) * STEP_BYTES

    def lend(self, size_bytes: int) -> memoryview:
        """A writable buffer of this size, in which anything may stand; ``.obj`` of it is as large as what it takes."""
        steps = -(-size_bytes // STEP_BYTES)
        with self._lock:
            self._tidy()
            if self._arena is None:
                self._open()
            begin = self._take(steps)
        if begin is None:
            return memoryview(np.empty(size_bytes, np.uint8).data)
        shape = (steps * STEP_BYTES,)
        lent: _Lent = np.ndarray(shape, np.uint8, self._arena, begin * STEP_BYTES)
        reference = weakref.ref(lent, self._come_back)
        self._lent[id(reference)] = reference, (begin, begin + steps)
        return memoryview(lent.data)[:size_bytes]

    def clear(self) -> None:
        """Give back to the system what nobody uses."""
        with self._lock:
            self._tidy(at_once=True)
            for begin, end in self._free:
                self._give_back(begin, end, end - begin)

    def _open(self) -> None:
        try:
            self._arena = _addresses(self._steps * STEP_BYTES)
        except OSError:  # the system promises no more memory than it has
            self._free = []

    def _come_back(self, reference: weakref.ref[_Lent]) -> None:
        self._returned.append(self._lent.pop(id(reference))[1])

    def _take(self, steps: int) -> int | None:
        """The lowest addresses that are free, about; None when no so many are free together."""
        if not self._free:
            return None
        last = len(self._free) - 1
        for number in chain(range(min(last, _LOOKED_AT_MAX)), (last,)):
            begin, end = self._free[number]
            if end - begin >= steps:
                left = (begin + steps, end)
                self._free[number : number + 1] = [left] if left[0] < end else []
                self._has_memory[begin : begin + steps] = True
                return begin
        return None

    def _tidy(self, *, at_once: bool = False) -> None:
        """Put what has come back in order, if it is worth it, and give back to the system what is too much."""
        if not self._returned or (not at_once and len(self._returned) * 8 < len(self._free)):
            return
        while self._returned:
            insort(self._free, self._returned.popleft())
        joined: list[Extent] = []
        for begin, end in self._free:
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        self._free = joined
        lent = self._steps - sum(end - begin for begin, end in joined)
        too_much = int(np.count_nonzero(self._has_memory)) - lent - self._free_max
        for begin, end in reversed(joined):
            if too_much <= 0:
                break
            too_much -= self._give_back(begin, end, too_much)

    def _give_back(self, begin: int, end: int, wanted: int) -> int:
        """Memory of what nobody uses goes back to the system, the highest first; how much, in steps."""
        used = np.flatnonzero(self._has_memory[begin:end])[-wanted:]
        if len(used) and self._arena is not None and hasattr(mmap, "MADV_DONTNEED"):
            low, high = begin + int(used[0]), begin + int(used[-1]) + 1
            at, size_bytes = low * STEP_BYTES, (high - low) * STEP_BYTES
            with suppress(OSError):  # the process has locked its memory
                self._arena.madvise(mmap.MADV_DONTNEED, at, size_bytes)
                self._has_memory[low:high] = False
        return len(used)


def _addresses(size_bytes: int) -> mmap.mmap:
    """Addresses without memory; the kernel puts memory behind them when they are touched.

    In small pages: large ones were found to cost more, since the kernel has few at hand and clears them whole.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, size_bytes, flags)


# -- runs -------------------------------------------------------------------------------------------

V = TypeVar("V")

# -- layout

LAYOUT_BYTES = 2048
"""What a layout takes, however small its part is."""


@dataclass(frozen=True, slots=True)
class PartLayout:
    """A part, its items, and its blocks."""

    part: Part
    items: PartItems  # all of its items
    starts: npt.NDArray[np.int64]
    """int64[n], bytes from the part's first to where each item's record begins; of a hole, to where the record
    before it begins."""
    firsts: list[int]
    """[blocks + 1], number of the first item of each block; then the number of items."""
    bounds: list[int]
    """[blocks + 1], log offset at which each block's first record begins; then the part's end."""
    ends: list[int]  # [blocks + 1], log offset behind all records of the blocks before

    @classmethod
    def of(cls, part: Part, items: PartItems, block_bytes: int) -> PartLayout:
        """Lay a part out; DataError: its items are not in the order of their records."""
        begins, starts = _starts(part, items)
        low, blocks = int(part.log_offset), block_count(part, block_bytes)
        if blocks == 1:
            end = low + int((begins + items.sizes).max(initial=0))
            bounds = [low + int(starts[0]) if len(items) else low, low + part.log_bytes]
            return cls(part, items, starts, [0, len(items)], bounds, [low, end])
        firsts = np.append(np.searchsorted(starts, np.arange(blocks) * block_bytes), len(items))
        bounds_at = low + np.append(starts, part.log_bytes)[firsts]
        ends = low + np.append(0, np.maximum.accumulate(begins + items.sizes))[firsts]
        return cls(part, items, starts, firsts.tolist(), bounds_at.tolist(), ends.tolist())

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.firsts) - 1

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, about."""
        return layout_bytes(len(self.items), self.blocks)

    def block_of(self, offset: QueueOffset) -> int:
        """The block that holds a queue offset of the part."""
        return bisect_right(self.firsts, offset - self.items.start) - 1

    def items_in(self, block: int) -> int:
        """Number of items of a block."""
        return self.firsts[block + 1] - self.firsts[block]

    def items_of(self, blocks: range) -> PartItems:
        """The items of neighbouring blocks."""
        return self.items.part_of(self.firsts[blocks.start], self.firsts[blocks.stop])

    def span(self, blocks: range) -> tuple[int, int]:
        """Log offsets ``[begin, end)`` that hold all records of neighbouring blocks; empty when there are none."""
        begin = self.bounds[blocks.start]
        return begin, max(begin, self.ends[blocks.stop])


def _starts(part: Part, items: PartItems) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where each item's record begins: 0 for a hole, and as ``PartLayout.starts``."""
    begins = items.log_offsets - part.log_offset
    if len(items) and items.sizes.min() > 0:
        starts = begins
        is_in_order = not (begins[1:] < begins[:-1]).any()
    else:
        real = items.sizes > 0
        begins = np.where(real, begins, 0)
        starts = np.maximum.accumulate(begins) if len(begins) else begins
        is_in_order = not (starts[real] != begins[real]).any()
    if is_in_order:
        return begins, starts
    raise damaged("the items of an index are not in the order of their records", part.bundle.key)


def layout_bytes(items: int, blocks: int) -> int:
    """Memory of a layout, about: arrays, lists, and what every one takes."""
    return LAYOUT_BYTES + 28 * items + 120 * blocks


def block_count(part: Part, block_bytes: int) -> int:
    """Blocks of a part; its index need not be known."""
    return max(1, -(-part.log_bytes // block_bytes))


# -- runs

RUN_BYTES = 3 * 1024
"""What a run takes, however few records it has."""

SLACK = 8
"""Up to an eighth of their size may be kept around records, rather than copying them."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Run:
    """Neighbouring blocks of a part, read with one request and decoded once. Nobody changes one."""

    base: QueueOffset  # queue offset of the first item
    end: QueueOffset  # one past the last
    batch: TierBatch  # the records
    data: memoryview  # their bytes
    starts: memoryview[int]
    """Position of each item's record; of a hole the end of the records before it. Never falls."""
    ends: memoryview[int]  # one past the last byte of all records up to this item
    has_holes: bool  # whether an item has no record

    @classmethod
    def of(cls, batch: TierBatch) -> Run:
        """Prepare a batch for being cut."""
        records = batch.records
        real = records.sizes > 0
        ends = np.maximum.accumulate(np.where(real, records.positions + records.sizes, 0))
        starts = np.where(real, records.positions, ends)
        data = memoryview(records.data).cast("B").toreadonly()  # all readers share it
        return cls(
            base=batch.base_offset,
            end=batch.end_offset,
            batch=batch,
            data=data,
            starts=starts.data,
            ends=ends.data,
            has_holes=not bool(real.all()),
        )

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, about: what holds the records, and 52 bytes an item."""
        return run_bytes(memoryview(self.data.obj).nbytes, len(self.starts))

    def unread_places(self) -> list[tuple[MessageQueue, int]]:
        """Where it begins, as that of a ``MultiSectionRun``."""
        return [(self.batch.records.queue, self.batch.log_offset)]

    def cut(self, start: QueueOffset, *, bytes_max: int, count_max: int) -> TierBatch:
        """Items from ``start``, in ``[base, end)``, on: at least one, else at most so many.

        An inner batch is not divided by ``bytes_max``.
        """
        first = start - self.base
        low = self.starts[first]
        end = min(first + count_max, len(self.ends))
        if self.ends[end - 1] > low + bytes_max:
            # Not NumPy's search: it gives the interpreter's lock away, and others may keep it for milliseconds.
            end = bisect_right(self.ends, low + bytes_max, first, end)
            if end <= first:
                end = min(bisect_right(self.starts, low), first + count_max)
        high = max(self.ends[end - 1], low)
        records = self.batch.records
        positions = records.positions[first:end] - low
        sizes = records.sizes[first:end]
        if self.has_holes:
            positions = np.where(sizes > 0, positions, 0)
        cut = RecordBatch(
            queue=records.queue,
            base_offset=start,
            data=self.data[low:high],
            positions=positions,
            sizes=sizes,
            tag_codes=records.tag_codes[first:end],
            store_timestamps_ms=records.store_timestamps_ms[first:end],
            physical_offsets=records.physical_offsets[first:end],
        )
        return TierBatch(cut, LogOffset(self.batch.log_offset + low))


def run_bytes(data_bytes: int, items: int) -> int:
    """Memory of a run of so many bytes of records and items, about."""
    return RUN_BYTES + data_bytes + 52 * items


def room_of(data_bytes: int, items: int) -> int:
    """Room for such a run with what came around its records, as far as ``compact`` leaves that."""
    return run_bytes(data_bytes + max(data_bytes // SLACK, STEP_BYTES), items)


def compact(data: memoryview, memory: Memory) -> memoryview:
    """The same bytes, without much around them that would stay in memory as long as they do."""
    around = memoryview(data.obj).nbytes - data.nbytes
    if around <= data.nbytes // SLACK:
        return data
    if data.nbytes < BYTES_MIN:
        return memoryview(bytes(data))
    copy = memory.lend(data.nbytes)
    # Not `copy[:] = data`: this keeps the interpreter's lock.
    np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(data, np.uint8))
    return copy


# -- requests

Key = tuple[str, int, int, int, int]
"""A part's bundle, where its section begins, the first of its items there, how many they are, and number of the block;
``INDEX`` for the index itself.

What the broker truncated cuts a part in two, which name the same section; only together do these tell all three apart.
"""

INDEX = -1

PART_BYTES = 8 * 1024
"""What a part takes of a window at least: a request, however small it is."""


def key_of(part: Part, block: int) -> Key:
    """Under which a block of a part (or its ``INDEX``) is found."""
    return part.bundle.key, part.section.start, part.items_at, part.count, block


# -- multi-section reads


@dataclass(frozen=True, slots=True)
class MultiSectionRead:
    """Small sections of a bundle that lie near each other, to be read with one request and decoded at once.

    Each is whole, stored as it is, and a part of another queue; they are columns, so that a section costs next to nothing
    before somebody reads it.
    """

    bundle: Bundle
    at: int  # number of the section that was asked for first
    queues: Sequence[MessageQueue]  # whose each is
    rows: npt.NDArray[np.void]  # ``PART``, one a section, in the order in which they lie
    keys: Sequence[Key]  # under which each is found

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def key(self) -> str:
        """Of the bundle."""
        return self.bundle.key

    @property
    def ranges(self) -> tuple[ByteRange]:
        """The one range that is read."""
        return (ByteRange(self.start, self.end),)

    @property
    def start(self) -> int:
        """Position of the first in the bundle."""
        return int(self.rows["start"][0])

    @property
    def end(self) -> int:
        """Position behind the items of the last."""
        last = self.rows[-1]
        return int(last["start"]) + int(last["stored_bytes"]) + int(last["items"]) * ITEM_BYTES

    @property
    def size_bytes(self) -> int:
        """Memory that they take once they are here, about."""
        items = int(self.rows["items"].sum(dtype=np.int64))
        return run_bytes(self.end - self.start, items) + RUN_BYTES * len(self)

    def nearest(self, count: int) -> MultiSectionRead:
        """So many of them (> 0): the one that was asked for first and those around it."""
        low = min(max(self.at - count // 2, 0), len(self) - count)
        return self.some(range(low, low + count), at=self.at - low)

    def some(self, numbers: Sequence[int], at: int = 0) -> MultiSectionRead:
        """These of them, in order; ``at`` is the number among them of the one that was asked for first."""
        queues = [self.queues[number] for number in numbers]
        keys = [self.keys[number] for number in numbers]
        return MultiSectionRead(self.bundle, at, queues, self.rows[list(numbers)], keys)


class MultiSectionRun:
    """What a multi-section read brought: records of all its sections, checked, in columns. Its owner holds a lock around it.

    A run of a section is made when somebody reads it.
    """

    def __init__(
        self, read: MultiSectionRead, data: memoryview, lows: Sequence[int], found: PartColumns
    ) -> None:
        """Put what was decoded in its place; ``lows``: position of each one's records in it."""
        self.read = read  # where it is from; without what could not be decoded with the others
        self.unread = len(read)  # number of sections that nobody has had yet
        self.size_bytes = read.size_bytes  # memory that it takes, about
        self._data, self._found = data.toreadonly(), found
        rows = read.rows
        columns = (
            rows[name].tolist() for name in ("log_bytes", "queue_offset", "count", "log_offset")
        )
        self._bounds = list(zip(lows, *columns, strict=True))
        self._numbers = {key: number for number, key in enumerate(read.keys)}
        self._runs: dict[int, Run] = {}
        self._number_of: dict[int, int] = {}  # by identity of the run
        self._spent: set[int] = set()

    def run(self, key: Key) -> Run:
        """The run of a section, which somebody reads now."""
        number = self._numbers[key]
        run = self._runs.get(number)
        if run is None:
            self.unread -= number not in self._spent
            run = self._runs[number] = self._make(number)
            self._number_of[id(run)] = number
        return run

    def _make(self, number: int) -> Run:
        low, log_bytes, base, count, log_offset = self._bounds[number]
        first, end = self._found.firsts[number : number + 2]
        positions, ends, tag_codes, times, physical = self._found.columns[:, first:end]
        data = self._data[low : low + log_bytes]
        records = RecordBatch(
            queue=self.read.queues[number],
            base_offset=base,
            data=data,
            positions=positions,
            sizes=self._found.sizes[first:end],
            tag_codes=tag_codes,
            store_timestamps_ms=times,
            physical_offsets=physical,
        )
        batch = TierBatch(records, LogOffset(log_offset))
        stop = QueueOffset(base + count)
        return Run(base, stop, batch, data, positions.data, ends.data, has_holes=False)

    def spend(self, run: Run) -> bool:
        """Every reader of a run's queue is past it; whether that is so of all sections."""
        number = self._number_of.pop(id(run), None)
        if number is not None:
            del self._runs[number]
            self._spent.add(number)
        return len(self._spent) == len(self.read)

    def unread_places(self) -> list[tuple[MessageQueue, int]]:
        """Of each section that nobody has had: its queue, and the log offset at which it begins."""
        had = self._runs.keys() | self._spent
        return [
            (self.read.queues[number], bounds[-1])
            for number, bounds in enumerate(self._bounds)
            if number not in had
        ]


def decode_together(
    read: MultiSectionRead, data: memoryview, where: str
) -> list[tuple[Run | MultiSectionRun, Sequence[Key]]]:
    """What came of sections that were read with one request: things, and the keys of the sections that each has.

    Without those that fail their check, or are damaged.
    """
    rows = read.rows
    lows = (rows["start"] - read.start).tolist()
    highs = (
        rows["start"] - read.start + rows["stored_bytes"] + rows["items"] * ITEM_BYTES
    ).tolist()
    is_sound = _are_sound(data, lows, highs, rows["crc"].tolist())
    if not all(is_sound):
        read = read.some([number for number, sound in enumerate(is_sound) if sound])
        lows = [low for low, sound in zip(lows, is_sound, strict=True) if sound]
    if not len(read):
        return []
    at = np.array(lows)
    placed = PlacedParts(read.queues, read.rows, at, at + read.rows["stored_bytes"])
    found = decode_parts(placed, data)
    if found is not None:
        return [(MultiSectionRun(read, data, lows, found), read.keys)]
    return list(_decode_one_by_one(read, data, lows, where))  # one of them is unusual


def _are_sound(
    data: memoryview, lows: Sequence[int], highs: Sequence[int], crcs: Sequence[int]
) -> list[bool]:
    """Whether each section has its checksum.

    At once, as what their checksums and those of what lies between them combine to: each call for a section would give the
    interpreter's lock away.
    """
    whole = at = 0
    for low, high, crc in zip(lows, highs, crcs, strict=True):
        if low > at:
            whole = crc32_combine(whole, crc32(data[at:low]), low - at)
        whole = crc32_combine(whole, crc, high - low)
        at = high
    if whole == crc32(data[:at]):
        return [True] * len(crcs)
    return [crc32(data[low:high]) == crc for low, high, crc in zip(lows, highs, crcs, strict=True)]


def _decode_one_by_one(
    read: MultiSectionRead, data: memoryview, lows: Sequence[int], where: str
) -> Iterator[tuple[Run, Sequence[Key]]]:
    parts = Parts(read.rows, [read.bundle] * len(read))
    for part, queue, key, low in zip(parts, read.queues, read.keys, lows, strict=True):
        at = low + part.section.items_at
        with suppress(DataError):
            raw = data[at : at + part.count * ITEM_BYTES]
            items = decode_items(part, part.queue_offset, raw, where=where)
            _starts(part, items)  # else slices would be cut that hold other bytes
            records = bytes(data[low : low + part.log_bytes])
            batch = decode_records(queue, part, items, records, part.log_offset, where=where)
            yield Run.of(batch), (key,)


# -- cache

Thing: TypeAlias = Run | PartLayout | MultiSectionRun


class LruList(IntEnum):
    """Where an entry stands."""

    UNREAD = 0
    READ = 1
    INDEX = 2
    SPENT = 3


@dataclass(slots=True, eq=False, weakref_slot=True)
class Cached(Generic[V]):
    """A thing that is cached."""

    value: V  # the thing
    keys: Sequence[Hashable]  # under which it is found
    size_bytes: int  # what it takes
    used_s: float = 0.0  # when it was put, or last used
    lru_list: LruList = LruList.UNREAD  # where it stands
    owner: object = None  # for whom it was read ahead
    is_here: bool = False  # false once it has been dropped


USED_AGAIN_SECONDS = 0.1
"""A thing that is used again so soon keeps its place: readers use one for each batch that they cut from it."""


@dataclass(slots=True)
class ByteCache(Generic[V]):
    """Values by key, within a budget of bytes; what is on its way is asked for once."""

    bytes_max: int  # the budget
    seconds: Mapping[LruList, float]  # time to live of each lru_list
    spent_bytes_max: int | None = None  # what of them may be spent; None: no limit but the budget
    held_bytes: int = 0  # bytes of the entries
    reserved_bytes: int = 0  # bytes of what is on its way
    _spent_bytes: int = 0
    _unread_bytes: int = 0
    _entries: dict[Hashable, Cached[V]] = field(default_factory=dict)
    _lists: dict[LruList, OrderedDict[int, Cached[V]]] = field(
        default_factory=lambda: {lru_list: OrderedDict() for lru_list in LruList}
    )

    def get(self, key: Hashable) -> Cached[V] | None:
        """What is there under a key."""
        return self._entries.get(key)

    def reserve_gently(self, size_bytes: int) -> bool:
        """Make room for what nobody needs yet, if that costs only what was read, and half is left for others."""
        ahead = self._unread_bytes + self.reserved_bytes + size_bytes
        return ahead <= self.bytes_max // 2 and self.reserve(size_bytes)[0]

    def reserve(self, size_bytes: int) -> tuple[bool, list[Cached[V]]]:
        """Make room for what will be put; whether there is, and what was dropped unread to make it.

        A thing that is larger than the budget gets room when nothing else is there or on its way.
        """
        room = max(self.bytes_max - size_bytes, 0)
        if self.reserved_bytes > room:
            return False, []
        dropped = self._shrink(room)
        self.reserved_bytes += size_bytes
        return True, dropped

    def resize(self, bytes_max: int) -> list[Cached[V]]:
        """Have another budget, and keep to it; what was dropped unread for that. What is on its way keeps its room."""
        self.bytes_max = bytes_max
        return self._shrink(bytes_max)

    def _shrink(self, bytes_max: int) -> list[Cached[V]]:
        """Drop what goes first until no more than this is held and on its way; what of it nobody has read."""
        dropped = []
        while self.held_bytes + self.reserved_bytes > bytes_max:
            oldest = self._oldest()
            if oldest is None:
                break
            if oldest.lru_list is LruList.UNREAD:
                dropped.append(oldest)
            self.drop(oldest)
        return dropped

    def release(self, size_bytes: int) -> None:
        """Give back room that was reserved."""
        self.reserved_bytes -= size_bytes

    def put(self, entry: Cached[V], now_s: float) -> None:
        """Put a thing for which there is room; what was there under one of its keys is dropped."""
        for key in entry.keys:
            other = self._entries.get(key)
            if other is not None:
                self.drop(other)
        for key in entry.keys:
            self._entries[key] = entry
        entry.is_here = True
        self.held_bytes += entry.size_bytes
        self._place(entry, entry.lru_list, now_s)

    def use(self, entry: Cached[V], now_s: float) -> None:
        """Say that a thing is read now."""
        lru_list = entry.lru_list
        if not entry.is_here or (
            lru_list is LruList.READ and now_s < entry.used_s + USED_AGAIN_SECONDS
        ):
            return
        if lru_list is LruList.UNREAD or lru_list is LruList.SPENT:
            self._take_off(entry)
            self._place(entry, LruList.READ, now_s)
        else:
            entry.used_s = now_s
            self._lists[lru_list].move_to_end(id(entry))

    def touch(self, entry: Cached[V], now_s: float) -> None:
        """Say that some of a thing is read now, and that others are still to read the rest: it stays where it is."""
        if entry.is_here and now_s >= entry.used_s + USED_AGAIN_SECONDS:
            entry.used_s = now_s
            self._lists[entry.lru_list].move_to_end(id(entry))

    def retire(self, entry: Cached[V]) -> None:
        """Say that every reader is past a thing that was read; the oldest such go when there are too many bytes of them."""
        if not entry.is_here or entry.lru_list is not LruList.READ:
            return
        self._take_off(entry)
        self._place(entry, LruList.SPENT, entry.used_s)
        spent = self._lists[LruList.SPENT]
        while self.spent_bytes_max is not None and self._spent_bytes > self.spent_bytes_max:
            self.drop(next(iter(spent.values())))

    def drop(self, entry: Cached[V]) -> None:
        """Forget a thing, if it is there."""
        if not entry.is_here:
            return
        entry.is_here = False
        self._take_off(entry)
        self.held_bytes -= entry.size_bytes
        for key in entry.keys:
            if self._entries.get(key) is entry:
                del self._entries[key]

    def of_owner(self, owner: object) -> list[Cached[V]]:
        """What was read ahead for somebody and nobody had yet."""
        return [x for x in self._lists[LruList.UNREAD].values() if x.owner is owner]

    def expire(self, now_s: float) -> list[Cached[V]]:
        """Drop what has outlived its time; what of it nobody has read."""
        dropped = []
        for lru_list, seconds in self.seconds.items():
            while entry := next(iter(self._lists[lru_list].values()), None):
                if entry.used_s + seconds > now_s:
                    break
                if lru_list is LruList.UNREAD:
                    dropped.append(entry)
                self.drop(entry)
        return dropped

    def clear(self) -> None:
        """Forget everything; what is on its way keeps its room."""
        for entry in list(self._entries.values()):
            self.drop(entry)

    def _place(self, entry: Cached[V], lru_list: LruList, now_s: float) -> None:
        entry.lru_list, entry.used_s = lru_list, now_s
        self._lists[lru_list][id(entry)] = entry
        self._spent_bytes += entry.size_bytes if lru_list is LruList.SPENT else 0
        self._unread_bytes += entry.size_bytes if lru_list is LruList.UNREAD else 0

    def _take_off(self, entry: Cached[V]) -> None:
        del self._lists[entry.lru_list][id(entry)]
        self._spent_bytes -= entry.size_bytes if entry.lru_list is LruList.SPENT else 0
        self._unread_bytes -= entry.size_bytes if entry.lru_list is LruList.UNREAD else 0

    def _oldest(self) -> Cached[V] | None:
        if self._lists[LruList.SPENT]:
            return next(iter(self._lists[LruList.SPENT].values()))
        read = next(iter(self._lists[LruList.READ].values()), None)
        index = next(iter(self._lists[LruList.INDEX].values()), None)
        if read is not None and index is not None:
            return min(read, index, key=lambda entry: entry.used_s)
        return read or index or next(iter(self._lists[LruList.UNREAD].values()), None)
