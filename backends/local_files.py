"""Files that appear whole or not at all: written without a name, forced to disk, then linked."""

# Paths are bytes here, since keys are UTF-8 whatever the locale is; pathlib has none.
# ruff: noqa: PTH108, PTH112, PTH116, PTH123

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from backends.base import ByteRange
from backends.errors import ObjectNotFoundError, ShortReadError
from backends.ranges import check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.buffers import Piece
    from backends.local_folders import FolderCache

_IOV_MAX = 1024  # of Linux; os.sysconf says the same, but costs a call
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hang the reader
_PREFIX = b"new-"
_LEFT_OVER_S = 24 * 3600.0  # no write takes so long
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}
_TMPFILE = getattr(os, "O_TMPFILE", 0)


def write_all(fd: int, pieces: Sequence[Piece]) -> None:
    """Write the pieces one behind the other without joining them, however the kernel cuts it."""
    for begin in range(0, len(pieces), _IOV_MAX):
        some = pieces[begin : begin + _IOV_MAX]
        written = os.writev(fd, some)
        if written < sum(map(len, some)):
            _write_rest(fd, some, written)


def _write_rest(fd: int, pieces: Sequence[Piece], written: int) -> None:
    """Go on after ``written`` bytes of the pieces: a signal or a full disk has cut the call."""
    for piece in pieces:
        view = memoryview(piece)[min(written, len(piece)) :]
        written -= len(piece) - len(view)
        while view:
            view = view[os.write(fd, view) :]


class ExclusiveWriter:
    """Creates files that must not exist yet. Safe to use from any number of threads."""

    def __init__(self, root: bytes, folders: FolderCache, hidden: bytes) -> None:
        """Make a writer.

        Args:
            root: Absolute path of the store.
            folders: Makes the hidden folder.
            hidden: Its name; for named files, used where the system has no unnamed ones.
        """
        self._hidden = hidden
        self._path = root + b"/" + hidden
        self._folders = folders
        self._swept = False
        self._unnamed = bool(_TMPFILE) and os.path.isdir("/proc/self/fd")

    def create(self, folder_fd: int, name: bytes, pieces: Sequence[Piece]) -> None:
        """Make ``name`` in a folder, its bytes on disk; the name itself is not yet.

        Raises:
            FileExistsError: The name is taken.
            FileNotFoundError: The folder has been removed.
            OSError: Anything else. No name was made in any case.
        """
        if self._unnamed:
            try:
                fd = os.open(b".", os.O_WRONLY | os.O_CLOEXEC | _TMPFILE, 0o666, dir_fd=folder_fd)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
                self._unnamed = False
            else:
                _finish_unnamed(fd, folder_fd, name, pieces)
                return
        path = self.write_named(pieces)
        try:
            os.link(path, name, dst_dir_fd=folder_fd)
        except FileExistsError:
            # NFS asks again when an answer is lost, and then meets its own link.
            if os.stat(path).st_nlink == 1:
                raise
        finally:
            os.unlink(path)

    def write_named(self, pieces: Sequence[Piece]) -> bytes:
        """Write a file with a name of its own and force its bytes to disk; its path."""
        with self._folders.lease(self._hidden):
            fd, path = tempfile.mkstemp(dir=self._path, prefix=_PREFIX)
        try:
            if not self._swept:
                self._swept = True
                self._sweep(os.fstat(fd).st_mtime)
            os.fchmod(fd, 0o666 & ~_umask())
            write_all(fd, pieces)
            os.fsync(fd)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        return path

    def _sweep(self, now_s: float) -> None:
        """Remove what crashed writers left; once, by the clock of the file system itself."""
        with os.scandir(self._path) as found:
            for entry in found:
                with suppress(FileNotFoundError):
                    left_s = entry.stat(follow_symlinks=False).st_mtime
                    if entry.name.startswith(_PREFIX) and left_s < now_s - _LEFT_OVER_S:
                        os.unlink(entry.path)


def _finish_unnamed(fd: int, folder_fd: int, name: bytes, pieces: Sequence[Piece]) -> None:
    try:
        write_all(fd, pieces)
        os.fsync(fd)
        # Python calls linkat, which alone follows the link in /proc, only when a folder is given.
        os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    finally:
        os.close(fd)


def _umask() -> int:
    # Asking without setting is possible only through /proc; setting it would race with threads.
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def open_object(path: bytes, key: str) -> int:
    """A descriptor for reading a regular file.

    Raises:
        ObjectNotFoundError: Something else has that name.
        OSError: It cannot be opened.
    """
    fd = os.open(path, _READ)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise ObjectNotFoundError(f"no object, but a folder or device: {key!r}")


def read_range(fd: int, key: str, byte_range: ByteRange | None) -> bytes:
    """Read a range, or all, of an open file; never less than asked for.

    Raises:
        InvalidRangeError: The range begins at or behind the end.
        ShortReadError: It ends behind the end, or the file was cut while it was read.
    """
    size = os.fstat(fd).st_size
    if byte_range is None:
        if not size:
            return b""
        byte_range = ByteRange(0, size)
    else:
        check_range(key, byte_range, size)
    return _read_exactly(fd, key, byte_range)


def _read_exactly(fd: int, key: str, byte_range: ByteRange) -> bytes:
    data = os.pread(fd, byte_range.size_bytes, byte_range.start)
    if len(data) == byte_range.size_bytes:
        return data
    pieces = [data]
    position = byte_range.start + len(data)
    while position < byte_range.end:
        piece = os.pread(fd, byte_range.end - position, position)
        if not piece:
            raise ShortReadError(f"file was cut while it was read: {key!r}")
        pieces.append(piece)
        position += len(piece)
    return b"".join(pieces)
