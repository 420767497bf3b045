"""From an answer of an S3 server to one of our errors. Decided by status and code, never by text.

The question that matters for a write is whether anything may have been stored: only an answer that
says no, or a connection that never came about, says so for certain (I7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.errors import (
    BackendError,
    InvalidKeyError,
    InvalidRangeError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StoreFullError,
    UnavailableError,
    UnknownOutcomeError,
    UnreachableError,
    UnsupportedError,
    UntrustedError,
)
from backends.s3_wire import NO_CREDENTIALS

if TYPE_CHECKING:
    from backends.s3_wire import S3Failure

_BY_CODE: dict[str, type[BackendError]] = {
    "NoSuchBucket": ObjectNotFoundError,
    "KeyTooLongError": InvalidKeyError,
    "XMinioInvalidObjectName": InvalidKeyError,
    "XMinioInvalidResourceName": InvalidKeyError,
    "ObjectParentIsFile": InvalidKeyError,
    "ExpiredToken": PermissionDeniedError,
    "InvalidToken": PermissionDeniedError,
    "XMinioStorageFull": StoreFullError,
    "XMinioAdminBucketQuotaExceeded": StoreFullError,
    "QuotaExceeded": StoreFullError,
    # Nothing was stored in these cases, and the next try may do better.
    "SlowDown": UnavailableError,
    "SlowDownRead": UnavailableError,
    "ServiceUnavailable": UnavailableError,
    "Throttling": UnavailableError,
    "TooManyRequests": UnavailableError,
    "OperationAborted": UnavailableError,
    "ConditionalRequestConflict": UnavailableError,
    "RequestTimeout": UnavailableError,
    "IncompleteBody": UnavailableError,
    "BadDigest": UnavailableError,
    "XAmzContentChecksumMismatch": UnavailableError,
    "XAmzContentSHA256Mismatch": UnavailableError,
    "XMinioServerNotInitialized": UnavailableError,
}
_BY_STATUS: dict[int, type[BackendError]] = {
    401: PermissionDeniedError,
    403: PermissionDeniedError,
    404: ObjectNotFoundError,
    405: UnsupportedError,
    411: UnsupportedError,
    416: InvalidRangeError,
    429: UnavailableError,
    501: UnsupportedError,
    507: StoreFullError,
}
_WRONG_REGION_CODES = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "IllegalLocationConstraint",
}
_DENIED_CODES = {"AccessDenied", "AllAccessDisabled", ""}
"""With a 403. An answer to HEAD has no code."""
PUT, GET, LIST, DELETE = "s3:PutObject", "s3:GetObject", "s3:ListBucket", "s3:DeleteObject"
RULES = "s3:GetBucketVersioning and s3:GetLifecycleConfiguration"
_VERBS = {
    PUT: "put an object",
    GET: "read an object",
    LIST: "list the bucket",
    DELETE: "delete an object",
    RULES: "tell the bucket's rules",
}
_FORBIDDEN = 403
_FIRST_SERVER_FAULT = 500
_REQUEST_TIMEOUT = 408


def to_error(
    failure: S3Failure, *, write: bool, where: str, endpoint: str, permission: str = ""
) -> BackendError:
    """Our error for a failure.

    Args:
        failure: What the client library saw.
        write: Whether the request may have changed something.
        where: URL and key, for the message.
        endpoint: Address of the server, for the message.
        permission: What the request needs, as policies name it (``s3:PutObject``), for the message.
    """
    if failure.code == "NoSuchBucket":
        return ObjectNotFoundError(f"no such bucket: {where} at {endpoint}")
    kind = _kind(failure, write=write)
    if kind is PermissionDeniedError:
        return kind(f"{endpoint} refuses {_refused(failure, permission)}: {failure} ({where})")
    if kind is ObjectNotFoundError:
        return kind(f"no such object: {where}")
    if kind is InvalidRangeError:
        return kind(f"range begins behind the end: {where}")
    if failure.code == NO_CREDENTIALS:
        return PermissionDeniedError(f"no credentials for {endpoint}: {failure.detail} ({where})")
    if failure.untrusted:
        return UntrustedError(f"{endpoint} is not trusted: {failure} ({where})")
    if not failure.sent:
        return kind(f"cannot reach {endpoint}: {failure} ({where})")
    if kind is BackendError and _is_redirect(failure):
        return kind(f"bucket is in another region than the one set: {failure} ({where})")
    return kind(f"{endpoint} answered {failure} ({where})")


def _refused(failure: S3Failure, permission: str) -> str:
    """What it is that the server does not accept: a right that is missing, or who we say we are."""
    if failure.status == _FORBIDDEN and failure.code in _DENIED_CODES and permission:
        verb = _VERBS[permission]
        return f"to {verb}, for which these credentials need the permission {permission}"
    return "these credentials"


def _kind(failure: S3Failure, *, write: bool) -> type[BackendError]:
    if not failure.sent:
        return UnreachableError
    known = _BY_CODE.get(failure.code) or _BY_STATUS.get(failure.status)
    if known is not None:
        return known
    if failure.status >= _FIRST_SERVER_FAULT or failure.status in {0, _REQUEST_TIMEOUT}:
        return UnknownOutcomeError if write else UnavailableError
    return BackendError


def _is_redirect(failure: S3Failure) -> bool:
    return failure.status in {301, 307, 308} or failure.code in _WRONG_REGION_CODES
