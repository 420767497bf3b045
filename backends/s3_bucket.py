"""A bucket itself: its rules and locks, and the old versions that it keeps of what was deleted.

What its rules would do to a tier in it is read for ``tiered doctor``. Old versions are only for who erases: a bucket with
versioning answers DELETE by a marker in front of the object, whose bytes stay. No tier names a version, so nobody else
needs to know of them.

Ordering: of one key the versions come before the markers, so that a crash in between leaves the key deleted.

Retries and errors: the client library's, which is boto3. Errors name the permission that is missing.

Threads: one.
"""

from __future__ import annotations

import os
from contextlib import closing
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from backends.errors import UnsupportedError
from backends.lazy_dataclass import dataclass
from backends.s3_settings import check_options, loaded, resolve, split_location
from backends.s3_wire import DELETE_VERSION, LOCK, RULES, VERSIONS, failures_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from backends.base import StoredVersion
    from backends.s3_settings import S3Options

_SCHEMES = ("s3://", "s3a://")


class _BucketWire(Protocol):
    def rules(self) -> tuple[str, Sequence[dict[str, Any]]]: ...

    def object_lock(self) -> str: ...

    def versioning(self) -> str: ...

    def versions(self, folder: str) -> Iterator[Sequence[StoredVersion]]: ...

    def delete_version(self, key: str, version_id: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BucketRules:
    """What is set for a bucket."""

    versioning: str  # ``Enabled``, ``Suspended``, or "" when it never was
    harmful: tuple[str, ...]
    """Lifecycle rules that delete or move away objects of the tier, a clause each."""


class Bucket:
    """The bucket of ``bucket/prefix``, and the versions below the prefix. Nothing is asked before a method is called."""

    def __init__(self, location: str, options: S3Options) -> None:
        self._name, self._prefix = split_location(location)
        self._root = f"{self._prefix}/" if self._prefix else ""
        check_options(options)
        settings = resolve(self._name, options, os.environ)
        self._server = settings.server
        self._wire: _BucketWire = loaded("s3_control").BotoWire(settings)

    def rules(self) -> BucketRules:
        """The bucket's rules, as far as they concern what lies below the prefix."""
        with self._failures(RULES, f"rules of bucket {self._name}"):
            versioning, rules = self._wire.rules()
        harmful = tuple(harm for rule in rules if (harm := harm_of(rule, self._prefix)))
        return BucketRules(versioning, harmful)

    def object_lock(self) -> str:
        """Mode and time for which the bucket keeps a new object from being deleted; "": it does not."""
        with self._failures(LOCK, f"rules of bucket {self._name}"):
            return self._wire.object_lock()

    def status(self) -> str:
        """``Enabled``, ``Suspended`` (what is old stays), or "" for a bucket that never kept any."""
        try:
            with self._failures(VERSIONS, f"versioning of bucket {self._name}"):
                return self._wire.versioning()
        except UnsupportedError:
            return ""  # a server without versions keeps none

    def of_deleted(self, prefix: str) -> Iterator[StoredVersion]:
        """What is left of the keys below a prefix whose newest version is a marker; the keys without the URL's prefix."""
        with self._failures(VERSIONS, f"{self._name}/{self._root}{prefix}"):
            pages = self._wire.versions(self._root + prefix)
            rows = chain.from_iterable(sorted(page, key=lambda one: one.key) for page in pages)
            for _, group in groupby(rows, lambda one: one.key):
                ones = list(group)
                if any(one.is_marker and one.is_latest for one in ones):
                    for one in sorted(ones, key=lambda one: one.is_marker):
                        yield one._replace(key=one.key.removeprefix(self._root))

    def delete(self, one: StoredVersion) -> None:
        """Delete a version for good; one that is gone is not an error."""
        with self._failures(DELETE_VERSION, f"{self._name}/{self._root}{one.key}"):
            self._wire.delete_version(self._root + one.key, one.version_id)

    def close(self) -> None:
        """Give back connections."""
        self._wire.close()

    def _failures(self, permission: str, where: str) -> AbstractContextManager[None]:
        return failures_of(permission, where, self._server)


def open_versions(url: str, options: S3Options) -> Bucket | None:
    """The bucket of a URL, for its old versions; None where there can be none, as in a folder."""
    for scheme in _SCHEMES:
        if url.lower().startswith(scheme):
            return Bucket(url[len(scheme) :].rstrip("/"), options)
    return None


def read_rules(location: str, options: S3Options) -> BucketRules:
    """Ask the server for the rules of the bucket in ``bucket/prefix``."""
    with closing(Bucket(location, options)) as bucket:
        return bucket.rules()


def read_object_lock(location: str, options: S3Options) -> str:
    """As ``Bucket.object_lock``."""
    with closing(Bucket(location, options)) as bucket:
        return bucket.object_lock()


def plain_http_host(location: str, options: S3Options) -> str:
    """Host of the endpoint when nothing is encrypted on the way, else ""."""
    settings = resolve(split_location(location)[0], options, os.environ)
    if not settings.is_plain_http or settings.endpoint_url is None:
        return ""
    return urlsplit(settings.endpoint_url).hostname or settings.endpoint_url


def harm_of(rule: dict[str, Any], prefix: str) -> str:
    """What a lifecycle rule would do to objects below ``prefix``; "" when nothing that hurts."""
    chosen = rule.get("Filter", {})
    of = rule.get("Prefix") or chosen.get("Prefix") or chosen.get("And", {}).get("Prefix") or ""
    meets = prefix.startswith(of) or of.startswith(prefix)
    if rule.get("Status") != "Enabled" or not meets:
        return ""
    name = f"rule {rule.get('ID', '')!r} for {of or 'all objects'!r}"
    expiration = rule.get("Expiration", {})
    if "Days" in expiration or "Date" in expiration:
        return f"{name} deletes objects by age"
    moves = {str(move.get("StorageClass", "")) for move in rule.get("Transitions", [])}
    away = sorted(moves & {"GLACIER", "DEEP_ARCHIVE"})
    return f"{name} moves objects to {', '.join(away)}" if away else ""
