"""Archives of many small files, and what a merge makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.archive_jobs import rows
from support.tiers import QUEUE, TierBuilder

from tiered.archive.job import log_writer
from tiered.archive.merging import merge, plan_merge
from tiered.archive.tables import files_by_topic
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from tiered.archive.job import JobContext
    from tiered.archive.merging import Merged


SECOND = MessageQueue(QUEUE.topic, 7)


OTHER = MessageQueue("other", 0)


def built(*, first: int = 0) -> TierBuilder:
    """Three sealed segments of each of two queues of a topic, and one of another topic's."""
    tier = TierBuilder()
    for queue in (QUEUE, SECOND):
        for body in (b"a", b"b", b"c", b"open"):
            tier.add([body, None, body * 2], queue=queue, first=first, roll=True)
    tier.add([b"x"], queue=OTHER, roll=True)
    tier.add([b"open"], queue=OTHER, roll=True)
    return tier


def merged(at: JobContext, **more: Any) -> Merged:
    log = log_writer(at)
    plan = plan_merge(log.state, takes=lambda _queue: True, **more)
    return merge(at, log, plan)


def named(at: JobContext) -> list[str]:
    found = files_by_topic(log_writer(at).state)
    return [file.key for some in found.values() for file in some]


def seen(at: JobContext) -> list[dict[str, Any]]:
    """All rows of the files that the log names, in order of topic, queue and offset."""
    found = [row for key in named(at) for row in rows(at, key)]
    return sorted(found, key=lambda row: (row["topic"], row["queue_id"], row["queue_offset"]))
