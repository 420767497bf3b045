"""Several threads on one store, and files that change under a reader."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from support import following
from support.broker_files import TOPIC, FakeBroker

from tiered.clock import ManualClock, SystemClock
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_follower_readers_and_refreshing_at_once(tmp_path: Path):
    """Beside a writer: the follower misses nothing and gives nothing twice, readers see only what is committed."""
    broker = FakeBroker(tmp_path / "store")
    broker.start()
    store = following.open_store(broker.store, SystemClock(), files_open_max=8)
    written = threading.Event()
    faults: list[BaseException] = []
    taken = following.Taken()

    def guarded(act: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 (handed to the test's own thread)
                faults.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def follow() -> None:
        follower = store.follow({})
        while not (written.is_set() and follower.is_idle and taken.count() >= 1500):
            for batch in follower.poll(3_000):
                taken.add(batch)

    def read() -> None:
        while not written.is_set():
            assert not following.read_all(store, 5_000, 50).holes

    def refresh() -> None:
        while not written.is_set():
            store.refresh()
            store.waiting()
            store.report()

    threads = [guarded(act) for act in (follow, read, refresh)]
    for number in range(1500):
        broker.append(number % 3, body=bytes([number % 256]) * (number % 400))
        if number % 5 == 0:
            broker.dispatch()
    broker.dispatch()
    written.set()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert [taken.offsets(MessageQueue(TOPIC, queue)) for queue in range(3)] == [
        list(range(500))
    ] * 3
    assert not taken.holes
    store.close()
    broker.close()


def test_files_cut_under_a_reader(tmp_path: Path):
    """A truncated file gives holes, never a signal, a hang or an error."""
    directory = following.unpack("s01-basic", tmp_path)
    store = following.open_store(directory, ManualClock())
    follower, taken = store.follow({}), following.Taken()
    for batch in follower.poll(10_000):
        taken.add(batch)
    logs = sorted((directory / "commitlog").iterdir())
    for file in logs[1:6:2]:
        with file.open("r+b") as out:
            out.truncate(100_000)
    for file in sorted(directory.glob("consumequeue/orders/*/*"))[::3]:
        with file.open("r+b") as out:
            out.truncate(700)
    following.drain(follower, taken, 50_000)
    following.check_complete(store, taken)
    assert sum(map(len, taken.holes.values())) > 10
    read = following.read_all(store)
    for queue, found in read.messages.items():
        assert found.items() <= following.expected("s01-basic").messages[queue].items()
    store.close()


def test_a_log_that_grows_while_it_is_read(tmp_path: Path):
    """Readers that lag, and a writer that rolls files: each poll gives what is there then."""
    broker = FakeBroker(tmp_path / "store")
    broker.start()
    store = following.open_store(broker.store)
    slow, fast = store.follow({}), store.follow({})
    slowly, at_once = following.Taken(), following.Taken()
    for number in range(400):
        broker.put(1, number % 2)
        following.drain(fast, at_once)
        if number % 3 == 0:
            for batch in slow.poll(300):
                slowly.add(batch)
    following.drain(slow, slowly, 300)
    assert slowly.raw == at_once.raw
    assert at_once.count() == 400
    store.close()
    broker.close()
