"""``tiered ls``: topics and queues, or segments and their objects, or the lives of queues."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from tiered.cli.frame import COMMANDS, make_command
from tiered.cli.output import Output, Row
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.cli.call import Call
    from tiered.model import MessageQueue
    from tiered.plugin.tier import Tier

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
    "topic",
    "queue_id",
    "incarnation",
    "segment",
    "state",
    "kind",
    "queue_offset",
    "messages",
    "log_offset",
    "size_bytes",
    "key",
]


def run(call: Call) -> int:
    """Read and print."""
    from tiered.cli.tiers import open_tier

    output = Output(call)
    with contextlib.ExitStack() as stack:
        tier = open_tier(call, call.argument("url"), stack)
    queues = queues_of(tier, call.arguments["topic"])
    if call.flag("objects") and call.flag("lives"):
        raise InvalidError("--objects and --lives contradict each other", do="give one of them")
    head = {"format": 1, "cluster": tier.place.cluster, "broker": tier.place.broker}
    if call.flag("objects"):
        objects = object_rows(tier, queues)
        document = {**head, "objects": list(objects)} if output.form == "json" else head
        output.emit(document, objects, OBJECT_COLUMNS)
    elif call.flag("lives"):
        lives = [row for queue in queues for row in life_rows(tier, queue)]
        output.emit({**head, "lives": lives}, lives, LIFE_COLUMNS)
    else:
        rows = queue_listing(tier, queues)
        columns = QUEUE_COLUMNS
        if output.form == "table" and any(row["ended_lives"] + row["taken_back"] for row in rows):
            columns = [*QUEUE_COLUMNS, "incarnation", "ended_lives", "taken_back_messages"]
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
    from tiered.plugin.status import BrokerFacts, queue_rows

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
    from tiered.log.takeback import is_tail

    lives = tier.state.queues[queue]
    for number, life in enumerate(lives):
        parts = life.parts()
        taken_back = is_tail(lives, number)
        yield {
            "topic": queue.topic,
            "queue_id": queue.queue_id,
            "incarnation": life.incarnation,
            "state": "taken_back" if taken_back else "ended" if life.ended else "present",
            "reason": life.ended,
            "min_offset": life.min_offset,
            "commit_offset": life.commit_offset,
            "messages": sum(part.count - part.holes for part in parts),
            "segments": len(life.segments),
            "size_bytes": sum(p.log.end - p.log.start + p.index.end - p.index.start for p in parts),
            "store_min_ms": min(
                (p.store_min_ms for p in parts if p.store_min_ms >= 0), default=None
            ),
            "store_max_ms": max(
                (p.store_max_ms for p in parts if p.store_max_ms >= 0), default=None
            ),
        }


def object_rows(tier: Tier, queues: list[MessageQueue]) -> Iterator[Row]:
    """A row for each range of an object that a segment consists of; keys are relative to the URL."""
    for queue in queues:
        for life in tier.state.queues[queue]:
            for segment in life.segments:
                for part in segment.parts:
                    for kind, place in (("commitlog", part.log), ("consumequeue", part.index)):
                        if not place.key:
                            continue
                        yield {
                            "topic": queue.topic,
                            "queue_id": queue.queue_id,
                            "incarnation": life.incarnation,
                            "segment": segment.base_offset,
                            "state": "sealed" if segment.sealed else "open",
                            "kind": kind,
                            "queue_offset": part.queue_offset,
                            "messages": part.count - part.holes,
                            "log_offset": part.log_offset,
                            "start": place.start,
                            "end": place.end,
                            "size_bytes": place.object_bytes,
                            "key": tier.place.prefix + place.key,
                        }


COMMAND = make_command(
    "ls",
    run,
    summary=COMMANDS["ls"].summary,
    arguments=[click.Argument(["url"]), click.Argument(["topic"], required=False)],
    examples=[
        "tiered ls file:///tmp/tier",
        "tiered ls file:///tmp/tier orders --objects -o jsonl",
    ],
)
