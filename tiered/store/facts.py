"""What consume queues and the key index want to know of a piece of the log: from its bytes, or from what was handed over.

Both ways give the same, which tests hold equal: a running store is told by its own writer (``tiered.store.handover``),
recovery, and a store that has fallen behind, read the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.block import RecordBlock, group_by_queue
from tiered.format.tags import java_hash, tag_hash
from tiered.model import MessageQueue
from tiered.store.keyhash import key_hash
from tiered.store.spans import Described, Group, describe, hash_texts, split_at_blanks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiered.store.columns import QueueKey
    from tiered.store.handover import Handed

Longs = npt.NDArray[np.int64]
_INT: Final = 0xFFFF_FFFF
_INT_MAX: Final = 0x7FFF_FFFF


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
    """Of appends, one behind another, all with properties or all without."""
    counts = [len(one.sizes) for one in handed]
    count = sum(counts)
    sizes = _column((one.sizes for one in handed), count).astype(np.int32)
    groups = _group(handed, count)
    kinds = list(chain.from_iterable(one.kinds for one in handed))
    flags = np.fromiter((kind.sys_flag for kind in kinds), np.int32, count)
    if handed[0].properties is None:
        described = _describe(handed, groups, count)
    else:
        described = describe(_properties_only(handed, count), groups)
    return Facts(
        groups,
        _column((one.positions for one in handed), count),
        _column((one.queue_offsets for one in handed), count),
        np.repeat(np.array([one.store_ms for one in handed], np.int64), counts),
        sizes,
        flags,
        described,
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
    codes = np.fromiter(map(numbers.__getitem__, queues), np.uint16, count)
    order = np.argsort(codes, kind="stable")
    ends = np.bincount(codes).cumsum()
    members = np.split(order, ends[:-1])
    return [(MessageQueue(*queue), found) for queue, found in zip(numbers, members, strict=True)]


def _describe(handed: Sequence[Handed], groups: Sequence[Group], count: int) -> Described:
    tags = chain.from_iterable(one.tags for one in handed)
    tag_codes = np.fromiter(map(_tag_code, tags), np.int64, count)
    topics: list[str] = [""] * count
    leads = np.zeros(count, np.uint32)
    for queue, indices in groups:
        leads[indices] = java_hash(f"{queue.topic}#") & _INT
    ids = "".join(chain.from_iterable(one.msg_ids for one in handed)).encode("ascii")
    width = len(ids) // count
    every = np.arange(count)
    starts = every * width
    unique = hash_texts(np.frombuffer(ids, np.uint8), starts, np.full(count, width), leads)
    keys = list(chain.from_iterable(one.keys for one in handed))
    owners = every
    if None in keys:
        owners = np.flatnonzero([key is not None for key in keys])
    given = [key for key in keys if key is not None]
    joined = "".join(given)
    if joined.isascii():
        owners, others = _hash_keys(joined, given, owners, leads)
    else:
        for queue, indices in groups:
            for number in indices.tolist():
                topics[number] = queue.topic
        owners, others = _hash_plainly(given, owners, topics)
    owners = np.concatenate((every, owners))
    hashes = np.abs(np.concatenate((unique, others)))
    hashes[hashes > _INT_MAX] = 0
    order = np.argsort(owners, kind="stable")
    return Described(tag_codes, hashes[order], owners[order])


def _hash_keys(
    joined: str, keys: Sequence[str], owners: Longs, leads: npt.NDArray[np.uint32]
) -> tuple[Longs, Longs]:
    """Whose keys there are, and their hashes, signed."""
    data = np.frombuffer(joined.encode("ascii"), np.uint8)
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    at = lengths.cumsum() - lengths
    if " " in joined:
        owners, at, lengths = split_at_blanks(data, owners, at, lengths)
    return owners, hash_texts(data, at, lengths, leads[owners])


def _hash_plainly(keys: Sequence[str], owners: Longs, topics: Sequence[str]) -> tuple[Longs, Longs]:
    found = [
        (owner, key_hash(topics[owner], key))
        for owner, text in zip(owners.tolist(), keys, strict=True)
        for key in text.split(" ")
        if key
    ]
    pairs = np.array(found, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


@lru_cache(maxsize=10_000)
def _tag_code(tag: str | None) -> int:
    return tag_hash(tag)


def _properties_only(handed: Sequence[Handed], count: int) -> RecordBlock:
    """A block that has nothing of its records but their properties."""
    raws = list(chain.from_iterable(one.properties or () for one in handed))
    sizes = np.fromiter(map(len, raws), np.int64, count)
    longs, ints = np.zeros(count, np.int64), np.zeros(count, np.int32)
    return RecordBlock(
        buffer=b"".join(raws),
        positions=longs,
        sizes=ints,
        faults=np.zeros(count, np.uint8),
        body_crcs=np.zeros(count, np.uint32),
        queue_ids=ints,
        queue_offsets=longs,
        physical_offsets=longs,
        sys_flags=ints,
        store_timestamps_ms=longs,
        body_positions=longs,
        body_sizes=ints,
        topic_positions=longs,
        topic_sizes=ints,
        properties_positions=sizes.cumsum() - sizes,
        properties_sizes=sizes.astype(np.int32),
    )
