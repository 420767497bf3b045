"""``tiered verify`` and ``tiered rebuild``: whether a tier is whole, and a lost journal or key index made again."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import make_command
from tiered.cli.options import argument, flag, option
from tiered.cli.output import Output
from tiered.cli.planned import (
    TIMERS_TEXT,
    Document,
    PlanOptions,
    ending_code,
    open_workplace,
    show_result,
    typed_plan,
)
from tiered.cli.stderr import Progressed
from tiered.cli.values import counted, format_count, format_size
from tiered.errors import InvalidError, OtherVersionError, TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.cli.call import Call
    from tiered.local.interface import LocalStore
    from tiered.log.verify_report import VerifyReport
    from tiered.upkeep.rebuild import RebuildPlan
    from tiered.upkeep.repair import Repairer, RepairReport
    from tiered.upkeep.workplace import Workplace

THREADS = 4
_NEUTRAL = frozenset(
    {
        *("notes", "ended_lives", "truncated", "truncated_messages"),
        *("unreferenced_bytes", "unindexed_messages"),
    }
)
"""What ``--strict`` does not count: it is neither lost nor left over."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What ``tiered verify`` can be told."""

    url: str = argument()
    deep: bool = flag("read and check every byte of every object")
    store: str | None = option(
        "local store directory to compare with, message by message",
        "DIR",
        str,
        default_text="none",
    )
    repair: bool = flag(
        "upload again what is damaged and the local store (or another object) still has, and check again"
    )
    strict: bool = flag("end with code 1 also for what is recorded")
    timers: bool = flag("check the broker's timers, which lie apart, instead of its topics")


def run(call: Call, options: VerifyOptions) -> int:
    """Check and print."""
    from backends.errors import BackendError
    from tiered.api.broker_place import choose_place
    from tiered.api.stores import backend_errors
    from tiered.attach.timer_place import choose_timers
    from tiered.cli.call import open_both
    from tiered.log.verify import verify_tier

    if options.timers and options.store and not options.repair:
        raise InvalidError(
            "--timers compares with no --store: hours are no queues of a store",
            where=call.path,
            do="leave --store out, or add --repair, which takes lost records from it",
        )
    output = Output(call)
    done = Progressed("reading the journal")

    def told(done_bytes: int, total_bytes: int) -> None:
        nonlocal done
        text = f"{format_size(done_bytes)} of {format_size(total_bytes)}"
        done = Progressed(text, done_bytes, total_bytes)

    with contextlib.ExitStack() as stack, backend_errors():
        raw, store = open_both(call, options.url, stack)
        directory = options.store
        local = _local(call, directory, stack, timers=options.timers) if directory else None
        choose = choose_timers if options.timers else choose_place
        place = choose(store, call.common.cluster, call.common.broker)
        executor = stack.enter_context(ThreadPoolExecutor(THREADS, "tiered-verify"))
        stack.enter_context(call.progress("verifying", lambda: done))

        def verified() -> VerifyReport:
            is_deep = options.deep
            compared = None if options.timers else local
            return verify_tier(
                store, place.prefix, deep=is_deep, local=compared, executor=executor, progress=told
            )

        report, repair = verified(), None
        failure: Exception | None = None
        if options.repair and report.is_of_another_version:
            failure = OtherVersionError("nothing is repaired", where=f"{store.url}/{place.prefix}")
        elif options.repair and report.damaged:
            repairer = _repairer(call, raw, store, place, local, timers=options.timers)
            try:
                repair = _document_of(repairer.run(report.damaged))
                report = verified()
            except (TieredStoreError, BackendError) as error:
                failure = error  # what was found is shown first: it may have taken hours
    if options.repair:
        for line in unlooked(is_deep=options.deep, has_store=local is not None):
            call.say(line)
    document = report_document(report, place, store.url, is_deep=options.deep, repair=repair)
    if output.form == "table":
        _show(output, document)
    else:
        output.emit(document, document["problems"], ["kind", "where", "detail"])
    if failure is not None:
        with backend_errors():
            raise failure
    if report.is_whole:
        return InvalidError.exit_code  # told by its rows, and no damage
    is_fine = report.is_clean and not (options.strict and has_recorded(document))
    return DONE if is_fine else NEEDS_A_PERSON


def _local(call: Call, directory: str, stack: contextlib.ExitStack, *, timers: bool) -> LocalStore:
    """The broker's store, with its timer topics where these are meant."""
    from tiered.cli.call import open_local
    from timer.progress import opened

    if timers:
        return stack.enter_context(opened(directory, call.clock))
    return open_local(call, directory, stack)


def _repairer(
    call: Call,
    raw: ObjectStore,
    store: ObjectStore,
    place: Place,
    local: LocalStore | None,
    *,
    timers: bool,
) -> Repairer:
    from tiered.upkeep.repair import Repairer
    from tiered.upkeep.timer_originals import TimerOriginals
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


def _document_of(done: RepairReport) -> dict[str, Any]:
    unrepaired = [{"where": one.where, "reason": one.reason} for one in done.unrepaired]
    return {"parts": done.parts, "repaired_bytes": done.repaired_bytes, "unrepaired": unrepaired}


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
        "cluster": place.cluster,
        "broker": place.broker,
        "is_clean": report.is_clean,
        "is_deep": is_deep,
        "problem_count": sum(report.problem_counts.values()),
        **fields,
        "problem_counts": dict(report.problem_counts),
        "recorded": recorded,
        "repair": repair,
        "problems": problems,
    }


def has_recorded(document: dict[str, Any]) -> bool:
    """Whether there is anything that ``--strict`` counts."""
    return any(value for name, value in document["recorded"].items() if name not in _NEUTRAL)


def _show(output: Output, document: dict[str, Any]) -> None:
    output.line(f"{document['cluster']}/{document['broker']}")
    output.line(
        f"  named     {counted(document['messages'], 'message')} in {counted(document['queues'], 'queue')},"
        f" {format_size(document['named_bytes'])} in {counted(document['named_objects'], 'object')}"
    )
    if document["is_deep"]:
        output.line(
            f"  checked   {counted(document['checked_messages'], 'message')},"
            f" {format_size(document['checked_bytes'])}"
            f" in {counted(document['checked_objects'], 'object')}"
        )
    if document["comparison"]:
        found = ", ".join(_counts(document["comparison"]))
        output.line(f"  compared  {found or 'nothing'}")
    unindexed = document["recorded"]["unindexed_messages"]
    recorded = _counts({**document["recorded"], "unindexed_messages": 0})
    if recorded:
        output.line(f"  recorded  {', '.join(recorded)}")
    if unindexed:
        output.line(
            f"  normal    {counted(unindexed, 'message')} not in the key index yet: a lookup by key reads them instead"
        )
    for note in document["recorded"]["notes"]:
        output.line(f"  note      {note}")
    if document["repair"]:
        _show_repair(output, document["repair"])
    if document["is_clean"]:
        output.line("  result    whole" + ("" if document["is_deep"] else " (--deep reads all)"))
        return
    output.line(f"  result    {counted(document['problem_count'], 'problem')}")
    output.line()
    output.table(document["problems"], ["kind", "where", "detail"])


def _show_repair(output: Output, repair: dict[str, Any]) -> None:
    size = format_size(repair["repaired_bytes"])
    output.line(f"  repaired  {counted(repair['parts'], 'part')}, {size}")
    for one in repair["unrepaired"]:
        output.line(f"  left      {one['where']}: {one['reason']}")


def _counts(fields: dict[str, Any]) -> list[str]:
    return [
        f"{format_size(value) if name.endswith('_bytes') else format_count(value)}"
        f" {name.removesuffix('_bytes').replace('_', ' ')}"
        for name, value in fields.items()
        if isinstance(value, int) and value
    ]


COMMAND = make_command(
    "verify",
    VerifyOptions,
    run,
    examples=[
        "tiered verify file:///tmp/tier --deep",
        "tiered verify s3://bucket/prefix --store /data/rocketmq/store --json",
    ],
)


# -- tiered rebuild --------------------------------------------------------------------------------


REBUILD_THREADS = 16
LISTED_MAX = 20


@dataclass(frozen=True, kw_only=True)
class RebuildOptions(PlanOptions):
    """What ``tiered rebuild`` can be told."""

    accept_gaps: bool = flag("record messages whose objects are missing as gaps, for ever")
    accept_unread: bool = flag(
        "go without the messages of bundles that cannot be read, or of which only journal entries tell"
    )
    timers: bool = flag(TIMERS_TEXT)
    index: bool = flag("not the journal but the key index: what is damaged, lost or not there yet")


def rebuild(call: Call, options: RebuildOptions) -> int:
    """Plan, and apply if told to."""
    from tiered.api.broker_place import ANY_SIGN
    from tiered.api.stores import backend_errors
    from tiered.upkeep.rebuild import apply_rebuild, load_rebuild, plan_document, save_rebuild

    if options.index:
        return run_index(call, options)
    output = Output(call)
    plan_file, apply_file = options.plan, options.apply
    if plan_file and apply_file not in {None, "-"}:
        raise InvalidError("--plan and --apply FILE contradict each other", do="give one of them")
    with contextlib.ExitStack() as stack, backend_errors():
        at = open_workplace(
            call,
            options.url,
            stack,
            give_up_s=options.give_up_s,
            signs=ANY_SIGN,
            timers=options.timers,
        )
        if apply_file and apply_file != "-":
            plan = load_rebuild(apply_file, at.place, at.store.url)
        else:
            plan = _planned(call, at, stack)
        if plan_file:
            save_rebuild(plan, at.place, at.store.url, plan_file)
        document = plan_document(plan, at.place, at.store.url)
        if apply_file and plan.damage:
            is_new = apply_rebuild(
                at, plan, accept_gaps=options.accept_gaps, accept_unread=options.accept_unread
            )
            document |= {"is_applied": True, "was_applied": not is_new}
    if output.form == "table":
        _show_rebuild(output, document)
    else:
        output.emit(document, document["losses"], ["topic", "queue_id", "start", "end"])
    if document["refused"] and not (document["is_applied"] and options.accept_unread):
        # nobody can tell which messages lie in them
        if output.form not in {"table", "json"}:
            for one in document["refused"]:
                call.say(f"tiered: refused: {one['key']}: {one['reason']}", level="warning")
        return NEEDS_A_PERSON
    has_work = document["is_needed"] and not document["is_applied"]
    return NEEDS_A_PERSON if has_work and options.exit_code else DONE


def _planned(call: Call, at: Workplace, stack: contextlib.ExitStack) -> RebuildPlan:
    from tiered.upkeep.rebuild import plan_rebuild

    done = Progressed("reading the journal")

    def told(count: int, total: int) -> None:
        nonlocal done
        text = f"{format_count(count)} of {counted(total, 'object')}"
        done = Progressed(text, count, total)

    executor = stack.enter_context(ThreadPoolExecutor(REBUILD_THREADS, "tiered-rebuild"))
    with call.progress("planning", lambda: done):
        return plan_rebuild(at.store, at.prefix, executor, told)


def _show_rebuild(output: Output, document: dict[str, Any]) -> None:
    output.line(f"{document['cluster']}/{document['broker']}")
    if not document["is_needed"]:
        output.line("  result    the journal can be read; there is nothing to rebuild")
        return
    output.line(f"  damage    {document['damage']}")
    output.line(
        f"  found     {counted(document['messages'], 'message')} in {counted(document['queues'], 'queue')},"
        f" {counted(document['parts'], 'part')} of {counted(document['objects'], 'object')}"
    )
    named = {
        "losses": ("stretch of messages lost", "stretches of messages lost"),
        "gaps": ("gap", "gaps"),
        "refused": ("object refused", "objects refused"),
        "orphans": ("object not used", "objects not used"),
    }
    for name, words in named.items():
        count = document[name] if name == "gaps" else len(document[name])
        if count:
            output.line(f"  {name:<9} {counted(count, *words)}")
    for note in document["notes"][:LISTED_MAX]:
        output.line(f"  note      {note}")
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
            output.line(f"  {title:<9} {line}")
        if len(lines) > LISTED_MAX:
            output.line(f"  {title:<9} and {format_count(len(lines) - LISTED_MAX)} more (--json)")
    output.line(f"  result    {_result(document)}")


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
    from tiered.api.stores import backend_errors
    from tiered.upkeep.rebuild import (
        INDEX_WHAT,
        IndexPlan,
        apply_rebuild_index,
        plan_rebuild_index,
    )

    done = Progressed("reading the journal")

    def told(what: str, count: int, total: int) -> None:
        nonlocal done
        done = Progressed(f"{what}: {format_count(count)} of {format_count(total)}", count, total)

    if options.timers or options.accept_gaps or options.accept_unread:
        raise InvalidError(
            "--index goes with neither --timers, which have no key index, nor --accept-gaps or --accept-unread",
            where=call.path,
            do="leave it out",
        )
    applied = None
    with contextlib.ExitStack() as stack, backend_errors():
        at = open_workplace(call, options.url, stack, give_up_s=options.give_up_s)
        stack.enter_context(call.progress("rebuilding", lambda: done))
        plan = typed_plan(options, IndexPlan, INDEX_WHAT, at, lambda: plan_rebuild_index(at, told))
        if options.apply and plan.has_work:
            applied = apply_rebuild_index(at, plan, items_max=1 << 20, told=told)
    document = {**plan.document(), "applied": applied}
    show_result(call, document, rows="drop", columns=["key", "reason"], lines=_index_lines)
    code = ending_code(options, document, has_work=plan.has_work)
    return NEEDS_A_PERSON if applied and applied["damaged"] else code


def _index_lines(document: Document) -> Iterator[str]:
    yield (
        f"index     {counted(document['items'], 'key')} in {counted(document['objects'], 'object')},"
        f" {format_size(document['size_bytes'])}"
    )
    yield f"missing   {counted(document['unindexed_messages'], 'message is', 'messages are')} not indexed"
    applied = document["applied"]
    if applied is not None and applied["was_applied"]:
        yield "result    this plan was applied before: nothing was left to do"
    elif applied is not None:
        yield (
            f"done      {counted(applied['items'], 'key')} in {counted(applied['objects'], 'new object')};"
            f" {counted(applied['unindexed_messages'], 'message is', 'messages are')} left"
        )
        for one in applied["damaged"]:
            yield f"damaged   {one['queue']}: {one['reason']}"
    elif document["drop"] or document["unindexed_messages"]:
        yield "nothing is changed; --apply - does it"
    else:
        yield "result    the index is whole"


REBUILD = make_command(
    "rebuild",
    RebuildOptions,
    rebuild,
    examples=[
        "tiered rebuild file:///tmp/tier",
        "tiered rebuild s3://bucket/prefix --index --apply -",
    ],
)
