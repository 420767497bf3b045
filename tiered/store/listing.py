"""What follows the log: consume queues, the key index, then the registered dispatchers, in this order.

**Contract.** Chunks of the log are taken in log order by one thread, the reput thread or recovery. A record whose queue
offset is listed already is passed over (duplicates are ignored by offset). Consume queues are written behind the log,
so what they list is there. Dispatchers get what was listed, as batches of one queue; one that refuses a batch looks
after itself (``TieredDispatcher`` compensates).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.crashpoints import reached
from tiered.errors import DataError
from tiered.format.block import inner_counts, properties_bytes
from tiered.format.items import (
    BATCH_ITEM,
    BATCH_ITEM_BYTES,
    ITEM_BYTES,
    encode_items,
    fillers,
)
from tiered.format.properties import parse_properties
from tiered.format.sysflag import is_listable
from tiered.local.catalog import SCHEDULE_TOPIC
from tiered.local.chunks import LogChunks, Next
from tiered.local.consumequeues import BatchQueue, PlainQueue
from tiered.local.interface import RecordBatch
from tiered.local.layout import (
    BATCH_DIRECTORY,
    QUEUE_DIRECTORY,
)
from tiered.local.queue_reader import cut_records
from tiered.model import MessageQueue, QueueOffset
from tiered.store.facts import of_block, of_handed
from tiered.store.new_message import delivery_ms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiered.format.block import RecordBlock
    from tiered.local.mapped_file_queue import FileCache, MappedFileQueue
    from tiered.store.disk import RowWriter
    from tiered.store.facts import Facts, Group, StoredHandover
    from tiered.store.keyindex import KeyIndex


Longs = npt.NDArray[np.int64]
Dispatch = Callable[[RecordBatch], bool]
"""Offered the records of one queue; never blocks for long. False: it will fetch them itself."""


class Listing:
    """The followers of one store's log."""

    def __init__(
        self,
        root: str,
        queues: Mapping[MessageQueue, QueueEnd],
        rows: RowWriter,
        index: KeyIndex,
        kinds: QueueKinds,
    ) -> None:
        self.queues = dict(queues)  # where each queue's list ends
        self.duplicates = 0  # records passed over because their queue offset was listed
        self.last_ms = 0  # store time of the last record taken; 0 without one
        self._untold: list[RecordBatch] = []
        self._root = root
        self._rows = rows
        self._index = index
        self._kinds = kinds

    def needs_records(self, facts: Facts) -> bool:
        """Whether what was handed over does not suffice: the log must be read."""
        return any(self._kinds.needs_records(queue.topic) for queue, _ in facts.groups)

    def take(self, facts: Facts, dispatchers: Sequence[Dispatch] = ()) -> None:
        """List the records of a chunk of the log, then call the dispatchers, in order.

        For dispatchers the facts must have their block. After an OSError taking the same chunk again does the rest.
        Dispatchers then hear what they have not heard; all of them hear it all again where one of them failed.
        """
        batches = self._untold
        for queue, indices in facts.groups if dispatchers else self._list_plainly(facts):
            batch = self._list(queue, facts, indices, is_offered=bool(dispatchers))
            if batch is not None:
                batches.append(batch)
        reached("store-listed")
        owners = facts.described.owners
        if len(owners):
            self._index.put(
                facts.described.hashes,
                facts.physical_offsets[owners],
                facts.store_timestamps_ms[owners],
            )
        reached("store-indexed")
        if len(facts):
            self.last_ms = max(self.last_ms, int(facts.store_timestamps_ms.max()))
        for dispatch in dispatchers:
            for batch in batches:
                dispatch(batch)
        batches.clear()

    def _list_plainly(self, facts: Facts) -> list[Group]:
        """Write the items of queues that simply go on, which hardly one does not; the groups of the others.

        What is asked of each record is asked of all at once, so that a queue costs little more than its write.
        """
        groups = facts.groups
        if not groups:
            return []
        order = np.concatenate([indices for _, indices in groups])
        lengths = np.array([len(indices) for _, indices in groups])
        ends = lengths.cumsum()
        firsts = ends - lengths
        offsets = facts.queue_offsets[order]
        is_odd = ~is_listable(facts.sys_flags[order])
        breaks = np.diff(offsets, prepend=offsets[0]) != 1
        breaks[firsts] = False
        is_odd |= breaks
        odd = set(ends.searchsorted(np.flatnonzero(is_odd), "right").tolist())
        tags = facts.described.tag_codes[order]
        items = encode_items(facts.physical_offsets[order], facts.sizes[order], tags)
        left: list[Group] = []
        places = zip(firsts.tolist(), ends.tolist(), offsets[firsts].tolist(), strict=True)
        for number, (first, last, offset) in enumerate(places):
            queue = groups[number][0]
            if number in odd or not self._goes_on(queue, offset):
                left.append(groups[number])
                continue
            data = items[first * ITEM_BYTES : last * ITEM_BYTES]
            end = self.queues[queue]
            folder = end.folder(self._root, queue)
            self._rows.write(folder, end.file_bytes, offset * ITEM_BYTES, data)
            end.next_offset = offset + last - first
        return left

    def _goes_on(self, queue: MessageQueue, offset: int) -> bool:
        """Whether a plain queue's list ends just where ``offset`` is next."""
        end = self.queues.get(queue)
        return (
            end is not None
            and not end.is_new
            and end.unit is None
            and end.next_offset == offset
            and not self._kinds.needs_records(queue.topic)
        )

    def _list(
        self,
        queue: MessageQueue,
        facts: Facts,
        indices: Longs,
        *,
        is_offered: bool,
    ) -> RecordBatch | None:
        """Write a queue's items; the batch of them where it is wanted."""
        indices = indices[is_listable(facts.sys_flags[indices])]
        if not len(indices):
            return None
        offsets = facts.queue_offsets[indices]
        counts = self._kinds.counts(queue.topic, facts, indices)
        end = self.queues.get(queue)
        if end is None:
            end = self.queues[queue] = self._begin(queue, int(offsets[0]))
        fresh = _rising(offsets, counts, end.next_offset)
        self.duplicates += int(len(offsets) - fresh.sum())
        indices, offsets, counts = indices[fresh], offsets[fresh], counts[fresh]
        if not len(indices):
            return None
        tags = self._kinds.tag_codes(queue.topic, facts, indices)
        if end.unit is None:
            items = encode_items(facts.physical_offsets[indices], facts.sizes[indices], tags)
            self._write(queue, end, offsets, items)
        else:
            self._write_units(queue, end, encode_units(facts, indices, counts, tags))
        end.next_offset = int(offsets[-1] + counts[-1])
        if (
            not is_offered
            or facts.block is None
            or end.next_offset - int(offsets[0]) != int(counts.sum())
        ):
            return None
        return _batch(queue, facts.block, indices, counts, tags)

    def begin(self, queue: MessageQueue, offset: int) -> None:
        """Let a plain queue begin at an offset, on the disk; not one that is there."""
        known = self.queues.get(queue)
        if not offset or (known is not None and known.next_offset):
            return
        end = QueueEnd(offset, self._kinds.file_bytes)
        folder = end.folder(self._root, queue)
        # One item at least, which tells where the queue ends when the store is opened.
        lead = offset * ITEM_BYTES % end.file_bytes or end.file_bytes
        items = fillers(lead // ITEM_BYTES)
        self._rows.write(folder, end.file_bytes, offset * ITEM_BYTES - lead, items)
        self.queues[queue] = end

    def _begin(self, queue: MessageQueue, offset: int) -> QueueEnd:
        if self._kinds.is_batch(queue.topic):
            return QueueEnd(offset, self._kinds.batch_file_bytes, is_new=True, unit=0)
        return QueueEnd(offset, self._kinds.file_bytes, is_new=True)

    def _write_units(self, queue: MessageQueue, end: QueueEnd, data: bytes) -> None:
        """Units lie one behind another, whatever queue offsets they name."""
        folder = end.folder(self._root, queue)
        first = end.unit or 0
        self._rows.write(folder, end.file_bytes, first * BATCH_ITEM_BYTES, data)
        end.unit, end.is_new = first + len(data) // BATCH_ITEM_BYTES, False

    def _write(self, queue: MessageQueue, end: QueueEnd, offsets: Longs, data: bytes) -> None:
        folder = end.folder(self._root, queue)
        breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
        for first, last in zip(
            [0, *breaks.tolist()], [*breaks.tolist(), len(offsets)], strict=True
        ):
            start = int(offsets[first]) * ITEM_BYTES
            items = data[first * ITEM_BYTES : last * ITEM_BYTES]
            if end.is_new:
                lead = start % end.file_bytes
                start, items = start - lead, fillers(lead // ITEM_BYTES) + items
            self._rows.write(folder, end.file_bytes, start, items)
            end.is_new = False


def _rising(offsets: Longs, counts: Longs, start: int) -> npt.NDArray[np.bool_]:
    """Which are at or above ``start`` and behind all before them."""
    before = np.maximum.accumulate(np.concatenate(([start], (offsets + counts)[:-1])))
    found: npt.NDArray[np.bool_] = offsets >= before
    return found


def _batch(
    queue: MessageQueue, block: RecordBlock, indices: Longs, counts: Longs, tags: Longs
) -> RecordBatch:
    data, positions = cut_records(block, indices)
    start = int(block.queue_offsets[indices[0]])
    if int(counts.max()) > 1:  # the messages of an inner batch share its record
        indices, positions, tags = (np.repeat(each, counts) for each in (indices, positions, tags))
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(start),
        data=data,
        positions=positions,
        sizes=block.sizes[indices],
        tag_codes=tags,
        store_timestamps_ms=block.store_timestamps_ms[indices],
        physical_offsets=block.physical_offsets[indices],
    )


_CHUNK_BYTES: Final = 1 << 20
_MESSAGES_MAX: Final = 1 << 13


class Reput:
    """The reput thread's work: following the log up to the confirmed end, a chunk at a time.

    **Contract.** Nothing at or above ``confirmed()`` is ever listed or dispatched. ``position`` moves once a chunk has
    been taken whole; taking it again after an error does no harm. For one thread.
    """

    def __init__(
        self,
        log: MappedFileQueue,
        listing: Listing,
        handover: StoredHandover,
        position: int,
        confirmed: Callable[[], int],
    ) -> None:
        self.position = position  # physical offset of the next record to list
        self.dispatchers: list[Dispatch] = []  # called in order with what was listed
        self._log = log
        self._listing = listing
        self._handover = handover
        self._confirmed = confirmed
        self._chunks = LogChunks(log)

    def step(self) -> bool:
        """Take one chunk; False when there is none."""
        limit = self._confirmed()
        if self.position >= limit:
            return False
        dispatchers = tuple(self.dispatchers)
        if dispatchers:  # they want the records themselves
            self._handover.stop()
        else:
            handed = self._handover.take(self.position, limit, _MESSAGES_MAX)
            facts = of_handed(handed) if handed else None
            if facts is not None and not self._listing.needs_records(facts):
                self._listing.take(facts)
                self.position = handed[-1].end
                return True
            if handed:
                limit = handed[-1].end
            following = self._handover.peek()
            if following is not None and following.begin > self.position:
                limit = min(limit, following.begin)
        return self._read(limit, dispatchers)

    def is_cut(self, limit: int) -> bool:
        """Whether ``limit`` lies within the record at ``position``: a replica acknowledges bytes, not records."""
        position = self.position  # who closes the store asks while the reput thread goes on
        if self._log.base_of(position) is None:
            self._log.rescan()
        size = int.from_bytes(self._log.read(position, 4), "big")
        room = self._log.file_bytes - position % self._log.file_bytes
        return 0 < limit - position < size <= room

    def _read(self, limit: int, dispatchers: Sequence[Dispatch]) -> bool:
        """Take a chunk from the log itself; False when no whole record lies below ``limit``."""
        if self._log.base_of(self.position) is None:
            self._log.rescan()
        chunk = self._chunks.read(
            self.position, limit, _CHUNK_BYTES, check_crc=False, check_place=False
        )
        if len(chunk.block):
            self._listing.take(of_block(chunk.block), dispatchers)
        elif chunk.follows is not Next.FILE and self.is_cut(limit):
            return False
        elif chunk.follows in {Next.NOTHING, Next.BROKEN}:
            raise DataError(
                f"no record at {chunk.end}, where one was appended", where=self._log.directory
            )
        self.position = chunk.end
        if chunk.follows is Next.FILE:
            self.position = -(-chunk.end // self._log.file_bytes) * self._log.file_bytes
        return True


# -- kinds of queues, and where they go on ---------------------------------------------------------
#
# Pure but for reads of ``BatchQueue``. Only for topics of a special kind are the records' own properties looked into, one by
# one.


@dataclass(frozen=True, slots=True)
class QueueKinds:
    """What kind of consume queues a topic has."""

    is_batch: Callable[[str], bool]  # whether a topic's are batch queues
    delays_ms: tuple[int, ...]  # of the delay levels, the first of level 1
    file_bytes: int  # length of a new plain queue's files
    batch_file_bytes: int  # length of a new batch queue's files

    def needs_records(self, topic: str) -> bool:
        """Whether a topic's lists say more of a record than was handed over with it."""
        return topic == SCHEDULE_TOPIC or self.is_batch(topic)

    def counts(self, topic: str, facts: Facts, indices: Longs) -> Longs:
        """int64[n]: queue offsets that each record takes."""
        if facts.block is None or not self.is_batch(topic):
            return np.ones(len(indices), np.int64)
        return inner_counts(facts.block)[indices].astype(np.int64)

    def tag_codes(self, topic: str, facts: Facts, indices: Longs) -> Longs:
        """int64[n]: what the list says of each record's tags; of delayed ones when they are to be delivered (UTC ms)."""
        codes: Longs = facts.described.tag_codes[indices]
        if facts.block is None or topic != SCHEDULE_TOPIC:
            return codes
        return self._delivery_codes(facts.block, indices, codes)

    def _delivery_codes(self, block: RecordBlock, indices: Longs, codes: Longs) -> Longs:
        found = codes.copy()
        for at, number in enumerate(indices.tolist()):
            properties = parse_properties(properties_bytes(block, number))
            stored_ms = int(block.store_timestamps_ms[number])
            due_ms = delivery_ms(properties, stored_ms, self.delays_ms)
            found[at] = codes[at] if due_ms is None else due_ms
        return found


def encode_units(facts: Facts, indices: Longs, counts: Longs, tag_codes: Longs) -> bytes:
    """The units of a batch queue for records."""
    units = np.zeros(len(indices), BATCH_ITEM)
    units["physical_offset"] = facts.physical_offsets[indices]
    units["size"] = facts.sizes[indices]
    units["tag_code"] = tag_codes
    units["store_timestamp_ms"] = facts.store_timestamps_ms[indices]
    units["base_offset"] = facts.queue_offsets[indices]
    units["count"] = counts
    units["compacted_offset"] = -1
    return units.tobytes()


@dataclass(slots=True)
class QueueEnd:
    """Where a queue goes on."""

    next_offset: int  # queue offset of its next message
    file_bytes: int  # size of its files
    is_new: bool = False  # it has no item yet, and so no file
    unit: int | None = None  # number of the next unit of a batch queue; None of a plain one

    def folder(self, root: str, queue: MessageQueue) -> str:
        """Where its files are in a store."""
        kind = QUEUE_DIRECTORY if self.unit is None else BATCH_DIRECTORY
        return f"{root}/{kind}/{queue.topic}/{queue.queue_id}"

    def opened(self, cache: FileCache, root: str, queue: MessageQueue) -> PlainQueue | BatchQueue:
        """Its files, to be read."""
        made = PlainQueue if self.unit is None else BatchQueue
        return made(cache, self.folder(root, queue), self.file_bytes)
