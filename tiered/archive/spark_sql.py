"""Questions in SQL, answered by Spark. Each topic of the archive is a view of its name.

Files of a folder are read by Spark itself, from the exact list that the log names, each proven by its checksum before; those
of another store by the source ``tieredmq`` (``tiered.archive.datasource``), which needs no S3 library for Hadoop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiered.archive.columns import topic_schema
from tiered.archive.datasource import ArchiveSource, source_options
from tiered.archive.datasource import register as register_sources
from tiered.archive.harm import find_damage, prove_files
from tiered.archive.query.duck import (
    is_named,
    local_root,
    may_list_tables,
    table_names,
    tables_there,
)
from tiered.archive.source.report import uri_of
from tiered.archive.spark import full_advice
from tiered.archive.tables import files_by_topic, read_archive
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from backends.base import ObjectStore
    from backends.s3_settings import S3Options
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
        DataError: The log, or a file that the question is about, is damaged.
        BackendError: The store failed.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped] # noqa: PLC0415 (heavy; only who asks)
    from pyspark.errors import AnalysisException, PySparkException  # noqa: PLC0415

    register(session, archive, url, options, question=question)
    try:
        return session.sql(question).toArrow()
    except (PySparkException, Py4JError) as error:
        topics = files_by_topic(read_archive(archive))
        tables = table_names(topics)
        asked = (
            file for t, table in tables.items() if is_named(table, question) for file in topics[t]
        )
        is_wrong = isinstance(error, AnalysisException)
        if not is_wrong and (harm := find_damage(archive, asked)):
            raise harm from error
        do = full_advice(str(error)) or tables_there(tables.values(), "`")
        raise InvalidError(_said(str(error)), do=do) from error


def _said(text: str) -> str:
    """What Spark says, in one line: of a failure within it, what came first."""
    lines = text.strip().splitlines() or ["Spark says nothing"]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if causes:
        return causes[-1]
    is_ours = lines[0].endswith("Traceback (most recent call last):")
    return lines[-1 if is_ours else 0]


def register(
    session: Any,  # noqa: ANN401
    archive: ObjectStore,
    url: str,
    options: S3Options,
    *,
    question: str | None = None,
) -> list[str]:
    """Make a view of each topic, of what the log names now; their names, which differ in more than case.

    Args:
        session: Of Spark.
        archive: Of which.
        url: The archive's, as workers see it.
        options: How they reach S3.
        question: Only of topics that it may name.

    Raises:
        InvalidError: There is no archive.
        DataError: The log is damaged.
        BackendError: The store failed.
    """
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 (heavy)

    register_sources(session)
    state = read_archive(archive)
    topics = files_by_topic(state)
    wants_all = question is None or may_list_tables(question)
    tables = {
        topic: table
        for topic, table in table_names(topics).items()
        if wants_all or is_named(table, question or "")
    }
    for topic, table in tables.items():
        columns = from_arrow_schema(topic_schema(state, topic))
        more = {**source_options(options), "path": url, "topic": topic}
        frame = _frame(session, archive, topics[topic], columns, more)
        frame.createOrReplaceTempView("`" + table.replace("`", "``") + "`")
    return list(tables.values())


def _frame(
    session: Any,  # noqa: ANN401
    archive: ObjectStore,
    files: Sequence[ParquetFile],
    columns: Any,  # noqa: ANN401
    options: dict[str, str],
) -> Any:  # noqa: ANN401
    if not files:
        return session.createDataFrame([], columns)
    reader = session.read.schema(columns)
    if local_root(archive) is not None:
        prove_files(archive, files)  # Spark's own reader does not look at the checksum in the log
        return reader.parquet(*(uri_of(archive, file.key) for file in files))
    return reader.format(ArchiveSource.name()).options(**options).load()
