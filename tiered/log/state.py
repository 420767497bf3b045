"""The state of one broker's tier, as a pure function of its journal.

All values are immutable. ``TierMachine.apply`` is the one place that knows what the actions mean; reader, writer,
recovery, verify, gc and archive use it.

Replay is strict: a part or gap that does not begin exactly at its queue's commit offset and log end, or whose entry is not
of the generation that reigns, is not history; it is counted in ``refused_parts`` and changes nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tiered.errors import InvalidError
from tiered.format.consume_queue import ITEM_BYTES
from tiered.journal.entry import REIGN, Action, Entry
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    """

    key: str
    start: int
    end: int
    payload_bytes: int
    trailer_bytes: int
    crc: int

    @property
    def size_bytes(self) -> int:
        """Size of the range."""
        return self.end - self.start

    @property
    def object_bytes(self) -> int:
        """Size of the whole object."""
        return self.payload_bytes + self.trailer_bytes


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
    """

    log: ObjectRange
    index: ObjectRange
    log_offset: LogOffset
    queue_offset: QueueOffset
    count: int
    holes: int
    store_min_ms: int
    store_max_ms: int

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
    """

    base_offset: LogOffset
    base_queue_offset: QueueOffset
    created_ms: int
    sealed: bool = False
    parts: tuple[Part, ...] = ()

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
    """

    incarnation: int
    min_offset: QueueOffset
    commit_offset: QueueOffset
    log_end: LogOffset = LogOffset(0)  # noqa: RUF009 (a NewType: the number itself)
    segments: tuple[Segment, ...] = ()
    gaps: tuple[Gap, ...] = ()
    quarantined: int = 0
    ended: str = ""

    def parts(self) -> list[Part]:
        """All parts, in order."""
        return [part for segment in self.segments for part in segment.parts]


@dataclass(frozen=True, slots=True)
class TierState:
    """Everything that a broker's journal says.

    Attributes:
        generation: The reign.
        writer: Id of the reigning writer.
        holder: Who it was, for people.
        store: Identity of the local store that the tier belongs to (``cluster broker store_id kind``); empty before
            the first reign.
        queues: Lives of each queue, oldest first; never empty.
        refused_parts: Parts, gaps and incarnations that replay refused.
        updated_ms: Time of the last entry.
    """

    generation: int = 0
    writer: str = ""
    holder: Mapping[str, Any] = field(default_factory=dict)
    store: Mapping[str, Any] = field(default_factory=dict)
    queues: Mapping[MessageQueue, tuple[QueueLife, ...]] = field(default_factory=dict)
    refused_parts: int = 0
    updated_ms: int = 0

    def life(self, queue: MessageQueue) -> QueueLife | None:
        """The present life of a queue."""
        lives = self.queues.get(queue)
        return lives[-1] if lives else None


class TierMachine:
    """What the tier's actions mean. Stateless; see ``tiered.journal.reader.Machine``.

    ============= ============================================================================================
    action        fields besides ``do``, and ``topic queue_id incarnation`` for those of a queue
    ============= ============================================================================================
    reign         ``generation``, ``holder`` (with ``store``)
    part          ``segment`` (base log offset), ``part`` (see ``part_json``); a new segment rolls the one before
    seal          ``segment``, ``parts``: the segment's parts from now on (fewer, larger ones), sealed; when it is
                  the last, only the reigning writer may, since it would go on in it
    gap           ``start``, ``end``, ``reason``: nothing of these offsets will come
    quarantine    ``count``: so many records went into quarantine
    incarnation   ``start``, ``reason``: the queue begins anew
    meta          ``store``: identity of the local store
    ============= ============================================================================================
    """

    def initial(self) -> TierState:
        """An empty tier."""
        return TierState()

    def generation(self, state: TierState) -> int:
        """The reign."""
        return state.generation

    def apply(self, state: TierState, entry: Entry) -> TierState:
        """One step of history.

        Raises:
            InvalidError: An action of a newer version.
        """
        work = _Work(state, dict(state.queues), entry)
        for action in entry.actions:
            handler = _HANDLERS.get(action["do"])
            if handler is None:
                raise InvalidError(
                    f"journal entry {entry.number} has the action {action['do']!r}, unknown here",
                    do="use a newer version of tiered",
                )
            handler(work, action)
        return replace(work.state, queues=work.queues, updated_ms=entry.time_ms)

    def dump(self, state: TierState) -> Any:  # noqa: ANN401 (JSON values)
        """For a checkpoint."""
        return {
            "generation": state.generation,
            "writer": state.writer,
            "holder": dict(state.holder),
            "store": dict(state.store),
            "refused_parts": state.refused_parts,
            "updated_ms": state.updated_ms,
            "queues": [
                [queue.topic, queue.queue_id, [_life_json(life) for life in lives]]
                for queue, lives in state.queues.items()
            ],
        }

    def load(self, document: Any) -> TierState:  # noqa: ANN401 (JSON values)
        """Undo ``dump``."""
        return TierState(
            generation=document["generation"],
            writer=document["writer"],
            holder=document["holder"],
            store=document["store"],
            refused_parts=document["refused_parts"],
            updated_ms=document["updated_ms"],
            queues={
                MessageQueue(topic, queue_id): tuple(_life_of(life) for life in lives)
                for topic, queue_id, lives in document["queues"]
            },
        )


@dataclass(slots=True)
class _Work:
    """A state under construction, private to one ``apply``."""

    state: TierState
    queues: dict[MessageQueue, tuple[QueueLife, ...]]
    entry: Entry

    @property
    def reigns(self) -> bool:
        """The entry was written under the present reign."""
        return self.entry.generation == self.state.generation > 0

    def refuse(self) -> None:
        self.state = replace(self.state, refused_parts=self.state.refused_parts + 1)

    def life(self, action: Action) -> QueueLife | None:
        """The life that an action speaks of, if it is the present one."""
        lives = self.queues.get(_queue(action))
        life = lives[-1] if lives else None
        return life if life and life.incarnation == action["incarnation"] else None

    def put(self, action: Action, life: QueueLife) -> None:
        lives = self.queues.get(_queue(action), ())
        self.queues[_queue(action)] = (*lives[:-1], life)


def _reign(work: _Work, action: Action) -> None:
    if action["generation"] > work.state.generation:
        work.state = replace(
            work.state,
            generation=action["generation"],
            writer=work.entry.writer,
            holder=action["holder"],
        )


def _meta(work: _Work, action: Action) -> None:
    if work.reigns:
        work.state = replace(work.state, store=action["store"])


def _part(work: _Work, action: Action) -> None:
    part = part_of(action["part"])
    life = work.life(action) or _first_life(work, action, part.queue_offset)
    fits = life is not None and (part.queue_offset, part.log_offset) == (
        life.commit_offset,
        life.log_end,
    )
    whole = part.count > 0 and part.index.size_bytes == part.count * ITEM_BYTES
    segments = _placed(work, action, part, life) if life and fits and whole else None
    if life is None or segments is None or not work.reigns:
        work.refuse()
        return
    grown = replace(life, segments=segments, commit_offset=part.queue_end, log_end=part.log_end)
    work.put(action, grown)


def _placed(work: _Work, action: Action, part: Part, life: QueueLife) -> tuple[Segment, ...] | None:
    """The segments with the part in its place; None when it names a segment where it cannot lie."""
    base = LogOffset(action["segment"])
    last = life.segments[-1] if life.segments else None
    continues = last and not last.sealed and last.parts[-1].queue_end == part.queue_offset
    if last and continues and last.base_offset == base:  # behind a gap only a new segment may come
        return (*life.segments[:-1], replace(last, parts=(*last.parts, part)))
    if base != part.log_offset:  # (of two segments with one base the first has nothing but holes)
        return None
    rolled = (*life.segments[:-1], replace(last, sealed=True)) if last else ()
    return (*rolled, Segment(base, part.queue_offset, work.entry.time_ms, parts=(part,)))


def _first_life(work: _Work, action: Action, start: QueueOffset) -> QueueLife | None:
    """A queue that the journal has never met begins where its first part (or gap) begins."""
    if _queue(action) in work.queues or action["incarnation"] != 0:
        return None
    return QueueLife(0, start, start)


def _seal(work: _Work, action: Action) -> None:
    life = work.life(action)
    parts = tuple(part_of(document) for document in action["parts"])
    if life is None or not (work.reigns or work.entry.generation == 0):
        return
    segments = tuple(
        replace(segment, parts=parts, sealed=True)
        if segment.base_offset == action["segment"]
        and (segment.sealed or work.reigns)
        and _covers(segment, parts)
        else segment
        for segment in life.segments
    )
    work.put(action, replace(life, segments=segments))


def _covers(segment: Segment, parts: tuple[Part, ...]) -> bool:
    """Whether the new parts are exactly the segment's bytes and items, without a hole."""
    if not parts or not segment.parts:
        return parts == segment.parts
    joined = all(
        (one.log_end, one.queue_end) == (two.log_offset, two.queue_offset)
        for one, two in itertools.pairwise(parts)
    )
    old, new = segment.parts, parts
    ends = (old[0].log_offset, old[0].queue_offset, old[-1].log_end, old[-1].queue_end)
    return joined and ends == (
        new[0].log_offset,
        new[0].queue_offset,
        new[-1].log_end,
        new[-1].queue_end,
    )


def _gap(work: _Work, action: Action) -> None:
    gap = Gap(action["start"], action["end"], action["reason"])
    life = work.life(action) or _first_life(work, action, gap.start)
    fits = life is not None and gap.start == life.commit_offset and gap.end > gap.start
    if life is None or not fits or not work.reigns:
        work.refuse()
        return
    fresh = not life.segments  # nothing to read before the gap, so the queue begins behind it
    work.put(
        action,
        replace(
            life,
            gaps=(*life.gaps, gap),
            commit_offset=gap.end,
            min_offset=gap.end if fresh else life.min_offset,
        ),
    )


def _quarantine(work: _Work, action: Action) -> None:
    life = work.life(action)
    if life and work.reigns:
        work.put(action, replace(life, quarantined=life.quarantined + action["count"]))


def _incarnation(work: _Work, action: Action) -> None:
    queue = _queue(action)
    lives = work.queues.get(queue, ())
    number = lives[-1].incarnation + 1 if lives else 0
    if action["incarnation"] != number or not work.reigns:
        work.refuse()
        return
    ended = (*lives[:-1], replace(lives[-1], ended=action["reason"])) if lives else ()
    start = QueueOffset(action["start"])
    work.queues[queue] = (*ended, QueueLife(number, start, start))


_HANDLERS = {
    REIGN: _reign,
    "meta": _meta,
    "part": _part,
    "seal": _seal,
    "gap": _gap,
    "quarantine": _quarantine,
    "incarnation": _incarnation,
}


def _queue(action: Action) -> MessageQueue:
    return MessageQueue(action["topic"], action["queue_id"])


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
    """A part as a JSON row: log range (6), index range (6), log offset, queue offset, count, holes, times (2)."""
    return [
        *_range_json(part.log),
        *_range_json(part.index),
        part.log_offset,
        part.queue_offset,
        part.count,
        part.holes,
        part.store_min_ms,
        part.store_max_ms,
    ]


def part_of(row: list[Any]) -> Part:
    """Undo ``part_json``."""
    return Part(ObjectRange(*row[0:6]), ObjectRange(*row[6:12]), *row[12:18])


def _range_json(place: ObjectRange) -> list[Any]:
    return [place.key, place.start, place.end, place.payload_bytes, place.trailer_bytes, place.crc]


def _life_json(life: QueueLife) -> list[Any]:
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
                s.sealed,
                [part_json(p) for p in s.parts],
            ]
            for s in life.segments
        ],
        [[gap.start, gap.end, gap.reason] for gap in life.gaps],
        life.quarantined,
        life.ended,
    ]


def _life_of(row: list[Any]) -> QueueLife:
    number, low, commit, log_end, segments, gaps, quarantined, ended = row
    return QueueLife(
        number,
        low,
        commit,
        log_end,
        tuple(
            Segment(base, queue, created, sealed, tuple(part_of(p) for p in parts))
            for base, queue, created, sealed, parts in segments
        ),
        tuple(Gap(*gap) for gap in gaps),
        quarantined,
        ended,
    )
