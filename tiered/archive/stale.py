"""Rows of an archive that lack columns of bodies, since these were fixed later; and how they get them.

Rows that were archived before a column was fixed are null in it, though their bodies may have it: what is summed up then is
too little. The log tells which they are, since it has counted the members that were left out.

To make them again (``plan_again``, ``decode_again``) is to archive the same offset ranges of the tier once more, with all
columns, and to have the new ones take the place of the old by one action of the log for all that share files. What the
tier has not any more, or was compacted of since, stays as it is and is named.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING

from backends.errors import ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from tiered.archive.audit import task_of
from tiered.archive.bodies import OTHERS, BodyLayout, column_names
from tiered.archive.machine import append_if, archive_action
from tiered.archive.plan import Work
from tiered.archive.task import do_work

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import Archived, ArchiveQueue
    from tiered.archive.plan import Task
    from tiered.archive.task import JobContext
    from tiered.journal.append import JournalWriter
    from tiered.log.reader import TierReader
    from tiered.upkeep.engine import Engine


# -- what is stale ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stale:
    """Rows of a topic that are null in columns that their bodies may have."""

    topic: str
    columns: tuple[str, ...]  # names of the columns
    rows: int  # how many there are, at most: a body need not have the member

    def said(self) -> str:
        """For people."""
        columns = ", ".join(self.columns[:_SHOWN])
        more = f" and {len(self.columns) - _SHOWN} more" if len(self.columns) > _SHOWN else ""
        rows = f"{self.rows:,} {'row' if self.rows == 1 else 'rows'} of {self.topic}"
        return (
            f"{rows} archived before the columns {columns}{more} are null there whatever their bodies have;"
            " `tiered archive --decode-again` makes them again from the tier"
        )


_SHOWN = 8


def stale_rows(state: ArchiveState, topics: Collection[str] | None = None) -> list[Stale]:
    """Of each topic that has some, in order."""
    found: dict[str, tuple[dict[str, None], int]] = {}
    for queue, one, columns in _stale(state, lambda topic: topics is None or topic in topics):
        known, rows = found.get(queue.topic, ({}, 0))
        found[queue.topic] = {**known, **dict.fromkeys(columns)}, rows + one.rows
    return [Stale(topic, tuple(columns), rows) for topic, (columns, rows) in sorted(found.items())]


def _stale(
    state: ArchiveState, takes: Callable[[str], bool]
) -> Iterator[tuple[ArchiveQueue, Archived, list[str]]]:
    known = {topic: _lacking(state, topic) for topic in state.bodies if takes(topic)}
    for queue, one in state.queues.each(lambda queue: queue.topic in known):
        lacking = known[queue.topic]
        if one.rows and lacking[one.columns] and (columns := _unread(one, lacking)):
            yield queue, one, columns


def _lacking(state: ArchiveState, topic: str) -> list[list[str]]:
    """Columns that files lack, by which of the topic's columns they have."""
    bodies = state.bodies[topic]
    every = column_names(bodies[-1])
    known = [[], *map(column_names, bodies)]
    return [[name for name in every if name not in names] for names in known]


def _unread(one: Archived, lacking: list[list[str]]) -> list[str]:
    """Columns that a range lacks and that its bodies may have a value for."""
    columns, left = lacking[one.columns], dict(one.left_out)
    # Members are counted since there are columns; of bytes nothing was read.
    if not one.columns or OTHERS in left:
        return columns
    return [name for name in columns if name.removeprefix("value_") in left]


# -- made again ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Again:
    """OffsetRanges that share files, to be archived once more."""

    old: tuple[tuple[ArchiveQueue, Archived], ...]  # each as the log has it, in order
    work: Work  # what to do


@dataclass(slots=True)
class Remade:
    """What was made again."""

    rows: int = 0  # in new files
    offset_ranges: int = 0  # of the log
    entries: int = 0  # written to it
    left: list[tuple[str, str]] = field(default_factory=list)
    """Topic, and why some of it stays as it is."""


def plan_again(
    at: JobContext, state: ArchiveState, reader: TierReader
) -> tuple[list[Again], list[tuple[str, str]]]:
    """What of a broker is stale and can be made again; and topics of which some cannot, with the reason."""
    planned, left = [], []
    mine = at.place.cluster, at.place.broker
    stale = [
        (queue, one)
        for queue, one, _ in _stale(state, at.takes)
        if (queue.cluster, queue.broker) == mine
    ]
    for group in _groups(state, stale):
        tasks, why = _tasks(state, reader, group), ""
        if any(not task.parts for task in tasks):
            why = "the tier has not all of its messages any more"
        elif any(task.parts.holes > one.holes for task, (_, one) in zip(tasks, group, strict=True)):
            why = "it was compacted in the tier since, and the archive has more"
        if why:
            left.append((group[0][0].topic, why))
        else:
            planned.append(Again(tuple(group), Work(tuple(tasks))))
    return planned, list(dict.fromkeys(left))


_Side = tuple["ArchiveQueue", "Archived"]


def _groups(state: ArchiveState, stale: list[_Side]) -> list[list[_Side]]:
    """OffsetRanges by the files that they share, those that are not stale and share one, too."""
    topics = {queue.topic for queue, _ in stale}
    by_file: dict[str, list[_Side]] = {}
    for queue, one in state.queues.each(lambda queue: queue.topic in topics):
        for file in one.files:
            by_file.setdefault(file.key, []).append((queue, one))
    seen: set[tuple[ArchiveQueue, int]] = set()
    found = []
    for side in stale:
        group: dict[tuple[ArchiveQueue, int], _Side] = {}
        waiting = [side]
        while waiting:
            queue, one = waiting.pop()
            if (queue, one.start) in seen:
                continue
            seen.add((queue, one.start))
            group[queue, one.start] = queue, one
            waiting += [other for file in one.files for other in by_file[file.key]]
        if group:
            found.append([group[mark] for mark in sorted(group)])
    return found


def _tasks(state: ArchiveState, reader: TierReader, group: list[_Side]) -> list[Task]:
    bodies = state.bodies[group[0][0].topic]
    has_records = any(one.has_records for _, one in group)
    tasks = (task_of(state, reader, queue, one) for queue, one in group)
    return [
        replace(task, layout=BodyLayout(bodies[-1], len(bodies), has_records, task.layout.is_kafka))
        for task in tasks
    ]


def decode_again(
    at: JobContext, log: JournalWriter[ArchiveState], engine: Engine, reader: TierReader
) -> Remade:
    """Make all again that is stale and can be made."""
    planned, left = plan_again(at, log.state, reader)
    done, by_work = Remade(left=left), {id(one.work): one for one in planned}
    with engine(do_work, [one.work for one in planned]) as outcomes:
        for work, made in outcomes:
            again = by_work.get(id(work)) or next(one for one in planned if one.work == work)
            topic = again.old[0][0].topic
            if isinstance(made, ObjectNotFoundError):
                done.left.append((topic, "the tier was merged meanwhile: do it again"))
            elif isinstance(made, Exception):
                raise made
            # But for columns of bodies: a broker of the same name may have other messages.
            elif not all(old.proves(new) for (_, old), new in zip(again.old, made, strict=True)):
                done.left.append((topic, "the tier has other messages than the archive"))
            else:
                _commit(log, again, made, done)
    return done


def _commit(
    log: JournalWriter[ArchiveState], again: Again, made: tuple[Archived, ...], done: Remade
) -> None:
    def holds(state: ArchiveState) -> bool:
        return all(
            state.overlapping(queue, old.start, old.end) == [old] for queue, old in again.old
        )

    triples = [
        (queue, task.tails, new)
        for (queue, _), task, new in zip(again.old, again.work.tasks, made, strict=True)
    ]
    action = archive_action(triples, again.work.tasks[0].epoch, again=True)
    if not append_if(log, [action], holds):
        done.left.append((again.old[0][0].topic, "the archive changed meanwhile: do it again"))
        return
    done.entries += 1
    done.offset_ranges += len(made)
    done.rows += sum(one.rows for one in made)


__all__ = ["Again", "Remade", "Stale", "decode_again", "plan_again", "stale_rows"]
