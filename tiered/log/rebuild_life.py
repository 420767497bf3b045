"""One life of a queue, made of a chain of parts, and what the broker took back of it. Pure; see ``tiered.log.rebuild``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from tiered.log.parts import Gap, Parts, QueueLife, Segment
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.log.parts import Part
    from tiered.log.rebuild_chain import Candidate
    from tiered.model import MessageQueue

UNKNOWN_GAP = "unknown: the journal was rebuilt"
LOST_GAP = "lost: the journal was rebuilt without these"


@dataclass(frozen=True, slots=True)
class Loss:
    """Queue offsets ``[start, end)`` whose objects are not there, and bytes of the queue's commit log."""

    queue: MessageQueue
    incarnation: int
    start: QueueOffset
    end: QueueOffset
    log_bytes: int


@dataclass(slots=True)
class BuiltLife:
    """A life, and what is to be said of it.

    Attributes:
        life: None when there is nothing of it.
        losses: Where objects are missing, between parts.
        notes: What a person should know.
    """

    life: QueueLife | None = None
    losses: list[Loss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def build_life(
    chain: Sequence[Candidate], queue: MessageQueue, incarnation: int, known: QueueLife | None
) -> BuiltLife:
    """Make a life.

    Args:
        chain: Its parts, in order, none overlapping another.
        queue: Whose.
        incarnation: Which life.
        known: What the readable beginning of the journal says of it.
    """
    built = BuiltLife()
    name = f"{queue} incarnation {incarnation}"
    if not chain:
        if known is None or known.parts():
            built.notes.append(f"{name}: no part of it is left, so it is left out")
        else:
            built.life = known  # it never had a message
        return built
    gaps = _gaps(chain, known)
    built.losses = [
        Loss(queue, incarnation, one.queue_end, two.queue_offset, two.log_offset - one.log_end)
        for one, two in pairwise(step.part for step in chain)
        if one.log_end != two.log_offset
    ]
    last = chain[-1].part
    tail = _known_tail(last, known)
    life = QueueLife(
        incarnation,
        chain[0].part.queue_offset,
        QueueOffset(tail[-1].end if tail else last.queue_end),
        last.log_end,
        _segments(chain, known),
        (*gaps, *tail),
    )
    if known is not None:
        life = replace(life, quarantined=known.quarantined, ended=known.ended)
    built.life = life
    built.notes = [f"{name}: {note}" for note in _notes(life, known)]
    return built


def _notes(life: QueueLife, known: QueueLife | None) -> list[str]:
    notes = []
    begin = life.segments[0].parts[0].log_offset
    if begin and (known is None or known.min_offset < life.min_offset):
        notes.append(
            f"it begins at queue offset {life.min_offset};"
            f" {begin} bytes of records before it have expired or are lost"
        )
    if known is not None and known.commit_offset > life.commit_offset:
        notes.append(
            f"queue offsets [{life.commit_offset}, {known.commit_offset}) are lost at its end;"
            " the next writer goes on before them"
        )
    return notes


def _gaps(chain: Sequence[Candidate], known: QueueLife | None) -> list[Gap]:
    """Those before the first part (only a journal tells) and those between parts."""
    recorded = () if known is None else known.gaps
    first = chain[0].part.queue_offset
    gaps = [gap for gap in recorded if gap.end <= first]
    for one, two in pairwise(step.part for step in chain):
        start, end = one.queue_end, two.queue_offset
        if start == end:
            continue
        same = [gap for gap in recorded if start <= gap.start and gap.end <= end]
        reason = UNKNOWN_GAP if one.log_end == two.log_offset else LOST_GAP
        is_whole = sum(gap.end - gap.start for gap in same) == end - start
        gaps += same if is_whole else [Gap(start, end, reason)]
    return gaps


def _known_tail(last: Part, known: QueueLife | None) -> list[Gap]:
    """Gaps behind the last part, if they lead to where the readable journal ends."""
    if known is None:
        return []
    tail = [gap for gap in known.gaps if gap.start >= last.queue_end]
    is_whole = sum(gap.end - gap.start for gap in tail) == known.commit_offset - last.queue_end
    return tail if is_whole else []


def build_tails(chain: Sequence[Candidate], incarnation: int, reason: str) -> list[QueueLife]:
    """Lives that are over, of what merges found taken back: one of each run without a hole."""
    rows: list[list[Candidate]] = []
    for one in chain:
        if rows and _continues(rows[-1][-1].part, one.part):
            rows[-1].append(one)
        else:
            rows.append([one])
    return [_tail(row, incarnation, reason) for row in rows]


def _tail(row: Sequence[Candidate], incarnation: int, reason: str) -> QueueLife:
    first, last = row[0].part, row[-1].part
    return QueueLife(
        incarnation,
        first.queue_offset,
        QueueOffset(last.queue_end),
        last.log_end,
        tuple(replace(segment, sealed=True) for segment in _segments(row, None)),
        ended=reason,
        cut_at=first.queue_offset,
    )


def _segments(chain: Sequence[Candidate], known: QueueLife | None) -> tuple[Segment, ...]:
    """Where a part does not begin its segment, it is of the segment of the part before it.

    So says where its segment begins: before itself. It need not be where that part's segment begins, since a merge may have
    made one segment of two, and leaves what it does not gather as it was.
    """
    rows: list[list[Candidate]] = []
    for one in chain:
        last = rows[-1][-1] if rows else None
        is_same = last is not None and _continues(last.part, one.part)
        if is_same and last and (one.segment != one.part.log_offset or one.segment == last.segment):
            rows[-1].append(one)
        else:
            rows.append([one])
    return tuple(_segment(row, known, is_last=row is rows[-1]) for row in rows)


def _continues(one: Part, two: Part) -> bool:
    return (one.queue_end, one.log_end) == (two.queue_offset, two.log_offset)


def _segment(row: Sequence[Candidate], known: QueueLife | None, *, is_last: bool) -> Segment:
    first = row[0].part
    base = (first.log_offset, first.queue_offset)
    same = next(
        (
            s
            for s in (known.segments if known else ())
            if (s.base_offset, s.base_queue_offset) == base
        ),
        None,
    )
    created_ms = row[0].modified_ms if row[0].modified_ms >= 0 else first.store_max_ms
    return Segment(
        LogOffset(first.log_offset),
        QueueOffset(first.queue_offset),
        same.created_ms if same else max(0, created_ms),
        sealed=not is_last or bool(same and same.sealed),
        parts=Parts.of(one.part for one in row),
    )
