"""What a follower's batches keep in memory, and queue offsets at the end of what 64 bits hold."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from support import following
from support.broker_files import FakeBroker

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from tiered.local.interface import RecordBatch


def kept_bytes(array: npt.NDArray[Any]) -> int:
    """Bytes that live as long as an array does."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.nbytes


def check_own(batch: RecordBatch) -> None:
    for field in fields(batch):
        column = getattr(batch, field.name)
        if isinstance(column, np.ndarray):
            assert kept_bytes(column) <= column.nbytes, field.name


def test_a_batch_keeps_nothing_of_other_queues(tmp_path: Path):
    broker = FakeBroker(tmp_path / "store")
    broker.start()
    for number in range(200):
        broker.put(1, queue_id=0 if number else 1)
    broker.crash()
    store = following.open_store(broker.store)
    follower = store.follow({})
    batches = follower.poll(1 << 20)
    assert min(batch.count for batch in batches) == 1 < len(batches)
    for batch in batches:
        check_own(batch)
    follower.close()
    store.close()


def test_queue_offsets_that_wrap_are_looked_at_one_by_one(tmp_path: Path):
    broker = FakeBroker(tmp_path / "store")
    broker.start()
    broker.put(3)
    for offset in (2**63 - 1, -(2**63)):
        broker.append(queue_offset=offset)
    broker.put(2, queue_id=1)
    broker.crash()
    store = following.open_store(broker.store)
    taken = following.follow_all(store)
    store.close()
    found = {queue.queue_id: sorted(some) for queue, some in taken.messages.items()}
    assert found == {0: [0, 1, 2], 1: [0, 1]}
    assert {queue.queue_id: sorted(some) for queue, some in taken.holes.items()} == {0: [3, 4]}
