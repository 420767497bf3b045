"""What an object store can answer besides success. Classes decide, never message texts.

Every foreign exception is mapped to one of these at one boundary per backend, with ``raise ... from``.
"""

from __future__ import annotations

PERMISSION, FULL, TRUST, UNREACHABLE, FAILING = (
    "permission", "full", "trust", "unreachable", "failing",
)  # fmt: skip
CLOCK, ENCRYPTION, ARCHIVED, SETTINGS = "clock", "encryption", "archived", "settings"
REASONS = (PERMISSION, CLOCK, ENCRYPTION, ARCHIVED, SETTINGS, FULL, TRUST, UNREACHABLE, FAILING)
"""Why a store does not do what it is asked, in a word each."""


class BackendError(Exception):
    """Anything that an object store could not do."""

    reason = ""  # one of ``REASONS``; empty for an answer like any other (exists, not found)
    do = ""  # what to do about it, where that is known; empty: it is not
    retriable = False  # whether the same request may succeed later without anybody doing anything
    needs_a_person = False
    """Whether it can succeed only when somebody has mended something: credentials, room, a certificate. Such an
    error meets every request, so the watcher of the whole store tells of it, once, with what to do."""


class ObjectNotFoundError(BackendError, FileNotFoundError):
    """No object has this key (or the bucket, folder or container does not exist; the message says which)."""


class AlreadyExistsError(BackendError, FileExistsError):
    """A put-if-absent met an object. It may be one of our own, from a try whose answer was lost."""


class PreconditionFailedError(BackendError):
    """A compare-and-set met another version than it expected, or none."""


class RefusedError(BackendError):
    """The store refuses this request from anybody until something has been changed. Nothing was done."""

    reason = SETTINGS
    needs_a_person = True


class PermissionDeniedError(BackendError, PermissionError):
    """The store refuses these credentials or this operation. Not retriable."""

    reason = PERMISSION
    needs_a_person = True


class StoreFullError(BackendError):
    """No space, no inodes, or over quota. A person must make room; then the same request succeeds."""

    reason = FULL
    retriable = True
    needs_a_person = True


class UnavailableError(BackendError):
    """The store did not carry out the request (refused connection, throttled, 5xx before anything was done)."""

    reason = FAILING
    retriable = True


class UnreachableError(UnavailableError):
    """No connection came about: nobody listens, or the name is unknown. Nothing was sent."""

    reason = UNREACHABLE


class UntrustedError(BackendError):
    """The server's certificate is not accepted, so nothing was sent. Trying again does not help by itself."""

    reason = TRUST
    needs_a_person = True


class UnknownOutcomeError(UnavailableError):
    """A write timed out or its connection broke: it may have happened, and may still happen later (I7)."""


class InvalidKeyError(BackendError, ValueError):
    """The key breaks a rule of ``backends.base.check_key``."""


class InvalidRangeError(BackendError, ValueError):
    """The range begins at or behind the end of the object, or is empty or negative."""


class ShortReadError(BackendError):
    """The object ends inside the range that was asked for."""


class UnsupportedError(BackendError):
    """This backend cannot do this (its capabilities say so)."""


class ForkedError(BackendError):
    """This process was forked off the one that opened the store: it has neither its threads nor its connections."""


class ConfigurationError(BackendError, ValueError):
    """The URL or an option names nothing that can be opened. Nothing was tried on the network."""


def web_advice(url: str) -> str:
    """What to do about a web address that is not a tier: mostly that of an S3 server; empty for other URLs."""
    if not url.startswith(("http://", "https://")):
        return ""
    return "give the tier as s3://bucket/prefix, and the address of an S3 server as --endpoint-url"
