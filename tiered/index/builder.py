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

import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

import numpy as np
from zlib_ng import zlib_ng

from tiered import keys
from tiered.errors import DataError
from tiered.format.index_object import (
    INDEX_BLOCK_BYTES,
    ITEM,
    ITEM_BYTES,
    Items,
    bucket_bits,
    build_filter,
    order_of,
)
from tiered.format.object import build_object
from tiered.index.extract import extract_keys, shifted, topic_seed
from tiered.log.parts import Cover, IndexObject, ObjectRange
from tiered.log.wellformed import INT_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.index.extract import Hashes, Keys
    from tiered.local.face import RecordBatch
    from tiered.model import MessageQueue


# -- work --------------------------------------------------------------------------------------------
#
# The local work file: items in the order in which they came, until there are enough of them for an index object.
#
# It is a cache and nothing else: an anonymous temporary file, gone with the process. Whatever is lost with it is found
# again
# from the journal (``indexed_to``) and the records. What is read back has to have the checksum of what was written: bytes
# that
# the disk has changed are a ``DataError``, upon which everything is thrown away and built again.
#
# Threads: one.

_HASH_BYTES: Final = 8


class WorkFile:
    """Hashes and items on disk; in memory only what is being added, and 16 bytes for each such addition."""

    def __init__(self, directory: str | None = None) -> None:
        """Open a new file.

        Args:
            directory: Where; None: where the system has its temporary files.

        Raises:
            OSError: It cannot be made.
        """
        self._directory = directory or tempfile.gettempdir()
        # Unbuffered: what a full disk has refused must not be tried again by `close`, which would fail then.
        self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115 (closed in close)
            dir=directory, prefix="tiered-index-", buffering=0
        )
        self._blocks: list[tuple[int, int]] = []
        self.count = 0

    def append(self, hashes: Hashes, items: Items) -> None:
        """Add items and their hashes.

        Raises:
            OSError: The disk does not take them; the file is of no use any more.
        """
        if len(hashes):
            data = hashes.tobytes() + items.tobytes()
            view = memoryview(data)
            try:
                while view:
                    view = view[self._file.write(view) :]
            except OSError as error:  # the system names no file in it
                raise OSError(error.errno, error.strerror, self._directory) from error
            self._blocks.append((len(hashes), zlib_ng.crc32(data)))
            self.count += len(hashes)

    def blocks(self) -> Iterator[tuple[int, Hashes, Items]]:
        """Everything as it was added, each with the number of its first item.

        Raises:
            DataError: It is not what was written.
            OSError: It cannot be read.
        """
        self._file.seek(0)
        start = 0
        for count, crc in self._blocks:
            size = count * (_HASH_BYTES + ITEM_BYTES)
            data = b"".join(self._pieces(size))
            if len(data) != size or zlib_ng.crc32(data) != crc:
                raise DataError("the local work file of the key index has changed")
            hashes = np.frombuffer(data, np.uint64, count)
            yield start, hashes, np.frombuffer(data, ITEM, count, count * _HASH_BYTES)
            start += count
        self._file.seek(0, 2)

    def _pieces(self, size: int) -> Iterator[bytes]:
        """The next bytes, however the system cuts them; fewer at the end."""
        while size and (piece := self._file.read(size)):
            size -= len(piece)
            yield piece

    def close(self) -> None:
        """Give the space back."""
        self._file.close()


# -- builder -----------------------------------------------------------------------------------------


COVER_MAX: Final = 2**32 - 1
"""Queue offsets of one life that one object can cover: items count them with 32 bits."""
Life = tuple["MessageQueue", int]


@dataclass(slots=True)
class _Covered:
    number: int
    start: int
    end: int


class IndexBuilder:
    """Makes index objects, one after another."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        next_id: Callable[[], keys.ObjectId],
        *,
        directory: str | None = None,
        pace: Callable[[int], None] = lambda _bytes: None,
    ) -> None:
        """Wire it; the work file is made when something is added.

        Args:
            store: Where objects go.
            prefix: Of the broker, ending in a slash.
            next_id: Id of an object that is about to be begun.
            directory: For the work file; None: the system's for temporary files.
            pace: Called with the bytes of an upload before it begins; may wait.
        """
        self._pace = pace
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

    def add_batch(
        self, queue: MessageQueue, incarnation: int, batch: RecordBatch, log_offset: int
    ) -> None:
        """Add the keys of records; see ``add``.

        Args:
            queue: Whose.
            incarnation: Which life.
            batch: The records.
            log_offset: Of the first byte of ``batch.data`` in the tiered commit log.

        Raises:
            DataError: A record is damaged.
        """
        found = extract_keys(batch, topic_seed(queue.topic))
        keys_ = (shifted(some, log_offset) for some in found)
        self.add(queue, incarnation, batch.base_offset, batch.end_offset, keys_)

    def add(
        self,
        queue: MessageQueue,
        incarnation: int,
        start: int,
        end: int,
        found: Iterable[Keys],
    ) -> None:
        """Add the keys of the messages in ``[start, end)``, which begins where what was added of this life ended.

        After any error the builder has to be reset: nobody knows how much of it counts.

        Args:
            queue: Whose.
            incarnation: Which life.
            start: First queue offset.
            end: One past the last.
            found: Their keys; positions are log offsets.

        Raises:
            OSError: The work file cannot be written.
        """
        covered = self._cover(queue, incarnation, start)
        work = self._work = self._work or WorkFile(self._directory)
        for some in found:
            work.append(some.hashes, _items(some, covered))
        covered.end = end

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
        made_of = _sorted(work)
        items = made_of.items
        covers = tuple(
            Cover(queue, incarnation, found.start, found.end)
            for (queue, incarnation), found in self._covered.items()
        )
        bounds = made_of.store_min_ms, made_of.store_max_ms
        low, high = (min(max(-1, bound), INT_MAX - 1) for bound in bounds)
        description = {
            "kind": "index",
            "count": len(items),
            "bucket_bits": bucket_bits(len(items)),
            "store_min_ms": low,
            "store_max_ms": high,
            "covers": [cover.row() for cover in covers],
        }
        data: list[Buffer] = [made_of.filter]
        if len(items):
            data.insert(0, items.view(np.uint8).data)
        made = build_object(data, description, block_bytes=INDEX_BLOCK_BYTES)
        self._pace(made.size_bytes)
        key = keys.index_key("", max(0, low), self._next_id())
        self._store.put_if_absent(self._prefix + key, made.buffers)
        size = made.payload_bytes
        place = ObjectRange(key, size, made.trailer_bytes, made.payload_crc)
        return IndexObject(place, len(items), len(items) * ITEM_BYTES, low, high, covers)

    def reset(self) -> None:
        """Forget everything, and give the disk's space back."""
        work, self._work = self._work, None
        self._covered = {}
        if work:
            work.close()

    def _cover(self, queue: MessageQueue, incarnation: int, start: int) -> _Covered:
        found = self._covered.get((queue, incarnation))
        if found is None:
            found = _Covered(len(self._covered), start, start)
            self._covered[queue, incarnation] = found
        assert found.end == start, "what is added goes on where it ended"
        return found


def _items(found: Keys, covered: _Covered) -> Items:
    items = np.empty(len(found), ITEM)
    items["hash_low"] = found.hashes.astype(np.uint32)
    items["queue"] = covered.number
    items["log_offset"] = found.positions
    items["store_ms"] = found.store_ms
    items["size"] = found.sizes
    items["queue_offset"] = found.queue_offsets - covered.start
    return items


@dataclass(frozen=True, slots=True)
class _Sorted:
    items: Items
    filter: bytes
    store_min_ms: int
    store_max_ms: int


def _sorted(work: WorkFile) -> _Sorted:
    """The items in order, and what is made of them."""
    count = work.count
    hashes = np.empty(count, np.uint64)
    store_ms, offsets = np.empty(count, np.int64), np.empty(count, np.int64)
    for start, some, items in work.blocks():
        end = start + len(some)
        hashes[start:end] = some
        store_ms[start:end] = items["store_ms"]
        offsets[start:end] = items["queue_offset"]
    bounds = (int(store_ms.min()), int(store_ms.max())) if count else (-1, -1)
    order = order_of(hashes, store_ms, offsets)
    del store_ms, offsets
    filter_ = build_filter(hashes[order], bucket_bits(count))
    del hashes
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    del order
    rows = np.empty((count, ITEM_BYTES // 8), np.uint64)  # as words: copied faster than as records
    for start, some, items in work.blocks():
        rows[place[start : start + len(some)]] = items.view(np.uint64).reshape(len(some), -1)
    return _Sorted(rows.reshape(-1).view(ITEM), filter_, *bounds)
