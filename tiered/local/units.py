"""A row of fixed-size units: reading them, searching them though some are damaged, and a broker's own scans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.format.consume_queue import Items, decode_items
from tiered.local.entries import Flags, Longs, Rebuilt
from tiered.local.files import FileCache, FileRow

if TYPE_CHECKING:
    from collections.abc import Callable

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

    def __init__(self, cache: FileCache, directory: str, file_bytes: int) -> None:
        self.row = FileRow(cache, directory, file_bytes)
        self.rebuilt = Rebuilt()

    def units(self, first: int, last: int) -> Items:
        """Units ``[first, last)``; fewer when a file is missing or short."""
        position, size = first * self.unit_bytes, max(0, last - first) * self.unit_bytes
        data = self.row.read(position, size)
        if len(data) < size and not len(data) % self.unit_bytes:
            pieces, done = [data], len(data)
            while pieces[-1] and done < size:
                pieces.append(self.row.read(position + done, size - done))
                done += len(pieces[-1])
            data = b"".join(pieces)
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
        """Where the units change from those for which ``is_low`` holds to the others.

        Bisection by majorities of a few units, then the best division of what is left: single units that are damaged
        do not mislead it. Units that are not valid say nothing; a lost page is looked over.

        Args:
            low: First unit.
            high: One past the last.
            is_low: bool[n] of n units.

        Returns:
            Between ``low`` and ``high``.
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
            closing = self.units(last - 1, last)
            # A file whose last unit is written is taken as full without reading all of it.
            full = base != bases[-1] and len(closing) and bool(self.is_valid(closing)[0])
            end = last if full else self.first_invalid(first, last)
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
