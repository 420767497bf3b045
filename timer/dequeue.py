"""An hour's messages in the order in which they are due, without those that were taken back.

``load`` reads a stretch of an hourly file once, in file order, puts its records aside (in memory, beyond ``SPOOL_BYTES``
in a temporary file) and sorts what the index says of them by due time and offset. So an hour of a million messages takes
a few tens of MB, wherever its records lie.

What is dropped: delete marks; messages that a mark behind them in the same stretch names (as a broker's wheel does within
one second); those whose offsets the journal says are cancelled.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

import numpy as np

from tiered.log.reader import QueueReader, TierReader
from tiered.log.state import Gap
from tiered.log.timers import HOUR_MS, TimerHour, hour_queue
from tiered.model import QueueOffset
from timer.records import read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.local.face import RecordBatch
    from tiered.log.parts import QueueLife, TierState
    from timer.records import Flags, Longs

SPOOL_BYTES: Final = 64 * 1024 * 1024


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


class DueItems:
    """A stretch of an hourly file in due order. For one thread; ``close`` it.

    Attributes:
        dues: int64[n], due times, ascending.
        offsets: int64[n], queue offsets; ascending among equal due times.
        sizes: int64[n], bytes of the records.
        dropped: Which are not to be handed over.
    """

    def __init__(
        self, dues: Longs, offsets: Longs, *, sizes: Longs, places: Longs, spool: IO[bytes]
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

    def messages(self, low: int, high: int) -> list[DueMessage]:
        """Those that are not dropped among ``[low, high)``."""
        found = []
        for at in (low + np.flatnonzero(~self.dropped[low:high])).tolist():
            self._spool.seek(self._places[at])
            record = self._spool.read(self.sizes[at])
            found.append(DueMessage(int(self.dues[at]), int(self.offsets[at]), record))
        return found

    def close(self) -> None:
        """Give the records up."""
        self._spool.close()


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
        spool = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 (DueItems closes it)
        kept = _Kept(spool)
        names = _Marks() if facts.marks else None
        for batch in self._batches(state, hour, low, high):
            kept.add(batch)
            if names is not None:
                names.add(batch)
        items = kept.items()
        items.dropped |= np.isin(items.offsets, facts.cancels)
        if names is not None:
            items.dropped |= np.isin(items.offsets, names.dropped())
        return items

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

    def listing(self) -> Iterator[HourRow]:
        """The hours that have something to hand over, in order.

        Read is only what the journal cannot count: hours with delete marks, and with a sweep under way.
        """
        for hour, facts in sorted(self.state.timers.hours.items()):
            life = self.state.life(hour_queue(hour))
            if life is not None and facts.done < life.commit_offset:
                row = self._row(hour, facts, life)
                if row.messages:
                    yield row

    def _row(self, hour: int, facts: TimerHour, life: QueueLife) -> HourRow:
        if not facts.marks and facts.done == life.min_offset == facts.end:
            count = life.commit_offset - facts.done - len(facts.cancels)
            size = life.parts().log_bytes
            return HourRow(hour, count, size, facts.due_min_ms, facts.due_max_ms)
        count, size, dues = 0, 0, []
        for items, first in self._pending(hour):
            kept = ~items.dropped[first:]
            count += int(np.count_nonzero(kept))
            size += int(items.sizes[first:][kept].sum())
            dues += items.dues[first:][kept].tolist()
            items.close()
        return HourRow(hour, count, size, min(dues, default=0), max(dues, default=0))

    def _pending(self, hour: int) -> Iterator[tuple[DueItems, int]]:
        facts, life = self.state.timers.hours[hour], self.state.life(hour_queue(hour))
        high = life.commit_offset if life else 0
        if facts.done < facts.end:
            yield self.load(hour, facts.done, facts.end), facts.rank
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


@dataclass(frozen=True, slots=True)
class HourRow:
    """What is still to be handed over of an hour.

    Attributes:
        hour: Since 1970.
        messages: How many.
        size_bytes: Of their records.
        due_min_ms: Smallest due time.
        due_max_ms: Greatest.
    """

    hour: int
    messages: int
    size_bytes: int
    due_min_ms: int
    due_max_ms: int

    @property
    def hour_ms(self) -> int:
        """When the hour begins."""
        return self.hour * HOUR_MS


class _Kept:
    """Records put aside, and where."""

    def __init__(self, spool: IO[bytes]) -> None:
        self._spool = spool
        self._columns: list[tuple[Longs, Longs, Longs, Longs]] = []
        self._at = 0

    def add(self, batch: RecordBatch) -> None:
        real = np.flatnonzero(batch.sizes > 0)
        offsets = batch.base_offset + real
        sizes = batch.sizes[real].astype(np.int64)
        places = batch.positions[real] + self._at
        self._columns.append((batch.tag_codes[real].astype(np.int64), offsets, sizes, places))
        self._at += self._spool.write(memoryview(batch.data).cast("B"))

    def items(self) -> DueItems:
        none = np.empty(0, np.int64)
        columns = zip(*self._columns, strict=True) if self._columns else ((none,),) * 4
        dues, offsets, sizes, places = (np.concatenate(column) for column in columns)
        return DueItems(dues, offsets, sizes=sizes, places=places, spool=self._spool)


class _Marks:
    """Finds what delete marks name."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, bytes], int] = {}
        self._rows: list[tuple[int, Sequence[tuple[int, bytes]]]] = []
        self._own: list[int] = []

    def add(self, batch: RecordBatch) -> None:
        rows = read_rows(batch, batch.tag_codes)
        base = int(batch.base_offset)
        for at, is_mark in enumerate(rows.marks.tolist()):
            if is_mark:
                self._marks[int(rows.dues[at]), rows.keys[at]] = base + at
                self._own.append(base + at)
            else:
                self._rows.append((base + at, rows.names(at)))

    def dropped(self) -> list[int]:
        """Queue offsets of the marks, and of messages in front of a mark that names them."""
        marks = self._marks
        hit = [
            offset
            for offset, names in self._rows
            if any(marks.get(name, -1) > offset for name in names)
        ]
        return self._own + hit
