"""``tiered restore``: a tier's messages as a store directory on which a broker starts."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass, picked
from tiered.cli import kinds
from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import command
from tiered.cli.options import (
    SpanOptions,
    StoreFileOptions,
    argument,
    flag,
    option,
    required,
    several,
)
from tiered.cli.output import show
from tiered.cli.signals import Stopper
from tiered.cli.stderr import Progressed
from tiered.cli.values import counted, format_size, span_text, topic_filter
from tiered.errors import InvalidError
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.api.open_tier import OpenTier
    from tiered.cli.call import Call
    from tiered.mount.restore import Restored, RestorePlan, RestoreSelection

_MIB = 1024 * 1024
_RESULTS = (
    *("is_complete", "records", "log_end", "filled_offsets", "topics", "groups"),
    *("consumer_offsets", "damaged_messages", "damaged"),
)
"""What a dry run does not know."""
DRAIN_S = 10.0
"""For what is under way when it is stopped."""
SAMPLE_BYTES = 4 * _MIB
"""How much is read to tell how long it would take."""
SAMPLE_QUEUES = 64


@dataclass(frozen=True, kw_only=True)
class RestoreOptions(SpanOptions, StoreFileOptions):
    """What ``tiered restore`` can be told."""

    url: str = argument()
    to: str = required(
        "store directory to make, empty or missing; built in DIR.restoring",
        kinds.DIR,
    )
    topics: tuple[str, ...] = several("topics to restore", kinds.GLOBS, default_text="all")
    offsets_of: str | None = option(
        "mount whose consumer offsets to use (its --name, with /ADDRESS if --shared)",
        kinds.NAME,
        default_text="the mount of the broker's name",
    )
    accept_damage: bool = flag("make damaged messages offsets without a message, for ever")
    dry_run: bool = flag("estimate cost and duration from one sample")
    memory_bytes: int = option(
        "memory for reading; at least 64 KiB per queue",
        kinds.SIZE,
        default=256 * _MIB,
    )


@command("restore", RestoreOptions)
def run(call: Call, options: RestoreOptions) -> int:
    """Rebuilds a broker's store directory from a tier.

    Queue offsets stay; docs/mount.md says what changes. After an interruption repeat the command.

    Examples:
        tiered restore s3://bucket/prefix --to /data/rocketmq/store --dry-run
        tiered restore file:///tmp/tier --to /tmp/restored --topics 'orders*' --from now-2d
    """
    from tiered.mount.restore import Restore, plan_restore
    from tiered.store.store_options import StoreOptions

    stopping = threading.Event()
    tier = call.tier(options.url, memory_bytes=options.memory_bytes)
    topics = {queue.topic for queue in tier.queues()}
    call.require_topics("topics", options.topics, topics, options.url)
    plan = plan_restore(tier, read_selection(call, options))
    if plan.retry_tier is not None:
        call.opened.callback(plan.retry_tier.close)
    document = planned(options, tier, plan)
    sizes = StoreOptions(options.log_file_size_bytes, options.queue_items)
    restore = Restore(
        tier,
        plan,
        options.to,
        sizes,
        call.clock,
        memory_bytes=options.memory_bytes,
        stop=stopping.is_set,
        accepts_damage=options.accept_damage,
    )
    goes_on = restore.check()
    if options.dry_run:
        document["seconds"] = sampled_seconds(call, tier, plan)
        return told(call, document, plan_lines(document))
    if not goes_on:
        require_room(options, plan)
    began_s = call.clock.monotonic_s()

    def done_so_far() -> Progressed:
        done_bytes = restore.done_bytes
        return Progressed(format_size(done_bytes), done_bytes, plan.record_bytes)

    with (
        Stopper(call.watch, stopping.set, seconds=DRAIN_S) as stopper,
        call.progress("restoring", done_so_far),
    ):
        result = restore.run()
    requests = tier.meter.snapshot()
    document |= {
        **done(result),
        "requests": requests.requests,
        "request_dollars": round(requests.dollars, 6),
        "seconds": round(call.clock.monotonic_s() - began_s, 3),
    }
    told(call, document, result_lines(options, document))
    if not result.is_complete:
        return stopper.exit_code or NEEDS_A_PERSON
    return NEEDS_A_PERSON if result.lost else DONE


@dataclass(frozen=True, kw_only=True)
class HandBackOptions:
    """What ``tiered hand-back`` can be told."""

    url: str = argument()
    store: str = required("the stopped broker's store directory", kinds.DIR)
    mount: str | None = option(
        "the mount's --name, with /ADDRESS if --shared",
        kinds.NAME,
        default_text="the mount of the broker's name",
    )


@command("hand-back", HandBackOptions)
def hand_back(call: Call, options: HandBackOptions) -> int:
    """Returns a mount's offsets and retries to its broker.

    Adds consumer offsets to the broker's table (a copy is kept) and retries to its log. Stop the mount first; then
    start the broker and `attach --recommission`.

    Examples:
        tiered hand-back s3://bucket/prefix --store /data/rocketmq/store
        tiered hand-back file:///tmp/tier --store /tmp/store --json
    """
    import random

    from tiered.mount.hand_back import hand_back as do

    tier = call.tier(options.url)
    mount = options.mount or tier.place.broker
    result = do(tier, options.store, mount, call.clock, random.SystemRandom())
    counts = picked(result, "offsets", "waiting", "retries", "dead")
    document = {
        "format": 1,
        "url": tier.meter.url,
        **picked(tier.place, "cluster", "broker"),
        "store": options.store,
        "mount": mount,
        **counts,
        "kept_as": result.kept_as,
    }
    was = f"; the old ones are in {result.kept_as}" if result.kept_as else ""
    lines = [
        f"tiered: offsets of {counted(result.offsets, 'queue')} are in config/consumerOffset.json{was}",
        (
            f"tiered: in the broker's log now: {counted(result.waiting, 'delayed message')},"
            f" {counted(result.retries, 'retry', 'retries')}, {counted(result.dead, 'dead letter')}"
        ),
        f"tiered: start the broker, then `tiered attach {options.store} --to {options.url} --recommission`",
    ]
    return told(call, document, lines)


def read_selection(call: Call, options: RestoreOptions) -> RestoreSelection:
    """What the options say."""
    from tiered.mount.restore import RestoreSelection

    return RestoreSelection(
        selects=topic_filter(options.topics),
        from_ms=call.ms(options.from_),
        until_ms=call.ms(options.until),
        wish=f"{','.join(sorted(options.topics)) or 'all topics'}{span_text(options.from_, options.until)}",
        offsets_of=options.offsets_of or "",
        is_whole=not (options.topics or options.from_ or options.until),
    )


def require_room(options: RestoreOptions, plan: RestorePlan) -> None:
    """Refuse a disk on which there is not enough room."""
    from tiered.mount.restore import building

    place = building(options.to)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free > plan.record_bytes + plan.list_bytes:
        return
    raise InvalidError(
        f"{format_size(plan.record_bytes + plan.list_bytes)} are to be restored, and {format_size(free)} are free",
        where=str(place),
        do="choose another disk, or fewer messages with --topics, --from and --until",
    )


def sampled_seconds(call: Call, tier: OpenTier, plan: RestorePlan) -> float:
    """About how long it would take, by reading the beginnings of the largest queues side by side."""
    from tiered.api.reading import Span, read_sound

    largest = sorted(plan.spans, key=lambda span: span.start - span.stop)[:SAMPLE_QUEUES]
    each = plan.messages * SAMPLE_BYTES // max(plan.record_bytes, 1) // len(largest) + 1
    spans = [
        Span(one.cursor, one.start, min(one.stop, QueueOffset(one.start + each)), is_firm=True)
        for one in largest
    ]
    began_s, read_bytes = call.clock.monotonic_s(), 0
    with tier.group() as group:
        tier.expect(group, [(one.cursor, one.start, one.stop) for one in spans])
        for span in spans:
            for batch in read_sound(
                tier, span, group, _MIB, []
            ):  # what is damaged the restore itself tells
                read_bytes += memoryview(batch.records.data).nbytes
    seconds = call.clock.monotonic_s() - began_s
    return round(seconds * plan.record_bytes / max(read_bytes, 1), 1)


def planned(options: RestoreOptions, tier: OpenTier, plan: RestorePlan) -> dict[str, Any]:
    """What is known before it begins."""
    from tiered.mount.restore import building

    return {
        "format": 1,
        "url": tier.meter.url,
        **picked(tier.place, "cluster", "broker"),
        "store": options.to,
        "made_in": str(building(options.to)),
        "is_dry_run": options.dry_run,
        "queues": len(plan.spans),
        "skipped_queues": plan.skipped,
        "size_bytes": plan.record_bytes,
        **picked(plan, "messages", "list_bytes", "requests"),
        "request_dollars": round(plan.dollars, 6),
        "seconds": None,
        "left_out_mounts": list(plan.left_out_mounts),
        **dict.fromkeys(_RESULTS),
    }


def done(result: Restored) -> dict[str, Any]:
    """What came of it."""
    return {
        **picked(result, "is_complete", "records", "log_end", "topics", "groups"),
        "size_bytes": result.record_bytes,
        "filled_offsets": result.filled,
        "consumer_offsets": result.offsets,
        "damaged_messages": sum(one.end - one.start for one in result.lost),
        "damaged": [
            {**one.queue._asdict(), "start": one.start, "end": one.end, "why": one.what}
            for one in result.lost
        ],
    }


def plan_lines(document: dict[str, Any]) -> list[str]:
    """Of a dry run, for people."""
    return [
        (
            f"tiered: would restore {counted(document['messages'], 'message')} of"
            f" {counted(document['queues'], 'queue')}: {format_size(document['size_bytes'])} of records,"
            f" {format_size(document['list_bytes'])} of consume queues"
        ),
        (
            f"tiered: about {counted(document['requests'], 'request')},"
            f" {document['request_dollars']:.4f} dollars, and {document['seconds']:.1f} s of reading"
            " by the speed of a sample"
        ),
        *mount_lines(document),
    ]


def mount_lines(document: dict[str, Any]) -> list[str]:
    """Which mounts' offsets are not taken, for people."""
    others = document["left_out_mounts"]
    what = f"tiered: consumer offsets of {counted(len(others), 'other mount')} are left out: {', '.join(others)}"
    return [f"{what} (see --offsets-of)"] if others else []


def result_lines(options: RestoreOptions, document: dict[str, Any]) -> list[str]:
    """What was done, for people."""
    found = [
        (
            f"tiered: {counted(document['records'], 'record')}, {format_size(document['size_bytes'])} restored,"
            f" {counted(document['requests'], 'request')}, {document['seconds']:.1f} s"
        )
    ]
    if not document["is_complete"]:
        return [
            *found,
            f"tiered: it was stopped; the same command goes on where it ended, in {document['made_in']}",
        ]
    found.extend(
        f"tiered: {one['topic']}/{one['queue_id']} [{one['start']}, {one['end']}) is damaged in the tier, and has no"
        f" messages here: {one['why']}"
        for one in document["damaged"]
    )
    if document["filled_offsets"]:
        filled = counted(document["filled_offsets"], "queue offset has", "queue offsets have")
        found.append(f"tiered: {filled} no message, as in the tier; clients pass over them")
    return [
        *found,
        (
            f"tiered: {counted(document['topics'], 'topic')}, {counted(document['groups'], 'group')}, offsets of"
            f" {counted(document['consumer_offsets'], 'queue')} in config/"
        ),
        *mount_lines(document),
        (
            "tiered: queue offsets, unique ids and times are as they were; message ids made of host and offset are"
            " new, since records lie elsewhere in the log"
        ),
        (
            f"tiered: start a broker with storePathRootDir={options.to},"
            f" brokerName={document['broker']}, brokerClusterName={document['cluster']}"
        ),
    ]


def told(call: Call, document: dict[str, Any], lines: Sequence[str]) -> int:
    """Say it, to people and as was asked for."""
    for line in lines:
        call.say(line)
    show(call, document, lines=())
    return DONE
