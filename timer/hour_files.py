"""TimerFlatFile: the flat file of one clock hour (UTC) of due time, and the table of those that are being written.

A file is a queue of ``tiered.log``: topic ``TIMER_TOPIC``, its queue id the hour since 1970, and in its items the due time
stands where a tag code stands elsewhere, so the consume queue is the index by due time. A record is the local record but
for three fields: topic, queue id and queue offset are those of its place here, so that every check of queues holds for it
(the real topic and queue stand in its properties anyway). ``TIMER_TOPIC`` is as long as the names of both timer topics, so
nothing else moves.

Daylight saving has no effect: hours are counted in UTC.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.errors import DataError
from tiered.format.block import bytes_at
from tiered.format.record import QUEUE_ID_AT, QUEUE_OFFSET_AT
from tiered.local.face import RecordBatch
from tiered.local.queue_reader import cut_records
from tiered.log.composite import AppendResult, CommitPolicy, CompositeFlatFile
from tiered.log.parts import QueueLife
from tiered.log.timers import HOUR_MS, TIMER_TOPIC, hour_queue
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.log.parts import TierState
    from timer.records import Longs, TimerRows

_NAME: Final = TIMER_TOPIC.encode()
_NO_LIFE: Final = QueueLife(0, QueueOffset(0), QueueOffset(0))


class TimerFlatFile:
    """The write side of one hour.

    Attributes:
        hour: Since 1970.
        file: Its offsets, buffer and segments. Used with its lock held by the writer, the only thread.
        due_min_ms: Smallest due time since the last ``reset``.
        due_max_ms: Greatest.
        marks: Delete marks since then.
    """

    def __init__(self, hour: int, life: QueueLife | None, policy: CommitPolicy) -> None:
        """Go on where the journal says."""
        self.hour = hour
        self.file = CompositeFlatFile(hour_queue(hour), life or _NO_LIFE, policy)
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.due_min_ms, self.due_max_ms, self.marks = 2**62, -1, 0

    def append(self, batch: RecordBatch, marks: int, now_s: float) -> None:
        """Take records that were made for this place (``place_records``)."""
        taken = self.file.append(batch, now_s)
        assert taken is AppendResult.APPENDED
        self.due_min_ms = min(self.due_min_ms, int(batch.tag_codes.min()))
        self.due_max_ms = max(self.due_max_ms, int(batch.tag_codes.max()))
        self.marks += marks


class TimerFlatFileTable:
    """The hours that are being written, made on first use from what the journal says."""

    def __init__(self, state: TierState, policy: CommitPolicy) -> None:
        """Go on from a state of the timers' journal."""
        self._state = state
        self._policy = policy
        self._files: dict[int, TimerFlatFile] = {}

    def file(self, hour: int) -> TimerFlatFile:
        """The file of an hour."""
        found = self._files.get(hour)
        if found is None:
            life = self._state.life(hour_queue(hour))
            found = self._files[hour] = TimerFlatFile(hour, life, self._policy)
        return found

    def buffered(self) -> Iterator[TimerFlatFile]:
        """Those that hold something which is not durable, by hour."""
        for hour in sorted(self._files):
            if self._files[hour].file.has_buffered:
                yield self._files[hour]

    def append(self, rows: TimerRows, indices: Longs, now_s: float) -> int:
        """Put records into the files of their hours; the bytes that came."""
        hours = rows.dues[indices] // HOUR_MS
        order = np.argsort(hours, kind="stable")
        indices, hours = indices[order], hours[order]
        edges = [0, *(np.flatnonzero(np.diff(hours)) + 1).tolist(), len(hours)]
        size = 0
        for low, high in pairwise(edges):
            if low < high:
                file, some = self.file(int(hours[low])), indices[low:high]
                batch = place_records(rows, some, file.hour, file.file.append_offset)
                file.append(batch, int(rows.marks[some].sum()), now_s)
                size += memoryview(batch.data).nbytes
        return size


def place_records(
    rows: TimerRows, indices: Longs, hour: int, base_offset: QueueOffset
) -> RecordBatch:
    """Records as they stand in an hour's file.

    Args:
        rows: Of a local batch; it is not changed.
        indices: Of the records, all sound, in order.
        hour: Whose file.
        base_offset: Queue offset of the first there.

    Raises:
        DataError: A record is of a topic whose name is of another length.
    """
    block = rows.block
    if (block.topic_sizes[indices] != len(_NAME)).any():
        raise DataError(f"a record of {rows.batch.queue} is of another topic")
    cut, starts = cut_records(block, indices)
    data = bytearray(cut)
    bytes_at(data, ">i4")[starts + QUEUE_ID_AT] = hour
    bytes_at(data, ">i8")[starts + QUEUE_OFFSET_AT] = base_offset + np.arange(len(indices))
    at = starts + (block.topic_positions - block.positions)[indices]
    bytes_at(data, f"S{len(_NAME)}")[at] = _NAME
    return RecordBatch(
        queue=hour_queue(hour),
        base_offset=base_offset,
        data=data,
        positions=starts,
        sizes=block.sizes[indices],
        tag_codes=rows.dues[indices],
        store_timestamps_ms=block.store_timestamps_ms[indices],
        physical_offsets=block.physical_offsets[indices],
    )
