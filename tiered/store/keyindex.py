"""The key index of a store: a row of index files, each named by the time at which it was made.

**Contract.** One thread puts, in log order; any thread may query. A full file is on the disk before the next one is
begun. A put of records that are indexed already (by physical offset) does nothing.
"""

from __future__ import annotations

import os
import threading
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiered.errors import InvalidError
from tiered.local.files import list_names
from tiered.store.durable import make_folder, sync_folder
from tiered.store.keyfile import KeyFile, Longs
from tiered.store.options import INDEX_HEADER_BYTES, INDEX_ITEM_BYTES, INDEX_SLOT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.clock import Clock

INDEX_DIRECTORY: Final = "index"
_NAME_DIGITS: Final = 17
_USUAL_ITEMS_A_SLOT: Final = 4


class KeyIndex:
    """Index files of one store."""

    def __init__(self, root: str, slots: int, items: int, clock: Clock) -> None:
        """Open what is there.

        Raises:
            OSError: A file cannot be opened.
        """
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
    def item_count(self) -> int:
        """Keys in all files."""
        return sum(file.count - 1 for file in self._files)

    @property
    def newest_begin(self) -> tuple[int, int] | None:
        """Store time (UTC ms) and physical offset of the first record in the newest file; None without one."""
        newest = self._files[-1] if self._files else None
        if newest is None or newest.count <= 1:
            return None
        return newest.begin_ms, newest.begin_physical

    def put(self, hashes: Longs, physical_offsets: Longs, times_ms: Longs) -> None:
        """Add keys in log order; see ``KeyFile.put``.

        Raises:
            OSError: The disk refuses it; some may have been put, which a later put of the same leaves alone.
        """
        known = self.end_physical
        if len(physical_offsets) and int(physical_offsets[0]) <= known:
            fresh = physical_offsets > known
            hashes, physical_offsets = hashes[fresh], physical_offsets[fresh]
            times_ms = times_ms[fresh]
        while len(hashes):
            if not self._files or self._files[-1].is_full:
                self._roll()
            done = self._files[-1].put(hashes, physical_offsets, times_ms)
            hashes, physical_offsets, times_ms = (
                hashes[done:],
                physical_offsets[done:],
                times_ms[done:],
            )

    def find(self, hash_value: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        """Physical offsets of records that may have a key of this hash, newest first."""
        with self._lock:
            files = list(self._files)
        for file in reversed(files):
            if file.count > 1 and file.begin_ms <= end_ms and file.end_ms >= begin_ms:
                yield from file.find(hash_value, begin_ms, end_ms)
            if file.count > 1 and file.begin_ms < begin_ms:
                break

    def cut(self, physical_offset: int) -> None:
        """Leave only what is below a physical offset; recovery puts the rest again.

        Raises:
            OSError: Not all of it was done.
        """
        while self._files:
            if self._files[-1].cut(physical_offset, -1):
                self._files[-1].sync()
                break
            self._delete(self._files[-1])

    def expire(self, log_min: int) -> int:
        """Delete the files whose records are all gone from the log; how many.

        Raises:
            OSError: One could not be deleted.
        """
        gone = [file for file in self._files[:-1] if file.end_physical < log_min]
        for file in gone:
            self._delete(file)
        return len(gone)

    def sync(self) -> None:
        """Bring the newest file to the disk; the others are there.

        Raises:
            OSError: It may not be there.
        """
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
            self._files[-1].sync()
        now_ms = int(self._clock.now_ms())
        last = os.path.basename(self._files[-1].path) if self._files else ""  # noqa: PTH119 (text only)
        while (name := _name(now_ms)) <= last:
            now_ms += 1
        file = KeyFile(f"{self._folder}/{name}", self._slots, self._items)
        with self._lock:
            self._files = [*self._files, file]
        sync_folder(self._folder)

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


def sizes_on_disk(root: str, slots: int, items: int) -> tuple[int, int]:
    """Slots and items of the files of a store; those given when they fit, or there are no files.

    Raises:
        InvalidError: The files have a length that says nothing: the broker's settings are needed.
    """
    for path in index_paths(root):
        size = Path(path).stat().st_size
        if size == INDEX_HEADER_BYTES + INDEX_SLOT_BYTES * slots + INDEX_ITEM_BYTES * items:
            continue
        per_slot = INDEX_SLOT_BYTES + INDEX_ITEM_BYTES * _USUAL_ITEMS_A_SLOT
        slots, rest = divmod(size - INDEX_HEADER_BYTES, per_slot)
        items = slots * _USUAL_ITEMS_A_SLOT
        if rest or slots <= 0:
            raise InvalidError(
                f"an index file of {size} bytes",
                where=path,
                do="give index_slots and index_items as the broker's maxHashSlotNum and maxIndexNum",
            )
    return slots, items


def _name(now_ms: int) -> str:
    """In the local time zone, as a broker names its files."""
    time = datetime.fromtimestamp(now_ms // 1000).astimezone()
    return f"{time:%Y%m%d%H%M%S}{now_ms % 1000:03d}"
