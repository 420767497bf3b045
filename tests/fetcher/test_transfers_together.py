"""Several ranges asked for at once: with one call to the executor where the store is quick, and none or all of them."""

from __future__ import annotations

import pytest
from support.transfers import OBJECT, Rig

from backends.base import ByteRange
from fetcher.requests import BusyError
from tiered.errors import ClosedError

RANGES = [("s", "a", ByteRange(0, 5)), ("s", "b", ByteRange(7, 9)), ("s", "c", ByteRange(1, 2))]
WANTED = [OBJECT[0:5], OBJECT[7:9], OBJECT[1:2]]


def ask(rig: Rig, *, urgent: bool = True):
    return rig.transfers.ask_all(RANGES, urgent=urgent)


def learn(rig: Rig, seconds: float) -> None:
    """Let it find out how long a request takes."""
    for number in range(20):
        rig.ask("x", "h", ByteRange(number, number + 1), urgent=True)
        run = rig.executor.calls.pop(0)
        get, clock = rig.store.get, rig.clock

        def slow_get(key, byte_range, get=get, clock=clock) -> bytes:
            clock.advance(seconds)
            return get(key, byte_range)

        rig.store.get = slow_get  # type: ignore[method-assign]
        run()
        rig.store.get = get  # type: ignore[method-assign]


def test_until_it_is_known_how_long_they_take_each_gets_a_thread():
    rig = Rig()
    found = ask(rig)
    assert len(rig.executor.calls) == 3
    rig.executor.run(2)
    assert [one.done() for one in found] == [False, False, True]
    rig.executor.run_all()
    assert [one.result(0) for one in found] == WANTED


def test_quick_ones_share_a_thread_and_slow_ones_do_not():
    for seconds, calls in ((0.0005, 1), (0.001, 3)):
        rig = Rig()
        learn(rig, seconds)
        found = ask(rig)
        assert len(rig.executor.calls) == calls
        assert rig.transfers.stats.running == 3
        rig.executor.run_all()
        assert [one.result(0) for one in found] == WANTED
        assert rig.transfers.stats.running == 0


def test_one_that_is_stuck_is_asked_again_and_so_are_those_behind_it():
    rig = Rig(hedge_budget=1.0)
    learn(rig, 0.0001)
    found = ask(rig)
    (stuck,) = rig.executor.calls
    first = rig.store.get

    def hang(key, byte_range) -> bytes:
        rig.store.get = first  # type: ignore[method-assign]
        rig.clock.advance(0.2)
        rig.executor.calls.clear()
        rig.transfers.tick()
        rig.executor.run_all()
        assert [one.result(0) for one in found] == WANTED
        return first(key, byte_range)

    rig.store.get = hang  # type: ignore[method-assign]
    stuck()
    assert rig.transfers.stats.hedge_wins == 3
    assert rig.transfers.stats.running == 0


def test_an_error_is_that_of_one():
    rig = Rig()
    learn(rig, 0.0001)
    rig.store.errors["b"] = [OSError("b")]
    found = ask(rig)
    rig.executor.run_all()
    assert (found[0].result(0), found[2].result(0)) == (WANTED[0], WANTED[2])
    assert isinstance(found[1].exception(0), OSError)


def test_none_is_asked_for_when_not_all_can_be():
    rig = Rig(requests_in_flight_max=1, pending_max=2)
    held = rig.ask("s", "a", ByteRange(50, 60), urgent=True)
    with pytest.raises(BusyError):
        rig.transfers.ask_all([*RANGES, ("s", "d", ByteRange(0, 1))], urgent=True)
    assert rig.transfers.stats.pending == 0
    rig.executor.run_all()
    assert held.done()
    rig.transfers.close()
    with pytest.raises(ClosedError):
        ask(rig)


def test_neighbours_asked_for_at_once_are_one_request_though_they_are_of_several_readers():
    rig = Rig(coalesced_bytes_max=100)
    wanted = [(f"reader {n}", "a", ByteRange(2 * n, 2 * n + 2)) for n in range(5)]
    found = rig.transfers.ask_all(wanted, urgent=True)
    assert len(rig.executor.calls) == 1
    rig.executor.run_all()
    assert [bytes(one.result(0)) for one in found] == [OBJECT[2 * n : 2 * n + 2] for n in range(5)]
