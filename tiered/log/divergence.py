"""What to say of a queue whose local history diverges from the tier's: ``truncate`` or ``incarnation``, or nothing.

``plan_change`` is pure; the two functions behind it read the tier for it. ``plan_end`` is the same by a person's word.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.properties import UNIQ_KEY, value_of
from tiered.format.record import (
    BODY_AT,
    BODY_SIZE_AT,
    HEADER,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    STORE_TIME_AT,
    extra_of,
)
from tiered.format.record_kind import RecordKind, kind_of
from tiered.format.sysflag import BORN_HOST_V6, v6_extra_bytes
from tiered.journal.entry import row_of
from tiered.log.actions import Head
from tiered.log.flat_file import ITEM, ITEM_BYTES
from tiered.log.parts import Gap, queue_action
from tiered.log.sections import read_range
from tiered.model import MessageQueue, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.journal.entry import Action
    from tiered.local.interface import RecordBatch
    from tiered.log.parts import Incarnation, Part
    from tiered.log.reader import QueueReader

# -- fingerprints --------------------------------------------------------------------------------
#
# Fingerprints: 32 bits by which a record is known again, wherever its bytes lie.
#
# A fingerprint is made of queue offset, store time, body CRC, body size and unique key; not of the physical offset, which a
# restored store changes. Two different messages at one queue offset share a fingerprint once in four thousand million times.
# 0 stands for none: not known, or a hole. Where it matters that it is a hole, it is ``HOLE``; that is in no entry. Those of
# other stores' records are made of their heads (``tiered.format.heads``).

HOLE = -1
"""In the place of a fingerprint: there is an item, and no message."""

_LONG = struct.Struct(">q")
_INT = struct.Struct(">i")
_IDENTITY = struct.Struct(">qqIi")


def fingerprint_of(record: Buffer, tag_code: int) -> int:
    """The fingerprint of a sound record, whose item has this tag code; 0 when these bytes are not a record of RocketMQ."""
    kind = kind_of(tag_code)
    if kind is not RecordKind.ROCKETMQ:
        from tiered.format.heads import fingerprint_of_head  # noqa: PLC0415 (most tiers have none of them)

        return fingerprint_of_head(kind, record)
    view = memoryview(record).cast("B")
    if view.nbytes < RECORD_BYTES_MIN:
        return 0
    _, magic, crc, _, _, queue_offset, _, sys_flag, _ = HEADER.unpack_from(view)
    store_at = STORE_TIME_AT + extra_of(sys_flag, BORN_HOST_V6)
    extra = v6_extra_bytes(sys_flag)
    body_size = _INT.unpack_from(view, BODY_SIZE_AT + extra)[0]
    store_ms = _LONG.unpack_from(view, store_at)[0]
    rest = bytes(
        view[BODY_AT + extra + body_size :]
    )  # topic and properties, each behind its length
    length_bytes = 2 if magic == MAGIC_V2 else 1
    topic_bytes = int.from_bytes(rest[:length_bytes], "big")
    unique = value_of(rest[length_bytes + topic_bytes + 2 :], UNIQ_KEY.encode())
    identity = _IDENTITY.pack(queue_offset, store_ms, crc, body_size)
    return zlib_ng.crc32(identity + unique) or 1


def fingerprint_of_item(batch: RecordBatch, number: int) -> int:
    """The fingerprint of a batch's item; 0 for a hole."""
    size = int(batch.sizes[number])
    if size <= 0:
        return 0
    start = int(batch.positions[number])
    record = memoryview(batch.data).cast("B")[start : start + size]
    return fingerprint_of(record, int(batch.tag_codes[number]))


# -- divergence ---------------------------------------------------------------------------------------
#
# Where a queue's local history diverges from the tier's: one pure search over two functions that tell fingerprints.
#
# Equality of a prefix is monotone: when two histories differ at one offset, they differ at all later ones. So the last
# common message is found by bisection, first over the last messages of the parts (whose fingerprints the journal has), then
# within one part. Offsets that cannot be compared (a hole on either side, a gap) are passed over downwards, and decide
# nothing.

UNCOMPARED_MAX = 64
"""So many offsets in a row are tried that cannot be compared."""


def first_difference(
    low: int, high: int, ends: Sequence[int], same: Callable[[int], bool | None]
) -> tuple[int, bool]:
    """Find where two histories diverge.

    Args:
        high: One past the last that both have; above ``low``.
        same: Whether both have the same message at an offset; None when that cannot be told.

    Returns:
        The first offset from which they differ (``high``: nowhere, as far as can be told), and whether any common
        message was found before it.
    """
    known, found, differs = low - 1, False, high
    cheap = ends[bisect_left(ends, low) : bisect_right(ends, high - 1)]
    if not cheap or cheap[-1] != high - 1:
        cheap = [*cheap, high - 1]
    for row in (cheap, range(low, high)):
        begin, end = 0, len(row)
        while begin < end:
            middle = (begin + end) // 2
            at = row[middle]
            if at <= known:
                begin = middle + 1
            elif at >= differs:
                end = middle
            else:
                offset, answer = _nearest(at, known, same)
                if (
                    answer is None and row is cheap
                ):  # in a long gap, say; what lies before it may tell
                    before = reversed(cheap[begin:middle][-UNCOMPARED_MAX:])
                    offset, answer = _first_answer(before, known, same)
                if answer is False:
                    differs = offset
                else:
                    known, found = at, found or answer is True
    return differs, found


def _nearest(at: int, above: int, same: Callable[[int], bool | None]) -> tuple[int, bool | None]:
    """The answer for the nearest offset at or below ``at`` that has one; None when there is none above ``above``."""
    for offset in range(at, max(above, at - UNCOMPARED_MAX), -1):
        answer = same(offset)
        if answer is not None:
            return offset, answer
    return at, None


def _first_answer(
    offsets: Iterable[int], above: int, same: Callable[[int], bool | None]
) -> tuple[int, bool | None]:
    """As ``_nearest``, of the first of these offsets that has one."""
    for at in offsets:
        offset, answer = _nearest(at, above, same)
        if answer is not None:
            return offset, answer
    return above, None


# -- change ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """What has to be said of a queue whose local history is another."""

    action: Action  # ``truncate`` or ``incarnation``
    end: QueueOffset
    """Where the tier's present history ends (its commit offset, when the queue begins anew)."""
    start: QueueOffset  # where the queue goes on

    @property
    def is_anew(self) -> bool:
        """The queue begins anew."""
        return bool(self.action["do"] == "incarnation")


def plan_change(
    queue: MessageQueue,
    incarnation: Incarnation,
    bounds: QueueBounds,
    *,
    local_fingerprint: Callable[[int], int],
    tier_fingerprint: Callable[[int], int],
    read_items: Callable[[Part, int], tuple[int, int]],
) -> Change | None:
    """What to say of a queue, by what both sides have.

    Args:
        local_fingerprint: Of a local record; 0 when there is nothing to compare, ``HOLE`` when it cannot be read.
        read_items: Of the first items of a part: the bytes of the commit log that they need, and holes among them.

    Returns:
        None when they agree as far as both go, or the local store begins behind the tier's end.
    """
    low = max(incarnation.min_offset, bounds.min)
    high = min(incarnation.commit_offset, bounds.end)
    if (
        bounds.min >= incarnation.commit_offset
        or not incarnation.commit_offset > incarnation.min_offset
    ):
        return None

    def same(offset: int) -> bool | None:
        theirs = local_fingerprint(offset)
        ours = tier_fingerprint(offset) if theirs > 0 else 0
        return theirs == ours if theirs > 0 and ours > 0 else None

    end, is_common = int(low), False
    if low < high:
        ends = [part.queue_end - 1 for part in incarnation.parts()]
        end, is_common = first_difference(low, high, ends, same)
        if (
            bounds.end >= incarnation.commit_offset
        ):  # else a copy that lags would lose what is behind a hole
            end = _first_message_for_hole(low, end, local_fingerprint, tier_fingerprint)
        if end == high:
            return None
    cut = _cut(incarnation, QueueOffset(end), tier_fingerprint, read_items) if is_common else None
    if cut is None:
        return begin_anew(queue, incarnation, bounds)
    return _end_at(
        queue, incarnation, *cut, "the local store has other messages from queue offset {} on"
    )


def plan_end(
    queue: MessageQueue,
    incarnation: Incarnation,
    end: QueueOffset,
    *,
    tier_fingerprint: Callable[[int], int],
    read_items: Callable[[Part, int], tuple[int, int]],
) -> Change:
    """What to say when a person has decided where a queue ends; the other arguments are those of ``plan_change``.

    Args:
        end: Where it is to end: at or above its minimum, below its commit offset. At its minimum nothing would be left
            of the incarnation, so the queue begins anew there.
    """
    why = "a person has truncated what is from queue offset {} on"
    cut = (
        _cut(incarnation, end, tier_fingerprint, read_items)
        if end > incarnation.min_offset
        else None
    )
    if cut is not None:
        return _end_at(queue, incarnation, *cut, why)
    start = incarnation.min_offset
    fields = {"start": start, "reason": why.format(start)}
    action = queue_action("incarnation", queue, incarnation.number + 1, **fields)
    return Change(action, incarnation.commit_offset, start)


def _first_message_for_hole(
    low: int,
    end: int,
    local_fingerprint: Callable[[int], int],
    tier_fingerprint: Callable[[int], int],
) -> int:
    """Where the local store has messages for holes of the tier, behind the last message that both have.

    Nothing there can be compared, but a hole that ends the tier must not hide a message: what is behind it is taken anew.
    """
    found = end
    for offset in range(end - 1, max(low, end - UNCOMPARED_MAX) - 1, -1):
        theirs = local_fingerprint(offset)
        ours = tier_fingerprint(offset) if theirs > 0 else 0
        if ours > 0:
            return found
        if ours == HOLE:
            found = offset
    return found


def fingerprints_to_witness(
    low: int,
    last: int,
    local_fingerprint: Callable[[int], int],
    tier_fingerprint: Callable[[int], int],
) -> tuple[int, ...]:
    """Fingerprints of the local records from ``last`` down to the nearest message that both sides have, or to ``low``.

    All but that message are of records that cannot be compared; if one of them is another later on, it may be possible.
    """
    found = []
    for offset in range(last, max(low, last - UNCOMPARED_MAX) - 1, -1):
        theirs = local_fingerprint(offset)
        found.append(theirs)
        if theirs > 0 and tier_fingerprint(offset) == theirs:
            break
    return tuple(found)


def plan_beginning(
    queue: MessageQueue,
    incarnation: Incarnation | None,
    bounds: QueueBounds,
    goes_on: QueueOffset,
    start: QueueOffset,
) -> Change | None:
    """What to say of a queue of whose present incarnation the tier has nothing that could be compared.

    Args:
        start: Where it would begin if the tier had never met it; what is missing from there on is a gap.

    Returns:
        None when it may well go on there.
    """
    if incarnation is None:
        why = {"start": start, "reason": "begins here"}
        action = queue_action("incarnation", queue, 0, **why)
        return Change(action, goes_on, start) if start < goes_on else None
    if bounds.end < goes_on:
        return begin_anew(queue, incarnation, bounds)
    if not was_taken(incarnation) and max(start, bounds.min) < goes_on:
        return begin_anew(queue, incarnation, bounds, start)
    return None


def was_taken(incarnation: Incarnation) -> bool:
    """Whether anything of an incarnation was ever tiered, though all of it may have expired.

    Damaged records leave nothing in the log, but were put aside. Of other holes alone, expired, nobody can tell.
    """
    return incarnation.log_end > 0 or incarnation.quarantined > 0


def begin_anew(
    queue: MessageQueue,
    incarnation: Incarnation,
    bounds: QueueBounds,
    start: QueueOffset = QueueOffset(0),  # noqa: B008 (a NewType: the number itself)
) -> Change:
    """At 0, also where retention has taken the first messages of the new incarnation already: these are a gap."""
    why = {
        "start": start,
        "reason": f"the local store has other messages [{bounds.min}, {bounds.end}) and none in common",
    }
    action = queue_action("incarnation", queue, incarnation.number + 1, **why)
    return Change(action, incarnation.commit_offset, start)


def _end_at(
    queue: MessageQueue, incarnation: Incarnation, end: QueueOffset, head: Head | None, reason: str
) -> Change:
    action = queue_action(
        "truncate",
        queue,
        incarnation.number,
        end=end,
        was=incarnation.commit_offset,
        head=row_of(head) if head else None,
        reason=reason.format(end),
    )
    return Change(action, incarnation.commit_offset, end)


def _cut(
    incarnation: Incarnation,
    end: QueueOffset,
    tier_fingerprint: Callable[[int], int],
    read_items: Callable[[Part, int], tuple[int, int]],
) -> tuple[QueueOffset, Head | None] | None:
    """Where to end, and what stays of the part that this lies in; None when nothing of the incarnation would be left.

    A part whose index is damaged or gone can not be divided: all of it goes, and is taken anew. Nor can a record: of a batch
    of several items all go.
    """
    low = incarnation.min_offset
    mark = tier_fingerprint(end) if low < end < incarnation.commit_offset else 0
    if mark > 0 and tier_fingerprint(end - 1) == mark:
        at = bisect_left(range(low, end), True, key=lambda one: tier_fingerprint(one) == mark)
        end = QueueOffset(low + at)
        if end == low:
            return None
    part = next((p for p in incarnation.parts() if p.queue_offset < end < p.queue_end), None)
    if part is None:
        return end, None
    count = end - part.queue_offset
    try:
        size, holes = read_items(part, count)
    except (DataError, ObjectNotFoundError):
        return (part.queue_offset, None) if part.queue_offset > incarnation.min_offset else None
    last = max(0, tier_fingerprint(end - 1))
    return end, Head(part.queue_offset, part.log_offset, size, holes, last, part.holes)


def fingerprint_in_tier(reader: QueueReader, offset: int) -> int:
    """Fingerprint of a tier record: the journal's if it has it, else the record is read; 0 in a gap or near damage."""
    part = next((p for p in reader.incarnation.parts() if p.queue_end - 1 == offset), None)
    if part and part.last:
        return part.last
    try:
        found = reader.read(QueueOffset(offset), bytes_max=1, count_max=1)
    except (DataError, ObjectNotFoundError):
        return 0
    if found is None or isinstance(found, Gap) or found.records.base_offset != offset:
        return 0
    return fingerprint_of_item(found.records, 0) if found.records.sizes[0] else HOLE


def measure(store: ObjectStore, prefix: str, part: Part, count: int) -> tuple[int, int]:
    """Of the first ``count`` items of a part: the bytes of the commit log that they need, and holes among them."""
    raw = read_range(store, prefix, part.index.part_of(0, count * ITEM_BYTES))
    items = np.frombuffer(raw, ITEM)
    sizes = items["size"].astype(np.int64)
    ends = (items["log_offset"].astype(np.int64) + sizes)[sizes > 0]
    size = int(ends.max()) - part.log_offset if len(ends) else 0
    return size, int(np.count_nonzero(sizes == 0))
