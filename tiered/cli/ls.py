"""``tiered ls``: topics and queues, or the objects (bundles) and what lies in them, or the lives of queues."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.cli.frame import make_command
from tiered.cli.options import argument, flag, maybe
from tiered.cli.output import Output, Row
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tiered.api.tier import Tier
    from tiered.cli.call import Call
    from tiered.log.parts import Bundle, Segment
    from tiered.model import MessageQueue

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
        "list each life of a queue: incarnations that are over, ends that the broker took back, the present one"
    )


def run(call: Call, options: LsOptions) -> int:
    """Read and print."""
    from tiered.cli.tiers import open_tier

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
    from tiered.log.takeback import is_tail

    lives = tier.state.queues[queue]
    for number, life in enumerate(lives):
        parts = life.parts()
        times = parts.store_times or (None, None)
        taken_back = is_tail(lives, number)
        yield {
            "topic": queue.topic,
            "queue_id": queue.queue_id,
            "incarnation": life.incarnation,
            "state": "taken_back" if taken_back else "ended" if life.ended else "present",
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
class _Held:
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
    held: dict[Bundle, list[_Held]] = {}
    for queue in queues:
        for life in tier.state.queues[queue]:
            for segment in life.segments:
                for number, bundle in enumerate(segment.parts.bundles):
                    one = _Held(queue, life.incarnation, segment, number)
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


COMMAND = make_command(
    "ls",
    LsOptions,
    run,
    examples=[
        "tiered ls file:///tmp/tier",
        "tiered ls file:///tmp/tier orders --objects -o jsonl",
    ],
)
