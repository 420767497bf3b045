"""``tiered cat``: the messages of a topic, queue after queue."""

from __future__ import annotations

import threading
from dataclasses import field
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.cli import kinds
from tiered.cli.frame import command
from tiered.cli.options import ISOLATION_HELP, SpanOptions, argument, flag, option
from tiered.cli.values import few
from tiered.errors import DataError, InvalidError, no_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from fetcher.filters import Filter
    from tiered.api.open_tier import OpenTier
    from tiered.cli.call import Call, Results
    from tiered.format.record import Record
    from tiered.log.cursor import QueueCursor
    from tiered.log.messages import Numbers
    from tiered.log.parts import Gap
    from tiered.log.reader import QueueReader, TierBatch, TierReader
    from tiered.model import MessageQueue, QueueOffset

FOLLOW_S = 1.0
"""Pause between two looks at the journal: one listing each."""
_BOUNDS_SHOWN = 8
MEMORY_BYTES = 32 << 20
"""What is read ahead, at most."""
_OF_RETRIES = ("%RETRY%", "%DLQ%", "SCHEDULE_TOPIC_XXXX")
"""Mounts have messages of these topics, too, in retry logs: the last are those that wait for their time."""


@dataclass(frozen=True, kw_only=True)
class CatOptions(SpanOptions):
    """What ``tiered cat`` can be told."""

    url: str = argument()
    topic: str = argument()
    queue: int | None = option("only this queue", kinds.NUMBER)
    offset: int | None = option("first queue offset", kinds.NUMBER)
    incarnation: str | None = option(
        "this incarnation of each queue, or all, oldest first, with truncated messages",
        kinds.Kind("N|all", kinds.incarnation),
        default_text="the present one",
    )
    count: int | None = option("maximum messages in all", kinds.NUMBER)
    tag: str | None = option(
        "only these tags: A||B",
        kinds.Kind("EXPR", str),
        default_text="*",
    )
    sql: str | None = option(
        "only messages that meet this SQL92 expression",
        kinds.Kind("EXPR", str),
    )
    follow: bool = flag("continue with new messages", excludes="until")
    format: str = option(
        "one JSON object a line, stored records, bare bodies, or text for people",
        kinds.one_of("FORMAT", "json", "raw", "body", "text"),
        default="json",
    )
    raw_body: bool = flag("do not decompress bodies")
    isolation: str = option(ISOLATION_HELP, kinds.ISOLATION, default="read_committed")


@command("cat", CatOptions)
def run(call: Call, options: CatOptions) -> int:
    """Prints the messages of a topic, queue after queue.

    Examples:
        tiered cat file:///tmp/tier orders --count 10
        tiered cat s3://bucket/prefix orders --from now-2h --tag 'paid||sent' --format text
    """
    wish = read_wish(call, options)
    topic, number = options.topic, options.queue
    which = options.incarnation
    tier = call.tier(
        options.url, memory_bytes=MEMORY_BYTES, is_sequential=True, isolation=options.isolation
    )
    printer = Printer(wish, call.stdout, options.count, tier, call.say)
    tiers = tiers_of(call, tier, topic)
    check_queues(tiers, topic, number)
    printer.begin()
    try:
        for one in tiers:
            printer.turn_to(one)
            if which is not None:
                _print_incarnations(one, printer, topic, number, which)
            else:
                _print_all(one, printer, topic, number)
        while options.follow and not printer.is_full:
            # Who follows wants what there is now, and not when the next block of output is full.
            call.stdout.flush()
            call.clock.wait(threading.Event(), FOLLOW_S)
            for one in tiers:
                if one.refresh():
                    printer.turn_to(one)
                    _print_all(one, printer, topic, number)
    except DataError:
        call.stdout.flush()  # what came before the damaged block is good
        raise
    printer.finish()
    if not printer.has_written and printer.left != 0:
        call.say(_nothing_found(options, tiers[0]))
    return 0


def tiers_of(call: Call, tier: OpenTier, topic: str) -> list[OpenTier]:
    """The tier, and the retry logs of its mounts that have the topic: what the broker left comes first."""
    if not topic.startswith(_OF_RETRIES):
        return [tier]
    logs = tier.retry_logs()
    for one in logs:
        call.opened.callback(one.close)
    return [one for one in (tier, *logs) if one.queues(topic)] or [tier]


def _nothing_found(options: CatOptions, tier: OpenTier) -> str:
    """What was looked for, and what there is."""
    from tiered.cli.values import span_text

    topic, number, offset = options.topic, options.queue, options.offset
    looked = span_text(options.from_, options.until)
    looked += f" from offset {offset} on" if offset else ""
    said = {"tag": options.tag, "sql": options.sql}
    filters = [f"--{name} {text}" for name, text in said.items() if text]
    looked += f" that {filters[0]} lets pass" if filters else ""
    incarnations = {
        queue.queue_id: tier.reader.queue(queue).incarnation for queue in tier.queues(topic)
    }
    bounds = {
        queue_id: (incarnation.min_offset, incarnation.commit_offset)
        for queue_id, incarnation in incarnations.items()
        if number in {None, queue_id}
    }
    return f"tiered: no messages{looked}; of {topic}, {bounds_text(bounds)}"


def bounds_text(bounds: Mapping[int, tuple[int, int]]) -> str:
    """What some queues of a topic have, by queue id."""
    said = [
        f"queue {queue_id} has [{low}, {end})" for queue_id, (low, end) in sorted(bounds.items())
    ]
    return few(said, _BOUNDS_SHOWN)


def read_wish(call: Call, options: CatOptions) -> PrintWish:
    """What the options say."""
    if options.follow and options.incarnation is not None:
        raise InvalidError(
            "--follow and --incarnation contradict each other",
            do="leave out --incarnation: only the present one grows",
        )
    return PrintWish(
        offset=options.offset or 0,
        from_ms=call.ms(options.from_),
        until_ms=call.ms(options.until),
        filter=_filter(options),
        form=_form(call, options),
        raw_body=options.raw_body,
    )


def _filter(options: CatOptions) -> Filter | None:
    """``--tag`` or ``--sql``."""
    tags, expression = options.tag, options.sql
    if tags in {None, "", "*"} and expression is None:
        return None
    if tags is not None and expression is not None:
        do = "give one of them; an expression can say TAGS IN ('paid', 'sent')"
        raise InvalidError("--tag and --sql are two filters", do=do)
    from fetcher.filters import compile_filter

    if expression is not None:
        return compile_filter(expression, "SQL92")
    assert tags is not None
    return compile_filter(tags, "TAG")


def _form(call: Call, options: CatOptions) -> str:
    """``--format``; ``-o`` counts on the command line only, since it is set for other commands elsewhere."""
    is_given = call.is_given("output") or call.is_given("json")
    output = call.form if is_given else "jsonl"
    if output == "jsonl":
        return options.format
    if output == "json" and options.format == "json":
        return DOCUMENT
    raise InvalidError(
        f"cat does not print {options.format} messages as {output}",
        do="leave out -o; --format says how messages are printed",
    )


def check_queues(tiers: Sequence[OpenTier], topic: str, number: int | None) -> None:
    """Refuse a topic or queue that none of the tiers has."""
    tier = tiers[0]
    known = sorted({queue.queue_id for one in tiers for queue in one.queues(topic)})
    if not known:
        raise no_topic(topic, tier.topics(), where=tier.store.url)
    if number is not None and number not in known:
        raise InvalidError(
            f"topic {topic} has no queue {number}, only {_ranges(known)}",
            where=tier.store.url,
            do="`tiered ls URL` lists the topics and queues",
        )


def _print_all(tier: OpenTier, printer: Printer, topic: str, number: int | None) -> None:
    queues = [queue for queue in tier.queues(topic) if number in {None, queue.queue_id}]
    readers: Iterable[QueueReader] = [printer.meet(queue, tier.reader) for queue in queues]
    if printer.left is None and printer.wish.from_ms is None and not tier.is_direct:
        readers = queues_ahead(tier, GROUP, list(readers), printer.start)
    for reader in readers:
        if printer.is_full:
            break
        printer.print_queue(reader)


def _print_incarnations(
    tier: OpenTier, printer: Printer, topic: str, number: int | None, which: str
) -> None:
    """Each incarnation that is meant, the oldest of a queue first; of a number the last is what was not truncated."""
    from tiered.log.state import is_tail

    found = False
    for queue in tier.queues(topic):
        readers = tier.reader.incarnations(queue) if number in {None, queue.queue_id} else []
        incarnations = [reader.incarnation for reader in readers]
        for at, reader in enumerate(readers):
            if which in {"all", str(reader.incarnation.number)}:
                found = True
                printer.print_incarnation(reader, is_truncated=is_tail(incarnations, at))
    if not found:
        raise InvalidError(
            f"topic {topic} has no incarnation {which}",
            where=tier.store.url,
            do="`tiered ls URL TOPIC --incarnations` lists them",
        )


def _ranges(numbers: Iterable[int]) -> str:
    """As ``0-3, 7``."""
    rows: list[list[int]] = []
    for number in sorted(numbers):
        if rows and number == rows[-1][1] + 1:
            rows[-1][1] = number
        else:
            rows.append([number, number])
    return ", ".join(f"{low}-{high}" if low != high else f"{low}" for low, high in rows)


# --------------------------------------------------------------------------------------------------
# Writes messages of queues in each of the forms of ``tiered cat``.
# A block is checked and turned into output as a whole before any of it is written, so nothing of a damaged one gets out.
# --------------------------------------------------------------------------------------------------

GROUP = "cat"
"""Whose reading ahead it is."""
_BATCH_BYTES = 4 << 20
_COUNT_MAX = 1 << 20
DOCUMENT = "document"
"""The form that is one JSON document."""


@dataclass(frozen=True, slots=True)
class PrintWish:
    """What to print of each queue."""

    offset: int  # first queue offset
    from_ms: int | None  # begin with the first message stored at or after it
    until_ms: int | None  # end before the first message stored at or after it
    filter: Filter | None  # only these; None for all
    form: str  # one of the formats, or ``document``
    raw_body: bool  # bodies as stored


@dataclass(slots=True)
class Printer:
    """Writes what is wanted of one queue after another."""

    wish: PrintWish  # what
    out: Results  # where to
    left: int | None  # how many messages may still be written; None for all
    source: OpenTier  # reads ahead
    say: Callable[[str], None] = lambda _: None  # is told what is passed over, for people
    places: dict[MessageQueue, tuple[QueueCursor, QueueOffset]] = field(default_factory=dict)
    """Where to go on, by queue."""
    _of_tiers: dict[str, dict[MessageQueue, tuple[QueueCursor, QueueOffset]]] = field(
        default_factory=dict
    )
    _written: int = 0
    _incarnation: tuple[int, bool] | None = None

    def turn_to(self, tier: OpenTier) -> None:
        """Go on with what another tier has of the same queues."""
        self.source = tier
        self.places = self._of_tiers.setdefault(tier.place.prefix, {})

    @property
    def is_full(self) -> bool:
        """As many as were asked for have been written."""
        return self.left is not None and self.left <= 0

    def print_queue(self, reader: QueueReader) -> None:
        """Write what the history that a reader reads has from where we are.

        Raises:
            DataError: A block is damaged; nothing of it is written.
        """
        from tiered.log.state import Gap
        from tiered.model import QueueOffset

        at, end = self.start(reader), self._end(reader)
        while not self.is_full and at < end:
            count, until = end - at, None
            if self.wish.filter is None and self.left is not None:
                count = min(count, self.left)
                until = QueueOffset(at + count)
            count = min(count, _COUNT_MAX)
            found = self.source.fetch(
                GROUP, reader.cursor, at, bytes_max=_BATCH_BYTES, count_max=count, until=until
            )
            if found is None:
                break
            if isinstance(found, Gap):
                self._say_gap(reader.queue, at, found)
                at = found.end
            else:
                self._write(found)
                at = found.records.end_offset
            self.places[reader.queue] = (reader.cursor, at)

    def _say_gap(self, queue: MessageQueue, at: QueueOffset, gap: Gap) -> None:
        self.say(
            f"tiered: {queue}: no messages from offset {at} to {gap.end},"
            f" which never came into the tier: {gap.reason}"
        )

    def print_incarnation(self, reader: QueueReader, *, is_truncated: bool) -> None:
        """Write what one incarnation of a queue has, from its beginning; each message says which incarnation it is of.

        Args:
            is_truncated: It is an end that the broker truncated, which has the number of the incarnation it was cut from.
        """
        self.places.pop(reader.queue, None)
        self._incarnation = (reader.incarnation.number, is_truncated)
        self.print_queue(reader)

    @property
    def has_written(self) -> bool:
        """Whether any message was."""
        return self._written > 0

    def finish(self) -> None:
        """End the document, and give everything out."""
        if self.wish.form == DOCUMENT:
            self.out.write(b"\n]}\n" if self._written else b"]}\n")
        self.out.flush()

    def begin(self) -> None:
        """Begin the document."""
        if self.wish.form == DOCUMENT:
            self.out.write(b'{"format": 1, "messages": [')

    def meet(self, queue: MessageQueue, tier: TierReader) -> QueueReader:
        """A reader of what the journal says now: from where we are, or from where the broker truncated what was written.

        What has expired before it could be written is passed over, and said.
        """
        from tiered.errors import ExpiredError
        from tiered.log.reader import QueueReader

        if queue not in self.places:
            return tier.queue(queue)
        cursor, at = self.places[queue]
        try:
            going_on = cursor.go_on(at)
        except ExpiredError as error:
            self.say(f"tiered: {error.what}; going on at offset {error.next_offset}")
            cursor = tier.cursor(queue)
            going_on = cursor.low
        if going_on < at and cursor.history.tails:
            self.say(f"tiered: {queue}: the broker truncated what it had from offset {going_on} on")
        self.places[queue] = (cursor, going_on)
        return QueueReader(tier.store, tier.prefix, cursor)

    def start(self, reader: QueueReader) -> QueueOffset:
        """Where to go on in a queue."""
        from tiered.model import QueueOffset

        known = self.places.get(reader.queue)
        if known is not None and known[0] is reader.cursor:
            return known[1]
        start = self.wish.offset
        if self.wish.from_ms is not None:
            start = max(start, reader.offset_by_time(self.wish.from_ms))
        low = reader.incarnation.min_offset
        for gap in reader.incarnation.gaps if self.wish.from_ms is None else ():
            if start < gap.end <= low:  # nothing is before it, so reading begins behind it
                self._say_gap(reader.queue, QueueOffset(max(start, gap.start)), gap)
        start = QueueOffset(max(start, low))
        self.places[reader.queue] = (reader.cursor, start)
        return start

    def _end(self, reader: QueueReader) -> QueueOffset:
        if self.wish.until_ms is None:
            return reader.cursor.end
        return reader.offset_by_time(self.wish.until_ms)

    def _write(self, batch: TierBatch) -> None:
        try:
            count, buffers = self._render(batch)
        except DataError as error:
            where = f"{batch.records.queue} from queue offset {batch.records.base_offset}"
            raise DataError(error.what, where=where, do="run `tiered verify --deep`") from error
        if self.left is not None:
            self.left -= count
        self._written += count
        self.out.writelines(buffers)

    def _render(self, batch: TierBatch) -> tuple[int, Sequence[Buffer]]:
        import numpy as np

        from tiered.log import messages

        wish, records = self.wish, batch.records
        has_message = np.flatnonzero(records.sizes > 0)
        wanted = has_message if wish.filter is None else wish.filter.select(records)
        wanted = wanted[: self.left]
        if wish.form == "raw":
            return len(wanted), messages.raw_bytes(records, wanted)
        if wish.form == "body":
            return len(wanted), messages.bodies(records, wanted, raw_body=wish.raw_body)
        place, raw_body = batch.log_offset, wish.raw_body
        if wish.form == "text":
            return self._as_text(batch, wanted)
        lines = messages.messages_lines(records, place, raw_body=raw_body, wanted=wanted)
        return len(lines), self._joined(lines)

    def _as_text(self, batch: TierBatch, wanted: Numbers) -> tuple[int, Sequence[Buffer]]:
        from tiered.format.record_kind import RecordKind
        from tiered.log import messages

        records, queue = batch.records, batch.records.queue
        if records.kind is not RecordKind.ROCKETMQ:
            found = messages.foreign_messages(records, wanted)
            base = records.base_offset
            return len(found), [
                _text_line(
                    one.time_ms,
                    f"{queue.topic}/{queue.queue_id}@{base + one.number}",
                    [f"key={one.key.decode('utf-8', 'backslashreplace')}"] if one.key else [],
                    one.body,
                )
                for one in found
            ]
        bodies = messages.bodies(records, wanted, raw_body=self.wish.raw_body)
        both = zip(messages.items(records, wanted), bodies, strict=True)
        return len(bodies), [_line(one.record, body, self._incarnation) for one, body in both]

    def _joined(self, lines: Sequence[bytes]) -> Sequence[bytes]:
        """JSON objects as lines, or as elements of the document's array."""
        if self._incarnation is not None:
            number, is_truncated = self._incarnation
            more = f', "incarnation": {number}, "is_truncated": {str(is_truncated).lower()}}}'
            lines = [line[:-1] + more.encode() for line in lines]
        if self.wish.form != DOCUMENT:
            return [line + b"\n" for line in lines]
        lead = [b",\n"] * len(lines)
        if lines and not self._written:
            lead[0] = b"\n"
        return [a + line for a, line in zip(lead, lines, strict=True)]


def _line(record: Record, body: Buffer, incarnation: tuple[int, bool] | None) -> bytes:
    """A message for eyes: one line, nothing that a terminal would obey."""
    said = record.properties
    named = [f"{name.lower()}={said[name]}" for name in ("TAGS", "KEYS") if said.get(name)]
    place = f"{record.topic}/{record.queue_id}@{record.queue_offset}"
    if incarnation is not None:
        named.append(f"incarnation={incarnation[0]}" + " (truncated)" * incarnation[1])
    return _text_line(record.store_timestamp_ms, place, named, bytes(body))


def _text_line(time_ms: int, place: str, named: Sequence[str], body: bytes) -> bytes:
    from tiered.cli.values import format_time, printable

    text = body.decode("utf-8", "backslashreplace")
    line = " ".join(map(printable, [format_time(time_ms), place, *named, text]))
    return line.encode("utf-8", "backslashreplace") + b"\n"


# --------------------------------------------------------------------------------------------------
# Begins to read queues that are about to be printed, so that each does not wait for the store anew.
# --------------------------------------------------------------------------------------------------

AT_ONCE = 8
"""Queues that are begun before their turn."""


def queues_ahead(
    source: OpenTier,
    group: str,
    readers: Sequence[QueueReader],
    start: Callable[[QueueReader], QueueOffset],
) -> Iterator[QueueReader]:
    """The same readers, in order, with the first records of those that follow on their way.

    What that meets, such as damage, is left to the reader of the queue.
    """

    def begin(reader: QueueReader, at: QueueOffset) -> None:
        source.fetch(group, reader.cursor, at, bytes_max=1, count_max=1)

    starts = [(reader, start(reader)) for reader in readers]
    busy = [(reader, at) for reader, at in starts if at < reader.incarnation.commit_offset]
    if len(busy) <= 1:
        yield from readers
        return
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(AT_ONCE, "tiered-ahead")
    try:
        rest = iter(busy)
        for _ in range(AT_ONCE):
            first = next(rest, None)
            if first is not None:
                pool.submit(begin, *first)
        for reader in readers:
            yield reader
            following = next(rest, None)
            if following is not None:
                pool.submit(begin, *following)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
