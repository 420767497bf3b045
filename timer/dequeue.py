"""An hour's messages in the order in which they are due, without those that were taken back.

``load`` reads a stretch of an hourly file once, in file order, puts its records aside (in memory, beyond ``SPOOL_BYTES``
in a temporary file) and sorts what the index says of them by due time and offset. So an hour of a million messages takes
a few tens of MB, wherever its records lie.

What is dropped: delete marks; messages that a mark in the same stretch names, whichever came first (as a broker's wheel does
within one second); of a message that was rolled, and taken again by another of its records when the first was gone from the
broker, all but the first; those whose offsets the journal says are cancelled.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final, TypeVar, overload

import numpy as np

from tiered.errors import DataError
from tiered.format.block import parse_records
from tiered.log.reader import QueueReader, TierReader
from tiered.log.state import Gap
from tiered.log.timers import HOUR_MS, TimerHour, hour_queue
from tiered.model import QueueOffset
from timer.records import (
    MARK,
    may_be_rolled,
    names_of,
    raw_properties,
    read_rows,
    rolled_columns,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.local.face import RecordBatch
    from tiered.log.parts import QueueLife, TierState
    from timer.records import Flags, Longs

SPOOL_BYTES: Final = 64 * 1024 * 1024
Damaged = dict[int, DataError]
"""Hours whose file is damaged, and why."""
_Read = TypeVar("_Read")
_NAMED: Final = 1024
_AT_ONCE: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class DueMessage:
    """One message of an hourly file.

    Attributes:
        due_ms: When it is due.
        offset: Queue offset in the file.
        record: As it lies there.
    """

    due_ms: int
    offset: int
    record: bytes


class DueBlock(Sequence[DueMessage]):
    """Messages one behind the other, by columns; as a sequence, one by one.

    Attributes:
        dues: int64[n], due times.
        offsets: int64[n], queue offsets in the file.
        data: Their records.
        sizes: int64[n], bytes of each.
        positions: int64[n], where each begins.
    """

    __slots__ = ("data", "dues", "offsets", "positions", "sizes")

    def __init__(self, dues: Longs, offsets: Longs, sizes: Longs, data: bytes) -> None:
        self.dues, self.offsets, self.sizes, self.data = dues, offsets, sizes, data
        self.positions: Longs = np.cumsum(sizes) - sizes

    @classmethod
    def of(cls, messages: Sequence[DueMessage]) -> DueBlock:
        """Of messages in any form."""
        if isinstance(messages, cls):
            return messages
        columns = (
            [m.due_ms for m in messages],
            [m.offset for m in messages],
            [len(m.record) for m in messages],
        )
        dues, offsets, sizes = (np.array(column, np.int64) for column in columns)
        return cls(dues, offsets, sizes, b"".join(m.record for m in messages))

    def __len__(self) -> int:
        """How many."""
        return len(self.dues)

    @overload
    def __getitem__(self, at: int) -> DueMessage: ...
    @overload
    def __getitem__(self, at: slice) -> DueBlock: ...
    def __getitem__(self, at: int | slice) -> DueMessage | DueBlock:
        """One, or some that follow each other."""
        if isinstance(at, slice):
            low, high, _ = at.indices(len(self))
            sizes = self.sizes[low:high]
            begin = int(self.positions[low]) if low < high else 0
            data = self.data[begin : begin + int(sizes.sum())]
            return DueBlock(self.dues[low:high], self.offsets[low:high], sizes, data)
        begin = int(self.positions[at])
        record = self.data[begin : begin + int(self.sizes[at])]
        return DueMessage(int(self.dues[at]), int(self.offsets[at]), record)


class DueItems:
    """A stretch of an hourly file in due order. For one thread; ``close`` it.

    Attributes:
        dues: int64[n], due times, ascending.
        offsets: int64[n], queue offsets; ascending among equal due times.
        sizes: int64[n], bytes of the records.
        dropped: Which are not to be handed over.
    """

    def __init__(
        self, dues: Longs, offsets: Longs, *, sizes: Longs, places: Longs, spool: Spool
    ) -> None:
        """Sort them; the arguments are columns in any order, ``places`` where each record begins in ``spool``."""
        order = np.lexsort((offsets, dues))
        self.dues, self.offsets, self.sizes = dues[order], offsets[order], sizes[order]
        self.dropped: Flags = np.zeros(len(order), np.bool_)
        self._places = places[order]
        self._spool = spool

    def __len__(self) -> int:
        """Number of items, dropped ones too."""
        return len(self.dues)

    def messages(self, low: int, high: int) -> DueBlock:
        """Those that are not dropped among ``[low, high)``."""
        return self.some(low + np.flatnonzero(~self.dropped[low:high]))

    def some(self, at: Longs) -> DueBlock:
        """Those at some places, dropped or not."""
        sizes = self.sizes[at]
        data = self._spool.take(self._places[at], sizes)
        return DueBlock(self.dues[at], self.offsets[at], sizes, data)

    def drop(self, offsets: Sequence[int]) -> None:
        """Do not hand over the items with these queue offsets."""
        self.dropped |= np.isin(self.offsets, offsets)

    def close(self) -> None:
        """Give the records up."""
        self._spool.close()


class Spool:
    """Bytes put aside: in memory, beyond ``SPOOL_BYTES`` in a temporary file."""

    def __init__(self) -> None:
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._end = 0

    def put(self, data: Buffer) -> int:
        """Put bytes behind the others; where they begin."""
        view, begin = memoryview(data).cast("B"), self._end
        self._end += view.nbytes
        if self._file is None and self._end > SPOOL_BYTES:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (``close`` closes it)
            self._file.write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += view
        else:
            self._file.write(view)
        return begin

    def take(self, places: Longs, sizes: Longs) -> bytes:
        """Pieces, one behind the other."""
        pairs = zip(places.tolist(), sizes.tolist(), strict=True)
        if self._file is None:
            view = memoryview(self._memory)
            return b"".join([view[place : place + size] for place, size in pairs])
        self._file.flush()
        number = self._file.fileno()
        return b"".join([os.pread(number, size, place) for place, size in pairs])

    def close(self) -> None:
        """Give them up."""
        self._memory = bytearray()
        if self._file is not None:
            self._file.close()


class TimerReader:
    """Reads the hourly files of one broker. For one thread.

    Attributes:
        tier: The timers' place.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.tier = TierReader(store, prefix)

    @property
    def state(self) -> TierState:
        """As of the last ``refresh``."""
        return self.tier.state

    def refresh(self) -> None:
        """Read what is new in the journal.

        Raises:
            DataError: It is damaged.
            BackendError: It could not be read.
        """
        self.tier.refresh()

    def load(self, hour: int, low: int, high: int, state: TierState | None = None) -> DueItems:
        """Read the items ``[low, high)`` of an hour.

        Args:
            hour: Since 1970.
            low: First queue offset.
            high: One past the last.
            state: What the journal says, by who follows it himself; None: as of the last ``refresh``.

        Raises:
            DataError: They are damaged.
            BackendError: They could not be read.
        """
        state = self.state if state is None else state
        facts = state.timers.hours[hour]
        kept = _Kept()
        marks, is_rolled = _Marks() if facts.marks else None, False
        for batch in self._batches(state, hour, low, high):
            kept.add(batch)
            is_rolled = is_rolled or may_be_rolled(batch)
            if marks is not None:
                marks.add(batch)
        items = kept.items()
        items.drop(facts.cancels)
        if is_rolled:
            _drop_rolled(items)
        if marks is not None:
            marks.drop(items)
        return items

    def refused(self, hour: int) -> Iterator[DueMessage]:
        """What the target refused for good of an hour, as long as its file is there.

        Raises:
            DataError: It is damaged.
            BackendError: It could not be read.
        """
        for offset in refused_in(self.state, hour):
            items = self.load(hour, offset, offset + 1)
            try:
                yield from items.some(np.arange(len(items)))
            finally:
                items.close()

    def pending(self, hour: int) -> Iterator[DueMessage]:
        """What is still to be handed over of an hour: the rest of the sweep under way, then what came behind it.

        Raises:
            DataError: It is damaged.
            BackendError: It could not be read.
        """
        for items, first in self._pending(hour):
            try:
                for at in range(first, len(items), 1024):
                    yield from items.messages(at, min(at + 1024, len(items)))
            finally:
                items.close()

    def listing(self, damaged: Damaged | None = None) -> Iterator[HourRow]:
        """The hours that have something to hand over, in order.

        Read is only what the journal cannot count: hours with delete marks, and with a sweep under way.

        Args:
            damaged: See ``read_hours``.
        """
        return read_hours(self.state.timers.hours, self._rows, damaged)

    def _rows(self, hour: int) -> Iterator[HourRow]:
        facts, life = self.state.timers.hours[hour], self.state.life(hour_queue(hour))
        if life is not None and facts.done < life.commit_offset:
            row = self._row(hour, facts, life)
            if row.messages:
                yield row

    def _row(self, hour: int, facts: TimerHour, life: QueueLife) -> HourRow:
        parts = sum(1 for part in life.parts() if part.queue_end > facts.done)
        if not facts.marks and facts.done == life.min_offset == facts.end:
            count = life.commit_offset - facts.done - len(facts.cancels)
            size = life.parts().log_bytes
            return HourRow(hour, count, size, facts.due_min_ms, facts.due_max_ms, parts)
        count, size, dues = 0, 0, []
        for items, first in self._pending(hour):
            kept = ~items.dropped[first:]
            count += int(np.count_nonzero(kept))
            size += int(items.sizes[first:][kept].sum())
            dues += items.dues[first:][kept].tolist()
            items.close()
        return HourRow(hour, count, size, min(dues, default=0), max(dues, default=0), parts)

    def _pending(self, hour: int) -> Iterator[tuple[DueItems, int]]:
        facts, life = self.state.timers.hours[hour], self.state.life(hour_queue(hour))
        high = life.commit_offset if life else 0
        if facts.done < facts.end:
            items = self.load(hour, facts.done, facts.end)
            yield items, first_left(facts, items)
        if facts.end < high:
            yield self.load(hour, facts.end, high), 0

    def _batches(self, state: TierState, hour: int, low: int, high: int) -> Iterator[RecordBatch]:
        if low >= high:
            return
        tier, at = self.tier, QueueOffset(low)
        cursor = tier.cursor(hour_queue(hour), state=state)
        reader = QueueReader(tier.store, tier.prefix, cursor)
        while at < high:
            found = reader.read(at, count_max=high - at)
            if found is None:
                return
            if isinstance(found, Gap):
                at = found.end
                continue
            yield found.records
            at = found.records.end_offset


def read_hours(
    hours: Iterable[int], read: Callable[[int], Iterable[_Read]], damaged: Damaged | None = None
) -> Iterator[_Read]:
    """What is read of some hours, in order of time. One that is damaged holds up none of the others.

    Args:
        hours: In any order.
        read: Reads one. What it has given before it finds damage stands.
        damaged: Gets the hours that are damaged, and why; None: the first of them ends it.

    Raises:
        DataError: One is damaged, and nobody is told otherwise.
        BackendError: It could not be read.
    """
    for hour in sorted(hours):
        try:
            yield from read(hour)
        except DataError as error:
            if damaged is None:
                raise
            damaged[hour] = error


def first_left(facts: TimerHour, items: DueItems) -> int:
    """The first item of the sweep under way that may not be handed over.

    The journal counts those that are. Where the file has lost some since, those behind them have moved up, by as many as it
    has lost at most.
    """
    return max(0, facts.rank - (facts.end - facts.done - len(items)))


def refused_in(state: TierState, hour: int) -> list[int]:
    """Queue offsets of what the target refused of an hour, and its file has still."""
    facts, life = state.timers.hours.get(hour), state.life(hour_queue(hour))
    if facts is None or life is None:
        return []
    return [offset for offset in facts.refused if life.min_offset <= offset < life.commit_offset]


@dataclass(frozen=True, slots=True)
class HourRow:
    """What is still to be handed over of an hour.

    Attributes:
        hour: Since 1970.
        messages: How many.
        size_bytes: Of their records.
        due_min_ms: Smallest due time.
        due_max_ms: Greatest.
        parts: In how many parts of the file they lie.
    """

    hour: int
    messages: int
    size_bytes: int
    due_min_ms: int
    due_max_ms: int
    parts: int

    @property
    def hour_ms(self) -> int:
        """When the hour begins."""
        return self.hour * HOUR_MS


class _Kept:
    """Records put aside, and where."""

    def __init__(self) -> None:
        self._spool = Spool()
        self._columns: list[tuple[Longs, Longs, Longs, Longs]] = []

    def add(self, batch: RecordBatch) -> None:
        real = np.flatnonzero(batch.sizes > 0)
        offsets = batch.base_offset + real
        sizes = batch.sizes[real].astype(np.int64)
        places = batch.positions[real] + self._spool.put(batch.data)
        self._columns.append((batch.tag_codes[real].astype(np.int64), offsets, sizes, places))

    def items(self) -> DueItems:
        none = np.empty(0, np.int64)
        columns = zip(*self._columns, strict=True) if self._columns else ((none,),) * 4
        dues, offsets, sizes, places = (np.concatenate(column) for column in columns)
        return DueItems(dues, offsets, sizes=sizes, places=places, spool=self._spool)


class _Marks:
    """Finds what delete marks name. Kept are the marks alone: what they may name is due when they are, and read again."""

    def __init__(self) -> None:
        self._marks: set[tuple[int, bytes]] = set()
        self._own: list[int] = []

    def add(self, batch: RecordBatch) -> None:
        if MARK not in bytes(batch.data):
            return
        rows = read_rows(batch, batch.tag_codes)
        base = int(batch.base_offset)
        for at in np.flatnonzero(rows.marks).tolist():
            self._marks.add(rows.name(at))
            self._own.append(base + at)

    def drop(self, items: DueItems) -> None:
        """Drop the marks, and what they name."""
        items.drop(self._own)
        dues = np.unique(np.array([due for due, _ in self._marks], np.int64))
        named = np.flatnonzero(np.isin(items.dues, dues) & ~items.dropped)
        for low in range(0, len(named), _NAMED):
            some = named[low : low + _NAMED]
            block = items.some(some)
            for at, names in zip(some.tolist(), _names(block), strict=True):
                items.dropped[at] = not self._marks.isdisjoint(names)


def _drop_rolled(items: DueItems) -> None:
    """Of each rolled message keep the records that were rolled least."""
    hashes, rolls = np.zeros(len(items), np.uint64), np.zeros(len(items), np.int64)
    for low in range(0, len(items), _AT_ONCE):
        some = slice(low, low + _AT_ONCE)
        block = items.some(np.arange(len(items))[some])
        records = parse_records(block.data, block.positions, block.sizes.astype(np.int32))
        hashes[some], rolls[some] = rolled_columns(records)
    order = np.lexsort((rolls, hashes, items.dues))
    order = order[rolls[order] >= 0]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (np.diff(hashes[order]) != 0) | (np.diff(items.dues[order]) != 0)
    first = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
    alike = np.flatnonzero(rolls[order] > rolls[first])
    for low in range(0, len(alike), _NAMED):
        at, of = order[alike[low : low + _NAMED]], first[alike[low : low + _NAMED]]
        pairs = zip(_names(items.some(at)), _names(items.some(of)), strict=True)
        items.dropped[at] |= np.array([own == other for own, other in pairs], np.bool_)


def _names(block: DueBlock) -> Iterator[Sequence[tuple[int, bytes]]]:
    """By which delete marks may name each message."""
    records = parse_records(block.data, block.positions, block.sizes.astype(np.int32))
    for due, raw in zip(block.dues.tolist(), raw_properties(records), strict=True):
        yield names_of(due, raw)
