"""Candidates for the parts of a rebuilt tier, and the choice among them. Pure; ``tiered.log.rebuild`` says how and why."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from typing_extensions import Buffer

from backends.errors import BackendError
from tiered.errors import DataError
from tiered.format.consume_queue import ITEM_BYTES
from tiered.log.consume_queue import ITEM
from tiered.log.parts import ObjectRange, Part
from tiered.log.takeback import is_tail
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tiered.log.described import Described
    from tiered.log.parts import QueueLife, TierState

LifeKey = tuple[MessageQueue, int]
"""A queue and the number of one of its lives."""
Items = Callable[[ObjectRange], Buffer]
"""Reads a range of a consume-queue object; a ``DataError`` or ``BackendError`` when it can not be read."""


class Candidate(NamedTuple):
    """A part that objects could make, and its age.

    Attributes:
        rank: Generation, sequence, and whether the readable journal names it: the greater is the newer.
        part: The part.
        segment: Base log offset of its segment.
        is_merged: It was made by sealing.
        joined: Queue offsets of the segment that sealing made of several; (0, 0) else.
        modified_ms: When the store got its index; -1 when it does not say.
    """

    rank: tuple[int, int, bool]
    part: Part
    segment: int
    is_merged: bool
    joined: tuple[int, int]
    modified_ms: int


# -- candidates ---------------------------------------------------------------------------------


def pair_up(
    objects: Sequence[Described], without: Container[str] = frozenset()
) -> dict[LifeKey, list[Candidate]]:
    """Join each index object (but those in ``without``) with the commit-log object that it names."""
    logs = {found.key: found for found in objects if found.said.kind == "commitlog"}
    candidates: dict[LifeKey, list[Candidate]] = defaultdict(list)
    for index in objects:
        log = logs.get(index.log_key) if index.said.kind == "consumequeue" else None
        if log is not None and index.key not in without and _belong(log, index):
            life = (index.said.queue, index.said.incarnation)
            candidates[life].append(_candidate(log, index))
    return candidates


def _belong(log: Described, index: Described) -> bool:
    def what(one: Described) -> tuple[object, ...]:
        place = (one.said.queue, one.said.incarnation, one.segment, one.log_offset)
        return (*place, one.queue_offset, one.count, one.store_min_ms, one.store_max_ms)

    whole = index.count > 0 and index.payload_bytes == index.count * ITEM_BYTES
    return whole and log.crc == index.log_crc and what(log) == what(index)


def _candidate(log: Described, index: Described) -> Candidate:
    made = index.said.object_id
    part = Part(
        _place(log),
        _place(index),
        LogOffset(log.log_offset),
        QueueOffset(index.queue_offset),
        index.count,
        index.holes,
        index.store_min_ms,
        index.store_max_ms,
    )
    rank = (made.generation, made.sequence, False)
    return Candidate(rank, part, index.segment, index.is_merged, index.joined, index.modified_ms)


def _place(one: Described) -> ObjectRange:
    size = one.payload_bytes
    return ObjectRange(one.key, 0, size, size, one.trailer_bytes, one.crc, one.packed_bytes)


def add_known(
    candidates: dict[LifeKey, list[Candidate]], known: TierState, objects: Mapping[str, Described]
) -> None:
    """Add the parts that the readable journal names, perhaps ranges of objects, if their objects are there."""
    for queue, lives in known.queues.items():
        for number, life in enumerate(lives):
            if not is_tail(lives, number):
                candidates[queue, life.incarnation] += _known(life, objects)


def _known(life: QueueLife, objects: Mapping[str, Described]) -> Iterator[Candidate]:
    for segment in life.segments:
        for part in segment.parts:
            index = objects.get(part.index.key)
            if index is not None and is_there(objects, part):
                made = index.said.object_id
                rank = (made.generation, made.sequence, True)
                yield Candidate(rank, part, segment.base_offset, index.is_merged, index.joined, -1)


def is_there(objects: Mapping[str, Described], part: Part) -> bool:
    """Whether both objects of a part are there."""
    return all(
        (one := objects.get(place.key)) is not None
        and (one.payload_bytes, one.crc) == (place.payload_bytes, place.crc)
        for place in (part.log, part.index)
    )


# -- choice -------------------------------------------------------------------------------------


def choose(
    candidates: Sequence[Candidate],
    queue: MessageQueue,
    incarnation: int,
    known: TierState,
    items: Items,
) -> list[Candidate]:
    """The newest that do not overlap, in the order of their queue offsets.

    Args:
        candidates: Of one life.
        queue: Whose.
        incarnation: Which life.
        known: What the readable beginning of the journal says.
        items: Reads items, to cut a part whose end was taken back; asked for nothing else.
    """
    chosen: list[Candidate] = []
    starts: list[int] = []
    able = [one for one in candidates if _may_be_history(one, queue, incarnation, known)]
    reigns = _Reigns(able)
    for one in sorted(able, key=lambda found: (found.rank, found.part.index.key))[::-1]:
        if not one.is_merged and reigns.take_back(one):
            continue
        at = bisect_right(starts, one.part.queue_offset)
        for fitting in _whole_or_head(one, chosen[at : at + 1], items):
            if _fits(fitting.part, chosen[at - 1 : at], chosen[at : at + 1]):
                starts.insert(at, fitting.part.queue_offset)
                chosen.insert(at, fitting)
                break
    return chosen


class _Reigns:
    """Where each reign began to write, so that what an older one had made behind that is known to be no history."""

    def __init__(self, able: Sequence[Candidate]) -> None:
        lows: dict[int, int] = {}
        for one in able:
            if not one.is_merged:  # merging is no going on
                generation, low = one.rank[0], one.part.queue_offset
                lows[generation] = min(low, lows.get(generation, low))
        self._generations = sorted(lows)
        latest_first = [lows[generation] for generation in reversed(self._generations)]
        self._lows = list(accumulate(latest_first, min))[
            ::-1
        ]  # of this generation and all later ones

    def take_back(self, one: Candidate) -> bool:
        """Whether a later reign began to write at or below its first offset."""
        at = bisect_right(self._generations, one.rank[0])
        return at < len(self._lows) and self._lows[at] <= one.part.queue_offset


def _whole_or_head(
    one: Candidate, behind: Sequence[Candidate], items: Items
) -> Iterator[Candidate]:
    yield one
    part = one.part
    newer = behind[0].part if behind else None
    if newer is not None and part.queue_offset < newer.queue_offset < part.queue_end:
        head = head_of(part, newer.queue_offset, newer.log_offset, items)
        if head is not None:
            yield one._replace(part=head)


def head_of(part: Part, end: QueueOffset, log_end: LogOffset, items: Items) -> Part | None:
    """A part's items before ``end``, by reference; None unless exactly their records end at ``log_end``."""
    count = end - part.queue_offset
    log_bytes = log_end - part.log_offset
    index = replace(part.index, end=part.index.start + count * ITEM_BYTES)
    try:
        found = np.frombuffer(memoryview(items(index)), ITEM)
    except (DataError, BackendError):
        return None
    sizes, ends = found["size"], found["log_offset"] + found["size"]
    real = sizes > 0
    if len(found) != count or int(ends[real].max(initial=part.log_offset)) != log_end:
        return None
    holes = count - int(np.count_nonzero(real))
    return replace(
        part,
        log=replace(part.log, end=part.log.start + log_bytes),
        index=index,
        count=count,
        holes=holes,
        store_min_ms=part.store_min_ms if holes < count else -1,
        store_max_ms=part.store_max_ms if holes < count else -1,
    )


def _fits(part: Part, before: Sequence[Candidate], behind: Sequence[Candidate]) -> bool:
    """Whether it overlaps neither neighbour, in queue offsets and in log offsets, and meets them in both or in none."""
    row = [one.part for one in before] + [part] + [one.part for one in behind]
    return all(
        one.queue_end <= two.queue_offset
        and one.log_end <= two.log_offset
        and (one.queue_end < two.queue_offset or one.log_end == two.log_offset)
        for one, two in pairwise(row)
    )


def _may_be_history(
    one: Candidate, queue: MessageQueue, incarnation: int, known: TierState
) -> bool:
    """Whether the readable journal leaves it open that a later entry named this."""
    generation, _, is_named = one.rank
    lives = known.queues.get(queue, ())
    life = known_life(known, queue, incarnation)
    if is_named:
        return True
    if life is None:  # it had not begun, or was deleted, when the readable journal ends
        later = not lives or incarnation > lives[-1].incarnation
        return later and generation >= known.generation
    if one.part.queue_end <= life.min_offset:
        return False  # expired
    if one.part.queue_end <= life.commit_offset:
        return True  # merged since, or what had been merged
    return generation >= known.generation and not life.ended


def known_life(known: TierState, queue: MessageQueue, incarnation: int) -> QueueLife | None:
    """A life that the readable journal knows; of those with this number the one that went on."""
    lives = known.queues.get(queue, ())
    return next((life for life in lives[::-1] if life.incarnation == incarnation), None)
