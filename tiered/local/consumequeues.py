"""Consume queues on disk: which record each queue offset names.

Two kinds behind one face: plain ones, 20 bytes per queue offset, and batch consume queues, 46 bytes per record, found
by binary search. What is damaged or missing reads as "says nothing" (size 0); what was rebuilt from the log fills it.

Nothing here judges whether an entry is true: an entry may be stale and point at another queue's record. That is seen
only when the record is looked at (``tiered.local.reader``, ``tiered.local.follower``). For any thread, but
``rebuilt`` is changed only under the store's lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from tiered.format.consume_queue import (
    BATCH_ITEM,
    BATCH_ITEM_BYTES,
    ITEM,
    ITEM_BYTES,
    Items,
    decode_items,
    is_batch,
)
from tiered.local.entries import Entries, Flags, Ints, Longs, Rebuilt, no_entries
from tiered.local.files import FileCache, FileRow

_SCAN_UNITS: Final = 3_000
"""Units read at once by a scan."""
_FILES_SCANNED: Final = 3
"""A broker's start scans this many files of each consume queue."""


@dataclass(frozen=True, slots=True)
class Tail:
    """How a broker's start reads the end of a consume queue.

    Attributes:
        end: One past the last queue offset that is listed.
        max_physical: End of the last listed record (of a batch queue: where it begins), -1 when there is none. Records
            below it are not listed again at a start.
    """

    end: int
    max_physical: int


class QueueIndex(Protocol):
    """One queue's index."""

    is_batch: bool
    unit_bytes: int
    row: FileRow
    rebuilt: Rebuilt

    def tags_if_listed(self, start: int, physical_offsets: Longs, sizes: Ints) -> Longs | None:
        """The tag codes of the entries from ``start`` on if the files list exactly these records, else None."""
        ...

    def entries(self, start: int, end: int) -> Entries:
        """What is known of ``[start, end)``."""
        ...

    def span(self) -> tuple[int, int]:
        """Queue offsets ``[first, last)`` that the files could hold, written or not."""
        ...

    def first_not_below(self, log_min: int, end: int) -> int:
        """First queue offset whose entry is not below the log's minimum, a filler neither; ``end`` when all are."""
        ...

    def written_end(self, limit: int) -> int:
        """One past the last entry that names a record below ``limit``; found by bisection."""
        ...

    def tail(self) -> Tail:
        """The end, as a broker's start reads it."""
        ...

    def cut_end(self, log_end: int) -> int:
        """One past the last queue offset that a start leaves listed when the log ends at ``log_end``."""
        ...


class _Units:
    """A row of fixed-size units: reading, bisection and the scans that both kinds share."""

    is_batch = False
    _dtype: np.dtype[np.void] = ITEM
    unit_bytes = ITEM_BYTES

    def __init__(self, cache: FileCache, directory: str, file_bytes: int) -> None:
        self.row = FileRow(cache, directory, file_bytes)
        self.rebuilt = Rebuilt()

    def units(self, first: int, last: int) -> Items:
        """Units ``[first, last)``; fewer when a file is missing or short."""
        position, size = first * self.unit_bytes, (last - first) * self.unit_bytes
        data = self.row.read(position, size)
        if len(data) == size or len(data) % self.unit_bytes:
            return decode_items(data, self._dtype)
        pieces = [data]
        while sum(map(len, pieces)) < size and pieces[-1]:
            pieces.append(
                self.row.read(position + sum(map(len, pieces)), size - sum(map(len, pieces)))
            )
        return decode_items(b"".join(pieces), self._dtype)

    def _unit_span(self) -> tuple[int, int]:
        bases = self.row.bases
        if not bases:
            return 0, 0
        return bases[0] // self.unit_bytes, self.row.end // self.unit_bytes

    def _valid(self, units: Items) -> Flags:
        """The broker's own test; fillers pass it."""
        return (units["physical_offset"] >= 0) & (units["size"] > 0)

    def _first_invalid(self, first: int, last: int, log_end: int | None = None) -> int:
        """First unit of ``[first, last)`` that is unwritten, or names a record at or beyond ``log_end``."""
        while first < last:
            units = self.units(first, min(last, first + _SCAN_UNITS))
            stop = ~self._valid(units)
            if log_end is not None:
                stop |= units["physical_offset"] >= log_end
            if stop.any():
                return first + int(np.argmax(stop))
            if not len(units):
                return first
            first += len(units)
        return last

    def _scan_end(self) -> int:
        """One past the last unit of the valid run that begins three files before the end."""
        per_file = self.row.file_bytes // self.unit_bytes
        bases = self.row.bases[-_FILES_SCANNED:]
        end = bases[0] // self.unit_bytes if bases else 0
        for base in bases:
            first = base // self.unit_bytes
            if first != end:
                break  # a file is missing
            last = first + per_file
            closing = self.units(last - 1, last)
            # A file whose last unit is written is taken as full without reading all of it.
            full = base != bases[-1] and len(closing) and bool(self._valid(closing)[0])
            end = last if full else self._first_invalid(first, last)
            if end != last:
                break
        return end

    def _cut_unit(self, log_end: int) -> int:
        """One past the last unit that is left when the log ends at ``log_end``. Files are judged from the last."""
        scan_end = self._scan_end()
        for base in reversed(self.row.bases):
            first = base // self.unit_bytes
            if first >= scan_end:
                continue
            last = min(scan_end, first + self.row.file_bytes // self.unit_bytes)
            cut = self._first_invalid(first, last, log_end)
            if cut > first:
                return cut
        return 0

    def _bisect(self, low: int, high: int, log_end: int) -> int:
        """One past the last unit of ``[low, high)`` that names a record below ``log_end``, if those come first."""
        while low < high:
            middle = (low + high) // 2
            units = self.units(middle, middle + 1)
            if (
                len(units)
                and bool(self._valid(units)[0])
                and int(units["physical_offset"][0]) < log_end
            ):
                low = middle + 1
            else:
                high = middle
        return low


class PlainQueue(_Units):
    """A consume queue of 20-byte entries: entry ``k`` lies at byte ``20 k``."""

    def entries(self, start: int, end: int) -> Entries:
        """See ``QueueIndex``."""
        items = self.units(start, end)
        count = max(0, end - start)
        if len(items) == count:
            found = Entries(
                start,
                items["physical_offset"].astype(np.int64),
                items["size"].astype(np.int32),
                items["tag_code"].astype(np.int64),
            )
        else:
            found = self._patched(start, end)
        self.rebuilt.fill(found)
        return found

    def tags_if_listed(self, start: int, physical_offsets: Longs, sizes: Ints) -> Longs | None:
        """See ``QueueIndex``."""
        items = self.units(start, start + len(sizes))
        if (
            len(items) == len(sizes)
            and bool((items["physical_offset"] == physical_offsets).all())
            and bool((items["size"] == sizes).all())
        ):
            return items["tag_code"].astype(np.int64)
        return None

    def _patched(self, start: int, end: int) -> Entries:
        """Read file by file: some are missing or short."""
        found = no_entries(start, max(0, end - start))
        per_file = max(1, self.row.file_bytes // self.unit_bytes)
        at = start
        while at < end:
            next_at = min(end, (at // per_file + 1) * per_file)
            items = self.units(at, next_at)
            place = slice(at - start, at - start + len(items))
            found.physical_offsets[place] = items["physical_offset"]
            found.sizes[place] = items["size"]
            found.tag_codes[place] = items["tag_code"]
            at = next_at
        return found

    def span(self) -> tuple[int, int]:
        """See ``QueueIndex``."""
        return self._unit_span()

    def first_not_below(self, log_min: int, end: int) -> int:
        """See ``QueueIndex``. Unwritten entries count as not below: a hole must not hide what lies before it."""
        low, high = self.span()[0], end
        while low < high:
            middle = (low + high) // 2
            found = self.entries(middle, middle + 1)
            is_filler = found.sizes[0] > 0 and not found.is_written[0]
            below = is_filler or (found.sizes[0] > 0 and found.physical_offsets[0] < log_min)
            low, high = (middle + 1, high) if below else (low, middle)
        return low

    def written_end(self, limit: int) -> int:
        """See ``QueueIndex``."""
        return self._bisect(*self._unit_span(), limit)

    def tail(self) -> Tail:
        """See ``QueueIndex``."""
        end = self._scan_end()
        last = self.units(end - 1, end) if end else None
        if last is None or not len(last) or not self._valid(last)[0]:
            return Tail(end, -1)
        return Tail(end, int(last["physical_offset"][0]) + int(last["size"][0]))

    def cut_end(self, log_end: int) -> int:
        """See ``QueueIndex``."""
        return self._cut_unit(log_end)


class BatchQueue(_Units):
    """A batch consume queue of 46-byte units, one a record, in order of their first queue offset."""

    is_batch = True
    _dtype = BATCH_ITEM
    unit_bytes = BATCH_ITEM_BYTES

    def __init__(self, cache: FileCache, directory: str, file_bytes: int) -> None:
        super().__init__(cache, directory, file_bytes)
        self._hint = (0, 0)
        """(queue offset, unit) where the last reading ended: the next one mostly begins there."""

    def _valid(self, units: Items) -> Flags:
        return is_batch(units)

    def entries(self, start: int, end: int) -> Entries:
        """See ``QueueIndex``. The entries of one unit share its record."""
        found = no_entries(start, max(0, end - start))
        unit, limit = self._unit_of(start), self._unit_span()[1]
        at = start
        while at < end and unit < limit:
            units = self.units(unit, min(limit, unit + min(end - at, _SCAN_UNITS)))
            good = self._valid(units)
            count = int(np.argmin(good)) if not good.all() else len(units)
            if not count:
                break
            at = _spread(found, units[:count])
            unit += count
        self._hint = (at, unit)
        self.rebuilt.fill(found)
        return found

    def tags_if_listed(self, start: int, physical_offsets: Longs, sizes: Ints) -> Longs | None:
        """See ``QueueIndex``."""
        entries = self.entries(start, start + len(sizes))
        same = (entries.physical_offsets == physical_offsets) & (entries.sizes == sizes)
        return entries.tag_codes if bool(same.all()) else None

    def _unit_of(self, offset: int) -> int:
        """The unit that holds ``offset``, or the first behind it."""
        hinted, unit = self._hint
        if hinted == offset and unit:
            return unit
        low, high = self._unit_span()
        while low < high:
            middle = (low + high) // 2
            units = self.units(middle, middle + 1)
            if (
                len(units)
                and self._valid(units)[0]
                and int(units["base_offset"][0]) + int(units["count"][0]) <= offset
            ):
                low = middle + 1
            else:
                high = middle
        return low

    def span(self) -> tuple[int, int]:
        """See ``QueueIndex``. The end is that of the written units."""
        first, last = self._unit_span()
        end = self._bisect(first, last, 2**63 - 1)
        return self._bounds(first, end)

    def _bounds(self, first: int, end: int) -> tuple[int, int]:
        if end <= first:
            return 0, 0
        head, tail = self.units(first, first + 1), self.units(end - 1, end)
        if not len(head) or not len(tail):
            return 0, 0
        return int(head["base_offset"][0]), _unit_end(tail)

    def first_not_below(self, log_min: int, end: int) -> int:
        """See ``QueueIndex``."""
        first, last = self._unit_span()
        unit = self._bisect(first, last, log_min)
        found = self.units(unit, unit + 1)
        if len(found) and self._valid(found)[0]:
            return min(end, int(found["base_offset"][0]))
        return end

    def written_end(self, limit: int) -> int:
        """See ``QueueIndex``."""
        first, last = self._unit_span()
        return self._bounds(first, self._bisect(first, last, limit))[1]

    def tail(self) -> Tail:
        """See ``QueueIndex``."""
        end = self._scan_end()
        last = self.units(end - 1, end) if end else None
        if last is None or not len(last) or not self._valid(last)[0]:
            return Tail(0, -1)
        return Tail(_unit_end(last), int(last["physical_offset"][0]))

    def cut_end(self, log_end: int) -> int:
        """See ``QueueIndex``."""
        cut = self._cut_unit(log_end)
        last = self.units(cut - 1, cut) if cut else None
        return _unit_end(last) if last is not None and len(last) else 0


def _unit_end(units: Items) -> int:
    """One past the last queue offset of the last of ``units``."""
    return int(units["base_offset"][-1]) + int(units["count"][-1])


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
