"""Plan, then apply: what ``gc``, ``expire``, ``delete-topic`` and ``take-back`` have in common.

Without an option the plan is shown. ``--plan FILE`` saves it as well, ``--apply FILE`` carries out exactly that one, and
``--apply -`` plans and carries out in one go.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tiered.cli.errors import DONE, NEEDS_A_PERSON
from tiered.cli.output import Output
from tiered.errors import InvalidError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Sequence

    from tiered.archive.workshop import Workshop
    from tiered.cli.call import Call
    from tiered.upkeep.plans import Plan
    from tiered.upkeep.workplace import Workplace

Document = dict[str, Any]


def open_workplace(
    call: Call, url: str, stack: contextlib.ExitStack, *, signs: Sequence[str] | None = None
) -> Workplace:
    """The one broker's tier that is meant.

    Args:
        call: The command.
        url: Of the tier.
        stack: Closes the store.
        signs: See ``find_places``; None: the usual ones.

    Raises:
        InvalidError: There is none, or there are several.
        BackendError: The store cannot be reached or refuses us.
    """
    from tiered.api.broker_place import SIGNS, choose_place
    from tiered.cli.tiers import open_both
    from tiered.upkeep.workplace import Workplace

    give_up_s = call.number("give-up-seconds")
    meter, store = open_both(call, url, stack, give_up_s=give_up_s)
    names = (call.text("cluster"), call.text("broker"))
    place = choose_place(store, *names, signs=signs or SIGNS)
    return Workplace(store, meter, place, call.clock, random.SystemRandom(), give_up_s)


def get_plan(call: Call, what: str, at: Workplace | Workshop, make: Callable[[], Plan]) -> Plan:
    """The plan of the file that is to be applied, or a new one; saved if that is asked for.

    Raises:
        InvalidError: The options contradict each other, or the file cannot be used.
    """
    from tiered.upkeep.plans import load_plan, save_plan

    apply, save = call.text("apply"), call.text("plan")
    if apply and save:
        raise InvalidError("--plan and --apply contradict each other", do="give one of them")
    if apply and apply != "-":
        return load_plan(apply, what, at.place)
    plan = make()
    if save:
        save_plan(save, plan)
    return plan


def require_within(limit: int, count: int) -> None:
    """Refuse a plan that gives up more objects than one run may.

    Raises:
        InvalidError: It does.
    """
    if count > limit:
        raise InvalidError(
            f"this plan has {count} objects, and --max-deletions is {limit}",
            do="raise --max-deletions, or plan again with less",
        )


def show_result(
    call: Call,
    document: Document,
    *,
    rows: str,
    columns: Sequence[str],
    lines: Callable[[Document], Iterable[str]],
) -> None:
    """Print plan and outcome in the form that was asked for."""
    output = Output(call)
    if output.form != "table":
        output.emit(document, document[rows], columns)
        return
    output.line(f"{document['cluster']}/{document['broker']}")
    for line in lines(document):
        output.line(f"  {line}")
    if document["applied"] is None and document[rows]:
        output.line()
        output.table(document[rows], columns)


def ending_code(call: Call, document: Document, *, has_work: bool) -> int:
    """The exit code."""
    if document.get("refusals"):
        return NEEDS_A_PERSON
    planned_only = document["applied"] is None
    return NEEDS_A_PERSON if planned_only and has_work and call.flag("exit-code") else DONE
