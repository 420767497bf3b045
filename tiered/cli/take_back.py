"""``tiered take-back``: a person ends a queue at an earlier offset."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from tiered.cli.frame import COMMANDS, make_command
from tiered.cli.planned import Document, ending_code, get_plan, open_workplace, show_result
from tiered.cli.values import format_count
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.cli.call import Call
    from tiered.upkeep.plans import Plan
    from tiered.upkeep.workplace import Workplace

_COLUMNS = ["topic", "queue_id", "incarnation", "to", "was", "messages", "holes", "missing"]


def run_take_back(call: Call) -> int:
    """Plan, and apply if told to."""
    from tiered.api.stores import backend_errors
    from tiered.upkeep.take_back import apply_take_back

    _require_place(call)
    applied = None
    with contextlib.ExitStack() as stack, backend_errors():
        at = open_workplace(call, call.argument("url"), stack)
        plan = get_plan(call, "take-back", at, lambda: _make(call, at))
        _require_same(call, plan)
        if call.text("apply") and plan["steps"]:
            applied = apply_take_back(at, plan)
    document = {**plan, "applied": applied}
    show_result(call, document, rows="steps", columns=_COLUMNS, lines=_lines)
    return ending_code(call, document, has_work=bool(plan["steps"]))


def _require_place(call: Call) -> None:
    """Raise unless the options, or a plan, say what is to end where.

    Raises:
        InvalidError: They do not.
    """
    is_given = None not in {call.whole_or_none("queue"), call.whole_or_none("to")}
    if not is_given and call.text("apply") in {None, "-"}:
        raise InvalidError(
            "it is not said which queue is to end, and where",
            where=call.path,
            do="give --queue and --to, as --queue 0 --to 1500",
        )


def _make(call: Call, at: Workplace) -> Plan:
    from tiered.model import MessageQueue
    from tiered.upkeep.take_back import plan_take_back

    queue = MessageQueue(call.argument("topic"), call.whole("queue"))
    return plan_take_back(at, queue, call.whole("to"))


def _require_same(call: Call, plan: Plan) -> None:
    """Raise when a plan that was loaded is of something else than what the command line says.

    Raises:
        InvalidError: It is.
    """
    said = {"topic": call.argument("topic"), "queue_id": call.whole_or_none("queue")}
    said["to"] = call.whole_or_none("to")
    for name, value in said.items():
        if value is not None and plan[name] != value:
            raise InvalidError(
                f"this plan has {plan[name]} as {name}, not {value}", do="plan again"
            )


def _lines(document: Document) -> Iterator[str]:
    if not document["steps"]:
        yield f"nothing is to be taken back: {document['topic']}/{document['queue_id']} ends at {document['to']}"
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
    applied = document["applied"]
    if applied is None:
        yield "nothing is changed; --apply - does it"
    elif applied["was_applied"]:
        yield "result    this plan was applied before"
    else:
        yield f"done      `tiered attach` goes on at {step['to']}; `cat --incarnation all` still prints what was taken back"


COMMAND = make_command(
    "take-back",
    run_take_back,
    summary=COMMANDS["take-back"].summary,
    arguments=[click.Argument(["url"]), click.Argument(["topic"])],
    details=(
        "For a tier that has more of a queue than the broker ever had, as holes up to the offset that a damaged record"
        " named: `attach` then takes the store for a copy that lags, and waits for ever (`ahead` in `status --store`)."
        " Do not use it when the store is a copy that lags indeed, or is restored from a backup: attach sees to those"
        " by itself. It refuses while a writer is at work."
    ),
    examples=[
        "tiered take-back s3://bucket/prefix orders --queue 0 --to 1500",
        "tiered take-back s3://bucket/prefix orders --queue 0 --to 1500 --apply -",
    ],
)
