"""One buffer or several: every backend takes both, and none copies more than it must."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from typing_extensions import Buffer

if TYPE_CHECKING:
    from collections.abc import Sequence


def as_views(data: Sequence[Buffer] | Buffer) -> list[memoryview]:
    """The bytes of ``data`` as flat views, in order, without the empty ones.

    Args:
        data: One buffer, or several in a list or tuple. Each must be C-contiguous.

    Raises:
        TypeError: Something in it is no buffer.
    """
    parts = data if isinstance(data, list | tuple) else [data]
    views = [memoryview(cast("Buffer", part)) for part in parts]
    return [view if view.format == "B" else view.cast("B") for view in views if view.nbytes]


def as_one(data: Sequence[Buffer] | Buffer) -> bytes | memoryview:
    """The bytes of ``data`` in one piece; copied only when there are several pieces."""
    if isinstance(data, bytes):
        return data
    views = as_views(data)
    return views[0] if len(views) == 1 else b"".join(views)


def size_bytes(data: Sequence[Buffer] | Buffer) -> int:
    """How many bytes ``data`` has."""
    return sum(view.nbytes for view in as_views(data))
