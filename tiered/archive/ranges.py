"""An object of an archive as a file that can be sought in: a request for each piece that is read. One thread."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from backends.base import ByteRange

if TYPE_CHECKING:
    from backends.base import ObjectStore


class ObjectFile(io.RawIOBase):
    """One object, read-only."""

    def __init__(self, archive: ObjectStore, key: str, size_bytes: int) -> None:
        """Read nothing yet.

        Args:
            archive: Where it lies.
            key: Which.
            size_bytes: Of the object, as the log says.
        """
        super().__init__()
        self._archive = archive
        self._key = key
        self._size = size_bytes
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See ``io.IOBase``."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """See ``io.IOBase``."""
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 (a buffer)
        """See ``io.RawIOBase``; one request.

        Raises:
            BackendError: The store failed.
        """
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        data = self._archive.get(self._key, ByteRange(self._at, end))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
