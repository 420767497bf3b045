"""``tiered timer``: messages that are due much later, in hourly files of the tier."""

from __future__ import annotations

import contextlib
import threading
from base64 import b64encode
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.cli.errors import DONE, NEEDS_A_PERSON
from tiered.cli.frame import make_command, make_program
from tiered.cli.options import argument, flag, option, required
from tiered.cli.output import Output, Row
from tiered.cli.signals import Stopper
from tiered.cli.values import (
    above_zero,
    counted,
    format_size,
    format_time,
    parse_duration,
    parse_time,
    whole,
)
from tiered.errors import ClosedError, InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tiered.api.broker_place import Place
    from tiered.attach.timer_place import TimerPlace
    from tiered.attach.timer_run import Delivering
    from tiered.attach.timers import TimerImport
    from tiered.cli.call import Call
    from timer.dequeue import DueMessage, HourRow, TimerReader

HOUR_COLUMNS = ["hour", "messages", "bytes", "due_min_ms", "due_max_ms"]
MESSAGE_COLUMNS = [
    *("hour_ms", "due_timestamp_ms", "topic", "queue_id", "msg_id", "tags", "keys"),
    *("properties", "body_base64"),
]
_SHOWN_COLUMNS = ["due", "topic", "queue_id", "msg_id", "tags", "keys"]
_BAR = 32


# -- import ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimerImportOptions:
    """What ``tiered timer import`` can be told."""

    store: str = argument()
    to: str = required("URL of the tier", "URL", str)
    near_ms: int = option(
        "leave what is due within so long with the broker, as 4h; 0s: take all that is pending, due or not",
        "DURATION",
        parse_duration,
        default=4 * 3_600_000,
        default_text="4h",
    )
    no_wait: bool = flag(
        "end with code 4 when another process writes these timers, instead of waiting"
    )


def run_import(call: Call, options: TimerImportOptions) -> int:
    """Take what is pending and due late enough."""
    from tiered.attach.timers import ImportSettings, import_timers

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
    _tell_import(call, import_document(made, near_ms))
    return NEEDS_A_PERSON if made.total.odd else DONE


def import_document(made: TimerImport, near_ms: int) -> dict[str, Any]:
    """The document of ``tiered timer import --json``."""
    sources = [
        {"topic": queue.topic, "queue_id": queue.queue_id, **asdict(counts)}
        for queue, counts in made.counts.items()
    ]
    return {
        "format": 1,
        "cluster": made.place.cluster,
        "broker": made.place.broker,
        "near_ms": near_ms,
        "due_from_ms": made.due_from_ms,
        **asdict(made.total),
        "bundles": made.bundles,
        "entries": made.entries,
        "sources": sources,
    }


def _tell_import(call: Call, document: dict[str, Any]) -> None:
    output = Output(call)
    if output.form != "table":
        output.emit(document, document["sources"], list((document["sources"] or [{}])[0]))
        return
    output.line(f"{document['cluster']}/{document['broker']}")
    lines = {
        "taken": (document["taken"], "message", f"in {counted(document['bundles'], 'object')}"),
        "marks": (document["marks"], "delete mark", "of messages that were taken before"),
        "before": (document["known"], "message", "in the tier already"),
        "stays": (document["near"], "message", "due within the near window, with the broker"),
        "delivered": (document["delivered"], "message", "by the broker"),
        "withdrawn": (document["cancelled"], "record", "taken back, with their delete marks"),
        "rolled": (document["rolled"], "record", "of messages for which another record stands"),
        "odd": (document["odd"], "record", "whose due time cannot be understood: left there"),
    }
    for word, (count, one, rest) in lines.items():
        if count or word in {"taken", "stays"}:
            output.line(f"  {word:<10}{counted(count, one)} {rest}")


# -- ls and show ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimerLsOptions:
    """What ``tiered timer ls`` can be told."""

    url: str = argument()
    messages: bool = flag("list each pending message, in due order")


def run_ls(call: Call, options: TimerLsOptions) -> int:
    """List hours, or messages."""
    output = Output(call)
    with _opened(call, options.url) as (reader, place):
        head = {"format": 1, "cluster": place.cluster, "broker": place.broker}
        if options.messages:
            hours = [row.hour for row in reader.listing()]
            _emit_messages(output, head, _messages(reader, hours))
            return DONE
        rows = [_hour_row(row) for row in reader.listing()]
    if output.form == "table":
        _draw(output, rows)
    else:
        columns = ["hour_ms", *HOUR_COLUMNS[1:]]
        output.emit({**head, "hours": rows}, rows, columns)
    return DONE


@dataclass(frozen=True, kw_only=True)
class TimerShowOptions:
    """What ``tiered timer show`` can be told."""

    url: str = argument()
    hour: str = argument()


def run_show(call: Call, options: TimerShowOptions) -> int:
    """List the messages of one hour."""
    from tiered.log.timers import HOUR_MS

    text = options.hour
    try:
        hour = parse_time(text, call.clock.now_ms()) // HOUR_MS
    except ValueError as error:
        raise InvalidError(f"HOUR {text}: {error}", do="give a time within it") from None
    output = Output(call)
    with _opened(call, options.url) as (reader, place):
        head = {"format": 1, "cluster": place.cluster, "broker": place.broker}
        hours = [hour] if hour in reader.state.timers.hours else []
        _emit_messages(output, {**head, "hour_ms": hour * HOUR_MS}, _messages(reader, hours))
    return DONE


@contextlib.contextmanager
def _opened(call: Call, url: str) -> Iterator[tuple[TimerReader, TimerPlace]]:
    from tiered.api.stores import backend_errors
    from tiered.attach.timer_place import choose_timers
    from tiered.cli.tiers import open_objects
    from timer.dequeue import TimerReader

    with contextlib.ExitStack() as stack, backend_errors():
        store = open_objects(call, url, stack)
        place = choose_timers(store, call.common.cluster, call.common.broker)
        reader = TimerReader(store, place.prefix)
        reader.refresh()
        yield reader, place


def _hour_row(row: HourRow) -> Row:
    return {
        "hour_ms": row.hour_ms,
        "messages": row.messages,
        "bytes": row.size_bytes,
        "due_min_ms": row.due_min_ms,
        "due_max_ms": row.due_max_ms,
    }


def _draw(output: Output, rows: list[Row]) -> None:
    """A histogram: a line an hour."""
    most = max((row["messages"] for row in rows), default=1)
    shown = [
        {
            "hour": format_time(row["hour_ms"]),
            "messages": row["messages"],
            "size": format_size(row["bytes"]),
            "": "#" * max(1, round(_BAR * row["messages"] / most)),
        }
        for row in rows
    ]
    output.table(shown, ["hour", "messages", "size", ""])
    total = sum(row["messages"] for row in rows)
    size = format_size(sum(row["bytes"] for row in rows))
    output.line(f"{counted(total, 'message')} in {counted(len(rows), 'hour')}, {size}")


def _messages(reader: TimerReader, hours: Iterable[int]) -> Iterator[Row]:
    for hour in hours:
        for message in reader.pending(hour):
            yield message_row(message)


def message_row(message: DueMessage) -> Row:
    """One pending message, as JSON.

    Raises:
        DataError: It is damaged.
    """
    from tiered.format.hosts import offset_msg_id
    from tiered.format.message import decompress_body
    from tiered.format.record import decode_record
    from tiered.format.sysflag import COMPRESSED
    from tiered.log.timers import HOUR_MS

    record = decode_record(message.record, 0)
    said, body = record.properties, record.body
    if record.sys_flag & COMPRESSED:
        body = decompress_body(body, record.sys_flag)
    by_place = offset_msg_id(record.store_host, record.physical_offset)
    return {
        "hour_ms": message.due_ms // HOUR_MS * HOUR_MS,
        "due_timestamp_ms": message.due_ms,
        "topic": said.get("REAL_TOPIC"),
        "queue_id": int(said.get("REAL_QID", "0")),
        "msg_id": said.get("UNIQ_KEY") or by_place,
        "tags": said.get("TAGS"),
        "keys": said.get("KEYS"),
        "properties": said,
        "body_base64": b64encode(body).decode("ascii"),
    }


def _emit_messages(output: Output, head: dict[str, Any], messages: Iterator[Row]) -> None:
    if output.form == "table":
        rows = ({**row, "due": format_time(row["due_timestamp_ms"])} for row in messages)
        output.table(rows, _SHOWN_COLUMNS)
        return
    document = {**head, "messages": list(messages)} if output.form == "json" else head
    output.emit(document, messages, MESSAGE_COLUMNS)


# -- cancel ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimerCancelOptions:
    """What ``tiered timer cancel`` can be told."""

    url: str = argument()
    msg_id: str = argument()
    give_up_s: float = option(
        "end with code 3 when the store has refused for so long, seconds",
        "SECONDS",
        above_zero,
        name="give-up-seconds",
        default=60.0,
    )


def run_cancel(call: Call, options: TimerCancelOptions) -> int:
    """Take one pending message back."""
    from tiered.api.stores import backend_errors
    from tiered.attach.timer_place import TIMER_SIGNS, timers_of
    from tiered.cli.planned import open_workplace
    from tiered.upkeep.cancel_timer import cancel

    msg_id = options.msg_id
    with contextlib.ExitStack() as stack, backend_errors():
        at = open_workplace(
            call, options.url, stack, give_up_s=options.give_up_s, signs=TIMER_SIGNS
        )
        found = cancel(at.at_place(timers_of(at.place)), msg_id)
    output = Output(call)
    document = {
        "format": 1,
        "cluster": at.place.cluster,
        "broker": at.place.broker,
        "msg_id": msg_id,
        "cancelled": found,
    }
    if output.form == "table":
        output.line(f"{counted(len(found), 'message')} taken back: {msg_id}")
        for row in found:
            output.line(f"  due {format_time(row['due_timestamp_ms'])}")
    else:
        output.emit(document, found, ["hour_ms", "due_timestamp_ms", "queue_offset"])
    return DONE


# -- run ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimerRunOptions:
    """What ``tiered timer run`` can be told."""

    url: str = argument()
    to: str = required(
        "store directory of ours that the messages go to, made if need be", "DIR", str
    )
    near_ms: int = option(
        "hand an hour's messages over so long before it begins, as 1h",
        "DURATION",
        parse_duration,
        default=3_600_000,
        default_text="1h",
    )
    once: bool = flag(
        "end when nothing is due within the near window, and all that was is delivered"
    )
    rate: int = option(
        "messages handed over in a second, at most; 0: no limit",
        "N",
        whole(low=0),
        default=0,
    )
    no_wait: bool = flag("end with code 4 when another run is at work, instead of waiting")


def run_run(call: Call, options: TimerRunOptions) -> int:
    """Hand over, and stay until we are stopped."""
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
    with Stopper(call.watch, stop.set, seconds=10.0):
        made = hand_over(
            options.url,
            lambda place, source: _open_target(call, options.to, place, source),
            settings,
            options=call.s3_options(),
            clock=call.clock,
            stop=stop,
        )
    document = {
        "format": 1,
        "cluster": made.place.cluster,
        "broker": made.place.broker,
        "run": made.run,
        **asdict(made.counters),
        "delivered": made.delivered,
        "waiting": made.waiting,
        "next_hand_over_ms": made.next_ms,
    }
    output = Output(call)
    if output.form != "table":
        output.emit(document, [document], list(document))
    elif not call.common.quiet:
        output.line(
            f"{counted(made.counters.handed, 'message')} handed over, {made.delivered:,} delivered,"
            f" {made.waiting:,} waiting there"
        )
    return NEEDS_A_PERSON if made.counters.refused else DONE


def _open_target(call: Call, directory: str, place: Place, source: Mapping[str, Any]) -> Delivering:
    """An embedded store.

    Raises:
        InvalidError: It is none, or the one that the timers were taken from.
    """
    import random

    from timer.local_target import LocalTarget

    if "://" in directory:
        raise InvalidError(
            "timers are handed over to a store directory only, as yet",
            where=directory,
            do="name a directory",
        )
    _require_other(call, directory, source)
    return LocalTarget.open(
        directory,
        cluster=place.cluster,
        broker=place.broker,
        clock=call.clock,
        rng=random.SystemRandom(),
    )


def _require_other(call: Call, directory: str, source: Mapping[str, Any]) -> None:
    """Refuse the broker's own store, or a copy: what was taken from it is pending there still.

    Raises:
        InvalidError: It is that store, or none.
    """
    from tiered.local.rocketmq import RocketMQStore
    from timer.local_target import STATE_FILE

    folder = Path(directory)
    is_new = not folder.exists() or not any(folder.iterdir())
    if is_new or (folder / STATE_FILE).exists() or not source.get("store_id"):
        return
    with contextlib.closing(RocketMQStore.open(directory, clock=call.clock)) as local:
        store_id = local.identity.store_id
    if store_id == source["store_id"]:
        raise InvalidError(
            "these timers were taken from this store, which has them still: each would be delivered twice",
            where=directory,
            do="name another directory; it is made if need be",
        )


IMPORT = make_command(
    "timer.import",
    TimerImportOptions,
    run_import,
    examples=[
        "tiered timer import /data/rocketmq/store --to s3://bucket/prefix",
        "tiered timer import /data/rocketmq/store --to s3://bucket/prefix --near 0s",
    ],
    details=(
        "Messages that are due in days or months keep a broker's disk from being freed. This takes those of a store, live"
        " or dead, that are due later than the near window, and may be run again at any time. docs/timers.md says what"
        " a broker that lives on does with its own copies."
    ),
)
LS = make_command(
    "timer.ls",
    TimerLsOptions,
    run_ls,
    examples=["tiered timer ls s3://bucket/prefix", "tiered timer ls file:///tmp/tier --messages"],
)
SHOW = make_command(
    "timer.show",
    TimerShowOptions,
    run_show,
    examples=[
        "tiered timer show s3://bucket/prefix 2026-12-24T18:00:00Z",
        "tiered timer show file:///tmp/tier 1798131600000 --json",
    ],
)
CANCEL = make_command(
    "timer.cancel",
    TimerCancelOptions,
    run_cancel,
    examples=[
        "tiered timer cancel s3://bucket/prefix AC1100010BF04E0E2F2A676C58850000",
        "tiered timer cancel file:///tmp/tier AC1100010BF04E0E2F2A676C58850000 --json",
    ],
)
RUN = make_command(
    "timer.run",
    TimerRunOptions,
    run_run,
    examples=[
        "tiered timer run s3://bucket/prefix --to /data/timers",
        "tiered timer run file:///tmp/tier --to /tmp/timers --once --json",
    ],
    details=(
        "Hands messages over ahead of time, hour by hour, to a store directory of ours, and delivers each to its topic there"
        " when it is due. It may be killed at any moment: the next run goes on. docs/timers.md has what is guaranteed."
    ),
)
COMMAND = make_program(
    "timer",
    examples=[
        "tiered timer ls s3://bucket/prefix",
        "tiered timer import /data/rocketmq/store --to s3://bucket/prefix",
    ],
)
