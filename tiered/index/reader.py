"""Lookup by key: index objects by time and filter, the messages not indexed yet by scanning, newest first, exact.

Overview: what may hold the key is made a list of *units*, newest first: index objects whose times and queues fit and whose
filter has the key (one small read of the object each), and parts of queues that no index covers yet. Unit by unit messages
are fetched and checked, until there are as many as were asked for and nothing newer can come.

Complete: what no index covers is read from the tier itself, up to ``scan_bytes_max``; a lookup that had to stop there says
so (``Lookup.unscanned``). Damage costs what is damaged: the rest is found, and ``Lookup.damaged`` names it.

Exact: items are hints. Each message is held against topic, queue, queue offset, key and time itself; what has expired or
was taken back since does not come; none comes twice. Lives of a queue that are over are asked only on request.

An object that is gone (404): the journal is replayed, and all is asked again.

Threads: a reader may be used from any thread at once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ObjectNotFoundError, ShortReadError
from tiered.errors import DataError
from tiered.format.key_index import (
    INDEX_BLOCK_BYTES,
    ITEM,
    ITEM_BYTES,
    Filter,
    Items,
    bucket_bits,
    filter_bytes,
)
from tiered.format.object import Trailer, parse_trailer
from tiered.index.search import (
    COUNT,
    SCAN_BYTES_MAX,
    Hit,
    LifeViews,
    Lookup,
    Means,
    Search,
    Spread,
    Wish,
)
from tiered.log.reader import READ_BYTES, TierReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ObjectStore
    from tiered.log.parts import IndexObject, ObjectRange
    from tiered.log.state import TierState


# -- objects -----------------------------------------------------------------------------------------
#
# Reads index objects: the filter once, with one request, and then runs of items, one request each. Every byte is checked.
#
# Filters are kept in memory under a budget, the least recently used go first: 2.25 bytes an item, and 4 for each 4 KiB of
# the
# object (its blocks' checksums, so that a run needs no second request). Threads: any; two that want the same filter at the
# same time may both load it.

FILTER_BYTES_MAX: Final = 256 * 1024 * 1024
"""Default budget: the filters of 100 objects of a million items."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is kept of an index object.

    Attributes:
        filter: Directory and fingerprints.
        crcs: uint32[n], CRC-32 of each block of the payload.
    """

    filter: Filter
    crcs: npt.NDArray[np.uint32]

    @property
    def memory_bytes(self) -> int:
        """What it holds."""
        return self.filter.memory_bytes + self.crcs.nbytes


class IndexObjects:
    """Index objects of one broker's tier."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        filter_bytes_max: int = FILTER_BYTES_MAX,
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Hold nothing yet.

        Args:
            store: The tier's.
            prefix: Of the broker.
            filter_bytes_max: Budget of all filters; one that is larger by itself is loaded each time.
            tell: Told how many bytes are held, whenever that changes; with a lock held.
        """
        self._tell = tell
        self._store = store
        self._prefix = prefix
        self._bytes_max = filter_bytes_max
        self._bytes = 0
        self._held: OrderedDict[str, Loaded] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Of the filters held."""
        return self._bytes

    def load(self, index: IndexObject) -> Loaded:
        """The filter of an object: from memory, or with one request.

        Raises:
            DataError: It is damaged.
            BackendError: It could not be read.
        """
        key = index.place.key
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held
        loaded = self._load(index)
        with self._lock:
            if key not in self._held and loaded.memory_bytes <= self._bytes_max:
                self._held[key] = loaded
                self._bytes += loaded.memory_bytes
                while self._bytes > self._bytes_max:
                    self._bytes -= self._held.popitem(last=False)[1].memory_bytes
                self._tell(self._bytes)
        return loaded

    def items(self, index: IndexObject, loaded: Loaded, start: int, end: int) -> Items:
        """Items ``[start, end)``, with one request.

        Raises:
            DataError: They are damaged.
            BackendError: They could not be read.
        """
        low, high = start * ITEM_BYTES, end * ITEM_BYTES
        first = low // INDEX_BLOCK_BYTES * INDEX_BLOCK_BYTES
        last = min(-(-high // INDEX_BLOCK_BYTES) * INDEX_BLOCK_BYTES, index.place.payload_bytes)
        data = self._get(index, first, last)
        self._check(index, data, first, loaded.crcs)
        return np.frombuffer(data, ITEM, end - start, low - first)

    def _load(self, index: IndexObject) -> Loaded:
        place, where = index.place, self._prefix + index.place.key
        bits = bucket_bits(index.count)
        size = filter_bytes(index.count, bits)
        if index.filter_at != index.count * ITEM_BYTES or place.payload_bytes - index.filter_at != size:  # fmt: skip
            raise _damaged("the journal's sizes of this index object contradict each other", where)
        first = index.filter_at // INDEX_BLOCK_BYTES * INDEX_BLOCK_BYTES
        data = self._get(index, first, place.object_bytes)
        trailer = check_trailer(data[place.payload_bytes - first :], place, where=where)
        if trailer.block_bytes != INDEX_BLOCK_BYTES:
            raise _damaged(f"the index object has blocks of {trailer.block_bytes} bytes", where)
        crcs = np.array(trailer.block_crcs, np.uint32)
        payload = memoryview(data)[: place.payload_bytes - first]
        self._check(index, payload, first, crcs)
        found = Filter.parse(payload[index.filter_at - first :], index.count, bits, where=where)
        return Loaded(found, crcs)

    def _get(self, index: IndexObject, start: int, end: int) -> bytes:
        key = self._prefix + index.place.key
        try:
            return self._store.get(key, ByteRange(start, end))
        except (InvalidRangeError, ShortReadError) as error:
            raise _damaged(f"the object is shorter than the journal says: {error}", key) from error

    def _check(
        self,
        index: IndexObject,
        data: bytes | memoryview,
        start: int,
        crcs: npt.NDArray[np.uint32],
    ) -> None:
        view = memoryview(data)
        for at in range(0, len(view), INDEX_BLOCK_BYTES):
            block = view[at : at + INDEX_BLOCK_BYTES]
            if zlib_ng.crc32(block) != int(crcs[(start + at) // INDEX_BLOCK_BYTES]):
                where = self._prefix + index.place.key
                what = f"bytes [{start + at}, {start + at + len(block)}) fail their checksum"
                raise _damaged(what, where)


def check_trailer(tail: bytes, place: ObjectRange, *, where: str) -> Trailer:
    """Parse what lies behind an object's payload and hold it against the journal.

    Raises:
        DataError: The trailer is damaged, or the object is not the one that the journal names.
    """
    trailer = parse_trailer(tail, where=where)
    found = (trailer.payload_bytes, trailer.trailer_bytes, trailer.payload_crc)
    if len(tail) != place.trailer_bytes or found != (
        place.payload_bytes,
        place.trailer_bytes,
        place.crc,
    ):
        raise _damaged("the object is not the one that the journal names", where)
    return trailer


def _damaged(what: str, where: str) -> DataError:
    return DataError(what, where=where, do="`tiered rebuild URL --index` makes it again")


# -- reader ------------------------------------------------------------------------------------------


__all__ = ["COUNT", "SCAN_BYTES_MAX", "Hit", "IndexReader", "Lookup", "Wish"]
_REPLAYS_MAX: Final = 4


class IndexReader:
    """Looks keys up in one broker's tier.

    Attributes:
        objects: Its index objects, and the filters in memory.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        journal: TierReader | None = None,
        filter_bytes_max: int = FILTER_BYTES_MAX,
        tell: Callable[[int], None] = lambda _: None,
        spread: Spread = map,
    ) -> None:
        """Read nothing yet.

        Args:
            store: The tier's.
            prefix: Of the broker, ending in a slash.
            journal: Is refreshed when an object is gone; default: one of its own.
            filter_bytes_max: Budget of the filters that are kept in memory, and, while a lookup runs, of the messages that
                it looks at since no index covers them (or one that is larger).
            tell: See ``IndexObjects``.
            spread: Fetches messages (``map`` of an executor: several at once).
        """
        self.objects = IndexObjects(store, prefix, filter_bytes_max=filter_bytes_max, tell=tell)
        read_bytes = min(READ_BYTES, filter_bytes_max // 2)
        self._means = Means(LifeViews(store, prefix), self.objects, spread, read_bytes)
        self._journal = journal or TierReader(store, prefix)

    def lookup(self, state: TierState, wish: Wish) -> Lookup:
        """Find messages.

        Args:
            state: What the journal says, as new as the answer has to be.
            wish: What is looked for.

        Raises:
            BackendError: The tier did not answer.
            TieredStoreError: The journal cannot be replayed any more.
        """
        for _ in range(_REPLAYS_MAX):
            try:
                return Search(self._means, state, wish, gone_is_damage=False).run()
            except ObjectNotFoundError:  # merged or expired meanwhile, as a rule
                self._journal.refresh()
                if self._journal.state == state:
                    break
                state = self._journal.state
        return Search(self._means, state, wish, gone_is_damage=True).run()
