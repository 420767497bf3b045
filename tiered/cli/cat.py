"""``tiered cat``: the messages of a topic, queue after queue.

A block is checked and turned into output as a whole before any of it is written, so nothing of a damaged one gets out.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

import click

from tiered.cli.frame import COMMANDS, make_command
from tiered.errors import DataError, InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

    from fetcher.filters import Filter
    from tiered.cli.call import Call
    from tiered.log.reader import QueueReader, TierBatch
    from tiered.model import MessageQueue, QueueOffset
    from tiered.plugin.engine import Engine
    from tiered.plugin.tier import Tier

FOLLOW_S = 1.0
"""Pause between two looks at the journal: one listing each."""
GROUP = "cat"
MEMORY_BYTES = 32 << 20
"""What is read ahead, at most."""
_BATCH_BYTES = 4 << 20
_COUNT_MAX = 1 << 20
_DOCUMENT = "document"


@dataclass(frozen=True, slots=True)
class Wish:
    """What to print of each queue.

    Attributes:
        offset: First queue offset.
        from_ms: Begin with the first message stored at or after it.
        until_ms: End before the first message stored at or after it.
        filter: Only these; None for all.
        form: One of the formats, or ``document``.
        raw_body: Bodies as stored.
    """

    offset: int
    from_ms: int | None
    until_ms: int | None
    filter: Filter | None
    form: str
    raw_body: bool


@dataclass(slots=True)
class Printer:
    """Writes what is wanted of one queue after another.

    Attributes:
        wish: What.
        out: Where to.
        left: How many messages may still be written; None for all.
        engine: Reads ahead.
        places: Where to go on, by queue: incarnation and queue offset.
    """

    wish: Wish
    out: BinaryIO
    left: int | None
    engine: Engine
    places: dict[MessageQueue, tuple[int, QueueOffset]] = field(default_factory=dict)
    _written: int = 0
    _life: tuple[int, bool] | None = None

    @property
    def is_full(self) -> bool:
        """As many as were asked for have been written."""
        return self.left is not None and self.left <= 0

    def print_queue(self, reader: QueueReader, *, is_taken_back: bool = False) -> None:
        """Write what the queue has from where we are.

        Args:
            reader: Of the life to print.
            is_taken_back: It is an end that the broker took back, which has the number of the life it was cut from.

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
            if is_taken_back:
                found = reader.read(at, bytes_max=_BATCH_BYTES, count_max=count)
            else:
                found = self.engine.fetch(
                    GROUP,
                    reader.queue,
                    at,
                    bytes_max=_BATCH_BYTES,
                    count_max=count,
                    incarnation=reader.life.incarnation,
                    until=until,
                )
            if found is None:
                break
            if isinstance(found, Gap):
                at = found.end
            else:
                self._write(found)
                at = found.records.end_offset
            self.places[reader.queue] = (reader.life.incarnation, at)

    def print_life(self, reader: QueueReader, *, is_taken_back: bool) -> None:
        """Write what one life of a queue has, from its beginning; each message says which life it is of.

        Raises:
            DataError: See ``print_queue``.
        """
        self.places.pop(reader.queue, None)
        self._life = (reader.life.incarnation, is_taken_back)
        self.print_queue(reader, is_taken_back=is_taken_back)

    def finish(self) -> None:
        """End the document, and give everything out."""
        if self.wish.form == _DOCUMENT:
            self.out.write(b"\n]}\n" if self._written else b"]}\n")
        self.out.flush()

    def begin(self) -> None:
        """Begin the document."""
        if self.wish.form == _DOCUMENT:
            self.out.write(b'{"format": 1, "messages": [')

    def start(self, reader: QueueReader) -> QueueOffset:
        """Where to go on in a life of a queue."""
        from tiered.model import QueueOffset

        incarnation, at = self.places.get(reader.queue, (None, QueueOffset(0)))
        if incarnation == reader.life.incarnation:
            return at
        start = self.wish.offset if incarnation is None else 0
        if self.wish.from_ms is not None:
            start = max(start, reader.offset_by_time(self.wish.from_ms))
        start = QueueOffset(max(start, reader.life.min_offset))
        self.places[reader.queue] = (reader.life.incarnation, start)
        return start

    def _end(self, reader: QueueReader) -> QueueOffset:
        if self.wish.until_ms is None:
            return reader.life.commit_offset
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
            found = messages.messages_json(records, place, raw_body=raw_body, wanted=wanted)
            return len(found), [_line(message, self._life) for message in found]
        lines = messages.messages_lines(records, place, raw_body=raw_body, wanted=wanted)
        return len(lines), self._joined(lines)

    def _joined(self, lines: Sequence[bytes]) -> Sequence[bytes]:
        """JSON objects as lines, or as elements of the document's array."""
        if self._life is not None:
            number, is_taken_back = self._life
            more = f', "incarnation": {number}, "is_taken_back": {str(is_taken_back).lower()}}}'
            lines = [line[:-1] + more.encode() for line in lines]
        if self.wish.form != _DOCUMENT:
            return [line + b"\n" for line in lines]
        lead = [b",\n"] * len(lines)
        if lines and not self._written:
            lead[0] = b"\n"
        return [a + line for a, line in zip(lead, lines, strict=True)]


def run(call: Call) -> int:
    """Read and print."""
    from tiered.cli.tiers import open_tier
    from tiered.plugin.stores import backend_errors

    wish = read_wish(call)
    topic, number = call.argument("topic"), call.whole_or_none("queue")
    which = call.text("incarnation")
    with contextlib.ExitStack() as stack, backend_errors():
        tier = open_tier(call, call.argument("url"), stack, memory_bytes=MEMORY_BYTES)
        printer = Printer(wish, call.stdout, call.whole_or_none("count"), tier.engine)
        check_queues(tier, topic, number)
        printer.begin()
        try:
            if which is not None:
                _print_lives(tier, printer, topic, number, which)
            else:
                _print_all(tier, printer, topic, number)
            while call.flag("follow") and not printer.is_full:
                call.stdout.flush()
                call.clock.wait(threading.Event(), FOLLOW_S)
                if tier.refresh():
                    _print_all(tier, printer, topic, number)
        except DataError:
            call.stdout.flush()  # what came before the damaged block is good
            raise
        printer.finish()
    return 0


def read_wish(call: Call) -> Wish:
    """What the options say.

    Raises:
        InvalidError: They contradict each other.
    """
    if call.flag("follow") and call.text("until") is not None:
        raise InvalidError("--follow and --until contradict each other", do="give one of them")
    if call.flag("follow") and call.text("incarnation") is not None:
        raise InvalidError(
            "--follow and --incarnation contradict each other",
            do="leave out --incarnation: only the present one grows",
        )
    return Wish(
        offset=call.whole_or_none("offset") or 0,
        from_ms=call.time_ms("from"),
        until_ms=call.time_ms("until"),
        filter=_filter(call),
        form=_form(call),
        raw_body=call.flag("raw-body"),
    )


def _filter(call: Call) -> Filter | None:
    """``--tag`` or ``--sql``."""
    tags, expression = call.text("tag"), call.text("sql")
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


def _form(call: Call) -> str:
    """``--format``; ``-o`` counts on the command line only, since it is set for other commands elsewhere."""
    given = [call.find(name).source == "command line" for name in ("output", "json")]
    output = call.form if any(given) else "jsonl"
    if output == "jsonl":
        return call.words("format")
    if output == "json" and call.words("format") == "json":
        return _DOCUMENT
    raise InvalidError(
        f"cat does not print {call.words('format')} messages as {output}",
        do="leave out -o; --format says how messages are printed",
    )


def check_queues(tier: Tier, topic: str, number: int | None) -> None:
    """Refuse a topic or queue that the tier does not have.

    Raises:
        InvalidError: It has not.
    """
    known = [queue.queue_id for queue in tier.queues(topic)]
    if not known:
        what = f"the tier has no topic {topic}"
    elif number is not None and number not in known:
        what = f"topic {topic} has no queue {number}, only {_ranges(known)}"
    else:
        return
    raise InvalidError(what, where=tier.store.url, do="`tiered ls URL` lists the topics and queues")


def _print_all(tier: Tier, printer: Printer, topic: str, number: int | None) -> None:
    from tiered.cli.queues_ahead import queues_ahead

    queues = [queue for queue in tier.queues(topic) if number in {None, queue.queue_id}]
    readers: Iterable[QueueReader] = [tier.reader.queue(queue) for queue in queues]
    if printer.left is None and printer.wish.from_ms is None:
        readers = queues_ahead(tier.engine, GROUP, list(readers), printer.start)
    for reader in readers:
        if printer.is_full:
            break
        printer.print_queue(reader)


def _print_lives(tier: Tier, printer: Printer, topic: str, number: int | None, which: str) -> None:
    """Each life that is meant, the oldest of a queue first; the last of an incarnation is what was not taken back of it.

    Raises:
        InvalidError: No queue has that incarnation.
        DataError: A block is damaged.
    """
    from tiered.log.takeback import is_tail

    found = False
    for queue in tier.queues(topic):
        readers = tier.reader.lives(queue) if number in {None, queue.queue_id} else []
        lives = [reader.life for reader in readers]
        for at, reader in enumerate(readers):
            if which in {"all", str(reader.life.incarnation)}:
                found = True
                printer.print_life(reader, is_taken_back=is_tail(lives, at))
    if not found:
        raise InvalidError(
            f"topic {topic} has no incarnation {which}",
            where=tier.store.url,
            do="`tiered ls URL TOPIC --lives` lists them",
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


def _line(message: dict[str, object], life: tuple[int, bool] | None) -> bytes:
    """A message for eyes: one line, nothing that a terminal would obey."""
    from base64 import b64decode

    from tiered.cli.output import printable
    from tiered.cli.times import format_time

    stored_ms = message["store_timestamp_ms"]
    assert isinstance(stored_ms, int)
    body = b64decode(str(message["body_base64"])).decode("utf-8", "backslashreplace")
    named = [f"{name}={message[name]}" for name in ("tags", "keys") if message[name]]
    place = f"{message['topic']}/{message['queue_id']}@{message['queue_offset']}"
    if life is not None:
        named.append(f"incarnation={life[0]}" + " (taken back)" * life[1])
    text = " ".join(map(printable, [format_time(stored_ms), place, *named, body]))
    return text.encode("utf-8", "backslashreplace") + b"\n"


COMMAND = make_command(
    "cat",
    run,
    summary=COMMANDS["cat"].summary,
    arguments=[click.Argument(["url"]), click.Argument(["topic"])],
    examples=[
        "tiered cat file:///tmp/tier orders --count 10",
        "tiered cat s3://bucket/prefix orders --from now-2h --tag 'paid||sent' --format text",
    ],
)
