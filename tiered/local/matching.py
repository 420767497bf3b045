"""Holding records of the log against what their consume queues list.

As a rule a piece of the log holds, of each queue, records whose queue offsets follow each other, and whose consume queue
lists them as they are. ``match_groups`` sees that with one small read a queue and one comparison for all of them; what it
finds otherwise is looked at queue by queue (``match``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiered.format.block import Groups, RecordBlock, inner_counts, queue_groups
from tiered.format.consume_queue import ITEM, ITEM_BYTES, Items
from tiered.local.consumequeues import Entries, Flags, Longs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.local.catalog import Catalog, QueueState
    from tiered.local.consumequeues import QueueIndex


@dataclass(slots=True)
class Match:
    """Records of one queue, in log order, beside the entries of their queue offsets.

    Attributes:
        indices: int64[n], in the block.
        offsets: int64[n], the first queue offset of each record.
        counts: int64[n], how many queue offsets each takes; None: one each.
        is_all_listed: Every record is listed.
        is_listed: bool[n], whether the queue lists this record's place at its first queue offset.
        listed_at: int64[n], the place that it lists; -1 where it lists none. One element when all are listed.
        entries: Of all their queue offsets, when these follow each other without a gap; else None.
    """

    indices: Longs
    offsets: Longs
    counts: Longs | None
    is_all_listed: bool
    is_listed: Flags
    listed_at: Longs
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

    @property
    def all_entries(self) -> Entries:
        """``entries``, where there are some."""
        assert self.entries is not None
        return self.entries

    def owns(self) -> Longs:
        """int64, index in the block of the record that each entry names, where all are listed."""
        return self.indices if self.counts is None else np.repeat(self.indices, self.counts)


_YES = np.ones(1, np.bool_)


def match_states(
    catalog: Catalog, block: RecordBlock, among: Flags | None = None
) -> list[tuple[QueueState, Match]]:
    """Compare records with their entries: each queue that is tiered, and its records.

    Args:
        catalog: Finds the queues. Its lock is held.
        block: Holds the records.
        among: bool[n], which records; default: those without a fault.
    """
    groups = queue_groups(block, among=among)
    states = [catalog.find(queue) for queue in groups.queues]
    found = match_groups([state.index if state else None for state in states], block, groups)
    return [(state, one) for state, one in zip(states, found, strict=True) if state and one]


def match_groups(
    indexes: Sequence[QueueIndex | None], block: RecordBlock, groups: Groups
) -> list[Match | None]:
    """Compare the records of many queues with their entries.

    Args:
        indexes: Of each of the groups' queues; None: it is of no interest, and has no match.
        block: Holds the records.
        groups: Records, divided by queue.
    """
    offsets = block.queue_offsets[groups.indices]
    physical, sizes = block.physical_offsets[groups.indices], block.sizes[groups.indices]
    firsts = np.array(groups.starts[:-1], np.int64)
    steps = np.ones(len(offsets), np.bool_)
    steps[1:] = offsets[1:] == offsets[:-1] + 1
    steps[firsts] = offsets[firsts] >= 0
    is_even = np.logical_and.reduceat(steps, firsts) if len(firsts) else steps
    items = _items(indexes, groups, offsets, is_even.tolist())
    same = (items["physical_offset"] == physical) & (items["size"] == sizes)
    is_even &= np.logical_and.reduceat(same, firsts) if len(firsts) else same
    tags = items["tag_code"].astype(np.int64)
    yes = np.ones(len(offsets), np.bool_)
    found: list[Match | None] = []
    for number, (index, is_plain) in enumerate(zip(indexes, is_even.tolist(), strict=True)):
        mine = slice(groups.starts[number], groups.starts[number + 1])
        if index is None:
            found.append(None)
        elif not is_plain:
            found.append(match(index, block, groups.indices[mine]))
        else:
            places, some = physical[mine], offsets[mine]
            entries = Entries(int(some[0]), places, sizes[mine], tags[mine])
            found.append(Match(groups.indices[mine], some, None, True, yes[mine], places, entries))
    return found


def _items(
    indexes: Sequence[QueueIndex | None], groups: Groups, offsets: Longs, wanted: list[bool]
) -> Items:
    """The entries of all records, as the files have them; zeros where one read does not give those of a queue."""
    room = bytearray(len(offsets) * ITEM_BYTES)
    view, firsts = memoryview(room), offsets[groups.starts[:-1]].tolist()
    for number, index in enumerate(indexes):
        if index is not None and wanted[number] and not index.is_batch:
            low, high = groups.starts[number], groups.starts[number + 1]
            place = firsts[number] * ITEM_BYTES
            index.row.read_into(place, view[low * ITEM_BYTES : high * ITEM_BYTES])
    return np.frombuffer(room, ITEM)


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
    if tags is None and index.row.rescan():
        tags = index.tags_if_listed(first, physical, sizes)  # the files are others now
    if tags is not None:
        entries = Entries(first, physical, sizes, tags)
        return Match(indices, offsets, None, True, np.ones(count, np.bool_), physical, entries)
    entries = index.entries(first, first + count)
    places = _places(entries)
    return _matched(Match(indices, offsets, None, False, _YES, places, entries), block)


def _match_batches(index: QueueIndex, block: RecordBlock, indices: Longs, offsets: Longs) -> Match:
    counts = inner_counts(block)[indices].astype(np.int64)
    if len(runs(offsets, counts)) > 1:
        return _match_runs(index, block, indices, counts)
    index.row.rescan()
    first = int(offsets[0])
    entries = index.entries(first, int(offsets[-1]) + int(counts[-1]))
    places = _places(entries)
    starts = offsets - first
    heads = places[starts]
    whole = np.logical_and.reduceat(places == np.repeat(heads, counts), starts)
    # A unit that names the right place for some of a record's offsets only says nothing of use.
    is_half = ~whole & (heads == block.physical_offsets[indices])
    places = np.where(is_half, -1, heads)
    return _matched(Match(indices, offsets, counts, False, _YES, places, entries), block)


def _places(entries: Entries) -> Longs:
    """Where each entry says that its record lies; -1 where it says nothing."""
    return np.where(entries.is_written, entries.physical_offsets, -1)


def _matched(found: Match, block: RecordBlock) -> Match:
    """Compare, and let the sizes of listed records be their own: an entry may be damaged in its size alone."""
    indices = found.indices
    found.is_listed = found.listed_at == block.physical_offsets[indices]
    found.is_all_listed = bool(found.is_listed.all())
    if found.is_all_listed and found.entries is not None:
        sizes = block.sizes[indices]
        found.entries.sizes = sizes if found.counts is None else np.repeat(sizes, found.counts)
    return found


def _increases(offsets: Longs) -> bool:
    return len(offsets) == 1 or bool((offsets[1:] > offsets[:-1]).all())


def _match_runs(
    index: QueueIndex, block: RecordBlock, indices: Longs, counts: Longs | None
) -> Match:
    """Queue offsets with gaps or steps back: run by run."""
    offsets = block.queue_offsets[indices]
    listed, places = np.zeros(len(indices), np.bool_), np.full(len(indices), -1, np.int64)
    for first, last in runs(offsets, counts):
        if offsets[first] < 0:
            continue
        chosen = slice(first, last)
        part = match(index, block, indices[chosen])
        listed[chosen], places[chosen] = part.is_listed, part.listed_at
    return Match(indices, offsets, counts, bool(listed.all()), listed, places, None)


def runs(offsets: Longs, counts: Longs | None) -> list[tuple[int, int]]:
    """Where queue offsets follow each other: ``[first, last)`` of each run."""
    if not len(offsets):
        return []
    steps = 1 if counts is None else counts[:-1]
    leads_on = (offsets[1:] == offsets[:-1] + steps) & (offsets[1:] >= offsets[:-1])  # a sum wraps
    breaks = (np.flatnonzero(~leads_on) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(offsets)], strict=True))
