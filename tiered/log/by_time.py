"""A queue offset by store time, in one incarnation of a queue, with few small reads.

The part is chosen by the parts' time bounds, which the journal has: no request, and exact whatever the order of the
times. Within the part its index is read once, and then units of 128 KiB of its commit log by bisection: of a part of
32 MiB 8 units, and one before the unit found. A small section is read whole, with one request.

Order of times: two messages that lie no more than ``UNIT_BYTES`` apart in the queue's commit log may have their times in
any order, and equal times may go on for as long as they like; the answer is exact. With more disorder than that (a clock
that was put back) it is a message that is late enough, not always the first. Of Kafka's batches and JoyQueue's messages,
whose times are their producers', the answer is always exact: the records of the part are read from its begin on.

Retries and errors: nothing is retried here. What contradicts itself is a ``DataError``. For any thread.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from backends.errors import InvalidRangeError, ShortReadError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.record import RECORD_BYTES_MIN, STORE_TIME_AT, SYS_FLAG_AT
from tiered.format.record_kind import RecordKind
from tiered.format.sysflag import BORN_HOST_V6, V6_EXTRA_BYTES
from tiered.log.decode import PartItems, decode_items
from tiered.log.sections import WHOLE_AT_ONCE_BYTES, read_planned, read_range, read_section
from tiered.model import Boundary, QueueOffset

if TYPE_CHECKING:
    import numpy.typing as npt

    from backends.base import ObjectStore
    from tiered.log.cursor import IncarnationView
    from tiered.log.parts import Part, SectionRange
    from tiered.log.sections import OpenSection

UNIT_BYTES: Final = 128 * 1024
"""How much of a commit log one read tells of; and how far apart messages may be out of order."""
EXACT_UNIT_BYTES: Final = 4 << 20
"""Of records that have to be read whole, from the first on."""
_UNITS_BACK: Final = 2
"""With disorder of at most a unit, the first late message is in the unit found or in one of these before it."""
_HEAD_BYTES: Final = STORE_TIME_AT + V6_EXTRA_BYTES + 8
"""Size, magic, ids and times stand in the first bytes of a record, however large it is."""


_Name = tuple[str, int]
"""Of a section: its bundle, and where it begins."""


class Ranges(Protocol):
    """Where ranges of sections come from."""

    def read(self, want: SectionRange) -> memoryview:
        """The bytes of a range, checked."""
        ...


@dataclass(slots=True)
class StoreRanges:
    """Ranges by way of a store; for one lookup, in one thread. A block table is read once, and so is a small section."""

    store: ObjectStore
    prefix: str
    _known: dict[_Name, OpenSection | None] = field(default_factory=dict)
    _small: tuple[_Name, memoryview, memoryview] | None = None

    def read(self, want: SectionRange) -> memoryview:
        name = want.key, want.place.start
        if want.place.size_bytes <= WHOLE_AT_ONCE_BYTES:
            if self._small is None or self._small[0] != name:
                self._small = (name, *read_section(self.store, self.prefix, want))
            _, records, items = self._small
            return (items if want.of_items else records)[want.start : want.end]
        get = self.store.get_ranges
        try:
            (data,), self._known[name] = read_planned(
                (want,), get, where=self.prefix, known=self._known.get(name)
            )
        except (InvalidRangeError, ShortReadError, DataError):
            return read_range(self.store, self.prefix, want)
        return data


def find_by_time(
    view: IncarnationView,
    ranges: Ranges,
    time_ms: int,
    boundary: Boundary = Boundary.LOWER,
    *,
    low: int = 0,
    high: int | None = None,
    where: str = "",
) -> QueueOffset | None:
    """Find the message that a store time means.

    Args:
        low: Only messages from here on; also from the minimum on.

    Returns:
        Its queue offset; None: all are earlier (``LOWER``), or later (``UPPER``), or there are none.
    """
    low = max(low, view.incarnation.min_offset)
    end = (
        view.incarnation.commit_offset
        if high is None
        else min(high, view.incarnation.commit_offset)
    )
    search = _Search(view, ranges, where)
    if boundary is Boundary.LOWER:
        found = search.first_since(time_ms, low, end)
        return found if found < end else None
    return search.last_before(low, search.first_since(time_ms + 1, low, end))


class _Search:
    """One lookup: what it has read of parts."""

    def __init__(self, view: IncarnationView, ranges: Ranges, where: str) -> None:
        self._view = view
        self._ranges = ranges
        self._where = where
        self._parts: dict[int, PartTimes] = {}

    def first_since(self, time_ms: int, low: int, high: int) -> QueueOffset:
        for part in self._view.parts_from(QueueOffset(low)):
            if part.queue_offset >= high:
                break
            if part.store_max_ms < max(time_ms, 0):
                continue
            first, end = max(part.queue_offset, low), min(part.queue_end, high)
            is_one_each = self._view.incarnation.lineage is None  # else times are of whole batches
            if part.store_min_ms >= time_ms and not part.holes and is_one_each:
                return QueueOffset(first)
            found = self._times(part).first_since(time_ms, first, end)
            if found is not None:
                return found
        return QueueOffset(max(high, low))

    def last_before(self, low: int, end: int) -> QueueOffset | None:
        """The last message in queue offsets ``[low, end)``."""
        for part in reversed(self._view.parts):
            first, stop = max(part.queue_offset, low), min(part.queue_end, end)
            if first >= stop or part.holes == part.count:
                continue
            if not part.holes:
                return QueueOffset(stop - 1)
            found = self._times(part).last_before(first, stop)
            if found is not None:
                return found
        return None

    def _times(self, part: Part) -> PartTimes:
        found = self._parts.get(part.queue_offset)
        if found is None:
            found = self._parts[part.queue_offset] = PartTimes(self._ranges, part, self._where)
        return found


class PartTimes:
    """Store times of one part, read unit by unit. Not for several threads at once."""

    def __init__(self, ranges: Ranges, part: Part, where: str) -> None:
        """Read the part's index."""
        self._ranges = ranges
        self._part = part
        self._where = where
        raw = ranges.read(part.index)
        items = decode_items(part, part.queue_offset, raw, where=where)
        self._kind = items.kind
        self._real = np.flatnonzero(items.sizes > 0)
        self._begins = items.log_offsets[self._real] - part.log_offset
        is_exact = self._kind is not RecordKind.ROCKETMQ
        is_short = items.sizes[self._real] < (1 if is_exact else RECORD_BYTES_MIN)
        if is_short.any() or (np.diff(self._begins) < 0).any():
            raise self._damaged("the items of an index are no records in their order")
        self._items: PartItems = items
        units = self._begins // (EXACT_UNIT_BYTES if is_exact else UNIT_BYTES)
        cuts = np.flatnonzero(np.diff(units)) + 1
        self._cuts: list[int] = [0, *cuts.tolist(), len(self._real)]
        self._known: dict[int, npt.NDArray[np.int64]] = {}

    def first_since(self, time_ms: int, first: int, end: int) -> QueueOffset | None:
        """The first message in queue offsets ``[first, end)`` at a time or later."""
        low, high = self._units(first, end)
        if self._kind is not RecordKind.ROCKETMQ:
            exact = (self._first_exactly(unit, time_ms, first, end) for unit in range(low, high))
            return next((one for one in exact if one is not None), None)
        is_whole = end == self._part.queue_end
        begin, limit = low, high - 1 if is_whole else high  # the part's bounds say: there is one
        while begin < limit:
            middle = (begin + limit) // 2
            if self._first_in(middle, time_ms, first, end) is not None:
                limit = middle
            else:
                begin = middle + 1
        nearby = range(max(begin - _UNITS_BACK, low), min(begin + 1, high))
        found = self._first_of(nearby, time_ms, first, end)
        if found is None and is_whole:  # times are in great disorder
            return self._first_of(range(low, high), time_ms, first, end)
        return found

    def last_before(self, first: int, end: int) -> QueueOffset | None:
        """The last message in queue offsets ``[first, end)``; the index tells."""
        at = int(np.searchsorted(self._real, end - self._items.start)) - 1
        found = int(self._real[at]) + self._items.start if at >= 0 else -1
        return QueueOffset(found) if found >= first else None

    def _first_of(self, units: range, time_ms: int, first: int, end: int) -> QueueOffset | None:
        for unit in units:
            found = self._first_in(unit, time_ms, first, end)
            if found is not None:
                return found
        return None

    def _first_in(self, unit: int, time_ms: int, first: int, end: int) -> QueueOffset | None:
        offsets, times = self._of(unit, first, end)
        late = np.flatnonzero(times >= time_ms)
        return QueueOffset(int(offsets[late[0]])) if len(late) else None

    def _first_exactly(self, unit: int, time_ms: int, first: int, end: int) -> QueueOffset | None:
        """As ``_first_in``, of records that may hold many messages: these are looked into."""
        from tiered.format.heads import first_since, heads_of  # noqa: PLC0415 (most tiers have none of them)

        low, high = self._cuts[unit], self._cuts[unit + 1]
        begins, sizes = self._begins[low:high], self._items.sizes[self._real[low:high]]
        is_first = np.append(True, np.diff(begins) != 0)
        positions, sizes = begins[is_first] - begins[0], sizes[is_first].astype(np.int64)
        stop = int(begins[-1]) + int(sizes[-1])
        data = self._ranges.read(self._part.log.part_of(int(begins[0]), stop))
        heads = heads_of(self._kind, data, positions, sizes)
        if not heads.is_sound.all():
            raise self._damaged("an item points at something that is not a record of this queue")
        late = (heads.times_ms >= time_ms) & (heads.highs > first) & (heads.lows < end)
        for at in np.flatnonzero(late).tolist():
            found = first_since(
                self._kind, data, int(positions[at]), int(sizes[at]), time_ms, first
            )
            if found is not None and found < end:
                return QueueOffset(found)
        return None

    def _units(self, first: int, end: int) -> tuple[int, int]:
        """Units ``[low, high)`` that hold the messages of ``[first, end)``."""
        low, high = np.searchsorted(self._real, (np.array((first, end)) - self._items.start))
        if low >= high:
            return 0, 0
        ends = np.searchsorted(self._cuts, (low, high - 1), side="right")
        return int(ends[0]) - 1, int(ends[1])

    def _of(
        self, unit: int, first: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Queue offsets and store times of a unit's messages, those of ``[first, end)``."""
        times = self._known.get(unit)
        if times is None:
            times = self._known[unit] = self._read(self._cuts[unit], self._cuts[unit + 1])
        offsets = self._real[self._cuts[unit] : self._cuts[unit + 1]] + self._items.start
        wanted = (offsets >= first) & (offsets < end)
        return offsets[wanted], times[wanted]

    def _read(self, low: int, high: int) -> npt.NDArray[np.int64]:
        """Store times of messages ``[low, high)``, by the heads of their records."""
        place, begins = self._part.log, self._begins[low:high]
        start = int(begins[0])
        stop = min(int(begins[-1]) + _HEAD_BYTES, place.size_bytes)
        data = self._ranges.read(place.part_of(start, stop))
        heads = np.frombuffer(data, np.uint8)
        positions = begins - start
        if (_gather(heads, positions, 4) != self._items.sizes[self._real[low:high]]).any():
            raise self._damaged("an item points at something that is not a record of this queue")
        is_v6 = _gather(heads, positions + SYS_FLAG_AT, 4) & BORN_HOST_V6 != 0
        return _gather(heads, positions + STORE_TIME_AT + np.where(is_v6, V6_EXTRA_BYTES, 0), 8)

    def _damaged(self, what: str) -> DataError:
        return DataError(
            what,
            where=self._where + self._part.index.key,
            do="run `tiered verify --deep` to see the extent of the damage",
        )


def _gather(
    heads: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.int64]:
    """Big-endian integers of 4 or 8 bytes at these positions."""
    bytes_ = heads[positions[:, None] + np.arange(size)]
    kind = ">i4" if size == np.dtype(np.int32).itemsize else ">i8"
    return np.ascontiguousarray(bytes_).view(kind)[:, 0].astype(np.int64)
