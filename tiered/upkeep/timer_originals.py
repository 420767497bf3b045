"""Records of timers again from the broker's store, as they stand in an hour's file: for ``verify --timers --repair``.

Nothing says which record of the broker's an item of the file was, but what is left of the file: sound records have the
broker's physical offset still, and sound items their due time. Of the same hour the file has them in the broker's order,
as far as one import took them. So what is lost between two sound ones is looked for between these two in the broker's log.
That is a guess; the checksum that the journal has of the section is what proves it (``tiered.upkeep.repair``).

Memory: five numbers for each record of the timer topics that is due in a damaged hour, and one part.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.errors import ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from tiered.format.block import bytes_at
from tiered.format.record import QUEUE_OFFSET_AT
from tiered.local.catalog import TIMER_TOPICS
from tiered.log.flat_file import encode_items
from tiered.log.reader import DAMAGED_OR_GONE, QueueReader
from tiered.log.salvage import salvage
from tiered.log.timers import HOUR_MS
from tiered.model import QueueOffset
from tiered.upkeep.repair import PartBytes
from timer.hour_files import place_records
from timer.records import read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectStore
    from tiered.local.interface import LocalStore
    from tiered.log.history import NamedPart
    from tiered.log.parts import Incarnation, Part
    from tiered.model import MessageQueue
    from timer.records import Longs, TimerRows

_READ_BYTES: Final = 8 << 20
_READ_COUNT: Final = 1 << 16
_GONE: Final = "the local store has not all of these timers any more"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A record of the broker's that is due in an hour."""

    physical: int
    due: int
    source: MessageQueue
    offset: int


@dataclass(frozen=True, slots=True)
class _Item:
    """What is known of an item of the file: the physical offset of its record, and its due time; -1: not known."""

    physical: int = -1
    due: int = -1


class TimerOriginals:
    """Finds the records of damaged parts in a broker's store. For one thread."""

    def __init__(self, store: ObjectStore, prefix: str, local: LocalStore) -> None:
        """Read nothing yet.

        Args:
            local: The broker's store, opened with its timers.
        """
        self._store, self._prefix, self._local = store, prefix, local
        self._hours: dict[int, list[_Candidate]] = {}

    def part(self, one: NamedPart) -> PartBytes | str:
        """A part's records and items; or why they can't be had."""
        hour = one.queue.queue_id
        if hour not in self._hours:
            self._hours[hour] = sorted(self._candidates(hour), key=lambda found: found.physical)
        known = list(self._known(one.queue, one.part))
        others = self._others(one.queue, one.incarnation, one.part)
        chosen = _matched(self._hours[hour], known, others)
        return _GONE if chosen is None else self._bytes(one, chosen)

    def _candidates(self, hour: int) -> Iterator[_Candidate]:
        for queue, bounds in sorted(self._local.queues().items()):
            at = bounds.min
            while queue.topic in TIMER_TOPICS and at < bounds.end:
                rows = self._rows(queue, at, _READ_COUNT)
                if rows is None:
                    break
                batch = rows.batch
                for number in np.flatnonzero(rows.dues // HOUR_MS == hour).tolist():
                    yield _Candidate(
                        int(batch.physical_offsets[number]),
                        int(rows.dues[number]),
                        queue,
                        int(batch.base_offset) + number,
                    )
                at = batch.end_offset

    def _rows(self, queue: MessageQueue, at: int, count: int) -> TimerRows | None:
        batch = self._local.read(queue, QueueOffset(at), bytes_max=_READ_BYTES, count_max=count)
        return None if batch is None or not batch.count else read_rows(batch)

    def _known(self, queue: MessageQueue, part: Part) -> Iterator[_Item]:
        """What is left of a part, item by item."""
        try:
            found = salvage(
                self._store, self._prefix, queue, part, start=part.queue_offset, end=part.queue_end
            )
        except ObjectNotFoundError:
            found = None
        if found is None or found.batch is None:
            yield from (_Item() for _ in range(part.count))
            return
        records, lost = found.batch.records, set[int]()
        for low, high in found.lost:
            lost.update(range(low, high))
        tags = iter(found.lost_tags.tolist() if found.lost_tags is not None else ())
        for number in range(part.count):
            if part.queue_offset + number in lost:
                yield _Item(due=next(tags, -1))
            else:
                physical, due = records.physical_offsets[number], records.tag_codes[number]
                yield _Item(int(physical), int(due))

    def _others(self, queue: MessageQueue, incarnation: Incarnation, part: Part) -> set[int]:
        """Physical offsets of what is sound of the file's other parts."""
        reader = QueueReader.of_incarnation(self._store, self._prefix, queue, incarnation)
        found: set[int] = set()
        for ends in (
            (incarnation.min_offset, part.queue_offset),
            (part.queue_end, incarnation.commit_offset),
        ):
            sound = reader.past_damage(*ends, lambda _: None, damage=DAMAGED_OR_GONE)
            for batch in sound:
                found.update(batch.records.physical_offsets.tolist())
        return found

    def _bytes(self, one: NamedPart, chosen: list[_Candidate]) -> PartBytes | str:
        """The records of a part as they stand in its file."""
        records: dict[tuple[MessageQueue, int], bytes] = {}
        dues: Longs = np.array([found.due for found in chosen], np.int64)
        for queue in {found.source for found in chosen}:
            wanted = sorted(found.offset for found in chosen if found.source == queue)
            for offset, record in self._placed(queue, wanted, one.queue.queue_id):
                records[queue, offset] = record
        chunks = [records.get((found.source, found.offset), b"") for found in chosen]
        if not all(chunks):
            return _GONE
        sizes = np.array([len(chunk) for chunk in chunks], np.int32)
        starts = np.cumsum(sizes, dtype=np.int64) - sizes
        log = bytearray(b"".join(chunks))
        numbers = one.part.queue_offset + np.arange(len(chunks))
        bytes_at(log, ">i8")[starts + QUEUE_OFFSET_AT] = numbers
        return PartBytes(log, encode_items(one.part.log_offset + starts, sizes, dues))

    def _placed(
        self, queue: MessageQueue, wanted: list[int], hour: int
    ) -> Iterator[tuple[int, bytes]]:
        """Records of one queue of the broker's as they stand in an hour's file, but for their queue offsets."""
        left = wanted
        while left:
            rows = self._rows(queue, left[0], _READ_COUNT)
            if rows is None:
                return
            base, end = int(rows.batch.base_offset), int(rows.batch.end_offset)
            some = [offset for offset in left if base <= offset < end]
            if not some:
                return
            left = left[len(some) :]
            made = place_records(rows, np.array(some) - base, hour, QueueOffset(0))
            ends = made.positions + made.sizes
            pairs = zip(made.positions.tolist(), ends.tolist(), strict=True)
            for offset, (low, high) in zip(some, pairs, strict=True):
                yield offset, bytes(memoryview(made.data)[low:high])


def _matched(
    candidates: list[_Candidate], known: list[_Item], others: set[int]
) -> list[_Candidate] | None:
    """For each item of a part its record; None: one has none. Pure.

    A sound one is its own; a lost one the next behind the one before, in the broker's order, that is due when the item says,
    if it says so, and that is not another's.
    """
    by_physical = {found.physical: found for found in candidates}
    taken = others | {item.physical for item in known}
    chosen: list[_Candidate] = []
    for item in known:
        if item.physical >= 0:
            own = by_physical.get(item.physical)
        else:
            after = chosen[-1].physical if chosen else -1
            own = _next(candidates, item, after, taken) or _next(candidates, item, -1, taken)
        if own is None:
            return None
        taken.add(own.physical)
        chosen.append(own)
    return chosen


def _next(
    candidates: list[_Candidate], item: _Item, after: int, taken: set[int]
) -> _Candidate | None:
    low = bisect_right(candidates, after, key=lambda found: found.physical)
    for at in range(low, len(candidates)):
        found = candidates[at]
        if found.physical not in taken and item.due in {-1, found.due}:
            return found
    return None
