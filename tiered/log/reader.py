"""Plain, correct, sequential reading of a tier: block by block, every byte checked.

``TierReader`` is one broker's tier at one moment (``refresh`` moves it on); ``QueueReader`` reads one life of one queue.
The adaptive fetcher comes behind the same face.

An object that is gone (404) may have been merged or have expired: the journal is replayed, and then asked again. What the
new state no longer has is an ``ExpiredError``; an object that it still names is damage. Never other bytes.

Threads: a ``QueueReader`` may be used from any thread at once; ``refresh`` from one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from backends.errors import ObjectNotFoundError
from tiered.errors import DataError, ExpiredError, InvalidError
from tiered.journal.reader import JournalReader
from tiered.log.by_time import StoreRanges, offset_by_time
from tiered.log.consume_queue import ITEM_BYTES
from tiered.log.decode import TierBatch, decode_items, decode_records
from tiered.log.objects import read_range
from tiered.log.state import Gap, Part, QueueLife, TierMachine, TierState
from tiered.log.view import LifeView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ObjectStore
    from tiered.model import MessageQueue, QueueOffset

__all__ = ["READ_BYTES", "QueueReader", "TierBatch", "TierReader"]

T = TypeVar("T")

REPLAYS_MAX = 4
"""How often one read replays the journal because an object is gone: each time another must have gone."""
READ_BYTES = 8 * 1024 * 1024
"""How much of a part is read at once, about; bounds the memory of a reader to twice that and its largest record."""


class TierReader:
    """One broker's tier, read-only."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self._journal = JournalReader(store, prefix, TierMachine())

    @property
    def state(self) -> TierState:
        """As of the last ``refresh``."""
        return self._journal.state

    @property
    def journal_number(self) -> int:
        """The last journal entry that was applied."""
        return self._journal.number

    def refresh(self) -> bool:
        """Replay what is new in the journal; whether there was anything."""
        before = self._journal.number
        self._journal.catch_up()
        return self._journal.number != before

    def queue(self, queue: MessageQueue, incarnation: int | None = None) -> QueueReader:
        """A reader of one life of a queue (default: the present one).

        Raises:
            InvalidError: The tier has no such queue.
        """
        lives = self.state.queues.get(queue, ())
        chosen = [life for life in lives if incarnation in {None, life.incarnation}]
        if not chosen:
            raise InvalidError(
                f"the tier has no queue {queue}",
                where=self.store.url,
                do="`tiered ls URL` lists the topics and queues",
            )
        return self._life(queue, chosen[-1])

    def lives(self, queue: MessageQueue) -> list[QueueReader]:
        """Readers of all lives of a queue, oldest first: what is over, ends that the broker took back, the present one."""
        return [self._life(queue, life) for life in self.state.queues.get(queue, ())]

    def _life(self, queue: MessageQueue, life: QueueLife) -> QueueReader:
        return QueueReader(
            self.store, self.prefix, queue, life, lambda: self._life_now(queue, life)
        )

    def _life_now(self, queue: MessageQueue, old: QueueLife) -> QueueLife | None:
        """A life as the journal has it now; read anew, since our own state is another thread's."""
        journal = JournalReader(self.store, self.prefix, TierMachine())
        journal.catch_up()
        for life in reversed(journal.state.queues.get(queue, ())):
            same_end = life.commit_offset == old.commit_offset
            if life.incarnation == old.incarnation and (same_end or not old.ended):
                return life
        return None


class QueueReader:
    """Reads one life of a queue as of one state."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        queue: MessageQueue,
        life: QueueLife,
        life_now: Callable[[], QueueLife | None] | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            store: The tier's store.
            prefix: Of the broker.
            queue: Whose.
            life: The life to read.
            life_now: Gives that life as the journal has it now, when an object is gone (None: it is no more).
                Without it what is gone is an ``ObjectNotFoundError``, for the caller to look into.
        """
        self._store = store
        self._prefix = prefix
        self.queue = queue
        self._life_now = life_now
        self._view = LifeView.of(queue, life)

    @property
    def life(self) -> QueueLife:
        """The life, as last seen."""
        return self._view.life

    def read(
        self, start: QueueOffset, *, bytes_max: int = READ_BYTES, count_max: int = 1 << 20
    ) -> TierBatch | Gap | None:
        """The next records from ``start`` on, at least one however large it is.

        Args:
            start: First queue offset wanted; below the minimum, reading begins at the minimum.
            bytes_max: Bytes of records at most, but for the first.
            count_max: Items at most (> 0). May divide an inner batch, ``bytes_max`` does not.

        Returns:
            A batch; the gap that ``start`` lies in; or None at the end.

        Raises:
            ExpiredError: They have expired since this reader saw the journal.
            DataError: The bytes are damaged; nothing of them is returned.
            BackendError: They could not be read.
        """
        begin = max(start, self.life.min_offset)
        return self._again(lambda view: self._read(view, begin, bytes_max, count_max), begin)

    def _read(
        self, view: LifeView, start: QueueOffset, bytes_max: int, count_max: int
    ) -> TierBatch | Gap | None:
        found = view.locate(start, where=self._prefix)
        if found is None or isinstance(found, Gap):
            return found
        return self._read_part(found, start, bytes_max, count_max)

    def batches(
        self, start: QueueOffset, *, bytes_max: int = READ_BYTES
    ) -> Iterator[TierBatch | Gap]:
        """All that follows ``start``, batch by batch."""
        at = start
        while (found := self.read(at, bytes_max=bytes_max)) is not None:
            yield found
            at = found.end if isinstance(found, Gap) else found.records.end_offset

    def offset_by_time(self, timestamp_ms: int, *, upper: bool = False) -> QueueOffset:
        """First queue offset stored at or after a time (``upper``: after it); the end when there is none.

        See ``tiered.log.by_time`` for the requests that it takes, and for disorder of store times.
        """
        since_ms = timestamp_ms + 1 if upper else timestamp_ms

        def work(view: LifeView) -> QueueOffset:
            ranges = StoreRanges(self._store, self._prefix)
            return offset_by_time(view, ranges, since_ms, where=self._prefix)

        return self._again(work, None)

    def _again(self, work: Callable[[LifeView], T], start: QueueOffset | None) -> T:
        """Work on the life as last seen; when an object is gone, on the life as it is now."""
        for tries_left in reversed(range(REPLAYS_MAX)):
            view = self._view
            try:
                return work(view)
            except ObjectNotFoundError as error:
                if self._life_now is None:
                    raise
                now = self._life_now() if tries_left else None
                if now is None or now == view.life:
                    raise DataError(
                        f"an object that the journal names is gone: {error}",
                        where=f"{self._store.url}/{self._prefix}",
                        do="run `tiered verify` to see what is damaged",
                    ) from error
                if start is not None and start < now.min_offset:
                    raise ExpiredError(
                        f"offsets {start} to {now.min_offset} of {self.queue} have expired",
                        now.min_offset,
                        where=f"{self._store.url}/{self._prefix}",
                    ) from error
                self._view = LifeView.of(self.queue, now)
        raise AssertionError("the last try ends by itself")

    def _read_part(
        self, part: Part, start: QueueOffset, bytes_max: int, count_max: int
    ) -> TierBatch:
        first = start - part.queue_offset
        count = min(count_max, part.count - first)
        low = part.index.start + first * ITEM_BYTES
        raw = read_range(self._store, self._prefix, part.index, low, low + count * ITEM_BYTES)
        items = decode_items(part, start, raw, where=self._prefix)
        items = items.part_of(0, _fitting(items.log_offsets, items.sizes, bytes_max))
        begin, end = items.span(part)
        data: memoryview | bytes = b""
        if end > begin:
            place, shift = part.log, part.log.start - part.log_offset
            data = read_range(self._store, self._prefix, place, begin + shift, end + shift)
        return decode_records(self.queue, part, items, data, begin, where=self._prefix)


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
