"""``tiered attach``: follows a store directory and tiers it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from tiered.cli.errors import DONE, NEEDS_A_PERSON
from tiered.cli.frame import COMMANDS, make_command
from tiered.cli.output import Output
from tiered.cli.signals import Stopper
from tiered.cli.stderr import Progressed
from tiered.cli.values import compression_level, counted, format_size, split_address
from tiered.errors import InvalidError, TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tiered.attach.decommission import Decommissioned
    from tiered.attach.index_settings import IndexSettings
    from tiered.attach.writer import Attachment, AttachResult, AttachSettings
    from tiered.cli.call import Call
    from tiered.dispatch.packing import Compression
    from tiered.journal.lease import LeaseState
    from tiered.local.face import StoreReport
    from tiered.model import MessageQueue

SYSTEM_TOPIC = "system topic"
"""The reason of ``LeftOut`` that even ``--strict`` does not count: such topics are never tiered."""
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended.

    Attributes:
        result: What it left behind.
        report: What was met in the store that is explained and recorded.
        unmatched: Globs of ``--topics`` that no topic of the store fits.
        is_drained: What was in hand became durable.
        seconds: How long it took.
        handover: How the decommissioning ended; None: there was to be none.
    """

    result: AttachResult
    report: StoreReport
    unmatched: Sequence[str]
    is_drained: bool
    seconds: float
    handover: Decommissioned | None


def run(call: Call) -> int:
    """Attach, and stay until we are stopped (or, with ``--once``, done)."""
    from tiered.attach.writer import Attachment

    settings = read_settings(call)
    behave(call.whole("nice"))
    output = Output(call)
    stopping = threading.Event()
    stopper = Stopper(call.watch, stopping.set, seconds=settings.drain_s)
    with stopper:
        try:
            attachment = Attachment.open(
                call.argument("store"),
                call.words("to"),
                settings,
                options=call.s3_options(),
                clock=call.clock,
                announce=lambda lease: announce(call, lease),
                stopping=stopping,
            )
        except TieredStoreError:
            if stopper.received is None:
                raise
            return stopper.exit_code if ends_by_itself(call) else DONE  # nothing was in hand
        ending = follow(call, attachment)
    document = summary(call, attachment, ending)
    for line in lines(document):
        call.say(line)
    if output.form != "table":
        output.emit(document, [document], list(document))
    return exit_code(call, ending, document, stopper)


def behave(niceness: int) -> None:
    """Be a good neighbour of the broker.

    Raises:
        InvalidError: The niceness is out of range.
    """
    from tiered.attach.process import NICENESS_MAX, bound_malloc, step_back

    if niceness > NICENESS_MAX:
        raise InvalidError(f"--nice goes from 0 to {NICENESS_MAX}, not {niceness}")
    step_back(niceness)
    bound_malloc()


def follow(call: Call, attachment: Attachment) -> Ending:
    """Run until the end, then drain; the attachment is closed in any case.

    Raises:
        TieredStoreError: See ``Attachment.run``.
    """
    began_s = call.clock.monotonic_s()
    is_once = ends_by_itself(call)
    progress = call.progress(
        "tiering",
        lambda: progressed(attachment, call.clock.monotonic_s() - began_s if is_once else None),
    )
    if not is_once:
        call.say(
            f"tiered: tiering {call.argument('store')} to {attachment.meter.url} as"
            f" {attachment.place.cluster}/{attachment.place.broker},"
            f" generation {attachment.generation}"
        )
        for glob in unmatched(call.texts("topics"), attachment.local.queues()):
            call.say(f"tiered: no topic matches --topics {glob} yet")
    try:
        with metrics_served(call, attachment), progress:
            seals = call.flag("seal") or call.flag("decommission")
            result = attachment.run(once=is_once, seal=seals)
            handover = hand_over(call, attachment, result)
        report = attachment.local.report()
        missed = unmatched(call.texts("topics"), attachment.local.queues())
    except BaseException:
        attachment.close()
        raise
    is_drained = attachment.close()
    seconds = call.clock.monotonic_s() - began_s
    return Ending(result, report, missed, is_drained, seconds, handover)


def ends_by_itself(call: Call) -> bool:
    """Whether it is done when the present end is durable."""
    return call.flag("once") or call.flag("decommission")


def hand_over(call: Call, attachment: Attachment, result: AttachResult) -> Decommissioned | None:
    """Decommission the broker, if that is asked for."""
    if not call.flag("decommission"):
        return None
    from tiered.attach.decommission import decommission

    directory, accepts = call.argument("store"), call.flag("accept-pending")
    return decommission(attachment, directory, result, accepts_pending=accepts)


def read_settings(call: Call) -> AttachSettings:
    """What the options say.

    Raises:
        InvalidError: They contradict each other.
    """
    from tiered.attach.writer import AttachSettings
    from tiered.dispatch.settings import DispatchSettings

    if call.flag("seal") and not ends_by_itself(call):
        raise InvalidError("--seal goes with --once", do="add --once")
    if call.flag("accept-pending") and not call.flag("decommission"):
        raise InvalidError("--accept-pending goes with --decommission", do="add --decommission")
    start = call.words("start")
    return AttachSettings(
        cluster=call.text("cluster"),
        broker=call.text("broker"),
        lease_s=call.number("lease-seconds"),
        wait=not call.flag("no-wait"),
        waits_for_names=not ends_by_itself(call),
        drain_s=call.number("drain-seconds"),
        give_up_s=call.number("give-up-seconds"),
        start=start if start in {"earliest", "latest"} else cast("int", call.time_ms("start")),
        selects=selector(call.texts("topics"), call.texts("exclude")),
        after_handover=after_handover(call),
        broker_max_offset=broker_asked(call),
        dispatch=DispatchSettings(
            freshness_s=call.number("freshness"),
            bundle_bytes=call.whole("bundle-size"),
            buffer_bytes_max=call.whole("buffer-size"),
            uploads_max=call.whole("uploads"),
            segment_bytes_max=call.whole("segment-size"),
            read_rate_bytes_s=call.whole("max-read-rate"),
            upload_rate_bytes_s=call.whole("max-upload-rate"),
            compression=compression(call),
        ),
        index=index_settings(call),
    )


def after_handover(call: Call) -> Literal["refuse", "again", "recommission"]:
    """What becomes of a tier whose broker was decommissioned.

    Raises:
        InvalidError: Both were asked for.
    """
    if not call.flag("recommission"):
        return "again" if call.flag("decommission") else "refuse"
    if call.flag("decommission"):
        raise InvalidError("--recommission and --decommission exclude each other", do="choose one")
    return "recommission"


def compression(call: Call) -> Compression | None:
    """How merging compresses; None: not at all.

    Raises:
        InvalidError: There is no such level.
    """
    from tiered.dispatch.packing import Compression

    asked = call.words("compress")
    if asked == "none":
        return None
    level = compression_level(asked)
    return Compression() if level is None else Compression(level)


def index_settings(call: Call) -> IndexSettings | None:
    """Of the key index; None: none is wanted.

    Raises:
        InvalidError: The work file would lie in the broker's store, or nowhere.
    """
    from pathlib import Path

    from tiered.attach.index_settings import IndexSettings

    if call.flag("no-index"):
        return None
    directory = call.text("index-dir")
    if directory is not None:
        place = Path(directory).resolve()
        if place.is_relative_to(Path(call.argument("store")).resolve()):
            raise InvalidError(
                "--index-dir lies in the broker's store, into which nothing is ever written",
                where=directory,
                do="name a directory elsewhere",
            )
        if not place.is_dir():
            raise InvalidError("--index-dir is no directory", where=directory, do="make it")
    return IndexSettings(
        items_max=call.whole("index-items"),
        age_s=call.number("index-age"),
        directory=directory,
        upload_rate_bytes_s=call.whole("max-upload-rate"),
    )


def selector(topics: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """Whether a topic fits one of the globs (all, without any) and none of the excluding ones."""

    def selects(topic: str) -> bool:
        wanted = not topics or any(fnmatchcase(topic, glob) for glob in topics)
        return wanted and not any(fnmatchcase(topic, glob) for glob in exclude)

    return selects


def broker_asked(call: Call) -> Callable[[], int] | None:
    """Asks the broker at ``--broker-addr``."""
    address = call.text("broker-addr")
    if address is None:
        return None
    from tiered.attach.broker import BrokerOffsets

    return BrokerOffsets(*split_address(address), call.clock).max_offset


@contextlib.contextmanager
def metrics_served(call: Call, attachment: Attachment) -> Iterator[None]:
    """Serve metrics at ``--metrics-listen``, if it is given."""
    address = call.text("metrics-listen")
    if address is None:
        yield
        return
    from tiered.attach.metrics_server import MetricsServer
    from tiered.attach.observe import collect, is_well
    from tiered.metrics import render

    host, port = split_address(address)
    server = MetricsServer(
        host,
        port,
        metrics=lambda: render(collect(attachment, call.clock)),
        health=lambda: is_well(attachment),
    )
    call.say(f"tiered: metrics at http://{host or '0.0.0.0'}:{server.port}/metrics")  # noqa: S104 (said, not bound)
    try:
        yield
    finally:
        server.close()


def announce(call: Call, lease: LeaseState) -> None:
    """Say whom we wait for."""
    left_s = max(0.0, (lease.expires_ms - call.clock.now_ms()) / 1000)
    call.say(
        f"tiered: waiting for the lease of process {lease.holder.pid} on {lease.holder.host}"
        f" (it lasts {left_s:.0f} s more unless it is renewed; --no-wait ends at once)"
    )


def progressed(attachment: Attachment, seconds: float | None) -> Progressed:
    """How far a run is; with its rate when it is to end some time."""
    assert attachment.dispatcher is not None
    counters = attachment.dispatcher.counters
    text = f"{counted(counters.messages, 'message')}, {format_size(counters.record_bytes)}"
    if seconds is not None:
        text += f", {counters.record_bytes / _MIB / max(seconds, 1e-9):.1f} MiB/s"
    return Progressed(text)


def summary(call: Call, attachment: Attachment, ending: Ending) -> dict[str, Any]:
    """The document of ``tiered attach --json``."""
    assert attachment.dispatcher is not None
    counters, requests = attachment.dispatcher.counters, attachment.meter.snapshot()
    result, report = ending.result, ending.report
    return {
        "format": 1,
        "store": call.argument("store"),
        "url": attachment.meter.url,
        "cluster": attachment.place.cluster,
        "broker": attachment.place.broker,
        "generation": attachment.generation,
        "is_complete": result.is_complete,
        "is_drained": ending.is_drained,
        "messages": counters.messages,
        "size_bytes": counters.record_bytes,
        "parts": counters.parts,
        "bundles": counters.bundles,
        "rounds": counters.rounds,
        "requests": requests.requests,
        "request_dollars": round(requests.dollars, 6),
        "seconds": round(ending.seconds, 3),
        "mib_per_second": round(counters.record_bytes / _MIB / max(ending.seconds, 1e-9), 1),
        "behind_messages": result.behind,
        "waiting_records": result.waiting.records,
        "waiting_bytes": result.waiting.size_bytes,
        "waiting_reason": result.waiting.reason,
        "quarantined": result.quarantined,
        "missing": result.missing,
        "gaps": counters.gaps,
        "taken_back": counters.taken_back,
        "begun_anew": counters.begun_anew,
        "ahead_queues": attachment.dispatcher.continuity.lagging,
        "switches": counters.switches,
        "sealed_segments": (
            attachment.sealed if call.flag("seal") or call.flag("decommission") else None
        ),
        "decommission": None if ending.handover is None else decommissioned(ending.handover),
        "unmatched_topics": list(ending.unmatched),
        "torn_bytes": report.torn_bytes,
        "foreign_entries": report.foreign_entries,
        "below_min_entries": report.below_min_entries,
        "wrong_tag_codes": report.wrong_tag_codes,
        "left_out": [{"name": left.name, "reason": left.reason} for left in report.left_out],
        "notes": list(report.notes),
    }


def decommissioned(handover: Decommissioned) -> dict[str, Any]:
    """The member ``decommission`` of the document."""
    metadata = handover.near.metadata
    pending = [*handover.obstacles, *(handover.near.pending if handover.key else ())]
    return {
        "is_decommissioned": bool(handover.key),
        "key": handover.key,
        "topics": len(metadata.topics),
        "groups": len(metadata.groups),
        "consumer_offsets": sum(map(len, metadata.offsets.values())),
        "retries": handover.near.retries,
        "pending": [{"what": one.what, "count": one.count, "do": one.do} for one in pending],
        "notes": list(metadata.notes),
    }


def pending_line(pending: dict[str, Any], *, given_up: bool) -> str:
    """What is not done, how much of it, and what to do."""
    count = f" ({pending['count']:,})" if pending["count"] else ""
    return f"{pending['what']}{count}" + ("" if given_up else f"; {pending['do']}")


def decommission_lines(document: dict[str, Any]) -> list[str]:
    """The same for people."""
    given_up = document["is_decommissioned"]
    found = [
        f"tiered: {'given up' if given_up else 'not done'}: {pending_line(one, given_up=given_up)}"
        for one in document["pending"]
    ]
    if document["retries"]:
        waits = counted(document["retries"], "message waits", "messages wait")
        found.append(f"tiered: {waits} in retry topics: their groups get them from the mount")
    found += [f"tiered: note: {note}" for note in document["notes"]]
    if not document["is_decommissioned"]:
        return [*found, "tiered: not decommissioned; --accept-pending gives up what is pending"]
    return [
        *found,
        (
            f"tiered: decommissioned: {counted(document['topics'], 'topic')},"
            f" {counted(document['groups'], 'group')} and offsets of"
            f" {counted(document['consumer_offsets'], 'queue')} are kept; `tiered mount` goes on"
        ),
    ]


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
    if document["sealed_segments"] is not None:
        found.append(f"tiered: {counted(document['sealed_segments'], 'segment')} sealed")
    said = (
        ("behind_messages", "message is", "messages are", "not in the tier yet"),
        ("waiting_records", "record waits:", "records wait:", str(document["waiting_reason"])),
        ("quarantined", "damaged record was", "damaged records were", "put into quarantine"),
        (
            "missing",
            "message is",
            "messages are",
            "not in the store, though its queues list or skip what is missing: holes",
        ),
        ("gaps", "gap was", "gaps were", "recorded: local retention was faster"),
        (
            "taken_back",
            "queue goes",
            "queues go",
            "on at an earlier offset: the broker took messages back",
        ),
        (
            "begun_anew",
            "queue",
            "queues",
            "began anew: the broker has nothing of the history any more",
        ),
        (
            "ahead_queues",
            "queue is",
            "queues are",
            "longer in the tier than in the store, a copy that lags",
        ),
        ("torn_bytes", "byte", "bytes", "of a torn tail left"),
        ("foreign_entries", "entry", "entries", "refused: of another queue's record"),
        ("below_min_entries", "entry", "entries", "below the log's minimum left"),
        (
            "wrong_tag_codes",
            "entry",
            "entries",
            "with a wrong tag code: that of the record is taken",
        ),
    )
    found += [
        f"tiered: {counted(document[name], one, many)} {text}"
        for name, one, many, text in said
        if document[name]
    ]
    found += [f"tiered: no topic matches --topics {glob}" for glob in document["unmatched_topics"]]
    reasons: dict[str, list[str]] = {}
    for left in document["left_out"]:
        reasons.setdefault(left["reason"], []).append(left["name"])
    found += [f"tiered: left out ({reason}): {few(names)}" for reason, names in reasons.items()]
    found += [f"tiered: note: {note}" for note in document["notes"]]
    return found + (
        decommission_lines(document["decommission"]) if document["decommission"] else []
    )


def unmatched(globs: Sequence[str], queues: Iterable[MessageQueue]) -> list[str]:
    """The globs that no topic of the store fits."""
    topics = {queue.topic for queue in queues}
    return [glob for glob in globs if not any(fnmatchcase(topic, glob) for topic in topics)]


def few(names: Sequence[str], count_max: int = 5) -> str:
    """The first names, and how many more there are."""
    more = len(names) - count_max
    return ", ".join(names[:count_max]) + (f" and {more} more" if more > 0 else "")


def exit_code(call: Call, ending: Ending, document: dict[str, Any], stopper: Stopper) -> int:
    """By the contract: what waits with ``--once``, was quarantined, or is missing in the store, needs a person."""
    cut_short = ends_by_itself(call) and not ending.result.is_complete
    if not ending.is_drained or (cut_short and stopper.received):
        return stopper.exit_code or NEEDS_A_PERSON
    globs = call.texts("topics")
    matches_nothing = globs and len(document["unmatched_topics"]) == len(globs)
    is_short = not ending.result.is_complete or matches_nothing
    is_damaged = document["quarantined"] > 0 or document["missing"] > 0
    is_damaged = is_damaged or ending.result.waiting.is_behind_damage
    needs = is_damaged or (ends_by_itself(call) and is_short)
    needs = needs or (ending.handover is not None and not ending.handover.key)
    if call.flag("strict"):
        recorded = (
            *("gaps", "taken_back", "begun_anew", "ahead_queues"),
            *("torn_bytes", "foreign_entries", "below_min_entries", "wrong_tag_codes"),
        )
        left_out = any(left["reason"] != SYSTEM_TOPIC for left in document["left_out"])
        needs = needs or left_out or any(document[name] for name in recorded)
    return NEEDS_A_PERSON if needs else DONE


COMMAND = make_command(
    "attach",
    run,
    summary=COMMANDS["attach"].summary,
    arguments=[click.Argument(["store"], type=click.Path())],
    examples=[
        "tiered attach /data/rocketmq/store --to s3://bucket/prefix --metrics-listen :9400",
        "tiered attach /data/rocketmq/store --to file:///tmp/tier --once --seal",
        "tiered attach /data/rocketmq/store --to s3://bucket/prefix --decommission",
    ],
)
