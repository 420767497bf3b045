"""Sections of key compaction: from neighbouring parts and what stays of them to one sparse section.

Records are moved together, items of the rest made holes. Pure but for ``part_records``. Whoever makes a section of the same
parts, this process or a worker of Spark, makes the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.format.bundle import build_section
from tiered.local.interface import HoleReason
from tiered.log.bundles import SectionRow
from tiered.log.decode import decode_items, decode_records
from tiered.log.flat_file import ITEM
from tiered.log.sections import read_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from backends.base import ObjectStore
    from tiered.compaction.retention import Flags
    from tiered.dispatch.merging import Packer
    from tiered.format.bundle import Section
    from tiered.local.interface import RecordBatch
    from tiered.log.merge import MergeRun
    from tiered.log.parts import Part, Parts
    from tiered.model import MessageQueue


RUN_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of records that stay and of items, as they are read, of one section."""
RUN_COUNT_MAX: Final = 1 << 18
"""Queue offsets of one section, unless one part has more: a reader is given all items of a section, 5 MiB so."""


@dataclass(frozen=True, slots=True)
class PartLeft:
    """A part, its bytes, and what stays of it."""

    part: Part
    batch: RecordBatch  # all of its items and their records
    stays: Flags  # bool[count], which messages stay; of a hole anything


@dataclass(frozen=True, slots=True)
class CompactedRun:
    """What neighbouring parts become."""

    records: Sequence[bytes]  # bytes of those that stay, in order
    items: bytes  # all items, 20 bytes each
    holes: int  # items without a message
    store_min_ms: int  # smallest store time; -1: nothing stays
    store_max_ms: int  # greatest store time; -1 likewise
    last: int  # mark of the last item's record; 0: it does not stay
    log_gone: int  # bytes of the log that have no record now


def compacted_run(lefts: Iterable[PartLeft]) -> CompactedRun:
    """Compact neighbouring parts into one; of each only what stays, perhaps little of much, is kept meanwhile."""
    records: list[bytes] = []
    items: list[npt.NDArray[np.void]] = []
    times: list[npt.NDArray[np.int64]] = []
    at, last = -1, None
    for left in lefts:
        last = left.part
        at = int(last.log_offset) if at < 0 else at
        mine, where = _items(left, at)
        items.append(mine)
        if len(where):
            records.append(b"".join(_slices(left.batch, where)))
        times.append(left.batch.store_timestamps_ms[where])
        at += int(left.batch.sizes[where].sum(dtype=np.int64))
    assert last is not None
    data = b"".join(mine.tobytes() for mine in items)
    every, stamps = np.frombuffer(data, ITEM), np.concatenate(times)
    return CompactedRun(
        records,
        data,
        int(np.count_nonzero(every["size"] == 0)),
        int(stamps.min()) if len(stamps) else -1,
        int(stamps.max()) if len(stamps) else -1,
        last.last if every["size"][-1] else 0,
        int(last.log_end) - at,
    )


def _items(left: PartLeft, at: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """The items of a part whose records lie from log offset ``at`` on; and the numbers of those that stay."""
    batch = left.batch
    real = batch.sizes > 0
    where = np.flatnonzero(real & left.stays)
    sizes = batch.sizes[where].astype(np.int64)
    items = np.zeros(len(real), ITEM)
    items["tag_code"] = np.where(real, int(HoleReason.COMPACTED), batch.tag_codes)
    items["tag_code"][where] = batch.tag_codes[where]
    items["size"][where] = sizes
    items["log_offset"][where] = at + np.cumsum(sizes) - sizes
    return items, where


def _slices(batch: RecordBatch, where: npt.NDArray[np.int64]) -> Iterator[memoryview]:
    """The bytes of records, those that lie side by side together."""
    if not len(where):
        return iter(())
    starts = batch.positions[where]
    ends = starts + batch.sizes[where]
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    lows = starts[np.concatenate(([0], breaks))]
    highs = ends[np.concatenate((breaks - 1, [len(ends) - 1]))]
    view = memoryview(batch.data).cast("B")
    pairs = zip(lows.tolist(), highs.tolist(), strict=True)
    return map(view.__getitem__, starmap(slice, pairs))


def plan_runs(
    parts: Parts, changed: Sequence[bool], left_bytes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Which neighbours of one segment become one section: numbers ``[begin, end)`` of parts.

    Args:
        parts: Of one segment, in order.
        changed: Of which some message goes; no others are touched.
        left_bytes: Bytes of the records that stay of each.
    """
    counts = parts.column("count").tolist()
    begin, size, count = 0, 0, 0
    for at in range(len(parts)):
        more = left_bytes[at] + 20 * counts[at]
        is_full = size + more > RUN_BYTES_MAX or count + counts[at] > RUN_COUNT_MAX
        if at > begin and (not changed[at] or is_full):
            yield begin, at
            begin, size, count = at, 0, 0
        if changed[at]:
            size, count = size + more, count + counts[at]
        else:
            begin, size, count = at + 1, 0, 0
    if begin < len(parts):
        yield begin, len(parts)


def section_of(
    run: MergeRun, lefts: Iterable[PartLeft], packer: Packer | None
) -> tuple[SectionRow, Section]:
    """The sparse section that takes the place of neighbouring parts; the same bytes of the same parts, whoever makes it.

    Args:
        lefts: What stays of each, in order.
        packer: Compresses; None: nothing does.
    """
    made, parts = compacted_run(lefts), run.parts
    row = SectionRow(
        run.queue,
        run.incarnation,
        run.segment,
        int(parts[0].log_offset),
        int(parts[0].queue_offset),
        made.holes,
        made.store_min_ms,
        made.store_max_ms,
        made.last,
        log_gone=made.log_gone,
    )
    section = None
    if packer is not None and made.records:
        data = b"".join(made.records)
        section = packer.pack(run.queue.topic, data, made.items, may_be_sparse=True)
    return row, section or build_section(made.records, made.items, may_be_sparse=True)


def part_records(store: ObjectStore, prefix: str, queue: MessageQueue, part: Part) -> RecordBatch:
    """All of a part, each record held against its item."""
    log, index = read_part(store, prefix, part)
    items = decode_items(part, part.queue_offset, index, where=prefix)
    begin = int(part.log_offset)
    return decode_records(queue, part, items, log, begin, where=prefix).records
