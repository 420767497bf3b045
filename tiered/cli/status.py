"""``tiered status``, ``tiered ls`` and ``tiered lease``: how far a tier is, what is in it, and who writes it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered.cli.exits import DONE
from tiered.cli.frame import make_command
from tiered.cli.options import argument, flag, maybe, option, several
from tiered.cli.output import Output, Row
from tiered.cli.values import counted, format_size, format_time, topic_filter
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tiered.api.tier import Tier
    from tiered.cli.call import Call
    from tiered.local.interface import LocalStore
    from tiered.log.parts import Bundle, Segment
    from tiered.model import MessageQueue

COLUMNS = [
    "topic",
    "queue_id",
    "min_offset",
    "commit_offset",
    "local_max_offset",
    "lag_messages",
    "lag_bytes",
    "lag_seconds",
    "segments",
    "objects",
    "size_bytes",
    "gaps",
    "quarantined",
]


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """What ``tiered status`` can be told."""

    url: str = argument()
    store: str | None = option(
        "local store directory to compare with", "DIR", str, default_text="none: no lag"
    )
    topics: tuple[str, ...] = several(
        "topics that attach was told to tier, as globs: of others only what is in the tier can lag",
        "GLOB,...",
        str,
        default_text="all",
    )
    exclude: tuple[str, ...] = several(
        "topics that attach was told not to tier, as globs", "GLOB,...", str, default_text="none"
    )


def run(call: Call, options: StatusOptions) -> int:
    """Read and print."""
    from tiered.api.stores import backend_errors
    from tiered.cli.call import open_local, open_objects
    from tiered.upkeep.status import bills_requests, read_status, status_document

    url, directory = options.url, options.store
    output = Output(call)
    with contextlib.ExitStack() as stack, backend_errors():
        store = open_objects(call, url, stack)
        local: LocalStore | None = open_local(call, directory, stack) if directory else None
        now_ms = call.clock.now_ms()
        facts, unread = read_status(
            store,
            cluster=call.common.cluster,
            broker=call.common.broker,
            local=local,
            now_ms=now_ms,
            selects=topic_filter(options.topics, options.exclude),
        )
    document = status_document(store.url, facts, unread, now_ms)
    if output.form == "table":
        for broker in document["brokers"]:
            _show(output, broker, now_ms, is_billed=bills_requests(url))
        for one in document["unread"]:
            output.line(f"{one['cluster']}/{one['broker']}")
            output.line(f"  state     {one['state']}")
            output.line(f"  reason    {one['reason']}")
    else:
        rows = [_row(broker, queue) for broker, queue in _queues(document)]
        output.emit(document, rows, ["cluster", "broker", *COLUMNS])
    if output.form not in {"table", "json"}:
        for one in document["unread"]:
            name = f"{one['cluster']}/{one['broker']}"
            call.say(f"tiered: {name}: {one['state']}: {one['reason']}", level="error")
    return max((one["exit_code"] for one in document["unread"]), default=0)


def _queues(document: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [
        (broker, queue)
        for broker in document["brokers"]
        for topic in broker["topics"]
        for queue in topic["queues"]
    ]


def _row(broker: dict[str, Any], queue: dict[str, Any]) -> dict[str, Any]:
    return {"cluster": broker["cluster"], "broker": broker["broker"], **queue}


def _sizes(broker: dict[str, Any]) -> str:
    stored, plain = broker["size_bytes"], broker["plain_bytes"]
    more = "" if plain <= stored else f" (of {format_size(plain)}, compressed)"
    return format_size(stored) + more


def _stored(broker: dict[str, Any]) -> str:
    """The bundles, level by level, and how much of them is not named any more."""
    levels = ", ".join(f"{row['objects']:,} of level {row['level']}" for row in broker["levels"])
    return (
        f"{counted(broker['objects'], 'object')}, {format_size(broker['object_bytes'])}"
        f" ({levels}); {broker['space_amplification']:.2f} x what is named"
    )


def _show(output: Output, broker: dict[str, Any], now_ms: int, *, is_billed: bool) -> None:
    from tiered.upkeep.status import rate_text

    output.line(f"{broker['cluster']}/{broker['broker']}")
    output.line(f"  writer    {_writer(broker, now_ms)}")
    output.line(
        f"  contents  {counted(broker['messages'], 'message')} in {counted(broker['queue_count'], 'queue')},"
        f" {_sizes(broker)}; {counted(broker['gaps'], 'gap')}, {broker['quarantined']:,} quarantined,"
        f" {counted(broker['holes'], 'hole')}"
    )
    if broker["levels"]:
        output.line(f"  stored    {_stored(broker)}")
    if broker["rate"]:
        output.line(f"  requests  {rate_text(broker['rate'], is_billed=is_billed)}")
    if broker["lag_messages"] is not None:
        size = broker["lag_bytes"]
        output.line(
            f"  lag       {counted(broker['lag_messages'], 'message')}"
            + (f", {format_size(size)}" if size is not None else "")
            + f", {broker['lag_seconds']:.0f} s"
        )
    for text in _remarks(broker):
        output.line(f"  {text}")
    rows = [queue for topic in broker["topics"] for queue in topic["queues"]]
    with_lag = broker["lag_messages"] is not None
    hidden = set() if with_lag else {"local_max_offset", "lag_messages", "lag_bytes", "lag_seconds"}
    if rows:
        output.line()
        older = ["incarnation", "ended_lives", "truncated_messages"]
        columns = [*COLUMNS, *(older if broker["ended_lives"] or broker["truncated"] else [])]
        output.table(rows, [column for column in columns if column not in hidden])
    output.line()


def _writer(broker: dict[str, Any], now_ms: int) -> str:
    lease = broker["lease"]
    epoch = f"epoch {broker['epoch']}, last entry {format_time(broker['updated_ms'])}"
    if lease is None or not lease["is_held"]:
        return f"none ({epoch})"
    left_s = (lease["expires_ms"] - now_ms) / 1000
    return f"process {lease['pid']} on {lease['host']} ({epoch}; lease for {left_s:.0f} s more)"


def _remarks(broker: dict[str, Any]) -> list[str]:
    """What waits and why, and what is left out."""
    remarks = []
    if broker["decommissioned_ms"] is not None:
        when = format_time(broker["decommissioned_ms"])
        remarks.append(f"broker    decommissioned {when}: `tiered mount` serves its tier")
    waiting = broker["waiting"]
    if waiting and waiting["records"]:
        size = format_size(waiting["size_bytes"])
        remarks.append(
            f"waiting   {counted(waiting['records'], 'record')}, {size}: {waiting['reason']}"
        )
    local = broker["local"]
    if local:
        remarks += [f"note      {note}" for note in local["notes"]]
        names = (
            *("torn_bytes", "foreign_entries", "below_min_entries", "damaged_records"),
            "wrong_tag_codes",
        )
        found = [f"{name.replace('_', ' ')} {local[name]:,}" for name in names if local[name]]
        if found:
            remarks.append(f"local     {', '.join(found)}")
    remarks += [f"left out  {left['name']}: {left['reason']}" for left in broker["left_out"] or ()]
    if broker["ended_lives"] or broker["truncated"]:
        remarks.append(
            f"older     {counted(broker['ended_lives'], 'incarnation that is', 'incarnations that are')} over,"
            f" {counted(broker['truncated_messages'], 'message')} that the broker truncated"
            " (`tiered ls URL --lives`)"
        )
    ahead = [
        queue for topic in broker["topics"] for queue in topic["queues"] if queue["ahead_messages"]
    ]
    if ahead:
        count = sum(queue["ahead_messages"] for queue in ahead)
        remarks.append(
            f"ahead     {counted(len(ahead), 'queue is', 'queues are')} longer here than in the store,"
            f" by {counted(count, 'message')}: a copy that lags, or has lost"
            " its tail; nothing is taken of them until it has grown beyond"
        )
    if broker["refused_parts"]:
        remarks.append(f"refused   {counted(broker['refused_parts'], 'part')} of fenced writers")
    return remarks


# --------------------------------------------------------------------------------------------------
# ``tiered ls``: topics and queues, or the objects (bundles) and what lies in them, or the lives of queues.
# --------------------------------------------------------------------------------------------------

QUEUE_COLUMNS = [
    "topic",
    "queue_id",
    "min_offset",
    "commit_offset",
    "messages",
    "segments",
    "objects",
    "size_bytes",
]
LIFE_COLUMNS = [
    "topic",
    "queue_id",
    "incarnation",
    "state",
    "min_offset",
    "commit_offset",
    "messages",
    "segments",
    "size_bytes",
    "reason",
]
OBJECT_COLUMNS = [
    "level",
    "holds",
    "sections",
    "messages",
    "named_bytes",
    "size_bytes",
    "key",
]


@dataclass(frozen=True, kw_only=True)
class LsOptions:
    """What ``tiered ls`` can be told."""

    url: str = argument()
    topic: str | None = maybe()
    objects: bool = flag("list the objects (bundles) and what lies in them")
    lives: bool = flag(
        "list each life of a queue: incarnations that are over, ends that the broker truncated, the present one"
    )


def run_ls(call: Call, options: LsOptions) -> int:
    """Read and print."""
    from tiered.cli.call import open_tier

    output = Output(call)
    with contextlib.ExitStack() as stack:
        tier = open_tier(call, options.url, stack)
    queues = queues_of(tier, options.topic)
    if options.objects and options.lives:
        raise InvalidError("--objects and --lives contradict each other", do="give one of them")
    head = {"format": 1, "cluster": tier.place.cluster, "broker": tier.place.broker}
    if options.objects:
        objects = object_rows(tier, queues)
        document = {**head, "objects": list(objects)} if output.form == "json" else head
        output.emit(document, objects, OBJECT_COLUMNS)
    elif options.lives:
        lives = [row for queue in queues for row in life_rows(tier, queue)]
        output.emit({**head, "lives": lives}, lives, LIFE_COLUMNS)
    else:
        rows = queue_listing(tier, queues)
        columns = QUEUE_COLUMNS
        if output.form == "table" and any(row["ended_lives"] + row["truncated"] for row in rows):
            columns = [*QUEUE_COLUMNS, "incarnation", "ended_lives", "truncated_messages"]
        output.emit({**head, "queues": rows}, rows, columns)
    return 0


def queues_of(tier: Tier, topic: str | None) -> list[MessageQueue]:
    """The queues of a topic, or all.

    Raises:
        InvalidError: The tier has no such topic.
    """
    queues = tier.queues(topic)
    if topic is not None and not queues:
        raise InvalidError(
            f"the tier has no topic {topic}",
            where=tier.store.url,
            do="`tiered ls URL` lists the topics and queues",
        )
    return queues


def queue_listing(tier: Tier, queues: list[MessageQueue]) -> list[Row]:
    """A row a queue."""
    from tiered.upkeep.status import BrokerFacts, queue_rows

    facts = BrokerFacts(tier.place, tier.state, 0, None)
    wanted = {(queue.topic, queue.queue_id) for queue in queues}
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("lag_", "local_", "ahead_"))
        }
        for row in queue_rows(facts)
        if (row["topic"], row["queue_id"]) in wanted
    ]


def life_rows(tier: Tier, queue: MessageQueue) -> Iterator[Row]:
    """A row for each life of a queue, oldest first."""
    from tiered.log.truncation import is_tail

    lives = tier.state.queues[queue]
    for number, life in enumerate(lives):
        parts = life.parts()
        times = parts.store_times or (None, None)
        truncated = is_tail(lives, number)
        yield {
            "topic": queue.topic,
            "queue_id": queue.queue_id,
            "incarnation": life.incarnation,
            "state": "truncated" if truncated else "ended" if life.ended else "present",
            "reason": life.ended,
            "min_offset": life.min_offset,
            "commit_offset": life.commit_offset,
            "messages": parts.messages,
            "segments": len(life.segments),
            "size_bytes": int(parts.stored_bytes().sum()),
            "store_min_ms": times[0],
            "store_max_ms": times[1],
        }


@dataclass(frozen=True, slots=True)
class _HeldPart:
    """A part that lies in a bundle: row ``number`` of a segment's."""

    queue: MessageQueue
    incarnation: int
    segment: Segment
    number: int

    def row(self) -> Row:
        part = self.segment.parts[self.number]
        return {
            "topic": self.queue.topic,
            "queue_id": self.queue.queue_id,
            "incarnation": self.incarnation,
            "segment": self.segment.base_offset,
            "state": "sealed" if self.segment.sealed else "open",
            "queue_offset": part.queue_offset,
            "messages": part.count - part.holes,
            "log_offset": part.log_offset,
            "log_bytes": part.log_bytes,
            "start": part.section.start,
            "named_bytes": part.stored_bytes,
            "size_bytes": part.section.size_bytes,
            "is_packed": part.section.is_packed,
        }


def object_rows(tier: Tier, queues: list[MessageQueue]) -> Iterator[Row]:
    """A row for each object (bundle) in which these queues have something, lowest level first; ``parts``: what that is.

    Keys are relative to the URL.
    """
    held: dict[Bundle, list[_HeldPart]] = {}
    for queue in queues:
        for life in tier.state.queues[queue]:
            for segment in life.segments:
                for number, bundle in enumerate(segment.parts.bundles):
                    one = _HeldPart(queue, life.incarnation, segment, number)
                    held.setdefault(bundle, []).append(one)
    for bundle in sorted(held, key=lambda one: (one.level, one.key.rpartition("/")[2])):
        rows = [one.row() for one in held[bundle]]
        yield {
            "level": bundle.level,
            "holds": _holds([one.queue for one in held[bundle]]),
            "queues": len({one.queue for one in held[bundle]}),
            "sections": len(rows),
            "messages": sum(row["messages"] for row in rows),
            "named_bytes": sum(row["named_bytes"] for row in rows),
            "size_bytes": bundle.size_bytes,
            "key": tier.place.prefix + bundle.key,
            "parts": rows,
        }


def _holds(queues: Iterable[MessageQueue]) -> str:
    """Whose sections a bundle has, in a few words."""
    found = sorted(set(queues))
    topics = sorted({queue.topic for queue in found})
    if len(found) == 1:
        return str(found[0])
    return f"{len(found)} queues of " + (topics[0] if len(topics) == 1 else f"{len(topics)} topics")


# --------------------------------------------------------------------------------------------------
# ``tiered lease``: who writes, until when; and freeing the lease by hand.
# --------------------------------------------------------------------------------------------------

_LEASE_BROKEN = (
    "tiered: warning: the lease is broken. Its holder, if it lives, stops at its next renewal (exit code 4); if it hangs,"
    " it is fenced by the journal as soon as a new writer begins. Nothing that is in the tier is lost."
)
_LEASE_WORDS = {
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


def run_lease(call: Call, options: LeaseOptions) -> int:
    """Show, and break if told to."""
    import random

    from tiered.api.broker_place import choose_place
    from tiered.api.stores import backend_errors
    from tiered.cli.call import open_objects
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
        call.say(_LEASE_BROKEN, level="warning")
    if output.form == "table":
        _show_lease(output, document)
    else:
        output.emit(document, [document], list(document))
    return DONE


def _show_lease(output: Output, document: dict[str, Any]) -> None:
    output.line(f"{document['cluster']}/{document['broker']}")
    output.line(f"  state     {document['state']} ({_LEASE_WORDS[document['state']]})")
    if document["writer"]:
        output.line(
            f"  holder    process {document['pid']} on {document['host']}, writer {document['writer']}"
        )
        output.line(f"  until     {format_time(document['expires_ms'])}")
    output.line(
        f"  epoch     {document['epoch']} of writer {document['present_writer'] or '-'},"
        f" last entry {format_time(document['updated_ms'])}"
    )
    if document["is_broken"]:
        output.line("  broken    yes: the lease is free now")


COMMAND = make_command(
    "status",
    StatusOptions,
    run,
    examples=[
        "tiered status file:///tmp/tier",
        "tiered status s3://bucket/prefix --store /data/rocketmq/store --json",
    ],
)
LS = make_command(
    "ls",
    LsOptions,
    run_ls,
    examples=[
        "tiered ls file:///tmp/tier",
        "tiered ls file:///tmp/tier orders --objects -o jsonl",
    ],
)
LEASE = make_command(
    "lease",
    LeaseOptions,
    run_lease,
    examples=["tiered lease file:///tmp/tier", "tiered lease s3://bucket/prefix --break"],
)
