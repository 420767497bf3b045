"""Sealing beside dispatch: small parts become large ones, whatever fails, and no message changes."""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.dispatching import (
    FAST,
    PREFIX,
    Flaky,
    assert_equal,
    dispatching,
    filled,
    run_once,
)
from support.synthetic import SyntheticStore

from backends.errors import (
    AlreadyExistsError,
    BackendError,
    UnavailableError,
    UnknownOutcomeError,
)
from backends.local import LocalFolderStore
from backends.memory import MemoryStore
from backends.testing.faulty import READS, WRITES, Fault, FaultyStore, Rule
from backends.wrapping import WrappingStore
from tiered.errors import DataError, FencedError
from tiered.journal.reader import JournalReader
from tiered.log.seal import plan_seals
from tiered.log.state import TierMachine, TierState
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from backends.base import ByteRange, ObjectStore
    from tiered.dispatch.dispatcher import TieredDispatcher

ROLLING = replace(FAST, part_bytes=700, window_bytes=700, segment_bytes_max=4000, uploads_max=2)
UNSEALED = replace(ROLLING, small_part_bytes=0)
ONE_BIG = replace(UNSEALED, segment_bytes_max=1 << 30)


def state_of(store: ObjectStore) -> TierState:
    reader = JournalReader(store, PREFIX, TierMachine())
    reader.catch_up()
    return reader.state


def unsealed(store: ObjectStore) -> int:
    """Segments that have rolled and that the seal thread would merge."""
    return len(plan_seals(state_of(store), ROLLING.seal_policy))


@contextmanager
def following(dispatcher: TieredDispatcher) -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=dispatcher.follow, args=(done.is_set,))
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def until(condition: Callable[[], Any], dispatcher: TieredDispatcher, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert dispatcher.fault is None
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.01)


def rolled_tier(store: ObjectStore, each: int = 40) -> SyntheticStore:
    """Two queues with several rolled segments of small parts each, none of them merged."""
    local = filled(topics=1, queues=2, each=each)
    run_once(store, local, settings=UNSEALED)
    assert unsealed(store) >= 4
    return local


def assert_sound(store: ObjectStore) -> None:
    assert verify_tier(store, PREFIX, deep=True).problems == []


def data_keys(store: ObjectStore) -> set[str]:
    return {info.key for info in store.list(PREFIX + "queue/")}


def named_keys(store: ObjectStore) -> set[str]:
    lives = [life for row in state_of(store).queues.values() for life in row]
    places = [place for life in lives for part in life.parts() for place in (part.log, part.index)]
    return {PREFIX + place.key for place in places}


# -- what has rolled ----------------------------------------------------------------------------


def test_rolled_segments_are_merged_while_messages_are_followed():
    store, local = MemoryStore(), SyntheticStore()
    with dispatching(store, local, ROLLING) as dispatcher, following(dispatcher):
        for number in range(300):
            local.append("live", number % 3, b"x%d" % number * 20)
            if number % 10 == 0:
                time.sleep(0.01)
        until(lambda: sum(dispatcher.lag().values()) == 300, dispatcher)
        until(lambda: unsealed(store) == 0, dispatcher)
        for life in (row[-1] for row in state_of(store).queues.values()):
            assert len(life.segments) > 2
            assert {len(segment.parts) for segment in life.segments[:-1]} == {1}
            file = dispatcher.file(MessageQueue("live", 0))
            assert {len(s.places) for s in file.commit_log.segments[:-1]} == {1}
        counters = dispatcher.counters
        assert counters.sealed_segments == sum(
            len(row[-1].segments) - 1 for row in state_of(store).queues.values()
        )
        assert counters.merged_parts > counters.sealed_segments
        assert counters.rewritten_bytes > 0
    assert_equal(store, local)
    assert_sound(store)


def test_what_an_earlier_reign_has_left_is_found_and_sealed_once():
    store = MemoryStore()
    local = rolled_tier(store)
    rolled = unsealed(store)
    with dispatching(store, local, ROLLING, seed=2) as dispatcher:
        until(lambda: dispatcher.counters.sealed_segments == rolled, dispatcher)
    assert unsealed(store) == 0
    keys = data_keys(store)
    with dispatching(store, local, ROLLING, seed=3) as dispatcher:
        time.sleep(0.1)
        assert dispatcher.counters.sealed_segments == 0
    assert data_keys(store) == keys, "what was merged is never merged again"
    assert_equal(store, local)
    assert_sound(store)


def test_large_parts_are_not_rewritten():
    store = MemoryStore()
    local = rolled_tier(store)
    before = data_keys(store)
    with dispatching(store, local, replace(ROLLING, small_part_bytes=300), seed=2) as dispatcher:
        time.sleep(0.1)
        assert dispatcher.counters.sealed_segments == 0
    assert data_keys(store) == before


def test_no_request_is_made_while_there_is_nothing_to_seal():
    store = FaultyStore(MemoryStore(), random.Random(1))
    local = filled(topics=1, queues=2, each=5)
    run_once(store, local, settings=ROLLING)
    assert not [e for e in store.events if e.operation == "get" and "/queue/" in e.key]


# -- on request ---------------------------------------------------------------------------------


def test_all_is_sealed_on_request_and_what_comes_later_opens_a_new_segment():
    store, local = MemoryStore(), filled(topics=1, queues=2, each=40)
    with dispatching(store, local, ROLLING) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20)
        dispatcher.seal_all()
        lives = [row[-1] for row in state_of(store).queues.values()]
        assert all(len(s.parts) == 1 and s.sealed for life in lives for s in life.segments)
        assert dispatcher.seal_all() == 0
        for number in range(10):
            local.append("t0", number % 2, b"later %d" % number)
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
    for life in (row[-1] for row in state_of(store).queues.values()):
        assert not life.segments[-1].sealed
    assert_equal(store, local)
    assert_sound(store)


def test_a_queue_with_something_under_way_keeps_its_open_segment():
    store, local, go = MemoryStore(), filled(topics=1, queues=2, each=4), threading.Event()
    busy = MessageQueue("t0", 1)
    run_once(store, local, settings=ROLLING)
    local.append("t0", 1, b"under way")

    def decide(key: str) -> Exception | None:
        if "/commitlog/" in key and "/0000000001/" in key:
            go.wait(10)
        return None

    with dispatching(Flaky(store, decide), local, ROLLING, seed=2) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert not dispatcher.file(busy).is_settled
        dispatcher.seal_all()
        life = state_of(store).life(busy)
        assert life
        assert not life.segments[-1].sealed
        go.set()
        assert dispatcher.drain(20), dispatcher.fault
    assert_equal(store, local)
    assert_sound(store)


def test_sealing_on_request_reads_nothing_when_nothing_is_small():
    store = FaultyStore(MemoryStore(), random.Random(1))
    local = filled(topics=1, queues=2, each=40)
    run_once(store, local, settings=ONE_BIG)
    store.add(Rule(Fault.UNAVAILABLE, WRITES | READS, "/queue/", times=None))
    with dispatching(store, local, ONE_BIG, seed=2) as dispatcher:
        assert dispatcher.seal_all() == 2


def test_sealing_on_request_tries_a_few_times_and_then_says_why():
    store = FaultyStore(MemoryStore(), random.Random(1))
    local = filled(topics=1, queues=2, each=40)
    run_once(store, local, settings=ONE_BIG)
    store.add(Rule(Fault.UNAVAILABLE, key_part="/queue/", times=None))
    with dispatching(store, local, FAST, seed=6) as dispatcher, pytest.raises(UnavailableError):
        dispatcher.seal_all()
    store.heal()
    with dispatching(store, local, FAST, seed=7) as dispatcher:
        store.add(Rule(Fault.LOST_ANSWER, key_part="/queue/", times=2))
        assert dispatcher.seal_all() == 2
        assert dispatcher.counters.seals_failed == 2
    assert_equal(store, local)
    assert_sound(store)


def test_sealing_on_request_names_the_damage_and_seals_all_else():
    store, local = MemoryStore(), filled(topics=1, queues=2, each=40)
    run_once(store, local, settings=ONE_BIG)
    damage(store, MessageQueue("t0", 0))
    with dispatching(store, local, FAST, seed=2) as dispatcher:
        with pytest.raises(DataError):
            dispatcher.seal_all()
        assert dispatcher.fault is None
    sealed = {
        queue.queue_id: row[-1].segments[0].sealed for queue, row in state_of(store).queues.items()
    }
    assert sealed == {0: False, 1: True}


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        Rule(Fault.UNAVAILABLE, key_part="/commitlog/", times=4),
        Rule(Fault.UNAVAILABLE, key_part="/consumequeue/", times=4),
        Rule(Fault.LOST_ANSWER, key_part="/consumequeue/", times=4),
        Rule(Fault.LOST_REQUEST, key_part="/queue/", times=4),
        Rule(Fault.FULL, key_part="/queue/", times=4),
        Rule(Fault.UNAVAILABLE, READS, "/queue/", times=4),
        Rule(Fault.CUT, READS, "/queue/", times=4),
        Rule(Fault.DENIED, READS, "/queue/", times=4),
    ],
    ids=lambda rule: f"{rule.fault.name}-{rule.key_part.strip('/')}",
)
def test_what_the_store_could_not_do_is_tried_again_and_leaves_at_most_one_orphan_each(rule: Rule):
    inner = MemoryStore()
    local = rolled_tier(inner)
    parts, rolled = named_keys(inner), unsealed(inner)
    store = FaultyStore(inner, random.Random(1), replace(rule))
    with dispatching(store, local, ROLLING, seed=2) as dispatcher:
        until(lambda: dispatcher.counters.sealed_segments == rolled, dispatcher)
        if rule.fault is not Fault.CUT:  # a read that is cut short is read whole at once
            assert dispatcher.counters.seals_failed == 4
    made = data_keys(inner) - parts
    assert len(made - named_keys(inner)) <= 4
    assert_equal(inner, local)
    assert_sound(inner)


def damage(store: ObjectStore, queue: MessageQueue, *, gone: bool = False) -> str:
    """Spoil the second part's records."""
    life = state_of(store).life(queue)
    assert life
    key = PREFIX + life.segments[0].parts[1].log.key
    data = bytearray(store.get(key))
    store.delete(key)
    if not gone:
        data[10] ^= 1
        store.put_if_absent(key, bytes(data))
    return key


@pytest.mark.parametrize("gone", [False, True])
def test_a_damaged_part_leaves_its_segment_alone_and_is_said_once(
    gone: bool, caplog: pytest.LogCaptureFixture
):
    inner = MemoryStore()
    local = rolled_tier(inner)
    rolled = unsealed(inner)
    queue = MessageQueue("t0", 0)
    key = damage(inner, queue, gone=gone)
    before = state_of(inner).life(queue)
    store = FaultyStore(inner, random.Random(1))
    with (
        caplog.at_level(logging.WARNING, "tiered.dispatch"),
        dispatching(store, local, ROLLING, seed=2) as dispatcher,
    ):
        until(lambda: dispatcher.counters.sealed_segments == rolled - 1, dispatcher)
        until(lambda: dispatcher.counters.unsealable_segments == 1, dispatcher)
        for number in range(60):  # it rolls again, and is planned again
            local.append("t0", 0, b"later %d" % number * 20)
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        until(lambda: unsealed(inner) == 1, dispatcher)
        assert dispatcher.counters.unsealable_segments == 1
    after = state_of(inner).life(queue)
    assert before
    assert after
    assert after.segments[0] == before.segments[0]
    assert [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()] != []
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    assert len([e for e in store.events if e.key == key]) == 1


def test_a_clone_that_merges_stops():
    inner = MemoryStore()
    local = rolled_tier(inner)

    def decide(key: str) -> Exception | None:
        return AlreadyExistsError("ours") if "/queue/" in key else None

    with dispatching(Flaky(inner, decide), local, ROLLING, seed=2) as dispatcher:
        wait_for_fault(dispatcher)
        assert isinstance(dispatcher.fault, FencedError)
    assert_equal(inner, local)


def wait_for_fault(dispatcher: TieredDispatcher) -> None:
    deadline = time.monotonic() + 20
    while dispatcher.fault is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_permission_that_only_sealing_lacks_does_not_end_dispatch():
    inner = MemoryStore()
    local = rolled_tier(inner)
    store = FaultyStore(inner, random.Random(1), Rule(Fault.DENIED, READS, "/queue/", times=None))
    local.append("t0", 0, b"more")
    dispatcher = run_once(store, local, settings=ROLLING, seed=2)
    assert dispatcher.fault is None
    assert_equal(inner, local)


class Slow(WrappingStore):
    """Reads and writes of data objects take a while, and can be held up."""

    def __init__(self, inner: ObjectStore, seconds: float = 0.0) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.reads = 0
        self.begun = threading.Event()
        self.go = threading.Event()
        self.held = ""

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if "/queue/" in key:
            self.reads += 1
            self.begun.set()
            time.sleep(self.seconds)
        return super().get(key, byte_range)

    def put_if_absent(self, key: str, data: Sequence[Buffer] | Buffer) -> None:
        if self.held and self.held in key:
            self.begun.set()
            self.go.wait(20)
        super().put_if_absent(key, data)


def test_close_in_the_middle_is_prompt_and_leaves_the_segments_as_they_are():
    inner = MemoryStore()
    local = rolled_tier(inner)
    before = state_of(inner).queues
    store = Slow(inner, 0.5)  # so that merging a segment takes several seconds
    with dispatching(store, local, ROLLING, seed=2):
        assert store.begun.wait(10)
        begin, reads = time.monotonic(), store.reads
    assert time.monotonic() - begin < 3
    assert store.reads <= reads + 1
    assert state_of(inner).queues == before
    with dispatching(inner, local, ROLLING, seed=3) as dispatcher:
        until(lambda: unsealed(inner) == 0, dispatcher)
    assert_equal(inner, local)
    assert_sound(inner)


@pytest.mark.parametrize("held", ["/commitlog/", "/consumequeue/"])
def test_fenced_while_it_seals_changes_nothing(held: str):
    inner = MemoryStore()
    local = rolled_tier(inner)
    store = Slow(inner)
    store.held = held
    with dispatching(store, local, ROLLING, seed=2) as old:
        assert store.begun.wait(10)
        with dispatching(inner, local, ROLLING, seed=3) as new:
            until(lambda: unsealed(inner) == 0, new)
        before = state_of(inner).queues
        store.go.set()
        wait_for_fault(old)
        assert isinstance(old.fault, FencedError)
    assert state_of(inner).queues == before
    assert_equal(inner, local)
    assert_sound(inner)


def test_dispatch_does_not_wait_for_a_merge_that_hangs():
    inner = MemoryStore()
    local = rolled_tier(inner)
    store = Slow(inner)
    store.seconds = 1.0
    with dispatching(store, local, ROLLING, seed=2) as dispatcher:
        assert store.begun.wait(10)
        begin = time.monotonic()
        local.append("t0", 0, b"more")
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20), dispatcher.fault
        assert time.monotonic() - begin < 4, "merging a segment takes more than ten seconds"
        store.seconds = 0.0
    assert_equal(inner, local)


@pytest.mark.parametrize("seed", range(4))
def test_i1_i7_whatever_fails_while_it_follows_and_seals_no_message_changes(seed: int):
    inner, local, rng = MemoryStore(), SyntheticStore(), random.Random(seed)
    lock = threading.Lock()

    def decide(key: str) -> Exception | None:
        with lock:
            throw = rng.random()
        if "/queue/" not in key or throw > 0.2:
            return None
        return UnavailableError("no") if throw < 0.1 else UnknownOutcomeError("perhaps")

    store = FaultyStore(
        inner, random.Random(seed), Rule(Fault.UNAVAILABLE, READS, "/queue/", 0, None, 0.1)
    )
    with (
        dispatching(Flaky(store, decide), local, ROLLING, seed=seed) as dispatcher,
        following(dispatcher),
    ):
        for number in range(300):
            local.append("live", number % 3, b"x%d" % number * 20)
            if number % 50 == 0:
                with suppress(BackendError):
                    dispatcher.seal_all()
            time.sleep(0.001)
        until(lambda: sum(dispatcher.lag().values()) == 300, dispatcher)
        until(lambda: unsealed(inner) == 0, dispatcher)
        assert dispatcher.fault is None
        assert dispatcher.counters.sealed_segments > 0
    assert_equal(inner, local)
    assert_sound(inner)


def test_a_folder_with_many_rolls_is_sound_and_has_every_message(tmp_path: Path):
    local = SyntheticStore()
    store = LocalFolderStore(tmp_path / "tier")
    settings = replace(ROLLING, segment_bytes_max=2000, freshness_s=0.01)
    with dispatching(store, local, settings) as dispatcher, following(dispatcher):
        for number in range(400):
            local.append("live", number % 2, b"%d " % number * 10)
            time.sleep(0.002)
        until(lambda: sum(dispatcher.lag().values()) == 400, dispatcher)
        until(lambda: unsealed(store) == 0, dispatcher)
        assert dispatcher.counters.sealed_segments >= 10
    assert_equal(store, local)
    report = verify_tier(store, PREFIX, deep=True, local=local)
    assert (report.problems, report.checked_messages) == ([], 400)
    store.close()
