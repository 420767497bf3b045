"""Following a store that has a log for each queue: round the queues that have something new, a share of each.

**Contract.** Each queue's items come in order, from where the caller said; what the store skips is a gap. A queue that may
have become another one (``fallen_since``) is told of with the same poll that gives what it has now. For one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from tiered.local.interface import BaseFollower
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from tiered.local.interface import RecordBatch
    from tiered.model import MessageQueue, QueueBounds

_SHARE_BYTES_MIN: Final = 1 << 20
"""Of each queue at least: a read costs something."""
_COUNT_MAX: Final = 1 << 18
_ITEM_BYTES: Final = 32
"""What an item costs without its record: holes are not for nothing."""


class PartitionStore(Protocol):
    """What a follower needs of a store. For any thread."""

    def look(self) -> None:
        """See what has changed, where that is told by a glance: it comes with every poll."""
        ...

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        """The bounds of each queue. The same object until one of them changes."""
        ...

    def fallen_since(self, count: int) -> tuple[int, Collection[MessageQueue]]:
        """How many falls there were so far, and which queues fell since there were ``count``."""
        ...

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        """See ``LocalStore``."""
        ...


class PartitionFollower(BaseFollower):
    """Gives what each queue gets, from where its caller stands."""

    def __init__(
        self,
        store: PartitionStore,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(starts, stop)
        self._store = store
        self._bounds: Mapping[MessageQueue, QueueBounds] = {}
        self._busy: dict[MessageQueue, None] = {}  # those with something new, in turn
        self._falls, _ = store.fallen_since(0)  # the caller has just said where to go on

    @property
    def is_at_end(self) -> bool:
        return not self._busy

    def seek(self, queue: MessageQueue, start: QueueOffset) -> None:
        self._next[queue] = start
        self._busy.pop(queue, None)
        self._note(queue)

    def poll(self, window_bytes: int) -> list[RecordBatch]:
        self._require_open()
        self._look()
        share = max(window_bytes // max(len(self._busy), 1), min(window_bytes, _SHARE_BYTES_MIN))
        batches: list[RecordBatch] = []
        for queue in list(self._busy):
            if window_bytes <= 0 or (batches and self._stop()):
                break
            batch = self._take(queue, min(share, window_bytes))
            if batch is not None:
                batches.append(batch)
                window_bytes -= memoryview(batch.data).nbytes + batch.count * _ITEM_BYTES
        self._is_idle = not batches and not self._busy
        return batches

    def _look(self) -> None:
        self._store.look()
        self._falls, fallen = self._store.fallen_since(self._falls)
        self._fallen.update(queue for queue in fallen if queue in self._next)
        bounds = self._store.queues()
        if bounds is not self._bounds:
            self._bounds = bounds
            turns, self._busy = self._busy, {}
            for queue in (*turns, *bounds):
                self._note(queue)

    def _note(self, queue: MessageQueue) -> None:
        """Give a queue its turn, if it has something new."""
        bounds = self._bounds.get(queue)
        if bounds is not None and max(self._next.get(queue, 0), bounds.min) < bounds.end:
            self._busy[queue] = None

    def _take(self, queue: MessageQueue, bytes_max: int) -> RecordBatch | None:
        """What comes next of a queue, whose turn that was."""
        start = QueueOffset(self._next.get(queue, self._bounds[queue].min))
        batch = self._store.read(queue, start, bytes_max=bytes_max, count_max=_COUNT_MAX)
        del self._busy[queue]
        if batch is not None:
            self._next[queue] = batch.end_offset
            self._note(queue)
        return batch
