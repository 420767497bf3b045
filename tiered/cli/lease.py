"""``tiered lease``: who writes, until when; and freeing the lease by hand."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered.cli.errors import DONE
from tiered.cli.frame import make_command
from tiered.cli.options import argument, flag
from tiered.cli.output import Output
from tiered.cli.values import format_time

if TYPE_CHECKING:
    from tiered.cli.call import Call

_WARNING = (
    "tiered: warning: the lease is broken. Its holder, if it lives, stops at its next renewal (exit code 4); if it hangs,"
    " it is fenced by the journal as soon as a new writer begins. Nothing that is in the tier is lost."
)
_WORDS = {
    "held": "a writer is alive",
    "expired": "free: the lease was not renewed in time",
    "released": "free: given back",
    "gone": "free: its process has ended",
    "unreadable": "free: the lease cannot be read",
    "none": "free: nobody has written yet",
}


@dataclass(frozen=True, kw_only=True)
class LeaseOptions:
    """What ``tiered lease`` can be told."""

    url: str = argument()
    break_: bool = flag("free the lease, whoever holds it")


def run(call: Call, options: LeaseOptions) -> int:
    """Show, and break if told to."""
    import random

    from tiered.api.broker_place import choose_place
    from tiered.api.stores import backend_errors
    from tiered.cli.tiers import open_objects
    from tiered.upkeep.workplace import break_lease, report_lease

    output = Output(call)
    is_broken = False
    with contextlib.ExitStack() as stack, backend_errors():
        store = open_objects(call, options.url, stack)
        place = choose_place(store, call.common.cluster, call.common.broker)
        before = report_lease(store, place.prefix, call.clock)
        if options.break_:
            breaker = f"{random.SystemRandom().getrandbits(32):08x}"
            is_broken = break_lease(store, place.prefix, call.clock, breaker=breaker)
        document = before.document(place, store.url)
    document["is_broken"] = is_broken
    if is_broken:
        call.say(_WARNING, level="warning")
    if output.form == "table":
        _show(output, document)
    else:
        output.emit(document, [document], list(document))
    return DONE


def _show(output: Output, document: dict[str, Any]) -> None:
    output.line(f"{document['cluster']}/{document['broker']}")
    output.line(f"  state     {document['state']} ({_WORDS[document['state']]})")
    if document["writer"]:
        output.line(
            f"  holder    process {document['pid']} on {document['host']}, writer {document['writer']}"
        )
        output.line(f"  until     {format_time(document['expires_ms'])}")
    output.line(
        f"  reign     {document['generation']} of writer {document['reigning_writer'] or '-'},"
        f" last entry {format_time(document['updated_ms'])}"
    )
    if document["is_broken"]:
        output.line("  broken    yes: the lease is free now")


COMMAND = make_command(
    "lease",
    LeaseOptions,
    run,
    examples=["tiered lease file:///tmp/tier", "tiered lease s3://bucket/prefix --break"],
)
