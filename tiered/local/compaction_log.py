"""The compaction log of a queue: what a broker keeps of a topic whose ``cleanup.policy`` is COMPACTION.

Beside commit log and consume queue, which expire as ever, such a queue has records and what lists them::

    compaction/compactionLog/<topic>/<queue id>/<20 digits>    records, each with its position here as physical offset
    compaction/compactionCq/<topic>/<queue id>/<same name>     units of batch queues, one a record, in queue order

Both roll together; bases are multiples of the log file's length, and some are missing. A file's list ends at the first unit
that names no record. Queue offsets have gaps: what is not there has been replaced by a newer message of its key.

**Contract.** A ``CompactionLog`` shows the files that were there when it was opened, whatever a pass puts in their place: it
holds them open, and they are closed when nobody refers to it. Read-only; for any thread.

**Errors.** Passes of another process swap files singly. What does not fit together is not a log (``open`` returns None, to
be tried again later); a record that fails its checks is a hole, and is in ``quarantined``. Where it stays so, as after a
crash in the middle of that, lists are made anew of the records (``relists``), which say themselves what they are.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, InvalidError
from tiered.format.block import (
    check_records,
    parse_records,
    topics_equal,
    walk_records,
)
from tiered.format.items import BATCH_ITEM, BATCH_ITEM_BYTES, is_batch
from tiered.format.property_columns import tag_hashes
from tiered.format.record import MAGIC_V1, MAGIC_V2, SIZE_AND_MAGIC, RecordFault
from tiered.local.interface import HoleReason, Quarantined, RecordBatch
from tiered.local.mapped_file_queue import (
    NAME_DIGITS,
    directory_stamp,
    list_bases,
    open_read_only,
    unreadable,
)
from tiered.model import PhysicalOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.clock import Clock
    from tiered.format.block import RecordBlock
    from tiered.model import MessageQueue

RECORDS_DIRECTORY: Final = "compaction/compactionLog"
UNITS_DIRECTORY: Final = "compaction/compactionCq"
ASIDE: Final = "compacting"
"""Where a pass makes the files that are to take the place of others."""
READY: Final = "ready"
"""In ``ASIDE`` of the records: all files are made, and are being put in their place."""

Units = npt.NDArray[np.void]


class HeldFile:
    """A file that is open as long as somebody refers to this."""

    __slots__ = ("_descriptor", "_path", "size")

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = open_read_only(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(path, error) from error
        self.size = os.fstat(self._descriptor).st_size

    def read(self, at: int, size: int) -> bytes:
        """Bytes from ``at`` on; fewer at the end."""
        try:
            return os.pread(self._descriptor, size, at)
        except OSError as error:
            raise unreadable(self._path, error) from error

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class MadeList:
    """A list that was made of records, as if it were in a file."""

    def __init__(self, units: Units) -> None:
        self._data = units.tobytes()
        self.size = len(self._data)

    def read(self, at: int, size: int) -> bytes:
        """As ``HeldFile.read``."""
        return self._data[at : at + size]


@dataclass(frozen=True, slots=True)
class CompactedFile:
    """Records and the units that list them."""

    base: int  # position of the first record
    records: HeldFile
    listed: HeldFile | MadeList  # that of the units
    count: int  # units that name a record

    @classmethod
    def open(cls, folders: tuple[str, str], base: int) -> CompactedFile:
        """Open a pair; FileNotFoundError: one is not there."""
        records, listed = (HeldFile(f"{folder}/{base:0{NAME_DIGITS}d}") for folder in folders)
        every = range(listed.size // BATCH_ITEM_BYTES)
        count = bisect_left(every, True, key=lambda at: not is_batch(_units(listed, at, 1))[0])
        return cls(base, records, listed, count)

    @classmethod
    def relisted(cls, folders: tuple[str, str], base: int) -> CompactedFile:
        """Open the records, and make their list; FileNotFoundError: they are not there."""
        records = HeldFile(f"{folders[0]}/{base:0{NAME_DIGITS}d}")
        data = records.read(0, records.size)
        walk = walk_records(data, 0, len(data), size_max=len(data))
        block = parse_records(data, walk.positions, walk.sizes)
        units = np.zeros(len(block), BATCH_ITEM)
        units["physical_offset"], units["size"] = base + walk.positions, walk.sizes
        units["tag_code"] = tag_hashes(block)
        units["store_timestamp_ms"] = block.store_timestamps_ms
        units["base_offset"], units["count"] = block.queue_offsets, 1
        units["compacted_offset"] = -1
        ascends = np.diff(block.queue_offsets, prepend=-1) > 0
        wrong = np.flatnonzero(~ascends | (block.faults != RecordFault.OK))
        count = int(wrong[0]) if len(wrong) else len(units)
        return cls(base, records, MadeList(units[:count]), count)

    @property
    def is_all_listed(self) -> bool:
        """Whether no record stands behind the last that is listed."""
        head = self.records.read(self.end - self.base, SIZE_AND_MAGIC.size)
        magics = {MAGIC_V1, MAGIC_V2}
        return len(head) < SIZE_AND_MAGIC.size or SIZE_AND_MAGIC.unpack(head)[1] not in magics

    def units(self, first: int, last: int) -> Units:
        """The units ``[first, last)``, as far as they name records."""
        return _units(self.listed, first, min(last, self.count) - first)

    @property
    def first(self) -> int:
        """Queue offset of the first record; there must be one."""
        return int(self.units(0, 1)["base_offset"][0])

    @property
    def last(self) -> int:
        """Likewise of the last."""
        return int(self.units(self.count - 1, self.count)["base_offset"][0])

    @property
    def end(self) -> int:
        """Position behind the last record."""
        if not self.count:
            return self.base
        unit = self.units(self.count - 1, self.count)[0]
        return int(unit["physical_offset"]) + int(unit["size"])

    def first_at(self, field: str, value: int) -> int:
        """Number of the first unit whose ``field``, which rises, is not below ``value``; ``count``: of none."""
        return bisect_left(
            range(self.count), value, key=lambda at: int(self.units(at, at + 1)[field][0])
        )

    def data(self, units: Units) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The bytes from the first record on to the last one, and where each begins in them."""
        places = units["physical_offset"].astype(np.int64)
        begin, end = int(places.min()), int((places + units["size"]).max())
        return self.records.read(begin - self.base, end - begin), places - begin


def _better(folders: tuple[str, str], base: int, queue: MessageQueue) -> CompactedFile:
    """A file with its list, or with one made of its records if that has more of them, or its own does not fit."""
    made = CompactedFile.relisted(folders, base)
    try:
        found = CompactedFile.open(folders, base)
    except FileNotFoundError:
        return made
    is_well = CompactionLog(queue, (found,)).fits and found.is_all_listed
    return found if is_well or made.count < found.count else made


def _units(file: HeldFile | MadeList, first: int, count: int) -> Units:
    data = file.read(first * BATCH_ITEM_BYTES, max(0, count) * BATCH_ITEM_BYTES)
    return np.frombuffer(data, BATCH_ITEM)


class CompactionLog:
    """The messages of one compacted queue, in files of their own. Read-only; for any thread."""

    def __init__(self, queue: MessageQueue, files: tuple[CompactedFile, ...]) -> None:
        self.queue = queue
        # In order; of the last one, which is written to, ``count`` is what was there when it was opened.
        self.files = files
        self._full = [file for file in files if file.count]
        self._lasts = [file.last for file in self._full]
        self.first = self._full[0].first if self._full else 0
        self.end = self._lasts[-1] + 1 if self._full else 0

    @classmethod
    def open(cls, root: str, queue: MessageQueue, *, relists: bool = False) -> CompactionLog | None:
        """The log of a queue as it is now; None when it has none, or is being changed.

        ``relists``: make the lists anew that do not fit; only where nobody changes it, since what two passes have left
        would be taken for one log.
        """
        folders = folders_of(root, queue)
        aside = Path(folders[0], ASIDE, READY)
        bases = list_bases(folders[0])
        if not bases or aside.exists() or (list_bases(folders[1]) != bases and not relists):
            return None
        if relists and any(Path(folders[0]).glob("*.delete")):
            return None  # a broker's: it has not come to the end of replacing them, or of deleting them
        try:
            found = cls(queue, tuple(CompactedFile.open(folders, base) for base in bases))
        except FileNotFoundError:
            if not relists:
                return None
            found = cls(queue, ())
        if found.files and found.fits:
            return found if list_bases(folders[0]) == bases and not aside.exists() else None
        if not relists:
            return None
        found = cls(queue, tuple(_better(folders, base, queue) for base in bases))
        return found if found.fits else None

    @property
    def fits(self) -> bool:
        """Whether each file's list and its records are of one pass, by the first record and the last, and it has all."""
        closed = self.files[:-1]
        return all(map(self._is_of_one_pass, self.files)) and all(
            file.count and file.is_all_listed for file in closed
        )

    def _is_of_one_pass(self, file: CompactedFile) -> bool:
        # Each by itself: what lies between is not read.
        ends = {0, file.count - 1} if file.count else set()
        return all(self.block(file, file.units(at, at + 1)).is_sound for at in ends)

    @property
    def has_grown(self) -> bool:
        """Whether the last file, which is written to, lists more than when this was opened."""
        last = self.files[-1]
        return bool(is_batch(_units(last.listed, last.count, 1)).any())

    def block(self, file: CompactedFile, units: Units) -> RecordBlock:
        """The records that units list, each held against its unit; those that fail have faults."""
        data, positions = file.data(units)
        block = parse_records(data, positions, units["size"].astype(np.int32))
        check_records(block, expected_physical=units["physical_offset"].astype(np.int64))
        every = np.arange(len(block))
        mine = topics_equal(block, every, self.queue.topic) & (
            block.queue_ids == self.queue.queue_id
        )
        mine &= block.queue_offsets == units["base_offset"]
        block.faults[~mine & (block.faults == RecordFault.OK)] = RecordFault.PHYSICAL_OFFSET
        return block

    def chunks(
        self, start: int, *, count_max: int, bytes_max: int = 1 << 62
    ) -> Iterator[tuple[CompactedFile, Units]]:
        """Files and units from the first at or above a queue offset on, some at a time."""
        for file in self._full[bisect_left(self._lasts, start) :]:
            at = file.first_at("base_offset", start)
            while at < file.count:
                units = file.units(at, at + count_max)
                sizes = np.cumsum(units["size"].astype(np.int64))
                units = units[: max(1, int(np.searchsorted(sizes, bytes_max, "right")))]
                yield file, units
                at += len(units)

    def offset_by_time(self, time_ms: int) -> int | None:
        """The first queue offset stored at or after a time (UTC); None: all are older."""
        times = [
            int(file.units(file.count - 1, file.count)["store_timestamp_ms"][0])
            for file in self._full
        ]
        for file in self._full[bisect_left(times, time_ms) :]:
            at = file.first_at("store_timestamp_ms", time_ms)
            return int(file.units(at, at + 1)["base_offset"][0])
        return None

    def last_before(self, offset: int) -> int | None:
        """The last queue offset below one; None: there is none."""
        at = bisect_left(self._lasts, offset)
        if at < len(self._full):
            file = self._full[at]
            number = file.first_at("base_offset", offset)
            if number:
                return int(file.units(number - 1, number)["base_offset"][0])
        return self._lasts[at - 1] if at else None

    def read(self, start: int, end: int, *, bytes_max: int, count_max: int) -> RecordBatch:
        """Queue offsets in ``[start, end)``: messages, and holes where there is none any more; one record at least."""
        end = min(end, start + count_max)
        file, units = next(
            self.chunks(start, count_max=count_max, bytes_max=bytes_max),
            (None, np.empty(0, BATCH_ITEM)),
        )
        units = units[
            : bisect_right(range(len(units)), end - 1, key=lambda at: int(units["base_offset"][at]))
        ]
        if file is None or not len(units):
            return self._batch(start, end, None, units)
        following = next(self.chunks(int(units["base_offset"][-1]) + 1, count_max=1), None)
        reached = end if following is None else int(following[1]["base_offset"][0])
        return self._batch(start, min(end, reached), self.block(file, units), units)

    def _batch(self, start: int, end: int, block: RecordBlock | None, units: Units) -> RecordBatch:
        count = end - start
        positions, sizes = np.zeros(count, np.int64), np.zeros(count, np.int32)
        tags, times = np.full(count, int(HoleReason.COMPACTED)), np.full(count, -1, np.int64)
        data: bytes | memoryview = b""
        damaged = []
        if block is not None:
            data = memoryview(block.buffer)
            is_sound = block.faults == RecordFault.OK
            at = units["base_offset"].astype(np.int64) - start
            positions[at] = block.positions
            sizes[at] = np.where(is_sound, block.sizes, 0)
            tags[at] = np.where(is_sound, units["tag_code"], int(HoleReason.DAMAGED))
            times[at] = units["store_timestamp_ms"]
            for number in np.flatnonzero(~is_sound).tolist():
                place, size = int(block.positions[number]), int(block.sizes[number])
                fault = RecordFault(int(block.faults[number]))
                damaged.append(
                    Quarantined(
                        QueueOffset(int(units["base_offset"][number])),
                        PhysicalOffset(-1),
                        HoleReason.DAMAGED,
                        f"in the compaction log: {fault.name}",
                        bytes(data[place : place + size]),
                    )
                )
        known = np.maximum.accumulate(np.where(times >= 0, np.arange(count), 0))
        return RecordBatch(
            self.queue,
            QueueOffset(start),
            data,
            positions,
            sizes,
            tags.astype(np.int64),
            times[known],
            np.full(count, -1, np.int64),
            damaged,
        )


_SWAP_S: Final = 2.0
_AGAIN_S: Final = 0.05
_LOGS_MAX: Final = 16


class CompactionLogs:
    """Those of one store, opened again when a pass has changed one, or records were added. For any thread.

    A log holds all of its files open; of ``_LOGS_MAX`` queues at most they are kept for the next read.
    """

    def __init__(self, root: str, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[MessageQueue, tuple[tuple[int, int], CompactionLog]] = {}

    def log(self, queue: MessageQueue, limit: int) -> CompactionLog:
        """The log of a queue, empty where it has none; as it is now, unless it reaches ``limit``.

        A pass of another process puts files in their place within moments, for which this waits; DataError: it stays half
        put in place.
        """
        folder = folders_of(self._root, queue)[0]
        for _ in range(int(_SWAP_S / _AGAIN_S)):
            stamp = directory_stamp(folder)
            if stamp is None or not list_bases(folder):
                return CompactionLog(queue, ())
            known = self._open.get(queue)
            if known is not None and (
                known[1].end >= limit or (known[0] == stamp and not known[1].has_grown)
            ):
                return known[1]
            found = CompactionLog.open(self._root, queue)
            if found is not None:
                return self._kept(queue, stamp, found)
            self._clock.wait(threading.Event(), _AGAIN_S)
        found = CompactionLog.open(self._root, queue, relists=True)
        if found is not None:
            return self._kept(queue, directory_stamp(folder) or (0, 0), found)
        raise DataError(
            "the compaction log of this queue is half put in place, or does not fit its list",
            where=folder,
            do="stop the broker, and let `tiered store recover` open the store, or a broker make it again",
        )

    def _kept(
        self, queue: MessageQueue, stamp: tuple[int, int], found: CompactionLog
    ) -> CompactionLog:
        with self._lock:
            self._open.pop(queue, None)
            self._open[queue] = stamp, found
            if len(self._open) > _LOGS_MAX:
                del self._open[next(iter(self._open))]
        return found


def folders_of(root: str, queue: MessageQueue) -> tuple[str, str]:
    """Where a queue's records and units are."""
    name = f"{queue.topic}/{queue.queue_id}"
    return f"{root}/{RECORDS_DIRECTORY}/{name}", f"{root}/{UNITS_DIRECTORY}/{name}"


def file_sizes(root: str) -> tuple[int, int] | None:
    """Lengths of files of records and of units, as the longest of all queues has them; None: there are none.

    A shorter one was cut.
    """
    found: list[tuple[int, int]] = []
    for records in sorted(Path(root, RECORDS_DIRECTORY).glob("*/[0-9]*/")):
        listed = Path(root, UNITS_DIRECTORY, records.parent.name, records.name)
        for base in list_bases(str(records)):
            name = f"{base:0{NAME_DIGITS}d}"
            try:
                found.append(((records / name).stat().st_size, (listed / name).stat().st_size))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise InvalidError(
                    f"it cannot be read: {error.strerror}", where=str(listed)
                ) from error
    return (max(one[0] for one in found), max(one[1] for one in found)) if found else None
