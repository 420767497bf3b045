"""Old versions of what was deleted, in a bucket that keeps them: listed, and deleted. Only for who erases.

A bucket with versioning answers DELETE by a marker in front of the object, whose bytes stay. No tier names a version, so
nobody else needs to know of them.

Ordering: of one key the versions come before the markers, so that a crash in between leaves the key deleted.

Retries and errors: the client library's. Errors name the permission that is missing.

Threads: one.
"""

from __future__ import annotations

import importlib
import os
from contextlib import contextmanager
from itertools import chain, groupby
from typing import TYPE_CHECKING, Protocol, cast

from backends.errors import ConfigurationError, UnsupportedError
from backends.s3_settings import resolve, split_location
from backends.s3_wire import DELETE_VERSION, VERSIONS, S3Failure, to_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from backends.base import StoredVersion
    from backends.s3_settings import S3Options, S3Settings

_NEEDS = "old versions in a bucket are deleted by boto3, which is not installed; pip install 'tieredmq[s3]'"
_SCHEMES = ("s3://", "s3a://")


class _VersionsWire(Protocol):
    def versioning(self) -> str: ...

    def versions(self, folder: str) -> Iterator[Sequence[StoredVersion]]: ...

    def delete_version(self, key: str, version_id: str) -> None: ...

    def close(self) -> None: ...


class BucketVersions:
    """The versions below ``bucket/prefix``."""

    def __init__(self, location: str, options: S3Options) -> None:
        """Prepare; nothing is asked yet.

        Raises:
            ConfigurationError: A wrong option, or a library is missing.
        """
        self._bucket, prefix = split_location(location)
        self._root = f"{prefix}/" if prefix else ""
        settings: S3Settings = resolve(self._bucket, options, os.environ)
        try:
            module = importlib.import_module("backends.s3_control")
        except ImportError as error:
            raise ConfigurationError(_NEEDS) from error
        self._server = settings.server
        self._wire = cast("Callable[..., _VersionsWire]", module.BotoWire)(settings)

    def status(self) -> str:
        """``Enabled``, ``Suspended`` (what is old stays), or "" for a bucket that never kept any."""
        try:
            with self._failures(VERSIONS, f"versioning of bucket {self._bucket}"):
                return self._wire.versioning()
        except UnsupportedError:
            return ""  # a server without versions keeps none

    def of_deleted(self, prefix: str) -> Iterator[StoredVersion]:
        """What is left of the keys below a prefix whose newest version is a marker; the keys without the URL's prefix."""
        with self._failures(VERSIONS, f"{self._bucket}/{self._root}{prefix}"):
            pages = self._wire.versions(self._root + prefix)
            rows = chain.from_iterable(sorted(page, key=lambda one: one.key) for page in pages)
            for _, group in groupby(rows, lambda one: one.key):
                ones = list(group)
                if any(one.is_marker and one.is_latest for one in ones):
                    for one in sorted(ones, key=lambda one: one.is_marker):
                        yield one._replace(key=one.key.removeprefix(self._root))

    def delete(self, one: StoredVersion) -> None:
        """Delete a version for good; one that is gone is not an error."""
        with self._failures(DELETE_VERSION, f"{self._bucket}/{self._root}{one.key}"):
            self._wire.delete_version(self._root + one.key, one.version_id)

    def close(self) -> None:
        """Give back connections."""
        self._wire.close()

    @contextmanager
    def _failures(self, permission: str, where: str) -> Iterator[None]:
        try:
            yield
        except S3Failure as failure:
            raise to_error(
                failure, write=False, where=where, endpoint=self._server, permission=permission
            ) from failure


def open_versions(url: str, options: S3Options) -> BucketVersions | None:
    """The versions of a URL's bucket; None where there can be none, as in a folder.

    Raises:
        ConfigurationError: A wrong option, or a library is missing.
    """
    for scheme in _SCHEMES:
        if url.lower().startswith(scheme):
            return BucketVersions(url[len(scheme) :].rstrip("/"), options)
    return None
