"""Objects in the memory of this process: for tests, and the model that other backends are held to.

It is as strict as the strictest server: a key that is another key plus ``/...`` is refused, since
folders cannot hold such a pair and MinIO loses one of the two from its listings. Listings come in
pages that each see the present, like those of a server. Nothing survives the process.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, NamedTuple

from backends.base import (
    ByteRange,
    Capabilities,
    ObjectInfo,
    Version,
    as_chunks,
    check_key,
    check_range,
    content_version,
)
from backends.errors import (
    AlreadyExistsError,
    InvalidKeyError,
    ObjectNotFoundError,
    PreconditionFailedError,
)

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from typing_extensions import Buffer

PAGE_KEYS = 1000


class _Object(NamedTuple):
    data: bytes
    modified_ms: int


class MemoryStore:
    """An ``ObjectStore`` in a dictionary. Safe to use from any number of threads."""

    _shared: dict[str, MemoryStore] = {}  # noqa: RUF012 (the one registry of the process, guarded)
    _shared_lock = threading.Lock()

    def __init__(self, name: str = "", *, now_ms: Callable[[], int] = lambda: -1) -> None:
        """Make an empty store that nobody else sees; without ``now_ms`` it does not say when objects were written."""
        self._name = name
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._keys: builtins.list[str] = []  # sorted: code points sort like UTF-8

    @classmethod
    def shared(cls, name: str) -> Self:
        """The store that this process calls ``name``, made empty when it is first asked for."""
        with cls._shared_lock:
            store = cls._shared.setdefault(name, cls(name))
            assert isinstance(store, cls)
            return store

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(put_if_absent=True, compare_and_set=True)

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        """Raises also InvalidKeyError where key and ``key/...`` would meet."""
        check_key(key)
        stored = b"".join(as_chunks(data))
        with self._lock:
            # Look and insert under one lock: this is the atomic point that everything rests on.
            if key in self._objects:
                raise AlreadyExistsError(f"object exists: {self.url} {key!r}")
            self._insert(key, stored)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        # Bytes never change, so that all that follows needs no lock.
        data = self._object(key).data
        if byte_range is None:
            return data
        check_range(key, byte_range, len(data))
        return data[byte_range.start : byte_range.end]

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        return [self.get(key, byte_range) for byte_range in byte_ranges]

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        """The version is a hash of the bytes."""
        data = self._object(key).data
        return data, content_version(data)

    def head(self, key: str) -> ObjectInfo:
        found = self._object(key)
        version = content_version(found.data)
        return ObjectInfo(key, len(found.data), found.modified_ms, version)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Each page of 1,000 keys sees the store as it is when it is read."""
        last = start_after
        while page := self._page(prefix, last):
            yield from page
            last = page[-1].key

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            if self._objects.pop(key, None) is not None:
                del self._keys[bisect_left(self._keys, key)]

    def compare_and_set(self, key: str, data: Buffer, expected: Version | None) -> Version:
        check_key(key)
        stored = b"".join(as_chunks(data))
        with self._lock:
            found = self._objects.get(key)
            present = None if found is None else content_version(found.data)
            if present != expected:
                raise PreconditionFailedError(f"at another version: {self.url} {key!r}")
            if found is None:
                self._insert(key, stored)
            else:
                self._objects[key] = _Object(stored, self._now_ms())
        return content_version(stored)

    def close(self) -> None:
        """The objects stay, for the next opener of the same name."""

    def _object(self, key: str) -> _Object:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectNotFoundError(f"no such object: {self.url} {key!r}")
        return found

    def _insert(self, key: str, stored: bytes) -> None:
        """Add a new object; the lock is held."""
        segments = key.split("/")
        above = ("/".join(segments[:count]) for count in range(1, len(segments)))
        if any(folder in self._objects for folder in above):
            raise InvalidKeyError(f"an object is in the place of a folder of {key!r}: {self.url}")
        below = bisect_left(self._keys, key + "/")
        if below < len(self._keys) and self._keys[below].startswith(key + "/"):
            raise InvalidKeyError(f"other keys have this one as their folder: {self.url} {key!r}")
        self._objects[key] = _Object(stored, self._now_ms())
        insort(self._keys, key)

    def _page(self, prefix: str, after: str) -> builtins.list[ObjectInfo]:
        # A page at a time under the lock, as a server lists: between two pages the store goes on.
        with self._lock:
            begin = max(bisect_left(self._keys, prefix), bisect_right(self._keys, after))
            page = []
            for key in self._keys[begin : begin + PAGE_KEYS]:
                if not key.startswith(prefix):
                    break
                found = self._objects[key]
                page.append(ObjectInfo(key, len(found.data), found.modified_ms))
            return page
