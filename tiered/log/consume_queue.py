"""TieredConsumeQueue: the index of one queue, 20 bytes an item, strictly contiguous in queue offsets.

Item (big-endian), one per queue offset::

    offset  size  type    field
         0     8  int64   log_offset of the record
         8     4  int32   size of the record; 0: a hole
        12     8  int64   tag code; of a hole its reason (``tiered.local.face.HoleReason``)

Items of an inner batch name the same record. Byte address in the flat file = 20 · queue offset, so a queue that begins at
offset 1,000 has its first byte at 20,000. After a gap a new segment begins at the offset behind it.

Source:
    RocketMQ ``MessageFormatUtil.CONSUME_QUEUE_UNIT_SIZE``; the local store's item has the same form with a physical
    offset in the first field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.log.flat_file import TieredFileSegment, TieredFlatFile

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.log.state import QueueLife
    from tiered.model import QueueOffset

ITEM = np.dtype([("log_offset", ">i8"), ("size", ">i4"), ("tag_code", ">i8")])
ITEM_BYTES: Final = 20
assert ITEM.itemsize == ITEM_BYTES


def encode_items(
    log_offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    tag_codes: npt.NDArray[np.int64],
) -> bytes:
    """Items of records."""
    items = np.empty(len(sizes), ITEM)
    items["log_offset"] = log_offsets
    items["size"] = sizes
    items["tag_code"] = tag_codes
    return items.tobytes()


def moved_items(items: memoryview, by: int) -> memoryview | bytes:
    """Items of records that lie elsewhere in the log than they did, by so many bytes."""
    if not by:
        return items
    moved = np.frombuffer(items, ITEM).copy()
    moved["log_offset"][moved["size"] > 0] += by
    return moved.tobytes()


class TieredConsumeQueue(TieredFlatFile):
    """The consume queue of one life of a queue."""

    @classmethod
    def load(cls, life: QueueLife) -> TieredConsumeQueue:
        """As the journal has it."""
        segments = [
            TieredFileSegment.of(
                s.base_queue_offset * ITEM_BYTES,
                s.created_ms,
                s.sealed,
                s.parts,
                s.parts.column("count") * ITEM_BYTES,
                of_items=True,
            )
            for s in life.segments
        ]
        return cls(life.commit_offset * ITEM_BYTES, segments)

    def read(
        self, store: ObjectStore, prefix: str, start: QueueOffset, end: QueueOffset
    ) -> npt.NDArray[np.void]:
        """Items ``[start, end)``, none of which may lie in a gap. Checked bytes; errors as of ``read_bytes``."""
        return np.frombuffer(
            self.read_bytes(store, prefix, start * ITEM_BYTES, end * ITEM_BYTES), ITEM
        )
