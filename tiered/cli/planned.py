"""Plan, then apply: ``gc``, ``expire``, ``delete-topic`` and ``truncate``, and what others share with them.

Without an option the plan is shown. ``--plan FILE`` saves it as well, ``--apply FILE`` carries out exactly that one, and
``--apply -`` plans and carries out in one go.
"""

from __future__ import annotations

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from backends.lazy_dataclass import dataclass
from tiered.cli import kinds
from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import command
from tiered.cli.options import BrokersOptions, PatienceOptions, argument, flag, option, several
from tiered.cli.output import Table, show
from tiered.cli.values import (
    counted,
    format_count,
    format_duration,
    format_size,
    format_time,
    topic_filter,
)
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tiered.api.broker_place import Place
    from tiered.archive.task import JobContext
    from tiered.cli.call import Call
    from tiered.local.layout import Topics
    from tiered.model import MessageQueue
    from tiered.upkeep.expire import ExpirePlan, ExpiryProof, TruncatePlan
    from tiered.upkeep.gc import GcPlan
    from tiered.upkeep.workplace import AnyPlan, PlanDocument, Workplace

Document = dict[str, Any]
T = TypeVar("T")
HOUR_MS = 3_600_000


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PatienceOptions):
    """What every command can be told that plans first, and then applies."""

    url: str = argument()
    plan: str | None = option(
        "save the plan here",
        kinds.FILE,
        default_text="the plan is only shown",
    )
    apply: str | None = option(
        "carry out this plan; -: plan and apply",
        kinds.FILE,
    )
    exit_code: bool = flag("exit with code 1 if the plan has work")


def open_workplace(
    call: Call,
    url: str,
    *,
    give_up_s: float,
    signs: Sequence[str] | None = None,
    timers: bool = False,
) -> Workplace:
    """The one broker's tier that is meant, or its timers.

    Args:
        signs: See ``find_places``; None: the usual ones.
        timers: Its timers, which lie apart, are meant.
    """
    from tiered.api.broker_place import SIGNS, TIMER_ANY_SIGN, choose_place, choose_timers
    from tiered.upkeep.workplace import Workplace

    meter, store = call.both(url, give_up_s=give_up_s)
    names = call.common.cluster, call.common.broker
    if timers:
        place: Place = choose_timers(store, *names, TIMER_ANY_SIGN)
    else:
        place = choose_place(store, *names, signs=signs or SIGNS)
    return Workplace(store, meter, place, call.clock, random.SystemRandom(), give_up_s)


def plan_or_file(
    options: PlanOptions,
    make: Callable[[], T],
    load: Callable[[str], T],
    save: Callable[[str, T], None],
) -> T:
    """The plan of the file that is to be applied, or a new one; saved if that is asked for."""
    if options.apply and options.plan:
        raise InvalidError("--plan and --apply contradict each other", do="give one of them")
    if options.apply and options.apply != "-":
        return load(options.apply)
    plan = make()
    if options.plan:
        save(options.plan, plan)
    return plan


def get_plan(
    options: PlanOptions, what: str, at: Workplace | JobContext, make: Callable[[], PlanDocument]
) -> PlanDocument:
    """As ``plan_or_file``, of plans that are documents."""
    from tiered.upkeep.workplace import load_plan, save_plan

    return plan_or_file(options, make, lambda path: load_plan(path, what, at.place), save_plan)


def typed_plan(
    options: PlanOptions, kind: type[AnyPlan], what: str, at: Workplace, make: Callable[[], AnyPlan]
) -> AnyPlan:
    """As ``get_plan``, of a kind of plan."""
    document = get_plan(options, what, at, lambda: make().document())
    return kind.of(document, options.apply or "")


def require_within(limit: int, count: int) -> None:
    """Refuse a plan that gives up more objects than one run may."""
    if count > limit:
        raise InvalidError(
            f"this plan has {count} objects, and --max-deletions is {limit}",
            do="raise --max-deletions, or plan again with less",
        )


def show_plan(
    call: Call,
    options: PlanOptions,
    document: Document,
    table: tuple[str, Sequence[str]],
    lines: Callable[[Document], Iterable[str]],
    *,
    has_work: bool | None = None,
) -> int:
    """Print a plan and what came of it (``applied``, ``erased``), in the form that was asked for; the exit code.

    Args:
        table: What the plan's steps are called in the document, and their columns.
        lines: What else there is to say of it, to people.
        has_work: Carrying it out changes something; None: when it has steps.
    """
    applied, rows = document["applied"], document[table[0]]
    was_erased = document.get("erased") or document.get("old_versions", {}).get("was_deleted")
    is_open = applied is None and not was_erased
    is_due = is_open and bool(rows if has_work is None else has_work)

    def for_people() -> Iterator[str | Table]:
        yield f"{document['cluster']}/{document['broker']}"
        yield from (f"  {line}" for line in lines(document))
        if applied and applied.get("was_applied"):
            yield "  result    this plan was applied before"
        if is_due:
            yield "  nothing is changed; --apply - does it"
        if is_open and rows:
            yield ""
            yield Table(rows, table[1])

    show(call, document, rows=rows, columns=table[1], lines=for_people())
    if call.form in {"jsonl", "csv"}:
        _say_what_rows_do_not(call, document)
    waits = document.get("refusals") or (is_due and options.exit_code)
    return NEEDS_A_PERSON if waits else DONE


def done_now(document: Document) -> Document | None:
    """What was carried out; None: nothing, now or ever, or all of it before."""
    applied: Document | None = document["applied"]
    return None if applied is None or applied.get("was_applied") else applied


def _say_what_rows_do_not(call: Call, document: Document) -> None:
    """What a person is needed for, and was not done; no row of a plan tells it."""
    said = [f"refused: {refusal}" for refusal in document.get("refusals", ())]
    stays = (document.get("erased") or {}).get("stays", ())
    damaged = (document["applied"] or {}).get("damaged", ())
    said += [f"stays: {one['key']}: {one['reason']}" for one in stays]
    said += [f"damaged: {one['queue']}: {one['reason']}" for one in damaged]
    for line in said:
        call.say(f"tiered: {line}", level="warning")


TIMERS_TEXT = "timers instead of topics"
GC_THREADS = 8
_LEFT_BY_GC = {
    "present_epoch": "of the present epoch, which only its writer may still name",
    "within_grace": "named or written within the grace",
    "uncovered": "of which the journal's history does not tell when they were named last",
    "unknown_age": "of unknown age",
    "over_limit": "beyond --max-deletions",
    "quarantine": "damaged records in quarantine",
    "unknown": "of unknown keys",
}


@dataclass(frozen=True, kw_only=True)
class FleetPlanOptions(PlanOptions, BrokersOptions):
    """What those can be told that also go over several brokers."""

    def of_one_broker(self) -> list[str]:
        """A plan file is of one tier."""
        asked = {"plan": self.plan, "apply": self.apply not in {None, "-"} and self.apply}
        return [name for name, value in asked.items() if value]


@dataclass(frozen=True, kw_only=True)
class GcOptions(FleetPlanOptions):
    """What ``tiered gc`` can be told."""

    broker_columns: ClassVar = ("deletion_count", "deletion_bytes", "applied")

    max_deletions: int = option("maximum objects per run", kinds.COUNT, default=10_000)
    grace_ms: int = option(
        "delete only what has been unreachable this long; longer than your longest read",
        kinds.DURATION_MS,
        default=24 * HOUR_MS,
    )
    timers: bool = flag(TIMERS_TEXT)
    erase: bool = flag(
        "also rewrite objects with expired and live messages; no writer may be attached"
    )


@command("gc", GcOptions)
def run_gc(call: Call, options: GcOptions) -> int:
    """Deletes what no reader can reach: plan, then apply.

    Examples:
        tiered gc s3://bucket/prefix
        tiered gc file:///tmp/tier --erase --apply -
    """
    from tiered.journal.replay import JournalBytes
    from tiered.upkeep.gc import GcPlan, apply_erasure, apply_gc, plan_gc

    limit = options.max_deletions
    applied = erased = None
    at = open_workplace(call, options.url, give_up_s=options.give_up_s, timers=options.timers)
    with (
        call.progress("gc", "listing, and reading the journal") as progress,
        ThreadPoolExecutor(GC_THREADS, "tiered-gc") as executor,
    ):

        def told(what: str, count: int, total: int) -> None:
            progress.tell(f"{count} of {total} objects {what}", count, total)

        journal = JournalBytes(executor)
        what = "gc --timers" if options.timers else "gc"

        def make() -> GcPlan:
            return plan_gc(
                *(at.store, at.place, at.clock),
                grace_ms=options.grace_ms,
                max_deletions=limit,
                journal=journal,
                what=what,
                erases=options.erase,
                executor=executor,
            )

        plan = typed_plan(options, GcPlan, what, at, make)
        _require_as_planned(options, plan, is_grace_given=call.is_given("gc.grace"))
        erases_now = bool(plan.erases and options.apply and not plan.refusals)
        # Before anything is rewritten: what may not be erased for good is not said to be.
        old = versions_kept(call, at, options.url, looks=plan.erases and not plan.refusals)
        if options.apply:
            require_within(limit, len(plan.steps))
        if options.apply and plan.erasures:
            erased = apply_erasure(at, plan, told=partial(told, "rewritten"))
        if options.apply and plan.steps:
            deleted = partial(told, "deleted")
            applied = apply_gc(at, plan, executor=executor, journal=journal, told=deleted)
        if erases_now:
            old = versions_kept(call, at, options.url, looks=True, deletes=True)
    document = {**plan.document(), "erased": erased, "applied": applied, "old_versions": old}
    has_work = bool(plan.steps or plan.erasures or old["versions"])
    columns = ["kind", "size_bytes", "key"]
    code = show_plan(call, options, document, (plan.ROWS, columns), _gc_lines, has_work=has_work)
    return NEEDS_A_PERSON if erased is not None and erased["stays"] else code


def versions_kept(
    call: Call, at: Workplace, url: str, *, looks: bool = False, deletes: bool = False
) -> Document:
    """Whether the bucket keeps what is deleted as old versions, as it stands in documents.

    Args:
        looks: Count those of deleted objects; else only whether there can be any is told, as far as the bucket lets us know.

    Raises:
        BackendError: With ``looks``: the bucket does not tell, or a permission is missing.
    """
    from backends.errors import BackendError, ConfigurationError
    from backends.s3_bucket import open_versions
    from tiered.upkeep.gc import OldVersions, look_for_versions

    try:
        bucket = open_versions(url, call.s3_options())
        if bucket is None:
            return OldVersions("").document()
        with contextlib.closing(bucket):
            if looks:
                return look_for_versions(at, bucket, deletes=deletes).document()
            return OldVersions(bucket.status()).document()
    except (BackendError, ConfigurationError):
        if looks:
            raise
        return OldVersions(None).document()


def version_lines(document: Document) -> Iterator[str]:
    """What is to be said of them."""
    old = document["old_versions"]
    if not old["versioning"]:
        return
    keeps = f"the bucket has versioning ({old['versioning'].lower()})"
    gc = "gc --timers" if document["what"].endswith("--timers") else "gc"
    if old["was_deleted"]:
        count = counted(old["versions"], "old version")
        yield f"versions  {count}, {format_size(old['version_bytes'])}, of deleted objects are gone for good"
    elif old["versions"] is not None:
        count, size = counted(old["versions"], "old version"), format_size(old["version_bytes"])
        yield f"versions  {keeps}: {count}, {size}, of deleted objects are to be deleted for good"
    else:
        yield (
            f"versions  {keeps}: what is deleted stays as old versions, can be read, and costs, until"
            f" `tiered {gc} --erase` or a lifecycle rule deletes them"
        )


def _require_as_planned(options: GcOptions, plan: GcPlan, *, is_grace_given: bool) -> None:
    """Raise when an option is given with a plan file that was made without it."""
    if options.erase and not plan.erases:
        raise InvalidError(
            "this plan was made without --erase", where=options.apply or "", do="plan again"
        )
    if is_grace_given and plan.grace_ms != options.grace_ms:
        raise InvalidError(
            f"this plan has a grace of {format_duration(plan.grace_ms)}",
            where=options.apply or "",
            do="leave --grace out, or plan again",
        )


def _gc_lines(document: Document) -> Iterator[str]:
    kinds = ", ".join(f"{format_count(n)} {kind}" for kind, n in document["kinds"].items())
    size = format_size(document["deletion_bytes"])
    count = document["deletion_count"]
    yield f"plan      {counted(count, 'object')}, {size}" + (f" ({kinds})" if kinds else "")
    yield f"grace     {format_duration(document['grace_ms'])}"
    if document["takes_epoch"]:
        yield "epoch     no writer is alive: applying takes an epoch, so that nothing can be named any more"
    for name, text in _LEFT_BY_GC.items():
        if document["left"][name]:
            yield f"left      {format_count(document['left'][name])} {text}"
    for key in document["left"]["unknown_keys"]:
        yield f"unknown   {key}"
    for refusal in document["refusals"]:
        yield f"refused   {refusal}"
    yield from _erasure_lines(document)
    if applied := done_now(document):
        yield (
            f"deleted   {counted(applied['deleted'], 'object')},"
            f" {format_size(applied['deleted_bytes'])}"
            f" (already gone: {applied['already_gone']}; too young by the store's clock:"
            f" {applied['left_young']})"
        )
    yield from version_lines(document)


def _erasure_lines(document: Document) -> Iterator[str]:
    """What was given up and lies beside what was not; and what became of it."""
    shared, erased = document["given_up_bundles"], document["erased"]
    if shared:
        yield (
            f"given up  {format_size(document['given_up_bytes'])} of messages that were given up lie in"
            f" {counted(shared, 'object')} beside others"
            + (
                ""
                if document["erases"]
                else f"; `tiered {document['what']} --erase` rewrites these"
            )
        )
    if document["erasures"] and erased is None:
        size = format_size(sum(row["size_bytes"] for row in document["erasures"]))
        yield f"erase     {counted(len(document['erasures']), 'object')}, {size}, to be rewritten without them"
        if document["is_writer_alive"]:
            yield "writer    one is at work, so --apply refuses until it is stopped (`tiered lease` shows it)"
    if erased is None:
        return
    if erased["was_applied"]:
        yield "erased    this plan was applied before"
    else:
        yield (
            f"erased    {format_size(erased['given_up_bytes'])} in {counted(erased['bundles'], 'object')}"
            f" (done before: {erased['already_done']}); what was beside it lies in"
            f" {counted(erased['made'], 'new object')}, {format_size(erased['made_bytes'])}"
        )
    for row in erased["stays"]:
        yield f"stays     {row['key']}: {row['reason']}"
    if erased["bundles"]:
        yield (
            f"to come   the old objects hold it still, for readers at work: `tiered gc` deletes them from"
            f" {format_time(erased['gone_after_ms'])} on (grace {format_duration(document['grace_ms'])})"
        )


_SHOWN = 8
_GIVEN_UP_COLUMNS = [
    "topic",
    "queue_id",
    "incarnation",
    "min_from",
    "min_to",
    "messages",
    "segments",
]


@dataclass(frozen=True, kw_only=True)
class GiveUpOptions(PlanOptions):
    """What both can be told that give up messages."""

    max_deletions: int = option("maximum objects per run", kinds.COUNT, default=10_000)


@dataclass(frozen=True, kw_only=True)
class DeleteTopicOptions(GiveUpOptions):
    """What ``tiered delete-topic`` can be told."""

    topic: str = argument()


@dataclass(frozen=True, kw_only=True)
class ExpireOptions(GiveUpOptions, FleetPlanOptions):
    """What ``tiered expire`` can be told."""

    broker_columns: ClassVar = ("messages", "segments", "size_bytes", "applied")

    topics: tuple[str, ...] = several("only these topics", kinds.GLOBS)
    ttl_ms: int | None = option(
        "expire segments whose newest message is older",
        kinds.DURATION_MS,
        default_text="none: only topics of --topic-ttl and --store",
    )
    archived: bool = flag("only segments in --archive, whose files are read and checked")
    archive: str | None = option("the archive", kinds.URL)
    store: str | None = option(
        "store whose topics' reserve.time takes precedence over --ttl", kinds.DIR
    )
    timers: bool = flag("expire delivered hours of timers instead, --ttl (24h) after the hour")
    refused: bool = flag(
        "with --timers: also hours with refused or damaged messages",
        needs="timers",
    )
    topic_ttl: tuple[kinds.TopicDuration, ...] = several(
        "as --ttl, by topic; the first match wins",
        kinds.Kind("GLOB=DURATION,...", kinds.topic_duration),
    )

    def of_one_broker(self) -> list[str]:
        """A store is one broker's."""
        return [*super().of_one_broker(), *(["store"] if self.store else [])]


@command("expire", ExpireOptions)
def run_expire(call: Call, options: ExpireOptions) -> int:
    """Expires messages older than a time: plan, then apply.

    Examples:
        tiered expire s3://bucket/prefix --ttl 30d
        tiered expire s3://bucket/prefix --ttl 30d --archived --archive s3://bucket2/parquet --apply -
    """
    from tiered.upkeep.expire import plan_expire, topics_of

    if options.timers:
        return _expire_timers(call, options)
    ttl_of = times_to_live(call, options)
    limit = options.max_deletions
    if options.archived != (options.archive is not None):
        raise InvalidError(
            "--archived and --archive go together",
            where=call.path,
            do="give both: --archived --archive s3://bucket2/parquet",
        )

    def plan(at: Workplace, proof: ExpiryProof | None) -> ExpirePlan:
        globs = [rule.glob for rule in options.topic_ttl]
        if options.topics or globs:
            topics = topics_of(at)
            call.require_topics("topics", options.topics, topics, options.url)
            call.require_topics("topic-ttl", globs, topics, options.url)
        return plan_expire(at, ttl_of, objects_max=limit, proof=proof)

    return _give_up(call, options, "expire", plan, archive=options.archive)


def _expire_timers(call: Call, options: ExpireOptions) -> int:
    from tiered.upkeep.expire import TIMERS, plan_expire_timers

    if options.topics or options.topic_ttl or options.store or options.archived or options.archive:
        raise InvalidError(
            "--timers goes with no option of topics", where=call.path, do="give --ttl alone"
        )
    grace_ms = 24 * HOUR_MS if options.ttl_ms is None else options.ttl_ms
    limit = options.max_deletions
    return _give_up(
        call,
        options,
        TIMERS,
        lambda at, _proof: plan_expire_timers(
            at, grace_ms=grace_ms, objects_max=limit, with_refused=options.refused
        ),
        timers=True,
    )


def _proof(call: Call, at: Workplace, url: str) -> ExpiryProof:
    """What an archive proves."""
    from tiered.archive.archive_proof import ArchiveProof
    from tiered.archive.tables import read_archive

    archive = call.objects(url)
    return ArchiveProof(at.store, at.place, archive, read_archive(archive), url)


@command("delete-topic", DeleteTopicOptions)
def run_delete(call: Call, options: DeleteTopicOptions) -> int:
    """Expires everything of a topic: plan, then apply.

    Examples:
        tiered delete-topic s3://bucket/prefix orders
        tiered delete-topic s3://bucket/prefix orders --apply -
    """
    from tiered.upkeep.expire import plan_delete_topic

    topic, limit = options.topic, options.max_deletions
    return _give_up(
        call,
        options,
        "delete-topic",
        lambda at, _proof: plan_delete_topic(at, topic, objects_max=limit),
        topic,
    )


def times_to_live(call: Call, options: ExpireOptions) -> Callable[[str], int | None]:
    """What the options say of a topic: its time to live in milliseconds, or None."""
    rules, default = options.topic_ttl, options.ttl_ms
    reserve_hours = broker_topics(options.store).reserve_hours if options.store else {}
    reserved = {topic: hours * HOUR_MS for topic, hours in reserve_hours.items()}
    in_file = any("ttl" in said for _, said in call.rules.rows)
    if default is None and not (rules or options.store or in_file) and options.apply in {None, "-"}:
        raise InvalidError(
            "no time to live is given",
            where=call.path,
            do="give --ttl, --topic-ttl or --store, as --ttl 7d",
        )
    takes = topic_filter(options.topics)

    def ttl_ms(topic: str) -> int | None:
        if not takes(topic):
            return None
        chosen = call.rules.get(topic, "ttl", reserved.get(topic, default))
        return next((rule.duration_ms for rule in rules if fnmatchcase(topic, rule.glob)), chosen)

    return ttl_ms


def broker_topics(directory: str) -> Topics:
    """The topics of a broker's store directory.

    Raises:
        InvalidError: Their table cannot be read.
    """
    from tiered.local.layout import TOPICS_FILE, read_topics

    topics = read_topics(directory)
    if topics.names is None:
        raise InvalidError(
            "the broker's topics cannot be read",
            where=f"{directory}/{TOPICS_FILE}",
            do="name the broker's store directory, or leave --store out",
        )
    return topics


def _give_up(
    call: Call,
    options: GiveUpOptions,
    what: str,
    make: Callable[[Workplace, ExpiryProof | None], ExpirePlan],
    topic: str | None = None,
    *,
    archive: str | None = None,
    timers: bool = False,
) -> int:
    from tiered.upkeep.expire import ExpirePlan, apply_steps

    applied = None
    at = open_workplace(call, options.url, give_up_s=options.give_up_s, timers=timers)
    proof = _proof(call, at, archive) if archive else None
    plan = typed_plan(options, ExpirePlan, what, at, lambda: make(at, proof))
    if plan.topic != topic:
        raise InvalidError(f"this plan is of the topic {plan.topic}", do="plan again")
    if options.apply and plan.steps:
        require_within(options.max_deletions, plan.objects)
        applied = apply_steps(at, plan, proof)
    old = versions_kept(call, at, options.url)
    document = {**plan.document(), "applied": applied, "old_versions": old}
    return show_plan(call, options, document, (plan.ROWS, _GIVEN_UP_COLUMNS), _given_up_lines)


def _given_up_lines(document: Document) -> Iterator[str]:
    yield (
        f"plan      {counted(document['messages'], 'message')}"
        f" in {counted(document['segments'], 'segment')} of {counted(len(document['steps']), 'queue')},"
        f" {format_size(document['size_bytes'])} in {counted(document['objects'], 'object')}"
    )
    if document["steps"]:
        newest = max(step["newest_ms"] for step in document["steps"])
        yield f"newest    {format_time(newest)}"
    for row in document.get("unproved", ())[:_SHOWN]:
        yield f"stays     {row['topic']}/{row['queue_id']} [{row['start']}, {row['end']}): {row['why']}"
    if len(document.get("unproved", ())) > _SHOWN:
        yield f"stays     and {counted(len(document['unproved']) - _SHOWN, 'more segment')}, each with all behind it"
    for refusal in document.get("refusals", ())[:_SHOWN]:
        yield f"harmed    {refusal}"
    if document.get("kept_for_refused"):
        yield (
            f"stays     {counted(document['kept_for_refused'], 'hour')} with messages that the target refused"
            " (`tiered timer ls --refused` lists them), or that are held back for damage; --refused gives them up, too"
        )
    if document["is_cut"]:
        yield "limit     there is more than --max-deletions allows in one run"
    if applied := done_now(document):
        yield (
            f"done      {applied['steps']} queues (done before: {applied['already_done']});"
            " `tiered gc` deletes the objects after its grace"
        )
        gc = "gc --timers" if document["what"].endswith("--timers") else "gc"
        yield f"bytes     where an object holds other messages as well they stay until `tiered {gc} --erase` rewrites it"
    if document["steps"]:
        yield from version_lines(document)


_TAKEN_COLUMNS = ["topic", "queue_id", "incarnation", "to", "was", "messages", "holes", "missing"]


@dataclass(frozen=True, kw_only=True)
class TruncateOptions(PlanOptions):
    """What ``tiered truncate`` can be told."""

    topic: str = argument()
    queue: int | None = option("the queue", kinds.NUMBER, default_text="the plan's in --apply FILE")
    to: int | None = option(
        "the first wrong queue offset, usually the end of the broker's queue",
        kinds.Kind("OFFSET", kinds.whole(0)),
        default_text="the plan's in --apply FILE",
    )


@command("truncate", TruncateOptions)
def run_truncate(call: Call, options: TruncateOptions) -> int:
    """Ends a queue at an earlier offset: plan, then apply.

    For a tier with messages that never existed (`ahead` in `status --store`); not for a lagging replica or a restored
    backup, which `attach` handles. Stop `attach` first.

    Examples:
        tiered truncate s3://bucket/prefix orders --queue 0 --to 1500
        tiered truncate s3://bucket/prefix orders --queue 0 --to 1500 --apply -
    """
    from tiered.upkeep.expire import TruncatePlan, apply_truncate, plan_truncate

    asked, applied = _asked(call, options), None

    def make() -> TruncatePlan:
        assert asked is not None
        return plan_truncate(at, *asked)

    at = open_workplace(call, options.url, give_up_s=options.give_up_s)
    plan = typed_plan(options, TruncatePlan, "truncate", at, make)
    said = {"topic": options.topic, "queue_id": options.queue, "to": options.to}
    for name, value in said.items():
        planned = getattr(plan, name)
        if value not in {None, planned}:
            what = f"this plan has {planned} as {name}, not {value}"
            raise InvalidError(what, do="plan again")
    if options.apply and plan.steps:
        applied = apply_truncate(at, plan)
    document = {**plan.document(), "applied": applied}
    return show_plan(call, options, document, (plan.ROWS, _TAKEN_COLUMNS), _truncate_lines)


def _asked(call: Call, options: TruncateOptions) -> tuple[MessageQueue, int] | None:
    """Which queue is to end, and where; None: as the plan of a file says."""
    from tiered.model import MessageQueue

    if options.queue is not None and options.to is not None:
        return MessageQueue(options.topic, options.queue), options.to
    if options.apply in {None, "-"}:
        raise InvalidError(
            "it is not said which queue is to end, and where",
            where=call.path,
            do="give --queue and --to, as --queue 0 --to 1500",
        )
    return None


def _truncate_lines(document: Document) -> Iterator[str]:
    if not document["steps"]:
        yield f"nothing is to be truncated: {document['topic']}/{document['queue_id']} ends at {document['to']}"
        return
    (step,) = document["steps"]
    name = f"{step['topic']}/{step['queue_id']}"
    if step["begins_anew"]:
        yield f"plan      {name} begins anew at {step['to']}: nothing up to {step['was']} is kept as its present history"
    else:
        yield f"plan      {name} ends at {step['to']}, where it ended at {step['was']}"
    if step["to"] != document["to"]:
        yield f"not at    {document['to']}: the index of the part there cannot be read, so all of the part goes"
    yield (
        f"gives up  {format_count(step['messages'])} messages, {format_count(step['holes'])} holes,"
        f" {format_count(step['missing'])} offsets of gaps"
    )
    if step["messages"]:
        yield "look out  there are real messages among them: attach tiers them again only if the store still has them"
    if done_now(document):
        yield f"done      `tiered attach` goes on at {step['to']}; `cat --incarnation all` still prints what was truncated"
