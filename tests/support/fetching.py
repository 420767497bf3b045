"""A fetcher over a small tier, whose requests run in the asker's thread or when the test says so."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from support.journals import PREFIX
from support.tiers import QUEUE, batch_of

from fetcher.fetcher import TieredMessageFetcher
from fetcher.limits import FetchSettings
from tiered.clock import ManualClock
from tiered.log.reader import TierReader
from tiered.log.state import Gap
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.log.cursor import IncarnationView
    from tiered.log.decode import TierBatch


class InlineExecutor(Executor):
    """Runs a call where it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def fetcher_of(
    store: ObjectStore,
    *,
    executor: Executor | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> TieredMessageFetcher:
    """A fetcher of the tier in a store."""
    reader = TierReader(store, PREFIX)
    reader.refresh()
    executor = executor or InlineExecutor()
    return TieredMessageFetcher(reader, executor, clock or ManualClock(), FetchSettings(**settings))


def view_of(fetcher: TieredMessageFetcher, queue: MessageQueue = QUEUE) -> IncarnationView:
    """The present incarnation of a queue, as the fetcher sees it."""
    view = fetcher.tier.present(queue)
    assert view is not None
    return view


def rows(batch: TierBatch) -> dict[int, bytes]:
    """Every item's bytes by queue offset; b"" for a hole."""
    records = batch.records
    data = bytes(memoryview(records.data))
    spans = zip(records.positions.tolist(), records.sizes.tolist(), strict=True)
    return {records.base_offset + n: data[p : p + s] for n, (p, s) in enumerate(spans)}


def expected(base: int, items: list[Any], *, queue: MessageQueue = QUEUE) -> dict[int, bytes]:
    """What a reader gets of these items."""
    batch = batch_of(base, items, queue=queue)
    data = bytes(memoryview(batch.data))
    spans = zip(batch.positions.tolist(), batch.sizes.tolist(), strict=True)
    return {base + n: data[p : p + s] for n, (p, s) in enumerate(spans)}


def batches(
    fetcher: TieredMessageFetcher,
    start: int = 0,
    *,
    group: str = "g",
    queue: MessageQueue = QUEUE,
    **limits: Any,
) -> Iterator[TierBatch | Gap]:
    """All that follows ``start``."""
    at = QueueOffset(start)
    while (found := fetcher.read(group, queue, at, **limits)) is not None:
        yield found
        at = found.end if isinstance(found, Gap) else found.end_offset


def read_all(
    fetcher: TieredMessageFetcher, start: int = 0, **more: Any
) -> tuple[dict[int, bytes], list[Gap]]:
    """Everything, each offset once and in order."""
    found: dict[int, bytes] = {}
    gaps: list[Gap] = []
    for chunk in batches(fetcher, start, **more):
        if isinstance(chunk, Gap):
            gaps.append(chunk)
        else:
            new = rows(chunk)
            assert not found or min(new) > max(found), "in order, and nothing twice"
            found |= new
    return found, gaps
