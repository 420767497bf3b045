"""What a journal entry says of bundles: which of their sections are parts now, in columns.

A bundle stands in an entry as ``[key, size_bytes, level, table]``: the table is that of the bundle itself
(``tiered.format.bundle.pack_table``), in base64, so an entry is made of what the upload has made already. Where only some
of a bundle's sections are named, it is a table of those. About 50 bytes a part.

All functions are pure.
"""

from __future__ import annotations

import base64
import binascii
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ObjectNotFoundError, ShortReadError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, OtherVersionError, TieredStoreError
from tiered.format.bundle import (
    FOOTER_BYTES,
    SECTION_ROW,
    SectionTable,
    find_table,
    pack_table,
    read_table,
    tail_bytes,
    unpack_table,
)
from tiered.journal.entry import INT_MAX, as_row
from tiered.keys import parse_data_key
from tiered.log.merge import LAST_LEVEL
from tiered.log.parts import PART, Bundle, Parts, check_rows
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    import numpy.typing as npt

    from backends.base import ObjectInfo, ObjectStore
    from tiered.format.bundle import SectionPlace
    from tiered.keys import DataKey
    from tiered.model import LogOffset, QueueOffset

PLAIN: Final = (
    ("start", "start"),
    ("records_bytes", "records_bytes"),
    ("stored_bytes", "stored_bytes"),
    ("items", "count"),
    ("size_bytes", "size_bytes"),
    ("crc", "crc"),
    ("log_offset", "log_offset"),
    ("queue_offset", "queue_offset"),
    ("log_bytes", "records_bytes"),
    ("count", "count"),
    ("holes", "holes"),
    ("store_min_ms", "store_min_ms"),
    ("store_max_ms", "store_max_ms"),
    ("last", "last"),
    ("gone", "gone"),
    ("log_gone", "log_gone"),
)
"""Columns of ``PART`` and of ``SECTION_ROW`` that they are."""


class SectionRow(NamedTuple):
    """What a section's row says besides its place."""

    queue: MessageQueue
    incarnation: int  # which incarnation
    segment: int  # base log offset of its segment
    log_offset: int  # of its first record
    queue_offset: int  # of its first item
    holes: int  # items without a message
    store_min_ms: int  # smallest store time; -1 when there is none
    store_max_ms: int  # greatest store time; -1 likewise
    last: int = 0  # mark of its last record, or 0
    truncated: bool = False  # it was merged from what the broker had truncated
    log_gone: int = 0  # bytes of records that compaction took away


class SectionSpan(NamedTuple):
    """Where a section's records and items stand in their queue."""

    segment: LogOffset  # base log offset of the segment
    log_offset: LogOffset  # of the first record
    log_end: LogOffset  # one past the last byte
    queue_offset: QueueOffset  # of the first item
    queue_end: QueueOffset  # one past the last

    def goes_on(self, queue_offset: QueueOffset, log_offset: LogOffset) -> bool:
        """Whether it begins exactly there."""
        return self.queue_offset == queue_offset and self.log_offset == log_offset


@dataclass(frozen=True, slots=True)
class NamedSections:
    """Sections of one bundle, as parts."""

    bundle: Bundle
    queues: Sequence[MessageQueue]  # whose each is
    incarnations: Sequence[int]  # int of each
    segments: Sequence[int]  # base log offset of the segment of each
    truncated: Sequence[bool]  # which were merged of what the broker had truncated
    parts: Parts  # they

    def places(self) -> list[SectionSpan]:
        """Where each stands in its queue."""
        rows = self.parts.rows
        starts, offsets = rows["log_offset"], rows["queue_offset"]
        log_ends = starts + rows["log_bytes"] + rows["log_gone"]
        columns = (starts, log_ends, offsets, offsets + rows["count"])
        return list(map(SectionSpan, self.segments, *(column.tolist() for column in columns)))


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle that is durable."""

    table: SectionTable
    packed: bytes  # the same, as it stands in the bundle
    named: NamedSections  # its sections as parts

    @property
    def bundle(self) -> Bundle:
        """Which."""
        return self.named.bundle


def table_of(sections: Iterable[tuple[SectionRow, SectionPlace]], level: int = 0) -> SectionTable:
    """The table of sections that lie one after another in this order; their ``start`` is counted here."""
    number: dict[str, int] = {}
    rows = []
    start = 0
    for (
        queue,
        incarnation,
        segment,
        log,
        offset,
        holes,
        low,
        high,
        last,
        back,
        gone,
    ), place in sections:
        topic = number.setdefault(queue.topic, len(number))
        rows.append(
            (
                *(topic, queue.queue_id, incarnation, segment, log, offset, place.count, holes),
                *(low, high, last, start, place.records_bytes, place.stored_bytes),
                *(place.size_bytes, place.crc, int(back), place.gone, gone),
            )
        )
        start += place.size_bytes
    return SectionTable(list(number), np.array(rows, SECTION_ROW), level)


def bundle_row(bundle: Bundle, packed: bytes) -> list[Any]:
    """A bundle as it stands in an entry, with its table or that of those of its sections that are named."""
    table = base64.b64encode(packed).decode("ascii")
    return [bundle.key, bundle.size_bytes, bundle.level, table]


def some_of(table: SectionTable, numbers: Sequence[int]) -> bytes:
    """The table of some of a bundle's sections, packed."""
    return pack_table(SectionTable(table.topics, table.rows[list(numbers)], table.level))


def named_sections(row: Sequence[Any]) -> NamedSections:
    """Undo ``bundle_row``."""
    *known, text = row
    bundle = as_row(Bundle).decode(known)
    try:
        table = unpack_table(base64.b64decode(text, validate=True), where=bundle.key)
    except (TieredStoreError, binascii.Error) as error:
        raise ValueError(str(error)) from error
    return sections_of(bundle, table)


def sections_of(bundle: Bundle, table: SectionTable) -> NamedSections:
    """A bundle's sections as parts; a ``ValueError`` when they contradict themselves."""
    found = np.zeros(len(table), PART)
    for mine, theirs in PLAIN:
        values = table.rows[theirs]
        if values.dtype.itemsize > 4 and len(values) and int(values.max()) >= INT_MAX:  # noqa: PLR2004
            raise ValueError(f"{theirs} of a section is out of range")
        found[mine] = values
    check_rows(found)
    names = [table.topics[number] for number in table.rows["topic"].tolist()]
    queues = list(map(MessageQueue, names, table.rows["queue_id"].tolist()))
    segments: list[int] = table.rows["segment"].tolist()
    if max(segments, default=0) >= INT_MAX:
        raise ValueError("segment of a section is out of range")
    return NamedSections(
        bundle,
        queues,
        table.rows["incarnation"].tolist(),
        segments,
        (table.rows["truncated"] != 0).tolist(),
        Parts(found, (bundle,) * len(found)),
    )


def encode_numbers(numbers: Sequence[int]) -> str:
    """Numbers of 32 bits as text."""
    return base64.b64encode(np.array(numbers, "<u4").tobytes()).decode("ascii")


def decode_numbers(text: str, count: int) -> npt.NDArray[np.uint32]:
    """Undo ``encode_numbers``; a ``ValueError`` when they are not so many."""
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), "<u4")
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    if len(found) != count:
        raise ValueError(f"{len(found)} numbers where there should be {count}")
    return found


# -- tables of bundles ---------------------------------------------------------------------------
#
# Reads what bundles say of themselves: the tables of all bundles of a broker, some at a time.
#
# Ordering: results come in the order of the listing, whatever finishes first.
#
# Retries and errors: nothing is retried here (the store does). Where only the footer of a bundle is damaged, or gone, its
# table is found in front of it, and proves itself (``Tabled.salvaged`` says so). A bundle whose table is damaged, that is
# not what its key says, or that is gone, becomes a ``Refused``; other errors of the store end the reading.
#
# Memory: one tail a request in flight (``TAIL_BYTES_MAX`` at most), and about 150 bytes a section.

IN_FLIGHT_MAX: Final = 64
FIRST_BYTES: Final = 32 * 1024
"""Of a first request: the tables of nearly all bundles are smaller."""
TAIL_BYTES_MAX: Final = 64 * 1024 * 1024
"""A table that claims more is refused: it would be of millions of sections."""
SEARCHED_BYTES: Final = 16 * 1024 * 1024
"""Of a bundle's end, where its footer is damaged."""


@dataclass(frozen=True, slots=True)
class Tabled:
    """A bundle and its sections, as far as its table and its key agree."""

    said: DataKey  # its key, parsed
    named: NamedSections  # its sections as parts
    modified_ms: int  # when the store got it; -1 when it does not say
    salvaged: str = ""  # what is damaged, though the table is not; empty if nothing is

    @property
    def bundle(self) -> Bundle:
        """Which."""
        return self.named.bundle


@dataclass(frozen=True, slots=True)
class Refused:
    """A bundle whose table is of no use, and why; it may be of another version."""

    key: str
    reason: str
    is_other_version: bool = False


def read_tables(
    store: ObjectStore, prefix: str, infos: Iterable[ObjectInfo], executor: Executor
) -> Iterator[Tabled | Refused]:
    """What each of the bundles says of itself; at most ``IN_FLIGHT_MAX`` requests are under way."""
    flying: deque[Future[Tabled | Refused]] = deque()
    for info in infos:
        if len(flying) >= IN_FLIGHT_MAX:
            yield flying.popleft().result()
        flying.append(executor.submit(read_bundle_table, store, prefix, info))
    for future in flying:
        yield future.result()


def read_bundle_table(store: ObjectStore, prefix: str, info: ObjectInfo) -> Tabled | Refused:
    """What one bundle says of itself."""
    key = info.key[len(prefix) :]
    said = parse_data_key("", key)
    assert said is not None
    try:
        try:
            table = _read(store, info)
        except DataError as error:
            return _salvaged(store, info, said, key, error.what)
        return _checked(said, key, table, info)
    except DataError as error:
        return Refused(key, error.what)
    except OtherVersionError as error:
        return Refused(key, error.what, is_other_version=True)
    except (ObjectNotFoundError, InvalidRangeError, ShortReadError) as error:
        return Refused(key, f"it changed or went while it was read: {type(error).__name__}")
    except ValueError as error:
        return Refused(key, f"its table is no use: {error}")


def _read(store: ObjectStore, info: ObjectInfo) -> SectionTable:
    """One request nearly always; a second one when the table is longer than expected."""
    size, where = info.size_bytes, info.key
    if size < FOOTER_BYTES:
        raise DataError("it is too short to be a bundle")
    tail = store.get(info.key, ByteRange(max(0, size - FIRST_BYTES), size))
    more = tail_bytes(tail, where=where)
    if more > min(size, TAIL_BYTES_MAX):
        raise DataError("its table claims to be larger than can be")
    if more > len(tail):
        tail = store.get(info.key, ByteRange(size - more, size))
    return read_table(tail, size, where=where)


def _checked(said: DataKey, key: str, table: SectionTable, info: ObjectInfo) -> Tabled:
    named = sections_of(Bundle(key, info.size_bytes, table.level), table)
    if not len(table):
        raise ValueError("it has no section")
    queues = {
        (queue, incarnation)
        for queue, incarnation in zip(named.queues, named.incarnations, strict=True)
    }
    first = int(named.parts.rows["queue_offset"][0])
    is_mine = {
        "bundle": said.level == table.level,
        "topic": said.level == table.level and {q.topic for q, _ in queues} == {said.topic},
        "queue": queues == {(said.queue, said.incarnation)} and said.begins == first,
    }
    if not is_mine[said.kind]:
        raise ValueError("it lies under a key that is not its own")
    return Tabled(said, named, info.modified_ms)


def _salvaged(store: ObjectStore, info: ObjectInfo, said: DataKey, key: str, why: str) -> Tabled:
    """From a table whose footer is no help."""
    size = info.size_bytes
    level = said.level if said.level >= 0 else LAST_LEVEL  # nobody goes on by what was merged
    tail = store.get(info.key, ByteRange(max(0, size - SEARCHED_BYTES), size)) if size else b""
    found = _checked(said, key, find_table(tail, size, level, where=info.key), info)
    return replace(found, salvaged=f"{why}; its table proves itself")
