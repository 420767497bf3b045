"""``tiered sql``: a question to an archive."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from backends.local_files import advice_for
from tiered.cli import kinds
from tiered.cli.archive import SparkOptions
from tiered.cli.exits import DONE
from tiered.cli.frame import command
from tiered.cli.options import argument, option
from tiered.cli.output import Output, show
from tiered.cli.values import counted
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.archive.stale import Stale
    from tiered.cli.call import Call

_BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class SqlOptions(SparkOptions):
    """What ``tiered sql`` can be told."""

    url: str = argument("URL or folder of the archive")
    question: str = argument("an SQL statement; each topic is a table")
    engine: str = option(
        "DuckDB in this process, or Spark",
        kinds.one_of("ENGINE", "duckdb", "spark"),
        default="duckdb",
    )
    to: str | None = option(
        "write the result here, as Parquet",
        kinds.Kind("FILE", kinds.parquet_name),
        default_text="print it",
    )


@command("sql", SqlOptions)
def run(call: Call, options: SqlOptions) -> int:
    """Answers a question in SQL from an archive.

    Examples:
        tiered sql file:///tmp/parquet 'SELECT tag, count(*) FROM orders GROUP BY tag'
        tiered sql s3://bucket2/parquet 'FROM "%RETRY%workers"' --to /tmp/retries.parquet
    """
    from tiered.cli.plain_values import distinct_names

    answer = _ask(call, options, call.objects(options.url))
    answer = answer.rename_columns(distinct_names(answer.schema.names))
    file = options.to
    if file is not None:
        _save(answer, file)
        call.say(f"tiered: {counted(answer.num_rows, 'row')} in {file}")
        return DONE
    names = answer.schema.names
    if call.form == "json":
        Output(call).listing({"format": 1, "columns": names}, "rows", _rows(answer))
    else:
        show(call, {}, rows=_rows(answer), columns=names)
    if not answer.num_rows:
        call.say("tiered: no rows")
    return DONE


def _ask(call: Call, options: SqlOptions, archive: ObjectStore) -> pa.Table:
    question = options.question
    if not question.strip(" \t\r\n;"):
        raise InvalidError(
            "no question is asked", where=call.path, do="write one, as 'SHOW TABLES'"
        )
    if options.engine == "duckdb":
        from tiered.archive.duck import ask

        found = ask(archive, question)
        if found.left_out:
            call.say(
                f"tiered: {found.left_out:,} of {counted(found.files, 'file')} left out unread"
            )
        _say_stale(call, found.stale)
        return found.rows
    from tiered.archive.duck import is_named, stale_asked
    from tiered.archive.exact_names import table_names
    from tiered.archive.tables import files_by_topic, read_archive
    from tiered.spark.frames import ask_spark

    session = options.session(call)
    state = read_archive(archive)
    topics = [
        t for t, table in table_names(files_by_topic(state)).items() if is_named(table, question)
    ]
    _say_stale(call, stale_asked(state, topics, question))
    return ask_spark(session, archive, question, options.url, call.s3_options())


def _say_stale(call: Call, found: list[Stale]) -> None:
    for one in found:
        call.say(f"tiered: {one.said()}")


def _rows(answer: pa.Table) -> Iterator[dict[str, Any]]:
    """Row after row, without holding them all."""
    from tiered.cli.plain_values import plain_rows

    for batch in answer.to_batches(max_chunksize=_BATCH_ROWS):
        yield from plain_rows(batch)


def _save(answer: pa.Table, file: str) -> None:
    from pyarrow import ArrowNotImplementedError, parquet

    try:
        parquet.write_table(answer, file, compression="zstd", write_page_checksum=True)
    except ArrowNotImplementedError as error:
        raise InvalidError(
            f"Parquet has no form for a column of the answer: {error}",
            where=file,
            do="make a text of it, as by CAST(… AS VARCHAR)",
        ) from None
    except OSError as error:
        raise InvalidError(
            f"cannot be written: {os.strerror(error.errno) if error.errno else error}",
            where=file,
            do=advice_for(error, "name a file in a directory that can be written"),
        ) from error
