"""The key index of a store: a row of index files, each named by the time at which it was made.

**Contract.** One thread puts, in log order; any thread may query. A full file is on the disk before the next one is
begun. A put of records that are indexed already (by physical offset) does nothing.
"""

from __future__ import annotations

import mmap
import os
import threading
from datetime import datetime
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.errors import InvalidError, StoreUnavailableError
from tiered.local.mapped_file_queue import list_names, open_regular
from tiered.store.disk import make_folder, sync_folder
from tiered.store.store_options import INDEX_HEADER_BYTES, INDEX_ITEM_BYTES, INDEX_SLOT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.clock import Clock


# -- one file --------------------------------------------------------------------------------------

Longs = npt.NDArray[np.int64]
ITEM: Final = np.dtype(
    [("hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
)
_HEADER: Final = Struct(">qqqqii")
_ROOM_BYTES: Final = 4 << 20
_INT_MAX: Final = 2**31 - 1
_SECOND_MS: Final = 1000


class KeyFile:
    """An open index file.

    ====== =========== ==================================================================
    offset bytes       field
    ====== =========== ==================================================================
    0      8           begin_ms: store time of the first item
    8      8           end_ms: of the last item
    16     8           begin_physical
    24     8           end_physical
    32     4           slots in use
    36     4           number of the next item; items count from 1
    40     4 x slots   number of the newest item of each slot; 0: none
    ...    20 x items  hash 4, physical offset 8, seconds since begin_ms 4, previous item 4
    ====== =========== ==================================================================

    **Contract.** One thread puts; any thread may query or ``sync``. Items are written, then slots, then the header: a
    reader sees at most that the newest items are missing. Room is taken from the disk before it is written to, since a
    write through a mapping cannot fail cleanly. After a crash of the machine only what the checkpoint covers is to be
    believed; ``cut`` goes back to it.
    """

    def __init__(self, path: str, slots: int, items: int) -> None:
        """Open, or make with its full length."""
        self.path = path  # where it is
        self._slots = slots
        self._items = items
        size = file_bytes_of(slots, items)
        self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(self._descriptor).st_size != size:
                os.ftruncate(self._descriptor, size)
            self._items_at = INDEX_HEADER_BYTES + INDEX_SLOT_BYTES * slots
            self._room_end = 0
            self._take_room(self._items_at)
            self._map = mmap.mmap(self._descriptor, size)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._slot_table = np.frombuffer(self._map, ">i4", slots, INDEX_HEADER_BYTES)
        self._item_table = np.frombuffer(self._map, ITEM, items, self._items_at)
        header = _HEADER.unpack_from(self._map)
        # Of its first and last item.
        self.begin_ms, self.end_ms, self.begin_physical, self.end_physical = header[:4]
        self._used: int = header[4]
        self.count: int = min(max(1, header[5]), items)  # number of the next item (1: empty)

    @property
    def is_full(self) -> bool:
        """No item can be put any more."""
        return self.count >= self._items

    def put(self, hashes: Longs, physical_offsets: Longs, times_ms: Longs) -> int:
        """Add keys in log order (three int64[n]); how many fit. After an OSError, of a full disk, none was put."""
        count = min(len(hashes), self._items - self.count)
        if not count:
            return 0
        self._take_room(self._items_at + INDEX_ITEM_BYTES * (self.count + count))
        columns = hashes, physical_offsets, times_ms
        hashes, physical_offsets, times_ms = (column[:count] for column in columns)
        if self.count == 1:
            self.begin_ms, self.begin_physical = int(times_ms[0]), int(physical_offsets[0])
        first = self.count
        slots = hashes % self._slots
        previous, fresh = self._chain(slots, first)
        items = self._item_table[first : first + count]
        items["hash"], items["physical_offset"] = hashes, physical_offsets
        seconds = np.floor_divide(times_ms - self.begin_ms, 1000)
        items["seconds"] = np.clip(seconds, 0, _INT_MAX)
        items["previous"] = previous
        self._slot_table[slots] = np.arange(first, first + count)  # of equal ones the last stays
        self._used += fresh
        self.count = first + count
        self.end_ms, self.end_physical = int(times_ms[-1]), int(physical_offsets[-1])
        self._write_header()
        return count

    def find(self, hash_value: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Physical offsets of the records that may have a key of this ``key_hash``, newest first; times to the second."""
        number, count = int(self._slot_table[hash_value % self._slots]), self.count
        while 0 < number < count:
            item = self._item_table[number]
            time_ms = self.begin_ms + int(item["seconds"]) * 1000
            # The time is cut to seconds since the first item's.
            if time_ms + _SECOND_MS <= begin_ms:
                return
            if int(item["hash"]) == hash_value and time_ms <= end_ms:
                yield int(item["physical_offset"])
            before = int(item["previous"])
            if before >= number:
                return
            number = before

    def cut(self, physical_offset: int, end_ms: int) -> int:
        """Leave only the items below a physical offset, and make the hash table of those anew; how many are left.

        ``end_ms``: store time of the last one that stays; less than 0: as the item tells, to the second.
        """
        count = self._believable(physical_offset)
        kept = self._item_table[1:count]
        slots = kept["hash"].astype(np.int64) % self._slots
        self._slot_table[:] = 0
        self._slot_table[slots] = np.arange(1, count)
        self._used = int(np.count_nonzero(self._slot_table))
        self._clear_behind(count)
        self.count = count
        if count > 1:
            last_ms = self.begin_ms + int(kept["seconds"][-1]) * 1000
            self.begin_physical = int(kept["physical_offset"][0])
            self.end_ms = max(end_ms, last_ms) if end_ms >= 0 else last_ms
            self.end_physical = int(kept["physical_offset"][-1])
        else:
            self.begin_ms = self.end_ms = self.begin_physical = self.end_physical = 0
        self._write_header()
        return count - 1

    def sync(self) -> None:
        """Bring it to the disk."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close it, without ``sync``. Queries under way end well: the mapping goes with the last of them."""
        os.close(self._descriptor)

    def _chain(self, slots: Longs, first: int) -> tuple[Longs, int]:
        """The item that each new one follows in its slot, and how many slots come into use."""
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        leads = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        before = np.concatenate(([0], first + order[:-1]))
        stored = self._slot_table[ordered].astype(np.int64)
        previous = np.empty(len(slots), np.int64)
        previous[order] = np.where(leads, stored, before)
        return previous, int((leads & (stored == 0)).sum())

    def _believable(self, physical_offset: int) -> int:
        """One past the last of the items that are below ``physical_offset`` and in log order."""
        items = self._item_table[1:]
        low, high = 0, len(items)
        while low < high:
            middle = (low + high) // 2
            place = int(items["physical_offset"][middle])
            is_kept = (place or int(items["hash"][middle])) and 0 <= place < physical_offset
            low, high = (middle + 1, high) if is_kept else (low, middle)
        places = items["physical_offset"][:low].astype(np.int64)
        wrong = (places < 0) | (places >= physical_offset)  # what was written last may be anything
        wrong[1:] |= np.diff(places) < 0
        return (int(np.argmax(wrong)) if wrong.any() else low) + 1

    def _clear_behind(self, count: int) -> None:
        size, at = len(self._map), self._items_at + INDEX_ITEM_BYTES * count
        os.ftruncate(self._descriptor, at)
        os.ftruncate(self._descriptor, size)
        self._room_end = 0
        self._take_room(at)

    def _take_room(self, end: int) -> None:
        if end > self._room_end:
            size = os.fstat(self._descriptor).st_size
            wanted = min(size, end + _ROOM_BYTES)
            os.posix_fallocate(self._descriptor, self._room_end, wanted - self._room_end)
            self._room_end = wanted

    def _write_header(self) -> None:
        _HEADER.pack_into(
            self._map,
            0,
            self.begin_ms,
            self.end_ms,
            self.begin_physical,
            self.end_physical,
            self._used,
            self.count,
        )


INDEX_DIRECTORY: Final = "index"
_NAME_DIGITS: Final = 17
_USUAL_ITEMS_A_SLOT: Final = 4


class KeyIndex:
    """Index files of one store."""

    def __init__(self, root: str, slots: int, items: int, clock: Clock) -> None:
        self._folder = f"{root}/{INDEX_DIRECTORY}"
        self._slots, self._items = slots, items
        self._clock = clock
        self._lock = threading.Lock()
        self._files = [KeyFile(path, slots, items) for path in index_paths(root)]

    @property
    def end_physical(self) -> int:
        """Physical offset of the last record that is indexed; -1 without one."""
        return max((file.end_physical for file in self._files if file.count > 1), default=-1)

    @property
    def newest_begin(self) -> tuple[int, int] | None:
        """Store time (UTC ms) and physical offset of the first record in the newest file; None without one."""
        newest = self._files[-1] if self._files else None
        if newest is None or newest.count <= 1:
            return None
        return newest.begin_ms, newest.begin_physical

    def put(self, hashes: Longs, physical_offsets: Longs, times_ms: Longs) -> None:
        """As ``KeyFile.put``; after an OSError some may have been put, which a later put of the same leaves alone."""
        known, columns = self.end_physical, [hashes, physical_offsets, times_ms]
        if len(physical_offsets) and int(physical_offsets[0]) <= known:
            columns = [column[physical_offsets > known] for column in columns]
        while len(columns[0]):
            if not self._files or self._files[-1].is_full:
                self._roll()
            done = self._files[-1].put(*columns)
            columns = [column[done:] for column in columns]

    def find(self, hash_value: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Physical offsets of records that may have a key of this hash, newest first."""
        with self._lock:
            files = list(self._files)
        for file in reversed(files):
            # After a cut the end is known to the second only.
            is_near = file.begin_ms <= end_ms and file.end_ms + _SECOND_MS > begin_ms
            if file.count > 1 and is_near:
                yield from file.find(hash_value, begin_ms, end_ms)
            if file.count > 1 and file.begin_ms < begin_ms:
                break

    def cut(self, physical_offset: int) -> None:
        """Leave only what is below a physical offset; recovery puts the rest again."""
        while self._files:
            if self._files[-1].cut(physical_offset, -1):
                self._files[-1].sync()
                break
            self._delete(self._files[-1])

    def expire(self, log_min: int) -> int:
        """Delete the files whose records are all gone from the log; how many."""
        gone = [file for file in self._files[:-1] if file.end_physical < log_min]
        for file in gone:
            self._delete(file)
        return len(gone)

    def sync(self) -> None:
        """Bring the newest file to the disk; the others are there."""
        files = self._files[-1:]
        for file in files:
            file.sync()

    def close(self) -> None:
        """Close the files, without ``sync``."""
        with self._lock:
            for file in self._files:
                file.close()
            self._files = []

    def _roll(self) -> None:
        make_folder(Path(self._folder))
        if self._files:
            self._sync_for_good(self._files[-1].sync)
        now_ms = int(self._clock.now_ms())
        last = os.path.basename(self._files[-1].path) if self._files else ""  # noqa: PTH119 (text only)
        while (name := _name(now_ms)) <= last:
            now_ms += 1
        path = f"{self._folder}/{name}"
        try:
            file = KeyFile(path, self._slots, self._items)
        except OSError:
            Path(path).unlink(missing_ok=True)  # the next try has another name
            raise
        with self._lock:
            self._files = [*self._files, file]
        self._sync_for_good(lambda: sync_folder(self._folder))

    def _sync_for_good(self, sync: Callable[[], None]) -> None:
        """Sync; what fails for lack of room must not look like a write that may be tried again."""
        try:
            sync()
        except OSError as error:
            raise StoreUnavailableError(
                f"the key index could not be brought to the disk: {error}",
                where=self._folder,
                do="open the store again: it recovers what is in doubt",
            ) from error

    def _delete(self, file: KeyFile) -> None:
        with self._lock:
            self._files = [one for one in self._files if one is not file]
            file.close()
        Path(file.path).unlink()


def index_paths(root: str) -> list[str]:
    """The index files of a store, oldest first."""
    folder = f"{root}/{INDEX_DIRECTORY}"
    return [
        f"{folder}/{name}"
        for name in list_names(folder)
        if len(name) == _NAME_DIGITS and name.isascii() and name.isdigit()
    ]


def sizes_on_disk(root: str, slots: int, items: int, *, is_made: bool) -> tuple[int, int]:
    """Slots and items of the files of a store; those given when they fit, or there are no files.

    The longest file tells: a shorter one was cut. ``is_made``: those given are of how the store was made, and no shorter
    file says anything. InvalidError: the lengths say nothing; the broker's settings are needed.
    """
    lengths = {path: Path(path).stat().st_size for path in index_paths(root)}
    path, size = max(lengths.items(), key=lambda one: one[1], default=("", 0))
    usual = file_bytes_of(slots, items)
    # 0: a process ended between making the file and giving it its length; opening gives it.
    if size in (0, usual) or (is_made and size < usual):
        return slots, items
    per_slot = INDEX_SLOT_BYTES + INDEX_ITEM_BYTES * _USUAL_ITEMS_A_SLOT
    slots, rest = divmod(size - INDEX_HEADER_BYTES, per_slot)
    if rest or slots <= 0 or is_made:
        raise InvalidError(
            f"an index file of {size} bytes",
            where=path,
            do="give index_slots and index_items as the broker's maxHashSlotNum and maxIndexNum",
        )
    return slots, slots * _USUAL_ITEMS_A_SLOT


def has_cut_file(root: str, slots: int, items: int) -> bool:
    """Whether an index file lost some of its bytes. One of no bytes had none yet; see ``sizes_on_disk``."""
    usual = file_bytes_of(slots, items)
    return any(0 < Path(path).stat().st_size < usual for path in index_paths(root))


def file_bytes_of(slots: int, items: int) -> int:
    """Length of an index file."""
    return INDEX_HEADER_BYTES + INDEX_SLOT_BYTES * slots + INDEX_ITEM_BYTES * items


def _name(now_ms: int) -> str:
    """In the local time zone, as a broker names its files."""
    time = datetime.fromtimestamp(now_ms // 1000).astimezone()
    return f"{time:%Y%m%d%H%M%S}{now_ms % 1000:03d}"
