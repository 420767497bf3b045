"""How a store's directory is changed.

Rows of equally long files, small files and names in folders that have to survive the machine, and the lock by which one
writer holds it all. Each part says below what it promises about crashes and threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backends.local_files import LOST_AND_FOUND, advice_for
from tiered.errors import InvalidError, StoreUnavailableError
from tiered.format.broker_checkpoint import Checkpoint, encode_checkpoint
from tiered.local.layout import ABORT_FILE, LOCK_FILE, LOG_DIRECTORY, QUEUE_DIRECTORY, read_text
from tiered.local.mapped_file_queue import NAME_DIGITS, list_bases, open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Buffer

CHECKPOINT_FILE: Final = "checkpoint"
SYNCED_ALONE_MAX: Final = 32
"""So many files are synced one after the other; of more, several at a time."""
SYNC_THREADS: Final = 8


# -- small changes ---------------------------------------------------------------------------------


def sync_folder(folder: str) -> None:
    """Bring a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, so that their names survive the machine."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(os.fspath(path.parent))


NEW_SUFFIX: Final = ".new"
"""Of a file that is to take another's place; one that a crash left is nobody's."""


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a whole small file, on the disk, so that readers see the old or the new one."""
    new = path.with_name(path.name + NEW_SUFFIX)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        with os.fdopen(open_regular(os.fspath(new), flags), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):  # on a full disk it takes what others need
            new.unlink()
        raise
    new.replace(path)
    sync_folder(os.fspath(path.parent))


def replace_config(path: Path, data: bytes) -> None:
    """Likewise, as a broker does with its own: the content before stays in ``.bak``."""
    before = read_text(str(path))
    if before is not None:
        replace_file(path.with_name(path.name + ".bak"), before)
    replace_file(path, data)


# -- the lock --------------------------------------------------------------------------------------

_FLOCK: Final = struct.Struct("@hhqqi4x")
"""Linux's ``struct flock``: type, whence, start, length, process."""
_CONTENT: Final = b"lock"


class StoreLock:
    """Holds the store from construction to ``close``.

    **Contract.** On Linux it is an open-file-description lock: brokers' POSIX locks respect it, and it stays when
    another descriptor of the file is closed in this process (as ``tiered.local.layout.is_locked`` does). Elsewhere it
    is a POSIX lock, which the closing of any descriptor drops: there, do not open the same directory for reading in the
    same process. The system drops it when the process ends, however it ends.
    """

    def __init__(self, root: str) -> None:
        """Take the lock, without waiting; InvalidError: a broker or another writer holds it."""
        path = f"{root}/{LOCK_FILE}"
        self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            _take(self._descriptor)
        except (BlockingIOError, PermissionError):
            os.close(self._descriptor)
            raise InvalidError(
                "a broker or another writer works on this store",
                where=path,
                do="stop it, or name another directory",
            ) from None
        os.pwrite(self._descriptor, _CONTENT, 0)

    def close(self) -> None:
        """Give the store free. Once is enough."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _take(descriptor: int) -> None:
    if sys.platform == "linux":
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
    else:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)


# -- the directory ---------------------------------------------------------------------------------


def require_empty(root: Path, *, beside: str = "") -> None:
    """Refuse a directory that has anything in it but perhaps a file of the name ``beside``; a missing one may be made."""
    if root.exists() and not (root.is_dir() and {one.name for one in root.iterdir()} <= {beside}):
        raise InvalidError(
            "there is something already", where=str(root), do="name an empty directory"
        )


def make_new(root: Path, *, beside: str = "") -> None:
    """Make a directory, or take one that is empty but perhaps for a file of the name ``beside``."""
    require_empty(root, beside=beside)
    with Disk(str(root)):
        make_folder(root)


class StoreHold:
    """Holds one directory, from construction to ``close``.

    **Contract.** From ``begin`` to ``end`` the directory looks as under a running broker. Without ``end`` it looks as
    after a broker's crash. For one thread at a time.
    """

    def __init__(self, root: str) -> None:
        """Take the lock, as ``StoreLock`` does."""
        self.root = root
        with Disk(root):
            self._lock = StoreLock(root)

    @classmethod
    def of_new(cls, directory: str | os.PathLike[str]) -> StoreHold:
        """Hold a directory that is missing, or empty but perhaps for what a mounted file system has in it."""
        root = Path(directory).absolute()
        make_new(root, beside=LOST_AND_FOUND)
        return cls(str(root))

    def begin(self, now_ms: int) -> None:
        """Mark the store as written to, since ``now_ms`` (UTC)."""
        abort = Path(self.root, ABORT_FILE)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(open_regular(os.fspath(abort), flags), "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
        # Readers take records that were stored before this time for leftovers of an earlier run.
        os.utime(abort, ns=(now_ms * 1_000_000,) * 2)
        for name in (LOG_DIRECTORY, QUEUE_DIRECTORY):
            Path(self.root, name).mkdir(exist_ok=True)
        sync_folder(self.root)

    def write_checkpoint(self, store_ms: int, log_end: int) -> None:
        """Write down what is on the disk: everything below ``log_end``, its last store time ``store_ms``."""
        reached = Checkpoint(
            physical_timestamp_ms=store_ms,
            logics_timestamp_ms=store_ms,
            logics_physical_offset=log_end,
        )
        replace_file(Path(self.root, CHECKPOINT_FILE), encode_checkpoint(reached))

    def end(self) -> None:
        """Say that the store was stopped cleanly."""
        Path(self.root, ABORT_FILE).unlink()
        sync_folder(self.root)

    def close(self) -> None:
        """Give the lock free. Once is enough."""
        self._lock.close()


_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_for_room(error: BaseException | None) -> bool:
    """Whether a write failed for lack of room, or quota, and may be tried again; also behind an error of ours."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and error.errno in _NO_ROOM


class Disk:
    """A block of work on the disk: the system's errors come out of it as ours."""

    def __init__(self, root: str, tell: Callable[[str], None] | None = None) -> None:
        """Make one for the store at ``root``; ``tell`` hears of an error before it is raised."""
        self._root = root
        self._tell = tell

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, OSError):
            return
        if self._tell is not None:
            self._tell(str(error))
        raise StoreUnavailableError(
            f"the store cannot be written: {error.strerror or error}",
            where=str(error.filename or self._root),
            do=advice_for(error, "look at the disk and its permissions"),
        ) from error


# -- rows of files ---------------------------------------------------------------------------------

_FLAGS: Final = os.O_RDWR | os.O_CREAT
OPEN_MAX: Final = 256
_CHUNKS_MAX: Final = 1024
"""Linux takes no more in one call."""


class RowWriter:
    """Files of one store that are written in rows.

    **Contract.** One thread writes; any thread may ``sync``. ``sync`` covers every write that ended before it began; a
    write during it is left for the next. A file that could not be synced stays marked, and the error says so: nothing
    written since the last good ``sync`` may be taken for stored. Every file has its full length from birth and is
    sparse, unless ``preallocate``. A crash leaves tails that may be anything; recovery decides what counts.
    """

    def __init__(self, *, preallocate: bool = False) -> None:
        self._preallocate = preallocate
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._dirty: set[str] = set()
        self._dirty_folders: set[str] = set()

    def write(self, folder: str, file_bytes: int, offset: int, data: Buffer) -> None:
        """Put ``data`` at byte ``offset`` of the row in ``folder``; it may go over the ends of files."""
        view = memoryview(data).cast("B")
        while view:
            at = offset % file_bytes
            part = view[: file_bytes - at]
            self._write(f"{folder}/{offset - at:0{NAME_DIGITS}d}", file_bytes, at, part)
            offset, view = offset + len(part), view[len(part) :]

    def write_file(self, path: str, file_bytes: int, at: int, data: Buffer) -> None:
        """Put ``data`` at a place of a file that is named by itself."""
        self._write(path, file_bytes, at, memoryview(data).cast("B"))

    def write_chunks(
        self, folder: str, file_bytes: int, offset: int, chunks: Sequence[bytes | bytearray]
    ) -> None:
        """Likewise, from several buffers, none of which goes over the end of a file. None is copied."""
        first = 0
        while first < len(chunks):
            at, size, last = offset % file_bytes, 0, first
            for chunk in chunks[first : first + _CHUNKS_MAX]:
                if last > first and size + len(chunk) > file_bytes - at:
                    break
                size, last = size + len(chunk), last + 1
            path = f"{folder}/{offset - at:0{NAME_DIGITS}d}"
            self._write(path, file_bytes, at, chunks[first:last])
            offset, first = offset + size, last

    def sync(self) -> None:
        """Bring to the disk what was written before this call."""
        with self._lock:
            files, self._dirty = self._dirty, set()
            folders, self._dirty_folders = self._dirty_folders, set()
        try:
            _sync_each(_sync_file, sorted(files))
            _sync_each(sync_folder, sorted(folders))
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

    def _write(
        self, path: str, file_bytes: int, at: int, part: memoryview | Sequence[bytes | bytearray]
    ) -> None:
        with self._lock:
            descriptor = self._descriptor(path, file_bytes)
        try:
            if not isinstance(part, memoryview):
                done = os.pwritev(descriptor, part, at)
                if done == sum(map(len, part)):
                    return
                at, part = at + done, memoryview(b"".join(part))[done:]
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
    """Make a row zero from byte ``end`` on: its file's rest is a hole, later files are gone. ``rows.sync`` covers it."""
    for base in list_bases(folder):
        path = f"{folder}/{base:0{NAME_DIGITS}d}"
        if base >= end:
            Path(path).unlink()
        elif base + file_bytes > end:
            os.truncate(path, end - base)
            os.truncate(path, file_bytes)
            rows.mark(path)
    rows.mark_folder(folder)


def _sync_each(sync: Callable[[str], None], paths: Sequence[str]) -> None:
    """One by one; many of them several at a time, which a disk does in a fifth of the time."""
    if len(paths) <= SYNCED_ALONE_MAX:
        for path in paths:
            sync(path)
        return
    with ThreadPoolExecutor(SYNC_THREADS, "tiered-sync") as threads:
        try:
            for _ in threads.map(sync, paths):
                pass
        except (
            RuntimeError
        ):  # no thread is to be had, as when the interpreter ends and a store is closed then
            for path in paths:
                sync(path)


def _sync_file(path: str) -> None:
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return  # it has expired
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
