"""The lock that a writer holds on a store: byte 0 of the file ``lock``, as a broker does.

**Contract.** On Linux it is an open-file-description lock: brokers' POSIX locks respect it, and it stays when another
descriptor of the file is closed in this process (as ``tiered.local.liveness.is_locked`` does). Elsewhere it is a POSIX
lock, which the closing of any descriptor drops: there, do not open the same directory for reading in the same process.
The system drops it when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from typing import Final

from tiered.errors import InvalidError
from tiered.local.files import open_regular
from tiered.local.liveness import LOCK_FILE

_FLOCK: Final = struct.Struct("@hhqqi4x")
"""Linux's ``struct flock``: type, whence, start, length, process."""
_CONTENT: Final = b"lock"


class StoreLock:
    """Holds the store from construction to ``close``."""

    def __init__(self, root: str) -> None:
        """Take the lock, without waiting.

        Raises:
            InvalidError: A broker or another writer holds it.
        """
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
