"""``tiered cat``: the messages of a topic, queue after queue. ``tiered.cli.printer`` writes them."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.cli.frame import make_command
from tiered.cli.options import OneOf, argument, flag, option
from tiered.cli.printer import DOCUMENT, GROUP, Printer, Wish
from tiered.cli.values import Moment, incarnation, whole
from tiered.errors import DataError, InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fetcher.filters import Filter
    from tiered.api.tier import Tier
    from tiered.cli.call import Call
    from tiered.log.reader import QueueReader

FOLLOW_S = 1.0
"""Pause between two looks at the journal: one listing each."""
_BOUNDS_SHOWN = 8
MEMORY_BYTES = 32 << 20
"""What is read ahead, at most."""


def run(call: Call) -> int:
    """Read and print."""
    from tiered.api.stores import backend_errors
    from tiered.cli.tiers import open_tier

    wish = read_wish(call)
    topic, number = call.argument("topic"), call.whole_or_none("queue")
    which = call.text("incarnation")
    with contextlib.ExitStack() as stack, backend_errors():
        tier = open_tier(call, call.argument("url"), stack, memory_bytes=MEMORY_BYTES)
        printer = Printer(wish, call.stdout, call.whole_or_none("count"), tier, call.say)
        check_queues(tier, topic, number)
        printer.begin()
        try:
            if which is not None:
                _print_lives(tier, printer, topic, number, which)
            else:
                _print_all(tier, printer, topic, number)
            while call.flag("follow") and not printer.is_full:
                call.stdout.flush()
                call.clock.wait(threading.Event(), FOLLOW_S)
                if tier.refresh():
                    _print_all(tier, printer, topic, number)
        except DataError:
            call.stdout.flush()  # what came before the damaged block is good
            raise
        printer.finish()
        if not printer.has_written and printer.left != 0:
            call.say(_nothing_found(call, tier, topic, number))
    return 0


def _nothing_found(call: Call, tier: Tier, topic: str, number: int | None) -> str:
    """What was looked for, and what there is."""
    from tiered.cli.values import span_text

    offset = call.whole_or_none("offset")
    looked = span_text(call.text("from"), call.text("until"))
    looked += f" from offset {offset} on" if offset else ""
    filters = [f"--{name} {call.text(name)}" for name in ("tag", "sql") if call.text(name)]
    looked += f" that {filters[0]} lets pass" if filters else ""
    lives = {queue.queue_id: tier.reader.queue(queue).life for queue in tier.queues(topic)}
    bounds = {
        queue_id: (life.min_offset, life.commit_offset)
        for queue_id, life in lives.items()
        if number in {None, queue_id}
    }
    return f"tiered: no messages{looked}; of {topic}, {bounds_text(bounds)}"


def bounds_text(bounds: Mapping[int, tuple[int, int]]) -> str:
    """What some queues of a topic have, by queue id."""
    said = [
        f"queue {queue_id} has [{low}, {end})" for queue_id, (low, end) in sorted(bounds.items())
    ]
    left = len(said) - _BOUNDS_SHOWN
    return ", ".join(said[:_BOUNDS_SHOWN]) + (f" and {left} queues more" if left > 0 else "")


def read_wish(call: Call) -> Wish:
    """What the options say.

    Raises:
        InvalidError: They contradict each other.
    """
    if call.flag("follow") and call.text("until") is not None:
        raise InvalidError("--follow and --until contradict each other", do="give one of them")
    if call.flag("follow") and call.text("incarnation") is not None:
        raise InvalidError(
            "--follow and --incarnation contradict each other",
            do="leave out --incarnation: only the present one grows",
        )
    return Wish(
        offset=call.whole_or_none("offset") or 0,
        from_ms=call.time_ms("from"),
        until_ms=call.time_ms("until"),
        filter=_filter(call),
        form=_form(call),
        raw_body=call.flag("raw-body"),
    )


def _filter(call: Call) -> Filter | None:
    """``--tag`` or ``--sql``."""
    tags, expression = call.text("tag"), call.text("sql")
    if tags in {None, "", "*"} and expression is None:
        return None
    if tags is not None and expression is not None:
        do = "give one of them; an expression can say TAGS IN ('paid', 'sent')"
        raise InvalidError("--tag and --sql are two filters", do=do)
    from fetcher.filters import compile_filter

    if expression is not None:
        return compile_filter(expression, "SQL92")
    assert tags is not None
    return compile_filter(tags, "TAG")


def _form(call: Call) -> str:
    """``--format``; ``-o`` counts on the command line only, since it is set for other commands elsewhere."""
    given = [call.find(name).source == "command line" for name in ("output", "json")]
    output = call.form if any(given) else "jsonl"
    if output == "jsonl":
        return call.words("format")
    if output == "json" and call.words("format") == "json":
        return DOCUMENT
    raise InvalidError(
        f"cat does not print {call.words('format')} messages as {output}",
        do="leave out -o; --format says how messages are printed",
    )


def check_queues(tier: Tier, topic: str, number: int | None) -> None:
    """Refuse a topic or queue that the tier does not have.

    Raises:
        InvalidError: It has not.
    """
    known = [queue.queue_id for queue in tier.queues(topic)]
    if not known:
        what = f"the tier has no topic {topic}"
    elif number is not None and number not in known:
        what = f"topic {topic} has no queue {number}, only {_ranges(known)}"
    else:
        return
    raise InvalidError(what, where=tier.store.url, do="`tiered ls URL` lists the topics and queues")


def _print_all(tier: Tier, printer: Printer, topic: str, number: int | None) -> None:
    from tiered.cli.queues_ahead import queues_ahead

    queues = [queue for queue in tier.queues(topic) if number in {None, queue.queue_id}]
    readers: Iterable[QueueReader] = [printer.meet(queue, tier.reader) for queue in queues]
    if printer.left is None and printer.wish.from_ms is None:
        readers = queues_ahead(tier, GROUP, list(readers), printer.start)
    for reader in readers:
        if printer.is_full:
            break
        printer.print_queue(reader)


def _print_lives(tier: Tier, printer: Printer, topic: str, number: int | None, which: str) -> None:
    """Each life that is meant, the oldest of a queue first; the last of an incarnation is what was not taken back of it.

    Raises:
        InvalidError: No queue has that incarnation.
        DataError: A block is damaged.
    """
    from tiered.log.takeback import is_tail

    found = False
    for queue in tier.queues(topic):
        readers = tier.reader.lives(queue) if number in {None, queue.queue_id} else []
        lives = [reader.life for reader in readers]
        for at, reader in enumerate(readers):
            if which in {"all", str(reader.life.incarnation)}:
                found = True
                printer.print_life(reader, is_taken_back=is_tail(lives, at))
    if not found:
        raise InvalidError(
            f"topic {topic} has no incarnation {which}",
            where=tier.store.url,
            do="`tiered ls URL TOPIC --lives` lists them",
        )


def _ranges(numbers: Iterable[int]) -> str:
    """As ``0-3, 7``."""
    rows: list[list[int]] = []
    for number in sorted(numbers):
        if rows and number == rows[-1][1] + 1:
            rows[-1][1] = number
        else:
            rows.append([number, number])
    return ", ".join(f"{low}-{high}" if low != high else f"{low}" for low, high in rows)


@dataclass(frozen=True, kw_only=True)
class CatOptions:
    """What ``tiered cat`` can be told."""

    url: str = argument()
    topic: str = argument()
    queue: int | None = option(
        "only this queue", "N", whole(0), default_text="all, one after another"
    )
    offset: int | None = option(
        "first queue offset in each queue", "N", whole(0), default_text="the first there is"
    )
    from_: Moment | None = option(
        "begin with the first message stored at or after this time",
        "TIME",
        Moment,
        default_text="the first there is",
    )
    until: Moment | None = option(
        "end before the first message stored at or after this time",
        "TIME",
        Moment,
        default_text="the last there is",
    )
    incarnation: str | None = option(
        "print this incarnation of each queue, or all, oldest first, with what the broker took back;"
        " messages then say which they are of",
        "N|all",
        incarnation,
        default_text="the present one",
    )
    count: int | None = option("messages in all, at most", "N", whole(0), default_text="no limit")
    tag: str | None = option(
        "only messages with one of these tags: A||B, or * for all",
        "EXPR",
        str,
        default_text="*",
    )
    sql: str | None = option(
        "only messages whose properties meet this SQL92 expression (docs/filters.md)",
        "EXPR",
        str,
        default_text="all messages",
    )
    follow: bool = flag("go on with messages as they are tiered")
    format: str = option(
        "json: a line each; raw: the records; body: the bodies, nothing between; text: for eyes",
        "FORMAT",
        OneOf("json", "raw", "body", "text"),
        default="json",
    )
    raw_body: bool = flag("bodies as stored, perhaps compressed")


COMMAND = make_command(
    "cat",
    CatOptions,
    lambda call, _options: run(call),
    examples=[
        "tiered cat file:///tmp/tier orders --count 10",
        "tiered cat s3://bucket/prefix orders --from now-2h --tag 'paid||sent' --format text",
    ],
)
