"""What it takes to repair damaged sections: which parts lie in them, and their bytes again. Nothing is written here.

A repaired part is a part with the same offsets, bytes, holes and times, in a new section: a merge of one
(``tiered.log.merge``). Its bytes come from the section where that is whole (a damaged table proves nothing against it),
else from bundles that no entry names (what was merged and is not deleted yet, orphans), else from the local store; and
they must then be what the journal and what is left of the section say. So a local store that has other messages at these
offsets repairs nothing.

Memory: one part, from the tier and from the local store; and the tables of unnamed bundles, if they are looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import InvalidRangeError, ObjectNotFoundError, ShortReadError
from tiered.errors import DataError
from tiered.log.consume_queue import encode_items
from tiered.log.marks import mark_of
from tiered.log.named import parts_by_bundle
from tiered.log.sections import read_range
from tiered.log.verify_report import WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.local.face import LocalStore, RecordBatch
    from tiered.log.named import NamedPart
    from tiered.log.parts import Part, SectionRange, TierState
    from tiered.log.tables import Tabled
    from tiered.log.verify_report import Damaged
    from tiered.model import MessageQueue

READ_BYTES = 8 * 1024 * 1024


class Unrepaired(NamedTuple):
    """A part, or an object that is of no part, that stays damaged.

    Attributes:
        where: Topic, queue and queue offsets, or a key.
        reason: Why.
    """

    where: str
    reason: str


class PartBytes(NamedTuple):
    """A part's records and items, as they were."""

    log: Buffer
    items: Buffer


def plan_repairs(
    state: TierState, prefix: str, damaged: Damaged
) -> tuple[list[NamedPart], list[Unrepaired]]:
    """The damaged parts, bundle by bundle, and what is of no part. Pure.

    Args:
        state: What the journal says.
        prefix: Of the broker.
        damaged: What ``verify`` found.
    """
    by_key = {key.removeprefix(prefix): set(sections) for key, sections in damaged.items()}
    repairs: list[NamedPart] = []
    met: set[str] = set()
    for bundle, named in parts_by_bundle(state, by_key):
        met.add(bundle.key)
        sections = by_key[bundle.key]
        repairs += [one for one in named if {WHOLE, one.part.section.start} & sections]
    reason = "no part of a queue is made of it"
    return repairs, [Unrepaired(prefix + key, reason) for key in sorted(by_key.keys() - met)]


def name_of(one: NamedPart) -> str:
    """A part, for people."""
    return f"{one.queue} queue offsets [{one.part.queue_offset}, {one.part.queue_end})"


def recover_bytes(
    store: ObjectStore,
    prefix: str,
    local: LocalStore | None,
    unnamed: Callable[[], Sequence[Tabled]],
    one: NamedPart,
) -> PartBytes | str:
    """A part's records and items, from where they are whole.

    Args:
        store: The tier's.
        prefix: Of the broker.
        local: The local store, if there is one.
        unnamed: Gives the bundles that no entry names; asked only if they are needed.
        one: The part.

    Returns:
        Them, or why they can't be had.

    Raises:
        BackendError: The tier's store does not answer.
        TieredStoreError: The local store cannot be read.
    """
    part = one.part
    log, items = (_from_tier(store, prefix, want) for want in (part.log, part.index))
    if log is not None and items is not None:
        return PartBytes(log, items)
    found = _from_unnamed(store, prefix, unnamed(), one)
    if found is not None and _is_same(found, part, log, items):
        return found
    if one.life.ended:
        return "it is of a life that has ended, and nothing in the tier has it any more"
    if local is None:
        return "no local store is given"
    theirs = _from_local(local, one.queue, part)
    if isinstance(theirs, str):
        return theirs
    return theirs if _is_same(theirs, part, log, items) else "the local store has other bytes there"


def _from_tier(store: ObjectStore, prefix: str, want: SectionRange) -> Buffer | None:
    try:
        return read_range(store, prefix, want)
    except (DataError, ObjectNotFoundError, InvalidRangeError, ShortReadError):
        return None


def _from_unnamed(
    store: ObjectStore, prefix: str, unnamed: Sequence[Tabled], one: NamedPart
) -> PartBytes | None:
    """The part from sections of the same life that lie one behind the other, as a merge would join them."""
    log: list[Buffer] = []
    items: list[Buffer] = []
    at, end, log_at = one.part.queue_offset, one.part.queue_end, one.part.log_offset
    some = list(_sections_of(unnamed, one))
    while at < end:
        found = next(_going_on(store, prefix, some, (at, log_at), (end, one.part.log_end)), None)
        if found is None:
            return None
        part, both = found
        log.append(both.log)
        items.append(both.items)
        at, log_at = part.queue_end, part.log_end
    return PartBytes(b"".join(log), b"".join(items))


def _sections_of(unnamed: Sequence[Tabled], one: NamedPart) -> Iterator[Part]:
    for tabled in unnamed:
        lives = zip(tabled.named.queues, tabled.named.incarnations, strict=True)
        for number, life in enumerate(lives):
            if life == (one.queue, one.life.incarnation):
                yield tabled.named.parts[number]


def _going_on(
    store: ObjectStore,
    prefix: str,
    some: Sequence[Part],
    at: tuple[int, int],
    end: tuple[int, int],
) -> Iterator[tuple[Part, PartBytes]]:
    """Sections that begin at a queue offset and log offset and do not reach behind others, if they are whole."""
    for part in some:
        begins, ends = (part.queue_offset, part.log_offset), (part.queue_end, part.log_end)
        if begins != at or ends[0] > end[0] or ends[1] > end[1]:
            continue
        log, items = (_from_tier(store, prefix, want) for want in (part.log, part.index))
        if log is not None and items is not None:
            yield part, PartBytes(log, items)


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
    return PartBytes(memoryview(data)[:end], encode_items(part.log_offset + positions, sizes, tags))


def _batches(local: LocalStore, queue: MessageQueue, part: Part) -> Iterator[RecordBatch]:
    at = part.queue_offset
    while at < part.queue_end:
        count = max(1, part.queue_end - at)
        batch = local.read(queue, at, bytes_max=READ_BYTES, count_max=count)
        if batch is None or batch.base_offset != at or batch.count == 0:
            return
        yield batch
        at = batch.end_offset


def _is_same(found: PartBytes, part: Part, log: Buffer | None, items: Buffer | None) -> bool:
    """Whether these are the bytes that were tiered, as far as the journal and what is left of the section know."""
    records, index = memoryview(found.log).cast("B"), memoryview(found.items).cast("B")
    if (len(records), len(index)) != (part.log_bytes, part.index.size_bytes):
        return False
    place = part.section
    if part.is_whole and not place.is_packed:
        return zlib_ng.crc32(index, zlib_ng.crc32(records)) == place.crc
    if (log is not None and log != records) or (items is not None and items != index):
        return False
    knows = bool(part.last) or log is not None or items is not None
    last = mark_of(_last_record(records, index, part))
    return knows and (not part.last or last == part.last)


def _last_record(log: memoryview, items: memoryview, part: Part) -> memoryview:
    start = int.from_bytes(items[-20:-12], "big", signed=True) - part.log_offset
    size = int.from_bytes(items[-12:-8], "big", signed=True)
    return log[max(0, start) : max(0, start) + max(0, size)]
