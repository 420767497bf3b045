"""Writing into rows of equally long files, each named by the byte of the row at which it begins.

**Contract.** Every file has its full length from birth and is sparse, as a broker's. What was written is visible to
readers of this machine at once, and survives a crash of the machine only after ``sync``. At most ``OPEN_MAX``
descriptors are held, least recently used first out. For one thread at a time. A crash leaves files whose tails may be
anything; what counts is decided by the store's recovery.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiered.local.files import NAME_DIGITS

if TYPE_CHECKING:
    from typing_extensions import Buffer

OPEN_MAX: Final = 256
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class RowFiles:
    """The files of one store that are written in rows."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._dirty: dict[str, None] = {}
        self._dirty_folders: dict[str, None] = {}

    def write(self, folder: str, file_bytes: int, offset: int, data: Buffer) -> None:
        """Put ``data`` at byte ``offset`` of the row in ``folder``; it may go over the ends of files.

        Args:
            folder: Made when it is missing, with its parents.
            file_bytes: Size of each file of the row.
            offset: Of the first byte, in the row.
            data: What to write.

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
        """Bring everything that was written to the disk.

        Raises:
            OSError: Some of it is not there; it must not be taken for stored.
        """
        for path in list(self._dirty):
            os.fdatasync(self._descriptor(path, None))
            del self._dirty[path]
        for folder in list(self._dirty_folders):
            sync_folder(folder)
            del self._dirty_folders[folder]

    def close(self) -> None:
        """Close all files, without ``sync``."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _write(self, path: str, file_bytes: int, at: int, part: memoryview) -> None:
        descriptor = self._descriptor(path, file_bytes)
        self._dirty[path] = None
        while part:
            done = os.pwrite(descriptor, part, at)
            at, part = at + done, part[done:]

    def _descriptor(self, path: str, file_bytes: int | None) -> int:
        """The open file, made with its full length when it is not there; None: it is there."""
        descriptor = self._open.get(path)
        if descriptor is not None:
            self._open.move_to_end(path)
            return descriptor
        if file_bytes is not None:
            self._make_folder(Path(path).parent)
        descriptor = os.open(path, _FLAGS, 0o644)
        self._open[path] = descriptor
        if file_bytes is not None and os.fstat(descriptor).st_size < file_bytes:
            os.ftruncate(descriptor, file_bytes)
            self._dirty_folders[os.fspath(Path(path).parent)] = None
        if len(self._open) > OPEN_MAX:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            self._dirty_folders[os.fspath(folder.parent)] = None


def sync_folder(folder: str) -> None:
    """Bring a folder's names to the disk.

    Raises:
        OSError: They may not be there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a whole small file, on the disk, so that readers see the old or the new one.

    Raises:
        OSError: Perhaps not done.
    """
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(os.fspath(path.parent))
