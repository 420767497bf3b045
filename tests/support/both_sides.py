"""A broker's store and its tier, each of which a test moves as it likes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.fetching import InlineExecutor
from support.journals import PREFIX
from support.synthetic import SyntheticStore
from support.tiers import TierBuilder

from fetcher.fetcher import TieredMessageFetcher
from fetcher.limits import FetchSettings
from fetcher.message_store import LocalSide, MessageStoreSettings, TieredMessageStore, TierSide
from fetcher.statuses import Policy
from tiered.clock import Clock, ManualClock
from tiered.log.reader import TierReader
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from backends.base import ObjectStore
    from tiered.local.interface import RecordBatch

QUEUE = MessageQueue("t", 0)


class MovingStore(SyntheticStore):
    """Does something of the test's choice before each call that a reader makes."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], None] = lambda: None

    def read(
        self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        self.before()
        return super().read(queue, start, bytes_max=bytes_max, count_max=count_max)


class BothSides:
    """The queue ``t/0`` on both sides.

    Attributes:
        local: The broker's store.
        builder: Writes the tier.
        raws: Every record there ever was, by queue offset.
        memory_from: Queue offset from which on the local store has messages in memory.
        store: What is tested.
    """

    def __init__(
        self,
        policy: Policy = Policy.NOT_IN_DISK,
        *,
        first: int = 0,
        has_local: bool = True,
        has_tier: bool = True,
        seen_store: ObjectStore | None = None,
        executor: Executor | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        self.local = MovingStore()
        self.builder = TierBuilder(seen_store)
        self.raws: dict[int, bytes] = {}
        self.memory_from = 0
        self.first = first
        self.clock = clock or ManualClock()
        reader = TierReader(self.builder.store, PREFIX)
        reader.refresh()
        executor = executor or InlineExecutor()
        fetch = FetchSettings(cache_bytes=8 << 20, chunk_bytes=1 << 20)
        self.fetcher = TieredMessageFetcher(reader, executor, self.clock, fetch)
        self.tier_side = TierSide(reader, self.fetcher, InlineExecutor(), self.clock)
        local = LocalSide(self.local, is_in_memory=lambda _, start, __: start >= self.memory_from)
        self.store = TieredMessageStore(
            local if has_local else None,
            self.tier_side if has_tier else None,
            self.clock,
            MessageStoreSettings(policy=policy, **settings),
        )

    @property
    def end(self) -> int:
        """One past the last message of the local store."""
        return self.first + len(self.raws)

    def append(self, count: int = 1, body: bytes = b"x" * 20) -> None:
        """Store messages in the broker."""
        for _ in range(count):
            offset = self.local.append(QUEUE.topic, QUEUE.queue_id, body, first=self.first)
            self.raws[offset] = self.local.raw(QUEUE)[offset]

    def commit(self, end: int, *, roll: bool = False) -> None:
        """Tier everything up to a queue offset."""
        file = self.builder.file(QUEUE, self.first)
        start = file.append_offset
        if end <= start:
            return
        batch = self.local.read(QUEUE, start, bytes_max=1 << 40, count_max=end - start)
        assert batch is not None
        assert batch.base_offset == start
        self.builder.add_batch(batch, roll=roll)

    def gap(self, end: int) -> None:
        """Have the tier go on at a later queue offset."""
        self.builder.gap(end - self.builder.file(QUEUE, self.first).append_offset, queue=QUEUE)

    @property
    def commit_offset(self) -> int:
        """One past the last message in the tier."""
        return self.builder.file(QUEUE, self.first).commit_offset

    def expire(self, before: int) -> None:
        """Local retention."""
        self.local.expire(QUEUE.topic, QUEUE.queue_id, QueueOffset(before))

    def get(self, offset: int, **more: Any) -> Any:
        """One read."""
        return self.store.get_message("g", QUEUE.topic, QUEUE.queue_id, offset, **more)
