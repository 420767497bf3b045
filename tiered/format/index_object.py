"""The payload of an index object: items in order of their hashes, and a filter that says where to look.

Layout (big-endian; N items, B = 2^b buckets)::

    offset          size     field
    0               32·N     items, ordered by the upper 32 bits of their hash; equal ones newest first
    32·N            4·(B+1)  directory: number of the first item of each bucket, and N
    32·N+4·(B+1)    2·N      fingerprints: 16 bits of each item

    item:  0  4  uint32  lower 32 bits of the hash
           4  4  uint32  number of the queue (in the description's list ``covers``)
           8  8  uint64  log offset of the record
          16  8  int64   store time, UTC ms
          24  4  uint32  size of the record
          28  4  uint32  queue offset, counted from the start of what is covered of that queue

An item's bucket is the upper b bits of its hash, its fingerprint the 16 bits behind them. Items, so fingerprints too, lie in
order of both; so directory and fingerprints are at once the filter and the slot table. A key whose fingerprint is not in
its bucket is not in the object; otherwise the places of the equal fingerprints are those of the items: the run, one range
of bytes, whatever else is in the bucket. With 16 items a bucket (b is chosen so, up to 16) a key that is not there is
taken for one that is once in 4,096 times, at 18 bits an item: as with a Bloom filter of that size, which does not say where.

Around the payload lies ``tiered.format.object`` with blocks of ``INDEX_BLOCK_BYTES``. The description holds ``kind``
(index), ``count``, ``bucket_bits``, ``store_min_ms``, ``store_max_ms``, and ``covers``: rows of topic, queue id,
incarnation, start and end (queue offsets).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.errors import OtherVersionError

if TYPE_CHECKING:
    from typing_extensions import Buffer

ITEM: Final = np.dtype(
    [
        ("hash_low", ">u4"),
        ("queue", ">u4"),
        ("log_offset", ">u8"),
        ("store_ms", ">i8"),
        ("size", ">u4"),
        ("queue_offset", ">u4"),
    ]
)
ITEM_BYTES: Final = 32
assert ITEM.itemsize == ITEM_BYTES
INDEX_BLOCK_BYTES: Final = 4096
BUCKET_ITEMS: Final = 16
BUCKET_BITS_MAX: Final = 16
FINGERPRINT_BITS: Final = 16
_ORDER_BITS: Final = BUCKET_BITS_MAX + FINGERPRINT_BITS
_UPPER: Final = np.uint64(0xFFFF_FFFF_0000_0000)

Items = npt.NDArray[np.void]
Hashes = npt.NDArray[np.uint64]


def bucket_bits(count: int) -> int:
    """How many bits name a bucket among ``count`` items."""
    return min(max(0, (count - 1) // BUCKET_ITEMS).bit_length(), BUCKET_BITS_MAX)


def filter_bytes(count: int, bits: int) -> int:
    """Size of directory and fingerprints."""
    return 4 * ((1 << bits) + 1) + 2 * count


def order_keys(hashes: Hashes, behind: int) -> Hashes:
    """A number an item, by which items lie in order but for ties: the upper half of its hash, what came last first.

    ``behind``: how many items come behind these; all together are fewer than 2^32.
    """
    count = len(hashes)
    keys = hashes & _UPPER
    keys |= np.arange(behind + count - 1, behind - 1, -1, dtype=np.int64).view(np.uint64)
    return keys


def places_of(keys: Hashes) -> npt.NDArray[np.int64]:
    """Where each item lies, in the order in which they came; ``keys``: of all, sorted.

    The keys are of no use afterwards: each array more is fresh memory, which costs more than to sort.
    """
    count = len(keys)
    keys &= ~_UPPER
    order = np.subtract(count - 1, keys.view(np.int64), out=keys.view(np.int64))
    places = np.empty(count, np.int64)
    places[order] = np.arange(count)
    return places


@dataclass(frozen=True, slots=True)
class Ties:
    """Items with the same upper half of their hash, which only their times tell apart."""

    at: npt.NDArray[np.int64]  # int64[n], where they lie, ascending
    upper: Hashes  # uint64[n], what is the same

    @classmethod
    def of(cls, keys: Hashes) -> Ties:
        """Those among sorted keys."""
        upper = (keys >> np.uint64(64 - _ORDER_BITS)).astype(np.uint32)
        same = upper[1:] == upper[:-1]
        at = np.flatnonzero(np.append(same, False) | np.append(False, same))
        return cls(at, keys[at] & _UPPER)

    def order(self, items: Items) -> None:
        """Put the newest of each first; of the same time that with the largest queue offset, then what came last."""
        if len(self.at):
            mine = items[self.at]
            newest_first = -mine["queue_offset"].astype(np.int64), -mine["store_ms"]
            items[self.at] = mine[np.lexsort((*newest_first, self.upper))]


def build_filter(ordered: Hashes, bits: int) -> bytes:
    """Directory and fingerprints of hashes in order, of which only the upper half counts."""
    buckets = np.arange((1 << bits) + 1, dtype=np.uint64)
    upper = ordered >> np.uint64(64 - bits) if bits else np.zeros(len(ordered), np.uint64)
    directory = np.searchsorted(upper, buckets).astype(">u4")
    shift = np.uint64(64 - bits - FINGERPRINT_BITS)
    prints = ((ordered >> shift) & np.uint64(0xFFFF)).astype(">u2")
    return directory.tobytes() + prints.tobytes()


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """Directory and fingerprints of one object. Immutable; about 2.25 bytes an item."""

    bits: int  # of a bucket's number
    directory: npt.NDArray[np.uint32]  # uint32[2^bits + 1]
    prints: npt.NDArray[np.uint16]  # uint16[count]

    @classmethod
    def parse(cls, data: Buffer, count: int, bits: int, *, where: str) -> KeyFilter:
        """Read what ``build_filter`` made."""
        view = memoryview(data).cast("B")
        if not 0 <= bits <= BUCKET_BITS_MAX or view.nbytes != filter_bytes(count, bits):
            raise _unknown("the filter has a wrong size", where)
        split = 4 * ((1 << bits) + 1)
        directory = np.frombuffer(view[:split], ">u4").astype(np.uint32)
        if directory[0] != 0 or directory[-1] != count or (directory[1:] < directory[:-1]).any():
            raise _unknown("the filter's directory is not in order", where)
        return cls(bits, directory, np.frombuffer(view[split:], ">u2").astype(np.uint16))

    def find(self, value: int) -> tuple[int, int]:
        """Where the items of a hash may lie: numbers ``[start, end)``; an empty range: it is not there."""
        bucket = value >> (64 - self.bits) if self.bits else 0
        print_ = np.uint16(value >> (64 - self.bits - FINGERPRINT_BITS) & 0xFFFF)
        low, high = int(self.directory[bucket]), int(self.directory[bucket + 1])
        mine = self.prints[low:high]
        start = int(np.searchsorted(mine, print_, side="left"))
        end = int(np.searchsorted(mine, print_, side="right"))
        return low + start, low + end

    @property
    def memory_bytes(self) -> int:
        """What it holds."""
        return self.directory.nbytes + self.prints.nbytes


def check_payload(payload: Buffer, count: int, lengths: list[int], *, where: str) -> None:
    """Check the whole payload of an object; ``lengths``: how many queue offsets it covers of each queue in its list."""
    view = memoryview(payload).cast("B")
    bits = bucket_bits(count)
    if view.nbytes != count * ITEM_BYTES + filter_bytes(count, bits):
        raise _unknown(f"{view.nbytes} bytes are no index of {count} items", where)
    items = np.frombuffer(view[: count * ITEM_BYTES], ITEM)
    filter_ = KeyFilter.parse(view[count * ITEM_BYTES :], count, bits, where=where)
    queues = items["queue"].astype(np.int64)
    if (queues >= len(lengths)).any():
        raise _unknown("an item names a queue that is not covered", where)
    if count and (items["queue_offset"] >= np.array(lengths, np.int64)[queues]).any():
        raise _unknown("an item's queue offset is not covered", where)
    buckets = np.repeat(np.arange(len(filter_.directory) - 1), np.diff(filter_.directory))
    if (np.diff((buckets << FINGERPRINT_BITS) + filter_.prints) < 0).any():
        raise _unknown("the fingerprints are not in order", where)


def _unknown(what: str, where: str) -> OtherVersionError:
    """Of a payload that its checksums have proven."""
    return OtherVersionError(f"an index object has another form: {what}", where=where)
