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
_UNCACHED_BYTES_MIN = 64 * 1024
_HAS_ADVICE = hasattr(os, "posix_fadvise")
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


class Draft:
    """A written file that does not have its name yet. One thread.

    Attributes:
        fd: Open for writing.
        folder_fd: Where its name will be; held by whoever asked for it.
    """

    __slots__ = ("_path", "fd", "folder_fd")

    def __init__(self, fd: int, folder_fd: int, path: bytes | None = None) -> None:
        """Take over ``fd``.

        Args:
            fd: Open for writing.
            folder_fd: Where its name will be; held by the caller.
            path: What it is called for the time being, if anything.
        """
        self.fd = fd
        self.folder_fd = folder_fd
        self._path = path

    def force(self) -> None:
        """Force its bytes to disk, and let go of a large one's pages: those of a broker beside us are worth more."""
        os.fsync(self.fd)
        if _HAS_ADVICE and os.fstat(self.fd).st_size >= _UNCACHED_BYTES_MIN:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def publish(self, name: bytes) -> None:
        """Give it its name, which is not on disk yet.

        Raises:
            FileExistsError: The name is taken.
            FileNotFoundError: The folder has been removed.
            OSError: Anything else. No name was made in any case.
        """
        if self._path is None:
            # Python calls linkat, which alone follows the link in /proc, only when a folder is given.
            source, above = f"/proc/self/fd/{self.fd}", self.folder_fd
            os.link(source, name, src_dir_fd=above, dst_dir_fd=above)
            return
        try:
            os.link(self._path, name, dst_dir_fd=self.folder_fd)
        except FileExistsError:
            # NFS asks again when an answer is lost, and then meets its own link.
            if os.stat(self._path).st_nlink == 1:
                raise

    def move_to(self, name: bytes) -> None:
        """Give it a name that may be taken by another file, which is gone then. Only for a named one."""
        assert self._path is not None
        os.rename(self._path, name, dst_dir_fd=self.folder_fd)
        self._path = None

    def close(self) -> None:
        """Close it and remove what it was called for the time being."""
        os.close(self.fd)
        if self._path is not None:
            os.unlink(self._path)


class ExclusiveWriter:
    """Writes files. Safe to use from any number of threads."""

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

    def write(self, folder_fd: int, pieces: Sequence[Piece]) -> Draft:
        """Write a file that has no name in the folder yet. Close it in any case.

        Raises:
            FileNotFoundError: The folder has been removed.
            OSError: Anything else; nothing is left.
        """
        draft = self._unnamed_draft(folder_fd) if self._unnamed else None
        draft = draft or self._named_draft(folder_fd)
        try:
            write_all(draft.fd, pieces)
        except BaseException:
            draft.close()
            raise
        return draft

    def _unnamed_draft(self, folder_fd: int) -> Draft | None:
        try:
            fd = os.open(b".", os.O_WRONLY | os.O_CLOEXEC | _TMPFILE, 0o666, dir_fd=folder_fd)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            self._unnamed = False
            return None
        return Draft(fd, folder_fd)

    def _named_draft(self, folder_fd: int) -> Draft:
        with self._folders.lease(self._hidden):
            fd, path = tempfile.mkstemp(dir=self._path, prefix=_PREFIX)
        draft = Draft(fd, folder_fd, path)
        try:
            if not self._swept:
                self._swept = True
                self._sweep(os.fstat(fd).st_mtime)
            os.fchmod(fd, 0o666 & ~_umask())
        except BaseException:
            draft.close()
            raise
        return draft

    def replace(self, folder_fd: int, name: bytes, pieces: Sequence[Piece]) -> None:
        """Put a new file, its bytes on disk, in the place of ``name``; the name itself is not on disk yet."""
        draft = self._named_draft(folder_fd)
        try:
            write_all(draft.fd, pieces)
            draft.force()
            draft.move_to(name)
        finally:
            draft.close()

    def _sweep(self, now_s: float) -> None:
        """Remove what crashed writers left; once, by the clock of the file system itself."""
        with os.scandir(self._path) as found:
            for entry in found:
                with suppress(FileNotFoundError):
                    left_s = entry.stat(follow_symlinks=False).st_mtime
                    if entry.name.startswith(_PREFIX) and left_s < now_s - _LEFT_OVER_S:
                        os.unlink(entry.path)


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


def read_into(fd: int, key: str, byte_range: ByteRange, target: memoryview) -> None:
    """As ``read_range``, into memory of that size.

    Raises:
        InvalidRangeError: The range begins at or behind the end.
        ShortReadError: It ends behind the end, or the file was cut while it was read.
    """
    check_range(key, byte_range, os.fstat(fd).st_size)
    position = byte_range.start
    while position < byte_range.end:
        count = os.preadv(fd, [target[position - byte_range.start :]], position)
        if not count:
            raise ShortReadError(f"file was cut while it was read: {key!r}")
        position += count


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
