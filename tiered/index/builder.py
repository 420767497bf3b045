"""Collects items until there are enough, and then rewrites them once: sorted, with a filter, as one immutable object.

How to use it::

    builder.add(queue, incarnation, batch, log_offset)     any number of times, queue by queue in order
    made = builder.finish()                                the object is stored; a journal entry has to name it
    builder.reset()                                        begin anew, whatever became of it

Ordering: of each life what is added goes on exactly where it ended; so what an object covers is one row of offsets a life.

Memory: ``finish`` holds the object (32 bytes an item, and 2.25 for the filter) and 24 bytes an item to sort by. Before that
there is the work file, on disk.

After an error nothing is half done: the caller resets, and adds again from what the journal says is covered. An object that
no entry names is an orphan.

Threads: one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered import keys
from tiered.format.part import build_object
from tiered.index.extract import extract_keys
from tiered.index.hashing import topic_seed
from tiered.index.layout import (
    INDEX_BLOCK_BYTES,
    ITEM,
    ITEM_BYTES,
    bucket_bits,
    build_filter,
    order_of,
)
from tiered.index.work import ROW, Rows, WorkFile
from tiered.log.parts import Cover, IndexObject, ObjectRange
from tiered.log.wellformed import INT_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.index.extract import Keys
    from tiered.index.layout import Items
    from tiered.local.face import RecordBatch
    from tiered.model import MessageQueue

COVER_MAX: Final = 2**32 - 1
"""Queue offsets of one life that one object can cover: items count them with 32 bits."""
Life = tuple["MessageQueue", int]


@dataclass(slots=True)
class _Covered:
    number: int
    start: int
    end: int
    seed: int


class IndexBuilder:
    """Makes index objects, one after another."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        next_id: Callable[[], keys.ObjectId],
        *,
        directory: str | None = None,
    ) -> None:
        """Wire it; the work file is made when something is added.

        Args:
            store: Where objects go.
            prefix: Of the broker, ending in a slash.
            next_id: Id of an object that is about to be begun.
            directory: For the work file; None: the system's for temporary files.
        """
        self._store = store
        self._prefix = prefix
        self._next_id = next_id
        self._directory = directory
        self._work: WorkFile | None = None
        self._covered: dict[Life, _Covered] = {}

    @property
    def count(self) -> int:
        """Items collected."""
        return self._work.count if self._work else 0

    @property
    def is_empty(self) -> bool:
        """Nothing is covered yet."""
        return not self._covered

    def covered(self, queue: MessageQueue, incarnation: int) -> tuple[int, int] | None:
        """What was added of a life; None: nothing."""
        found = self._covered.get((queue, incarnation))
        return (found.start, found.end) if found else None

    def lives(self) -> list[Life]:
        """Of which something was added."""
        return list(self._covered)

    def room(self, queue: MessageQueue, incarnation: int) -> int:
        """How many more queue offsets of a life can be covered."""
        found = self._covered.get((queue, incarnation))
        return COVER_MAX - (found.end - found.start) if found else COVER_MAX

    def add(
        self, queue: MessageQueue, incarnation: int, batch: RecordBatch, log_offset: int
    ) -> None:
        """Add the keys of records.

        Args:
            queue: Whose.
            incarnation: Which life.
            batch: The records; they begin where the last ones of this life ended.
            log_offset: Of the first byte of ``batch.data`` in the tiered commit log.

        Raises:
            DataError: A record is damaged; nothing of the batch counts, and the builder has to be reset.
            OSError: The work file cannot be written; likewise.
        """
        covered = self._cover(queue, incarnation, batch.base_offset)
        work = self._work = self._work or WorkFile(self._directory)
        for found in extract_keys(batch, covered.seed):
            work.append(_rows(found, covered, log_offset))
        covered.end = batch.end_offset

    def add_nothing(self, queue: MessageQueue, incarnation: int, start: int, end: int) -> None:
        """Cover queue offsets that have no message (a gap)."""
        self._cover(queue, incarnation, start).end = end

    def finish(self) -> IndexObject:
        """Sort, and store the object.

        Raises:
            DataError: The work file has changed.
            OSError: It cannot be read.
            BackendError: The object is not stored, or nobody knows.
        """
        assert not self.is_empty
        work = self._work = self._work or WorkFile(self._directory)
        items, filter_ = _sorted(work)
        covers = tuple(
            Cover(queue, incarnation, found.start, found.end)
            for (queue, incarnation), found in self._covered.items()
        )
        times = items["store_ms"]
        bounds = (int(times.min()), int(times.max())) if len(items) else (-1, -1)
        low, high = (min(max(-1, bound), INT_MAX - 1) for bound in bounds)
        description = {
            "kind": "index",
            "count": len(items),
            "bucket_bits": bucket_bits(len(items)),
            "store_min_ms": low,
            "store_max_ms": high,
            "covers": [cover.row() for cover in covers],
        }
        data: list[Buffer] = [items.view(np.uint8).data, filter_] if len(items) else [filter_]
        made = build_object(data, description, block_bytes=INDEX_BLOCK_BYTES)
        key = keys.index_key("", max(0, low), self._next_id())
        self._store.put_if_absent(self._prefix + key, made.buffers)
        size = made.payload_bytes
        place = ObjectRange(key, 0, size, size, made.trailer_bytes, made.payload_crc)
        return IndexObject(place, len(items), len(items) * ITEM_BYTES, low, high, covers)

    def reset(self) -> None:
        """Forget everything, and give the disk's space back."""
        if self._work:
            self._work.close()
        self._work = None
        self._covered = {}

    def _cover(self, queue: MessageQueue, incarnation: int, start: int) -> _Covered:
        found = self._covered.get((queue, incarnation))
        if found is None:
            seed = topic_seed(queue.topic)
            found = _Covered(len(self._covered), start, start, seed)
            self._covered[queue, incarnation] = found
        assert found.end == start, "what is added goes on where it ended"
        return found


def _rows(found: Keys, covered: _Covered, log_offset: int) -> Rows:
    rows = np.empty(len(found), ROW)
    rows["hash"] = found.hashes
    items = rows["item"]
    items["hash_low"] = found.hashes & np.uint64(0xFFFF_FFFF)
    items["queue"] = covered.number
    items["log_offset"] = found.positions + log_offset
    items["store_ms"] = found.store_ms
    items["size"] = found.sizes
    items["queue_offset"] = found.queue_offsets - covered.start
    return rows


def _sorted(work: WorkFile) -> tuple[Items, bytes]:
    """The items in order, and the filter."""
    count = work.count
    hashes = np.empty(count, np.uint64)
    store_ms, offsets = np.empty(count, np.int64), np.empty(count, np.int64)
    for start, rows in work.blocks():
        end = start + len(rows)
        hashes[start:end] = rows["hash"]
        store_ms[start:end] = rows["item"]["store_ms"]
        offsets[start:end] = rows["item"]["queue_offset"]
    order = order_of(hashes, store_ms, offsets)
    del store_ms, offsets
    filter_ = build_filter(hashes[order], bucket_bits(count))
    del hashes
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    del order
    items = np.empty(count, ITEM)
    for start, rows in work.blocks():
        items[place[start : start + len(rows)]] = rows["item"]
    return items, filter_
