"""The request layer, one decision at a time: the test runs the calls and moves the clock."""

from __future__ import annotations

from concurrent.futures import CancelledError, wait

import pytest
from support.transfers import OBJECT, Rig

from backends.base import ByteRange
from backends.errors import ObjectNotFoundError, UnavailableError
from fetcher.requests import BusyError
from fetcher.transfers import result_by
from tiered.errors import ClosedError, StoreUnavailableError

HERE = ByteRange(10, 20)


def test_a_range_is_read():
    rig = Rig()
    found = rig.ask("s", "a", HERE, urgent=True)
    assert not found.done()
    rig.executor.run_all()
    assert found.result(0) == OBJECT[10:20]
    stats = rig.transfers.stats
    assert (stats.asked, stats.requests, stats.received_bytes, stats.lost_bytes) == (1, 1, 10, 0)
    assert (stats.running, stats.running_bytes, stats.pending) == (0, 0, 0)


def test_equal_wishes_share_a_request():
    rig = Rig()
    asked = [rig.ask(stream, "a", HERE, urgent=False) for stream in range(5)]
    assert len(rig.executor.calls) == 1
    asked[0].cancel()
    rig.executor.run_all()
    assert asked[0].cancelled()
    assert [one.result(0) for one in asked[1:]] == [OBJECT[10:20]] * 4
    assert rig.transfers.stats.joined == 4


def test_the_next_is_sent_by_who_finishes():
    rig = Rig(requests_in_flight_max=2)
    asked = [rig.ask("s", "a", ByteRange(at, at + 1), urgent=False) for at in range(0, 50, 10)]
    assert len(rig.executor.calls) == 2
    rig.executor.run(1)
    assert len(rig.executor.calls) == 2
    assert [one.done() for one in asked] == [False, True, False, False, False]
    rig.executor.run_all()
    assert [one.result(0) for one in asked] == [OBJECT[at : at + 1] for at in range(0, 50, 10)]


def test_urgent_goes_first_and_hurry_makes_urgent():
    rig = Rig(requests_in_flight_max=1)
    ask = rig.ask
    ask("s", "a", HERE, urgent=False)
    waiting = [ask("s", key, HERE, urgent=False) for key in "bcd"]
    ask("t", "e", HERE, urgent=True)
    rig.transfers.hurry(waiting[2])
    ask("t", "c", HERE, urgent=True)
    rig.executor.run_all()
    assert "".join(key for key, *_ in rig.store.reads) == "aedcb"


def test_bytes_in_flight_are_bounded_and_a_large_one_passes_alone():
    rig = Rig(bytes_in_flight_max=100)
    ask = rig.ask
    ask("s", "a", ByteRange(0, 60), urgent=True)
    ask("s", "b", ByteRange(0, 500), urgent=True)
    ask("s", "c", ByteRange(0, 10), urgent=True)
    assert rig.transfers.stats.running_bytes == 60, "what does not fit holds up all behind it"
    rig.executor.run()
    assert rig.transfers.stats.running_bytes == 500
    rig.executor.run()
    assert rig.transfers.stats.running_bytes == 10
    rig.executor.run()


def test_neighbours_that_wait_become_one_request():
    rig = Rig(requests_in_flight_max=1, coalesce_gap_bytes=5, coalesced_bytes_max=100)
    ask = rig.ask
    ask("s", "b", HERE, urgent=True)
    first = [ask("s", "a", ByteRange(at, at + 10), urgent=True) for at in (0, 10, 25)]
    other = ask("t", "a", ByteRange(35, 45), urgent=True)
    far = ask("s", "a", ByteRange(51, 60), urgent=True)
    ahead = ask("s", "a", ByteRange(45, 51), urgent=False)
    rig.executor.run_all()
    assert rig.store.reads[1:] == [("a", 0, 45), ("a", 51, 60), ("a", 45, 51)]
    assert [one.result(0) for one in first] == [OBJECT[0:10], OBJECT[10:20], OBJECT[25:35]]
    assert other.result(0) == OBJECT[35:45]
    assert far.result(0) == OBJECT[51:60]
    assert ahead.result(0) == OBJECT[45:51]
    stats = rig.transfers.stats
    assert (stats.coalesced, stats.lost_bytes) == (3, 5)


def test_merging_is_not_seen_in_errors():
    """A range behind the end fails alone; those beside it are right."""
    rig = Rig(requests_in_flight_max=1, coalesce_gap_bytes=5, coalesced_bytes_max=1 << 20)
    ask = rig.ask
    size = len(OBJECT)
    ask("s", "b", HERE, urgent=True)
    good = ask("s", "a", ByteRange(size - 10, size), urgent=True)
    beyond = ask("s", "a", ByteRange(size, size + 10), urgent=True)
    given_up = ask("s", "a", ByteRange(size - 20, size - 10), urgent=True)
    rig.executor.run()
    given_up.cancel()
    rig.executor.run_all()
    assert good.result(0) == OBJECT[-10:]
    assert type(beyond.exception(0)).__name__ == "InvalidRangeError"
    assert [read[1:] for read in rig.store.reads[2:]] == [(size - 10, size), (size, size + 10)]


def test_what_the_store_raises_comes_to_all_who_asked():
    rig = Rig(requests_in_flight_max=1, coalesced_bytes_max=100)
    ask = rig.ask
    rig.store.errors["b"] = [UnavailableError("busy"), ValueError("a defect")]
    ask("s", "a", HERE, urgent=True)
    merged = [ask("s", "b", ByteRange(at, at + 10), urgent=True) for at in (0, 10)]
    rig.executor.run(0)
    later = ask("s", "b", ByteRange(90, 99), urgent=True)
    missing = ask("s", "nowhere", HERE, urgent=True)
    rig.executor.run_all()
    assert {type(one.exception(0)) for one in merged} == {UnavailableError}
    assert isinstance(later.exception(0), ValueError), "never a future without an end"
    assert isinstance(missing.exception(0), ObjectNotFoundError)
    assert rig.transfers.stats.errors == {
        "UnavailableError": 1,
        "ValueError": 1,
        "ObjectNotFoundError": 1,
    }
    again = ask("s", "b", HERE, urgent=True)
    rig.executor.run_all()
    assert again.result(0) == OBJECT[10:20]


def test_less_than_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch):
    rig = Rig()
    monkeypatch.setattr(rig.store, "get", lambda key, byte_range: b"short")
    found = rig.ask("s", "a", HERE, urgent=True)
    rig.executor.run_all()
    assert type(found.exception(0)).__name__ == "ShortReadError"


def test_what_was_not_sent_never_is():
    rig = Rig(requests_in_flight_max=1)
    ask = rig.ask
    sent = ask("s", "a", HERE, urgent=True)
    waiting = ask("s", "b", HERE, urgent=True)
    shared = [ask(stream, "c", HERE, urgent=True) for stream in "st"]
    rig.transfers.cancel(sent)
    rig.transfers.cancel(waiting)
    rig.transfers.cancel(shared[0])
    rig.executor.run_all()
    assert [key for key, *_ in rig.store.reads] == ["a", "c"]
    assert sent.cancelled()
    assert waiting.cancelled()
    assert shared[1].result(0) == OBJECT[10:20]
    assert not shared[1].cancel(), "it has ended"
    assert wait([waiting], 0).done == {waiting}
    stats = rig.transfers.stats
    assert (stats.cancelled, stats.lost_bytes) == (3, 10)


def test_a_cancelled_one_makes_room_for_what_is_behind_it():
    rig = Rig(bytes_in_flight_max=100)
    ask = rig.ask
    ask("s", "a", ByteRange(0, 60), urgent=True)
    large = ask("s", "b", ByteRange(0, 90), urgent=True)
    ask("s", "c", ByteRange(0, 10), urgent=True)
    assert len(rig.executor.calls) == 1
    large.cancel()
    assert len(rig.executor.calls) == 2
    rig.executor.run_all()


def test_who_waits_no_more_frees_itself_and_not_the_slot():
    rig = Rig(requests_in_flight_max=1)
    late = rig.ask("s", "a", HERE, urgent=True)
    with pytest.raises(StoreUnavailableError, match="before the deadline"):
        result_by(0.0, rig.clock, late, "a")
    late.cancel()
    assert rig.transfers.stats.running == 1
    again = rig.ask("s", "a", HERE, urgent=True)
    assert rig.transfers.stats.pending == 1, "it does not join the request that is late"
    rig.executor.run_all()
    assert again.result(0) == OBJECT[10:20]
    assert [key for key, *_ in rig.store.reads] == ["a", "a"]


def test_the_queue_has_a_limit_and_read_ahead_cannot_fill_it():
    rig = Rig(requests_in_flight_max=1, pending_max=3)
    ask = rig.ask
    ask("s", "a", HERE, urgent=True)
    asked = [ask("s", key, HERE, urgent=False) for key in "bcd"]
    with pytest.raises(BusyError):
        ask("s", "e", HERE, urgent=False)
    asked += [ask("s", key, HERE, urgent=True) for key in "efg"]
    with pytest.raises(StoreUnavailableError, match="wait for the object store"):
        ask("s", "h", HERE, urgent=True)
    asked.append(ask("s", "g", HERE, urgent=False))
    rig.executor.run_all()
    assert all(one.result(0) == OBJECT[10:20] for one in asked)
    assert rig.transfers.stats.refused == 2


def test_rates_hold_up_and_the_clock_lets_go():
    """A bucket of one and the debt of another are free; then one each tenth of a second."""
    rig = Rig(requests_per_s=10)
    for key in "abcd":
        rig.ask("s", key, HERE, urgent=True)
    assert len(rig.executor.calls) == 1
    while (pause_s := rig.transfers.tick()) is not None:
        rig.clock.advance(pause_s)
    assert len(rig.executor.calls) == 4
    assert rig.clock.monotonic_s() == pytest.approx(0.2, abs=0.01)
    rig.executor.run_all()


def test_byte_rate_counts_what_was_asked_for():
    rig = Rig(bytes_per_s=1000)
    rig.ask("s", "a", ByteRange(0, 500), urgent=True)
    rig.ask("s", "b", ByteRange(0, 10), urgent=True)
    pause_s = rig.transfers.tick()
    assert pause_s == pytest.approx(0.4)
    rig.executor.run_all()
    rig.clock.advance(0.41)
    rig.transfers.tick()
    rig.executor.run_all()
    assert len(rig.store.reads) == 2


def test_wake_is_called_when_something_is_due_sooner():
    rig = Rig(hedge_budget=0.5, hedge_floor_s=9.0)
    assert rig.transfers.tick() is None
    rig.ask("s", "a", HERE, urgent=True)
    assert rig.wakes == 1
    rig.transfers.tick()
    rig.ask("s", "b", HERE, urgent=True)
    assert rig.wakes == 1, "it is slow no sooner than the other"
    rig.executor.run_all()


def test_callbacks_may_ask_again():
    rig = Rig(requests_in_flight_max=1)
    found: list[bytes] = []

    def follow(at: int) -> None:
        if at < 100:
            future = rig.ask("s", "a", ByteRange(at, at + 10), urgent=True)
            future.add_done_callback(lambda done: found.append(done.result()) or follow(at + 10))

    follow(0)
    rig.executor.run_all()
    assert b"".join(found) == OBJECT[:100]


def test_close_cancels_what_waits_and_drops_what_is_late():
    rig = Rig(requests_in_flight_max=1)
    ask = rig.ask
    sent, waiting = (ask("s", key, HERE, urgent=True) for key in "ab")
    rig.transfers.close(limit_s=5.0)
    assert rig.clock.monotonic_s() == 5.0, "it waited so long and no longer"
    for one in (sent, waiting):
        with pytest.raises(CancelledError):
            one.result(0)
    with pytest.raises(ClosedError):
        ask("s", "a", HERE, urgent=True)
    rig.executor.run_all()
    assert [key for key, *_ in rig.store.reads] == ["a"]
    assert rig.transfers.tick() is None
    rig.transfers.close()
    assert rig.clock.monotonic_s() == 5.0


def test_an_executor_that_was_shut_down_ends_every_future():
    rig = Rig(requests_in_flight_max=2)
    ask = rig.ask
    asked = [ask("s", "a", ByteRange(at, at + 1), urgent=False) for at in range(0, 3000, 2)]
    rig.executor.is_shut = True
    rig.executor.run_all()
    assert all(one.done() for one in asked)
    assert sum(one.exception(0) is None for one in asked) == 2
    assert rig.transfers.stats.running == 0
