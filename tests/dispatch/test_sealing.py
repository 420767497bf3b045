"""Segments that are full or old are sealed, whether or not anything comes behind them."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from support.dispatching import FAST, assert_equal, dispatching, filled
from support.journals import PREFIX
from support.synthetic import SyntheticStore
from support.waiting import until

from backends.memory import MemoryStore
from tiered.log.reader import TierReader
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.dispatch.settings import DispatchSettings

QUEUE = MessageQueue("quiet", 0)


def sealed_of(store: ObjectStore, queue: MessageQueue) -> list[bool]:
    reader = TierReader(store, PREFIX)
    reader.refresh()
    return [one.sealed for one in reader.state.queues[queue][-1].segments]


def follow_beside(local: SyntheticStore, settings: DispatchSettings, store: MemoryStore) -> None:
    """One message, quiet until its segment is sealed; then another, which goes into a segment of its own."""
    local.append(*QUEUE, b"first")
    end = threading.Event()
    with dispatching(store, local, settings) as dispatcher:
        thread = threading.Thread(target=dispatcher.follow, args=(end.is_set,))
        thread.start()
        try:
            until(lambda: dispatcher.lag().get(QUEUE) == 1)
            until(lambda: sealed_of(store, QUEUE) == [True])
            local.append(*QUEUE, b"second")
            until(lambda: dispatcher.lag()[QUEUE] == 2)
        finally:
            end.set()
            thread.join()
        assert dispatcher.counters.sealed_segments >= 1
        assert dispatcher.fault is None


def test_a_quiet_topic_is_sealed_at_its_age():
    store, local = MemoryStore(), SyntheticStore()
    follow_beside(local, replace(FAST, segment_age_s_max=0.2), store)
    assert len(sealed_of(store, QUEUE)) == 2
    assert_equal(store, local)


def test_a_quiet_topic_is_sealed_when_it_is_full():
    store, local = MemoryStore(), SyntheticStore()
    settings = replace(FAST, segment_bytes_max=1, segment_age_s_max=3600.0)
    local.append(*QUEUE, b"first")
    with dispatching(store, local, settings) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20)
        assert sealed_of(store, QUEUE) == [False], "who begins looks first, and then once a while"
    with dispatching(store, local, settings):
        until(lambda: sealed_of(store, QUEUE) == [True])


def test_a_young_segment_is_left_open_and_a_look_tells_the_journal_nothing():
    store, local = MemoryStore(), filled()
    with dispatching(store, local, replace(FAST, segment_age_s_max=3600.0)) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20)
        before = dispatcher.counters.rounds
        for _ in range(3):
            dispatcher.seal_done()
        assert dispatcher.drain(20)
        assert dispatcher.counters.rounds == before
        assert dispatcher.counters.sealed_segments == 0


def test_nothing_is_sealed_again_before_the_journal_says_so():
    """While the store does not answer, seals do not pile up."""
    store, local = MemoryStore(), SyntheticStore()
    local.append(*QUEUE, b"first")
    with dispatching(store, local, replace(FAST, segment_age_s_max=3600.0)) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20)
        told: list[object] = []
        dispatcher.say = told.append  # what is told is never done
        dispatcher._settings = replace(FAST, segment_age_s_max=1e-6)
        for _ in range(100):
            dispatcher._seal_again_s = 0.0  # it is always time for a look
            dispatcher.seal_done()
        assert len(told) == 1
