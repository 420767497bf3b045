"""What the journal says of index objects, and what it means for the queues. Pure.

An index object covers, of each queue named, a row of queue offsets: every message there has its keys in the object. What is
covered of an incarnation grows from its minimum without a hole (``indexed_to`` says how far): an action whose rows do not
begin exactly there, or that names an incarnation which does not exist, changes nothing. Nor does one whose
messages were read before an end of the queue was last truncated (``last_cut``): other messages may stand there now. So
nothing is ever left out for good: a new epoch, or the next indexer, goes on at ``indexed_to``.

Where index objects were dropped in the middle, the first hole is what has to be covered next. What covers what is counted
by queue offsets, so expiry and merging of parts change nothing here; an object of which nothing can be read any more is
dropped by replay itself, in the same entry in which the last of it expires.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tiered.log.actions import Indexed, action_of
from tiered.log.ranges import joined, without
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tiered.journal.entry import Action
    from tiered.log.parts import Incarnation, IndexObject
    from tiered.model import MessageQueue

    Incarnations = Mapping[MessageQueue, tuple[Incarnation, ...]]
    Changed = dict[MessageQueue, tuple[Incarnation, ...]]


def index_action(made: Iterable[IndexObject], drop: Sequence[str] = ()) -> Action:
    """The action that names new index objects, in the order in which they cover, and gives up others before that."""
    return action_of(Indexed(tuple(made), tuple(drop)))


def uncovered(incarnation: Incarnation) -> list[tuple[int, int]]:
    """The queue offsets ``[start, end)`` of an incarnation that no index covers, in order."""
    holes: list[tuple[int, int]] = []
    at: int = incarnation.min_offset
    for start, end in incarnation.indexed:
        if at < start:
            holes.append((at, min(start, incarnation.commit_offset)))
        at = max(at, end)
    if at < incarnation.commit_offset:
        holes.append((at, incarnation.commit_offset))
    return holes


def indexed_to(incarnation: Incarnation) -> QueueOffset:
    """Up to where an incarnation is covered without a hole."""
    holes = uncovered(incarnation)
    return QueueOffset(holes[0][0]) if holes else incarnation.commit_offset


def last_cut(incarnations: Sequence[Incarnation], number: int) -> int:
    """Number of the last entry that has taken an end of an incarnation back; 0: none has."""
    return max(
        (incarnation.cut_by for incarnation in incarnations if incarnation.number == number),
        default=0,
    )


def after_index(
    indexes: Sequence[IndexObject], queues: Incarnations, said: Indexed
) -> tuple[tuple[IndexObject, ...], Incarnations] | None:
    """What an ``index`` action makes of index objects and queues (the changed ones); None when it does not fit."""
    drop = set(said.drop)
    kept = [one for one in indexes if one.place.key not in drop]
    if len(indexes) - len(kept) != len(drop):
        return None
    changed: dict[MessageQueue, tuple[Incarnation, ...]] = {}
    for one in indexes:
        if one.place.key in drop:
            _drop(queues, changed, one)
    if not all(_name(queues, changed, one) for one in said.objects):
        return None
    return (*kept, *said.objects), changed


def _name(queues: Incarnations, changed: Changed, made: IndexObject) -> bool:
    for cover in made.covers:
        incarnations = changed.get(cover.queue) or queues.get(cover.queue, ())
        at = _place(incarnations, cover.incarnation)
        holes = uncovered(incarnations[at]) if at is not None else []
        if at is None or not holes:
            return False
        start, end = holes[0]
        if cover.start != start or not start < cover.end <= end:
            return False
        if cover.cut_by != last_cut(incarnations, cover.incarnation):
            return False
        incarnation = replace(
            incarnations[at], indexed=joined((*incarnations[at].indexed, (start, cover.end)))
        )
        changed[cover.queue] = (*incarnations[:at], incarnation, *incarnations[at + 1 :])
    return True


def _drop(queues: Incarnations, changed: Changed, gone: IndexObject) -> None:
    for cover in gone.covers:
        incarnations = changed.get(cover.queue) or queues.get(cover.queue, ())
        if incarnations:
            changed[cover.queue] = tuple(
                replace(incarnation, indexed=without(incarnation.indexed, cover.start, cover.end))
                if incarnation.number == cover.incarnation
                else incarnation
                for incarnation in incarnations
            )


def is_of_use(made: IndexObject, queues: Incarnations) -> bool:
    """Whether anything that it covers can still be read."""
    return any(
        incarnation.number == cover.incarnation
        and max(cover.start, incarnation.min_offset) < min(cover.end, incarnation.commit_offset)
        for cover in made.covers
        for incarnation in queues.get(cover.queue, ())
    )


def _place(incarnations: Sequence[Incarnation], incarnation: int) -> int | None:
    """The last incarnation of this number: those before it were truncated."""
    for at in range(len(incarnations) - 1, -1, -1):
        if incarnations[at].number == incarnation:
            return at
    return None
