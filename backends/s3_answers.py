"""What an S3 server's refusals mean: one table by error code, with our class, the reason, and what to do.

Decided by status and code, and by what stands in elements of the answer; never by wording. The question that matters for
a write is whether anything may have been stored: only an answer that says no, or a connection that never came about, says
so for certain (I7). Of all rows here nothing was stored, and what the tier holds is as it was.
"""

from __future__ import annotations

import re
from datetime import datetime
from html import unescape
from typing import TYPE_CHECKING, Final, NamedTuple

from backends.errors import (
    ARCHIVED,
    CLOCK,
    ENCRYPTION,
    FAILING,
    FULL,
    PERMISSION,
    SETTINGS,
    BackendError,
    InvalidKeyError,
    InvalidRangeError,
    ObjectNotFoundError,
    PermissionDeniedError,
    RefusedError,
    StoreFullError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


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
