"""``tiered attach``: follows a store directory and tiers it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import click

from backends.lazy_dataclass import dataclass, picked
from tiered.cli import kinds
from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import command
from tiered.cli.options import argument, build, flag, option, required, settings_of, several
from tiered.cli.output import show
from tiered.cli.serve import (
    NICENESS_MAX,
    ServingOptions,
    announce_lease,
    bound_malloc,
    metrics_served,
    open_unless_stopped,
)
from tiered.cli.signals import Stopper
from tiered.cli.stderr import Progressed
from tiered.cli.values import Moment, counted, few, format_size, topic_filter, unmatched
from tiered.errors import InvalidError, TieredStoreError
from tiered.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from tiered.addresses import Address
    from tiered.api.broker_place import Place
    from tiered.attach.decommission import Decommissioned
    from tiered.attach.settings import IndexSettings
    from tiered.attach.writer import Attachment, AttachResult, AttachSettings
    from tiered.cli.call import Call
    from tiered.cli.serve import Shown
    from tiered.dispatch.settings import Compression
    from tiered.local.interface import StoreReport
    from tiered.upkeep.compact_thread import CompactionThread

SYSTEM_TOPIC = "system topic"
"""The reason of ``LeftOut`` that even ``--strict`` does not count: such topics are never tiered."""
NEAR_MS = 4 * 3_600_000
_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class AttachOptions(ServingOptions):
    """What ``tiered attach`` can be told."""

    store: str = argument(
        "store directory of RocketMQ (storePathRootDir) or JoyQueue, or a Kafka node's log.dirs",
        click.Path(),
    )
    to: str = required("URL of the tier", kinds.URL)
    once: bool = flag("tier what is there, then exit")
    seal: bool = flag("with --once: finally seal all open segments", needs="once decommission")
    merge: bool = flag(
        "with --once: also merge this run's objects, not only what earlier runs left due",
        needs="once decommission",
    )
    topics: tuple[str, ...] = several("topics to tier", kinds.GLOBS, default_text="all")
    exclude: tuple[str, ...] = several("topics to leave out", kinds.GLOBS)
    start: str | Moment = option(
        "where a queue new to the tier begins: earliest, latest, or a time",
        kinds.Kind("WHERE", kinds.start),
        default=kinds.start("earliest"),
    )
    freshness_s: float = option(
        "maximum time from seeing a message until it is durable",
        kinds.DURATION_S,
        default=2.0,
    )
    decommission: bool = flag(
        "retire a stopped broker: tier everything (as --once --seal) with its topics, groups and offsets, for `tiered"
        " mount`; refused while the broker has work left"
    )
    accept_pending: bool = flag(
        "with --decommission: abandon work that only the broker could do, such as delayed messages",
        needs="decommission",
    )
    acl_from: str | None = option(
        "with --decommission: access rules to keep, without secrets: plain_acl.yml, conf/acl, or users and rules of 5.x",
        kinds.FILE,
        default_text="none, or the rules kept earlier",
        needs="decommission",
    )
    timers: bool = flag("also copy timers due later than --near, as `tiered timer import`")
    near_ms: int = option(
        "with --timers: leave what is due within this time to the broker",
        kinds.DURATION_MS,
        default=NEAR_MS,
        needs="timers",
    )
    recommission: bool = flag("continue after decommissioning", excludes="decommission")
    nice: int = option(
        "niceness, 0 to 19",
        kinds.NUMBER,
        default=10,
    )
    give_up_s: float = option(
        "with --once: exit with code 3 after this long without a successful upload",
        kinds.DURATION_S,
        name="give-up-seconds",
        default=60.0,
    )
    broker_addr: Address | None = option(
        "running broker to ask where its replicas may truncate the log",
        kinds.ADDRESS,
    )
    max_upload_rate_bytes_s: int = option("bytes per second; 0: unlimited", kinds.SIZE, default=0)
    max_read_rate_bytes_s: int = option(
        "bytes per second from the broker's store; 0: unlimited",
        kinds.SIZE,
        default=0,
    )
    bundle_size_bytes: int = option(
        "buffered bytes that start an upload round; also the target object size",
        kinds.SIZE,
        default=16 * _MIB,
    )
    segment_size_bytes: int = option("seal a segment at this size", kinds.SIZE, default=1024 * _MIB)
    segment_age_s: float = option(
        "seal a segment at this age, even in a quiet queue",
        kinds.DURATION_S,
        default=86_400.0,
    )
    buffer_size_bytes: int = option("memory for records", kinds.SIZE, default=128 * _MIB)
    uploads: int = option("maximum parallel uploads", kinds.COUNT, default=8)
    compress: str = option(
        "compression of merging's last level; LEVEL 1 to 19",
        kinds.Kind("zstd[:LEVEL]|none", kinds.compression),
        default="zstd",
        default_text="zstd, level 3",
    )
    compact: bool = flag("compact topics whose cleanup.policy is COMPACTION, as `tiered compact`")
    compact_interval_ms: int = option(
        "with --compact: time between rounds", kinds.DURATION_MS, default=900_000
    )
    strict: bool = flag(
        "exit with code 1 also for recorded losses (gaps, torn tails, left-out queues)"
    )
    no_index: bool = flag("no key index; `tiered query` reads the messages")
    index_items: int = option("keys per index object, 34 bytes each", kinds.COUNT, default=1 << 20)
    index_age_s: float = option(
        "maximum age of a key not yet indexed",
        kinds.DURATION_S,
        default=3600.0,
    )
    index_dir: str | None = option(
        "directory for the index's work file, 32 bytes per key, outside the store",
        kinds.DIR,
        default_text="the system's temporary directory",
    )

    @property
    def ends_by_itself(self) -> bool:
        """Whether it is done when the present end is durable."""
        return self.once or self.decommission

    @property
    def seals(self) -> bool:
        """Whether open segments are sealed at the end."""
        return self.seal or self.decommission


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended."""

    result: AttachResult  # what it left behind
    report: StoreReport  # what was met in the store that is explained and recorded
    unmatched: Sequence[str]  # globs of ``--topics`` that no topic of the store fits
    is_drained: bool  # what was in hand became durable
    seconds: float  # how long it took
    handover: Decommissioned | None  # how the decommissioning ended; None: there was to be none


@command("attach", AttachOptions)
def run(call: Call, options: AttachOptions) -> int:
    """Follows a store directory, live or dead, and tiers it.

    Examples:
        tiered attach /data/rocketmq/store --to s3://bucket/prefix --metrics-listen :9400
        tiered attach /data/rocketmq/store --to file:///tmp/tier --once --seal
    """
    from tiered.attach.writer import Attachment

    settings = read_settings(call, options)
    behave(options.nice)
    if not options.ends_by_itself:
        hold_hangups(call)
    stopping = threading.Event()
    stopper = Stopper(call.watch, stopping.set, seconds=settings.drain_s)
    with (
        stopper,
        metrics_served(call, options.metrics_listen, METRICS, "tiered_up") as shown,
    ):
        attachment = open_unless_stopped(
            stopper,
            lambda: Attachment.open(
                options.store,
                options.to,
                settings,
                options=call.s3_options(),
                clock=call.clock,
                announce=partial(announce_lease, call, "lease", shown),
                stopping=stopping,
            ),
        )
        if attachment is None:
            return stopper.exit_code if options.ends_by_itself else DONE
        ending = follow(call, options, attachment, shown)
    document = summary(options, attachment, ending)
    for line in lines(document):
        call.say(line)
    show(call, document, lines=())
    return exit_code(options, ending, document, stopper)


def behave(niceness: int) -> None:
    """Be a good neighbour of the broker."""
    if niceness > NICENESS_MAX:
        raise InvalidError(f"--nice goes from 0 to {NICENESS_MAX}, not {niceness}")
    if niceness > os.getpriority(os.PRIO_PROCESS, 0):  # everybody else on this machine goes first
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    bound_malloc()


def follow(
    call: Call, options: AttachOptions, attachment: Attachment, shown: Shown | None
) -> Ending:
    """Run until the end, then drain; the attachment is closed in any case."""
    began_s = call.clock.monotonic_s()
    is_once = options.ends_by_itself
    progress = call.progress(
        "tiering",
        lambda: progressed(attachment, call.clock.monotonic_s() - began_s if is_once else None),
    )
    if not is_once:
        call.say(
            f"tiered: tiering {options.store} to {attachment.meter.url} as"
            f" {attachment.place.cluster}/{attachment.place.broker},"
            f" epoch {attachment.epoch}"
        )
        for glob in unmatched(options.topics, _topics(attachment)):
            call.say(f"tiered: no topic matches --topics {glob} yet")
    for glob in unmatched(options.exclude, _topics(attachment)):
        call.say(f"tiered: no topic matches --exclude {glob} yet: what it was to keep out may go")
    try:
        with contextlib.ExitStack() as stack:
            compaction = compacting(call, options, attachment, stack)
            stack.enter_context(reloaded(call, options, attachment))
            if shown is not None:
                watch(call, shown, attachment, compaction)
            stack.enter_context(progress)
            result = attachment.run(once=is_once, seal=options.seals, merge=options.merge)
            handover = hand_over(options, attachment)
        report = attachment.local.report()
        missed = unmatched(options.topics, _topics(attachment))
    except BaseException:
        attachment.close()
        raise
    is_drained = attachment.close()
    seconds = call.clock.monotonic_s() - began_s
    return Ending(result, report, missed, is_drained, seconds, handover)


RELOADED = frozenset(
    {
        *("topics", "exclude", "freshness_s", "segment_size_bytes", "segment_age_s", "index_age_s"),
        *("max_upload_rate_bytes_s", "max_read_rate_bytes_s", "compress"),
    }
)
"""Fields of ``AttachOptions`` that count at once when the configuration file is read again."""


def reloaded(
    call: Call, options: AttachOptions, attachment: Attachment
) -> contextlib.AbstractContextManager[None]:
    """Reads the configuration file again on SIGHUP."""
    if options.ends_by_itself:
        return contextlib.nullcontext()

    def apply(again: Call, new: AttachOptions) -> None:
        attachment.reconfigure(read_settings(again, new))

    return on_hangup(call, options, RELOADED, apply)


def hand_over(options: AttachOptions, attachment: Attachment) -> Decommissioned | None:
    """Decommission the broker, if that is asked for."""
    if not options.decommission:
        return None
    from tiered.attach.decommission import decommission

    accepts = options.accept_pending
    return decommission(
        attachment, options.store, accepts_pending=accepts, acl=rules_of_access(options)
    )


def rules_of_access(options: AttachOptions) -> Mapping[str, Any] | None:
    """Those of ``--acl-from``, without secrets."""
    if options.acl_from is None:
        return None
    from pathlib import Path

    from tiered.mount.acl_files import read_rules

    return read_rules(Path(options.acl_from), "").document()


def compacting(
    call: Call, options: AttachOptions, attachment: Attachment, stack: contextlib.ExitStack
) -> CompactionThread | None:
    """Compacts beside the writer until the stack is left, where that is asked for."""
    if not options.compact:
        return None
    import random

    from tiered.local.layout import read_topics
    from tiered.upkeep.compact import CompactSettings
    from tiered.upkeep.compact_thread import CompactionThread
    from tiered.upkeep.workplace import Workplace

    meter, store = call.both(options.to, give_up_s=options.give_up_s)
    at = Workplace(
        store, meter, attachment.place, call.clock, random.SystemRandom(), options.give_up_s
    )

    def topics() -> Iterable[str]:
        if attachment.dispatcher is None:
            return ()  # who only stands by for the writer leaves it to him: they would do the same work, and one wins
        there = read_topics(options.store)
        return (
            topic
            for topic in there.names or there.compacted
            if attachment.selects(topic)
            and call.rules.get(topic, "compact", topic in there.compacted)
        )

    settings = CompactSettings(compression=kinds.compression_of(options.compress))
    thread = CompactionThread(at, settings, topics, options.compact_interval_ms / 1000)
    return stack.enter_context(thread)


def watch(
    call: Call, shown: Shown, attachment: Attachment, compaction: CompactionThread | None
) -> None:
    """Show how it goes, where that is asked for."""
    from tiered.attach.observe import WatchedWriter

    more = compaction.counters.samples if compaction else tuple
    shown.watch(WatchedWriter(attachment, call.clock), attachment.meter, more)
    if attachment.dispatcher is not None:
        observe = shown.exposition.observe
        attachment.dispatcher.on_commit = partial(observe, "tiered_commit_seconds")


def read_settings(call: Call, options: AttachOptions) -> AttachSettings:
    """What the options say."""
    from tiered.attach.writer import AttachSettings
    from tiered.dispatch.settings import DispatchSettings

    if options.compact and options.ends_by_itself:
        raise InvalidError(
            "--compact goes with a writer that stays", do="run `tiered compact` behind it"
        )
    if options.compact_interval_ms <= 0:
        raise InvalidError("--compact-interval must be longer than nothing", do="give it 15m")
    begin, broker_max_offset = options.start, None
    if options.broker_addr is not None:
        from tiered.attach.broker import BrokerOffsets

        broker_max_offset = BrokerOffsets(*options.broker_addr, call.clock).max_offset
    after_handover: Literal["refuse", "again", "recommission"] = (
        "recommission" if options.recommission else "again" if options.decommission else "refuse"
    )
    return AttachSettings(
        cluster=call.common.cluster,
        broker=call.common.broker,
        lease_s=options.lease_s,
        wait=not options.no_wait,
        waits_for_names=not options.ends_by_itself,
        drain_s=options.drain_s,
        give_up_s=options.give_up_s,
        start=begin.ms(call.clock.now_ms()) if isinstance(begin, Moment) else begin,
        selects=selection(call, options),
        timers_near_ms=options.near_ms if options.timers else None,
        after_handover=after_handover,
        rocketmq_only=rocketmq_only(options),
        broker_max_offset=broker_max_offset,
        dispatch=DispatchSettings(
            freshness_s=options.freshness_s,
            bundle_bytes=options.bundle_size_bytes,
            buffer_bytes_max=options.buffer_size_bytes,
            uploads_max=options.uploads,
            segment_bytes_max=options.segment_size_bytes,
            segment_age_s_max=options.segment_age_s,
            read_rate_bytes_s=options.max_read_rate_bytes_s,
            upload_rate_bytes_s=options.max_upload_rate_bytes_s,
            compression=kinds.compression_of(options.compress),
            compression_of=compression_rules(call, options),
            rate_of=lambda topic: int(call.rules.get(topic, "rate", 0)),
            pauses=lambda topic: bool(call.rules.get(topic, "pause")),
        ),
        index=index_settings(options),
    )


def selection(call: Call, options: AttachOptions) -> Callable[[str], bool]:
    """Which topics are tiered, by the options and the rules of the configuration file."""
    named = topic_filter(options.topics, options.exclude)
    return lambda topic: named(topic) and call.rules.get(topic, "include", True) is True


def compression_rules(
    call: Call, options: AttachOptions
) -> Callable[[str], Compression | None] | None:
    """How merging compresses a topic; None: no rule says anything of it."""
    if not any("compress" in said for _, said in call.rules.rows):
        return None
    return lambda topic: kinds.compression_of(call.rules.get(topic, "compress", options.compress))


def rocketmq_only(options: AttachOptions) -> tuple[str, ...]:
    """What is asked for that only stores of RocketMQ have."""
    asked = {
        "--decommission": options.decommission,
        "--timers": options.timers,
        "--compact": options.compact,
        "--broker-addr": options.broker_addr,
    }
    return tuple(name for name, is_asked in asked.items() if is_asked)


def index_settings(options: AttachOptions) -> IndexSettings | None:
    """Of the key index; None: none is wanted."""
    from pathlib import Path

    from tiered.attach.settings import IndexSettings

    if options.no_index:
        return None
    directory = options.index_dir
    if directory is not None:
        from tiered.local.sources import folders_of

        place = Path(directory).resolve()
        stores = [Path(folder).resolve() for folder in folders_of(options.store)]
        if any(map(place.is_relative_to, stores)):
            raise InvalidError(
                "--index-dir lies in the broker's store, into which nothing is ever written",
                where=directory,
                do="name a directory elsewhere",
            )
        if not place.is_dir():
            raise InvalidError("--index-dir is not a directory", where=directory, do="make it")
    return IndexSettings(
        items_max=options.index_items,
        age_s=options.index_age_s,
        directory=directory,
        upload_rate_bytes_s=options.max_upload_rate_bytes_s,
    )


def progressed(attachment: Attachment, seconds: float | None) -> Progressed:
    """How far a run is; with its rate when it is to end some time."""
    assert attachment.dispatcher is not None
    counters = attachment.dispatcher.counters
    text = f"{counted(counters.messages, 'message')}, {format_size(counters.record_bytes)}"
    if seconds is not None:
        text += f", {counters.record_bytes / _MIB / max(seconds, 1e-9):.1f} MiB/s"
    return Progressed(text)


def summary(options: AttachOptions, attachment: Attachment, ending: Ending) -> dict[str, Any]:
    """The document of ``tiered attach --json``."""
    assert attachment.dispatcher is not None
    counters, requests = attachment.dispatcher.counters, attachment.meter.snapshot()
    result, report, follower = ending.result, ending.report, attachment.timers
    return {
        "format": 1,
        "store": options.store,
        "url": attachment.meter.url,
        **picked(attachment.place, "cluster", "broker"),
        "named_by": attachment.named_by,
        "epoch": attachment.epoch,
        **picked(result, "is_complete", "quarantined", "missing"),
        "is_drained": ending.is_drained,
        "size_bytes": counters.record_bytes,
        **picked(counters, "messages", "parts", "bundles", "rounds", "merged_bundles"),
        **picked(counters, "merged_bytes", "gaps", "truncated", "begun_anew", "switches"),
        "requests": requests.requests,
        "request_dollars": round(requests.dollars, 6),
        "seconds": round(ending.seconds, 3),
        "mib_per_second": round(counters.record_bytes / _MIB / max(ending.seconds, 1e-9), 1),
        "behind_messages": result.behind,
        "waiting_records": result.waiting.records,
        "waiting_bytes": result.waiting.size_bytes,
        "waiting_reason": result.waiting.reason,
        "ahead_queues": attachment.dispatcher.continuity.lagging,
        "sealed_segments": attachment.sealed if options.seals else None,
        "timers": follower and {**asdict(follower.total), "error": follower.error},
        "decommission": ending.handover and decommissioned(ending.handover, attachment.place),
        "unmatched_topics": list(ending.unmatched),
        "paused_topics": sorted(attachment.paused_topics),
        **picked(report, "torn_bytes", "foreign_entries", "below_min_entries", "wrong_tag_codes"),
        "left_out": [picked(left, "name", "reason") for left in report.left_out],
        "notes": list(report.notes),
    }


def decommissioned(handover: Decommissioned, place: Place) -> dict[str, Any]:
    """The member ``decommission`` of the document."""
    from tiered.local.catalog import reason_left_out

    metadata = handover.near.metadata
    own = [
        reason_left_out(topic, cluster=place.cluster, broker=place.broker)
        for topic in metadata.topics
    ]
    pending = [*handover.obstacles, *(handover.near.pending if handover.key else ())]
    return {
        "is_decommissioned": bool(handover.key),
        "key": handover.key,
        "topics": own.count(None),
        "system_topics": len(own) - own.count(None),
        "groups": len(metadata.groups),
        "consumer_offsets": sum(map(len, metadata.offsets.values())),
        "retries": handover.near.retries,
        "pending": [picked(one, "what", "count", "do") for one in pending],
        "notes": list(metadata.notes),
    }


def decommission_lines(document: dict[str, Any]) -> list[str]:
    """The same for people."""
    given_up, found = document["is_decommissioned"], []
    for one in document["pending"]:
        what = one["what"] + (f" ({one['count']:,})" if one["count"] else "")
        found.append(
            f"tiered: given up: {what}" if given_up else f"tiered: not done: {what}; {one['do']}"
        )
    if document["retries"]:
        waits = counted(document["retries"], "message waits", "messages wait")
        found.append(f"tiered: {waits} in retry topics: their groups get them from the mount")
    found += [f"tiered: note: {note}" for note in document["notes"]]
    if not document["is_decommissioned"]:
        from tiered.attach.decommission import RUNS

        only_waits = all(one["what"] == RUNS for one in document["pending"])
        more = "" if only_waits else "; --accept-pending gives up what is pending"
        return [*found, f"tiered: not decommissioned{more}"]
    return [
        *found,
        (
            f"tiered: decommissioned: {counted(document['topics'], 'topic')},"
            f" {counted(document['groups'], 'group')} and offsets of"
            f" {counted(document['consumer_offsets'], 'queue')} are in the tier; `tiered mount` can serve it"
        ),
    ]


# What an operator should know of, where there is any: its field, one of it, many of it, and what is said of them.
_SAID = (
    ("behind_messages", "message is", "messages are", "not in the tier yet"),
    ("waiting_records", "record waits:", "records wait:", "{waiting_reason}"),
    ("quarantined", "damaged record was", "damaged records were", "put into quarantine"),
    (
        "missing",
        "message is",
        "messages are",
        "not in the store, though its queues list or skip what is missing: holes",
    ),
    ("gaps", "gap was", "gaps were", "recorded: local retention was faster"),
    (
        "truncated",
        "queue goes",
        "queues go",
        "on at an earlier offset: the broker truncated messages",
    ),
    ("begun_anew", "queue", "queues", "began anew: the broker has nothing of the history any more"),
    (
        "ahead_queues",
        "queue is",
        "queues are",
        "longer in the tier than in the store, a copy that lags",
    ),
    ("torn_bytes", "byte", "bytes", "of a torn tail left"),
    ("foreign_entries", "entry", "entries", "refused: of another queue's record"),
    ("below_min_entries", "entry", "entries", "below the log's minimum left"),
    ("wrong_tag_codes", "entry", "entries", "with a wrong tag code: that of the record is taken"),
)


def lines(document: dict[str, Any]) -> list[str]:
    """The summary for people: one line, and one more for each thing that should be known."""
    found = [
        (
            f"tiered: {counted(document['messages'], 'message')},"
            f" {format_size(document['size_bytes'])} in {counted(document['bundles'], 'object')},"
            f" {counted(document['requests'], 'request')}, {document['seconds']:.1f} s,"
            f" {document['mib_per_second']:.1f} MiB/s"
        )
    ]
    if document["merged_bundles"]:
        into = counted(document["merged_bundles"], "object")
        found.append(f"tiered: {format_size(document['merged_bytes'])} merged into {into}")
    if document["sealed_segments"] is not None:
        found.append(f"tiered: {counted(document['sealed_segments'], 'segment')} sealed")
    if (timers := document["timers"]) is not None:
        taken, near = counted(timers["taken"], "timer"), counted(timers["near"], "near one")
        found.append(f"tiered: {taken} taken; {near} left with the broker")
        if timers["odd"]:
            odd = counted(timers["odd"], "timer")
            found.append(f"tiered: {odd} with a due time that cannot be understood: left there")
    found += [
        f"tiered: {counted(document[name], one, many)} {text.format_map(document)}"
        for name, one, many, text in _SAID
        if document[name]
    ]
    found += [f"tiered: no topic matches --topics {glob}" for glob in document["unmatched_topics"]]
    found += [
        f"tiered: {topic} is paused: nothing of it was tiered (`tiered resume` goes on)"
        for topic in document["paused_topics"]
    ]
    reasons: dict[str, list[str]] = {}
    for left in document["left_out"]:
        reasons.setdefault(left["reason"], []).append(left["name"])
    found += [f"tiered: left out ({reason}): {few(names, 5)}" for reason, names in reasons.items()]
    found += [f"tiered: note: {note}" for note in document["notes"]]
    return found + (
        decommission_lines(document["decommission"]) if document["decommission"] else []
    )


def _topics(attachment: Attachment) -> set[str]:
    return {queue.topic for queue in attachment.local.queues()}


def exit_code(
    options: AttachOptions, ending: Ending, document: dict[str, Any], stopper: Stopper
) -> int:
    """By the contract: what waits with ``--once``, was quarantined, is missing, or is not a timer, needs a person."""
    cut_short = options.ends_by_itself and not ending.result.is_complete
    if not ending.is_drained or (cut_short and stopper.received):
        return stopper.exit_code or NEEDS_A_PERSON
    globs = options.topics
    matches_nothing = globs and len(document["unmatched_topics"]) == len(globs)
    is_short = not ending.result.is_complete or matches_nothing
    is_damaged = document["quarantined"] > 0 or document["missing"] > 0
    is_damaged = is_damaged or ending.result.waiting.is_behind_damage
    is_odd = document["timers"] is not None and document["timers"]["odd"] > 0
    needs = is_damaged or is_odd or (options.ends_by_itself and is_short)
    needs = needs or (ending.handover is not None and not ending.handover.key)
    if options.strict:
        recorded = (
            *("gaps", "truncated", "begun_anew", "ahead_queues"),
            *("torn_bytes", "foreign_entries", "below_min_entries", "wrong_tag_codes"),
        )
        left_out = any(left["reason"] != SYSTEM_TOPIC for left in document["left_out"])
        needs = needs or left_out or any(document[name] for name in recorded)
    return NEEDS_A_PERSON if needs else DONE


# --------------------------------------------------------------------------------------------------
# SIGHUP to a command that was started with a configuration file: the file is read again, and what can change changes.
#
# What cannot change while the command runs is named on stderr and counts from its next start. A file that is broken
# changes nothing, and that is said, too: the command goes on by its old settings. Without a file SIGHUP ends the
# command, as ever.
#
# Threads: each signal is answered in a thread of its own, one after another.
# --------------------------------------------------------------------------------------------------


T = TypeVar("T")


@contextlib.contextmanager
def on_hangup(
    call: Call, options: T, changeable: Collection[str], apply: Callable[[Call, T], None]
) -> Iterator[None]:
    """Take new settings on SIGHUP while the block runs.

    Args:
        changeable: Fields of the options that can change.
        apply: Goes on by others, and by the rules of the call that it is given. ``TieredStoreError``: it cannot.
    """
    if call.reread is None:
        yield
        return
    one_at_a_time, present = threading.Lock(), [options]

    def reload() -> None:
        with one_at_a_time:
            present[0] = _reload(call, present[0], changeable, apply)

    before, call.watch.reload = call.watch.reload, reload
    try:
        yield
    finally:
        call.watch.reload = before


def hold_hangups(call: Call) -> None:
    """Let no SIGHUP end a command that will take new settings, but is not as far yet, or any more."""
    if call.reread is not None:
        text = "tiered: SIGHUP: not following just now, so nothing was read again"
        call.watch.reload = lambda: call.say(text, level="warning")


def _reload(
    call: Call, options: T, changeable: Collection[str], apply: Callable[[Call, T], None]
) -> T:
    """Read the file and go on by it; the options that rule from now on."""
    assert call.reread is not None
    kind, shown = type(options), cast("Any", options)
    settings = settings_of(kind, call.section)
    fields = {one.name for one in dataclasses.fields(shown) if "argument" in one.metadata}
    try:
        chosen, rules = call.reread()
        given = {name: getattr(options, name) for name in fields}
        wanted = build(kind, settings, chosen, call.path, given)
        differing = [
            one for one in settings if getattr(options, one.field) != getattr(wanted, one.field)
        ]
        changed = {
            one.field: getattr(wanted, one.field) for one in differing if one.field in changeable
        }
        new: T = dataclasses.replace(shown, **changed)
        apply(dataclasses.replace(call, rules=rules), new)
    except TieredStoreError as error:
        call.say(f"tiered: SIGHUP: the old settings stay: {error}", level="error")
        return options
    names = ", ".join(one.key for one in differing if one.field in changed) or "none"
    call.say(f"tiered: SIGHUP: the configuration file was read; settings that changed: {names}")
    stay = [one.key for one in differing if one.field not in changed]
    stay += [
        key
        for key, one in chosen.items()
        if not one.setting.section and one.value != call.chosen[key].value
    ]
    for key in stay:
        what = f"{key} cannot change while this runs, and counts from the next start"
        call.say(f"tiered: SIGHUP: {what}", level="warning")
    return new
