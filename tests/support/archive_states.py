"""Tiers and archives as the plan of a job sees them: states of many segments, without a single object."""

from __future__ import annotations

from support.bundles import made_part

from tiered.api.broker_place import Place
from tiered.archive.archived import OffsetRanges
from tiered.archive.machine import ArchiveState
from tiered.archive.model import Archived, ArchiveQueue, ParquetFile
from tiered.archive.plan import plan_archive
from tiered.log.parts import Incarnation, Parts, Segment, TierState
from tiered.model import LogOffset, MessageQueue, QueueOffset

PLACE = Place("c", "b")


COUNT = 100
"""Messages of a segment."""


def segment(number: int, count: int = COUNT) -> Segment:
    base, first = LogOffset(number * 1000), QueueOffset(number * COUNT)
    times = number * 10, number * 10 + 9
    part = made_part(first, base, count, key=f"log-{number}", times=times, last=7)
    return Segment(base, first, 0, sealed=True, parts=Parts.of([part]))


def tier(queues: int, segments: int) -> TierState:
    rows = tuple(segment(number) for number in range(segments))
    end = QueueOffset(segments * COUNT)
    incarnation = Incarnation(0, QueueOffset(0), end, LogOffset(segments * 1000), rows)
    return TierState(queues={MessageQueue("t", number): (incarnation,) for number in range(queues)})


def archived(number: int) -> Archived:
    low, high = number * COUNT, (number + 1) * COUNT
    file = ParquetFile(f"k-{number}", low, high, COUNT, 9, 9, number * 10, number * 10 + 9, 5, 5)
    return Archived(low, high, 0, 0, 1000, (file,), None, ((f"log-{number}", "etag"),))


def state(queues: int, numbers: range) -> ArchiveState:
    found = tuple(map(archived, numbers))
    of_queues = (ArchiveQueue("c", "b", "t", queue, 0) for queue in range(queues))
    return ArchiveState(OffsetRanges.of(dict.fromkeys(of_queues, found)))


def plan(tier_state: TierState, archive: ArchiveState):
    return plan_archive(tier_state, PLACE, archive, takes=lambda _topic: True)
