"""Least-privilege S3 policies: what each role needs, said once; a policy document for a bucket and prefix made of it.

``ROLES`` is the description. ``policy`` is a pure function from it, a role and a place to an IAM policy document, which
AWS and MinIO take alike. The tests run each role's commands on a server that enforces the documents, and try what they
refuse.

The patterns of keys follow ``tiered.keys``. When the broker is not named, ``*`` stands for it; since ``*`` also covers
slashes, a topic that is itself called ``journal`` or ``ledger`` then lies within what a reclaimer may put, and the journal
of a mount within what a writer or a reclaimer may. Naming cluster and broker makes the patterns exact.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from backends.errors import ConfigurationError
from backends.lazy_dataclass import dataclass
from backends.registry import PREFIX as PROBE
from backends.registry import redacted
from backends.s3_settings import split_location
from tiered.errors import InvalidError
from tiered.keys import (
    BUNDLE,
    DATA_ROOTS,
    HANDOVER,
    JOURNAL,
    LEASE,
    LEDGER,
    MEMBERS,
    MIRROR,
    MOUNT,
    QUEUE,
    TIMER,
    TOPIC,
    broker_prefix,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

WRITER, READER, ARCHIVER, RECLAIMER = "writer", "reader", "archiver", "reclaimer"
ERASER, MOUNTER, TIMEKEEPER = "eraser", "mounter", "timekeeper"
LIST, GET, PUT, DELETE = "s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"
VERSIONING, VERSIONS = "s3:GetBucketVersioning", "s3:ListBucketVersions"
DELETE_VERSION = "s3:DeleteObjectVersion"
_MULTIPART = ("s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")
_KEY = re.compile(
    r"arn:aws[a-z-]*:kms:([a-z0-9-]+|REGION):(\d+|ACCOUNT):(key|alias)/[A-Za-z0-9/_-]+"
)
"""With words in capitals it is a pattern for who fills them in."""
_UNFIT = frozenset("*?$")
"""Characters that mean something else in a policy."""
_DATA = tuple(f"{root}*" for root in DATA_ROOTS)
_CHECKPOINTS = f"{MIRROR}{JOURNAL}*"
_KEPT = (f"{JOURNAL}*", _CHECKPOINTS, LEASE, f"{LEDGER}*")
_REWRITTEN = tuple(f"{root}*" for root in (BUNDLE, TOPIC, QUEUE))
_GONE = (f"{JOURNAL}*", _CHECKPOINTS, *_DATA, f"{LEDGER}*")


def _with_timers(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Patterns for a broker's topics and, likewise, for its timers."""
    return *patterns, *(TIMER + pattern for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Role:
    """What somebody may do with a tier, besides listing and reading all of it."""

    help: str  # which commands it is for
    puts: tuple[str, ...] = ()
    """Patterns of keys below the broker's prefix that it creates or replaces."""
    deletes: tuple[str, ...] = ()  # patterns of keys below the broker's prefix that it deletes
    roots: tuple[str, ...] = ()
    """Patterns of keys at the URL itself that it creates, replaces and deletes, unless one broker is meant."""
    probes: bool = False
    """Whether it writes and deletes the small objects by which a store is probed."""
    archives: bool = False  # whether it writes to an archive too
    versions: bool | None = None
    """Whether it deletes what a bucket with versioning keeps of deleted objects; None: it does not even ask."""


ROLES: Mapping[str, Role] = {
    WRITER: Role(
        "attach, verify --repair, rebuild, lease --break, doctor",
        puts=(f"{JOURNAL}*", _CHECKPOINTS, LEASE, f"{HANDOVER}*", *_DATA, f"{TIMER}*"),
        probes=True,
    ),
    READER: Role("status, ls, cat, verify, lease, and doctor without its probe"),
    ARCHIVER: Role("what reads the tier and writes Parquet elsewhere", archives=True),
    RECLAIMER: Role(
        "expire, gc, delete-topic, truncation, pause, resume, lease --break",
        puts=_with_timers(_KEPT),
        deletes=_with_timers(_GONE),
        versions=False,
    ),
    ERASER: Role(
        "gc --erase, which writes anew what others share with what was given up",
        puts=_with_timers((*_KEPT, *_REWRITTEN)),
        deletes=_with_timers(_GONE),
        probes=True,
        versions=True,
    ),
    TIMEKEEPER: Role("timer import, timer run, timer cancel", puts=(f"{TIMER}*",), probes=True),
    MOUNTER: Role(
        "mount, hand-back", puts=(f"{MOUNT}*",), deletes=(f"{MOUNT}*",), roots=(f"{MEMBERS}*",)
    ),
}


@dataclass(frozen=True, slots=True)
class Grounds:
    """What a policy is for."""

    url: str  # of the tier, ``s3://bucket/prefix``
    archive: str | None = None  # URL of the archive, for the archiver; else None
    cluster: str | None = None
    """Of the only broker that is meant, with ``broker``; None: every broker below the URL."""
    broker: str | None = None  # the same
    kms_key: str | None = None  # ARN of the key by which the server encrypts, when one is named
    region: str | None = None  # tells the partition of AWS; None: the usual one


def policy(role: str, grounds: Grounds) -> dict[str, Any]:
    """The policy document of a role.

    Raises:
        InvalidError: A URL or key that no policy can name, or one that is missing or of no use.
    """
    found, arn = ROLES[role], f"arn:{_partition(grounds.region)}:s3:::"
    bucket, prefix = _place(grounds.url)
    broker = _broker(grounds)
    statements = [*_reading(arn, bucket, prefix, "Tier")]
    roots = [prefix + pattern for pattern in found.roots if grounds.broker is None]
    puts = [prefix + broker + pattern for pattern in found.puts] + roots
    deletes = [prefix + broker + pattern for pattern in found.deletes] + roots
    if found.probes:
        puts.append(f"{prefix}{PROBE}*")
        deletes.append(f"{prefix}{PROBE}*")
    for name, action, keys in (("Put", PUT, puts), ("Delete", DELETE, deletes)):
        if keys:
            statements.append(_allow(name, [action], [f"{arn}{bucket}/{key}" for key in keys]))
    erased = [f"{arn}{bucket}/{prefix}{broker}{root}" for root in _with_timers(_DATA)]
    statements += _versions(found, arn + bucket, prefix, erased)
    statements += _archive(found, grounds, arn)
    statements += _key(found, grounds.kms_key)
    return {"Version": "2012-10-17", "Statement": statements}


def _reading(arn: str, bucket: str, prefix: str, name: str) -> list[dict[str, Any]]:
    listing = _allow(f"List{name}", [LIST], [arn + bucket])
    if prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": [f"{prefix}*"]}}
    return [listing, _allow(f"Read{name}", [GET], [f"{arn}{bucket}/{prefix}*"])]


def _versions(role: Role, bucket: str, prefix: str, erased: list[str]) -> list[dict[str, Any]]:
    """To ask whether the bucket keeps old versions, to list them, and to delete those of data."""
    if role.versions is None:
        return []
    asking = [_allow("AskVersioning", [VERSIONING], [bucket])]
    if not role.versions:
        return asking
    listing = _allow("ListVersions", [VERSIONS], [bucket])
    if prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": [f"{prefix}*"]}}
    return [*asking, listing, _allow("EraseVersions", [DELETE_VERSION], erased)]


def _archive(role: Role, grounds: Grounds, arn: str) -> list[dict[str, Any]]:
    if not role.archives:
        if grounds.archive is not None:
            raise InvalidError("only an archiver writes to an archive", do="leave --archive out")
        return []
    if grounds.archive is None:
        raise InvalidError("an archiver needs a place to write to", do="give --archive URL")
    bucket, prefix = _place(grounds.archive)
    tier_bucket, tier_prefix = _place(grounds.url)
    if bucket == tier_bucket and (prefix.startswith(tier_prefix) or tier_prefix.startswith(prefix)):
        raise InvalidError(
            "tier and archive overlap, so an archiver could write into the tier",
            where=redacted(grounds.archive),
            do="choose prefixes of which neither lies in the other",
        )
    writing = _allow("WriteArchive", [PUT, *_MULTIPART], [f"{arn}{bucket}/{prefix}*"])
    probing = _allow("ProbeArchive", [DELETE], [f"{arn}{bucket}/{prefix}_probe/*"])
    return [*_reading(arn, bucket, prefix, "Archive"), writing, probing]


def _key(role: Role, kms_key: str | None) -> list[dict[str, Any]]:
    if kms_key is None:
        return []
    if not _KEY.fullmatch(kms_key):
        raise InvalidError(
            f"a policy names a key by its ARN, not as {kms_key!r}",
            where="--sse-kms-key-id",
            do="give arn:aws:kms:REGION:ACCOUNT:key/ID",
        )
    writes = bool(role.puts) or role.archives
    return [_allow("Key", ["kms:Decrypt", *["kms:GenerateDataKey"] * writes], [kms_key])]


def _allow(name: str, actions: list[str], resources: list[str]) -> dict[str, Any]:
    return {"Sid": name, "Effect": "Allow", "Action": actions, "Resource": resources}


def _place(url: str) -> tuple[str, str]:
    """Bucket, and prefix with its slash."""
    scheme, separator, location = url.partition("://")
    if not separator or scheme.lower() not in {"s3", "s3a"}:
        raise InvalidError(
            "policies are for S3", where=redacted(url), do="give a URL like s3://bucket/prefix"
        )
    try:
        bucket, prefix = split_location(location.rstrip("/"))
    except ConfigurationError as error:
        raise InvalidError(str(error)) from error
    if _UNFIT.intersection(prefix):
        raise InvalidError(
            "a prefix with *, ? or $ has another meaning in a policy",
            where=redacted(url),
            do="choose another prefix",
        )
    return bucket, f"{prefix}/" if prefix else ""


def _broker(grounds: Grounds) -> str:
    """Prefix of the broker, or a pattern for all of them."""
    if grounds.cluster is None and grounds.broker is None:
        return "*/"
    if grounds.cluster is None or grounds.broker is None:
        raise InvalidError("one broker is named by both --cluster and --broker", do="give both")
    return broker_prefix(grounds.cluster, grounds.broker)


def _partition(region: str | None) -> str:
    if region is not None and region.startswith("cn-"):
        return "aws-cn"
    return "aws-us-gov" if region is not None and region.startswith("us-gov-") else "aws"
