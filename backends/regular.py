"""Small files that a person has named: never waiting for the other end of a FIFO, nor taking a device for a file."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a regular file.

    Raises:
        OSError: It cannot be read, or is something else (a FIFO, socket, device or folder).
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _not_regular(path)
        return file.read()


def write_regular(path: str | os.PathLike[str], data: bytes) -> None:
    """Put a file there, or in the place of one that is there: the whole file or, on a full disk, none of it.

    Behind a symbolic link the file that it names is replaced.

    Raises:
        OSError: It cannot be written, or something else (a FIFO, socket, device or folder) is there. What was there stays.
    """
    real = os.path.realpath(path)
    mode = None
    with suppress(FileNotFoundError):
        found = Path(real).stat()
        if not stat.S_ISREG(found.st_mode):
            raise _not_regular(path)
        mode = stat.S_IMODE(found.st_mode)
    draft = f"{real}.{os.getpid()}.tmp"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)
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
