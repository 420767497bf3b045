"""What is to be archived: sealed segments, minus what the archive's log has. Pure.

Planning goes by queue offsets, not by the names of segments, since merging joins segments later: of a segment that is
archived in part only the rest becomes a task. What the broker took back after it was archived is forgotten first (its files
are no longer part of the archive), and what stays of their offsets is archived anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.archive.body.layout import PLAIN, Layout
from tiered.archive.model import Lane
from tiered.archive.times import has_times
from tiered.log.parts import Parts, QueueLife, Segment
from tiered.log.ranges import Ranges, without
from tiered.log.takeback import is_tail
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.api.broker_place import Place
    from tiered.archive.machine import ArchiveState
    from tiered.log.parts import TierState


@dataclass(frozen=True, slots=True)
class Task:
    """Queue offsets ``[start, end)`` of one sealed segment, to be made Parquet.

    Attributes:
        lane: Whose.
        start: First queue offset.
        end: One past the last.
        parts: Those that hold them, in order, without a gap.
        tails: How many ends that were taken back the archive has dealt with, once the plan's are.
        layout: Which columns the files get beside those that every file has.
    """

    lane: Lane
    start: int
    end: int
    parts: Parts
    tails: int = 0
    layout: Layout = PLAIN

    @property
    def size_bytes(self) -> int:
        """Bytes of the commit log, at most."""
        return self.parts.log_bytes

    @property
    def life(self) -> QueueLife:
        """These offsets as a life of their own, for a reader."""
        first = self.parts[0]
        segment = Segment(LogOffset(first.log_offset), first.queue_offset, 0, True, self.parts)
        bounds = QueueOffset(self.start), QueueOffset(self.end)
        return QueueLife(self.lane.incarnation, *bounds, self.parts.log_end, (segment,))


@dataclass(frozen=True, slots=True)
class Open:
    """Offsets that are not sealed yet, and so not archived."""

    lane: Lane
    start: int
    end: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Stretches of the archive whose messages the broker took back.

    Attributes:
        lane: Whose.
        starts: Of the stretches.
        mark: Of what was taken back; the archive deals with each once.
        low: First queue offset that was taken back.
        high: One past the last.
    """

    lane: Lane
    starts: tuple[int, ...]
    mark: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job is to do.

    Attributes:
        tasks: In order of topic, queue and offset.
        opened: What is not sealed.
        overtaken: What has to be forgotten before.
        archived_segments: Sealed segments that are archived already.
        outside: Segments left out, since none of their messages is of the wanted time.
        postponed: Segments left to a later run.
        postponed_bytes: Of their commit log.
        strange: Lane and first offset of segments that count as archived, though what is archived has other store times:
            most likely it is of another tier, whose broker has the same name.
    """

    tasks: tuple[Task, ...]
    opened: tuple[Open, ...]
    overtaken: tuple[Overtaken, ...]
    archived_segments: int
    outside: int = 0
    postponed: int = 0
    postponed_bytes: int = 0
    strange: tuple[tuple[Lane, int], ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the commit log in its tasks, at most."""
        return sum(task.size_bytes for task in self.tasks)


def plan_archive(
    tier: TierState, place: Place, archive: ArchiveState, *, takes: Callable[[str], bool]
) -> Plan:
    """Decide.

    Args:
        tier: Of the broker.
        place: Which broker.
        archive: What the log says.
        takes: Whether a topic is wanted.
    """
    tasks: list[Task] = []
    opened: list[Open] = []
    overtaken: list[Overtaken] = []
    strange: list[tuple[Lane, int]] = []
    archived = 0
    for queue in sorted(queue for queue in tier.queues if takes(queue.topic)):
        lives = tier.queues[queue]
        for number, life in enumerate(lives):
            lane = Lane(
                *(place.cluster, place.broker), *(queue.topic, queue.queue_id), life.incarnation
            )
            if is_tail(lives, number):
                overtaken += overtaken_by(archive, lane, life)
                continue
            gone = {start for one in overtaken if one.lane == lane for start in one.starts}
            tails = len(archive.tails.get(lane, ())) + sum(o.lane == lane for o in overtaken)
            found = list(_tasks(archive, lane, life, gone, tails))
            archived += sum(not rest for rest, _ in found)
            strange += [(lane, start) for rest, start in found if start >= 0]
            tasks += [task for rest, _ in found for task in rest]
            opened += _open(lane, life)
    return Plan(tuple(tasks), tuple(opened), tuple(overtaken), archived, strange=tuple(strange))


def _tasks(
    archive: ArchiveState, lane: Lane, life: QueueLife, gone: set[int], tails: int
) -> Iterator[tuple[list[Task], int]]:
    """For each sealed segment what is left of it; and where it begins if what is archived of it has other times, else -1."""
    for segment in life.segments:
        if not (segment.sealed or life.ended) or not segment.parts:
            continue
        start = max(segment.parts[0].queue_offset, life.min_offset)
        end = segment.parts[-1].queue_end
        if start >= end:
            continue
        left: Ranges = ((int(start), int(end)),)
        known = [one for one in archive.overlapping(lane, start, end) if one.start not in gone]
        for one in known:
            left = without(left, one.start, one.end)
        rest = [
            Task(lane, low, high, _holding(segment.parts, low, high), tails) for low, high in left
        ]
        yield rest, -1 if rest or has_times(known, segment, start, end) else int(start)


def _holding(parts: Parts, low: int, high: int) -> Parts:
    starts = parts.column("queue_offset")
    wanted = (starts < high) & (starts + parts.column("count") > low)
    first, behind = int(wanted.argmax()), int(wanted.sum())  # a run: parts do not overlap
    return parts[first : first + behind]


def _open(lane: Lane, life: QueueLife) -> list[Open]:
    segment = life.segments[-1] if life.segments else None
    if segment is None or segment.sealed or life.ended or not segment.parts:
        return []
    start, end = segment.parts[0].queue_offset, segment.parts[-1].queue_end
    return [Open(lane, start, end, segment.size_bytes)]


def overtaken_by(archive: ArchiveState, lane: Lane, tail: QueueLife) -> list[Overtaken]:
    """What the archive has to forget for what the broker took back, also if that has expired; nothing once it has."""
    parts, known = tail.parts(), archive.tails.get(lane, ())
    low, high = int(tail.cut_at), int(tail.commit_offset)
    mark = f"{high}-{parts[-1].last}-{parts[-1].store_max_ms}" if parts else f"{high}-expired-{low}"
    if mark in known or (not parts and any(one.startswith(f"{high}-") for one in known)):
        return []
    found = archive.overlapping(lane, low, high)
    return [Overtaken(lane, tuple(one.start for one in found), mark, low, high)]
