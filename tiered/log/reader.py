"""Plain, correct, sequential reading of a tier: block by block, every byte checked.

``TierReader`` is one broker's tier at one moment (``refresh`` moves it on); ``QueueReader`` reads one history of one queue
(``tiered.log.cursor``, which also says what becomes of objects that are gone). The adaptive fetcher has the same cursors.

Threads: all may be used from any thread at once.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from copy import copy
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from backends.errors import BackendError, InvalidRangeError, ObjectNotFoundError, ShortReadError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, InvalidError, TieredStoreError
from tiered.format.bundle import BLOCK_BYTES
from tiered.format.record import RECORD_BYTES_MIN, STORE_TIME_AT, SYS_FLAG_AT
from tiered.format.record_kind import RecordKind
from tiered.format.sysflag import BORN_HOST_V6, V6_EXTRA_BYTES
from tiered.journal.replay import JournalReader
from tiered.log.cursor import HistoryPlace, IncarnationView, QueueCursor, history_of
from tiered.log.decode import PartItems, TierBatch, decode_items, decode_records
from tiered.log.flat_file import ITEM_BYTES
from tiered.log.lineage import Isolation
from tiered.log.salvage import Salvaged, all_lost, salvage
from tiered.log.sections import (
    WHOLE_AT_ONCE_BYTES,
    read_part,
    read_planned,
    read_range,
    read_section,
)
from tiered.log.state import Gap, Incarnation, Part, TierMachine, TierState
from tiered.model import Boundary, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.log.parts import SectionRange
    from tiered.log.sections import OpenSection
    from tiered.model import MessageQueue

# -- by time -------------------------------------------------------------------------------------
#
# A queue offset by store time, in one incarnation of a queue, with few small reads.
#
# The part is chosen by the parts' time bounds, which the journal has: no request, and exact whatever the order of the
# times. Within the part its index is read once, and then units of 128 KiB of its commit log by bisection: of a part of
# 32 MiB 8 units, and one before the unit found. A small section is read whole, with one request.
#
# Order of times: two messages that lie no more than ``UNIT_BYTES`` apart in the queue's commit log may have their times in
# any order, and equal times may go on for as long as they like; the answer is exact. With more disorder than that (a clock
# that was put back) it is a message that is late enough, not always the first. Of Kafka's batches and JoyQueue's messages,
# whose times are their producers', the answer is always exact: the records of the part are read from its begin on.
#
# Retries and errors: nothing is retried here. What contradicts itself is a ``DataError``. For any thread.

UNIT_BYTES: Final = 128 * 1024
"""How much of a commit log one read tells of; and how far apart messages may be out of order."""
EXACT_UNIT_BYTES: Final = 4 << 20
"""Of records that have to be read whole, from the first on."""
_UNITS_BACK: Final = 2
"""With disorder of at most a unit, the first late message is in the unit found or in one of these before it."""
_HEAD_BYTES: Final = STORE_TIME_AT + V6_EXTRA_BYTES + 8
"""Size, magic, ids and times stand in the first bytes of a record, however large it is."""


_Name = tuple[str, int]
"""Of a section: its bundle, and where it begins."""


class Ranges(Protocol):
    """Where ranges of sections come from."""

    def read(self, want: SectionRange) -> memoryview:
        """The bytes of a range, checked."""
        ...


@dataclass(slots=True)
class StoreRanges:
    """Ranges by way of a store; for one lookup, in one thread. A block table is read once, and so is a small section."""

    store: ObjectStore
    prefix: str
    _known: dict[_Name, OpenSection | None] = field(default_factory=dict)
    _small: tuple[_Name, memoryview, memoryview] | None = None

    def read(self, want: SectionRange) -> memoryview:
        name = want.key, want.place.start
        if want.place.size_bytes <= WHOLE_AT_ONCE_BYTES:
            if self._small is None or self._small[0] != name:
                self._small = (name, *read_section(self.store, self.prefix, want))
            _, records, items = self._small
            return (items if want.of_items else records)[want.start : want.end]
        get = self.store.get_ranges
        try:
            (data,), self._known[name] = read_planned(
                (want,), get, where=self.prefix, known=self._known.get(name)
            )
        except (InvalidRangeError, ShortReadError, DataError):
            return read_range(self.store, self.prefix, want)
        return data


def find_by_time(
    view: IncarnationView,
    ranges: Ranges,
    time_ms: int,
    boundary: Boundary = Boundary.LOWER,
    *,
    low: int = 0,
    high: int | None = None,
    where: str = "",
) -> QueueOffset | None:
    """Find the message that a store time means.

    Args:
        low: Only messages from here on; also from the minimum on.

    Returns:
        Its queue offset; None: all are earlier (``LOWER``), or later (``UPPER``), or there are none.
    """
    low = max(low, view.incarnation.min_offset)
    end = (
        view.incarnation.commit_offset
        if high is None
        else min(high, view.incarnation.commit_offset)
    )
    search = _Search(view, ranges, where)
    if boundary is Boundary.LOWER:
        found = search.first_since(time_ms, low, end)
        return found if found < end else None
    return search.last_before(low, search.first_since(time_ms + 1, low, end))


class _Search:
    """One lookup: what it has read of parts."""

    def __init__(self, view: IncarnationView, ranges: Ranges, where: str) -> None:
        self._view = view
        self._ranges = ranges
        self._where = where
        self._parts: dict[int, PartTimes] = {}

    def first_since(self, time_ms: int, low: int, high: int) -> QueueOffset:
        for part in self._view.parts_from(QueueOffset(low)):
            if part.queue_offset >= high:
                break
            if part.store_max_ms < max(time_ms, 0):
                continue
            first, end = max(part.queue_offset, low), min(part.queue_end, high)
            is_one_each = self._view.incarnation.lineage is None  # else times are of whole batches
            if part.store_min_ms >= time_ms and not part.holes and is_one_each:
                return QueueOffset(first)
            found = self._times(part).first_since(time_ms, first, end)
            if found is not None:
                return found
        return QueueOffset(max(high, low))

    def last_before(self, low: int, end: int) -> QueueOffset | None:
        """The last message in queue offsets ``[low, end)``."""
        for part in reversed(self._view.parts):
            first, stop = max(part.queue_offset, low), min(part.queue_end, end)
            if first >= stop or part.holes == part.count:
                continue
            if not part.holes:
                return QueueOffset(stop - 1)
            found = self._times(part).last_before(first, stop)
            if found is not None:
                return found
        return None

    def _times(self, part: Part) -> PartTimes:
        found = self._parts.get(part.queue_offset)
        if found is None:
            found = self._parts[part.queue_offset] = PartTimes(self._ranges, part, self._where)
        return found


class PartTimes:
    """Store times of one part, read unit by unit. Not for several threads at once."""

    def __init__(self, ranges: Ranges, part: Part, where: str) -> None:
        """Read the part's index."""
        self._ranges = ranges
        self._part = part
        self._where = where
        raw = ranges.read(part.index)
        items = decode_items(part, part.queue_offset, raw, where=where)
        self._kind = items.kind
        self._real = np.flatnonzero(items.sizes > 0)
        self._begins = items.log_offsets[self._real] - part.log_offset
        is_exact = self._kind is not RecordKind.ROCKETMQ
        is_short = items.sizes[self._real] < (1 if is_exact else RECORD_BYTES_MIN)
        if is_short.any() or (np.diff(self._begins) < 0).any():
            raise self._damaged("the items of an index are no records in their order")
        self._items: PartItems = items
        units = self._begins // (EXACT_UNIT_BYTES if is_exact else UNIT_BYTES)
        cuts = np.flatnonzero(np.diff(units)) + 1
        self._cuts: list[int] = [0, *cuts.tolist(), len(self._real)]
        self._known: dict[int, npt.NDArray[np.int64]] = {}

    def first_since(self, time_ms: int, first: int, end: int) -> QueueOffset | None:
        """The first message in queue offsets ``[first, end)`` at a time or later."""
        low, high = self._units(first, end)
        if self._kind is not RecordKind.ROCKETMQ:
            exact = (self._first_exactly(unit, time_ms, first, end) for unit in range(low, high))
            return next((one for one in exact if one is not None), None)
        is_whole = end == self._part.queue_end
        begin, limit = low, high - 1 if is_whole else high  # the part's bounds say: there is one
        while begin < limit:
            middle = (begin + limit) // 2
            if self._first_in(middle, time_ms, first, end) is not None:
                limit = middle
            else:
                begin = middle + 1
        nearby = range(max(begin - _UNITS_BACK, low), min(begin + 1, high))
        found = self._first_of(nearby, time_ms, first, end)
        if found is None and is_whole:  # times are in great disorder
            return self._first_of(range(low, high), time_ms, first, end)
        return found

    def last_before(self, first: int, end: int) -> QueueOffset | None:
        """The last message in queue offsets ``[first, end)``; the index tells."""
        at = int(np.searchsorted(self._real, end - self._items.start)) - 1
        found = int(self._real[at]) + self._items.start if at >= 0 else -1
        return QueueOffset(found) if found >= first else None

    def _first_of(self, units: range, time_ms: int, first: int, end: int) -> QueueOffset | None:
        for unit in units:
            found = self._first_in(unit, time_ms, first, end)
            if found is not None:
                return found
        return None

    def _first_in(self, unit: int, time_ms: int, first: int, end: int) -> QueueOffset | None:
        offsets, times = self._of(unit, first, end)
        late = np.flatnonzero(times >= time_ms)
        return QueueOffset(int(offsets[late[0]])) if len(late) else None

    def _first_exactly(self, unit: int, time_ms: int, first: int, end: int) -> QueueOffset | None:
        """As ``_first_in``, of records that may hold many messages: these are looked into."""
        from tiered.format.heads import first_since, heads_of  # noqa: PLC0415 (most tiers have none of them)

        low, high = self._cuts[unit], self._cuts[unit + 1]
        begins, sizes = self._begins[low:high], self._items.sizes[self._real[low:high]]
        is_first = np.append(True, np.diff(begins) != 0)
        positions, sizes = begins[is_first] - begins[0], sizes[is_first].astype(np.int64)
        stop = int(begins[-1]) + int(sizes[-1])
        data = self._ranges.read(self._part.log.part_of(int(begins[0]), stop))
        heads = heads_of(self._kind, data, positions, sizes)
        if not heads.is_sound.all():
            raise self._damaged("an item points at something that is not a record of this queue")
        late = (heads.times_ms >= time_ms) & (heads.highs > first) & (heads.lows < end)
        for at in np.flatnonzero(late).tolist():
            found = first_since(
                self._kind, data, int(positions[at]), int(sizes[at]), time_ms, first
            )
            if found is not None and found < end:
                return QueueOffset(found)
        return None

    def _units(self, first: int, end: int) -> tuple[int, int]:
        """Units ``[low, high)`` that hold the messages of ``[first, end)``."""
        low, high = np.searchsorted(self._real, (np.array((first, end)) - self._items.start))
        if low >= high:
            return 0, 0
        ends = np.searchsorted(self._cuts, (low, high - 1), side="right")
        return int(ends[0]) - 1, int(ends[1])

    def _of(
        self, unit: int, first: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Queue offsets and store times of a unit's messages, those of ``[first, end)``."""
        times = self._known.get(unit)
        if times is None:
            times = self._known[unit] = self._read(self._cuts[unit], self._cuts[unit + 1])
        offsets = self._real[self._cuts[unit] : self._cuts[unit + 1]] + self._items.start
        wanted = (offsets >= first) & (offsets < end)
        return offsets[wanted], times[wanted]

    def _read(self, low: int, high: int) -> npt.NDArray[np.int64]:
        """Store times of messages ``[low, high)``, by the heads of their records."""
        place, begins = self._part.log, self._begins[low:high]
        start = int(begins[0])
        stop = min(int(begins[-1]) + _HEAD_BYTES, place.size_bytes)
        data = self._ranges.read(place.part_of(start, stop))
        heads = np.frombuffer(data, np.uint8)
        positions = begins - start
        if (_gather(heads, positions, 4) != self._items.sizes[self._real[low:high]]).any():
            raise self._damaged("an item points at something that is not a record of this queue")
        is_v6 = _gather(heads, positions + SYS_FLAG_AT, 4) & BORN_HOST_V6 != 0
        return _gather(heads, positions + STORE_TIME_AT + np.where(is_v6, V6_EXTRA_BYTES, 0), 8)

    def _damaged(self, what: str) -> DataError:
        return DataError(
            what,
            where=self._where + self._part.index.key,
            do="run `tiered verify --deep` to see the extent of the damage",
        )


def _gather(
    heads: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.int64]:
    """Big-endian integers of 4 or 8 bytes at these positions."""
    bytes_ = heads[positions[:, None] + np.arange(size)]
    kind = ">i4" if size == np.dtype(np.int32).itemsize else ">i8"
    return np.ascontiguousarray(bytes_).view(kind)[:, 0].astype(np.int64)


# -- reading ----------------------------------------------------------------------------------------

__all__ = ["READ_BYTES", "QueueReader", "TierBatch", "TierReader"]

READ_BYTES = 8 * 1024 * 1024
"""How much of a part is read at once, about; bounds the memory of a reader to twice that and its largest record."""
WARY_BYTES = 64 * 1024
"""How much is read at once where something is damaged."""
_BLOCKS_TRIED = 8
"""Behind damage; then the next part."""
_ITEMS_TRIED = 2048
"""More than records of a block."""
DAMAGED_OR_GONE = DataError, ObjectNotFoundError
_EVERY = QueueOffset((1 << 63) - 1)


class TierReader:
    """One broker's tier, read-only; a ``tiered.log.cursor.Journal``."""

    def __init__(
        self, store: ObjectStore, prefix: str, isolation: Isolation | None = Isolation.COMMITTED
    ) -> None:
        """Read nothing yet.

        Args:
            isolation: What its cursors show of transactions; None: all that is stored.
        """
        self.store = store
        self.prefix = prefix
        self.isolation = isolation
        self._journal = JournalReader(store, prefix, TierMachine())
        self._replaying = threading.Lock()
        self._views: dict[tuple[MessageQueue, int, int], IncarnationView] = {}
        self._history = ""

    def seeing(self, isolation: Isolation) -> TierReader:
        """The same tier, of whose transactions another thing is seen; they share the journal, and catch up together."""
        other = copy(self)
        other.isolation = isolation
        return other

    @property
    def state(self) -> TierState:
        """As of the last ``refresh`` by any caller: reading refreshes when an object is gone."""
        return self._journal.state

    @property
    def where(self) -> str:
        """The tier, for messages."""
        return f"{self.store.url}/{self.prefix}"

    @property
    def journal_number(self) -> int:
        """The last journal entry that was applied."""
        return self._journal.number

    def refresh(self) -> bool:
        """Replay what is new in the journal; whether there was anything.

        Raises:
            DataError: The journal is damaged or lost; or it tells another history than it did: a checkpoint of a tier that
                was begun anew is beyond what we knew, and what readers hold means nothing there.
        """
        # One at a time: the journal's state changes step by step, and two would each apply the same entries.
        with self._replaying:
            before = self._journal.number
            self._journal.catch_up()
            self._history = self._history or self.state.history
            if self.state.history != self._history:
                raise DataError(
                    f"this tier was wiped and begun anew, or rebuilt without its journal: its history is"
                    f" {self.state.history}, and was {self._history}",
                    where=self.where,
                    do="open it again, and read from the beginning",
                )
            return self._journal.number != before

    def view(self, queue: MessageQueue, incarnation: Incarnation) -> IncarnationView:
        """An incarnation of a queue, laid out; the same as last time unless it has changed."""
        name = (queue, incarnation.number, incarnation.cut_at)
        # Without a lock: two threads that lay the same incarnation out make two equal views, of which one stays.
        view = self._views.get(name)
        if view is None or view.incarnation is not incarnation:
            view = self._views[name] = IncarnationView.of(queue, incarnation)
        return view

    def present(self, queue: MessageQueue) -> IncarnationView | None:
        """The present incarnation of a queue, as last seen; None: there is no such queue."""
        incarnation = self.state.incarnation(queue)
        return None if incarnation is None else self.view(queue, incarnation)

    def cursor(
        self, queue: MessageQueue, incarnation: int | None = None, *, state: TierState | None = None
    ) -> QueueCursor:
        """A cursor on the history that an incarnation of a queue (default: the present one) has now.

        Raises:
            InvalidError: The tier has no such queue.
        """
        incarnations = (self.state if state is None else state).queues.get(queue, ())
        for number in reversed(range(len(incarnations))):
            if incarnation in {None, incarnations[number].number}:
                return self._cursor(queue, incarnations, number)
        of_it = "" if incarnation is None else f" of incarnation {incarnation}"
        raise InvalidError(
            f"the tier has no queue {queue}{of_it}",
            where=self.store.url,
            do="`tiered ls URL` lists the topics and queues",
        )

    def _cursor(
        self, queue: MessageQueue, incarnations: Sequence[Incarnation], number: int
    ) -> QueueCursor:
        view, tails = self.view(queue, incarnations[number]), history_of(incarnations, number).tails
        return QueueCursor(queue, view, tails=tails, journal=self, isolation=self.isolation)

    def queue(self, queue: MessageQueue, incarnation: int | None = None) -> QueueReader:
        """A reader of one history of a queue; see ``cursor``."""
        return QueueReader(self.store, self.prefix, self.cursor(queue, incarnation))

    def incarnations(self, queue: MessageQueue) -> list[QueueReader]:
        """Readers of all incarnations of a queue, oldest first, with the ends that the broker truncated."""
        incarnations = self.state.queues.get(queue, ())
        cursors = (self._cursor(queue, incarnations, number) for number in range(len(incarnations)))
        return [QueueReader(self.store, self.prefix, cursor) for cursor in cursors]


class QueueReader:
    """Reads one history of a queue as of one state."""

    def __init__(self, store: ObjectStore, prefix: str, cursor: QueueCursor) -> None:
        self._store = store
        self._prefix = prefix
        self.cursor = cursor  # on that history

    @classmethod
    def of_incarnation(
        cls,
        store: ObjectStore,
        prefix: str,
        queue: MessageQueue,
        incarnation: Incarnation,
        isolation: Isolation | None = None,
    ) -> QueueReader:
        """A reader of one incarnation as it is: what is gone is an ``ObjectNotFoundError``, for the caller to look into."""
        view = IncarnationView.of(queue, incarnation)
        return cls(store, prefix, QueueCursor(queue, view, isolation=isolation))

    @property
    def queue(self) -> MessageQueue:
        """Whose."""
        return self.cursor.queue

    @property
    def incarnation(self) -> Incarnation:
        """The incarnation that was read last, as last seen."""
        return self.cursor.incarnation

    def read(
        self, start: QueueOffset, *, bytes_max: int = READ_BYTES, count_max: int = 1 << 20
    ) -> TierBatch | Gap | None:
        """The next records from ``start`` on, at least one however large it is.

        Args:
            start: First queue offset wanted; below the minimum, reading begins at the minimum.
            count_max: Items at most (> 0). May divide an inner batch, ``bytes_max`` does not.

        Returns:
            A batch; the gap that ``start`` lies in; or None at the end.

        Raises:
            ExpiredError: They have expired since this reader saw the journal.
            DataError: The bytes are damaged; nothing of them is returned.
        """
        return self.cursor.again(
            start, lambda place: self._read(place, start, bytes_max, count_max)
        )

    def read_warily(
        self, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> TierBatch | Gap | None:
        """As ``read``, in a part of which something is damaged: what is sound comes out, and that costs only itself.

        Raises:
            DataError: The first of what is wanted is damaged; it says where reading can go on, as far as that is found soon.
        """
        # First a few blocks: near damage most records are sound, and one by one each would cost a request of its own.
        try:
            return self.read(start, bytes_max=min(bytes_max, WARY_BYTES), count_max=count_max)
        except DataError:
            pass
        try:
            return self.read(start, bytes_max=1, count_max=1)
        except DataError as error:
            after = self.after_damage(start)
            if after is None:
                raise
            do = f"read on from queue offset {after} of {self.queue}, or see what `tiered verify --deep` says of the damage"
            raise DataError(error.what, where=error.where, do=do) from error

    def after_damage(self, start: QueueOffset) -> QueueOffset | None:
        """The first queue offset behind a damaged one that can be read, block by block; None: none was found soon."""
        at = start
        try:
            for tries_left in reversed(range(_BLOCKS_TRIED)):
                behind = self._after_block(at, is_last=not tries_left)
                if behind is None:
                    return None
                at = behind
                with suppress(DataError):
                    found = self.read(at, bytes_max=1, count_max=1)
                    return None if found is None else at
        except (TieredStoreError, BackendError):
            pass  # the damage is told all the same
        return None

    def _after_block(self, at: QueueOffset, *, is_last: bool) -> QueueOffset | None:
        """Where the next block begins of those that hold a message, or its item; or the next part."""
        found = self._part_at(self.cursor.at(at), at, _ITEMS_TRIED)
        if found is None:
            return None
        part, begin, end = found
        if is_last or part.section.gone:
            return part.queue_end
        first = begin - part.queue_offset
        index = part.index.part_of(first * ITEM_BYTES, (end - part.queue_offset) * ITEM_BYTES)
        try:
            items = decode_items(part, begin, self._read_range(index), where=self._prefix)
        except DataError:
            block = (index.start // BLOCK_BYTES + 1) * BLOCK_BYTES
            return QueueOffset(
                min(begin - first - part.items_at - -block // ITEM_BYTES, part.queue_end)
            )
        except ObjectNotFoundError:
            return part.queue_end
        block_bytes = part.section.block_bytes
        places = items.log_offsets - part.log_offset + part.records_at
        later = np.flatnonzero(places >= (int(places[0]) // block_bytes + 1) * block_bytes)
        return QueueOffset(begin + int(later[0])) if len(later) else end

    def salvage(self, start: QueueOffset, *, count_max: int = 1 << 31) -> Salvaged | None:
        """What is sound from ``start`` to the end of its part, for who met damage there; None: no part holds ``start``."""
        try:
            return self.cursor.again(start, lambda place: self._salvage(place, start, count_max))
        except (DataError, ObjectNotFoundError) as error:  # its object is gone
            found = self._part_at(self.cursor.at(start), start, count_max)
            if found is None:
                raise
            what = f"an object that the tier names is gone: {error}"
            why = error if isinstance(error, DataError) else DataError(what)
            return all_lost(*found[1:], why)

    def _salvage(self, place: HistoryPlace, start: QueueOffset, count_max: int) -> Salvaged | None:
        found = self._part_at(place, start, count_max)
        if found is None:
            return None
        part, begin, end = found
        left = salvage(self._store, self._prefix, self.queue, part, start=begin, end=end)
        if left.batch is None:
            return left
        return replace(left, batch=self.cursor.see(left.batch))

    def _part_at(
        self, place: HistoryPlace, start: QueueOffset, count_max: int
    ) -> tuple[Part, QueueOffset, QueueOffset] | None:
        """The part that holds a queue offset, and which of its offsets are meant."""
        begin = QueueOffset(max(start, place.view.incarnation.min_offset))
        found = place.view.locate(begin, where=self._prefix)
        if not isinstance(found, Part):
            return None
        return found, begin, QueueOffset(min(found.queue_end, place.end, begin + count_max))

    def _read(
        self, place: HistoryPlace, start: QueueOffset, bytes_max: int, count_max: int
    ) -> TierBatch | Gap | None:
        begin = QueueOffset(max(start, place.view.incarnation.min_offset))
        if begin >= place.end:
            return None
        found = place.view.locate(begin, where=self._prefix)
        if found is None or isinstance(found, Gap):
            return found
        count = min(count_max, place.end - begin)
        return self.cursor.see(self._read_part(found, begin, bytes_max, count))

    def batches(
        self,
        start: QueueOffset,
        end: QueueOffset = _EVERY,
        *,
        bytes_max: int = READ_BYTES,
        count_max: int = 1 << 20,
    ) -> Iterator[TierBatch | Gap]:
        """All that follows ``start``, up to ``end``, batch by batch; see ``read``."""
        at = start
        while at < end:
            found = self.read(at, bytes_max=bytes_max, count_max=min(count_max, end - at))
            if found is None:
                return
            yield found
            at = end_of(found)

    def past_damage(
        self,
        start: QueueOffset,
        end: QueueOffset,
        lost: Callable[[Salvaged], None],
        *,
        read: Callable[[QueueOffset], Iterable[TierBatch | Gap]] | None = None,
        damage: tuple[type[Exception], ...] = (DataError,),
    ) -> Iterator[TierBatch]:
        """What is sound of a range, in order: where reading fails the rest of the part is salvaged, and it goes on behind.

        Args:
            lost: Told what was salvaged, before anything of it or behind it comes out.
            read: All from a queue offset to the end, by another reader of the same history; None: by this one.
            damage: What ends no reading; with ``DAMAGED_OR_GONE`` an object that one incarnation (``of_incarnation``) names
            and is gone.

        Raises:
            TieredStoreError: As reading; a ``DataError`` only where the journal contradicts itself.
        """
        at = start
        while at < end:
            try:
                for found in read(at) if read else self.batches(at, end):
                    at = end_of(found)
                    if not isinstance(found, Gap):
                        yield found
            except damage:
                left = self.salvage(at, count_max=end - at)
                if left is None:
                    raise
            else:
                return
            lost(left)
            at = left.end
            if left.batch is not None:
                yield left.batch

    def find_lost(self, start: QueueOffset, end: QueueOffset) -> list[tuple[int, int, str]]:
        """What cannot be read of a range, each range with what is damaged or gone, by reading it."""
        found: list[Salvaged] = []
        for _ in self.past_damage(start, end, found.append, damage=DAMAGED_OR_GONE):
            pass
        return [lost for one in found for lost in one.named]

    def offset_by_time(self, timestamp_ms: int, boundary: Boundary = Boundary.LOWER) -> QueueOffset:
        """A queue offset by store time: what ``Boundary`` says."""

        def find(place: HistoryPlace) -> QueueOffset | None:
            return find_by_time(
                place.view,
                StoreRanges(self._store, self._prefix),
                timestamp_ms,
                boundary,
                low=place.start,
                high=place.end,
                where=self._prefix,
            )

        return self.cursor.by_time(find, boundary)

    def _read_part(
        self, part: Part, start: QueueOffset, bytes_max: int, count_max: int
    ) -> TierBatch:
        first = start - part.queue_offset
        count = min(count_max, part.count - first)
        low, high = first * ITEM_BYTES, (first + count) * ITEM_BYTES
        whole = self._whole(part, bytes_max)
        raw = whole[1][low:high] if whole else self._read_range(part.index.part_of(low, high))
        items = decode_items(part, start, raw, where=self._prefix)
        items = items.part_of(0, _fitting(items.log_offsets, items.sizes, bytes_max))
        begin, end = items.span(part)
        first, last = begin - part.log_offset, end - part.log_offset
        data = whole[0][first:last] if whole else self._read_range(part.log.part_of(first, last))
        return decode_records(self.queue, part, items, data, begin, where=self._prefix)

    def _read_range(self, want: SectionRange) -> memoryview:
        return read_range(self._store, self._prefix, want)

    def _whole(self, part: Part, bytes_max: int) -> tuple[memoryview, memoryview] | None:
        """Records and items, with one request; None: the section is too large for that, or something of it is damaged."""
        if part.section.size_bytes > max(WHOLE_AT_ONCE_BYTES, bytes_max):
            return None
        try:
            return read_part(self._store, self._prefix, part)
        except DataError:
            # One checksum for all of it says no more; by its blocks, what is sound of it comes out.
            return None


def end_of(found: TierBatch | Gap) -> QueueOffset:
    """One past the last queue offset of what was read."""
    return found.end if isinstance(found, Gap) else found.end_offset


def _fitting(offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32], bytes_max: int) -> int:
    """How many of the items fit into ``bytes_max``; at least one, and an inner batch whole."""
    ends = np.where(sizes > 0, offsets + sizes, 0)
    ends = np.maximum.accumulate(ends)
    real = np.flatnonzero(sizes > 0)
    if not len(real):
        return len(sizes)
    begin = offsets[real[0]]
    count = max(int(np.searchsorted(ends - begin, bytes_max, side="right")), int(real[0]) + 1)
    last = offsets[count - 1] if sizes[count - 1] > 0 else -1
    while count < len(sizes) and sizes[count] > 0 and offsets[count] == last:
        count += 1
    return count
