"""``tiered archive``: sealed segments to Parquet."""

from __future__ import annotations

import contextlib
import os
import random
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import click

from backends.local_files import is_full
from tiered.cli.errors import DONE, NEEDS_A_PERSON
from tiered.cli.frame import COMMANDS, make_command
from tiered.cli.output import Output
from tiered.cli.values import counted, format_size
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.archive.engines import Engine
    from tiered.archive.job import Result, Workshop
    from tiered.archive.limits import Limits
    from tiered.archive.progress import Watch
    from tiered.cli.call import Call

_COLUMNS = [
    "segments",
    "files",
    "rows",
    "holes",
    "bad",
    "misfits",
    "source_bytes",
    "size_bytes",
    "entries",
]
_TASK = ["topic", "queue_id", "incarnation", "start", "end", "size_bytes"]
_FOUND = ["lane", "key", "what"]


def run(call: Call) -> int:
    """Archive, or verify an archive."""
    from tiered.api.arrow import load_pyarrow
    from tiered.api.stores import backend_errors

    load_pyarrow()
    with contextlib.ExitStack() as stack, backend_errors():
        at = open_workshop(call, stack)
        if call.flag("verify"):
            return _verify(call, at)
        if call.flag("key-index"):
            from tiered.cli.archive_keys import run_key_index

            return run_key_index(call, at)
        if call.flag("merge") or call.flag("clean"):
            return _files(call, at)
        return _plan(call, at) if call.flag("dry-run") else _archive(call, at)


def open_workshop(call: Call, stack: contextlib.ExitStack) -> Workshop:
    """Tier and archive as the options name them; the stack closes them.

    Raises:
        InvalidError: There is no such tier, or several.
    """
    from tiered.api.broker_place import choose_place
    from tiered.archive.job import Workshop
    from tiered.cli.archive_bodies import read_options
    from tiered.cli.tiers import open_both, open_objects

    rng, give_up_s = random.SystemRandom(), call.number("give-up-seconds")
    tier = open_objects(call, call.argument("url"), stack, give_up_s=give_up_s)
    place = choose_place(tier, call.text("cluster"), call.text("broker"))
    bare, archive = open_both(call, call.words("to"), stack, give_up_s=give_up_s)
    takes, wishes = wanted_topics(call), read_options(call)
    return Workshop(tier, place, archive, bare, call.clock, rng, takes, wishes, give_up_s)


def wanted_topics(call: Call) -> Callable[[str], bool]:
    """Whether a topic is wanted, by ``--topics`` and ``--exclude``."""
    globs, excluded = call.texts("topics"), call.texts("exclude")

    def takes(topic: str) -> bool:
        wanted = not globs or any(fnmatchcase(topic, glob) for glob in globs)
        return wanted and not any(fnmatchcase(topic, glob) for glob in excluded)

    return takes


def _files(call: Call, at: Workshop) -> int:
    """What is done to files alone.

    Raises:
        InvalidError: Both are asked for.
    """
    from tiered.cli.archive_files import run_clean, run_merge
    from tiered.errors import InvalidError

    if call.flag("merge") and call.flag("clean"):
        raise InvalidError(
            "--merge and --clean contradict each other",
            where=call.path,
            do="merge first, and clean when the grace is over",
        )
    return run_merge(call, at) if call.flag("merge") else run_clean(call, at)


def _limits(call: Call) -> Limits:
    from tiered.archive.limits import Limits

    bounds = call.time_ms("from"), call.time_ms("until")
    return Limits(*bounds, call.whole_or_none("max-bytes"), call.whole_or_none("max-runtime"))


def _plan(call: Call, at: Workshop) -> int:
    from tiered.archive.job import plan_job
    from tiered.archive.limits import limited
    from tiered.archive.verify import read_log
    from tiered.cli.archive_shown import plan_document

    plan = limited(plan_job(at, read_log(at)), _limits(call))
    document = plan_document(at, plan)
    Output(call).emit(document, document["tasks"], _TASK)
    call.say(
        f"tiered: {counted(len(plan.tasks), 'segment')}, {format_size(plan.size_bytes)} to be archived;"
        " nothing is done"
    )
    return DONE


def _archive(call: Call, at: Workshop) -> int:
    from tiered.archive.job import first_error, run_job
    from tiered.archive.progress import Watch, write_metrics
    from tiered.cli.archive_bodies import say_bodies
    from tiered.cli.archive_files import publish_tables
    from tiered.cli.archive_shown import progressed, result_document, say_left

    sealed = _seal(call) if call.flag("seal") else 0
    watch, metrics, kind = Watch(call.clock), call.text("metrics-file"), call.words("engine")

    def told(result: Result) -> None:
        watch.segments_all, watch.bytes_all = len(result.plan.tasks), result.plan.size_bytes
        write(result)

    def write(result: Result) -> InvalidError | None:
        """The figures; why not, where there is no room for them: that stops no work."""
        if not metrics:
            return None
        try:
            write_metrics(metrics, result.record(call.clock.now_ms()))
        except InvalidError as error:
            if not is_full(error.__cause__):
                raise
            return error
        return None

    with contextlib.ExitStack() as stack:
        engine = watch.over(_engine(call, at, watch, stack))
        stack.enter_context(call.progress("archive", lambda: progressed(watch)))
        small_bytes = call.whole("pack-below")
        limits = _limits(call)
        result = run_job(at, engine, told=told, limits=limits, small_bytes=small_bytes, kind=kind)
    unwritten = write(result)
    published, refused = publish_tables(call, at)
    document = {**result_document(at, result, sealed=sealed), **published}
    Output(call).emit(document, [document], _COLUMNS)
    say_left(call, result)
    say_bodies(call, result)
    error = first_error(result) or refused or unwritten
    if error is not None:
        raise error
    return NEEDS_A_PERSON if result.bad or result.misfits or result.plan.strange else DONE


def _seal(call: Call) -> int:
    """Seal what is open, unless a writer is at work, whose business it is."""
    from tiered.archive.sealing import seal_open
    from tiered.cli.planned import open_workplace
    from tiered.errors import FencedError

    with contextlib.ExitStack() as stack:
        try:
            workplace = open_workplace(call, call.argument("url"), stack)
            count = seal_open(workplace, wanted_topics(call))
        except FencedError as error:
            call.say(f"tiered: nothing is sealed: {error.what}; it seals segments when they roll")
            return 0
    call.say(f"tiered: {counted(count, 'open segment')} sealed")
    return count


def _engine(call: Call, at: Workshop, watch: Watch, stack: contextlib.ExitStack) -> Engine:
    if call.words("engine") == "local":
        from tiered.archive.job import local_engine

        return local_engine(at, call.whole_or_none("jobs") or os.cpu_count() or 1)
    from tiered.archive.progress import spark_ahead
    from tiered.archive.spark import WAVE, Order, open_session, spark_engine

    conf = dict(text.split("=", 1) for text in call.texts("spark-conf"))
    session = open_session(call.text("master"), conf)
    stack.callback(session.stop)
    watch.ahead = spark_ahead(session)
    urls = call.argument("url"), call.words("to")
    order = Order(urls[0], at.place.prefix, urls[1], call.s3_options())
    is_timed = call.whole_or_none("max-runtime") is not None
    wave = min(WAVE, 2 * session.sparkContext.defaultParallelism) if is_timed else WAVE
    return spark_engine(session, order, wave=wave)


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
        f"tiered: {counted(report.rows, 'message')} in {counted(report.files, 'file')},"
        f" {counted(report.compared, 'stretch', 'stretches')} held against the tier, {counted(len(rows), 'finding')}"
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
