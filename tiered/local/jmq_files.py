"""The store directory of a JoyQueue (JMQ 4) broker: partition groups, rows of files, and what checkpoints say. Read-only.

``topics/<topic, '/' as '@'>/<group>/`` has a group's journal, which its partitions share, ``checkpoint.json``, and
``index/<partition>/``. Journal and index are rows of files, each named by the position of its first byte of data, in
decimal, and with 128 bytes before that. A file goes on where the one before ends, and may end anywhere. An entry of an
index says where the message of its number stands in the journal; they are dense:

====== ===== =====================================================
offset bytes field
====== ===== =====================================================
0      8     position in the journal
8      4     size of the message; 0: nothing has been written here
====== ===== =====================================================

The broker writes ``checkpoint.json`` in place, so that a reader may find it empty or half written. What is left out, each
by its name: transactions that are not committed (``tx``), and what was removed (``.d.``).
"""

from __future__ import annotations

import os
import re
import stat
from bisect import bisect_right
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from backends.lazy_dataclass import dataclass
from tiered.format.fastjson import JsonError, loads
from tiered.format.jmq_message import FILE_HEADER_BYTES
from tiered.local.interface import LeftOut
from tiered.local.mapped_file_queue import (
    directory_stamp,
    if_there,
    list_names,
    not_regular,
    open_if_there,
    stat_if_there,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.local.mapped_file_queue import FileCache

ENTRY_BYTES: Final = 12
_ENTRY: Final = Struct(">qi")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,17}")
_PARTITION_MAX: Final = 2**15 - 1
_REMOVED: Final = ".d."
_TRANSACTIONS: Final = "tx"
_CHECKPOINT_BYTES_MAX: Final = 1 << 20


# -- folders -----------------------------------------------------------------------------------------


class GroupFolder(NamedTuple):
    """Where a partition group lies."""

    topic: str
    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.name}"

    @property
    def checkpoint(self) -> str:
        """The file that says how much is committed."""
        return f"{self.path}/checkpoint.json"


def is_jmq(path: str) -> bool:
    """Whether a directory is a store of JMQ: ``topics`` is in it, with the folder of a group, or the broker's ``lock``."""
    if stat_if_there(f"{path}/topics/.") is None:
        return False
    return stat_if_there(f"{path}/lock") is not None or any(
        stat_if_there(group.checkpoint) or stat_if_there(f"{group.path}/index/.")
        for group in find_groups(path)[0]
    )


def find_groups(path: str) -> tuple[list[GroupFolder], list[LeftOut]]:
    """The partition groups of a store, and what is left out of it."""
    groups, left_out = list[GroupFolder](), list[LeftOut]()
    for folder in list_names(f"{path}/topics"):
        if folder.startswith(_REMOVED):
            left_out.append(LeftOut(folder, "a partition group that was removed"))
            continue
        topic = folder.replace("@", "/")
        for name in list_names(f"{path}/topics/{folder}"):
            if _NUMBER.fullmatch(name):
                groups.append(GroupFolder(topic, name, f"{path}/topics/{folder}/{name}"))
            elif name == _TRANSACTIONS:
                left_out.append(LeftOut(f"{topic}/{name}", "transactions that are not committed"))
            else:
                left_out.append(LeftOut(f"{topic}/{name}", "no name of a partition group"))
    return groups, left_out


def find_partitions(group: GroupFolder) -> tuple[set[int], list[LeftOut]]:
    """The partitions that have an index, and those that were removed."""
    found, left_out = set[int](), list[LeftOut]()
    for name in list_names(f"{group.path}/index"):
        if _NUMBER.fullmatch(name) and int(name) <= _PARTITION_MAX:
            found.add(int(name))
        elif _REMOVED in name:
            left_out.append(LeftOut(f"{group}/{name}", "a partition that was removed"))
        else:
            left_out.append(LeftOut(f"{group}/{name}", "no name of a partition"))
    return found, left_out


# -- checkpoint --------------------------------------------------------------------------------------


class JmqCheckpoint(NamedTuple):
    """What ``checkpoint.json`` says."""

    committed: int  # journal position up to which the group's leader has committed
    indexed: int  # journal position up to which the indexes go
    nexts: Mapping[int, int]  # the next number of each partition's index there


def file_mark(path: str) -> tuple[int, int, int] | None:
    """Inode, size and time of a file, which change when somebody writes it; None: there is none."""
    found = stat_if_there(path)
    return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


def read_checkpoint(group: GroupFolder) -> JmqCheckpoint | None:
    """What the checkpoint says; None: there is none, or it is just being written."""
    path = group.checkpoint
    descriptor = open_if_there(path)
    if descriptor is None:
        return None
    try:
        data = if_there(path, lambda: os.pread(descriptor, _CHECKPOINT_BYTES_MAX, 0)) or b""
    finally:
        os.close(descriptor)
    return parse_checkpoint(data)


def parse_checkpoint(data: bytes) -> JmqCheckpoint | None:
    """A checkpoint, its keys in any order and without quotes where they are numbers; None: it is not whole."""
    try:
        found = loads(data)
        nexts = {int(key): _natural(value) for key, value in found["partitions"].items()}
        if _natural(found["version"]) < 1:  # such a one has no commit position
            return None
        return JmqCheckpoint(
            _natural(found["replicationPosition"]), _natural(found["indexPosition"]), nexts
        )
    except (JsonError, LookupError, TypeError, ValueError, AttributeError):
        return None


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("not a position")
    return value


# -- rows of files -----------------------------------------------------------------------------------


class DataFile(NamedTuple):
    """A file of a row, as it was when it was looked at."""

    base: int  # position of its first byte of data
    size: int  # bytes of data
    inode: int


@dataclass(frozen=True, slots=True)
class Row:
    """The files of a journal, in order."""

    folder: str
    files: tuple[DataFile, ...] = ()

    @property
    def left(self) -> int:
        """Position of the first byte."""
        return self.files[0].base if self.files else 0

    @property
    def right(self) -> int:
        """One past the last byte."""
        return self.files[-1].base + self.files[-1].size if self.files else 0

    @property
    def last_path(self) -> str:
        """The file that grows; the folder, where there is none."""
        return self.path(self.files[-1].base) if self.files else self.folder

    def path(self, base: int) -> str:
        """The file that begins at ``base``."""
        return f"{self.folder}/{base}"

    def spans(self) -> list[tuple[int, int]]:
        """What each file holds, as ``[from, to)``: none more than up to where the next begins."""
        bases = [file.base for file in self.files[1:]]
        ends = [file.base + file.size for file in self.files]
        return [
            (file.base, min(end, base))
            for file, end, base in zip(self.files, ends, [*bases, *ends[-1:]], strict=True)
        ]

    def span_at(self, position: int) -> tuple[int, int] | None:
        """What the file holds that has a position, or else the next one behind it."""
        first = max(0, bisect_right(self.files, (position, 2**63, 0)) - 1)
        for base, end in self.spans()[first:]:
            if position < end:
                return base, end
        return None

    def read(self, cache: FileCache, base: int, position: int, size: int) -> bytes:
        """Bytes of the file that begins at ``base``; fewer where it has been cut, none where it is gone."""
        return cache.read(self.path(base), position - base + FILE_HEADER_BYTES, size)


def read_row(folder: str) -> Row:
    """Look at the files of a journal. InvalidError: something else stands in the place of one."""
    files = []
    for base in list_numbers(folder):
        about = stat_if_there(f"{folder}/{base}")
        if about is not None:
            if not stat.S_ISREG(about.st_mode):
                raise not_regular(f"{folder}/{base}")
            files.append(DataFile(base, max(0, about.st_size - FILE_HEADER_BYTES), about.st_ino))
    return Row(folder, tuple(files))


def list_numbers(folder: str) -> list[int]:
    """The names in a folder that are positions, in order."""
    return sorted(int(name) for name in list_names(folder) if _NUMBER.fullmatch(name))


class JmqEntry(NamedTuple):
    """What an index says of a message."""

    position: int
    size: int

    @property
    def end(self) -> int:
        """Where the next message begins in the journal."""
        return self.position + self.size


class IndexFiles:
    """The index of a partition, of which nothing is believed that a message does not say."""

    def __init__(self, folder: str, cache: FileCache) -> None:
        self._folder = folder
        self._cache = cache
        self._stamp: tuple[int, int] | None = None
        self._bases: list[int] = []
        self.look()

    def look(self) -> None:
        """List the files again, if some came or went."""
        stamp = directory_stamp(self._folder)
        if stamp != self._stamp or stamp is None:
            self._stamp = stamp
            numbers = list_numbers(self._folder)
            self._bases = [number for number in numbers if not number % ENTRY_BYTES]
            self._cache.drop_deleted()

    @property
    def left(self) -> int | None:
        """The first message that the broker serves; None: there is no index."""
        return self._bases[0] // ENTRY_BYTES if self._bases else None

    def right(self) -> int:
        """One past the last entry."""
        if not self._bases:
            return 0
        about = stat_if_there(f"{self._folder}/{self._bases[-1]}")
        size = 0 if about is None else max(0, about.st_size - FILE_HEADER_BYTES)
        return (self._bases[-1] + size) // ENTRY_BYTES

    def entry(self, number: int) -> JmqEntry | None:
        """One entry; None: there is none, or it says nothing."""
        at, bases = number * ENTRY_BYTES, self._bases
        place = bisect_right(bases, at) - 1
        if place < 0:
            return None
        base = bases[place]
        path = f"{self._folder}/{base}"
        data = self._cache.read(path, at - base + FILE_HEADER_BYTES, ENTRY_BYTES)
        found = JmqEntry(*_ENTRY.unpack(data)) if len(data) == ENTRY_BYTES else JmqEntry(0, 0)
        return found if found.size > 0 and found.position >= 0 else None
