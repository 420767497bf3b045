"""A page of messages: read from a queue forwards or backwards, filtered, with bounds on what is read and for how long.

What is damaged is named where it lies, and reading goes on behind it where that can be found. Nothing is kept.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, ExpiredError
from tiered.index.lookup import IndexReader, Wish, hit_line
from tiered.local.interface import HoleReason
from tiered.log.messages import messages_json
from tiered.log.parts import Gap
from tiered.log.reader import end_of
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fetcher.filters import Filter
    from tiered.clock import Clock
    from tiered.log.decode import TierBatch
    from tiered.log.reader import QueueReader, TierReader

PAGE: Final = 50
"""Messages of a page."""
SCANNED_MAX: Final = 20_000
"""Queue offsets that a page with a filter looks at."""
SCAN_S: Final = 4.0
"""How long it looks; one request more may follow."""
_WINDOW: Final = 2_000
_BYTES_MAX: Final = 4 << 20
FILTER_BYTES: Final = 16 << 20
"""Of filters and unindexed messages, while a key is looked up."""
SCAN_BYTES: Final = 32 << 20
"""That a lookup by key reads of what no index covers yet."""
BODY_SHOWN: Final = 64 << 10
"""Bytes of a body that a page shows."""
_BODIES: Final = ("body_base64", "value_base64")
_OFFSETS: Final = ("queue_offset", "offset", "index")
"""RocketMQ's word, Kafka's, JoyQueue's."""
_TOLD_APART: Final = {*_BODIES, "key_base64", "headers", "properties", "attributes"}
_HOLES: Final = {
    HoleReason.COMPACTED: "compacted: a newer message has its key",
    HoleReason.HIDDEN: "an aborted message, or a marker of Kafka's own: nothing for readers of"
    " committed messages",
}


@dataclass(frozen=True, slots=True)
class BrowsedRow:
    """A message; or what stands in the place of some that there are not."""

    start: int  # its queue offset
    end: int  # one past it
    message: dict[str, Any] | None = None  # as ``tiered cat`` prints it
    remark: str = ""  # a gap's reason, or what is damaged
    is_damage: bool = False


@dataclass(frozen=True, slots=True)
class BrowsedPage:
    """What was found."""

    rows: tuple[BrowsedRow, ...]
    low: int  # first queue offset that was looked at
    high: int  # one past the last
    is_cut: bool = False
    """It ended for its bounds, with fewer messages than fit: there may be more beyond."""


def read_forward(
    reader: QueueReader, start: int, wanted: Filter | None, clock: Clock
) -> BrowsedPage:
    """The first messages from a queue offset on."""
    low = max(start, int(reader.incarnation.min_offset))
    deadline_s = clock.monotonic_s() + SCAN_S
    rows: list[BrowsedRow] = []
    at, messages, is_cut = low, 0, False
    while at < reader.cursor.end and messages < PAGE:
        if at - low >= SCANNED_MAX or clock.monotonic_s() > deadline_s:
            is_cut = True
            break
        many = PAGE - messages if wanted is None else _WINDOW
        found, at = _step(reader, at, min(many, int(reader.cursor.end) - at), wanted)
        for row in found:
            messages += row.message is not None
            rows.append(row)
            if messages == PAGE:
                at = row.end
                break
    return BrowsedPage(tuple(rows), low, at, is_cut)


def read_backward(
    reader: QueueReader, end: int, wanted: Filter | None, clock: Clock
) -> BrowsedPage:
    """The last messages before a queue offset, in order."""
    low, high = int(reader.incarnation.min_offset), min(end, int(reader.cursor.end))
    deadline_s = clock.monotonic_s() + SCAN_S
    step = PAGE if wanted is None else _WINDOW
    rows: list[BrowsedRow] = []
    at = high
    while at > low and sum(row.message is not None for row in rows) < PAGE:
        if high - at >= SCANNED_MAX or clock.monotonic_s() > deadline_s:
            return BrowsedPage(tuple(rows), at, high, is_cut=True)
        begin = max(low, at - step)
        rows = _joined([*_between(reader, begin, at, wanted)], rows)
        at = begin
    extra = sum(row.message is not None for row in rows) - PAGE
    while extra > 0:
        first = rows.pop(0)
        extra, at = extra - (first.message is not None), first.end
    return BrowsedPage(tuple(rows), at, high)


def _between(
    reader: QueueReader, start: int, end: int, wanted: Filter | None
) -> Iterator[BrowsedRow]:
    at = start
    while at < end:
        rows, at = _step(reader, at, end - at, wanted)
        yield from (row for row in rows if row.start < end)


def _joined(before: list[BrowsedRow], rows: list[BrowsedRow]) -> list[BrowsedRow]:
    """One behind the other; a gap or damage that reaches from one into the other is one."""
    if before and rows and before[-1].message is None and before[-1].end > rows[0].start:
        rows = rows[1:]
    return [*before, *rows]


def _step(
    reader: QueueReader, at: int, count: int, wanted: Filter | None
) -> tuple[list[BrowsedRow], int]:
    """What one read gives, and where the next begins."""
    start = QueueOffset(at)
    try:
        found = reader.read_warily(start, bytes_max=_BYTES_MAX, count_max=count)
        if found is None:
            return [], int(reader.cursor.end)
        if isinstance(found, Gap):
            return [BrowsedRow(at, found.end, remark=f"gap: {found.reason}")], int(found.end)
        return list(_rows(found, wanted)), int(end_of(found))
    except ExpiredError as error:
        return [BrowsedRow(at, error.next_offset, remark=error.what)], error.next_offset
    except DataError as error:
        after = reader.after_damage(start)
        end = int(after if after is not None else reader.cursor.end)
        said = str(error) if after is not None else f"{error}; nothing behind it is read here"
        return [BrowsedRow(at, end, remark=said, is_damage=True)], end


def _rows(batch: TierBatch, wanted: Filter | None) -> Iterator[BrowsedRow]:
    records = batch.records
    numbers = np.flatnonzero(records.sizes > 0) if wanted is None else wanted.select(records)
    said = messages_json(records, batch.log_offset, raw_body=False, wanted=numbers)
    for message in said:
        offset = int(next(message[name] for name in _OFFSETS if name in message))
        yield BrowsedRow(offset, offset + 1, message)


def read_one(reader: QueueReader, offset: int) -> BrowsedRow | None:
    """The message at a queue offset, or what is there instead; None: it is behind the end, or below the first."""
    if not reader.incarnation.min_offset <= offset < reader.cursor.end:
        return None
    rows, _ = _step(reader, offset, 1, None)
    return rows[0] if rows else BrowsedRow(offset, offset + 1, remark=_hole_text(reader, offset))


def _hole_text(reader: QueueReader, offset: int) -> str:
    """Why there is no message."""
    found = reader.read(QueueOffset(offset), bytes_max=1, count_max=1)
    code = None if found is None or isinstance(found, Gap) else int(found.records.tag_codes[0])
    said = (text for reason, text in _HOLES.items() if reason == code)
    return f"a hole: {next(said, 'no message has this queue offset')}"


def find_by_key(reader: TierReader, topic: str, key: str) -> tuple[list[BrowsedRow], list[str]]:
    """Messages with a key or unique id, newest first, as ``tiered query`` finds them; and what may be missing, and why."""
    index = IndexReader(reader.store, reader.prefix, journal=reader, filter_bytes_max=FILTER_BYTES)
    wish = Wish(topic=topic, key=key, count=PAGE, scan_bytes_max=SCAN_BYTES)
    found = index.lookup(reader.state, wish)
    rows = []
    for hit in found.hits:
        message = json.loads(hit_line(hit, raw_body=False))
        rows.append(BrowsedRow(hit.queue_offset, hit.queue_offset + 1, message))
    missing = [str(error) for error in found.damaged]
    if found.unscanned:
        missing.append(
            f"{found.unscanned:,} messages that no index covers yet were not looked at;"
            " `tiered query --scan` looks at more"
        )
    return rows, missing


# -- what a page shows of a message -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShownBody:
    """A body, readable."""

    form: str  # ``JSON``, ``text`` or ``bytes``
    lines: tuple[str, ...]
    size_bytes: int
    is_cut: bool = False


def body_of(message: dict[str, Any]) -> bytes | None:
    """The body of a message, as a client gets it; None: there is none, as of a deleted key of Kafka's."""
    found = next((message[name] for name in _BODIES if name in message), None)
    return None if found is None else base64.b64decode(found)


def without_body(message: dict[str, Any]) -> dict[str, Any]:
    """Everything else that is one value."""
    return {name: value for name, value in message.items() if name not in _TOLD_APART}


def pairs_of(message: dict[str, Any]) -> tuple[str, list[tuple[str, str | None]]]:
    """What a producer has put beside the body, and the word for it: properties, Kafka's headers, JoyQueue's attributes."""
    if "headers" in message:
        return "Headers", [(name, text_of(value)) for name, value in message["headers"]]
    name = "attributes" if "attributes" in message else "properties"
    return name.capitalize(), list((message.get(name) or {}).items())


def key_of(message: dict[str, Any]) -> bytes | None:
    """Kafka's record key; None: it has none."""
    said = message.get("key_base64")
    return None if said is None else base64.b64decode(said)


def text_of(said: str | None, size_max: int = 4096) -> str | None:
    """Bytes of Kafka's to look at; what is no text as escapes."""
    if said is None:
        return None
    data = base64.b64decode(said)
    text = data[:size_max].decode("utf-8", "backslashreplace")
    return text if len(data) <= size_max else f"{text}… ({len(data):,} bytes)"


def shown_body(body: bytes) -> ShownBody:
    """JSON indented, text as it is, other bytes as hexadecimal numbers."""
    size, shown = len(body), body[:BODY_SHOWN]
    if size <= BODY_SHOWN:
        try:
            document = json.loads(shown)
        except (ValueError, RecursionError):
            pass
        else:
            text = json.dumps(document, ensure_ascii=False, indent=2)
            return ShownBody("JSON", tuple(text.splitlines()), size)
    try:
        text = shown.decode("utf-8")
    except UnicodeDecodeError as error:
        if size > BODY_SHOWN and error.start >= len(shown) - 3:  # a character that was cut
            text = shown[: error.start].decode("utf-8")
        else:
            rows = range(0, min(len(shown), 4096), 16)
            lines = tuple(f"{at:06x}  {shown[at : at + 16].hex(' ')}" for at in rows)
            return ShownBody("bytes", lines, size, is_cut=size > 4096)  # noqa: PLR2004 (as above)
    return ShownBody("text", tuple(text.splitlines()), size, is_cut=size > len(shown))
