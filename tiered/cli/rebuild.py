"""``tiered rebuild``: a lost or damaged journal, again from the objects; plan, then apply."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click

from tiered.cli.errors import DONE, NEEDS_A_PERSON
from tiered.cli.frame import COMMANDS, make_command
from tiered.cli.output import Output
from tiered.cli.planned import open_workplace
from tiered.cli.stderr import Progressed
from tiered.cli.values import counted, format_count
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from tiered.cli.call import Call
    from tiered.upkeep.rebuild import RebuildPlan
    from tiered.upkeep.workplace import Workplace

THREADS = 16
LISTED_MAX = 20


def run(call: Call) -> int:
    """Plan, and apply if told to."""
    from tiered.api.broker_place import ANY_SIGN
    from tiered.api.stores import backend_errors
    from tiered.upkeep.rebuild import apply_rebuild
    from tiered.upkeep.rebuild_plan import load_rebuild, plan_document, save_rebuild

    if call.flag("index"):
        from tiered.cli.rebuild_index import run as run_index

        return run_index(call)
    output = Output(call)
    plan_file, apply_file = call.text("plan"), call.text("apply")
    if plan_file and apply_file not in {None, "-"}:
        raise InvalidError("--plan and --apply FILE contradict each other", do="give one of them")
    with contextlib.ExitStack() as stack, backend_errors():
        at = open_workplace(call, call.argument("url"), stack, signs=ANY_SIGN)
        if apply_file and apply_file != "-":
            plan = load_rebuild(apply_file, at.place, at.store.url)
        else:
            plan = _planned(call, at, stack)
        if plan_file:
            save_rebuild(plan, at.place, at.store.url, plan_file)
        document = plan_document(plan, at.place, at.store.url)
        if apply_file and plan.damage:
            is_new = apply_rebuild(at, plan, accept_gaps=call.flag("accept-gaps"))
            document |= {"is_applied": True, "was_applied": not is_new}
    if output.form == "table":
        _show(output, document)
    else:
        output.emit(document, document["losses"], ["topic", "queue_id", "start", "end"])
    has_work = document["is_needed"] and not document["is_applied"]
    return NEEDS_A_PERSON if has_work and call.flag("exit-code") else DONE


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


COMMAND = make_command(
    "rebuild",
    run,
    summary=COMMANDS["rebuild"].summary,
    arguments=[click.Argument(["url"])],
    examples=[
        "tiered rebuild file:///tmp/tier",
        "tiered rebuild s3://bucket/prefix --index --apply -",
    ],
)
