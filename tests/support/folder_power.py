"""A disk that loses, when the power fails, whatever nobody has forced to it: a model beside the real files.

``Disk.watch()`` takes the place of ``os`` in the modules of the folder store. Everything is done for real below ``base``,
and noted: which bytes of a file, and which names of a folder, are on disk for sure (``fsync``), and which only in memory.
``survivors`` is one of the states that a power failure at this moment could leave; ``leave`` makes it a folder.

As bad as POSIX allows: each name that was made, moved or removed since the last ``fsync`` of its folder may be as it was
then, as it is, or as it was in between, whatever became of others; bytes that were not forced are there, or cut, or zeros.
"""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from backends.testing.faulty import SimulatedCrash

# Paths are bytes here, as in the modules that are watched.
# ruff: noqa: PTH106, PTH108

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_MODULES = ("backends.local", "backends.local_files")


@dataclass(eq=False)
class File:
    """Bytes; ``forced``: those that are on disk for sure, None: nothing is."""

    data: bytearray = field(default_factory=bytearray)
    forced: bytes | None = None


@dataclass(eq=False)
class Folder:
    """Names; ``past``: of each name that has changed since the last ``fsync``, all that it stood for, oldest first."""

    names: dict[bytes, Node] = field(default_factory=dict)
    past: dict[bytes, list[Node | None]] = field(default_factory=dict)

    def put(self, name: bytes, node: Node | None) -> None:
        """Have a name stand for something, or for nothing."""
        self.past.setdefault(name, [self.names.get(name)]).append(node)
        if node is None:
            self.names.pop(name, None)
        else:
            self.names[name] = node


Node = File | Folder
Tree = dict[bytes, "bytes | Tree"]


class Disk:
    """See the module.

    Attributes:
        steps: Changes so far.
        lock: Held while something is done and noted: else two threads would be noted in another order.
        on_step: Called before each change, with its name; may raise ``SimulatedCrash``: the process is gone.
    """

    def __init__(self, base: Path) -> None:
        """``base`` is there, and on disk."""
        self._base = os.fsencode(base)
        self._root = Folder()
        self._open: dict[int, Node] = {}
        self.lock = threading.RLock()
        self.steps = 0
        self.on_step: Callable[[str], None] = lambda _what: None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what the folder store does, until the block ends."""
        shim: Any = _System(self)
        files = mock.Mock(wraps=tempfile, mkstemp=self.mkstemp, gettempdir=tempfile.gettempdir)
        with (
            mock.patch(f"{_MODULES[0]}.os", shim),
            mock.patch(f"{_MODULES[1]}.os", shim),
            mock.patch(f"{_MODULES[1]}.tempfile", files),
        ):
            yield

    # -- what could be left ---------------------------------------------------------------------

    def survivors(self, rng: random.Random) -> Tree:
        """One of the states that could be left if the power failed now."""
        with self.lock:
            return self._left_of(self._root, rng)

    def _left_of(self, folder: Folder, rng: random.Random) -> Tree:
        names: dict[bytes, Node | None] = dict(folder.names)
        names |= {name: rng.choice(past) for name, past in sorted(folder.past.items())}
        return {
            name: self._left_of(node, rng) if isinstance(node, Folder) else _bytes_of(node, rng)
            for name, node in sorted(names.items())
            if node is not None
        }

    # -- what is done ---------------------------------------------------------------------------

    def step(self, what: str) -> None:
        """A change is about to be made."""
        with self.lock:
            self.steps += 1
        self.on_step(what)

    def at(self, path: bytes | int, dir_fd: int | None = None) -> tuple[Folder, bytes] | None:
        """The folder that a path lies in, and its name there; None: not below ``base``."""
        if isinstance(path, int):
            return None
        if dir_fd is not None and not path.startswith(b"/"):
            above = self._open.get(dir_fd)
            return (above, path) if isinstance(above, Folder) else None
        if not path.startswith(self._base + b"/"):
            return None
        node: Node | None = self._root
        *folders, name = path[len(self._base) + 1 :].split(b"/")
        for one in folders:
            node = node.names.get(one) if isinstance(node, Folder) else None
        return (node, name) if isinstance(node, Folder) else None

    def node(self, path: bytes, dir_fd: int | None = None) -> Node | None:
        """What a path stands for."""
        path = path.rstrip(b"/")
        if path == self._base:
            return self._root
        if path.startswith(b"/proc/self/fd/"):
            return self._open.get(int(path.rpartition(b"/")[2]))
        if path == b"." and dir_fd is not None:
            return self._open.get(dir_fd)
        place = self.at(path, dir_fd)
        return place[0].names.get(place[1]) if place else None

    def opened(self, fd: int, path: bytes, flags: int, dir_fd: int | None) -> None:
        """A descriptor was given."""
        with self.lock:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                self._open[fd] = File()
                return
            node, place = self.node(path, dir_fd), self.at(path, dir_fd)
            if node is None and flags & os.O_CREAT and place:
                node = File()
                place[0].put(place[1], node)
            if node is None:
                self._open.pop(fd, None)
            else:
                self._open[fd] = node

    def closed(self, fd: int) -> None:
        """A descriptor is about to be closed."""
        with self.lock:
            self._open.pop(fd, None)

    def wrote(self, fd: int, data: bytes) -> None:
        """Bytes were added to a file."""
        with self.lock:
            node = self._open.get(fd)
            if isinstance(node, File):
                node.data += data

    def forced(self, fd: int) -> None:
        """A file's bytes, or a folder's names, are on disk."""
        with self.lock:
            node = self._open.get(fd)
            if isinstance(node, File):
                node.forced = bytes(node.data)
            elif node is not None:
                node.past.clear()

    def named(self, path: bytes, dir_fd: int | None, node: Node | None) -> None:
        """A name stands for something else now."""
        with self.lock:
            place = self.at(path, dir_fd)
            if place:
                place[0].put(place[1], node)

    def mkstemp(self, suffix: str = "", prefix: Any = b"", dir: Any = None) -> tuple[int, bytes]:  # noqa: A002
        """As the library's, of bytes."""
        self.step("mkstemp")
        fd, path = tempfile.mkstemp(suffix or None, prefix, dir)
        self.opened(fd, os.fsencode(path), os.O_CREAT, None)
        return fd, path


class _System:
    """Takes the place of ``os``: does it, and has the disk note it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with self._disk.lock:
            fd = os.open(path, flags, mode, dir_fd=dir_fd)
            self._disk.opened(fd, os.fsencode(path), flags, dir_fd)
            return fd

    def close(self, fd: int) -> None:
        with self._disk.lock:
            self._disk.closed(fd)
            os.close(fd)

    def writev(self, fd: int, pieces: Sequence[Any]) -> int:
        self._disk.step("write")
        with self._disk.lock:
            count = os.writev(fd, pieces)
            self._disk.wrote(
                fd, b"".join(bytes(memoryview(one).cast("B")) for one in pieces)[:count]
            )
            return count

    def write(self, fd: int, data: Any) -> int:
        self._disk.step("write")
        with self._disk.lock:
            count = os.write(fd, data)
            self._disk.wrote(fd, bytes(data)[:count])
            return count

    def fsync(self, fd: int) -> None:
        self._disk.step("fsync")
        with self._disk.lock:
            os.fsync(fd)
            self._disk.forced(fd)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._disk.step("mkdir")
        with self._disk.lock:
            os.mkdir(path, mode, dir_fd=dir_fd)
            self._disk.named(os.fsencode(path), dir_fd, Folder())

    def rmdir(self, path: Any) -> None:
        self._disk.step("rmdir")
        with self._disk.lock:
            os.rmdir(path)
            self._disk.named(os.fsencode(path), None, None)

    def unlink(self, path: Any) -> None:
        self._disk.step("unlink")
        with self._disk.lock:
            os.unlink(path)
            self._disk.named(os.fsencode(path), None, None)

    def link(
        self,
        source: Any,
        name: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        self._disk.step("link")
        with self._disk.lock:
            source = os.fsencode(source)
            more = {} if src_dir_fd is None else {"src_dir_fd": src_dir_fd}
            os.link(source, name, dst_dir_fd=dst_dir_fd, **more)
            self._disk.named(os.fsencode(name), dst_dir_fd, self._disk.node(source))

    def rename(self, source: Any, name: Any, *, dst_dir_fd: int | None = None) -> None:
        self._disk.step("rename")
        with self._disk.lock:
            source = os.fsencode(source)
            node = self._disk.node(source)
            os.rename(source, name, dst_dir_fd=dst_dir_fd)
            self._disk.named(os.fsencode(name), dst_dir_fd, node)
            self._disk.named(source, None, None)


def _bytes_of(file: File, rng: random.Random) -> bytes:
    data = bytes(file.data)
    if file.forced == data:
        return data
    some = [data, data[: rng.randrange(len(data) + 1)], bytes(len(data))]
    return rng.choice([*some, b"" if file.forced is None else file.forced])


def leave(tree: Tree, folder: Path) -> None:
    """Make a folder of what was left."""
    folder.mkdir()
    for name, node in tree.items():
        path = folder / os.fsdecode(name)
        if isinstance(node, dict):
            leave(node, path)
        else:
            path.write_bytes(node)


def killed_at(step: int) -> Callable[[str], None]:
    """For ``on_step``: the process is gone at its so-manieth change; the disk is not."""
    left = step

    def count(what: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise SimulatedCrash(what)

    return count
