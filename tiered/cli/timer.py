"""``tiered timer``: messages that are due much later, in hourly files of the tier."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass, picked
from backends.local_files import is_vacant
from tiered.addresses import Address, addresses
from tiered.cli import kinds
from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import group
from tiered.cli.options import PatienceOptions, argument, flag, option, required
from tiered.cli.output import Output, Row, Table, show
from tiered.cli.serve import MetricsOptions, announce_lease, metrics_served
from tiered.cli.signals import Stopper
from tiered.cli.values import counted, few, format_duration, format_size, format_time, parse_time
from tiered.errors import ClosedError, DataError, InvalidError
from tiered.metrics import TIMER_METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from backends.wrapping import MeteredStore
    from tiered.api.broker_place import Place
    from tiered.attach.timer_import import TimerImport
    from tiered.attach.timer_run import Delivering, TimerDelivery
    from tiered.cli.call import Call
    from tiered.cli.serve import Shown
    from tiered.cli.stderr import Progressed
    from tiered.log.parts import TierState
    from timer.dequeue import Damaged, DueMessage, TimerReader

HOUR_COLUMNS = ["hour_ms", "messages", "bytes", "due_min_ms", "due_max_ms"]
MESSAGE_COLUMNS = [
    *("hour_ms", "due_timestamp_ms", "topic", "queue_id", "msg_id", "tags", "keys"),
    *("properties", "body_base64"),
]
_SHOWN_COLUMNS = ["due", "topic", "queue_id", "msg_id", "tags", "keys"]
_BAR = 32
_LINES_MAX = 72
_DAMAGED_NAMED = 8


# -- import ---------------------------------------------------------------------------------------


TIMER = group(
    "timer",
    "Imports, lists, cancels and delivers long-delayed messages.",
    examples=[
        "tiered timer ls s3://bucket/prefix",
        "tiered timer import /data/rocketmq/store --to s3://bucket/prefix",
    ],
)


@dataclass(frozen=True, kw_only=True)
class TimerImportOptions:
    """What ``tiered timer import`` can be told."""

    store: str = argument("the broker's store directory")
    to: str = required("URL of the tier", kinds.URL)
    near_ms: int = option(
        "leave what is due within this time to the broker",
        kinds.DURATION_MS,
        default=4 * 3_600_000,
    )
    no_wait: bool = flag("exit with code 4 if another process writes these timers")


@TIMER.has("import", TimerImportOptions)
def run_import(call: Call, options: TimerImportOptions) -> int:
    """Imports a broker's pending timers into the tier, once.

    Imports messages due later than --near from a live or dead store; may be repeated. See docs/timers.md.

    Examples:
        tiered timer import /data/rocketmq/store --to s3://bucket/prefix
        tiered timer import /data/rocketmq/store --to s3://bucket/prefix --near 0s
    """
    from tiered.attach.timer_import import ImportSettings, import_timers

    near_ms = options.near_ms
    settings = ImportSettings(
        near_ms=near_ms,
        cluster=call.common.cluster,
        broker=call.common.broker,
        wait=not options.no_wait,
    )
    stop = threading.Event()
    with Stopper(call.watch, stop.set, seconds=10.0) as stopper:
        try:
            made = import_timers(
                options.store,
                options.to,
                settings,
                options=call.s3_options(),
                clock=call.clock,
                stop=stop,
            )
        except ClosedError:
            if stopper.received is None:
                raise
            return stopper.exit_code
    document = import_document(made, near_ms)
    columns = list((document["sources"] or [{}])[0])
    show(call, document, rows=document["sources"], columns=columns, lines=_import_lines(document))
    return NEEDS_A_PERSON if made.total.odd or made.waiting.is_behind_damage else DONE


def import_document(made: TimerImport, near_ms: int) -> dict[str, Any]:
    """The document of ``tiered timer import --json``."""
    sources = [
        {"topic": queue.topic, "queue_id": queue.queue_id, **asdict(counts)}
        for queue, counts in made.counts.items()
    ]
    return {
        "format": 1,
        **picked(made.place, "cluster", "broker"),
        "near_ms": near_ms,
        **asdict(made.total),
        **picked(made, "due_from_ms", "bundles", "entries"),
        "waiting_records": made.waiting.records,
        "waiting_reason": made.waiting.reason,
        "sources": sources,
    }


def _import_lines(document: dict[str, Any]) -> Iterator[str]:
    yield f"{document['cluster']}/{document['broker']}"
    lines = {
        "taken": (document["taken"], "message", f"in {counted(document['bundles'], 'object')}"),
        "marks": (document["marks"], "delete mark", "of messages that were taken before"),
        "before": (document["known"], "message", "in the tier already"),
        "stays": (document["near"], "message", "due within the near window, with the broker"),
        "delivered": (document["delivered"], "message", "by the broker"),
        "withdrawn": (document["cancelled"], "record", "cancelled, with their delete marks"),
        "rolled": (document["rolled"], "record", "of messages for which another record stands"),
        "odd": (document["odd"], "record", "whose due time cannot be understood: left there"),
        "waits": (
            document["waiting_records"],
            "record",
            f"of any topic: {document['waiting_reason']}",
        ),
    }
    for word, (count, one, rest) in lines.items():
        if count or word in {"taken", "stays"}:
            yield f"  {word:<10}{counted(count, one)} {rest}"


# -- ls and show ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimerLsOptions:
    """What ``tiered timer ls`` can be told."""

    url: str = argument()
    messages: bool = flag("list pending messages by due time")
    refused: bool = flag("list messages that the target refused")
    cost: bool = flag("estimate requests and dollars")


@TIMER.has("ls", TimerLsOptions)
def run_ls(call: Call, options: TimerLsOptions) -> int:
    """Lists the hours in which messages are due.

    Examples:
        tiered timer ls s3://bucket/prefix
        tiered timer ls file:///tmp/tier --messages
    """
    from timer.dequeue import refused_in
    from timer.handover import cost_document

    damaged = dict[int, DataError]()
    reader, head = _opened(call, options.url)
    if options.messages or options.refused:
        what = reader.refused if options.refused else reader.pending
        _emit_messages(call, head, what, reader.state.timers.hours)
        return DONE
    found = list(reader.listing(damaged))
    refused = sum(len(refused_in(reader.state, hour)) for hour in reader.state.timers.hours)
    rows = [
        {**picked(row, "hour_ms", "messages", "due_min_ms", "due_max_ms"), "bytes": row.size_bytes}
        for row in found
    ]
    cost = {"cost": cost_document(found)} if options.cost else {}
    said = {"refused": refused, "damaged": _damaged_rows(damaged), **cost}
    lines = _hour_lines(rows, refused, cost)
    show(call, {**head, "hours": rows, **said}, rows=rows, columns=HOUR_COLUMNS, lines=lines)
    _require_sound(call, damaged)
    return DONE


@dataclass(frozen=True, kw_only=True)
class TimerShowOptions:
    """What ``tiered timer show`` can be told."""

    url: str = argument()
    hour: str = argument("a time within the hour")


@TIMER.has("show", TimerShowOptions)
def run_show(call: Call, options: TimerShowOptions) -> int:
    """Lists the messages that are due in one hour.

    Examples:
        tiered timer show s3://bucket/prefix 2026-12-24T18:00:00Z
        tiered timer show file:///tmp/tier 1798131600000 --json
    """
    from tiered.log.timers import HOUR_MS

    text = options.hour
    try:
        hour = parse_time(text, call.clock.now_ms()) // HOUR_MS
    except ValueError as error:
        raise InvalidError(f"HOUR {text}: {error}", do="give a time within it") from None
    reader, head = _opened(call, options.url)
    hours = [hour] if hour in reader.state.timers.hours else []
    _emit_messages(call, {**head, "hour_ms": hour * HOUR_MS}, reader.pending, hours)
    return DONE


def _opened(call: Call, url: str) -> tuple[TimerReader, dict[str, Any]]:
    """What reads a broker's timers, and how a document of them begins."""
    from tiered.api.broker_place import choose_timers
    from timer.dequeue import TimerReader

    store = call.objects(url)
    place = choose_timers(store, call.common.cluster, call.common.broker)
    reader = TimerReader(store, place.prefix)
    reader.refresh()
    return reader, {"format": 1, "cluster": place.cluster, "broker": place.broker}


def _hour_lines(
    rows: list[Row], refused: int, cost: dict[str, dict[str, Any]]
) -> Iterator[str | Table]:
    """A histogram: a line an hour; where these are too many to look at, a day (UTC)."""
    name, width_ms = ("hour", 3_600_000) if len(rows) <= _LINES_MAX else ("day", 24 * 3_600_000)
    bins: dict[int, tuple[int, int]] = {}
    for row in rows:
        begin_ms = row["hour_ms"] // width_ms * width_ms
        count, size = bins.get(begin_ms, (0, 0))
        bins[begin_ms] = count + row["messages"], size + row["bytes"]
    most = max((count for count, _ in bins.values()), default=1)
    shown: list[Row] = [
        {
            name: format_time(begin_ms),
            "messages": count,
            "size": format_size(size),
            "": "#" * max(1, round(_BAR * count / most)),
        }
        for begin_ms, (count, size) in bins.items()
    ]
    yield Table(shown, [name, "messages", "size", ""])
    total = sum(row["messages"] for row in rows)
    all_of_it = format_size(sum(row["bytes"] for row in rows))
    yield f"{counted(total, 'message')} in {counted(len(rows), 'hour')}, {all_of_it}"
    if refused:
        yield f"{counted(refused, 'message')} refused by the target: --refused lists them"
    for one in cost.values():
        yield (
            f"handing over takes {one['writes']:,} requests that write or list, and {one['reads']:,} that read:"
            f" ${one['dollars']:.4f}, ${one['dollars_per_million']:.2f} a million"
        )


def _damaged_rows(damaged: Damaged) -> list[Row]:
    from tiered.log.timers import HOUR_MS

    return [
        {
            "hour_ms": hour * HOUR_MS,
            "reason": f"{error.what} ({error.where})" if error.where else error.what,
        }
        for hour, error in sorted(damaged.items())
    ]


def _require_sound(call: Call, damaged: Damaged) -> None:
    """End with what could not be listed, when all else was."""
    from tiered.log.timers import HOUR_MS

    if not damaged:
        return
    call.stdout.flush()
    hours = sorted(damaged)
    named = few([format_time(hour * HOUR_MS) for hour in hours], _DAMAGED_NAMED)
    raise DataError(
        f"{counted(len(hours), 'hour')} cannot be read whole: {named}: {damaged[hours[0]].what}",
        where=damaged[hours[0]].where,
        do="`tiered verify URL --timers --deep` names what is damaged",
    )


def message_row(message: DueMessage) -> Row:
    """One pending message, as JSON."""
    from base64 import b64encode

    from tiered.format.message_forms import decompress_body
    from tiered.format.record import decode_record, offset_msg_id
    from tiered.format.sysflag import COMPRESSED
    from tiered.log.timers import HOUR_MS
    from timer.records import number_of

    record = decode_record(message.record, 0)
    said, body = record.properties, record.body
    if record.sys_flag & COMPRESSED:
        body = decompress_body(body, record.sys_flag)
    by_place = offset_msg_id(record.store_host, record.physical_offset)
    return {
        "hour_ms": message.due_ms // HOUR_MS * HOUR_MS,
        "due_timestamp_ms": message.due_ms,
        "topic": said.get("REAL_TOPIC"),
        "queue_id": number_of(said.get("REAL_QID", "").encode(), 0),
        "msg_id": said.get("UNIQ_KEY") or by_place,
        "tags": said.get("TAGS"),
        "keys": said.get("KEYS"),
        "properties": said,
        "body_base64": b64encode(body).decode("ascii"),
    }


def _emit_messages(
    call: Call,
    head: dict[str, Any],
    what: Callable[[int], Iterator[DueMessage]],
    hours: Iterable[int],
) -> None:
    """List the messages of some hours."""
    from timer.dequeue import read_hours

    output, damaged = Output(call), dict[int, DataError]()

    def rows_of(hour: int) -> Iterator[Row]:
        for message in what(hour):
            try:
                row = message_row(message)
            except DataError as error:  # of one message: the others of its hour are sound
                damaged.setdefault(hour, error)
            else:
                yield row

    messages = read_hours(hours, rows_of, damaged)
    if output.form == "table":
        rows = ({**row, "due": format_time(row["due_timestamp_ms"])} for row in messages)
        output.table(rows, _SHOWN_COLUMNS)
    elif output.form == "json":
        output.listing(head, "messages", messages, lambda: {"damaged": _damaged_rows(damaged)})
    else:
        output.emit(head, messages, MESSAGE_COLUMNS)
    _require_sound(call, damaged)


# -- cancel ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimerCancelOptions(PatienceOptions):
    """What ``tiered timer cancel`` can be told."""

    url: str = argument()
    msg_id: str = argument("unique id, as `tiered timer show` prints it")


@TIMER.has("cancel", TimerCancelOptions)
def run_cancel(call: Call, options: TimerCancelOptions) -> int:
    """Cancels one pending message.

    Examples:
        tiered timer cancel s3://bucket/prefix AC1100010BF04E0E2F2A676C58850000
        tiered timer cancel file:///tmp/tier AC1100010BF04E0E2F2A676C58850000 --json
    """
    from tiered.cli.planned import open_workplace
    from tiered.upkeep.cancel_timer import cancel

    msg_id = options.msg_id
    at = open_workplace(call, options.url, give_up_s=options.give_up_s, timers=True)
    found = cancel(at, msg_id)
    document = {
        "format": 1,
        **picked(at.place, "cluster", "broker"),
        "msg_id": msg_id,
        "cancelled": found,
    }
    lines = [
        f"{counted(len(found), 'message')} cancelled: {msg_id}",
        *(f"  due {format_time(row['due_timestamp_ms'])}" for row in found),
    ]
    columns = ["hour_ms", "due_timestamp_ms", "queue_offset"]
    show(call, document, rows=found, columns=columns, lines=lines)
    return DONE


# -- run ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimerRunOptions(MetricsOptions):
    """What ``tiered timer run`` can be told."""

    url: str = argument()
    to: str = required(
        "an embedded store's directory, or live brokers by their name servers",
        kinds.Kind("DIR|namesrv://HOST:PORT[;HOST:PORT...]", str),
    )
    near_ms: int = option(
        "hand an hour over this long before it begins",
        kinds.DURATION_MS,
        default=3_600_000,
    )
    once: bool = flag("exit when what is due within --near is delivered")
    rate: int = option("messages per second; 0: unlimited", kinds.NUMBER, default=0)
    no_wait: bool = flag("exit with code 4 if another run is active")


@TIMER.has("run", TimerRunOptions)
def run_run(call: Call, options: TimerRunOptions) -> int:
    """Delivers messages when they are due, each once.

    Hands messages over hour by hour, before they are due, to an embedded store or to the timer wheel of live brokers.
    The next run continues after a kill. See docs/timers.md.

    Examples:
        tiered timer run s3://bucket/prefix --to /data/timers
        tiered timer run s3://bucket/prefix --to namesrv://10.0.0.7:9876,10.0.0.8:9876
    """
    from tiered.attach.timer_run import RunSettings, hand_over

    settings = RunSettings(
        near_ms=options.near_ms,
        cluster=call.common.cluster,
        broker=call.common.broker,
        rate=options.rate,
        once=options.once,
        wait=not options.no_wait,
    )
    stop = threading.Event()
    with (
        Stopper(call.watch, stop.set, seconds=10.0) as stopper,
        metrics_served(call, options.metrics_listen, TIMER_METRICS, "tiered_timer_up") as shown,
    ):
        try:
            made = hand_over(
                options.url,
                lambda place, state, is_ours: _open_target(
                    call, options, place, state, stop=stop, is_ours=is_ours
                ),
                settings,
                options=call.s3_options(),
                clock=call.clock,
                stop=stop,
                announce=partial(announce_lease, call, "timers", shown),
                beside=partial(_beside, call, options, shown),
            )
        except ClosedError:
            if stopper.received is None:
                raise
            return DONE  # it waited for another run's lease: nothing was in hand
    document = {
        "format": 1,
        **picked(made.place, "cluster", "broker"),
        **asdict(made.counters),
        **picked(made, "run", "refused", "missing", "delivered", "waiting"),
        "next_hand_over_ms": made.next_ms,
    }
    is_theirs = "://" in options.to
    there = f"{made.delivered:,} delivered, {made.waiting:,} waiting there"
    lines = [
        f"{counted(made.counters.handed + made.counters.found, 'message')} handed over, "
        + ("the brokers deliver them" if is_theirs else there)
    ]
    if made.counters.held:
        lines.append(
            f"{counted(made.counters.held, 'message')} of {counted(made.counters.damaged, 'hour')} held back for"
            " damage: `tiered verify URL --timers --deep --repair --store DIR` mends it"
        )
    show(call, document, lines=() if call.common.quiet else lines)
    return NEEDS_A_PERSON if made.refused or made.missing or made.counters.damaged else DONE


@contextlib.contextmanager
def _beside(
    call: Call,
    options: TimerRunOptions,
    shown: Shown | None,
    work: TimerDelivery,
    meter: MeteredStore,
) -> Iterator[None]:
    """Metrics, where they are asked for; and how far things are, where they have an end."""
    from tiered.attach.observe import request_samples
    from tiered.cli.stderr import Progressed

    def progressed() -> Progressed:
        counters, left = work.run.counters, work.pending()[0]
        done = counters.handed + counters.found + counters.dropped + counters.refused
        text = f"{done:,} of {done + left:,} handed over, {work.delivered:,} delivered"
        return Progressed(text, done, done + left)

    with contextlib.ExitStack() as stack:
        if shown is not None:
            shown.watch(work, meter, partial(request_samples, meter))
        if options.once:
            stack.enter_context(call.progress("timers", progressed))
        else:
            place = f"{work.place.cluster}/{work.place.broker}"
            call.say(f"tiered: handing over timers of {place} at {meter.url} to {options.to}")
        yield


def _open_target(
    call: Call,
    options: TimerRunOptions,
    place: Place,
    state: TierState,
    *,
    stop: threading.Event,
    is_ours: Callable[[], bool],
) -> Delivering:
    """An embedded store, or live brokers."""
    import random

    scheme, colon, rest = options.to.partition("://")
    if colon:
        servers = name_servers(scheme, rest)
        return _open_brokers(call, options, place, servers, stop=stop, is_ours=is_ours)

    from timer.local_target import LocalTarget

    directory = options.to
    _require_other(call, directory, state)
    return LocalTarget.open(
        directory,
        cluster=place.cluster,
        broker=place.broker,
        clock=call.clock,
        rng=random.SystemRandom(),
        stop=stop,
    )


def name_servers(scheme: str, text: str) -> list[Address]:
    """Addresses of ``namesrv://HOST:PORT;HOST:PORT``, or with commas."""
    why = "timers are handed over to a store directory, or to brokers"
    if scheme == "namesrv":
        try:
            return [*addresses(text.rstrip("/"))]
        except ValueError as error:
            why = str(error)
    where, do = f"{scheme}://{text}", "name a directory, or namesrv://HOST:PORT;HOST:PORT"
    raise InvalidError(why, where=where, do=do)


def _open_brokers(
    call: Call,
    options: TimerRunOptions,
    place: Place,
    servers: Sequence[Address],
    *,
    stop: threading.Event,
    is_ours: Callable[[], bool],
) -> Delivering:
    """Live brokers."""
    from timer.broker_target import NEAR_MS_MAX, BrokerTarget, Producer

    if options.near_ms > NEAR_MS_MAX:
        raise InvalidError(
            "brokers refuse what is due in three days or later, and roll what is due in two",
            where=f"--near {format_duration(options.near_ms)}",
            do=f"choose {format_duration(NEAR_MS_MAX)} or less",
        )
    producer = Producer(servers, call.clock)
    with contextlib.ExitStack() as opened:
        opened.callback(producer.close)
        target = BrokerTarget(
            producer,
            source=place.broker,
            seed=place.prefix,
            clock=call.clock,
            stop=stop,
            is_ours=is_ours,
        )
        opened.pop_all()
        return target


def _require_other(call: Call, directory: str, state: TierState) -> None:
    """Refuse the broker's own store, or a copy: what was taken from it is pending there still.

    A store that has nothing but its names to be told apart by, as ours and those of brokers before 5.4, says the same as one
    that is made here for what was taken from it. So one that the journal names as the target goes on as that.
    """
    from tiered.local.rocketmq import RocketMQStore
    from timer.progress import WheelState

    source = state.store
    if is_vacant(directory) or not source.get("store_id"):
        return
    wheel = WheelState.read(directory)
    if wheel is not None and wheel.mark and wheel.mark == state.timers.run.target.get("id"):
        return
    with contextlib.closing(RocketMQStore.open(directory, clock=call.clock)) as local:
        store_id = local.identity.store_id
    if store_id == source["store_id"]:
        raise InvalidError(
            "these timers were taken from this store, which has them still: each would be delivered twice",
            where=directory,
            do="name another directory; it is made if need be",
        )
