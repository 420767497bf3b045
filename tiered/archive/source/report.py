"""What a read by the Spark sources would leave out, and by what, without Spark; and the files for readers of lists.

Both take a URL and the options of a source (docs/spark.md), with underscores in names as Python wants them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiered.api.stores import backend_errors
from tiered.archive.harm import prove_files
from tiered.archive.query.duck import local_root
from tiered.archive.selection import Selection, selection_of
from tiered.archive.source.options import (
    ARCHIVE,
    OF_TIER,
    READ,
    TierStates,
    kind_of,
    open_place,
    partition_bytes,
    require_known,
)
from tiered.archive.source.stretches import packed, plan_tier
from tiered.archive.tables import explain, files_by_topic, plan_files, read_archive

if TYPE_CHECKING:
    from backends.base import ObjectStore


# -- lists of files --------------------------------------------------------------------------------
#
# The exact files of an archive for readers that take a list of them, as Spark's own reader of Parquet does.
#
# Such readers do not look at our checksums, so each file is read whole and held against the log before it is
# named. What becomes of it between that and their own reading only the checksums of its pages tell, to readers
# that are to look at them (``parquet.page.verify-checksum.enabled`` of Hadoop).
#
# Spark reads a folder's files by itself, and those on S3 where ``s3a`` is set up (library and credentials are
# the user's to bring). Every row of a file that the log names counts; which of them are wanted is for the
# reader to say again.

_PATTERN = frozenset("{}[]*?\\")


def uri_of(archive: ObjectStore, key: str, *, scheme: str = "s3a") -> str:
    """A file as Hadoop names it, so that nothing in it is taken for a pattern.

    Args:
        archive: Where it lies.
        key: Which.
        scheme: By which Hadoop reaches S3.
    """
    root = local_root(archive)
    if root is not None:
        return "file://" + _escaped(root + key)
    kind, _, place = archive.url.partition("://")
    return f"{scheme if kind == 's3' else kind}://{_escaped(f'{place}/{key}')}"


def file_uris(
    archive: ObjectStore,
    wanted: Selection | None = None,
    *,
    scheme: str = "s3a",
    is_proved: bool = True,
) -> list[str]:
    """The files that may hold what is wanted, as ``spark.read.parquet(*uris)`` takes them.

    Args:
        archive: Of which.
        wanted: What; without it everything.
        scheme: See ``uri_of``.
        is_proved: Read every file first, to see that it is what the log says.

    Raises:
        InvalidError: There is no archive, or a topic is asked for that it has not.
        DataError: The log or a file is damaged.
        BackendError: The store failed.
    """
    state = read_archive(archive)
    keys = [file.key for file in plan_files(state, wanted or Selection()).files]
    if is_proved:
        known = {file.key: file for files in files_by_topic(state).values() for file in files}
        prove_files(archive, (known[key] for key in keys))
    return [uri_of(archive, key, scheme=scheme) for key in keys]


def _escaped(path: str) -> str:
    return "".join("\\" + char if char in _PATTERN else char for char in path)


# -- reports ---------------------------------------------------------------------------------------


def report(url: str, **options: str) -> dict[str, Any]:
    """Files and row groups of an archive, or parts of a tier, that are read, and those left out by what.

    Of an archive the log, the footers of the files chosen and filters of keys are read; of a tier the journal.

    Raises:
        InvalidError: An option is wrong, or nothing is there.
        DataError: A log is damaged.
        StoreUnavailableError: The store failed.
    """
    named = _named(url, options)
    is_archive = kind_of(named, None) == ARCHIVE
    require_known(named, READ if is_archive else READ | OF_TIER)
    with backend_errors():
        return _of_archive(named) if is_archive else _of_tier(named)


def file_list(url: str, *, scheme: str = "s3a", **options: str) -> list[str]:
    """Files of an archive that may hold what is wanted, as ``spark.read.parquet(*uris)`` takes them.

    Args:
        url: Of the archive.
        scheme: By which Hadoop reaches S3; a folder's files are ``file://``.
        options: Of the source.

    Raises:
        InvalidError: An option is wrong, or there is no archive.
        DataError: The log is damaged.
        StoreUnavailableError: The store failed.
    """
    named = _named(url, options)
    require_known(named, READ)
    with backend_errors():
        store = open_place(named)
        try:
            return file_uris(store, selection_of(named), scheme=scheme)
        finally:
            store.close()


def _named(url: str, options: dict[str, str]) -> dict[str, str]:
    names = {name.rstrip("_").replace("_", "-"): text for name, text in options.items()}
    return {**names, "path": url}


def _of_archive(options: dict[str, str]) -> dict[str, Any]:
    store = open_place(options)
    try:
        return {"source": "archive", **explain(store, selection_of(options)).document()}
    finally:
        store.close()


def _of_tier(options: dict[str, str]) -> dict[str, Any]:
    states = TierStates(options)
    try:
        plan = plan_tier(states.read(), selection_of(options))
    finally:
        states.close()
    tasks = [stretch.task for stretch in plan.stretches]
    return {
        "source": "tier",
        "partitions": len(packed(plan.stretches, partition_bytes(options))),
        "stretches": len(plan.stretches),
        "parts": sum(len(task.parts) for task in tasks),
        "parts_left_out": dict(sorted(plan.parts_left.items())),
        "offsets": sum(stretch.task.end - stretch.task.start for stretch in plan.stretches),
        "offsets_missing": plan.missing,
        "size_bytes": sum(task.size_bytes for task in tasks),
    }
