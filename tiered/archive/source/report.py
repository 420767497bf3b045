"""What a read by the Spark sources would leave out, and by what, without Spark; and the files for readers of lists.

Both take a URL and the options of a source (docs/spark.md), with underscores in names as Python wants them.
"""

from __future__ import annotations

from typing import Any

from tiered.api.stores import backend_errors
from tiered.archive.prune import explain
from tiered.archive.query.native import file_uris
from tiered.archive.selection import selection_of
from tiered.archive.source.options import (
    ARCHIVE,
    OF_TIER,
    READ,
    kind_of,
    open_place,
    partition_bytes,
    require_known,
)
from tiered.archive.source.stretches import packed, plan_tier
from tiered.archive.source.tier_states import TierStates


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
