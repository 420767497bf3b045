"""What it takes to repair damaged parts: which they are, and their bytes again. Nothing is written here.

A repaired part is a part with the same offsets, bytes, holes and times, in new objects: a join of one (``tiered.log.seal``),
so that the action ``seal`` names it. Bytes come from the tier where the payload is whole (a damaged trailer proves nothing
against it), else from the local store, and must then have the checksums that the journal knows. So a local store that has
other messages at these offsets repairs nothing.

Memory: one part, from the tier and from the local store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import InvalidRangeError, ObjectNotFoundError, ShortReadError
from tiered.errors import DataError
from tiered.log.consume_queue import encode_items
from tiered.log.marks import mark_of
from tiered.log.objects import read_range

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.local.face import LocalStore, RecordBatch
    from tiered.log.parts import ObjectRange, Part, Segment, TierState
    from tiered.model import MessageQueue

READ_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SegmentRepair:
    """A segment with damaged parts.

    Attributes:
        queue: Whose.
        incarnation: Which life; its last.
        segment: As the journal has it.
        damaged: Its damaged parts.
    """

    queue: MessageQueue
    incarnation: int
    segment: Segment
    damaged: tuple[Part, ...]


class Unrepaired(NamedTuple):
    """A part, or an object that is of no part, that stays damaged.

    Attributes:
        where: Topic, queue and queue offsets, or a key.
        reason: Why.
    """

    where: str
    reason: str


class PartBytes(NamedTuple):
    """A part's payloads, as they were."""

    log: Buffer
    items: Buffer


def plan_repairs(
    state: TierState, prefix: str, damaged: AbstractSet[str]
) -> tuple[list[SegmentRepair], list[Unrepaired]]:
    """The segments with damaged parts, and what no writer could repair. Pure.

    Args:
        state: What the journal says.
        prefix: Of the broker.
        damaged: Whole keys of damaged or missing objects.
    """
    repairs: list[SegmentRepair] = []
    unrepaired: list[Unrepaired] = []
    met: set[str] = set()
    for queue, lives in state.queues.items():
        for number, life in enumerate(lives):
            for segment in life.segments:
                parts = tuple(p for p in segment.parts if keys_of(prefix, p) & damaged)
                for part in parts:
                    met |= keys_of(prefix, part)
                    if number < len(lives) - 1:
                        reason = "it is of a life that has ended, and no store has it any more"
                        unrepaired.append(Unrepaired(name_of(queue, part), reason))
                if parts and number == len(lives) - 1:
                    repairs.append(SegmentRepair(queue, life.incarnation, segment, parts))
    reason = "no part of a queue is made of it"
    unrepaired += [Unrepaired(key, reason) for key in sorted(damaged - met)]
    return repairs, unrepaired


def keys_of(prefix: str, part: Part) -> set[str]:
    """Whole keys of a part's objects."""
    return {prefix + part.log.key, prefix + part.index.key}


def name_of(queue: MessageQueue, part: Part) -> str:
    """A part, for people."""
    return f"{queue} queue offsets [{part.queue_offset}, {part.queue_end})"


def recover_bytes(
    store: ObjectStore, prefix: str, local: LocalStore | None, queue: MessageQueue, part: Part
) -> PartBytes | str:
    """A part's payloads, from the tier as far as they are whole, else from the local store.

    Returns:
        Them, or why they can't be had.

    Raises:
        BackendError: The tier's store does not answer.
        TieredStoreError: The local store cannot be read.
    """
    log, items = _from_tier(store, prefix, part.log), _from_tier(store, prefix, part.index)
    if log is not None and items is not None:
        return PartBytes(log, items)
    if local is None:
        return "no local store is given"
    found = _from_local(local, queue, part)
    if isinstance(found, str):
        return found
    both = PartBytes(found.log if log is None else log, found.items if items is None else items)
    if not _is_same(both, part):
        return "the local store has other bytes there"
    return both


def _from_tier(store: ObjectStore, prefix: str, place: ObjectRange) -> Buffer | None:
    if place.start == place.end:
        return b""
    try:
        return read_range(store, prefix, place, place.start, place.end)
    except (DataError, ObjectNotFoundError, InvalidRangeError, ShortReadError):
        return None


def _from_local(local: LocalStore, queue: MessageQueue, part: Part) -> PartBytes | str:
    bounds = local.queues().get(queue)
    if bounds is None:
        return "the local store has no such queue any more"
    if part.queue_offset < bounds.min:
        return f"the local store begins at queue offset {bounds.min}"
    if part.queue_end > bounds.end:
        return f"the local store ends at queue offset {bounds.end}"
    batches = list(_batches(local, queue, part))
    if not batches or batches[-1].end_offset < part.queue_end:
        return "the local store cannot read all of it"
    count = part.count
    sizes = np.concatenate([batch.sizes for batch in batches])[:count]
    starts = np.cumsum([0, *(memoryview(batch.data).nbytes for batch in batches)])
    positions = np.concatenate(
        [batch.positions + start for batch, start in zip(batches, starts, strict=False)]
    )[:count]
    data = b"".join([batch.data for batch in batches])
    end = int(
        (positions + sizes).max(initial=0)
    )  # behind it are items that the last read took along
    tags = np.concatenate([batch.tag_codes for batch in batches])[:count]
    return PartBytes(memoryview(data)[:end], encode_items(part.log_offset, positions, sizes, tags))


def _batches(local: LocalStore, queue: MessageQueue, part: Part) -> Iterator[RecordBatch]:
    at = part.queue_offset
    while at < part.queue_end:
        count = max(1, part.queue_end - at)
        batch = local.read(queue, at, bytes_max=READ_BYTES, count_max=count)
        if batch is None or batch.base_offset != at or batch.count == 0:
            return
        yield batch
        at = batch.end_offset


def _is_same(found: PartBytes, part: Part) -> bool:
    """Whether these are the bytes that were tiered, as far as the journal knows."""
    log, items = memoryview(found.log).cast("B"), memoryview(found.items).cast("B")
    if (len(log), len(items)) != (part.log.size_bytes, part.index.size_bytes):
        return False
    for data, place in ((log, part.log), (items, part.index)):
        is_whole = (place.start, place.end) == (0, place.payload_bytes)
        if is_whole and zlib_ng.crc32(data) != place.crc:
            return False
    return not part.last or mark_of(_last_record(log, items, part)) == part.last


def _last_record(log: memoryview, items: memoryview, part: Part) -> memoryview:
    start = int.from_bytes(items[-20:-12], "big", signed=True) - part.log_offset
    size = int.from_bytes(items[-12:-8], "big", signed=True)
    return log[max(0, start) : max(0, start) + max(0, size)]
