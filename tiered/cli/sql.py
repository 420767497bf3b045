"""``tiered sql``: a question to an archive."""

from __future__ import annotations

import base64
import contextlib
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from tiered.cli.errors import DONE
from tiered.cli.frame import COMMANDS, make_command
from tiered.cli.output import Output

if TYPE_CHECKING:
    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.cli.call import Call


def run(call: Call) -> int:
    """Ask, and print the answer."""
    from tiered.cli.tiers import open_objects
    from tiered.plugin.stores import backend_errors

    with contextlib.ExitStack() as stack, backend_errors():
        archive = open_objects(call, call.argument("url"), stack)
        answer = _ask(call, archive, stack)
    file = call.text("to")
    if file is not None:
        _save(answer, file)
        call.say(f"tiered: {answer.num_rows:,} rows in {file}")
        return DONE
    rows = [{name: plain(value) for name, value in row.items()} for row in answer.to_pylist()]
    Output(call).emit(
        {"format": 1, "columns": answer.schema.names, "rows": rows}, rows, answer.schema.names
    )
    return DONE


def _ask(call: Call, archive: ObjectStore, stack: contextlib.ExitStack) -> pa.Table:
    question = call.argument("question")
    if call.words("engine") == "duckdb":
        from tiered.archive.duck import ask

        return ask(archive, question)
    from tiered.archive.spark import open_session
    from tiered.archive.spark_sql import ask_spark

    conf = dict(text.split("=", 1) for text in call.texts("spark-conf"))
    session = open_session(call.text("master"), conf)
    stack.callback(session.stop)
    return ask_spark(session, archive, question, call.argument("url"), call.s3_options())


def plain(value: Any) -> Any:  # noqa: ANN401 (a value of a table)
    """A value as JSON has it: times as ISO 8601, bytes as text where they are UTF-8, else as base64."""
    match value:
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return "base64:" + base64.b64encode(value).decode()
        case list():
            pairs = bool(value) and all(isinstance(v, tuple) and len(v) == 2 for v in value)  # noqa: PLR2004
            return {str(k): plain(v) for k, v in value} if pairs else [plain(v) for v in value]
        case dict():
            return {str(k): plain(v) for k, v in value.items()}
        case None | bool() | int() | float() | str():
            return value
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case _:
            return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _save(answer: pa.Table, file: str) -> None:
    from pyarrow import parquet

    parquet.write_table(answer, file, compression="zstd")


COMMAND = make_command(
    "sql",
    run,
    summary=COMMANDS["sql"].summary,
    arguments=[click.Argument(["url"]), click.Argument(["question"])],
    examples=[
        "tiered sql file:///tmp/parquet 'SELECT tag, count(*) FROM orders GROUP BY tag'",
        "tiered sql s3://bucket2/parquet 'SELECT * FROM orders LIMIT 10' -o csv",
    ],
)
