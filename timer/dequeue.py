"""An hour's messages in the order in which they are due, without those that were cancelled.

``load`` reads a range of an hourly file once, in file order, puts its records aside (in memory, beyond ``SPOOL_BYTES``
in a temporary file) and sorts what the index says of them by due time and offset. So an hour of a million messages takes
a few tens of MB, wherever its records lie.

What is dropped: delete marks; messages that a mark in the same range names, whichever came first (as a broker's wheel does
within one second); of a message that was rolled, and taken again by another of its records when the first was gone from the
broker, all but the first; those whose offsets the journal says are cancelled.

What is damaged costs the messages of its block (``tiered.log.salvage``): the others are given, and the lost ones named.
Where a delete mark may be among the lost, what it may name is counted as lost with it: it is due at the same time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Final, TypeVar, overload

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.block import parse_records
from tiered.log.ranges import Ranges, clipped, is_in, joined, ranges_at, without
from tiered.log.reader import QueueReader, TierReader
from tiered.log.timers import HOUR_MS, TimerHour, hour_queue
from tiered.model import QueueOffset
from timer.records import MARK, may_be_rolled, names_of, raw_properties, read_rows, rolled_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.local.interface import RecordBatch
    from tiered.log.parts import Incarnation, TierState
    from tiered.log.salvage import Salvaged
    from timer.records import Flags, Longs

SPOOL_BYTES: Final = 64 * 1024 * 1024
Damaged = dict[int, DataError]
"""Hours whose file is damaged, and why."""
_Read = TypeVar("_Read")
_NAMED: Final = 1024
_AT_ONCE: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class DueMessage:
    """One message of an hourly file."""

    due_ms: int  # when it is due
    offset: int  # queue offset in the file
    record: bytes  # as it lies there


class DueBlock(Sequence[DueMessage]):
    """Messages one behind the other, by columns; as a sequence, one by one.

    Attributes:
        dues: int64[n], due times.
        offsets: int64[n], queue offsets in the file.
        data: Their records.
        sizes: int64[n], bytes of each.
    """

    __slots__ = ("data", "dues", "offsets", "positions", "sizes")

    def __init__(self, dues: Longs, offsets: Longs, sizes: Longs, data: bytes) -> None:
        self.dues, self.offsets, self.sizes, self.data = dues, offsets, sizes, data
        self.positions: Longs = np.cumsum(sizes) - sizes  # int64[n], where each begins

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
    """A range of an hourly file in due order. For one thread; ``close`` it.

    Attributes:
        dues: int64[n], due times, ascending.
        offsets: int64[n], queue offsets; ascending among equal due times.
        sizes: int64[n], bytes of the records.
    """

    def __init__(
        self, dues: Longs, offsets: Longs, *, sizes: Longs, places: Longs, spool: Spool
    ) -> None:
        """Sort them; the arguments are columns in any order, ``places`` where each record begins in ``spool``."""
        order = np.lexsort((offsets, dues))
        self.dues, self.offsets, self.sizes = dues[order], offsets[order], sizes[order]
        self.dropped: Flags = np.zeros(len(order), np.bool_)  # which are not to be handed over
        # Queue offsets that cannot be read now, or must not be given before all is read.
        self.lost: Ranges = ()
        self.errors: tuple[DataError, ...] = ()  # what is damaged, and where
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

    def lose(self, which: Flags) -> None:
        """Take items out: they count as lost."""
        gone = np.sort(self.offsets[which])
        self.lost = joined((*self.lost, *ranges_at(gone)))
        self._keep(~which)

    def without(self, offsets: Ranges) -> None:
        """Take items out that are no business of who asks, lost ones too."""
        self._keep(~is_in(self.offsets, offsets))
        for low, high in offsets:
            self.lost = without(self.lost, low, high)

    def _keep(self, kept: Flags) -> None:
        self.dues, self.offsets, self.sizes = self.dues[kept], self.offsets[kept], self.sizes[kept]
        self.dropped, self._places = self.dropped[kept], self._places[kept]

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
        """Chunks, one behind the other."""
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
    """Reads the hourly files of one broker. For one thread."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.tier = TierReader(store, prefix)  # the timers' place

    @property
    def state(self) -> TierState:
        """As of the last ``refresh``."""
        return self.tier.state

    def refresh(self) -> None:
        """Read what is new in the journal."""
        self.tier.refresh()

    def load(self, hour: int, low: int, high: int, state: TierState | None = None) -> DueItems:
        """Read the items ``[low, high)`` of an hour, but those that are held back.

        Args:
            high: One past the last.
            state: What the journal says, by who follows it himself; None: as of the last ``refresh``.

        Raises:
            DataError: The journal contradicts itself. (Damage is in what is returned.)
        """
        state = self.state if state is None else state
        held = state.timers.hours[hour].held
        return self._load(state, hour, (low, high), left_out=held)

    def load_held(self, hour: int, state: TierState | None = None) -> tuple[DueItems, Flags]:
        """Read what was held back of an hour; beside what its file has else, since that may be named by it, or be it.

        Returns:
            The items of the file up to where its sweeps went, and which of them are held. Those that are still lost are
            none of them.
        """
        state = self.state if state is None else state
        facts, incarnation = state.timers.hours[hour], state.incarnation(hour_queue(hour))
        low = int(incarnation.min_offset) if incarnation else 0
        items = self._load(state, hour, (low, facts.end), held=facts.held)
        return items, is_in(items.offsets, facts.held)

    def _load(
        self,
        state: TierState,
        hour: int,
        span: tuple[int, int],
        *,
        left_out: Ranges = (),
        held: Ranges | None = None,
    ) -> DueItems:
        """Read a span without ``left_out``; with ``held`` all else than that has been given before."""
        facts, damage = state.timers.hours[hour], _Damage()
        kept = _Kept()
        marks, is_rolled = _Marks() if facts.marks else None, False
        for batch in self._batches(state, hour, *span, damage):
            kept.add(batch)
            is_rolled = is_rolled or may_be_rolled(batch)
            if marks is not None:
                marks.add(batch)
        items = kept.items()
        items.lost, items.errors = damage.lost, tuple(damage.errors)
        items.drop(facts.cancels)
        if is_rolled:
            _drop_rolled(items, held)
        if marks is not None:
            marks.drop(items)
            if items.lost and marks.count < facts.marks:
                items.lose(damage.may_be_named(items))
        items.without(left_out)
        return items

    def refused(self, hour: int) -> Iterator[DueMessage]:
        """What the target refused for good of an hour, as long as its file is there."""
        for offset in refused_in(self.state, hour):
            items = self.load(hour, offset, offset + 1)
            try:
                yield from items.some(np.arange(len(items)))
            finally:
                items.close()

    def pending(self, hour: int) -> Iterator[DueMessage]:
        """What is still to be handed over of an hour.

        First what was held back and can be read now, then the rest of the sweep under way, then what came behind it.

        Raises:
            DataError: Some of it is damaged; all else was given before.
        """
        errors: list[DataError] = []
        for items, left in self._pending(hour, errors):
            for low in range(0, len(left), 1024):
                yield from items.some(left[low : low + 1024])
        if errors:
            raise errors[0]

    def listing(self, damaged: Damaged | None = None) -> Iterator[HourRow]:
        """The hours that have something to hand over, in order.

        Read is only what the journal cannot count: hours with delete marks, and with a sweep under way.
        """
        return read_hours(self.state.timers.hours, self._rows, damaged)

    def _rows(self, hour: int) -> Iterator[HourRow]:
        facts, incarnation = self.state.timers.hours[hour], self.state.incarnation(hour_queue(hour))
        if incarnation is not None and facts.left(incarnation.commit_offset):
            errors: list[DataError] = []
            row = self._row(hour, facts, incarnation, errors)
            if row.messages:
                yield row
            if errors:
                raise errors[0]

    def _row(
        self, hour: int, facts: TimerHour, incarnation: Incarnation, errors: list[DataError]
    ) -> HourRow:
        low = facts.held[0][0] if facts.held else facts.done
        parts = sum(1 for part in incarnation.parts() if part.queue_end > low)
        if not facts.marks and facts.done == incarnation.min_offset == facts.end:
            count = incarnation.commit_offset - facts.done - len(facts.cancels)
            size = incarnation.parts().log_bytes
            return HourRow(hour, count, size, facts.due_min_ms, facts.due_max_ms, parts)
        count, size, dues = 0, 0, []
        for items, left in self._pending(hour, errors):
            count += len(left)
            size += int(items.sizes[left].sum())
            dues += items.dues[left].tolist()
        return HourRow(hour, count, size, min(dues, default=0), max(dues, default=0), parts)

    def _pending(self, hour: int, errors: list[DataError]) -> Iterator[tuple[DueItems, Longs]]:
        """Items, and which of them are to be handed over; what is damaged is added to ``errors``."""
        facts, incarnation = self.state.timers.hours[hour], self.state.incarnation(hour_queue(hour))
        high = int(incarnation.commit_offset) if incarnation else 0
        for what in ("held", "left", "new"):
            if what == "held" and facts.held:
                items, flags = self.load_held(hour)
                errors += items.errors if _touch(items.lost, facts.held) else ()
            elif what == "left" and facts.done < facts.end:
                items = self.load(hour, facts.done, facts.end)
                flags = np.arange(len(items)) >= first_left(facts, items)
                errors += items.errors if items.lost else ()
            elif what == "new" and facts.end < high:
                items = self.load(hour, facts.end, high)
                flags = np.ones(len(items), np.bool_)
                errors += items.errors if items.lost else ()
            else:
                continue
            try:
                yield items, np.flatnonzero(flags & ~items.dropped)
            finally:
                items.close()

    def _batches(
        self, state: TierState, hour: int, low: int, high: int, damage: _Damage
    ) -> Iterator[RecordBatch]:
        """What is sound of a span; of the rest ``damage`` is told."""
        if low >= high:
            return
        tier = self.tier
        cursor = tier.cursor(hour_queue(hour), state=state)
        reader = QueueReader(tier.store, tier.prefix, cursor)
        for batch in reader.past_damage(QueueOffset(low), QueueOffset(high), damage.add):
            yield batch.records


def read_hours(
    hours: Iterable[int], read: Callable[[int], Iterable[_Read]], damaged: Damaged | None = None
) -> Iterator[_Read]:
    """What is read of some hours, in order of time. One that is damaged holds up none of the others.

    Args:
        read: Reads one. What it has given before it finds damage stands.
        damaged: Gets the hours that are damaged, and why; None: the first of them ends it.

    Raises:
        DataError: One is damaged, and nobody is told otherwise.
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

    The journal counts those that are. Where the file has lost some since, or they are damaged, those behind them have moved
    up, by as many as are missing at most.
    """
    return max(0, facts.rank - (facts.sweep_items - len(items)))


def refused_in(state: TierState, hour: int) -> list[int]:
    """Queue offsets of what the target refused of an hour, and its file has still."""
    facts, incarnation = state.timers.hours.get(hour), state.incarnation(hour_queue(hour))
    if facts is None or incarnation is None:
        return []
    return [
        offset
        for offset in facts.refused
        if incarnation.min_offset <= offset < incarnation.commit_offset
    ]


@dataclass(frozen=True, slots=True)
class HourRow:
    """What is still to be handed over of an hour."""

    hour: int  # since 1970
    messages: int  # how many
    size_bytes: int  # of their records
    due_min_ms: int  # smallest due time
    due_max_ms: int  # greatest
    parts: int  # in how many parts of the file they lie

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


class _Damage:
    """What cannot be read of a range."""

    def __init__(self) -> None:
        self.lost: Ranges = ()
        self.errors: list[DataError] = []
        self._dues: list[int] | None = []
        """When what is lost is due; None: nobody knows of all."""

    def add(self, found: Salvaged) -> None:
        if found.lost:
            self.lost = joined((*self.lost, *found.lost))
            self.errors.append(found.error)
            if self._dues is None or found.lost_tags is None:
                self._dues = None
            else:
                self._dues += found.lost_tags.tolist()

    def may_be_named(self, items: DueItems) -> Flags:
        """Which items delete marks may name that are lost: by their due time, or any."""
        if self._dues is None:
            return np.ones(len(items), np.bool_)
        return np.isin(items.dues, np.unique(np.array(self._dues, np.int64)))


def _touch(some: Ranges, others: Ranges) -> bool:
    return any(clipped(some, low, high) for low, high in others)


class _Marks:
    """Finds what delete marks name. Kept are the marks alone: what they may name is due when they are, and read again."""

    def __init__(self) -> None:
        self._marks: set[tuple[int, bytes]] = set()
        self._own: list[int] = []

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._own)

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


def _drop_rolled(items: DueItems, held: Ranges | None) -> None:
    """Of each rolled message keep the records that were rolled least; of one that was given in another record, none."""
    hashes, rolls = np.zeros(len(items), np.uint64), np.zeros(len(items), np.int64)
    for low in range(0, len(items), _AT_ONCE):
        some = slice(low, low + _AT_ONCE)
        block = items.some(np.arange(len(items))[some])
        records = parse_records(block.data, block.positions, block.sizes.astype(np.int32))
        hashes[some], rolls[some] = rolled_columns(records)
    rolled = rolls >= 0
    if held is not None:
        rolls[rolled & ~is_in(items.offsets, held)] = -1
    order = np.lexsort((rolls, hashes, items.dues))
    order = order[rolled[order]]
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
