"""The local work file: items in the order in which they came, until there are enough of them for an index object.

It is a cache and nothing else: an anonymous temporary file, gone with the process. Whatever is lost with it is found again
from the journal (``indexed_to``) and the records. What is read back has to have the checksum of what was written: bytes that
the disk has changed are a ``DataError``, upon which everything is thrown away and built again.

Threads: one.
"""

from __future__ import annotations

import tempfile
from typing import IO, TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from tiered.errors import DataError
from tiered.index.layout import ITEM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.index.hashing import Hashes

ROW: Final = np.dtype([("hash", "<u8"), ("item", ITEM)])
"""A row of the file: the whole hash, and the item as it will stand in the object."""
Rows = npt.NDArray[np.void]


class WorkFile:
    """Rows on disk; in memory only what is being added, and 16 bytes for each such addition."""

    def __init__(self, directory: str | None = None) -> None:
        """Open a new file.

        Args:
            directory: Where; None: where the system has its temporary files.

        Raises:
            OSError: It cannot be made.
        """
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory, prefix="tiered-index-")  # noqa: SIM115 (closed in close)
        self._blocks: list[tuple[int, int]] = []
        self.count = 0

    def append(self, rows: Rows) -> None:
        """Add rows.

        Raises:
            OSError: The disk does not take them; the file is of no use any more.
        """
        if len(rows):
            data = rows.tobytes()
            self._file.write(data)
            self._blocks.append((len(rows), zlib_ng.crc32(data)))
            self.count += len(rows)

    def hashes(self) -> Hashes:
        """The hashes of all rows, in their order.

        Raises:
            DataError: They are not what was written.
            OSError: They cannot be read.
        """
        found = np.empty(self.count, np.uint64)
        for start, rows in self.blocks():
            found[start : start + len(rows)] = rows["hash"]
        return found

    def blocks(self) -> Iterator[tuple[int, Rows]]:
        """All rows as they were added, and the number of the first of each addition. Errors as of ``hashes``."""
        self._file.flush()
        self._file.seek(0)
        start = 0
        for count, crc in self._blocks:
            data = self._file.read(count * ROW.itemsize)
            if len(data) != count * ROW.itemsize or zlib_ng.crc32(data) != crc:
                raise DataError("the local work file of the key index has changed")
            yield start, np.frombuffer(data, ROW)
            start += count
        self._file.seek(0, 2)

    def close(self) -> None:
        """Give the space back."""
        self._file.close()
