"""Reading small files that a person has named: never waiting for whoever might write into a FIFO or a device."""

from __future__ import annotations

import errno
import os
import stat


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a regular file.

    Raises:
        OSError: It cannot be read, or is something else (a FIFO, socket, device or folder).
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()
