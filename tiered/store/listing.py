"""What follows the log: consume queues, the key index, then the registered dispatchers, in this order.

**Contract.** Pieces of the log are taken in log order by one thread, the reput thread or recovery. A record whose queue
offset is listed already is passed over (duplicates are ignored by offset). Consume queues are written behind the log,
so what they list is there. Dispatchers get what was listed, as batches of one queue; one that refuses a batch looks
after itself (``TieredDispatcher`` compensates).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tiered.crashpoints import reached
from tiered.format.consume_queue import BATCH_ITEM_BYTES, ITEM_BYTES, encode_items, fillers
from tiered.format.sysflag import TRANSACTION_COMMIT, TRANSACTION_MASK, TRANSACTION_NONE
from tiered.local.batches import cut_records
from tiered.local.face import RecordBatch
from tiered.local.layout import BATCH_DIRECTORY, QUEUE_DIRECTORY
from tiered.model import MessageQueue, QueueOffset
from tiered.store.kinds import encode_units
from tiered.store.startup import QueueEnd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiered.format.block import RecordBlock
    from tiered.store.facts import Facts
    from tiered.store.keyindex import KeyIndex
    from tiered.store.kinds import QueueKinds
    from tiered.store.rows import RowWriter

Longs = npt.NDArray[np.int64]
Dispatch = Callable[[RecordBatch], bool]
"""Offered the records of one queue; never blocks for long. False: it will fetch them itself."""


class Listing:
    """The followers of one store's log.

    Attributes:
        queues: Where each queue's list ends.
        duplicates: Records passed over because their queue offset was listed.
        last_ms: Store time of the last record taken; 0 without one.
    """

    def __init__(
        self,
        root: str,
        queues: Mapping[MessageQueue, QueueEnd],
        rows: RowWriter,
        index: KeyIndex,
        kinds: QueueKinds,
    ) -> None:
        self.queues = dict(queues)
        self.duplicates = 0
        self.last_ms = 0
        self._root = root
        self._rows = rows
        self._index = index
        self._kinds = kinds

    def needs_records(self, facts: Facts) -> bool:
        """Whether what was handed over does not suffice: the log must be read."""
        return any(self._kinds.needs_records(queue.topic) for queue, _ in facts.groups)

    def take(self, facts: Facts, dispatchers: Sequence[Dispatch] = ()) -> None:
        """List the records of a piece of the log.

        Args:
            facts: What is to be listed, in log order.
            dispatchers: Called last, in order; then the facts must have their block.

        Raises:
            OSError: The disk refused it; taking the same piece again does the rest.
        """
        batches: list[RecordBatch] = []
        for queue, indices in facts.groups:
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

    def _list(
        self,
        queue: MessageQueue,
        facts: Facts,
        indices: Longs,
        *,
        is_offered: bool,
    ) -> RecordBatch | None:
        """Write a queue's items; the batch of them where it is wanted."""
        kinds = facts.sys_flags[indices] & TRANSACTION_MASK
        indices = indices[(kinds == TRANSACTION_NONE) | (kinds == TRANSACTION_COMMIT)]
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

    def _begin(self, queue: MessageQueue, offset: int) -> QueueEnd:
        if self._kinds.is_batch(queue.topic):
            return QueueEnd(offset, self._kinds.batch_file_bytes, is_new=True, unit=0)
        return QueueEnd(offset, self._kinds.file_bytes, is_new=True)

    def _write_units(self, queue: MessageQueue, end: QueueEnd, data: bytes) -> None:
        """Units lie one behind another, whatever queue offsets they name."""
        folder = f"{self._root}/{BATCH_DIRECTORY}/{queue.topic}/{queue.queue_id}"
        first = end.unit or 0
        self._rows.write(folder, end.file_bytes, first * BATCH_ITEM_BYTES, data)
        end.unit, end.is_new = first + len(data) // BATCH_ITEM_BYTES, False

    def _write(self, queue: MessageQueue, end: QueueEnd, offsets: Longs, data: bytes) -> None:
        folder = f"{self._root}/{QUEUE_DIRECTORY}/{queue.topic}/{queue.queue_id}"
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
