"""From records to what compaction looks at: rows with the key of each, with NumPy over a whole batch.

The key is the whole value of the ``KEYS`` property, as the broker has it. A name that comes twice: the later value counts,
an empty one never does (``tiered.format.properties``).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.compaction.newest import EMPTY, KEYED, ROW
from tiered.errors import DataError, InvalidError
from tiered.format.block import bytes_at, parse_records
from tiered.format.sysflag import INNER_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

    from tiered.compaction.newest import Rows
    from tiered.format.block import RecordBlock
    from tiered.local.interface import RecordBatch
    from tiered.model import MessageQueue

_PIECE_RECORDS: Final = 8192
_STEP: Final = 16
_NAME: Final = b"\x02KEYS\x01"
_WORD: Final = 8
_HEAD: Final = int.from_bytes(_NAME, "little")
_HEAD_MASK: Final = np.uint64(2 ** (8 * len(_NAME)) - 1)
DIGEST_BYTES: Final = 16

Indices = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
"""uint64[n, 2], each digest's 16 bytes as two little-endian words."""


def digest_many(buffer: Buffer, starts: Indices, sizes: Indices) -> Digests:
    """The digests by which keys are told apart, of many texts that lie in one buffer.

    Of BLAKE2, since nobody can make two keys of the same digest: one of them would take the other's newest message away.
    """
    view, digest = memoryview(buffer).cast("B"), hashlib.blake2b
    places = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
    found = [digest(view[begin:end], digest_size=DIGEST_BYTES).digest() for begin, end in places]
    return np.frombuffer(b"".join(found), "<u8").reshape(-1, 2)


def keyed_records(batch: RecordBatch) -> Iterator[Rows]:
    """The records of a batch, some thousand at a time; holes are none.

    Raises:
        InvalidError: One holds an inner batch: its messages cannot go one by one.
    """
    real = np.flatnonzero(batch.sizes > 0)
    for begin in range(0, len(real), _PIECE_RECORDS):
        where = real[begin : begin + _PIECE_RECORDS]
        block = parse_records(batch.data, batch.positions[where], batch.sizes[where])
        yield keyed_block(block, where + int(batch.base_offset), batch.queue)


def keyed_block(block: RecordBlock, offsets: Indices, queue: MessageQueue) -> Rows:
    """Rows of some thousand records of a queue, at any queue offsets.

    Raises:
        InvalidError: One holds an inner batch: its messages cannot go one by one.
    """
    if not block.is_sound:
        raise DataError("a record is damaged", where=str(queue))
    if (block.sys_flags & INNER_BATCH).any():
        raise InvalidError(
            f"{queue} has records that hold inner batches; these cannot be compacted",
            do="send messages with keys one by one",
        )
    found = np.zeros(len(block), ROW)
    found["offset"], found["size"] = offsets, block.sizes
    found["time_ms"] = block.store_timestamps_ms
    found["flags"] = EMPTY * (block.body_sizes == 0)
    widths = (block.properties_sizes.astype(np.int64) // _STEP + 1) * _STEP
    for width in np.flatnonzero(np.bincount(widths)).tolist():
        members = np.flatnonzero(widths == width)
        text = _rows(block, members, width)
        of, starts, sizes = _keys(text, width)
        keyed = members[of]
        digests = digest_many(text.data, starts, sizes)
        found["high"][keyed], found["low"][keyed] = digests[:, 0], digests[:, 1]
        found["flags"][keyed] |= KEYED
    return found


def _rows(block: RecordBlock, members: Indices, width: int) -> npt.NDArray[np.uint8]:
    """The last ``width`` bytes of each record, one after another, 0x02 for all that comes before its properties.

    A row is a byte wider than the properties, at least; and never as wide as the record, which has 91 bytes besides.
    """
    starts = block.positions[members] + block.sizes[members] - width
    text = np.full(width * len(members) + _WORD, 2, np.uint8)
    rows = text[: width * len(members)].reshape(len(members), width)
    rows.view(f"V{width}")[:, 0] = bytes_at(block.buffer, f"V{width}")[starts]
    sizes = block.properties_sizes[members]
    if (sizes == sizes[0]).all():
        rows[:, : width - int(sizes[0])] = 2
    else:
        rows[np.arange(width) < (width - sizes)[:, None]] = 2
    return text


def _keys(text: npt.NDArray[np.uint8], width: int) -> tuple[Indices, Indices, Indices]:
    """Number of the row, start and size of each key, one a row at most. A row's properties end where the row ends."""
    ends = np.flatnonzero(text == 2)  # noqa: PLR2004 (the separator of pairs)
    heads = bytes_at(text.data, "<u8")[ends[: np.searchsorted(ends, len(text) - _WORD, "right")]]
    found = np.flatnonzero((heads & _HEAD_MASK) == np.uint64(_HEAD))
    starts = ends[found] + len(_NAME)
    sizes = ends[found + 1] - starts
    kept = sizes > 0
    starts, sizes = starts[kept], sizes[kept]
    of = (starts - 1) // width
    last = np.append(of[1:] != of[:-1], True) if len(of) else kept[:0]
    return of[last], starts[last], sizes[last]
