"""A store that takes keys which differ only in the case of letters for one, as folders of many disks do."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from backends.wrapping import WrappingStore

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectInfo, ObjectStore, Version


class CaseFoldingStore(WrappingStore):
    """An ``ObjectStore`` over another one; as on a disk that does not tell upper from lower case.

    It holds what a folder there would: the first object that comes below ``Orders/`` fixes that spelling; what comes
    below ``orders/`` later lies in the same folder, is found under either name, and is listed below ``Orders/``. Asked
    for what lies below ``orders/`` it gives names that begin so.
    """

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._spelled: dict[str, str] = {}
        self._learn(info.key for info in inner.list(""))

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        with self._lock:
            stored = self._stored(key)
            self._inner.put_if_absent(stored, data)
            self._learn([stored])

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        return self._inner.get(self._stored(key), byte_range)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        return self._inner.get_ranges(self._stored(key), byte_ranges)

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        return self._inner.get_versioned(self._stored(key))

    def head(self, key: str) -> ObjectInfo:
        """Under the name that was asked for."""
        found = self._inner.head(self._stored(key))
        return type(found)(key, found.size_bytes, found.modified_ms, found.version)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """The prefix's folder as it was asked for, what is in it as it is stored."""
        folder, slash, _ = prefix.rpartition("/")
        stored = self._stored(folder) if folder else ""
        for found in self._inner.list(stored + slash):
            key = folder + found.key[len(stored) :]
            if key.startswith(prefix) and key > start_after:
                yield type(found)(key, found.size_bytes, found.modified_ms, found.version)

    def delete(self, key: str) -> None:
        """Folders that became empty are gone, and their spelling with them."""
        with self._lock:
            self._inner.delete(self._stored(key))
            self._spelled.clear()
            self._learn(info.key for info in self._inner.list(""))

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        with self._lock:
            stored = self._stored(key)
            version = self._inner.compare_and_set(stored, data, expected)
            self._learn([stored])
            return version

    def _learn(self, keys: Iterator[str] | Sequence[str]) -> None:
        for key in keys:
            segments = key.split("/")
            for count in range(1, len(segments) + 1):
                path = "/".join(segments[:count])
                self._spelled.setdefault(path.lower(), path)

    def _stored(self, key: str) -> str:
        """The key as it is spelled there, as far as it is."""
        segments = key.split("/")
        for count in range(len(segments), 0, -1):
            known = self._spelled.get("/".join(segments[:count]).lower())
            if known is not None:
                return "/".join([known, *segments[count:]])
        return key
