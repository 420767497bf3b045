"""Walk a folder tree in byte order of the full keys, entering only folders that can matter."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from backends.base import ObjectInfo, check_key
from backends.errors import InvalidKeyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet

_NS_PER_MS = 1_000_000


def walk(
    root: bytes,
    hidden: AbstractSet[bytes],
    prefix: str,
    start_after: str,
    foreign: Callable[[bytes], None],
) -> Iterator[ObjectInfo]:
    """Objects below ``root`` whose key begins with ``prefix`` and is greater than ``start_after``.

    Each folder is read when the walk reaches it: O(names of the folder) memory. Files and folders
    that vanish meanwhile are left out. So are links, devices and names that are no keys, which are noted.

    Args:
        root: Absolute path; a missing one has no objects.
        hidden: Names of the folders in the root that are not part of the store.
        prefix: What keys begin with.
        start_after: The key after which to begin.
        foreign: Told of what is no object: its name below the root.

    Raises:
        OSError: A folder cannot be read.
    """
    wanted, after = prefix.encode(), start_after.encode()
    begin = wanted.rpartition(b"/")[0]
    if begin.partition(b"/")[0] in hidden:
        return
    yield from _Walk(root, hidden, wanted, after, foreign).below(begin + b"/" if begin else b"")


class _Walk:
    def __init__(
        self,
        root: bytes,
        hidden: AbstractSet[bytes],
        wanted: bytes,
        after: bytes,
        foreign: Callable[[bytes], None],
    ) -> None:
        self._root = root
        self._hidden = {name + b"/" for name in hidden}
        self._wanted = wanted
        self._after = after
        self._foreign = foreign

    def below(self, base: bytes) -> Iterator[ObjectInfo]:
        """What lies below a folder, "" or ending in a slash."""
        for name, is_folder in _entries(self._root + b"/" + base):
            key = base + name
            if is_folder:
                if key not in self._hidden and _may_hold(key, self._wanted, self._after):
                    yield from self.below(key)
            elif key > self._after and key.startswith(self._wanted):
                info = self._info(key)
                if info is not None:
                    yield info

    def _info(self, key: bytes) -> ObjectInfo | None:
        """What is told of a file; None: it has gone, or it is no object, which is noted."""
        try:
            text = key.decode()
            check_key(text)
            found = os.lstat(self._root + b"/" + key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (UnicodeDecodeError, InvalidKeyError):
            self._foreign(key)
            return None
        if not stat.S_ISREG(found.st_mode):
            self._foreign(key)
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
