"""A store around a store, which passes on everything that it does not change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ByteRange, Capabilities, ObjectInfo, ObjectStore, Version


class WrappingStore:
    """Base of decorators: an ``ObjectStore`` that hands each call to ``inner``."""

    def __init__(self, inner: ObjectStore) -> None:
        """Wrap ``inner``, which is closed with this one."""
        self._inner = inner

    @property
    def inner(self) -> ObjectStore:
        """The store that is wrapped."""
        return self._inner

    @property
    def url(self) -> str:
        """See ``ObjectStore``."""
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        """See ``ObjectStore``."""
        return self._inner.capabilities

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        """See ``ObjectStore``."""
        self._inner.put_if_absent(key, data)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """See ``ObjectStore``."""
        return self._inner.get(key, byte_range)

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        """See ``ObjectStore``."""
        return self._inner.get_ranges(key, byte_ranges)

    def get_versioned(self, key: str) -> tuple[bytes, Version]:
        """See ``ObjectStore``."""
        return self._inner.get_versioned(key)

    def head(self, key: str) -> ObjectInfo:
        """See ``ObjectStore``."""
        return self._inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See ``ObjectStore``."""
        return self._inner.list(prefix, start_after=start_after)

    def delete(self, key: str) -> None:
        """See ``ObjectStore``."""
        self._inner.delete(key)

    def compare_and_set(self, key: str, data: bytes, expected: Version | None) -> Version:
        """See ``ObjectStore``."""
        return self._inner.compare_and_set(key, data, expected)

    def close(self) -> None:
        """See ``ObjectStore``."""
        self._inner.close()
