"""What ``S3Store`` needs of a client library: one request per call, and failures as data.

``backends.s3_obstore`` is the fast one; ``backends.s3_control`` signs headers that it cannot.
"""

from __future__ import annotations

import re
import ssl
from contextlib import contextmanager
from datetime import datetime
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from backends.errors import (
    ARCHIVED,
    CLOCK,
    ENCRYPTION,
    FAILING,
    FULL,
    PERMISSION,
    SETTINGS,
    BackendError,
    ConfigurationError,
    InvalidKeyError,
    InvalidRangeError,
    ObjectNotFoundError,
    PermissionDeniedError,
    RefusedError,
    StoreFullError,
    UnavailableError,
    UnknownOutcomeError,
    UnreachableError,
    UnsupportedError,
    UntrustedError,
)
from backends.local_files import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from backends.base import Chunk, ObjectInfo

# -- answers -------------------------------------------------------------------------------------
#
# What an S3 server's refusals mean: one table by error code, with our class, the reason, and what to do.
#
# Decided by status and code, and by what stands in elements of the answer; never by wording. The question that matters for
# a write is whether anything may have been stored: only an answer that says no, or a connection that never came about, says
# so for certain (I7). Of all rows here nothing was stored, and what the tier holds is as it was.


class Refusal(NamedTuple):
    """What a refusal means."""

    kind: type[BackendError]  # our error
    reason: str  # one word for metrics and health; empty: that of the class
    what: str  # follows the server's name in a message; empty: "answered"
    do: str  # what to do about it; empty: what is done about any store that cannot be reached


_SILENT: Final = "did not answer"
_PASSES: Final = "it is tried again; if it persists, check the server"
_KEYS: Final = "check the access key, its secret, and the endpoint they are for"
_RENEW: Final = "renew the credentials"
_ACCOUNT: Final = "ask the store's operators about the account"
_CLOCK: Final = "set this machine's clock (NTP)"
_KMS: Final = (
    "check the bucket's encryption key: it must exist in this region, be enabled, and allow these credentials"
    " kms:GenerateDataKey (to write) and kms:Decrypt (to read)"
)
_REGION: Final = "set the bucket's region (--region) or server (--endpoint-url)"
_NAME: Final = "check the bucket's name in the URL, and --path-style or --virtual-host"
_API: Final = "check that the endpoint is an S3 API that supports this (`tiered doctor` tries)"
_OTHER: Final = "check the endpoint's address, and any proxy, login page or balancer in front of it"

NO_SUCH_BUCKET: Final = "NoSuchBucket"
FOREIGN: Final = "NotS3"
"""Code of ours: what came is not an answer of an S3 server."""
CUT: Final = "CutListing"
"""Code of ours: a listing that says that it goes on, and not where."""

_DENIED: Final = (PermissionDeniedError, PERMISSION)
_SET_WRONG: Final = (RefusedError, SETTINGS)
_BAD_NAME: Final = (InvalidKeyError, SETTINGS, "")
_PASSING: Final = (UnavailableError, FAILING)
_SLOW: Final = Refusal(*_PASSING, "asks to slow down", _PASSES)

_MEANINGS: Final = (
    # Who we are
    ("AccessDenied", Refusal(*_DENIED, "", "check credentials and permissions (`tiered policy`)")),
    ("InvalidAccessKeyId", Refusal(*_DENIED, "does not know the access key", _KEYS)),
    ("SignatureDoesNotMatch", Refusal(
        *_DENIED, "says that the signature does not match",
        f"{_KEYS}; proxies that change host or headers break it too",
    )),
    ("ExpiredToken TokenRefreshRequired", Refusal(*_DENIED, "says that the credentials have expired", _RENEW)),
    ("InvalidToken", Refusal(*_DENIED, "does not accept the session token", _RENEW)),
    ("InvalidSecurity", Refusal(*_DENIED, "does not accept the credentials", _KEYS)),
    ("AccountProblem NotSignedUp InvalidPayer", Refusal(
        *_DENIED, "says that the account may not be used", _ACCOUNT
    )),
    ("AllAccessDisabled", Refusal(*_DENIED, "says that all access is switched off", _ACCOUNT)),
    # The time
    ("RequestTimeTooSkewed", Refusal(PermissionDeniedError, CLOCK, "says that this machine's clock is wrong", _CLOCK)),
    ("RequestExpired", Refusal(PermissionDeniedError, CLOCK, "says that the request came too late", _CLOCK)),
    # What it does with objects
    ("InvalidObjectState", Refusal(
        RefusedError, ARCHIVED, "has moved the object to an archive class",
        "restore it (RestoreObject); no lifecycle rule may move objects of the tier",
    )),
    ("KMS.ThrottlingException", Refusal(UnavailableError, ENCRYPTION, "is throttled by its key service", _PASSES)),
    ("InvalidEncryptionAlgorithmError", Refusal(RefusedError, ENCRYPTION, "does not support this encryption", _KMS)),
    ("KeyTooLongError", Refusal(*_BAD_NAME, "use a shorter prefix in the URL")),
    ("XMinioInvalidObjectName XMinioInvalidResourceName", Refusal(*_BAD_NAME, "use another prefix in the URL")),
    ("ObjectParentIsFile", Refusal(*_BAD_NAME, "use another prefix in the URL: an object has this name")),
    ("EntityTooLarge", Refusal(
        *_SET_WRONG, "does not accept an object of this size in one request", "use a smaller --bundle-size"
    )),
    ("InvalidStorageClass", Refusal(*_SET_WRONG, "has no such storage class", "remove the header")),
    # Room
    ("XMinioStorageFull InsufficientStorage", Refusal(StoreFullError, FULL, "", "make room")),
    ("XMinioAdminBucketQuotaExceeded QuotaExceeded", Refusal(
        StoreFullError, FULL, "", "make room, or raise the quota"
    )),
    # Where the bucket is
    (NO_SUCH_BUCKET, Refusal(
        ObjectNotFoundError, SETTINGS, "has no such bucket", "check the URL, or create the bucket"
    )),
    ("InvalidBucketName", Refusal(*_SET_WRONG, "does not accept the bucket's name", _NAME)),
    ("InvalidBucketState", Refusal(*_SET_WRONG, "has the bucket in a state that does not allow this", _API)),
    (
        "AuthorizationHeaderMalformed PermanentRedirect IllegalLocationConstraintException IllegalLocationConstraint",
        Refusal(*_SET_WRONG, "has the bucket in another region than the one set", _REGION),
    ),
    ("AuthorizationQueryParametersError", Refusal(*_SET_WRONG, "does not accept the signature's form", _REGION)),
    ("TemporaryRedirect", Refusal(*_PASSING, "is moving the bucket", _PASSES)),
    # What it can
    ("InvalidRequest InvalidArgument", Refusal(*_SET_WRONG, "does not accept the request", _API)),
    ("InvalidDigest", Refusal(*_SET_WRONG, "does not accept the checksum", _API)),
    ("MissingSecurityHeader", Refusal(*_SET_WRONG, "misses a header", _API)),
    ("MethodNotAllowed NotImplemented MissingContentLength", Refusal(
        UnsupportedError, SETTINGS, "does not do this", _API
    )),
    # What passes
    ("SlowDown SlowDownRead SlowDownWrite TooManyRequests", _SLOW),
    ("Throttling ThrottlingException RequestLimitExceeded BandwidthLimitExceeded", _SLOW),
    ("ServiceUnavailable OperationAborted ConditionalRequestConflict", Refusal(*_PASSING, "", _PASSES)),
    ("RequestTimeout", Refusal(*_PASSING, "waited in vain for the request's bytes", _PASSES)),
    ("IncompleteBody", Refusal(*_PASSING, "received only part of the request", _PASSES)),
    ("BadDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch", Refusal(
        *_PASSING, "received other bytes than were sent", _PASSES
    )),
    ("XMinioServerNotInitialized", Refusal(*_PASSING, "is starting", _PASSES)),
    (FOREIGN, Refusal(UnavailableError, SETTINGS, "answers, but not as an S3 server does", _OTHER)),
    (CUT, Refusal(*_PASSING, "returns incomplete listings", _OTHER)),
)  # fmt: skip
"""Codes, and what they mean."""
_BY_CODE: Final = {code: meaning for codes, meaning in _MEANINGS for code in codes.split()}
_KMS_ANSWER: Final = Refusal(RefusedError, ENCRYPTION, "cannot use the encryption key", _KMS)
_EXPIRED: Final = _BY_CODE["RequestExpired"]
_BY_STATUS: Final[Mapping[int, Refusal]] = {
    301: _BY_CODE["PermanentRedirect"],
    307: _BY_CODE["TemporaryRedirect"],
    308: _BY_CODE["PermanentRedirect"],
    401: Refusal(PermissionDeniedError, PERMISSION, "", _KEYS),
    403: _BY_CODE["AccessDenied"],
    404: Refusal(ObjectNotFoundError, "", "", "check the URL"),
    405: _BY_CODE["MethodNotAllowed"],
    407: Refusal(PermissionDeniedError, PERMISSION, "is behind a proxy that wants credentials", "check the proxy"),
    411: _BY_CODE["MissingContentLength"],
    413: _BY_CODE["EntityTooLarge"],
    416: Refusal(InvalidRangeError, "", "", ""),
    429: _BY_CODE["SlowDown"],
    501: _BY_CODE["NotImplemented"],
    507: _BY_CODE["InsufficientStorage"],
}  # fmt: skip
_REST: Final = Refusal(RefusedError, SETTINGS, "", _API)
_REFUSALS: Final = frozenset({401, 403, 405, 407})
_FIRST_SERVER_FAULT: Final = 500
_REQUEST_TIMEOUT: Final = 408
_MESSAGE_CHARS_MAX: Final = 200
ELEMENTS: Final = ("Message", "Region", "RequestTime", "ServerTime", "Expires")
"""What is read of an answer besides its code."""
_ELEMENT: Final = re.compile(rf"<({'|'.join(ELEMENTS)})>([^<]*)</\1>")


def answer_for(status: int, code: str, facts: Mapping[str, str], *, write: bool) -> Refusal:
    """What a refusal means, of an HTTP status (0: no answer came) and a code of S3 or ours ("": there was none).

    ``write``: whether the request may have changed something.
    """
    if code.startswith("KMS.") and code not in _BY_CODE:
        return _KMS_ANSWER
    if code == "AccessDenied" and "Expires" in facts:
        return _EXPIRED
    if code == FOREIGN and write:
        return _BY_CODE[FOREIGN]._replace(
            kind=UnknownOutcomeError
        )  # who knows who has passed it on
    if code == FOREIGN and status in _REFUSALS:
        return _BY_CODE[FOREIGN]._replace(kind=RefusedError)
    found = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if found is not None:
        return found
    if status >= _FIRST_SERVER_FAULT or status in {0, _REQUEST_TIMEOUT}:
        kind = UnknownOutcomeError if write else UnavailableError
        return Refusal(kind, FAILING, "", _PASSES) if status else Refusal(kind, "", _SILENT, "")
    return _REST


def elements_of(text: str) -> dict[str, str]:
    """What an answer's text says in ``ELEMENTS``, fit to be shown."""
    return {
        name: "".join(char for char in unescape(value) if char.isprintable())[:_MESSAGE_CHARS_MAX]
        for name, value in _ELEMENT.findall(text)
    }


def particulars(answer: Refusal, facts: Mapping[str, str]) -> str:
    """What the answer says in numbers or names: how far the clock is off, or which region is meant."""
    if answer.reason == CLOCK and (times := _times(facts)) is not None:
        ours, theirs = times
        skew_s = (ours - theirs).total_seconds()
        way = "ahead of" if skew_s > 0 else "behind"
        both = f"{ours:%Y-%m-%dT%H:%M:%SZ} here, {theirs:%Y-%m-%dT%H:%M:%SZ} there"
        return f" by {abs(skew_s):.0f} s, {way} the store's ({both})"
    if region := facts.get("Region"):
        return f", {region}"
    return ""


def _times(facts: Mapping[str, str]) -> tuple[datetime, datetime] | None:
    """The time by our clock and by the server's, where it tells both."""
    ours, theirs = (_time(facts.get(name, "")) for name in ("RequestTime", "ServerTime"))
    return None if ours is None or theirs is None else (ours, theirs)


def _time(text: str) -> datetime | None:
    for form in ("%Y%m%dT%H%M%S%z", "%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S.%f%z"):
        try:
            return datetime.strptime(text, form)  # noqa: DTZ007 (each form has a zone)
        except ValueError:
            continue
    return None


def rows() -> list[tuple[str, Refusal]]:
    """The table, for documentation: code or status, and what it means."""
    by_status = [(str(status), answer) for status, answer in _BY_STATUS.items()]
    return [*_BY_CODE.items(), ("KMS.*", _KMS_ANSWER), *by_status]


# -- the wire --------------------------------------------------------------------------------------


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
        self.facts = facts or {}  # elements of the answer (``backends.s3_wire.ELEMENTS``)

    def __str__(self) -> str:
        answer = f"{self.status} {self.code}".strip() if self.status else ""
        return ": ".join(filter(None, [answer, self.detail])) or "no answer"


_CODE = re.compile(r"<Code>([\w.]+)</Code>")


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
# From an answer of an S3 server to one of our errors; what each means stands in the table above.

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
