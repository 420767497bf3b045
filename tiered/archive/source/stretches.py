"""What a tier has, cut into stretches that can be read at once, each with a reader of its own, as columns of an archive.

Overview: planning goes by the journal alone: for each life of a queue that the broker has not taken back, runs of parts
without a gap between them, ended at segments. A stretch knows its parts, so its reader asks the journal only when one of
their objects is gone (merged, or expired).

A stretch is part of one history (``tiered.log.cursor``): the broker may take an end of a queue back and put other messages
there. ``tails`` says how often that had happened when the stretch was planned; its rows are those that stood there then, or
an error: never others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.archive.columns import Columns
from tiered.archive.model import ArchiveLane
from tiered.archive.plan import Task
from tiered.archive.selection import shown
from tiered.errors import DataError, InvalidError
from tiered.log.cursor import QueueCursor
from tiered.log.parts import Gap
from tiered.log.reader import QueueReader, TierReader
from tiered.log.view import LifeView
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.archive.selection import Selection
    from tiered.log.parts import Part, Parts, QueueLife, TierState

SKIP = "skip"
FAIL = "fail"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StretchHistory:
    """One incarnation of a queue as it stood.

    Attributes:
        prefix: Of the broker.
        lane: The incarnation.
        tails: How many of its ends had been taken back.
    """

    prefix: str
    lane: ArchiveLane
    tails: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Queue offsets of one life that are read one after another.

    Attributes:
        prefix: Of the broker.
        task: Lane, offsets and parts; ``tails``: ends of the lane's incarnation that had been taken back.
    """

    prefix: str
    task: Task

    @property
    def size_bytes(self) -> int:
        """Bytes of the commit log, at most."""
        return self.task.size_bytes


@dataclass(slots=True)
class TierPlan:
    """What a selection reads of a tier.

    Attributes:
        stretches: In order of broker, queue and offset.
        parts_left: Parts that are left out, by what.
        missing: Offsets that never came into the tier, among those wanted.
    """

    stretches: list[Stretch]
    parts_left: dict[str, int]
    missing: int = 0


def incarnations(lives: Sequence[QueueLife]) -> dict[int, list[QueueLife]]:
    """Lives of a queue by incarnation; the last of each is the one that counts, those before were taken back."""
    found: dict[int, list[QueueLife]] = {}
    for life in lives:
        found.setdefault(life.incarnation, []).append(life)
    return found


def plan_tier(states: Mapping[Place, TierState], wanted: Selection) -> TierPlan:
    """Everything that is wanted and there now.

    Raises:
        InvalidError: A topic is asked for that the tier has not.
    """
    plan = TierPlan([], {})
    topics = {shown(queue.topic) for state in states.values() for queue in state.queues}
    missing = wanted.texts.get("topic", frozenset()) - topics
    if missing and missing == wanted.texts.get("topic"):
        raise InvalidError(
            f"the tier has no topic {min(missing)}", do="`tiered ls URL` lists the topics"
        )
    for place, state in sorted(states.items()):
        for queue, lives in sorted(state.queues.items()):
            for number, found in incarnations(lives).items():
                lane = ArchiveLane(place.cluster, place.broker, queue.topic, queue.queue_id, number)
                _plan_life(plan, place.prefix, lane, found, wanted)
    return plan


def _plan_life(
    plan: TierPlan, prefix: str, lane: ArchiveLane, lives: Sequence[QueueLife], wanted: Selection
) -> None:
    life = lives[-1]
    refused = wanted.refuses(lane)
    if refused:
        _leave(plan, refused, len(life.parts()))
        return
    low, high = bounds(wanted, life.min_offset, life.commit_offset)
    for gap in life.gaps:
        plan.missing += max(0, min(gap.end, high) - max(gap.start, low))
    history = StretchHistory(prefix, lane, len(lives) - 1)
    plan.stretches += cut(history, life, (low, high), wanted, plan)


def bounds(wanted: Selection, low: int, high: int) -> tuple[int, int]:
    """Those of the offsets ``[low, high)`` that are wanted."""
    least, most = wanted.bounds.get("queue_offset", (low, high))
    return max(low, least), min(high, most + 1)


def cut(
    history: StretchHistory,
    life: QueueLife,
    span: tuple[int, int],
    wanted: Selection,
    plan: TierPlan | None = None,
) -> Iterator[Stretch]:
    """Offsets ``[low, high)`` of a life as stretches, one or more for each segment; gaps are in none.

    Args:
        history: Whose.
        life: Of it.
        span: The offsets.
        wanted: Parts without any wanted store time are left out.
        plan: Counts what is left out.
    """
    low, high = span
    for segment in life.segments:
        begin = 0
        for at, part in enumerate(segment.parts):
            reason = _refuses(part, low, high, wanted)
            if reason and plan is not None:
                _leave(plan, reason, 1)
            if reason:
                yield from _stretch(history, segment.parts[begin:at], span)
                begin = at + 1
        yield from _stretch(history, segment.parts[begin:], span)


def _refuses(part: Part, low: int, high: int, wanted: Selection) -> str:
    if part.queue_end <= low or part.queue_offset >= high:
        return "queue_offset"
    if part.holes == part.count:
        return "holes"
    times = part.store_min_ms * 1000, part.store_max_ms * 1000 + 999
    return "" if wanted.meets("store_ts", *times) else "store_ts"


def _stretch(history: StretchHistory, run: Parts, span: tuple[int, int]) -> Iterator[Stretch]:
    if len(run):
        start, end = max(run[0].queue_offset, span[0]), min(run.queue_end, span[1])
        yield Stretch(history.prefix, Task(history.lane, start, end, run, history.tails))


def _leave(plan: TierPlan, reason: str, count: int) -> None:
    if count:
        plan.parts_left[reason] = plan.parts_left.get(reason, 0) + count


def packed(stretches: Sequence[Stretch], bytes_max: int) -> list[tuple[Stretch, ...]]:
    """Stretches in groups of so many bytes, each of one at least; small queues share one."""
    found: list[tuple[Stretch, ...]] = []
    group: list[Stretch] = []
    size = 0
    for one in stretches:
        if group and size + one.size_bytes > bytes_max:
            found.append(tuple(group))
            group, size = [], 0
        group.append(one)
        size += one.size_bytes
    return [*found, tuple(group)] if group else found


def read_stretch(
    store: ObjectStore,
    stretch: Stretch,
    wanted: Selection,
    *,
    names: Collection[str] | None = None,
    on_bad: str = FAIL,
) -> Iterator[pa.RecordBatch]:
    """Rows of a stretch, those wanted, in order of offset.

    Args:
        store: The tier's, with retries.
        stretch: What to read.
        wanted: Which rows.
        names: Columns that are needed; None: all. Others may come with them.
        on_bad: What to do about a record that cannot be unpacked: ``fail``, or ``skip`` it.

    Raises:
        DataError: The bytes are damaged.
        ExpiredError: Some of it has expired since the stretch was planned.
        BackendError: The store failed.
    """
    task = stretch.task
    journal, view = TierReader(store, stretch.prefix), LifeView.of(task.lane.queue, task.life)
    cursor = QueueCursor(task.lane.queue, view, tails=task.tails, journal=journal)
    reader = QueueReader(store, stretch.prefix, cursor)
    needed = None if names is None else {*names, *wanted.columns}
    columns, at = Columns(task.lane, names=needed), QueueOffset(task.start)
    while at < task.end:
        batch = reader.read(at, count_max=task.end - at)
        if batch is None or isinstance(batch, Gap) or batch.base_offset != at:
            raise DataError(f"{task.lane} cannot be read at offset {at}", where=stretch.prefix)
        rows, aside = columns.make(batch)
        bad = [one for one in aside if one.record is not None]
        if bad and on_bad != SKIP:
            raise DataError(
                f"{task.lane}: the message with offset {bad[0].queue_offset} cannot be unpacked: {bad[0].reason}",
                where=stretch.prefix,
                do='.option("on-bad", "skip") leaves such messages out',
            )
        if bad:
            _log.warning(
                "%s: %s messages cannot be unpacked and are left out, the first at offset %s",
                *(task.lane, len(bad), bad[0].queue_offset),
            )
        yield from (wanted.rows_of(some) for some in rows)
        at = batch.end_offset
