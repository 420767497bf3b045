"""What ``S3Store`` needs of a client library: one request per call, and failures as data.

``backends.s3_obstore`` is the fast one; ``backends.s3_control`` signs headers that it cannot.
"""

from __future__ import annotations

import re
import ssl
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from backends.errors import (
    BackendError,
    ConfigurationError,
    InvalidRangeError,
    ObjectNotFoundError,
    PermissionDeniedError,
    UnreachableError,
    UntrustedError,
)
from backends.local_files import read_regular
from backends.s3_answers import (
    FOREIGN,
    NO_SUCH_BUCKET,
    Refusal,
    answer_for,
    elements_of,
    particulars,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from backends.base import Chunk, ObjectInfo


class S3Failure(Exception):  # noqa: N818 (never leaves the backend; S3Store turns it into an error)
    """A request that did not succeed."""

    def __init__(
        self,
        status: int,
        code: str = "",
        *,
        sent: bool = True,
        detail: str = "",
        untrusted: bool = False,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, code, sent, detail)
        self.status = status  # HTTP status of the answer, or 0 when there was none
        self.code = code  # s3's error code in it, or ""
        self.sent = sent  # whether the server may have seen the request
        self.detail = detail  # what else is known, for the message; no secrets
        # There is a server, and its certificate was not accepted; nothing was sent.
        self.untrusted = untrusted
        self.facts = facts or {}  # elements of the answer (``backends.s3_answers.ELEMENTS``)

    def __str__(self) -> str:
        answer = f"{self.status} {self.code}".strip() if self.status else ""
        return ": ".join(filter(None, [answer, self.detail])) or "no answer"


_CODE = re.compile(r"<Code>([\w.]+)</Code>")
_FIRST_SERVER_FAULT = 500


def answered(status: int, body: str) -> S3Failure:
    """The failure that an answer tells of; one with a body that is none of S3's came from somebody else."""
    code = _CODE.search(body)
    if code is None and body.strip():
        return S3Failure(status, FOREIGN if status < _FIRST_SERVER_FAULT else "")
    return S3Failure(status, code[1] if code else "", facts=elements_of(body))


def etag_of(told: str | None) -> str:
    """The ETag of an answer of success, which each server of S3 gives: without it the answer is somebody else's."""
    if not told:
        raise S3Failure(200, FOREIGN, detail="it has no ETag")
    return told


NO_CREDENTIALS = "NoCredentials"
"""Code of a failure of our own: where keys come from gives none, so nothing was sent."""


def no_credentials(cause: str) -> S3Failure:
    """The failure of a request that could not be signed; of its cause only the name, since its text may hold secrets."""
    detail = f"where the AWS settings say that keys come from, there are none now: {cause}"
    return S3Failure(0, NO_CREDENTIALS, sent=False, detail=detail)


class S3Wire(Protocol):
    """Requests for one bucket, with whole keys. No retries. Any thread may call anything.

    Every method raises ``S3Failure`` and nothing else.
    """

    def put(self, key: str, chunks: Sequence[Chunk], expected: str | None) -> str:
        """PUT the joined chunks if the object has that ETag, or, with None, is absent; the new ETag, quoted as it came."""
        ...

    def get(self, key: str) -> tuple[bytes, str]:
        """GET all; the bytes and the ETag."""
        ...

    def get_range(self, key: str, start: int, end: int) -> bytes | memoryview:
        """GET bytes ``[start, end)``, fewer when the object ends inside."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """HEAD."""
        ...

    def list(self, folder: str, start_after: str) -> Iterator[Sequence[ObjectInfo]]:
        """LIST in pages what lies below ``folder`` ("" or ending in a slash) behind a key ("")."""
        ...

    def delete(self, key: str) -> None:
        """DELETE; no failure when nothing was there."""
        ...

    def close(self) -> None:
        """Give back connections."""
        ...


# -- errors ----------------------------------------------------------------------------------------
#
# From an answer of an S3 server to one of our errors; what each means stands in ``backends.s3_answers``.

_DENIED_CODES = {"AccessDenied", ""}
"""With a 403. An answer to HEAD has no code."""
PUT, GET, LIST, DELETE = "s3:PutObject", "s3:GetObject", "s3:ListBucket", "s3:DeleteObject"
RULES = "s3:GetBucketVersioning and s3:GetLifecycleConfiguration"
LOCK = "s3:GetBucketObjectLockConfiguration"
VERSIONS = "s3:GetBucketVersioning and s3:ListBucketVersions"
DELETE_VERSION = "s3:DeleteObjectVersion"
_VERBS = {
    PUT: "put an object",
    GET: "read an object",
    LIST: "list the bucket",
    DELETE: "delete an object",
    RULES: "tell the bucket's rules",
    LOCK: "tell how long the bucket locks objects",
    VERSIONS: "tell of old versions",
    DELETE_VERSION: "delete an old version",
}
_FORBIDDEN = 403


@contextmanager
def failures_of(permission: str, where: str, endpoint: str) -> Iterator[None]:
    """What a request meets becomes our error, which names the permission that it needs, and the server's address."""
    try:
        yield
    except S3Failure as failure:
        raise _to_error(failure, permission, where, endpoint) from failure


def _to_error(failure: S3Failure, permission: str, where: str, endpoint: str) -> BackendError:
    if failure.untrusted:
        return UntrustedError(f"{endpoint} is not trusted: {failure} ({where})")
    if failure.code == NO_CREDENTIALS:
        return PermissionDeniedError(f"no credentials for {endpoint}: {failure.detail} ({where})")
    if not failure.sent:
        return UnreachableError(f"cannot reach {endpoint}: {failure} ({where})")
    write = permission in {PUT, DELETE}
    answer = answer_for(failure.status, failure.code, failure.facts, write=write)
    error = answer.kind(_told(failure, answer, where, endpoint, permission))
    error.reason, error.do = answer.reason or error.reason, answer.do
    return error


def _told(failure: S3Failure, answer: Refusal, where: str, endpoint: str, permission: str) -> str:
    if failure.code == NO_SUCH_BUCKET:
        return f"no such bucket: {where} at {endpoint}"
    if answer.kind is ObjectNotFoundError:
        return f"no such object: {where}"
    if answer.kind is InvalidRangeError:
        return f"range begins behind the end: {where}"
    said = f": {message}" if (message := failure.facts.get("Message", "")) else ""
    answered = f"{failure}{said} ({where})"
    if answer.what:
        return f"{endpoint} {answer.what}{particulars(answer, failure.facts)}: {answered}"
    if answer.kind is PermissionDeniedError:
        refused = "these credentials"
        if failure.status == _FORBIDDEN and failure.code in _DENIED_CODES:
            verb = _VERBS[permission]
            refused = f"to {verb}, for which {refused} need the permission {permission}"
        return f"{endpoint} refuses {refused}: {answered}"
    return f"{endpoint} answered {answered}"


# -- trust -----------------------------------------------------------------------------------------
#
# TLS to an S3 server: whom to trust, and what to say when the server is not trusted.
#
# Certificates are always verified, host names too; nothing switches that off. Whom to trust: the system's
# authorities, and those of a file that is named (``S3Options.ca_bundle``, ``AWS_CA_BUNDLE``, or ``ca_bundle``
# of the AWS profile).

UNKNOWN = "unknown"
OTHER_NAME = "other-name"
EXPIRED = "expired"
NO_TLS = "no-tls"
_WORDS = {
    UNKNOWN: "no known authority has signed its certificate; if it should be trusted, name a PEM file"
    " of its authority with --ca-bundle or AWS_CA_BUNDLE",
    OTHER_NAME: "its certificate is for another host name; give the endpoint by a name that is in it",
    EXPIRED: "its certificate is not valid at this time; renew it, or set the clock",
    NO_TLS: "it does not speak TLS; if messages may go unencrypted, say http:// in the endpoint",
}
_REASONS = {9: EXPIRED, 10: EXPIRED, 18: UNKNOWN, 19: UNKNOWN, 20: UNKNOWN, 21: UNKNOWN}
_REASONS |= {62: OTHER_NAME, 64: OTHER_NAME}  # numbers of OpenSSL's verification errors
_MARK = b"-----BEGIN CERTIFICATE-----"


def untrusted(reason: str) -> S3Failure:
    """The failure of a request that was not sent since the server is not trusted, for one of the reasons of this module."""
    detail = _WORDS.get(reason, f"its certificate is refused: {reason}")
    return S3Failure(0, sent=False, detail=detail, untrusted=True)


def read_ca_bundle(path: str) -> bytes:
    """The certificates of a PEM file; ConfigurationError: it cannot be read, or holds none."""
    try:
        data = read_regular(Path(path).expanduser())
    except OSError as error:
        raise ConfigurationError(
            f"the CA bundle cannot be read: {error.strerror or error} ({path})"
        ) from error
    if _MARK not in data:
        raise ConfigurationError(f"the CA bundle has no certificate in PEM form ({path})")
    return data


def tls_refusal(error: BaseException) -> str:
    """Why TLS failed: OpenSSL's own error lies somewhere below."""
    below: BaseException | None = error
    while below is not None:
        for one in (below, *(arg for arg in below.args if isinstance(arg, BaseException))):
            if (
                type(one).__name__ == "CertificateError"
            ):  # of urllib3, which compares the names itself
                return OTHER_NAME
            if isinstance(one, ssl.SSLCertVerificationError):
                return _REASONS.get(one.verify_code, one.verify_message)
        below = below.__cause__ or below.__context__
    return NO_TLS if "WRONG_VERSION_NUMBER" in str(error) else type(error).__name__
