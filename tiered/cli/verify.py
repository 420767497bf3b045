"""``tiered verify`` and ``tiered rebuild``: whether a tier is whole, and a lost journal or key index made again."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from backends.lazy_dataclass import dataclass, picked
from tiered.cli import kinds
from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import command
from tiered.cli.options import BrokersOptions, flag, option
from tiered.cli.output import Table, show
from tiered.cli.planned import (
    TIMERS_TEXT,
    Document,
    PlanOptions,
    done_now,
    open_workplace,
    plan_or_file,
    show_plan,
    typed_plan,
)
from tiered.cli.values import counted, format_count, format_size
from tiered.errors import InvalidError, OtherVersionError, TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.cli.call import Call
    from tiered.local.interface import LocalStore
    from tiered.log.verify_objects import VerifyReport
    from tiered.upkeep.rebuild import RebuildPlan
    from tiered.upkeep.repair import Repairer
    from tiered.upkeep.workplace import Workplace

THREADS = 4
_NEUTRAL = frozenset(
    {
        *("notes", "ended_incarnations", "truncated", "truncated_messages"),
        *("unreferenced_bytes", "unindexed_messages"),
    }
)
"""What ``--strict`` does not count: it is neither lost nor left over."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(BrokersOptions):
    """What ``tiered verify`` can be told."""

    broker_columns: ClassVar = ("problem_count", "messages", "named_bytes", "is_deep")

    deep: bool = flag("read and check every byte")
    store: str | None = option("local store to compare with, message by message", kinds.DIR)
    repair: bool = flag("upload damaged data again from the store or another object")
    strict: bool = flag("exit with code 1 also for recorded findings")
    timers: bool = flag("check timers instead of topics")
    retries: str | None = option(
        "check instead what was sent back to this mount (its --name, with /ADDRESS if --shared)",
        kinds.NAME,
        excludes="timers store repair",
    )

    def of_one_broker(self) -> list[str]:
        """A store is one broker's."""
        return ["store"] if self.store else []


@command("verify", VerifyOptions)
def run(call: Call, options: VerifyOptions) -> int:
    """Checks that a tier is intact, or equal to a local store.

    Examples:
        tiered verify file:///tmp/tier --deep
        tiered verify s3://bucket/prefix --store /data/rocketmq/store --json
    """
    from backends.errors import BackendError
    from tiered.api.broker_place import choose_place, choose_retries, choose_timers
    from tiered.log.verify import verify_tier

    if options.timers and options.store and not options.repair:
        raise InvalidError(
            "--timers compares with no --store: hours are no queues of a store",
            where=call.path,
            do="leave --store out, or add --repair, which takes lost records from it",
        )
    raw, store = call.both(options.url)
    local = _local(call, options.store, timers=options.timers) if options.store else None
    names = call.common.cluster, call.common.broker
    place: Place
    if options.retries:
        place = choose_retries(store, *names, options.retries)
    else:
        place = (choose_timers if options.timers else choose_place)(store, *names)
    with (
        ThreadPoolExecutor(THREADS, "tiered-verify") as executor,
        call.progress("verifying", "reading the journal") as progress,
    ):

        def verified() -> VerifyReport:
            return verify_tier(
                store,
                place.prefix,
                deep=options.deep,
                local=None if options.timers else local,
                executor=executor,
                progress=lambda done, total: progress.tell(
                    f"{format_size(done)} of {format_size(total)}", done, total
                ),
            )

        report, repair = verified(), None
        failure: Exception | None = None
        if options.repair and report.is_of_another_version:
            failure = OtherVersionError("nothing is repaired", where=f"{store.url}/{place.prefix}")
        elif options.repair and report.damaged:
            repairer = _repairer(call, raw, store, place, local, timers=options.timers)
            try:
                done = repairer.run(report.damaged)
                repair = picked(done, "parts", "repaired_bytes")
                repair["unrepaired"] = [picked(one, "where", "reason") for one in done.unrepaired]
                report = verified()
            except (TieredStoreError, BackendError) as error:
                failure = error  # what was found is shown first: it may have taken hours
    if options.repair:
        for line in unlooked(is_deep=options.deep, has_store=local is not None):
            call.say(line)
    document = report_document(report, place, store.url, is_deep=options.deep, repair=repair)
    columns = ["kind", "where", "detail"]
    show(call, document, rows=document["problems"], columns=columns, lines=_lines(document))
    if failure is not None:
        raise failure
    if report.is_whole:
        return InvalidError.exit_code  # told by its rows, and no damage
    counted_too = (value for name, value in document["recorded"].items() if name not in _NEUTRAL)
    is_fine = report.is_clean and not (options.strict and any(counted_too))
    return DONE if is_fine else NEEDS_A_PERSON


def _local(call: Call, directory: str, *, timers: bool) -> LocalStore:
    """The broker's store, with its timer topics where these are meant."""
    from timer.progress import opened

    if timers:
        return call.opened.enter_context(opened(directory, call.clock))
    return call.local(directory)


def _repairer(
    call: Call,
    raw: ObjectStore,
    store: ObjectStore,
    place: Place,
    local: LocalStore | None,
    *,
    timers: bool,
) -> Repairer:
    from tiered.upkeep.repair import Repairer, TimerOriginals
    from tiered.upkeep.workplace import Workplace

    originals = None
    if timers and local is not None:
        originals = TimerOriginals(store, place.prefix, local).part
    at = Workplace(store, raw, place, call.clock, random.SystemRandom())
    return Repairer(at, local, stop=threading.Event(), originals=originals)


def unlooked(*, is_deep: bool, has_store: bool) -> list[str]:
    """What ``--repair`` did not look at, for lack of an option."""
    lines = []
    if not is_deep:
        lines.append(
            "tiered: --repair without --deep mends objects that are gone or of another size;"
            " damage within objects was not looked for, which --deep does"
        )
    if not has_store:
        lines.append(
            "tiered: --repair without --store has nothing to take lost records from; give the broker's store"
        )
    return lines


def report_document(
    report: VerifyReport,
    place: Place,
    url: str,
    *,
    is_deep: bool,
    repair: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of ``tiered verify --json``."""
    fields = asdict(report)
    fields.pop("damaged")
    problems, recorded = fields.pop("problems"), fields.pop("recorded")
    return {
        "format": 1,
        "url": url,
        **picked(place, "cluster", "broker"),
        "is_clean": report.is_clean,
        "is_deep": is_deep,
        "problem_count": sum(report.problem_counts.values()),
        **fields,
        "problem_counts": dict(report.problem_counts),
        "recorded": recorded,
        "repair": repair,
        "problems": problems,
    }


def _lines(document: dict[str, Any]) -> Iterator[str | Table]:
    yield f"{document['cluster']}/{document['broker']}"
    yield (
        f"  named     {counted(document['messages'], 'message')} in {counted(document['queues'], 'queue')},"
        f" {format_size(document['named_bytes'])} in {counted(document['named_objects'], 'object')}"
    )
    if document["is_deep"]:
        yield (
            f"  checked   {counted(document['checked_messages'], 'message')},"
            f" {format_size(document['checked_bytes'])}"
            f" in {counted(document['checked_objects'], 'object')}"
        )
    if document["comparison"]:
        yield f"  compared  {', '.join(_counts(document['comparison'])) or 'nothing'}"
    unindexed = document["recorded"]["unindexed_messages"]
    recorded = _counts({**document["recorded"], "unindexed_messages": 0})
    if recorded:
        yield f"  recorded  {', '.join(recorded)}"
    if unindexed:
        yield f"  normal    {counted(unindexed, 'message')} not in the key index yet: a lookup by key reads them instead"
    for note in document["recorded"]["notes"]:
        yield f"  note      {note}"
    if document["recorded"]["orphans"]:
        yield "  normal    orphans are what merging has replaced, or what a failed upload left: `tiered gc` deletes them"
    if repair := document["repair"]:
        yield f"  repaired  {counted(repair['parts'], 'part')}, {format_size(repair['repaired_bytes'])}"
        for one in repair["unrepaired"]:
            yield f"  left      {one['where']}: {one['reason']}"
    if document["is_clean"]:
        yield "  result    whole" + ("" if document["is_deep"] else " (--deep reads all)")
        return
    yield f"  result    {counted(document['problem_count'], 'problem')}"
    yield from _next_step(document)
    yield ""
    yield Table(document["problems"], ["kind", "where", "detail"])


def _next_step(document: dict[str, Any]) -> Iterator[str]:
    """How damaged objects are mended, where nobody has tried to."""
    from tiered.log.verify_objects import OBJECT_KINDS

    if not document["repair"] and any(one["kind"] in OBJECT_KINDS for one in document["problems"]):
        yield (
            "  next      while the broker has the messages: stop attach, then `tiered verify URL --deep --store DIR"
            " --repair`"
        )


def _counts(fields: dict[str, Any]) -> list[str]:
    return [
        _count(name, value) for name, value in fields.items() if isinstance(value, int) and value
    ]


def _count(name: str, value: int) -> str:
    if name in {"record_bytes", "orphan_bytes"}:
        return f"{format_size(value)} of {name.removesuffix('_bytes')}s"
    words = name.removesuffix("_bytes").replace("_", " ")
    if name.endswith("_bytes"):
        return f"{format_size(value)} {words}"
    return f"{format_count(value)} {words.removesuffix('s') if value == 1 else words}"


# -- tiered rebuild --------------------------------------------------------------------------------


REBUILD_THREADS = 16
LISTED_MAX = 20


@dataclass(frozen=True, kw_only=True)
class RebuildOptions(PlanOptions):
    """What ``tiered rebuild`` can be told."""

    accept_gaps: bool = flag("record messages of missing objects as gaps, permanently")
    accept_unread: bool = flag(
        "leave out unreadable bundles, and messages that only journal entries name"
    )
    timers: bool = flag(TIMERS_TEXT)
    index: bool = flag(
        "rebuild missing or damaged parts of the key index instead",
        excludes="timers accept-gaps accept-unread",
    )


@command("rebuild", RebuildOptions)
def rebuild(call: Call, options: RebuildOptions) -> int:
    """Rebuilds a lost journal from the objects.

    Examples:
        tiered rebuild file:///tmp/tier
        tiered rebuild s3://bucket/prefix --index --apply -
    """
    from tiered.api.broker_place import ANY_SIGN
    from tiered.upkeep.rebuild import apply_rebuild, load_rebuild, plan_document, save_rebuild

    if options.index:
        return run_index(call, options)
    at = open_workplace(
        call, options.url, give_up_s=options.give_up_s, signs=ANY_SIGN, timers=options.timers
    )
    plan = plan_or_file(
        options,
        lambda: _planned(call, at),
        lambda path: load_rebuild(path, at.place, at.store.url),
        lambda path, plan: save_rebuild(plan, at.place, at.store.url, path),
    )
    document = plan_document(plan, at.place, at.store.url)
    if options.apply and plan.damage:
        is_new = apply_rebuild(
            at, plan, accept_gaps=options.accept_gaps, accept_unread=options.accept_unread
        )
        document |= {"is_applied": True, "was_applied": not is_new}
    columns = ["topic", "queue_id", "start", "end"]
    show(call, document, rows=document["losses"], columns=columns, lines=_rebuild_lines(document))
    if document["refused"] and not (document["is_applied"] and options.accept_unread):
        # nobody can tell which messages lie in them
        if call.form in {"jsonl", "csv"}:
            for one in document["refused"]:
                call.say(f"tiered: refused: {one['key']}: {one['reason']}", level="warning")
        return NEEDS_A_PERSON
    has_work = document["is_needed"] and not document["is_applied"]
    return NEEDS_A_PERSON if has_work and options.exit_code else DONE


def _planned(call: Call, at: Workplace) -> RebuildPlan:
    from tiered.upkeep.rebuild import plan_rebuild

    with (
        ThreadPoolExecutor(REBUILD_THREADS, "tiered-rebuild") as executor,
        call.progress("planning", "reading the journal") as progress,
    ):

        def told(count: int, total: int) -> None:
            progress.tell(f"{format_count(count)} of {counted(total, 'object')}", count, total)

        return plan_rebuild(at.store, at.prefix, executor, told)


def _rebuild_lines(document: dict[str, Any]) -> Iterator[str]:
    yield f"{document['cluster']}/{document['broker']}"
    if not document["is_needed"]:
        yield "  result    the journal can be read; there is nothing to rebuild"
        return
    yield f"  damage    {document['damage']}"
    yield (
        f"  found     {counted(document['messages'], 'message')} in {counted(document['queues'], 'queue')},"
        f" {counted(document['parts'], 'part')} of {counted(document['objects'], 'object')}"
    )
    named = {
        "losses": ("range of messages lost", "ranges of messages lost"),
        "gaps": ("gap", "gaps"),
        "refused": ("object refused", "objects refused"),
        "orphans": ("object not used", "objects not used"),
    }
    for name, words in named.items():
        count = document[name] if name == "gaps" else len(document[name])
        if count:
            yield f"  {name:<9} {counted(count, *words)}"
    for note in document["notes"][:LISTED_MAX]:
        yield f"  note      {note}"
    rows = {
        "lost": [
            f"{loss['topic']}/{loss['queue_id']} incarnation {loss['incarnation']}"
            f" queue offsets [{loss['start']}, {loss['end']})"
            for loss in document["losses"]
        ],
        "refused": [f"{one['key']}: {one['reason']}" for one in document["refused"]],
        "not used": document["orphans"],
    }
    for title, lines in rows.items():
        for line in lines[:LISTED_MAX]:
            yield f"  {title:<9} {line}"
        if len(lines) > LISTED_MAX:
            yield f"  {title:<9} and {format_count(len(lines) - LISTED_MAX)} more (--json)"
    yield f"  result    {_result(document)}"


def _result(document: dict[str, Any]) -> str:
    if document["is_applied"]:
        number, epoch = document["number"], document["epoch"]
        rebuilt = "this plan was applied before" if document["was_applied"] else "rebuilt"
        return f"{rebuilt}: checkpoint {number}, epoch {epoch}"
    more = " --accept-gaps" if document["losses"] else ""
    more += " --accept-unread" if document["unread_count"] else ""
    return f"nothing is changed; --apply -{more} carries this out"


def run_index(call: Call, options: RebuildOptions) -> int:
    """Plan, and apply if told to."""
    from tiered.upkeep.rebuild import INDEX_WHAT, IndexPlan, apply_rebuild_index, plan_rebuild_index

    applied = None
    at = open_workplace(call, options.url, give_up_s=options.give_up_s)
    with call.progress("rebuilding", "reading the journal") as progress:

        def told(what: str, count: int, total: int) -> None:
            text = f"{what}: {format_count(count)} of {format_count(total)}"
            progress.tell(text, count, total)

        plan = typed_plan(options, IndexPlan, INDEX_WHAT, at, lambda: plan_rebuild_index(at, told))
        if options.apply and plan.has_work:
            applied = apply_rebuild_index(at, plan, items_max=1 << 20, told=told)
    document = {**plan.document(), "applied": applied}
    code = show_plan(
        call,
        options,
        document,
        (plan.ROWS, ["key", "reason"]),
        _index_lines,
        has_work=plan.has_work,
    )
    return NEEDS_A_PERSON if applied and applied["damaged"] else code


def _index_lines(document: Document) -> Iterator[str]:
    yield (
        f"index     {counted(document['items'], 'key')} in {counted(document['objects'], 'object')},"
        f" {format_size(document['size_bytes'])}"
    )
    yield f"missing   {counted(document['unindexed_messages'], 'message is', 'messages are')} not indexed"
    if applied := done_now(document):
        yield (
            f"done      {counted(applied['items'], 'key')} in {counted(applied['objects'], 'new object')};"
            f" {counted(applied['unindexed_messages'], 'message is', 'messages are')} left"
        )
        for one in applied["damaged"]:
            yield f"damaged   {one['queue']}: {one['reason']}"
    elif not (document["drop"] or document["unindexed_messages"]):
        yield "result    the index is whole"
