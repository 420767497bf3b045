"""The fast S3 client: obstore, from many threads at once.

It is told to retry nothing: a conditional PUT that is tried again meets its own object. Its errors
carry the answer only as text, so the class of the exception decides, and the text, of which only
the structured tail is read, refines it. Should a later version word it otherwise, failed writes
become unknown outcomes and failed reads unavailable, which is safe.

A deadline is a client's, and goes by the bytes of a request, so there is a client for each class of sizes, made when it is
first asked for; most stores see one or two.

``get_ranges`` of obstore is not used: it panics when a range reaches behind the end.

Listings are not asked for through obstore: ``backends.s3_listing`` says why.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import obstore
from obstore import exceptions
from obstore.store import S3Store as Client

from backends.base import ObjectInfo, Version
from backends.s3_listing import Lister
from backends.s3_wire import (
    EXPIRED,
    NO_CREDENTIALS,
    NO_TLS,
    OTHER_NAME,
    UNKNOWN,
    S3Failure,
    answered,
    etag_of,
    no_credentials,
    read_ca_bundle,
    untrusted,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from obstore import ObjectMeta
    from obstore.store import ClientConfig, S3Config, S3CredentialProvider

    from backends.base import Chunk
    from backends.s3_settings import S3Settings

_SMALL_BYTES = 4 * 1024 * 1024
"""Writes of so much have the deadline of a request of no bytes."""
_CHUNK_BYTES = 1024 * 1024
_UNDER_WAY_BYTES = 32 * 1024 * 1024
"""Readers have so much under way at once, in chunks, which all take as long as their sum where the way is slow."""
# Lines of the "Debug source" that obstore appends. Keys and bodies stand in them inside quotes on
# lines of their own, so that no key can be mistaken for a status.
_STATUS = re.compile(r"^\s+status: (\d{3}),$", re.MULTILINE)
_BODY = re.compile(r'^\s+body: Some\(\n\s+"(.*)",$', re.MULTILINE)
_KIND = re.compile(r"HttpError \{\n\s+kind: (\w+),$", re.MULTILINE)
# A connection that took too long is of kind Timeout; that it never came about stands only here.
_NO_CONNECTION = re.compile(r"^\s+source: [\w:]+Error\(\n\s+Connect,$", re.MULTILINE)
_CAUSE = re.compile(r'ConnectError\(\n\s+"([^"]+)",$', re.MULTILINE)
_CERTIFICATE = re.compile(r"^\s+error: InvalidCertificate\(\n\s+(\w+)", re.MULTILINE)
_SOURCE = "External AWS credential provider"
_RAISED = re.compile(r"^\s+type: <class '(?:\w+\.)*(\w+)'>,$", re.MULTILINE)
_NO_TLS = re.compile(r"^\s+error: InvalidMessage\($", re.MULTILINE)
_REASONS = {
    "UnknownIssuer": UNKNOWN,
    "NotValidForName": OTHER_NAME,
    "NotValidForNameContext": OTHER_NAME,
    "Expired": EXPIRED,
    "ExpiredContext": EXPIRED,
    "NotValidYet": EXPIRED,
    "NotValidYetContext": EXPIRED,
}
_STATUS_OF_CLASS: list[tuple[type[BaseException], int]] = [
    (exceptions.AlreadyExistsError, 412),
    (exceptions.PreconditionError, 412),
    (exceptions.PermissionDeniedError, 403),
    (exceptions.UnauthenticatedError, 401),
    (exceptions.NotSupportedError, 501),
    (FileNotFoundError, 404),
]


_USED_BY: set[int] = set()
"""Processes that have made a client, and those that they were forked off."""


def is_cut_off() -> bool:
    """Whether this process was forked off one that used obstore: the threads that carry out its requests are not here.

    All its clients share them, so that a new one would wait for ever, too.
    """
    return bool(_USED_BY - {os.getpid()})


class ObstoreWire:
    """An ``S3Wire`` over obstore."""

    def __init__(self, settings: S3Settings) -> None:
        _USED_BY.add(os.getpid())
        self._settings = settings
        self._lister = Lister(settings)
        self._ca_bundle = None
        if settings.ca_bundle is not None and not settings.is_plain_http:
            self._ca_bundle = read_ca_bundle(settings.ca_bundle)
        self._client = self._made(0)
        self._clients = {0: self._client}

    def _made(self, size_bytes: int) -> Client:
        settings = self._settings
        options: ClientConfig = {
            "allow_http": settings.is_plain_http,
            "timeout": timedelta(seconds=settings.deadline_s(size_bytes)),
            "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        }
        if settings.headers:
            options["default_headers"] = dict(settings.headers)
        if self._ca_bundle is not None:
            options["root_certificate"] = self._ca_bundle
        return Client(
            settings.bucket,
            config=_config(settings),
            client_options=options,
            retry_config={"max_retries": 0},
            credential_provider=cast("S3CredentialProvider", settings.credentials),
        )

    def _client_for(self, size_bytes: int) -> Client:
        """The client whose deadline does for so many bytes."""
        sized = max(_UNDER_WAY_BYTES, 1 << (size_bytes - 1).bit_length())
        sized = 0 if size_bytes <= _SMALL_BYTES else sized
        found = self._clients.get(sized)
        # Two threads may make one each; one of the two is kept, and the other goes when its request has ended.
        return found or self._clients.setdefault(sized, self._made(sized))

    def put(self, key: str, chunks: Sequence[Chunk], expected: str | None) -> str:
        """The chunks are sent as they are, without joining them."""
        with _failures():
            # An iterator of no chunks would be a body of none; one chunk needs no iterator.
            body = chunks[0] if len(chunks) == 1 else iter(chunks) if chunks else b""
            size_bytes = sum(memoryview(chunk).nbytes for chunk in chunks)
            mode = "create" if expected is None else {"e_tag": expected}
            result = obstore.put(
                self._client_for(size_bytes),
                key,
                body,
                mode=mode,  # type: ignore[arg-type]  # (a TypedDict of obstore that is not there at run time)
                use_multipart=False,
            )
            return etag_of(result["e_tag"])

    def get(self, key: str) -> tuple[bytes, str]:
        with _failures():
            result = obstore.get(self._client, key)
            client = self._client_for(result.meta["size"])
            if client is not self._client:  # what has come of it is little, and is let go
                result = obstore.get(client, key)
            etag = etag_of(result.meta["e_tag"])
            return bytes(result.bytes()), etag

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        with _failures():
            size_bytes = end - start
            is_chunk = size_bytes >= _CHUNK_BYTES
            client = self._client_for(max(size_bytes, _UNDER_WAY_BYTES) if is_chunk else 0)
            return memoryview(obstore.get_range(client, key, start=start, end=end))

    def head(self, key: str) -> ObjectInfo:
        with _failures():
            return _info(obstore.head(self._client, key))

    def list(self, folder: str, start_after: str) -> Iterator[Sequence[ObjectInfo]]:
        return self._lister.pages(folder, start_after)

    def delete(self, key: str) -> None:
        with _failures():
            obstore.delete(self._client, key)

    def close(self) -> None:
        """Idle connections are closed with the client, which an error's traceback might hold on to."""
        del self._client, self._clients
        self._lister.close()


def _config(settings: S3Settings) -> S3Config:
    config: S3Config = {
        "region": settings.region,
        "virtual_hosted_style_request": not settings.path_style,
        "conditional_put": "etag",
        # A bucket with Object Lock takes no PUT without one. It is the hash that the signature covers, so it is made once.
        "checksum_algorithm": "SHA256",
        "disable_bulk_delete": True,  # DELETE of a key is what every server has
    }
    if settings.request_url is not None:
        config["endpoint"] = settings.request_url
        config["aws_endpoint_url_s3"] = settings.request_url  # else the environment would win
    if settings.sse_kms_key_id is not None:
        config["server_side_encryption"] = "aws:kms"
        config["sse_kms_key_id"] = settings.sse_kms_key_id
    return config


def _info(meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(
        key=meta["path"],
        size_bytes=meta["size"],
        modified_ms=round(meta["last_modified"].timestamp() * 1000),
        version=Version(etag_of(meta["e_tag"])),
    )


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (exceptions.BaseError, OSError, ValueError) as error:
        failure = failure_of(error)
        is_secret = failure.code == NO_CREDENTIALS  # what a source of keys says may hold them
        raise failure from None if is_secret else error


def failure_of(error: BaseException) -> S3Failure:
    """What an exception of obstore says about the request."""
    text = str(error)
    status = _STATUS.search(text)
    if status is not None:
        found = _BODY.search(text)
        return answered(int(status[1]), found[1].replace('\\"', '"') if found else "")
    if isinstance(error, exceptions.UnauthenticatedError) and _SOURCE in text:
        cause = _RAISED.search(text)
        return no_credentials(cause[1] if cause else "an error")
    for kind, number in _STATUS_OF_CLASS:
        if isinstance(error, kind):
            return S3Failure(number)
    if "inner: BareRedirect" in text:
        return S3Failure(301)
    refused = _CERTIFICATE.search(text)
    if refused is not None:
        return untrusted(_REASONS.get(refused[1], refused[1]))
    if _NO_TLS.search(text) is not None:
        return untrusted(NO_TLS)
    transport = _KIND.search(text)
    connecting = _CAUSE.search(text)
    kind_name = transport[1] if transport else type(error).__name__
    detail = connecting[1] if connecting else kind_name.lower()
    sent = kind_name != "Connect" and _NO_CONNECTION.search(text) is None
    return S3Failure(0, sent=sent, detail=detail)
