"""Tags and keys of the records of a block: what looks alike first, then pair by pair, then in plain code.

Three ways, each for what the one before leaves (``tiered.store.shapes``, ``spans``, ``keyhash``); a property test holds
them equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.block import RecordBlock, tag_hashes
from tiered.format.properties import java_hash
from tiered.store.keyhash import hashes_of
from tiered.store.shapes import Shapes
from tiered.store.spans import find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from tiered.model import MessageQueue

Longs = npt.NDArray[np.int64]
Group = tuple["MessageQueue", Longs]
_INT: Final = 0xFFFF_FFFF
_INT_MAX: Final = 0x7FFF_FFFF


@dataclass(frozen=True, slots=True)
class Described:
    """What consume queues and the index want to know of a piece of the log.

    Attributes:
        tag_codes: int64[n], of each record.
        hashes: int64[m], of the keys, in log order; of a record the unique key first.
        owners: int64[m], which record each key is of.
    """

    tag_codes: Longs
    hashes: Longs
    owners: Longs


def describe(block: RecordBlock, groups: Sequence[Group]) -> Described:
    """Tag codes and keys of the records in ``groups``, each of one queue; 0 and none for others."""
    leads = leads_of(groups, len(block))
    is_meant = np.zeros(len(block), np.bool_)
    for _, indices in groups:
        is_meant[indices] = True
    shapes = Shapes(
        block.buffer, block.properties_positions, block.properties_sizes.astype(np.int64), leads
    )
    tag_codes, hashes, owners = shapes.tag_codes, shapes.hashes, shapes.owners
    rest = shapes.rest
    if len(rest):
        part = properties_block(
            block.buffer, block.properties_positions[rest], block.properties_sizes[rest]
        )
        codes, others, whose = find(part, leads[rest]) or _plainly(part, rest, groups)
        tag_codes[rest] = codes
        hashes, owners = np.concatenate((hashes, others)), np.concatenate((owners, rest[whose]))
    tag_codes[~is_meant] = 0
    kept = is_meant[owners]
    return in_order(tag_codes, hashes[kept], owners[kept])


def leads_of(groups: Sequence[Group], count: int) -> npt.NDArray[np.uint32]:
    """uint32[n], the hash of what stands before each record's keys."""
    leads = np.zeros(count, np.uint32)
    for queue, indices in groups:
        leads[indices] = java_hash(f"{queue.topic}#") & _INT
    return leads


def in_order(tag_codes: Longs, hashes: Longs, owners: Longs) -> Described:
    """Put keys into log order, and make their signed hashes those that an index has."""
    order = np.argsort(owners, kind="stable")
    hashes = np.abs(hashes[order])
    hashes[hashes > _INT_MAX] = 0
    return Described(tag_codes, hashes, owners[order])


def properties_block(buffer: Buffer, positions: Longs, sizes: npt.NDArray[np.int32]) -> RecordBlock:
    """A block that has nothing of its records but their properties."""
    count = len(positions)
    longs, ints = np.zeros(count, np.int64), np.zeros(count, np.int32)
    return RecordBlock(
        buffer=buffer,
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
        properties_positions=positions,
        properties_sizes=sizes,
    )


def _plainly(part: RecordBlock, rest: Longs, groups: Sequence[Group]) -> tuple[Longs, Longs, Longs]:
    none = np.zeros(0, np.int64)
    found = []
    for queue, indices in groups:
        inside = np.searchsorted(rest, indices)
        inside[inside == len(rest)] = 0
        found.append(hashes_of(part, inside[rest[inside] == indices], queue.topic))
    hashes = np.concatenate([none, *(hashes for hashes, _ in found)])
    return tag_hashes(part), hashes, np.concatenate([none, *(owners for _, owners in found)])
