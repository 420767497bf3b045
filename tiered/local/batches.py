"""Cutting records out of a buffer into a batch that owns its bytes, with the tag codes that are theirs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import Buffer

from tiered.format.block import RecordBlock, tag_hashes
from tiered.format.sysflag import INNER_BATCH
from tiered.local.face import RecordBatch
from tiered.local.topics import SCHEDULE_TOPIC
from tiered.local.verdicts import TagFacts, judge_tags
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiered.local.entries import Entries, Flags, Ints, Longs
    from tiered.local.matching import Match
    from tiered.local.sightings import Sightings


def cut_records(block: RecordBlock, indices: Longs) -> tuple[Buffer, Longs]:
    """The bytes of the records at ``indices``, one after another, and where each begins in them.

    One copy. Records that lie side by side are copied in one piece; otherwise one slice a record and one join.
    """
    positions, sizes = block.positions[indices], block.sizes[indices].astype(np.int64)
    ends = sizes.cumsum()
    starts = ends - sizes
    if not len(indices):
        return b"", starts
    view = memoryview(block.buffer)
    first, last = int(positions[0]), int(positions[-1] + sizes[-1])
    if last - first == ends[-1]:
        return bytes(view[first:last]), starts
    slices = map(slice, positions.tolist(), (positions + sizes).tolist())
    return b"".join(map(view.__getitem__, slices)), starts


@dataclass(frozen=True, slots=True)
class TagRule:
    """Lets records rule over the tag codes of the entries that name them.

    Attributes:
        sightings: Where wrong ones are counted.
        has_ext: See ``TagFacts``.
        is_live: See ``TagFacts``.
    """

    sightings: Sightings
    has_ext: bool
    is_live: bool

    def apply_all(
        self, block: RecordBlock, found: Sequence[tuple[MessageQueue, Match]], guesses: Longs
    ) -> None:
        """Set the tag codes of entries whose records are all listed; one comparison for all queues."""
        if not found:
            return
        own = [match.owns() for _, match in found]
        codes = np.concatenate([match.all_entries.tag_codes for _, match in found])
        unlike = np.flatnonzero(codes != guesses[np.concatenate(own)])
        ends = np.cumsum([len(some) for some in own])
        for number in np.unique(np.searchsorted(ends, unlike, side="right")).tolist():
            queue, match = found[number]
            self.apply(queue, match.all_entries, block, own[number], guesses)

    def apply(
        self, queue: MessageQueue, entries: Entries, block: RecordBlock, owns: Longs, guesses: Longs
    ) -> None:
        """Set the tag codes of entries to those of their records.

        Args:
            queue: Whose entries.
            entries: ``tag_codes`` is changed.
            block: Holds their records.
            owns: Index in ``block`` of each entry's own sound record; -1: it has none, and stays as it is.
            guesses: ``tag_guesses`` of the block.
        """
        if not len(guesses) or queue.topic == SCHEDULE_TOPIC:
            return  # (there the tag code is the time of delivery)
        unlike = np.flatnonzero((entries.tag_codes != guesses[owns]) & (owns >= 0))
        if not len(unlike):
            return
        codes = entries.tag_codes[unlike]
        hashes = tag_hashes(only(block, owns[unlike]))
        is_last = self.is_live and unlike[-1] == len(entries) - 1
        facts = TagFacts(codes=codes, hashes=hashes, has_ext=self.has_ext, is_live=is_last)
        for at in unlike[judge_tags(facts)].tolist():
            self.sightings.wrong_tag_code(queue, entries.start + at)
        entries.tag_codes[unlike] = hashes


def only(block: RecordBlock, indices: Longs) -> RecordBlock:
    """A block of some records of another one."""
    columns = {name: getattr(block, name)[indices] for name in block.__slots__ if name != "buffer"}
    return RecordBlock(buffer=block.buffer, **columns)


def sound_batches(
    block: RecordBlock, found: Sequence[tuple[MessageQueue, Match]]
) -> list[RecordBatch]:
    """Batches without holes, one a queue, of records that are all listed, in order and without a gap.

    Each owns its bytes: it lives as long as its queue needs it, and keeps nothing else in memory.
    """
    if not found:
        return []
    indices = np.concatenate([match.indices for _, match in found])
    sizes, times = block.sizes[indices], block.store_timestamps_ms[indices]
    positions, physical = block.positions[indices], block.physical_offsets[indices]
    properties = block.properties_sizes[indices]
    is_plain = not (block.sys_flags[indices] & INNER_BATCH).any()
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    highs = np.cumsum([len(match.indices) for _, match in found]).tolist()
    data = _copies(block, positions, positions + sizes, [0, *highs[:-1]])
    batches, low = [], 0
    for (queue, match), high, copied in zip(found, highs, data, strict=True):
        columns = (
            starts[low:high] - starts[low],
            sizes[low:high],
            times[low:high],
            physical[low:high],
        )
        its_properties = properties[low:high] if is_plain else None
        batches.append(_batch(queue, match, copied, columns, its_properties))
        low = high
    return batches


def _copies(
    block: RecordBlock, positions: Longs, ends: Longs, firsts: list[int]
) -> Iterator[bytes]:
    """The bytes of each queue's records. What lies side by side is copied in one piece."""
    is_apart = np.ones(len(positions), np.bool_)
    is_apart[1:] = positions[1:] != ends[:-1]
    is_apart[firsts] = True
    runs = np.flatnonzero(is_apart)
    lasts = np.append(runs[1:], len(positions)) - 1
    pieces = list(map(slice, positions[runs].tolist(), ends[lasts].tolist()))
    get = memoryview(block.buffer).__getitem__
    for low, high in pairwise([*np.searchsorted(runs, firsts).tolist(), len(runs)]):
        yield b"".join(map(get, pieces[low:high]))


def _batch(
    queue: MessageQueue,
    match: Match,
    data: bytes,
    columns: tuple[Longs, Ints, Longs, Longs],
    properties_sizes: Ints | None,
) -> RecordBatch:
    starts, sizes, times, physical = columns
    if match.counts is not None:
        starts, sizes = np.repeat(starts, match.counts), np.repeat(sizes, match.counts)
        times, physical = np.repeat(times, match.counts), np.repeat(physical, match.counts)
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(match.all_entries.start),
        data=data,
        positions=starts,
        sizes=sizes,
        tag_codes=match.all_entries.tag_codes,
        store_timestamps_ms=times,
        physical_offsets=physical,
        properties_sizes=None if match.counts is not None else properties_sizes,
    )


def fill_times(times: Longs, known: Flags) -> Longs:
    """Give each unknown time that of the known one before it, or of the first behind it, or -1."""
    if known.all():
        return times
    if not known.any():
        return np.full(len(times), -1, np.int64)
    at = np.where(known, np.arange(len(times)), -1)
    last_known = np.maximum.accumulate(at)
    last_known[last_known < 0] = int(np.argmax(known))
    filled: Longs = times[last_known]
    return filled
