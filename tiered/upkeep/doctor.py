"""Doctor: what a new user gets wrong, looked for one thing after another, each with what to do about it.

Every check has a stable name, which scripts may rely on. What does not apply (a bucket's rules on a folder) is left out.
Writing is tried only below ``probe-…``, with random names, and cleaned up; where, ``trial_store`` decides.
When the store cannot be reached, nothing else of it is asked.

Retries and errors: the store's. An error of a check is its result; none ends the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import shutil
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from backends.base import foreign_below
from backends.errors import (
    CLOCK,
    PERMISSION,
    BackendError,
    ConfigurationError,
    PermissionDeniedError,
    UnreachableError,
)
from backends.lazy_dataclass import dataclass
from backends.local import HIDDEN, LocalFolderStore
from backends.registry import PREFIX, folder_of, probe, redacted
from backends.s3_control import plain_http_host, read_object_lock, read_rules
from backends.s3_settings import split_location
from backends.wrapping import put_own
from tiered.api.broker_place import TIMER_SIGNS, TimerPlace, find_places, timers_of
from tiered.errors import DataError, InvalidError, TieredStoreError
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
from tiered.log.verify import is_known_key
from tiered.packages import OURS, shared_with
from tiered.upkeep.status import bills_requests, dearest, rate_document, rate_text, read_rate
from tiered.upkeep.workplace import EXPIRED, GONE, UNREADABLE, report_lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from backends.base import ObjectStore
    from backends.s3_settings import S3Options
    from tiered.api.broker_place import Place
    from tiered.clock import Clock
    from tiered.local.interface import LocalStore

OK, WARN, FAIL = "ok", "warn", "fail"
REACHABILITY = "reachability"
_SKEW_WARN_MS = 5_000
_SKEW_FAIL_MS = 600_000
"""Signatures of S3 are refused beyond 15 minutes."""
_FREE_WARN, _FREE_FAIL = 0.05, 0.01
_FILES_MIN = 1024
_LOOKED_AT_MAX = 20_000
"""Of a broker's objects, for names of others: `verify` looks at all, which a large tier makes long."""
_NAMED_MAX = 5
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str  # stable
    status: str  # ``ok``, ``warn`` or ``fail``
    detail: str  # what was found
    advice: str = ""  # what to do; empty when there is nothing to do


def _judged(name: str, wrong: str, advice: str, well: str, status: str = WARN) -> Check:
    """What is wrong and what to do about it; or, where that is nothing, that all is well."""
    return Check(name, status, wrong, advice) if wrong else Check(name, OK, well)


def examine(
    url: str,
    store: ObjectStore,
    options: S3Options,
    *,
    clock: Clock,
    probe_id: str | None,
    trial: ObjectStore | None = None,
    open_local: Callable[[], LocalStore] | None = None,
) -> Iterator[Check]:
    """Look at everything, in order.

    Args:
        probe_id: Names the probes that are written; None: nothing is written, and what only writing shows is left out.
        trial: Where they are written (``trial_store``); None: in the store itself.
        open_local: Opens the local store, which is closed again; None: there is none to look at.
    """
    reached = _reachability(store)
    yield from reached
    if reached[0].status != FAIL:
        if probe_id is not None:
            yield from _rights(trial or store, clock, probe_id)
        yield from _surroundings(url, options)
        yield from _tier(store, clock)
        if bills_requests(url):
            yield _freshness()
    if open_local is not None:
        yield _local(open_local)
    yield _packages()
    yield from _machine()


def _reachability(store: ObjectStore) -> list[Check]:
    """Whether it answers; and the clock, where that is why it refuses."""
    try:
        found = next(iter(store.list("")), None)
    except BackendError as error:
        general = "check URL, endpoint and network; make the bucket or folder"
        if isinstance(error, PermissionDeniedError):
            general = "check the credentials, and that they may list the bucket"
        elif isinstance(error, ConfigurationError):
            general = "correct the URL or the settings"
        elif isinstance(error, UnreachableError):
            general = "see whether it runs, and check endpoint and network"
        failed = Check(REACHABILITY, FAIL, str(error), error.do or general)
        is_skewed = error.reason == CLOCK
        return [failed, *([Check("clock", FAIL, str(error), error.do)] if is_skewed else [])]
    return [Check(REACHABILITY, OK, f"{store.url} answers" + ("" if found else ", and is empty"))]


# -- rights, conditions, clock ------------------------------------------------------------------


def _rights(store: ObjectStore, clock: Clock, probe_id: str) -> Iterator[Check]:
    key = f"{PREFIX}{probe_id}-right"
    is_written = False
    try:
        for name, step in (
            ("put", lambda: put_own(store, key, b"probe")),
            ("get", lambda: store.get(key)),
            ("delete", lambda: store.delete(key)),
        ):
            before_ms = clock.now_ms()
            check = _right(name, step)
            if name == "get" and check.status == OK:
                yield from _skew(store, key, before_ms, clock)
            yield check
            is_written = is_written or (name == "put" and check.status == OK)
            if not is_written:
                advice = "reading needs none; `attach` cannot write here"
                yield Check("conditional_writes", WARN, "not tried: nothing can be written", advice)
                return
        yield _conditions(store, probe_id)
    finally:
        if is_written:
            with suppress(BackendError):
                store.delete(key)


def _right(name: str, step: Callable[[], object]) -> Check:
    advice = {
        "put": "reading needs no right to put; for `attach` allow s3:PutObject",
        "get": "allow s3:GetObject",
        "delete": "needed by `gc` only; allow s3:DeleteObject for those who run it",
    }[name]
    try:
        step()
    except BackendError as error:
        is_about_rights = error.reason in {"", PERMISSION}
        failed = name == "get" or not is_about_rights
        advice = advice if is_about_rights else error.do or advice
        return Check(f"may_{name}", FAIL if failed else WARN, str(error), advice)
    return Check(f"may_{name}", OK, "allowed")


def _skew(store: ObjectStore, key: str, before_ms: int, clock: Clock) -> Iterator[Check]:
    """The probe object's time against ours. Servers tell whole seconds."""
    try:
        modified_ms = store.head(key).modified_ms
    except BackendError:
        return
    if modified_ms < 0:
        return
    skew_ms = max(before_ms - 2000 - modified_ms, modified_ms - clock.now_ms() - 1000, 0)
    detail = f"{skew_ms / 1000:.0f} s between this clock and the store's"
    advice = "set the clock (NTP): leases last seconds, and S3 refuses what is 15 minutes off"
    wrong = detail * (skew_ms >= _SKEW_WARN_MS)
    status = FAIL if skew_ms >= _SKEW_FAIL_MS else WARN
    yield _judged("clock", wrong, advice, "agrees with the store's", status)


def _conditions(store: ObjectStore, probe_id: str) -> Check:
    name = "conditional_writes"
    advice = "use AWS S3, MinIO, versitygw, LocalStack, or a local folder to `attach` to"
    try:
        found = probe(store, probe_id)
    except BackendError as error:
        return Check(name, FAIL, str(error), error.do or advice)
    if found.put_if_absent and found.compare_and_set:
        detail = "put-if-absent and compare-and-set are honoured"
        if not found.distinguishes_case:
            detail += "; names that differ only in case are one here, so keys escape topics' capital letters"
        return Check(name, OK, detail)
    asked = {"put-if-absent": found.put_if_absent, "compare-and-set": found.compare_and_set}
    missing = [text for text, can in asked.items() if not can]
    return Check(name, FAIL, f"{' and '.join(missing)} not honoured: no `attach`", advice)


# -- what surrounds the store -------------------------------------------------------------------


def _surroundings(url: str, options: S3Options) -> Iterator[Check]:
    folder = folder_of(url)
    if folder is not None:
        yield from _folder(str(folder))
    if url.startswith(("s3://", "s3a://")):
        yield from _bucket(url.partition("://")[2].rstrip("/"), options)


def _folder(path: str) -> Iterator[Check]:
    while path != "/" and not os.path.exists(path):  # noqa: PTH110 (a tier's folder may not be there yet)
        path = os.path.dirname(path)  # noqa: PTH120 (likewise)
    found = os.statvfs(path)
    advice = "make room: a full tier stops tiering, and local retention goes on"
    size = found.f_bavail * found.f_frsize
    for name, free, total, text in (
        ("free_space", found.f_bavail, found.f_blocks, f"{size:,} bytes"),
        ("free_inodes", found.f_favail, found.f_files, f"{found.f_favail:,} files"),
    ):
        share = free / total if total else 1.0  # some file systems count no inodes
        status = FAIL if share < _FREE_FAIL else WARN if share < _FREE_WARN else OK
        yield Check(name, status, f"room for {text}", advice if status != OK else "")


def _bucket(location: str, options: S3Options) -> Iterator[Check]:
    host = plain_http_host(location, options)
    wrong = f"messages go to {host} by plain http" if host and host not in _LOOPBACK else ""
    well = "plain http, on this machine" if host else "https"
    yield _judged("encryption", wrong, "use an https endpoint", well)
    yield _object_lock(location, options)
    try:
        rules = read_rules(location, options)
    except (BackendError, ConfigurationError) as error:
        detail = f"the bucket's rules cannot be read: {error}"
        yield Check("lifecycle", OK, detail, "look at them yourself, or allow reading them")
        return
    advice = "restrict the rule to other prefixes; `tiered expire` deletes by age, safely"
    well = "no rule deletes or moves what is in the tier"
    yield _judged("lifecycle", "; ".join(rules.harmful), advice, well, FAIL)
    wrong = "deleted objects stay as old versions, and cost" * (rules.versioning == "Enabled")
    advice = "expire noncurrent versions by a lifecycle rule; `tiered gc --erase` deletes those of messages"
    yield _judged("versioning", wrong, advice, "off")


def _object_lock(location: str, options: S3Options) -> Check:
    try:
        kept = read_object_lock(location, options)
    except (BackendError, ConfigurationError) as error:
        detail = f"the bucket does not say whether it locks objects: {error}"
        return Check("object_lock", OK, detail, "look at it yourself, or allow reading it")
    detail = f"Object Lock keeps each new object ({kept}): what is deleted stays as an old version until then"
    advice = "count it into the costs; what must be erased sooner belongs into a bucket without this rule"
    well = "no rule of Object Lock keeps new objects"
    return _judged("object_lock", detail if kept else "", advice, well)


# -- the tier, the local store, this machine ----------------------------------------------------


def _tier(store: ObjectStore, clock: Clock) -> Iterator[Check]:
    try:
        places = _places(store)
    except (BackendError, TieredStoreError) as error:
        yield Check("tier", FAIL, str(error), "see the other checks")
        return
    if not places:
        yield Check("tier", OK, "no tier here yet; `tiered attach` makes one")
    for place in places:
        try:
            yield from _broker(store, place, clock)
            yield _foreign(store, place)
        except (BackendError, TieredStoreError) as error:
            yield Check("tier", FAIL, f"{_name(place)}: {error}", "see the other checks")


def _places(store: ObjectStore) -> list[Place]:
    """Of brokers' topics, and of their timers, which have a journal and a lease of their own."""
    return [*find_places(store), *map(timers_of, find_places(store, TIMER_SIGNS))]


def _name(place: Place) -> str:
    timers = ", timers" if isinstance(place, TimerPlace) else ""
    return f"{place.cluster}/{place.broker}{timers}"


def _broker(store: ObjectStore, place: Place, clock: Clock) -> Iterator[Check]:
    name = _name(place)
    try:
        found = report_lease(store, place.prefix, clock)
    except DataError as error:
        option = " --timers" if isinstance(place, TimerPlace) else ""
        yield Check("journal", FAIL, f"{name}: {error.what}", f"run `tiered rebuild{option}`")
        return
    queues = len(found.state.queues)
    yield Check("journal", OK, f"{name}: epoch {found.state.epoch}, {queues} queues")
    words = {
        EXPIRED: "its writer went without giving it back",
        GONE: "its writer was killed",
        UNREADABLE: "it cannot be read",
    }
    wrong = f"{name}: {words[found.word]}" if found.word in words else ""
    advice = "start the writer again, if it should run; the next one takes the lease"
    yield _judged("lease", wrong, advice, f"{name}: {found.word}")
    if found.is_held:
        rate = read_rate(store, place.prefix, found.number, clock.now_ms())
        if (document := rate_document(rate)) is not None:
            said = rate_text(document, is_billed=bills_requests(store.url))
            yield Check("requests", OK, f"{name}: {said}")


def _freshness() -> Check:
    """What the greatest cost of tiering to S3 is, before it is met."""
    prices = ", ".join(f"${dearest(s).dollars:.0f} with {s} s" for s in (2, 10, 60))
    said = "requests of a writer cost at most so much a month, while bundles are not full"
    return Check("freshness", OK, f"{said}: {prices}")


def _foreign(store: ObjectStore, place: Place) -> Check:
    """What others have put among the tier's objects: it stops nothing, and nobody but its owner deletes it."""
    listed = [info.key for info in islice(store.list(place.prefix), _LOOKED_AT_MAX + 1)]
    looked = listed[:_LOOKED_AT_MAX]
    keys = [key for key in looked if not is_known_key(place.prefix, key)]
    found = sorted([*keys, *foreign_below(store, place.prefix)])
    is_cut = len(listed) > len(looked)
    among = f" among the first {len(looked):,} objects (`verify` looks at all)" if is_cut else ""
    if not found:
        return Check("foreign_keys", OK, f"{_name(place)}: none{among}")
    names = ", ".join(found[:_NAMED_MAX]) + (", …" if len(found) > _NAMED_MAX else "")
    detail = f"{_name(place)}: {len(found)} of others{among}, left alone: {names}"
    return Check("foreign_keys", WARN, detail, "give the tier a prefix of its own")


def _local(open_local: Callable[[], LocalStore]) -> Check:
    try:
        local = open_local()
        try:
            local.refresh()
            queues, report = local.queues(), local.report()
        finally:
            local.close()
    except (TieredStoreError, OSError) as error:
        return Check("local_store", FAIL, str(error), "give the broker's store directory, readable")
    messages = sum(bounds.end - bounds.min for bounds in queues.values())
    detail = f"{messages:,} messages in {len(queues)} queues"
    wrong = f"{detail}, {report.damaged_records} damaged records so far"
    advice = "they go to quarantine; look at the disk"
    return _judged("local_store", wrong if report.damaged_records else "", advice, detail)


def _packages() -> Check:
    """That those which are loaded are ours, each command has seen at its start."""
    others = shared_with()
    if not others:
        return Check("packages", OK, f"no other distribution has files of {OURS}'s packages")
    names = " ".join(other.split()[0] for other in others)
    advice = (
        f"install {OURS} in an environment of its own: removing {names} removes files of {OURS}'s"
    )
    detail = f"{', '.join(others)}: packages of the same names as {OURS}'s, in the same place"
    return Check("packages", WARN, detail, advice)


def _machine() -> Iterator[Check]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FILES_MIN
    advice = f"raise it to {_FILES_MIN} at least (ulimit -n)" if few else ""
    yield Check("open_files", WARN if few else OK, f"{soft} files may be open at once", advice)
    java = shutil.which("java")
    yield Check("java", OK, java or "not found; needed by Spark only")
    spark = importlib.util.find_spec("pyspark") is not None or shutil.which("spark-submit")
    yield Check("spark", OK, "found" if spark else "not found; needed for large archives only")


# --------------------------------------------------------------------------------------------------
# Doctor, before it looks: whether there is anything at the URL to look at, and where it may try out writing. Nothing
# is made where no tier is. A folder that is not there, and a place with other things in it, are most likely a wrong
# URL, and are refused unless the caller says that a tier is to be made there. An empty folder, or an empty prefix of a
# bucket, is what a new user has: it is looked at. In a folder without a tier writing is tried in a folder of its own,
# which is removed again; a crash in the middle leaves it behind, and the next run passes it by.
# --------------------------------------------------------------------------------------------------

SCRATCH = ".tiered-doctor-"
_NEW = "check the URL; if a tier is to be made here, give --new"


@contextlib.contextmanager
def trial_store(
    url: str, store: ObjectStore, probe_id: str, *, is_new: bool
) -> Iterator[ObjectStore]:
    """Where writing may be tried out: the store itself, or for a new tier in a folder, a folder that is removed again.

    Args:
        is_new: A tier is to be made there: the folder may be missing, and other things may lie in it.

    Raises:
        InvalidError: There is nothing at the URL, or there is something else.
    """
    folder = folder_of(url)
    if folder is not None and not folder.is_dir():
        _require_makeable(folder, is_new=is_new)
    try:
        is_tier = bool(_places(store))
        traces = (PREFIX, SCRATCH, HIDDEN)
        others = (i.key for i in store.list("") if not i.key.startswith(traces))
        other = None if is_tier else next(others, None)
    except BackendError:
        yield store  # it cannot be reached, which the first check says
        return
    if other is not None and not is_new:
        raise InvalidError(f"no tier is here, but {other} is", where=store.url, do=_NEW)
    if folder is None or is_tier:
        yield store
        return
    with _scratch(folder if folder.is_dir() else folder.parent, probe_id) as scratch:
        yield scratch


def _require_makeable(folder: Path, *, is_new: bool) -> None:
    """Refuse a folder that is not there, but for one that `attach` is to make in a folder that is."""
    if not is_new:
        raise InvalidError("there is no such folder", where=str(folder), do=_NEW)
    if not folder.parent.is_dir():
        raise InvalidError(
            "neither this folder nor the one above it is there",
            where=str(folder),
            do="check the URL, and that the disk is mounted",
        )


@contextlib.contextmanager
def _scratch(parent: Path, probe_id: str) -> Iterator[ObjectStore]:
    path = parent / f"{SCRATCH}{probe_id}"
    store = LocalFolderStore(path)
    try:
        yield store
    finally:
        store.close()
        shutil.rmtree(path, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# Least-privilege S3 policies: what each role needs, said once; a policy document for a bucket and prefix made of it.
#
# ``ROLES`` is the description. ``policy`` is a pure function from it, a role and a place to an IAM policy document,
# which AWS and MinIO take alike. The tests run each role's commands on a server that enforces the documents, and try
# what they refuse.
#
# The patterns of keys follow ``tiered.keys``. When the broker is not named, ``*`` stands for it; since ``*`` also
# covers slashes, a topic that is itself called ``journal`` or ``ledger`` then lies within what a reclaimer may put,
# and the journal of a mount within what a writer or a reclaimer may. Naming cluster and broker makes the patterns
# exact.
# --------------------------------------------------------------------------------------------------


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
    broker = _of_broker(grounds)
    statements = [*_reading(arn, bucket, prefix, "Tier")]
    roots = [prefix + pattern for pattern in found.roots if grounds.broker is None]
    puts = [prefix + broker + pattern for pattern in found.puts] + roots
    deletes = [prefix + broker + pattern for pattern in found.deletes] + roots
    if found.probes:
        puts.append(f"{prefix}{PREFIX}*")
        deletes.append(f"{prefix}{PREFIX}*")
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


def _of_broker(grounds: Grounds) -> str:
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
