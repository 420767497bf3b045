"""The one module that knows boto3: AWS profiles and roles, and headers that must be signed.

boto3 costs several times the CPU of obstore, so requests go through it only when a header begins
with ``x-amz-``: AWS refuses such headers unless the signature covers them, and obstore adds custom
headers after signing.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import os
from contextlib import closing, contextmanager
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore import exceptions
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials

from backends.base import ObjectInfo, StoredVersion, Version
from backends.errors import ConfigurationError, UnsupportedError
from backends.lazy_dataclass import dataclass
from backends.s3_listing import Lister
from backends.s3_settings import Credential, Profile, check_options, loaded, resolve, split_location
from backends.s3_wire import (
    CUT,
    DELETE_VERSION,
    ELEMENTS,
    FOREIGN,
    LOCK,
    RULES,
    VERSIONS,
    S3Failure,
    etag_of,
    failures_of,
    no_credentials,
    read_ca_bundle,
    tls_refusal,
    untrusted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from backends.base import Chunk
    from backends.s3_settings import CredentialSource, S3Options, S3Settings

_CONNECTIONS_MAX = 64
_OK = 200
_FIRST_SERVER_FAULT = 500
_NOT_SENT = (
    exceptions.EndpointConnectionError,
    exceptions.ConnectTimeoutError,
    exceptions.ProxyConnectionError,
)
_DOCUMENTS = {
    "GetBucketVersioning": b"VersioningConfiguration",
    "GetBucketLifecycleConfiguration": b"LifecycleConfiguration",
    "GetObjectLockConfiguration": b"ObjectLockConfiguration",
    "ListObjectVersions": b"ListVersionsResult",
}
"""Answers in which botocore takes what is missing for what is not set, or not there."""


class _Given(Credentials):  # type: ignore[misc]  # (botocore ships no types)
    """Credentials that are asked for anew for each signature, so that those which expire are refreshed."""

    def __init__(self, source: CredentialSource) -> None:
        super().__init__("asked", "for")
        self._source = source

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        try:
            now = self._source()
        except Exception as error:  # noqa: BLE001 (of any source; its text may hold secrets)
            raise no_credentials(type(error).__name__) from None
        return ReadOnlyCredentials(now["access_key_id"], now["secret_access_key"], now.get("token"))


def load_profile(name: str | None) -> Profile:
    """Endpoint, region and credentials of an AWS profile, or (None) of what AWS tools would take."""
    try:
        session = boto3.Session(profile_name=name)
        found = session.get_credentials()
        scoped = session._session.get_scoped_config()  # noqa: SLF001 (has no public door)
        services = session._session.full_config.get("services", {})  # noqa: SLF001 (the same)
    except exceptions.CredentialRetrievalError:  # its text is what the source printed
        raise ConfigurationError(
            "where the AWS profile says that keys come from, there are none now: run its"
            " credential_process (or log in) by hand to see why"
        ) from None
    except exceptions.BotoCoreError as error:
        raise ConfigurationError(f"cannot use the AWS profile: {error}") from error
    own = services.get(scoped.get("services", ""), {}).get("s3", {})
    endpoint = own.get("endpoint_url") or scoped.get("endpoint_url")

    def credential() -> Credential:
        frozen = found.get_frozen_credentials()
        ends = getattr(found, "_expiry_time", None)  # of those that expire
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": None
            if ends is None
            else ends.astimezone(dt.UTC),  # obstore takes no other
        }

    bundle = session._session.get_config_variable("ca_bundle")  # noqa: SLF001 (the same)
    return Profile(endpoint, session.region_name, None if found is None else credential, bundle)


class BotoWire:
    """An ``S3Wire`` over boto3. Its deadline counts anew for each chunk that arrives."""

    def __init__(self, settings: S3Settings) -> None:
        self._bucket = settings.bucket
        self._lister = Lister(settings)
        self._extra: dict[str, str] = {}
        if settings.sse_kms_key_id is not None:
            self._extra = {
                "ServerSideEncryption": "aws:kms",
                "SSEKMSKeyId": settings.sse_kms_key_id,
            }
        if settings.ca_bundle is not None:
            read_ca_bundle(settings.ca_bundle)  # so that what is wrong with it is said now
        session = botocore.session.get_session()
        session._credentials = _Given(settings.credentials)  # noqa: SLF001 (has no public door)
        self._client = boto3.Session(botocore_session=session).client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=settings.region,
            verify=settings.ca_bundle,
            config=_config(settings),
        )
        headers = dict(settings.headers)

        def add_headers(request: Any, **_: object) -> None:  # noqa: ANN401 (boto3 ships no types)
            for name, value in headers.items():
                request.headers[name] = value

        self._client.meta.events.register("before-sign.s3", add_headers)
        for operation in _DOCUMENTS:
            self._client.meta.events.register(f"after-call.s3.{operation}", _see_document)

    def put(self, key: str, chunks: Sequence[Chunk], expected: str | None) -> str:
        when = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        body = b"".join(chunks)
        # As the fast client does; one that botocore makes by itself may come behind the body, which servers of old refuse.
        checksum = base64.b64encode(hashlib.sha256(body).digest()).decode()
        with _failures():
            answer = self._client.put_object(
                Bucket=self._bucket,
                Key=key,
                Body=body,
                ChecksumSHA256=checksum,
                **when,
                **self._extra,
            )
            return etag_of(answer.get("ETag"))

    def get(self, key: str) -> tuple[bytes, str]:
        with _failures():
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
            with closing(answer["Body"]) as body:
                return bytes(body.read()), etag_of(answer.get("ETag"))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        with _failures():
            answer = self._client.get_object(
                Bucket=self._bucket, Key=key, Range=f"bytes={start}-{end - 1}"
            )
            with closing(answer["Body"]) as body:
                return bytes(body.read())

    def head(self, key: str) -> ObjectInfo:
        with _failures():
            answer = self._client.head_object(Bucket=self._bucket, Key=key)
            version = Version(etag_of(answer.get("ETag")))
            modified_ms = round(answer["LastModified"].timestamp() * 1000)
            return ObjectInfo(key, answer["ContentLength"], modified_ms, version)

    def list(self, folder: str, start_after: str) -> Iterator[Sequence[ObjectInfo]]:
        return self._lister.pages(folder, start_after)

    def delete(self, key: str) -> None:
        with _failures():
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def rules(self) -> tuple[str, Sequence[dict[str, Any]]]:
        """What ``versioning`` says, and the bucket's lifecycle rules."""
        versioning = self.versioning()
        with _failures():
            ask = self._client.get_bucket_lifecycle_configuration
            answer = self._unless("NoSuchLifecycleConfiguration", ask)
        return versioning, answer.get("Rules", [])

    def object_lock(self) -> str:
        """Mode and time for which a new object is kept from being deleted; "" when the bucket's rules keep none."""
        with _failures():
            ask = self._client.get_object_lock_configuration
            answer = self._unless("ObjectLockConfigurationNotFoundError", ask)
        found = (
            answer.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention", {})
        )
        lasts = [f"{found[unit]} {unit.lower()}" for unit in ("Days", "Years") if unit in found]
        return " ".join([str(found.get("Mode", "")), *lasts]).strip()

    def _unless(self, code: str, ask: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """An answer about the bucket; nothing where the server says by ``code`` that nothing is set."""
        try:
            return ask(Bucket=self._bucket)
        except exceptions.ClientError as error:
            if error.response.get("Error", {}).get("Code") != code:
                raise
            return {}

    def versioning(self) -> str:
        """Whether the bucket keeps old versions: ``Enabled``, ``Suspended``, or ""."""
        with _failures():
            return str(self._client.get_bucket_versioning(Bucket=self._bucket).get("Status", ""))

    def versions(self, folder: str) -> Iterator[Sequence[StoredVersion]]:
        """All versions and markers, key by key, a page at a time."""
        with _failures():
            pages = self._client.get_paginator("list_object_versions").paginate(
                Bucket=self._bucket, Prefix=folder
            )
            for page in pages:
                _see_whole(page)
                yield [
                    StoredVersion(
                        found["Key"],
                        found["VersionId"],
                        found.get("Size", 0),
                        found["IsLatest"],
                        kind == "DeleteMarkers",
                    )
                    for kind in ("Versions", "DeleteMarkers")
                    for found in page.get(kind, [])
                ]

    def delete_version(self, key: str, version_id: str) -> None:
        """Delete one for good."""
        with _failures():
            self._client.delete_object(Bucket=self._bucket, Key=key, VersionId=version_id)

    def close(self) -> None:
        self._client.close()
        self._lister.close()


def _config(settings: S3Settings) -> Config:
    return Config(
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.timeout_s,
        retries={"total_max_attempts": 1},  # a conditional PUT tried again meets its own object
        max_pool_connections=_CONNECTIONS_MAX,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version="s3v4",
        s3={
            "addressing_style": "path" if settings.path_style else "virtual",
            "payload_signing_enabled": True,
        },
    )


def _see_document(http_response: Any, model: Any, **_: object) -> None:  # noqa: ANN401 (boto3 ships no types)
    """Refuse an answer of success that is not the document asked for, as an empty one or a proxy's page."""
    status = http_response.status_code
    if status == _OK and _DOCUMENTS[model.name] not in http_response.content:
        raise S3Failure(status, FOREIGN, detail="it is not an answer to the question")


def _see_whole(page: dict[str, Any]) -> None:
    """Refuse a page of versions that goes on and does not say where, or says neither: botocore takes it for the last."""
    if page.get("IsTruncated") is None:
        raise S3Failure(_OK, FOREIGN, detail="it does not say whether it goes on")
    if page["IsTruncated"] and not page.get("NextKeyMarker"):
        raise S3Failure(_OK, CUT, detail="it goes on, and does not say where")


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except exceptions.ClientError as error:
        raise _answered(error) from error
    except exceptions.SSLError as error:
        raise untrusted(tls_refusal(error)) from error
    except _NOT_SENT as error:
        raise S3Failure(0, sent=False, detail=type(error).__name__) from error
    except (exceptions.BotoCoreError, OSError) as error:
        raise S3Failure(0, detail=type(error).__name__) from error


def _answered(error: exceptions.ClientError) -> S3Failure:
    """What an answer says. Where botocore has found no code in it, it gives the status, and has thrown the body away."""
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = {name: str(value) for name, value in error.response.get("Error", {}).items()}
    code = said.get("Code", "")
    length = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("content-length")
    if code and not code.isdigit():
        return S3Failure(
            status, code, facts={name: said[name] for name in ELEMENTS if name in said}
        )
    is_foreign = (
        error.operation_name != "HeadObject"
        and length not in {None, "0"}
        and status < _FIRST_SERVER_FAULT
    )
    return S3Failure(status, FOREIGN if is_foreign else "")


# -- bucket --------------------------------------------------------------------------------------
#
# A bucket itself: its rules and locks, and the old versions that it keeps of what was deleted.
#
# What its rules would do to a tier in it is read for ``tiered doctor``. Old versions are only for who erases: a bucket with
# versioning answers DELETE by a marker in front of the object, whose bytes stay. No tier names a version, so nobody else
# needs to know of them.
#
# Ordering: of one key the versions come before the markers, so that a crash in between leaves the key deleted.
#
# Retries and errors: the client library's, which is boto3. Errors name the permission that is missing.
#
# Threads: one.

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
