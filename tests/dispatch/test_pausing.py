"""A paused topic: nothing of it is taken, nothing of it is lost, and the others go on."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from support.dispatching import assert_equal, dispatching, read_back, run_once
from support.journals import PREFIX
from support.synthetic import SyntheticStore
from support.waiting import until

from backends.memory import MemoryStore
from tiered.clock import SystemClock
from tiered.dispatch import group_commit
from tiered.errors import FencedError
from tiered.journal.append import JournalWriter
from tiered.log.actions import Pause, action_of
from tiered.log.state import TierMachine
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectStore
    from tiered.dispatch.dispatcher import TieredDispatcher

PAUSED, OTHER = MessageQueue("paused", 0), MessageQueue("other", 0)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "LOOK_S", 0.02)


def guest(store: ObjectStore) -> JournalWriter:
    journal = JournalWriter(
        store, PREFIX, TierMachine(), writer="0000beef", clock=SystemClock(),
        rng=random.Random(1), stop=threading.Event(),
    )  # fmt: skip
    journal.catch_up()
    return journal


def say(store: ObjectStore, *, is_paused: bool, topic: str = PAUSED.topic) -> None:
    guest(store).append([action_of(Pause(topic, is_paused))])


@contextmanager
def following(store: MemoryStore, local: SyntheticStore) -> Iterator[TieredDispatcher]:
    end = threading.Event()
    with dispatching(store, local) as dispatcher:
        thread = threading.Thread(target=dispatcher.follow, args=(end.is_set,))
        thread.start()
        try:
            yield dispatcher
        finally:
            end.set()
            thread.join()
            assert dispatcher.fault is None
            assert dispatcher.drain(20)


def put(local: SyntheticStore, count: int, *queues: MessageQueue) -> None:
    for number in range(count):
        for queue in queues:
            local.append(*queue, b"%d" % number)


def test_a_running_dispatcher_obeys_and_takes_everything_when_the_topic_goes_on():
    store, local = MemoryStore(), SyntheticStore()
    put(local, 5, PAUSED, OTHER)
    with following(store, local) as dispatcher:
        until(lambda: dispatcher.lag() == {PAUSED: 5, OTHER: 5})
        say(store, is_paused=True)
        until(lambda: dispatcher._passed.paused)
        put(local, 50, PAUSED, OTHER)
        until(lambda: dispatcher.lag()[OTHER] == 55)
        assert dispatcher.lag()[PAUSED] == 5
        assert dispatcher.drain(20), "what waits of it is not in hand"
        dispatcher._commits.flush = False
        assert dispatcher.seconds_without_commit() == 0
        say(store, is_paused=False)
        until(lambda: dispatcher.lag()[PAUSED] == 55)  # nothing more comes to it
    assert_equal(store, local)


def test_who_begins_later_obeys_too_and_what_came_meanwhile_is_not_looked_at_twice():
    store, local = MemoryStore(), SyntheticStore()
    put(local, 5, PAUSED, OTHER)
    run_once(store, local)
    say(store, is_paused=True)
    put(local, 5, PAUSED, OTHER, MessageQueue("paused", 1))
    dispatcher = run_once(store, local)
    assert read_back(store, PAUSED)[0].keys() == set(range(5))
    assert dispatcher.counters.messages == 5
    say(store, is_paused=False)
    run_once(store, local)
    assert_equal(store, local)


def test_what_the_broker_expires_meanwhile_is_a_gap(caplog: pytest.LogCaptureFixture):
    store, local = MemoryStore(), SyntheticStore()
    put(local, 5, PAUSED, OTHER)
    with following(store, local) as dispatcher:
        until(lambda: dispatcher.lag() == {PAUSED: 5, OTHER: 5})
        say(store, is_paused=True)
        until(lambda: "paused is paused" in caplog.text)
        assert "will be a gap" in caplog.text
        put(local, 20, PAUSED)
        local.expire(*PAUSED, 12)
        put(local, 5, PAUSED, OTHER)
        until(lambda: dispatcher.lag()[OTHER] == 10)
        say(store, is_paused=False)
        until(lambda: dispatcher.lag()[PAUSED] == 30)
    messages, gaps = read_back(store, PAUSED)
    assert [(gap.start, gap.end) for gap in gaps] == [(5, 12)]
    assert messages.keys() == {*range(5), *range(12, 30)}
    assert messages.items() >= local.raw(PAUSED).items()


def test_a_topic_that_is_paused_and_resumed_all_the_time_loses_nothing():
    store, local = MemoryStore(), SyntheticStore()
    put(local, 1, PAUSED, OTHER)
    with following(store, local) as dispatcher:
        for number in range(30):
            say(store, is_paused=number % 2 == 0)
            put(local, 20, PAUSED, MessageQueue("paused", number % 3), OTHER)
        say(store, is_paused=False)
        until(lambda: all(dispatcher.lag().get(q) == b.end for q, b in local.queues().items()))
    assert_equal(store, local)


def test_who_only_looks_learns_that_another_has_taken_over():
    store, local = MemoryStore(), SyntheticStore()
    put(local, 1, OTHER)
    with dispatching(store, local) as dispatcher:
        guest(store).take_epoch({})
        until(lambda: dispatcher.fault is not None)
        assert isinstance(dispatcher.fault, FencedError)


def test_a_look_is_a_request_where_nothing_has_come():
    store = MemoryStore()
    writer = guest(store)
    writer.take_epoch({})
    say(store, is_paused=True)
    before = writer.number
    writer.look()
    assert (writer.number, writer.state.paused_topics) == (before + 1, {PAUSED.topic})
    writer.look()
    assert writer.number == before + 1
    writer.append([action_of(Pause(PAUSED.topic, is_paused=False))])
    assert writer.state.paused == ()
