"""The exact files of an archive for readers that take a list of them, as Spark's own reader of Parquet does.

Spark reads a folder's files by itself, and those on S3 where ``s3a`` is set up (library and credentials are the user's to
bring). Every row of a file that the log names counts; which of them are wanted is for the reader to say again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.archive.prune import plan_files
from tiered.archive.query.duck import local_root
from tiered.archive.selection import Selection
from tiered.archive.tables import read_archive

if TYPE_CHECKING:
    from backends.base import ObjectStore

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
    archive: ObjectStore, wanted: Selection | None = None, *, scheme: str = "s3a"
) -> list[str]:
    """The files that may hold what is wanted, as ``spark.read.parquet(*uris)`` takes them.

    Args:
        archive: Of which.
        wanted: What; without it everything.
        scheme: See ``uri_of``.

    Raises:
        InvalidError: There is no archive, or a topic is asked for that it has not.
        DataError: The log is damaged.
        BackendError: The store failed.
    """
    files = plan_files(read_archive(archive), wanted or Selection()).files
    return [uri_of(archive, file.key, scheme=scheme) for file in files]


def _escaped(path: str) -> str:
    return "".join("\\" + char if char in _PATTERN else char for char in path)
