"""A dispatcher over a store in memory or another, and what a reader then finds there."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.journals import PREFIX
from support.synthetic import SyntheticStore
from typing_extensions import Buffer

from backends.errors import UnknownOutcomeError
from tiered.clock import SystemClock
from tiered.dispatch.dispatcher import TieredDispatcher
from tiered.dispatch.settings import DispatchSettings
from tiered.journal.append import JournalWriter
from tiered.log.reader import TierReader
from tiered.log.state import Gap, TierMachine
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import ObjectStore

Decide = Callable[[str], Exception | None]
FAST = DispatchSettings(
    freshness_s=0.02, bundle_bytes=16384, buffer_bytes_max=65536, window_bytes=8192, poll_s=0.005,
    backoff_s_min=0.001, backoff_s_max=0.01, uploads_max=4,
)  # fmt: skip


class Flaky:
    """Wraps a store: every call of ``put_if_absent`` asks ``decide(key)`` what to do first."""

    def __init__(self, inner: ObjectStore, decide: Decide) -> None:
        self._inner = inner
        self._decide = decide

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put_if_absent(self, key: str, data: Sequence[Buffer]) -> None:
        answer = self._decide(key)
        if isinstance(answer, UnknownOutcomeError):
            self._inner.put_if_absent(key, data)
        if answer is not None:
            raise answer
        self._inner.put_if_absent(key, data)


@contextmanager
def dispatching(
    store: ObjectStore,
    local: SyntheticStore,
    settings: DispatchSettings = FAST,
    seed: int = 1,
    selects: Callable[[MessageQueue], bool] = lambda queue: True,
) -> Iterator[TieredDispatcher]:
    clock, rng, stop = SystemClock(), random.Random(seed), threading.Event()
    journal = JournalWriter(
        store,
        PREFIX,
        TierMachine(),
        writer=f"{rng.getrandbits(32):08x}",
        clock=clock,
        rng=rng,
        stop=stop,
    )
    journal.take_epoch({})
    dispatcher = TieredDispatcher(
        store=store, prefix=PREFIX, journal=journal, local=local, settings=settings,
        start=lambda queue, bounds: bounds.min, selects=selects, clock=clock, rng=rng,
    )  # fmt: skip
    dispatcher.start()
    try:
        yield dispatcher
    finally:
        stop.set()
        dispatcher.close()


def run_once(store: ObjectStore, local: SyntheticStore, **more: Any) -> TieredDispatcher:
    with dispatching(store, local, **more) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    return dispatcher


def read_back(
    store: ObjectStore, queue: MessageQueue, *, prefix: str = PREFIX
) -> tuple[dict[int, bytes], list[Gap]]:
    reader = TierReader(store, prefix)
    reader.refresh()
    messages: dict[int, bytes] = {}
    gaps: list[Gap] = []
    for found in reader.queue(queue).batches(QueueOffset(0)):
        if isinstance(found, Gap):
            gaps.append(found)
            continue
        records = found.records
        for index in range(records.count):
            low = records.positions[index]
            offset = records.base_offset + index
            assert offset not in messages
            messages[offset] = bytes(records.data[low : low + records.sizes[index]])
    assert list(messages) == sorted(messages)
    return messages, gaps


def filled(topics: int = 2, queues: int = 3, each: int = 60) -> SyntheticStore:
    local, rng = SyntheticStore(), random.Random(7)
    for number in range(each):
        for topic in range(topics):
            for queue in range(queues):
                local.append(
                    f"t{topic}", queue, rng.randbytes(rng.randrange(10, 300)) + b"%d" % number
                )
    return local


def assert_equal(store: ObjectStore, local: SyntheticStore) -> None:
    for queue in local.queues():
        assert read_back(store, queue) == (local.raw(queue), [])
