"""Holding records of the log against what their consume queue lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiered.format.block import RecordBlock, inner_counts
from tiered.local.entries import Entries, Flags, Longs, no_entries

if TYPE_CHECKING:
    from tiered.local.consumequeues import QueueIndex


@dataclass(slots=True)
class Match:
    """Records of one queue, in log order, beside the entries of their queue offsets.

    Attributes:
        indices: int64[n], in the block.
        offsets: int64[n], the first queue offset of each record.
        counts: int64[n], how many queue offsets each takes; None: one each.
        is_all_listed: Every record is listed.
        is_listed: bool[n], whether the queue lists this record (place and size) at its first queue offset.
        is_written: bool[n], whether the queue lists anything there.
        entries: Of all their queue offsets, when these follow each other without a gap; else None.
    """

    indices: Longs
    offsets: Longs
    counts: Longs | None
    is_all_listed: bool
    is_listed: Flags
    is_written: Flags
    entries: Entries | None

    def last_listed(self) -> tuple[int, int]:
        """Index in the block of the last listed record, and one past its last queue offset; (-1, 0) without one."""
        at = -1
        if not self.is_all_listed:
            listed = np.flatnonzero(self.is_listed)
            if not len(listed):
                return -1, 0
            at = int(listed[-1])
        count = 1 if self.counts is None else int(self.counts[at])
        return int(self.indices[at]), int(self.offsets[at]) + count


_YES = np.ones(1, np.bool_)


def match(index: QueueIndex, block: RecordBlock, indices: Longs) -> Match:
    """Compare the records at ``indices`` (one queue's, in log order, at least one) with their entries.

    One read of the consume queue when the queue offsets follow each other, which is the rule.
    """
    offsets = block.queue_offsets[indices]
    if index.is_batch:
        return _match_batches(index, block, indices, offsets)
    first, count = int(offsets[0]), len(indices)
    if int(offsets[-1]) - first != count - 1 or not _increases(offsets):
        return _match_runs(index, block, indices, None)
    physical, sizes = block.physical_offsets[indices], block.sizes[indices]
    if index.row.end < (first + count) * index.unit_bytes:
        index.row.rescan()
    tags = index.tags_if_listed(first, physical, sizes)
    if tags is not None:
        entries = Entries(first, physical, sizes, tags)
        # All are listed: one flag stands for all of them.
        return Match(indices, offsets, None, True, np.broadcast_to(_YES, count), _YES, entries)
    entries = index.entries(first, first + count)
    listed = (entries.physical_offsets == physical) & (entries.sizes == sizes)
    return Match(indices, offsets, None, bool(listed.all()), listed, entries.is_written, entries)


def _match_batches(index: QueueIndex, block: RecordBlock, indices: Longs, offsets: Longs) -> Match:
    counts = inner_counts(block)[indices].astype(np.int64)
    if not (offsets[1:] == offsets[:-1] + counts[:-1]).all():
        return _match_runs(index, block, indices, counts)
    index.row.rescan()
    first = int(offsets[0])
    entries = index.entries(first, int(offsets[-1]) + int(counts[-1]))
    heads = _heads(entries, offsets - first)
    listed = (heads.physical_offsets == block.physical_offsets[indices]) & (
        heads.sizes == block.sizes[indices]
    )
    return Match(indices, offsets, counts, bool(listed.all()), listed, heads.is_written, entries)


def _increases(offsets: Longs) -> bool:
    return len(offsets) == 1 or bool((offsets[1:] > offsets[:-1]).all())


def _match_runs(
    index: QueueIndex, block: RecordBlock, indices: Longs, counts: Longs | None
) -> Match:
    """Queue offsets with gaps or steps back: run by run."""
    offsets = block.queue_offsets[indices]
    listed, written = np.zeros(len(indices), np.bool_), np.zeros(len(indices), np.bool_)
    for first, last in runs(offsets, counts):
        if offsets[first] < 0:
            continue
        chosen = slice(first, last)
        part = match(index, block, indices[chosen])
        listed[chosen], written[chosen] = part.is_listed, part.is_written
    return Match(indices, offsets, counts, bool(listed.all()), listed, written, None)


def runs(offsets: Longs, counts: Longs | None) -> list[tuple[int, int]]:
    """Where queue offsets follow each other: ``[first, last)`` of each run."""
    if not len(offsets):
        return []
    steps = 1 if counts is None else counts[:-1]
    breaks = (np.flatnonzero(offsets[1:] != offsets[:-1] + steps) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(offsets)], strict=True))


def _heads(entries: Entries, at: Longs) -> Entries:
    """The entries at some places only."""
    inside = (at >= 0) & (at < len(entries))
    found = no_entries(entries.start, len(at))
    found.physical_offsets[inside] = entries.physical_offsets[at[inside]]
    found.sizes[inside] = entries.sizes[at[inside]]
    return found
