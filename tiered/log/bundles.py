"""What a journal entry says of bundles: which of their sections are parts now, in columns.

A bundle stands in an entry as ``[key, size_bytes, level, table]``: the table is that of the bundle itself
(``tiered.format.bundle.pack_table``), in base64, so an entry is made of what the upload has made already. Where only some
of a bundle's sections are named, it is a table of those. About 50 bytes a part.

All functions are pure.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import TieredStoreError
from tiered.format.bundle import SECTION_ROW, SectionTable, pack_table, unpack_table
from tiered.journal.typed import INT_MAX, as_row
from tiered.log.parts import PART, Bundle, Parts, check_rows
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from tiered.format.bundle import SectionPlace
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
