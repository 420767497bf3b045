"""What a state names: objects, and the parts that lie in each bundle. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from tiered.log.takeback import is_tail

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from tiered.log.parts import Bundle, Part, QueueLife, Segment, TierState
    from tiered.model import MessageQueue


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A part, and where it stands in the state.

    Attributes:
        queue: Whose.
        number: Of the life among the queue's lives.
        life: That life.
        segment: Base log offset of its segment.
        part: It.
        taken_back: The life is what the broker took back.
    """

    queue: MessageQueue
    number: int
    life: QueueLife
    segment: int
    part: Part
    taken_back: bool


def named_bundles(state: TierState) -> dict[str, Bundle]:
    """Every bundle that parts lie in, by its key below the prefix."""
    known: dict[int, Bundle] = {}  # by identity first: parts share their bundle nearly always
    for segment in _segments(state):
        bundles = segment.parts.bundles
        known.update(zip(map(id, bundles), bundles, strict=True))
    return {bundle.key: bundle for bundle in known.values()}


def named_objects(state: TierState) -> dict[str, int]:
    """Size of every bundle and index object that is named, by its key below the prefix."""
    sizes = {key: bundle.size_bytes for key, bundle in named_bundles(state).items()}
    return sizes | {one.place.key: one.place.object_bytes for one in state.indexes}


def parts_by_bundle(
    state: TierState, keys: Container[str] | None = None
) -> Iterator[tuple[Bundle, list[NamedPart]]]:
    """The parts of each bundle, in the order of their keys; each bundle's as they lie in it.

    Args:
        state: The state.
        keys: Of these bundles only; None: of all.
    """
    wanted = {
        key: number
        for number, key in enumerate(sorted(named_bundles(state)))
        if keys is None or key in keys
    }
    places = list(_places(state))
    of_bundle, of_place, at = _columns(places, wanted)
    order = np.lexsort((at, of_bundle))
    of_bundle, of_place, at = of_bundle[order], of_place[order], at[order]
    borders = np.flatnonzero(np.diff(of_bundle, prepend=-2, append=-2))
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        rows = zip(of_place[begin:end].tolist(), at[begin:end].tolist(), strict=True)
        found = [places[place].named(row) for place, row in rows]
        found.sort(key=lambda one: (one.part.section.start, one.part.items_at))
        yield found[0].part.bundle, found


@dataclass(frozen=True, slots=True)
class _Place:
    queue: MessageQueue
    number: int
    life: QueueLife
    segment: Segment
    taken_back: bool

    def named(self, row: int) -> NamedPart:
        part = self.segment.parts[row]
        base = self.segment.base_offset
        return NamedPart(self.queue, self.number, self.life, base, part, self.taken_back)


def _places(state: TierState) -> Iterator[_Place]:
    for queue, lives in state.queues.items():
        for number, life in enumerate(lives):
            for segment in life.segments:
                yield _Place(queue, number, life, segment, is_tail(lives, number))


Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def _columns(places: list[_Place], wanted: dict[str, int]) -> Columns:
    """For each part its bundle's number, its place's, and its row there."""
    counts = np.array([len(place.segment.parts) for place in places], np.int64)
    every = chain.from_iterable(place.segment.parts.bundles for place in places)
    of_bundle = np.fromiter(
        (wanted.get(bundle.key, -1) for bundle in every), np.int64, int(counts.sum())
    )
    of_place = np.repeat(np.arange(len(places)), counts)
    at = np.arange(len(of_bundle)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_wanted = of_bundle >= 0
    return of_bundle[is_wanted], of_place[is_wanted], at[is_wanted]


def _segments(state: TierState) -> Iterator[Segment]:
    for lives in state.queues.values():
        for life in lives:
            yield from life.segments
