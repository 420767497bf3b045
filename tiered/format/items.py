"""Items of consume queues: the index of a queue, one item a message.

Plain consume queue, 20 bytes, item ``k`` at byte ``20 k`` of the queue (files are named by byte
offset):

====== ===== ===============================================================
offset bytes field
====== ===== ===============================================================
0      8     physical_offset
8      4     size of the record
12     8     tag_code; below -2^31 it is an address in ``consumequeue_ext``
====== ===== ===============================================================

A queue whose first message is not number 0 begins with fillers ``(0, 0x7FFFFFFF, 0)``, which are
never messages; ``(0, 0, 0)`` has not been written yet.

Batch consume queue, 46 bytes, one item a record, found by binary search for ``base_offset``:

====== ===== ===============================================================
offset bytes field
====== ===== ===============================================================
0      8     physical_offset
8      4     size of the record
12     8     tag_code
20     8     store_timestamp_ms
28     8     base_offset: queue offset of the first inner message
36     2     count of inner messages
38     4     compacted_offset; -1 unused
42     4     reserved, 0
====== ===== ===============================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Buffer


ITEM: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tag_code", ">i8")])
ITEM_BYTES: Final = 20
BATCH_ITEM: Final = np.dtype(
    [
        ("physical_offset", ">i8"),
        ("size", ">i4"),
        ("tag_code", ">i8"),
        ("store_timestamp_ms", ">i8"),
        ("base_offset", ">i8"),
        ("count", ">i2"),
        ("compacted_offset", ">i4"),
        ("reserved", ">i4"),
    ]
)
BATCH_ITEM_BYTES: Final = 46
FILLER_SIZE: Final = 0x7FFF_FFFF
_EXT_ADDRESS_MAX: Final = -(2**31) - 1

Items = npt.NDArray[np.void]
Flags = npt.NDArray[np.bool_]


def decode_items(data: Buffer, dtype: np.dtype[np.void] = ITEM) -> Items:
    """The whole ``ITEM`` or ``BATCH_ITEM`` in ``data``, as a view; bytes of an incomplete last one are left out."""
    view = memoryview(data)
    return np.frombuffer(view[: view.nbytes - view.nbytes % dtype.itemsize], dtype)


def encode_items(
    physical_offsets: npt.ArrayLike, sizes: npt.ArrayLike, tag_codes: npt.ArrayLike
) -> bytes:
    """The stored form of items whose fields are given as arrays of one length."""
    items = np.zeros(len(np.asarray(sizes)), ITEM)
    items["physical_offset"], items["size"], items["tag_code"] = physical_offsets, sizes, tag_codes
    return items.tobytes()


def fillers(count: int) -> bytes:
    """``count`` items that stand before the first message of a queue that does not begin at 0."""
    return encode_items(np.zeros(count), np.full(count, FILLER_SIZE), np.zeros(count))


def is_filler(items: Items) -> Flags:
    """Which items are fillers."""
    found: Flags = (items["physical_offset"] == 0) & (items["size"] == FILLER_SIZE)
    return found


def is_message(items: Items) -> Flags:
    """Which items point at a record: not unwritten, not filler, not impossible."""
    physical_offsets, sizes = items["physical_offset"], items["size"]
    found: Flags = (physical_offsets >= 0) & (sizes > 0) & (sizes != FILLER_SIZE)
    return found


def is_batch(items: Items) -> Flags:
    """Which ``BATCH_ITEM`` items point at a record, by the broker's own test."""
    found: Flags = is_message(items) & (items["base_offset"] >= 0) & (items["count"] > 0)
    return found


def is_ext_address(tag_codes: npt.NDArray[np.int64]) -> Flags:
    """Which tag codes are addresses in ``consumequeue_ext``: those that no 32-bit hash can be."""
    return tag_codes <= _EXT_ADDRESS_MAX
