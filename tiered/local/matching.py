"""Holding records of the log against what their consume queues list.

As a rule a chunk of the log holds, of each queue, records whose queue offsets follow each other, and whose consume queue
lists them as they are. ``match_groups`` sees that with one small read a queue and one comparison for all of them; what it
finds otherwise is looked at queue by queue (``match``). Of a stopped store with many small queues all entries are read
once, into columns (``SmallQueues``): then a chunk costs by its records, and not by its queues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.format.block import Groups, RecordBlock, inner_counts
from tiered.format.items import ITEM, ITEM_BYTES, Items, is_filler
from tiered.format.sysflag import is_listable
from tiered.local.consumequeues import Entries, Flags, Longs, QueueTail

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiered.local.catalog import Catalog, QueueState
    from tiered.local.consumequeues import QueueIndex
    from tiered.model import MessageQueue


@dataclass(slots=True)
class Match:
    """Records of one queue, in log order, beside the entries of their queue offsets."""

    indices: Longs  # int64[n], in the block
    offsets: Longs  # int64[n], the first queue offset of each record
    counts: Longs | None  # int64[n], how many queue offsets each takes; None: one each
    is_all_listed: bool  # every record is listed
    is_listed: Flags
    """bool[n], whether the queue lists this record's place at its first queue offset."""
    listed_at: Longs
    """int64[n], the place that it lists; -1 where it lists none. One element when all are listed."""
    entries: Entries | None
    """Of all their queue offsets, when these follow each other without a gap; else None."""

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


_LISTED_BYTES_MAX = 32 << 20
"""Of entries that a ``SmallQueues`` keeps."""
_UNITS_READ = (128, 1024, 8192)
"""Entries that are read of a queue; the next number where all of those were written. What has more is no small queue."""
_READ_TOGETHER = 1 << 17
"""Entries of many queues that are looked at together."""


class SmallQueues:
    """Entries of the small queues of a stopped store, as they stand: plain queues of one file. For any thread, once made.

    20 bytes an entry are kept, 32 MiB at most; what does not fit, or is no such queue, is none of these.
    """

    def __init__(self, states: Iterable[QueueState] = ()) -> None:
        self._numbers: dict[MessageQueue, int] = {}
        self._firsts, self._starts = np.zeros(0, np.int64), np.zeros(1, np.int64)
        self._items = np.zeros(1, ITEM)  # the last belongs to nobody
        taken: list[Items] = []
        left = [state for state in states if _is_small(state.index)]
        room = _LISTED_BYTES_MAX // ITEM_BYTES
        for count in _UNITS_READ:
            step, longer = max(_READ_TOGETHER // count, 1), []
            for low in range(0, len(left), step):
                if room > 0:
                    some, rest = self._read(left[low : low + step], count)
                    taken.append(some)
                    longer += rest
                    room -= len(some)
            left = longer
        self._items = np.concatenate([*taken, self._items])
        self._seen = np.zeros(len(self._firsts), np.int64)

    def _read(self, states: list[QueueState], count: int) -> tuple[Items, list[QueueState]]:
        """Take in the queues that end within so many entries: their entries, and the other queues."""
        buffer = bytearray(len(states) * count * ITEM_BYTES)
        view, size = memoryview(buffer), count * ITEM_BYTES
        for number, state in enumerate(states):
            row = state.index.row
            row.read_into(row.bases[0], view[number * size : (number + 1) * size])
        items = np.frombuffer(buffer, ITEM).reshape(-1, count)
        is_end = (items["physical_offset"] < 0) | (items["size"] <= 0)
        has_end = is_end.any(axis=1)
        counts = np.where(has_end, is_end.argmax(axis=1), count)
        has_end |= np.array([state.index.row.file_bytes <= size for state in states])
        taken, counts = np.flatnonzero(has_end).tolist(), counts[has_end]
        firsts = [states[at].index.row.bases[0] // ITEM_BYTES for at in taken]
        at = len(self._numbers)
        self._numbers.update((states[one].queue, at + n) for n, one in enumerate(taken))
        mine = items[has_end][np.arange(count) < counts[:, None]]
        self._firsts = np.concatenate([self._firsts, np.array(firsts, np.int64)])
        self._starts = np.concatenate([self._starts, self._starts[-1] + np.cumsum(counts)])
        return mine, [states[one] for one in np.flatnonzero(~has_end).tolist()]

    def ends(self, log_min: int, log_end: int) -> dict[MessageQueue, tuple[QueueTail, bool]]:
        """The end of each queue, as a broker's start reads it, and whether it lists something and all within these bounds.

        Fillers are not within: they name no place in the log.
        """
        last = np.maximum(self._starts[1:] - 1, 0)
        is_empty = self._starts[1:] == self._starts[:-1]
        physical = self._items["physical_offset"].astype(np.int64)
        is_out = (physical < log_min) | (physical >= log_end) | is_filler(self._items)
        before = np.concatenate(([0], np.cumsum(is_out)))
        inside = ~is_empty & (before[self._starts[1:]] == before[self._starts[:-1]])
        places = np.where(is_empty, -1, physical[last] + self._items["size"][last])
        ends = (self._firsts + np.diff(self._starts)).tolist()
        rows = zip(self._numbers, ends, places.tolist(), inside.tolist(), strict=True)
        return {queue: (QueueTail(end, place), fits) for queue, end, place, fits in rows}

    def is_here(self, queue: MessageQueue) -> bool:
        """Whether all of a queue's entries are here."""
        return queue in self._numbers

    def listed(self) -> Longs:
        """int64[2, n]: the places that the queues here list, rising, and the sizes beside them."""
        named = self._items[:-1][~is_filler(self._items[:-1])]
        places = named["physical_offset"].astype(np.int64)
        order = np.argsort(places, kind="stable")
        return np.stack((places[order], named["size"][order].astype(np.int64)))

    def numbers(self, groups: Groups) -> Longs:
        """Which of the queues here each group is of; -1: none."""
        return np.array([self._numbers.get(queue, -1) for queue in groups.queues], np.int64)

    def items(self, groups: Groups, numbers: Longs, offsets: Longs) -> tuple[Items, Flags]:
        """The entries of the groups' records, and of which groups all are here; zeros where one is not."""
        counts = np.diff(groups.starts)
        owner = np.repeat(numbers, counts)
        at = offsets - self._firsts[owner] + self._starts[owner] if len(self._firsts) else owner
        is_here = owner >= 0
        is_here &= (at >= self._starts[owner]) & (at < self._starts[owner + 1])
        found = self._items[np.where(is_here, at, len(self._items) - 1)]
        return found, np.logical_and.reduceat(is_here, groups.starts[:-1])

    def take(self, block: RecordBlock, groups: Groups) -> Groups:
        """Note which groups are listed as they stand; the others, to be looked at one by one."""
        if not len(groups) or not self._numbers:
            return groups
        offsets, numbers = block.queue_offsets[groups.indices], self.numbers(groups)
        items, is_listed = self.items(groups, numbers, offsets)
        is_listed &= _are_even(groups, offsets) & _are_same(block, groups, items)
        mine = numbers[is_listed]
        ends = offsets[np.array(groups.starts[1:])[is_listed] - 1] + 1
        self._seen[mine] = np.maximum(self._seen[mine], ends)
        return groups.some(np.flatnonzero(~is_listed).tolist())

    def seen(self) -> dict[MessageQueue, int]:
        """One past the last queue offset of each queue of which a record was seen that is listed."""
        return dict(zip(self._numbers, self._seen.tolist(), strict=True))


def _is_small(index: QueueIndex) -> bool:
    """Whether it may be in a ``SmallQueues``."""
    return not index.is_batch and len(index.row.bases) == 1 and not index.row.bases[0] % ITEM_BYTES


def match_states(
    catalog: Catalog, block: RecordBlock, groups: Groups
) -> list[tuple[QueueState, Match]]:
    """Compare records with their entries: each queue that is tiered, and its records. The catalog's lock is held."""
    states = [catalog.find(queue) for queue in groups.queues]
    found = match_groups([state.index if state else None for state in states], block, groups)
    return [(state, one) for state, one in zip(states, found, strict=True) if state and one]


def match_groups(
    indexes: Sequence[QueueIndex | None],
    block: RecordBlock,
    groups: Groups,
    listing: SmallQueues | None = None,
) -> list[Match | None]:
    """Compare the records of many queues with their entries; an index that is None is of no interest, and has no match.

    ``listing`` has entries of some of the queues at hand.
    """
    if not len(groups):
        return []
    offsets = block.queue_offsets[groups.indices]
    physical, sizes = block.physical_offsets[groups.indices], block.sizes[groups.indices]
    is_even = _are_even(groups, offsets)
    items = _items(indexes, groups, offsets, is_even, listing)
    is_even &= _are_same(block, groups, items)
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


def _are_even(groups: Groups, offsets: Longs) -> Flags:
    """Of each group (there is one): the queue offsets of its records follow each other."""
    firsts = groups.starts[:-1]
    steps = np.ones(len(offsets), np.bool_)
    steps[1:] = offsets[1:] == offsets[:-1] + 1
    steps[firsts] = offsets[firsts] >= 0
    return np.logical_and.reduceat(steps, firsts)


def _are_same(block: RecordBlock, groups: Groups, items: Items) -> Flags:
    """Of each group (there is one): its records are what these entries name."""
    same = items["physical_offset"] == block.physical_offsets[groups.indices]
    same &= items["size"] == block.sizes[groups.indices]
    return np.logical_and.reduceat(same, groups.starts[:-1])


def _items(
    indexes: Sequence[QueueIndex | None],
    groups: Groups,
    offsets: Longs,
    wanted: Flags,
    listing: SmallQueues | None,
) -> Items:
    """The entries of all records, as the files have them; zeros where one read does not give those of a queue."""
    if listing is None:
        room, missing = np.zeros(len(offsets), ITEM), wanted
    else:
        room, are_here = listing.items(groups, listing.numbers(groups), offsets)
        missing = wanted & ~are_here
    view = memoryview(room.view(np.uint8).data)
    for number in np.flatnonzero(missing).tolist():
        index = indexes[number]
        if index is not None and not index.is_batch:
            low, high = groups.starts[number], groups.starts[number + 1]
            place = int(offsets[low]) * ITEM_BYTES
            index.row.read_into(place, view[low * ITEM_BYTES : high * ITEM_BYTES])
    return room


def match(index: QueueIndex, block: RecordBlock, indices: Longs) -> Match:
    """Compare the records at ``indices`` (one queue's, in log order, at least one) with their entries.

    One read of the consume queue when the queue offsets follow each other, which is the rule.
    """
    offsets = block.queue_offsets[indices]
    counts = inner_counts(block)[indices].astype(np.int64) if index.is_batch else None
    if len(runs(offsets, counts)) > 1:
        return _match_runs(index, block, indices, counts)
    index.row.rescan()  # its files may be others now
    first, physical = int(offsets[0]), block.physical_offsets[indices]
    last = 1 if counts is None else int(counts[-1])
    entries = index.entries(first, int(offsets[-1]) + last)
    places = np.where(entries.is_written, entries.physical_offsets, -1)
    sizes = block.sizes[indices]
    if counts is not None:
        starts = offsets - first
        heads, sizes = places[starts], np.repeat(sizes, counts)
        whole = np.logical_and.reduceat(places == np.repeat(heads, counts), starts)
        # A unit that names the right place for some of a record's offsets only says nothing of use.
        places = np.where(~whole & (heads == physical), -1, heads)
    is_listed = places == physical
    is_all_listed = bool(is_listed.all())
    if is_all_listed:
        entries.sizes = sizes  # an entry may be damaged in its size alone
    return Match(indices, offsets, counts, is_all_listed, is_listed, places, entries)


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


def orphan_indices(block: RecordBlock, found: Match) -> Longs:
    """Indices in the block of the records that should be listed and are not."""
    if found.is_all_listed:
        return found.indices[:0]
    return found.indices[~found.is_listed & is_listable(block.sys_flags[found.indices])]


def runs(offsets: Longs, counts: Longs | None) -> list[tuple[int, int]]:
    """Where queue offsets follow each other: ``[first, last)`` of each run."""
    if not len(offsets):
        return []
    steps = 1 if counts is None else counts[:-1]
    leads_on = (offsets[1:] == offsets[:-1] + steps) & (offsets[1:] >= offsets[:-1])  # a sum wraps
    breaks = (np.flatnonzero(~leads_on) + 1).tolist()
    return list(zip([0, *breaks], [*breaks, len(offsets)], strict=True))
