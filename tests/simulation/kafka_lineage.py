"""Leaders and transactions once more, as plainly as can be: by a walk over records, and by what entries say of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from simulation.contents import GAP
from simulation.kafka_batches import head_of, is_abort, is_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Opened = dict[int, int]
"""First offset of the open transaction of each producer."""
Aborted = tuple[int, int, int]
"""Producer, first offset, offset of the marker."""


@dataclass(frozen=True)
class Said:
    """What is known of an incarnation's lineage; see ``tiered.log.parts.LineageFacts``."""

    topic_id: str = ""
    epochs: tuple[tuple[int, int], ...] = ()
    opened: tuple[tuple[int, int], ...] = ()
    aborted: tuple[Aborted, ...] = ()
    is_sure: bool = True

    def grown(self, action: dict[str, Any]) -> Said:
        """With what an entry adds."""
        epochs, opened, aborted = (
            tuple(map(_row, action[name])) for name in ("epochs", "opened", "aborted")
        )
        return Said(action["topic_id"], (*self.epochs, *epochs), opened, (*self.aborted, *aborted))

    def moved(self, end: int) -> Said:
        """When the end of the queue is another: what was decided behind it is open again."""
        again = [(who, first) for who, first, last in self.aborted if first < end <= last]
        opened = {*again, *((who, first) for who, first in self.opened if first < end)}
        return replace(
            self,
            epochs=tuple(one for one in self.epochs if one[1] < end),
            opened=tuple(sorted(opened)),
            aborted=tuple(one for one in self.aborted if one[2] < end),
            is_sure=False,
        )

    def expired(self, low: int) -> Said:
        """When what is below ``low`` was given up."""
        before = [one for one in self.epochs if one[1] <= low][-1:]
        return replace(
            self,
            epochs=(*before, *(one for one in self.epochs if one[1] > low)),
            aborted=tuple(one for one in self.aborted if one[2] >= low),
        )


def _row(one: Any) -> tuple[Any, ...]:
    return tuple(one.values() if isinstance(one, dict) else one)


@dataclass
class Walk:
    """What is known behind some records."""

    opened: Opened = field(default_factory=dict)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    aborted: list[Aborted] = field(default_factory=list)

    def take(self, offset: int, record: bytes) -> None:
        """The record at an offset; again at each that it covers, which changes nothing."""
        if not is_batch(record):
            return
        head = head_of(record)
        if not self.epochs or self.epochs[-1][0] != head.leader_epoch:
            self.epochs.append((head.leader_epoch, offset))
        if head.is_control:
            first = self.opened.pop(head.producer_id, None)
            if first is not None and is_abort(record):
                self.aborted.append((head.producer_id, first, head.base_offset))
        elif head.is_transactional:
            self.opened.setdefault(head.producer_id, head.base_offset)


def walk(
    course: Iterable[tuple[int, bytes]], open_at: Callable[[int], Opened], start: int | None = None
) -> Walk:
    """Follow records from the first; where one does not follow another, the store says what is open."""
    found, at = Walk(), start
    for offset, record in course:
        if record == GAP:
            at = None
            continue
        if at != offset:
            found.opened = dict(open_at(offset))
        found.take(offset, record)
        at = offset + 1
    return found
