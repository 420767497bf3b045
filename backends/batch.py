"""Several objects at once, on stores that gain by it and on those that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from backends.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from backends.base import BatchStore, ObjectStore


def objects_per_put(store: ObjectStore) -> int:
    """How many small objects one call of ``put_many_if_absent`` best takes, and at most."""
    return batching.objects_per_put if (batching := _batching(store)) else 1


def put_many_if_absent(
    store: ObjectStore, objects: Sequence[tuple[str, Sequence[Buffer] | Buffer]]
) -> list[BackendError | None]:
    """See ``BatchStore``; one after another where the store has no better way."""
    batching = _batching(store)
    if batching is not None:
        return batching.put_many_if_absent(objects)
    return [_put(store, key, data) for key, data in objects]


def _batching(store: ObjectStore) -> BatchStore | None:
    # `isinstance` with a protocol looks at every member, for each call anew.
    return cast("BatchStore", store) if hasattr(type(store), "put_many_if_absent") else None


def _put(store: ObjectStore, key: str, data: Sequence[Buffer] | Buffer) -> BackendError | None:
    try:
        store.put_if_absent(key, data)
    except BackendError as error:
        return error
    return None
