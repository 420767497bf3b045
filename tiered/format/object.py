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
from typing import TYPE_CHECKING, Any

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
