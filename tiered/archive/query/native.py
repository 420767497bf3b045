"""The exact files of an archive for readers that take a list of them, as Spark's own reader of Parquet does.

Such readers do not look at our checksums, so each file is read whole and held against the log before it is named. What
becomes of it between that and their own reading only the checksums of its pages tell, to readers that are to look at them
(``parquet.page.verify-checksum.enabled`` of Hadoop).

Spark reads a folder's files by itself, and those on S3 where ``s3a`` is set up (library and credentials are the user's to
bring). Every row of a file that the log names counts; which of them are wanted is for the reader to say again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.archive.harm import prove_files
from tiered.archive.prune import plan_files
from tiered.archive.query.duck import local_root
from tiered.archive.selection import Selection
from tiered.archive.tables import files_by_topic, read_archive

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
