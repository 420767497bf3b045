"""What the journal says of index objects, and what it means for the queues. Pure.

An index object covers, of each queue named, a row of queue offsets: every message there has its keys in the object. What is
covered of a life grows from its minimum without a hole (``indexed_to`` says how far): an action whose rows do not begin
exactly there, or that names a life that is none, changes nothing, whoever wrote it. Nor does one whose messages were read
before an end of the queue was last truncated (``last_cut``): other messages may stand there now. So nothing is ever left
out for good: a new epoch, or whoever makes indexes again, goes on at ``indexed_to``.

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
    from tiered.log.parts import IndexObject, QueueLife
    from tiered.model import MessageQueue

    Lives = Mapping[MessageQueue, tuple[QueueLife, ...]]
    Changed = dict[MessageQueue, tuple[QueueLife, ...]]


def index_action(made: Iterable[IndexObject], drop: Sequence[str] = ()) -> Action:
    """The action that names index objects.

    Args:
        made: What is new, in the order in which it covers.
        drop: Keys of index objects that are given up, before that.
    """
    return action_of(Indexed(tuple(made), tuple(drop)))


def uncovered(life: QueueLife) -> list[tuple[int, int]]:
    """The queue offsets ``[start, end)`` of a life that no index covers, in order."""
    holes: list[tuple[int, int]] = []
    at: int = life.min_offset
    for start, end in life.indexed:
        if at < start:
            holes.append((at, min(start, life.commit_offset)))
        at = max(at, end)
    if at < life.commit_offset:
        holes.append((at, life.commit_offset))
    return holes


def indexed_to(life: QueueLife) -> QueueOffset:
    """Up to where a life is covered without a hole."""
    holes = uncovered(life)
    return QueueOffset(holes[0][0]) if holes else life.commit_offset


def last_cut(lives: Sequence[QueueLife], incarnation: int) -> int:
    """Number of the last entry that has taken an end of an incarnation back; 0: none has."""
    return max((life.cut_by for life in lives if life.incarnation == incarnation), default=0)


def after_index(
    indexes: Sequence[IndexObject], queues: Lives, said: Indexed
) -> tuple[tuple[IndexObject, ...], Lives] | None:
    """What an ``index`` action makes of index objects and queues (the changed ones); None when it does not fit."""
    drop = set(said.drop)
    kept = [one for one in indexes if one.place.key not in drop]
    if len(indexes) - len(kept) != len(drop):
        return None
    changed: dict[MessageQueue, tuple[QueueLife, ...]] = {}
    for one in indexes:
        if one.place.key in drop:
            _drop(queues, changed, one)
    if not all(_name(queues, changed, one) for one in said.objects):
        return None
    return (*kept, *said.objects), changed


def _name(queues: Lives, changed: Changed, made: IndexObject) -> bool:
    for cover in made.covers:
        lives = changed.get(cover.queue) or queues.get(cover.queue, ())
        at = _place(lives, cover.incarnation)
        holes = uncovered(lives[at]) if at is not None else []
        if at is None or not holes:
            return False
        start, end = holes[0]
        if cover.start != start or not start < cover.end <= end:
            return False
        if cover.cut_by != last_cut(lives, cover.incarnation):
            return False
        life = replace(lives[at], indexed=joined((*lives[at].indexed, (start, cover.end))))
        changed[cover.queue] = (*lives[:at], life, *lives[at + 1 :])
    return True


def _drop(queues: Lives, changed: Changed, gone: IndexObject) -> None:
    for cover in gone.covers:
        lives = changed.get(cover.queue) or queues.get(cover.queue, ())
        if lives:
            changed[cover.queue] = tuple(
                replace(life, indexed=without(life.indexed, cover.start, cover.end))
                if life.incarnation == cover.incarnation
                else life
                for life in lives
            )


def is_of_use(made: IndexObject, queues: Lives) -> bool:
    """Whether anything that it covers can still be read."""
    return any(
        life.incarnation == cover.incarnation
        and max(cover.start, life.min_offset) < min(cover.end, life.commit_offset)
        for cover in made.covers
        for life in queues.get(cover.queue, ())
    )


def _place(lives: Sequence[QueueLife], incarnation: int) -> int | None:
    """The last life of an incarnation: those before it were truncated."""
    for at in range(len(lives) - 1, -1, -1):
        if lives[at].incarnation == incarnation:
            return at
    return None
