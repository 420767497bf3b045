"""Fixes in an archive's log what bodies become, before tasks are done.

Overview: for each topic of a plan the log is asked first. What it has fixed holds; where it has nothing, what is wished is
appended to it, inferred from the topic's first messages when it has to be. Only then tasks get their layout, so all jobs
and all files of a topic agree.

Ordering: the entry that fixes columns comes before any file that has them.

Retries: of jobs that choose at once the first one's entry holds, the others take it (or are refused, when it contradicts
what they were told).

After a crash: columns without a file, which the next job uses.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, islice
from typing import TYPE_CHECKING

from tiered.archive.body.ddl import columns_text
from tiered.archive.body.infer import infer_columns
from tiered.archive.body.layout import PLAIN, BodyColumns, Layout
from tiered.archive.body.wishes import RAW, Wish, Wishes, merged
from tiered.archive.columns import Columns
from tiered.archive.machine import columns_action
from tiered.log.parts import Gap
from tiered.log.reader import QueueReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.archive.machine import ArchiveState
    from tiered.archive.plan import Task
    from tiered.journal.writer import JournalWriter

SAMPLE_LANES = 4
"""Queues of which the first segment is looked into."""
SAMPLE_MORE = 12
"""Further segments, one after another, as long as there is no JSON object."""
SAMPLE_ROWS = 1000
SAMPLE_BYTES = 1 << 20
"""Of each task that is looked into."""


class _OvertakenError(Exception):
    """Another job has fixed columns meanwhile."""


def fix_layouts(
    log: JournalWriter[ArchiveState],
    tier: ObjectStore,
    prefix: str,
    tasks: Sequence[Task],
    wishes: Wishes,
) -> tuple[tuple[Task, ...], list[str]]:
    """Give each task its layout.

    Args:
        log: Of the archive, at its head.
        tier: With retries.
        prefix: Of the broker.
        tasks: In order of topic.
        wishes: Of the job.

    Returns:
        The tasks; and the topics whose columns cannot be inferred, since none of their first bodies is a JSON object.

    Raises:
        InvalidError: What is wished contradicts what is fixed.
        DataError: A segment that is looked into is damaged.
        BackendError: A store failed.
    """
    layouts: dict[str, Layout] = {}
    unknown = []
    for topic, some in groupby(tasks, key=lambda task: task.lane.topic):
        wish = wishes.of(topic)
        if wish and not _fix(log, topic, wish, _Sample(tier, prefix, list(some))):
            unknown.append(topic)
        known = () if wish and wish.format == RAW else log.state.bodies.get(topic, ())
        layouts[topic] = Layout(known[-1] if known else None, len(known), wishes.has_records)
    if set(layouts.values()) <= {PLAIN}:
        return tuple(tasks), unknown
    return tuple(replace(task, layout=layouts[task.lane.topic]) for task in tasks), unknown


class _Sample:
    """The first bodies of a topic, read when they are wanted."""

    def __init__(self, tier: ObjectStore, prefix: str, tasks: Sequence[Task]) -> None:
        self._tier = tier
        self._prefix = prefix
        firsts = {task.lane: task for task in reversed(tasks)}
        first = sorted(firsts.values(), key=lambda task: task.lane)[:SAMPLE_LANES]
        more = (task for task in tasks if task not in first)
        self._groups = [first, *([task] for task in islice(more, SAMPLE_MORE))]

    def infer(self) -> BodyColumns | None:
        """Columns; None without a JSON object that has any."""
        for tasks in self._groups:
            rows = SAMPLE_ROWS // len(tasks)
            bodies = (body for task in tasks for body in islice(self._bodies(task), rows))
            columns = infer_columns(bodies)
            if columns:
                return BodyColumns("json", columns_text(columns))
        return None

    def _bodies(self, task: Task) -> Iterator[bytes]:
        reader = QueueReader.of_life(self._tier, self._prefix, task.lane.queue, task.life)
        for found in islice(reader.batches(task.life.min_offset, bytes_max=SAMPLE_BYTES), 1):
            if not isinstance(found, Gap):
                rows, _ = Columns(task.lane).make(found)
                for some in rows:
                    yield from some.column("body").to_pylist()


def _fix(log: JournalWriter[ArchiveState], topic: str, wish: Wish, sample: _Sample) -> bool:
    """Fix what is wished where it is not fixed yet; whether the topic has what was wished."""
    if wish.format == RAW:
        return True
    guess = wish.body
    while True:
        known = log.state.bodies.get(topic, ())
        if known:
            wanted = merged(known[-1], wish.body or BodyColumns(wish.format), topic)
            if wish.body is None or wanted == known[-1]:
                return True
        else:
            guess = guess or sample.infer()
            if guess is None:
                return False
            wanted = guess
        if _append(log, topic, len(known), wanted):
            return True


def _append(log: JournalWriter[ArchiveState], topic: str, number: int, body: BodyColumns) -> bool:
    def hold(state: ArchiveState) -> None:
        if len(state.bodies.get(topic, ())) != number:
            raise _OvertakenError

    try:
        log.append([columns_action(topic, number, body)], check=hold)
    except _OvertakenError:
        return False
    return True
