"""Writes messages of queues in each of the forms of ``tiered cat``.

A block is checked and turned into output as a whole before any of it is written, so nothing of a damaged one gets out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from tiered.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from fetcher.filters import Filter
    from tiered.api.open_tier import OpenTier
    from tiered.log.cursor import QueueCursor
    from tiered.log.parts import Gap
    from tiered.log.reader import QueueReader, TierBatch, TierReader
    from tiered.model import MessageQueue, QueueOffset

GROUP = "cat"
"""Whose reading ahead it is."""
_BATCH_BYTES = 4 << 20
_COUNT_MAX = 1 << 20
DOCUMENT = "document"
"""The form that is one JSON document."""


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
        source: Reads ahead.
        say: Is told what is passed over, for people.
        places: Where to go on, by queue.
    """

    wish: Wish
    out: BinaryIO
    left: int | None
    source: OpenTier
    say: Callable[[str], None] = lambda _: None
    places: dict[MessageQueue, tuple[QueueCursor, QueueOffset]] = field(default_factory=dict)
    _written: int = 0
    _life: tuple[int, bool] | None = None

    @property
    def is_full(self) -> bool:
        """As many as were asked for have been written."""
        return self.left is not None and self.left <= 0

    def print_queue(self, reader: QueueReader) -> None:
        """Write what the history that a reader reads has from where we are.

        Raises:
            DataError: A block is damaged; nothing of it is written.
            ExpiredError: Messages have expired meanwhile.
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

    def print_life(self, reader: QueueReader, *, is_taken_back: bool) -> None:
        """Write what one life of a queue has, from its beginning; each message says which life it is of.

        Args:
            reader: Of the life.
            is_taken_back: It is an end that the broker took back, which has the number of the life it was cut from.

        Raises:
            DataError: See ``print_queue`` (likewise ``ExpiredError``).
        """
        self.places.pop(reader.queue, None)
        self._life = (reader.life.incarnation, is_taken_back)
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
        """A reader of what the journal says now: from where we are, or from where the broker took back what was written.

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
            self.say(f"tiered: {queue}: the broker took back what it had from offset {going_on} on")
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
        low = reader.life.min_offset
        for gap in reader.life.gaps if self.wish.from_ms is None else ():
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
        if self.wish.form != DOCUMENT:
            return [line + b"\n" for line in lines]
        lead = [b",\n"] * len(lines)
        if lines and not self._written:
            lead[0] = b"\n"
        return [a + line for a, line in zip(lead, lines, strict=True)]


def _line(message: dict[str, object], life: tuple[int, bool] | None) -> bytes:
    """A message for eyes: one line, nothing that a terminal would obey."""
    from base64 import b64decode

    from tiered.cli.output import printable
    from tiered.cli.values import format_time

    stored_ms = message["store_timestamp_ms"]
    assert isinstance(stored_ms, int)
    body = b64decode(str(message["body_base64"])).decode("utf-8", "backslashreplace")
    named = [f"{name}={message[name]}" for name in ("tags", "keys") if message[name]]
    place = f"{message['topic']}/{message['queue_id']}@{message['queue_offset']}"
    if life is not None:
        named.append(f"incarnation={life[0]}" + " (taken back)" * life[1])
    text = " ".join(map(printable, [format_time(stored_ms), place, *named, body]))
    return text.encode("utf-8", "backslashreplace") + b"\n"
