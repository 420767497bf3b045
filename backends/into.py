"""Reading into memory that the caller has, on stores that can and on those that cannot.

Fresh memory costs more than the bytes that are read into it: the kernel clears each page when it is first touched. Who reads
much, and again and again, does better with memory that it uses again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backends.errors import ShortReadError

if TYPE_CHECKING:
    from backends.base import ByteRange, IntoStore, ObjectStore


def reads_into(store: ObjectStore) -> bool:
    """Whether a store, and every store that it is around, fills the caller's memory without a copy in between."""
    inner = getattr(store, "inner", None)
    return _filling(store) is not None and (inner is None or reads_into(inner))


def get_into(store: ObjectStore, key: str, byte_range: ByteRange, target: memoryview) -> None:
    """See ``IntoStore``; by way of ``get`` where the store has no better way."""
    filling = _filling(store)
    if filling is not None:
        filling.get_into(key, byte_range, target)
        return
    data = store.get(key, byte_range)
    if len(data) != len(target):
        raise ShortReadError(f"{len(data)} bytes instead of {len(target)} of {key!r}")
    target[:] = data


def _filling(store: ObjectStore) -> IntoStore | None:
    # `isinstance` with a protocol looks at every member, for each call anew.
    return cast("IntoStore", store) if hasattr(type(store), "get_into") else None
