"""Writing into rows of equally long files while another thread brings them to the disk.

**Contract.** One thread writes; any thread may ``sync``. ``sync`` covers every write that ended before it began; a write
during it is left for the next. A file that could not be synced stays marked, and the error says so: nothing written
since the last good ``sync`` may be taken for stored. Every file has its full length from birth and is sparse, unless
``preallocate``. A crash leaves tails that may be anything; recovery decides what counts.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiered.local.files import NAME_DIGITS, list_bases, open_regular
from tiered.store.durable import sync_folder

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FLAGS: Final = os.O_RDWR | os.O_CREAT
OPEN_MAX: Final = 256


class RowWriter:
    """Files of one store that are written in rows."""

    def __init__(self, *, preallocate: bool = False) -> None:
        self._preallocate = preallocate
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._dirty: set[str] = set()
        self._dirty_folders: set[str] = set()

    def write(self, folder: str, file_bytes: int, offset: int, data: Buffer) -> None:
        """Put ``data`` at byte ``offset`` of the row in ``folder``; it may go over the ends of files.

        Raises:
            OSError: It was not written, or not all of it.
        """
        view = memoryview(data).cast("B")
        while view:
            at = offset % file_bytes
            part = view[: file_bytes - at]
            self._write(f"{folder}/{offset - at:0{NAME_DIGITS}d}", file_bytes, at, part)
            offset, view = offset + len(part), view[len(part) :]

    def sync(self) -> None:
        """Bring to the disk what was written before this call.

        Raises:
            OSError: Some of it may not be there.
        """
        with self._lock:
            files, self._dirty = self._dirty, set()
            folders, self._dirty_folders = self._dirty_folders, set()
        try:
            for path in sorted(files):
                _sync_file(path)
            for folder in sorted(folders):
                sync_folder(folder)
        except BaseException:
            with self._lock:
                self._dirty |= files
                self._dirty_folders |= folders
            raise

    def forget(self, path: str) -> None:
        """A file is about to be deleted: close it, and do not sync it."""
        with self._lock:
            self._dirty.discard(path)
            descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def mark(self, path: str) -> None:
        """Have the next ``sync`` cover a file that was changed otherwise."""
        with self._lock:
            self._dirty.add(path)

    def mark_folder(self, folder: str) -> None:
        """Likewise for the names in a folder."""
        with self._lock:
            self._dirty_folders.add(folder)

    def close(self) -> None:
        """Close all files, without ``sync``."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _write(self, path: str, file_bytes: int, at: int, part: memoryview) -> None:
        with self._lock:
            descriptor = self._descriptor(path, file_bytes)
        try:
            while part:
                done = os.pwrite(descriptor, part, at)
                at, part = at + done, part[done:]
        finally:  # not before: a sync in between would take the mark, and miss the bytes
            self.mark(path)

    def _descriptor(self, path: str, file_bytes: int) -> int:
        descriptor = self._open.get(path)
        if descriptor is not None:
            self._open.move_to_end(path)
            return descriptor
        self._make_folder(Path(path).parent)
        descriptor = open_regular(path, _FLAGS)
        try:
            if os.fstat(descriptor).st_size < file_bytes:
                os.ftruncate(descriptor, file_bytes)
                self._dirty_folders.add(os.fspath(Path(path).parent))
                if self._preallocate:
                    os.posix_fallocate(descriptor, 0, file_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._open[path] = descriptor
        if len(self._open) > OPEN_MAX:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            self._dirty_folders.add(os.fspath(folder.parent))


def cut_row(rows: RowWriter, folder: str, file_bytes: int, end: int) -> None:
    """Make a row zero from byte ``end`` on: its file's rest is a hole, later files are gone. ``rows.sync`` covers it.

    Raises:
        OSError: Not all of it was done.
    """
    for base in list_bases(folder):
        path = f"{folder}/{base:0{NAME_DIGITS}d}"
        if base >= end:
            Path(path).unlink()
        elif base + file_bytes > end:
            os.truncate(path, end - base)
            os.truncate(path, file_bytes)
            rows.mark(path)
    rows.mark_folder(folder)


def _sync_file(path: str) -> None:
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return  # it has expired
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
