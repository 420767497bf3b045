"""Many records at once: where they are, what they say, whether they are sound, whose they are.

Three steps, each of which can be had by itself (``split_records`` does all three):

1. ``walk_records`` follows the chain of sizes;
2. ``parse_records`` gathers the fields of all records into arrays;
3. ``check_records`` compares places and CRCs.

Then ``group_by_queue`` tells whose they are. ``tiered.format.scalar`` says the same one record at a
time, in plain code; a property test holds the two equal.
"""

from __future__ import annotations

from typing_extensions import Buffer

from tiered.format.grouping import (
    group_by_queue,
    inner_counts,
    properties_bytes,
    topic_bytes,
    topics_equal,
)
from tiered.format.parse import RecordBlock, check_records, parse_records
from tiered.format.tagging import tag_guesses, tag_hashes
from tiered.format.walk import Stop, Walk, walk_records

__all__ = [
    "RecordBlock",
    "Stop",
    "Walk",
    "check_records",
    "group_by_queue",
    "inner_counts",
    "parse_records",
    "properties_bytes",
    "split_records",
    "tag_guesses",
    "tag_hashes",
    "topic_bytes",
    "topics_equal",
    "walk_records",
]


def split_records(
    buffer: Buffer,
    start: int,
    end: int,
    *,
    physical_offset: int,
    size_max: int,
    check_crc: bool = True,
) -> tuple[RecordBlock, Walk]:
    """Walk, parse and check what lies in ``[start, end)`` of a piece of the local log.

    Args:
        buffer: Holds the piece.
        start: Where a record begins.
        end: One past the last byte to look at.
        physical_offset: Local physical offset of the byte at ``start``.
        size_max: Bytes of the largest record that is believed.
        check_crc: Read every body.

    Returns:
        The records, faults included, and the walk. A record with a fault does not end the walk as
        long as its size leads on.
    """
    walk = walk_records(buffer, start, end, size_max=size_max)
    block = parse_records(buffer, walk.positions, walk.sizes)
    check_records(
        block,
        expected_physical=walk.positions + (physical_offset - start),
        check_crc=check_crc,
    )
    return block, walk
