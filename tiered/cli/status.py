"""``tiered status``, ``tiered ls`` and ``tiered lease``: how far a tier is, what is in it, and who writes it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

from backends.lazy_dataclass import dataclass, picked
from tiered.cli import kinds
from tiered.cli.exits import DONE
from tiered.cli.frame import command
from tiered.cli.options import BrokersOptions, argument, flag, maybe, option, several
from tiered.cli.output import Output, Row, Table, show
from tiered.cli.values import broker_filter, counted, format_size, format_time, topic_filter
from tiered.errors import InvalidError, no_topic

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.api.open_tier import OpenTier
    from tiered.cli.call import Call
    from tiered.cli.options import TopicRules
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
FLEET_COLUMNS = [
    *("state", "cluster", "broker", "queue_count", "messages", "size_bytes", "gaps", "quarantined"),
    *("updated", "writer", "reason"),
]


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """What ``tiered status`` can be told."""

    url: str = argument()
    store: str | None = option(
        "local store to compare with", kinds.DIR, default_text="none: lag unknown"
    )
    topics: tuple[str, ...] = several(
        "topics that attach tiers; others show no lag beyond the tier",
        kinds.GLOBS,
        default_text="all",
    )
    exclude: tuple[str, ...] = several("topics that attach leaves out", kinds.GLOBS)
    brokers: tuple[str, ...] = several(
        "only these: BROKER or CLUSTER/BROKER",
        kinds.GLOBS,
        default_text="all",
        excludes="broker",
    )
    watch: bool = flag("repeat every 5 s until stopped")


@command("status", StatusOptions)
def run(call: Call, options: StatusOptions) -> int:
    """Shows how far each queue is tiered, and what is pending.

    Several brokers have a line each, the worst first.

    Examples:
        tiered status file:///tmp/tier
        tiered status s3://bucket/prefix --store /data/rocketmq/store --json
    """
    if not options.watch:
        return _show(call, options, call.objects(options.url))
    if call.form not in {"table", "wide"}:
        raise InvalidError("--watch is for people", where=call.path, do="leave -o and --json out")
    store, stop = call.objects(options.url), threading.Event()
    while True:
        if call.stdout.isatty():
            call.stdout.write(_CLEAR)
        code = _show(call, options, store)
        call.stdout.flush()
        if call.clock.wait(stop, WATCH_S):
            return code


WATCH_S = 5.0
_CLEAR = b"\x1b[H\x1b[2J\x1b[3J"


def _show(call: Call, options: StatusOptions, store: ObjectStore) -> int:
    from tiered.upkeep.status import read_status, status_document

    now_ms = call.clock.now_ms()
    with call.progress("status", "looking for brokers") as progress:
        facts, unread = read_status(
            store,
            cluster=call.common.cluster,
            broker=call.common.broker,
            local=call.local(options.store) if options.store else None,
            now_ms=now_ms,
            selects=topic_filter(options.topics, options.exclude),
            takes=broker_filter(options.brokers),
            told=lambda count, total: progress.tell(f"{count} of {total} brokers", count, total),
        )
    document = status_document(store.url, facts, unread, now_ms)
    for broker in document["brokers"]:
        broker["limited"] = _limited(call.rules, broker)
    rows = [
        {"cluster": broker["cluster"], "broker": broker["broker"], **queue}
        for broker in document["brokers"]
        for queue in _queues(broker)
    ]
    columns = ["cluster", "broker", *COLUMNS]
    show(call, document, rows=rows, columns=columns, lines=_lines(document, now_ms, options.url))
    if call.form in {"jsonl", "csv"}:
        for one in document["unread"]:
            name = f"{one['cluster']}/{one['broker']}"
            call.say(f"tiered: {name}: {one['state']}: {one['reason']}", level="error")
    return max((one["exit_code"] for one in document["unread"]), default=0)


def _limited(rules: TopicRules, broker: dict[str, Any]) -> list[dict[str, Any]]:
    """Topics that a ``rate`` limits, by the configuration file of this call: what ``attach`` reads, if it has the same."""
    return [
        {
            "topic": topic["topic"],
            "rate_bytes": rate,
            "by": rules.source,
            "lag_messages": topic["lag_messages"],
        }
        for topic in broker["topics"]
        if (rate := rules.get(topic["topic"], "rate", 0))
    ]


def _queues(broker: dict[str, Any]) -> list[Row]:
    return [queue for topic in broker["topics"] for queue in topic["queues"]]


def _lines(document: dict[str, Any], now_ms: int, url: str) -> Iterator[str | Table]:
    from tiered.upkeep.status import bills_requests, worst_first

    brokers, unread = document["brokers"], document["unread"]
    if len(brokers) + len(unread) == 1:
        yield from _broker_lines(brokers[0], now_ms, is_billed=bills_requests(url))
        return
    rows = worst_first(brokers, unread)
    for row in rows:
        row["updated"] = format_time(row["updated_ms"]) if "updated_ms" in row else None
    yield Table(rows, FLEET_COLUMNS)
    yield ""
    yield f"{counted(len(rows), 'broker')}; --cluster and --broker show one of them"


def _broker_lines(broker: dict[str, Any], now_ms: int, *, is_billed: bool) -> Iterator[str | Table]:
    from tiered.upkeep.status import rate_text

    stored, plain = broker["size_bytes"], broker["plain_bytes"]
    packed = "" if plain <= stored else f" (of {format_size(plain)}, compressed)"
    yield f"{broker['cluster']}/{broker['broker']}"
    yield f"  writer    {_writer(broker, now_ms)}"
    yield (
        f"  contents  {counted(broker['messages'], 'message')} in {counted(broker['queue_count'], 'queue')},"
        f" {format_size(stored)}{packed}; {counted(broker['gaps'], 'gap')}, {broker['quarantined']:,} quarantined,"
        f" {counted(broker['holes'], 'hole')}"
    )
    levels = ", ".join(f"{row['objects']:,} of level {row['level']}" for row in broker["levels"])
    if levels:
        yield (
            f"  stored    {counted(broker['objects'], 'object')}, {format_size(broker['object_bytes'])}"
            f" ({levels}); {broker['space_amplification']:.2f} x what is named"
        )
    if broker["rate"]:
        yield f"  requests  {rate_text(broker['rate'], is_billed=is_billed)}"
    with_lag = broker["lag_messages"] is not None
    if with_lag:
        size = broker["lag_bytes"]
        said = "" if size is None else f", {format_size(size)}"
        count = counted(broker["lag_messages"], "message")
        yield f"  lag       {count}{said}, {broker['lag_seconds']:.0f} s"
    for text in _remarks(broker):
        yield f"  {text}"
    hidden = set() if with_lag else {"local_max_offset", "lag_messages", "lag_bytes", "lag_seconds"}
    if rows := _queues(broker):
        yield ""
        older = ["incarnation", "ended_incarnations", "truncated_messages"]
        columns = [
            *COLUMNS,
            *(older if broker["ended_incarnations"] or broker["truncated"] else []),
        ]
        yield Table(rows, [column for column in columns if column not in hidden])
    yield ""


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
    for one in broker["paused"]:
        lag = one["lag_messages"]
        waits = "" if lag is None else f", {counted(lag, 'message waits', 'messages wait')}"
        remarks.append(
            f"paused    {one['topic']} since {format_time(one['since_ms'])}{waits}: what the broker expires"
            " meanwhile will be a gap; `tiered resume` goes on"
        )
    for one in broker["limited"]:
        if one["lag_messages"]:
            waits = counted(one["lag_messages"], "message waits", "messages wait")
            remarks.append(
                f"limited   {one['topic']} to {format_size(one['rate_bytes'])} a second by {one['by']}, {waits}:"
                " what the broker expires meanwhile will be a gap"
            )
    for log in broker["retry_logs"] or ():
        if log["reason"]:
            remarks.append(f"retries   mount {log['mount']}: cannot be read: {log['reason']}")
            continue
        remarks.append(
            f"retries   mount {log['mount']}: {counted(log['waiting'], 'message waits', 'messages wait')},"
            f" {log['retries']:,} given out again, {counted(log['dead'], 'dead letter')};"
            f" {counted(log['objects'], 'object')}, {format_size(log['object_bytes'])}"
        )
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
    if broker["ended_incarnations"] or broker["truncated"]:
        remarks.append(
            f"older     {counted(broker['ended_incarnations'], 'incarnation that is', 'incarnations that are')} over,"
            f" {counted(broker['truncated_messages'], 'message')} that the broker truncated"
            " (`tiered ls URL --incarnations`)"
        )
    ahead = [queue for queue in _queues(broker) if queue["ahead_messages"]]
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
# ``tiered ls``: topics and queues, or the objects (bundles) and what lies in them, or the incarnations of queues.
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
INCARNATION_COLUMNS = [
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
OBJECT_COLUMNS = ["level", "holds", "sections", "messages", "named_bytes", "size_bytes", "key"]


@dataclass(frozen=True, kw_only=True)
class LsOptions:
    """What ``tiered ls`` can be told."""

    url: str = argument()
    topic: str | None = maybe("only this topic")
    objects: bool = flag("list bundles and their sections", excludes="incarnations")
    incarnations: bool = flag("list ended, truncated and present incarnations")


@command("ls", LsOptions)
def run_ls(call: Call, options: LsOptions) -> int:
    """Lists topics and queues, or the segments and their objects.

    Examples:
        tiered ls file:///tmp/tier
        tiered ls file:///tmp/tier orders --objects -o jsonl
    """
    output, tier = Output(call), call.tier(options.url)
    queues = queues_of(tier, options.topic)
    head = {"format": 1, "cluster": tier.place.cluster, "broker": tier.place.broker}
    if options.objects:
        objects = object_rows(tier, queues)
        document = {**head, "objects": list(objects)} if output.form == "json" else head
        output.emit(document, objects, OBJECT_COLUMNS)
    elif options.incarnations:
        incarnations = [row for queue in queues for row in incarnation_rows(tier, queue)]
        output.emit({**head, "incarnations": incarnations}, incarnations, INCARNATION_COLUMNS)
    else:
        rows = queue_listing(tier, queues)
        columns = QUEUE_COLUMNS
        if output.form == "table" and any(
            row["ended_incarnations"] + row["truncated"] for row in rows
        ):
            columns = [*QUEUE_COLUMNS, "incarnation", "ended_incarnations", "truncated_messages"]
        output.emit({**head, "queues": rows}, rows, columns)
    return 0


def queues_of(tier: OpenTier, topic: str | None) -> list[MessageQueue]:
    """The queues of a topic, or all."""
    queues = tier.queues(topic)
    if topic is not None and not queues:
        raise no_topic(topic, tier.topics(), where=tier.store.url)
    return queues


def queue_listing(tier: OpenTier, queues: list[MessageQueue]) -> list[Row]:
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


def incarnation_rows(tier: OpenTier, queue: MessageQueue) -> Iterator[Row]:
    """A row for each incarnation of a queue, oldest first."""
    from tiered.log.state import state_word

    incarnations = tier.state.queues[queue]
    for number, incarnation in enumerate(incarnations):
        parts = incarnation.parts()
        times = parts.store_times or (None, None)
        yield {
            **queue._asdict(),
            "incarnation": incarnation.number,
            **picked(incarnation, "min_offset", "commit_offset"),
            "state": state_word(incarnations, number),
            "reason": incarnation.ended,
            "messages": parts.messages,
            "segments": len(incarnation.segments),
            "size_bytes": int(parts.stored_bytes().sum()),
            "store_min_ms": times[0],
            "store_max_ms": times[1],
        }


def _part_row(queue: MessageQueue, incarnation: int, segment: Segment, number: int) -> Row:
    """A part that lies in a bundle: row ``number`` of a segment's."""
    part = segment.parts[number]
    return {
        **queue._asdict(),
        "incarnation": incarnation,
        "segment": segment.base_offset,
        "state": "sealed" if segment.sealed else "open",
        "messages": part.count - part.holes,
        "named_bytes": part.stored_bytes,
        **picked(part, "queue_offset", "log_offset", "log_bytes"),
        **picked(part.section, "start", "size_bytes", "is_packed"),
    }


def object_rows(tier: OpenTier, queues: list[MessageQueue]) -> Iterator[Row]:
    """A row for each object (bundle) in which these queues have something, lowest level first; ``parts``: what that is.

    Keys are relative to the URL.
    """
    held: dict[Bundle, list[tuple[MessageQueue, int, Segment, int]]] = {}
    for queue in queues:
        for incarnation in tier.state.queues[queue]:
            for segment in incarnation.segments:
                for number, bundle in enumerate(segment.parts.bundles):
                    one = queue, incarnation.number, segment, number
                    held.setdefault(bundle, []).append(one)
    for bundle in sorted(held, key=lambda one: (one.level, one.key.rpartition("/")[2])):
        rows = [_part_row(*one) for one in held[bundle]]
        found = sorted({queue for queue, *_ in held[bundle]})
        yield {
            "level": bundle.level,
            "holds": _holds(found),
            "queues": len(found),
            "sections": len(rows),
            "messages": sum(row["messages"] for row in rows),
            "named_bytes": sum(row["named_bytes"] for row in rows),
            "size_bytes": bundle.size_bytes,
            "key": tier.place.prefix + bundle.key,
            "parts": rows,
        }


def _holds(found: Sequence[MessageQueue]) -> str:
    """Whose sections a bundle has, in a few words."""
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
class LeaseOptions(BrokersOptions):
    """What ``tiered lease`` can be told."""

    brokers_at_once: ClassVar = 8
    broker_columns: ClassVar = ("state", "host", "pid", "epoch", "is_broken")

    break_: bool = flag("free it even if another writer holds it")


@command("lease", LeaseOptions)
def run_lease(call: Call, options: LeaseOptions) -> int:
    """Shows who writes a tier and until when, or frees its lease.

    Examples:
        tiered lease file:///tmp/tier
        tiered lease s3://bucket/prefix --break
    """
    import random

    from tiered.api.broker_place import choose_place
    from tiered.upkeep.workplace import break_lease, report_lease

    is_broken = False
    store = call.objects(options.url)
    place = choose_place(store, call.common.cluster, call.common.broker)
    before = report_lease(store, place.prefix, call.clock)
    if options.break_:
        breaker = f"{random.SystemRandom().getrandbits(32):08x}"
        is_broken = break_lease(store, place.prefix, call.clock, breaker=breaker)
    document = {**before.document(place, store.url), "is_broken": is_broken}
    if is_broken:
        call.say(_LEASE_BROKEN, level="warning")
    show(call, document, lines=_lease_lines(document))
    return DONE


def _lease_lines(document: dict[str, Any]) -> Iterator[str]:
    yield f"{document['cluster']}/{document['broker']}"
    yield f"  state     {document['state']} ({_LEASE_WORDS[document['state']]})"
    if document["writer"]:
        yield f"  holder    process {document['pid']} on {document['host']}, writer {document['writer']}"
        yield f"  until     {format_time(document['expires_ms'])}"
    yield (
        f"  epoch     {document['epoch']} of writer {document['present_writer'] or '-'},"
        f" last entry {format_time(document['updated_ms'])}"
    )
    if document["is_broken"]:
        yield "  broken    yes: the lease is free now"
