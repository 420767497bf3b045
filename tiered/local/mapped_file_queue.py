"""Mapped file queues, as brokers call them: equally long files that another process writes, moves and deletes, read here.

Each file is named by the byte of the queue at which it begins (20 digits), so that all of them are one range of bytes.

**Contract.** Files are opened for reading only and read with ``pread``; nothing is mapped here, so that a file that is
truncated under us gives a short read, never a signal, and memory stays bounded. A file that has vanished (expiry)
gives no bytes. What was read is never kept; descriptors are, at most ``open_max`` of them between reads, least
recently used first out; fewer from then on where the process may have no more. A descriptor whose file has been unlinked
still reads: call ``FileCache.drop_deleted`` when a directory changed, so that a new file of the same name is seen. For any
thread. A crash leaves nothing behind: nothing
is locked or written.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from bisect import bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeVar

from tiered.errors import ClosedError, InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

_Found = TypeVar("_Found")
_Positions = TypeVar("_Positions", int, "npt.NDArray[np.int64]")
_NOT_A_FILE: Final = (errno.ENXIO, errno.ENODEV, errno.EISDIR)
_TOO_MANY: Final = (errno.EMFILE, errno.ENFILE)
_NOATIME: Final = getattr(os, "O_NOATIME", 0)
_OPEN_MIN: Final = 16
_OPEN_MAX: Final = 32_768
_LEFT_TO_OTHERS: Final = 4096
_MARKED_FILES: Final = 3
"""What a crash loses was written last; behind it there is at most one file, of zeros."""
NAME_DIGITS: Final = 20
"""Digits of a file name in a row."""


def open_regular(path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a file of a store, which is a regular one: who opens a FIFO waits for its other end, perhaps for ever."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_regular(path)
    return descriptor


def if_there(path: str, look: Callable[[], _Found]) -> _Found | None:
    """What a call finds at a path; None when there is nothing."""
    try:
        return look()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def open_if_there(path: str) -> int | None:
    """As ``open_read_only``; None when there is no such file."""
    return if_there(path, lambda: open_read_only(path))


def stat_if_there(path: str, *, follows_links: bool = True) -> os.stat_result | None:
    """What the system knows of a file or directory; None when there is none."""
    # (asked with every poll; Path costs three times as much)
    return if_there(path, lambda: os.stat(path, follow_symlinks=follows_links))  # noqa: PTH116


def open_read_only(path: str) -> int:
    """Open a regular file for reading, without touching the access time where the system lets us."""
    if _NOATIME:
        try:
            return open_regular(path, _NOATIME)
        except PermissionError:
            pass  # only the owner may leave the access time alone
    return open_regular(path)


def not_regular(path: str) -> InvalidError:
    """The error to raise for what is no file in the place of one."""
    return InvalidError(
        "not a regular file, but a FIFO, a socket, a device or a directory",
        where=path,
        do="put the store's file back, or name the right directory",
    )


def unreadable(path: str, error: OSError) -> InvalidError:
    """The error to raise when ``path`` cannot be read for another reason than its absence."""
    return InvalidError(
        f"cannot read the store: {error.strerror or error}",
        where=path,
        do="give this user the right to read it, or look at the disk",
    )


def default_open_max() -> int:
    """Half of the descriptors that this process may have, or all but 4,096; at most 32,768.

    With fewer than there are queues, each look at all of them opens every file anew.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _OPEN_MAX
    return max(_OPEN_MIN, min(_OPEN_MAX, max(soft // 2, soft - _LEFT_TO_OTHERS)))


class _Open:
    """One open file, and how many reads are under way on it."""

    __slots__ = ("descriptor", "is_dropped", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0
        self.is_dropped = False

    def is_of(self, inode: int | None) -> bool:
        """Whether it is the file with this number; None: any."""
        return inode is None or os.fstat(self.descriptor).st_ino == inode


_PAGE_BYTES: Final = 4096
_FAILED_IN_A_ROW_MAX: Final = 8
"""Pages that a device has failed to read one after another: the rest of what is asked for is not tried then."""
_TRY_AGAIN_S: Final = 30.0
_LOST: Final = b"\xff"
"""What stands for a byte that cannot be read: no record has it in its magic, and no size is as large."""


class LostPages:
    """What a device fails to read of some files (``EIO``): passed over, and tried again later. For any thread.

    A bad sector must not end a reader of all else. What stands there waits: it is not gone before somebody says so.
    """

    def __init__(self, directory: str, now_s: Callable[[], float]) -> None:
        # Of whose files pages may be passed over; of others a failed read is an error.
        self.directory = directory
        self._now_s = now_s
        self._lock = threading.Lock()
        self._pages: dict[str, dict[int, float]] = {}

    def covers(self, path: str) -> bool:
        """Whether pages of a file may be passed over."""
        return path.startswith(self.directory)

    def has(self, path: str, start: int, end: int) -> bool:
        """Whether any of the bytes ``[start, end)`` of a file could not be read when they were asked for last."""
        if not self._pages:
            return False
        with self._lock:
            pages = self._pages.get(path, {})
            return any(start < page + _PAGE_BYTES and page < end for page in pages)

    @property
    def first(self) -> tuple[str, int] | None:
        """The first place that cannot be read: a file, and a byte of it; None: all can be."""
        with self._lock:
            return min(
                ((path, min(pages)) for path, pages in self._pages.items() if pages), default=None
            )

    def read(self, descriptor: int, path: str, offset: int, view: memoryview) -> int:
        """Fill ``view`` page by page; what cannot be read is filled with 0xff. The number of bytes, as of a read."""
        done, failed, now_s = 0, 0, self._now_s()
        size = max(0, min(len(view), os.fstat(descriptor).st_size - offset))
        while done < size:
            page = (offset + done) // _PAGE_BYTES * _PAGE_BYTES
            part = view[done : min(size, page + _PAGE_BYTES - offset)]
            with self._lock:
                known_s = self._pages.get(path, {}).get(page)
            is_tried = failed < _FAILED_IN_A_ROW_MAX
            is_tried = is_tried and (known_s is None or now_s >= known_s + _TRY_AGAIN_S)
            if is_tried and self._read_page(descriptor, offset + done, part):
                failed = 0
                with self._lock:
                    self._pages.get(path, {}).pop(page, None)
            else:
                failed += is_tried
                part[:] = _LOST * len(part)
                with self._lock:
                    known = self._pages.setdefault(path, {})
                    known[page] = now_s if known_s is None or is_tried else known_s
            done += len(part)
        with self._lock:
            if not self._pages.get(path, {True: 0.0}):
                del self._pages[path]
        return size

    @staticmethod
    def _read_page(descriptor: int, offset: int, part: memoryview) -> bool:
        try:
            return os.preadv(descriptor, [part], offset) == len(part)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False


class FileCache:
    """Open files of one store. For any thread."""

    def __init__(self, open_max: int | None = None) -> None:
        self._open_max = open_max or default_open_max()
        self._lock = threading.Lock()
        self.scan_lock = threading.Lock()
        """Held while a row lists its directory."""
        self._files: OrderedDict[str, _Open] = OrderedDict()
        self._is_closed = False
        # What is passed over of files that a device fails to read; None: nothing is, and it is an error.
        self.lost: LostPages | None = None
        self.stop: Callable[[], bool] = lambda: False
        """Asked before each read: once it says so, reads end with ``ClosedError``."""

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset``; fewer at the end of the file, none when it does not exist."""
        view = memoryview(bytearray(size))
        return bytes(view[: self.read_chunks(path, ((offset, size),), view)])

    def read_same(self, path: str, inode: int, offset: int, view: memoryview) -> int | None:
        """Fill ``view`` from ``offset`` on; how many bytes were read. None: another file, or none, has this name now.

        One that is open is read on, whatever has come in its place.
        """
        file = self._take(path, inode)
        if file is None:
            return None
        try:
            return _read_rest(file.descriptor, view, offset)
        except OSError as error:
            raise unreadable(path, error) from error
        finally:
            self._give_back(file)

    def _refuse_lost(self, path: str, offset: int, size: int) -> None:
        """Fail as the device has failed on some of these bytes, so that they are not waited for again."""
        if self.lost is not None and self.lost.has(path, offset, offset + size):
            raise OSError(errno.EIO, "failed before", path)

    def _salvage(
        self, error: OSError, file: _Open, path: str, offset: int, view: memoryview
    ) -> int:
        """After an error: what can be read all the same, where pages may be passed over."""
        if error.errno != errno.EIO or self.lost is None or not self.lost.covers(path):
            raise unreadable(path, error) from error
        try:
            return self.lost.read(file.descriptor, path, offset, view)
        except OSError as other:
            raise unreadable(path, other) from other

    def next_data(self, path: str, offset: int) -> int | None:
        """Where the first byte at or behind ``offset`` lies that may not be zero; None when a hole goes on to the end.

        Files have their whole length from the beginning, most of it a hole that would be read as zeros. Where the file
        system doesn't tell holes, or the file does not exist, it is ``offset`` itself.
        """
        file = self._take(path)
        if file is None:
            return offset
        try:
            # The descriptor's own place is of no interest: who shares it says where to read.
            return os.lseek(file.descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else offset
        finally:
            self._give_back(file)

    def read_chunks(self, path: str, chunks: Sequence[tuple[int, int]], view: memoryview) -> int:
        """Fill ``view`` with chunks (offset, size) of one file, in a row; how many bytes were read.

        What was not read is left as it was.
        """
        file = self._take(path)
        if file is None:
            return 0
        at = total = 0
        descriptor, preadv = file.descriptor, os.preadv
        try:
            for offset, size in chunks:
                part = view[at : at + size]
                try:
                    self._refuse_lost(path, offset, size)
                    count = preadv(descriptor, [part], offset)
                    if count < size:
                        count += _read_rest(descriptor, part[count:], offset + count)
                    total += count
                except OSError as error:
                    total += self._salvage(error, file, path, offset, part)
                at += size
        finally:
            self._give_back(file)
        return total

    def drop_deleted(self, paths: Iterable[str] | None = None) -> None:
        """Close the descriptors whose files have been unlinked: of these paths, or of all."""
        with self._lock:
            for path in list(self._files) if paths is None else paths:
                file = self._files.get(path)
                if file is not None and not os.fstat(file.descriptor).st_nlink:
                    self._drop(path)

    def drop_all(self) -> None:
        """Close every descriptor; the next read opens anew."""
        with self._lock:
            for path in list(self._files):
                self._drop(path)

    def close(self) -> None:
        """Close everything for good. Reads under way end well; later ones raise ``ClosedError``."""
        self._is_closed = True
        self.drop_all()

    @property
    def open_count(self) -> int:
        """Files open now."""
        return len(self._files)

    def _take(self, path: str, inode: int | None = None) -> _Open | None:
        if self.stop():
            raise ClosedError("told to stop, while the store was looked at", where=path)
        with self._lock:
            file = self._files.get(path)
            if file is not None and not file.is_of(inode):
                self._drop(path)
                file = None
            if file is None:
                file = self._open(path)
                if file is None:
                    return None
                self._files[path] = file
                if len(self._files) > self._open_max:
                    self._drop(next(iter(self._files)))
                if not file.is_of(inode):
                    return None
            else:
                self._files.move_to_end(path)
            file.users += 1
            return file

    def _open(self, path: str) -> _Open | None:
        if self._is_closed:
            raise ClosedError("the local store has been closed", where=path)
        while True:
            try:
                return _Open(open_read_only(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                if error.errno not in _TOO_MANY or not self._files:
                    raise unreadable(path, error) from error
            for oldest in list(self._files)[: len(self._files) // 2 + 1]:  # others need them more
                self._drop(oldest)
            self._open_max = max(len(self._files), 1)

    def _give_back(self, file: _Open) -> None:
        with self._lock:
            file.users -= 1
            if file.is_dropped and not file.users:
                os.close(file.descriptor)

    def _drop(self, path: str) -> None:
        """Forget a file; close it now, or when the last read on it ends. The lock is held."""
        file = self._files.pop(path)
        file.is_dropped = True
        if not file.users:
            os.close(file.descriptor)


def _read_rest(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` as far as the file goes, after a short read: one ends before a page that fails, and the next tells."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


class MappedFileQueue:
    """The files of one directory that are named by 20 digits, seen as one range of bytes. For any thread."""

    __slots__ = ("_bases", "_cache", "_stamp", "directory", "end", "file_bytes", "ignored")

    def __init__(
        self, cache: FileCache, directory: str, file_bytes: int, listed: Listed | None = None
    ) -> None:
        self._cache = cache
        self.directory = directory  # where they are
        # Size of each file in bytes; 0: not known yet, and the row shows no files.
        self.file_bytes = file_bytes
        self._stamp: tuple[int, int] | None = None
        self._bases: tuple[int, ...] = ()
        # Where files begin that are not believed: they count as missing.
        self.ignored: frozenset[int] = frozenset()
        # One past the last file, whether or not that has been written; 0 without files. As of the last scan.
        self.end = 0
        if listed is None or not file_bytes:
            self.rescan()
        else:
            self._see(*listed)

    @property
    def bases(self) -> tuple[int, ...]:
        """Where the files begin, in order, as of the last scan."""
        return self._bases

    def rescan(self) -> bool:
        """List the directory again if it changed; whether it did. One system call when it did not."""
        if not self.file_bytes:
            return False
        stamp = directory_stamp(self.directory)
        if stamp is not None and stamp == self._stamp:
            return False
        with self._cache.scan_lock:  # an older listing must not take the place of a newer one
            self._see(*list_row(self.directory))
        return True

    def ignore(self, base: int) -> None:
        """Take a file for missing from now on."""
        with self._cache.scan_lock:
            self.ignored |= {base}
            self._see(self._stamp, self._bases)

    def _see(self, stamp: tuple[int, int] | None, bases: tuple[int, ...]) -> None:
        # Not all that are open: they are as many as there are queues, and each of these has its turn here.
        self._cache.drop_deleted(map(self.path, {*self._bases, *bases}))
        if self.ignored:
            bases = tuple(base for base in bases if base not in self.ignored)
        self._bases = bases
        self.end = bases[-1] + self.file_bytes if bases else 0
        self._stamp = stamp

    def mark(self) -> tuple[tuple[int, int], ...]:
        """Changes when somebody writes into one of the last files, or makes it anew; mapped pages show late."""
        return tuple(_file_stamp(self.path(base)) for base in self._bases[-_MARKED_FILES:])

    def base_of(self, position: int) -> int | None:
        """Where the file that holds ``position`` begins; None when there is no such file."""
        bases = self._bases
        at = bisect_right(bases, position) - 1
        if at < 0 or position >= bases[at] + self.file_bytes:
            return None
        return bases[at]

    def within(self, positions: _Positions) -> _Positions:
        """How far behind the beginning of its file each position lies, whether or not there is such a file.

        Files begin at multiples of their size; not so the only one, when it was cut short.
        """
        return (positions - (self._bases[0] if self._bases else 0)) % self.file_bytes

    def next_base(self, position: int) -> int | None:
        """Where the first file that begins behind ``position`` begins."""
        bases = self._bases
        at = bisect_right(bases, position)
        return bases[at] if at < len(bases) else None

    def path(self, base: int) -> str:
        """The file that begins at ``base``."""
        return f"{self.directory}/{base:0{NAME_DIGITS}d}"

    def read(self, position: int, size: int) -> bytes:
        """Bytes from ``position`` on, from one file only; fewer at its end or when it is gone."""
        base = self.base_of(position)
        if base is None:
            return b""
        size = min(size, base + self.file_bytes - position)
        return self._cache.read(self.path(base), position - base, size)

    @property
    def has_lost(self) -> bool:
        """Whether anything of the store's log could not be read when it was asked for last."""
        lost = self._cache.lost
        return lost is not None and lost.first is not None

    def lost(self, positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]) -> list[bool]:
        """Which chunks of the row hold bytes that could not be read when they were asked for last."""
        lost = self._cache.lost
        if lost is None or not self.has_lost:
            return [False] * len(positions)
        return [
            (base := self.base_of(start)) is not None
            and lost.has(self.path(base), start - base, start - base + size)
            for start, size in zip(positions.tolist(), sizes.tolist(), strict=True)
        ]

    def next_data(self, position: int) -> int | None:
        """The first position in the file of ``position`` from which on a byte may not be zero; None without one."""
        base = self.base_of(position)
        if base is None:
            return None
        found = self._cache.next_data(self.path(base), position - base)
        return None if found is None or found >= self.file_bytes else base + found

    def read_into(self, position: int, view: memoryview) -> int:
        """As ``read``, into ``view``; the number of bytes."""
        base = self.base_of(position)
        if base is None:
            return 0
        size = min(len(view), base + self.file_bytes - position)
        return self._cache.read_chunks(self.path(base), ((position - base, size),), view)

    def read_chunks(self, chunks: Sequence[tuple[int, int]], view: memoryview) -> bool:
        """Fill ``view`` with chunks ``[from, to)`` of the row, none across files; whether every byte could be read.

        What could not stays zero, as the view was.
        """
        done, total, at = 0, 0, 0
        while at < len(chunks):
            base = self.base_of(chunks[at][0])
            end = at + 1
            limit = 0 if base is None else base + self.file_bytes
            while end < len(chunks) and (base or 0) <= chunks[end][0] < limit:
                end += 1
            size = sum(chunk[1] - chunk[0] for chunk in chunks[at:end])
            if base is not None:
                places = [(start - base, stop - start) for start, stop in chunks[at:end]]
                part = view[done : done + size]
                total += self._cache.read_chunks(self.path(base), places, part)
            done, at = done + size, end
        return total == done


def _file_stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)  # noqa: PTH116 (asked again and again; Path costs three times as much)
    except OSError:
        return 0, 0  # gone; reading it says so
    return found.st_ino, found.st_mtime_ns


def directory_stamp(directory: str) -> tuple[int, int] | None:
    """Changes whenever a file comes or goes in ``directory``; None when it does not exist."""
    found = stat_if_there(directory)
    return None if found is None else (found.st_ino, found.st_mtime_ns)


def list_names(directory: str) -> list[str]:
    """Names in ``directory``, sorted; empty when it does not exist."""
    return sorted(if_there(directory, lambda: os.listdir(directory)) or ())  # noqa: PTH208 (names only)


def list_bases(directory: str, others: list[str] | None = None) -> tuple[int, ...]:
    """Where the files of a row begin; ``others`` gets the paths of what is not a part of it."""
    names = list_names(directory)
    bases = tuple(int(name) for name in names if is_row_name(name))
    if others is not None and len(bases) < len(names):
        others += [f"{directory}/{name}" for name in names if not is_row_name(name)]
    return bases


Listed = tuple["tuple[int, int] | None", tuple[int, ...]]
"""What a directory's stamp was, and then where the files of its row began."""


def list_row(directory: str, others: list[str] | None = None) -> Listed:
    """Look at the row of a directory. The stamp comes first: what comes later is seen with the next look.

    ``others``: see ``list_bases``.
    """
    stamp = directory_stamp(directory)
    return stamp, list_bases(directory, others)


def is_row_name(name: str) -> bool:
    """Whether a file of this name belongs to a row."""
    return len(name) == NAME_DIGITS and name.isascii() and name.isdigit()
