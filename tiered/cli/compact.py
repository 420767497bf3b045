"""``tiered compact``: of each key of a topic the newest message stays; plan, then apply."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass, picked
from tiered.cli import kinds
from tiered.cli.archive import SparkOptions
from tiered.cli.frame import command
from tiered.cli.options import flag, option, several
from tiered.cli.planned import (
    Document,
    PlanOptions,
    broker_topics,
    done_now,
    open_workplace,
    show_plan,
    typed_plan,
)
from tiered.cli.values import counted, format_count, format_size
from tiered.errors import DataError, InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ObjectStore
    from tiered.cli.call import Call
    from tiered.model import MessageQueue
    from tiered.upkeep.compact import CompactPlan, CompactSettings
    from tiered.upkeep.engine import Engine
    from tiered.upkeep.workplace import Workplace

_COLUMNS = [
    *("topic", "queue_id", "start", "dirty_from", "end"),
    *("messages", "gone_messages", "keys", "gone_bytes"),
]
_LATEST_COLUMNS = ["topic", "has_work", "files", "rows", "latest_rows"]
MIB = 1 << 20
SPARK_BUNDLES = 256
"""So many are made before they are named: tasks of Spark make them side by side."""


@dataclass(frozen=True, kw_only=True)
class CompactOptions(PlanOptions, SparkOptions):
    """What ``tiered compact`` can be told."""

    topic: tuple[str, ...] = several("topics to compact", kinds.Kind("TOPIC,...", str))
    store: str | None = option(
        "also topics of this store whose cleanup.policy is COMPACTION",
        kinds.DIR,
    )
    engine: str = option(
        "this process, or Spark",
        kinds.one_of("ENGINE", "local", "spark"),
        default="local",
    )
    across_queues: bool = flag(
        "keep a key's newest message of all queues, by store time, not of each queue"
    )
    archive: str | None = option(
        "update this archive's table of newest rows instead of the tier",
        kinds.URL,
    )
    policy: str = option(
        "messages without a key stay; go; or go, and tombstones at once",
        kinds.one_of("NAME", "careful", "kafka", "rocketmq"),
        default="careful",
    )
    tombstones_ms: int | None = option(
        "how long an empty body, which deletes its key, stays readable",
        kinds.DURATION_MS,
        default_text="24h; with --policy rocketmq 0s",
    )
    dirty_ratio: float = option(
        "compact a queue when more than this share is new",
        kinds.SHARE,
        default=0.5,
    )
    min_lag_ms: int = option("leave younger messages alone", kinds.DURATION_MS, default=0)
    max_lag_ms: int | None = option(
        "compact after this long, whatever the ratio",
        kinds.DURATION_MS,
    )
    map_bytes: int = option(
        "memory for keys, 160 bytes each; more keys take further rounds",
        kinds.SIZE,
        name="map-size",
        default=256 * MIB,
    )
    compress: str = option(
        "compression: zstd, zstd:LEVEL or none",
        kinds.Kind("HOW", kinds.compression),
        default="zstd",
    )


@command("compact", CompactOptions)
def run(call: Call, options: CompactOptions) -> int:
    """Keeps the newest message of each key: plan, then apply.

    Only sealed segments are compacted. Queue offsets never change: reading a removed one gives the next message. It can
    run beside `attach`.

    Examples:
        tiered compact s3://bucket/prefix --topic prices --archive s3://bucket2/parquet --apply -
        tiered compact s3://bucket/prefix --topic prices --dirty-ratio 0 --apply -
    """
    if options.archive:
        return _latest(call, options, options.archive)
    from tiered.upkeep.compact import Compactor, CompactPlan

    applied = None
    at = open_workplace(call, options.url, give_up_s=options.give_up_s)
    with call.progress("compact", "reading the journal") as progress:

        def told(queue: MessageQueue, at: int, end: int) -> None:
            progress.tell(f"{queue}, queue offset {format_count(at)} of {format_count(end)}")

        engine = _engine(call, options, at)
        bundles = 1 if engine is None else SPARK_BUNDLES
        compactor = Compactor(at, settings_of(options), tell=told, engine=engine, bundles=bundles)
        plan = typed_plan(
            options,
            CompactPlan,
            "compact",
            at,
            lambda: compactor.plan(_topics(call, options, at, partial(_tiered, at))),
        )
        _require_same(options, plan)
        if options.apply and plan.steps:
            applied = compactor.apply(plan)
    document = {**plan.document(), "applied": applied}
    code = show_plan(call, options, document, (plan.ROWS, _COLUMNS), _lines)
    _require_sound(plan, at.store.url)
    return code


def _require_sound(plan: CompactPlan, url: str) -> None:
    """End with damage that a plan met, when all else is done."""
    if not plan.damaged:
        return
    count = sum(row.end - row.start for row in plan.damaged)
    queues = sorted({str(row.queue) for row in plan.damaged})
    raise DataError(
        f"{counted(count, 'message')} of {', '.join(queues)} cannot be read; from their segments on nothing is compacted",
        where=url,
        do="`tiered verify URL --deep --store STORE --repair` mends what it can; compact again then",
    )


def _latest(call: Call, options: CompactOptions, url: str) -> int:
    """Bring the tables of newest rows of an archive up to date."""
    from tiered.archive.latest import plan_latest, update_latest

    if options.plan or options.apply not in {None, "-"}:
        raise InvalidError(
            "with --archive there are no plans in files",
            do="leave --plan out; --apply - carries out what is due",
        )
    if options.engine != "local":
        raise InvalidError("--archive is of the local engine", do="leave --engine out")
    rows, updated = [], 0
    at = open_workplace(call, options.url, give_up_s=options.give_up_s)
    archive = call.objects(url, give_up_s=options.give_up_s)
    for topic in _topics(call, options, at, partial(_archived, archive)):
        plan = plan_latest(archive, at.place, topic, across_queues=options.across_queues)
        row = plan.document()
        if options.apply and plan.has_work:
            made = update_latest(archive, plan, call.clock, at.new_id())
            files = [key for key, *_ in made.files]
            row |= {"latest_rows": made.rows, "latest_files": files}
            updated += 1
        rows.append(row)
    document = {
        "format": 1,
        "what": "latest",
        **picked(at.place, "cluster", "broker"),
        "archive": url,
        "topics": rows,
        "applied": {"topics": updated} if options.apply else None,
    }
    return show_plan(
        call,
        options,
        document,
        ("topics", _LATEST_COLUMNS),
        _latest_lines,
        has_work=any(row["has_work"] for row in rows),
    )


def _latest_lines(document: Document) -> Iterator[str]:
    for row in document["topics"]:
        what = "has what is newest" if not row["has_work"] else "is to be made anew"
        if document["applied"]:
            what = f"has {counted(row['latest_rows'], 'row')} of {format_count(row['rows'])}"
        yield f"latest    {row['topic']}: {what}; {counted(row['files'], 'file')} of the history looked at"
        for key in row["latest_files"]:
            yield f"file      {key}"


def _engine(call: Call, options: CompactOptions, at: Workplace) -> Engine | None:
    if options.engine == "local":
        return None
    from tiered.spark.driver import SparkOrder, spark_engine

    order = SparkOrder(options.url, at.place.prefix, None, call.s3_options())
    return spark_engine(options.session(call, is_lean=True), order)


def settings_of(options: CompactOptions) -> CompactSettings:
    """What the options come to."""
    from tiered.compaction.passes import NEVER_MS, POLICIES, PassSettings
    from tiered.upkeep.compact import CompactSettings

    retention = POLICIES[options.policy]
    if options.tombstones_ms is not None:
        retention = replace(retention, tombstone_retention_ms=options.tombstones_ms)
    longest_ms = NEVER_MS if options.max_lag_ms is None else options.max_lag_ms
    return CompactSettings(
        retention,
        PassSettings(options.dirty_ratio, options.min_lag_ms, longest_ms),
        options.map_bytes,
        kinds.compression_of(options.compress),
        options.across_queues,
    )


def _topics(
    call: Call,
    options: CompactOptions,
    at: Workplace,
    there: Callable[[frozenset[str]], set[str]],
) -> list[str]:
    """Topics that are named, or that their store or the rules of the configuration file say are of this kind."""
    named = set(options.topic)
    if options.store:
        named |= there(broker_topics(options.store).compacted)
    if any("compact" in said for _, said in call.rules.rows):
        ruled = {
            queue.topic: call.rules.get(queue.topic, "compact")
            for queue in at.reader().state.queues
        }
        named |= there(frozenset(topic for topic, is_wanted in ruled.items() if is_wanted))
        named -= {topic for topic, is_wanted in ruled.items() if is_wanted is False} - {
            *options.topic
        }
    if not named:
        raise InvalidError(
            "no topic is to be compacted",
            where=call.path,
            do="name one with --topic, or a store directory with --store",
        )
    return sorted(named)


def _tiered(at: Workplace, topics: frozenset[str]) -> set[str]:
    return {queue.topic for queue in at.reader().state.queues} & topics


def _archived(archive: ObjectStore, topics: frozenset[str]) -> set[str]:
    from tiered.archive.selection import shown
    from tiered.archive.tables import read_archive

    there = {shown(queue.topic) for queue in read_archive(archive).queues}
    return {topic for topic in topics if shown(topic) in there}


def _require_same(options: CompactOptions, plan: CompactPlan) -> None:
    """Raise when a plan that was loaded is of other topics, or keeps other messages."""
    settings = settings_of(options)
    mine = settings.retention.name, settings.retention.tombstone_retention_ms
    if mine != (plan.policy, plan.tombstone_retention_ms):
        raise InvalidError(f"this plan is of the policy {plan.policy}", do="give the same options")
    if options.across_queues != plan.across_queues:
        raise InvalidError(
            "this plan is of "
            + ("all queues of a topic together" if plan.across_queues else "each queue by itself"),
            do="give the same options",
        )
    if options.topic and not set(options.topic) <= set(plan.topics):
        raise InvalidError(f"this plan is of {', '.join(plan.topics)}", do="plan again")


def _lines(document: Document) -> Iterator[str]:
    yield (
        f"plan      {counted(document['gone_messages'], 'message')} of"
        f" {format_count(document['messages'])} go, {format_size(document['gone_bytes'])} of"
        f" {format_size(document['log_bytes'])}; {counted(document['keys'], 'key')}"
        f" in {counted(len(document['steps']), 'queue')}"
    )
    if document["steps"]:
        yield (
            f"costs     {counted(document['requests'], 'request')}, {format_size(document['rewritten_bytes'])}"
            f" written again; on S3 {document['dollars']:.4f} dollars,"
            f" and {document['saved_dollars_month']:.4f} less a month"
        )
    keyless = sum(step["keyless"] for step in document["steps"])
    if keyless:
        what = "stay" if document["keeps_keyless"] else "go"
        yield f"look out  {counted(keyless, 'message')} without a key {what} (--policy)"
    for row in document.get("spread", ()):
        yield (
            f"look out  {row['topic']}: {format_count(row['keys'])} of {counted(row['of_keys'], 'key')} looked at"
            " went to several queues; each queue keeps its own newest message (--across-queues: one of them does)"
        )
    for row in document["damaged"]:
        yield (
            f"damaged   {row['topic']}/{row['queue_id']} [{row['start']}, {row['end']}): {row['why']}; from queue offset"
            f" {row['segment']} on this queue stays as it is"
        )
    for row in document["left"]:
        yield f"stays     {row['topic']}/{row['queue_id']}: {row['due']} ({row['dirty_ratio']:.0%} is new)"
    if applied := done_now(document):
        yield (
            f"done      {counted(applied['steps'], 'queue')} (done before: {applied['already_done']}),"
            f" {counted(applied['bundles'], 'object')} written, {format_size(applied['stored_bytes'])};"
            " `tiered gc` deletes the old ones after its grace"
        )
