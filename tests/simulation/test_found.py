"""What the simulation has found, each in its smallest form."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.dispatching import dispatching, read_back, run_once
from support.synthetic import SyntheticStore, _Queue
from support.waiting import until

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.clock import ManualClock
from tiered.journal.append import JournalWriter
from tiered.keys import JOURNAL
from tiered.log.divergence import fingerprints_to_witness
from tiered.log.expiry import plan_expiry
from tiered.log.history import TierHistory
from tiered.log.reader import TierReader
from tiered.log.state import TierMachine
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backends.base import ObjectInfo
    from tiered.local.interface import RecordBatch

PREFIX = "00000000_c/b/"


class BeforeListing(WrappingStore):
    """Calls something before a listing."""

    def __init__(self, inner: MemoryStore, before: Callable[[], None]) -> None:
        super().__init__(inner)
        self.before = before

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self.before()
        return super().list(prefix, start_after=start_after)


def test_an_entry_that_comes_between_two_looks_of_gc_is_not_taken_for_a_missing_one():
    clock = ManualClock()
    memory = MemoryStore(now_ms=clock.now_ms)
    writer = JournalWriter(
        memory, PREFIX, TierMachine(), writer="0badcafe", clock=clock, rng=random.Random(1),
        stop=threading.Event(),
    )  # fmt: skip
    writer.take_epoch({})
    left = 2

    def append() -> None:
        nonlocal left
        if left:
            left -= 1
            writer.append([{"do": "meta", "store": {"n": left}}])

    journal = [*memory.list(PREFIX + JOURNAL)]
    history = TierHistory(BeforeListing(memory, append), PREFIX, journal, clock.now_ms())
    assert history.number == writer.number == 3


class AlwaysHeld:
    """A queue's lock that somebody else holds whenever one looks; who waits gets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def locked(self) -> bool:
        return True

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_the_last_patrol_waits_for_a_queue_whose_lock_is_held():
    """A run with ``--once`` passed a queue over that the broker had made shorter, and called it complete."""
    store, local, queue = MemoryStore(), SyntheticStore(), MessageQueue("t", 0)
    for number in range(60):
        local.append("t", 0, b"old %d" % number)
    run_once(store, local)
    local.cut("t", 0, 31)
    for number in range(10):
        local.append("t", 0, b"new %d" % number)
    with dispatching(store, local, seed=2) as dispatcher:
        dispatcher.file(queue).lock = AlwaysHeld()  # type: ignore[assignment]
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    assert dispatcher.counters.truncated == 1


@pytest.mark.parametrize("again", [1, 4, 5, 9])
def test_a_topic_made_anew_before_anything_of_it_was_taken_begins_anew(again: int):
    """Its first messages were missing in silence: the queue went on where the old one was to begin."""
    store, local, queue = MemoryStore(), emptied(5), MessageQueue("t", 0)
    run_once(store, local)
    make_anew(local, again)
    assert run_once(store, local, seed=2).counters.begun_anew == 1
    assert read_back(store, queue) == (local.raw(queue), [])


@pytest.mark.parametrize("again", [1, 4, 5, 9])
def test_a_topic_made_anew_before_the_journal_knew_it_begins_where_it_begins(again: int):
    store, local, queue = MemoryStore(), emptied(5), MessageQueue("t", 0)
    with dispatching(store, local) as dispatcher:
        assert dispatcher.file(queue).append_offset == 5
        make_anew(local, again)
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    assert read_back(store, queue) == (local.raw(queue), [])


def test_a_topic_made_anew_after_all_of_it_had_expired_begins_anew():
    store, local, queue = MemoryStore(), SyntheticStore(), MessageQueue("t", 0)
    for number in range(9):
        local.append("t", 0, b"old %d" % number)
    with dispatching(store, local) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        dispatcher.seal_all(lambda: False)
    expire_all(store)
    make_anew(local, 4)
    assert run_once(store, local, seed=2).counters.begun_anew == 1
    assert read_back(store, queue) == (local.raw(queue), [])


def test_a_queue_whose_damaged_records_have_expired_goes_on_where_it_was():
    """Damaged records have no bytes in the tier's log, so it was taken for a queue of which nothing was ever tiered, and
    began anew. (Seed 293 of its day.)"""
    store, local, queue = MemoryStore(), SyntheticStore(), MessageQueue("t", 0)
    for _ in range(2):
        local.append("t", 0, b"damaged", is_damaged=True)
    with dispatching(store, local) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        dispatcher.seal_all(lambda: False)
    expire_all(store)
    for _ in range(3):
        local.append("t", 0, b"good")
    assert run_once(store, local, seed=2).counters.begun_anew == 0
    good = {offset: raw for offset, raw in local.raw(queue).items() if raw}
    assert read_back(store, queue) == (good, [])


class Racing(SyntheticStore):
    """Calls something once, behind a read in bulk."""

    meanwhile: Callable[[], object] | None = None

    def read(
        self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        batch = super().read(queue, start, bytes_max=bytes_max, count_max=count_max)
        if count_max > 1 and self.meanwhile:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return batch


def test_what_is_read_in_bulk_is_not_taken_behind_what_has_come_meanwhile():
    """A tail was lost between a poll and its dispatch, and compensation read what came instead: a record that the
    broker had truncated stayed in the tier, in front of what it has now."""
    store, local, queue = MemoryStore(), Racing(), MessageQueue("t", 0)
    for number in range(12):
        local.append("t", 0, b"old %d" % number)
    run_once(store, local)
    local.append("t", 0, b"polled")
    polled = local.read(queue, 12, bytes_max=100, count_max=1)
    assert polled is not None
    local.cut("t", 0, 12)
    for number in range(4):
        local.append("t", 0, b"new %d" % number)
    with dispatching(store, local, seed=2) as dispatcher:
        taken = threading.Event()
        local.meanwhile = lambda: dispatcher.dispatch(polled) and taken.set()
        dispatcher._leave(queue)
        assert taken.wait(20)
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    assert read_back(store, queue) == (local.raw(queue), [])


def test_what_was_read_in_bulk_is_looked_at_behind_the_taking():
    """The tail was lost from the very first record on that had been read, and other messages came, before it was taken: the
    record before it was still the same. (Seed 6010 of its day.)"""
    store, local, queue = MemoryStore(), Racing(), MessageQueue("t", 0)
    for number in range(10):
        local.append("t", 0, b"old %d" % number)
    run_once(store, local)
    local.append("t", 0, b"lost")
    with dispatching(store, local, seed=2) as dispatcher:
        local.meanwhile = lambda: local.cut("t", 0, 10) or local.append("t", 0, b"new")  # type: ignore[func-returns-value]
        dispatcher._leave(queue)
        until(lambda: dispatcher.counters.truncated == 1)
        assert dispatcher.drain(20), dispatcher.fault
    assert read_back(store, queue) == (local.raw(queue), [])


def test_what_compensation_took_ahead_of_the_follower_is_held_against_what_the_follower_meets():
    """Compensation had taken records that the follower never met, since the broker took them back and wrote others: for
    the follower no offset fell, and what came behind them hid them for good. (Seed 6454.)"""
    store, local, queue = MemoryStore(), SyntheticStore(), MessageQueue("t", 0)
    for number in range(12):
        local.append("t", 0, b"old %d" % number)
    ahead = local.read(queue, 0, bytes_max=1 << 20, count_max=100)
    assert ahead is not None
    with dispatching(store, local, seed=2) as dispatcher:
        assert dispatcher.dispatch(
            ahead
        )  # as compensation does, while the follower has met nothing
        local.cut("t", 0, 8)
        for number in range(9):
            local.append("t", 0, b"new %d" % number)
        met = local.read(queue, 0, bytes_max=1 << 20, count_max=100)
        assert met is not None
        assert not dispatcher.dispatch(met)
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    assert read_back(store, queue) == (local.raw(queue), [])


def test_what_was_taken_ahead_of_the_follower_up_to_a_damaged_record_is_held_against_what_it_meets():
    """A damaged record is like any other, so what the follower met was taken behind records that the broker had taken
    back. (Seed 1058 of its day.)"""
    store, local, queue = MemoryStore(), SyntheticStore(), MessageQueue("t", 0)
    fill(local, b"old %d", 12)
    ahead = local.read(queue, 0, bytes_max=1 << 20, count_max=100)
    assert ahead is not None
    with dispatching(store, local, seed=2) as dispatcher:
        assert dispatcher.dispatch(ahead)
        local.cut("t", 0, 8)
        fill(local, b"new %d", 9)
        met = local.read(queue, 0, bytes_max=1 << 20, count_max=100)
        assert met is not None
        assert not dispatcher.dispatch(met)
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    assert read_back(store, queue) == (local.raw(queue), [])


def test_what_was_compared_with_a_store_that_changed_meanwhile_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
):
    """A tail was lost and written anew where the tier has holes; while that was decided, all of the queue was lost for a
    while. When it was there again it was taken for what had been compared. (Seed 3364 of its day.)"""
    store, local, queue = MemoryStore(), SyntheticStore(), MessageQueue("t", 0)
    for number in range(4):
        local.append("t", 0, b"old %d" % number, is_damaged=number >= 2)
    run_once(store, local)
    local.cut("t", 0, 2)
    for number in range(4):
        local.append("t", 0, b"new %d" % number)
    lost: list[_Queue] = []

    def loses(*arguments: Any) -> tuple[int, ...]:
        found = fingerprints_to_witness(*arguments)
        lost.append(local._queues[queue].cut(0))
        return found

    with dispatching(store, local, seed=2) as dispatcher:
        with monkeypatch.context() as patched:
            patched.setattr("tiered.dispatch.continuity.fingerprints_to_witness", loses)
            dispatcher.follow(lambda: False, until_idle=True)
            assert dispatcher.drain(20), dispatcher.fault
        for one in lost:
            local._queues[queue].regain(one)
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    assert lost
    assert read_back(store, queue) == (local.raw(queue), [])


def fill(local: SyntheticStore, body: bytes, count: int) -> None:
    """Messages, of which the one at queue offset 11 is damaged."""
    for number in range(count):
        bounds = local.queues().get(MessageQueue("t", 0))
        local.append("t", 0, body % number, is_damaged=bool(bounds and bounds.end == 11))


class Passing(SyntheticStore):
    """A tail is lost that the follower has passed and nobody has taken; then other messages come, below where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False

    def read(
        self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        if start == 17 and count_max > 1 and not self.is_cut:
            self.is_cut = True
            self._queues[queue].cut(17)
            self._log = [
                (name, offset, _Queue(0) if offset >= 17 else row)
                for name, offset, row in self._log
            ]
        return super().read(queue, start, bytes_max=bytes_max, count_max=count_max)


def test_what_comes_below_where_the_follower_stands_is_tiered_though_nothing_can_be_compared():
    """The follower had given records that were left to compensation, since a gap was to be recorded before them. The broker
    took them back, and what came instead was passed over until the queue had grown beyond them. (Seed 4058 of its day.)"""
    store, local, queue = MemoryStore(), Passing(), MessageQueue("t", 0)
    for number in range(15):
        local.append("t", 0, b"old %d" % number)
    run_once(store, local)
    for number in range(8):
        local.append("t", 0, b"lost %d" % number)
    local.expire("t", 0, 17)
    with dispatching(store, local, seed=2) as dispatcher:
        deadline_s, has_grown = time.monotonic() + 120, False

        def stop() -> bool:
            nonlocal has_grown
            if local.is_cut and not has_grown and dispatcher.is_settled:
                has_grown = True
                local.append("t", 0, b"new 17")
                local.append("t", 0, b"new 18")
            return time.monotonic() > deadline_s or dispatcher.lag().get(queue) == 19

        dispatcher.follow(stop)
        assert dispatcher.fault is None
        assert dispatcher.lag()[queue] == 19
    assert [*read_back(store, queue)[0]] == [*range(15), 17, 18]


def test_a_queue_made_anew_before_anything_was_taken_begins_anew_though_no_offset_fell():
    """It was empty, and registered with where it would begin; the follower had never met it. (Seed 47456.)"""
    store, local, queue = MemoryStore(), emptied(2), MessageQueue("t", 0)
    with dispatching(store, local, seed=2) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        make_anew(local, 5)
        for start, count in ((0, 1), (1, 2), (3, 2)):
            batch = local.read(queue, start, bytes_max=1 << 20, count_max=count)
            assert batch is not None
            assert not dispatcher.dispatch(batch)
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    assert read_back(store, queue) == (local.raw(queue), [])


@pytest.mark.parametrize("lost", [0, 2])
def test_a_queue_that_ended_in_a_hole_and_has_expired_goes_on_while_the_writer_runs(lost: int):
    """What was taken last could not be compared, and the tier had nothing left: the queue was suspect for ever, and nothing
    of it was tiered until a restart. A message in the place of the hole may come with others. (Seed 301765.)"""
    store, local, queue = MemoryStore(), SyntheticStore(), MessageQueue("t", 0)
    for number in range(6):
        local.append("t", 0, b"old %d" % number, is_damaged=number == 5)
    with dispatching(store, local) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        dispatcher.seal_all(lambda: False)
        expire_all(store)
        local.append("other", 0, b"so that the writer learns of it")
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        local.cut("t", 0, 6 - lost)
        for number in range(8):
            local.append("t", 0, b"new %d" % number)
        dispatcher.continuity._vouched.clear()  # as when it was not looked at before it expired
        dispatcher.continuity.reopen([queue])
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    assert dispatcher.counters.begun_anew == (lost > 0)
    first = 0 if lost else 6
    wanted = {offset: raw for offset, raw in local.raw(queue).items() if offset >= first}
    assert read_back(store, queue) == (wanted, [])


def emptied(count: int) -> SyntheticStore:
    """A queue of which retention has taken all."""
    local = SyntheticStore()
    for number in range(count):
        local.append("t", 0, b"gone %d" % number)
    local.expire("t", 0, count)
    return local


def expire_all(store: MemoryStore) -> None:
    """Somebody gives up all that is sealed."""
    clock = ManualClock(1 << 41)
    steps, _ = plan_expiry(tier(store).state, clock.now_ms(), lambda _topic: 1, objects_max=100)
    assert steps
    writer = JournalWriter(
        store, PREFIX, TierMachine(), writer="0badcafe", clock=clock, rng=random.Random(1),
        stop=threading.Event(),
    )  # fmt: skip
    writer.catch_up()
    writer.append([step.action() for step in steps])


def make_anew(local: SyntheticStore, count: int) -> None:
    local.delete("t", 0)
    for number in range(count):
        local.append("t", 0, b"new %d" % number)


def tier(store: MemoryStore) -> TierReader:
    reader = TierReader(store, PREFIX)
    reader.refresh()
    return reader
