"""What is to be archived: sealed segments, minus what the archive's log has. Pure.

Planning goes by queue offsets, not by the names of segments, since merging joins segments later: of a segment that is
archived in part only the rest becomes a task. What the broker truncated after it was archived is forgotten first (its files
are no longer part of the archive), and what stays of their offsets is archived anew.
"""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.archive.bodies import PLAIN, BodyLayout
from tiered.archive.model import (
    DAY_MS,
    KAFKA_SCHEMA,
    SCHEMA_VERSION,
    ArchiveQueue,
    Truncation,
    digest_of,
)
from tiered.errors import InvalidError
from tiered.log.lineage import Isolation, stable_end
from tiered.log.parts import AbortedRange, Incarnation, LineageFacts, Parts, Segment, Segments
from tiered.log.ranges import Ranges, without
from tiered.log.state import is_tail
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from tiered.api.broker_place import Place
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import Archived
    from tiered.log.parts import TierState


T = TypeVar("T")


# -- store times -----------------------------------------------------------------------------------
#
# Whether store times of what is archived are those of a segment, so far as logs tell. Pure.
#
# Two tiers whose brokers have the same names have the same queues and offsets, and an archive cannot tell them
# apart by these; by the times of their messages it can.


def has_times(offset_ranges: Sequence[Archived], segment: Segment, start: int, end: int) -> bool:
    """Whether they are. Of Kafka's none tells: a producer says any time, and the newest of a batch may be hidden."""
    if any(one.schema == KAFKA_SCHEMA for one in offset_ranges):
        return True
    mine = segment.parts.store_times
    theirs = [(f.store_min_ms, f.store_max_ms) for one in offset_ranges for f in one.files]
    is_compacted = segment.parts.holes > sum(
        o.holes for o in offset_ranges
    )  # since it was archived
    if mine is None or not theirs:
        return is_compacted or not theirs
    low, high = mine
    found = min(low for low, _ in theirs), max(high for _, high in theirs)
    if is_compacted or any(one.start < start or one.end > end for one in offset_ranges):
        return found[0] <= low and high <= found[1]
    is_within = low <= found[0] and found[1] <= high
    is_plain = not any(
        one.bad for one in offset_ranges
    )  # of bad records the archive knows no times
    touches = found[0] == low or found[1] == high  # a part that was cut keeps its old end's time
    return is_within and (touches or not is_plain)


@dataclass(frozen=True, slots=True)
class Sight:
    """What of some records becomes rows."""

    isolation: Isolation | None = None  # None: all of it, as of RocketMQ's
    aborted: tuple[AbortedRange, ...] = ()  # what is hidden of them beside the node's own

    @classmethod
    def of(
        cls, isolation: Isolation | None, incarnation: Incarnation, start: int, end: int
    ) -> Sight:
        """Of offsets ``[start, end)``, of which each transaction is decided."""
        facts = incarnation.lineage
        if isolation is not Isolation.COMMITTED or facts is None:
            return cls(isolation)
        near = (one for one in facts.aborted if one.first < end and one.last >= start)
        return cls(isolation, tuple(near))


ALL = Sight()


def readable_end(isolation: Isolation | None, incarnation: Incarnation) -> int:
    """One past the last offset of an incarnation that readers of an isolation get."""
    stable = isolation is Isolation.COMMITTED
    return int(stable_end(incarnation) if stable else incarnation.commit_offset)


@dataclass(frozen=True, slots=True)
class Task:
    """Queue offsets ``[start, end)`` of one sealed segment, to be made Parquet."""

    queue: ArchiveQueue
    start: int  # first queue offset
    end: int  # one past the last
    parts: Parts  # those that hold them, in order, without a gap
    tails: int = 0
    """How many ends that were truncated the archive has dealt with, once the plan's are."""
    layout: BodyLayout = PLAIN  # which columns the files get beside those that every file has
    epoch: int = 0  # of the archive; see ``tiered.archive.model.Fence``
    sight: Sight = ALL  # what of them becomes rows
    is_divided: bool = False
    """Something beside it is damaged (``tiered.archive.task.divide``), and will be put right: which version its objects
    are now proves nothing later."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the commit log, at most."""
        return self.parts.log_bytes

    @property
    def origin(self) -> str:
        """What tells its rows from all others; it stays what it is when parts of the segment are merged.

        Compaction makes other rows of the same offsets, often without a change at either end: what it took away tells them.
        """
        parts = self.parts
        low = min((part.store_min_ms for part in parts if part.store_min_ms >= 0), default=-1)
        high = max(part.store_max_ms for part in parts)
        known = (SCHEMA_VERSION, *astuple(self.queue), self.start, self.end)
        size = parts[-1].log_end - parts[0].log_offset
        rows = low, high, parts[-1].last, size, parts.holes, parts.log_gone
        epoch = (("epoch", self.epoch),) if self.epoch else ()
        sight = () if self.sight == ALL else (repr(self.sight),)
        return digest_of((*known, *rows, *self.layout.marks, *epoch, *sight))

    @property
    def incarnation(self) -> Incarnation:
        """These offsets as an incarnation of their own, for a reader."""
        first = self.parts[0]
        segment = Segment(LogOffset(first.log_offset), first.queue_offset, 0, True, self.parts)
        bounds = QueueOffset(self.start), QueueOffset(self.end)
        own = Incarnation(self.queue.incarnation, *bounds, self.parts.log_end, (segment,))
        if self.sight == ALL:
            return own
        return replace(own, lineage=LineageFacts(aborted=self.sight.aborted))


@dataclass(frozen=True, slots=True)
class Open:
    """Offsets that are not sealed yet, and so not archived."""

    queue: ArchiveQueue
    start: int
    end: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Overtaken:
    """OffsetRanges of the archive whose messages the broker truncated."""

    queue: ArchiveQueue
    starts: tuple[int, ...]  # of the offset ranges
    mark: Truncation  # what was truncated; the archive deals with each once

    @property
    def start(self) -> int:
        """The first queue offset that was truncated."""
        return self.mark.low

    @property
    def end(self) -> int:
        """One past the last."""
        return self.mark.high


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job is to do."""

    tasks: tuple[Task, ...]  # in order of topic, queue and offset
    opened: tuple[Open, ...]  # what is not sealed
    overtaken: tuple[Overtaken, ...]  # what has to be forgotten before
    archived_segments: int  # sealed segments that are archived already
    outside: int = 0  # segments left out, since none of their messages is of the wanted time
    postponed: int = 0  # segments left to a later run
    postponed_bytes: int = 0  # of their commit log
    strange: tuple[tuple[ArchiveQueue, int], ...] = ()
    """Queue and first offset of segments that count as archived, though what is archived has other store times: most
    likely it is of another tier, whose broker has the same name."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the commit log in its tasks, at most."""
        return sum(task.size_bytes for task in self.tasks)


def isolation_of(
    tier: TierState, place: Place, archive: ArchiveState | None, wish: Isolation | None = None
) -> Isolation | None:
    """The isolation of a broker that is read beside an archive: the archive's, else what is wished; None: it has none.

    Raises:
        InvalidError: The archive has another than is wished.
    """
    if tier.store.get("kind") != "kafka":
        return None
    fixed = archive.isolation(place.cluster, place.broker) if archive else None
    if fixed and wish not in {None, fixed}:
        raise InvalidError(
            f"what is archived of {place.cluster}/{place.broker} is {fixed.value}",
            do="leave the isolation out, or give what is to have another an archive of its own",
        )
    return fixed or wish or Isolation.COMMITTED


def plan_archive(
    tier: TierState,
    place: Place,
    archive: ArchiveState,
    *,
    takes: Callable[[str], bool],
    isolation: Isolation | None = None,
) -> Plan:
    """Decide.

    Args:
        isolation: What is wished; of an archive that has one already that holds.

    Raises:
        InvalidError: See ``isolation_of``.
    """
    isolation = isolation_of(tier, place, archive, isolation)
    tasks: list[Task] = []
    opened: list[Open] = []
    overtaken: list[Overtaken] = []
    strange: list[tuple[ArchiveQueue, int]] = []
    archived = 0
    for queue in sorted(queue for queue in tier.queues if takes(queue.topic)):
        incarnations = tier.queues[queue]
        mine: list[Overtaken] = []
        for number, incarnation in enumerate(incarnations):
            named = place.cluster, place.broker, queue.topic, queue.queue_id
            archived_queue = ArchiveQueue(*named, incarnation.number)
            if is_tail(incarnations, number):
                mine += overtaken_by(archive, archived_queue, incarnation)
                continue
            gone = {start for one in mine if one.queue == archived_queue for start in one.starts}
            tails = len(archive.tails.get(archived_queue, ()))
            tails += sum(one.queue == archived_queue for one in mine)
            every = Segments.of(incarnation.segments)
            has_parts = every.rows["first"] < every.rows["behind"]
            sealed = every.where(has_parts & (every.rows["sealed"] | bool(incarnation.ended)))
            is_whole = _is_whole(
                archive,
                archived_queue,
                sealed,
                int(incarnation.min_offset),
                tells_time=isolation is None,
            )
            is_whole &= not gone
            left = replace(incarnation, segments=sealed.where(~is_whole))
            found = list(_tasks(archive, archived_queue, left, gone, tails, isolation))
            archived += int(is_whole.sum()) + sum(not rest for rest, _ in found)
            strange += [(archived_queue, start) for rest, start in found if start >= 0]
            tasks += [task for rest, _ in found for task in rest]
            opened += _open(archived_queue, incarnation)
        overtaken += mine
    return Plan(tuple(tasks), tuple(opened), tuple(overtaken), archived, strange=tuple(strange))


def _tasks(  # noqa: PLR0917 (where it lies in either, and what is seen)
    archive: ArchiveState,
    queue: ArchiveQueue,
    incarnation: Incarnation,
    gone: set[int],
    tails: int,
    isolation: Isolation | None,
) -> Iterator[tuple[list[Task], int]]:
    """For each segment what is left of it; and where it begins if what is archived of it has other times, else -1."""
    until, layout = readable_end(isolation, incarnation), BodyLayout(is_kafka=bool(isolation))
    for segment in incarnation.segments:
        start = max(segment.parts[0].queue_offset, incarnation.min_offset)
        end = min(segment.parts[-1].queue_end, until)
        if start >= end:
            continue
        left: Ranges = ((int(start), int(end)),)
        known = [one for one in archive.overlapping(queue, start, end) if one.start not in gone]
        for one in known:
            left = without(left, one.start, one.end)
        rest = [
            Task(
                queue,
                *ends,
                holding(segment.parts, *ends),
                tails,
                layout,
                archive.fence.epoch,
                Sight.of(isolation, incarnation, *ends),
            )
            for ends in left
        ]
        yield rest, -1 if rest or has_times(known, segment, start, end) else int(start)


def _is_whole(
    archive: ArchiveState,
    queue: ArchiveQueue,
    segments: Segments,
    min_offset: int,
    *,
    tells_time: bool,
) -> npt.NDArray[np.bool_]:
    """Whether a segment is one offset range, with its times: what most are, found by columns, without a look at each."""
    low, high, first_ms, last_ms, bad, _ = archive.queues.columns(queue)
    if not len(segments) or not len(low):
        return np.zeros(len(segments), bool)
    rows, first, last = segments.parts.rows, segments.rows["first"], segments.rows["behind"] - 1
    starts = np.maximum(rows["queue_offset"][first], min_offset)
    ends = rows["queue_offset"][last] + rows["count"][last].astype(np.int64)
    has_time = rows["store_min_ms"] >= 0
    never_ms = np.iinfo(np.int64).max
    # Of each segment, and of what lies between it and the next; a value behind all is where the last may end.
    bounds = np.stack([first, last + 1], axis=1).ravel()
    min_ms = np.append(np.where(has_time, rows["store_min_ms"], never_ms), never_ms)
    max_ms = np.append(np.where(has_time, rows["store_max_ms"], -1), -1)
    mins = np.minimum.reduceat(min_ms, bounds)[::2]
    maxs = np.maximum.reduceat(max_ms, bounds)[::2]
    at = np.minimum(np.searchsorted(low, starts), len(low) - 1)
    is_within = (mins <= first_ms[at]) & (last_ms[at] <= maxs)
    touches = (mins == first_ms[at]) | (maxs == last_ms[at]) | (bad[at] > 0)
    has_same_times = (
        (first_ms[at] < 0) | (is_within & touches) | (not tells_time)
    )  # see ``has_times``
    found: npt.NDArray[np.bool_] = (low[at] == starts) & (high[at] == ends) & has_same_times
    return found


def holding(parts: Parts, low: int, high: int) -> Parts:
    """Those of a segment's parts that hold queue offsets ``[low, high)``."""
    starts = parts.column("queue_offset")
    wanted = (starts < high) & (starts + parts.column("count") > low)
    first, behind = int(wanted.argmax()), int(wanted.sum())  # a run: parts do not overlap
    return parts[first : first + behind]


def _open(queue: ArchiveQueue, incarnation: Incarnation) -> list[Open]:
    segment = incarnation.segments[-1] if incarnation.segments else None
    if segment is None or segment.sealed or incarnation.ended or not segment.parts:
        return []
    start, end = segment.parts[0].queue_offset, segment.parts[-1].queue_end
    return [Open(queue, start, end, segment.size_bytes)]


def overtaken_by(archive: ArchiveState, queue: ArchiveQueue, tail: Incarnation) -> list[Overtaken]:
    """What the archive has to forget for what the broker truncated, also if that has expired; nothing once it has."""
    mark = Truncation(tail.cut_by, int(tail.cut_at), int(tail.commit_offset))
    if any(one.knows(mark) for one in archive.tails.get(queue, ())):
        return []
    found = archive.overlapping(queue, mark.low, mark.high)
    return [Overtaken(queue, tuple(one.start for one in found), mark)]


def ends_dealt_with(
    archive: ArchiveState, queue: ArchiveQueue, incarnations: Sequence[Incarnation]
) -> int:
    """On which history the archive stands: that of so many ends truncated as its log has dealt with.

    Args:
        incarnations: Of that incarnation, as they are in the tier; the last is the one that counts.
    """
    ends = range(len(incarnations) - 1)
    return next((n for n in ends if overtaken_by(archive, queue, incarnations[n])), len(ends))


# -- how much one run takes on ---------------------------------------------------------------------
#
# How much one run of an archive job takes on. Pure.
#
# Whole segments only: one that touches the wanted time is taken whole. With a limit the oldest messages come
# first, in each queue and among queues, since they are the first to expire.


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run is held to."""

    from_ms: int | None = None
    """Leave out segments whose newest message was stored before this (UTC); None: no bound."""
    until_ms: int | None = None
    """Leave out segments whose oldest message was stored at this time or later; None: no bound."""
    bytes_max: int | None = None
    """Take segments of so many bytes of commit log, at most, but one at least; None: all."""
    runtime_ms: int | None = None  # begin no segment when so much time is over; None: no bound

    def after(self, done_bytes: int) -> Limits:
        """What is left when so many bytes are archived."""
        if self.bytes_max is None:
            return self
        return replace(self, bytes_max=max(self.bytes_max - done_bytes, 0))


NO_LIMITS = Limits()


def limited(plan: Plan, limits: Limits, *, is_first: bool = True) -> Plan:
    """The part of a plan that a run takes on, and how much it leaves.

    Args:
        is_first: Nothing is archived yet in this run, so that one segment is taken however large it is.
    """
    wanted = [task for task in plan.tasks if _touches(task, limits)]
    outside = len(plan.tasks) - len(wanted)
    if limits.bytes_max is None and limits.runtime_ms is None:
        return replace(plan, tasks=tuple(wanted), outside=outside)
    wanted.sort(key=lambda t: (int(t.parts.rows["store_max_ms"].max()), t.queue, t.start))
    taken = tuple(_within(wanted, limits.bytes_max, is_first))
    rest = wanted[len(taken) :]
    return replace(
        plan,
        tasks=taken,
        outside=outside,
        postponed=len(rest),
        postponed_bytes=sum(task.size_bytes for task in rest),
    )


def _touches(task: Task, limits: Limits) -> bool:
    """Whether a segment holds messages of the wanted time; one of holes alone always does."""
    times = task.parts.store_times
    if times is None:
        return True
    low, high = times
    begins = limits.from_ms is None or high >= limits.from_ms
    return begins and (limits.until_ms is None or low < limits.until_ms)


def _within(tasks: Iterable[Task], bytes_max: int | None, is_first: bool) -> Iterator[Task]:
    taken = 0
    for number, task in enumerate(tasks):
        taken += task.size_bytes
        if bytes_max is not None and taken > bytes_max and (number or not is_first):
            return
        yield task


# -- which segments are made together --------------------------------------------------------------
#
# Small segments of a topic share files from the start: several offset ranges, of any queues, become one file for each
# day, in order of queue and offset.

SMALL_SEGMENT_BYTES = 64 << 20
"""Less commit log than this becomes a file that is smaller than readers like."""
WORK_BYTES = 128 << 20
TASKS_MAX = 2048


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine is given to do at once: a task, or several of one topic and layout that share files."""

    tasks: tuple[Task, ...]  # at least one, in order of queue and offset

    @property
    def size_bytes(self) -> int:
        """Bytes of the commit log, at most."""
        return sum(task.size_bytes for task in self.tasks)


def filled(items: Iterable[T], size_of: Callable[[T], int], size_max: int) -> Iterator[list[T]]:
    """Neighbours in groups of so much, at most; one alone may be larger."""
    group: list[T] = []
    size = 0
    for one in items:
        more = size_of(one)
        if group and size + more > size_max:
            yield group
            group, size = [], 0
        group.append(one)
        size += more
    if group:
        yield group


def plan_works(tasks: Sequence[Task], small_bytes: int = SMALL_SEGMENT_BYTES) -> list[Work]:
    """Put small segments of a topic together.

    Those of a day come together first, since files are of one day each; a work ends between two days when it is half full.

    Args:
        small_bytes: Segments of less commit log share files; 0: none does.

    Returns:
        In order of each one's first task.
    """
    places = {id(task): number for number, task in enumerate(tasks)}
    groups = [[task] for task in tasks if task.size_bytes >= small_bytes]
    small = sorted(
        (task for task in tasks if task.size_bytes < small_bytes),
        key=lambda task: (_kind(task), _first_day(task), task.queue, task.start),
    )
    for _, some in groupby(small, key=_kind):
        groups += _filled(some)
    groups.sort(key=lambda group: min(places[id(task)] for task in group))
    return [
        Work(tuple(sorted(group, key=lambda task: (task.queue, task.start)))) for group in groups
    ]


def _kind(task: Task) -> tuple[str, ...]:
    """What tasks of one file have in common."""
    queue = task.queue
    return queue.cluster, queue.broker, queue.topic, *task.layout.marks, str(task.layout.number)


def _first_day(task: Task) -> int:
    times = task.parts.store_times
    return times[0] // DAY_MS if times else -1


def _filled(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    group: list[Task] = []
    size = 0
    for task in tasks:
        is_full = size + task.size_bytes > WORK_BYTES or len(group) == TASKS_MAX
        is_other_day = bool(group) and _first_day(group[-1]) != _first_day(task)
        if group and (is_full or (is_other_day and 2 * size >= WORK_BYTES)):
            yield group
            group, size = [], 0
        group.append(task)
        size += task.size_bytes
    if group:
        yield group
