"""Reading a store that is being written: by queue offset, by time, by key, by message id.

**Contract.** From any thread. Nothing above the confirmed offset is seen: consume queues and index end below it, and a
message id that names a place above it finds nothing. Statuses and next offsets are the broker's:

======================= =========================================================== ==================
status                  when                                                        next_offset
======================= =========================================================== ==================
NO_MATCHED_LOGIC_QUEUE  the queue does not exist                                    0
NO_MESSAGE_IN_QUEUE     it has never had a message                                  0
OFFSET_TOO_SMALL        below the first message that is there                       that one
OFFSET_OVERFLOW_ONE     just behind the last message                                as asked
OFFSET_OVERFLOW_BADLY   farther behind                                              the end
MESSAGE_WAS_REMOVING    its records have expired meanwhile, or none of its own      the next that may
                        stands there: it was damaged, or its entry names another's  have one
FOUND                   at least one message                                        behind the last one
======================= =========================================================== ==================

Whether a record is the one that an entry means is decided as for every reader of local stores (``fetch``, by the table of
``tiered.local.classification``): a record of another queue or another offset is never given, by offset, time or key. The
next offset always lies above the one that was asked for and that there is, whatever records say of themselves. A message id
names a place in the log, and not an entry: what stands there is given.

A compacted topic is read from its compaction log as far as that goes, so it begins where that begins, and queue offsets have
gaps: an offset that is gone gives the next greater one.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.format.block import distinct, parse_records
from tiered.format.properties import KEYS, UNIQ_KEY, split_keys
from tiered.format.record import (
    RECORD_BYTES_MIN,
    Record,
    RecordError,
    RecordFault,
    decode_record,
    parse_offset_msg_id,
)
from tiered.local.queue_reader import (
    BATCH_COUNT_MAX,
    HeldQueue,
    first_said,
    whole_records,
)
from tiered.model import Boundary, MessageQueue
from tiered.store.listing import key_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tiered.format.block import RecordBlock
    from tiered.local.compaction_log import CompactionLog
    from tiered.local.consumequeues import BatchQueue, PlainQueue
    from tiered.store.opening import StoreParts

COUNT_MAX: Final = 32
BYTES_MAX: Final = 1 << 20
KEYS_MAX: Final = 64
_FAR_MS: Final = 2**63 - 1


class Status(Enum):
    """How a read by queue offset ended; see the module."""

    FOUND = "FOUND"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"


@dataclass(frozen=True, slots=True)
class Got:
    """What a read by queue offset found."""

    status: Status  # see the module
    records: Sequence[Record]  # in order, without a gap (but of a compacted topic)
    next_offset: int  # where to go on
    min_offset: int  # first queue offset that can be read
    end_offset: int  # one past the last


class StoreReader:
    """Reads one store."""

    def __init__(
        self,
        parts: StoreParts,
        confirmed: Callable[[], int],
        compacted: Callable[[MessageQueue], CompactionLog | None],
    ) -> None:
        self._compacted = compacted
        self._root = parts.hold.root
        self._cache = parts.cache
        self._log = parts.log
        self._listing = parts.listing
        self._index = parts.index
        self._confirmed = confirmed
        self._queues: dict[MessageQueue, PlainQueue | BatchQueue] = {}

    def bounds(self, queue: MessageQueue) -> tuple[int, int]:
        """Queue offsets ``[min, end)`` that can be read; (0, 0) of a queue that does not exist."""
        end = self._listing.queues.get(queue)
        if end is None or end.is_new:
            return 0, 0
        low, high = self._listed_bounds(queue, end.next_offset)
        log = self._compacted(queue)
        return (log.first if log is not None and log.end else low), high

    def _listed_bounds(self, queue: MessageQueue, end: int) -> tuple[int, int]:
        index = self._queue(queue)
        self._log.rescan()
        log_min = self._log.bases[0] if self._log.bases else 0
        return index.first_not_below(log_min, end), end

    def get(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        count_max: int = COUNT_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> Got:
        """Messages of one queue from ``offset`` on; at least one where there is one, however large."""
        if queue not in self._listing.queues:
            return Got(Status.NO_MATCHED_LOGIC_QUEUE, (), 0, 0, 0)
        low, end = self.bounds(queue)
        if not end:
            return Got(Status.NO_MESSAGE_IN_QUEUE, (), 0, 0, 0)
        if offset < low:
            return Got(Status.OFFSET_TOO_SMALL, (), low, low, end)
        if offset == end:
            return Got(Status.OFFSET_OVERFLOW_ONE, (), offset, low, end)
        if offset > end:
            return Got(Status.OFFSET_OVERFLOW_BADLY, (), end, low, end)
        records, behind = self._compacted_records(queue, offset, count_max, bytes_max)
        if not records:
            records, behind = self._records(queue, (offset, end), count_max, bytes_max)
        if not records:
            low, end = self.bounds(queue)
            return Got(Status.MESSAGE_WAS_REMOVING, (), max(low, behind), low, end)
        return Got(Status.FOUND, records, behind, low, end)

    def block(self, queue: MessageQueue, start: int, end: int) -> RecordBlock:
        """The sound records at queue offsets ``[start, end)`` of a queue without inner batches, by columns."""
        low, high = self.bounds(queue)
        low, high = max(start, low), min(end, high)
        if low >= high:
            return parse_records(b"", np.empty(0, np.int64), np.empty(0, np.int32))
        held = self._held(queue)
        found = held.fetch(held.index.entries(low, high))
        if not found.cases.any():
            return found.block
        good = found.record_of[found.cases == 0]
        return parse_records(
            found.block.buffer, found.block.positions[good], found.block.sizes[good]
        )

    def offset_by_time(
        self, queue: MessageQueue, time_ms: int, boundary: Boundary = Boundary.LOWER
    ) -> int:
        """The queue offset that a store time means; 0 of a queue that does not exist."""
        low, end = self.bounds(queue)
        first = low
        limit_ms = time_ms if boundary is Boundary.LOWER else time_ms + 1
        if (log := self._compacted(queue)) is not None and log.end:
            at = log.offset_by_time(limit_ms)
            if at is not None:
                before = at if boundary is Boundary.LOWER else log.last_before(at)
                return first if before is None else before
            first = log.end - 1
            low = max(self._listed_bounds(queue, end)[0], log.end)
        held = self._held(queue)
        at = held.first_at_or_after((low, end), limit_ms)
        if boundary is Boundary.UPPER:
            return at - 1 if at > low else first
        found, _ = held.first_message((at, end))
        return end if found is None else found

    def by_key(
        self,
        topic: str,
        key: str,
        *,
        begin_ms: int = 0,
        end_ms: int = _FAR_MS,
        count_max: int = KEYS_MAX,
    ) -> list[Record]:
        """Messages with a key or unique id, newest first; store times from ``begin_ms`` to ``end_ms``, both included."""
        found: dict[int, Record] = {}
        for place in self._index.find(key_hash(topic, key), begin_ms, end_ms):
            if len(found) >= count_max:
                break
            record = self._record(place)
            if record is None or place in found or record.topic != topic:
                continue
            names = record.properties
            is_named = key in split_keys(names.get(KEYS)) or names.get(UNIQ_KEY) == key
            is_in_time = begin_ms <= record.store_timestamp_ms <= end_ms
            if is_named and is_in_time and self._is_listed(record):
                found[place] = record
        return list(found.values())

    def by_offset_msg_id(self, msg_id: str) -> Record | None:
        """The message whose store host and physical offset an id names; None when it is not there."""
        try:
            host, place = parse_offset_msg_id(msg_id)
        except ValueError as error:
            raise InvalidError(str(error), where=msg_id) from error
        record = self._record(place)
        return record if record is not None and record.store_host == host else None

    def _queue(self, queue: MessageQueue) -> PlainQueue | BatchQueue:
        index = self._queues.get(queue)
        if index is None:
            end = self._listing.queues[queue]
            index = self._queues[queue] = end.opened(self._cache, self._root, queue)
        index.row.rescan()
        return index

    def _held(self, queue: MessageQueue) -> HeldQueue:
        """A queue, and what may be read of the log, whose files are as ``bounds`` found them."""
        log_min = self._log.bases[0] if self._log.bases else 0
        return HeldQueue(self._log, queue, self._queue(queue), log_min, self._confirmed())

    def _is_listed(self, record: Record) -> bool:
        queue, offset = MessageQueue(record.topic, record.queue_id), record.queue_offset
        end = self._listing.queues.get(queue)
        if end is None or end.is_new or not 0 <= offset < end.next_offset:
            return False
        listed = self._queue(queue).entries(offset, offset + 1)
        return (
            bool(listed.is_written[0]) and int(listed.physical_offsets[0]) == record.physical_offset
        )

    def _records(
        self, queue: MessageQueue, span: tuple[int, int], count_max: int, bytes_max: int
    ) -> tuple[list[Record], int]:
        """Records from the first queue offset of ``span`` on, as far as each is its own, and where to go on.

        Without one: the next queue offset that may have one.
        """
        held, (start, end) = self._held(queue), span
        index = held.index
        slack = BATCH_COUNT_MAX if index.is_batch else 0
        entries = index.entries(start, min(end, start + count_max + slack))
        entries = entries.head(whole_records(entries, count_max))
        entries = entries.head(held.plan_count(entries, bytes_max))
        found = held.fetch(entries)
        own = int((found.cases == 0).cumprod().sum())
        if not own:
            others = np.append(found.cases == 0, True)
            return [], max(start + int(np.argmax(others)), first_said(index, start, end))
        numbers = distinct(found.record_of[:own]).tolist()
        return _decoded(found.block, numbers), start + own

    def _compacted_records(
        self, queue: MessageQueue, start: int, count_max: int, bytes_max: int
    ) -> tuple[list[Record], int]:
        """Records of the compaction log from the first at or above an offset on, and where to go on.

        None where it does not reach. A damaged one stops no reader, and passes tell of it.
        """
        log = self._compacted(queue)
        if log is None or start >= log.end:
            return [], start
        for file, units in log.chunks(start, count_max=count_max, bytes_max=bytes_max):
            block = log.block(file, units)
            is_sound = (block.faults == RecordFault.OK) & (units["base_offset"] >= start)
            sound = np.flatnonzero(is_sound).tolist()
            if sound:
                last = units[sound[-1]]
                return _decoded(block, sound), int(last["base_offset"]) + max(1, int(last["count"]))
        return [], start

    def _record(self, place: int) -> Record | None:
        """The record at a physical offset, checked; None when there is none that may be seen."""
        if not 0 <= place < self._confirmed():
            return None
        if self._log.base_of(place) is None:
            self._log.rescan()
        size = int.from_bytes(self._log.read(place, 4), "big", signed=True)
        if size < RECORD_BYTES_MIN or place + size > self._confirmed():
            return None
        try:
            return decode_record(self._log.read(place, size), 0, physical_offset=place)
        except RecordError:
            return None


def _decoded(block: RecordBlock, numbers: Iterable[int]) -> list[Record]:
    """Records of a block that have been checked."""
    positions = block.positions.tolist()
    return [decode_record(block.buffer, positions[number], check_crc=False) for number in numbers]
