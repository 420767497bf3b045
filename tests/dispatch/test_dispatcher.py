"""The dispatcher over a local store in memory: nothing lost, nothing doubled, in order."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.dispatching import (
    FAST,
    PREFIX,
    Flaky,
    assert_equal,
    dispatching,
    filled,
    read_back,
    run_once,
)
from support.synthetic import SyntheticStore

from backends.errors import (
    AlreadyExistsError,
    PermissionDeniedError,
    UnavailableError,
    UnknownOutcomeError,
)
from backends.memory import MemoryStore
from backends.testing.faulty import Fault, FaultyStore, Rule
from backends.wrapping import WrappingStore
from tiered.errors import FencedError, StoreUnavailableError
from tiered.journal.replay import JournalReader
from tiered.local.interface import RecordBatch
from tiered.log.reader import TierReader
from tiered.log.state import TierMachine
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectInfo


def is_bundle(key: str) -> bool:
    return "/bundle/" in key or "/queue/" in key


def test_everything_committed_is_read_back_byte_for_byte():
    store, local = MemoryStore(), filled()
    dispatcher = run_once(store, local)
    assert_equal(store, local)
    assert dispatcher.budget.used_bytes == 0
    assert dispatcher.counters.messages == 360


def test_a_restart_goes_on_at_the_tiers_own_commit_offset():
    store, local = MemoryStore(), filled(each=20)
    run_once(store, local)
    for number in range(50):
        local.append("t0", number % 3, b"later %d" % number)
    second = run_once(store, local, seed=2)
    assert second.counters.messages == 50
    assert_equal(store, local)


def test_slow_queues_cost_one_commit_per_round_and_idle_ones_nothing():
    store, local = MemoryStore(), filled(topics=1, queues=10, each=1)
    dispatcher = run_once(store, local)
    assert dispatcher.counters.parts == 10
    again = run_once(store, local, seed=3)
    assert again.counters.parts == 0


def test_one_entry_names_all_sections_of_a_bundle():
    """Whatever the number of queues; an entry a queue would cost two requests each."""
    store, local = MemoryStore(), filled(topics=2, queues=50, each=4)
    run_once(store, local, settings=replace(FAST, uploads_max=1, bundle_bytes=65536))
    journal = JournalReader(store, PREFIX, TierMachine())
    entries = [journal.read_entry(number) for number in journal.behind(0)[0]]
    actions = [a for found in entries if found for a in found[0].actions if a["do"] == "part"]
    named = [row[0] for action in actions for row in action["bundles"]]
    assert len(named) == len(set(named)) < 50
    assert_equal(store, local)


def test_a_following_dispatcher_takes_what_comes_later():
    store, local = MemoryStore(), SyntheticStore()
    done = threading.Event()
    with dispatching(store, local) as dispatcher:
        thread = threading.Thread(target=dispatcher.follow, args=(done.is_set,))
        thread.start()
        for number in range(300):
            local.append("live", number % 4, b"x%d" % number)
        while sum(dispatcher.lag().values()) < 300 and dispatcher.fault is None:
            done.wait(0.01)
        done.set()
        thread.join()
    assert_equal(store, local)


@pytest.mark.parametrize("seed", range(8))
def test_failed_and_unknown_uploads_switch_files_and_lose_or_double_nothing(seed: int):
    local, rng, lock = filled(each=40), random.Random(seed), threading.Lock()

    def decide(key: str) -> Exception | None:
        with lock:
            throw = rng.random()
        if throw < 0.15:
            return UnavailableError("no")
        return UnknownOutcomeError("perhaps") if throw < 0.3 else None

    inner = MemoryStore()
    small = replace(FAST, bundle_bytes=1024)
    dispatcher = run_once(Flaky(inner, decide), local, settings=small)
    assert dispatcher.counters.switches > 0
    assert_equal(inner, local)
    assert dispatcher.budget.used_bytes == 0


def test_hundred_switches_in_a_row_create_no_objects_beyond_the_tries():
    local = filled(topics=1, queues=1, each=5)
    tries = []

    def decide(key: str) -> Exception | None:
        if not is_bundle(key):
            return None
        tries.append(key)
        return UnavailableError("no") if len(tries) <= 100 else None

    inner = MemoryStore()
    run_once(Flaky(inner, decide), local)
    assert len(set(tries)) == len(tries) == 101
    assert len([i for i in inner.list("") if is_bundle(i.key)]) == 1
    assert_equal(inner, local)


def test_a_refusal_ends_the_dispatcher_and_says_so():
    local = filled(each=2)
    with dispatching(
        Flaky(
            MemoryStore(),
            lambda key: PermissionDeniedError("no") if is_bundle(key) else None,
        ),
        local,
    ) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert not dispatcher.drain(5)
        assert isinstance(dispatcher.fault, StoreUnavailableError)


def test_a_newer_epoch_fences_the_dispatcher():
    store, local = MemoryStore(), filled(each=2)
    with dispatching(store, local) as old:
        with dispatching(store, local, seed=9):
            pass
        old.follow(lambda: False, until_idle=True)
        assert not old.drain(5)
        assert isinstance(old.fault, FencedError)


def test_memory_stays_bounded_while_the_store_does_not_answer():
    local, down = filled(each=200), threading.Event()
    down.set()
    store = Flaky(
        MemoryStore(),
        lambda key: UnavailableError("down") if down.is_set() and is_bundle(key) else None,
    )
    stop = threading.Event()
    with dispatching(store, local) as dispatcher:
        thread = threading.Thread(
            target=dispatcher.follow, args=(stop.is_set,), kwargs={"until_idle": True}
        )
        thread.start()
        stop.wait(0.5)
        assert dispatcher.budget.peak_bytes <= FAST.buffer_bytes_max + FAST.window_bytes
        down.clear()
        thread.join(60)
        assert dispatcher.drain(60), dispatcher.fault
    assert_equal(store, local)


def test_local_retention_that_overtakes_dispatch_leaves_a_recorded_gap():
    store, local = MemoryStore(), filled(topics=1, queues=1, each=30)
    run_once(store, local)
    before = local.raw(MessageQueue("t0", 0))
    for number in range(40):
        local.append("t0", 0, b"more %d" % number)
    local.expire("t0", 0, 50)
    with dispatching(store, local, seed=4) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    messages, gaps = read_back(store, MessageQueue("t0", 0))
    assert [(gap.start, gap.end) for gap in gaps] == [(30, 50)]
    assert messages == before | local.raw(MessageQueue("t0", 0))


def test_a_busy_queue_is_left_to_compensation_and_dispatch_never_waits():
    store, local = MemoryStore(), filled(topics=1, queues=2, each=30)
    with dispatching(store, local) as dispatcher:
        file = dispatcher.file(MessageQueue("t0", 0))
        with file.lock:
            dispatcher.follow(lambda: False, until_idle=True)
            assert dispatcher.counters.lock_misses > 0
        assert dispatcher.drain(20), dispatcher.fault
        assert dispatcher.counters.compensated > 0
    assert_equal(store, local)


def test_unselected_topics_are_not_touched():
    store, local = MemoryStore(), filled(each=3)
    run_once(store, local, selects=lambda queue: queue.topic == "t1")
    reader = TierReader(store, PREFIX)
    reader.refresh()
    assert {queue.topic for queue in reader.state.queues} == {"t1"}


def test_a_queue_that_has_nothing_to_take_is_known_with_its_bounds():
    store, local = MemoryStore(), filled(topics=1, queues=1, each=5)
    local.expire("t0", 0, 5)
    run_once(store, local)
    reader = TierReader(store, PREFIX)
    reader.refresh()
    incarnation = reader.state.incarnation(MessageQueue("t0", 0))
    assert (incarnation.min_offset, incarnation.commit_offset, incarnation.segments) == (5, 5, ())
    local.append("t0", 0, b"later")
    run_once(store, local, seed=2)
    assert_equal(store, local)


def test_a_buffer_of_nothing_but_holes_is_uploaded():
    store, local = MemoryStore(), SyntheticStore()
    queue = MessageQueue("t", 0)
    local.append("t", 0, b"")
    hole = RecordBatch(
        queue=queue,
        base_offset=QueueOffset(0),
        data=b"",
        positions=np.zeros(1, np.int64),
        sizes=np.zeros(1, np.int32),
        tag_codes=np.ones(1, np.int64),
        store_timestamps_ms=np.full(1, -1, np.int64),
        physical_offsets=np.full(1, -1, np.int64),
    )
    with dispatching(store, local) as dispatcher:
        assert dispatcher.dispatch(hole)
        assert dispatcher.drain(10), dispatcher.fault
        assert dispatcher.lag()[queue] == 1


def test_a_process_that_was_cloned_stops():
    local = filled(each=2)
    with dispatching(
        Flaky(
            MemoryStore(),
            lambda key: AlreadyExistsError("ours") if is_bundle(key) else None,
        ),
        local,
    ) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert not dispatcher.drain(5)
        assert isinstance(dispatcher.fault, FencedError)


def test_a_clone_that_was_faster_with_other_bytes_stops_us():
    local, store = filled(each=2), MemoryStore()

    class Cloned(WrappingStore):
        def put_if_absent(self, key: str, data: Any) -> None:
            if is_bundle(key):
                self.inner.put_if_absent(key, b"".join(data)[:-1] + b"?")
            self.inner.put_if_absent(key, data)

    with dispatching(Cloned(store), local) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert not dispatcher.drain(5)
        assert isinstance(dispatcher.fault, FencedError)


def test_a_bundle_that_was_put_twice_on_its_way_is_ours():
    local, store = filled(each=2), MemoryStore()
    twice = FaultyStore(store, random.Random(0), Rule(Fault.TWICE, times=None))
    with dispatching(twice, local) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    assert_equal(store, local)


def test_a_batch_polled_before_the_expiry_does_not_slip_in_before_the_gap():
    store, local, reached, go = (
        MemoryStore(),
        filled(1, 1, 30),
        threading.Event(),
        threading.Event(),
    )
    run_once(store, local)
    for number in range(40):
        local.append("t0", 0, b"more %d" % number)
    queue = MessageQueue("t0", 0)
    late = local.read(queue, 30, bytes_max=1 << 20, count_max=5)
    assert late is not None
    local.expire("t0", 0, 50)

    def decide(key: str) -> Exception | None:
        if "/journal/" in key and not key.endswith("checkpoint") and reached.is_set():
            go.wait(5)
        return None

    with dispatching(Flaky(store, decide), local, seed=4) as dispatcher:
        reached.set()
        dispatcher.follow(lambda: False, until_idle=True)
        threading.Event().wait(0.2)
        dispatcher.dispatch(late)
        go.set()
        assert dispatcher.drain(20), dispatcher.fault
    messages, gaps = read_back(store, queue)
    assert [(gap.start, gap.end) for gap in gaps] == [(30, 50)]
    assert set(messages) == {*range(30), *range(50, 70)}


@pytest.mark.parametrize("end", [40, 50, 60])
def test_a_batch_taken_while_compensation_looks_at_an_expired_queue_makes_no_backward_gap(
    end: int, monkeypatch: pytest.MonkeyPatch
):
    """What was polled before the expiry is committed between the read that finds a gap and its record."""
    store, local, queue = MemoryStore(), SyntheticStore(), MessageQueue("t0", 0)
    for number in range(70):
        local.append("t0", 0, b"%d" % number)
    first = local.read(queue, 0, bytes_max=1 << 20, count_max=30)
    polled = local.read(queue, 30, bytes_max=1 << 20, count_max=end - 30)
    assert first is not None
    assert polled is not None
    read = local.read
    with dispatching(store, local) as dispatcher:
        dispatcher.dispatch(first)
        assert dispatcher.drain(20)
        local.expire("t0", 0, 50)
        taken = threading.Event()

        def read_and_meanwhile(
            queue: MessageQueue, start: int, **limits: int
        ) -> RecordBatch | None:
            found = read(queue, start, **limits)
            if start == 30 and not taken.is_set():
                taken.set()
                dispatcher.dispatch(polled)
                file = dispatcher.file(queue)
                while file.commit_offset < end and dispatcher.fault is None:
                    threading.Event().wait(0.001)
            return found

        monkeypatch.setattr(local, "read", read_and_meanwhile)
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        assert taken.is_set()
    messages, gaps = read_back(store, queue)
    assert [(gap.start, gap.end) for gap in gaps] == ([(40, 50)] if end < 50 else [])
    assert set(messages) == {*range(end), *range(50, 70)}


def test_the_log_tells_when_uploads_go_on_and_nothing_can_be_committed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Listings fail, as behind each entry; uploads of data go well all the time."""

    class Unlisted(WrappingStore):
        fails = False

        def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
            if self.fails:
                raise UnavailableError("no list today")
            yield from super().list(prefix, start_after=start_after)

    monkeypatch.setattr("tiered.dispatch.dispatcher._STALL_S_MIN", 0.2)
    store, local = Unlisted(MemoryStore()), filled(each=5)
    with dispatching(store, local) as dispatcher:
        store.fails = True
        dispatcher.follow(lambda: "nothing could be committed for" in caplog.text)
        assert dispatcher.is_stalled
        store.fails = False
        assert dispatcher.drain(30)
        assert not dispatcher.is_stalled
