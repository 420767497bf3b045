"""``tiered rebuild``: a damaged journal again from the objects, or the key index from the messages; plan, then apply."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered.cli.errors import DONE, NEEDS_A_PERSON
from tiered.cli.frame import make_command
from tiered.cli.options import flag
from tiered.cli.output import Output
from tiered.cli.planned import (
    Document,
    PlanOptions,
    ending_code,
    get_plan,
    open_workplace,
    show_result,
)
from tiered.cli.stderr import Progressed
from tiered.cli.values import counted, format_count, format_size
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.cli.call import Call
    from tiered.upkeep.rebuild import RebuildPlan
    from tiered.upkeep.workplace import Workplace

THREADS = 16
LISTED_MAX = 20


@dataclass(frozen=True, kw_only=True)
class RebuildOptions(PlanOptions):
    """What ``tiered rebuild`` can be told."""

    accept_gaps: bool = flag("record messages whose objects are missing as gaps, for ever")
    index: bool = flag("not the journal but the key index: what is damaged, lost or not there yet")


def run(call: Call, options: RebuildOptions) -> int:
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
        at = open_workplace(call, options.url, stack, give_up_s=options.give_up_s, signs=ANY_SIGN)
        if apply_file and apply_file != "-":
            plan = load_rebuild(apply_file, at.place, at.store.url)
        else:
            plan = _planned(call, at, stack)
        if plan_file:
            save_rebuild(plan, at.place, at.store.url, plan_file)
        document = plan_document(plan, at.place, at.store.url)
        if apply_file and plan.damage:
            is_new = apply_rebuild(at, plan, accept_gaps=options.accept_gaps)
            document |= {"is_applied": True, "was_applied": not is_new}
    if output.form == "table":
        _show(output, document)
    else:
        output.emit(document, document["losses"], ["topic", "queue_id", "start", "end"])
    has_work = document["is_needed"] and not document["is_applied"]
    return NEEDS_A_PERSON if has_work and options.exit_code else DONE


def _planned(call: Call, at: Workplace, stack: contextlib.ExitStack) -> RebuildPlan:
    from tiered.upkeep.rebuild import plan_rebuild

    done = Progressed("reading the journal")

    def told(count: int, total: int) -> None:
        nonlocal done
        text = f"{format_count(count)} of {counted(total, 'object')}"
        done = Progressed(text, count, total)

    executor = stack.enter_context(ThreadPoolExecutor(THREADS, "tiered-rebuild"))
    with call.progress("planning", lambda: done):
        return plan_rebuild(at.store, at.prefix, executor, told)


def _show(output: Output, document: dict[str, Any]) -> None:
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
        number, generation = document["number"], document["generation"]
        rebuilt = "this plan was applied before" if document["was_applied"] else "rebuilt"
        return f"{rebuilt}: checkpoint {number}, generation {generation}"
    more = " --accept-gaps" if document["losses"] else ""
    return f"nothing is changed; --apply -{more} carries this out"


def run_index(call: Call, options: RebuildOptions) -> int:
    """Plan, and apply if told to."""
    from tiered.api.stores import backend_errors
    from tiered.upkeep.rebuild import (
        INDEX_WHAT,
        apply_rebuild_index,
        has_work,
        plan_rebuild_index,
    )

    done = Progressed("reading the journal")

    def told(what: str, count: int, total: int) -> None:
        nonlocal done
        done = Progressed(f"{what}: {format_count(count)} of {format_count(total)}", count, total)

    applied = None
    with contextlib.ExitStack() as stack, backend_errors():
        at = open_workplace(call, options.url, stack, give_up_s=options.give_up_s)
        stack.enter_context(call.progress("rebuilding", lambda: done))
        plan = get_plan(options, INDEX_WHAT, at, lambda: plan_rebuild_index(at, told))
        if options.apply and has_work(plan):
            applied = apply_rebuild_index(at, plan, items_max=1 << 20, told=told)
    document = {**plan, "applied": applied}
    show_result(call, document, rows="drop", columns=["key", "reason"], lines=_index_lines)
    code = ending_code(options, document, has_work=has_work(plan))
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


COMMAND = make_command(
    "rebuild",
    RebuildOptions,
    run,
    examples=[
        "tiered rebuild file:///tmp/tier",
        "tiered rebuild s3://bucket/prefix --index --apply -",
    ],
)
