"""Queues in a tier whose messages have the store times and sizes that a test asks for, without a journal."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from support.bundles import put_bundle
from support.examples import HOST_V4, HOST_V6, make
from support.journals import PREFIX
from support.tiers import QUEUE

from tiered.format.bundle import build_section
from tiered.format.record import encode_record
from tiered.format.sysflag import BORN_HOST_V6
from tiered.log.bundles import SectionRow
from tiered.log.cursor import IncarnationView
from tiered.log.flat_file import ITEM
from tiered.log.parts import Bundle, Incarnation, Part, Parts, Segment
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore

Timed = tuple[int, int] | None
"""Store time and size of the body of one message; or a hole."""


def _record(offset: int, time_ms: int, body_bytes: int) -> bytes:
    """A record; of every third the producer has an IPv6 address, which stands before the store time."""
    is_v6 = offset % 3 == 0
    record = make(
        queue_id=QUEUE.queue_id,
        queue_offset=offset,
        sys_flag=BORN_HOST_V6 if is_v6 else 0,
        born_host=HOST_V6 if is_v6 else HOST_V4,
        born_timestamp_ms=1,
        store_timestamp_ms=time_ms,
        body=b"x" * body_bytes,
        topic=QUEUE.topic,
    )
    return encode_record(record)


def put_part(
    store: ObjectStore, messages: Sequence[Timed], queue_offset: int, log_offset: int
) -> Part:
    """One part; its messages need not be in the order of their times."""
    raws = [
        b"" if one is None else _record(queue_offset + n, *one) for n, one in enumerate(messages)
    ]
    sizes = [len(raw) for raw in raws]
    begins = list(accumulate(sizes, initial=log_offset))[:-1]
    items = np.zeros(len(raws), ITEM)
    items["log_offset"], items["size"], items["tag_code"] = begins, sizes, 97
    times = [one[0] for one in messages if one is not None]
    row = SectionRow(
        *(QUEUE, 0, log_offset, log_offset, queue_offset, len(raws) - len(times)),
        *(min(times, default=-1), max(times, default=-1)),
    )
    key = f"part/{queue_offset}"
    section = build_section([b"".join(raws)], items.tobytes())
    (part,) = put_bundle(store, PREFIX + key, [(row, section)]).parts
    return replace(part, bundle=Bundle(key, part.bundle.size_bytes))


def put_queue(
    store: ObjectStore, parts: Sequence[Sequence[Timed]], *, first: int = 0, minimum: int = 0
) -> IncarnationView:
    """A queue with these parts, each a segment of its own, and how a reader sees it."""
    made: list[Part] = []
    queue_offset, log_offset = first, 0
    for messages in parts:
        made.append(put_part(store, messages, queue_offset, log_offset))
        queue_offset, log_offset = made[-1].queue_end, made[-1].log_end
    segments = tuple(
        Segment(part.log_offset, part.queue_offset, 0, sealed=True, parts=Parts.of([part]))
        for part in made
    )
    low = QueueOffset(max(first, minimum))
    incarnation = Incarnation(0, low, QueueOffset(queue_offset), LogOffset(log_offset), segments)
    return IncarnationView.of(QUEUE, incarnation)
