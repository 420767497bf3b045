"""A folder whose machine loses its power: what was not brought to the disk may be there, or not, page by page.

``Power`` watches ``fsync`` and ``fdatasync`` of this process below a folder, and remembers what each brought to the disk: of
a file its bytes, of a folder its names. ``survivor`` writes down what may be found after the failure: of each page that was
not synced since it was written, and of each name, the old or the new, by chance. So a rename may
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
        root: The folder.
        before_sync: Called by the main thread before each sync.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.before_sync = root, lambda: None
        self._bytes: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int]] = {}
        self._held: dict[
            int, int
        ] = {}  # descriptors, so that the number of a deleted file is no other's
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
            if threading.current_thread() is threading.main_thread():
                self.before_sync()
            sync(descriptor)
            path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            if Path(path).is_relative_to(self.root):
                self._note(descriptor, path)

        return noted

    def _note(self, descriptor: int, path: str) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            with self._lock, os.scandir(path) as names:
                self._names[path] = {one.name: one.inode() for one in names}
        else:
            with self._lock:
                # By its descriptor: it may have no name yet.
                self._bytes[found.st_ino] = _all_of(f"/proc/self/fd/{descriptor}")
                if found.st_ino not in self._held:
                    self._held[found.st_ino] = os.dup(descriptor)

    def survivor(self, folder: Path, rng: random.Random) -> None:
        """Write what may be left to a new folder."""
        with self._lock:
            self._survive(self.root, folder, rng)

    def _survive(self, now: Path, folder: Path, rng: random.Random) -> None:
        folder.mkdir()
        known, there = self._names.get(str(now), {}), {one.name: one for one in now.iterdir()}
        of_number = {one.stat().st_ino: one for one in there.values()}
        for name in sorted({*known, *there}):
            present = there.get(name)
            number = present.stat().st_ino if present else -1
            if known.get(name) != number and rng.random() < 0.5:
                number = known.get(name, -1)
                present = of_number.get(number)
            if present is not None and present.is_dir():
                self._survive(present, folder / name, rng)
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


def _all_of(path: str) -> bytes:
    return Path(path).read_bytes()
