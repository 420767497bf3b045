"""The values of a tier's state: parts, segments, lives of queues; and their form as JSON, in entries and checkpoints.

All are immutable. What changes them is ``tiered.log.state``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiered.log.ranges import Ranges, ranges_of
from tiered.log.wellformed import KEY_CHARS_MAX, check_ints, check_part_row, check_texts
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tiered.journal.entry import Action


_LIFE_VALUES_MAX = 10
_MERGED = 1
"""Of a segment in a checkpoint, in the place of ``sealed``: sealed and merged. To older programs it equals ``true``."""


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """Where bytes of a segment lie: a range of an object's payload.

    Attributes:
        key: Relative to the broker's prefix.
        start: First byte of the payload.
        end: One past the last.
        payload_bytes: Size of the object's whole payload.
        trailer_bytes: Size of the trailer behind it.
        crc: CRC-32 of the whole payload.
        packed_bytes: What is stored of the payload: less than ``payload_bytes`` if it is compressed
            (``tiered.format.packed``), as much if sealing has found that this is not worth it; 0: nobody has tried.
    """

    key: str
    start: int
    end: int
    payload_bytes: int
    trailer_bytes: int
    crc: int
    packed_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Size of the range."""
        return self.end - self.start

    @property
    def object_bytes(self) -> int:
        """Size of the whole object."""
        return self.stored_bytes + self.trailer_bytes

    @property
    def stored_bytes(self) -> int:
        """Size of what is stored of the payload; the trailer begins there."""
        return self.packed_bytes or self.payload_bytes

    @property
    def is_packed(self) -> bool:
        """Whether positions in the payload are not positions in the object."""
        return 0 < self.packed_bytes < self.payload_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """What one commit made durable: a piece of the commit log and its items of the consume queue.

    Attributes:
        log: The records.
        index: The items, 20 bytes each.
        log_offset: Of the first record.
        queue_offset: Of the first item.
        count: Items, holes included.
        holes: Items without a message.
        store_min_ms: Smallest store time; -1 when all items are holes.
        store_max_ms: Greatest store time; -1 likewise.
        last: Mark of the last item's record (``tiered.log.marks``); 0: not known, or a hole.
    """

    log: ObjectRange
    index: ObjectRange
    log_offset: LogOffset
    queue_offset: QueueOffset
    count: int
    holes: int
    store_min_ms: int
    store_max_ms: int
    last: int = 0

    @property
    def log_end(self) -> LogOffset:
        """One past the last byte."""
        return LogOffset(self.log_offset + self.log.size_bytes)

    @property
    def queue_end(self) -> QueueOffset:
        """One past the last item."""
        return QueueOffset(self.queue_offset + self.count)


@dataclass(frozen=True, slots=True)
class Segment:
    """A row of parts with one base; only the last of a queue is not sealed.

    Attributes:
        base_offset: Log offset of its first byte.
        base_queue_offset: Queue offset of its first item.
        created_ms: When its first part was committed, by the writer's clock.
        sealed: Immutable from now on.
        parts: In order, without a hole in log offsets.
        merged: Sealing has rewritten parts of it: it joins no neighbour any more (``tiered.log.seal``). Not compared:
            it changes nothing of what the segment is.
    """

    base_offset: LogOffset
    base_queue_offset: QueueOffset
    created_ms: int
    sealed: bool = False
    parts: tuple[Part, ...] = ()
    merged: bool = field(default=False, compare=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of its commit log."""
        return sum(part.log.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Gap:
    """Queue offsets ``[start, end)`` that never came into the tier, and why."""

    start: QueueOffset
    end: QueueOffset
    reason: str


@dataclass(frozen=True, slots=True)
class QueueLife:
    """One incarnation of a queue, from its offset 0.

    Attributes:
        incarnation: Number of this life, from 0.
        min_offset: First queue offset that can be read.
        commit_offset: One past the last.
        log_end: Log offset at which the next part begins.
        segments: In order.
        gaps: Recorded gaps, in order.
        quarantined: Records put into quarantine.
        ended: Why this life is over; empty while it lasts.
        indexed: Queue offsets whose keys are in index objects (``tiered.log.indexed``).
        cut_at: Of what the broker took back: where it was cut off, whatever of it has expired since; else -1.
    """

    incarnation: int
    min_offset: QueueOffset
    commit_offset: QueueOffset
    log_end: LogOffset = LogOffset(0)  # noqa: RUF009 (a NewType: the number itself)
    segments: tuple[Segment, ...] = ()
    gaps: tuple[Gap, ...] = ()
    quarantined: int = 0
    ended: str = ""
    indexed: Ranges = ()
    cut_at: int = -1

    def parts(self) -> list[Part]:
        """All parts, in order."""
        return [part for segment in self.segments for part in segment.parts]


@dataclass(frozen=True, slots=True)
class Cover:
    """Queue offsets ``[start, end)`` of one life of a queue."""

    queue: MessageQueue
    incarnation: int
    start: int
    end: int

    def row(self) -> list[Any]:
        """As JSON."""
        return [self.queue.topic, self.queue.queue_id, self.incarnation, self.start, self.end]

    @classmethod
    def of(cls, row: list[Any]) -> Cover:
        """Undo ``row``.

        Raises:
            ValueError: It is none (likewise ``TypeError``).
        """
        topic, queue_id, incarnation, start, end = row
        check_texts((topic,), "a topic")
        check_ints((queue_id, incarnation, start, end), "what is covered")
        return cls(MessageQueue(topic, queue_id), incarnation, start, end)


@dataclass(frozen=True, slots=True)
class IndexObject:
    """One index object, as the journal names it.

    Attributes:
        place: Its whole payload.
        count: Items.
        filter_at: Where in the payload the filter begins.
        store_min_ms: Smallest store time among its items; -1 without items.
        store_max_ms: Greatest store time; -1 likewise.
        covers: What it covers; the items' queue numbers count these.
    """

    place: ObjectRange
    count: int
    filter_at: int
    store_min_ms: int
    store_max_ms: int
    covers: tuple[Cover, ...]

    def row(self) -> list[Any]:
        """As JSON: the range (6), count, filter, times (2), covers."""
        p = self.place
        return [
            *(p.key, p.start, p.end, p.payload_bytes, p.trailer_bytes, p.crc),
            *(self.count, self.filter_at, self.store_min_ms, self.store_max_ms),
            [cover.row() for cover in self.covers],
        ]

    @classmethod
    def of(cls, row: list[Any]) -> IndexObject:
        """Undo ``row``.

        Raises:
            ValueError: It is none (likewise ``TypeError`` and ``IndexError``).
        """
        if type(row[0]) is not str or len(row[0]) > KEY_CHARS_MAX:
            raise ValueError(f"an object's key is {row[0]!r:.80}")
        check_ints(row[1:10], "an index object")
        place = ObjectRange(*row[:6])
        if (place.start, place.end) != (0, place.payload_bytes):
            raise ValueError("an index object is named in part")
        count, filter_at, low, high, covers = row[6:]
        return cls(place, count, filter_at, low, high, tuple(Cover.of(cover) for cover in covers))


@dataclass(frozen=True, slots=True)
class TierState:
    """Everything that a broker's journal says.

    Attributes:
        generation: The reign.
        history: Which history this is: the id of the writer whose reign was the first, and when it began. Positions that are
            kept elsewhere mean nothing in another, such as that of a tier that was wiped and begun anew.
        writer: Id of the reigning writer.
        holder: Who it was, for people.
        store: Identity of the local store that the tier belongs to (``cluster broker store_id kind``); empty before
            the first reign.
        queues: Lives of each queue, oldest first; never empty.
        refused_parts: Parts, gaps and incarnations that replay refused.
        updated_ms: Time of the last entry.
        indexes: The key index's objects, in the order in which they were named.
    """

    generation: int = 0
    history: str = ""
    writer: str = ""
    holder: Mapping[str, Any] = field(default_factory=dict)
    store: Mapping[str, Any] = field(default_factory=dict)
    queues: Mapping[MessageQueue, tuple[QueueLife, ...]] = field(default_factory=dict)
    refused_parts: int = 0
    updated_ms: int = 0
    indexes: tuple[IndexObject, ...] = ()

    def life(self, queue: MessageQueue) -> QueueLife | None:
        """The present life of a queue."""
        lives = self.queues.get(queue)
        return lives[-1] if lives else None


def queue_action(do: str, queue: MessageQueue, incarnation: int, **fields: Any) -> Action:  # noqa: ANN401 (JSON values)
    """An action of one queue."""
    return {
        "do": do,
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "incarnation": incarnation,
        **fields,
    }


def part_json(part: Part) -> list[Any]:
    """A part as a JSON row: log range (6), index range (6), log offset, queue offset, count, holes, times (2), mark, packed.

    A mark of 0 is left out, so a row has 18 values or 19; who knows only 18 does not look at the mark. Where compression was
    tried there are 20: who knows only 19 could not read that part, and never gets here (``packs``).
    """
    packed = part.log.packed_bytes
    return [
        *_range_json(part.log),
        *_range_json(part.index),
        part.log_offset,
        part.queue_offset,
        part.count,
        part.holes,
        part.store_min_ms,
        part.store_max_ms,
        *([part.last] if part.last or packed else []),
        *([packed] if packed else []),
    ]


def packs(parts: Iterable[Part]) -> bool:
    """Whether to name these parts takes what programs before compression do not know: the action ``pack``, and format 3."""
    return any(part.log.packed_bytes for part in parts)


def part_of(row: list[Any]) -> Part:
    """Undo ``part_json``.

    Raises:
        ValueError: It is no such row (likewise ``IndexError`` and ``TypeError``).
    """
    check_part_row(row)
    return Part(ObjectRange(*row[0:6], *row[19:20]), ObjectRange(*row[6:12]), *row[12:19])


def _range_json(place: ObjectRange) -> list[Any]:
    return [place.key, place.start, place.end, place.payload_bytes, place.trailer_bytes, place.crc]


def life_json(life: QueueLife) -> list[Any]:
    """A life as a JSON row: its fields in order; segments, parts and gaps as rows in turn.

    A row has 8 values; 9 if something is indexed, 10 if the broker took it back.
    """
    indexed = [list(pair) for pair in life.indexed]
    is_tail = life.cut_at >= 0
    return [
        life.incarnation,
        life.min_offset,
        life.commit_offset,
        life.log_end,
        [
            [
                s.base_offset,
                s.base_queue_offset,
                s.created_ms,
                _MERGED if s.merged else s.sealed,
                [part_json(p) for p in s.parts],
            ]
            for s in life.segments
        ],
        [[gap.start, gap.end, gap.reason] for gap in life.gaps],
        life.quarantined,
        life.ended,
        *([indexed] if indexed or is_tail else []),
        *([life.cut_at] if is_tail else []),
    ]


def life_of(row: list[Any]) -> QueueLife:
    """Undo ``life_json``.

    Raises:
        ValueError: It is no such row (likewise ``IndexError`` and ``TypeError``).
    """
    number, low, commit, log_end, segments, gaps, quarantined, ended, *more = row
    if len(row) > _LIFE_VALUES_MAX:
        raise ValueError(f"a life has {len(row)} values")
    check_ints((number, low, commit, log_end, quarantined, *more[1:]), "a life")
    check_texts((ended, *(gap[2] for gap in gaps)), "a reason")
    check_ints((value for gap in gaps for value in gap[:2]), "a gap")
    check_ints((value for segment in segments for value in segment[:3]), "a segment")
    return QueueLife(
        number,
        low,
        commit,
        log_end,
        tuple(
            Segment(
                base,
                queue,
                created,
                bool(sealed),
                tuple(part_of(p) for p in parts),
                merged=type(sealed) is int and sealed == _MERGED,
            )
            for base, queue, created, sealed, parts in segments
        ),
        tuple(Gap(*gap) for gap in gaps),
        quarantined,
        ended,
        ranges_of(more[0]) if more else (),
        *more[1:],
    )
