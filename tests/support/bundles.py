"""Bundles for tests: real ones put into a store, and what the journal says of them, real or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiered.format.bundle import SectionPlace, SectionTable, build_tail, pack_table
from tiered.log.bundles import SectionRow, bundle_row, encode_numbers, sections_of, table_of
from tiered.log.merge import fingerprint
from tiered.log.parts import Bundle, Part
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ObjectStore
    from tiered.format.bundle import Section
    from tiered.journal.entry import Action
    from tiered.log.bundles import NamedSections, StoredBundle
    from tiered.log.parts import Parts


def put_bundle(
    store: ObjectStore, key: str, sections: Sequence[tuple[SectionRow, Section]], level: int = 0
) -> NamedSections:
    """Put a bundle of these sections, in this order; its sections as parts.

    Args:
        store: Where.
        key: The whole of it; the parts have it as it is.
        sections: What it is made of.
        level: Its level.
    """
    table = table_of(((row, section.place) for row, section in sections), level)
    tail = build_tail(table, pack_table(table))
    store.put_if_absent(key, [*(b for _, section in sections for b in section.buffers), tail])
    size = sum(section.place.size_bytes for _, section in sections) + len(tail)
    return sections_of(Bundle(key, size, level), table)


def part_action(*stored: StoredBundle) -> Action:
    """An entry's action that names every section of these bundles."""
    return {"do": "part", "bundles": [bundle_row(one.bundle, one.packed) for one in stored]}


def made_part(
    queue_offset: int,
    log_offset: int,
    count: int = 10,
    size: int = 1000,
    *,
    key: str = "",
    start: int = 0,
    level: int = 0,
    holes: int = 0,
    times: tuple[int, int] = (5, 6),
    last: int = 0,
) -> Part:
    """A part whose bundle is nowhere: one section, plain, alone in a bundle unless ``start`` says otherwise.

    Args:
        queue_offset: Of its first item.
        log_offset: Of its first record.
        count: Items.
        size: Bytes of records.
        key: Of the bundle; empty: from the queue offset.
        start: Where the section begins.
        level: Of the bundle.
        holes: Items without a message.
        times: Smallest and greatest store time.
        last: Mark of its last record.
    """
    blocks = -(-size // 65536) + -(-20 * count // 65536)
    whole = size + 20 * count + 4 * blocks
    place = SectionPlace(start, size, size, count, whole, 7)
    bundle = Bundle(key or f"b{queue_offset}", start + whole + 100, level)
    low, high = times
    return Part(
        bundle, place, LogOffset(log_offset), QueueOffset(queue_offset), size, count, holes, low, high, last
    )  # fmt: skip


Placed = tuple[MessageQueue, int, int, Part]
"""A part, and whose it is: queue, incarnation, base log offset of the segment."""


def rows_of(named: Sequence[Placed], *, truncated: bool = False) -> list[list[object]]:
    """Rows of an entry that name these parts, each a whole section; those of one bundle must be neighbours."""
    rows: list[list[object]] = []
    some: list[Placed] = []
    for one in named:
        if some and some[-1][3].bundle != one[3].bundle:
            rows.append(_row_of(some, truncated))
            some = []
        some.append(one)
    return [*rows, _row_of(some, truncated)] if some else rows


def _row_of(some: Sequence[Placed], truncated: bool) -> list[object]:
    pairs = [
        (
            SectionRow(
                queue,
                incarnation,
                segment,
                part.log_offset,
                part.queue_offset,
                part.holes,
                part.store_min_ms,
                part.store_max_ms,
                part.last,
                truncated,
            ),
            part.section,
        )
        for queue, incarnation, segment, part in some
    ]
    table = table_of(pairs)
    rows = table.rows.copy()
    rows["start"] = np.array([part.section.start for *_, part in some])
    return bundle_row(some[0][3].bundle, pack_table(SectionTable(table.topics, rows)))


def named_action(*named: Placed) -> Action:
    """A ``part`` of parts whose bundles need not be anywhere."""
    return {"do": "part", "bundles": rows_of(named)}


def merge_action(
    *merged: tuple[MessageQueue, int, int, Part, Parts],
    incarnation: int = 0,
    truncated: bool = False,
) -> Action:
    """A ``merge``: queue, incarnation, segment, the part that was made, and what it takes the place of."""
    return {
        "do": "merge",
        "bundles": rows_of([one[:4] for one in merged], truncated=truncated),
        "positions": encode_numbers([incarnation] * len(merged)),
        "runs": encode_numbers([fingerprint(run) for *_, run in merged]),
    }
