"""Objects with a trailer that describes and proves their payload: those of the key index, and quarantined records.

Layout (big-endian)::

    offset          size   field
    0               P      payload
    P               D      description: JSON, UTF-8 (what the object is)
    P+D             4·B    CRC-32 of each block of `block_bytes` of the payload, the last one short
    P+D+4B          40     footer:
                      0  8   uint64  payload_size
                      8  4   uint32  description_size
                     12  4   uint32  block_bytes
                     16  4   uint32  block_count  (= ceil(payload_size / block_bytes))
                     20  4   uint32  payload_crc  CRC-32 of the whole payload
                     24  2   uint16  format_version (1)
                     26  2   uint16  zero
                     28  4   uint32  trailer_crc  CRC-32 of description, block CRCs and footer bytes 0..28
                     32  8   bytes   magic ``TIEREDOB``

Size, checksum and magic of the footer stay where they are in every version, so that a damaged version number is told from
a newer one.

A reader of a range reads whole blocks and checks each: one flipped bit anywhere in the object is found, and costs the
block that it lies in; in the trailer it costs nothing but the proof, since the journal names the same payload CRC.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, OtherVersionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

BLOCK_BYTES = 64 * 1024
FORMAT = 1
MAGIC = b"TIEREDOB"
_HEAD = struct.Struct(">QIIIIHH")
_FOOTER = struct.Struct(">QIIIIHHI8s")
FOOTER_BYTES = _FOOTER.size
assert FOOTER_BYTES == 40  # noqa: PLR2004 (the table above)
assert _HEAD.size == 28  # noqa: PLR2004 (likewise: what the checksum covers)

Head = tuple[int, int, int, int, int]
"""Of a footer: payload size, size of what stands before the checksums of blocks, block size and count, payload CRC."""


@dataclass(frozen=True, slots=True)
class Trailer:
    """What stands behind an object's payload."""

    payload_bytes: int  # size of the payload
    trailer_bytes: int  # size of the trailer itself
    block_bytes: int  # size of the blocks that have a checksum
    block_crcs: tuple[int, ...]  # CRC-32 of each block
    payload_crc: int  # CRC-32 of the payload
    description: Mapping[str, Any]  # what the object says of itself


@dataclass(frozen=True, slots=True)
class SealedObject:
    """An object ready to be uploaded."""

    buffers: Sequence[Buffer]  # the payload, then the trailer
    payload_bytes: int  # size of the payload
    payload_crc: int  # CRC-32 of the payload
    trailer_bytes: int  # size of the trailer

    @property
    def size_bytes(self) -> int:
        """Size of the whole object."""
        return self.payload_bytes + self.trailer_bytes


def _make_trailer(signed: bytes, head: Head) -> bytes:
    """A trailer: what the checksum covers, and the footer."""
    covered = signed + _HEAD.pack(*head, FORMAT, 0)
    return covered + zlib_ng.crc32(covered).to_bytes(4, "big") + MAGIC


def trailer_size(tail: bytes) -> int:
    """How large the trailer is that ends in ``tail``, by its unproven footer; 0 when there is none."""
    footer = tail[-FOOTER_BYTES:]
    if len(footer) < FOOTER_BYTES or not footer.endswith(MAGIC):
        return 0
    _, text_bytes, _, count, *_ = _FOOTER.unpack(footer)
    return FOOTER_BYTES + 4 * int(count) + int(text_bytes)


def _split_trailer(tail: bytes, *, where: str) -> tuple[int, Head, bytes]:
    """Version and head of a trailer, of whatever version, and what stands before the footer."""
    size = trailer_size(tail)
    if not size:
        raise damaged("the object does not end in a footer", where)
    *head, version, _, crc, _ = _FOOTER.unpack(tail[-FOOTER_BYTES:])
    payload_bytes, text_bytes, block_bytes, count, payload_crc = head
    if size > len(tail) or block_bytes == 0 or count != -(-payload_bytes // block_bytes):
        raise damaged("the footer's sizes contradict each other", where)
    covered = tail[-size : len(tail) - FOOTER_BYTES + _HEAD.size]
    if zlib_ng.crc32(covered) != crc:
        raise damaged("the trailer's checksum is wrong", where)
    found = (payload_bytes, text_bytes, block_bytes, count, payload_crc)
    return version, found, covered[: -_HEAD.size]


def _read_description(text: bytes, where: str) -> Mapping[str, Any]:
    """A right checksum proves no good will: anyone who can write to a bucket can compute it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise OtherVersionError("the description is not a JSON object", where=where)
    return found


def damaged(what: str, where: str) -> DataError:
    """The error of an object whose bytes are not what they were."""
    return DataError(
        what, where=where, do="run `tiered verify --deep` to see the extent of the damage"
    )


# -- checksums of blocks ---------------------------------------------------------------------------


def block_sizes(size: int, block_bytes: int = BLOCK_BYTES) -> Iterator[int]:
    """Sizes of the blocks that so many bytes are cut into."""
    for at in range(0, size, block_bytes):
        yield min(block_bytes, size - at)


def combined(blocks: Iterable[tuple[int, int]]) -> int:
    """The CRC of blocks one after another, from (CRC, size) of each."""
    whole = 0
    for crc, size in blocks:
        whole = zlib_ng.crc32_combine(whole, crc, size)
    return whole


def block_crcs(buffers: Sequence[Buffer], block_bytes: int = BLOCK_BYTES) -> tuple[int, list[int]]:
    """Size of all, and the CRC of each block, over buffers that need not end at block ends."""
    total = 0
    for buffer in buffers:
        total += memoryview(buffer).nbytes
    if total <= block_bytes:
        whole = 0
        for buffer in buffers:
            whole = zlib_ng.crc32(buffer, whole)
        return total, [whole] if total else []
    crcs: list[int] = []
    crc = filled = 0
    for view in (memoryview(buffer).cast("B") for buffer in buffers):
        at = 0
        while at < len(view):
            chunk = view[at : at + block_bytes - filled]
            crc = zlib_ng.crc32(chunk, crc)
            filled += len(chunk)
            at += len(chunk)
            if filled == block_bytes:
                crcs.append(crc)
                crc = filled = 0
    if filled:
        crcs.append(crc)
    return total, crcs


# -- objects ---------------------------------------------------------------------------------------


def build_object(
    buffers: Sequence[Buffer], description: Mapping[str, Any], *, block_bytes: int = BLOCK_BYTES
) -> SealedObject:
    """Add the trailer to a payload, whose buffers are joined in order, without copying it.

    ``description`` is JSON-able: what a rebuild from a listing needs to know.
    """
    payload_bytes, crcs = block_crcs(buffers, block_bytes)
    payload_crc = combined(zip(crcs, block_sizes(payload_bytes, block_bytes), strict=True))
    text = json.dumps(description, separators=(",", ":"), sort_keys=True).encode()
    signed = text + struct.pack(f">{len(crcs)}I", *crcs)
    head = (payload_bytes, len(text), block_bytes, len(crcs), payload_crc)
    trailer = _make_trailer(signed, head)
    return SealedObject([*buffers, trailer], payload_bytes, payload_crc, len(trailer))


def parse_trailer(tail: bytes, *, where: str) -> Trailer:
    """Read the trailer from the end of an object, which holds it whole.

    DataError: it is damaged, or the object is none of ours. OtherVersionError: it is whole, and of another form.
    """
    version, head, signed = _split_trailer(tail, where=where)
    trailer_bytes = len(signed) + FOOTER_BYTES
    if version != FORMAT:
        raise OtherVersionError(
            f"an object of format version {version}, where {FORMAT} is known", where=where
        )
    payload_bytes, text_bytes, block_bytes, count, payload_crc = head
    crcs = struct.unpack_from(f">{count}I", signed, text_bytes)
    description = _read_description(signed[:text_bytes], where)
    return Trailer(payload_bytes, trailer_bytes, block_bytes, crcs, payload_crc, description)


# -- the payload of a key index ------------------------------------------------------------------
#
# The payload of an index object: items in order of their hashes, and a filter that says where to look.
#
# Layout (big-endian; N items, B = 2^b buckets)::
#
#     offset          size     field
#     0               32·N     items, ordered by the upper 32 bits of their hash; equal ones newest first
#     32·N            4·(B+1)  directory: number of the first item of each bucket, and N
#     32·N+4·(B+1)    2·N      fingerprints: 16 bits of each item
#
#     item:  0  4  uint32  lower 32 bits of the hash
#            4  4  uint32  number of the queue (in the description's list ``covers``)
#            8  8  uint64  log offset of the record
#           16  8  int64   store time, UTC ms
#           24  4  uint32  size of the record
#           28  4  uint32  queue offset, counted from the start of what is covered of that queue
#
# An item's bucket is the upper b bits of its hash, its fingerprint the 16 bits behind them. Items, so fingerprints too,
# lie in order of both; so directory and fingerprints are at once the filter and the slot table. A key whose fingerprint
# is not in its bucket is not in the object; otherwise the places of the equal fingerprints are those of the items: the
# run, one range of bytes, whatever else is in the bucket. With 16 items a bucket (b is chosen so, up to 16) a key that is
# not there is taken for one that is once in 4,096 times, at 18 bits an item: as with a Bloom filter of that size, which
# does not say where.
#
# Around the payload lies the layout of every object (above), with blocks of ``INDEX_BLOCK_BYTES``. The description holds
# ``kind`` (index), ``count``, ``bucket_bits``, ``store_min_ms``, ``store_max_ms``, and ``covers``: rows of topic, queue id,
# incarnation, start and end (queue offsets).

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


def order_keys(upper: npt.NDArray[np.uint32]) -> Hashes:
    """A number an item, by which items lie in order but for ties: the upper half of its hash, what came last first."""
    keys = upper.astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(len(upper) - 1, -1, -1, dtype=np.int64).view(np.uint64)
    return keys


def places_of(keys: Hashes) -> npt.NDArray[np.uint32]:
    """Where each item lies, in the order in which they came; ``keys``: of all, sorted.

    The keys are of no use afterwards: each array more is fresh memory, which costs more than to sort.
    """
    count = len(keys)
    keys &= ~_UPPER
    order = np.subtract(count - 1, keys.view(np.int64), out=keys.view(np.int64))
    places = np.empty(count, np.uint32)
    places[order] = np.arange(count, dtype=np.uint32)
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
