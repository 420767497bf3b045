"""What a range means when it reaches behind the end of an object: the same for every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.errors import InvalidRangeError, ShortReadError

if TYPE_CHECKING:
    from backends.base import ByteRange


def check_range(key: str, byte_range: ByteRange, size_bytes: int) -> None:
    """Refuse a range that an object of ``size_bytes`` bytes cannot serve whole.

    Raises:
        InvalidRangeError: It begins at or behind the end.
        ShortReadError: It ends behind the end.
    """
    asked = f"[{byte_range.start}, {byte_range.end}) of {key!r}, which has {size_bytes} bytes"
    if byte_range.start >= size_bytes:
        raise InvalidRangeError(f"range begins behind the end: {asked}")
    if byte_range.end > size_bytes:
        raise ShortReadError(f"range ends behind the end: {asked}")
