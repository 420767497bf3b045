"""``tiered rebuild --index``: the key index again, from the messages; plan, then apply."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tiered.cli.errors import NEEDS_A_PERSON
from tiered.cli.planned import Document, ending_code, get_plan, open_workplace, show_result
from tiered.cli.stderr import Progressed
from tiered.cli.values import counted, format_count, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.cli.call import Call


def run(call: Call) -> int:
    """Plan, and apply if told to."""
    from tiered.api.stores import backend_errors
    from tiered.upkeep.rebuild_index import (
        WHAT,
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
        at = open_workplace(call, call.argument("url"), stack)
        stack.enter_context(call.progress("rebuilding", lambda: done))
        plan = get_plan(call, WHAT, at, lambda: plan_rebuild_index(at, told))
        if call.text("apply") and has_work(plan):
            applied = apply_rebuild_index(at, plan, items_max=1 << 20, told=told)
    document = {**plan, "applied": applied}
    show_result(call, document, rows="drop", columns=["key", "reason"], lines=_lines)
    code = ending_code(call, document, has_work=has_work(plan))
    return NEEDS_A_PERSON if applied and applied["damaged"] else code


def _lines(document: Document) -> Iterator[str]:
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
