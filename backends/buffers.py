"""One buffer or several: every backend takes both, and none copies more than it must."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from typing_extensions import Buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

Piece = bytes | memoryview
"""A flat buffer whose length is its number of bytes."""


def as_pieces(data: Sequence[Buffer] | Buffer) -> list[Piece]:
    """The bytes of ``data`` in pieces, in order, without the empty ones. Copies nothing.

    Args:
        data: One buffer, or several in a list or tuple. Each must be C-contiguous.

    Raises:
        TypeError: Something in it is no buffer.
    """
    parts = data if isinstance(data, list | tuple) else [data]
    # `bytes` as they are: a view of each would double the cost of many small ones.
    pieces = [part if type(part) is bytes else _flat(cast("Buffer", part)) for part in parts]
    return [piece for piece in pieces if piece]


def _flat(part: Buffer) -> memoryview:
    view = memoryview(part)
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def as_one(data: Sequence[Buffer] | Buffer) -> Piece:
    """The bytes of ``data`` in one piece; copied only when there are several pieces."""
    if type(data) is bytes:
        return data
    pieces = as_pieces(data)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def size_bytes(data: Sequence[Buffer] | Buffer) -> int:
    """How many bytes ``data`` has."""
    return sum(map(len, as_pieces(data)))
