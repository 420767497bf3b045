"""Consume queues on disk: which record each queue offset names.

Two kinds that answer the same questions: plain ones, 20 bytes per queue offset, and batch consume queues, 46 bytes per
record, found by binary search. What is damaged or missing reads as "says nothing" (size 0); what was rebuilt from the log
fills it.

Nothing here judges whether an entry is true: an entry may be stale and point at another queue's record. That is seen
only when the record is looked at (``tiered.local.queue_reader``, ``tiered.local.matching``). For any thread, but
``rebuilt`` is changed only under the store's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.format.items import (
    BATCH_ITEM,
    BATCH_ITEM_BYTES,
    FILLER_SIZE,
    ITEM,
    ITEM_BYTES,
    Items,
    decode_items,
    is_batch,
    is_filler,
)
from tiered.local.mapped_file_queue import FileCache, MappedFileQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.local.mapped_file_queue import Listed


# -- entries -----------------------------------------------------------------------------------------
#
# Entries of consume queues as arrays, one per queue offset, and those that were rebuilt from the log.

Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Entries:
    """What a consume queue says of ``[start, start + n)``; zeros where it says nothing."""

    start: int  # queue offset of the first
    physical_offsets: Longs  # int64[n], local physical offset of each record
    sizes: Ints  # int32[n], bytes of each record; 0 for what was never written
    tag_codes: Longs  # int64[n]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def is_written(self) -> Flags:
        """bool[n]: neither unwritten nor a filler nor impossible."""
        written: Flags = (
            (self.sizes > 0) & (self.sizes != FILLER_SIZE) & (self.physical_offsets >= 0)
        )
        return written

    def head(self, count: int) -> Entries:
        """The first ``count`` of them, as views."""
        return Entries(
            self.start,
            self.physical_offsets[:count],
            self.sizes[:count],
            self.tag_codes[:count],
        )


def no_entries(start: int, count: int) -> Entries:
    """Entries that say nothing."""
    return Entries(
        start, np.zeros(count, np.int64), np.zeros(count, np.int32), np.zeros(count, np.int64)
    )


_REBUILT: Final = np.dtype(
    [("offset", np.int64), ("place", np.int64), ("size", np.int32), ("tag_code", np.int64)]
)


class Rebuilt:
    """Entries made from the log for queue offsets of which the consume queue says nothing of use. The first wins.

    Memory: 28 bytes an entry. Changed under its store's lock; to be asked by any thread.
    """

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        # In the order of their queue offsets. Replaced as a whole, since readers hold no lock.
        self._rows = np.zeros(0, _REBUILT)

    def add(self, offsets: Longs, physical_offsets: Longs, sizes: Ints, tag_codes: Longs) -> None:
        """Let ``offsets`` (int64[n], in any order) name these records."""
        rows = np.zeros(len(offsets), _REBUILT)
        rows["offset"], rows["place"] = offsets, physical_offsets
        rows["size"], rows["tag_code"] = sizes, tag_codes
        every = np.concatenate((self._rows, rows))
        _, firsts = np.unique(every["offset"], return_index=True)
        self._rows = every[firsts]

    @property
    def bounds(self) -> tuple[int, int] | None:
        """``[first, last + 1)`` of the offsets here; None without any."""
        offsets = self._rows["offset"]
        return (int(offsets[0]), int(offsets[-1]) + 1) if len(offsets) else None

    def before(self, place: int) -> tuple[int, int] | None:
        """One past the last queue offset here whose record lies before ``place`` in the log, and where it begins."""
        found = self._rows[self._rows["place"] < place]
        return (int(found["offset"][-1]) + 1, int(found["place"][-1])) if len(found) else None

    def next_rebuilt(self, start: int, end: int) -> int:
        """The first queue offset here in ``[start, end)``; ``end`` without one."""
        offsets = self._rows["offset"]
        at = int(np.searchsorted(offsets, start))
        return min(end, int(offsets[at])) if at < len(offsets) else end

    def places(self, start: int, end: int) -> Longs:
        """Physical offsets in ``[start, end)`` that are named here, in any order."""
        places: Longs = self._rows["place"]
        return places[(places >= start) & (places < end)]

    def fill(self, entries: Entries) -> None:
        """Put what is known here in the place of what the consume queue says."""
        rows = self._rows
        if not len(rows):
            return  # as of nearly every queue
        ends = entries.start, entries.start + len(entries)
        rows = rows[slice(*np.searchsorted(rows["offset"], ends).tolist())]
        places = rows["offset"] - entries.start
        entries.physical_offsets[places] = rows["place"]
        entries.sizes[places] = rows["size"]
        entries.tag_codes[places] = rows["tag_code"]


# -- units -------------------------------------------------------------------------------------------
#
# A row of fixed-size units: reading them, searching them though some are damaged, and a broker's own scans.

SCAN_UNITS: Final = 3_000
"""Units read at once by a scan."""
_FILES_SCANNED: Final = 3
"""A broker's start scans this many files of each consume queue."""
_RUN: Final = 16
_LOOK_AHEAD: Final = 256
"""Units: a page of 4,096 bytes that was lost holds fewer of either kind."""


class Units:
    """Units of one consume queue. For any thread."""

    is_batch = False
    dtype: np.dtype[np.void]
    unit_bytes: int

    def __init__(
        self, cache: FileCache, directory: str, file_bytes: int, listed: Listed | None = None
    ) -> None:
        self.row = MappedFileQueue(cache, directory, file_bytes, listed)
        self.rebuilt = Rebuilt()

    def units(self, first: int, last: int) -> Items:
        """Units ``[first, last)``; fewer when a file is missing or short."""
        position, size = first * self.unit_bytes, max(0, last - first) * self.unit_bytes
        data = self.row.read(position, size)
        if len(data) < size and not len(data) % self.unit_bytes:
            chunks, done = [data], len(data)
            while chunks[-1] and done < size:
                chunks.append(self.row.read(position + done, size - done))
                done += len(chunks[-1])
            data = b"".join(chunks)
        return decode_items(data, self.dtype)

    def unit_span(self) -> tuple[int, int]:
        """Units ``[first, last)`` that the files could hold."""
        bases = self.row.bases
        if not bases:
            return 0, 0
        return bases[0] // self.unit_bytes, self.row.end // self.unit_bytes

    def is_valid(self, units: Items) -> Flags:
        """The broker's own test, which fillers pass."""
        return (units["physical_offset"] >= 0) & (units["size"] > 0)

    # -- searching -------------------------------------------------------------------------------

    def split(self, low: int, high: int, is_low: Callable[[Items], Flags]) -> int:
        """Where the units change from those for which ``is_low`` holds to the others: between ``low`` and ``high``.

        Bisection by majorities of a few units, then the best division of what is left: single units that are damaged do not
        mislead it. Units that are not valid say nothing; a lost page is looked over.
        """
        while high - low > 4 * _RUN:
            middle = (low + high) // 2
            units, ahead = self._known_run(middle, high)
            if not len(units) or (ahead > middle and not _mostly(is_low(units))):
                high = middle
            elif _mostly(is_low(units)):
                low = ahead + 1
            else:
                high = min(high, middle + _RUN)
        units = self.units(low, high)
        valid, lows = self.is_valid(units), is_low(units)
        return low + best_division(valid & lows, valid & ~lows)

    def _known_run(self, first: int, limit: int) -> tuple[Items, int]:
        """Some valid units at or behind ``first``, and where the first of them is."""
        units = self.units(first, min(limit, first + _RUN))
        valid = self.is_valid(units)
        if not valid.any():
            units = self.units(first, min(limit, first + _LOOK_AHEAD))
            valid = self.is_valid(units)
            if not valid.any():
                return units[:0], first
        at = int(np.argmax(valid))
        run = units[at : at + _RUN]
        return run[valid[at : at + _RUN]], first + at

    # -- a broker's start ------------------------------------------------------------------------

    def first_invalid(self, first: int, last: int, log_end: int | None = None) -> int:
        """First unit of ``[first, last)`` that is unwritten, or names a record at or beyond ``log_end``."""
        while first < last:
            units = self.units(first, min(last, first + SCAN_UNITS))
            stop = ~self.is_valid(units)
            if log_end is not None:
                stop |= units["physical_offset"] >= log_end
            if stop.any():
                return first + int(np.argmax(stop))
            if not len(units):
                return first
            first += len(units)
        return last

    def scan_end(self) -> int:
        """One past the last unit of the valid run that begins three files before the end."""
        per_file = self.row.file_bytes // self.unit_bytes
        bases = self.row.bases[-_FILES_SCANNED:]
        end = bases[0] // self.unit_bytes if bases else 0
        for base in bases:
            first = base // self.unit_bytes
            if first != end:
                break  # a file is missing
            last = first + per_file
            # A file whose last unit is written is taken as full without reading all of it.
            is_full = base != bases[-1] and self.last_unit(last) is not None
            end = last if is_full else self.first_invalid(first, last)
            if end != last:
                break
        return end

    def cut_unit(self, log_end: int) -> int:
        """One past the last unit that is left when the log ends at ``log_end``. Files are judged from the last."""
        scan_end = self.scan_end()
        for base in reversed(self.row.bases):
            first = base // self.unit_bytes
            if first >= scan_end:
                continue
            last = min(scan_end, first + self.row.file_bytes // self.unit_bytes)
            cut = self.first_invalid(first, last, log_end)
            if cut > first:
                return cut
        return 0

    def last_unit(self, end: int) -> Items | None:
        """The unit before ``end`` if it is valid."""
        if not end:
            return None
        last = self.units(end - 1, end)
        return last if len(last) and bool(self.is_valid(last)[0]) else None


def best_division(lows: Flags, highs: Flags) -> int:
    """Where to divide so that the fewest lows stand behind and highs before; the first such place."""
    misplaced: Longs = np.concatenate(
        ([0], np.cumsum(highs.astype(np.int64) - lows.astype(np.int64)))
    )
    return int(np.argmin(misplaced))


def _mostly(flags: Flags) -> bool:
    return 2 * int(flags.sum()) > len(flags)


# -- consumequeues -----------------------------------------------------------------------------------


_BATCHES_READ_MIN: Final = 256
"""Units of a batch queue read at once, at least: a lost page is looked over."""
_CLOSING: Final = 16
"""Units that are looked at to tell where a batch queue ends."""


@dataclass(frozen=True, slots=True)
class QueueTail:
    """How a broker's start reads the end of a consume queue."""

    end: int  # one past the last queue offset that is listed
    max_physical: int
    """End of the last listed record (of a batch queue: where it begins), -1 when there is none. Records below it are
    not listed again at a start."""


class PlainQueue(Units):
    """A consume queue of 20-byte entries: entry ``k`` lies at byte ``20 k``."""

    dtype = ITEM
    unit_bytes = ITEM_BYTES

    def entries(self, start: int, end: int) -> Entries:
        """What is known of ``[start, end)``, read file by file: some may be missing or short."""
        found = no_entries(start, max(0, end - start))
        per_file = max(1, self.row.file_bytes // self.unit_bytes)
        first, last = self.unit_span()
        at, end = max(start, first), min(end, last)
        while at < end:
            next_at = min(end, (at // per_file + 1) * per_file)
            items = self.units(at, next_at)
            place = slice(at - start, at - start + len(items))
            found.physical_offsets[place] = items["physical_offset"]
            found.sizes[place] = items["size"]
            found.tag_codes[place] = items["tag_code"]
            at = next_at
        self.rebuilt.fill(found)
        return found

    def next_written_file(self, start: int, end: int) -> int:
        """The first of ``[start, end)`` of which a file, or what was rebuilt, could say something; ``end`` without one."""
        position = start * self.unit_bytes
        following = self.row.next_base(position)
        if self.row.base_of(position) is not None:
            following = position
        in_files = end if following is None else -(-following // self.unit_bytes)
        return min(end, in_files, self.rebuilt.next_rebuilt(start, end))

    def first_of_file(self, base: int) -> int:
        """The first queue offset of which the file that begins at byte ``base`` says something."""
        first = base // self.unit_bytes
        units = self.units(first, first + self.row.file_bytes // self.unit_bytes)
        good = self.is_valid(units) & ~is_filler(units)
        return first + int(good.argmax()) if good.any() else first

    def span(self) -> tuple[int, int]:
        """Queue offsets ``[first, last)`` that the files could hold, written or not."""
        return self.unit_span()

    def first_not_below(self, log_min: int, end: int) -> int:
        """First queue offset whose entry is not below the log's minimum, a filler neither; ``end`` when all are.

        What was rebuilt is not looked at. Unwritten entries count as not below: a hole must not hide what lies before it.
        """
        first, last = self.unit_span()
        low = self.split(
            first,
            min(last, end),
            lambda units: is_filler(units) | (units["physical_offset"] < log_min),
        )
        return min(low, end) if low < last else end

    def written_end(self, limit: int) -> int:
        """One past the last entry that names a record below ``limit``; found by bisection."""
        return self.split(*self.unit_span(), lambda units: units["physical_offset"] < limit)

    def tail(self) -> QueueTail:
        """The end, as a broker's start reads it."""
        end = self.scan_end()
        last = self.last_unit(end)
        if last is None:
            return QueueTail(end, -1)
        return QueueTail(end, int(last["physical_offset"][0]) + int(last["size"][0]))

    def cut_end(self, log_end: int) -> int:
        """One past the last queue offset that a start leaves listed when the log ends at ``log_end``."""
        return self.cut_unit(log_end)

    def closing_unit(self, end: int) -> tuple[Items, bool]:
        """Nothing: an entry's place is its queue offset, which needs not be held against its record."""
        return self.units(end, end), False


class BatchQueue(Units):
    """A batch consume queue of 46-byte units, one a record, in order of their first queue offset."""

    is_batch = True
    dtype = BATCH_ITEM
    unit_bytes = BATCH_ITEM_BYTES

    def __init__(
        self, cache: FileCache, directory: str, file_bytes: int, listed: Listed | None = None
    ) -> None:
        super().__init__(cache, directory, file_bytes, listed)
        self._hint = (0, 0)
        """(queue offset, unit) where the last reading ended: the next one mostly begins there."""

    def is_valid(self, units: Items) -> Flags:
        """The broker's own test."""
        return is_batch(units)

    def entries(self, start: int, end: int) -> Entries:
        """As of a plain queue. The entries of one unit share its record."""
        found = no_entries(start, max(0, end - start))
        unit, limit = self._unit_of(start), self.unit_span()[1]
        at = start
        while at < end and unit < limit:
            wanted = min(max(end - at, _BATCHES_READ_MIN), SCAN_UNITS)
            before = max(self.unit_span()[0], unit - 1)  # read too: it tells whether the first fits
            units = self.units(before, min(limit, unit + wanted + 1))  # so does the one behind
            good = self.is_valid(units)
            good[good] = consistent(units[good])
            inside = slice(unit - before, unit - before + wanted)
            units, good = units[inside], good[inside]
            if not good.any():
                break
            at = _spread(found, units[good])
            last = int(np.flatnonzero(good)[-1])
            self._hint = (at, unit + last + 1)
            unit += last + 1
        self.rebuilt.fill(found)
        return found

    def _unit_of(self, offset: int) -> int:
        """The unit that holds ``offset``, or the first behind it."""
        hinted, unit = self._hint
        if hinted == offset and unit:
            return unit
        return self.split(*self.unit_span(), lambda units: _ends(units) <= offset)

    def next_written_file(self, start: int, end: int) -> int:
        """As of a plain queue. Units have offsets of their own, so the next unit tells."""
        unit = self.split(*self.unit_span(), lambda units: _ends(units) <= start)
        found = self.units(unit, unit + 1)
        is_there = bool(len(found)) and bool(self.is_valid(found)[0])
        in_files = max(start, int(found["base_offset"][0])) if is_there else end
        return min(end, in_files, self.rebuilt.next_rebuilt(start, end))

    def first_of_file(self, base: int) -> int:
        units = self.units(base // self.unit_bytes, base // self.unit_bytes + 1)
        return int(units["base_offset"][0]) if self.is_valid(units).all() and len(units) else 0

    def span(self) -> tuple[int, int]:
        """As of a plain queue; the end is that of the written units."""
        first, last = self.unit_span()
        return self._bounds(first, self.split(first, last, self.is_valid))

    def _bounds(self, first: int, end: int) -> tuple[int, int]:
        head = self.units(first, first + 1)
        if end <= first or self.last_unit(end) is None or not len(head):
            return 0, 0
        return int(head["base_offset"][0]), self._end_at(end)

    def first_not_below(self, log_min: int, end: int) -> int:
        unit = self.split(*self.unit_span(), lambda units: units["physical_offset"] < log_min)
        found = self.units(unit, unit + 1)
        if not len(found) or not self.is_valid(found)[0]:
            return end
        return min(end, int(found["base_offset"][0]))

    def written_end(self, limit: int) -> int:
        first, last = self.unit_span()
        end = self.split(first, last, lambda units: units["physical_offset"] < limit)
        return self._bounds(first, end)[1]

    def tail(self) -> QueueTail:
        end = self.scan_end()
        last = self.last_unit(end)
        if last is None:
            return QueueTail(0, -1)
        return QueueTail(self._end_at(end), int(last["physical_offset"][0]))

    def cut_end(self, log_end: int) -> int:
        return self._end_at(self.cut_unit(log_end))

    def closing_unit(self, end: int) -> tuple[Items, bool]:
        """The unit that says that the queue ends there (none when no unit does), and whether the one before leads to it."""
        unit = self.split(*self.unit_span(), lambda units: _ends(units) < end)
        found = self.units(unit, unit + 1)
        found = found[self.is_valid(found) & (_ends(found) == end)]
        before = self.last_unit(unit)
        is_bound = bool(
            len(found) and before is not None and _ends(before)[0] == found["base_offset"][0]
        )
        return found, is_bound

    def _end_at(self, unit: int) -> int:
        """One past the last queue offset before a unit; what does not go on where the one before ends is not believed."""
        units = self.units(max(self.unit_span()[0], unit - _CLOSING), unit)
        units = units[self.is_valid(units)]
        units = units[consistent(units)]
        return int(_ends(units)[-1]) if len(units) else 0


QueueIndex = PlainQueue | BatchQueue
"""One queue's index: both kinds answer the same questions."""
_PLACES_READ: Final = 4_000


def listed_places(index: QueueIndex, start: int, end: int) -> Longs:
    """The places of the log in ``[start, end)`` that a queue lists at any offset, in any order.

    Bisection finds where to begin; entries that break the order only cost a place.
    """
    _, last = index.span()
    first = index.first_not_below(start, last)
    found = [index.rebuilt.places(start, end)]
    while first < last:
        entries = index.entries(first, min(last, first + _PLACES_READ))
        places = entries.physical_offsets
        inside = entries.is_written & (places >= start) & (places < end)
        found.append(places[inside])
        if not inside.any():
            break
        first += len(entries)
    return np.concatenate(found)


def _ends(units: Items) -> Longs:
    ends: Longs = units["base_offset"].astype(np.int64) + units["count"]
    return ends


def consistent(units: Items) -> Flags:
    """Which units fit between their neighbours: those that do not are damaged in their offset or count.

    A unit that goes on where the one before ends, or ends where the one behind begins, fits. Any other must lie
    between those that fit. The last of several must go on where the one before ends: nothing bounds what it says.
    """
    if len(units) <= 1:
        return np.ones(len(units), np.bool_)
    bases, ends = units["base_offset"].astype(np.int64), _ends(units)
    links = bases[1:] == ends[:-1]
    fits: Flags = np.concatenate(([False], links)) | np.concatenate((links, [False]))
    if fits.all():
        return fits
    following = np.where(fits, bases, np.iinfo(np.int64).max)
    following[-1] = ends[-2] if fits[-2] else following[-1]
    following = np.minimum.accumulate(following[::-1])[::-1]
    reached = 0
    for at, (base, end, is_linked) in enumerate(
        zip(bases.tolist(), ends.tolist(), fits.tolist(), strict=True)
    ):
        fits[at] = is_linked or reached <= base < end <= following[at]
        if fits[at]:
            reached = end
    return fits


def _spread(found: Entries, units: Items) -> int:
    """Write each unit's record to all its queue offsets; one past the last queue offset reached."""
    counts = units["count"].astype(np.int64)
    firsts = units["base_offset"].astype(np.int64)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.repeat(firsts, counts) + within - found.start
    chosen = np.repeat(np.arange(len(units)), counts)
    inside = (places >= 0) & (places < len(found))
    places, chosen = places[inside], chosen[inside]
    found.physical_offsets[places] = units["physical_offset"][chosen]
    found.sizes[places] = units["size"][chosen]
    found.tag_codes[places] = units["tag_code"][chosen]
    return int(firsts[-1] + counts[-1])
