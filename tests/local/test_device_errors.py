"""A device that fails to read a chunk of the log (EIO): what lies there waits, and all else goes on."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import following
from support.broker_files import TOPIC, FakeBroker

from tiered.clock import ManualClock
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.local.rocketmq import RocketMQStore

QUEUES = [MessageQueue(TOPIC, number) for number in range(3)]


@dataclass
class Device:
    """Fails reads of chunks of files."""

    bad: dict[str, tuple[int, int]] = field(default_factory=dict)

    def check(self, descriptor: int, start: int, size: int) -> None:
        low, high = self.bad.get(str(Path(f"/proc/self/fd/{descriptor}").readlink()), (0, 0))
        if start < high and low < start + size:
            raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, pread, preadv = Device(), os.pread, os.preadv

    def failing_pread(descriptor: int, size: int, offset: int) -> bytes:
        made.check(descriptor, offset, size)
        return pread(descriptor, size, offset)

    def failing_preadv(descriptor: int, views: list[Any], offset: int) -> int:
        made.check(descriptor, offset, sum(memoryview(view).nbytes for view in views))
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "pread", failing_pread)
    monkeypatch.setattr(os, "preadv", failing_preadv)
    return made


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FakeBroker]:
    made = FakeBroker(tmp_path / "store")
    yield made
    made.close()


def look(store: RocketMQStore, follower: Any, taken: following.Taken, clock: ManualClock) -> None:
    for _ in range(4):
        clock.advance(20)
        store.refresh()
        following.drain(follower, taken)


@pytest.mark.parametrize("chunk", ["a page", "the whole file"])
@pytest.mark.parametrize("number", [0, 1])
def test_beside_a_broker_what_cannot_be_read_waits_and_all_else_goes_on(
    broker: FakeBroker, device: Device, number: int, chunk: str
):
    clock = ManualClock()
    broker.start()
    for at in range(240):
        broker.put(1, at % 2)
    files = sorted((broker.store / "commitlog").iterdir())
    assert len(files) > 3
    size = files[0].stat().st_size
    bad = files[number]
    device.bad[str(bad)] = (size // 2, size // 2 + 10) if chunk == "a page" else (0, size)
    store = following.open_store(broker.store, clock)
    follower, taken = store.follow({}), following.Taken()
    for at in range(240):
        broker.put(1, at % 3)
    look(store, follower, taken, clock)
    assert taken.offsets(QUEUES[2]) == list(range(80))
    for queue in QUEUES[:2]:
        offsets = taken.offsets(queue)
        assert offsets == list(range(len(offsets)))
    # (Of a page that holds both queues' records only the one whose record is hit has to wait.)
    assert sum(len(taken.offsets(queue)) for queue in QUEUES[:2]) < 400
    assert not taken.holes
    waiting = store.waiting()
    assert waiting.records
    assert str(bad) in waiting.reason
    assert "cannot be read" in waiting.reason
    device.bad.clear()
    look(store, follower, taken, clock)
    for queue in QUEUES[:2]:
        assert taken.offsets(queue) == list(range(200))
    assert not taken.holes
    assert store.waiting().records == 0
    follower.close()
    store.close()


@pytest.mark.parametrize("chunk", ["a page", "the whole file"])
def test_of_a_stopped_store_it_waits_and_ends_nothing(
    broker: FakeBroker, device: Device, chunk: str
):
    clock = ManualClock()
    for at in range(300):
        broker.put(1, at % 2)
    bad = sorted((broker.store / "commitlog").iterdir())[1]
    size = bad.stat().st_size
    device.bad[str(bad)] = (size // 2, size // 2 + 10) if chunk == "a page" else (0, size)
    store = following.open_store(broker.store, clock)
    taken = following.follow_all(store)
    for queue in QUEUES[:2]:
        offsets = taken.offsets(queue)
        assert offsets == list(range(len(offsets)))
    assert not taken.holes
    assert str(bad) in store.waiting().reason
    store.close()
    device.bad.clear()
    store = following.open_store(broker.store, clock)
    taken = following.follow_all(store)
    assert [taken.offsets(queue) for queue in QUEUES[:2]] == [list(range(150))] * 2
    store.close()


def test_the_first_page_and_the_newest_file(broker: FakeBroker, device: Device):
    """Where a store is opened, and where the frontier begins."""
    clock = ManualClock()
    broker.start()
    broker.put(200)
    files = sorted((broker.store / "commitlog").iterdir())
    for bad in (files[0], files[-1]):
        device.bad = {str(bad): (0, 4096)}
        store = following.open_store(broker.store, clock)
        follower, taken = store.follow({}), following.Taken()
        look(store, follower, taken, clock)
        assert not taken.holes
        device.bad.clear()
        look(store, follower, taken, clock)
        assert taken.offsets(QUEUES[0]) == list(range(200))
        follower.close()
        store.close()


def test_lists_that_cannot_be_read_are_an_error_still(broker: FakeBroker, device: Device):
    """Nothing else says what they say; the error names the file."""
    broker.put(20)
    listed = broker.store / "consumequeue" / TOPIC / "0" / f"{0:020d}"
    device.bad[str(listed)] = (0, 1 << 30)
    with pytest.raises(Exception, match=f"Input/output error.*{listed}"):
        following.follow_all(following.open_store(broker.store, ManualClock()))
