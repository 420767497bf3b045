"""Cutting records out of a buffer into a batch that owns its bytes, with the tag codes that are theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import Buffer

from tiered.format.block import RecordBlock, tag_hashes
from tiered.local.face import RecordBatch
from tiered.local.topics import SCHEDULE_TOPIC
from tiered.local.verdicts import TagFacts, judge_tags
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from tiered.local.entries import Entries, Flags, Longs
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


def sound_batch(
    queue: MessageQueue, block: RecordBlock, indices: Longs, entries: Entries, counts: Longs | None
) -> RecordBatch:
    """A batch without holes.

    Args:
        queue: Whose.
        block: Checked records.
        indices: int64[n], those of the batch, in order and without a gap.
        entries: What the consume queue says of all their queue offsets.
        counts: int64[n], queue offsets of each record; None: one each.
    """
    data, starts = cut_records(block, indices)
    sizes, times = block.sizes[indices], block.store_timestamps_ms[indices]
    physical = block.physical_offsets[indices]
    if counts is not None:
        starts, sizes = np.repeat(starts, counts), np.repeat(sizes, counts)
        times, physical = np.repeat(times, counts), np.repeat(physical, counts)
    return RecordBatch(
        queue=queue,
        base_offset=QueueOffset(entries.start),
        data=data,
        positions=starts,
        sizes=sizes,
        tag_codes=entries.tag_codes,
        store_timestamps_ms=times,
        physical_offsets=physical,
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
