"""``tiered archive``: sealed segments to Parquet; and the files of an archive merged, cleaned, indexed and verified."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Final

from backends.lazy_dataclass import dataclass, picked
from backends.local_files import is_full, read_regular
from tiered.cli import kinds
from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import command
from tiered.cli.options import ISOLATION_HELP, flag, option, required, several
from tiered.cli.output import show
from tiered.cli.planned import (
    HOUR_MS,
    Document,
    FleetPlanOptions,
    get_plan,
    open_workplace,
    show_plan,
)
from tiered.cli.stderr import Progressed
from tiered.cli.values import (
    Moment,
    counted,
    few,
    format_count,
    format_duration,
    format_size,
    topic_filter,
)
from tiered.errors import InvalidError, TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tiered.archive.body_formats import BodyWishes
    from tiered.archive.job import JobProgress, Result
    from tiered.archive.lookup import Built
    from tiered.archive.merging import Merged
    from tiered.archive.model import ArchiveQueue
    from tiered.archive.plan import Limits
    from tiered.archive.task import JobContext
    from tiered.cli.call import Call
    from tiered.upkeep.engine import Engine, T, V, WorkContext

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
_FOUND = ["queue", "key", "what"]


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """Where and how Spark runs."""

    master: str | None = option(
        "where Spark runs",
        kinds.Kind("MASTER", str),
        default_text="spark-submit's, else all processors",
    )
    spark_conf: tuple[str, ...] = several(
        "a setting of Spark; repeatable (in a variable: one a line)",
        kinds.PAIR,
        separator="\n",
    )

    def session(self, call: Call, *, is_lean: bool = False) -> Any:  # noqa: ANN401 (pyspark has no types)
        """Of Spark as the options say; it ends with the command."""
        from tiered.spark.driver import open_session

        conf = dict(text.split("=", 1) for text in self.spark_conf)
        session: Any = open_session(self.master, conf, is_lean=is_lean)
        call.opened.callback(session.stop)
        return session


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions(FleetPlanOptions, SparkOptions):
    """What ``tiered archive`` can be told."""

    brokers_at_once: ClassVar = (
        1  # one takes all processors, and the archive's log has one writer at a time
    )
    broker_columns: ClassVar = ("segments", "files", "rows", "size_bytes")

    to: str = required("URL of the archive", kinds.Kind("URL", kinds.parquet_name))
    engine: str = option(
        "this process, or Spark",
        kinds.one_of("ENGINE", "local", "spark"),
        default="local",
    )
    jobs: int | None = option(
        "parallel segments or files, without Spark",
        kinds.COUNT,
        default_text="one for each processor",
    )
    topics: tuple[str, ...] = several("only these topics", kinds.GLOBS)
    exclude: tuple[str, ...] = several("topics to leave out", kinds.GLOBS)
    from_: Moment | None = option("skip segments that end before this time", kinds.TIME)
    until: Moment | None = option("skip segments that begin at or after this time", kinds.TIME)
    max_bytes: int | None = option(
        "maximum commit log a run archives, oldest first, at least one segment",
        kinds.SIZE,
        name="max-bytes",
    )
    max_runtime_ms: int | None = option(
        "begin no segment after this time",
        kinds.DURATION_MS,
    )
    pack_below_bytes: int = option(
        "smaller segments share a file per topic and day; 0: none",
        kinds.SIZE,
        default=64 << 20,
    )
    seal: bool = flag("first seal open segments; no writer may be attached")
    dry_run: bool = flag("only show what would be archived")
    publish: str | None = option(
        "update a table per topic in an Iceberg catalog (URI, or name in .pyiceberg.yaml)",
        kinds.Kind("iceberg:CATALOG#NAMESPACE", kinds.destination),
    )
    merge: bool = flag("only merge small files per topic and day")
    merge_below_bytes: int = option(
        "with --merge: merge smaller files", kinds.SIZE, default=32 << 20
    )
    clean: bool = flag("only delete replaced files and leftovers: plan, then apply")
    grace_ms: int = option(
        "with --clean: keep what was replaced this recently; longer than your longest read",
        kinds.DURATION_MS,
        default=24 * HOUR_MS,
    )
    max_deletions: int = option("with --clean: maximum files per run", kinds.COUNT, default=10_000)
    metrics_file: str | None = option(
        "write metrics for Prometheus here after each log entry",
        kinds.FILE,
    )
    body: tuple[str, ...] = several(
        "make columns of bodies: json, avro, protobuf, text, or raw (none); TOPIC may be a glob",
        kinds.Kind("[TOPIC=]FORMAT,...", str),
        default_text="as fixed in the archive's log, else raw",
    )
    body_schema: tuple[str, ...] = several(
        "SQL columns or JSON Schema, .avsc file, or descriptor set",
        kinds.Kind("[TOPIC=]FILE,...", str),
        default_text="with json: inferred",
    )
    body_message: tuple[str, ...] = several(
        "with protobuf: message name", kinds.Kind("[TOPIC=]NAME,...", str)
    )
    isolation: str | None = option(
        ISOLATION_HELP,
        kinds.ISOLATION,
        default_text="the archive's, else read_committed",
    )
    raw_records: bool = flag("add a column with each record's stored bytes")
    decode_again: bool = flag("archive again what lacks newer columns")
    key_index: bool = flag("only make a key index for `tiered query`")
    verify: bool = flag("only compare every file with the archive's log and the tier")
    repair: bool = flag(
        "only rebuild lost files from the tier, with --verify also damaged ones: plan, then apply"
    )

    def of_one_broker(self) -> list[str]:
        """The figures of one run are one file."""
        return [*super().of_one_broker(), *(["metrics-file"] if self.metrics_file else [])]


@command("archive", ArchiveOptions)
def run(call: Call, options: ArchiveOptions) -> int:
    """Rewrites sealed segments as Parquet, or verifies them.

    Examples:
        tiered archive s3://bucket/prefix --to s3://bucket2/parquet
        tiered archive file:///tmp/tier --to file:///tmp/parquet --verify
    """
    from tiered.api.arrow import load_pyarrow
    from tiered.archive.job import JobProgress

    # Arrow's allocator gives memory back within milliseconds, and the next file would pay for it anew: a tenth of all work.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    load_pyarrow()
    _require_dry(call, options)
    _require_effect(call, options)
    at = open_context(call, options)
    _require_topics(call, options, at)
    watch = JobProgress(call.clock)
    engine = _engine(call, options, at, watch)
    if options.repair:
        return run_repair(call, options, at, engine)
    if options.verify:
        return _verify(call, at, engine)
    if options.key_index:
        return run_key_index(call, at, engine)
    if options.merge:
        return run_merge(call, options, at, engine)
    if options.clean:
        return run_clean(call, options, at, engine)
    if options.dry_run:
        return _plan(call, options, at)
    return _archive(call, options, at, engine, watch)


_ARCHIVING, _VERIFY, _REPAIR, _KEYS, _MERGE, _CLEAN = (
    "", "--verify", "--repair", "--key-index", "--merge", "--clean",
)  # fmt: skip
_ACTS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "from", "until", "max-bytes", "max-runtime", "pack-below", "seal", "metrics-file",
            "body", "body-schema", "body-message", "raw-records", "decode-again", "isolation",
        ),
        (_ARCHIVING,),
    ),
    **dict.fromkeys(("topics", "exclude"), (_ARCHIVING, _MERGE, _VERIFY)),
    "publish": (_ARCHIVING, _MERGE, _CLEAN),
    "merge-below": (_MERGE,),
    **dict.fromkeys(("grace", "max-deletions"), (_CLEAN,)),
    **dict.fromkeys(("plan", "apply", "exit-code"), (_CLEAN, _REPAIR)),
}  # fmt: skip
"""With which of these an option does something. One that narrows nothing must not seem to: --clean deletes of all topics."""


def _require_effect(call: Call, options: ArchiveOptions) -> None:
    """See that all that the command line says does something. A file of settings speaks of every run, and may say more."""
    chosen = {
        _REPAIR: options.repair, _VERIFY: options.verify, _KEYS: options.key_index,
        _MERGE: options.merge, _CLEAN: options.clean,
    }  # fmt: skip
    modes = [name for name, is_chosen in chosen.items() if is_chosen]
    if modes == [_REPAIR, _VERIFY]:
        modes = [_REPAIR]
    if len(modes) > 1:
        what = f"{modes[0]} and {modes[1]} contradict each other"
        raise InvalidError(
            what, where=call.path, do=_DO_ONE.get((*modes,), "run one, then the other")
        )
    mode = modes[0] if modes else _ARCHIVING
    for name, acts in _ACTS.items():
        if mode not in acts and call.is_given(f"{call.section}.{name}"):
            with_it = f"with {mode}" if mode else "without " + " or ".join(acts)
            raise InvalidError(
                f"--{name} does nothing {with_it}", where=call.path, do="leave it out"
            )


_DO_ONE: Final[Mapping[tuple[str, ...], str]] = {
    (_MERGE, _CLEAN): "merge first, and clean when the grace is over"
}


def _require_topics(call: Call, options: ArchiveOptions, at: JobContext) -> None:
    """See that --topics and --exclude name what the tier or the archive has."""
    if not options.topics and not options.exclude:
        return
    from tiered.archive.audit import read_log
    from tiered.archive.job import read_tier

    topics = {archived_queue.topic for archived_queue in read_log(at).queues}
    topics |= {queue.topic for queue in read_tier(at).state.queues}
    call.require_topics("topics", options.topics, topics, options.url)
    call.require_topics("exclude", options.exclude, topics, options.url)


def _require_dry(call: Call, options: ArchiveOptions) -> None:
    """See that what is said to do nothing does nothing."""
    acts = {"--apply": options.apply, "--key-index": options.key_index}
    for name, is_given in acts.items():
        if options.dry_run and is_given:
            do = "leave one of the two out; without --apply, --clean and --repair only plan"
            raise InvalidError(
                f"--dry-run and {name} contradict each other", where=call.path, do=do
            )


def open_context(call: Call, options: ArchiveOptions) -> JobContext:
    """Tier and archive as the options name them."""
    from tiered.api.broker_place import choose_place
    from tiered.archive.job import JobContext
    from tiered.log.lineage import Isolation

    rng, give_up_s = random.SystemRandom(), options.give_up_s
    tier = call.objects(options.url, give_up_s=give_up_s)
    place = choose_place(tier, call.common.cluster, call.common.broker)
    bare, archive = call.both(options.to, give_up_s=give_up_s)
    named, wishes = topic_filter(options.topics, options.exclude), read_wishes_of(options)

    def takes(topic: str) -> bool:
        return named(topic) and bool(call.rules.get(topic, "archive", True))

    isolation = Isolation(options.isolation) if options.isolation else None
    return JobContext(
        tier, place, archive, bare, call.clock, rng, takes, wishes, isolation, give_up_s
    )


def _limits(call: Call, options: ArchiveOptions) -> Limits:
    from tiered.archive.plan import Limits

    bounds = call.ms(options.from_), call.ms(options.until)
    return Limits(*bounds, options.max_bytes, options.max_runtime_ms)


def _plan(call: Call, options: ArchiveOptions, at: JobContext) -> int:
    from tiered.archive.audit import read_log
    from tiered.archive.job import plan_document, plan_job, read_tier, require_possible
    from tiered.archive.plan import limited

    state, reader = read_log(at), read_tier(at)
    every = plan_job(at, state, reader)
    require_possible(at, state, reader.state, every, again=options.decode_again)
    plan = limited(every, _limits(call, options))
    document = plan_document(at, plan)
    show(call, document, rows=document["tasks"], columns=_TASK)
    call.say(
        f"tiered: {counted(len(plan.tasks), 'segment')}, {format_size(plan.size_bytes)} to be archived;"
        " nothing is done"
    )
    return DONE


def _archive(
    call: Call, options: ArchiveOptions, at: JobContext, engine: Engine, watch: JobProgress
) -> int:
    from tiered.archive.job import first_error, run_job, write_metrics

    sealed = _seal(call, options) if options.seal else 0
    metrics, kind = options.metrics_file, options.engine

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

    with call.progress("archive", lambda: progressed(watch)):
        small_bytes = options.pack_below_bytes
        limits, over = _limits(call, options), watch.over(engine)
        result = run_job(
            at,
            over,
            told=told,
            limits=limits,
            small_bytes=small_bytes,
            kind=kind,
            again=options.decode_again,
        )
    unwritten = write(result)
    published, refused = publish_tables(call, options, at, engine)
    document = {**result_document(at, result, sealed=sealed), **published}
    show(call, document, columns=_COLUMNS)
    say_left(call, options, result)
    say_bodies(call, result)
    error = first_error(result) or refused or unwritten
    if error is not None:
        raise error
    return NEEDS_A_PERSON if _needs_a_person(result) else DONE


def _needs_a_person(result: Result) -> bool:
    """Whether something waits for one that the run could not do."""
    is_wrong = bool(result.bad or result.misfits or result.plan.strange or result.harmed)
    is_stale = result.is_extended and bool(result.stale)
    return is_wrong or is_stale or bool(result.remade and result.remade.left)


def _seal(call: Call, options: ArchiveOptions) -> int:
    """Seal what is open, unless a writer is at work, whose business it is."""
    from tiered.errors import FencedError
    from tiered.upkeep.expire import seal_open

    try:
        workplace = open_workplace(call, options.url, give_up_s=options.give_up_s)
        count = seal_open(workplace, topic_filter(options.topics, options.exclude))
    except FencedError as error:
        call.say(f"tiered: nothing is sealed: {error.what}; it seals segments when they roll")
        return 0
    call.say(f"tiered: {counted(count, 'open segment')} sealed")
    return count


def _engine(call: Call, options: ArchiveOptions, at: JobContext, watch: JobProgress) -> Engine:
    """What does the work. Of Spark the session begins with the first of it, and ends with the command."""
    from tiered.upkeep.engine import local_engine

    if options.engine == "local":
        return local_engine(at.context, options.jobs or os.cpu_count() or 1)
    from tiered.archive.job import spark_ahead
    from tiered.spark.driver import SparkOrder, spark_engine

    @functools.cache
    def opened() -> Engine:
        session = options.session(call, is_lean=True)
        watch.ahead = spark_ahead(session)
        order = SparkOrder(options.url, at.place.prefix, options.to, call.s3_options())
        return spark_engine(session, order)

    @contextlib.contextmanager
    def run(
        do: Callable[[WorkContext, T], V], works: Iterable[T]
    ) -> Iterator[Iterator[tuple[T, V | Exception]]]:
        ahead = iter(works)
        for first in ahead:
            with opened()(do, itertools.chain([first], ahead)) as outcomes:
                yield outcomes
            return
        yield iter(())

    return run


def _verify(call: Call, at: JobContext, engine: Engine) -> int:
    from tiered.archive.audit import read_log, verify_archive
    from tiered.archive.clean import LISTED, unnamed_files

    report = verify_archive(at, engine)
    strays = unnamed_files(at.archive, read_log(at))
    rows = [asdict(finding) for finding in report.findings]
    document = {
        "format": 1,
        "archive": at.archive.url,
        **picked(report, "files", "rows", "compared"),
        "findings": rows,
        "unnamed_count": len(strays.ours),
        "unnamed_bytes": sum(one.size_bytes for one in strays.ours),
        "unnamed": [one.key for one in strays.ours[:LISTED]],
        "foreign_count": len(strays.foreign),
        "foreign": strays.foreign[:LISTED],
    }
    show(call, document, rows=rows, columns=_FOUND)
    if strays.ours:
        size = format_size(sum(one.size_bytes for one in strays.ours))
        call.say(
            f"tiered: {counted(len(strays.ours), 'file')}, {size}, that no entry names,"
            " though readers of directories see them: `tiered archive --clean` deletes them after a grace"
        )
    if strays.foreign:
        call.say(
            f"tiered: {counted(len(strays.foreign), 'file')} among them that this program did not make, the first is"
            f" {strays.foreign[0]}"
        )
    call.say(
        f"tiered: {counted(report.rows, 'message')} in {counted(report.files, 'file')},"
        f" {counted(report.compared, 'range', 'ranges')} held against the tier, {counted(len(rows), 'finding')}"
    )
    return NEEDS_A_PERSON if rows else DONE


def read_wishes_of(options: ArchiveOptions) -> BodyWishes:
    """What the options wish."""
    from tiered.archive.body_formats import read_wishes

    return read_wishes(
        options.body,
        options.body_schema,
        options.body_message,
        has_records=options.raw_records,
        read=_read,
    )


def say_bodies(call: Call, result: Result) -> None:
    """Tell what did not become columns."""
    if result.misfits:
        call.say(
            f"tiered: the bodies of {counted(result.misfits, 'message')} did not fit their topic's columns"
            f"{_of_members(result.unfit)}; these are null there, column body_error says so, and _bad/ has the records"
            " with reasons"
        )
    if result.left_out:
        call.say(
            f"tiered: members without a column{_of_members(result.left_out)} are in the bodies alone;"
            " --body-schema gives them columns"
        )
    for stale in result.stale:
        call.say(f"tiered: {stale.said()}")
    if result.remade:
        made = result.remade
        call.say(
            f"tiered: {counted(made.rows, 'row')} of {counted(made.offset_ranges, 'range', 'ranges')} made again,"
            " with all columns"
        )
        for topic, why in made.left:
            call.say(f"tiered: some of {topic} is left as it is: {why}")
    if result.unknown:
        call.say(
            f"tiered: no columns can be inferred for {', '.join(result.unknown)}: no JSON object among the first messages;"
            " give --body-schema"
        )


def _read(name: str) -> bytes:
    try:
        return read_regular(name)
    except OSError as error:
        raise InvalidError(
            f"a schema of bodies cannot be read: {error.strerror}",
            where=name,
            do="name a file for --body-schema",
        ) from None


def _of_members(counts: Counter[tuple[str, str]]) -> str:
    """Topics and members, and how often each, the most frequent first."""
    shown = [f"{topic} {member} ({n:,})" for (topic, member), n in counts.most_common()]
    return f" ({few(shown, _SHOWN)})" if shown else ""


_MERGED = ["planned", "new_files", "old_files", "rows", "old_bytes", "new_bytes", "entries"]
_BUILT = ["objects", "files", "size_bytes"]
_SHOWN = 8
_NEW = ["key", "old_files", "rows", "old_bytes"]


def publish_tables(
    call: Call, options: ArchiveOptions, at: JobContext, engine: Engine
) -> tuple[dict[str, Any], TieredStoreError | None]:
    """Publish the archive if that is asked for; what became of it, for output, and why it ended early."""
    if options.publish is None:
        return {}, None
    from tiered.archive.publish import Destination, publish

    place = Destination.of(options.publish)
    tables = []
    with call.progress("publish", "opening the catalog") as progress:
        try:
            for one in publish(at.archive, place, call.s3_options(), engine):
                tables.append(asdict(one))
                progress.tell(
                    f"{counted(len(tables), 'table')}, the last of {one.topic}", len(tables)
                )
        except TieredStoreError as error:
            return {"published": tables}, error
    return {"published": tables}, None


def run_merge(call: Call, options: ArchiveOptions, at: JobContext, engine: Engine) -> int:
    """Make large files of small ones."""
    from tiered.archive.job import log_writer
    from tiered.archive.merging import merge_each, plan_merge
    from tiered.upkeep.engine import first_failure

    def takes(queue: ArchiveQueue) -> bool:
        is_ours = (queue.cluster, queue.broker) == (at.place.cluster, at.place.broker)
        return is_ours and at.takes(queue.topic)

    log = log_writer(at)
    plan = plan_merge(log.state, takes=takes, small_bytes=options.merge_below_bytes)
    if options.dry_run:
        rows = [
            {
                "key": one.key,
                "old_files": len({row_range.file.key for row_range in one.row_ranges}),
                "rows": sum(row_range.file.rows for row_range in one.row_ranges),
                "old_bytes": sum({p.file.key: p.file.size_bytes for p in one.row_ranges}.values()),
            }
            for one in plan
        ]
        show(
            call, {"format": 1, "archive": at.archive.url, "merges": rows}, rows=rows, columns=_NEW
        )
        return DONE
    with call.progress("merge", f"0 of {counted(len(plan), 'file')}") as progress:

        def told(result: Merged) -> None:
            text = f"{result.new_files} of {counted(result.planned, 'file')}, {format_size(result.new_bytes)}"
            progress.tell(text, result.new_files, result.planned)

        result = merge_each(at, log, plan, engine=engine, told=told)
    published, refused = publish_tables(call, options, at, engine)
    document = {
        "format": 1,
        "archive": at.archive.url,
        **picked(result, *_MERGED),
        "overtaken": result.overtaken,
        "failed": [{"key": one.key, "why": str(error)} for one, error in result.failed],
        "replaced_files": len(log.state.replaced),
        "replaced_bytes": sum(one.size_bytes for one in log.state.replaced),
        **published,
    }
    show(call, document, columns=_MERGED)
    if log.state.replaced:
        call.say(
            f"tiered: {counted(document['replaced_files'], 'replaced file')}, {format_size(document['replaced_bytes'])},"
            " still there; `tiered archive --clean` deletes them after a grace"
        )
    error = first_failure(result.failed) or refused
    if error is not None:
        raise error
    return DONE


def run_clean(call: Call, options: ArchiveOptions, at: JobContext, engine: Engine) -> int:
    """Delete what counts for nobody: plan, then apply."""
    from tiered.archive.clean import WHAT, apply_clean, plan_clean
    from tiered.archive.job import log_writer

    log = log_writer(at)
    grace_ms, limit = options.grace_ms, options.max_deletions
    plan = get_plan(
        options, WHAT, at, lambda: plan_clean(at, log.state, grace_ms=grace_ms, limit=limit)
    )
    applied, expired = None, {}
    if options.apply and plan["deletions"]:
        expired = _expire_snapshots(call, options, at, engine, plan["grace_ms"])
        applied = apply_clean(at, log, plan)
    rows = [
        {"key": key, "size_bytes": size, "since_ms": at_ms, "kind": kind}
        for key, size, at_ms, kind in plan["deletions"]
    ]
    shown = {**plan, "applied": applied, **expired, "deletions": rows}
    return show_plan(
        call, options, shown, ("deletions", ["key", "size_bytes", "since_ms", "kind"]), _lines
    )


def _expire_snapshots(
    call: Call, options: ArchiveOptions, at: JobContext, engine: Engine, grace_ms: int
) -> dict[str, Any]:
    """Bring tables up to date, and take snapshots away that name what is to be deleted; nothing without ``--publish``."""
    published, refused = publish_tables(call, options, at, engine)
    if refused is not None:
        raise refused  # before anything is deleted: the table may still name it
    if options.publish is None:
        return {}
    from tiered.archive.publish import Destination, expire_snapshots

    before_ms = call.clock.now_ms() - grace_ms
    place = Destination.of(options.publish)
    found = dict(expire_snapshots(at.archive, place, call.s3_options(), before_ms))
    return {**published, "expired_snapshots": found}


def _lines(document: Document) -> Iterator[str]:
    size = format_size(document["deletion_bytes"])
    kinds = Counter(row["kind"] for row in document["deletions"])
    told = ", ".join(f"{format_count(count)} {kind}" for kind, count in sorted(kinds.items()))
    yield f"plan      {counted(document['deletion_count'], 'file')}, {size}{f' ({told})' if told else ''}"
    yield f"grace     {format_duration(document['grace_ms'])}"
    for refusal in document.get("refusals", ())[:_SHOWN]:
        yield f"harmed    {refusal}"
    if document["young"]:
        yield f"left      {format_count(document['young'])} replaced within the grace"
    if document["unnamed_count"]:
        yield (
            f"left      {counted(document['unnamed_count'], 'file')}, {format_size(document['unnamed_bytes'])}, that"
            " no entry names, written within the grace: of a job at work, or of one that was killed"
        )
    if document["foreign_count"]:
        yield (
            f"foreign   {counted(document['foreign_count'], 'file')} that this program did not make, never deleted:"
            f" {', '.join(document['foreign'][:3])}"
        )
    if document["is_cut"]:
        yield "limit     there is more than --max-deletions allows in one run"
    if applied := document["applied"]:
        yield (
            f"deleted   {counted(applied['deleted'], 'file')}, {format_size(applied['deleted_bytes'])}"
            f" (already gone: {applied['already_gone']})"
        )


_REPAIRS = ["key", "what", "rows", "size_bytes"]


def run_repair(call: Call, options: ArchiveOptions, at: JobContext, engine: Engine) -> int:
    """Make harmed files again: plan, then apply."""
    from tiered.archive.audit import REPAIR, apply_repair, plan_repair
    from tiered.archive.job import log_writer

    log = log_writer(at)
    with call.progress("repair", "looking at the files") as progress:
        plan = get_plan(
            options, REPAIR, at, lambda: plan_repair(at, log.state, engine, by_bytes=options.verify)
        )
        applied = None
        has_work = bool(plan["repairs"] or plan["remains"] or plan["derived"])
        if options.apply and has_work:
            progress.tell(f"making {counted(len(plan['repairs']), 'file')}")
            applied = apply_repair(at, log, plan, engine)
    document = {**plan, "applied": applied.document() if applied else None}
    code = show_plan(
        call, options, document, ("repairs", _REPAIRS), _repair_lines, has_work=has_work
    )
    return NEEDS_A_PERSON if applied and applied.failed else code


def _repair_lines(document: Document) -> Iterator[str]:
    yield f"plan      {counted(len(document['repairs']), 'file')} to be made again from the tier"
    if document["remains"]:
        yield f"remains   {counted(len(document['remains']), 'harmed file')} of a repair that was killed, to be deleted"
    for key, what in document["derived"][:_SHOWN]:
        yield f"derived   {key}: {what}; to be taken away, and made again by --key-index or `tiered compact --archive`"
    for refusal in document["refusals"][:_SHOWN]:
        yield f"lost      {refusal}"
    if applied := document["applied"]:
        yield (
            f"made      {counted(applied['made'], 'file')}, {counted(applied['rows'], 'message')};"
            f" {counted(applied['deleted'], 'harmed file')} deleted"
        )
        if document["derived"]:
            yield f"taken     {counted(applied['taken_away'], 'derived object or table', 'derived objects and tables')}"
        for one in applied["failed"][:_SHOWN]:
            yield f"failed    {one['key']}: {one['why']}"


def run_key_index(call: Call, at: JobContext, engine: Engine) -> int:
    """Cover the files that no object of the index covers yet."""
    from tiered.archive.lookup import build
    from tiered.archive.tables import read_archive
    from tiered.upkeep.engine import first_failure

    with call.progress("key index", "0 files") as progress:

        def told(built: Built) -> None:
            progress.tell(f"{counted(built.files, 'file')}, {format_size(built.size_bytes)}")

        built = build(at.archive, read_archive(at.archive), engine, told=told)
    document = {
        "format": 1,
        "archive": at.archive.url,
        **picked(built, *_BUILT),
        "failed": [{"key": key, "why": str(error)} for key, error in built.failed],
    }
    show(call, document, columns=_BUILT)
    error = first_failure(built.failed)
    if error is not None:
        raise error
    return DONE


def progressed(watch: JobProgress) -> Progressed:
    """How far a job is."""
    if not watch.segments_all:
        return Progressed("reading the logs")
    ahead = watch.ahead()
    left_s = watch.seconds_left
    left = "" if left_s is None else f", {format_duration(1000 * round(left_s))} left"
    more = f" (and {counted(ahead, 'task')} under way)" if ahead else ""
    text = (
        f"{format_count(watch.segments)} of {counted(watch.segments_all, 'segment')}{more},"
        f" {counted(watch.rows, 'message')},"
        f" {format_size(watch.size_bytes)} of {format_size(watch.bytes_all)}{left}"
    )
    return Progressed(text, watch.size_bytes, watch.bytes_all)


def say_left(call: Call, options: ArchiveOptions, result: Result) -> None:
    """What was not archived, and why."""
    plan = result.plan
    known = plan.tasks or plan.opened or plan.archived_segments or plan.outside or plan.postponed
    if options.topics and not known:
        call.say("tiered: the tier has nothing of the topics that --topics and --exclude leave")
    if plan.opened:
        messages = sum(one.end - one.start for one in plan.opened)
        call.say(
            f"tiered: {counted(messages, 'message')} of {counted(len(plan.opened), 'queue')}, not sealed, so not archived;"
            " segments are sealed when full or old, by `tiered attach --once --seal`, or by --seal here while"
            " nothing is attached"
        )
    if plan.strange:
        queue, start = plan.strange[0]
        call.say(
            f"tiered: {counted(len(plan.strange), 'segment counts', 'segments count')} as archived, but"
            f" the archive has messages of other times there, the first of {queue} at {start}: it has another"
            " broker's of the same name, so this one needs"
            " an archive of its own"
        )
    if result.harmed:
        key, what = next(iter(result.harmed.items()))
        call.say(
            f"tiered: {counted(len(result.harmed), 'file')} of the archive lost or cut, the first {key}: {what};"
            " `tiered archive --repair` makes them again from the tier"
        )
    if result.damaged_messages:
        places = [f"{one.queue} [{one.start}, {one.end})" for one in result.damaged]
        call.say(
            f"tiered: {counted(result.damaged_messages, 'message')} in"
            f" {counted(len(result.damaged), 'range', 'ranges')} not archived, since the tier is damaged there"
            f" ({few(places, _SHOWN)}); the rest is archived, and once `tiered verify URL --deep --repair` has"
            " mended the tier, the same command archives these"
        )
    if plan.outside:
        call.say(
            f"tiered: {counted(plan.outside, 'segment lies', 'segments lie')} outside of --from and --until"
        )
    later = plan.postponed + result.not_begun
    if later:
        call.say(f"tiered: {counted(later, 'segment is', 'segments are')} left to the next run")


def result_document(at: JobContext, result: Result, *, sealed: int) -> dict[str, Any]:
    """What a run did."""
    from tiered.archive.job import plan_head, queue_row

    return {
        **plan_head(at, result.plan),
        "run": result.run,
        "sealed": sealed,
        "by_others": result.overtaken,
        **picked(result, *_COLUMNS),
        "columns_unknown": result.unknown,
        "left_out": _member_rows(result.left_out, "values"),
        "unfit": _member_rows(result.unfit, "rows"),
        "stale": [asdict(one) for one in result.stale],
        "remade": asdict(result.remade) if result.remade else None,
        "postponed": result.plan.postponed + result.not_begun,
        "open": [queue_row(one) for one in result.plan.opened],
        "harmed": [{"key": key, "what": what} for key, what in result.harmed.items()],
        "damaged_messages": result.damaged_messages,
        "failed": [
            {"queue": str(task.queue), "start": task.start, "end": task.end, "why": str(error)}
            for task, error in result.failed
        ],
    }


def _member_rows(counts: Counter[tuple[str, str]], what: str) -> list[dict[str, Any]]:
    return [
        {"topic": topic, "member": member, what: count}
        for (topic, member), count in sorted(counts.items())
    ]
