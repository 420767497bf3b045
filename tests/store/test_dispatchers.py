"""A tier that is fed by the store itself, the plug-in way; and in which order dispatchers see what is listed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from support.dispatching import FAST, PREFIX, read_back
from support.embedded import create, reopen
from support.stored import read_all

from backends.memory import MemoryStore
from tiered.clock import SystemClock
from tiered.dispatch.dispatcher import TieredDispatcher
from tiered.journal.append import JournalWriter
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.log.state import TierMachine
from tiered.model import MessageQueue
from tiered.store.new_message import NewMessage

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from tiered.local.interface import RecordBatch
    from tiered.store.embedded import MessageStore


def tier(objects: MemoryStore, store: MessageStore, stop: threading.Event) -> TieredDispatcher:
    """A dispatcher that the store feeds; what it refuses it reads from the directory."""
    clock, rng = SystemClock(), random.Random(1)
    journal = JournalWriter(
        objects, PREFIX, TierMachine(), writer="0000000a", clock=clock, rng=rng, stop=stop
    )
    journal.take_epoch({})
    options = RocketMQOptions(broker_max_offset=lambda: store.confirm_offset)
    local = RocketMQStore.open(store.root, clock=clock, options=options)
    dispatcher = TieredDispatcher(
        store=objects, prefix=PREFIX, journal=journal, local=local, settings=FAST,
        start=lambda queue, bounds: bounds.min, selects=lambda queue: True, clock=clock, rng=rng,
    )  # fmt: skip
    dispatcher.start()

    def offer(batch: RecordBatch) -> bool:
        local.refresh()  # compensation reads no farther than the reader has seen
        return dispatcher.dispatch(batch)

    store.register(offer)
    return dispatcher


def test_a_tier_registered_in_the_chain_gets_all(tmp_path: Path):
    import threading

    objects, stop, rng = MemoryStore(), threading.Event(), random.Random(1)
    store = create(tmp_path / "s")
    dispatcher = tier(objects, store, stop)
    try:
        for at in range(400):
            store.append(NewMessage("t", at % 3, rng.randbytes(rng.randrange(600)), keys=f"k{at}"))
        assert store.wait_listed()
        for _ in range(
            1000
        ):  # what was refused, because a queue was busy, is fetched some time later
            assert dispatcher.drain(20), dispatcher.fault
            if dispatcher.counters.messages == 400:
                break
            stop.wait(0.01)
        assert dispatcher.counters.messages == 400
    finally:
        stop.set()
        dispatcher.close()
        dispatcher._local.close()
        store.close()
    for queue_id in range(3):
        queue = MessageQueue("t", queue_id)
        messages, gaps = read_back(objects, queue)
        assert gaps == []
        kept = read_all(tmp_path / "s")[queue]
        assert list(messages) == list(kept)
        log = b"".join(
            path.read_bytes() for path in sorted((tmp_path / "s" / "commitlog").iterdir())
        )
        for offset, record in kept.items():
            at = record.physical_offset
            assert messages[offset] == log[at : at + record.size]


def test_dispatchers_are_called_in_order_behind_the_lists(tmp_path: Path):
    seen: list[tuple[str, int, bool]] = []
    with create(tmp_path / "s") as store:

        def hear(name: str, batch: RecordBatch) -> bool:
            found = store.reader.get(batch.queue, batch.base_offset, count_max=batch.count)
            is_there = len(found.records) == batch.count
            seen.extend((name, batch.base_offset + at, is_there) for at in range(batch.count))
            return name == "a"

        store.register(lambda batch: hear("a", batch))
        store.register(lambda batch: hear("b", batch))
        for _ in range(50):
            store.append(NewMessage("t", 0, b"x"))
        assert store.wait_listed()
    for name in "ab":
        assert [(at, ok) for one, at, ok in seen if one == name] == [(at, True) for at in range(50)]
    assert seen.index(("a", 0, True)) < seen.index(("b", 0, True))
    with reopen(tmp_path / "s") as store:
        store.register(lambda batch: hear("later", batch))
        store.append(NewMessage("t", 0, b"x"))
        assert store.wait_listed()
    assert [at for name, at, _ in seen if name == "later"] == [50]
