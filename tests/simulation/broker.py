"""The model: what the broker has ever stored, and what its retention has left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.synthetic import SyntheticStore

from tiered.model import MessageQueue

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from simulation.history import Life

    from tiered.local.face import RecordBatch
    from tiered.model import QueueOffset


class Broker(SyntheticStore):
    """A local store that grows and forgets, and a model that never does."""

    def __init__(self, rng: random.Random, queues: int) -> None:
        """``pause`` is to be set: lets virtual time pass."""
        super().__init__()
        self._rng = rng
        self.pause: Callable[[float], None] = lambda _seconds: None
        self.elapsed_s: Callable[[], float] = lambda: 0.0
        self._names = [MessageQueue(f"topic{number % 2}", number // 2) for number in range(queues)]
        self._ever: dict[tuple[str, int], list[bytes]] = {}
        self._first: dict[tuple[str, int], int] = {}

    def read(
        self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        """From a disk, which takes its time."""
        batch = super().read(queue, start, bytes_max=bytes_max, count_max=count_max)
        self._take_time()
        return batch

    def follow(self, starts: Mapping[MessageQueue, QueueOffset]) -> Any:
        follower = super().follow(starts)
        poll = follower.poll

        def slowly(window_bytes: int) -> list[RecordBatch]:
            batches = poll(window_bytes)
            self._take_time()
            return batches

        follower.poll = slowly  # type: ignore[method-assign]
        return follower

    def _take_time(self) -> None:
        if self._rng.random() < 0.2:
            self.pause(self._rng.choice((0.02, 0.3)))

    def store_some(self) -> None:
        """A few messages into one or all queues."""
        rng = self._rng
        some = [rng.choice(self._names)] if rng.random() < 0.7 else self._names
        for name in some:
            for _ in range(rng.randrange(1, 6)):
                self._store(name)

    def _store(self, name: MessageQueue) -> None:
        rng = self._rng
        key = (name.topic, name.queue_id)
        if key not in self._first:
            self._first[key] = rng.choice((0, 0, 7))
        self._count = max(self._count, round(self.elapsed_s() * 1000))  # store times
        size = rng.choice((5, 40, 40, 300, 900))
        self.append(name.topic, name.queue_id, rng.randbytes(size), first=self._first[key])
        self._ever.setdefault(key, []).append(self._queues[name].records[-1])

    def forget_some(self) -> None:
        """Retention: the oldest of a queue go, perhaps all."""
        name = self._rng.choice(self._names)
        row = self._queues.get(name)
        if row is not None and row.records:
            before = row.base + self._rng.randrange(1, len(row.records) + 1)
            self.expire(name.topic, name.queue_id, before)

    def record(self, queue: tuple[str, int], offset: int) -> bytes:
        """What was stored at an offset, whenever that was."""
        return self._ever[queue][offset - self._first[queue]]

    def min(self, queue: tuple[str, int]) -> int:
        """Smallest offset that is still there."""
        return self._queues[MessageQueue(*queue)].base

    def end(self, queue: tuple[str, int]) -> int:
        """One past the last offset."""
        row = self._queues[MessageQueue(*queue)]
        return row.base + len(row.records)

    def first(self, queue: tuple[str, int]) -> int:
        """Where a queue that the tier has never met begins now."""
        return self.min(queue)

    def gone_unseen(self, queue: tuple[str, int], life: Life) -> int:
        """Messages that retention took before they were tiered, of a queue of which the tier and the broker have nothing.

        No gap is told then before its next message: there is no last record to look for.
        """
        has_nothing = self.min(queue) == self.end(queue) and not life.parts
        return self.end(queue) - life.commit if has_nothing else 0
