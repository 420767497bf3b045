"""``tiered gc``: deletes what no reader can reach any more."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import click

from tiered.cli.frame import COMMANDS, make_command
from tiered.cli.planned import (
    Document,
    ending_code,
    get_plan,
    open_workplace,
    require_within,
    show_result,
)
from tiered.cli.stderr import Progressed
from tiered.cli.values import counted, format_count, format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.cli.call import Call

THREADS = 8
_LEFT = {
    "present_reign": "of the present reign, which only its writer may still name",
    "within_grace": "named or written within the grace",
    "uncovered": "of which the journal's history does not tell when they were named last",
    "unknown_age": "of unknown age",
    "over_limit": "beyond --max-deletions",
    "quarantine": "damaged records in quarantine",
    "unknown": "of unknown keys",
}


def run(call: Call) -> int:
    """Plan, and apply if told to."""
    from tiered.api.stores import backend_errors
    from tiered.journal.ahead import JournalBytes
    from tiered.upkeep.gc import apply_gc, plan_gc

    limit = call.whole("max-deletions")
    applied = None
    done = Progressed("listing, and reading the journal")

    def told(count: int, total: int) -> None:
        nonlocal done
        done = Progressed(f"{count} of {total} objects deleted", count, total)

    with contextlib.ExitStack() as stack, backend_errors():
        at = open_workplace(call, call.argument("url"), stack)
        stack.enter_context(call.progress("gc", lambda: done))
        executor = stack.enter_context(ThreadPoolExecutor(THREADS, "tiered-gc"))
        journal = JournalBytes(executor)
        grace_ms = call.whole("grace")
        plan = get_plan(
            call,
            "gc",
            at,
            lambda: plan_gc(
                at.store,
                at.place,
                at.clock,
                grace_ms=grace_ms,
                max_deletions=limit,
                journal=journal,
            ),
        )
        has_work = bool(plan["deletions"])
        if call.text("apply") and has_work:
            require_within(limit, len(plan["deletions"]))
            applied = apply_gc(at, plan, executor=executor, journal=journal, told=told)
    document = {**plan, "applied": applied}
    show_result(
        call,
        document,
        rows="deletions",
        columns=["kind", "size_bytes", "key"],
        lines=_lines,
    )
    return ending_code(call, document, has_work=has_work)


def _lines(document: Document) -> Iterator[str]:
    kinds = ", ".join(f"{format_count(n)} {kind}" for kind, n in document["kinds"].items())
    size = format_size(document["deletion_bytes"])
    count = document["deletion_count"]
    yield f"plan      {counted(count, 'object')}, {size}" + (f" ({kinds})" if kinds else "")
    yield f"grace     {format_duration(document['grace_ms'])}"
    if document["takes_reign"]:
        yield "reign     no writer is alive: applying takes a reign, so that nothing can be named any more"
    for name, text in _LEFT.items():
        if document["left"][name]:
            yield f"left      {format_count(document['left'][name])} {text}"
    for key in document["left"]["unknown_keys"]:
        yield f"unknown   {key}"
    for refusal in document["refusals"]:
        yield f"refused   {refusal}"
    applied = document["applied"]
    if applied is not None and applied["was_applied"]:
        yield "result    this plan was applied before: all of its objects are gone"
    elif applied is not None:
        yield (
            f"deleted   {counted(applied['deleted'], 'object')},"
            f" {format_size(applied['deleted_bytes'])}"
            f" (already gone: {applied['already_gone']}; too young by the store's clock:"
            f" {applied['left_young']})"
        )
    elif count:
        yield "nothing is changed; --apply - does it"


COMMAND = make_command(
    "gc",
    run,
    summary=COMMANDS["gc"].summary,
    arguments=[click.Argument(["url"])],
    examples=["tiered gc s3://bucket/prefix", "tiered gc file:///tmp/tier --apply -"],
)
