"""Objects as files below a folder: key ``a/b/c`` is the file ``a/b/c``.

Contract
    Creation: the bytes are written to a file without a name (where the system has none: a file in
    ``.tiered-tmp``), forced to disk, and linked under the key, which is atomic among processes and
    fails when the key is taken. Then the folder is forced to disk, and those above it whose names
    are new; once in each process those above the root, too, since who made that may have been killed before
    it was on disk. So a key has all its bytes, also after a power loss, and a put that returned stays.

    Compare-and-set, the first creation by it, and deletion take one lock per store, held by an
    advisory lock of ``.tiered-tmp/lock``; on a network file system all machines must honour such
    locks. Replacing is a rename. The version is a hash of the bytes, so that going back to
    equal bytes goes back to an equal version.

    Once it is on disk, a large object is dropped from the page cache, where a broker on the same machine needs the
    room; a reader soon reads what is on the disk.

    Deletion is not forced to disk: after a power loss a deleted object may be back. Folders that
    became empty are removed.

    What is no regular file, or has a name that no key can have, is left out of listings and noted.

    A crash leaves at most files in ``.tiered-tmp``, which no listing shows; the first writer that
    needs a named file removes those that are a day old.

    Deadlines: a local call cannot be given up; only waiting for the lock ends after ``timeout_s``,
    with the process that holds it: one that was stopped amid of a change keeps it until it goes on
    or ends. Creating, reading and listing take no lock, so readers and the journal go on meanwhile.
    Any thread may call anything at any time. Nothing is tried again, but for a put whose
    empty folder another process has just removed.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import (
    ByteRange,
    Capabilities,
    Chunk,
    ForeignNames,
    ObjectInfo,
    Version,
    as_chunks,
    check_key,
    content_version,
    require_same_process,
)
from backends.errors import (
    AlreadyExistsError,
    BackendError,
    ConfigurationError,
    InvalidKeyError,
    ObjectNotFoundError,
    PreconditionFailedError,
    UnavailableError,
    UnknownOutcomeError,
)
from backends.local_files import (
    LOST_AND_FOUND,
    ExclusiveWriter,
    FolderCache,
    from_os,
    mapped,
    open_object,
    read_into,
    read_range,
)

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from typing_extensions import Buffer

# Paths are bytes here, since keys are UTF-8 whatever the locale is; pathlib has none.
# ruff: noqa: PTH106, PTH108, PTH112, PTH116


HIDDEN = ".tiered-tmp"
_HIDDEN = HIDDEN.encode()
_RESERVED = frozenset({_HIDDEN, LOST_AND_FOUND.encode()})
_FOLDER_TRIES_MAX = 20  # each lost only when another process removes the folder just then
_LOCK_POLL_S = 0.005
_NS_PER_MS = 1_000_000


class LocalFolderStore:
    """An ``ObjectStore`` in a folder; see the module's contract."""

    def __init__(self, root: str | os.PathLike[str], *, timeout_s: float = 30.0) -> None:
        """Use a folder, which is made at the first write if it is missing; its path is absolute.

        A change waits ``timeout_s`` at most for another process's lock.
        """
        path = Path(root)
        if not path.is_absolute():
            raise ConfigurationError(f"not an absolute path: {str(root)!r}")
        if path.exists() and not path.is_dir():
            raise ConfigurationError(
                f"not a folder: {str(root)!r}; name one, or what is to be made"
            )
        self._url = path.as_uri()
        self._root = os.fsencode(path)
        self._pid = os.getpid()
        self._timeout_s = timeout_s
        self._folders = FolderCache(self._root)
        self._writer = ExclusiveWriter(self._root, self._folders, _HIDDEN)
        self._change = threading.Lock()
        self.foreign = ForeignNames()

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """Everything is atomic among the processes of this machine."""
        return Capabilities(put_if_absent=True, compare_and_set=True)

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        """Raises also InvalidKeyError where key and ``key/...`` would meet."""
        require_same_process(self._pid, self._url)
        folder, name = self._place(key)
        chunks = as_chunks(data)
        for _ in range(_FOLDER_TRIES_MAX):
            try:
                return self._create(folder, name, key, chunks)
            except FileNotFoundError:
                # The deletion of the last object of a folder removes it, maybe between our opening it and the name in it.
                self._folders.forget(folder)
            except OSError as error:
                raise self._refusal(key, error) from error
        raise UnavailableError(f"its folder is removed again and again: {self._where(key)}")

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        with self._opened(key) as fd:
            return read_range(fd, key, byte_range)

    def get_into(self, key: str, byte_range: ByteRange, target: memoryview) -> None:
        with self._opened(key) as fd:
            read_into(fd, key, byte_range, target)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        """The file is opened once."""
        with self._opened(key) as fd:
            return [read_range(fd, key, byte_range) for byte_range in byte_ranges]

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        """The version is a hash of the bytes."""
        data = self.get(key)
        return data, content_version(data)

    def head(self, key: str) -> ObjectInfo:
        """Without a version, since that would read the whole file."""
        with self._opened(key) as fd:
            found = os.fstat(fd)
            return ObjectInfo(key, found.st_size, found.st_mtime_ns // _NS_PER_MS)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """A folder is read when it is reached, and if it matters."""
        with mapped(f"listing {self._url} {prefix!r}"):
            yield from walk(self._root, _RESERVED, prefix, start_after, self.foreign.note)

    def delete(self, key: str) -> None:
        """Not forced to disk."""
        folder, _ = self._place(key)
        path = self._path(key)
        with mapped(self._where(key)):
            # Not `isfile`: to it what may not be looked at, or a sick disk, is the same as nothing there.
            try:
                is_file = stat.S_ISREG(os.stat(path).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return
            if not is_file:
                return
            # Under the lock: else one between a compare-and-set's look and its replacing would be undone by that.
            with self._locked(), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                os.unlink(path)
            self._remove_empty(folder)

    def compare_and_set(self, key: str, data: Buffer, expected: Version | None) -> Version:
        folder, name = self._place(key)
        chunks = as_chunks(data)
        with mapped(self._where(key)), self._locked():
            if expected is None:
                try:
                    self.put_if_absent(key, data)
                except AlreadyExistsError as error:
                    raise PreconditionFailedError(str(error)) from None
            else:
                self._check_version(key, expected)
                with self._folders.lease(folder) as folder_fd:  # it stays: the lock is held
                    self._writer.replace(folder_fd, name, chunks)
                    self._force(folder_fd, key)
        return content_version(b"".join(chunks))

    def close(self) -> None:
        if os.getpid() == self._pid:  # else its lock may be held by a thread that is not here
            self._folders.close()

    def _place(self, key: str) -> tuple[bytes, bytes]:
        check_key(key)
        folder, _, name = key.encode().rpartition(b"/")
        if key.partition("/")[0].encode() in _RESERVED:
            raise InvalidKeyError(f"key is kept for temporary files and the like: {key!r}")
        return folder, name

    def _path(self, key: str) -> bytes:
        return self._root + b"/" + key.encode()

    def _where(self, key: str) -> str:
        return f"{self._url} {key!r}"

    def _nested(self, key: str) -> InvalidKeyError:
        return InvalidKeyError(
            f"an object is where {key!r} needs a folder, or the reverse: {self._url}"
        )

    @contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        self._place(key)
        with mapped(self._where(key)):
            try:
                fd = open_object(self._path(key), key)
            except FileNotFoundError:
                raise ObjectNotFoundError(f"no such object: {self._where(key)}") from None
            try:
                yield fd
            finally:
                os.close(fd)

    def _create(self, folder: bytes, name: bytes, key: str, chunks: builtins.list[Chunk]) -> None:
        """Write an object that is not there yet; NamingError: nobody knows whether it has its name."""
        with self._folders.hold(folder) as folder_fd:
            with _saying_removed(folder_fd):
                draft = self._writer.write(folder_fd, chunks)
            try:
                draft.force()
                with _saying_removed(folder_fd):
                    draft.publish(name)
            except FileExistsError:
                # Another process may have given the name and not have forced it yet: who is told "exists" relies on it.
                self._force_names(folder, folder_fd, key)
                raise
            finally:
                draft.close()
            self._force_names(folder, folder_fd, key)

    def _force_names(self, folder: bytes, folder_fd: int, key: str) -> None:
        """Force a new name to disk, and those of its folder and of all above it."""
        self._force(folder_fd, key)
        with self._in_doubt(key):
            self._folders.force_names(folder, folder_fd)

    def _force(self, folder_fd: int, key: str) -> None:
        with self._in_doubt(key):
            os.fsync(folder_fd)

    @contextmanager
    def _in_doubt(self, key: str) -> Iterator[None]:
        """When names cannot be forced to disk nobody knows what a crash would leave."""
        try:
            yield
        except OSError as error:
            raise UnknownOutcomeError(
                f"{error.strerror}: written, but not surely on disk ({self._where(key)})"
            ) from error

    def _refusal(self, key: str, error: OSError) -> BackendError:
        """Why an object could not be created, in our own errors."""
        if isinstance(error, NotADirectoryError):
            return self._nested(key)
        if not isinstance(error, FileExistsError):
            return from_os(error, self._where(key))
        if os.path.isdir(self._path(key)):
            return self._nested(key)
        return AlreadyExistsError(f"object exists: {self._where(key)}")

    def _check_version(self, key: str, expected: Version) -> None:
        """The lock is held."""
        try:
            _, present = self.get_versioned(key)
        except ObjectNotFoundError:
            raise PreconditionFailedError(f"no such object: {self._where(key)}") from None
        if present != expected:
            raise PreconditionFailedError(f"at another version: {self._where(key)}")

    def _remove_empty(self, folder: bytes) -> None:
        while folder:
            try:
                os.rmdir(self._root + b"/" + folder)
            except OSError:
                # Not empty, as a rule: others keep theirs in it, or have just put something there.
                return
            self._folders.forget(folder)
            folder = folder.rpartition(b"/")[0]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The store's lock against all threads and processes."""
        require_same_process(self._pid, self._url)
        # Threads take turns by this one, which wakes who waits; the file's lock can only be polled.
        if not self._change.acquire(timeout=self._timeout_s):
            raise UnavailableError(f"another thread holds the lock: {self._url}")
        try:
            fd = self._open_lock()
            try:
                self._await_lock(fd)
                yield
            finally:
                os.close(fd)  # gives up the lock as well
        finally:
            self._change.release()

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        for _ in range(_FOLDER_TRIES_MAX):
            with self._folders.lease(_HIDDEN) as hidden_fd, suppress(FileNotFoundError):
                return os.open(b"lock", flags, 0o666, dir_fd=hidden_fd)
            # Somebody has cleaned up; the folder that we hold open is not a place any more.
            self._folders.forget(_HIDDEN)
        raise UnavailableError(f"{HIDDEN} is removed again and again: {self._url}")

    def _await_lock(self, fd: int) -> None:
        never = threading.Event()
        for _ in range(max(1, round(self._timeout_s / _LOCK_POLL_S))):
            # Polled: a flock that waits cannot be given a deadline.
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.fstat(fd).st_nlink:  # others lock another file now
                    raise UnavailableError(f"the lock was removed: {self._url}")
                _sign(fd)
                return
            never.wait(_LOCK_POLL_S)
        raise self._held(fd)

    def _held(self, fd: int) -> UnavailableError:
        """Who has held the lock for longer than a change takes: mostly a process that was stopped amid of one."""
        holder = _signed(fd)
        if holder is None:
            return UnavailableError(f"another process holds the lock: {self._url}")
        pid, host = holder
        is_here = host == socket.gethostname()
        state = ", which is stopped," if is_here and _is_stopped(pid) else ""
        error = UnavailableError(f"process {pid} on {host}{state} holds the lock: {self._url}")
        error.do = f"let it go on (kill -CONT {pid}), or end it; the lock goes with it"
        return error


def _sign(fd: int) -> None:
    """Say in the lock's file who has it. Not forced to disk: it is for those who wait now."""
    with suppress(OSError):  # a full disk, say: then nobody is named
        said = f"{os.getpid()} {socket.gethostname()}\n".encode()
        os.ftruncate(fd, 0)
        os.pwrite(fd, said, 0)


def _signed(fd: int) -> tuple[int, str] | None:
    """Process and host of who has the lock, as far as it is told."""
    with suppress(OSError):
        pid, _, host = os.pread(fd, 512, 0).decode("utf-8", "replace").strip().partition(" ")
        if pid.isascii() and pid.isdigit() and host.isprintable():
            return int(pid), host
    return None


def _is_stopped(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[:1] in (["T"], ["t"])


# -- listings --------------------------------------------------------------------------------------
#
# Walk a folder tree in byte order of the full keys, entering only folders that can matter.


def walk(
    root: bytes,
    hidden: AbstractSet[bytes],
    prefix: str,
    start_after: str,
    foreign: Callable[[bytes], None],
) -> Iterator[ObjectInfo]:
    """Objects below ``root`` whose key begins with ``prefix`` and is greater than ``start_after``.

    Each folder is read when the walk reaches it: O(names of the folder) memory. Files and folders that vanish meanwhile are
    left out. So are links, devices and names that are no keys, of which ``foreign`` is told. ``hidden``: names of the
    folders in the root that are not part of the store.
    """
    wanted, after = prefix.encode(), start_after.encode()
    begin = wanted.rpartition(b"/")[0]
    if begin.partition(b"/")[0] in hidden:
        return
    hidden_folders = {name + b"/" for name in hidden}

    def below(base: bytes) -> Iterator[ObjectInfo]:
        """What lies below a folder, "" or ending in a slash."""
        for name, is_folder in _entries(root + b"/" + base):
            key = base + name
            if is_folder:
                if key not in hidden_folders and _may_hold(key, wanted, after):
                    yield from below(key)
            elif key > after and key.startswith(wanted):
                info = _info(root, key, foreign)
                if info is not None:
                    yield info

    yield from below(begin + b"/" if begin else b"")


def _info(root: bytes, key: bytes, foreign: Callable[[bytes], None]) -> ObjectInfo | None:
    """What is told of a file; None: it has gone, or it is not an object, which is noted."""
    try:
        text = key.decode()
        check_key(text)
        found = os.lstat(root + b"/" + key)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (UnicodeDecodeError, InvalidKeyError):
        foreign(key)
        return None
    if not stat.S_ISREG(found.st_mode):
        foreign(key)
        return None
    return ObjectInfo(text, found.st_size, found.st_mtime_ns // _NS_PER_MS)


def _entries(path: bytes) -> list[tuple[bytes, bool]]:
    """Names in a folder and whether they are folders, those with a slash; in order of full keys.

    The slash takes part in the order: ``a-b`` comes before ``a/b``, since ``-`` is 0x2d and ``/``
    0x2f.
    """
    try:
        with os.scandir(path) as found:
            entries = [
                (entry.name + b"/", True)
                if entry.is_dir(follow_symlinks=False)
                else (entry.name, False)
                for entry in found
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    entries.sort()
    return entries


def _may_hold(folder: bytes, wanted: bytes, after: bytes) -> bool:
    """Whether a key that begins with ``folder`` (it ends in a slash) can be wanted."""
    if not (folder.startswith(wanted) or wanted.startswith(folder)):
        return False
    return folder > after or after.startswith(folder)


@contextmanager
def _saying_removed(folder_fd: int) -> Iterator[None]:
    """Call it "not found" when a folder was removed; ext4 says "permission denied" then."""
    try:
        yield
    except PermissionError as error:
        if os.fstat(folder_fd).st_nlink:
            raise
        raise FileNotFoundError from error
