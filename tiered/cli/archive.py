"""``tiered archive``: sealed segments to Parquet."""

from __future__ import annotations

import contextlib
import os
import random
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from tiered.cli.errors import DONE, NEEDS_A_PERSON
from tiered.cli.frame import COMMANDS, make_command
from tiered.cli.output import Output
from tiered.cli.sizes import format_count, format_size

if TYPE_CHECKING:
    from tiered.archive.engines import Engine
    from tiered.archive.job import Result, Workshop
    from tiered.cli.call import Call

_COLUMNS = ["segments", "files", "rows", "holes", "bad", "source_bytes", "size_bytes", "entries"]
_FOUND = ["lane", "key", "what"]


def run(call: Call) -> int:
    """Archive, or verify an archive."""
    from tiered.plugin.arrow import load_pyarrow
    from tiered.plugin.stores import backend_errors

    load_pyarrow()
    with contextlib.ExitStack() as stack, backend_errors():
        at = open_workshop(call, stack)
        return _verify(call, at) if call.flag("verify") else _archive(call, at)


def open_workshop(call: Call, stack: contextlib.ExitStack) -> Workshop:
    """Tier and archive as the options name them; the stack closes them.

    Raises:
        InvalidError: There is no such tier, or several.
    """
    from tiered.archive.job import Workshop
    from tiered.cli.tiers import open_both, open_objects
    from tiered.plugin.place import choose_place

    tier = open_objects(call, call.argument("url"), stack)
    place = choose_place(tier, call.text("cluster"), call.text("broker"))
    bare, archive = open_both(call, call.words("to"), stack)
    globs = call.texts("topics")

    def takes(topic: str) -> bool:
        return not globs or any(fnmatchcase(topic, glob) for glob in globs)

    return Workshop(tier, place, archive, bare, call.clock, random.SystemRandom(), takes)


def _archive(call: Call, at: Workshop) -> int:
    from tiered.archive.job import first_error, run_job

    with contextlib.ExitStack() as stack:
        engine = _engine(call, at, stack)
        result = run_job(at, engine, told=lambda now: _tell(call, now))
    document = _document(at, result)
    Output(call).emit(document, [document], _COLUMNS)
    _say_open(call, result)
    error = first_error(result)
    if error is not None:
        raise error
    return NEEDS_A_PERSON if result.bad else DONE


def _engine(call: Call, at: Workshop, stack: contextlib.ExitStack) -> Engine:
    if call.words("engine") == "local":
        from tiered.archive.job import local_engine

        return local_engine(at, call.whole_or_none("jobs") or os.cpu_count() or 1)
    from tiered.archive.spark import Order, open_session, spark_engine

    conf = dict(text.split("=", 1) for text in call.texts("spark-conf"))
    session = open_session(call.text("master"), conf)
    stack.callback(session.stop)
    urls = call.argument("url"), call.words("to")
    return spark_engine(session, Order(urls[0], at.place.prefix, urls[1], call.s3_options()))


def _tell(call: Call, result: Result) -> None:
    call.say(
        f"tiered: archived {result.segments} of {len(result.plan.tasks)} segments,"
        f" {format_count(result.rows)} messages, {format_size(result.source_bytes)}"
    )


def _say_open(call: Call, result: Result) -> None:
    opened = result.plan.opened
    if opened:
        messages = sum(one.end - one.start for one in opened)
        call.say(
            f"tiered: {format_count(messages)} messages of {len(opened)} queues are not sealed, so not archived;"
            " segments are sealed when full or old, or by `tiered attach --once --seal`"
        )


def _document(at: Workshop, result: Result) -> dict[str, Any]:
    return {
        "format": 1,
        "archive": at.archive.url,
        "cluster": at.place.cluster,
        "broker": at.place.broker,
        "planned": len(result.plan.tasks),
        "archived_before": result.plan.archived_segments,
        "segments": result.segments,
        "by_others": result.overtaken,
        "files": result.files,
        "rows": result.rows,
        "holes": result.holes,
        "bad": result.bad,
        "source_bytes": result.source_bytes,
        "size_bytes": result.size_bytes,
        "entries": result.entries,
        "open": [
            {
                "topic": one.lane.topic,
                "queue_id": one.lane.queue_id,
                "start": one.start,
                "end": one.end,
                "size_bytes": one.size_bytes,
            }
            for one in result.plan.opened
        ],
        "failed": [
            {"lane": str(task.lane), "start": task.start, "end": task.end, "why": str(error)}
            for task, error in result.failed
        ],
    }


def _verify(call: Call, at: Workshop) -> int:
    from tiered.archive.verify import verify_archive

    report = verify_archive(at)
    rows = [finding.row() for finding in report.findings]
    document = {
        "format": 1,
        "archive": at.archive.url,
        "files": report.files,
        "rows": report.rows,
        "compared": report.compared,
        "findings": rows,
    }
    Output(call).emit(document, rows, _FOUND)
    call.say(
        f"tiered: {format_count(report.rows)} messages in {report.files} files,"
        f" {report.compared} stretches held against the tier, {len(rows)} findings"
    )
    return NEEDS_A_PERSON if rows else DONE


COMMAND = make_command(
    "archive",
    run,
    summary=COMMANDS["archive"].summary,
    arguments=[click.Argument(["url"])],
    examples=[
        "tiered archive s3://bucket/prefix --to s3://bucket2/parquet",
        "tiered archive file:///tmp/tier --to file:///tmp/parquet --verify",
    ],
)
