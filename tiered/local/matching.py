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
        is_listed: bool[n], whether the queue lists this record (place and size) at its first queue offset.
        is_written: bool[n], whether the queue lists anything there.
        entries: Of all their queue offsets, when these follow each other without a gap; else None.
    """

    indices: Longs
    offsets: Longs
    counts: Longs | None
    is_listed: Flags
    is_written: Flags
    entries: Entries | None

    @property
    def end(self) -> int:
        """One past the last queue offset of the last record."""
        return int(self.offsets[-1]) + (1 if self.counts is None else int(self.counts[-1]))


def match(index: QueueIndex, block: RecordBlock, indices: Longs) -> Match:
    """Compare the records at ``indices`` (one queue's, in log order, at least one) with their entries.

    One read of the consume queue when the queue offsets follow each other, which is the rule.
    """
    offsets = block.queue_offsets[indices]
    counts = inner_counts(block)[indices].astype(np.int64) if index.is_batch else None
    first, count = int(offsets[0]), len(indices)
    end = first + count if counts is None else int(offsets[-1]) + int(counts[-1])
    if not _follow_on(offsets, counts):
        return _match_runs(index, block, indices, offsets, counts)
    _look_for_files(index, end)
    entries = index.entries(first, end)
    heads = entries if counts is None else _heads(entries, offsets - first)
    listed = (heads.physical_offsets == block.physical_offsets[indices]) & (
        heads.sizes == block.sizes[indices]
    )
    return Match(indices, offsets, counts, listed, heads.is_written, entries)


def _follow_on(offsets: Longs, counts: Longs | None) -> bool:
    """Whether each record's queue offset is one past the last of the record before."""
    if counts is None:
        count = len(offsets)
        return int(offsets[-1]) - int(offsets[0]) == count - 1 and (
            count == 1 or bool((offsets[1:] > offsets[:-1]).all())
        )
    return bool((offsets[1:] == offsets[:-1] + counts[:-1]).all())


def _match_runs(
    index: QueueIndex, block: RecordBlock, indices: Longs, offsets: Longs, counts: Longs | None
) -> Match:
    """Queue offsets with gaps or steps back: run by run."""
    listed, written = np.zeros(len(indices), np.bool_), np.zeros(len(indices), np.bool_)
    for first, last in runs(offsets, counts):
        if offsets[first] < 0:
            continue
        chosen = slice(first, last)
        part = match(index, block, indices[chosen])
        listed[chosen], written[chosen] = part.is_listed, part.is_written
    return Match(indices, offsets, counts, listed, written, None)


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


def _look_for_files(index: QueueIndex, end: int) -> None:
    """List the directory again when the files known do not reach ``end`` (batch queues: always, it is one call)."""
    if index.is_batch or end > index.span()[1]:
        index.row.rescan()
