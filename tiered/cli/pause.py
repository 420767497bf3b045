"""``tiered pause`` and ``tiered resume``: a topic of which a running ``attach`` takes nothing for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.cli.exits import DONE
from tiered.cli.frame import command
from tiered.cli.options import argument
from tiered.cli.output import show
from tiered.cli.planned import Document, open_workplace
from tiered.cli.values import format_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.cli.call import Call

GIVE_UP_S = 60.0


@dataclass(frozen=True, kw_only=True)
class PauseOptions:
    """What ``tiered pause`` and ``tiered resume`` can be told."""

    url: str = argument()
    topic: str = argument()


@command("pause", PauseOptions)
def pause(call: Call, options: PauseOptions) -> int:
    """Makes attach skip a topic until it is resumed.

    Resume it before the broker's retention (`fileReservedTime`) deletes what is not tiered: that becomes a gap.

    Examples:
        tiered pause s3://bucket/prefix orders
        tiered pause file:///tmp/tier orders --json
    """
    return _set(call, options, is_paused=True)


@command("resume", PauseOptions)
def resume(call: Call, options: PauseOptions) -> int:
    """Resumes a paused topic.

    Examples:
        tiered resume s3://bucket/prefix orders
        tiered resume file:///tmp/tier orders --json
    """
    return _set(call, options, is_paused=False)


def _set(call: Call, options: PauseOptions, *, is_paused: bool) -> int:
    from tiered.upkeep.workplace import set_paused

    at = open_workplace(call, options.url, give_up_s=GIVE_UP_S)
    done = set_paused(at, options.topic, is_paused=is_paused)
    document = {
        "format": 1,
        "url": at.store.url,
        "cluster": at.place.cluster,
        "broker": at.place.broker,
        **done,
    }
    if not document["is_known"]:
        call.say(
            f"tiered: the tier has no topic {options.topic} yet; `tiered ls URL` lists those that it has",
            level="warning",
        )
    if is_paused:
        call.say(
            "tiered: what the broker expires before `tiered resume` will be a gap;"
            " `tiered status URL --store DIR` tells how much waits",
            level="warning",
        )
    show(call, document, lines=_lines(document))
    return DONE


def _lines(document: Document) -> Iterator[str]:
    was = "" if document["is_changed"] else " already"
    since = f" since {format_time(document['since_ms'])}" if document["is_paused"] else ""
    word = "paused" if document["is_paused"] else "not paused"
    yield f"{document['cluster']}/{document['broker']}"
    yield f"  {document['topic']} is {word}{since}{was}"
