"""A folder whose machine loses its power: what was not brought to the disk may be there, or not, page by page.

``Power`` watches ``fsync`` and ``fdatasync`` of this process below a folder, and remembers what each brought to the disk: of
a file its bytes, of a folder its names. ``survivor`` writes down what may be found after the failure: of each page that was
not synced since it was written, and of each name, the old or the new, by chance, whatever became of others. So a rename may
be undone, a file may be there without its bytes, and later writes may have survived earlier ones.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

PAGE = 4096


class PowerFailure(BaseException):
    """Here the machine stops."""


class Power:
    """See the module.

    Attributes:
        root: The folder; it is on the disk itself.
        before_sync: Called before each sync below it.
    """

    def __init__(self, root: Path, *, of_all_threads: bool = False) -> None:
        """``before_sync`` is called by the main thread, or by all."""
        self.root, self.before_sync = root, lambda: None
        self._of_all_threads = of_all_threads
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._held: dict[int, int] = {}
        """Descriptors, so that the number of what is deleted is no other's."""
        self._lock = threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[Power]:
        """Until the block ends."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "fdatasync"):
                patch.setattr(os, name, self._noting(getattr(os, name)))
            try:
                yield self
            finally:
                for descriptor in self._held.values():
                    os.close(descriptor)
                self._held.clear()

    def _noting(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def noted(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if not path.is_relative_to(self.root):
                sync(descriptor)
                return
            if self._of_all_threads or threading.current_thread() is threading.main_thread():
                self.before_sync()
            with self._lock:  # a name that another thread makes meanwhile is not on the disk
                self._note(descriptor)
                sync(descriptor)

        return noted

    def _note(self, descriptor: int) -> None:
        found, path = os.fstat(descriptor), f"/proc/self/fd/{descriptor}"
        if found.st_ino not in self._held:
            self._held[found.st_ino] = os.dup(descriptor)
        if not stat.S_ISDIR(found.st_mode):
            self._bytes[found.st_ino] = _all_of(path)  # by its descriptor: it may have no name yet
            return
        with os.scandir(path) as names:
            there = {one.name: one for one in names}
        self._names[found.st_ino] = {name: one.inode() for name, one in there.items()}
        for one in there.values():
            if one.is_dir() and one.inode() not in self._held:
                self._held[one.inode()] = os.open(one.path, os.O_RDONLY | os.O_DIRECTORY)
                self._names.setdefault(one.inode(), {})

    def survivor(self, folder: Path, rng: random.Random) -> None:
        """Write what may be left to a new folder."""
        with self._lock:
            self._survive(self.root.stat().st_ino, self.root, folder, rng)

    def _survive(self, number: int, now: Path | None, folder: Path, rng: random.Random) -> None:
        folder.mkdir()
        known, there = self._names.get(number, {}), dict(_numbered(now) if now else ())
        of_number = {number: now / name for name, number in there.items() if now}
        for name in sorted({*known, *there}):
            number = there.get(name, -1)
            if known.get(name, -1) != number and rng.random() < 0.5:
                number = known.get(name, -1)
            present = of_number.get(number)
            if number in self._names if present is None else present.is_dir():
                self._survive(number, present, folder / name, rng)
            elif number >= 0:
                new = _all_of(str(present)) if present is not None else None
                (folder / name).write_bytes(self._pages(number, new, rng))

    def _pages(self, number: int, new: bytes | None, rng: random.Random) -> bytes:
        old = self._bytes.get(number, b"")
        if new is None or new == old:
            return old
        size = rng.choice((len(old), len(new)))
        old, new = old.ljust(size, b"\0")[:size], new.ljust(size, b"\0")[:size]
        pages = (slice(low, low + PAGE) for low in range(0, size, PAGE))
        return b"".join(new[page] if rng.random() < 0.5 else old[page] for page in pages)


def _numbered(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and what they stand for."""
    with os.scandir(folder) as names:
        yield from ((one.name, one.inode()) for one in names)


def _all_of(path: str) -> bytes:
    return Path(path).read_bytes()
