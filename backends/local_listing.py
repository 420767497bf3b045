"""Walk a folder tree in byte order of the full keys, entering only folders that can matter."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from backends.base import ObjectInfo, check_key
from backends.errors import InvalidKeyError

if TYPE_CHECKING:
    from collections.abc import Iterator

_NS_PER_MS = 1_000_000


def walk(root: bytes, hidden: bytes, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
    """Objects below ``root`` whose key begins with ``prefix`` and is greater than ``start_after``.

    Each folder is read when the walk reaches it: O(names of the folder) memory. Files and folders
    that vanish meanwhile are left out. So are links, devices and names that are no keys.

    Args:
        root: Absolute path; a missing one has no objects.
        hidden: Name of the one folder in the root that is not part of the store.
        prefix: What keys begin with.
        start_after: The key after which to begin.

    Raises:
        OSError: A folder cannot be read.
    """
    wanted, after = prefix.encode(), start_after.encode()
    begin = wanted.rpartition(b"/")[0]
    if begin == hidden or begin.startswith(hidden + b"/"):
        return
    yield from _walk(root, begin + b"/" if begin else b"", hidden, wanted, after)


def _walk(
    root: bytes, base: bytes, hidden: bytes, wanted: bytes, after: bytes
) -> Iterator[ObjectInfo]:
    for name, is_folder in _entries(root + b"/" + base):
        key = base + name
        if is_folder:
            if key != hidden + b"/" and _may_hold(key, wanted, after):
                yield from _walk(root, key, hidden, wanted, after)
        elif key > after and key.startswith(wanted):
            info = _info(root, key)
            if info is not None:
                yield info


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


def _info(root: bytes, key: bytes) -> ObjectInfo | None:
    try:
        text = key.decode()
        check_key(text)
        found = os.lstat(root + b"/" + key)
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, InvalidKeyError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return ObjectInfo(text, found.st_size, found.st_mtime_ns // _NS_PER_MS)
