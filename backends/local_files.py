"""Files and folders of this machine, as stores use them.

The system's errors become ours in this one place; folders are held whose names are known to be on disk; files appear
whole or not at all: written without a name, forced to disk, then linked.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import tempfile
import threading
from collections import OrderedDict
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backends.base import ByteRange, check_range
from backends.errors import (
    BackendError,
    InvalidKeyError,
    ObjectNotFoundError,
    PermissionDeniedError,
    ShortReadError,
    StoreFullError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)
from backends.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from backends.base import Chunk

# Paths are bytes here, since keys are UTF-8 whatever the locale is; pathlib has none.
# ruff: noqa: PTH102, PTH108, PTH112, PTH116, PTH120, PTH123


# -- errors ----------------------------------------------------------------------------------------

_CLASSES: dict[int, type[BackendError]] = {
    errno.ENOENT: ObjectNotFoundError,
    errno.ENOTDIR: ObjectNotFoundError,
    errno.EISDIR: ObjectNotFoundError,
    errno.EACCES: PermissionDeniedError,
    errno.EPERM: PermissionDeniedError,
    errno.EROFS: PermissionDeniedError,
    errno.ENOSPC: StoreFullError,
    errno.EDQUOT: StoreFullError,
    errno.EFBIG: StoreFullError,
    errno.ENAMETOOLONG: InvalidKeyError,
    errno.EILSEQ: InvalidKeyError,
    errno.EOPNOTSUPP: UnsupportedError,
    errno.ENOSYS: UnsupportedError,
}

_FULL = frozenset(number for number, kind in _CLASSES.items() if kind is StoreFullError)
_ANSWER_LOST = frozenset(
    {
        errno.EIO,
        errno.EINTR,
        errno.ETIMEDOUT,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    }
)
"""What a file system over a network may say of a name that its server has given nevertheless."""
MAKE_ROOM = "make room"
"""What to do about anything that is full."""


def is_full(error: BaseException | None) -> bool:
    """Whether a disk or a store had no room, or no more for us."""
    if isinstance(error, BackendError):
        return isinstance(error, StoreFullError)
    return isinstance(error, OSError) and error.errno in _FULL


def advice_for(error: BaseException, otherwise: str) -> str:
    """``MAKE_ROOM`` for what is full; else what is to be done ``otherwise``."""
    return MAKE_ROOM if is_full(error) else otherwise


class NamingError(OSError):
    """Nobody knows whether a file was given its name."""


@contextmanager
def _naming() -> Iterator[None]:
    """Of a call that gives a name."""
    try:
        yield
    except OSError as error:
        if error.errno in _ANSWER_LOST:
            raise NamingError(error.errno, error.strerror) from error
        raise


def from_os(error: OSError, where: str) -> BackendError:
    """Our error for ``error``. What is not in the table may pass: a full fd table, a sick disk."""
    if isinstance(error, NamingError):
        return UnknownOutcomeError(f"{error.strerror}: perhaps written ({where})")
    kind = _CLASSES.get(error.errno or 0, UnavailableError)
    return kind(f"{error.strerror or error} ({where})")


@contextmanager
def mapped(where: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into ours; ``where`` names the object for the message."""
    try:
        yield
    except BackendError:
        raise  # several of ours are OSErrors as well
    except OSError as error:
        raise from_os(error, where) from error


# -- folders ---------------------------------------------------------------------------------------

FOLDERS_KNOWN_MAX = 1024
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_SYNC = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL}
"""What a folder says that is not ours, or not to be forced: we have not made anything in it."""


@dataclass(slots=True)
class _Gate:
    """The fsyncs of one folder, numbered from 1: one at a time. What failed helps nobody else."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    begun: int = 0
    succeeded: int = 0


class _SharedSyncs:
    """One fsync of a folder for all who made something in it before that fsync began.

    Many threads that make neighbouring folders at once would else wait for one fsync each, one after another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[bytes, _Gate] = {}

    def force(self, folder: bytes, fd: int) -> None:
        """Return when an fsync of ``folder`` that began after this call is over."""
        with self._lock:
            gate = self._gates.setdefault(folder, _Gate())
            gate.users += 1
            arrived = gate.begun
        try:
            with gate.lock:
                if gate.succeeded <= arrived:
                    gate.begun += 1
                    os.fsync(fd)
                    gate.succeeded = gate.begun
        finally:
            with self._lock:
                gate.users -= 1
                if not gate.users:
                    self._gates.pop(folder, None)


class FolderCache:
    """Folders below one root, of which it is known whose names are on disk.

    **Contract.** ``hold(folder)`` gives a descriptor of a folder that exists. ``force_names(folder, fd)`` returns when
    its name in the folder above it is on disk, and so on up to the root; the cost is paid
    once for each folder, and neighbours share it. ``lease`` is both. Who makes a file in a
    folder that may be new does best to force the file first and the names then, upwards: a file
    system that commits everything at once has by then little left to do.

    A descriptor, not a path, is what a file is linked into: if another process removes the folder
    meanwhile, linking fails with ENOENT instead of landing in a namesake that nobody made durable.
    The caller then calls ``forget`` and begins again.

    A known folder is held open: a folder made anew in the place of a removed one mostly gets its number, but not
    while that is held. At most ``FOLDERS_KNOWN_MAX`` are known (fewer where the process may open few), those used last;
    another one is forced again.

    The root's own name, and those above it, are forced when it is first opened, even if it existed: the process that made
    it may have been killed before its name was on disk, and nobody else would ever see to that.

    Any thread may call anything at any time. Nothing here has to survive a crash.
    """

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._syncs = _SharedSyncs()
        # Of each its descriptor and its number, which is compared without a call of the system: that is not for the lock.
        self._known: OrderedDict[bytes, tuple[int, tuple[int, int]]] = OrderedDict()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._known_max = max(4, min(FOLDERS_KNOWN_MAX, soft // 4))

    @contextmanager
    def hold(self, folder: bytes) -> Iterator[int]:
        """A descriptor of ``folder`` (relative to the root, ``b""`` for the root itself), perhaps not durable."""
        fd = self._open_or_make(folder)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def lease(self, folder: bytes) -> Iterator[int]:
        """As ``hold``, of a folder whose name is on disk."""
        with self.hold(folder) as fd:
            self.force_names(folder, fd)
            yield fd

    def force_names(self, folder: bytes, fd: int) -> None:
        """Return when the names of ``folder``, which is held as ``fd``, and of all above it are on disk.

        After an OSError it is not known how far that went.
        """
        if self._knows(folder, fd):
            return
        new: dict[bytes, int] = {}
        try:
            while folder:
                opened = self._open_or_make(folder)
                if self._knows(folder, opened):
                    os.close(opened)
                    break
                new[folder] = opened
                folder = _above(folder)
            for named in new:  # upwards
                with self.hold(_above(named)) as above:
                    self._syncs.force(_above(named), above)
        except BaseException:
            _close_all(new.values())
            raise
        # Only now: who finds a folder here takes it that all above it are on disk as well.
        self._learn(new)

    def forget(self, folder: bytes) -> None:
        """Drop ``folder`` and all above it: one of them has been removed."""
        dropped: list[int] = []
        with self._lock:
            while True:
                if folder in self._known:
                    dropped.append(self._known.pop(folder)[0])
                if not folder:
                    break
                folder = _above(folder)
        _close_all(dropped)

    def close(self) -> None:
        """Close every descriptor that is kept."""
        with self._lock:
            dropped = [fd for fd, _ in self._known.values()]
            self._known.clear()
        _close_all(dropped)

    def _knows(self, folder: bytes, fd: int) -> bool:
        number = _number(fd)
        with self._lock:
            if folder not in self._known or self._known[folder][1] != number:
                return False
            self._known.move_to_end(folder)
            return True

    def _learn(self, new: dict[bytes, int]) -> None:
        """Keep the descriptors of folders whose names are on disk now."""
        numbers = {folder: (fd, _number(fd)) for folder, fd in new.items()}
        dropped: list[int] = []
        with self._lock:
            for folder, entry in numbers.items():
                if folder in self._known:  # another thread was faster, or it was another folder
                    dropped.append(self._known.pop(folder)[0])
                self._known[folder] = entry
            while len(self._known) > self._known_max:
                dropped.append(self._known.popitem(last=False)[1][0])
        _close_all(dropped)

    def _open_or_make(self, folder: bytes) -> int:
        if not folder:
            return self._open_root()
        with suppress(FileNotFoundError):
            return os.open(self._root + b"/" + folder, _FLAGS)
        name = folder.rpartition(b"/")[2]
        with self.hold(_above(folder)) as parent_fd:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent_fd)
            return os.open(name, _FLAGS, dir_fd=parent_fd)

    def _open_root(self) -> int:
        """The root, made if it is missing; its name is on disk."""
        with suppress(FileNotFoundError):
            fd = os.open(self._root, _FLAGS)
            if self._knows(b"", fd):
                return fd
            os.close(fd)
        make_durable_folder(self._root)
        self._learn({b"": os.open(self._root, _FLAGS)})
        return os.open(self._root, _FLAGS)


def _number(fd: int) -> tuple[int, int]:
    """What no other folder has while this one is open."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _above(folder: bytes) -> bytes:
    return folder.rpartition(b"/")[0]


def _close_all(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def make_durable_folder(path: bytes) -> None:
    """Make ``path`` and what is missing above it, and force each name on this file system to disk.

    Those that are there already as well: somebody may have made them and not have come to forcing them.
    """
    missing, name = [], path
    while not os.path.isdir(name):
        missing.append(name)
        name = os.path.dirname(name)
    for made in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(made)
    for folder in reversed([*_folders_above(path)]):
        try:
            sync_folder(folder)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise


def _folders_above(path: bytes) -> Iterator[bytes]:
    """The folders that hold ``path`` and those above it, as far as they are of the same file system."""
    device, above = os.stat(path).st_dev, os.path.dirname(path)
    while above != path and os.stat(above).st_dev == device:
        yield above
        path, above = above, os.path.dirname(above)


def sync_folder(path: bytes) -> None:
    """Force the entries of a folder to disk."""
    fd = os.open(path, _FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- files -----------------------------------------------------------------------------------------

_IOV_MAX = 1024  # of Linux; os.sysconf says the same, but costs a call
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hang the reader
_PREFIX = b"new-"
_LEFT_OVER_S = 24 * 3600.0  # no write takes so long
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}
_UNCACHED_BYTES_MIN = 64 * 1024
_HAS_ADVICE = hasattr(os, "posix_fadvise")
_TMPFILE = getattr(os, "O_TMPFILE", 0)


def write_all(fd: int, chunks: Sequence[Chunk]) -> None:
    """Write the chunks one behind the other without joining them, however the kernel cuts it."""
    for begin in range(0, len(chunks), _IOV_MAX):
        some = chunks[begin : begin + _IOV_MAX]
        written = os.writev(fd, some)
        if written < sum(map(len, some)):
            _write_rest(fd, some, written)


def _write_rest(fd: int, chunks: Sequence[Chunk], written: int) -> None:
    """Go on after ``written`` bytes of the chunks: a signal or a full disk has cut the call."""
    for chunk in chunks:
        view = memoryview(chunk)[min(written, len(chunk)) :]
        written -= len(chunk) - len(view)
        while view:
            view = view[os.write(fd, view) :]


class Draft:
    """A written file that does not have its name yet. One thread."""

    __slots__ = ("_path", "fd", "folder_fd")

    def __init__(self, fd: int, folder_fd: int, path: bytes | None = None) -> None:
        """Take over ``fd``; ``path``: what it is called for the time being, if anything."""
        self.fd = fd  # open for writing
        self.folder_fd = folder_fd  # where its name will be; held by the caller that asked for it
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
            NamingError: Nobody knows.
            OSError: Anything else. As in the first two cases no name was made.
        """
        if self._path is None:
            # Python calls linkat, which alone follows the link in /proc, only when a folder is given.
            source, above = f"/proc/self/fd/{self.fd}", self.folder_fd
            with _naming():
                os.link(source, name, src_dir_fd=above, dst_dir_fd=above)
            return
        try:
            with _naming():
                os.link(self._path, name, dst_dir_fd=self.folder_fd)
        except FileExistsError:
            # NFS asks again when an answer is lost, and then meets its own link.
            if os.stat(self._path).st_nlink == 1:
                raise

    def move_to(self, name: bytes) -> None:
        """Give it a name that may be taken by another file, which is gone then. Only for a named one."""
        assert self._path is not None
        with _naming():
            os.rename(self._path, name, dst_dir_fd=self.folder_fd)
        self._path = None

    def close(self) -> None:
        """Close it and remove what it was called for the time being."""
        os.close(self.fd)
        if self._path is not None:
            with suppress(FileNotFoundError):  # it was moved, and the answer was lost
                os.unlink(self._path)


class ExclusiveWriter:
    """Writes files. Safe to use from any number of threads."""

    def __init__(self, root: bytes, folders: FolderCache, hidden: bytes) -> None:
        """``hidden``: name of the folder for named files, used where the system has no unnamed ones."""
        self._hidden = hidden
        self._path = root + b"/" + hidden
        self._folders = folders
        self._swept = False
        self._unnamed = bool(_TMPFILE) and os.path.isdir("/proc/self/fd")

    def write(self, folder_fd: int, chunks: Sequence[Chunk]) -> Draft:
        """Write a file that has no name in the folder yet. Close it in any case; after an error nothing is left."""
        draft = self._unnamed_draft(folder_fd) if self._unnamed else None
        draft = draft or self._named_draft(folder_fd)
        try:
            write_all(draft.fd, chunks)
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
        try:
            with self._folders.lease(self._hidden):
                fd, path = tempfile.mkstemp(dir=self._path, prefix=_PREFIX)
        except FileNotFoundError:  # somebody has cleaned up; the next try makes it anew
            self._folders.forget(self._hidden)
            raise
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

    def replace(self, folder_fd: int, name: bytes, chunks: Sequence[Chunk]) -> None:
        """Put a new file, its bytes on disk, in the place of ``name``; the name itself is not on disk yet."""
        draft = self._named_draft(folder_fd)
        try:
            write_all(draft.fd, chunks)
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
    """A descriptor for reading a regular file; ObjectNotFoundError: something else has that name."""
    fd = os.open(path, _READ)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise ObjectNotFoundError(f"no object, but a folder or device: {key!r}")


def read_range(fd: int, key: str, byte_range: ByteRange | None) -> bytes:
    """Read a range, or all, of an open file; never less than asked for (``check_range``)."""
    size = os.fstat(fd).st_size
    if byte_range is None:
        if not size:
            return b""
        byte_range = ByteRange(0, size)
    check_range(key, byte_range, size)
    data = os.pread(fd, byte_range.size_bytes, byte_range.start)
    if len(data) == byte_range.size_bytes:
        return data
    whole = bytearray(byte_range.size_bytes)  # over 2 GiB, or a signal came: read again, in turns
    read_into(fd, key, byte_range, memoryview(whole))
    return bytes(whole)


def read_into(fd: int, key: str, byte_range: ByteRange, target: memoryview) -> None:
    """As ``read_range``, into memory of that size."""
    check_range(key, byte_range, os.fstat(fd).st_size)
    position = byte_range.start
    while position < byte_range.end:
        count = os.preadv(fd, [target[position - byte_range.start :]], position)
        if not count:
            raise ShortReadError(f"file was cut while it was read: {key!r}")
        position += count


# -- folders that a person has named ---------------------------------------------------------------

LOST_AND_FOUND: Final = "lost+found"
"""In the root of many file systems, and mostly for root's eyes only: reading it would fail each listing."""


def is_vacant(folder: str | os.PathLike[str]) -> bool:
    """Whether nobody has put anything into a folder, which may be missing, or where a file system has just been mounted."""
    try:
        return set(os.listdir(folder)) <= {LOST_AND_FOUND}  # noqa: PTH208 (names only)
    except FileNotFoundError:
        return True


# -- small files that a person has named -----------------------------------------------------------
#
# Small files that a person has named: never waiting for the other end of a FIFO, nor taking a device for a
# file.


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a regular file. OSError: it is something else (a FIFO, socket, device or folder)."""
    fd = os.open(path, _READ)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _not_regular(path)
        return file.read()


def write_regular(path: str | os.PathLike[str], data: bytes) -> None:
    """Put a file there, or in the place of one that is there: the whole file or, on a full disk, none of it.

    Behind a symbolic link the file that it names is replaced. OSError: something else is there. What was there stays.
    """
    real = os.path.realpath(path)
    mode = None
    with suppress(FileNotFoundError):
        found = Path(real).stat()
        if not stat.S_ISREG(found.st_mode):
            raise _not_regular(path)
        mode = stat.S_IMODE(found.st_mode)
    # A name that no other writer has, nor what a crash has left: in a container each run may have the same number.
    folder, name = os.path.split(real)
    fd, draft = tempfile.mkstemp(".tmp", f"{name}.", folder)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, 0o666 & ~_umask() if mode is None else mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
        Path(draft).replace(real)
    except BaseException:
        with suppress(OSError):
            Path(draft).unlink()
        raise


def _not_regular(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))
