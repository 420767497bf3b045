"""Settings that change while a dispatcher runs: topics, rates, ages, compression."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from support.dispatching import FAST, assert_equal, dispatching
from support.synthetic import SyntheticStore
from support.waiting import until

from backends.memory import MemoryStore
from tiered.clock import ManualClock
from tiered.dispatch.settings import CHANGEABLE, Compression, Throttle
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from tiered.dispatch.settings import DispatchSettings

ONE, TWO = MessageQueue("one", 0), MessageQueue("two", 0)


def put(local: SyntheticStore, count: int, *queues: MessageQueue) -> None:
    for number in range(count):
        for queue in queues:
            local.append(*queue, b"%d" % number)


def test_topics_come_and_go_and_nothing_is_lost():
    store, local, end = MemoryStore(), SyntheticStore(), threading.Event()
    put(local, 5, ONE, TWO)
    with dispatching(store, local, selects=lambda queue: queue == ONE) as dispatcher:
        thread = threading.Thread(target=dispatcher.follow, args=(end.is_set,))
        thread.start()
        try:
            until(lambda: dispatcher.lag() == {ONE: 5})
            dispatcher.reconfigure(FAST, lambda queue: queue == TWO)
            put(local, 5, ONE)
            until(lambda: dispatcher.lag().get(TWO) == 5)  # nothing more comes to it
            assert dispatcher.drain(20)
            assert dispatcher.lag()[ONE] == 5
            dispatcher._commits.flush = False
            assert dispatcher.seal_all(lambda: False) == 2, "of one that is left out, too"
            paused = replace(FAST, pauses=lambda topic: topic == "two")
            dispatcher.reconfigure(paused, lambda _queue: True)
            put(local, 5, TWO)
            until(lambda: dispatcher.lag()[ONE] == 10)
            assert dispatcher.lag()[TWO] == 5
            dispatcher.reconfigure(FAST, lambda _queue: True)
            until(lambda: dispatcher.lag()[TWO] == 10)
        finally:
            end.set()
            thread.join()
        assert dispatcher.drain(20), dispatcher.fault
    assert_equal(store, local)


def changed(settings: DispatchSettings) -> DispatchSettings:
    return replace(
        settings, freshness_s=7.0, segment_bytes_max=77, segment_age_s_max=777.0, read_rate_bytes_s=7,
        upload_rate_bytes_s=70, rate_of=len, compression=None, uploads_max=1, bundle_bytes=1,
        compression_of=lambda topic: Compression(9) if topic == "two" else None,
    )  # fmt: skip


def test_what_can_change_reaches_all_who_act_by_it_and_the_rest_stays():
    with dispatching(MemoryStore(), SyntheticStore()) as dispatcher:
        file = dispatcher.file(ONE)
        dispatcher.reconfigure(changed(FAST), lambda _queue: True)
        settings = dispatcher._settings
        assert (settings.uploads_max, settings.bundle_bytes) == (
            FAST.uploads_max,
            FAST.bundle_bytes,
        )
        assert {name for name in CHANGEABLE if getattr(settings, name) != getattr(FAST, name)} == {
            *CHANGEABLE
        } - {"pauses"}
        for policy in (file.policy, dispatcher.file(TWO).policy):
            assert (policy.segment_bytes_max, policy.segment_age_ms_max) == (77, 777_000)
            assert policy.freshness_s == dispatcher._commits._settings.freshness_s == 7.0
        throttles = (
            dispatcher._read_throttle,
            dispatcher._commits._throttle,
            dispatcher._merging._throttle,
        )
        assert [throttle._rate for throttle in throttles] == [7, 70, 70]
        packer_of = dispatcher._merging._merger.packer_of
        packer = packer_of("two")
        assert packer_of("one") is None
        assert packer is not None
        assert packer is packer_of("two"), "it keeps what it has learned of a topic"
        assert packer._level == 9
        assert dispatcher._merging._policy.compresses


def test_another_rate_does_not_wait_for_what_was_taken_at_the_old_one():
    clock = ManualClock()
    throttle = Throttle(1, clock, threading.Event())
    throttle.take(1000)  # delays those after it
    throttle.set_rate(1_000_000)
    before = clock.monotonic_s()
    throttle.take(1)
    assert clock.monotonic_s() == before
