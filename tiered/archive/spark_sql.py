"""Questions in SQL, answered by Spark. Each topic of the archive is a view of its name.

Files of a folder are read by Spark itself, from the exact list that the log names; those of another store by the source
``tieredmq`` (``tiered.archive.datasource``), which needs no S3 library for Hadoop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiered.archive.datasource import DDL, ArchiveSource, source_options
from tiered.archive.datasource import register as register_sources
from tiered.archive.duck import local_root
from tiered.archive.native import uri_of
from tiered.archive.tables import files_by_topic, read_archive
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from backends.base import ObjectStore
    from backends.s3_options import S3Options
    from tiered.archive.model import ParquetFile


def ask_spark(
    session: Any,  # noqa: ANN401 (pyspark has no types)
    archive: ObjectStore,
    question: str,
    url: str,
    options: S3Options,
) -> pa.Table:
    """The answer to a question; it comes to this process whole.

    Args:
        session: Of Spark.
        archive: Of which.
        question: One statement of Spark's SQL.
        url: The archive's, as workers see it.
        options: How they reach S3.

    Raises:
        InvalidError: There is no archive, or the statement is wrong.
        DataError: The log is damaged.
        BackendError: The store failed.
    """
    from pyspark.errors import PySparkException  # noqa: PLC0415 (heavy; only who asks)

    register(session, archive, url, options)
    try:
        return session.sql(question).toArrow()
    except PySparkException as error:
        lines = str(error).strip().splitlines()
        is_ours = lines[0].endswith("Traceback (most recent call last):")
        raise InvalidError(lines[-1 if is_ours else 0]) from error


def register(session: Any, archive: ObjectStore, url: str, options: S3Options) -> list[str]:  # noqa: ANN401
    """Make a view of each topic, of what the log names now; their names.

    Args:
        session: Of Spark.
        archive: Of which.
        url: The archive's, as workers see it.
        options: How they reach S3.

    Raises:
        InvalidError: There is no archive.
        DataError: The log is damaged.
        BackendError: The store failed.
    """
    register_sources(session)
    topics = files_by_topic(read_archive(archive))
    for topic, files in topics.items():
        frame = _frame(session, archive, topic, files, {**source_options(options), "path": url})
        frame.createOrReplaceTempView("`" + topic.replace("`", "``") + "`")
    return list(topics)


def _frame(
    session: Any,  # noqa: ANN401
    archive: ObjectStore,
    topic: str,
    files: Sequence[ParquetFile],
    options: dict[str, str],
) -> Any:  # noqa: ANN401
    root = local_root(archive)
    if not files:
        return session.createDataFrame([], DDL)
    if root is not None:
        return session.read.schema(DDL).parquet(*(uri_of(archive, file.key) for file in files))
    return session.read.format(ArchiveSource.name()).options(**options, topic=topic).load()
