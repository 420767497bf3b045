"""Files of an archive with checksums of their blocks: a range that is read is proven to be as it was written.

A Parquet file says of itself where everything lies, and where nothing refers to there may be anything. So right before its
footer, which is the last thing in it, stands what proves the rest::

    4 bytes a block         CRC-32 of each 16 KiB of what is before these numbers (big-endian uint32; the last block may
                            be shorter)
    24 bytes                bytes of a block (uint32), bytes before the numbers (uint64), CRC-32 of all that follows the
                            blocks but itself (uint32), ``TMQSUMS1``
    the footer              as the writer made it, its length and ``PAR1``

Each byte of the file is under one of these checksums. The pages have their own, too, as Parquet provides, for other
readers; but these say nothing of the pages' headers, of the footer, and of the filters of keys.

``ObjectFile`` reads one so, by requests for whole blocks.
"""

from __future__ import annotations

import contextlib
import io
import struct
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

from zlib_ng import zlib_ng

from backends.base import ByteRange
from backends.errors import BackendError, InvalidRangeError, ObjectNotFoundError, ShortReadError
from backends.lazy_dataclass import dataclass
from tiered.archive.model import FILES, LOG
from tiered.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.archive.model import ParquetFile, SideFile

BLOCK_BYTES: Final = 16 << 10
_TRAILER: Final = struct.Struct(">IQI8s")
_MAGIC: Final = b"TMQSUMS1"
_END: Final = struct.Struct("<I4s")
_PARQUET: Final = b"PAR1"
_CRC_BYTES: Final = 4
_TAIL_BYTES: Final = (64 << 10) + BLOCK_BYTES
"""pyarrow begins with the last 64 KiB of a file; with a block more these are whole blocks."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What a file says of its blocks, itself proven."""

    block_bytes: int
    covered: int  # bytes of the file that the blocks are
    crcs: memoryview  # checksum of each, four bytes
    start: int  # where ``tail`` begins: where a block does, or at ``covered``
    tail: bytes  # the rest of the file, proven

    def require(self, start: int, data: memoryview) -> None:
        """See that blocks from a byte on are as they were written."""
        for at in range(0, len(data), self.block_bytes):
            place = (start + at) // self.block_bytes * _CRC_BYTES
            crc = int.from_bytes(self.crcs[place : place + _CRC_BYTES], "big")
            if zlib_ng.crc32(data[at : at + self.block_bytes]) != crc:
                raise ValueError(
                    f"the block at byte {start + at} has another checksum than was written"
                )


def with_sums(data: Any) -> bytes:  # noqa: ANN401 (a buffer)
    """A Parquet file with checksums of its blocks."""
    return b"".join(chunks_with_sums(data))


def chunks_with_sums(data: Any) -> tuple[memoryview, bytes]:  # noqa: ANN401 (a buffer)
    """The same in two pieces, the blocks and what follows them, since copying a large file is what this costs."""
    whole = memoryview(data).cast("B")
    length, magic = _END.unpack(whole[-_END.size :])
    assert magic == _PARQUET
    blocks, footer = whole[: -_END.size - length], whole[-_END.size - length :]
    starts = range(0, len(blocks), BLOCK_BYTES)
    found = (zlib_ng.crc32(blocks[at : at + BLOCK_BYTES]) for at in starts)
    crcs = b"".join(crc.to_bytes(_CRC_BYTES, "big") for crc in found)
    trailer = _TRAILER.pack(BLOCK_BYTES, len(blocks), _proof(crcs, len(blocks), footer), _MAGIC)
    return blocks, b"".join([crcs, trailer, footer])


def _proof(crcs: bytes | memoryview, covered: int, footer: bytes | memoryview) -> int:
    head = struct.pack(">IQ", BLOCK_BYTES, covered)
    return zlib_ng.crc32(footer, zlib_ng.crc32(head, zlib_ng.crc32(crcs)))


def sums_of(tail: bytes, size_bytes: int) -> Sums | int:
    """What the end of a file says of the rest; or how many of its last bytes are needed.

    Raises:
        ValueError: It has no such checksums, or they are damaged.
    """
    wrong = ValueError("it is not Parquet file with checksums, or its end is damaged")
    if len(tail) < _END.size:
        raise wrong
    length: int
    length, magic = _END.unpack(tail[-_END.size :])
    end = length + _END.size + _TRAILER.size
    if magic != _PARQUET or end > size_bytes:
        raise wrong
    if end > len(tail):
        return end
    block_bytes, covered, crc, magic = _TRAILER.unpack_from(tail, len(tail) - end)
    table: int = -(-covered // BLOCK_BYTES) * _CRC_BYTES
    if (block_bytes, covered + table + end, magic) != (BLOCK_BYTES, size_bytes, _MAGIC):
        raise wrong
    if table + end > len(tail):
        return table + end
    whole = tail[-table - end :]
    crcs, footer = memoryview(whole)[:table], memoryview(whole)[-length - _END.size :]
    if _proof(crcs, covered, footer) != crc:
        raise wrong
    first = size_bytes - len(tail)
    start = min(-(-first // BLOCK_BYTES) * BLOCK_BYTES, covered)
    sums = Sums(block_bytes, covered, crcs, start, tail[start - first :])
    sums.require(start, memoryview(sums.tail)[: covered - start])
    return sums


def require_sums(data: Any, end: bytes = b"") -> None:  # noqa: ANN401 (a buffer)
    """See that a whole file in memory is as it was written.

    Args:
        end: What follows them, if that is a row range of its own.
    """
    whole = memoryview(data).cast("B")
    try:
        found = sums_of(end or bytes(whole[-_TAIL_BYTES:]), len(whole) + len(end))
        while isinstance(found, int):
            found = sums_of(bytes(whole[-found:]), len(whole))
        found.require(0, whole[: found.start])
    except ValueError as error:
        raise DataError(f"this is no whole file of an archive: {error}") from error


class ObjectFile(io.RawIOBase):
    """One object as a file that can be sought in; read-only, and proven.

    Threads: any number, each with a position of its own. DuckDB has several share a file, and each seeks and reads.

    Memory: the end of the file, with the checksums.
    """

    def __init__(
        self, archive: ObjectStore, key: str, size_bytes: int, sums: Sums | None = None
    ) -> None:
        """Read the end of the file: a request, or three when it is large.

        Args:
            sums: Of the same file, when they are known already; then nothing is read.

        Raises:
            DataError: It is gone, shorter than that, or its end is damaged.
        """
        super().__init__()
        self._archive = archive
        self._key = key
        self._size = size_bytes
        self._at = threading.local()
        self.sums = sums or self._read_sums()

    def _read_sums(self) -> Sums:
        with reading(self._archive, self._key):
            found = sums_of(self._get(min(_TAIL_BYTES, self._size)), self._size)
            while isinstance(found, int):  # the footer is larger, then perhaps the checksums are
                found = sums_of(self._get(found), self._size)
            return found

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._at.byte = base + offset
        return self.tell()

    def tell(self) -> int:
        return getattr(self._at, "byte", 0)

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 (a buffer)
        """Fill a buffer from where we are, as ``io.RawIOBase`` has it; a request, except at the end of the file."""
        start = self.tell()
        end = min(start + len(buffer), self._size)
        if end <= start:
            return 0
        (data,) = self.read_ranges([ByteRange(start, end)])
        buffer[: len(data)] = data
        self._at.byte = end
        return len(data)

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Several ranges that are not empty, in the order given; one request, but for what is at the end of the file."""
        sums = self.sums
        size = sums.block_bytes
        asked = [r for r in ranges if r.start < sums.start]
        whole = [
            ByteRange(r.start // size * size, min(-(-r.end // size) * size, sums.start))
            for r in asked
        ]
        proven = iter(zip(whole, self._blocks(whole), strict=True))
        return [
            self._of(r, *next(proven)) if r.start < sums.start else self._end(r) for r in ranges
        ]

    def prove(self, start: int) -> None:
        """See that everything from a byte on is as it was written; a request at most."""
        first = start // self.sums.block_bytes * self.sums.block_bytes
        if first < self.sums.start:  # what lies behind that has been looked at
            self._blocks([ByteRange(first, self.sums.start)])

    def _blocks(self, whole: Sequence[ByteRange]) -> Sequence[bytes]:
        if not whole:
            return []
        with reading(self._archive, self._key):
            found = self._archive.get_ranges(self._key, whole)
            for blocks, data in zip(whole, found, strict=True):
                self.sums.require(blocks.start, memoryview(data))
            return found

    def _of(self, wanted: ByteRange, blocks: ByteRange, data: bytes) -> bytes:
        """A range of blocks, and of what is behind them."""
        found = data[wanted.start - blocks.start : wanted.end - blocks.start]
        start = self.sums.start
        return found + self._end(ByteRange(start, wanted.end)) if wanted.end > start else found

    def _end(self, wanted: ByteRange) -> bytes:
        start = self.sums.start
        return self.sums.tail[wanted.start - start : wanted.end - start]

    def _get(self, size: int) -> bytes:
        return self._archive.get(self._key, ByteRange(self._size - size, self._size))


# --------------------------------------------------------------------------------------------------
# A file of an archive that is not what the log says is damage, whichever way a reader of Parquet puts it.
# --------------------------------------------------------------------------------------------------


PROVERS = 8
ROW_RANGE_BYTES = 8 << 20
LOOKED_AT = 1000
READ_BYTES = 1 << 30
"""So many files, of these so many bytes, are looked at in search of the one that is damaged."""
_DO = "`tiered archive --verify` names all that is damaged"


@contextlib.contextmanager
def reading(archive: ObjectStore, key: str) -> Iterator[None]:
    """Make damage of a file out of what its reader raises.

    Raises:
        DataError: The file is gone, shorter than the log says, or no Parquet.
    """
    try:
        yield
    except ObjectNotFoundError as error:
        raise _damage(archive, key, "is gone") from error
    except (InvalidRangeError, ShortReadError) as error:
        raise _damage(archive, key, "is shorter than the archive's log says") from error
    except BackendError:
        raise
    except (OSError, ValueError) as error:  # as pyarrow says it
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise _damage(archive, key, f"cannot be read: {said[0].strip()}") from error


class Log(Protocol):
    """A reader or writer of an archive's log."""

    @property
    def number(self) -> int:
        """Its last entry; 0: there is none."""
        ...

    def catch_up(self) -> object:
        """Replay what is new."""
        ...


def open_log(archive: ObjectStore, log: Log) -> None:
    """Replay an archive's log. One that is gone is never taken for a new archive's: rows would be there twice.

    A job writes an entry before its first file, so files without an entry are of a log that was lost. It is looked for them
    only where there is no entry, and for the log once more behind them.
    """
    try:
        log.catch_up()
        if log.number:
            return
        found = next((info.key for info in archive.list(FILES)), None)
        if found is not None:
            log.catch_up()
    except DataError as error:  # say which archive's it is; what helps a tier does not help here
        raise DataError(
            f"the archive's log is damaged: {error.what}",
            where=f"{archive.url}/{error.where}",
            do="put this object of the archive's log back from a copy",
        ) from error
    if found is not None and not log.number:
        raise DataError(
            f"the archive's log is gone, and there are files that it has named: {found}",
            where=archive.url,
            do=f"put {LOG} back from a copy, or archive to an empty place",
        )


def prove_files(archive: ObjectStore, files: Iterable[ParquetFile]) -> None:
    """See that files are what the log says, before others read them who look at no checksums. All of each is read.

    Threads: ``PROVERS`` of its own, each with ``ROW_RANGE_BYTES``.
    """
    with ThreadPoolExecutor(PROVERS, "tiered-prove") as pool:
        deque(pool.map(lambda file: prove(archive, file), files), maxlen=0)


def prove(archive: ObjectStore, file: ParquetFile | SideFile) -> None:
    """See that a file is what the log says, by its bytes; a row range at a time."""
    crc = 0
    with reading(archive, file.key):
        for start in range(0, file.size_bytes, ROW_RANGE_BYTES):
            end = min(start + ROW_RANGE_BYTES, file.size_bytes)
            crc = zlib_ng.crc32(archive.get(file.key, ByteRange(start, end)), crc)
    if crc != file.crc:
        raise _damage(archive, file.key, "has other bytes than the archive's log says")


def read_proven(archive: ObjectStore, file: ParquetFile | SideFile) -> bytes:
    """All bytes of a file, which are what the log says."""
    with reading(archive, file.key):
        data = archive.get(file.key)
    if (len(data), zlib_ng.crc32(data)) != (file.size_bytes, file.crc):
        raise _damage(archive, file.key, "has other bytes than the archive's log says")
    return data


def find_damage(archive: ObjectStore, files: Iterable[ParquetFile]) -> DataError | None:
    """The first file that is not what the log says: by its size, or by its checksum; of so many files and bytes."""
    read = 0
    for file in islice(files, LOOKED_AT):
        try:
            with reading(archive, file.key):
                size = archive.head(file.key).size_bytes
            if size != file.size_bytes:
                return _damage(archive, file.key, "has another size than the archive's log says")
            read += size
            if read <= READ_BYTES:
                read_proven(archive, file)
        except DataError as error:
            return error
    return None


def _damage(archive: ObjectStore, key: str, what: str) -> DataError:
    return DataError(f"a file of the archive {what}", where=f"{archive.url}/{key}", do=_DO)
