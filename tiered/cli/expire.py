"""``tiered expire`` and ``tiered delete-topic``: retention, and a topic's removal."""

from __future__ import annotations

import contextlib
from fnmatch import fnmatchcase
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
from tiered.cli.values import counted, format_size, format_time, parse_duration
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.cli.call import Call
    from tiered.upkeep.expire import Proof
    from tiered.upkeep.plans import Plan
    from tiered.upkeep.workplace import Workplace

_HOUR_MS = 3_600_000
_SHOWN = 8
_COLUMNS = ["topic", "queue_id", "incarnation", "min_from", "min_to", "messages", "segments"]


def run_expire(call: Call) -> int:
    """Plan, and apply if told to."""
    from tiered.upkeep.expire import plan_expire

    ttl_of = times_to_live(call)
    limit = call.whole("max-deletions")
    archive = _archive_url(call)
    return _run(
        call,
        "expire",
        lambda at, proof: plan_expire(at, ttl_of, objects_max=limit, proof=proof),
        archive=archive,
    )


def _archive_url(call: Call) -> str | None:
    """The archive that has to hold what is given up; None when none has to.

    Raises:
        InvalidError: ``--archived`` without ``--archive``, or the other way.
    """
    url = call.text("archive")
    if call.flag("archived") == (url is not None):
        return url
    raise InvalidError(
        "--archived and --archive go together",
        where=call.path,
        do="give both: --archived --archive s3://bucket2/parquet",
    )


def _proof(call: Call, at: Workplace, url: str, stack: contextlib.ExitStack) -> Proof:
    """What an archive proves.

    Raises:
        InvalidError: There is no archive.
        DataError: Its log is damaged.
    """
    from tiered.archive.evidence import Evidence
    from tiered.archive.tables import read_archive
    from tiered.cli.tiers import open_objects

    archive = open_objects(call, url, stack)
    return Evidence(at.store, at.place, archive, read_archive(archive), url)


def run_delete(call: Call) -> int:
    """Plan, and apply if told to."""
    from tiered.upkeep.expire import plan_delete_topic

    topic, limit = call.argument("topic"), call.whole("max-deletions")
    return _run(
        call,
        "delete-topic",
        lambda at, _proof: plan_delete_topic(at, topic, objects_max=limit),
        topic,
    )


def times_to_live(call: Call) -> Callable[[str], int | None]:
    """What the options say of a topic: its time to live in milliseconds, or None.

    Raises:
        InvalidError: They do not name any time to live, or none that can be understood.
    """
    rules: list[tuple[str, int]] = []
    for text in call.texts("topic-ttl"):
        glob, _, duration = text.rpartition("=")
        try:
            rules.append((glob.strip(), parse_duration(duration.strip())))
        except ValueError as error:
            raise InvalidError(f"--topic-ttl {text}: {error}") from None
    default = call.whole_or_none("ttl")
    topics = call.texts("topics")
    reserved = _reserved_ms(call.text("store"))
    if default is None and not (rules or call.text("store")) and call.text("apply") in {None, "-"}:
        raise InvalidError(
            "no time to live is given",
            where=call.path,
            do="give --ttl, --topic-ttl or --store, as --ttl 7d",
        )

    def ttl_ms(topic: str) -> int | None:
        if topics and not any(fnmatchcase(topic, glob) for glob in topics):
            return None
        chosen = reserved.get(topic, default)
        return next((ttl for glob, ttl in rules if fnmatchcase(topic, glob)), chosen)

    return ttl_ms


def _reserved_ms(directory: str | None) -> dict[str, int]:
    """What the broker's topics say of themselves (``reserve.time``), by topic, milliseconds.

    Raises:
        InvalidError: The broker's table of topics cannot be read, so nobody knows how long they are to be kept.
    """
    if not directory:
        return {}
    from tiered.local.configs import TOPICS_FILE, read_topics

    topics = read_topics(directory)
    if topics.names is None:
        raise InvalidError(
            "the broker's topics cannot be read",
            where=f"{directory}/{TOPICS_FILE}",
            do="name a store directory, or leave --store out",
        )
    return {topic: hours * _HOUR_MS for topic, hours in topics.reserve_hours.items()}


def _run(
    call: Call,
    what: str,
    make: Callable[[Workplace, Proof | None], Plan],
    topic: str | None = None,
    *,
    archive: str | None = None,
) -> int:
    from tiered.api.stores import backend_errors
    from tiered.upkeep.expire import apply_steps

    applied = None
    with contextlib.ExitStack() as stack, backend_errors():
        at = open_workplace(call, call.argument("url"), stack)
        proof = _proof(call, at, archive, stack) if archive else None
        plan = get_plan(call, what, at, lambda: make(at, proof))
        if plan["topic"] != topic:
            raise InvalidError(f"this plan is of the topic {plan['topic']}", do="plan again")
        if call.text("apply") and plan["steps"]:
            require_within(call.whole("max-deletions"), plan["objects"])
            applied = apply_steps(at, plan, proof)
    document = {**plan, "applied": applied}
    show_result(call, document, rows="steps", columns=_COLUMNS, lines=_lines)
    return ending_code(call, document, has_work=bool(plan["steps"]))


def _lines(document: Document) -> Iterator[str]:
    yield (
        f"plan      {counted(document['messages'], 'message')}"
        f" in {counted(document['segments'], 'segment')} of {counted(len(document['steps']), 'queue')},"
        f" {format_size(document['size_bytes'])} in {counted(document['objects'], 'object')}"
    )
    if document["steps"]:
        newest = max(step["newest_ms"] for step in document["steps"])
        yield f"newest    {format_time(newest)}"
    for row in document.get("unproved", ())[:_SHOWN]:
        yield f"stays     {row['topic']}/{row['queue_id']} [{row['start']}, {row['end']}): {row['why']}"
    if len(document.get("unproved", ())) > _SHOWN:
        yield f"stays     and {counted(len(document['unproved']) - _SHOWN, 'more segment')}, each with all behind it"
    if document["is_cut"]:
        yield "limit     there is more than --max-deletions allows in one run"
    applied = document["applied"]
    if applied is not None and applied["was_applied"]:
        yield "result    this plan was applied before: all of its queues have given up what it says"
    elif applied is not None:
        yield (
            f"done      {applied['steps']} queues (done before: {applied['already_done']});"
            " `tiered gc` deletes the objects after its grace"
        )
    elif document["steps"]:
        yield "nothing is changed; --apply - does it"


EXPIRE = make_command(
    "expire",
    run_expire,
    summary=COMMANDS["expire"].summary,
    arguments=[click.Argument(["url"])],
    examples=[
        "tiered expire s3://bucket/prefix --ttl 30d",
        "tiered expire s3://bucket/prefix --ttl 30d --archived --archive s3://bucket2/parquet --apply -",
    ],
)
DELETE_TOPIC = make_command(
    "delete-topic",
    run_delete,
    summary=COMMANDS["delete-topic"].summary,
    arguments=[click.Argument(["url"]), click.Argument(["topic"])],
    examples=[
        "tiered delete-topic s3://bucket/prefix orders",
        "tiered delete-topic s3://bucket/prefix orders --apply -",
    ],
)
