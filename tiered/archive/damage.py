"""A file of an archive that is not what the log says is damage, whichever way a reader of Parquet puts it."""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from zlib_ng import zlib_ng

from backends.base import ByteRange
from backends.errors import BackendError, InvalidRangeError, ObjectNotFoundError, ShortReadError
from tiered.archive.model import FILES, LOG
from tiered.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from backends.base import ObjectStore
    from tiered.archive.model import ParquetFile, SideFile

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
