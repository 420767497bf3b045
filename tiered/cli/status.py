"""``tiered status``: how far each queue is tiered, and what waits and why."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiered.cli.frame import make_command
from tiered.cli.options import argument, option
from tiered.cli.output import Output
from tiered.cli.values import counted, format_size, format_time

if TYPE_CHECKING:
    from tiered.cli.call import Call
    from tiered.local.face import LocalStore

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


def run(call: Call, options: StatusOptions) -> int:
    """Read and print."""
    from tiered.api.stores import backend_errors
    from tiered.cli.tiers import open_local, open_objects
    from tiered.upkeep.status import bills_requests, read_status, status_document

    url, directory = options.url, options.store
    output = Output(call)
    with contextlib.ExitStack() as stack, backend_errors():
        store = open_objects(call, url, stack)
        local: LocalStore | None = open_local(call, directory, stack) if directory else None
        now_ms = call.clock.now_ms()
        facts = read_status(
            store,
            cluster=call.common.cluster,
            broker=call.common.broker,
            local=local,
            now_ms=now_ms,
        )
    document = status_document(store.url, facts, now_ms)
    if output.form == "table":
        for broker in document["brokers"]:
            _show(output, broker, now_ms, is_billed=bills_requests(url))
    else:
        rows = [_row(broker, queue) for broker, queue in _queues(document)]
        output.emit(document, rows, ["cluster", "broker", *COLUMNS])
    return 0


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
        older = ["incarnation", "ended_lives", "taken_back_messages"]
        columns = [*COLUMNS, *(older if broker["ended_lives"] or broker["taken_back"] else [])]
        output.table(rows, [column for column in columns if column not in hidden])
    output.line()


def _writer(broker: dict[str, Any], now_ms: int) -> str:
    lease = broker["lease"]
    reign = f"generation {broker['generation']}, last entry {format_time(broker['updated_ms'])}"
    if lease is None or not lease["is_held"]:
        return f"none ({reign})"
    left_s = (lease["expires_ms"] - now_ms) / 1000
    return f"process {lease['pid']} on {lease['host']} ({reign}; lease for {left_s:.0f} s more)"


def _remarks(broker: dict[str, Any]) -> list[str]:
    """What waits and why, and what is left out."""
    remarks = []
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
    if broker["ended_lives"] or broker["taken_back"]:
        remarks.append(
            f"older     {counted(broker['ended_lives'], 'incarnation that is', 'incarnations that are')} over,"
            f" {counted(broker['taken_back_messages'], 'message')} that the broker took back"
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


COMMAND = make_command(
    "status",
    StatusOptions,
    run,
    examples=[
        "tiered status file:///tmp/tier",
        "tiered status s3://bucket/prefix --store /data/rocketmq/store --json",
    ],
)
