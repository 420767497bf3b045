"""``tiered sql``: a question to an archive."""

from __future__ import annotations

import base64
import contextlib
import itertools
import math
import os
import warnings
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from backends.local_files import advice_for
from tiered.cli.archive import SparkOptions
from tiered.cli.exits import DONE
from tiered.cli.frame import make_command
from tiered.cli.options import OneOf, argument, option
from tiered.cli.output import Output
from tiered.cli.values import counted
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.cli.call import Call

_BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class SqlOptions(SparkOptions):
    """What ``tiered sql`` can be told."""

    url: str = argument()
    question: str = argument()
    engine: str = option(
        "what answers: DuckDB in this process, or Spark",
        "ENGINE",
        OneOf("duckdb", "spark"),
        default="duckdb",
    )
    to: str | None = option(
        "write the result to this file, as Parquet", "FILE", str, default_text="print it"
    )


def run(call: Call, options: SqlOptions) -> int:
    """Ask, and print the answer."""
    from tiered.api.stores import backend_errors
    from tiered.cli.call import open_objects

    with contextlib.ExitStack() as stack, backend_errors():
        archive = open_objects(call, options.url, stack)
        answer = _distinct(_ask(call, options, archive, stack))
    file = options.to
    if file is not None:
        _save(answer, file)
        call.say(f"tiered: {counted(answer.num_rows, 'row')} in {file}")
        return DONE
    names = answer.schema.names
    if call.form == "json":
        document = {"format": 1, "columns": names, "rows": list(_rows(answer))}
        Output(call).document(document)
    else:
        Output(call).emit({}, _rows(answer), names)
    if not answer.num_rows:
        call.say("tiered: no rows")
    return DONE


def _ask(
    call: Call, options: SqlOptions, archive: ObjectStore, stack: contextlib.ExitStack
) -> pa.Table:
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
        return found.rows
    from tiered.archive.spark import open_session
    from tiered.spark.frames import ask_spark

    conf = dict(text.split("=", 1) for text in options.spark_conf)
    session = open_session(options.master, conf)
    stack.callback(session.stop)
    return ask_spark(session, archive, question, options.url, call.s3_options())


def _distinct(answer: pa.Table) -> pa.Table:
    """The same with column names that differ: the second ``a`` is ``a_2``."""
    names: list[str] = []
    for name in answer.schema.names:
        tries = (f"{name}_{number}" for number in itertools.count(2))
        names.append(next(n for n in itertools.chain([name], tries) if n not in names))
    return answer.rename_columns(names)


def _rows(answer: pa.Table) -> Iterator[dict[str, Any]]:
    """Row after row, without holding them all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a map that has a name twice: the last one counts
        for batch in answer.to_batches(max_chunksize=_BATCH_ROWS):
            for row in batch.to_pylist(maps_as_pydicts="lossy"):
                yield {name: plain(value) for name, value in row.items()}


def plain(value: Any) -> Any:  # noqa: ANN401 (a value of a table)
    """A value as JSON has it: times as ISO 8601, bytes as text where they are UTF-8, else as base64; no NaN."""
    match value:
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return "base64:" + base64.b64encode(value).decode()
        case tuple() if hasattr(value, "nanoseconds"):
            return _duration(*value)
        case list():
            return [plain(v) for v in value]
        case dict():
            return {str(k): plain(v) for k, v in value.items()}
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case _:
            return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _duration(months: int, days: int, nanoseconds: int) -> str:
    """As ISO 8601 has it; without calendar parts it is seconds alone."""
    seconds = f"{Decimal(nanoseconds) / 1_000_000_000:f}"
    seconds = seconds.rstrip("0").rstrip(".") if "." in seconds else seconds
    return "P" + f"{months}M" * bool(months) + f"{days}D" * bool(days) + f"T{seconds}S"


def _save(answer: pa.Table, file: str) -> None:
    from pyarrow import parquet

    try:
        parquet.write_table(answer, file, compression="zstd", write_page_checksum=True)
    except OSError as error:
        raise InvalidError(
            f"cannot be written: {os.strerror(error.errno) if error.errno else error}",
            where=file,
            do=advice_for(error, "name a file in a directory that can be written"),
        ) from error


COMMAND = make_command(
    "sql",
    SqlOptions,
    run,
    examples=[
        "tiered sql file:///tmp/parquet 'SELECT tag, count(*) FROM orders GROUP BY tag'",
        """tiered sql s3://bucket2/parquet 'FROM "%RETRY%workers"' --to /tmp/retries.parquet""",
    ],
)
