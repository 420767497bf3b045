"""Find out what a store really does with conditional writes and with names.

Several servers take the conditions and ignore them; several disks take two names for one that differ only in case.
"""

from __future__ import annotations

from contextlib import suppress

from backends.base import Capabilities, ObjectStore, Version
from backends.errors import (
    AlreadyExistsError,
    BackendError,
    PreconditionFailedError,
    UnknownOutcomeError,
    UnsupportedError,
)

PREFIX = "probe-"
_TRIES = 6


def probe(store: ObjectStore, probe_id: str, *, below: str = "") -> Capabilities:
    """Write, write again, look for it under another spelling, replace with a stale version, and clean up.

    About ten requests.

    It cannot show that a store is safe under races, only that it is not deaf to conditions.

    Args:
        store: The store.
        probe_id: Makes the keys ``probe-<id>-...``; random, so that no two probes meet.
        below: Prefix of the keys, ending in a slash, for who may write only there.

    Raises:
        BackendError: The store cannot be reached or refuses us; it stays open what it can do.
    """
    for tried in range(_TRIES - 1):
        with suppress(
            UnknownOutcomeError
        ):  # what became of it is not worth asking: the next has other keys
            return _probe(store, f"{probe_id}-{tried}", below)
    return _probe(store, probe_id, below)


def _probe(store: ObjectStore, probe_id: str, below: str) -> Capabilities:
    name = f"{PREFIX}{probe_id}-put"
    created, replaced = below + name, f"{below}{PREFIX}{probe_id}-set"
    try:
        return Capabilities(
            put_if_absent=_creates_once(store, created),
            distinguishes_case=not _is_there(store, below + name.upper()),
            compare_and_set=_replaces_only_the_expected(store, replaced),
        )
    finally:
        for key in (created, replaced):
            with suppress(BackendError):
                store.delete(key)


def _creates_once(store: ObjectStore, key: str) -> bool:
    try:
        store.put_if_absent(key, b"first")
    except UnsupportedError:
        return False
    try:
        store.put_if_absent(key, b"second")
    except AlreadyExistsError:
        return store.get(key) == b"first"
    return False


def _is_there(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except BackendError as error:
        if error.retriable:
            raise
        return False  # not found; or refused, as S3 answers for what is not there to those who may not list
    return True


def _replaces_only_the_expected(store: ObjectStore, key: str) -> bool:
    try:
        first = store.compare_and_set(key, b"first", None)
    except UnsupportedError:
        return False
    second = store.compare_and_set(key, b"second", first)
    refused = all(_is_refused(store, key, b"third", stale) for stale in (first, None))
    kept = store.get_versioned(key) == (b"second", second)
    store.delete(key)
    # Some versions of MinIO wrote the object when the key was missing.
    return refused and kept and _is_refused(store, key, b"fourth", second)


def _is_refused(store: ObjectStore, key: str, data: bytes, expected: Version | None) -> bool:
    try:
        store.compare_and_set(key, data, expected)
    except PreconditionFailedError:
        return True
    return False
