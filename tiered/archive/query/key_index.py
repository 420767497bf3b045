"""An index of an archive's keys: the filters of many Parquet files in one object, laid so that one read asks all of them.

Overview: a filter of Parquet is blocks of 32 bytes, and the hash of a key says which block speaks of it; filters of the same
size have it at the same number. So block 17 of every filter lies beside block 17 of the others, a *row*, and a lookup reads
one row for each size that there is: 32 bytes a row group and column. What the row leaves is looked at in the files.

The index is derived: without it, or for files that it does not cover, lookups ask the files themselves. Objects are never
replaced; an object covers files that no other covered when it was made. Merged files are new ones to it.

Ordering and crashes: an object is complete or absent; nothing refers to it but its name below ``_keys/``. Two that build at
once make an object each (or the same one): lookups then have two opinions of the same files, and either will do.

Layout::

    rows of each class      blocks * (32 * filters + 4) bytes: the row's blocks, and their CRC-32 (big-endian)
    head                    JSON, zstd: ``classes`` [[blocks, filters, start]], ``files`` [[key, [[class, …] of each group]]]
    footer, 16 bytes        size of the head and its CRC-32 (big-endian uint32 each), ``TMQKEYS1``

A class is all filters of one size. Filters are numbered within theirs in the order in which ``files`` names them: file by
file, group by group, the columns of ``tiered.archive.bloom.COLUMNS``; class -1 stands for a column without a filter.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import zstandard
from zlib_ng import zlib_ng

from backends.base import ByteRange
from backends.errors import ObjectNotFoundError, PreconditionFailedError
from tiered.archive.bloom import BLOCK, block_holds, block_number, filters_of, text_hash
from tiered.archive.harm import reading
from tiered.archive.ranges import ObjectFile
from tiered.archive.tables import open_parquet
from tiered.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.archive.machine import ArchiveState

PREFIX: Final = "_keys/"
OBJECT_BYTES: Final = 64 << 20
"""Filters of one object, at most; more only where one file has more. Memory of a build: twice that."""
_MAGIC: Final = b"TMQKEYS1"
_FOOTER: Final = struct.Struct(">II8s")
_CRC_BYTES: Final = 4
_TAIL_BYTES: Final = 64 * 1024
_HEAD_BYTES_MAX: Final = 256 << 20
_NONE: Final = -1

Groups = list[list[int]]
"""Of each row group of a file the class of each column's filter."""


@dataclass(frozen=True, slots=True)
class IndexPart:
    """One object of the index.

    Attributes:
        key: Relative to the archive.
        classes: Blocks of a filter, filters, and where the rows begin.
        files: The row groups of each file, by its key.
    """

    key: str
    classes: tuple[tuple[int, int, int], ...]
    files: dict[str, Groups]


@dataclass(slots=True)
class Built:
    """What a build did.

    Attributes:
        objects: Written.
        files: Covered by them.
        size_bytes: Of them.
    """

    objects: int = 0
    files: int = 0
    size_bytes: int = 0


def read_index(archive: ObjectStore) -> list[IndexPart]:
    """What the index covers: a listing, and a request for each object.

    Raises:
        DataError: An object is damaged.
        BackendError: The store failed.
    """
    found = []
    for info in archive.list(PREFIX):
        try:
            found.append(_read_part(archive, info.key, info.size_bytes))
        except ObjectNotFoundError:
            continue
    return found


def groups_with(archive: ObjectStore, part: IndexPart, text: str) -> dict[str, list[int]]:
    """Which row groups may have a text, by the key of their file; files without one have an empty list. One request.

    Raises:
        DataError: The object is damaged.
        BackendError: The store failed.
    """
    value = text_hash(text)
    rows = [_row(one, value) for one in part.classes]
    data = archive.get_ranges(part.key, rows) if rows else []
    answers = [iter(_answers(part.key, row, value)) for row in data]
    found: dict[str, list[int]] = {}
    for key, groups in part.files.items():
        says = [any([n == _NONE or next(answers[n]) for n in classes]) for classes in groups]  # noqa: C419 (each is taken)
        found[key] = [number for number, may in enumerate(says) if may]
    return found


def files_without(archive: ObjectStore, index: Iterable[IndexPart], text: str) -> set[str]:
    """Files of which the index knows that they do not have a text; a request for each object.

    Raises:
        DataError: An object is damaged.
        BackendError: The store failed.
    """
    found: set[str] = set()
    for part in index:
        try:
            groups = groups_with(archive, part, text)
        except ObjectNotFoundError:
            continue  # somebody removed it: nothing is known of its files
        found |= {key for key, may in groups.items() if not may}
    return found


def build(
    archive: ObjectStore, state: ArchiveState, *, told: Callable[[Built], None] = lambda _b: None
) -> Built:
    """Make the index cover every file that the log names.

    Args:
        archive: Of which.
        state: What its log says.
        told: Called after each object.

    Raises:
        DataError: An object of the index, or a file, is damaged.
        BackendError: The store failed.
    """
    covered = {key for part in read_index(archive) for key in part.files}
    lanes = (stretch for _, stretches in sorted(state.lanes.items()) for stretch in stretches)
    sizes = {file.key: file.size_bytes for stretch in lanes for file in stretch.files}
    wanted = [(key, size) for key, size in sizes.items() if key not in covered]
    built = Built()
    for object_files in _gathered(_filters(archive, wanted)):
        data = _encode(object_files)
        name = hashlib.sha256("\n".join(key for key, _ in object_files).encode()).hexdigest()[:16]
        try:
            archive.put_if_absent(f"{PREFIX}{name}.keys", data)
        except PreconditionFailedError:
            continue  # another build made the same
        built.objects += 1
        built.files += len(object_files)
        built.size_bytes += len(data)
        told(built)
    return built


_OfFile = tuple[str, list[list[bytes | None]]]
"""A file's key, and the bits of its filters by group and column."""


def _filters(archive: ObjectStore, files: Iterable[tuple[str, int]]) -> Iterator[_OfFile]:
    for key, size in files:
        with reading(archive, key):
            raw = ObjectFile(archive, key, size)
            metadata = open_parquet(raw).metadata
            places = [filters_of(metadata.row_group(n)) for n in range(metadata.num_row_groups)]
            asked = [place for group in places for place in group if place is not None]
            ranges = [ByteRange(start, start + bits) for start, bits in asked]
            bits = iter(raw.read_ranges(ranges))
        yield key, [[None if place is None else next(bits) for place in group] for group in places]


def _gathered(files: Iterable[_OfFile]) -> Iterator[list[_OfFile]]:
    """Files for one object each."""
    waiting: list[_OfFile] = []
    held = 0
    for file in files:
        size = sum(len(bits or b"") for group in file[1] for bits in group)
        if waiting and held + size > OBJECT_BYTES:
            yield waiting
            waiting, held = [], 0
        waiting.append(file)
        held += size
    if waiting:
        yield waiting


def _encode(files: Sequence[_OfFile]) -> bytes:
    every = [bits for _, groups in files for group in groups for bits in group if bits is not None]
    sizes = sorted({len(bits) for bits in every})
    numbers = {size: number for number, size in enumerate(sizes)}
    pieces, classes, at = [], [], 0
    for size in sizes:
        mine = [bits for bits in every if len(bits) == size]
        rows = _rows(mine)
        classes.append([size // BLOCK, len(mine), at])
        pieces.append(rows)
        at += len(rows)
    named = [
        [key, [[_NONE if bits is None else numbers[len(bits)] for bits in g] for g in groups]]
        for key, groups in files
    ]
    text = json.dumps({"format": 1, "classes": classes, "files": named}).encode()
    head = zstandard.ZstdCompressor(level=3).compress(text)
    return b"".join([*pieces, head, _FOOTER.pack(len(head), zlib_ng.crc32(head), _MAGIC)])


def _rows(filters: Sequence[bytes]) -> bytes:
    """Block n of each, then their checksum, for each n."""
    bits = np.frombuffer(b"".join(filters), np.uint8).reshape(len(filters), -1, BLOCK)
    rows = np.ascontiguousarray(bits.transpose(1, 0, 2)).reshape(bits.shape[1], -1)
    pieces = []
    for row in rows:
        data = row.tobytes()
        pieces += [data, zlib_ng.crc32(data).to_bytes(_CRC_BYTES, "big")]
    return b"".join(pieces)


def _row(one: tuple[int, int, int], value: int) -> ByteRange:
    blocks, filters, start = one
    size = filters * BLOCK + _CRC_BYTES
    at = start + block_number(value, blocks) * size
    return ByteRange(at, at + size)


def _answers(key: str, row: bytes, value: int) -> Iterator[bool]:
    data = memoryview(row)[:-_CRC_BYTES]
    if zlib_ng.crc32(data) != int.from_bytes(row[-_CRC_BYTES:], "big"):
        raise _damaged("a row of the key index has a wrong checksum", key)
    for start in range(0, len(data), BLOCK):
        yield block_holds(data[start : start + BLOCK], value)


def _read_part(archive: ObjectStore, key: str, size: int) -> IndexPart:
    if size < _FOOTER.size:
        raise _damaged("this is no object of a key index", key)
    tail = archive.get(key, ByteRange(max(size - _TAIL_BYTES, 0), size))
    length, crc, magic = _FOOTER.unpack(tail[-_FOOTER.size :])
    if magic != _MAGIC or not 0 < length <= min(size - _FOOTER.size, _HEAD_BYTES_MAX):
        raise _damaged("this is no object of a key index", key)
    start = size - _FOOTER.size - length
    has_all = len(tail) >= length + _FOOTER.size
    head = (
        tail[-_FOOTER.size - length : -_FOOTER.size]
        if has_all
        else archive.get(key, ByteRange(start, start + length))
    )
    if zlib_ng.crc32(head) != crc:
        raise _damaged("the head of the key index has a wrong checksum", key)
    return _part_of(key, head, start)


def _part_of(key: str, head: bytes, end: int) -> IndexPart:
    try:
        known = json.loads(zstandard.ZstdDecompressor().decompress(head, _HEAD_BYTES_MAX))
        classes = tuple((int(b), int(f), int(s)) for b, f, s in known["classes"])
        files = {str(name): [list(map(int, g)) for g in groups] for name, groups in known["files"]}
    except (ValueError, LookupError, TypeError, zstandard.ZstdError) as error:
        raise _damaged(f"the head of the key index makes no sense: {error!r:.100}", key) from error
    used = [n for groups in files.values() for group in groups for n in group if n != _NONE]
    counts = [used.count(number) for number in range(len(classes))]
    ends = [s + b * (f * BLOCK + _CRC_BYTES) for b, f, s in classes]
    fits = counts == [f for _, f, _ in classes] and all(at <= end for at in ends)
    if known.get("format") != 1 or not fits or not all(-1 <= n < len(classes) for n in used):
        raise _damaged("the head of the key index contradicts itself", key)
    return IndexPart(key, classes, files)


def _damaged(what: str, key: str) -> DataError:
    return DataError(what, where=key, do="remove it, and make it again with --key-index")
