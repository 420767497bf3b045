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
from zlib_ng import zlib_ng

from tiered.errors import DataError
from tiered.format.key_index import ITEM, ITEM_BYTES, Items

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.index.hashing import Hashes

_HASH_BYTES: Final = 8


class WorkFile:
    """Hashes and items on disk; in memory only what is being added, and 16 bytes for each such addition."""

    def __init__(self, directory: str | None = None) -> None:
        """Open a new file.

        Args:
            directory: Where; None: where the system has its temporary files.

        Raises:
            OSError: It cannot be made.
        """
        self._directory = directory or tempfile.gettempdir()
        # Unbuffered: what a full disk has refused must not be tried again by `close`, which would fail then.
        self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115 (closed in close)
            dir=directory, prefix="tiered-index-", buffering=0
        )
        self._blocks: list[tuple[int, int]] = []
        self.count = 0

    def append(self, hashes: Hashes, items: Items) -> None:
        """Add items and their hashes.

        Raises:
            OSError: The disk does not take them; the file is of no use any more.
        """
        if len(hashes):
            data = hashes.tobytes() + items.tobytes()
            view = memoryview(data)
            try:
                while view:
                    view = view[self._file.write(view) :]
            except OSError as error:  # the system names no file in it
                raise OSError(error.errno, error.strerror, self._directory) from error
            self._blocks.append((len(hashes), zlib_ng.crc32(data)))
            self.count += len(hashes)

    def blocks(self) -> Iterator[tuple[int, Hashes, Items]]:
        """Everything as it was added, each with the number of its first item.

        Raises:
            DataError: It is not what was written.
            OSError: It cannot be read.
        """
        self._file.seek(0)
        start = 0
        for count, crc in self._blocks:
            size = count * (_HASH_BYTES + ITEM_BYTES)
            data = b"".join(self._pieces(size))
            if len(data) != size or zlib_ng.crc32(data) != crc:
                raise DataError("the local work file of the key index has changed")
            hashes = np.frombuffer(data, np.uint64, count)
            yield start, hashes, np.frombuffer(data, ITEM, count, count * _HASH_BYTES)
            start += count
        self._file.seek(0, 2)

    def _pieces(self, size: int) -> Iterator[bytes]:
        """The next bytes, however the system cuts them; fewer at the end."""
        while size and (piece := self._file.read(size)):
            size -= len(piece)
            yield piece

    def close(self) -> None:
        """Give the space back."""
        self._file.close()
