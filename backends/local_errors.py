"""The one place where the operating system's errors become ours."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from backends.errors import (
    BackendError,
    InvalidKeyError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreFullError,
    UnavailableError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def from_os(error: OSError, where: str) -> BackendError:
    """Our error for ``error``. What is not in the table may pass: a full fd table, a sick disk."""
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
