"""Whether a broker runs on a store directory, and since when.

A running broker holds a POSIX write lock on byte 0 of ``lock``. It has written ``abort`` at its start and removes it
when it stops cleanly; so ``abort`` tells a crash from a clean stop, and its time is the start of the running broker.
Brokers before 5.0 leave an ``abort`` file of the run before as it is, and empty; but each start writes into ``lock``,
whose time then tells. Both are written before messages are accepted, which is why a changed mark is seen before
anything that the new broker stored.

**Never open ``lock`` in a process that holds a POSIX lock on it**: closing any descriptor of the file drops the lock.
A writer in this process therefore takes an open-file-description lock (``F_OFD_SETLK``), which other processes'
POSIX locks respect and which closing another descriptor leaves alone; ``is_locked`` sees such locks too.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from dataclasses import dataclass
from typing import Final

from tiered.local.files import open_read_only, unreadable

LOCK_FILE: Final = "lock"
ABORT_FILE: Final = "abort"

_FLOCK: Final = struct.Struct("@qqihh" if sys.platform == "darwin" else "@hhqqi4x")
"""``struct flock``: type, whence, start, length, process (on macOS start, length, process, type, whence)."""


@dataclass(frozen=True, slots=True)
class AbortMark:
    """The ``abort`` file as it stands.

    Attributes:
        inode: Its number.
        mtime_ns: When it was written, nanoseconds since 1970.
        lock_mtime_ns: When ``lock`` was written, if ``abort`` is empty; else 0.
    """

    inode: int
    mtime_ns: int
    lock_mtime_ns: int = 0

    @property
    def started_ms(self) -> int:
        """When the broker that runs (or crashed) started, UTC milliseconds, rounded down."""
        return max(self.mtime_ns, self.lock_mtime_ns) // 1_000_000


@dataclass(frozen=True, slots=True)
class Liveness:
    """A look at a store.

    Attributes:
        is_locked: A broker (or other writer) holds the store.
        abort: None when there is no ``abort`` file: stopped cleanly, or not quite started.
    """

    is_locked: bool
    abort: AbortMark | None


def look(directory: str) -> Liveness:
    """Whether a broker runs on ``directory``, and since when. The lock is looked at first: a broker takes it first."""
    locked = is_locked(directory)
    return Liveness(locked, abort_mark(directory))


def abort_mark(directory: str) -> AbortMark | None:
    """The ``abort`` file, or None. One system call, two with brokers before 5.0."""
    found = _stat(f"{directory}/{ABORT_FILE}")
    if found is None:
        return None
    lock = None if found.st_size else _stat(f"{directory}/{LOCK_FILE}")
    return AbortMark(found.st_ino, found.st_mtime_ns, 0 if lock is None else lock.st_mtime_ns)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 (asked with every poll; Path costs three times as much)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def is_locked(directory: str) -> bool:
    """Whether another open file holds a conflicting lock on byte 0 of ``lock``. Takes no lock itself.

    Raises:
        InvalidError: The file may not be read.
    """
    path = f"{directory}/{LOCK_FILE}"
    try:
        descriptor = open_read_only(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _wanted_lock())
    finally:
        os.close(descriptor)
    return _lock_type(answer) != fcntl.F_UNLCK


def _wanted_lock() -> bytes:
    if sys.platform == "darwin":
        return _FLOCK.pack(0, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)


def _lock_type(answer: bytes) -> int:
    fields = _FLOCK.unpack(answer)
    return int(fields[3] if sys.platform == "darwin" else fields[0])
