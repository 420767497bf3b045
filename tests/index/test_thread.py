"""The index thread beside a dispatcher: everything is covered, from the feed or the tier, whatever fails meanwhile."""

from __future__ import annotations

import contextlib
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.disks import small_disk
from support.dispatching import PREFIX, dispatching, filled, run_once
from support.waiting import until

from backends.errors import UnavailableError
from backends.memory import MemoryStore
from backends.wrapping import MeteredStore
from tiered.attach import index as index_module
from tiered.attach.index import IndexThread
from tiered.attach.settings import IndexSettings
from tiered.clock import SystemClock
from tiered.index.extract import extract_all
from tiered.index.indexer import Indexer
from tiered.index.lookup import IndexReader, Wish
from tiered.log.reader import TierReader
from tiered.log.state import indexed_to
from tiered.log.verify import verify_tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pytest

    from backends.base import ObjectStore
    from tiered.dispatch.dispatcher import TieredDispatcher
    from tiered.index.extract import Keys
    from tiered.local.interface import RecordBatch
    from tiered.log.state import TierState

EACH = 60


@contextmanager
def indexing(
    store: ObjectStore, dispatcher: TieredDispatcher, *, fed: bool = True, **settings: Any
) -> Iterator[IndexThread]:
    stop = threading.Event()
    thread = IndexThread(
        store=store,
        prefix=PREFIX,
        state=lambda: dispatcher._journal.state,
        say=dispatcher.say,
        next_id=dispatcher.uploader.next_id,
        settings=IndexSettings(**settings),
        clock=SystemClock(),
        stop=stop,
    )
    if fed:
        dispatcher.uploader.on_stored = thread.stored
    body = threading.Thread(target=thread.run, name="index")
    body.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.wake()
        body.join(20)
        assert not body.is_alive()


def state_of(store: ObjectStore) -> TierState:
    reader = TierReader(store, PREFIX)
    reader.refresh()
    return reader.state


def check(store: ObjectStore, each: int = EACH) -> None:
    """Each key of each queue finds its message, by the index alone."""
    state = state_of(store)
    for queue, incarnations in state.queues.items():
        assert indexed_to(incarnations[-1]) == incarnations[-1].commit_offset == each, queue
    reader = IndexReader(store, PREFIX)
    for topic in {queue.topic for queue in state.queues}:
        for number in range(0, each, 7):
            wish = Wish(topic=topic, key=f"k{number}", scan_bytes_max=0)
            found = reader.lookup(state, wish)
            assert found.is_complete
            assert sorted(hit.queue.queue_id for hit in found.hits) == [0, 1, 2]
            assert {hit.queue_offset for hit in found.hits} == {number}
    report = verify_tier(store, PREFIX, deep=True)
    assert (report.is_clean, report.recorded.unindexed_messages) == (True, 0)


def follow(dispatcher: TieredDispatcher) -> None:
    dispatcher.follow(lambda: False, until_idle=True)
    assert dispatcher.drain(20), dispatcher.fault


def test_keys_come_from_what_is_in_memory_and_nothing_is_read_again():
    meter = MeteredStore(MemoryStore())
    with dispatching(meter, filled()) as dispatcher, indexing(meter, dispatcher, items_max=100) as thread:  # fmt: skip
        follow(dispatcher)
        assert thread.flush(20)
        assert meter.snapshot().kinds["get"].bytes_down == 0, "nothing was read"
        assert thread.objects >= 3, "many are full"
        assert (thread.waits, thread.failures, thread.refused, thread.damaged) == (0, 0, 0, 0)
        assert thread.items == 2 * 3 * EACH
    check(meter)


def test_keys_are_extracted_by_the_thread_of_the_index_alone(monkeypatch: pytest.MonkeyPatch):
    """Upload threads hand on one after another: what they do then every entry of the journal waits for."""
    names = set()

    def extract(batches: Sequence[RecordBatch], log_offsets: Sequence[int]) -> list[list[Keys]]:
        names.add(threading.current_thread().name)
        return extract_all(batches, log_offsets)

    monkeypatch.setattr("tiered.index.indexer.extract_all", extract)
    store = MemoryStore()
    with dispatching(store, filled()) as dispatcher, indexing(store, dispatcher) as thread:
        follow(dispatcher)
        assert thread.flush(20)
    assert names == {"index"}
    check(store)


def test_a_writer_goes_on_where_the_last_one_was_cut_off():
    store, local = MemoryStore(), filled()
    run_once(store, local)
    with dispatching(store, local, seed=2) as dispatcher, indexing(store, dispatcher, items_max=50) as thread:  # fmt: skip
        while not thread.objects:  # then it ends in the middle, with keys collected and not named
            threading.Event().wait(0.01)
    named = len(state_of(store).indexes)
    assert named
    with dispatching(store, local, seed=3) as dispatcher, indexing(store, dispatcher) as thread:
        assert thread.flush(20)
        assert thread.objects == (1 if thread.items else 0)
    check(store)


def test_what_grows_is_indexed_when_it_is_old_enough():
    store, local = MemoryStore(), filled(each=20)
    with dispatching(store, local) as dispatcher, indexing(store, dispatcher, age_s=0.05) as thread:
        for _ in range(2):
            follow(dispatcher)
            for topic in ("t0", "t1"):
                for queue in range(3):
                    for number in range(20):
                        local.append(topic, queue, b"later %d" % number)
        follow(dispatcher)
        assert thread.flush(20)
        assert thread.objects >= 1
    check(store, 60)


class Outage:
    """A store that takes no index object for a while."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.left = 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put_if_absent(self, key: str, data: Any) -> None:
        if "/index/" in key and self.left:
            self.left -= 1
            raise UnavailableError("down")
        self._inner.put_if_absent(key, data)


def test_an_outage_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(index_module, "_PAUSE_S_MIN", 0.01)
    inner = MemoryStore()
    store: Any = Outage(inner)
    with dispatching(inner, filled()) as dispatcher, indexing(store, dispatcher) as thread:
        follow(dispatcher)
        assert thread.flush(20)
        assert (thread.failures, thread.is_failing) == (3, False)
    check(inner)
    assert sum("could not go on" in record.message for record in caplog.records) == 1


def test_a_defect_ends_the_index_and_not_the_writer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    store = MemoryStore()
    with dispatching(store, filled()) as dispatcher, indexing(store, dispatcher) as thread:
        monkeypatch.setattr(thread._builder, "finish", lambda: 1 / 0)
        follow(dispatcher)
        thread.flush(20)
        assert thread.is_failing
        assert dispatcher.fault is None
    assert any("ended by a defect" in record.message for record in caplog.records)
    assert not state_of(store).indexes


def test_what_the_feed_had_no_room_for_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.index.indexer._record_bytes", lambda _sections: 1 << 27)
    store = MemoryStore()
    with dispatching(store, filled()) as dispatcher, indexing(store, dispatcher) as thread:
        follow(dispatcher)
        assert thread.flush(20)
        assert thread._feed.refused
    check(store)


def test_an_end_names_what_is_collected_and_does_not_go_on(monkeypatch: pytest.MonkeyPatch):
    inner = Indexer.step

    def slowly(self: Indexer, state: TierState, **_: Any) -> int:
        threading.Event().wait(0.1)
        return inner(self, state, bytes_max=1)

    monkeypatch.setattr(Indexer, "step", slowly)
    store, local = MemoryStore(), filled()
    run_once(store, local)
    with dispatching(store, local, seed=2) as dispatcher, indexing(store, dispatcher) as thread:
        assert not thread.flush(0.6, is_ending=True)
        assert thread.objects == 1
    incarnations = [incarnations[-1] for incarnations in state_of(store).queues.values()]
    assert any(indexed_to(incarnation) for incarnation in incarnations)
    assert any(indexed_to(incarnation) < incarnation.commit_offset for incarnation in incarnations)
    assert verify_tier(store, PREFIX, deep=True).is_clean


def test_a_full_index_directory_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(index_module, "_PAUSE_S_MAX", 0.02)
    monkeypatch.setattr(index_module, "_PAUSE_S_MIN", 0.01)
    store = MemoryStore()
    with (
        small_disk(tmp_path / "disk", "64k") as disk,
        dispatching(store, filled()) as dispatcher,
    ):
        ballast = disk.path / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(b"x" * 1024):
                pass
        with indexing(store, dispatcher, directory=str(disk.path)) as thread:
            follow(dispatcher)
            until(lambda: thread.failures >= 3)
            assert not thread.flush(0.2)
            assert (thread.defect, thread.objects) == ("", 0)
            assert "make room" in caplog.text
            ballast.unlink()
            until(lambda: thread.flush(1))
            assert thread.objects >= 1
    assert "Traceback" not in caplog.text
    check(store)
