"""What consume queues and the key index want to know of a piece of the log: from its bytes, or from what was handed over.

Both ways give the same, which tests hold equal: a running store is told by its own writer (``tiered.store.handover``),
recovery, and a store that has fallen behind, read the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tiered.format.block import group_by_queue
from tiered.model import MessageQueue
from tiered.store.describe import (
    Described,
    Group,
    describe,
    properties_block,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiered.format.block import RecordBlock
    from tiered.store.columns import QueueKey
    from tiered.store.handover import Handed

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Facts:
    """A piece of the log.

    Attributes:
        groups: For each queue the indices of its records, in log order.
        physical_offsets, queue_offsets, store_timestamps_ms: int64[n].
        sizes, sys_flags: int32[n].
        described: Tags and keys.
        block: The records themselves; None when they were handed over.
    """

    groups: Sequence[Group]
    physical_offsets: Longs
    queue_offsets: Longs
    store_timestamps_ms: Longs
    sizes: npt.NDArray[np.int32]
    sys_flags: npt.NDArray[np.int32]
    described: Described
    block: RecordBlock | None = None

    def __len__(self) -> int:
        """Number of records."""
        return len(self.sizes)


def of_block(block: RecordBlock, among: npt.NDArray[np.bool_] | None = None) -> Facts:
    """Of parsed records; ``among``: bool[n], which count (None: all without a fault)."""
    groups = group_by_queue(block, among=among)
    return Facts(
        groups,
        block.physical_offsets,
        block.queue_offsets,
        block.store_timestamps_ms,
        block.sizes,
        block.sys_flags,
        describe(block, groups),
        block,
    )


def of_handed(handed: Sequence[Handed]) -> Facts:
    """Of appends, one behind another."""
    counts = [len(one.sizes) for one in handed]
    count = sum(counts)
    sizes = _column((one.sizes for one in handed), count).astype(np.int32)
    groups = _group(handed, count)
    kinds = list(chain.from_iterable(one.kinds for one in handed))
    flags = np.fromiter((kind.sys_flag for kind in kinds), np.int32, count)
    return Facts(
        groups,
        _column((one.positions for one in handed), count),
        _column((one.queue_offsets for one in handed), count),
        np.repeat(np.array([one.store_ms for one in handed], np.int64), counts),
        sizes,
        flags,
        describe(_properties_only(handed, count), groups),
    )


def _column(parts: Iterable[Sequence[int]], count: int) -> Longs:
    return np.fromiter(chain.from_iterable(parts), np.int64, count)


def _group(handed: Sequence[Handed], count: int) -> list[Group]:
    numbers: dict[QueueKey, int] = {}
    queues = list(chain.from_iterable(one.queues for one in handed))
    for queue in dict.fromkeys(queues):
        numbers[queue] = len(numbers)
    if len(numbers) == 1:
        return [(MessageQueue(*queues[0]), np.arange(count))]
    kind = (
        np.uint16 if len(numbers) <= 1 << 16 else np.int64
    )  # short ones are sorted by their digits
    codes = np.fromiter(map(numbers.__getitem__, queues), kind, count)
    order = np.argsort(codes, kind="stable")
    ends = np.bincount(codes).cumsum()
    members = np.split(order, ends[:-1])
    return [(MessageQueue(*queue), found) for queue, found in zip(numbers, members, strict=True)]


def _properties_only(handed: Sequence[Handed], count: int) -> RecordBlock:
    raws = list(chain.from_iterable(one.properties for one in handed))
    sizes = np.fromiter(map(len, raws), np.int64, count)
    return properties_block(b"".join(raws), sizes.cumsum() - sizes, sizes.astype(np.int32))
