"""Folders of a local store, held open, whose own names are known to be on disk.

Contract
    ``hold(folder)`` gives a descriptor of a folder that exists. ``force_names(folders)`` returns when
    the name of each in the folder above it is on disk, and so on up to the root; the cost is paid
    once for each folder, and neighbours share it. ``lease`` is both. Whoever makes a file in a
    folder that may be new does best to force the file first and the names then, upwards: a file
    system that commits everything at once has by then little left to do.

    A descriptor, not a path, is what a file is linked into: if another process removes the folder
    meanwhile, linking fails with ENOENT instead of landing in a namesake that nobody made durable.
    The caller then calls ``forget`` and begins again.

    A folder that was reopened is the known one only if it has its number *and* its generation or time of birth: a folder
    made anew in the place of a removed one mostly gets its number. Where the file system tells neither, a folder is known
    for as long as it is held open.

    At most ``FOLDERS_OPEN_MAX`` descriptors stay open (fewer where the process may open few). Any
    thread may call anything at any time. Nothing here has to survive a crash.
"""

# Paths are bytes here, since keys are UTF-8 whatever the locale is; pathlib has none.
# ruff: noqa: PTH102, PTH112, PTH120

from __future__ import annotations

import fcntl
import itertools
import os
import resource
import struct
import threading
from collections import OrderedDict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

FOLDERS_OPEN_MAX = 256
_FOLDERS_KNOWN_MAX = 65_536
_LOOKED_AT_MAX = 64
"""More than threads ever use folders at once."""
_LONG_BYTES = struct.calcsize("@l")
_GET_GENERATION = 2 << 30 | _LONG_BYTES << 16 | ord("v") << 8 | 1
"""FS_IOC_GETVERSION of Linux: a number that differs between the inodes that have had the same number."""
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(slots=True)
class _Folder:
    """An open folder: closed when it is dropped from the cache and the last user has gone."""

    fd: int
    identity: Hashable
    users: int = 0
    dropped: bool = False


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
    """Open folders below one root; see the module's contract."""

    def __init__(self, root: bytes) -> None:
        """Remember where; nothing is opened or made yet.

        Args:
            root: Absolute path.
        """
        self._root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[bytes, _Folder] = OrderedDict()
        self._syncs = _SharedSyncs()
        self._known: dict[
            bytes, Hashable
        ] = {}  # folder -> identity of the one whose name is on disk
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._open_max = max(4, min(FOLDERS_OPEN_MAX, soft // 4))

    @property
    def open_max(self) -> int:
        """How many folders stay open; those in use may be more."""
        return self._open_max

    @contextmanager
    def hold(self, folder: bytes) -> Iterator[int]:
        """A descriptor of ``folder`` (relative to the root, ``b""`` for the root itself), perhaps not durable.

        Raises:
            OSError: It cannot be made or opened; ENOTDIR when an object is in its place.
        """
        entry = self._take(folder) or self._add(folder, self._open_or_make(folder))
        try:
            yield entry.fd
        finally:
            self._give_back(entry)

    @contextmanager
    def lease(self, folder: bytes) -> Iterator[int]:
        """As ``hold``, of a folder whose name is on disk.

        Raises:
            OSError: As ``hold``, or its name could not be forced to disk.
        """
        with self.hold(folder) as fd:
            self.force_names([folder])
            yield fd

    def force_names(self, folders: Iterable[bytes]) -> None:
        """Return when the names of ``folders`` and of all above them are on disk. They are held by the caller.

        Raises:
            OSError: A folder cannot be opened or forced; how far that went is not known.
        """
        names: dict[bytes, Hashable] = {}
        for folder in folders:
            self._collect_unforced(folder, names)
        for parent in sorted({_above(folder) for folder in names}, key=_depth, reverse=True):
            with self.hold(parent) as fd:
                self._syncs.force(parent, fd)
        if (
            names
        ):  # only now: who finds a folder here takes it that all above it are on disk as well
            with self._lock:
                if len(self._known) + len(names) > _FOLDERS_KNOWN_MAX:
                    self._known.clear()
                self._known.update(names)

    def forget(self, folder: bytes) -> None:
        """Drop ``folder`` and all above it: one of them has been removed."""
        dropped: list[int] = []
        with self._lock:
            while True:
                self._known.pop(folder, None)
                dropped += self._drop(folder)
                if not folder:
                    break
                folder = folder.rpartition(b"/")[0]
        _close_all(dropped)

    def close(self) -> None:
        """Close every descriptor as soon as nobody uses it."""
        with self._lock:
            dropped = [fd for folder in list(self._open) for fd in self._drop(folder)]
        _close_all(dropped)

    def _take(self, folder: bytes) -> _Folder | None:
        with self._lock:
            entry = self._open.get(folder)
            if entry is not None:
                self._open.move_to_end(folder)
                entry.users += 1
            return entry

    def _add(self, folder: bytes, fd: int) -> _Folder:
        surplus: list[int] = []
        identity = _identity(fd)
        with self._lock:
            entry = self._open.get(folder)
            if entry is None:
                entry = self._open[folder] = _Folder(fd, identity)
            else:  # another thread was faster
                surplus.append(fd)
            entry.users += 1
            surplus += self._evict()
        _close_all(surplus)
        return entry

    def _give_back(self, entry: _Folder) -> None:
        with self._lock:
            entry.users -= 1
            is_last = entry.dropped and not entry.users
        if is_last:
            os.close(entry.fd)

    # The next two are called with the lock held and return what is to be closed once it is not: a call of the system
    # under the lock would make every other thread wait for it.

    def _drop(self, folder: bytes) -> list[int]:
        entry = self._open.pop(folder, None)
        if entry is None:
            return []
        entry.dropped = True
        return [] if entry.users else [entry.fd]

    def _evict(self) -> list[int]:
        """Drop the folders used longest ago; those in use are passed by. Looks at few, however many are open."""
        surplus = len(self._open) - self._open_max
        if surplus <= 0:
            return []
        oldest = itertools.islice(self._open.items(), surplus + _LOOKED_AT_MAX)
        idle = (folder for folder, entry in oldest if not entry.users)
        return [fd for folder in [*itertools.islice(idle, surplus)] for fd in self._drop(folder)]

    def _collect_unforced(self, folder: bytes, names: dict[bytes, Hashable]) -> None:
        """Add ``folder`` and what is above it, up to the first whose name is known to be on disk."""
        while folder and folder not in names:
            identity = self._identity_of(folder)
            if self._known.get(folder) == identity:
                return
            names[folder] = identity
            folder = _above(folder)

    def _identity_of(self, folder: bytes) -> Hashable:
        entry = self._take(folder) or self._add(folder, self._open_or_make(folder))
        self._give_back(entry)
        return entry.identity

    def _open_or_make(self, folder: bytes) -> int:
        try:
            return os.open(self._root + b"/" + folder, _FLAGS)
        except FileNotFoundError:
            return self._make(folder)

    def _make(self, folder: bytes) -> int:
        if not folder:
            make_durable_folder(self._root)
            return os.open(self._root, _FLAGS)
        name = folder.rpartition(b"/")[2]
        with self.hold(_above(folder)) as parent_fd:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent_fd)
            return os.open(name, _FLAGS, dir_fd=parent_fd)


def _identity(fd: int) -> Hashable:
    """What no other folder has, not even one made in its place once it is gone."""
    found = os.fstat(fd)
    birth = getattr(found, "st_birthtime", None)
    if birth is None:
        try:
            birth = fcntl.ioctl(fd, _GET_GENERATION, bytes(_LONG_BYTES))
        except OSError:
            return object()
    return found.st_dev, found.st_ino, birth


def _above(folder: bytes) -> bytes:
    return folder.rpartition(b"/")[0]


def _depth(folder: bytes) -> int:
    return folder.count(b"/") + bool(folder)


def _close_all(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def make_durable_folder(path: bytes) -> None:
    """Make ``path`` and what is missing above it, each name forced to disk."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for made in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(made)
        sync_folder(os.path.dirname(made))


def sync_folder(path: bytes) -> None:
    """Force the entries of a folder to disk."""
    fd = os.open(path, _FLAGS)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
